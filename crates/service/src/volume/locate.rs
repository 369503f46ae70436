//! Location of a volume in a file: in a disk image, in a partition, at an offset.
//!
//! Law: no file is opened here, since a confined process does this.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use draconis_container::{
    Error, Format, SessionDisk, list_partitions, open_for_writing, signature,
};
use draconis_device::{Disk, SubDisk, TableKind, find_partition, read_partition_table};
use draconis_ext::undelete::{DeletedFiles, DeletedSummary, DeletedView, Limits};
use draconis_ext::{OpenOptions, SuperblockPlace, Volume, lost_superblock};

use super::OpenError;
use crate::options::MountOptions;

/// A located volume.
pub struct LocatedVolume {
    /// The disk that consists of the volume alone.
    pub disk: Arc<dyn Disk>,
    /// Offset of the volume in the file's disk, or in the disk of its image.
    pub start_bytes: u64,
    /// Partition of the volume, selected or found.
    pub partition: Option<u32>,
    /// Format of the partition table, if the volume is in a partition.
    pub table: Option<TableKind>,
    /// Format of the disk image, if the file is one.
    pub format: Option<Format>,
    /// The disk image, if changing it requires closing a session.
    pub image: Option<Arc<dyn SessionDisk>>,
    /// True if the partition was found in the backup GPT.
    pub uses_backup_gpt: bool,
    /// What `disk` holds, if it is a volume of deleted files.
    pub deleted: Option<DeletedSummary>,
}

/// Note for the user about such a table.
pub(super) const BACKUP_GPT_WARNING: &str = "the first GPT is damaged or gone, and the backup at the end \
                                       of the disk is used; gdisk and sfdisk write it anew";

/// Locates the volume that `options` select. Without a selection, a partition table must have
/// exactly one partition with a volume, which is used. `behind` are the backing files of a disk
/// image. With the option `deleted`, the disk is a volume of the deleted files.
///
/// # Errors
/// [`OpenError::Container`], [`OpenError::Partition`], [`OpenError::Partitions`],
/// [`OpenError::Offset`]; with `deleted` [`OpenError::Ext`].
pub fn locate_volume(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<LocatedVolume, OpenError> {
    let part = select_volume(draconis_container::open(file, behind)?, options)?;
    if !options.deleted {
        return Ok(part);
    }
    refuse_other_contents(&*part.disk)?;
    let view = DeletedFiles::scan(part.disk.clone(), Limits::default());
    let view = view.and_then(DeletedFiles::into_view);
    let DeletedView { disk, summary } =
        view.map_err(|error| identify_contents(&*part.disk, error))?;
    Ok(LocatedVolume { disk, deleted: Some(summary), ..part })
}

/// Returns the notes for the user about a volume of deleted files.
pub fn describe_deleted(summary: &DeletedSummary) -> Vec<String> {
    let mut notes = vec![];
    if let Some(damage) = &summary.journal_damage {
        notes.push(format!("{damage}: older states in the journal are not certain"));
    }
    if summary.unsure > 0 {
        notes.push(format!(
            "{} of {} deleted files are not whole; draconis undelete lists them",
            summary.unsure, summary.files
        ));
    }
    if summary.is_cut_short {
        notes.push("there are more deleted files than are shown".to_owned());
    }
    notes
}

fn select_volume(
    opened: draconis_container::OpenedImage,
    options: &MountOptions,
) -> Result<LocatedVolume, OpenError> {
    let draconis_container::OpenedImage { disk, format, session: image } = opened;
    let found = |disk, start_bytes, of: Option<(u32, TableKind)>, uses_backup_gpt| {
        if uses_backup_gpt {
            log::warn!("{BACKUP_GPT_WARNING}");
        }
        let (partition, table) = of.unzip();
        Ok(LocatedVolume {
            disk,
            start_bytes,
            partition,
            table,
            format,
            image,
            uses_backup_gpt,
            deleted: None,
        })
    };
    if let Some(number) = options.partition {
        let extent = find_partition(&*disk, number)?;
        let table = read_partition_table(&*disk)?;
        let view = SubDisk::new(disk, extent)?;
        let of = Some((number, table.kind));
        return found(Arc::new(view), extent.start_bytes, of, table.is_backup);
    }
    if let Some(start) = options.offset_bytes {
        return found(Arc::new(SubDisk::from_offset(disk, start)?), start, None, false);
    }
    match list_partitions(&*disk) {
        None => found(disk, 0, None, false),
        Some(parts) => match parts.volumes[..] {
            [only] => {
                let (view, start) = (SubDisk::new(disk, only.extent)?, only.extent.start_bytes);
                found(Arc::new(view), start, Some((only.number, parts.kind)), parts.is_backup)
            }
            [] => Err(OpenError::Partitions(format!(
                "none of its partitions holds an ext volume: {}",
                parts.describe()
            ))),
            _ => Err(OpenError::Partitions(format!(
                "several of its partitions hold ext volumes, and --partition N or \
                 -o partition=N takes one: {}",
                parts.describe()
            ))),
        },
    }
}

/// Locates a volume for writing.
///
/// # Errors
/// As [`locate_volume`]; [`OpenError::ReadOnlyFormat`], [`OpenError::RaidMember`].
pub fn locate_for_writing(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<LocatedVolume, OpenError> {
    if options.deleted {
        return Err(OpenError::Options("deleted files are only read".into()));
    }
    let random = RandomState::new().build_hasher().finish();
    let opened = open_for_writing(file, behind, random)?;
    let whole = opened.disk.clone();
    let part = select_volume(opened, options)?;
    if !options.force_raid_member && !part.disk.properties().read_only {
        signature::refuse_raid_member(&*whole, &*part.disk)?;
    }
    match part.format {
        Some(format) if part.image.is_none() => Err(OpenError::ReadOnlyFormat(format)),
        _ => Ok(part),
    }
}

/// Locates a volume for writing, or else for reading, with the reason.
///
/// # Errors
/// As [`locate_volume`].
pub(super) fn locate_for_mount(
    file: Arc<dyn Disk>,
    behind: &[Arc<dyn Disk>],
    options: &MountOptions,
) -> Result<(LocatedVolume, Option<OpenError>), OpenError> {
    match locate_for_writing(file.clone(), behind, options) {
        Ok(part) => Ok((part, None)),
        // The disk failed: opening it for reading would fail, too.
        Err(OpenError::Container(Error::Disk(error))) => Err(Error::Disk(error).into()),
        Err(why @ (OpenError::ReadOnlyFormat(_) | OpenError::Container(_))) => {
            Ok((locate_volume(file, behind, options)?, Some(why)))
        }
        Err(other) => Err(other),
    }
}

/// Opens a volume for reading. A backup replaces a damaged superblock, unless the disk holds
/// something else: the backups may be those of an old volume.
///
/// # Errors
/// [`OpenError::Ext`], [`OpenError::NotAVolume`].
pub fn open_for_reading(disk: Arc<dyn Disk>, options: OpenOptions) -> Result<Volume, OpenError> {
    let opened = Volume::open(disk.clone(), options);
    opened.or_else(|_| {
        refuse_other_contents(&*disk)?;
        let place = SuperblockPlace::default();
        let opened = Volume::open_damaged(disk.clone(), options, &place);
        opened.map_err(|error| identify_contents(&*disk, error))
    })
}

/// Refuses a disk without a superblock that holds something else, although it may have backups of
/// an old one.
///
/// # Errors
/// [`OpenError::NotAVolume`].
pub fn refuse_other_contents(disk: &dyn Disk) -> Result<(), OpenError> {
    let is_lost = matches!(draconis_ext::tune::superblock(disk), Err(draconis_ext::Error::NotExt));
    match signature::detect(disk).filter(|_| is_lost) {
        Some(held) => Err(OpenError::NotAVolume(held)),
        None => Ok(()),
    }
}

/// Identifies the contents of a disk without a volume, if known.
pub(super) fn identify_contents(disk: &dyn Disk, error: draconis_ext::Error) -> OpenError {
    match (&error, signature::detect(disk)) {
        (draconis_ext::Error::NotExt, Some(held)) => OpenError::NotAVolume(held),
        (draconis_ext::Error::NotExt, None) => lost_superblock(disk).unwrap_or(error).into(),
        _ => error.into(),
    }
}
