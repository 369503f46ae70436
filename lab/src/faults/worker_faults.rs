//! Faults of a worker: it dies, hangs, lies, or gets no memory. No client notices more than a pause.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::Random;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, Signal, pidfd_open};

use super::client::StressClient;
use super::forgery;
use super::memory_limit;
use super::test_mount::{TestMount, process_id, run_command, send_signal};
use super::totals::Totals;
use super::{FaultKind, Round, SharedState, program};

/// Maximum time until a worker is replaced.
pub(super) const RESTART_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which a fault that did not end its worker is over.
const NO_EFFECT_TIMEOUT: Duration = Duration::from_millis(2500);
/// Interval between two questions whether a worker was replaced.
const POLL_INTERVAL: Duration = Duration::from_micros(500);
const VOLUME_MEBIBYTES: u64 = 192;
const MANAGER_DEATH: &str = "death: manager";

/// Times of a round, by what was injected.
type Times = Vec<(&'static str, Duration)>;

/// Runs a round; fails if a client saw an error, or the volume has one.
pub(super) fn run(round: &Round<'_>, totals: &Totals) -> anyhow::Result<()> {
    let options = if round.kind == FaultKind::Hang { "deadline=1" } else { "" };
    let mount = TestMount::new(round, options)?;
    mount.make_volume(round, VOLUME_MEBIBYTES, None)?;
    let done = run_on(round, &mount, totals);
    done.with_context(|| format!("the log ends with\n{}", mount.log_tail()))
}

fn run_on(round: &Round<'_>, mount: &TestMount, totals: &Totals) -> anyhow::Result<()> {
    let arguments = round.arguments;
    mount.mount()?;
    let shared = SharedState::new();
    let new = |nth| StressClient::new(&mount.path("mnt"), nth, round.seed, &shared);
    let mut clients = (0..arguments.clients).map(new).collect::<anyhow::Result<Vec<_>>>()?;
    let mut found = vec![];
    let times = std::thread::scope(|scope| {
        let working: Vec<_> = clients
            .iter_mut()
            .map(|client| scope.spawn(|| client.run_until_over(&shared)))
            .collect();
        let running: Vec<_> = (0..)
            .zip(&arguments.programs)
            .map(|(nth, command)| {
                let (dir, shared) = (mount.path("mnt").join(format!("program-{nth}")), &shared);
                scope.spawn(move || program::run(command, &dir, round.seed + nth, shared))
            })
            .collect();
        let times = FaultInjector::new(round, mount, &shared).run();
        shared.end();
        for client in working.into_iter().chain(running) {
            match client.join() {
                Ok(done) => found.extend(done.err()),
                Err(_) => found.push(anyhow::anyhow!("a client panicked")),
            }
        }
        times.map_err(|why| found.push(why))
    });
    let Ok(times) = times else { return Err(join_errors(&found)) };
    for again in [false, true] {
        if again {
            clients.iter_mut().for_each(StressClient::close_files);
            mount.unmount()?;
            mount.run_e2fsck()?;
            mount.mount()?;
        }
        found.extend(clients.iter().filter_map(|client| client.compare_all().err()));
    }
    mount.unmount()?;
    mount.run_e2fsck()?;
    if !found.is_empty() {
        return Err(join_errors(&found));
    }
    totals.add(times, &shared)
}

fn join_errors(errors: &[anyhow::Error]) -> anyhow::Error {
    let errors: Vec<String> = errors.iter().map(|why| format!("{why:#}")).collect();
    anyhow::anyhow!("{}", errors.join("\n"))
}

/// How it is known that a fault is over.
enum FaultEnd {
    /// The worker cannot answer any more: the next answer is that of another worker.
    NextAnswer,
    /// A worker has taken over, or the fault has no effect.
    Replaced,
}

/// Injects the faults of a round.
struct FaultInjector<'a> {
    round: &'a Round<'a>,
    mount: &'a TestMount,
    shared: &'a SharedState,
    random: Random,
    /// Directory that is asked for.
    probe: PathBuf,
    /// The last worker that a fault was injected into.
    last: u32,
}

impl<'a> FaultInjector<'a> {
    fn new(round: &'a Round<'a>, mount: &'a TestMount, shared: &'a SharedState) -> Self {
        let random = Random::new(round.seed ^ 0xdead);
        Self { round, mount, shared, random, probe: mount.path("mnt"), last: 0 }
    }

    fn run(mut self) -> anyhow::Result<Times> {
        let mut times = vec![];
        for _ in 0..self.round.faults {
            if self.shared.is_over() || self.round.is_stopped() {
                break;
            }
            let pid = self.wait_for_worker()?;
            if self.round.kind != FaultKind::Death {
                // A request that two workers died over is refused, and nobody killed these.
                self.shared.wait_for_calls_in_flight();
            }
            let most_us = 1000 * self.round.arguments.most_ms;
            std::thread::sleep(Duration::from_micros(self.random.next_below(most_us.max(1))));
            let began = Instant::now();
            self.shared.mark_fault();
            let (mut what, end) = match self.inject(pid) {
                // On a loaded machine a worker may die of a short deadline by itself.
                Err(error) if error.downcast_ref() == Some(&Errno::SRCH) => continue,
                injected => injected?,
            };
            let mut time = self.time_answer(began)?;
            if let FaultEnd::Replaced = end {
                let (longest, was_replaced) = self.time_until_replaced(pid)?;
                time = time.max(longest);
                if !was_replaced {
                    what = "no effect in 2.5 s";
                }
            }
            times.push((what, time));
            if what == MANAGER_DEATH {
                // The next command starts another one.
                run_command(&mut self.mount.draconis(&["status"]))?;
            }
        }
        self.wait_for_worker()?;
        Ok(times)
    }

    /// Waits for a worker that no fault was injected into.
    fn wait_for_worker(&self) -> anyhow::Result<u32> {
        let until = Instant::now() + RESTART_TIMEOUT;
        loop {
            let status = self.mount.status()?;
            if status.worker_pid != self.last && status.state == "serving" {
                return Ok(status.worker_pid);
            }
            if Instant::now() > until || status.state == "dead" {
                bail!("no worker took over: {}", status.why.unwrap_or(status.state));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Injects a fault into the worker `pid`; returns what it was.
    fn inject(&mut self, pid: u32) -> anyhow::Result<(&'static str, FaultEnd)> {
        match self.round.kind {
            FaultKind::Death => self.inject_death(pid),
            FaultKind::Hang => {
                stop_worker(pid)?;
                self.last = pid;
                Ok(("hang", FaultEnd::NextAnswer))
            }
            FaultKind::Reply => match self.random.next_below(3) {
                0 => {
                    forgery::write_forged_replies(pid, &mut self.random)?;
                    Ok(("reply: to the kernel", FaultEnd::NextAnswer))
                }
                _ => {
                    stop_worker(pid)?;
                    let forged = forgery::send_forged_message(pid, &mut self.random);
                    // The keeper may have killed it by now.
                    let _ = send_signal(pid, Signal::CONT);
                    forged?;
                    Ok(("reply: to the keeper", FaultEnd::Replaced))
                }
            },
            _ => {
                let what = memory_limit::limit_memory(pid, &mut self.random)?;
                Ok((what, FaultEnd::Replaced))
            }
        }
    }

    fn inject_death(&mut self, pid: u32) -> anyhow::Result<(&'static str, FaultEnd)> {
        match self.random.next_below(16) {
            0 => {
                let manager = self.mount.query_status()?.manager_pid;
                send_signal(manager.context("there is no manager")?, Signal::KILL)?;
                Ok((MANAGER_DEATH, FaultEnd::NextAnswer))
            }
            1 => {
                run_command(&mut self.mount.draconis(&["upgrade"]))?;
                self.last = pid;
                Ok(("upgrade", FaultEnd::NextAnswer))
            }
            _ => {
                // A process that is not reaped yet keeps its number.
                let worker = pidfd_open(process_id(pid)?, PidfdFlags::empty())?;
                send_signal(pid, Signal::KILL)?;
                poll(&mut [PollFd::new(&worker, PollFlags::IN)], None)?;
                self.last = pid;
                Ok(("death: worker", FaultEnd::NextAnswer))
            }
        }
    }

    /// Asks for what only a worker can answer; returns the time from `began` until it did.
    fn time_answer(&self, began: Instant) -> anyhow::Result<Duration> {
        ask_worker(&self.probe)?;
        Ok(began.elapsed())
    }

    /// Asks again and again until the worker `pid` was replaced or the fault has no effect; returns
    /// the longest time of an answer, and whether it was replaced.
    fn time_until_replaced(&mut self, pid: u32) -> anyhow::Result<(Duration, bool)> {
        let until = Instant::now() + NO_EFFECT_TIMEOUT;
        let mut longest = Duration::ZERO;
        while Instant::now() < until {
            longest = longest.max(self.time_answer(Instant::now())?);
            if self.mount.status()?.worker_pid != pid {
                self.last = pid;
                return Ok((longest, true));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        // Its messages may still be wrong, and its memory limited: the round goes on with another.
        send_signal(pid, Signal::KILL)?;
        self.last = pid;
        Ok((longest, false))
    }
}

/// Makes a call that no cache of the kernel answers.
pub(super) fn ask_worker(path: &Path) -> anyhow::Result<()> {
    let flags = AtFlags::STATX_FORCE_SYNC;
    rustix::fs::statx(CWD, path, flags, StatxFlags::BASIC_STATS).context("statx")?;
    Ok(())
}

/// Stops a process, and waits until all its threads have stopped.
pub(super) fn stop_worker(pid: u32) -> anyhow::Result<()> {
    send_signal(pid, Signal::STOP)?;
    let until = Instant::now() + RESTART_TIMEOUT;
    loop {
        let mut all_stopped = true;
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread that has just ended is not read.
            let stat = std::fs::read_to_string(task?.path().join("stat")).unwrap_or_default();
            let state = stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
            all_stopped &= matches!(state, Some('T' | 'Z') | None);
        }
        if all_stopped {
            return Ok(());
        }
        if Instant::now() > until {
            bail!("worker {pid} does not stop");
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}
