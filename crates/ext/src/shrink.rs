//! Shrinking a volume that is not in use: what lies beyond the end to come is moved, inodes of
//! groups that go get other numbers, and groups go.
//!
//! ```text
//!   before   | super | descriptors | reserve | .. files .. | free | files | free | files |
//!                                                  ▲──────────────────┘              │
//!   after    | super | descr. | reserve ..   | .. files .. files ◀───────────────────┘
//! ```
//! Law 1: everything is tried before a byte is written, the log of the change included.
//! Law 2: what moves goes to free blocks first; all that leads there changes at once
//! (`redo`).
//! Law 3: the tables of groups stay where they are: a group goes or stays as a whole, but for the
//! free end of the last one.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with block numbers of checked superblocks, far below 2^64"
)]

use std::ops::Range;

use draconis_device::Disk;
use draconis_exchange::contract::Time;

use crate::GroupNumber;
use crate::format::features::{Compatible, Incompatible};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::grow::{checked, set_blocks};
use crate::mkfs::LEAST_IN_GROUP;
use crate::redo::Redo;
use crate::rework::Rework;
use crate::units::{index, narrow};
pub use crate::whole::{Error, Result};
use crate::whole::{PlannedVolume, Whole, bounds, reserve, tables};

/// Log blocks beyond what was counted when it was tried.
const LOG_MARGIN: u64 = 8;

/// How often the distance between a size that works and one that does not is halved.
const MOST_HALVINGS: u32 = 6;

/// Where a plan is written.
pub struct Target<'a> {
    /// The disk.
    pub disk: &'a dyn Disk,
    /// When the volume is said to have been written.
    pub now: Time,
    /// Called with bytes of contents that were copied.
    pub progress: &'a dyn Fn(u64),
}

/// A volume as it is, and as it is to be.
#[derive(Debug)]
pub struct Shrinking {
    old: Whole,
    raw: RawSuperblock,
    new: Superblock,
    effort: Effort,
}

/// A size that works.
struct Tried {
    raw: RawSuperblock,
    new: Superblock,
    effort: Effort,
}

/// What a change takes.
#[derive(Clone, Copy, Debug)]
struct Effort {
    moved_blocks: u64,
    log_blocks: u64,
}

impl Shrinking {
    /// Plans to shrink the volume on `disk`, which is not in use and [`crate::settle`]d, to
    /// `size_bytes`, or as far as possible: more by a part of a block, less by a last group that
    /// would have no room for files.
    ///
    /// # Errors
    /// [`Error::TooSmall`] with the least size; [`Error::Grow`]; [`Error::NotClean`]; damage.
    pub fn plan(disk: &dyn Disk, size_bytes: Option<u64>) -> Result<Self> {
        let old = Whole::load(disk, "shrinking")?;
        let super_ = &old.super_;
        if super_.cluster_blocks > 1 {
            let what = "a volume with clusters (bigalloc) is not made smaller: files are not moved \
                        by clusters";
            return Err(Error::Unsupported(what.to_owned()));
        }
        let Some(size_bytes) = size_bytes else { return Self::least(disk, old) };
        let asked = size_bytes.div_ceil(super_.block_bytes.into());
        if asked > super_.blocks {
            let block_bytes = super_.block_bytes;
            return Err(Error::Grow { blocks: super_.blocks, block_bytes });
        }
        if asked == super_.blocks {
            let (raw, new) = (old.raw.clone(), super_.clone());
            let effort = Effort { moved_blocks: 0, log_blocks: 0 };
            return Ok(Self { old, raw, new, effort });
        }
        if asked > guard(super_)
            && let Some((raw, new)) = fitting(&old, asked)?
            && let Some(effort) = attempt(disk, &old, &raw, &new)?
        {
            return Ok(Self { old, raw, new, effort });
        }
        let least_bytes = Self::least(disk, old)?.len_bytes();
        Err(Error::TooSmall { asked_bytes: size_bytes, least_bytes })
    }

    /// As small as what it holds, with the log of the change, lets it be.
    fn least(disk: &dyn Disk, old: Whole) -> Result<Self> {
        let blocks = old.super_.blocks;
        let start = lower_bound(&old)?.max(guard(&old.super_).saturating_add(1));
        let try_from = |at: u64| -> Result<Option<Tried>> {
            let Some((raw, new)) = fitting_from(&old, at)? else { return Ok(None) };
            if new.blocks >= blocks {
                return Ok(None);
            }
            let effort = attempt(disk, &old, &raw, &new)?;
            Ok(effort.map(|effort| Tried { raw, new, effort }))
        };
        let (mut low, mut step, mut best) = (start, 0, None);
        while start + step < blocks {
            best = try_from(start + step)?;
            if best.is_some() {
                break;
            }
            low = start + step;
            step = (step * 2).max(16);
        }
        // What was found is at most twice as far from the bound as what is not enough.
        let mut high = best.as_ref().map_or(blocks, |best| best.new.blocks);
        for _ in 0..MOST_HALVINGS {
            let middle = low + high.saturating_sub(low) / 2;
            if middle <= low || best.is_none() {
                break;
            }
            match try_from(middle)? {
                Some(tried) if tried.new.blocks < high => {
                    high = tried.new.blocks;
                    best = Some(tried);
                }
                _ => low = middle,
            }
        }
        if let Some(Tried { raw, new, effort }) = best {
            return Ok(Self { old, raw, new, effort });
        }
        let (raw, new) = (old.raw.clone(), old.super_.clone());
        Ok(Self { old, raw, new, effort: Effort { moved_blocks: 0, log_blocks: 0 } })
    }

    /// Bytes of the volume as it is.
    pub fn old_len_bytes(&self) -> u64 {
        self.old.super_.len_bytes()
    }

    /// Bytes of the volume as it is to be; the same if there is nothing to do.
    pub fn len_bytes(&self) -> u64 {
        self.new.len_bytes()
    }

    /// The superblock to come; the free counts are what they were.
    pub fn superblock(&self) -> &Superblock {
        &self.new
    }

    /// Bytes that are copied, for a bar of progress.
    pub fn bytes_to_move(&self) -> u64 {
        self.effort.moved_blocks.saturating_mul(self.new.block_bytes.into())
    }

    /// Shrinks the volume, and waits until that is durable. What is behind it on the disk is not
    /// touched.
    ///
    /// # Errors
    /// What the device says.
    pub fn write(&self, target: &Target<'_>) -> Result<()> {
        if self.old.super_.blocks == self.new.blocks {
            return Ok(());
        }
        let block_bytes = u64::from(self.new.block_bytes);
        let progress = |blocks: u64| (target.progress)(blocks * block_bytes);
        let redo = Redo::new(target.disk, self.new.block_bytes, vec![]);
        let to_be = to_be(&self.old, &self.raw, &self.new);
        let mut rework = Rework::new(&self.old, to_be, redo, target.now, &progress);
        rework.map_space()?;
        let needed = self.effort.log_blocks + LOG_MARGIN;
        let mut room = self.old.free_blocks(&rework.redo, self.new.blocks, needed)?;
        let found: u64 = room.iter().map(|range| range.end - range.start).sum();
        let rest = rework.space.take_room(needed.saturating_sub(found));
        room.extend(rest.ok_or(Error::NoRoom)?);
        rework.redo.set_room(room)?;
        let raw = work(&mut rework)?;
        Ok(rework.redo.commit(&raw)?)
    }
}

/// Bytes of a volume that was shrunk, from its start on, that are free.
///
/// # Errors
/// What the device says; damage.
pub fn free_bytes(disk: &dyn Disk) -> Result<Vec<Range<u64>>> {
    let whole = Whole::load(disk, "shrinking")?;
    let block_bytes = whole.super_.block_bytes;
    let free = whole.free_blocks(&Redo::dry(disk, block_bytes), 0, u64::MAX)?;
    let bytes = |block: u64| block * u64::from(block_bytes);
    Ok(free.into_iter().map(|run| bytes(run.start)..bytes(run.end)).collect())
}

/// Does what is to be done, but for the last step; the superblock to come.
fn work(rework: &mut Rework<'_>) -> Result<RawSuperblock> {
    let (old, new) = (&rework.old.super_, &rework.to_be.super_);
    let last = new.inodes;
    if last < old.inodes {
        let is_stable = old.compatible.contains(Compatible::STABLE_INODES);
        rework.renumber(last)?;
        if is_stable && !rework.renumbered.is_empty() {
            let what = "inodes that must keep their numbers (stable_inodes) lie beyond the end";
            return Err(Error::Unsupported(what.to_owned()));
        }
    }
    let top = reserve::top(&rework.redo, rework.old)?;
    rework.inodes()?;
    if let Some(mut top) = top {
        if top.0 >= rework.space.end() {
            let taken = rework.space.take(1).ok_or(crate::Error::NoSpace)?;
            top.0 = taken.start;
        }
        reserve::renew(&mut rework.redo, &rework.to_be, top, rework.now)?;
    }
    rework.groups()?;
    rework.superblock()
}

/// Tries it: what it takes, or `None` where there is no room.
fn attempt(
    disk: &dyn Disk,
    old: &Whole,
    raw: &RawSuperblock,
    new: &Superblock,
) -> Result<Option<Effort>> {
    let redo = Redo::dry(disk, new.block_bytes);
    let now = Time { seconds: 0, nanoseconds: 0 };
    let mut rework = Rework::new(old, to_be(old, raw, new), redo, now, &|_| ());
    rework.map_space()?;
    match work(&mut rework) {
        Ok(_) => {}
        Err(Error::NoRoom) => return Ok(None),
        Err(error) => return Err(error),
    }
    let quotas = u64::from(new.quotas.iter().any(|inode| *inode != 0)) * 64;
    let log_blocks = rework.redo.log_blocks() + quotas;
    let needed = log_blocks + LOG_MARGIN;
    let behind = old.free_blocks(&rework.redo, new.blocks, needed)?;
    let behind: u64 = behind.iter().map(|range| range.end - range.start).sum();
    let moved_blocks = rework.moved_blocks;
    let room = rework.space.take_room(needed.saturating_sub(behind));
    Ok(room.map(|_| Effort { moved_blocks, log_blocks }))
}

fn to_be(old: &Whole, raw: &RawSuperblock, new: &Superblock) -> PlannedVolume {
    let groups = old.groups.get(..index(new.groups.into())).unwrap_or_default();
    PlannedVolume { raw: raw.clone(), super_: new.clone(), groups: groups.to_vec() }
}

/// The superblock of a volume of at most so many blocks, free counts excepted; `None` where no
/// group would be left, or too few inodes.
fn fitting(old: &Whole, mut blocks: u64) -> Result<Option<(RawSuperblock, Superblock)>> {
    while blocks > u64::from(old.super_.first_data_block) {
        let (raw, new) = with_blocks(old, blocks)?;
        if new.inodes < old.super_.inodes - old.super_.free_inodes {
            return Ok(None);
        }
        let (start, _) = bounds(&new, new.groups - 1);
        if blocks >= least_end(old, &new) {
            return Ok(Some((raw, new)));
        }
        blocks = start;
    }
    Ok(None)
}

/// The same of at least so many blocks.
fn fitting_from(old: &Whole, blocks: u64) -> Result<Option<(RawSuperblock, Superblock)>> {
    let (_, new) = with_blocks(old, blocks)?;
    fitting(old, blocks.max(least_end(old, &new)))
}

/// Where the last group of a volume ends at the earliest: behind all tables, and with room for
/// files if it is not whole.
fn least_end(old: &Whole, new: &Superblock) -> u64 {
    let last = new.groups - 1;
    let start = new.group_start(GroupNumber(last)).0;
    let whole = start + u64::from(new.blocks_per_group);
    let groups = old.groups.iter().take(index(new.groups.into()));
    let mut inside = new.head_blocks(GroupNumber(last));
    let mut end = start + inside;
    for range in groups.flat_map(|group| tables(new, group)) {
        end = end.max(range.end);
        if range.start >= start {
            inside += range.end - range.start;
        }
    }
    end.max((start + inside + LEAST_IN_GROUP).min(whole)).min(old.super_.blocks)
}

/// Fewer blocks than this there cannot be.
fn lower_bound(old: &Whole) -> Result<u64> {
    let super_ = &old.super_;
    let first = u64::from(super_.first_data_block);
    let table = u64::from(super_.inode_table_blocks()) + 2;
    let own = |super_: &Superblock| {
        let heads = (0..super_.groups).map(|number| super_.head_blocks(GroupNumber(number)));
        heads.sum::<u64>() + u64::from(super_.groups) * table
    };
    let used = super_.blocks - super_.free_blocks - first;
    let files = used.saturating_sub(own(super_));
    let inodes = u64::from(super_.inodes - super_.free_inodes);
    let (mut low, mut high) = (1, super_.groups);
    let least = |groups: u32| -> Result<Option<u64>> {
        let most = bounds(super_, groups - 1).1;
        let (_, new) = with_blocks(old, most)?;
        let needed = first + own(&new) + files;
        Ok((needed <= most && inodes <= new.inodes.into()).then_some(needed))
    };
    while low < high {
        let middle = low + (high - low) / 2;
        match least(middle)? {
            Some(_) => high = middle,
            None => low = middle + 1,
        }
    }
    let start = super_.group_start(GroupNumber(low - 1)).0;
    Ok(least(low)?.unwrap_or(super_.blocks).max(start + 1))
}

fn with_blocks(whole: &Whole, blocks: u64) -> crate::Result<(RawSuperblock, Superblock)> {
    let old = &whole.super_;
    let mut raw = whole.raw.clone();
    set_blocks(&mut raw, old, blocks)?;
    let shrunk = checked(&mut raw)?;
    let table = shrunk.descriptor_blocks();
    if old.incompatible.contains(Incompatible::META_BG) {
        raw.s_first_meta_bg = old.first_meta_group.min(table).into();
    } else if old.compatible.contains(Compatible::RESIZE_INODE) {
        let kept = u32::from(old.reserved_descriptor_blocks);
        let gained = old.descriptor_blocks().saturating_sub(table);
        let most = old.block_bytes / 4;
        let reserved = (kept + gained).min(most);
        raw.s_reserved_gdt_blocks = u16::try_from(reserved).unwrap_or(u16::MAX).into();
    }
    for group in &mut raw.s_backup_bgs {
        if group.get() >= shrunk.groups {
            group.set(0);
        }
    }
    let new = checked(&mut raw)?;
    if old.overhead_clusters != 0 {
        let less = old.overhead().saturating_sub(new.overhead());
        raw.s_overhead_blocks = old.overhead_clusters.saturating_sub(narrow(less)).into();
    }
    let new = Superblock { overhead_clusters: raw.s_overhead_blocks.get(), ..new };
    Ok((raw, new))
}
/// The block by which hosts see that the volume is in use, which stays where it is; 0 for none.
fn guard(super_: &Superblock) -> u64 {
    super_.mmp_block.map_or(0, |block| block.0)
}
