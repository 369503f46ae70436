//! One group for each batch, for disks that are atomic against power cuts: objects.
//!
//! Law: a cut leaves the volume before the batch or after it. Nothing on it leads nowhere,
//! nothing is lost, no count is wrong; what was unlinked and still open is on the volume's
//! list of orphans, from where the next mount gives it back.

use super::protocol::{Chain, CommitProtocol, Stage};
use super::queue::ChainDependency;
use crate::Result;
use crate::transaction::Transaction;

/// See the head of the file. It keeps no records: nothing depends on the order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AtomicProtocol;

impl CommitProtocol for AtomicProtocol {
    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
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
