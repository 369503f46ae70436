//! Construction of extent trees, bottom-up: few extents, full nodes.
//!
//! ```text
//!   allocation     data d d d d .. | leaf leaf .. | node ..      (no node if the inode suffices)
//! ```

use super::build::{BuiltMap, MapPart};
use crate::FsBlock;
use crate::format::extent::{self, ENTRY_BYTES, Extent, ExtentIndex, INIT_MAX_LEN, ROOT_ENTRIES};
use crate::format::inode::POINTERS;
use crate::units::saturating_usize;

/// Contiguous device blocks: first and count.
pub(crate) type DiskRun = (u64, u64);

/// Returns the nodes below the root for so many extents.
pub(crate) fn nodes_needed(extents: u64, block_bytes: u32) -> u64 {
    let room = u64::from(extent::max_entries_in_block(block_bytes));
    let (mut entries, mut nodes) = (extents, 0u64);
    while entries > ROOT_ENTRIES.into() {
        entries = entries.div_ceil(room);
        nodes = nodes.saturating_add(entries);
    }
    nodes
}

/// Returns the nodes below the root for a file with data in `runs` (first block, count; rising), if
/// each is contiguous on the disk.
pub(crate) fn min_nodes(runs: &[(u32, u32)], block_bytes: u32) -> u64 {
    nodes_needed(runs.iter().map(|run| u64::from(run.1.div_ceil(INIT_MAX_LEN))).sum(), block_bytes)
}

/// Returns the extents of a file with data in `runs`, stored in `places` (first block, count) in
/// this order, and the unused rest of the places; `None` if they are too few.
pub(crate) fn extents_of_runs(
    runs: &[(u32, u32)],
    places: &[DiskRun],
) -> Option<(Vec<Extent>, Vec<DiskRun>)> {
    let mut extents: Vec<Extent> = vec![];
    let mut places = places.iter().copied();
    let mut place = (0, 0);
    for &(from, blocks) in runs {
        let (mut from, mut blocks) = (from, blocks);
        while blocks > 0 {
            if place.1 == 0 {
                place = places.next()?;
                continue;
            }
            let here = u32::try_from(place.1).unwrap_or(u32::MAX).min(blocks);
            let count = append_extent(&mut extents, from, here, place.0);
            place = (place.0.saturating_add(count.into()), place.1.saturating_sub(count.into()));
            (from, blocks) = (from.saturating_add(count), blocks.saturating_sub(count));
        }
    }
    let rest = std::iter::once(place).chain(places).filter(|place| place.1 > 0);
    Some((extents, rest.collect()))
}

/// Adds as many of `blocks` as fit into the last extent or a new one; returns how many.
fn append_extent(extents: &mut Vec<Extent>, from: u32, blocks: u32, start: u64) -> u32 {
    if let Some(last) = extents.last_mut()
        && last.end() == u64::from(from)
        && last.start.0.saturating_add(last.blocks.into()) == start
        && last.blocks < INIT_MAX_LEN
    {
        let count = blocks.min(INIT_MAX_LEN.saturating_sub(last.blocks));
        last.blocks = last.blocks.saturating_add(count);
        return count;
    }
    let blocks = blocks.min(INIT_MAX_LEN);
    extents.push(Extent { from, blocks, start: FsBlock(start), is_unwritten: false });
    blocks
}

/// Builds the map of a file with data in `runs` (first block, count; rising): data in the first of
/// `places` (first block, count), then the nodes. `None` if the places are too few. The nodes have
/// no checksums yet.
pub(crate) fn build_extent_map(
    runs: &[(u32, u32)],
    block_bytes: u32,
    places: &[DiskRun],
) -> Option<BuiltMap> {
    let (extents, rest) = extents_of_runs(runs, places)?;
    let mut built = BuiltMap::default();
    for extent in &extents {
        built.parts.push(MapPart::Data {
            at: extent.start.0,
            from: extent.from,
            blocks: extent.blocks,
        });
    }
    let mut rest = rest.into_iter().flat_map(|(start, count)| start..start.saturating_add(count));
    let (pointers, nodes) = build_extent_tree(&extents, block_bytes, &mut rest)?;
    built.pointers = pointers;
    built.parts.extend(nodes.into_iter().map(|(at, pointers)| MapPart::Indirect { at, pointers }));
    Some(built)
}

/// A root, and the blocks of the nodes below it.
pub(crate) type ExtentTree = ([u32; POINTERS], Vec<(u64, Vec<u8>)>);

/// Builds the tree of these extents with full nodes, without checksums, in blocks of `places`;
/// `None` if those are too few.
pub(crate) fn build_extent_tree(
    extents: &[Extent],
    block_bytes: u32,
    places: &mut dyn Iterator<Item = u64>,
) -> Option<ExtentTree> {
    let room = extent::max_entries_in_block(block_bytes);
    let mut nodes = vec![];
    let mut entries: Vec<(u32, [u8; ENTRY_BYTES])> =
        extents.iter().map(|extent| (extent.from, extent.encode())).collect();
    let mut depth = 0;
    while entries.len() > ROOT_ENTRIES.into() {
        let mut above = vec![];
        for part in entries.chunks(room.into()) {
            let at = places.next()?;
            let from = part.first()?.0;
            let mut bytes = vec![0; saturating_usize(block_bytes.into())];
            extent::write_node(&mut bytes, depth, room, &encoded_entries(part));
            nodes.push((at, bytes));
            above.push((from, ExtentIndex { from, node: FsBlock(at) }.encode()));
        }
        entries = above;
        depth = depth.saturating_add(1);
    }
    let mut root = [0; POINTERS * 4];
    extent::write_node(&mut root, depth, ROOT_ENTRIES, &encoded_entries(&entries));
    let mut words = root.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    Some((std::array::from_fn(|_| words.next().unwrap_or(0)), nodes))
}

fn encoded_entries(entries: &[(u32, [u8; ENTRY_BYTES])]) -> Vec<[u8; ENTRY_BYTES]> {
    entries.iter().map(|entry| entry.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::extent::ExtentNode;

    fn extent(from: u32, blocks: u32, start: u64) -> Extent {
        Extent { from, blocks, start: FsBlock(start), is_unwritten: false }
    }

    #[test]
    fn adjacent_runs_become_one_extent() {
        let runs = [(0, 10), (10, 5), (20, 40_000)];
        let places = [(100, 8), (108, 7), (115, 40_000), (1 << 40, 3)];
        let (found, rest) = extents_of_runs(&runs, &places).unwrap();
        let expected =
            [extent(0, 15, 100), extent(20, 32_768, 115), extent(32_788, 7_232, 115 + 32_768)];
        assert_eq!(found, expected);
        assert_eq!(rest, [(1 << 40, 3)]);
        assert!(extents_of_runs(&[(0, 11)], &[(5, 10)]).is_none());
        assert_eq!(extents_of_runs(&[], &[]), Some((vec![], vec![])));
    }

    #[test]
    fn extent_tree_has_predicted_nodes() {
        for count in [0u32, 1, 4, 5, 84, 85, 84 * 4, 84 * 4 + 1, 40_000] {
            let runs: Vec<(u32, u32)> = (0..count).map(|nth| (nth * 2, 1)).collect();
            let nodes = min_nodes(&runs, 1024);
            let places = [(1000, u64::from(count) + nodes)];
            let built = build_extent_map(&runs, 1024, &places).unwrap();
            let data = |part: &MapPart| matches!(part, MapPart::Data { .. });
            assert_eq!(built.parts.iter().filter(|part| !data(part)).count() as u64, nodes);
            let root: Vec<u8> = built.pointers.iter().flat_map(|word| word.to_le_bytes()).collect();
            let mut level = vec![(root, None)];
            let mut found = vec![];
            while let Some((bytes, depth)) = level.pop() {
                let node = ExtentNode::check(&bytes, depth).unwrap();
                if node.depth == 0 {
                    found.extend(node.extents().map(|extent| extent.from));
                    continue;
                }
                for index in (0..node.len()).rev().filter_map(|nth| node.index(nth)) {
                    let below = built.parts.iter().find_map(|part| match part {
                        MapPart::Indirect { at, pointers } if *at == index.node.0 => Some(pointers),
                        _ => None,
                    });
                    level.push((below.unwrap().clone(), Some(node.depth - 1)));
                }
            }
            assert!(found.iter().copied().eq(runs.iter().map(|run| run.0)), "{count}");
            if nodes > 0 {
                assert!(
                    build_extent_map(&runs, 1024, &[(1000, u64::from(count) + nodes - 1)])
                        .is_none()
                );
            }
        }
    }
}
