//! What changed since the last chain, and what of it the order of writes may depend on.
//!
//! An operation says before it begins what it is going to do ([`Operation`]), and while it
//! changes blocks, what it did ([`Effect`]). What comes of that is the protocol's.

use std::collections::HashSet;

use crate::InodeNumber;
use crate::quota::UsageDeltas;

/// The facts of a batch that every protocol needs.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Whether there is anything to commit.
    pub(crate) dirty: bool,
    /// Inodes that no commit has made yet.
    pub(crate) created_inodes: HashSet<u32>,
    /// Inodes that lost their last name, and that the disk knows as living.
    pub(crate) unlinked_inodes: HashSet<u32>,
    /// Blocks that the disk knows as used (first, count), and inodes.
    pub(crate) freed_blocks: Vec<(u64, u32)>,
    pub(crate) freed_inodes: Vec<u32>,
    /// Blocks of metadata that changed; some of them twice, some gone since.
    pub(crate) blocks: Vec<u64>,
    /// Inodes that changed.
    pub(crate) inodes: HashSet<u32>,
    /// What users, groups and projects have more or less.
    pub(crate) usage: UsageDeltas,
}

impl Batch {
    /// Whether the disk knows this inode as living.
    pub(crate) fn is_on_disk(&self, inode: InodeNumber) -> bool {
        !self.created_inodes.contains(&inode.0)
    }

    /// Notes what every protocol needs of an intent.
    pub(crate) fn record_effect(&mut self, intent: &Effect) {
        match *intent {
            Effect::Created { inode, .. } => drop(self.created_inodes.insert(inode.0)),
            Effect::LastLinkDropped { inode, .. } | Effect::Freed { inode }
                if self.is_on_disk(inode) =>
            {
                self.unlinked_inodes.insert(inode.0);
            }
            _ => {}
        }
    }
}

/// What is about to be done; nothing of it has changed a block yet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// Something is made in `dir`.
    Create { dir: InodeNumber, is_directory: bool },
    /// `inode`, which is no directory, loses a name.
    Unlink { inode: InodeNumber },
    /// The empty directory `inode` loses its name.
    RemoveDirectory { inode: InodeNumber },
    /// A name moves.
    Move(NameMove),
    /// A name moves over one that is there, and `victim` loses that.
    Replace { moved: NameMove, victim: InodeNumber },
    /// Two names are exchanged.
    Exchange { inodes: [InodeNumber; 2], is_across: bool },
}

/// A name on its way from one directory to another, or the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameMove {
    pub(crate) inode: InodeNumber,
    pub(crate) from: InodeNumber,
    pub(crate) to: InodeNumber,
}

/// What was done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    /// An inode was made, or was given its first name; a directory, inside of `parent`.
    Created { inode: InodeNumber, parent: Option<InodeNumber> },
    /// A name was put into a directory, or one there leads elsewhere.
    NameAdded { dir: InodeNumber },
    /// A name was taken out of a directory.
    NameRemoved { dir: InodeNumber },
    /// An inode was given a name beside those it has.
    Linked { inode: InodeNumber },
    /// An inode lost a name in `dir` and has others.
    LinkDropped { inode: InodeNumber, dir: InodeNumber },
    /// A name moved from one directory to another.
    Moved(NameMove),
    /// `..` of a directory leads to another parent.
    Reparented { dir: InodeNumber, parent: InodeNumber },
    /// An inode lost its last name, which was in `dir`.
    LastLinkDropped { inode: InodeNumber, dir: InodeNumber },
    /// An inode is cleared and given back.
    Freed { inode: InodeNumber },
    /// The names of two inodes in one directory were exchanged, so that that of `victim` can go.
    NamesSwapped { victim: InodeNumber },
    /// Two names in two directories were exchanged.
    NamesExchanged,
}
