//! Changes since the last chain, and the facts that the write order may depend on.
//!
//! Each operation announces itself as an [`Operation`] before it changes blocks, and reports each
//! [`Effect`] afterwards. The protocol decides what follows.

use std::collections::{HashMap, HashSet};

use crate::quota::UsageDeltas;
use crate::{FsBlock, InodeNumber};

/// Facts about a batch that every protocol needs.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// True if there is anything to commit.
    pub(crate) dirty: bool,
    /// Inodes created since the last commit.
    pub(crate) created_inodes: HashSet<u32>,
    /// Freed blocks that are in use on disk (first, count), and freed inodes.
    pub(crate) freed_blocks: Vec<(u64, u32)>,
    /// Sum of the counts of `freed_blocks`.
    pub(crate) freed_block_count: u64,
    pub(crate) freed_inodes: Vec<u32>,
    /// Changed metadata blocks; may hold duplicates and blocks that were freed since.
    pub(crate) blocks: Vec<u64>,
    /// Changed inodes: inode-table block, and offset there.
    pub(crate) inodes: HashMap<u32, (FsBlock, usize)>,
    /// Changes of quota usage by user, group and project.
    pub(crate) usage: UsageDeltas,
}

impl Batch {
    /// Records freed blocks that are in use on disk.
    pub(crate) fn record_freed_blocks(&mut self, blocks: (u64, u32)) {
        self.freed_block_count = self.freed_block_count.saturating_add(blocks.1.into());
        self.freed_blocks.push(blocks);
    }

    /// Returns true if the inode is in use on disk.
    pub(crate) fn is_on_disk(&self, inode: InodeNumber) -> bool {
        !self.created_inodes.contains(&inode.0)
    }

    /// Records the facts that every protocol needs.
    pub(crate) fn record_effect(&mut self, effect: &Effect) {
        if let Effect::Created { inode, .. } = effect {
            self.created_inodes.insert(inode.0);
        }
    }
}

/// An announced operation that has not changed any block yet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// Creation of an inode in `dir`.
    Create { dir: InodeNumber, is_directory: bool },
    /// Removal of one link of `inode`, which is not a directory.
    Unlink { inode: InodeNumber },
    /// Removal of the empty directory `inode`.
    RemoveDirectory { inode: InodeNumber },
    /// Rename to an unused name.
    Move(NameMove),
    /// Rename over an existing name, which belongs to `victim`.
    Replace { moved: NameMove, victim: InodeNumber },
    /// Exchange of two names.
    Exchange { inodes: [InodeNumber; 2], is_across: bool },
}

/// A name that moves to another directory, or within one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameMove {
    pub(crate) inode: InodeNumber,
    pub(crate) from: InodeNumber,
    pub(crate) to: InodeNumber,
}

/// A finished step of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    /// Created an inode, or gave it its first name; `parent` is set for directories.
    Created { inode: InodeNumber, parent: Option<InodeNumber> },
    /// Added a name to a directory, or changed the inode of one.
    NameAdded { dir: InodeNumber },
    /// Removed a name from a directory.
    NameRemoved { dir: InodeNumber },
    /// Added a further link to an inode.
    Linked { inode: InodeNumber },
    /// Removed a link in `dir` from an inode that has others.
    LinkDropped { inode: InodeNumber, dir: InodeNumber },
    /// Moved a name from one directory to another.
    Moved(NameMove),
    /// Changed `..` of a directory to another parent.
    Reparented { dir: InodeNumber, parent: InodeNumber },
    /// Removed the last link of an inode, which was in `dir`.
    LastLinkDropped { inode: InodeNumber, dir: InodeNumber },
    /// Cleared and freed an inode.
    Freed { inode: InodeNumber },
    /// Swapped the names of two inodes of one directory, so that the one of `victim` can be
    /// removed.
    NamesSwapped { victim: InodeNumber },
    /// Exchanged two names of different directories.
    NamesExchanged,
}
