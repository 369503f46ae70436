//! Commit protocols: the write order of a batch, and the states that a crash may leave.

use std::collections::BTreeMap;

use draconis_device::{Atomic, Properties};

use super::atomic::AtomicProtocol;
use super::batch::{Batch, Effect, Operation};
use super::journal::JournalProtocol;
use super::ordered::OrderedProtocol;
use super::queue::ChainDependency;
use super::unordered::UnorderedProtocol;
use crate::blocks::data::SharedBytes;
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::superblock::Superblock;
use crate::transaction::Transaction;
use crate::{Error, InodeNumber, Result};

/// Blocks that are written together, sorted by block number.
pub(crate) type Stage = BTreeMap<u64, SharedBytes>;

/// Stages of a batch: each is durable before the next begins.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// Stages, none of them empty; dirty data is in the first.
    pub(crate) stages: Vec<Stage>,
    /// Index of the stage that an fsync waits for.
    pub(crate) sync_stage: usize,
    /// Dependency of the first stage.
    pub(crate) dependency: ChainDependency,
}

/// A commit protocol. It knows the effects recorded since the last chain; operations know nothing
/// of it. The default methods suit protocols that need no order within a batch.
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

    /// Builds the chain of the current batch and forgets the recorded effects.
    ///
    /// # Errors
    /// Errors of damage and devices; the volume stops writing then.
    fn build_next_chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain>;

    /// Queues a checkpoint after the chain that was just queued, if one is due.
    ///
    /// # Errors
    /// As [`CommitProtocol::chain`].
    fn checkpoint(&mut self, _: &mut Transaction<'_>) -> Result<()> {
        Ok(())
    }

    /// Queues a checkpoint of an idle volume, so that the log is empty.
    ///
    /// # Errors
    /// As [`CommitProtocol::chain`].
    fn quiesce(&mut self, _: &mut Transaction<'_>) -> Result<()> {
        Ok(())
    }

    /// Announces that the next batch is the last.
    fn prepare_close(&mut self) {}

    /// Returns the block that records on disk that this error stopped the volume, if there is one.
    fn error_block(&mut self, _: &Error) -> Option<(u64, SharedBytes)> {
        None
    }
}

/// Returns the protocol for a volume on a disk with these properties and this journal.
pub(crate) fn for_volume(
    super_: &Superblock,
    disk: &Properties,
    journal: Option<JournalProtocol>,
) -> Box<dyn CommitProtocol> {
    match (disk.atomic, journal) {
        (Atomic::AgainstPowerCut, _) => Box::new(AtomicProtocol),
        (Atomic::None | Atomic::AgainstDeath, Some(journal)) => Box::new(journal),
        (Atomic::None | Atomic::AgainstDeath, None) if can_be_ordered(super_) => {
            Box::new(OrderedProtocol::default())
        }
        (Atomic::None | Atomic::AgainstDeath, None) => Box::new(UnorderedProtocol),
    }
}

/// Returns true if write order alone keeps the volume consistent. Checksums and balanced trees
/// change more places at once than one write reaches; so do inline directories and EA inodes.
fn can_be_ordered(super_: &Superblock) -> bool {
    let beyond =
        Incompatible::EXTENTS.union(Incompatible::INLINE_DATA).union(Incompatible::EA_INODE);
    let extents = super_.incompatible.intersects(beyond);
    let sums = super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS);
    !extents && !sums
}
