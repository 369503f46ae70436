//! Index of an open store: memtables over sorted runs over the tree.
//!
//! ```text
//!   active ─ sealed ─▶ log layers ─ counted ─▶ runs ─ folded, merged ─▶ tree        newer hides older
//! ```
//!
//! Law 1: live bytes are exactly those that the index refers to: entries refer to payloads, the
//! tree to its nodes, runs to their chunks.
//! Law 2: a replaced log entry is dead at once. A replaced run or tree entry is dead when the
//! memtable flush accounts it, once.

pub(crate) mod flush;
pub(crate) mod merge;
pub(crate) mod run;

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Result;
use crate::cached_disk::{CachedDisk, CachedNodes};
use crate::entry::{Entry, Key, PayloadRef};
use crate::index::memtable::{ImmutableMemtable, Memtable, SortedLookup};
use crate::index::tree::{BlockPtr, NodeSource, Tree};
use crate::index::view::{Index, ReaderPin, View};
use crate::layout::PayloadKind;
use crate::levels::flush::MemtableFlush;
use crate::levels::merge::{RunCompaction, TreeMerge};
use crate::levels::run::SortedRun;
use crate::log::LogWriter;
use crate::required_io::{MissPolicy, RequiredIo, with_miss_policy};
use crate::segment_table::SegmentTable;

/// Memtables, runs and tree.
#[derive(Default)]
pub(crate) struct Levels {
    pub active: Memtable,
    /// Memtables sealed by snapshots since the last checkpoint began, oldest first.
    pub sealed_memtables: Vec<Arc<ImmutableMemtable>>,
    pub flush: Option<MemtableFlush>,
    /// Oldest first.
    pub runs: Vec<SortedRun>,
    pub compaction: Option<RunCompaction>,
    pub tree_merge: Option<TreeMerge>,
    /// Number of the oldest runs that are merged once they are compacted to one.
    pub to_merge: usize,
    /// Number of pairs in runs that starts a merge.
    pub merge_pairs: usize,
    /// Bytes of the log when the last merge began.
    pub merged_at: u64,
    pub tree: Tree,
    pub token: Arc<ReaderPin>,
    pub view: Arc<View>,
}

impl Levels {
    /// Returns the current index.
    pub fn index(&self) -> Index<'_> {
        Index { top: Some(&self.active), layers: &self.view.layers, tree: &self.tree }
    }

    /// Publishes a new view after a change of memtables or tree.
    pub fn publish_view(&mut self) {
        let mut layers: Vec<Arc<ImmutableMemtable>> =
            self.sealed_memtables.iter().rev().cloned().collect();
        layers.extend(self.flush.iter().map(|counting| counting.layer.clone()));
        layers.extend(self.run_memtables());
        let view = View { layers, tree: self.tree.clone(), token: self.token.clone() };
        self.view = Arc::new(view);
    }

    /// Installs a new reader pin. Returns the old one, which earlier readers still hold.
    pub fn replace_reader_pin(&mut self) -> Arc<ReaderPin> {
        let old = std::mem::replace(&mut self.token, Arc::new(ReaderPin));
        self.publish_view();
        old
    }

    /// Returns the runs, and those being merged, newest first.
    pub fn run_memtables(&self) -> Vec<Arc<ImmutableMemtable>> {
        let merged = self.tree_merge.as_ref().map_or(0, |merging| merging.runs);
        let mut layers: Vec<Arc<ImmutableMemtable>> =
            self.runs.iter().skip(merged).rev().filter_map(|run| run.layer.clone()).collect();
        layers.extend(self.tree_merge.iter().map(|merging| merging.layer.clone()));
        layers
    }

    /// Seals the active memtable, so that a view has everything.
    pub fn seal_memtable(&mut self, segments: &mut SegmentTable) {
        if self.active.map.is_empty() {
            return;
        }
        self.sealed_memtables.push(Arc::new(self.active.seal()));
        // Lookups search all memtables, so they are few: sizes double from new to old.
        while let [.., older, newer] = self.sealed_memtables.as_slice()
            && newer.pairs.len() >= older.pairs.len().div_ceil(2)
        {
            let folded = merge_memtables(segments, newer, older);
            self.sealed_memtables.truncate(self.sealed_memtables.len().saturating_sub(2));
            self.sealed_memtables.push(Arc::new(folded));
        }
        self.publish_view();
    }

    /// Sets a key's entry in the active memtable.
    pub fn set_entry(&mut self, segments: &mut SegmentTable, key: Key, entry: Entry) {
        self.active.set(key, entry, &mut |dead| segments.sub_live_payload(dead, true));
    }

    /// Writes a payload and sets it as the key's entry.
    pub fn put_payload(
        &mut self,
        log: &mut LogWriter,
        key: Key,
        payload: &[u8],
        (kind, stamp): (PayloadKind, Option<u64>),
    ) -> Result<()> {
        let entry = log.append_payload(&key, payload, kind, stamp)?;
        self.set_entry(&mut log.segments, key, entry);
        Ok(())
    }

    /// Returns the number of keys in memtables and runs.
    pub fn pending_keys(&self) -> u64 {
        let layers: usize = self.view.layers.iter().map(|layer| layer.pairs.len()).sum();
        self.active.map.len().saturating_add(layers) as u64
    }

    /// Returns a key's entry in the memtables. Not for intervals.
    pub fn get_in_memory(&self, key: &Key) -> Option<&Entry> {
        self.active.map.get(key).or_else(|| {
            let hash = crate::index::memtable::hash(key);
            self.view.layers.iter().find_map(|layer| layer.get(key, hash))
        })
    }

    /// Returns a key's entry, if memtables or cached nodes have it. Not for intervals.
    pub fn get_cached(&self, io: &CachedDisk, key: &Key) -> Option<Entry> {
        match self.get_in_memory(key) {
            Some(entry) => Some(entry.clone()),
            None => self.tree.get(&CachedNodes::new(io), key).ok().flatten(),
        }
    }

    /// Returns the uncached leaves of the sorted `keys`, so that the caller loads them in one
    /// batch. Keys for which `is_known` is true need no leaf.
    fn uncached_leaves<'k>(
        &self,
        (io, nodes): (&CachedDisk, &dyn NodeSource),
        keys: impl Iterator<Item = &'k Key>,
        is_known: impl Fn(&Key) -> bool,
    ) -> Result<Vec<BlockPtr>> {
        let mut wanted: Vec<BlockPtr> = vec![];
        let mut upper: Option<Key> = Some(Key::new());
        for key in keys {
            let Some(bound) = &upper else { break };
            if key < bound {
                continue;
            }
            let Some((ptr, next)) = self.tree.leaf_ptr_of(nodes, key)? else { break };
            if io.has_node(ptr) {
                upper = next;
            } else if !is_known(key) {
                upper = next;
                wanted.push(ptr);
            }
        }
        Ok(wanted)
    }

    /// Loads the leaves of these sorted keys, or returns those that are not in memory.
    pub fn prefetch_leaves<'k>(
        &self,
        log: &LogWriter,
        keys: impl Iterator<Item = &'k Key> + Clone,
        is_known: impl Fn(&Key) -> bool,
        patience: MissPolicy,
    ) -> Result<Option<RequiredIo>> {
        let io = &*log.io;
        let far = with_miss_policy(io, patience, |nodes| {
            self.uncached_leaves((io, nodes), keys, &is_known)
        })?;
        let far = match far {
            ControlFlow::Break(need) => return Ok(Some(need)),
            ControlFlow::Continue(far) => far,
        };
        match patience {
            MissPolicy::Defer if !far.is_empty() => return Ok(Some(RequiredIo::Nodes(far))),
            MissPolicy::Block if far.len() > 1 => io.prefetch_nodes(&far),
            _ => {}
        }
        Ok(None)
    }

    /// Returns the chunks of all runs, and of those that are being written.
    pub fn chunks_mut(&mut self) -> impl Iterator<Item = &mut BlockPtr> {
        let counting = self.flush.iter_mut().flat_map(|counting| &mut counting.chunks.stored);
        let folding = self.compaction.iter_mut().filter_map(|folding| folding.chunks.as_mut());
        let runs = self.runs.iter_mut().flat_map(|run| &mut run.chunks);
        runs.chain(counting).chain(folding.flat_map(|chunks| &mut chunks.stored))
    }

    /// Returns the bytes of all runs on the disk.
    pub fn run_bytes(&self) -> u64 {
        let chunks = self.runs.iter().flat_map(|run| &run.chunks);
        chunks.map(|chunk| u64::from(chunk.len)).sum()
    }

    /// Returns the memory of memtables that are no run yet, in bytes.
    pub fn unflushed_memtable_bytes(&self) -> usize {
        let counting = self.flush.iter().map(|counting| counting.layer.bytes);
        let layers = self.sealed_memtables.iter().map(|layer| layer.bytes).chain(counting);
        self.active.bytes.saturating_add(layers.sum())
    }
}

/// Merges two memtables of the log.
fn merge_memtables(
    segments: &mut SegmentTable,
    newer: &Arc<ImmutableMemtable>,
    older: &Arc<ImmutableMemtable>,
) -> ImmutableMemtable {
    ImmutableMemtable::merge(newer, older, &mut |dead: &PayloadRef| {
        segments.sub_live_payload(dead, true)
    })
}
