//! Conformance of buckets as disks, in memory, with faults, and in a directory.

use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{
    BucketApi, BucketDisk, BucketOptions, Faults, MemoryBucket, ObjectStoreBucket,
};
use draconis_testkit::conform;

const LEN_BYTES: u64 = 1 << 20;

/// Options with short pauses.
fn options() -> BucketOptions {
    let pause = Duration::from_micros(50);
    BucketOptions { pause, commit: Duration::ZERO, ..BucketOptions::default() }
}

fn create_disk(engine: Arc<dyn BucketApi>) -> BucketDisk {
    BucketDisk::create(engine, "memory", LEN_BYTES, false, &options()).unwrap()
}

#[test]
fn memory_bucket_conforms() {
    conform::check_all(|| create_disk(Arc::new(MemoryBucket::default())));
}

#[test]
fn faulty_memory_bucket_conforms() {
    let mut seed = 0;
    conform::check_all(|| {
        seed += 1;
        let faults = Faults { seed, refused: 8, lost: 8, late: 8, slow: 2, dies_after: None };
        create_disk(Arc::new(MemoryBucket::default().client(faults)))
    });
}

#[test]
fn directory_bucket_conforms() {
    let mut dirs = vec![];
    conform::check_all(|| {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("file://{}/a/b", dir.path().display());
        dirs.push(dir);
        create_disk(Arc::new(
            ObjectStoreBucket::open(&address, true, std::time::Duration::from_secs(30)).unwrap(),
        ))
    });
}

#[test]
fn reopened_disk_has_same_contents() {
    // Overwritten data is written and read through both.
    let memory = MemoryBucket::default();
    let engine = || Arc::new(memory.client(Faults::default()));
    drop(create_disk(engine()));
    // Discarded sectors may be zeros now and the old bytes later.
    let discards = |name: &str| name.contains("discard") || name == "holes read as zeros";
    for (_, check) in conform::ALL_CHECKS.into_iter().filter(|(name, _)| !discards(name)) {
        let disk = BucketDisk::open(engine(), "memory", &options()).unwrap();
        check(&disk);
        let bytes = read_all(&disk);
        drop(disk);
        let disk = BucketDisk::open_to_read(engine(), "memory", &options()).unwrap();
        assert!(read_all(&disk) == bytes, "other bytes");
    }
}

fn read_all(disk: &BucketDisk) -> Vec<u8> {
    use draconis_device::{Disk, Extent};
    let block = draconis_types::Block::private(LEN_BYTES as usize);
    disk.read_now(Extent::new(0, LEN_BYTES), block).unwrap().into_private().to_vec()
}
