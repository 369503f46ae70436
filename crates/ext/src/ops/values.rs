//! Values of attributes in inodes of their own (`ea_inode`): made, counted, given back.
//!
//! ```text
//!   body of an inode   | entry ─┐
//!                      | entry ─┼─▶ inode | flag EA_INODE | entries that lead here | hash | value
//!   attribute block    | entry ─┘
//! ```
//! Law 1: an inode that holds a value counts the entries that lead to it, those of a block once
//! however many inodes share that; with the last entry it goes.
//! Law 2: the space of a value counts for every inode that has the attribute.
//! Law 3: what only claims to be such an inode is left alone.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "counts entries of one inode and blocks of values, whose length is checked"
)]

use std::collections::{BTreeMap, BTreeSet};

use draconis_exchange::contract::Kind;

use crate::blocks::data::Data;
use crate::blocks::role::Role;
use crate::commit::batch::Intent;
use crate::format::features::Incompatible;
use crate::format::inode::{Inode, POINTERS, flags};
use crate::format::quota::Usage;
use crate::format::slot::Stamp;
use crate::format::xattr::edit::{self, Placed};
use crate::format::xattr::{self, NewAttribute, Outside};
use crate::map::edit::Taking;
use crate::map::extents::empty_root;
use crate::transaction::Transaction;
use crate::units::{index, narrow};
use crate::{Error, FsBlock, InodeNumber, Result};

/// The longest value, in bytes.
const MOST_BYTES: usize = 64 << 10;
/// Stands for all entries that lead to a value, however many it counts.
const EVERY_ENTRY: i64 = i64::MIN;
/// Blocks beside its own that a value may take: of its map, and of attributes.
const MORE_BLOCKS: u64 = 4;

/// What a change of attributes means for values in inodes of their own.
#[derive(Debug, Default)]
pub(crate) struct Shifted {
    /// Entries that come or go, by inode.
    entries: BTreeMap<u32, i64>,
    /// What counts for the owner, before and after.
    before: Counted,
    after: Counted,
}

/// What the values of one inode count for its owner.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) entries: i64,
    pub(crate) blocks: u64,
}

impl Shifted {
    fn count(&mut self, list: &[Outside], by: i64) {
        for outside in list {
            *self.entries.entry(outside.inode.0).or_default() += by;
        }
    }

    /// Has values that count no entries go with the first one that does.
    fn release(&mut self, uncounted: &BTreeSet<u32>) {
        let going = self.entries.iter_mut().filter(|(_, by)| **by < 0);
        for (_, by) in going.filter(|(inode, _)| uncounted.contains(inode)) {
            *by = EVERY_ENTRY;
        }
    }
}

fn outsides(list: &[NewAttribute]) -> Vec<Outside> {
    list.iter().filter_map(NewAttribute::outside).collect()
}

impl Transaction<'_> {
    /// Whether the volume may have values in inodes of their own.
    pub(crate) fn has_values(&self) -> bool {
        self.volume.super_.incompatible.contains(Incompatible::EA_INODE)
    }

    /// Moves the value of `new`, which is one of `all`, into an inode of its own where it has no
    /// room elsewhere, as Linux does.
    pub(crate) fn move_value(
        &mut self,
        inode: &Inode,
        all: &mut [NewAttribute],
        new: &NewAttribute,
    ) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        if !self.has_values() {
            return Ok(());
        }
        let room = self.read_slot(inode.number, |it| it.attribute_room())?;
        // Bytes of a value that leaves a block hardly any room for others.
        let large = index(block_bytes.into()) - 56;
        if new.value().len() <= large && edit::place(all, room, block_bytes).is_ok() {
            return Ok(());
        }
        if new.value().len() > MOST_BYTES {
            return Err(Error::TooLarge);
        }
        let hash = self.volume.super_.value_seed.of(new.value()).get();
        // Everything that could be in the way is known before the first change.
        let place_of = all.iter().position(|it| it.same_name(new)).ok_or(Error::NoAttribute)?;
        let entry = all.get_mut(place_of).ok_or(Error::NoAttribute)?;
        *entry = new.moved_to(inode.number, hash);
        let placed = edit::place(all, room, block_bytes)?;
        self.shifted_values_but(inode.number, &placed, false, Some(inode.number))?;
        let (uid, gid) = inode.owner();
        let blocks = (new.value().len() as u64).div_ceil(block_bytes.into());
        let privileged = self.is_privileged(uid);
        self.need_blocks(blocks + MORE_BLOCKS, privileged)?;
        self.have_entries_of(inode.number)?;
        let number = self.allocate_inode(inode.number, Kind::File)?;
        self.make_value(number, (uid, gid), new.value(), hash)?;
        if let Some(entry) = all.get_mut(place_of) {
            *entry = new.moved_to(number, hash);
        }
        Ok(())
    }

    /// Makes the inode that was taken for a value; no entry leads to it yet.
    fn make_value(
        &mut self,
        number: InodeNumber,
        (uid, gid): (u32, u32),
        value: &[u8],
        hash: u32,
    ) -> Result<()> {
        self.forget_access(number);
        self.record(Intent::Born { inode: number, parent: None });
        let by_extents = self.volume.super_.incompatible.contains(Incompatible::EXTENTS);
        let now = self.now;
        let generation = self.next_generation(number);
        self.writer.generation = generation;
        self.change_slot(number, |it| {
            it.clear();
            it.extend();
            it.set_mode(0o100_600);
            it.set_owner(uid, gid);
            it.set_links(1);
            it.set_generation(generation);
            it.set_flags(flags::EA_INODE | if by_extents { flags::EXTENTS } else { 0 });
            it.set_pointers(if by_extents { empty_root() } else { [0; POINTERS] });
            it.set_time(Stamp::Modified, now);
            it.set_time(Stamp::Created, now);
            it.set_value_owners(0);
            it.set_value_hash(hash);
            it.set_size(value.len() as u64);
        })?;
        let len = index(self.volume.super_.block_bytes.into());
        let count = narrow(value.len().div_ceil(len) as u64);
        let privileged = self.is_privileged(uid);
        let taking = Taking { grows: false, privileged, unwritten: false };
        let mut bytes = value.to_vec();
        bytes.resize(index(count.into()) * len, 0);
        let bytes = Data::owned(bytes.into_boxed_slice());
        let mut mapped = 0;
        for run in self.map_blocks(number, 0..count, taking)? {
            let (from, end) = (index(run.from.into()), index((run.from + run.blocks).into()));
            self.put_contents(run.at, &bytes.slice(from * len..end * len));
            mapped += run.blocks;
        }
        if mapped == count { Ok(()) } else { Err(Error::NoSpace) }
    }

    /// What becomes of values when the attributes of an inode are placed like this; with `same`
    /// its block stays as it is.
    pub(crate) fn shifted_values(
        &self,
        number: InodeNumber,
        placed: &Placed,
        same: bool,
    ) -> Result<Shifted> {
        self.shifted_values_but(number, placed, same, None)
    }

    /// [`Transaction::shifted_values`] while the entry of a new value leads to `stand_in`.
    fn shifted_values_but(
        &self,
        number: InodeNumber,
        placed: &Placed,
        same: bool,
        stand_in: Option<InodeNumber>,
    ) -> Result<Shifted> {
        if !self.has_values() {
            return Ok(Shifted::default());
        }
        let (body, block, goes) = self.values_of(number)?;
        let new_body = outsides(&edit::read_body(&placed.body)?);
        let new_block = match &placed.block {
            Some(block) => outsides(&edit::read_block(block)?),
            None => vec![],
        };
        let uncounted = self.uncounted(number, [&body, &block])?;
        let mut shifted = Shifted {
            entries: BTreeMap::new(),
            before: self.counted([&body, &block], &uncounted),
            after: self.counted([&new_body, &new_block], &uncounted),
        };
        shifted.count(&new_body, 1);
        shifted.count(&body, -1);
        if !same {
            shifted.count(&new_block, 1);
        }
        if !same && goes {
            shifted.count(&block, -1);
        }
        shifted.entries.retain(|_, by| *by != 0);
        shifted.release(&uncounted);
        for (inode, by) in &shifted.entries {
            let inode = InodeNumber(*inode);
            if *by > 0 && Some(inode) != stand_in && !self.is_value(inode)? {
                let what = "extended attribute: inode of its value";
                return Err(Error::corrupt(what).of_inode(number));
            }
        }
        Ok(shifted)
    }

    /// The values that entries inside an inode lead to, those of its block, and whether the block
    /// is its alone.
    fn values_of(&self, number: InodeNumber) -> Result<(Vec<Outside>, Vec<Outside>, bool)> {
        let of_inode = |error: Error| error.of_inode(number);
        let body = self.read_slot(number, |it| edit::read_body(it.attributes()))?;
        let body = outsides(&body.map_err(of_inode)?);
        let at = FsBlock(self.read_slot(number, |it| it.attribute_block())?);
        if !self.volume.super_.holds(at) {
            return Ok((body, vec![], false));
        }
        let block = self.block(at, Role::Attributes).map_err(of_inode)?;
        let goes = xattr::owners(&block).is_none_or(|owners| owners <= 1);
        Ok((body, outsides(&edit::read_block(&block).map_err(of_inode)?), goes))
    }

    /// Whether it is an inode that holds a value.
    fn is_value(&self, number: InodeNumber) -> Result<bool> {
        if !self.volume.super_.names(number) || number == InodeNumber::ROOT {
            return Ok(false);
        }
        self.read_slot(number, |it| it.is_value() && it.links() > 0)
    }

    /// Blocks that a value of so many bytes counts for.
    fn value_blocks(&self, len: u32) -> u64 {
        let super_ = &self.volume.super_;
        let cluster = u64::from(super_.block_bytes) * u64::from(super_.cluster_blocks.max(1));
        u64::from(len).div_ceil(cluster) * u64::from(super_.cluster_blocks.max(1))
    }

    /// What these values count for the owner of the inode that has them.
    fn counted(&self, lists: [&[Outside]; 2], uncounted: &BTreeSet<u32>) -> Counted {
        let mut counted = Counted::default();
        for it in lists.into_iter().flatten().filter(|it| !uncounted.contains(&it.inode.0)) {
            counted.entries += 1;
            counted.blocks += self.value_blocks(it.len);
        }
        counted
    }

    /// What the values of an inode count for its owner; nothing where its attributes are damaged.
    pub(crate) fn counted_values(&self, number: InodeNumber) -> Result<Counted> {
        if !self.has_values() {
            return Ok(Counted::default());
        }
        match self.values_of(number) {
            Ok((body, block, _)) => {
                let uncounted = self.uncounted(number, [&body, &block])?;
                Ok(self.counted([&body, &block], &uncounted))
            }
            Err(Error::Corrupt { .. }) => Ok(Counted::default()),
            Err(other) => Err(other),
        }
    }

    /// Counts entries that came and went, and the values for the owner of `inode`.
    pub(crate) fn settle_values(&mut self, inode: InodeNumber, shifted: Shifted) -> Result<()> {
        let Shifted { before, after, entries } = shifted;
        match after.blocks.checked_sub(before.blocks) {
            Some(0) => {}
            Some(more) => self.count_sectors(inode, more)?,
            None => self.uncount_sectors(inode, before.blocks - after.blocks)?,
        }
        let inodes = after.entries - before.entries;
        if inodes != 0 {
            self.count_usage(inode, Usage { inodes, bytes: 0 })?;
        }
        self.disown_values(entries)
    }

    /// The entries that go when an inode is deleted, by the inodes of their values.
    pub(crate) fn values_lost(&self, inode: &Inode) -> Result<BTreeMap<u32, i64>> {
        // A value has no attributes, whatever it claims: so this goes no deeper.
        if !self.has_values() || inode.is_value() {
            return Ok(BTreeMap::new());
        }
        let mut lost = Shifted::default();
        match self.values_of(inode.number) {
            Ok((body, block, goes)) => {
                lost.count(&body, -1);
                lost.count(if goes { &block } else { &[] }, -1);
                let uncounted = self.uncounted(inode.number, [&body, &block])?;
                lost.release(&uncounted);
            }
            Err(Error::Corrupt { .. }) => {}
            Err(other) => return Err(other),
        }
        Ok(lost.entries)
    }

    /// Those of the values of `owner` that are its alone and count no entries, as Lustre made them.
    /// Their space counts for nobody.
    fn uncounted(&self, owner: InodeNumber, lists: [&[Outside]; 2]) -> Result<BTreeSet<u32>> {
        let generation = self.read_slot(owner, |it| it.generation())?;
        let mut uncounted = BTreeSet::new();
        for value in lists.into_iter().flatten() {
            if self.is_value(value.inode)?
                && self.read_slot(value.inode, |it| it.is_value_of(owner, generation))?
            {
                uncounted.insert(value.inode.0);
            }
        }
        Ok(uncounted)
    }

    /// Counts entries more or less, and gives back the values that have none left.
    pub(crate) fn disown_values(&mut self, entries: BTreeMap<u32, i64>) -> Result<()> {
        for (inode, by) in entries {
            let number = InodeNumber(inode);
            if !self.is_value(number)? {
                log::warn!("inode {number} holds no value of an attribute: run e2fsck");
                continue;
            }
            let left = self.change_slot(number, |it| {
                let left = match by {
                    EVERY_ENTRY => 0,
                    _ => it.value_owners().saturating_add_signed(by),
                };
                it.set_value_owners(left);
                left
            })?;
            if left == 0 {
                self.record(Intent::Died { inode: number, dir: number });
                self.delete(number)?;
            }
        }
        Ok(())
    }
}
