//! A volume taken into use for writing.
//!
//! Law: a volume that is opened and not changed stays as it is, byte for byte; one that is
//! changed says that it is in use before anything else of the change is on disk.

#![allow(clippy::arithmetic_side_effects, reason = "counts mounts and inodes of a group")]

use std::sync::Arc;

use draconis_device::{Disk, Group, Ticket, Write};
use draconis_exchange::heap::Block;
use parking_lot::RwLock;

use super::Writing;
use super::edit::{Edit, Flight, Stop, Writer};
use super::groups::Groups;
use super::overlay::State;
use crate::format::superblock::{OFFSET_BYTES, STATE_CLEAN};
use crate::format::{le16, put16, put32};
use crate::units::index;
use crate::volume::{Options, Volume};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Orphans that are followed; a longer list is damage.
const MOST_ORPHANS: u32 = 1 << 20;

impl Volume {
    pub(super) fn mount(disk: Arc<dyn Disk>, options: Options, writing: Writing) -> Result<Self> {
        let properties = disk.properties();
        if properties.read_only {
            return Err(Error::ReadOnly);
        }
        let mut volume = Self::open(disk.clone(), options)?;
        if let Some(feature) = volume.read_only_reason() {
            return Err(Error::Unsupported { feature });
        }
        let super_ = &volume.super_;
        if super_.len_bytes() > volume.disk_bytes {
            let feature = "writing needs: all of the volume; its disk is shorter".to_owned();
            return Err(Error::Unsupported { feature });
        }
        if super_.block_bytes < properties.sector_bytes {
            let feature = format!("writing needs: blocks of {} bytes", properties.sector_bytes);
            return Err(Error::Unsupported { feature });
        }
        let clean = super_.clean && !super_.errors;
        let groups = Groups::load(&volume.store, super_)?;
        volume.gate = Some(RwLock::new(Writer::new(disk, groups, writing, clean)));
        let first = volume.super_.last_orphan;
        volume.edit(|edit| edit.bury_orphans(first))?;
        if !clean {
            volume.edit(|edit| edit.recount())?;
        }
        Ok(volume)
    }

    /// Takes a volume that was closed into use again.
    pub(super) fn reopen_now(&self) -> Result<()> {
        let mut writer = self.gate.as_ref().ok_or(Error::ReadOnly)?.write();
        match writer.stopped {
            Some(Stop::Failed(_)) => Err(Error::ReadOnly),
            Some(Stop::Closed) => {
                (writer.stopped, writer.marked) = (None, false);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Edit<'_> {
    /// Says on disk that the volume is in use, if it does not yet: whatever is submitted
    /// next follows the ticket. Nothing but that changes, whatever has changed in memory.
    pub(super) fn take_into_use(&mut self) -> Result<Option<Ticket>> {
        if self.w.marked {
            return Ok(None);
        }
        self.w.marked = true;
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let (block, at) = (FsBlock(OFFSET_BYTES / block_bytes), index(OFFSET_BYTES % block_bytes));
        let mark = |bytes: &mut [u8], now: u32| {
            let it = bytes.get_mut(at..).unwrap_or_default();
            let state = le16(it, 0x3A).unwrap_or(0);
            put16(it, 0x3A, state & !STATE_CLEAN);
            let mounts = le16(it, 0x34).unwrap_or(0);
            put16(it, 0x34, mounts.saturating_add(1));
            put32(it, 0x2C, now);
            put32(it, 0x30, now);
        };
        let now = u32::try_from(self.now.seconds).unwrap_or(0);
        // As a change of its own, so that the block is in the overlay.
        self.change_super(|_| {})?;
        let mut blocks = self.volume.store.overlay.change();
        let Some(buffer) = blocks.metadata.get_mut(&block.0) else {
            return Err(Error::Misuse("a superblock that is not in memory"));
        };
        mark(buffer.now.make_mut(), now);
        let mut marked = buffer.now.clone();
        if let State::Changed(base) = &mut buffer.state {
            mark(base.make_mut(), now);
            marked = base.clone();
        }
        drop(blocks);
        let mut write = Block::private(marked.len());
        write.copy_in(0, &marked);
        let write = Write { at_bytes: block.0.saturating_mul(block_bytes), block: write };
        let group = Group { writes: vec![write] };
        let after = self.w.needed.filter(|ticket| self.w.durable < Some(*ticket));
        let ticket = self.w.disk.submit(group, after.as_slice());
        let ticket = ticket.map_err(|refused| Error::Io(refused.error))?;
        (self.w.needed, self.w.last) = (Some(ticket), Some(ticket));
        let (contents, bytes) = (vec![], block_bytes);
        self.w.flying.push_back(Flight { last: ticket, contents, bytes });
        self.w.flying_bytes = self.w.flying_bytes.saturating_add(bytes);
        Ok(Some(ticket))
    }

    /// Frees the inodes of the list that other drivers keep, and empties it.
    fn bury_orphans(&mut self, first: u32) -> Result<()> {
        let mut at = first;
        for _ in 0..MOST_ORPHANS {
            if at == 0 {
                break;
            }
            let inode = InodeNumber(at);
            let next = self.read_slot(inode, |it| it.deleted());
            let links = self.read_slot(inode, |it| it.links());
            let (Ok(next), Ok(links)) = (next, links) else {
                log::warn!("the list of orphans leads to inode {inode}, which is none");
                break;
            };
            self.change_slot(inode, |it| it.set_deleted(0))?;
            if links == 0 {
                self.bury(inode)?;
            } else {
                // A cut that was not finished: everything behind the end goes.
                let node = self.node(inode)?;
                self.resize(&node, node.size_bytes)?;
            }
            at = next;
        }
        if first != 0 {
            self.change_super(|it| {
                put32(it, 0xE8, 0);
            })?;
        }
        Ok(())
    }

    /// On a volume that was not unmounted properly: counts what is free, and frees what was
    /// unlinked but still open. Other inodes that are marked as used and dead stay so until
    /// `e2fsck` comes: names may lead to them, and must not lead to somebody else one day.
    fn recount(&mut self) -> Result<()> {
        let used = self.used_inodes()?;
        for inode in used {
            let orphan =
                self.read_slot(inode, |it| it.links() == 0 && it.mode() != 0 && it.deleted() == 0)?;
            if orphan {
                self.bury(inode)?;
            }
        }
        // Counts that were wrong are written with the next chain, and there is one.
        self.change_super(|_| {})
    }
}
