//! Places of metadata in block groups: superblock copies, descriptors, reserved GDT blocks, clusters.

use super::features::Incompatible;
use super::superblock::Superblock;
use crate::{FsBlock, GroupNumber};

impl Superblock {
    /// Returns the number of blocks at the start of a group for the superblock, the descriptors and
    /// the reserved GDT blocks.
    #[allow(clippy::arithmetic_side_effects, reason = "a block holds at least one descriptor")]
    pub fn base_meta_blocks(&self, group: GroupNumber) -> u64 {
        let copy = u64::from(self.has_superblock(group));
        let per_block = self.descriptors_per_block();
        let is_meta = self.incompatible.contains(Incompatible::META_BG)
            && group.0 / per_block >= self.first_meta_group;
        if is_meta {
            // A meta group has its descriptors in its first two groups and its last.
            let in_meta = group.0 % per_block;
            let table = u64::from(in_meta < 2 || in_meta == per_block.saturating_sub(1));
            return self.blocks_before_super(group).saturating_add(copy).saturating_add(table);
        }
        let table = match self.incompatible.contains(Incompatible::META_BG) {
            true => self.first_meta_group.min(self.descriptor_blocks()),
            false => self.descriptor_blocks(),
        };
        let before = self.blocks_before_super(group);
        copy.saturating_mul(
            before
                .saturating_add(1)
                .saturating_add(table.into())
                .saturating_add(self.reserved_descriptor_blocks.into()),
        )
    }

    /// Returns the blocks of a group before its superblock: with clusters of small blocks, group 0
    /// begins with the boot block.
    fn blocks_before_super(&self, group: GroupNumber) -> u64 {
        match group.0 {
            0 => self.location().0.0.saturating_sub(self.first_data_block.into()),
            _ => 0,
        }
    }

    /// Rounds blocks of a file up to whole clusters.
    pub fn blocks_to_clusters(&self, blocks: u64) -> u64 {
        blocks.next_multiple_of(self.cluster_blocks.into())
    }

    /// Returns the blocks that hold descriptor block `nth`: the primary and its copies.
    pub fn descriptor_locations(&self, nth: u32) -> Vec<FsBlock> {
        let per_block = self.descriptors_per_block();
        let first = nth.saturating_mul(per_block);
        let is_spread = self.incompatible.contains(Incompatible::META_BG);
        let meta = is_spread && nth >= self.first_meta_group;
        let behind_super = |group: GroupNumber| {
            let has_super = u64::from(self.has_superblock(group));
            match group.0 {
                0 => self.location().0.offset(1),
                _ => self.group_start(group).offset(has_super),
            }
        };
        if meta {
            let last = first.saturating_add(per_block).saturating_sub(1);
            let mut groups = vec![first, first.saturating_add(1), last];
            groups.sort_unstable();
            groups.dedup();
            groups.retain(|group| *group < self.groups && *group <= last);
            return groups.into_iter().map(|group| behind_super(GroupNumber(group))).collect();
        }
        // Groups under `meta_bg` keep no copies of the contiguous descriptor blocks.
        let end = match is_spread {
            true => self.first_meta_group.saturating_mul(per_block).min(self.groups),
            false => self.groups,
        };
        let groups = (0..end).map(GroupNumber).filter(|group| self.has_superblock(*group));
        groups.map(|group| behind_super(group).offset(nth.into())).collect()
    }
}
