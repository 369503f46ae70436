//! Directories, built bottom-up: names into blocks, blocks under a hash tree.
//!
//! ```text
//!   small or unindexed   | . .. name name | name name .. | ..
//!   indexed              | root | nodes .. | leaves in the order of their hashes .. |
//! ```
//! Law: names with one hash that fill more than the rest of a leaf go on in the next, and
//! the index says so.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with numbers of the builder's own, all far below their limits"
)]

use draconis_exchange::contract::Kind;

use crate::format::dirent::{BlockWriter, Shape, record_bytes};
use crate::format::hash::Hash;
use crate::format::htree::{self, Entry};
use crate::units::index;

/// A name and what it names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Name<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) inode: u32,
    pub(crate) kind: Kind,
}

/// How the directories of a volume look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) shape: Shape,
    /// How larger ones are indexed, and the number of that function.
    pub(crate) index: Option<(Hash, u8)>,
}

/// The blocks of a directory.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) bytes: Vec<u8>,
    /// Whether they are a hash tree.
    pub(crate) indexed: bool,
}

/// The part of a leaf that stays free, so that the first new names split nothing.
const SPARE: usize = 8;
/// Levels of nodes below the root that ext2 allows.
const MOST_LEVELS: u8 = 1;

/// Builds the directory `own`, whose parent is `parent`, of these names.
pub(crate) fn build(own: u32, parent: u32, names: &[Name<'_>], style: Style) -> Built {
    let dots = [
        Name { name: b".", inode: own, kind: Kind::Directory },
        Name { name: b"..", inode: parent, kind: Kind::Directory },
    ];
    let room = style.shape.names_bytes();
    let one: usize = dots.iter().chain(names).map(|it| record_bytes(it.name.len())).sum();
    if one > room
        && let Some((hash, version)) = style.index
        && let Some(bytes) = tree(dots, names, hash, version, style)
    {
        return Built { bytes, indexed: true };
    }
    Built { bytes: linear(dots.iter().chain(names), style), indexed: false }
}

fn linear<'a>(names: impl Iterator<Item = &'a Name<'a>>, style: Style) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut block = BlockWriter::new(style.shape);
    for it in names {
        if !block.push(it.inode, it.kind, it.name) {
            bytes.extend(block.finish());
            block.push(it.inode, it.kind, it.name);
        }
    }
    bytes.extend(block.finish());
    bytes
}

/// A directory as a hash tree; `None` if it is too large for one.
fn tree(
    dots: [Name<'_>; 2],
    names: &[Name<'_>],
    hash: Hash,
    version: u8,
    style: Style,
) -> Option<Vec<u8>> {
    let (leaves, entries) = leaves(names, hash, style);
    let root_room = htree::root_room(style.shape);
    let node_room = htree::node_room(style.shape);
    // Lowest level first; blocks are numbered once the number of nodes is known.
    let mut levels: u8 = 0;
    let mut tops = entries.len();
    while tops > root_room {
        tops = tops.div_ceil(node_room);
        levels += 1;
    }
    if levels > MOST_LEVELS {
        return None;
    }
    let nodes = if levels == 0 { 0 } else { tops };
    let first_leaf = u32::try_from(nodes).ok()?.checked_add(1)?;
    let entries: Vec<Entry> = entries
        .into_iter()
        .map(|entry| Entry { block: entry.block + first_leaf, ..entry })
        .collect();

    let [own, parent] = dots.map(|dot| dot.inode);
    let mut bytes = Vec::with_capacity((nodes + 1) * leaves.len().max(1));
    if levels == 0 {
        bytes.extend(htree::root(own, parent, version, 0, &entries, style.shape)?);
    } else {
        let mut upper = Vec::new();
        let mut written = Vec::new();
        // Nodes of equal size: the last one is not left almost empty.
        for (nth, part) in entries.chunks(entries.len().div_ceil(nodes)).enumerate() {
            let block = u32::try_from(nth).ok()?.checked_add(1)?;
            upper.push(Entry { hash: part.first()?.hash, block });
            written.extend(htree::node(part, style.shape)?);
        }
        let root = htree::root(own, parent, version, levels, &upper, style.shape)?;
        bytes.extend(root);
        bytes.extend(written);
        bytes.resize(index(u64::from(first_leaf)) * index(style.shape.block_bytes.into()), 0);
    }
    bytes.extend(leaves);
    Some(bytes)
}

/// The names in leaves, in the order of their hashes, and an index entry for each leaf;
/// leaves count from 0.
fn leaves(names: &[Name<'_>], hash: Hash, style: Style) -> (Vec<u8>, Vec<Entry>) {
    let mut hashed: Vec<(u32, &Name<'_>)> = names.iter().map(|it| (hash.of(it.name), it)).collect();
    hashed.sort_unstable_by(|a, b| (a.0, a.1.name).cmp(&(b.0, b.1.name)));
    let block_bytes = index(style.shape.block_bytes.into());
    let full = block_bytes - block_bytes / SPARE;
    let mut bytes = Vec::new();
    let mut entries: Vec<Entry> = vec![Entry { hash: 0, block: 0 }];
    let mut block = BlockWriter::new(style.shape);
    let mut last = None;
    for (hash, it) in hashed {
        let crowded = block.used_bytes() + record_bytes(it.name.len()) > full;
        // Names with one hash stay together as long as the block has any room.
        let split = crowded && last != Some(hash) && !block.is_empty();
        if split || !block.push(it.inode, it.kind, it.name) {
            bytes.extend(block.finish());
            let goes_on = u32::from(last == Some(hash));
            let nth = bytes.len() / block_bytes;
            entries.push(Entry { hash: hash | goes_on, block: crate::units::narrow(nth as u64) });
            block.push(it.inode, it.kind, it.name);
        }
        last = Some(hash);
    }
    bytes.extend(block.finish());
    (bytes, entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::hash::Seed;
    use crate::format::htree::{Index, Root};

    fn names(count: u32, len: usize) -> Vec<Vec<u8>> {
        (0..count).map(|nth| format!("{nth:0len$}").into_bytes()).collect()
    }

    fn build_of(names: &[Vec<u8>]) -> Built {
        let names: Vec<Name<'_>> =
            names.iter().map(|name| Name { name, inode: 12, kind: Kind::File }).collect();
        let hash = Hash::of_version(1, false, Seed::new([1; 4])).unwrap();
        let style = Style {
            shape: Shape { block_bytes: 1024, filetype: true, sums: false },
            index: Some((hash, 1)),
        };
        build(2, 2, &names, style)
    }

    #[test]
    fn one_block_holds_what_fits_exactly() {
        // `.` and `..` take 24 bytes, each of these 20.
        let full = names(50, 12);
        let built = build_of(&full);
        assert!(!built.indexed && built.bytes.len() == 1024);
        let built = build_of(&names(51, 12));
        assert!(built.indexed && built.bytes.len() >= 3 * 1024);
        assert_eq!(build_of(&[]).bytes.len(), 1024);
    }

    #[test]
    fn levels_grow_with_the_names_and_give_out_at_last() {
        let levels = |built: &Built| {
            let (root, _) = Root::check(&built.bytes[..1024], false, Seed::new([1; 4])).unwrap();
            root.levels
        };
        // Three names to a leaf: a root has room for 124 of them.
        assert_eq!(levels(&build_of(&names(3 * 124, 255))), 0);
        let built = build_of(&names(3 * 125, 255));
        assert_eq!(levels(&built), 1);
        Index::of_node(&built.bytes[1024..2048]).unwrap();
        assert_eq!(levels(&build_of(&names(3 * 124 * 127, 255))), 1);
        let built = build_of(&names(3 * 124 * 127 + 1, 255));
        assert!(!built.indexed, "no third level");
    }
}
