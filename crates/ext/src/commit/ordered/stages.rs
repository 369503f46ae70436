//! Stages of a chain: the version of each block that each stage writes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::plan::StagePlan;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::commit::protocol::{Chain, Stage};
use crate::commit::queue::ChainDependency;
use crate::format::inode_slot::InodeDiff;
use crate::format::superblock::RawSuperblock;
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::{FsBlock, InodeNumber, Result};

impl Transaction<'_> {
    /// Builds the stages of the batch, none of them empty, and the stage that a sync waits for.
    pub(super) fn build_chain(&self, plan: &StagePlan) -> Result<Chain> {
        let mut stages: BTreeMap<u32, Stage> = BTreeMap::new();
        let mut last: Stage = Stage::new();
        let mut freed = false;
        let contents = self.collect_dirty_contents();
        if !contents.is_empty() {
            stages.insert(0, contents);
        }
        let slots = self.inode_stages(plan)?;
        let mut all = self.writer.batch.blocks.clone();
        all.sort_unstable();
        all.dedup();
        let blocks = self.volume.store.write_back.read();
        for block in all {
            let Some(buffer) = blocks.metadata.get(&block) else { continue };
            let now = buffer.current.clone();
            match (&buffer.state, buffer.role) {
                (BufferState::Clean, _) => {}
                (BufferState::New, _) => drop(stages.entry(0).or_default().insert(block, now)),
                (BufferState::Modified(base), Role::Superblock) => {
                    if let Some(features) = self.superblock_with_features(base, &now) {
                        stages.entry(0).or_default().insert(block, features);
                    }
                    last.insert(block, now);
                }
                (
                    BufferState::Modified(_),
                    Role::Descriptors
                    | Role::XattrBlock
                    | Role::OrphanFile(_)
                    | Role::Quota
                    | Role::Contents,
                ) => {
                    last.insert(block, now);
                }
                (BufferState::Modified(base), Role::BlockBitmap(_) | Role::InodeBitmap(_)) => {
                    let both: Box<[u8]> = base.iter().zip(now.iter()).map(|(a, b)| a | b).collect();
                    let frees = both[..] != now[..];
                    if both[..] != base[..] {
                        let both =
                            if frees { SharedBytes::from_owned_bytes(both) } else { now.clone() };
                        stages.entry(0).or_default().insert(block, both);
                    }
                    if frees {
                        freed = true;
                        last.insert(block, now);
                    }
                }
                (BufferState::Modified(base), Role::InodeTable) => {
                    let slots = slots.get(&block).map(Vec::as_slice).unwrap_or_default();
                    for (stage, version) in self.stage_versions(base, &now, slots) {
                        stages.entry(stage).or_default().insert(block, version);
                    }
                }
                (BufferState::Modified(_), Role::Directory(dir)) => {
                    let stage = plan.dirs.get(&dir.inode).map_or(0, |(stage, _)| *stage);
                    stages.entry(stage).or_default().insert(block, now);
                }
                (BufferState::Modified(_), Role::IndirectBlock(file) | Role::ExtentNode(file)) => {
                    let stage = plan.dirs.get(&file.inode).map_or(1, |(stage, _)| (*stage).max(1));
                    stages.entry(stage).or_default().insert(block, now);
                }
            }
        }
        drop(blocks);
        let mut all: Vec<Stage> = stages.into_values().collect();
        let mut needed = all.len().saturating_sub(1);
        if !last.is_empty() {
            match all.last_mut().filter(|_| !freed) {
                Some(stage) => stage.extend(last),
                None => all.push(last),
            }
            if all.len() == 1 {
                needed = 0;
            }
        }
        Ok(Chain { stages: all, sync_stage: needed, dependency: ChainDependency::PendingSync })
    }

    /// Returns the superblock with only its new features set; their users are written later.
    fn superblock_with_features(
        &self,
        base: &SharedBytes,
        now: &SharedBytes,
    ) -> Option<SharedBytes> {
        let (_, at) = self.volume.super_.location();
        let new = RawSuperblock::view(now.get(at..)?).ok()?.features();
        let mut bytes = base.to_vec();
        let raw = RawSuperblock::view_mut(bytes.get_mut(at..)?).ok()?;
        if raw.features() == new {
            return None;
        }
        raw.set_features(new);
        Some(SharedBytes::from_owned_bytes(bytes.into_boxed_slice()))
    }

    /// Returns the changed inodes by inode-table block: offset and stage.
    fn inode_stages(&self, plan: &StagePlan) -> Result<HashMap<u64, Vec<(usize, u32)>>> {
        let mut slots: HashMap<u64, Vec<(usize, u32)>> = HashMap::new();
        let batch = &self.writer.batch;
        for inode in &batch.inodes {
            let (block, at) = self.inode_location(InodeNumber(*inode))?;
            let stage = if let Some(depth) = plan.depths.get(inode) {
                plan.first_creation_stage + depth
            } else if batch.created_inodes.contains(inode) {
                plan.first_creation_stage + plan.creation_stages
            } else if let Some(stage) = plan.deletion_stages.get(inode) {
                *stage
            } else if let Some((stage, true)) = plan.dirs.get(inode) {
                *stage
            } else {
                // An inode that references new blocks is written after those.
                u32::from(self.has_new_blocks(block, at))
            };
            slots.entry(block.0).or_default().push((at, stage));
        }
        Ok(slots)
    }

    fn has_new_blocks(&self, block: FsBlock, at: usize) -> bool {
        let blocks = self.volume.store.write_back.read();
        let Some(Buffer { state: BufferState::Modified(base), current: now, .. }) =
            blocks.metadata.get(&block.0)
        else {
            return false;
        };
        let part = at..at + saturating_usize(self.volume.super_.inode_bytes.into());
        let old = base.get(part.clone()).unwrap_or_default();
        InodeDiff::new(old, now.get(part).unwrap_or_default()).changes_blocks()
    }

    /// Returns the versions of an inode-table block, one for each stage.
    fn stage_versions(
        &self,
        base: &SharedBytes,
        now: &SharedBytes,
        slots: &[(usize, u32)],
    ) -> Vec<(u32, SharedBytes)> {
        let len = saturating_usize(self.volume.super_.inode_bytes.into());
        let stages: BTreeSet<u32> = slots.iter().map(|(_, stage)| *stage).collect();
        if let (1, Some(stage)) = (stages.len(), stages.first()) {
            return vec![(*stage, now.clone())];
        }
        let mut version = base.to_vec();
        let mut versions = Vec::new();
        for stage in stages {
            for (at, _) in slots.iter().filter(|(_, of)| *of == stage) {
                let range = *at..*at + len;
                if let (Some(into), Some(from)) = (version.get_mut(range.clone()), now.get(range)) {
                    into.copy_from_slice(from);
                }
            }
            versions
                .push((stage, SharedBytes::from_owned_bytes(version.clone().into_boxed_slice())));
        }
        versions
    }
}
