//! Files and devices of the host, opened and claimed.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::{FileDisk, FileOptions, LockMode, OpenedFile, lock_file};
use draconis_service::remote_disk;
use draconis_types::path_bytes::ShowPath;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::error::{Error, busy_error};
use crate::location::image_of_deleted;

/// Timeout and poll interval for a loop device that detaches itself (autoclear).
const RELEASE_WAIT: Duration = Duration::from_secs(1);
const RELEASE_PAUSE: Duration = Duration::from_millis(5);

/// Opens the image read-write and locks it exclusively; `None` if it does not exist.
pub fn open_exclusive(image: &Path) -> anyhow::Result<Option<File>> {
    let Some(file) = open_unlocked(image)? else { return Ok(None) };
    claim_exclusive(&file, image)?;
    check_no_loop_device(image, RELEASE_WAIT)?;
    Ok(Some(file))
}

/// Opens the image read-write, without a lock; `None` if it does not exist.
pub(crate) fn open_unlocked(image: &Path) -> anyhow::Result<Option<File>> {
    let shown = image.shown();
    let kind = match std::fs::metadata(image) {
        Ok(found) => found.file_type(),
        Err(error)
            if error.kind() == ErrorKind::NotFound
                && remote_disk::parse_url(image).is_none()
                && image_of_deleted(image).is_none() =>
        {
            return Ok(None);
        }
        Err(error) => return Err(open_error(image, error)),
    };
    check_file_type(image, kind)?;
    // O_EXCL fails on a device that the kernel has mounted.
    let flags = if kind.is_block_device() { OFlags::EXCL.bits() as i32 } else { 0 };
    let file = match File::options().read(true).write(true).custom_flags(flags).open(image) {
        Err(error) if error.kind() == ErrorKind::ResourceBusy => return Err(in_use_error(image)),
        opened => opened.with_context(|| shown.to_string())?,
    };
    Ok(Some(file))
}

/// Refuses a file that is attached to a loop device. Waits for one that is detaching itself, as
/// happens for a moment after an unmount.
pub(crate) fn check_no_loop_device(image: &Path, max_wait: Duration) -> anyhow::Result<()> {
    match remaining_loop_device(image, max_wait) {
        None => Ok(()),
        Some(device) => {
            let shown = image.shown();
            Err(busy_error(format!("{shown} is in use by {device}; detach it first")))
        }
    }
}

/// Returns the length of a file or device.
pub fn len_bytes(file: &File) -> anyhow::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// Refuses file types that cannot hold a volume.
pub fn check_file_type(image: &Path, kind: std::fs::FileType) -> anyhow::Result<()> {
    let shown = image.shown();
    if kind.is_dir() {
        bail!("{shown} is a directory, and no image");
    }
    if !kind.is_file() && !kind.is_block_device() {
        bail!("{shown} is neither a file nor a block device");
    }
    Ok(())
}

/// Locks an open image exclusively.
pub fn claim_exclusive(file: &File, image: &Path) -> anyhow::Result<()> {
    match lock_file(file, LockMode::Exclusive) {
        Err(Errno::WOULDBLOCK) => Err(in_use_error(image)),
        claimed => Ok(claimed?),
    }
}

pub(crate) fn in_use_error(image: &Path) -> anyhow::Error {
    busy_error(format!("{} is in use; unmount it first", image.shown()))
}

fn remaining_loop_device(image: &Path, max_wait: Duration) -> Option<String> {
    let until = Instant::now() + max_wait;
    loop {
        let device = loop_device(image)?;
        let flag = Path::new("/sys/block").join(device.trim_start_matches("/dev/"));
        let flag = std::fs::read_to_string(flag.join("loop/autoclear"));
        if !flag.is_ok_and(|flag| flag.trim() == "1") || Instant::now() > until {
            return Some(device);
        }
        std::thread::sleep(RELEASE_PAUSE);
    }
}

/// Returns the loop device that is attached to a file.
fn loop_device(image: &Path) -> Option<String> {
    let image = std::fs::metadata(image).ok()?;
    let backs = |device: &Path| -> Option<bool> {
        let path = std::fs::read_to_string(device.join("loop/backing_file")).ok()?;
        let found = std::fs::metadata(path.trim_end_matches('\n')).ok()?;
        Some((found.dev(), found.ino()) == (image.dev(), image.ino()))
    };
    let devices = std::fs::read_dir("/sys/block").ok()?.flatten();
    let mut using = devices.filter(|device| backs(&device.path()) == Some(true));
    using.next().map(|device| format!("/dev/{}", device.file_name().shown()))
}

/// Starts the disk of an open file; dynamic disk image formats may grow the file.
pub fn start_disk(file: OpenedFile) -> std::io::Result<FileDisk> {
    let grows = draconis_container::is_growing_format(&file.read_file_head()?);
    Ok(if grows { file.with_growth()? } else { file }.start())
}

/// Opens a file or device read-only with a shared lock.
pub fn open_shared(image: &Path) -> anyhow::Result<File> {
    let kind = match std::fs::metadata(image) {
        Ok(found) => found.file_type(),
        Err(error) => return Err(open_error(image, error)),
    };
    check_file_type(image, kind)?;
    claim_shared(File::open(image).with_context(|| image.shown().to_string())?, image)
}

pub(crate) fn claim_shared(file: File, image: &Path) -> anyhow::Result<File> {
    match lock_file(&file, LockMode::Shared) {
        Err(Errno::WOULDBLOCK) => Err(in_use_error(image)),
        claimed => {
            claimed?;
            Ok(file)
        }
    }
}

/// Returns the error of opening a path, with a hint if the path is an address of a bucket.
pub fn open_error(path: &Path, error: std::io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound
        && let Some(address) = remote_disk::parse_url(path)
    {
        let text = format!(
            "{address}: it is in a bucket, and this library uses no network; draconis mount, and \
             the other commands of the program, do"
        );
        return Error::new(Errno::OPNOTSUPP, text).into();
    }
    if let Some(image) = image_of_deleted(path) {
        let text = format!(
            "{}: the deleted files of {} are only read: by ls, tree, stat, cat, get, tar, info and \
             mount",
            path.shown(),
            image.shown()
        );
        return Error::new(Errno::ROFS, text).into();
    }
    anyhow::Error::from(error).context(path.shown().to_string())
}

/// Wraps an open image as a disk that is not started.
pub fn open_file(file: File, image: &Path, write: bool) -> anyhow::Result<OpenedFile> {
    // Uses the page cache, as every one-shot tool does.
    let how = FileOptions { write, direct: false, uring: false };
    OpenedFile::new(file.into(), how).with_context(|| image.shown().to_string())
}
