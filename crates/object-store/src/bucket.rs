//! Stores in buckets.
//!
//! Law: requests block on a runtime of the bucket's own, which a thread that drives another runtime
//! must not do. So opening and closing have a thread of their own; other calls run on the blocking
//! pool.

use std::fs::File;
use std::sync::Arc;

use draconis_access::bucket_host;
use draconis_access::uuid::UuidGenerator;
use draconis_bucket::{BucketDisk, BucketOptions, ObjectStoreBucket};
use draconis_device::ForwardingDisk;
use draconis_objects::{CreateOptions, OpenOptions, Store};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How a bucket is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpenMode {
    Create { len_bytes: u64 },
    Write,
    Read,
}

/// Opens the store in a bucket, on a thread of its own, and passes it to `then` there.
pub(crate) fn open_store<T: Send>(
    address: &str,
    options: &BucketOptions,
    mode: OpenMode,
    then: impl FnOnce(Arc<Store>) -> Result<T, BoxError> + Send,
) -> Result<T, BoxError> {
    run_on_thread(|| then(open_here(address, options, mode)?))?
}

fn open_here(
    address: &str,
    options: &BucketOptions,
    mode: OpenMode,
) -> Result<Arc<Store>, BoxError> {
    let (process, now) = (std::process::id(), chrono::Utc::now());
    let options = BucketOptions {
        who: format!("{}, process {process}, at {now:.0?}", host_name()),
        token: random(),
        host_id: bucket_host::host_id(),
        ..options.clone()
    };
    let is_new = matches!(mode, OpenMode::Create { .. });
    let engine = Arc::new(ObjectStoreBucket::open(address, is_new, options.deadline)?);
    let claim = match mode {
        OpenMode::Read => None,
        _ => bucket_host::lock_url(address)?,
    };
    let disk = match mode {
        OpenMode::Create { len_bytes } => {
            BucketDisk::create(engine, address, len_bytes, false, &options)?
        }
        OpenMode::Write => BucketDisk::open(engine, address, &options)?,
        OpenMode::Read => BucketDisk::open_to_read(engine, address, &options)?,
    };
    let disk = Arc::new(ClaimedDisk { disk, _claim: claim });
    if let OpenMode::Create { len_bytes } = mode {
        let profile = bucket_host::store_profile(len_bytes);
        Store::create(disk.clone(), &CreateOptions { profile, id: random() })?;
    }
    let read_only = mode == OpenMode::Read;
    Ok(Store::open(disk, &OpenOptions { read_only, ..OpenOptions::default() })?)
}

/// The disk of a bucket, closed by a thread of its own.
struct ClaimedDisk {
    disk: BucketDisk,
    /// Prevents mounts on this machine meanwhile.
    _claim: Option<File>,
}

impl ForwardingDisk for ClaimedDisk {
    type Inner = BucketDisk;

    fn inner_disk(&self) -> &BucketDisk {
        &self.disk
    }
}

impl Drop for ClaimedDisk {
    fn drop(&mut self) {
        let closed = run_on_thread(|| {
            self.disk.close();
            self.disk.close_error()
        });
        match closed {
            Ok(left) => left.iter().for_each(|left| log::warn!("{left}")),
            Err(error) => log::warn!("a bucket was not closed: {error}"),
        }
    }
}

fn run_on_thread<T: Send>(call: impl FnOnce() -> T + Send) -> Result<T, BoxError> {
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().name("bucket".to_owned()).spawn_scoped(scope, call)?;
        thread.join().map_err(|_| "the thread that opened or closed a bucket panicked".into())
    })
}

fn random() -> u128 {
    u128::from_le_bytes(UuidGenerator::new(None).uuid())
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map(|name| name.trim_end().to_owned()).unwrap_or_default()
}
