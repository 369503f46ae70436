//! The journal of a volume: where it is, and what it holds that is not in place yet.
//!
//! ```text
//!   superblock ──▶ inode of the journal ──▶ its map: block of the log ──▶ block of the volume
//!                          │
//!        needs recovery?   ├─ read only:  replayed in memory, no byte of the disk changes
//!                          └─ to write:   blocks in place ▶ the log is empty ▶ the volume is whole
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

/// The disk as it will be once its journal was replayed: every read of a block that the log
/// holds answers that. It cannot be written. And the superblock as it is there.
///
/// # Errors
/// [`Error::Unsupported`] for a journal that is elsewhere or of an unknown kind;
/// [`Error::Corrupt`] for one that is damaged; [`Error::Io`].
pub(crate) fn replayed(
    disk: Arc<dyn Disk>,
    super_: &Superblock,
) -> Result<(Arc<dyn Disk>, Superblock)> {
    let log = Log::find(disk.clone(), super_)?;
    let found = log.recover()?;
    let (len, transactions) = (found.copies.len(), found.transactions);
    ::log::info!("{transactions} transactions of the journal are read from it: {len} blocks");
    let (has_fast_commits, next) = (found.has_fast_commits, found.next);
    let mut disk: Arc<dyn Disk> = Arc::new(Replayed::new(disk, &log, Arc::new(found)));
    let mut super_ = read_superblock(&*disk)?;
    if has_fast_commits {
        disk = fast::carry_out(disk, &log, &super_, next)?;
        super_ = read_superblock(&*disk)?;
    }
    if let Some((blocks, inodes)) = free(&*disk, &super_) {
        (super_.free_blocks, super_.free_inodes) = (blocks, narrow(inodes));
    }
    Ok((disk, super_))
}

/// Puts in place on disk what the journal holds, and waits until that is durable.
///
/// # Errors
/// As [`replayed`].
pub(crate) fn replay(disk: &Arc<dyn Disk>, super_: &Superblock) -> Result<()> {
    let log = Log::find(disk.clone(), super_)?;
    let found = log.recover()?;
    let (len, transactions) = (found.copies.len(), found.transactions);
    ::log::info!("{transactions} transactions of the journal are put in place: {len} blocks");
    let found = Arc::new(found);
    let mut replayed: Arc<dyn Disk> = Arc::new(Replayed::new(disk.clone(), &log, found.clone()));
    let mut super_ = read_superblock(&*replayed)?;
    let mut more = BTreeMap::new();
    if found.has_fast_commits {
        let scratch = fast::carry_out(replayed, &log, &super_, found.next)?;
        more = scratch.blocks();
        replayed = scratch;
        super_ = read_superblock(&*replayed)?;
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

/// Why the journal of a volume that needs it cannot be used.
pub(crate) fn missing(super_: &Superblock) -> Error {
    let feature = match super_.journal_device {
        0 => "needs_recovery: the volume has no journal; run e2fsck on it",
        _ => "needs_recovery: the journal is on another device; run e2fsck on both",
    };
    Error::Unsupported { feature: feature.to_owned() }
}
