//! Reads from memory, reads from the disk, and read-around.

use std::sync::Arc;

use draconis_device::sim::SimDisk;
use draconis_device::{Disk, Extent, Fault, FaultDisk, FaultTarget, MemoryDisk};
use draconis_exchange::heap::Block;
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{
    CreateOptions, Error, Group, Hint, LayoutKind, ObjectId, OpenOptions, Profile, Store,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;

fn create(disk: Arc<dyn Disk>) -> Arc<Store> {
    let layout = LayoutKind::Cow;
    let profile = Profile { layout, page_bytes: 4096, segment_bytes: 256 << 10, queue_depth: 32 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    open(disk, 64 << 20)
}

fn open(disk: Arc<dyn Disk>, cache_bytes: u64) -> Arc<Store> {
    Store::open(disk, &OpenOptions { cache_bytes, read_only: false }).unwrap()
}

fn content(block: u64) -> Vec<u8> {
    block.to_le_bytes().repeat(BLOCK as usize / 8)
}

/// Creates an object of blocks, each with its number in it.
fn fill(store: &Arc<Store>) -> ObjectId {
    let new = store.new_object();
    let id = new.id();
    let mut group = Group::new();
    group.create(new, Hint::Unknown);
    store.submit(group, &[]).unwrap();
    for block in 0..BLOCKS {
        let mut group = Group::new();
        group.write(id, block * BLOCK, &content(block));
        store.submit(group, &[]).unwrap();
    }
    store.sync().unwrap();
    id
}

fn read(store: &Store, id: ObjectId, block: u64) -> Result<(), Error> {
    let mut into = [0xEE; BLOCK as usize];
    store.read(id, block * BLOCK, &mut into)?;
    assert_eq!(into[..], content(block));
    Ok(())
}

/// Returns all blocks, none after its neighbour.
fn jumping() -> impl Iterator<Item = u64> {
    (0..BLOCKS).map(|nth| nth * 389 % BLOCKS)
}

#[test]
fn neighbours_come_along_while_memory_is_unused() {
    let (disk, _) = SimDisk::ssd(32 << 20, 1);
    let id = fill(&create(disk.clone()));
    let reads_of = |cache_bytes| {
        let store = open(disk.clone(), cache_bytes);
        let before = disk.statistics();
        jumping().for_each(|block| read(&store, id, block).unwrap());
        let after = disk.statistics();
        (after.reads - before.reads, after.read_bytes - before.read_bytes)
    };
    let (reads, bytes) = reads_of(64 << 20);
    assert!(reads < BLOCKS / 16, "{reads} reads");
    assert!(bytes < BLOCKS * BLOCK * 2, "{bytes} bytes");
    // With little memory nothing is read in vain.
    let (reads, bytes) = reads_of(256 << 10);
    assert!(reads >= BLOCKS / 2, "{reads} reads");
    assert!(bytes < BLOCKS * BLOCK * 2, "{bytes} bytes");
}

/// Returns the address of a block's bytes.
fn place_of(disk: &dyn Disk, block: u64) -> Extent {
    let len = disk.properties().len_bytes;
    let all = disk.read_now(Extent::new(0, len), Block::private(len as usize)).unwrap();
    let mut pages = all.bytes().unwrap().chunks(BLOCK as usize);
    let page = pages.position(|page| page == content(block)).unwrap() as u64;
    Extent::new(page * BLOCK, BLOCK)
}

#[test]
fn rot_that_was_read_along_harms_no_other_read() {
    let faults = Arc::new(FaultDisk::new(MemoryDisk::new(vec![0; 32 << 20], 512)));
    let id = fill(&create(faults.clone()));
    let place = place_of(&*faults, 501);
    for fault in [Fault::Flip { bit: 3 }, Fault::Fail] {
        let store = open(faults.clone(), 64 << 20);
        faults.add(FaultTarget::Reads(place), fault);
        read(&store, id, 500).unwrap();
        let refused = read(&store, id, 501);
        assert!(matches!(refused, Err(Error::Corrupt { .. } | Error::Device(_))), "{refused:?}");
        faults.heal();
        read(&store, id, 501).unwrap();
    }
    // The cached copy is wrong, the disk is right by now.
    let store = open(faults.clone(), 64 << 20);
    faults.add(FaultTarget::Reads(place), Fault::Flip { bit: 3 });
    read(&store, id, 500).unwrap();
    faults.heal();
    read(&store, id, 501).unwrap();
}

#[test]
fn a_scan_asks_for_leaves_together() {
    const KEYS: u32 = 60_000;
    let (disk, _) = SimDisk::ssd(32 << 20, 1);
    let kv = Kv::new(create(disk.clone()));
    for from in (0..KEYS).step_by(1000) {
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
        assert_eq!(scan(), scans * KEYS as usize);
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
