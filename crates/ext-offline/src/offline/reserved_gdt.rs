//! Reserved GDT blocks, and the resize inode (7), which owns them.
//!
//! ```text
//!   inode 7 ─▶ dind block: a pointer per reserved block of group 0 ─▶ its copies in other groups
//! ```

use draconis_types::Time;

use super::{OfflineVolume, PlannedVolume, inode_location};
use crate::format::features::Compatible;
use crate::format::indirect::{addresses_per_block, pointer_at, set_pointer_at};
use crate::format::inode::set_checksum;
use crate::format::inode_slot::{InodeSlot, InodeTime};
use crate::format::superblock::Superblock;
use crate::redo_log::RedoLog;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// The resize inode.
pub(crate) const RESIZE_INODE: InodeNumber = InodeNumber(7);
/// Index of its double-indirect pointer.
const DIND_POINTER: usize = 13;

/// Returns the double-indirect block of the resize inode; `None` if there is none.
///
/// # Errors
/// [`Error::Corrupt`] if the map of the inode contradicts the superblock.
pub(crate) fn resize_dind_block(
    redo: &RedoLog<'_>,
    whole: &OfflineVolume,
) -> Result<Option<FsBlock>> {
    let super_ = &whole.super_;
    if !super_.compatible.contains(Compatible::RESIZE_INODE) {
        return Ok(None);
    }
    let damaged = Error::corrupt("reserve of descriptors").with_inode(RESIZE_INODE);
    let (block, at) = inode_location(super_, &whole.groups, RESIZE_INODE)?;
    let mut bytes = redo.read_old(block, 1)?;
    let slot = InodeSlot::from_bytes(bytes.get_mut(at..).unwrap_or_default())?;
    let top = FsBlock(slot.pointer(DIND_POINTER).into());
    if !super_.is_valid_block(top) {
        return Err(damaged);
    }
    let pointers = redo.read_old(top, 1)?;
    for (place, block) in reserved_gdt_blocks(super_) {
        if pointer_at(&pointers, place) != block.to_u32()? {
            return Err(damaged);
        }
    }
    Ok(Some(top))
}

/// Iterates over the reserved blocks of group 0, each with its pointer's index in the
/// double-indirect block: its number among all descriptor blocks, modulo the capacity.
#[allow(clippy::arithmetic_side_effects, reason = "the divisor is at least 1")]
fn reserved_gdt_blocks(super_: &Superblock) -> impl Iterator<Item = (u64, FsBlock)> + use<> {
    let table = super_.location().0.offset(1);
    let fan_out = addresses_per_block(super_.block_bytes);
    let first = u64::from(super_.descriptor_blocks());
    let end = first.saturating_add(super_.reserved_descriptor_blocks.into());
    (first..end).map(move |nth| (nth % fan_out.max(1), table.offset(nth)))
}

/// Rewrites the resize inode for the planned superblock; `top` is its double-indirect block. If the
/// feature is removed, the inode is cleared and the caller frees `top`.
pub(crate) fn rewrite(
    redo: &mut RedoLog<'_>,
    to_be: &PlannedVolume,
    top: FsBlock,
    now: Time,
) -> Result<()> {
    let super_ = &to_be.super_;
    let block_bytes = u64::from(super_.block_bytes);
    let (inode_block, at) = inode_location(super_, &to_be.groups, RESIZE_INODE)?;
    let len = saturating_usize(super_.inode_bytes.into());
    let is_there = super_.compatible.contains(Compatible::RESIZE_INODE);
    let copies = (1..super_.groups).map(GroupNumber).filter(|it| super_.has_superblock(*it));
    let starts: Vec<FsBlock> = copies.map(|group| super_.group_start(group)).collect();
    let reserved = u64::from(super_.reserved_descriptor_blocks);
    // Each counts as a cluster, as in e2fsprogs and the kernel.
    let sectors_each = (block_bytes / 512).saturating_mul(super_.cluster_blocks.into());
    let sectors = reserved
        .saturating_mul((starts.len() as u64).saturating_add(1))
        .saturating_add(1)
        .saturating_mul(sectors_each);
    let change = |bytes: &mut [u8]| -> Result<()> {
        let bytes = bytes.get_mut(at..at.saturating_add(len)).unwrap_or_default();
        let mut slot = InodeSlot::from_bytes(bytes)?;
        if is_there {
            slot.set_pointer(DIND_POINTER, top.to_u32()?);
            slot.set_sectors(sectors);
            slot.set_time(InodeTime::Accessed, now);
            slot.set_time(InodeTime::Modified, now);
        } else {
            slot.clear();
        }
        set_checksum(bytes, RESIZE_INODE, super_);
        Ok(())
    };
    redo.modify_block(inode_block, change)??;
    if !is_there {
        return Ok(());
    }
    let mut pointers = vec![0; saturating_usize(block_bytes)];
    let first = super_.group_start(GroupNumber(0)).0;
    for (place, block) in reserved_gdt_blocks(super_) {
        let _ = set_pointer_at(&mut pointers, place, block.to_u32()?);
        let nth = block.0.saturating_sub(first);
        let mut of_copies = vec![];
        for start in &starts {
            of_copies.extend(start.offset(nth).to_u32()?.to_le_bytes());
        }
        of_copies.resize(saturating_usize(block_bytes), 0);
        redo.stage_block(block, of_copies)?;
    }
    redo.stage_block(top, pointers)
}
