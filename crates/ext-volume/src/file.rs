//! File data: cached chunks, with read-ahead for sequential readers.

use std::sync::Arc;

use draconis_types::FileType;

use crate::blocks::data::{Chunk, SharedBytes};
use crate::blocks::{CHUNK_BYTES, CacheKey, ReadPlan, ReadSegment};
use crate::format::inode::Inode;
use crate::map::{self, BlockLocation, BlockMap, Run, SEGMENT_BLOCKS, SegmentKey};
use crate::reader::VolumeReader;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FileBlock, Result};

/// Target of [`crate::Volume::seek`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seek {
    /// The next stored byte.
    Data,
    /// The next byte of a hole; the end of a file counts as one.
    Hole,
}

impl VolumeReader {
    pub(crate) fn read_chunk_part(
        &self,
        inode: &Inode,
        offset: u64,
        len: usize,
    ) -> Result<SharedBytes> {
        match inode.kind {
            FileType::File => self.read_contents(inode, offset, len),
            FileType::Directory => Err(Error::IsADirectory),
            _ => Err(Error::Misuse("only files have contents")),
        }
    }

    /// [`crate::Volume::read_into_from_inode`] for callers that hold the lock.
    pub(crate) fn read_into_locked(
        &self,
        inode: &Inode,
        offset: u64,
        into: &mut [u8],
    ) -> Result<usize> {
        let mut done = 0usize;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = offset.saturating_add(done as u64);
            let data = match self.read_chunk_part(inode, at, rest.len()) {
                Ok(data) => data,
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            };
            let (Some(to), false) = (rest.get_mut(..data.len()), data.is_empty()) else { break };
            to.copy_from_slice(&data);
            done = done.saturating_add(data.len());
        }
        Ok(done)
    }

    /// Returns data of any inode that has blocks.
    pub(crate) fn read_contents(
        &self,
        inode: &Inode,
        offset: u64,
        len: usize,
    ) -> Result<SharedBytes> {
        let left = inode.size_bytes.saturating_sub(offset);
        if left == 0 || len == 0 {
            inode.check_readable()?;
            return Ok(SharedBytes::empty());
        }
        if inode.is_inline() {
            return self.inline_contents(inode, offset, len);
        }
        let key = CacheKey { inode: inode.number.0, index: offset / CHUNK_BYTES };
        let at = saturating_usize(offset % CHUNK_BYTES);
        match self.chunk(inode, key) {
            Ok(chunk) => Ok(SharedBytes::from_chunk(chunk, at, len)),
            // A damaged block must not make its whole chunk unreadable.
            Err(Error::Corrupt { .. } | Error::Io(_)) => self.read_single_block(inode, offset, len),
            Err(other) => Err(other),
        }
    }

    fn chunk(&self, inode: &Inode, key: CacheKey) -> Result<Arc<Chunk>> {
        let plan = || self.chunk_read_plan(inode, key.index);
        let chunk =
            self.store.chunk(key, plan, || self.start_read_ahead(inode, key.index, false))?;
        if chunk.take_read_ahead_mark() {
            self.start_read_ahead(inode, key.index, true);
        }
        Ok(chunk)
    }

    /// Starts the read-ahead after a read of `chunk`.
    fn start_read_ahead(&self, inode: &Inode, chunk: u64, is_cached: bool) {
        let chunks = inode.size_bytes.div_ceil(CHUNK_BYTES);
        if chunks <= 1 {
            return;
        }
        let Some(ahead) = self.file_read_ahead.on_read(inode.number.0, chunk, is_cached) else {
            return;
        };
        for nth in ahead.from..ahead.end.min(chunks) {
            let key = CacheKey { inode: inode.number.0, index: nth };
            let marked = nth == ahead.mark;
            if !self.store.read_ahead(key, || self.chunk_read_plan(inode, nth), marked) {
                return;
            }
        }
    }

    /// Returns the plan for reading chunk `nth`.
    pub(crate) fn chunk_read_plan(&self, inode: &Inode, nth: u64) -> Result<ReadPlan> {
        let start = nth.saturating_mul(CHUNK_BYTES);
        let len = inode.size_bytes.saturating_sub(start).min(CHUNK_BYTES);
        self.read_plan(inode, start, saturating_usize(len))
    }

    /// Returns the plan for reading `len` bytes from the block-aligned `start`.
    fn read_plan(&self, inode: &Inode, start: u64, len: usize) -> Result<ReadPlan> {
        let from = self.file_block(start);
        let end = self.file_block_end(start.saturating_add(len as u64));
        let block_bytes = u64::from(self.super_.block_bytes);
        let mut parts = Vec::new();
        for run in self.map_runs(inode, from, end)? {
            match run.location {
                BlockLocation::Hole | BlockLocation::Unwritten(_) => {}
                BlockLocation::Mapped(block) => {
                    let skipped = u64::from(run.from.0.saturating_sub(from.0));
                    let to = saturating_usize(skipped.saturating_mul(block_bytes));
                    let bytes = saturating_usize(u64::from(run.blocks).saturating_mul(block_bytes));
                    let len = bytes.min(len.saturating_sub(to));
                    parts.push(ReadSegment {
                        start_bytes: block.0.saturating_mul(block_bytes),
                        len,
                        chunk_offset: to,
                    });
                }
                BlockLocation::Damaged(block) => {
                    return Err(Error::Corrupt {
                        what: "block map: pointer",
                        inode: Some(inode.number),
                        block: Some(block),
                    });
                }
            }
        }
        Ok(ReadPlan { len, segments: parts, is_near_siblings: inode.kind == FileType::File })
    }

    /// Reads the rest of one block at `offset` of a chunk that is not readable as a whole.
    fn read_single_block(&self, inode: &Inode, offset: u64, len: usize) -> Result<SharedBytes> {
        let block_bytes = u64::from(self.super_.block_bytes);
        let skew = offset.checked_rem(block_bytes).unwrap_or(0);
        let start = offset.saturating_sub(skew);
        let there = inode.size_bytes.saturating_sub(start).min(block_bytes);
        let plan = self.read_plan(inode, start, saturating_usize(there))?;
        let block = self.store.load(&plan).map_err(|error| error.with_inode(inode.number))?;
        Ok(SharedBytes::from_chunk(block, saturating_usize(skew), len))
    }

    pub(crate) fn file_block(&self, bytes: u64) -> FileBlock {
        FileBlock(saturating_u32(
            bytes.checked_div(u64::from(self.super_.block_bytes)).unwrap_or(0),
        ))
    }

    /// Returns the first block after `bytes` bytes.
    pub fn file_block_end(&self, bytes: u64) -> FileBlock {
        FileBlock(saturating_u32(bytes.div_ceil(u64::from(self.super_.block_bytes))))
    }

    /// Returns the runs of the blocks from `from` to `end`.
    pub fn map_runs(&self, inode: &Inode, from: FileBlock, end: FileBlock) -> Result<Vec<Run>> {
        if map::is_mapped_by_inode(inode, end) {
            let runs = self.scan_runs(inode, from, end)?;
            return Ok(runs.between(from, end).collect());
        }
        let mut all = Vec::new();
        let mut at = from;
        while at < end {
            let segment = at.0 / SEGMENT_BLOCKS;
            let (runs, segment_end) = self.load_segment(inode, segment)?;
            all.extend(runs.between(at, end));
            at = segment_end;
        }
        Ok(all)
    }

    fn scan_runs(&self, inode: &Inode, from: FileBlock, end: FileBlock) -> Result<map::RunList> {
        let map = map::map_of(inode)?;
        map::with_source(&self.store, &self.super_, map.role(inode.file_id()), |source| {
            map::scan_map(&map, source, from, end)
        })
    }

    /// Returns one segment of a file's map, and the start of the next.
    pub(crate) fn load_segment(
        &self,
        inode: &Inode,
        segment: u32,
    ) -> Result<(Arc<map::RunList>, FileBlock)> {
        let from = FileBlock(segment.saturating_mul(SEGMENT_BLOCKS));
        let full = from.offset(SEGMENT_BLOCKS);
        let end = full.min(self.file_block_end(inode.size_bytes));
        let key = SegmentKey { inode: inode.number.0, segment };
        let runs =
            self.block_maps.get_or_load(key, || self.scan_runs(inode, from, end).map(Arc::new))?;
        Ok((runs, full))
    }
}
