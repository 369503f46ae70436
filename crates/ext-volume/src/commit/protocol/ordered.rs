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
//! unused inodes, sizes rounded up to the end of the last block, and zeros in what a file was being
//! extended by. Three changes need more than one sector; cut off, they leave what `e2fsck` asks
//! about: a directory moved to another parent (two names, or a wrong `..`), an exchange across
//! directories, and the release of an xattr block that another inode shares. After a rename from
//! another directory over a file, the file may be gone while the new one has its old name.

mod plan;
mod stages;

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{CommitProtocol, NameChanges};
use crate::commit::batch::{Batch, Effect, NameMove, Operation};
use crate::commit::chain::Chain;
use crate::commit::changes::Changes;
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::superblock::Superblock;
use crate::units::saturating_usize;
use crate::{InodeNumber, Result};
use plan::StagePlan;

/// Limit of stages that nested creations or removals of directories may add to one chain.
const MAX_DIRECTORY_STAGES: u32 = 32;
/// Stages of a chain without nested creations or removals of directories.
const BASE_STAGES: u32 = 5;

/// Recorded facts of a batch; an "old" inode is in use on disk.
#[derive(Debug, Default)]
pub(crate) struct OrderedProtocol {
    inode_bytes: usize,
    /// Offset of the superblock in its block.
    superblock_offset: usize,
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

impl OrderedProtocol {
    /// Returns the protocol of a volume that write order alone keeps consistent; `None` for others.
    /// Checksums and balanced trees change more places at once than one write reaches; so do inline
    /// directories and EA inodes.
    pub(crate) fn for_volume(super_: &Superblock) -> Option<Self> {
        let beyond =
            Incompatible::EXTENTS.union(Incompatible::INLINE_DATA).union(Incompatible::EA_INODE);
        let extents = super_.incompatible.intersects(beyond);
        let sums = super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS);
        let (_, superblock_offset) = super_.location();
        let inode_bytes = saturating_usize(super_.inode_bytes.into());
        (!extents && !sums).then(|| Self { inode_bytes, superblock_offset, ..Self::default() })
    }

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
                let depth = self.directory_depth(parent).saturating_add(1);
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
                *above = (*above).max(height.saturating_add(1));
                self.max_height = self.max_height.max(height.saturating_add(1));
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
        BASE_STAGES.saturating_add(self.max_depth).saturating_add(self.max_height) as usize
    }

    fn single_sector_directories(&self) -> BTreeMap<u32, NameChanges> {
        self.dirs.iter().map(|(dir, names)| (*dir, *names)).collect()
    }

    fn build_chains(&mut self, changes: Changes<'_>) -> Result<Vec<Chain>> {
        let (inode_bytes, superblock_offset) = (self.inode_bytes, self.superblock_offset);
        let next = Self { inode_bytes, superblock_offset, ..Self::default() };
        let recorded = std::mem::replace(self, next);
        let plan = StagePlan::from_recorded(&recorded, &changes.switched_directories);
        let chains = recorded.build_stages(changes, &plan);
        debug_assert!(chains.iter().all(|chain| chain.stages.len() <= recorded.max_stages()));
        Ok(chains)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::uncached::read_superblock;
    use crate::testing::formatted_disk;

    #[test]
    fn write_order_suffices_for_plain_volumes_only() {
        let plain = read_superblock(&*formatted_disk(1024, 1 << 20)).unwrap();
        assert!(OrderedProtocol::for_volume(&plain).is_some());
        let mut extents = plain.clone();
        extents.incompatible |= Incompatible::EXTENTS;
        assert!(OrderedProtocol::for_volume(&extents).is_none());
        let mut checksums = plain;
        checksums.read_only_compatible |= ReadOnlyCompatible::METADATA_CSUM;
        assert!(OrderedProtocol::for_volume(&checksums).is_none());
    }
}
