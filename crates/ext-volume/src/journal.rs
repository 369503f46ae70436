//! Journal of a volume: its location, and the blocks that are not checkpointed yet.
//!
//! ```text
//!   superblock ──▶ inode of the journal ──▶ its map: block of the log ──▶ block of the volume
//!                          │
//!        needs recovery?   ├─ read only:  replayed in memory, no byte of the disk changes
//!                          └─ to write:   home blocks ▶ the log is empty ▶ needs_recovery is clear
//!              damaged?    ├─ read only:  transactions before the damage are replayed
//!                          └─ to write:   refused; the disk does not change
//! ```
//! Law 1: whatever a log contains, recovery visits each of its blocks at most twice and keeps a few
//! words of memory for each.
//! Law 2: each step of a recovery on disk is durable before the next. A recovery that is cut off is
//! repeated, with the same result.

mod fast_commit;
mod journal_file;
mod open;
pub(crate) mod recovery;
mod replay;
mod replayed_disk;
pub(crate) mod transaction_layout;

use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::{Disk, Extent};

use crate::blocks::uncached::{read_bytes, read_superblock};
use crate::format::group::GroupDescriptor;
use crate::format::superblock::Superblock;
use crate::units::saturating_u32;
use crate::{Error, FsBlock, GroupNumber, Result};
pub use journal_file::JournalFile;
use open::open_damaged_journal;
pub use open::{journal_inode_copy, open_journal};
pub use recovery::COPY_CHECKSUM;
use replayed_disk::ReplayedDisk;

/// Read-only view of a volume after replay.
pub struct ReplayedVolume {
    /// Disk whose reads return the journal's copy of logged blocks. It is read-only.
    pub disk: Arc<dyn Disk>,
    /// Superblock after replay.
    pub super_: Superblock,
    /// Blocks that differ from those on the disk.
    pub changed: Vec<FsBlock>,
    /// Reason why some committed changes are missing.
    pub damage: Option<Error>,
}

/// Opens the disk as it will be after replay, up to the first damage of the journal.
///
/// # Errors
/// [`Error::Unsupported`] for an external journal or one of an unknown format; [`Error::Io`];
/// [`Error::Corrupt`] for a damaged superblock in the log.
pub fn open_replayed(disk: Arc<dyn Disk>, super_: &Superblock) -> Result<ReplayedVolume> {
    match open_damaged_journal(disk.clone(), super_) {
        Ok(log) => open_with_replayed_log(disk, &log),
        Err(damage @ Error::Corrupt { .. }) => Ok(ReplayedVolume {
            disk,
            super_: super_.clone(),
            changed: vec![],
            damage: Some(damage),
        }),
        Err(other) => Err(other),
    }
}

fn open_with_replayed_log(disk: Arc<dyn Disk>, log: &JournalFile) -> Result<ReplayedVolume> {
    let found = log.scan()?;
    let (len, transactions, next) = (found.copies.len(), found.transactions, found.next);
    ::log::info!("{transactions} transactions of the journal are read from it: {len} blocks");
    let skipped = found.skipped.map(|damage| log.damage_error(damage));
    let mut damage = found.damage.map(|damage| log.damage_error(damage));
    let mut changed: Vec<FsBlock> = found.copies.keys().copied().map(FsBlock).collect();
    let mut disk: Arc<dyn Disk> = Arc::new(ReplayedDisk::new(disk, log, Arc::new(found)));
    let mut super_ = read_superblock(&*disk)?;
    if damage.is_none() {
        let fast = fast_commit::summarize_fast_commits(log, next)?;
        damage = fast.damage.map(|damage| log.damage_error(damage));
        match fast_commit::replay_fast_commits(disk.clone(), log, &super_, fast.records) {
            Ok(Some(scratch)) => {
                super_ = read_superblock(&*scratch)?;
                changed.extend(scratch.blocks().into_keys().map(FsBlock));
                disk = scratch;
            }
            Ok(None) => {}
            Err(error @ Error::Corrupt { .. }) => damage = Some(error),
            Err(other) => return Err(other),
        }
    }
    if let Some((blocks, inodes)) = count_free(&*disk, &super_) {
        (super_.free_blocks, super_.free_inodes) = (blocks, saturating_u32(inodes));
    }
    Ok(ReplayedVolume { disk, super_, changed, damage: damage.or(skipped) })
}

/// Replays the journal on disk and waits until that is durable.
///
/// # Errors
/// As [`open_replayed`]; [`Error::Corrupt`] if the journal is damaged: nothing is written then.
pub fn replay(disk: &Arc<dyn Disk>, super_: &Superblock) -> Result<()> {
    let log = open_journal(disk.clone(), super_)?;
    let found = log.scan()?;
    let fast = fast_commit::summarize_fast_commits(&log, found.next)?;
    if let Some(damage) = found.damage.or(fast.damage).or(found.skipped) {
        return Err(log.damage_error(damage));
    }
    let (len, transactions) = (found.copies.len(), found.transactions);
    ::log::info!("{transactions} transactions of the journal are put in place: {len} blocks");
    let found = Arc::new(found);
    let mut replayed: Arc<dyn Disk> =
        Arc::new(ReplayedDisk::new(disk.clone(), &log, found.clone()));
    let mut super_ = read_superblock(&*replayed)?;
    let mut more = BTreeMap::new();
    if let Some(scratch) =
        fast_commit::replay_fast_commits(replayed.clone(), &log, &super_, fast.records)?
    {
        more = scratch.blocks();
        super_ = read_superblock(&*scratch)?;
        replayed = scratch;
    }
    log.replay(&found, &more, count_free(&*replayed, &super_))
}

/// Sums the free blocks and inodes of all groups. Linux writes these sums to the superblock at
/// unmount, and never to the log. Returns `None` if descriptors are damaged.
fn count_free(disk: &dyn Disk, super_: &Superblock) -> Option<(u64, u64)> {
    let block_bytes = u64::from(super_.block_bytes);
    let (mut blocks, mut inodes) = (0u64, 0u64);
    let mut at: Option<(FsBlock, Vec<u8>)> = None;
    for number in (0..super_.groups).map(GroupNumber) {
        let (place, slot) = super_.descriptor_location(number);
        let bytes = match at.take().filter(|(read, _)| *read == place) {
            Some((_, bytes)) => bytes,
            None => {
                let start = place.0.saturating_mul(block_bytes);
                read_bytes(disk, Extent::new(start, block_bytes)).ok()?
            }
        };
        let group = GroupDescriptor::read(&bytes, slot, super_).ok()?;
        blocks = blocks.saturating_add(group.free_clusters.into());
        inodes = inodes.saturating_add(group.free_inodes.into());
        at = Some((place, bytes));
    }
    let blocks = blocks.saturating_mul(super_.cluster_blocks.into());
    Some((blocks.min(super_.blocks), inodes.min(super_.inodes.into())))
}

/// Returns the error for a volume whose journal is needed and cannot be used.
pub(crate) fn unusable_journal_error(super_: &Superblock) -> Error {
    let feature = match super_.external_journal() {
        None => "needs_recovery: the volume has no journal; run e2fsck on it".to_owned(),
        Some(journal) => format!(
            "needs_recovery: the journal is on another device ({journal}); e2fsck -p -j JOURNAL \
             replays it"
        ),
    };
    Error::Unsupported { feature }
}
