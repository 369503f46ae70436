//! The keepers that a manager knows: found, started, asked, followed.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{LOST_MAX, Manager, STATUS_WAIT, lock};
use crate::protocol::{self, Kept, LostMount, MountStatus, Reply, Request};
use crate::table;

/// How long a keeper that runs may take to say what it keeps.
const KEPT_WAIT: Duration = Duration::from_secs(5);

/// A keeper, by its socket, and what it keeps.
pub(super) struct Entry {
    socket: PathBuf,
    pub(super) kept: Kept,
    phase: Mutex<Phase>,
}

/// ```text
///   Starting ──▶ Serving ──▶ Ended { dead }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its process may not run yet.
    Starting,
    Serving,
    /// Nothing serves the mount any more; as long as its keeper is there, it is dead in its
    /// place, or about to go.
    Ended,
}

/// Why a keeper has not answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// It does not run any more.
    #[error("it has ended")]
    Gone,
    /// It ended, or went on as another program, while it was asked.
    #[error("{0}")]
    Lost(std::io::Error),
}

impl Entry {
    pub(super) fn new(socket: PathBuf, kept: Kept) -> Self {
        Self { socket, kept, phase: Mutex::new(Phase::Starting) }
    }

    pub(super) fn note(&self, phase: Phase) {
        *lock(&self.phase) = phase;
    }

    pub(super) fn is_dead(&self) -> bool {
        *lock(&self.phase) == Phase::Ended
    }

    /// Whether its process runs.
    pub(super) fn is_there(&self) -> bool {
        self.connect().is_some()
    }

    /// Whether it was unmounted, and is about to give back what it has.
    pub(super) fn is_ending(&self) -> bool {
        *lock(&self.phase) != Phase::Starting && table::at(&self.kept.mount_point).is_none()
    }

    /// Why there cannot be `other`, too, if so.
    pub(super) fn conflict(&self, other: &Kept) -> Option<String> {
        let (volume, at) = (self.kept.volume.display(), self.kept.mount_point.display());
        let is_same = self.kept.identity == other.identity && self.kept.disk == other.disk;
        if !self.is_dead() && is_same {
            Some(format!("{} is already mounted on {at}", other.volume.display()))
        } else if self.kept.mount_point != other.mount_point {
            None
        } else if self.is_dead() {
            Some(crate::keeper::dead_there(&self.kept.mount_point, &self.kept.volume))
        } else {
            Some(format!("{at} is already a mount point, of {volume}"))
        }
    }

    fn connect(&self) -> Option<UnixStream> {
        UnixStream::connect(&self.socket).ok()
    }

    /// Starts its process.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn start(&self) -> std::io::Result<()> {
        let listener = UnixListener::bind(&self.socket)?;
        let mut child = Command::new("/proc/self/exe")
            .arg("keeper")
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stdout(Stdio::null())
            .spawn()?;
        std::thread::spawn(move || child.wait());
        Ok(())
    }

    /// How its mount is; nothing of a keeper that does not say.
    pub(super) fn status(&self) -> Vec<MountStatus> {
        match self.ask(&Request::Status, Some(STATUS_WAIT)) {
            Ok(Reply::Status(status)) => status.mounts,
            _ => vec![],
        }
    }

    /// Asks it, and waits for the answer; without a bound if there is no `wait`.
    pub(super) fn ask(&self, request: &Request, wait: Option<Duration>) -> Result<Reply, AskError> {
        let keeper = self.connect().ok_or(AskError::Gone)?;
        let ask = || {
            keeper.set_read_timeout(wait)?;
            protocol::send(&keeper, request)?;
            protocol::receive(&keeper)
        };
        ask().map_err(AskError::Lost)
    }
}

impl Manager {
    /// Finds the keepers that managers before this one have started.
    ///
    /// # Errors
    /// What the system says of their directory.
    pub(super) fn find_keepers(self: &Arc<Self>) -> std::io::Result<()> {
        for id in self.directory.keeper_ids()? {
            let socket = self.directory.keeper(id);
            let connected = UnixStream::connect(&socket);
            let Ok(keeper) = connected else {
                if connected.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
                    // It was killed, or the machine was.
                    let _ = std::fs::remove_file(&socket);
                }
                continue;
            };
            let ask = || {
                keeper.set_read_timeout(Some(KEPT_WAIT))?;
                protocol::send(&keeper, &Request::Watch)?;
                protocol::receive(&keeper)
            };
            match ask() {
                Ok(Reply::Kept(kept)) => {
                    let entry = Arc::new(Entry::new(socket, kept));
                    entry.note(Phase::Serving);
                    lock(&self.keepers).insert(id, entry.clone());
                    self.follow(id, &entry);
                }
                other => log::warn!("{}: a keeper answers {other:?}", socket.display()),
            }
        }
        Ok(())
    }

    /// Hears of the end of a mount, in a thread, for as long as its keeper runs.
    pub(super) fn follow(self: &Arc<Self>, id: u64, keeper: &Arc<Entry>) {
        let (manager, keeper) = (self.clone(), keeper.clone());
        std::thread::spawn(move || {
            // Each time it goes on as another program the conversation ends.
            while let Some(connection) = keeper.connect() {
                if protocol::send(&connection, &Request::Watch).is_err() {
                    continue;
                }
                let mut heard = protocol::Lines::new(&connection);
                while let Ok(reply) = heard.receive() {
                    if let Reply::Ended { why } = reply {
                        keeper.note(Phase::Ended);
                        manager.remember(&keeper, why);
                        manager.tell();
                    }
                }
            }
            // One that was killed leaves it behind.
            let _ = std::fs::remove_file(&keeper.socket);
            manager.leave(id);
        });
    }

    /// Remembers a mount that has ended and is gone, if it was not asked to.
    fn remember(&self, keeper: &Entry, why: Option<String>) {
        let Kept { volume, mount_point, .. } = keeper.kept.clone();
        // One that is dead in its place says so itself.
        let Some(why) = why.filter(|_| table::at(&mount_point).is_none()) else { return };
        let mut lost = lock(&self.lost);
        lost.push(LostMount { volume, mount_point, why });
        let too_many = lost.len().saturating_sub(LOST_MAX);
        lost.drain(..too_many);
    }
}
