//! Commits: changes are written as chains of groups, each group durable before the next is written.
//!
//! ```text
//!   operations ── effects ──▶ batch ── protocol ──▶ chain ── queue ──▶ disk
//!                               │                              no write lock from here on
//!                               └ ordered: stages in place · atomic: one group
//! ```
//! Law 1: operations do not know how a batch is written. They announce an [`Operation`] and report
//! each [`Effect`]. If the protocol cannot have the operation in the batch, the batch is closed
//! here.
//! Law 2: the write lock is held only to change memory. Sending and waiting are done without it.
//! Law 3: a chain follows the one before it, and the first chain follows the "in use" mark of the
//! superblock.

#![allow(clippy::arithmetic_side_effects, reason = "computes with bytes and blocks in memory")]

pub(crate) mod batch;
pub(crate) mod chain;
pub(crate) mod changes;
mod directories;
pub(crate) mod group_commit;
pub(crate) mod protocol;
pub(crate) mod queue;
mod write_out;

use draconis_device::ChainBounds;

use crate::access_times::PendingAccessTimes;
use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::format::inode_slot::InodeDiff;
use crate::format::requirements::Feature;
use crate::format::superblock::RawSuperblock;
use crate::format::superblock::to_disk_seconds;
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::write_context::{StopReason, WriteState};
use crate::{Error, InodeNumber, Result};
use batch::{Effect, Operation};
use chain::{Chain, ChainDependency, FreedSpace, Stage};
use changes::Changes;
use group_commit::GroupCommit;
use queue::CommitQueue;

/// Retries of a transaction that found no space.
const MAX_NO_SPACE_RETRIES: usize = 4;
/// Number of waits for clients to close orphans, per attempt.
const MAX_ORPHAN_WAITS: usize = 60;
/// Low-space thresholds in bytes and inodes: below these, one change may need all the free space.
const LOW_SPACE_BYTES: u64 = 8 << 20;
const LOW_SPACE_INODES: u64 = 16;
/// Dirty file data above which it is queued ahead of the metadata chain, in bytes.
const MAX_CHAIN_DATA_BYTES: u64 = 4 << 20;
/// Blocks that a thin disk must have free in addition to file data.
const RESERVED_METADATA_BLOCKS: u64 = 256;
/// Changed metadata that closes a batch, in bytes.
const MAX_BATCH_METADATA_BYTES: usize = 8 << 20;
/// Part of a chain beyond the metadata of its batch: file data, and the changes of one more
/// operation.
const CHAIN_HEADROOM: ChainBounds = ChainBounds { groups: 64, writes: 1 << 13, bytes: 16 << 20 };

impl Volume {
    pub(crate) fn commit_queue(&self) -> Result<&CommitQueue> {
        self.writing.as_ref().map(|writing| &writing.commit_queue).ok_or(Error::ReadOnly)
    }

    fn group_commit(&self) -> Result<&GroupCommit> {
        self.writing.as_ref().map(|writing| &writing.group_commit).ok_or(Error::ReadOnly)
    }

    /// Queues all changes as one chain and sends it. Waits for it only to release freed blocks, or
    /// if the disk can be unreachable. Without changes since the last commit, checkpoints the
    /// journal.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] once writing stopped; the disk's error if it refuses the chain.
    pub fn commit(&self) -> Result<()> {
        let was_idle = self.transact(|tx| {
            let was_idle = !tx.has_changes();
            if was_idle {
                tx.quiesce()?
            } else {
                tx.close_batch()?
            }
            Ok(was_idle)
        })?;
        if was_idle {
            self.wait_visible(true)?;
        }
        // Freed blocks are allocatable once the chain is durable. A disk that can be unreachable
        // buffers chains until a wait.
        let outbox = self.commit_queue()?;
        let wanted = if outbox.waits_separately {
            outbox.last_ticket()?
        } else {
            outbox.last_ticket_with_frees()?
        };
        match wanted {
            Some(ticket) => self.wait_for_ticket(ticket),
            None => Ok(()),
        }
    }

    /// Queues and sends all changes without waiting.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn submit_commit(&self) -> Result<()> {
        self.transact(|tx| tx.close_batch())
    }

    /// Commits all changes and waits until they are durable.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn sync(&self) -> Result<()> {
        let outbox = self.commit_queue()?;
        let gathering = self.group_commit()?;
        let mut entered = gathering.enter();
        if gathering.has_others()
            && let Some(ticket) = outbox.sync_ticket()?
        {
            self.wait_for_ticket(ticket)?;
        }
        if let Some(turn) = entered.try_lead() {
            // A thread that syncs alone can send and wait in one call.
            self.transact_and_write_out(|tx| tx.close_batch(), !gathering.has_others())?;
            drop(turn);
        }
        // Another thread may have queued a chain that it has not sent yet.
        if let Some(writing) = &self.writing {
            self.send(writing, false)?;
        }
        entered.finish();
        match outbox.sync_ticket()? {
            Some(ticket) => self.wait_for_ticket(ticket),
            None => Ok(()),
        }
    }

    /// Makes one inode and its data durable; with `data_only`, only what a reader needs to read the
    /// data back.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn sync_inode(&self, inode: InodeNumber, data_only: bool) -> Result<()> {
        self.sync_inodes(&[(inode, data_only)])
    }

    /// Syncs several inodes at once, as [`Volume::sync_inode`].
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn sync_inodes(&self, inodes: &[(InodeNumber, bool)]) -> Result<()> {
        let (mut is_enough, mut is_ahead) = (false, false);
        if inodes.iter().all(|(_, data_only)| *data_only) {
            self.transact(|tx| {
                (is_enough, is_ahead) = (true, false);
                for (inode, _) in inodes {
                    is_enough = is_enough && tx.try_queue_contents_only(*inode)?;
                    is_ahead |= is_enough;
                }
                Ok(())
            })?;
        }
        if !is_enough {
            self.sync()?;
        }
        if is_ahead {
            self.send_queued()?;
            if let Some(ticket) = self.commit_queue()?.last_ticket()? {
                return self.wait_for_ticket(ticket);
            }
        }
        Ok(())
    }

    /// Commits, marks the volume as cleanly unmounted, and waits. Later changes are refused.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn close(&self) -> Result<()> {
        let closed = self.transact(|tx| {
            let orphans: Vec<u32> =
                tx.volume.store.write_back.read().orphans.iter().copied().collect();
            for inode in orphans {
                tx.evict_inode(InodeNumber(inode))?;
            }
            tx.close_batch()?;
            if !tx.writer.is_marked_in_use {
                // Never changed: the superblock has no mark to clear.
                return Ok(false);
            }
            let (clean, now) = (tx.writer.was_clean, to_disk_seconds(tx.now));
            let recovers = tx.writer.protocol.has_journal();
            tx.modify_superblock(|raw| {
                if recovers {
                    raw.set_recovered();
                }
                if clean {
                    raw.mark_clean();
                }
                raw.s_wtime.set(now);
                Ok(())
            })?;
            // The volume is clean once all of that is durable, including the frees.
            tx.writer.protocol.prepare_close();
            tx.close_batch_after(ChainDependency::AllEarlier)?;
            Ok(true)
        });
        let changed = match closed {
            Ok(changed) => changed,
            // Closed already, or stopped: everything that could be written was queued.
            Err(Error::ReadOnly) => {
                if self.failure().is_none() {
                    return Ok(());
                }
                let outbox = self.commit_queue()?;
                if let Ok(Some(last)) = outbox.last_ticket()
                    && let Err(error) = outbox.wait_for_ticket(last, |_, _| {})
                {
                    log::warn!("what was written last may be lost: {error}");
                }
                return Err(Error::ReadOnly);
            }
            Err(error) => return Err(error),
        };
        if changed && let Some(ticket) = self.commit_queue()?.last_ticket()? {
            self.wait_for_ticket(ticket)?;
        }
        let Some(writing) = &self.writing else { return Ok(()) };
        let mut writer = writing.state.write();
        if writer.stopped().is_none() {
            writer.set_stopped(Some(StopReason::Closed));
        }
        drop(writer);
        match &writing.claim {
            Some(claim) => claim.release((writing.clock)()),
            None => Ok(()),
        }
    }

    /// Records on disk that `error` stopped writing, if the protocol has a block for it.
    pub(crate) fn record_failure(&self, writer: &mut WriteState, error: &Error) {
        let (Some(writing), Some(block)) = (&self.writing, writer.protocol.error_block(error))
        else {
            return;
        };
        writing.commit_queue.enqueue(Chain {
            dependency: ChainDependency::AllEarlier,
            stages: vec![Stage::from([block])],
            ..Chain::default()
        });
    }

    /// Reserves disk space for `bytes` of data and its metadata, so that an acknowledged write
    /// cannot fail later.
    fn ensure_disk_space(&self, bytes: u64) -> Result<()> {
        let Some(writing) =
            self.writing.as_ref().filter(|writing| writing.commit_queue.is_thin_provisioned())
        else {
            return Ok(());
        };
        let block = u64::from(self.super_.block_bytes);
        let metadata = writing.state.read().batch.blocks.len() as u64;
        let waiting = (metadata + self.store.write_back.read().dirty_contents as u64) * block;
        // One operation changes few metadata blocks; the reserve also covers deletions.
        writing
            .commit_queue
            .ensure_space(waiting + bytes + bytes / 64 + RESERVED_METADATA_BLOCKS * block)
    }

    /// Runs a change and retries it on `NoSpace`, after pending frees are durable or clients closed
    /// orphans.
    pub(crate) fn transact_with_space<T>(
        &self,
        bytes: u64,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        if let Err(error) = self.ensure_disk_space(bytes) {
            // Blocks freed by the batch may give the disk space once it is durable.
            self.transact(|tx| tx.close_batch())?;
            if let (Error::NoSpace, Some(ticket)) = (&error, self.commit_queue()?.last_ticket()?) {
                self.wait_for_ticket(ticket)?;
            }
            self.ensure_disk_space(bytes)?;
        }
        for _ in 0..MAX_NO_SPACE_RETRIES {
            match self.transact(&mut change) {
                Err(Error::NoSpace) => {}
                done => return done,
            }
            if !self.wait_for_free_space()? {
                return Err(Error::NoSpace);
            }
        }
        self.transact(change)
    }

    /// Waits for space: returns true if pending frees became available or an orphan was deleted.
    fn wait_for_free_space(&self) -> Result<bool> {
        let thaws = self.transact(|tx| {
            let thaws = tx.writer.groups.has_pending_free();
            if thaws {
                tx.close_batch()?;
            }
            Ok(thaws)
        })?;
        if thaws {
            if let Some(ticket) = self.commit_queue()?.last_ticket()? {
                self.wait_for_ticket(ticket)?;
            }
            return Ok(true);
        }
        let Some(pause) = self.writing.as_ref().and_then(|writing| writing.on_no_space.get())
        else {
            return Ok(false);
        };
        let before = self.orphan_count();
        Ok((0..MAX_ORPHAN_WAITS).any(|_| {
            let waits = self.orphan_count() > 0;
            if waits {
                pause();
            }
            waits && self.orphan_count() < before
        }))
    }

    fn orphan_count(&self) -> usize {
        self.store.write_back.read().orphans.len()
    }

    /// Installs `pause`, which the volume calls a few times when it has no space but orphans that
    /// clients may close soon. `pause` should sleep a little.
    pub fn on_no_space(&self, pause: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            // Only the first call has an effect.
            let _ = writing.on_no_space.set(Box::new(pause));
        }
    }

    /// Returns true if free space is so low that a change may have to wait for clients to close
    /// orphans.
    pub fn is_low_on_space(&self) -> bool {
        if self.orphan_count() == 0 {
            return false;
        }
        let space = self.space();
        space.available_blocks.saturating_mul(space.block_bytes.into()) < LOW_SPACE_BYTES
            || space.free_inodes < LOW_SPACE_INODES
    }
}

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
        let dirty = self.volume.store.write_back.read().dirty_contents as u64 * block_bytes;
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
        let fits = needs.sum_with(CHAIN_HEADROOM).is_within(self.volume.commit_queue()?.bounds());
        if blocks > 0
            && (!fits || blocks * saturating_usize(block_bytes) >= MAX_BATCH_METADATA_BYTES)
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
        let number = self.volume.commit_queue()?.enqueue(chain);
        self.volume.store.write_back.write().mark_contents_queued(&contents, number);
        Ok(())
    }

    /// Queues only the data, if the inode on disk (or queued) differs in nothing but its times.
    /// Returns false if a full commit is needed.
    fn try_queue_contents_only(&mut self, inode: InodeNumber) -> Result<bool> {
        let batch = &self.writer.batch;
        let is_new = !batch.is_on_disk(inode) || batch.unlinked_inodes.contains(&inode.0);
        if is_new || (batch.inodes.contains_key(&inode.0) && !self.only_times_differ(inode)?) {
            return Ok(false);
        }
        self.queue_dirty_contents()?;
        Ok(true)
    }

    fn only_times_differ(&self, inode: InodeNumber) -> Result<bool> {
        let (block, at) = self.inode_location(inode)?;
        let blocks = self.volume.store.write_back.read();
        let Some(Buffer { state: BufferState::Modified(base), current: now, .. }) =
            blocks.metadata.get(&block.0)
        else {
            return Ok(true);
        };
        let part = at..at + saturating_usize(self.volume.super_.inode_bytes.into());
        let old = base.get(part.clone()).unwrap_or_default();
        Ok(InodeDiff::new(old, now.get(part).unwrap_or_default()).changes_only_times())
    }

    /// Closes the batch: later changes go to the next chain.
    pub(crate) fn close_batch(&mut self) -> Result<()> {
        self.close_batch_after(ChainDependency::NoDependency)
    }

    /// Checkpoints an idle journal so that the next mount needs no recovery.
    fn quiesce(&mut self) -> Result<()> {
        let quiesced = self.writer.protocol.quiesce().and_then(|chains| self.enqueue(chains));
        if let Err(error) = &quiesced {
            self.writer.stop(error);
        }
        quiesced.map(drop)
    }

    /// Queues all changes as one chain that depends at least on `after`.
    fn close_batch_after(&mut self, after: ChainDependency) -> Result<()> {
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
    fn has_changes(&self) -> bool {
        let accesses = self.volume.writing.as_ref().map(|writing| &writing.pending_access_times);
        self.writer.batch.dirty || accesses.is_some_and(PendingAccessTimes::has_due_times)
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
        if self.volume.store.write_back.read().dirty_contents as u64 * block_bytes
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
        let number = self.enqueue(chains)?;
        volume.group_commit()?.count_closed_batch();
        let mut cache = volume.store.write_back.write();
        cache.mark_metadata_queued(&batch.blocks, number);
        cache.mark_contents_queued(&contents, number);
        let logged = cache.awaiting_checkpoint.len();
        drop(cache);
        let checkpoint = self.writer.protocol.checkpoint(logged)?;
        self.enqueue(checkpoint).map(drop)
    }

    /// Queues the chains of a protocol and returns the number of the last. Those that a sync waits
    /// for contain the changes of the batch.
    fn enqueue(&mut self, chains: Vec<Chain>) -> Result<u64> {
        let queue = self.volume.commit_queue()?;
        let mut cache = self.volume.store.write_back.write();
        let mut number = 0;
        for mut chain in chains {
            cache.insert_logged(std::mem::take(&mut chain.logged), &chain.revoked);
            let checkpointed = chain.checkpointed.clone();
            let changes = chain.sync_stage.map_or(0, |_| self.writer.batch_change);
            number = queue.enqueue_changes(chain, changes);
            cache.mark_checkpoint_queued(&checkpointed, number);
        }
        Ok(number)
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
