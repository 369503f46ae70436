//! Reserved GDT blocks: space behind the descriptors for growth, owned by the resize inode.
//!
//! ```text
//!   inode 7 ─▶ dind block ─▶ each reserved block of group 0 ─▶ its copies in backup groups
//! ```

use super::layout::Layout;
use crate::format::indirect::set_pointer_at;
use crate::format::inode::{NewInode, POINTERS, set_checksum};
use crate::{FsBlock, GroupNumber, InodeNumber};

/// The resize inode.
pub(super) const INODE: u32 = 7;

/// Builds the double-indirect block of the resize inode. It points to each reserved descriptor
/// block of group 0, which points to its copies. A block's index here is its number among all
/// descriptor blocks, modulo the capacity.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
pub(super) fn resize_dind_block(layout: &Layout) -> crate::Result<Vec<u8>> {
    let mut top = vec![0; layout.block_len()];
    let first = u64::from(layout.super_.descriptor_blocks());
    let table = layout.backup_start(0).saturating_add(1);
    for nth in first..first.saturating_add(layout.super_.reserved_descriptor_blocks.into()) {
        let at = nth % layout.pointers_per_block();
        let _ = set_pointer_at(&mut top, at, FsBlock(table.saturating_add(nth)).to_u32()?);
    }
    Ok(top)
}

/// Builds the reserved descriptor blocks of group 0, which point to their copies in other groups.
pub(super) fn reserved_gdt_blocks(layout: &Layout) -> crate::Result<Vec<u8>> {
    let super_ = &layout.super_;
    let backups: Vec<u64> = (1..super_.groups)
        .filter(|group| super_.has_superblock(GroupNumber(*group)))
        .map(|group| u64::from(group).saturating_mul(super_.blocks_per_group.into()))
        .collect();
    let mut bytes = vec![];
    // Linux and e2fsck expect a copy at the offset from its group's start that the block has from
    // block 0, even if group 0 starts elsewhere.
    let first =
        layout.backup_start(0).saturating_add(1).saturating_add(super_.descriptor_blocks().into());
    for nth in first..first.saturating_add(super_.reserved_descriptor_blocks.into()) {
        let start = bytes.len();
        for backup in &backups {
            bytes.extend(FsBlock(backup.saturating_add(nth)).to_u32()?.to_le_bytes());
        }
        bytes.resize(start.saturating_add(layout.block_len()), 0);
    }
    Ok(bytes)
}

/// Returns the blocks that the resize inode owns: the double-indirect block, its blocks in group 0
/// and all copies, each counted as a cluster.
fn owned_blocks(layout: &Layout) -> u64 {
    let super_ = &layout.super_;
    let copies = (0..super_.groups).filter(|group| super_.has_superblock(GroupNumber(*group)));
    let copies = copies.count() as u64;
    copies
        .saturating_mul(super_.reserved_descriptor_blocks.into())
        .saturating_add(1)
        .saturating_mul(layout.cluster_blocks())
}

/// Builds the resize inode, with a size beyond any real file; `top` is its double-indirect block.
pub(super) fn inode(layout: &Layout, top: u64) -> crate::Result<Vec<u8>> {
    let now = layout.creation_time();
    let block_bytes = u64::from(layout.super_.block_bytes);
    let fan_out = layout.pointers_per_block();
    let mut pointers = [0; POINTERS];
    let [.., double, _] = &mut pointers;
    *double = FsBlock(top).to_u32()?;
    let inode = NewInode {
        mode: 0o100600,
        size_bytes: block_bytes.saturating_mul(
            fan_out.saturating_add(12).saturating_add(fan_out.saturating_mul(fan_out)),
        ),
        links: 1,
        sectors: owned_blocks(layout).saturating_mul(block_bytes / 512),
        pointers,
        accessed: now,
        modified: now,
        changed: now,
        created: now,
        ..NewInode::default()
    };
    let mut bytes = inode.encode(layout.super_.inode_bytes);
    set_checksum(&mut bytes, InodeNumber(INODE), &layout.super_);
    Ok(bytes)
}
