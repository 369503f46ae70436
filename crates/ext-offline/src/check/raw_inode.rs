//! Inodes as they are on disk, for every pass.

use draconis_types::FileType;

use super::Check;
use crate::blocks::role::Role as BlockRole;
use crate::format::features::Incompatible;
use crate::format::inline::POINTER_BYTES as INLINE_BYTES;
use crate::format::inode::{RawInode, flags};
use crate::units::saturating_usize;
use crate::{Result, SharedBytes};

/// Returns true if an inode has a map of pointers or extents.
pub(crate) fn has_map(check: &Check<'_>, raw: &RawInode) -> bool {
    raw.i_flags.get() & flags::INLINE_DATA == 0
        && match file_type(raw) {
            Some(FileType::File | FileType::Directory) => true,
            Some(FileType::Symlink) => !is_fast_symlink(check, raw),
            _ => false,
        }
}

pub(crate) fn file_type(raw: &RawInode) -> Option<FileType> {
    FileType::from_mode(raw.i_mode.get().into())
}

/// Returns true for a fast symbolic link: the target is in the inode, and its only block may hold
/// attributes.
pub(crate) fn is_fast_symlink(check: &Check<'_>, raw: &RawInode) -> bool {
    let flags = raw.i_flags.get();
    if check.super_.incompatible.contains(Incompatible::EA_INODE) {
        // EA inodes are counted, too.
        return inode_size(raw) < INLINE_BYTES as u64 && flags & flags::EXTENTS == 0;
    }
    let cluster = (check.super_.block_bytes >> 9).saturating_mul(check.super_.cluster_blocks);
    let attributes = if xattr_block(check, raw) == 0 { 0 } else { cluster };
    raw.i_blocks_lo.get() == attributes && flags & flags::EXTENTS == 0
}

/// Returns the xattr block of an inode; 0 for none.
pub(crate) fn xattr_block(check: &Check<'_>, raw: &RawInode) -> u64 {
    let high = match check.super_.incompatible.contains(Incompatible::SIXTY_FOUR_BIT) {
        true => u64::from(raw.i_file_acl_high.get()) << 32,
        false => 0,
    };
    high | u64::from(raw.i_file_acl_lo.get())
}

pub(crate) fn inode_size(raw: &RawInode) -> u64 {
    u64::from(raw.i_size_lo.get()) | u64::from(raw.i_size_high.get()) << 32
}

/// Reads the bytes of an inode.
pub(crate) fn read_inode_slot(check: &Check<'_>, number: u32) -> Result<SharedBytes> {
    if let Some(kept) = check.directory_inodes.get(number) {
        return Ok(SharedBytes::from_owned_bytes(kept));
    }
    let super_ = &check.super_;
    let nth = number.saturating_sub(1);
    let group = nth.checked_div(super_.inodes_per_group).unwrap_or(0);
    let in_group = u64::from(nth.checked_rem(super_.inodes_per_group).unwrap_or(0));
    let table =
        check.groups.get(saturating_usize(group.into())).map_or(0, |place| place.inode_table);
    let at = in_group.saturating_mul(super_.inode_bytes.into());
    let block_bytes = u64::from(super_.block_bytes);
    let block = table.saturating_add(at.checked_div(block_bytes).unwrap_or(0));
    let bytes = check.block(block, BlockRole::InodeTable)?;
    let at = saturating_usize(at.checked_rem(block_bytes).unwrap_or(0));
    Ok(bytes.slice(at..at.saturating_add(saturating_usize(super_.inode_bytes.into()))))
}
