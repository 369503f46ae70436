//! Soak test of object stores: each seed is a store that is loaded, overwritten, filled, emptied,
//! reopened and killed, with a full check after every step.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use draconis_testkit::torture::{self, UsageTally, Violation};
use draconis_types::lock::Mutex;

/// Which stores, and for how long.
#[derive(Debug, clap::Args)]
pub struct StoreUseArguments {
    /// First random seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Stop after this many stores (default: 100, or no limit with --seconds).
    #[arg(long, conflicts_with = "seconds")]
    stores: Option<u64>,
    /// Start no store after this many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Steps per store.
    #[arg(long, default_value_t = 40)]
    steps: usize,
    /// Number of threads (default: number of processors).
    #[arg(long)]
    threads: Option<usize>,
}

/// Tests stores until the limit is reached; fails if a promise was broken.
pub fn run(arguments: &StoreUseArguments) -> anyhow::Result<()> {
    let began = Instant::now();
    let until = arguments.seconds.map(|seconds| began + Duration::from_secs(seconds));
    let stores = arguments.stores.unwrap_or(if until.is_some() { u64::MAX } else { 100 });
    let end = arguments.seed.saturating_add(stores);
    let (next, is_over) = (AtomicU64::new(arguments.seed), AtomicBool::new(false));
    let sum = Mutex::new((0u64, UsageTally::default(), 0u64));
    // Panics are reported together with the store that panicked.
    std::panic::set_hook(Box::new(|_| {}));
    let one = || {
        while !is_over.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || until.is_some_and(|until| Instant::now() >= until) {
                is_over.store(true, Ordering::Relaxed);
                return;
            }
            let used = torture::run_ordinary_use(seed, arguments.steps);
            let mut sum = sum.lock();
            sum.0 += 1;
            match used {
                Ok(usage) => sum.1 += usage,
                Err(Violation(why)) => {
                    sum.2 += 1;
                    println!("--seed {seed} --stores 1 --steps {}: {why}", arguments.steps);
                }
            }
            if sum.0.is_multiple_of(20) {
                print_summary(&sum, began.elapsed());
            }
        }
    };
    let threads = arguments
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(one))));
    let sum = sum.into_inner();
    print_summary(&sum, began.elapsed());
    if sum.2 > 0 {
        bail!("{} stores broke a promise", sum.2);
    }
    Ok(())
}

fn print_summary((stores, usage, violations): &(u64, UsageTally, u64), time: Duration) {
    println!(
        "{stores} stores in {:.0} s: {} steps, each with a full check, {} groups; {} times full, \
         {} states of kills and power cuts, {} segments cleaned, {} times another length; \
         {violations} violations",
        time.as_secs_f64(),
        usage.acts,
        usage.groups,
        usage.full,
        usage.cuts,
        usage.cleaned,
        usage.resized,
    );
}
