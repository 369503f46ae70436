//! What is done while a mount is served: its worker is asked how it is, and its end noticed.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::{Ask, CLOSE_WAIT, Manager, Mount, Phase, lock};
use crate::process::Worker;
use crate::protocol::{LostMount, WorkerStatus};

/// How often a worker is asked how it is.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How many mounts that were lost are remembered.
const LOST_MAX: usize = 16;

impl Manager {
    /// Nothing serves `mount` any more: it is out of the table, or in it as a dead one.
    pub(super) fn has_ended(&self, id: u64, mount: &Mount, why: Option<String>) {
        let dead = mount.is_in_place();
        // A worker ends in peace, too, when the connection is cut from outside.
        let cut = || "its connection to the kernel was cut".to_string();
        let why = why.or_else(|| dead.then(cut));
        if let Some(why) = &why {
            log::error!("{}: {why}", mount.mount_point.display());
        }
        {
            let mut state = lock(&mount.state);
            state.phase = Phase::Ended { why: why.clone(), dead };
            (state.asks, state.worker) = (None, None);
            if dead {
                state.status.state = "dead".into();
                state.status.why.clone_from(&why);
                state.status.worker = None;
                state.status.memory_bytes = 0;
            }
        }
        if dead {
            return self.tell();
        }
        if let Some(why) = &why {
            self.remember(mount, why);
        }
        self.leave(id);
    }

    /// Wakes the waiters of all mounts.
    pub(super) fn tell(&self) {
        // Under the lock, or a waiter that looks at this moment could miss it.
        let mounts = lock(&self.mounts);
        self.ended.notify_all();
        drop(mounts);
    }

    pub(super) fn remember(&self, mount: &Mount, why: &str) {
        let mut lost = lock(&self.lost);
        let Mount { volume, mount_point, .. } = mount;
        let (volume, mount_point) = (volume.clone(), mount_point.clone());
        lost.push(LostMount { volume, mount_point, why: why.to_string() });
        let too_many = lost.len().saturating_sub(LOST_MAX);
        lost.drain(..too_many);
    }

    /// Asks the worker how it is until it ends; returns what went wrong, if something did.
    pub(super) fn watch(
        &self,
        mount: &Mount,
        mut worker: Worker,
        asked: &Receiver<Ask>,
    ) -> Option<String> {
        let deadline = Duration::from_secs(mount.options.deadline_s.max(1));
        let mut hung = None;
        let mut closed = false;
        loop {
            let waiting = match asked.recv_timeout(ASK_EVERY) {
                Ok(Ask::Died(exit)) => {
                    let words = worker.disk_failure();
                    return hung
                        .or_else(|| exit.complaint(&words.unwrap_or_else(|| worker.last_words())));
                }
                Ok(Ask::Close(waiting)) => {
                    closed = true;
                    if let Err(fault) = worker.close(Instant::now() + CLOSE_WAIT) {
                        log::error!("{}: {fault}", mount.mount_point.display());
                    }
                    drop(waiting);
                    None
                }
                Ok(Ask::ReadOnly(read_only, waiting)) => {
                    // Who asked may have gone.
                    let _ = waiting.send(worker.set_read_only(read_only, CLOSE_WAIT));
                    None
                }
                Ok(Ask::Refresh(waiting)) => Some(waiting),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
            };
            if hung.is_some() || closed {
                continue;
            }
            match worker.status(Instant::now() + deadline) {
                Ok(told) if Duration::from_millis(told.busy_ms) <= deadline => {
                    self.note(mount, "serving", Some(told));
                    lock(&mount.state).status.disk = worker.disk_failure();
                }
                answer => {
                    // A worker that is ending does not answer either; its death tells why.
                    let late = answer.err().is_none_or(|fault| fault.is_timeout());
                    if late {
                        let pid = worker.pid();
                        let seconds = deadline.as_secs();
                        hung = Some(format!(
                            "worker {pid} did not answer for {seconds} s and was killed"
                        ));
                        self.note(mount, "not answering", None);
                        worker.kill();
                    }
                }
            }
            drop(waiting);
        }
    }

    pub(super) fn note(&self, mount: &Mount, state: &str, told: Option<WorkerStatus>) {
        let status = &mut lock(&mount.state).status;
        status.state = state.to_string();
        status.read_only |= told.as_ref().is_some_and(|told| told.failure.is_some());
        status.worker = told;
        status.memory_bytes = resident_bytes(status.worker_pid);
    }

    /// Takes a mount point away that was never served.
    pub(super) fn clean(&self, mount: &Mount) {
        if mount.is_in_place()
            && let Err(why) = self.front.detach(&mount.mount_point, true)
        {
            log::error!("{}", why.sentence(&mount.mount_point));
        }
    }
}

/// Resident memory of a process, in bytes; 0 when it is gone.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
