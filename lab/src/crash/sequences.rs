//! Power cuts of every short sequence of calls: [`SequenceWorkload`] by number, on one image.
//!
//! ```text
//!   --sequences 2 --first 20000 --count 20000     a part of all sequences of two changes
//!   --sequences 3 --sample 20000 --seed 7         so many of three, drawn by the seed
//! ```
//! Law: a sequence is identified by its length and number, so a run in parts is a whole run.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, bail};
use draconis_device::Random;
use draconis_testkit::{CrashStates, Event};
use draconis_types::lock::Mutex;

use super::judge::StateChecker;
use super::workloads::sequence::{SequenceWorkload, count_sequences, nth_sequence};
use super::{
    ConsistencyProtocol, CrashArguments, VOLUME_CONFIGS, WorkloadRecording, journal,
    make_default_image, record_workload, store_volumes,
};

/// On a store's disk, the power cuts before the first change are tried for one sequence of so many.
const START_EVERY: u64 = 500;

/// Which sequences are run.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct SequenceArguments {
    /// Run sequences of so many changes within bounds, instead of long workloads.
    #[arg(long, value_name = "CHANGES", value_parser = clap::value_parser!(u32).range(1..=3))]
    sequences: Option<u32>,
    /// Number of the first sequence.
    #[arg(long, default_value_t = 0, requires = "sequences")]
    first: u64,
    /// Number of sequences (default: all).
    #[arg(long, requires = "sequences")]
    count: Option<u64>,
    /// Draw so many sequences by the seed.
    #[arg(long, requires = "sequences", conflicts_with_all = ["first", "count"])]
    sample: Option<u64>,
    /// Start with files that are not yet durable.
    #[arg(long, requires = "sequences")]
    unsynced: bool,
}

#[derive(Debug, Default)]
struct SequenceStats {
    run: AtomicU64,
    /// Sequences with a change that is impossible there.
    refused: AtomicU64,
    states: AtomicU64,
    by_e2fsck: AtomicU64,
    violations: AtomicU64,
}

impl SequenceArguments {
    /// Length of the sequences, if some are asked for.
    pub(super) fn len(&self) -> Option<u32> {
        self.sequences
    }

    fn numbers(&self, len: u32, seed: u64) -> Vec<u64> {
        let all = count_sequences(len);
        match self.sample {
            Some(sample) => {
                let mut dice = Random::new(seed);
                let mut drawn = BTreeSet::new();
                while (drawn.len() as u64) < sample.min(all) {
                    drawn.insert(dice.next_below(all));
                }
                drawn.into_iter().collect()
            }
            None => {
                let end = self.count.map_or(all, |count| self.first.saturating_add(count));
                (self.first..end.min(all)).collect()
            }
        }
    }
}

/// Runs sequences, and checks every state that a power cut can leave of each.
pub(super) fn run(arguments: &CrashArguments, len: u32) -> anyhow::Result<()> {
    let began = Instant::now();
    let protocol = arguments.protocol();
    let (of, image) = match protocol {
        ConsistencyProtocol::Journal => {
            let volume = journal::JOURNALLED_VOLUMES[1];
            (volume.to_string(), volume.make_image()?)
        }
        ConsistencyProtocol::Store => store_volumes::create_store_image(0)?,
        _ => ("ext2".into(), make_default_image(VOLUME_CONFIGS[0], 1)?),
    };
    let numbers = arguments.which.numbers(len, arguments.seed);
    let (next, stats) = (AtomicU64::new(0), SequenceStats::default());
    let failed = Mutex::new(vec![]);
    let judge_one = |number: u64| -> anyhow::Result<()> {
        let steps = nth_sequence(number, len).context("a number beyond the last sequence")?;
        let workload = SequenceWorkload::new(steps, !arguments.which.unsynced, protocol);
        let WorkloadRecording { image, events, failed: error } =
            record_workload(&workload, image.clone(), number, protocol)?;
        if let Some(error) = error {
            if SequenceWorkload::is_refused(&error) {
                stats.refused.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            stats.violations.fetch_add(1, Ordering::Relaxed);
            failed.lock().push(number);
            println!("sequence {number}, {workload:?}: stopped: {error:#}");
            return Ok(());
        }
        stats.run.fetch_add(1, Ordering::Relaxed);
        let (states, events): (fn(_, _, _) -> _, _) = match protocol {
            ConsistencyProtocol::Atomic => (CrashStates::new_atomic, events),
            ConsistencyProtocol::Store => {
                (CrashStates::new, events.into_iter().map(join_adjacent).collect())
            }
            _ => (CrashStates::new, events),
        };
        // Every sequence makes the same files first; only snapshots depend on its number.
        let skips_start = protocol == ConsistencyProtocol::Store
            && !arguments.which.unsynced
            && !number.is_multiple_of(START_EVERY);
        let checker = StateChecker::new(&workload, protocol)?;
        let mut is_first = true;
        for (nth, crash) in (1..).zip(states(image, events, arguments.options(number))) {
            if skips_start && crash.marks().is_empty() {
                continue;
            }
            let state = stats.states.fetch_add(1, Ordering::Relaxed) + 1;
            let sampled = arguments.e2fsck_every > 0 && state % arguments.e2fsck_every == 0;
            stats.by_e2fsck.fetch_add(u64::from(sampled), Ordering::Relaxed);
            let broken = checker.find_violations(&crash, sampled)?;
            if !broken.is_empty() {
                stats.violations.fetch_add(1, Ordering::Relaxed);
                if std::mem::take(&mut is_first) {
                    failed.lock().push(number);
                    println!("sequence {number}, {workload:?}");
                    super::print_progress(&workload, number, nth, &crash, &broken[0]);
                }
            }
        }
        Ok(())
    };
    let judge_all = || -> anyhow::Result<()> {
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            let Some(number) = usize::try_from(nth).ok().and_then(|nth| numbers.get(nth)) else {
                return Ok(());
            };
            judge_one(*number).with_context(|| format!("sequence {number}"))?;
            if nth > 0 && nth % 5_000 == 0 {
                print_stats(nth, &stats, began, &of);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let judges: Vec<_> = (0..threads).map(|_| scope.spawn(judge_all)).collect();
        judges.into_iter().try_for_each(|judge| match judge.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    print_stats(numbers.len() as u64, &stats, began, &of);
    if stats.run.load(Ordering::Relaxed) == 0 {
        bail!("no sequence has that number");
    }
    match stats.violations.into_inner() {
        0 => Ok(()),
        violations => {
            bail!("{violations} states of {} sequences broke a promise", failed.lock().len())
        }
    }
}

/// Joins adjacent writes of a group: a store writes frames, and a disk gets each as one request.
fn join_adjacent(event: Event) -> Event {
    let Event::Group { ticket, chain, after, writes } = event else { return event };
    let mut joined: Vec<(u64, Vec<u8>)> = vec![];
    for (at, bytes) in writes {
        match joined.last_mut() {
            Some((start, room)) if *start + room.len() as u64 == at => room.extend(bytes),
            _ => joined.push((at, bytes)),
        }
    }
    Event::Group { ticket, chain, after, writes: joined }
}

fn print_stats(numbers: u64, stats: &SequenceStats, began: Instant, of: &str) {
    let SequenceStats { run, refused, states, by_e2fsck, violations } = stats;
    let value = |of: &AtomicU64| of.load(Ordering::Relaxed);
    println!(
        "{numbers} numbers: {} sequences run, {} impossible, {} states, {} by e2fsck, {} violations, {:.0} s  {of}",
        value(run),
        value(refused),
        value(states),
        value(by_e2fsck),
        value(violations),
        began.elapsed().as_secs_f64(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_testkit::Event;

    fn arguments(which: SequenceArguments) -> CrashArguments {
        let base =
            CrashArguments { subsets: 2, e2fsck_every: 400, ..super::super::tests::few_states() };
        CrashArguments { which, ..base }
    }

    /// Every single change, and some pairs.
    #[test]
    fn short_sequences_keep_what_was_synced() {
        for unsynced in [false, true] {
            let which = SequenceArguments { unsynced, ..SequenceArguments::default() };
            run(&arguments(which), 1).unwrap();
        }
        let which = SequenceArguments { sample: Some(150), ..SequenceArguments::default() };
        run(&arguments(which), 2).unwrap();
    }

    #[test]
    fn short_sequences_on_journal_keep_what_was_synced() {
        if !super::super::tests::has_e2fsprogs() {
            return;
        }
        let which = SequenceArguments { sample: Some(60), ..SequenceArguments::default() };
        for len in 1..=2 {
            run(&CrashArguments { journal: true, ..arguments(which) }, len).unwrap();
        }
    }

    #[test]
    fn short_sequences_on_store_keep_what_was_synced() {
        let which = SequenceArguments { sample: Some(6), ..SequenceArguments::default() };
        run(&CrashArguments { store: true, subsets: 1, ..arguments(which) }, 2).unwrap();
    }

    /// A volume that acknowledges too early, or writes without order, is detected by most sequences.
    #[test]
    fn sequences_detect_missing_order_or_flush() {
        let judged = |spoil: fn(&mut Vec<Event>)| {
            let image = make_default_image(VOLUME_CONFIGS[0], 1).unwrap();
            let judge = |number: u64| {
                let steps = nth_sequence(number, 1).unwrap();
                let workload = SequenceWorkload::new(steps, false, ConsistencyProtocol::Ordered);
                let WorkloadRecording { image, mut events, failed } =
                    record_workload(&workload, image.clone(), 1, ConsistencyProtocol::Ordered)
                        .unwrap();
                spoil(&mut events);
                let checker = StateChecker::new(&workload, ConsistencyProtocol::Ordered).unwrap();
                let options = arguments(SequenceArguments::default()).options(1);
                let mut states = CrashStates::new(image, events, options);
                failed.is_none()
                    && states
                        .any(|crash| !checker.find_violations(&crash, false).unwrap().is_empty())
            };
            (0..40).filter(|number| judge(*number)).count()
        };
        assert_eq!(judged(|_| ()), 0);
        let hasty = judged(|events| events.retain(|it| !matches!(it, Event::Durable(_))));
        let unordered = judged(|events| {
            for event in events {
                if let Event::Group { after, .. } = event {
                    after.clear();
                }
            }
        });
        assert!(hasty > 20 && unordered > 20, "{hasty} and {unordered} of 40");
    }
}
