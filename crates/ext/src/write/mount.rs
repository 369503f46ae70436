//! A volume taken into use for writing.

#![allow(clippy::arithmetic_side_effects, reason = "counts mounts and inodes of a group")]

use std::sync::Arc;

use draconis_device::Disk;
use parking_lot::RwLock;

use super::Writing;
use super::edit::{Edit, Writer};
use super::groups::Groups;
use crate::format::superblock::STATE_CLEAN;
use crate::format::{le16, put16, put32};
use crate::volume::{Options, Volume};
use crate::{Error, InodeNumber, Result};

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
        volume.edit(|edit| edit.mark_mounted())?;
        volume.sync()?;
        let first = volume.super_.last_orphan;
        volume.edit(|edit| edit.bury_orphans(first))?;
        if !clean {
            volume.edit(|edit| edit.recount())?;
        }
        volume.sync()?;
        Ok(volume)
    }
}

impl Edit<'_> {
    fn mark_mounted(&mut self) -> Result<()> {
        let now = u32::try_from(self.now.seconds).unwrap_or(0);
        self.change_super(|it| {
            let state = le16(it, 0x3A).unwrap_or(0);
            put16(it, 0x3A, state & !STATE_CLEAN);
            let mounts = le16(it, 0x34).unwrap_or(0);
            put16(it, 0x34, mounts.saturating_add(1));
            put32(it, 0x2C, now);
            put32(it, 0x30, now);
        })
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
        Ok(())
    }
}
