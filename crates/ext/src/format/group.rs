//! Group descriptors: where each group keeps its bitmaps and its inode table.
//!
//! ```text
//!   classic   | super | all descriptor blocks | ...        in group 0, copies elsewhere
//!   meta_bg   | super?| one descriptor block  | ...        in the first group it describes
//! ```

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::features::{Compatible, Incompatible, ReadOnlyCompatible};
use super::superblock::Superblock;
use crate::units::index;
use crate::{Error, FsBlock, GroupNumber, Result};

/// The bytes of a group descriptor.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawGroup {
    pub bg_block_bitmap_lo: U32,
    pub bg_inode_bitmap_lo: U32,
    pub bg_inode_table_lo: U32,
    pub bg_free_blocks_count_lo: U16,
    pub bg_free_inodes_count_lo: U16,
    pub bg_used_dirs_count_lo: U16,
    pub bg_flags: U16,
    pub bg_exclude_bitmap_lo: U32,
    pub bg_block_bitmap_csum_lo: U16,
    pub bg_inode_bitmap_csum_lo: U16,
    pub bg_itable_unused_lo: U16,
    pub bg_checksum: U16,
}

/// A group whose inode table lies on the volume.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// The first block of the inode table.
    pub inode_table: FsBlock,
}

impl RawGroup {
    /// Finds descriptor `slot` in a block of descriptors.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short for it.
    pub fn view<'a>(block: &'a [u8], slot: u32, super_: &Superblock) -> Result<&'a Self> {
        let at = u64::from(slot).saturating_mul(u64::from(super_.descriptor_bytes));
        let bytes = block.get(index(at)..).unwrap_or_default();
        let (raw, _) =
            Self::ref_from_prefix(bytes).map_err(|_| Error::corrupt("group descriptor"))?;
        Ok(raw)
    }

    /// Names the blocks of its bitmaps and its inode table.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for what 32 bits do not hold.
    pub fn set_places(&mut self, [blocks, inodes, table]: [FsBlock; 3]) -> Result<()> {
        self.bg_block_bitmap_lo.set(blocks.in_32_bits()?);
        self.bg_inode_bitmap_lo.set(inodes.in_32_bits()?);
        self.bg_inode_table_lo.set(table.in_32_bits()?);
        Ok(())
    }

    /// Sets the counts of descriptor `slot` in a block of descriptors: free blocks, free inodes,
    /// directories.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short for it, or for more than the fields hold.
    pub fn set_counts(
        block: &mut [u8],
        slot: u32,
        super_: &Superblock,
        counts: [u32; 3],
    ) -> Result<()> {
        let at = u64::from(slot).saturating_mul(u64::from(super_.descriptor_bytes));
        let bytes = block.get_mut(index(at)..).unwrap_or_default();
        let (raw, _) =
            Self::mut_from_prefix(bytes).map_err(|_| Error::corrupt("group descriptor"))?;
        let field = |count: u32| {
            u16::try_from(count).map_err(|_| Error::corrupt("group descriptor: counts"))
        };
        let [blocks, inodes, directories] = counts;
        raw.bg_free_blocks_count_lo.set(field(blocks)?);
        raw.bg_free_inodes_count_lo.set(field(inodes)?);
        raw.bg_used_dirs_count_lo.set(field(directories)?);
        Ok(())
    }

    /// Checks that the inode table lies on the volume.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it does not.
    pub fn check(&self, super_: &Superblock) -> Result<Group> {
        let inode_table = FsBlock(u64::from(self.bg_inode_table_lo.get()));
        let end = inode_table.after(u64::from(super_.inode_table_blocks()));
        if !super_.holds(inode_table) || end.0 > super_.blocks {
            return Err(Error::Corrupt {
                what: "group descriptor: inode table",
                inode: None,
                block: Some(inode_table),
            });
        }
        Ok(Group { inode_table })
    }
}

impl Superblock {
    /// Descriptors that a block holds.
    pub fn descriptors_per_block(&self) -> u32 {
        // Both are powers of two, and a descriptor is never larger than a block.
        self.block_bytes.checked_div(self.descriptor_bytes).unwrap_or(1).max(1)
    }

    /// Blocks that hold all group descriptors.
    pub fn descriptor_blocks(&self) -> u32 {
        self.groups.div_ceil(self.descriptors_per_block())
    }

    /// The block that holds the descriptor of `group`, and its place therein.
    pub fn descriptor_place(&self, group: GroupNumber) -> (FsBlock, u32) {
        let per_block = self.descriptors_per_block();
        let nth = group.0.checked_div(per_block).unwrap_or(0);
        let slot = group.0.checked_rem(per_block).unwrap_or(0);
        if !self.in_meta_group(group) {
            let first = FsBlock(u64::from(self.first_data_block)).after(1);
            return (first.after(u64::from(nth)), slot);
        }
        let holder = GroupNumber(nth.saturating_mul(per_block));
        (self.group_start(holder).after(u64::from(self.has_superblock(holder))), slot)
    }

    /// Whether the descriptor of `group` lies by the rules of `meta_bg`.
    fn in_meta_group(&self, group: GroupNumber) -> bool {
        let nth = group.0.checked_div(self.descriptors_per_block()).unwrap_or(0);
        self.incompatible.contains(Incompatible::META_BG) && nth >= self.first_meta_group
    }

    /// Whether `group` starts with a copy of the superblock.
    pub fn has_superblock(&self, group: GroupNumber) -> bool {
        if group.0 == 0 {
            return true;
        }
        if self.compatible.contains(Compatible::SPARSE_SUPER2) {
            return self.backup_groups.contains(&group.0);
        }
        if !self.read_only_compatible.contains(ReadOnlyCompatible::SPARSE_SUPER) {
            return true;
        }
        is_sparse_backup(group.0)
    }

    /// One past the last block of `group`.
    pub fn group_end(&self, group: GroupNumber) -> FsBlock {
        let next = self.group_start(group).after(self.blocks_per_group.into());
        FsBlock(next.0.min(self.blocks))
    }

    /// Blocks that superblock, descriptors and their reserve take at the start of `group`,
    /// on a volume without `meta_bg`.
    pub fn copy_blocks(&self, group: GroupNumber) -> u64 {
        if !self.has_superblock(group) {
            return 0;
        }
        let table = u64::from(self.descriptor_blocks());
        table.saturating_add(self.reserved_descriptor_blocks.into()).saturating_add(1)
    }

    /// The groups that start with a copy of the superblock, if not all do.
    fn backups(&self) -> Option<Vec<GroupNumber>> {
        let all: Vec<u32> = if self.compatible.contains(Compatible::SPARSE_SUPER2) {
            self.backup_groups.into_iter().filter(|group| *group != 0).collect()
        } else if self.read_only_compatible.contains(ReadOnlyCompatible::SPARSE_SUPER) {
            let powers =
                |base: u32| std::iter::successors(Some(base), move |n| n.checked_mul(base));
            std::iter::once(1).chain([3, 5, 7].into_iter().flat_map(powers)).collect()
        } else {
            return None;
        };
        let mut groups: Vec<_> = all.into_iter().filter(|group| *group < self.groups).collect();
        groups.push(0);
        groups.sort_unstable();
        groups.dedup();
        Some(groups.into_iter().map(GroupNumber).collect())
    }

    /// Blocks that can never be a file's, without the journal: everything before the
    /// first group, and in each group superblock, descriptors with their reserve,
    /// bitmaps and inode table. Costs the same for any number of groups.
    pub fn overhead(&self) -> u64 {
        let groups = u64::from(self.groups);
        let per_group = u64::from(self.inode_table_blocks()).saturating_add(2);
        let tables = groups.saturating_mul(per_group);
        let backups = self.backups();
        let supers = backups.as_ref().map_or(groups, |list| list.len() as u64);

        let meta = self.incompatible.contains(Incompatible::META_BG);
        let per_block = self.descriptors_per_block();
        let first_meta = if meta { self.first_meta_group } else { u32::MAX };
        let classic_groups = first_meta.saturating_mul(per_block).min(self.groups);
        let classic_supers = backups.as_ref().map_or(u64::from(classic_groups), |list| {
            list.iter().filter(|group| group.0 < classic_groups).count() as u64
        });
        let table = self.descriptor_blocks().min(first_meta);
        let reserve = if meta { 0 } else { self.reserved_descriptor_blocks };
        let classic =
            classic_supers.saturating_mul(u64::from(table).saturating_add(u64::from(reserve)));
        // A meta group keeps its block three times: in its first, second and last group.
        let meta_groups = u64::from(self.groups.saturating_sub(classic_groups));
        let per_block = u64::from(per_block);
        let full = meta_groups.checked_div(per_block).unwrap_or(0).saturating_mul(3.min(per_block));
        let rest = meta_groups.checked_rem(per_block).unwrap_or(0).min(2);
        u64::from(self.first_data_block)
            .saturating_add(tables)
            .saturating_add(supers)
            .saturating_add(classic)
            .saturating_add(full)
            .saturating_add(rest)
    }
}

/// Whether `group` keeps a copy of the superblock on a volume with `sparse_super`.
pub fn is_sparse_backup(group: u32) -> bool {
    group <= 1 || [3, 5, 7].into_iter().any(|base| is_power_of(group, base))
}

fn is_power_of(number: u32, base: u32) -> bool {
    std::iter::successors(Some(base), |power| power.checked_mul(base)).any(|power| power == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backups_sit_in_powers_of_three_five_and_seven() {
        let found: Vec<u32> =
            (2..100).filter(|n| [3, 5, 7].into_iter().any(|base| is_power_of(*n, base))).collect();
        assert_eq!(found, [3, 5, 7, 9, 25, 27, 49, 81]);
    }
}
