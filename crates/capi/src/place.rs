//! Paths of the host, and places of volumes in images.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use draconis_access::{Result, VolumeLocation};

use crate::raw::CStrArg;

/// Location of a volume in an image. All zero: the whole image, or the only partition that holds a
/// volume.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_place {
    /// Offset at which the volume begins.
    pub offset_bytes: u64,
    /// Partition number, from 1.
    pub partition: u32,
    /// Backing file of a disk image. Names stored in the image are not opened. May be
    /// NULL.
    pub backing: CStrArg,
}

/// Converts a C string to a host path.
pub(crate) fn host_path<'a>(text: CStrArg, what: &str) -> Result<&'a Path> {
    text.get(what).map(|bytes| Path::new(OsStr::from_bytes(bytes)))
}

/// Converts the C struct to a location.
pub(crate) fn to_location(place: Option<&draconis_place>) -> VolumeLocation {
    let Some(place) = place else { return VolumeLocation::default() };
    let backing =
        place.backing.as_optional_bytes().map(|bytes| Path::new(OsStr::from_bytes(bytes)).into());
    VolumeLocation {
        offset_bytes: (place.offset_bytes > 0).then_some(place.offset_bytes),
        partition: (place.partition > 0).then_some(place.partition),
        backing: backing.into_iter().collect(),
        ..VolumeLocation::default()
    }
}
