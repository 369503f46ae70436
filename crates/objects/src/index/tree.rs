//! Everything that did not change lately: a B+ tree of immutable nodes, as it is read.
//!
//! Law 1: what changes is written elsewhere, and so is the path to it (`edit`). Inner nodes that
//! changed stay in memory until a checkpoint.
//! Law 2: a `Tree` is read as it was by its holders, whatever is applied to its clones.
//! Law 3: no leaf is empty; a tree without pairs has no root.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unreachable,
    reason = "decoding bounds what it reads, and no node is empty: places are found in the node itself"
)]

mod edit;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::entry::{Entry, Key};
use crate::index::leaf::Leaf;
pub(crate) use crate::index::node::{
    BlockPtr, Child, Inner, LEVELS_MAX, LoadedChild, Node, NodeMap, NodeRef, NodeSource, NodeStore,
};
use crate::{Error, Result};

/// The first key that something may have, and the first that it may not have.
type KeyRange = (Key, Option<Key>);

/// The tree, as of one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    pub root: Option<Child>,
}

/// A leaf and the keys that it may have.
#[derive(Clone, Debug)]
pub(crate) struct BoundedLeaf {
    node: Arc<Node>,
    /// First key that it may have.
    lower: Key,
    /// First key that it may not have.
    upper: Option<Key>,
}

fn leaf_in(node: &Node) -> &Leaf {
    match node {
        Node::Leaf(leaf) => leaf,
        // `walk` ends at leaves.
        Node::Inner(_) => unreachable!("a leaf"),
    }
}

impl BoundedLeaf {
    pub fn leaf(&self) -> &Leaf {
        leaf_in(&self.node)
    }

    /// First key that the leaf may have.
    pub fn lower(&self) -> &Key {
        &self.lower
    }

    /// First key that it may not have.
    pub fn upper(&self) -> Option<&Key> {
        self.upper.as_ref()
    }

    /// Whether `key` is looked for here.
    pub fn may_have(&self, key: &[u8]) -> bool {
        self.lower.as_slice() <= key && self.upper.as_ref().is_none_or(|upper| key < upper)
    }
}

impl Tree {
    /// Goes down to the leaf in which `key` is or would be, or what is just before it; `see`
    /// gets each inner node on the way, and which of its children is next.
    fn walk(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
        see: &mut dyn FnMut(&Inner, usize),
    ) -> Result<Option<Arc<Node>>> {
        let Some(root) = &self.root else { return Ok(None) };
        let mut step = |inner: &Inner| {
            let index = if is_before { inner.child_before(key) } else { inner.child_of(key) };
            see(inner, index);
            inner.load(nodes, index)
        };
        // A level is one less than its parent's, so this ends.
        let mut level = LEVELS_MAX + 1;
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

    /// The same; and what keys it may have, or the node that cannot be read on the way to it: the
    /// first, and the first that it may not have.
    fn walk_within(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
    ) -> (Result<Option<Arc<Node>>>, KeyRange) {
        let (mut lower, mut upper) = (Key::new(), None);
        let node = self.walk(nodes, key, is_before, &mut |inner, index| {
            lower = inner.children[index].0.clone();
            if let Some((next, _)) = inner.children.get(index + 1) {
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
        let (node, (lower, upper)) = self.walk_within(nodes, key, is_before);
        Ok(node?.map(|node| BoundedLeaf { node, lower, upper }))
    }

    /// What keys the node may have that cannot be read on the way to the leaf of `key`, or of
    /// what is just before it: the first, and the first that it may not have.
    pub fn unreadable(&self, nodes: &dyn NodeSource, key: &[u8], is_before: bool) -> KeyRange {
        // Ends where it fails, which it does.
        self.walk_within(nodes, key, is_before).1
    }

    /// The leaf in which `key` is or would be.
    pub fn leaf_of(&self, nodes: &dyn NodeSource, key: &[u8]) -> Result<Option<BoundedLeaf>> {
        self.descend(nodes, key, false)
    }

    /// The leaf in which the last key before `key` is, if there is one.
    pub fn leaf_before(&self, nodes: &dyn NodeSource, key: &[u8]) -> Result<Option<BoundedLeaf>> {
        self.descend(nodes, key, true)
    }

    /// Goes down as far as to the parent of the leaf in which `key` is or would be, or what is
    /// just before it: `take` gets the parent, which child the leaf is, and the first key that
    /// it may not have. `None` where the root is all there is.
    fn above_leaf<T>(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
        take: impl FnOnce(&Inner, usize, Option<Key>) -> T,
    ) -> Result<Option<T>> {
        let Some(mut child) = self.root.clone() else { return Ok(None) };
        let (mut upper, mut level) = (None, LEVELS_MAX + 1);
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
            let index = if is_before { inner.child_before(key) } else { inner.child_of(key) };
            if let Some((next, _)) = inner.children.get(index + 1) {
                upper = Some(next.clone());
            }
            if level == 1 {
                return Ok(Some(take(inner, index, upper)));
            }
            // Cloned before what it is in goes.
            let below = inner.children[index].1.clone();
            child = below;
        }
    }

    /// Where the leaf in which `key` is or would be lies, and the first key that it may not
    /// have; `None` where the root is all there is.
    pub fn place_of_leaf(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
    ) -> Result<Option<(BlockPtr, Option<Key>)>> {
        let place = self.above_leaf(nodes, key, false, |inner, index, upper| {
            inner.children[index].1.on_disk().map(|ptr| (ptr, upper))
        })?;
        Ok(place.flatten())
    }

    /// Where the leaf of `key` lies and those behind it, or the leaf of what is just before
    /// `key` and those before it; at most `count`, and no more than have one parent.
    pub fn leaves_from(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        is_before: bool,
        count: usize,
    ) -> Result<Vec<BlockPtr>> {
        let leaves = self.above_leaf(nodes, key, is_before, |inner, index, _| {
            let place = |(_, child): &(Key, Child)| child.on_disk();
            match is_before {
                true => {
                    inner.children[..=index].iter().rev().take(count).filter_map(place).collect()
                }
                false => inner.children[index..].iter().take(count).filter_map(place).collect(),
            }
        })?;
        Ok(leaves.unwrap_or_default())
    }

    pub fn get(&self, nodes: &dyn NodeSource, key: &[u8]) -> Result<Option<Entry>> {
        match self.walk(nodes, key, false, &mut |_, _| ())? {
            Some(node) => leaf_in(&node).get(key),
            None => Ok(None),
        }
    }

    /// The first pair at `key` or behind it. `hint` is a leaf that was found before, and is
    /// one that may help next time.
    pub fn at_or_after(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        hint: &mut Option<BoundedLeaf>,
    ) -> Result<Option<(Key, Entry)>> {
        let mut key = Key::from_slice(key);
        loop {
            if !hint.as_ref().is_some_and(|found| found.may_have(&key)) {
                *hint = self.leaf_of(nodes, &key)?;
            }
            let Some(found) = hint else { return Ok(None) };
            if let Some(pair) = found.leaf().at_or_after(&key)? {
                return Ok(Some(pair));
            }
            match &found.upper {
                Some(upper) => key = upper.clone(),
                None => return Ok(None),
            }
        }
    }

    /// The last pair before `key`; `hint` as in [`Tree::at_or_after`].
    pub fn before(
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
            if let Some(pair) = found.leaf().before(&key)? {
                return Ok(Some(pair));
            }
            if found.lower.is_empty() || found.lower >= key {
                return Ok(None);
            }
            key = found.lower.clone();
        }
    }

    /// Whether the node at `at` on `level` that begins with `key` belongs to the tree.
    pub fn has_node(&self, nodes: &dyn NodeSource, key: &[u8], level: u8, at: u64) -> Result<bool> {
        let Some(root) = &self.root else { return Ok(false) };
        let mut child = root.clone();
        loop {
            child = match child {
                Child::Changed(inner) if inner.level > level => {
                    inner.children[inner.child_of(key)].1.clone()
                }
                Child::Changed(_) => return Ok(false),
                Child::Disk(ptr) if ptr.at == at => return Ok(true),
                Child::Disk(ptr) => match &*nodes.load(ptr)? {
                    Node::Inner(inner) if inner.level > level => {
                        inner.children[inner.child_of(key)].1.clone()
                    }
                    _ => return Ok(false),
                },
            };
        }
    }
}
