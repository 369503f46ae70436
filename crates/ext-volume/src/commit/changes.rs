//! Changes of a batch: all that a protocol sees of the volume.

use std::collections::HashSet;

use draconis_types::Time;

use super::batch::Batch;
use super::chain::Stage;
use crate::FsBlock;
use crate::blocks::BlockStore;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::blocks::write_back::BufferState;

/// Changes since the last commit, gathered once when the batch is closed.
#[derive(Debug)]
pub(crate) struct Changes<'a> {
    /// Recorded facts: inodes that were created, changed, unlinked; blocks that were freed.
    pub(crate) batch: &'a Batch,
    /// Time of the commit.
    pub(crate) time: Time,
    /// Dirty data blocks that are in no chain.
    pub(crate) contents: Stage,
    /// Changed metadata blocks, sorted by number.
    pub(crate) blocks: Vec<ChangedBlock>,
    /// Directories whose inode or map switches to new blocks.
    pub(crate) switched_directories: HashSet<u32>,
}

/// A changed metadata block.
#[derive(Debug)]
pub(crate) struct ChangedBlock {
    pub(crate) block: u64,
    pub(crate) role: Role,
    /// Bytes of the last chain; `None` for a new block, which nothing on disk references.
    pub(crate) base: Option<SharedBytes>,
    /// Current bytes, with their checksum.
    pub(crate) current: SharedBytes,
}

impl<'a> Changes<'a> {
    /// Gathers the changes of a batch from the write-back cache.
    pub(crate) fn gather(
        batch: &'a Batch,
        time: Time,
        switched_directories: HashSet<u32>,
        store: &BlockStore,
    ) -> Self {
        let cache = store.write_back.read();
        let mut numbers = batch.blocks.clone();
        numbers.sort_unstable();
        numbers.dedup();
        let mut blocks = Vec::with_capacity(numbers.len());
        for block in numbers {
            let Some(buffer) = cache.metadata.get(&block) else { continue };
            let base = match &buffer.state {
                BufferState::Clean => continue,
                BufferState::New => None,
                BufferState::Modified(base) => Some(base.clone()),
            };
            let mut current = buffer.current.clone();
            if let Some(sums) = &store.checksums {
                sums.set_checksum(buffer.role, FsBlock(block), &mut current);
            }
            blocks.push(ChangedBlock { block, role: buffer.role, base, current });
        }
        let contents = cache.collect_dirty_contents();
        Self { batch, time, contents, blocks, switched_directories }
    }

    /// Returns a changed metadata block.
    pub(crate) fn block(&self, block: u64) -> Option<&ChangedBlock> {
        let nth = self.blocks.binary_search_by_key(&block, |it| it.block).ok()?;
        self.blocks.get(nth)
    }
}
