//! One process for a store, which serves the disks in it: a confined one, for several mounts.
//!
//! ```text
//!   starter                               store process
//!     │── spawn, control socket as its fd 0 ──▶│
//!     │── the store's descriptor, or a session │
//!     │   of the disk that it is on ──────────▶│ confines itself, opens the store
//!     │── name, socket of a session ──────────▶│ finds the object
//!     │                       worker ══ disk contract ══▶ a thread for each lane
//!     │── number ─────────────────────────────▶│ the mark of the last chain taken, once it ended
//!     │── snapshot, clone, .. ────────────────▶│ a thread changes the store; asked until it is done
//!     │── a pipe ─────────────────────────────▶│ a thread writes what there is into it
//! ```
//!
//! Law 1: the process has the store's descriptor or session, its control socket and its sessions,
//! and no other power. It is confined before a byte of the store is read.
//! Law 2: a disk that is written has one session; a second one is refused.
//! Law 3: it ends when its starter does and no disk is served any more; then all is in a
//! checkpoint.
//! Law 4: what comes from its starter is one message, whole and of a known form, or the end;
//! what comes from a worker is the disk contract, and one worker's breach ends that worker's
//! session alone.

mod disk_command;
mod listing;
mod server;

pub use disk_command::DiskCommand;
pub(crate) use listing::receive as receive_list;
pub use listing::{ObjectEntry, list};
pub use server::run;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use draconis_device::{Disk, RemoteDisk};
use draconis_exchange::channel::session::{Session, SessionConfig, broker};
use draconis_exchange::contract::disk;
use draconis_exchange::descriptors;
use draconis_exchange::heap::arena::Class;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use crate::disk::{DISK_LANES, add_disk_lanes as add_disk};
use crate::remote_disk::DiskServerThread;

/// How long opening a store, or a disk in it, may take.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// The same of a store that is elsewhere: as long as several requests may take that are tried again.
const OPEN_REMOTE_TIMEOUT: Duration = Duration::from_secs(600);
/// How long either side of a disk waits for the other, which is alive: as long as a disk may
/// take. A death is noticed at once.
const PATIENCE: Duration = Duration::MAX;
/// Private memory that the process may have.
const MEMORY_BYTES: u64 = 2 << 30;

/// The longest message, in bytes.
const MESSAGE_BYTES: usize = 2048;
// The first byte of what the starter says.
const OPEN: u8 = b'o';
const OPEN_READ_ONLY: u8 = b'r';
const OPEN_REMOTE: u8 = b's';
const ATTACH: u8 = b'a';
const ATTACH_READ_ONLY: u8 = b'b';
const WAIT_DETACHED: u8 = b'e';
const CHANGE: u8 = b'c';
const POLL_CHANGE: u8 = b'd';
const LIST: u8 = b'l';
// The first byte of each answer: a number follows, or a sentence.
const DONE: u8 = 0;
const REFUSED: u8 = 1;

/// Why there is no process, or no disk.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The process could not be started, or a session not made.
    #[error("cannot start a process for the store: {0}")]
    Spawn(#[from] std::io::Error),
    /// It said no.
    #[error("{0}")]
    Refused(String),
    /// It is not there any more, or does not answer.
    #[error("the process that serves the store is gone")]
    Gone,
}

/// The process of a store, as the one sees it who started it.
pub struct StoreProcess {
    child: Child,
    pidfd: OwnedFd,
    /// One question at a time.
    control: Mutex<OwnedFd>,
    /// The disk below a store that is in no file here.
    backing_disk: Mutex<Option<DiskServerThread>>,
    /// How long an answer may take.
    patience: Duration,
}

/// A disk that the process serves, for the worker to be told of.
#[derive(Debug)]
pub struct AttachedDisk {
    /// Where the worker takes its session up: see [`open_session_disk`].
    pub socket: OwnedFd,
    /// What [`StoreProcess::wait_detached`] is asked about it.
    pub number: u64,
}

impl StoreProcess {
    /// Starts `program`, which is draconis, for the store behind `store`: open for reading and
    /// writing, or for reading alone if it is `read_only`, and claimed.
    ///
    /// # Errors
    /// See [`StoreError`]; what the store is refused for.
    pub fn start(program: &Path, store: OwnedFd, read_only: bool) -> Result<Self, StoreError> {
        let process = Self::spawn(program, OPEN_TIMEOUT)?;
        let how = if read_only { OPEN_READ_ONLY } else { OPEN };
        process.ask(&[how], &[store.as_fd()])?;
        Ok(process)
    }

    /// The same for a store on `disk`, which this process serves to that one.
    ///
    /// # Errors
    /// As [`StoreProcess::start`].
    pub fn start_on_disk(program: &Path, disk: Arc<dyn Disk>) -> Result<Self, StoreError> {
        let mut process = Self::spawn(program, OPEN_REMOTE_TIMEOUT)?;
        let (hosted, socket) = DiskServerThread::new(disk, process.pidfd.try_clone()?)?;
        process.backing_disk = Mutex::new(Some(hosted));
        if let Err(error) = process.ask(&[OPEN_REMOTE], &[socket.as_fd()]) {
            process.kill();
            // Who hears of it may want to use the disk at once.
            process.close()?;
            return Err(error);
        }
        Ok(process)
    }

    fn spawn(program: &Path, patience: Duration) -> Result<Self, StoreError> {
        let (control, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(std::io::Error::from)?;
        let child = Command::new(program)
            .args(["store-process", "--memory", &MEMORY_BYTES.to_string()])
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()?;
        // A child that was not waited for keeps its number.
        let pid = Pid::from_raw(child.id().cast_signed())
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotFound))?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(std::io::Error::from)?;
        let (control, below) = (Mutex::new(control), Mutex::default());
        Ok(Self { child, pidfd, control, backing_disk: below, patience })
    }

    /// What ended all writing of the disk below, if that is served here and something did.
    pub fn failure(&self) -> Option<String> {
        let below = self.backing_disk.lock().unwrap_or_else(PoisonError::into_inner);
        below.as_ref().and_then(DiskServerThread::failure)
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it serve the disk `name` to the process that `guest` is a pidfd of.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: no such disk, or in use.
    pub fn attach(
        &self,
        name: &str,
        read_only: bool,
        guest: BorrowedFd<'_>,
    ) -> Result<AttachedDisk, StoreError> {
        let mut plan = SessionConfig {
            static_lanes: 0,
            host_lanes: 0,
            guest_lanes: 0,
            host: vec![Class { slot_bytes: 4096, slots: 1 }],
            guest: vec![],
        };
        add_disk(&mut plan);
        let (host, socket) =
            broker(&plan, self.pidfd.as_fd(), guest).map_err(std::io::Error::from)?;
        let how = if read_only { ATTACH_READ_ONLY } else { ATTACH };
        let question = [&[how], name.as_bytes()].concat();
        if question.len() > MESSAGE_BYTES {
            return Err(StoreError::Refused("no disk has so long a name".into()));
        }
        let number = self.ask(&question, &[host.as_fd()])?;
        Ok(AttachedDisk { socket, number })
    }

    /// Waits until a disk is served no more, whose worker has closed it or is dead: the mark of
    /// the last chain that was taken for it ([`draconis_device::SubmitOptions`]).
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it still is, after a while.
    pub fn wait_detached(&self, number: u64) -> Result<u64, StoreError> {
        self.ask(&[&[WAIT_DETACHED], &number.to_le_bytes()[..]].concat(), &[])
    }

    /// Has it change which disks and snapshots there are, and waits until that is durable.
    ///
    /// # Errors
    /// [`StoreError::Refused`] for what is in use, not there, or does not fit.
    pub fn change(&self, change: &DiskCommand) -> Result<(), StoreError> {
        let text = serde_json::to_vec(change).map_err(std::io::Error::from)?;
        let question = [&[CHANGE], &text[..]].concat();
        if question.len() > MESSAGE_BYTES {
            return Err(StoreError::Refused("no disk has so long a name".into()));
        }
        let number = self.ask(&question, &[])?;
        // Others may ask between: what it takes may be long.
        while self.ask(&[&[POLL_CHANGE], &number.to_le_bytes()[..]].concat(), &[])? != 0 {}
        Ok(())
    }

    /// Has it write what the store has into a pipe.
    ///
    /// # Errors
    /// As [`StoreProcess::attach`].
    pub fn list(&self, into: BorrowedFd<'_>) -> Result<(), StoreError> {
        self.ask(&[LIST], &[into]).map(drop)
    }

    /// Asks, and waits for the number that is the answer.
    fn ask(&self, question: &[u8], fds: &[BorrowedFd<'_>]) -> Result<u64, StoreError> {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        descriptors::send(&*control, question, fds).map_err(|_| StoreError::Gone)?;
        let timeout = self.patience.try_into().ok();
        let mut ready = [PollFd::new(&*control, PollFlags::IN)];
        if !matches!(poll(&mut ready, timeout.as_ref()), Ok(1)) {
            return Err(StoreError::Gone);
        }
        let mut answer = [0; MESSAGE_BYTES];
        let got = descriptors::receive(&*control, &mut answer, RecvFlags::DONTWAIT);
        let len = got.map_err(|_| StoreError::Gone)?.len;
        match answer.get(..len).and_then(<[u8]>::split_first) {
            Some((&DONE, number)) => match number.try_into() {
                Ok(number) => Ok(u64::from_le_bytes(number)),
                Err(_) => Err(StoreError::Gone),
            },
            Some((_, said)) => {
                let said = String::from_utf8_lossy(said);
                Err(StoreError::Refused(said.chars().filter(|c| !c.is_control()).collect()))
            }
            None => Err(StoreError::Gone),
        }
    }

    /// Ends it at once, as a fault would.
    pub fn kill(&self) {
        // It may have ended by itself, which is as good.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Tells it that there will be no more disks, and waits until it has ended: when none is
    /// served any more. The disk below is closed then, too.
    ///
    /// # Errors
    /// What the system says.
    pub fn close(&self) -> std::io::Result<()> {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        // It may have ended by itself.
        let _ = rustix::net::shutdown(&*control, rustix::net::Shutdown::Both);
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], None)?;
        let below = self.backing_disk.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(below) = below {
            below.join();
        }
        Ok(())
    }

    /// Waits until it has ended by itself: when no disk is served any more.
    pub fn join(self) -> std::io::Result<std::process::ExitStatus> {
        let Self { mut child, control, .. } = self;
        drop(control);
        child.wait()
    }
}

/// The disk of a session that [`StoreProcess::attach`] made, in the worker. What it asks goes to
/// the process; when that dies, everything is answered with [`draconis_device::Error::ServiceEnded`].
///
/// # Errors
/// When the process does not answer.
pub fn open_session_disk(session: &Arc<Session>) -> Result<RemoteDisk, draconis_device::Error> {
    let ends: Vec<_> =
        (0..DISK_LANES).filter_map(|lane| session.client::<disk::Disk>(lane)).collect();
    if ends.is_empty() {
        return Err(draconis_device::Error::ServiceEnded);
    }
    let blocks = session.clone();
    let disk = RemoteDisk::new(ends, Some(Box::new(move |len| blocks.block(len))), PATIENCE)?;
    Ok(disk.away_at_times())
}
