//! The stages of a chain: each block as each stage leaves it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::plan::Plan;
use crate::blocks::data::Data;
use crate::blocks::overlay::{Buffer, State};
use crate::blocks::role::Role;
use crate::commit::outbox::After;
use crate::commit::protocol::{Chain, Stage};
use crate::format::slot::Change;
use crate::format::superblock::RawSuperblock;
use crate::transaction::Transaction;
use crate::units::index;
use crate::{FsBlock, InodeNumber, Result};

impl Transaction<'_> {
    /// The stages of the batch, none of them empty, and which one a sync waits for.
    pub(super) fn stages(&self, plan: &Plan) -> Result<Chain> {
        let mut stages: BTreeMap<u32, Stage> = BTreeMap::new();
        let mut last: Stage = Stage::new();
        let mut freed = false;
        let contents = self.dirty_contents();
        if !contents.is_empty() {
            stages.insert(0, contents);
        }
        let slots = self.slots(plan)?;
        let mut all = self.writer.batch.blocks.clone();
        all.sort_unstable();
        all.dedup();
        let blocks = self.volume.store.overlay.read();
        for block in all {
            let Some(buffer) = blocks.metadata.get(&block) else { continue };
            let now = buffer.now.clone();
            match (&buffer.state, buffer.role) {
                (State::Clean, _) => {}
                (State::Fresh, _) => drop(stages.entry(0).or_default().insert(block, now)),
                (State::Changed(base), Role::Superblock) => {
                    if let Some(features) = self.features_only(base, &now) {
                        stages.entry(0).or_default().insert(block, features);
                    }
                    last.insert(block, now);
                }
                (
                    State::Changed(_),
                    Role::Descriptors
                    | Role::Attributes
                    | Role::Orphans(_)
                    | Role::Quota
                    | Role::Contents,
                ) => {
                    last.insert(block, now);
                }
                (State::Changed(base), Role::BlockBitmap(_) | Role::InodeBitmap(_)) => {
                    let both: Box<[u8]> = base.iter().zip(now.iter()).map(|(a, b)| a | b).collect();
                    let frees = both[..] != now[..];
                    if both[..] != base[..] {
                        let both = if frees { Data::owned(both) } else { now.clone() };
                        stages.entry(0).or_default().insert(block, both);
                    }
                    if frees {
                        freed = true;
                        last.insert(block, now);
                    }
                }
                (State::Changed(base), Role::Inodes) => {
                    let slots = slots.get(&block).map(Vec::as_slice).unwrap_or_default();
                    for (stage, version) in self.versions(base, &now, slots) {
                        stages.entry(stage).or_default().insert(block, version);
                    }
                }
                (State::Changed(_), Role::Directory(dir)) => {
                    let stage = plan.dirs.get(&dir.inode).map_or(0, |(stage, _)| *stage);
                    stages.entry(stage).or_default().insert(block, now);
                }
                (State::Changed(_), Role::Map(file) | Role::Extents(file)) => {
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
        Ok(Chain { stages: all, needed, after: After::Needed })
    }

    /// The superblock with new features and nothing else: what needs them comes behind.
    fn features_only(&self, base: &Data, now: &Data) -> Option<Data> {
        let (_, at) = self.volume.super_.place();
        let new = RawSuperblock::view(now.get(at..)?).ok()?.features();
        let mut bytes = base.to_vec();
        let raw = RawSuperblock::view_mut(bytes.get_mut(at..)?).ok()?;
        if raw.features() == new {
            return None;
        }
        raw.set_features(new);
        Some(Data::owned(bytes.into_boxed_slice()))
    }

    /// The changed inodes by the blocks of their tables: place, and stage.
    fn slots(&self, plan: &Plan) -> Result<HashMap<u64, Vec<(usize, u32)>>> {
        let mut slots: HashMap<u64, Vec<(usize, u32)>> = HashMap::new();
        let batch = &self.writer.batch;
        for inode in &batch.inodes {
            let (block, at) = self.place(InodeNumber(*inode))?;
            let stage = if let Some(depth) = plan.depths.get(inode) {
                plan.births + depth
            } else if batch.born.contains(inode) {
                plan.births + plan.deepest
            } else if let Some(stage) = plan.deaths.get(inode) {
                *stage
            } else if let Some((stage, true)) = plan.dirs.get(inode) {
                *stage
            } else {
                // A file whose inode leads to other blocks than before waits for those.
                u32::from(self.inode_switches_blocks(block, at))
            };
            slots.entry(block.0).or_default().push((at, stage));
        }
        Ok(slots)
    }

    fn inode_switches_blocks(&self, block: FsBlock, at: usize) -> bool {
        let blocks = self.volume.store.overlay.read();
        let Some(Buffer { state: State::Changed(base), now, .. }) = blocks.metadata.get(&block.0)
        else {
            return false;
        };
        let part = at..at + index(self.volume.super_.inode_bytes.into());
        let old = base.get(part.clone()).unwrap_or_default();
        Change::new(old, now.get(part).unwrap_or_default()).is_of_blocks()
    }

    /// A block of an inode table as each stage leaves it.
    fn versions(&self, base: &Data, now: &Data, slots: &[(usize, u32)]) -> Vec<(u32, Data)> {
        let len = index(self.volume.super_.inode_bytes.into());
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
            versions.push((stage, Data::owned(version.clone().into_boxed_slice())));
        }
        versions
    }
}
