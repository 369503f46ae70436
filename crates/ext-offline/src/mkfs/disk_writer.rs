//! Writing blocks of the new volume.

use draconis_device::{Disk, Group, Ticket, Write};
use draconis_types::Block;

use super::{FormatError, Result};
use crate::format::inode::POINTERS;
use crate::units::saturating_usize;

/// Bytes wiped at the start and end of a disk that may hold old data.
const WIPE_BYTES: u64 = 128 << 10;
/// Bytes of one request for contents.
pub(super) const REQUEST_BYTES: u64 = 1 << 20;
/// Limit of submitted bytes that are still in memory.
pub(super) const MAX_UNWRITTEN_BYTES: u64 = 8 << 20;

/// Writer of blocks of the volume.
pub(super) struct DiskWriter<'a> {
    pub(super) target: &'a FormatTarget<'a>,
    pub(super) block_bytes: u32,
}

impl DiskWriter<'_> {
    pub(super) fn submit(&self, at_bytes: u64, block: Block) -> Result<Ticket> {
        let group = Group { writes: vec![Write { at_bytes, block }] };
        self.target.disk.submit(group, &[]).map_err(|refused| FormatError::Io(refused.error))
    }

    pub(super) fn write_bytes(&self, at_bytes: u64, bytes: &[u8]) -> Result<Ticket> {
        let mut block = Block::private(bytes.len());
        block.copy_in(0, bytes);
        self.submit(at_bytes, block)
    }

    pub(super) fn write_blocks(&self, at: u64, bytes: &[u8]) -> Result<Ticket> {
        self.write_bytes(at.saturating_mul(self.block_bytes.into()), bytes)
    }

    /// Writes zeros in blocks `from..end`, unless the disk is zeroed.
    pub(super) fn zero_blocks(&self, from: u64, end: u64) -> Result<()> {
        if self.target.zeroed {
            return Ok(());
        }
        self.zero_bytes(
            from.saturating_mul(self.block_bytes.into()),
            end.saturating_mul(self.block_bytes.into()),
        )
    }

    pub(super) fn zero_bytes(&self, from: u64, end: u64) -> Result<()> {
        let mut at = from;
        while at < end {
            let len = end.saturating_sub(at).min(REQUEST_BYTES);
            self.submit(at, Block::private(saturating_usize(len)))?;
            at = at.saturating_add(len);
        }
        Ok(())
    }

    /// Writes a batch in disk order, and waits until the previous one is visible.
    pub(super) fn write_batch(
        &self,
        mut batch: Vec<Write>,
        before: &mut Option<Ticket>,
    ) -> Result<()> {
        batch.sort_unstable_by_key(|write| write.at_bytes);
        let bytes = batch.iter().map(|write| write.block.len() as u64).sum();
        let ticket = self.target.disk.submit(Group { writes: batch }, &[]);
        let ticket = ticket.map_err(|refused| FormatError::Io(refused.error))?;
        if let Some(before) = before.replace(ticket) {
            self.target.disk.wait_visible(before)?;
        }
        (self.target.progress)(bytes);
        Ok(())
    }

    /// Waits until everything submitted up to `ticket` is durable.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        Ok(self.target.disk.wait_durable(ticket)?)
    }

    /// Waits until everything submitted so far is durable.
    pub(super) fn sync(&self) -> Result<()> {
        let empty = self.target.disk.submit(Group::default(), &[]);
        let ticket = empty.map_err(|refused| FormatError::Io(refused.error))?;
        Ok(self.target.disk.wait_durable(ticket)?)
    }

    /// Wipes old signatures from the disk.
    pub(super) fn wipe(&self, len_bytes: u64) -> Result<()> {
        if !self.target.zeroed {
            let end = len_bytes.max(4096);
            self.zero_bytes(0, WIPE_BYTES.min(end))?;
            self.zero_bytes(end.saturating_sub(WIPE_BYTES), end)?;
            self.sync()?;
        }
        Ok(())
    }
}

/// Map of an inode's contents.
#[derive(Clone, Default)]
pub(super) struct MappedInode {
    pub(super) pointers: [u32; POINTERS],
    pub(super) size_bytes: u64,
    /// The flags of the map.
    pub(super) flags: u32,
    /// Value of `system.data`; `None` if the contents are not inline.
    pub(super) value: Option<Vec<u8>>,
}

/// Target of a new volume.
pub struct FormatTarget<'a> {
    /// The disk, at least as long as the volume.
    pub disk: &'a dyn Disk,
    /// True if the disk reads as zeros, so that zeros need not be written.
    pub zeroed: bool,
    /// Called with the bytes of contents submitted to the disk.
    pub progress: &'a (dyn Fn(u64) + Sync),
}
