//! Concurrent waiters share uploads.

use std::sync::Arc;
use std::time::Duration;

use draconis_bucket::{BucketDisk, BucketOptions, Faults, MemoryBucket};
use draconis_device::Disk;
use draconis_objects::kv::Kv;
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};

/// Long enough for another thread to put something meanwhile, also beside other work.
const COMMIT_INTERVAL: Duration = Duration::from_secs(8);

#[test]
fn concurrent_puts_share_commit() {
    let memory = MemoryBucket::default();
    let options = BucketOptions { commit: COMMIT_INTERVAL, token: 1, ..BucketOptions::default() };
    let engine = Arc::new(memory.client(Faults::default()));
    let bucket = BucketDisk::create(engine, "memory", 8 << 20, false, &options).unwrap();
    let bucket = Arc::new(bucket);
    let disk: Arc<dyn Disk> = bucket.clone();
    let layout = LayoutKind::Bucket;
    let profile = Profile { layout, page_bytes: 512, segment_bytes: 64 << 10, queue_depth: 4 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let how = OpenOptions { cache_bytes: 1 << 20, read_only: false };
    let kv = Kv::new(Store::open(disk, &how).unwrap());
    // From now on the next upload has to wait.
    kv.wait(kv.put(b"before", b"1").unwrap()).unwrap();
    let before = bucket.requests().puts;
    let first = kv.put(b"first", b"1").unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| kv.wait(first));
        // It would have submitted its commit by now if it did so before the interval.
        draconis_testkit::wait::pause(
            "a commit before the interval would be submitted by now",
            COMMIT_INTERVAL / 40,
        );
        let second = kv.put(b"second", b"1").unwrap();
        waiting.join().unwrap().unwrap();
        kv.wait(second).unwrap();
    });
    assert_eq!(bucket.requests().puts - before, 1, "both are in one object");
}
