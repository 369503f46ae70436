//! Stores in buckets.

use std::path::PathBuf;
use std::sync::Arc;

use draconis_access::bucket_host;
use draconis_bucket::{BucketDisk, BucketOptions, ObjectStoreBucket};
use draconis_objects::check::CheckOptions;
use draconis_objects::{CreateOptions, Store};
use rusqlite::Connection;

const CREATOR: &str = "DRACONIS_SQLITE_BUCKET_CREATOR";

/// Creates a store in a bucket.
pub fn create(address: &str, len_bytes: u64) {
    let options = BucketOptions { token: 1, ..BucketOptions::default() };
    let engine = Arc::new(ObjectStoreBucket::open(address, true, options.deadline).unwrap());
    let disk = BucketDisk::create(engine, address, len_bytes, false, &options).unwrap();
    let profile = bucket_host::store_profile(len_bytes);
    Store::create(Arc::new(disk), &CreateOptions { profile, id: 1 }).unwrap();
}

/// Creates a store in a bucket that needs another environment, in a process of its own.
pub fn create_in_child(address: &str, len_bytes: u64, environment: &[(&str, &str)]) {
    let created = draconis_testkit::child_test!(creator)
        .env(CREATOR, format!("{address} {len_bytes}"))
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    assert!(created.status.success(), "{created:?}");
}

/// Not a test but the process that creates a store where its environment says.
#[test]
fn creator() {
    let Ok(wanted) = std::env::var(CREATOR) else { return };
    let (address, len_bytes) = wanted.split_once(' ').unwrap();
    create(address, len_bytes.parse().unwrap());
}

/// A store in a bucket in a directory.
pub struct TestBucket {
    pub dir: tempfile::TempDir,
    pub address: String,
}

impl TestBucket {
    pub fn create(len_bytes: u64) -> Self {
        super::register();
        let dir = tempfile::tempdir().unwrap();
        let address = format!("file://{}/bucket", dir.path().display());
        create(&address, len_bytes);
        Self { dir, address }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("bucket")
    }

    pub fn uri(&self, name: &str, more: &str) -> String {
        format!("file:{name}?vfs=draconis&store={}{more}", self.address)
    }

    pub fn open(&self, name: &str, more: &str) -> Connection {
        Connection::open(self.uri(name, more)).unwrap()
    }

    pub fn check(&self) -> draconis_objects::check::Report {
        let options = BucketOptions::default();
        let engine = ObjectStoreBucket::open(&self.address, false, options.deadline).unwrap();
        let disk = BucketDisk::open_to_read(Arc::new(engine), &self.address, &options).unwrap();
        Store::check(Arc::new(disk), &CheckOptions::default(), &mut |_, _| {}).unwrap()
    }
}
