//! Layers, runs and tree, as the parts of one index.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "counts and places are this process's own; what was decoded was bounded there"
)]

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Result;
use crate::cached_disk::{CachedDisk, CachedNodes};
use crate::entry::{Entry, Key, PayloadRef};
use crate::index::memtable::{ImmutableMemtable, Memtable, SortedLookup};
use crate::index::memtable_flush::MemtableFlush;
use crate::index::merge::{RunCompaction, TreeMerge};
use crate::index::run::SortedRun;
use crate::index::tree::{BlockPtr, NodeSource, Tree};
use crate::index::view::{Index, ReaderPin, View};
use crate::layout::PayloadKind;
use crate::log::LogWriter;
use crate::maintenance::{MissPolicy, RequiredIo, look};
use crate::space::segment::SegmentTable;

/// All that leads somewhere.
#[derive(Default)]
pub(crate) struct Levels {
    pub active: Memtable,
    /// Sealed by snapshots since the last checkpoint began, oldest first.
    pub sealed_memtables: Vec<Arc<ImmutableMemtable>>,
    pub counting: Option<MemtableFlush>,
    /// Oldest first.
    pub runs: Vec<SortedRun>,
    pub folding: Option<RunCompaction>,
    pub merging: Option<TreeMerge>,
    /// The oldest runs that are merged as soon as they are one layer.
    pub to_merge: usize,
    /// Pairs in runs after which they are merged.
    pub merge_pairs: usize,
    /// Bytes that the log had when a merge began last.
    pub merged_at: u64,
    pub tree: Tree,
    pub token: Arc<ReaderPin>,
    pub view: Arc<View>,
}

impl Levels {
    /// Everything, as it is now.
    pub fn index(&self) -> Index<'_> {
        Index { top: Some(&self.active), layers: &self.view.layers, tree: &self.tree }
    }

    /// Makes the view anew: layers or tree are others now.
    pub fn publish_view(&mut self) {
        let mut layers: Vec<Arc<ImmutableMemtable>> =
            self.sealed_memtables.iter().rev().cloned().collect();
        layers.extend(self.counting.iter().map(|counting| counting.layer.clone()));
        layers.extend(self.run_memtables());
        let view = View { layers, tree: self.tree.clone(), token: self.token.clone() };
        self.view = Arc::new(view);
    }

    /// Who looks from now on does not keep what was emptied before: who still may holds what this
    /// returns.
    pub fn replace_reader_pin(&mut self) -> Arc<ReaderPin> {
        let old = std::mem::replace(&mut self.token, Arc::new(ReaderPin));
        self.publish_view();
        old
    }

    /// Runs, and what is being merged, newest first.
    pub fn run_memtables(&self) -> Vec<Arc<ImmutableMemtable>> {
        let merged = self.merging.as_ref().map_or(0, |merging| merging.runs);
        let mut layers: Vec<Arc<ImmutableMemtable>> =
            self.runs[merged..].iter().rev().filter_map(|run| run.layer.clone()).collect();
        layers.extend(self.merging.iter().map(|merging| merging.layer.clone()));
        layers
    }

    /// Ends the active layer, so that a view has everything.
    pub fn seal(&mut self, segments: &mut SegmentTable) {
        if self.active.map.is_empty() {
            return;
        }
        self.sealed_memtables.push(Arc::new(self.active.seal()));
        // Few layers: each lookup asks all of them. Sizes double from new to old.
        while let [.., older, newer] = self.sealed_memtables.as_slice()
            && (newer.pairs.len() * 2 >= older.pairs.len())
        {
            let folded = merge_memtables(segments, newer, older);
            self.sealed_memtables.truncate(self.sealed_memtables.len() - 2);
            self.sealed_memtables.push(Arc::new(folded));
        }
        self.publish_view();
    }

    /// Gives a key its entry in the active layer.
    pub fn set(&mut self, segments: &mut SegmentTable, key: Key, entry: Entry) {
        self.active.set(key, entry, &mut |dead| segments.kill_data(dead, true));
    }

    /// Writes a payload that a key leads to from now on.
    pub fn put(
        &mut self,
        log: &mut LogWriter,
        key: Key,
        payload: &[u8],
        (kind, stamp): (PayloadKind, Option<u64>),
    ) -> Result<()> {
        let entry = log.payload(&key, payload, kind, stamp)?;
        self.set(&mut log.segments, key, entry);
        Ok(())
    }

    /// Keys in layers.
    pub fn pending_keys(&self) -> u64 {
        let layers: usize = self.view.layers.iter().map(|layer| layer.pairs.len()).sum();
        (self.active.map.len() + layers) as u64
    }

    /// What layers have of a key that is no interval's.
    pub fn get_in_memory(&self, key: &Key) -> Option<&Entry> {
        self.active.map.get(key).or_else(|| {
            let hash = crate::index::memtable::hash(key);
            self.view.layers.iter().find_map(|layer| layer.get(key, hash))
        })
    }

    /// What memory knows a key to have that is no interval's.
    pub fn get_cached(&self, io: &CachedDisk, key: &Key) -> Option<Entry> {
        match self.get_in_memory(key) {
            Some(entry) => Some(entry.clone()),
            None => self.tree.get(&CachedNodes::of(io), key).ok().flatten(),
        }
    }

    /// The leaves that are not in memory and that these keys, which are sorted, will be looked up
    /// in: one by one each would be waited for. `is_known` says which are answered without.
    fn far_leaves<'k>(
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
            let Some((ptr, next)) = self.tree.place_of_leaf(nodes, key)? else { break };
            if io.has_node(ptr) {
                upper = next;
            } else if !is_known(key) {
                upper = next;
                wanted.push(ptr);
            }
        }
        Ok(wanted)
    }

    /// Has the leaves in memory that these sorted keys will be looked up in, or says which are not.
    pub fn prefetch_leaves<'k>(
        &self,
        log: &LogWriter,
        keys: impl Iterator<Item = &'k Key> + Clone,
        is_known: impl Fn(&Key) -> bool,
        patience: MissPolicy,
    ) -> Result<Option<RequiredIo>> {
        let io = &*log.io;
        let far = look(io, patience, |nodes| self.far_leaves((io, nodes), keys, &is_known))?;
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

    /// The parts of all runs, and of those that are being written.
    pub fn chunks_mut(&mut self) -> impl Iterator<Item = &mut BlockPtr> {
        let counting = self.counting.iter_mut().flat_map(|counting| &mut counting.chunks.stored);
        let folding = self.folding.iter_mut().filter_map(|folding| folding.chunks.as_mut());
        let runs = self.runs.iter_mut().flat_map(|run| &mut run.chunks);
        runs.chain(counting).chain(folding.flat_map(|chunks| &mut chunks.stored))
    }

    /// Bytes of all runs on the disk.
    pub fn run_bytes(&self) -> u64 {
        let chunks = self.runs.iter().flat_map(|run| &run.chunks);
        chunks.map(|chunk| u64::from(chunk.len)).sum()
    }

    /// Memory that what is no run yet takes, in bytes.
    pub fn unwritten_bytes(&self) -> usize {
        let counting = self.counting.iter().map(|counting| counting.layer.bytes);
        let layers = self.sealed_memtables.iter().map(|layer| layer.bytes).chain(counting);
        self.active.bytes + layers.sum::<usize>()
    }
}

/// `newer` over `older`, both of the log.
pub(crate) fn merge_memtables(
    segments: &mut SegmentTable,
    newer: &Arc<ImmutableMemtable>,
    older: &Arc<ImmutableMemtable>,
) -> ImmutableMemtable {
    ImmutableMemtable::merge(newer, older, &mut |dead: &PayloadRef| segments.kill_data(dead, true))
}
