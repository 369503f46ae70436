//! The hands of every change: blocks and inodes, read as they are now and changed in place.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with places of inodes inside their checked tables"
)]

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use draconis_exchange::contract::Time;
use parking_lot::RwLock;

use crate::alloc::Groups;
use crate::blocks::CHUNK_BYTES;
use crate::blocks::data::Data;
use crate::blocks::overlay::{Buffer, State};
use crate::blocks::role::Role;
use crate::commit::batch::Batch;
use crate::commit::outbox::Outbox;
use crate::commit::protocol::Protocol;
use crate::format::inode::Inode;
use crate::format::slot::{Slot, Stamp};
use crate::ops::{AccessTimes, Writing};
use crate::units::index;
use crate::volume::Volume;
use crate::{Error, FsBlock, InodeNumber, Result};

/// Why nothing is written any more.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    /// The volume was closed.
    Closed,
    /// This went wrong.
    Failed(String),
}

/// What a volume has that is written.
#[derive(Debug)]
pub(crate) struct WriteSide {
    /// Changes hold it alone, reads share it.
    pub(crate) gate: RwLock<Writer>,
    pub(crate) outbox: Outbox,
    /// Bytes that may be changed in memory.
    pub(crate) dirty_limit: u64,
}

/// The state of a volume that is written. Who changes holds it alone; who reads shares it.
pub(crate) struct Writer {
    pub(crate) clock: Arc<dyn Fn() -> Time + Send + Sync>,
    pub(crate) dirty_limit: u64,
    pub(crate) atime: AccessTimes,
    pub(crate) groups: Groups,
    pub(crate) batch: Batch,
    pub(crate) protocol: Box<dyn Protocol>,
    /// Readers of the disk see every chain up to this one.
    pub(crate) landed: u64,
    /// Users of inodes; what has no name lives for as long as it has some.
    pub(crate) users: HashMap<u32, u64>,
    /// Orphans that the volume lists, the last one first on it.
    pub(crate) listed: Vec<u32>,
    /// Orphans that never had a name and may get one.
    pub(crate) unnamed: HashSet<u32>,
    pub(crate) stopped: Option<Stop>,
    /// The volume was unmounted properly before.
    pub(crate) was_clean: bool,
    /// The disk has been told that it is in use.
    pub(crate) marked: bool,
    /// Where the search for a group of a new top directory starts.
    pub(crate) turn: u32,
    /// Tells inodes apart that had the same number.
    pub(crate) generation: u32,
    /// Where a name was last put into a directory without an index.
    pub(crate) hints: HashMap<u32, u32>,
    /// Something in memory differs from before the change in hand.
    pub(crate) touched: bool,
    /// Changes that were made, and what is told when one is made while nothing waits to be
    /// committed.
    pub(crate) changes: u64,
    pub(crate) on_first_change: Option<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl Writer {
    pub(crate) fn new(
        protocol: Box<dyn Protocol>,
        groups: Groups,
        writing: Writing,
        clean: bool,
    ) -> Self {
        Self {
            generation: (writing.clock)().nanoseconds,
            clock: writing.clock,
            dirty_limit: writing.dirty_bytes,
            atime: writing.atime,
            groups,
            batch: Batch::default(),
            protocol,
            landed: 0,
            users: HashMap::new(),
            listed: vec![],
            unnamed: HashSet::new(),
            stopped: None,
            was_clean: clean,
            marked: false,
            turn: 0,
            hints: HashMap::new(),
            touched: false,
            changes: 0,
            on_first_change: None,
        }
    }

    /// Free blocks and inodes.
    pub(crate) fn free(&self) -> (u64, u64) {
        (self.groups.free_blocks, self.groups.free_inodes)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        match &self.stopped {
            Some(Stop::Failed(why)) => Some(why.clone()),
            Some(Stop::Closed) | None => None,
        }
    }

    pub(crate) fn stop(&mut self, why: &Error) {
        if self.stopped.is_none() {
            log::error!("{why}: the volume is read-only from now on");
            self.stopped = Some(Stop::Failed(why.to_string()));
        }
    }
}

/// A change in hand.
pub(crate) struct Transaction<'a> {
    pub(crate) volume: &'a Volume,
    pub(crate) writer: &'a mut Writer,
    pub(crate) now: Time,
}

impl Volume {
    /// Makes one change, alone.
    pub(crate) fn transact<T>(
        &self,
        change: impl FnOnce(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        let writing = self.writing.as_ref().ok_or(Error::ReadOnly)?;
        let mut writer = writing.gate.write();
        if writer.stopped.is_some() {
            return Err(Error::ReadOnly);
        }
        writer.touched = false;
        let was_dirty = writer.batch.dirty;
        let now = (writer.clock)();
        let mut tx = Transaction { volume: self, writer: &mut writer, now };
        let mut done = change(&mut tx);
        if done.is_ok()
            && let Err(error) = tx.keep_bounds()
        {
            done = Err(error);
        }
        if let Err(error) = &done
            && writer.touched
        {
            writer.stop(error);
        }
        if writer.touched {
            writer.changes = writer.changes.wrapping_add(1);
            if !was_dirty && let Some(tell) = &writer.on_first_change {
                tell();
            }
        }
        drop(writer);
        self.after_change()?;
        done
    }
}

impl Transaction<'_> {
    /// A block as it is now.
    pub(crate) fn block(&self, block: FsBlock, role: Role) -> Result<Data> {
        self.volume.store.block(block, role)
    }

    /// Changes a block of metadata.
    pub(crate) fn change<T>(
        &mut self,
        block: FsBlock,
        role: Role,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        self.writer.touched = true;
        self.writer.batch.dirty = true;
        let overlay = &self.volume.store.overlay;
        let mut blocks = overlay.change();
        if let Some(buffer) = blocks.metadata.get_mut(&block.0) {
            if !buffer.is_dirty() {
                self.writer.batch.blocks.push(block.0);
            }
            return Ok(change(buffer.change()));
        }
        drop(blocks);
        let now = self.volume.store.block(block, role)?;
        self.writer.batch.blocks.push(block.0);
        let mut buffer = Buffer { now, state: State::Clean, role, sealed: 0 };
        let done = change(buffer.change());
        let mut blocks = overlay.change();
        blocks.drop_block(block);
        blocks.metadata.insert(block.0, buffer);
        Ok(done)
    }

    /// A block of metadata that is new, all zeros.
    pub(crate) fn fresh(&mut self, block: FsBlock, role: Role) {
        let zeros = vec![0; index(self.volume.super_.block_bytes.into())];
        self.put_fresh(block, role, zeros);
    }

    /// A block of metadata that is new.
    pub(crate) fn put_fresh(&mut self, block: FsBlock, role: Role, bytes: Vec<u8>) {
        self.writer.touched = true;
        self.writer.batch.dirty = true;
        let mut blocks = self.volume.store.overlay.change();
        blocks.drop_block(block);
        let now = Data::owned(bytes.into_boxed_slice());
        blocks.metadata.insert(block.0, Buffer { now, state: State::Fresh, role, sealed: 0 });
        self.writer.batch.blocks.push(block.0);
    }

    /// An inode in use.
    pub(crate) fn node(&self, inode: InodeNumber) -> Result<Arc<Inode>> {
        self.volume.node(inode)
    }

    pub(crate) fn directory(&self, inode: InodeNumber) -> Result<Arc<Inode>> {
        self.volume.directory(inode)
    }

    /// The block that an inode is in, and where in that block.
    pub(crate) fn place(&self, inode: InodeNumber) -> Result<(FsBlock, usize)> {
        let super_ = &self.volume.super_;
        if inode.0 > super_.inodes {
            return Err(Error::NotFound);
        }
        let (group, nth) = self.writer.groups.place_of_inode(inode).ok_or(Error::NotFound)?;
        let table = self.writer.groups.get(group).ok_or(Error::NotFound)?.table;
        let at = u64::from(nth) * u64::from(super_.inode_bytes);
        let block_bytes = u64::from(super_.block_bytes);
        Ok((table.after(at / block_bytes), index(at % block_bytes)))
    }

    /// Reads fields of an inode, whether it is in use or not.
    pub(crate) fn read_slot<T>(
        &self,
        inode: InodeNumber,
        read: impl FnOnce(&Slot<'_>) -> T,
    ) -> Result<T> {
        let (block, at) = self.place(inode)?;
        let block = self.block(block, Role::Inodes).map_err(|error| error.of_inode(inode))?;
        let end = at + index(self.volume.super_.inode_bytes.into());
        let mut bytes = block.get(at..end).unwrap_or_default().to_vec();
        Ok(read(&Slot::of(&mut bytes)?))
    }

    /// Changes fields of an inode.
    pub(crate) fn change_slot<T>(
        &mut self,
        inode: InodeNumber,
        change: impl FnOnce(&mut Slot<'_>) -> T,
    ) -> Result<T> {
        let (block, at) = self.place(inode)?;
        let end = at + index(self.volume.super_.inode_bytes.into());
        let done = self.change(block, Role::Inodes, |bytes| {
            Slot::of(bytes.get_mut(at..end).unwrap_or_default()).map(|mut slot| change(&mut slot))
        });
        self.volume.inodes.forget(inode.0);
        self.writer.batch.inodes.insert(inode.0);
        done?
    }

    /// Sets times to now.
    pub(crate) fn stamp(&mut self, inode: InodeNumber, which: &[Stamp]) -> Result<()> {
        let now = self.now;
        self.change_slot(inode, |it| which.iter().for_each(|stamp| it.set_time(*stamp, now)))
    }

    /// Forgets cached contents of a file from byte `from` up to `end`.
    pub(crate) fn forget_contents(&self, inode: InodeNumber, from: u64, end: u64) {
        let chunks = from / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        self.volume.store.forget_chunks(inode.0, chunks);
    }

    /// Whether the disk knows this inode as living.
    pub(crate) fn is_old(&self, inode: InodeNumber) -> bool {
        self.writer.batch.is_old(inode)
    }

    /// Whether blocks for this inode may be those kept for the superuser.
    pub(crate) fn is_privileged(&self, uid: u32) -> bool {
        uid == self.volume.super_.reserved_uid
    }
}
