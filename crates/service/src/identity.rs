//! Identity of a volume: what distinguishes it from all others of this host.

use std::path::Path;

use draconis_types::path_bytes::ShowPath;
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::remote_disk;

/// Returns device and inode number of a volume, or a device's own number; for a URL its identity.
///
/// # Errors
/// A message for the user.
pub(crate) fn file_identity(volume: &Path) -> Result<(u64, u64), String> {
    if let Some(address) = remote_disk::parse_url(volume) {
        return Ok(remote_disk::url_identity(address));
    }
    let stat = rustix::fs::stat(volume).map_err(|errno| describe_errno(volume, errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Ok((stat.st_rdev, u64::MAX)),
        FileType::RegularFile => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(format!("{} is neither a file nor a block device", volume.shown())),
    }
}

/// Formats an error of a path as a message.
pub(crate) fn describe_errno(path: &Path, errno: Errno) -> String {
    format!("{}: {}", path.shown(), crate::error_text(&std::io::Error::from(errno)))
}
