//! Copy-on-write changes of the tree: changed nodes are new ones, and so is the path to them.
//!
//! Law: a replaced node is dead once its replacement is written. A failure leaves the tree
//! unchanged.

use std::sync::Arc;

use super::{BlockPtr, Child, InnerNode, Node, NodeStore, Tree};
use crate::entry::Key;
use crate::index::leaf::{EncodedPairs, LeafEdit};
use crate::{Error, Result};

impl Tree {
    /// Applies edits, sorted by key, each key once.
    pub fn apply(&mut self, nodes: &mut dyn NodeStore, edits: &[LeafEdit]) -> Result<()> {
        if edits.is_empty() {
            return Ok(());
        }
        let mut children = match self.root.take() {
            Some(root) => apply_to_child(nodes, root.clone(), &Key::new(), edits)
                .inspect_err(|_| self.root = Some(root))?,
            None => {
                let mut pairs = EncodedPairs::default();
                pairs.push_edits(edits);
                write_leaves(nodes, &Key::new(), &pairs)?
            }
        };
        let mut level = children.first().map_or(0, |(.., level)| *level);
        while children.len() > 1 {
            level = level.saturating_add(1);
            let list = children.into_iter().map(|(key, child, _)| (key, child)).collect();
            children = split_inner(nodes, level, list);
        }
        self.root = children.pop().map(|(_, child, _)| child);
        // A root with one child is replaced by the child.
        while let Some(Child::Changed(inner)) = &self.root
            && let [(_, only)] = inner.children.as_slice()
        {
            self.root = Some(only.clone());
        }
        Ok(())
    }

    /// Writes all changed inner nodes; returns the pointer to the root.
    pub fn write_changed(&mut self, nodes: &mut dyn NodeStore) -> Result<Option<BlockPtr>> {
        let Some(root) = &self.root else { return Ok(None) };
        let ptr = write_child(nodes, root)?;
        self.root = Some(Child::Disk(ptr));
        Ok(Some(ptr))
    }

    /// Moves the node at `at` that begins with `key` to a new address. The path to it becomes a
    /// changed one; an inner node is written at the next checkpoint.
    pub fn move_node(&mut self, nodes: &mut dyn NodeStore, key: &[u8], at: u64) -> Result<()> {
        let Some(root) = self.root.take() else { return Ok(()) };
        let moved =
            move_child(nodes, root.clone(), key, at).inspect_err(|_| self.root = Some(root))?;
        self.root = Some(moved);
        Ok(())
    }
}

/// Nodes that replace a child, with their level.
type Replacements = Vec<(Key, Child, u8)>;

/// Returns the replacements of a child after `edits`, which are all in its range.
fn apply_to_child(
    nodes: &mut dyn NodeStore,
    child: Child,
    lower: &Key,
    edits: &[LeafEdit],
) -> Result<Replacements> {
    let (mut inner, old) = match child {
        Child::Changed(inner) => (inner, None),
        Child::Disk(ptr) => {
            let node = nodes.load(ptr)?;
            match &*node {
                Node::Leaf(leaf) => {
                    let mut pairs = EncodedPairs::default();
                    pairs.merge(leaf, edits)?;
                    let leaves = write_leaves(nodes, lower, &pairs)?;
                    nodes.mark_dead(ptr);
                    return Ok(leaves);
                }
                Node::Inner(inner) => (Arc::new(inner.clone()), Some(ptr)),
            }
        }
    };
    let level = inner.level;
    let mut children: Vec<(Key, Child)> =
        Vec::with_capacity(inner.children.len().saturating_add(4));
    let inner = Arc::make_mut(&mut inner);
    let mut rest = edits;
    let old_children = std::mem::take(&mut inner.children);
    let mut bounds: Vec<Key> = old_children.iter().skip(1).map(|(key, _)| key.clone()).collect();
    bounds.reverse();
    for (key, child) in old_children {
        let count = match bounds.pop() {
            Some(upper) => rest.partition_point(|(key, _)| *key < upper),
            None => rest.len(),
        };
        let (mine, others) = rest.split_at(count);
        rest = others;
        if mine.is_empty() {
            children.push((key, child));
            continue;
        }
        let mut new = apply_to_child(nodes, child, &key, mine)?;
        if level == 1 {
            merge_small_leaf(nodes, &mut children, &mut new)?;
        }
        children.extend(new.into_iter().map(|(key, child, _)| (key, child)));
    }
    if let Some(old) = old {
        nodes.mark_dead(old);
    }
    // The first child's range begins with its parent's.
    if let Some(first) = children.first_mut() {
        first.0 = lower.clone();
    }
    Ok(split_inner(nodes, level, children))
}

/// Joins a small new leaf with the leaf before it, if both fit into one.
fn merge_small_leaf(
    nodes: &mut dyn NodeStore,
    before: &mut Vec<(Key, Child)>,
    new: &mut Replacements,
) -> Result<()> {
    let limit = nodes.node_bytes();
    let [(_, Child::Disk(small), _)] = new.as_slice() else { return Ok(()) };
    let small = *small;
    let Some((_, Child::Disk(left))) = before.last() else { return Ok(()) };
    let left = *left;
    if small.len as usize > limit / 3 || small.len.saturating_add(left.len) as usize > limit {
        return Ok(());
    }
    let mut pairs = EncodedPairs::default();
    for ptr in [left, small] {
        let node = nodes.load(ptr)?;
        let Node::Leaf(leaf) = &*node else { return Ok(()) };
        pairs.merge(leaf, &[])?;
    }
    let Some((key, _)) = before.pop() else { return Ok(()) };
    *new = write_leaves(nodes, &key, &pairs)?;
    nodes.mark_dead(left);
    nodes.mark_dead(small);
    Ok(())
}

/// Writes pairs as leaves of about the same length.
fn write_leaves(
    nodes: &mut dyn NodeStore,
    lower: &Key,
    pairs: &EncodedPairs,
) -> Result<Replacements> {
    let (count, total) = (pairs.len(), pairs.bytes());
    let leaves = total.div_ceil(nodes.node_bytes().saturating_sub(8).max(1)).max(1);
    let share = total.div_ceil(leaves);
    let mut out: Replacements = vec![];
    let mut start = 0;
    while start < count {
        let from = pairs.pair_start(start);
        let mut end = start.saturating_add(1);
        let middle = |nth: usize| {
            usize::midpoint(pairs.pair_end(nth.saturating_sub(1)), pairs.pair_end(nth))
        };
        while end < count && middle(end).saturating_sub(from) < share {
            end = end.saturating_add(1);
        }
        let key = match start {
            0 => lower.clone(),
            _ => shortest_separator(pairs.key(start.saturating_sub(1)), pairs.key(start)),
        };
        out.push((key, Child::Disk(nodes.write(pairs.encode(start..end))?), 0));
        start = end;
    }
    Ok(out)
}

/// Returns the shortest key greater than `left` and not greater than `right`.
fn shortest_separator(left: &[u8], right: &[u8]) -> Key {
    let common = left.iter().zip(right).take_while(|(a, b)| a == b).count();
    Key::from_slice(right.get(..=common).unwrap_or(right))
}

/// Splits children into inner nodes of `level`.
fn split_inner(nodes: &dyn NodeStore, level: u8, children: Vec<(Key, Child)>) -> Replacements {
    if children.is_empty() {
        return vec![];
    }
    let weigh = |key: &Key| key.len().saturating_add(20);
    let total: usize = children.iter().map(|(key, _)| weigh(key)).sum();
    let parts = total.div_ceil(nodes.node_bytes()).min(children.len() / 2).max(1);
    let share = total.div_ceil(parts);
    let mut out: Replacements = vec![];
    let mut part: Vec<(Key, Child)> = vec![];
    let mut len = 0usize;
    for (key, child) in children {
        if part.len() >= 2 && len.saturating_add(weigh(&key) / 2) >= share {
            out.push(new_inner_replacement(level, std::mem::take(&mut part)));
            len = 0;
        }
        len = len.saturating_add(weigh(&key));
        part.push((key, child));
    }
    out.push(new_inner_replacement(level, part));
    out
}

fn new_inner_replacement(level: u8, children: Vec<(Key, Child)>) -> (Key, Child, u8) {
    let first = children.first().map(|(key, _)| key.clone()).unwrap_or_default();
    (first, Child::Changed(Arc::new(InnerNode::new(level, children))), level)
}

fn write_child(nodes: &mut dyn NodeStore, child: &Child) -> Result<BlockPtr> {
    let inner = match child {
        Child::Disk(ptr) => return Ok(*ptr),
        Child::Changed(inner) => inner,
    };
    let mut children = Vec::with_capacity(inner.children.len());
    for (key, child) in &inner.children {
        children.push((key.clone(), Child::Disk(write_child(nodes, child)?)));
    }
    // All children are on the disk now.
    let bytes = InnerNode::new(inner.level, children)
        .encode()
        .ok_or(Error::Misuse("a child that was not written"))?;
    nodes.write(bytes)
}

fn move_child(nodes: &mut dyn NodeStore, child: Child, key: &[u8], at: u64) -> Result<Child> {
    let (mut inner, old) = match child {
        Child::Changed(inner) => (inner, None),
        Child::Disk(ptr) => {
            let node = nodes.load(ptr)?;
            match &*node {
                Node::Leaf(leaf) => {
                    let new = nodes.write(leaf.encode())?;
                    nodes.mark_dead(ptr);
                    return Ok(Child::Disk(new));
                }
                Node::Inner(inner) => {
                    let changed = Arc::new(inner.clone());
                    if ptr.at == at {
                        nodes.mark_dead(ptr);
                        return Ok(Child::Changed(changed));
                    }
                    (changed, Some(ptr))
                }
            }
        }
    };
    let index = inner.child_index(key);
    let moved = move_child(nodes, inner.child(index).1.clone(), key, at)?;
    if let Some((_, child)) = Arc::make_mut(&mut inner).children.get_mut(index) {
        *child = moved;
    }
    if let Some(old) = old {
        nodes.mark_dead(old);
    }
    Ok(Child::Changed(inner))
}
