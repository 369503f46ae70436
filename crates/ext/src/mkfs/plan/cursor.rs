//! Blocks, given out in rising order: space is skipped only while what is left holds everything
//! that is to come.

use super::super::layout::Layout;
use super::super::tables::FreeRanges;
use super::DiskRun;

/// Gives out blocks in rising order.
pub(super) struct BlockCursor<'a> {
    layout: &'a Layout,
    pub(super) space: FreeRanges,
    pub(super) next: u64,
    /// Free blocks from here to the end.
    pub(super) left: u64,
    /// Blocks that are yet to be given out.
    pub(super) blocks_outstanding: u64,
    /// Blocks that maps may need beyond that: one where a range ends.
    pub(super) map_reserve: u64,
}

impl<'a> BlockCursor<'a> {
    pub(super) fn new(layout: &'a Layout, space: FreeRanges, needed: u64) -> Self {
        let mut cursor =
            Self { layout, space, next: 0, left: 0, blocks_outstanding: needed, map_reserve: 0 };
        cursor.start();
        cursor
    }

    /// Begins anew, with the first block that is free.
    pub(super) fn start(&mut self) {
        self.next = 0;
        self.left = self.space.free_in(0, self.layout.super_.blocks);
        self.map_reserve = match self.layout.options.extents() {
            true => self.space.ranges() * self.layout.cluster_blocks(),
            false => 0,
        };
    }

    /// Takes blocks out of turn.
    pub(super) fn take_from(&mut self, goal: u64, blocks: u64) -> Option<Vec<DiskRun>> {
        self.left = self.left.checked_sub(blocks)?;
        self.space.take_from(goal, blocks)
    }

    /// The range that blocks are given out from.
    pub(super) fn current_range(&self) -> Option<DiskRun> {
        self.space.from(self.next)
    }

    pub(super) fn can_skip(&self, blocks: u64) -> bool {
        self.left.saturating_sub(blocks) >= self.blocks_outstanding + self.map_reserve
    }

    /// Moves to the next range if `blocks` are one run there and not here.
    pub(super) fn skip_to_fit(&mut self, blocks: u64) {
        let Some((start, end)) = self.current_range() else { return };
        if blocks <= end - start {
            return;
        }
        let Some((next, stop)) = self.space.from(end) else { return };
        if blocks <= stop - next && self.can_skip(end - start) {
            self.left -= end - start;
            self.next = next;
        }
    }

    /// Moves to a later place if there is room to spare.
    pub(super) fn advance_to(&mut self, place: u64) {
        let skipped = self.space.free_in(self.next, place);
        if place > self.next && self.can_skip(skipped) {
            self.left -= skipped;
            self.next = place;
        }
    }

    pub(super) fn take(&mut self, mut blocks: u64, runs: &mut Vec<DiskRun>) -> Option<()> {
        self.left = self.left.checked_sub(blocks)?;
        while blocks > 0 {
            let (start, end) = self.current_range()?;
            let count = blocks.min(end - start);
            self.space.take(start, count)?;
            runs.push((start, count));
            self.next = start + count;
            blocks -= count;
        }
        Some(())
    }
}
