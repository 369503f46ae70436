//! Opening a store in a file, on a device, or in a bucket.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;
use clap::Args;
use draconis_access::destination::refuse_output;
use draconis_access::stores;
pub use draconis_access::stores::{
    close_store, has_no_holes, no_store_message, open_store_disk, refuse_raid_member, store_len,
    with_context,
};
use draconis_device::Disk;
use draconis_objects::Store;
use draconis_service::client::RuntimeDir;
use draconis_service::store_keeper;
use draconis_service::store_process::ObjectEntry;
use draconis_types::path_bytes::ShowPath;

use crate::bucket;
use crate::image::Force;

/// How a store is written.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct StoreWriteArgs {
    /// Write also to what is otherwise refused: a member of a RAID, which this splits from the
    /// others.
    #[arg(long, value_name = "KIND", value_enum)]
    pub force: Option<Force>,
}

/// Opens a store for writing, exclusively; on a member of a RAID only with `force`.
pub fn open_writable(device: &Path, force: Option<Force>) -> anyhow::Result<Arc<Store>> {
    refuse_output(device, &[])?;
    match bucket::bucket_url(device) {
        Some(address) => stores::open(device, bucket::open_writable(address)?, false),
        None => stores::open_exclusive(device, force == Some(Force::RaidMember)),
    }
}

/// Opens a store for reading, shared with other readers.
pub fn open_readable(device: &Path) -> anyhow::Result<Arc<Store>> {
    stores::open(device, open_disk_shared(device, true)?, true)
}

/// Opens a store for reading while another process may write it.
pub fn open_follower(device: &Path) -> anyhow::Result<Arc<Store>> {
    refuse_output(device, &[])?;
    match bucket::bucket_url(device) {
        Some(address) => stores::open(device, bucket::open_readable(address)?, true),
        None => stores::open_follower(device),
    }
}

/// Opens the disk of a store for reading.
pub fn open_disk_shared(device: &Path, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    refuse_output(device, &[])?;
    match bucket::bucket_url(device) {
        Some(address) => bucket::open_readable(address),
        None => stores::open_disk_shared(device, uring),
    }
}

/// Returns the objects of a store from its process, if some of its disks are mounted.
pub fn list_from_store_process(device: &Path) -> anyhow::Result<Option<Vec<ObjectEntry>>> {
    let named =
        bucket::bucket_url(device).map(|address| PathBuf::from(bucket::normalize_url(address)));
    // A user without a runtime directory has no mounts.
    let Ok(directory) = RuntimeDir::open() else { return Ok(None) };
    if named.is_none() && !std::fs::metadata(device).is_ok_and(|found| !found.is_dir()) {
        return Ok(None);
    }
    let listed = store_keeper::list_objects(&directory, named.as_deref().unwrap_or(device));
    listed.map_err(|why| anyhow!("{}: {why}", device.shown()))
}
