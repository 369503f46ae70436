//! Adding a journal, as close to the volume's middle as in mke2fs, and removing it.

use super::{OfflineError, Result, adjust_overhead};
use crate::format::extent::Extent;
use crate::format::features::Incompatible;
use crate::format::inode::{Inode, NewInode, flags};
use crate::map::build::{MapPart, build_indirect_map};
use crate::map::build_extents::{build_extent_tree, nodes_needed};
use crate::mkfs::journal::{JOURNAL_INODE, journal_blocks_for_mib, raw_superblock};
use crate::offline::inode_location;
use crate::rewrite::VolumeRewrite;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FsBlock, InodeNumber};

const JOURNAL: InodeNumber = InodeNumber(JOURNAL_INODE);

/// Adds a journal.
#[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
pub(super) fn add_journal(rework: &mut VolumeRewrite<'_>, mib: Option<u32>) -> Result<()> {
    let super_ = rework.planned.super_.clone();
    let misuse = |text: String| OfflineError::Misuse(format!("-J size: {text}"));
    let len = journal_blocks_for_mib(mib, super_.blocks, super_.block_bytes).map_err(misuse)?;
    if u64::from(len) > super_.free_blocks / 2 {
        return Err(misuse(format!(
            "a journal of {len} blocks takes more than half of what is free"
        )));
    }
    let block_bytes = u64::from(super_.block_bytes);
    let (pointers, owned) = match super_.incompatible.contains(Incompatible::EXTENTS) {
        true => map_by_extents(rework, len)?,
        false => map_by_pointers(rework, len)?,
    };
    let now = rework.now;
    let inode = NewInode {
        mode: 0o100600,
        size_bytes: u64::from(len).saturating_mul(block_bytes),
        links: 1,
        sectors: owned.saturating_mul(block_bytes / 512),
        flags: match super_.incompatible.contains(Incompatible::EXTENTS) {
            true => flags::EXTENTS,
            false => 0,
        },
        pointers,
        accessed: now,
        modified: now,
        changed: now,
        created: now,
        ..NewInode::default()
    };
    rework.write_inode(JOURNAL, inode.encode(super_.inode_bytes))?;
    let raw = &mut rework.planned.raw;
    raw.s_journal_inum = JOURNAL_INODE.into();
    raw.s_journal_dev = 0.into();
    raw.s_journal_uuid = [0; 16];
    raw.s_jnl_backup_type = crate::format::superblock::JNL_BACKUP_BLOCKS;
    let size = u64::from(len).saturating_mul(block_bytes);
    let words =
        pointers.into_iter().chain([saturating_u32(size >> 32), crate::format::low32(size)]);
    for (to, from) in raw.s_jnl_blocks.iter_mut().zip(words) {
        *to = from.into();
    }
    let ratio = u64::from(super_.cluster_blocks);
    adjust_overhead(raw, super_.blocks_to_clusters(len.into()) / ratio, true);
    Ok(())
}

type IBlock = [u32; crate::format::inode::POINTERS];

/// Allocates the contents in few runs, then the extent nodes; returns the block count.
fn map_by_extents(rework: &mut VolumeRewrite<'_>, len: u32) -> Result<(IBlock, u64)> {
    let super_ = rework.planned.super_.clone();
    let block_bytes = super_.block_bytes;
    rework.space.search_from(rework.planned.super_.blocks / 2);
    let mut extents: Vec<Extent> = vec![];
    let mut at = 0;
    while at < len {
        let want = len.saturating_sub(at).min(crate::format::extent::INIT_MAX_LEN);
        let taken = rework.space.allocate(want.into()).ok_or(OfflineError::NoLogSpace)?;
        let blocks = saturating_u32(taken.end.saturating_sub(taken.start));
        write(rework, at, taken.start, blocks, len)?;
        let start = FsBlock(taken.start);
        extents.push(Extent { from: at, blocks, start, is_unwritten: false });
        at = at.saturating_add(blocks);
    }
    let mut places = vec![];
    for _ in 0..nodes_needed(extents.len() as u64, block_bytes) {
        places.push(rework.allocate_block()?);
    }
    let of_tree = (places.len() as u64).saturating_mul(super_.cluster_blocks.into());
    let owned = super_.blocks_to_clusters(len.into()).saturating_add(of_tree);
    let tree = build_extent_tree(&extents, block_bytes, &mut places.into_iter())
        .ok_or(OfflineError::NoLogSpace)?;
    let file = crate::FileId { inode: JOURNAL_INODE, generation: 0 };
    for (at, bytes) in tree.1 {
        rework.write(crate::blocks::role::Role::ExtentNode(file), 0, at, bytes, &[])?;
    }
    Ok((tree.0, owned))
}

fn map_by_pointers(rework: &mut VolumeRewrite<'_>, len: u32) -> Result<(IBlock, u64)> {
    let block_bytes = rework.planned.super_.block_bytes;
    let mut owned = 0u64;
    let mut next = || {
        owned = owned.saturating_add(1);
        rework.space.allocate(1).and_then(|taken| u32::try_from(taken.start).ok())
    };
    let built =
        build_indirect_map(&[(0, len)], block_bytes, &mut next).ok_or(OfflineError::NoLogSpace)?;
    for part in built.parts {
        match part {
            MapPart::Indirect { at, pointers } => {
                rework.redo.write_free_blocks(FsBlock(at), &pointers)?
            }
            MapPart::Data { at, from, blocks } => write(rework, from, at, blocks, len)?,
        }
    }
    Ok((built.pointers, owned))
}

/// Writes blocks of an empty journal of `len` blocks, beginning with its block `from`.
fn write(rework: &mut VolumeRewrite<'_>, from: u32, at: u64, blocks: u32, len: u32) -> Result<()> {
    let super_ = &rework.planned.super_;
    let block_bytes = u64::from(super_.block_bytes);
    let first = u64::from(from == 0);
    if from == 0 {
        let bytes = raw_superblock(super_.block_bytes, len, 0, super_.uuid);
        rework.redo.write_free_blocks(FsBlock(at), &bytes)?;
    }
    let end = at.saturating_add(blocks.into()).saturating_mul(block_bytes);
    Ok(rework.redo.zero_free_blocks(
        at.saturating_add(first).saturating_mul(block_bytes),
        end,
        &|_| (),
    )?)
}

/// Removes the journal, and frees its blocks.
#[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
pub(super) fn remove_journal(rework: &mut VolumeRewrite<'_>) -> Result<()> {
    let super_ = &rework.old.super_;
    let Some(number) = super_.journal else {
        let what = "-O ^has_journal: the superblock names no journal; run e2fsck -f";
        return Err(OfflineError::Unsupported(what.to_owned()));
    };
    let (block, at) = inode_location(super_, &rework.old.groups, number)?;
    let len = saturating_usize(super_.inode_bytes.into());
    let bytes = rework.redo.read_old(block, 1)?;
    let slot = bytes.get(at..at.saturating_add(len)).unwrap_or_default();
    let node = Inode::parse_used(slot, number, super_)?;
    let clusters = super_.blocks_to_clusters(rework.free_file_blocks(&node)?)
        / u64::from(super_.cluster_blocks);
    rework.write_inode(number, vec![0; len])?;
    let raw = &mut rework.planned.raw;
    raw.s_journal_inum = 0.into();
    raw.s_journal_uuid = [0; 16];
    raw.s_jnl_backup_type = 0;
    raw.s_jnl_blocks = Default::default();
    adjust_overhead(raw, clusters, false);
    Ok(())
}
