//! Transactions: changes to blocks and inodes in memory, under the write lock.

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

use draconis_types::Time;
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

/// Reason why the volume is not written any more.
#[derive(Clone, Debug)]
pub(crate) enum StopReason {
    /// The volume was closed.
    Closed,
    /// An error, with its text.
    Failed(String),
}

/// Everything that a writable volume has.
pub(crate) struct WriteContext {
    /// Write lock: transactions hold it exclusively, readers share it.
    pub(crate) state: RwLock<WriteState>,
    pub(crate) commit_queue: CommitQueue,
    pub(crate) group_commit: GroupCommit,
    /// Limit of dirty data in memory, in bytes.
    pub(crate) dirty_limit: u64,
    pub(crate) clock: Arc<dyn Fn() -> Time + Send + Sync>,
    pub(crate) pending_access_times: PendingAccessTimes,
    /// True if freed blocks are discarded on the disk.
    pub(crate) discard: bool,
    /// Shared with [`WriteState::is_stopped`]: readable without the lock.
    stopped: Arc<AtomicBool>,
    /// Callback for the first change after a commit.
    pub(crate) on_first_change: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// Callback between retries of a change that finds no space.
    pub(crate) on_no_space: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Callback for queued data that a separate thread sends.
    pub(crate) on_queued_contents: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Recorder of every change, for a restarted process.
    pub(crate) change_recorder: OnceLock<Arc<dyn ChangeRecorder>>,
    /// MMP claim, if other hosts can reach the volume.
    pub(crate) claim: Option<MmpClaim>,
}

impl WriteContext {
    pub(crate) fn new(writer: WriteState, outbox: CommitQueue, writing: WriteOptions) -> Self {
        Self {
            stopped: writer.is_stopped.clone(),
            state: RwLock::new(writer),
            commit_queue: outbox,
            group_commit: GroupCommit::default(),
            dirty_limit: writing.dirty_bytes,
            clock: writing.clock,
            pending_access_times: PendingAccessTimes::new(writing.atime),
            discard: writing.discard,
            on_first_change: Mutex::default(),
            on_no_space: OnceLock::new(),
            on_queued_contents: OnceLock::new(),
            change_recorder: OnceLock::new(),
            claim: None,
        }
    }

    /// Returns true if the volume is not written any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Calls the callback for the first change after a commit.
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

/// State of a writable volume. A transaction holds its lock exclusively; readers share it.
pub(crate) struct WriteState {
    pub(crate) dirty_limit: u64,
    pub(crate) groups: Groups,
    pub(crate) quotas: Quotas,
    pub(crate) batch: Batch,
    pub(crate) protocol: Box<dyn CommitProtocol>,
    /// Number of the last chain that is visible to readers of the disk.
    pub(crate) visible_chain: u64,
    /// User counts of open inodes; an orphan is kept while it has users.
    pub(crate) users: HashMap<u32, u64>,
    /// On-disk orphan list, in order of insertion: the last entry is the head on disk.
    pub(crate) orphan_list: Vec<u32>,
    /// `O_TMPFILE` inodes, which may still get a name.
    pub(crate) tmpfiles: HashSet<u32>,
    stopped: Option<StopReason>,
    /// Copy of `stopped` that is readable without the write lock.
    is_stopped: Arc<AtomicBool>,
    /// True if the volume was cleanly unmounted before.
    pub(crate) was_clean: bool,
    /// True if the superblock on disk has the "in use" mark.
    pub(crate) is_marked_in_use: bool,
    /// Group at which the search for a new top directory's group starts.
    pub(crate) next_top_dir_group: u32,
    /// Generation for new inodes: distinguishes files that reuse an inode number.
    pub(crate) generation: u32,
    /// Orphans without users, to be deleted after the current change.
    pub(crate) pending_deletions: Vec<u32>,
    /// Block of the last insert, for directories without an index.
    pub(crate) insert_hints: HashMap<u32, u32>,
    /// True if the current change modified anything in memory.
    pub(crate) is_modified: bool,
    /// Number of changes made.
    pub(crate) change_count: u64,
    /// Number of the last change in the batch that is being closed.
    pub(crate) batch_change: u64,
    /// True once the current change is complete.
    pub(crate) is_change_complete: bool,
    /// Inode created by the current change.
    pub(crate) created_inode: Option<FileId>,
    /// Inode renamed by the current change.
    pub(crate) renamed_inode: Option<InodeNumber>,
    /// Record that the current change replays.
    pub(crate) replaying: Option<ChangeRecord>,
    /// The volume was resumed after a crash: clients of the old process may still hold any inode
    /// open.
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

    /// Returns the numbers of free blocks and inodes.
    pub(crate) fn free_counts(&self) -> (u64, u64) {
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

/// Outcome of one try of a change.
enum Attempt<T> {
    /// The result, and true if orphans are to be deleted.
    Done(Result<T>, bool),
    /// The change needs this block from the device.
    NeedsBlock(FsBlock, Role),
}

/// One change of the volume, applied in memory while the write lock is held.
pub(crate) struct Transaction<'a> {
    pub(crate) volume: &'a Volume,
    pub(crate) writer: &'a mut WriteState,
    pub(crate) now: Time,
    /// True if the transaction may read from the device.
    pub(crate) may_block: bool,
    /// First block that the change needs and the cache lacks; the caller reads it and retries.
    pub(crate) missing_block: Cell<Option<(FsBlock, Role)>>,
    /// The transaction follows from recorded changes; a replay repeats it without a record.
    pub(crate) is_internal: bool,
}

/// Retries before a change reads under the write lock: a cache smaller than the change's working
/// set would never hold all its blocks.
const MAX_READ_RETRIES: u32 = 64;

impl Volume {
    /// Runs one change exclusively. It uses the blocks in memory; a missing block is read
    /// without the write lock, and the change is retried as long as it modified nothing.
    pub(crate) fn transact<T>(
        &self,
        change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        self.transact_and_write_out(change, false)
    }

    /// [`Volume::transact`] that sends the queued chains, and with `and_wait` waits until they are
    /// durable, in the same message.
    pub(crate) fn transact_and_write_out<T>(
        &self,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
        and_wait: bool,
    ) -> Result<T> {
        let mut missed = 0;
        let mut may_wait = false;
        loop {
            match self.try_transact(&mut change, may_wait) {
                // Writing has stopped: nothing to send.
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
                    // The retry reports the read error at its place.
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
            // The record comes before any chain with the change, which other threads may send.
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
    /// Passes the change to the recorder.
    pub(crate) fn record_change(&self) {
        let witness =
            self.volume.writing.as_ref().and_then(|writing| writing.change_recorder.get());
        if let Some(witness) = witness.filter(|_| self.writer.is_modified && !self.is_internal) {
            let WriteState { created_inode: inode, renamed_inode: moved, .. } = *self.writer;
            let made = ChangeRecord { now: self.now, inode, renamed_inode: moved };
            witness.record_change(self.writer.change_count.wrapping_add(1), made);
        }
    }

    /// Returns the current version of a block.
    pub(crate) fn block(&self, block: FsBlock, role: Role) -> Result<SharedBytes> {
        // A change that modified something is completed, even if it must read under the lock.
        if self.may_block || self.writer.is_modified {
            return self.volume.store.block(block, role);
        }
        if self.missing_block.get().is_none() {
            if let Some(bytes) = self.volume.store.cached_block(block) {
                return Ok(bytes);
            }
            self.missing_block.set(Some((block, role)));
        }
        Err(Error::Misuse("a block that is not in memory"))
    }

    /// Preloads the inode and its descriptor block into the cache.
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

    /// Modifies a metadata block.
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
            // Loads the block before anything changes.
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

    /// Creates a metadata block of zeros.
    pub(crate) fn new_block(&mut self, block: FsBlock, role: Role) {
        let zeros = vec![0; saturating_usize(self.volume.super_.block_bytes.into())];
        self.put_new_block(block, role, zeros);
    }

    /// Creates a metadata block with these bytes.
    pub(crate) fn put_new_block(&mut self, block: FsBlock, role: Role, bytes: Vec<u8>) {
        self.writer.is_modified = true;
        self.writer.batch.dirty = true;
        let mut blocks = self.volume.store.write_back.write();
        blocks.drop_block(block);
        let now = SharedBytes::from_owned_bytes(bytes.into_boxed_slice());
        blocks.metadata.insert(
            block.0,
            Buffer { current: now, state: BufferState::New, role, chain_number: 0 },
        );
        self.writer.batch.blocks.push(block.0);
    }

    /// Returns an inode that is in use.
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

    /// Returns an inode, in use or not.
    pub(crate) fn read_inode_unchecked(&self, inode: InodeNumber) -> Result<Inode> {
        let (block, at) = self.inode_location(inode)?;
        let block = self.block(block, Role::InodeTable).map_err(|error| error.with_inode(inode))?;
        let len = saturating_usize(self.volume.super_.inode_bytes.into());
        Inode::parse_used(&block.slice(at..at + len), inode, &self.volume.super_)
    }

    /// Returns the block of an inode and its offset there.
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

    /// Returns the role of a directory's blocks.
    pub(crate) fn directory_role(&self, dir: InodeNumber) -> Result<Role> {
        self.file_id(dir).map(Role::Directory)
    }

    /// Returns the role of an inode's map blocks.
    pub(crate) fn map_role(&self, inode: InodeNumber) -> Result<Role> {
        self.file_id(inode).map(Role::IndirectBlock)
    }

    /// Returns the file that has the inode number now.
    pub(crate) fn file_id(&self, inode: InodeNumber) -> Result<FileId> {
        let node = self.volume.inodes.peek(inode.0);
        let generation = match node {
            Some(node) => node.generation(),
            None => self.read_slot(inode, |it| it.generation())?,
        };
        Ok(FileId { inode: inode.0, generation })
    }

    /// Reads fields of an inode, in use or not.
    pub(crate) fn read_slot<T>(
        &self,
        inode: InodeNumber,
        read: impl FnOnce(&InodeSlot<'_>) -> T,
    ) -> Result<T> {
        let (block, at) = self.inode_location(inode)?;
        let block = self.block(block, Role::InodeTable).map_err(|error| error.with_inode(inode))?;
        let end = at + saturating_usize(self.volume.super_.inode_bytes.into());
        let mut bytes = block.get(at..end).unwrap_or_default().to_vec();
        Ok(read(&InodeSlot::from_bytes(&mut bytes)?))
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
            let mut slot = InodeSlot::from_bytes(bytes)?;
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

    /// Sets the given times to now.
    pub(crate) fn set_times_now(&mut self, inode: InodeNumber, which: &[InodeTime]) -> Result<()> {
        let now = self.now;
        self.change_slot(inode, |it| which.iter().for_each(|stamp| it.set_time(*stamp, now)))
    }

    /// Invalidates cached data of a file from byte `from` to `end`.
    pub(crate) fn invalidate_contents(&self, inode: InodeNumber, from: u64, end: u64) {
        let chunks = from / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        self.volume.store.invalidate_chunks(inode.0, chunks);
    }

    /// Returns true if the inode is in use on disk.
    pub(crate) fn is_used_on_disk(&self, inode: InodeNumber) -> bool {
        self.writer.batch.is_on_disk(inode)
    }

    /// Returns true if the inode's owner may use the blocks reserved for the superuser.
    pub(crate) fn is_privileged(&self, uid: u32) -> bool {
        uid == self.volume.super_.reserved_uid
    }
}
