//! Committed pages of a database, in memory.
//!
//! A store reads by its index, checks checksums, and reads what was just written from the disk.
//! SQLite reads the first page at the start of every transaction.
//!
//! Law 1: a page is in the cache only as it is in the object below it: the committed one, or the
//! staging object of a long transaction. Commits happen while nobody reads: they replace the pages
//! that they change, clear the cache, or take over that of the staging object.
//! Law 2: a cache holds at most [`capacity_bytes`]. Pages that are used once do not push out those
//! that are used again.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use quick_cache::Weighter;
use quick_cache::sync::Cache;

/// Bytes of a cache, at least and at most: a 64th of the memory of the machine in between.
const MIN_CAPACITY_BYTES: u64 = 32 << 20;
const MAX_CAPACITY_BYTES: u64 = 256 << 20;
/// Bytes that are read at once for a reader that goes on from page to page: first, and once it has
/// gone on for a while.
const MIN_READ_AHEAD_BYTES: usize = 128 << 10;
const MAX_READ_AHEAD_BYTES: usize = 1 << 20;
const MIN_PAGE_BYTES: usize = 512;
const MAX_PAGE_BYTES: usize = 64 << 10;

#[derive(Clone)]
struct ByLength;

impl Weighter<u64, Arc<[u8]>> for ByLength {
    fn weight(&self, _: &u64, page: &Arc<[u8]>) -> u64 {
        page.len() as u64
    }
}

/// Limit that tests set.
pub(crate) static CAPACITY_LIMIT_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);

/// Returns the limit of a cache on this machine.
fn capacity_bytes() -> u64 {
    let memory = rustix::system::sysinfo();
    let bytes = (memory.totalram as u64).saturating_mul(memory.mem_unit.into());
    let bytes = (bytes / 64).clamp(MIN_CAPACITY_BYTES, MAX_CAPACITY_BYTES);
    bytes.min(CAPACITY_LIMIT_BYTES.load(Ordering::Relaxed))
}

/// Pages by their offset.
pub(crate) struct PageCache {
    pages: Cache<u64, Arc<[u8]>, ByLength>,
    /// Length of all pages in the cache.
    page_bytes: AtomicUsize,
    /// Where the last missing page ended, with what was read ahead.
    sequential_at: AtomicU64,
    /// Bytes that the next sequential reader reads ahead.
    read_ahead_bytes: AtomicUsize,
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageCache").finish_non_exhaustive()
    }
}

impl Default for PageCache {
    fn default() -> Self {
        let items = usize::try_from(MIN_CAPACITY_BYTES / 4096).unwrap_or(usize::MAX);
        Self {
            pages: Cache::with_weighter(items, capacity_bytes(), ByLength),
            page_bytes: AtomicUsize::new(4096),
            sequential_at: AtomicU64::new(u64::MAX),
            read_ahead_bytes: AtomicUsize::new(MIN_READ_AHEAD_BYTES),
        }
    }
}

impl PageCache {
    pub fn clear(&self) {
        self.pages.clear();
    }

    /// Reads from byte `at` of an object that ends at `end`; returns the number of bytes before the
    /// end. `fetch` reads what is missing, with the following pages for a reader that goes on from
    /// page to page.
    pub fn read_through<E>(
        &self,
        (at, end): (u64, u64),
        into: &mut [u8],
        fetch: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        if self.read(at, into) {
            return Ok(into.len());
        }
        let visible = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
        let planned = self.plan_read(at, into.len()).filter(|_| visible >= into.len());
        let Some(planned) = planned else {
            fetch(into)?;
            return Ok(visible.min(into.len()));
        };
        let mut pages = vec![0; planned.min(visible)];
        fetch(&mut pages)?;
        self.insert(at, &pages);
        if let Some(page) = pages.get(..into.len()) {
            into.copy_from_slice(page);
        }
        Ok(into.len())
    }

    /// Copies bytes of one page, if it is in the cache.
    fn read(&self, at: u64, into: &mut [u8]) -> bool {
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
    fn plan_read(&self, at: u64, len: usize) -> Option<usize> {
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
        let planned = match is_sequential {
            true => self.read_ahead_bytes.load(Ordering::Relaxed).max(len),
            false => len,
        };
        let next = if is_sequential { planned.saturating_mul(2) } else { MIN_READ_AHEAD_BYTES };
        self.read_ahead_bytes.store(next.min(MAX_READ_AHEAD_BYTES), Ordering::Relaxed);
        self.sequential_at.store(at.saturating_add(planned as u64), Ordering::Relaxed);
        Some(planned)
    }

    /// Inserts pages from byte `at` on; a rest that is no page is left out.
    fn insert(&self, at: u64, pages: &[u8]) {
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
    fn remove(&self, at: u64, len: usize) {
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
        let mut at = 12288;
        for wanted in [128 << 10, 256 << 10, 512 << 10, 1 << 20, 1 << 20] {
            assert_eq!(cache.plan_read(at, 4096), Some(wanted));
            at += wanted as u64;
        }
        assert_eq!(cache.plan_read(0, 4096), Some(4096));
        assert_eq!(cache.plan_read(4096, 4096), Some(MIN_READ_AHEAD_BYTES));
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
