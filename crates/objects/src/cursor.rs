//! Pairs one after the other, from either end.
//!
//! A cursor stands in every layer and in the tree; of what it stands at, the first is next,
//! and of one key the newest counts. Not for intervals.

use crate::Result;
use crate::entry::{Entry, Key};
use crate::layer::Layer;
use crate::leaf::Pairs;
use crate::tree::{Found, Nodes, Tree};
use crate::view::View;

/// A place in a view that does not change.
#[derive(Debug)]
pub(crate) struct Cursor {
    is_front: bool,
    /// In each layer: pairs before the place.
    layers: Vec<usize>,
    /// The leaf of the place; none where the tree ends.
    leaf: Option<Stand>,
    /// Leaves that are expected behind this one: the more, the longer it goes on.
    expected: usize,
}

/// The most leaves that are asked for together.
const EXPECTED_MAX: usize = 32;

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
        let mut cursor = Self { is_front: true, layers, leaf, expected: 1 };
        cursor.settle(&view.tree, nodes)?;
        Ok(cursor)
    }

    /// A cursor behind the last pair before `to`, which goes backwards.
    pub fn before(view: &View, nodes: &dyn Nodes, to: &[u8]) -> Result<Self> {
        let layers = view.layers.iter().map(|layer| layer.seek(to)).collect();
        let leaf = stand(view.tree.leaf_before(nodes, to)?, to)?;
        let mut cursor = Self { is_front: false, layers, leaf, expected: 1 };
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
                    pairs.entry(*place - usize::from(!self.is_front))?
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
        let step = |place: &mut usize| if is_front { *place += 1 } else { *place -= 1 };
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
        Some(pairs.key(*place - usize::from(!self.is_front)))
    }

    /// Goes to the next leaf where this one is at its end.
    fn settle(&mut self, tree: &Tree, nodes: &dyn Nodes) -> Result<()> {
        while let Some(Stand { found, pairs, place }) = &self.leaf {
            let is_over = if self.is_front { *place == pairs.len() } else { *place == 0 };
            if !is_over {
                break;
            }
            let next = if self.is_front { found.upper() } else { Some(found.lower()) };
            if let Some(key) = next {
                self.expected = (self.expected * 2).min(EXPECTED_MAX);
                nodes.expect(&tree.leaves_from(nodes, key, !self.is_front, self.expected)?);
            }
            self.leaf = match (self.is_front, found.upper(), found.lower()) {
                (true, Some(upper), _) => stand(tree.leaf_of(nodes, upper)?, upper)?,
                (false, _, lower) if !lower.is_empty() => {
                    let next = tree.leaf_before(nodes, lower)?;
                    // A leaf without one before it is the first.
                    let next = next.filter(|next| next.lower() < lower);
                    stand(next, lower)?
                }
                _ => None,
            };
        }
        Ok(())
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
