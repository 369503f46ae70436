//! Blocks that are newer in memory than on the device.
//!
//! ```text
//!   Store::block, chunks ──▶ overlay? ──▶ pieces and chunks of the data cache ──▶ device
//!                              ▲
//!            changes ──────────┘   until the disk says that reads see what was submitted
//! ```
//! Law: what is in here is what the volume is; whatever the data cache holds of the same
//! block is older, and is renewed or forgotten when a block leaves.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::BuildHasherDefault;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::FsBlock;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::cache::IntegerHasher;

/// What the disk has of a block.
#[derive(Debug)]
pub(crate) enum BufferState {
    /// The same, or it will have.
    Clean,
    /// Nothing that anything leads to.
    New,
    /// What it was when the last chain was submitted.
    Modified(SharedBytes),
}

/// A block of metadata.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) current: SharedBytes,
    pub(crate) state: BufferState,
    pub(crate) role: Role,
    /// The chain that carried it last: its place in the order in which they were sealed.
    pub(crate) chain_number: u64,
}

impl Buffer {
    /// Makes it new in this batch, if it is not yet.
    pub(crate) fn make_dirty(&mut self) -> &mut [u8] {
        if matches!(self.state, BufferState::Clean) {
            self.state = BufferState::Modified(self.current.clone());
        }
        self.current.make_mut()
    }

    /// Whether the next chain must carry it.
    pub(crate) fn is_dirty(&self) -> bool {
        !matches!(self.state, BufferState::Clean)
    }
}

/// A block of a file's contents.
#[derive(Debug)]
pub(crate) struct DataBlock {
    pub(crate) current: SharedBytes,
    /// Not submitted yet.
    pub(crate) dirty: bool,
    /// What carried it: its place in the order in which chains were sealed.
    pub(crate) chain_number: u64,
}

/// A block as a log has it that was committed and is not in place.
#[derive(Debug)]
pub(crate) struct CheckpointBlock {
    pub(crate) now: SharedBytes,
    /// The chain that puts it in place, once that is sealed.
    pub(crate) checkpoint_chain: Option<u64>,
}

type BlockTable<V> = HashMap<u64, V, BuildHasherDefault<IntegerHasher>>;

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct WriteBackBlocks {
    pub(crate) metadata: BlockTable<Buffer>,
    pub(crate) contents: BlockTable<DataBlock>,
    /// What was committed to a log and is not in place yet.
    pub(crate) awaiting_checkpoint: BTreeMap<u64, CheckpointBlock>,
    /// Dirty blocks of contents.
    pub(crate) dirty_contents: usize,
    /// Inodes without names that still have users.
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
        self.awaiting_checkpoint.get(&block.0).map(|logged| logged.now.clone())
    }

    /// Puts contents in, in place of whatever was there.
    pub(crate) fn insert_content(&mut self, block: FsBlock, now: SharedBytes) {
        let before =
            self.contents.insert(block.0, DataBlock { current: now, dirty: true, chain_number: 0 });
        if before.is_none_or(|before| !before.dirty) {
            self.dirty_contents = self.dirty_contents.saturating_add(1);
        }
    }

    /// Notes that a chain carries these contents as they are now.
    pub(crate) fn mark_contents_queued(&mut self, contents: &[u64], sealed: u64) {
        for block in contents {
            let Some(content) = self.contents.get_mut(block) else { continue };
            let was_dirty = std::mem::replace(&mut content.dirty, false);
            content.chain_number = sealed;
            self.dirty_contents = self.dirty_contents.saturating_sub(usize::from(was_dirty));
        }
    }

    /// Drops a block that is not in use any more.
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

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct WriteBackCache {
    blocks: RwLock<WriteBackBlocks>,
    /// How many there are, to say "none" without the lock.
    len: AtomicUsize,
}

/// The right to change the overlay.
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

    /// Whether there are more than `most` blocks of metadata.
    pub(crate) fn metadata_exceeds(&self, most: usize) -> bool {
        self.len.load(Ordering::Relaxed) > most && self.blocks.read().metadata.len() > most
    }

    /// Whether an inode without names still has users.
    pub(crate) fn has_orphan(&self, inode: u32) -> bool {
        self.blocks.read().orphans.contains(&inode)
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
