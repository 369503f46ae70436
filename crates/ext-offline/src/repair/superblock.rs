//! The superblock: from a backup, or sealed anew.

use std::ops::Range;
use std::sync::Arc;

use draconis_device::{Disk, Extent, Group};
use zerocopy::IntoBytes;

use super::{Fixer, LaterStep, fix_layout};
use crate::backup::{self, SuperblockPlace, block_bytes};
use crate::blocks::cow_disk::CowDisk;
use crate::blocks::uncached::{read_bytes, read_raw_superblock};
use crate::check::{self, CheckOptions, Problem, What};
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::le16;
use crate::format::requirements::Feature;
use crate::format::superblock::{RawSuperblock, WRONG_CHECKSUM};
use crate::format::witness::Bit;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, GroupNumber, Result};

/// Block size of the disk in memory that holds a superblock, in bytes.
pub(super) const MEMORY_BLOCK_BYTES: u32 = 1024;
/// Blocks of that disk: boot sector, superblock.
const MEMORY_BLOCKS: usize = 8;
/// Limit of fixes of the superblock.
const MAX_FIXES: u32 = 16;
/// Superblocks with one bit changed back that are checked as a whole, if there are several.
const MAX_CANDIDATES: usize = 16;

/// Groups per flex group of mke2fs are 16.
const USUAL_LOG_GROUPS_PER_FLEX: u8 = 4;
/// Groups that are examined to find a flipped bit, over all candidates: some seconds. A larger volume
/// has backups.
const MAX_EXAMINED_GROUPS: u32 = 1 << 19;

/// Returns the superblock that all else is read with, and how the one on the disk differs: restored
/// from a backup, with one bit changed back, or with the fields that the others determine. Rescue
/// reads with the same.
///
/// # Errors
/// As [`super::plan`].
pub(super) fn choose_superblock(
    disk: &Arc<dyn Disk>,
    place: &SuperblockPlace,
) -> crate::offline::Result<(RawSuperblock, Vec<(Problem, &'static str)>)> {
    let changes = Arc::new(CowDisk::new(disk.clone(), MEMORY_BLOCK_BYTES, MEMORY_BLOCKS));
    let mut fixes: Vec<_> = restore_unusable(disk, &changes, place)?.into_iter().collect();
    let mut before = None;
    let mut attempt: u32 = 1;
    for _ in 0..MAX_FIXES {
        let raw = read_raw_superblock(&*changes)?;
        let as_disk: Arc<dyn Disk> = changes.clone();
        let (problems, is_readable) = check::examine_layout(&as_disk, raw.clone())?;
        if problems.is_empty() {
            break;
        }
        if place.block.is_none()
            && before.is_none()
            && let Some((bit, mended)) = turn_bit_back(disk, &raw)
        {
            backup::put(&changes, &mended)?;
            let name = Some(bit.to_string().into_bytes());
            let problem = Problem { name, ..Problem::new(What::Superblock) };
            fixes.push((problem, "the bit of the superblock is changed back"));
            break;
        }
        if is_readable {
            // The rounds of the repair fix descriptors.
            break;
        }
        let problem = problems.iter().find(|it| it.what != What::VolumeBeyondDisk);
        let Some(problem) = problem.cloned() else { break };
        attempt = if before.as_ref() == Some(&problem) { attempt.saturating_add(1) } else { 1 };
        let mut fixed = fix_layout(&changes, None, attempt, &[&problem])?;
        if fixed.is_empty() {
            break;
        }
        fixes.append(&mut fixed);
        before = Some(problem);
    }
    Ok((read_raw_superblock(&*changes)?, fixes))
}

/// Fields that say where everything is: counts, sizes, the revision, and the features that do.
const LAYOUT_FIELDS: [(Range<usize>, u32); 12] = [
    (0x00..0x08, u32::MAX),
    (0x14..0x2C, u32::MAX),
    (0x4C..0x50, u32::MAX),
    (0x54..0x5A, u32::MAX),
    (0x5C..0x60, Compatible::RESIZE_INODE.union(Compatible::SPARSE_SUPER2).bits()),
    (0x60..0x64, LAYOUT_FEATURES.bits()),
    (0x64..0x68, LAYOUT_READ_ONLY_FEATURES.bits()),
    (0xCE..0xD0, u32::MAX),
    (0xFE..0x100, u32::MAX),
    (0x104..0x106, u32::MAX),
    (0x150..0x154, u32::MAX),
    (0x24C..0x254, u32::MAX),
];
const LAYOUT_FEATURES: Incompatible = Incompatible::FILETYPE
    .union(Incompatible::META_BG)
    .union(Incompatible::EXTENTS)
    .union(Incompatible::SIXTY_FOUR_BIT)
    .union(Incompatible::FLEX_BG);
const LAYOUT_READ_ONLY_FEATURES: ReadOnlyCompatible = ReadOnlyCompatible::SPARSE_SUPER
    .union(ReadOnlyCompatible::BIGALLOC)
    .union(ReadOnlyCompatible::CHECKSUMS);

/// Returns the superblock with the one bit changed back with which everything is where it must be.
/// Where a checksum says that the superblock is right, there is none.
fn turn_bit_back(disk: &Arc<dyn Disk>, raw: &RawSuperblock) -> Option<(Bit, RawSuperblock)> {
    if raw.has_checksum() && raw.check().is_ok() {
        return None;
    }
    let sealed = examined(disk, raw, |disk| Ok(backup::mend_one_bit(&**disk))).flatten();
    if sealed.is_some() {
        return sealed;
    }
    let mut candidates = vec![];
    let mut groups_left = MAX_EXAMINED_GROUPS;
    for (range, mask) in LAYOUT_FIELDS {
        let start = range.start;
        let bits = range.flat_map(|at| (0..8u32).map(move |bit| (at, bit)));
        let is_meant = |(at, bit): &(usize, u32)| {
            let within = u32::try_from(at.saturating_sub(start)).unwrap_or(0) % 4;
            mask >> within.saturating_mul(8).saturating_add(*bit) & 1 != 0
        };
        for (at, bit) in bits.filter(is_meant) {
            let mut bytes = raw.as_bytes().to_vec();
            *bytes.get_mut(at)? ^= 1 << bit;
            let Ok(turned) = RawSuperblock::view(&bytes) else { continue };
            let Ok(super_) = turned.check() else { continue };
            let Some(left) = groups_left.checked_sub(super_.groups) else { continue };
            groups_left = left;
            let is_sound = keeps_checksums(disk, raw, turned)
                && examined(disk, turned, |disk| check::examine_layout(disk, turned.clone()))
                    .is_some_and(|(problems, _)| problems.is_empty());
            if is_sound {
                candidates.push((Bit(at, bit), turned.clone()));
            }
            if candidates.len() > MAX_CANDIDATES {
                return None;
            }
        }
    }
    if candidates.len() < 2 {
        return candidates.pop();
    }
    // The one with the fewest problems.
    let options = CheckOptions { threads: 1, ..CheckOptions::default() };
    let count = |raw: &RawSuperblock| {
        let report = examined(disk, raw, |disk| {
            check::examine(disk, raw.clone(), false, options, &|_, _| {}).map(|(it, _)| it)
        });
        report.map_or(u64::MAX, |it| (it.problems.len() as u64).saturating_add(it.suppressed))
    };
    candidates.into_iter().min_by_key(|(_, raw)| count(raw))
}

/// Returns true unless a superblock lacks a feature of checksums that structures have.
fn keeps_checksums(disk: &Arc<dyn Disk>, raw: &RawSuperblock, turned: &RawSuperblock) -> bool {
    let lost = raw.s_feature_ro_compat.get() & !turned.s_feature_ro_compat.get();
    if lost & ReadOnlyCompatible::METADATA_CSUM.bits() != 0 {
        return raw.s_checksum_type == 0 && raw.s_checksum.get() == 0;
    }
    if lost & ReadOnlyCompatible::GDT_CSUM.bits() == 0 {
        return true;
    }
    let Ok(super_) = turned.check() else { return false };
    let (FsBlock(block), _) = super_.descriptor_location(GroupNumber(0));
    let start = block.saturating_mul(super_.block_bytes.into());
    let first = read_bytes(&**disk, Extent::new(start, 32));
    first.is_ok_and(|first| le16(&first, 0x1E) == Some(0))
}

/// Examines the disk with another superblock.
fn examined<T>(
    disk: &Arc<dyn Disk>,
    raw: &RawSuperblock,
    examine: impl FnOnce(&Arc<dyn Disk>) -> Result<T>,
) -> Option<T> {
    let changed = Arc::new(CowDisk::new(disk.clone(), MEMORY_BLOCK_BYTES, MEMORY_BLOCKS));
    backup::put(&changed, raw).ok()?;
    let changed: Arc<dyn Disk> = changed;
    examine(&changed).ok()
}

/// Replaces a superblock by a backup if it has no magic number or block size, a wrong checksum or
/// unknown features, or if the user names the backup.
fn restore_unusable(
    disk: &Arc<dyn Disk>,
    changes: &Arc<CowDisk>,
    place: &SuperblockPlace,
) -> Result<Option<(Problem, &'static str)>> {
    let (what, name, found) = match read_raw_superblock(&**changes) {
        Err(Error::NotExt) => (What::Superblock, Some("magic number"), None),
        Err(other) => return Err(other),
        Ok(raw) if block_bytes(&raw).is_none() => (What::Superblock, Some("block size"), None),
        Ok(raw) if place.block.is_some() => (What::Superblock, None, Some(raw)),
        Ok(raw) => match raw.check_lenient() {
            Err(Error::Unsupported { .. }) => (What::Superblock, Some("features"), Some(raw)),
            Err(Error::Corrupt { what: WRONG_CHECKSUM, .. }) => {
                (What::SuperblockChecksum, None, Some(raw))
            }
            _ => return Ok(None),
        },
    };
    let Some(backup) = backup::find(&**changes, found.as_ref(), place) else {
        if place.block.is_none()
            && let Some((_, mended)) = backup::mend_one_bit(&**changes)
        {
            backup::put(changes, &mended)?;
            let problem = Problem { name: name.map(Into::into), ..Problem::new(what) };
            return Ok(Some((problem, "one bit of the superblock is changed back")));
        }
        if name == Some("block size")
            && place.block.is_none()
            && let Some((_, mended)) = turn_bit_back(disk, &read_raw_superblock(&**disk)?)
        {
            backup::put(changes, &mended)?;
            let problem = Problem { name: name.map(Into::into), ..Problem::new(what) };
            return Ok(Some((problem, "the bit of the superblock is changed back")));
        }
        return match (&found, place.block) {
            (Some(_), None) => Ok(None),
            _ => Err(backup::none_found(place, Error::NotExt)),
        };
    };
    let problem = Problem { name: name.map(Into::into), ..Problem::new(what) };
    let is_intact = found.is_some_and(|raw| have_same_layout(&raw, &backup.raw));
    if what == What::SuperblockChecksum && is_intact {
        edit(changes, |_| ())?;
        return Ok(Some((problem, "the superblock agrees with a backup, and is sealed anew")));
    }
    backup::put_as_primary(changes, &backup)?;
    let action = match place.block {
        Some(_) => "the superblock is restored from the backup that was named",
        None => "the superblock is restored from a backup",
    };
    Ok(Some((problem, action)))
}

/// Writes a superblock to a disk that has none; its first sector last.
pub(super) fn write_first(disk: &dyn Disk, raw: &RawSuperblock) -> Result<()> {
    for from in [crate::redo_log::SECTOR_BYTES, 0] {
        let writes = vec![crate::redo_log::superblock_sector(raw, from)];
        let sent = disk.submit(Group { writes }, &[]);
        disk.wait_durable(sent.map_err(|refused| Error::Io(refused.error))?)?;
    }
    Ok(())
}

/// Changes the superblock in memory and seals it.
pub(super) fn edit<T>(
    changes: &CowDisk,
    change: impl FnOnce(&mut RawSuperblock) -> T,
) -> Result<T> {
    let mut raw = read_raw_superblock(changes)?;
    let done = change(&mut raw);
    raw.set_checksum();
    backup::put(changes, &raw)?;
    Ok(done)
}

/// Returns true if two superblocks describe the same layout.
fn have_same_layout(a: &RawSuperblock, b: &RawSuperblock) -> bool {
    let fields = |raw: &RawSuperblock| {
        (
            [
                raw.s_inodes_count.get(),
                raw.s_blocks_count_lo.get(),
                raw.s_first_data_block.get(),
                raw.s_log_block_size.get(),
                raw.s_log_cluster_size.get(),
                raw.s_blocks_per_group.get(),
                raw.s_clusters_per_group.get(),
                raw.s_inodes_per_group.get(),
                raw.s_rev_level.get(),
                raw.s_first_ino.get(),
                raw.s_inode_size.get().into(),
                raw.s_desc_size.get().into(),
                raw.s_first_meta_bg.get(),
                raw.s_log_groups_per_flex.into(),
            ],
            raw.s_uuid,
            raw.s_feature_incompat.get() & !Incompatible::RECOVER.bits(),
        )
    };
    fields(a) == fields(b)
}

/// Returns the inodes of all groups.
fn inodes_in_groups(raw: &RawSuperblock) -> Option<u32> {
    let blocks =
        u64::from(raw.s_blocks_count_lo.get()).checked_sub(raw.s_first_data_block.get().into())?;
    let groups = blocks.div_ceil(u64::from(raw.s_blocks_per_group.get().max(1)));
    u32::try_from(groups.checked_mul(raw.s_inodes_per_group.get().into())?).ok()
}

impl Fixer<'_> {
    pub(super) fn edit_super<T>(&self, change: impl FnOnce(&mut RawSuperblock) -> T) -> Result<T> {
        edit(self.changes, change)
    }

    /// Fixes a superblock whose check failed.
    pub(super) fn fix_superblock(&mut self, problem: &Problem) -> Result<()> {
        if self.attempt == 1 {
            let raw = read_raw_superblock(&**self.changes)?;
            let place = SuperblockPlace::default();
            if let Some(backup) = backup::find(&**self.changes, Some(&raw), &place) {
                backup::put_as_primary(self.changes, &backup)?;
                self.done(problem, "the superblock is restored from a backup");
                return Ok(());
            }
            if problem.what == What::SuperblockChecksum {
                self.edit_super(|_| ())?;
                self.done(problem, "there is no backup: the superblock is sealed anew");
                return Ok(());
            }
        }
        if problem.what == What::FeatureClash {
            return self.fix_orphan_file_without_journal(problem);
        }
        self.fix_field(problem)
    }

    /// A file of orphans needs a journal: a journal's inode is the witness that there is one.
    fn fix_orphan_file_without_journal(&mut self, problem: &Problem) -> Result<()> {
        let raw = read_raw_superblock(&**self.changes)?;
        let has_file = raw.s_feature_compat.get() & Compatible::ORPHAN_FILE.bits() != 0;
        let has_journal = raw.s_feature_compat.get() & Compatible::HAS_JOURNAL.bits() != 0;
        if !has_file || has_journal {
            return Ok(());
        }
        let (feature, is_set, action) = match raw.s_journal_inum.get() {
            8 => (Compatible::HAS_JOURNAL, true, "the volume has a journal again"),
            _ => (Compatible::ORPHAN_FILE, false, "the feature orphan_file is removed"),
        };
        self.edit_super(|raw| {
            Feature::C(feature).set(raw, is_set);
            if !is_set {
                raw.set_no_orphans_in_file();
            }
        })?;
        self.done(problem, action);
        Ok(())
    }

    /// Fixes fields of the superblock that the rest of it determines.
    fn fix_field(&mut self, problem: &Problem) -> Result<()> {
        let expected = problem.expected.and_then(|value| u32::try_from(value).ok());
        let raw = read_raw_superblock(&**self.changes)?;
        let len = u64::from(block_bytes(&raw).unwrap_or(1024));
        let disk_blocks = self.changes.properties().len_bytes.checked_div(len).unwrap_or(0);
        let changed = self.edit_super(|raw| {
            match (problem.name.as_deref(), expected) {
                (Some(b"reserved blocks"), _) => {
                    raw.s_r_blocks_count_lo.set(0);
                    raw.s_r_blocks_count_hi.set(0);
                }
                (Some(b"inode of quotas"), _) => {
                    raw.s_usr_quota_inum.set(0);
                    raw.s_grp_quota_inum.set(0);
                    raw.s_prj_quota_inum.set(0);
                }
                (Some(b"groups per flex group"), _) => {
                    let has_flex = raw.s_feature_incompat.get() & Incompatible::FLEX_BG.bits() != 0;
                    raw.s_log_groups_per_flex =
                        if has_flex { USUAL_LOG_GROUPS_PER_FLEX } else { 0 };
                }
                (Some(b"cluster size"), _) => raw.s_log_cluster_size = raw.s_log_block_size,
                (Some(b"clusters per group"), Some(value)) => raw.s_clusters_per_group.set(value),
                (Some(b"inodes count"), Some(value)) => raw.s_inodes_count.set(value),
                (Some(b"first data block"), Some(value)) => raw.s_first_data_block.set(value),
                (Some(b"first inode" | b"superblock: first inode"), _) => raw.s_first_ino.set(11),
                (Some(b"superblock: blocks per group" | b"blocks per group"), _) => {
                    let count = block_bytes(raw).unwrap_or(1024).saturating_mul(8);
                    raw.s_blocks_per_group.set(count);
                    raw.s_clusters_per_group.set(count);
                }
                (Some(b"superblock: inodes count is not that of its groups"), _) => {
                    let Some(count) = inodes_in_groups(raw) else { return false };
                    raw.s_inodes_count.set(count);
                }
                (Some(b"superblock: blocks count"), _) => {
                    raw.s_blocks_count_lo.set(crate::format::low32(disk_blocks));
                    let high = saturating_u32(disk_blocks >> 32);
                    raw.s_blocks_count_hi.set(high);
                }
                (Some(b"superblock: inode size"), _) => {
                    let size = if raw.s_min_extra_isize.get() > 0 { 256 } else { 128 };
                    raw.s_inode_size.set(size);
                }
                _ => return false,
            }
            true
        })?;
        if changed {
            self.done(problem, "the field is set to what the others say");
        }
        Ok(())
    }

    /// Takes the journal away; a new one is made in the end.
    pub(super) fn drop_journal(&mut self) -> Result<()> {
        self.put_slot(8, vec![0; saturating_usize(self.check()?.super_.inode_bytes.into())])?;
        self.edit_super(|raw| {
            raw.s_journal_inum.set(0);
            raw.s_journal_uuid = [0; 16];
            raw.s_jnl_blocks = Default::default();
            let compatible = raw.s_feature_compat.get() & !Compatible::HAS_JOURNAL.bits();
            raw.s_feature_compat.set(compatible);
            raw.set_recovered();
        })?;
        self.later.insert(LaterStep::Journal);
        Ok(())
    }

    /// Returns the first block of an inode's map.
    pub(super) fn first_block(&self, number: u32) -> Result<Option<FsBlock>> {
        let slot = self.slot(number)?;
        let runs = self.runs(number, &slot)?;
        Ok(runs.first().filter(|run| run.from == 0).map(|run| FsBlock(run.start)))
    }
}
