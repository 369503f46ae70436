//! Commits: what changed, as chains of groups, each group durable before the next is written.
//!
//! ```text
//!   operations ── intents ──▶ batch ── protocol ──▶ chain ── outbox ──▶ disk
//!                               │                              no gate is held from here on
//!                               └ ordered: stages in place · atomic: one group
//! ```
//! Law 1: operations do not know how a batch is written. They say what they are about to do
//! and what they did; where the protocol cannot have both in one batch, that is ended here.
//! Law 2: the gate is held to change memory. Handing over, settling and waiting are done
//! without it.
//! Law 3: a chain follows the one before it, and the first one the mark that the volume is in
//! use.

#![allow(clippy::arithmetic_side_effects, reason = "computes with bytes and blocks in memory")]

pub(crate) mod atomic;
pub(crate) mod batch;
pub(crate) mod group_commit;
pub(crate) mod journal;
mod ordered;
pub(crate) mod protocol;
pub(crate) mod queue;
mod unordered;
mod write_out;

use draconis_device::ChainBounds;
use draconis_exchange::contract::Time;

use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::format::inode_slot::InodeDiff;
use crate::format::requirements::Feature;
use crate::format::superblock::RawSuperblock;
use crate::ops::access_times::PendingAccessTimes;
use crate::transaction::{StopReason, Transaction, WriteState};
use crate::units::saturating_usize;
use crate::volume::Volume;
use crate::{Error, FsBlock, InodeNumber, Result};
use batch::{Batch, Effect, Operation};
use group_commit::GroupCommit;
use protocol::{Chain, CommitProtocol, Stage};
use queue::{ChainDependency, CommitQueue, FreedSpace, QueuedChain};

/// How often a change is tried again that found no room.
const NO_SPACE_RETRIES: usize = 4;
/// How often it is waited for users of inodes without names, each time.
const ORPHAN_WAITS: usize = 60;
/// Of less room than this, in bytes and inodes, a single change may need all.
const LOW_SPACE_BYTES: u64 = 8 << 20;
const LOW_SPACE_INODES: u64 = 16;
/// Contents that go ahead of a chain that would carry more, in bytes.
const MAX_CHAIN_DATA_BYTES: u64 = 4 << 20;
/// Blocks that a disk which takes room as it is written has to have beside contents.
const RESERVED_METADATA_BLOCKS: u64 = 256;
/// Changed metadata that ends a batch, in bytes.
const MAX_BATCH_METADATA_BYTES: usize = 8 << 20;
/// What a chain may need beside the metadata of its batch: contents, and what one more operation
/// changes.
const CHAIN_HEADROOM: ChainBounds = ChainBounds { groups: 64, writes: 1 << 13, bytes: 16 << 20 };

/// A time as superblocks and deletions have it.
pub(crate) fn to_disk_seconds(time: Time) -> u32 {
    u32::try_from(time.seconds).unwrap_or(0)
}

impl Volume {
    pub(crate) fn outbox(&self) -> Result<&CommitQueue> {
        self.writing.as_ref().map(|writing| &writing.commit_queue).ok_or(Error::ReadOnly)
    }

    fn gathering(&self) -> Result<&GroupCommit> {
        self.writing.as_ref().map(|writing| &writing.gathering).ok_or(Error::ReadOnly)
    }

    /// Hands what changed to the disk, as one chain; does not wait for it, unless the disk may be
    /// away. Where nothing changed
    /// since the last time, a journal is emptied: what it holds goes to its place.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] once writing stopped; what made the disk refuse.
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
        // What was freed is free again once the freeing is durable. A disk that may be away keeps
        // what it was sent until that is waited for.
        let outbox = self.outbox()?;
        let wanted = if outbox.waits_apart { outbox.last()? } else { outbox.last_freed()? };
        match wanted {
            Some(ticket) => self.wait(ticket),
            None => Ok(()),
        }
    }

    /// Hands what changed to the disk, and waits for nothing.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn submit_commit(&self) -> Result<()> {
        self.transact(|tx| tx.close_batch())
    }

    /// Commits, and waits until all of it is durable.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn sync(&self) -> Result<()> {
        let outbox = self.outbox()?;
        let gathering = self.gathering()?;
        let mut entered = gathering.enter();
        if gathering.has_others()
            && let Some(ticket) = outbox.sync_ticket()?
        {
            self.wait(ticket)?;
        }
        if let Some(turn) = entered.try_lead() {
            // Alone there is no other to be let in before the disk answers.
            self.transact_and_write_out(|tx| tx.close_batch(), !gathering.has_others())?;
            drop(turn);
        }
        // Another may be about to send what it sealed.
        if let Some(writing) = &self.writing {
            self.send(writing, false)?;
        }
        entered.finish();
        match outbox.sync_ticket()? {
            Some(ticket) => self.wait(ticket),
            None => Ok(()),
        }
    }

    /// Makes one inode durable, and its contents; with `data_only` whatever is needed to
    /// read them back.
    ///
    /// # Errors
    /// As [`Volume::commit`].
    pub fn sync_inode(&self, inode: InodeNumber, data_only: bool) -> Result<()> {
        self.sync_inodes(&[(inode, data_only)])
    }

    /// [`Volume::sync_inode`] of several at once.
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
            if let Some(ticket) = self.outbox()?.last()? {
                return self.wait(ticket);
            }
        }
        Ok(())
    }

    /// Commits, marks the volume as unmounted properly, and waits. Every later change is
    /// refused.
    ///
    /// # Errors
    /// What made the disk fail.
    pub fn close(&self) -> Result<()> {
        let closed = self.transact(|tx| {
            let orphans: Vec<u32> =
                tx.volume.store.write_back.read().orphans.iter().copied().collect();
            for inode in orphans {
                tx.evict_inode(InodeNumber(inode))?;
            }
            tx.close_batch()?;
            if !tx.writer.is_marked_in_use {
                // Never changed: it is as it was.
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
            // Clean it is once all of that is durable, the freeing included.
            tx.writer.protocol.prepare_close();
            tx.close_batch_after(ChainDependency::AllEarlier)?;
            Ok(true)
        });
        let changed = match closed {
            Ok(changed) => changed,
            // Closed already, or stopped: what could be written was.
            Err(Error::ReadOnly) => {
                if self.failure().is_none() {
                    return Ok(());
                }
                let outbox = self.outbox()?;
                if let Ok(Some(last)) = outbox.last()
                    && let Err(error) = outbox.wait(last, |_, _| {})
                {
                    log::warn!("what was written last may be lost: {error}");
                }
                return Err(Error::ReadOnly);
            }
            Err(error) => return Err(error),
        };
        if changed && let Some(ticket) = self.outbox()?.last()? {
            self.wait(ticket)?;
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

    /// Says on disk that writing stopped for `error`, where there is a place for that.
    pub(crate) fn record_failure(&self, writer: &mut WriteState, error: &Error) {
        let (Some(writing), Some(block)) = (&self.writing, writer.protocol.error_block(error))
        else {
            return;
        };
        writing.commit_queue.enqueue(QueuedChain {
            after: ChainDependency::AllEarlier,
            stages: vec![Stage::from([block])],
            sync_stage: None,
            contents: vec![],
            freed: FreedSpace::default(),
            checkpointed: vec![],
        });
    }

    /// Sees that the disk has room for `bytes` more contents, and for what leads to them: what is
    /// answered for must not be refused later.
    fn ensure_disk_space(&self, bytes: u64) -> Result<()> {
        let Some(writing) = self.writing.as_ref().filter(|writing| writing.commit_queue.is_thin())
        else {
            return Ok(());
        };
        let block = u64::from(self.super_.block_bytes);
        let metadata = writing.state.read().batch.blocks.len() as u64;
        let waiting = (metadata + self.store.write_back.read().dirty_contents as u64) * block;
        // An operation changes few blocks of metadata; as many are left for what gives up.
        writing
            .commit_queue
            .ensure_space(waiting + bytes + bytes / 64 + RESERVED_METADATA_BLOCKS * block)
    }

    /// Tries a change again once what was freed may be given out, and once the last users of
    /// what has no name have gone, if that is soon.
    pub(crate) fn transact_with_space<T>(
        &self,
        bytes: u64,
        mut change: impl FnMut(&mut Transaction<'_>) -> Result<T>,
    ) -> Result<T> {
        if let Err(error) = self.ensure_disk_space(bytes) {
            // What was given up may be room once that is durable.
            self.transact(|tx| tx.close_batch())?;
            if let (Error::NoSpace, Some(ticket)) = (&error, self.outbox()?.last()?) {
                self.wait(ticket)?;
            }
            self.ensure_disk_space(bytes)?;
        }
        for _ in 0..NO_SPACE_RETRIES {
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

    /// Whether something is free now that was not, or could not be given out.
    fn wait_for_free_space(&self) -> Result<bool> {
        let thaws = self.transact(|tx| {
            let thaws = tx.writer.groups.has_pending_free();
            if thaws {
                tx.close_batch()?;
            }
            Ok(thaws)
        })?;
        if thaws {
            if let Some(ticket) = self.outbox()?.last()? {
                self.wait(ticket)?;
            }
            return Ok(true);
        }
        let Some(pause) = self.writing.as_ref().and_then(|writing| writing.on_no_room.get()) else {
            return Ok(false);
        };
        let before = self.orphan_count();
        Ok((0..ORPHAN_WAITS).any(|_| {
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

    /// Has `pause` called, a few times, where there is no room and inodes without names may be
    /// about to lose their last users: it lets some time pass.
    pub fn on_no_space(&self, pause: impl Fn() + Send + Sync + 'static) {
        if let Some(writing) = &self.writing {
            // The first stays.
            let _ = writing.on_no_room.set(Box::new(pause));
        }
    }

    /// Whether so little is free that a change may have to wait for the last users of inodes
    /// without names.
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
    /// Sees to it that what comes next can be in the batch, and says whether that was ended
    /// for it: then blocks of directories may have moved, and places in them are looked up
    /// again. Nothing that belongs to `next` may have changed yet.
    pub(crate) fn join_batch(&mut self, next: Operation) -> Result<bool> {
        if self.writer.protocol.can_join_batch(&self.writer.batch, &next) {
            return Ok(false);
        }
        self.close_batch().map(|()| true)
    }

    /// Notes what was done.
    pub(crate) fn record_effect(&mut self, intent: Effect) {
        self.writer.protocol.record(&self.writer.batch, intent);
        self.writer.batch.record_effect(&intent);
    }

    /// Ends the batch where it is complete, and keeps what is changed in memory below its
    /// bounds.
    pub(crate) fn enforce_batch_limits(&mut self) -> Result<()> {
        self.close_batch_if_complete()?;
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let dirty = self.volume.store.write_back.read().dirty_contents as u64 * block_bytes;
        if dirty >= (self.writer.dirty_limit / 8).clamp(1 << 20, 8 << 20) {
            self.queue_dirty_contents()?;
        }
        let blocks = self.writer.batch.blocks.len();
        // A chain that is longer than the disk takes at once is handed over in pieces, and a
        // death between these leaves what a cut leaves.
        let groups = self.writer.protocol.max_stages();
        let writes = blocks.saturating_mul(groups);
        let needs =
            ChainBounds { groups, writes, bytes: (writes as u64).saturating_mul(block_bytes) };
        let fits = needs.and(CHAIN_HEADROOM).is_within(self.outbox()?.bounds());
        if blocks > 0
            && (!fits || blocks * saturating_usize(block_bytes) >= MAX_BATCH_METADATA_BYTES)
        {
            self.close_batch()?;
        }
        Ok(())
    }

    /// Ends the batch if it holds as much as one can.
    pub(crate) fn close_batch_if_complete(&mut self) -> Result<()> {
        if self.writer.protocol.is_complete(&self.writer.batch) {
            self.close_batch()
        } else {
            Ok(())
        }
    }

    /// Seals contents ahead of the chain that will lead to them.
    fn queue_dirty_contents(&mut self) -> Result<()> {
        let stage = self.collect_dirty_contents();
        if stage.is_empty() {
            return Ok(());
        }
        let was_marked = self.writer.is_marked_in_use;
        self.block(self.volume.super_.location().0, Role::Superblock)?;
        self.mark_in_use()?;
        let contents = stage.keys().copied().collect();
        let after =
            if was_marked { ChainDependency::NoDependency } else { ChainDependency::PendingSync };
        let (needed, freed) = (None, FreedSpace::default());
        let stages = vec![stage];
        let placed = vec![];
        let sealed = QueuedChain {
            after,
            stages,
            sync_stage: needed,
            contents,
            freed,
            checkpointed: placed,
        };
        self.queue_chain(sealed).map(drop)
    }

    /// Sends contents alone, if nothing else is needed to read this file back: whatever its
    /// inode says but for its times is on its way already.
    fn try_queue_contents_only(&mut self, inode: InodeNumber) -> Result<bool> {
        let batch = &self.writer.batch;
        let is_new = !batch.is_on_disk(inode) || batch.unlinked_inodes.contains(&inode.0);
        if is_new || (batch.inodes.contains(&inode.0) && !self.only_times_differ(inode)?) {
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

    /// Contents that changed and were not sealed yet.
    pub(crate) fn collect_dirty_contents(&self) -> Stage {
        let blocks = self.volume.store.write_back.read();
        if blocks.dirty_contents == 0 {
            return Stage::new();
        }
        let dirty = blocks.contents.iter().filter(|(_, content)| content.dirty);
        dirty.map(|(block, content)| (*block, content.current.clone())).collect()
    }

    /// Ends the batch here: what comes now follows what was.
    pub(crate) fn close_batch(&mut self) -> Result<()> {
        self.close_batch_after(ChainDependency::NoDependency)
    }

    /// Leaves nothing to recover, where nothing waits to be committed.
    fn quiesce(&mut self) -> Result<()> {
        let rested = self.with_protocol(|protocol, tx| protocol.quiesce(tx));
        if let Err(error) = &rested {
            self.writer.stop(error);
        }
        rested
    }

    /// Seals everything that changed, as one chain, which follows `after` at least.
    fn close_batch_after(&mut self, after: ChainDependency) -> Result<()> {
        // What is sealed is no change of the operation in hand.
        let touched = self.writer.is_modified;
        if !self.has_changes() {
            return Ok(());
        }
        self.preload_counts()?;
        self.preload_accessed_inodes()?;
        // Most of what a chain is made of changed, and is in memory therefore.
        let may_wait = std::mem::replace(&mut self.may_block, true);
        let has_own = touched && self.writer.is_change_complete;
        if touched && !has_own {
            // A part of it is on its way before the rest.
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

    /// Whether anything waits to be committed.
    fn has_changes(&self) -> bool {
        let accesses = self.volume.writing.as_ref().map(|writing| &writing.pending_access_times);
        self.writer.batch.dirty || accesses.is_some_and(PendingAccessTimes::has_due_times)
    }

    /// Sees to it that superblock and descriptors can be changed without the device.
    fn preload_counts(&self) -> Result<()> {
        let super_ = &self.volume.super_;
        self.block(super_.location().0, Role::Superblock)?;
        for group in self.writer.groups.changed() {
            self.block(super_.descriptor_location(group).0, Role::Descriptors)?;
        }
        Ok(())
    }

    fn try_close_batch(&mut self, after: ChainDependency) -> Result<()> {
        self.write_access_times()?;
        self.write_usage()?;
        // Bounded chains: what is large goes ahead.
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        if self.volume.store.write_back.read().dirty_contents as u64 * block_bytes
            > MAX_CHAIN_DATA_BYTES
        {
            self.queue_dirty_contents()?;
        }
        self.mark_in_use()?;
        let Chain { mut stages, sync_stage: needed, dependency: least } =
            self.with_protocol(|protocol, tx| protocol.chain(tx))?;
        let after = after.max(least);
        self.set_block_checksums(&mut stages);
        let batch = std::mem::take(&mut self.writer.batch);
        let Some(first) = stages.first() else { return Ok(()) };
        let contents: Vec<u64> = {
            let blocks = self.volume.store.write_back.read();
            first.keys().copied().filter(|block| blocks.contents.contains_key(block)).collect()
        };
        let Batch { freed_blocks: freed, freed_inodes, blocks: written, .. } = batch;
        let freed = FreedSpace { blocks: freed, inodes: freed_inodes };
        let sealed = QueuedChain {
            after,
            stages,
            sync_stage: Some(needed),
            contents: contents.clone(),
            freed,
            checkpointed: vec![],
        };
        let sealed = self.queue_batch_chain(sealed)?;
        self.volume.gathering()?.count_closed_batch();
        let mut blocks = self.volume.store.write_back.write();
        for block in written {
            if let Some(buffer) = blocks.metadata.get_mut(&block) {
                buffer.state = BufferState::Clean;
                buffer.chain_number = sealed;
            }
        }
        blocks.mark_contents_queued(&contents, sealed);
        drop(blocks);
        self.with_protocol(|protocol, tx| protocol.checkpoint(tx))
    }

    fn with_protocol<T>(
        &mut self,
        ask: impl FnOnce(&mut dyn CommitProtocol, &mut Self) -> Result<T>,
    ) -> Result<T> {
        // Nothing is recorded meanwhile: blocks of directories may move, and that is all.
        let idle = Box::new(atomic::AtomicProtocol);
        let mut protocol = std::mem::replace(&mut self.writer.protocol, idle);
        let answer = ask(&mut *protocol, self);
        self.writer.protocol = protocol;
        answer
    }

    /// Gives every block of metadata the checksum that its role asks for.
    fn set_block_checksums(&self, stages: &mut [Stage]) {
        let Some(sums) = &self.volume.store.sums else { return };
        let blocks = self.volume.store.write_back.read();
        for (block, bytes) in stages.iter_mut().flatten() {
            if let Some(buffer) = blocks.metadata.get(block) {
                sums.set_checksum(buffer.role, FsBlock(*block), bytes);
            }
        }
    }

    fn outbox(&self) -> Result<&CommitQueue> {
        self.volume.outbox()
    }

    /// Seals blocks of contents, or one of metadata that carries its mark already.
    pub(crate) fn queue_chain(&mut self, chain: QueuedChain) -> Result<u64> {
        let contents = chain.contents.clone();
        let sealed = self.outbox()?.enqueue(chain);
        self.volume.store.write_back.write().mark_contents_queued(&contents, sealed);
        Ok(sealed)
    }

    /// Seals a chain that, once it is taken, has taken the batch.
    pub(crate) fn queue_batch_chain(&mut self, chain: QueuedChain) -> Result<u64> {
        Ok(self.outbox()?.enqueue_changes(chain, self.writer.batch_change))
    }

    /// Brings descriptors and superblock up to date.
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
        let (blocks, inodes) = self.writer.free();
        let now = to_disk_seconds(self.now);
        self.modify_superblock(|raw| {
            if now != 0 {
                raw.s_wtime.set(now);
            }
            raw.set_free(blocks, inodes)
        })
    }

    /// Changes the superblock; its sum is made right on the way to the disk.
    pub(crate) fn modify_superblock(
        &mut self,
        change: impl FnOnce(&mut RawSuperblock) -> Result<()>,
    ) -> Result<()> {
        let (block, at) = self.volume.super_.location();
        self.modify_block(block, Role::Superblock, |bytes| {
            change(RawSuperblock::view_mut(bytes.get_mut(at..).unwrap_or_default())?)
        })?
    }

    /// Says in the superblock that the volume uses a feature.
    pub(crate) fn set_ro_compat_feature(&mut self, feature: Feature) -> Result<()> {
        self.modify_superblock(|raw| {
            feature.set(raw, true);
            Ok(())
        })
    }
}
