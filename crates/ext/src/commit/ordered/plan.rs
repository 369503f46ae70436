//! Which stage of the chain each inode and each directory belongs to.

use std::collections::HashMap;

use super::Ordered;
use super::directories::Arranged;

/// Which stage everything of a recorded belongs to.
#[derive(Debug)]
pub(super) struct Plan {
    /// Old directories: when, and whether their inodes lead to new blocks then.
    pub(super) dirs: HashMap<u32, (u32, bool)>,
    /// The first stage of inodes that are born.
    pub(super) births: u32,
    /// Old inodes that die, and when.
    pub(super) deaths: HashMap<u32, u32>,
    /// How deep a directory lies below the last one that lives on disk.
    pub(super) depths: HashMap<u32, u32>,
    /// How many stages the births of directories take.
    pub(super) deepest: u32,
}

impl Plan {
    pub(super) fn of(recorded: &Ordered, arranged: &HashMap<u32, Arranged>) -> Self {
        let after_deaths = recorded.dying.values().max().map_or(0, |height| height + 1);
        let base = |dir: &Arranged| match dir {
            Arranged { switches: true, .. } => after_deaths.max(1),
            Arranged { removes: true, .. } => after_deaths,
            _ => 0,
        };
        let mut dirs: HashMap<u32, (u32, bool)> =
            arranged.iter().map(|(dir, it)| (*dir, (base(it), it.switches))).collect();
        let received = dirs
            .iter()
            .filter(|(dir, _)| recorded.receivers.contains(dir))
            .map(|(_, (stage, _))| stage + 1)
            .max();
        for (dir, (stage, _)) in &mut dirs {
            if recorded.givers.contains(dir) && !recorded.receivers.contains(dir) {
                *stage = (*stage).max(received.unwrap_or(0));
            }
        }
        let named = dirs.values().map(|(stage, _)| stage + 1).max().unwrap_or(0);
        let mut depths = HashMap::new();
        for dir in recorded.born_dirs.keys() {
            depth(*dir, recorded, &mut depths);
        }
        let deepest = depths.values().map(|depth| depth + 1).max().unwrap_or(0);
        Self { dirs, births: named.max(1), deaths: recorded.dying.clone(), depths, deepest }
    }
}

/// How many directories that are born in this recorded lie around this one.
fn depth(dir: u32, recorded: &Ordered, known: &mut HashMap<u32, u32>) -> u32 {
    let mut chain = vec![dir];
    let mut at = dir;
    // Never longer than there are directories: a tree has no circle.
    let above = loop {
        if let Some(depth) = known.get(&at) {
            chain.pop();
            break depth + 1;
        }
        match recorded.born_dirs.get(&at) {
            Some(parent) if recorded.born_dirs.contains_key(parent) && !chain.contains(parent) => {
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
