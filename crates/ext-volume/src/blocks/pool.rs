//! Reused buffers for reads: allocating fresh pages costs as much as a read of a fast device.
//!
//! The pool keeps a few buffers of two sizes only: whole pieces and whole chunks. Recycled buffers
//! hold old bytes; only reads that fill a buffer completely may use it. With `keeps_pages`, pieces
//! stay in the buffer they were read into, which saves a copy of data used once.

use std::ops::Range;
use std::sync::{Arc, Weak};

use draconis_types::lock::Mutex;
use draconis_types::{ALIGN_BYTES, Block, PrivateBuffer, SharedSlice};

use crate::units::saturating_usize;

/// Limit of free buffers of one size, in bytes.
const MAX_FREE_BYTES: u64 = 4 << 20;

/// Pool of buffers in two sizes.
#[derive(Debug)]
pub(crate) struct Pool {
    size_classes: [SizeClass; 2],
    keeps_pages: bool,
}

#[derive(Debug)]
struct SizeClass {
    len: usize,
    max_free: usize,
    free: Mutex<Vec<PrivateBuffer>>,
}

impl Pool {
    /// Creates a pool for buffers of these lengths.
    pub(crate) fn new(lens: [u64; 2], of_pages: bool) -> Arc<Self> {
        let shelf = |bytes: u64| SizeClass {
            len: saturating_usize(bytes),
            max_free: saturating_usize(MAX_FREE_BYTES.checked_div(bytes).unwrap_or(0)),
            free: Mutex::default(),
        };
        Arc::new(Self { size_classes: lens.map(shelf), keeps_pages: of_pages })
    }

    fn size_class(&self, len: usize) -> Option<&SizeClass> {
        self.size_classes.iter().find(|shelf| shelf.len == len)
    }

    /// Returns a block of `len` bytes with undefined content.
    pub(crate) fn acquire(&self, len: usize) -> Block {
        let used = self.size_class(len).and_then(|shelf| shelf.free.lock().pop());
        used.map_or_else(|| Block::private(len), Block::from)
    }

    fn recycle(&self, memory: PrivateBuffer) {
        let Some(shelf) = self.size_class(memory.len()) else { return };
        let mut free = shelf.free.lock();
        if free.len() < shelf.max_free {
            free.push(memory);
        }
    }
}

/// Memory of a chunk.
#[derive(Debug)]
pub(crate) enum ChunkMemory {
    /// Buffer filled by the device: whole pages that return to their pool.
    Pages(PrivateBuffer, Weak<Pool>),
    /// Allocation of the exact length.
    Exact(Box<[u8]>),
    /// Memory lent by another owner, read-only.
    Lent(SharedSlice),
}

/// Length from which a buffer is kept as the device filled it. Shorter data is copied to an exact
/// allocation: aligned buffers of many sizes left gaps of half their total size, as measured.
const MIN_UNCOPIED_BYTES: usize = 128 << 10;

impl ChunkMemory {
    /// Wraps a buffer filled by the device. Returns the memory and the place of `range` in it.
    pub(crate) fn from_filled_buffer(
        memory: PrivateBuffer,
        range: Range<usize>,
        pool: &Arc<Pool>,
    ) -> (Self, Range<usize>) {
        if range.len() >= MIN_UNCOPIED_BYTES || pool.keeps_pages && range.len() == memory.len() {
            return (Self::Pages(memory, Arc::downgrade(pool)), range);
        }
        let exact: Box<[u8]> = memory.get(range).unwrap_or_default().into();
        pool.recycle(memory);
        let whole = 0..exact.len();
        (Self::Exact(exact), whole)
    }

    /// Returns `len` zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        if len >= MIN_UNCOPIED_BYTES {
            return Self::Pages(PrivateBuffer::new(len), Weak::new());
        }
        Self::Exact(vec![0; len].into_boxed_slice())
    }

    /// Returns the bytes it occupies.
    pub(crate) fn footprint(&self) -> usize {
        match self {
            Self::Pages(memory, _) => memory.len().next_multiple_of(ALIGN_BYTES),
            Self::Exact(memory) => memory.len(),
            Self::Lent(memory) => memory.len(),
        }
    }
}

impl std::ops::Deref for ChunkMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Pages(memory, _) => memory,
            Self::Exact(memory) => memory,
            Self::Lent(memory) => memory,
        }
    }
}

impl std::ops::DerefMut for ChunkMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Pages(memory, _) => memory,
            Self::Exact(memory) => memory,
            Self::Lent(_) => &mut [],
        }
    }
}

impl Drop for ChunkMemory {
    fn drop(&mut self) {
        if let Self::Pages(memory, pool) = self
            && let Some(pool) = pool.upgrade()
        {
            pool.recycle(std::mem::replace(memory, PrivateBuffer::new(0)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_chunks_are_reused_and_bounded() {
        let len = 128 << 10;
        let pool = Pool::new([4096, len as u64], false);
        let held: Vec<_> = (0..100)
            .map(|_| {
                ChunkMemory::from_filled_buffer(pool.acquire(len).into_private(), 0..len, &pool)
            })
            .chain([ChunkMemory::from_filled_buffer(pool.acquire(7).into_private(), 0..7, &pool)])
            .collect();
        drop(held);
        let kept = pool.size_classes[1].free.lock().len();
        assert_eq!(kept, 32);
        assert_eq!(pool.acquire(len).len(), len);
        assert_eq!(pool.size_classes[1].free.lock().len(), 31);
    }

    #[test]
    fn small_reads_are_copied_to_exact_size() {
        let pool = Pool::new([4096, 8192], false);
        let mut block = pool.acquire(4096);
        block.copy_in(10, b"little");
        let (memory, range) = ChunkMemory::from_filled_buffer(block.into_private(), 10..16, &pool);
        assert_eq!((&memory[range], memory.footprint()), (&b"little"[..], 6));
    }
}
