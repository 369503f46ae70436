//! Extended attributes of an inode: those in the inode body, then those in its xattr block.

mod ea_inode;

use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::format::acl;
use crate::format::inode::Inode;
use crate::format::xattr::{Xattr, XattrList};
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::{Error, Result};

impl VolumeReader {
    /// Returns an attribute's value; see [`crate::Volume::xattr`].
    pub fn xattr_of(&self, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
        let found = self.visit_xattrs(inode, |attribute| {
            attribute.has_name(name).then(|| self.read_value(inode, attribute))
        })?;
        match found {
            Some(value) => value.map_err(|error| error.with_inode(inode.number)),
            None => Err(Error::NoAttribute),
        }
    }

    /// Visits the attributes of an inode until `visit` returns a value.
    pub fn visit_xattrs<T>(
        &self,
        inode: &Inode,
        mut visit: impl FnMut(&Xattr<'_>) -> Option<T>,
    ) -> Result<Option<T>> {
        let number = inode.number;
        if let Some(body) = self.inode_xattr_bytes(inode)? {
            for attribute in XattrList::from_inode(&body) {
                let attribute = attribute.map_err(|error| error.with_inode(number))?;
                if attribute.is_inline_data() {
                    continue;
                }
                if let Some(found) = visit(&attribute) {
                    return Ok(Some(found));
                }
            }
        }
        let Some(at) = inode.xattr_block else { return Ok(None) };
        let place = |error: Error| error.with_block(at).with_inode(number);
        if !self.super_.is_valid_block(at) {
            return Err(place(Error::corrupt("extended attribute block: number")));
        }
        let block = self.store.block(at, Role::XattrBlock).map_err(place)?;
        for attribute in XattrList::from_block(&block).map_err(place)? {
            if let Some(found) = visit(&attribute.map_err(place)?) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Returns the value of an attribute, in the inode, the block or an EA inode.
    fn read_value(&self, owner: &Inode, attribute: &Xattr<'_>) -> Result<Vec<u8>> {
        let disk = match attribute.ea_inode() {
            Some(outside) => self.read_ea_inode_value(owner, attribute, outside)?,
            None => attribute.value()?.to_vec(),
        };
        if attribute.is_acl() { acl::to_linux(&disk) } else { Ok(disk) }
    }

    /// Returns the bytes of an inode that hold its attributes.
    pub(crate) fn inode_xattr_bytes(&self, inode: &Inode) -> Result<Option<SharedBytes>> {
        let Some(at) = inode.attributes_at else { return Ok(None) };
        let slot = self.inode_slot(inode.number)?;
        let len = slot.len();
        Ok(Some(slot.slice(saturating_usize(u64::from(at))..len)))
    }
}
