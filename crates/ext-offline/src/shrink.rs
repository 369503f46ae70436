//! Shrinking an unmounted volume: blocks beyond the new end move, inodes of removed groups get new
//! numbers, and the groups are removed.
//!
//! ```text
//!   before   | super | descriptors | res. GDT| .. files .. | free | files | free | files |
//!                                                  ▲──────────────────┘              │
//!   after    | super | descr. | reserved GDT | .. files .. files ◀───────────────────┘
//! ```
//! Law 1: a dry run of everything, the redo log included, precedes the first write.
//! Law 2: data moves to free blocks first; all pointers to it change atomically (`redo`).
//! Law 3: group tables do not move: a group is kept or removed whole, except for the free end of
//! the last one.

use std::ops::Range;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::Time;

use crate::GroupNumber;
use crate::blocks::uncached::read_raw_superblock;
use crate::format::features::{Compatible, Incompatible};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::grow::{set_block_count, set_checksum_and_parse};
use crate::mkfs::MIN_LAST_GROUP_BLOCKS;
pub use crate::offline::{OfflineError, Result};
use crate::offline::{OfflineVolume, PlannedVolume, group_bounds, group_tables, reserved_gdt};
use crate::redo_log::RedoLog;
use crate::rewrite::VolumeRewrite;
use crate::units::{saturating_u32, saturating_usize};

/// Spare log blocks beyond the count of the dry run.
const REDO_LOG_MARGIN_BLOCKS: u64 = 8;

/// Limit of bisection steps between a feasible size and an infeasible one.
const MAX_BISECTION_STEPS: u32 = 6;

/// Target of a shrink.
pub struct ShrinkTarget<'a> {
    /// The disk.
    pub disk: &'a dyn Disk,
    /// Write time for the superblock.
    pub now: Time,
    /// Called with the bytes of copied contents.
    pub progress: &'a dyn Fn(u64),
}

/// Plan to shrink a volume.
#[derive(Debug)]
pub struct ShrinkPlan {
    old: OfflineVolume,
    raw: RawSuperblock,
    new: Superblock,
    effort: ShrinkCost,
}

/// A size that passed its dry run.
struct FeasibleSize {
    raw: RawSuperblock,
    new: Superblock,
    effort: ShrinkCost,
}

/// Blocks moved and logged by a shrink.
#[derive(Clone, Copy, Debug)]
struct ShrinkCost {
    moved_blocks: u64,
    log_blocks: u64,
}

impl ShrinkPlan {
    /// Checks the unmounted, [`crate::recover_unmounted`]d volume on `disk`, and plans to shrink it
    /// to `size_bytes`, or as far as possible. The result is larger by a partial block, and smaller
    /// by a last group too small for files.
    ///
    /// # Errors
    /// [`OfflineError`]; `TooSmall` names the smallest size.
    pub fn plan(disk: &Arc<dyn Disk>, size_bytes: Option<u64>) -> Result<Self> {
        Self::plan_loaded(&**disk, OfflineVolume::load_checked(disk, "shrinking")?, size_bytes)
    }

    /// Plans a further pass on a volume that [`Self::write`] has just made smaller: blocks that one
    /// pass frees let the next shrink further.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn plan_further(disk: &dyn Disk) -> Result<Self> {
        Self::plan_loaded(disk, OfflineVolume::load(disk, "shrinking")?, None)
    }

    fn plan_loaded(disk: &dyn Disk, old: OfflineVolume, size_bytes: Option<u64>) -> Result<Self> {
        let super_ = &old.super_;
        if super_.cluster_blocks > 1 {
            let what = "a volume with clusters (bigalloc) is not made smaller: files are not moved \
                        by clusters";
            return Err(OfflineError::Unsupported(what.to_owned()));
        }
        let Some(size_bytes) = size_bytes else { return Self::plan_minimum(disk, old) };
        let asked = size_bytes.div_ceil(super_.block_bytes.into());
        if asked > super_.blocks {
            let block_bytes = super_.block_bytes;
            return Err(OfflineError::Grow { blocks: super_.blocks, block_bytes });
        }
        if asked == super_.blocks {
            let (raw, new) = (old.raw.clone(), super_.clone());
            let effort = ShrinkCost { moved_blocks: 0, log_blocks: 0 };
            return Ok(Self { old, raw, new, effort });
        }
        if asked > mmp_block(super_)
            && let Some((raw, new)) = largest_superblock_below(&old, asked)?
            && let Some(effort) = dry_run(disk, &old, &raw, &new)?
        {
            return Ok(Self { old, raw, new, effort });
        }
        let least_bytes = Self::plan_minimum(disk, old)?.len_bytes();
        Err(OfflineError::TooSmall { asked_bytes: size_bytes, least_bytes })
    }

    /// Plans the smallest volume that holds the used blocks and the redo log.
    fn plan_minimum(disk: &dyn Disk, old: OfflineVolume) -> Result<Self> {
        let blocks = old.super_.blocks;
        let start = min_size_lower_bound(&old)?.max(mmp_block(&old.super_).saturating_add(1));
        let try_from = |at: u64| -> Result<Option<FeasibleSize>> {
            let Some((raw, new)) = smallest_superblock_above(&old, at)? else { return Ok(None) };
            if new.blocks >= blocks {
                return Ok(None);
            }
            let effort = dry_run(disk, &old, &raw, &new)?;
            Ok(effort.map(|effort| FeasibleSize { raw, new, effort }))
        };
        let (mut low, mut step, mut best) = (start, 0, None);
        while start.saturating_add(step) < blocks {
            best = try_from(start.saturating_add(step))?;
            if best.is_some() {
                break;
            }
            low = start.saturating_add(step);
            step = step.saturating_mul(2).max(16);
        }
        // The size found is at most twice as far from the bound as an infeasible one.
        let mut high = best.as_ref().map_or(blocks, |best| best.new.blocks);
        for _ in 0..MAX_BISECTION_STEPS {
            let middle = low.saturating_add(high.saturating_sub(low) / 2);
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
        if let Some(FeasibleSize { raw, new, effort }) = best {
            return Ok(Self { old, raw, new, effort });
        }
        let (raw, new) = (old.raw.clone(), old.super_.clone());
        Ok(Self { old, raw, new, effort: ShrinkCost { moved_blocks: 0, log_blocks: 0 } })
    }

    /// Returns the current size in bytes.
    pub fn old_len_bytes(&self) -> u64 {
        self.old.super_.len_bytes()
    }

    /// Returns the planned size in bytes; unchanged if there is nothing to do.
    pub fn len_bytes(&self) -> u64 {
        self.new.len_bytes()
    }

    /// Returns the planned superblock, with the old free counts.
    pub fn superblock(&self) -> &Superblock {
        &self.new
    }

    /// Returns the bytes to copy, for a progress bar.
    pub fn bytes_to_move(&self) -> u64 {
        self.effort.moved_blocks.saturating_mul(self.new.block_bytes.into())
    }

    /// Shrinks the volume, and waits until the change is durable. The disk beyond the new end is
    /// not touched.
    ///
    /// # Errors
    /// Device errors.
    pub fn write(&self, target: &ShrinkTarget<'_>) -> Result<()> {
        if self.old.super_.blocks == self.new.blocks {
            return Ok(());
        }
        let block_bytes = u64::from(self.new.block_bytes);
        let progress = |blocks: u64| (target.progress)(blocks.saturating_mul(block_bytes));
        let redo = RedoLog::new(target.disk, self.new.block_bytes, vec![]);
        let planned = planned_volume(&self.old, &self.raw, &self.new);
        let mut rework = VolumeRewrite::new(&self.old, planned, redo, target.now, &progress);
        rework.build_block_usage()?;
        let needed = self.effort.log_blocks.saturating_add(REDO_LOG_MARGIN_BLOCKS);
        let mut room = self.old.free_blocks(&rework.redo, self.new.blocks, needed)?;
        let found: u64 = room.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        let rest = rework.space.allocate_log(needed.saturating_sub(found));
        room.extend(rest.ok_or(OfflineError::NoLogSpace)?);
        rework.redo.set_log_ranges(room)?;
        let raw = stage_rewrite(&mut rework)?;
        Ok(rework.redo.commit(&raw)?)
    }
}

/// Returns the length of the volume before [`crate::recover_unmounted`] finishes an interrupted
/// change of it; 0 if the disk holds none. The superblock keeps the old length until the last step.
pub fn len_bytes_before_recovery(disk: &dyn Disk) -> u64 {
    let Ok(raw) = read_raw_superblock(disk) else { return 0 };
    let is_64bit = raw.s_feature_incompat.get() & Incompatible::SIXTY_FOUR_BIT.bits() != 0;
    let high = if is_64bit { raw.s_blocks_count_hi.get() } else { 0 };
    let blocks = u64::from(high) << 32 | u64::from(raw.s_blocks_count_lo.get());
    blocks.saturating_mul(1024u64.checked_shl(raw.s_log_block_size.get()).unwrap_or(0))
}

/// Returns the free byte ranges of a volume that a plan has checked, in order, for compaction after
/// the shrink.
///
/// # Errors
/// Device errors; damage.
pub fn free_bytes(disk: &dyn Disk) -> Result<Vec<Range<u64>>> {
    let whole = OfflineVolume::load(disk, "shrinking")?;
    let block_bytes = whole.super_.block_bytes;
    let free = whole.free_blocks(&RedoLog::dry_run(disk, block_bytes), 0, u64::MAX)?;
    let bytes = |block: u64| block.saturating_mul(block_bytes.into());
    Ok(free.into_iter().map(|run| bytes(run.start)..bytes(run.end)).collect())
}

/// Stages all changes and returns the planned superblock.
fn stage_rewrite(rework: &mut VolumeRewrite<'_>) -> Result<RawSuperblock> {
    let (old, new) = (&rework.old.super_, &rework.planned.super_);
    let last = new.inodes;
    if last < old.inodes {
        let is_stable = old.compatible.contains(Compatible::STABLE_INODES);
        rework.renumber_inodes(last)?;
        if is_stable && !rework.renumbered.is_empty() {
            let what = "inodes that must keep their numbers (stable_inodes) lie beyond the end";
            return Err(OfflineError::Unsupported(what.to_owned()));
        }
    }
    let top = reserved_gdt::resize_dind_block(&rework.redo, rework.old)?;
    rework.rewrite_inodes()?;
    if let Some(mut top) = top {
        if top.0 >= rework.space.end() {
            let taken = rework.space.allocate(1).ok_or(crate::Error::NoSpace)?;
            top.0 = taken.start;
        }
        reserved_gdt::rewrite(&mut rework.redo, &rework.planned, top, rework.now)?;
    }
    rework.rewrite_bitmaps()?;
    rework.superblock()
}

/// Makes a dry run: returns its cost, or `None` if space is insufficient.
fn dry_run(
    disk: &dyn Disk,
    old: &OfflineVolume,
    raw: &RawSuperblock,
    new: &Superblock,
) -> Result<Option<ShrinkCost>> {
    let redo = RedoLog::dry_run(disk, new.block_bytes);
    let now = Time { seconds: 0, nanoseconds: 0 };
    let mut rework = VolumeRewrite::new(old, planned_volume(old, raw, new), redo, now, &|_| ());
    rework.build_block_usage()?;
    match stage_rewrite(&mut rework) {
        Ok(_) => {}
        Err(OfflineError::NoLogSpace) => return Ok(None),
        Err(error) => return Err(error),
    }
    let quotas = u64::from(new.quotas.iter().any(|inode| *inode != 0)).saturating_mul(64);
    let log_blocks = rework.redo.log_blocks().saturating_add(quotas);
    let needed = log_blocks.saturating_add(REDO_LOG_MARGIN_BLOCKS);
    let behind = old.free_blocks(&rework.redo, new.blocks, needed)?;
    let behind: u64 = behind.iter().map(|range| range.end.saturating_sub(range.start)).sum();
    let moved_blocks = rework.moved_blocks;
    let room = rework.space.allocate_log(needed.saturating_sub(behind));
    Ok(room.map(|_| ShrinkCost { moved_blocks, log_blocks }))
}

fn planned_volume(old: &OfflineVolume, raw: &RawSuperblock, new: &Superblock) -> PlannedVolume {
    let groups = old.groups.get(..saturating_usize(new.groups.into())).unwrap_or_default();
    PlannedVolume { raw: raw.clone(), super_: new.clone(), groups: groups.to_vec() }
}

/// Returns the superblock for at most `blocks` blocks, with the old free counts; `None` if no group
/// or too few inodes would remain.
fn largest_superblock_below(
    old: &OfflineVolume,
    mut blocks: u64,
) -> Result<Option<(RawSuperblock, Superblock)>> {
    while blocks > u64::from(old.super_.first_data_block) {
        let (raw, new) = superblocks_with_size(old, blocks)?;
        if new.inodes < old.super_.inodes.saturating_sub(old.super_.free_inodes) {
            return Ok(None);
        }
        let (start, _) = group_bounds(&new, new.groups.saturating_sub(1));
        if blocks >= min_last_group_end(old, &new) {
            return Ok(Some((raw, new)));
        }
        blocks = start;
    }
    Ok(None)
}

/// Returns the superblock for at least `blocks` blocks.
fn smallest_superblock_above(
    old: &OfflineVolume,
    blocks: u64,
) -> Result<Option<(RawSuperblock, Superblock)>> {
    let (_, new) = superblocks_with_size(old, blocks)?;
    largest_superblock_below(old, blocks.max(min_last_group_end(old, &new)))
}

/// Returns the earliest end of the last group: behind all tables, and with space for files if the
/// group is partial.
fn min_last_group_end(old: &OfflineVolume, new: &Superblock) -> u64 {
    let last = new.groups.saturating_sub(1);
    let start = new.group_start(GroupNumber(last)).0;
    let whole = start.saturating_add(new.blocks_per_group.into());
    let groups = old.groups.iter().take(saturating_usize(new.groups.into()));
    let mut inside = new.base_meta_blocks(GroupNumber(last));
    let mut end = start.saturating_add(inside);
    for range in groups.flat_map(|group| group_tables(new, group)) {
        end = end.max(range.end);
        if range.start >= start {
            inside = inside.saturating_add(range.end.saturating_sub(range.start));
        }
    }
    end.max(start.saturating_add(inside).saturating_add(MIN_LAST_GROUP_BLOCKS).min(whole))
        .min(old.super_.blocks)
}

/// Returns a lower bound of the size in blocks.
fn min_size_lower_bound(old: &OfflineVolume) -> Result<u64> {
    let super_ = &old.super_;
    let first = u64::from(super_.first_data_block);
    let table = u64::from(super_.inode_table_blocks()) + 2;
    let own = |super_: &Superblock| {
        let heads = (0..super_.groups).map(|number| super_.base_meta_blocks(GroupNumber(number)));
        heads.sum::<u64>().saturating_add(u64::from(super_.groups).saturating_mul(table))
    };
    let used = super_.blocks.saturating_sub(super_.free_blocks).saturating_sub(first);
    let files = used.saturating_sub(own(super_));
    let inodes = u64::from(super_.inodes.saturating_sub(super_.free_inodes));
    let (mut low, mut high) = (1, super_.groups);
    let least = |groups: u32| -> Result<Option<u64>> {
        let most = group_bounds(super_, groups.saturating_sub(1)).1;
        let (_, new) = superblocks_with_size(old, most)?;
        let needed = first.saturating_add(own(&new)).saturating_add(files);
        Ok((needed <= most && inodes <= new.inodes.into()).then_some(needed))
    };
    while low < high {
        let middle = low.saturating_add(high.saturating_sub(low) / 2);
        match least(middle)? {
            Some(_) => high = middle,
            None => low = middle.saturating_add(1),
        }
    }
    let start = super_.group_start(GroupNumber(low.saturating_sub(1))).0;
    Ok(least(low)?.unwrap_or(super_.blocks).max(start.saturating_add(1)))
}

fn superblocks_with_size(
    whole: &OfflineVolume,
    blocks: u64,
) -> crate::Result<(RawSuperblock, Superblock)> {
    let old = &whole.super_;
    let mut raw = whole.raw.clone();
    set_block_count(&mut raw, old, blocks)?;
    let shrunk = set_checksum_and_parse(&mut raw)?;
    let table = shrunk.descriptor_blocks();
    if old.incompatible.contains(Incompatible::META_BG) {
        raw.s_first_meta_bg = old.first_meta_group.min(table).into();
    } else if old.compatible.contains(Compatible::RESIZE_INODE) {
        let kept = u32::from(old.reserved_descriptor_blocks);
        let gained = old.descriptor_blocks().saturating_sub(table);
        let most = old.block_bytes / 4;
        let reserved = kept.saturating_add(gained).min(most);
        raw.s_reserved_gdt_blocks = u16::try_from(reserved).unwrap_or(u16::MAX).into();
    }
    for group in &mut raw.s_backup_bgs {
        if group.get() >= shrunk.groups {
            group.set(0);
        }
    }
    let new = set_checksum_and_parse(&mut raw)?;
    if old.overhead_clusters != 0 {
        let less = old.overhead().saturating_sub(new.overhead());
        raw.s_overhead_blocks = old.overhead_clusters.saturating_sub(saturating_u32(less)).into();
    }
    let new = Superblock { overhead_clusters: raw.s_overhead_blocks.get(), ..new };
    Ok((raw, new))
}
/// Returns the MMP block, which does not move; 0 for none.
fn mmp_block(super_: &Superblock) -> u64 {
    super_.mmp_block.map_or(0, |block| block.0)
}
