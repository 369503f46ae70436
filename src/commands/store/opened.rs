//! An open store: in a file, on a device, or in a bucket.

use std::path::Path;
use std::sync::Arc;

use draconis_access::stores;
pub use draconis_access::stores::{close, disk, is_dense, length, missing, tell};
use draconis_device::Disk;
use draconis_objects::Store;

use crate::bucket;

/// Opens a store to be changed, alone.
pub fn writable(device: &Path) -> anyhow::Result<Arc<Store>> {
    match bucket::address(device) {
        Some(address) => stores::open(device, bucket::writable(address)?, false),
        None => stores::writable(device),
    }
}

/// Opens a store to be read, beside others who do.
pub fn readable(device: &Path) -> anyhow::Result<Arc<Store>> {
    stores::open(device, shared(device, true)?, true)
}

/// Opens the disk that a store to be read is on.
pub fn shared(device: &Path, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    match bucket::address(device) {
        Some(address) => bucket::readable(address),
        None => stores::shared(device, uring),
    }
}
