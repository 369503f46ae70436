//! Transactions: changes to blocks and inodes in memory, under the write lock.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with places of inodes inside their checked tables"
)]

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::sync::Arc;

use draconis_exchange::contract::Time;

use crate::blocks::CHUNK_BYTES;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::change_record::ChangeRecord;
use crate::format::inode::{self, Inode};
use crate::format::inode_slot::{InodeSlot, InodeTime};
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::write_context::WriteState;
use crate::{Error, FileId, FsBlock, GroupNumber, InodeNumber, Result};

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
        self.writer.batch.inodes.insert(number.0, (block, at));
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
