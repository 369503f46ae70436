//! Objects as disks: conformance, and their additional guarantees.

use std::sync::Arc;

use draconis_device::{
    Atomic, Disk, Error as DiskError, Extent, Group as DiskGroup, MemoryDisk, Random, Write,
};
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectDisk, ObjectId, OpenOptions,
    Profile, Store, check::CheckOptions,
};
use draconis_testkit::conform;
use draconis_testkit::sim::SimDisk;
use draconis_types::Block;

const OBJECT_BYTES: u64 = 1 << 20;

fn create_store(layout: LayoutKind, disk: Arc<dyn Disk>) -> Arc<Store> {
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 8 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 3 }).unwrap();
    Store::open(disk, &OpenOptions::default()).unwrap()
}

fn create_object(store: &Arc<Store>, len: u64) -> ObjectId {
    let mut group = Group::new();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.truncate(id, len);
    let ticket = store.submit(group, &[]).unwrap();
    store.wait(ticket).unwrap();
    id
}

fn create_object_disk(layout: LayoutKind) -> ObjectDisk {
    let store = create_store(layout, Arc::new(MemoryDisk::new(vec![0; 32 << 20], 512)));
    let id = create_object(&store, OBJECT_BYTES + 100);
    store.disk(id).unwrap()
}

#[test]
fn object_disk_conforms() {
    for layout in [LayoutKind::Log, LayoutKind::Cow] {
        conform::check_all(|| create_object_disk(layout));
    }
}

#[test]
fn object_disk_properties() {
    let disk = create_object_disk(LayoutKind::Cow);
    let properties = disk.properties();
    assert_eq!((properties.len_bytes, properties.sector_bytes), (OBJECT_BYTES, 512));
    assert_eq!((properties.atomic, properties.read_only), (Atomic::AgainstPowerCut, false));
    let at = Extent::new(4096, 512);
    let read = disk.read_now(at, Block::private(512)).unwrap();
    assert!(read.bytes().unwrap().iter().all(|byte| *byte == 0), "what was never written");
}

#[test]
fn chain_without_space_is_refused_whole() {
    let store = create_store(LayoutKind::Log, Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512)));
    let id = create_object(&store, 64 << 20);
    let disk = store.disk(id).unwrap();
    let group = |at_bytes, len| draconis_device::Group {
        writes: vec![draconis_device::Write { at_bytes, block: Block::private(len) }],
    };
    let mut small = group(0, 512);
    small.writes[0].block.copy_in(0, &[7; 512]);
    let refused = disk.submit_chain(vec![small, group(4096, 32 << 20)], &[]).unwrap_err();
    assert!(refused.error.to_string().contains("No space"), "{}", refused.error);
    assert_eq!(refused.payload.unwrap().len(), 2);
    let read = disk.read_now(Extent::new(0, 512), Block::private(512)).unwrap();
    assert_eq!(read.bytes().unwrap(), [0; 512]);
    // The next one is accepted.
    let ticket = disk.submit(group(0, 512), &[]).unwrap();
    assert_eq!(disk.wait_durable(ticket), Ok(()));
}

#[test]
fn missing_object_and_read_only_store_are_refused() {
    let memory: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let store = create_store(LayoutKind::Cow, memory.clone());
    let id = create_object(&store, OBJECT_BYTES);
    assert_eq!(store.disk(ObjectId(99)).unwrap_err(), Error::NoObject(ObjectId(99)));
    drop(store);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let store = Store::open(memory, &options).unwrap();
    let disk = store.disk(id).unwrap();
    assert!(disk.properties().read_only);
    let refused = disk.submit(draconis_device::Group::default(), &[]).unwrap_err();
    assert_eq!(refused.error, draconis_device::Error::ReadOnly);
}

fn write_at(at_bytes: u64, len: usize, byte: u8) -> Write {
    let mut block = Block::private(len);
    block.copy_in(0, &vec![byte; len]);
    Write { at_bytes, block }
}

fn read_at(disk: &dyn Disk, at: u64, len: usize) -> Vec<u8> {
    let block = disk.read_now(Extent::new(at, len as u64), Block::private(len)).unwrap();
    block.into_private().to_vec()
}

#[test]
fn discarded_bytes_read_as_zeros_and_free_space() {
    let memory: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let store = create_store(LayoutKind::Cow, memory.clone());
    let id = create_object(&store, 64 << 20);
    let disk = store.disk(id).unwrap();
    assert!(disk.properties().discards);
    // Many times the capacity, since each is freed again.
    for round in 0..40u8 {
        let at = u64::from(round) << 20;
        let group = DiskGroup { writes: vec![write_at(at, 1 << 20, round + 1)] };
        let ticket = disk.submit(group, &[]).unwrap();
        let all_but_ends = Extent::new(at + 100, (1 << 20) - 200);
        disk.discard(&[all_but_ends], &[ticket]).unwrap();
        disk.wait_durable(ticket).unwrap();
        let bytes = read_at(&disk, at, 1 << 20);
        assert!(bytes[..512].iter().chain(&bytes[(1 << 20) - 512..]).all(|it| *it == round + 1));
        assert!(bytes[512..(1 << 20) - 512].iter().all(|it| *it == 0));
    }
    let later = draconis_device::Ticket(1000);
    let whole = Extent::new(0, 512);
    assert_eq!(disk.discard(&[whole], &[later]), Err(DiskError::UnknownTicket(later)));
    let beyond = Extent::new(64 << 20, 512);
    assert!(matches!(disk.discard(&[beyond], &[]), Err(DiskError::OutOfRange { .. })));
    drop((disk, store));
    let report = Store::check(memory, &CheckOptions::default(), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{:#?}", report.damage);
    assert_eq!(report.payload_bytes, 40 * 1024);
}

#[test]
fn short_payloads_are_read_in_one_request() {
    let (device, clock) = SimDisk::ssd(32 << 20, 1);
    let store = create_store(LayoutKind::Cow, device.clone());
    let id = create_object(&store, 4 << 20);
    let disk = store.disk(id).unwrap();
    let mut dice = Random::new(7);
    let mut expected = vec![0; 4 << 20];
    for _ in 0..1500 {
        let (at, byte) = (dice.next_below(1024) * 4096, dice.next_below(255) as u8 + 1);
        disk.submit(DiskGroup { writes: vec![write_at(at, 4096, byte)] }, &[]).unwrap();
        expected[at as usize..at as usize + 4096].fill(byte);
    }
    store.sync().unwrap();
    store.checkpoint().unwrap();
    drop((disk, store));
    // In device time, with almost no cache: reads come from the disk.
    let time_of = |len: usize| {
        let options = OpenOptions { cache_bytes: 1, ..OpenOptions::default() };
        let store = Store::open(device.clone(), &options).unwrap();
        let disk = store.disk(id).unwrap();
        let before = clock.now_ns();
        for at in (0..expected.len()).step_by(len) {
            assert_eq!(read_at(&disk, at as u64, len), expected[at..at + len]);
        }
        clock.now_ns() - before
    };
    let (alone, together) = (time_of(4096), time_of(128 << 10));
    println!("{alone} ns one by one, {together} ns together");
    assert!(together < alone / 3, "{together} ns together, {alone} ns one by one");
}
