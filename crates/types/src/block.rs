//! Blocks: buffers with one owner.
//!
//! ```text
//!   private memory     this process alone: page-aligned, may be borrowed
//!   lent slices        read-only data whose owner is in this process: borrowed, not changed
//!   other memory       shared with another process ([`BlockMemory`]): copied, never borrowed
//! ```

use std::any::Any;
use std::fmt::Debug;

use crate::copy_counter;
use crate::private::PrivateBuffer;
use crate::slices::{SharedSlice, SliceList};

/// Memory of a block that this crate does not know, such as memory shared with another process.
/// Its bytes may change while they are read.
pub trait BlockMemory: Any + Debug + Send + Sync {
    /// Returns the length in bytes.
    fn len_bytes(&self) -> usize;

    /// Copies from offset `at_bytes`; the range is inside.
    fn copy_out(&self, at_bytes: usize, into: &mut [u8]);

    /// Returns true if this process may write the memory. A block in other memory becomes private
    /// when it is written.
    fn is_writable(&self) -> bool;

    /// Copies `from` to offset `at_bytes`; the range is inside and the memory writable.
    fn copy_in(&mut self, at_bytes: usize, from: &[u8]);
}

/// A buffer with one owner.
///
/// A block is private memory, slices of data that a server in this process lent, or memory that
/// another process maps, too. The bytes of the last may change while they are read, so they cannot
/// be borrowed: copy with [`Block::copy_out`], or convert the block to a [`PrivateBuffer`].
#[derive(Debug)]
pub struct Block(BlockStorage);

#[derive(Debug)]
enum BlockStorage {
    Private(PrivateBuffer),
    Lent(SliceList),
    Other(Box<dyn BlockMemory>),
}

impl Block {
    /// Creates a block of `len` zero bytes in private memory.
    pub fn private(len: usize) -> Self {
        Self(BlockStorage::Private(PrivateBuffer::new(len)))
    }

    /// Creates a block of `len` bytes without memory. [`Block::put_slice`] lends it slices; writes
    /// convert it to private memory.
    pub fn unallocated(len: usize) -> Self {
        Self(BlockStorage::Lent(SliceList::new(len)))
    }

    /// Returns the block and leaves an empty one: for a server that passes on a borrowed block.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::private(0))
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            BlockStorage::Private(memory) => memory.len(),
            BlockStorage::Lent(lent) => lent.len,
            BlockStorage::Other(memory) => memory.len_bytes(),
        }
    }

    /// Returns true if the block has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies from offset `at_bytes` into `into`; returns the number of bytes copied.
    pub fn copy_out(&self, at_bytes: usize, into: &mut [u8]) -> usize {
        let n = self.len().saturating_sub(at_bytes).min(into.len());
        if n > 0 {
            copy_counter::record_copied_bytes(n);
            let into = &mut into[..n];
            match &self.0 {
                BlockStorage::Private(memory) => {
                    into.copy_from_slice(&memory[at_bytes..at_bytes + n])
                }
                BlockStorage::Lent(lent) => lent.copy_out(at_bytes, into),
                BlockStorage::Other(memory) => memory.copy_out(at_bytes, into),
            }
        }
        n
    }

    /// Copies `from` to offset `at_bytes`; returns the number of bytes that fit.
    pub fn copy_in(&mut self, at_bytes: usize, from: &[u8]) -> usize {
        let n = self.len().saturating_sub(at_bytes).min(from.len());
        if n > 0 {
            copy_counter::record_copied_bytes(n);
            match &mut self.0 {
                BlockStorage::Other(memory) if memory.is_writable() => {
                    memory.copy_in(at_bytes, &from[..n]);
                }
                _ => self.make_private()[at_bytes..at_bytes + n].copy_from_slice(&from[..n]),
            }
        }
        n
    }

    /// Copies up to `len` bytes of `from` into the block, limited by both lengths. Copies once,
    /// unless both are shared memory.
    pub fn copy_from(&mut self, at_bytes: usize, from: &Block, from_at: usize, len: usize) {
        match (&from.0, &mut self.0) {
            (BlockStorage::Private(bytes), _) => {
                let bytes = bytes.get(from_at..).unwrap_or_default();
                self.copy_in(at_bytes, &bytes[..len.min(bytes.len())]);
            }
            (BlockStorage::Lent(lent), BlockStorage::Other(memory)) if memory.is_writable() => {
                let mut skip = from_at;
                let mut done = 0;
                for piece in lent.pieces() {
                    let bytes = piece.get(skip..).unwrap_or_default();
                    skip = skip.saturating_sub(piece.len());
                    let n = bytes.len().min(len - done);
                    done += self.copy_in(at_bytes + done, &bytes[..n]);
                }
            }
            (_, BlockStorage::Other(memory)) if memory.is_writable() => {
                let mut bytes = vec![0; len];
                let n = from.copy_out(from_at, &mut bytes);
                self.copy_in(at_bytes, &bytes[..n]);
            }
            _ => {
                let room = self.make_private().get_mut(at_bytes..).unwrap_or_default();
                let n = len.min(room.len());
                from.copy_out(from_at, &mut room[..n]);
            }
        }
    }

    /// Puts `piece` at `at_bytes`: without a copy if a vacant block is filled from its start, else
    /// as a copy. Returns the number of bytes that fit.
    pub fn put_slice(&mut self, at_bytes: usize, piece: SharedSlice) -> usize {
        let copied = match &mut self.0 {
            BlockStorage::Lent(lent) => match lent.push(at_bytes, piece) {
                Ok(n) => return n,
                Err(piece) => piece,
            },
            _ => piece,
        };
        self.copy_in(at_bytes, &copied)
    }

    /// Returns contents that need no copy, from the start: all of private memory, all lent slices,
    /// nothing of shared memory.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (private, lent) = match &self.0 {
            BlockStorage::Private(memory) => (Some(&memory[..]), &[][..]),
            BlockStorage::Other(_) => (None, &[][..]),
            BlockStorage::Lent(lent) => (None, lent.pieces()),
        };
        private.into_iter().chain(lent.iter().map(|piece| &piece[..]))
    }

    /// Returns the lent slices; none if the block has its own memory.
    pub fn shared_slices(&self) -> &[SharedSlice] {
        match &self.0 {
            BlockStorage::Lent(lent) => lent.pieces(),
            _ => &[],
        }
    }

    /// Returns the bytes, if this block is private memory.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.0 {
            BlockStorage::Private(memory) => Some(memory),
            _ => None,
        }
    }

    /// Returns the bytes as private memory, converting the block if needed; `None` for
    /// writable memory of another crate.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        match &self.0 {
            BlockStorage::Other(memory) if memory.is_writable() => None,
            _ => Some(self.make_private()),
        }
    }

    /// Converts the block to private memory. Copies unless it was private, and releases the old
    /// storage.
    pub fn make_private(&mut self) -> &mut PrivateBuffer {
        if !matches!(self.0, BlockStorage::Private(_)) {
            *self = self.take().into_private().into();
        }
        match &mut self.0 {
            BlockStorage::Private(memory) => memory,
            _ => unreachable!("made private above"),
        }
    }

    /// Converts the block to private memory. Copies unless it was private, and releases the block.
    pub fn into_private(self) -> PrivateBuffer {
        let block = match self.0 {
            BlockStorage::Private(memory) => return memory,
            // No slice was put yet.
            BlockStorage::Lent(lent) if lent.filled() == 0 => return PrivateBuffer::new(lent.len),
            shared => Self(shared),
        };
        let mut memory = PrivateBuffer::new_uninitialized(block.len());
        block.copy_out(0, &mut memory);
        memory
    }

    /// Creates a block in memory of another crate.
    pub fn from_memory(memory: impl BlockMemory) -> Self {
        Self(BlockStorage::Other(Box::new(memory)))
    }

    /// Returns the memory of the block, if it is of this type.
    pub fn memory<T: BlockMemory>(&self) -> Option<&T> {
        match &self.0 {
            BlockStorage::Other(memory) => (&**memory as &dyn Any).downcast_ref(),
            _ => None,
        }
    }

    /// Returns the memory of the block, or the block if it is of another type.
    pub fn into_memory<T: BlockMemory>(self) -> Result<T, Self> {
        if self.memory::<T>().is_none() {
            return Err(self);
        }
        match self.0 {
            BlockStorage::Other(memory) => match (memory as Box<dyn Any>).downcast() {
                Ok(memory) => Ok(*memory),
                Err(_) => unreachable!("it is of this type"),
            },
            storage => Err(Self(storage)),
        }
    }

    /// Returns the number of bytes with contents.
    pub fn filled_len(&self) -> usize {
        match &self.0 {
            BlockStorage::Lent(lent) => lent.filled(),
            _ => self.len(),
        }
    }
}

impl From<PrivateBuffer> for Block {
    fn from(memory: PrivateBuffer) -> Self {
        Self(BlockStorage::Private(memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared_block(pieces: &[&'static [u8]], len: usize) -> Block {
        let mut block = Block::unallocated(len);
        let mut at = 0;
        for piece in pieces {
            at += block.put_slice(at, SharedSlice::new(*piece));
        }
        block
    }

    #[test]
    fn shared_slices_are_not_copied() {
        let data: &'static [u8] = b"the cache's own";
        let block = shared_block(&[&data[..4], &data[4..]], 20);
        let seen: Vec<_> = block.slices().map(<[u8]>::as_ptr).collect();
        assert_eq!(seen, [data.as_ptr(), data[4..].as_ptr()]);
        assert!(block.bytes().is_none() && block.len() == 20);
        let mut bytes = [1; 9];
        assert_eq!(block.copy_out(2, &mut bytes), 9);
        assert_eq!(&bytes, b"e cache's");
        assert_eq!(&block.into_private()[..], b"the cache's own\0\0\0\0\0");
    }

    #[test]
    fn slice_put_out_of_order_is_copied() {
        let mut block = shared_block(&[b"ab"], 6);
        assert_eq!(block.put_slice(4, SharedSlice::new(*b"efgh")), 2);
        assert_eq!(block.bytes(), Some(&b"ab\0\0ef"[..]));
        let mut block = shared_block(&[b"abc"], 3);
        assert_eq!(block.put_slice(3, SharedSlice::new(*b"d")), 0, "no room");
        block.copy_in(1, b"X");
        assert_eq!(block.bytes(), Some(&b"aXc"[..]));
        assert_eq!(Block::unallocated(3).bytes_mut(), Some(&mut [0; 3][..]));
    }

    #[test]
    fn blocks_are_copied_from_each_other() {
        let sources = [
            shared_block(&[b"01", b"234", b"5"], 6),
            shared_block(&[b"012345"], 6).into_private_block(),
        ];
        for from in &sources {
            for (at, from_at, len) in [(0, 0, 6), (1, 1, 4), (3, 2, 4), (0, 5, 9), (6, 0, 1)] {
                let mut into = Block::private(6);
                into.copy_from(at, from, from_at, len);
                let mut expected = [0; 6];
                let there = b"012345".get(from_at..(from_at + len).min(6)).unwrap();
                let n = there.len().min(6 - at);
                expected[at..at + n].copy_from_slice(&there[..n]);
                assert_eq!(into.bytes(), Some(&expected[..]), "{at} {from_at} {len}");
            }
        }
    }

    impl Block {
        fn into_private_block(mut self) -> Self {
            self.make_private();
            self
        }
    }
}
