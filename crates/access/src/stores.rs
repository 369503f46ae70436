//! Stores in files and on devices: opened, and what is said when they cannot be.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use draconis_device::{Disk, FileOptions, LockMode, OpenedFile, lock_file};
use draconis_objects::{Error, OpenOptions, Store};
use draconis_service::elsewhere;
use rustix::io::Errno;

use crate::error::{Error as Failure, busy, missing as none, of_store};
use crate::image;

/// Opens a store to be changed, alone.
pub fn writable(device: &Path) -> anyhow::Result<Arc<Store>> {
    let file = image::alone(device)?.ok_or_else(|| none(missing(device)))?;
    open(device, disk(file, device, true, true)?, false)
}

/// Opens a store to be read, beside others who do.
pub fn readable(device: &Path) -> anyhow::Result<Arc<Store>> {
    open(device, shared(device, true)?, true)
}

/// Makes all that was done durable, and part of a checkpoint: the end of a log that rots
/// cannot be told from one that a power cut tore.
pub fn close(store: &Store, device: &Path) -> anyhow::Result<()> {
    store.sync().and_then(|()| store.checkpoint()).map_err(|error| tell(device, error))
}

/// An error, with what can be done about it.
pub fn tell(device: &Path, error: Error) -> anyhow::Error {
    let shown = device.display();
    let step = match &error {
        Error::Corrupt { .. } => format!(
            "; draconis store check {shown} says what is damaged, draconis store salvage {shown} NEW \
             brings what can be read into a new store"
        ),
        Error::NoSpace { .. } => format!(" (draconis store grow {shown} SIZE)"),
        Error::NoObject(_) => format!("; draconis store ls {shown} lists them"),
        // It names the bucket itself.
        Error::Device(draconis_device::Error::Remote(_)) => {
            return Failure::new(of_store(&error), error.to_string()).into();
        }
        _ => String::new(),
    };
    Failure::new(of_store(&error), format!("{shown}: {error}{step}")).into()
}

/// Opens the disk that a store to be read is on.
pub fn shared(device: &Path, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    let shown = device.display();
    let file = match File::open(device) {
        Err(error)
            if error.kind() == ErrorKind::NotFound && elsewhere::address(device).is_none() =>
        {
            return Err(none(missing(device)));
        }
        Err(error) => return Err(image::not_there(device, error)),
        Ok(file) => file,
    };
    match lock_file(&file, LockMode::Shared) {
        Err(Errno::WOULDBLOCK) => {
            return Err(busy(format!(
                "{shown} is in use: unmount its disks if some are mounted (draconis status), or wait until \
                 the command that changes it is done"
            )));
        }
        claimed => claimed?,
    }
    disk(file, device, false, uring)
}

/// An open file as the disk of a store.
pub fn disk(file: File, device: &Path, write: bool, uring: bool) -> anyhow::Result<Arc<dyn Disk>> {
    let options = FileOptions { write, direct: true, uring };
    let is_dense = is_dense(&file)?;
    let opened = OpenedFile::new(file.into(), options);
    let opened = opened.with_context(|| device.display().to_string())?;
    let opened = if is_dense { opened } else { opened.discarding() };
    Ok(Arc::new(opened.start()))
}

/// Says that there is none.
pub fn missing(device: &Path) -> String {
    format!("{}: no such file; draconis store create makes a store", device.display())
}

/// Opens the store on a disk.
pub fn open(device: &Path, disk: Arc<dyn Disk>, read_only: bool) -> anyhow::Result<Arc<Store>> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Store::open(disk, &options).map_err(|error| tell(device, error))
}

/// The length that the store in an open file has, in bytes.
pub fn length(device: &Path, file: &File) -> anyhow::Result<u64> {
    let disk = disk(file.try_clone()?, device, false, false)?;
    Ok(Store::measures(&*disk).map_err(|error| tell(device, error))?.0)
}

/// Whether it is a file without holes.
pub fn is_dense(file: &File) -> std::io::Result<bool> {
    // What is behind the last whole sector is never written.
    const BLOCK_BYTES: u64 = 4096;
    let meta = file.metadata()?;
    Ok(meta.is_file() && meta.blocks() * 512 + BLOCK_BYTES > meta.len())
}
