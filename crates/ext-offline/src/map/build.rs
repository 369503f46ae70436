//! Construction of ext2 block maps: indirect blocks before the data they reference.
//!
//! ```text
//!   order   d d d .. (12) | I1 d d d .. | I2 I1 d d .. I1 d d .. | I3 I2 I1 d ..
//! ```
//! With rising block numbers, the result is read sequentially.

use super::pointers::{IndirectPath, block_to_path};
use crate::format::indirect::{addresses_per_block, set_pointer_at};
use crate::format::inode::{DIRECT_POINTERS, POINTERS};
use crate::units::{saturating_u32, saturating_usize};

/// One part of a new map, in allocation order.
#[derive(Debug)]
pub(crate) enum MapPart {
    /// An indirect block with its pointers, or an extent-tree node.
    Indirect { at: u64, pointers: Vec<u8> },
    /// Data blocks, from file block `from` on.
    Data { at: u64, from: u32, blocks: u32 },
}

/// A map that is ready to be written.
#[derive(Debug, Default)]
pub(crate) struct BuiltMap {
    /// Pointers in the inode.
    pub(crate) pointers: [u32; POINTERS],
    /// All other parts, in allocation order.
    pub(crate) parts: Vec<MapPart>,
}

/// An indirect block that is being filled: inode slot, index on its level, and index in the parts.
#[derive(Clone, Copy, PartialEq, Eq)]
struct OpenIndirectBlock {
    slot: usize,
    nth: u64,
    part: usize,
}

/// Returns the indirect blocks of a file with data in `runs` (first block, count; rising).
#[allow(clippy::arithmetic_side_effects, reason = "a pointer spans a block or more")]
pub(crate) fn indirect_blocks(runs: &[(u32, u32)], block_bytes: u32) -> u64 {
    let fan_out = addresses_per_block(block_bytes);
    let mut count = 0u64;
    let mut start = u64::from(DIRECT_POINTERS);
    for levels in 1..=3u32 {
        let end = start.saturating_add(fan_out.saturating_pow(levels));
        for depth in 1..=levels {
            let span = fan_out.saturating_pow(depth);
            let mut last = None;
            for &(from, blocks) in runs {
                let low = u64::from(from).max(start);
                let high = u64::from(from).saturating_add(blocks.into()).min(end);
                if low >= high {
                    continue;
                }
                let (first, final_) = (
                    low.saturating_sub(start) / span,
                    high.saturating_sub(1).saturating_sub(start) / span,
                );
                count = count.saturating_add(
                    final_.saturating_sub(first).saturating_add(u64::from(last != Some(first))),
                );
                last = Some(final_);
            }
        }
        start = end;
    }
    count
}

/// Builds the map of a file with data in `runs` (first block, count; rising), with block numbers
/// from `next`; `None` if those run out or a block exceeds the map's reach.
pub(crate) fn build_indirect_map(
    runs: &[(u32, u32)],
    block_bytes: u32,
    next: &mut impl FnMut() -> Option<u32>,
) -> Option<BuiltMap> {
    let mut map = MapBuilder { built: BuiltMap::default(), block_bytes, open: [None; 3] };
    for &(from, blocks) in runs {
        for at in from..from.checked_add(blocks)? {
            map.map_block(at, next)?;
        }
    }
    Some(map.built)
}

struct MapBuilder {
    built: BuiltMap,
    block_bytes: u32,
    /// Open indirect block of each depth; the first is the deepest.
    open: [Option<OpenIndirectBlock>; 3],
}

impl MapBuilder {
    #[allow(clippy::arithmetic_side_effects, reason = "a block holds pointers")]
    fn map_block(&mut self, at: u32, next: &mut impl FnMut() -> Option<u32>) -> Option<()> {
        let fan_out = addresses_per_block(self.block_bytes);
        let IndirectPath { slot, levels, offset } = block_to_path(at.into(), fan_out)?;
        let mut above = None;
        for depth in (1..=levels).rev() {
            let nth = offset / fan_out.saturating_pow(depth);
            let kept = self.open.get_mut(saturating_usize(u64::from(depth.saturating_sub(1))))?;
            if let Some(open) = kept.filter(|open| (open.slot, open.nth) == (slot, nth)) {
                above = Some(open.part);
                continue;
            }
            let block = next()?;
            let part = self.built.parts.len();
            *kept = Some(OpenIndirectBlock { slot, nth, part });
            let pointers = vec![0; saturating_usize(self.block_bytes.into())];
            self.built.parts.push(MapPart::Indirect { at: block.into(), pointers });
            self.write_pointer(slot, above, nth % fan_out, block)?;
            above = Some(part);
        }
        let block = next()?;
        self.write_pointer(slot, above, offset % fan_out, block)?;
        match self.built.parts.last_mut() {
            Some(MapPart::Data { at: start, from, blocks })
                if start.saturating_add(u64::from(*blocks)) == u64::from(block)
                    && from.saturating_add(*blocks) == at =>
            {
                *blocks = blocks.saturating_add(1);
            }
            _ => self.built.parts.push(MapPart::Data { at: block.into(), from: at, blocks: 1 }),
        }
        Some(())
    }

    /// Writes a pointer to the inode or to the indirect block above.
    fn write_pointer(
        &mut self,
        slot: usize,
        above: Option<usize>,
        nth: u64,
        to: u32,
    ) -> Option<()> {
        let Some(part) = above else {
            *self.built.pointers.get_mut(slot)? = to;
            return Some(());
        };
        let MapPart::Indirect { pointers, .. } = self.built.parts.get_mut(part)? else {
            return None;
        };
        set_pointer_at(pointers, nth, to)
    }
}

/// Converts bytes `start..end` of a file to blocks: first and count.
#[allow(clippy::arithmetic_side_effects, reason = "blocks have at least 1,024 bytes")]
pub(crate) fn to_blocks(start: u64, end: u64, block_bytes: u32) -> (u32, u32) {
    let first = start / u64::from(block_bytes);
    let last = end.div_ceil(u64::from(block_bytes));
    (saturating_u32(first), saturating_u32(last.saturating_sub(first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indirect_block_count_matches_build() {
        let edge = 12 + 256 + 65536;
        for runs in [
            vec![],
            vec![(0, 12)],
            vec![(0, 13)],
            vec![(0, 268)],
            vec![(0, 269)],
            vec![(11, 1), (12, 1), (267, 2), (600, 1), (601, 700)],
            vec![(edge - 1, 2), (edge + 300, 1), (edge + 70_000, 400)],
            vec![(0, 5000)],
        ] {
            let mut taken = 99;
            let built = build_indirect_map(&runs, 1024, &mut || {
                taken += 1;
                Some(taken)
            })
            .unwrap();
            let indirect =
                built.parts.iter().filter(|part| matches!(part, MapPart::Indirect { .. })).count();
            assert_eq!(indirect_blocks(&runs, 1024), indirect as u64, "{runs:?}");
            let data: u32 = runs.iter().map(|run| run.1).sum();
            assert_eq!(taken - 99, data + indirect as u32);
        }
    }

    #[test]
    fn data_follows_its_indirect_block() {
        let mut taken = 99;
        let built = build_indirect_map(&[(11, 3)], 1024, &mut || {
            taken += 1;
            Some(taken)
        })
        .unwrap();
        assert_eq!((built.pointers[11], built.pointers[12]), (100, 101));
        let MapPart::Indirect { at: 101, pointers } = &built.parts[1] else { panic!("{built:?}") };
        assert_eq!(pointers[..8], [102, 0, 0, 0, 103, 0, 0, 0]);
        assert!(matches!(built.parts[2], MapPart::Data { at: 102, from: 12, blocks: 2 }));
        assert!(build_indirect_map(&[(u32::MAX - 1, 1)], 1024, &mut || Some(1)).is_none());
    }

    #[test]
    fn data_parts_end_at_holes_and_jumps() {
        let mut free = [100, 101, 110].into_iter();
        let built = build_indirect_map(&[(0, 1), (3, 2)], 1024, &mut || free.next()).unwrap();
        let parts = built.parts.iter().map(|part| match part {
            MapPart::Data { at, from, blocks } => (*at, *from, *blocks),
            MapPart::Indirect { .. } => panic!("{part:?}"),
        });
        assert_eq!(parts.collect::<Vec<_>>(), [(100, 0, 1), (101, 3, 1), (110, 4, 1)]);
        assert_eq!([to_blocks(1023, 2049, 1024), to_blocks(3072, 4096, 1024)], [(0, 3), (3, 1)]);
    }
}
