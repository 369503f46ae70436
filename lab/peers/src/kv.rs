//! Stores to measure, by name.

use serde::Serialize;

/// Statistics that a store reports.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct StoreStatistics {
    /// Tables written at level 0, if the store has levels.
    pub level0_tables: Option<u64>,
    /// Compactions, if the store has them.
    pub compactions: Option<u64>,
}

/// Options for opening a store.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "draconis-kv"), allow(dead_code))]
pub struct StoreOptions {
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
pub type ScanCallback<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> bool;

/// A store to measure. If opened durable, each put is durable before it returns; otherwise
/// only [`KvSubject::sync`] makes puts durable. To measure another store, implement this and
/// add it to [`STORE_NAMES`] and [`open`](crate::open::open).
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
    fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()>;

    /// Removes a key.
    fn delete(&self, key: &[u8]) -> anyhow::Result<()>;

    /// Makes everything durable.
    fn sync(&self) -> anyhow::Result<()>;

    /// Returns the statistics so far.
    fn statistics(&self) -> anyhow::Result<StoreStatistics>;
}

/// Stores that this program was built with.
pub const STORE_NAMES: &[&str] = &[
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
