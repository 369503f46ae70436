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
use crate::format::xattr::{Attribute, Outside};
use crate::units::index;
use crate::volume::Volume;
use crate::{Error, Result};

/// The most that Linux hands out of a value, in bytes.
const MOST_BYTES: u32 = 64 << 10;

impl Volume {
    /// The value of `attribute`, which `owner` has, from the inode that holds it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if that is no such inode or its contents are not what was hashed;
    /// [`Error::TooLarge`]; [`Error::Io`].
    pub(super) fn value_outside(
        &self,
        owner: &Inode,
        attribute: &Attribute<'_>,
        outside: Outside,
    ) -> Result<Vec<u8>> {
        if !self.super_.incompatible.contains(Incompatible::EA_INODE) {
            return Err(Error::corrupt("extended attribute: value outside, without ea_inode"));
        }
        if outside.len > MOST_BYTES {
            return Err(Error::TooLarge);
        }
        let corrupt = Error::corrupt("extended attribute: inode of its value");
        let slot = self.inode_slot(outside.inode)?;
        let inode = match Inode::check(&slot, outside.inode, &self.super_) {
            Err(Error::NotFound) => return Err(corrupt),
            inode => inode?,
        };
        let fits = inode.is_value() && inode.kind == FileType::File && !inode.is_encrypted();
        if !fits || inode.size_bytes != u64::from(outside.len) {
            return Err(corrupt);
        }
        let len = index(outside.len.into());
        let mut value = Vec::with_capacity(len);
        while value.len() < len {
            let rest = len.saturating_sub(value.len());
            value.extend_from_slice(&self.contents(&inode, value.len() as u64, rest)?);
        }
        let hash = self.super_.value_seed.of(&value).get();
        let is_right = hash == inode.value_hash() && attribute.is_of_value(hash);
        if !is_right && !inode.is_value_of(owner) {
            return Err(Error::corrupt("extended attribute: hash of its value"));
        }
        Ok(value)
    }
}
