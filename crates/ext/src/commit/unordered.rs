//! Protocol for volumes with extents or checksums and no journal: data and new blocks first, then
//! all other metadata, in place.
//!
//! Law: after `fsync` returns, the data is on the disk, and no metadata references data that is
//! not. A cut within a batch leaves what the kernel's driver leaves on such a volume: a mix of old
//! and new structures, which `e2fsck` repairs.

use super::protocol::{Chain, CommitProtocol, Stage};
use super::queue::ChainDependency;
use crate::Result;
use crate::blocks::write_back::BufferState;
use crate::transaction::Transaction;

/// Commit protocol with two stages: it records nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnorderedProtocol;

impl CommitProtocol for UnorderedProtocol {
    fn build_next_chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
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
