//! Any bytes as a disk with partitions.
#![no_main]

use draconis_device::{MemoryDisk, read_partitions};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let disk = MemoryDisk::new(bytes.to_vec(), 512);
    for partition in read_partitions(&disk).unwrap_or_default() {
        assert!(partition.extent.end_bytes().is_some_and(|end| end <= bytes.len() as u64));
    }
});
