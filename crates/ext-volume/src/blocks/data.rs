//! Reference-counted, read-only bytes that are not copied.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_types::SharedSlice;

use crate::blocks::pool::ChunkMemory;
use crate::cache::CacheWeight;

/// Size of the aligned chunks in which files are cached.
pub const CHUNK_BYTES: u64 = 128 << 10;

/// Bytes of a file or of the device in memory. They stay valid after the cache evicts them.
#[derive(Clone)]
pub struct SharedBytes {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

/// Value of the data cache: memory filled by the device, and the valid range.
pub(crate) struct Chunk {
    memory: ChunkMemory,
    range: Range<usize>,
    /// True if the first read of this chunk should start the next read-ahead.
    is_read_ahead_mark: AtomicBool,
}

/// Approximate memory of a cache entry beside its bytes.
const ENTRY_BYTES: usize = 192;

impl Chunk {
    /// Returns a chunk with `range` of `memory`.
    pub(crate) fn new(memory: ChunkMemory, range: Range<usize>) -> Arc<Self> {
        let end = range.end.min(memory.len());
        let range = range.start.min(end)..end;
        Arc::new(Self { memory, range, is_read_ahead_mark: AtomicBool::new(false) })
    }
}

impl Chunk {
    /// Returns a chunk with all of `memory`.
    pub(crate) fn from_memory(memory: ChunkMemory) -> Arc<Self> {
        let range = 0..memory.len();
        Self::new(memory, range)
    }

    /// Returns bytes of a chunk for writing; `None` if it is shared.
    pub(crate) fn get_mut_range(this: &mut Arc<Self>, part: Range<usize>) -> Option<&mut [u8]> {
        let chunk = Arc::get_mut(this)?;
        let start = chunk.range.start;
        chunk.memory.get_mut(start.checked_add(part.start)?..start.checked_add(part.end)?)
    }

    /// Marks a chunk that is not shared yet.
    pub(crate) fn set_read_ahead_mark(&self, marked: bool) {
        self.is_read_ahead_mark.store(marked, Ordering::Relaxed);
    }

    /// Returns true if the chunk was marked, and clears the mark.
    pub(crate) fn take_read_ahead_mark(&self) -> bool {
        self.is_read_ahead_mark.load(Ordering::Relaxed)
            && self.is_read_ahead_mark.swap(false, Ordering::Relaxed)
    }
}

impl CacheWeight for Arc<Chunk> {
    fn weight(&self) -> u64 {
        self.memory.footprint().saturating_add(ENTRY_BYTES) as u64
    }
}

impl SharedBytes {
    /// Returns `len` bytes of `chunk` from `at`, or fewer at its end.
    pub(crate) fn from_chunk(chunk: Arc<Chunk>, at: usize, len: usize) -> Self {
        let Range { start, end } = chunk.range;
        let from = start.saturating_add(at).min(end);
        let to = from.saturating_add(len).min(end);
        Self { chunk, range: from..to }
    }

    /// Returns a part, clipped to the bytes there are. Copies nothing.
    #[must_use]
    pub fn slice(&self, part: Range<usize>) -> Self {
        let Range { start, end } = self.range;
        let from = start.saturating_add(part.start).min(end);
        let to = start.saturating_add(part.end).clamp(from, end);
        Self { chunk: self.chunk.clone(), range: from..to }
    }

    /// Takes ownership of bytes.
    pub fn from_owned_bytes(bytes: Box<[u8]>) -> Self {
        let range = 0..bytes.len();
        Self { chunk: Chunk::new(ChunkMemory::Exact(bytes), range.clone()), range }
    }

    /// Wraps a lent piece without copying it.
    pub(crate) fn from_piece(piece: SharedSlice) -> Self {
        let range = 0..piece.len();
        Self { chunk: Chunk::new(ChunkMemory::Lent(piece), range.clone()), range }
    }

    /// Returns the bytes for writing; copies them first if they are shared.
    pub(crate) fn make_mut(&mut self) -> &mut [u8] {
        let lent = matches!(self.chunk.memory, ChunkMemory::Lent(_));
        if lent || Arc::get_mut(&mut self.chunk).is_none() {
            *self = Self::from_owned_bytes(self.to_vec().into_boxed_slice());
        }
        let range = self.range.clone();
        // It is not shared now.
        let chunk = Arc::get_mut(&mut self.chunk);
        chunk.and_then(|chunk| chunk.memory.get_mut(range)).unwrap_or_default()
    }

    /// Returns no bytes.
    pub(crate) fn empty() -> Self {
        Self { chunk: Chunk::from_memory(ChunkMemory::zeros(0)), range: 0..0 }
    }
}

impl std::ops::Deref for SharedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.chunk.memory.get(self.range.clone()).unwrap_or_default()
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Data({} bytes)", self.len())
    }
}
