//! Blocks where searches for space begin.

use crate::mkfs::layout::Layout;
use crate::mkfs::layout::tables::FreeRanges;

/// Returns the block where the search for journal space begins. With extents this is the emptiest
/// group near the middle of the volume; without them it is the start of the volume.
pub(super) fn journal_goal(layout: &Layout, space: &FreeRanges) -> u64 {
    let options = &layout.options;
    if !options.has_extents() {
        return 0;
    }
    if options.packed_meta_blocks && options.groups_per_flex() > 1 {
        return options.journal.at.unwrap_or(0);
    }
    if let Some(at) = options.journal.at {
        return at;
    }
    let groups = layout.super_.groups;
    let first_data_block = u64::from(layout.super_.first_data_block);
    let middle = layout.group_of(layout.super_.blocks.saturating_sub(first_data_block) / 2);
    let free = |group: u32| space.free_in(layout.group_start(group), layout.group_end(group));
    let flex = options.groups_per_flex();
    let start = if flex > 1 && middle > flex {
        let first = middle & !flex.saturating_sub(1);
        (first..groups).find(|group| free(*group) > 0).unwrap_or(0)
    } else {
        middle.saturating_sub(1)
    };
    let end =
        if flex > 1 && middle > flex { start.saturating_add(1) } else { middle.saturating_add(1) };
    let mut best = start;
    for group in start.saturating_add(1)..=end.min(groups.saturating_sub(1)) {
        if free(group) > free(best) {
            best = group;
        }
    }
    layout.group_start(best)
}
