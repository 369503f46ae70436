use std::collections::BTreeMap;

use super::*;
use crate::ObjectId;
use crate::codec::mix_bits;
use crate::entry::value_key;
use crate::index::leaf::LeafEdit;

/// Nodes in a map, by a number that is never reused.
#[derive(Default)]
struct MemoryNodes {
    nodes: BTreeMap<u64, Arc<Node>>,
    next: u64,
}

impl NodeSource for MemoryNodes {
    fn load(&self, ptr: BlockPtr) -> Result<Arc<Node>> {
        self.nodes
            .get(&ptr.at)
            .cloned()
            .ok_or(Error::Corrupt { what: "a dead node", at_bytes: ptr.at })
    }
}

impl NodeStore for MemoryNodes {
    fn write(&mut self, bytes: Vec<u8>) -> Result<BlockPtr> {
        self.next += 1;
        let node = Node::decode(&bytes, self.next)?;
        self.nodes.insert(self.next, Arc::new(node));
        Ok(BlockPtr { at: self.next, len: bytes.len() as u32, sum: 0 })
    }

    fn mark_dead(&mut self, ptr: BlockPtr) {
        assert!(self.nodes.remove(&ptr.at).is_some(), "killed twice");
    }

    fn node_bytes(&self) -> usize {
        256
    }
}

fn key(number: u64) -> Key {
    value_key(format!("{number:06}").as_bytes())
}

fn collect_pairs(tree: &Tree, nodes: &MemoryNodes) -> Vec<(Key, Entry)> {
    let (mut out, mut hint, mut from) = (vec![], None, Key::new());
    while let Some((key, entry)) = tree.first_at_or_after(nodes, &from, &mut hint).unwrap() {
        from = key.clone();
        from.push(0);
        out.push((key, entry));
    }
    let (mut back, mut hint) = (vec![], None);
    let mut from = value_key(b"~");
    while let Some((key, entry)) = tree.last_before(nodes, &from, &mut hint).unwrap() {
        from = key.clone();
        back.push((key, entry));
    }
    back.reverse();
    assert_eq!(out, back);
    out
}

#[test]
fn tree_edits_match_btree_map() {
    let (mut tree, mut nodes) = (Tree::default(), MemoryNodes::default());
    let mut model: BTreeMap<Key, Entry> = BTreeMap::new();
    let mut random = 3;
    let mut next = |below: u64| {
        random = mix_bits(random);
        random % below
    };
    for round in 0..200u64 {
        let is_shrinking = round % 40 >= 25;
        let mut edits: BTreeMap<Key, Option<Entry>> = BTreeMap::new();
        for _ in 0..1 + next(60) {
            let edit = match is_shrinking && next(8) != 0 {
                true => None,
                false => Some(Entry::ValueObject(ObjectId(round), next(1 << 40))),
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
        assert_eq!(collect_pairs(&tree, &nodes), model.clone().into_iter().collect::<Vec<_>>());
        let probe = key(next(900));
        assert_eq!(tree.get(&nodes, &probe).unwrap(), model.get(&probe).cloned());
    }
    // All nodes outside of the tree are dead.
    let gone = model.keys().map(|key| (key.clone(), None)).collect::<Vec<_>>();
    tree.apply(&mut nodes, &gone).unwrap();
    assert!(tree.root.is_none());
    assert_eq!(nodes.nodes.len(), 0);
}

#[test]
fn moved_node_is_rewritten_once() {
    let (mut tree, mut nodes) = (Tree::default(), MemoryNodes::default());
    let edits: Vec<LeafEdit> =
        (0..500).map(|n| (key(n), Some(Entry::ValueObject(ObjectId(n), n)))).collect();
    tree.apply(&mut nodes, &edits).unwrap();
    tree.write_changed(&mut nodes).unwrap();
    let before = collect_pairs(&tree, &nodes);
    let old: Vec<(u64, Key, u8)> = nodes
        .nodes
        .iter()
        .map(|(&at, node)| (at, Key::from_slice(node.first_key()), node.level()))
        .collect();
    for (at, key, level) in &old {
        let is_there = tree.has_node(&nodes, key, *level, *at).unwrap();
        assert!(is_there || *level > 0);
        if is_there {
            tree.move_node(&mut nodes, key, *at).unwrap();
        }
        assert!(!tree.has_node(&nodes, key, *level, *at).unwrap());
    }
    tree.write_changed(&mut nodes).unwrap();
    assert_eq!(collect_pairs(&tree, &nodes), before);
    assert!(old.iter().all(|(at, ..)| !nodes.nodes.contains_key(at)));
}
