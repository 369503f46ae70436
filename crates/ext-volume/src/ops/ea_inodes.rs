//! EA inodes (`ea_inode`): creation, reference counts, deletion.
//!
//! ```text
//!   body of an inode   | entry ─┐
//!                      | entry ─┼─▶ inode | flag EA_INODE | reference count | hash | value
//!   attribute block    | entry ─┘
//! ```
//! Law 1: an EA inode counts the entries that reference it; those of a shared block count once. It
//! is deleted with its last entry.
//! Law 2: the space of a value counts for every inode that has the attribute.
//! Law 3: an inode that carries the flag but fails validation is not changed.

use std::collections::{BTreeMap, BTreeSet};

use draconis_types::FileType;

use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::commit::batch::Effect;
use crate::format::features::Incompatible;
use crate::format::inode::{Inode, POINTERS, flags};
use crate::format::inode_slot::InodeTime;
use crate::format::quota::QuotaUsage;
use crate::format::xattr::edit::{self, XattrLayout};
use crate::format::xattr::{self, EaInodeRef, NewXattr};
use crate::map::edit::AllocationPolicy;
use crate::map::extents::empty_root;
use crate::transaction::Transaction;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Size limit of a value, in bytes.
const XATTR_SIZE_MAX: usize = 64 << 10;
/// Change that drops all references to a value, whatever its count.
const DROP_ALL_REFS: i64 = i64::MIN;
/// Limit of blocks for a value beyond its data: of its map, and of xattrs.
const MAX_EXTRA_BLOCKS: u64 = 4;

/// Effects of an xattr change on EA inodes.
#[derive(Debug, Default)]
pub(crate) struct EaInodeRefChanges {
    /// Change of the reference count, by inode.
    entries: BTreeMap<u32, i64>,
    /// Usage charged to the owner, before and after.
    before: EaInodeCharge,
    after: EaInodeCharge,
}

/// Usage charged to the owner of an inode for its EA inodes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EaInodeCharge {
    pub(crate) entries: i64,
    pub(crate) blocks: u64,
}

impl EaInodeRefChanges {
    fn add_refs(&mut self, list: &[EaInodeRef], by: i64) {
        for outside in list {
            let refs = self.entries.entry(outside.inode.0).or_default();
            *refs = refs.saturating_add(by);
        }
    }

    /// Drops uncounted values with the first entry that is removed.
    fn drop_uncounted(&mut self, uncounted: &BTreeSet<u32>) {
        let going = self.entries.iter_mut().filter(|(_, by)| **by < 0);
        for (_, by) in going.filter(|(inode, _)| uncounted.contains(inode)) {
            *by = DROP_ALL_REFS;
        }
    }
}

fn ea_inode_refs(list: &[NewXattr]) -> Vec<EaInodeRef> {
    list.iter().filter_map(NewXattr::ea_inode).collect()
}

impl Transaction<'_> {
    /// Returns true if the volume has the feature `ea_inode`.
    pub(crate) fn has_ea_inodes(&self) -> bool {
        self.volume.super_.incompatible.contains(Incompatible::EA_INODE)
    }

    /// Moves the value of `new`, which is in `all`, to an EA inode if it fits nowhere else, by the
    /// rules of Linux.
    pub(crate) fn move_to_ea_inode(
        &mut self,
        inode: &Inode,
        all: &mut [NewXattr],
        new: &NewXattr,
    ) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        if !self.has_ea_inodes() {
            return Ok(());
        }
        let room = self.read_slot(inode.number, |it| it.xattr_capacity())?;
        // A value larger than this leaves a block hardly any space for others.
        let large = saturating_usize(block_bytes.into()).saturating_sub(56);
        if new.value().len() <= large && edit::lay_out_attributes(all, room, block_bytes).is_ok() {
            return Ok(());
        }
        if new.value().len() > XATTR_SIZE_MAX {
            return Err(Error::TooLarge);
        }
        let hash = self.volume.super_.value_seed.update(new.value()).value();
        // All possible errors are checked before the first change.
        let place_of = all.iter().position(|it| it.same_name(new)).ok_or(Error::NoAttribute)?;
        let entry = all.get_mut(place_of).ok_or(Error::NoAttribute)?;
        *entry = new.with_ea_inode(inode.number, hash);
        let placed = edit::lay_out_attributes(all, room, block_bytes)?;
        self.ea_ref_changes_except(inode.number, &placed, false, Some(inode.number))?;
        let (uid, gid) = inode.owner();
        let blocks = (new.value().len() as u64).div_ceil(block_bytes.into());
        let privileged = self.is_privileged(uid);
        self.check_free_blocks(blocks.saturating_add(MAX_EXTRA_BLOCKS), privileged)?;
        self.ensure_entries_of(inode.number)?;
        let number = self.allocate_inode(inode.number, FileType::File)?;
        self.create_ea_inode(number, (uid, gid), new.value(), hash)?;
        if let Some(entry) = all.get_mut(place_of) {
            *entry = new.with_ea_inode(number, hash);
        }
        Ok(())
    }

    /// Initializes the inode allocated for a value; no entry references it yet.
    fn create_ea_inode(
        &mut self,
        number: InodeNumber,
        (uid, gid): (u32, u32),
        value: &[u8],
        hash: u32,
    ) -> Result<()> {
        self.discard_access_time(number);
        self.record_effect(Effect::Created { inode: number, parent: None });
        let by_extents = self.volume.super_.incompatible.contains(Incompatible::EXTENTS);
        let now = self.now;
        let generation = self.next_generation(number);
        self.writer.generation = generation;
        self.change_slot(number, |it| {
            it.clear();
            it.init_extra_fields();
            it.set_mode(0o100_600);
            it.set_owner(uid, gid);
            it.set_links(1);
            it.set_generation(generation);
            it.set_flags(flags::EA_INODE | if by_extents { flags::EXTENTS } else { 0 });
            it.set_pointers(if by_extents { empty_root() } else { [0; POINTERS] });
            it.set_time(InodeTime::Modified, now);
            it.set_time(InodeTime::Created, now);
            it.set_ea_ref_count(0);
            it.set_value_hash(hash);
            it.set_size(value.len() as u64);
        })?;
        let len = saturating_usize(self.volume.super_.block_bytes.into());
        let count = saturating_u32(value.len().div_ceil(len) as u64);
        let privileged = self.is_privileged(uid);
        let taking = AllocationPolicy { is_append: false, privileged, unwritten: false };
        let mut bytes = value.to_vec();
        bytes.resize(saturating_usize(count.into()).saturating_mul(len), 0);
        let bytes = SharedBytes::from_owned_bytes(bytes.into_boxed_slice());
        let mut mapped = 0u32;
        for run in self.map_blocks(number, 0..count, taking)? {
            let (from, end) = (
                saturating_usize(run.from.into()),
                saturating_usize(run.from.saturating_add(run.blocks).into()),
            );
            self.put_contents(
                run.at,
                &bytes.slice(from.saturating_mul(len)..end.saturating_mul(len)),
            );
            mapped = mapped.saturating_add(run.blocks);
        }
        if mapped == count { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// Returns the effects on EA inodes of this xattr layout; with `same`, the xattr block stays
    /// unchanged.
    pub(crate) fn ea_ref_changes(
        &self,
        number: InodeNumber,
        placed: &XattrLayout,
        same: bool,
    ) -> Result<EaInodeRefChanges> {
        self.ea_ref_changes_except(number, placed, same, None)
    }

    /// [`Transaction::ea_ref_changes`] with `stand_in` as the inode of a new value.
    fn ea_ref_changes_except(
        &self,
        number: InodeNumber,
        placed: &XattrLayout,
        same: bool,
        stand_in: Option<InodeNumber>,
    ) -> Result<EaInodeRefChanges> {
        if !self.has_ea_inodes() {
            return Ok(EaInodeRefChanges::default());
        }
        let (body, block, goes) = self.ea_inode_refs_of(number)?;
        let new_body = ea_inode_refs(&edit::read_body(&placed.body)?);
        let new_block = match &placed.block {
            Some(block) => ea_inode_refs(&edit::read_block(block)?),
            None => vec![],
        };
        let uncounted = self.uncounted_ea_inodes(number, [&body, &block])?;
        let mut shifted = EaInodeRefChanges {
            entries: BTreeMap::new(),
            before: self.sum_ea_inode_charge([&body, &block], &uncounted),
            after: self.sum_ea_inode_charge([&new_body, &new_block], &uncounted),
        };
        shifted.add_refs(&new_body, 1);
        shifted.add_refs(&body, -1);
        if !same {
            shifted.add_refs(&new_block, 1);
        }
        if !same && goes {
            shifted.add_refs(&block, -1);
        }
        shifted.entries.retain(|_, by| *by != 0);
        shifted.drop_uncounted(&uncounted);
        for (inode, by) in &shifted.entries {
            let inode = InodeNumber(*inode);
            if *by > 0 && Some(inode) != stand_in && !self.is_ea_inode(inode)? {
                let what = "extended attribute: inode of its value";
                return Err(Error::corrupt(what).with_inode(number));
            }
        }
        Ok(shifted)
    }

    /// Returns the EA inodes referenced by the inode body and by its block, and true if no other
    /// inode shares the block.
    fn ea_inode_refs_of(
        &self,
        number: InodeNumber,
    ) -> Result<(Vec<EaInodeRef>, Vec<EaInodeRef>, bool)> {
        let of_inode = |error: Error| error.with_inode(number);
        let body = self.read_slot(number, |it| edit::read_body(it.inline_xattrs()))?;
        let body = ea_inode_refs(&body.map_err(of_inode)?);
        let at = FsBlock(self.read_slot(number, |it| it.xattr_block())?);
        if !self.volume.super_.is_valid_block(at) {
            return Ok((body, vec![], false));
        }
        let block = self.block(at, Role::XattrBlock).map_err(of_inode)?;
        let goes = xattr::refcount(&block).is_none_or(|owners| owners <= 1);
        Ok((body, ea_inode_refs(&edit::read_block(&block).map_err(of_inode)?), goes))
    }

    /// Returns true if it is a valid EA inode.
    fn is_ea_inode(&self, number: InodeNumber) -> Result<bool> {
        if !self.volume.super_.is_valid_inode(number) || number == InodeNumber::ROOT {
            return Ok(false);
        }
        self.read_slot(number, |it| it.is_ea_inode() && it.links() > 0)
    }

    /// Returns the blocks accounted for a value of `len` bytes.
    fn value_blocks(&self, len: u32) -> u64 {
        let super_ = &self.volume.super_;
        let cluster =
            u64::from(super_.block_bytes).saturating_mul(u64::from(super_.cluster_blocks.max(1)));
        u64::from(len).div_ceil(cluster).saturating_mul(u64::from(super_.cluster_blocks.max(1)))
    }

    /// Returns the usage that is charged for these values.
    fn sum_ea_inode_charge(
        &self,
        lists: [&[EaInodeRef]; 2],
        uncounted: &BTreeSet<u32>,
    ) -> EaInodeCharge {
        let mut counted = EaInodeCharge::default();
        for it in lists.into_iter().flatten().filter(|it| !uncounted.contains(&it.inode.0)) {
            counted.entries = counted.entries.saturating_add(1);
            counted.blocks = counted.blocks.saturating_add(self.value_blocks(it.len));
        }
        counted
    }

    /// Returns the usage charged for the values of an inode; none if its xattrs are damaged.
    pub(crate) fn ea_inode_charge(&self, number: InodeNumber) -> Result<EaInodeCharge> {
        if !self.has_ea_inodes() {
            return Ok(EaInodeCharge::default());
        }
        match self.ea_inode_refs_of(number) {
            Ok((body, block, _)) => {
                let uncounted = self.uncounted_ea_inodes(number, [&body, &block])?;
                Ok(self.sum_ea_inode_charge([&body, &block], &uncounted))
            }
            Err(Error::Corrupt { .. }) => Ok(EaInodeCharge::default()),
            Err(other) => Err(other),
        }
    }

    /// Applies the changes of reference counts, and of the owner's blocks.
    pub(crate) fn apply_ea_ref_changes(
        &mut self,
        inode: InodeNumber,
        shifted: EaInodeRefChanges,
    ) -> Result<()> {
        let EaInodeRefChanges { before, after, entries } = shifted;
        match after.blocks.checked_sub(before.blocks) {
            Some(0) => {}
            Some(more) => self.add_sectors(inode, more)?,
            None => self.subtract_sectors(inode, before.blocks.saturating_sub(after.blocks))?,
        }
        let inodes = after.entries.saturating_sub(before.entries);
        if inodes != 0 {
            self.count_usage(inode, QuotaUsage { inodes, bytes: 0 })?;
        }
        self.update_ea_refs(entries)
    }

    /// Returns the entries that are removed with an inode, by EA inode.
    pub(crate) fn ea_refs_of_deleted(&self, inode: &Inode) -> Result<BTreeMap<u32, i64>> {
        // An EA inode has no attributes itself, whatever it claims: no recursion.
        if !self.has_ea_inodes() || inode.is_ea_inode() {
            return Ok(BTreeMap::new());
        }
        let mut lost = EaInodeRefChanges::default();
        match self.ea_inode_refs_of(inode.number) {
            Ok((body, block, goes)) => {
                lost.add_refs(&body, -1);
                lost.add_refs(if goes { &block } else { &[] }, -1);
                let uncounted = self.uncounted_ea_inodes(inode.number, [&body, &block])?;
                lost.drop_uncounted(&uncounted);
            }
            Err(Error::Corrupt { .. }) => {}
            Err(other) => return Err(other),
        }
        Ok(lost.entries)
    }

    /// Returns the values that only `owner` has and that count no entries (format of Lustre). Their
    /// space is not accounted.
    fn uncounted_ea_inodes(
        &self,
        owner: InodeNumber,
        lists: [&[EaInodeRef]; 2],
    ) -> Result<BTreeSet<u32>> {
        let generation = self.read_slot(owner, |it| it.generation())?;
        let mut uncounted = BTreeSet::new();
        for value in lists.into_iter().flatten() {
            if self.is_ea_inode(value.inode)?
                && self.read_slot(value.inode, |it| it.is_ea_inode_of(owner, generation))?
            {
                uncounted.insert(value.inode.0);
            }
        }
        Ok(uncounted)
    }

    /// Changes reference counts, and deletes EA inodes without references.
    pub(crate) fn update_ea_refs(&mut self, entries: BTreeMap<u32, i64>) -> Result<()> {
        for (inode, by) in entries {
            let number = InodeNumber(inode);
            if !self.is_ea_inode(number)? {
                log::warn!("inode {number} holds no value of an attribute: run e2fsck");
                continue;
            }
            let left = self.change_slot(number, |it| {
                let left = match by {
                    DROP_ALL_REFS => 0,
                    _ => it.ea_ref_count().saturating_add_signed(by),
                };
                it.set_ea_ref_count(left);
                left
            })?;
            if left == 0 {
                self.record_effect(Effect::LastLinkDropped { inode: number, dir: number });
                self.evict_inode(number)?;
            }
        }
        Ok(())
    }
}
