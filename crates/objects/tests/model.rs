//! Random changes against a model in memory, with waits, snapshots, checkpoints, closing and
//! reopening in between.

use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk, Random};
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::Kv;
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store,
};

fn create_options(layout: LayoutKind, segment_bytes: u32) -> CreateOptions {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes, queue_depth: 8 };
    CreateOptions { profile, id: 77 }
}

fn small_cache_options() -> OpenOptions {
    OpenOptions { cache_bytes: 1 << 20, read_only: false }
}

type ModelObjects = BTreeMap<ObjectId, Vec<u8>>;
type ModelKeys = BTreeMap<Vec<u8>, Vec<u8>>;

fn assert_contents_match(store: &Arc<Store>, objects: &ModelObjects, keys: &ModelKeys) {
    let list = store.list().unwrap();
    let expected: Vec<_> = objects.iter().map(|(id, bytes)| (*id, bytes.len() as u64)).collect();
    assert_eq!(list, expected);
    for (id, bytes) in objects {
        let mut have = vec![1; bytes.len() + 10];
        let len = store.read(*id, 0, &mut have).unwrap();
        assert_eq!(len, bytes.len());
        let wrong = have.iter().zip(bytes).position(|(have, is)| have != is);
        assert_eq!(wrong, None, "object {id} of {len} bytes");
    }
    let kv = Kv::new(store.clone());
    let all: Vec<_> = kv.scan::<std::ops::RangeFull>(&..).map(Result::unwrap).collect();
    assert_eq!(all.len(), keys.len());
    assert!(all.iter().map(|(k, v)| (k, v)).eq(keys.iter()));
    let back: Vec<_> = kv.scan::<std::ops::RangeFull>(&..).rev().map(Result::unwrap).collect();
    assert!(back.iter().map(|(k, v)| (k, v)).eq(keys.iter().rev()));
}

/// The disk passes the check, also while a store has it open.
fn assert_store_matches(disk: &Arc<dyn Disk>, objects: &ModelObjects, keys: &ModelKeys) {
    let report = Store::check(disk.clone(), &CheckOptions::default(), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{:#?}", report.damage);
    assert_eq!((report.objects, report.keys), (objects.len() as u64, keys.len() as u64));
}

fn run_against_model(
    layout: LayoutKind,
    seed: u64,
    disk_bytes: usize,
    segment_bytes: u32,
    rounds: u64,
) {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; disk_bytes], 512));
    Store::create(disk.clone(), &create_options(layout, segment_bytes)).unwrap();
    let mut store = Store::open(disk.clone(), &small_cache_options()).unwrap();
    let (mut objects, mut keys) = (ModelObjects::new(), ModelKeys::new());
    let mut random = Random::new(seed);
    let (mut full, mut taken, mut cleaned) = (0, 0, 0);
    let mut kept: Option<(draconis_objects::Snapshot, ModelObjects)> = None;
    for round in 0..rounds {
        let next = &mut random;
        let mut group = Group::new();
        let mut batch = draconis_objects::kv::Batch::new();
        let (mut new_objects, mut new_keys) = (objects.clone(), keys.clone());
        let is_kv = next.next_below(3) == 0;
        for _ in 0..1 + next.next_below(4) {
            let pick = |next: &mut Random, of: &ModelObjects| {
                let n = next.next_below(of.len() as u64) as usize;
                *of.keys().nth(n).unwrap()
            };
            let len = match next.next_below(6) {
                0 => next.next_below(30_000),
                1 => 4096 * (1 + next.next_below(4)),
                _ => 1 + next.next_below(700),
            };
            let bytes: Vec<u8> =
                (0..len).map(|i| (i as u8) ^ (round as u8).wrapping_mul(31)).collect();
            if is_kv {
                let key = format!("{:04}", next.next_below(300)).into_bytes();
                if next.next_below(4) == 0 {
                    batch.delete(&key);
                    new_keys.remove(&key);
                } else {
                    batch.put(&key, &bytes);
                    new_keys.insert(key, bytes);
                }
                continue;
            }
            match next.next_below(10) {
                0 | 1 if new_objects.len() < 20 => {
                    let id = group.create(store.new_object(), LifetimeHint::Unknown);
                    new_objects.insert(id, vec![]);
                }
                _ if new_objects.is_empty() => {}
                2 => {
                    let id = pick(next, &new_objects);
                    group.delete(id);
                    new_objects.remove(&id);
                }
                3 => {
                    let id = pick(next, &new_objects);
                    let bytes = new_objects.get_mut(&id).unwrap();
                    let len = next.next_below(bytes.len() as u64 * 5 / 4 + 10);
                    group.truncate(id, len);
                    bytes.resize(len as usize, 0);
                }
                4..=6 => {
                    let id = pick(next, &new_objects);
                    group.append(id, &bytes);
                    new_objects.get_mut(&id).unwrap().extend(&bytes);
                }
                _ => {
                    let id = pick(next, &new_objects);
                    let have = new_objects.get_mut(&id).unwrap();
                    let at = next.next_below(have.len() as u64 + 500) as usize;
                    group.write(id, at as u64, &bytes);
                    have.resize(have.len().max(at + bytes.len()), 0);
                    have[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
        let submitted = match is_kv {
            true => Kv::new(store.clone()).write(batch).map_err(|refused| refused.1),
            false => store.submit(group, &[]).map_err(|refused| refused.error),
        };
        match submitted {
            Ok(ticket) => {
                (objects, keys) = (new_objects, new_keys);
                taken += 1;
                if random.next_below(3) == 0 {
                    store.wait(ticket).unwrap();
                }
            }
            Err(Error::NoSpace { .. }) => {
                full += 1;
                // A snapshot pins its segments; without it there may be space.
                if kept.take().is_some() {
                    continue;
                }
                // Freeing space always works.
                if let Some(&id) = objects.keys().next() {
                    let mut group = Group::new();
                    group.delete(id);
                    store.submit(group, &[]).unwrap();
                    objects.remove(&id);
                }
                if let Some(key) = keys.keys().next().cloned() {
                    Kv::new(store.clone()).delete(&key).unwrap();
                    keys.remove(&key);
                }
            }
            Err(error) => panic!("round {round}: {error}"),
        }
        match random.next_below(60) {
            0 => {
                if let Some((snapshot, was)) = kept.take() {
                    for (id, bytes) in &was {
                        let mut have = vec![0; bytes.len()];
                        assert_eq!(snapshot.read(*id, 0, &mut have).unwrap(), bytes.len());
                        assert!(have == *bytes, "snapshot of object {id}");
                    }
                    assert_eq!(snapshot.list().unwrap().len(), was.len());
                } else {
                    kept = Some((store.snapshot(), objects.clone()));
                }
            }
            1 => store.checkpoint().unwrap(),
            2 => {
                // Everything, or a crash after a wait: in memory both are the same.
                store.sync().unwrap();
                kept = None;
                cleaned += store.info().counters.cleaned;
                assert_store_matches(&disk, &objects, &keys);
                drop(store);
                assert_store_matches(&disk, &objects, &keys);
                store = Store::open(disk.clone(), &small_cache_options()).unwrap();
                assert_store_matches(&disk, &objects, &keys);
            }
            3 => assert_contents_match(&store, &objects, &keys),
            _ => {}
        }
    }
    assert_contents_match(&store, &objects, &keys);
    store.sync().unwrap();
    let info = store.info();
    drop((kept, store));
    let store = Store::open(disk, &small_cache_options()).unwrap();
    assert_contents_match(&store, &objects, &keys);
    assert!(taken > rounds / 3, "{taken} groups taken, {full} times full");
    assert!(cleaned + info.counters.cleaned > 0 || full == 0, "{full} times full, {info:?}");
}

#[test]
fn log_layout_matches_model() {
    for seed in 0..6 {
        run_against_model(LayoutKind::Log, seed, 3 << 20, 32 << 10, 1500);
    }
}

#[test]
fn cow_layout_matches_model() {
    for seed in 0..6 {
        run_against_model(LayoutKind::Cow, seed, 3 << 20, 32 << 10, 1500);
    }
}

#[test]
fn bucket_layout_matches_model() {
    for seed in 0..3 {
        run_against_model(LayoutKind::Bucket, seed, 3 << 20, 32 << 10, 1500);
    }
}

#[test]
fn larger_segments_match_model() {
    run_against_model(LayoutKind::Bucket, 52, 32 << 20, 256 << 10, 3000);
    run_against_model(LayoutKind::Cow, 50, 32 << 20, 256 << 10, 3000);
    run_against_model(LayoutKind::Log, 51, 32 << 20, 256 << 10, 3000);
}
