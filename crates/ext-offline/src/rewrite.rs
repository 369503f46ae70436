//! Rewrite of an unmounted volume, inode by inode: blocks move to free space, pointers to them
//! change, and checksums are recomputed.
//!
//! ```text
//!   each used inode ─▶ its map: runs, nodes ─▶ moved if necessary ─▶ new map ─▶ inode
//!                      its names: new numbers    its attributes: xattr block, EA inode numbers
//!   then each group: bitmaps, counts ─▶ descriptors ─▶ superblock
//! ```
//! Law 1: used blocks are written only through the redo log (`redo`): until it commits, the volume
//! is unchanged.
//! Law 2: no more blocks are visited than the volume has, whatever the maps claim.
//! Law 3: damage ends the rewrite: only understood structures are moved.

pub(crate) mod block_usage;
mod contents;
mod directories;
mod inodes;
mod maps;
mod quotas;
mod renumber;

use std::collections::BTreeMap;

use draconis_types::Time;

use crate::blocks::checksums::MetadataChecksums;
use crate::blocks::role::BlockChecksums;
use crate::format::bitmap::{BitRun, Bitmap, fill};
use crate::format::features::Incompatible;
use crate::format::group::flags;
use crate::format::superblock::RawSuperblock;
use crate::offline::{OfflineError, OfflineVolume, PlannedVolume, Result, group_bounds};
use crate::redo_log::RedoLog;
use crate::units::{saturating_u32, saturating_usize};
use crate::{GroupNumber, InodeNumber};
use block_usage::BlockUsage;
use directories::DirectoryConversion;

/// State of a rewrite.
pub(crate) struct VolumeRewrite<'a> {
    pub(crate) old: &'a OfflineVolume,
    pub(crate) planned: PlannedVolume,
    pub(crate) redo: RedoLog<'a>,
    pub(crate) space: BlockUsage,
    /// New numbers of renumbered inodes, by old number.
    pub(crate) renumbered: BTreeMap<u32, u32>,
    /// True if all checksums are recomputed.
    pub(crate) rewrites_checksums: bool,
    /// Format changes of directories.
    directory_conversion: DirectoryConversion,
    pub(crate) now: Time,
    /// Called with the number of copied blocks.
    pub(crate) progress: &'a dyn Fn(u64),
    /// Blocks moved so far.
    pub(crate) moved_blocks: u64,
    /// New location of each visited xattr block.
    xattr_blocks: BTreeMap<u64, u64>,
    /// True if EA inodes are renumbered.
    renumbers_ea_inodes: bool,
    /// Change of used blocks per quota owner: user, group, project.
    usage: BTreeMap<[u32; 3], i64>,
    /// Sizes and block runs of the quota files, by inode number.
    quota_files: BTreeMap<u32, (u64, Vec<maps::MovedRun>)>,
    /// Blocks that may still be visited.
    budget: u64,
    /// Checksums that verify old blocks, and those that new blocks get.
    old_checksums: Option<Box<dyn BlockChecksums>>,
    new_checksums: Option<Box<dyn BlockChecksums>>,
}

impl<'a> VolumeRewrite<'a> {
    pub(crate) fn new(
        old: &'a OfflineVolume,
        planned: PlannedVolume,
        redo: RedoLog<'a>,
        now: Time,
        progress: &'a dyn Fn(u64),
    ) -> Self {
        let space = BlockUsage::new(planned.super_.blocks, planned.super_.cluster_blocks);
        let directory_conversion = DirectoryConversion::between(&old.super_, &planned.super_);
        Self {
            old_checksums: MetadataChecksums::for_volume(&old.super_),
            new_checksums: MetadataChecksums::for_volume(&planned.super_),
            budget: old.super_.blocks,
            old,
            planned,
            redo,
            space,
            renumbered: BTreeMap::new(),
            rewrites_checksums: false,
            directory_conversion,
            now,
            progress,
            moved_blocks: 0,
            xattr_blocks: BTreeMap::new(),
            renumbers_ea_inodes: false,
            usage: BTreeMap::new(),
            quota_files: BTreeMap::new(),
        }
    }

    /// Loads the block usage before the change, and frees the metadata blocks that the change
    /// releases.
    pub(crate) fn build_block_usage(&mut self) -> Result<()> {
        let end = self.space.end();
        // Blocks before the first group have no bit.
        self.space.mark_used(0..self.old.super_.first_data_block.into());
        for number in 0..self.old.super_.groups {
            let (start, group_end) = group_bounds(&self.old.super_, number);
            if start >= end {
                break;
            }
            let bytes = self.old.block_bitmap(&self.redo, number)?;
            let ratio = u64::from(self.old.super_.cluster_blocks);
            let bitmap = Bitmap::new(
                &bytes,
                saturating_u32(group_end.saturating_sub(start).div_ceil(ratio)),
            );
            let mut at = 0;
            while let Some(from) = bitmap.next_one(at) {
                let len = bitmap.ones_at(from, u32::MAX);
                let block = |nth: u32| start.saturating_add(u64::from(nth).saturating_mul(ratio));
                self.space.mark_used(block(from)..block(from.saturating_add(len)));
                at = from.saturating_add(len);
            }
        }
        self.replace_metadata_usage();
        Ok(())
    }

    /// Frees old metadata blocks that the planned volume does not use.
    pub(crate) fn replace_metadata_usage(&mut self) {
        for own in metadata_ranges(&self.old.super_, &self.old.groups) {
            self.space.release(own);
        }
        for own in metadata_ranges(&self.planned.super_, &self.planned.groups) {
            self.space.mark_used(own);
        }
    }

    /// Keeps all old metadata blocks in use.
    pub(crate) fn keep_old_metadata(&mut self) {
        for own in metadata_ranges(&self.old.super_, &self.old.groups) {
            self.space.mark_used(own);
        }
    }

    /// Rewrites every inode in use.
    pub(crate) fn rewrite_inodes(&mut self) -> Result<()> {
        for number in 0..self.old.super_.groups {
            self.rewrite_group_inodes(number)?;
        }
        self.count_quotas()
    }

    /// Renumbers the inodes beyond `last` to free numbers below it.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn renumber_inodes(&mut self, last: u32) -> Result<()> {
        let per_group = self.old.super_.inodes_per_group;
        let mut target = 0;
        let mut changed: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        let mut at = 0;
        for number in last / per_group..self.old.super_.groups {
            for nth in self.used_inodes(number)? {
                let from = number.saturating_mul(per_group).saturating_add(nth).saturating_add(1);
                // The first free inode number; groups are filled in order.
                let place = loop {
                    if target >= self.planned.super_.groups {
                        return Err(OfflineError::Misuse("too few inodes are free".to_owned()));
                    }
                    let bitmap = match changed.entry(target) {
                        std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                        std::collections::btree_map::Entry::Vacant(entry) => {
                            entry.insert(self.old.inode_bitmap(&self.redo, target)?)
                        }
                    };
                    if target == 0 {
                        let reserved = self.old.super_.first_inode.0.saturating_sub(1);
                        fill(bitmap, BitRun { start: 0, len: reserved.min(per_group) }, true);
                    }
                    match Bitmap::new(bitmap, per_group).next_zero(at) {
                        Some(free) => {
                            fill(bitmap, BitRun { start: free, len: 1 }, true);
                            at = free.saturating_add(1);
                            break free;
                        }
                        None => (target, at) = (target.saturating_add(1), 0),
                    }
                };
                self.renumbered.insert(
                    from,
                    target.saturating_mul(per_group).saturating_add(place).saturating_add(1),
                );
            }
        }
        for (number, bytes) in changed {
            self.set_inode_bitmap(number, bytes)?;
        }
        let has_values = self.old.super_.incompatible.contains(Incompatible::EA_INODE);
        self.renumbers_ea_inodes = has_values && !self.renumbered.is_empty();
        Ok(())
    }

    /// Returns the indexes of the used inodes of a group.
    pub(crate) fn used_inodes(&self, number: u32) -> Result<Vec<u32>> {
        let group = self.old.group(number)?;
        if group.flags & flags::INODE_UNINIT != 0 {
            return Ok(vec![]);
        }
        let bytes = self.old.inode_bitmap(&self.redo, number)?;
        let bitmap = Bitmap::new(&bytes, self.old.super_.inodes_per_group);
        let mut used = vec![];
        let mut at = 0;
        while let Some(nth) = bitmap.next_one(at) {
            used.push(nth);
            at = nth.saturating_add(1);
        }
        Ok(used)
    }

    /// Sets the inode bitmap of a group, with its counts and checksum in the descriptor.
    pub(crate) fn set_inode_bitmap(&mut self, number: u32, bytes: Vec<u8>) -> Result<()> {
        let super_ = &self.planned.super_;
        let group = self.planned.groups.get_mut(saturating_usize(number.into()));
        let group = group.ok_or(crate::Error::corrupt("group number"))?;
        let bitmap = Bitmap::new(&bytes, super_.inodes_per_group);
        let free = bitmap.count_zeros();
        if free == group.free_inodes {
            return Ok(());
        }
        group.free_inodes = free;
        let mut end = 0;
        while let Some(one) = bitmap.next_one(end) {
            end = one.saturating_add(bitmap.ones_at(one, u32::MAX));
        }
        let never_used = super_.inodes_per_group.saturating_sub(end);
        let was = match group.flags & flags::INODE_UNINIT {
            0 => group.unused_inodes,
            _ => super_.inodes_per_group,
        };
        if never_used < was {
            if group.flags & flags::INODE_ZEROED == 0 {
                // Readers ignore the uninitialized part of the table.
                let first = u64::from(super_.inodes_per_group.saturating_sub(was));
                let byte = |block: u64| block.saturating_mul(super_.block_bytes.into());
                let start = byte(group.inode_table.0)
                    .saturating_add(first.saturating_mul(super_.inode_bytes.into()));
                let start = start.next_multiple_of(super_.block_bytes.into());
                let end =
                    byte(group.inode_table.0.saturating_add(super_.inode_table_blocks().into()));
                self.redo.zero_free_blocks(start, end, &|_| ())?;
                group.flags |= flags::INODE_ZEROED;
            }
            group.unused_inodes = never_used;
            group.flags &= !flags::INODE_UNINIT;
        }
        group.set_inode_bitmap_csum(&bytes, super_);
        Ok(self.redo.stage_block(group.inode_bitmap, bytes)?)
    }

    /// Stages the changed block bitmaps.
    pub(crate) fn rewrite_bitmaps(&mut self) -> Result<()> {
        for number in 0..self.planned.super_.groups {
            let (start, end) = group_bounds(&self.planned.super_, number);
            let mut bytes = vec![0; saturating_usize(self.planned.super_.block_bytes.into())];
            self.space.copy_bits(start, end, &mut bytes);
            if self.rewrites_checksums || bytes != self.old.block_bitmap(&self.redo, number)? {
                let group = self.old.group(number)?;
                let is_same = bytes == self.old.block_bitmap(&self.redo, number)?;
                if is_same && group.flags & flags::BLOCK_UNINIT != 0 {
                    continue;
                }
                self.planned.set_block_bitmap(&mut self.redo, number, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the new number of an inode.
    fn new_inode_number(&self, inode: InodeNumber) -> InodeNumber {
        InodeNumber(self.renumbered.get(&inode.0).copied().unwrap_or(inode.0))
    }

    /// Returns the planned superblock with renumbered system files.
    pub(crate) fn superblock(&mut self) -> Result<RawSuperblock> {
        let raw = &mut self.planned.raw;
        let hidden = [&mut raw.s_orphan_file_inum, &mut raw.s_prj_quota_inum, &mut raw.s_lpf_ino];
        for field in hidden {
            if let Some(number) = self.renumbered.get(&field.get()) {
                field.set(*number);
            }
        }
        self.planned.write_descriptors(&mut self.redo, self.old, self.now)
    }
}

/// Returns the ranges of all metadata blocks of a volume.
fn metadata_ranges<'a>(
    super_: &'a crate::format::superblock::Superblock,
    groups: &'a [crate::format::group::GroupDescriptor],
) -> impl Iterator<Item = std::ops::Range<u64>> + 'a {
    let heads = (0..super_.groups).map(GroupNumber).map(|number| {
        let start = super_.group_start(number).0;
        start..start.saturating_add(super_.base_meta_blocks(number))
    });
    let tables = groups.iter().flat_map(|group| crate::offline::group_tables(super_, group));
    heads.chain(tables)
}
