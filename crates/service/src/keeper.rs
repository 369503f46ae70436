//! The keeper of a mount: it has what must outlive a worker, and starts and watches those.
//!
//! ```text
//!   manager ── JSON line ──▶ keeper ──┬─ opens and claims the volume
//!                                     ├─ worker process, confined ── volume contract
//!                                     ├─ disk service: the only one to write the volume
//!                                     ├─ attaches the mount point, gives the worker
//!                                     │  the descriptor and keeps one itself
//!                                     └─ watcher thread: status, death, hang
//! ```
//!
//! Each mount has a keeper of its own, a process that outlives the manager and, by
//! [`upgrade`], its own program.
//!
//! Law 1: nothing that a volume holds is looked at here.
//! Law 2: when a worker dies or hangs, another takes over. Where none may, the connection is
//! closed, so that every call that waits gets an error instead of waiting. The mount stays in
//! its place, dead, until a user unmounts it: what is written by its path must not go to the
//! disk below. The volume is free at once.

mod mounting;
mod supervision;
mod supervisor;
mod unmounting;
pub mod upgrade;

pub(crate) use mounting::dead_mount_message;

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::mount_table;
use crate::mounter::Mounter;
use crate::options::MountOptions;
use crate::protocol::{self, Kept, MountStatus, Reply, Request, Status};
use crate::worker_process::WorkerExit;

/// How long a keeper that was started for a mount waits to be told which.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long `status` waits for fresh numbers.
const STATUS_TIMEOUT: Duration = Duration::from_millis(300);
/// How long the kernel may take to send the first request.
const INIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long, when it has changes to bring home first. That it hangs is noticed otherwise.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(600);
/// How often it is looked whether a dead mount was taken away, where no client asks.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A keeper and its mount.
pub struct Keeper {
    front: Box<dyn Mounter>,
    listener: UnixListener,
    /// There is one from the request to mount on.
    mount: Mutex<Option<Arc<Mount>>>,
    /// Told whenever the mount begins, ends, or a client has its answer.
    changed: Condvar,
    /// Clients that wait for an answer.
    clients: AtomicU64,
    /// Managers: they hear of the end of the mount, and, as the conversation ends, of ours.
    watchers: Mutex<Vec<UnixStream>>,
}

struct Mount {
    /// What it is called: the file, or STORE#NAME.
    volume: PathBuf,
    /// The file or block device that has it.
    file: PathBuf,
    /// If that is a store: which of its disks it is.
    disk: Option<String>,
    /// Device and inode number of the file: two paths may lead to one.
    identity: (u64, u64),
    mount_point: PathBuf,
    options: MountOptions,
    state: Mutex<MountState>,
}

struct MountState {
    phase: MountPhase,
    /// What the kernel calls it, once it is attached.
    device: Option<String>,
    events: Option<Sender<SupervisorEvent>>,
    worker: Option<OwnedFd>,
    /// Its worker was killed for good.
    is_final_worker: bool,
    status: MountStatus,
}

/// ```text
///   Starting ──▶ Serving ──▶ Ended { dead } ──▶ (cleared)
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
enum MountPhase {
    Starting,
    Serving,
    /// Nothing serves it any more. `dead`: it is still in its place.
    Ended {
        why: Option<String>,
        dead: bool,
    },
}

enum SupervisorEvent {
    Refresh(Sender<()>),
    Close(Sender<()>),
    ReadOnly(bool, Sender<Result<(), String>>),
    /// Go on as another program; answered only where that fails.
    Upgrade(upgrade::UpgradeRequest, Sender<String>),
    Died(WorkerExit),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the other end is still open: it never says anything more.
fn is_connected(client: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    rustix::net::recv(client, &mut [0u8], flags) == Err(Errno::AGAIN)
}

impl Keeper {
    /// A keeper that has mounted nothing yet, and is asked to over `listener`.
    pub fn new(front: Box<dyn Mounter>, listener: UnixListener) -> Arc<Self> {
        let (mount, watchers) = (Mutex::default(), Mutex::default());
        let (told, clients) = (Condvar::new(), AtomicU64::new(0));
        Arc::new(Self { front, listener, mount, changed: told, clients, watchers })
    }

    /// Answers clients, each in a thread of its own, until the mount has ended; or at once where
    /// none comes.
    ///
    /// # Errors
    /// What the system says of the socket.
    pub fn run(self: &Arc<Self>) -> std::io::Result<()> {
        let (keeper, listener) = (self.clone(), self.listener.try_clone()?);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                keeper.clients.fetch_add(1, Ordering::Relaxed);
                let keeper = keeper.clone();
                std::thread::spawn(move || {
                    keeper.serve(&client);
                    drop(client);
                    keeper.clients.fetch_sub(1, Ordering::Relaxed);
                    keeper.notify_waiters();
                });
            }
        });
        self.wait_until_over();
        if let Some(path) = self.listener.local_addr()?.as_pathname() {
            // The directory may have gone before.
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    fn serve(self: &Arc<Self>, client: &UnixStream) {
        if !protocol::is_same_user(client) {
            return;
        }
        let reply = match protocol::receive(client) {
            Ok(Request::Watch) => return self.serve_watcher(client),
            Ok(request) => self.answer(request, client),
            Err(error) => Reply::Failed { why: format!("the request makes no sense: {error}") },
        };
        // A client that went away does not want to know.
        let _ = protocol::send(client, &reply);
    }

    fn answer(self: &Arc<Self>, request: Request, client: &UnixStream) -> Reply {
        let failed = |why| Reply::Failed { why };
        if let Request::Mount { volume, disk, mount_point, options, replace, means } = request {
            let means = means.as_deref();
            let mounted = self.mount(volume, disk, mount_point, *options, replace, means);
            return mounted.map_or_else(failed, |notes| Reply::Mounted { notes });
        }
        let Some(mount) = self.current() else { return Reply::NotMounted };
        match request {
            Request::Status => Reply::Status(self.status(&mount)),
            Request::Remount { read_only, .. } => match self.remount(&mount, read_only) {
                Ok(()) => Reply::Done,
                Err(why) => failed(format!("{}: {why}", mount.mount_point.display())),
            },
            Request::Unmount { force, .. } => match self.unmount(&mount, force) {
                Ok(None) => Reply::Done,
                Ok(Some(why)) => Reply::Cleared { why },
                Err(why) => failed(why),
            },
            Request::End => self.shut_down_mount(&mount).map_or_else(failed, |()| Reply::Done),
            Request::Wait { .. } => Reply::Ended { why: self.wait(&mount) },
            Request::Upgrade { program } => failed(self.upgrade(&mount, program, client)),
            other => failed(format!("a keeper cannot be asked that: {other:?}")),
        }
    }

    /// Tells a manager what is kept here, and later when that has ended.
    fn serve_watcher(&self, client: &UnixStream) {
        let until = Instant::now() + FIRST_REQUEST_TIMEOUT;
        let (Some(mount), Ok(client)) = (self.wait_for_mount(until), client.try_clone()) else {
            return;
        };
        let Mount { volume, disk, identity, mount_point, .. } = &*mount;
        let (volume, mount_point) = (volume.clone(), mount_point.clone());
        let (identity, disk) = (*identity, disk.clone());
        let kept = Reply::Kept(Kept { volume, disk, identity, mount_point });
        let mut watchers = lock(&self.watchers);
        watchers.retain(is_connected);
        let mut sent = protocol::send(&client, &kept);
        if let MountPhase::Ended { why, .. } = mount.phase() {
            sent = sent.and_then(|()| protocol::send(&client, &Reply::Ended { why }));
        }
        if sent.is_ok() {
            watchers.push(client);
        }
    }

    /// The mount, unless it is over.
    fn current(&self) -> Option<Arc<Mount>> {
        lock(&self.mount).clone().filter(|mount| !mount.has_ended())
    }

    fn status(&self, mount: &Mount) -> Status {
        mount.is_responding(STATUS_TIMEOUT);
        Status { mounts: vec![lock(&mount.state).status.clone()], ..Status::default() }
    }

    /// Waits until nothing serves `mount`; says why it ended, if not on request.
    fn wait(&self, mount: &Mount) -> Option<String> {
        self.wait_while(mount, None, Mount::is_served);
        match mount.phase() {
            MountPhase::Ended { why, .. } => why,
            _ => None,
        }
    }

    fn wait_for_mount(&self, until: Instant) -> Option<Arc<Mount>> {
        let mut mount = lock(&self.mount);
        while mount.is_none() {
            let left = until.checked_duration_since(Instant::now())?;
            mount =
                self.changed.wait_timeout(mount, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        mount.clone()
    }

    /// Waits until nothing is mounted any more, and no client waits for an answer. A mount that
    /// is dead counts as mounted: it is known here why it is.
    fn wait_until_over(&self) {
        let mount = self.wait_for_mount(Instant::now() + FIRST_REQUEST_TIMEOUT);
        let mut held = lock(&self.mount);
        loop {
            let is_over = mount.as_ref().is_none_or(|mount| mount.has_ended());
            if is_over && self.clients.load(Ordering::Relaxed) == 0 {
                return;
            }
            let waited = self.changed.wait_timeout(held, POLL_INTERVAL);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Mount {
    fn phase(&self) -> MountPhase {
        lock(&self.state).phase.clone()
    }

    fn is_served(&self) -> bool {
        !matches!(self.phase(), MountPhase::Ended { .. })
    }

    /// Whether its worker tells how it is.
    fn is_responding(&self, wait: Duration) -> bool {
        let asks = lock(&self.state).events.clone();
        let (done, answer) = channel::<()>();
        let asked = asks.is_some_and(|asks| asks.send(SupervisorEvent::Refresh(done)).is_ok());
        // The end is dropped when the numbers are in: that is the answer.
        asked && answer.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected)
    }

    /// Ends its worker, and has no other take over.
    fn kill(&self) {
        let mut state = lock(&self.state);
        state.is_final_worker = true;
        if let Some(worker) = &state.worker {
            // It may have ended by itself, which is as good.
            let _ = rustix::process::pidfd_send_signal(worker, rustix::process::Signal::KILL);
        }
    }

    fn is_dead(&self) -> bool {
        matches!(self.phase(), MountPhase::Ended { dead: true, .. })
    }

    /// Whether the kernel has it in its place.
    fn is_in_place(&self) -> bool {
        let device = lock(&self.state).device.clone();
        device.is_some_and(|device| {
            let mut all = mount_table::mounts().into_iter();
            all.any(|entry| entry.device == device && entry.at == self.mount_point)
        })
    }

    /// Whether it has ended, and is not in its place any more.
    fn has_ended(&self) -> bool {
        match self.phase() {
            MountPhase::Ended { dead, .. } => !dead || !self.is_in_place(),
            _ => false,
        }
    }

    /// Whether it was unmounted, and its worker is about to end.
    fn is_ending(&self) -> bool {
        self.phase() == MountPhase::Serving && !self.is_in_place()
    }
}
