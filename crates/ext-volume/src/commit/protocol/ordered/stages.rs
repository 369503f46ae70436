//! Stages of a chain: the version of each block that each stage writes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::OrderedProtocol;
use super::plan::StagePlan;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::commit::chain::{Chain, Stage};
use crate::commit::changes::{ChangedBlock, Changes};
use crate::format::inode_slot::InodeDiff;
use crate::format::superblock::RawSuperblock;

impl OrderedProtocol {
    /// Builds the chain of the batch; a sync waits for all but the frees.
    pub(super) fn build_stages(&self, changes: Changes<'_>, plan: &StagePlan) -> Vec<Chain> {
        let slots = self.inode_stages(&changes, plan);
        let mut stages: BTreeMap<u32, Stage> = BTreeMap::new();
        let mut last: Stage = Stage::new();
        let mut freed = false;
        if !changes.contents.is_empty() {
            stages.insert(0, changes.contents);
        }
        for ChangedBlock { block, role, base, current: now } in changes.blocks {
            let Some(base) = base else {
                stages.entry(0).or_default().insert(block, now);
                continue;
            };
            match role {
                Role::Superblock => {
                    if let Some(features) = self.superblock_with_features(&base, &now) {
                        stages.entry(0).or_default().insert(block, features);
                    }
                    last.insert(block, now);
                }
                Role::Descriptors
                | Role::XattrBlock
                | Role::OrphanFile(_)
                | Role::Quota
                | Role::Contents => {
                    last.insert(block, now);
                }
                Role::BlockBitmap(_) | Role::InodeBitmap(_) => {
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
                Role::InodeTable => {
                    let slots = slots.get(&block).map(Vec::as_slice).unwrap_or_default();
                    for (stage, version) in self.stage_versions(&base, &now, slots) {
                        stages.entry(stage).or_default().insert(block, version);
                    }
                }
                Role::Directory(dir) => {
                    let stage = plan.dirs.get(&dir.inode).map_or(0, |(stage, _)| *stage);
                    stages.entry(stage).or_default().insert(block, now);
                }
                Role::IndirectBlock(file) | Role::ExtentNode(file) => {
                    let stage = plan.dirs.get(&file.inode).map_or(1, |(stage, _)| (*stage).max(1));
                    stages.entry(stage).or_default().insert(block, now);
                }
            }
        }
        let mut stages: Vec<Stage> = stages.into_values().collect();
        let mut sync_stage = stages.len().saturating_sub(1);
        if !last.is_empty() {
            match stages.last_mut().filter(|_| !freed) {
                Some(stage) => stage.extend(last),
                None => stages.push(last),
            }
            if stages.len() == 1 {
                sync_stage = 0;
            }
        }
        if stages.is_empty() {
            return vec![];
        }
        vec![Chain { stages, sync_stage: Some(sync_stage), ..Chain::default() }]
    }

    /// Returns the superblock with only its new features set; their users are written later.
    fn superblock_with_features(
        &self,
        base: &SharedBytes,
        now: &SharedBytes,
    ) -> Option<SharedBytes> {
        let at = self.superblock_offset;
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
    fn inode_stages(
        &self,
        changes: &Changes<'_>,
        plan: &StagePlan,
    ) -> HashMap<u64, Vec<(usize, u32)>> {
        let mut slots: HashMap<u64, Vec<(usize, u32)>> = HashMap::new();
        for (inode, (block, at)) in &changes.batch.inodes {
            let stage = if let Some(depth) = plan.depths.get(inode) {
                plan.first_creation_stage.saturating_add(*depth)
            } else if changes.batch.created_inodes.contains(inode) {
                plan.first_creation_stage.saturating_add(plan.creation_stages)
            } else if let Some(stage) = plan.deletion_stages.get(inode) {
                *stage
            } else if let Some((stage, true)) = plan.dirs.get(inode) {
                *stage
            } else {
                // An inode that references new blocks is written after those.
                u32::from(self.has_new_blocks(changes, block.0, *at))
            };
            slots.entry(block.0).or_default().push((*at, stage));
        }
        slots
    }

    fn has_new_blocks(&self, changes: &Changes<'_>, block: u64, at: usize) -> bool {
        let Some(ChangedBlock { base: Some(base), current, .. }) = changes.block(block) else {
            return false;
        };
        let part = at..at.saturating_add(self.inode_bytes);
        let old = base.get(part.clone()).unwrap_or_default();
        InodeDiff::new(old, current.get(part).unwrap_or_default()).changes_blocks()
    }

    /// Returns the versions of an inode-table block, one for each stage.
    fn stage_versions(
        &self,
        base: &SharedBytes,
        now: &SharedBytes,
        slots: &[(usize, u32)],
    ) -> Vec<(u32, SharedBytes)> {
        let len = self.inode_bytes;
        let stages: BTreeSet<u32> = slots.iter().map(|(_, stage)| *stage).collect();
        if let (1, Some(stage)) = (stages.len(), stages.first()) {
            return vec![(*stage, now.clone())];
        }
        let mut version = base.to_vec();
        let mut versions = Vec::new();
        for stage in stages {
            for (at, _) in slots.iter().filter(|(_, of)| *of == stage) {
                let range = *at..at.saturating_add(len);
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
