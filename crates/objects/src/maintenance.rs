//! Upkeep: what is due, in which order, and how much of it a change does.
//!
//! Everything is reckoned in one unit, bytes that the disk took: that is what uses up segments and
//! makes logs long. Each work is spread over so many of them that it is done before more of its
//! kind comes, and every change does its share, so that none waits for much:
//!
//! | work | done while so many bytes came | which |
//! |---|---|---|
//! | count a sealed log | half a log: then half a log's time is left to write the run | all |
//! | fold two runs | a sixteenth: long before the next run comes | the log's |
//! | merge runs | half of what came since the last merge began, one log to eight | the log's |
//! | clean a segment | as much as it gains, or less, the more is missing | what changes bring |
//! | begin a checkpoint | a log | the log's |
//!
//! Where what work itself writes would pay for that same work it does not count: a merge that its
//! own nodes pay for goes on till all is merged. Cleaning is paid by what changes bring, times what
//! the disk takes for that on average but for what is moved: nodes and runs come many at once, and
//! cleaning for them at once uses up what is free.
//!
//! Law 1: a step changes things in memory and hands writes over. What it has to read or wait for
//! first is a need, which the caller fulfils without the lock; only after some in vain it waits.
//! Law 2: what is owed stays owed: a change that leaves a step to the next one pays all the same.
//! Law 3: who has time may pay for what others will write: nothing is done that is not due then.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counts of this process's own"
)]

use std::ops::ControlFlow;
use std::sync::Arc;

use draconis_device::Ticket;
use parking_lot::Mutex;

use crate::Result;
use crate::cached_disk::{CachedDisk, CachedNodes};
use crate::core::Core;
use crate::index::memtable_flush::AHEAD;
use crate::index::tree::{BlockPtr, NodeSource};
use crate::space::segment_reader::SegmentReader;

/// Pairs of one step of folding and merging.
const STEP: u64 = 64;
/// Pairs that one change folds, at most, and one for so many bytes of its own: a group of a
/// thousand pairs brings more than these.
const FOLDED_AT_ONCE: u64 = 1024;
const FOLDED_FOR_BYTES: u64 = 16;
/// What one change looks at when it cleans, at most, if it is short.
const CLEANED_AT_ONCE: u64 = 96 << 10;
/// What may be owed before a change waits for what the cleaner reads.
const OWED_MAX: u64 = 1 << 20;

/// Something that a step needs of the disk.
pub(crate) enum RequiredIo {
    /// Nodes of the index.
    Nodes(Vec<BlockPtr>),
    /// What the cleaner reads, up to this byte of the disk.
    Bytes(Arc<Mutex<SegmentReader>>, u64),
    /// Writes that reads are to see.
    Settled(Ticket),
    /// Writes that are to be durable.
    Durable(Ticket),
}

/// What the disk said of a need.
pub(crate) enum CompletedIo {
    Settled(Ticket),
    Durable(Ticket),
}

impl RequiredIo {
    /// Fulfils it, which may take long; what was read for those before stays if `is_further`. What
    /// fails is found out by the step, for an error that says it all.
    pub fn perform(self, io: &CachedDisk, is_further: bool) -> Option<CompletedIo> {
        match self {
            // One by itself does not drive out those that were asked for together.
            Self::Nodes(nodes) if is_further || nodes.len() == 1 => io.load_more_ahead(&nodes),
            Self::Nodes(nodes) => io.prefetch_nodes(&nodes),
            Self::Bytes(reading, to) => reading.lock().wait(to),
            Self::Settled(ticket) => {
                return io.disk.wait_visible(ticket).ok().map(|()| CompletedIo::Settled(ticket));
            }
            Self::Durable(ticket) => {
                return io.wait_long(ticket).ok().map(|()| CompletedIo::Durable(ticket));
            }
        }
        None
    }
}

/// What a step did, in its own measure, or what it needs first.
pub(crate) type Step = ControlFlow<RequiredIo, u64>;

/// What a step does about what is not in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MissPolicy {
    /// Asks for it.
    Defer,
    /// Waits for it.
    Block,
}

/// Looks something up in the index, as patience is.
pub(crate) fn look<T>(
    io: &CachedDisk,
    patience: MissPolicy,
    act: impl FnOnce(&dyn NodeSource) -> Result<T>,
) -> Result<ControlFlow<RequiredIo, T>> {
    if patience == MissPolicy::Block {
        return act(io).map(ControlFlow::Continue);
    }
    let nodes = CachedNodes::of(io);
    let done = act(&nodes);
    match nodes.missing() {
        Some(ptr) => Ok(ControlFlow::Break(RequiredIo::Nodes(vec![ptr]))),
        None => done.map(ControlFlow::Continue),
    }
}

/// What is owed of a work, in its own measure.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Backlog(f64);

impl Backlog {
    /// `bytes` came of the `span` in which all of `work` is to be done.
    pub fn grow(&mut self, bytes: u64, work: u64, span: u64) {
        self.0 += bytes as f64 * work as f64 / span.max(1) as f64;
    }

    pub fn due(self) -> u64 {
        self.0 as u64
    }

    /// So much was done: more than was due, where a step went on to a good end.
    pub fn did(&mut self, work: u64) {
        self.0 -= work as f64;
    }
}

/// What was written, as it counts for each work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct WorkDone {
    all: u64,
    log: u64,
    /// What a change takes, as a moving average has it: all but what was moved.
    brought: u64,
}

impl WorkDone {
    fn since(self, before: Self) -> Self {
        Self {
            all: self.all.saturating_sub(before.all),
            log: self.log.saturating_sub(before.log),
            brought: self.brought,
        }
    }

    /// As if so much had been written.
    pub fn bytes(bytes: u64) -> Self {
        Self { all: bytes, log: bytes, brought: bytes }
    }
}

/// What is owed, and what was paid for.
#[derive(Debug, Default)]
pub(crate) struct Maintenance {
    /// What was written when it was paid for last.
    seen: WorkDone,
    /// Bytes that the cleaner is to look at.
    pub cleaning: Backlog,
}

/// What one change does, at most.
#[derive(Debug)]
pub(crate) struct WorkBudget {
    folds: u64,
    cleans: u64,
    /// How often it waits for what the cleaner reads.
    waits: u64,
    /// Whether it may begin a checkpoint: in a small store that makes the next one due.
    begins: bool,
    /// Whether it may begin to clean a segment: not one after the other.
    chooses: bool,
}

impl WorkBudget {
    /// Of a change that brought so many bytes.
    pub fn of(bytes: u64) -> Self {
        Self {
            folds: FOLDED_AT_ONCE + bytes / FOLDED_FOR_BYTES,
            cleans: (bytes * 16).max(CLEANED_AT_ONCE),
            waits: bytes / 8192 + 1,
            begins: true,
            chooses: true,
        }
    }
}

impl Core {
    /// Sees what was written since, and what is owed for it, where a change brought so many bytes.
    pub fn grow_backlogs(&mut self, brought_bytes: u64) {
        let (all, log) = (self.log.written_bytes(), self.log.logged_bytes());
        let now = WorkDone { all, log, brought: self.log.spent.estimate_disk_bytes(brought_bytes) };
        let before = std::mem::replace(&mut self.upkeep.seen, now);
        self.owe(now.since(before));
    }

    /// What is owed for what was written.
    pub fn owe(&mut self, paid: WorkDone) {
        let log_bytes = self.reserve.log_bytes;
        let levels = &mut self.levels;
        if let Some(counting) = &mut levels.counting {
            // Each with what it hides.
            let all = counting.layer.pairs.len() as u64 * 2 + 1;
            counting.debt.grow(paid.all, all, log_bytes / 2);
        }
        if let Some(folding) = &mut levels.folding {
            folding.debt.grow(paid.log, folding.pairs() + 1, log_bytes / 16);
        }
        if let Some(merging) = &mut levels.merging {
            merging.debt.grow(paid.log, merging.layer.pairs.len() as u64 + 1, merging.span);
        }
        self.owe_for_cleaning(paid.brought);
    }

    fn owe_for_cleaning(&mut self, bytes: u64) {
        if let Some(cleaning) = &self.cleaner.cleaning {
            let segment_bytes = u64::from(self.log.segments.geometry.segment_bytes);
            let span = cleaning.dead * 64 / self.cleaning_rate_64ths();
            self.upkeep.cleaning.grow(bytes, segment_bytes, span);
        }
    }

    /// How much is cleaned for a byte, in 64ths: one is freed for each that is written where an
    /// eighth of what should be free is missing; the more is missing the more.
    fn cleaning_rate_64ths(&self) -> u64 {
        let low = self.low() as u64;
        let missing = low.saturating_sub(
            (self.log.segments.free() + self.segments_awaiting_checkpoint()) as u64,
        );
        (missing * 64 * 8 / low.max(1)).clamp(8, 4 * 64)
    }

    /// Whether a checkpoint is due.
    fn is_log_long(&self) -> bool {
        self.log.bytes + self.log.batch.bytes as u64 >= self.reserve.log_bytes
    }

    /// Whether folding and merging leave enough to write into.
    fn has_room(&self) -> bool {
        self.log.segments.free() > self.floor()
    }

    /// Does the next step that is due, if one is and it is within the share.
    pub fn next_step(
        &mut self,
        share: &mut WorkBudget,
        patience: MissPolicy,
    ) -> Result<Option<Step>> {
        if self.stopped.is_some() {
            return Ok(None);
        }
        if let Some(step) = self.complete_old_checkpoint(patience)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_count(patience)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_fold(share)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_merge(patience)? {
            return Ok(Some(step));
        }
        if let Some(step) = self.next_clean(share, patience)? {
            return Ok(Some(step));
        }
        if self.is_log_long() && self.levels.counting.is_none() {
            return self.begin_within(share);
        }
        Ok(None)
    }

    fn begin_within(&mut self, share: &mut WorkBudget) -> Result<Option<Step>> {
        match std::mem::take(&mut share.begins) {
            true => self.begin_checkpoint().map(Some),
            false => Ok(None),
        }
    }

    fn next_count(&mut self, patience: MissPolicy) -> Result<Option<Step>> {
        let Some(counting) = &self.levels.counting else { return Ok(None) };
        let (due, all) = (counting.debt.due(), counting.layer.pairs.len() as u64 * 2 + 1);
        // In small lots, to use what is loaded; all of it before the next begins.
        let is_late = self.is_log_long();
        if !counting.is_ready_to_finish && !is_late && due < all.min(16) {
            return Ok(None);
        }
        let pairs = if is_late { AHEAD } else { AHEAD.min(due as usize + 1) };
        self.count_on(pairs, patience).map(Some)
    }

    fn next_fold(&mut self, share: &mut WorkBudget) -> Result<Option<Step>> {
        let (is_behind, has_room) = (self.levels.is_merge_backlogged(), self.has_room());
        let Some(folding) = &mut self.levels.folding else { return Ok(None) };
        let due = folding.debt.due();
        let pairs = match is_behind {
            true => FOLDED_AT_ONCE,
            false if due >= STEP || due >= folding.pairs() => due.min(share.folds),
            false => 0,
        };
        if !has_room || pairs == 0 {
            return Ok(None);
        }
        folding.debt.did(pairs);
        share.folds = share.folds.saturating_sub(pairs);
        self.levels.compact_step(&mut self.log, pairs as usize + 1)?;
        Ok(Some(Step::Continue(pairs)))
    }

    fn next_merge(&mut self, patience: MissPolicy) -> Result<Option<Step>> {
        let Some(merging) = &self.levels.merging else { return Ok(None) };
        let due = merging.debt.due();
        let pairs = match self.levels.is_merge_backlogged() {
            true => self.merged_at_once(),
            false if due >= STEP || due >= merging.layer.pairs.len() as u64 => due as usize + 1,
            false => 0,
        };
        if !self.has_room() || pairs == 0 {
            return Ok(None);
        }
        self.levels.tree_merge_step(&mut self.log, pairs, patience).map(Some)
    }

    fn next_clean(&mut self, share: &mut WorkBudget, patience: MissPolicy) -> Result<Option<Step>> {
        let (free, low) = (self.log.segments.free(), self.low());
        let is_idle = self.levels.counting.is_none() && self.checkpoints.written.is_none();
        if free + self.segments_awaiting_checkpoint() >= low && self.cleaner.cleaning.is_none() {
            self.upkeep.cleaning = Backlog::default();
            // What was cleaned is free after a checkpoint.
            if free < low * 3 / 4 && is_idle && !self.cleaner.since.is_empty() {
                return self.begin_within(share);
            }
            return Ok(None);
        }
        if free <= self.floor() {
            // Only what is emptied helps, and that is for who looks for room.
            return Ok(None);
        }
        if self.cleaner.cleaning.is_none() {
            if !self.checkpoints.pinned_segments.is_empty() {
                // A snapshot keeps what was given up: cleaning would only use up what is left.
                return Ok(None);
            }
            if !share.chooses {
                return Ok(None);
            }
            if let Some(number) = self.best_to_clean() {
                let step = self.begin_cleaning(number, patience)?;
                if step.is_continue() {
                    share.chooses = false;
                    self.owe_for_cleaning(self.upkeep.seen.brought);
                }
                return Ok(Some(step));
            }
            // What was emptied is free after a checkpoint.
            if self.log.segments.has_empty() && is_idle {
                return self.begin_within(share);
            }
            return Ok(None);
        }
        let due = self.upkeep.cleaning.due();
        if due == 0 || share.cleans == 0 {
            return Ok(None);
        }
        let patience = match self.cleaner.waits_for() {
            // Later, if it does not matter much.
            Some(_) if due < OWED_MAX || share.waits + due / (OWED_MAX * 4) == 0 => {
                return Ok(None);
            }
            Some(need) if patience == MissPolicy::Defer => {
                share.waits = share.waits.saturating_sub(1);
                return Ok(Some(Step::Break(need)));
            }
            _ => patience,
        };
        let step = self.clean(patience)?;
        if let Step::Continue(bytes) = step {
            self.upkeep.cleaning.did(bytes);
            share.cleans = share.cleans.saturating_sub(bytes);
        }
        Ok(Some(step))
    }

    /// Whether there is work under way.
    pub fn is_working(&self) -> bool {
        let levels = &self.levels;
        levels.counting.is_some()
            || levels.folding.is_some()
            || levels.merging.is_some()
            || self.cleaner.cleaning.is_some()
    }

    /// The next step to checkpoint number `wanted` of this opening, till it is durable. Others may
    /// begin more meanwhile: this ends all the same.
    pub fn next_to_checkpoint(
        &mut self,
        wanted: u64,
        patience: MissPolicy,
    ) -> Result<Option<Step>> {
        self.check_running()?;
        let written = self.log.counters.checkpoints;
        if written < wanted && self.levels.counting.is_some() {
            return self.count_on(AHEAD, patience).map(Some);
        }
        // What is written completes what was before it.
        if written != wanted || self.checkpoints.written.is_none() {
            return Ok(None);
        }
        let need = self.complete_checkpoint(patience)?;
        Ok(Some(need.map_or(Step::Continue(0), Step::Break)))
    }

    /// Counts so many pairs, and writes the checkpoint once all are counted.
    pub fn count_on(&mut self, pairs: usize, patience: MissPolicy) -> Result<Step> {
        let step = self.levels.account_dead(&mut self.log, pairs, patience)?;
        let Some(counting) = &mut self.levels.counting else { return Ok(step) };
        if let Step::Continue(pairs) = step {
            counting.debt.did(pairs);
        }
        counting.is_ready_to_finish = counting.is_done() && step.is_continue();
        if counting.is_ready_to_finish { self.finish_checkpoint(patience) } else { Ok(step) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_a_work_is_owed_once_its_span_came() {
        for (work, span, step) in [(1u64, 1u64 << 20, 64u64), (1 << 20, 12 << 20, 100), (7, 5, 1)] {
            let (mut debt, mut done, mut came) = (Backlog::default(), 0, 0);
            while came < span {
                debt.grow(step, work, span);
                came += step;
                let due = debt.due();
                debt.did(due);
                done += due;
                // Not ahead of what came, and never more than a unit behind.
                let fair = came as f64 * work as f64 / span as f64;
                assert!(done as f64 <= fair + 0.001 && done as f64 > fair - 1.001, "{done} {fair}");
            }
            assert!(done + 1 >= work, "{done} of {work}");
        }
        let mut ahead = Backlog::default();
        ahead.did(10);
        ahead.grow(5, 10, 10);
        assert_eq!(ahead.due(), 0);
        ahead.grow(6, 10, 10);
        assert_eq!(ahead.due(), 1);
    }
}
