//! The value of an attribute in an EA inode.

use crate::format::inode::flags;
use crate::format::inode_slot::InodeSlot;

/// A value in an EA inode.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) bytes: Vec<u8>,
    /// User and group of the node.
    pub(super) owner: (u32, u32),
    pub(super) hash: u32,
}

impl Value {
    /// Makes an inode the EA inode of this value.
    pub(super) fn mark(&self, inode: &mut [u8]) {
        let Ok(mut slot) = InodeSlot::of(inode) else { return };
        let before = slot.flags();
        slot.set_flags(before | flags::EA_INODE);
        slot.set_ea_ref_count(1);
        slot.set_value_hash(self.hash);
    }
}
