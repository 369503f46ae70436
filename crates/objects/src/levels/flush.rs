//! Flushes a sealed memtable to a sorted run and accounts the older entries it hides as dead.
//!
//! Law: each pair of the memtable is accounted once. The entries it hides in the index below it are
//! dead; nothing else marks them.
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Result;
use crate::backlog::Backlog;
use crate::entry::{DecodedKey, Entry, Key, PayloadRef, decode_key};
use crate::index::memtable::{ImmutableMemtable, SortedLookup};
use crate::index::tree::{BoundedLeaf, NodeSource};
use crate::index::view::Index;
use crate::levels::run::{ChunkWriter, SortedRun};
use crate::levels::{Levels, merge_memtables};
use crate::log::{LogWriter, StreamPosition};
use crate::required_io::{MaintenanceStep, MissPolicy, RequiredIo, with_miss_policy};

/// Pairs whose leaves are requested together.
pub(crate) const PREFETCHED_PAIRS: usize = 64;

/// A memtable being flushed to a run.
pub(crate) struct MemtableFlush {
    pub layer: Arc<ImmutableMemtable>,
    /// Last commit in it, and the stream positions at that time.
    pub seq: u64,
    pub places: Vec<StreamPosition>,
    /// Next pair, and offset in its interval.
    next: usize,
    resume: u64,
    /// First pair whose leaf was not requested.
    ahead: usize,
    pub debt: Backlog,
    /// True if all pairs are accounted and paid for: the checkpoint can be written.
    pub is_ready_to_finish: bool,
    pub chunks: ChunkWriter,
}

impl MemtableFlush {
    /// Returns the work of the whole flush: each pair, with the entry that it hides.
    pub fn work(&self) -> u64 {
        (self.layer.pairs.len() as u64).saturating_mul(2).saturating_add(1)
    }

    /// Returns true if all pairs are accounted.
    pub fn is_done(&self) -> bool {
        self.next == self.layer.pairs.len()
    }
}

impl Levels {
    /// Seals the active memtable for a flush.
    pub fn begin_memtable_flush(&mut self, log: &mut LogWriter) {
        let mut layer = Arc::new(self.active.seal());
        while let Some(older) = self.sealed_memtables.pop() {
            layer = match (layer.pairs.is_empty(), older.pairs.is_empty()) {
                (true, _) => older,
                (_, true) => layer,
                _ => Arc::new(merge_memtables(&mut log.segments, &layer, &older)),
            };
        }
        self.flush = Some(MemtableFlush {
            layer,
            seq: log.newest_commit(),
            places: log.positions(),
            next: 0,
            resume: 0,
            ahead: 0,
            debt: Backlog::default(),
            is_ready_to_finish: false,
            chunks: ChunkWriter::default(),
        });
        self.publish_view();
    }

    /// Accounts the entries hidden by so many pairs, at most [`PREFETCHED_PAIRS`].
    pub fn account_dead(
        &mut self,
        log: &mut LogWriter,
        pairs: usize,
        patience: MissPolicy,
    ) -> Result<MaintenanceStep> {
        let Some(mut counting) = self.flush.take() else { return Ok(MaintenanceStep::Continue(0)) };
        let older = self.run_memtables();
        let below = Index { top: None, layers: &older, tree: &self.tree };
        let counted = self
            .prefetch_flush_leaves(log, &mut counting, &older, pairs, patience)
            .and_then(|asked| match asked {
                Some(need) => Ok(MaintenanceStep::Break(need)),
                None => counting.account_pairs(log, &below, pairs, patience),
            });
        self.flush = Some(counting);
        counted
    }

    /// Returns the uncached leaves that the next pairs need.
    fn prefetch_flush_leaves(
        &self,
        log: &LogWriter,
        counting: &mut MemtableFlush,
        older: &[Arc<ImmutableMemtable>],
        pairs: usize,
        patience: MissPolicy,
    ) -> Result<Option<RequiredIo>> {
        let all = &counting.layer.pairs;
        if counting.ahead >= all.len().min(counting.next.saturating_add(pairs)) {
            return Ok(None);
        }
        let to = all.len().min(counting.next.saturating_add(PREFETCHED_PAIRS));
        let next = all.get(counting.ahead..to).unwrap_or_default().iter().map(|(key, _)| key);
        let is_known = |key: &Key| {
            let hash = crate::index::memtable::hash(key);
            older.iter().any(|layer| layer.get(key, hash).is_some())
        };
        let need = self.prefetch_leaves(log, next, is_known, patience)?;
        if need.is_none() {
            counting.ahead = to;
        }
        Ok(need)
    }

    /// Finishes the flush: the memtable becomes a run.
    pub fn finish_memtable_flush(
        &mut self,
        log: &mut LogWriter,
    ) -> Result<Option<(u64, Vec<StreamPosition>)>> {
        let Some(counting) = self.flush.take() else { return Ok(None) };
        if !counting.layer.pairs.is_empty() {
            let chunks = counting.chunks.finish(log)?;
            self.runs.push(SortedRun { layer: Some(counting.layer), chunks });
        }
        Ok(Some((counting.seq, counting.places)))
    }
}

impl MemtableFlush {
    /// Accounts so many pairs over the index `below`.
    fn account_pairs(
        &mut self,
        log: &mut LogWriter,
        below: &Index<'_>,
        pairs: usize,
        patience: MissPolicy,
    ) -> Result<MaintenanceStep> {
        let io = log.io.clone();
        let mut dead: Vec<PayloadRef> = vec![];
        let (mut left, mut hint) = (pairs, None);
        let before = (self.next, self.resume);
        let mut need = None;
        while left > 0 && !self.is_done() {
            let known = dead.len();
            let looked = with_miss_policy(&io, patience, |nodes| {
                self.collect_hidden_payloads(below, nodes, &mut left, &mut hint, &mut dead)
            })?;
            match looked {
                ControlFlow::Continue(None) => {
                    (self.next, self.resume) = (self.next.saturating_add(1), 0);
                }
                ControlFlow::Continue(Some(resume)) => self.resume = resume,
                ControlFlow::Break(missing) => {
                    dead.truncate(known);
                    need = Some(missing);
                    break;
                }
            }
        }
        dead.iter().for_each(|dead| log.segments.sub_live_payload(dead, false));
        let accounted = self.layer.pairs.get(..self.next).unwrap_or_default();
        self.chunks.encode_new_pairs(log, accounted)?;
        Ok(match need {
            Some(need) if (self.next, self.resume) == before => MaintenanceStep::Break(need),
            _ => MaintenanceStep::Continue(pairs.saturating_sub(left) as u64),
        })
    }

    /// Collects the payloads hidden by the next pair. Returns the offset to resume at, if any.
    fn collect_hidden_payloads(
        &self,
        below: &Index<'_>,
        nodes: &dyn NodeSource,
        left: &mut usize,
        hint: &mut Option<BoundedLeaf>,
        dead: &mut Vec<PayloadRef>,
    ) -> Result<Option<u64>> {
        let Some((key, entry)) = self.layer.pairs.get(self.next) else { return Ok(None) };
        *left = left.saturating_sub(1);
        let Some(DecodedKey::Extent(id, at)) = decode_key(key) else {
            if let Some(Entry::Data(data)) = lookup_exact_key(below, nodes, key, hint)? {
                dead.push(data);
            }
            return Ok(None);
        };
        let (from, to) = (at.saturating_add(self.resume), entry.end_from(at));
        let mut stopped_at = None;
        let _ = below.resolve_range(nodes, id, (from, to), hint, &mut |offset, hidden| {
            let end = hidden.end_from(offset);
            if let Entry::Data(data) = hidden {
                dead.push(data);
            }
            if *left == 0 {
                stopped_at = Some(end.saturating_sub(at));
                return ControlFlow::Break(());
            }
            *left = left.saturating_sub(1);
            ControlFlow::Continue(())
        })?;
        Ok(stopped_at)
    }
}

/// Returns the entry of an exact key, with a hint for the tree.
fn lookup_exact_key(
    index: &Index<'_>,
    nodes: &dyn NodeSource,
    key: &Key,
    hint: &mut Option<BoundedLeaf>,
) -> Result<Option<Entry>> {
    if !matches!(decode_key(key), Some(DecodedKey::Value(_))) {
        return Ok(None);
    }
    let hash = crate::index::memtable::hash(key);
    if let Some(entry) = index.layers.iter().find_map(|layer| layer.get(key, hash)) {
        return Ok(Some(entry.clone()));
    }
    match index.tree.first_at_or_after(nodes, key, hint)? {
        Some((found, entry)) if found == *key => Ok(Some(entry)),
        _ => Ok(None),
    }
}
