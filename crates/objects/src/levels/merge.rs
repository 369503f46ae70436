//! Compaction of runs, and their merge into the tree, a few pairs with every change.
//!
//! ```text
//!   run run run run ── folded, two at a time ──▶ one layer ── merged ──▶ tree
//! ```
//!
//! Small runs are compacted in memory as they come, so that lookups search few memtables. A
//! memtable that stands for many runs on the disk is written as one run. Once there are many pairs,
//! all runs are compacted and the result is merged into the tree: the more pairs, the fewer nodes
//! are written for each.
//!
//! Law 1: until the merge ends, the runs stay above the tree and hide both the old entries and the
//! merged ones. Readers see no difference, and after a crash the merge starts anew with the same
//! result.
//! Law 2: a replaced run is free only when a durable checkpoint does not need it.
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::backlog::Backlog;
use crate::cached_disk::CachedDisk;
use crate::entry::{DecodedKey, Entry, Key, decode_key, extent_key};
use crate::index::leaf::LeafEdit;
use crate::index::memtable::ImmutableMemtable;
use crate::index::tree::{BoundedLeaf, NodeSource, Tree};
use crate::index::two_way_merge::TwoWayMerge;
use crate::levels::Levels;
use crate::levels::run::ChunkWriter;
use crate::log::LogWriter;
use crate::required_io::{MaintenanceStep, MissPolicy, with_miss_policy};
use crate::{Error, ObjectId, Result};

/// Number of runs that starts a merge, however few pairs they have: opening a store reads all of
/// them.
const MERGE_TRIGGER_RUNS: usize = 32;
/// Bytes of runs that start a merge, for the same reason.
const MERGE_TRIGGER_BYTES: u64 = 24 << 20;
/// Number of runs that are written as one when their memtables are merged.
const RUNS_PER_TIER: usize = 8;
/// Most pairs of a step that is extended to the end of its last leaf.
const MAX_STEP_PAIRS: usize = 4096;

/// Merge of runs into the tree.
pub(crate) struct TreeMerge {
    /// All of them, merged.
    pub layer: Arc<ImmutableMemtable>,
    /// Number of oldest runs in it.
    pub runs: usize,
    next: usize,
    /// Offset in the next pair's interval.
    resume: u64,
    pub debt: Backlog,
    /// Bytes of log within which the merge has to be done.
    pub span: u64,
}

/// Compaction of two memtables of runs.
pub(crate) struct RunCompaction {
    fold: TwoWayMerge,
    /// Indexes of their runs.
    older: usize,
    newer: usize,
    pub debt: Backlog,
    /// The result on the disk, if it is written.
    pub chunks: Option<ChunkWriter>,
}

impl RunCompaction {
    /// Returns the number of pairs of both.
    pub fn pairs(&self) -> u64 {
        self.fold.remaining_pairs() as u64
    }
}

/// Returns the number of pairs in runs that starts a merge.
pub(crate) fn merge_pairs(capacity: u64, cache_bytes: u64) -> usize {
    // The limit of a small store is lower, so that it merges often, too.
    let often = capacity >> 13;
    let usual = capacity.saturating_sub(64 << 20) >> 10;
    often.max(usual).clamp(64, 1 << 20).min((cache_bytes >> 8).max(4096)) as usize
}

impl Levels {
    fn merged_runs(&self) -> usize {
        self.tree_merge.as_ref().map_or(0, |merging| merging.runs)
    }

    /// Schedules the next compaction or merge. Called after each new run and after each finished
    /// step.
    pub fn schedule_merges(&mut self, log: &LogWriter) {
        let merged = self.merged_runs();
        if self.tree_merge.is_none() && self.to_merge == 0 {
            let layers = self.runs.iter().filter_map(|run| run.layer.as_ref());
            let pairs: usize = layers.map(|layer| layer.pairs.len()).sum();
            let is_much =
                self.runs.len() >= MERGE_TRIGGER_RUNS || self.run_bytes() >= MERGE_TRIGGER_BYTES;
            if pairs >= self.merge_pairs || is_much {
                self.to_merge = self.runs.len();
            }
        }
        if self.compaction.is_some() {
            return;
        }
        let (from, to) = match self.to_merge {
            0 => (merged, self.runs.len()),
            runs => (0, runs),
        };
        let mut newest = (from..to).rev().filter(|&run| self.layer_of(run).is_some());
        let (newer, older) = (newest.next(), newest.next());
        drop(newest);
        match (newer, older) {
            (Some(newer), Some(older)) => self.plan_memtable_merge(older, newer, to),
            _ if self.to_merge > 0 => self.start_tree_merge(log),
            _ => {}
        }
    }

    fn layer_of(&self, run: usize) -> Option<&Arc<ImmutableMemtable>> {
        self.runs.get(run)?.layer.as_ref()
    }

    fn plan_memtable_merge(&mut self, older: usize, newer: usize, end: usize) {
        let (Some(new), Some(old)) = (self.layer_of(newer), self.layer_of(older)) else {
            return;
        };
        // Sizes double from new to old, unless all are compacted to one.
        if self.to_merge == 0 && new.pairs.len().saturating_mul(2) < old.pairs.len() {
            return;
        }
        let is_written = self.to_merge == 0 && end.saturating_sub(older) >= RUNS_PER_TIER;
        self.compaction = Some(RunCompaction {
            fold: TwoWayMerge::new(new.clone(), old.clone()),
            older,
            newer,
            debt: Backlog::default(),
            chunks: is_written.then(ChunkWriter::default),
        });
    }

    /// Merges the memtables of loaded runs, so that lookups search few; nothing is written.
    pub fn merge_loaded_runs(&mut self) {
        loop {
            let mut newest = self.runs.iter_mut().rev().filter(|run| run.layer.is_some());
            let (Some(newer), Some(older)) = (newest.next(), newest.next()) else { return };
            let (Some(new), Some(old)) = (&newer.layer, &older.layer) else { return };
            if new.pairs.len().saturating_mul(2) < old.pairs.len() {
                return;
            }
            let mut fold = TwoWayMerge::new(new.clone(), old.clone());
            while !fold.step(usize::MAX, &mut |_| {}) {}
            newer.layer = None;
            older.layer = Some(Arc::new(fold.finish()));
        }
    }

    fn start_tree_merge(&mut self, log: &LogWriter) {
        let runs = std::mem::take(&mut self.to_merge);
        let Some(layer) = self.runs.first_mut().and_then(|run| run.layer.take()) else { return };
        let logged = log.logged_bytes();
        let since = logged.saturating_sub(std::mem::replace(&mut self.merged_at, logged));
        // The merge ends before as many pairs, or as many runs, have accumulated again.
        let log_bytes = log.layout.log_bytes();
        let longest = log_bytes.saturating_mul(MERGE_TRIGGER_RUNS as u64 / 4);
        let span = (since / 2).clamp(log_bytes, longest);
        let debt = Backlog::default();
        self.tree_merge = Some(TreeMerge { layer, runs, next: 0, resume: 0, debt, span });
        self.publish_view();
    }

    /// Returns true if compaction and merge are so far behind that all of it is due: opening a
    /// store reads all runs.
    pub fn is_merge_backlogged(&self) -> bool {
        self.runs.len() >= 2 * MERGE_TRIGGER_RUNS
    }

    /// Merges all runs, at once.
    #[cfg(test)]
    pub fn merge_all_runs(&mut self, log: &mut LogWriter) -> Result<()> {
        self.to_merge = self.runs.len();
        self.schedule_merges(log);
        while self.compaction.is_some() || self.tree_merge.is_some() {
            self.compact_step(log, 1024)?;
            let _ = self.tree_merge_step(log, 256, MissPolicy::Block)?;
        }
        Ok(())
    }

    /// Compacts so many pairs.
    pub fn compact_step(&mut self, log: &mut LogWriter, pairs: usize) -> Result<()> {
        let Some(mut folding) = self.compaction.take() else { return Ok(()) };
        // Hidden entries were accounted when the newer run was flushed.
        let is_done = folding.fold.step(pairs, &mut |_| {});
        if let Some(chunks) = &mut folding.chunks {
            chunks.encode_new_pairs(log, folding.fold.merged_pairs())?;
        }
        if !is_done {
            self.compaction = Some(folding);
            return Ok(());
        }
        let RunCompaction { fold, older, newer, chunks, .. } = folding;
        let layer = fold.finish();
        if let Some(run) = self.runs.get_mut(newer) {
            run.layer = None;
        }
        if let Some(chunks) = chunks {
            let next = older.saturating_add(1);
            let end = (next..self.runs.len())
                .find(|&run| self.layer_of(run).is_some())
                .unwrap_or(self.runs.len());
            let chunks = chunks.finish(log)?;
            self.to_merge = self.to_merge.saturating_sub(end.saturating_sub(next));
            let run = self.runs.get_mut(older).map(|run| &mut run.chunks);
            let old = run.map(|old| std::mem::replace(old, chunks)).unwrap_or_default();
            let others = self.runs.drain(next..end).flat_map(|run| run.chunks);
            log.mark_blocks_dead(old.into_iter().chain(others));
        }
        if let Some(run) = self.runs.get_mut(older) {
            run.layer = Some(Arc::new(layer));
        }
        self.publish_view();
        self.schedule_merges(log);
        Ok(())
    }

    /// Returns the end of a merge step of `pairs` pairs. The step includes all pairs of its last
    /// leaf, so that no leaf is written twice.
    fn extend_step_to_leaf_end(
        &self,
        nodes: &dyn NodeSource,
        all: &[(Key, Entry)],
        next: usize,
        pairs: usize,
    ) -> Result<usize> {
        let mut end = all.len().min(next.saturating_add(pairs));
        let Some((key, _)) = end.checked_sub(1).and_then(|last| all.get(last)) else {
            return Ok(end);
        };
        if let Some((_, upper)) = self.tree.leaf_ptr_of(nodes, key)? {
            let most = all.len().min(next.saturating_add(MAX_STEP_PAIRS));
            let is_within =
                |(key, _): &(Key, Entry)| upper.as_ref().is_none_or(|upper| key < upper);
            while end < most && all.get(end).is_some_and(is_within) {
                end = end.saturating_add(1);
            }
        }
        Ok(end)
    }

    /// Merges so many pairs, or some more.
    pub fn tree_merge_step(
        &mut self,
        log: &mut LogWriter,
        pairs: usize,
        patience: MissPolicy,
    ) -> Result<MaintenanceStep> {
        let Some(merging) = &self.tree_merge else { return Ok(MaintenanceStep::Continue(0)) };
        let layer = merging.layer.clone();
        let (next, resume) = (merging.next, merging.resume);
        let io: Arc<CachedDisk> = log.io.clone();
        let end =
            |nodes: &dyn NodeSource| self.extend_step_to_leaf_end(nodes, &layer.pairs, next, pairs);
        let to = match with_miss_policy(&io, patience, end)? {
            ControlFlow::Continue(to) => to,
            ControlFlow::Break(need) => return Ok(MaintenanceStep::Break(need)),
        };
        let keys = layer.pairs.get(next..to).unwrap_or_default().iter().map(|(key, _)| key);
        if let Some(need) = self.prefetch_leaves(log, keys, |_| false, patience)? {
            return Ok(MaintenanceStep::Break(need));
        }
        let pairs = pairs.max(to.saturating_sub(next));
        let edits = |nodes: &dyn NodeSource| {
            plan_tree_edits(&layer, (next, resume), pairs, &self.tree, nodes)
        };
        let (edits, next, resume) = match with_miss_policy(&io, patience, edits)? {
            ControlFlow::Continue(edits) => edits,
            ControlFlow::Break(need) => return Ok(MaintenanceStep::Break(need)),
        };
        self.tree.apply(log, &edits)?;
        if let Some(merging) = &mut self.tree_merge {
            (merging.next, merging.resume) = (next, resume);
            merging.debt.subtract_done(pairs as u64);
        }
        if next == layer.pairs.len() {
            let merged = self.tree_merge.take().map_or(0, |merging| merging.runs);
            log.mark_blocks_dead(self.runs.drain(..merged).flat_map(|run| run.chunks));
            if let Some(folding) = &mut self.compaction {
                folding.older = folding.older.saturating_sub(merged);
                folding.newer = folding.newer.saturating_sub(merged);
            }
            self.schedule_merges(log);
        }
        self.publish_view();
        Ok(MaintenanceStep::Continue(pairs as u64))
    }
}

/// Rest of a tree interval after one that hid its middle.
struct IntervalTail {
    id: ObjectId,
    at: u64,
    entry: Entry,
}

/// Returns the edits that merge `pairs` pairs into the tree, and the position to resume at.
fn plan_tree_edits(
    layer: &ImmutableMemtable,
    (mut next, mut resume): (usize, u64),
    pairs: usize,
    tree: &Tree,
    nodes: &dyn NodeSource,
) -> Result<(Vec<LeafEdit>, usize, u64)> {
    let mut out: Vec<LeafEdit> = vec![];
    let mut rest: Option<IntervalTail> = None;
    // Intervals of the tree that begin before this offset are handled.
    let mut handled: (ObjectId, u64) = (ObjectId(0), 0);
    let mut hint: Option<BoundedLeaf> = None;
    let mut left = pairs;
    while left > 0 {
        let Some((key, entry)) = layer.pairs.get(next) else { break };
        left = left.saturating_sub(1);
        let Some(DecodedKey::Extent(id, start)) = decode_key(key) else {
            push_interval_tail(&mut out, &mut rest);
            let edit = (!matches!(entry, Entry::Tombstone)).then(|| entry.clone());
            out.push((Key::from_slice(key), edit));
            (next, resume) = (next.saturating_add(1), 0);
            continue;
        };
        let (a, b) = (start.saturating_add(resume), entry.end_from(start));
        // An interval that ends before this one is handled; another may reach in.
        let ends = |rest: &IntervalTail| rest.entry.end_from(rest.at) <= a;
        if rest.as_ref().is_some_and(|rest| rest.id != id || ends(rest)) {
            push_interval_tail(&mut out, &mut rest);
        }
        if handled.0 != id {
            handled = (id, 0);
        }
        // The interval that begins before and reaches in: a rest, or one of the tree.
        let before = match rest.take() {
            Some(rest) => Some((rest.at, rest.entry)),
            None => match tree.last_before(nodes, &extent_key(id, a), &mut hint)? {
                Some((key, before)) => match decode_key(&key) {
                    Some(DecodedKey::Extent(of, at))
                        if of == id && at >= handled.1 && before.end_from(at) > a =>
                    {
                        Some((at, before))
                    }
                    _ => None,
                },
                None => None,
            },
        };
        if let Some((at, before)) = before {
            let end = before.end_from(at);
            if at < a {
                out.push((extent_key(id, at), Some(before.part(0, a.min(end).saturating_sub(at)))));
            }
            if end > b {
                let tail = before.part(b.saturating_sub(at), end.saturating_sub(b));
                rest = Some(IntervalTail { id, at: b, entry: tail });
            }
        }
        // Zeros stay, as payloads do; a hole only removes.
        let place = out.len();
        let part =
            |from: u64, to: u64| entry.part(from.saturating_sub(start), to.saturating_sub(from));
        if entry.is_own() {
            out.push((extent_key(id, a), Some(part(a, b))));
        }
        // Intervals that begin inside.
        let mut from = a;
        let mut stopped = false;
        while let Some((key, inside)) =
            tree.first_at_or_after(nodes, &extent_key(id, from), &mut hint)?
        {
            let at = match decode_key(&key) {
                Some(DecodedKey::Extent(of, at)) if of == id && at < b => at,
                _ => break,
            };
            let end = inside.end_from(at);
            if at != a || !entry.is_own() {
                out.push((key, None));
            }
            if end > b {
                let tail = inside.part(b.saturating_sub(at), end.saturating_sub(b));
                rest = Some(IntervalTail { id, at: b, entry: tail });
            }
            from = end.max(at.saturating_add(1));
            if left == 0 && from < b && !matches!(entry, Entry::Data(_)) {
                if entry.is_own()
                    && let Some((_, own)) = out.get_mut(place)
                {
                    *own = Some(part(a, from));
                }
                stopped = true;
                break;
            }
            left = left.saturating_sub(1);
        }
        handled.1 = handled.1.max(from.min(b)).max(a);
        if stopped {
            resume = from.saturating_sub(start);
            break;
        }
        handled.1 = b;
        (next, resume) = (next.saturating_add(1), 0);
    }
    push_interval_tail(&mut out, &mut rest);
    if !out.is_sorted_by(|(a, _), (b, _)| a < b) {
        // Only a tree or run from elsewhere has intervals that overlap.
        let at = out.iter().find_map(|(_, entry)| match entry {
            Some(Entry::Data(data)) => Some(data.at),
            _ => None,
        });
        let what = "payloads that overlap";
        return Err(Error::Corrupt { what, at_bytes: at.unwrap_or(0) });
    }
    Ok((out, next, resume))
}

fn push_interval_tail(out: &mut Vec<LeafEdit>, rest: &mut Option<IntervalTail>) {
    if let Some(IntervalTail { id, at, entry }) = rest.take() {
        let key: Key = extent_key(id, at);
        out.push((key, Some(entry)));
    }
}
