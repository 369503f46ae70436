//! Opening images by path.
//!
//! Law 1: no byte of an image is parsed before [`UnreadImage::into_disk`], so that the process
//! can confine itself first.
//! Law 2: writers lock the image exclusively; readers share a lock that excludes writers.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;
use draconis_container::Format;
use draconis_container::compression::{Compression, MAGIC_BYTES};
use draconis_container::signature::{self, DetectedContent};
use draconis_device::{Disk, Extent, OpenedFile};
use draconis_ext::Error as OfVolume;
use draconis_service::parts;
use draconis_service::volume::OpenError;
use draconis_types::Block;
use draconis_types::path_bytes::ShowPath;

use crate::error::not_found_error;
use crate::host_file::{
    claim_shared, len_bytes, open_exclusive, open_file, open_shared, start_disk,
};
use crate::location::image_of_deleted;
use crate::store_disk::{StoreDiskName, UnreadStoreDisk};

/// Smallest image: a superblock ends at this byte.
const MIN_IMAGE_BYTES: u64 = 2048;

/// Returns the error for a volume that cannot be opened; names other contents if there are any.
pub fn open_volume_error(image: &Path, disk: &dyn Disk, error: OpenError) -> anyhow::Error {
    let shown = image.shown();
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
    let held = signature::detect(disk);
    if held.is_none()
        && let Some(lost) = draconis_ext::lost_superblock(disk)
    {
        return anyhow::Error::from(lost).context(shown.to_string());
    }
    match held {
        Some(held) => {
            anyhow!("{shown}: not an ext volume; it holds {}, and {}", held.what, held.help)
        }
        None if disk.properties().len_bytes < MIN_IMAGE_BYTES => {
            anyhow!("{shown}: too short for a volume, or empty")
        }
        None => match first_part_of_split_image(image) {
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
fn first_part_of_split_image(image: &Path) -> Option<String> {
    let name = image.file_name().and_then(OsStr::to_str)?;
    let first = draconis_container::split_image_position(name)?.first;
    (first != name).then(|| image.with_file_name(first).shown().to_string())
}

/// The file that an image is in: its own, or that of its store.
pub fn container_file(image: &Path) -> PathBuf {
    match StoreDiskName::parse(image) {
        Some(object) => object.store,
        None => image_of_deleted(image).unwrap_or_else(|| image.to_owned()),
    }
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
    Ok(detect_in_bytes(&head, &tail))
}

/// Detects the contents of a disk likewise.
pub fn detect_disk_contents(disk: &dyn Disk) -> anyhow::Result<Option<DetectedContent>> {
    let properties = disk.properties();
    let sector = u64::from(properties.sector_bytes).max(1);
    let read = |at: u64, most: usize| -> anyhow::Result<Vec<u8>> {
        let len = (properties.len_bytes - at).min(most as u64) / sector * sector;
        let block = Block::private(len as usize);
        Ok(disk.read_now(Extent::new(at, len), block)?.into_private().to_vec())
    };
    let tail = properties.len_bytes.saturating_sub(signature::TAIL_BYTES as u64) / sector * sector;
    let (head, tail) = (read(0, signature::HEAD_BYTES)?, read(tail, signature::TAIL_BYTES)?);
    Ok(detect_in_bytes(&head, &tail))
}

/// Detects contents that would be lost, including zstd data that begins with a skippable frame.
fn detect_in_bytes(head: &[u8], tail: &[u8]) -> Option<DetectedContent> {
    let packed = || {
        let zstd = Compression::detect(head.get(..MAGIC_BYTES)?)?;
        (zstd == Compression::Zstd)
            .then(|| signature::detect_head(&[0x28, 0xB5, 0x2F, 0xFD]))
            .flatten()
    };
    signature::detect_overwritten(head, tail).or_else(packed)
}

/// What an image's name led to: open, claimed, and not looked at.
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

/// What an image differs from, the nearest first, or what its contents are in: open, and not looked
/// at.
#[derive(Default)]
pub struct BackingFiles(Vec<OpenedFile>);

impl BackingFiles {
    /// Opens read-only the extent files that `image` names, then the files that the user names.
    pub fn open(image: &Path, paths: &[PathBuf]) -> anyhow::Result<Self> {
        let named = paths.iter().map(|path| open_readable_file(path));
        let parts = open_parts(image).into_iter().map(|(name, file)| {
            let path = image.with_file_name(name);
            open_file(claim_shared(file, &path)?, &path, false)
        });
        parts.chain(named).collect::<anyhow::Result<_>>().map(Self)
    }

    /// Returns the disks.
    pub fn start_disks(self) -> Vec<Arc<dyn Disk>> {
        self.0.into_iter().map(|file| Arc::new(file.start()) as Arc<dyn Disk>).collect()
    }
}

/// Returns the extent files besides `image`, relative to its directory and only from below it, up
/// to the first missing one.
pub fn extent_files(image: &Path) -> Vec<PathBuf> {
    open_parts(image).into_iter().map(|(name, _)| name).collect()
}

fn open_parts(image: &Path) -> Vec<(PathBuf, File)> {
    let parts = part_names(image).unwrap_or_default().into_iter().map(|name| {
        let file = parts::open_extent_file(image, Path::new(&name)).ok()?;
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
    match Format::detect(head.get(..got)?)? {
        Format::VmdkText => {
            let mut text = vec![];
            file.take(draconis_container::MAX_DESCRIPTOR_BYTES).read_to_end(&mut text).ok()?;
            Some(draconis_container::names_in_text(&text))
        }
        Format::Android => {
            let name = image.file_name().and_then(OsStr::to_str)?;
            let chunks = draconis_container::split_image_position(name)?;
            (chunks.first == name).then_some(chunks.following)
        }
        _ => None,
    }
}

/// Opens an existing image read-write and locks it exclusively; a disk in a store on a member of a
/// RAID only with `force_raid_member`.
pub fn open_writable(image: &Path, force_raid_member: bool) -> anyhow::Result<UnreadImage> {
    if let Some(name) = StoreDiskName::parse(image) {
        return name.open_exclusive(force_raid_member).map(UnreadImage::InStore);
    }
    let name = image.shown();
    let none = || not_found_error(format!("{name}: no such file; draconis format makes a volume"));
    open_file(open_exclusive(image)?.ok_or_else(none)?, image, true).map(UnreadImage::File)
}

/// Opens an image read-only: a file, a device, or a disk in a store.
pub fn open_readable(image: &Path) -> anyhow::Result<UnreadImage> {
    match StoreDiskName::parse(image) {
        Some(name) => name.open_shared().map(UnreadImage::InStore),
        None => open_readable_file(image).map(UnreadImage::File),
    }
}

/// Opens a file or device read-only.
pub fn open_readable_file(image: &Path) -> anyhow::Result<OpenedFile> {
    open_file(open_shared(image)?, image, false)
}
