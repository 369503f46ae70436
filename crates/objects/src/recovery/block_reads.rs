//! Blocks of a checkpoint, in order, several of them read at a time: in a bucket each is a request.

use std::collections::VecDeque;

use draconis_device::{Extent, Pending, ReadAnswer, Urgency};
use draconis_types::PrivateBuffer;

use crate::Result;
use crate::cached_disk::CachedDisk;
use crate::codec::{slice_at, to_usize_saturating};
use crate::index::tree::BlockPtr;

/// Bytes that are read ahead.
const READ_AHEAD_BYTES: u64 = 16 << 20;

pub(super) struct BlockReads<'a> {
    io: &'a CachedDisk,
    /// Blocks whose reads have begun, each with the start of its pages.
    begun: VecDeque<(BlockPtr, u64, Pending<ReadAnswer>)>,
    begun_bytes: u64,
    rest: VecDeque<BlockPtr>,
}

impl<'a> BlockReads<'a> {
    pub fn new(io: &'a CachedDisk, blocks: impl Iterator<Item = BlockPtr>) -> Self {
        let rest = blocks.filter(|ptr| io.geometry.contains(ptr.at, ptr.len.into())).collect();
        Self { io, begun: VecDeque::new(), begun_bytes: 0, rest }
    }

    /// Returns the contents of a block. Blocks are taken in the order of `new`; another one, or one
    /// that cannot be read, is read by itself.
    pub fn take(&mut self, ptr: BlockPtr) -> Result<Vec<u8>> {
        while self.begun_bytes < READ_AHEAD_BYTES
            && let Some(next) = self.rest.pop_front()
        {
            let end = next.at.saturating_add(next.len.into());
            let (start, end) = self.io.pages_of(next.at, end);
            let extent = Extent::new(start, end.saturating_sub(start));
            let into = PrivateBuffer::new_uninitialized(to_usize_saturating(extent.len_bytes));
            let read = self.io.disk.read(extent, into.into(), Urgency::Ahead);
            self.begun.push_back((next, start, read));
            self.begun_bytes = self.begun_bytes.saturating_add(next.len.into());
        }
        let next = self.begun.pop_front_if(|(next, _, _)| *next == ptr);
        let Some((_, start, read)) = next else { return self.io.read_block(ptr) };
        self.begun_bytes = self.begun_bytes.saturating_sub(ptr.len.into());
        let Some(Ok(block)) = read.wait() else { return self.io.read_block(ptr) };
        let bytes = block.into_private();
        match slice_at(&bytes, start, ptr.at, ptr.len as usize) {
            Some(bytes) if self.io.summer.checksum(ptr.at, bytes) == ptr.sum => Ok(bytes.to_vec()),
            _ => self.io.read_block(ptr),
        }
    }
}
