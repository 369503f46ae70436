//! A segment lost by the disk is detected: opening fails, or all its contents are still there.

use std::sync::Arc;

use draconis_device::{Disk, Extent, Group as DiskGroup, Write};
use draconis_objects::{
    CreateOptions, Group, LayoutKind, LifetimeHint, OpenOptions, Profile, Store,
};
use draconis_testkit::sim::SimDisk;
use draconis_types::{Block, PrivateBuffer};

const DISK_BYTES: u64 = 256 << 20;
const SEGMENT_BYTES: u64 = 64 << 10;
const OBJECT_COUNT: usize = 60;

/// Creates a store of objects, each durable before the next begins.
fn create_store_of_objects(layout: LayoutKind, len_of: impl Fn(usize) -> usize) -> Arc<SimDisk> {
    let (disk, _) = SimDisk::ssd(DISK_BYTES, 1);
    let profile =
        Profile { layout, page_bytes: 4096, segment_bytes: SEGMENT_BYTES as u32, queue_depth: 4 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 3 }).unwrap();
    let store = Store::open(disk.clone(), &OpenOptions::default()).unwrap();
    for nth in 0..OBJECT_COUNT {
        let mut group = Group::new();
        let id = group.create(store.new_object(), LifetimeHint::Unknown);
        group.append(id, &vec![nth as u8 + 1; len_of(nth)]);
        let ticket = store.submit(group, &[]).unwrap();
        store.wait(ticket).unwrap();
    }
    disk
}

#[test]
fn lost_segment_is_detected() {
    // Frames that fill a segment also hold the link to the next one.
    let lens: [fn(usize) -> usize; 2] = [|nth| 3000 + nth % 4 * 14_000, |_| 58_000];
    for (layout, len_of) in [LayoutKind::Log, LayoutKind::Cow]
        .into_iter()
        .flat_map(|layout| lens.map(|len_of| (layout, len_of)))
    {
        let whole = create_store_of_objects(layout, len_of);
        let (mut refused, mut shorter) = (0, vec![]);
        for start in
            (0..DISK_BYTES - SEGMENT_BYTES).step_by(4096).filter(|at| has_frame_at(&whole, *at))
        {
            let disk = whole.fork();
            let write = Write { at_bytes: start, block: Block::private(SEGMENT_BYTES as usize) };
            let ticket = disk.submit(DiskGroup { writes: vec![write] }, &[]).unwrap();
            disk.wait_durable(ticket).unwrap();
            match Store::open(disk, &OpenOptions::default()) {
                Err(_) => refused += 1,
                Ok(store) => {
                    // Objects before the checkpoint are in the index, readable or not.
                    let there = store.list().map_or(OBJECT_COUNT, |list| list.len());
                    if there < OBJECT_COUNT {
                        shorter.push(OBJECT_COUNT - there);
                    }
                }
            }
        }
        // After the last frames nothing refers to them: that is a torn end.
        assert!(shorter.iter().all(|&lost| lost <= 3), "{layout:?}: {shorter:?} lost in silence");
        assert!(refused > 5, "{layout:?}: {refused}");
    }
}

fn has_frame_at(disk: &SimDisk, at: u64) -> bool {
    let page = disk
        .read_now(Extent::new(at, 4096), PrivateBuffer::new_uninitialized(4096).into())
        .unwrap();
    page.into_private().starts_with(b"DrFr")
}
