//! Contents that outlive the process that took them in.
//!
//! ```text
//!   part of a shared memory: │▓▓▓▓│░░│▓▓│▓▓▓│░░░░░░░│   in pages; a room is some of them in a row
//!                              │          └ its holder's alone: filled where it lies
//!                              └ shared by those who keep it: read where it lies
//! ```
//! Another process that maps the memory copies from there what it is told of ([`Lent`]), so that
//! contents that are handed over need not be copied first.
//!
//! Law 1: of all processes that map these pages one writes to them, through rooms alone.
//! Law 2: a room is given out again once the last who held it has let it go.
//! Law 3: pages are there when a room is given out. A process that is killed while the kernel has to
//! find a page for what it copies there leaves the client of a FUSE request with EIO.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{ALIGN_BYTES, Block, BlockStorage};
use crate::shm::SharedMemory;

/// See the head of the file.
#[derive(Debug)]
pub struct PagePool {
    memory: Arc<SharedMemory>,
    /// Where the first page lies, in bytes.
    start: usize,
    pages: usize,
    /// Runs of free pages: first page, and count. No two of them touch.
    free: Mutex<BTreeMap<usize, usize>>,
    used: AtomicUsize,
    /// Of each page, whether this process has touched it.
    faulted: Box<[AtomicBool]>,
}

impl PagePool {
    /// The pages of `memory` in `part`, none of which is taken.
    ///
    /// # Panics
    /// When `part` is not in the memory, or not in whole pages: our own layout is wrong.
    ///
    /// # Safety
    /// As long as this or a room of it lives, nothing is written to `part` but through rooms of
    /// it: by this process, nor by one that maps the same memory.
    pub unsafe fn new(memory: Arc<SharedMemory>, part: Range<usize>) -> Arc<Self> {
        assert!(part.start <= part.end && part.end <= memory.len());
        assert!(part.start.is_multiple_of(ALIGN_BYTES) && part.len().is_multiple_of(ALIGN_BYTES));
        let (start, pages) = (part.start, part.len() / ALIGN_BYTES);
        let free = Mutex::new(BTreeMap::from([(0, pages)]));
        let touched = (0..pages).map(|_| AtomicBool::new(false)).collect();
        Arc::new(Self { memory, start, pages, free, used: AtomicUsize::new(0), faulted: touched })
    }

    /// A room of `len` bytes, with what was in it before or zeroes, while there is one. The first that
    /// is free: memory that was never used costs nothing.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Option<PoolBuffer> {
        let pages = len.div_ceil(ALIGN_BYTES);
        let mut free = self.free();
        let (first, count) = free.iter().find(|(_, count)| **count >= pages)?;
        let (first, count) = (*first, *count);
        self.mark_used(&mut free, (first, count), first, pages);
        drop(free);
        let mut room = PoolBuffer { rooms: self.clone(), first, len };
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

    /// The room of `len` bytes at `place`, as [`PoolBuffer::offset`] said of it before, in this process
    /// or another; `None` if that cannot be, or some of it is taken.
    pub fn allocate_at(self: &Arc<Self>, place: usize, len: usize) -> Option<PoolBuffer> {
        let (first, pages) = (place / ALIGN_BYTES, len.div_ceil(ALIGN_BYTES));
        if !place.is_multiple_of(ALIGN_BYTES) || first.checked_add(pages)? > self.pages {
            return None;
        }
        let mut free = self.free();
        let (at, count) = free.range(..=first).next_back().map(|(at, count)| (*at, *count))?;
        if at + count < first + pages {
            return None;
        }
        self.mark_used(&mut free, (at, count), first, pages);
        Some(PoolBuffer { rooms: self.clone(), first, len })
    }

    /// Bytes that are taken, in whole pages.
    pub fn used_bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed) * ALIGN_BYTES
    }

    /// Where in the memory `bytes` are, if they are in a room.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<usize> {
        let from = self.memory.address().wrapping_add(self.start);
        let at = (bytes.as_ptr() as usize).checked_sub(from)?;
        let end = at.checked_add(bytes.len())?;
        (end <= self.pages * ALIGN_BYTES).then_some(self.start + at)
    }

    /// `len` bytes of rooms, from where [`PagePool::offset_of`] says, as a block that another process
    /// finds where they are, if it knows of this memory; `None` if that is in no room. Who has
    /// them keeps them until the other has answered.
    pub fn block_at(&self, at: usize, len: usize) -> Option<Block> {
        let end = self.start + self.pages * ALIGN_BYTES;
        let is_here = at >= self.start && at.checked_add(len)? <= end;
        is_here.then(|| {
            Block(BlockStorage::Beside(PoolSlice { memory: self.memory.clone(), at, len }))
        })
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
        let mut free = self.free();
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

    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Some pages in a row.
#[derive(Debug)]
pub struct PoolBuffer {
    rooms: Arc<PagePool>,
    /// The first of its pages.
    first: usize,
    /// In bytes.
    len: usize,
}

impl PoolBuffer {
    /// Where it is among all rooms, in bytes: a multiple of a page.
    pub fn offset(&self) -> usize {
        self.first * ALIGN_BYTES
    }

    /// Gives back what lies behind `len` bytes.
    pub fn shorten(&mut self, len: usize) {
        let had = self.len.div_ceil(ALIGN_BYTES);
        self.len = self.len.min(len);
        let keeps = self.len.div_ceil(ALIGN_BYTES);
        self.rooms.free_pages(self.first + keeps, had - keeps);
    }

    fn at(&self) -> usize {
        self.rooms.start + self.offset()
    }
}

impl std::ops::Deref for PoolBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are this room's alone, so none but `self` writes to them, which is
        // borrowed; other processes do not, as `PagePool::new` was promised.
        unsafe { self.rooms.memory.slice(self.at(), self.len) }
    }
}

impl std::ops::DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; what other processes copy out meanwhile is nothing to this one.
        unsafe { self.rooms.memory.slice_mut(self.at(), self.len) }
    }
}

impl AsRef<[u8]> for PoolBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        self.rooms.free_pages(self.first, self.len.div_ceil(ALIGN_BYTES));
    }
}

/// Bytes in a memory that both processes know of, which another writes. They may change under
/// their reader, as a slot's may.
#[derive(Debug)]
pub(crate) struct PoolSlice {
    memory: Arc<SharedMemory>,
    at: usize,
    len: usize,
}

impl PoolSlice {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn copy_out(&self, at: usize, into: &mut [u8]) {
        self.memory.copy_out(self.at + at, into);
    }

    /// Where it is in `memory`, if it is there.
    pub(super) fn place_in(&self, memory: &Arc<SharedMemory>) -> Option<u32> {
        Arc::ptr_eq(&self.memory, memory).then(|| u32::try_from(self.at).ok()).flatten()
    }

    /// What a peer says lies there: something, and all of it.
    pub(super) fn from_peer(memory: &Arc<SharedMemory>, at: u32, len: u32) -> Option<Self> {
        let (at, len) = (at as usize, len as usize);
        let is_there = len > 0 && at.checked_add(len).is_some_and(|end| end <= memory.len());
        is_there.then(|| Self { memory: memory.clone(), at, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms(pages: usize) -> Arc<PagePool> {
        let memory = Arc::new(SharedMemory::new((pages + 1) * ALIGN_BYTES).unwrap());
        // SAFETY: nothing else in this test knows the memory.
        unsafe { PagePool::new(memory, ALIGN_BYTES..(pages + 1) * ALIGN_BYTES) }
    }

    #[test]
    fn rooms_are_filled_and_read_where_they_lie() {
        let rooms = rooms(4);
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
    fn what_is_given_back_is_one_again() {
        let rooms = rooms(6);
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
    fn a_room_is_claimed_if_it_is_free_and_there() {
        let rooms = rooms(4);
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
