//! A volume that is not in use, reworked: inode by inode, what has to move is copied to where it is
//! free, and what leads to it is changed; what is sealed is sealed anew.
//!
//! ```text
//!   each inode in use ─▶ its map: runs, nodes ─▶ moved where they must ─▶ new map ─▶ inode
//!                        its names: new numbers      its attributes: block, numbers of values
//!   then each group: bitmaps, counts ─▶ descriptors ─▶ superblock
//! ```
//! Law 1: what is there is never written but by the log (`redo`): until the change counts,
//! the volume is what it was.
//! Law 2: no more blocks are visited than the volume has, whatever the maps say.
//! Law 3: damage that is met ends the work: nothing is moved that is not understood.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with block numbers of a checked superblock, far below 2^64"
)]

mod contents;
mod directories;
mod inodes;
mod maps;
mod names;
mod quotas;
pub(crate) mod space;

use std::collections::BTreeMap;

use draconis_exchange::contract::Time;

use crate::blocks::role::Sums;
use crate::blocks::sums::MetadataSums;
use crate::format::bitmap::{BitRun, Bitmap, fill};
use crate::format::features::Incompatible;
use crate::format::group::flags;
use crate::format::superblock::RawSuperblock;
use crate::redo::Redo;
use crate::units::{index, narrow};
use crate::whole::{Error, PlannedVolume, Result, Whole, bounds};
use crate::{GroupNumber, InodeNumber};
use directories::Reforming;
use space::Space;

/// A volume in work.
pub(crate) struct Rework<'a> {
    pub(crate) old: &'a Whole,
    pub(crate) to_be: PlannedVolume,
    pub(crate) redo: Redo<'a>,
    pub(crate) space: Space,
    /// Inodes that get other numbers.
    pub(crate) renumbered: BTreeMap<u32, u32>,
    /// Everything is sealed anew.
    pub(crate) reseals: bool,
    /// What directories are to be.
    reforming: Reforming,
    pub(crate) now: Time,
    /// Called with bytes of contents that were copied.
    pub(crate) progress: &'a dyn Fn(u64),
    /// Blocks that were moved.
    pub(crate) moved_blocks: u64,
    /// Blocks of attributes that were seen, and where they are to be.
    attribute_blocks: BTreeMap<u64, u64>,
    /// Whether inodes with values of attributes are among those with other numbers.
    values_move: bool,
    /// What owners have more or less: user, group, project; blocks.
    usage: BTreeMap<[u32; 3], i64>,
    /// The files of quotas: their sizes, and where their blocks are.
    quota_files: BTreeMap<u32, (u64, Vec<maps::Piece>)>,
    /// Blocks that may still be visited.
    budget: u64,
    /// What verifies blocks as they are, and what seals them as they are to be.
    verifying: Option<Box<dyn Sums>>,
    sealing: Option<Box<dyn Sums>>,
}

impl<'a> Rework<'a> {
    pub(crate) fn new(
        old: &'a Whole,
        to_be: PlannedVolume,
        redo: Redo<'a>,
        now: Time,
        progress: &'a dyn Fn(u64),
    ) -> Self {
        let space = Space::new(to_be.super_.blocks, to_be.super_.cluster_blocks);
        let reforming = Reforming::between(&old.super_, &to_be.super_);
        Self {
            verifying: MetadataSums::of(&old.super_),
            sealing: MetadataSums::of(&to_be.super_),
            budget: old.super_.blocks,
            old,
            to_be,
            redo,
            space,
            renumbered: BTreeMap::new(),
            reseals: false,
            reforming,
            now,
            progress,
            moved_blocks: 0,
            attribute_blocks: BTreeMap::new(),
            values_move: false,
            usage: BTreeMap::new(),
            quota_files: BTreeMap::new(),
        }
    }

    /// Reads what is in use, as far as it is to stay: what the volume's own structures give up is
    /// free after the change, which changes their places.
    pub(crate) fn map_space(&mut self) -> Result<()> {
        let end = self.space.end();
        // What is before the first group has no bit.
        self.space.keep(0..self.old.super_.first_data_block.into());
        for number in 0..self.old.super_.groups {
            let (start, group_end) = bounds(&self.old.super_, number);
            if start >= end {
                break;
            }
            let bytes = self.old.block_bitmap(&self.redo, number)?;
            let ratio = u64::from(self.old.super_.cluster_blocks);
            let bitmap = Bitmap::new(&bytes, narrow((group_end - start).div_ceil(ratio)));
            let mut at = 0;
            while let Some(from) = bitmap.next_one(at) {
                let len = bitmap.ones_at(from, u32::MAX);
                let block = |nth: u32| start + u64::from(nth) * ratio;
                self.space.keep(block(from)..block(from + len));
                at = from + len;
            }
        }
        self.renew_own();
        Ok(())
    }

    /// Frees what the volume's own structures have and are not to have.
    pub(crate) fn renew_own(&mut self) {
        for own in own(&self.old.super_, &self.old.groups) {
            self.space.release(own);
        }
        for own in own(&self.to_be.super_, &self.to_be.groups) {
            self.space.keep(own);
        }
    }

    /// Keeps what the volume's own structures have, whatever they are to have.
    pub(crate) fn keep_old(&mut self) {
        for own in own(&self.old.super_, &self.old.groups) {
            self.space.keep(own);
        }
    }

    /// Visits every inode in use.
    pub(crate) fn inodes(&mut self) -> Result<()> {
        for number in 0..self.old.super_.groups {
            self.inodes_of(number)?;
        }
        self.count_quotas()
    }

    /// Gives the inodes in use beyond `last` numbers that are free below it.
    pub(crate) fn renumber(&mut self, last: u32) -> Result<()> {
        let per_group = self.old.super_.inodes_per_group;
        let mut target = 0;
        let mut changed: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        let mut at = 0;
        for number in last / per_group..self.old.super_.groups {
            for nth in self.used_inodes(number)? {
                let from = number * per_group + nth + 1;
                // The first free place, in the group that is filled at the time.
                let place = loop {
                    if target >= self.to_be.super_.groups {
                        return Err(Error::Misuse("too few inodes are free".to_owned()));
                    }
                    let bitmap = match changed.entry(target) {
                        std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                        std::collections::btree_map::Entry::Vacant(entry) => {
                            entry.insert(self.old.inode_bitmap(&self.redo, target)?)
                        }
                    };
                    if target == 0 {
                        let reserved = self.old.super_.first_inode.0.saturating_sub(1);
                        fill(bitmap, BitRun { start: 0, len: reserved.min(per_group) }, true);
                    }
                    match Bitmap::new(bitmap, per_group).next_zero(at) {
                        Some(free) => {
                            fill(bitmap, BitRun { start: free, len: 1 }, true);
                            at = free + 1;
                            break free;
                        }
                        None => (target, at) = (target + 1, 0),
                    }
                };
                self.renumbered.insert(from, target * per_group + place + 1);
            }
        }
        for (number, bytes) in changed {
            self.set_inode_bitmap(number, bytes)?;
        }
        let has_values = self.old.super_.incompatible.contains(Incompatible::EA_INODE);
        self.values_move = has_values && !self.renumbered.is_empty();
        Ok(())
    }

    /// Places of the inodes of a group that are in use.
    pub(crate) fn used_inodes(&self, number: u32) -> Result<Vec<u32>> {
        let group = self.old.group(number)?;
        if group.flags & flags::INODE_UNINIT != 0 {
            return Ok(vec![]);
        }
        let bytes = self.old.inode_bitmap(&self.redo, number)?;
        let bitmap = Bitmap::new(&bytes, self.old.super_.inodes_per_group);
        let mut used = vec![];
        let mut at = 0;
        while let Some(nth) = bitmap.next_one(at) {
            used.push(nth);
            at = nth + 1;
        }
        Ok(used)
    }

    /// Sets the inode bitmap of a group, and what its descriptor says of it.
    pub(crate) fn set_inode_bitmap(&mut self, number: u32, bytes: Vec<u8>) -> Result<()> {
        let super_ = &self.to_be.super_;
        let group = self.to_be.groups.get_mut(index(number.into()));
        let group = group.ok_or(crate::Error::corrupt("group number"))?;
        let bitmap = Bitmap::new(&bytes, super_.inodes_per_group);
        let free = bitmap.count_zeros();
        if free == group.free_inodes {
            return Ok(());
        }
        group.free_inodes = free;
        let mut end = 0;
        while let Some(one) = bitmap.next_one(end) {
            end = one + bitmap.ones_at(one, u32::MAX);
        }
        let never_used = super_.inodes_per_group - end;
        let was = match group.flags & flags::INODE_UNINIT {
            0 => group.unused_inodes,
            _ => super_.inodes_per_group,
        };
        if never_used < was {
            if group.flags & flags::INODE_ZEROED == 0 {
                // No reader sees what is there now.
                let first = u64::from(super_.inodes_per_group - was);
                let byte = |block: u64| block * u64::from(super_.block_bytes);
                let start = byte(group.inode_table.0) + first * u64::from(super_.inode_bytes);
                let start = start.next_multiple_of(super_.block_bytes.into());
                let end = byte(group.inode_table.0 + u64::from(super_.inode_table_blocks()));
                self.redo.zero_free(start, end, &|_| ())?;
                group.flags |= flags::INODE_ZEROED;
            }
            group.unused_inodes = never_used;
            group.flags &= !flags::INODE_UNINIT;
        }
        group.sum_inodes(&bytes, super_);
        Ok(self.redo.put(group.inode_bitmap, bytes)?)
    }

    /// The bitmaps of blocks as they are to be, of those groups where they change.
    pub(crate) fn groups(&mut self) -> Result<()> {
        for number in 0..self.to_be.super_.groups {
            let (start, end) = bounds(&self.to_be.super_, number);
            let mut bytes = vec![0; index(self.to_be.super_.block_bytes.into())];
            self.space.bits(start, end, &mut bytes);
            if self.reseals || bytes != self.old.block_bitmap(&self.redo, number)? {
                let group = self.old.group(number)?;
                let is_same = bytes == self.old.block_bitmap(&self.redo, number)?;
                if is_same && group.flags & flags::BLOCK_UNINIT != 0 {
                    continue;
                }
                self.to_be.set_block_bitmap(&mut self.redo, number, bytes)?;
            }
        }
        Ok(())
    }

    /// The number that an inode is to have.
    fn number(&self, inode: InodeNumber) -> InodeNumber {
        InodeNumber(self.renumbered.get(&inode.0).copied().unwrap_or(inode.0))
    }

    /// The superblock to come, but for its counts: with the numbers of hidden inodes.
    pub(crate) fn superblock(&mut self) -> Result<RawSuperblock> {
        let raw = &mut self.to_be.raw;
        let hidden = [&mut raw.s_orphan_file_inum, &mut raw.s_prj_quota_inum, &mut raw.s_lpf_ino];
        for field in hidden {
            if let Some(number) = self.renumbered.get(&field.get()) {
                field.set(*number);
            }
        }
        self.to_be.put(&mut self.redo, self.old, self.now)
    }
}

/// All blocks of a volume's own structures.
fn own<'a>(
    super_: &'a crate::format::superblock::Superblock,
    groups: &'a [crate::format::group::Group],
) -> impl Iterator<Item = std::ops::Range<u64>> + 'a {
    let heads = (0..super_.groups).map(GroupNumber).map(|number| {
        let start = super_.group_start(number).0;
        start..start + super_.head_blocks(number)
    });
    let tables = groups.iter().flat_map(|group| crate::whole::tables(super_, group));
    heads.chain(tables)
}
