//! A directory that grows entry by entry, and is read back through its index.

use std::collections::BTreeMap;

use draconis_types::FileType;

use super::super::tests::{RandomNames, hash, torn_versions};
use super::super::{find, find_slot, insert as insert_name, split};
use super::*;
use crate::InodeNumber;
use crate::format::dirent::{DirBlockBuilder, Dirents, min_rec_len};
use crate::format::hash::HashSeed;
use crate::format::htree::DxRoot;

const fn shape(block_bytes: u32, filetype: bool) -> DirBlockFormat {
    DirBlockFormat { block_bytes, filetype, has_checksums: false }
}

/// An in-memory directory.
struct Directory {
    blocks: Vec<Vec<u8>>,
    most_levels: u8,
}

impl Directory {
    fn new(block_bytes: u32, most_levels: u8) -> Self {
        let mut writer = DirBlockBuilder::new(shape(block_bytes, true));
        assert!(
            writer.push(20, FileType::Directory, b".")
                && writer.push(2, FileType::Directory, b"..")
        );
        let (root, leaf) = make_indexed(&writer.finish(), 1, 1, shape(block_bytes, true)).unwrap();
        Self { blocks: vec![root, leaf], most_levels }
    }

    fn root(&self) -> (DxRoot, DxEntries<'_>) {
        DxRoot::check(&self.blocks[0], false, HashSeed::new([7; 4])).unwrap()
    }

    fn index(&self, nth: usize, block: usize) -> DxEntries<'_> {
        if nth == 0 { self.root().1 } else { DxEntries::from_node(&self.blocks[block]).unwrap() }
    }

    /// Returns the index blocks on the path to a hash, each with the entry's index, and the leaf.
    fn find_path(&self, hash: u32) -> (Vec<(usize, usize)>, usize) {
        let mut block = 0;
        let mut path = Vec::new();
        for nth in 0..=usize::from(self.root().0.levels) {
            let index = self.index(nth, block);
            let place = index.find(hash);
            path.push((block, place));
            block = index.block(place).unwrap().0 as usize;
        }
        (path, block)
    }

    fn insert(&mut self, name: &[u8]) -> Result<()> {
        loop {
            let (path, leaf) = self.find_path(hash().hash_name(name));
            if let Some(room) = find_slot(&self.blocks[leaf], min_rec_len(name.len()))? {
                let block = &mut self.blocks[leaf];
                return insert_name(block, &room, InodeNumber(12), FileType::File, name, true);
            }
            if self.split_full_nodes(&path)? {
                continue;
            }
            let halves = split(&self.blocks[leaf], &hash())?;
            let block = self.blocks.len() as u32;
            self.blocks[leaf] = halves.low;
            self.blocks.push(halves.high);
            let (last, place) = *path.last().unwrap();
            let level = if path.len() == 1 { IndexBlockKind::Root } else { IndexBlockKind::Node };
            let entry = DxEntry { hash: halves.hash, block };
            assert!(insert(&mut self.blocks[last], level, place, entry)?);
        }
    }

    /// Splits the highest full index block below which all are full, if there is one; the path
    /// changes then.
    fn split_full_nodes(&mut self, path: &[(usize, usize)]) -> Result<bool> {
        let level = |nth: usize| if nth == 0 { IndexBlockKind::Root } else { IndexBlockKind::Node };
        let mut start = path.len();
        while start > 0 && !has_room(&self.blocks[path[start - 1].0], level(start - 1))? {
            start -= 1;
        }
        if start == path.len() {
            return Ok(false);
        }
        if start == 0 {
            let block = self.blocks.len();
            let (root, node) = add_level(
                &self.blocks[0],
                block as u32,
                self.most_levels,
                shape(self.blocks[0].len() as u32, true),
            )?;
            for torn in torn_versions(&self.blocks[0], &root) {
                assert!(torn == self.blocks[0] || torn == root);
            }
            self.blocks[0] = root;
            self.blocks.push(node);
        } else {
            let (above, place) = path[start - 1];
            let (node, _) = path[start];
            let halves = split_node(&self.blocks[node], shape(self.blocks[0].len() as u32, true))?;
            let block = self.blocks.len() as u32;
            for torn in torn_versions(&self.blocks[node], &halves.low) {
                assert!(torn == self.blocks[node] || torn == halves.low);
            }
            self.blocks[node] = halves.low;
            self.blocks.push(halves.high);
            let entry = DxEntry { hash: halves.hash, block };
            assert!(insert(&mut self.blocks[above], level(start - 1), place, entry)?);
        }
        Ok(true)
    }

    fn contains_name(&self, name: &[u8]) -> bool {
        let (_, leaf) = self.find_path(hash().hash_name(name));
        find(&self.blocks[leaf], true, name).unwrap().is_some()
    }

    /// Returns all names by a sequential read.
    fn all_names(&self) -> BTreeMap<Vec<u8>, u32> {
        let mut all = BTreeMap::new();
        for block in &self.blocks {
            for entry in Dirents::new(block, true, 100) {
                let entry = entry.unwrap();
                assert_eq!(all.insert(entry.name.to_vec(), entry.inode.0), None);
            }
        }
        all
    }
}

fn grow_directory(
    block_bytes: u32,
    most_levels: u8,
    names: usize,
    len: usize,
) -> (Directory, usize) {
    let mut dir = Directory::new(block_bytes, most_levels);
    for nth in 0..names {
        let name = format!("{nth:0len$}").into_bytes();
        match dir.insert(&name) {
            Ok(()) => {}
            Err(Error::NoSpace) => return (dir, nth),
            Err(other) => panic!("{other}"),
        }
    }
    (dir, names)
}

#[test]
fn htrees_grow_to_every_depth_without_losing_names() {
    // Number of names, their length, and the levels that they need.
    for (block_bytes, most, count, len, levels) in
        [(1024, 1, 150, 255, 0), (1024, 1, 12_000, 255, 1), (4096, 1, 40_000, 60, 1)]
    {
        let (dir, grown) = grow_directory(block_bytes, most, count, len);
        assert_eq!((grown, dir.root().0.levels), (count, levels));
        assert_eq!(dir.all_names().len(), count + 2);
        for nth in (0..count).step_by(7) {
            assert!(dir.contains_name(format!("{nth:0len$}").as_bytes()));
        }
        assert!(!dir.contains_name(b"absent"));
    }
}

#[test]
fn full_htree_returns_no_space_unless_large_dir() {
    let (full, names) = grow_directory(1024, 1, 60_000, 255);
    assert_eq!(full.root().0.levels, 1);
    assert!((12_000..50_000).contains(&names), "{names}");
    assert_eq!(full.all_names().len(), names + 2);
    let (deep, grown) = grow_directory(1024, 2, names + 2000, 255);
    assert_eq!((grown, deep.root().0.levels), (names + 2000, 2));
    assert_eq!(deep.all_names().len(), grown + 2);
    assert!((0..grown).step_by(11).all(|nth| deep.contains_name(format!("{nth:0255}").as_bytes())));
    assert_eq!([max_levels(false), max_levels(true)], [1, 2]);
}

#[test]
fn block_becomes_htree_root_in_first_sector() {
    let mut writer = DirBlockBuilder::new(shape(4096, true));
    assert!(
        writer.push(20, FileType::Directory, b".") && writer.push(2, FileType::Directory, b"..")
    );
    let mut names = 2;
    while writer.push(30, FileType::Fifo, format!("name {names}").as_bytes()) {
        names += 1;
    }
    let old = writer.finish();
    let (root, leaf) = make_indexed(&old, 1, 5, shape(4096, true)).unwrap();
    let mixtures = torn_versions(&old, &root);
    assert_eq!(mixtures.len(), 2, "one sector differs");
    let (head, index) = DxRoot::check(&root, false, HashSeed::new([7; 4])).unwrap();
    assert_eq!((head.levels, head.hash), (0, hash()));
    assert_eq!(index.block(0).unwrap().0, 5);
    let read = |block: &[u8]| -> Vec<(Vec<u8>, u32, Option<FileType>)> {
        Dirents::new(block, true, 100)
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.name.to_vec(), entry.inode.0, entry.kind))
            .collect()
    };
    assert_eq!([read(&root), read(&leaf)].concat(), read(&old));
    // A directory without file types has none after the conversion.
    let mut writer = DirBlockBuilder::new(shape(1024, false));
    assert!(
        writer.push(20, FileType::Directory, b".") && writer.push(2, FileType::Directory, b"..")
    );
    let (root, _) = make_indexed(&writer.finish(), 1, 1, shape(1024, false)).unwrap();
    assert_eq!((root[7], root[19]), (0, 0));
    assert!(
        make_indexed(&super::super::empty_block(shape(1024, false)), 1, 1, shape(1024, false))
            .is_err()
    );
    let (largest, _) = make_indexed(&dots(65536), 1, 1, shape(65536, true)).unwrap();
    assert_eq!(read(&largest).len(), 2);
}

fn dots(block_bytes: u32) -> Vec<u8> {
    let mut writer = DirBlockBuilder::new(shape(block_bytes, true));
    assert!(
        writer.push(20, FileType::Directory, b".") && writer.push(2, FileType::Directory, b"..")
    );
    writer.finish()
}

#[test]
fn index_entries_stay_sorted_up_to_limit() {
    let mut chance = RandomNames::new(5);
    for block_bytes in [1024, 2048, 4096, 65536] {
        let first = DxEntry { hash: 0, block: 1 };
        let mut block = htree::encode_node(&[first], shape(block_bytes, true)).unwrap();
        let mut model = BTreeMap::new();
        for nth in 1.. {
            let hash = 2 + 2 * chance.below(1 << 30) as u32;
            if model.contains_key(&hash) {
                continue;
            }
            let place = DxEntries::from_node(&block).unwrap().find(hash);
            let entry = DxEntry { hash, block: nth };
            if !insert(&mut block, IndexBlockKind::Node, place, entry).unwrap() {
                break;
            }
            model.insert(hash, nth);
        }
        assert_eq!(model.len() + 1, dx_node_limit(shape(block_bytes, true)));
        let index = DxEntries::from_node(&block).unwrap();
        for (hash, block) in &model {
            assert_eq!(index.block(index.find(*hash)).unwrap().0, *block);
        }
        let halves = split_node(&block, shape(block_bytes, true)).unwrap();
        let (low, high) = (
            DxEntries::from_node(&halves.low).unwrap(),
            DxEntries::from_node(&halves.high).unwrap(),
        );
        assert_eq!((low.count(), low.count() + high.count()), (halves.kept, model.len() + 1));
        for (hash, block) in &model {
            let half = if *hash < halves.hash { low } else { high };
            assert_eq!(half.block(half.find(*hash)).unwrap().0, *block);
        }
    }
}

#[test]
fn invalid_index_is_not_edited() {
    let entry = |hash| DxEntry { hash, block: 9 };
    let node = htree::encode_node(&[entry(0), entry(10), entry(20)], shape(1024, true)).unwrap();
    let mut block = node.clone();
    assert!(insert(&mut block, IndexBlockKind::Node, 0, entry(12)).is_err(), "above the next");
    assert!(insert(&mut block, IndexBlockKind::Node, 2, entry(12)).is_err(), "below the last");
    assert!(insert(&mut block, IndexBlockKind::Node, 3, entry(30)).is_err(), "no such entry");
    assert!(insert(&mut block, IndexBlockKind::Node, usize::MAX, entry(30)).is_err());
    assert_eq!(block, node);
    block[8..10].copy_from_slice(&500u16.to_le_bytes());
    assert!(
        insert(&mut block, IndexBlockKind::Node, 2, entry(30)).is_err(),
        "a limit beyond the block"
    );
    assert!(
        split_node(&htree::encode_node(&[entry(0)], shape(1024, true)).unwrap(), shape(1024, true))
            .is_err()
    );
    let mut chance = RandomNames::new(8);
    for _ in 0..20_000 {
        let mut block = if chance.below(2) == 0 { node.clone() } else { dots(1024) };
        for _ in 0..1 + chance.below(5) {
            block[chance.below(48)] = chance.below(256) as u8;
        }
        block.truncate(if chance.below(5) == 0 { chance.below(60) } else { 1024 });
        for level in [IndexBlockKind::Root, IndexBlockKind::Node] {
            let mut block = block.clone();
            let _ = has_room(&block, level);
            let _ = insert(&mut block, level, chance.below(4), entry(chance.below(30) as u32));
        }
        let shape = shape(block.len() as u32, true);
        let _ = (split_node(&block, shape), add_level(&block, 7, 2, shape));
        let _ = make_indexed(&block, 1, 1, shape);
    }
}
