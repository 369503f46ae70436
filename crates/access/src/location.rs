//! Where in an image a volume lies.

use std::path::PathBuf;

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
}

impl VolumeLocation {
    /// Returns the location as mount options.
    pub fn options(&self) -> MountOptions {
        MountOptions {
            offset_bytes: self.offset_bytes,
            partition: self.partition,
            ..MountOptions::default()
        }
    }
}
