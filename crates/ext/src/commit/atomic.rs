//! Protocol for disks that are atomic against power cuts (object stores): one group per batch.
//!
//! Law: a cut leaves the volume as before the batch or as after it, always consistent. Inodes that
//! were unlinked while open are on the on-disk orphan list, and the next mount deletes them.

use super::protocol::{Chain, CommitProtocol, Stage};
use super::queue::ChainDependency;
use crate::Result;
use crate::transaction::Transaction;

/// Commit protocol without write order: it records nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtomicProtocol;

impl CommitProtocol for AtomicProtocol {
    fn build_next_chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        tx.write_free_counts()?;
        let mut stage: Stage = tx.collect_dirty_contents();
        let blocks = tx.volume.store.write_back.read();
        for block in &tx.writer.batch.blocks {
            let buffer = blocks.metadata.get(block).filter(|buffer| buffer.is_dirty());
            stage.extend(buffer.map(|buffer| (*block, buffer.current.clone())));
        }
        drop(blocks);
        let stages = if stage.is_empty() { vec![] } else { vec![stage] };
        Ok(Chain { stages, sync_stage: 0, dependency: ChainDependency::PendingSync })
    }
}
