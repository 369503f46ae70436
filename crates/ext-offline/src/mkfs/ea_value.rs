//! The value of an attribute in an EA inode.

use crate::format::inode::flags;
use crate::format::inode_slot::InodeSlot;

/// A value in an EA inode.
#[derive(Clone, Debug)]
pub(super) struct EaInodeValue {
    pub(super) bytes: Vec<u8>,
    /// User and group of the node.
    pub(super) owner: (u32, u32),
    pub(super) hash: u32,
}

impl EaInodeValue {
    /// Makes an inode the EA inode of this value.
    pub(super) fn init_ea_inode(&self, inode: &mut [u8]) {
        let Ok(mut slot) = InodeSlot::from_bytes(inode) else { return };
        let before = slot.flags();
        slot.set_flags(before | flags::EA_INODE);
        slot.set_ea_ref_count(1);
        slot.set_value_hash(self.hash);
    }
}
