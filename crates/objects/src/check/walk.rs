//! Walks over everything that refers to bytes: the tree, the runs over it, and the log.

use std::collections::HashSet;
use std::sync::Arc;

use super::report::{DamageKind, Finding, new_finding};
use crate::cached_disk::CachedDisk;
use crate::codec::{Reader, to_u32_saturating};
use crate::core::Core;
use crate::entry::{DecodedKey, Entry, Key, ObjectRecord, PayloadRef, decode_key};
use crate::index::memtable::{ImmutableMemtable, SortedLookup, hash, intervals};
use crate::index::tree::{BlockPtr, Child, InnerNode, Node, NodeSource, Tree};
use crate::index::view::Index;
use crate::{Error, ObjectId};

/// Leaves that are requested together.
const LEAF_PREFETCH_BATCH: usize = 32;

/// Item that a walk yields.
pub(crate) enum WalkItem<'w> {
    /// A node that could be read.
    Node(BlockPtr),
    /// Damage of the tree, and the node whose range of keys is lost by it.
    Broken(Finding, Option<LostNode>),
    /// A live payload and its key.
    Live(&'w [u8], &'w PayloadRef),
    /// A visible payload: of an object with its offset, or of a key.
    Payload(DecodedKey<'w>, &'w PayloadRef),
    /// Zeros of an object with a parent, and their offset.
    Zeros(ObjectId, u64),
    /// An object.
    Object(ObjectId, ObjectRecord),
    /// A key with a value object.
    Link(&'w [u8], ObjectId, u64),
    /// A key with an inline value of so many bytes.
    Short(usize),
    /// A name, and the object that it refers to.
    Name(&'w [u8], ObjectId),
}

/// A node that cannot be used: keys from `lower` on, before `upper`.
pub(crate) struct LostNode {
    pub ptr: BlockPtr,
    pub lower: Key,
    pub upper: Option<Key>,
}

/// Tree, merged runs and log of the store under check.
pub(crate) struct IndexSnapshot {
    pub(crate) io: Arc<CachedDisk>,
    tree: Tree,
    /// All runs, merged.
    counted: Arc<ImmutableMemtable>,
    /// The log.
    pub(crate) log: Arc<ImmutableMemtable>,
    /// Runs and log, merged.
    full: [Arc<ImmutableMemtable>; 1],
}

impl IndexSnapshot {
    pub(crate) fn new(core: &mut Core) -> Self {
        let mut counted = Arc::new(ImmutableMemtable::default());
        for newer in core.levels.run_memtables().iter().rev() {
            counted = Arc::new(ImmutableMemtable::merge(newer, &counted, &mut |_| {}));
        }
        let log = Arc::new(core.levels.active.seal());
        let full = [Arc::new(ImmutableMemtable::merge(&log, &counted, &mut |_| {}))];
        Self { io: core.log.io.clone(), tree: core.levels.tree.clone(), counted, log, full }
    }

    pub(crate) fn index(&self) -> Index<'_> {
        Index { top: None, layers: &self.full, tree: &self.tree }
    }

    /// Walks over everything.
    pub(crate) fn walk(&self, see: &mut dyn FnMut(WalkItem<'_>)) {
        if let Some(root) = &self.tree.root {
            let mut inner_nodes = HashSet::new();
            self.walk_node(root, None, (&Key::new(), None), &mut inner_nodes, see);
        }
        for (key, entry) in self.counted.pairs.iter().chain(&self.log.pairs) {
            if let Entry::Data(data) = entry {
                see(WalkItem::Live(key, data));
            }
        }
        for (key, entry) in &self.full[0].pairs {
            if self.is_key_readable(key) {
                visit_pair(key, entry, see);
            }
        }
    }

    /// Returns true if no unreadable chunk may hide the key.
    pub(super) fn is_key_readable(&self, key: &[u8]) -> bool {
        self.full[0].check(key, key).is_ok()
    }

    /// Walks a node and all below it: keys from `lower` on, before `upper`.
    fn walk_node(
        &self,
        child: &Child,
        level: Option<u8>,
        (lower, upper): (&Key, Option<&Key>),
        inner_nodes: &mut HashSet<u64>,
        see: &mut dyn FnMut(WalkItem<'_>),
    ) {
        let Child::Disk(ptr) = *child else { return };
        let lost_node = || Some(LostNode { ptr, lower: lower.clone(), upper: upper.cloned() });
        let broken = |what, text: String| {
            WalkItem::Broken(new_finding(what, text, Some(ptr.at), None), lost_node())
        };
        let node = match self.io.load(ptr) {
            Ok(node) => node,
            Err(Error::Corrupt { what, at_bytes }) => {
                let text = format!("a node of the index cannot be used: {what}");
                let finding = new_finding(DamageKind::Node, text, Some(at_bytes), None);
                return see(WalkItem::Broken(finding, lost_node()));
            }
            Err(error) => {
                let text = format!("a node of the index cannot be read: {error}");
                return see(broken(DamageKind::Unreadable, text));
            }
        };
        see(WalkItem::Node(ptr));
        if level.is_some_and(|level| level != node.level()) {
            let text = format!("a node of level {} where another is expected", node.level());
            return see(broken(DamageKind::Order, text));
        }
        let is_within = |key: &[u8]| {
            lower.as_slice() <= key && upper.is_none_or(|upper| key < upper.as_slice())
        };
        match &*node {
            Node::Leaf(leaf) => {
                let mut walk = leaf.iter();
                // Decoding the node has read every pair once.
                while let Ok(Some((key, entry))) = walk.next() {
                    let Ok(entry) = Entry::decode(&mut Reader::new(entry, ptr.at)) else {
                        continue;
                    };
                    if is_within(key) {
                        self.visit_tree_pair(key, &entry, see);
                    } else {
                        see(broken(
                            DamageKind::Order,
                            "a key in a leaf that it is not of".to_owned(),
                        ));
                    }
                }
            }
            Node::Inner(inner) => {
                // No node has two parents, so this ends even on a corrupt disk.
                let is_new = inner_nodes.insert(ptr.at);
                if !is_new || !inner.children.iter().skip(1).all(|(key, _)| is_within(key)) {
                    return see(broken(
                        DamageKind::Order,
                        "a node in a place not its own".to_owned(),
                    ));
                }
                self.walk_children(inner, (lower, upper), inner_nodes, see);
            }
        }
    }

    fn walk_children(
        &self,
        inner: &InnerNode,
        (lower, upper): (&Key, Option<&Key>),
        inner_nodes: &mut HashSet<u64>,
        see: &mut dyn FnMut(WalkItem<'_>),
    ) {
        let level = inner.level.checked_sub(1);
        for (index, (key, child)) in inner.children.iter().enumerate() {
            if level == Some(0) && index.is_multiple_of(LEAF_PREFETCH_BATCH) {
                let next = inner.children.iter().skip(index).take(LEAF_PREFETCH_BATCH);
                let next: Vec<BlockPtr> = next.filter_map(|(_, child)| child.disk_ptr()).collect();
                self.io.prefetch_nodes(&next);
            }
            // The first child holds smaller keys, too.
            let from = if index == 0 { lower } else { key };
            let to = inner.children.get(index.saturating_add(1)).map(|(key, _)| key).or(upper);
            self.walk_node(child, level, (from, to), inner_nodes, see);
        }
    }

    /// Yields a pair of the tree, as far as memtables do not hide it.
    fn visit_tree_pair(&self, key: &[u8], entry: &Entry, see: &mut dyn FnMut(WalkItem<'_>)) {
        match (decode_key(key), entry) {
            (Some(DecodedKey::Extent(id, at)), Entry::Data(data)) => {
                let all = (at, at.saturating_add(u64::from(data.len)));
                for_each_visible_range(&self.counted, id, all, &mut |from, to| {
                    see(WalkItem::Live(key, &payload_part(data, at, from, to)));
                });
                if !self.is_key_readable(key) {
                    return;
                }
                for_each_visible_range(&self.full[0], id, all, &mut |from, to| {
                    let part = payload_part(data, at, from, to);
                    see(WalkItem::Payload(DecodedKey::Extent(id, from), &part));
                });
            }
            (Some(DecodedKey::Extent(id, at)), Entry::Zeros(len)) if self.is_key_readable(key) => {
                let all = (at, at.saturating_add(*len));
                for_each_visible_range(&self.full[0], id, all, &mut |from, _| {
                    see(WalkItem::Zeros(id, from))
                });
            }
            _ => {
                let hash = hash(key);
                if let Entry::Data(data) = entry
                    && self.counted.get(key, hash).is_none()
                {
                    see(WalkItem::Live(key, data));
                }
                if self.full[0].get(key, hash).is_none() && self.is_key_readable(key) {
                    visit_pair(key, entry, see);
                }
            }
        }
    }
}

/// Returns the part from `from` to `to` of data that begins at `at`.
fn payload_part(data: &PayloadRef, at: u64, from: u64, to: u64) -> PayloadRef {
    data.part(
        to_u32_saturating(from.saturating_sub(at)),
        to_u32_saturating(to.saturating_sub(from)),
    )
}

pub(super) fn owning_object(key: &[u8]) -> Option<ObjectId> {
    match decode_key(key) {
        Some(DecodedKey::Extent(id, _) | DecodedKey::Object(id)) => Some(id),
        _ => None,
    }
}

fn visit_pair(key: &[u8], entry: &Entry, see: &mut dyn FnMut(WalkItem<'_>)) {
    match (decode_key(key), entry) {
        (Some(name), Entry::Data(data)) => see(WalkItem::Payload(name, data)),
        (Some(DecodedKey::Extent(id, at)), Entry::Zeros(_)) => see(WalkItem::Zeros(id, at)),
        (Some(DecodedKey::Object(id)), Entry::Object(record)) => see(WalkItem::Object(id, *record)),
        (Some(DecodedKey::Value(name)), Entry::ValueObject(id, len)) => {
            see(WalkItem::Link(name, *id, *len))
        }
        (Some(DecodedKey::Value(_)), Entry::Inline(value)) => see(WalkItem::Short(value.len())),
        (Some(DecodedKey::Name(name)), entry) => {
            if let Some(id) = entry.named_object() {
                see(WalkItem::Name(name, id));
            }
        }
        _ => {}
    }
}

/// Yields the ranges of `[from, to)` of an object that a memtable does not hide.
fn for_each_visible_range(
    layer: &ImmutableMemtable,
    id: ObjectId,
    (from, to): (u64, u64),
    give: &mut dyn FnMut(u64, u64),
) {
    let mut done = from;
    intervals(layer, id, from, to, &mut |at, entry| {
        if at > done {
            give(done, at.min(to));
        }
        done = done.max(at.saturating_add(entry.covered_bytes()));
    });
    if done < to {
        give(done, to);
    }
}
