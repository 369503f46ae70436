//! Replay of a journal on disk.

use std::collections::BTreeMap;
use std::time::Duration;

use draconis_device::{Disk, Group, Ticket, Write};

use super::journal_file::{JournalFile, MISSING_BLOCK, read_block};
use super::recovery::ScannedLog;
use super::transaction_layout::{TransactionContents, lay_out_transaction};
use crate::blocks::data::SharedBytes;
use crate::blocks::uncached::write_of;
use crate::format::jbd2::RawJournalSuperblock;
use crate::format::superblock::RawSuperblock;
use crate::{Error, FsBlock, Result};

/// Size of one replay write, in bytes.
const REPLAY_WRITE_BYTES: usize = 1 << 20;

impl JournalFile {
    /// Writes the copies to their home blocks, empties the log, then clears `needs_recovery`, each
    /// durable before the next. The blocks of `more` first become a transaction of their own.
    /// `free` holds the free counts, if known.
    pub fn replay(
        &self,
        found: &ScannedLog,
        copies: &BTreeMap<u64, SharedBytes>,
        free: Option<(u64, u64)>,
    ) -> Result<()> {
        let mut sender = OrderedWriter { disk: &*self.disk, last: None };
        let block_bytes = u64::from(self.volume.block_bytes);
        let mut writes = Vec::new();
        let mut held = 0usize;
        for (block, copy) in found.copies_in(FsBlock(0)..FsBlock(u64::MAX)) {
            let bytes = self.read_copy(copy)?;
            held = held.saturating_add(bytes.len());
            writes.push(write_of(block.0.saturating_mul(block_bytes), &bytes));
            if held >= REPLAY_WRITE_BYTES {
                sender.send(std::mem::take(&mut writes), false)?;
                held = 0;
            }
        }
        sender.send(writes, false)?;

        let mut first = self.first.clone();
        let at = self.volume_block(0).ok_or(Error::corrupt(MISSING_BLOCK))?;
        let mut next = found.next;
        if !copies.is_empty() {
            // The fast commits stay valid until transaction `next` is in the log.
            let raw = RawJournalSuperblock::view_mut(first.make_mut())?;
            raw.set_tail(Some(self.super_.first), next);
            sender.send(vec![write_of(at.0.saturating_mul(block_bytes), &first)], true)?;
            let time = Duration::from_secs(self.volume.dates.written.into());
            let contents = TransactionContents { sequence: next, time, copies, revoked: &[] };
            let laid = lay_out_transaction(self, self.super_.first, &contents)?;
            for stage in [&laid.first, &laid.commit, copies] {
                let write = |(block, bytes): (&u64, &SharedBytes)| {
                    write_of(block.saturating_mul(block_bytes), bytes)
                };
                sender.send(stage.iter().map(write).collect(), true)?;
            }
            next = next.wrapping_add(1);
        }

        // Sequence numbers in the log are not reused, so old blocks stay older.
        let next = next.wrapping_add(1);
        let raw = RawJournalSuperblock::view_mut(first.make_mut())?;
        raw.set_tail(None, next);
        raw.set_errno(0);
        sender.send(vec![write_of(at.0.saturating_mul(block_bytes), &first)], true)?;

        let (block, at) = self.volume.location();
        let mut bytes = match (copies.get(&block.0), found.copies.get(&block.0)) {
            (Some(bytes), _) => bytes.clone(),
            (None, Some(copy)) => self.read_copy(*copy)?,
            (None, None) => read_block(&*self.disk, &self.volume, block)?,
        };
        let raw = RawSuperblock::view_mut(bytes.make_mut().get_mut(at..).unwrap_or_default())?;
        raw.set_recovered();
        if let Some((blocks, inodes)) = free {
            raw.set_free(blocks, inodes)?;
        }
        if self.super_.errno != 0 {
            raw.mark_errors();
        }
        raw.preserve_checksum();
        sender.send(vec![write_of(block.0.saturating_mul(block_bytes), &bytes)], true)?;
        sender.wait()
    }
}

/// Sender of groups in order.
struct OrderedWriter<'a> {
    disk: &'a dyn Disk,
    last: Option<Ticket>,
}

impl OrderedWriter<'_> {
    /// Sends writes as one group; with `ordered`, after everything before it is durable.
    fn send(&mut self, writes: Vec<Write>, ordered: bool) -> Result<()> {
        if writes.is_empty() {
            return Ok(());
        }
        let after = self.last.filter(|_| ordered);
        let sent = self.disk.submit(Group { writes }, after.as_slice());
        self.last = Some(sent.map_err(|refused| Error::Io(refused.error))?);
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        match self.last {
            Some(last) => Ok(self.disk.wait_durable(last)?),
            None => Ok(()),
        }
    }
}
