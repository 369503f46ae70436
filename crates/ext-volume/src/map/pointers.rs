//! Block maps of ext2: twelve direct pointers, then trees of one, two and three levels.
//!
//! ```text
//!   file block   0 .. 11 | one level | two levels  | three levels
//!   i_block      [0..12]   [12]        [13]          [14]          each level: block / 4 pointers
//! ```
//! Law: a walk is at most three blocks deep, whatever the pointers say, and visits no more indirect
//! blocks than a file of the requested length can have.

use std::ops::{ControlFlow, Range};

use super::{BlockLocation, BlockMap, MapNode, MapSource, MapVisitor};
use crate::blocks::role::Role;
use crate::format::indirect::{addresses_per_block, pointer_at, pointers};
use crate::format::inode::{DIRECT_POINTERS, POINTERS};
use crate::units::saturating_usize;
use crate::{FileId, FsBlock, Result};

/// Location of a pointer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PointerLocation {
    /// Index in the inode.
    Inode(usize),
    /// Indirect block and index.
    Block(FsBlock, u64),
}

/// Path to the pointer of a file block.
pub struct IndirectPath {
    /// Index of the pointer in the inode.
    pub slot: usize,
    /// Levels of indirect blocks below it: 0 to 3.
    pub levels: u32,
    /// Index of the block within that tree.
    pub offset: u64,
}

/// Returns the levels of indirect blocks below a pointer of the inode.
fn levels_below(slot: usize) -> u32 {
    [1, 2, 3].into_iter().find(|levels| inode_slot_for_levels(*levels) == slot).unwrap_or(0)
}

/// Returns the index of the inode pointer with so many levels below it.
pub(crate) fn inode_slot_for_levels(levels: u32) -> usize {
    saturating_usize(u64::from(DIRECT_POINTERS).saturating_add(levels.into()).saturating_sub(1))
}

/// Returns the file blocks that a pointer with so many levels covers.
fn span_blocks(levels: u32, fan_out: u64) -> u64 {
    fan_out.saturating_pow(levels)
}

/// Returns the path to the pointer of file block `at`; `None` beyond the map's reach.
pub fn block_to_path(at: u64, fan_out: u64) -> Option<IndirectPath> {
    let Some(mut offset) = at.checked_sub(u64::from(DIRECT_POINTERS)) else {
        return Some(IndirectPath { slot: saturating_usize(at), levels: 0, offset: 0 });
    };
    for levels in 1..=3u32 {
        let reach = span_blocks(levels, fan_out);
        if offset < reach {
            return Some(IndirectPath { slot: inode_slot_for_levels(levels), levels, offset });
        }
        offset = offset.checked_sub(reach)?;
    }
    None
}

/// Returns the file blocks that a map can reach.
pub fn max_mapped_blocks(block_bytes: u32) -> u64 {
    let trees = (1..=3).map(|levels| span_blocks(levels, addresses_per_block(block_bytes)));
    trees.fold(u64::from(DIRECT_POINTERS), u64::saturating_add)
}

/// The pointers of an inode, as the root of its map.
#[derive(Clone, Copy, Debug)]
pub struct Pointers<'a>(pub &'a [u32; POINTERS]);

impl BlockMap for Pointers<'_> {
    fn role(&self, file: FileId) -> Role {
        Role::IndirectBlock(file)
    }

    fn walk(
        &self,
        source: &MapSource<'_>,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()> {
        walk(self.0, source, range, visit)
    }
}

/// A walk over the part of a map in `range`.
struct IndirectWalk<'a> {
    source: &'a MapSource<'a>,
    range: Range<u64>,
    visit: &'a mut dyn MapVisitor,
}

fn walk(
    pointers: &[u32; POINTERS],
    source: &MapSource<'_>,
    range: Range<u64>,
    visit: &mut dyn MapVisitor,
) -> Result<()> {
    let fan_out = addresses_per_block(source.block_bytes);
    let mut walk = IndirectWalk { source, range, visit };
    let mut first = u64::from(DIRECT_POINTERS);
    let direct = walk.range.start..walk.range.end.min(first);
    if walk.visit_direct_pointers(pointers.iter().copied(), 0, direct).is_break() {
        return Ok(());
    }
    for (slot, pointer) in pointers.iter().enumerate().skip(saturating_usize(first)) {
        let levels = levels_below(slot);
        if walk
            .walk_indirect_block(*pointer, levels, first, PointerLocation::Inode(slot))?
            .is_break()
        {
            return Ok(());
        }
        first = first.saturating_add(span_blocks(levels, fan_out));
    }
    // Blocks beyond the map's reach are damage.
    let rest = walk.range.end.saturating_sub(first.max(walk.range.start));
    if rest > 0 {
        let _ = walk.visit.visit_run(
            first.max(walk.range.start),
            rest,
            BlockLocation::Damaged(FsBlock(0)),
        );
    }
    Ok(())
}

impl IndirectWalk<'_> {
    /// Visits a pointer to an indirect block, which covers file blocks from `first` on; at most
    /// three deep.
    fn walk_indirect_block(
        &mut self,
        pointer: u32,
        levels: u32,
        first: u64,
        at: PointerLocation,
    ) -> Result<ControlFlow<()>> {
        let fan_out = addresses_per_block(self.source.block_bytes);
        let end = first.saturating_add(span_blocks(levels, fan_out));
        let (from, to) = (first.max(self.range.start), end.min(self.range.end));
        let Some(blocks) = to.checked_sub(from).filter(|blocks| *blocks > 0) else {
            return Ok(ControlFlow::Continue(()));
        };
        let block = match FsBlock(pointer.into()) {
            FsBlock(0) => return Ok(self.visit.visit_run(from, blocks, BlockLocation::Hole)),
            block if self.source.blocks.contains(&block.0) => block,
            block => return Ok(self.visit.visit_run(from, blocks, BlockLocation::Damaged(block))),
        };
        let below = levels.saturating_sub(1);
        if !self.visit.visit_node(MapNode { block, pointer: at }) {
            return Ok(ControlFlow::Continue(()));
        }
        let Some(bytes) = (self.source.read)(block)? else {
            return Ok(self.visit.visit_run(from, blocks, BlockLocation::Damaged(block)));
        };
        if below == 0 {
            return Ok(self.visit_direct_pointers(pointers(&bytes), first, from..to));
        }
        let span = span_blocks(below, fan_out);
        let nth_of = |at: u64| at.saturating_sub(first).checked_div(span).unwrap_or(0);
        for nth in nth_of(from)..=nth_of(to.saturating_sub(1)) {
            let child = first.saturating_add(nth.saturating_mul(span));
            let at = PointerLocation::Block(block, nth);
            if self.walk_indirect_block(pointer_at(&bytes, nth), below, child, at)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Visits pointers to file blocks from `first` on; those in `wanted`, merging contiguous ones.
    fn visit_direct_pointers(
        &mut self,
        words: impl Iterator<Item = u32>,
        first: u64,
        wanted: Range<u64>,
    ) -> ControlFlow<()> {
        let mut words = words.skip(saturating_usize(wanted.start.saturating_sub(first)));
        let (mut from, mut blocks, mut place) = (wanted.start, 0u64, BlockLocation::Hole);
        for at in wanted {
            let next = match FsBlock(words.next().unwrap_or(0).into()) {
                FsBlock(0) => BlockLocation::Hole,
                block if self.source.blocks.contains(&block.0) => BlockLocation::Mapped(block),
                block => BlockLocation::Damaged(block),
            };
            let joins = match (place, next) {
                (BlockLocation::Hole, BlockLocation::Hole) => true,
                (BlockLocation::Mapped(start), BlockLocation::Mapped(block)) => {
                    start.offset(blocks) == block
                }
                _ => false,
            };
            if !joins {
                if blocks > 0 && self.visit.visit_run(from, blocks, place).is_break() {
                    return ControlFlow::Break(());
                }
                (from, blocks, place) = (at, 0, next);
            }
            blocks = blocks.saturating_add(1);
        }
        match blocks {
            0 => ControlFlow::Continue(()),
            _ => self.visit.visit_run(from, blocks, place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indirect_levels_begin_at_format_boundaries() {
        let of = |at| block_to_path(at, 256).map(|path| (path.slot, path.levels, path.offset));
        assert_eq!(of(11), Some((11, 0, 0)));
        assert_eq!(of(12), Some((12, 1, 0)));
        assert_eq!(of(12 + 255), Some((12, 1, 255)));
        assert_eq!(of(12 + 256), Some((13, 2, 0)));
        assert_eq!(of(12 + 256 + 65536), Some((14, 3, 0)));
        assert_eq!(of(12 + 256 + 65536 + (1 << 24) - 1), Some((14, 3, (1 << 24) - 1)));
        assert_eq!(of(12 + 256 + 65536 + (1 << 24)), None);
        assert_eq!(max_mapped_blocks(1024), 12 + 256 + 65536 + (1 << 24));
    }

    /// Pointers to blocks after the range are not looked at: one here is outside the volume.
    #[test]
    fn walk_ends_with_its_range() {
        struct Visited(Vec<(u64, u64, BlockLocation)>);
        impl MapVisitor for Visited {
            fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
                self.0.push((at, blocks, place));
                ControlFlow::Continue(())
            }
        }
        let mut pointers = [0; POINTERS];
        (pointers[11], pointers[12]) = (15, 99);
        let source = MapSource { block_bytes: 1024, blocks: 10..20, read: &|_| Ok(None) };
        let mut seen = Visited(vec![]);
        walk(&pointers, &source, 11..12, &mut seen).unwrap();
        assert_eq!(seen.0, [(11, 1, BlockLocation::Mapped(FsBlock(15)))]);
    }
}
