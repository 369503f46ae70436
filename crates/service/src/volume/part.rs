//! Where in a file a volume is: in a disk image, in a partition, behind an offset.
//!
//! Law: nothing here opens anything: what a volume lies in is read by a confined process.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use draconis_container::{Error, Format, Image, open_for_writing, parts, signature};
use draconis_device::{Disk, TableKind, View, partition, partition_table};

use super::OpenError;
use crate::options::MountOptions;

/// What a volume lies in.
pub struct Part {
    /// The disk that the volume is all of.
    pub disk: Arc<dyn Disk>,
    /// The partition that it is, told or found.
    pub partition: Option<u32>,
    /// The format of the partition table, if it is a partition.
    pub table: Option<TableKind>,
    /// How the file holds the disk, if it is none itself.
    pub format: Option<Format>,
    /// The disk that the file holds, where changing it is a session that ends.
    pub image: Option<Arc<dyn Image>>,
    /// Whether the partition was found in the backup of the partition table.
    pub is_of_backup: bool,
}

/// What a user should know of such a table.
pub(super) const BACKUP_TABLE: &str = "the first GPT is damaged or gone, and the backup at the end \
                                       of the disk is used; gdisk and sfdisk write it anew";

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
    part_of(draconis_container::open(file, behind)?, options)
}

fn part_of(opened: draconis_container::Opened, options: &MountOptions) -> Result<Part, OpenError> {
    let draconis_container::Opened { disk, format, image } = opened;
    let found = |disk, of: Option<(u32, TableKind)>, is_of_backup| {
        if is_of_backup {
            log::warn!("{BACKUP_TABLE}");
        }
        let (partition, table) = of.unzip();
        Ok(Part { disk, partition, table, format, image, is_of_backup })
    };
    if let Some(number) = options.partition {
        let extent = partition(&*disk, number)?;
        let table = partition_table(&*disk)?;
        let view = View::new(disk, extent)?;
        return found(Arc::new(view), Some((number, table.kind)), table.is_backup);
    }
    if let Some(start) = options.offset_bytes {
        return found(Arc::new(View::from_offset(disk, start)?), None, false);
    }
    match parts(&*disk) {
        None => found(disk, None, false),
        Some(parts) => match parts.volumes[..] {
            [only] => {
                let view = View::new(disk, only.extent)?;
                found(Arc::new(view), Some((only.number, parts.kind)), parts.is_backup)
            }
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
pub fn part_for_writing(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<Part, OpenError> {
    let chance = RandomState::new().build_hasher().finish();
    let part = part_of(open_for_writing(file, behind, chance)?, options)?;
    match part.format {
        Some(format) if part.image.is_none() => Err(OpenError::OnlyRead(format)),
        _ => Ok(part),
    }
}

/// What can be written of a file, or else read; with the reason then.
///
/// # Errors
/// As [`part`].
pub(super) fn part_for_mounting(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<(Part, Option<OpenError>), OpenError> {
    match part_for_writing(file.clone(), behind, options) {
        Ok(part) => Ok((part, None)),
        // The disk failed: reading it tells no more.
        Err(OpenError::Container(Error::Disk(error))) => Err(Error::Disk(error).into()),
        Err(why @ (OpenError::OnlyRead(_) | OpenError::Container(_))) => {
            Ok((part(file, behind, options)?, Some(why)))
        }
        Err(other) => Err(other),
    }
}

/// Says what is there instead of a volume, if that is known.
pub(super) fn named(disk: &dyn Disk, error: draconis_ext::Error) -> OpenError {
    match (&error, signature::held(disk)) {
        (draconis_ext::Error::NotExt, Some(held)) => OpenError::Held(held),
        _ => error.into(),
    }
}
