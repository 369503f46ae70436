//! Salvage of damaged stores: what is intact comes back, what was removed does not.

use std::ops::RangeFull;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk, Random};
use draconis_objects::kv::Kv;
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, SalvageReport, Store};

const DISK_BYTES: usize = 64 << 20;

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

/// Prints the pairs that come back from 150 flipped bits.
#[test]
fn pairs_survive_flipped_bits() {
    for layout in [LayoutKind::Log, LayoutKind::Cow, LayoutKind::Bucket] {
        for value_len in [10, 300, 2000] {
            let whole = filled_image(layout, 20_000, value_len);
            let mut back: Vec<u64> = (0..20)
                .map(|seed| {
                    let mut bytes = whole.clone();
                    flip_bits(&mut bytes, 150, seed);
                    let Some((_, new)) = salvage(bytes, layout) else { return 0 };
                    count_pairs(&new, value_len)
                })
                .collect();
            back.sort_unstable();
            println!(
                "{layout:?}, values of {value_len} B: min {} median {} max {}",
                back[0], back[10], back[19]
            );
        }
    }
}
