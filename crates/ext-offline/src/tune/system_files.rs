//! Adding and removing system files: the orphan file and the quota files.
//!
//! Law: usage is counted from all inodes before any change; quota files and the orphan file have no
//! owner.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::{OfflineError, Result};
use crate::blocks::role::Role;
use crate::format::bitmap::{BitRun, Bitmap, fill};
use crate::format::extent::Extent;
use crate::format::features::Incompatible;
use crate::format::inode::{DIRECT_POINTERS, Inode, NewInode, flags};
use crate::format::inode_slot::InodeSlot;
use crate::format::orphan_file;
use crate::format::quota::{self, QuotaType, QuotaUsage};
use crate::format::xattr::{NewXattr, edit};
use crate::map::build::{MapPart, build_indirect_map};
use crate::map::build_extents::{build_extent_tree, nodes_needed};
use crate::mkfs;
use crate::offline::inode_location;
use crate::rewrite::VolumeRewrite;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FileId, FsBlock, InodeNumber};

/// System files to add or remove; `None` leaves a file as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SystemFileChanges {
    /// The orphan file.
    pub(super) orphans: Option<bool>,
    /// Quotas of users, groups and projects.
    pub(super) quotas: Option<[bool; 3]>,
}

/// Adds and removes system files.
pub(super) fn apply_changes(
    rework: &mut VolumeRewrite<'_>,
    hidden: SystemFileChanges,
) -> Result<()> {
    let mut inodes = InodeBitmaps::default();
    if let Some(wanted) = hidden.quotas {
        change_quota_files(rework, &mut inodes, wanted)?;
    }
    match hidden.orphans {
        Some(true) => {
            let inode = inodes.allocate_inode(rework)?;
            let blocks = mkfs::orphan_blocks(rework.planned.super_.blocks);
            let block_bytes = saturating_usize(rework.planned.super_.block_bytes.into());
            let block = |_: u32| orphan_file::empty_block(block_bytes);
            let role = Role::OrphanFile(FileId { inode: inode.0, generation: 0 });
            create_file(
                rework,
                inode,
                role,
                0,
                u64::from(blocks).saturating_mul(block_bytes as u64),
                &block,
            )?;
            rework.planned.raw.s_orphan_file_inum = inode.0.into();
        }
        Some(false) => {
            if let Some(inode) = rework.old.super_.orphan_file {
                delete_file(rework, inode)?;
                inodes.free_inode(rework, inode)?;
            }
            rework.planned.raw.s_orphan_file_inum = 0.into();
        }
        None => {}
    }
    inodes.write(rework)
}

fn change_quota_files(
    rework: &mut VolumeRewrite<'_>,
    inodes: &mut InodeBitmaps,
    wanted: [bool; 3],
) -> Result<()> {
    let there = rework.old.super_.quotas;
    let all = QuotaType::ALL.into_iter().zip(there.into_iter().zip(wanted));
    let missing: Vec<QuotaType> = all
        .clone()
        .filter_map(|(kind, (inode, is_wanted))| (is_wanted && inode == 0).then_some(kind))
        .collect();
    let counted = if missing.is_empty() { BTreeMap::new() } else { count_usage(rework)? };
    for (kind, (inode, is_wanted)) in all {
        let inode = match (inode, is_wanted) {
            (0, false) | (1.., true) => continue,
            (0, true) => {
                let inode = match kind {
                    QuotaType::User => InodeNumber(quota::USER_QUOTA_INODE),
                    QuotaType::Group => InodeNumber(quota::GROUP_QUOTA_INODE),
                    QuotaType::Project => inodes.allocate_inode(rework)?,
                };
                let of_kind = counted.iter().filter(|((other, _), _)| *other == kind);
                let of_kind = of_kind.map(|((_, id), usage)| (*id, *usage)).collect();
                let bytes = quota::build_quota_file(kind, &of_kind);
                let block_bytes = saturating_usize(rework.planned.super_.block_bytes.into());
                let block = |nth: u32| {
                    let part = bytes.chunks(block_bytes).nth(saturating_usize(nth.into()));
                    let mut block = part.unwrap_or_default().to_vec();
                    block.resize(block_bytes, 0);
                    block
                };
                let size = bytes.len() as u64;
                create_file(rework, inode, Role::Quota, flags::IMMUTABLE, size, &block)?;
                inode.0
            }
            (old, false) => {
                let old = InodeNumber(old);
                delete_file(rework, old)?;
                if kind == QuotaType::Project {
                    inodes.free_inode(rework, old)?;
                }
                0
            }
        };
        let raw = &mut rework.planned.raw;
        match kind {
            QuotaType::User => raw.s_usr_quota_inum = inode.into(),
            QuotaType::Group => raw.s_grp_quota_inum = inode.into(),
            QuotaType::Project => raw.s_prj_quota_inum = inode.into(),
        }
    }
    Ok(())
}

/// Counts the usage of every user, group and project.
fn count_usage(rework: &VolumeRewrite<'_>) -> Result<BTreeMap<(QuotaType, u32), QuotaUsage>> {
    let super_ = &rework.old.super_;
    let mut all: BTreeMap<(QuotaType, u32), QuotaUsage> = BTreeMap::new();
    let len = saturating_usize(super_.inode_bytes.into());
    for group in 0..super_.groups {
        let mut read: Option<(FsBlock, Vec<u8>)> = None;
        for nth in rework.used_inodes(group)? {
            let inode = InodeNumber(
                group.saturating_mul(super_.inodes_per_group).saturating_add(nth).saturating_add(1),
            );
            if !super_.is_valid_inode(inode) {
                continue;
            }
            let (block, at) = inode_location(super_, &rework.old.groups, inode)?;
            let mut bytes = match read.take().filter(|(there, _)| *there == block) {
                Some((_, bytes)) => bytes,
                None => rework.redo.read_old(block, 1)?,
            };
            let slot = bytes.get_mut(at..at.saturating_add(len)).unwrap_or_default();
            let slot = InodeSlot::from_bytes(slot)?;
            if slot.links() > 0 && !slot.is_ea_inode() {
                let (user, group) = slot.owner();
                let blocks = slot.allocated_bytes(super_.block_bytes).cast_signed();
                let usage = QuotaUsage {
                    inodes: charged_ea_entries(rework, inode, &slot)?.saturating_add(1),
                    bytes: blocks,
                };
                for account in [
                    (QuotaType::User, user),
                    (QuotaType::Group, group),
                    (QuotaType::Project, slot.project()),
                ] {
                    let sum = all.entry(account).or_default();
                    *sum = sum.plus(usage);
                }
            }
            read = Some((block, bytes));
        }
    }
    Ok(all)
}

/// Counts the entries of an inode whose EA inodes are charged to its owner. Those in the format of
/// Lustre are not.
fn charged_ea_entries(
    rework: &VolumeRewrite<'_>,
    inode: InodeNumber,
    slot: &InodeSlot<'_>,
) -> Result<i64> {
    let super_ = &rework.old.super_;
    if !super_.incompatible.contains(Incompatible::EA_INODE) {
        return Ok(0);
    }
    let mut all = edit::read_body(slot.inline_xattrs()).map_err(|error| error.with_inode(inode))?;
    let block = FsBlock(slot.xattr_block());
    if super_.is_valid_block(block) {
        let bytes = rework.redo.read_old(block, 1)?;
        all.extend(edit::read_block(&bytes).map_err(|error| error.with_inode(inode))?);
    }
    let mut count = 0i64;
    for value in all.iter().filter_map(NewXattr::ea_inode) {
        let (block, at) = inode_location(super_, &rework.old.groups, value.inode)?;
        let mut bytes = rework.redo.read_old(block, 1)?;
        let of_value = InodeSlot::from_bytes(bytes.get_mut(at..).unwrap_or_default())?;
        count = count.saturating_add(i64::from(!of_value.is_ea_inode_of(inode, slot.generation())));
    }
    Ok(count)
}

/// Creates a file of `size` bytes with the blocks that `block` returns.
fn create_file(
    rework: &mut VolumeRewrite<'_>,
    inode: InodeNumber,
    role: Role,
    fixed: u32,
    size: u64,
    block: &dyn Fn(u32) -> Vec<u8>,
) -> Result<()> {
    let super_ = rework.planned.super_.clone();
    let count = saturating_u32(size.div_ceil(super_.block_bytes.into()));
    let (pointers, owned, of_map) = match super_.incompatible.contains(Incompatible::EXTENTS) {
        true => {
            let mut extents: Vec<Extent> = vec![];
            let mut at = 0;
            while at < count {
                let taken = rework
                    .space
                    .allocate(count.saturating_sub(at).into())
                    .ok_or(OfflineError::NoLogSpace)?;
                let blocks = saturating_u32(taken.end.saturating_sub(taken.start));
                for nth in 0..blocks {
                    rework.write(
                        role,
                        0,
                        taken.start.saturating_add(nth.into()),
                        block(at.saturating_add(nth)),
                        &[],
                    )?;
                }
                let start = FsBlock(taken.start);
                extents.push(Extent { from: at, blocks, start, is_unwritten: false });
                at = at.saturating_add(blocks);
            }
            let mut places = vec![];
            for _ in 0..nodes_needed(extents.len() as u64, super_.block_bytes) {
                places.push(rework.allocate_block()?);
            }
            let of_tree = (places.len() as u64).saturating_mul(super_.cluster_blocks.into());
            let owned = super_.blocks_to_clusters(count.into()).saturating_add(of_tree);
            let tree = build_extent_tree(&extents, super_.block_bytes, &mut places.into_iter());
            let (pointers, nodes) = tree.ok_or(OfflineError::NoLogSpace)?;
            let file = FileId { inode: inode.0, generation: 0 };
            for (at, bytes) in nodes {
                rework.write(Role::ExtentNode(file), 0, at, bytes, &[])?;
            }
            (pointers, owned, flags::EXTENTS)
        }
        false => {
            let mut owned = 0u64;
            let mut next = || {
                owned = owned.saturating_add(1);
                rework.space.allocate(1).and_then(|taken| u32::try_from(taken.start).ok())
            };
            let built = build_indirect_map(&[(0, count)], super_.block_bytes, &mut next)
                .ok_or(OfflineError::NoLogSpace)?;
            for part in built.parts {
                match part {
                    MapPart::Indirect { at, pointers } => {
                        rework.redo.write_free_blocks(FsBlock(at), &pointers)?;
                    }
                    MapPart::Data { at, from, blocks } => {
                        for nth in 0..blocks {
                            rework.write(
                                role,
                                0,
                                at.saturating_add(nth.into()),
                                block(from.saturating_add(nth)),
                                &[],
                            )?;
                        }
                    }
                }
            }
            debug_assert!(owned >= u64::from(count.min(DIRECT_POINTERS)));
            (built.pointers, owned, 0)
        }
    };
    let now = rework.now;
    let file = NewInode {
        mode: 0o100_600,
        size_bytes: size,
        links: 1,
        sectors: owned.saturating_mul(u64::from(super_.block_bytes / 512)),
        flags: of_map | fixed,
        pointers,
        accessed: now,
        modified: now,
        changed: now,
        created: now,
        ..NewInode::default()
    };
    rework.write_inode(inode, file.encode(super_.inode_bytes))
}

/// Frees the blocks of a file, and clears its inode.
fn delete_file(rework: &mut VolumeRewrite<'_>, inode: InodeNumber) -> Result<()> {
    let super_ = &rework.old.super_;
    let (block, at) = inode_location(super_, &rework.old.groups, inode)?;
    let len = saturating_usize(super_.inode_bytes.into());
    let bytes = rework.redo.read_old(block, 1)?;
    let slot = bytes.get(at..at.saturating_add(len)).unwrap_or_default();
    let node = Inode::parse_used(slot, inode, super_)?;
    rework.free_file_blocks(&node)?;
    rework.write_inode(inode, vec![0; len])
}

/// Planned inode bitmaps of the changed groups.
#[derive(Default)]
struct InodeBitmaps(BTreeMap<u32, Vec<u8>>);

impl InodeBitmaps {
    fn bitmap(&mut self, rework: &VolumeRewrite<'_>, group: u32) -> Result<&mut Vec<u8>> {
        Ok(match self.0.entry(group) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(rework.old.inode_bitmap(&rework.redo, group)?),
        })
    }

    /// Allocates the first free inode.
    fn allocate_inode(&mut self, rework: &VolumeRewrite<'_>) -> Result<InodeNumber> {
        let super_ = &rework.old.super_;
        let per_group = super_.inodes_per_group;
        for group in 0..super_.groups {
            if rework.old.group(group)?.free_inodes == 0 {
                continue;
            }
            let first = super_.first_inode.0.saturating_sub(1);
            let from = first.saturating_sub(group.saturating_mul(per_group)).min(per_group);
            let bitmap = self.bitmap(rework, group)?;
            if let Some(nth) = Bitmap::new(bitmap, per_group).next_zero(from) {
                fill(bitmap, BitRun { start: nth, len: 1 }, true);
                return Ok(InodeNumber(
                    group.saturating_mul(per_group).saturating_add(nth).saturating_add(1),
                ));
            }
        }
        Err(OfflineError::Misuse("no inode is free".to_owned()))
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn free_inode(&mut self, rework: &VolumeRewrite<'_>, inode: InodeNumber) -> Result<()> {
        let per_group = rework.old.super_.inodes_per_group;
        let nth = inode.0.saturating_sub(1);
        let bitmap = self.bitmap(rework, nth / per_group)?;
        fill(bitmap, BitRun { start: nth % per_group, len: 1 }, false);
        Ok(())
    }

    fn write(self, rework: &mut VolumeRewrite<'_>) -> Result<()> {
        self.0.into_iter().try_for_each(|(group, bytes)| rework.set_inode_bitmap(group, bytes))
    }
}
