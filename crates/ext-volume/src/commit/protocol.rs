//! Commit protocols: the write order of a batch, and the states that a crash may leave.

pub(crate) mod atomic;
pub(crate) mod journal;
pub(crate) mod ordered;
pub(crate) mod unordered;

use std::collections::BTreeMap;

use super::batch::{Batch, Effect, Operation};
use super::chain::Chain;
use super::changes::Changes;
use crate::blocks::data::SharedBytes;
use crate::{Error, InodeNumber, Result};

/// Changes to the names of a directory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NameChanges {
    /// True if there are changes other than removals.
    pub(crate) added: bool,
    /// True if names were removed.
    pub(crate) removed: bool,
}

/// A commit protocol: it sees recorded effects and gathered changes, no transaction and no volume.
/// Operations know nothing of it. The default methods suit protocols that need no order within a
/// batch.
pub(crate) trait CommitProtocol: Send + Sync + std::fmt::Debug {
    /// Returns true if `next` can join the batch.
    fn can_join_batch(&self, _: &Batch, _: &Operation) -> bool {
        true
    }

    /// Returns true if a rename must swap the two names first, because `victim` cannot be deleted
    /// in the same batch.
    fn requires_name_swap(&self, _: &Batch, _: InodeNumber) -> bool {
        false
    }

    /// Returns true if the volume keeps an on-disk orphan list; ordered writes in place cannot
    /// maintain one.
    fn lists_orphans(&self) -> bool {
        true
    }

    /// Records an effect.
    fn record_effect(&mut self, _: &Batch, _: Effect) {}

    /// Returns true if nothing more can join the batch.
    fn is_complete(&self, _: &Batch) -> bool {
        false
    }

    /// Returns the number of stages in which one block may be written, at most.
    fn max_stages(&self) -> usize {
        1
    }

    /// Returns the number of blocks that one batch can free of a file on a volume of `_groups`
    /// groups, or `None` if there is no limit.
    fn max_blocks_per_truncate(&self, _groups: u32) -> Option<u32> {
        None
    }

    /// Returns true if a journal recovers the volume after a cut: in use, the superblock has
    /// `needs_recovery` set and its clean state unchanged.
    fn has_journal(&self) -> bool {
        false
    }

    /// Returns the directories in use on disk whose names changed, if each must change by one
    /// sector.
    fn single_sector_directories(&self) -> BTreeMap<u32, NameChanges> {
        BTreeMap::new()
    }

    /// Turns the changes of a batch into chains, and forgets the recorded effects. The last chain
    /// completes the batch; there is none if nothing changed.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Unsupported`]; the volume stops writing then.
    fn build_chains(&mut self, changes: Changes<'_>) -> Result<Vec<Chain>>;

    /// Returns a checkpoint, to be queued after the batch, if one is due. The write-back cache has
    /// `_logged_blocks` blocks until they are checkpointed.
    ///
    /// # Errors
    /// As [`CommitProtocol::build_chains`].
    fn checkpoint(&mut self, _logged_blocks: usize) -> Result<Vec<Chain>> {
        Ok(vec![])
    }

    /// Returns a checkpoint of an idle volume, so that the log is empty.
    ///
    /// # Errors
    /// As [`CommitProtocol::build_chains`].
    fn quiesce(&mut self) -> Result<Vec<Chain>> {
        Ok(vec![])
    }

    /// Announces that the next batch is the last.
    fn prepare_close(&mut self) {}

    /// Returns the block that records on disk that this error stopped the volume, if there is one.
    fn error_block(&mut self, _: &Error) -> Option<(u64, SharedBytes)> {
        None
    }
}
