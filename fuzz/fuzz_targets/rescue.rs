//! Any bytes as a volume that is rescued: everything that is found is read, in order.
#![no_main]

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::rescue::Rescue;
use draconis_ext::{OpenOptions, SuperblockPlace};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let place = SuperblockPlace::default();
    let Ok(rescue) = Rescue::scan(disk, OpenOptions::default(), &place, &|_, _| {}) else { return };
    for at in rescue.order() {
        let item = &rescue.items()[*at];
        let (mut end, mut read) = (0, 0);
        rescue.read(item, &mut |offset, data| {
            assert!(offset >= end, "pieces are in order");
            end = offset + data.len() as u64;
            read += data.len();
            true
        });
        assert!(read <= bytes.len() * 8, "contents are bounded by the disk");
        let _ = (rescue.xattrs(item), rescue.link_target(item));
    }
});
