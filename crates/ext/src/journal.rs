//! The journal of a volume: where it is, and what it holds that is not in place yet.
//!
//! ```text
//!   superblock ──▶ inode of the journal ──▶ its map: block of the log ──▶ block of the volume
//!                          │
//!        needs recovery?   ├─ read only:  replayed in memory, no byte of the disk changes
//!                          └─ to write:   blocks in place ▶ the log is empty ▶ the volume is whole
//!              damaged?    ├─ read only:  what was committed before the damage is replayed
//!                          └─ to write:   refused, and the disk stays as it is
//! ```
//! Law 1: whatever a log says, recovery visits each of its blocks once or twice, and remembers a
//! few words for each.
//! Law 2: each step of a recovery on disk is durable before the next: cut off anywhere, it is
//! made again and comes to the same.

mod fast;
pub(crate) mod lay;
mod log;
pub(crate) mod recovery;
mod replayed;
mod scratch;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use draconis_device::{Disk, Extent};

use crate::format::group::Group;
use crate::format::superblock::Superblock;
use crate::units::narrow;
use crate::volume::read_superblock;
use crate::{Error, FsBlock, GroupNumber, Result};
pub(crate) use log::Log;
use log::read_bytes;
use replayed::Replayed;

/// A volume as its journal makes it, to be read.
pub(crate) struct Recovered {
    /// Every read of a block that the log holds answers that. It cannot be written.
    pub(crate) disk: Arc<dyn Disk>,
    /// The superblock as it is there.
    pub(crate) super_: Superblock,
    /// Why some of what was committed is missing.
    pub(crate) damage: Option<Error>,
}

/// The disk as it will be once its journal was replayed, as far as that is whole.
///
/// # Errors
/// [`Error::Unsupported`] for a journal that is elsewhere or of an unknown kind; [`Error::Io`];
/// [`Error::Corrupt`] for what the log holds of the superblock.
pub(crate) fn replayed(disk: Arc<dyn Disk>, super_: &Superblock) -> Result<Recovered> {
    match Log::find(disk.clone(), super_) {
        Ok(log) => replayed_from(disk, &log),
        Err(damage @ Error::Corrupt { .. }) => {
            Ok(Recovered { disk, super_: super_.clone(), damage: Some(damage) })
        }
        Err(other) => Err(other),
    }
}

fn replayed_from(disk: Arc<dyn Disk>, log: &Log) -> Result<Recovered> {
    let found = log.recover()?;
    let (len, transactions, next) = (found.copies.len(), found.transactions, found.next);
    ::log::info!("{transactions} transactions of the journal are read from it: {len} blocks");
    let mut damage = found.damage.map(|damage| log.error(damage));
    let mut disk: Arc<dyn Disk> = Arc::new(Replayed::new(disk, log, Arc::new(found)));
    let mut super_ = read_superblock(&*disk)?;
    if damage.is_none() {
        let fast = fast::survey(log, next)?;
        damage = fast.damage.map(|damage| log.error(damage));
        match fast::carry_out(disk.clone(), log, &super_, fast.records) {
            Ok(Some(scratch)) => {
                super_ = read_superblock(&*scratch)?;
                disk = scratch;
            }
            Ok(None) => {}
            Err(error @ Error::Corrupt { .. }) => damage = Some(error),
            Err(other) => return Err(other),
        }
    }
    if let Some((blocks, inodes)) = free(&*disk, &super_) {
        (super_.free_blocks, super_.free_inodes) = (blocks, narrow(inodes));
    }
    Ok(Recovered { disk, super_, damage })
}

/// Puts in place on disk what the journal holds, and waits until that is durable.
///
/// # Errors
/// As [`replayed`]; [`Error::Corrupt`] where the journal is damaged: nothing is written then.
pub(crate) fn replay(disk: &Arc<dyn Disk>, super_: &Superblock) -> Result<()> {
    let log = Log::find(disk.clone(), super_)?;
    let found = log.recover()?;
    let fast = fast::survey(&log, found.next)?;
    if let Some(damage) = found.damage.or(fast.damage) {
        return Err(log.error(damage));
    }
    let (len, transactions) = (found.copies.len(), found.transactions);
    ::log::info!("{transactions} transactions of the journal are put in place: {len} blocks");
    let found = Arc::new(found);
    let mut replayed: Arc<dyn Disk> = Arc::new(Replayed::new(disk.clone(), &log, found.clone()));
    let mut super_ = read_superblock(&*replayed)?;
    let mut more = BTreeMap::new();
    if let Some(scratch) = fast::carry_out(replayed.clone(), &log, &super_, fast.records)? {
        more = scratch.blocks();
        super_ = read_superblock(&*scratch)?;
        replayed = scratch;
    }
    log.put_in_place(&found, &more, free(&*replayed, &super_))
}

/// The free blocks and inodes of all groups. Linux writes the sums to the superblock when it
/// unmounts, and not to the log. `None` where descriptors are damaged.
fn free(disk: &dyn Disk, super_: &Superblock) -> Option<(u64, u64)> {
    let block_bytes = u64::from(super_.block_bytes);
    let (mut blocks, mut inodes) = (0u64, 0u64);
    let mut at: Option<(FsBlock, Vec<u8>)> = None;
    for number in (0..super_.groups).map(GroupNumber) {
        let (place, slot) = super_.descriptor_place(number);
        let bytes = match at.take().filter(|(read, _)| *read == place) {
            Some((_, bytes)) => bytes,
            None => {
                let start = place.0.saturating_mul(block_bytes);
                read_bytes(disk, Extent::new(start, block_bytes)).ok()?
            }
        };
        let group = Group::read(&bytes, slot, super_).ok()?;
        blocks = blocks.saturating_add(group.free_clusters.into());
        inodes = inodes.saturating_add(group.free_inodes.into());
        at = Some((place, bytes));
    }
    let blocks = blocks.saturating_mul(super_.cluster_blocks.into());
    Some((blocks.min(super_.blocks), inodes.min(super_.inodes.into())))
}

impl Superblock {
    /// The journal on another device by number and UUID, as Linux writes them.
    pub fn external_journal(&self) -> Option<String> {
        let device = Some(self.journal_device).filter(|device| *device != 0)?;
        let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00);
        let mut uuid = String::new();
        for (nth, byte) in self.journal_uuid.iter().enumerate() {
            let hyphen = if matches!(nth, 4 | 6 | 8 | 10) { "-" } else { "" };
            let _ = write!(uuid, "{hyphen}{byte:02x}");
        }
        Some(format!("device {major}:{minor}, UUID {uuid}"))
    }
}

/// Why the journal of a volume that needs it cannot be used.
pub(crate) fn missing(super_: &Superblock) -> Error {
    let feature = match super_.external_journal() {
        None => "needs_recovery: the volume has no journal; run e2fsck on it".to_owned(),
        Some(journal) => format!(
            "needs_recovery: the journal is on another device ({journal}); e2fsck -p -j JOURNAL \
             replays it"
        ),
    };
    Error::Unsupported { feature }
}
