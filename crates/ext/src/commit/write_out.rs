//! What follows a change, without the gate: what was sealed is sent, and settles.
//!
//! ```text
//!   sealed ── send ──▶ disk ── settled: readers of it see it ──▶ the overlay lets go
//!                        └──── durable ──▶ what was freed is given out again
//! ```
//! Law: what the overlay has is let go only once the disk says that it is seen there.

use draconis_device::Ticket;

use super::queue::{FreedSpace, InFlightChain};
use crate::transaction::WriteContext;
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{Error, FsBlock, Result};

/// Blocks of metadata that stay in the overlay after they were written, in bytes.
const MAX_CLEAN_METADATA_BYTES: usize = 32 << 20;

impl Volume {
    /// What a change leaves to be done without the gate: sends what it sealed, with `and_wait`
    /// so that it is durable, and keeps what is on its way and what is kept in memory below
    /// their bounds.
    pub(crate) fn write_out_after_change(&self, and_wait: bool) -> Result<()> {
        let Some(writing) = &self.writing else { return Ok(()) };
        let sends = writing.on_contents.get().filter(|_| !and_wait);
        match sends
            .filter(|_| writing.commit_queue.has_only_early_contents(writing.dirty_limit / 4))
        {
            Some(tell) => tell(),
            None => self.send(writing, and_wait)?,
        }
        while writing.commit_queue.in_flight_bytes() > writing.dirty_limit / 2 {
            self.wait_visible(false)?;
            // What other threads sealed meanwhile, and are about to send.
            self.send(writing, false)?;
        }
        let most = MAX_CLEAN_METADATA_BYTES / saturating_usize(self.super_.block_bytes.into());
        if self.store.write_back.metadata_exceeds(most) {
            self.wait_visible(true)?;
            self.evict_clean_metadata();
        }
        Ok(())
    }

    /// Has `tell` called when contents were sealed that need not be sent by the thread that wrote
    /// them: another calls [`Volume::send_queued`] soon.
    pub fn on_queued_contents(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            // The first stays.
            let _ = writing.on_contents.set(Box::new(tell));
        }
    }

    /// Hands what is sealed to the disk.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn send_queued(&self) -> Result<()> {
        self.writing.as_ref().map_or(Ok(()), |writing| self.send(writing, false))
    }

    /// Hands what is sealed to the disk, and may wait in the same message.
    pub(super) fn send(&self, writing: &WriteContext, and_wait: bool) -> Result<()> {
        let taken = self.stop_on_error(writing.commit_queue.send(and_wait))?;
        if let Some(witness) = writing.change_recorder.get().filter(|_| taken > 0) {
            witness.accepted_through(taken);
        }
        if and_wait {
            let (landed, freed) = writing.commit_queue.take_durable();
            self.discard(&freed);
            self.release_visible(landed, &freed);
        }
        Ok(())
    }

    /// Waits, with no lock held.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        let waited = self.outbox()?.wait(ticket, |landed, freed| {
            self.discard(&freed);
            self.release_visible(landed, &freed);
        });
        self.stop_on_error(waited)
    }

    /// Tells the disk what is free for good. It is not given out yet, so that no write to it was
    /// sent.
    pub(super) fn discard(&self, freed: &[FreedSpace]) {
        let Some(writing) = self.writing.as_ref().filter(|writing| writing.discard) else { return };
        if let Err(error) = writing.commit_queue.discard(freed) {
            // A hint that was not taken.
            log::debug!("what is free stays where it is: {error}");
        }
    }

    /// Waits until readers of the disk see the oldest of what was handed over, and lets go of the
    /// memory that it had; whether there was any.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn wait_oldest_visible(&self) -> Result<bool> {
        let flies = self.outbox()?.in_flight_bytes() > 0;
        if flies {
            self.wait_visible(false)?;
        }
        Ok(flies)
    }

    /// Waits until readers of the disk see the oldest chain that was sent, or all of them.
    pub(super) fn wait_visible(&self, all: bool) -> Result<()> {
        let landed = self.stop_on_error(self.outbox()?.wait_visible(all))?;
        self.release_visible(landed, &[]);
        Ok(())
    }

    /// Ends all writing if the disk failed. One that is away has what it was sent, and writes it
    /// later.
    pub(super) fn stop_on_error<T>(&self, done: Result<T>) -> Result<T> {
        if let Err(Error::Io(draconis_device::Error::Away(_))) = &done {
            return done;
        }
        if let (Err(error), Some(writing)) = (&done, &self.writing) {
            writing.state.write().stop(error);
        }
        done
    }

    /// Lets the overlay forget contents that readers of the disk see.
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
            let mut blocks = self.store.write_back.write();
            for block in &flight.contents {
                let gone = blocks.contents.get(block);
                if gone
                    .is_some_and(|content| !content.dirty && content.chain_number <= flight.sealed)
                    && let Some(content) = blocks.contents.remove(block)
                {
                    self.store.update_cached_block(FsBlock(*block), &content.current);
                }
            }
            for block in &flight.placed {
                let gone = blocks.awaiting_checkpoint.get(block);
                if gone.is_some_and(|it| it.checkpoint_chain.is_some_and(|at| at <= flight.sealed))
                {
                    blocks.awaiting_checkpoint.remove(block);
                    self.store.invalidate_block(FsBlock(*block));
                }
            }
            drop(blocks);
            writer.visible_chain = writer.visible_chain.max(flight.sealed);
        }
    }

    /// Forgets metadata that was written.
    pub(super) fn evict_clean_metadata(&self) {
        let Some(writing) = &self.writing else { return };
        let writer = writing.state.write();
        let landed = writer.visible_chain;
        let mut blocks = self.store.write_back.write();
        blocks.metadata.retain(|block, buffer| {
            let keep = buffer.is_dirty() || buffer.chain_number > landed;
            if !keep {
                self.store.invalidate_block(FsBlock(*block));
            }
            keep
        });
    }
}
