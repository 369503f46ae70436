//! Commits in place, ordered so that a power cut leaves nothing that `e2fsck -p` asks about.
//!
//! ```text
//!   stage 0      contents; new blocks of maps, names and attributes; bitmaps with what is taken;
//!                features that the volume did not have; inodes that die, files first
//!   then         directories that died, those inside before those around them
//!   then         directories: those that were given names of others, then those that lost them
//!   then         inodes that are born, outer directories first; pointers of old files
//!   last         bitmaps without what is freed; all counts
//! ```
//! Stages without anything are left out: an overwrite is one, a new file in an old directory
//! two.
//!
//! Law 1: an inode lives on disk only while a durable name leads to it. A name that leads to
//! no living inode is what a cut may leave, and what `e2fsck -p` clears without a question;
//! the opposite it asks about.
//! Law 2: a directory changes by one sector. If more than one of its sectors changed, the
//! blocks are written to new places, and its inode, which is in one sector, leads to them.
//! (Where no space is left for that, they are written in place.)
//! Law 3: a block that an inode leads to is durable before it does, and bitmaps never call
//! free what anything on disk leads to.
//! Law 4: what one chain could not order is in two.
//!
//! What a power cut can leave, therefore: blocks and inodes marked as used that are not, wrong
//! counts, names that lead nowhere, lengths that reach to the end of their last block. Three
//! changes cannot be made in one sector, and cut off they leave what `e2fsck` asks about: a
//! directory moved to another parent (two names, or a wrong `..`), an exchange across
//! directories, and giving up a block of attributes that another inode shares. A file that is
//! replaced by a rename from another directory may be gone while the new one has its old name.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with stages, fewer than directories are deep, and places inside a block"
)]

mod directories;
mod plan;
mod stages;

use std::collections::{HashMap, HashSet};

use super::batch::{Batch, Intent, Move, Operation};
use super::protocol::{Chain, Protocol};
use crate::transaction::Transaction;
use crate::{InodeNumber, Result};
use plan::Plan;

/// What a disk writes as a whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Stages that directories which are born or die inside each other may add to one chain.
const MOST_STAGES: u32 = 32;
/// Stages of a chain in which no directory is born or dies inside of another.
const LEAST_STAGES: u32 = 5;

/// What is recorded of a batch; inodes are "old" if the disk knows them as living.
#[derive(Debug, Default)]
pub(crate) struct Ordered {
    /// Directories that are born, and where their names are.
    born_dirs: HashMap<u32, u32>,
    /// How deep they were made inside each other.
    depths: HashMap<u32, u32>,
    /// Old inodes that do not live any more: the stage in which they may die.
    dying: HashMap<u32, u32>,
    /// The earliest stage in which a directory may die: after what was in it.
    heights: HashMap<u32, u32>,
    /// The largest of all depths and of all heights.
    deepest: u32,
    highest: u32,
    /// Old directories: what was done to their names.
    dirs: HashMap<u32, Names>,
    /// Directories that were given names of old inodes from elsewhere, and those that lost them: the
    /// former must be written first.
    receivers: HashSet<u32>,
    givers: HashSet<u32>,
    /// Directories that inodes left which go on living.
    left: HashSet<u32>,
    /// Old inodes that were given names beside those they have.
    linked: HashSet<u32>,
    /// Inodes whose names were exchanged with those of their successors.
    swapped: HashSet<u32>,
    /// Nothing may be added.
    complete: bool,
}

/// What was done to the names of a directory.
#[derive(Clone, Copy, Debug, Default)]
struct Names {
    /// Something other than taking names away.
    added: bool,
    /// Names were taken away.
    removed: bool,
}

impl Ordered {
    /// How many directories of this batch `dir` is inside of, itself among them.
    fn depth_of(&self, dir: InodeNumber) -> u32 {
        self.depths.get(&dir.0).copied().unwrap_or(0)
    }

    fn height_of(&self, dir: InodeNumber) -> u32 {
        self.heights.get(&dir.0).copied().unwrap_or(0)
    }

    /// Whether the new name of what is old can be there before the old one goes.
    fn admits_move(&self, batch: &Batch, &Move { inode, from, to }: &Move) -> bool {
        if from == to {
            return true;
        }
        if !batch.is_old(inode) {
            // Directories that are born inside each other make stages.
            return self.depth_of(inode) == 0 || self.depth_of(to) == 0;
        }
        let circle = self.receivers.contains(&from.0) || self.givers.contains(&to.0);
        !circle && batch.is_old(to) && !self.linked.contains(&inode.0)
    }
}

impl Protocol for Ordered {
    fn admits(&self, batch: &Batch, next: &Operation) -> bool {
        match next {
            Operation::Create { dir, is_directory } => {
                !is_directory || self.depth_of(*dir) < MOST_STAGES
            }
            Operation::Unlink { inode } => {
                !self.linked.contains(&inode.0) && !self.swapped.contains(&inode.0)
            }
            Operation::RemoveDirectory { inode } => {
                !self.left.contains(&inode.0) && self.height_of(*inode) < MOST_STAGES
            }
            Operation::Move(moved) => self.admits_move(batch, moved),
            Operation::Replace { moved, victim } => {
                let is_ordered = !batch.is_old(*victim)
                    || (batch.is_old(moved.inode)
                        && !self.linked.contains(&victim.0)
                        && !self.left.contains(&victim.0));
                is_ordered && self.admits_move(batch, moved)
            }
            // Both are old under their old names before they are exchanged.
            Operation::Exchange { inodes, is_across } => {
                !is_across && inodes.iter().all(|inode| batch.is_old(*inode))
            }
        }
    }

    fn swaps_names(&self, batch: &Batch, victim: InodeNumber) -> bool {
        batch.is_old(victim)
    }

    fn lists_orphans(&self) -> bool {
        false
    }

    fn record(&mut self, batch: &Batch, intent: Intent) {
        match intent {
            Intent::Born { inode, parent: Some(parent) } => {
                let depth = self.depth_of(parent) + 1;
                self.deepest = self.deepest.max(depth);
                self.depths.insert(inode.0, depth);
                self.born_dirs.insert(inode.0, parent.0);
            }
            Intent::Named { dir } if batch.is_old(dir) => {
                self.dirs.entry(dir.0).or_default().added = true;
            }
            Intent::Unnamed { dir } if batch.is_old(dir) => {
                self.dirs.entry(dir.0).or_default().removed = true;
            }
            Intent::Linked { inode } if batch.is_old(inode) => {
                self.linked.insert(inode.0);
            }
            Intent::Left { inode, dir } if batch.is_old(inode) => {
                self.left.insert(dir.0);
            }
            Intent::Moved(Move { inode, from, to }) if from != to && batch.is_old(inode) => {
                self.receivers.insert(to.0);
                self.givers.insert(from.0);
                self.left.insert(from.0);
            }
            Intent::Reparented { dir, parent } => {
                self.born_dirs.entry(dir.0).and_modify(|known| *known = parent.0);
            }
            Intent::Died { inode, dir } if batch.is_old(inode) => {
                let height = self.height_of(inode);
                let above = self.heights.entry(dir.0).or_default();
                *above = (*above).max(height + 1);
                self.highest = self.highest.max(height + 1);
                self.dying.insert(inode.0, height);
            }
            Intent::Freed { inode } if batch.is_old(inode) => {
                self.dying.insert(inode.0, self.height_of(inode));
                self.dirs.remove(&inode.0);
            }
            Intent::Freed { inode } => drop(self.born_dirs.remove(&inode.0)),
            Intent::Swapped { victim } => drop(self.swapped.insert(victim.0)),
            Intent::Exchanged => self.complete = true,
            _ => {}
        }
    }

    fn is_complete(&self, _: &Batch) -> bool {
        self.complete
    }

    fn most_stages(&self) -> usize {
        (LEAST_STAGES + self.deepest + self.highest) as usize
    }

    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        let recorded = std::mem::take(self);
        let directories = tx.arrange_directories(&recorded.dirs)?;
        tx.write_counts()?;
        let chain = tx.stages(&Plan::of(&recorded, &directories))?;
        debug_assert!(chain.stages.len() <= recorded.most_stages());
        Ok(chain)
    }
}
