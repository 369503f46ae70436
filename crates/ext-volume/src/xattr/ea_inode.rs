//! Attribute values in EA inodes (`ea_inode`).
//!
//! ```text
//!   entry | e_value_inum, size, hash of name and value's hash |
//!              ▼
//!   inode | flag EA_INODE | size | i_atime: CRC-32C of the value | .. | contents: the value |
//! ```
//! Law: a value must match its hash, or reading the attribute fails. At most as many bytes as Linux
//! returns are read.

use draconis_types::FileType;

use crate::format::inode::Inode;
use crate::format::xattr::{EaInodeRef, Xattr};
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::{Error, Result};

/// Maximum value bytes that Linux returns.
const XATTR_SIZE_MAX: u32 = 64 << 10;

impl VolumeReader {
    /// Returns the value of `owner`'s `attribute` from its EA inode.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if this is no EA inode or its contents do not match the hash;
    /// [`Error::TooLarge`]; [`Error::Io`].
    pub(super) fn read_ea_inode_value(
        &self,
        owner: &Inode,
        attribute: &Xattr<'_>,
        outside: EaInodeRef,
    ) -> Result<Vec<u8>> {
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
            value.extend_from_slice(&self.read_contents(&inode, value.len() as u64, rest)?);
        }
        let hash = self.super_.value_seed.update(&value).value();
        let is_right = hash == inode.ea_inode_hash() && attribute.matches_ea_inode(hash);
        if !is_right && !inode.is_ea_inode_of(owner) {
            return Err(Error::corrupt("extended attribute: hash of its value"));
        }
        Ok(value)
    }
}
