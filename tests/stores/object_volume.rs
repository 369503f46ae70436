//! An ext2 volume on an object of a store, with simulated power cuts.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};
use draconis_ext::{
    AccessTimes, Follow, InodeNumber, NewNode, OpenOptions, Volume, WriteOptions, check,
};
use draconis_objects::check::CheckOptions;
use draconis_objects::{
    CreateOptions, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions as StoreOptions, Profile,
    Store,
};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::{FileType, Time};

const VOLUME_BYTES: u64 = 2 << 20;

struct NoContents;

impl FileSource for NoContents {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::NotFound.into())
    }
}

fn write_options() -> WriteOptions {
    let clock = || Time { seconds: 1_800_000_000, nanoseconds: 0 };
    WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 256 << 10,
        atime: AccessTimes::Never,
        discard: true,
    }
}

fn open(disk: Arc<dyn Disk>) -> Arc<Store> {
    Store::open(disk, &StoreOptions { cache_bytes: 1 << 20, read_only: false }).unwrap()
}

/// Creates a store with one object, and an empty volume on it.
fn make_store_with_volume(disk: Arc<dyn Disk>, layout: LayoutKind) -> (Arc<Store>, ObjectId) {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 128 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 5 }).unwrap();
    let store = open(disk);
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.truncate(id, VOLUME_BYTES);
    store.submit(group, &[]).unwrap();
    let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
    let options = mkfs::FormatOptions { block_bytes: Some(1024), ..mkfs::FormatOptions::default() };
    let plan = mkfs::plan_for_size(&options, &mut tree, VOLUME_BYTES).unwrap();
    let on = store.disk(id).unwrap();
    mkfs::write(&plan, &NoContents, &FormatTarget { disk: &on, zeroed: true, progress: &|_| {} })
        .unwrap();
    (store, id)
}

fn file_bytes(nth: usize) -> Vec<u8> {
    (0..nth * 7919 % 60_000 + 1).map(|at| (at * (nth + 3)) as u8).collect()
}

fn file_name(nth: usize) -> Vec<u8> {
    format!("file {nth}").into_bytes()
}

/// Creates a file durably.
fn create_file_durably(volume: &Volume, nth: usize) -> InodeNumber {
    let new =
        NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let inode = volume.create(volume.root(), &file_name(nth), &new).unwrap();
    let bytes = file_bytes(nth);
    let mut done = 0;
    while done < bytes.len() {
        done += volume.write(inode, done as u64, &bytes[done..]).unwrap();
    }
    volume.sync().unwrap();
    inode
}

fn has_file(volume: &Volume, nth: usize) -> bool {
    let Ok(inode) = volume.resolve(volume.root(), &file_name(nth), Follow::Yes) else {
        return false;
    };
    let expected = file_bytes(nth);
    let inode = volume.inode(inode).unwrap();
    let mut have: Vec<u8> = vec![];
    loop {
        let part = volume.read_from_inode(&inode, have.len() as u64, 1 << 20).unwrap();
        if part.is_empty() {
            return have == expected;
        }
        have.extend_from_slice(&part);
    }
}

/// Returns the problems of the volume that are damage.
fn find_damage(disk: &Arc<dyn Disk>) -> Vec<String> {
    let report = check::check(disk, check::CheckOptions::default(), &|_, _| {}).unwrap();
    let is_damage = |it: &&check::Problem| it.what.severity() == check::Severity::Damage;
    report.problems.iter().filter(is_damage).map(ToString::to_string).collect()
}

#[test]
fn object_volume_survives_store_reopen() {
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
        let (store, id) = make_store_with_volume(disk.clone(), layout);
        let volume = Volume::open_for_writing(
            Arc::new(store.disk(id).unwrap()),
            OpenOptions::default(),
            write_options(),
        )
        .unwrap();
        for nth in 0..30 {
            create_file_durably(&volume, nth);
        }
        volume.close().unwrap();
        drop((volume, store));
        let store = open(disk.clone());
        let on: Arc<dyn Disk> = Arc::new(store.disk(id).unwrap());
        assert_eq!(find_damage(&on), [""; 0], "{layout}");
        let volume = Volume::open(on, OpenOptions::default()).unwrap();
        assert!((0..30).all(|nth| has_file(&volume, nth)), "{layout}");
        drop((volume, store));
        let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap();
        assert!(report.is_clean(), "{:#?}", report.damage);
    }
}

#[test]
fn object_volume_is_clean_after_power_cut() {
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        let disk = Arc::new(RecordDisk::new(MemoryDisk::new(vec![0; 8 << 20], 512)));
        let (store, id) = make_store_with_volume(disk.clone(), layout);
        store.sync().unwrap();
        drop(store);
        // The image before the recorded writes.
        let mut image = vec![0; 8 << 20];
        for event in disk.take_events() {
            if let draconis_testkit::Event::Group { writes, .. } = event {
                for (at, bytes) in writes {
                    image[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
        let store = open(disk.clone());
        let on = Arc::new(store.disk(id).unwrap());
        let volume = Volume::open_for_writing(on, OpenOptions::default(), write_options()).unwrap();
        for nth in 0..8 {
            create_file_durably(&volume, nth);
            disk.record_mark(nth as u64);
        }
        volume.close().unwrap();
        drop((volume, store));
        let options = CrashOptions { seed: 3, subsets: 2, exhaustive_sectors: 0 };
        let mut states = 0;
        for crash in CrashStates::new(image, disk.take_events(), options).step_by(3) {
            let state: Arc<dyn Disk> = crash.disk.clone();
            let report =
                Store::check(state.clone(), &CheckOptions::default(), &mut |_, _| {}).unwrap();
            assert!(report.is_clean(), "{:?}: {:#?}", crash.kind, report.damage);
            let store = open(state);
            let on: Arc<dyn Disk> = Arc::new(store.disk(id).unwrap());
            assert_eq!(find_damage(&on), [""; 0], "{layout}, {:?}", crash.kind);
            let volume = Volume::open(on, OpenOptions::default()).unwrap();
            for &nth in crash.marks() {
                assert!(has_file(&volume, nth as usize), "{layout}, {:?}: file {nth}", crash.kind);
            }
            states += 1;
        }
        assert!(states > 20, "{states} states");
    }
}
