//! Placement of each group's bitmaps and inode table, and the free ranges.
//!
//! ```text
//!   without flex   | copies | block bitmap | inode bitmap | inode table | ..
//!   flex groups    | copies | block bitmaps of 16 groups | inode bitmaps | inode tables | ..
//!   packed         like flex groups, with all groups in one
//! ```
//! The tables of a flex group skip structures in their way, such as backups. mke2fs's rules are
//! followed, even the odd ones: a last flex group of one group leaves as much space as a full one.

use std::collections::BTreeMap;

use super::Layout;
use crate::mkfs::{FormatError, Result};

/// Free blocks as ranges.
#[derive(Clone, Debug)]
pub(in crate::mkfs) struct FreeRanges {
    /// End of each range, by its first block.
    free: BTreeMap<u64, u64>,
}

impl FreeRanges {
    fn new(first: u64, end: u64) -> Self {
        Self { free: BTreeMap::from([(first, end)]) }
    }

    /// Trims the ranges to whole clusters of `ratio` blocks.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn trim_to_clusters(mut self, ratio: u64) -> Self {
        if ratio > 1 {
            let whole = |(start, end): (u64, u64)| {
                let (start, end) =
                    (start.next_multiple_of(ratio), (end / ratio).saturating_mul(ratio));
                (start < end).then_some((start, end))
            };
            self.free = self.free.into_iter().filter_map(whole).collect();
        }
        self
    }

    /// Returns the number of ranges.
    pub(in crate::mkfs) fn range_count(&self) -> u64 {
        self.free.len() as u64
    }

    /// Returns the next free range at or behind `at`.
    pub(in crate::mkfs) fn from(&self, at: u64) -> Option<(u64, u64)> {
        if let Some((_, end)) = self.free.range(..=at).next_back()
            && *end > at
        {
            return Some((at, *end));
        }
        self.free.range(at..).next().map(|(start, end)| (*start, *end))
    }

    /// Iterates over the free ranges between two blocks, clipped.
    pub(in crate::mkfs) fn between(&self, from: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self.free.range(..from).next_back();
        let all = first.into_iter().chain(self.free.range(from..end.max(from)));
        all.map(move |(start, stop)| ((*start).max(from), (*stop).min(end)))
            .filter(|(start, stop)| start < stop)
    }

    /// Returns the free blocks between two blocks.
    pub(in crate::mkfs) fn free_in(&self, from: u64, end: u64) -> u64 {
        self.between(from, end).map(|(start, end)| end.saturating_sub(start)).sum()
    }

    /// Returns the first block in `from..before` where `blocks` blocks are free.
    fn first_fit(&self, from: u64, before: u64, blocks: u64) -> Option<u64> {
        let first = self.free.range(..from).next_back();
        let mut all = first.into_iter().chain(self.free.range(from..before.max(from)));
        let fit = all.find_map(|(start, end)| {
            let start = (*start).max(from);
            (start.saturating_add(blocks) <= *end).then_some(start)
        });
        fit.filter(|start| *start < before)
    }

    /// Allocates `blocks` blocks; `None` if they are not free.
    pub(in crate::mkfs) fn allocate_at(&mut self, from: u64, blocks: u64) -> Option<()> {
        let end = from.saturating_add(blocks);
        let (start, stop) = self.free.range(..=from).next_back().map(|it| (*it.0, *it.1))?;
        if end > stop {
            return None;
        }
        self.free.remove(&start);
        if start < from {
            self.free.insert(start, from);
        }
        if end < stop {
            self.free.insert(end, stop);
        }
        Some(())
    }

    /// Allocates the first free blocks from `goal` on; wraps at the end of the volume.
    pub(in crate::mkfs) fn allocate_from(
        &mut self,
        goal: u64,
        mut blocks: u64,
    ) -> Option<Vec<(u64, u64)>> {
        let mut taken = vec![];
        let mut at = goal;
        while blocks > 0 {
            let (start, end) = self.from(at).or_else(|| self.from(0))?;
            let count = blocks.min(end.saturating_sub(start));
            self.allocate_at(start, count)?;
            taken.push((start, count));
            blocks = blocks.saturating_sub(count);
            at = start.saturating_add(count);
        }
        Some(taken)
    }
}

/// Locations of a group's bitmaps and inode table.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::mkfs) struct GroupTables {
    pub(in crate::mkfs) blocks: u64,
    pub(in crate::mkfs) inodes: u64,
    pub(in crate::mkfs) table: u64,
}

/// Places the tables of all groups; returns them with the free ranges.
///
/// # Errors
/// [`FormatError::NoTables`] if the tables of a flex group do not fit.
pub(in crate::mkfs) fn place_tables(layout: &Layout) -> Result<(Vec<GroupTables>, FreeRanges)> {
    let super_ = &layout.super_;
    let mut space = FreeRanges::new(super_.first_data_block.into(), super_.blocks);
    for group in 0..super_.groups {
        let copies = layout.backup_blocks(group);
        if copies > 0 {
            space.allocate_at(layout.group_start(group), copies).ok_or(FormatError::NoTables)?;
        }
    }
    let mut placing = TablePlacer {
        layout,
        space,
        groups_per_flex: layout.options.groups_per_flex(),
        table: u64::from(super_.inode_table_blocks()),
        all: Vec::with_capacity(crate::units::saturating_usize(super_.groups.into())),
    };
    let placed = match (placing.groups_per_flex, layout.options.packed_meta_blocks) {
        (1, _) => (0..super_.groups).try_for_each(|group| placing.place_in_group(group)),
        (_, true) => placing.place_packed(),
        (_, false) => (0..super_.groups).try_for_each(|group| placing.place_in_flex_group(group)),
    };
    placed.ok_or(FormatError::NoTables)?;
    // Tables may start at any block, and share clusters with their neighbours.
    Ok((placing.all, placing.space.trim_to_clusters(layout.cluster_blocks())))
}

struct TablePlacer<'a> {
    layout: &'a Layout,
    space: FreeRanges,
    groups_per_flex: u32,
    /// Blocks of an inode table.
    table: u64,
    all: Vec<GroupTables>,
}

impl TablePlacer<'_> {
    /// Places the tables in the group itself.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn place_in_group(&mut self, group: u32) -> Option<()> {
        let (start, last) =
            (self.layout.group_start(group), self.layout.group_end(group).saturating_sub(1));
        let mut from = start;
        let stride = u64::from(self.layout.options.stride);
        if stride > 0 {
            // Bitmaps of adjacent groups go to different disks of a RAID.
            let first = self.space.first_fit(start, last, 1)?.saturating_add(self.table);
            from = first.saturating_add(
                stride * u64::from(group) % (last + 1).saturating_sub(first).max(1),
            );
            if from >= last {
                from = start;
            }
        }
        let mut one = |from: u64| {
            let fit = self.space.first_fit(from, last, 1);
            let at = fit.or_else(|| self.space.first_fit(start, last, 1))?;
            self.space.allocate_at(at, 1)?;
            Some(at)
        };
        let (blocks, inodes) = (one(from)?, one(from)?);
        let table = self.space.first_fit(start, last, self.table)?;
        self.space.allocate_at(table, self.table)?;
        self.all.push(GroupTables { blocks, inodes, table });
        Some(())
    }

    /// Places the tables next to those of the other groups of its flex group.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn place_in_flex_group(&mut self, group: u32) -> Option<()> {
        let nth = group % self.groups_per_flex;
        let before = self.all.last().copied().filter(|_| nth > 0);
        let last = (group | self.groups_per_flex.saturating_sub(1))
            .min(self.layout.super_.groups.saturating_sub(1));
        let rest = u64::from(last.saturating_sub(group).saturating_add(1));
        let gap = match last % self.groups_per_flex {
            others if last == self.layout.super_.groups.saturating_sub(1) && others > 0 => {
                u64::from(others) + 1
            }
            _ => u64::from(self.groups_per_flex),
        };
        let blocks =
            self.allocate_table(group, before.map(|it| it.blocks.saturating_add(1)), rest, 1)?;
        let next = before.map_or(blocks.saturating_add(gap), |it| it.inodes.saturating_add(1));
        let inodes = self.allocate_table(group, Some(next), rest, 1)?;
        let next =
            before.map_or(inodes.saturating_add(gap), |it| it.table.saturating_add(self.table));
        let table = self.allocate_table(group, Some(next), rest, self.table)?;
        self.all.push(GroupTables { blocks, inodes, table });
        Some(())
    }

    /// Allocates a bitmap or table of `blocks`, of which `rest` remain: near `next`, or where all
    /// fit, or where one fits.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn allocate_table(
        &mut self,
        group: u32,
        next: Option<u64>,
        rest: u64,
        blocks: u64,
    ) -> Option<u64> {
        let super_ = &self.layout.super_;
        // Limit of the contiguous space searched for.
        let most = u64::from(super_.blocks_per_group / 4);
        let together = rest.saturating_mul(blocks).min(most);
        let first = self.layout.group_start(group.saturating_sub(group % self.groups_per_flex));
        let last =
            (group | self.groups_per_flex.saturating_sub(1)).min(super_.groups.saturating_sub(1));
        let end = self.layout.group_end(last).saturating_sub(1);
        let near = next.filter(|next| *next < super_.blocks);
        let near =
            near.and_then(|next| self.space.first_fit(next, next.saturating_add(together), blocks));
        let at = near
            .or_else(|| self.space.first_fit(first, end, together))
            .or_else(|| self.space.first_fit(first, end, blocks))
            .or_else(|| self.space.first_fit(0, end, blocks))?;
        self.space.allocate_at(at, blocks)?;
        Some(at)
    }

    /// Places one kind of table after the other, from the start of the volume.
    fn place_packed(&mut self) -> Option<()> {
        let (groups, end) = (self.layout.super_.groups, self.layout.super_.blocks);
        let mut at = 0;
        let mut next = |space: &mut FreeRanges, blocks: u64| {
            at = space.first_fit(at, end, blocks)?;
            space.allocate_at(at, blocks)?;
            Some(at)
        };
        for _ in 0..groups {
            let blocks = next(&mut self.space, 1)?;
            self.all.push(GroupTables { blocks, ..GroupTables::default() });
        }
        for tables in &mut self.all {
            tables.inodes = next(&mut self.space, 1)?;
        }
        for tables in &mut self.all {
            tables.table = next(&mut self.space, self.table)?;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_is_what_was_not_allocated() {
        let mut space = FreeRanges::new(1, 100);
        assert!(space.allocate_at(10, 20).is_some() && space.allocate_at(29, 1).is_none());
        assert_eq!(space.from(0), Some((1, 10)));
        assert_eq!(space.from(9), Some((9, 10)));
        assert_eq!(space.from(10), Some((30, 100)));
        assert_eq!(space.from(100), None);
        assert_eq!(space.between(5, 40).collect::<Vec<_>>(), [(5, 10), (30, 40)]);
        assert_eq!((space.free_in(0, 200), space.range_count()), (79, 2));
        assert_eq!(space.first_fit(0, 100, 20), Some(30));
        assert_eq!(space.first_fit(5, 100, 5), Some(5));
        assert_eq!(space.first_fit(6, 30, 5), None);
        assert_eq!(space.allocate_from(95, 10), Some(vec![(95, 5), (1, 5)]));
        assert_eq!(space.allocate_from(0, 70), None);
    }
}
