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

mod log;
pub(crate) mod recovery;
mod replayed;

use std::sync::Arc;

use draconis_device::Disk;

use crate::format::superblock::Superblock;
use crate::volume::read_superblock;
use crate::{Error, Result};
pub(crate) use log::Log;
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
    let disk = Arc::new(Replayed::new(disk, &log, found));
    let super_ = read_superblock(&*disk)?;
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
    log.put_in_place(&found)
}

/// Why the journal of a volume that needs it cannot be used.
pub(crate) fn missing(super_: &Superblock) -> Error {
    let feature = match super_.journal_device {
        0 => "needs_recovery: the volume has no journal; run e2fsck on it",
        _ => "needs_recovery: the journal is on another device; run e2fsck on both",
    };
    Error::Unsupported { feature: feature.to_owned() }
}
