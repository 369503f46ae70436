//! Which segments are in use, and how much of each is alive.
//!
//! ```text
//!   free ──taken──▶ open ──full──▶ closed ──nothing alive──▶ emptied ──checkpoint──▶ free
//! ```
//!
//! Law 1: alive is what index, tree, runs and checkpoint lead to. It is added when it is
//! written and taken away once, when what led to it goes.
//! Law 2: a checkpoint saves what it leads to itself, byte for byte, as `check` counts it:
//! without what the log behind it adds, which replaying adds again (`since`), and without what
//! is written for later and nothing leads to yet (a run on its way).

use std::collections::{BTreeMap, BTreeSet};

use crate::codec::{Reader, put_varint, to_u32_saturating};
use crate::entry::PayloadRef;
use crate::index::tree::BlockPtr;
use crate::recovery::superblock::Geometry;
use crate::{Error, Result};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Free,
    Open,
    Closed,
    /// Waits until a checkpoint does without it.
    Emptied,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub state: State,
    /// Bytes that something leads to.
    pub live: i64,
    /// Changes of `live` by the log since the last checkpoint began.
    since: i64,
    /// The clock when its bytes were written, on average; the cleaner's copies keep theirs.
    pub stamp: u64,
    stamped: u64,
    /// The clock when it was full.
    pub closed: u64,
    /// Bytes in frames.
    pub used: u32,
    /// The last commit that wrote into it.
    pub last_seq: u64,
    /// Cannot be cleaned: something in it is damaged.
    pub is_bad: bool,
    /// Nodes and runs lie in it, by themselves.
    pub is_index: bool,
}

const FREE: Segment = Segment {
    state: State::Free,
    live: 0,
    since: 0,
    stamp: 0,
    stamped: 0,
    closed: 0,
    used: 0,
    last_seq: 0,
    is_bad: false,
    is_index: false,
};

/// The table of all segments.
#[derive(Clone, Debug)]
pub(crate) struct SegmentTable {
    pub geometry: Geometry,
    pub all: Vec<Segment>,
    free: BTreeSet<u32>,
    /// Segments from here on are to be given up: they are not taken.
    pub end: u32,
    /// Sum of what all of them hold.
    held: i64,
}

impl Segment {
    /// Bytes that cleaning would have to write again: what is alive, and its share of headers,
    /// tables and gaps. Of short values those are most of it.
    pub fn held(&self) -> i64 {
        let is_full = self.state == State::Closed && self.stamped > 0;
        if !is_full || u64::from(self.used) <= self.stamped {
            return self.live.max(0);
        }
        let of_used = self.live.max(0).saturating_mul(i64::from(self.used));
        let stamped = i64::try_from(self.stamped).unwrap_or(i64::MAX);
        of_used.checked_div(stamped).unwrap_or(0).min(i64::from(self.used))
    }
}

impl SegmentTable {
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            all: vec![FREE; geometry.segments as usize],
            free: (0..geometry.segments).collect(),
            end: geometry.segments,
            held: 0,
        }
    }

    /// Bytes that all segments hold; see [`Segment::held`].
    pub fn held(&self) -> u64 {
        self.held.max(0).unsigned_abs()
    }

    /// Bytes that something leads to.
    pub fn live(&self) -> u64 {
        self.all.iter().map(|segment| segment.live.max(0).unsigned_abs()).sum()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// How many before `end` are free.
    pub fn free_below(&self, end: u32) -> usize {
        self.free.range(..end).count()
    }

    /// Takes a free segment, if possible right behind `near`.
    pub fn take(&mut self, near: u32) -> Option<u32> {
        let segment = self.free.range(near..).next().or(self.free.first()).copied()?;
        self.open(segment);
        Some(segment)
    }

    /// Free segments in the order in which they are taken after `segment`.
    pub fn free_behind(&self, segment: u32) -> impl Iterator<Item = u32> {
        self.free.range(segment..).chain(self.free.range(..segment)).copied()
    }

    /// Leaves no segment from `end` on to be taken.
    pub fn withhold(&mut self, end: u32) {
        self.end = end;
        drop(self.free.split_off(&end));
    }

    /// There are so many segments now; those that are new are not to be taken yet.
    pub fn resize(&mut self, geometry: Geometry) {
        self.geometry = geometry;
        self.all.resize(geometry.segments as usize, FREE);
    }

    /// Takes this segment.
    pub fn open(&mut self, segment: u32) {
        self.free.remove(&segment);
        self.set(segment, |it| *it = Segment { state: State::Open, ..FREE });
    }

    /// What was found in use is in use.
    pub fn reopen(&mut self, segment: u32) {
        self.free.remove(&segment);
        self.set(segment, |it| it.state = State::Open);
    }

    pub fn close(&mut self, segment: u32, clock: u64) {
        self.set(segment, |it| {
            it.state = State::Closed;
            it.closed = clock;
        });
    }

    pub fn release(&mut self, segment: u32) {
        self.set(segment, |it| *it = FREE);
        if segment < self.end {
            self.free.insert(segment);
        }
    }

    /// Changes a segment, and what all hold with it.
    pub fn set(&mut self, segment: u32, change: impl FnOnce(&mut Segment)) {
        if let Some(segment) = self.all.get_mut(segment as usize) {
            let before = segment.held();
            change(segment);
            self.held = self.held.saturating_add(segment.held()).saturating_sub(before);
        }
    }

    /// The same of the segment that has this byte.
    fn set_at(&mut self, at: u64, change: impl FnOnce(&mut Segment)) {
        if let Some(segment) = self.geometry.segment_of(at) {
            self.set(segment, change);
        }
    }

    /// Something leads to `len` bytes at `at` now, which were written when the clock was at
    /// `stamp`.
    pub fn add_live(&mut self, at: u64, len: u32, stamp: u64, is_log: bool) {
        self.set_at(at, |segment| {
            segment.live = segment.live.saturating_add(i64::from(len));
            if is_log {
                segment.since = segment.since.saturating_add(i64::from(len));
            }
            let (old, new) = (segment.stamped, u64::from(len));
            let sum = weighted(segment.stamp, old).saturating_add(weighted(stamp, new));
            segment.stamped = old.saturating_add(new);
            let mean = sum.checked_div(u128::from(segment.stamped)).unwrap_or(0);
            segment.stamp = u64::try_from(mean).unwrap_or(u64::MAX);
        });
    }

    /// Nothing leads to these bytes any more.
    pub fn sub_live(&mut self, at: u64, len: u32, is_log: bool) {
        self.set_at(at, |segment| {
            segment.live = segment.live.saturating_sub(i64::from(len));
            if is_log {
                segment.since = segment.since.saturating_sub(i64::from(len));
            }
            // Of our own tests: a crafted store may say what it likes.
            debug_assert!(
                !cfg!(feature = "torture")
                    || segment.live >= 0
                    || crate::test_hooks::is_fault_injected(
                        crate::test_hooks::InjectedFault::NodeSum
                    ),
                "killed twice at {at}"
            );
        });
    }

    /// Nothing leads to what this entry's data shows any more.
    pub fn kill_data(&mut self, data: &PayloadRef, is_log: bool) {
        self.sub_live(data.at.saturating_add(u64::from(data.skip)), data.len, is_log);
    }

    /// When what is at `at` was written, about.
    pub fn stamp_of(&self, at: u64) -> u64 {
        let segment = self.geometry.segment_of(at);
        segment.and_then(|segment| self.all.get(segment as usize)).map_or(0, |it| it.stamp)
    }

    /// A checkpoint begins: from now on the log counts for the next.
    pub fn begin(&mut self) {
        self.all.iter_mut().for_each(|segment| segment.since = 0);
    }

    /// Segments that nothing leads to and that no log behind `seq` is in.
    pub fn empty(&mut self, seq: u64) -> Vec<u32> {
        let mut emptied = vec![];
        for (number, segment) in (0..).zip(&mut self.all) {
            if segment.state == State::Closed && segment.live == 0 && segment.last_seq <= seq {
                segment.state = State::Emptied;
                emptied.push(number);
            }
        }
        emptied
    }

    /// Whether a checkpoint would free segments.
    pub fn has_empty(&self) -> bool {
        self.all.iter().any(|segment| segment.state == State::Closed && segment.live == 0)
    }

    /// The table as of a checkpoint that does not lead to `unled`.
    pub fn encode(&self, unled: &[BlockPtr]) -> Vec<u8> {
        let mut unled_bytes: BTreeMap<u32, i64> = BTreeMap::new();
        for ptr in unled {
            if let Some(segment) = self.geometry.segment_of(ptr.at) {
                let bytes = unled_bytes.entry(segment).or_default();
                *bytes = bytes.saturating_add(i64::from(ptr.len));
            }
        }
        let mut out = Vec::with_capacity(self.all.len().saturating_mul(8));
        for (number, segment) in (0..).zip(&self.all) {
            let later =
                unled_bytes.get(&number).copied().unwrap_or(0).saturating_add(segment.since);
            let is_used = !matches!(segment.state, State::Free | State::Emptied);
            let flags = [is_used, segment.is_bad, segment.is_index];
            out.push((0..).zip(flags).map(|(bit, flag)| u8::from(flag) << bit).sum());
            if is_used {
                put_varint(&mut out, segment.live.saturating_sub(later).max(0).unsigned_abs());
                put_varint(&mut out, segment.stamp);
                put_varint(&mut out, segment.stamped);
                put_varint(&mut out, u64::from(segment.used));
            }
        }
        out
    }

    /// Reads a table; all that is used is closed.
    pub fn decode(geometry: Geometry, bytes: &[u8], at: u64) -> Result<Self> {
        let mut table = Self::new(geometry);
        let mut reader = Reader::new(bytes, at);
        for number in 0..geometry.segments {
            let flags = reader.u8()?;
            if flags & 1 == 0 {
                continue;
            }
            let live = reader.varint()?;
            let (stamp, stamped) = (reader.varint()?, reader.varint()?);
            let used = reader.varint_u32()?;
            if live > u64::from(geometry.segment_bytes) || used > geometry.segment_bytes {
                return Err(Error::Corrupt { what: "a segment's counts", at_bytes: at });
            }
            table.free.remove(&number);
            let live = i64::from(to_u32_saturating(live));
            table.set(number, |segment| {
                *segment = Segment {
                    state: State::Closed,
                    live,
                    stamp,
                    stamped,
                    used,
                    is_bad: flags & 2 != 0,
                    is_index: flags & 4 != 0,
                    ..FREE
                };
            });
        }
        Ok(table)
    }
}

/// A stamp, as often as it counts.
fn weighted(stamp: u64, count: u64) -> u128 {
    u128::from(stamp).saturating_mul(u128::from(count))
}
