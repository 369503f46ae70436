//! Reading a store that another process writes.

use std::sync::Arc;

use super::Store;
use crate::{Error, Result};

/// Most states in which a lookup is tried: each takes a checkpoint of the writer.
const MAX_STATES: u32 = 20;

impl Store {
    /// Moves a store that is open for reading on to the newest commit on its disk, which another
    /// process or machine may have written. Returns true if it changed. Until then, and while this
    /// runs, reads see the state before; open snapshots keep theirs.
    ///
    /// The writer does not know its readers. Bytes that a state needs and that the writer has
    /// replaced since may be overwritten from its next checkpoint on. Reads notice it by their
    /// checksums and return an error; after a refresh they can be repeated, as
    /// [`Store::read_newest`] does.
    ///
    /// # Errors
    /// The store is open for writing, was resized or replaced by another one, is damaged, or its
    /// disk cannot be read. The store still shows its earlier state.
    pub fn refresh(&self) -> Result<bool> {
        self.process.check()?;
        let _one_at_a_time = self.refreshing.lock();
        self.io.disk.refresh()?;
        crate::recovery::follow::refresh(&self.core, &self.io, self.cache_bytes)
    }

    /// Runs a lookup; if it meets bytes that the writer has overwritten, moves on to the newest
    /// commit and runs it again. A store that is open for writing runs it once.
    ///
    /// # Errors
    /// The error of the lookup, if it is not that of an old state; as [`Store::refresh`].
    pub fn read_newest<T>(
        self: &Arc<Self>,
        mut look: impl FnMut(&Arc<Self>) -> Result<T>,
    ) -> Result<T> {
        for _ in 0..MAX_STATES {
            let before = self.newest_checkpoint();
            let found = look(self);
            let may_be_old = matches!(
                found,
                Err(Error::Corrupt { .. } | Error::Device(draconis_device::Error::Remote(_)))
            );
            if !may_be_old || !self.is_read_only() {
                return found;
            }
            self.refresh()?;
            // Bytes are overwritten only after a checkpoint: without one they are damaged.
            if self.newest_checkpoint() == before {
                return found;
            }
        }
        look(self)
    }

    /// Returns the number of the newest commit that reads see.
    pub fn newest_commit(&self) -> u64 {
        self.core.read().log.newest_commit()
    }

    /// Returns the number of the writer's checkpoint that reads start from. Bytes that reads need
    /// are not overwritten before the next one.
    pub fn newest_checkpoint(&self) -> u64 {
        self.core.read().checkpoints.superblock.generation
    }
}
