//! Verified reads: a store is filled, closed and opened, then read.
//!
//! ```text
//!   fill, every key once, in any order or theirs ─▶ close, leave the kernel's cache, open
//!     ─▶ scan, cold, which warms
//!     ─▶ for each pattern: point reads ─▶ scan ─▶ overwrites (if asked for), read again
//! ```
//!
//! Law: every value read is compared with the value put, while the clock is stopped. A single
//! wrong byte invalidates the result.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Serialize;

use crate::keys::{AccessPattern, KeySequence, ValueGenerator, decode_key, encode_key};
use crate::kv::{KvSubject, StoreOptions};
use crate::latency::{LatencyHistogram, LatencyQuantiles};
use draconis_device::Random;

/// Pairs per batch when loading.
const BATCH_KEYS: usize = 1000;

/// What is read.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Store to test.
    #[arg(long)]
    store: String,
    /// Empty directory for the store.
    #[arg(long)]
    dir: PathBuf,
    /// Number of keys, each put once.
    #[arg(long)]
    keyspace: u64,
    /// Size of a value in bytes.
    #[arg(long, default_value_t = 512)]
    value: usize,
    /// Number of reads per pattern.
    #[arg(long)]
    reads: u64,
    /// Put the keys in key order first; in another order, loading a tree larger than memory takes
    /// hours.
    #[arg(long)]
    in_order: bool,
    /// Number of keys to overwrite at random before reading again.
    #[arg(long, default_value_t = 0)]
    overwrites: u64,
    /// Random seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Maximum duration of a phase, in milliseconds.
    #[arg(long, default_value_t = u64::MAX)]
    most_ms: u64,
    /// Memory limit of the store in bytes (default: chosen by the store).
    #[arg(long)]
    cache: Option<u64>,
    /// Control group to join first.
    #[arg(long)]
    cgroup: Option<PathBuf>,
}

/// Result of one phase.
#[derive(Debug, Serialize)]
pub struct PhaseResult {
    /// Number of operations.
    count: u64,
    /// Duration, without the comparisons.
    seconds: f64,
    /// Latencies of the operations; `None` for a scan.
    latency: Option<LatencyQuantiles>,
}

/// Result of a run in which every value was right.
#[derive(Debug, Serialize)]
pub struct ReadBenchmarkResult {
    /// Loading all keys.
    load: PhaseResult,
    /// Scan of all keys after opening, from the device.
    cold_scan: PhaseResult,
    /// Uniform point reads.
    uniform: PhaseResult,
    /// Skewed point reads: 90 % to a tenth of the keys.
    skewed: PhaseResult,
    /// Scan of all keys.
    scan: PhaseResult,
    /// Single overwrites, uniform.
    overwrite: Option<PhaseResult>,
    /// Uniform point reads after the overwrites.
    again: Option<PhaseResult>,
    /// Disk space of the store at the end, in bytes.
    disk_bytes: u64,
    /// Peak private memory of the process, in bytes.
    peak_bytes: u64,
}

/// Runs the workload.
///
/// # Errors
/// The store fails, or returns a wrong value.
pub fn run(arguments: &Arguments) -> anyhow::Result<ReadBenchmarkResult> {
    crate::group::join_cgroup(arguments.cgroup.as_deref())?;
    let scarce = arguments.cgroup.is_some();
    let how = StoreOptions { cache_bytes: arguments.cache, scarce, ..StoreOptions::default() };
    let open = || crate::open::open(&arguments.store, &arguments.dir, how);
    let mut reading = ReadBenchmark::new(arguments, open()?);
    let load = reading.load()?;
    drop(reading.store.take());
    drop_page_cache(&arguments.dir)?;
    reading.store = Some(open()?);
    // If all data fits in memory, this scan also warms the caches, without a time limit.
    let cold_scan = reading.scan(if scarce { reading.most } else { Duration::MAX })?;
    let uniform = reading.point_reads(AccessPattern::Uniform)?;
    let skewed = reading.point_reads(AccessPattern::Skewed)?;
    let scan = reading.scan(reading.most)?;
    let (mut overwrite, mut again) = (None, None);
    if arguments.overwrites > 0 {
        overwrite = Some(reading.overwrite()?);
        again = Some(reading.point_reads(AccessPattern::Uniform)?);
    }
    drop(reading);
    let disk_bytes = disk_bytes(&arguments.dir)?;
    let peak_bytes = peak_memory_bytes();
    Ok(ReadBenchmarkResult {
        load,
        cold_scan,
        uniform,
        skewed,
        scan,
        overwrite,
        again,
        disk_bytes,
        peak_bytes,
    })
}

/// Returns the peak memory of this process without mapped files; 0 if the kernel does not
/// report it.
fn peak_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0)
    };
    // The peak includes mapped files; their current size is subtracted.
    kib("VmHWM:").saturating_sub(kib("RssFile:")) * 1024
}

struct ReadBenchmark<'a> {
    arguments: &'a Arguments,
    store: Option<Box<dyn KvSubject>>,
    values: ValueGenerator,
    /// Number of overwrites of each key.
    versions: Vec<u8>,
    most: Duration,
}

impl<'a> ReadBenchmark<'a> {
    fn new(arguments: &'a Arguments, store: Box<dyn KvSubject>) -> Self {
        Self {
            arguments,
            store: Some(store),
            values: ValueGenerator::new(arguments.seed, arguments.value),
            versions: vec![0; arguments.keyspace as usize],
            most: Duration::from_millis(arguments.most_ms),
        }
    }

    /// Puts every key once, without a time limit.
    fn load(&mut self) -> anyhow::Result<PhaseResult> {
        let store = self.store.as_deref().context("a store")?;
        let keyspace = self.arguments.keyspace;
        let order = match self.arguments.in_order {
            true => (0..keyspace).collect(),
            false => Random::new(self.arguments.seed).shuffled(keyspace),
        };
        let mut seconds = 0.0;
        for some in order.chunks(BATCH_KEYS) {
            let pair = |number: &u64| {
                (encode_key(*number).into(), self.values.generate(*number, 0).into())
            };
            let pairs: Vec<_> = some.iter().map(pair).collect();
            let started = Instant::now();
            store.load(&pairs)?;
            seconds += started.elapsed().as_secs_f64();
        }
        let started = Instant::now();
        store.sync()?;
        seconds += started.elapsed().as_secs_f64();
        Ok(PhaseResult { count: order.len() as u64, seconds, latency: None })
    }

    fn point_reads(&mut self, pattern: AccessPattern) -> anyhow::Result<PhaseResult> {
        let store = self.store.as_deref().context("a store")?;
        let seed = self.arguments.seed ^ 0x5EAD;
        let mut keys = KeySequence::new(pattern, self.arguments.keyspace, 0, 1, seed);
        let (started, mut latencies, mut count) = (Instant::now(), LatencyHistogram::default(), 0);
        while count < self.arguments.reads && (count % 64 != 0 || started.elapsed() < self.most) {
            let number = keys.next();
            let key = encode_key(number);
            let before = Instant::now();
            let value = store.get(&key)?;
            latencies.record_ns(before.elapsed().as_nanos() as u64);
            let version = self.versions[number as usize].into();
            if value.as_deref() != Some(self.values.generate(number, version)) {
                bail!("{}: the value of key {number} is wrong", self.arguments.store);
            }
            count += 1;
        }
        Ok(PhaseResult {
            count,
            seconds: latencies.total_seconds(),
            latency: Some(latencies.quantiles()),
        })
    }

    fn scan(&mut self, most: Duration) -> anyhow::Result<PhaseResult> {
        let store = self.store.as_deref().context("a store")?;
        let (mut count, mut checking, mut wrong) = (0, Duration::ZERO, None);
        // Copies the value, because some stores return bytes that they have not read yet.
        let mut copy = Vec::new();
        let started = Instant::now();
        store.scan(&mut |key, value| {
            // A marker of the store itself.
            if key.is_empty() {
                return true;
            }
            copy.clear();
            copy.extend_from_slice(value);
            let before = Instant::now();
            let version = self.versions.get(count as usize).map_or(0, |version| (*version).into());
            if decode_key(key) != Some(count) || copy != self.values.generate(count, version) {
                wrong = Some(count);
                return false;
            }
            count += 1;
            checking += before.elapsed();
            count % 64 != 0 || started.elapsed() < most
        })?;
        let seconds = started.elapsed().saturating_sub(checking).as_secs_f64();
        if let Some(number) = wrong {
            bail!("{}: a scan is wrong at key {number}", self.arguments.store);
        }
        if count < self.arguments.keyspace && started.elapsed() < most {
            bail!("{}: a scan ends after {count} keys", self.arguments.store);
        }
        Ok(PhaseResult { count, seconds, latency: None })
    }

    fn overwrite(&mut self) -> anyhow::Result<PhaseResult> {
        let store = self.store.as_deref().context("a store")?;
        let arguments = self.arguments;
        let mut keys =
            KeySequence::new(AccessPattern::Uniform, arguments.keyspace, 0, 1, arguments.seed);
        let (started, mut latencies, mut count) = (Instant::now(), LatencyHistogram::default(), 0);
        while count < arguments.overwrites && (count % 64 != 0 || started.elapsed() < self.most) {
            let number = keys.next();
            let version = &mut self.versions[number as usize];
            *version = version.wrapping_add(1);
            let (key, value) =
                (encode_key(number), self.values.generate(number, (*version).into()));
            let before = Instant::now();
            store.put(&key, value)?;
            latencies.record_ns(before.elapsed().as_nanos() as u64);
            count += 1;
        }
        let before = Instant::now();
        store.sync()?;
        let seconds = latencies.total_seconds() + before.elapsed().as_secs_f64();
        Ok(PhaseResult { count, seconds, latency: Some(latencies.quantiles()) })
    }
}

/// Returns all files below a directory.
fn list_files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut all = vec![];
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() { all.extend(list_files(&path)?) } else { all.push(path) }
    }
    Ok(all)
}

/// Drops the page cache of the closed files of a directory.
fn drop_page_cache(dir: &Path) -> anyhow::Result<()> {
    for path in list_files(dir)? {
        let file = std::fs::File::open(path)?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Returns the disk space of a directory's files.
fn disk_bytes(dir: &Path) -> anyhow::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    list_files(dir)?.iter().map(|path| Ok(std::fs::metadata(path)?.blocks() * 512)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_arguments(store: &str, dir: &Path) -> Arguments {
        Arguments {
            store: store.into(),
            dir: dir.into(),
            keyspace: 3000,
            value: 100,
            reads: 500,
            in_order: false,
            overwrites: 400,
            seed: 3,
            most_ms: u64::MAX,
            cache: Some(8 << 20),
            cgroup: None,
        }
    }

    #[test]
    fn every_store_returns_put_values() {
        for store in crate::kv::STORE_NAMES {
            let dir = tempfile::tempdir().unwrap();
            let outcome = run(&test_arguments(store, &dir.path().join("db"))).unwrap();
            assert_eq!((outcome.cold_scan.count, outcome.scan.count), (3000, 3000), "{store}");
            assert_eq!((outcome.uniform.count, outcome.skewed.count), (500, 500), "{store}");
            assert_eq!(outcome.again.unwrap().count, 500, "{store}");
            // Half of each value is constant, and some stores compress it.
            assert!(outcome.disk_bytes > 150_000, "{store}: {}", outcome.disk_bytes);
        }
    }

    #[test]
    fn wrong_value_is_detected() {
        let Some(store) = crate::kv::STORE_NAMES.first() else { return };
        let dir = tempfile::tempdir().unwrap();
        let arguments = test_arguments(store, &dir.path().join("db"));
        let open = || crate::open::open(store, &arguments.dir, StoreOptions::default()).unwrap();
        let mut reading = ReadBenchmark::new(&arguments, open());
        reading.load().unwrap();
        let one = reading.store.as_deref().unwrap();
        for number in 0..100 {
            one.put(&encode_key(number), b"spoilt").unwrap();
        }
        assert!(reading.scan(Duration::MAX).is_err());
        assert!(reading.point_reads(AccessPattern::Skewed).is_err());
    }
}
