//! Random changes compared with a model; every block is read back, and torn.

use draconis_testkit::wait::measure;
use std::collections::BTreeMap;

use draconis_device::Random;

use super::*;
use crate::format::dirent::{DirBlockBuilder, Dirents};
use crate::format::hash::HashSeed;
use crate::format::hash::NameHash;

const MAX_INODE: u32 = 1 << 30;

/// Names, file types and inode numbers that a seed reproduces.
pub(super) struct RandomNames(Random);

impl RandomNames {
    pub(super) fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0.next_below(limit as u64) as usize
    }

    fn name(&mut self, longest: usize) -> Vec<u8> {
        let len = 1 + self.below(longest);
        (0..len).map(|_| [b'a', b'b', b'z', 0x80, 0xFF, b'.'][self.below(6)]).collect()
    }

    fn kind(&mut self) -> FileType {
        [FileType::File, FileType::Directory, FileType::Symlink, FileType::Fifo][self.below(4)]
    }
}

type NameMap = BTreeMap<Vec<u8>, (u32, Option<FileType>)>;

/// Returns the names that a reader sees, none of them twice.
fn visible_names(block: &[u8], filetype: bool) -> NameMap {
    let mut names = NameMap::new();
    for entry in Dirents::new(block, filetype, MAX_INODE) {
        let entry = entry.unwrap();
        let old = names.insert(entry.name.to_vec(), (entry.inode.0, entry.kind));
        assert_eq!(old, None, "a name is there twice");
    }
    names
}

/// Returns every mixture of the sectors of two blocks.
pub(super) fn torn_versions(old: &[u8], new: &[u8]) -> Vec<Vec<u8>> {
    let sectors = 0..old.len() / SECTOR_BYTES;
    let of = |nth: usize| nth * SECTOR_BYTES..(nth + 1) * SECTOR_BYTES;
    let differ: Vec<usize> = sectors.filter(|nth| old[of(*nth)] != new[of(*nth)]).collect();
    assert!(differ.len() <= 12, "too many mixtures");
    (0..1 << differ.len())
        .map(|mixture: u32| {
            let mut torn = old.to_vec();
            for (bit, nth) in differ.iter().enumerate() {
                if mixture >> bit & 1 == 1 {
                    torn[of(*nth)].copy_from_slice(&new[of(*nth)]);
                }
            }
            torn
        })
        .collect()
}

/// One block, changed at random.
struct BlockModel {
    block: Vec<u8>,
    names: NameMap,
    filetype: bool,
    chance: RandomNames,
    whole: usize,
    parted: usize,
}

impl BlockModel {
    fn new(block_bytes: usize, filetype: bool, seed: u64) -> Self {
        let block = empty_block(DirBlockFormat {
            block_bytes: block_bytes as u32,
            filetype: true,
            has_checksums: false,
        });
        let names = NameMap::new();
        Self { block, names, filetype, chance: RandomNames::new(seed), whole: 0, parted: 0 }
    }

    fn visible_type(&self, kind: FileType) -> Option<FileType> {
        self.filetype.then_some(kind)
    }

    fn insert(&mut self, longest: usize) -> bool {
        let name = self.chance.name(longest);
        let found = find(&self.block, self.filetype, &name).unwrap();
        assert_eq!(found.is_some(), self.names.contains_key(&name));
        let need = min_rec_len(name.len());
        let room = find_slot(&self.block, need).unwrap();
        let target = match (found, room) {
            (Some(found), _) => SlotSearch::Found(found),
            (None, room) => room.map_or(SlotSearch::Full, SlotSearch::Free),
        };
        assert_eq!(find_or_slot(&self.block, self.filetype, &name).unwrap(), target);
        let Some(room) = room else { return false };
        if found.is_some() {
            return true;
        }
        let (inode, kind) = (InodeNumber(1 + self.chance.below(1000) as u32), self.chance.kind());
        let old = self.block.clone();
        let mut hidden = old.clone();
        insert_hidden(&mut hidden, &room, inode, kind, &name, self.filetype).unwrap();
        insert(&mut self.block, &room, inode, kind, &name, self.filetype).unwrap();
        let mut shown = hidden.clone();
        reveal_hidden(&mut shown, &room, inode).unwrap();
        assert_eq!(shown, self.block);
        let mut after = self.names.clone();
        after.insert(name, (inode.0, self.visible_type(kind)));
        for torn in torn_versions(&old, &hidden) {
            assert_eq!(visible_names(&torn, self.filetype), self.names);
        }
        let from = if room.is_tear_safe { &old } else { &hidden };
        for torn in torn_versions(from, &self.block) {
            let seen = visible_names(&torn, self.filetype);
            assert!(seen == self.names || seen == after);
        }
        *if room.is_tear_safe { &mut self.whole } else { &mut self.parted } += 1;
        self.names = after;
        true
    }

    fn random_existing_name(&mut self) -> Option<Vec<u8>> {
        let nth = self.chance.below(self.names.len().max(1));
        self.names.keys().nth(nth).cloned()
    }

    fn remove(&mut self) {
        let Some(name) = self.random_existing_name() else { return };
        let found = find(&self.block, self.filetype, &name).unwrap().unwrap();
        let old = self.block.clone();
        remove(&mut self.block, &found).unwrap();
        let changed = old.iter().zip(&self.block).filter(|(old, new)| old != new).count();
        assert!((1..=4).contains(&changed));
        let before = self.names.clone();
        self.names.remove(&name);
        for torn in torn_versions(&old, &self.block) {
            let seen = visible_names(&torn, self.filetype);
            assert!(seen == before || seen == self.names);
        }
        assert_eq!(remove(&mut self.block, &found), remove_again(&self.block, &found));
    }

    fn replace(&mut self) {
        let Some(name) = self.random_existing_name() else { return };
        let found = find(&self.block, self.filetype, &name).unwrap().unwrap();
        assert_eq!((found.inode.0, found.kind), self.names[&name]);
        let (inode, kind) = (InodeNumber(5000), self.chance.kind());
        set_inode(&mut self.block, found.at, inode, kind, self.filetype).unwrap();
        self.names.insert(name, (inode.0, self.visible_type(kind)));
    }

    fn split(&mut self) {
        let hash = hash();
        let LeafSplit { low, high, hash: lowest } = split(&self.block, &hash).unwrap();
        let (below, above) =
            (visible_names(&low, self.filetype), visible_names(&high, self.filetype));
        assert!(!below.is_empty() && !above.is_empty());
        assert!(below.keys().all(|name| hash.hash_name(name) <= lowest & !1));
        assert_eq!(above.keys().map(|name| hash.hash_name(name)).min(), Some(lowest & !1));
        let shared = below.keys().any(|name| hash.hash_name(name) == lowest & !1);
        assert_eq!(lowest & 1 == 1, shared);
        let bytes =
            |names: &NameMap| -> usize { names.keys().map(|it| min_rec_len(it.len())).sum() };
        let longest = self.names.keys().map(|it| min_rec_len(it.len())).max().unwrap();
        assert!(bytes(&below).abs_diff(bytes(&above)) <= longest);
        let mut both = below.clone();
        both.extend(above);
        assert_eq!(both, self.names);
        // A tear keeps each name that stays, and shows no name that never existed.
        for torn in torn_versions(&self.block, &low) {
            let seen = visible_names(&torn, self.filetype);
            assert!(below.iter().all(|(name, what)| seen.get(name) == Some(what)));
            assert!(seen.iter().all(|(name, what)| self.names.get(name) == Some(what)));
        }
        assert_eq!(visible_names(&pack(&low).unwrap(), self.filetype), below);
        let packed_end = self.block.len() - bytes(&below);
        let room = find_slot(&pack(&low).unwrap(), packed_end).unwrap();
        assert!(room.is_some(), "a packed block has all of its room in one piece");
        (self.block, self.names) = (low, below);
    }
}

/// Removing an entry twice is refused, unless the bytes still look as before.
fn remove_again(block: &[u8], found: &FoundRecord) -> Result<()> {
    remove(&mut block.to_vec(), found)
}

pub(super) fn hash() -> NameHash {
    NameHash::of_version(1, false, HashSeed::new([7; 4])).unwrap()
}

#[test]
fn block_matches_model_after_changes_and_torn_writes() {
    for (block_bytes, rounds) in [(1024, 3000), (2048, 2000), (4096, 2000), (65536, 1200)] {
        for filetype in [true, false] {
            let mut model = BlockModel::new(block_bytes, filetype, block_bytes as u64);
            let mut splits = 0;
            for round in 0..rounds {
                // Occasional long names; without them, the largest blocks would never fill.
                let longest =
                    if model.chance.below(8) == 0 || block_bytes > 4096 { 255 } else { 24 };
                let growing = round % 400 < 300;
                match model.chance.below(10) {
                    0..=6 if growing => {
                        if !model.insert(longest) && model.names.len() > 1 && block_bytes <= 4096 {
                            model.split();
                            splits += 1;
                        }
                    }
                    7 => model.replace(),
                    _ => model.remove(),
                }
                if round % 16 == 0 {
                    assert_eq!(visible_names(&model.block, filetype), model.names);
                    assert_eq!(is_empty(&model.block, false).unwrap(), model.names.is_empty());
                }
            }
            while !model.names.is_empty() {
                model.remove();
            }
            assert!(is_empty(&model.block, false).unwrap());
            assert!(splits > 3 || block_bytes > 4096, "{splits} of {block_bytes}");
            let (whole, parted) = (model.whole, model.parted);
            assert!(whole > parted && parted > 0, "{whole} {parted}");
        }
    }
}

#[test]
fn largest_blocks_can_be_split() {
    let mut model = BlockModel::new(65536, true, 9);
    let mut nth = 0u32;
    loop {
        let name = format!("{nth:0100}").into_bytes();
        let Some(room) = find_slot(&model.block, min_rec_len(name.len())).unwrap() else { break };
        let inode = InodeNumber(nth + 1);
        insert(&mut model.block, &room, inode, FileType::File, &name, true).unwrap();
        nth += 1;
    }
    let all = visible_names(&model.block, true);
    assert_eq!(all.len(), 65536 / min_rec_len(100));
    let LeafSplit { low, high, .. } = split(&model.block, &hash()).unwrap();
    let (mut below, above) = (visible_names(&low, true), visible_names(&high, true));
    assert!(below.len().abs_diff(above.len()) <= 1);
    below.extend(above);
    assert_eq!(below, all);
}

#[test]
fn equal_hashes_are_separated_only_if_unavoidable() {
    // Searches for a pair of names whose legacy hashes collide.
    let hash = NameHash::of_version(0, false, HashSeed::new([0; 4])).unwrap();
    let mut seen = BTreeMap::new();
    let mut chance = RandomNames::new(3);
    let (one, two) = loop {
        let name: Vec<u8> = (0..6).map(|_| b'a' + chance.below(26) as u8).collect();
        match seen.insert(hash.hash_name(&name), name.clone()) {
            Some(other) if other != name => break (other, name),
            _ => {}
        }
    };
    let block_of = |names: &[&[u8]]| {
        let mut writer = DirBlockBuilder::new(DirBlockFormat {
            block_bytes: 1024,
            filetype: true,
            has_checksums: false,
        });
        names.iter().for_each(|name| assert!(writer.push(12, FileType::File, name)));
        writer.finish()
    };
    let halves = split(&block_of(&[&one, &two]), &hash).unwrap();
    assert_eq!(halves.hash, hash.hash_name(&one) | 1);
    let halves = split(&block_of(&[&one, b"other", &two]), &hash).unwrap();
    assert_eq!(halves.hash & 1, 0);
    let together = [&halves.low, &halves.high]
        .map(|half| visible_names(half, true))
        .iter()
        .any(|half| half.contains_key(&one) && half.contains_key(&two));
    assert!(together);
    assert!(split(&block_of(&[b"alone"]), &hash).is_err());
    assert!(
        split(
            &empty_block(DirBlockFormat {
                block_bytes: 1024,
                filetype: true,
                has_checksums: false
            }),
            &hash
        )
        .is_err()
    );
}

#[test]
fn dot_entries_are_special_only_in_first_block() {
    let mut writer = DirBlockBuilder::new(DirBlockFormat {
        block_bytes: 1024,
        filetype: true,
        has_checksums: false,
    });
    assert!(
        writer.push(2, FileType::Directory, b".") && writer.push(2, FileType::Directory, b"..")
    );
    let mut block = writer.finish();
    assert!(is_empty(&block, true).unwrap());
    assert!(!is_empty(&block, false).unwrap());
    let dot_dot = find(&block, true, b"..").unwrap().unwrap();
    assert_eq!((dot_dot.at, dot_dot.previous), (12, Some(0)));
    set_inode(&mut block, 12, InodeNumber(77), FileType::Directory, true).unwrap();
    assert_eq!(find(&block, true, b"..").unwrap().unwrap().inode, InodeNumber(77));
    let room = find_slot(&block, 12).unwrap().unwrap();
    assert!(room.is_tear_safe && room.at == 24);
    insert(&mut block, &room, InodeNumber(12), FileType::File, b"x", true).unwrap();
    assert!(!is_empty(&block, true).unwrap());
}

#[test]
fn invalid_edits_are_refused_without_changes() {
    let mut block =
        empty_block(DirBlockFormat { block_bytes: 1024, filetype: true, has_checksums: false });
    let before = block.clone();
    let room = find_slot(&block, 16).unwrap().unwrap();
    let inode = InodeNumber(12);
    for name in [&b""[..], b"a/b", b"a\0"] {
        let refused = insert(&mut block, &room, inode, FileType::File, name, true);
        assert!(matches!(refused, Err(Error::Misuse(_))));
    }
    let refused = insert(&mut block, &room, inode, FileType::File, &[b'x'; 256], true);
    assert_eq!(refused, Err(Error::NameTooLong));
    let refused = insert(&mut block, &room, InodeNumber(0), FileType::File, b"x", true);
    assert!(matches!(refused, Err(Error::Misuse(_))));
    let nowhere = FoundRecord { at: 0, previous: None, inode, kind: None };
    assert!(matches!(remove(&mut block, &nowhere), Err(Error::Misuse(_))));
    assert!(set_inode(&mut block, 0, inode, FileType::File, true).is_err());
    assert!(set_inode(&mut block, usize::MAX, inode, FileType::File, true).is_err());
    assert_eq!(block, before);
    insert(&mut block, &room, inode, FileType::File, b"x", true).unwrap();
    let taken = insert(&mut block, &room, inode, FileType::File, b"y", true);
    assert!(matches!(taken, Err(Error::Misuse(_))), "the room is used up");
}

#[test]
fn random_bytes_do_not_panic() {
    let mut chance = RandomNames::new(11);
    let mut refused = 0;
    for round in 0..20_000 {
        let mut model = empty_block(DirBlockFormat {
            block_bytes: [1024, 65536][usize::from(round % 50 == 0)],
            filetype: true,
            has_checksums: false,
        });
        for _ in 0..chance.below(4) {
            if let Some(room) = find_slot(&model, 40).unwrap() {
                let name = chance.name(32);
                insert(&mut model, &room, InodeNumber(12), FileType::File, &name, true).unwrap();
            }
        }
        for _ in 0..1 + chance.below(6) {
            let at =
                if chance.below(2) == 0 { chance.below(64) } else { chance.below(model.len()) };
            model[at] = chance.below(256) as u8;
        }
        let block = &model[..if round % 7 == 0 { chance.below(1024) } else { model.len() }];
        refused += usize::from(is_empty(block, true).is_err());
        let found = find(block, true, b"a").ok().flatten();
        let room = find_slot(block, 12 + chance.below(300)).ok().flatten();
        let shape = DirBlockFormat {
            block_bytes: block.len() as u32,
            filetype: true,
            has_checksums: false,
        };
        let make = |block: &[u8]| index::make_indexed(block, 1, 1, shape);
        let _ = (pack(block), split(block, &hash()), make(block));
        let mut block = block.to_vec();
        if let Some(found) = found {
            remove(&mut block, &found).unwrap();
        }
        if let Some(room) = room {
            let _ = insert(&mut block, &room, InodeNumber(3), FileType::Fifo, b"a", true);
        }
    }
    assert!(refused > 1000);
}

/// Run with `cargo test --release -- --ignored --nocapture a_full_block`: cost of a slot search.
#[test]
#[ignore = "by hand: measures"]
fn by_hand_full_block_is_searched_quickly() {
    for len in [4, 8, 12, 24] {
        let mut block =
            empty_block(DirBlockFormat { block_bytes: 4096, filetype: true, has_checksums: false });
        let mut nth = 0u32;
        while let Some(room) = find_slot(&block, min_rec_len(len)).unwrap() {
            let name = format!("{nth:0len$}").into_bytes();
            insert(&mut block, &room, InodeNumber(12), FileType::File, &name, true).unwrap();
            nth += 1;
        }
        let ((), room) = measure(|| {
            for _ in 0..100_000 {
                std::hint::black_box(find_slot(std::hint::black_box(&block), min_rec_len(len)))
                    .unwrap();
            }
        });
        let room = room / 100_000;
        let name = vec![b'x'; len];
        let ((), find) = measure(|| {
            for _ in 0..100_000 {
                std::hint::black_box(find(std::hint::black_box(&block), true, &name)).unwrap();
            }
        });
        let find = find / 100_000;
        let ((), seek) = measure(|| {
            for _ in 0..100_000 {
                std::hint::black_box(find_or_slot(std::hint::black_box(&block), true, &name))
                    .unwrap();
            }
        });
        let seek = seek / 100_000;
        println!("{nth} names of {len}: room {room:?}, find {find:?}, both {seek:?}");
    }
}
