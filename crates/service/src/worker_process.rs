//! One worker process, as seen by its keeper.
//!
//! ```text
//!   keeper                                   worker
//!     │── spawn, control socket as its fd 0 ──▶│
//!     │── volume, session, oplog,
//!     │   backing files ──────────────────────▶│ confines itself
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
use draconis_exchange::contract::Violation;
use draconis_exchange::contract::volume::{self, Volume};
use draconis_exchange::descriptors;
use draconis_exchange::heap::arena::SlotClass;
use draconis_exchange::shm::SharedMemory;
use draconis_types::Block;
use draconis_types::Refusal;
use draconis_types::injected_fault;
use rustix::net::RecvFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::claimed_volume::VolumeSource;
use crate::connection::{self, NotificationRelays};
use crate::disk::{self, DiskService};
use crate::options::MountOptions;
use crate::protocol::WorkerStatus;
use crate::request_log::WorkerStart;
use crate::store_keeper::StoreDiskHandle;

/// Timeout for a worker to open a volume.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for a worker to open a volume of deleted files: it reads all inode tables.
const DELETED_MOUNT_TIMEOUT: Duration = Duration::from_secs(3600);
/// Size of the buffer for message texts, in bytes.
const MESSAGE_BUFFER_BYTES: u32 = 64 << 10;

/// Exit status of a worker that could not write everything (`EX_IOERR` of sysexits(3)). It sends
/// the error over its control socket.
pub(crate) const EXIT_LOST_WRITES: i32 = 74;
/// Longest final message, in bytes.
const MAX_FINAL_MESSAGE_BYTES: u64 = 4096;

/// A request of the keeper over the control socket of a served mount. The reply ends with a zero
/// byte, and is empty on success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ControlRequest {
    /// Write everything, mark the volume clean and refuse changes.
    ReadOnly = b'r',
    /// Accept changes again.
    Writable = b'w',
    /// Make all changes durable.
    Sync = b's',
}

impl ControlRequest {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [Self::ReadOnly, Self::Writable, Self::Sync].into_iter().find(|it| *it as u8 == byte)
    }
}

/// The lane of the volume contract. The lanes of the disk contract follow, if the volume may be
/// written.
pub(crate) const VOLUME_LANE: u32 = 0;
/// The first lane of the disk contract.
pub(crate) const FIRST_DISK_LANE: u32 = 1;

/// Plans one lane for the volume contract and the blocks for its texts.
fn session_config(writable: bool) -> SessionConfig {
    let texts = SlotClass { slot_bytes: MESSAGE_BUFFER_BYTES, slots: 2 };
    let mut plan = SessionConfig { lanes: 1, host: vec![texts], guest: vec![] };
    if writable {
        disk::add_disk_lanes(&mut plan);
    }
    plan
}

/// Returns the limit of a worker's private memory, in bytes: eight times what it should need.
pub(crate) fn worker_memory_limit_bytes(options: &MountOptions) -> u64 {
    options.memory_limit_bytes() * 8
}

/// Returns the command that starts a worker as `subcommand` of this program. The caller sets its
/// standard input: the control socket.
pub(crate) fn worker_command(subcommand: &str, memory_limit_bytes: u64) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(subcommand)
        .args(crate::verbosity::verbosity_argument())
        .arg("--memory")
        .arg(memory_limit_bytes.to_string())
        .env_clear()
        .envs(injected_fault::inherited_variables())
        // Huge pages for its caches: in a virtual machine, a page fault costs as much as reading
        // the page.
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        .current_dir("/")
        .process_group(0)
        .stdout(Stdio::null());
    command
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
    /// The service that writes for it, which ends with the worker.
    disk: WriteService,
    /// True if the volume cannot be written.
    pub read_only: bool,
}

/// The service that writes for a worker.
enum WriteService {
    /// None: the volume is read-only.
    None,
    /// A thread of this process.
    Own(DiskService),
    /// The process of a store, with the number of the attached disk.
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

    /// Waits until it has ended; returns the mark of the last accepted chain.
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

/// A worker that has not read its volume yet. Dropping it ends the process.
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

    /// Returns true if it has ended on its own or was killed.
    pub(crate) fn has_exited(&mut self) -> bool {
        let ended = self.0.child.as_mut().map(Child::try_wait);
        !matches!(ended, Some(Ok(None)))
    }
}

/// Reasons why there is no worker.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The process could not be started.
    #[error("cannot start a worker: {0}")]
    Spawn(#[from] std::io::Error),
    /// It refused the volume.
    #[error("{0}")]
    Refused(String),
    /// It died before it replied.
    #[error("the worker was lost while it opened the volume: {0}")]
    Lost(String),
}

/// Exit of a worker.
#[derive(Debug, Clone, Copy)]
pub struct WorkerExit {
    pid: u32,
    status: Option<ExitStatus>,
}

impl WorkerExit {
    /// Returns true if it died, instead of exiting at the end of its mount.
    pub(crate) fn is_abnormal(&self) -> bool {
        self.status
            .is_none_or(|status| !status.success() && status.code() != Some(EXIT_LOST_WRITES))
    }

    /// Returns true if another process killed it.
    pub(crate) fn was_killed(&self) -> bool {
        self.status.and_then(|status| status.signal()) == Some(libc::SIGKILL)
    }

    /// Describes its failure, if any; `last_words` is its own final message.
    pub fn failure_reason(&self, last_words: &str) -> Option<String> {
        let pid = self.pid;
        match self.status {
            Some(status) if status.success() => None,
            Some(status) if status.code() == Some(EXIT_LOST_WRITES) => {
                Some(format!("what was changed last could not be written: {last_words}"))
            }
            Some(status) => Some(match (status.signal(), status.code()) {
                // Signal of seccomp on a forbidden system call.
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
    /// Starts a process, has it confine itself and open the volume in `source`. It reads a file
    /// itself, and a thread of this process writes it. The store process reads and writes a disk in
    /// a store. `behind` are the backing files. It logs its requests in the memory `log`. With
    /// `fuse_device`, it makes rings for that connection.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(crate) fn start(
        source: &VolumeSource,
        behind: &[OwnedFd],
        log: &Arc<SharedMemory>,
        fuse_device: Option<&OwnedFd>,
        start: &WorkerStart,
    ) -> Result<Self, StartError> {
        Self::start_standby(source, behind, log, fuse_device, &start.options)?.open(start)
    }

    /// Starts a process that confines itself, and reads the volume only when told to open it.
    ///
    /// # Errors
    /// See [`StartError`].
    pub(crate) fn start_standby(
        source: &VolumeSource,
        behind: &[OwnedFd],
        log: &Arc<SharedMemory>,
        fuse_device: Option<&OwnedFd>,
        options: &MountOptions,
    ) -> Result<StandbyWorker, StartError> {
        let (control, theirs) = UnixStream::pair()?;
        let (session, session_theirs) =
            offer(&session_config(matches!(source, VolumeSource::File { disk: Some(_), .. })))
                .map_err(std::io::Error::from)?;
        let child = worker_command("worker", worker_memory_limit_bytes(options))
            .args(matches!(source, VolumeSource::Store(_)).then_some("--remote"))
            .args(fuse_device.map(|_| "--rings"))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()?;
        let pid = child.id();
        // A child that is not reaped keeps its pid.
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let pidfd = pidfd.map_err(std::io::Error::from)?;
        let guest = pidfd.try_clone()?;
        let given = |volume: BorrowedFd<'_>| {
            let fixed = [volume, session_theirs.as_fd(), log.as_fd()];
            let behind = behind.iter().chain(fuse_device).map(AsFd::as_fd);
            let all: Vec<_> = fixed.into_iter().chain(behind).collect();
            send_descriptors(&control, &all)?;
            let session = session.start(guest);
            session.kill_peer_on_violation();
            std::io::Result::Ok(session)
        };
        let (session, disk) = match source {
            VolumeSource::File { image, disk } => {
                let session = given(image.as_fd())?;
                session.register_pool(log.clone());
                let disk = disk.as_ref().map(|disk| {
                    let discards = options.discard == Some(true);
                    disk::serve_disk(disk.try_clone()?, &session, FIRST_DISK_LANE, discards)
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
                    // It waits for its volume.
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
        let timeout = if start.options.deleted { DELETED_MOUNT_TIMEOUT } else { MOUNT_TIMEOUT };
        let until = Instant::now() + timeout;
        let nothing_left = || lost(&"its session is used up");
        let client = self.session.client::<Volume>(VOLUME_LANE).ok_or_else(nothing_left)?;
        let mut text =
            self.session.allocate_block(MESSAGE_BUFFER_BYTES as usize).ok_or_else(nothing_left)?;
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
                return Err(refused_start(nak.why.why, &nak.options, nak.why.message_bytes));
            }
        }
        Ok(())
    }

    /// Returns the error that keeps the keeper from writing for it, if any.
    pub fn disk_failure(&self) -> Option<String> {
        self.disk.failure()
    }

    /// Returns how it broke its contract with the keeper, if it did. It is killed for that.
    pub(crate) fn violation(&self) -> Option<Violation> {
        self.session.violation()
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns its pidfd.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn pidfd(&self) -> std::io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Requests its status.
    ///
    /// # Errors
    /// [`WorkerError`]; no further request is possible after one.
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

    /// Has it write everything and mark the volume clean. After that, neither changes nor requests
    /// are possible.
    ///
    /// # Errors
    /// [`WorkerError`], or that it could not write.
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

    /// Has it carry out `request` while the mount stays.
    ///
    /// # Errors
    /// The error of the worker or the socket.
    pub(crate) fn control(&self, request: ControlRequest, wait: Duration) -> Result<(), String> {
        let lost = |error: std::io::Error| format!("the worker did not answer: {error}");
        let mut answer = vec![];
        self.control.set_read_timeout(Some(wait)).map_err(lost)?;
        (&self.control).write_all(&[request as u8]).map_err(lost)?;
        let mut answers = std::io::BufReader::with_capacity(1, &self.control);
        let limit = MAX_FINAL_MESSAGE_BYTES;
        answers.by_ref().take(limit).read_until(0, &mut answer).map_err(lost)?;
        self.control.set_read_timeout(None).map_err(lost)?;
        match answer.as_slice() {
            [0] => Ok(()),
            [said @ .., 0] => Err(strip_control_characters(said)),
            _ => Err("the worker is gone".into()),
        }
    }

    /// Returns its final message, a text of an untrusted process.
    pub fn final_message(&self) -> String {
        let mut said = vec![];
        // The worker is gone, so the read ends. A read error means no message.
        let _ = (&self.control).take(MAX_FINAL_MESSAGE_BYTES).read_to_end(&mut said);
        strip_control_characters(&said)
    }

    /// Sends it the connection to the kernel: it starts to serve. Its notifications go to the
    /// kernel through `relays`.
    ///
    /// # Errors
    /// The socket's error, for instance if the worker has died.
    pub(crate) fn send_connection(
        &self,
        fuse: &OwnedFd,
        relays: &NotificationRelays,
    ) -> std::io::Result<()> {
        let notices = relays.start_relay(fuse)?;
        let own = connection::clone_for_worker(fuse)?;
        send_descriptors(&self.control, &[own.as_fd(), notices.as_fd()])
    }

    /// Kills it.
    pub fn kill(&self) {
        // It may have ended already, which is equivalent.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Ends it; returns the last of its changes that the disk has accepted.
    pub(crate) fn terminate(mut self) -> u64 {
        self.kill_and_wait()
    }

    fn kill_and_wait(&mut self) -> u64 {
        self.kill();
        self.reap();
        // Everything completely accepted is written before the volume is released.
        std::mem::replace(&mut self.disk, WriteService::None).join()
    }

    fn reap(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }

    /// Calls `then` once it has ended, for any reason.
    pub fn on_exit(&mut self, then: impl FnOnce(WorkerExit) + Send + 'static) {
        let pid = self.pid;
        let Some(mut child) = self.child.take() else { return };
        std::thread::spawn(move || then(WorkerExit { pid, status: child.wait().ok() }));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill_and_wait();
    }
}

/// Removes control characters from the text of an untrusted process.
fn strip_control_characters(said: &[u8]) -> String {
    String::from_utf8_lossy(said).chars().filter(|c| !c.is_control()).collect()
}

fn refused_start(why: Refusal, text: &Block, len: u32) -> StartError {
    let said = String::from_utf8_lossy(&read_message(text, len)).into_owned();
    StartError::Refused(if said.is_empty() { why.to_string() } else { said })
}

fn read_message(block: &Block, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; (len as usize).min(block.len())];
    block.copy_out(0, &mut bytes);
    bytes
}

/// Error of a worker that did not reply.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WorkerError(ChannelError);

impl WorkerError {
    /// Returns true if it may still run, but does not reply.
    pub fn is_timeout(&self) -> bool {
        !matches!(self.0, ChannelError::Closed)
    }
}

/// Sends descriptors, and one byte to carry them.
fn send_descriptors(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    Ok(descriptors::send_with_fds(socket, b"f", fds)?)
}

/// Receives `N` descriptors, and those that follow. Returns `None` if the peer is gone or sends
/// anything else.
pub(crate) fn receive_descriptors<const N: usize>(
    socket: &UnixStream,
) -> Option<([OwnedFd; N], Vec<OwnedFd>)> {
    let got = descriptors::receive_with_fds(socket, &mut [0], RecvFlags::empty()).ok()?;
    let mut fixed = (got.len == 1 && got.fds.len() >= N).then_some(got.fds)?;
    let behind = fixed.split_off(N);
    Some((fixed.try_into().ok()?, behind))
}
