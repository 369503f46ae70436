//! Opening stores in files and on devices, and the errors of that.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use draconis_container::signature;
use draconis_device::{Disk, FileOptions, LockMode, OpenedFile, lock_file, try_lock_file};
use draconis_objects::{Error, OpenOptions, Store};
use draconis_service::remote_disk;
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::error::{Error as Failure, busy_error, not_found_error as none, store_errno};
use crate::host_file;

/// Opens a store for writing, exclusively; on a member of a RAID only with `force_raid_member`.
pub fn open_exclusive(device: &Path, force_raid_member: bool) -> anyhow::Result<Arc<Store>> {
    let file = host_file::open_exclusive(device)?.ok_or_else(|| none(no_store_message(device)))?;
    let disk = open_store_disk(file, device, true, true)?;
    refuse_raid_member(device, &*disk, force_raid_member)?;
    open(device, disk, false)
}

/// Refuses to write to a store on a member of a RAID, which looks like a store of its own.
pub fn refuse_raid_member(device: &Path, disk: &dyn Disk, is_forced: bool) -> anyhow::Result<()> {
    match signature::find_raid_member(disk) {
        Some(member) if !is_forced => {
            Err(anyhow::Error::from(member).context(device.shown().to_string()))
        }
        _ => Ok(()),
    }
}

/// Opens the file of a store, without a lock: for [`try_open`].
pub fn open_unlocked(device: &Path, write: bool) -> anyhow::Result<File> {
    match write {
        true => host_file::open_unlocked(device)?.ok_or_else(|| none(no_store_message(device))),
        false => open_file(device),
    }
}

/// Opens the store in a file, exclusively for writing, or shared with other readers. Fails at once
/// with EBUSY if it is in use.
pub fn try_open(device: &Path, file: File, write: bool) -> anyhow::Result<Arc<Store>> {
    let mode = if write { LockMode::Exclusive } else { LockMode::Shared };
    try_lock_file(&file, mode).map_err(|errno| match errno {
        Errno::WOULDBLOCK => host_file::in_use_error(device),
        errno => errno.into(),
    })?;
    if write {
        host_file::check_no_loop_device(device, Duration::ZERO)?;
    }
    let disk = open_store_disk(file, device, write, true)?;
    if write {
        refuse_raid_member(device, &*disk, false)?;
    }
    open(device, disk, !write)
}

/// Opens a store for reading, shared with other readers.
pub fn open_shared(device: &Path) -> anyhow::Result<Arc<Store>> {
    open(device, open_disk_shared(device, true)?, true)
}

/// Makes all changes durable and writes a checkpoint: corruption of the newest log records
/// cannot be told from a torn write.
pub fn close_store(store: &Store, device: &Path) -> anyhow::Result<()> {
    store.sync().and_then(|()| store.checkpoint()).map_err(|error| with_context(device, error))
}

/// Adds the device and a hint to an error.
pub fn with_context(device: &Path, error: Error) -> anyhow::Error {
    let shown = device.shown();
    let step = match &error {
        Error::Corrupt { .. } => format!(
            "; draconis store check {shown} says what is damaged, draconis store salvage {shown} NEW \
             brings what can be read into a new store"
        ),
        Error::NoSpace { .. } => format!(" (draconis store grow {shown} SIZE)"),
        Error::NoObject(_) => format!("; draconis store ls {shown} lists them"),
        // The error names the bucket itself.
        Error::Device(draconis_device::Error::Remote(_)) => {
            return Failure::new(store_errno(&error), error.to_string()).into();
        }
        _ => String::new(),
    };
    Failure::new(store_errno(&error), format!("{shown}: {error}{step}")).into()
}

/// Opens a store for reading while another process may write it: see
/// [`Store::refresh`](draconis_objects::Store::refresh).
pub fn open_follower(device: &Path) -> anyhow::Result<Arc<Store>> {
    let disk = open_store_disk(open_file(device)?, device, false, true)?;
    open(device, disk, true)
}

/// Opens the disk of a store for reading.
pub fn open_disk_shared(device: &Path, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    let file = open_file(device)?;
    lock_store_shared(&file, device)?;
    open_store_disk(file, device, false, uring)
}

fn open_file(device: &Path) -> anyhow::Result<File> {
    File::open(device).map_err(|error| match error.kind() {
        ErrorKind::NotFound if remote_disk::parse_url(device).is_none() => {
            none(no_store_message(device))
        }
        _ => host_file::open_error(device, error),
    })
}

/// Locks the file of a store against writers.
pub(crate) fn lock_store_shared(file: &File, store: &Path) -> anyhow::Result<()> {
    match lock_file(file, LockMode::Shared) {
        Err(Errno::WOULDBLOCK) => Err(busy_error(format!(
            "{} is in use: unmount its disks if some are mounted (draconis status), or wait until \
             the command that changes it is done; draconis store ls, kv get and kv scan read it \
             meanwhile with --follow",
            store.shown()
        ))),
        claimed => Ok(claimed?),
    }
}

/// Wraps an open file as the disk of a store.
pub fn open_store_disk(
    file: File,
    device: &Path,
    write: bool,
    uring: bool,
) -> anyhow::Result<Arc<dyn Disk>> {
    let options = FileOptions { write, direct: true, uring };
    let is_dense = has_no_holes(&file)?;
    let opened = OpenedFile::new(file.into(), options);
    let opened = opened.with_context(|| device.shown().to_string())?;
    let opened = if is_dense { opened } else { opened.with_discards() };
    Ok(Arc::new(opened.start()))
}

/// Returns the message for a missing store.
pub fn no_store_message(device: &Path) -> String {
    format!("{}: no such file; draconis store create makes a store", device.shown())
}

/// Opens the store on a disk.
pub fn open(device: &Path, disk: Arc<dyn Disk>, read_only: bool) -> anyhow::Result<Arc<Store>> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Store::open(disk, &options).map_err(|error| with_context(device, error))
}

/// Returns the length of the store in an open file, in bytes.
pub fn store_len(device: &Path, file: &File) -> anyhow::Result<u64> {
    let disk = open_store_disk(file.try_clone()?, device, false, false)?;
    Ok(Store::read_profile(&*disk).map_err(|error| with_context(device, error))?.0)
}

/// Returns true for a regular file without holes.
pub fn has_no_holes(file: &File) -> std::io::Result<bool> {
    // The store never writes a partial block at the end of the file.
    const BLOCK_BYTES: u64 = 4096;
    let meta = file.metadata()?;
    Ok(meta.is_file() && meta.blocks() * 512 + BLOCK_BYTES > meta.len())
}
