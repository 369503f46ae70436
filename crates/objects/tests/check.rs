//! Checks of randomly damaged stores: they end, and report damage that readers see.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk, Random};
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::Kv;
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store,
};

const DISK_BYTES: usize = 8 << 20;

fn object_contents(id: u64) -> Vec<u8> {
    (0..20_000 + id * 1000).map(|at| (at * 7 + id) as u8).collect()
}

/// Returns the bytes of a disk with objects and keys, some in the tree, some in runs and the log.
fn create_filled_image(layout: LayoutKind) -> Vec<u8> {
    let memory = Arc::new(MemoryDisk::new(vec![0; DISK_BYTES], 512));
    let disk: Arc<dyn Disk> = memory.clone();
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 64 << 10, queue_depth: 4 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
    let kv = Kv::new(store.clone());
    for round in 0..20u64 {
        let mut group = Group::new();
        let id = group.create(store.new_object(), LifetimeHint::Unknown);
        group.write(id, 0, &object_contents(id.0));
        store.submit(group, &[]).unwrap();
        for nth in 0..30 {
            kv.put(&(round * 30 + nth).to_be_bytes(), &[nth as u8; 200]).unwrap();
        }
        if round % 2 == 0 && round < 18 {
            store.checkpoint().unwrap();
        }
    }
    store.sync().unwrap();
    drop((kv, store, disk));
    Arc::into_inner(memory).expect("no other holds it").into_bytes()
}

#[test]
#[ignore = "long: minutes: damage of every sector"]
fn check_finds_corruption_anywhere() {
    for layout in [LayoutKind::Log, LayoutKind::Cow, LayoutKind::Bucket] {
        let whole = create_filled_image(layout);
        let mut random = Random::new(11);
        let mut found = 0;
        for _ in 0..150 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random.next_below(20) {
                let at = random.next_below(DISK_BYTES as u64) as usize;
                // Most of the disk is empty: damage the next used byte.
                let at = (at..DISK_BYTES).find(|&at| bytes[at] != 0).unwrap_or(0);
                bytes[at] ^= 1 << random.next_below(8);
            }
            let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
            let checked = Store::check(disk.clone(), &CheckOptions::default(), &mut |_, _| {});
            let is_clean = match &checked {
                Ok(report) => report.is_clean(),
                Err(Error::NotAStore(_)) => false,
                Err(error) => panic!("{error}"),
            };
            found += u32::from(!is_clean);
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let Ok(store) = Store::open(disk, &options) else {
                assert!(!is_clean, "what cannot be opened is not clean");
                continue;
            };
            for id in 1..=20 {
                let expected = object_contents(id);
                let mut have = vec![0; expected.len()];
                match store.read(ObjectId(id), 0, &mut have) {
                    Ok(got) => assert!(have[..got] == expected[..got], "wrong bytes of {id}"),
                    // The end of the log, which may look like a torn write.
                    Err(Error::NoObject(_)) => {}
                    Err(error) => assert!(!is_clean, "{error}, but the check found nothing"),
                }
            }
        }
        assert!(found > 50, "{found} damaged stores found");
    }
}
