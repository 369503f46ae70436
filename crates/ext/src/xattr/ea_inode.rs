//! Values in inodes of their own (`ea_inode`).
//!
//! ```text
//!   entry | e_value_inum, size, hash of name and value's hash |
//!              ▼
//!   inode | flag EA_INODE | size | i_atime: CRC-32C of the value | .. | contents: the value |
//! ```
//! Law: a value is what was hashed, or an error of this attribute; no more than Linux hands out is
//! read, whatever is claimed.

use draconis_exchange::contract::FileType;

use crate::format::features::Incompatible;
use crate::format::inode::Inode;
use crate::format::xattr::{EaInodeRef, Xattr};
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{Error, Result};

/// The most that Linux hands out of a value, in bytes.
const XATTR_SIZE_MAX: u32 = 64 << 10;

impl Volume {
    /// The value of `attribute`, which `owner` has, from the inode that holds it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if that is no such inode or its contents are not what was hashed;
    /// [`Error::TooLarge`]; [`Error::Io`].
    pub(super) fn read_ea_inode_value(
        &self,
        owner: &Inode,
        attribute: &Xattr<'_>,
        outside: EaInodeRef,
    ) -> Result<Vec<u8>> {
        if !self.super_.incompatible.contains(Incompatible::EA_INODE) {
            return Err(Error::corrupt("extended attribute: value outside, without ea_inode"));
        }
        if outside.len > XATTR_SIZE_MAX {
            return Err(Error::TooLarge);
        }
        let corrupt = Error::corrupt("extended attribute: inode of its value");
        let slot = self.inode_slot(outside.inode)?;
        let inode = match Inode::check(&slot, outside.inode, &self.super_) {
            Err(Error::NotFound) => return Err(corrupt),
            inode => inode?,
        };
        let fits = inode.is_ea_inode() && inode.kind == FileType::File && !inode.is_encrypted();
        if !fits || inode.size_bytes != u64::from(outside.len) {
            return Err(corrupt);
        }
        let len = saturating_usize(outside.len.into());
        let mut value = Vec::with_capacity(len);
        while value.len() < len {
            let rest = len.saturating_sub(value.len());
            value.extend_from_slice(&self.contents(&inode, value.len() as u64, rest)?);
        }
        let hash = self.super_.value_seed.update(&value).value();
        let is_right = hash == inode.ea_inode_hash() && attribute.matches_ea_inode(hash);
        if !is_right && !inode.is_ea_inode_of(owner) {
            return Err(Error::corrupt("extended attribute: hash of its value"));
        }
        Ok(value)
    }
}
