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
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::commit::batch::Batch;
use crate::commit::group_commit::GroupCommit;
use crate::commit::protocol::CommitProtocol;
use crate::commit::queue::CommitQueue;
use crate::format::inode::{self, Inode};
use crate::format::inode_slot::{InodeSlot, InodeTime};
use crate::mmp::MmpClaim;
use crate::ops::WriteOptions;
use crate::ops::access_times::PendingAccessTimes;
use crate::quota::Quotas;
use crate::resume::{ChangeRecord, ChangeRecorder};
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{Error, FileId, FsBlock, GroupNumber, InodeNumber, Result};

/// Why nothing is written any more.
#[derive(Clone, Debug)]
pub(crate) enum StopReason {
    /// The volume was closed.
    Closed,
    /// This went wrong.
    Failed(String),
}

/// What a volume has that is written.
pub(crate) struct WriteContext {
    /// Changes hold it alone, reads share it.
    pub(crate) state: RwLock<WriteState>,
    pub(crate) commit_queue: CommitQueue,
    pub(crate) gathering: GroupCommit,
    /// Bytes that may be changed in memory.
    pub(crate) dirty_limit: u64,
    pub(crate) clock: Arc<dyn Fn() -> Time + Send + Sync>,
    pub(crate) pending_access_times: PendingAccessTimes,
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
    pub(crate) change_recorder: OnceLock<Arc<dyn ChangeRecorder>>,
    /// That this host alone uses the volume, where others can reach it.
    pub(crate) claim: Option<MmpClaim>,
}

impl WriteContext {
    pub(crate) fn new(writer: WriteState, outbox: CommitQueue, writing: WriteOptions) -> Self {
        Self {
            stopped: writer.is_stopped.clone(),
            state: RwLock::new(writer),
            commit_queue: outbox,
            gathering: GroupCommit::default(),
            dirty_limit: writing.dirty_bytes,
            clock: writing.clock,
            pending_access_times: PendingAccessTimes::new(writing.atime),
            discard: writing.discard,
            on_first_change: Mutex::default(),
            on_no_room: OnceLock::new(),
            on_contents: OnceLock::new(),
            change_recorder: OnceLock::new(),
            claim: None,
        }
    }

    /// Whether nothing is written any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Says that something waits to be committed.
    pub(crate) fn notify_first_change(&self) {
        if let Some(tell) = &*self.on_first_change.lock() {
            tell();
        }
    }
}

impl std::fmt::Debug for WriteContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { state: gate, commit_queue: outbox, pending_access_times: accesses, .. } = self;
        f.debug_struct("WriteSide")
            .field("gate", gate)
            .field("outbox", outbox)
            .field("accesses", accesses)
            .finish_non_exhaustive()
    }
}

/// The state of a volume that is written. Who changes holds it alone; who reads shares it.
pub(crate) struct WriteState {
    pub(crate) dirty_limit: u64,
    pub(crate) groups: Groups,
    pub(crate) quotas: Quotas,
    pub(crate) batch: Batch,
    pub(crate) protocol: Box<dyn CommitProtocol>,
    /// Readers of the disk see every chain up to this one.
    pub(crate) visible_chain: u64,
    /// Users of inodes; what has no name lives for as long as it has some.
    pub(crate) users: HashMap<u32, u64>,
    /// Orphans that the volume lists, the last one first on it.
    pub(crate) orphan_list: Vec<u32>,
    /// Orphans that never had a name and may get one.
    pub(crate) tmpfiles: HashSet<u32>,
    stopped: Option<StopReason>,
    /// Says the same to those without the gate.
    is_stopped: Arc<AtomicBool>,
    /// The volume was unmounted properly before.
    pub(crate) was_clean: bool,
    /// The disk has been told that it is in use.
    pub(crate) is_marked_in_use: bool,
    /// Where the search for a group of a new top directory starts.
    pub(crate) next_top_dir_group: u32,
    /// Tells inodes apart that had the same number.
    pub(crate) generation: u32,
    /// Inodes without names and users that are deleted after the change in hand.
    pub(crate) pending_deletions: Vec<u32>,
    /// Where a name was last put into a directory without an index.
    pub(crate) insert_hints: HashMap<u32, u32>,
    /// Something in memory differs from before the change in hand.
    pub(crate) is_modified: bool,
    /// Changes that were made.
    pub(crate) change_count: u64,
    /// The last change that is in the batch that is being sealed.
    pub(crate) batch_change: u64,
    /// All of the change in hand is made.
    pub(crate) is_change_complete: bool,
    /// The inode that the change in hand made.
    pub(crate) created_inode: Option<FileId>,
    /// The inode whose name the change in hand moves.
    pub(crate) renamed_inode: Option<InodeNumber>,
    /// What the change in hand is the repetition of.
    pub(crate) replaying: Option<ChangeRecord>,
    /// Users that are not counted here may have any inode.
    pub(crate) is_resumed: bool,
}

impl std::fmt::Debug for WriteState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl WriteState {
    pub(crate) fn new(
        protocol: Box<dyn CommitProtocol>,
        groups: Groups,
        writing: &WriteOptions,
        clean: bool,
    ) -> Self {
        Self {
            generation: (writing.clock)().nanoseconds,
            dirty_limit: writing.dirty_bytes,
            groups,
            quotas: Quotas::default(),
            batch: Batch::default(),
            protocol,
            visible_chain: 0,
            users: HashMap::new(),
            orphan_list: vec![],
            tmpfiles: HashSet::new(),
            stopped: None,
            is_stopped: Arc::default(),
            was_clean: clean,
            is_marked_in_use: false,
            next_top_dir_group: 0,
            pending_deletions: vec![],
            insert_hints: HashMap::new(),
            is_modified: false,
            change_count: 0,
            batch_change: 0,
            is_change_complete: false,
            created_inode: None,
            renamed_inode: None,
            replaying: None,
            is_resumed: false,
        }
    }

    /// Free blocks and inodes.
    pub(crate) fn free(&self) -> (u64, u64) {
        (self.groups.free_blocks(), self.groups.free_inodes)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        match &self.stopped {
            Some(StopReason::Failed(why)) => Some(why.clone()),
            Some(StopReason::Closed) | None => None,
        }
    }

    pub(crate) fn stop(&mut self, why: &Error) {
        if self.stopped.is_none() {
            log::error!("{why}: the volume is read-only from now on");
            self.set_stopped(Some(StopReason::Failed(why.to_string())));
        }
    }

    pub(crate) fn stopped(&self) -> Option<&StopReason> {
        self.stopped.as_ref()
    }

    pub(crate) fn set_stopped(&mut self, stopped: Option<StopReason>) {
        self.is_stopped.store(stopped.is_some(), Ordering::Release);
        self.stopped = stopped;
    }
}

/// What came of trying a change.
enum Attempt<T> {
    /// This, and whether it leaves inodes that are to be deleted.
    Done(Result<T>, bool),
    /// Nothing: it must see this block.
    NeedsBlock(FsBlock, Role),
}

/// A change in hand.
pub(crate) struct Transaction<'a> {
    pub(crate) volume: &'a Volume,
    pub(crate) writer: &'a mut WriteState,
    pub(crate) now: Time,
    /// Blocks may be read from the device.
    pub(crate) may_block: bool,
    /// The block that could not be had without.
    pub(crate) missing_block: Cell<Option<(FsBlock, Role)>>,
    /// It follows from other changes, and is made again by itself.
    pub(crate) is_internal: bool,
}

/// Blocks that a change may miss, one after the other, before it reads with the gate held: a
/// cache that is smaller than what one change looks at never has all of them.
const MAX_READ_RETRIES: u32 = 64;

impl Volume {
    /// Makes one change, alone. It is tried with what is in memory; what it misses is read
    /// without the gate, and it is tried again, as long as it has not changed anything.
    pub(crate) fn transact<T>(
        &self,
        change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        self.transact_and_write_out(change, false)
    }

    /// [`Volume::transact`]; what the change seals is sent, and with `and_wait` durable in the
    /// same message.
    pub(crate) fn transact_and_write_out<T>(
        &self,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
        and_wait: bool,
    ) -> Result<T> {
        let mut missed = 0;
        let mut may_wait = false;
        loop {
            match self.try_transact(&mut change, may_wait) {
                // Nothing is written any more.
                Attempt::Done(Err(Error::ReadOnly), _) => return Err(Error::ReadOnly),
                Attempt::Done(done, leaves_dying) => {
                    self.write_out_after_change(and_wait)?;
                    if leaves_dying {
                        self.delete_pending()?;
                    }
                    return done;
                }
                Attempt::NeedsBlock(block, role) => {
                    missed += 1;
                    let read = self.store.block(block, role);
                    // What cannot be read is an answer in its place.
                    may_wait = missed >= MAX_READ_RETRIES || read.is_err();
                }
            }
        }
    }

    fn try_transact<T>(
        &self,
        change: &mut impl FnMut(&mut Transaction<'_>) -> Result<T>,
        may_wait: bool,
    ) -> Attempt<T> {
        let Some(writing) = &self.writing else {
            return Attempt::Done(Err(Error::ReadOnly), false);
        };
        let mut writer = writing.state.write();
        if writer.stopped().is_some() {
            return Attempt::Done(Err(Error::ReadOnly), false);
        }
        (writer.is_modified, writer.is_change_complete) = (false, false);
        (writer.created_inode, writer.renamed_inode) = (None, None);
        let was_dirty = writer.batch.dirty;
        let now = writer.replaying.map_or_else(|| (writing.clock)(), |it| it.now);
        let missing = Cell::new(None);
        let (volume, follows) = (self, false);
        let mut tx = Transaction {
            volume,
            writer: &mut writer,
            now,
            may_block: may_wait,
            missing_block: missing,
            is_internal: follows,
        };
        let mut done = change(&mut tx);
        if let Some((block, role)) = tx.missing_block.get() {
            return Attempt::NeedsBlock(block, role);
        }
        if done.is_ok() {
            // Before it can be in a chain, which other threads send.
            tx.record_change();
            tx.writer.is_change_complete = true;
            if let Err(error) = tx.enforce_batch_limits() {
                done = Err(error);
            }
        }
        if let Err(error) = &done
            && writer.is_modified
        {
            if let Some(witness) = writing.change_recorder.get() {
                witness.record_partial_failure();
            }
            writer.stop(error);
        }
        if let Err(error) = &done
            && writer.failure().is_some()
        {
            self.record_failure(&mut writer, error);
        }
        if writer.is_modified {
            writer.change_count = writer.change_count.wrapping_add(1);
            if !was_dirty {
                writing.notify_first_change();
            }
        }
        Attempt::Done(done, !writer.pending_deletions.is_empty())
    }
}

impl Transaction<'_> {
    /// Tells the change to the witness.
    pub(crate) fn record_change(&self) {
        let witness =
            self.volume.writing.as_ref().and_then(|writing| writing.change_recorder.get());
        if let Some(witness) = witness.filter(|_| self.writer.is_modified && !self.is_internal) {
            let WriteState { created_inode: inode, renamed_inode: moved, .. } = *self.writer;
            let made = ChangeRecord { now: self.now, inode, renamed_inode: moved };
            witness.record_change(self.writer.change_count.wrapping_add(1), made);
        }
    }

    /// A block as it is now.
    pub(crate) fn block(&self, block: FsBlock, role: Role) -> Result<SharedBytes> {
        // What has begun is ended, whatever must be read for it.
        if self.may_block || self.writer.is_modified {
            return self.volume.store.block(block, role);
        }
        if self.missing_block.get().is_none() {
            if let Some(bytes) = self.volume.store.block_in_memory(block) {
                return Ok(bytes);
            }
            self.missing_block.set(Some((block, role)));
        }
        Err(Error::Misuse("a block that is not in memory"))
    }

    /// Sees to it that the inode can be had without the device.
    fn preload_inode(&self, inode: InodeNumber) -> Result<()> {
        if self.volume.inodes.contains(inode.0) {
            return Ok(());
        }
        let (block, _) = self.inode_location(inode)?;
        let group = GroupNumber((inode.0 - 1) / self.volume.super_.inodes_per_group);
        let (descriptor, _) = self.volume.super_.descriptor_location(group);
        self.block(descriptor, Role::Descriptors)?;
        self.block(block, Role::InodeTable).map(drop)
    }

    /// Changes a block of metadata.
    pub(crate) fn modify_block<T>(
        &mut self,
        block: FsBlock,
        role: Role,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        if self.missing_block.get().is_some() {
            return Err(Error::Misuse("a change without all that it must see"));
        }
        let overlay = &self.volume.store.write_back;
        let mut blocks = overlay.write();
        if !blocks.metadata.contains_key(&block.0) {
            drop(blocks);
            // Before anything changes.
            self.block(block, role)?;
            blocks = overlay.write();
        }
        self.writer.is_modified = true;
        self.writer.batch.dirty = true;
        if let Some(buffer) = blocks.metadata.get_mut(&block.0) {
            if !buffer.is_dirty() {
                self.writer.batch.blocks.push(block.0);
            }
            return Ok(change(buffer.make_dirty()));
        }
        drop(blocks);
        let now = self.volume.store.block(block, role)?;
        self.writer.batch.blocks.push(block.0);
        let mut buffer = Buffer { current: now, state: BufferState::Clean, role, chain_number: 0 };
        let done = change(buffer.make_dirty());
        let mut blocks = overlay.write();
        blocks.drop_block(block);
        blocks.metadata.insert(block.0, buffer);
        Ok(done)
    }

    /// A block of metadata that is new, all zeros.
    pub(crate) fn new_block(&mut self, block: FsBlock, role: Role) {
        let zeros = vec![0; saturating_usize(self.volume.super_.block_bytes.into())];
        self.put_new_block(block, role, zeros);
    }

    /// A block of metadata that is new.
    pub(crate) fn put_new_block(&mut self, block: FsBlock, role: Role, bytes: Vec<u8>) {
        self.writer.is_modified = true;
        self.writer.batch.dirty = true;
        let mut blocks = self.volume.store.write_back.write();
        blocks.drop_block(block);
        let now = SharedBytes::owned(bytes.into_boxed_slice());
        blocks.metadata.insert(
            block.0,
            Buffer { current: now, state: BufferState::New, role, chain_number: 0 },
        );
        self.writer.batch.blocks.push(block.0);
    }

    /// An inode in use.
    pub(crate) fn node(&self, inode: InodeNumber) -> Result<Arc<Inode>> {
        if let Some(node) = self.volume.inodes.peek(inode.0) {
            return Ok(node);
        }
        self.preload_inode(inode)?;
        self.volume.node(inode)
    }

    pub(crate) fn directory(&self, inode: InodeNumber) -> Result<Arc<Inode>> {
        self.node(inode)?.as_directory()
    }

    /// An inode, in use or not.
    pub(crate) fn read_inode_unchecked(&self, inode: InodeNumber) -> Result<Inode> {
        let (block, at) = self.inode_location(inode)?;
        let block = self.block(block, Role::InodeTable).map_err(|error| error.of_inode(inode))?;
        let len = saturating_usize(self.volume.super_.inode_bytes.into());
        Inode::parse_used(&block.slice(at..at + len), inode, &self.volume.super_)
    }

    /// The block that an inode is in, and where in that block.
    pub(crate) fn inode_location(&self, inode: InodeNumber) -> Result<(FsBlock, usize)> {
        let super_ = &self.volume.super_;
        if inode.0 > super_.inodes {
            return Err(Error::NotFound);
        }
        let (group, nth) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        let table = self.writer.groups.get(group).ok_or(Error::NotFound)?.descriptor.inode_table;
        let at = u64::from(nth) * u64::from(super_.inode_bytes);
        let block_bytes = u64::from(super_.block_bytes);
        Ok((table.offset(at / block_bytes), saturating_usize(at % block_bytes)))
    }

    /// The role of a block of a directory.
    pub(crate) fn directory_role(&self, dir: InodeNumber) -> Result<Role> {
        self.file_id(dir).map(Role::Directory)
    }

    /// The role of a block of the map of an inode.
    pub(crate) fn map_role(&self, inode: InodeNumber) -> Result<Role> {
        self.file_id(inode).map(Role::IndirectBlock)
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
        read: impl FnOnce(&InodeSlot<'_>) -> T,
    ) -> Result<T> {
        let (block, at) = self.inode_location(inode)?;
        let block = self.block(block, Role::InodeTable).map_err(|error| error.of_inode(inode))?;
        let end = at + saturating_usize(self.volume.super_.inode_bytes.into());
        let mut bytes = block.get(at..end).unwrap_or_default().to_vec();
        Ok(read(&InodeSlot::of(&mut bytes)?))
    }

    /// Changes fields of an inode.
    pub(crate) fn change_slot<T>(
        &mut self,
        number: InodeNumber,
        change: impl FnOnce(&mut InodeSlot<'_>) -> T,
    ) -> Result<T> {
        let (block, at) = self.inode_location(number)?;
        let end = at + saturating_usize(self.volume.super_.inode_bytes.into());
        let super_ = &self.volume.super_;
        let done = self.modify_block(block, Role::InodeTable, |bytes| {
            let bytes = bytes.get_mut(at..end).unwrap_or_default();
            let mut slot = InodeSlot::of(bytes)?;
            let done = change(&mut slot);
            let is_nameless = slot.is_unlisted_orphan();
            inode::set_checksum(bytes, number, super_);
            Ok::<_, Error>((done, is_nameless))
        });
        self.volume.inodes.remove(number.0);
        self.writer.batch.inodes.insert(number.0);
        let (done, is_nameless) = done??;
        if is_nameless {
            self.record_orphan(number);
        }
        Ok(done)
    }

    /// Sets times to now.
    pub(crate) fn set_times_now(&mut self, inode: InodeNumber, which: &[InodeTime]) -> Result<()> {
        let now = self.now;
        self.change_slot(inode, |it| which.iter().for_each(|stamp| it.set_time(*stamp, now)))
    }

    /// Forgets cached contents of a file from byte `from` up to `end`.
    pub(crate) fn invalidate_contents(&self, inode: InodeNumber, from: u64, end: u64) {
        let chunks = from / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        self.volume.store.invalidate_chunks(inode.0, chunks);
    }

    /// Whether the disk knows this inode as living.
    pub(crate) fn is_old(&self, inode: InodeNumber) -> bool {
        self.writer.batch.is_on_disk(inode)
    }

    /// Whether blocks for this inode may be those kept for the superuser.
    pub(crate) fn is_privileged(&self, uid: u32) -> bool {
        uid == self.volume.super_.reserved_uid
    }
}
