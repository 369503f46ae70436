//! Cache for inodes, block maps and data.
//!
//! A sharded hash table with weighted values and scan-resistant replacement; all operations take
//! constant time. Concurrent misses of one key load it once.

use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use quick_cache::sync::{Cache as Table, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};

use crate::Result;

/// Statistics of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CacheStatistics {
    /// Lookups that found the key.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
    /// Number of values.
    pub entries: u64,
    /// Weight of all values.
    pub used: u64,
    /// Limit of the weight, in the unit that the cache is configured in.
    pub capacity: u64,
}

/// Weight of a value in a cache.
pub(crate) trait CacheWeight {
    fn weight(&self) -> u64;
}

/// Cache with weighted values.
#[derive(Debug)]
pub(crate) struct Cache<K, V: CacheWeight> {
    table: Table<K, V, ValueWeighter, BuildHasherDefault<IntegerHasher>, DefaultLifecycle<K, V>>,
    hits: AtomicU64,
    misses: AtomicU64,
    capacity: u64,
}

#[derive(Clone, Debug)]
struct ValueWeighter;

impl<K, V: CacheWeight> Weighter<K, V> for ValueWeighter {
    fn weight(&self, _: &K, value: &V) -> u64 {
        value.weight()
    }
}

impl<K: Hash + Eq + Copy, V: CacheWeight + Clone> Cache<K, V> {
    /// Creates a cache for values of total weight `capacity`, `typical` each. Shards reduce lock
    /// contention; each shard holds at least 32 `largest` values.
    pub(crate) fn new(capacity: u64, typical: u64, largest: u64) -> Self {
        let items = capacity.checked_div(typical).unwrap_or(0).clamp(1, 1 << 20);
        let shards = capacity.checked_div(largest.saturating_mul(32)).unwrap_or(0).clamp(1, 8);
        let shards = 1usize << shards.ilog2();
        let options = OptionsBuilder::new()
            .weight_capacity(capacity)
            .estimated_items_capacity(crate::units::saturating_usize(items))
            .shards(shards)
            .hot_allocation(HOT_FRACTION)
            .build();
        let table = match options {
            Ok(options) => Table::with_options(
                options,
                ValueWeighter,
                BuildHasherDefault::default(),
                DefaultLifecycle::default(),
            ),
            // Both required numbers are given above.
            Err(_) => Table::with(
                crate::units::saturating_usize(items),
                capacity,
                ValueWeighter,
                BuildHasherDefault::default(),
                DefaultLifecycle::default(),
            ),
        };
        Self { table, hits: AtomicU64::new(0), misses: AtomicU64::new(0), capacity }
    }

    /// Returns the value of `key`, loading it if necessary. Concurrent callers wait for this load;
    /// if it fails, each of them loads for itself.
    pub(crate) fn get_or_load(&self, key: K, load: impl FnOnce() -> Result<V>) -> Result<V> {
        if let Some(value) = self.table.get(&key) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(value);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        self.table.get_or_insert_with(&key, load)
    }

    /// Returns the cached value of `key`; does not count in the statistics.
    pub(crate) fn peek(&self, key: K) -> Option<V> {
        self.table.get(&key)
    }

    /// Returns true if `key` is cached; does not count in the statistics.
    pub(crate) fn contains(&self, key: K) -> bool {
        self.table.contains_key(&key)
    }

    /// Inserts a value.
    pub(crate) fn insert(&self, key: K, value: V) {
        self.table.insert(key, value);
    }

    /// Removes a value.
    pub(crate) fn remove(&self, key: K) {
        self.table.remove(&key);
    }

    /// Removes and returns a value.
    pub(crate) fn take(&self, key: K) -> Option<V> {
        self.table.remove(&key).map(|(_, value)| value)
    }

    /// Removes all values whose keys are `among` the given; visits every value.
    pub(crate) fn remove_where(&self, among: impl Fn(&K) -> bool) {
        self.table.retain(|key, _| !among(key));
    }

    /// Removes a range of keys: one by one, or, for a range larger than a cache is likely to hold,
    /// all keys that are `among` it in one pass.
    pub(crate) fn remove_range(
        &self,
        row: std::ops::Range<u64>,
        key: impl Fn(u64) -> K,
        among: impl Fn(&K) -> bool,
    ) {
        match row.end.saturating_sub(row.start) {
            0..MAX_SINGLE_REMOVALS => row.for_each(|nth| self.remove(key(nth))),
            _ => self.remove_where(among),
        }
    }

    pub(crate) fn statistics(&self) -> CacheStatistics {
        CacheStatistics {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            entries: self.table.len() as u64,
            used: self.table.weight(),
            capacity: self.capacity,
        }
    }
}

/// Longest key range that is removed one by one: a file may be one large hole.
const MAX_SINGLE_REMOVALS: u64 = 2048;

/// Fraction of a cache for values that were used again. The rest keeps new values, such as
/// read-ahead data, until their first use.
const HOT_FRACTION: f64 = 0.3;

/// Hasher of integer keys. It mixes them deterministically: the same lookups evict the same values.
#[derive(Default)]
pub(crate) struct IntegerHasher(u64);

impl IntegerHasher {
    fn mix(&mut self, word: u64) {
        let mut x = self.0.rotate_left(5) ^ word;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        self.0 = x ^ (x >> 31);
    }
}

impl Hasher for IntegerHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.mix(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.mix(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.mix(word);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    impl CacheWeight for u64 {
        fn weight(&self) -> u64 {
            *self
        }
    }

    #[test]
    fn cache_stays_within_capacity() {
        let cache = Cache::<u32, u64>::new(1000, 10, 100);
        for key in 0..10_000 {
            cache.get_or_load(key, || Ok(u64::from(key % 50))).unwrap();
            assert!(cache.statistics().used <= 1000);
        }
        let statistics = cache.statistics();
        assert_eq!((statistics.hits, statistics.misses), (0, 10_000));
        assert!(statistics.used > 800, "{statistics:?}");
    }

    #[test]
    fn remove_range_removes_exactly_the_range() {
        for len in [1, 20, 1 << 60] {
            let cache = Cache::<u64, u64>::new(1000, 10, 10);
            (0..30).for_each(|key| cache.insert(key, 1));
            let row = 5..5 + len;
            cache.remove_range(row.clone(), |nth| nth, |key| row.contains(key));
            assert!((0..30).all(|key| cache.contains(key) != row.contains(&key)), "{len}");
        }
    }

    #[test]
    fn failed_load_is_not_cached() {
        let cache = Cache::<u32, u64>::new(1000, 10, 100);
        assert_eq!(cache.get_or_load(1, || Err(Error::NotFound)), Err(Error::NotFound));
        assert_eq!(cache.get_or_load(1, || Ok(5)), Ok(5));
        assert_eq!(cache.get_or_load(1, || Err(Error::NotFound)), Ok(5));
    }

    #[test]
    fn concurrent_misses_load_once() {
        let cache = Cache::<u32, u64>::new(1000, 10, 100);
        let loads = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    cache.get_or_load(1, || {
                        std::thread::sleep(std::time::Duration::from_millis(20));
                        Ok(loads.fetch_add(1, Ordering::Relaxed))
                    })
                });
            }
        });
        assert_eq!(loads.into_inner(), 1);
    }
}
