//! Cache of the disk: pages of payloads, and index nodes.
//!
//! Law: both share one limit, so that either may use all of it.

mod page_index;

use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use quick_cache::sync::Cache;
use quick_cache::{Lifecycle, OptionsBuilder, Weighter};

use self::page_index::PageIndex;
pub(crate) use self::page_index::PageIndexGuard;
use crate::index::tree::{BlockPtr, Node};

/// A page by its number, or a node by its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CacheKey {
    Page(u64),
    Node(u64),
}

impl Hash for CacheKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Checksums are spread already; page numbers are small beside them.
        match self {
            Self::Page(name) | Self::Node(name) => state.write_u64(*name),
        }
    }
}

#[derive(Clone, Debug)]
enum CacheEntry {
    Page(Arc<[u8]>),
    Node(Arc<Node>),
}

#[derive(Clone, Debug)]
struct EntryWeigher;

impl Weighter<CacheKey, CacheEntry> for EntryWeigher {
    fn weight(&self, _: &CacheKey, kept: &CacheEntry) -> u64 {
        match kept {
            CacheEntry::Page(page) => (page.len() as u64).saturating_add(64),
            CacheEntry::Node(node) => node.weight(),
        }
    }
}

/// Spreads addresses by one multiplication and a shift.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = crate::codec::mix_bits(self.0 ^ value);
    }
}

/// Removes pages that the table evicts from the page index.
#[derive(Clone, Debug)]
struct EvictionHook(Arc<PageIndex>);

impl Lifecycle<CacheKey, CacheEntry> for EvictionHook {
    type RequestState = ();

    fn on_evict(&self, (): &mut (), name: CacheKey, _: CacheEntry) {
        if let CacheKey::Page(number) = name {
            self.0.remove_page(number);
        }
    }
}

type EntryCache =
    Cache<CacheKey, CacheEntry, EntryWeigher, BuildHasherDefault<AddressHasher>, EvictionHook>;

/// Lookup of cached pages.
pub(crate) trait PageLookup {
    /// Returns the result of `take` on a page, if the page is cached.
    fn with_page<T>(&self, number: u64, take: impl Fn(&[u8]) -> T) -> Option<T>;
}

impl PageLookup for PageIndexGuard<'_> {
    fn with_page<T>(&self, number: u64, take: impl Fn(&[u8]) -> T) -> Option<T> {
        self.page(number).map(take)
    }
}

impl PageLookup for BlockCache {
    fn with_page<T>(&self, number: u64, take: impl Fn(&[u8]) -> T) -> Option<T> {
        if self.is_below_eviction()
            && let Some(taken) = self.pages_by_number.with_page(number, &take)
        {
            return Some(taken);
        }
        self.page(number).map(|page| take(&page))
    }
}

/// Cache of pages and nodes.
pub(crate) struct BlockCache {
    table: EntryCache,
    pages_by_number: Arc<PageIndex>,
    /// Bytes inserted since the fill level was last checked.
    inserted_since_check: AtomicU64,
    is_below_limit: AtomicBool,
}

impl BlockCache {
    /// Creates a cache of at most `capacity` bytes; most entries have about `typical` bytes.
    pub fn new(capacity: u64, typical: u64) -> Self {
        let items = capacity.checked_div(typical).unwrap_or(0).clamp(16, 1 << 24);
        let near = Arc::new(PageIndex::new(items));
        let capacity = capacity.saturating_sub(near.max_index_bytes());
        let items = crate::codec::to_usize_saturating(items);
        let (hasher, lifecycle) = (BuildHasherDefault::default(), EvictionHook(near.clone()));
        let options = OptionsBuilder::new()
            .weight_capacity(capacity)
            .estimated_items_capacity(items)
            .shards(if capacity < 2 << 20 { 1 } else { 8 })
            .build();
        let table = match options {
            Ok(options) => Cache::with_options(options, EntryWeigher, hasher, lifecycle),
            // Both required numbers are given above.
            Err(_) => Cache::with(items, capacity, EntryWeigher, hasher, lifecycle),
        };
        Self {
            table,
            pages_by_number: near,
            inserted_since_check: AtomicU64::new(0),
            is_below_limit: AtomicBool::new(true),
        }
    }

    /// Returns true while the cache is too empty to evict, so that usage need not be tracked. It
    /// lags a bit.
    pub fn is_below_eviction(&self) -> bool {
        self.is_below_limit.load(Ordering::Relaxed)
    }

    fn insert_entry(&self, name: CacheKey, kept: CacheEntry) {
        let weight = EntryWeigher.weight(&name, &kept);
        self.table.insert(name, kept);
        let capacity = self.table.capacity();
        // The weight is a sum over all shards: not computed each time.
        if self.inserted_since_check.fetch_add(weight, Ordering::Relaxed) >= capacity / 32 {
            self.inserted_since_check.store(0, Ordering::Relaxed);
            self.is_below_limit
                .store(self.table.weight() < (capacity / 4).saturating_mul(3), Ordering::Relaxed);
        }
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.table.weight()
    }

    /// Returns true if more than half of the capacity is unused.
    pub fn is_half_empty(&self) -> bool {
        self.table.weight() < self.table.capacity() / 2
    }

    /// Locks the page index for reading; `None` once the cache may evict.
    pub fn lock_page_index(&self) -> Option<PageIndexGuard<'_>> {
        self.is_below_eviction().then(|| self.pages_by_number.lock_for_reading())
    }

    pub fn page(&self, number: u64) -> Option<Arc<[u8]>> {
        match self.table.get(&CacheKey::Page(number)) {
            Some(CacheEntry::Page(page)) => Some(page),
            _ => None,
        }
    }

    pub fn has_page(&self, number: u64) -> bool {
        self.table.contains_key(&CacheKey::Page(number))
    }

    pub fn insert_page(&self, number: u64, page: Arc<[u8]>) {
        if self.is_below_eviction() {
            self.pages_by_number.insert_page(number, page.clone());
        }
        self.insert_entry(CacheKey::Page(number), CacheEntry::Page(page));
    }

    pub fn remove_page(&self, number: u64) {
        self.pages_by_number.remove_page(number);
        self.table.remove(&CacheKey::Page(number));
    }

    pub fn node(&self, ptr: BlockPtr) -> Option<Arc<Node>> {
        match self.table.get(&CacheKey::Node(ptr.sum)) {
            Some(CacheEntry::Node(node)) => Some(node),
            _ => None,
        }
    }

    /// Nodes are known by their checksums, which include the address: a reused address cannot be
    /// mistaken.
    pub fn insert_node(&self, ptr: BlockPtr, node: Arc<Node>) {
        self.insert_entry(CacheKey::Node(ptr.sum), CacheEntry::Node(node));
    }

    pub fn remove_node(&self, ptr: BlockPtr) {
        self.table.remove(&CacheKey::Node(ptr.sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::tree::InnerNode;

    #[test]
    fn pages_and_nodes_share_capacity() {
        let memory = BlockCache::new(1 << 20, 4096);
        let node = Arc::new(Node::Inner(InnerNode::new(1, vec![])));
        let ptr = |sum| BlockPtr { at: 0, len: 7, sum };
        memory.insert_page(7, Arc::from(&[1; 4096][..]));
        assert!(memory.node(ptr(7)).is_none() && memory.page(7).is_some());
        memory.insert_node(ptr(7), node);
        assert!(memory.node(ptr(7)).is_some() && memory.page(7).is_some());
        memory.remove_node(ptr(7));
        assert!(memory.node(ptr(7)).is_none() && memory.has_page(7));
        memory.remove_page(7);
        assert!(memory.page(7).is_none());
        assert!(memory.is_below_eviction());
        (0..1000).for_each(|number| memory.insert_page(number, Arc::from(&[2; 4096][..])));
        assert!(!memory.is_below_eviction());
        // Pages alone may use all.
        assert!((900 << 10..=1 << 20).contains(&memory.used_bytes()), "{}", memory.used_bytes());
    }

    #[test]
    fn evicted_page_leaves_page_index() {
        let memory = BlockCache::new(1 << 20, 4096);
        let near = |number| memory.pages_by_number.with_page(number, |page| page[0]).is_some();
        (0..100).for_each(|number| memory.insert_page(number, Arc::from(&[1; 4096][..])));
        assert!((0..100).all(near) && memory.lock_page_index().is_some());
        assert_eq!(memory.with_page(7, |page| page.len()), Some(4096));
        memory.remove_page(7);
        assert!(!near(7) && memory.with_page(7, |page| page.len()).is_none());
        (100..10_000).for_each(|number| memory.insert_page(number, Arc::from(&[1; 4096][..])));
        assert!(memory.lock_page_index().is_none());
        assert!((0..10_000).any(|number| memory.has_page(number) && !near(number)));
        assert!((0..10_000).all(|number| memory.has_page(number) || !near(number)));
        let kept: Vec<u64> = (0..10_000).filter(|number| memory.has_page(*number)).collect();
        assert!(kept.iter().all(|number| memory.with_page(*number, |page| page.len()).is_some()));
    }
}
