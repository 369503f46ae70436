//! Redo log: atomic offline change of an unmounted volume.
//!
//! ```text
//!   1  blocks free before the change    moved contents, and the redo log: (home, bytes) ..
//!   2  superblock, first sector         commit point: feature `unfinished`, location of the log
//!   3  home blocks                      written from the log
//!   4  superblock, second sector        new contents; checksum valid with the first sector
//!   5  superblock, first sector         new contents, without `unfinished`
//! ```
//! Each step is durable before the next.
//!
//! Law 1: before step 2 only free blocks are written: an interruption leaves the volume unchanged.
//! Law 2: from step 2 to step 5 a feature flag makes all drivers refuse the volume;
//! [`finish_interrupted_change`] repeats steps 3 to 5 from the log alone.
//! Law 3: the superblock's checksum is valid at every moment.
//! Law 4: memory is bounded, except for a few words per changed block.

use std::collections::BTreeMap;
use std::ops::Range;

use draconis_device::{Disk, Extent, Group, Ticket, Write};
use draconis_types::Block;
use zerocopy::IntoBytes;

use crate::blocks::uncached::{read_bytes, read_raw_superblock, write_of};
use crate::format::checksum::Checksum;
use crate::format::superblock::{OFFSET_BYTES, RawSuperblock};
use crate::format::{le32, put32};
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, Result};

/// Bytes that a disk writes atomically.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Limit of staged blocks in memory, in bytes.
const MAX_STAGED_BYTES: u64 = 32 << 20;
/// Limit of bytes in flight.
const MAX_IN_FLIGHT_BYTES: u64 = 16 << 20;
/// Bytes of one write request.
const REQUEST_BYTES: u64 = 1 << 20;

/// Magic of an index block: | magic | checksum | next (8) | entries (4) | 0 (4) | (home, at) .. |
const MAGIC: u32 = 0x4F44_4552;
const INDEX_HEADER_BYTES: usize = 24;
const ENTRY_BYTES: usize = 16;
/// Home block number that stands for the planned superblock.
const SUPERBLOCK_HOME: u64 = u64::MAX;

/// Locations of the log from here on stand for a revert by an undo file, whose checksum the low half
/// is. No volume has such a block.
pub(crate) const REVERTING: u64 = 0xFFFF_FFFF << 32;

/// Bounded, ordered writes to a disk in blocks of a volume.
pub(crate) struct OfflineWriter<'a> {
    disk: &'a dyn Disk,
    pub(crate) block_bytes: u32,
    in_flight_bytes: u64,
    /// Tickets that all submitted writes depend on.
    dependencies: Vec<Ticket>,
    last: Option<Ticket>,
}

impl<'a> OfflineWriter<'a> {
    pub(crate) fn new(disk: &'a dyn Disk, block_bytes: u32) -> Self {
        Self { disk, block_bytes, in_flight_bytes: 0, dependencies: vec![], last: None }
    }

    fn at_bytes(&self, at: FsBlock) -> u64 {
        at.0.saturating_mul(self.block_bytes.into())
    }

    /// Reads blocks, including writes submitted before.
    pub(crate) fn read(&self, at: FsBlock, blocks: u64) -> Result<Vec<u8>> {
        if let Some(last) = self.last {
            self.disk.wait_visible(last)?;
        }
        let len_bytes = blocks.saturating_mul(self.block_bytes.into());
        Ok(read_bytes(self.disk, Extent::new(self.at_bytes(at), len_bytes))?)
    }

    /// Submits a write of blocks; waits if too many bytes are in flight.
    pub(crate) fn write(&mut self, at: FsBlock, bytes: &[u8]) -> Result<()> {
        self.submit(write_of(self.at_bytes(at), bytes))
    }

    /// Writes zeros from byte `start` up to `end`.
    pub(crate) fn zeros(&mut self, start: u64, end: u64, progress: &dyn Fn(u64)) -> Result<()> {
        let mut at = start;
        while at < end {
            let len = end.saturating_sub(at).min(REQUEST_BYTES);
            self.submit(Write { at_bytes: at, block: Block::private(saturating_usize(len)) })?;
            progress(len);
            at = at.saturating_add(len);
        }
        Ok(())
    }

    fn submit(&mut self, write: Write) -> Result<()> {
        let len = write.block.len() as u64;
        let ticket = self
            .disk
            .submit(Group { writes: vec![write] }, &self.dependencies)
            .map_err(|refused| refused.error)?;
        self.last = Some(ticket);
        self.in_flight_bytes = self.in_flight_bytes.saturating_add(len);
        if self.in_flight_bytes >= MAX_IN_FLIGHT_BYTES {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits until all submitted writes are durable.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.in_flight_bytes = 0;
        if let Some(last) = self.last.take() {
            self.disk.wait_durable(last)?;
            self.dependencies = vec![last];
        }
        Ok(())
    }

    /// Writes `writes` durably, after all earlier writes and before all later ones.
    pub(crate) fn write_barrier(&mut self, writes: Vec<Write>) -> Result<()> {
        self.wait()?;
        let ticket = self.disk.submit(Group { writes }, &self.dependencies);
        self.last = Some(ticket.map_err(|refused| refused.error)?);
        self.wait()
    }
}

/// An offline change that is being staged.
pub(crate) struct RedoLog<'a> {
    writer: OfflineWriter<'a>,
    /// Free block ranges for the log.
    log_ranges: Vec<Range<u64>>,
    /// Log block of each home block.
    home_to_log: BTreeMap<u64, u64>,
    pending: BTreeMap<u64, Vec<u8>>,
    pending_bytes: u64,
    /// True if writes are counted and not made.
    is_dry_run: bool,
}

impl<'a> RedoLog<'a> {
    /// Creates a change of the volume on `disk`. Its log goes to `room`: blocks that are free
    /// before the change and that the change does not allocate.
    pub(crate) fn new(disk: &'a dyn Disk, block_bytes: u32, log_ranges: Vec<Range<u64>>) -> Self {
        let mut room: Vec<_> = log_ranges.into_iter().filter(|range| !range.is_empty()).collect();
        room.reverse();
        Self {
            writer: OfflineWriter::new(disk, block_bytes),
            log_ranges: room,
            home_to_log: BTreeMap::new(),
            pending: BTreeMap::new(),
            pending_bytes: 0,
            is_dry_run: false,
        }
    }

    /// Creates a dry run: nothing is written, and blocks read as they are on the disk.
    pub(crate) fn dry_run(disk: &'a dyn Disk, block_bytes: u32) -> Self {
        Self { is_dry_run: true, ..Self::new(disk, block_bytes, vec![]) }
    }

    /// Returns true for a dry run.
    pub(crate) fn is_dry_run(&self) -> bool {
        self.is_dry_run
    }

    /// Returns the log blocks needed for all blocks staged so far, with the index.
    pub(crate) fn log_blocks(&self) -> u64 {
        let homes = self.home_to_log.keys().chain(self.pending.keys());
        let homes = homes.collect::<std::collections::BTreeSet<_>>().len() as u64;
        let block_bytes = saturating_usize(self.writer.block_bytes.into());
        let room = (block_bytes.saturating_sub(INDEX_HEADER_BYTES) / ENTRY_BYTES).max(1) as u64;
        let all = homes.saturating_add(1);
        all.saturating_add(all.div_ceil(room))
    }

    /// Returns the staged blocks of a change that is small enough for memory, instead of a commit.
    pub(crate) fn into_staged(self) -> BTreeMap<u64, Vec<u8>> {
        self.pending
    }

    /// Returns a block as staged, or from the disk.
    pub(crate) fn block(&self, at: FsBlock) -> Result<Vec<u8>> {
        if let Some(bytes) = self.pending.get(&at.0) {
            return Ok(bytes.clone());
        }
        let logged = self.home_to_log.get(&at.0).filter(|_| !self.is_dry_run);
        self.writer.read(logged.map_or(at, |logged| FsBlock(*logged)), 1)
    }

    /// Reads blocks as they are on the disk.
    pub(crate) fn read_old(&self, at: FsBlock, blocks: u64) -> Result<Vec<u8>> {
        self.writer.read(at, blocks)
    }

    /// Stages the new contents of a block.
    pub(crate) fn stage_block(&mut self, at: FsBlock, bytes: Vec<u8>) -> Result<()> {
        if self.is_dry_run {
            self.home_to_log.insert(at.0, 0);
            return Ok(());
        }
        let len = bytes.len() as u64;
        if self.pending.insert(at.0, bytes).is_none() {
            self.pending_bytes = self.pending_bytes.saturating_add(len);
        }
        if self.pending_bytes >= MAX_STAGED_BYTES {
            self.flush_to_log()?;
        }
        Ok(())
    }

    /// Modifies a staged block.
    pub(crate) fn modify_block<T>(
        &mut self,
        at: FsBlock,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let mut bytes = self.block(at)?;
        let done = change(&mut bytes);
        self.stage_block(at, bytes)?;
        Ok(done)
    }

    /// Writes to blocks that are free before the change.
    pub(crate) fn write_free_blocks(&mut self, at: FsBlock, bytes: &[u8]) -> Result<()> {
        if self.is_dry_run {
            return Ok(());
        }
        self.writer.write(at, bytes)
    }

    /// Writes zeros to free blocks, from byte `start` up to `end`.
    pub(crate) fn zero_free_blocks(
        &mut self,
        start: u64,
        end: u64,
        progress: &dyn Fn(u64),
    ) -> Result<()> {
        if self.is_dry_run {
            return Ok(());
        }
        self.writer.zeros(start, end, progress)
    }

    /// Replaces the ranges for the log, which must not have begun.
    pub(crate) fn set_log_ranges(&mut self, log_ranges: Vec<Range<u64>>) -> Result<()> {
        if !self.home_to_log.is_empty() {
            return Err(Error::Misuse("room for a log that has begun"));
        }
        self.log_ranges = log_ranges.into_iter().filter(|range| !range.is_empty()).collect();
        self.log_ranges.reverse();
        Ok(())
    }

    fn next_log_block(&mut self) -> Result<u64> {
        let range = self.log_ranges.last_mut().ok_or(Error::NoSpace)?;
        let at = range.start;
        range.start = at.saturating_add(1);
        if range.is_empty() {
            self.log_ranges.pop();
        }
        Ok(at)
    }

    /// Writes the staged blocks to the log.
    fn flush_to_log(&mut self) -> Result<()> {
        self.pending_bytes = 0;
        let mut run: Option<(u64, Vec<u8>)> = None;
        for (home, bytes) in std::mem::take(&mut self.pending) {
            let at = match self.home_to_log.get(&home) {
                Some(at) => *at,
                None => self.next_log_block()?,
            };
            self.home_to_log.insert(home, at);
            let block_bytes = saturating_usize(self.writer.block_bytes.into());
            match &mut run {
                Some((start, all))
                    if start
                        .saturating_add(all.len().checked_div(block_bytes).unwrap_or(0) as u64)
                        == at
                        && (all.len() as u64) < REQUEST_BYTES =>
                {
                    all.extend(bytes);
                }
                _ => {
                    if let Some((start, all)) = run.replace((at, bytes)) {
                        self.writer.write(FsBlock(start), &all)?;
                    }
                }
            }
        }
        match run {
            Some((start, all)) => self.writer.write(FsBlock(start), &all),
            None => Ok(()),
        }
    }

    /// Commits the change: afterwards `to_be` is the superblock and everything is durable.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the log does not fit, which leaves the volume unchanged; device
    /// errors.
    pub(crate) fn commit(mut self, to_be: &RawSuperblock) -> Result<()> {
        let mut last = to_be.as_bytes().to_vec();
        last.resize(saturating_usize(self.writer.block_bytes.into()), 0);
        self.stage_block(FsBlock(SUPERBLOCK_HOME), last)?;
        self.flush_to_log()?;
        let head = self.write_index()?;
        let mut super_ = read_raw_superblock(self.writer.disk)?;
        super_.set_change_marker(head);
        super_.preserve_checksum();
        self.writer.write_barrier(vec![superblock_sector(&super_, 0)])?;
        drop(self.home_to_log);
        write_home_blocks(&mut self.writer, &super_, head)
    }

    /// Writes the index, the last block first, and returns its first block.
    fn write_index(&mut self) -> Result<u64> {
        let block_bytes = saturating_usize(self.writer.block_bytes.into());
        let room = block_bytes.saturating_sub(INDEX_HEADER_BYTES) / ENTRY_BYTES;
        let entries: Vec<(u64, u64)> = self.home_to_log.iter().map(|(a, b)| (*a, *b)).collect();
        let mut next = 0u64;
        for part in entries.rchunks(room.max(1)) {
            let at = self.next_log_block()?;
            let mut bytes = vec![];
            bytes.extend(MAGIC.to_le_bytes());
            bytes.extend([0; 4]);
            bytes.extend(next.to_le_bytes());
            bytes.extend(saturating_u32(part.len() as u64).to_le_bytes());
            bytes.extend([0; 4]);
            for (home, at) in part {
                bytes.extend(home.to_le_bytes());
                bytes.extend(at.to_le_bytes());
            }
            bytes.resize(block_bytes, 0);
            let sum = Checksum::new().update(&bytes).value();
            let _ = put32(&mut bytes, 4, sum);
            self.writer.write(FsBlock(at), &bytes)?;
            next = at;
        }
        Ok(next)
    }
}

/// Finishes an interrupted change on `disk` and returns true if there was one. Only the log
/// describes the volume; the home blocks are not trusted.
///
/// # Errors
/// [`Error::NotExt`]; [`Error::Corrupt`] for a damaged log; device errors.
pub fn finish_interrupted_change(disk: &dyn Disk) -> Result<bool> {
    let super_ = read_raw_superblock(disk)?;
    let Some(head) = super_.interrupted_change() else { return Ok(false) };
    if head >= REVERTING {
        let feature = "unfinished: a revert was cut off; draconis repair --revert FILE ends it";
        return Err(Error::Unsupported { feature: feature.to_owned() });
    }
    let block_bytes = 1024u32
        .checked_shl(super_.s_log_block_size.get())
        .filter(|bytes| (1024..=65536).contains(bytes))
        .ok_or(Error::corrupt("superblock: block size"))?;
    write_home_blocks(&mut OfflineWriter::new(disk, block_bytes), &super_, head)?;
    Ok(true)
}

/// Performs steps 3 to 5.
fn write_home_blocks(
    writer: &mut OfflineWriter<'_>,
    super_: &RawSuperblock,
    head: u64,
) -> Result<()> {
    let mut planned = None;
    let mut at = head;
    // Home blocks ascend, so the index has no cycle.
    let mut last = None;
    while at != 0 {
        let wrong = Error::corrupt("log of an unfinished change").with_block(FsBlock(at));
        let found = parse_index_block(&writer.read(FsBlock(at), 1)?);
        let (next, entries) = found.filter(|(_, all)| !all.is_empty()).ok_or(wrong.clone())?;
        for (home, logged) in entries {
            if last.is_some_and(|last| home <= last) {
                return Err(wrong);
            }
            last = Some(home);
            let bytes = writer.read(FsBlock(logged), 1)?;
            match home {
                SUPERBLOCK_HOME => planned = Some(RawSuperblock::view(&bytes)?.clone()),
                home => writer.write(FsBlock(home), &bytes)?,
            }
        }
        at = next;
    }
    let mut planned = planned.ok_or(Error::corrupt("log of an unfinished change: superblock"))?;
    writer.wait()?;
    let mut bytes = super_.as_bytes().to_vec();
    if let (Some(to), Some(from)) = (
        bytes.get_mut(saturating_usize(SECTOR_BYTES)..),
        planned.as_bytes().get(saturating_usize(SECTOR_BYTES)..),
    ) {
        to.copy_from_slice(from);
    }
    let mut middle = RawSuperblock::view(&bytes)?.clone();
    middle.set_checksum();
    writer.write_barrier(vec![superblock_sector(&middle, SECTOR_BYTES)])?;
    planned.s_checksum = middle.s_checksum;
    planned.preserve_checksum();
    writer.write_barrier(vec![superblock_sector(&planned, 0)])
}

/// Parses an index block: the next index block, and the entries.
fn parse_index_block(block: &[u8]) -> Option<(u64, Vec<(u64, u64)>)> {
    let mut bytes = block.to_vec();
    put32(&mut bytes, 4, 0)?;
    let is_whole =
        le32(block, 0)? == MAGIC && le32(block, 4)? == Checksum::new().update(&bytes).value();
    let le64 = |at: usize| {
        Some(u64::from(le32(block, at)?) | u64::from(le32(block, at.checked_add(4)?)?) << 32)
    };
    let count = saturating_usize(le32(block, 16)?.into());
    let places =
        (0..count).map(|nth| nth.checked_mul(ENTRY_BYTES)?.checked_add(INDEX_HEADER_BYTES));
    let entry = |at: usize| Some((le64(at)?, le64(at.checked_add(8)?)?));
    let all: Option<Vec<_>> = places.map(|at| entry(at?)).collect();
    is_whole.then_some((le64(8)?, all?))
}

/// Returns a write of the superblock sector at byte `from`.
pub(crate) fn superblock_sector(raw: &RawSuperblock, from: u64) -> Write {
    let bytes = raw.as_bytes().get(saturating_usize(from)..).unwrap_or_default();
    let bytes = bytes.get(..saturating_usize(SECTOR_BYTES)).unwrap_or_default();
    write_of(OFFSET_BYTES.saturating_add(from), bytes)
}
