//! Write-back cache: blocks that are newer in memory than on the device.
//!
//! ```text
//!   blocks, chunks ──▶ write-back cache ──▶ pieces and chunks of the data cache ──▶ device
//!                           ▲
//!         changes ──────────┘   until the chain is visible to readers of the disk
//! ```
//! Law: the cached block is the current one. The data cache holds an older copy, which is updated
//! or dropped when the block leaves.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use draconis_types::lock::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::cache::IntegerHasher;
use crate::format::inode_slot::InodeDiff;
use crate::{FsBlock, InodeNumber};

/// State of a buffer relative to the disk.
#[derive(Debug)]
pub(crate) enum BufferState {
    /// Equal on disk, or queued.
    Clean,
    /// The block is new: nothing on disk references it.
    New,
    /// Modified since the last chain; holds the bytes of that chain.
    Modified(SharedBytes),
}

/// A metadata block.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) current: SharedBytes,
    pub(crate) state: BufferState,
    pub(crate) role: Role,
    /// Number of the last chain that carried the block.
    pub(crate) chain_number: u64,
}

impl Buffer {
    /// Makes the buffer dirty and returns its bytes.
    pub(crate) fn make_dirty(&mut self) -> &mut [u8] {
        if matches!(self.state, BufferState::Clean) {
            self.state = BufferState::Modified(self.current.clone());
        }
        self.current.make_mut()
    }

    /// Returns true if the next chain must carry the block.
    pub(crate) fn is_dirty(&self) -> bool {
        !matches!(self.state, BufferState::Clean)
    }
}

/// A block of file data.
#[derive(Debug)]
pub(crate) struct DataBlock {
    pub(crate) current: SharedBytes,
    /// True until a chain with the block is queued.
    pub(crate) dirty: bool,
    /// Number of the chain that carried the block.
    pub(crate) chain_number: u64,
}

/// A block committed to the journal and not yet checkpointed.
#[derive(Debug)]
pub(crate) struct CheckpointBlock {
    pub(crate) current: SharedBytes,
    /// Number of the chain that checkpoints the block, once queued.
    pub(crate) checkpoint_chain: Option<u64>,
}

type BlockTable<V> = HashMap<u64, V, BuildHasherDefault<IntegerHasher>>;

/// All blocks of the write-back cache.
#[derive(Debug, Default)]
pub(crate) struct WriteBackBlocks {
    pub(crate) metadata: BlockTable<Buffer>,
    pub(crate) contents: BlockTable<DataBlock>,
    /// Blocks committed to the journal and not yet checkpointed.
    pub(crate) awaiting_checkpoint: BlockTable<CheckpointBlock>,
    /// Number of dirty data blocks.
    pub(crate) dirty_contents: usize,
    /// Orphans: inodes without names that have users.
    pub(crate) orphans: HashSet<u32>,
}

impl WriteBackBlocks {
    pub(crate) fn get(&self, block: FsBlock) -> Option<SharedBytes> {
        if let Some(buffer) = self.metadata.get(&block.0) {
            return Some(buffer.current.clone());
        }
        if let Some(content) = self.contents.get(&block.0) {
            return Some(content.current.clone());
        }
        self.awaiting_checkpoint.get(&block.0).map(|logged| logged.current.clone())
    }

    /// Returns the change of the inode at `part` of a block since the last chain; `None` if the
    /// block is not modified.
    pub(crate) fn inode_diff(&self, block: FsBlock, part: Range<usize>) -> Option<InodeDiff<'_>> {
        let buffer = self.metadata.get(&block.0)?;
        let BufferState::Modified(base) = &buffer.state else { return None };
        let (old, new) = (base.get(part.clone()), buffer.current.get(part));
        Some(InodeDiff::new(old.unwrap_or_default(), new.unwrap_or_default()))
    }

    /// Inserts a dirty data block, replacing an older version.
    pub(crate) fn insert_content(&mut self, block: FsBlock, now: SharedBytes) {
        let before =
            self.contents.insert(block.0, DataBlock { current: now, dirty: true, chain_number: 0 });
        if before.is_none_or(|before| !before.dirty) {
            self.dirty_contents = self.dirty_contents.saturating_add(1);
        }
    }

    /// Marks data blocks as queued in a chain.
    pub(crate) fn mark_contents_queued(&mut self, contents: &[u64], chain_number: u64) {
        for block in contents {
            let Some(content) = self.contents.get_mut(block) else { continue };
            let was_dirty = std::mem::replace(&mut content.dirty, false);
            content.chain_number = chain_number;
            self.dirty_contents = self.dirty_contents.saturating_sub(usize::from(was_dirty));
        }
    }

    /// Returns the dirty data blocks that are in no chain.
    pub(crate) fn collect_dirty_contents(&self) -> BTreeMap<u64, SharedBytes> {
        if self.dirty_contents == 0 {
            return BTreeMap::new();
        }
        let dirty = self.contents.iter().filter(|(_, content)| content.dirty);
        dirty.map(|(block, content)| (*block, content.current.clone())).collect()
    }

    /// Keeps blocks that are being committed to the journal until they are checkpointed, and drops
    /// those that it revokes.
    pub(crate) fn insert_logged(&mut self, logged: BTreeMap<u64, SharedBytes>, revoked: &[u64]) {
        for block in revoked {
            self.awaiting_checkpoint.remove(block);
        }
        let checkpoint_chain = None;
        self.awaiting_checkpoint.extend(
            logged
                .into_iter()
                .map(|(block, current)| (block, CheckpointBlock { current, checkpoint_chain })),
        );
    }

    /// Marks blocks as checkpointed by a queued chain.
    pub(crate) fn mark_checkpoint_queued(&mut self, blocks: &[u64], chain_number: u64) {
        for block in blocks {
            if let Some(logged) = self.awaiting_checkpoint.get_mut(block) {
                logged.checkpoint_chain = Some(chain_number);
            }
        }
    }

    /// Marks metadata blocks as queued in a chain.
    pub(crate) fn mark_metadata_queued(&mut self, blocks: &[u64], chain_number: u64) {
        for block in blocks {
            if let Some(buffer) = self.metadata.get_mut(block) {
                buffer.state = BufferState::Clean;
                buffer.chain_number = chain_number;
            }
        }
    }

    /// Drops a block that was freed.
    pub(crate) fn drop_block(&mut self, block: FsBlock) {
        self.metadata.remove(&block.0);
        if let Some(content) = self.contents.remove(&block.0)
            && content.dirty
        {
            self.dirty_contents = self.dirty_contents.saturating_sub(1);
        }
    }

    fn len(&self) -> usize {
        let changed = self.metadata.len().saturating_add(self.contents.len());
        changed.saturating_add(self.awaiting_checkpoint.len())
    }
}

/// Write-back cache of a volume.
#[derive(Debug, Default)]
pub(crate) struct WriteBackCache {
    blocks: RwLock<WriteBackBlocks>,
    /// Number of blocks, readable without the lock.
    len: AtomicUsize,
}

/// Write access to the write-back cache.
pub(crate) struct WriteBackGuard<'a> {
    blocks: RwLockWriteGuard<'a, WriteBackBlocks>,
    len: &'a AtomicUsize,
}

impl WriteBackCache {
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn get(&self, block: FsBlock) -> Option<SharedBytes> {
        if self.is_empty() {
            return None;
        }
        self.blocks.read().get(block)
    }

    /// Returns true if there are more than `most` metadata blocks.
    pub(crate) fn metadata_exceeds(&self, most: usize) -> bool {
        self.len.load(Ordering::Relaxed) > most && self.blocks.read().metadata.len() > most
    }

    /// Returns true if an inode is an orphan.
    pub(crate) fn has_orphan(&self, inode: u32) -> bool {
        self.blocks.read().orphans.contains(&inode)
    }

    pub(crate) fn orphans(&self) -> Vec<InodeNumber> {
        self.blocks.read().orphans.iter().copied().map(InodeNumber).collect()
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, WriteBackBlocks> {
        self.blocks.read()
    }

    pub(crate) fn write(&self) -> WriteBackGuard<'_> {
        WriteBackGuard { blocks: self.blocks.write(), len: &self.len }
    }
}

impl std::ops::Deref for WriteBackGuard<'_> {
    type Target = WriteBackBlocks;
    fn deref(&self) -> &WriteBackBlocks {
        &self.blocks
    }
}

impl std::ops::DerefMut for WriteBackGuard<'_> {
    fn deref_mut(&mut self) -> &mut WriteBackBlocks {
        &mut self.blocks
    }
}

impl Drop for WriteBackGuard<'_> {
    fn drop(&mut self) {
        self.len.store(self.blocks.len(), Ordering::Relaxed);
    }
}
