//! Faults in mounts: clients work on mounted volumes while faults are injected, and the time until
//! the next answer is measured.
//!
//! ```text
//!   clients ── calls ──▶ mount ◀── deaths, hangs, forged messages, lack of memory
//!      │                   └─ image ◀── failing reads, writes and flushes, a full disk
//!      └── a model of what each call does, once: value, errno, what is there afterwards
//!   then: unmounted ── e2fsck -fn ── mounted again ── compared once more
//! ```
//! A round is one volume with faults of one kind. Each client has its own directory, which no other
//! client changes. Its model is therefore exact; the clients share only the worker.
//!
//! Law 1: while only the worker fails, every call returns as if nothing had happened.
//! Law 2: when the disk fails, calls may fail; what `fsync` returned for is there afterwards.
//! Law 3: the time of a fault is the longest call that begins after it, until it is over. The call
//! is one that only a worker can answer.

mod client;
mod disk_faults;
mod forgery;
mod memory_limit;
mod model;
mod program;
mod record_client;
mod test_mount;
#[cfg(test)]
mod tests;
mod totals;
mod worker_faults;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use draconis_types::injected_fault::{DelayPoint, InjectedFault};
use draconis_types::lock::Mutex;

use crate::stop::StopFlag;
use totals::Totals;

/// How often, over what, and how it is judged.
#[derive(Debug, clap::Args)]
pub struct FaultsArguments {
    /// Kinds of faults, in turns (default: all).
    #[arg(long = "fault", value_enum, value_delimiter = ',', value_name = "KIND")]
    kinds: Vec<FaultKind>,
    /// Number of faults.
    #[arg(long, default_value_t = 1000)]
    count: u64,
    /// Start no further round after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Most faults of one volume (default: 9 to 150, by kind).
    #[arg(long)]
    most: Option<u64>,
    /// Number of volumes mounted at once.
    #[arg(long, default_value_t = 1)]
    mounts: u64,
    /// Number of clients of each volume.
    #[arg(long, default_value_t = 3)]
    clients: u64,
    /// Random seed of the first round; each further round uses the next one (times are not
    /// reproducible).
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Maximum time between two faults of a volume, in milliseconds.
    #[arg(long, default_value_t = 20)]
    most_ms: u64,
    /// ext2, ext3 or ext4; volumes are of these kinds in turns.
    #[arg(long = "kind", value_delimiter = ',', default_value = "ext2,ext3,ext4")]
    volumes: Vec<String>,
    /// Options of mke2fs.
    #[arg(long, value_delimiter = ' ', allow_hyphen_values = true)]
    mke2fs: Vec<String>,
    /// Delay point at which workers are killed: read, applied, logged, answered or committed (test
    /// builds only).
    #[arg(long, value_parser = parse_delay_point)]
    linger: Option<DelayPoint>,
    /// Shell command to run repeatedly in a directory of the mount, beside the clients; it must
    /// succeed (repeatable). Half of its runs are killed. Only for deaths, hangs, forged messages
    /// and lack of memory.
    #[arg(long = "with", value_name = "COMMAND")]
    programs: Vec<String>,
    /// Mount options.
    #[arg(short, long)]
    options: Option<String>,
    /// Directory for the volumes.
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Path of draconis (default: next to draconis-lab).
    #[arg(long)]
    draconis: Option<PathBuf>,
    /// Append the time of each fault to FILE, and report on all of FILE.
    #[arg(long, value_name = "FILE")]
    totals: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn parse_delay_point(name: &str) -> Result<DelayPoint, String> {
    let mut all = DelayPoint::ALL.into_iter();
    all.find(|point| format!("{point:?}").eq_ignore_ascii_case(name)).ok_or_else(|| {
        "read, applied, logged, answered and committed are what a request passes".into()
    })
}

/// Kind of an injected fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum FaultKind {
    /// The worker is killed; at times the manager, or keeper and worker are upgraded.
    Death,
    /// The worker is stopped and does not answer.
    Hang,
    /// Wrong bytes: messages to the keeper, replies to the kernel, entries of the oplog.
    Reply,
    /// Reads, writes or flushes of the image fail.
    Disk,
    /// The volume is full, or the file system that holds its image.
    Full,
    /// The worker gets no more memory, or is killed for what it has.
    Memory,
}

impl FaultKind {
    const ALL: [Self; 6] =
        [Self::Death, Self::Hang, Self::Reply, Self::Disk, Self::Full, Self::Memory];

    /// Returns the number of faults of one round. Ten deaths in a minute that nobody caused by a
    /// signal end a mount.
    fn faults_per_round(self) -> u64 {
        match self {
            Self::Death => 150,
            Self::Hang | Self::Reply | Self::Memory => 9,
            Self::Disk => 20,
            Self::Full => 12,
        }
    }
}

/// State shared by the clients of a volume and the injector.
pub(crate) struct SharedState {
    over: AtomicBool,
    /// Number of calls so far.
    calls: AtomicU64,
    began: Instant,
    /// Time of the last fault, in nanoseconds since the start.
    fault_at: AtomicU64,
    /// Durations of the calls that were in flight during a fault.
    waits: Mutex<Vec<Duration>>,
    /// Beginnings of the calls that have not returned.
    in_flight: Mutex<Vec<u64>>,
}

impl SharedState {
    fn new() -> Self {
        Self {
            over: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            began: Instant::now(),
            fault_at: AtomicU64::new(0),
            waits: Mutex::default(),
            in_flight: Mutex::default(),
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    fn elapsed_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Records that a fault is injected now.
    fn mark_fault(&self) {
        self.fault_at.store(self.elapsed_ns(), Ordering::Relaxed);
    }

    /// Waits until all calls that are in flight now have returned.
    fn wait_for_calls_in_flight(&self) {
        let now = self.elapsed_ns();
        while !self.is_over() && self.in_flight.lock().iter().any(|began| *began <= now) {
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Makes a call; records its duration if there was a fault meanwhile.
    pub(crate) fn timed_call<T>(&self, call: impl FnOnce() -> T) -> T {
        let began = self.elapsed_ns();
        self.in_flight.lock().push(began);
        let done = call();
        self.in_flight.lock().retain(|it| *it != began);
        let (fault, ended) = (self.fault_at.load(Ordering::Relaxed), self.elapsed_ns());
        self.calls.fetch_add(1, Ordering::Relaxed);
        if (began..ended).contains(&fault) {
            let wait = Duration::from_nanos(ended - fault);
            self.waits.lock().push(wait);
        }
        done
    }
}

/// One volume and its faults.
struct Round<'a> {
    arguments: &'a FaultsArguments,
    kind: FaultKind,
    /// ext2, ext3 or ext4.
    volume: &'a str,
    seed: u64,
    faults: u64,
    omission: Option<InjectedFault>,
    stop: &'a StopFlag,
}

impl Round<'_> {
    /// Returns true if the run was asked to stop: the round ends, and is judged.
    fn is_stopped(&self) -> bool {
        self.stop.check_not_stopped().is_err()
    }
}

/// Runs rounds until enough faults were injected; fails if a law was broken.
pub fn run(arguments: &FaultsArguments) -> anyhow::Result<()> {
    run_rounds(arguments, None)
}

/// Runs the rounds with a fault injected into the program.
fn run_rounds(arguments: &FaultsArguments, omission: Option<InjectedFault>) -> anyhow::Result<()> {
    let mut kinds = arguments.kinds.as_slice();
    if kinds.is_empty() {
        kinds = &FaultKind::ALL;
    }
    if arguments.volumes.is_empty() {
        bail!("--kind: no kind of volume is given");
    }
    let until = arguments.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let left = AtomicU64::new(arguments.count);
    let (started, totals) = (AtomicU64::new(0), Totals::new(arguments.totals.as_deref())?);
    let stop = StopFlag::install_signal_handlers()?;
    std::thread::scope(|scope| {
        for _ in 0..arguments.mounts.max(1) {
            scope.spawn(|| {
                let may_start = || until.is_none_or(|until| Instant::now() < until);
                while may_start() && !totals.has_failed() && stop.check_not_stopped().is_ok() {
                    let nth = started.fetch_add(1, Ordering::Relaxed);
                    let kind = kinds[nth as usize % kinds.len()];
                    let most =
                        kind.faults_per_round().min(arguments.most.unwrap_or(u64::MAX)).max(1);
                    let take = |left: u64| (left > 0).then(|| left.saturating_sub(most));
                    let Ok(had) = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
                    else {
                        return;
                    };
                    let seed = arguments.seed + nth;
                    // The kind of a volume changes once all kinds of faults had their turn.
                    let volume = nth as usize / kinds.len() % arguments.volumes.len();
                    let volume = &arguments.volumes[volume];
                    let faults = had.min(most);
                    let round =
                        Round { arguments, kind, volume, seed, faults, omission, stop: &stop };
                    let done = match kind {
                        FaultKind::Disk | FaultKind::Full => disk_faults::run(&round, &totals),
                        // Every fourth round of wrong bytes.
                        FaultKind::Reply if (nth as usize / kinds.len()).is_multiple_of(4) => {
                            disk_faults::run(&round, &totals)
                        }
                        _ => worker_faults::run(&round, &totals),
                    };
                    totals.end_round(&round, done);
                }
            });
        }
    });
    memory_limit::remove_group();
    totals.report(arguments.json)
}
