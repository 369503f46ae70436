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

use std::time::Duration;

use draconis_types::Time;

use super::CommitProtocol;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::commit::batch::{Batch, Operation};
use crate::commit::chain::{Chain, ChainDependency, Stage};
use crate::commit::changes::Changes;
use crate::format::jbd2::{JournalFormat, RawJournalSuperblock};
use crate::journal::JournalFile;
use crate::journal::transaction_layout::{
    TransactionContents, lay_out_transaction, log_blocks_needed,
};
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
    /// Committed blocks whose checkpoint is not queued.
    uncheckpointed: Stage,
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
    pub(crate) fn new(journal_file: JournalFile) -> Self {
        let sequence = match journal_file.super_.start {
            None => journal_file.super_.sequence,
            // Old transactions: the superblock says that all of them are checkpointed.
            Some(_) => match journal_file.scan() {
                Ok(found) if found.damage.is_none() => found.next.wrapping_add(1),
                _ => journal_file.super_.sequence.wrapping_add(journal_file.super_.len),
            },
        };
        let head = journal_file.super_.head;
        Self {
            superblock_block: journal_file.first.clone(),
            sequence,
            head,
            tail: (head, sequence),
            is_log_active: false,
            has_revokes: journal_file.super_.may_revoke(),
            used: 0,
            uncheckpointed: Stage::new(),
            follows_checkpoint: false,
            time: Duration::ZERO,
            is_closing: false,
            journal_file,
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
        let revokes = saturating_usize(batch.freed_block_count.min(self.used.into()));
        log_blocks_needed(
            self.journal_format(),
            batch.blocks.len().saturating_add(batch.usage.len()),
            revokes,
        ) >= self.log_blocks() / 4
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
        if start.is_none() {
            raw.set_head(self.head);
        }
        self.is_log_active = start.is_some();
        Ok((self.volume_block(0)?, self.superblock_block.clone()))
    }

    /// Builds the chain of a transaction: `contents` with the log blocks, then the commit block. If
    /// the log lacks space for it, a checkpoint comes first.
    fn build_transaction(
        &mut self,
        time: Time,
        contents: Stage,
        logged: Stage,
        revoked: Vec<u64>,
    ) -> Result<Vec<Chain>> {
        let needed = log_blocks_needed(self.journal_format(), logged.len(), revoked.len());
        // Before the tail moves: an error block must not skip transactions without a checkpoint.
        if needed > self.log_blocks() {
            let have = self.log_blocks();
            let feature =
                format!("a change needs {needed} blocks of the journal, which has {have}");
            return Err(Error::Unsupported { feature });
        }
        let mut chains = match needed > self.log_blocks().saturating_sub(self.used) {
            true => self.build_checkpoint(AfterCheckpoint::LogContinues)?,
            false => vec![],
        };
        let dependency = match std::mem::take(&mut self.follows_checkpoint) {
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
        let now = Duration::new(u64::try_from(time.seconds).unwrap_or(0), time.nanoseconds);
        self.time = self.time.max(now);
        let (sequence, time, copies) = (self.sequence, self.time, &logged);
        let laid = lay_out_transaction(
            &self.journal_file,
            self.head,
            &TransactionContents { sequence, time, copies, revoked: &revoked },
        )?;
        stage.extend(laid.first);
        self.head = laid.head;
        self.used = self.used.saturating_add(laid.blocks);
        self.sequence = self.sequence.wrapping_add(1);
        for block in &revoked {
            self.uncheckpointed.remove(block);
        }
        self.uncheckpointed.extend(logged.iter().map(|(block, bytes)| (*block, bytes.clone())));
        chains.push(Chain {
            dependency,
            stages: vec![stage, laid.commit],
            sync_stage: Some(1),
            logged,
            revoked,
            ..Chain::default()
        });
        Ok(chains)
    }

    /// Builds a checkpoint: writes all committed blocks to their home blocks, then moves the tail.
    #[allow(clippy::arithmetic_side_effects, reason = "the divisor is at least 1")]
    fn build_checkpoint(&mut self, then: AfterCheckpoint) -> Result<Vec<Chain>> {
        let most = CHECKPOINT_CHAIN_BYTES
            / saturating_usize(self.journal_format().block_bytes.into()).max(1);
        let mut left = std::mem::take(&mut self.uncheckpointed).into_iter().peekable();
        let mut chains = Vec::new();
        while left.peek().is_some() {
            let stage: Stage = left.by_ref().take(most.max(1)).collect();
            chains.push(Chain {
                checkpointed: stage.keys().copied().collect(),
                stages: vec![stage],
                ..Chain::default()
            });
        }
        self.tail = (self.head, self.sequence);
        let start = Some(self.head).filter(|_| then == AfterCheckpoint::LogContinues);
        chains.push(Chain {
            dependency: ChainDependency::AllEarlier,
            stages: vec![Stage::from([self.superblock(start)?])],
            ..Chain::default()
        });
        self.follows_checkpoint = true;
        self.used = 0;
        Ok(chains)
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
        let needed = (u64::from(groups) * 2).saturating_add(16);
        (needed > u64::from(self.log_blocks() / 4)).then_some((self.log_blocks() / 16).max(1))
    }

    fn has_journal(&self) -> bool {
        true
    }

    fn build_chains(&mut self, changes: Changes<'_>) -> Result<Vec<Chain>> {
        let mut revoked = Vec::new();
        for (start, count) in &changes.batch.freed_blocks {
            let freed = self.uncheckpointed.range(*start..start.saturating_add(u64::from(*count)));
            revoked.extend(freed.map(|(block, _)| *block));
        }
        let Changes { contents, blocks, time, .. } = changes;
        let (mut logged, mut superblock) = (Stage::new(), Stage::new());
        for it in blocks {
            let is_last = self.is_closing && it.role == Role::Superblock;
            let stage = if is_last { &mut superblock } else { &mut logged };
            stage.insert(it.block, it.current);
        }
        let mut chains = match logged.is_empty() && revoked.is_empty() {
            true if contents.is_empty() || !self.is_closing => Chain::of_stages([contents], 0),
            _ => self.build_transaction(time, contents, logged, revoked)?,
        };
        if std::mem::take(&mut self.is_closing) {
            // The superblock follows once everything is checkpointed and the log is empty.
            chains.extend(self.build_checkpoint(AfterCheckpoint::LogEmpty)?);
            let dependency = ChainDependency::AllEarlier;
            let (stages, sync_stage) = (vec![superblock], Some(0));
            chains.push(Chain { dependency, stages, sync_stage, ..Chain::default() });
        }
        Ok(chains)
    }

    fn checkpoint(&mut self, logged_blocks: usize) -> Result<Vec<Chain>> {
        let block_bytes = saturating_usize(self.journal_format().block_bytes.into());
        let is_due = self.used > self.log_blocks() / 2
            || (self.used > 0
                && logged_blocks.saturating_mul(block_bytes) > MAX_UNCHECKPOINTED_BYTES);
        if is_due { self.build_checkpoint(AfterCheckpoint::LogContinues) } else { Ok(vec![]) }
    }

    fn quiesce(&mut self) -> Result<Vec<Chain>> {
        if self.used > 0 { self.build_checkpoint(AfterCheckpoint::LogEmpty) } else { Ok(vec![]) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::uncached::read_superblock;
    use crate::journal::open_journal;
    use crate::testing::journaled_disk;

    /// The log bounds what waits for a checkpoint, and what one transaction frees.
    #[test]
    fn checkpoints_and_truncations_are_due() {
        let disk = journaled_disk(1024, 16 << 20);
        let super_ = read_superblock(&*disk).unwrap();
        let mut protocol = JournalProtocol::new(open_journal(disk, &super_).unwrap());
        let log = protocol.log_blocks();
        let most = MAX_UNCHECKPOINTED_BYTES / 1024;
        for (used, logged, is_due) in [
            (0, most + 1, false),
            (1, most, false),
            (1, most + 1, true),
            (log / 2, 0, false),
            (log / 2 + 1, 0, true),
            (log - 1, 0, true),
        ] {
            protocol.used = used;
            let chains = protocol.checkpoint(logged).unwrap();
            assert_eq!(!chains.is_empty(), is_due, "{used} of {log}, {logged}");
        }
        let groups = (log / 4 - 16) / 2;
        assert_eq!(protocol.max_blocks_per_truncate(groups), None);
        assert_eq!(protocol.max_blocks_per_truncate(groups + 1), Some(log / 16));
    }
}
