//! The manager: knows what is mounted where, starts a keeper for each mount and passes on what
//! clients ask of it.
//!
//! ```text
//!   command line ── JSON line ──▶ manager ── JSON line ──▶ keeper ── worker
//!                                    └── follows ────────▶ keeper ── worker
//! ```
//!
//! Law 1: a volume is served once, and a mount point is used once.
//! Law 2: what is known here the keepers know, too: a manager that dies takes nothing along, and
//! the next one finds them by their sockets.

mod keepers;

use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::keepers::{AskError, KeeperHandle, KeeperPhase};
use crate::claimed_volume::identity;
use crate::client::RuntimeDir;
use crate::protocol::{self, Kept, LostMount, Reply, Request, Status, Upgraded, volume_name};

/// How long a mount that is just ending may take to give its volume and directory back.
const GIVE_BACK_WAIT: Duration = Duration::from_secs(3);
/// How long a keeper may take to tell how its mount is.
const STATUS_WAIT: Duration = Duration::from_secs(2);
/// How often it is looked whether a keeper has gone, where none says so.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many mounts that were lost are remembered.
const MAX_LOST_MOUNTS: usize = 16;

/// A manager, and the keepers that it knows.
pub struct Manager {
    directory: RuntimeDir,
    /// In order of mounting.
    keepers: Mutex<BTreeMap<u64, Arc<KeeperHandle>>>,
    lost: Mutex<Vec<LostMount>>,
    /// Told whenever a mount begins or ends, or a client has its answer.
    changed: Condvar,
    /// Clients that wait for an answer.
    clients: AtomicU64,
    is_retiring: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Manager {
    /// A manager of everything that is mounted through `directory`.
    ///
    /// # Errors
    /// When what is there cannot be read.
    pub fn new(directory: RuntimeDir) -> std::io::Result<Arc<Self>> {
        let manager = Arc::new(Self {
            directory,
            keepers: Mutex::default(),
            lost: Mutex::default(),
            changed: Condvar::new(),
            clients: AtomicU64::new(0),
            is_retiring: AtomicBool::new(false),
        });
        manager.find_keepers()?;
        Ok(manager)
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
                    drop(client);
                    manager.clients.fetch_sub(1, Ordering::Relaxed);
                    manager.notify_waiters();
                });
            }
        });
    }

    fn serve(self: &Arc<Self>, client: &UnixStream) {
        if !protocol::is_same_user(client) {
            return;
        }
        let request = protocol::receive(client);
        let retires = matches!(request, Ok(Request::Retire));
        let reply = match request {
            Ok(request) => self.answer(request),
            Err(error) => Reply::Failed { why: format!("the request makes no sense: {error}") },
        };
        // A client that went away does not want to know.
        let _ = protocol::send(client, &reply);
        if retires {
            self.is_retiring.store(true, Ordering::Relaxed);
            self.notify_waiters();
        }
    }

    fn answer(self: &Arc<Self>, request: Request) -> Reply {
        let at = match &request {
            Request::Mount { volume, disk, mount_point, replace, .. } => {
                let mount_point = mount_point.clone();
                let kept = identity(volume).map(|identity| Kept {
                    volume: volume_name(volume, disk.as_deref()),
                    disk: disk.clone(),
                    identity,
                    mount_point,
                });
                let mounted = kept.and_then(|kept| self.mount(kept, &request, *replace));
                return mounted.unwrap_or_else(|why| Reply::Failed { why });
            }
            Request::Status => return Reply::Status(self.status()),
            Request::Upgrade { program } => {
                return Reply::Upgraded { mounts: self.upgrade(program) };
            }
            Request::Retire => return Reply::Done,
            Request::Remount { mount_point, .. }
            | Request::Unmount { mount_point, .. }
            | Request::Wait { mount_point } => mount_point,
            Request::End | Request::Watch => {
                return Reply::Failed { why: "that is asked of keepers".into() };
            }
        };
        let is_wait = matches!(request, Request::Wait { .. });
        loop {
            let Some(keeper) = self.find(at) else {
                return if is_wait { Reply::Ended { why: None } } else { Reply::NotMounted };
            };
            match keeper.request(&request, None) {
                Ok(reply) => return reply,
                // It goes on as another program: what only waits is asked again.
                Err(AskError::Lost(_)) if is_wait && keeper.is_running() => {}
                Err(AskError::Gone) if is_wait => return Reply::Ended { why: None },
                Err(AskError::Gone) => return Reply::NotMounted,
                Err(AskError::Lost(error)) => {
                    let why = format!("{}: its keeper does not answer: {error}", at.display());
                    return Reply::Failed { why };
                }
            }
        }
    }

    /// What is mounted there; one that is served before one that is dead.
    fn find(&self, mount_point: &Path) -> Option<Arc<KeeperHandle>> {
        let mut keepers = self.keepers();
        keepers.retain(|keeper| keeper.mount.mount_point == mount_point);
        let served = keepers.iter().rposition(|keeper| !keeper.is_dead());
        match served {
            Some(at) => Some(keepers.swap_remove(at)),
            None => keepers.pop(),
        }
    }

    /// Has a keeper mount what `request` says; what it answers.
    ///
    /// # Errors
    /// A sentence for the user.
    fn mount(
        self: &Arc<Self>,
        kept: Kept,
        request: &Request,
        replace: bool,
    ) -> Result<Reply, String> {
        let cannot = |error| format!("cannot start a keeper: {error}");
        // The place in the table is taken first: two requests for one volume cannot both pass.
        let (id, keeper) = self.reserve(kept, replace)?;
        let started = keeper.start().map_err(cannot).and_then(|()| {
            keeper.request(request, None).map_err(|why| format!("its keeper was lost: {why}"))
        });
        if matches!(started, Ok(Reply::Mounted { .. })) {
            keeper.set_phase(KeeperPhase::Serving);
            self.watch_keeper(id, &keeper);
        } else {
            self.release(id);
        }
        started
    }

    /// Takes a place for a mount that is to be.
    fn reserve(&self, kept: Kept, replace: bool) -> Result<(u64, Arc<KeeperHandle>), String> {
        let until = Instant::now() + GIVE_BACK_WAIT;
        let mut keepers = lock(&self.keepers);
        loop {
            let conflict = keepers.values().find_map(|other| {
                let is_replaced = replace && other.is_dead();
                let why = other.conflict_with(&kept).filter(|_| !is_replaced)?;
                Some((other.clone(), why))
            });
            let Some((other, why)) = conflict else { break };
            // One that is just ending gives back what it has.
            let left = until.checked_duration_since(Instant::now());
            let Some(left) = left.filter(|_| other.is_ending()) else { return Err(why) };
            let wait = left.min(Duration::from_millis(50));
            keepers =
                self.changed.wait_timeout(keepers, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        lock(&self.lost).retain(|lost| lost.mount_point != kept.mount_point);
        let id = keepers.last_key_value().map_or(0, |(id, _)| id + 1);
        let id = self.directory.next_keeper_id(id).map_err(|error| error.to_string())?;
        let entry = Arc::new(KeeperHandle::new(self.directory.keeper_socket(id), kept));
        keepers.insert(id, entry.clone());
        Ok((id, entry))
    }

    fn release(&self, id: u64) {
        lock(&self.keepers).remove(&id);
        self.changed.notify_all();
    }

    /// The keepers, in order of mounting.
    fn keepers(&self) -> Vec<Arc<KeeperHandle>> {
        lock(&self.keepers).values().cloned().collect()
    }

    /// Everything that is mounted, with numbers as fresh as the workers give them.
    pub fn status(&self) -> Status {
        let keepers = self.keepers();
        let mounts = std::thread::scope(|scope| {
            let asked: Vec<_> =
                keepers.iter().map(|keeper| scope.spawn(|| keeper.status())).collect();
            asked.into_iter().flat_map(|asked| asked.join().unwrap_or_default()).collect()
        });
        let lost = lock(&self.lost).clone();
        Status { manager_pid: Some(std::process::id()), mounts, lost, dead: vec![] }
    }

    /// Has everything that is mounted go on by `program`, one after the other.
    fn upgrade(&self, program: &Path) -> Vec<Upgraded> {
        let keepers = self.keepers().into_iter().filter(|keeper| !keeper.is_dead());
        let upgrade = |keeper: &KeeperHandle| {
            let request = Request::Upgrade { program: program.to_path_buf() };
            let mount_point = keeper.mount.mount_point.clone();
            let why = match keeper.request(&request, None) {
                Ok(Reply::Done) => None,
                Ok(Reply::Failed { why }) => Some(why),
                // It was unmounted meanwhile.
                Ok(Reply::NotMounted) | Err(AskError::Gone) => return None,
                Ok(other) => Some(format!("its keeper answers something else: {other:?}")),
                Err(AskError::Lost(error)) => Some(format!("its keeper was lost: {error}")),
            };
            Some(Upgraded { mount_point, why })
        };
        keepers.filter_map(|keeper| upgrade(&keeper)).collect()
    }

    /// Unmounts everything, in use or not. What programs have changed is brought home;
    /// what they change after that is refused.
    pub fn unmount_all(&self) {
        for keeper in self.keepers() {
            match keeper.request(&Request::End, None) {
                Ok(Reply::Failed { why }) => log::error!("{why}"),
                Ok(_) | Err(AskError::Gone) => {}
                Err(AskError::Lost(error)) => {
                    log::error!("{}: {error}", keeper.mount.mount_point.display());
                }
            }
        }
    }

    /// Waits until nothing has been mounted, and no client has asked anything, for `idle`; or the
    /// manager is told to retire.
    pub fn wait_idle(&self, idle: Duration) {
        let mut keepers = lock(&self.keepers);
        let mut since = Instant::now();
        while since.elapsed() < idle {
            if self.is_retiring() {
                return;
            }
            let wait = LOOK_EVERY.min(idle);
            keepers =
                self.changed.wait_timeout(keepers, wait).unwrap_or_else(PoisonError::into_inner).0;
            if !keepers.is_empty() || self.clients.load(Ordering::Relaxed) > 0 {
                since = Instant::now();
            }
        }
    }

    /// Waits until the manager is told to retire.
    pub fn wait_until_retired(&self) {
        let mut keepers = lock(&self.keepers);
        while !self.is_retiring() {
            keepers = self.changed.wait(keepers).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn is_retiring(&self) -> bool {
        self.is_retiring.load(Ordering::Relaxed)
    }

    /// Wakes all who wait.
    fn notify_waiters(&self) {
        // Under the lock, or a waiter that looks at this moment could miss it.
        let keepers = lock(&self.keepers);
        self.changed.notify_all();
        drop(keepers);
    }
}
