//! Volumes inside other files: disk images of virtual machines, partitions, compressed files.
//!
//! ```text
//!   file ──▶ open: qcow2 · VHDX · VHD · VMDK · Android sparse ──▶ a disk
//!        ──▶ list_partitions: the partitions with an ext volume
//!        ──▶ signature: detection of other contents
//!        ──▶ open_for_writing: qcow2 and VHDX, written in place
//!   a disk ──▶ create: a complete new qcow2 or VHDX image
//! ```
//! Law 1: no path is opened, so a sandboxed process can use all of this.
//! Law 2: no input causes a panic, an endless loop, or memory use in proportion to claimed sizes.
//! Law 3: unsupported input is refused by name, with a remedy.
//!
//! This crate knows file systems only by their marks in [`signature`].

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")
)]

mod android;
mod backing;
pub mod compression;
pub mod create;
mod image_file;
mod image_map;
mod ova;
mod partitions;
mod qcow2;
mod read_only;
mod seekable;
pub mod signature;
#[cfg(test)]
mod tests;
mod vhd;
mod vhdx;
mod vmdk;
mod writable;

use std::ops::Range;
use std::sync::Arc;

use draconis_device::{Disk, Extent, SubDisk};

pub use crate::android::split_image_position;
use crate::backing::open_backing_chain;
use crate::image_file::ImageFile;
use crate::image_map::open_mapped;
pub use crate::partitions::{PartitionSummary, list_partitions};
pub use crate::vmdk::extents::{MAX_DESCRIPTOR_BYTES, extent_file_names as names_in_text};
use crate::writable::WritableImage;

/// Remedy for images that are read-only.
const CONVERT_REMEDY: &str = "qemu-img convert makes one that can be changed";

/// Format of an image file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// qcow2, by QEMU.
    Qcow2,
    /// VHD, by Virtual PC.
    Vhd,
    /// VHDX, by Hyper-V.
    Vhdx,
    /// VMDK, by VMware.
    Vmdk,
    /// VMDK in several files, which a descriptor file names.
    VmdkText,
    /// Android sparse image.
    Android,
    /// OVA: a tar archive with the only disk of a virtual machine.
    Ova,
    /// Seekable zstd: frames listed in an index.
    Zstd,
    /// Seekable gzip: members or chunks that can be located.
    Gzip,
}

impl Format {
    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Vhd => "VHD",
            Self::Vhdx => "VHDX",
            Self::Vmdk => "VMDK",
            Self::VmdkText => "VMDK in several files",
            Self::Android => "Android sparse",
            Self::Ova => "OVA",
            Self::Zstd => "seekable zstd",
            Self::Gzip => "indexed gzip",
        }
    }

    /// Returns the remedy: a program that makes a writable image of it.
    pub const fn conversion_help(self) -> &'static str {
        match self {
            Self::Zstd => "zstd -d",
            Self::Gzip => "gzip -d",
            Self::Ova => "tar -xf and then qemu-img convert -O raw",
            _ => "qemu-img convert -O raw",
        }
    }

    /// Detects the format from the first bytes of a file; formats with an index are not detected.
    pub fn detect(head: &[u8]) -> Option<Self> {
        Some(match head {
            [b'Q', b'F', b'I', 0xFB, ..] => Self::Qcow2,
            _ if head.starts_with(b"vhdxfile") => Self::Vhdx,
            [b'K', b'D', b'M', b'V', ..] => Self::Vmdk,
            _ if vmdk::extents::is_descriptor_file(head) => Self::VmdkText,
            [0x3A, 0xFF, 0x26, 0xED, ..] => Self::Android,
            _ if vhd::is_footer(head) => Self::Vhd,
            _ => return None,
        })
    }
}

/// A known but unsupported input.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnsupportedFeature {
    /// A version of a format.
    #[error("{0} of version {1} is not read; qemu-img convert -O raw makes an image that is")]
    Version(&'static str, u64),
    /// A feature of a format.
    #[error("{0} with {1} is not read; qemu-img convert -O raw makes an image that is")]
    Feature(&'static str, &'static str),
    /// The image is encrypted.
    #[error("{0}, encrypted: qemu-img convert --image-opts decrypts it with its key")]
    Encrypted(&'static str),
    /// The image can be read but not written.
    #[error("{0} with {1} is only read; {2}")]
    ReadOnlyFormat(&'static str, &'static str, &'static str),
    /// The image needs a backing file.
    #[error("it holds only what differs from {0:?}: --backing FILE says where that is")]
    NeedsBacking(String),
    /// The image has its contents in other files.
    #[error(
        "its contents are in other files, of which {found} of {wanted} are given: {name:?} is no \
         file in its directory or below; --backing FILE says where each is, in their order"
    )]
    MissingExtents {
        /// First missing file, as the image names it.
        name: String,
        /// Number of files that it needs.
        wanted: usize,
        /// Number of files given.
        found: usize,
    },
    /// An OVA archive with several disks.
    #[error(
        "an OVA archive, a tar with several disks in it: {names}; tar -xf IMAGE {first:?} takes one out"
    )]
    Disks {
        /// Their member names.
        names: String,
        /// Member name of the first disk.
        first: String,
    },
    /// The image names a file outside its directory.
    #[error(
        "its contents are in {0:?}, which is not opened: only files in its directory or below are; \
         --backing FILE says where each is, in their order, or qemu-img convert -O raw makes one \
         file of them"
    )]
    ForeignExtentName(String),
    /// The given backing file has another identity.
    #[error(
        "it holds only what differs from {name:?}, which is {wanted}, and what --backing gives is \
         {found}"
    )]
    WrongBacking {
        /// Name, as the image has it.
        name: String,
        /// Expected identity.
        wanted: String,
        /// Identity of the given file.
        found: String,
    },
}

/// Error of opening or reading the disk inside a file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error(transparent)]
    Disk(#[from] draconis_device::Error),
    /// The file contradicts itself.
    #[error("damaged: {0}")]
    Damaged(&'static str),
    /// The file contradicts itself at this byte.
    #[error("damaged: {0}, at byte {1}; qemu-img check tells more")]
    DamagedAt(&'static str, u64),
    /// The input is known but unsupported.
    #[error(transparent)]
    Unsupported(#[from] UnsupportedFeature),
}

impl Error {
    /// Maps the error to a device error for a read. Format damage becomes a short read of `extent`.
    fn into_read_error(self, extent: Extent) -> draconis_device::Error {
        match self {
            Self::Disk(error) => error,
            Self::Damaged(_) | Self::DamagedAt(..) | Self::Unsupported(_) => {
                draconis_device::Error::ShortRead { extent, got_bytes: 0 }
            }
        }
    }

    /// Maps the error to a device error for a write.
    fn into_write_error(self) -> draconis_device::Error {
        match self {
            Self::Disk(error) => error,
            other => draconis_device::Error::Remote(other.to_string().into()),
        }
    }
}

/// A disk inside a file that is written in sessions: during one, the file is marked as in use for
/// other programs.
pub trait SessionDisk: Disk {
    /// Ends the session, once all writes are durable: the file is marked as cleanly closed. The
    /// next write begins a new session. Dropping the disk also ends it, but only logs errors.
    ///
    /// # Errors
    /// Error that made the disk fail, now or earlier.
    fn close_session(&self) -> Result<(), draconis_device::Error>;

    /// Ends the session, releases what `unused` bytes of the disk have, and moves what is left to
    /// the front of the file. Returns the length that the file needs, all of it durable: a longer
    /// file may be cut there once nothing else is written.
    ///
    /// # Errors
    /// What made the disk fail. The disk is intact; some of the file may be unused.
    fn compact(&self, unused: Vec<Range<u64>>) -> Result<Option<u64>, draconis_device::Error>;
}

/// An opened disk, and the format of its file.
pub struct OpenedImage {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Format of the file; `None` for a raw disk.
    pub format: Option<Format>,
    /// The same disk, if it is written in sessions.
    pub session: Option<Arc<dyn SessionDisk>>,
}

/// Returns true if [`open`] reads a compressed file in place: it need not be decompressed.
///
/// # Errors
/// Error of the file's disk.
pub fn is_seekable(file: Arc<dyn Disk>) -> Result<bool, Error> {
    let source = ImageFile::new(file);
    Ok(seekable::SeekableFile::open(&source, &read_head(&source)?)?.is_some())
}

/// Returns true if writes lengthen a file that begins with `head`: open it with
/// [`draconis_device::OpenedFile::with_growth`].
pub fn is_growing_format(head: &[u8]) -> bool {
    matches!(Format::detect(head), Some(Format::Qcow2 | Format::Vhdx))
}

/// Returns the length of the raw disk in a file of `len_bytes` whose last 512 bytes, `tail`, are
/// the footer of a fixed VHD.
pub fn fixed_vhd_len(tail: &[u8], len_bytes: u64) -> Option<u64> {
    vhd::fixed_disk_len(tail, len_bytes)
}

/// Opens the disk in a file: the file itself, if it has none of the known formats. `behind` are the
/// backing files, the nearest first, or the files with its contents, in order. Names in files are
/// never opened.
/// # Errors
/// See [`Error`].
pub fn open(file: Arc<dyn Disk>, behind: &[Arc<dyn Disk>]) -> Result<OpenedImage, Error> {
    let source = ImageFile::new(file.clone());
    let head = read_head(&source)?;
    open_maybe_archived(file, source, &head, behind)
}

/// [`open_by_header`], also for an archive with the disk in it.
fn open_maybe_archived(
    file: Arc<dyn Disk>,
    source: ImageFile,
    begin: &[u8],
    behind: &[Arc<dyn Disk>],
) -> Result<OpenedImage, Error> {
    let Some(extent) = ova::find_only_disk(&source, begin)? else {
        return open_by_header(file, source, begin, behind);
    };
    let disk: Arc<dyn Disk> = Arc::new(SubDisk::new(file, extent)?);
    let source = ImageFile::new(disk.clone());
    let begin = read_head(&source)?;
    let opened = open_by_header(disk, source, &begin, behind)?;
    Ok(OpenedImage { format: Some(Format::Ova), ..opened })
}

/// Returns the first sector of a file, or less if the file is shorter.
fn read_head(source: &ImageFile) -> Result<Vec<u8>, Error> {
    read_signature(source, 0)
}

/// Returns the sector at `start`, or less at the end of the file. A sector that cannot be read
/// shows no format to those who only read: a volume needs neither the first nor the last one.
fn read_signature(source: &ImageFile, start: u64) -> Result<Vec<u8>, Error> {
    let len = source.len_bytes().saturating_sub(start).min(512) as usize;
    match source.read_vec(start, len) {
        Err(Error::Disk(draconis_device::Error::Io { .. }))
            if source.disk().properties().read_only =>
        {
            Ok(vec![0; len])
        }
        read => read,
    }
}

/// Opens a disk whose file begins with `head`: see [`open`].
fn open_by_header(
    file: Arc<dyn Disk>,
    source: ImageFile,
    head: &[u8],
    behind: &[Arc<dyn Disk>],
) -> Result<OpenedImage, Error> {
    let len = source.len_bytes();
    let tail = read_signature(&source, len.saturating_sub(512))?;
    let opened = |disk, format| OpenedImage { disk, format, session: None };
    if let Some(len_bytes) = vhd::fixed_disk_len(&tail, len) {
        // A raw disk before the footer, writable like any other.
        let disk = Arc::new(SubDisk::new(file, Extent::new(0, len_bytes))?);
        return Ok(opened(disk, None));
    }
    let Some(format) = Format::detect(head) else {
        return Ok(match seekable::SeekableFile::open(&source, head)? {
            Some(map) => {
                let format = map.format();
                opened(open_mapped(source, map, None), Some(format))
            }
            None => opened(file, None),
        });
    };
    let disk: Arc<dyn Disk> = match format {
        Format::Qcow2 => {
            let map = qcow2::Qcow2::open(&source)?;
            let below = open_backing_chain(&map, behind)?;
            open_mapped(source.zero_tail_if_unclean(map.is_dirty), map, below)
        }
        Format::Vhd => {
            let map = vhd::Vhd::open(&source)?;
            let below = open_backing_chain(&map, behind)?;
            open_mapped(source, map, below)
        }
        Format::Vhdx => {
            let map = vhdx::Vhdx::open(&source)?;
            let below = open_backing_chain(&map, behind)?;
            open_mapped(source.zero_tail_if_unclean(map.needs_replay()), map, below)
        }
        Format::Vmdk => {
            let map = vmdk::Vmdk::open(&source)?;
            let below = open_backing_chain(&map, behind)?;
            open_mapped(source, map, below)
        }
        Format::VmdkText => vmdk::extents::open(&source, behind, file.properties())?,
        Format::Android => android::open(source, behind)?,
        // These formats are not detected by the first bytes.
        Format::Zstd | Format::Gzip | Format::Ova => return Ok(opened(file, None)),
    };
    Ok(opened(disk, Some(format)))
}

/// [`open`] for writing; formats without write support give a read-only disk. Identities that an
/// image needs for each change derive from `chance`.
///
/// # Errors
/// See [`Error`]; [`UnsupportedFeature::ReadOnlyFormat`].
pub fn open_for_writing(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    chance: u64,
) -> Result<OpenedImage, Error> {
    let source = ImageFile::new(file.clone());
    let head = read_head(&source)?;
    let format = Format::detect(&head).filter(|_| !file.properties().read_only);
    let image: Arc<dyn SessionDisk> = match format {
        Some(Format::Qcow2) => {
            let map = qcow2::Qcow2::open(&source)?;
            let below = open_backing_chain(&map, behind)?;
            let source = source.zero_tail_if_unclean(map.is_dirty).with_growth();
            let tables = qcow2::WritableQcow2::open(&source, map)?;
            Arc::new(WritableImage::new(source, tables, below))
        }
        Some(Format::Vhdx) => {
            let map = vhdx::Vhdx::open(&source)?;
            let source = source.zero_tail_if_unclean(map.needs_replay()).with_growth();
            let tables = vhdx::WritableVhdx::open(&source, map, chance)?;
            Arc::new(WritableImage::new(source, tables, None))
        }
        _ => return open_maybe_archived(file, source, &head, behind),
    };
    Ok(OpenedImage { disk: image.clone(), format, session: Some(image) })
}
