//! The store as of one moment: layers over the tree, newest first.

use std::ops::ControlFlow;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::codec::narrow;
use crate::entry::{Data, Entry, Named, extent_key, named, object_key};
use crate::layer::{Layer, Sorted, intervals};
use crate::tree::{Found, Nodes, Tree};
use crate::{ObjectId, Result};

/// Held by those who may still read what a checkpoint did away with.
#[derive(Debug, Default)]
pub(crate) struct Token;

/// Layers and tree that change no more.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    /// Newest first.
    pub layers: Vec<Arc<Layer>>,
    pub tree: Tree,
    /// Only held.
    #[expect(dead_code)]
    pub token: Arc<Token>,
}

/// What is looked through, newest first: maybe the active layer, and a view.
#[derive(Clone, Copy)]
pub(crate) struct Index<'a> {
    pub top: Option<&'a dyn Sorted>,
    pub layers: &'a [Arc<Layer>],
    pub tree: &'a Tree,
}

impl View {
    pub fn index(&self) -> Index<'_> {
        Index { top: None, layers: &self.layers, tree: &self.tree }
    }
}

/// Hears of each payload of an interval, with the object's offset; may end the walk.
pub(crate) type Take<'t> = dyn FnMut(u64, Data) -> ControlFlow<()> + 't;

impl Index<'_> {
    fn split(&self) -> Option<(&dyn Sorted, Index<'_>)> {
        if let Some(top) = self.top {
            return Some((top, Index { top: None, ..*self }));
        }
        let (first, rest) = self.layers.split_first()?;
        Some((&**first, Index { top: None, layers: rest, tree: self.tree }))
    }

    /// What a key leads to: what hides something is `None`. Not for intervals.
    pub fn get(&self, nodes: &dyn Nodes, key: &[u8]) -> Result<Option<Entry>> {
        let hash = crate::layer::hash(key);
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
            Some(Entry::Gone) => Ok(None),
            Some(entry) => Ok(Some(entry.clone())),
            None => self.tree.get(nodes, key),
        }
    }

    /// The payloads of `[from, to)` of an object, in order.
    pub fn resolve(
        &self,
        nodes: &dyn Nodes,
        id: ObjectId,
        (from, to): (u64, u64),
        hint: &mut Option<Found>,
        take: &mut Take<'_>,
    ) -> Result<ControlFlow<()>> {
        if from >= to {
            return Ok(ControlFlow::Continue(()));
        }
        let Some((top, below)) = self.split() else {
            return resolve_tree(self.tree, nodes, id, (from, to), hint, take);
        };
        if !top.may_touch(id, from, to) {
            return below.resolve(nodes, id, (from, to), hint, take);
        }
        // An interval of what is lost may have begun anywhere before.
        top.check(&extent_key(id, 0), &extent_key(id, to))?;
        let mut found: SmallVec<[(u64, &Entry); 4]> = SmallVec::new();
        intervals(top, id, from, to, &mut |at, entry| found.push((at, entry)));
        let mut done = from;
        for (at, entry) in found {
            let (start, end) = (at.max(from), at.saturating_add(entry.covers()).min(to));
            if start > done && below.resolve(nodes, id, (done, start), hint, take)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if let Entry::Data(data) = entry
                && take(
                    start,
                    data.part(narrow(start.saturating_sub(at)), narrow(end.saturating_sub(start))),
                )
                .is_break()
            {
                return Ok(ControlFlow::Break(()));
            }
            done = end;
        }
        below.resolve(nodes, id, (done, to), hint, take)
    }

    /// An object's record.
    pub fn object(
        &self,
        nodes: &dyn Nodes,
        id: ObjectId,
    ) -> Result<Option<crate::entry::ObjectRecord>> {
        match self.get(nodes, &object_key(id))? {
            Some(Entry::Object(record)) => Ok(Some(record)),
            _ => Ok(None),
        }
    }
}

fn resolve_tree(
    tree: &Tree,
    nodes: &dyn Nodes,
    id: ObjectId,
    (from, to): (u64, u64),
    hint: &mut Option<Found>,
    take: &mut Take<'_>,
) -> Result<ControlFlow<()>> {
    let mut give = |at: u64, entry: &Entry| {
        let Entry::Data(data) = entry else { return ControlFlow::Continue(()) };
        let (start, end) = (at.max(from), at.saturating_add(u64::from(data.len)).min(to));
        if start >= end {
            return ControlFlow::Continue(());
        }
        take(start, data.part(narrow(start.saturating_sub(at)), narrow(end.saturating_sub(start))))
    };
    let mut key = extent_key(id, from);
    if let Some((key, entry)) = tree.before(nodes, &key, hint)?
        && let Some(Named::Extent(of, at)) = named(&key)
        && of == id
        && give(at, &entry).is_break()
    {
        return Ok(ControlFlow::Break(()));
    }
    while let Some((found, entry)) = tree.at_or_after(nodes, &key, hint)? {
        match named(&found) {
            Some(Named::Extent(of, at)) if of == id && at < to => {
                if give(at, &entry).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                let Some(behind) = at.checked_add(entry.covers().max(1)) else { break };
                key = extent_key(id, behind);
            }
            _ => break,
        }
    }
    Ok(ControlFlow::Continue(()))
}
