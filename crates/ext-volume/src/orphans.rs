//! Orphans: inodes without names that are in use, or that may still get a name.
//!
//! ```text
//!   in memory                 on disk
//!   all of them, in order     ordered: unlinked, marked as used; the next mount finds them
//!                             atomic:  s_last_orphan ──▶ inode ──▶ inode ──▶ 0   (i_dtime)
//! ```
//! Other drivers may list theirs in an orphan file (`orphan_file`); this driver uses the list,
//! which they also read.
//!
//! Law: an orphan is deleted when its last user goes, when the volume is closed, or at the next
//! mount.

use draconis_types::FileType;

use crate::blocks::role::Role;
use crate::format::features::ReadOnlyCompatible;
use crate::format::inode::flags;
use crate::format::orphan_file;
use crate::transaction::Transaction;
use crate::units::saturating_u32;
use crate::{Error, InodeNumber, Result};

/// Limit of the orphan list at a mount; a longer list is damage.
const MAX_ORPHANS: u32 = 1 << 20;
/// Limit of the orphan list at a resume; a longer list is damage.
const MAX_ADOPTED_ORPHANS: usize = 1 << 16;
/// Limit of orphan-file blocks that are read; the usual size is some hundred.
const MAX_ORPHAN_FILE_BLOCKS: u64 = 1 << 13;

impl Transaction<'_> {
    /// Returns true if an inode is an orphan.
    pub(crate) fn is_orphan(&self, inode: InodeNumber) -> bool {
        self.volume.store.write_back.has_orphan(inode.0)
    }

    /// Makes an inode an orphan: on disk it is unlinked from now on, and marked as used.
    pub(crate) fn make_orphan(&mut self, inode: InodeNumber) -> Result<()> {
        self.volume.store.write_back.write().orphans.insert(inode.0);
        if self.writer.protocol.lists_orphans() {
            return self.add_to_orphan_list(inode);
        }
        self.change_slot(inode, |it| it.set_deleted(0))
    }

    /// Adds an inode to the on-disk orphan list: the next mount deletes or truncates it.
    pub(crate) fn add_to_orphan_list(&mut self, inode: InodeNumber) -> Result<()> {
        let next = self.writer.orphan_list.last().copied().unwrap_or(0);
        self.writer.orphan_list.push(inode.0);
        self.set_orphan_head(inode.0)?;
        self.change_slot(inode, |it| it.set_deleted(next))
    }

    /// Removes an orphan that got a name or is deleted.
    pub(crate) fn remove_orphan(&mut self, inode: InodeNumber) -> Result<()> {
        self.volume.store.write_back.write().orphans.remove(&inode.0);
        let listed = &mut self.writer.orphan_list;
        let Some(nth) = listed.iter().rposition(|it| *it == inode.0) else { return Ok(()) };
        listed.remove(nth);
        let before = nth.checked_sub(1).and_then(|nth| listed.get(nth)).copied().unwrap_or(0);
        let behind = listed.get(nth).copied();
        self.change_slot(inode, |it| it.set_deleted(0))?;
        match behind {
            Some(behind) => self.change_slot(InodeNumber(behind), |it| it.set_deleted(before)),
            None => self.set_orphan_head(before),
        }
    }

    fn set_orphan_head(&mut self, inode: u32) -> Result<()> {
        self.modify_superblock(|raw| {
            raw.s_last_orphan.set(inode);
            Ok(())
        })
    }

    /// Processes the orphan list that the last use left, and empties it.
    pub(crate) fn process_orphans(&mut self, first: u32) -> Result<()> {
        if self.writer.is_resumed {
            return self.adopt_orphan_list(first);
        }
        let mut at = first;
        for _ in 0..MAX_ORPHANS {
            if at == 0 {
                break;
            }
            let inode = InodeNumber(at);
            if !self.may_be_orphan(inode)? {
                log::warn!("the list of orphans leads to inode {inode}, which is none");
                break;
            }
            let (next, links) = self.read_slot(inode, |it| (it.deletion_time(), it.links()))?;
            // It stays on the list until its last batch.
            self.process_orphan(inode, links)?;
            at = next;
            self.set_orphan_head(at)?;
            self.close_batch_if_complete()?;
        }
        if at != 0 {
            self.set_orphan_head(0)?;
        }
        Ok(())
    }

    /// Adopts the orphan list as it is, since its inodes may be open; finishes truncations.
    fn adopt_orphan_list(&mut self, first: u32) -> Result<()> {
        let (mut at, mut cut) = (first, vec![]);
        while at != 0 {
            let inode = InodeNumber(at);
            let (next, links) = self.read_slot(inode, |it| (it.deletion_time(), it.links()))?;
            if self.writer.orphan_list.contains(&at)
                || self.writer.orphan_list.len() >= MAX_ADOPTED_ORPHANS
            {
                return Err(Error::corrupt("list of orphans: too long").with_inode(inode));
            }
            self.writer.orphan_list.push(at);
            if links == 0 {
                self.volume.store.write_back.write().orphans.insert(at);
            } else {
                cut.push(inode);
            }
            at = next;
        }
        self.writer.orphan_list.reverse();
        for inode in cut {
            self.finish_truncate(inode)?;
            self.remove_orphan(inode)?;
        }
        Ok(())
    }

    /// Returns true if an inode may be listed: one that a name may name, in use.
    fn may_be_orphan(&mut self, inode: InodeNumber) -> Result<bool> {
        let is_ordinary = inode != InodeNumber::ROOT && self.volume.super_.is_valid_inode(inode);
        Ok(is_ordinary && self.is_inode_allocated(inode)?)
    }

    /// Deletes a listed inode, or finishes the truncation of one that has links.
    fn process_orphan(&mut self, inode: InodeNumber, links: u16) -> Result<()> {
        if links == 0 {
            return self.evict_inode(inode);
        }
        self.finish_truncate(inode)?;
        self.change_slot(inode, |it| it.set_deleted(0))
    }

    fn finish_truncate(&mut self, inode: InodeNumber) -> Result<()> {
        // Unfinished truncation: frees all blocks after the end, except for fs-verity metadata.
        let node = self.node(inode)?;
        if node.kind == FileType::File && node.flags & flags::VERITY == 0 {
            self.truncate(&node, node.size_bytes)?;
        }
        Ok(())
    }

    /// Processes the orphan file that another driver left, and empties it.
    pub(crate) fn process_orphan_file(&mut self) -> Result<()> {
        let super_ = &self.volume.super_;
        if !super_.read_only_compatible.contains(ReadOnlyCompatible::ORPHAN_PRESENT) {
            return Ok(());
        }
        if let Some(number) = super_.orphan_file {
            let file = self.node(number)?;
            let role = Role::OrphanFile(file.file_id());
            let count = file
                .size_bytes
                .checked_div(super_.block_bytes.into())
                .unwrap_or(0)
                .min(MAX_ORPHAN_FILE_BLOCKS);
            for nth in 0..saturating_u32(count) {
                let hole = Error::corrupt("file of orphans: hole").with_inode(number);
                let at = self.lookup_block(number, nth)?.ok_or(hole)?;
                let block = self.block(at, role).map_err(|error| error.with_inode(number))?;
                let listed = orphan_file::read_entries(&block);
                for (nth, inode) in
                    listed.map_err(|error| error.with_block(at).with_inode(number))?
                {
                    if self.may_be_orphan(inode)? {
                        let links = self.read_slot(inode, |it| it.links())?;
                        self.process_orphan(inode, links)?;
                    } else {
                        log::warn!("the file of orphans lists inode {inode}, which is none");
                    }
                    self.modify_block(at, role, |block| orphan_file::clear_entry(block, nth))?;
                    self.close_batch_if_complete()?;
                }
            }
        }
        self.modify_superblock(|raw| {
            raw.set_no_orphans_in_file();
            Ok(())
        })
    }
}
