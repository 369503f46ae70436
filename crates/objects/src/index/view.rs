//! The store at one moment: memtables over the tree, newest first.

use std::ops::ControlFlow;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::entry::{
    DecodedKey, Entry, Key, ObjectRecord, PayloadRef, decode_key, extent_key, object_key,
};
use crate::index::memtable::{ImmutableMemtable, SortedLookup, intervals};
use crate::index::tree::{BoundedLeaf, NodeSource, Tree};
use crate::{Error, ObjectId, Result};

/// Held by readers of segments that a checkpoint has freed.
#[derive(Debug, Default)]
pub(crate) struct ReaderPin;

/// Immutable memtables and tree.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Newest first.
    pub layers: Vec<Arc<ImmutableMemtable>>,
    pub tree: Tree,
    /// Only held, never read.
    #[expect(dead_code)]
    pub token: Arc<ReaderPin>,
}

/// Levels of a lookup, newest first: maybe the active memtable, and a view.
#[derive(Clone, Copy)]
pub(crate) struct Index<'a> {
    pub top: Option<&'a dyn SortedLookup>,
    pub layers: &'a [Arc<ImmutableMemtable>],
    pub tree: &'a Tree,
}

impl View {
    pub fn index(&self) -> Index<'_> {
        Index { top: None, layers: &self.layers, tree: &self.tree }
    }
}

/// Callback with an object's own extents, payloads and zeros, and their offsets; may end the walk.
pub(crate) type ExtentVisitor<'t> = dyn FnMut(u64, Entry) -> ControlFlow<()> + 't;

/// Most objects of a chain of parents: a read may visit each of them.
pub(crate) const MAX_TREE_DEPTH: usize = 1000;

impl Index<'_> {
    fn split_newest(&self) -> Option<(&dyn SortedLookup, Index<'_>)> {
        if let Some(top) = self.top {
            return Some((top, Index { top: None, ..*self }));
        }
        let (first, rest) = self.layers.split_first()?;
        Some((&**first, Index { top: None, layers: rest, tree: self.tree }))
    }

    /// Returns the entry of a key; `None` for a tombstone. Not for intervals.
    pub fn get(&self, nodes: &dyn NodeSource, key: &[u8]) -> Result<Option<Entry>> {
        let hash = crate::index::memtable::hash(key);
        let mut found = self.top.and_then(|top| top.get(key, hash));
        for layer in self.layers {
            if found.is_some() {
                break;
            }
            found = layer.get(key, hash);
            if found.is_none() && !layer.lost.is_empty() {
                layer.check(key, key)?;
            }
        }
        match found {
            Some(Entry::Tombstone) => Ok(None),
            Some(entry) => Ok(Some(entry.clone())),
            None => self.tree.get(nodes, key),
        }
    }

    /// Passes an object's own extents within `[from, to)` to `take`, in order.
    pub fn resolve_range(
        &self,
        nodes: &dyn NodeSource,
        id: ObjectId,
        (from, to): (u64, u64),
        hint: &mut Option<BoundedLeaf>,
        take: &mut ExtentVisitor<'_>,
    ) -> Result<ControlFlow<()>> {
        if from >= to {
            return Ok(ControlFlow::Continue(()));
        }
        let Some((top, below)) = self.split_newest() else {
            return resolve_tree(self.tree, nodes, id, (from, to), hint, take);
        };
        if !top.may_overlap(id, from, to) {
            return below.resolve_range(nodes, id, (from, to), hint, take);
        }
        // An interval of the unreadable range may have begun anywhere before.
        top.check(&extent_key(id, 0), &extent_key(id, to))?;
        let mut found: SmallVec<[(u64, &Entry); 4]> = SmallVec::new();
        intervals(top, id, from, to, &mut |at, entry| found.push((at, entry)));
        let mut done = from;
        for (at, entry) in found {
            let (start, end) = (at.max(from), at.saturating_add(entry.covered_bytes()).min(to));
            if start > done && below.resolve_range(nodes, id, (done, start), hint, take)?.is_break()
            {
                return Ok(ControlFlow::Break(()));
            }
            if entry.is_own()
                && take(start, entry.part(start.saturating_sub(at), end.saturating_sub(start)))
                    .is_break()
            {
                return Ok(ControlFlow::Break(()));
            }
            done = end;
        }
        below.resolve_range(nodes, id, (done, to), hint, take)
    }

    /// Returns the payloads that an object shows within `[from, to)`, in order: its own, and in
    /// gaps those of its parent.
    pub fn visible_payloads(
        &self,
        nodes: &dyn NodeSource,
        (id, record): (ObjectId, &ObjectRecord),
        (from, to): (u64, u64),
    ) -> Result<Vec<(u64, PayloadRef)>> {
        let mut parts: Vec<(u64, PayloadRef)> = vec![];
        let mut gaps = vec![(from, to.min(record.len))];
        let (mut id, mut parent) = (id, record.parent);
        for depth in 0.. {
            let mut rest: Vec<(u64, u64)> = vec![];
            for (from, to) in gaps {
                let mut done = from;
                let _ =
                    self.resolve_range(nodes, id, (from, to), &mut None, &mut |at, entry| {
                        if parent.is_some() && at > done {
                            rest.push((done, at));
                        }
                        done = at.saturating_add(entry.covered_bytes());
                        if let Entry::Data(data) = entry {
                            parts.push((at, data));
                        }
                        ControlFlow::Continue(())
                    })?;
                if parent.is_some() && done < to {
                    rest.push((done, to));
                }
            }
            let Some(below) = parent.filter(|_| !rest.is_empty()) else { break };
            let record = self.parent_record(nodes, id, below, depth)?;
            rest.iter_mut().for_each(|(_, to)| *to = record.len.min(*to));
            (id, parent, gaps) = (below, record.parent, rest);
        }
        parts.sort_by_key(|(at, _)| *at);
        Ok(parts)
    }

    /// Returns the record of an object's parent, which is the `depth`th.
    pub fn parent_record(
        &self,
        nodes: &dyn NodeSource,
        id: ObjectId,
        below: ObjectId,
        depth: usize,
    ) -> Result<ObjectRecord> {
        let wrong = |what| Error::Corrupt { what, at_bytes: 0 };
        // A parent has a smaller id than its child, so this ends even on a corrupt disk.
        if below >= id || depth >= MAX_TREE_DEPTH {
            return Err(wrong("objects over each other in a circle, or too many"));
        }
        self.object(nodes, below)?.ok_or(wrong("an object over one that is not there"))
    }

    /// Returns the live parts of a payload that was stored with this key: those that the key, or
    /// its interval, still refers to.
    pub fn live_payload_parts(
        &self,
        nodes: &dyn NodeSource,
        key: &[u8],
        stored: &PayloadRef,
    ) -> Result<Vec<(Key, PayloadRef)>> {
        let within = |data: &PayloadRef| data.at >= stored.at && data.end() <= stored.end();
        let mut parts = vec![];
        match decode_key(key) {
            Some(DecodedKey::Extent(id, at)) => {
                let end = at.saturating_add(u64::from(stored.len));
                let _ =
                    self.resolve_range(nodes, id, (at, end), &mut None, &mut |offset, entry| {
                        if let Entry::Data(data) = entry
                            && within(&data)
                        {
                            parts.push((extent_key(id, offset), data));
                        }
                        ControlFlow::Continue(())
                    })?;
            }
            Some(DecodedKey::Value(_)) => {
                if let Some(Entry::Data(data)) = self.get(nodes, key)?
                    && within(&data)
                {
                    parts.push((Key::from_slice(key), data));
                }
            }
            _ => {}
        }
        Ok(parts)
    }

    /// Returns an object's record.
    pub fn object(&self, nodes: &dyn NodeSource, id: ObjectId) -> Result<Option<ObjectRecord>> {
        match self.get(nodes, &object_key(id))? {
            Some(Entry::Object(record)) => Ok(Some(record)),
            _ => Ok(None),
        }
    }
}

fn resolve_tree(
    tree: &Tree,
    nodes: &dyn NodeSource,
    id: ObjectId,
    (from, to): (u64, u64),
    hint: &mut Option<BoundedLeaf>,
    take: &mut ExtentVisitor<'_>,
) -> Result<ControlFlow<()>> {
    let mut give = |at: u64, entry: &Entry| {
        let (start, end) = (at.max(from), at.saturating_add(entry.covered_bytes()).min(to));
        if start >= end || !entry.is_own() {
            return ControlFlow::Continue(());
        }
        take(start, entry.part(start.saturating_sub(at), end.saturating_sub(start)))
    };
    let mut key = extent_key(id, from);
    if let Some((key, entry)) = tree.last_before(nodes, &key, hint)?
        && let Some(DecodedKey::Extent(of, at)) = decode_key(&key)
        && of == id
        && give(at, &entry).is_break()
    {
        return Ok(ControlFlow::Break(()));
    }
    while let Some((found, entry)) = tree.first_at_or_after(nodes, &key, hint)? {
        match decode_key(&found) {
            Some(DecodedKey::Extent(of, at)) if of == id && at < to => {
                if give(at, &entry).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                let Some(behind) = at.checked_add(entry.covered_bytes().max(1)) else { break };
                key = extent_key(id, behind);
            }
            _ => break,
        }
    }
    Ok(ControlFlow::Continue(()))
}
