//! Compaction: minimizes the length of a VHDX file by moving its blocks.
//!
//! ```text
//!   | header, log, tables | block | free | block | free | block |   unused blocks leave the BAT;
//!                                  ▲                      │         the last blocks move to the
//!                                  └──────────────────────┘         first free locations
//! ```
//! Law 1: a location is reused only once the release of its block is durable in the log or the BAT.
//! Law 2: a copy is durable before its location is in the log.

use std::collections::VecDeque;
use std::ops::Range;

use super::{LOG_SECTOR_BYTES, PAYLOAD_BLOCK_FULLY_PRESENT, WritableVhdx};
use crate::Error;
use crate::image_file::ImageFile;
use crate::vhdx::MIB;
use crate::writable::{AllocationTables, MetadataWriter};

/// Bytes per read of a copy or scan.
const COPY_CHUNK_BYTES: u64 = 4 << 20;

impl WritableVhdx {
    /// Releases blocks of `unused` bytes and new blocks of zeros, moves blocks to the front of the
    /// file, and returns the required length of the file. Returns `None` if the image is fixed and
    /// fully allocated.
    pub(super) fn compact_blocks(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: &[Range<u64>],
    ) -> Result<Option<u64>, Error> {
        let is_whole = || (0..self.block_count()).all(|nth| self.block_offset(nth).is_some());
        if self.map.is_fixed && is_whole() {
            return Ok(None);
        }
        if self.map.needs_replay() {
            // Replays the log before the file becomes shorter than the log records.
            self.begin_session(out)?;
        }
        self.release_blocks(out, unused)?;
        let block_bytes = self.map.block_bytes;
        let mut blocks: Vec<(u64, u64)> = vec![];
        for nth in 0..self.block_count() {
            blocks.extend(self.block_offset(nth).map(|place| (place, nth)));
        }
        blocks.sort_unstable();
        let fixed: Vec<(u64, u64)> =
            self.map.regions.iter().copied().chain([(0, MIB), self.map.log]).collect();
        let mut used: Vec<(u64, u64)> = fixed.clone();
        used.extend(blocks.iter().map(|(place, _)| (*place, block_bytes)));
        used.sort_unstable();
        let mut free = VecDeque::new();
        let mut end: u64 = 0;
        for (at, len) in used {
            let mut place = end.next_multiple_of(MIB);
            while place.saturating_add(block_bytes) <= at {
                free.push_back(place);
                place += block_bytes;
            }
            end = end.max(at.saturating_add(len));
        }
        let mut moved_end = 0;
        while let Some((place, nth)) = blocks.pop() {
            let Some(new) = free.pop_front().filter(|new| *new < place) else {
                blocks.push((place, nth));
                break;
            };
            self.begin_session(out)?;
            let mut at = 0;
            while at < block_bytes {
                let len = COPY_CHUNK_BYTES.min(block_bytes - at);
                let bytes = out.file.read_vec(place + at, len as usize)?;
                let ticket = out.submit_chain(vec![vec![(new + at, bytes)]])?;
                out.add_dependency(ticket);
                at += len;
            }
            self.set_bat_entry(nth, new | PAYLOAD_BLOCK_FULLY_PRESENT);
            self.submit_tables(out)?;
            // Free locations are in ascending order: the last one is the highest.
            moved_end = new + block_bytes;
        }
        let last = blocks.last().map_or(0, |(place, _)| place + block_bytes);
        let fixed = fixed.iter().map(|(at, len)| at.saturating_add(*len)).max().unwrap_or(0);
        out.wait()?;
        self.close_session(out)?;
        out.wait()?;
        Ok(Some(last.max(moved_end).max(fixed).next_multiple_of(MIB)))
    }

    /// Clears the BAT entries of unused blocks, durably.
    fn release_blocks(
        &mut self,
        out: &mut MetadataWriter<'_>,
        unused: &[Range<u64>],
    ) -> Result<(), Error> {
        let block_bytes = self.map.block_bytes;
        let mut released = vec![];
        for nth in 0..self.block_count() {
            let Some(place) = self.block_offset(nth) else { continue };
            let start = nth * block_bytes;
            let end = start.saturating_add(block_bytes).min(self.map.len_bytes);
            let before = unused.partition_point(|range| range.start <= start);
            let range = before.checked_sub(1).and_then(|nth| unused.get(nth));
            let is_unused = range.is_some_and(|range| end <= range.end);
            let is_new = place >= self.opened_end;
            if is_unused || is_new && is_zeros(out.file, place..place + block_bytes)? {
                released.push(nth);
            }
        }
        if released.is_empty() {
            return Ok(());
        }
        self.begin_session(out)?;
        for nth in released {
            self.set_bat_entry(nth, 0);
        }
        self.submit_tables(out)?;
        out.wait()
    }

    fn block_count(&self) -> u64 {
        self.map.len_bytes.div_ceil(self.map.block_bytes)
    }

    /// Returns the offset of a block, if it is present.
    fn block_offset(&self, nth: u64) -> Option<u64> {
        let entry = self.map.bat.get(self.map.bat_index(nth * self.map.block_bytes)).copied();
        entry
            .filter(|entry| entry & 7 == PAYLOAD_BLOCK_FULLY_PRESENT)
            .map(|entry| entry >> 20 << 20)
    }

    fn set_bat_entry(&mut self, nth: u64, entry: u64) {
        let nth = self.map.bat_index(nth * self.map.block_bytes);
        if let Some(place) = self.map.bat.get_mut(nth) {
            *place = entry;
        }
        self.changed.insert((nth * 8 / LOG_SECTOR_BYTES) as u64);
    }
}

fn is_zeros(file: &ImageFile, range: Range<u64>) -> Result<bool, Error> {
    for at in range.clone().step_by(COPY_CHUNK_BYTES as usize) {
        let len = COPY_CHUNK_BYTES.min(range.end - at);
        if file.read_vec(at, len as usize)?.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}
