//! Bytes handed out: read-only, counted, never copied.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_exchange::heap::SharedSlice;

use crate::blocks::pool::Memory;
use crate::cache::CacheWeight;

/// Files are cached in aligned chunks of this many bytes.
pub(crate) const CHUNK_BYTES: u64 = 128 << 10;

/// A piece of a file or of the device in memory. Its holder keeps it alive, also
/// when the cache has let it go.
#[derive(Clone)]
pub struct SharedBytes {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

/// What the data cache holds: memory as the device filled it, and the part that counts.
pub(crate) struct Chunk {
    memory: Memory,
    range: Range<usize>,
    /// The first reader of this chunk wants more of the file to be on its way.
    is_read_ahead_mark: AtomicBool,
}

/// What an entry takes beside its memory, about.
const ENTRY_BYTES: usize = 192;

impl Chunk {
    /// The bytes of `memory` in `range`.
    pub(crate) fn new(memory: Memory, range: Range<usize>) -> Arc<Self> {
        let end = range.end.min(memory.len());
        let range = range.start.min(end)..end;
        Arc::new(Self { memory, range, is_read_ahead_mark: AtomicBool::new(false) })
    }
}

impl Chunk {
    /// All the bytes of `memory`.
    pub(crate) fn whole(memory: Memory) -> Arc<Self> {
        let range = 0..memory.len();
        Self::new(memory, range)
    }

    /// Bytes of a chunk that is not shared; `None` if it is.
    pub(crate) fn get_mut_range(this: &mut Arc<Self>, part: Range<usize>) -> Option<&mut [u8]> {
        let chunk = Arc::get_mut(this)?;
        let start = chunk.range.start;
        chunk.memory.get_mut(start.checked_add(part.start)?..start.checked_add(part.end)?)
    }

    /// Marks a chunk that is not shared yet.
    pub(crate) fn set_read_ahead_mark(&self, marked: bool) {
        self.is_read_ahead_mark.store(marked, Ordering::Relaxed);
    }

    /// Whether it was marked; says so once.
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
    /// `len` bytes of `chunk` from `at`, or as many of them as there are.
    pub(crate) fn of(chunk: Arc<Chunk>, at: usize, len: usize) -> Self {
        let Range { start, end } = chunk.range;
        let from = start.saturating_add(at).min(end);
        let to = from.saturating_add(len).min(end);
        Self { chunk, range: from..to }
    }

    /// A part of it; what lies outside is left out. Copies nothing.
    #[must_use]
    pub fn slice(&self, part: Range<usize>) -> Self {
        let Range { start, end } = self.range;
        let from = start.saturating_add(part.start).min(end);
        let to = start.saturating_add(part.end).clamp(from, end);
        Self { chunk: self.chunk.clone(), range: from..to }
    }

    /// Bytes of their own.
    pub(crate) fn owned(bytes: Box<[u8]>) -> Self {
        let range = 0..bytes.len();
        Self { chunk: Chunk::new(Memory::Exact(bytes), range.clone()), range }
    }

    /// All of what is lent.
    pub(crate) fn from_piece(piece: SharedSlice) -> Self {
        let range = 0..piece.len();
        Self { chunk: Chunk::new(Memory::Lent(piece), range.clone()), range }
    }

    /// The bytes to be changed: copied first if they are shared.
    pub(crate) fn make_mut(&mut self) -> &mut [u8] {
        let lent = matches!(self.chunk.memory, Memory::Lent(_));
        if lent || Arc::get_mut(&mut self.chunk).is_none() {
            *self = Self::owned(self.to_vec().into_boxed_slice());
        }
        let range = self.range.clone();
        // It is not shared now.
        let chunk = Arc::get_mut(&mut self.chunk);
        chunk.and_then(|chunk| chunk.memory.get_mut(range)).unwrap_or_default()
    }

    /// No bytes.
    pub(crate) fn empty() -> Self {
        Self { chunk: Chunk::whole(Memory::zeros(0)), range: 0..0 }
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
