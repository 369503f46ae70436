//! Execution of changes: under the write lock, repeated until all blocks are in memory.

use std::cell::Cell;

use super::Volume;
use crate::blocks::role::Role;
use crate::transaction::Transaction;
use crate::{Error, FsBlock, Result};

/// Outcome of one try of a change.
enum Attempt<T> {
    /// The result, and true if orphans are to be deleted.
    Done(Result<T>, bool),
    /// The change needs this block from the device.
    NeedsBlock(FsBlock, Role),
}

/// Retries before a change reads under the write lock: a cache smaller than the change's working
/// set would never hold all its blocks.
const MAX_READ_RETRIES: u32 = 64;

impl Volume {
    /// Runs one change exclusively. It uses the blocks in memory; a missing block is read
    /// without the write lock, and the change is retried as long as it modified nothing.
    pub(crate) fn transact<T>(
        &self,
        change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        self.transact_and_write_out(change, false)
    }

    /// [`Volume::transact`] that sends the queued chains, and with `and_wait` waits until they are
    /// durable, in the same message.
    pub(crate) fn transact_and_write_out<T>(
        &self,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
        and_wait: bool,
    ) -> Result<T> {
        let mut missed = 0u32;
        let mut may_wait = false;
        loop {
            match self.try_transact(&mut change, may_wait) {
                // Writing has stopped: nothing to send.
                Attempt::Done(Err(Error::ReadOnly), _) => return Err(Error::ReadOnly),
                Attempt::Done(done, leaves_dying) => {
                    self.write_out_after_change(and_wait)?;
                    if leaves_dying {
                        self.delete_pending()?;
                    }
                    return done;
                }
                Attempt::NeedsBlock(block, role) => {
                    missed = missed.saturating_add(1);
                    let read = self.reader.store.block(block, role);
                    // The retry reports the read error at its place.
                    may_wait = missed >= MAX_READ_RETRIES || read.is_err();
                }
            }
        }
    }

    fn try_transact<T>(
        &self,
        change: &mut impl FnMut(&mut Transaction<'_>) -> Result<T>,
        may_block: bool,
    ) -> Attempt<T> {
        let Some(writing) = &self.writing else {
            return Attempt::Done(Err(Error::ReadOnly), false);
        };
        let mut writer = writing.state.write();
        if writer.stopped().is_some() {
            return Attempt::Done(Err(Error::ReadOnly), false);
        }
        (writer.is_modified, writer.is_change_complete) = (false, false);
        (writer.created_inode, writer.renamed_inode) = (None, None);
        let was_dirty = writer.batch.dirty;
        let now = writer.replaying.map_or_else(|| (writing.clock)(), |it| it.now);
        let missing_block = Cell::new(None);
        let mut tx = Transaction {
            volume: &self.reader,
            context: writing,
            writer: &mut writer,
            now,
            may_block,
            missing_block,
            is_internal: false,
        };
        let mut done = change(&mut tx);
        if let Some((block, role)) = tx.missing_block.get() {
            return Attempt::NeedsBlock(block, role);
        }
        if done.is_ok() {
            // The record comes before any chain with the change, which other threads may send.
            tx.record_change();
            tx.writer.is_change_complete = true;
            if let Err(error) = tx.enforce_batch_limits() {
                done = Err(error);
            }
        }
        if let Err(error) = &done
            && writer.is_modified
        {
            if let Some(witness) = writing.change_recorder.get() {
                witness.record_partial_failure();
            }
            writer.stop(error);
        }
        if let Err(error) = &done
            && writer.failure().is_some()
        {
            self.record_failure(&mut writer, error);
        }
        if writer.is_modified {
            writer.change_count = writer.change_count.wrapping_add(1);
            if !was_dirty {
                writing.notify_first_change();
            }
        }
        Attempt::Done(done, !writer.pending_deletions.is_empty())
    }
}
