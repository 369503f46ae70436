//! Conformance of buckets as disks, in memory, with faults, and in a directory.

use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{
    BucketApi, BucketDisk, BucketOptions, Faults, MemoryBucket, ObjectStoreBucket,
};
use draconis_device::conform;

const LEN_BYTES: u64 = 1 << 20;

/// Options with short pauses.
fn options() -> BucketOptions {
    let pause = Duration::from_micros(50);
    BucketOptions { pause, commit: Duration::ZERO, ..BucketOptions::default() }
}

fn made(engine: Arc<dyn BucketApi>) -> BucketDisk {
    BucketDisk::create(engine, "memory", LEN_BYTES, false, &options()).unwrap()
}

#[test]
fn in_memory() {
    conform::check_all(|| made(Arc::new(MemoryBucket::default())));
}

#[test]
fn in_memory_with_faults() {
    let mut seed = 0;
    conform::check_all(|| {
        seed += 1;
        let faults = Faults { seed, refused: 8, lost: 8, late: 8, slow: 2, dies_after: None };
        made(Arc::new(MemoryBucket::default().client(faults)))
    });
}

#[test]
fn in_a_directory() {
    let mut dirs = vec![];
    conform::check_all(|| {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("file://{}/a/b", dir.path().display());
        dirs.push(dir);
        made(Arc::new(
            ObjectStoreBucket::open(&address, true, std::time::Duration::from_secs(30)).unwrap(),
        ))
    });
}

#[test]
fn a_disk_is_the_same_when_it_is_opened_again() {
    // Overwritten data is written and read through both.
    let memory = MemoryBucket::default();
    let engine = || Arc::new(memory.client(Faults::default()));
    drop(made(engine()));
    // Discarded sectors may be zeros now and the old bytes later.
    for (_, check) in conform::CHECKS.into_iter().filter(|(name, _)| !name.contains("discard")) {
        let disk = BucketDisk::open(engine(), "memory", &options()).unwrap();
        check(&disk);
        let bytes = all(&disk);
        drop(disk);
        let disk = BucketDisk::open_to_read(engine(), "memory", &options()).unwrap();
        assert!(all(&disk) == bytes, "other bytes");
    }
}

fn all(disk: &BucketDisk) -> Vec<u8> {
    use draconis_device::{Disk, Extent};
    let block = draconis_exchange::heap::Block::private(LEN_BYTES as usize);
    disk.read_now(Extent::new(0, LEN_BYTES), block).unwrap().into_private().to_vec()
}
