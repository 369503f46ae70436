//! Rewriting of inodes: blocks and attributes move, and the inode is written at its new number.

use super::VolumeRewrite;
use crate::blocks::role::Role;
use crate::format::bitmap::Bitmap;
use crate::format::features::Compatible;
use crate::format::group::flags;
use crate::format::inode::{Inode, flags as inode_flags, set_checksum};
use crate::format::inode_slot::InodeSlot;
use crate::offline::reserved_gdt::RESIZE_INODE;
use crate::offline::{OfflineError, Result, inode_location};
use crate::units::saturating_usize;
use crate::{FsBlock, InodeNumber};

/// The bad-blocks inode.
const BAD_BLOCKS: InodeNumber = InodeNumber(1);
/// Inode table blocks per read.
const TABLE_BLOCKS: u64 = 32;

impl VolumeRewrite<'_> {
    /// Rewrites the inodes of a group: those in use, and with new checksums all initialized ones.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(super) fn rewrite_group_inodes(&mut self, number: u32) -> Result<()> {
        let old = self.old;
        let group = *old.group(number)?;
        if group.flags & flags::INODE_UNINIT != 0 {
            return Ok(());
        }
        let super_ = &old.super_;
        let bitmap = old.inode_bitmap(&self.redo, number)?;
        let bitmap = Bitmap::new(&bitmap, super_.inodes_per_group);
        let table_blocks = u64::from(super_.inode_table_blocks());
        let len = saturating_usize(super_.inode_bytes.into());
        let per_block = super_.block_bytes / super_.inode_bytes.max(1);
        let mut read: (u64, Vec<u8>) = (0, vec![]);
        for nth in 0..super_
            .inodes_per_group
            .saturating_sub(group.unused_inodes.min(super_.inodes_per_group))
        {
            let is_used = bitmap.get(nth) == Some(true);
            if !is_used && !self.rewrites_checksums {
                continue;
            }
            let block = u64::from(nth / per_block.max(1));
            let at = saturating_usize(u64::from(nth % per_block.max(1))).saturating_mul(len);
            let read_blocks = (read.1.len() / saturating_usize(super_.block_bytes.into())) as u64;
            if !(read.0..read.0.saturating_add(read_blocks)).contains(&block) {
                let count = TABLE_BLOCKS.min(table_blocks.saturating_sub(block.min(table_blocks)));
                read = (block, self.redo.read_old(group.inode_table.offset(block), count)?);
            }
            let from = saturating_usize(block.saturating_sub(read.0))
                .saturating_mul(saturating_usize(super_.block_bytes.into()))
                .saturating_add(at);
            let slot = read.1.get(from..from.saturating_add(len)).unwrap_or_default().to_vec();
            let inode = InodeNumber(
                number
                    .saturating_mul(super_.inodes_per_group)
                    .saturating_add(nth)
                    .saturating_add(1),
            );
            if is_used {
                self.rewrite_inode(inode, slot)?;
            } else if slot.iter().any(|byte| *byte != 0) {
                self.write_inode(inode, slot)?;
            }
        }
        Ok(())
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn rewrite_inode(&mut self, number: InodeNumber, mut slot: Vec<u8>) -> Result<()> {
        let super_ = &self.old.super_;
        let before = slot.clone();
        let to = self.new_inode_number(number);
        let is_special = number == BAD_BLOCKS
            || number == RESIZE_INODE && super_.compatible.contains(Compatible::RESIZE_INODE);
        let mode = InodeSlot::from_bytes(&mut slot)?.mode();
        if is_special || mode == 0 {
            if number == BAD_BLOCKS
                && InodeSlot::from_bytes(&mut slot)?.sectors() != 0
                && !self.rewrites_checksums
            {
                let what = "a list of bad blocks is not moved; use resize2fs";
                return Err(OfflineError::Unsupported(what.to_owned()));
            }
            if self.rewrites_checksums {
                self.write_inode(number, slot)?;
            }
            return Ok(());
        }
        let node = Inode::parse_used(&slot, number, super_)?;
        if node.has_map(super_) {
            self.move_map(&node, to, &mut slot)?;
        } else if node.is_inline() && node.flags & inode_flags::INLINE_DATA != 0 {
            self.renumber_inline_dirents(&node, &mut slot)?;
        }
        self.rewrite_xattrs(&node, &mut slot)?;
        if to != number {
            let group = to.0.saturating_sub(1) / self.old.super_.inodes_per_group;
            let group = self.planned.groups.get_mut(saturating_usize(group.into()));
            if let Some(group) = group.filter(|_| mode & 0o170_000 == 0o040_000) {
                group.directories = group.directories.saturating_add(1);
            }
        }
        if self.old.super_.journal == Some(number) && self.planned.raw.s_jnl_backup_type == 1 {
            let pointers = InodeSlot::from_bytes(&mut slot)?.pointers();
            for (to, from) in self.planned.raw.s_jnl_blocks.iter_mut().zip(pointers) {
                to.set(from);
            }
        }
        if to != number || self.rewrites_checksums || slot != before {
            self.write_inode(to, slot)?;
        }
        Ok(())
    }

    /// Stages an inode at its planned location.
    pub(crate) fn write_inode(&mut self, number: InodeNumber, mut slot: Vec<u8>) -> Result<()> {
        let super_ = &self.planned.super_;
        set_checksum(&mut slot, number, super_);
        let (block, at) = inode_location(super_, &self.planned.groups, number)?;
        let len = slot.len();
        self.redo.modify_block(block, |bytes| {
            if let Some(place) = bytes.get_mut(at..at.saturating_add(len)) {
                place.copy_from_slice(&slot);
            }
        })?;
        Ok(())
    }

    /// Rewrites the extended attributes of an inode: moves the xattr block, and updates references
    /// to renumbered EA inodes.
    fn rewrite_xattrs(&mut self, node: &Inode, slot: &mut [u8]) -> Result<()> {
        let mut slot = InodeSlot::from_bytes(slot)?;
        if self.renumbers_ea_inodes {
            let mut list = slot.inline_xattrs().to_vec();
            if !list.is_empty() && self.renumber_ea_inodes(&mut list, 0)? {
                slot.set_inline_xattrs(&list);
            }
        }
        let Some(block) = node.xattr_block else { return Ok(()) };
        if !self.old.super_.is_valid_block(block) {
            let what = "extended attribute block: place";
            return Err(crate::Error::corrupt(what).with_inode(node.number).into());
        }
        let to = match self.xattr_blocks.get(&block.0) {
            Some(to) => *to,
            None => self.move_xattr_block(block)?,
        };
        if to != block.0 {
            slot.set_xattr_block(to);
        }
        Ok(())
    }

    /// Moves an xattr block if needed; returns its new block.
    fn move_xattr_block(&mut self, block: FsBlock) -> Result<u64> {
        let must_move = block.0 >= self.space.end();
        if !must_move && !self.rewrites_checksums && !self.renumbers_ea_inodes {
            return Ok(block.0);
        }
        let mut bytes = self.read(Role::XattrBlock, block)?;
        let was = bytes.clone();
        if self.renumbers_ea_inodes {
            self.renumber_ea_inodes(&mut bytes, 32)?;
        }
        let to = if must_move { self.allocate_block()? } else { block.0 };
        self.write(Role::XattrBlock, block.0, to, bytes, &was)?;
        self.xattr_blocks.insert(block.0, to);
        Ok(to)
    }
}
