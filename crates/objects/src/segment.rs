//! Which segments are in use, and how much of each is alive.
//!
//! ```text
//!   free ──taken──▶ open ──full──▶ closed ──nothing alive──▶ emptied ──checkpoint──▶ free
//! ```
//!
//! Law 1: alive is what index, tree, runs and checkpoint lead to. It is added when it is
//! written and taken away once, when what led to it goes.
//! Law 2: a checkpoint saves the counts without what the log behind it adds: replaying adds
//! that again (`since`).

use std::collections::BTreeSet;

use crate::codec::{Reader, put_varint};
use crate::superblock::Geometry;
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
pub(crate) struct Segments {
    pub geometry: Geometry,
    pub all: Vec<Segment>,
    free: BTreeSet<u32>,
    /// Sum of `live`.
    pub live: i64,
}

impl Segments {
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            all: vec![FREE; geometry.segments as usize],
            free: (0..geometry.segments).collect(),
            live: 0,
        }
    }

    pub fn free(&self) -> usize {
        self.free.len()
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

    /// Takes this segment.
    pub fn open(&mut self, segment: u32) {
        self.free.remove(&segment);
        self.all[segment as usize] = Segment { state: State::Open, ..FREE };
    }

    /// What was found in use is in use.
    pub fn reopen(&mut self, segment: u32) {
        self.free.remove(&segment);
        self.all[segment as usize].state = State::Open;
    }

    pub fn close(&mut self, segment: u32, clock: u64) {
        self.all[segment as usize].state = State::Closed;
        self.all[segment as usize].closed = clock;
    }

    pub fn release(&mut self, segment: u32) {
        self.all[segment as usize] = FREE;
        self.free.insert(segment);
    }

    fn of(&mut self, at: u64) -> Option<&mut Segment> {
        let segment = self.geometry.segment_of(at)?;
        self.all.get_mut(segment as usize)
    }

    /// Something leads to `len` bytes at `at` now, which were written when the clock was at
    /// `stamp`.
    pub fn add(&mut self, at: u64, len: u32, stamp: u64, is_log: bool) {
        self.live += i64::from(len);
        if let Some(segment) = self.of(at) {
            segment.live += i64::from(len);
            if is_log {
                segment.since += i64::from(len);
            }
            let (old, new) = (segment.stamped, u64::from(len));
            let sum =
                u128::from(segment.stamp) * u128::from(old) + u128::from(stamp) * u128::from(new);
            segment.stamped = old + new;
            segment.stamp = (sum / u128::from(segment.stamped.max(1))) as u64;
        }
    }

    /// Nothing leads to these bytes any more.
    pub fn kill(&mut self, at: u64, len: u32, is_log: bool) {
        self.live -= i64::from(len);
        if let Some(segment) = self.of(at) {
            segment.live -= i64::from(len);
            if is_log {
                segment.since -= i64::from(len);
            }
            // Of our own tests: a crafted store may say what it likes.
            debug_assert!(
                !cfg!(feature = "torture")
                    || segment.live >= 0
                    || crate::hooks::is_left_out(crate::hooks::Omission::NodeSum),
                "killed twice at {at}"
            );
        }
    }

    /// When what is at `at` was written, about.
    pub fn stamp_of(&self, at: u64) -> u64 {
        let segment = self.geometry.segment_of(at);
        segment.map_or(0, |segment| self.all[segment as usize].stamp)
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

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.all.len() * 8);
        for segment in &self.all {
            let is_used = !matches!(segment.state, State::Free | State::Emptied);
            let flags = [is_used, segment.is_bad, segment.is_index];
            out.push((0..).zip(flags).map(|(bit, flag)| u8::from(flag) << bit).sum());
            if is_used {
                put_varint(&mut out, (segment.live - segment.since).max(0) as u64);
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
            table.live += live as i64;
            table.all[number as usize] = Segment {
                state: State::Closed,
                live: live as i64,
                stamp,
                stamped,
                used,
                is_bad: flags & 2 != 0,
                is_index: flags & 4 != 0,
                ..FREE
            };
        }
        Ok(table)
    }
}
