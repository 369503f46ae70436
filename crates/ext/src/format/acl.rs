//! POSIX access control lists: short on disk, long in Linux's `system.posix_acl_*`.
//!
//! ```text
//!   disk, version 1   | 1 | tag perm | tag perm id | ..   id only of named users and groups
//!   Linux, version 2  | 2 | tag perm id | ..              id -1 where there is none
//! ```

use super::{le16, le32};
use crate::{Error, Result};

const USER: u16 = 0x02;
const GROUP: u16 = 0x08;

/// The list on disk in the form that Linux's `getxattr` answers.
///
/// # Errors
/// [`Error::Corrupt`] if the list has another version, an unknown tag, or a wrong length.
pub fn to_linux(disk: &[u8]) -> Result<Vec<u8>> {
    let corrupt = Error::corrupt("access control list");
    if le32(disk, 0) != Some(1) {
        return Err(corrupt);
    }
    let mut linux = 2u32.to_le_bytes().to_vec();
    let mut rest = disk.get(4..).unwrap_or_default();
    while !rest.is_empty() {
        let (Some(tag), Some(perm)) = (le16(rest, 0), le16(rest, 2)) else { return Err(corrupt) };
        let (id, len) = match tag {
            USER | GROUP => (le32(rest, 4).ok_or(corrupt.clone())?, 8),
            0x01 | 0x04 | 0x10 | 0x20 => (u32::MAX, 4),
            _ => return Err(corrupt),
        };
        linux.extend(tag.to_le_bytes());
        linux.extend(perm.to_le_bytes());
        linux.extend(id.to_le_bytes());
        rest = rest.get(len..).unwrap_or_default();
    }
    Ok(linux)
}

/// The list in Linux's form as it is kept on disk.
///
/// # Errors
/// [`Error::Misuse`] if it is no list of version 2.
pub fn to_disk(linux: &[u8]) -> Result<Vec<u8>> {
    let misuse = Error::Misuse("not an access control list");
    if le32(linux, 0) != Some(2) || linux.len() % 8 != 4 {
        return Err(misuse);
    }
    let mut disk = 1u32.to_le_bytes().to_vec();
    for entry in linux.get(4..).unwrap_or_default().chunks_exact(8) {
        let tag = le16(entry, 0).ok_or(misuse.clone())?;
        let len = match tag {
            USER | GROUP => 8,
            0x01 | 0x04 | 0x10 | 0x20 => 4,
            _ => return Err(misuse),
        };
        disk.extend(entry.get(..len).unwrap_or_default());
    }
    Ok(disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_added_where_the_disk_leaves_them_out() {
        let disk = [1, 0, 0, 0, 1, 0, 6, 0, 2, 0, 4, 0, 0xE8, 3, 0, 0, 0x20, 0, 4, 0];
        let linux = to_linux(&disk).unwrap();
        assert_eq!(linux.len(), 4 + 3 * 8);
        assert_eq!(to_disk(&linux).unwrap(), disk);
        assert!(to_disk(&linux[..19]).is_err());
        assert_eq!(linux[4..12], [1, 0, 6, 0, 255, 255, 255, 255]);
        assert_eq!(linux[12..20], [2, 0, 4, 0, 0xE8, 3, 0, 0]);
        assert!(to_linux(&disk[..15]).is_err());
        assert!(to_linux(&[2, 0, 0, 0]).is_err());
    }
}
