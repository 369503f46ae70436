//! The blocks that are kept for more descriptors, and inode 7, which owns them.
//!
//! ```text
//!   inode 7 ─▶ top: a pointer for each reserved block of group 0 ─▶ its copies in other groups
//! ```

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with block numbers of a checked superblock, far below 2^64"
)]

use draconis_exchange::contract::Time;

use super::{PlannedVolume, Whole, place_of_inode};
use crate::format::features::Compatible;
use crate::format::inode::seal;
use crate::format::slot::{Slot, Stamp};
use crate::format::superblock::Superblock;
use crate::format::{le32, put32};
use crate::redo::Redo;
use crate::units::index;
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// The inode that owns the reserve.
pub(crate) const RESIZE_INODE: InodeNumber = InodeNumber(7);
/// Which of its pointers leads to the top of its map.
const TOP_POINTER: usize = 13;

/// The top of the map of the reserve; `None` on a volume without one.
///
/// # Errors
/// [`Error::Corrupt`] where that map is not what the superblock says.
pub(crate) fn top(redo: &Redo<'_>, whole: &Whole) -> Result<Option<FsBlock>> {
    let super_ = &whole.super_;
    if !super_.compatible.contains(Compatible::RESIZE_INODE) {
        return Ok(None);
    }
    let damaged = Error::corrupt("reserve of descriptors").of_inode(RESIZE_INODE);
    let (block, at) = place_of_inode(super_, &whole.groups, RESIZE_INODE)?;
    let mut bytes = redo.on_disk(block, 1)?;
    let slot = Slot::of(bytes.get_mut(at..).unwrap_or_default())?;
    let top = FsBlock(slot.pointer(TOP_POINTER).into());
    if !super_.holds(top) {
        return Err(damaged);
    }
    let pointers = redo.on_disk(top, 1)?;
    for (place, block) in blocks(super_) {
        if le32(&pointers, place) != Some(block.in_32_bits()?) {
            return Err(damaged);
        }
    }
    Ok(Some(top))
}

/// The reserved blocks of group 0, and where in the top of the map each has its pointer: at its
/// place among all descriptor blocks, counted round.
fn blocks(super_: &Superblock) -> impl Iterator<Item = (usize, FsBlock)> + use<> {
    let table = super_.place().0.after(1);
    let fan_out = u64::from(super_.block_bytes) / 4;
    let first = u64::from(super_.descriptor_blocks());
    let end = first + u64::from(super_.reserved_descriptor_blocks);
    (first..end).map(move |nth| (index(nth % fan_out.max(1)) * 4, table.after(nth)))
}

/// Sets the reserve to what the superblock to come says; its map has its top at `top`. Without
/// one to come the inode is cleared, and the top is for the caller to free.
pub(crate) fn renew(
    redo: &mut Redo<'_>,
    to_be: &PlannedVolume,
    top: FsBlock,
    now: Time,
) -> Result<()> {
    let super_ = &to_be.super_;
    let block_bytes = u64::from(super_.block_bytes);
    let (inode_block, at) = place_of_inode(super_, &to_be.groups, RESIZE_INODE)?;
    let len = index(super_.inode_bytes.into());
    let is_there = super_.compatible.contains(Compatible::RESIZE_INODE);
    let copies = (1..super_.groups).map(GroupNumber).filter(|it| super_.has_superblock(*it));
    let starts: Vec<FsBlock> = copies.map(|group| super_.group_start(group)).collect();
    let reserved = u64::from(super_.reserved_descriptor_blocks);
    // Each counts as a cluster, as for e2fsprogs and the kernel.
    let sectors_each = block_bytes / 512 * u64::from(super_.cluster_blocks);
    let sectors = (reserved * (starts.len() as u64 + 1) + 1) * sectors_each;
    let change = |bytes: &mut [u8]| -> Result<()> {
        let bytes = bytes.get_mut(at..at + len).unwrap_or_default();
        let mut slot = Slot::of(bytes)?;
        if is_there {
            slot.set_pointer(TOP_POINTER, top.in_32_bits()?);
            slot.set_sectors(sectors);
            slot.set_time(Stamp::Accessed, now);
            slot.set_time(Stamp::Modified, now);
        } else {
            slot.clear();
        }
        seal(bytes, RESIZE_INODE, super_);
        Ok(())
    };
    redo.change(inode_block, change)??;
    if !is_there {
        return Ok(());
    }
    let mut pointers = vec![0; index(block_bytes)];
    let first = super_.group_start(GroupNumber(0)).0;
    for (place, block) in blocks(super_) {
        let _ = put32(&mut pointers, place, block.in_32_bits()?);
        let nth = block.0 - first;
        let mut of_copies = vec![];
        for start in &starts {
            of_copies.extend(start.after(nth).in_32_bits()?.to_le_bytes());
        }
        of_copies.resize(index(block_bytes), 0);
        redo.put(block, of_copies)?;
    }
    redo.put(top, pointers)
}
