//! Memory for reads, used again: fresh pages cost as much as a fast device's reads.
//!
//! Only two sizes come back, those of whole pieces and whole chunks, and only a few of
//! each are kept. Used memory holds old bytes: it is for reads that fill all of it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use draconis_exchange::heap::{Block, Private};

use crate::units::index;

/// Bytes of each size that are kept at most.
const KEPT_BYTES: u64 = 4 << 20;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Pool {
    shelves: [Shelf; 2],
}

#[derive(Debug)]
struct Shelf {
    len: usize,
    most: usize,
    free: Mutex<Vec<Private>>,
}

impl Pool {
    /// A pool for memory of these lengths.
    pub(crate) fn new(lens: [u64; 2]) -> Arc<Self> {
        let shelf = |bytes: u64| Shelf {
            len: index(bytes),
            most: index(KEPT_BYTES.checked_div(bytes).unwrap_or(0)),
            free: Mutex::default(),
        };
        Arc::new(Self { shelves: lens.map(shelf) })
    }

    fn shelf(&self, len: usize) -> Option<&Shelf> {
        self.shelves.iter().find(|shelf| shelf.len == len)
    }

    /// A block of `len` bytes, whatever they are.
    pub(crate) fn take(&self, len: usize) -> Block {
        let used = self
            .shelf(len)
            .and_then(|shelf| shelf.free.lock().unwrap_or_else(PoisonError::into_inner).pop());
        used.map_or_else(|| Block::private(len), Block::from)
    }

    fn give(&self, memory: Private) {
        let Some(shelf) = self.shelf(memory.len()) else { return };
        let mut free = shelf.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < shelf.most {
            free.push(memory);
        }
    }
}

/// Memory that goes back to its pool.
#[derive(Debug)]
pub(crate) struct Pooled {
    memory: Private,
    home: Weak<Pool>,
}

impl Pooled {
    pub(crate) fn new(memory: Private, home: &Arc<Pool>) -> Self {
        Self { memory, home: Arc::downgrade(home) }
    }

    /// Memory that goes back to the system.
    pub(crate) fn homeless(memory: Private) -> Self {
        Self { memory, home: Weak::new() }
    }
}

impl std::ops::Deref for Pooled {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            home.give(std::mem::replace(&mut self.memory, Private::new(0)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_chunks_come_back_and_are_bounded() {
        let len = 128 << 10;
        let pool = Pool::new([4096, len as u64]);
        let held: Vec<_> = (0..100)
            .map(|_| Pooled::new(pool.take(len).into_private(), &pool))
            .chain([Pooled::new(pool.take(7).into_private(), &pool)])
            .collect();
        drop(held);
        let kept = pool.shelves[1].free.lock().unwrap().len();
        assert_eq!(kept, 32);
        assert_eq!(pool.take(len).len(), len);
        assert_eq!(pool.shelves[1].free.lock().unwrap().len(), 31);
    }
}
