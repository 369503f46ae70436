//! Objects as disks: what every disk does, and what only these promise.

use std::sync::Arc;

use draconis_device::{Atomic, Disk, Extent, MemoryDisk, conform};
use draconis_exchange::heap::Block;
use draconis_objects::{
    CreateOptions, Error, Group, Hint, LayoutKind, ObjectDisk, ObjectId, OpenOptions, Profile,
    Store,
};

const LEN: u64 = 1 << 20;

fn store(layout: LayoutKind, disk: Arc<dyn Disk>) -> Arc<Store> {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 3 }).unwrap();
    Store::open(disk, &OpenOptions::default()).unwrap()
}

fn object(store: &Arc<Store>, len: u64) -> ObjectId {
    let mut group = Group::new();
    let id = group.create(store.new_object(), Hint::Unknown);
    group.truncate(id, len);
    let ticket = store.submit(group, &[]).unwrap();
    store.wait(ticket).unwrap();
    id
}

fn made(layout: LayoutKind) -> ObjectDisk {
    let store = store(layout, Arc::new(MemoryDisk::new(vec![0; 32 << 20], 512)));
    let id = object(&store, LEN + 100);
    store.disk(id).unwrap()
}

#[test]
fn objects_are_disks_like_any_other() {
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        conform::all(|| made(layout));
    }
}

#[test]
fn what_an_object_disk_says_of_itself() {
    let disk = made(LayoutKind::Cow);
    let properties = disk.properties();
    assert_eq!((properties.len_bytes, properties.sector_bytes), (LEN, 512));
    assert_eq!((properties.atomic, properties.read_only), (Atomic::AgainstPowerCut, false));
    let at = Extent::new(4096, 512);
    let read = disk.read_now(at, Block::private(512)).unwrap();
    assert!(read.bytes().unwrap().iter().all(|byte| *byte == 0), "what was never written");
}

#[test]
fn a_chain_without_room_is_refused_whole() {
    let store = store(LayoutKind::Log, Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512)));
    let id = object(&store, 64 << 20);
    let disk = store.disk(id).unwrap();
    let group = |at_bytes, len| draconis_device::Group {
        writes: vec![draconis_device::Write { at_bytes, block: Block::private(len) }],
    };
    let mut small = group(0, 512);
    small.writes[0].block.copy_in(0, &[7; 512]);
    let refused = disk.submit_chain(vec![small, group(4096, 32 << 20)], &[]).unwrap_err();
    assert!(refused.error.to_string().contains("No space"), "{}", refused.error);
    assert_eq!(refused.goods.unwrap().len(), 2);
    let read = disk.read_now(Extent::new(0, 512), Block::private(512)).unwrap();
    assert_eq!(read.bytes().unwrap(), [0; 512]);
    // The next one is taken.
    let ticket = disk.submit(group(0, 512), &[]).unwrap();
    assert_eq!(disk.wait(ticket), Ok(()));
}

#[test]
fn an_object_that_is_not_there_is_no_disk_and_one_of_a_read_only_store_takes_nothing() {
    let memory: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let store = store(LayoutKind::Cow, memory.clone());
    let id = object(&store, LEN);
    assert_eq!(store.disk(ObjectId(99)).unwrap_err(), Error::NoObject(ObjectId(99)));
    drop(store);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let store = Store::open(memory, &options).unwrap();
    let disk = store.disk(id).unwrap();
    assert!(disk.properties().read_only);
    let refused = disk.submit(draconis_device::Group::default(), &[]).unwrap_err();
    assert_eq!(refused.error, draconis_device::Error::ReadOnly);
}
