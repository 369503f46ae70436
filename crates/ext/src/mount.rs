//! A volume taken into use for writing.
//!
//! Law: a volume that is opened and not changed stays as it is, byte for byte; one that is
//! changed says that it is in use before anything else of the change is on disk.

#![allow(clippy::arithmetic_side_effects, reason = "counts mounts and inodes of a group")]

use std::collections::BTreeSet;
use std::sync::Arc;

use draconis_device::{Disk, Group, Ticket, Write};
use draconis_exchange::contract::Kind;
use draconis_exchange::heap::Block;
use parking_lot::RwLock;

use crate::alloc::Groups;
use crate::blocks::overlay::State;
use crate::dir::edit::targets;
use crate::format::slot::Slot;
use crate::format::superblock::{OFFSET_BYTES, STATE_CLEAN};
use crate::format::{le16, put16, put32};
use crate::ops::Writing;
use crate::transaction::{Flight, Stop, Transaction, Writer};
use crate::units::index;
use crate::volume::{Options, Volume};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Orphans that are followed; a longer list is damage.
const MOST_ORPHANS: u32 = 1 << 20;

impl Volume {
    pub(crate) fn mount(disk: Arc<dyn Disk>, options: Options, writing: Writing) -> Result<Self> {
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
        volume.transact(|tx| tx.process_orphans(first))?;
        if !clean {
            volume.transact(|tx| tx.recount())?;
        }
        Ok(volume)
    }

    /// Takes a volume that was closed into use again.
    pub(crate) fn reopen_now(&self) -> Result<()> {
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

impl Transaction<'_> {
    /// Says on disk that the volume is in use, if it does not yet: whatever is submitted
    /// next follows the ticket. Nothing but that changes, whatever has changed in memory.
    pub(crate) fn take_into_use(&mut self) -> Result<Option<Ticket>> {
        if self.writer.marked {
            return Ok(None);
        }
        self.writer.marked = true;
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
        let after = self.writer.needed.filter(|ticket| self.writer.durable < Some(*ticket));
        let ticket = self.writer.disk.submit(group, after.as_slice());
        let ticket = ticket.map_err(|refused| Error::Io(refused.error))?;
        (self.writer.needed, self.writer.last) = (Some(ticket), Some(ticket));
        let (contents, bytes) = (vec![], block_bytes);
        self.writer.flying.push_back(Flight { last: ticket, contents, bytes });
        self.writer.flying_bytes = self.writer.flying_bytes.saturating_add(bytes);
        Ok(Some(ticket))
    }

    /// Frees the inodes of the list that other drivers keep, and empties it.
    fn process_orphans(&mut self, first: u32) -> Result<()> {
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
                self.delete(inode)?;
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
    /// unlinked but still open. Inodes that are dead and that names lead to are used from now
    /// on, as are dead ones that are marked so: until `e2fsck` takes the names away, they must
    /// not lead to another file one day.
    fn recount(&mut self) -> Result<()> {
        let mut living = vec![0u64; index(u64::from(self.volume.super_.inodes)) / 64 + 1];
        let (mut dirs, mut open) = (vec![InodeNumber::ROOT], Vec::new());
        for inode in self.used_inodes()? {
            let of = |it: &Slot<'_>| (it.links(), it.mode(), it.deleted());
            match self.read_slot(inode, of)? {
                (0, mode, 0) if mode != 0 => open.push(inode),
                (0, ..) => {}
                (_, mode, _) => {
                    let (word, bit) = place_of(inode);
                    living.get_mut(word).into_iter().for_each(|word| *word |= bit);
                    if Kind::from_mode(mode.into()) == Some(Kind::Directory) {
                        dirs.push(inode);
                    }
                }
            }
        }
        let named = self.names_of_the_dead(&dirs, &living);
        for inode in open {
            if !named.contains(&inode) {
                self.delete(inode)?;
            }
        }
        for inode in named {
            self.set_aside(inode)?;
        }
        Ok(())
    }

    /// The inodes that names lead to and that are not `living`. What cannot be read is left out:
    /// nothing can be looked up there either.
    fn names_of_the_dead(&self, dirs: &[InodeNumber], living: &[u64]) -> BTreeSet<InodeNumber> {
        let super_ = &self.volume.super_;
        let mut named = BTreeSet::new();
        // A block belongs to one directory; a damaged volume may say otherwise.
        let mut blocks_left = super_.blocks;
        for dir in dirs {
            let Ok(node) = self.directory(*dir) else { continue };
            for nth in 0..self.volume.directory_blocks(&node) {
                if blocks_left == 0 {
                    log::warn!("directories have more blocks than the volume: run e2fsck on it");
                    return named;
                }
                blocks_left -= 1;
                let Ok(Some((_, block))) = self.names_in(&node, nth) else { continue };
                named.extend(targets(&block).filter(|inode| {
                    let (word, bit) = place_of(*inode);
                    let is_living = living.get(word).is_some_and(|word| word & bit != 0);
                    (super_.first_inode.0..=super_.inodes).contains(&inode.0) && !is_living
                }));
            }
        }
        named
    }
}

/// The bit of an inode: word and bit.
fn place_of(inode: InodeNumber) -> (usize, u64) {
    (index(u64::from(inode.0 / 64)), 1 << (inode.0 % 64))
}
