//! Pass 3: every directory is reachable from the root, and its `..` is its parent.

use super::Check;
use super::entries::ParentTable;
use super::problem::{Problem, What};

const ROOT: u32 = 2;

/// Checks all directories; returns those unreachable from the root.
pub(super) fn check_connectivity(check: &Check<'_>, parents: &ParentTable<'_>) -> Vec<u32> {
    let mut state = vec![Reachability::Unknown; parents.directories.len()];
    let mut lost = Vec::new();
    for (place, dir) in parents.directories.iter().enumerate() {
        if !resolve(parents, &mut state, place) {
            check.problems.add(Problem::new(What::Unconnected).inode(*dir));
            lost.push(*dir);
            continue;
        }
        let expected = if *dir == ROOT { Some(ROOT) } else { parents.parent(place) };
        let found = parents.dot_dot_inode(place);
        // A missing `..` was reported already.
        if let Some(expected) = expected
            && found != 0
            && found != expected
        {
            let complaint = Problem::new(What::Parent).inode(*dir);
            check.problems.add(complaint.found(found).expected(expected));
        }
    }
    lost
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reachability {
    Unknown,
    Visiting,
    Reached,
    Unreachable,
}

/// Walks up to a directory with a known state, and assigns that state to the path. Each directory
/// is walked once.
fn resolve(parents: &ParentTable<'_>, state: &mut [Reachability], start: usize) -> bool {
    let mut passed = Vec::new();
    let mut at = Some(start);
    let end = loop {
        let Some(place) = at else { break Reachability::Unreachable };
        if parents.directories.get(place) == Some(&ROOT) {
            break Reachability::Reached;
        }
        match state.get(place).copied() {
            Some(Reachability::Unknown) => {}
            Some(Reachability::Visiting) | None => break Reachability::Unreachable,
            Some(known) => break known,
        }
        if let Some(state) = state.get_mut(place) {
            *state = Reachability::Visiting;
        }
        passed.push(place);
        at = parents.parent(place).and_then(|parent| parents.index_of(parent));
    };
    for place in passed {
        if let Some(state) = state.get_mut(place) {
            *state = end;
        }
    }
    end == Reachability::Reached
}
