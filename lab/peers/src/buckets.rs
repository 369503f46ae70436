//! A store in a bucket: load, durable puts, crash, recovery, reads; one phase per process.
//!
//! ```text
//!   load ─▶ durable ─▶ die, in the midst of durable puts ─▶ recover ─▶ read
//! ```
//!
//! Each phase is a process of its own, so that a server's request counts belong to one phase and no
//! data is cached from the one before. Law: every value read is compared with the value put.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use serde::Serialize;

use crate::keys::{AccessPattern, KeySequence, ValueGenerator, encode_key};
use crate::kv::{KvSubject, StoreOptions};
use crate::latency::{LatencyHistogram, LatencyQuantiles};

/// Pairs per batch when loading.
const LOAD_BATCH_KEYS: usize = 1000;

/// Durable puts of a process before it dies, which the store must recover.
const PUTS_BEFORE_DEATH: u64 = 200;

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum BucketPhase {
    /// Make the store, put every key once, and wait for all at the end.
    Load,
    /// Overwrite keys, each durable before its writer's next.
    Durable,
    /// The same, and end without a word when they are made.
    Die,
    /// Open, and read what was put last.
    Recover,
    /// Read keys, each as likely.
    Read,
}

/// What is put where.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Store to test.
    #[arg(long)]
    store: String,
    /// Bucket on the server named by AWS_ENDPOINT_URL; for Draconis any store address.
    #[arg(long)]
    bucket: String,
    /// Local journal file (Draconis only).
    #[arg(long)]
    journal: Option<PathBuf>,
    #[arg(long)]
    phase: BucketPhase,
    /// Number of keys, each put once by the first phase.
    #[arg(long)]
    keyspace: u64,
    /// Number of puts or reads in the other phases.
    #[arg(long, default_value_t = 0)]
    count: u64,
    /// Size of a value in bytes.
    #[arg(long, default_value_t = 100)]
    value: usize,
    /// Number of writer threads.
    #[arg(long, default_value_t = 1)]
    writers: u64,
    /// Memory limit of the store in bytes.
    #[arg(long)]
    cache: Option<u64>,
    /// Random seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Result of a phase.
#[derive(Debug, Serialize)]
pub struct BucketPhaseResult {
    /// Number of puts or reads.
    count: u64,
    /// Duration from opening to closing the store.
    whole_seconds: f64,
    /// Measured duration: puts with their wait, reads, or opening with the first read.
    seconds: f64,
    /// Latencies of the operations.
    latency: LatencyQuantiles,
}

/// Runs a phase.
///
/// # Errors
/// The store fails, or returns a wrong value.
pub fn run(arguments: &Arguments) -> anyhow::Result<BucketPhaseResult> {
    let whole = Instant::now();
    let store = open(arguments)?;
    let opened = whole.elapsed().as_secs_f64();
    let started = Instant::now();
    let (count, latencies) = match arguments.phase {
        BucketPhase::Load => (arguments.keyspace, arguments.load(&*store)?),
        BucketPhase::Durable => (arguments.count, arguments.put(&*store, arguments.count)?),
        BucketPhase::Die => {
            arguments.put(&*store, PUTS_BEFORE_DEATH)?;
            // Ends without closing the store or joining background threads.
            std::process::exit(0);
        }
        BucketPhase::Recover => {
            let mut latencies = LatencyHistogram::default();
            arguments.read_and_compare(&*store, 0, 1, &mut latencies)?;
            (1, latencies)
        }
        BucketPhase::Read => (arguments.count, arguments.read(&*store)?),
    };
    let mut seconds = started.elapsed().as_secs_f64();
    match arguments.phase {
        BucketPhase::Recover => {
            seconds += opened;
            // All of these puts were durable.
            for nth in 0..arguments.writers {
                let mut keys = arguments.writer_keys(nth);
                for _ in 0..arguments.writer_share(nth, PUTS_BEFORE_DEATH) {
                    arguments.read_and_compare(
                        &*store,
                        keys.next(),
                        1,
                        &mut LatencyHistogram::default(),
                    )?;
                }
            }
        }
        BucketPhase::Read => seconds = latencies.total_seconds(),
        _ => {}
    }
    drop(store);
    let whole_seconds = whole.elapsed().as_secs_f64();
    Ok(BucketPhaseResult { count, whole_seconds, seconds, latency: latencies.quantiles() })
}

impl Arguments {
    fn writer_keys(&self, nth: u64) -> KeySequence {
        KeySequence::new(
            AccessPattern::Sequential,
            self.keyspace,
            nth,
            self.writers.max(1),
            self.seed,
        )
    }

    /// Returns the share of a writer in `count` operations.
    fn writer_share(&self, nth: u64, count: u64) -> u64 {
        let writers = self.writers.max(1);
        count / writers + u64::from(nth < count % writers)
    }

    fn load(&self, store: &dyn KvSubject) -> anyhow::Result<LatencyHistogram> {
        let mut values = ValueGenerator::new(self.seed, self.value);
        let all: Vec<u64> = (0..self.keyspace).collect();
        for some in all.chunks(LOAD_BATCH_KEYS) {
            let pair =
                |number: &u64| (encode_key(*number).into(), values.generate(*number, 0).into());
            store.load(&some.iter().map(pair).collect::<Vec<_>>())?;
        }
        store.sync()?;
        Ok(LatencyHistogram::default())
    }

    /// Overwrites the first keys by several writers; returns the latencies.
    fn put(&self, store: &dyn KvSubject, count: u64) -> anyhow::Result<LatencyHistogram> {
        if count > self.keyspace {
            bail!("{count} puts of {} keys", self.keyspace);
        }
        let one = |nth: u64| -> anyhow::Result<LatencyHistogram> {
            let (mut keys, mut latencies) = (self.writer_keys(nth), LatencyHistogram::default());
            let mut values = ValueGenerator::new(self.seed, self.value);
            for _ in 0..self.writer_share(nth, count) {
                let number = keys.next();
                let before = Instant::now();
                store.put(&encode_key(number), values.generate(number, 1))?;
                latencies.record_ns(before.elapsed().as_nanos() as u64);
            }
            Ok(latencies)
        };
        std::thread::scope(|scope| {
            let writers = (0..self.writers.max(1)).map(|nth| scope.spawn(move || one(nth)));
            let mut all = LatencyHistogram::default();
            for writer in writers.collect::<Vec<_>>() {
                let made = writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?;
                all.merge(&made?);
            }
            Ok(all)
        })
    }

    fn read(&self, store: &dyn KvSubject) -> anyhow::Result<LatencyHistogram> {
        let mut keys =
            KeySequence::new(AccessPattern::Uniform, self.keyspace, 0, 1, self.seed ^ 0x5EAD);
        let mut latencies = LatencyHistogram::default();
        for _ in 0..self.count {
            let number = keys.next();
            let version = u64::from(number < PUTS_BEFORE_DEATH);
            self.read_and_compare(store, number, version, &mut latencies)?;
        }
        Ok(latencies)
    }

    /// Reads a key that was overwritten a given number of times, and compares the value.
    fn read_and_compare(
        &self,
        store: &dyn KvSubject,
        number: u64,
        version: u64,
        latencies: &mut LatencyHistogram,
    ) -> anyhow::Result<()> {
        let before = Instant::now();
        let value = store.get(&encode_key(number))?;
        latencies.record_ns(before.elapsed().as_nanos() as u64);
        let value = value.with_context(|| format!("{}: key {number} is lost", self.store))?;
        let mut values = ValueGenerator::new(self.seed, self.value);
        if value != values.generate(number, version) && value != values.generate(number, 1) {
            bail!("{}: the value of key {number} is wrong", self.store);
        }
        Ok(())
    }
}

/// Opens a store by name; the first phase creates it.
#[cfg_attr(not(feature = "draconis-kv"), allow(unused_variables))]
fn open(arguments: &Arguments) -> anyhow::Result<Box<dyn KvSubject>> {
    let durable = matches!(arguments.phase, BucketPhase::Durable | BucketPhase::Die);
    let how = StoreOptions { durable, cache_bytes: arguments.cache, ..StoreOptions::default() };
    match arguments.store.as_str() {
        #[cfg(feature = "slatedb")]
        "slatedb" => {
            Ok(Box::new(crate::slate_store::Slate::in_bucket(&arguments.bucket, "store", how)?))
        }
        #[cfg(feature = "draconis-kv")]
        "draconis-kv" => {
            let address = match draconis_bucket::is_address(&arguments.bucket) {
                true => arguments.bucket.clone(),
                false => format!("s3://{}/store", arguments.bucket),
            };
            let (makes, journal) =
                (arguments.phase == BucketPhase::Load, arguments.journal.as_deref());
            Ok(Box::new(crate::draconis_store::DraconisKv::in_bucket(
                &address, makes, journal, how,
            )?))
        }
        other => bail!("{other} is not kept in buckets, or this program was built without it"),
    }
}
