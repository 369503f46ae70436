//! Changes of the sorted extents of a leaf, in memory.

use std::ops::Range;

use crate::format::extent::{Extent, INIT_MAX_LEN};
use crate::units::saturating_u32;

/// Removes `range` from extents, and passes the removed parts to `gone`.
pub(super) fn remove_range(
    leaf: &mut Vec<Extent>,
    range: &Range<u64>,
    gone: &mut dyn FnMut(Extent),
) {
    let mut left = Vec::with_capacity(leaf.len().saturating_add(1));
    for extent in leaf.drain(..) {
        let (from, end) = (u64::from(extent.from), extent.end());
        let (low, high) = (from.max(range.start), end.min(range.end));
        if low >= high {
            left.push(extent);
            continue;
        }
        let part = |from: u64, end: u64, of: &Extent| Extent {
            from: saturating_u32(from),
            blocks: saturating_u32(end.saturating_sub(from)),
            start: of.start.offset(from.saturating_sub(of.from.into())),
            is_unwritten: of.is_unwritten,
        };
        if from < low {
            left.push(part(from, low, &extent));
        }
        gone(part(low, high, &extent));
        if high < end {
            left.push(part(high, end, &extent));
        }
    }
    *leaf = left;
}

/// Inserts an extent, replacing what it overlaps and merging it with its neighbours.
pub(super) fn insert_extent(leaf: &mut Vec<Extent>, new: Extent) {
    remove_range(leaf, &(u64::from(new.from)..new.end()), &mut |_| ());
    let nth = leaf.partition_point(|extent| extent.from < new.from);
    leaf.insert(nth, new);
    merge_with_previous(leaf, nth.saturating_add(1));
    merge_with_previous(leaf, nth);
}

/// Returns the clusters of extents, each once: first file block, first device block, number of
/// blocks.
#[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
pub(super) fn clusters_of_extents(extents: &[Extent], ratio: u64) -> Vec<(u64, u64, u64)> {
    let mut all: Vec<(u64, u64, u64)> = Vec::with_capacity(extents.len());
    for extent in extents {
        let from = u64::from(extent.from);
        // The extent before may include its first cluster.
        let begun = all.last().map_or(0, |(from, _, blocks)| from.saturating_add(*blocks));
        let first = from.saturating_sub(from % ratio).max(begun);
        let end = extent.end().next_multiple_of(ratio);
        if first < end {
            let start = extent.start.0.saturating_add(first).saturating_sub(from);
            all.push((first, start, end.saturating_sub(first)));
        }
    }
    all
}

/// Merges extent `nth` with the one before, if possible.
fn merge_with_previous(leaf: &mut Vec<Extent>, nth: usize) {
    let Some(before) = nth.checked_sub(1) else { return };
    let (Some(&a), Some(&b)) = (leaf.get(before), leaf.get(nth)) else { return };
    let most = if a.is_unwritten { INIT_MAX_LEN - 1 } else { INIT_MAX_LEN };
    let touches = a.end() == u64::from(b.from)
        && a.start.offset(a.blocks.into()) == b.start
        && a.is_unwritten == b.is_unwritten
        && a.blocks.saturating_add(b.blocks) <= most;
    if touches {
        leaf.remove(nth);
        if let Some(a) = leaf.get_mut(before) {
            a.blocks = a.blocks.saturating_add(b.blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FsBlock;

    fn extent(from: u32, blocks: u32, start: u64) -> Extent {
        Extent { from, blocks, start: FsBlock(start), is_unwritten: false }
    }

    #[test]
    fn extents_are_split_and_merged() {
        let mut leaf = vec![extent(0, 10, 100), extent(20, 10, 200)];
        let mut gone = Vec::new();
        remove_range(&mut leaf, &(5..22), &mut |it| gone.push((it.start.0, it.blocks)));
        assert_eq!(gone, [(105, 5), (200, 2)]);
        assert_eq!(leaf, [extent(0, 5, 100), extent(22, 8, 202)]);
        leaf.insert(1, extent(5, 17, 105));
        merge_with_previous(&mut leaf, 2);
        assert_eq!(leaf.len(), 3, "they do not touch on the device");
        merge_with_previous(&mut leaf, 1);
        assert_eq!(leaf, [extent(0, 22, 100), extent(22, 8, 202)]);
        let mut leaf =
            vec![extent(0, INIT_MAX_LEN - 1, 100), extent(INIT_MAX_LEN - 1, 2, 100 + 32767)];
        merge_with_previous(&mut leaf, 1);
        assert_eq!(leaf.len(), 2, "no extent is longer than the format says");
    }

    #[test]
    fn shared_clusters_are_counted_once() {
        let extents = [extent(1, 2, 101), extent(3, 1, 103), extent(6, 7, 206), extent(14, 1, 214)];
        assert_eq!(clusters_of_extents(&extents, 4), [(0, 100, 4), (4, 204, 12)]);
        let apart = [extent(1, 2, 101), extent(3, 1, 103)];
        assert_eq!(clusters_of_extents(&apart, 1), [(1, 101, 2), (3, 103, 1)]);
    }
}
