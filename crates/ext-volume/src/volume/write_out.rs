//! Work after a change, without the write lock: queued chains are sent and become visible.
//!
//! ```text
//!   queued ── send ──▶ disk ── visible to its readers ──▶ the write-back cache drops it
//!                        └──── durable ──▶ freed blocks are allocatable again
//! ```
//! Law: the write-back cache drops a block only once readers of the disk see it there.

use draconis_device::Ticket;

use super::Volume;
use crate::commit::chain::FreedSpace;
use crate::commit::queue::InFlightChain;
use crate::units::saturating_usize;
use crate::write_context::WriteContext;
use crate::{Error, FsBlock, Result};

/// Limit of clean metadata in the write-back cache, in bytes.
const MAX_CLEAN_METADATA_BYTES: usize = 32 << 20;

impl Volume {
    /// Sends queued chains after a change, without the write lock, and enforces the limits of
    /// in-flight and cached bytes. With `and_wait`, waits until the chain is durable.
    pub(crate) fn write_out_after_change(&self, and_wait: bool) -> Result<()> {
        let Some(writing) = &self.writing else { return Ok(()) };
        let sends = writing.on_queued_contents.get().filter(|_| !and_wait);
        match sends
            .filter(|_| writing.commit_queue.has_only_written_ahead_data(writing.dirty_limit / 4))
        {
            Some(tell) => tell(),
            None => self.send(writing, and_wait)?,
        }
        while writing.commit_queue.in_flight_bytes() > writing.dirty_limit / 2 {
            self.wait_visible(false)?;
            // Chains that other threads queued meanwhile and have not sent yet.
            self.send(writing, false)?;
        }
        let most = MAX_CLEAN_METADATA_BYTES
            .checked_div(saturating_usize(self.reader.super_.block_bytes.into()))
            .unwrap_or(0);
        if self.reader.store.write_back.metadata_exceeds(most) {
            self.wait_visible(true)?;
            self.evict_clean_metadata();
        }
        Ok(())
    }

    /// Installs `tell`, called when a writer queued data and leaves sending to another thread,
    /// which must call [`Volume::send_queued`] soon.
    pub fn on_queued_contents(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            // Only the first call has an effect.
            let _ = writing.on_queued_contents.set(Box::new(tell));
        }
    }

    /// Sends the queued chains to the disk.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn send_queued(&self) -> Result<()> {
        self.writing.as_ref().map_or(Ok(()), |writing| self.send(writing, false))
    }

    /// Sends the queued chains, and can wait in the same message.
    pub(super) fn send(&self, writing: &WriteContext, and_wait: bool) -> Result<()> {
        let taken = self.stop_on_error(writing.commit_queue.send(and_wait))?;
        if let Some(witness) = writing.change_recorder.get().filter(|_| taken > 0) {
            witness.record_accepted_through(taken);
        }
        if and_wait {
            let (landed, freed) = writing.commit_queue.take_durable();
            self.discard(&freed);
            self.release_visible(landed, &freed);
        }
        Ok(())
    }

    /// Waits until `ticket` is durable; the caller holds no lock.
    pub(super) fn wait_for_ticket(&self, ticket: Ticket) -> Result<()> {
        let waited = self.commit_queue()?.wait_for_ticket(ticket, |landed, freed| {
            self.discard(&freed);
            self.release_visible(landed, &freed);
        });
        self.stop_on_error(waited)
    }

    /// Discards freed blocks on the disk before the allocator reuses them, so that no write to them
    /// is in flight.
    pub(super) fn discard(&self, freed: &[FreedSpace]) {
        let Some(writing) = self.writing.as_ref().filter(|writing| writing.discard) else { return };
        if let Err(error) = writing.commit_queue.discard(freed) {
            // A discard is only a hint.
            log::debug!("what is free stays where it is: {error}");
        }
    }

    /// Waits until readers of the disk see the oldest in-flight chain, and frees its memory.
    /// Returns false if there was none.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn wait_oldest_visible(&self) -> Result<bool> {
        let flies = self.commit_queue()?.in_flight_bytes() > 0;
        if flies {
            self.wait_visible(false)?;
        }
        Ok(flies)
    }

    /// Waits until readers of the disk see the oldest in-flight chain, or all of them.
    pub(super) fn wait_visible(&self, all: bool) -> Result<()> {
        let landed = self.stop_on_error(self.commit_queue()?.wait_visible(all))?;
        self.release_visible(landed, &[]);
        Ok(())
    }

    /// Stops all writing if the disk failed. An unreachable disk keeps the chains sent to it and
    /// writes them later.
    pub(super) fn stop_on_error<T>(&self, done: Result<T>) -> Result<T> {
        if let Err(Error::Io(draconis_device::Error::Unreachable(_))) = &done {
            return done;
        }
        if let (Err(error), Some(writing)) = (&done, &self.writing) {
            writing.state.write().stop(error);
        }
        done
    }

    /// Drops the blocks of visible chains from the write-back cache, and releases pending frees.
    pub(super) fn release_visible(&self, flights: Vec<InFlightChain>, freed: &[FreedSpace]) {
        let Some(writing) = &self.writing else { return };
        if flights.is_empty() && freed.is_empty() {
            return;
        }
        let mut writer = writing.state.write();
        freed
            .iter()
            .for_each(|freed| writer.groups.release_pending_free(&freed.blocks, &freed.inodes));
        for flight in flights {
            let mut blocks = self.reader.store.write_back.write();
            for block in &flight.contents {
                let gone = blocks.contents.get(block);
                if gone.is_some_and(|content| {
                    !content.dirty && content.chain_number <= flight.chain_number
                }) && let Some(content) = blocks.contents.remove(block)
                {
                    self.reader.store.update_cached_block(FsBlock(*block), &content.current);
                }
            }
            for block in &flight.checkpointed {
                let gone = blocks.awaiting_checkpoint.get(block);
                if gone.is_some_and(|it| {
                    it.checkpoint_chain.is_some_and(|at| at <= flight.chain_number)
                }) {
                    blocks.awaiting_checkpoint.remove(block);
                    self.reader.store.invalidate_block(FsBlock(*block));
                }
            }
            drop(blocks);
            writer.visible_chain = writer.visible_chain.max(flight.chain_number);
        }
    }

    /// Evicts clean metadata from the write-back cache.
    pub(super) fn evict_clean_metadata(&self) {
        let Some(writing) = &self.writing else { return };
        let writer = writing.state.write();
        let landed = writer.visible_chain;
        let mut blocks = self.reader.store.write_back.write();
        blocks.metadata.retain(|block, buffer| {
            let keep = buffer.is_dirty() || buffer.chain_number > landed;
            if !keep {
                self.reader.store.invalidate_block(FsBlock(*block));
            }
            keep
        });
    }
}
