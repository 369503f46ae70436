//! Layout of an unmounted volume: its groups now, and its groups as planned after an offline
//! change.
//!
//! ```text
//!   superblock, descriptors ─▶ OfflineVolume ─▶ PlannedVolume ─▶ RedoLog ─▶ one atomic change
//! ```
//! Law 1: every structure is verified when read, and refused if damaged; a change never guesses.
//! Law 2: a change moves and reuses what flags, counts and bitmaps call free. So it loads the volume
//! with [`OfflineVolume::load_checked`], which compares them with inodes and maps.

pub(crate) mod reserved_gdt;

use std::ops::Range;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_types::{AccessTimes, Time};
use zerocopy::IntoBytes;

use crate::blocks::uncached::{read_raw_superblock, read_superblock};
use crate::check::{CheckOptions, Problem, Severity, check};
use crate::format::bitmap::{BitRun, Bitmap, fill};
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::{self, GroupDescriptor, flags};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::mmp::{self, MmpClaim, MmpClaimOptions};
use crate::options::{OpenOptions, WriteOptions};
use crate::redo_log::{self, OfflineWriter, RedoLog, SECTOR_BYTES};
use crate::units::{saturating_u32, saturating_usize};
use crate::volume::Volume;
use crate::{FsBlock, GroupNumber, InodeNumber};

/// Error of an offline change.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OfflineError {
    /// The volume was not unmounted cleanly, or has unrepaired damage.
    #[error("the volume is not clean; run e2fsck -f first")]
    NotClean,
    /// A check of the volume found damage. Nothing was changed.
    #[error("damaged: {first}{}; run draconis repair first", and_others(*.others))]
    Damaged {
        /// The first problem, with its location.
        first: String,
        /// Number of further problems.
        others: u64,
    },
    /// The size to grow to is less than the current size.
    #[error(
        "the volume has {blocks} blocks of {block_bytes} bytes; draconis shrink makes it smaller"
    )]
    Shrink {
        /// Blocks of the volume.
        blocks: u64,
        /// Bytes per block.
        block_bytes: u32,
    },
    /// The size to shrink to exceeds the current size.
    #[error("the volume has {blocks} blocks of {block_bytes} bytes; draconis grow makes it larger")]
    Grow {
        /// Blocks of the volume.
        blocks: u64,
        /// Bytes per block.
        block_bytes: u32,
    },
    /// The block or inode numbers of the volume cannot count the requested size.
    #[error(
        "{asked_bytes} bytes are too many: the volume can grow to {largest_bytes} bytes ({}K)",
        largest_bytes / 1024
    )]
    TooLarge {
        /// Requested size in bytes.
        asked_bytes: u64,
        /// Largest possible size in bytes.
        largest_bytes: u64,
    },
    /// The used blocks or inodes do not fit into the requested size.
    #[error(
        "{asked_bytes} bytes are too few: the volume can shrink to {least_bytes} bytes ({}K)",
        least_bytes / 1024
    )]
    TooSmall {
        /// Requested size in bytes.
        asked_bytes: u64,
        /// Smallest possible size in bytes.
        least_bytes: u64,
    },
    /// Too few free blocks for the redo log.
    #[error("no room for the log of the change: free some space on the volume first")]
    NoLogSpace,
    /// A property of the volume that offline changes do not support.
    #[error("{0}")]
    Unsupported(String),
    /// An invalid request of the caller.
    #[error("{0}")]
    Misuse(String),
    /// The disk is shorter than the volume, now or as planned.
    #[error("the disk has {disk_bytes} bytes, the volume needs {needed_bytes}")]
    ShortDisk {
        /// Bytes of the disk.
        disk_bytes: u64,
        /// Bytes of the volume.
        needed_bytes: u64,
    },
    /// No ext volume, a damaged volume, or a device error.
    #[error(transparent)]
    Volume(crate::Error),
}

fn and_others(others: u64) -> String {
    if others == 0 { String::new() } else { format!(", and {others} more problems") }
}

impl From<crate::Error> for OfflineError {
    fn from(error: crate::Error) -> Self {
        match error {
            // Allocations are counted beforehand; only the redo log can run out of space.
            crate::Error::NoSpace => Self::NoLogSpace,
            error => Self::Volume(error),
        }
    }
}

impl From<draconis_device::Error> for OfflineError {
    fn from(error: draconis_device::Error) -> Self {
        Self::Volume(error.into())
    }
}

/// Result of an offline change.
pub type Result<T> = std::result::Result<T, OfflineError>;

/// Recovers the unmounted volume on `disk`: finishes an interrupted offline change and replays the
/// journal. Returns true if there was something to do. With MMP the volume is claimed, also for the
/// change that follows; the caller releases the claim.
///
/// # Errors
/// As [`Volume::open_for_writing`].
pub fn recover_unmounted(
    disk: &Arc<dyn Disk>,
    how: &MmpClaimOptions<'_>,
) -> crate::Result<(bool, Option<MmpClaim>)> {
    // Until it is finished, an interrupted change leaves the layout unknown.
    let was_unfinished = redo_log::finish_interrupted_change(&**disk)?;
    let claim = MmpClaim::acquire_for_tool(disk, how)?;
    let now = how.now;
    let needs_recovery = read_superblock(&**disk)?.needs_recovery();
    if needs_recovery {
        let writing = WriteOptions {
            clock: Arc::new(move || now),
            dirty_bytes: 16 << 20,
            atime: AccessTimes::Never,
            discard: false,
        };
        let lent = claim.as_ref().map(MmpClaim::borrow);
        let recovered =
            Volume::open_with_claim(disk.clone(), OpenOptions::default(), writing, lent)
                .and_then(|volume| volume.close());
        if let (Err(_), Some(claim)) = (&recovered, &claim) {
            claim.release(now)?;
        }
        recovered?;
    }
    Ok((was_unfinished || needs_recovery, claim))
}

/// Layout of an unmounted volume as it is.
#[derive(Debug)]
pub(crate) struct OfflineVolume {
    /// The superblock of group 0.
    pub(crate) raw: RawSuperblock,
    pub(crate) super_: Superblock,
    pub(crate) groups: Vec<GroupDescriptor>,
    /// Bytes of the group descriptor table.
    descriptors: Vec<u8>,
}

/// Layout of the volume after the change.
#[derive(Debug)]
pub(crate) struct PlannedVolume {
    pub(crate) raw: RawSuperblock,
    pub(crate) super_: Superblock,
    pub(crate) groups: Vec<GroupDescriptor>,
}

impl OfflineVolume {
    /// Reads the unmounted volume on `disk` for a change, which `change` names in errors. Refuses a
    /// volume in which a check finds damage.
    pub(crate) fn load_checked(disk: &Arc<dyn Disk>, change: &str) -> Result<Self> {
        let volume = Self::load(&**disk, change)?;
        let report = check(disk, CheckOptions::default(), &|_, _| {})?;
        if report.is_clean() {
            return Ok(volume);
        }
        let is_damage = |it: &&Problem| it.what.severity() == Severity::Damage;
        let mut damage = report.problems.iter().filter(is_damage);
        let first = damage.next().map_or_else(String::new, ToString::to_string);
        let others = (damage.count() as u64).saturating_add(report.suppressed);
        Err(OfflineError::Damaged { first, others })
    }

    /// Reads the unmounted volume on `disk`, which was checked before.
    pub(crate) fn load(disk: &dyn Disk, change: &str) -> Result<Self> {
        let raw = read_raw_superblock(disk)?;
        let mut super_ = raw.check()?;
        check_changeable(disk, &super_, change)?;
        let mut groups = vec![];
        let mut descriptors = vec![];
        let writer = OfflineWriter::new(disk, super_.block_bytes);
        let mut at: Option<(FsBlock, Vec<u8>)> = None;
        let len = saturating_usize(super_.descriptor_bytes.into());
        for number in (0..super_.groups).map(GroupNumber) {
            let (place, slot) = super_.descriptor_location(number);
            let block = match at.take().filter(|(read, _)| *read == place) {
                Some((_, block)) => block,
                None if !super_.is_valid_block(place) => {
                    let what = "descriptors: a place outside of the volume";
                    return Err(crate::Error::corrupt(what).with_block(place).into());
                }
                None => writer.read(place, 1)?,
            };
            if !group::has_valid_checksum(&block, slot, &super_, number) {
                let what = "group descriptor: checksum";
                return Err(crate::Error::corrupt(what).with_block(place).into());
            }
            let group = GroupDescriptor::read(&block, slot, &super_)?.check(&super_)?;
            if !super_.is_valid_block(group.block_bitmap)
                || !super_.is_valid_block(group.inode_bitmap)
            {
                let what = "group descriptor: bitmap";
                return Err(crate::Error::corrupt(what).with_block(place).into());
            }
            groups.push(group);
            let from = saturating_usize(slot.into()).saturating_mul(len);
            descriptors.extend(block.get(from..from.saturating_add(len)).unwrap_or_default());
            at = Some((place, block));
        }
        // The kernel may leave the sums in the superblock behind.
        let sum = |count: fn(&GroupDescriptor) -> u32| -> u64 {
            groups.iter().map(|group| u64::from(count(group))).sum()
        };
        super_.free_blocks =
            sum(|it| it.free_clusters).saturating_mul(super_.cluster_blocks.into());
        super_.free_inodes = saturating_u32(sum(|it| it.free_inodes));
        Ok(Self { raw, super_, groups, descriptors })
    }

    pub(crate) fn group(&self, number: u32) -> Result<&GroupDescriptor> {
        let group = self.groups.get(saturating_usize(number.into()));
        Ok(group.ok_or(crate::Error::corrupt("group number"))?)
    }

    /// Returns the block bitmap of a group, with the bits beyond its end set.
    pub(crate) fn block_bitmap(&self, redo: &RedoLog<'_>, number: u32) -> Result<Vec<u8>> {
        let (group, super_) = (self.group(number)?, &self.super_);
        let len = group_clusters(super_, number);
        let mut bytes = if group.flags & flags::BLOCK_UNINIT != 0 {
            let mut bytes = vec![0; saturating_usize(super_.block_bytes.into())];
            let (start, _) = group_bounds(super_, number);
            let head = start..start.saturating_add(super_.base_meta_blocks(GroupNumber(number)));
            for own in group_tables(super_, group).into_iter().chain([head]) {
                set_bits_in_group(&mut bytes, own, (super_, number), true);
            }
            bytes
        } else {
            let bytes = redo.read_old(group.block_bitmap, 1)?;
            if !group.verify_block_bitmap_csum(&bytes, super_) {
                let what = "block bitmap: checksum";
                return Err(crate::Error::corrupt(what).with_block(group.block_bitmap).into());
            }
            bytes
        };
        let bits = saturating_u32((bytes.len() as u64).saturating_mul(8));
        fill(&mut bytes, BitRun { start: len, len: bits.saturating_sub(len.min(bits)) }, true);
        Ok(bytes)
    }

    /// Returns the inode bitmap of a group, with the bits beyond its end set.
    pub(crate) fn inode_bitmap(&self, redo: &RedoLog<'_>, number: u32) -> Result<Vec<u8>> {
        let (group, super_) = (self.group(number)?, &self.super_);
        let count = super_.inodes_per_group;
        let mut bytes = if group.flags & flags::INODE_UNINIT != 0 {
            vec![0; saturating_usize(super_.block_bytes.into())]
        } else {
            let bytes = redo.read_old(group.inode_bitmap, 1)?;
            if !group.verify_inode_bitmap_csum(&bytes, super_) {
                let what = "inode bitmap: checksum";
                return Err(crate::Error::corrupt(what).with_block(group.inode_bitmap).into());
            }
            bytes
        };
        let bits = saturating_u32((bytes.len() as u64).saturating_mul(8));
        fill(&mut bytes, BitRun { start: count, len: bits.saturating_sub(count.min(bits)) }, true);
        Ok(bytes)
    }

    /// Returns up to `enough` free blocks at or after `first`, the highest group first.
    pub(crate) fn free_blocks(
        &self,
        redo: &RedoLog<'_>,
        first: u64,
        enough: u64,
    ) -> Result<Vec<Range<u64>>> {
        let mut found = vec![];
        let mut count = 0;
        for number in (0..self.super_.groups).rev() {
            if count >= enough || group_bounds(&self.super_, number).1 <= first {
                break;
            }
            if self.group(number)?.free_clusters == 0 {
                continue;
            }
            let (start, end) = group_bounds(&self.super_, number);
            let ratio = u64::from(self.super_.cluster_blocks);
            let bytes = self.block_bitmap(redo, number)?;
            let bitmap = Bitmap::new(&bytes, self.super_.clusters_per_group());
            let mut at = 0;
            while let Some(from) = bitmap.next_zero(at) {
                let len = bitmap.zeros_at(from, u32::MAX);
                let to =
                    start.saturating_add(u64::from(from.saturating_add(len)).saturating_mul(ratio));
                let run = start.saturating_add(u64::from(from).saturating_mul(ratio)).max(first)
                    ..to.min(end);
                count = count.saturating_add(run.end.saturating_sub(run.start));
                found.extend((!run.is_empty()).then_some(run));
                at = from.saturating_add(len);
            }
        }
        Ok(found)
    }
}

impl PlannedVolume {
    /// Sets the block bitmap of a group, with its count and checksum in the descriptor.
    pub(crate) fn set_block_bitmap(
        &mut self,
        redo: &mut RedoLog<'_>,
        number: u32,
        mut bytes: Vec<u8>,
    ) -> Result<()> {
        let len = group_clusters(&self.super_, number);
        let bits = saturating_u32((bytes.len() as u64).saturating_mul(8));
        fill(&mut bytes, BitRun { start: len, len: bits.saturating_sub(len.min(bits)) }, true);
        let group = self.groups.get_mut(saturating_usize(number.into()));
        let group = group.ok_or(crate::Error::corrupt("group number"))?;
        group.free_clusters = Bitmap::new(&bytes, len).count_zeros();
        group.flags &= !flags::BLOCK_UNINIT;
        group.set_block_bitmap_csum(&bytes, &self.super_);
        Ok(redo.stage_block(group.block_bitmap, bytes)?)
    }

    /// Sums the free counts of the groups for the superblock. Writes the descriptors, their copies,
    /// and the backup superblocks. Copies beyond the old end are written at once.
    pub(crate) fn write_descriptors(
        &mut self,
        redo: &mut RedoLog<'_>,
        old: &OfflineVolume,
        now: Time,
    ) -> Result<RawSuperblock> {
        let super_ = &self.super_;
        let ratio = u64::from(super_.cluster_blocks);
        let sum = |count: fn(&GroupDescriptor) -> u32| -> u64 {
            self.groups.iter().map(|group| u64::from(count(group))).sum()
        };
        let free = sum(|it| it.free_clusters).saturating_mul(ratio);
        self.raw.set_free(free, sum(|it| it.free_inodes))?;
        self.raw.s_wtime = saturating_u32(u64::try_from(now.seconds).unwrap_or(0)).into();
        let len = saturating_usize(super_.descriptor_bytes.into());
        let per_block = super_.descriptors_per_block();
        let block_len = saturating_usize(super_.block_bytes.into());
        let end = old.super_.blocks;
        let mut put = |at: FsBlock, bytes: &[u8]| match at.0 >= end {
            true => redo.write_free_blocks(at, bytes),
            false => redo.stage_block(at, bytes.to_vec()),
        };
        for nth in 0..super_.descriptor_blocks() {
            let first = nth.saturating_mul(per_block);
            let mut block = vec![0; block_len];
            for slot in 0..per_block.min(super_.groups.saturating_sub(first)) {
                let number = first.saturating_add(slot);
                let at = saturating_usize(number.into()).saturating_mul(len);
                let to = saturating_usize(slot.into()).saturating_mul(len);
                // Unknown fields of a descriptor stay unchanged.
                if let (Some(from), Some(to)) = (
                    old.descriptors.get(at..at.saturating_add(len)),
                    block.get_mut(to..to.saturating_add(len)),
                ) {
                    to.copy_from_slice(from);
                }
                let group = self.groups.get(saturating_usize(number.into()));
                let group = group.ok_or(crate::Error::corrupt("group number"))?;
                group.write_table_locations(&mut block, slot, super_)?;
                group.write(&mut block, slot, super_, GroupNumber(number))?;
            }
            for at in super_.descriptor_locations(nth) {
                put(at, &block)?;
            }
        }
        for number in (1..super_.groups).map(GroupNumber) {
            if super_.has_superblock(number) {
                let mut bytes = backup_superblock(&self.raw, number).as_bytes().to_vec();
                bytes.resize(block_len, 0);
                put(super_.group_start(number), &bytes)?;
            }
        }
        let mut raw = self.raw.clone();
        raw.set_checksum();
        Ok(raw)
    }
}

/// Returns the backup superblock for `group`.
pub(crate) fn backup_superblock(raw: &RawSuperblock, group: GroupNumber) -> RawSuperblock {
    let mut copy = raw.clone();
    // A backup does not record how the volume was unmounted.
    copy.s_state = 0.into();
    copy.s_block_group_nr = u16::try_from(group.0).unwrap_or(u16::MAX).into();
    copy.set_checksum();
    copy
}

/// Returns the first block of a group and one past its last.
pub(crate) fn group_bounds(super_: &Superblock, number: u32) -> (u64, u64) {
    let number = GroupNumber(number);
    (super_.group_start(number).0, super_.group_end(number).0)
}

/// Returns the clusters of a group, the valid bits of its block bitmap.
fn group_clusters(super_: &Superblock, number: u32) -> u32 {
    let (start, end) = group_bounds(super_, number);
    saturating_u32(end.saturating_sub(start).div_ceil(super_.cluster_blocks.into()))
}

/// Sets or clears the bits of those `blocks` that are in the group. The bit of a partly covered
/// cluster is set, but never cleared.
#[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
pub(crate) fn set_bits_in_group(
    bitmap: &mut [u8],
    blocks: Range<u64>,
    (super_, number): (&Superblock, u32),
    value: bool,
) {
    let (start, end) = group_bounds(super_, number);
    let ratio = u64::from(super_.cluster_blocks);
    let (from, to) = (blocks.start.max(start), blocks.end.min(end));
    if from < to {
        let (first, last) = match value {
            true => (from.saturating_sub(start) / ratio, to.saturating_sub(start).div_ceil(ratio)),
            false if to == end => (
                from.saturating_sub(start).div_ceil(ratio),
                to.saturating_sub(start).div_ceil(ratio),
            ),
            false => (from.saturating_sub(start).div_ceil(ratio), to.saturating_sub(start) / ratio),
        };
        let run = BitRun {
            start: saturating_u32(first),
            len: saturating_u32(last.saturating_sub(first)),
        };
        fill(bitmap, run, value);
    }
}

/// Returns the block ranges of the bitmaps and the inode table of a group.
pub(crate) fn group_tables(super_: &Superblock, group: &GroupDescriptor) -> [Range<u64>; 3] {
    let run = |at: FsBlock, len: u64| at.0..at.0.saturating_add(len);
    [
        run(group.block_bitmap, 1),
        run(group.inode_bitmap, 1),
        run(group.inode_table, super_.inode_table_blocks().into()),
    ]
}

/// Returns the block of an inode and the offset in that block.
#[allow(clippy::arithmetic_side_effects, reason = "the divisors are at least 1")]
pub(crate) fn inode_location(
    super_: &Superblock,
    groups: &[GroupDescriptor],
    inode: InodeNumber,
) -> crate::Result<(FsBlock, usize)> {
    let damaged = || crate::Error::corrupt("inode number").with_inode(inode);
    let nth = inode.0.checked_sub(1).ok_or_else(damaged)?;
    let group = nth / super_.inodes_per_group.max(1);
    let nth = u64::from(nth % super_.inodes_per_group.max(1));
    let table = groups.get(saturating_usize(group.into())).ok_or_else(damaged)?.inode_table;
    let at = nth.saturating_mul(super_.inode_bytes.into());
    let block_bytes = u64::from(super_.block_bytes);
    Ok((table.offset(at / block_bytes), saturating_usize(at % block_bytes)))
}

/// Refuses volumes that offline changes do not support; `change` names the change in the error.
fn check_changeable(disk: &dyn Disk, super_: &Superblock, change: &str) -> Result<()> {
    let unsupported =
        |what: &str| Err(OfflineError::Unsupported(format!("{change} needs: {what}")));
    let mut unknown = super_
        .incompatible
        .difference(Incompatible::OFFLINE_CHANGEABLE | Incompatible::MMP | Incompatible::RECOVER)
        .names();
    unknown.extend(
        super_.read_only_compatible.difference(ReadOnlyCompatible::OFFLINE_CHANGEABLE).names(),
    );
    if !unknown.is_empty() {
        return unsupported(&unknown.join(", "));
    }
    if super_.has_mmp() && !mmp::is_claimed_by_tool(disk, super_)? {
        return unsupported("a claim, where hosts see that the volume is in use (mmp)");
    }
    let properties = disk.properties();
    if u64::from(properties.sector_bytes) > SECTOR_BYTES {
        let what =
            format!("another disk than one with sectors of {} bytes", properties.sector_bytes);
        return unsupported(&what);
    }
    let orphans = super_.last_orphan != 0
        || super_.read_only_compatible.contains(ReadOnlyCompatible::ORPHAN_PRESENT);
    if super_.needs_recovery() || !super_.clean || super_.errors || orphans {
        return Err(OfflineError::NotClean);
    }
    let needed_bytes = super_.len_bytes();
    if needed_bytes > properties.len_bytes {
        return Err(OfflineError::ShortDisk { disk_bytes: properties.len_bytes, needed_bytes });
    }
    let has_reserve = super_.compatible.contains(Compatible::RESIZE_INODE);
    let reserved = super_.reserved_descriptor_blocks;
    let needed = super_.base_meta_blocks(GroupNumber(0));
    let fits = needed <= u64::from(super_.blocks_per_group)
        && u32::from(reserved) <= super_.block_bytes / 4
        && (has_reserve || reserved == 0);
    let whole = u64::from(super_.groups).saturating_mul(super_.inodes_per_group.into());
    if !fits || whole != u64::from(super_.inodes) {
        return Err(crate::Error::corrupt("superblock: room for descriptors and inodes").into());
    }
    Ok(())
}
