//! A log before places: batches as transactions of the journal (JBD2).
//!
//! ```text
//!   batch ──▶ contents in place + descriptors, copies, revokes ▶ commit block    what a sync waits for
//!   later     blocks in place, each once, as they were last   ▶ tail of the log  a checkpoint
//!
//!   log:   | .. free .. | tail: T5 | T6 | T7 | head: .. free .. |
//! ```
//! Law 1: contents are durable before the commit block of the transaction that leads to them is
//! written, and a block goes to its place once that of its transaction is durable.
//! Law 2: what is committed and not in its place is read from memory: the overlay keeps it,
//! frozen, whatever changes it meanwhile.
//! Law 3: the tail moves once everything before it is in place, durably; the next transaction
//! follows that: no log that is replayed has copies of what it does not know to be freed.
//! Law 4: a block that is freed while the log has a copy of it is revoked in the transaction that
//! frees it. As nothing freed is given out before that is durable, no copy is put over what the
//! block is used for next.
//! Law 5: but for the first one and one behind a checkpoint, a transaction follows nothing: its
//! copies go to the log while the commit block before is on its way, with one flush for both.
//! Law 6: the superblock says that the volume needs recovery from before the first transaction
//! until all of it is in place and the log is empty.

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

/// Bytes that one chain puts in place.
const CHECKPOINT_CHAIN_BYTES: usize = 4 << 20;
/// Committed blocks that are kept in memory until they are put in place, in bytes.
const MAX_UNCHECKPOINTED_BYTES: usize = 16 << 20;

/// What made writing stop, as Linux records it: a disk that failed, and damage.
const EIO: i32 = -5;
const EUCLEAN: i32 = -117;

/// What the journal says once everything that is committed is in its place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterCheckpoint {
    /// The next transaction is where the tail is now.
    LogContinues,
    /// There is nothing to recover.
    LogEmpty,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct JournalProtocol {
    journal_file: JournalFile,
    /// The first block of the journal, as it was written last.
    superblock_block: SharedBytes,
    /// The number of the next transaction.
    sequence: u32,
    /// Where in the log the next transaction begins.
    head: u32,
    /// Where the oldest transaction begins that is not in place, and its number.
    tail: (u32, u32),
    /// Whether the journal's superblock says that there is a log.
    is_log_active: bool,
    /// Whether it says that there may be revokes.
    has_revokes: bool,
    /// Blocks from the tail to the head.
    used: u32,
    /// The next transaction waits for a checkpoint: it may be written where the tail was, and
    /// what it frees is in no copy of the log from then on.
    follows_checkpoint: bool,
    /// When the last transaction was committed: times in a log do not go back.
    time: Duration,
    /// The next batch is the last: everything is put in place, and the log is empty.
    is_closing: bool,
}

impl JournalProtocol {
    /// The protocol of a volume whose journal holds nothing that counts.
    pub(crate) fn new(log: JournalFile) -> Self {
        let sequence = match log.super_.start {
            None => log.super_.sequence,
            // Left over: the volume says that all of it is in place.
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

    fn form(&self) -> &JournalFormat {
        &self.journal_file.super_.form
    }

    fn len(&self) -> u32 {
        self.journal_file.super_.log_blocks()
    }

    /// Whether a batch should end: it fills a quarter of the log.
    fn is_batch_full(&self, batch: &Batch) -> bool {
        let freed: u64 = batch.freed_blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let revokes = saturating_usize(freed.min(self.used.into()));
        log_blocks_needed(self.form(), batch.blocks.len() + batch.usage.len(), revokes)
            >= self.len() / 4
    }

    fn volume_block(&self, at: u32) -> Result<u64> {
        let place = self
            .journal_file
            .volume_block(at)
            .ok_or(Error::corrupt("journal: a block of it is nowhere"))?;
        Ok(place.0)
    }

    /// The first block of the journal, with the tail as it is now; with `start`, where the log
    /// begins.
    fn superblock(&mut self, start: Option<u32>) -> Result<(u64, SharedBytes)> {
        let raw = RawJournalSuperblock::view_mut(self.superblock_block.make_mut())?;
        if self.has_revokes {
            raw.enable_revokes();
        }
        raw.set_tail(start, self.tail.1);
        self.is_log_active = start.is_some();
        Ok((self.volume_block(0)?, self.superblock_block.clone()))
    }

    /// The stages of a transaction: what goes to the log, beside `contents`, and the commit block.
    fn build_transaction_chain(
        &mut self,
        tx: &mut Transaction<'_>,
        contents: Stage,
        blocks: Stage,
        revoked: &[u64],
    ) -> Result<Chain> {
        let room = log_blocks_needed(self.form(), blocks.len(), revoked.len());
        if room > self.len() - self.used {
            self.queue_checkpoint(tx, AfterCheckpoint::LogContinues)?;
        }
        if room > self.len() {
            let have = self.len();
            let feature = format!("a change needs {room} blocks of the journal, which has {have}");
            return Err(Error::Unsupported { feature });
        }
        let after = match std::mem::take(&mut self.follows_checkpoint) {
            true => ChainDependency::AllEarlier,
            false if !self.is_log_active => ChainDependency::PendingSync,
            // Until it is committed, what is written of it counts for nothing.
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
                .insert(block, CheckpointBlock { now, checkpoint_chain: None });
        }
        Ok(Chain { stages: vec![stage, laid.commit], sync_stage: 1, dependency: after })
    }

    /// Seals a checkpoint: everything that is committed goes to its place, then the tail moves.
    fn queue_checkpoint(&mut self, tx: &mut Transaction<'_>, then: AfterCheckpoint) -> Result<()> {
        let most = CHECKPOINT_CHAIN_BYTES / saturating_usize(self.form().block_bytes.into()).max(1);
        let mut all: Vec<(u64, SharedBytes)> = {
            let overlay = tx.volume.store.write_back.read();
            let waiting =
                overlay.awaiting_checkpoint.iter().filter(|(_, it)| it.checkpoint_chain.is_none());
            waiting.map(|(block, it)| (*block, it.now.clone())).collect()
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

    /// The last chain: the superblock in its place, once everything else is and the log is empty.
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
        // Each block of a file may be of another group: its bitmap and its descriptor change.
        let needed = u64::from(groups) * 2 + 16;
        (needed > u64::from(self.len() / 4)).then_some((self.len() / 16).max(1))
    }

    fn has_journal(&self) -> bool {
        true
    }

    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
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
        let block_bytes = saturating_usize(self.form().block_bytes.into());
        let logged = tx.volume.store.write_back.read().awaiting_checkpoint.len();
        if self.used > self.len() / 2
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
