//! The supervisor of a served mount: polls its worker's status and handles its end.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use draconis_types::path_bytes::ShowPath;

use super::mounting::MountResources;
use super::supervision::WorkerSupervision;
use super::upgrade::UpgradeRequest;
use super::{Keeper, Mount, MountPhase, SupervisorEvent, VOLUME_CLOSE_TIMEOUT};
use crate::protocol::{self, MountStatus, Reply, WorkerStatus};
use crate::worker_process::Worker;

/// Poll interval of a worker's status.
const WORKER_STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Poll interval of its disk's status while no client asks.
const DISK_STATUS_INTERVAL: Duration = Duration::from_secs(15);
/// Time that a worker serves before its standby is started: starting takes a CPU from programs that
/// waited for this worker.
const STANDBY_START_DELAY: Duration = Duration::from_millis(10);

impl Keeper {
    /// Marks `mount` as ended: it is over, or dead in place.
    pub(super) fn mark_ended(&self, mount: &Mount, why: Option<String>) {
        let dead = mount.is_in_place();
        // A worker also exits normally if another program aborts the connection.
        let cut = || "its connection to the kernel was cut".to_string();
        let why = why.or_else(|| dead.then(cut));
        if let Some(why) = &why {
            log::error!("{}: {why}", mount.mount_point.shown());
        }
        {
            // Under the lock: a watcher that registers now sees the end, or is notified.
            let watchers = self.watchers.lock();
            for watcher in &*watchers {
                // Fails only if the manager is gone.
                let _ = protocol::send_line(watcher, &Reply::Ended { why: why.clone() });
            }
            let mut state = mount.state.lock();
            state.phase = MountPhase::Ended { why: why.clone(), dead };
            (state.events, state.worker) = (None, None);
            if dead {
                state.status.state = "dead".into();
                state.status.why.clone_from(&why);
                state.status.worker = None;
                state.status.memory_bytes = 0;
            }
        }
        self.notify_waiters();
    }

    /// Wakes all waiting threads.
    pub(super) fn notify_waiters(&self) {
        // Under the lock: a waiter that is just checking its condition could miss the wake-up.
        let mount = self.mount.lock();
        self.changed.notify_all();
        drop(mount);
    }

    /// Supervises a mount until it ends; returns the error that ended it, if any.
    pub(super) fn supervise_mount(
        &self,
        mount: &Mount,
        mut worker: Worker,
        held: &mut MountResources,
        (asks, asked): (&Sender<SupervisorEvent>, &Receiver<SupervisorEvent>),
    ) -> Option<String> {
        let at = mount.mount_point.shown();
        loop {
            let end = self.watch_worker(mount, &mut worker, &mut held.supervision, asked);
            let began = Instant::now();
            let (why, deaths) = match end {
                WatchResult::Over { why } => return why,
                WatchResult::Death { why, .. } if !mount.can_restart() => return Some(why),
                WatchResult::Death { why, was_killed } => {
                    let may_restart = held.supervision.record_death(worker.terminate(), was_killed);
                    log::error!("{at}: {why}");
                    if !may_restart {
                        return Some(format!("{why}, as too many did before it"));
                    }
                    (why, 1)
                }
                WatchResult::Upgrade(request, failed) => {
                    // A relay thread that waits in the kernel would keep this program from ending.
                    let Some(paused) = held.relays.pause_notifications() else {
                        let _ = failed.send("the kernel waits for what is written back".into());
                        continue;
                    };
                    let taken = worker.terminate();
                    wait_for_exit_event(asked);
                    held.supervision.record_death(taken, true);
                    held.supervision.stop_standby();
                    let why = self.exec_program(mount, held, &request);
                    drop(paused);
                    log::error!("{at}: {why}");
                    // The client may be gone.
                    let _ = failed.send(why.clone());
                    (why, 0)
                }
            };
            let ended = began.elapsed();
            worker = match held.supervision.start_successor(mount.state.lock().status.read_only) {
                Ok(worker) => worker,
                Err(error) => return Some(format!("{why}; none could take over: {error}")),
            };
            mount.set_worker(&mut worker, asks);
            held.send_connection(&worker, mount);
            let pid = worker.pid();
            mount.state.lock().status.restarts += deaths;
            // Logged beside the error.
            log::warn!(
                "{at}: process {pid} has taken over within {:.1} ms, {:.1} of them until the one \
                 before it had ended with all that it wrote",
                began.elapsed().as_secs_f64() * 1e3,
                ended.as_secs_f64() * 1e3
            );
        }
    }

    /// Polls the worker's status until it ends.
    fn watch_worker(
        &self,
        mount: &Mount,
        worker: &mut Worker,
        lives: &mut WorkerSupervision,
        asked: &Receiver<SupervisorEvent>,
    ) -> WatchResult {
        let deadline = Duration::from_secs(mount.options.deadline_s.max(1));
        let mut hung = None;
        let mut closed = false;
        let mut period = STANDBY_START_DELAY;
        let mut asked_disk = Instant::now();
        loop {
            let waiting =
                match asked.recv_timeout(std::mem::replace(&mut period, WORKER_STATUS_INTERVAL)) {
                    Ok(SupervisorEvent::Died(exit)) => {
                        let violation = worker.violation().map(|violation| {
                            format!(
                                "worker {} broke its contract and was killed: {violation}",
                                worker.pid()
                            )
                        });
                        let is_own_fault = hung.is_some() || violation.is_some();
                        let words = worker.disk_failure();
                        let why = violation.or(hung).or_else(|| {
                            exit.failure_reason(&words.unwrap_or_else(|| worker.final_message()))
                        });
                        if !exit.is_abnormal() || closed {
                            return WatchResult::Over { why };
                        }
                        let was_killed = exit.was_killed() && !is_own_fault;
                        return WatchResult::Death { why: why.unwrap_or_default(), was_killed };
                    }
                    // The worker is about to exit, or to be killed.
                    Ok(SupervisorEvent::Upgrade(_, failed)) if closed || hung.is_some() => {
                        let _ = failed.send("it ends".into());
                        None
                    }
                    Ok(SupervisorEvent::Upgrade(request, failed)) => {
                        return WatchResult::Upgrade(request, failed);
                    }
                    Ok(SupervisorEvent::Close(waiting)) => {
                        closed = true;
                        if let Err(fault) = worker.close(Instant::now() + VOLUME_CLOSE_TIMEOUT) {
                            log::error!("{}: {fault}", mount.mount_point.shown());
                        }
                        drop(waiting);
                        None
                    }
                    Ok(SupervisorEvent::Control(request, waiting)) => {
                        // The client may be gone.
                        let _ = waiting.send(worker.control(request, VOLUME_CLOSE_TIMEOUT));
                        None
                    }
                    Ok(SupervisorEvent::Refresh(waiting)) => Some(waiting),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                        if !closed {
                            lives.ensure_standby();
                        }
                        None
                    }
                };
            if hung.is_some() || closed {
                continue;
            }
            match worker.status(Instant::now() + deadline) {
                Ok(told) if Duration::from_millis(told.busy_ms) <= deadline => {
                    self.update_status(mount, "serving", Some(told));
                    // Some disks send a request for it, which has a price.
                    if waiting.is_some() || asked_disk.elapsed() >= DISK_STATUS_INTERVAL {
                        asked_disk = Instant::now();
                        mount.state.lock().status.disk = worker.disk_failure();
                    }
                }
                answer => {
                    // A worker that is ending does not answer either; its exit gives the reason.
                    let late = answer.err().is_none_or(|fault| fault.is_timeout());
                    if late && worker.violation().is_none() {
                        let pid = worker.pid();
                        let seconds = deadline.as_secs();
                        hung = Some(format!(
                            "worker {pid} did not answer for {seconds} s and was killed"
                        ));
                        self.update_status(mount, "not answering", None);
                        worker.kill();
                    }
                }
            }
            drop(waiting);
        }
    }

    pub(super) fn update_status(&self, mount: &Mount, state: &str, told: Option<WorkerStatus>) {
        let status = &mut mount.state.lock().status;
        status.state = state.to_string();
        if let Some(told) = &told {
            status.read_only |= told.failure.is_some();
            status.sandbox.clone_from(&told.sandbox);
        }
        status.worker = told;
        status.memory_bytes = resident_bytes(status.worker_pid);
    }

    /// Detaches a mount point that was never served.
    pub(super) fn detach_unserved(&self, mount: &Mount) {
        if mount.is_in_place()
            && let Err(why) = self.mounter.detach(&mount.mount_point, true)
        {
            log::error!("{}", why.message(&mount.mount_point));
        }
    }
}

/// Result of supervising one worker.
enum WatchResult {
    /// The mount is over.
    Over {
        /// The error, if any.
        why: Option<String>,
    },
    Death {
        why: String,
        /// True if another process killed it, and not the keeper for what it did.
        was_killed: bool,
    },
    /// The worker still runs: an upgrade to another program was requested.
    Upgrade(UpgradeRequest, Sender<String>),
}

/// Waits for the exit event of a worker that was stopped.
fn wait_for_exit_event(asked: &Receiver<SupervisorEvent>) {
    // Other requests that arrive meanwhile get no reply, as when a worker dies.
    while !matches!(asked.recv(), Ok(SupervisorEvent::Died(_)) | Err(_)) {}
}

impl Mount {
    pub(super) fn worker_pid(&self) -> u32 {
        self.state.lock().status.worker_pid
    }

    /// Returns true if a worker that died may have a successor.
    fn can_restart(&self) -> bool {
        self.options.restart && !self.state.lock().is_final_worker
    }

    /// Registers the worker, whose exit is sent to `asks`.
    pub(super) fn set_worker(&self, worker: &mut Worker, asks: &Sender<SupervisorEvent>) {
        let pid = worker.pid();
        {
            let mut state = self.state.lock();
            state.phase = MountPhase::Serving;
            state.worker = worker.pidfd().ok();
            let MountStatus { worker_pid, state, read_only, memory_bytes, .. } = &mut state.status;
            (*worker_pid, *state) = (pid, "serving".into());
            (*read_only, *memory_bytes) = (worker.read_only, resident_bytes(pid));
        }
        let asks = asks.clone();
        worker.on_exit(move |exit| {
            // Fails only if the supervisor has ended.
            let _ = asks.send(SupervisorEvent::Died(exit));
        });
    }
}

/// Returns the resident memory of a process, in bytes; 0 if it is gone.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
