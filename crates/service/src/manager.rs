//! The manager: knows all mounts, starts a keeper for each, and forwards client requests.
//!
//! ```text
//!   command line ── JSON line ──▶ manager ── JSON line ──▶ keeper ── worker
//!                                    └── watches ────────▶ keeper ── worker
//! ```
//!
//! Law 1: a volume is served once, and a mount point is used once.
//! Law 2: a manager has the keepers of its own mount namespace. It only reports those of others.
//! Law 3: the keepers know everything that the manager knows. A manager that dies loses nothing,
//! and the next one finds the keepers by their sockets.

mod keepers;

use draconis_types::lock::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use draconis_types::path_bytes::ShowPath;

use self::keepers::{KeeperHandle, KeeperPhase, KeeperRequestError};
use crate::client::RuntimeDir;
use crate::identity::file_identity;
use crate::mount_namespace;
use crate::protocol::{
    self, KeeperMount, LostMount, Reply, Request, Status, UpgradeResult, display_name,
};

/// Timeout for an ending mount to release its volume and directory.
const VOLUME_RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for a keeper's status reply.
const KEEPER_STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// Poll interval for detecting that a keeper has gone without notice.
const KEEPER_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of remembered lost mounts.
const MAX_LOST_MOUNTS: usize = 16;

/// A manager and the keepers that it knows.
pub struct Manager {
    directory: RuntimeDir,
    /// By id, in order of mounting.
    keepers: Mutex<BTreeMap<u64, Arc<KeeperHandle>>>,
    lost: Mutex<Vec<LostMount>>,
    /// Notified whenever a mount begins or ends, or a client has its reply.
    changed: Condvar,
    /// Number of clients that wait for a reply.
    clients: AtomicU64,
    is_retiring: AtomicBool,
}

impl Manager {
    /// Creates the manager of everything that is mounted through `directory`.
    ///
    /// # Errors
    /// If `directory` cannot be read.
    pub fn new(directory: RuntimeDir) -> std::io::Result<Arc<Self>> {
        let manager = Arc::new(Self {
            directory,
            keepers: Mutex::default(),
            lost: Mutex::default(),
            changed: Condvar::new(),
            clients: AtomicU64::new(0),
            is_retiring: AtomicBool::new(false),
        });
        manager.adopt_running_keepers()?;
        Ok(manager)
    }

    /// Serves `listener` in a thread, and each client in another.
    pub fn listen(self: &Arc<Self>, listener: UnixListener) {
        let manager = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                manager.clients.fetch_add(1, Ordering::Relaxed);
                let manager = manager.clone();
                std::thread::spawn(move || {
                    manager.serve_client(&client);
                    drop(client);
                    manager.clients.fetch_sub(1, Ordering::Relaxed);
                    manager.notify_waiters();
                });
            }
        });
    }

    fn serve_client(self: &Arc<Self>, client: &UnixStream) {
        if !protocol::is_same_user(client) {
            return;
        }
        let request = protocol::receive_line(client);
        let retires = matches!(request, Ok(Request::Retire));
        let reply = match request {
            Ok(request) => self.handle_request(request),
            Err(error) => Reply::Failed { why: format!("the request makes no sense: {error}") },
        };
        // Fails only if the client is gone.
        let _ = protocol::send_line(client, &reply);
        if retires {
            self.is_retiring.store(true, Ordering::Relaxed);
            self.notify_waiters();
        }
    }

    fn handle_request(self: &Arc<Self>, request: Request) -> Reply {
        let at = match &request {
            Request::Mount { volume, disk, mount_point, replace, .. } => {
                let mount_point = mount_point.clone();
                let kept = file_identity(volume).map(|identity| KeeperMount {
                    volume: display_name(volume, disk.as_deref()),
                    disk: disk.clone(),
                    identity,
                    mount_point,
                    namespace: Some(mount_namespace::own_namespace()),
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
            let Some(keeper) = self.find_keeper(at) else {
                return if is_wait { Reply::Ended { why: None } } else { Reply::NotMounted };
            };
            match keeper.send_request(&request, None) {
                Ok(reply) => return reply,
                // The keeper is being upgraded: repeat the wait.
                Err(KeeperRequestError::Lost(_)) if is_wait && keeper.is_running() => {}
                Err(KeeperRequestError::Gone) if is_wait => return Reply::Ended { why: None },
                Err(KeeperRequestError::Gone) => return Reply::NotMounted,
                Err(KeeperRequestError::Lost(error)) => {
                    let why = format!("{}: its keeper does not answer: {error}", at.shown());
                    return Reply::Failed { why };
                }
            }
        }
    }

    /// Returns the keeper of a mount point; prefers a served mount to a dead one.
    fn find_keeper(&self, mount_point: &Path) -> Option<Arc<KeeperHandle>> {
        let mut keepers = self.keepers();
        keepers.retain(|keeper| keeper.mount.mount_point == mount_point);
        let served = keepers.iter().rposition(|keeper| !keeper.is_dead());
        match served {
            Some(at) => Some(keepers.swap_remove(at)),
            None => keepers.pop(),
        }
    }

    /// Has a keeper carry out the mount `request`; returns its reply.
    ///
    /// # Errors
    /// A message for the user.
    fn mount(
        self: &Arc<Self>,
        kept: KeeperMount,
        request: &Request,
        replace: bool,
    ) -> Result<Reply, String> {
        let cannot = |error| format!("cannot start a keeper: {error}");
        // Reserve first: two requests for one volume cannot both pass.
        let (id, keeper, listener) = self.reserve_keeper(kept, replace)?;
        if replace {
            self.clear_dead_mounts(&keeper.mount.mount_point);
        }
        let started = keeper.spawn_process(listener).map_err(cannot).and_then(|()| {
            keeper.send_request(request, None).map_err(|why| format!("its keeper was lost: {why}"))
        });
        if matches!(started, Ok(Reply::Mounted { .. })) {
            keeper.set_phase(KeeperPhase::Serving);
            self.watch_keeper(id, &keeper);
        } else {
            self.remove_keeper(id);
        }
        started
    }

    /// Has the keepers of dead mounts on `mount_point` clear them, and thereby end: they could not
    /// tell their mount from one that takes its place, with the same device number.
    fn clear_dead_mounts(&self, mount_point: &Path) {
        for keeper in self.keepers() {
            if keeper.mount.mount_point != mount_point || !keeper.is_dead() {
                continue;
            }
            let request = Request::Unmount { mount_point: mount_point.into(), force: false };
            match keeper.send_request(&request, None) {
                // The keeper of the next mount reports what is still there.
                Ok(Reply::Failed { why }) => log::error!("{why}"),
                Err(KeeperRequestError::Lost(error)) => {
                    log::error!("{}: {error}", mount_point.shown());
                }
                Ok(_) | Err(KeeperRequestError::Gone) => {}
            }
        }
    }

    /// Reserves an id, a table entry and a socket for a future mount.
    fn reserve_keeper(
        &self,
        kept: KeeperMount,
        replace: bool,
    ) -> Result<(u64, Arc<KeeperHandle>, UnixListener), String> {
        let until = Instant::now() + VOLUME_RELEASE_TIMEOUT;
        let mut keepers = self.keepers.lock();
        loop {
            let conflict = keepers.values().find_map(|other| {
                let is_replaced = replace && other.is_dead();
                let why = other.conflict_with(&kept).filter(|_| !is_replaced)?;
                Some((other.clone(), why))
            });
            let Some((other, why)) = conflict else { break };
            // An ending mount is about to release its volume.
            let left = until.checked_duration_since(Instant::now());
            let Some(left) = left.filter(|_| other.is_ending()) else { return Err(why) };
            let wait = left.min(Duration::from_millis(50));
            self.changed.wait_for(&mut keepers, wait);
        }
        self.lost.lock().retain(|lost| lost.mount_point != kept.mount_point);
        let id = keepers.last_key_value().map_or(0, |(id, _)| id + 1);
        let bound = self.directory.bind_keeper(id);
        let (id, listener) = bound.map_err(|error| format!("cannot start a keeper: {error}"))?;
        let entry = Arc::new(KeeperHandle::new(self.directory.keeper_socket(id), kept));
        keepers.insert(id, entry.clone());
        Ok((id, entry, listener))
    }

    fn remove_keeper(&self, id: u64) {
        self.keepers.lock().remove(&id);
        self.changed.notify_all();
    }

    /// Returns the keepers in order of mounting.
    fn keepers(&self) -> Vec<Arc<KeeperHandle>> {
        self.keepers.lock().values().cloned().collect()
    }

    /// Returns the status of all mounts, with fresh numbers from the workers that answer in time.
    pub fn status(&self) -> Status {
        // Listed first: one of this manager that starts meanwhile is not taken for another's.
        let all = self.directory.keeper_ids().unwrap_or_default();
        let keepers = self.keepers();
        let mounts = std::thread::scope(|scope| {
            let asked: Vec<_> =
                keepers.iter().map(|keeper| scope.spawn(|| keeper.status())).collect();
            asked.into_iter().flat_map(|asked| asked.join().unwrap_or_default()).collect()
        });
        let lost = self.lost.lock().clone();
        let other_namespaces = self.query_other_namespaces(&all);
        let manager_pid = Some(std::process::id());
        Status { manager_pid, mounts, lost, other_namespaces, ..Status::default() }
    }

    /// Upgrades all mounts to `program`, one after the other. Those of other mount namespaces, which
    /// this manager cannot reach, are failures.
    fn upgrade(&self, program: &Path) -> Vec<UpgradeResult> {
        // Listed first: see `status`.
        let all = self.directory.keeper_ids().unwrap_or_default();
        let keepers = self.keepers().into_iter().filter(|keeper| !keeper.is_dead());
        let upgrade = |keeper: &KeeperHandle| {
            let request = Request::Upgrade { program: program.to_path_buf() };
            let mount_point = keeper.mount.mount_point.clone();
            let why = match keeper.send_request(&request, None) {
                Ok(Reply::Done) => None,
                Ok(Reply::Failed { why }) => Some(why),
                // It was unmounted meanwhile.
                Ok(Reply::NotMounted) | Err(KeeperRequestError::Gone) => return None,
                Ok(other) => Some(format!("its keeper answers something else: {other:?}")),
                Err(KeeperRequestError::Lost(error)) => {
                    Some(format!("its keeper was lost: {error}"))
                }
            };
            Some(UpgradeResult { mount_point, why })
        };
        let mut results: Vec<_> = keepers.filter_map(|keeper| upgrade(&keeper)).collect();
        let others = self.query_other_namespaces(&all).into_iter();
        results.extend(others.filter(|mount| mount.why.is_none()).map(|mount| UpgradeResult {
            why: Some(format!(
                "{}: not upgraded, since it is in another mount namespace: nsenter -t {} -m \
                 draconis upgrade upgrades it",
                mount.mount_point.shown(),
                mount.keeper_pid
            )),
            mount_point: mount.mount_point,
        }));
        results
    }

    /// Unmounts everything, in use or not. Changes made so far are written to the volumes; later
    /// changes are refused.
    pub fn unmount_all(&self) {
        for keeper in self.keepers() {
            match keeper.send_request(&Request::End, None) {
                Ok(Reply::Failed { why }) => log::error!("{why}"),
                Ok(_) | Err(KeeperRequestError::Gone) => {}
                Err(KeeperRequestError::Lost(error)) => {
                    log::error!("{}: {error}", keeper.mount.mount_point.shown());
                }
            }
        }
    }

    /// Waits until nothing has been mounted and no client has sent a request for `idle`, or until
    /// the manager is asked to retire.
    pub fn wait_idle(&self, idle: Duration) {
        let mut keepers = self.keepers.lock();
        let mut since = Instant::now();
        while since.elapsed() < idle {
            if self.is_retiring() {
                return;
            }
            let wait = KEEPER_POLL_INTERVAL.min(idle);
            self.changed.wait_for(&mut keepers, wait);
            if !keepers.is_empty() || self.clients.load(Ordering::Relaxed) > 0 {
                since = Instant::now();
            }
        }
    }

    /// Waits until the manager is asked to retire.
    pub fn wait_until_retired(&self) {
        let mut keepers = self.keepers.lock();
        while !self.is_retiring() {
            self.changed.wait(&mut keepers);
        }
    }

    fn is_retiring(&self) -> bool {
        self.is_retiring.load(Ordering::Relaxed)
    }

    /// Wakes all waiting threads.
    fn notify_waiters(&self) {
        // Under the lock: a waiter that is just checking its condition could miss the wake-up.
        let keepers = self.keepers.lock();
        self.changed.notify_all();
        drop(keepers);
    }
}
