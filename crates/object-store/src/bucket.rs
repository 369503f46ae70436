//! Stores in buckets.

use std::sync::Arc;

use draconis_access::bucket_host;
use draconis_access::uuid::UuidGenerator;
use draconis_bucket::{BucketDisk, BucketOptions, ObjectStoreBucket};
use draconis_device::CloseOnFork;
use draconis_objects::{CreateOptions, OpenOptions, Store};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How a bucket is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpenMode {
    Create { len_bytes: u64 },
    Write,
    Read,
}

/// Opens the store in a bucket.
pub(crate) fn open_store(
    address: &str,
    options: &BucketOptions,
    mode: OpenMode,
) -> Result<Arc<Store>, BoxError> {
    let is_new = matches!(mode, OpenMode::Create { .. });
    let engine = Arc::new(ObjectStoreBucket::open(address, is_new, options.deadline)?);
    let options = BucketOptions {
        who: format!("{}, at {:.0?}", bucket_host::writer_name(), chrono::Utc::now()),
        token: random(),
        host_id: bucket_host::host_id(),
        // Prevents mounts on this machine meanwhile.
        lock: match mode {
            OpenMode::Read => None,
            _ => {
                bucket_host::lock_url(address)?.map(|file| Arc::new(CloseOnFork::new(file.into())))
            }
        },
        ..options.clone()
    };
    let disk = Arc::new(match mode {
        OpenMode::Create { len_bytes } => {
            BucketDisk::create(engine, address, len_bytes, false, &options)?
        }
        OpenMode::Write => BucketDisk::open(engine, address, &options)?,
        OpenMode::Read => BucketDisk::open_to_read(engine, address, &options)?,
    });
    if let OpenMode::Create { len_bytes } = mode {
        let profile = bucket_host::store_profile(len_bytes);
        Store::create(disk.clone(), &CreateOptions { profile, id: random() })?;
    }
    let read_only = mode == OpenMode::Read;
    Ok(Store::open(disk, &OpenOptions { read_only, ..OpenOptions::default() })?)
}

fn random() -> u128 {
    u128::from_le_bytes(UuidGenerator::new(None).uuid())
}
