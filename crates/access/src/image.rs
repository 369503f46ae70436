//! Opening images by path.
//!
//! Law 1: no byte of an image is parsed before [`UnreadImage::into_disk`], so that the process
//! can confine itself first.
//! Law 2: writers lock the image exclusively; readers share a lock that excludes writers.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use draconis_container::Format;
use draconis_container::compression::{Compression, HEAD_BYTES};
use draconis_container::signature::{self, DetectedContent};
use draconis_device::{Disk, Extent, FileDisk, FileOptions, LockMode, OpenedFile, lock_file};
use draconis_exchange::heap::Block;
use draconis_ext::Error as OfVolume;
use draconis_service::volume::OpenError;
use draconis_service::{parts, remote_disk};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::error::{Error, busy_error, not_found_error};
use crate::store_disk::{StoreDiskName, UnreadStoreDisk};

/// Smallest image: a superblock ends at this byte.
const MIN_IMAGE_BYTES: u64 = 2048;
/// Timeout and poll interval for a loop device that detaches itself (autoclear).
const RELEASE_WAIT: Duration = Duration::from_secs(1);
const RELEASE_PAUSE: Duration = Duration::from_millis(5);

/// Returns the error for a volume that cannot be opened; names other contents if there are any.
pub fn refused(image: &Path, disk: &dyn Disk, error: OpenError) -> anyhow::Error {
    let shown = image.display();
    if matches!(error, OpenError::NotAVolume(_)) {
        return anyhow!("{shown}: {error}");
    }
    // An image too short for a superblock holds no volume either.
    let none = matches!(
        &error,
        OpenError::Ext(OfVolume::NotExt | OfVolume::Io(draconis_device::Error::OutOfRange { .. }))
    );
    if !none {
        return anyhow::Error::from(error).context(shown.to_string());
    }
    match signature::detect(disk) {
        Some(held) => {
            anyhow!("{shown}: not an ext volume; it holds {}, and {}", held.what, held.help)
        }
        None if disk.properties().len_bytes < MIN_IMAGE_BYTES => {
            anyhow!("{shown}: too short for a volume, or empty")
        }
        None => match split_image(image) {
            Some(first) => anyhow!(
                "{shown}: not an ext volume, but a part of a split image; open {first}, or join \
                 the files with simg2img"
            ),
            None => {
                anyhow!("{shown}: not an ext volume; --offset and --partition say where one begins")
            }
        },
    }
}

/// Returns the name of the first file of a split image of which `image` is a later one.
fn split_image(image: &Path) -> Option<String> {
    let name = image.file_name().and_then(OsStr::to_str)?;
    let first = draconis_container::chunks(name)?.first;
    (first != name).then(|| image.with_file_name(first).display().to_string())
}

/// Opens the image read-write and locks it exclusively; `None` if it does not exist.
pub fn open_exclusive(image: &Path) -> anyhow::Result<Option<File>> {
    let shown = image.display();
    let kind = match std::fs::metadata(image) {
        Ok(found) => found.file_type(),
        Err(error)
            if error.kind() == ErrorKind::NotFound && remote_disk::parse_url(image).is_none() =>
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
    claim_exclusive(&file, image)?;
    if let Some(device) = remaining_loop_device(image) {
        return Err(busy_error(format!("{shown} is in use by {device}; detach it first")));
    }
    Ok(Some(file))
}

/// Returns the file that contains an image: the image itself, or the file of its store.
pub fn container_file(image: &Path) -> PathBuf {
    StoreDiskName::parse(image).map_or_else(|| image.to_owned(), |object| object.store)
}

/// Detects contents that overwriting the file or device would lose, by known signatures.
pub fn detect_contents(file: &File) -> anyhow::Result<Option<DetectedContent>> {
    let read = |at: u64, most: usize| -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; most];
        let mut len = 0;
        while len < most {
            match file.read_at(&mut bytes[len..], at + len as u64)? {
                0 => break,
                got => len += got,
            }
        }
        bytes.truncate(len);
        Ok(bytes)
    };
    let tail = len_bytes(file)?.saturating_sub(signature::TAIL_BYTES as u64);
    let (head, tail) = (read(0, signature::HEAD_BYTES)?, read(tail, signature::TAIL_BYTES)?);
    Ok(lost(&head, &tail))
}

/// Detects the contents of a disk likewise.
pub fn held_by(disk: &dyn Disk) -> anyhow::Result<Option<DetectedContent>> {
    let properties = disk.properties();
    let sector = u64::from(properties.sector_bytes).max(1);
    let read = |at: u64, most: usize| -> anyhow::Result<Vec<u8>> {
        let len = (properties.len_bytes - at).min(most as u64) / sector * sector;
        let block = Block::private(len as usize);
        Ok(disk.read_now(Extent::new(at, len), block)?.into_private().to_vec())
    };
    let tail = properties.len_bytes.saturating_sub(signature::TAIL_BYTES as u64) / sector * sector;
    let (head, tail) = (read(0, signature::HEAD_BYTES)?, read(tail, signature::TAIL_BYTES)?);
    Ok(lost(&head, &tail))
}

/// Detects contents that would be lost, including zstd data that begins with a skippable frame.
fn lost(head: &[u8], tail: &[u8]) -> Option<DetectedContent> {
    let packed = || {
        let zstd = Compression::of(head.get(..HEAD_BYTES)?)?;
        (zstd == Compression::Zstd).then(|| signature::of(&[0x28, 0xB5, 0x2F, 0xFD])).flatten()
    };
    signature::lost(head, tail).or_else(packed)
}

/// Returns the length of a file or device.
pub fn len_bytes(file: &File) -> anyhow::Result<u64> {
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// Refuses file types that cannot hold a volume.
pub fn check_file_type(image: &Path, kind: std::fs::FileType) -> anyhow::Result<()> {
    let shown = image.display();
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

fn in_use_error(image: &Path) -> anyhow::Error {
    busy_error(format!("{} is in use; unmount it first", image.display()))
}

/// Returns the loop device that is attached to a file. Waits for one that is detaching itself, as
/// happens for a moment after an unmount.
fn remaining_loop_device(image: &Path) -> Option<String> {
    let until = Instant::now() + RELEASE_WAIT;
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
    using.next().map(|device| format!("/dev/{}", device.file_name().display()))
}

/// An image that is open and locked, but not yet read.
pub enum UnreadImage {
    /// A file or block device.
    File(OpenedFile),
    /// A disk in a store.
    InStore(UnreadStoreDisk),
}

impl UnreadImage {
    /// Returns the disk. Callers that confine themselves must have done so.
    pub fn into_disk(self) -> anyhow::Result<Arc<dyn Disk>> {
        match self {
            Self::File(file) => Ok(Arc::new(start_disk(file)?)),
            Self::InStore(object) => object.start(),
        }
    }
}

/// Starts the disk of an open file; dynamic disk image formats may grow the file.
pub fn start_disk(file: OpenedFile) -> std::io::Result<FileDisk> {
    let grows = draconis_container::grows(&file.head()?);
    Ok(if grows { file.growing()? } else { file }.start())
}

/// Backing files of an image, nearest first, or its extent files: open, but not yet read.
#[derive(Default)]
pub struct BackingFiles(Vec<OpenedFile>);

impl BackingFiles {
    /// Opens read-only the extent files that `image` names, then the files that the user names.
    pub fn open(image: &Path, paths: &[PathBuf]) -> anyhow::Result<Self> {
        let named = paths.iter().map(|path| readable_file(path));
        let parts = open_parts(image).into_iter().map(|(name, file)| {
            let path = image.with_file_name(name);
            open_file(claim_shared(file, &path)?, &path, false)
        });
        parts.chain(named).collect::<anyhow::Result<_>>().map(Self)
    }

    /// Returns the disks.
    pub fn start(self) -> Vec<Arc<dyn Disk>> {
        self.0.into_iter().map(|file| Arc::new(file.start()) as Arc<dyn Disk>).collect()
    }
}

/// Returns the extent files besides `image`, relative to its directory and only from below it, up
/// to the first missing one.
pub fn parts_of(image: &Path) -> Vec<PathBuf> {
    open_parts(image).into_iter().map(|(name, _)| name).collect()
}

fn open_parts(image: &Path) -> Vec<(PathBuf, File)> {
    let parts = part_names(image).unwrap_or_default().into_iter().map(|name| {
        let file = parts::open(image, Path::new(&name)).ok()?;
        Some((name.into(), file.into()))
    });
    parts.map_while(|part| part).collect()
}

/// Returns the names of the extent files: from a VMDK descriptor, or derived from the name of the
/// first file of a split image.
fn part_names(image: &Path) -> Option<Vec<String>> {
    if !std::fs::metadata(image).is_ok_and(|found| found.is_file()) {
        return None;
    }
    let file = File::open(image).ok()?;
    let mut head = [0; 64];
    let got = file.read_at(&mut head, 0).ok()?;
    match Format::of(head.get(..got)?)? {
        Format::VmdkText => {
            let mut text = vec![];
            file.take(draconis_container::MAX_DESCRIPTOR_BYTES).read_to_end(&mut text).ok()?;
            Some(draconis_container::names_in_text(&text))
        }
        Format::Android => {
            let name = image.file_name().and_then(OsStr::to_str)?;
            let chunks = draconis_container::chunks(name)?;
            (chunks.first == name).then_some(chunks.following)
        }
        _ => None,
    }
}

/// Opens an existing image read-write and locks it exclusively.
pub fn writable(image: &Path) -> anyhow::Result<UnreadImage> {
    if let Some(name) = StoreDiskName::parse(image) {
        return name.open_exclusive().map(UnreadImage::InStore);
    }
    let name = image.display();
    let none = || not_found_error(format!("{name}: no such file; draconis format makes a volume"));
    open_file(open_exclusive(image)?.ok_or_else(none)?, image, true).map(UnreadImage::File)
}

/// Opens an image read-only: a file, a device, or a disk in a store.
pub fn readable(image: &Path) -> anyhow::Result<UnreadImage> {
    match StoreDiskName::parse(image) {
        Some(name) => name.open_shared().map(UnreadImage::InStore),
        None => readable_file(image).map(UnreadImage::File),
    }
}

/// Opens a file or device read-only.
pub fn readable_file(image: &Path) -> anyhow::Result<OpenedFile> {
    open_file(open_shared(image)?, image, false)
}

/// Opens a file or device read-only with a shared lock.
pub fn open_shared(image: &Path) -> anyhow::Result<File> {
    let kind = match std::fs::metadata(image) {
        Ok(found) => found.file_type(),
        Err(error) => return Err(open_error(image, error)),
    };
    check_file_type(image, kind)?;
    claim_shared(File::open(image).with_context(|| image.display().to_string())?, image)
}

fn claim_shared(file: File, image: &Path) -> anyhow::Result<File> {
    match lock_file(&file, LockMode::Shared) {
        Err(Errno::WOULDBLOCK) => Err(in_use_error(image)),
        claimed => {
            claimed?;
            Ok(file)
        }
    }
}

/// Returns the error of opening a path, with a hint if the path is an address of a bucket.
pub(crate) fn open_error(path: &Path, error: std::io::Error) -> anyhow::Error {
    if error.kind() == ErrorKind::NotFound
        && let Some(address) = remote_disk::parse_url(path)
    {
        let text = format!(
            "{address}: it is in a bucket, and this library uses no network; draconis mount, and \
             the other commands of the program, do"
        );
        return Error::new(Errno::OPNOTSUPP, text).into();
    }
    anyhow::Error::from(error).context(path.display().to_string())
}

/// Wraps an open image as a disk that is not started.
pub fn open_file(file: File, image: &Path, write: bool) -> anyhow::Result<OpenedFile> {
    // Uses the page cache, as every one-shot tool does.
    let how = FileOptions { write, direct: false, uring: false };
    OpenedFile::new(file.into(), how).with_context(|| image.display().to_string())
}
