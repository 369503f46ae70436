//! Power cuts: what real workloads leave of a volume, state by state, and its judges.
//!
//! ```text
//!   workload ── Volume ── recorder ── memory        marks: what was acknowledged
//!                            │ log
//!   states that a power cut can leave ──▶ our check: nothing that e2fsck -p asks about
//!                                    ├──▶ open, and what was acknowledged is there
//!                                    └──▶ every so often: e2fsck -fp, and once more on
//!                                         what it made of the volume; mount and unmount
//! ```
//!
//! Law 1: free blocks of the first image hold something old, so that a file that shows
//! what is not its own is found out.
//! Law 2: a seed makes a run; a state is named by workload, seed and number.

mod journal;
mod judge;
#[cfg(test)]
mod omissions;
mod on_store;
mod workloads;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::{Crash, CrashOptions, Crashes, Disk, Event, MemoryDisk, RecordDisk};
use draconis_exchange::contract::Time;
use draconis_ext::mkfs::{self, Contents, Node, Target, Tree, What};
use draconis_ext::{AccessTimes, Options, Volume, Writing};

use judge::{Judge, Violation};
use workloads::Workload;

use draconis_device::Random;

/// What is cut, and how often.
#[derive(Debug, clap::Args)]
pub struct CrashArguments {
    /// Number of crash states.
    #[arg(long, default_value_t = 100_000)]
    states: u64,
    /// First random seed; each run of a workload uses the next one.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Steps of each run.
    #[arg(long, default_value_t = 150)]
    steps: u64,
    /// Write subsets per flush epoch, besides prefixes.
    #[arg(long, default_value_t = 16)]
    subsets: u32,
    /// Run e2fsck on every Nth state (0: never).
    #[arg(long, default_value_t = 200)]
    e2fsck_every: u64,
    /// Simulate a disk with atomic groups and expect a clean volume.
    #[arg(long, conflicts_with = "journal")]
    atomic: bool,
    /// Test journaled volumes made by mke2fs and expect a clean volume.
    #[arg(long)]
    journal: bool,
    /// Test volumes on a store disk and expect a clean volume.
    #[arg(long, conflicts_with_all = ["journal", "atomic"])]
    store: bool,
    /// Run only workloads whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Save the first failing image of each run in DIR.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// What keeps a volume whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Protocol {
    /// The order of writes, and `e2fsck -p`.
    Ordered,
    /// A disk that is atomic against power cuts.
    Atomic,
    /// A log.
    Journal,
    /// A store.
    Store,
}

impl Protocol {
    /// Whether the volume sees a disk that is atomic against power cuts.
    fn is_atomic(self) -> bool {
        matches!(self, Self::Atomic | Self::Store)
    }
}

/// What a volume is like that is cut.
#[derive(Clone, Copy, Debug)]
struct Shape {
    block_bytes: u32,
    len_bytes: u64,
}

const SHAPES: [Shape; 3] = [
    Shape { block_bytes: 1024, len_bytes: 4 << 20 },
    Shape { block_bytes: 4096, len_bytes: 8 << 20 },
    Shape { block_bytes: 2048, len_bytes: 6 << 20 },
];

/// Some that run full, too.
const TINY: [Shape; 4] = [
    Shape { block_bytes: 1024, len_bytes: 400 << 10 },
    SHAPES[0],
    SHAPES[1],
    Shape { block_bytes: 2048, len_bytes: 700 << 10 },
];

/// How a run went.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    states: u64,
    violations: u64,
    by_e2fsck: u64,
}

/// Cuts power until enough states were tried; an error if any broke a promise.
pub fn run(arguments: &CrashArguments) -> anyhow::Result<()> {
    let began = Instant::now();
    let protocol = arguments.protocol();
    let is_journal = protocol == Protocol::Journal;
    let journals = if is_journal { journal::SHAPES.as_slice() } else { &[] };
    let journals: Vec<_> = journals
        .iter()
        .map(|shape| Ok((shape.to_string(), shape.make()?)))
        .collect::<anyhow::Result<_>>()?;
    let keeps_order = matches!(protocol, Protocol::Journal | Protocol::Store);
    let more = if keeps_order { workloads::JOURNALLED } else { &[] };
    let mut all = Tally::default();
    let mut seed = arguments.seed;
    while all.states < arguments.states {
        for (nth, make) in more.iter().chain(workloads::ALL).enumerate() {
            let workload = make(seed, arguments.steps);
            if !arguments.only.as_ref().is_none_or(|only| workload.name().contains(only)) {
                continue;
            }
            let (of, image) = match &journals[..] {
                [] if protocol == Protocol::Store => on_store::fresh(seed + nth as u64)?,
                [] => (String::new(), fresh(&*workload, seed)?),
                some => some[(seed as usize + nth * 3) % some.len()].clone(),
            };
            let before = Instant::now();
            let tally = cut(&*workload, protocol, image, seed, arguments)?;
            print_line(workload.name(), &format!("seed {seed}"), tally, before.elapsed(), &of);
            all.states += tally.states;
            all.violations += tally.violations;
            all.by_e2fsck += tally.by_e2fsck;
        }
        if all.states == 0 {
            bail!("no workload of that name, or none that writes");
        }
        seed += 1;
    }
    print_line("all", &format!("{} runs", seed - arguments.seed), all, began.elapsed(), "");
    if all.violations > 0 {
        bail!("{} states broke a promise", all.violations);
    }
    Ok(())
}

/// A fresh volume without a journal for a workload.
fn fresh(workload: &dyn Workload, seed: u64) -> anyhow::Result<Vec<u8>> {
    let shapes = if workload.may_fill() { &TINY[..] } else { &SHAPES[..] };
    image(shapes[(seed % shapes.len() as u64) as usize], seed)
}

fn print_line(name: &str, of: &str, tally: Tally, time: Duration, volume: &str) {
    let Tally { states, violations, by_e2fsck } = tally;
    let rate = states as f64 / time.as_secs_f64().max(1e-9);
    println!(
        "{name:10} {of:8} {states:>8} states {rate:>7.0}/s, {by_e2fsck:>5} by e2fsck, \
         {violations:>4} violations  {volume}"
    );
}

/// Runs a workload once and judges every state that a power cut can leave of it.
fn cut(
    workload: &dyn Workload,
    protocol: Protocol,
    image: Vec<u8>,
    seed: u64,
    arguments: &CrashArguments,
) -> anyhow::Result<Tally> {
    let Run { image, events, failed } = record(workload, image, seed, protocol)?;
    let is_atomic = protocol == Protocol::Atomic;
    let states = if is_atomic { Crashes::of_atomic } else { Crashes::new };
    let crashes = states(image, events, arguments.options(seed));
    let mut tally = judge_all(workload, seed, crashes, arguments)?;
    if let Some(error) = failed {
        println!("{} seed {seed} stopped: {error:#}", workload.name());
        tally.violations += 1;
    }
    Ok(tally)
}

/// What a workload did.
struct Run {
    /// The volume before.
    image: Vec<u8>,
    events: Vec<Event>,
    /// Why it ended early.
    failed: Option<anyhow::Error>,
}

/// Runs a workload on a fresh volume.
fn record(
    workload: &dyn Workload,
    image: Vec<u8>,
    seed: u64,
    protocol: Protocol,
) -> anyhow::Result<Run> {
    let disk = MemoryDisk::new(image.clone(), 512);
    let disk = if protocol == Protocol::Atomic { disk.atomic_against_power_cuts() } else { disk };
    let disk = Arc::new(RecordDisk::new(disk));
    let on: Arc<dyn Disk> = match protocol {
        Protocol::Store => {
            on_store::open_keeping(disk.clone(), seed).map_err(anyhow::Error::msg)?
        }
        _ => disk.clone(),
    };
    let volume = Volume::open_for_writing(on, small(), writing())?;
    let ran = workload.run(&volume, &disk, &mut Random::new(seed));
    // What ended all writing says more than what could not be written then.
    let ran = match volume.failure() {
        Some(why) => ran.context(why),
        None => ran,
    };
    let closed = volume.close().map_err(anyhow::Error::from);
    drop(volume);
    Ok(Run { image, events: disk.take(), failed: ran.and(closed).err() })
}

/// Judges states in all threads there are.
fn judge_all(
    workload: &dyn Workload,
    seed: u64,
    crashes: Crashes,
    arguments: &CrashArguments,
) -> anyhow::Result<Tally> {
    let crashes = Mutex::new(crashes.zip(1..));
    let judge = Judge::new(workload, arguments.protocol())?;
    let total = Mutex::new(Tally::default());
    let one = || -> anyhow::Result<()> {
        let lock = || total.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let next = crashes.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((crash, number)) = next else { return Ok(()) };
            let sampled = arguments.e2fsck_every > 0 && number % arguments.e2fsck_every == 0;
            // Judges write to it.
            let before = arguments.keep.as_ref().map(|_| crash.disk.to_bytes());
            let broken = judge.judge(&crash, sampled)?;
            let mut total = lock();
            total.states += 1;
            total.by_e2fsck += u64::from(sampled);
            total.violations += u64::from(!broken.is_empty());
            let is_first = total.violations == 1;
            drop(total);
            if is_first {
                broken.iter().for_each(|it| tell(workload, seed, number, &crash, it));
                let kept = arguments.keep.as_ref().zip(before).filter(|_| !broken.is_empty());
                if let Some((dir, bytes)) = kept {
                    let path = dir.join(format!("{}-{seed}-{number}.img", workload.name()));
                    std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let judges: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        judges.into_iter().try_for_each(|judge| match judge.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
}

impl CrashArguments {
    fn protocol(&self) -> Protocol {
        match () {
            () if self.atomic => Protocol::Atomic,
            () if self.journal => Protocol::Journal,
            () if self.store => Protocol::Store,
            () => Protocol::Ordered,
        }
    }

    fn options(&self, seed: u64) -> CrashOptions {
        CrashOptions { seed, subsets: self.subsets, ..CrashOptions::default() }
    }
}

/// Says what is wrong with the first bad state of a run.
fn tell(workload: &dyn Workload, seed: u64, number: u64, crash: &Crash, violation: &Violation) {
    let name = workload.name();
    let Crash { durable, written, cut, .. } = crash;
    println!(
        "{name} seed {seed} state {number} ({cut:?}, durable {}, written {}): {violation}",
        durable.0, written.0
    );
}

/// A fresh volume whose free blocks hold something old.
fn image(shape: Shape, seed: u64) -> anyhow::Result<Vec<u8>> {
    make(shape, mkfs::Options::default(), seed)
}

/// The same of any kind.
fn make(shape: Shape, options: mkfs::Options, seed: u64) -> anyhow::Result<Vec<u8>> {
    struct Nothing;
    impl Contents for Nothing {
        fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Ok(())
        }
    }
    let options = mkfs::Options {
        block_bytes: Some(shape.block_bytes),
        uuid: [7; 16],
        hash_seed: seed.to_le_bytes().repeat(2).try_into().unwrap_or_default(),
        time: 1_600_000_000,
        ..options
    };
    let len = usize::try_from(shape.len_bytes)?;
    let disk = MemoryDisk::new(vec![0xEE; len], 512);
    let mut tree = Tree::new(Node::new(What::Directory, 0o755));
    let plan = mkfs::sized(&options, &mut tree, shape.len_bytes)?;
    mkfs::write(&plan, &Nothing, &Target { disk: &disk, zeroed: false, progress: &|_| {} })?;
    drop(plan);
    Ok(disk.into_bytes())
}

/// Caches that are made and dropped quickly.
fn small() -> Options {
    Options {
        inode_cache: 256,
        block_map_cache: 64,
        data_cache_bytes: 1 << 20,
        read_ahead_bytes: 0,
        ..Options::default()
    }
}

fn writing() -> Writing {
    let seconds = AtomicU64::new(1_700_000_000);
    let clock = move || Time {
        seconds: seconds.fetch_add(1, Ordering::Relaxed).try_into().unwrap_or(i64::MAX),
        nanoseconds: 1,
    };
    Writing {
        clock: Arc::new(clock),
        dirty_bytes: 1 << 20,
        atime: AccessTimes::Never,
        discard: true,
    }
}

#[cfg(test)]
mod tests {
    use super::omissions::Omission;
    use super::*;

    fn few() -> CrashArguments {
        CrashArguments {
            states: 1,
            seed: 3,
            steps: 40,
            subsets: 8,
            e2fsck_every: 100,
            atomic: false,
            journal: false,
            store: false,
            only: None,
            keep: None,
        }
    }

    /// The short form: some hundred states of every workload.
    #[test]
    fn no_state_breaks_a_promise() {
        run(&few()).unwrap();
    }

    /// The same on a disk that is atomic against power cuts, where nothing may be wrong.
    #[test]
    fn no_state_of_an_atomic_disk_has_anything_wrong() {
        run(&CrashArguments { atomic: true, e2fsck_every: 20, ..few() }).unwrap();
    }

    /// Volumes on a disk of a store, whatever the disk below loses.
    #[test]
    fn no_state_of_a_volume_in_a_store_has_anything_wrong() {
        for seed in 1..=2 {
            let short = CrashArguments { seed, steps: 4, subsets: 1, e2fsck_every: 60, ..few() };
            run(&CrashArguments { store: true, ..short }).unwrap();
        }
    }

    /// A store that leaves out what its promises need is found out by the volume on it.
    #[test]
    fn a_store_that_does_not_keep_its_promises_is_found_out() {
        use draconis_objects::torture::{Omission, Settings, set};
        let arguments = CrashArguments { store: true, subsets: 3, e2fsck_every: 0, ..few() };
        for without in [Omission::Flush, Omission::SuperblockAfterFrames] {
            let found = [0, 1].map(|nth| {
                let workload = workloads::ALL[nth](1, 40);
                let (_, image) = on_store::fresh(1).unwrap();
                set(Settings { without: Some(without), ..Settings::USUAL });
                let run = record(&*workload, image, 1, Protocol::Store);
                set(Settings::USUAL);
                let Run { image, events, .. } = run.unwrap();
                let crashes = Crashes::new(image, events, arguments.options(1));
                judge_all(&*workload, 1, crashes, &arguments).unwrap().violations
            });
            assert!(found.iter().any(|violations| *violations > 0), "without {without:?}");
        }
    }

    /// A disk that only claims to be atomic against power cuts is found out.
    #[test]
    fn a_disk_that_tears_groups_is_found_out() {
        for make in [workloads::ALL[0], workloads::ALL[4]] {
            let workload = make(1, 40);
            let image = image(SHAPES[0], 1).unwrap();
            let Run { image, events, .. } = record(&*workload, image, 1, Protocol::Atomic).unwrap();
            let crashes = Crashes::new(image, events, few().options(1));
            let arguments = CrashArguments { atomic: true, ..few() };
            assert!(judge_all(&*workload, 1, crashes, &arguments).unwrap().violations > 0);
        }
    }

    /// Every judge finds what a writer does wrong that it is there for.
    #[test]
    fn a_writer_without_order_or_flush_is_found_out() {
        let judged = |make: &workloads::Make, spoil: fn(&mut Vec<Event>)| {
            let workload = make(1, 40);
            let image = image(SHAPES[0], 1).unwrap();
            let Run { image, mut events, .. } =
                record(&*workload, image, 1, Protocol::Ordered).unwrap();
            spoil(&mut events);
            let crashes = Crashes::new(image, events, few().options(1));
            judge_all(&*workload, 1, crashes, &few()).unwrap().violations
        };
        let unordered = |events: &mut Vec<Event>| {
            for event in events {
                if let Event::Group { after, .. } = event {
                    after.clear();
                }
            }
        };
        // What is acknowledged before it is durable.
        let hasty = |events: &mut Vec<Event>| events.retain(|it| !matches!(it, Event::Durable(_)));
        for make in workloads::ALL {
            assert!(judged(make, unordered) > 0, "{} without order", make(1, 1).name());
        }
        for make in &workloads::ALL[..4] {
            assert!(judged(make, hasty) > 0, "{} without waiting", make(1, 1).name());
        }
    }

    /// Volumes with journals: what is recovered is the tree as it was after some call.
    #[test]
    fn no_state_of_a_journal_has_anything_wrong() {
        if !has_e2fsprogs() {
            return;
        }
        for seed in 1..=2 {
            let short = CrashArguments { seed, steps: 16, subsets: 3, e2fsck_every: 60, ..few() };
            run(&CrashArguments { journal: true, ..short }).unwrap();
        }
    }

    /// Each law of the journal is missed where it is left out.
    #[test]
    fn every_omission_in_a_journal_is_found_out() {
        if !has_e2fsprogs() {
            return;
        }
        let arguments = CrashArguments { journal: true, e2fsck_every: 0, ..few() };
        for omission in Omission::ALL {
            let mut found = 0;
            // Without sums, so that a log can be altered; with them where they are left out.
            let shape = match omission {
                Omission::Sum => journal::SHAPES[3],
                _ => journal::SHAPES[0],
            };
            let image = shape.make().unwrap();
            let log = journal::Log::of(&image).unwrap();
            for seed in 1..6 {
                let workload = workloads::JOURNALLED[0](seed, 60);
                let Run { image, mut events, failed } =
                    record(&*workload, image.clone(), seed, Protocol::Journal).unwrap();
                assert!(failed.is_none(), "{failed:?}");
                if omission.leave_out(&mut events, &log) == 0 {
                    continue;
                }
                let crashes = Crashes::new(image, events, arguments.options(seed));
                found += judge_all(&*workload, seed, crashes, &arguments).unwrap().violations;
                if found > 0 {
                    break;
                }
            }
            assert!(found > 0, "{omission:?} was not missed");
        }
    }

    fn has_e2fsprogs() -> bool {
        let is_there = |name| std::process::Command::new(name).arg("-V").output().is_ok();
        let both = is_there("mke2fs") && is_there("e2fsck");
        if !both {
            crate::skipped::skipped("volumes with journals are made by mke2fs, of e2fsprogs");
        }
        both
    }
}
