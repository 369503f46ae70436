//! Nodes of the tree: leaves, and inner nodes with the checksums of their children.
//!
//! ```text
//!   inner   key, where the child is, its sum · ..     a child has the keys from its key on
//!   leaf    what differs from the key before, entry · ..
//! ```
//!
//! Law: a node on the disk never changes, and is not empty.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use crate::codec::{Reader, put_varint};
use crate::entry::{Key, put_key};
use crate::index::leaf::Leaf;
use crate::{Error, Result};

/// Address, length and checksum of a block on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockPtr {
    pub at: u64,
    pub len: u32,
    pub sum: u64,
}

impl BlockPtr {
    pub fn encode(&self, into: &mut Vec<u8>) {
        put_varint(into, self.at);
        put_varint(into, u64::from(self.len));
        into.extend_from_slice(&self.sum.to_le_bytes());
    }

    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { at: reader.varint()?, len: reader.varint_u32()?, sum: reader.u64()? })
    }
}

/// Maximum depth of a tree; a deeper one is damaged.
pub(crate) const MAX_TREE_LEVELS: u8 = 24;

/// A decoded node.
#[derive(Debug)]
pub(crate) enum Node {
    Leaf(Leaf),
    Inner(InnerNode),
}

/// Children, each with the first key of its range.
#[derive(Clone, Debug)]
pub(crate) struct InnerNode {
    pub level: u8,
    pub children: Vec<(Key, Child)>,
    /// Length of the prefix that all keys but the first share, and the next eight bytes of each
    /// key. These are adjacent, and mostly decide which child has a key.
    shared: usize,
    heads: Vec<u64>,
    /// Weak reference to each child in memory.
    child_refs: Vec<NodeRef>,
}

/// Weak reference to a cached node. It saves the lookup by checksum and does not prevent eviction.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeRef(OnceLock<(u64, Weak<Node>)>);

impl NodeRef {
    /// Returns the node, if it is still in memory and is the target of `ptr`: the child may have
    /// been replaced.
    pub fn upgrade(&self, ptr: BlockPtr) -> Option<Arc<Node>> {
        let (sum, node) = self.0.get()?;
        if *sum == ptr.sum { node.upgrade() } else { None }
    }

    /// Stores a reference to a node; the first one stays.
    pub fn set_node(&self, ptr: BlockPtr, node: &Arc<Node>) {
        self.0.get_or_init(|| (ptr.sum, Arc::downgrade(node)));
    }
}

/// Returns eight bytes of a key from `at` on, zero-padded, as a number that sorts as the key.
fn key_prefix(key: &[u8], at: usize) -> u64 {
    let mut head = [0; 8];
    let behind = key.get(at..).unwrap_or_default();
    head.iter_mut().zip(behind).for_each(|(to, from)| *to = *from);
    u64::from_be_bytes(head)
}

impl InnerNode {
    pub fn new(level: u8, children: Vec<(Key, Child)>) -> Self {
        let told = children.get(1..).unwrap_or_default();
        let (first, last) = (told.first(), told.last());
        let ends = first.zip(last).map(|((first, _), (last, _))| first.iter().zip(last));
        let shared = ends.map_or(0, |ends| ends.take_while(|(a, b)| a == b).count());
        let heads = told.iter().map(|(key, _)| key_prefix(key, shared)).collect();
        let child_refs = vec![NodeRef::default(); children.len()];
        Self { level, children, shared, heads, child_refs }
    }

    /// Returns the child of `key`, or of the key just before it.
    fn find_child_index(&self, key: &[u8], is_before: bool) -> usize {
        let is_behind = |first: &Key| match is_before {
            true => first.as_slice() < key,
            false => first.as_slice() <= key,
        };
        // If `key` differs from the shared prefix, it is before or after all of them.
        let Some((one, _)) = self.children.get(1) else { return 0 };
        let (told, mine) = (one.get(..self.shared), key.get(..self.shared.min(key.len())));
        if told != mine {
            return if told < mine { self.heads.len() } else { 0 };
        }
        let head = key_prefix(key, self.shared);
        let from = self.heads.partition_point(|have| *have < head);
        let alike = self.heads.iter().skip(from).take_while(|have| **have == head).count();
        let alike = self.children.get(from.saturating_add(1)..).and_then(|all| all.get(..alike));
        let before = alike.map_or(0, |all| all.partition_point(|(first, _)| is_behind(first)));
        from.saturating_add(before)
    }

    /// Returns a child in memory: a changed one, or one loaded from the disk.
    pub fn load(&self, nodes: &dyn NodeSource, index: usize) -> Result<LoadedChild> {
        let Some((_, child)) = self.children.get(index) else {
            return Err(Error::Misuse("a child that is not there"));
        };
        match child {
            Child::Changed(inner) => Ok(LoadedChild::Changed(inner.clone())),
            Child::Disk(ptr) => {
                let node = match self.child_refs.get(index) {
                    Some(seen) => nodes.load_via_ref(*ptr, seen)?,
                    None => nodes.load(*ptr)?,
                };
                Ok(LoadedChild::Disk(*ptr, node))
            }
        }
    }

    /// Returns the child whose range has `key`.
    pub fn child_index(&self, key: &[u8]) -> usize {
        self.find_child_index(key, false)
    }

    /// Returns a child, with the first key of its range.
    #[allow(clippy::indexing_slicing, reason = "callers have the index of a child from this node")]
    pub fn child(&self, index: usize) -> &(Key, Child) {
        &self.children[index]
    }

    /// Returns the child whose range has the key just before `key`.
    pub fn child_index_before(&self, key: &[u8]) -> usize {
        self.find_child_index(key, true)
    }

    pub fn encode(&self) -> Option<Vec<u8>> {
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

/// Reference to a node on the disk, or a changed inner node.
#[derive(Clone, Debug)]
pub(crate) enum Child {
    Disk(BlockPtr),
    Changed(Arc<InnerNode>),
}

/// A child in memory.
pub(crate) enum LoadedChild {
    Disk(BlockPtr, Arc<Node>),
    Changed(Arc<InnerNode>),
}

impl Child {
    /// Loads the root of a tree.
    pub fn load(&self, nodes: &dyn NodeSource) -> Result<LoadedChild> {
        match self {
            Self::Disk(ptr) => Ok(LoadedChild::Disk(*ptr, nodes.load(*ptr)?)),
            Self::Changed(inner) => Ok(LoadedChild::Changed(inner.clone())),
        }
    }

    pub fn disk_ptr(&self) -> Option<BlockPtr> {
        match self {
            Self::Disk(ptr) => Some(*ptr),
            Self::Changed(_) => None,
        }
    }
}

impl Node {
    /// Decodes a node; `at` is for errors.
    pub fn decode(bytes: &[u8], at: u64) -> Result<Self> {
        let mut reader = Reader::new(bytes, at);
        let level = reader.u8()?;
        if level > MAX_TREE_LEVELS {
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
            let key = Key::from_slice(reader.length_prefixed()?);
            if children.last().is_some_and(|(previous, _)| *previous >= key) {
                return Err(reader.corrupt("children that are out of order"));
            }
            children.push((key, Child::Disk(BlockPtr::decode(&mut reader)?)));
        }
        Ok(Self::Inner(InnerNode::new(level, children)))
    }

    /// Returns the node's approximate memory, in bytes.
    pub fn weight(&self) -> u64 {
        match self {
            Self::Leaf(leaf) => leaf.weight(),
            Self::Inner(inner) => {
                (inner.children.len() as u64).saturating_mul(120).saturating_add(96)
            }
        }
    }

    /// Returns the first key; its parent's key may be smaller.
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

/// Nodes by their checksums.
pub(crate) type NodeMap = HashMap<u64, Arc<Node>>;

/// Source of nodes.
pub(crate) trait NodeSource {
    /// Returns a node with a verified checksum.
    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>>;
    /// The same, with a weak reference, which is used and updated.
    fn load_via_ref(&self, ptr: BlockPtr, _: &NodeRef) -> Result<Arc<Node>> {
        self.load(ptr)
    }
    /// Reads nodes that will be needed next, together, if the first is not in memory.
    fn prefetch(&self, _: &[BlockPtr]) -> NodeMap {
        NodeMap::new()
    }
}

/// Destination of nodes.
pub(crate) trait NodeStore: NodeSource {
    /// Stores a node.
    fn write(&mut self, bytes: Vec<u8>) -> Result<BlockPtr>;
    /// Marks a node as dead.
    fn mark_dead(&mut self, ptr: BlockPtr);
    /// Returns the target size of a node, in bytes.
    fn node_bytes(&self) -> usize;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::mix_bits;

    #[test]
    fn child_search_matches_linear_scan() {
        let mut random = 3u64;
        let mut next = |below: u64| {
            random = mix_bits(random);
            random % below
        };
        for round in 0..2000 {
            // Short keys of few letters share long prefixes, and have zeros at their ends.
            let mut key = |shared: u64| {
                let mut key: Key = (0..shared).map(|_| 9).collect();
                (0..next(12)).for_each(|_| key.push(next(3) as u8));
                key
            };
            let mut keys: Vec<Key> = (0..round % 40).map(|_| key(round % 5)).collect();
            keys.sort();
            keys.dedup();
            let ptr = BlockPtr { at: 0, len: 1, sum: 0 };
            let children = keys.iter().map(|key| (key.clone(), Child::Disk(ptr))).collect();
            let inner = InnerNode::new(1, children);
            let others: Vec<Key> = (0..40).map(|nth| key(nth % 6)).collect();
            for key in others.iter().chain(&keys) {
                let of = keys.partition_point(|have| have <= key).saturating_sub(1);
                let before = keys.partition_point(|have| have < key).saturating_sub(1);
                assert_eq!((inner.child_index(key), inner.child_index_before(key)), (of, before));
            }
        }
    }

    #[test]
    fn node_ref_returns_live_node_of_same_address() {
        let node = Arc::new(Node::Inner(InnerNode::new(1, vec![])));
        let ptr = |sum| BlockPtr { at: 0, len: 1, sum };
        let seen = NodeRef::default();
        assert!(seen.upgrade(ptr(7)).is_none());
        seen.set_node(ptr(7), &node);
        assert!(seen.upgrade(ptr(7)).is_some_and(|have| Arc::ptr_eq(&have, &node)));
        // A moved child has another checksum.
        assert!(seen.upgrade(ptr(8)).is_none());
        drop(node);
        assert!(seen.upgrade(ptr(7)).is_none());
    }

    #[test]
    fn arbitrary_bytes_decode_without_panic() {
        let mut random = 9u64;
        for _ in 0..20_000 {
            random = mix_bits(random);
            let len = random as usize % 60;
            let bytes: Vec<u8> =
                (0..len).map(|i| (mix_bits(random ^ i as u64) % 7) as u8).collect();
            if let Ok(Node::Leaf(leaf)) = Node::decode(&bytes, 0) {
                assert_eq!(leaf.decode_pairs().unwrap().len(), leaf.len());
                assert!(leaf.get(leaf.first_key()).unwrap().is_some());
            }
        }
    }
}
