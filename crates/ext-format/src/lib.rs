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
//! ```
//! use draconis_ext_format::{Error, superblock::RawSuperblock};
//!
//! let superblock = RawSuperblock::view(&[0; 1024]).and_then(RawSuperblock::check);
//! assert_eq!(superblock.err(), Some(Error::NotExt));
//! ```
//!
//! This crate is pure: it does no I/O, and knows neither disks nor caches. The library of volumes
//! is `draconis-ext`, which offers all of this as its module `format`.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::unreachable,
        clippy::unwrap_used
    )
)]

pub mod acl;
pub mod bitmap;
pub mod casefold;
pub mod checksum;
mod dir_layout;
pub mod dir_tail;
pub mod dirent;
mod error;
pub mod extent;
pub mod features;
mod geometry;
pub mod group;
pub mod hash;
pub mod htree;
pub mod indirect;
pub mod inline;
pub mod inode;
pub mod inode_slot;
pub mod jbd2;
pub mod mmp;
pub mod nokey;
pub mod orphan_file;
pub mod quota;
pub mod requirements;
pub mod superblock;
pub mod units;
pub mod witness;
pub mod xattr;

pub use error::{Error, Result};
pub use units::{FileBlock, FileId, FsBlock, GroupNumber, InodeNumber};

/// Reads a little-endian `u16` at `at`; `None` beyond the slice.
#[inline]
pub fn le16(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(field.try_into().ok()?))
}

/// Reads a little-endian `u32` at `at`; `None` beyond the slice.
#[inline]
pub fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

/// Writes a little-endian `u16` at `at`; `None` beyond the slice.
#[inline]
pub fn put16(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes.get_mut(at..at.checked_add(2)?)?.copy_from_slice(&value.to_le_bytes());
    Some(())
}

/// Writes a little-endian `u32` at `at`; `None` beyond the slice.
#[inline]
pub fn put32(bytes: &mut [u8], at: usize, value: u32) -> Option<()> {
    bytes.get_mut(at..at.checked_add(4)?)?.copy_from_slice(&value.to_le_bytes());
    Some(())
}

/// Returns the low half of a 64-bit field.
pub fn low32(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
