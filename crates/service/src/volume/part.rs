//! Where in a file a volume is: in a disk image, in a partition, behind an offset.
//!
//! Law: nothing here opens anything: what a volume lies in is read by a confined process.

use std::sync::Arc;

use draconis_container::{Format, parts, signature};
use draconis_device::{Disk, View, partition};

use super::OpenError;
use crate::options::MountOptions;

/// What a volume lies in.
pub struct Part {
    /// The disk that the volume is all of.
    pub disk: Arc<dyn Disk>,
    /// The partition that it is, told or found.
    pub partition: Option<u32>,
    /// How the file holds the disk, if it is none itself: then it is only read.
    pub format: Option<Format>,
}

/// Finds the part of a file that `options` name. Where they name none and the file holds a
/// table of partitions instead of a volume, the only one with a volume is taken. `behind` are
/// the files that a disk image says it differs from.
///
/// # Errors
/// [`OpenError::Container`], [`OpenError::Partition`], [`OpenError::Partitions`],
/// [`OpenError::Offset`].
pub fn part(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<Part, OpenError> {
    let opened = draconis_container::open(file, behind)?;
    let (disk, format) = (opened.disk, opened.format);
    let found = |disk, partition| Ok(Part { disk, partition, format });
    if let Some(number) = options.partition {
        let extent = partition(&*disk, number)?;
        return found(Arc::new(View::new(disk, extent)?), Some(number));
    }
    if let Some(start) = options.offset_bytes {
        return found(Arc::new(View::from_offset(disk, start)?), None);
    }
    match parts(&*disk) {
        None => found(disk, None),
        Some(parts) => match parts.volumes[..] {
            [only] => found(Arc::new(View::new(disk, only.extent)?), Some(only.number)),
            [] => Err(OpenError::Partitions(format!(
                "none of its partitions holds an ext volume: {}",
                parts.shown()
            ))),
            _ => Err(OpenError::Partitions(format!(
                "several of its partitions hold ext volumes, and --partition N or \
                 -o partition=N takes one: {}",
                parts.shown()
            ))),
        },
    }
}

/// The same for writing.
///
/// # Errors
/// As [`part`]; [`OpenError::OnlyRead`].
pub fn part_for_writing(file: Arc<dyn Disk>, options: &MountOptions) -> Result<Part, OpenError> {
    let part = part(file, &[], options)?;
    match part.format {
        None => Ok(part),
        Some(format) => Err(OpenError::OnlyRead(format.name())),
    }
}

/// Says what is there instead of a volume, if that is known.
pub(super) fn named(disk: &dyn Disk, error: draconis_ext::Error) -> OpenError {
    match (&error, signature::held(disk)) {
        (draconis_ext::Error::NotExt, Some(held)) => OpenError::Held(held),
        _ => error.into(),
    }
}
