//! The worker: the only process that parses a volume, and that can do nothing else.
//!
//! Law 1: it is confined before the first byte of the volume is read, while it has one thread.
//! Law 2: the process ends when the keeper ends, when the mount ends, and on any panic.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use draconis_device::{Disk, FileOptions, OpenedFile};
use draconis_exchange::channel::session::{Session, accept};
use draconis_exchange::contract::request_log::RequestLog;
use draconis_exchange::contract::tree::Tree;
use draconis_exchange::contract::volume::{
    self, Mount, MountError, MountedVolume, Status, Unmount, Volume, VolumeServer,
};
use draconis_exchange::notices::NoticeSender;
use draconis_exchange::shm::SharedMemory;
use draconis_ext::{CrashedProcess, Volume as ExtVolume};
use draconis_types::Refusal;
use draconis_types::lock::Mutex;

use crate::disk::open_session_disk;
use crate::disk::split_disk;
use crate::oplog::{self, OpLog};
use crate::options::UringUse;
use crate::protocol::WorkerStatus;
use crate::request_log::{WorkerRequestLog, WorkerStart};
use crate::sandbox::{Confinement, SandboxProfile, close_other_fds, confine};
use crate::volume::{OpenError, VolumeTree, open, open_after_failure, open_for_mount};
use crate::worker_process::{
    ControlRequest, EXIT_LOST_WRITES, FIRST_DISK_LANE, VOLUME_LANE, receive_descriptors,
};

/// Peer timeout for the keeper: none. A keeper stopped by Ctrl-Z continues some day, and a death is
/// noticed at once.
const NO_TIMEOUT: Duration = Duration::MAX;
/// Timeout for the keeper to set up the session.
const SESSION_START_TIMEOUT: Duration = Duration::from_secs(10);

/// Heap memory for opening a volume and serving a first request, in bytes.
const PREFAULT_BYTES: usize = 4 << 20;

/// Idle time after which changes are committed.
const COMMIT_IDLE_TIME: Duration = Duration::from_millis(200);

/// Serves the kernel's requests. FUSE is the only implementation today.
pub trait RequestServer: Send + Sync + 'static {
    /// Serves `connection` until the mount ends. Logs requests in `recorder` for the successor, and
    /// sends notifications through the keeper with `notices`.
    ///
    /// # Errors
    /// The kernel's error.
    fn serve(
        &self,
        connection: OwnedFd,
        notices: &NoticeSender,
        tree: &VolumeTree,
        recorder: &dyn RequestLog,
    ) -> std::io::Result<()>;
    /// Makes the rings of a mount on `device`, an open `/dev/fuse`, before the process is confined.
    ///
    /// # Errors
    /// A message for the user.
    fn prepare_rings(&mut self, device: OwnedFd) -> Result<(), String>;
    /// Returns true if requests come over rings.
    fn is_over_rings(&self) -> bool;
    /// Returns the number of requests answered so far.
    fn answered_requests(&self) -> u64;
    /// Returns the number of requests read by opcode.
    fn requests_by_opcode(&self) -> BTreeMap<&'static str, u64>;
    /// Returns the age of the request in progress.
    fn current_request_age(&self) -> Duration;
}

/// Runs a worker until its mount ends. It reads its disk itself, or uses a disk served by another
/// process if `is_remote`. With `has_rings` it makes rings for its mount. `memory_limit_bytes` bounds
/// its private memory.
///
/// # Errors
/// A message if anything but a keeper started the process, or if it cannot be confined.
pub fn run_worker(
    mut server: impl RequestServer,
    is_remote: bool,
    has_rings: bool,
    memory_limit_bytes: Option<u64>,
) -> Result<(), String> {
    let control = std::io::stdin().as_fd().try_clone_to_owned();
    let control = UnixStream::from(control.map_err(|error| error.to_string())?);
    let (fixed, mut backing_files) = receive_descriptors(&control)
        .ok_or("a worker is started by the keeper; see draconis-mount(1)")?;
    let [image, session, log] = fixed;
    let keeper = control.try_clone().map_err(|error| error.to_string())?;
    let own = [control.as_fd(), keeper.as_fd(), image.as_fd(), session.as_fd(), log.as_fd()];
    let own: Vec<_> = own.into_iter().chain(backing_files.iter().map(AsFd::as_fd)).collect();
    close_other_fds(&own);
    // The last one, if there are to be rings.
    let device = if has_rings { backing_files.pop() } else { None };
    let log = oplog::map_existing(log)?;
    oplog::prefault_request_buffer(&log);
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("draconis: worker {}: {panic}", std::process::id());
        std::process::exit(70);
    }));
    let until = Instant::now() + SESSION_START_TIMEOUT;
    // No io_uring: the seccomp filter cannot see operations of a ring.
    let options = FileOptions { write: false, direct: true, uring: false };
    let opened = |file| OpenedFile::new(file, options).map_err(|error| error.to_string());
    let image = if is_remote {
        VolumeInput::Remote(accept(&image, until).map_err(|error| error.to_string())?)
    } else {
        VolumeInput::File(opened(image)?)
    };
    let backing_files = backing_files.into_iter().map(opened).collect::<Result<_, _>>()?;
    let session = accept(&session, until).map_err(|error| error.to_string())?;
    let rings = device.map(|device| server.prepare_rings(device));
    let profile = match rings {
        Some(Ok(())) => SandboxProfile::RingWorker,
        _ => SandboxProfile::Worker,
    };
    let confinement = confine(&profile, memory_limit_bytes).map_err(|error| error.to_string())?;
    prefault_heap();
    let worker = Arc::new(WorkerControl {
        resources: Mutex::new(Some(WorkerResources { image, backing_files, log })),
        session: session.clone(),
        tree: Arc::default(),
        request_log: OnceLock::new(),
        confinement,
        ring_failure: rings.and_then(Result::err),
        server,
    });
    let waiting = worker.clone();
    std::thread::Builder::new()
        .name("fuse".into())
        .spawn(move || waiting.wait_for_connection(&control))
        .map_err(|error| error.to_string())?;
    let end =
        session.server::<Volume>(VOLUME_LANE).ok_or("the session has no lane for a volume")?;
    // However the session ends, the keeper is gone.
    end.serve(NO_TIMEOUT, |message| volume::answer(&*worker, message))
        .map_err(|error| format!("the keeper is gone: {error}"))
}

/// Prefaults heap memory for opening the volume; the allocator keeps it. Clients wait while a
/// successor opens the volume, but not yet now.
fn prefault_heap() {
    std::hint::black_box(vec![1_u8; PREFAULT_BYTES]);
}

/// Descriptors and oplog that the worker received, until the volume is opened.
struct WorkerResources {
    image: VolumeInput,
    /// Backing files of the image, the nearest first.
    backing_files: Vec<OpenedFile>,
    log: Arc<SharedMemory>,
}

/// Source of the volume.
enum VolumeInput {
    File(OpenedFile),
    /// A disk in a store, served over a session by the store process.
    Remote(Arc<Session>),
}

struct WorkerControl<S> {
    resources: Mutex<Option<WorkerResources>>,
    session: Arc<Session>,
    tree: Arc<OnceLock<VolumeTree>>,
    request_log: OnceLock<Arc<WorkerRequestLog>>,
    confinement: Confinement,
    /// Why there are no rings, if they were wanted.
    ring_failure: Option<String>,
    server: S,
}

impl<S: RequestServer> WorkerControl<S> {
    /// Waits for the connection, which the keeper sends once the volume is open and the mount point
    /// attached.
    fn wait_for_connection(&self, mut control: &UnixStream) {
        let Some(([connection, notices], _)) = receive_descriptors(control) else {
            std::process::exit(1)
        };
        let notices = NoticeSender::new(notices);
        let (Some(tree), Some(recorder)) = (self.tree.get(), self.request_log.get()) else {
            std::process::exit(1)
        };
        self.serve_control(control);
        let mut code = match self.server.serve(connection, &notices, tree, &**recorder) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("draconis: worker {}: {error}", std::process::id());
                1
            }
        };
        if let Err(why) = tree.close() {
            // The keeper reads it after this process has ended.
            let _ = control.write_all(why.as_bytes());
            code = EXIT_LOST_WRITES;
        }
        std::process::exit(code)
    }

    /// Handles the keeper's requests while the mount is served.
    fn serve_control(&self, control: &UnixStream) {
        let (tree, control) = (self.tree.clone(), control.try_clone());
        let listen = move || {
            let Ok(mut control) = control else { return };
            let mut word = [0];
            // End of file: the keeper has ended, which its session detects.
            while matches!(control.read(&mut word), Ok(1)) {
                let (Some(tree), Some(request)) = (tree.get(), ControlRequest::from_byte(word[0]))
                else {
                    return;
                };
                let done = match request {
                    ControlRequest::ReadOnly => tree.set_read_only(true),
                    ControlRequest::Writable => tree.set_read_only(false),
                    ControlRequest::Sync => tree.sync(),
                };
                let answer = [done.err().unwrap_or_default().as_bytes(), &[0]].concat();
                if control.write_all(&answer).is_err() {
                    return;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("control".into()).spawn(listen) {
            log::warn!("no thread to be remounted by: {error}");
        }
    }

    fn open(&self, options: &[u8]) -> Result<VolumeTree, OpenError> {
        let start: WorkerStart = serde_json::from_slice(options)
            .map_err(|error| OpenError::Options(error.to_string()))?;
        match &self.ring_failure {
            Some(why) if start.options.uring == UringUse::On => {
                let why = format!("mount option 'uring=on': {why}");
                return Err(OpenError::Options(why));
            }
            Some(why) => log::info!("requests come over the device file: {why}"),
            None => {}
        }
        let given = self.resources.lock().take();
        let given = given.ok_or_else(|| OpenError::Options("mounted already".into()))?;
        let WorkerResources { image, backing_files, log } = given;
        let log = Arc::new(OpLog::new(log, start.epoch).map_err(OpenError::Options)?);
        let tree = self.open_volume(image, backing_files, &log, &start)?;
        let recorder = WorkerRequestLog::new(log, self.tree.clone(), &start);
        let recorder = Arc::new(recorder);
        if !tree.is_read_only() {
            spawn_writeback(tree.volume(), &recorder, self.tree.clone());
        }
        // Called once, so it is not set yet.
        let _ = self.request_log.set(recorder);
        Ok(tree)
    }

    fn open_volume(
        &self,
        image: VolumeInput,
        behind: Vec<OpenedFile>,
        log: &Arc<OpLog>,
        start: &WorkerStart,
    ) -> Result<VolumeTree, OpenError> {
        let WorkerStart { options, was_clean, .. } = start;
        let disk: Arc<dyn Disk> = match image {
            VolumeInput::File(file) if options.read_only => Arc::new(file.start()),
            VolumeInput::File(file) => {
                self.session.register_pool(log.memory().clone());
                let file = file.with_growth().map_err(OpenError::Length)?.start();
                let split = split_disk(file, &self.session, FIRST_DISK_LANE, log.buffer_pool());
                Arc::new(split.map_err(OpenError::Disk)?)
            }
            VolumeInput::Remote(session) => {
                Arc::new(open_session_disk(&session).map_err(OpenError::Disk)?)
            }
        };
        let behind = behind.into_iter().map(|file| Arc::new(file.start()) as Arc<dyn Disk>);
        let behind: Vec<_> = behind.collect();
        if options.read_only || options.deleted {
            return open(disk, &behind, options);
        }
        let orphans = || log.orphans();
        let before = was_clean.map(|was_clean| CrashedProcess { was_clean, orphans: orphans() });
        let tree = match (open_for_mount(disk.clone(), &behind, options, before), log.stop_reason())
        {
            // What ended changes can also keep the journal from being recovered.
            (Err(error), Some(failure)) => {
                log::warn!("the volume is only read: {error}");
                open_after_failure(disk, &behind, options, failure)?
            }
            (opened, _) => opened?,
        };
        if tree.is_read_only() {
            return Ok(tree);
        }
        let volume = tree.volume();
        if was_clean.is_none() {
            log.record_clean_mark(volume.was_clean());
        }
        tree.set_change_recorder(log.clone());
        // The kernel sends the FORGET of an orphan only after other requests.
        volume.on_no_space(|| std::thread::sleep(Duration::from_millis(1)));
        // An error that ended changes ends them again once all are replayed.
        if start.closed && log.stop_reason().is_none() {
            tree.close().map_err(OpenError::Options)?;
        }
        self.start_periodic_commits(Duration::from_secs(options.commit_s.max(1)), volume);
        self.start_mmp_renewal(volume);
        Ok(tree)
    }

    /// Commits changes: after a moment without any, and at least every `period`. Sleeps while there
    /// are none.
    fn start_periodic_commits(&self, period: Duration, volume: &ExtVolume) {
        let tree = self.tree.clone();
        let commit = move || {
            loop {
                let Some(tree) = tree.get().filter(|tree| !tree.is_read_only()) else {
                    std::thread::park_timeout(period);
                    continue;
                };
                match tree.volume().uncommitted_changes() {
                    Some(changes) => wait_until_idle(tree.volume(), changes, period),
                    None => {
                        // The commit below makes the last one durable, which frees its freed space.
                        // Then the next change wakes this thread.
                        std::thread::park_timeout(period);
                        if tree.volume().uncommitted_changes().is_some() {
                            continue;
                        }
                    }
                }
                if let Err(error) = tree.volume().commit() {
                    log::error!("changes could not be written: {error}");
                }
            }
        };
        match std::thread::Builder::new().name("commit".into()).spawn(commit) {
            Ok(started) => {
                let thread = started.thread().clone();
                volume.on_first_change(move || thread.unpark());
            }
            // Changes are then committed by syncs, or when there are many.
            Err(error) => log::warn!("no thread to commit with: {error}"),
        }
    }

    /// Renews the claim of an MMP volume, for other hosts to see that it is in use.
    fn start_mmp_renewal(&self, volume: &ExtVolume) {
        let Ok(Some(first)) = volume.renew_claim() else { return };
        let tree = self.tree.clone();
        let renew = move || {
            let mut next = first;
            loop {
                std::thread::sleep(next);
                match tree.get().map(|tree| tree.volume().renew_claim()) {
                    None => {}
                    Some(Ok(Some(interval))) => next = interval,
                    // Released, or writing has stopped; the volume reports why.
                    Some(Ok(None) | Err(_)) => return,
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("claim".into()).spawn(renew) {
            log::error!("no thread to claim with, another host may take the volume: {error}");
        }
    }

    fn status(&self) -> WorkerStatus {
        let mut status = self.tree.get().map(VolumeTree::status).unwrap_or_default();
        status.requests = self.server.answered_requests();
        status.uring = self.server.is_over_rings();
        let by_opcode = self.server.requests_by_opcode().into_iter();
        status.by_opcode = by_opcode.map(|(name, count)| (name.into(), count)).collect();
        status.busy_ms =
            u64::try_from(self.server.current_request_age().as_millis()).unwrap_or(u64::MAX);
        status.sandbox = self.confinement.clone();
        status.refused = self
            .request_log
            .get()
            .map(|recorder| recorder.quarantine_messages())
            .unwrap_or_default();
        status
    }
}

/// Starts a thread that submits file data and frees space in the oplog in the background.
fn spawn_writeback(
    volume: &ExtVolume,
    recorder: &Arc<WorkerRequestLog>,
    tree: Arc<OnceLock<VolumeTree>>,
) {
    let making = recorder.clone();
    let send = move || {
        loop {
            std::thread::park();
            let Some(tree) = tree.get() else { continue };
            // The next change reports the error.
            let sent = tree.volume().send_queued();
            if sent.is_ok() && making.needs_commit() {
                making.commit_to_free_space();
            }
        }
    };
    match std::thread::Builder::new().name("send".into()).spawn(send) {
        Ok(started) => {
            let thread = started.thread().clone();
            recorder.set_commit_helper(thread.clone());
            volume.on_queued_contents(move || thread.unpark());
        }
        Err(error) => log::warn!("no thread to send with, clients do: {error}"),
    }
}

/// Returns once `volume` has not changed for [`COMMIT_IDLE_TIME`], or `period` is over.
fn wait_until_idle(volume: &ExtVolume, mut changes: u64, period: Duration) {
    let until = Instant::now() + period;
    loop {
        std::thread::sleep(COMMIT_IDLE_TIME.min(until.saturating_duration_since(Instant::now())));
        match volume.uncommitted_changes() {
            Some(now) if now != changes && Instant::now() < until => changes = now,
            _ => return,
        }
    }
}

impl<S: RequestServer> VolumeServer for WorkerControl<S> {
    fn mount(&self, request: &mut Mount) -> Result<MountedVolume, MountError> {
        let mut text = vec![0; (request.len as usize).min(request.options.len())];
        request.options.copy_out(0, &mut text);
        let mut refuse = |why, said: &str| {
            let message_bytes = request.options.copy_in(0, said.as_bytes()) as u32;
            MountError { why, message_bytes }
        };
        let tree = self.open(&text).map_err(|error| refuse(error.refusal(), &error.to_string()))?;
        let mounted = MountedVolume { space: tree.statfs(), read_only: tree.is_read_only() };
        self.tree.set(tree).map_err(|_| refuse(Refusal::Busy, "mounted already"))?;
        Ok(mounted)
    }

    fn status(&self, request: &mut Status) -> Result<u32, Refusal> {
        match serde_json::to_vec(&WorkerControl::status(self)) {
            Ok(text) if text.len() <= request.buffer.len() => {
                Ok(request.buffer.copy_in(0, &text) as u32)
            }
            _ => Err(Refusal::BufferTooSmall),
        }
    }

    fn unmount(&self, _: &mut Unmount) -> Result<(), Refusal> {
        // The error that stopped writing is in the status.
        self.tree.get().map_or(Ok(()), VolumeTree::close).map_err(|_| Refusal::Io)
    }
}
