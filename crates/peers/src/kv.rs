//! One workload on one store.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::bail;
use serde::Serialize;

use crate::random::Random;

/// What a store counts of itself.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Statistics {
    /// Tables that were written at level 0, if it has such.
    pub level0_tables: Option<u64>,
    /// Compactions, if it has such.
    pub compactions: Option<u64>,
}

/// A store under measurement. One that opens durable makes each put durable before it
/// returns; else nothing is but by [`KvSubject::sync`]. Whoever wants another store measured
/// implements this and adds it to [`STORES`] and [`open`].
pub trait KvSubject: Send + Sync {
    /// Sets the value of a key.
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()>;

    /// The value of a key.
    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>>;

    /// Removes a key.
    fn delete(&self, key: &[u8]) -> anyhow::Result<()>;

    /// Makes everything durable.
    fn sync(&self) -> anyhow::Result<()>;

    /// What it counted so far.
    fn statistics(&self) -> anyhow::Result<Statistics>;
}

/// The stores that this program was built with.
pub const STORES: &[&str] = &[
    #[cfg(feature = "leveldb")]
    "leveldb",
    #[cfg(feature = "rocksdb")]
    "rocksdb",
    #[cfg(feature = "lmdb")]
    "lmdb",
    #[cfg(feature = "redb")]
    "redb",
    #[cfg(feature = "fjall")]
    "fjall",
];

/// How keys are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Pattern {
    /// In strict order; the key space is as large as there are puts.
    Sequential,
    /// Nine of ten from a tenth of the key space.
    Skewed,
}

/// What is put where.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The store.
    #[arg(long)]
    store: String,
    /// An empty directory for it.
    #[arg(long)]
    dir: PathBuf,
    /// How many puts.
    #[arg(long)]
    count: u64,
    /// Keys to choose from.
    #[arg(long)]
    keyspace: u64,
    /// Bytes of a value.
    #[arg(long, default_value_t = 512)]
    value: usize,
    /// How keys are chosen.
    #[arg(long)]
    pattern: Pattern,
    /// Each put is durable before the next.
    #[arg(long)]
    sync: bool,
    /// Threads that put.
    #[arg(long, default_value_t = 1)]
    writers: u64,
    /// What replays chance.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Puts stop after so many milliseconds.
    #[arg(long, default_value_t = u64::MAX)]
    most_ms: u64,
}

/// How it went.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Puts that were made.
    puts: u64,
    /// How long they took.
    seconds: f64,
    /// How many of a sample were there afterwards, and how many were looked for.
    found: u64,
    /// Of how many.
    looked_for: u64,
    /// What the store counted.
    #[serde(flatten)]
    statistics: Statistics,
}

/// Opens a store by its name.
#[allow(unused_variables)]
fn open(name: &str, dir: &std::path::Path, durable: bool) -> anyhow::Result<Box<dyn KvSubject>> {
    match name {
        #[cfg(feature = "leveldb")]
        "leveldb" => Ok(Box::new(crate::cxx::leveldb::Store::open(dir, durable)?)),
        #[cfg(feature = "rocksdb")]
        "rocksdb" => Ok(Box::new(crate::cxx::rocksdb::Store::open(dir, durable)?)),
        #[cfg(feature = "lmdb")]
        "lmdb" => Ok(Box::new(crate::lmdb::Lmdb::open(dir, durable)?)),
        #[cfg(feature = "redb")]
        "redb" => Ok(Box::new(crate::redb_store::Redb::open(dir, durable)?)),
        #[cfg(feature = "fjall")]
        "fjall" => Ok(Box::new(crate::fjall_store::Fjall::open(dir, durable)?)),
        other => bail!("this program was built without {other}"),
    }
}

/// The keys of one writer, one after the other.
struct Keys {
    pattern: Pattern,
    keyspace: u64,
    nth: u64,
    step: u64,
    dice: Random,
}

impl Keys {
    /// 16 bytes that sort as their numbers do.
    fn next(&mut self) -> [u8; 16] {
        let number = match self.pattern {
            Pattern::Sequential => self.nth,
            Pattern::Skewed => {
                let popular = (self.keyspace / 10).max(1);
                if self.dice.below(10) < 9 {
                    self.dice.below(popular)
                } else {
                    popular + self.dice.below(self.keyspace.saturating_sub(popular).max(1))
                }
            }
        };
        self.nth += self.step;
        let mut key = [b'0'; 16];
        for (place, digit) in key.iter_mut().rev().zip(digits(number)) {
            *place = digit;
        }
        key
    }
}

fn digits(mut number: u64) -> impl Iterator<Item = u8> {
    (0..16).map(move |_| {
        let digit = (number % 10) as u8;
        number /= 10;
        b'0' + digit
    })
}

/// Runs it.
///
/// # Errors
/// What the store says.
pub fn run(arguments: &Arguments) -> anyhow::Result<Outcome> {
    std::fs::create_dir_all(&arguments.dir)?;
    let store = open(&arguments.store, &arguments.dir, arguments.sync)?;
    let writers = arguments.writers.max(1);
    let keys = |nth: u64| Keys {
        pattern: arguments.pattern,
        keyspace: arguments.keyspace,
        nth,
        step: writers,
        dice: Random::new(arguments.seed ^ (nth << 40)),
    };
    let started = Instant::now();
    let puts = std::thread::scope(|scope| -> anyhow::Result<u64> {
        let store = &*store;
        let one = |nth: u64| {
            let mut keys = keys(nth);
            let mut dice = Random::new(arguments.seed.wrapping_add(nth));
            let share = arguments.count / writers + u64::from(nth < arguments.count % writers);
            scope.spawn(move || -> anyhow::Result<u64> {
                let mut value = vec![0; arguments.value];
                for done in 0..share {
                    // Half of a value can be guessed, as in real ones.
                    let half = arguments.value / 2;
                    value[..half].iter_mut().for_each(|byte| *byte = dice.next() as u8);
                    store.put(&keys.next(), &value)?;
                    let late = done % 64 == 0
                        && started.elapsed().as_millis() > u128::from(arguments.most_ms);
                    if late {
                        return Ok(done + 1);
                    }
                }
                Ok(share)
            })
        };
        let all: Vec<_> = (0..writers).map(one).collect();
        let joined = all
            .into_iter()
            .map(|one| one.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a writer panicked"))));
        joined.sum()
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let statistics = store.statistics()?;
    let looked_for = (puts / writers).min(100);
    let mut again = keys(0);
    let mut found = 0;
    for _ in 0..looked_for {
        found += u64::from(store.get(&again.next())?.is_some());
    }
    // What was measured is a store: it forgets what it is told to.
    store.put(b"a key of ours", b"")?;
    store.delete(b"a key of ours")?;
    if store.get(b"a key of ours")?.is_some() {
        bail!("{} keeps what was removed", arguments.store);
    }
    store.sync()?;
    Ok(Outcome { puts, seconds, found, looked_for, statistics })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_as_their_numbers() {
        let keys =
            |pattern| Keys { pattern, keyspace: 1000, nth: 0, step: 1, dice: Random::new(1) };
        let mut sequential = keys(Pattern::Sequential);
        let all: Vec<_> = (0..200).map(|_| sequential.next()).collect();
        assert!(all.is_sorted());
        assert_eq!(&all[12], b"0000000000000012");
        let mut skewed = keys(Pattern::Skewed);
        let popular = (0..10_000).filter(|_| skewed.next() < *b"0000000000000100").count();
        assert!((8800..9200).contains(&popular), "{popular}");
    }

    #[test]
    fn every_store_finds_what_was_put() {
        for store in STORES {
            for sync in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                let outcome = run(&Arguments {
                    store: (*store).into(),
                    dir: dir.path().join("db"),
                    count: 300,
                    keyspace: 200,
                    value: 100,
                    pattern: Pattern::Skewed,
                    sync,
                    writers: 2,
                    seed: 3,
                    most_ms: u64::MAX,
                })
                .unwrap();
                assert_eq!((outcome.puts, outcome.found), (300, outcome.looked_for), "{store}");
                let store = open(store, &dir.path().join("db"), sync).unwrap();
                store.put(b"a key", b"a value").unwrap();
                assert_eq!(store.get(b"a key").unwrap().as_deref(), Some(&b"a value"[..]));
                store.delete(b"a key").unwrap();
                assert_eq!(store.get(b"a key").unwrap(), None);
            }
        }
    }
}
