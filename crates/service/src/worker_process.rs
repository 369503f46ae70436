//! One worker process, as its keeper sees it.
//!
//! ```text
//!   keeper                                   worker
//!     │── spawn, control socket as its fd 0 ──▶│
//!     │── volume, session, log, what an       ─▶│ confines itself
//!     │   image differs from
//!     │══ session: volume contract ═══════════▶│ Mount: opens the volume
//!     │◀═ session: disk contract, if writable ═│ groups of writes
//!     │── the connection to the kernel ───────▶│ serves it
//! ```

use std::io::{BufRead, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use draconis_exchange::channel::session::{Session, SessionConfig, offer};
use draconis_exchange::channel::{ChannelError, Client, Reply};
use draconis_exchange::contract::Refusal;
use draconis_exchange::contract::volume::{self, Volume};
use draconis_exchange::descriptors;
use draconis_exchange::heap::Block;
use draconis_exchange::heap::arena::Class;
use draconis_exchange::injected_fault;
use draconis_exchange::shm::SharedMemory;
use rustix::net::RecvFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::claimed_volume::VolumeSource;
use crate::connection::{self, Relays};
use crate::disk::{self, DiskService};
use crate::options::MountOptions;
use crate::protocol::WorkerStatus;
use crate::request_log::WorkerStart;
use crate::store_keeper::StoreDiskHandle;

/// How long a worker may take to open a volume.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(60);
/// Room for the text of a message, in bytes.
const MESSAGE_BYTES: u32 = 64 << 10;

/// How a worker ends that could not bring everything home (`EX_IOERR` of sysexits(3)); what
/// happened it says over its control socket.
pub(crate) const EXIT_LOST_WRITES: i32 = 74;
/// Longest text it may say there, in bytes.
const MAX_FINAL_MESSAGE_BYTES: u64 = 4096;

/// What the keeper says over the control socket of a mount that is served. The answer ends
/// with a zero, and is empty if it is done.
pub(crate) const READ_ONLY: u8 = b'r';
pub(crate) const WRITABLE: u8 = b'w';

/// The lane of the volume contract. Behind it are those of the disk contract, if the volume
/// may be written.
pub(crate) const VOLUME_LANE: u32 = 0;
/// The first lane of the disk contract.
pub(crate) const DISK_LANE: u32 = 1;

/// One lane for the volume contract, and the blocks that carry its texts.
fn plan(writable: bool) -> SessionConfig {
    let texts = Class { slot_bytes: MESSAGE_BYTES, slots: 2 };
    let mut plan = SessionConfig {
        static_lanes: 1,
        host_lanes: 0,
        guest_lanes: 0,
        host: vec![texts],
        guest: vec![],
    };
    if writable {
        disk::add_disk_lanes(&mut plan);
    }
    plan
}

/// A running worker.
pub struct Worker {
    child: Option<Child>,
    pid: u32,
    pidfd: OwnedFd,
    control: UnixStream,
    session: Arc<Session>,
    volume: Option<Client<Volume, volume::Running>>,
    text: Option<Block>,
    /// What writes for it. It ends with the worker.
    disk: WriteService,
    /// Whether the volume cannot be written.
    pub read_only: bool,
}

/// What writes for a worker.
enum WriteService {
    /// Nothing does.
    None,
    /// A thread here.
    Own(DiskService),
    /// The process of a store, which calls the disk by that number.
    Store(StoreDiskHandle, u64),
}

impl WriteService {
    fn failure(&self) -> Option<String> {
        match self {
            Self::Own(disk) => disk.failure(),
            Self::Store(disk, _) => disk.failure(),
            Self::None => None,
        }
    }

    /// Waits for its end; the mark of the last chain that was taken.
    fn join(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Own(disk) => disk.join(),
            Self::Store(disk, number) => disk.wait_detached(number).unwrap_or_else(|why| {
                log::error!("{why}");
                0
            }),
        }
    }
}

/// A worker that has not looked at its volume yet. Dropped, it ends.
pub(crate) struct StandbyWorker(Worker);

impl StandbyWorker {
    /// Has it open the volume.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(crate) fn open(self, start: &WorkerStart) -> Result<Worker, StartError> {
        let Self(mut worker) = self;
        // An error ends it.
        worker.mount(start).map(|()| worker)
    }

    /// Whether it has ended by itself or was killed.
    pub(crate) fn has_exited(&mut self) -> bool {
        let ended = self.0.child.as_mut().map(Child::try_wait);
        !matches!(ended, Some(Ok(None)))
    }
}

/// Why there is no worker.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The process could not be started.
    #[error("cannot start a worker: {0}")]
    Spawn(#[from] std::io::Error),
    /// It refused the volume.
    #[error("{0}")]
    Refused(String),
    /// It was lost before it answered.
    #[error("the worker was lost while it opened the volume: {0}")]
    Lost(String),
}

/// How a worker ended.
#[derive(Debug, Clone, Copy)]
pub struct WorkerExit {
    pid: u32,
    status: Option<ExitStatus>,
}

impl WorkerExit {
    /// Whether it died, instead of ending because there was nothing more to do.
    pub(crate) fn is_abnormal(&self) -> bool {
        self.status
            .is_none_or(|status| !status.success() && status.code() != Some(EXIT_LOST_WRITES))
    }

    /// Whether it was killed by another process.
    pub(crate) fn was_killed(&self) -> bool {
        self.status.and_then(|status| status.signal()) == Some(libc::SIGKILL)
    }

    /// What is wrong with it, if something is; `last_words` are the worker's own.
    pub fn failure_reason(&self, last_words: &str) -> Option<String> {
        let pid = self.pid;
        match self.status {
            Some(status) if status.success() => None,
            Some(status) if status.code() == Some(EXIT_LOST_WRITES) => {
                Some(format!("what was changed last could not be written: {last_words}"))
            }
            Some(status) => Some(match (status.signal(), status.code()) {
                // What seccomp sends to a process that asks for more than it may.
                (Some(libc::SIGSYS), _) => {
                    format!("worker {pid} was killed: it made a system call that it may not")
                }
                (Some(signal), _) => format!("worker {pid} was killed by signal {signal}"),
                (_, code) => format!("worker {pid} ended with status {}", code.unwrap_or(-1)),
            }),
            None => Some(format!("worker {pid} ended, and how is not known")),
        }
    }
}

impl Worker {
    /// Starts a process, has it confine itself and open the volume in `source`. Of a file it reads
    /// for itself, and what it writes is written by a thread of this process; what is in a store
    /// the process of that reads and writes. What a disk image differs from it reads in `behind`.
    /// In the memory of `log` it says what it does.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(crate) fn start(
        source: &VolumeSource,
        behind: &[OwnedFd],
        log: &Arc<SharedMemory>,
        start: &WorkerStart,
    ) -> Result<Self, StartError> {
        Self::start_standby(source, behind, log, &start.options)?.open(start)
    }

    /// Starts a process that confines itself, and looks at the volume once it is to open it.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(crate) fn start_standby(
        source: &VolumeSource,
        behind: &[OwnedFd],
        log: &Arc<SharedMemory>,
        options: &MountOptions,
    ) -> Result<StandbyWorker, StartError> {
        let (control, theirs) = UnixStream::pair()?;
        let (session, session_theirs) =
            offer(&plan(matches!(source, VolumeSource::File { disk: Some(_), .. })))
                .map_err(std::io::Error::from)?;
        let child = Command::new("/proc/self/exe")
            .arg("worker")
            .args(matches!(source, VolumeSource::Store(_)).then_some("--remote"))
            .arg("--memory")
            .arg((options.memory_limit_bytes() * 8).to_string())
            .env_clear()
            .envs(injected_fault::environment())
            // Huge pages for its caches: in a virtual machine a page fault costs as much as
            // reading the page.
            .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        let pid = child.id();
        // A child that was not waited for keeps its number.
        let raw = Pid::from_raw(pid as i32)
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotFound))?;
        let pidfd =
            rustix::process::pidfd_open(raw, PidfdFlags::empty()).map_err(std::io::Error::from)?;
        let guest = pidfd.try_clone()?;
        let given = |volume: BorrowedFd<'_>| {
            let fixed = [volume, session_theirs.as_fd(), log.as_fd()];
            let all: Vec<_> = fixed.into_iter().chain(behind.iter().map(AsFd::as_fd)).collect();
            send_descriptors(&control, &all)?;
            std::io::Result::Ok(session.start(guest))
        };
        let (session, disk) = match source {
            VolumeSource::File { image, disk } => {
                let session = given(image.as_fd())?;
                session.register_pool(log.clone());
                let disk = disk.as_ref().map(|disk| {
                    let discards = options.discard == Some(true);
                    disk::serve_disk(disk.try_clone()?, &session, DISK_LANE, discards)
                        .map(WriteService::Own)
                });
                (session, disk.unwrap_or(Ok(WriteService::None)))
            }
            VolumeSource::Store(disk) => match disk.attach(pidfd.as_fd()) {
                Ok(attached) => {
                    let disk =
                        disk.try_clone().map(|disk| WriteService::Store(disk, attached.number));
                    (given(attached.socket.as_fd())?, disk)
                }
                Err(why) => {
                    let mut child = child;
                    // It waits for what it is to work on.
                    drop(child.kill());
                    drop(child.wait());
                    return Err(StartError::Refused(why));
                }
            },
        };
        let mut worker = Self {
            child: Some(child),
            pid,
            pidfd,
            control,
            session,
            volume: None,
            text: None,
            disk: WriteService::None,
            read_only: true,
        };
        // An error here ends the worker, too.
        worker.disk = disk?;
        Ok(StandbyWorker(worker))
    }

    fn mount(&mut self, start: &WorkerStart) -> Result<(), StartError> {
        let lost = |error: &dyn std::fmt::Display| StartError::Lost(error.to_string());
        let until = Instant::now() + MOUNT_TIMEOUT;
        let nothing_left = || lost(&"its session is used up");
        let client = self.session.client::<Volume>(VOLUME_LANE).ok_or_else(nothing_left)?;
        let mut text = self.session.block(MESSAGE_BYTES as usize).ok_or_else(nothing_left)?;
        let options = serde_json::to_vec(start).map_err(std::io::Error::from)?;
        text.copy_in(0, &options);
        let len = options.len() as u32;
        let sent = client.send(volume::Mount { options: text, len });
        match sent.receive(until).map_err(|error| lost(&error))? {
            Reply::Ack(ack, client) => {
                self.text = Some(ack.options);
                self.volume = Some(client);
                self.read_only = ack.mounted.read_only;
            }
            Reply::Nak(nak, _) => {
                return Err(refused(nak.why.why, &nak.options, nak.why.message_bytes));
            }
        }
        Ok(())
    }

    /// What keeps the keeper from writing for it, if something does.
    pub fn disk_failure(&self) -> Option<String> {
        self.disk.failure()
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What it is signalled by.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn pidfd(&self) -> std::io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Asks it how it is.
    ///
    /// # Errors
    /// [`WorkerError`]; after one it cannot be asked again.
    pub fn status(&mut self, deadline: Instant) -> Result<WorkerStatus, WorkerError> {
        let volume = self.volume.take().ok_or(WorkerError(ChannelError::Closed))?;
        let text = self.text.take().ok_or(WorkerError(ChannelError::Closed))?;
        let (buffer, len) = match volume.send(volume::Status { buffer: text }).receive(deadline) {
            Ok(Reply::Ack(ack, volume)) => {
                self.volume = Some(volume);
                (ack.buffer, ack.len)
            }
            Ok(Reply::Nak(nak, volume)) => {
                self.volume = Some(volume);
                (nak.buffer, 0)
            }
            Err(lost) => return Err(WorkerError(lost)),
        };
        let told = serde_json::from_slice(&read_message(&buffer, len)).unwrap_or_default();
        self.text = Some(buffer);
        Ok(told)
    }

    /// Has it bring everything home and mark the volume as unmounted; after that nothing
    /// can be changed, nor can the worker be asked anything.
    ///
    /// # Errors
    /// [`WorkerError`], or that it could not.
    pub fn close(&mut self, deadline: Instant) -> Result<(), WorkerError> {
        let volume = self.volume.take().ok_or(WorkerError(ChannelError::Closed))?;
        let sent = volume.send(volume::Unmount {});
        match sent.receive(deadline).map_err(WorkerError)? {
            Reply::Ack(..) => Ok(()),
            Reply::Nak(_, volume) => {
                self.volume = Some(volume);
                Ok(())
            }
        }
    }

    /// Has it bring everything home, mark the volume as unmounted and take no more changes
    /// while the mount stays; or take changes again.
    ///
    /// # Errors
    /// What the worker or the socket says.
    pub fn set_read_only(&self, read_only: bool, wait: Duration) -> Result<(), String> {
        let lost = |error: std::io::Error| format!("the worker did not answer: {error}");
        let word = if read_only { READ_ONLY } else { WRITABLE };
        let mut answer = vec![];
        self.control.set_read_timeout(Some(wait)).map_err(lost)?;
        (&self.control).write_all(&[word]).map_err(lost)?;
        let mut answers = std::io::BufReader::with_capacity(1, &self.control);
        let limit = MAX_FINAL_MESSAGE_BYTES;
        answers.by_ref().take(limit).read_until(0, &mut answer).map_err(lost)?;
        self.control.set_read_timeout(None).map_err(lost)?;
        match answer.as_slice() {
            [0] => Ok(()),
            [said @ .., 0] => Err(sanitize(said)),
            _ => Err("the worker is gone".into()),
        }
    }

    /// What it said before it ended. It is a sentence of a process that is not trusted.
    pub fn final_message(&self) -> String {
        let mut said = vec![];
        // It is gone, so there is an end; and what cannot be read was not said.
        let _ = (&self.control).take(MAX_FINAL_MESSAGE_BYTES).read_to_end(&mut said);
        sanitize(&said)
    }

    /// Gives it the connection to the kernel: it starts to serve. Its notices go to the kernel
    /// through `relays`.
    ///
    /// # Errors
    /// What the socket says, when the worker has died for instance.
    pub(crate) fn send_connection(&self, fuse: &OwnedFd, relays: &Relays) -> std::io::Result<()> {
        let notices = relays.start(fuse)?;
        let own = connection::clone_for_worker(fuse)?;
        send_descriptors(&self.control, &[own.as_fd(), notices.as_fd()])
    }

    /// Kills it.
    pub fn kill(&self) {
        // It may have ended by itself, which is as good.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Ends it; the last of its changes that the disk has taken.
    pub(crate) fn end(mut self) -> u64 {
        self.finish()
    }

    fn finish(&mut self) -> u64 {
        self.kill();
        self.reap();
        // What was taken whole is written before the volume is free for others.
        std::mem::replace(&mut self.disk, WriteService::None).join()
    }

    fn reap(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }

    /// Calls `then` once it has ended, whatever the reason.
    pub fn on_exit(&mut self, then: impl FnOnce(WorkerExit) + Send + 'static) {
        let pid = self.pid;
        let Some(mut child) = self.child.take() else { return };
        std::thread::spawn(move || then(WorkerExit { pid, status: child.wait().ok() }));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A text from a process that is not trusted.
fn sanitize(said: &[u8]) -> String {
    String::from_utf8_lossy(said).chars().filter(|c| !c.is_control()).collect()
}

fn refused(why: Refusal, text: &Block, len: u32) -> StartError {
    let said = String::from_utf8_lossy(&read_message(text, len)).into_owned();
    StartError::Refused(if said.is_empty() { why.to_string() } else { said })
}

fn read_message(block: &Block, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; (len as usize).min(block.len())];
    block.copy_out(0, &mut bytes);
    bytes
}

/// Why a worker did not answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WorkerError(ChannelError);

impl WorkerError {
    /// Whether it might still be there, but does not answer.
    pub fn is_timeout(&self) -> bool {
        !matches!(self.0, ChannelError::Closed)
    }
}

/// Sends descriptors, and one byte to carry them.
fn send_descriptors(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    Ok(descriptors::send(socket, b"f", fds)?)
}

/// Receives `N` descriptors, and those behind them; `None` when the other end is gone or sends
/// anything else.
pub(crate) fn receive_descriptors<const N: usize>(
    socket: &UnixStream,
) -> Option<([OwnedFd; N], Vec<OwnedFd>)> {
    let got = descriptors::receive(socket, &mut [0], RecvFlags::empty()).ok()?;
    let mut fixed = (got.len == 1 && got.fds.len() >= N).then_some(got.fds)?;
    let behind = fixed.split_off(N);
    Some((fixed.try_into().ok()?, behind))
}
