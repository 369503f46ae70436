//! Where the structures of a group must lie, by those that are where they must be.
//!
//! ```text
//!   the bitmaps of the blocks of a flex group │ those of its inodes │ its tables of inodes
//! ```
//! Law: two of the three places of a group decide on the third. The table of group 0 has the root.

use super::Check;
use super::layout::GroupLayout;
use super::problem::{Problem, What};
use crate::blocks::role::Role;
use crate::format::le16;
use crate::units::saturating_usize;
use crate::{FsBlock, Result};

/// Blocks of the bitmap of blocks, that of inodes, and the first one of the table of inodes.
type Places = [u64; 3];

impl GroupLayout {
    fn places(&self) -> Places {
        [self.block_bitmap, self.inode_bitmap, self.inode_table]
    }
}

impl Check<'_> {
    /// Reports a table of group 0 that holds no root, if the others say where that is.
    pub(super) fn check_place_of_root(&self) -> Result<()> {
        let Some([.., table]) = self.groups.first().map(GroupLayout::places) else {
            return Ok(());
        };
        let is_elsewhere = !self.holds_root(table)?
            && self.computed_places(0)?.is_some_and(|[.., computed]| computed.0 != table);
        if is_elsewhere {
            self.problems.add(Problem::new(What::GroupInodeTable).group(0).block(table));
        }
        Ok(())
    }

    /// Returns true if a group's structures may lie where its descriptor says.
    pub(crate) fn has_possible_places(&self, group: u32) -> Result<bool> {
        match self.groups.get(saturating_usize(group.into())) {
            Some(own) => self.are_possible(group, own.places()),
            None => Ok(false),
        }
    }

    /// Returns where the structures of a group lie by two of the three places, if they do not lie
    /// there.
    pub(crate) fn computed_places(&self, group: u32) -> Result<Option<[FsBlock; 3]>> {
        let super_ = &self.super_;
        let Some(layout) = self.groups.get(saturating_usize(group.into())) else {
            return Ok(None);
        };
        let own @ [blocks, inodes, table] = layout.places();
        let tables = u64::from(super_.inode_table_blocks());
        let flex = super_.flex_groups.max(1);
        let within = u64::from(group.checked_rem(flex).unwrap_or(0));
        let mut found = vec![];
        for width in [flex, super_.groups.min(flex), 1].map(u64::from) {
            let inodes_of = |blocks: u64| blocks.saturating_add(width);
            // From the bitmap of inodes to the table.
            let distance =
                tables.saturating_mul(within).saturating_add(width).saturating_sub(within);
            for places in [
                [blocks, inodes, inodes.saturating_add(distance)],
                [blocks, inodes_of(blocks), table],
                [inodes.saturating_sub(width), inodes, table],
            ] {
                let [first, second, third] = places;
                let is_layout =
                    second == inodes_of(first) && third == second.saturating_add(distance);
                if is_layout && self.are_possible(group, places)? {
                    found.push(places);
                }
            }
        }
        let is_right = found.contains(&own);
        Ok(found.into_iter().find(|_| !is_right).map(|places| places.map(FsBlock)))
    }

    /// Returns the other groups with structures where those of a group lie.
    pub(crate) fn groups_over(&self, group: u32) -> Vec<u32> {
        let tables = u64::from(self.super_.inode_table_blocks());
        let parts = |layout: &GroupLayout| {
            let [blocks, inodes, table] = layout.places();
            [(blocks, 1), (inodes, 1), (table, tables)]
                .map(|(start, count)| start..start.saturating_add(count))
        };
        let Some(own) = self.groups.get(saturating_usize(group.into())).map(parts) else {
            return vec![];
        };
        let overlaps = |layout: &GroupLayout| {
            let others = parts(layout);
            own.iter().any(|a| others.iter().any(|b| a.start < b.end && b.start < a.end))
        };
        let all = (0u32..).zip(&self.groups).filter(|(other, _)| *other != group);
        all.filter(|(_, layout)| overlaps(layout)).map(|(other, _)| other).collect()
    }

    /// Returns true if a group's structures may lie there: the bitmaps hold the bits of what they
    /// must, and the table of group 0 holds the root.
    fn are_possible(&self, group: u32, [blocks, inodes, table]: Places) -> Result<bool> {
        let super_ = &self.super_;
        let end = table.saturating_add(super_.inode_table_blocks().into());
        let is_inside = |at: u64| super_.is_valid_block(FsBlock(at));
        if ![blocks, inodes, table, end.saturating_sub(1)].into_iter().all(is_inside)
            || (table..end).contains(&blocks)
            || (table..end).contains(&inodes)
            || blocks == inodes
        {
            return Ok(false);
        }
        if group > 0 {
            return Ok(true);
        }
        // All reserved inodes are in use.
        let used = self.block(inodes, Role::Contents)?;
        let first = self.block(blocks, Role::Contents)?;
        Ok(used.first() == Some(&0xFF)
            && first.first().is_some_and(|it| it & 1 == 1)
            && self.holds_root(table)?)
    }

    /// Returns true if inode 2 of a table is a directory.
    fn holds_root(&self, table: u64) -> Result<bool> {
        let at = u64::from(self.super_.inode_bytes);
        let block_bytes = u64::from(self.super_.block_bytes).max(1);
        let block = table.saturating_add(at.checked_div(block_bytes).unwrap_or(0));
        if !self.super_.is_valid_block(FsBlock(block)) {
            return Ok(false);
        }
        let within = saturating_usize(at.checked_rem(block_bytes).unwrap_or(0));
        let mode = le16(&self.block(block, Role::Contents)?, within);
        Ok(mode.is_some_and(|mode| mode & 0o170_000 == 0o040_000))
    }
}
