//! Layers, runs and tree, as the parts of one index.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "counts and places are this process's own; what was decoded was bounded there"
)]

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Result;
use crate::entry::{Data, Entry, Key};
use crate::index::counting::Counting;
use crate::index::layer::{Active, Layer, Sorted};
use crate::index::merge::{Folding, Merging};
use crate::index::run::Run;
use crate::index::tree::{Nodes, Ptr, Tree};
use crate::index::view::{Index, Token, View};
use crate::io::{InMemory, Io};
use crate::layout::Kind;
use crate::log::Log;
use crate::space::segment::Segments;
use crate::upkeep::{MissPolicy, Need, look};

/// All that leads somewhere.
#[derive(Default)]
pub(crate) struct Levels {
    pub active: Active,
    /// Sealed by snapshots since the last checkpoint began, oldest first.
    pub log_layers: Vec<Arc<Layer>>,
    pub counting: Option<Counting>,
    /// Oldest first.
    pub runs: Vec<Run>,
    pub folding: Option<Folding>,
    pub merging: Option<Merging>,
    /// The oldest runs that are merged as soon as they are one layer.
    pub to_merge: usize,
    /// Pairs in runs after which they are merged.
    pub merge_pairs: usize,
    /// Bytes that the log had when a merge began last.
    pub merged_at: u64,
    pub tree: Tree,
    pub token: Arc<Token>,
    pub view: Arc<View>,
}

impl Levels {
    /// Everything, as it is now.
    pub fn index(&self) -> Index<'_> {
        Index { top: Some(&self.active), layers: &self.view.layers, tree: &self.tree }
    }

    /// Makes the view anew: layers or tree are others now.
    pub fn refresh(&mut self) {
        let mut layers: Vec<Arc<Layer>> = self.log_layers.iter().rev().cloned().collect();
        layers.extend(self.counting.iter().map(|counting| counting.layer.clone()));
        layers.extend(self.counted_layers());
        let view = View { layers, tree: self.tree.clone(), token: self.token.clone() };
        self.view = Arc::new(view);
    }

    /// Who looks from now on does not keep what was emptied before: who still may holds what this
    /// returns.
    pub fn renew_token(&mut self) -> Arc<Token> {
        let old = std::mem::replace(&mut self.token, Arc::new(Token));
        self.refresh();
        old
    }

    /// Runs, and what is being merged, newest first.
    pub fn counted_layers(&self) -> Vec<Arc<Layer>> {
        let merged = self.merging.as_ref().map_or(0, |merging| merging.runs);
        let mut layers: Vec<Arc<Layer>> =
            self.runs[merged..].iter().rev().filter_map(|run| run.layer.clone()).collect();
        layers.extend(self.merging.iter().map(|merging| merging.layer.clone()));
        layers
    }

    /// Ends the active layer, so that a view has everything.
    pub fn seal(&mut self, segments: &mut Segments) {
        if self.active.map.is_empty() {
            return;
        }
        self.log_layers.push(Arc::new(self.active.seal()));
        // Few layers: each lookup asks all of them. Sizes double from new to old.
        while let [.., older, newer] = self.log_layers.as_slice()
            && (newer.pairs.len() * 2 >= older.pairs.len())
        {
            let folded = fold_log(segments, newer, older);
            self.log_layers.truncate(self.log_layers.len() - 2);
            self.log_layers.push(Arc::new(folded));
        }
        self.refresh();
    }

    /// Gives a key its entry in the active layer.
    pub fn set(&mut self, segments: &mut Segments, key: Key, entry: Entry) {
        self.active.set(key, entry, &mut |dead| segments.kill_data(dead, true));
    }

    /// Writes a payload that a key leads to from now on.
    pub fn put(
        &mut self,
        log: &mut Log,
        key: Key,
        payload: &[u8],
        (kind, stamp): (Kind, Option<u64>),
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
    pub fn layered(&self, key: &Key) -> Option<&Entry> {
        self.active.map.get(key).or_else(|| {
            let hash = crate::index::layer::hash(key);
            self.view.layers.iter().find_map(|layer| layer.get(key, hash))
        })
    }

    /// What memory knows a key to have that is no interval's.
    pub fn remembered(&self, io: &Io, key: &Key) -> Option<Entry> {
        match self.layered(key) {
            Some(entry) => Some(entry.clone()),
            None => self.tree.get(&InMemory::of(io), key).ok().flatten(),
        }
    }

    /// The leaves that are not in memory and that these keys, which are sorted, will be looked up
    /// in: one by one each would be waited for. `is_known` says which are answered without.
    fn far_leaves<'k>(
        &self,
        (io, nodes): (&Io, &dyn Nodes),
        keys: impl Iterator<Item = &'k Key>,
        is_known: impl Fn(&Key) -> bool,
    ) -> Result<Vec<Ptr>> {
        let mut wanted: Vec<Ptr> = vec![];
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
    pub fn ask_leaves<'k>(
        &self,
        log: &Log,
        keys: impl Iterator<Item = &'k Key> + Clone,
        is_known: impl Fn(&Key) -> bool,
        patience: MissPolicy,
    ) -> Result<Option<Need>> {
        let io = &*log.io;
        let far = look(io, patience, |nodes| self.far_leaves((io, nodes), keys, &is_known))?;
        let far = match far {
            ControlFlow::Break(need) => return Ok(Some(need)),
            ControlFlow::Continue(far) => far,
        };
        match patience {
            MissPolicy::Asks if !far.is_empty() => return Ok(Some(Need::Nodes(far))),
            MissPolicy::Waits if far.len() > 1 => io.load_ahead(&far),
            _ => {}
        }
        Ok(None)
    }

    /// The parts of all runs, and of those that are being written.
    pub fn chunks_mut(&mut self) -> impl Iterator<Item = &mut Ptr> {
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
        let layers = self.log_layers.iter().map(|layer| layer.bytes).chain(counting);
        self.active.bytes + layers.sum::<usize>()
    }
}

/// `newer` over `older`, both of the log.
pub(crate) fn fold_log(segments: &mut Segments, newer: &Arc<Layer>, older: &Arc<Layer>) -> Layer {
    Layer::fold(newer, older, &mut |dead: &Data| segments.kill_data(dead, true))
}
