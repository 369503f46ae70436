//! What is done while a mount is served: its worker is asked how it is, and its end noticed.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::mounting::MountResources;
use super::supervision::WorkerSupervision;
use super::upgrade::UpgradeRequest;
use super::{CLOSE_TIMEOUT, Keeper, Mount, MountPhase, SupervisorEvent, lock};
use crate::protocol::{self, MountStatus, Reply, WorkerStatus};
use crate::worker_process::Worker;

/// How often a worker is asked how it is.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// How often its disk is asked the same, where nobody wants to know.
const ASK_DISK_EVERY: Duration = Duration::from_secs(15);
/// How long a worker serves before the process is started that would follow it: that takes a CPU
/// from those who have waited for this one.
const STANDBY_DELAY: Duration = Duration::from_millis(10);

impl Keeper {
    /// Nothing serves `mount` any more: it is over, or in its place as a dead one.
    pub(super) fn mark_ended(&self, mount: &Mount, why: Option<String>) {
        let dead = mount.is_in_place();
        // A worker ends in peace, too, when the connection is cut from outside.
        let cut = || "its connection to the kernel was cut".to_string();
        let why = why.or_else(|| dead.then(cut));
        if let Some(why) = &why {
            log::error!("{}: {why}", mount.mount_point.display());
        }
        {
            // Those that come to watch see it ended, or are told.
            let watchers = lock(&self.watchers);
            for watcher in &*watchers {
                // One that died does not want to know.
                let _ = protocol::send(watcher, &Reply::Ended { why: why.clone() });
            }
            let mut state = lock(&mount.state);
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

    /// Wakes all who wait.
    pub(super) fn notify_waiters(&self) {
        // Under the lock, or a waiter that looks at this moment could miss it.
        let mount = lock(&self.mount);
        self.changed.notify_all();
        drop(mount);
    }

    /// Has a mount served until it ends; returns what went wrong, if something did.
    pub(super) fn supervise(
        &self,
        mount: &Mount,
        mut worker: Worker,
        held: &mut MountResources,
        (asks, asked): (&Sender<SupervisorEvent>, &Receiver<SupervisorEvent>),
    ) -> Option<String> {
        let at = mount.mount_point.display();
        loop {
            let end = self.watch_worker(mount, &mut worker, &mut held.supervision, asked);
            let began = Instant::now();
            let (why, deaths) = match end {
                End::Over { why } => return why,
                End::Death { why, .. } if !mount.can_restart() => return Some(why),
                End::Death { why, was_killed } => {
                    let may_go_on = held.supervision.record_death(worker.end(), was_killed);
                    log::error!("{at}: {why}");
                    if !may_go_on {
                        return Some(format!("{why}, as too many did before it"));
                    }
                    (why, 1)
                }
                End::Upgrade(request, failed) => {
                    // A relay that waits in the kernel would keep this program from ending.
                    let Some(paused) = held.relays.pause() else {
                        let _ = failed.send("the kernel waits for what is written back".into());
                        continue;
                    };
                    let taken = worker.end();
                    wait_for_exit_event(asked);
                    held.supervision.record_death(taken, true);
                    held.supervision.stop_standby();
                    let why = self.exec_program(mount, held, &request);
                    drop(paused);
                    log::error!("{at}: {why}");
                    // Who asked may have gone.
                    let _ = failed.send(why.clone());
                    (why, 0)
                }
            };
            let ended = began.elapsed();
            worker = match held.supervision.start_successor(lock(&mount.state).status.read_only) {
                Ok(worker) => worker,
                Err(error) => return Some(format!("{why}; none could take over: {error}")),
            };
            mount.set_worker(&mut worker, asks);
            held.send_connection(&worker, mount);
            let pid = worker.pid();
            lock(&mount.state).status.restarts += deaths;
            // Beside the error, for who reads that.
            log::warn!(
                "{at}: process {pid} has taken over within {:.1} ms, {:.1} of them until the one \
                 before it had ended with all that it wrote",
                began.elapsed().as_secs_f64() * 1e3,
                ended.as_secs_f64() * 1e3
            );
        }
    }

    /// Asks the worker how it is until it ends.
    fn watch_worker(
        &self,
        mount: &Mount,
        worker: &mut Worker,
        lives: &mut WorkerSupervision,
        asked: &Receiver<SupervisorEvent>,
    ) -> End {
        let deadline = Duration::from_secs(mount.options.deadline_s.max(1));
        let mut hung = None;
        let mut closed = false;
        let mut period = STANDBY_DELAY;
        let mut asked_disk = Instant::now();
        loop {
            let waiting = match asked.recv_timeout(std::mem::replace(&mut period, STATUS_INTERVAL))
            {
                Ok(SupervisorEvent::Died(exit)) => {
                    let is_hung = hung.is_some();
                    let words = worker.disk_failure();
                    let why = hung.or_else(|| {
                        exit.failure_reason(&words.unwrap_or_else(|| worker.final_message()))
                    });
                    if !exit.is_abnormal() || closed {
                        return End::Over { why };
                    }
                    let was_killed = exit.was_killed() && !is_hung;
                    return End::Death { why: why.unwrap_or_default(), was_killed };
                }
                // It is about to end by itself, or by force.
                Ok(SupervisorEvent::Upgrade(_, failed)) if closed || hung.is_some() => {
                    let _ = failed.send("it ends".into());
                    None
                }
                Ok(SupervisorEvent::Upgrade(request, failed)) => {
                    return End::Upgrade(request, failed);
                }
                Ok(SupervisorEvent::Close(waiting)) => {
                    closed = true;
                    if let Err(fault) = worker.close(Instant::now() + CLOSE_TIMEOUT) {
                        log::error!("{}: {fault}", mount.mount_point.display());
                    }
                    drop(waiting);
                    None
                }
                Ok(SupervisorEvent::ReadOnly(read_only, waiting)) => {
                    // Who asked may have gone.
                    let _ = waiting.send(worker.set_read_only(read_only, CLOSE_TIMEOUT));
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
                    // To some disks that is a request, which has a price.
                    if waiting.is_some() || asked_disk.elapsed() >= ASK_DISK_EVERY {
                        asked_disk = Instant::now();
                        lock(&mount.state).status.disk = worker.disk_failure();
                    }
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
                        self.update_status(mount, "not answering", None);
                        worker.kill();
                    }
                }
            }
            drop(waiting);
        }
    }

    pub(super) fn update_status(&self, mount: &Mount, state: &str, told: Option<WorkerStatus>) {
        let status = &mut lock(&mount.state).status;
        status.state = state.to_string();
        if let Some(told) = &told {
            status.read_only |= told.failure.is_some();
            status.sandbox.clone_from(&told.sandbox);
        }
        status.worker = told;
        status.memory_bytes = resident_bytes(status.worker_pid);
    }

    /// Takes a mount point away that was never served.
    pub(super) fn detach_unserved(&self, mount: &Mount) {
        if mount.is_in_place()
            && let Err(why) = self.front.detach(&mount.mount_point, true)
        {
            log::error!("{}", why.message(&mount.mount_point));
        }
    }
}

/// How serving ended.
enum End {
    /// There is nothing more to serve.
    Over {
        /// What went wrong, if something did.
        why: Option<String>,
    },
    Death {
        why: String,
        /// By another process.
        was_killed: bool,
    },
    /// It has not: it is to go on by another program.
    Upgrade(UpgradeRequest, Sender<String>),
}

/// Hears of the end of a worker that was ended.
fn wait_for_exit_event(asked: &Receiver<SupervisorEvent>) {
    // What else is asked meanwhile has no answer, as when a worker dies.
    while !matches!(asked.recv(), Ok(SupervisorEvent::Died(_)) | Err(_)) {}
}

impl Mount {
    pub(super) fn worker_pid(&self) -> u32 {
        lock(&self.state).status.worker_pid
    }

    /// Whether another worker may follow one that died.
    fn can_restart(&self) -> bool {
        self.options.restart && !lock(&self.state).is_final_worker
    }

    /// Notes its worker, whose end is heard of through `asks`.
    pub(super) fn set_worker(&self, worker: &mut Worker, asks: &Sender<SupervisorEvent>) {
        let pid = worker.pid();
        {
            let mut state = lock(&self.state);
            state.phase = MountPhase::Serving;
            state.worker = worker.pidfd().ok();
            let MountStatus { worker_pid, state, read_only, memory_bytes, .. } = &mut state.status;
            (*worker_pid, *state) = (pid, "serving".into());
            (*read_only, *memory_bytes) = (worker.read_only, resident_bytes(pid));
        }
        let asks = asks.clone();
        worker.on_exit(move |exit| {
            // It is not heard only if the watcher has ended, which then knows.
            let _ = asks.send(SupervisorEvent::Died(exit));
        });
    }
}

/// Resident memory of a process, in bytes; 0 when it is gone.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
