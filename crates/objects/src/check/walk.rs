//! A walk over all that leads somewhere: the tree, the runs over it, and the log.

use std::collections::HashSet;
use std::sync::Arc;

use super::report::{Finding, What, finding};
use crate::codec::{Reader, narrow};
use crate::core::Core;
use crate::entry::{Data, Entry, Key, Named, ObjectRecord, named};
use crate::index::layer::{Layer, Sorted, hash, intervals};
use crate::index::tree::{Child, Inner, Node, Nodes, Ptr, Tree};
use crate::index::view::Index;
use crate::io::Io;
use crate::{Error, ObjectId};

/// Leaves that are asked for together.
const LEAVES_AT_ONCE: usize = 32;

/// What a walk comes across.
pub(super) enum Seen<'w> {
    /// A node that could be read.
    Node(Ptr),
    /// Something is wrong with the tree.
    Broken(Finding),
    /// A payload that is alive.
    Live(Option<ObjectId>, &'w Data),
    /// A payload that is read: of an object with its offset, or of a key.
    Payload(Named<'w>, &'w Data),
    /// Zeros of an object over another, and where.
    Zeros(ObjectId, u64),
    /// An object.
    Object(ObjectId, ObjectRecord),
    /// A key whose value is an object.
    Link(&'w [u8], ObjectId, u64),
    /// A key that has its value of so many bytes itself.
    Short(usize),
    /// A name, and the object that it leads to.
    Name(&'w [u8], ObjectId),
}

/// Everything that leads somewhere.
pub(super) struct Map {
    pub(super) io: Arc<Io>,
    tree: Tree,
    /// Runs, as one.
    counted: Arc<Layer>,
    /// The log.
    log: Arc<Layer>,
    /// Both, as one.
    full: [Arc<Layer>; 1],
}

impl Map {
    pub(super) fn new(core: &mut Core) -> Self {
        let mut counted = Arc::new(Layer::default());
        for newer in core.levels.counted_layers().iter().rev() {
            counted = Arc::new(Layer::fold(newer, &counted, &mut |_| {}));
        }
        let log = Arc::new(core.levels.active.seal());
        let full = [Arc::new(Layer::fold(&log, &counted, &mut |_| {}))];
        Self { io: core.log.io.clone(), tree: core.levels.tree.clone(), counted, log, full }
    }

    pub(super) fn index(&self) -> Index<'_> {
        Index { top: None, layers: &self.full, tree: &self.tree }
    }

    /// Goes through all there is.
    pub(super) fn walk(&self, see: &mut dyn FnMut(Seen<'_>)) {
        if let Some(root) = &self.tree.root {
            let mut inner_nodes = HashSet::new();
            self.node(root, None, (&Key::new(), None), &mut inner_nodes, see);
        }
        for (key, entry) in self.counted.pairs.iter().chain(&self.log.pairs) {
            if let Entry::Data(data) = entry {
                see(Seen::Live(owner(key), data));
            }
        }
        for (key, entry) in &self.full[0].pairs {
            if self.is_known(key) {
                show(key, entry, see);
            }
        }
    }

    /// Whether nothing was lost that may hide what is under the key.
    fn is_known(&self, key: &[u8]) -> bool {
        self.full[0].check(key, key).is_ok()
    }

    /// A node and all below it: keys from `lower` on, before `upper`.
    fn node(
        &self,
        child: &Child,
        level: Option<u8>,
        (lower, upper): (&Key, Option<&Key>),
        inner_nodes: &mut HashSet<u64>,
        see: &mut dyn FnMut(Seen<'_>),
    ) {
        let Child::Disk(ptr) = *child else { return };
        let broken = |what, text: String| Seen::Broken(finding(what, text, Some(ptr.at), None));
        let node = match self.io.load(ptr) {
            Ok(node) => node,
            Err(Error::Corrupt { what, at_bytes }) => {
                let text = format!("a node of the index cannot be used: {what}");
                return see(Seen::Broken(finding(What::Node, text, Some(at_bytes), None)));
            }
            Err(error) => {
                let text = format!("a node of the index cannot be read: {error}");
                return see(broken(What::Unreadable, text));
            }
        };
        see(Seen::Node(ptr));
        if level.is_some_and(|level| level != node.level()) {
            let text = format!("a node of level {} where another is expected", node.level());
            return see(broken(What::Order, text));
        }
        let is_within = |key: &[u8]| {
            lower.as_slice() <= key && upper.is_none_or(|upper| key < upper.as_slice())
        };
        match &*node {
            Node::Leaf(leaf) => {
                let mut walk = leaf.walk();
                // Every pair was read once when the node was.
                while let Ok(Some((key, entry))) = walk.next() {
                    let Ok(entry) = Entry::decode(&mut Reader::new(entry, ptr.at)) else {
                        continue;
                    };
                    if is_within(key) {
                        self.tree_pair(key, &entry, see);
                    } else {
                        see(broken(What::Order, "a key in a leaf that it is not of".to_owned()));
                    }
                }
            }
            Node::Inner(inner) => {
                // No node has two parents, so this ends even on a disk that lies.
                let is_new = inner_nodes.insert(ptr.at);
                if !is_new || !inner.children.iter().skip(1).all(|(key, _)| is_within(key)) {
                    return see(broken(What::Order, "a node in a place not its own".to_owned()));
                }
                self.children(inner, (lower, upper), inner_nodes, see);
            }
        }
    }

    fn children(
        &self,
        inner: &Inner,
        (lower, upper): (&Key, Option<&Key>),
        inner_nodes: &mut HashSet<u64>,
        see: &mut dyn FnMut(Seen<'_>),
    ) {
        let level = inner.level.checked_sub(1);
        for (index, (key, child)) in inner.children.iter().enumerate() {
            if level == Some(0) && index.is_multiple_of(LEAVES_AT_ONCE) {
                let next = inner.children.iter().skip(index).take(LEAVES_AT_ONCE);
                let next: Vec<Ptr> = next.filter_map(|(_, child)| child.on_disk()).collect();
                self.io.load_ahead(&next);
            }
            // The first child has what is before its key, too.
            let from = if index == 0 { lower } else { key };
            let to = inner.children.get(index.saturating_add(1)).map(|(key, _)| key).or(upper);
            self.node(child, level, (from, to), inner_nodes, see);
        }
    }

    /// A pair of the tree, as far as layers do not hide it.
    fn tree_pair(&self, key: &[u8], entry: &Entry, see: &mut dyn FnMut(Seen<'_>)) {
        match (named(key), entry) {
            (Some(Named::Extent(id, at)), Entry::Data(data)) => {
                let all = (at, at.saturating_add(u64::from(data.len)));
                rests(&self.counted, id, all, &mut |from, to| {
                    see(Seen::Live(Some(id), &part(data, at, from, to)));
                });
                if !self.is_known(key) {
                    return;
                }
                rests(&self.full[0], id, all, &mut |from, to| {
                    let part = part(data, at, from, to);
                    see(Seen::Payload(Named::Extent(id, from), &part));
                });
            }
            (Some(Named::Extent(id, at)), Entry::Zeros(len)) if self.is_known(key) => {
                let all = (at, at.saturating_add(*len));
                rests(&self.full[0], id, all, &mut |from, _| see(Seen::Zeros(id, from)));
            }
            _ => {
                let hash = hash(key);
                if let Entry::Data(data) = entry
                    && self.counted.get(key, hash).is_none()
                {
                    see(Seen::Live(None, data));
                }
                if self.full[0].get(key, hash).is_none() && self.is_known(key) {
                    show(key, entry, see);
                }
            }
        }
    }
}

/// The part from `from` to `to` of data that begins at `at`.
fn part(data: &Data, at: u64, from: u64, to: u64) -> Data {
    data.part(narrow(from.saturating_sub(at)), narrow(to.saturating_sub(from)))
}

fn owner(key: &[u8]) -> Option<ObjectId> {
    match named(key) {
        Some(Named::Extent(id, _) | Named::Object(id)) => Some(id),
        _ => None,
    }
}

fn show(key: &[u8], entry: &Entry, see: &mut dyn FnMut(Seen<'_>)) {
    match (named(key), entry) {
        (Some(name), Entry::Data(data)) => see(Seen::Payload(name, data)),
        (Some(Named::Extent(id, at)), Entry::Zeros(_)) => see(Seen::Zeros(id, at)),
        (Some(Named::Object(id)), Entry::Object(record)) => see(Seen::Object(id, *record)),
        (Some(Named::Value(name)), Entry::Link(id, len)) => see(Seen::Link(name, *id, *len)),
        (Some(Named::Value(_)), Entry::Short(value)) => see(Seen::Short(value.len())),
        (Some(Named::Name(name)), entry) => {
            if let Some(id) = entry.named_object() {
                see(Seen::Name(name, id));
            }
        }
        _ => {}
    }
}

/// What of `[from, to)` of an object a layer does not hide.
fn rests(layer: &Layer, id: ObjectId, (from, to): (u64, u64), give: &mut dyn FnMut(u64, u64)) {
    let mut done = from;
    intervals(layer, id, from, to, &mut |at, entry| {
        if at > done {
            give(done, at.min(to));
        }
        done = done.max(at.saturating_add(entry.covers()));
    });
    if done < to {
        give(done, to);
    }
}
