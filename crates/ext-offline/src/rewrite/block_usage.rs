//! Used blocks before and after an offline change.
//!
//! Law: an allocated block is free both before and after the change, so it can be written at once,
//! and an abandoned change leaves no trace. With clusters all operations round to whole clusters.

use std::ops::Range;

use crate::units::saturating_usize;

/// One bit per block below the new end.
#[derive(Debug)]
pub(crate) struct BlockUsage {
    end: u64,
    /// Blocks per cluster.
    ratio: u64,
    /// Blocks used after the change.
    used_after: Vec<u64>,
    /// Blocks used before the change, after it, or by its log.
    unavailable: Vec<u64>,
    /// Start of the next search.
    cursor: u64,
}

impl BlockUsage {
    /// Creates the usage of unused blocks below `end`, in clusters of `ratio` blocks.
    pub(crate) fn new(end: u64, ratio: u32) -> Self {
        let unavailable = vec![0; saturating_usize(end.div_ceil(64))];
        Self {
            end,
            ratio: ratio.max(1).into(),
            used_after: unavailable.clone(),
            unavailable,
            cursor: 0,
        }
    }

    /// Returns one past the last block after the change.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Marks blocks as used before and after the change.
    pub(crate) fn mark_used(&mut self, blocks: Range<u64>) {
        let blocks = self.clip(blocks);
        fill(&mut self.used_after, blocks.clone(), true);
        fill(&mut self.unavailable, blocks, true);
    }

    /// Marks blocks as used only before the change.
    pub(crate) fn release(&mut self, blocks: Range<u64>) {
        let blocks = self.clip(blocks);
        fill(&mut self.used_after, blocks, false);
    }

    /// Copies the bits of `start..end` in the format of a block bitmap.
    pub(crate) fn copy_bits(&self, start: u64, end: u64, into: &mut [u8]) {
        if self.ratio > 1 {
            let mut clusters = (start..).step_by(saturating_usize(self.ratio));
            for byte in into.iter_mut() {
                *byte = clusters.by_ref().take(8).zip(0u8..).fold(0, |byte, (at, nth)| {
                    byte | u8::from(at >= end || self.is_used(at)) << nth
                });
            }
            return;
        }
        let mut at = start;
        for byte in into.iter_mut() {
            let (nth, shift) = (at / 64, at % 64);
            let mut bits = word(&self.used_after, nth) >> shift;
            if shift > 0 {
                bits |=
                    word(&self.used_after, nth.saturating_add(1)) << 64u64.saturating_sub(shift);
            }
            let [low, ..] = bits.to_le_bytes();
            let left = end.saturating_sub(at).min(8);
            let beyond = 0xFFu32.checked_shl(u32::try_from(left).unwrap_or(8)).unwrap_or(0);
            let [beyond, ..] = beyond.to_le_bytes();
            *byte = low | beyond;
            at = at.saturating_add(8);
        }
    }

    fn is_used(&self, block: u64) -> bool {
        word(&self.used_after, block / 64) >> (block % 64) & 1 == 1
    }

    /// Continues the search for free blocks at `block`, or the next cluster.
    pub(crate) fn search_from(&mut self, block: u64) {
        self.cursor = block.checked_next_multiple_of(self.ratio).unwrap_or(block);
    }

    /// Allocates up to `want` adjacent free blocks.
    pub(crate) fn allocate(&mut self, want: u64) -> Option<Range<u64>> {
        let start = self.next_free(self.cursor).or_else(|| self.next_free(0))?;
        let most = start.saturating_add(want.max(1)).min(self.end);
        let end = self.next_busy(start).unwrap_or(self.end).min(most);
        self.mark_used(start..end);
        self.search_from(end);
        Some(start..end)
    }

    /// Allocates `blocks` blocks for the log, from the end; `None` if there are too few.
    pub(crate) fn allocate_log(&mut self, mut blocks: u64) -> Option<Vec<Range<u64>>> {
        let mut room: Vec<Range<u64>> = vec![];
        let mut at = self.end;
        // The log gets all of its first cluster.
        while blocks > 0 || at < self.end && self.cluster_start(at) != at {
            at = at.checked_sub(1)?;
            if word(&self.unavailable, at / 64) == u64::MAX && at % 64 == 63 {
                at = at.saturating_sub(63);
                continue;
            }
            if word(&self.unavailable, at / 64) >> (at % 64) & 1 == 1 {
                continue;
            }
            fill(&mut self.unavailable, at..at.saturating_add(1), true);
            blocks = blocks.saturating_sub(1);
            match room.last_mut() {
                Some(last) if last.start == at.saturating_add(1) => last.start = at,
                _ => room.push(at..at.saturating_add(1)),
            }
        }
        Some(room)
    }

    /// Returns the first block of a block's cluster.
    fn cluster_start(&self, block: u64) -> u64 {
        block.saturating_sub(block.checked_rem(self.ratio).unwrap_or(0))
    }

    /// Rounds a range to whole clusters, clipped to the end.
    fn clip(&self, blocks: Range<u64>) -> Range<u64> {
        if blocks.is_empty() {
            return 0..0;
        }
        let end = blocks.end.checked_next_multiple_of(self.ratio).unwrap_or(self.end);
        self.cluster_start(blocks.start).min(self.end)..end.min(self.end)
    }

    fn next_free(&self, from: u64) -> Option<u64> {
        next(&self.unavailable, from, u64::MAX).filter(|at| *at < self.end)
    }

    fn next_busy(&self, from: u64) -> Option<u64> {
        next(&self.unavailable, from, 0)
    }
}

fn word(words: &[u64], nth: u64) -> u64 {
    words.get(saturating_usize(nth)).copied().unwrap_or(0)
}

/// Returns the first bit from `from` on that is set after XOR with `flip`.
fn next(words: &[u64], from: u64, flip: u64) -> Option<u64> {
    let first = from / 64;
    let mut mask = u64::MAX << (from % 64);
    for (nth, word) in (first..).zip(words.get(saturating_usize(first)..)?) {
        let found = (word ^ flip) & mask;
        if found != 0 {
            return Some(nth.saturating_mul(64).saturating_add(found.trailing_zeros().into()));
        }
        mask = u64::MAX;
    }
    None
}

fn fill(words: &mut [u64], blocks: Range<u64>, value: bool) {
    let mut at = blocks.start;
    while at < blocks.end {
        let shift = at % 64;
        let len = blocks.end.saturating_sub(at).min(64u64.saturating_sub(shift));
        let mask = u64::MAX >> 64u64.saturating_sub(len) << shift;
        if let Some(word) = words.get_mut(saturating_usize(at / 64)) {
            *word = if value { *word | mask } else { *word & !mask };
        }
        at = at.saturating_add(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range_bounds(room: Option<Vec<Range<u64>>>) -> Vec<(u64, u64)> {
        room.unwrap().into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn allocated_blocks_were_free_and_become_used() {
        let mut space = BlockUsage::new(300, 1);
        space.mark_used(0..100);
        space.mark_used(110..290);
        space.release(20..30);
        assert_eq!(space.allocate(4), Some(100..104));
        assert_eq!(range_bounds(space.allocate_log(3)), [(297, 300)]);
        assert_eq!(space.allocate(100), Some(104..110));
        assert_eq!(space.allocate(100), Some(290..297));
        assert_eq!(space.allocate(1), None);
        let mut bytes = [0; 4];
        space.copy_bits(16, 40, &mut bytes);
        assert_eq!(bytes, [0x0F, 0xC0, 0xFF, 0xFF]);
        assert_eq!(space.allocate_log(1), None);
    }

    #[test]
    fn log_space_is_found_from_end_across_words() {
        let mut space = BlockUsage::new(256, 1);
        space.mark_used(64..256);
        assert_eq!(range_bounds(space.allocate_log(2)), [(62, 64)]);
        assert_eq!(space.allocate(100), Some(0..62));
    }

    #[test]
    fn clusters_are_allocated_and_released_whole() {
        let mut space = BlockUsage::new(60, 16);
        space.mark_used(3..5);
        space.release(33..34);
        assert_eq!(range_bounds(space.allocate_log(13)), [(32, 60)]);
        assert_eq!((space.allocate(10), space.allocate(1)), (Some(16..26), None));
        space.release(20..21);
        let mut bytes = [0; 2];
        space.copy_bits(0, 60, &mut bytes);
        assert_eq!(bytes, [0xF1, 0xFF]);
    }
}
