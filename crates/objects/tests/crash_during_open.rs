//! A machine that crashes while it opens a store, and again at the next opening: the check passes
//! each time.

use std::sync::Arc;

use draconis_device::{Disk, Extent, MemoryDisk, Urgency};
use draconis_objects::check::CheckOptions;
use draconis_objects::{OpenOptions, Store};
use draconis_testkit::torture::StoreShape;
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::Block;

fn read_disk_bytes(disk: &dyn Disk) -> Vec<u8> {
    let len = disk.properties().len_bytes;
    let block = disk.read(Extent::new(0, len), Block::private(len as usize), Urgency::Now);
    block.wait().unwrap().unwrap().into_private().to_vec()
}

fn assert_store_is_clean(disk: Arc<dyn Disk>) {
    let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{:?}", report.damage);
}

/// Returns the states after crashes while the store in `image` is opened.
fn crash_images(image: Vec<u8>) -> impl Iterator<Item = Vec<u8>> {
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(image.clone(), 512)));
    drop(Store::open(disk.clone(), &OpenOptions::default()).unwrap());
    let options = CrashOptions { seed: 1, subsets: 0, exhaustive_sectors: 0 };
    CrashStates::new(image, disk.take_events(), options).map(|crash| crash.disk.to_bytes())
}

#[test]
fn two_crashes_leave_no_stale_superblock() {
    for shape in [StoreShape::ALL[0], StoreShape::BUCKET_SHAPE] {
        let disk = Arc::new(MemoryDisk::new(vec![0x55; shape.disk_bytes], 512));
        Store::create(disk.clone(), &shape.options()).unwrap();
        drop(Store::open(disk.clone(), &OpenOptions::default()).unwrap());
        let mut states = 0;
        for once in crash_images(read_disk_bytes(&*disk)) {
            assert_store_is_clean(Arc::new(MemoryDisk::new(once.clone(), 512)));
            for twice in crash_images(once) {
                assert_store_is_clean(Arc::new(MemoryDisk::new(twice, 512)));
                states += 1;
            }
        }
        assert!(states > 30, "{states}");
    }
}
