//! Runs become part of the tree, a few pairs with every change.
//!
//! Law: until all is merged the runs stay above the tree, and hide in it what they did
//! before and what came of them: whoever reads sees no difference, and a crash in the middle
//! begins anew with the same result.

use std::sync::Arc;

use crate::core::Core;
use crate::entry::{Data, Entry, Key, Named, extent_key, named};
use crate::layer::Layer;
use crate::tree::{Edit, Found, Nodes, Tree};
use crate::{Error, ObjectId, Result};

/// Runs that are merged together: fewer passes over the tree. Opening a store reads up to
/// twice as many.
const RUNS: usize = 8;
/// Pairs that are merged without waiting for more runs.
const PAIRS: usize = 512 << 10;
/// Pairs of one step.
const STEP: usize = 64;

/// Runs on their way into the tree.
pub(crate) struct Merging {
    /// All of them as one.
    pub layer: Arc<Layer>,
    /// How many of the oldest runs it has.
    pub runs: usize,
    next: usize,
    /// Where in the next pair's interval.
    resume: u64,
    credit: u64,
}

impl Core {
    /// Begins to merge if there are enough runs.
    pub fn plan_merge(&mut self) -> Result<()> {
        if self.merging.is_some() && self.runs.len() >= 2 * RUNS {
            self.finish_merge()?;
        }
        self.fold_runs(false);
        let layers = self.runs.iter().filter_map(|run| run.layer.as_ref());
        let pairs: usize = layers.map(|layer| layer.pairs.len()).sum();
        if self.merging.is_none() && (self.runs.len() >= RUNS || pairs >= PAIRS) {
            self.begin_merge();
        }
        Ok(())
    }

    pub fn begin_merge(&mut self) {
        self.fold_runs(true);
        let Some(layer) = self.counted_layers().first().cloned() else { return };
        let runs = self.runs.len();
        // Its own layer is not looked at any more.
        self.runs.iter_mut().for_each(|run| run.layer = None);
        self.merging = Some(Merging { layer, runs, next: 0, resume: 0, credit: 0 });
        self.refresh();
    }

    /// Has few layers in memory, which double from new to old, or one: the oldest run of
    /// those that a layer has keeps it.
    pub fn fold_runs(&mut self, all: bool) {
        let merged = self.merging.as_ref().map_or(0, |merging| merging.runs);
        loop {
            let mut newest =
                (merged..self.runs.len()).rev().filter(|&run| self.runs[run].layer.is_some());
            let (Some(newer), Some(older)) = (newest.next(), newest.next()) else { return };
            let (Some(new), Some(old)) = (&self.runs[newer].layer, &self.runs[older].layer) else {
                return;
            };
            if !all && new.pairs.len() * 2 < old.pairs.len() {
                return;
            }
            // What is hidden was counted when the newer run was.
            let folded = Layer::fold(new, old, &mut |_| {});
            self.runs[older].layer = Some(Arc::new(folded));
            self.runs[newer].layer = None;
        }
    }

    /// Merges what `bytes` pay for.
    pub fn merge_some(&mut self, bytes: u64) -> Result<()> {
        // Done before as many runs came again as are being merged.
        let span = self.layout.log_bytes() * 2;
        let Some(merging) = &mut self.merging else { return Ok(()) };
        merging.credit += bytes * (merging.layer.pairs.len() as u64 + 1);
        let pairs = merging.credit / span;
        if pairs < STEP as u64 && (pairs as usize) < merging.layer.pairs.len() {
            return Ok(());
        }
        merging.credit -= pairs * span;
        if self.segments.free() <= self.floor() {
            return Ok(());
        }
        self.merge_step(pairs as usize + 1)
    }

    pub fn finish_merge(&mut self) -> Result<()> {
        while self.merging.is_some() && self.segments.free() > self.floor() {
            self.merge_step(256)?;
        }
        Ok(())
    }

    fn merge_step(&mut self, pairs: usize) -> Result<()> {
        let Some(merging) = &self.merging else { return Ok(()) };
        let layer = merging.layer.clone();
        let (edits, next, resume) =
            edits(&layer, (merging.next, merging.resume), pairs, &self.tree, &*self.io)?;
        let mut tree = std::mem::take(&mut self.tree);
        let applied = tree.apply(self, &edits);
        self.tree = tree;
        applied?;
        if let Some(merging) = &mut self.merging {
            (merging.next, merging.resume) = (next, resume);
        }
        if next == layer.pairs.len() {
            let merged = self.merging.take().map_or(0, |merging| merging.runs);
            for run in self.runs.drain(..merged) {
                for ptr in run.chunks {
                    self.segments.kill(ptr.at, ptr.len, false);
                }
            }
        }
        self.refresh();
        Ok(())
    }
}

/// What is left of an interval of the tree behind one that hid its middle.
struct Rest {
    id: ObjectId,
    at: u64,
    data: Data,
}

/// The edits that bring `pairs` pairs of a layer into the tree, and where to go on.
fn edits(
    layer: &Layer,
    (mut next, mut resume): (usize, u64),
    pairs: usize,
    tree: &Tree,
    nodes: &dyn Nodes,
) -> Result<(Vec<Edit>, usize, u64)> {
    let mut out: Vec<Edit> = vec![];
    let mut rest: Option<Rest> = None;
    // Intervals of the tree that begin before this offset are done with.
    let mut handled: (ObjectId, u64) = (ObjectId(0), 0);
    let mut hint: Option<Found> = None;
    let mut left = pairs;
    while left > 0 {
        let Some((key, entry)) = layer.pairs.get(next) else { break };
        left -= 1;
        let Some(Named::Extent(id, start)) = named(key) else {
            flush(&mut out, &mut rest);
            let edit = (!matches!(entry, Entry::Gone)).then(|| entry.clone());
            out.push((key.clone(), edit));
            (next, resume) = (next + 1, 0);
            continue;
        };
        let (a, b) = (start + resume, start + entry.covers());
        // One that ends before this interval is done with; another may reach in.
        let ends = |rest: &Rest| rest.at + u64::from(rest.data.len) <= a;
        if rest.as_ref().is_some_and(|rest| rest.id != id || ends(rest)) {
            flush(&mut out, &mut rest);
        }
        if handled.0 != id {
            handled = (id, 0);
        }
        // What begins before and reaches in: a rest, or an interval of the tree.
        let before = match rest.take() {
            Some(rest) => Some((rest.at, rest.data)),
            None => match tree.before(nodes, &extent_key(id, a), &mut hint)? {
                Some((key, Entry::Data(data))) => match named(&key) {
                    Some(Named::Extent(of, at))
                        if of == id && at >= handled.1 && at + u64::from(data.len) > a =>
                    {
                        Some((at, data))
                    }
                    _ => None,
                },
                _ => None,
            },
        };
        if let Some((at, data)) = before {
            let end = at + u64::from(data.len);
            if at < a {
                let kept = data.part(0, (a.min(end) - at) as u32);
                out.push((extent_key(id, at), Some(Entry::Data(kept))));
            }
            if end > b {
                let data = data.part((b - at) as u32, (end - b) as u32);
                rest = Some(Rest { id, at: b, data });
            }
        }
        if let Entry::Data(data) = entry {
            out.push((extent_key(id, a), Some(Entry::Data(data.clone()))));
        }
        // What begins inside.
        let mut from = a;
        let mut stopped = false;
        while let Some((key, inside)) = tree.at_or_after(nodes, &extent_key(id, from), &mut hint)? {
            let at = match named(&key) {
                Some(Named::Extent(of, at)) if of == id && at < b => at,
                _ => break,
            };
            let end = at + inside.covers();
            if at != a || !matches!(entry, Entry::Data(_)) {
                out.push((key, None));
            }
            if end > b
                && let Entry::Data(data) = inside
            {
                let data = data.part((b - at) as u32, (end - b) as u32);
                rest = Some(Rest { id, at: b, data });
            }
            from = end.max(at + 1);
            if left == 0 && from < b && matches!(entry, Entry::Hole(_)) {
                stopped = true;
                break;
            }
            left = left.saturating_sub(1);
        }
        handled.1 = handled.1.max(from.min(b)).max(a);
        if stopped {
            resume = from - start;
            break;
        }
        handled.1 = b;
        (next, resume) = (next + 1, 0);
    }
    flush(&mut out, &mut rest);
    if !out.is_sorted_by(|(a, _), (b, _)| a < b) {
        // Only a tree or a run that nobody here made has intervals that overlap.
        let at = out.iter().find_map(|(_, entry)| match entry {
            Some(Entry::Data(data)) => Some(data.at),
            _ => None,
        });
        let what = "payloads that overlap";
        return Err(Error::Corrupt { what, at_bytes: at.unwrap_or(0) });
    }
    Ok((out, next, resume))
}

fn flush(out: &mut Vec<Edit>, rest: &mut Option<Rest>) {
    if let Some(Rest { id, at, data }) = rest.take() {
        let key: Key = extent_key(id, at);
        out.push((key, Some(Entry::Data(data))));
    }
}
