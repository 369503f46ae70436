//! The keeper of a mount: owns everything that outlives a worker, starts workers and watches them.
//!
//! ```text
//!   manager ── JSON line ──▶ keeper ──┬─ opens and claims the volume
//!                                     ├─ worker process, confined ── volume contract
//!                                     ├─ disk service: the only one to write the volume
//!                                     ├─ attaches the mount point, gives the worker
//!                                     │  the descriptor and keeps one itself
//!                                     └─ supervisor thread: status, death, hang
//! ```
//!
//! Each mount has its own keeper, a process that outlives the manager and, by [`upgrade`], its own
//! program.
//!
//! Law 1: the keeper interprets no contents of a volume.
//! Law 2: when a worker dies or hangs, a successor is started. If none may be, the connection is
//! closed, so that waiting calls fail instead of hanging. The mount stays in place, dead, until a
//! user unmounts it: writes to its path must not reach the directory below. The volume is released
//! at once.

mod mounting;
mod supervision;
mod supervisor;
mod unmounting;
pub mod upgrade;

use draconis_types::path_bytes::ShowPath;
use mounting::MountTarget;
pub(crate) use mounting::dead_mount_message;
use unmounting::Unmounted;

use draconis_types::lock::{Condvar, Mutex};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::mount_copies::find_copies;
use crate::mount_namespace;
use crate::mount_table;
use crate::mounter::Mounter;
use crate::options::MountOptions;
use crate::protocol::{self, KeeperMount, MountStatus, Reply, Request, Status};
use crate::worker_process::{ControlRequest, WorkerExit};

/// Timeout for the first request to a newly started keeper.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of `status` for fresh numbers from the worker.
const STATUS_TIMEOUT: Duration = Duration::from_millis(300);
/// Timeout for the kernel's first request.
const FUSE_INIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a close that has changes to write. A hang is detected by other means.
const VOLUME_CLOSE_TIMEOUT: Duration = Duration::from_secs(600);
/// Poll interval for detecting that a dead mount was removed.
const DEAD_MOUNT_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A keeper and its mount.
pub struct Keeper {
    mounter: Box<dyn Mounter>,
    listener: UnixListener,
    /// Set from the mount request on.
    mount: Mutex<Option<Arc<Mount>>>,
    /// Notified whenever the mount begins or ends, or a client has its reply.
    changed: Condvar,
    /// Number of clients that wait for a reply.
    clients: AtomicU64,
    /// Connections of managers. They receive the end of the mount; the connection closes when the
    /// keeper ends.
    watchers: Mutex<Vec<UnixStream>>,
}

struct Mount {
    /// The name for users: the file, or STORE#NAME.
    volume: PathBuf,
    /// The file or block device that contains it.
    file: PathBuf,
    /// Name of the disk, if the file is a store.
    disk: Option<String>,
    /// Device and inode number of the file: two paths may lead to one.
    identity: (u64, u64),
    mount_point: PathBuf,
    /// The mount point, or its other name for mount(2).
    place: PathBuf,
    options: MountOptions,
    state: Mutex<MountState>,
}

struct MountState {
    phase: MountPhase,
    /// The kernel's device number of the mount, once attached.
    device: Option<String>,
    events: Option<Sender<SupervisorEvent>>,
    worker: Option<OwnedFd>,
    /// True if the worker was killed and must not be restarted.
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
    /// Nothing serves it any more. `dead`: it is still in place.
    Ended {
        why: Option<String>,
        dead: bool,
    },
}

enum SupervisorEvent {
    Refresh(Sender<()>),
    Close(Sender<()>),
    Control(ControlRequest, Sender<Result<(), String>>),
    /// Upgrade to another program; answered only on failure.
    Upgrade(upgrade::UpgradeRequest, Sender<String>),
    Died(WorkerExit),
}

/// Returns true if the peer is still connected. It never sends anything more.
fn is_connected(client: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    rustix::net::recv(client, &mut [0u8], flags) == Err(Errno::AGAIN)
}

impl Keeper {
    /// Creates a keeper without a mount that receives its requests over `listener`.
    pub fn new(mounter: Box<dyn Mounter>, listener: UnixListener) -> Arc<Self> {
        let (mount, watchers) = (Mutex::default(), Mutex::default());
        let (changed, clients) = (Condvar::new(), AtomicU64::new(0));
        Arc::new(Self { mounter, listener, mount, changed, clients, watchers })
    }

    /// Serves clients, each in its own thread, until the mount has ended. Returns early if no mount
    /// request arrives in time.
    ///
    /// # Errors
    /// The socket's error.
    pub fn run(self: &Arc<Self>) -> std::io::Result<()> {
        let (keeper, listener) = (self.clone(), self.listener.try_clone()?);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                keeper.clients.fetch_add(1, Ordering::Relaxed);
                let keeper = keeper.clone();
                std::thread::spawn(move || {
                    keeper.serve_client(&client);
                    drop(client);
                    keeper.clients.fetch_sub(1, Ordering::Relaxed);
                    keeper.notify_waiters();
                });
            }
        });
        self.wait_until_ended();
        if let Some(path) = self.listener.local_addr()?.as_pathname() {
            // The directory may be gone already.
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    fn serve_client(self: &Arc<Self>, client: &UnixStream) {
        if !protocol::is_same_user(client) {
            return;
        }
        let reply = match protocol::receive_line(client) {
            Ok(Request::Watch) => return self.serve_watcher(client),
            Ok(request) => self.handle_request(request, client),
            Err(error) => Reply::Failed { why: format!("the request makes no sense: {error}") },
        };
        // Fails only if the client is gone.
        let _ = protocol::send_line(client, &reply);
    }

    fn handle_request(self: &Arc<Self>, request: Request, client: &UnixStream) -> Reply {
        let failed = |why| Reply::Failed { why };
        if let Request::Mount { volume, disk, mount_point, place, options, replace, means } =
            request
        {
            let means = means.as_deref();
            let target = MountTarget { mount_point, place };
            let mounted = self.mount(volume, disk, target, *options, replace, means);
            return mounted.map_or_else(failed, |notes| Reply::Mounted { notes });
        }
        let Some(mount) = self.active_mount() else { return Reply::NotMounted };
        match request {
            Request::Status => Reply::Status(self.status(&mount)),
            Request::Remount { read_only, .. } => match self.remount(&mount, read_only) {
                Ok(()) => Reply::Done,
                Err(why) => failed(format!("{}: {why}", mount.mount_point.shown())),
            },
            Request::Unmount { force, .. } => match self.unmount(&mount, force) {
                Ok(Unmounted::Gone) => Reply::Done,
                Ok(Unmounted::WasDead { why }) => Reply::Cleared { why },
                Ok(Unmounted::Copied { copies }) => Reply::Copied { copies },
                Err(why) => failed(why),
            },
            Request::End => self.shut_down_mount(&mount).map_or_else(failed, |()| Reply::Done),
            Request::Wait { .. } => Reply::Ended { why: self.wait_until_unserved(&mount) },
            Request::Upgrade { program } => failed(self.upgrade(&mount, program, client)),
            other => failed(format!("a keeper cannot be asked that: {other:?}")),
        }
    }

    /// Reports the mount to a manager, and registers it for the end of the mount.
    fn serve_watcher(&self, client: &UnixStream) {
        let until = Instant::now() + FIRST_REQUEST_TIMEOUT;
        let (Some(mount), Ok(client)) = (self.wait_for_mount(until), client.try_clone()) else {
            return;
        };
        let Mount { volume, disk, identity, mount_point, .. } = &*mount;
        let (volume, mount_point) = (volume.clone(), mount_point.clone());
        let (identity, disk) = (*identity, disk.clone());
        let namespace = Some(mount_namespace::own_namespace());
        let kept = Reply::Kept(KeeperMount { volume, disk, identity, mount_point, namespace });
        let mut watchers = self.watchers.lock();
        watchers.retain(is_connected);
        let mut sent = protocol::send_line(&client, &kept);
        if let MountPhase::Ended { why, .. } = mount.phase() {
            sent = sent.and_then(|()| protocol::send_line(&client, &Reply::Ended { why }));
        }
        if sent.is_ok() {
            watchers.push(client);
        }
    }

    /// Returns the mount, unless it has ended.
    fn active_mount(&self) -> Option<Arc<Mount>> {
        self.mount.lock().clone().filter(|mount| !mount.has_ended())
    }

    fn status(&self, mount: &Mount) -> Status {
        mount.is_responding(STATUS_TIMEOUT);
        let copies = if mount.is_ending() { mount.copies() } else { vec![] };
        let status = MountStatus { copies, ..mount.state.lock().status.clone() };
        Status { mounts: vec![status], ..Status::default() }
    }

    /// Waits until nothing serves `mount`; returns the reason if the end was not requested.
    fn wait_until_unserved(&self, mount: &Mount) -> Option<String> {
        self.wait_while(mount, None, Mount::is_served);
        match mount.phase() {
            MountPhase::Ended { why, .. } => why,
            _ => None,
        }
    }

    fn wait_for_mount(&self, until: Instant) -> Option<Arc<Mount>> {
        let mut mount = self.mount.lock();
        while mount.is_none() {
            let left = until.checked_duration_since(Instant::now())?;
            self.changed.wait_for(&mut mount, left);
        }
        mount.clone()
    }

    /// Waits until nothing is mounted and no client waits for a reply. A dead mount counts as
    /// mounted, because only this process knows why it died.
    fn wait_until_ended(&self) {
        let mount = self.wait_for_mount(Instant::now() + FIRST_REQUEST_TIMEOUT);
        let mut held = self.mount.lock();
        loop {
            let is_over = mount.as_ref().is_none_or(|mount| mount.has_ended());
            if is_over && self.clients.load(Ordering::Relaxed) == 0 {
                return;
            }
            self.changed.wait_for(&mut held, DEAD_MOUNT_POLL_INTERVAL);
        }
    }
}

impl Mount {
    fn phase(&self) -> MountPhase {
        self.state.lock().phase.clone()
    }

    fn is_served(&self) -> bool {
        !matches!(self.phase(), MountPhase::Ended { .. })
    }

    /// Returns true if its worker reports its status in time.
    fn is_responding(&self, wait: Duration) -> bool {
        let asks = self.state.lock().events.clone();
        let (done, answer) = channel::<()>();
        let asked = asks.is_some_and(|asks| asks.send(SupervisorEvent::Refresh(done)).is_ok());
        // The supervisor drops the sender when the numbers are updated: that is the reply.
        asked && answer.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected)
    }

    /// Kills its worker without a successor.
    fn kill_worker(&self) {
        let mut state = self.state.lock();
        state.is_final_worker = true;
        if let Some(worker) = &state.worker {
            // The worker may have exited already, which is equivalent.
            let _ = rustix::process::pidfd_send_signal(worker, rustix::process::Signal::KILL);
        }
    }

    fn is_dead(&self) -> bool {
        matches!(self.phase(), MountPhase::Ended { dead: true, .. })
    }

    /// Returns true if the kernel still has the mount in place.
    fn is_in_place(&self) -> bool {
        let device = self.state.lock().device.clone();
        device.is_some_and(|device| {
            let mut all = mount_table::read_mounts().into_iter();
            all.any(|entry| entry.device == device && entry.mount_point == self.mount_point)
        })
    }

    /// Returns true if it has ended and is not in place any more.
    fn has_ended(&self) -> bool {
        match self.phase() {
            MountPhase::Ended { dead, .. } => !dead || !self.is_in_place(),
            _ => false,
        }
    }

    /// Returns the holders of its copies.
    fn copies(&self) -> Vec<String> {
        let device = self.state.lock().device.clone();
        device.map_or(vec![], |device| find_copies(&device))
    }

    /// Returns true if it was unmounted and its worker is about to end, once no copy is left.
    fn is_ending(&self) -> bool {
        self.phase() == MountPhase::Serving && !self.is_in_place()
    }
}
