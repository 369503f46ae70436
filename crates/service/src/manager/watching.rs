//! What is done while a mount is served: its worker is asked how it is, and its end noticed.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::lives::Lives;
use super::{Ask, CLOSE_WAIT, Manager, Mount, Phase, lock};
use crate::process::Worker;
use crate::protocol::{LostMount, MountStatus, WorkerStatus};

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

    /// Has a mount served until it ends; returns what went wrong, if something did.
    pub(super) fn attend(
        &self,
        mount: &Mount,
        mut worker: Worker,
        lives: &mut Lives,
        fuse: &OwnedFd,
        (asks, asked): (&Sender<Ask>, &Receiver<Ask>),
    ) -> Option<String> {
        loop {
            let End { why, death } = self.watch(mount, &mut worker, asked);
            let Some(was_killed) = death.filter(|_| mount.may_go_on()) else { return why };
            let may_go_on = lives.died(worker.end(), was_killed);
            let why = why.unwrap_or_default();
            log::error!("{}: {why}", mount.mount_point.display());
            if !may_go_on {
                return Some(format!("{why}, as too many did before it"));
            }
            let next = lives.next(lock(&mount.state).status.read_only);
            worker = match next {
                Ok(worker) => worker,
                Err(error) => return Some(format!("{why}; none could take over: {error}")),
            };
            mount.is_served_by(&mut worker, asks);
            if let Err(error) = worker.give(fuse) {
                // Its death says the same, and more.
                log::debug!("{}: {error}", mount.mount_point.display());
            }
            let mut state = lock(&mount.state);
            state.status.restarts += 1;
            log::info!(
                "{}: process {} has taken over",
                mount.mount_point.display(),
                state.status.worker_pid
            );
        }
    }

    /// Asks the worker how it is until it ends.
    fn watch(&self, mount: &Mount, worker: &mut Worker, asked: &Receiver<Ask>) -> End {
        let deadline = Duration::from_secs(mount.options.deadline_s.max(1));
        let mut hung = None;
        let mut closed = false;
        loop {
            let waiting = match asked.recv_timeout(ASK_EVERY) {
                Ok(Ask::Died(exit)) => {
                    let is_hung = hung.is_some();
                    let words = worker.disk_failure();
                    let why = hung
                        .or_else(|| exit.complaint(&words.unwrap_or_else(|| worker.last_words())));
                    let is_death = exit.is_death() && !closed;
                    return End { why, death: is_death.then(|| exit.was_killed() && !is_hung) };
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

/// How serving ended.
struct End {
    /// What went wrong, if something did.
    why: Option<String>,
    /// If it was by a death: whether another process did it.
    death: Option<bool>,
}

impl Mount {
    /// Whether another worker may follow one that died.
    fn may_go_on(&self) -> bool {
        self.options.restart && !lock(&self.state).is_last
    }

    /// Notes its worker, whose end is heard of through `asks`.
    pub(super) fn is_served_by(&self, worker: &mut Worker, asks: &Sender<Ask>) {
        let pid = worker.pid();
        {
            let mut state = lock(&self.state);
            state.phase = Phase::Serving;
            state.worker = worker.pidfd().ok();
            let MountStatus { worker_pid, state, read_only, sandbox, memory_bytes, .. } =
                &mut state.status;
            (*worker_pid, *state) = (pid, "serving".into());
            (*read_only, *sandbox) = (worker.read_only, worker.confinement.clone());
            *memory_bytes = resident_bytes(pid);
        }
        let asks = asks.clone();
        worker.when_it_ends(move |exit| {
            // It is not heard only if the watcher has ended, which then knows.
            let _ = asks.send(Ask::Died(exit));
        });
    }
}

/// Resident memory of a process, in bytes; 0 when it is gone.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
