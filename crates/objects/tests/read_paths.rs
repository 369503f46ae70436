//! Reads from memory, reads from the disk, and read-around.

use std::sync::Arc;

use draconis_device::{Disk, Extent, MemoryDisk};
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{
    CreateOptions, Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store,
};
use draconis_testkit::sim::SimDisk;
use draconis_testkit::{Fault, FaultDisk, FaultTarget};
use draconis_types::Block;

const BLOCK_BYTES: u64 = 4096;
const BLOCK_COUNT: u64 = 1024;

fn create(disk: Arc<dyn Disk>) -> Arc<Store> {
    let layout = LayoutKind::Cow;
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 32 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    open(disk, 64 << 20)
}

fn open(disk: Arc<dyn Disk>, cache_bytes: u64) -> Arc<Store> {
    Store::open(disk, &OpenOptions { cache_bytes, read_only: false }).unwrap()
}

fn block_contents(block: u64) -> Vec<u8> {
    block.to_le_bytes().repeat(BLOCK_BYTES as usize / 8)
}

/// Creates an object of blocks, each with its number in it.
fn fill_object(store: &Arc<Store>) -> ObjectId {
    let new = store.new_object();
    let id = new.id();
    let mut group = Group::new();
    group.create(new, LifetimeHint::Unknown);
    store.submit(group, &[]).unwrap();
    for block in 0..BLOCK_COUNT {
        let mut group = Group::new();
        group.write(id, block * BLOCK_BYTES, &block_contents(block));
        store.submit(group, &[]).unwrap();
    }
    store.sync().unwrap();
    id
}

fn assert_block(store: &Store, id: ObjectId, block: u64) -> Result<(), Error> {
    let mut into = [0xEE; BLOCK_BYTES as usize];
    store.read(id, block * BLOCK_BYTES, &mut into)?;
    assert_eq!(into[..], block_contents(block));
    Ok(())
}

/// Returns all blocks, none after its neighbour.
fn nonsequential_blocks() -> impl Iterator<Item = u64> {
    (0..BLOCK_COUNT).map(|nth| nth * 389 % BLOCK_COUNT)
}

#[test]
fn reads_cache_neighbours_while_memory_is_free() {
    let (disk, _) = SimDisk::ssd(32 << 20, 1);
    let id = fill_object(&create(disk.clone()));
    let reads_of = |cache_bytes| {
        let store = open(disk.clone(), cache_bytes);
        let before = disk.statistics();
        nonsequential_blocks().for_each(|block| assert_block(&store, id, block).unwrap());
        let after = disk.statistics();
        (after.reads - before.reads, after.read_bytes - before.read_bytes)
    };
    let (reads, bytes) = reads_of(64 << 20);
    assert!(reads < BLOCK_COUNT / 16, "{reads} reads");
    assert!(bytes < BLOCK_COUNT * BLOCK_BYTES * 2, "{bytes} bytes");
    // With little memory nothing is read in vain.
    let (reads, bytes) = reads_of(256 << 10);
    assert!(reads >= BLOCK_COUNT / 2, "{reads} reads");
    assert!(bytes < BLOCK_COUNT * BLOCK_BYTES * 2, "{bytes} bytes");
}

/// Returns the address of a block's bytes.
fn extent_of_block(disk: &dyn Disk, block: u64) -> Extent {
    let len = disk.properties().len_bytes;
    let all = disk.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    let mut pages = all.bytes().unwrap().chunks(BLOCK_BYTES as usize);
    let page = pages.position(|page| page == block_contents(block)).unwrap() as u64;
    Extent::new(page * BLOCK_BYTES, BLOCK_BYTES)
}

#[test]
fn corrupt_neighbour_does_not_fail_read() {
    let faults = Arc::new(FaultDisk::new(MemoryDisk::new(vec![0; 32 << 20], 512)));
    let id = fill_object(&create(faults.clone()));
    let place = extent_of_block(&*faults, 501);
    for fault in [Fault::Flip { bit: 3 }, Fault::Fail] {
        let store = open(faults.clone(), 64 << 20);
        faults.add_fault(FaultTarget::Reads(place), fault);
        assert_block(&store, id, 500).unwrap();
        let refused = assert_block(&store, id, 501);
        assert!(matches!(refused, Err(Error::Corrupt { .. } | Error::Device(_))), "{refused:?}");
        faults.clear_faults();
        assert_block(&store, id, 501).unwrap();
    }
    // The cached copy is wrong, the disk is right by now.
    let store = open(faults.clone(), 64 << 20);
    faults.add_fault(FaultTarget::Reads(place), Fault::Flip { bit: 3 });
    assert_block(&store, id, 500).unwrap();
    faults.clear_faults();
    assert_block(&store, id, 501).unwrap();
}

#[test]
fn scan_reads_leaves_in_batches() {
    const KEY_COUNT: u32 = 60_000;
    let (disk, _) = SimDisk::ssd(32 << 20, 1);
    let kv = Kv::new(create(disk.clone()));
    for from in (0..KEY_COUNT).step_by(1000) {
        let mut batch = Batch::new();
        (from..from + 1000).for_each(|key| batch.put(&key.to_be_bytes(), b"short"));
        kv.write(batch).unwrap();
    }
    kv.store().sync().unwrap();
    let nodes = kv.store().info().counters.index_bytes / 4096;
    drop(kv);
    let kv = Kv::new(open(disk.clone(), 128 << 10));
    let all = || kv.scan::<std::ops::RangeFull>(&..);
    let reads_of = |scan: &mut dyn FnMut() -> usize, scans: usize| {
        let before = disk.statistics();
        assert_eq!(scan(), scans * KEY_COUNT as usize);
        let reads = disk.statistics().reads - before.reads;
        println!("{reads} reads of {scans} scans, {nodes} nodes");
        // Values are read, too.
        assert!(nodes > 200 && reads < scans as u64 * nodes * 2 / 3, "{reads} reads");
    };
    reads_of(&mut || all().count(), 1);
    reads_of(&mut || all().rev().count(), 1);
    // Readers do not evict each other's leaves.
    reads_of(&mut || all().zip(all().rev()).count() * 2, 2);
}
