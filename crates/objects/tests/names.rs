//! Names of objects: lookups, in groups, after reopening, and after power cuts.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::Kv;
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store,
};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};

fn create(disk: Arc<dyn Disk>) -> Arc<Store> {
    let layout = LayoutKind::Cow;
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    open(disk)
}

fn open(disk: Arc<dyn Disk>) -> Arc<Store> {
    Store::open(disk, &OpenOptions { cache_bytes: 1 << 20, read_only: false }).unwrap()
}

fn memory_disk() -> MemoryDisk {
    MemoryDisk::new(vec![0; 8 << 20], 512)
}

fn create_named_object(store: &Store, name: &[u8]) -> ObjectId {
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.write(id, 0, name);
    group.set_name(name, id);
    store.submit(group, &[]).unwrap();
    id
}

fn check_report(disk: Arc<dyn Disk>) -> draconis_objects::check::Report {
    Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap()
}

#[test]
fn names_refer_to_objects_not_keys() {
    let disk: Arc<dyn Disk> = Arc::new(memory_disk());
    let store = create(disk.clone());
    let (a, b) = (create_named_object(&store, b"a"), create_named_object(&store, b"b"));
    Kv::new(store.clone()).put(b"a", b"a value").unwrap();
    for _ in 0..2 {
        assert_eq!(store.find_named_object(b"a").unwrap(), Some(a));
        assert_eq!(store.find_named_object(b"c").unwrap(), None);
        assert_eq!(store.list_names().unwrap(), [(b"a".to_vec(), a), (b"b".to_vec(), b)]);
        assert_eq!(store.list().unwrap().len(), 2);
        assert_eq!(Kv::new(store.clone()).scan::<std::ops::RangeFull>(&..).count(), 1);
        // From memory, then from the tree.
        store.checkpoint().unwrap();
    }
    let mut group = Group::new();
    group.delete(b);
    group.remove_name(b"b");
    group.remove_name(b"never");
    group.set_name(b"second", a);
    store.submit(group, &[]).unwrap();
    store.sync().unwrap();
    drop(store);
    let store = open(disk.clone());
    assert_eq!(store.list_names().unwrap(), [(b"a".to_vec(), a), (b"second".to_vec(), a)]);
    drop(store);
    let report = check_report(disk);
    assert!(report.is_clean() && report.names == 2, "{report:?}");
}

#[test]
fn names_need_objects_and_dangling_ones_are_found() {
    let disk: Arc<dyn Disk> = Arc::new(memory_disk());
    let store = create(disk.clone());
    let a = create_named_object(&store, b"a");
    let refused = |make: &dyn Fn(&mut Group)| {
        let mut group = Group::new();
        make(&mut group);
        store.submit(group, &[]).unwrap_err().error
    };
    assert_eq!(refused(&|group| group.set_name(b"x", ObjectId(77))), Error::NoObject(ObjectId(77)));
    for name in [&b""[..], &[b'n'; 256]] {
        assert!(matches!(refused(&|group| group.set_name(name, a)), Error::Misuse(_)));
        assert!(matches!(refused(&|group| group.remove_name(name)), Error::Misuse(_)));
    }
    let mut group = Group::new();
    group.delete(a);
    store.submit(group, &[]).unwrap();
    store.sync().unwrap();
    assert_eq!(store.find_named_object(b"a").unwrap(), None);
    drop(store);
    let report = check_report(disk);
    assert!(report.damage[0].to_string().starts_with("name a: leads to object 1"), "{report:?}");
}

#[test]
fn salvage_copies_names() {
    let (old, new): (Arc<dyn Disk>, Arc<dyn Disk>) =
        (Arc::new(memory_disk()), Arc::new(memory_disk()));
    let store = create(old.clone());
    let a = create_named_object(&store, b"a");
    store.sync().unwrap();
    drop(store);
    let into = create(new.clone());
    let done = into.salvage(old).unwrap();
    assert_eq!((done.objects, done.names, done.lost.len()), (1, 1, 0));
    assert_eq!(into.find_named_object(b"a").unwrap(), Some(a));
    drop(into);
    assert!(check_report(new).is_clean());
}

#[test]
fn power_cut_keeps_names_with_objects() {
    let disk = Arc::new(RecordDisk::new(memory_disk()));
    let store = create(disk.clone());
    let image = {
        store.sync().unwrap();
        let mut image = vec![0; 8 << 20];
        for event in disk.take_events() {
            if let draconis_testkit::Event::Group { writes, .. } = event {
                for (at, bytes) in writes {
                    image[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
        image
    };
    for nth in 0..40u64 {
        let name = format!("object {nth}").into_bytes();
        create_named_object(&store, &name);
        if nth % 3 == 2 {
            let before = format!("object {}", nth - 1).into_bytes();
            let mut group = Group::new();
            group.delete(store.find_named_object(&before).unwrap().unwrap());
            group.remove_name(&before);
            store.submit(group, &[]).unwrap();
        }
        if nth % 10 == 9 {
            store.checkpoint().unwrap();
        }
        store.sync().unwrap();
        disk.record_mark(nth);
    }
    drop(store);
    let options = CrashOptions { seed: 5, subsets: 4, exhaustive_sectors: 0 };
    let mut states = 0;
    for crash in CrashStates::new(image, disk.take_events(), options) {
        let report = check_report(crash.disk.clone());
        assert!(report.is_clean(), "{:?}: {:?}", crash.kind, report.damage);
        let store = open(crash.disk.clone());
        let names = store.list_names().unwrap();
        assert_eq!(names.len(), store.list().unwrap().len(), "{:?}", crash.kind);
        for (name, id) in names {
            let mut bytes = vec![0; 100];
            let len = store.read(id, 0, &mut bytes).unwrap();
            assert_eq!(bytes[..len], name);
        }
        if let Some(&last) = crash.marks().last() {
            let name = format!("object {last}").into_bytes();
            assert!(store.find_named_object(&name).unwrap().is_some() || last % 3 == 1, "{last}");
        }
        states += 1;
    }
    assert!(states > 200, "{states} states");
}
