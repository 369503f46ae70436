//! Kill test of workers: clients work on a mount while its worker is killed again and again. At
//! times the manager is killed, or keeper and worker are upgraded. Every call must return as if
//! nothing had happened.
//!
//! ```text
//!   clients ── calls ──▶ mount ◀── kill -9 ── killer
//!      └── a model of what each call does, once: value, errno, what is there afterwards
//!   then: unmounted ── e2fsck -fn ── mounted again ── compared once more
//! ```
//! Each client has its own directory, which no other client changes. Its model is therefore
//! exact; the clients share only the worker.

mod client;
mod model;
mod program;
#[cfg(test)]
mod tests;

use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::Random;
use draconis_service::protocol::{self, MountStatus, Reply, Request, Status};
use draconis_types::injected_fault::{DELAY_VARIABLE, DelayPoint, FAULTS_VARIABLE, InjectedFault};
use rustix::process::{Pid, Signal};

use client::StressClient;

/// Maximum time until a killed worker is replaced.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);

/// How often, over what, and how it is judged.
#[derive(Debug, clap::Args)]
pub struct DeathsArguments {
    /// Number of kills (one in eight kills the manager or upgrades instead).
    #[arg(long, default_value_t = 1000)]
    kills: u64,
    /// Number of clients.
    #[arg(long, default_value_t = 3)]
    clients: u64,
    /// Random seed (kill times are not reproducible).
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Maximum worker lifetime in milliseconds.
    #[arg(long, default_value_t = 20)]
    most_ms: u64,
    /// ext2, ext3 or ext4.
    #[arg(long, default_value = "ext2")]
    kind: String,
    /// Options of mke2fs.
    #[arg(long, value_delimiter = ' ', allow_hyphen_values = true)]
    mke2fs: Vec<String>,
    /// Delay point at which workers are killed: read, applied, logged, answered or committed (test
    /// builds only).
    #[arg(long, value_parser = parse_delay_point)]
    linger: Option<DelayPoint>,
    /// Shell command to run repeatedly in a directory of the mount, beside the clients; it must
    /// succeed (repeatable). Half of its runs are killed.
    #[arg(long = "with", value_name = "COMMAND")]
    programs: Vec<String>,
    /// Mount options.
    #[arg(short, long)]
    options: Option<String>,
    /// Directory for the volume.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Path of draconis (default: next to draconis-lab).
    #[arg(long)]
    draconis: Option<PathBuf>,
}

fn parse_delay_point(name: &str) -> Result<DelayPoint, String> {
    let mut all = DelayPoint::ALL.into_iter();
    all.find(|point| format!("{point:?}").eq_ignore_ascii_case(name)).ok_or_else(|| {
        "read, applied, logged, answered and committed are what a request passes".into()
    })
}

/// State shared by the clients and the killer.
pub(crate) struct SharedState {
    over: AtomicBool,
    /// Number of calls so far.
    calls: AtomicU64,
    began: Instant,
    /// Time of the last kill, in nanoseconds since the start.
    killed: AtomicU64,
    /// Durations of the calls that were in flight during a kill.
    waits: Mutex<Vec<Duration>>,
}

impl SharedState {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn elapsed_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Makes a call; records its duration if a worker died meanwhile.
    pub(crate) fn timed_call<T>(&self, call: impl FnOnce() -> T) -> T {
        let began = self.elapsed_ns();
        let done = call();
        let (killed, ended) = (self.killed.load(Ordering::Relaxed), self.elapsed_ns());
        self.calls.fetch_add(1, Ordering::Relaxed);
        if (began..ended).contains(&killed) {
            let wait = Duration::from_nanos(ended - killed);
            self.waits.lock().push(wait);
        }
        done
    }
}

/// A mount of a new volume, with its own manager.
struct TestMount {
    draconis: PathBuf,
    omission: Option<InjectedFault>,
    linger: Option<DelayPoint>,
    dir: tempfile::TempDir,
}

impl TestMount {
    fn new(arguments: &DeathsArguments, omission: Option<InjectedFault>) -> anyhow::Result<Self> {
        let beside = || -> anyhow::Result<PathBuf> {
            let own = std::env::current_exe()?;
            Ok(own.parent().unwrap_or(Path::new("")).join("draconis"))
        };
        let draconis = arguments.draconis.clone().map_or_else(beside, Ok)?;
        let dir = tempfile::Builder::new().prefix("deaths-").tempdir_in(&arguments.dir)?;
        let stand = Self { draconis, omission, linger: arguments.linger, dir };
        for name in ["run", "mnt"] {
            std::fs::create_dir(stand.path(name))?;
        }
        std::fs::File::create(stand.path("image"))?.set_len(192 << 20)?;
        let mut make = Command::new("mke2fs");
        make.args(["-q", "-F", "-t", &arguments.kind]).args(&arguments.mke2fs);
        run_command(make.arg(stand.path("image")))?;
        Ok(stand)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn draconis(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.draconis);
        command.env("DRACONIS_RUNTIME_DIR", self.path("run")).args(arguments);
        command.envs(self.omission.map(|omission| (FAULTS_VARIABLE, format!("{omission:?}"))));
        command.envs(self.linger.map(|point| (DELAY_VARIABLE, format!("{point:?}"))));
        command
    }

    fn mount(&self, options: Option<&str>) -> anyhow::Result<()> {
        let mut command = self.draconis(&["mount"]);
        command.args(options.map(|options| format!("-o{options}")));
        run_command(command.arg(self.path("image")).arg(self.path("mnt")))
    }

    fn unmount(&self) -> anyhow::Result<()> {
        run_command(self.draconis(&["umount"]).arg(self.path("mnt")))
    }

    /// Prints the log of the manager and its workers.
    fn print_log(&self) {
        let log = std::fs::read_to_string(self.path("run/manager.log")).unwrap_or_default();
        let lines: Vec<&str> =
            log.lines().filter(|line| !line.contains("has taken over")).collect();
        for line in lines.iter().skip(lines.len().saturating_sub(20)) {
            println!("  {line}");
        }
    }

    fn run_e2fsck(&self) -> anyhow::Result<()> {
        run_command(Command::new("e2fsck").arg("-fn").arg(self.path("image")))
    }

    fn status(&self) -> anyhow::Result<MountStatus> {
        self.query_status()?.mounts.into_iter().next().context("no mount")
    }

    fn query_status(&self) -> anyhow::Result<Status> {
        let socket = std::os::unix::net::UnixStream::connect(self.path("run/manager.sock"))?;
        protocol::send_line(&socket, &Request::Status)?;
        match protocol::receive_line(&socket)? {
            Reply::Status(status) => Ok(status),
            other => bail!("{other:?}"),
        }
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        // After a failed run, because the directory is deleted.
        let mut command = self.draconis(&["umount", "--force"]);
        let _ = command.arg(self.path("mnt")).output();
    }
}

fn run_command(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| name.clone())?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!("{name}: {}: {}", output.status, String::from_utf8_lossy(&said).trim());
    }
    Ok(())
}

fn kill_process(pid: u32) -> anyhow::Result<()> {
    let process = Pid::from_raw(pid as i32).context("a process without a number")?;
    Ok(rustix::process::kill_process(process, Signal::KILL)?)
}

/// Runs the test; fails if a client saw an error.
pub fn run(arguments: &DeathsArguments) -> anyhow::Result<()> {
    run_test(arguments, None)
}

/// Runs the test with a fault injected into the program.
fn run_test(arguments: &DeathsArguments, omission: Option<InjectedFault>) -> anyhow::Result<()> {
    let stand = TestMount::new(arguments, omission)?;
    stand.mount(arguments.options.as_deref())?;
    let shared = SharedState {
        over: AtomicBool::new(false),
        calls: AtomicU64::new(0),
        began: Instant::now(),
        killed: AtomicU64::new(0),
        waits: Mutex::default(),
    };
    let new = |nth| StressClient::new(&stand.path("mnt"), nth, arguments.seed, &shared);
    let mut clients = (0..arguments.clients).map(new).collect::<anyhow::Result<Vec<_>>>()?;
    let (mut found, mut restarts) = (vec![], 0);
    std::thread::scope(|scope| -> anyhow::Result<()> {
        let working: Vec<_> = clients
            .iter_mut()
            .map(|client| scope.spawn(|| client.run_until_over(&shared)))
            .collect();
        let running: Vec<_> = (0..)
            .zip(&arguments.programs)
            .map(|(nth, command)| {
                let (dir, shared) = (stand.path("mnt").join(format!("program-{nth}")), &shared);
                scope.spawn(move || program::run(command, &dir, arguments.seed + nth, shared))
            })
            .collect();
        let killed = kill_until_over(&stand, arguments, &shared);
        shared.over.store(true, Ordering::Relaxed);
        for client in working.into_iter().chain(running) {
            match client.join() {
                Ok(done) => found.extend(done.err()),
                Err(_) => found.push(anyhow::anyhow!("a client panicked")),
            }
        }
        restarts = killed?;
        Ok(())
    })?;
    for again in [false, true] {
        if again {
            clients.iter_mut().for_each(StressClient::close_files);
            stand.unmount()?;
            stand.run_e2fsck()?;
            stand.mount(arguments.options.as_deref())?;
        }
        found.extend(clients.iter().filter_map(|client| client.compare_all().err()));
    }
    stand.unmount()?;
    stand.run_e2fsck()?;
    print_report(&shared, restarts);
    for why in &found {
        println!("{why:#}");
    }
    if !found.is_empty() {
        stand.print_log();
        bail!("{} violations, seed {}", found.len(), arguments.seed);
    }
    Ok(())
}

/// An event during the test.
#[derive(Clone, Copy)]
enum KillEvent {
    WorkerDies,
    /// The manager is killed; a new one finds the mounts.
    ManagerDies,
    /// Keeper and worker are replaced by a new process of the program.
    Upgrade,
}

impl KillEvent {
    /// Picks a random event, mostly `WorkerDies`.
    fn random_event(random: &mut Random) -> Self {
        match random.next_below(16) {
            0 => Self::ManagerDies,
            1 => Self::Upgrade,
            _ => Self::WorkerDies,
        }
    }
}

/// Triggers the events; returns the number of worker restarts.
fn kill_until_over(
    stand: &TestMount,
    arguments: &DeathsArguments,
    shared: &SharedState,
) -> anyhow::Result<u64> {
    let mut random = Random::new(arguments.seed ^ 0xdead);
    let mut last = 0;
    for _ in 0..arguments.kills {
        if shared.is_over() {
            break;
        }
        let until = Instant::now() + RESTART_TIMEOUT;
        let pid = loop {
            let status = stand.status()?;
            if status.worker_pid != last && status.state == "serving" {
                break status.worker_pid;
            }
            if Instant::now() > until || status.state == "dead" {
                bail!("no worker took over: {}", status.why.unwrap_or(status.state));
            }
            std::thread::sleep(Duration::from_micros(500));
        };
        std::thread::sleep(Duration::from_micros(random.next_below(1000 * arguments.most_ms)));
        shared.killed.store(shared.elapsed_ns(), Ordering::Relaxed);
        match KillEvent::random_event(&mut random) {
            KillEvent::WorkerDies => {
                kill_process(pid)?;
                last = pid;
            }
            KillEvent::ManagerDies => {
                kill_process(stand.query_status()?.manager_pid.context("there is no manager")?)?;
                run_command(&mut stand.draconis(&["status"]))?;
            }
            KillEvent::Upgrade => {
                run_command(&mut stand.draconis(&["upgrade"]))?;
                last = pid;
            }
        }
    }
    let until = Instant::now() + RESTART_TIMEOUT;
    loop {
        let status = stand.status()?;
        if status.worker_pid != last {
            return Ok(status.restarts);
        }
        if Instant::now() > until {
            bail!("the last worker was not followed by another");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn print_report(shared: &SharedState, restarts: u64) {
    let mut waits = std::mem::take(&mut *shared.waits.lock());
    waits.sort();
    let part = |part: f64| {
        let nth = (waits.len() as f64 * part) as usize;
        waits.get(nth.min(waits.len().saturating_sub(1))).copied().unwrap_or_default()
    };
    println!(
        "{restarts} workers died and were followed by others, {} calls; {} were under way and \
         took {:.1?} (median), {:.1?} (99 of 100), {:.1?} (longest)",
        shared.calls.load(Ordering::Relaxed),
        waits.len(),
        part(0.5),
        part(0.99),
        part(1.0),
    );
}
