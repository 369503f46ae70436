//! Committed pages of a database, in memory.
//!
//! A store reads by its index, checks checksums, and reads what was just written from the disk.
//! SQLite reads the first page at the start of every transaction.
//!
//! Law: a page is in the cache only as it was committed. Commits happen while nobody reads: they
//! replace the pages that they change, or clear the cache.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use quick_cache::Weighter;
use quick_cache::sync::Cache;

/// Bytes of the cache of one database.
const CAPACITY_BYTES: u64 = 32 << 20;
/// Bytes that are read at once for a reader that goes on from page to page.
const READ_AHEAD_BYTES: usize = 128 << 10;
const MIN_PAGE_BYTES: usize = 512;
const MAX_PAGE_BYTES: usize = 64 << 10;

#[derive(Clone)]
struct ByLength;

impl Weighter<u64, Arc<[u8]>> for ByLength {
    fn weight(&self, _: &u64, page: &Arc<[u8]>) -> u64 {
        page.len() as u64
    }
}

/// Pages by their offset.
pub(crate) struct PageCache {
    pages: Cache<u64, Arc<[u8]>, ByLength>,
    /// Length of all pages in the cache.
    page_bytes: AtomicUsize,
    /// Where the last missing page ended.
    sequential_at: AtomicU64,
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageCache").finish_non_exhaustive()
    }
}

impl Default for PageCache {
    fn default() -> Self {
        let items = usize::try_from(CAPACITY_BYTES / 4096).unwrap_or(usize::MAX);
        Self {
            pages: Cache::with_weighter(items, CAPACITY_BYTES, ByLength),
            page_bytes: AtomicUsize::new(4096),
            sequential_at: AtomicU64::new(u64::MAX),
        }
    }
}

impl PageCache {
    pub fn clear(&self) {
        self.pages.clear();
    }

    /// Copies bytes of one page, if it is in the cache.
    pub fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let page_bytes = self.page_bytes.load(Ordering::Relaxed) as u64;
        let from = at.checked_rem(page_bytes).unwrap_or(0);
        let Some(page) = self.pages.get(&at.saturating_sub(from)) else { return false };
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        match page.get(from..).and_then(|rest| rest.get(..into.len())) {
            Some(bytes) => {
                into.copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }

    /// Returns how many bytes to read for a missing page, so that following pages are there, too:
    /// `None` if these bytes are no page.
    pub fn plan_read(&self, at: u64, len: usize) -> Option<usize> {
        let is_page = len.is_power_of_two()
            && (MIN_PAGE_BYTES..=MAX_PAGE_BYTES).contains(&len)
            && at.is_multiple_of(len as u64);
        if !is_page {
            return None;
        }
        if self.page_bytes.swap(len, Ordering::Relaxed) != len {
            self.clear();
        }
        let is_sequential = self.sequential_at.load(Ordering::Relaxed) == at;
        let planned = if is_sequential { READ_AHEAD_BYTES.max(len) } else { len };
        self.sequential_at.store(at.saturating_add(planned as u64), Ordering::Relaxed);
        Some(planned)
    }

    /// Inserts pages from byte `at` on; a rest that is no page is left out.
    pub fn insert(&self, at: u64, pages: &[u8]) {
        let page_bytes = self.page_bytes.load(Ordering::Relaxed).max(MIN_PAGE_BYTES);
        for (nth, page) in pages.chunks_exact(page_bytes).enumerate() {
            self.pages.insert(
                at.saturating_add((nth as u64).saturating_mul(page_bytes as u64)),
                page.into(),
            );
        }
    }

    /// Replaces a part that was committed.
    pub fn replace(&self, at: u64, bytes: &[u8]) {
        self.remove(at, bytes.len());
        if self.is_page(at, bytes.len()) {
            self.insert(at, bytes);
        }
    }

    /// Removes a part that was committed.
    pub fn remove(&self, at: u64, len: usize) {
        match self.is_page(at, len) {
            true => {
                self.pages.remove(&at);
            }
            false => self.clear(),
        }
    }

    fn is_page(&self, at: u64, len: usize) -> bool {
        len == self.page_bytes.load(Ordering::Relaxed) && at.is_multiple_of(len as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_by_their_parts_and_replaced() {
        let cache = PageCache::default();
        let mut four = [0; 4];
        assert!(!cache.read(24, &mut four) && cache.plan_read(0, 100).is_none());
        assert_eq!(cache.plan_read(8192, 4096), Some(4096));
        assert_eq!(cache.plan_read(12288, 4096), Some(READ_AHEAD_BYTES));
        cache.insert(0, &[vec![1; 4096], vec![2; 4096], vec![3; 100]].concat());
        assert!(cache.read(4096 + 24, &mut four) && four == [2; 4]);
        assert!(!cache.read(8192, &mut four) && !cache.read(4094, &mut four));
        cache.replace(4096, &[4; 4096]);
        assert!(cache.read(8188, &mut four) && four == [4; 4]);
        cache.remove(4096, 4096);
        assert!(!cache.read(4096, &mut four) && cache.read(0, &mut four));
        // Pages of another length.
        cache.replace(0, &[5; 512]);
        assert!(!cache.read(0, &mut four));
        cache.insert(0, &[1; 4096]);
        assert_eq!(cache.plan_read(512, 512), Some(512));
        assert!(!cache.read(0, &mut four));
    }
}
