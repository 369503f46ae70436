//! Pass 3: every directory is reached from the root, and knows its parent.

use super::Check;
use super::complaint::{Complaint, What};
use super::entries::Parents;

const ROOT: u32 = 2;

/// Checks all directories; the answer says which of them the root reaches.
pub(super) fn directories(check: &Check<'_>, parents: &Parents<'_>) -> Vec<u32> {
    let mut state = vec![State::Unknown; parents.directories.len()];
    let mut lost = Vec::new();
    for (place, dir) in parents.directories.iter().enumerate() {
        if !reached(parents, &mut state, place) {
            check.log.add(Complaint::new(What::Unconnected).inode(*dir));
            lost.push(*dir);
            continue;
        }
        let expected = if *dir == ROOT { Some(ROOT) } else { parents.parent(place) };
        let found = parents.dot_dot(place);
        // An entry `..` that is missing was told of already.
        if let Some(expected) = expected
            && found != 0
            && found != expected
        {
            let complaint = Complaint::new(What::Parent).inode(*dir);
            check.log.add(complaint.found(found).expected(expected));
        }
    }
    lost
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Unknown,
    OnTheWay,
    Reached,
    Lost,
}

/// Walks up until something is known; what was passed is then known, too. Each
/// directory is passed once.
fn reached(parents: &Parents<'_>, state: &mut [State], start: usize) -> bool {
    let mut passed = Vec::new();
    let mut at = Some(start);
    let end = loop {
        let Some(place) = at else { break State::Lost };
        if parents.directories.get(place) == Some(&ROOT) {
            break State::Reached;
        }
        match state.get(place).copied() {
            Some(State::Unknown) => {}
            Some(State::OnTheWay) | None => break State::Lost,
            Some(known) => break known,
        }
        if let Some(state) = state.get_mut(place) {
            *state = State::OnTheWay;
        }
        passed.push(place);
        at = parents.parent(place).and_then(|parent| parents.place(parent));
    };
    for place in passed {
        if let Some(state) = state.get_mut(place) {
            *state = end;
        }
    }
    end == State::Reached
}
