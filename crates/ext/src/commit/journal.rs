//! JBD2 protocol: each batch is one journal transaction, checkpointed to its home blocks later.
//!
//! ```text
//!   batch ──▶ file data + descriptors, copies, revokes ──▶ commit block      a sync waits for this
//!   later     newest version of each home block        ──▶ tail of the log   a checkpoint
//!
//!   log:   | .. free .. | tail: T5 | T6 | T7 | head: .. free .. |
//! ```
//! Law 1: file data is durable before the commit block of the transaction that references it is
//! written. A block is written to its home once the commit block of its transaction is durable.
//! Law 2: readers get committed blocks from the write-back cache until they are checkpointed. Later
//! changes copy the block.
//! Law 3: the tail moves once everything before it is durable in its home block, and the next
//! transaction follows that. So a replayed log has no copies of blocks whose revokes it lost.
//! Law 4: a block freed while the log has a copy of it is revoked in the transaction that frees it.
//! Freed blocks are reused only once that is durable, so replay never overwrites the new user's
//! data.
//! Law 5: only the first transaction and one after a checkpoint depend on earlier chains. All
//! others go to the log while the commit block before is in flight, with one flush for both.
//! Law 6: the superblock has `needs_recovery` set from before the first transaction until all of
//! them are checkpointed and the log is empty.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with blocks of a log that was checked, of fewer than 2^32 blocks"
)]

use std::time::Duration;

use super::batch::{Batch, Operation};
use super::protocol::{Chain, CommitProtocol, Stage};
use super::queue::{ChainDependency, FreedSpace, QueuedChain};
use crate::blocks::data::SharedBytes;
use crate::blocks::write_back::CheckpointBlock;
use crate::format::jbd2::{JournalFormat, RawJournalSuperblock};
use crate::journal::JournalFile;
use crate::journal::transaction_layout::{
    TransactionContents, lay_out_transaction, log_blocks_needed,
};
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::{Error, Result};

/// Bytes of home blocks that one chain writes.
const CHECKPOINT_CHAIN_BYTES: usize = 4 << 20;
/// Limit of committed blocks cached until their checkpoint, in bytes.
const MAX_UNCHECKPOINTED_BYTES: usize = 16 << 20;

/// Journal `s_errno` values as in Linux: for an I/O error, and for corruption.
const EIO: i32 = -5;
const EUCLEAN: i32 = -117;

/// State of the log after a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterCheckpoint {
    /// The next transaction starts at the new tail.
    LogContinues,
    /// The journal is empty: nothing to recover.
    LogEmpty,
}

/// JBD2 commit protocol.
#[derive(Debug)]
pub(crate) struct JournalProtocol {
    journal_file: JournalFile,
    /// Journal superblock, as last written.
    superblock_block: SharedBytes,
    /// Sequence number of the next transaction.
    sequence: u32,
    /// Log block at which the next transaction begins.
    head: u32,
    /// Log block and sequence number of the oldest transaction that is not checkpointed.
    tail: (u32, u32),
    /// True if `s_start` of the journal superblock is set.
    is_log_active: bool,
    /// True if the journal superblock has the revoke feature set.
    has_revokes: bool,
    /// Log blocks from tail to head.
    used: u32,
    /// The next transaction must follow the checkpoint: it may overwrite log blocks before the
    /// tail, and the log has no copies of the blocks it frees.
    follows_checkpoint: bool,
    /// Time of the last commit; commit times never decrease.
    time: Duration,
    /// The next batch is the last: it checkpoints everything and empties the log.
    is_closing: bool,
}

impl JournalProtocol {
    /// Returns the protocol of a volume whose journal needs no recovery.
    pub(crate) fn new(log: JournalFile) -> Self {
        let sequence = match log.super_.start {
            None => log.super_.sequence,
            // Old transactions: the superblock says that all of them are checkpointed.
            Some(_) => match log.scan() {
                Ok(found) if found.damage.is_none() => found.next.wrapping_add(1),
                _ => log.super_.sequence.wrapping_add(log.super_.len),
            },
        };
        let first = log.super_.first;
        Self {
            superblock_block: log.first.clone(),
            sequence,
            head: first,
            tail: (first, sequence),
            is_log_active: false,
            has_revokes: log.super_.may_revoke(),
            used: 0,
            follows_checkpoint: false,
            time: Duration::ZERO,
            is_closing: false,
            journal_file: log,
        }
    }

    fn journal_format(&self) -> &JournalFormat {
        &self.journal_file.super_.format
    }

    fn log_blocks(&self) -> u32 {
        self.journal_file.super_.log_blocks()
    }

    /// Returns true if the batch needs a quarter of the log.
    fn is_batch_full(&self, batch: &Batch) -> bool {
        let freed: u64 = batch.freed_blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let revokes = saturating_usize(freed.min(self.used.into()));
        log_blocks_needed(self.journal_format(), batch.blocks.len() + batch.usage.len(), revokes)
            >= self.log_blocks() / 4
    }

    fn volume_block(&self, at: u32) -> Result<u64> {
        let place = self
            .journal_file
            .volume_block(at)
            .ok_or(Error::corrupt("journal: a block of it is nowhere"))?;
        Ok(place.0)
    }

    /// Returns the journal superblock with the current tail and `start` as the start of the log.
    fn superblock(&mut self, start: Option<u32>) -> Result<(u64, SharedBytes)> {
        let raw = RawJournalSuperblock::view_mut(self.superblock_block.make_mut())?;
        if self.has_revokes {
            raw.enable_revokes();
        }
        raw.set_tail(start, self.tail.1);
        self.is_log_active = start.is_some();
        Ok((self.volume_block(0)?, self.superblock_block.clone()))
    }

    /// Builds the stages of a transaction: `contents` with the log blocks, then the commit block.
    fn build_transaction_chain(
        &mut self,
        tx: &mut Transaction<'_>,
        contents: Stage,
        blocks: Stage,
        revoked: &[u64],
    ) -> Result<Chain> {
        let room = log_blocks_needed(self.journal_format(), blocks.len(), revoked.len());
        if room > self.log_blocks() - self.used {
            self.queue_checkpoint(tx, AfterCheckpoint::LogContinues)?;
        }
        if room > self.log_blocks() {
            let have = self.log_blocks();
            let feature = format!("a change needs {room} blocks of the journal, which has {have}");
            return Err(Error::Unsupported { feature });
        }
        let after = match std::mem::take(&mut self.follows_checkpoint) {
            true => ChainDependency::AllEarlier,
            false if !self.is_log_active => ChainDependency::PendingSync,
            // Until its commit block is written, replay ignores the transaction.
            false => ChainDependency::NoDependency,
        };

        let mut stage = contents;
        let first_revoke = !revoked.is_empty() && !self.has_revokes;
        self.has_revokes |= first_revoke;
        if !self.is_log_active || first_revoke {
            let start = self.tail.0;
            stage.extend([self.superblock(Some(start))?]);
        }
        let now = Duration::new(u64::try_from(tx.now.seconds).unwrap_or(0), tx.now.nanoseconds);
        self.time = self.time.max(now);
        let (sequence, time, copies) = (self.sequence, self.time, &blocks);
        let laid = lay_out_transaction(
            &self.journal_file,
            self.head,
            &TransactionContents { sequence, time, copies, revoked },
        )?;
        stage.extend(laid.first);
        self.head = laid.head;
        self.used += laid.blocks;
        self.sequence = self.sequence.wrapping_add(1);

        let mut overlay = tx.volume.store.write_back.write();
        for block in revoked {
            overlay.awaiting_checkpoint.remove(block);
        }
        for (block, now) in blocks {
            overlay
                .awaiting_checkpoint
                .insert(block, CheckpointBlock { current: now, checkpoint_chain: None });
        }
        Ok(Chain { stages: vec![stage, laid.commit], sync_stage: 1, dependency: after })
    }

    /// Queues a checkpoint: writes all committed blocks to their home blocks, then moves the tail.
    fn queue_checkpoint(&mut self, tx: &mut Transaction<'_>, then: AfterCheckpoint) -> Result<()> {
        let most = CHECKPOINT_CHAIN_BYTES
            / saturating_usize(self.journal_format().block_bytes.into()).max(1);
        let mut all: Vec<(u64, SharedBytes)> = {
            let overlay = tx.volume.store.write_back.read();
            let waiting =
                overlay.awaiting_checkpoint.iter().filter(|(_, it)| it.checkpoint_chain.is_none());
            waiting.map(|(block, it)| (*block, it.current.clone())).collect()
        };
        while !all.is_empty() {
            let rest = all.split_off(all.len().min(most.max(1)));
            let stage: Stage = std::mem::replace(&mut all, rest).into_iter().collect();
            let placed: Vec<u64> = stage.keys().copied().collect();
            let sealed = tx.queue_chain(QueuedChain {
                after: ChainDependency::PendingSync,
                stages: vec![stage],
                sync_stage: None,
                contents: vec![],
                freed: FreedSpace::default(),
                checkpointed: placed.clone(),
            })?;
            let mut overlay = tx.volume.store.write_back.write();
            for block in placed {
                if let Some(it) = overlay.awaiting_checkpoint.get_mut(&block) {
                    it.checkpoint_chain = Some(sealed);
                }
            }
        }
        self.tail = (self.head, self.sequence);
        let start = Some(self.head).filter(|_| then == AfterCheckpoint::LogContinues);
        let first = self.superblock(start)?;
        tx.queue_chain(QueuedChain {
            after: ChainDependency::AllEarlier,
            stages: vec![Stage::from([first])],
            sync_stage: None,
            contents: vec![],
            freed: FreedSpace::default(),
            checkpointed: vec![],
        })?;
        self.follows_checkpoint = true;
        self.used = 0;
        Ok(())
    }

    /// Builds the last chain: the superblock, after everything is checkpointed and the log is
    /// empty.
    fn build_closing_chain(
        &mut self,
        tx: &mut Transaction<'_>,
        contents: Stage,
        mut blocks: Stage,
        revoked: &[u64],
    ) -> Result<Chain> {
        let (place, _) = tx.volume.super_.location();
        let last = blocks.remove(&place.0);
        if !(contents.is_empty() && blocks.is_empty() && revoked.is_empty()) {
            let chain = self.build_transaction_chain(tx, contents, blocks, revoked)?;
            tx.queue_batch_chain(QueuedChain {
                after: chain.dependency,
                stages: chain.stages,
                sync_stage: Some(chain.sync_stage),
                contents: vec![],
                freed: FreedSpace::default(),
                checkpointed: vec![],
            })?;
        }
        self.queue_checkpoint(tx, AfterCheckpoint::LogEmpty)?;
        self.is_closing = false;
        let stage: Stage = last.into_iter().map(|bytes| (place.0, bytes)).collect();
        Ok(Chain { stages: vec![stage], sync_stage: 0, dependency: ChainDependency::AllEarlier })
    }
}

impl CommitProtocol for JournalProtocol {
    fn can_join_batch(&self, batch: &Batch, _: &Operation) -> bool {
        !self.is_batch_full(batch)
    }

    fn is_complete(&self, batch: &Batch) -> bool {
        self.is_batch_full(batch)
    }

    fn max_blocks_per_truncate(&self, groups: u32) -> Option<u32> {
        // Each block may be in another group, which changes that group's bitmap and descriptor.
        let needed = u64::from(groups) * 2 + 16;
        (needed > u64::from(self.log_blocks() / 4)).then_some((self.log_blocks() / 16).max(1))
    }

    fn has_journal(&self) -> bool {
        true
    }

    fn build_next_chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        tx.write_free_counts()?;
        let contents = tx.collect_dirty_contents();
        let (mut blocks, mut revoked) = (Stage::new(), Vec::new());
        {
            let overlay = tx.volume.store.write_back.read();
            for block in &tx.writer.batch.blocks {
                let buffer = overlay.metadata.get(block).filter(|buffer| buffer.is_dirty());
                blocks.extend(buffer.map(|buffer| (*block, buffer.current.clone())));
            }
            for (start, count) in &tx.writer.batch.freed_blocks {
                let freed = overlay.awaiting_checkpoint.range(*start..start + u64::from(*count));
                let in_log = freed.filter(|(_, it)| it.checkpoint_chain.is_none());
                revoked.extend(in_log.map(|(block, _)| *block));
            }
        }
        tx.set_block_checksums(std::slice::from_mut(&mut blocks));
        if self.is_closing {
            return self.build_closing_chain(tx, contents, blocks, &revoked);
        }
        if blocks.is_empty() && revoked.is_empty() {
            let stages = if contents.is_empty() { vec![] } else { vec![contents] };
            return Ok(Chain { stages, sync_stage: 0, dependency: ChainDependency::PendingSync });
        }
        self.build_transaction_chain(tx, contents, blocks, &revoked)
    }

    fn checkpoint(&mut self, tx: &mut Transaction<'_>) -> Result<()> {
        let block_bytes = saturating_usize(self.journal_format().block_bytes.into());
        let logged = tx.volume.store.write_back.read().awaiting_checkpoint.len();
        if self.used > self.log_blocks() / 2
            || (self.used > 0 && logged * block_bytes > MAX_UNCHECKPOINTED_BYTES)
        {
            self.queue_checkpoint(tx, AfterCheckpoint::LogContinues)?;
        }
        Ok(())
    }

    fn quiesce(&mut self, tx: &mut Transaction<'_>) -> Result<()> {
        if self.used > 0 { self.queue_checkpoint(tx, AfterCheckpoint::LogEmpty) } else { Ok(()) }
    }

    fn prepare_close(&mut self) {
        self.is_closing = true;
    }

    fn error_block(&mut self, error: &Error) -> Option<(u64, SharedBytes)> {
        let raw = RawJournalSuperblock::view_mut(self.superblock_block.make_mut()).ok()?;
        raw.set_errno(match error {
            Error::Corrupt { .. } => EUCLEAN,
            _ => EIO,
        });
        let start = self.is_log_active.then_some(self.tail.0);
        self.superblock(start).ok()
    }
}
