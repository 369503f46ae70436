//! The manager: knows names and mount points, starts and watches one worker per mount.
//!
//! ```text
//!   command line ── JSON line ──▶ manager ──┬─ opens and claims the volume
//!                                           ├─ worker process, confined ── volume contract
//!                                           ├─ attaches the mount point, gives the worker
//!                                           │  the descriptor and keeps one itself
//!                                           └─ watcher thread: status, death, hang
//! ```
//!
//! Law 1: a volume is served once, and a mount point is used once, by any manager.
//! Law 2: nothing that a volume holds is looked at here.
//! Law 3: when a worker dies or hangs, another takes over. Where none may, the connection is
//! closed, so that every call that waits gets an error instead of waiting. The mount stays in its place, dead, until a user unmounts
//! it: what is written by its path must not go to the disk below. The volume is free at once.

mod ending;
mod front;
mod lives;
mod starting;
mod watching;

pub use front::{Front, NotDetached};

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::options::MountOptions;
use crate::process::Exit;
use crate::protocol::{self, LostMount, MountStatus, Reply, Request, Status};
use crate::table;

/// How long `status` waits for fresh numbers.
const STATUS_WAIT: Duration = Duration::from_millis(300);
/// How long the kernel may take to send the first request.
const SERVE_WAIT: Duration = Duration::from_secs(10);
/// How long, when it has changes to bring home first. That it hangs is noticed otherwise.
const CLOSE_WAIT: Duration = Duration::from_secs(600);
/// How often it is looked whether a dead mount was taken away, where no client asks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A manager and what it has mounted.
pub struct Manager {
    front: Box<dyn Front>,
    mounts: Mutex<BTreeMap<u64, Arc<Mount>>>,
    lost: Mutex<Vec<LostMount>>,
    /// Told whenever a mount ends or a client has its answer.
    ended: Condvar,
    next: AtomicU64,
    /// Clients that wait for an answer.
    clients: AtomicU64,
}

struct Mount {
    volume: PathBuf,
    /// Device and inode number of the volume: two paths may lead to one.
    identity: (u64, u64),
    mount_point: PathBuf,
    options: MountOptions,
    state: Mutex<MountState>,
}

struct MountState {
    phase: Phase,
    /// What the kernel calls it, once it is attached.
    device: Option<String>,
    asks: Option<Sender<Ask>>,
    worker: Option<OwnedFd>,
    /// Its worker was killed for good.
    is_last: bool,
    status: MountStatus,
}

/// ```text
///   Starting ──▶ Serving ──▶ Ended { dead } ──▶ (out of the table)
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Starting,
    Serving,
    /// Nothing serves it any more. `dead`: it is still in its place.
    Ended {
        why: Option<String>,
        dead: bool,
    },
}

enum Ask {
    Refresh(Sender<()>),
    Close(Sender<()>),
    ReadOnly(bool, Sender<Result<(), String>>),
    Died(Exit),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Manager {
    /// A manager that has mounted nothing yet.
    pub fn new(front: Box<dyn Front>) -> Arc<Self> {
        Arc::new(Self {
            front,
            mounts: Mutex::default(),
            lost: Mutex::default(),
            ended: Condvar::new(),
            next: AtomicU64::new(0),
            clients: AtomicU64::new(0),
        })
    }

    /// Serves `listener` in a thread of its own, each client in another.
    pub fn listen(self: &Arc<Self>, listener: UnixListener) {
        let manager = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                manager.clients.fetch_add(1, Ordering::Relaxed);
                let manager = manager.clone();
                std::thread::spawn(move || {
                    manager.serve(&client);
                    // Under the lock, or a waiter could miss it.
                    let mounts = lock(&manager.mounts);
                    manager.clients.fetch_sub(1, Ordering::Relaxed);
                    manager.ended.notify_all();
                    drop(mounts);
                });
            }
        });
    }

    fn serve(self: &Arc<Self>, client: &UnixStream) {
        // Sockets live in a directory that only their owner can enter; this is the second lock.
        let peer = rustix::net::sockopt::socket_peercred(client);
        if peer.is_ok_and(|peer| peer.uid != rustix::process::geteuid()) {
            return;
        }
        let reply = match protocol::receive(client) {
            Ok(request) => self.answer(request),
            Err(error) => Reply::Failed { why: format!("the request makes no sense: {error}") },
        };
        // A client that went away does not want to know.
        let _ = protocol::send(client, &reply);
    }

    fn answer(self: &Arc<Self>, request: Request) -> Reply {
        match request {
            Request::Mount { volume, mount_point, options, replace } => {
                match self.mount(volume, mount_point, options, replace) {
                    Ok(notes) => Reply::Mounted { notes },
                    Err(why) => Reply::Failed { why },
                }
            }
            Request::Remount { mount_point, read_only } => {
                let Some(mount) = self.find(&mount_point) else { return Reply::NotMounted };
                match self.remount(&mount, read_only) {
                    Ok(()) => Reply::Done,
                    Err(why) => Reply::Failed { why: format!("{}: {why}", mount_point.display()) },
                }
            }
            Request::Unmount { mount_point, force } => {
                let Some(mount) = self.find(&mount_point) else { return Reply::NotMounted };
                match self.unmount(&mount, force) {
                    Ok(None) => Reply::Done,
                    Ok(Some(why)) => Reply::Cleared { why },
                    Err(why) => Reply::Failed { why },
                }
            }
            Request::Status => Reply::Status(self.status()),
            Request::Wait { mount_point } => Reply::Ended { why: self.wait(&mount_point) },
        }
    }

    /// What is mounted there; one that is served before one that is dead.
    fn find(&self, mount_point: &Path) -> Option<Arc<Mount>> {
        let mut mounts = lock(&self.mounts);
        mounts.retain(|_, mount| !mount.was_cleared());
        mounts.values().rfind(|mount| mount.mount_point == mount_point).cloned()
    }

    /// Everything that is mounted, with numbers as fresh as the workers give them.
    pub fn status(&self) -> Status {
        let mounts: Vec<Arc<Mount>> = {
            let mut mounts = lock(&self.mounts);
            mounts.retain(|_, mount| !mount.was_cleared());
            mounts.values().cloned().collect()
        };
        for mount in &mounts {
            mount.answers(STATUS_WAIT);
        }
        let mounts = mounts.iter().map(|mount| lock(&mount.state).status.clone()).collect();
        let lost = lock(&self.lost).clone();
        Status { manager_pid: Some(std::process::id()), mounts, lost, dead: vec![] }
    }

    /// Waits until nothing serves `mount_point`; says why it ended, if not on request.
    pub fn wait(&self, mount_point: &Path) -> Option<String> {
        let mount = self.find(mount_point)?;
        self.wait_while(&mount, None, Mount::is_served);
        match mount.phase() {
            Phase::Ended { why, .. } => why,
            _ => None,
        }
    }

    /// Waits until nothing has been mounted, and no client has asked anything, for `idle`. With
    /// `dead` mounts that are dead count as mounted: it knows why they are.
    pub fn wait_idle(&self, idle: Duration, dead: bool) {
        let mut mounts = lock(&self.mounts);
        loop {
            mounts.retain(|_, mount| !mount.was_cleared());
            let served = mounts.values().any(|mount| mount.is_served());
            if served || self.clients.load(Ordering::Relaxed) > 0 {
                mounts = self.ended.wait(mounts).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let stays = dead && !mounts.is_empty();
            let wait = if stays { LOOK_EVERY } else { idle };
            let (held, waited) =
                self.ended.wait_timeout(mounts, wait).unwrap_or_else(PoisonError::into_inner);
            mounts = held;
            let changed = mounts.values().any(|mount| mount.is_served())
                || self.clients.load(Ordering::Relaxed) > 0;
            if waited.timed_out() && !stays && !changed {
                return;
            }
        }
    }
}

impl Mount {
    fn phase(&self) -> Phase {
        lock(&self.state).phase.clone()
    }

    fn is_served(&self) -> bool {
        !matches!(self.phase(), Phase::Ended { .. })
    }

    /// Whether its worker tells how it is.
    fn answers(&self, wait: Duration) -> bool {
        let asks = lock(&self.state).asks.clone();
        let (done, answer) = channel::<()>();
        let asked = asks.is_some_and(|asks| asks.send(Ask::Refresh(done)).is_ok());
        // The end is dropped when the numbers are in: that is the answer.
        asked && answer.recv_timeout(wait) == Err(RecvTimeoutError::Disconnected)
    }

    /// Ends its worker, and has no other take over.
    fn kill(&self) {
        let mut state = lock(&self.state);
        state.is_last = true;
        if let Some(worker) = &state.worker {
            // It may have ended by itself, which is as good.
            let _ = rustix::process::pidfd_send_signal(worker, rustix::process::Signal::KILL);
        }
    }

    fn is_dead(&self) -> bool {
        matches!(self.phase(), Phase::Ended { dead: true, .. })
    }

    /// Whether the kernel has it in its place.
    fn is_in_place(&self) -> bool {
        let device = lock(&self.state).device.clone();
        device.is_some_and(|device| {
            let mut all = table::entries().into_iter();
            all.any(|entry| entry.device == device && entry.at == self.mount_point)
        })
    }

    /// A dead one that was unmounted without us.
    fn was_cleared(&self) -> bool {
        self.is_dead() && !self.is_in_place()
    }

    /// Whether it was unmounted, and its worker is about to end.
    fn is_ending(&self) -> bool {
        self.phase() == Phase::Serving && !self.is_in_place()
    }
}
