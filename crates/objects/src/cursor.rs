//! Pairs one after the other, from either end.
//!
//! A cursor stands in every layer and in the tree; of what it stands at, the first is next,
//! and of one key the newest counts. Not for intervals.

use std::sync::Arc;

use crate::Result;
use crate::entry::{Entry, Key};
use crate::layer::Layer;
use crate::leaf::Pairs;
use crate::tree::{Found, Loaded, Node, Nodes, Ptr, Tree};
use crate::view::View;

/// A place in a view that does not change.
#[derive(Debug)]
pub(crate) struct Cursor {
    is_front: bool,
    /// In each layer: pairs before the place.
    layers: Vec<usize>,
    /// The leaf of the place; none where the tree ends.
    leaf: Option<Stand>,
    /// Leaves behind this one, which were read with it: the more, the longer it goes on.
    ahead: Loaded,
    together: usize,
}

/// The most leaves that are asked for together.
const TOGETHER_MAX: usize = 32;

/// A place in a leaf.
#[derive(Debug)]
struct Stand {
    found: Found,
    pairs: Pairs,
    /// Pairs before the place.
    place: usize,
}

impl Cursor {
    /// A cursor before the first pair at `from` or behind it.
    pub fn at(view: &View, nodes: &dyn Nodes, from: &[u8]) -> Result<Self> {
        let layers = view.layers.iter().map(|layer| layer.seek(from)).collect();
        let leaf = stand(view.tree.leaf_of(nodes, from)?, from)?;
        let mut cursor = Self { is_front: true, layers, leaf, ahead: Loaded::new(), together: 1 };
        cursor.settle(&view.tree, nodes)?;
        Ok(cursor)
    }

    /// A cursor behind the last pair before `to`, which goes backwards.
    pub fn before(view: &View, nodes: &dyn Nodes, to: &[u8]) -> Result<Self> {
        let layers = view.layers.iter().map(|layer| layer.seek(to)).collect();
        let leaf = stand(view.tree.leaf_before(nodes, to)?, to)?;
        let mut cursor = Self { is_front: false, layers, leaf, ahead: Loaded::new(), together: 1 };
        cursor.settle(&view.tree, nodes)?;
        Ok(cursor)
    }

    /// The next pair that nothing hides, in the view that the cursor was made for.
    pub fn next(&mut self, view: &View, nodes: &dyn Nodes) -> Result<Option<(Key, Entry)>> {
        loop {
            let mut best: Option<(&[u8], Option<&Entry>)> = None;
            for (layer, &place) in view.layers.iter().zip(&self.layers) {
                if let Some((key, entry)) = at(layer, place, self.is_front)
                    && best.is_none_or(|(have, _)| self.is_sooner(key, have))
                {
                    best = Some((key, Some(entry)));
                }
            }
            if let Some(key) = self.tree_key()
                && best.is_none_or(|(have, _)| self.is_sooner(key, have))
            {
                best = Some((key, None));
            }
            let Some((key, entry)) = best else { return Ok(None) };
            let entry = match (entry, &self.leaf) {
                (Some(entry), _) => entry.clone(),
                (None, Some(Stand { pairs, place, .. })) => {
                    pairs.entry(place.saturating_sub(usize::from(!self.is_front)))?
                }
                (None, None) => return Ok(None),
            };
            let key = Key::from_slice(key);
            self.go_on(view, nodes, &key)?;
            if !matches!(entry, Entry::Gone) {
                return Ok(Some((key, entry)));
            }
        }
    }

    fn is_sooner(&self, key: &[u8], than: &[u8]) -> bool {
        if self.is_front { key < than } else { key > than }
    }

    /// Leaves `key` behind, wherever it is.
    fn go_on(&mut self, view: &View, nodes: &dyn Nodes, key: &[u8]) -> Result<()> {
        let is_front = self.is_front;
        let step = |place: &mut usize| {
            *place = if is_front { place.saturating_add(1) } else { place.saturating_sub(1) };
        };
        for (layer, place) in view.layers.iter().zip(&mut self.layers) {
            if at(layer, *place, is_front).is_some_and(|(have, _)| have == key) {
                step(place);
            }
        }
        if self.tree_key() == Some(key)
            && let Some(stand) = &mut self.leaf
        {
            step(&mut stand.place);
            self.settle(&view.tree, nodes)?;
        }
        Ok(())
    }

    fn tree_key(&self) -> Option<&[u8]> {
        let Stand { pairs, place, .. } = self.leaf.as_ref()?;
        Some(pairs.key(place.saturating_sub(usize::from(!self.is_front))))
    }

    /// Reads what comes from the leaf of `key` on, if that is not there.
    fn look_ahead(&mut self, tree: &Tree, nodes: &dyn Nodes, key: &[u8]) -> Result<()> {
        let next = tree.leaves_from(nodes, key, !self.is_front, TOGETHER_MAX)?;
        if next.first().is_some_and(|next| !self.ahead.contains_key(&next.sum)) {
            self.together = self.together.saturating_mul(2).min(TOGETHER_MAX);
            self.ahead = nodes.load_together(next.get(..self.together).unwrap_or(&next));
        }
        Ok(())
    }

    /// Goes to the next leaf where this one is at its end.
    fn settle(&mut self, tree: &Tree, nodes: &dyn Nodes) -> Result<()> {
        while let Some(Stand { found, pairs, place }) = &self.leaf {
            let is_over = if self.is_front { *place == pairs.len() } else { *place == 0 };
            if !is_over {
                break;
            }
            let (lower, upper) = (found.lower().clone(), found.upper().cloned());
            let key = match (self.is_front, &upper) {
                (true, Some(upper)) => upper,
                (false, _) if !lower.is_empty() => &lower,
                _ => {
                    self.leaf = None;
                    break;
                }
            };
            self.look_ahead(tree, nodes, key)?;
            let nodes = &WithAhead { nodes, ahead: &self.ahead };
            let next = match self.is_front {
                true => tree.leaf_of(nodes, key)?,
                // A leaf without one before it is the first.
                false => tree.leaf_before(nodes, key)?.filter(|next| *next.lower() < lower),
            };
            self.leaf = stand(next, key)?;
        }
        Ok(())
    }
}

/// Nodes, some of which are here.
struct WithAhead<'a> {
    nodes: &'a dyn Nodes,
    ahead: &'a Loaded,
}

impl Nodes for WithAhead<'_> {
    fn load(&self, ptr: Ptr) -> Result<Arc<Node>> {
        match self.ahead.get(&ptr.sum) {
            Some(node) => Ok(node.clone()),
            None => self.nodes.load(ptr),
        }
    }
}

fn stand(found: Option<Found>, key: &[u8]) -> Result<Option<Stand>> {
    let Some(found) = found else { return Ok(None) };
    let pairs = found.leaf().unfold()?;
    let place = pairs.seek(key);
    Ok(Some(Stand { found, pairs, place }))
}

fn at(layer: &Layer, place: usize, is_front: bool) -> Option<(&[u8], &Entry)> {
    let index = if is_front { place } else { place.checked_sub(1)? };
    layer.pairs.get(index).map(|(key, entry)| (key.as_slice(), entry))
}
