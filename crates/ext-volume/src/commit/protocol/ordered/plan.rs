//! Assignment of inodes and directories to the stages of a chain.

use std::collections::{HashMap, HashSet};

use super::{NameChanges, OrderedProtocol};

/// Stage in which each recorded inode and directory is written.
#[derive(Debug)]
pub(super) struct StagePlan {
    /// Stage of each old directory, and true if its inode switches to new blocks then.
    pub(super) dirs: HashMap<u32, (u32, bool)>,
    /// First stage of created inodes.
    pub(super) first_creation_stage: u32,
    /// Stage of each deleted old inode.
    pub(super) deletion_stages: HashMap<u32, u32>,
    /// Nesting depth of created directories below one that is in use on disk.
    pub(super) depths: HashMap<u32, u32>,
    /// Number of stages for created directories.
    pub(super) creation_stages: u32,
}

impl StagePlan {
    pub(super) fn from_recorded(recorded: &OrderedProtocol, switched: &HashSet<u32>) -> Self {
        let after_deaths =
            recorded.dying.values().max().map_or(0, |height| height.saturating_add(1));
        // Blocks of stage 0 precede the inode or map that switches to them; deleted inodes precede
        // the removal of their names.
        let stage_of =
            |dir: &u32, names: &NameChanges| match (switched.contains(dir), names.removed) {
                (true, _) => (after_deaths.max(1), true),
                (false, true) => (after_deaths, false),
                (false, false) => (0, false),
            };
        let mut dirs: HashMap<u32, (u32, bool)> =
            recorded.dirs.iter().map(|(dir, names)| (*dir, stage_of(dir, names))).collect();
        let received = dirs
            .iter()
            .filter(|(dir, _)| recorded.rename_targets.contains(dir))
            .map(|(_, (stage, _))| stage.saturating_add(1))
            .max();
        for (dir, (stage, _)) in &mut dirs {
            if recorded.rename_sources.contains(dir) && !recorded.rename_targets.contains(dir) {
                *stage = (*stage).max(received.unwrap_or(0));
            }
        }
        let named = dirs.values().map(|(stage, _)| stage.saturating_add(1)).max().unwrap_or(0);
        let mut depths = HashMap::new();
        for dir in recorded.created_dirs.keys() {
            created_parent_count(*dir, recorded, &mut depths);
        }
        let deepest = depths.values().map(|depth| depth.saturating_add(1)).max().unwrap_or(0);
        Self {
            dirs,
            first_creation_stage: named.max(1),
            deletion_stages: recorded.dying.clone(),
            depths,
            creation_stages: deepest,
        }
    }
}

/// Returns the number of created directories above this one.
fn created_parent_count(
    dir: u32,
    recorded: &OrderedProtocol,
    known: &mut HashMap<u32, u32>,
) -> u32 {
    let mut chain = vec![dir];
    let mut at = dir;
    // Bounded by the number of directories, and cycles are cut.
    let above = loop {
        if let Some(depth) = known.get(&at) {
            chain.pop();
            break depth.saturating_add(1);
        }
        match recorded.created_dirs.get(&at) {
            Some(parent)
                if recorded.created_dirs.contains_key(parent) && !chain.contains(parent) =>
            {
                at = *parent;
                chain.push(at);
            }
            _ => break 0,
        }
    };
    for (nth, dir) in (above..).zip(chain.into_iter().rev()) {
        known.insert(dir, nth);
    }
    known.get(&dir).copied().unwrap_or(0)
}
