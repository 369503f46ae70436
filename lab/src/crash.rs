//! Simulated power cuts: real workloads run, and every crash state is checked.
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
//! Law 1: free blocks of the initial image hold old data, so that a file that exposes foreign
//! data is detected.
//! Law 2: runs are deterministic; a state is identified by workload, seed and number.

#[cfg(test)]
mod injected_faults;
mod journal;
mod judge;
mod sequences;
mod store_volumes;
mod workloads;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::{Disk, MemoryDisk};
use draconis_ext::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};
use draconis_ext::{AccessTimes, OpenOptions, Volume, WriteOptions};
use draconis_testkit::{CrashOptions, CrashState, CrashStates, Event, RecordDisk};
use draconis_types::Time;
use draconis_types::lock::Mutex;

use judge::{CrashViolation, StateChecker};
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
    #[command(flatten)]
    which: sequences::SequenceArguments,
}

/// Mechanism that keeps a volume consistent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ConsistencyProtocol {
    /// Ordered writes, and `e2fsck -p`.
    Ordered,
    /// A disk whose write groups are atomic under power cuts.
    Atomic,
    /// A journal.
    Journal,
    /// An object store.
    Store,
}

impl ConsistencyProtocol {
    /// Returns true if the volume is on a disk whose write groups are atomic under power cuts.
    fn is_atomic(self) -> bool {
        matches!(self, Self::Atomic | Self::Store)
    }
}

/// Size and block size of a test volume.
#[derive(Clone, Copy, Debug)]
struct VolumeConfig {
    block_bytes: u32,
    len_bytes: u64,
}

const VOLUME_CONFIGS: [VolumeConfig; 3] = [
    VolumeConfig { block_bytes: 1024, len_bytes: 4 << 20 },
    VolumeConfig { block_bytes: 4096, len_bytes: 8 << 20 },
    VolumeConfig { block_bytes: 2048, len_bytes: 6 << 20 },
];

/// Small volumes that become full.
const TINY_VOLUME_CONFIGS: [VolumeConfig; 4] = [
    VolumeConfig { block_bytes: 1024, len_bytes: 400 << 10 },
    VOLUME_CONFIGS[0],
    VOLUME_CONFIGS[1],
    VolumeConfig { block_bytes: 2048, len_bytes: 700 << 10 },
];

/// Statistics of a run.
#[derive(Clone, Copy, Debug, Default)]
struct CrashStats {
    states: u64,
    violations: u64,
    by_e2fsck: u64,
}

/// Simulates power cuts until enough states were checked; fails if one breaks a promise.
pub fn run(arguments: &CrashArguments) -> anyhow::Result<()> {
    if let Some(len) = arguments.which.len() {
        return sequences::run(arguments, len);
    }
    let began = Instant::now();
    let protocol = arguments.protocol();
    let is_journal = protocol == ConsistencyProtocol::Journal;
    let journals = if is_journal { journal::JOURNALLED_VOLUMES.as_slice() } else { &[] };
    let journals: Vec<_> = journals
        .iter()
        .map(|shape| Ok((shape.to_string(), shape.make_image()?)))
        .collect::<anyhow::Result<_>>()?;
    let keeps_order = matches!(protocol, ConsistencyProtocol::Journal | ConsistencyProtocol::Store);
    let more = if keeps_order { workloads::JOURNALLED_WORKLOADS } else { &[] };
    let mut all = CrashStats::default();
    let mut seed = arguments.seed;
    while all.states < arguments.states {
        for (nth, make) in more.iter().chain(workloads::ALL_WORKLOADS).enumerate() {
            let workload = make(seed, arguments.steps);
            if !arguments.only.as_ref().is_none_or(|only| workload.name().contains(only)) {
                continue;
            }
            let (of, image) = match &journals[..] {
                [] if protocol == ConsistencyProtocol::Store => {
                    store_volumes::create_store_image(seed + nth as u64)?
                }
                [] => (String::new(), make_workload_image(&*workload, seed)?),
                some => some[(seed as usize + nth * 3) % some.len()].clone(),
            };
            let before = Instant::now();
            let tally = check_crash_states(&*workload, protocol, image, seed, arguments)?;
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

/// Creates a volume without a journal for a workload.
fn make_workload_image(workload: &dyn Workload, seed: u64) -> anyhow::Result<Vec<u8>> {
    let shapes =
        if workload.may_fill_volume() { &TINY_VOLUME_CONFIGS[..] } else { &VOLUME_CONFIGS[..] };
    make_default_image(shapes[(seed % shapes.len() as u64) as usize], seed)
}

fn print_line(name: &str, of: &str, tally: CrashStats, time: Duration, volume: &str) {
    let CrashStats { states, violations, by_e2fsck } = tally;
    let rate = states as f64 / time.as_secs_f64().max(1e-9);
    println!(
        "{name:10} {of:8} {states:>8} states {rate:>7.0}/s, {by_e2fsck:>5} by e2fsck, \
         {violations:>4} violations  {volume}"
    );
}

/// Runs a workload once and checks every crash state.
fn check_crash_states(
    workload: &dyn Workload,
    protocol: ConsistencyProtocol,
    image: Vec<u8>,
    seed: u64,
    arguments: &CrashArguments,
) -> anyhow::Result<CrashStats> {
    let WorkloadRecording { image, events, failed } =
        record_workload(workload, image, seed, protocol)?;
    let is_atomic = protocol == ConsistencyProtocol::Atomic;
    let states = if is_atomic { CrashStates::new_atomic } else { CrashStates::new };
    let crashes = states(image, events, arguments.options(seed));
    let mut tally = check_all_states(workload, seed, crashes, arguments)?;
    if let Some(error) = failed {
        println!("{} seed {seed} stopped: {error:#}", workload.name());
        tally.violations += 1;
    }
    Ok(tally)
}

/// Recording of a workload.
struct WorkloadRecording {
    /// Volume before the workload.
    image: Vec<u8>,
    events: Vec<Event>,
    /// Error that ended the workload early.
    failed: Option<anyhow::Error>,
}

/// Runs a workload on a new volume.
fn record_workload(
    workload: &dyn Workload,
    image: Vec<u8>,
    seed: u64,
    protocol: ConsistencyProtocol,
) -> anyhow::Result<WorkloadRecording> {
    let disk = MemoryDisk::new(image.clone(), 512);
    let disk = if protocol == ConsistencyProtocol::Atomic {
        disk.atomic_against_power_cuts()
    } else {
        disk
    };
    let disk = Arc::new(RecordDisk::new(disk));
    let on: Arc<dyn Disk> = match protocol {
        ConsistencyProtocol::Store => {
            store_volumes::open_with_snapshots(disk.clone(), seed).map_err(anyhow::Error::msg)?
        }
        _ => disk.clone(),
    };
    let volume = Volume::open_for_writing(on, small_cache_options(), write_options())?;
    let ran = workload.run(&volume, &disk, &mut Random::new(seed));
    // The failure that made the volume read-only says more than later errors.
    let ran = match volume.failure() {
        Some(why) => ran.context(why),
        None => ran,
    };
    let closed = volume.close().map_err(anyhow::Error::from);
    drop(volume);
    Ok(WorkloadRecording { image, events: disk.take_events(), failed: ran.and(closed).err() })
}

/// Checks states on all CPUs.
fn check_all_states(
    workload: &dyn Workload,
    seed: u64,
    crashes: CrashStates,
    arguments: &CrashArguments,
) -> anyhow::Result<CrashStats> {
    let crashes = Mutex::new(crashes.zip(1..));
    let judge = StateChecker::new(workload, arguments.protocol())?;
    let total = Mutex::new(CrashStats::default());
    let one = || -> anyhow::Result<()> {
        let lock = || total.lock();
        loop {
            let next = crashes.lock().next();
            let Some((crash, number)) = next else { return Ok(()) };
            let sampled = arguments.e2fsck_every > 0 && number % arguments.e2fsck_every == 0;
            // Copied first, because checks write to the state.
            let before = arguments.keep.as_ref().map(|_| crash.disk.to_bytes());
            let broken = judge.find_violations(&crash, sampled)?;
            let mut total = lock();
            total.states += 1;
            total.by_e2fsck += u64::from(sampled);
            total.violations += u64::from(!broken.is_empty());
            let is_first = total.violations == 1;
            drop(total);
            if is_first {
                broken.iter().for_each(|it| print_progress(workload, seed, number, &crash, it));
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
    Ok(total.into_inner())
}

impl CrashArguments {
    fn protocol(&self) -> ConsistencyProtocol {
        match () {
            () if self.atomic => ConsistencyProtocol::Atomic,
            () if self.journal => ConsistencyProtocol::Journal,
            () if self.store => ConsistencyProtocol::Store,
            () => ConsistencyProtocol::Ordered,
        }
    }

    fn options(&self, seed: u64) -> CrashOptions {
        CrashOptions { seed, subsets: self.subsets, ..CrashOptions::default() }
    }
}

/// Prints the first bad state of a run.
fn print_progress(
    workload: &dyn Workload,
    seed: u64,
    number: u64,
    crash: &CrashState,
    violation: &CrashViolation,
) {
    let name = workload.name();
    let CrashState { durable, written, kind: cut, .. } = crash;
    println!(
        "{name} seed {seed} state {number} ({cut:?}, durable {}, written {}): {violation}",
        durable.0, written.0
    );
}

/// Creates a volume whose free blocks hold old data.
fn make_default_image(shape: VolumeConfig, seed: u64) -> anyhow::Result<Vec<u8>> {
    make_image(shape, mkfs::FormatOptions::default(), seed)
}

/// Creates such a volume with the given options.
fn make_image(
    shape: VolumeConfig,
    options: mkfs::FormatOptions,
    seed: u64,
) -> anyhow::Result<Vec<u8>> {
    struct NoContents;
    impl FileSource for NoContents {
        fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
            Ok(())
        }
    }
    let options = mkfs::FormatOptions {
        block_bytes: Some(shape.block_bytes),
        uuid: [7; 16],
        hash_seed: seed.to_le_bytes().repeat(2).try_into().unwrap_or_default(),
        time: 1_600_000_000,
        ..options
    };
    let len = usize::try_from(shape.len_bytes)?;
    let disk = MemoryDisk::new(vec![0xEE; len], 512);
    let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
    let plan = mkfs::plan_for_size(&options, &mut tree, shape.len_bytes)?;
    mkfs::write(
        &plan,
        &NoContents,
        &FormatTarget { disk: &disk, zeroed: false, progress: &|_| {} },
    )?;
    drop(plan);
    Ok(disk.into_bytes())
}

/// Returns options with small caches, which are cheap to create.
fn small_cache_options() -> OpenOptions {
    OpenOptions {
        inode_cache: 256,
        block_map_cache: 64,
        data_cache_bytes: 1 << 20,
        read_ahead_bytes: 0,
        ..OpenOptions::default()
    }
}

fn write_options() -> WriteOptions {
    let seconds = AtomicU64::new(1_700_000_000);
    let clock = move || Time {
        seconds: seconds.fetch_add(1, Ordering::Relaxed).try_into().unwrap_or(i64::MAX),
        nanoseconds: 1,
    };
    WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 1 << 20,
        atime: AccessTimes::Never,
        discard: true,
    }
}

#[cfg(test)]
mod tests {
    use super::injected_faults::JournalFault;
    use super::*;

    pub(super) fn few_states() -> CrashArguments {
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
            which: sequences::SequenceArguments::default(),
        }
    }

    /// Short form: some hundred states of each workload.
    #[test]
    fn crash_states_keep_acknowledged_data() {
        run(&few_states()).unwrap();
    }

    /// On a disk with atomic write groups, states must have no problem at all.
    #[test]
    fn crash_states_of_atomic_disk_are_clean() {
        run(&CrashArguments { atomic: true, e2fsck_every: 20, ..few_states() }).unwrap();
    }

    /// On a store disk, whatever the disk below loses.
    #[test]
    fn crash_states_of_store_volume_are_clean() {
        let short = CrashArguments { steps: 4, subsets: 1, e2fsck_every: 60, ..few_states() };
        run(&CrashArguments { store: true, ..short }).unwrap();
    }

    /// The volume must detect a store that breaks its durability promises.
    #[test]
    fn faulty_store_is_detected() {
        use draconis_objects::test_hooks::{InjectedFault, TestSettings, set_thread_settings};
        let arguments = CrashArguments { store: true, subsets: 3, e2fsck_every: 0, ..few_states() };
        for without in [InjectedFault::Flush, InjectedFault::SuperblockAfterFrames] {
            let is_found = [0, 1].iter().any(|nth| {
                let workload = workloads::ALL_WORKLOADS[*nth](1, 40);
                let (_, image) = store_volumes::create_store_image(1).unwrap();
                set_thread_settings(TestSettings { fault: Some(without), ..TestSettings::NORMAL });
                let run = record_workload(&*workload, image, 1, ConsistencyProtocol::Store);
                set_thread_settings(TestSettings::NORMAL);
                let WorkloadRecording { image, events, .. } = run.unwrap();
                let crashes = CrashStates::new(image, events, arguments.options(1));
                check_all_states(&*workload, 1, crashes, &arguments).unwrap().violations > 0
            });
            assert!(is_found, "without {without:?}");
        }
    }

    /// A disk that falsely claims atomic write groups must be detected.
    #[test]
    fn torn_write_groups_are_detected() {
        for make in [workloads::ALL_WORKLOADS[0], workloads::ALL_WORKLOADS[4]] {
            let workload = make(1, 40);
            let image = make_default_image(VOLUME_CONFIGS[0], 1).unwrap();
            let WorkloadRecording { image, events, .. } =
                record_workload(&*workload, image, 1, ConsistencyProtocol::Atomic).unwrap();
            let crashes = CrashStates::new(image, events, few_states().options(1));
            let arguments = CrashArguments { atomic: true, ..few_states() };
            assert!(check_all_states(&*workload, 1, crashes, &arguments).unwrap().violations > 0);
        }
    }

    /// Each judge must detect the fault that it is for.
    #[test]
    fn missing_order_or_flush_is_detected() {
        let judged = |make: &workloads::WorkloadFactory, spoil: fn(&mut Vec<Event>)| {
            let workload = make(1, 40);
            let image = make_default_image(VOLUME_CONFIGS[0], 1).unwrap();
            let WorkloadRecording { image, mut events, .. } =
                record_workload(&*workload, image, 1, ConsistencyProtocol::Ordered).unwrap();
            spoil(&mut events);
            let crashes = CrashStates::new(image, events, few_states().options(1));
            check_all_states(&*workload, 1, crashes, &few_states()).unwrap().violations
        };
        let unordered = |events: &mut Vec<Event>| {
            for event in events {
                if let Event::Group { after, .. } = event {
                    after.clear();
                }
            }
        };
        // Acknowledges changes before they are durable.
        let hasty = |events: &mut Vec<Event>| events.retain(|it| !matches!(it, Event::Durable(_)));
        for make in workloads::ALL_WORKLOADS {
            assert!(judged(make, unordered) > 0, "{} without order", make(1, 1).name());
        }
        for make in &workloads::ALL_WORKLOADS[..4] {
            assert!(judged(make, hasty) > 0, "{} without waiting", make(1, 1).name());
        }
    }

    /// Journalled volumes: after replay the tree is as after one of the calls.
    #[test]
    fn crash_states_of_journal_are_clean() {
        if !has_e2fsprogs() {
            return;
        }
        for seed in 1..=2 {
            let short =
                CrashArguments { seed, steps: 16, subsets: 3, e2fsck_every: 60, ..few_states() };
            run(&CrashArguments { journal: true, ..short }).unwrap();
        }
    }

    /// Each injected fault of the journal must be detected.
    #[test]
    fn injected_journal_faults_are_detected() {
        if !has_e2fsprogs() {
            return;
        }
        let arguments = CrashArguments { journal: true, e2fsck_every: 0, ..few_states() };
        for omission in JournalFault::ALL {
            let mut found = 0;
            // No checksums, so that blocks can be altered; except for the checksum fault.
            let shape = match omission {
                JournalFault::Sum => journal::JOURNALLED_VOLUMES[3],
                _ => journal::JOURNALLED_VOLUMES[0],
            };
            let image = shape.make_image().unwrap();
            let log = journal::JournalLocation::of_image(&image).unwrap();
            for seed in 1..6 {
                let workload = workloads::JOURNALLED_WORKLOADS[0](seed, 60);
                let WorkloadRecording { image, mut events, failed } =
                    record_workload(&*workload, image.clone(), seed, ConsistencyProtocol::Journal)
                        .unwrap();
                assert!(failed.is_none(), "{failed:?}");
                if omission.inject(&mut events, &log) == 0 {
                    continue;
                }
                let crashes = CrashStates::new(image, events, arguments.options(seed));
                found +=
                    check_all_states(&*workload, seed, crashes, &arguments).unwrap().violations;
                if found > 0 {
                    break;
                }
            }
            assert!(found > 0, "{omission:?} was not missed");
        }
    }

    pub(super) fn has_e2fsprogs() -> bool {
        let is_there = |name| std::process::Command::new(name).arg("-V").output().is_ok();
        let both = is_there("mke2fs") && is_there("e2fsck");
        if !both {
            draconis_testkit::report_skipped(
                "volumes with journals are made by mke2fs, of e2fsprogs",
            );
        }
        both
    }
}
