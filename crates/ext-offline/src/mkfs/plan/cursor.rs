//! Block allocation in ascending order: space is skipped only if the rest holds everything that
//! remains.

use super::super::layout::Layout;
use super::DiskRun;
use crate::mkfs::layout::tables::FreeRanges;

/// Block allocator that works in ascending order.
pub(super) struct BlockCursor<'a> {
    layout: &'a Layout,
    pub(super) space: FreeRanges,
    pub(super) next: u64,
    /// Free blocks from the cursor to the end.
    pub(super) free_blocks: u64,
    /// Blocks still to be allocated.
    pub(super) blocks_outstanding: u64,
    /// Further blocks that maps may need: one per end of a free range.
    pub(super) map_reserve: u64,
}

impl<'a> BlockCursor<'a> {
    pub(super) fn new(layout: &'a Layout, space: FreeRanges, blocks_outstanding: u64) -> Self {
        let mut cursor =
            Self { layout, space, next: 0, free_blocks: 0, blocks_outstanding, map_reserve: 0 };
        cursor.start();
        cursor
    }

    /// Restarts at the first free block.
    pub(super) fn start(&mut self) {
        self.next = 0;
        self.free_blocks = self.space.free_in(0, self.layout.super_.blocks);
        self.map_reserve = match self.layout.options.has_extents() {
            true => self.space.range_count().saturating_mul(self.layout.cluster_blocks()),
            false => 0,
        };
    }

    /// Allocates blocks at `goal`, independent of the cursor.
    pub(super) fn allocate_from(&mut self, goal: u64, blocks: u64) -> Option<Vec<DiskRun>> {
        self.free_blocks = self.free_blocks.checked_sub(blocks)?;
        self.space.allocate_from(goal, blocks)
    }

    /// Returns the free range at the cursor.
    pub(super) fn current_range(&self) -> Option<DiskRun> {
        self.space.from(self.next)
    }

    pub(super) fn can_skip(&self, blocks: u64) -> bool {
        self.free_blocks.saturating_sub(blocks)
            >= self.blocks_outstanding.saturating_add(self.map_reserve)
    }

    /// Moves to the next range if `blocks` fit there as one run and not here.
    pub(super) fn skip_to_fit(&mut self, blocks: u64) {
        let Some((start, end)) = self.current_range() else { return };
        if blocks <= end.saturating_sub(start) {
            return;
        }
        let Some((next, stop)) = self.space.from(end) else { return };
        if blocks <= stop.saturating_sub(next) && self.can_skip(end.saturating_sub(start)) {
            self.free_blocks = self.free_blocks.saturating_sub(end.saturating_sub(start));
            self.next = next;
        }
    }

    /// Moves to a later block if there is spare space.
    pub(super) fn advance_to(&mut self, place: u64) {
        let skipped = self.space.free_in(self.next, place);
        if place > self.next && self.can_skip(skipped) {
            self.free_blocks = self.free_blocks.saturating_sub(skipped);
            self.next = place;
        }
    }

    pub(super) fn allocate(&mut self, mut blocks: u64, runs: &mut Vec<DiskRun>) -> Option<()> {
        self.free_blocks = self.free_blocks.checked_sub(blocks)?;
        while blocks > 0 {
            let (start, end) = self.current_range()?;
            let count = blocks.min(end.saturating_sub(start));
            self.space.allocate_at(start, count)?;
            runs.push((start, count));
            self.next = start.saturating_add(count);
            blocks = blocks.saturating_sub(count);
        }
        Some(())
    }
}
