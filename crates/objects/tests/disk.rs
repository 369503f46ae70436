//! Objects as disks: conformance, and their additional guarantees.

use std::sync::Arc;

use draconis_device::sim::SimDisk;
use draconis_device::{
    Atomic, Disk, Error as DiskError, Extent, Group as DiskGroup, MemoryDisk, Random, Write,
    conform,
};
use draconis_exchange::heap::Block;
use draconis_objects::{
    CreateOptions, Error, Group, Hint, LayoutKind, ObjectDisk, ObjectId, OpenOptions, Profile,
    Store, check::CheckOptions,
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
        conform::check_all(|| made(layout));
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
    assert_eq!(refused.payload.unwrap().len(), 2);
    let read = disk.read_now(Extent::new(0, 512), Block::private(512)).unwrap();
    assert_eq!(read.bytes().unwrap(), [0; 512]);
    // The next one is accepted.
    let ticket = disk.submit(group(0, 512), &[]).unwrap();
    assert_eq!(disk.wait_durable(ticket), Ok(()));
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

fn write(at_bytes: u64, len: usize, byte: u8) -> Write {
    let mut block = Block::private(len);
    block.copy_in(0, &vec![byte; len]);
    Write { at_bytes, block }
}

fn read(disk: &dyn Disk, at: u64, len: usize) -> Vec<u8> {
    let block = disk.read_now(Extent::new(at, len as u64), Block::private(len)).unwrap();
    block.into_private().to_vec()
}

#[test]
fn what_is_discarded_reads_as_zeros_and_takes_no_room() {
    let memory: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 16 << 20], 512));
    let store = store(LayoutKind::Cow, memory.clone());
    let id = object(&store, 64 << 20);
    let disk = store.disk(id).unwrap();
    assert!(disk.properties().discards);
    // Many times the capacity, since each is freed again.
    for round in 0..40u8 {
        let at = u64::from(round) << 20;
        let group = DiskGroup { writes: vec![write(at, 1 << 20, round + 1)] };
        let ticket = disk.submit(group, &[]).unwrap();
        let all_but_ends = Extent::new(at + 100, (1 << 20) - 200);
        disk.discard(&[all_but_ends], &[ticket]).unwrap();
        disk.wait_durable(ticket).unwrap();
        let bytes = read(&disk, at, 1 << 20);
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
fn short_payloads_are_asked_for_together() {
    let (device, clock) = SimDisk::ssd(32 << 20, 1);
    let store = store(LayoutKind::Cow, device.clone());
    let id = object(&store, 4 << 20);
    let disk = store.disk(id).unwrap();
    let mut dice = Random::new(7);
    let mut expected = vec![0; 4 << 20];
    for _ in 0..1500 {
        let (at, byte) = (dice.below(1024) * 4096, dice.below(255) as u8 + 1);
        disk.submit(DiskGroup { writes: vec![write(at, 4096, byte)] }, &[]).unwrap();
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
            assert_eq!(read(&disk, at as u64, len), expected[at..at + len]);
        }
        clock.now_ns() - before
    };
    let (alone, together) = (time_of(4096), time_of(128 << 10));
    println!("{alone} ns one by one, {together} ns together");
    assert!(together < alone / 3, "{together} ns together, {alone} ns one by one");
}
