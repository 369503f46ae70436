//! Where in an image a volume lies.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use draconis_service::options::MountOptions;

/// Location of a volume in an image. If only one partition holds a volume, it is found
/// automatically.
#[derive(Clone, Debug, Default)]
pub struct VolumeLocation {
    /// Offset at which the volume begins.
    pub offset_bytes: Option<u64>,
    /// Partition number, from 1.
    pub partition: Option<u32>,
    /// Backing files of the image, nearest first. Names stored in the image are not opened.
    pub backing: Vec<PathBuf>,
    /// True for the deleted files of the volume, which are only read. `IMAGE@deleted` means the
    /// same.
    pub deleted: bool,
    /// True to write also to a member of a RAID, which splits it from the others.
    pub force_raid_member: bool,
}

/// Suffix of an image's name for its deleted files.
const DELETED_SUFFIX: &[u8] = b"@deleted";

/// Returns the image of the name `IMAGE@deleted`; `None` if a file has that name, or there is no
/// file IMAGE.
pub fn image_of_deleted(name: &Path) -> Option<PathBuf> {
    let image = name.as_os_str().as_bytes().strip_suffix(DELETED_SUFFIX)?;
    let image = PathBuf::from(OsStr::from_bytes(image));
    let is_image = std::fs::symlink_metadata(name).is_err()
        && std::fs::metadata(&image).is_ok_and(|found| !found.is_dir());
    is_image.then_some(image)
}

impl VolumeLocation {
    /// Returns the file of an image to read, and the location as mount options: `IMAGE@deleted`
    /// stands for the deleted files of IMAGE.
    pub(crate) fn to_read<'a>(&self, image: &'a Path) -> (Cow<'a, Path>, MountOptions) {
        match image_of_deleted(image) {
            None => (image.into(), self.options()),
            Some(file) => (file.into(), MountOptions { deleted: true, ..self.options() }),
        }
    }

    /// Returns the location as mount options.
    pub fn options(&self) -> MountOptions {
        MountOptions {
            offset_bytes: self.offset_bytes,
            partition: self.partition,
            deleted: self.deleted,
            force_raid_member: self.force_raid_member,
            read_only: self.deleted,
            ..MountOptions::default()
        }
    }
}
