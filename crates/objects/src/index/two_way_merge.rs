//! Merge of two memtables, a few pairs at a time.
//!
//! Law: hidden entries of the older one are reported once.
use std::cmp::Ordering;
use std::sync::Arc;

use super::memtable::ImmutableMemtable;
use crate::entry::{DecodedKey, Entry, Key, PayloadRef, decode_key, extent_key};

/// Merge of two memtables, a few pairs at a time.
#[derive(Debug)]
pub(crate) struct TwoWayMerge {
    newer: Arc<ImmutableMemtable>,
    older: Arc<ImmutableMemtable>,
    /// The next pair of each.
    new: usize,
    old: usize,
    /// Rest of the older one's interval at `old`.
    rest: Option<(Key, Entry)>,
    into: ImmutableMemtable,
}

impl ImmutableMemtable {
    /// Merges `newer` over `older`; `dead` is called with hidden payloads of the older one.
    pub fn merge(newer: &Arc<Self>, older: &Arc<Self>, dead: &mut dyn FnMut(&PayloadRef)) -> Self {
        let mut fold = TwoWayMerge::new(newer.clone(), older.clone());
        while !fold.step(usize::MAX, dead) {}
        fold.finish()
    }
}

impl TwoWayMerge {
    pub fn new(newer: Arc<ImmutableMemtable>, older: Arc<ImmutableMemtable>) -> Self {
        let into = ImmutableMemtable::with_merge_capacity(&newer, &older);
        Self { newer, older, new: 0, old: 0, rest: None, into }
    }

    /// Returns the number of pairs of both.
    pub fn remaining_pairs(&self) -> usize {
        self.newer.pairs.len().saturating_add(self.older.pairs.len())
    }

    /// Merges so many pairs; returns true if all are done.
    pub fn step(&mut self, pairs: usize, dead: &mut dyn FnMut(&PayloadRef)) -> bool {
        let is_done = self.merge_up_to(pairs, dead);
        self.into.index_new_pairs();
        is_done
    }

    fn merge_up_to(&mut self, pairs: usize, dead: &mut dyn FnMut(&PayloadRef)) -> bool {
        for _ in 0..pairs {
            let old = self.rest.as_ref().or_else(|| self.older.pairs.get(self.old));
            let new = self.newer.pairs.get(self.new);
            let side = match (old, new) {
                (None, None) => return true,
                (Some(_), None) => MergeAction::Old,
                (None, Some(_)) => MergeAction::New,
                (Some(old), Some(new)) => next_merge_action(old, new),
            };
            match side {
                MergeAction::New => {
                    new.into_iter().for_each(|new| self.into.push(copy_pair(new)));
                    self.new = self.new.saturating_add(1);
                }
                MergeAction::Old => {
                    let pair = self.take_older_pair();
                    self.into.push(pair);
                }
                MergeAction::Hidden => {
                    if let (_, Entry::Data(data)) = self.take_older_pair() {
                        dead(&data);
                    }
                }
                MergeAction::Before(len) => {
                    let (before, behind) = split_pair(self.take_older_pair(), len);
                    self.into.push(before);
                    self.rest = Some(behind);
                    self.old = self.old.saturating_sub(1);
                }
                MergeAction::HiddenBefore(len) => {
                    let (hidden, behind) = split_pair(self.take_older_pair(), len);
                    if let (_, Entry::Data(data)) = hidden {
                        dead(&data);
                    }
                    self.rest = Some(behind);
                    self.old = self.old.saturating_sub(1);
                }
            }
        }
        false
    }

    #[allow(clippy::indexing_slicing, reason = "`merge_up_to` has seen that a pair is left")]
    fn take_older_pair(&mut self) -> (Key, Entry) {
        let pair = self.rest.take().unwrap_or_else(|| copy_pair(&self.older.pairs[self.old]));
        self.old = self.old.saturating_add(1);
        pair
    }

    /// Returns the merged pairs so far.
    pub fn merged_pairs(&self) -> &[(Key, Entry)] {
        &self.into.pairs
    }

    /// Returns the result after [`TwoWayMerge::step`] returned true.
    pub fn finish(mut self) -> ImmutableMemtable {
        let pairs = &mut self.into.pairs;
        if pairs.len() < (pairs.capacity() / 4).saturating_mul(3) {
            pairs.shrink_to_fit();
        }
        self.into
    }
}

/// Next item of a merge.
enum MergeAction {
    New,
    Old,
    /// The older one, which the newer one hides.
    Hidden,
    /// So many bytes of the older one, which the newer one does not hide.
    Before(u64),
    /// So many bytes of the older one, which the newer one hides.
    HiddenBefore(u64),
}

fn next_merge_action(old: &(Key, Entry), new: &(Key, Entry)) -> MergeAction {
    match (decode_key(&old.0), decode_key(&new.0)) {
        (Some(DecodedKey::Extent(of, from)), Some(DecodedKey::Extent(id, at))) if of == id => {
            let (to, end) = (old.1.end_from(from), new.1.end_from(at));
            match () {
                () if to <= at => MergeAction::Old,
                () if end <= from => MergeAction::New,
                () if from < at => MergeAction::Before(at.saturating_sub(from)),
                () if to <= end => MergeAction::Hidden,
                () => MergeAction::HiddenBefore(end.saturating_sub(from)),
            }
        }
        _ => match old.0.cmp(&new.0) {
            Ordering::Less => MergeAction::Old,
            Ordering::Equal => MergeAction::Hidden,
            Ordering::Greater => MergeAction::New,
        },
    }
}

/// Copies a pair: short keys as a whole, where `clone` copies byte by byte.
fn copy_pair((key, entry): &(Key, Entry)) -> (Key, Entry) {
    (Key::from_slice(key), entry.clone())
}

/// Splits an interval after `len` bytes.
fn split_pair((key, entry): (Key, Entry), len: u64) -> ((Key, Entry), (Key, Entry)) {
    let Some(DecodedKey::Extent(id, at)) = decode_key(&key) else {
        return ((key.clone(), entry.clone()), (key, entry));
    };
    let rest = entry.part(len, entry.covered_bytes().saturating_sub(len));
    let behind = (extent_key(id, at.saturating_add(len)), rest);
    ((key, entry.part(0, len)), behind)
}
