//! Renumbering of inodes in directory entries and attributes.

use draconis_types::FileType;

use super::VolumeRewrite;
use super::maps::read_u32_at;
use crate::InodeNumber;
use crate::format::dirent::{HEAD_BYTES, rec_len_from_disk};
use crate::format::inode::Inode;
use crate::format::inode_slot::InodeSlot;
use crate::format::{le16, put32};
use crate::offline::{OfflineError, Result};

/// Bytes of an attribute entry's header, and the offset of its EA inode number.
const XATTR_ENTRY_BYTES: usize = 16;
const VALUE_INODE_OFFSET: usize = 4;

impl VolumeRewrite<'_> {
    /// Renumbers the inodes of the entries of a chain.
    pub(super) fn renumber_dirents(&self, chain: &mut [u8], dir: InodeNumber) -> Result<()> {
        let damaged = || {
            let error = crate::Error::corrupt("directory entry: record length");
            OfflineError::Volume(error.with_inode(dir))
        };
        let mut at = 0;
        while at < chain.len() {
            let raw = le16(chain, at.saturating_add(4)).ok_or_else(damaged)?;
            let len = rec_len_from_disk(raw, chain.len());
            if len < HEAD_BYTES || len > chain.len().saturating_sub(at) {
                return Err(damaged());
            }
            if let Some(to) = self.renumbered.get(&read_u32_at(chain, at)?) {
                let _ = put32(chain, at, *to);
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
        while let Some([name_len, _, _, _]) = list.get(at..at.saturating_add(4)) {
            let name_len = usize::from(*name_len);
            if list.get(at..at.saturating_add(4)) == Some(&[0; 4]) {
                break;
            }
            let damaged = crate::Error::corrupt("extended attribute: entry");
            let number =
                read_u32_at(list, at.saturating_add(VALUE_INODE_OFFSET)).map_err(|_| damaged)?;
            if let Some(to) = self.renumbered.get(&number) {
                let _ = put32(list, at.saturating_add(VALUE_INODE_OFFSET), *to);
                is_changed = true;
            }
            at = at.saturating_add((XATTR_ENTRY_BYTES + name_len).next_multiple_of(4));
        }
        Ok(is_changed)
    }
}
