//! Everything that did not change lately: a B+ tree of immutable nodes.
//!
//! ```text
//!   inner   key, where the child is, its sum · ..     a child has the keys from its key on
//!   leaf    what differs from the key before, entry · ..
//! ```
//!
//! Law 1: a node on the disk never changes; what changes is written elsewhere, and so is
//! the path to it. Inner nodes that changed stay in memory until a checkpoint.
//! Law 2: a `Tree` is read as it was by its holders, whatever is applied to its clones.
//! Law 3: no leaf is empty; a tree without pairs has no root.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unreachable,
    reason = "decoding bounds what it reads, and no node is empty: places are found in the node itself"
)]

use std::collections::HashMap;
use std::sync::Arc;

use crate::codec::{Reader, put_varint};
use crate::entry::{Entry, Key, put_key};
use crate::leaf::{Edit, Leaf, Pairs};
use crate::{Error, Result};

/// Where something on the disk is, and what its sum must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ptr {
    pub at: u64,
    pub len: u32,
    pub sum: u64,
}

impl Ptr {
    pub fn encode(&self, into: &mut Vec<u8>) {
        put_varint(into, self.at);
        put_varint(into, u64::from(self.len));
        into.extend_from_slice(&self.sum.to_le_bytes());
    }

    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { at: reader.varint()?, len: reader.varint_u32()?, sum: reader.u64()? })
    }
}

/// No tree is deeper; a disk that says so is damaged.
const LEVELS_MAX: u8 = 24;

/// A node as it was on the disk.
#[derive(Debug)]
pub(crate) enum Node {
    Leaf(Leaf),
    Inner(Inner),
}

/// Children, each with the first key that it may have.
#[derive(Clone, Debug)]
pub(crate) struct Inner {
    pub level: u8,
    pub children: Vec<(Key, Child)>,
}

impl Inner {
    /// The child that has `key`.
    fn child_of(&self, key: &[u8]) -> usize {
        self.children.partition_point(|(first, _)| first.as_slice() <= key).saturating_sub(1)
    }

    /// The child that has what is just before `key`.
    fn child_before(&self, key: &[u8]) -> usize {
        self.children.partition_point(|(first, _)| first.as_slice() < key).saturating_sub(1)
    }

    fn encode(&self) -> Option<Vec<u8>> {
        let mut out = vec![self.level];
        put_varint(&mut out, self.children.len() as u64);
        for (key, child) in &self.children {
            put_key(&mut out, key);
            let Child::Disk(ptr) = child else { return None };
            ptr.encode(&mut out);
        }
        Some(out)
    }
}

/// A node on the disk, or an inner one that changed.
#[derive(Clone, Debug)]
pub(crate) enum Child {
    Disk(Ptr),
    Changed(Arc<Inner>),
}

impl Child {
    pub fn on_disk(&self) -> Option<Ptr> {
        match self {
            Self::Disk(ptr) => Some(*ptr),
            Self::Changed(_) => None,
        }
    }
}

impl Node {
    /// Reads a node, whole; `at` is for complaints.
    pub fn decode(bytes: &[u8], at: u64) -> Result<Self> {
        let mut reader = Reader::new(bytes, at);
        let level = reader.u8()?;
        if level > LEVELS_MAX {
            return Err(reader.corrupt("a tree that is too deep"));
        }
        let count = reader.varint_u32()? as usize;
        // A pair takes two bytes at least.
        if count == 0 || count > bytes.len() / 2 {
            return Err(reader.corrupt("a node's count"));
        }
        if level == 0 {
            return Ok(Self::Leaf(Leaf::decode(&mut reader, bytes, count, at)?));
        }
        let mut children: Vec<(Key, Child)> = Vec::with_capacity(count);
        for _ in 0..count {
            let key = Key::from_slice(reader.sized()?);
            if children.last().is_some_and(|(previous, _)| *previous >= key) {
                return Err(reader.corrupt("children that are out of order"));
            }
            children.push((key, Child::Disk(Ptr::decode(&mut reader)?)));
        }
        Ok(Self::Inner(Inner { level, children }))
    }

    /// Memory that the node takes, about.
    pub fn weight(&self) -> u64 {
        match self {
            Self::Leaf(leaf) => leaf.weight(),
            Self::Inner(inner) => (inner.children.len() * 72 + 96) as u64,
        }
    }

    /// The first key, as its parent may know it or later.
    pub fn first_key(&self) -> &[u8] {
        match self {
            Self::Leaf(leaf) => leaf.first_key(),
            Self::Inner(inner) => inner.children.first().map_or(&[], |(key, _)| key),
        }
    }

    pub fn level(&self) -> u8 {
        match self {
            Self::Leaf(_) => 0,
            Self::Inner(inner) => inner.level,
        }
    }
}

/// Nodes by their sums.
pub(crate) type Loaded = HashMap<u64, Arc<Node>>;

/// Where nodes come from.
pub(crate) trait Nodes {
    /// A node, its sum verified.
    fn load(&self, ptr: Ptr) -> Result<Arc<Node>>;
    /// Nodes that will be needed next, read together if the first has to be read.
    fn load_together(&self, _: &[Ptr]) -> Loaded {
        Loaded::new()
    }
}

/// Where nodes go to.
pub(crate) trait NodesMut: Nodes {
    /// Stores a node.
    fn write(&mut self, bytes: Vec<u8>) -> Result<Ptr>;
    /// Nothing leads to the node any more.
    fn kill(&mut self, ptr: Ptr);
    /// Nodes are about so large.
    fn node_bytes(&self) -> usize;
}

/// The tree, as of one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tree {
    pub root: Option<Child>,
}

/// A leaf and the keys that it may have.
#[derive(Clone, Debug)]
pub(crate) struct Found {
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

impl Found {
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
        nodes: &dyn Nodes,
        key: &[u8],
        is_before: bool,
        see: &mut dyn FnMut(&Inner, usize),
    ) -> Result<Option<Arc<Node>>> {
        let Some(mut child) = self.root.clone() else { return Ok(None) };
        let mut step = |inner: &Inner| {
            let index = if is_before { inner.child_before(key) } else { inner.child_of(key) };
            see(inner, index);
            inner.children[index].1.clone()
        };
        // A level is one less than its parent's, so this ends.
        let mut level = LEVELS_MAX + 1;
        loop {
            child = match child {
                Child::Changed(inner) => {
                    level = inner.level;
                    step(&inner)
                }
                Child::Disk(ptr) => {
                    let node = nodes.load(ptr)?;
                    if node.level() >= level {
                        return Err(Error::Corrupt { what: "a node's level", at_bytes: ptr.at });
                    }
                    level = node.level();
                    match &*node {
                        Node::Leaf(_) => return Ok(Some(node)),
                        Node::Inner(inner) => step(inner),
                    }
                }
            };
        }
    }

    fn descend(&self, nodes: &dyn Nodes, key: &[u8], is_before: bool) -> Result<Option<Found>> {
        let (mut lower, mut upper) = (Key::new(), None);
        let node = self.walk(nodes, key, is_before, &mut |inner, index| {
            lower = inner.children[index].0.clone();
            if let Some((next, _)) = inner.children.get(index + 1) {
                upper = Some(next.clone());
            }
        })?;
        Ok(node.map(|node| Found { node, lower, upper }))
    }

    /// What keys the node may have that cannot be read on the way to the leaf of `key`, or of
    /// what is just before it: the first, and the first that it may not have.
    pub fn unreadable(&self, nodes: &dyn Nodes, key: &[u8], is_before: bool) -> (Key, Option<Key>) {
        let (mut lower, mut upper) = (Key::new(), None);
        // Ends where it fails, which it does.
        let _ = self.walk(nodes, key, is_before, &mut |inner, index| {
            lower = inner.children[index].0.clone();
            if let Some((next, _)) = inner.children.get(index + 1) {
                upper = Some(next.clone());
            }
        });
        (lower, upper)
    }

    /// The leaf in which `key` is or would be.
    pub fn leaf_of(&self, nodes: &dyn Nodes, key: &[u8]) -> Result<Option<Found>> {
        self.descend(nodes, key, false)
    }

    /// The leaf in which the last key before `key` is, if there is one.
    pub fn leaf_before(&self, nodes: &dyn Nodes, key: &[u8]) -> Result<Option<Found>> {
        self.descend(nodes, key, true)
    }

    /// Goes down as far as to the parent of the leaf in which `key` is or would be, or what is
    /// just before it: `take` gets the parent, which child the leaf is, and the first key that
    /// it may not have. `None` where the root is all there is.
    fn above_leaf<T>(
        &self,
        nodes: &dyn Nodes,
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
        nodes: &dyn Nodes,
        key: &[u8],
    ) -> Result<Option<(Ptr, Option<Key>)>> {
        let place = self.above_leaf(nodes, key, false, |inner, index, upper| {
            inner.children[index].1.on_disk().map(|ptr| (ptr, upper))
        })?;
        Ok(place.flatten())
    }

    /// Where the leaf of `key` lies and those behind it, or the leaf of what is just before
    /// `key` and those before it; at most `count`, and no more than have one parent.
    pub fn leaves_from(
        &self,
        nodes: &dyn Nodes,
        key: &[u8],
        is_before: bool,
        count: usize,
    ) -> Result<Vec<Ptr>> {
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

    pub fn get(&self, nodes: &dyn Nodes, key: &[u8]) -> Result<Option<Entry>> {
        match self.walk(nodes, key, false, &mut |_, _| ())? {
            Some(node) => leaf_in(&node).get(key),
            None => Ok(None),
        }
    }

    /// The first pair at `key` or behind it. `hint` is a leaf that was found before, and is
    /// one that may help next time.
    pub fn at_or_after(
        &self,
        nodes: &dyn Nodes,
        key: &[u8],
        hint: &mut Option<Found>,
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
        nodes: &dyn Nodes,
        key: &[u8],
        hint: &mut Option<Found>,
    ) -> Result<Option<(Key, Entry)>> {
        let mut key = Key::from_slice(key);
        loop {
            let serves = |found: &Found| {
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

    /// Applies edits, sorted by key, each key once.
    pub fn apply(&mut self, nodes: &mut dyn NodesMut, edits: &[Edit]) -> Result<()> {
        if edits.is_empty() {
            return Ok(());
        }
        let mut children = match self.root.take() {
            Some(root) => apply_to(nodes, root.clone(), &Key::new(), edits)
                .inspect_err(|_| self.root = Some(root))?,
            None => {
                let mut pairs = Pairs::default();
                pairs.push_edits(edits);
                write_leaves(nodes, &Key::new(), &pairs)?
            }
        };
        let mut level = children.first().map_or(0, |(.., level)| *level);
        while children.len() > 1 {
            level += 1;
            let list = children.into_iter().map(|(key, child, _)| (key, child)).collect();
            children = split_inner(nodes, level, list);
        }
        self.root = children.pop().map(|(_, child, _)| child);
        // A root with one child is one level too many.
        while let Some(Child::Changed(inner)) = &self.root
            && let [(_, only)] = inner.children.as_slice()
        {
            self.root = Some(only.clone());
        }
        Ok(())
    }

    /// Writes all inner nodes that changed; returns where the root is then.
    pub fn write_changed(&mut self, nodes: &mut dyn NodesMut) -> Result<Option<Ptr>> {
        let Some(root) = &self.root else { return Ok(None) };
        let ptr = write_child(nodes, root)?;
        self.root = Some(Child::Disk(ptr));
        Ok(Some(ptr))
    }

    /// Whether the node at `at` on `level` that begins with `key` belongs to the tree.
    pub fn has_node(&self, nodes: &dyn Nodes, key: &[u8], level: u8, at: u64) -> Result<bool> {
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

    /// Writes the node at `at` on `level` that begins with `key` elsewhere, if it belongs
    /// to the tree. The path to it becomes one that changed; an inner node is not written
    /// before the next checkpoint.
    pub fn move_node(
        &mut self,
        nodes: &mut dyn NodesMut,
        key: &[u8],
        level: u8,
        at: u64,
    ) -> Result<bool> {
        if !self.has_node(nodes, key, level, at)? {
            return Ok(false);
        }
        let Some(root) = self.root.take() else { return Ok(false) };
        let moved = moved(nodes, root.clone(), key, at).inspect_err(|_| self.root = Some(root))?;
        self.root = Some(moved);
        Ok(true)
    }
}

/// Children that take a child's place, with their level.
type Replaced = Vec<(Key, Child, u8)>;

/// What takes the child's place once `edits`, all within it, are applied.
fn apply_to(
    nodes: &mut dyn NodesMut,
    child: Child,
    lower: &Key,
    edits: &[Edit],
) -> Result<Replaced> {
    let (mut inner, old) = match child {
        Child::Changed(inner) => (inner, None),
        Child::Disk(ptr) => {
            let node = nodes.load(ptr)?;
            match &*node {
                Node::Leaf(leaf) => {
                    let mut pairs = Pairs::default();
                    pairs.merge(leaf, edits)?;
                    let leaves = write_leaves(nodes, lower, &pairs)?;
                    nodes.kill(ptr);
                    return Ok(leaves);
                }
                Node::Inner(inner) => (Arc::new(inner.clone()), Some(ptr)),
            }
        }
    };
    let level = inner.level;
    let mut children: Vec<(Key, Child)> = Vec::with_capacity(inner.children.len() + 4);
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
        let mut new = apply_to(nodes, child, &key, mine)?;
        if level == 1 {
            absorb(nodes, &mut children, &mut new)?;
        }
        children.extend(new.into_iter().map(|(key, child, _)| (key, child)));
    }
    if let Some(old) = old {
        nodes.kill(old);
    }
    // The first child answers for all that is before it.
    if let Some(first) = children.first_mut() {
        first.0 = lower.clone();
    }
    Ok(split_inner(nodes, level, children))
}

/// Joins a small new leaf with the leaf before it, if both fit into one.
fn absorb(
    nodes: &mut dyn NodesMut,
    before: &mut Vec<(Key, Child)>,
    new: &mut Replaced,
) -> Result<()> {
    let limit = nodes.node_bytes();
    let [(_, Child::Disk(small), _)] = new.as_slice() else { return Ok(()) };
    let small = *small;
    let Some((_, Child::Disk(left))) = before.last() else { return Ok(()) };
    let left = *left;
    if small.len as usize > limit / 3 || (small.len + left.len) as usize > limit {
        return Ok(());
    }
    let mut pairs = Pairs::default();
    for ptr in [left, small] {
        let node = nodes.load(ptr)?;
        let Node::Leaf(leaf) = &*node else { return Ok(()) };
        pairs.merge(leaf, &[])?;
    }
    let Some((key, _)) = before.pop() else { return Ok(()) };
    *new = write_leaves(nodes, &key, &pairs)?;
    nodes.kill(left);
    nodes.kill(small);
    Ok(())
}

/// Writes pairs as leaves of about the same length.
fn write_leaves(nodes: &mut dyn NodesMut, lower: &Key, pairs: &Pairs) -> Result<Replaced> {
    let (count, total) = (pairs.len(), pairs.bytes());
    let leaves = total.div_ceil(nodes.node_bytes().saturating_sub(8).max(1)).max(1);
    let share = total.div_ceil(leaves);
    let mut out: Replaced = vec![];
    let mut start = 0;
    while start < count {
        let from = pairs.start(start);
        let mut end = start + 1;
        while end < count && usize::midpoint(pairs.end(end - 1), pairs.end(end)) - from < share {
            end += 1;
        }
        let key = match start {
            0 => lower.clone(),
            _ => separator(pairs.key(start - 1), pairs.key(start)),
        };
        out.push((key, Child::Disk(nodes.write(pairs.encode(start..end))?), 0));
        start = end;
    }
    Ok(out)
}

/// The shortest key that is behind `left` and not behind `right`.
fn separator(left: &[u8], right: &[u8]) -> Key {
    let common = left.iter().zip(right).take_while(|(a, b)| a == b).count();
    Key::from_slice(&right[..(common + 1).min(right.len())])
}

/// Children as inner nodes of `level` that are not too long.
fn split_inner(nodes: &dyn NodesMut, level: u8, children: Vec<(Key, Child)>) -> Replaced {
    if children.is_empty() {
        return vec![];
    }
    let weigh = |key: &Key| key.len() + 20;
    let total: usize = children.iter().map(|(key, _)| weigh(key)).sum();
    let parts = total.div_ceil(nodes.node_bytes()).min(children.len() / 2).max(1);
    let share = total.div_ceil(parts);
    let mut out: Replaced = vec![];
    let mut part: Vec<(Key, Child)> = vec![];
    let mut len = 0;
    for (key, child) in children {
        if part.len() >= 2 && len + weigh(&key) / 2 >= share {
            out.push(inner(level, std::mem::take(&mut part)));
            len = 0;
        }
        len += weigh(&key);
        part.push((key, child));
    }
    out.push(inner(level, part));
    out
}

fn inner(level: u8, children: Vec<(Key, Child)>) -> (Key, Child, u8) {
    (children[0].0.clone(), Child::Changed(Arc::new(Inner { level, children })), level)
}

fn write_child(nodes: &mut dyn NodesMut, child: &Child) -> Result<Ptr> {
    let inner = match child {
        Child::Disk(ptr) => return Ok(*ptr),
        Child::Changed(inner) => inner,
    };
    let mut written =
        Inner { level: inner.level, children: Vec::with_capacity(inner.children.len()) };
    for (key, child) in &inner.children {
        written.children.push((key.clone(), Child::Disk(write_child(nodes, child)?)));
    }
    // All children are on the disk now.
    let bytes = written.encode().ok_or(Error::Misuse("a child that was not written"))?;
    nodes.write(bytes)
}

fn moved(nodes: &mut dyn NodesMut, child: Child, key: &[u8], at: u64) -> Result<Child> {
    let (mut inner, old) = match child {
        Child::Changed(inner) => (inner, None),
        Child::Disk(ptr) => {
            let node = nodes.load(ptr)?;
            match &*node {
                Node::Leaf(leaf) => {
                    let new = nodes.write(leaf.encode())?;
                    nodes.kill(ptr);
                    return Ok(Child::Disk(new));
                }
                Node::Inner(inner) => {
                    let changed = Arc::new(inner.clone());
                    if ptr.at == at {
                        nodes.kill(ptr);
                        return Ok(Child::Changed(changed));
                    }
                    (changed, Some(ptr))
                }
            }
        }
    };
    let index = inner.child_of(key);
    let below = inner.children[index].1.clone();
    Arc::make_mut(&mut inner).children[index].1 = moved(nodes, below, key, at)?;
    if let Some(old) = old {
        nodes.kill(old);
    }
    Ok(Child::Changed(inner))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ObjectId;
    use crate::codec::mix;
    use crate::entry::value_key;

    /// Nodes in a map, by a number that is never used again.
    #[derive(Default)]
    struct Memory {
        nodes: BTreeMap<u64, Arc<Node>>,
        next: u64,
    }

    impl Nodes for Memory {
        fn load(&self, ptr: Ptr) -> Result<Arc<Node>> {
            self.nodes
                .get(&ptr.at)
                .cloned()
                .ok_or(Error::Corrupt { what: "a dead node", at_bytes: ptr.at })
        }
    }

    impl NodesMut for Memory {
        fn write(&mut self, bytes: Vec<u8>) -> Result<Ptr> {
            self.next += 1;
            let node = Node::decode(&bytes, self.next)?;
            self.nodes.insert(self.next, Arc::new(node));
            Ok(Ptr { at: self.next, len: bytes.len() as u32, sum: 0 })
        }

        fn kill(&mut self, ptr: Ptr) {
            assert!(self.nodes.remove(&ptr.at).is_some(), "killed twice");
        }

        fn node_bytes(&self) -> usize {
            256
        }
    }

    fn key(number: u64) -> Key {
        value_key(format!("{number:06}").as_bytes())
    }

    fn all(tree: &Tree, nodes: &Memory) -> Vec<(Key, Entry)> {
        let (mut out, mut hint, mut from) = (vec![], None, Key::new());
        while let Some((key, entry)) = tree.at_or_after(nodes, &from, &mut hint).unwrap() {
            from = key.clone();
            from.push(0);
            out.push((key, entry));
        }
        let (mut back, mut hint) = (vec![], None);
        let mut from = value_key(b"~");
        while let Some((key, entry)) = tree.before(nodes, &from, &mut hint).unwrap() {
            from = key.clone();
            back.push((key, entry));
        }
        back.reverse();
        assert_eq!(out, back);
        out
    }

    #[test]
    fn batches_of_edits_against_a_map() {
        let (mut tree, mut nodes) = (Tree::default(), Memory::default());
        let mut model: BTreeMap<Key, Entry> = BTreeMap::new();
        let mut random = 3;
        let mut next = |below: u64| {
            random = mix(random);
            random % below
        };
        for round in 0..200u64 {
            let is_shrinking = round % 40 >= 25;
            let mut edits: BTreeMap<Key, Option<Entry>> = BTreeMap::new();
            for _ in 0..1 + next(60) {
                let edit = match is_shrinking && next(8) != 0 {
                    true => None,
                    false => Some(Entry::Link(ObjectId(round), next(1 << 40))),
                };
                edits.insert(key(next(900)), edit);
            }
            for (key, edit) in &edits {
                match edit {
                    Some(entry) => model.insert(key.clone(), entry.clone()),
                    None => model.remove(key),
                };
            }
            tree.apply(&mut nodes, &edits.into_iter().collect::<Vec<_>>()).unwrap();
            if round % 7 == 0 {
                tree.write_changed(&mut nodes).unwrap();
            }
            assert_eq!(all(&tree, &nodes), model.clone().into_iter().collect::<Vec<_>>());
            let probe = key(next(900));
            assert_eq!(tree.get(&nodes, &probe).unwrap(), model.get(&probe).cloned());
        }
        // Every node but those of the tree is dead.
        let gone = model.keys().map(|key| (key.clone(), None)).collect::<Vec<_>>();
        tree.apply(&mut nodes, &gone).unwrap();
        assert!(tree.root.is_none());
        assert_eq!(nodes.nodes.len(), 0);
    }

    #[test]
    fn a_node_moves_once() {
        let (mut tree, mut nodes) = (Tree::default(), Memory::default());
        let edits: Vec<Edit> =
            (0..500).map(|n| (key(n), Some(Entry::Link(ObjectId(n), n)))).collect();
        tree.apply(&mut nodes, &edits).unwrap();
        tree.write_changed(&mut nodes).unwrap();
        let before = all(&tree, &nodes);
        let old: Vec<(u64, Key, u8)> = nodes
            .nodes
            .iter()
            .map(|(&at, node)| (at, Key::from_slice(node.first_key()), node.level()))
            .collect();
        for (at, key, level) in &old {
            assert!(tree.move_node(&mut nodes, key, *level, *at).unwrap() || *level > 0);
            assert!(!tree.move_node(&mut nodes, key, *level, *at).unwrap());
        }
        tree.write_changed(&mut nodes).unwrap();
        assert_eq!(all(&tree, &nodes), before);
        assert!(old.iter().all(|(at, ..)| !nodes.nodes.contains_key(at)));
    }

    #[test]
    fn any_bytes_are_refused_or_read_without_a_panic() {
        let mut random = 9u64;
        for _ in 0..20_000 {
            random = mix(random);
            let len = random as usize % 60;
            let bytes: Vec<u8> = (0..len).map(|i| (mix(random ^ i as u64) % 7) as u8).collect();
            if let Ok(Node::Leaf(leaf)) = Node::decode(&bytes, 0) {
                assert_eq!(leaf.unfold().unwrap().len(), leaf.len());
                assert!(leaf.get(leaf.first_key()).unwrap().is_some());
            }
        }
    }
}
