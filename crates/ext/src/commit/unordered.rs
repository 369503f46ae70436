//! Contents and new blocks first, then all other metadata, in place: for volumes with extents or
//! checksums and no journal.
//!
//! Law: what `fsync` returned for is on the disk, and nothing leads to contents that are not. A
//! cut between the writes of one batch leaves what the kernel's driver leaves on such a volume:
//! structures of before beside others of after, which `e2fsck` repairs.

use super::protocol::{Chain, CommitProtocol, Stage};
use super::queue::ChainDependency;
use crate::Result;
use crate::blocks::write_back::BufferState;
use crate::transaction::Transaction;

/// See the head of the file. It keeps no records.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnorderedProtocol;

impl CommitProtocol for UnorderedProtocol {
    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        tx.write_free_counts()?;
        let mut first: Stage = tx.collect_dirty_contents();
        let mut last = Stage::new();
        let blocks = tx.volume.store.write_back.read();
        for block in &tx.writer.batch.blocks {
            let Some(buffer) = blocks.metadata.get(block) else { continue };
            match buffer.state {
                BufferState::Clean => {}
                BufferState::New => drop(first.insert(*block, buffer.current.clone())),
                BufferState::Modified(_) => drop(last.insert(*block, buffer.current.clone())),
            }
        }
        drop(blocks);
        let stages: Vec<Stage> = [first, last].into_iter().filter(|it| !it.is_empty()).collect();
        let needed = stages.len().saturating_sub(1);
        Ok(Chain { stages, sync_stage: needed, dependency: ChainDependency::PendingSync })
    }
}
