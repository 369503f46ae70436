//! Commits, syncs and the end of an open volume, and waits for free space.

use super::Volume;
use crate::commit::chain::{Chain, ChainDependency, Stage};
use crate::commit::group_commit::GroupCommit;
use crate::commit::queue::CommitQueue;
use crate::format::superblock::to_disk_seconds;
use crate::transaction::Transaction;
use crate::write_context::{StopReason, WriteState};
use crate::{Error, InodeNumber, Result};

/// Retries of a transaction that found no space.
const MAX_NO_SPACE_RETRIES: usize = 4;
/// Number of waits for clients to close orphans, of a millisecond each: a mount learns of them from
/// messages that wait behind those of others, and for a CPU.
const MAX_ORPHAN_WAITS: usize = 300;
/// Low-space thresholds in bytes and inodes: below these, one change may need all the free space.
const LOW_SPACE_BYTES: u64 = 8 << 20;
const LOW_SPACE_INODES: u64 = 16;
/// Blocks that a thin disk must have free in addition to file data.
const RESERVED_METADATA_BLOCKS: u64 = 256;

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
        let commit_queue = self.commit_queue()?;
        let wanted = if commit_queue.waits_separately {
            commit_queue.last_ticket()?
        } else {
            commit_queue.last_ticket_with_frees()?
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
        let commit_queue = self.commit_queue()?;
        let batch = self.group_commit()?;
        let mut opened = batch.enter();
        if batch.has_others()
            && let Some(ticket) = commit_queue.sync_ticket()?
        {
            self.wait_for_ticket(ticket)?;
        }
        if let Some(turn) = opened.try_lead() {
            // A thread that syncs alone can send and wait in one call.
            self.transact_and_write_out(|tx| tx.close_batch(), !batch.has_others())?;
            drop(turn);
        }
        // Another thread may have queued a chain that it has not sent yet.
        if let Some(writing) = &self.writing {
            self.send(writing, false)?;
        }
        opened.finish();
        match commit_queue.sync_ticket()? {
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
    /// Damage may keep an orphan from being deleted: everything else is written before, and the
    /// volume is marked as damaged.
    ///
    /// # Errors
    /// An error of the disk; what kept an orphan from being deleted.
    pub fn close(&self) -> Result<()> {
        let damage = self.evict_orphans();
        let closed = self.transact(|tx| {
            if damage.is_some() {
                tx.modify_superblock(|raw| {
                    raw.mark_errors();
                    Ok(())
                })?;
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
                if clean && damage.is_none() {
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
                let commit_queue = self.commit_queue()?;
                if let Ok(Some(last)) = commit_queue.last_ticket()
                    && let Err(error) = commit_queue.wait_for_ticket(last, |_, _| {})
                {
                    log::warn!("what was written last may be lost: {error}");
                }
                return Err(damage.unwrap_or(Error::ReadOnly));
            }
            Err(error) => {
                // What cannot be committed now never can be: nothing may be added to it.
                if let Some(writing) = &self.writing {
                    let mut writer = writing.state.write();
                    writer.stop(&error);
                    self.record_failure(&mut writer, &error);
                }
                return Err(error);
            }
        };
        if changed && let Some(ticket) = self.commit_queue()?.last_ticket()? {
            self.wait_for_ticket(ticket)?;
        }
        self.mark_closed()?;
        damage.map_or(Ok(()), Err)
    }

    /// Deletes the orphans, in use or not, each as a change of its own. Returns the first error;
    /// such an orphan is left to a check.
    fn evict_orphans(&self) -> Option<Error> {
        let mut damage = None;
        let orphans = self.reader.store.write_back.orphans();
        if !orphans.is_empty()
            && let Err(error) = self.transact(|tx| tx.close_batch())
        {
            return Some(error);
        }
        for inode in orphans {
            match self.transact(|tx| tx.evict_inode(inode)) {
                Ok(()) => {}
                Err(Error::ReadOnly) => break,
                Err(error) => {
                    log::error!("inode {inode} has no name and cannot be deleted: {error}");
                    damage.get_or_insert(error);
                }
            }
        }
        damage
    }

    fn mark_closed(&self) -> Result<()> {
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
        let block = u64::from(self.reader.super_.block_bytes);
        let metadata = writing.state.read().batch.blocks.len() as u64;
        let waiting = metadata
            .saturating_add(self.reader.store.write_back.read().dirty_contents as u64)
            .saturating_mul(block);
        // One operation changes few metadata blocks; the reserve also covers deletions.
        writing.commit_queue.ensure_space(
            waiting
                .saturating_add(bytes)
                .saturating_add(bytes / 64)
                .saturating_add(RESERVED_METADATA_BLOCKS * block),
        )
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
        self.reader.store.write_back.read().orphans.len()
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
