//! Where in an image a volume lies.

use std::path::PathBuf;

use draconis_service::options::MountOptions;

/// Where in an image the volume is. Partitions are recognised by themselves, where only one holds
/// a volume.
#[derive(Clone, Debug, Default)]
pub struct VolumeLocation {
    /// It begins at this byte.
    pub offset_bytes: Option<u64>,
    /// It is this partition, counted from 1.
    pub partition: Option<u32>,
    /// What an image differs from, the nearest first: names that an image says are not opened.
    pub backing: Vec<PathBuf>,
}

impl VolumeLocation {
    /// The same as mount options.
    pub fn options(&self) -> MountOptions {
        MountOptions {
            offset_bytes: self.offset_bytes,
            partition: self.partition,
            ..MountOptions::default()
        }
    }
}
