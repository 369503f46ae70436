//! The hands of every change: blocks and inodes, read as they are now and changed in place.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with places of inodes inside their checked tables"
)]

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use draconis_exchange::contract::Time;
use parking_lot::{Mutex, RwLock};

use crate::alloc::Groups;
use crate::blocks::CHUNK_BYTES;
use crate::blocks::data::Data;
use crate::blocks::overlay::{Buffer, State};
use crate::blocks::role::Role;
use crate::claim::Claim;
use crate::commit::batch::Batch;
use crate::commit::gathering::Gathering;
use crate::commit::outbox::Outbox;
use crate::commit::protocol::Protocol;
use crate::format::inode::{self, Inode};
use crate::format::slot::{Slot, Stamp};
use crate::ops::Writing;
use crate::ops::accesses::Accesses;
use crate::quota::Quotas;
use crate::takeover::{Made, Witness};
use crate::units::index;
use crate::volume::Volume;
use crate::{Error, FileId, FsBlock, GroupNumber, InodeNumber, Result};

/// Why nothing is written any more.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    /// The volume was closed.
    Closed,
    /// This went wrong.
    Failed(String),
}

/// What a volume has that is written.
pub(crate) struct WriteSide {
    /// Changes hold it alone, reads share it.
    pub(crate) gate: RwLock<Writer>,
    pub(crate) outbox: Outbox,
    pub(crate) gathering: Gathering,
    /// Bytes that may be changed in memory.
    pub(crate) dirty_limit: u64,
    pub(crate) clock: Arc<dyn Fn() -> Time + Send + Sync>,
    pub(crate) accesses: Accesses,
    /// Whether the disk is told what was freed.
    pub(crate) discard: bool,
    /// Whether [`Writer::stopped`] says why nothing is written.
    stopped: Arc<AtomicBool>,
    /// What is told when something changes while nothing waits to be committed.
    pub(crate) on_first_change: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// Called between tries of a change that finds no room.
    pub(crate) on_no_room: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Called when contents are sealed that a thread of its own sends.
    pub(crate) on_contents: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// What is told of every change.
    pub(crate) witness: OnceLock<Arc<dyn Witness>>,
    /// That this host alone uses the volume, where others can reach it.
    pub(crate) claim: Option<Claim>,
}

impl WriteSide {
    pub(crate) fn new(writer: Writer, outbox: Outbox, writing: Writing) -> Self {
        Self {
            stopped: writer.is_stopped.clone(),
            gate: RwLock::new(writer),
            outbox,
            gathering: Gathering::default(),
            dirty_limit: writing.dirty_bytes,
            clock: writing.clock,
            accesses: Accesses::new(writing.atime),
            discard: writing.discard,
            on_first_change: Mutex::default(),
            on_no_room: OnceLock::new(),
            on_contents: OnceLock::new(),
            witness: OnceLock::new(),
            claim: None,
        }
    }

    /// Whether nothing is written any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Says that something waits to be committed.
    pub(crate) fn tell(&self) {
        if let Some(tell) = &*self.on_first_change.lock() {
            tell();
        }
    }
}

impl std::fmt::Debug for WriteSide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { gate, outbox, accesses, .. } = self;
        f.debug_struct("WriteSide")
            .field("gate", gate)
            .field("outbox", outbox)
            .field("accesses", accesses)
            .finish_non_exhaustive()
    }
}

/// The state of a volume that is written. Who changes holds it alone; who reads shares it.
pub(crate) struct Writer {
    pub(crate) dirty_limit: u64,
    pub(crate) groups: Groups,
    pub(crate) quotas: Quotas,
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
    stopped: Option<Stop>,
    /// Says the same to those without the gate.
    is_stopped: Arc<AtomicBool>,
    /// The volume was unmounted properly before.
    pub(crate) was_clean: bool,
    /// The disk has been told that it is in use.
    pub(crate) marked: bool,
    /// Where the search for a group of a new top directory starts.
    pub(crate) turn: u32,
    /// Tells inodes apart that had the same number.
    pub(crate) generation: u32,
    /// Inodes without names and users that are deleted after the change in hand.
    pub(crate) dying: Vec<u32>,
    /// Where a name was last put into a directory without an index.
    pub(crate) hints: HashMap<u32, u32>,
    /// Something in memory differs from before the change in hand.
    pub(crate) touched: bool,
    /// Changes that were made.
    pub(crate) changes: u64,
    /// The last change that is in the batch that is being sealed.
    pub(crate) sealing: u64,
    /// All of the change in hand is made.
    pub(crate) is_whole: bool,
    /// The inode that the change in hand made.
    pub(crate) made: Option<FileId>,
    /// The inode whose name the change in hand moves.
    pub(crate) moved: Option<InodeNumber>,
    /// What the change in hand is the repetition of.
    pub(crate) repeated: Option<Made>,
    /// Users that are not counted here may have any inode.
    pub(crate) taken_over: bool,
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
        writing: &Writing,
        clean: bool,
    ) -> Self {
        Self {
            generation: (writing.clock)().nanoseconds,
            dirty_limit: writing.dirty_bytes,
            groups,
            quotas: Quotas::default(),
            batch: Batch::default(),
            protocol,
            landed: 0,
            users: HashMap::new(),
            listed: vec![],
            unnamed: HashSet::new(),
            stopped: None,
            is_stopped: Arc::default(),
            was_clean: clean,
            marked: false,
            turn: 0,
            dying: vec![],
            hints: HashMap::new(),
            touched: false,
            changes: 0,
            sealing: 0,
            is_whole: false,
            made: None,
            moved: None,
            repeated: None,
            taken_over: false,
        }
    }

    /// Free blocks and inodes.
    pub(crate) fn free(&self) -> (u64, u64) {
        (self.groups.free_blocks(), self.groups.free_inodes)
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
            self.set_stopped(Some(Stop::Failed(why.to_string())));
        }
    }

    pub(crate) fn stopped(&self) -> Option<&Stop> {
        self.stopped.as_ref()
    }

    pub(crate) fn set_stopped(&mut self, stopped: Option<Stop>) {
        self.is_stopped.store(stopped.is_some(), Ordering::Release);
        self.stopped = stopped;
    }
}

/// What came of trying a change.
enum Attempt<T> {
    /// This, and whether it leaves inodes that are to be deleted.
    Done(Result<T>, bool),
    /// Nothing: it must see this block.
    Misses(FsBlock, Role),
}

/// A change in hand.
pub(crate) struct Transaction<'a> {
    pub(crate) volume: &'a Volume,
    pub(crate) writer: &'a mut Writer,
    pub(crate) now: Time,
    /// Blocks may be read from the device.
    pub(crate) may_wait: bool,
    /// The block that could not be had without.
    pub(crate) missing: Cell<Option<(FsBlock, Role)>>,
    /// It follows from other changes, and is made again by itself.
    pub(crate) follows: bool,
}

/// Blocks that a change may miss, one after the other, before it reads with the gate held: a
/// cache that is smaller than what one change looks at never has all of them.
const MOST_MISSING: u32 = 64;

impl Volume {
    /// Makes one change, alone. It is tried with what is in memory; what it misses is read
    /// without the gate, and it is tried again, as long as it has not changed anything.
    pub(crate) fn transact<T>(
        &self,
        change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        self.transact_and_send(change, false)
    }

    /// [`Volume::transact`]; what the change seals is sent, and with `and_wait` durable in the
    /// same message.
    pub(crate) fn transact_and_send<T>(
        &self,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
        and_wait: bool,
    ) -> Result<T> {
        let mut missed = 0;
        let mut may_wait = false;
        loop {
            match self.attempt(&mut change, may_wait) {
                // Nothing is written any more.
                Attempt::Done(Err(Error::ReadOnly), _) => return Err(Error::ReadOnly),
                Attempt::Done(done, leaves_dying) => {
                    self.after_change(and_wait)?;
                    if leaves_dying {
                        self.end_deletions()?;
                    }
                    return done;
                }
                Attempt::Misses(block, role) => {
                    missed += 1;
                    let read = self.store.block(block, role);
                    // What cannot be read is an answer in its place.
                    may_wait = missed >= MOST_MISSING || read.is_err();
                }
            }
        }
    }

    fn attempt<T>(
        &self,
        change: &mut impl FnMut(&mut Transaction<'_>) -> Result<T>,
        may_wait: bool,
    ) -> Attempt<T> {
        let Some(writing) = &self.writing else {
            return Attempt::Done(Err(Error::ReadOnly), false);
        };
        let mut writer = writing.gate.write();
        if writer.stopped().is_some() {
            return Attempt::Done(Err(Error::ReadOnly), false);
        }
        (writer.touched, writer.is_whole) = (false, false);
        (writer.made, writer.moved) = (None, None);
        let was_dirty = writer.batch.dirty;
        let now = writer.repeated.map_or_else(|| (writing.clock)(), |it| it.now);
        let missing = Cell::new(None);
        let (volume, follows) = (self, false);
        let mut tx = Transaction { volume, writer: &mut writer, now, may_wait, missing, follows };
        let mut done = change(&mut tx);
        if let Some((block, role)) = tx.missing.get() {
            return Attempt::Misses(block, role);
        }
        if done.is_ok() {
            // Before it can be in a chain, which other threads send.
            tx.bear_witness();
            tx.writer.is_whole = true;
            if let Err(error) = tx.keep_bounds() {
                done = Err(error);
            }
        }
        if let Err(error) = &done
            && writer.touched
        {
            if let Some(witness) = writing.witness.get() {
                witness.record_partial_failure();
            }
            writer.stop(error);
        }
        if let Err(error) = &done
            && writer.failure().is_some()
        {
            self.record_failure(&mut writer, error);
        }
        if writer.touched {
            writer.changes = writer.changes.wrapping_add(1);
            if !was_dirty {
                writing.tell();
            }
        }
        Attempt::Done(done, !writer.dying.is_empty())
    }
}

impl Transaction<'_> {
    /// Tells the change to the witness.
    pub(crate) fn bear_witness(&self) {
        let witness = self.volume.writing.as_ref().and_then(|writing| writing.witness.get());
        if let Some(witness) = witness.filter(|_| self.writer.touched && !self.follows) {
            let Writer { made: inode, moved, .. } = *self.writer;
            let made = Made { now: self.now, inode, moved };
            witness.record_change(self.writer.changes.wrapping_add(1), made);
        }
    }

    /// A block as it is now.
    pub(crate) fn block(&self, block: FsBlock, role: Role) -> Result<Data> {
        // What has begun is ended, whatever must be read for it.
        if self.may_wait || self.writer.touched {
            return self.volume.store.block(block, role);
        }
        if self.missing.get().is_none() {
            if let Some(bytes) = self.volume.store.block_in_memory(block) {
                return Ok(bytes);
            }
            self.missing.set(Some((block, role)));
        }
        Err(Error::Misuse("a block that is not in memory"))
    }

    /// Sees to it that the inode can be had without the device.
    fn have_inode(&self, inode: InodeNumber) -> Result<()> {
        if self.volume.inodes.holds(inode.0) {
            return Ok(());
        }
        let (block, _) = self.place(inode)?;
        let group = GroupNumber((inode.0 - 1) / self.volume.super_.inodes_per_group);
        let (descriptor, _) = self.volume.super_.descriptor_place(group);
        self.block(descriptor, Role::Descriptors)?;
        self.block(block, Role::Inodes).map(drop)
    }

    /// Changes a block of metadata.
    pub(crate) fn change<T>(
        &mut self,
        block: FsBlock,
        role: Role,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        if self.missing.get().is_some() {
            return Err(Error::Misuse("a change without all that it must see"));
        }
        let overlay = &self.volume.store.overlay;
        let mut blocks = overlay.change();
        if !blocks.metadata.contains_key(&block.0) {
            drop(blocks);
            // Before anything changes.
            self.block(block, role)?;
            blocks = overlay.change();
        }
        self.writer.touched = true;
        self.writer.batch.dirty = true;
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
        if let Some(node) = self.volume.inodes.peek(inode.0) {
            return Ok(node);
        }
        self.have_inode(inode)?;
        self.volume.node(inode)
    }

    pub(crate) fn directory(&self, inode: InodeNumber) -> Result<Arc<Inode>> {
        self.node(inode)?.as_directory()
    }

    /// An inode, in use or not.
    pub(crate) fn peek(&self, inode: InodeNumber) -> Result<Inode> {
        let (block, at) = self.place(inode)?;
        let block = self.block(block, Role::Inodes).map_err(|error| error.of_inode(inode))?;
        let len = index(self.volume.super_.inode_bytes.into());
        Inode::of_slot(&block.slice(at..at + len), inode, &self.volume.super_)
    }

    /// The block that an inode is in, and where in that block.
    pub(crate) fn place(&self, inode: InodeNumber) -> Result<(FsBlock, usize)> {
        let super_ = &self.volume.super_;
        if inode.0 > super_.inodes {
            return Err(Error::NotFound);
        }
        let (group, nth) = self.writer.groups.place_of_inode(inode).ok_or(Error::NotFound)?;
        let table = self.writer.groups.get(group).ok_or(Error::NotFound)?.said.inode_table;
        let at = u64::from(nth) * u64::from(super_.inode_bytes);
        let block_bytes = u64::from(super_.block_bytes);
        Ok((table.after(at / block_bytes), index(at % block_bytes)))
    }

    /// The role of a block of a directory.
    pub(crate) fn directory_role(&self, dir: InodeNumber) -> Result<Role> {
        self.file_id(dir).map(Role::Directory)
    }

    /// The role of a block of the map of an inode.
    pub(crate) fn map_role(&self, inode: InodeNumber) -> Result<Role> {
        self.file_id(inode).map(Role::Map)
    }

    /// The file that has an inode now.
    pub(crate) fn file_id(&self, inode: InodeNumber) -> Result<FileId> {
        let node = self.volume.inodes.peek(inode.0);
        let generation = match node {
            Some(node) => node.generation(),
            None => self.read_slot(inode, |it| it.generation())?,
        };
        Ok(FileId { inode: inode.0, generation })
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
        number: InodeNumber,
        change: impl FnOnce(&mut Slot<'_>) -> T,
    ) -> Result<T> {
        let (block, at) = self.place(number)?;
        let end = at + index(self.volume.super_.inode_bytes.into());
        let super_ = &self.volume.super_;
        let done = self.change(block, Role::Inodes, |bytes| {
            let bytes = bytes.get_mut(at..end).unwrap_or_default();
            let mut slot = Slot::of(bytes)?;
            let done = change(&mut slot);
            let is_nameless = slot.is_nameless();
            inode::seal(bytes, number, super_);
            Ok::<_, Error>((done, is_nameless))
        });
        self.volume.inodes.forget(number.0);
        self.writer.batch.inodes.insert(number.0);
        let (done, is_nameless) = done??;
        if is_nameless {
            self.tell_nameless(number);
        }
        Ok(done)
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
