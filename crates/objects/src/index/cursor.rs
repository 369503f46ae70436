//! Cursor over pairs, in both directions.
//!
//! A cursor merges all memtables, runs and the tree. For equal keys the newest entry wins. It does
//! not handle intervals.

use std::sync::Arc;

use crate::entry::{Entry, Key};
use crate::index::leaf::EncodedPairs;
use crate::index::memtable::{ImmutableMemtable, UnreadableRange};
use crate::index::tree::{BlockPtr, BoundedLeaf, Node, NodeMap, NodeRef, NodeSource, Tree};
use crate::index::view::View;
use crate::{Error, Result};

/// A position in an immutable view.
#[derive(Debug)]
pub(crate) struct Cursor {
    is_front: bool,
    /// Position in each memtable: the number of pairs before it.
    layers: Vec<usize>,
    /// Position in the tree; none where the tree ends.
    leaf: Option<LeafPosition>,
    /// Prefetched leaves; their number grows as the cursor advances.
    ahead: NodeMap,
    together: usize,
    /// Unreadable ranges of memtables within the bounds, not yet reported.
    lost: Vec<UnreadableRange>,
    /// All unreadable ranges within the bounds.
    unreadable_ranges: Vec<UnreadableRange>,
    /// A leaf that cannot be read, and the key at which the tree continues after it.
    broken: Option<(Error, Option<Key>)>,
}

/// Most leaves that are prefetched together.
const MAX_PREFETCHED_LEAVES: usize = 32;

/// A position in a leaf.
#[derive(Debug)]
struct LeafPosition {
    found: BoundedLeaf,
    pairs: EncodedPairs,
    /// Number of pairs before the position.
    place: usize,
}

impl Cursor {
    /// Returns a cursor before the first pair at or after `from`. It reports damage before `to`.
    pub fn forward(
        view: &View,
        nodes: &dyn NodeSource,
        (from, to): (&[u8], &[u8]),
    ) -> Result<Self> {
        Self::new(view, nodes, (from, to), true)
    }

    /// Returns a cursor after the last pair before `to`, which moves backwards, down to `from`.
    pub fn backward(
        view: &View,
        nodes: &dyn NodeSource,
        (from, to): (&[u8], &[u8]),
    ) -> Result<Self> {
        Self::new(view, nodes, (from, to), false)
    }

    fn new(
        view: &View,
        nodes: &dyn NodeSource,
        (from, to): (&[u8], &[u8]),
        is_front: bool,
    ) -> Result<Self> {
        let start = if is_front { from } else { to };
        let layers = view.layers.iter().map(|layer| layer.seek(start)).collect();
        let lost = view.layers.iter().flat_map(|layer| &layer.lost);
        let lost: Vec<UnreadableRange> =
            lost.filter(|lost| lost.overlaps(from, to)).cloned().collect();
        let mut cursor = Self {
            is_front,
            layers,
            leaf: None,
            ahead: NodeMap::new(),
            together: 1,
            unreadable_ranges: lost.clone(),
            lost,
            broken: None,
        };
        cursor.load_leaf(&view.tree, nodes, start);
        cursor.advance_leaf(&view.tree, nodes);
        Ok(cursor)
    }

    /// Moves to the leaf of `key`, or of the pair before it.
    fn load_leaf(&mut self, tree: &Tree, nodes: &dyn NodeSource, key: &[u8]) {
        let nodes = &PrefetchedNodeSource { nodes, ahead: &self.ahead };
        let found = match self.is_front {
            true => tree.find_leaf(nodes, key),
            false => tree.find_leaf_before(nodes, key),
        };
        match found.and_then(|found| leaf_position_of(found, key)) {
            Ok(leaf) => self.leaf = leaf,
            Err(error) => {
                self.leaf = None;
                let (lower, upper) = tree.unreadable_range(nodes, key, !self.is_front);
                let next = match self.is_front {
                    true => upper,
                    false => {
                        Some(lower).filter(|lower| !lower.is_empty() && lower.as_slice() < key)
                    }
                };
                self.broken = Some((error, next));
            }
        }
    }

    /// Returns the next visible pair of the view that the cursor was made for.
    pub fn next(&mut self, view: &View, nodes: &dyn NodeSource) -> Result<Option<(Key, Entry)>> {
        loop {
            if let Some((error, next)) = self.broken.take() {
                if let Some(next) = next {
                    self.load_leaf(&view.tree, nodes, &next);
                    self.advance_leaf(&view.tree, nodes);
                }
                return Err(error);
            }
            let mut best: Option<(&[u8], Option<&Entry>)> = None;
            for (layer, &place) in view.layers.iter().zip(&self.layers) {
                if let Some((key, entry)) = memtable_pair_at(layer, place, self.is_front)
                    && best.is_none_or(|(have, _)| self.is_before_in_order(key, have))
                {
                    best = Some((key, Some(entry)));
                }
            }
            if let Some(key) = self.current_tree_key()
                && best.is_none_or(|(have, _)| self.is_before_in_order(key, have))
            {
                best = Some((key, None));
            }
            let is_passed = |lost: &UnreadableRange| match (best, self.is_front) {
                (None, _) => true,
                (Some((key, _)), true) => key > lost.after.as_slice(),
                (Some((key, _)), false) => {
                    lost.before.as_ref().is_none_or(|before| key < before.as_slice())
                }
            };
            if let Some(nth) = self.lost.iter().position(is_passed) {
                return Err(self.lost.swap_remove(nth).error());
            }
            let Some((key, entry)) = best else { return Ok(None) };
            let entry = match (entry, &self.leaf) {
                (Some(entry), _) => entry.clone(),
                (None, Some(LeafPosition { pairs, place, .. })) => {
                    pairs.entry(place.saturating_sub(usize::from(!self.is_front)))?
                }
                (None, None) => return Ok(None),
            };
            let key = Key::from_slice(key);
            self.skip_key(view, nodes, &key);
            // An unreadable range may have hidden it.
            let is_sure = !self.unreadable_ranges.iter().any(|lost| lost.overlaps(&key, &key));
            if is_sure && !matches!(entry, Entry::Tombstone) {
                return Ok(Some((key, entry)));
            }
        }
    }

    fn is_before_in_order(&self, key: &[u8], than: &[u8]) -> bool {
        if self.is_front { key < than } else { key > than }
    }

    /// Skips `key` in all memtables and the tree.
    fn skip_key(&mut self, view: &View, nodes: &dyn NodeSource, key: &[u8]) {
        let is_front = self.is_front;
        let step = |place: &mut usize| {
            *place = if is_front { place.saturating_add(1) } else { place.saturating_sub(1) };
        };
        for (layer, place) in view.layers.iter().zip(&mut self.layers) {
            if memtable_pair_at(layer, *place, is_front).is_some_and(|(have, _)| have == key) {
                step(place);
            }
        }
        if self.current_tree_key() == Some(key)
            && let Some(stand) = &mut self.leaf
        {
            step(&mut stand.place);
            self.advance_leaf(&view.tree, nodes);
        }
    }

    fn current_tree_key(&self) -> Option<&[u8]> {
        let LeafPosition { pairs, place, .. } = self.leaf.as_ref()?;
        Some(pairs.key(place.saturating_sub(usize::from(!self.is_front))))
    }

    /// Prefetches the leaves from that of `key` on, if it is not prefetched.
    fn prefetch_leaves(&mut self, tree: &Tree, nodes: &dyn NodeSource, key: &[u8]) {
        // Unreadable leaves are left out; the step that needs one reports it.
        let next =
            tree.leaves_from(nodes, key, !self.is_front, MAX_PREFETCHED_LEAVES).unwrap_or_default();
        if next.first().is_some_and(|next| !self.ahead.contains_key(&next.sum)) {
            self.together = self.together.saturating_mul(2).min(MAX_PREFETCHED_LEAVES);
            self.ahead = nodes.prefetch(next.get(..self.together).unwrap_or(&next));
        }
    }

    /// Moves to the next leaf at the end of this one.
    fn advance_leaf(&mut self, tree: &Tree, nodes: &dyn NodeSource) {
        while let Some(LeafPosition { found, pairs, place }) = &self.leaf {
            let is_over = if self.is_front { *place == pairs.len() } else { *place == 0 };
            if !is_over {
                break;
            }
            let (lower, upper) = (found.lower().clone(), found.upper().cloned());
            let key = match (self.is_front, upper) {
                (true, Some(upper)) => upper,
                (false, _) if !lower.is_empty() => lower.clone(),
                _ => {
                    self.leaf = None;
                    break;
                }
            };
            self.prefetch_leaves(tree, nodes, &key);
            self.load_leaf(tree, nodes, &key);
            // A leaf without a predecessor is the first.
            let is_last = |next: &LeafPosition| !self.is_front && *next.found.lower() >= lower;
            if self.leaf.as_ref().is_some_and(is_last) {
                self.leaf = None;
            }
        }
    }
}

/// Node source with prefetched nodes.
struct PrefetchedNodeSource<'a> {
    nodes: &'a dyn NodeSource,
    ahead: &'a NodeMap,
}

impl NodeSource for PrefetchedNodeSource<'_> {
    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>> {
        match self.ahead.get(&ptr.sum) {
            Some(node) => Ok(node.clone()),
            None => self.nodes.load(ptr),
        }
    }

    fn load_via_ref(&self, ptr: BlockPtr, seen: &NodeRef) -> Result<Arc<Node>> {
        match self.ahead.get(&ptr.sum) {
            Some(node) => Ok(node.clone()),
            None => self.nodes.load_via_ref(ptr, seen),
        }
    }
}

fn leaf_position_of(found: Option<BoundedLeaf>, key: &[u8]) -> Result<Option<LeafPosition>> {
    let Some(found) = found else { return Ok(None) };
    let pairs = found.leaf().decode_pairs()?;
    let place = pairs.seek(key);
    Ok(Some(LeafPosition { found, pairs, place }))
}

fn memtable_pair_at(
    layer: &ImmutableMemtable,
    place: usize,
    is_front: bool,
) -> Option<(&[u8], &Entry)> {
    let index = if is_front { place } else { place.checked_sub(1)? };
    layer.pairs.get(index).map(|(key, entry)| (key.as_slice(), entry))
}
