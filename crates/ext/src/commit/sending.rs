//! What follows a change, without the gate: what was sealed is sent, and settles.
//!
//! ```text
//!   sealed ── send ──▶ disk ── settled: readers of it see it ──▶ the overlay lets go
//!                        └──── durable ──▶ what was freed is given out again
//! ```
//! Law: what the overlay has is let go only once the disk says that it is seen there.

use draconis_device::Ticket;

use super::outbox::{Flight, Freed};
use crate::transaction::WriteSide;
use crate::units::index;
use crate::volume::Volume;
use crate::{Error, FsBlock, Result};

/// Blocks of metadata that stay in the overlay after they were written, in bytes.
const KEPT_BYTES: usize = 32 << 20;

impl Volume {
    /// What a change leaves to be done without the gate: sends what it sealed, with `and_wait`
    /// so that it is durable, and keeps what is on its way and what is kept in memory below
    /// their bounds.
    pub(crate) fn after_change(&self, and_wait: bool) -> Result<()> {
        let Some(writing) = &self.writing else { return Ok(()) };
        let sends = writing.on_contents.get().filter(|_| !and_wait);
        match sends.filter(|_| writing.outbox.can_wait(writing.dirty_limit / 4)) {
            Some(tell) => tell(),
            None => self.send(writing, and_wait)?,
        }
        while writing.outbox.flying_bytes() > writing.dirty_limit / 2 {
            self.settle(false)?;
            // What other threads sealed meanwhile, and are about to send.
            self.send(writing, false)?;
        }
        let most = KEPT_BYTES / index(self.super_.block_bytes.into());
        if self.store.overlay.has_more_metadata_than(most) {
            self.settle(true)?;
            self.forget_written();
        }
        Ok(())
    }

    /// Has `tell` called when contents were sealed that need not be sent by the thread that wrote
    /// them: another calls [`Volume::send_sealed`] soon.
    pub fn on_contents(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            // The first stays.
            let _ = writing.on_contents.set(Box::new(tell));
        }
    }

    /// Hands what is sealed to the disk.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn send_sealed(&self) -> Result<()> {
        self.writing.as_ref().map_or(Ok(()), |writing| self.send(writing, false))
    }

    /// Hands what is sealed to the disk, and may wait in the same message.
    pub(super) fn send(&self, writing: &WriteSide, and_wait: bool) -> Result<()> {
        let taken = self.or_stop(writing.outbox.send(and_wait))?;
        if let Some(witness) = writing.witness.get().filter(|_| taken > 0) {
            witness.accepted_through(taken);
        }
        if and_wait {
            let (landed, freed) = writing.outbox.known();
            self.discard(&freed);
            self.landed(landed, &freed);
        }
        Ok(())
    }

    /// Waits, with no lock held.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        let waited = self.outbox()?.wait(ticket, |landed, freed| {
            self.discard(&freed);
            self.landed(landed, &freed);
        });
        self.or_stop(waited)
    }

    /// Tells the disk what is free for good. It is not given out yet, so that no write to it was
    /// sent.
    pub(super) fn discard(&self, freed: &[Freed]) {
        let Some(writing) = self.writing.as_ref().filter(|writing| writing.discard) else { return };
        if let Err(error) = writing.outbox.discard(freed) {
            // A hint that was not taken.
            log::debug!("what is free stays where it is: {error}");
        }
    }

    /// Waits until readers of the disk see the oldest of what was handed over, and lets go of the
    /// memory that it had; whether there was any.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn settle_oldest(&self) -> Result<bool> {
        let flies = self.outbox()?.flying_bytes() > 0;
        if flies {
            self.settle(false)?;
        }
        Ok(flies)
    }

    /// Waits until readers of the disk see the oldest chain that was sent, or all of them.
    pub(super) fn settle(&self, all: bool) -> Result<()> {
        let landed = self.or_stop(self.outbox()?.settle(all))?;
        self.landed(landed, &[]);
        Ok(())
    }

    /// Ends all writing if the disk failed. One that is away has what it was sent, and writes it
    /// later.
    pub(super) fn or_stop<T>(&self, done: Result<T>) -> Result<T> {
        if let Err(Error::Io(draconis_device::Error::Away(_))) = &done {
            return done;
        }
        if let (Err(error), Some(writing)) = (&done, &self.writing) {
            writing.gate.write().stop(error);
        }
        done
    }

    /// Lets the overlay forget contents that readers of the disk see.
    pub(super) fn landed(&self, flights: Vec<Flight>, freed: &[Freed]) {
        let Some(writing) = &self.writing else { return };
        if flights.is_empty() && freed.is_empty() {
            return;
        }
        let mut writer = writing.gate.write();
        freed.iter().for_each(|freed| writer.groups.thaw(&freed.blocks, &freed.inodes));
        for flight in flights {
            let mut blocks = self.store.overlay.change();
            for block in &flight.contents {
                let gone = blocks.contents.get(block);
                if gone.is_some_and(|content| !content.dirty && content.sealed <= flight.sealed)
                    && let Some(content) = blocks.contents.remove(block)
                {
                    self.store.renew_block(FsBlock(*block), &content.now);
                }
            }
            for block in &flight.placed {
                let gone = blocks.logged.get(block);
                if gone.is_some_and(|it| it.checkpoint.is_some_and(|at| at <= flight.sealed)) {
                    blocks.logged.remove(block);
                    self.store.forget_block(FsBlock(*block));
                }
            }
            drop(blocks);
            writer.landed = writer.landed.max(flight.sealed);
        }
    }

    /// Forgets metadata that was written.
    pub(super) fn forget_written(&self) {
        let Some(writing) = &self.writing else { return };
        let writer = writing.gate.write();
        let landed = writer.landed;
        let mut blocks = self.store.overlay.change();
        blocks.metadata.retain(|block, buffer| {
            let keep = buffer.is_dirty() || buffer.sealed > landed;
            if !keep {
                self.store.forget_block(FsBlock(*block));
            }
            keep
        });
    }
}
