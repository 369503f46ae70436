//! Simulated power cuts of object stores: the long form.
//!
//! ```text
//!   seeds ──▶ long runs    cleaning, checkpoints, a full disk, opening again; one of 400 pieces
//!        │                 has segments as long as those of real stores
//!        ├──▶ large runs   groups of several segments, odd bytes, holes
//!        ├──▶ sequences    up to three steps, every subset of up to twelve sectors
//!        ├──▶ making       a store is made over noise, and over an older one
//!        └──▶ bad disks    rot, lost and misplaced writes, errors
//! ```
//!
//! Each thread takes the next piece of work. A piece is identified by kind and number, which
//! suffices to run it again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use draconis_objects::test_hooks::TestSettings;
use draconis_testkit::CrashOptions;
use draconis_testkit::torture::{
    self, CheckFrequencies, DamageTally, RunTally, StoreShape, Violation,
};
use draconis_types::lock::Mutex;

/// What is cut, and for how long.
#[derive(Debug, clap::Args)]
pub struct StoreCrashArguments {
    /// First random seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Stop after this many seconds.
    #[arg(long, conflicts_with = "states")]
    seconds: Option<u64>,
    /// Stop after this many states (default: 1,000,000).
    #[arg(long)]
    states: Option<u64>,
    /// Run every sequence of up to three steps once, and nothing else.
    #[arg(long, conflicts_with_all = ["states", "seconds", "only", "seed"])]
    sweep: bool,
    /// Steps per long run.
    #[arg(long, default_value_t = 150)]
    steps: usize,
    /// Run only tests of this kind.
    #[arg(long)]
    only: Option<CrashScenario>,
    /// Number of threads (default: number of processors).
    #[arg(long)]
    threads: Option<usize>,
}

/// What a piece is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum CrashScenario {
    /// Long runs.
    Runs,
    /// Long runs with groups of several segments.
    Large,
    /// Long runs with real segments.
    Real,
    /// Short sequences, exhaustively.
    Sequences,
    /// Making a store.
    Making,
    /// Damaged and failing disks.
    Disks,
}

/// Totals over all pieces.
#[derive(Clone, Copy, Debug, Default)]
struct CrashTotals {
    pieces: u64,
    tally: RunTally,
    harm: DamageTally,
    violations: u64,
}

/// Simulates power cuts until the limit is reached; fails if a promise was broken.
pub fn run(arguments: &StoreCrashArguments) -> anyhow::Result<()> {
    let began = Instant::now();
    let states = match arguments.seconds {
        Some(_) => u64::MAX,
        None if arguments.sweep => u64::MAX,
        None => arguments.states.unwrap_or(1_000_000),
    };
    let first = if arguments.sweep { 0 } else { arguments.seed };
    let until = arguments.seconds.map(|seconds| began + Duration::from_secs(seconds));
    let (next, is_over) = (AtomicU64::new(first), AtomicBool::new(false));
    let sum = Mutex::new(CrashTotals::default());
    // Panics are reported together with the piece that panicked.
    std::panic::set_hook(Box::new(|_| {}));
    let one = || {
        while !is_over.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let kind = match arguments.sweep {
                true => CrashScenario::Sequences,
                false => arguments.only.unwrap_or(scenario_of(number)),
            };
            let done = match (arguments.sweep, sweep_sequence_parameters(number)) {
                (true, None) => return,
                (true, Some((shape, groups, nth))) => run_sequence(shape, groups, nth, number),
                (false, _) => run_scenario(kind, number, arguments.steps),
            };
            let mut sum = sum.lock();
            sum.pieces += 1;
            match done {
                Ok((tally, harm)) => {
                    sum.tally += tally;
                    sum.harm += harm;
                }
                Err(Violation(why)) => {
                    sum.violations += 1;
                    if sum.violations <= 20 {
                        let kind = format!("{kind:?}").to_lowercase();
                        match arguments.sweep {
                            true => println!("piece {number} of the sweep: {why}"),
                            false => println!("--only {kind} --seed {number} --states 1: {why}"),
                        }
                    }
                }
            }
            let judged = sum.tally.states + sum.tally.second;
            if judged >= states || until.is_some_and(|until| Instant::now() >= until) {
                is_over.store(true, Ordering::Relaxed);
            }
            if sum.pieces.is_multiple_of(500) {
                print_totals(&sum, began.elapsed());
            }
        }
    };
    let threads = arguments
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(one))));
    let sum = sum.into_inner();
    print_totals(&sum, began.elapsed());
    if sum.violations > 0 {
        bail!("{} pieces broke a promise", sum.violations);
    }
    Ok(())
}

/// Returns the kind of a piece; most are sequences, which are shorter.
fn scenario_of(number: u64) -> CrashScenario {
    match number % 50 {
        // Rare, because it takes a hundred times as long as a sequence.
        0 if number.is_multiple_of(400) => CrashScenario::Real,
        1 => CrashScenario::Making,
        2..=15 => CrashScenario::Runs,
        16..=20 => CrashScenario::Large,
        21..=25 => CrashScenario::Disks,
        _ => CrashScenario::Sequences,
    }
}

/// Returns the sequence of a piece in a sweep: shape, steps and number; `None` after the
/// last.
fn sweep_sequence_parameters(number: u64) -> Option<(StoreShape, usize, usize)> {
    let shape = StoreShape::ALL[(number % 4) as usize];
    let mut nth = (number / 4) as usize;
    for groups in 1..=3 {
        let all = torture::sequence_count(groups);
        if nth < all {
            return Some((shape, groups, nth));
        }
        nth -= all;
    }
    None
}

fn run_sequence(
    shape: StoreShape,
    groups: usize,
    nth: usize,
    seed: u64,
) -> Result<(RunTally, DamageTally), Violation> {
    let script = torture::sequence(groups, nth, shape);
    let options = CrashOptions { seed, subsets: 64, exhaustive_sectors: 12 };
    let tally = torture::run_with_power_cuts(
        shape,
        &script,
        options,
        CheckFrequencies::SAMPLED,
        TestSettings::NORMAL,
    )?;
    Ok((tally, DamageTally::default()))
}

fn print_totals(sum: &CrashTotals, time: Duration) {
    let CrashTotals { pieces, tally, harm, violations } = sum;
    let rate = (tally.states + tally.second) as f64 / time.as_secs_f64().max(1e-9);
    println!(
        "{pieces} pieces: {} states and {} of second cuts, {rate:.0}/s; {} checkpoints, {} segments \
         cleaned, {} times full; {} bad disks, {} refused, {} unreadable, {} shorter; {violations} \
         violations",
        tally.states,
        tally.second,
        tally.checkpoints,
        tally.cleaned,
        tally.full,
        harm.disks,
        harm.refused,
        harm.unreadable,
        harm.shorter,
    );
}

fn run_scenario(
    kind: CrashScenario,
    number: u64,
    steps: usize,
) -> Result<(RunTally, DamageTally), Violation> {
    let shape = StoreShape::ALL[(number % 4) as usize];
    let usual = TestSettings::NORMAL;
    match kind {
        CrashScenario::Runs => {
            let options = CrashOptions { seed: number, subsets: 24, exhaustive_sectors: 8 };
            let script = torture::random(number, shape, steps);
            let tally = torture::run_with_power_cuts(
                shape,
                &script,
                options,
                CheckFrequencies::SAMPLED,
                usual,
            )?;
            Ok((tally, DamageTally::default()))
        }
        CrashScenario::Large => {
            let options = CrashOptions { seed: number, subsets: 24, exhaustive_sectors: 8 };
            let script = torture::random_large(number, shape, steps);
            Ok((
                torture::run_with_power_cuts(
                    shape,
                    &script,
                    options,
                    CheckFrequencies::SAMPLED,
                    usual,
                )?,
                DamageTally::default(),
            ))
        }
        CrashScenario::Real => {
            let shape = StoreShape::REAL_SIZES[(number / 400 % 2) as usize];
            let options = CrashOptions { seed: number, subsets: 8, exhaustive_sectors: 8 };
            // Few, because each second cut copies the disk.
            let effort = CheckFrequencies { second_cut: 200, ..CheckFrequencies::SAMPLED };
            let script = torture::random_large(number, shape, steps);
            Ok((
                torture::run_with_power_cuts(shape, &script, options, effort, usual)?,
                DamageTally::default(),
            ))
        }
        CrashScenario::Making => {
            Ok((torture::create_over_old_contents(number, usual)?, DamageTally::default()))
        }
        CrashScenario::Sequences => {
            // Interleaved, so that a short run covers all variants.
            let place = number / 4;
            let groups = if place.is_multiple_of(8) { 2 } else { 3 };
            let all = torture::sequence_count(groups) as u64;
            run_sequence(shape, groups, (place.wrapping_mul(7919) % all) as usize, number)
        }
        CrashScenario::Disks => {
            let script = torture::random(number, shape, steps);
            let mut harm = torture::run_with_damage(shape, &script, 40, usual)?;
            for nth in 0..4 {
                harm += torture::run_with_failures(shape, &script, number * 4 + nth, usual)?;
            }
            Ok((RunTally::default(), harm))
        }
    }
}
