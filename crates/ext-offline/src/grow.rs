//! Growing an unmounted volume: fills the last group and adds groups. New descriptors use the
//! reserved GDT blocks; beyond these they are spread (`meta_bg`).
//!
//! ```text
//!   before   | super | descriptors | reserved GDT ...... | .. | last group, partial |
//!   after    | super | descriptors ....... | reserved .. | .. | last group ........ | new | new |
//!                                    └── never moves ──┘
//! ```
//! Law 1: everything is known to fit before a byte is written, the length of a file included.
//! Law 2: nothing moves. With clusters, the volume ends with a whole cluster, and the new part of a
//! group begins with one.
//! Law 3: blocks beyond the old end are written first, existing blocks in one atomic change
//! (`redo`).

use std::ops::Range;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::Time;

use crate::format::bitmap::{BitRun, fill};
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::{GroupDescriptor, flags};
use crate::format::low32;
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::mkfs::MIN_LAST_GROUP_BLOCKS;
pub use crate::offline::{OfflineError, Result};
use crate::offline::{
    OfflineVolume, PlannedVolume, group_bounds, group_tables, reserved_gdt, set_bits_in_group,
};
use crate::redo_log::RedoLog;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FsBlock, GroupNumber};

/// Target of a grow.
pub struct GrowTarget<'a> {
    /// The disk, at least as long as the planned volume.
    pub disk: &'a dyn Disk,
    /// Byte from which the disk reads as zeros, so that zeros need not be written.
    pub zeroed_from_bytes: u64,
    /// Write time for the superblock.
    pub now: Time,
    /// Called with the bytes of new groups submitted to the disk.
    pub progress: &'a dyn Fn(u64),
}

/// Plan to grow a volume.
#[derive(Debug)]
pub struct GrowPlan {
    old: OfflineVolume,
    /// The planned superblock, with the old free counts.
    raw: RawSuperblock,
    new: Superblock,
    /// Double-indirect block of the resize inode, if it must change.
    resize_dind_block: Option<FsBlock>,
}

impl GrowPlan {
    /// Checks the unmounted, [`crate::recover_unmounted`]d volume on `disk`, and plans to grow it to
    /// `size_bytes`. The result is smaller by a partial block, and by a last group too small for files. The disk
    /// may be shorter until [`Self::write`].
    ///
    /// # Errors
    /// All of [`OfflineError`] except [`OfflineError::ShortDisk`].
    pub fn plan(disk: &Arc<dyn Disk>, size_bytes: u64) -> Result<Self> {
        let old = OfflineVolume::load_checked(disk, "growing")?;
        let (raw, new) = target_superblock(&old, size_bytes)?;
        let redo = RedoLog::new(&**disk, new.block_bytes, vec![]);
        let is_changed = new.reserved_descriptor_blocks != old.super_.reserved_descriptor_blocks
            || new.compatible != old.super_.compatible
            || (old.super_.groups..new.groups).any(|it| new.has_superblock(GroupNumber(it)));
        let resize_dind_block =
            if is_changed { reserved_gdt::resize_dind_block(&redo, &old)? } else { None };
        Ok(Self { old, raw, new, resize_dind_block })
    }

    /// Returns the current size in bytes.
    pub fn old_len_bytes(&self) -> u64 {
        self.old.super_.len_bytes()
    }

    /// Returns the planned size in bytes; unchanged if there is nothing to do.
    pub fn len_bytes(&self) -> u64 {
        self.new.len_bytes()
    }

    /// Returns the planned superblock, with the old free counts.
    pub fn superblock(&self) -> &Superblock {
        &self.new
    }

    fn new_groups(&self) -> Range<u32> {
        self.old.super_.groups..self.new.groups
    }

    /// Returns the bytes of new groups that must be written, for a progress bar.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub fn bytes_to_write(&self, zeroed_from_bytes: u64) -> u64 {
        let block_bytes = u64::from(self.new.block_bytes);
        let most = zeroed_from_bytes / block_bytes;
        let table = u64::from(self.new.inode_table_blocks());
        let blocks = |group| {
            let (start, _) = group_bounds(&self.new, group);
            table.min(most.saturating_sub(start)).saturating_add(2)
        };
        let all = self.new_groups().fold(0u64, |all, group| all.saturating_add(blocks(group)));
        all.saturating_mul(block_bytes)
    }

    /// Grows the volume, and waits until the change is durable.
    ///
    /// # Errors
    /// [`OfflineError::ShortDisk`]; [`OfflineError::NoLogSpace`] without free blocks for the redo
    /// log; device errors.
    pub fn write(&self, target: &GrowTarget<'_>) -> Result<()> {
        let (disk_bytes, needed_bytes) = (target.disk.properties().len_bytes, self.len_bytes());
        if needed_bytes > disk_bytes {
            return Err(OfflineError::ShortDisk { disk_bytes, needed_bytes });
        }
        let old = &self.old.super_;
        if old.blocks == self.new.blocks {
            return Ok(());
        }
        let mut redo = RedoLog::new(target.disk, self.new.block_bytes, vec![]);
        let mut planned = PlannedVolume {
            raw: self.raw.clone(),
            super_: self.new.clone(),
            groups: self.old.groups.clone(),
        };
        let mut room = vec![];
        for number in self.new_groups() {
            let (group, free) = self.write_group(&mut redo, number, target)?;
            planned.groups.push(group);
            room.push(free);
        }
        let last = old.groups.saturating_sub(1);
        let ratio = u64::from(old.cluster_blocks);
        let end = group_bounds(&self.new, last).1;
        let gained = old.blocks.next_multiple_of(ratio).min(end)..end;
        room.push(gained.clone());
        // As many as may change, and the index.
        let copies = (0..self.new.groups).filter(|it| self.new.has_superblock(GroupNumber(*it)));
        let each = u64::from(self.new.descriptor_blocks())
            .saturating_add(self.new.reserved_descriptor_blocks.into())
            .saturating_add(2);
        let enough =
            (copies.count() as u64).saturating_mul(each).saturating_mul(2).saturating_add(16);
        let found: u64 = room.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        if found < enough {
            let last = room.len().saturating_sub(1);
            room.splice(last..last, self.old.free_blocks(&redo, 0, enough)?);
        }
        redo.set_log_ranges(room)?;
        self.fill_last_group(&mut redo, &mut planned, last, &gained)?;
        if let Some(top) = self.resize_dind_block {
            reserved_gdt::rewrite(&mut redo, &planned, top, target.now)?;
            if !self.new.compatible.contains(Compatible::RESIZE_INODE) {
                self.free_block(&mut redo, &mut planned, top)?;
            }
        }
        let raw = planned.write_descriptors(&mut redo, &self.old, target.now)?;
        Ok(redo.commit(&raw)?)
    }

    /// Writes a new group, which no reader sees yet; returns its descriptor and its free blocks.
    fn write_group(
        &self,
        redo: &mut RedoLog<'_>,
        number: u32,
        target: &GrowTarget<'_>,
    ) -> Result<(GroupDescriptor, Range<u64>)> {
        let new = &self.new;
        let (start, end) = group_bounds(new, number);
        let head = FsBlock(start.saturating_add(new.base_meta_blocks(GroupNumber(number))));
        let mut group = GroupDescriptor {
            block_bitmap: head,
            inode_bitmap: head.offset(1),
            inode_table: head.offset(2),
            free_clusters: 0,
            free_inodes: new.inodes_per_group,
            directories: 0,
            unused_inodes: 0,
            flags: 0,
            bitmap_checksums: [0; 2],
        };
        if new.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS) {
            group.unused_inodes = new.inodes_per_group;
            group.flags = flags::INODE_UNINIT | flags::INODE_ZEROED;
        }
        let [.., table] = group_tables(new, &group);
        let ratio = u64::from(new.cluster_blocks);
        let data = table.end.next_multiple_of(ratio);
        group.free_clusters = saturating_u32(end.saturating_sub(data).div_ceil(ratio));
        let len = saturating_usize(new.block_bytes.into());
        let mut blocks = vec![0xFF; len];
        set_bits_in_group(&mut blocks, data..end, (new, number), false);
        let mut inodes = vec![0xFF; len];
        fill(&mut inodes, BitRun { start: 0, len: new.inodes_per_group }, false);
        group.set_block_bitmap_csum(&blocks, new);
        if group.flags & flags::INODE_UNINIT == 0 {
            group.set_inode_bitmap_csum(&inodes, new);
        }
        let bytes = [blocks, inodes].concat();
        redo.write_free_blocks(group.block_bitmap, &bytes)?;
        (target.progress)(bytes.len() as u64);
        let at_bytes = |block: u64| block.saturating_mul(new.block_bytes.into());
        // The head is written with the descriptors, except for the reserved GDT blocks.
        redo.zero_free_blocks(
            at_bytes(start),
            at_bytes(head.0).min(target.zeroed_from_bytes),
            &|_| (),
        )?;
        let end_bytes = at_bytes(table.end).min(target.zeroed_from_bytes);
        redo.zero_free_blocks(at_bytes(table.start), end_bytes, target.progress)?;
        Ok((group, data..end))
    }

    /// Frees the blocks that the last group gains.
    fn fill_last_group(
        &self,
        redo: &mut RedoLog<'_>,
        to_be: &mut PlannedVolume,
        last: u32,
        gained: &Range<u64>,
    ) -> Result<()> {
        if gained.is_empty() {
            return Ok(());
        }
        let mut bitmap = self.old.block_bitmap(redo, last)?;
        set_bits_in_group(&mut bitmap, gained.clone(), (&self.new, last), false);
        to_be.set_block_bitmap(redo, last, bitmap)
    }

    /// Frees a block of the old volume.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn free_block(
        &self,
        redo: &mut RedoLog<'_>,
        to_be: &mut PlannedVolume,
        block: FsBlock,
    ) -> Result<()> {
        let nth = block.0.saturating_sub(self.new.first_data_block.into());
        let number = saturating_u32(nth / u64::from(self.new.blocks_per_group));
        let is_last = number.saturating_add(1) == self.old.super_.groups;
        let mut bitmap = if is_last && self.new.blocks != self.old.super_.blocks {
            match to_be.groups.get(saturating_usize(number.into())) {
                Some(group) => redo.block(group.block_bitmap)?,
                None => return Err(crate::Error::corrupt("group number").into()),
            }
        } else {
            self.old.block_bitmap(redo, number)?
        };
        let ratio = u64::from(self.new.cluster_blocks);
        let start = block.0.saturating_sub(nth % ratio);
        set_bits_in_group(
            &mut bitmap,
            start..start.saturating_add(ratio),
            (&self.new, number),
            false,
        );
        to_be.set_block_bitmap(redo, number, bitmap)
    }
}

/// Returns the superblock for `size_bytes`, with the old free counts.
#[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
fn target_superblock(
    volume: &OfflineVolume,
    size_bytes: u64,
) -> Result<(RawSuperblock, Superblock)> {
    let (raw, old) = (&volume.raw, &volume.super_);
    let block_bytes = u64::from(old.block_bytes);
    let first = u64::from(old.first_data_block);
    let per_group = u64::from(old.blocks_per_group);
    let ratio = u64::from(old.cluster_blocks);
    let asked = size_bytes / block_bytes;
    if asked < old.blocks {
        return Err(OfflineError::Shrink { blocks: old.blocks, block_bytes: old.block_bytes });
    }
    let asked = asked.saturating_sub(asked % ratio).max(old.blocks);
    let wide = old.incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
    let numbered = u64::from(u32::MAX / old.inodes_per_group);
    let full = numbered.saturating_mul(per_group).saturating_add(first).min(match wide {
        true => 1 << 40,
        false => u32::MAX.into(),
    });
    let too_large = |full: u64| OfflineError::TooLarge {
        asked_bytes: size_bytes,
        largest_bytes: full.saturating_mul(block_bytes),
    };
    if asked > full {
        return Err(too_large(full));
    }
    let rest = asked.saturating_sub(first) % per_group;
    let (new_raw, new) = superblocks_with_size(raw, old, asked)?;
    if rest == 0 || new.groups == old.groups {
        return Ok((new_raw, new));
    }
    let head = new.base_meta_blocks(GroupNumber(new.groups.saturating_sub(1)));
    let own = head.saturating_add(new.inode_table_blocks().into()).saturating_add(2);
    let least =
        own.next_multiple_of(ratio).saturating_add(MIN_LAST_GROUP_BLOCKS.next_multiple_of(ratio));
    if rest >= least {
        return Ok((new_raw, new));
    }
    let (new_raw, new) = superblocks_with_size(raw, old, asked.saturating_sub(rest))?;
    Ok((new_raw, new))
}

fn superblocks_with_size(
    raw: &RawSuperblock,
    old: &Superblock,
    blocks: u64,
) -> crate::Result<(RawSuperblock, Superblock)> {
    let mut raw = raw.clone();
    set_block_count(&mut raw, old, blocks)?;
    let grown = set_checksum_and_parse(&mut raw)?;
    let taken = grown.descriptor_blocks().saturating_sub(old.descriptor_blocks());
    let reserved = u32::from(old.reserved_descriptor_blocks);
    let is_meta = old.incompatible.contains(Incompatible::META_BG);
    if !is_meta {
        let left = reserved.saturating_sub(taken);
        raw.s_reserved_gdt_blocks = u16::try_from(left).unwrap_or(u16::MAX).into();
        if taken > reserved {
            // Further descriptors are spread, so no GDT blocks are reserved any more.
            let [compatible, incompatible, read_only] = raw.features();
            let compatible = compatible & !Compatible::RESIZE_INODE.bits();
            let incompatible = incompatible | Incompatible::META_BG.bits();
            raw.set_features([compatible, incompatible, read_only]);
            raw.s_first_meta_bg = old.descriptor_blocks().saturating_add(reserved).into();
        }
    }
    let new = set_checksum_and_parse(&mut raw)?;
    if old.cluster_blocks > 1 {
        // Shared clusters are not counted here; the kernel computes the overhead if this is 0.
        raw.s_overhead_blocks = 0.into();
    } else if old.overhead_clusters != 0 {
        let more = new.overhead().saturating_sub(old.overhead());
        raw.s_overhead_blocks = saturating_u32(more).saturating_add(old.overhead_clusters).into();
    }
    Ok((raw, new))
}

/// Sets the block count, and with it the groups, inodes and reserved blocks.
pub(crate) fn set_block_count(
    raw: &mut RawSuperblock,
    old: &Superblock,
    blocks: u64,
) -> crate::Result<()> {
    let wide = old.incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
    raw.s_blocks_count_lo = low32(blocks).into();
    let in_groups = blocks.saturating_sub(old.first_data_block.into());
    let groups = in_groups.div_ceil(old.blocks_per_group.into());
    let inodes = groups.saturating_mul(old.inodes_per_group.into());
    raw.s_inodes_count = u32::try_from(inodes).map_err(|_| crate::Error::TooLarge)?.into();
    let per_block = u128::from(old.reserved_blocks).saturating_mul(u128::from(blocks));
    let reserved = per_block.checked_div(old.blocks.into()).unwrap_or(0);
    let reserved = u64::try_from(reserved).unwrap_or(0);
    raw.s_r_blocks_count_lo = low32(reserved).into();
    if wide {
        raw.s_blocks_count_hi = low32(blocks >> 32).into();
        raw.s_r_blocks_count_hi = low32(reserved >> 32).into();
    } else {
        FsBlock(blocks).to_u32()?;
    }
    Ok(())
}

/// Sets the checksum of a raw superblock and parses it.
pub(crate) fn set_checksum_and_parse(raw: &mut RawSuperblock) -> crate::Result<Superblock> {
    raw.set_checksum();
    raw.check()
}
