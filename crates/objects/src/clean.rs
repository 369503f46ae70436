//! Segments become free: what is alive in one is written elsewhere.
//!
//! Law 1: a moved payload is a change like any other: in the log, with the same key. It was
//! verified first; what is rotten stays where it is.
//! Law 2: the cleaner works as much as is written, so that no writer waits for a whole segment;
//! only a store that has nothing left to write into cleans at once.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::indexing_slicing,
    reason = "sequence numbers, counts and places are this process's own; what was decoded was bounded there"
)]

use crate::core::{Core, live_parts};
use crate::entry::{Data, Entry, Key};
use crate::frame::{HEADER, Header};
use crate::layout::Kind;
use crate::reading::Reading;
use crate::segment::State;
use crate::table::{Item, Items};
use crate::tree::{Node, Ptr};
use crate::{Error, Result};
use draconis_device::{Extent, Pending, ReadAnswer, Urgency};
use draconis_exchange::heap::Private;

/// What one group looks at, at most, if it is short.
const CLEANED_AT_ONCE: u64 = 96 << 10;
/// What may be owed before a group waits for what the cleaner reads.
const OWED_MAX: u64 = 1 << 20;

/// Something in a frame that may be alive.
#[derive(Debug)]
enum Candidate {
    Payload(Key, Data),
    Node { at: u64, len: u32 },
    Chunk { at: u64, len: u32 },
}

impl Candidate {
    fn len(&self) -> u64 {
        match self {
            Self::Payload(_, data) => u64::from(data.stored) + 64,
            Self::Node { len, .. } | Self::Chunk { len, .. } => u64::from(*len) + 64,
        }
    }

    /// One behind its last byte on the disk.
    fn end(&self) -> u64 {
        match self {
            Self::Payload(_, data) => data.end(),
            Self::Node { at, len } | Self::Chunk { at, len } => at + u64::from(*len),
        }
    }
}

/// The segment that is being cleaned.
pub(crate) struct Cleaning {
    pub segment: u32,
    /// The next frame.
    pos: u32,
    used: u32,
    /// What cleaning it gains, in bytes.
    dead: u64,
    stamp: u64,
    reading: Reading,
    /// Whether frames are read whole, since a jump takes longer than what it passes over.
    is_whole: bool,
    /// The table of the next frame, on its way.
    table: Option<Pending<ReadAnswer>>,
    /// What is left of the frame, last first.
    candidates: Vec<Candidate>,
}

impl Cleaning {
    /// Whether the next step needs what is on its way from the disk.
    fn waits(&self, start: u64) -> bool {
        let end = match self.candidates.last() {
            Some(candidate) => candidate.end(),
            None => start + u64::from(self.pos) + 1,
        };
        self.table.as_ref().is_some_and(|read| !read.is_ready()) || self.reading.waits(end)
    }
}

impl Core {
    /// Sees how much of the disk the last commit took for what was paid: headers, what
    /// fills pages, nodes and runs are cleaned for as well.
    pub fn see_spent(&mut self) {
        let now = (self.counters.written_bytes, self.counters.moved_bytes);
        let (written, moved) = std::mem::replace(&mut self.spent_before, now);
        let paid = std::mem::take(&mut self.paid_bytes);
        let spent = (now.0 - written).saturating_sub(now.1 - moved);
        if let Some(part) = (spent * 64).checked_div(paid) {
            let part = part.clamp(64, 64 * 64);
            self.spent_64ths = (self.spent_64ths * 15 + part) / 16;
        }
    }

    /// Cleans what `bytes` pay for.
    pub fn clean_some(&mut self, bytes: u64) -> Result<()> {
        self.paid_bytes += bytes;
        let free = self.segments.free();
        let coming = self.coming() + self.cleaned_since.len() + self.cleaned_before.len();
        if free + coming >= self.low() && self.cleaning.is_none() {
            self.cleaning_debt = 0;
            // What was cleaned is free after a checkpoint.
            let is_idle = self.counting.is_none() && self.checkpoint.is_none();
            if free < self.low() * 3 / 4 && is_idle && !self.cleaned_since.is_empty() {
                self.begin_checkpoint()?;
            }
            return Ok(());
        }
        if free <= self.floor() {
            // Only what is emptied helps, and that is for `make_room`.
            return Ok(());
        }
        if self.cleaning.is_none() && !self.epochs.is_empty() {
            // A snapshot keeps what was given up: cleaning would only use up what is left.
            return Ok(());
        }
        if self.cleaning.is_none() && !self.choose()? {
            // What was emptied is free after a checkpoint.
            if self.segments.has_empty() && self.counting.is_none() && self.checkpoint.is_none() {
                self.begin_checkpoint()?;
            }
            return Ok(());
        }
        let Some(cleaning) = &self.cleaning else { return Ok(()) };
        let len = u64::from(self.superblock.geometry.segment_bytes);
        // One byte is freed for each that is written where an eighth of what should be
        // free is missing; the more is missing the more.
        let low = self.low() as u64;
        let missing = low.saturating_sub((free + coming) as u64);
        let haste = (missing * 64 * 8 / low).clamp(8, 4 * 64);
        let spent = bytes * self.spent_64ths / 64;
        self.cleaning_debt += spent * len / cleaning.dead * haste / 64;
        // No caller pays for many at once.
        let mut left = (bytes * 16).max(CLEANED_AT_ONCE);
        let mut waits = bytes / 8192 + 1 + self.cleaning_debt / (OWED_MAX * 4);
        while self.cleaning_debt > 0
            && left > 0
            && let Some(cleaning) = &self.cleaning
            && self.segments.free() > self.floor()
        {
            let start = self.superblock.geometry.start_of(cleaning.segment);
            if cleaning.waits(start) {
                if self.cleaning_debt < OWED_MAX || waits == 0 {
                    break;
                }
                waits -= 1;
            }
            let done = self.clean_step()?;
            self.cleaning_debt = self.cleaning_debt.saturating_sub(done);
            left = left.saturating_sub(done);
        }
        Ok(())
    }

    /// Whether what is left in a segment only waits for a checkpoint.
    fn is_cleaned(&self, segment: u32) -> bool {
        let written = self.checkpoint.as_ref().map(|written| &written.cleaned);
        [Some(&self.cleaned_since), Some(&self.cleaned_before), written]
            .into_iter()
            .flatten()
            .any(|cleaned| cleaned.contains(&segment))
    }

    /// The segment that is worth most, if one is worth anything: of all, or without those of
    /// the index that still have much of it.
    fn best(&self, all: bool) -> Option<u32> {
        let len = u64::from(self.superblock.geometry.segment_bytes);
        let worth = |(number, segment): (u32, &crate::segment::Segment)| {
            let used = segment.held() as u64;
            let is_candidate = segment.state == State::Closed
                && number < self.segments.end
                && !segment.is_bad
                && segment.live > 0
                && (all || !segment.is_index || used < len / 16)
                && !self.is_cleaned(number);
            let age = self.clock.saturating_sub(segment.closed).max(1);
            (is_candidate && used < len - len / 64)
                .then(|| (self.layout.worth(used, len, age), number))
        };
        let worths = (0..).zip(&self.segments.all).filter_map(worth);
        Some(worths.max_by(|(a, _), (b, _)| a.total_cmp(b))?.1)
    }

    /// Chooses the segment that is worth most; says whether one is worth anything.
    pub fn choose(&mut self) -> Result<bool> {
        // A merge takes one leaf after the other, as they were written: it empties their
        // segments by itself, and the one that it has half emptied would look best.
        let all = self.merging.is_none() || self.segments.free() <= self.kept();
        let best = self.best(all).or_else(|| self.best(true));
        let Some(number) = best else { return Ok(false) };
        self.begin_cleaning(number)?;
        Ok(true)
    }

    /// Begins to clean a segment.
    pub fn begin_cleaning(&mut self, number: u32) -> Result<()> {
        let len = u64::from(self.superblock.geometry.segment_bytes);
        let segment = self.segments.all[number as usize];
        if segment.last_seq == self.batch.seq {
            // Its last frames are not even given to the disk.
            self.commit()?;
        }
        if segment.last_seq > self.durable
            && let Some(ticket) = self.last_disk
        {
            self.io.disk.settle(ticket)?;
        }
        let live = segment.held() as u64;
        // Where little is alive the cleaner jumps; what it passes over is not read.
        let is_dense = live * self.layout.jumps_from() > u64::from(segment.used);
        let depth = if is_dense { self.layout.reads_ahead() } else { 0 };
        let start = self.superblock.geometry.start_of(number);
        let window = self.layout.read_bytes();
        self.cleaning = Some(Cleaning {
            segment: number,
            reading: Reading::new(&self.io, start, segment.used, window, depth),
            is_whole: is_dense && window >= self.layout.frame_bytes(),
            table: None,
            pos: 0,
            used: segment.used,
            dead: len.saturating_sub(live).max(len / 32),
            stamp: segment.stamp,
            candidates: vec![],
        });
        Ok(())
    }

    /// Looks at the next thing in the segment; how many bytes of it that were.
    pub fn clean_step(&mut self) -> Result<u64> {
        let Some(mut cleaning) = self.cleaning.take() else { return Ok(0) };
        if cleaning.candidates.is_empty() && cleaning.pos >= cleaning.used {
            self.cleaned_since.insert(cleaning.segment);
            self.counters.cleaned += 1;
            return Ok(64);
        }
        let start = self.superblock.geometry.start_of(cleaning.segment);
        let done = match cleaning.candidates.pop() {
            Some(candidate) => {
                self.move_candidate(&mut cleaning, start, &candidate).map(|is_done| {
                    if is_done {
                        return candidate.len();
                    }
                    cleaning.candidates.push(candidate);
                    64
                })
            }
            None => self.next_frame(&mut cleaning, start),
        };
        match done {
            Ok(bytes) => {
                self.cleaning = Some(cleaning);
                Ok(bytes)
            }
            Err(Error::Corrupt { what, at_bytes }) => {
                self.leave(cleaning.segment, what, at_bytes);
                Ok(64)
            }
            Err(error) => Err(error),
        }
    }

    fn leave(&mut self, segment: u32, what: &str, at: u64) {
        log::warn!("segment {segment} is left as it is: {what} at byte {at}");
        self.segments.set(segment, |segment| segment.is_bad = true);
    }

    /// Reads what is in the next frame; how many bytes of it are nothing that can be alive.
    fn next_frame(&mut self, cleaning: &mut Cleaning, start: u64) -> Result<u64> {
        let page = self.superblock.geometry.page_bytes as usize;
        let pos = cleaning.pos;
        let at = start + u64::from(pos);
        let room = (cleaning.used - pos) as usize;
        let gone = Error::Corrupt { what: "a frame", at_bytes: at };
        if !cleaning.reading.want(&self.io, pos, page.min(room)) {
            return Ok(64);
        }
        let first = cleaning.reading.get(&self.io, pos, page.min(room))?;
        let header = Header::peek(first, at, self.tag, room as u64).ok_or(gone.clone())?;
        let first = first[..HEADER].to_vec();
        if cleaning.is_whole {
            if !cleaning.reading.want(&self.io, pos, header.len as usize) {
                return Ok(64);
            }
            cleaning.reading.get(&self.io, pos, header.len as usize)?;
        }
        let (table_at, table_len) = (pos + header.table_at, header.table_len as usize);
        // The table of a long frame is behind its payloads, which are read as they are needed.
        let from = start + u64::from(table_at) / page as u64 * page as u64;
        let skip = (start + u64::from(table_at) - from) as usize;
        let far = Extent::new(from, (skip + table_len).next_multiple_of(page) as u64);
        let table = match cleaning.table.take() {
            Some(read) => {
                let bytes = match read.wait() {
                    Some(Ok(block)) => block.into_private(),
                    // Once more, for an error that says it all.
                    _ => self.io.direct(from, far.len_bytes as usize)?,
                };
                bytes[skip..skip + table_len].to_vec()
            }
            None if cleaning.reading.holds(table_at, table_len) => {
                cleaning.reading.get(&self.io, table_at, table_len)?.to_vec()
            }
            None => {
                let into = Private::unset(far.len_bytes as usize).into();
                cleaning.table = Some(self.io.disk.read(far, into, Urgency::Ahead));
                return Ok(64);
            }
        };
        if !header.is_whole(&first, &table, self.io.summer) {
            return Err(gone);
        }
        let mut in_items = 0;
        for item in Items::new(&table, header.at, header.table_at) {
            let candidate = match item? {
                Item::Pair(_, key, Entry::Data(data)) => Candidate::Payload(key, data),
                Item::Pair(..) => continue,
                Item::Node { at, len } => Candidate::Node { at, len },
                Item::Chunk { at, len } => Candidate::Chunk { at, len },
            };
            in_items += candidate.len();
            cleaning.candidates.push(candidate);
        }
        cleaning.candidates.reverse();
        cleaning.pos += header.len;
        Ok(u64::from(header.len).saturating_sub(in_items) + 64)
    }

    /// Moves what is alive of a candidate; says whether it was, or must be read first.
    fn move_candidate(
        &mut self,
        cleaning: &mut Cleaning,
        start: u64,
        candidate: &Candidate,
    ) -> Result<bool> {
        let place = |at: u64| {
            let gone = Error::Corrupt { what: "an item outside of its segment", at_bytes: at };
            at.checked_sub(start).and_then(|at| u32::try_from(at).ok()).ok_or(gone)
        };
        match candidate {
            Candidate::Payload(key, stored) => {
                let parts = live_parts(&self.index(), &*self.io, key, stored, &mut None)?;
                // At once: parts that are asked for one by one drive each other out for ever.
                if let (Some((_, first)), Some((_, last))) = (parts.first(), parts.last()) {
                    let (from, to) = (place(first.at)?, place(last.end())?);
                    let len = to.saturating_sub(from) as usize;
                    if !cleaning.reading.want(&self.io, from, len) {
                        return Ok(false);
                    }
                }
                for (key, part) in parts {
                    let stamp = cleaning.stamp;
                    let bytes =
                        cleaning.reading.get(&self.io, place(part.at)?, part.stored as usize)?;
                    self.io.verify(&part, bytes)?;
                    let alive = &bytes[part.skip as usize..][..part.len as usize];
                    let kind = Kind::Moved { age: self.clock.saturating_sub(stamp) };
                    self.counters.moved_bytes += u64::from(part.len);
                    self.payload(key, alive, kind, Some(stamp))?;
                }
            }
            Candidate::Node { at, len } => {
                if !cleaning.reading.want(&self.io, place(*at)?, *len as usize) {
                    return Ok(false);
                }
                let bytes = cleaning.reading.get(&self.io, place(*at)?, *len as usize)?;
                let node = Node::decode(bytes, *at)?;
                let (key, level) = (Key::from_slice(node.first_key()), node.level());
                let mut tree = std::mem::take(&mut self.tree);
                let moved = tree.move_node(self, &key, level, *at);
                self.tree = tree;
                if moved? {
                    self.refresh();
                }
            }
            Candidate::Chunk { at, .. } => self.move_chunk(*at)?,
        }
        Ok(true)
    }

    fn move_chunk(&mut self, at: u64) -> Result<()> {
        let Some(old) = self.chunks_mut().find(|ptr| ptr.at == at).copied() else {
            return Ok(());
        };
        let bytes = self.io.read_ptr(old)?;
        let new: Ptr = self.store(&bytes, false)?;
        self.segments.kill(old.at, old.len, false);
        self.chunks_mut().filter(|ptr| **ptr == old).for_each(|ptr| *ptr = new);
        Ok(())
    }

    /// The chunks of all runs, and of those that are being written.
    fn chunks_mut(&mut self) -> impl Iterator<Item = &mut Ptr> {
        let counting = self.counting.iter_mut().flat_map(|counting| &mut counting.chunks.stored);
        let folding = self.folding.iter_mut().filter_map(|folding| folding.chunks.as_mut());
        let runs = self.runs.iter_mut().flat_map(|run| &mut run.chunks);
        runs.chain(counting).chain(folding.flat_map(|chunks| &mut chunks.stored))
    }
}
