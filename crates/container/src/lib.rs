//! Volumes inside other files: disk images of virtual machines, partitions, compressed files.
//!
//! ```text
//!   file ──▶ open: qcow2 · VHDX · VHD · VMDK · Android sparse ──▶ a disk
//!        ──▶ parts: the partitions that hold what is looked for
//!        ──▶ signature: the name of what is no volume
//!        ──▶ open_for_writing: qcow2 and VHDX, changed where they lie
//!   a disk ──▶ create: a new qcow2 or VHDX image, whole
//! ```
//! Law 1: no path is opened: a process that is confined can do all of it.
//! Law 2: no bytes make it panic, loop, or take memory in proportion to what they claim.
//! Law 3: what is not read is refused by its name, and what would help is said.
//!
//! This crate does not know what a file system is, but for the marks in [`signature`].

#![forbid(unsafe_code)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![cfg_attr(
    test,
    allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")
)]

mod android;
mod behind;
mod changing;
pub mod create;
mod filled;
mod indexed;
mod inside;
mod ova;
pub mod packing;
mod parts;
mod qcow2;
pub mod signature;
mod source;
#[cfg(test)]
mod tests;
mod vhd;
mod vhdx;
mod vmdk;

use std::ops::Range;
use std::sync::Arc;

use draconis_device::{Disk, Extent, View};

pub use crate::android::chunks;
use crate::behind::below;
use crate::changing::Changing;
use crate::inside::inside;
pub use crate::parts::{Parts, parts};
use crate::source::Source;
pub use crate::vmdk::extents::{LONGEST_TEXT, names as names_in_text};

/// What helps where an image is only read.
const CONVERT: &str = "qemu-img convert makes one that can be changed";

/// How a file holds a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// QEMU's.
    Qcow2,
    /// Virtual PC's.
    Vhd,
    /// Hyper-V's.
    Vhdx,
    /// VMware's.
    Vmdk,
    /// VMware's in several files, which a text names.
    VmdkText,
    /// Android's.
    Android,
    /// The only disk of a virtual machine in a tar archive.
    Ova,
    /// Compressed with zstd, in frames that an index names.
    Zstd,
    /// Compressed with gzip, in members or chunks that can be found.
    Gzip,
}

impl Format {
    /// Its name.
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

    /// What makes an image of it that can be changed.
    pub const fn help(self) -> &'static str {
        match self {
            Self::Zstd => "zstd -d",
            Self::Gzip => "gzip -d",
            Self::Ova => "tar -xf and then qemu-img convert -O raw",
            _ => "qemu-img convert -O raw",
        }
    }

    /// What the first bytes of a file say; of those that have an index they say nothing.
    pub fn of(head: &[u8]) -> Option<Self> {
        Some(match head {
            [b'Q', b'F', b'I', 0xFB, ..] => Self::Qcow2,
            _ if head.starts_with(b"vhdxfile") => Self::Vhdx,
            [b'K', b'D', b'M', b'V', ..] => Self::Vmdk,
            _ if vmdk::extents::is_text(head) => Self::VmdkText,
            [0x3A, 0xFF, 0x26, 0xED, ..] => Self::Android,
            _ if vhd::is_footer(head) => Self::Vhd,
            _ => return None,
        })
    }
}

/// What is known and not read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unsupported {
    /// A version of a format.
    #[error("{0} of version {1} is not read; qemu-img convert -O raw makes an image that is")]
    Version(&'static str, u64),
    /// A feature of a format.
    #[error("{0} with {1} is not read; qemu-img convert -O raw makes an image that is")]
    Feature(&'static str, &'static str),
    /// It is encrypted.
    #[error("{0}, encrypted: qemu-img convert --image-opts decrypts it with its key")]
    Encrypted(&'static str),
    /// It is read, and not changed.
    #[error("{0} with {1} is only read; {2}")]
    Unchanged(&'static str, &'static str, &'static str),
    /// It holds only what differs from another.
    #[error("it holds only what differs from {0:?}: --backing FILE says where that is")]
    Behind(String),
    /// It holds no contents itself.
    #[error(
        "its contents are in other files, of which {found} of {wanted} are given: {name:?} is no \
         file in its directory or below; --backing FILE says where each is, in their order"
    )]
    Elsewhere {
        /// The first that is missing, as it calls it.
        name: String,
        /// How many there are.
        wanted: usize,
        /// How many there were.
        found: usize,
    },
    /// It is an archive of a virtual machine with several disks.
    #[error(
        "an OVA archive, a tar with several disks in it: {names}; tar -xf IMAGE {first:?} takes one out"
    )]
    Disks {
        /// Those of its members.
        names: String,
        /// One of them.
        first: String,
    },
    /// It names a file outside its directory.
    #[error(
        "its contents are in {0:?}, which is not opened: only files in its directory or below are; \
         --backing FILE says where each is, in their order, or qemu-img convert -O raw makes one \
         file of them"
    )]
    NotBeside(String),
    /// It was given another one than that.
    #[error(
        "it holds only what differs from {name:?}, which is {wanted}, and what --backing gives is \
         {found}"
    )]
    NotBehind {
        /// What it calls it.
        name: String,
        /// Its identity.
        wanted: String,
        /// That of what was given.
        found: String,
    },
}

/// Why there is no disk inside.
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
    /// It is known and not read.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
}

impl Error {
    /// What a read of the disk inside says of it: what a format has no place for is told like
    /// a place that cannot be read.
    fn of_a_read(self, extent: Extent) -> draconis_device::Error {
        match self {
            Self::Disk(error) => error,
            Self::Damaged(_) | Self::DamagedAt(..) | Self::Unsupported(_) => {
                draconis_device::Error::Short { extent, got_bytes: 0 }
            }
        }
    }

    /// What a write of the disk inside says of it.
    fn of_a_write(self) -> draconis_device::Error {
        match self {
            Self::Disk(error) => error,
            other => draconis_device::Error::Elsewhere(other.to_string().into()),
        }
    }
}

/// A disk inside a file that is changed in a session: while there is one, other programs see the
/// file marked as in use.
pub trait Image: Disk {
    /// Ends the session, once all is durable: the file is as one that is closed. The next write
    /// begins another one. Dropping the disk does so, too, and what fails is only logged.
    ///
    /// # Errors
    /// What made the disk fail, now or before.
    fn rest(&self) -> Result<(), draconis_device::Error>;

    /// Ends the session, releases what `unused` bytes of the disk have, and moves what is left to
    /// the front of the file. Returns the length that the file needs, all of it durable: a longer
    /// file may be cut there once nothing else is written.
    ///
    /// # Errors
    /// What made the disk fail. The disk is intact; some of the file may be unused.
    fn compact(&self, unused: Vec<Range<u64>>) -> Result<Option<u64>, draconis_device::Error>;
}

/// A disk, and how the file holds it if it is not the file itself.
pub struct Opened {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// How it is held; none if it lies in the file as it is.
    pub format: Option<Format>,
    /// The disk again, if changing it is a session.
    pub image: Option<Arc<dyn Image>>,
}

/// Whether a compressed file is read in place by [`open`]: it need not be unpacked.
///
/// # Errors
/// What the disk of the file says.
pub fn is_indexed(file: Arc<dyn Disk>) -> Result<bool, Error> {
    let source = Source::new(file);
    Ok(indexed::Indexed::open(&source, &head(&source)?)?.is_some())
}

/// Whether what begins with `head` becomes longer where it is changed: such a file is opened
/// with [`draconis_device::OpenedFile::growing`].
pub fn grows(head: &[u8]) -> bool {
    matches!(Format::of(head), Some(Format::Qcow2 | Format::Vhdx))
}

/// The length of the disk in a file of `len_bytes` that is followed by nothing but the footer of a
/// VHD, of which `tail` are the last 512 bytes: it lies there as it is.
pub fn before_footer(tail: &[u8], len_bytes: u64) -> Option<u64> {
    vhd::fixed(tail, len_bytes)
}

/// Opens the disk that a file holds: the file itself, if it is none of the known formats.
/// `behind` are the files that it and those behind it say they differ from, the nearest first, or
/// those that its contents are in, in their order; names that a file holds are never opened.
///
/// # Errors
/// See [`Error`].
pub fn open(file: Arc<dyn Disk>, behind: &[Arc<dyn Disk>]) -> Result<Opened, Error> {
    let source = Source::new(file.clone());
    let head = head(&source)?;
    open_outer(file, source, &head, behind)
}

/// [`open_headed`] of what may be an archive with the disk in it.
fn open_outer(
    file: Arc<dyn Disk>,
    source: Source,
    begin: &[u8],
    behind: &[Arc<dyn Disk>],
) -> Result<Opened, Error> {
    let Some(extent) = ova::only_disk(&source, begin)? else {
        return open_headed(file, source, begin, behind);
    };
    let disk: Arc<dyn Disk> = Arc::new(View::new(file, extent)?);
    let source = Source::new(disk.clone());
    let begin = head(&source)?;
    let opened = open_headed(disk, source, &begin, behind)?;
    Ok(Opened { format: Some(Format::Ova), ..opened })
}

/// The first sector of a file, or what it has of one.
fn head(source: &Source) -> Result<Vec<u8>, Error> {
    source.bytes(0, source.len_bytes().min(512) as usize)
}

/// [`open`] of what begins with `head`: each read of a disk is waited for.
fn open_headed(
    file: Arc<dyn Disk>,
    source: Source,
    head: &[u8],
    behind: &[Arc<dyn Disk>],
) -> Result<Opened, Error> {
    let len = source.len_bytes();
    let tail = source.bytes(len.saturating_sub(512), len.min(512) as usize)?;
    let opened = |disk, format| Opened { disk, format, image: None };
    if let Some(len_bytes) = vhd::fixed(&tail, len) {
        // It lies there as it is, and can be changed like any other.
        let disk = Arc::new(View::new(file, Extent::new(0, len_bytes))?);
        return Ok(opened(disk, None));
    }
    let Some(format) = Format::of(head) else {
        return Ok(match indexed::Indexed::open(&source, head)? {
            Some(map) => {
                let format = map.format();
                opened(inside(source, map, None), Some(format))
            }
            None => opened(file, None),
        });
    };
    let disk: Arc<dyn Disk> = match format {
        Format::Qcow2 => {
            let map = qcow2::Qcow2::open(&source)?;
            let below = below(&map, behind)?;
            inside(source.if_left(map.is_dirty), map, below)
        }
        Format::Vhd => {
            let map = vhd::Vhd::open(&source)?;
            let below = below(&map, behind)?;
            inside(source, map, below)
        }
        Format::Vhdx => {
            let map = vhdx::Vhdx::open(&source)?;
            let below = below(&map, behind)?;
            inside(source.if_left(map.is_left_open()), map, below)
        }
        Format::Vmdk => {
            let map = vmdk::Vmdk::open(&source)?;
            let below = below(&map, behind)?;
            inside(source, map, below)
        }
        Format::VmdkText => vmdk::extents::open(&source, behind, file.properties())?,
        Format::Android => android::open(source, behind)?,
        // No head tells of an index, or of what an archive has in it.
        Format::Zstd | Format::Gzip | Format::Ova => return Ok(opened(file, None)),
    };
    Ok(opened(disk, Some(format)))
}

/// [`open`] of what is to be changed; formats that are only read give a disk that is. Identities
/// that an image has for each of its states come of `chance`.
///
/// # Errors
/// See [`Error`]; [`Unsupported::Unchanged`].
pub fn open_for_writing(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    chance: u64,
) -> Result<Opened, Error> {
    let source = Source::new(file.clone());
    let head = head(&source)?;
    let format = Format::of(&head).filter(|_| !file.properties().read_only);
    let image: Arc<dyn Image> = match format {
        Some(Format::Qcow2) => {
            let map = qcow2::Qcow2::open(&source)?;
            let below = below(&map, behind)?;
            let source = source.if_left(map.is_dirty).with_room();
            let tables = qcow2::Changes::open(&source, map)?;
            Arc::new(Changing::new(source, tables, below))
        }
        Some(Format::Vhdx) => {
            let map = vhdx::Vhdx::open(&source)?;
            let source = source.if_left(map.is_left_open()).with_room();
            let tables = vhdx::Changes::open(&source, map, chance)?;
            Arc::new(Changing::new(source, tables, None))
        }
        _ => return open_outer(file, source, &head, behind),
    };
    Ok(Opened { disk: image.clone(), format, image: Some(image) })
}
