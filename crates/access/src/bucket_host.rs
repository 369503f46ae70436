//! What openers of a bucket say about this machine, and its lock against mounts here.
//!
//! Programs that open buckets do so with `draconis-bucket`; this crate does not depend on it.

use std::fs::File;
use std::path::Path;

use draconis_objects::{LayoutKind, Profile};
use draconis_service::client::RuntimeDir;
use draconis_service::remote_disk;

/// Returns the canonical spelling of a bucket URL.
pub fn normalize_url(address: &str) -> String {
    match address.strip_prefix("file://").map(|path| Path::new(path).canonicalize()) {
        Some(Ok(path)) => format!("file://{}", path.display()),
        _ => address.trim_end_matches('/').to_owned(),
    }
}

/// Locks a bucket URL against mounts of this user on this machine.
///
/// # Errors
/// A message for the user: disks in the bucket are mounted.
pub fn lock_url(address: &str) -> Result<Option<File>, String> {
    // A user without a runtime directory has no mounts.
    let Ok(directory) = RuntimeDir::open() else { return Ok(None) };
    remote_disk::lock_url(&directory, &normalize_url(address)).map(Some)
}

/// Returns the identity of this machine and user, which have at most one mount of a bucket.
pub fn host_id() -> String {
    RuntimeDir::open().map(|directory| remote_disk::owner_id(&directory)).unwrap_or_default()
}

/// Returns the profile of new stores in buckets.
pub fn store_profile(len_bytes: u64) -> Profile {
    let segment_bytes = (1u64 << (len_bytes / 128).max(1).ilog2()).clamp(64 << 10, 16 << 20) as u32;
    Profile { layout: LayoutKind::Bucket, page_bytes: 512, segment_bytes, queue_depth: 16 }
}
