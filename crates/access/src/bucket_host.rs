//! What openers of a bucket say about this machine, and its lock against mounts here.
//!
//! Programs that open buckets do so with `draconis-bucket`; this crate does not depend on it.

use std::fs::File;
use std::path::{Path, PathBuf};

use draconis_device::{LockMode, lock_file, try_lock_file};
use draconis_objects::{LayoutKind, Profile};
use draconis_service::client::RuntimeDir;
use draconis_service::options::parse_size;
use draconis_service::remote_disk;
pub use draconis_service::remote_disk::parse_url;
use draconis_types::path_bytes::ShowPath;

/// Default size of a new journal.
const DEFAULT_JOURNAL_BYTES: u64 = 256 << 20;

/// Returns the canonical spelling of a bucket URL.
pub fn normalize_url(address: &str) -> String {
    match address.strip_prefix("file://").map(|path| Path::new(path).canonicalize()) {
        Some(Ok(path)) => format!("file://{}", path.shown()),
        _ => address.trim_end_matches('/').to_owned(),
    }
}

/// Locks a bucket URL against mounts of this user on this machine.
///
/// # Errors
/// A message for the user: disks in the bucket are mounted.
pub fn lock_url(address: &str) -> Result<Option<File>, String> {
    let locked = open_url_lock(address).and_then(|file| {
        // A mount that has just ended may not have released its lock yet.
        file.map(|file| lock_file(&file, LockMode::Shared).map(|()| file))
            .transpose()
            .map_err(Into::into)
    });
    locked.map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => format!(
            "{address} is in use: disks in it are mounted here, or a program has it open; unmount \
             or close them first"
        ),
        _ => format!("{address}: {}", draconis_service::error_text(&error)),
    })
}

/// Locks a bucket URL against mounts and commands of this user on this machine, without waiting.
///
/// # Errors
/// `EWOULDBLOCK` if disks in the bucket are mounted or it is locked.
pub fn try_lock_url(address: &str) -> std::io::Result<Option<File>> {
    let file = open_url_lock(address)?;
    if let Some(file) = &file {
        try_lock_file(file, LockMode::Exclusive)?;
    }
    Ok(file)
}

/// Opens the file whose lock stands for a bucket URL.
fn open_url_lock(address: &str) -> std::io::Result<Option<File>> {
    // A user without a runtime directory has no mounts.
    let Ok(directory) = RuntimeDir::open() else { return Ok(None) };
    remote_disk::open_url_lock(&directory, &normalize_url(address)).map(Some)
}

/// Returns the name of this machine and process, for the errors of writers that it fences.
pub fn writer_name() -> String {
    let names = rustix::system::uname();
    format!("{}, process {}", names.nodename().to_string_lossy(), std::process::id())
}

/// Parses a journal file, which may have a size after `mark`.
///
/// # Errors
/// A message for the user.
pub fn parse_journal(text: &str, mark: char) -> Result<(PathBuf, u64), String> {
    let sized = text.rsplit_once(mark).and_then(|(file, len)| Some((file, parse_size(len)?)));
    let (file, len) = sized.unwrap_or((text, DEFAULT_JOURNAL_BYTES));
    Ok((std::path::absolute(file).map_err(|error| error.to_string())?, len))
}

/// Parses a cache directory and a size after `mark`.
///
/// # Errors
/// A message for the user.
pub fn parse_cache(text: &str, mark: char) -> Result<(PathBuf, u64), String> {
    let (dir, most) =
        text.rsplit_once(mark).ok_or_else(|| format!("a directory, a '{mark}' and a size"))?;
    // The process that opens it may have another working directory.
    let dir = std::path::absolute(dir).map_err(|error| error.to_string())?;
    let most = parse_size(most).ok_or("not a size such as 4096, 64K or 1G")?;
    Ok((dir, most))
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
