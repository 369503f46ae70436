//! What the bytes of an ext volume mean.
//!
//! ```text
//!   bytes ──▶ Raw* (field names of the format manual, any bytes) ──check──▶ meaning
//! ```
//!
//! Law 1: a `Raw*` type is bytes with names; nothing is decided on it but its checks.
//! Law 2: a value of a meaning type is sane by construction.
//! Law 3: every loop is bounded by the slice it walks.
//!
//! This module is pure: it does not know what a disk or a cache is.

pub mod acl;
pub mod bitmap;
pub mod casefold;
pub mod checksum;
pub mod dir_tail;
pub mod dirent;
pub mod extent;
pub mod features;
pub mod group;
pub mod hash;
pub mod htree;
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
pub mod xattr;

/// Little-endian 16 bits at `at`, if they are there.
pub(crate) fn le16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

/// Little-endian 32 bits at `at`, if they are there.
pub(crate) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

/// Puts little-endian 16 bits at `at`, if there is room.
pub(crate) fn put16(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes.get_mut(at..at.checked_add(2)?)?.copy_from_slice(&value.to_le_bytes());
    Some(())
}

/// Puts little-endian 32 bits at `at`, if there is room.
pub(crate) fn put32(bytes: &mut [u8], at: usize, value: u32) -> Option<()> {
    bytes.get_mut(at..at.checked_add(4)?)?.copy_from_slice(&value.to_le_bytes());
    Some(())
}
