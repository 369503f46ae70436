//! Where pages are, by their number alone: for readers, while memory has room for all of them.
//!
//! The table of what is remembered knows what is used. That costs a reader four places in memory,
//! each far from the one before, and the last of them counts who has the page. Here it is one,
//! and several can be asked for together: a processor that needs the answer to none of them before
//! it asks for the next waits once.
//!
//! Law: what is here is in the table, too, or about to be; what leaves that leaves this.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use crate::codec::index;

/// Places that are made together, once one of them is needed.
const SHELF: usize = 1024;

/// A place for one of the pages whose numbers lead here.
#[derive(Debug, Default)]
struct Place {
    /// Which page that is, for who only wants to know; changed while `page` is held.
    number: AtomicU64,
    page: RwLock<Option<Arc<[u8]>>>,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Near {
    shelves: Box<[OnceLock<Box<[Place]>>]>,
    mask: u64,
}

impl Near {
    /// For about so many pages.
    pub fn new(pages: u64) -> Self {
        let places = pages.clamp(1, 1 << 24).next_power_of_two();
        let shelves = index(places).div_ceil(SHELF);
        let shelves = (0..shelves).map(|_| OnceLock::new()).collect();
        Self { shelves, mask: places.saturating_sub(1) }
    }

    /// The most memory that it takes, beside the pages.
    pub fn bytes_max(&self) -> u64 {
        self.shelves.len().saturating_mul(SHELF).saturating_mul(size_of::<Place>()) as u64
    }

    fn shelf(&self, number: u64) -> Option<(&OnceLock<Box<[Place]>>, usize)> {
        let place = index(number & self.mask);
        Some((self.shelves.get(place / SHELF)?, place % SHELF))
    }

    fn place(&self, number: u64) -> Option<&Place> {
        let (shelf, place) = self.shelf(number)?;
        shelf.get()?.get(place)
    }

    /// Whether the page is here now.
    pub fn has(&self, number: u64) -> bool {
        self.place(number).is_some_and(|place| place.number.load(Ordering::Relaxed) == number)
    }

    /// What `take` makes of the page, if it is here.
    pub fn with<T>(&self, number: u64, take: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let place = self.place(number)?;
        let page = place.page.read();
        let page = page.as_deref().filter(|_| place.number.load(Ordering::Relaxed) == number)?;
        Some(take(page))
    }

    /// Keeps a page in its place, whatever was there.
    pub fn keep(&self, number: u64, page: Arc<[u8]>) {
        let Some((shelf, place)) = self.shelf(number) else { return };
        let shelf = shelf.get_or_init(|| (0..SHELF).map(|_| Place::default()).collect());
        let Some(place) = shelf.get(place) else { return };
        let mut kept = place.page.write();
        place.number.store(number, Ordering::Relaxed);
        *kept = Some(page);
    }

    pub fn forget(&self, number: u64) {
        if let Some(place) = self.place(number) {
            let mut kept = place.page.write();
            if place.number.load(Ordering::Relaxed) == number {
                *kept = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_found_by_its_number_until_another_takes_its_place() {
        let near = Near::new(3000);
        let page = |byte: u8| Arc::from(&[byte; 8][..]);
        let first = |number| near.with(number, |page| page[0]);
        assert_eq!((near.has(5), first(5), first(0)), (false, None, None));
        near.keep(5, page(1));
        near.keep(6, page(2));
        assert_eq!((near.has(5), first(5), first(6)), (true, Some(1), Some(2)));
        // 4096 places: this one leads to the same.
        near.forget(5 + 4096);
        assert_eq!(first(5), Some(1));
        near.keep(5 + 4096, page(3));
        assert_eq!((first(5), first(5 + 4096)), (None, Some(3)));
        near.forget(5);
        assert_eq!(first(5 + 4096), Some(3));
        near.forget(5 + 4096);
        assert_eq!((first(5 + 4096), first(6)), (None, Some(2)));
        // The largest number there is.
        near.keep(u64::MAX, page(4));
        assert_eq!(first(u64::MAX), Some(4));
    }
}
