//! Puts: sequential, uniform or skewed; durable or not; by one or several threads.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde::Serialize;

use crate::keys::{AccessPattern, KeySequence, ValueGenerator, encode_key};
use crate::kv::{KvSubject, StoreOptions, StoreStatistics};
use crate::latency::{LatencyHistogram, LatencyQuantiles};
use crate::open::open;

/// What is put where.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Store to test.
    #[arg(long)]
    store: String,
    /// Empty directory for the store.
    #[arg(long)]
    dir: PathBuf,
    /// Number of puts.
    #[arg(long)]
    count: u64,
    /// Number of distinct keys.
    #[arg(long)]
    keyspace: u64,
    /// Size of a value in bytes.
    #[arg(long, default_value_t = 512)]
    value: usize,
    /// Order of keys.
    #[arg(long)]
    pattern: AccessPattern,
    /// Make each put durable.
    #[arg(long)]
    sync: bool,
    /// Number of writer threads.
    #[arg(long, default_value_t = 1)]
    writers: u64,
    /// Random seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Maximum duration in milliseconds.
    #[arg(long, default_value_t = u64::MAX)]
    most_ms: u64,
    /// Memory limit of the store in bytes (default: chosen by the store).
    #[arg(long)]
    cache: Option<u64>,
    /// Flush by system calls instead of io_uring, so that strace can count them.
    #[arg(long)]
    calls: bool,
}

/// Result of a run.
#[derive(Debug, Serialize)]
pub struct PutResult {
    /// Number of puts.
    puts: u64,
    /// Duration.
    seconds: f64,
    /// Latencies of the puts.
    latency: LatencyQuantiles,
    /// Number of sampled keys that had the expected value afterwards.
    found: u64,
    /// Number of sampled keys.
    looked_for: u64,
    /// Statistics of the store.
    #[serde(flatten)]
    statistics: StoreStatistics,
}

/// Runs the workload.
///
/// # Errors
/// The store fails.
pub fn run(arguments: &Arguments) -> anyhow::Result<PutResult> {
    let how = StoreOptions {
        durable: arguments.sync,
        cache_bytes: arguments.cache,
        calls: arguments.calls,
        ..StoreOptions::default()
    };
    let store = open(&arguments.store, &arguments.dir, how)?;
    let started = Instant::now();
    let latencies = put_all(&*store, arguments, started)?;
    let seconds = started.elapsed().as_secs_f64();
    let statistics = store.statistics()?;
    let puts = latencies.iter().map(|(puts, _)| puts).sum();
    let looked_for = latencies.first().map_or(0, |(puts, _)| *puts).min(100);
    let mut again = arguments.writer_keys(0);
    let mut values = ValueGenerator::new(arguments.seed, arguments.value);
    let mut found = 0;
    for _ in 0..looked_for {
        let number = again.next();
        let value = store.get(&encode_key(number))?;
        found += u64::from(value.as_deref() == Some(values.generate(number, 0)));
    }
    // Checks that the subject is a store: it forgets what is deleted.
    store.put(b"a key of ours", b"")?;
    store.delete(b"a key of ours")?;
    if store.get(b"a key of ours")?.is_some() {
        bail!("{} keeps what was removed", arguments.store);
    }
    store.sync()?;
    let mut all = LatencyHistogram::default();
    latencies.iter().for_each(|(_, one)| all.merge(one));
    Ok(PutResult { puts, seconds, latency: all.quantiles(), found, looked_for, statistics })
}

impl Arguments {
    fn writer_keys(&self, nth: u64) -> KeySequence {
        KeySequence::new(self.pattern, self.keyspace, nth, self.writers.max(1), self.seed)
    }
}

/// Runs the puts of all writers.
fn put_all(
    store: &dyn KvSubject,
    arguments: &Arguments,
    started: Instant,
) -> anyhow::Result<Vec<(u64, LatencyHistogram)>> {
    let writers = arguments.writers.max(1);
    let most = Duration::from_millis(arguments.most_ms);
    let one = |nth: u64| -> anyhow::Result<(u64, LatencyHistogram)> {
        let share = arguments.count / writers + u64::from(nth < arguments.count % writers);
        let (mut keys, mut latencies) = (arguments.writer_keys(nth), LatencyHistogram::default());
        let mut values = ValueGenerator::new(arguments.seed, arguments.value);
        for done in 0..share {
            let number = keys.next();
            let (key, value) = (encode_key(number), values.generate(number, 0));
            let before = Instant::now();
            store.put(&key, value)?;
            latencies.record_ns(before.elapsed().as_nanos() as u64);
            if done % 64 == 0 && started.elapsed() > most {
                return Ok((done + 1, latencies));
            }
        }
        Ok((share, latencies))
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..writers).map(|nth| scope.spawn(move || one(nth))).collect();
        let panicked = |_| Err(anyhow::anyhow!("a writer panicked"));
        all.into_iter().map(|one| one.join().unwrap_or_else(panicked)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_store_finds_put_keys() {
        for store in crate::kv::STORE_NAMES {
            for sync in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                let outcome = run(&Arguments {
                    store: (*store).into(),
                    dir: dir.path().join("db"),
                    count: 300,
                    keyspace: 200,
                    value: 100,
                    pattern: AccessPattern::Skewed,
                    sync,
                    writers: 2,
                    seed: 3,
                    most_ms: u64::MAX,
                    cache: None,
                    calls: false,
                })
                .unwrap();
                assert_eq!((outcome.puts, outcome.found), (300, outcome.looked_for), "{store}");
                assert!(outcome.latency.max_ns >= outcome.latency.p50_ns);
            }
        }
    }
}
