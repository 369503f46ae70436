//! View of a disk as it will be after journal replay.

use std::sync::Arc;

use draconis_device::{Disk, Error, Extent, Pending, Properties, ReadAnswer, Refused, Urgency};
use draconis_types::Block;

use super::journal_file::JournalFile;
use super::recovery::ScannedLog;
use crate::FsBlock;
use crate::blocks::uncached::read_bytes;
use crate::format::jbd2::blocks::unescape;
use crate::units::saturating_usize;

/// Read-only view of a disk with its journal applied.
pub(super) struct ReplayedDisk {
    disk: Arc<dyn Disk>,
    found: Arc<ScannedLog>,
    /// Volume block of each log block that holds a copy.
    places: Vec<(u32, FsBlock)>,
    block_bytes: u64,
}

impl ReplayedDisk {
    pub(super) fn new(disk: Arc<dyn Disk>, log: &JournalFile, found: Arc<ScannedLog>) -> Self {
        let mut places: Vec<(u32, FsBlock)> = found
            .copies
            .values()
            .filter_map(|copy| Some((copy.at, log.volume_block(copy.at)?)))
            .collect();
        places.sort_unstable();
        Self { disk, found, places, block_bytes: log.super_.format.block_bytes.into() }
    }

    /// Reads a logged copy.
    fn read_copy(&self, at: u32, escaped: bool) -> Result<Vec<u8>, Error> {
        let nth = self.places.partition_point(|(log_block, _)| *log_block < at);
        let place = self.places.get(nth).map_or(u64::MAX, |(_, place)| place.0);
        let extent = Extent::new(place.saturating_mul(self.block_bytes), self.block_bytes);
        let mut bytes = read_bytes(&*self.disk, extent)?;
        if escaped {
            unescape(&mut bytes);
        }
        Ok(bytes)
    }

    /// Overwrites the blocks of an extent that have logged copies.
    fn apply_copies(&self, at: Extent, into: &mut Block) -> Result<(), Error> {
        let end = at.start_bytes.saturating_add(at.len_bytes);
        for (block, copy) in self.found.copies_in(self.blocks_in_extent(at)) {
            let bytes = self.read_copy(copy.at, copy.escaped)?;
            let start = block.0.saturating_mul(self.block_bytes);
            let from = at.start_bytes.max(start);
            let to = end.min(start.saturating_add(self.block_bytes));
            let place = |at: u64, of: u64| saturating_usize(at.saturating_sub(of));
            let part = bytes.get(place(from, start)..place(to, start)).unwrap_or_default();
            into.copy_in(place(from, at.start_bytes), part);
        }
        Ok(())
    }

    /// Returns the volume blocks that an extent overlaps.
    fn blocks_in_extent(&self, at: Extent) -> std::ops::Range<FsBlock> {
        let end = at.start_bytes.saturating_add(at.len_bytes);
        let first = at.start_bytes.checked_div(self.block_bytes).unwrap_or(0);
        FsBlock(first)..FsBlock(end.div_ceil(self.block_bytes.max(1)))
    }
}

impl Disk for ReplayedDisk {
    fn properties(&self) -> Properties {
        Properties { read_only: true, ..self.disk.properties() }
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if self.found.copies_in(self.blocks_in_extent(at)).next().is_none() {
            return self.disk.read(at, into, urgency);
        }
        let renewed = self.disk.read_now(at, into).and_then(|mut block| {
            match self.apply_copies(at, &mut block) {
                Ok(()) => Ok(block),
                Err(error) => Err(Refused { payload: Some(block), error }),
            }
        });
        Pending::ready(renewed)
    }
}
