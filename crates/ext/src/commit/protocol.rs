//! In which order a batch reaches the disk, and what a crash may leave of it.

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

/// Blocks that are written together: whole and in this order of their numbers.
pub(crate) type Stage = BTreeMap<u64, SharedBytes>;

/// A batch as it is written: each stage is durable before the next one begins.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// None of them empty; dirty contents are in the first.
    pub(crate) stages: Vec<Stage>,
    /// The stage with which everything is there that the batch promises.
    pub(crate) sync_stage: usize,
    /// What its first stage follows.
    pub(crate) dependency: ChainDependency,
}

/// A commit protocol. It knows what was recorded since the last chain; operations know
/// nothing of it. What has a default is for protocols to which the order within a batch is nothing.
pub(crate) trait CommitProtocol: Send + Sync + std::fmt::Debug {
    /// Whether `next` can be in one batch with what is recorded.
    fn can_join_batch(&self, _: &Batch, _: &Operation) -> bool {
        true
    }

    /// Whether a name that is going to lead elsewhere is exchanged with its successor's old
    /// one first, because `victim` cannot die in the batch in which that happens.
    fn requires_name_swap(&self, _: &Batch, _: InodeNumber) -> bool {
        false
    }

    /// Whether the volume lists its orphans on disk: a list cannot be kept in order in place.
    fn lists_orphans(&self) -> bool {
        true
    }

    /// Notes what was done.
    fn record(&mut self, _: &Batch, _: Effect) {}

    /// Whether nothing more can be in the batch.
    fn is_complete(&self, _: &Batch) -> bool {
        false
    }

    /// In how many stages of the chain of what is recorded a block may be, at most.
    fn max_stages(&self) -> usize {
        1
    }

    /// The blocks that a file may lose in one step on a volume of so many groups; `None` where
    /// all of them can go at once.
    fn max_blocks_per_truncate(&self, _groups: u32) -> Option<u32> {
        None
    }

    /// Whether a log makes the volume whole after a cut: the superblock says so while it is in
    /// use, in place of saying that it was not unmounted.
    fn has_journal(&self) -> bool {
        false
    }

    /// The chain of the batch in hand. What was recorded is forgotten.
    ///
    /// # Errors
    /// What damage and devices answer; the volume stops then.
    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain>;

    /// Seals what follows the chain that was just sealed, where it is time for that.
    ///
    /// # Errors
    /// As [`Protocol::chain`].
    fn checkpoint(&mut self, _: &mut Transaction<'_>) -> Result<()> {
        Ok(())
    }

    /// Seals what leaves nothing to recover: the volume is in use, and has been left alone.
    ///
    /// # Errors
    /// As [`Protocol::chain`].
    fn quiesce(&mut self, _: &mut Transaction<'_>) -> Result<()> {
        Ok(())
    }

    /// Says that the next batch is the last one.
    fn prepare_close(&mut self) {}

    /// The block that says on disk that the volume stopped for this error, where there is one.
    fn error_block(&mut self, _: &Error) -> Option<(u64, SharedBytes)> {
        None
    }
}

/// The protocol for a volume on a disk of these properties, with that journal.
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

/// Whether the order of writes alone can keep a volume in order: a block with a checksum, or a
/// tree that is balanced, changes in more places at once than one write reaches; and names inside an
/// inode change with that, as do attributes with the inodes of their values.
fn can_be_ordered(super_: &Superblock) -> bool {
    let beyond =
        Incompatible::EXTENTS.union(Incompatible::INLINE_DATA).union(Incompatible::EA_INODE);
    let extents = super_.incompatible.intersects(beyond);
    let sums = super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS);
    !extents && !sums
}
