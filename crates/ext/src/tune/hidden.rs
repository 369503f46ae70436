//! Files that no name leads to: the file of orphans and the files of quotas, added and dropped.
//!
//! Law: what owners have is counted from all inodes before anything is changed; the files of quotas
//! and the file of orphans count for no owner.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with places in a checked superblock's tables, and blocks of small files"
)]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::{Error, Result};
use crate::blocks::role::Role;
use crate::format::bitmap::{BitRun, Bitmap, fill};
use crate::format::extent::Extent;
use crate::format::features::Incompatible;
use crate::format::inode::{DIRECT, Inode, NewInode, flags};
use crate::format::orphan_file;
use crate::format::quota::{self, Kind, Usage};
use crate::format::slot::Slot;
use crate::format::xattr::{NewAttribute, edit};
use crate::map::build::{Part, build};
use crate::map::build_extents::{nodes, tree};
use crate::mkfs;
use crate::rework::Rework;
use crate::units::{index, narrow};
use crate::whole::place_of_inode;
use crate::{FileId, FsBlock, InodeNumber};

/// What is to be there, where that changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Hidden {
    /// The file of orphans.
    pub(super) orphans: Option<bool>,
    /// Quotas of users, groups and projects.
    pub(super) quotas: Option<[bool; 3]>,
}

/// Adds and drops files.
pub(super) fn change(rework: &mut Rework<'_>, hidden: Hidden) -> Result<()> {
    let mut inodes = Inodes::default();
    if let Some(wanted) = hidden.quotas {
        quotas(rework, &mut inodes, wanted)?;
    }
    match hidden.orphans {
        Some(true) => {
            let inode = inodes.take(rework)?;
            let blocks = mkfs::orphan_blocks(rework.to_be.super_.blocks);
            let block_bytes = index(rework.to_be.super_.block_bytes.into());
            let block = |_: u32| orphan_file::empty(block_bytes);
            let role = Role::Orphans(FileId { inode: inode.0, generation: 0 });
            make(rework, inode, role, 0, u64::from(blocks) * block_bytes as u64, &block)?;
            rework.to_be.raw.s_orphan_file_inum = inode.0.into();
        }
        Some(false) => {
            if let Some(inode) = rework.old.super_.orphan_file {
                drop_file(rework, inode)?;
                inodes.free(rework, inode)?;
            }
            rework.to_be.raw.s_orphan_file_inum = 0.into();
        }
        None => {}
    }
    inodes.write(rework)
}

fn quotas(rework: &mut Rework<'_>, inodes: &mut Inodes, wanted: [bool; 3]) -> Result<()> {
    let there = rework.old.super_.quotas;
    let all = Kind::ALL.into_iter().zip(there.into_iter().zip(wanted));
    let missing: Vec<Kind> = all
        .clone()
        .filter_map(|(kind, (inode, is_wanted))| (is_wanted && inode == 0).then_some(kind))
        .collect();
    let counted = if missing.is_empty() { BTreeMap::new() } else { count(rework)? };
    for (kind, (inode, is_wanted)) in all {
        let inode = match (inode, is_wanted) {
            (0, false) | (1.., true) => continue,
            (0, true) => {
                let inode = match kind {
                    Kind::User => InodeNumber(quota::USERS),
                    Kind::Group => InodeNumber(quota::GROUPS),
                    Kind::Project => inodes.take(rework)?,
                };
                let of_kind = counted.iter().filter(|((other, _), _)| *other == kind);
                let of_kind = of_kind.map(|((_, id), usage)| (*id, *usage)).collect();
                let bytes = quota::build(kind, &of_kind);
                let block_bytes = index(rework.to_be.super_.block_bytes.into());
                let block = |nth: u32| {
                    let part = bytes.chunks(block_bytes).nth(index(nth.into()));
                    let mut block = part.unwrap_or_default().to_vec();
                    block.resize(block_bytes, 0);
                    block
                };
                let size = bytes.len() as u64;
                make(rework, inode, Role::Quota, flags::IMMUTABLE, size, &block)?;
                inode.0
            }
            (old, false) => {
                let old = InodeNumber(old);
                drop_file(rework, old)?;
                if kind == Kind::Project {
                    inodes.free(rework, old)?;
                }
                0
            }
        };
        let raw = &mut rework.to_be.raw;
        match kind {
            Kind::User => raw.s_usr_quota_inum = inode.into(),
            Kind::Group => raw.s_grp_quota_inum = inode.into(),
            Kind::Project => raw.s_prj_quota_inum = inode.into(),
        }
    }
    Ok(())
}

/// What every user, group and project has.
fn count(rework: &Rework<'_>) -> Result<BTreeMap<(Kind, u32), Usage>> {
    let super_ = &rework.old.super_;
    let mut all: BTreeMap<(Kind, u32), Usage> = BTreeMap::new();
    let len = index(super_.inode_bytes.into());
    for group in 0..super_.groups {
        let mut read: Option<(FsBlock, Vec<u8>)> = None;
        for nth in rework.used_inodes(group)? {
            let inode = InodeNumber(group * super_.inodes_per_group + nth + 1);
            if !super_.names(inode) {
                continue;
            }
            let (block, at) = place_of_inode(super_, &rework.old.groups, inode)?;
            let mut bytes = match read.take().filter(|(there, _)| *there == block) {
                Some((_, bytes)) => bytes,
                None => rework.redo.on_disk(block, 1)?,
            };
            let slot = bytes.get_mut(at..at + len).unwrap_or_default();
            let slot = Slot::of(slot)?;
            if slot.links() > 0 && !slot.is_value() {
                let (user, group) = slot.owner();
                let blocks = slot.bytes_of_blocks(super_.block_bytes).cast_signed();
                let usage = Usage { inodes: 1 + values(rework, inode, &slot)?, bytes: blocks };
                for account in
                    [(Kind::User, user), (Kind::Group, group), (Kind::Project, slot.project())]
                {
                    let sum = all.entry(account).or_default();
                    *sum = sum.with(usage);
                }
            }
            read = Some((block, bytes));
        }
    }
    Ok(all)
}

/// Entries of an inode whose values in inodes of their own count for its owner: not those that count
/// no entries.
fn values(rework: &Rework<'_>, inode: InodeNumber, slot: &Slot<'_>) -> Result<i64> {
    let super_ = &rework.old.super_;
    if !super_.incompatible.contains(Incompatible::EA_INODE) {
        return Ok(0);
    }
    let mut all = edit::read_body(slot.attributes()).map_err(|error| error.of_inode(inode))?;
    let block = FsBlock(slot.attribute_block());
    if super_.holds(block) {
        let bytes = rework.redo.on_disk(block, 1)?;
        all.extend(edit::read_block(&bytes).map_err(|error| error.of_inode(inode))?);
    }
    let mut count = 0;
    for value in all.iter().filter_map(NewAttribute::outside) {
        let (block, at) = place_of_inode(super_, &rework.old.groups, value.inode)?;
        let mut bytes = rework.redo.on_disk(block, 1)?;
        let of_value = Slot::of(bytes.get_mut(at..).unwrap_or_default())?;
        count += i64::from(!of_value.is_value_of(inode, slot.generation()));
    }
    Ok(count)
}

/// Makes a file of `size` bytes, whose blocks `block` says.
fn make(
    rework: &mut Rework<'_>,
    inode: InodeNumber,
    role: Role,
    fixed: u32,
    size: u64,
    block: &dyn Fn(u32) -> Vec<u8>,
) -> Result<()> {
    let super_ = rework.to_be.super_.clone();
    let count = narrow(size.div_ceil(super_.block_bytes.into()));
    let (pointers, owned, of_map) = match super_.incompatible.contains(Incompatible::EXTENTS) {
        true => {
            let mut extents: Vec<Extent> = vec![];
            let mut at = 0;
            while at < count {
                let taken = rework.space.take((count - at).into()).ok_or(Error::NoRoom)?;
                let blocks = narrow(taken.end - taken.start);
                for nth in 0..blocks {
                    rework.write(role, 0, taken.start + u64::from(nth), block(at + nth), &[])?;
                }
                let start = FsBlock(taken.start);
                extents.push(Extent { from: at, blocks, start, is_unwritten: false });
                at += blocks;
            }
            let mut places = vec![];
            for _ in 0..nodes(extents.len() as u64, super_.block_bytes) {
                places.push(rework.take_one()?);
            }
            let of_tree = places.len() as u64 * u64::from(super_.cluster_blocks);
            let owned = super_.in_clusters(count.into()) + of_tree;
            let tree = tree(&extents, super_.block_bytes, &mut places.into_iter());
            let (pointers, nodes) = tree.ok_or(Error::NoRoom)?;
            let file = FileId { inode: inode.0, generation: 0 };
            for (at, bytes) in nodes {
                rework.write(Role::Extents(file), 0, at, bytes, &[])?;
            }
            (pointers, owned, flags::EXTENTS)
        }
        false => {
            let mut owned = 0;
            let mut next = || {
                owned += 1;
                rework.space.take(1).and_then(|taken| u32::try_from(taken.start).ok())
            };
            let built = build(&[(0, count)], super_.block_bytes, &mut next).ok_or(Error::NoRoom)?;
            for part in built.parts {
                match part {
                    Part::Indirect { at, pointers } => {
                        rework.redo.write_free(FsBlock(at), &pointers)?;
                    }
                    Part::Data { at, from, blocks } => {
                        for nth in 0..blocks {
                            rework.write(role, 0, at + u64::from(nth), block(from + nth), &[])?;
                        }
                    }
                }
            }
            debug_assert!(owned >= u64::from(count.min(DIRECT)));
            (built.pointers, owned, 0)
        }
    };
    let now = rework.now;
    let file = NewInode {
        mode: 0o100_600,
        size_bytes: size,
        links: 1,
        sectors: owned * u64::from(super_.block_bytes / 512),
        flags: of_map | fixed,
        pointers,
        accessed: now,
        modified: now,
        changed: now,
        created: now,
        ..NewInode::default()
    };
    rework.put_inode(inode, file.encode(super_.inode_bytes))
}

/// Frees the blocks of a file, and clears its inode.
fn drop_file(rework: &mut Rework<'_>, inode: InodeNumber) -> Result<()> {
    let super_ = &rework.old.super_;
    let (block, at) = place_of_inode(super_, &rework.old.groups, inode)?;
    let len = index(super_.inode_bytes.into());
    let bytes = rework.redo.on_disk(block, 1)?;
    let slot = bytes.get(at..at + len).unwrap_or_default();
    let node = Inode::of_slot(slot, inode, super_)?;
    rework.free_file(&node)?;
    rework.put_inode(inode, vec![0; len])
}

/// Bitmaps of inodes as they are to be, of the groups where they change.
#[derive(Default)]
struct Inodes(BTreeMap<u32, Vec<u8>>);

impl Inodes {
    fn bitmap(&mut self, rework: &Rework<'_>, group: u32) -> Result<&mut Vec<u8>> {
        Ok(match self.0.entry(group) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(rework.old.inode_bitmap(&rework.redo, group)?),
        })
    }

    /// The first inode that is free.
    fn take(&mut self, rework: &Rework<'_>) -> Result<InodeNumber> {
        let super_ = &rework.old.super_;
        let per_group = super_.inodes_per_group;
        for group in 0..super_.groups {
            if rework.old.group(group)?.free_inodes == 0 {
                continue;
            }
            let first = super_.first_inode.0.saturating_sub(1);
            let from = first.saturating_sub(group * per_group).min(per_group);
            let bitmap = self.bitmap(rework, group)?;
            if let Some(nth) = Bitmap::new(bitmap, per_group).next_zero(from) {
                fill(bitmap, BitRun { start: nth, len: 1 }, true);
                return Ok(InodeNumber(group * per_group + nth + 1));
            }
        }
        Err(Error::Misuse("no inode is free".to_owned()))
    }

    fn free(&mut self, rework: &Rework<'_>, inode: InodeNumber) -> Result<()> {
        let per_group = rework.old.super_.inodes_per_group;
        let nth = inode.0.saturating_sub(1);
        let bitmap = self.bitmap(rework, nth / per_group)?;
        fill(bitmap, BitRun { start: nth % per_group, len: 1 }, false);
        Ok(())
    }

    fn write(self, rework: &mut Rework<'_>) -> Result<()> {
        self.0.into_iter().try_for_each(|(group, bytes)| rework.set_inode_bitmap(group, bytes))
    }
}
