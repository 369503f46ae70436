//! The store process: one confined process per store, which serves its disks to several mounts.
//!
//! ```text
//!   starter                               store process
//!     │── spawn, control socket as its fd 0 ──▶│
//!     │── the store's descriptor, or a session │
//!     │   of the disk that it is on ──────────▶│ confines itself, opens the store
//!     │── name, socket of a session ──────────▶│ finds the object
//!     │                       worker ══ disk contract ══▶ a thread for each lane
//!     │── number ─────────────────────────────▶│ mark of the last accepted chain, once detached
//!     │── snapshot, clone, .. ────────────────▶│ a thread executes it; polled until it is done
//!     │── a pipe ─────────────────────────────▶│ a thread writes the list of objects into it
//! ```
//!
//! Law 1: the process has the store's descriptor or session, its control socket and its sessions,
//! and no other rights. It is confined before a byte of the store is read.
//! Law 2: a writable disk has one session; a second one is refused.
//! Law 3: it ends once its starter has ended and no disk is served any more. Everything is in a
//! checkpoint then.
//! Law 4: its starter sends complete messages of known forms, or closes the socket; a worker speaks
//! the disk contract. A worker's protocol violation ends only that worker's session.

mod disk_command;
mod listing;
mod server;

pub use disk_command::DiskCommand;
pub(crate) use listing::receive_listing as receive_list;
pub use listing::{ObjectEntry, list_objects};
pub use server::run_store_process;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use draconis_device::Disk;
use draconis_exchange::channel::session::broker;
use draconis_exchange::descriptors;
use draconis_types::lock::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

pub use crate::disk::open_session_disk;
use crate::disk::{DISK_LANES, disk_session};
use crate::remote_disk::DiskServerThread;

/// Timeout for opening a store, or a disk in it.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for opening a remote store: allows for several requests with retries.
const OPEN_REMOTE_TIMEOUT: Duration = Duration::from_secs(600);
/// Peer timeout of both sides of a disk: none, since a disk may take arbitrarily long. A death is
/// noticed at once.
const NO_TIMEOUT: Duration = Duration::MAX;
/// Limit of the process's private memory.
const PRIVATE_MEMORY_LIMIT_BYTES: u64 = 2 << 30;

/// Maximum message length, in bytes.
const MAX_MESSAGE_BYTES: usize = 2048;
// First byte of the starter's messages.
const REQUEST_OPEN: u8 = b'o';
const REQUEST_OPEN_READ_ONLY: u8 = b'r';
const REQUEST_OPEN_RAID_MEMBER: u8 = b'm';
const REQUEST_OPEN_REMOTE: u8 = b's';
const REQUEST_ATTACH: u8 = b'a';
const REQUEST_ATTACH_READ_ONLY: u8 = b'b';
const REQUEST_WAIT_DETACHED: u8 = b'e';
const REQUEST_COMMAND: u8 = b'c';
const REQUEST_POLL_COMMAND: u8 = b'd';
const REQUEST_LIST: u8 = b'l';
// First byte of each reply: a number or an error message follows.
const REPLY_DONE: u8 = 0;
const REPLY_REFUSED: u8 = 1;

/// Errors of the store process and its disks.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The process could not be started, or a session not be created.
    #[error("cannot start a process for the store: {0}")]
    Spawn(#[from] std::io::Error),
    /// It refused the request.
    #[error("{0}")]
    Refused(String),
    /// It has ended, or does not answer.
    #[error("the process that serves the store is gone")]
    Gone,
}

/// Access to the file or device of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreAccess {
    /// Read.
    Read,
    /// Read and write; a member of a RAID is only read.
    Write,
    /// Read and write, also a member of a RAID.
    WriteRaidMember,
}

/// The process of a store, as seen by its starter.
pub struct StoreProcess {
    child: Child,
    pidfd: OwnedFd,
    /// One request at a time.
    control: Mutex<OwnedFd>,
    /// The backing disk of a store that is in no local file.
    backing_disk: Mutex<Option<DiskServerThread>>,
    /// Timeout of a reply.
    reply_timeout: Duration,
}

/// A disk that the process serves, to be passed to the worker.
#[derive(Debug)]
pub struct AttachedDisk {
    /// Socket from which the worker accepts its session: see [`open_session_disk`].
    pub socket: OwnedFd,
    /// Number of the disk for [`StoreProcess::wait_detached`].
    pub number: u64,
}

impl StoreProcess {
    /// Starts `program`, which is draconis, for the store behind `store`. That is claimed, and open as
    /// `access` says.
    ///
    /// # Errors
    /// See [`StoreError`]; the reason why the store is refused.
    pub fn start(program: &Path, store: OwnedFd, access: StoreAccess) -> Result<Self, StoreError> {
        let process = Self::spawn(program, OPEN_TIMEOUT)?;
        let how = match access {
            StoreAccess::Read => REQUEST_OPEN_READ_ONLY,
            StoreAccess::Write => REQUEST_OPEN,
            StoreAccess::WriteRaidMember => REQUEST_OPEN_RAID_MEMBER,
        };
        process.send_request(&[how], &[store.as_fd()])?;
        Ok(process)
    }

    /// Starts it for a store on `disk`, which this process serves to it.
    ///
    /// # Errors
    /// As [`StoreProcess::start`].
    pub fn start_on_disk(program: &Path, disk: Arc<dyn Disk>) -> Result<Self, StoreError> {
        let mut process = Self::spawn(program, OPEN_REMOTE_TIMEOUT)?;
        let (hosted, socket) = DiskServerThread::new(disk, process.pidfd.try_clone()?)?;
        process.backing_disk = Mutex::new(Some(hosted));
        if let Err(error) = process.send_request(&[REQUEST_OPEN_REMOTE], &[socket.as_fd()]) {
            process.kill();
            // The caller may want to use the disk at once.
            process.close()?;
            return Err(error);
        }
        Ok(process)
    }

    fn spawn(program: &Path, reply_timeout: Duration) -> Result<Self, StoreError> {
        let (control, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(std::io::Error::from)?;
        let child = Command::new(program)
            .args(["store-process", "--memory", &PRIVATE_MEMORY_LIMIT_BYTES.to_string()])
            .args(crate::verbosity::verbosity_argument())
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()?;
        // A child that is not reaped keeps its pid.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let pidfd = pidfd.map_err(std::io::Error::from)?;
        let (control, backing_disk) = (Mutex::new(control), Mutex::default());
        Ok(Self { child, pidfd, control, backing_disk, reply_timeout })
    }

    /// Returns the error that ended all writing of the backing disk, if that is served here.
    pub fn failure(&self) -> Option<String> {
        let below = self.backing_disk.lock();
        below.as_ref().and_then(DiskServerThread::failure)
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it serve the disk `name` to the process whose pidfd is `guest`.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: no such disk, or in use.
    pub fn attach(
        &self,
        name: &str,
        read_only: bool,
        guest: BorrowedFd<'_>,
    ) -> Result<AttachedDisk, StoreError> {
        let (host, socket) =
            broker(&disk_session(), self.pidfd.as_fd(), guest).map_err(std::io::Error::from)?;
        let how = if read_only { REQUEST_ATTACH_READ_ONLY } else { REQUEST_ATTACH };
        let question = [&[how], name.as_bytes()].concat();
        if question.len() > MAX_MESSAGE_BYTES {
            return Err(StoreError::Refused("no disk has so long a name".into()));
        }
        let number = self.send_request(&question, &[host.as_fd()])?;
        Ok(AttachedDisk { socket, number })
    }

    /// Waits until the disk is not served any more, because its worker has closed it or is dead.
    /// Returns the mark of its last accepted chain ([`draconis_device::SubmitOptions`]).
    ///
    /// # Errors
    /// [`StoreError::Refused`] if it is still served after a timeout.
    pub fn wait_detached(&self, number: u64) -> Result<u64, StoreError> {
        self.send_request(&[&[REQUEST_WAIT_DETACHED], &number.to_le_bytes()[..]].concat(), &[])
    }

    /// Has it execute a command on disks or snapshots, and waits until that is durable.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if a disk is in use or missing, or the command is invalid.
    pub fn execute_command(&self, change: &DiskCommand) -> Result<(), StoreError> {
        let text = serde_json::to_vec(change).map_err(std::io::Error::from)?;
        let question = [&[REQUEST_COMMAND], &text[..]].concat();
        if question.len() > MAX_MESSAGE_BYTES {
            return Err(StoreError::Refused("no disk has so long a name".into()));
        }
        let number = self.send_request(&question, &[])?;
        // Polls, so that others can send requests meanwhile: the command may take long.
        while self
            .send_request(&[&[REQUEST_POLL_COMMAND], &number.to_le_bytes()[..]].concat(), &[])?
            != 0
        {}
        Ok(())
    }

    /// Has it write the list of the store's objects into a pipe.
    ///
    /// # Errors
    /// As [`StoreProcess::attach`].
    pub fn list_objects_into(&self, into: BorrowedFd<'_>) -> Result<(), StoreError> {
        self.send_request(&[REQUEST_LIST], &[into]).map(drop)
    }

    /// Sends a request, and waits for the number in the reply.
    fn send_request(&self, question: &[u8], fds: &[BorrowedFd<'_>]) -> Result<u64, StoreError> {
        let control = self.control.lock();
        descriptors::send_with_fds(&*control, question, fds).map_err(|_| StoreError::Gone)?;
        let timeout = self.reply_timeout.try_into().ok();
        let mut ready = [PollFd::new(&*control, PollFlags::IN)];
        if !matches!(poll(&mut ready, timeout.as_ref()), Ok(1)) {
            return Err(StoreError::Gone);
        }
        let mut answer = [0; MAX_MESSAGE_BYTES];
        let got = descriptors::receive_with_fds(&*control, &mut answer, RecvFlags::DONTWAIT);
        let len = got.map_err(|_| StoreError::Gone)?.len;
        match answer.get(..len).and_then(<[u8]>::split_first) {
            Some((&REPLY_DONE, number)) => match number.try_into() {
                Ok(number) => Ok(u64::from_le_bytes(number)),
                Err(_) => Err(StoreError::Gone),
            },
            Some((_, text)) => {
                let text = String::from_utf8_lossy(text);
                Err(StoreError::Refused(text.chars().filter(|c| !c.is_control()).collect()))
            }
            None => Err(StoreError::Gone),
        }
    }

    /// Kills it, as a fault would.
    pub fn kill(&self) {
        // It may have ended already, which is equivalent.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Announces that no more disks will be attached, and waits until it has ended, once no disk is
    /// served any more. The backing disk is closed then, too.
    ///
    /// # Errors
    /// The system's error.
    pub fn close(&self) -> std::io::Result<()> {
        let control = self.control.lock();
        // It may have ended already.
        let _ = rustix::net::shutdown(&*control, rustix::net::Shutdown::Both);
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], None)?;
        let below = self.backing_disk.lock().take();
        if let Some(below) = below {
            below.join();
        }
        Ok(())
    }

    /// Waits until it has ended on its own, once no disk is served any more.
    pub fn join(self) -> std::io::Result<std::process::ExitStatus> {
        let Self { mut child, control, .. } = self;
        drop(control);
        child.wait()
    }
}
