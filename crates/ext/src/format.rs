//! On-disk structures of ext2, ext3 and ext4.
//!
//! ```text
//!   bytes ──▶ Raw* (field names of the format manual, any bytes) ──check──▶ checked type
//! ```
//!
//! Law 1: a `Raw*` type is bytes with field names; its only logic is validation.
//! Law 2: a value of a checked type is valid by construction.
//! Law 3: every loop is bounded by the slice it walks.
//!
//! This module is pure: it knows neither disks nor caches.

pub mod acl;
pub mod bitmap;
pub mod casefold;
pub mod checksum;
mod dir_layout;
pub mod dir_tail;
pub mod dirent;
pub mod extent;
pub mod features;
mod geometry;
pub mod group;
pub mod hash;
pub mod htree;
pub(crate) mod indirect;
pub mod inline;
pub mod inode;
pub mod inode_slot;
pub mod jbd2;
pub(crate) mod mmp;
pub mod nokey;
pub(crate) mod orphan_file;
pub mod quota;
pub(crate) mod requirements;
pub mod superblock;
pub(crate) mod witness;
pub mod xattr;

/// Reads a little-endian `u16` at `at`; `None` beyond the slice.
pub(crate) fn le16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

/// Reads a little-endian `u32` at `at`; `None` beyond the slice.
pub(crate) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

/// Writes a little-endian `u16` at `at`; `None` beyond the slice.
pub(crate) fn put16(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes.get_mut(at..at.checked_add(2)?)?.copy_from_slice(&value.to_le_bytes());
    Some(())
}

/// Writes a little-endian `u32` at `at`; `None` beyond the slice.
pub(crate) fn put32(bytes: &mut [u8], at: usize, value: u32) -> Option<()> {
    bytes.get_mut(at..at.checked_add(4)?)?.copy_from_slice(&value.to_le_bytes());
    Some(())
}

pub(crate) fn low32(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
