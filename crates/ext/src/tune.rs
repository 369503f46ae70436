//! Tuning a volume that is not in use: label, identity, what is reserved, when it is checked, and
//! features that are added or dropped where the volume lies.
//!
//! | what | how |
//! |---|---|
//! | label, reserve, counts, most features | one sector of the superblock |
//! | journal, `mmp`, quotas, `orphan_file`, `^resize_inode` | their blocks and inodes, in one change of the whole (`redo`) |
//! | identity with checksums, `metadata_csum` | everything is sealed anew, in one such change |
//! | `metadata_csum` added, `^dir_index` | directories are laid out anew, in their blocks |
//!
//! Law: what would leave a volume that `e2fsck -fn` has something to say of is refused by name.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with block numbers of a checked superblock, far below 2^64"
)]

mod features;
mod fields;
mod guard;
mod hidden;
mod journal;

use draconis_device::{Disk, Group, Write};
use draconis_exchange::contract::Time;
use draconis_exchange::heap::Block;
use zerocopy::IntoBytes;

use crate::claim;
use crate::commit::seconds_of;
use crate::format::checksum::Checksum;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::flags;
use crate::format::quota::Kind;
use crate::format::superblock::{OFFSET_BYTES, RawSuperblock, Superblock};
use crate::redo::{Redo, SECTOR_BYTES, read_raw};
use crate::rework::Rework;
use crate::units::{index, narrow};
pub use crate::whole::{Error, Result};
use crate::whole::{PlannedVolume, Whole, reserve};
pub use fields::MOUNT_OPTIONS;
use hidden::Hidden;

/// The largest part that can be reserved, in millionths.
const MOST_RESERVED_PPM: u32 = 500_000;

/// Log blocks beyond what was counted when it was tried.
const LOG_MARGIN: u64 = 16;

/// What is kept for the superuser.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reserved {
    /// So many millionths of the blocks.
    Ppm(u32),
    /// So many blocks.
    Blocks(u64),
}

/// What is to be different.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// The label.
    pub label: Option<Vec<u8>>,
    /// The identity.
    pub uuid: Option<[u8; 16]>,
    /// What is reserved.
    pub reserved: Option<Reserved>,
    /// What the kernel does about damage: 1 goes on, 2 remounts read-only, 3 panics.
    pub errors: Option<u16>,
    /// After how many mounts the volume is to be checked; 0 never.
    pub most_mounts: Option<u16>,
    /// How often it was mounted since the last check.
    pub mounts: Option<u16>,
    /// After how many seconds it is to be checked; 0 never.
    pub interval_seconds: Option<u32>,
    /// When it was checked last, in seconds since 1970.
    pub checked: Option<u64>,
    /// The user that may take what is reserved.
    pub reserved_user: Option<u32>,
    /// The group that may.
    pub reserved_group: Option<u32>,
    /// Where it was mounted last, at most 64 bytes.
    pub last_mounted: Option<Vec<u8>>,
    /// Options of [`MOUNT_OPTIONS`] that mounts of it have by themselves: `name`, `^name`.
    pub mount_options: Vec<String>,
    /// The same as text that only the kernel reads, at most 64 bytes.
    pub mount_options_text: Option<Vec<u8>>,
    /// Blocks of one disk of a stripe.
    pub raid_stride: Option<u16>,
    /// Blocks of a stripe.
    pub raid_stripe_blocks: Option<u32>,
    /// How new indexes of directories hash: 0 legacy, 1 half_md4, 2 tea.
    pub hash_algorithm: Option<u8>,
    /// Whether it is said to be damaged, so that the next `e2fsck` looks at all of it.
    pub is_to_be_checked: bool,
    /// Whether it is for trying out what is not for daily use.
    pub is_for_tests: Option<bool>,
    /// Features as `tune2fs -O` spells them: `name`, `^name`.
    pub features: Vec<String>,
    /// MiB of a new journal; usual if it is left out.
    pub journal_mib: Option<u32>,
    /// Whose quotas are counted from now on, and whose no longer.
    pub quotas: Vec<(Kind, bool)>,
    /// How often a host says that it uses the volume, in seconds, with `mmp`; usual if it is left out.
    pub mmp_interval: Option<u16>,
    /// What a new index of directories is seeded with.
    pub hash_seed: [u8; 16],
}

impl Changes {
    /// Whether there is nothing to do.
    pub fn is_nothing(&self) -> bool {
        *self == Self { hash_seed: self.hash_seed, ..Self::default() }
    }
}

/// What there is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Work {
    /// `Some(true)` adds a journal, `Some(false)` drops it.
    journal: Option<bool>,
    reseals: bool,
    /// `Some(true)` adds the block by which hosts see that the volume is in use, `Some(false)` drops it.
    guard: Option<bool>,
    /// Files without names that come or go.
    hidden: Hidden,
    /// Directories lose their indexes.
    lists: bool,
    /// The blocks that are reserved for more descriptors become free.
    frees_reserve: bool,
}

/// The superblock as it is on `disk`, unchecked.
///
/// # Errors
/// [`crate::Error::NotExt`]; what the device says.
pub fn superblock(disk: &dyn Disk) -> crate::Result<RawSuperblock> {
    read_raw(disk)
}

/// Changes the volume on `disk`, which is not in use and [`crate::settle`]d, and waits until that
/// is durable.
///
/// # Errors
/// [`Error::Misuse`] and [`Error::Unsupported`], and the volume is as it was; what the device says.
pub fn tune(disk: &dyn Disk, changes: &Changes, now: Time) -> Result<()> {
    let old = read_raw(disk)?;
    let super_ = old.check()?;
    if super_.needs_recovery() {
        return Err(Error::NotClean);
    }
    if super_.has_mmp() && !claim::is_held_by_tool(disk, &super_)? {
        let what = "tuning needs: a claim, where hosts see that the volume is in use (mmp)";
        return Err(Error::Unsupported(what.to_owned()));
    }
    let mut raw = old.clone();
    fields::change(&mut raw, &super_, changes)?;
    let mut work = Work::default();
    features::change(&mut raw, &super_, changes, &mut work)?;
    identity(&mut raw, &super_, changes, &mut work)?;
    guard::interval(&mut raw, changes)?;
    if work.reseals && super_.has_mmp() && work.guard != Some(false) {
        let what = "what all is sealed by changes: -O ^mmp first, and -O mmp again then";
        return Err(Error::Unsupported(what.to_owned()));
    }
    if (work.reseals || work.lists) && work.hidden != Hidden::default() {
        let what =
            "-O: quota, project and orphan_file by themselves, other features before or then";
        return Err(Error::Unsupported(what.to_owned()));
    }
    if raw.as_bytes() == old.as_bytes() && work == Work::default() {
        return Ok(());
    }
    raw.s_wtime = seconds_of(now).into();
    let is_one_sector =
        raw.as_bytes().get(index(SECTOR_BYTES)..) == old.as_bytes().get(index(SECTOR_BYTES)..);
    if work == Work::default() && is_one_sector {
        return write_sector(disk, &mut raw);
    }
    let whole = Whole::load(disk, "tuning")?;
    raw.seal();
    let new = raw.check()?;
    let lays_out = work.lists || new.checksum_seed.is_some() && super_.checksum_seed.is_none();
    if super_.cluster_blocks > 1 && lays_out {
        let what = "-O: directories are not laid out anew on a volume with clusters (bigalloc)";
        return Err(Error::Unsupported(what.to_owned()));
    }
    let task = Task { whole: &whole, raw: &raw, new: &new, changes, work, now };
    // First tried, then done.
    let (tried, _) = task.rework(Redo::dry(disk, new.block_bytes), 0)?;
    let log_blocks = tried.log_blocks() + LOG_MARGIN;
    let (redo, raw) = task.rework(Redo::new(disk, new.block_bytes, vec![]), log_blocks)?;
    Ok(redo.commit(&raw)?)
}

/// The identity, by which everything is sealed unless the superblock says otherwise.
fn identity(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &Changes,
    work: &mut Work,
) -> Result<()> {
    let Some(uuid) = changes.uuid.filter(|uuid| *uuid != super_.uuid) else { return Ok(()) };
    if super_.compatible.contains(Compatible::STABLE_INODES) {
        let what = "-U: encrypted files may depend on the identity (stable_inodes)";
        return Err(Error::Unsupported(what.to_owned()));
    }
    raw.s_uuid = uuid;
    let [_, incompatible, read_only] = raw.features();
    if incompatible & Incompatible::CSUM_SEED.bits() != 0 {
        return Ok(());
    }
    if incompatible & Incompatible::EA_INODE.bits() != 0 {
        let what = "-U: values of attributes in inodes are hashed with the identity; \
                    add -O metadata_csum_seed first";
        return Err(Error::Unsupported(what.to_owned()));
    }
    work.reseals |= read_only & ReadOnlyCompatible::SUMS.bits() != 0;
    Ok(())
}

/// Writes what is in the first sector of a superblock.
fn write_sector(disk: &dyn Disk, raw: &mut RawSuperblock) -> Result<()> {
    // The checksum is in the other sector, and stays right.
    raw.balance();
    let mut sector = Block::private(index(SECTOR_BYTES));
    sector.copy_in(0, raw.as_bytes().get(..index(SECTOR_BYTES)).unwrap_or_default());
    let write = Write { at_bytes: OFFSET_BYTES, block: sector };
    let ticket = disk.submit(Group { writes: vec![write] }, &[]);
    Ok(disk.wait(ticket.map_err(|refused| refused.error)?)?)
}

/// All that is to be done.
struct Task<'a> {
    whole: &'a Whole,
    raw: &'a RawSuperblock,
    new: &'a Superblock,
    changes: &'a Changes,
    work: Work,
    now: Time,
}

impl<'a> Task<'a> {
    /// Does it, but for the last step, with so many blocks for the log; the superblock to come.
    fn rework(&self, redo: Redo<'a>, log_blocks: u64) -> Result<(Redo<'a>, RawSuperblock)> {
        let to_be = PlannedVolume {
            raw: self.raw.clone(),
            super_: self.new.clone(),
            groups: self.whole.groups.clone(),
        };
        let mut rework = Rework::new(self.whole, to_be, redo, self.now, &|_| ());
        rework.reseals = self.work.reseals;
        rework.map_space()?;
        let reserve = match self.work.frees_reserve {
            true => reserve::top(&rework.redo, rework.old)?,
            false => None,
        };
        if reserve.is_some() {
            // Until the change is made the reserve is what it was.
            rework.keep_old();
        }
        let room = rework.space.take_room(log_blocks).ok_or(Error::NoRoom)?;
        rework.redo.set_room(room)?;
        match self.work.journal {
            Some(true) => journal::add(&mut rework, self.changes.journal_mib)?,
            Some(false) => journal::drop_it(&mut rework)?,
            None => {}
        }
        hidden::change(&mut rework, self.work.hidden)?;
        match self.work.guard {
            Some(true) => guard::add(&mut rework)?,
            Some(false) => guard::drop_it(&mut rework)?,
            None => {}
        }
        if self.work.reseals || self.work.lists {
            rework.inodes()?;
        }
        if let Some(top) = reserve {
            reserve::renew(&mut rework.redo, &rework.to_be, top, rework.now)?;
            rework.space.release(top.0..top.0 + 1);
            rework.renew_own();
            let less = rework.old.super_.overhead().saturating_sub(self.new.overhead());
            count_overhead(&mut rework.to_be.raw, less, false);
        }
        if self.work.reseals {
            reseal_bitmaps(&mut rework)?;
        }
        rework.groups()?;
        let raw = rework.superblock()?;
        Ok((rework.redo, raw))
    }
}

/// The sums of bitmaps that stay what they are.
fn reseal_bitmaps(rework: &mut Rework<'_>) -> Result<()> {
    for number in 0..rework.to_be.super_.groups {
        let bitmap = rework.old.inode_bitmap(&rework.redo, number)?;
        let super_ = rework.to_be.super_.clone();
        if let Some(group) = rework.to_be.groups.get_mut(index(number.into()))
            && group.flags & flags::INODE_UNINIT == 0
        {
            group.sum_inodes(&bitmap, &super_);
        }
    }
    Ok(())
}

/// The seed of checksums that an identity stands for.
fn seed_of(uuid: &[u8; 16]) -> u32 {
    Checksum::new().of(uuid).get()
}

/// Counts clusters that no file can have, more or fewer.
fn count_overhead(raw: &mut RawSuperblock, clusters: u64, more: bool) {
    let had = raw.s_overhead_blocks.get();
    if had != 0 {
        let clusters = narrow(clusters);
        let has = if more { had.saturating_add(clusters) } else { had.saturating_sub(clusters) };
        raw.s_overhead_blocks = has.into();
    }
}
