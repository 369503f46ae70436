//! Tuning an unmounted volume: label, UUID, reserved blocks, check intervals, and features added or
//! removed in place.
//!
//! | setting | change |
//! |---|---|
//! | label, reserved blocks, counters, most features | one sector of the superblock |
//! | journal, `mmp`, quotas, `orphan_file`, `^resize_inode` | their blocks and inodes, in one redo log |
//! | UUID with checksums, `metadata_csum` | all checksums are recomputed, in one redo log |
//! | `metadata_csum` added, `^dir_index` | directories are rewritten, in their blocks |
//!
//! Law 1: a change after which `e2fsck -fn` would report a problem is refused by name.
//! Law 2: a change of more than the superblock is preceded by a check.

mod features;
mod fields;
mod journal;
mod mmp;
mod system_files;

use std::sync::Arc;

use draconis_device::{Disk, Group, Write};
use draconis_types::Block;
use draconis_types::Time;
use zerocopy::IntoBytes;

use crate::blocks::uncached::read_raw_superblock;
use crate::format::checksum::Checksum;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::flags;
use crate::format::quota::QuotaType;
use crate::format::superblock::to_disk_seconds;
use crate::format::superblock::{OFFSET_BYTES, RawSuperblock, Superblock};
use crate::mmp::is_claimed_by_tool;
pub use crate::offline::{OfflineError, Result};
use crate::offline::{OfflineVolume, PlannedVolume, reserved_gdt};
use crate::redo_log::{RedoLog, SECTOR_BYTES};
use crate::rewrite::VolumeRewrite;
use crate::units::{saturating_u32, saturating_usize};
pub use fields::MOUNT_OPTIONS;
use system_files::SystemFileChanges;

/// Largest reserved share, in millionths of the blocks.
const MAX_RESERVED_PPM: u32 = 500_000;

/// Spare log blocks beyond the count of the dry run.
const REDO_LOG_MARGIN_BLOCKS: u64 = 16;

/// Blocks reserved for the superuser.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reserved {
    /// Millionths of the blocks.
    Ppm(u32),
    /// Number of blocks.
    Blocks(u64),
}

/// Changes to superblock settings and features.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TuneChanges {
    /// Label.
    pub label: Option<Vec<u8>>,
    /// UUID.
    pub uuid: Option<[u8; 16]>,
    /// Reserved blocks.
    pub reserved: Option<Reserved>,
    /// Reaction of the kernel to damage: 1 continues, 2 remounts read-only, 3 panics.
    pub errors: Option<u16>,
    /// Mounts between checks; 0 never.
    pub max_mounts: Option<u16>,
    /// Mounts since the last check.
    pub mounts: Option<u16>,
    /// Seconds between checks; 0 never.
    pub interval_seconds: Option<u32>,
    /// Time of the last check, in seconds since 1970.
    pub checked: Option<u64>,
    /// User that may use reserved blocks.
    pub reserved_user: Option<u32>,
    /// Group that may use reserved blocks.
    pub reserved_group: Option<u32>,
    /// Last mount point, at most 64 bytes.
    pub last_mounted: Option<Vec<u8>>,
    /// Default mount options out of [`MOUNT_OPTIONS`]: `name`, `^name`.
    pub mount_options: Vec<String>,
    /// Default mount options as text for the kernel, at most 64 bytes.
    pub mount_options_text: Option<Vec<u8>>,
    /// RAID stride in blocks.
    pub raid_stride: Option<u16>,
    /// RAID stripe width in blocks.
    pub raid_stripe_blocks: Option<u32>,
    /// Hash of new htrees: 0 legacy, 1 half_md4, 2 tea.
    pub hash_algorithm: Option<u8>,
    /// True to mark the volume as damaged, so that the next `e2fsck` checks it fully.
    pub force_check: bool,
    /// Flag of test file systems.
    pub is_test_filesystem: Option<bool>,
    /// Features as `tune2fs -O` spells them: `name`, `^name`.
    pub features: Vec<String>,
    /// Size of a new journal in MiB; `None` for the default.
    pub journal_mib: Option<u32>,
    /// Quota types to enable or disable.
    pub quotas: Vec<(QuotaType, bool)>,
    /// MMP update interval in seconds; `None` for the default.
    pub mmp_interval: Option<u16>,
    /// Seed of new htrees.
    pub hash_seed: [u8; 16],
}

impl TuneChanges {
    /// Returns true if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self { hash_seed: self.hash_seed, ..Self::default() }
    }
}

/// Work of a tune beyond the superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct TuneWork {
    /// `Some(true)` adds a journal, `Some(false)` removes it.
    journal: Option<bool>,
    rewrites_checksums: bool,
    /// `Some(true)` adds the MMP block, `Some(false)` removes it.
    mmp: Option<bool>,
    /// System files to add or remove.
    system_files: SystemFileChanges,
    /// True if directories lose their htrees.
    drops_indexes: bool,
    /// True if the reserved GDT blocks are freed.
    frees_reserved_gdt: bool,
}

/// Reads the superblock on `disk`, unchecked.
///
/// # Errors
/// [`crate::Error::NotExt`]; device errors.
pub fn superblock(disk: &dyn Disk) -> crate::Result<RawSuperblock> {
    read_raw_superblock(disk)
}

/// Changes the unmounted, [`crate::recover_unmounted`]d volume on `disk`, and waits until the
/// change is durable. A change of more than the superblock checks the volume first.
///
/// # Errors
/// [`OfflineError::Misuse`], [`OfflineError::Unsupported`], [`OfflineError::Damaged`]: the volume is
/// unchanged; device errors.
pub fn tune(disk: &Arc<dyn Disk>, changes: &TuneChanges, now: Time) -> Result<()> {
    let load = || OfflineVolume::load_checked(disk, "tuning");
    tune_loaded(&**disk, changes, now, load)
}

/// Tunes a volume that was checked before.
pub(crate) fn tune_checked(disk: &dyn Disk, changes: &TuneChanges, now: Time) -> Result<()> {
    tune_loaded(disk, changes, now, || OfflineVolume::load(disk, "tuning"))
}

fn tune_loaded(
    disk: &dyn Disk,
    changes: &TuneChanges,
    now: Time,
    load: impl FnOnce() -> Result<OfflineVolume>,
) -> Result<()> {
    let old = read_raw_superblock(disk)?;
    let super_ = old.check()?;
    if super_.needs_recovery() {
        return Err(OfflineError::NotClean);
    }
    if super_.has_mmp() && !is_claimed_by_tool(disk, &super_)? {
        let what = "tuning needs: a claim, where hosts see that the volume is in use (mmp)";
        return Err(OfflineError::Unsupported(what.to_owned()));
    }
    let mut raw = old.clone();
    fields::change_fields(&mut raw, &super_, changes)?;
    let mut work = TuneWork::default();
    features::change_features(&mut raw, &super_, changes, &mut work)?;
    change_uuid(&mut raw, &super_, changes, &mut work)?;
    mmp::set_interval(&mut raw, changes)?;
    if work.rewrites_checksums && super_.has_mmp() && work.mmp != Some(false) {
        let what = "what all is sealed by changes: -O ^mmp first, and -O mmp again then";
        return Err(OfflineError::Unsupported(what.to_owned()));
    }
    if (work.rewrites_checksums || work.drops_indexes)
        && work.system_files != SystemFileChanges::default()
    {
        let what =
            "-O: quota, project and orphan_file by themselves, other features before or then";
        return Err(OfflineError::Unsupported(what.to_owned()));
    }
    if raw.as_bytes() == old.as_bytes() && work == TuneWork::default() {
        return Ok(());
    }
    raw.s_wtime = to_disk_seconds(now).into();
    let is_one_sector = raw.as_bytes().get(saturating_usize(SECTOR_BYTES)..)
        == old.as_bytes().get(saturating_usize(SECTOR_BYTES)..);
    if work == TuneWork::default() && is_one_sector {
        return write_sector(disk, &mut raw);
    }
    let whole = load()?;
    raw.set_checksum();
    let new = raw.check()?;
    let lays_out =
        work.drops_indexes || new.checksum_seed.is_some() && super_.checksum_seed.is_none();
    if super_.cluster_blocks > 1 && lays_out {
        let what = "-O: directories are not laid out anew on a volume with clusters (bigalloc)";
        return Err(OfflineError::Unsupported(what.to_owned()));
    }
    let task = TuneTask { volume: &whole, raw: &raw, new: &new, changes, work, now };
    // A dry run counts the log blocks first.
    let (tried, _) = task.stage(RedoLog::dry_run(disk, new.block_bytes), 0)?;
    let log_blocks = tried.log_blocks().saturating_add(REDO_LOG_MARGIN_BLOCKS);
    let (redo, raw) = task.stage(RedoLog::new(disk, new.block_bytes, vec![]), log_blocks)?;
    Ok(redo.commit(&raw)?)
}

/// Changes the UUID, the seed of all checksums unless the superblock stores another.
fn change_uuid(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &TuneChanges,
    work: &mut TuneWork,
) -> Result<()> {
    let Some(uuid) = changes.uuid.filter(|uuid| *uuid != super_.uuid) else { return Ok(()) };
    if super_.compatible.contains(Compatible::STABLE_INODES) {
        let what = "-U: encrypted files may depend on the identity (stable_inodes)";
        return Err(OfflineError::Unsupported(what.to_owned()));
    }
    raw.s_uuid = uuid;
    let [_, incompatible, read_only] = raw.features();
    if incompatible & Incompatible::CSUM_SEED.bits() != 0 {
        return Ok(());
    }
    if incompatible & Incompatible::EA_INODE.bits() != 0 {
        let what = "-U: values of attributes in inodes are hashed with the identity; \
                    add -O metadata_csum_seed first";
        return Err(OfflineError::Unsupported(what.to_owned()));
    }
    work.rewrites_checksums |= read_only & ReadOnlyCompatible::CHECKSUMS.bits() != 0;
    Ok(())
}

/// Writes the first sector of a superblock.
fn write_sector(disk: &dyn Disk, raw: &mut RawSuperblock) -> Result<()> {
    // The checksum is in the other sector, and stays valid.
    raw.preserve_checksum();
    let mut sector = Block::private(saturating_usize(SECTOR_BYTES));
    sector.copy_in(0, raw.as_bytes().get(..saturating_usize(SECTOR_BYTES)).unwrap_or_default());
    let write = Write { at_bytes: OFFSET_BYTES, block: sector };
    let ticket = disk.submit(Group { writes: vec![write] }, &[]);
    Ok(disk.wait_durable(ticket.map_err(|refused| refused.error)?)?)
}

/// Arguments of a tune that needs a rewrite.
struct TuneTask<'a> {
    volume: &'a OfflineVolume,
    raw: &'a RawSuperblock,
    new: &'a Superblock,
    changes: &'a TuneChanges,
    work: TuneWork,
    now: Time,
}

impl<'a> TuneTask<'a> {
    /// Stages all changes with `log_blocks` for the log, and returns the planned superblock.
    fn stage(&self, redo: RedoLog<'a>, log_blocks: u64) -> Result<(RedoLog<'a>, RawSuperblock)> {
        let planned = PlannedVolume {
            raw: self.raw.clone(),
            super_: self.new.clone(),
            groups: self.volume.groups.clone(),
        };
        let mut rework = VolumeRewrite::new(self.volume, planned, redo, self.now, &|_| ());
        rework.rewrites_checksums = self.work.rewrites_checksums;
        rework.build_block_usage()?;
        let reserve = match self.work.frees_reserved_gdt {
            true => reserved_gdt::resize_dind_block(&rework.redo, rework.old)?,
            false => None,
        };
        if reserve.is_some() {
            // The reserved GDT blocks stay in use until the change commits.
            rework.keep_old_metadata();
        }
        let room = rework.space.allocate_log(log_blocks).ok_or(OfflineError::NoLogSpace)?;
        rework.redo.set_log_ranges(room)?;
        match self.work.journal {
            Some(true) => journal::add_journal(&mut rework, self.changes.journal_mib)?,
            Some(false) => journal::remove_journal(&mut rework)?,
            None => {}
        }
        system_files::apply_changes(&mut rework, self.work.system_files)?;
        match self.work.mmp {
            Some(true) => mmp::add_mmp_block(&mut rework)?,
            Some(false) => mmp::remove_mmp_block(&mut rework)?,
            None => {}
        }
        if self.work.rewrites_checksums || self.work.drops_indexes {
            rework.rewrite_inodes()?;
        }
        if let Some(top) = reserve {
            reserved_gdt::rewrite(&mut rework.redo, &rework.planned, top, rework.now)?;
            rework.space.release(top.0..top.0.saturating_add(1));
            rework.replace_metadata_usage();
            let less = rework.old.super_.overhead().saturating_sub(self.new.overhead());
            adjust_overhead(&mut rework.planned.raw, less, false);
        }
        if self.work.rewrites_checksums {
            recompute_bitmap_checksums(&mut rework)?;
        }
        rework.rewrite_bitmaps()?;
        let raw = rework.superblock()?;
        Ok((rework.redo, raw))
    }
}

/// Recomputes the checksums of unchanged bitmaps.
fn recompute_bitmap_checksums(rework: &mut VolumeRewrite<'_>) -> Result<()> {
    for number in 0..rework.planned.super_.groups {
        let bitmap = rework.old.inode_bitmap(&rework.redo, number)?;
        let super_ = rework.planned.super_.clone();
        if let Some(group) = rework.planned.groups.get_mut(saturating_usize(number.into()))
            && group.flags & flags::INODE_UNINIT == 0
        {
            group.set_inode_bitmap_csum(&bitmap, &super_);
        }
    }
    Ok(())
}

/// Returns the checksum seed of a UUID.
fn checksum_seed(uuid: &[u8; 16]) -> u32 {
    Checksum::new().update(uuid).value()
}

/// Adds to or subtracts from the overhead, the clusters unavailable to files.
fn adjust_overhead(raw: &mut RawSuperblock, clusters: u64, more: bool) {
    let had = raw.s_overhead_blocks.get();
    if had != 0 {
        let clusters = saturating_u32(clusters);
        let has = if more { had.saturating_add(clusters) } else { had.saturating_sub(clusters) };
        raw.s_overhead_blocks = has.into();
    }
}
