//! Direct-mapped index of cached pages by number, for readers while the cache does not evict.
//!
//! A lookup in the cache costs four dependent memory accesses and a reference count. This index
//! needs one access and no count. A reader that holds the whole index can touch many pages at once,
//! so that the processor overlaps their cache misses.
//!
//! Law: every page here is in the table, or about to be; a page that leaves the table leaves this
//! index.

use std::array::from_fn;
use std::sync::Arc;

use draconis_types::lock::{RwLock, RwLockReadGuard};

use crate::codec::to_usize_saturating;

/// Shards with a lock of their own. Page `n` is in shard `n % SHARDS`.
const SHARDS: usize = 8;
/// Slots that are allocated together, on first use.
const SLOTS_PER_CHUNK: usize = 512;

/// A slot for one of the pages whose numbers map to it.
#[derive(Debug, Default)]
struct PageSlot {
    number: u64,
    page: Option<Arc<[u8]>>,
}

/// Aligned to a cache line, so that readers of one shard do not disturb those of another.
#[derive(Debug)]
#[repr(align(64))]
struct Shard {
    shelves: RwLock<SlotChunks>,
}

type SlotChunks = Box<[Option<Box<[PageSlot]>>]>;

/// Direct-mapped index of cached pages.
#[derive(Debug)]
pub(super) struct PageIndex {
    parts: [Shard; SHARDS],
    /// Slots of a shard, less one: a power of two less one.
    mask: u64,
}

/// Read lock of the whole index. Insertions wait meanwhile.
pub(crate) struct PageIndexGuard<'a> {
    parts: [RwLockReadGuard<'a, SlotChunks>; SHARDS],
    mask: u64,
}

/// Returns the shard of a page, and its shelf and slot there.
fn slot_of(number: u64, mask: u64) -> (usize, usize, usize) {
    const SHARD_COUNT: u64 = SHARDS as u64;
    let place = to_usize_saturating((number / SHARD_COUNT) & mask);
    (to_usize_saturating(number % SHARD_COUNT), place / SLOTS_PER_CHUNK, place % SLOTS_PER_CHUNK)
}

fn find_page(shelves: &SlotChunks, number: u64, mask: u64) -> Option<&Arc<[u8]>> {
    let (_, shelf, place) = slot_of(number, mask);
    let place = shelves.get(shelf)?.as_ref()?.get(place)?;
    place.page.as_ref().filter(|_| place.number == number)
}

impl PageIndexGuard<'_> {
    /// Returns a page, if it is here.
    pub fn page(&self, number: u64) -> Option<&[u8]> {
        let (part, ..) = slot_of(number, self.mask);
        find_page(self.parts.get(part)?, number, self.mask).map(|page| &**page)
    }
}

impl PageIndex {
    /// Creates an index for about `pages` pages.
    pub fn new(pages: u64) -> Self {
        let places = pages.clamp(1, 1 << 24).div_ceil(SHARDS as u64).next_power_of_two();
        let shelves =
            || (0..to_usize_saturating(places).div_ceil(SLOTS_PER_CHUNK)).map(|_| None).collect();
        let parts = from_fn(|_| Shard { shelves: RwLock::new(shelves()) });
        Self { parts, mask: places.saturating_sub(1) }
    }

    /// Returns the most memory that it uses, without the pages.
    pub fn max_index_bytes(&self) -> u64 {
        let places = self.mask.saturating_add(1).saturating_mul(SHARDS as u64);
        places.saturating_mul(size_of::<PageSlot>() as u64)
    }

    fn shard_of(&self, number: u64) -> Option<&RwLock<SlotChunks>> {
        let (part, ..) = slot_of(number, self.mask);
        self.parts.get(part).map(|part| &part.shelves)
    }

    /// Locks the whole index for reading. Callers should drop it soon: insertions wait.
    pub fn lock_for_reading(&self) -> PageIndexGuard<'_> {
        PageIndexGuard {
            parts: self.parts.each_ref().map(|part| part.shelves.read()),
            mask: self.mask,
        }
    }

    /// Returns the result of `take` on the page, if it is here.
    pub fn with_page<T>(&self, number: u64, take: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let shelves = self.shard_of(number)?.read();
        find_page(&shelves, number, self.mask).map(|page| take(page))
    }

    /// Stores a page in its slot and replaces the page there.
    pub fn insert_page(&self, number: u64, page: Arc<[u8]>) {
        let (_, shelf, place) = slot_of(number, self.mask);
        let Some(part) = self.shard_of(number) else { return };
        let mut shelves = part.write();
        let Some(shelf) = shelves.get_mut(shelf) else { return };
        let make = || (0..SLOTS_PER_CHUNK).map(|_| PageSlot::default()).collect();
        if let Some(place) = shelf.get_or_insert_with(make).get_mut(place) {
            *place = PageSlot { number, page: Some(page) };
        }
    }

    pub fn remove_page(&self, number: u64) {
        let (_, shelf, place) = slot_of(number, self.mask);
        let Some(part) = self.shard_of(number) else { return };
        let mut shelves = part.write();
        let shelf = shelves.get_mut(shelf).and_then(Option::as_mut);
        if let Some(place) = shelf.and_then(|shelf| shelf.get_mut(place))
            && place.number == number
        {
            place.page = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_found_until_its_slot_is_reused() {
        let near = PageIndex::new(3000);
        let page = |byte: u8| Arc::from(&[byte; 8][..]);
        let first = |number| {
            let one = near.with_page(number, |page| page[0]);
            assert_eq!(near.lock_for_reading().page(number).map(|page| page[0]), one);
            one
        };
        assert_eq!((first(5), first(0)), (None, None));
        near.insert_page(5, page(1));
        near.insert_page(6, page(2));
        near.insert_page(5 + SHARDS as u64, page(5));
        assert_eq!((first(5), first(6), first(13), first(7)), (Some(1), Some(2), Some(5), None));
        // 4096 slots: this number maps to the same one.
        near.remove_page(5 + 4096);
        assert_eq!(first(5), Some(1));
        near.insert_page(5 + 4096, page(3));
        assert_eq!((first(5), first(5 + 4096)), (None, Some(3)));
        near.remove_page(5);
        assert_eq!(first(5 + 4096), Some(3));
        near.remove_page(5 + 4096);
        assert_eq!((first(5 + 4096), first(6)), (None, Some(2)));
        // The largest number.
        near.insert_page(u64::MAX, page(4));
        assert_eq!(first(u64::MAX), Some(4));
        assert_eq!(near.max_index_bytes(), 4096 * 24);
    }
}
