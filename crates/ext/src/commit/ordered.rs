//! Ordered commits without a journal: a power cut leaves nothing that `e2fsck -p` asks about.
//!
//! ```text
//!   stage 0      file data; new map, directory and xattr blocks; bitmaps with new allocations;
//!                new feature bits; deleted files
//!   then         deleted directories, children before parents
//!   then         old directories: targets of renames, then their sources
//!   then         created inodes, parent directories first; pointers of old files
//!   last         bitmaps without freed blocks and inodes; all counts
//! ```
//! Empty stages are omitted: an overwrite has one stage, a new file in an old directory two.
//!
//! Law 1: an inode is in use on disk only while a durable name references it. A cut may leave names
//! of unused inodes, which `e2fsck -p` clears without a question; it asks about the opposite.
//! Law 2: a directory changes by one sector. If several of its sectors changed, the blocks are
//! written to new places, and the inode, which is in one sector, switches to them. (Without space
//! for that, they are written in place.)
//! Law 3: a block is durable before an inode references it, and bitmaps never show a block as free
//! that anything on disk references.
//! Law 4: if one chain cannot express an order, the protocol closes the batch and uses two chains.
//!
//! Therefore a power cut can leave: used marks of free blocks and inodes, wrong counts, names of
//! unused inodes, and sizes rounded up to the end of the last block. Three changes need more than
//! one sector; cut off, they leave what `e2fsck` asks about: a directory moved to another parent
//! (two names, or a wrong `..`), an exchange across directories, and the release of an xattr block
//! that another inode shares. After a rename from another directory over a file, the file may be
//! gone while the new one has its old name.

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

/// Unit that a disk writes atomically.
const SECTOR_BYTES: usize = 512;
/// Limit of stages that nested creations or removals of directories may add to one chain.
const MAX_DIRECTORY_STAGES: u32 = 32;
/// Stages of a chain without nested creations or removals of directories.
const BASE_STAGES: u32 = 5;

/// Recorded facts of a batch; an "old" inode is in use on disk.
#[derive(Debug, Default)]
pub(crate) struct OrderedProtocol {
    /// Created directories and their parents.
    created_dirs: HashMap<u32, u32>,
    /// Nesting depth of the created directories.
    depths: HashMap<u32, u32>,
    /// Old inodes that are deleted, and the stage of the deletion.
    dying: HashMap<u32, u32>,
    /// Earliest stage in which a directory may be deleted: after its children.
    removal_stages: HashMap<u32, u32>,
    /// Maximum of all depths and of all heights.
    max_depth: u32,
    max_height: u32,
    /// Changes to the names of old directories.
    dirs: HashMap<u32, NameChanges>,
    /// Directories that renamed inodes moved into and out of: the targets are written first.
    rename_targets: HashSet<u32>,
    rename_sources: HashSet<u32>,
    /// Directories that lost a name of an inode that stays in use.
    link_sources: HashSet<u32>,
    /// Old inodes that got a further link.
    linked: HashSet<u32>,
    /// Inodes whose names were swapped with their replacements.
    swapped: HashSet<u32>,
    /// True if nothing may join the batch.
    complete: bool,
}

/// Changes to the names of a directory.
#[derive(Clone, Copy, Debug, Default)]
struct NameChanges {
    /// True if there are changes other than removals.
    added: bool,
    /// True if names were removed.
    removed: bool,
}

impl OrderedProtocol {
    /// Returns the number of directories of this batch that contain `dir`, including itself.
    fn directory_depth(&self, dir: InodeNumber) -> u32 {
        self.depths.get(&dir.0).copied().unwrap_or(0)
    }

    fn directory_height(&self, dir: InodeNumber) -> u32 {
        self.removal_stages.get(&dir.0).copied().unwrap_or(0)
    }

    /// Returns true if the new name of an old inode can be written before the old one is removed.
    fn can_join_move(&self, batch: &Batch, &NameMove { inode, from, to }: &NameMove) -> bool {
        if from == to {
            return true;
        }
        if !batch.is_on_disk(inode) {
            // Nested new directories need a stage each.
            return self.directory_depth(inode) == 0 || self.directory_depth(to) == 0;
        }
        let circle = self.rename_targets.contains(&from.0) || self.rename_sources.contains(&to.0);
        !circle && batch.is_on_disk(to) && !self.linked.contains(&inode.0)
    }
}

impl CommitProtocol for OrderedProtocol {
    fn can_join_batch(&self, batch: &Batch, next: &Operation) -> bool {
        match next {
            Operation::Create { dir, is_directory } => {
                !is_directory || self.directory_depth(*dir) < MAX_DIRECTORY_STAGES
            }
            Operation::Unlink { inode } => {
                !self.linked.contains(&inode.0) && !self.swapped.contains(&inode.0)
            }
            Operation::RemoveDirectory { inode } => {
                !self.link_sources.contains(&inode.0)
                    && self.directory_height(*inode) < MAX_DIRECTORY_STAGES
            }
            Operation::Move(moved) => self.can_join_move(batch, moved),
            Operation::Replace { moved, victim } => {
                let is_ordered = !batch.is_on_disk(*victim)
                    || (batch.is_on_disk(moved.inode)
                        && !self.linked.contains(&victim.0)
                        && !self.link_sources.contains(&victim.0));
                is_ordered && self.can_join_move(batch, moved)
            }
            // Both inodes have their old names on disk before the exchange.
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

    fn record_effect(&mut self, batch: &Batch, intent: Effect) {
        match intent {
            Effect::Created { inode, parent: Some(parent) } => {
                let depth = self.directory_depth(parent) + 1;
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
                let height = self.directory_height(inode);
                let above = self.removal_stages.entry(dir.0).or_default();
                *above = (*above).max(height + 1);
                self.max_height = self.max_height.max(height + 1);
                self.dying.insert(inode.0, height);
            }
            Effect::Freed { inode } if batch.is_on_disk(inode) => {
                self.dying.insert(inode.0, self.directory_height(inode));
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

    fn build_next_chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        let recorded = std::mem::take(self);
        let directories = tx.make_updates_atomic(&recorded.dirs)?;
        tx.write_free_counts()?;
        let chain = tx.build_chain(&StagePlan::from_recorded(&recorded, &directories))?;
        debug_assert!(chain.stages.len() <= recorded.max_stages());
        Ok(chain)
    }
}
