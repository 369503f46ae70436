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
use crate::blocks::data::Data;
use crate::blocks::role::Role;
use crate::cache::Mixer;

/// What the disk has of a block.
#[derive(Debug)]
pub(crate) enum State {
    /// The same, or it will have.
    Clean,
    /// Nothing that anything leads to.
    Fresh,
    /// What it was when the last chain was submitted.
    Changed(Data),
}

/// A block of metadata.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) now: Data,
    pub(crate) state: State,
    pub(crate) role: Role,
    /// The chain that carried it last: its place in the order in which they were sealed.
    pub(crate) sealed: u64,
}

impl Buffer {
    /// Makes it new in this batch, if it is not yet.
    pub(crate) fn change(&mut self) -> &mut [u8] {
        if matches!(self.state, State::Clean) {
            self.state = State::Changed(self.now.clone());
        }
        self.now.make_mut()
    }

    /// Whether the next chain must carry it.
    pub(crate) fn is_dirty(&self) -> bool {
        !matches!(self.state, State::Clean)
    }
}

/// A block of a file's contents.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) now: Data,
    /// Not submitted yet.
    pub(crate) dirty: bool,
    /// What carried it: its place in the order in which chains were sealed.
    pub(crate) sealed: u64,
}

/// A block as a log has it that was committed and is not in place.
#[derive(Debug)]
pub(crate) struct Logged {
    pub(crate) now: Data,
    /// The chain that puts it in place, once that is sealed.
    pub(crate) checkpoint: Option<u64>,
}

type Map<V> = HashMap<u64, V, BuildHasherDefault<Mixer>>;

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    pub(crate) metadata: Map<Buffer>,
    pub(crate) contents: Map<Content>,
    /// What was committed to a log and is not in place yet.
    pub(crate) logged: BTreeMap<u64, Logged>,
    /// Dirty blocks of contents.
    pub(crate) dirty_contents: usize,
    /// Inodes without names that still have users.
    pub(crate) orphans: HashSet<u32>,
}

impl Blocks {
    pub(crate) fn get(&self, block: FsBlock) -> Option<Data> {
        if let Some(buffer) = self.metadata.get(&block.0) {
            return Some(buffer.now.clone());
        }
        if let Some(content) = self.contents.get(&block.0) {
            return Some(content.now.clone());
        }
        self.logged.get(&block.0).map(|logged| logged.now.clone())
    }

    /// Puts contents in, in place of whatever was there.
    pub(crate) fn put_content(&mut self, block: FsBlock, now: Data) {
        let before = self.contents.insert(block.0, Content { now, dirty: true, sealed: 0 });
        if before.is_none_or(|before| !before.dirty) {
            self.dirty_contents = self.dirty_contents.saturating_add(1);
        }
    }

    /// Notes that a chain carries these contents as they are now.
    pub(crate) fn contents_sealed(&mut self, contents: &[u64], sealed: u64) {
        for block in contents {
            let Some(content) = self.contents.get_mut(block) else { continue };
            let was_dirty = std::mem::replace(&mut content.dirty, false);
            content.sealed = sealed;
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
        changed.saturating_add(self.logged.len())
    }
}

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    blocks: RwLock<Blocks>,
    /// How many there are, to say "none" without the lock.
    len: AtomicUsize,
}

/// The right to change the overlay.
pub(crate) struct Changing<'a> {
    blocks: RwLockWriteGuard<'a, Blocks>,
    len: &'a AtomicUsize,
}

impl Overlay {
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn get(&self, block: FsBlock) -> Option<Data> {
        if self.is_empty() {
            return None;
        }
        self.blocks.read().get(block)
    }

    /// Whether there are more than `most` blocks of metadata.
    pub(crate) fn has_more_metadata_than(&self, most: usize) -> bool {
        self.len.load(Ordering::Relaxed) > most && self.blocks.read().metadata.len() > most
    }

    /// Whether an inode without names still has users.
    pub(crate) fn has_orphan(&self, inode: u32) -> bool {
        self.blocks.read().orphans.contains(&inode)
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Blocks> {
        self.blocks.read()
    }

    pub(crate) fn change(&self) -> Changing<'_> {
        Changing { blocks: self.blocks.write(), len: &self.len }
    }
}

impl std::ops::Deref for Changing<'_> {
    type Target = Blocks;
    fn deref(&self) -> &Blocks {
        &self.blocks
    }
}

impl std::ops::DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut Blocks {
        &mut self.blocks
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.len.store(self.blocks.len(), Ordering::Relaxed);
    }
}
