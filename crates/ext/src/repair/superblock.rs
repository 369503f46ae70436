//! The superblock: from a backup, or sealed anew.

use std::sync::Arc;

use draconis_device::{Disk, Group};

use super::{Fixer, LaterStep};
use crate::backup::{self, SuperblockPlace, block_bytes};
use crate::blocks::cow_disk::CowDisk;
use crate::check::{Problem, What};
use crate::format::features::{Compatible, Incompatible};
use crate::format::superblock::{RawSuperblock, WRONG_CHECKSUM};
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, Result};

/// Replaces a superblock by a backup if it has no magic number or block size, a wrong checksum or
/// unknown features, or if the user names the backup.
pub(super) fn restore_unusable(
    changes: &Arc<CowDisk>,
    place: &SuperblockPlace,
) -> Result<Option<(Problem, &'static str)>> {
    let (what, name, found) = match crate::blocks::uncached::read_raw_superblock(&**changes) {
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
            && let Some(mended) = backup::mend_one_bit(&**changes)
        {
            backup::put(changes, &mended)?;
            let problem = Problem { name: name.map(Into::into), ..Problem::new(what) };
            return Ok(Some((problem, "one bit of the superblock is changed back")));
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
    let mut raw = crate::blocks::uncached::read_raw_superblock(changes)?;
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
            let raw = crate::blocks::uncached::read_raw_superblock(&**self.changes)?;
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
        self.fix_field(problem)
    }

    /// Fixes fields of the superblock that the rest of it determines.
    fn fix_field(&mut self, problem: &Problem) -> Result<()> {
        let expected = problem.expected.and_then(|value| u32::try_from(value).ok());
        let raw = crate::blocks::uncached::read_raw_superblock(&**self.changes)?;
        let len = u64::from(block_bytes(&raw).unwrap_or(1024));
        let disk_blocks = self.changes.properties().len_bytes.checked_div(len).unwrap_or(0);
        let changed = self.edit_super(|raw| {
            match (problem.name.as_deref(), expected) {
                (Some(b"reserved blocks"), _) => {
                    raw.s_r_blocks_count_lo.set(0);
                    raw.s_r_blocks_count_hi.set(0);
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
