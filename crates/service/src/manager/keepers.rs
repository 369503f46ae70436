//! The manager's keepers: finds, starts, queries and watches them.

use draconis_types::lock::Mutex;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use draconis_types::path_bytes::ShowPath;

use super::{KEEPER_STATUS_TIMEOUT, MAX_LOST_MOUNTS, Manager};
use crate::mount_namespace;
use crate::mount_table;
use crate::protocol::{self, KeeperMount, LostMount, MountStatus, Reply, Request};

/// Timeout for a running keeper to report its mount.
const WATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// A keeper, known by its socket and its mount.
pub(super) struct KeeperHandle {
    socket: PathBuf,
    pub(super) mount: KeeperMount,
    phase: Mutex<KeeperPhase>,
}

/// ```text
///   Starting ──▶ Serving ──▶ Ended { dead }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KeeperPhase {
    /// Its process may not run yet.
    Starting,
    Serving,
    /// Nothing serves the mount any more. While the keeper process exists, the mount is dead in
    /// place, or about to go.
    Ended,
}

/// Reasons why a keeper has not replied.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeeperRequestError {
    /// It has ended.
    #[error("it has ended")]
    Gone,
    /// It ended or was upgraded before it replied.
    #[error("{0}")]
    Lost(std::io::Error),
}

impl KeeperHandle {
    pub(super) fn new(socket: PathBuf, mount: KeeperMount) -> Self {
        Self { socket, mount, phase: Mutex::new(KeeperPhase::Starting) }
    }

    pub(super) fn set_phase(&self, phase: KeeperPhase) {
        *self.phase.lock() = phase;
    }

    pub(super) fn is_dead(&self) -> bool {
        *self.phase.lock() == KeeperPhase::Ended
    }

    /// Returns true if its process runs.
    pub(super) fn is_running(&self) -> bool {
        self.connect().is_some()
    }

    /// Returns true if it is served and only copies of it are left.
    fn is_detached(&self) -> bool {
        !self.is_dead() && self.is_ending()
    }

    /// Returns true if it was unmounted and is about to release its volume.
    pub(super) fn is_ending(&self) -> bool {
        *self.phase.lock() != KeeperPhase::Starting
            && mount_table::find_mount_at(&self.mount.mount_point)
                .is_none_or(|entry| entry.is_automount_point())
    }

    /// Returns the reason why `other` cannot be mounted beside it, if there is one.
    pub(super) fn conflict_with(&self, other: &KeeperMount) -> Option<String> {
        let (volume, at) = (self.mount.volume.shown(), self.mount.mount_point.shown());
        let is_same = self.mount.identity == other.identity && self.mount.disk == other.disk;
        if !self.is_dead() && is_same {
            Some(format!("{} is already mounted on {at}", other.volume.shown()))
        } else if self.mount.mount_point != other.mount_point || self.is_detached() {
            None
        } else if self.is_dead() {
            Some(crate::keeper::dead_mount_message(&self.mount.mount_point, &self.mount.volume))
        } else {
            Some(format!("{at} is already a mount point, of {volume}"))
        }
    }

    fn connect(&self) -> Option<UnixStream> {
        UnixStream::connect(&self.socket).ok()
    }

    /// Starts its process, which answers at `listener`.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn spawn_process(&self, listener: UnixListener) -> std::io::Result<()> {
        let child = Command::new("/proc/self/exe")
            .arg("keeper")
            .args(crate::verbosity::verbosity_argument())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stdout(Stdio::null())
            .spawn();
        let mut child = child.inspect_err(|_| {
            // Nobody will answer there.
            let _ = std::fs::remove_file(&self.socket);
        })?;
        std::thread::spawn(move || child.wait());
        Ok(())
    }

    /// Returns the status of its mount; empty if the keeper does not reply.
    pub(super) fn status(&self) -> Vec<MountStatus> {
        query_status(&self.socket)
    }

    /// Returns the number of its mount namespace, if that can be found out.
    fn namespace(&self) -> Option<u64> {
        let pid = || self.status().first().map(|mount| mount.keeper_pid);
        self.mount.namespace.or_else(|| mount_namespace::namespace_of(pid()?))
    }

    /// Sends a request and waits for the reply; without a timeout if `wait` is `None`.
    pub(super) fn send_request(
        &self,
        request: &Request,
        wait: Option<Duration>,
    ) -> Result<Reply, KeeperRequestError> {
        send_request_to(&self.socket, request, wait)
    }
}

fn query_status(socket: &Path) -> Vec<MountStatus> {
    match send_request_to(socket, &Request::Status, Some(KEEPER_STATUS_TIMEOUT)) {
        Ok(Reply::Status(status)) => status.mounts,
        _ => vec![],
    }
}

fn send_request_to(
    socket: &Path,
    request: &Request,
    wait: Option<Duration>,
) -> Result<Reply, KeeperRequestError> {
    let keeper = UnixStream::connect(socket).map_err(|_| KeeperRequestError::Gone)?;
    let ask = || {
        keeper.set_read_timeout(wait)?;
        protocol::send_line(&keeper, request)?;
        protocol::receive_line(&keeper)
    };
    ask().map_err(KeeperRequestError::Lost)
}

impl Manager {
    /// Finds the keepers that earlier managers have started in this mount namespace.
    ///
    /// # Errors
    /// The system's error for their directory.
    pub(super) fn adopt_running_keepers(self: &Arc<Self>) -> std::io::Result<()> {
        for id in self.directory.keeper_ids()? {
            let socket = self.directory.keeper_socket(id);
            let connected = UnixStream::connect(&socket);
            let Ok(keeper) = connected else {
                if connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                    // The keeper was killed, or the machine crashed.
                    let _ = std::fs::remove_file(&socket);
                }
                continue;
            };
            let ask = || {
                keeper.set_read_timeout(Some(WATCH_TIMEOUT))?;
                protocol::send_line(&keeper, &Request::Watch)?;
                protocol::receive_line(&keeper)
            };
            match ask() {
                Ok(Reply::Kept(kept)) => {
                    let entry = Arc::new(KeeperHandle::new(socket, kept));
                    if entry.namespace() != Some(mount_namespace::own_namespace()) {
                        continue;
                    }
                    entry.set_phase(KeeperPhase::Serving);
                    self.keepers.lock().insert(id, entry.clone());
                    self.watch_keeper(id, &entry);
                }
                other => log::warn!("{}: a keeper answers {other:?}", socket.shown()),
            }
        }
        Ok(())
    }

    /// Returns the status of the mounts of those of `keepers` that this manager does not have.
    pub(super) fn query_other_namespaces(&self, keepers: &[u64]) -> Vec<MountStatus> {
        let own: Vec<u64> = self.keepers.lock().keys().copied().collect();
        let others = keepers.iter().filter(|id| !own.contains(id));
        others.flat_map(|id| query_status(&self.directory.keeper_socket(*id))).collect()
    }

    /// Waits in a thread for the end of a mount, as long as its keeper runs.
    pub(super) fn watch_keeper(self: &Arc<Self>, id: u64, keeper: &Arc<KeeperHandle>) {
        let (manager, keeper) = (self.clone(), keeper.clone());
        std::thread::spawn(move || {
            // Every upgrade of the keeper ends the connection.
            while let Some(connection) = keeper.connect() {
                if protocol::send_line(&connection, &Request::Watch).is_err() {
                    continue;
                }
                let mut heard = protocol::LineReader::new(&connection);
                while let Ok(reply) = heard.receive() {
                    if let Reply::Ended { why } = reply {
                        keeper.set_phase(KeeperPhase::Ended);
                        manager.record_lost_mount(&keeper, why);
                        manager.notify_waiters();
                    }
                }
            }
            // A killed keeper leaves its socket behind.
            let _ = std::fs::remove_file(&keeper.socket);
            manager.remove_keeper(id);
        });
    }

    /// Remembers a mount that ended unrequested and is gone.
    fn record_lost_mount(&self, keeper: &KeeperHandle, why: Option<String>) {
        let KeeperMount { volume, mount_point, .. } = keeper.mount.clone();
        // A mount that is dead in place has its own status.
        let Some(why) = why.filter(|_| mount_table::find_mount_at(&mount_point).is_none()) else {
            return;
        };
        let mut lost = self.lost.lock();
        lost.push(LostMount { volume, mount_point, why });
        let too_many = lost.len().saturating_sub(MAX_LOST_MOUNTS);
        lost.drain(..too_many);
    }
}
