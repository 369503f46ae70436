//! Page pool: buffers for write data that outlive the process that received it.
//!
//! ```text
//!   part of a shared memory: │▓▓▓▓│░░│▓▓│▓▓▓│░░░░░░░│   in pages; a buffer is a run of pages
//!                              │          └ exclusive: filled in place
//!                              └ shared by its holders: read in place
//! ```
//! Another process that maps the memory copies from it the ranges that it is given by offset
//! ([`PoolSlice`]). So data that is passed on need not be copied first.
//!
//! Law 1: one process writes these pages, and only through pool buffers.
//! Law 2: a buffer is reused once its last holder has released it.
//! Law 3: pages are faulted in before a buffer is allocated. A process killed while the kernel must
//! fault in a page for a copy leaves the client of a FUSE request with EIO.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use draconis_types::lock::{Mutex, MutexGuard};
use draconis_types::{ALIGN_BYTES, Block, BlockMemory};

use crate::shm::SharedMemory;

/// See the module documentation.
#[derive(Debug)]
pub struct PagePool {
    memory: Arc<SharedMemory>,
    /// Offset of the first page in bytes.
    start: usize,
    pages: usize,
    /// Runs of free pages: first page, and count. Runs are never adjacent.
    free: Mutex<BTreeMap<usize, usize>>,
    used: AtomicUsize,
    /// True for each page that this process has touched.
    faulted: Box<[AtomicBool]>,
}

impl PagePool {
    /// Creates a pool of the free pages of `memory` in `part`.
    ///
    /// # Panics
    /// If `part` is outside the memory or not whole pages: our own layout is wrong.
    ///
    /// # Safety
    /// While the pool or one of its buffers lives, `part` is written only through its buffers, by
    /// this process and by others that map the memory.
    pub unsafe fn new(memory: Arc<SharedMemory>, part: Range<usize>) -> Arc<Self> {
        assert!(part.start <= part.end && part.end <= memory.len());
        assert!(part.start.is_multiple_of(ALIGN_BYTES) && part.len().is_multiple_of(ALIGN_BYTES));
        let (start, pages) = (part.start, part.len() / ALIGN_BYTES);
        let free = Mutex::new(BTreeMap::from([(0, pages)]));
        let faulted = (0..pages).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self { memory, start, pages, free, used: AtomicUsize::new(0), faulted })
    }

    /// Allocates a buffer of `len` bytes, with old contents or zeroes. Takes the first free run,
    /// since unused memory costs nothing. `None` if the pool is full.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<PoolBuffer> {
        let pages = len.div_ceil(ALIGN_BYTES);
        let mut free = self.lock_free_runs();
        let (first, count) = free.iter().find(|(_, count)| **count >= pages)?;
        let (first, count) = (*first, *count);
        self.mark_used(&mut free, (first, count), first, pages);
        drop(free);
        let mut room = PoolBuffer { pool: self.clone(), first, len };
        let touched = &self.faulted[first..first + pages];
        if touched.iter().any(|touched| !touched.load(Ordering::Relaxed)) {
            let at = self.start + first * ALIGN_BYTES;
            if self.memory.populate(at..at + pages * ALIGN_BYTES).is_err() {
                (0..pages).for_each(|nth| room[nth * ALIGN_BYTES] = 0);
            }
            touched.iter().for_each(|touched| touched.store(true, Ordering::Relaxed));
        }
        Some(room)
    }

    /// Allocates the buffer of `len` bytes at `place`, an earlier [`PoolBuffer::offset`] of this
    /// process or another. `None` if the range is invalid or partly allocated.
    pub fn allocate_at(self: &Arc<Self>, place: usize, len: usize) -> Option<PoolBuffer> {
        let (first, pages) = (place / ALIGN_BYTES, len.div_ceil(ALIGN_BYTES));
        if !place.is_multiple_of(ALIGN_BYTES) || first.checked_add(pages)? > self.pages {
            return None;
        }
        let mut free = self.lock_free_runs();
        let (at, count) = free.range(..=first).next_back().map(|(at, count)| (*at, *count))?;
        if at + count < first + pages {
            return None;
        }
        self.mark_used(&mut free, (at, count), first, pages);
        Some(PoolBuffer { pool: self.clone(), first, len })
    }

    /// Returns the allocated bytes, in whole pages.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed) * ALIGN_BYTES
    }

    /// Returns the offset in the memory of `bytes`, if they are in a buffer.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        let from = self.memory.address().wrapping_add(self.start);
        let at = (bytes.as_ptr() as usize).checked_sub(from)?;
        let end = at.checked_add(bytes.len())?;
        (end <= self.pages * ALIGN_BYTES).then_some(self.start + at)
    }

    /// Returns `len` bytes from offset `at` (see [`PagePool::offset_of`]) as a block that passes by
    /// offset to a process with the same memory. `None` if they are not in the pool. The caller
    /// must keep the buffer until the other process has answered.
    pub fn block_at(&self, at: usize, len: usize) -> Option<Block> {
        let end = self.start + self.pages * ALIGN_BYTES;
        let is_here = at >= self.start && at.checked_add(len)? <= end;
        is_here.then(|| Block::from_memory(PoolSlice { memory: self.memory.clone(), at, len }))
    }

    fn mark_used(
        &self,
        free: &mut BTreeMap<usize, usize>,
        (at, count): (usize, usize),
        first: usize,
        pages: usize,
    ) {
        if pages == 0 {
            return;
        }
        free.remove(&at);
        let (before, behind) = (first - at, at + count - first - pages);
        if before > 0 {
            free.insert(at, before);
        }
        if behind > 0 {
            free.insert(first + pages, behind);
        }
        self.used.fetch_add(pages, Ordering::Relaxed);
    }

    fn free_pages(&self, mut first: usize, mut pages: usize) {
        if pages == 0 {
            return;
        }
        self.used.fetch_sub(pages, Ordering::Relaxed);
        let mut free = self.lock_free_runs();
        if let Some(behind) = free.remove(&(first + pages)) {
            pages += behind;
        }
        if let Some((&at, &count)) = free.range(..first).next_back()
            && at + count == first
        {
            (first, pages) = (at, pages + count);
        }
        free.insert(first, pages);
    }

    fn lock_free_runs(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock()
    }
}

/// A run of consecutive pages.
#[derive(Debug)]
pub struct PoolBuffer {
    pool: Arc<PagePool>,
    /// Index of the first page.
    first: usize,
    /// Length in bytes.
    len: usize,
}

impl PoolBuffer {
    /// Returns the offset in the pool in bytes: a multiple of a page.
    pub fn offset(&self) -> usize {
        self.first * ALIGN_BYTES
    }

    /// Frees the pages after the first `len` bytes.
    pub fn shorten(&mut self, len: usize) {
        let had = self.len.div_ceil(ALIGN_BYTES);
        self.len = self.len.min(len);
        let keeps = self.len.div_ceil(ALIGN_BYTES);
        self.pool.free_pages(self.first + keeps, had - keeps);
    }

    fn memory_offset(&self) -> usize {
        self.pool.start + self.offset()
    }
}

impl std::ops::Deref for PoolBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the buffer owns these bytes, so only `self`, which is borrowed, could write them;
        // other processes do not write, as the caller of `PagePool::new` promised.
        unsafe { self.pool.memory.slice(self.memory_offset(), self.len) }
    }
}

impl std::ops::DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; concurrent reads by other processes do not affect this one.
        unsafe { self.pool.memory.slice_mut(self.memory_offset(), self.len) }
    }
}

impl AsRef<[u8]> for PoolBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        self.pool.free_pages(self.first, self.len.div_ceil(ALIGN_BYTES));
    }
}

/// A range of pool memory that another process writes. Its bytes may change while they are read,
/// like a slot's.
#[derive(Debug)]
pub(crate) struct PoolSlice {
    memory: Arc<SharedMemory>,
    at: usize,
    len: usize,
}

impl BlockMemory for PoolSlice {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn copy_out(&self, at: usize, into: &mut [u8]) {
        self.memory.copy_out(self.at + at, into);
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn copy_in(&mut self, _: usize, _: &[u8]) {
        unreachable!("another process writes this memory");
    }
}

impl PoolSlice {
    /// Returns the offset in `memory`, if the range is in it.
    pub(super) fn offset_in(&self, memory: &Arc<SharedMemory>) -> Option<u32> {
        Arc::ptr_eq(&self.memory, memory).then(|| u32::try_from(self.at).ok()).flatten()
    }

    /// Validates a range that a peer names: not empty, and entirely inside the memory.
    pub(super) fn from_peer(memory: &Arc<SharedMemory>, at: u32, len: u32) -> Option<Self> {
        let (at, len) = (at as usize, len as usize);
        let is_there = len > 0 && at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_there.then(|| Self { memory: memory.clone(), at, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page_pool(pages: usize) -> Arc<PagePool> {
        let memory = Arc::new(SharedMemory::new((pages + 1) * ALIGN_BYTES).unwrap());
        // SAFETY: nothing else in this test uses the memory.
        unsafe { PagePool::new(memory, ALIGN_BYTES..(pages + 1) * ALIGN_BYTES) }
    }

    #[test]
    fn pool_buffers_are_read_in_place() {
        let rooms = page_pool(4);
        let mut room = rooms.allocate(5000).unwrap();
        room.fill(7);
        room[4999] = 8;
        assert_eq!((room.len(), room.offset(), rooms.used_bytes()), (5000, 0, 8192));
        let mut next = rooms.allocate(2 * ALIGN_BYTES).unwrap();
        next.shorten(1);
        assert_eq!((next.len(), rooms.used_bytes()), (1, 12288));
        drop(next);
        let at = rooms.offset_of(&room[4998..]).unwrap();
        let lent = rooms.block_at(at, 2).unwrap();
        let mut bytes = [0; 2];
        assert_eq!((lent.len(), lent.copy_out(0, &mut bytes)), (2, 2));
        assert_eq!(bytes, [7, 8]);
        assert!(rooms.offset_of(&[1, 2, 3]).is_none());
        assert!(
            rooms.block_at(at + 4 * ALIGN_BYTES, 1).is_none() && rooms.block_at(0, 1).is_none()
        );
        drop(room);
        assert_eq!(rooms.used_bytes(), 0);
    }

    #[test]
    fn freed_pages_are_merged() {
        let rooms = page_pool(6);
        let page = ALIGN_BYTES;
        let [a, b, c] = [2, 1, 3].map(|pages| rooms.allocate(pages * page).unwrap());
        assert!(rooms.allocate(1).is_none());
        drop(a);
        drop(c);
        assert!(rooms.allocate(4 * page).is_none(), "not in a row");
        let again = rooms.allocate(page).unwrap();
        assert_eq!(again.offset(), 0);
        drop(again);
        drop(b);
        assert_eq!(rooms.allocate(6 * page).unwrap().offset(), 0);
        assert!(rooms.allocate(6 * page + 1).is_none());
    }

    #[test]
    fn allocate_at_needs_free_pages_in_range() {
        let rooms = page_pool(4);
        let page = ALIGN_BYTES;
        let claimed = rooms.allocate_at(page, 2 * page).unwrap();
        for (place, len) in
            [(0, 2 * page), (page, 1), (3 * page, page + 1), (5, 5), (usize::MAX & !4095, page)]
        {
            assert!(rooms.allocate_at(place, len).is_none(), "{place} {len}");
        }
        assert_eq!(rooms.allocate(page).map(|room| room.offset()), Some(0));
        drop(claimed);
        assert!(rooms.allocate_at(0, 4 * page).is_some());
    }
}
