//! Prints each request of opening a store after its writer died, with when it began:
//!
//! ```text
//! cargo run --release -p draconis-bucket --example opening -- LATENCY_MS KEYS
//! ```
//!
//! Each request takes `LATENCY_MS` (20), so those that wait for each other are easy to see. The
//! bucket is in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use draconis_bucket::{
    BucketApi, BucketDisk, BucketOptions, Faults, ListEntry, MemoryBucket, RequestResult,
};
use draconis_device::Disk;
use draconis_objects::kv::Kv;
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};

const VALUE_BYTES: usize = 100;
/// Durable puts before the death.
const LAST_PUTS: u64 = 20;
const HOW: OpenOptions = OpenOptions { cache_bytes: 64 << 20, read_only: false };

/// A bucket whose requests take some time, and are printed.
struct SlowBucket {
    bucket: MemoryBucket,
    opened: Instant,
    latency: Duration,
}

impl SlowBucket {
    fn request<T>(&self, what: &str, run: impl FnOnce() -> T) -> T {
        println!("{:6} ms  {what}", self.opened.elapsed().as_millis());
        std::thread::sleep(self.latency);
        run()
    }
}

impl BucketApi for SlowBucket {
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.request(&format!("PUT {key}"), || self.bucket.put(key, bytes))
    }

    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.request(&format!("PUT {key}, if it is new"), || self.bucket.create(key, bytes))
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        self.request(&format!("GET {key}"), || self.bucket.get(key, range))
    }

    fn head(&self, key: &str) -> RequestResult<u64> {
        self.request(&format!("HEAD {key}"), || self.bucket.head(key))
    }

    fn delete(&self, key: &str) -> RequestResult<()> {
        self.request(&format!("DELETE {key}"), || self.bucket.delete(key))
    }

    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        self.request(&format!("LIST {folder}"), || self.bucket.list(folder))
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>().unwrap());
    let latency = Duration::from_millis(arguments.next().unwrap_or(20));
    let keys = arguments.next().unwrap_or(200_000);
    let bucket = MemoryBucket::default();
    let options = BucketOptions { token: 1, ..BucketOptions::default() };
    let engine = Arc::new(bucket.client(Faults::default()));
    let disk = BucketDisk::create(engine, "memory", 4 << 30, false, &options).unwrap();
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let layout = LayoutKind::Bucket;
    let profile = Profile { layout, page_bytes: 512, segment_bytes: 16 << 20, queue_depth: 4 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 }).unwrap();
    let kv = Kv::new(Store::open(disk, &HOW).unwrap());
    let put = |key: u64| kv.put(&key.to_be_bytes(), &[key as u8; VALUE_BYTES]).unwrap();
    for key in 0..keys {
        put(key);
    }
    (0..LAST_PUTS).for_each(|key| kv.wait(put(key)).unwrap());
    // It never ends.
    std::mem::forget(kv);

    let opened = Instant::now();
    let bucket = bucket.client(Faults::default());
    let engine = Arc::new(SlowBucket { bucket, opened, latency });
    let options = BucketOptions { token: 2, ..BucketOptions::default() };
    let disk: Arc<dyn Disk> = Arc::new(BucketDisk::open(engine, "memory", &options).unwrap());
    let kv = Kv::new(Store::open(disk, &HOW).unwrap());
    println!("{:6} ms  the store is open", opened.elapsed().as_millis());
    assert!(kv.get(&7_u64.to_be_bytes()).unwrap().is_some());
    println!("{:6} ms  a key was read", opened.elapsed().as_millis());
}
