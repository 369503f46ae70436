use std::sync::Arc;

use draconis_device::{Extent, Group as DiskGroup, MemoryDisk, Write};
use draconis_types::Block;

use super::*;
use crate::entry::{Entry, Key, ObjectRecord, PayloadRef, extent_key, object_key, value_key};
use crate::index::tree::{Child, InnerNode, Node, NodeSource};
use crate::kv::{Batch, Kv};
use crate::required_io::MissPolicy;
use crate::superblock::Superblock;
use crate::{CreateOptions, Group, LayoutKind, LifetimeHint, ObjectId, Profile};

const LONG_VALUE_BYTES: usize = 200_000;

fn create_test_store(layout: LayoutKind) -> Arc<dyn Disk> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 4 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 9 }).unwrap();
    let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
    let mut group = Group::new();
    for nth in 0..4u8 {
        let id = group.create(store.new_object(), LifetimeHint::Unknown);
        group.write(id, 0, &vec![nth; 40_000]);
    }
    store.submit(group, &[]).unwrap();
    let kv = Kv::new(store.clone());
    let mut batch = Batch::new();
    for nth in 0..600u32 {
        batch.put(&nth.to_be_bytes(), &[nth as u8; 300]);
    }
    batch.put(b"long", &[5; LONG_VALUE_BYTES]);
    kv.write(batch).unwrap();
    // All of it in the tree, and a change over it.
    store.checkpoint().unwrap();
    let mut core = crate::recovery::open(disk.clone(), &OpenOptions::default()).unwrap();
    drop(store);
    core.checkpoint_now().unwrap();
    core.levels.merge_all_runs(&mut core.log).unwrap();
    core.checkpoint_now().unwrap();
    let mut group = Group::new();
    group.write(ObjectId(1), 100, &[77; 5000]);
    let _ = core.submit(&group, &[], MissPolicy::Block).unwrap();
    core.checkpoint_now().unwrap();
    let _ = core.submit(&group, &[], MissPolicy::Block).unwrap();
    core.log.commit().unwrap();
    disk
}

fn check(disk: &Arc<dyn Disk>) -> Report {
    Store::check(disk.clone(), &CheckOptions::default(), &mut |_, _| {}).unwrap()
}

fn damage_kinds(report: &Report) -> Vec<DamageKind> {
    let mut whats: Vec<DamageKind> = vec![];
    for finding in &report.damage {
        if !whats.contains(&finding.what) {
            whats.push(finding.what);
        }
    }
    whats
}

/// Damages the state of a store, so that its next checkpoint contains the damage.
fn check_after_damage(spoil: impl FnOnce(&mut Core)) -> Report {
    let disk = create_test_store(LayoutKind::Cow);
    let mut core = crate::recovery::open(disk.clone(), &OpenOptions::default()).unwrap();
    spoil(&mut core);
    core.checkpoint_now().unwrap();
    drop(core);
    check(&disk)
}

fn flip_byte(disk: &Arc<dyn Disk>, at: u64) {
    let sector = at / 512 * 512;
    let block = disk.read_now(Extent::new(sector, 512), Block::private(512)).unwrap();
    let mut bytes = block.into_private();
    bytes[(at - sector) as usize] ^= 0x10;
    let write = Write { at_bytes: sector, block: Block::from(bytes) };
    disk.submit(DiskGroup { writes: vec![write] }, &[]).unwrap();
}

fn payload_of(core: &Core, id: u64) -> PayloadRef {
    let mut found = None;
    let _ = core
        .levels
        .index()
        .resolve_range(&*core.log.io, ObjectId(id), (8192, u64::MAX), &mut None, &mut |_, entry| {
            found = if let Entry::Data(data) = entry { Some(data) } else { None };
            std::ops::ControlFlow::Break(())
        })
        .unwrap();
    found.unwrap()
}

#[test]
fn intact_store_has_no_damage() {
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        let disk = create_test_store(layout);
        let report = check(&disk);
        assert!(report.is_clean(), "{layout}: {:#?}", report.damage);
        assert_eq!((report.objects, report.keys), (4, 601));
        assert_eq!(report.payload_bytes, 4 * 40_000 + 600 * 300 + LONG_VALUE_BYTES as u64);
        assert!(report.index_bytes > 600 * 10 && report.notes.is_empty());
        let store = Store::open(disk, &OpenOptions::default()).unwrap();
        let segments = store.info().segments;
        assert_eq!(report.used_segments + report.free_segments, segments);
    }
}

#[test]
fn small_cache_gives_same_report() {
    let disk = create_test_store(LayoutKind::Log);
    let id = {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let core = crate::recovery::open(disk.clone(), &options).unwrap();
        payload_of(&core, 2).at
    };
    flip_byte(&disk, id);
    let all = check(&disk);
    let options = CheckOptions { memory_bytes: 1, ..CheckOptions::default() };
    let (mut last, mut calls) = (0, 0);
    let report = Store::check(disk, &options, &mut |done, total| {
        assert!(last <= done && done <= total);
        (last, calls) = (done, calls + 1);
    })
    .unwrap();
    assert_eq!(report, all);
    assert_eq!(damage_kinds(&report), [DamageKind::Payload]);
    assert!(calls > 3);
}

#[test]
fn corrupt_payload_reports_owner() {
    let disk = create_test_store(LayoutKind::Cow);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let core = crate::recovery::open(disk.clone(), &options).unwrap();
    let of_object = payload_of(&core, 3).at;
    let key = value_key(&7u32.to_be_bytes());
    let Some(Entry::Data(of_key)) = core.levels.index().get(&*core.log.io, &key).unwrap() else {
        panic!("a value")
    };
    flip_byte(&disk, of_object);
    flip_byte(&disk, of_key.at);
    let report = check(&disk);
    let of: Vec<_> = report.damage.iter().map(|finding| finding.of.clone().unwrap()).collect();
    assert!(of.contains(&Owner::Object(ObjectId(3))), "{report:#?}");
    assert!(of.contains(&Owner::Key(7u32.to_be_bytes().to_vec())), "{report:#?}");
    assert_eq!(damage_kinds(&report), [DamageKind::Payload]);
    assert!(report.is_complete);
}

#[test]
fn corrupt_node_is_reported() {
    let disk = create_test_store(LayoutKind::Cow);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let core = crate::recovery::open(disk.clone(), &options).unwrap();
    let Some(Child::Disk(root)) = core.levels.tree.root else { panic!("a root on the disk") };
    flip_byte(&disk, root.at + 5);
    let report = check(&disk);
    assert_eq!(damage_kinds(&report), [DamageKind::Node]);
    assert!(!report.is_complete && !report.is_clean());
}

#[test]
fn misplaced_node_is_reported() {
    let report = check_after_damage(|core| {
        let Some(Child::Disk(root)) = core.levels.tree.root.clone() else { panic!("a root") };
        let node = core.log.io.load(root).unwrap();
        let Node::Inner(inner) = &*node else { panic!("an inner node") };
        let mut children = inner.children.clone();
        let (first, second) = (children[0].1.clone(), children[1].1.clone());
        (children[0].1, children[1].1) = (second, first);
        let inner = InnerNode::new(inner.level, children);
        core.levels.tree.root = Some(Child::Changed(Arc::new(inner)));
    });
    assert!(damage_kinds(&report).contains(&DamageKind::Order), "{report:#?}");
    let report = check_after_damage(|core| {
        let Some(Child::Disk(root)) = core.levels.tree.root.clone() else { panic!("a root") };
        let children = vec![(Key::new(), Child::Disk(root))];
        core.levels.tree.root = Some(Child::Changed(Arc::new(InnerNode::new(9, children))));
    });
    assert_eq!(damage_kinds(&report), [DamageKind::Order]);
}

#[test]
fn damaged_superblock_copies_are_reported() {
    let disk = create_test_store(LayoutKind::Log);
    flip_byte(&disk, 4096 + 9);
    let report = check(&disk);
    assert_eq!(damage_kinds(&report), [DamageKind::Superblock]);
    assert!(report.damage[0].text.contains("copy 1"), "{report:#?}");
    // The last two one checkpoint old, as after a power cut.
    let disk = create_test_store(LayoutKind::Log);
    let (newest, _) = Superblock::find_newest(&*disk).unwrap();
    for (behind, is_clean) in [(1, true), (2, false)] {
        let mut old = newest.clone();
        old.generation -= behind;
        disk.submit(DiskGroup { writes: old.copy_writes(1) }, &[]).unwrap();
        let report = check(&disk);
        assert_eq!(report.is_clean(), is_clean, "{report:#?}");
        assert_eq!(report.notes.len(), if is_clean { 2 } else { 0 });
    }
    // The log names its checkpoint: an old superblock opens the old store, or none.
    for pair in 0..2 {
        let zeros = newest.copy_writes(pair).into_iter().map(|mut write| {
            write.block = Block::private(write.block.len());
            write
        });
        disk.submit(DiskGroup { writes: zeros.collect() }, &[]).unwrap();
    }
    let error = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::NotAStore(_)));
}

#[test]
fn unopenable_store_is_reported() {
    let disk = create_test_store(LayoutKind::Log);
    let (newest, _) = Superblock::find_newest(&*disk).unwrap();
    // Either copy is sufficient.
    flip_byte(&disk, newest.checkpoint.at);
    assert_eq!(damage_kinds(&check(&disk)), [DamageKind::Node]);
    Store::open(disk.clone(), &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    flip_byte(&disk, newest.checkpoint_copy.unwrap().at);
    let report = check(&disk);
    assert_eq!(damage_kinds(&report), [DamageKind::Open]);
    assert!(!report.is_complete);
}

#[test]
fn payload_without_object_is_reported() {
    let report = check_after_damage(|core| {
        let payload = [1; 600];
        let key = extent_key(ObjectId(900), 0);
        let kind = crate::layout::PayloadKind::Moved { age: 0 };
        core.levels.put_payload(&mut core.log, key, &payload, (kind, None)).unwrap();
    });
    assert_eq!(damage_kinds(&report), [DamageKind::NoObject]);
    assert_eq!(report.damage[0].of, Some(Owner::Object(ObjectId(900))));
}

#[test]
fn name_without_object_is_reported() {
    let report = check_after_damage(|core| {
        for (name, id) in [(&b"disk"[..], 900), (b"good", 1)] {
            core.put_entry(crate::entry::name_key(name), Entry::for_name(ObjectId(id))).unwrap();
        }
    });
    assert_eq!((damage_kinds(&report), report.names), (vec![DamageKind::NoObject], 2));
    assert_eq!(report.damage[0].of, Some(Owner::Name(b"disk".to_vec())));
    assert_eq!(report.damage[0].to_string(), "name disk: leads to object 900, which is not there");
}

#[test]
fn payload_past_object_end_is_reported() {
    let report = check_after_damage(|core| {
        let record = core.levels.index().object(&*core.log.io, ObjectId(2)).unwrap().unwrap();
        let short = Entry::Object(ObjectRecord { len: 39_999, ..record });
        core.put_entry(object_key(ObjectId(2)), short).unwrap();
    });
    assert_eq!(damage_kinds(&report), [DamageKind::PastEnd]);
}

#[test]
fn overlapping_payloads_are_reported() {
    let report = check_after_damage(|core| {
        let data = payload_of(core, 2);
        let to = extent_key(ObjectId(4), 1 << 20);
        core.put_entry(to, Entry::Data(data)).unwrap();
        let record = ObjectRecord { len: 2 << 20, ..ObjectRecord::new(LifetimeHint::Cold) };
        core.put_entry(object_key(ObjectId(4)), Entry::Object(record)).unwrap();
    });
    assert_eq!(damage_kinds(&report), [DamageKind::Count, DamageKind::Shared]);
}

#[test]
fn payload_outside_segments_is_reported() {
    let report = check_after_damage(|core| {
        let data = PayloadRef { at: 1 << 50, ..payload_of(core, 2) };
        core.put_entry(extent_key(ObjectId(4), 0), Entry::Data(data)).unwrap();
    });
    assert!(damage_kinds(&report).contains(&DamageKind::OutsideSegments), "{report:#?}");
}

#[test]
fn payload_in_free_segment_is_reported() {
    let report = check_after_damage(|core| {
        let segment = core.log.segments.geometry.segment_of(payload_of(core, 3).at).unwrap();
        let live = core.log.segments.all[segment as usize].live;
        core.log.segments.sub_live(
            core.log.segments.geometry.start_of(segment),
            live as u32,
            false,
        );
        core.log.segments.release_segment(segment);
    });
    assert!(damage_kinds(&report).contains(&DamageKind::UnwrittenSpace), "{report:#?}");
}

#[test]
fn wrong_live_counts_are_reported() {
    let report = check_after_damage(|core| {
        let at = payload_of(core, 2).at;
        core.log.segments.add_live(at, 11, 0, false);
    });
    assert_eq!(damage_kinds(&report), [DamageKind::Count]);
    let report = check_after_damage(|core| core.value_objects -= 1);
    assert_eq!(damage_kinds(&report), [DamageKind::Count]);
}

#[test]
fn dangling_value_keys_are_reported() {
    let report = check_after_damage(|core| {
        core.value_objects += 1;
        core.put_entry(value_key(b"lost"), Entry::ValueObject(ObjectId(99), 5)).unwrap();
    });
    assert_eq!(damage_kinds(&report), [DamageKind::NoValue]);
    assert_eq!(report.damage[0].of, Some(Owner::Key(b"lost".to_vec())));
    let report = check_after_damage(|core| {
        core.put_entry(value_key(b"long"), Entry::Tombstone).unwrap();
    });
    assert_eq!(damage_kinds(&report), [DamageKind::NoKey]);
}

#[test]
fn get_of_missing_long_value_is_error() {
    let disk = create_test_store(LayoutKind::Cow);
    let mut core = crate::recovery::open(disk.clone(), &OpenOptions::default()).unwrap();
    let endless =
        ObjectRecord { len: 1 << 60, is_value: true, ..ObjectRecord::new(LifetimeHint::Cold) };
    core.put_entry(object_key(ObjectId(4)), Entry::Object(endless)).unwrap();
    let links = [(&b"lost"[..], 99, 5), (b"other", 2, 5), (b"endless", 4, 1 << 60)];
    for (name, id, len) in links {
        core.value_objects += 1;
        core.put_entry(value_key(name), Entry::ValueObject(ObjectId(id), len)).unwrap();
    }
    core.checkpoint_now().unwrap();
    drop(core);
    let kv = crate::kv::Kv::new(Store::open(disk, &OpenOptions::default()).unwrap());
    for (name, ..) in links {
        for value in [kv.get(name), kv.snapshot().get(name)] {
            assert!(matches!(value, Err(Error::Corrupt { .. })), "{value:?}");
        }
        let scanned = kv.scan(&(std::ops::Bound::Included(name), std::ops::Bound::Unbounded));
        assert!(matches!(scanned.take(1).next(), Some(Err(Error::Corrupt { .. }))));
    }
}

#[test]
fn object_id_above_counter_is_reported() {
    let report = check_after_damage(|core| {
        let record = ObjectRecord { len: 0, ..ObjectRecord::new(LifetimeHint::Cold) };
        core.put_entry(object_key(ObjectId(5000)), Entry::Object(record)).unwrap();
    });
    assert_eq!(damage_kinds(&report), [DamageKind::Number]);
}

#[test]
fn check_of_blank_disk_is_error() {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 1 << 20], 512));
    let error = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::NotAStore(_)));
}
