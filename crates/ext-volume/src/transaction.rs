//! Transactions: changes to blocks and inodes in memory, under the write lock.

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::sync::Arc;

use draconis_types::Time;

use crate::blocks::CHUNK_BYTES;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::change_record::ChangeRecord;
use crate::format::inode::{self, Inode};
use crate::format::inode_slot::{InodeSlot, InodeTime};
use crate::reader::VolumeReader;
use crate::units::saturating_usize;
use crate::write_context::{WriteContext, WriteState};
use crate::{Error, FileId, FsBlock, GroupNumber, InodeNumber, Result};

/// One change of the volume, applied in memory while the write lock is held.
pub(crate) struct Transaction<'a> {
    pub(crate) volume: &'a VolumeReader,
    pub(crate) context: &'a WriteContext,
    pub(crate) writer: &'a mut WriteState,
    pub(crate) now: Time,
    /// True if the transaction may read from the device.
    pub(crate) may_block: bool,
    /// First block that the change needs and the cache lacks; the caller reads it and retries.
    pub(crate) missing_block: Cell<Option<(FsBlock, Role)>>,
    /// The transaction follows from recorded changes; a replay repeats it without a record.
    pub(crate) is_internal: bool,
}

impl Transaction<'_> {
    /// Passes the change to the recorder.
    pub(crate) fn record_change(&self) {
        let witness = self.context.change_recorder.get();
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
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn preload_inode(&self, inode: InodeNumber) -> Result<()> {
        if self.volume.inodes.contains(inode.0) {
            return Ok(());
        }
        let (block, _) = self.inode_location(inode)?;
        let group = GroupNumber(inode.0.saturating_sub(1) / self.volume.super_.inodes_per_group);
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
        Inode::parse_used(&block.slice(at..at.saturating_add(len)), inode, &self.volume.super_)
    }

    /// Returns the block of an inode and its offset there.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn inode_location(&self, inode: InodeNumber) -> Result<(FsBlock, usize)> {
        let super_ = &self.volume.super_;
        if inode.0 > super_.inodes {
            return Err(Error::NotFound);
        }
        let (group, nth) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        let table = self.writer.groups.get(group).ok_or(Error::NotFound)?.descriptor.inode_table;
        let at = u64::from(nth).saturating_mul(super_.inode_bytes.into());
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
        let end = at.saturating_add(saturating_usize(self.volume.super_.inode_bytes.into()));
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
        let end = at.saturating_add(saturating_usize(self.volume.super_.inode_bytes.into()));
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

    /// Returns true if the inode's owner may use the blocks reserved for the superuser.
    pub(crate) fn is_privileged(&self, uid: u32) -> bool {
        uid == self.volume.super_.reserved_uid
    }

    /// Reports an orphan to the recorder.
    pub(crate) fn record_orphan(&self, inode: InodeNumber) {
        let witness = self.context.change_recorder.get();
        if let Some(witness) = witness.filter(|_| !self.writer.protocol.lists_orphans()) {
            let number = self.writer.change_count.wrapping_add(1);
            witness.record_orphan(number, inode, &|| self.volume.store.write_back.orphans());
        }
    }

    /// Returns true if an orphan must be kept for users.
    pub(crate) fn has_users(&self, inode: InodeNumber) -> bool {
        let writer = &self.writer;
        writer.is_resumed || writer.users.get(&inode.0).copied().unwrap_or(0) > 0
    }

    /// Returns the inode that a replayed change must use.
    pub(crate) fn replayed_inode(&self) -> Option<InodeNumber> {
        self.writer.replaying?.inode.map(|made| InodeNumber(made.inode))
    }
}
