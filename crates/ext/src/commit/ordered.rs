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

use super::batch::{Batch, Effect, NameMove, Operation};
use super::protocol::{Chain, CommitProtocol};
use crate::transaction::Transaction;
use crate::{InodeNumber, Result};
use plan::StagePlan;

/// What a disk writes as a whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Stages that directories which are born or die inside each other may add to one chain.
const MAX_DIRECTORY_STAGES: u32 = 32;
/// Stages of a chain in which no directory is born or dies inside of another.
const BASE_STAGES: u32 = 5;

/// What is recorded of a batch; inodes are "old" if the disk knows them as living.
#[derive(Debug, Default)]
pub(crate) struct OrderedProtocol {
    /// Directories that are born, and where their names are.
    created_dirs: HashMap<u32, u32>,
    /// How deep they were made inside each other.
    depths: HashMap<u32, u32>,
    /// Old inodes that do not live any more: the stage in which they may die.
    dying: HashMap<u32, u32>,
    /// The earliest stage in which a directory may die: after what was in it.
    removal_stages: HashMap<u32, u32>,
    /// The largest of all depths and of all heights.
    max_depth: u32,
    max_height: u32,
    /// Old directories: what was done to their names.
    dirs: HashMap<u32, NameChanges>,
    /// Directories that were given names of old inodes from elsewhere, and those that lost them: the
    /// former must be written first.
    rename_targets: HashSet<u32>,
    rename_sources: HashSet<u32>,
    /// Directories that inodes left which go on living.
    link_sources: HashSet<u32>,
    /// Old inodes that were given names beside those they have.
    linked: HashSet<u32>,
    /// Inodes whose names were exchanged with those of their successors.
    swapped: HashSet<u32>,
    /// Nothing may be added.
    complete: bool,
}

/// What was done to the names of a directory.
#[derive(Clone, Copy, Debug, Default)]
struct NameChanges {
    /// Something other than taking names away.
    added: bool,
    /// Names were taken away.
    removed: bool,
}

impl OrderedProtocol {
    /// How many directories of this batch `dir` is inside of, itself among them.
    fn depth_of(&self, dir: InodeNumber) -> u32 {
        self.depths.get(&dir.0).copied().unwrap_or(0)
    }

    fn height_of(&self, dir: InodeNumber) -> u32 {
        self.removal_stages.get(&dir.0).copied().unwrap_or(0)
    }

    /// Whether the new name of what is old can be there before the old one goes.
    fn can_join_move(&self, batch: &Batch, &NameMove { inode, from, to }: &NameMove) -> bool {
        if from == to {
            return true;
        }
        if !batch.is_on_disk(inode) {
            // Directories that are born inside each other make stages.
            return self.depth_of(inode) == 0 || self.depth_of(to) == 0;
        }
        let circle = self.rename_targets.contains(&from.0) || self.rename_sources.contains(&to.0);
        !circle && batch.is_on_disk(to) && !self.linked.contains(&inode.0)
    }
}

impl CommitProtocol for OrderedProtocol {
    fn can_join_batch(&self, batch: &Batch, next: &Operation) -> bool {
        match next {
            Operation::Create { dir, is_directory } => {
                !is_directory || self.depth_of(*dir) < MAX_DIRECTORY_STAGES
            }
            Operation::Unlink { inode } => {
                !self.linked.contains(&inode.0) && !self.swapped.contains(&inode.0)
            }
            Operation::RemoveDirectory { inode } => {
                !self.link_sources.contains(&inode.0)
                    && self.height_of(*inode) < MAX_DIRECTORY_STAGES
            }
            Operation::Move(moved) => self.can_join_move(batch, moved),
            Operation::Replace { moved, victim } => {
                let is_ordered = !batch.is_on_disk(*victim)
                    || (batch.is_on_disk(moved.inode)
                        && !self.linked.contains(&victim.0)
                        && !self.link_sources.contains(&victim.0));
                is_ordered && self.can_join_move(batch, moved)
            }
            // Both are old under their old names before they are exchanged.
            Operation::Exchange { inodes, is_across } => {
                !is_across && inodes.iter().all(|inode| batch.is_on_disk(*inode))
            }
        }
    }

    fn requires_name_swap(&self, batch: &Batch, victim: InodeNumber) -> bool {
        batch.is_on_disk(victim)
    }

    fn lists_orphans(&self) -> bool {
        false
    }

    fn record(&mut self, batch: &Batch, intent: Effect) {
        match intent {
            Effect::Created { inode, parent: Some(parent) } => {
                let depth = self.depth_of(parent) + 1;
                self.max_depth = self.max_depth.max(depth);
                self.depths.insert(inode.0, depth);
                self.created_dirs.insert(inode.0, parent.0);
            }
            Effect::NameAdded { dir } if batch.is_on_disk(dir) => {
                self.dirs.entry(dir.0).or_default().added = true;
            }
            Effect::NameRemoved { dir } if batch.is_on_disk(dir) => {
                self.dirs.entry(dir.0).or_default().removed = true;
            }
            Effect::Linked { inode } if batch.is_on_disk(inode) => {
                self.linked.insert(inode.0);
            }
            Effect::LinkDropped { inode, dir } if batch.is_on_disk(inode) => {
                self.link_sources.insert(dir.0);
            }
            Effect::Moved(NameMove { inode, from, to })
                if from != to && batch.is_on_disk(inode) =>
            {
                self.rename_targets.insert(to.0);
                self.rename_sources.insert(from.0);
                self.link_sources.insert(from.0);
            }
            Effect::Reparented { dir, parent } => {
                self.created_dirs.entry(dir.0).and_modify(|known| *known = parent.0);
            }
            Effect::LastLinkDropped { inode, dir } if batch.is_on_disk(inode) => {
                let height = self.height_of(inode);
                let above = self.removal_stages.entry(dir.0).or_default();
                *above = (*above).max(height + 1);
                self.max_height = self.max_height.max(height + 1);
                self.dying.insert(inode.0, height);
            }
            Effect::Freed { inode } if batch.is_on_disk(inode) => {
                self.dying.insert(inode.0, self.height_of(inode));
                self.dirs.remove(&inode.0);
            }
            Effect::Freed { inode } => drop(self.created_dirs.remove(&inode.0)),
            Effect::NamesSwapped { victim } => drop(self.swapped.insert(victim.0)),
            Effect::NamesExchanged => self.complete = true,
            _ => {}
        }
    }

    fn is_complete(&self, _: &Batch) -> bool {
        self.complete
    }

    fn max_stages(&self) -> usize {
        (BASE_STAGES + self.max_depth + self.max_height) as usize
    }

    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        let recorded = std::mem::take(self);
        let directories = tx.make_updates_atomic(&recorded.dirs)?;
        tx.write_free_counts()?;
        let chain = tx.build_chain(&StagePlan::of(&recorded, &directories))?;
        debug_assert!(chain.stages.len() <= recorded.max_stages());
        Ok(chain)
    }
}
