//! Checkpoints: what recovery begins from.
//!
//! ```text
//!   superblock ─▶ blob, twice ─▶ tree's root · runs · image · table of segments · where streams stood
//! ```
//!
//! The layer of the log so far is sealed; what it hides is counted, a few pairs with every
//! change; then it is written as a *run*, sorted and compact, together with whatever inner
//! nodes changed. Order comes from the disk: frames, then two superblocks, then the others.
//!
//! Law 1: a run is counted: what it hides in older runs and the tree is dead already.
//! Law 2: the *image* is a log in another form: not counted, written when a store is opened
//! after an accident, and replayed before the log behind it.
//! Law 3: the table of segments counts what this checkpoint leads to and nothing else: a store
//! that is opened from it knows of nothing else.
//! Law 4: what a checkpoint does away with is free once the checkpoint is durable and
//! everybody who might read it has gone.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::indexing_slicing,
    reason = "sequence numbers, counts and places are this process's own; what was decoded was bounded there"
)]

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use draconis_device::{Extent, Group as DiskGroup, Ticket as DiskTicket};

use crate::codec::{Reader, put_varint};
use crate::core::Core;
use crate::entry::{Entry, Key, Named, named, put_key_behind, read_pair_behind, unfolded_max};
use crate::hooks::{Omission, is_left_out};
use crate::layer::{Layer, Sorted};
use crate::layout::Kind;
use crate::tree::Ptr;
use crate::view::{Index, Token};
use crate::{Error, Result};

/// Pairs whose leaves are asked for together.
const AHEAD: usize = 64;

/// Where a stream stood: segment, position in it, the segment after it.
pub(crate) type Place = (u32, u32, u32);

/// A layer on its way to become a run.
pub(crate) struct Counting {
    pub layer: Arc<Layer>,
    /// The last commit that is in it.
    seq: u64,
    places: Vec<Place>,
    /// The next pair, and where in its interval.
    next: usize,
    resume: u64,
    /// Pairs that are paid for, times the bytes of half a log.
    credit: u64,
    /// The first pair whose leaf was not asked for.
    ahead: usize,
    pub chunks: Chunks,
}

/// Pairs on their way to the disk, each within one chunk.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    /// Those that were stored.
    pub stored: Vec<Ptr>,
    bytes: Vec<u8>,
    /// The last key in them, and how long all of them are.
    last: Key,
    keys_bytes: usize,
    /// Pairs that were taken.
    taken: usize,
}

impl Chunks {
    /// Takes what was not taken yet of `pairs`.
    pub fn feed(&mut self, core: &mut Core, pairs: &[(Key, Entry)]) -> Result<()> {
        let limit = core.layout.chunk_bytes();
        let mut pair = vec![];
        for (key, entry) in &pairs[self.taken..] {
            pair.clear();
            put_key_behind(&mut pair, &self.last, key);
            entry.encode(&mut pair);
            let len = self.bytes.len() + pair.len();
            let is_full = len > limit || self.keys_bytes + key.len() > unfolded_max(len);
            if !self.bytes.is_empty() && is_full {
                self.flush(core)?;
                pair.clear();
                put_key_behind(&mut pair, &self.last, key);
                entry.encode(&mut pair);
            }
            self.bytes.extend_from_slice(&pair);
            self.last.clone_from(key);
            self.keys_bytes += key.len();
        }
        self.taken = pairs.len();
        Ok(())
    }

    /// Where all of them are.
    pub fn finish(mut self, core: &mut Core) -> Result<Vec<Ptr>> {
        if !self.bytes.is_empty() {
            self.flush(core)?;
        }
        Ok(self.stored)
    }

    fn flush(&mut self, core: &mut Core) -> Result<()> {
        self.stored.push(core.store(&self.bytes, false)?);
        self.bytes.clear();
        self.last.clear();
        self.keys_bytes = 0;
        Ok(())
    }
}

/// A counted layer, in memory and on the disk.
pub(crate) struct Run {
    /// None if an older run, or what is being merged, has its pairs too.
    pub layer: Option<Arc<Layer>>,
    pub chunks: Vec<Ptr>,
}

/// A checkpoint that the disk has, durable or not.
#[derive(Debug)]
pub(crate) struct Written {
    ticket: DiskTicket,
    emptied: Vec<u32>,
    /// Segments that were cleaned before it began.
    pub cleaned: HashSet<u32>,
    /// Bytes that the disk was given before it.
    written_bytes: u64,
}

/// What the blob says.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Blob {
    /// The last commit that runs and image have.
    pub seq: u64,
    /// The commit that the blob is in: durable.
    pub own_seq: u64,
    pub clock: u64,
    pub next_id: u64,
    pub links: u64,
    pub root: Option<Ptr>,
    pub runs: Vec<Vec<Ptr>>,
    pub image: Vec<Ptr>,
    pub places: Vec<Place>,
    pub table: Vec<Ptr>,
}

fn put_ptrs(out: &mut Vec<u8>, ptrs: &[Ptr]) {
    put_varint(out, ptrs.len() as u64);
    ptrs.iter().for_each(|ptr| ptr.encode(out));
}

fn read_ptrs(reader: &mut Reader<'_>) -> Result<Vec<Ptr>> {
    (0..reader.varint_u32()?).map(|_| Ptr::decode(reader)).collect()
}

impl Blob {
    fn encode(&self) -> Vec<u8> {
        let mut out = vec![];
        for number in [self.seq, self.own_seq, self.clock, self.next_id, self.links] {
            put_varint(&mut out, number);
        }
        put_ptrs(&mut out, self.root.as_slice());
        put_varint(&mut out, self.runs.len() as u64);
        self.runs.iter().for_each(|run| put_ptrs(&mut out, run));
        put_ptrs(&mut out, &self.image);
        put_varint(&mut out, self.places.len() as u64);
        for (segment, pos, next) in &self.places {
            for number in [segment, pos, next] {
                put_varint(&mut out, u64::from(*number));
            }
        }
        put_ptrs(&mut out, &self.table);
        out
    }

    pub fn decode(bytes: &[u8], at: u64) -> Result<Self> {
        let mut reader = Reader::new(bytes, at);
        let reader = &mut reader;
        let [seq, own_seq, clock, next_id, links] = [
            reader.varint()?,
            reader.varint()?,
            reader.varint()?,
            reader.varint()?,
            reader.varint()?,
        ];
        let root = read_ptrs(reader)?.first().copied();
        let runs = (0..reader.varint_u32()?).map(|_| read_ptrs(reader)).collect::<Result<_>>()?;
        let image = read_ptrs(reader)?;
        let places = (0..reader.varint_u32()?)
            .map(|_| Ok((reader.varint_u32()?, reader.varint_u32()?, reader.varint_u32()?)))
            .collect::<Result<_>>()?;
        let table = read_ptrs(reader)?;
        Ok(Self { seq, own_seq, clock, next_id, links, root, runs, image, places, table })
    }
}

/// Reads one part of a run or an image.
pub(crate) fn read_chunk(bytes: &[u8], at: u64, into: &mut Vec<(Key, Entry)>) -> Result<()> {
    let mut reader = Reader::new(bytes, at);
    let (mut key, mut room) = (Key::new(), unfolded_max(bytes.len()));
    while !reader.is_done() {
        let entry = read_pair_behind(&mut reader, &mut key)?;
        room = room.checked_sub(key.len()).ok_or_else(|| reader.corrupt("a run's length"))?;
        if into.last().is_some_and(|(previous, _)| previous.as_slice() >= key.as_slice()) {
            return Err(reader.corrupt("pairs of a run that are out of order"));
        }
        into.push((key.clone(), entry));
    }
    Ok(())
}

impl Core {
    fn store_chunks(&mut self, bytes: &[u8]) -> Result<Vec<Ptr>> {
        bytes.chunks(self.layout.chunk_bytes()).map(|chunk| self.store(chunk, false)).collect()
    }

    /// Stores pairs, each within one chunk.
    fn store_pairs(&mut self, layer: &Layer) -> Result<Vec<Ptr>> {
        let mut chunks = Chunks::default();
        chunks.feed(self, &layer.pairs)?;
        chunks.finish(self)
    }

    fn places(&self) -> Vec<Place> {
        self.streams.iter().map(|stream| (stream.segment, stream.pos, stream.next)).collect()
    }

    /// Seals the log so far. Counting it goes on with every change.
    pub fn begin_checkpoint(&mut self) -> Result<()> {
        self.finish_counting()?;
        self.commit()?;
        let mut layer = Arc::new(self.active.seal());
        while let Some(older) = self.log_layers.pop() {
            layer = match (layer.pairs.is_empty(), older.pairs.is_empty()) {
                (true, _) => older,
                (_, true) => layer,
                _ => Arc::new(self.fold_log(&layer, &older)),
            };
        }
        self.segments.begin();
        self.cleaned_before.extend(self.cleaned_since.drain());
        self.log_bytes = 0;
        self.counting = Some(Counting {
            layer,
            seq: self.batch.seq - 1,
            places: self.places(),
            next: 0,
            resume: 0,
            credit: 0,
            ahead: 0,
            chunks: Chunks::default(),
        });
        self.refresh();
        Ok(())
    }

    /// Counts what `bytes` on the disk pay for; writes the checkpoint once all is counted.
    pub fn count_some(&mut self, bytes: u64) -> Result<()> {
        let half = self.layout.log_bytes() / 2;
        let Some(counting) = &mut self.counting else { return Ok(()) };
        // All pairs, each with what it hides, while half a log is written; in small lots, to
        // use what is loaded.
        let all = counting.layer.pairs.len() as u64 * 2 + 1;
        counting.credit += bytes * all;
        let pairs = counting.credit / half.max(1);
        if pairs < 16.min(all) {
            return Ok(());
        }
        counting.credit -= pairs * half.max(1);
        let mut left = pairs as usize + 1;
        while left > 0 {
            let lot = left.min(AHEAD);
            if self.count(lot)? {
                return self.finish_checkpoint();
            }
            left -= lot;
        }
        Ok(())
    }

    /// Counts all and writes the checkpoint that is on its way, if one is.
    pub fn finish_counting(&mut self) -> Result<()> {
        if self.counting.is_none() {
            return Ok(());
        }
        while !self.count(AHEAD)? {}
        self.finish_checkpoint()
    }

    /// Counts so many pairs; says whether all are counted.
    fn count(&mut self, pairs: usize) -> Result<bool> {
        let Some(counting) = &self.counting else { return Ok(true) };
        let (layer, mut next, mut resume) =
            (counting.layer.clone(), counting.next, counting.resume);
        let older = self.counted_layers();
        if counting.ahead < layer.pairs.len().min(next + pairs) {
            let (from, to) = (counting.ahead, layer.pairs.len().min(next + AHEAD));
            self.load_leaves(&layer.pairs[from..to], |key| {
                let hash = crate::layer::hash(key);
                older.iter().any(|layer| layer.get(key, hash).is_some())
            })?;
            if let Some(counting) = &mut self.counting {
                counting.ahead = to;
            }
        }
        let index = Index { top: None, layers: &older, tree: &self.tree };
        let io = self.io.clone();
        let segments = &mut self.segments;
        let mut left = pairs;
        let mut hint = None;
        while left > 0 {
            let Some((key, entry)) = layer.pairs.get(next) else { break };
            left -= 1;
            if let Some(Named::Extent(id, at)) = named(key) {
                let (from, to) = (at + resume, at + entry.covers());
                let mut stopped_at = None;
                let walked =
                    index.resolve(&*io, id, (from, to), &mut hint, &mut |offset, hidden| {
                        if let Entry::Data(dead) = &hidden {
                            segments.kill(dead.at + u64::from(dead.skip), dead.len, false);
                        }
                        if left == 0 {
                            stopped_at = Some(offset + hidden.covers());
                            return ControlFlow::Break(());
                        }
                        left -= 1;
                        ControlFlow::Continue(())
                    })?;
                if let (ControlFlow::Break(()), Some(offset)) = (walked, stopped_at) {
                    resume = offset - at;
                    continue;
                }
            } else if let Some(Entry::Data(dead)) = point(&index, &io, key, &mut hint)? {
                segments.kill(dead.at + u64::from(dead.skip), dead.len, false);
            }
            next += 1;
            resume = 0;
        }
        if let Some(mut counting) = self.counting.take() {
            (counting.next, counting.resume) = (next, resume);
            let fed = counting.chunks.feed(self, &layer.pairs[..next]);
            self.counting = Some(counting);
            fed?;
        }
        Ok(next == layer.pairs.len())
    }

    /// Writes what is left of the run, and all that leads to it.
    fn finish_checkpoint(&mut self) -> Result<()> {
        let Some(counting) = self.counting.take() else { return Ok(()) };
        if !counting.layer.pairs.is_empty() {
            let chunks = counting.chunks.finish(self)?;
            self.runs.push(Run { layer: Some(counting.layer), chunks });
        }
        self.write_checkpoint(counting.seq, counting.places, vec![])?;
        self.plan_merge();
        self.catch_up()?;
        self.refresh();
        Ok(())
    }

    /// A store that was opened writes what it replayed, uncounted.
    pub fn write_image(&mut self) -> Result<()> {
        self.segments.begin();
        let places = self.places();
        let seq = self.batch.seq - 1;
        let pairs = self.active.map.iter().map(|(key, entry)| (key.clone(), entry.clone()));
        let layer = Layer::new(pairs.collect(), 0);
        let image = self.store_pairs(&layer)?;
        self.write_checkpoint(seq, places, image)?;
        self.log_bytes = 0;
        Ok(())
    }

    fn write_checkpoint(&mut self, seq: u64, places: Vec<Place>, image: Vec<Ptr>) -> Result<()> {
        self.complete_checkpoint(true)?;
        let mut tree = std::mem::take(&mut self.tree);
        let root = tree.write_changed(self);
        self.tree = tree;
        let root = root?;
        for ptr in std::mem::take(&mut self.checkpoint_ptrs) {
            self.segments.kill(ptr.at, ptr.len, false);
        }
        let emptied = self.segments.empty(seq);
        // A run that is being written as one is led to by a later checkpoint.
        let folding = self.folding.iter().filter_map(|folding| folding.chunks.as_ref());
        let unled: Vec<Ptr> = folding.flat_map(|chunks| chunks.stored.iter().copied()).collect();
        let table = self.segments.encode(&unled);
        let table = self.store_chunks(&table)?;
        let blob = Blob {
            seq,
            own_seq: self.batch.seq,
            clock: self.clock,
            next_id: self.next_id,
            links: self.links,
            root,
            runs: self.runs.iter().map(|run| run.chunks.clone()).collect(),
            image: image.clone(),
            places,
            table: table.clone(),
        };
        let bytes = blob.encode();
        // In a commit of its own number: `own_seq` is the one that is open now.
        let checkpoint = self.store(&bytes, false)?;
        // All hangs on it, so there are two, in two places where there are two.
        let twin = self.store_in(Kind::Node, &bytes, false)?;
        self.commit()?;
        (self.superblock.checkpoint, self.superblock.twin) = (checkpoint, Some(twin));
        let ticket = self.write_superblock(false)?;
        self.barrier = self.barrier.max(blob.own_seq);
        self.checkpoint_ptrs = [table, vec![checkpoint, twin], image].concat();
        let written_bytes = self.counters.written_bytes;
        let cleaned = std::mem::take(&mut self.cleaned_before);
        self.checkpoint = Some(Written { ticket, emptied, cleaned, written_bytes });
        self.counters.checkpoints += 1;
        Ok(())
    }

    /// Writes all copies of the superblock behind everything that was written.
    pub fn write_superblock(&mut self, waits: bool) -> Result<DiskTicket> {
        self.superblock.generation += 1;
        // Where the store ends from now on there is none yet: till there is, all is as it was.
        let pairs = if self.is_resized { [1, 0] } else { [0, 1] };
        let chain = pairs.map(|pair| DiskGroup { writes: self.superblock.writes(pair) });
        let is_ordered = !is_left_out(Omission::SuperblockAfterFrames);
        let after: Vec<DiskTicket> = self.last_disk.into_iter().filter(|_| is_ordered).collect();
        let tickets = self
            .io
            .disk
            .submit_chain(chain.into(), &after)
            .map_err(|refused| Error::Device(refused.error))?;
        // The second pair is written behind a flush that made the first durable.
        let ticket = *tickets.last().ok_or(Error::Device(draconis_device::Error::Gone))?;
        self.last_disk = Some(ticket);
        if waits {
            self.io.disk.wait(ticket)?;
        }
        Ok(ticket)
    }

    /// Frees what the last checkpoint did away with, once that is durable.
    pub fn complete_checkpoint(&mut self, waits: bool) -> Result<()> {
        if let Some(written) = &self.checkpoint
            && waits
            && !is_left_out(Omission::FreeAfterCheckpoint)
        {
            self.io.disk.wait(written.ticket)?;
        }
        if waits && let Some(written) = self.checkpoint.take() {
            let old = std::mem::replace(&mut self.token, Arc::new(Token));
            self.epochs.push_back((old, written.emptied));
            self.refresh();
        }
        self.release();
        Ok(())
    }

    /// Frees segments that have no reader any more.
    pub fn release(&mut self) {
        while let Some((token, _)) = self.epochs.front()
            && Arc::strong_count(token) == 1
        {
            let Some((_, emptied)) = self.epochs.pop_front() else { break };
            let geometry = self.superblock.geometry;
            let len = u64::from(geometry.segment_bytes);
            let extents: Vec<Extent> = emptied
                .iter()
                .map(|&segment| Extent::new(geometry.start_of(segment), len))
                .collect();
            for (&segment, extent) in emptied.iter().zip(&extents) {
                self.io.forget(extent.start_bytes, len);
                self.segments.release(segment);
                // Others will write there: what was read of it is no longer true.
                self.cleaning.take_if(|cleaning| cleaning.segment == segment);
            }
            // Only a hint; that it fails changes nothing.
            if !extents.is_empty() && self.io.disk.properties().discards {
                let after: Vec<DiskTicket> = self.last_disk.into_iter().collect();
                let _ = self.io.disk.discard(&extents, &after);
            }
        }
    }

    /// Completes a checkpoint that was written so long ago that the disk has it by now.
    pub fn complete_old_checkpoint(&mut self) -> Result<()> {
        let age = self.layout.log_bytes() / 8;
        let is_old = self.checkpoint.as_ref().is_some_and(|written| {
            self.durable_disk >= Some(written.ticket)
                || self.counters.written_bytes - written.written_bytes > age
        });
        self.complete_checkpoint(is_old)
    }

    /// Segments that are free once the checkpoint on its way is durable.
    pub fn coming(&self) -> usize {
        self.checkpoint.as_ref().map_or(0, |written| written.emptied.len())
    }

    /// A whole checkpoint, now, durable.
    pub fn checkpoint_now(&mut self) -> Result<()> {
        self.begin_checkpoint()?;
        self.finish_counting()?;
        self.complete_checkpoint(true)
    }
}

/// What an exact key leads to, with a hint for the tree.
fn point(
    index: &Index<'_>,
    io: &crate::io::Io,
    key: &Key,
    hint: &mut Option<crate::tree::Found>,
) -> Result<Option<Entry>> {
    if !matches!(named(key), Some(Named::Value(_))) {
        return Ok(None);
    }
    let hash = crate::layer::hash(key);
    if let Some(entry) = index.layers.iter().find_map(|layer| layer.get(key, hash)) {
        return Ok(Some(entry.clone()));
    }
    match index.tree.at_or_after(io, key, hint)? {
        Some((found, entry)) if found == *key => Ok(Some(entry)),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_comes_back() {
        let ptr = |at| Ptr { at, len: 9, sum: at * 7 };
        let blob = Blob {
            seq: 1,
            own_seq: 2,
            clock: 3,
            next_id: 4,
            links: 5,
            root: Some(ptr(6)),
            runs: vec![vec![ptr(1), ptr(2)], vec![]],
            image: vec![ptr(8)],
            places: vec![(1, 2, 3), (4, 5, 6)],
            table: vec![ptr(9)],
        };
        let bytes = blob.encode();
        assert_eq!(Blob::decode(&bytes, 0), Ok(blob));
        for len in 0..bytes.len() {
            assert!(Blob::decode(&bytes[..len], 0).is_err());
        }
    }
}
