//! Group descriptors: locations of each group's bitmaps and inode table.
//!
//! ```text
//!   classic   | super | all descriptor blocks | ...        in group 0, copies in backups
//!   meta_bg   | super?| one descriptor block  | ...        in the first group it describes
//! ```
//!
//! What a descriptor says of uninitialized parts holds only under a checksum:
//!
//! | field | holds with |
//! |---|---|
//! | `INODE_UNINIT`, `BLOCK_UNINIT`, `INODE_ZEROED` | `uninit_bg` or `metadata_csum` |
//! | `bg_itable_unused` | `uninit_bg` or `metadata_csum` |
//! | `bg_block_bitmap_csum`, `bg_inode_bitmap_csum` | `metadata_csum` |
//!
//! Law: [`GroupDescriptor::read`] gives the meaning, by this table; only check and repair read what
//! is stored.

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::crc16;
use super::features::{Compatible, Incompatible, ReadOnlyCompatible};
use super::superblock::Superblock;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, GroupNumber, Result};

/// On-disk group descriptor.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawGroupDescriptor {
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

/// Second half of the descriptors of volumes with `64bit`.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawGroupDescriptorHigh {
    pub bg_block_bitmap_hi: U32,
    pub bg_inode_bitmap_hi: U32,
    pub bg_inode_table_hi: U32,
    pub bg_free_blocks_count_hi: U16,
    pub bg_free_inodes_count_hi: U16,
    pub bg_used_dirs_count_hi: U16,
    pub bg_itable_unused_hi: U16,
    pub bg_exclude_bitmap_hi: U32,
    pub bg_block_bitmap_csum_hi: U16,
    pub bg_inode_bitmap_csum_hi: U16,
    pub bg_reserved: U32,
}

/// Bits of `bg_flags`.
pub mod flags {
    /// The inode table and bitmap are uninitialized: no inode is in use.
    pub const INODE_UNINIT: u16 = 1;
    /// The block bitmap is uninitialized: only the group's metadata is in use.
    pub const BLOCK_UNINIT: u16 = 2;
    /// The unused part of the inode table is zeroed.
    pub const INODE_ZEROED: u16 = 4;
}

/// Contents of a 32-byte or 64-byte group descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupDescriptor {
    /// Block of the block bitmap.
    pub block_bitmap: FsBlock,
    /// Block of the inode bitmap.
    pub inode_bitmap: FsBlock,
    /// First block of the inode table.
    pub inode_table: FsBlock,
    /// Free clusters.
    pub free_clusters: u32,
    /// Free inodes.
    pub free_inodes: u32,
    /// Directories.
    pub directories: u32,
    /// Inodes at the end of the table that were never used.
    pub unused_inodes: u32,
    /// See [`flags`].
    pub flags: u16,
    /// Checksums of the block and inode bitmap, as far as the descriptor holds them.
    pub bitmap_checksums: [u32; 2],
}

impl RawGroupDescriptor {
    /// Returns descriptor `slot` of a descriptor block.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short.
    pub fn view<'a>(block: &'a [u8], slot: u32, super_: &Superblock) -> Result<&'a Self> {
        let at = u64::from(slot).saturating_mul(u64::from(super_.descriptor_bytes));
        let bytes = block.get(saturating_usize(at)..).unwrap_or_default();
        let (raw, _) =
            Self::ref_from_prefix(bytes).map_err(|_| Error::corrupt("group descriptor"))?;
        Ok(raw)
    }

    /// Sets the blocks of the bitmaps and the inode table.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for a block number above 32 bits.
    pub fn set_table_locations(&mut self, [blocks, inodes, table]: [FsBlock; 3]) -> Result<()> {
        self.bg_block_bitmap_lo.set(blocks.to_u32()?);
        self.bg_inode_bitmap_lo.set(inodes.to_u32()?);
        self.bg_inode_table_lo.set(table.to_u32()?);
        Ok(())
    }
}

impl GroupDescriptor {
    /// Reads descriptor `slot` of a descriptor block: locations and counts unchecked, flags and
    /// unused inodes as far as the features of the volume make them hold.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short.
    pub fn read(block: &[u8], slot: u32, super_: &Superblock) -> Result<Self> {
        let stored = Self::read_as_stored(block, slot, super_)?;
        if super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS) {
            return Ok(stored);
        }
        Ok(Self { flags: 0, unused_inodes: 0, ..stored })
    }

    /// Reads descriptor `slot` of a descriptor block as it is stored, unchecked.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short.
    pub fn read_as_stored(block: &[u8], slot: u32, super_: &Superblock) -> Result<Self> {
        let low = RawGroupDescriptor::view(block, slot, super_)?;
        let high = descriptor(block, slot, super_)
            .and_then(|bytes| RawGroupDescriptorHigh::ref_from_prefix(bytes.get(32..)?).ok());
        let wide = |low: U32, high: Option<U32>| {
            u64::from(low.get()) | u64::from(high.map_or(0, |it| it.get())) << 32
        };
        let join = |low: U16, high: Option<U16>| {
            u32::from(low.get()) | u32::from(high.map_or(0, |it| it.get())) << 16
        };
        let high = high.map(|(high, _)| high);
        Ok(Self {
            block_bitmap: FsBlock(wide(
                low.bg_block_bitmap_lo,
                high.map(|it| it.bg_block_bitmap_hi),
            )),
            inode_bitmap: FsBlock(wide(
                low.bg_inode_bitmap_lo,
                high.map(|it| it.bg_inode_bitmap_hi),
            )),
            inode_table: FsBlock(wide(low.bg_inode_table_lo, high.map(|it| it.bg_inode_table_hi))),
            free_clusters: join(
                low.bg_free_blocks_count_lo,
                high.map(|it| it.bg_free_blocks_count_hi),
            ),
            free_inodes: join(
                low.bg_free_inodes_count_lo,
                high.map(|it| it.bg_free_inodes_count_hi),
            ),
            directories: join(low.bg_used_dirs_count_lo, high.map(|it| it.bg_used_dirs_count_hi)),
            unused_inodes: join(low.bg_itable_unused_lo, high.map(|it| it.bg_itable_unused_hi)),
            flags: low.bg_flags.get(),
            bitmap_checksums: [
                join(low.bg_block_bitmap_csum_lo, high.map(|it| it.bg_block_bitmap_csum_hi)),
                join(low.bg_inode_bitmap_csum_lo, high.map(|it| it.bg_inode_bitmap_csum_hi)),
            ],
        })
    }

    /// Returns true if the block bitmap matches its checksum, or has none.
    pub fn verify_block_bitmap_csum(&self, bitmap: &[u8], super_: &Superblock) -> bool {
        matches_bitmap_csum(self.bitmap_checksums[0], bitmap, super_.clusters_per_group(), super_)
    }

    /// Returns true if the inode bitmap matches its checksum, or has none.
    pub fn verify_inode_bitmap_csum(&self, bitmap: &[u8], super_: &Superblock) -> bool {
        matches_bitmap_csum(self.bitmap_checksums[1], bitmap, super_.inodes_per_group, super_)
    }

    /// Sets the checksum of the block bitmap, on volumes with checksums.
    pub fn set_block_bitmap_csum(&mut self, bitmap: &[u8], super_: &Superblock) {
        self.bitmap_checksums[0] =
            bitmap_csum(bitmap, super_.clusters_per_group(), super_).unwrap_or(0);
    }

    /// Sets the checksum of the inode bitmap, on volumes with checksums.
    pub fn set_inode_bitmap_csum(&mut self, bitmap: &[u8], super_: &Superblock) {
        self.bitmap_checksums[1] =
            bitmap_csum(bitmap, super_.inodes_per_group, super_).unwrap_or(0);
    }

    /// Checks that the inode table is inside the volume.
    ///
    /// # Errors
    /// [`Error::Corrupt`] otherwise.
    pub fn check(self, super_: &Superblock) -> Result<Self> {
        let end = self.inode_table.offset(u64::from(super_.inode_table_blocks()));
        if !super_.is_valid_block(self.inode_table) || end.0 > super_.blocks {
            return Err(Error::Corrupt {
                what: "group descriptor: inode table",
                inode: None,
                block: Some(self.inode_table),
            });
        }
        Ok(self)
    }

    /// Writes the locations of the bitmaps and the inode table into descriptor `slot` of a
    /// descriptor block, without its checksum.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short; [`Error::TooLarge`] for block numbers beyond a
    /// 32-byte descriptor.
    pub fn write_table_locations(
        &self,
        block: &mut [u8],
        slot: u32,
        super_: &Superblock,
    ) -> Result<()> {
        let missing = Error::corrupt("group descriptor");
        let bytes = descriptor_mut(block, slot, super_).ok_or(missing.clone())?;
        let (low, rest) =
            RawGroupDescriptor::mut_from_prefix(bytes).map_err(|_| missing.clone())?;
        let places = [self.block_bitmap, self.inode_bitmap, self.inode_table];
        if super_.descriptor_bytes < 64 {
            return low.set_table_locations(places);
        }
        let (high, _) = RawGroupDescriptorHigh::mut_from_prefix(rest).map_err(|_| missing)?;
        let half = |place: FsBlock| super::low32(place.0 >> 32);
        let [blocks, inodes, table] = places;
        high.bg_block_bitmap_hi.set(half(blocks));
        high.bg_inode_bitmap_hi.set(half(inodes));
        high.bg_inode_table_hi.set(half(table));
        low.set_table_locations(places.map(|place| FsBlock(place.0 & u64::from(u32::MAX))))
    }

    /// Writes the counts, flags and bitmap checksums into descriptor `slot` of a descriptor block,
    /// and sets its checksum.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short, or a value exceeds its field.
    pub fn write(
        &self,
        block: &mut [u8],
        slot: u32,
        super_: &Superblock,
        number: GroupNumber,
    ) -> Result<()> {
        let missing = Error::corrupt("group descriptor");
        let is_long = super_.descriptor_bytes >= 64;
        let bytes = descriptor_mut(block, slot, super_).ok_or(missing.clone())?;
        let (low, rest) =
            RawGroupDescriptor::mut_from_prefix(bytes).map_err(|_| missing.clone())?;
        let counts = [self.free_clusters, self.free_inodes, self.directories, self.unused_inodes];
        if !is_long && counts.iter().any(|count| *count > u32::from(u16::MAX)) {
            return Err(Error::corrupt("group descriptor: counts"));
        }
        let [clusters, inodes, directories, unused] = counts.map(split_u32);
        let [block_sum, inode_sum] = self.bitmap_checksums.map(split_u32);
        low.bg_free_blocks_count_lo.set(clusters.0);
        low.bg_free_inodes_count_lo.set(inodes.0);
        low.bg_used_dirs_count_lo.set(directories.0);
        low.bg_itable_unused_lo.set(unused.0);
        low.bg_flags.set(self.flags);
        if super_.checksum_seed.is_some() {
            low.bg_block_bitmap_csum_lo.set(block_sum.0);
            low.bg_inode_bitmap_csum_lo.set(inode_sum.0);
        }
        if is_long {
            let (high, _) =
                RawGroupDescriptorHigh::mut_from_prefix(rest).map_err(|_| missing.clone())?;
            high.bg_free_blocks_count_hi.set(clusters.1);
            high.bg_free_inodes_count_hi.set(inodes.1);
            high.bg_used_dirs_count_hi.set(directories.1);
            high.bg_itable_unused_hi.set(unused.1);
            if super_.checksum_seed.is_some() {
                high.bg_block_bitmap_csum_hi.set(block_sum.1);
                high.bg_inode_bitmap_csum_hi.set(inode_sum.1);
            }
        }
        let sum = checksum(bytes, super_, number);
        if let Some(sum) = sum
            && let Ok((low, _)) = RawGroupDescriptor::mut_from_prefix(bytes)
        {
            low.bg_checksum.set(sum);
        }
        Ok(())
    }
}

/// Computes the checksum of a bitmap of `bits`.
fn bitmap_csum(bitmap: &[u8], bits: u32, super_: &Superblock) -> Option<u32> {
    let bytes = bitmap.get(..saturating_usize((bits / 8).into()))?;
    super_.checksum_seed.map(|seed| seed.update(bytes).value())
}

/// Returns true if `said` matches the checksum, as far as a descriptor holds it.
fn matches_bitmap_csum(stored: u32, bitmap: &[u8], bits: u32, super_: &Superblock) -> bool {
    let held = if super_.descriptor_bytes >= 64 { u32::MAX } else { 0xFFFF };
    bitmap_csum(bitmap, bits, super_).is_none_or(|sum| sum & held == stored & held)
}

fn split_u32(value: u32) -> (u16, u16) {
    let [a, b, c, d] = value.to_le_bytes();
    (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
}

/// Returns the bytes of descriptor `slot` in its block.
pub(crate) fn descriptor_range(slot: u32, super_: &Superblock) -> Option<std::ops::Range<usize>> {
    let len = saturating_usize(super_.descriptor_bytes.into());
    let at = saturating_usize(slot.into()).checked_mul(len)?;
    Some(at..at.checked_add(len)?)
}

fn descriptor<'a>(block: &'a [u8], slot: u32, super_: &Superblock) -> Option<&'a [u8]> {
    block.get(descriptor_range(slot, super_)?)
}

fn descriptor_mut<'a>(block: &'a mut [u8], slot: u32, super_: &Superblock) -> Option<&'a mut [u8]> {
    block.get_mut(descriptor_range(slot, super_)?)
}

/// Returns true if the checksum of descriptor `slot` is valid, or there is none.
pub fn has_valid_checksum(
    block: &[u8],
    slot: u32,
    super_: &Superblock,
    number: GroupNumber,
) -> bool {
    let Some(bytes) = descriptor(block, slot, super_) else { return false };
    let Ok((low, _)) = RawGroupDescriptor::ref_from_prefix(bytes) else { return false };
    checksum(bytes, super_, number).is_none_or(|sum| sum == low.bg_checksum.get())
}

/// Computes the checksum of a descriptor, on volumes that have them.
fn checksum(bytes: &[u8], super_: &Superblock, number: GroupNumber) -> Option<u16> {
    let at = offset_of!(RawGroupDescriptor, bg_checksum);
    let before = bytes.get(..at)?;
    let after = bytes.get(at.checked_add(2)?..)?;
    if let Some(seed) = super_.checksum_seed {
        return Some(
            seed.update_u32(number.0).update(before).update(&[0; 2]).update(after).low16(),
        );
    }
    if !super_.read_only_compatible.contains(ReadOnlyCompatible::GDT_CSUM) {
        return None;
    }
    let sum = crc16(crc16(!0, &super_.uuid), &number.0.to_le_bytes());
    Some(crc16(crc16(sum, before), after))
}

impl Superblock {
    /// Returns the clusters of a full group, the bits of its block bitmap.
    pub fn clusters_per_group(&self) -> u32 {
        self.blocks_per_group.checked_div(self.cluster_blocks).unwrap_or(0)
    }

    /// Returns the descriptors per block.
    pub fn descriptors_per_block(&self) -> u32 {
        // Both are powers of two, and a descriptor is never larger than a block.
        self.block_bytes.checked_div(self.descriptor_bytes).unwrap_or(1).max(1)
    }

    /// Returns the blocks that hold all group descriptors.
    pub fn descriptor_blocks(&self) -> u32 {
        self.groups.div_ceil(self.descriptors_per_block())
    }

    /// Returns the block with the descriptor of `group`, and its index in the block.
    pub fn descriptor_location(&self, group: GroupNumber) -> (FsBlock, u32) {
        let per_block = self.descriptors_per_block();
        let nth = group.0.checked_div(per_block).unwrap_or(0);
        let slot = group.0.checked_rem(per_block).unwrap_or(0);
        if !self.is_in_meta_group(group) {
            // Behind the superblock: with clusters of small blocks, group 0 starts before it.
            let first = self.location().0.offset(1);
            return (first.offset(u64::from(nth)), slot);
        }
        let holder = GroupNumber(nth.saturating_mul(per_block));
        let start = self.group_start(holder).max(if holder.0 == 0 {
            self.location().0
        } else {
            FsBlock(0)
        });
        (start.offset(u64::from(self.has_superblock(holder))), slot)
    }

    /// Returns true if the descriptor of `group` is in a `meta_bg` location.
    fn is_in_meta_group(&self, group: GroupNumber) -> bool {
        let nth = group.0.checked_div(self.descriptors_per_block()).unwrap_or(0);
        self.incompatible.contains(Incompatible::META_BG) && nth >= self.first_meta_group
    }

    /// Returns true if `group` starts with a copy of the superblock.
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

    /// Returns one past the last block of `group`.
    pub fn group_end(&self, group: GroupNumber) -> FsBlock {
        let next = self.group_start(group).offset(self.blocks_per_group.into());
        FsBlock(next.0.min(self.blocks))
    }

    /// Returns the blocks of superblock, descriptors and reserved GDT at the start of `group`,
    /// without `meta_bg`.
    pub fn backup_blocks(&self, group: GroupNumber) -> u64 {
        if !self.has_superblock(group) {
            return 0;
        }
        let table = u64::from(self.descriptor_blocks());
        let before = if group.0 == 0 {
            self.location().0.0.saturating_sub(self.first_data_block.into())
        } else {
            0
        };
        let copies = table.saturating_add(self.reserved_descriptor_blocks.into()).saturating_add(1);
        copies.saturating_add(before)
    }

    /// Returns the groups that start with a copy of the superblock; `None` if all do.
    fn groups_with_backups(&self) -> Option<Vec<GroupNumber>> {
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

    /// Returns the blocks unavailable to files, without the journal: everything before the first
    /// group, and each group's superblock, descriptors, reserved GDT, bitmaps and inode table. The
    /// cost is independent of the number of groups.
    pub fn overhead(&self) -> u64 {
        let groups = u64::from(self.groups);
        let per_group = u64::from(self.inode_table_blocks()).saturating_add(2);
        let tables = groups.saturating_mul(per_group);
        let backups = self.groups_with_backups();
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
        // A meta group has three copies of its block: in its first, second and last group.
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

/// Returns true if `group` has a backup superblock under `sparse_super`.
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
    fn backups_are_in_powers_of_3_5_and_7() {
        let found: Vec<u32> =
            (2..100).filter(|n| [3, 5, 7].into_iter().any(|base| is_power_of(*n, base))).collect();
        assert_eq!(found, [3, 5, 7, 9, 25, 27, 49, 81]);
    }
}
