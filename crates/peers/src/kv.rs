//! Stores to measure, by name.

use std::path::Path;

use anyhow::bail;
use serde::Serialize;

/// Statistics that a store reports.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Statistics {
    /// Tables written at level 0, if the store has levels.
    pub level0_tables: Option<u64>,
    /// Compactions, if the store has them.
    pub compactions: Option<u64>,
}

/// Options for opening a store.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "draconis-kv"), allow(dead_code))]
pub struct Opening {
    /// Makes each put durable before it returns.
    pub durable: bool,
    /// Memory of the store: three quarters for its read cache, and a quarter for unwritten
    /// data; `None` for the store's defaults.
    pub cache_bytes: Option<u64>,
    /// The data does not fit in memory: uses the store's options for that.
    pub scarce: bool,
    /// Uses system calls instead of io_uring, so that flushes can be traced.
    pub calls: bool,
}

/// Callback for a pair of a scan; the scan ends if it returns false.
pub type Visit<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> bool;

/// A store to measure. If opened durable, each put is durable before it returns; otherwise
/// only [`KvSubject::sync`] makes puts durable. To measure another store, implement this and
/// add it to [`STORES`] and [`open`].
pub trait KvSubject: Send + Sync {
    /// Sets the value of a key.
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()>;

    /// Sets many values, as fast as possible; durable with the next [`KvSubject::sync`].
    fn load(&self, pairs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.put(key, value))
    }

    /// Returns the value of a key.
    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>>;

    /// Visits all pairs in key order.
    fn scan(&self, visit: Visit<'_>) -> anyhow::Result<()>;

    /// Removes a key.
    fn delete(&self, key: &[u8]) -> anyhow::Result<()>;

    /// Makes everything durable.
    fn sync(&self) -> anyhow::Result<()>;

    /// Returns the statistics so far.
    fn statistics(&self) -> anyhow::Result<Statistics>;
}

/// Stores that this program was built with.
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
    #[cfg(feature = "slatedb")]
    "slatedb",
    #[cfg(feature = "draconis-kv")]
    "draconis-kv",
];

/// Opens a store by name, in a directory that is created if missing.
///
/// # Errors
/// The store fails, or this program was built without it.
#[allow(unused_variables)]
pub fn open(name: &str, dir: &Path, how: Opening) -> anyhow::Result<Box<dyn KvSubject>> {
    std::fs::create_dir_all(dir)?;
    match name {
        #[cfg(feature = "leveldb")]
        "leveldb" => Ok(Box::new(crate::cxx::leveldb::Store::open(dir, how)?)),
        #[cfg(feature = "rocksdb")]
        "rocksdb" => Ok(Box::new(crate::cxx::rocksdb::Store::open(dir, how)?)),
        #[cfg(feature = "lmdb")]
        "lmdb" => Ok(Box::new(crate::lmdb::Lmdb::open(dir, how)?)),
        #[cfg(feature = "redb")]
        "redb" => Ok(Box::new(crate::redb_store::Redb::open(dir, how)?)),
        #[cfg(feature = "fjall")]
        "fjall" => Ok(Box::new(crate::fjall_store::Fjall::open(dir, how)?)),
        #[cfg(feature = "draconis-kv")]
        "draconis-kv" => Ok(Box::new(crate::draconis_store::DraconisKv::open(dir, how)?)),
        #[cfg(feature = "slatedb")]
        "slatedb" => Ok(Box::new(crate::slate_store::Slate::open(dir, how)?)),
        other => bail!("this program was built without {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_store_keeps_what_it_is_told() {
        for store in STORES {
            for durable in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                let how = Opening {
                    durable,
                    cache_bytes: Some(8 << 20),
                    scarce: durable,
                    calls: durable,
                };
                let store = open(store, &dir.path().join("db"), how).unwrap();
                let pairs: Vec<_> = (0..100u8).rev().map(|n| (vec![n; 16], vec![n; 50])).collect();
                store.load(&pairs).unwrap();
                store.put(b"a key", b"a value").unwrap();
                assert_eq!(store.get(b"a key").unwrap().as_deref(), Some(&b"a value"[..]));
                store.delete(b"a key").unwrap();
                assert_eq!(store.get(b"a key").unwrap(), None);
                store.sync().unwrap();
                let mut seen = vec![];
                let mut look = |key: &[u8], value: &[u8]| {
                    seen.extend((key.len() == 16).then(|| (key.to_vec(), value.to_vec())));
                    true
                };
                store.scan(&mut look).unwrap();
                assert!(seen.iter().eq(pairs.iter().rev()));
            }
        }
    }
}
