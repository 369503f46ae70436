//! What is remembered of the disk: pages of payloads, and nodes.
//!
//! Law: both share one limit, so that a store whose index is large, or whose payloads are,
//! has all of it for that.

use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};

use crate::index::tree::{Node, Ptr};

/// A page by its number, or a node by its sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Name {
    Page(u64),
    Node(u64),
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Sums are spread already: numbers of pages are small beside them.
        match self {
            Self::Page(name) | Self::Node(name) => state.write_u64(*name),
        }
    }
}

#[derive(Clone, Debug)]
enum Kept {
    Page(Arc<[u8]>),
    Node(Arc<Node>),
}

#[derive(Clone, Debug)]
struct ByWeight;

impl Weighter<Name, Kept> for ByWeight {
    fn weight(&self, _: &Name, kept: &Kept) -> u64 {
        match kept {
            Kept::Page(page) => (page.len() as u64).saturating_add(64),
            Kept::Node(node) => node.weight(),
        }
    }
}

/// Addresses are spread by one multiplication and a shift.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = crate::codec::mix(self.0 ^ value);
    }
}

type Table = Cache<Name, Kept, ByWeight, BuildHasherDefault<Mixer>, DefaultLifecycle<Name, Kept>>;

/// Pages and nodes.
pub(crate) struct Memory(Table);

impl Memory {
    /// At most `capacity` bytes; most things have about `typical`.
    pub fn new(capacity: u64, typical: u64) -> Self {
        let items = capacity.checked_div(typical).unwrap_or(0).clamp(16, 1 << 24);
        let items = crate::codec::index(items);
        let (hasher, lifecycle) = (BuildHasherDefault::default(), DefaultLifecycle::default());
        let options = OptionsBuilder::new()
            .weight_capacity(capacity)
            .estimated_items_capacity(items)
            .shards(if capacity < 2 << 20 { 1 } else { 8 })
            .build();
        Self(match options {
            Ok(options) => Cache::with_options(options, ByWeight, hasher, lifecycle),
            // Both numbers are given above; the builder asks for nothing else.
            Err(_) => Cache::with(items, capacity, ByWeight, hasher, lifecycle),
        })
    }

    /// Bytes in use.
    pub fn used_bytes(&self) -> u64 {
        self.0.weight()
    }

    /// Whether most of it is unused.
    pub fn is_roomy(&self) -> bool {
        self.0.weight() < self.0.capacity() / 2
    }

    pub fn page(&self, number: u64) -> Option<Arc<[u8]>> {
        match self.0.get(&Name::Page(number)) {
            Some(Kept::Page(page)) => Some(page),
            _ => None,
        }
    }

    pub fn has_page(&self, number: u64) -> bool {
        self.0.contains_key(&Name::Page(number))
    }

    pub fn keep_page(&self, number: u64, page: Arc<[u8]>) {
        self.0.insert(Name::Page(number), Kept::Page(page));
    }

    pub fn forget_page(&self, number: u64) {
        self.0.remove(&Name::Page(number));
    }

    pub fn node(&self, ptr: Ptr) -> Option<Arc<Node>> {
        match self.0.get(&Name::Node(ptr.sum)) {
            Some(Kept::Node(node)) => Some(node),
            _ => None,
        }
    }

    /// Nodes are known by their sums, which hold the place: an address that is used again
    /// cannot be mistaken.
    pub fn keep_node(&self, ptr: Ptr, node: Arc<Node>) {
        self.0.insert(Name::Node(ptr.sum), Kept::Node(node));
    }

    pub fn forget_node(&self, ptr: Ptr) {
        self.0.remove(&Name::Node(ptr.sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::tree::Inner;

    #[test]
    fn both_kinds_share_one_limit_and_are_not_mistaken() {
        let memory = Memory::new(1 << 20, 4096);
        let node = Arc::new(Node::Inner(Inner::new(1, vec![])));
        let ptr = |sum| Ptr { at: 0, len: 7, sum };
        memory.keep_page(7, Arc::from(&[1; 4096][..]));
        assert!(memory.node(ptr(7)).is_none() && memory.page(7).is_some());
        memory.keep_node(ptr(7), node);
        assert!(memory.node(ptr(7)).is_some() && memory.page(7).is_some());
        memory.forget_node(ptr(7));
        assert!(memory.node(ptr(7)).is_none() && memory.has_page(7));
        memory.forget_page(7);
        assert!(memory.page(7).is_none());
        (0..1000).for_each(|number| memory.keep_page(number, Arc::from(&[2; 4096][..])));
        // Pages alone may have all.
        assert!((900 << 10..=1 << 20).contains(&memory.used_bytes()), "{}", memory.used_bytes());
    }
}
