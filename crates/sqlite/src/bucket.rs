//! Stores in buckets.
//!
//! Law 1: a writer holds the bucket as a mount does. On this machine, the lock of the address keeps
//! others out; on others, the epoch, unless they take over.
//! Law 2: a commit is durable once the bucket has it, or the journal if there is one.
//! Law 3: a bucket that cannot be reached fails a commit after the deadline. Nothing is lost: what
//! was submitted is uploaded when the bucket is back, the undoing of a refused commit after it.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use draconis_access::bucket_host;
use draconis_access::uuid::UuidGenerator;
use draconis_bucket::{BucketDisk, BucketOptions, JournalDevice, ObjectStoreBucket};
use draconis_device::CloseOnFork;
use draconis_objects::{OpenOptions, Store};

use crate::codes;
use crate::error::{Failure, Result};

/// Parameters of database names: mount options for buckets.
pub(crate) const PARAMETERS: [&std::ffi::CStr; 5] = [
    c"bucket_journal",
    c"bucket_cache",
    c"bucket_deadline",
    c"bucket_commit_ms",
    c"bucket_take_over",
];

/// Values of those parameters that were given.
#[derive(Clone, Default, Debug)]
pub(crate) struct BucketParameters(pub Vec<(&'static str, String)>);

impl BucketParameters {
    /// Returns the options of a bucket; an existing journal if the store is only read.
    fn to_options(&self, is_read_only: bool) -> std::result::Result<BucketOptions, String> {
        let mut options = BucketOptions {
            who: format!("SQLite on {}", bucket_host::writer_name()),
            token: random(),
            host_id: bucket_host::host_id(),
            is_mount: !is_read_only,
            ..BucketOptions::default()
        };
        let number = |text: &str| text.parse().map_err(|_| format!("a whole number, not '{text}'"));
        for (name, value) in &self.0 {
            let parsed = match *name {
                "bucket_journal" => {
                    bucket_host::parse_journal(value, ':').and_then(|(file, len)| {
                        if !is_read_only || file.exists() {
                            options.journal = Some(JournalDevice::file(&file, len, random())?);
                        }
                        Ok(())
                    })
                }
                "bucket_cache" => {
                    bucket_host::parse_cache(value, ':').map(|cache| options.cache = Some(cache))
                }
                "bucket_deadline" => {
                    number(value).map(|s| options.deadline = Duration::from_secs(s))
                }
                "bucket_commit_ms" => {
                    number(value).map(|ms| options.commit = Duration::from_millis(ms))
                }
                _ => match value.as_str() {
                    "" | "1" => {
                        options.take_over = true;
                        Ok(())
                    }
                    _ => Err("1 or nothing".to_owned()),
                },
            };
            parsed.map_err(|why| format!("{name}: {why}"))?;
        }
        Ok(options)
    }
}

/// Opens the store in a bucket.
pub(crate) fn open(
    address: &str,
    parameters: &BucketParameters,
    is_read_only: bool,
) -> Result<Arc<Store>> {
    let failed = |why: String| {
        let is_named = why.contains(address);
        let why = if is_named { why } else { format!("{address}: {why}") };
        Failure::new(codes::CANTOPEN, why)
    };
    let lock = match is_read_only {
        true => None,
        false => bucket_host::try_lock_url(address).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => Failure::new(
                codes::BUSY,
                format!("{address}: another process or a mount on this machine has it open"),
            ),
            _ => failed(error.to_string()),
        })?,
    };
    let options = parameters.to_options(is_read_only).map_err(failed)?;
    let lock = lock.map(|file| Arc::new(CloseOnFork::new(file.into())));
    let options = BucketOptions { lock, ..options };
    let engine =
        Arc::new(ObjectStoreBucket::open(address, false, options.deadline).map_err(failed)?);
    let disk = match is_read_only {
        true => BucketDisk::open_to_read(engine, address, &options),
        false => BucketDisk::open(engine, address, &options),
    };
    let disk = Arc::new(disk.map_err(|error| failed(error.to_string()))?);
    let options = OpenOptions { read_only: is_read_only, ..OpenOptions::default() };
    Store::open(disk, &options).map_err(|error| failed(error.to_string()))
}

fn random() -> u128 {
    u128::from_le_bytes(UuidGenerator::new(None).uuid())
}
