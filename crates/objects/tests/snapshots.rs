//! Snapshots, clones and rollbacks of disks against a model: in any order, with open disks, a full
//! check after each step, and power cuts within each.

use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::Random;
use draconis_device::{Disk, Extent, Group as DiskGroup, MemoryDisk, Write};
use draconis_objects::check::CheckOptions;
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectDisk, OpenOptions, Profile, Store,
};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::{Block, PrivateBuffer};

const DISK_BYTES: usize = 256 << 10;

fn create(disk: Arc<dyn Disk>, layout: LayoutKind) -> Arc<Store> {
    let profile = Profile { layout, page_bytes: 512, segment_bytes: 32 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    open(disk)
}

fn open(disk: Arc<dyn Disk>) -> Arc<Store> {
    Store::open(disk, &OpenOptions { cache_bytes: 256 << 10, read_only: false }).unwrap()
}

fn memory_disk(len: usize) -> MemoryDisk {
    MemoryDisk::new(vec![0; len], 512)
}

fn make_disk(store: &Store, name: &str) {
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.truncate(id, DISK_BYTES as u64);
    group.set_name(name.as_bytes(), id);
    store.submit(group, &[]).unwrap();
}

fn assert_store_is_clean(disk: Arc<dyn Disk>) {
    let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{:?}", report.damage);
}

/// Contents of each name.
type ModelContents = BTreeMap<String, Vec<u8>>;

fn read_contents(store: &Arc<Store>) -> ModelContents {
    let disks = store.list_disks().unwrap();
    let named = disks.iter().map(|disk| {
        let mut bytes = vec![0xA5; disk.len as usize];
        assert_eq!(store.read(disk.id, 0, &mut bytes).unwrap(), bytes.len());
        (String::from_utf8(disk.name.clone()).unwrap(), bytes)
    });
    named.collect()
}

fn assert_same_contents(is: &ModelContents, should: &ModelContents) {
    let names = |shown: &ModelContents| shown.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(is), names(should));
    for (name, bytes) in should {
        let wrong = is[name].iter().zip(bytes).position(|(a, b)| a != b);
        assert_eq!((wrong, is[name].len()), (None, bytes.len()), "{name}");
    }
}

/// Writes to a disk, or discards some of it.
fn change_random_block(disk: &ObjectDisk, dice: &mut Random, bytes: &mut [u8]) {
    let sectors = DISK_BYTES as u64 / 512;
    for _ in 0..1 + dice.next_below(12) {
        let at = dice.next_below(sectors);
        let most = if dice.next_below(8) == 0 { 100 } else { 12 };
        let len = (1 + dice.next_below(most)).min(sectors - at);
        let (from, len) = ((at * 512) as usize, (len * 512) as usize);
        if dice.next_below(4) == 0 {
            disk.discard(&[Extent::new(from as u64, len as u64)], &[]).unwrap();
            bytes[from..from + len].fill(0);
            continue;
        }
        dice.fill(&mut bytes[from..from + len]);
        let mut block = PrivateBuffer::new_uninitialized(len);
        block.copy_from_slice(&bytes[from..from + len]);
        let write = Write { at_bytes: from as u64, block: Block::from(block) };
        disk.submit(DiskGroup { writes: vec![write] }, &[]).unwrap();
    }
}

/// Performs one operation on a store and on its model. Invalid ones must be refused.
fn run_random_operation(
    store: &Arc<Store>,
    dice: &mut Random,
    model: &mut ModelContents,
    nth: u64,
) {
    let pick = |dice: &mut Random, snapshots: bool| {
        let names: Vec<String> =
            model.keys().filter(|name| name.contains('@') == snapshots).cloned().collect();
        (!names.is_empty()).then(|| names[dice.next_below(names.len() as u64) as usize].clone())
    };
    let (disk, snapshot) = (pick(dice, false), pick(dice, true));
    match dice.next_below(12) {
        0..=4 => {
            let Some(name) = disk else { return make_numbered_disk(store, model, nth) };
            let disk = store.disk_named(name.as_bytes()).unwrap();
            change_random_block(&disk, dice, model.get_mut(&name).unwrap());
        }
        5 | 6 => {
            let Some(name) = disk else { return };
            let open = store.disk_named(name.as_bytes()).unwrap();
            store.take_snapshot(name.as_bytes(), format!("s{nth}").as_bytes()).unwrap();
            model.insert(format!("{name}@s{nth}"), model[&name].clone());
            // It stays usable while it is open.
            change_random_block(&open, dice, model.get_mut(&name).unwrap());
        }
        7 => {
            let Some(name) = (if dice.next_below(3) == 0 { disk } else { snapshot }) else {
                return;
            };
            store.clone_disk(name.as_bytes(), format!("c{nth}").as_bytes()).unwrap();
            model.insert(format!("c{nth}"), model[&name].clone());
            if !name.contains('@') {
                model.insert(format!("{name}@c{nth}"), model[&name].clone());
            }
        }
        8 => {
            let Some(name) = snapshot else { return };
            let (disk, snapshot) = name.split_once('@').unwrap();
            store.roll_back(disk.as_bytes(), snapshot.as_bytes()).unwrap();
            let bytes = model[&name].clone();
            model.insert(disk.to_owned(), bytes);
        }
        9 | 10 => {
            let Some(name) = snapshot else { return };
            // Open disks are written meanwhile, or switch to another object.
            let held: Vec<ObjectDisk> = model
                .keys()
                .filter(|name| !name.contains('@'))
                .map(|name| store.disk_named(name.as_bytes()).unwrap())
                .collect();
            match store.remove_disk(name.as_bytes(), false) {
                Ok(()) => drop(model.remove(&name)),
                Err(Error::Disk(why)) => assert!(why.contains(" are over "), "{why}"),
                Err(error) => panic!("{error}"),
            }
            drop(held);
        }
        _ => {
            let Some(name) = disk else { return make_numbered_disk(store, model, nth) };
            let of = format!("{name}@");
            let has_snapshots = model.keys().any(|name| name.starts_with(&of));
            match store.remove_disk(name.as_bytes(), dice.next_below(2) == 0) {
                Ok(()) => model.retain(|other, _| *other != name && !other.starts_with(&of)),
                Err(Error::Disk(why)) => {
                    assert!(has_snapshots && (why.contains("snapshots") || why.contains("clone")));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn make_numbered_disk(store: &Store, model: &mut ModelContents, nth: u64) {
    make_disk(store, &format!("d{nth}"));
    model.insert(format!("d{nth}"), vec![0; DISK_BYTES]);
}

#[test]
fn random_lineage_operations_match_model() {
    for seed in 0..6 {
        let dice = &mut Random::new(seed);
        let layout = if seed % 2 == 0 { LayoutKind::Cow } else { LayoutKind::Log };
        let disk: Arc<dyn Disk> = Arc::new(memory_disk(24 << 20));
        let mut store = create(disk.clone(), layout);
        let mut model = ModelContents::new();
        make_numbered_disk(&store, &mut model, 1_000);
        for nth in 0..150 {
            run_random_operation(&store, dice, &mut model, nth);
            if model.len() > 12 {
                let name = model.keys().find(|name| !name.contains('@')).unwrap().clone();
                let clones = store.remove_disk(name.as_bytes(), true).is_err();
                let of = format!("{name}@");
                model.retain(|other, _| clones || *other != name && !other.starts_with(&of));
            }
            assert_same_contents(&read_contents(&store), &model);
            match dice.next_below(6) {
                // Moves memtables to the tree, by several checkpoints.
                0 => (0..4).for_each(|_| store.checkpoint().unwrap()),
                1 => {
                    drop(store);
                    store = open(disk.clone());
                    assert_same_contents(&read_contents(&store), &model);
                }
                _ => {}
            }
            store.sync().unwrap();
            assert_store_is_clean(disk.clone());
        }
        // Removes everything: clones first.
        while !model.is_empty() {
            let disks: Vec<String> =
                model.keys().filter(|name| !name.contains('@')).cloned().collect();
            let gone = disks.iter().find(|name| store.remove_disk(name.as_bytes(), true).is_ok());
            let name = gone.expect("one has no clones");
            let of = format!("{name}@");
            model.retain(|other, _| other != name && !other.starts_with(&of));
            assert_same_contents(&read_contents(&store), &model);
        }
        (0..3).for_each(|_| store.checkpoint().unwrap());
        assert!(store.info().used_bytes < 64 << 10, "{:?}", store.info());
    }
}

#[test]
fn power_cut_in_lineage_operation_is_atomic() {
    for seed in 0..12 {
        let dice = &mut Random::new(seed ^ 0xC07);
        let recorded = Arc::new(RecordDisk::new(memory_disk(4 << 20)));
        let store = create(recorded.clone(), LayoutKind::Cow);
        let mut model = ModelContents::new();
        make_numbered_disk(&store, &mut model, 1_000);
        for nth in 0..10 + seed * 3 {
            run_random_operation(&store, dice, &mut model, nth);
        }
        store.sync().unwrap();
        for nth in 100..112 {
            let before = model.clone();
            let mut image = vec![];
            let all = Extent::new(0, 4 << 20);
            let block = recorded.read_now(all, Block::private(4 << 20)).unwrap();
            image.extend_from_slice(&block.into_private());
            recorded.take_events();
            // Any group of the writes to disks may be the last.
            let name = model.keys().rfind(|name| name.contains('@')).cloned();
            match (name, nth % 3) {
                (Some(name), 0) => {
                    if store.remove_disk(name.as_bytes(), false).is_ok() {
                        model.remove(&name);
                    }
                }
                (Some(name), 1) => {
                    let (disk, snapshot) = name.split_once('@').unwrap();
                    let done = store.roll_back(disk.as_bytes(), snapshot.as_bytes());
                    if done.is_ok() {
                        let bytes = model[&name].clone();
                        model.insert(disk.to_owned(), bytes);
                    }
                }
                _ => {
                    let name = model.keys().find(|name| !name.contains('@')).cloned();
                    let Some(name) = name else { break };
                    store.take_snapshot(name.as_bytes(), format!("s{nth}").as_bytes()).unwrap();
                    model.insert(format!("{name}@s{nth}"), model[&name].clone());
                }
            }
            recorded.record_mark(1);
            let options = CrashOptions { seed, subsets: 4, exhaustive_sectors: 0 };
            for crash in CrashStates::new(image, recorded.take_events(), options) {
                assert_store_is_clean(crash.disk.clone());
                let after = open(crash.disk.clone());
                let is = read_contents(&after);
                let is_before = is == before && crash.marks().is_empty();
                if !is_before {
                    assert_same_contents(&is, &model);
                }
                // An interrupted removal continues.
                let any = is.keys().find(|name| !name.contains('@')).unwrap();
                after.take_snapshot(any.as_bytes(), b"after").unwrap();
                let mut expected = is.clone();
                expected.insert(format!("{any}@after"), is[any].clone());
                assert_same_contents(&read_contents(&after), &expected);
                drop(after);
                assert_store_is_clean(crash.disk.clone());
            }
            // A durable change in between.
            if let Some(name) = model.keys().find(|name| !name.contains('@')).cloned() {
                let disk = store.disk_named(name.as_bytes()).unwrap();
                change_random_block(&disk, dice, model.get_mut(&name).unwrap());
            }
            store.sync().unwrap();
        }
    }
}
