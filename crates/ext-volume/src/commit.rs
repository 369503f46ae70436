//! Commits: changes are written as chains of groups, each group durable before the next is written.
//!
//! ```text
//!   operations ── effects ──▶ batch ── changes ──▶ protocol ── chains ──▶ queue ──▶ disk
//!
//!   CLEAN ─▶ OPEN ─▶ GATHERED ─▶ QUEUED ─▶ SENT ─▶ VISIBLE ─▶ DURABLE ─▶ CLEAN
//!             │                   ▲    ▲                         │ with a journal
//!             └─ file data alone ─┘    └───── checkpoint ───── LOGGED
//!
//!   state     a change is                          until              lock     file
//!   CLEAN     on disk                              the first change   W        volume/transact
//!   OPEN      in dirty buffers; the batch has      close_batch        W        ops/, transaction
//!             blocks, inodes, effects
//!   GATHERED  in `Changes`: copies with checksums  build_chains       W        commit/changes,
//!                                                                              commit/protocol/
//!   QUEUED    in a chain; its buffers are clean    send               queue    commit/queue
//!             and have the chain's number
//!   SENT      accepted whole by the disk; no       wait_visible       sent     commit/queue
//!             successor of the process repeats it
//!   VISIBLE   read from the disk; the write-back   wait_for_ticket    W, cache volume/write_out
//!             cache drops its file data
//!   DURABLE   safe from power cuts: syncs return,  –                  W        volume/write_out
//!             freed blocks become allocatable
//!   LOGGED    DURABLE in the journal, served from  checkpoint,        W        commit/protocol/
//!             the cache, not in its home blocks    quiesce, close              journal
//!   STOPPED   refused from now on                  reopen             W        volume/commits
//! ```
//! W is the write lock, `WriteContext::state`. A volume has one batch, CLEAN or OPEN; its chains
//! are in the later states, in order.
//!
//! A batch is closed if the next operation cannot join it (`join_batch`), if the protocol calls it
//! complete, if it exceeds a limit (`enforce_batch_limits`), and by commit, sync and close. Closing
//! first writes access times, quotas and free counts, and moves directories whose update needs more
//! than one sector (`commit/directories`). Much file data is QUEUED before its batch, alone.
//! An error of closing, of a half-made change or of the disk leads to STOPPED; chains QUEUED by
//! then are sent, unless the disk refused one. Only a volume that was closed can be reopened.
//! Waiting until a chain is DURABLE makes all chains up to it VISIBLE.
//!
//! Law 1: operations do not know how a batch is written. They announce an [`Operation`] and report
//! each [`Effect`]. If the protocol cannot have the operation in the batch, the batch is closed
//! here.
//! Law 2: a protocol is a function of [`Changes`]: it sees no transaction, volume or queue.
//! Law 3: the write lock is held only to change memory. Sending and waiting are done without it.
//! Locks are taken in the order W, write-back cache, queue; the lock of the sent chains is not
//! taken under W.
//! Law 4: a chain follows the one before it, and the first chain follows the "in use" mark of the
//! superblock.

pub(crate) mod batch;
pub(crate) mod chain;
pub(crate) mod changes;
mod directories;
pub(crate) mod group_commit;
pub(crate) mod protocol;
pub(crate) mod queue;

use draconis_device::ChainBounds;

use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::blocks::write_back::BufferState;
use crate::format::inode_slot::InodeDiff;
use crate::format::requirements::Feature;
use crate::format::superblock::{RawSuperblock, to_disk_seconds};
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::write_context::WriteState;
use crate::{Error, InodeNumber, Result};
use batch::{Effect, Operation};
use chain::{Chain, ChainDependency, FreedSpace, Stage};
use changes::Changes;

/// Dirty file data above which it is queued ahead of the metadata chain, in bytes.
const MAX_CHAIN_DATA_BYTES: u64 = 4 << 20;
/// Changed metadata that closes a batch, in bytes.
const MAX_BATCH_METADATA_BYTES: usize = 8 << 20;
/// Part of a chain beyond the metadata of its batch: file data, and the changes of one more
/// operation.
const CHAIN_HEADROOM: ChainBounds = ChainBounds { groups: 64, writes: 1 << 13, bytes: 16 << 20 };

impl Transaction<'_> {
    /// Closes the batch if `next` cannot join it, and returns true if it did. Directory blocks may
    /// have moved then, and the caller looks up its positions again. The caller must not have
    /// changed anything for `next` yet.
    pub(crate) fn join_batch(&mut self, next: Operation) -> Result<bool> {
        if self.writer.protocol.can_join_batch(&self.writer.batch, &next) {
            return Ok(false);
        }
        self.close_batch().map(|()| true)
    }

    /// Reports an effect to the protocol and the batch.
    pub(crate) fn record_effect(&mut self, effect: Effect) {
        self.writer.protocol.record_effect(&self.writer.batch, effect);
        self.writer.batch.record_effect(&effect);
    }

    /// Closes a complete batch, and keeps dirty data and the next chain within their limits.
    pub(crate) fn enforce_batch_limits(&mut self) -> Result<()> {
        self.close_batch_if_complete()?;
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let dirty =
            (self.volume.store.write_back.read().dirty_contents as u64).saturating_mul(block_bytes);
        if dirty >= (self.writer.dirty_limit / 8).clamp(1 << 20, 8 << 20) {
            self.queue_dirty_contents()?;
        }
        let blocks = self.writer.batch.blocks.len();
        // A chain beyond the disk's limits is submitted in pieces; a crash between them is like a
        // power cut.
        let groups = self.writer.protocol.max_stages();
        let writes = blocks.saturating_mul(groups);
        let needs =
            ChainBounds { groups, writes, bytes: (writes as u64).saturating_mul(block_bytes) };
        let fits = needs.sum_with(CHAIN_HEADROOM).is_within(self.context.commit_queue.bounds());
        if blocks > 0
            && (!fits
                || blocks.saturating_mul(saturating_usize(block_bytes)) >= MAX_BATCH_METADATA_BYTES)
        {
            self.close_batch()?;
        }
        Ok(())
    }

    /// Closes the batch if the protocol says that it is full.
    pub(crate) fn close_batch_if_complete(&mut self) -> Result<()> {
        if self.writer.protocol.is_complete(&self.writer.batch) {
            self.close_batch()
        } else {
            Ok(())
        }
    }

    /// Queues dirty data ahead of the chain that will reference it.
    fn queue_dirty_contents(&mut self) -> Result<()> {
        let stage = self.volume.store.write_back.read().collect_dirty_contents();
        if stage.is_empty() {
            return Ok(());
        }
        let was_marked = self.writer.is_marked_in_use;
        self.block(self.volume.super_.location().0, Role::Superblock)?;
        self.mark_in_use()?;
        let contents: Vec<u64> = stage.keys().copied().collect();
        let dependency =
            if was_marked { ChainDependency::NoDependency } else { ChainDependency::PendingSync };
        let chain = Chain {
            dependency,
            stages: vec![stage],
            contents: contents.clone(),
            ..Chain::default()
        };
        let number = self.context.commit_queue.enqueue(chain);
        self.volume.store.write_back.write().mark_contents_queued(&contents, number);
        Ok(())
    }

    /// Queues only the data, if the inode on disk (or queued) differs in nothing but its times.
    /// Returns false if a full commit is needed.
    pub(crate) fn try_queue_contents_only(&mut self, inode: InodeNumber) -> Result<bool> {
        let batch = &self.writer.batch;
        // Also of an inode without links: that it has none is a difference.
        if !batch.is_on_disk(inode)
            || (batch.inodes.contains_key(&inode.0) && !self.only_times_differ(inode)?)
        {
            return Ok(false);
        }
        self.queue_dirty_contents()?;
        Ok(true)
    }

    fn only_times_differ(&self, inode: InodeNumber) -> Result<bool> {
        let (block, at) = self.inode_location(inode)?;
        let part = at..at.saturating_add(saturating_usize(self.volume.super_.inode_bytes.into()));
        let cache = self.volume.store.write_back.read();
        Ok(cache.inode_diff(block, part).is_none_or(InodeDiff::changes_only_times))
    }

    /// Closes the batch: later changes go to the next chain.
    pub(crate) fn close_batch(&mut self) -> Result<()> {
        self.close_batch_after(ChainDependency::NoDependency)
    }

    /// Checkpoints an idle journal so that the next mount needs no recovery.
    pub(crate) fn quiesce(&mut self) -> Result<()> {
        let quiesced = self.writer.protocol.quiesce().map(|chains| self.enqueue(chains));
        if let Err(error) = &quiesced {
            self.writer.stop(error);
        }
        quiesced.map(drop)
    }

    /// Queues all changes as one chain that depends at least on `after`.
    pub(crate) fn close_batch_after(&mut self, after: ChainDependency) -> Result<()> {
        // Closing the batch does not count as a modification by the current operation.
        let touched = self.writer.is_modified;
        if !self.has_changes() {
            return Ok(());
        }
        self.preload_counts()?;
        self.preload_accessed_inodes()?;
        // The chain's blocks are modified, and therefore mostly in memory.
        let may_wait = std::mem::replace(&mut self.may_block, true);
        let has_own = touched && self.writer.is_change_complete;
        if touched && !has_own {
            // A part of the change is committed before the rest.
            self.record_change();
        }
        self.writer.batch_change = self.writer.change_count.wrapping_add(u64::from(has_own));
        let sealed = self.try_close_batch(after);
        self.may_block = may_wait;
        match &sealed {
            Ok(()) => self.writer.is_modified = touched,
            Err(error) => self.writer.stop(error),
        }
        sealed
    }

    /// Returns true if there are changes to commit.
    pub(crate) fn has_changes(&self) -> bool {
        self.writer.batch.dirty || self.context.pending_access_times.has_due_times()
    }

    /// Preloads the superblock and the changed group descriptors.
    fn preload_counts(&self) -> Result<()> {
        let super_ = &self.volume.super_;
        self.block(super_.location().0, Role::Superblock)?;
        for group in self.writer.groups.changed_groups() {
            self.block(super_.descriptor_location(group).0, Role::Descriptors)?;
        }
        Ok(())
    }

    fn try_close_batch(&mut self, after: ChainDependency) -> Result<()> {
        self.write_access_times()?;
        self.write_usage()?;
        // Chains are bounded: large data goes ahead.
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        if (self.volume.store.write_back.read().dirty_contents as u64).saturating_mul(block_bytes)
            > MAX_CHAIN_DATA_BYTES
        {
            self.queue_dirty_contents()?;
        }
        self.mark_in_use()?;
        let switched = self.relocate_directories()?;
        self.write_free_counts()?;
        let (volume, WriteState { protocol, batch, .. }) = (self.volume, &mut *self.writer);
        let changes = Changes::gather(batch, self.now, switched, &volume.store);
        let contents: Vec<u64> = changes.contents.keys().copied().collect();
        let mut chains = protocol.build_chains(changes)?;
        let batch = std::mem::take(batch);
        let Some(last) = chains.last_mut() else { return Ok(()) };
        last.dependency = last.dependency.max(after);
        last.contents.clone_from(&contents);
        last.freed = FreedSpace { blocks: batch.freed_blocks, inodes: batch.freed_inodes };
        let number = self.enqueue(chains);
        self.context.group_commit.count_closed_batch();
        let mut cache = volume.store.write_back.write();
        cache.mark_metadata_queued(&batch.blocks, number);
        cache.mark_contents_queued(&contents, number);
        let logged = cache.awaiting_checkpoint.len();
        drop(cache);
        let checkpoint = self.writer.protocol.checkpoint(logged)?;
        self.enqueue(checkpoint);
        Ok(())
    }

    /// Queues the chains of a protocol and returns the number of the last. Those that a sync waits
    /// for contain the changes of the batch.
    fn enqueue(&mut self, chains: Vec<Chain>) -> u64 {
        let queue = &self.context.commit_queue;
        let mut cache = self.volume.store.write_back.write();
        let mut number = 0;
        for mut chain in chains {
            cache.insert_logged(std::mem::take(&mut chain.logged), &chain.revoked);
            let checkpointed = chain.checkpointed.clone();
            let changes = chain.sync_stage.map_or(0, |_| self.writer.batch_change);
            number = queue.enqueue_changes(chain, changes);
            cache.mark_checkpoint_queued(&checkpointed, number);
        }
        number
    }

    /// Writes the free counts of groups and superblock.
    pub(crate) fn write_free_counts(&mut self) -> Result<()> {
        let changed = self.writer.groups.take_changed();
        if changed.is_empty() {
            return Ok(());
        }
        let super_ = &self.volume.super_;
        for (group, mut said) in changed {
            if super_.checksum_seed.is_some() {
                let bitmaps = self.volume.store.write_back.read();
                if let Some(bits) = bitmaps.get(said.block_bitmap) {
                    said.set_block_bitmap_csum(&bits, super_);
                }
                if let Some(bits) = bitmaps.get(said.inode_bitmap) {
                    said.set_inode_bitmap_csum(&bits, super_);
                }
                drop(bitmaps);
                self.writer.groups.set_bitmap_checksums(group, said.bitmap_checksums);
            }
            let (block, slot) = super_.descriptor_location(group);
            self.modify_block(block, Role::Descriptors, |bytes| {
                said.write(bytes, slot, super_, group)
            })??;
        }
        let (blocks, inodes) = self.writer.free_counts();
        let now = to_disk_seconds(self.now);
        self.modify_superblock(|raw| {
            if now != 0 {
                raw.s_wtime.set(now);
            }
            raw.set_free(blocks, inodes)
        })
    }

    /// Queues the "in use" mark, if it is not on disk yet; all later chains follow it. It writes no
    /// other changes of the superblock.
    fn mark_in_use(&mut self) -> Result<()> {
        if self.writer.is_marked_in_use {
            return Ok(());
        }
        self.writer.is_marked_in_use = true;
        let (block, at) = self.volume.super_.location();
        let now = to_disk_seconds(self.now);
        let recovers = self.writer.protocol.has_journal();
        let mark = |bytes: &mut SharedBytes| {
            let bytes = bytes.make_mut().get_mut(at..).unwrap_or_default();
            RawSuperblock::view_mut(bytes).map(|raw| {
                if recovers {
                    raw.need_recovery(now);
                } else {
                    raw.mark_in_use(now);
                }
                raw.preserve_checksum();
            })
        };
        // An empty change loads the block into the write-back cache.
        self.modify_superblock(|_| Ok(()))?;
        let mut blocks = self.volume.store.write_back.write();
        let Some(buffer) = blocks.metadata.get_mut(&block.0) else {
            return Err(Error::Misuse("a superblock that is not in memory"));
        };
        mark(&mut buffer.current)?;
        let mut marked = buffer.current.clone();
        if let BufferState::Modified(base) = &mut buffer.state {
            mark(base)?;
            marked = base.clone();
        }
        drop(blocks);
        self.context.commit_queue.enqueue(Chain {
            stages: vec![Stage::from([(block.0, marked)])],
            sync_stage: Some(0),
            ..Chain::default()
        });
        Ok(())
    }

    /// Changes the superblock; its checksum is set when the chain is queued.
    pub(crate) fn modify_superblock(
        &mut self,
        change: impl FnOnce(&mut RawSuperblock) -> Result<()>,
    ) -> Result<()> {
        let (block, at) = self.volume.super_.location();
        self.modify_block(block, Role::Superblock, |bytes| {
            change(RawSuperblock::view_mut(bytes.get_mut(at..).unwrap_or_default())?)
        })?
    }

    /// Sets a read-only-compatible feature bit in the superblock.
    pub(crate) fn set_ro_compat_feature(&mut self, feature: Feature) -> Result<()> {
        self.modify_superblock(|raw| {
            feature.set(raw, true);
            Ok(())
        })
    }
}
