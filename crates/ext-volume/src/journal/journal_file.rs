//! Journal file of a volume, block by block.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::{Disk, Extent};

use super::recovery::{JournalDamage, LogSource, LoggedBlock, ScannedLog, scan_log};
use crate::blocks::data::SharedBytes;
use crate::blocks::uncached::read_bytes;
use crate::format::jbd2::JournalSuperblock;
use crate::format::jbd2::blocks::unescape;
use crate::format::superblock::Superblock;
use crate::map::BlockLocation;
use crate::{Error, FileBlock, FsBlock, Result, Run};

pub(super) const MISSING_BLOCK: &str = "journal: a block of its file is missing";

/// An internal journal.
pub struct JournalFile {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) volume: Superblock,
    /// Superblock of the journal.
    pub super_: JournalSuperblock,
    /// Block with the journal superblock.
    pub(crate) first: SharedBytes,
    /// Block runs, in logical order.
    pub(super) runs: Vec<Run>,
    /// Volume blocks of the journal itself, sorted.
    pub(super) journal_blocks: Vec<Range<u64>>,
}

impl JournalFile {
    /// Returns the volume block of a log block.
    pub(crate) fn volume_block(&self, at: u32) -> Option<FsBlock> {
        let at = FileBlock(at);
        let nth = self.runs.partition_point(|run| run.end() <= at);
        let run = self.runs.get(nth)?.clip(at, at.offset(1))?;
        match run.location {
            BlockLocation::Mapped(block) => Some(block),
            _ => None,
        }
    }

    /// Returns the size of the disk's atomic writes, in bytes.
    pub(crate) fn sector_bytes(&self) -> u32 {
        self.disk.properties().sector_bytes
    }

    /// Reads a logged copy and undoes its escaping.
    pub fn read_copy(&self, copy: LoggedBlock) -> Result<SharedBytes> {
        let mut bytes = self.read(copy.at)?;
        if copy.escaped {
            unescape(bytes.make_mut());
        }
        Ok(bytes)
    }

    /// Scans the log. Damage of committed transactions is part of the result.
    ///
    /// # Errors
    /// An error of the device.
    pub fn scan(&self) -> Result<ScannedLog> {
        scan_log(&self.super_, self)
    }

    /// Returns the error for damage of the log.
    pub(crate) fn damage_error(&self, damage: JournalDamage) -> Error {
        let error = Error::corrupt(damage.what);
        match self.volume_block(damage.at) {
            Some(block) => error.with_block(block),
            None => error,
        }
    }
}

impl LogSource for JournalFile {
    fn read(&self, at: u32) -> Result<SharedBytes> {
        read_block(
            &*self.disk,
            &self.volume,
            self.volume_block(at).ok_or(Error::corrupt(MISSING_BLOCK))?,
        )
    }

    fn invalid_target_reason(&self, block: u64) -> Option<&'static str> {
        if block >= self.volume.blocks {
            return Some("journal: a copy of a block that the volume does not have");
        }
        let nth = self.journal_blocks.partition_point(|own| own.start <= block);
        let own = nth.checked_sub(1).and_then(|nth| self.journal_blocks.get(nth));
        let is_own = own.is_some_and(|own| own.contains(&block));
        is_own.then_some("journal: a copy of a block of its own")
    }

    fn mount_time(&self) -> Duration {
        Duration::from_secs(self.volume.dates.mounted.into())
    }
}

impl std::fmt::Debug for JournalFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("super_", &self.super_).finish_non_exhaustive()
    }
}

/// Reads a volume block without caches.
pub(super) fn read_block(
    disk: &dyn Disk,
    volume: &Superblock,
    block: FsBlock,
) -> Result<SharedBytes> {
    let len_bytes = u64::from(volume.block_bytes);
    let bytes = read_bytes(disk, Extent::new(block.0.saturating_mul(len_bytes), len_bytes))?;
    Ok(SharedBytes::from_owned_bytes(bytes.into_boxed_slice()))
}
