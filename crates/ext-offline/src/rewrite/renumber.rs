//! Renumbering of inodes in directory entries and attributes.

use draconis_types::FileType;

use super::VolumeRewrite;
use crate::InodeNumber;
use crate::format::dirent::{HEAD_BYTES, RawDirent, rec_len_from_disk};
use crate::format::inode::Inode;
use crate::format::inode_slot::InodeSlot;
use crate::format::xattr::RawXattrEntry;
use crate::offline::{OfflineError, Result};

impl VolumeRewrite<'_> {
    /// Renumbers the inodes of the entries of a chain.
    pub(super) fn renumber_dirents(&self, chain: &mut [u8], dir: InodeNumber) -> Result<()> {
        let damaged = || {
            let error = crate::Error::corrupt("directory entry: record length");
            OfflineError::Volume(error.with_inode(dir))
        };
        let mut at = 0;
        while at < chain.len() {
            let chain_len = chain.len();
            let entry = RawDirent::view_mut(chain, at).ok_or_else(damaged)?;
            let len = rec_len_from_disk(entry.rec_len.get(), chain_len);
            if len < HEAD_BYTES || len > chain_len.saturating_sub(at) {
                return Err(damaged());
            }
            if let Some(to) = self.renumbered.get(&entry.inode.get()) {
                entry.inode.set(*to);
            }
            at = at.saturating_add(len);
        }
        Ok(())
    }

    /// Renumbers the inodes of an inline directory.
    pub(super) fn renumber_inline_dirents(&self, node: &Inode, slot: &mut [u8]) -> Result<()> {
        if node.kind != FileType::Directory || self.renumbered.is_empty() {
            return Ok(());
        }
        let mut slot = InodeSlot::from_bytes(slot)?;
        if let Some(parent) = self.renumbered.get(&slot.pointer(0)) {
            slot.set_pointer(0, *parent);
        }
        for part in 0..2 {
            self.renumber_dirents(slot.inline_dirents(part), node.number)?;
        }
        Ok(())
    }

    /// Renumbers the EA inodes of an attribute list from `at` on; returns true if any changed.
    pub(super) fn renumber_ea_inodes(&self, list: &mut [u8], mut at: usize) -> Result<bool> {
        let mut is_changed = false;
        while let Some(entry) = RawXattrEntry::view_mut(list, at)? {
            if let Some(to) = self.renumbered.get(&entry.e_value_inum.get()) {
                entry.e_value_inum.set(*to);
                is_changed = true;
            }
            at = at.saturating_add(entry.len_bytes());
        }
        Ok(is_changed)
    }
}
