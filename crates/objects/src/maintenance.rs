//! Maintenance: background work, its order, and the part that each change does.
//!
//! All work is measured in bytes written to the disk, which use up segments and lengthen the log.
//! Each kind of work is spread over so many bytes that it ends before more of its kind comes. Every
//! change does a part, so that none waits for long:
//!
//! | work | done within | bytes counted |
//! |---|---|---|
//! | flush a sealed memtable | half a log: the other half is left to write the run | all |
//! | compact two runs | a sixteenth: long before the next run comes | the log's |
//! | merge runs | half of the bytes since the last merge began, one log to eight | the log's |
//! | clean a segment | as much as it gains, or less as free space shrinks | those of changes |
//! | begin a checkpoint | a log | the log's |
//!
//! Bytes written by maintenance do not grow its own backlog; otherwise a merge would continue until
//! everything is merged. The backlog of cleaning grows by the payload of changes, times the write
//! amplification without moved bytes. Nodes and runs come in bursts, and cleaning for a burst at
//! once would use up free space.
//!
//! Law 1: a step changes memory and submits writes. The caller performs required I/O without the
//! lock; only after some failed attempts a step blocks.
//! Law 2: a backlog stays: a change that leaves a step to the next one still grows it.
//! Law 3: idle time may reduce backlogs in advance; it starts no work that is not due.

use crate::Result;
use crate::backlog::Backlog;
use crate::codec::to_usize_saturating;
use crate::core::Core;
use crate::levels::flush::PREFETCHED_PAIRS;
use crate::required_io::{MaintenanceStep, MissPolicy};

/// Pairs of one step of compaction and merge.
const PAIRS_PER_STEP: u64 = 64;
/// Most pairs that one change compacts, and one more for so many bytes of its own: a group of a
/// thousand pairs brings more than these.
const MAX_COMPACTED_PAIRS: u64 = 1024;
const BYTES_PER_COMPACTED_PAIR: u64 = 16;
/// Bytes that a short change cleans at most.
const CLEANED_BYTES_MIN: u64 = 96 << 10;
/// Backlog of cleaning, in bytes, from which a change waits for the cleaner's reads.
const MAX_CLEANING_BACKLOG_BYTES: u64 = 1 << 20;

/// Limits of the maintenance in one change.
#[derive(Debug)]
pub(crate) struct WorkBudget {
    compact_pairs: u64,
    clean_bytes: u64,
    /// Number of waits for the cleaner's reads.
    waits: u64,
    /// True if it may begin a checkpoint: in a small store that makes the next one due.
    may_begin_checkpoint: bool,
    /// True if it may begin to clean a segment: one per change.
    may_begin_cleaning: bool,
}

impl WorkBudget {
    /// Returns the budget of a change of so many bytes.
    pub fn for_change(bytes: u64) -> Self {
        Self {
            compact_pairs: MAX_COMPACTED_PAIRS.saturating_add(bytes / BYTES_PER_COMPACTED_PAIR),
            clean_bytes: bytes.saturating_mul(16).max(CLEANED_BYTES_MIN),
            waits: (bytes / 8192).saturating_add(1),
            may_begin_checkpoint: true,
            may_begin_cleaning: true,
        }
    }
}

impl Core {
    /// Returns true if a checkpoint is due.
    fn is_checkpoint_due(&self) -> bool {
        self.log.bytes.saturating_add(self.log.batch.bytes as u64) >= self.reserve.log_bytes
    }

    /// Returns true if there is free space for compaction and merge.
    fn has_free_space(&self) -> bool {
        self.log.segments.free_segments() > self.reserve.reserved_segments
    }

    /// Does the next step that is due and within the budget, if there is one.
    pub fn next_step(
        &mut self,
        share: &mut WorkBudget,
        patience: MissPolicy,
    ) -> Result<Option<MaintenanceStep>> {
        if self.stopped.is_some() {
            return Ok(None);
        }
        if let Some(step) = self.complete_old_checkpoint(patience)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_flush_step(patience)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_compaction_step(share)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_merge_step(patience)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_cleaning_step(share, patience)? {
            return Ok(Some(step));
        }
        if self.is_checkpoint_due() && self.levels.flush.is_none() {
            return self.begin_checkpoint_within_budget(share);
        }
        Ok(None)
    }

    fn begin_checkpoint_within_budget(
        &mut self,
        share: &mut WorkBudget,
    ) -> Result<Option<MaintenanceStep>> {
        match std::mem::take(&mut share.may_begin_checkpoint) {
            true => self.begin_checkpoint().map(Some),
            false => Ok(None),
        }
    }

    fn next_flush_step(&mut self, patience: MissPolicy) -> Result<Option<MaintenanceStep>> {
        let Some(counting) = &self.levels.flush else { return Ok(None) };
        let (due, all) = (counting.debt.due_work(), counting.work());
        // In batches that use the prefetched leaves; all of it before the next batch begins.
        let is_late = self.is_checkpoint_due();
        if !counting.is_ready_to_finish && !is_late && due < all.min(16) {
            return Ok(None);
        }
        let pairs = if is_late {
            PREFETCHED_PAIRS
        } else {
            PREFETCHED_PAIRS.min(to_usize_saturating(due).saturating_add(1))
        };
        self.flush_step(pairs, patience).map(Some)
    }

    fn next_compaction_step(&mut self, share: &mut WorkBudget) -> Result<Option<MaintenanceStep>> {
        let (is_behind, has_room) = (self.levels.is_merge_backlogged(), self.has_free_space());
        let Some(folding) = &mut self.levels.compaction else { return Ok(None) };
        let due = folding.debt.due_work();
        let pairs = match is_behind {
            true => MAX_COMPACTED_PAIRS,
            false if due >= PAIRS_PER_STEP || due >= folding.pairs() => {
                due.min(share.compact_pairs)
            }
            false => 0,
        };
        if !has_room || pairs == 0 {
            return Ok(None);
        }
        folding.debt.subtract_done(pairs);
        share.compact_pairs = share.compact_pairs.saturating_sub(pairs);
        self.levels.compact_step(&mut self.log, to_usize_saturating(pairs).saturating_add(1))?;
        Ok(Some(MaintenanceStep::Continue(pairs)))
    }

    fn next_merge_step(&mut self, patience: MissPolicy) -> Result<Option<MaintenanceStep>> {
        let Some(merging) = &self.levels.tree_merge else { return Ok(None) };
        let due = merging.debt.due_work();
        let pairs = match self.levels.is_merge_backlogged() {
            true => self.max_pairs_per_merge_step(),
            false if due >= PAIRS_PER_STEP || due >= merging.layer.pairs.len() as u64 => {
                to_usize_saturating(due).saturating_add(1)
            }
            false => 0,
        };
        if !self.has_free_space() || pairs == 0 {
            return Ok(None);
        }
        self.levels.tree_merge_step(&mut self.log, pairs, patience).map(Some)
    }

    fn next_cleaning_step(
        &mut self,
        share: &mut WorkBudget,
        patience: MissPolicy,
    ) -> Result<Option<MaintenanceStep>> {
        let (free, low) =
            (self.log.segments.free_segments(), self.reserve.cleaning_threshold_segments);
        let is_idle = self.levels.flush.is_none() && self.checkpoints.written.is_none();
        if free.saturating_add(self.segments_awaiting_checkpoint()) >= low
            && self.cleaner.cleaning.is_none()
        {
            self.backlogs.cleaning = Backlog::default();
            // Cleaned segments are free after a checkpoint.
            if free < low.saturating_mul(3) / 4 && is_idle && !self.cleaner.since.is_empty() {
                return self.begin_checkpoint_within_budget(share);
            }
            return Ok(None);
        }
        if free <= self.reserve.reserved_segments {
            // Only empty segments help; `ensure_space` reclaims them.
            return Ok(None);
        }
        if self.cleaner.cleaning.is_none() {
            if !self.checkpoints.pinned_segments.is_empty() {
                // A snapshot pins freed segments: cleaning would only use up the rest.
                return Ok(None);
            }
            if !share.may_begin_cleaning {
                return Ok(None);
            }
            if let Some(number) = self.best_to_clean() {
                let step = self.cleaner.begin(&mut self.log, number, patience)?;
                if step.is_continue() {
                    share.may_begin_cleaning = false;
                    self.grow_cleaning_backlog(self.backlogs.seen.brought);
                }
                return Ok(Some(step));
            }
            // Empty segments are free after a checkpoint.
            if self.log.segments.has_empty() && is_idle {
                return self.begin_checkpoint_within_budget(share);
            }
            return Ok(None);
        }
        let due = self.backlogs.cleaning.due_work();
        if due == 0 || share.clean_bytes == 0 {
            return Ok(None);
        }
        let patience = match self.cleaner.pending_io() {
            // Later, if the backlog is small.
            Some(_)
                if due < MAX_CLEANING_BACKLOG_BYTES
                    || share.waits == 0 && due < MAX_CLEANING_BACKLOG_BYTES * 4 =>
            {
                return Ok(None);
            }
            Some(need) if patience == MissPolicy::Defer => {
                share.waits = share.waits.saturating_sub(1);
                return Ok(Some(MaintenanceStep::Break(need)));
            }
            _ => patience,
        };
        let step = self.cleaner.step(&mut self.log, &mut self.levels, patience)?;
        if let MaintenanceStep::Continue(bytes) = step {
            self.backlogs.cleaning.subtract_done(bytes);
            share.clean_bytes = share.clean_bytes.saturating_sub(bytes);
        }
        Ok(Some(step))
    }

    /// Returns true if maintenance is in progress.
    pub fn is_working(&self) -> bool {
        let levels = &self.levels;
        levels.flush.is_some()
            || levels.compaction.is_some()
            || levels.tree_merge.is_some()
            || self.cleaner.cleaning.is_some()
    }

    /// Does the next step until checkpoint number `wanted` of this opening is durable. It ends even
    /// if others begin more checkpoints meanwhile.
    pub fn step_toward_checkpoint(
        &mut self,
        wanted: u64,
        patience: MissPolicy,
    ) -> Result<Option<MaintenanceStep>> {
        self.check_running()?;
        let written = self.log.counters.checkpoints;
        if written < wanted && self.levels.flush.is_some() {
            return self.flush_step(PREFETCHED_PAIRS, patience).map(Some);
        }
        // Writing a checkpoint completes the one before it.
        if written != wanted || self.checkpoints.written.is_none() {
            return Ok(None);
        }
        let need = self.complete_checkpoint(patience)?;
        Ok(Some(need.map_or(MaintenanceStep::Continue(0), MaintenanceStep::Break)))
    }
}
