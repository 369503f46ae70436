//! Power cuts: what a call acknowledged is there, and every object is whole or absent.

use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_object_store::DraconisStore;
use draconis_objects::check::CheckOptions;
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

const DISK_BYTES: usize = 24 << 20;

fn open(disk: Arc<dyn Disk>) -> DraconisStore {
    let options = OpenOptions { cache_bytes: 1 << 20, read_only: false };
    DraconisStore::from_store(Store::open(disk, &options).unwrap()).unwrap()
}

type Objects = BTreeMap<Path, Vec<u8>>;

async fn contents(store: &DraconisStore) -> Objects {
    let mut objects = Objects::new();
    for meta in store.list(None).try_collect::<Vec<_>>().await.unwrap() {
        let bytes = store.get(&meta.location).await.unwrap().bytes().await.unwrap();
        objects.insert(meta.location, bytes.to_vec());
    }
    objects
}

#[tokio::test]
async fn acknowledged_changes_survive_and_every_object_is_whole() {
    let empty = MemoryDisk::new(vec![0; DISK_BYTES], 512);
    let layout = LayoutKind::Cow;
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 8 };
    Store::create(Arc::new(empty), &CreateOptions { profile, id: 1 }).unwrap();
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(vec![0; DISK_BYTES], 512)));
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let mut image = vec![0; DISK_BYTES];
    for event in disk.take_events() {
        if let draconis_testkit::Event::Group { writes, .. } = event {
            for (at, bytes) in writes {
                image[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
            }
        }
    }
    let store = open(disk.clone());
    let path = |nth: u64| Path::from(format!("dir/{}", nth % 5));
    let mut history = vec![Objects::new()];
    for nth in 0..24_u64 {
        let mut next = history.last().unwrap().clone();
        let other = path(nth + 2);
        match nth % 6 {
            0..3 => {
                // Some in pieces.
                let len = if nth % 4 == 3 { 1_500_000 } else { 3000 };
                let bytes = vec![nth as u8 + 1; len];
                store.put(&path(nth), bytes.clone().into()).await.unwrap();
                next.insert(path(nth), bytes);
            }
            3 if next.contains_key(&other) => {
                store.copy(&other, &path(nth)).await.unwrap();
                next.insert(path(nth), next[&other].clone());
            }
            4 if next.contains_key(&other) => {
                store.rename(&other, &path(nth)).await.unwrap();
                let bytes = next.remove(&other).unwrap();
                next.insert(path(nth), bytes);
            }
            _ => {
                // An upload in parts, one of which is written before a deletion.
                let mut upload = store.put_multipart(&path(nth)).await.unwrap();
                upload.put_part(vec![nth as u8; 5000].into()).await.unwrap();
                store.delete(&other).await.unwrap();
                next.remove(&other);
                history.push(next.clone());
                disk.record_mark(history.len() as u64 - 1);
                upload.put_part(vec![nth as u8; 5000].into()).await.unwrap();
                upload.complete().await.unwrap();
                next.insert(path(nth), vec![nth as u8; 10_000]);
            }
        }
        history.push(next);
        disk.record_mark(history.len() as u64 - 1);
    }
    drop(store);
    let options = CrashOptions { seed: 5, subsets: 3, exhaustive_sectors: 0 };
    let (mut states, mut newest) = (0, 0);
    for crash in CrashStates::new(image, disk.take_events(), options) {
        let least = crash.marks().last().map_or(0, |mark| *mark as usize);
        let store = open(crash.disk.clone());
        let found = contents(&store).await;
        // A change that was in progress may be there.
        let is_known = history[least..].iter().take(2).any(|wanted| *wanted == found);
        assert!(is_known, "{:?}, acknowledged {least}: {:?}", crash.kind, found.keys());
        // Nothing of an upload is left.
        let names = store.store().list_names().unwrap();
        assert_eq!(names.len(), found.len(), "{:?}", crash.kind);
        let used: std::collections::BTreeSet<_> = names.iter().map(|(_, id)| id).collect();
        assert_eq!(store.store().list().unwrap().len(), used.len(), "{:?}", crash.kind);
        drop(store);
        let check = CheckOptions::default();
        let report = Store::check(crash.disk.clone(), &check, &mut |_, _| {}).unwrap();
        assert!(report.is_clean(), "{:?}: {:?}", crash.kind, report.damage);
        states += 1;
        newest = newest.max(least);
    }
    assert!(states > 200, "{states} states");
    assert!(newest > 20, "{newest} changes were acknowledged before a cut");
}
