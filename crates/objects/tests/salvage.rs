//! Salvage of damaged stores: what is intact comes back, what was removed does not.

use std::ops::RangeFull;
use std::sync::Arc;

use draconis_device::{Disk, Group as DiskGroup, MemoryDisk, Random, Write};
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::Kv;
use draconis_objects::{
    CreateOptions, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, SalvageOptions,
    SalvageReport, Store,
};
use draconis_types::Block;

const DISK_BYTES: usize = 64 << 20;
const PAIRS: u64 = 20_000;
const LAYOUTS: [LayoutKind; 3] = [LayoutKind::Log, LayoutKind::Cow, LayoutKind::Bucket];

fn profile(layout: LayoutKind) -> Profile {
    Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 4 }
}

fn create(bytes: usize, layout: LayoutKind) -> (Arc<MemoryDisk>, Arc<Store>) {
    let disk = Arc::new(MemoryDisk::new(vec![0; bytes], 512));
    Store::create(disk.clone(), &CreateOptions { profile: profile(layout), id: 7 }).unwrap();
    let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
    (disk, store)
}

fn bytes_of(disk: Arc<MemoryDisk>) -> Vec<u8> {
    Arc::into_inner(disk).expect("no other holder").into_bytes()
}

fn key(nth: u64) -> Vec<u8> {
    format!("k{nth:08}").into_bytes()
}

fn value(nth: u64, len: usize) -> Vec<u8> {
    format!("{nth:0len$}").into_bytes()
}

/// Returns a store of pairs, closed as a command closes it.
fn filled_image(layout: LayoutKind, pairs: u64, value_len: usize) -> Vec<u8> {
    let (disk, store) = create(DISK_BYTES, layout);
    let kv = Kv::new(store.clone());
    for nth in 0..pairs {
        kv.put(&key(nth), &value(nth, value_len)).unwrap();
    }
    store.checkpoint().unwrap();
    drop((kv, store));
    bytes_of(disk)
}

fn flip_bits(bytes: &mut [u8], count: usize, seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..count {
        let at = random.next_below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.next_below(8);
    }
}

/// Overwrites some bytes of what is in use, so that no bit can be changed back.
fn overwrite_some(bytes: &mut [u8], count: usize, seed: u64) {
    let mut random = Random::new(seed);
    let used: Vec<usize> = (0..bytes.len()).step_by(64).filter(|at| bytes[*at] != 0).collect();
    for _ in 0..count {
        let at = used[random.next_below(used.len() as u64) as usize];
        bytes[at..at + 16].fill(0xa5);
    }
}

/// Salvages a store; none if it is refused.
fn salvage(bytes: Vec<u8>, layout: LayoutKind) -> Option<(SalvageReport, Arc<Store>)> {
    let old = Arc::new(MemoryDisk::new(bytes, 512));
    let (_, new) = create(old.properties().len_bytes as usize, layout);
    let report = new.salvage(old).ok()?;
    Some((report, new))
}

/// Returns the number of pairs; each must have its value.
fn count_pairs(store: &Arc<Store>, value_len: usize) -> u64 {
    let mut count = 0;
    for pair in Kv::new(store.clone()).scan::<RangeFull>(&..) {
        let (key, is) = pair.unwrap();
        let nth: u64 = std::str::from_utf8(&key[1..]).unwrap().parse().unwrap();
        assert_eq!(is, value(nth, value_len), "key {nth}");
        count += 1;
    }
    count
}

/// Returns the pairs that come back, for each of some seeds, sorted.
fn pairs_back(layout: LayoutKind, value_len: usize, flips: usize, seeds: u64) -> Vec<u64> {
    let whole = filled_image(layout, PAIRS, value_len);
    let back = (0..seeds).map(|seed| {
        let mut bytes = whole.clone();
        flip_bits(&mut bytes, flips, seed);
        let (report, new) = salvage(bytes, layout).expect("a superblock is there");
        let count = count_pairs(&new, value_len);
        assert!(count == PAIRS || !report.lost.is_empty(), "{layout:?} {value_len} {seed}");
        count
    });
    let mut back: Vec<u64> = back.collect();
    back.sort_unstable();
    back
}

/// 150 flipped bits in 64 MiB cost the pairs that they are in.
#[test]
#[ignore = "long: minutes: bits anywhere"]
fn pairs_survive_flipped_bits() {
    for layout in LAYOUTS {
        // Short values are in summaries, which have one checksum for many pairs.
        for (value_len, least) in [(10, 0), (300, PAIRS - 40), (2000, PAIRS - 120)] {
            let back = pairs_back(layout, value_len, 150, env_number("SEEDS", 4));
            let (min, median) = (back[0], back[back.len() / 2]);
            println!(
                "{layout:?}, values of {value_len} B: {min} {median} {}",
                back[back.len() - 1]
            );
            assert!(min >= least && median >= PAIRS - 120, "{layout:?} {value_len}: {back:?}");
        }
    }
}

/// One flipped bit costs one pair at most, and a short one nothing: index and frame have it.
#[test]
#[ignore = "long: a minute: bits anywhere"]
fn one_flipped_bit_costs_one_pair() {
    for (value_len, least) in [(10, PAIRS), (300, PAIRS - 1)] {
        let whole = filled_image(LayoutKind::Log, PAIRS, value_len);
        let used: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] != 0).collect();
        let mut random = Random::new(3);
        for _ in 0..env_number("SEEDS", 12) {
            let mut bytes = whole.clone();
            let at = used[random.next_below(used.len() as u64) as usize];
            bytes[at] ^= 1 << random.next_below(8);
            let (report, new) = salvage(bytes, LayoutKind::Log).unwrap();
            let count = count_pairs(&new, value_len);
            assert!(count >= least, "byte {at}: {count} pairs, {:?}", report.lost);
            assert!(count == PAIRS || !report.lost.is_empty(), "byte {at}");
        }
    }
}

/// A flipped bit in the log, which no checkpoint follows, costs nothing.
#[test]
fn flipped_bit_in_log_is_changed_back() {
    let (disk, store) = create(DISK_BYTES, LayoutKind::Log);
    let kv = Kv::new(store.clone());
    for nth in 0..2000 {
        kv.put(&key(nth), &value(nth, 300)).unwrap();
    }
    store.sync().unwrap();
    drop((kv, store));
    let whole = bytes_of(disk);
    let used: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] != 0).collect();
    let mut random = Random::new(5);
    for _ in 0..env_number("SEEDS", 8) {
        let mut bytes = whole.clone();
        let at = used[random.next_below(used.len() as u64) as usize];
        bytes[at] ^= 1 << random.next_below(8);
        let (report, new) = salvage(bytes, LayoutKind::Log).unwrap();
        assert_eq!(count_pairs(&new, 300), 2000, "byte {at}: {report:?}");
    }
}

/// Removed keys do not come back, and overwritten ones not with an old value.
#[test]
#[ignore = "long: half a minute: bits anywhere"]
fn removed_and_overwritten_pairs_stay_away() {
    let mut wrong = vec![];
    for layout in LAYOUTS {
        for value_len in [10, 300] {
            let (disk, store) = create(DISK_BYTES, layout);
            let kv = Kv::new(store.clone());
            for nth in 0..PAIRS {
                kv.put(&key(nth), &value(nth + 1, value_len)).unwrap();
            }
            store.checkpoint().unwrap();
            for nth in 0..PAIRS {
                match nth % 4 {
                    0 => drop(kv.delete(&key(nth)).unwrap()),
                    1 => {}
                    _ => drop(kv.put(&key(nth), &value(nth, value_len)).unwrap()),
                }
                if nth % 5000 == 0 {
                    store.checkpoint().unwrap();
                }
            }
            for nth in (1..PAIRS).step_by(4) {
                kv.put(&key(nth), &value(nth, value_len)).unwrap();
            }
            store.checkpoint().unwrap();
            drop((kv, store));
            let whole = bytes_of(disk);
            for seed in 0..env_number("SEEDS", 2) {
                let mut bytes = whole.clone();
                overwrite_some(&mut bytes, 12, 100 + seed);
                let (report, new) = salvage(bytes, layout).unwrap();
                let (mut count, mut removed, mut old) = (0, 0, 0);
                for pair in Kv::new(new.clone()).scan::<RangeFull>(&..) {
                    let (key, is) = pair.unwrap();
                    let nth: u64 = std::str::from_utf8(&key[1..]).unwrap().parse().unwrap();
                    removed += u64::from(nth.is_multiple_of(4));
                    old += u64::from(is != value(nth, value_len));
                    count += 1;
                }
                if removed + old > 0 {
                    wrong.push((layout, value_len, seed, removed, old));
                }
                let left = report.lost.iter().find(|it| it.contains("left out"));
                println!("{layout:?} {value_len} {seed}: {count} {removed} {old} {left:?}");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Zeroed segments, torn segments: the pairs of the others come back.
#[test]
fn pairs_survive_lost_segments() {
    for layout in LAYOUTS {
        let whole = filled_image(layout, PAIRS, 2000);
        for seed in 0..env_number("SEEDS", 2) {
            let mut random = Random::new(seed);
            let mut bytes = whole.clone();
            for nth in 0..8 {
                let segment = random.next_below((DISK_BYTES as u64 >> 18) - 2) + 1;
                let at = (segment << 18) as usize;
                match nth % 2 {
                    0 => bytes[at..at + (256 << 10)].fill(0),
                    _ => bytes[at + (100 << 10)..at + (256 << 10)].fill(0xa5),
                }
            }
            let (report, new) = salvage(bytes, layout).unwrap();
            let count = count_pairs(&new, 2000);
            println!("{layout:?} {seed}: {count} pairs, {} losses", report.lost.len());
            assert!(count >= PAIRS - 8 * 140, "{layout:?} {seed}: {count} pairs");
            assert!(count == PAIRS || !report.lost.is_empty());
        }
    }
}

/// Addresses of the superblocks of a disk, and of both copies of the checkpoint.
fn anchors(bytes: &[u8]) -> ([usize; 4], [usize; 2]) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let end = bytes.len();
    ([0, 4096, end - 8192, end - 4096], [word(80), word(96)])
}

#[test]
fn stores_without_superblocks_or_checkpoint_come_back() {
    for layout in LAYOUTS {
        for value_len in [10, 300] {
            let whole = filled_image(layout, PAIRS, value_len);
            let (superblocks, checkpoints) = anchors(&whole);
            let mut all = whole.clone();
            superblocks.iter().for_each(|at| all[*at..*at + 512].fill(0));
            let mut checkpoint = whole.clone();
            checkpoints.iter().for_each(|at| checkpoint[*at..*at + 64].fill(0x55));
            let mut both = all.clone();
            checkpoints.iter().for_each(|at| both[*at..*at + 64].fill(0x55));
            for (what, bytes) in [("superblocks", all), ("checkpoint", checkpoint), ("both", both)]
            {
                let disk = MemoryDisk::new(bytes.clone(), 512);
                let profile = Store::profile_for_salvage(&disk);
                if (value_len, what) == (10, "both") && profile.is_err() {
                    // The seed of the checksums is told by payloads and checkpoints.
                    continue;
                }
                let (len, profile) = profile.unwrap();
                assert_eq!((len, profile.page_bytes), (DISK_BYTES as u64, 4096));
                let (report, new) = salvage(bytes, layout).unwrap();
                let count = count_pairs(&new, value_len);
                println!("{layout:?} {value_len} {what}: {count} pairs, {:?}", report.lost);
                // Short values are in the index only, once their frames were overwritten.
                assert!(count == PAIRS || value_len == 10 && what != "superblocks");
                assert!(!report.lost.is_empty());
            }
        }
    }
}

/// A salvage with little memory brings the same, in several windows.
#[test]
fn little_memory_brings_the_same() {
    let (disk, store) = create(DISK_BYTES, LayoutKind::Log);
    let kv = Kv::new(store.clone());
    let mut objects = vec![];
    for nth in 0..40u64 {
        let mut group = Group::new();
        let id = group.create(store.new_object(), LifetimeHint::Unknown);
        for block in 0..60 {
            group.write(id, (block * 7 % 64) * 8192, &vec![(nth + block) as u8; 5000]);
        }
        group.truncate(id, 300_000 + nth);
        group.set_name(format!("object {nth}").as_bytes(), id);
        store.submit(group, &[]).unwrap();
        objects.push(id);
        for key in 0..200 {
            kv.put(format!("{nth} {key}").as_bytes(), &[nth as u8; 100]).unwrap();
        }
    }
    let snapshot = contents(&store, &objects);
    store.checkpoint().unwrap();
    drop((kv, store));
    let mut bytes = bytes_of(disk);
    // Without any checkpoint: all pairs are of frames.
    let mut at = 0;
    while at < bytes.len() - 4096 {
        let is_frame = bytes[at..].starts_with(b"DrFr");
        if is_frame {
            destroy_chunks(&mut bytes, at);
        }
        at += 4096;
    }
    for memory_bytes in [64 << 20, 64 << 10] {
        let old = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        let (disk, new) = create(DISK_BYTES, LayoutKind::Log);
        let options = SalvageOptions { memory_bytes, unsure: true };
        let report = new.salvage_with(old, &options, &mut |_, _| ()).unwrap();
        assert_eq!((report.objects, report.names, report.keys), (40, 40, 8000), "{report:?}");
        assert!(contents(&new, &objects) == snapshot, "with {memory_bytes} bytes");
        new.checkpoint().unwrap();
        drop(new);
        let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap();
        assert!(report.is_clean(), "{report:?}");
    }
}

fn contents(store: &Arc<Store>, objects: &[ObjectId]) -> Vec<Vec<u8>> {
    let read = |id: &ObjectId| {
        let mut bytes = vec![0; store.len(*id).unwrap() as usize];
        store.read(*id, 0, &mut bytes).unwrap();
        bytes
    };
    objects.iter().map(read).collect()
}

/// Destroys the superblocks' checkpoints and whatever looks like one: short payloads of frames that
/// have no pair.
fn destroy_chunks(bytes: &mut [u8], _frame: usize) {
    let (_, checkpoints) = anchors(bytes);
    checkpoints.iter().for_each(|at| bytes[*at..*at + 64].fill(0x55));
}

/// Objects over each other, and disks: what is lost is named, everything else is right.
#[test]
fn lost_ranges_of_disks_are_named() {
    let (disk, store) = create(DISK_BYTES, LayoutKind::Cow);
    let mut random = Random::new(9);
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.truncate(id, 16 << 20);
    group.set_name(b"disk", id);
    store.submit(group, &[]).unwrap();
    let write_some = |random: &mut Random| {
        let disk = store.disk_named(b"disk").unwrap();
        for _ in 0..800 {
            let at_bytes = random.next_below(4000) * 4096;
            let mut block = Block::private(4096);
            block.copy_in(0, &[random.next_u64() as u8 | 1; 4096]);
            let group = DiskGroup { writes: vec![Write { at_bytes, block }] };
            disk.submit(group, &[]).unwrap();
        }
    };
    write_some(&mut random);
    store.take_snapshot(b"disk", b"one").unwrap();
    write_some(&mut random);
    store.clone_disk(b"disk@one", b"clone").unwrap();
    store.checkpoint().unwrap();
    write_some(&mut random);
    // The end of a log that is damaged cannot be told from one that a crash cut off.
    store.checkpoint().unwrap();
    let names: Vec<Vec<u8>> = store.list_disks().unwrap().into_iter().map(|it| it.name).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    let objects: Vec<ObjectId> =
        names.iter().map(|name| store.find_named_object(name).unwrap().unwrap()).collect();
    let whole = contents(&store, &objects);
    drop(store);
    let image = bytes_of(disk);
    let used: Vec<usize> = (0..image.len()).filter(|at| image[*at] != 0).collect();
    let mut differing = 0;
    for seed in 0..env_number("SEEDS", 12) {
        let mut random = Random::new(seed);
        let mut bytes = image.clone();
        let flips = if seed % 3 == 0 { 1 } else { 60 };
        for _ in 0..flips {
            let at = used[random.next_below(used.len() as u64) as usize];
            bytes[at] ^= 1 << random.next_below(8);
        }
        let Some((report, new)) = salvage(bytes, LayoutKind::Cow) else { continue };
        let told = report.lost.join("\n");
        for ((id, name), whole) in objects.iter().zip(&names).zip(&whole) {
            if new.find_named_object(name).unwrap() != Some(*id) {
                assert!(!report.lost.is_empty());
                continue;
            }
            let mut have = vec![0; whole.len()];
            new.read(*id, 0, &mut have).unwrap();
            for (at, (is, was)) in have.chunks(4096).zip(whole.chunks(4096)).enumerate() {
                if is != was {
                    assert!(flips > 1, "seed {seed}: one flipped bit is changed back: {told}");
                    differing += 1;
                    let is_named =
                        told.contains(" are zeros now") || told.contains("the index from");
                    assert!(is_named, "seed {seed}: block {at} of {id}: {told}");
                }
            }
        }
    }
    println!("{differing} blocks differ");
}

fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}
