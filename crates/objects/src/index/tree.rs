//! B+ tree of immutable nodes, for reading.
//!
//! Law 1: changed nodes are written to new addresses, and so is the path to them (`edit`). Changed
//! inner nodes stay in memory until a checkpoint.
//! Law 2: a `Tree` never changes for its holder, whatever is applied to its clones.
//! Law 3: no leaf is empty; a tree without pairs has no root.
mod edit;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::entry::{Entry, Key};
use crate::index::leaf::Leaf;
pub(crate) use crate::index::node::{
    BlockPtr, Child, InnerNode, LoadedChild, MAX_TREE_LEVELS, Node, NodeMap, NodeRef, NodeSource,
    NodeStore,
};
use crate::{Error, Result};

/// Inclusive lower and exclusive upper bound.
type KeyRange = (Key, Option<Key>);

/// An immutable version of the tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    pub root: Option<Child>,
}

/// A leaf and its key range.
#[derive(Clone, Debug)]
pub(crate) struct BoundedLeaf {
    node: Arc<Node>,
    /// Inclusive lower bound.
    lower: Key,
    /// Exclusive upper bound.
    upper: Option<Key>,
}

#[allow(clippy::unreachable, reason = "`walk_to_leaf` returns only leaves")]
fn as_leaf(node: &Node) -> &Leaf {
    match node {
        Node::Leaf(leaf) => leaf,
        Node::Inner(_) => unreachable!("a leaf"),
    }
}

impl BoundedLeaf {
    pub fn leaf(&self) -> &Leaf {
        as_leaf(&self.node)
    }

    /// Returns the inclusive lower bound of the leaf's range.
    pub fn lower(&self) -> &Key {
        &self.lower
    }

    /// Returns its exclusive upper bound.
    pub fn upper(&self) -> Option<&Key> {
        self.upper.as_ref()
    }

    /// Returns true if `key` is in the leaf's range.
    pub fn is_key_in_range(&self, key: &[u8]) -> bool {
        self.lower.as_slice() <= key && self.upper.as_ref().is_none_or(|upper| key < upper)
    }
}

impl Tree {
    /// Descends to the leaf of `key`, or of the key just before it. `see` is called with each inner
    /// node on the way and the index of the next child.
    fn walk_to_leaf(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
        see: &mut dyn FnMut(&InnerNode, usize),
    ) -> Result<Option<Arc<Node>>> {
        let Some(root) = &self.root else { return Ok(None) };
        let mut step = |inner: &InnerNode| {
            let index =
                if is_before { inner.child_index_before(key) } else { inner.child_index(key) };
            see(inner, index);
            inner.load(nodes, index)
        };
        // A level is one less than its parent's, so this ends.
        let mut level = MAX_TREE_LEVELS + 1;
        let mut here = root.load(nodes)?;
        loop {
            here = match here {
                LoadedChild::Changed(inner) => {
                    level = inner.level;
                    step(&inner)?
                }
                LoadedChild::Disk(ptr, node) => {
                    if node.level() >= level {
                        return Err(Error::Corrupt { what: "a node's level", at_bytes: ptr.at });
                    }
                    level = node.level();
                    match &*node {
                        Node::Leaf(_) => return Ok(Some(node)),
                        Node::Inner(inner) => step(inner)?,
                    }
                }
            };
        }
    }

    /// The same; returns also the key range of the leaf, or of the unreadable node on the way to
    /// it.
    fn walk_to_leaf_with_range(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
    ) -> (Result<Option<Arc<Node>>>, KeyRange) {
        let (mut lower, mut upper) = (Key::new(), None);
        let node = self.walk_to_leaf(nodes, key, is_before, &mut |inner, index| {
            lower = inner.child(index).0.clone();
            if let Some((next, _)) = inner.children.get(index.saturating_add(1)) {
                upper = Some(next.clone());
            }
        });
        (node, (lower, upper))
    }

    fn descend(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
    ) -> Result<Option<BoundedLeaf>> {
        let (node, (lower, upper)) = self.walk_to_leaf_with_range(nodes, key, is_before);
        Ok(node?.map(|node| BoundedLeaf { node, lower, upper }))
    }

    /// Returns the key range of the unreadable node on the way to the leaf of `key`, or of the key
    /// just before it.
    pub fn unreadable_range(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
    ) -> KeyRange {
        // The walk ends at the node that fails.
        self.walk_to_leaf_with_range(nodes, key, is_before).1
    }

    /// Returns the leaf of `key`.
    pub fn find_leaf(&self, nodes: &dyn NodeSource, key: &[u8]) -> Result<Option<BoundedLeaf>> {
        self.descend(nodes, key, false)
    }

    /// Returns the leaf of the last key before `key`, if there is one.
    pub fn find_leaf_before(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
    ) -> Result<Option<BoundedLeaf>> {
        self.descend(nodes, key, true)
    }

    /// Descends to the parent of the leaf of `key`, or of the key just before it. `take` is called
    /// with the parent, the index of the leaf, and the leaf's exclusive upper bound. `None` if the
    /// root is a leaf.
    fn with_leaf_parent<T>(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
        take: impl FnOnce(&InnerNode, usize, Option<Key>) -> T,
    ) -> Result<Option<T>> {
        let Some(mut child) = self.root.clone() else { return Ok(None) };
        let (mut upper, mut level) = (None, MAX_TREE_LEVELS + 1);
        loop {
            let node;
            let inner = match &child {
                Child::Changed(inner) => &**inner,
                Child::Disk(ptr) => {
                    node = nodes.load(*ptr)?;
                    match &*node {
                        Node::Inner(inner) if inner.level < level => inner,
                        _ => return Ok(None),
                    }
                }
            };
            level = inner.level;
            let index =
                if is_before { inner.child_index_before(key) } else { inner.child_index(key) };
            if let Some((next, _)) = inner.children.get(index.saturating_add(1)) {
                upper = Some(next.clone());
            }
            if level == 1 {
                return Ok(Some(take(inner, index, upper)));
            }
            // Cloned before its owner is dropped.
            let below = inner.child(index).1.clone();
            child = below;
        }
    }

    /// Returns the pointer to the leaf of `key`, and the leaf's exclusive upper bound; `None` if
    /// the root is a leaf.
    pub fn leaf_ptr_of(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
    ) -> Result<Option<(BlockPtr, Option<Key>)>> {
        let place = self.with_leaf_parent(nodes, key, false, |inner, index, upper| {
            inner.child(index).1.disk_ptr().map(|ptr| (ptr, upper))
        })?;
        Ok(place.flatten())
    }

    /// Returns pointers to the leaf of `key` and its successors, or to the leaf before `key` and
    /// its predecessors: at most `count`, all with the same parent.
    pub fn leaves_from(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
        count: usize,
    ) -> Result<Vec<BlockPtr>> {
        let leaves = self.with_leaf_parent(nodes, key, is_before, |inner, index, _| {
            let place = |(_, child): &(Key, Child)| child.disk_ptr();
            match is_before {
                true => {
                    let before = inner.children.iter().take(index.saturating_add(1)).rev();
                    before.take(count).filter_map(place).collect()
                }
                false => inner.children.iter().skip(index).take(count).filter_map(place).collect(),
            }
        })?;
        Ok(leaves.unwrap_or_default())
    }

    pub fn get(&self, nodes: &dyn NodeSource, key: &[u8]) -> Result<Option<Entry>> {
        match self.walk_to_leaf(nodes, key, false, &mut |_, _| ())? {
            Some(node) => as_leaf(&node).get(key),
            None => Ok(None),
        }
    }

    /// Returns the first pair at or after `key`. `hint` is a leaf found before, and is updated.
    pub fn first_at_or_after(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        hint: &mut Option<BoundedLeaf>,
    ) -> Result<Option<(Key, Entry)>> {
        let mut key = Key::from_slice(key);
        loop {
            if !hint.as_ref().is_some_and(|found| found.is_key_in_range(&key)) {
                *hint = self.find_leaf(nodes, &key)?;
            }
            let Some(found) = hint else { return Ok(None) };
            if let Some(pair) = found.leaf().first_at_or_after(&key)? {
                return Ok(Some(pair));
            }
            match &found.upper {
                Some(upper) => key = upper.clone(),
                None => return Ok(None),
            }
        }
    }

    /// Returns the last pair before `key`; `hint` as in [`Tree::first_at_or_after`].
    pub fn last_before(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        hint: &mut Option<BoundedLeaf>,
    ) -> Result<Option<(Key, Entry)>> {
        let mut key = Key::from_slice(key);
        loop {
            let serves = |found: &BoundedLeaf| {
                found.lower < key && found.upper.as_ref().is_none_or(|upper| key <= *upper)
            };
            if !hint.as_ref().is_some_and(serves) {
                *hint = self.descend(nodes, &key, true)?;
            }
            let Some(found) = hint else { return Ok(None) };
            if let Some(pair) = found.leaf().last_before(&key)? {
                return Ok(Some(pair));
            }
            if found.lower.is_empty() || found.lower >= key {
                return Ok(None);
            }
            key = found.lower.clone();
        }
    }

    /// Returns true if the node at `at` on `level` that begins with `key` belongs to the tree.
    pub fn has_node(&self, nodes: &dyn NodeSource, key: &[u8], level: u8, at: u64) -> Result<bool> {
        let Some(root) = &self.root else { return Ok(false) };
        let mut child = root.clone();
        loop {
            child = match child {
                Child::Changed(inner) if inner.level > level => {
                    inner.child(inner.child_index(key)).1.clone()
                }
                Child::Changed(_) => return Ok(false),
                Child::Disk(ptr) if ptr.at == at => return Ok(true),
                Child::Disk(ptr) => match &*nodes.load(ptr)? {
                    Node::Inner(inner) if inner.level > level => {
                        inner.child(inner.child_index(key)).1.clone()
                    }
                    _ => return Ok(false),
                },
            };
        }
    }
}
