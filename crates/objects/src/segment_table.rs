//! Segment table: state and live bytes of each segment.
//!
//! ```text
//!   free ──taken──▶ open ──full──▶ closed ──nothing alive──▶ emptied ──checkpoint──▶ free
//! ```
//!
//! Law 1: live bytes are those that index, tree, runs and checkpoint refer to. They are added when
//! written and subtracted once, when their reference goes.
//! Law 2: a checkpoint stores the live bytes that it refers to itself, as `check` counts them. It
//! excludes those of the log after it, which replay adds again (`since`), and those of runs still
//! being written, which nothing refers to yet.

use std::collections::{BTreeMap, BTreeSet};

use crate::codec::{Reader, put_varint, to_u32_saturating};
use crate::entry::PayloadRef;
use crate::index::tree::BlockPtr;
use crate::superblock::Geometry;
use crate::{Error, Result};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SegmentState {
    Free,
    Open,
    Closed,
    /// Waits for a checkpoint that does not need it.
    Emptied,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub state: SegmentState,
    /// Live bytes.
    pub live: i64,
    /// Change of `live` by the log since the last checkpoint began.
    since: i64,
    /// Average clock of the writes of its bytes; the cleaner's copies keep theirs.
    pub stamp: u64,
    stamped: u64,
    /// Clock when it was full.
    pub closed: u64,
    /// Bytes of its frames.
    pub used: u32,
    /// Last commit that wrote to it.
    pub last_seq: u64,
    /// True if damage prevents cleaning.
    pub is_bad: bool,
    /// True if it has only nodes and runs.
    pub is_index: bool,
}

const FREE_SEGMENT: Segment = Segment {
    state: SegmentState::Free,
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

/// Table of all segments.
#[derive(Clone, Debug)]
pub(crate) struct SegmentTable {
    pub geometry: Geometry,
    pub all: Vec<Segment>,
    free: BTreeSet<u32>,
    /// Segments from here on will be removed and are not opened.
    pub end: u32,
    /// Sum of [`Segment::rewrite_bytes`] over all.
    held: i64,
}

impl Segment {
    /// Returns the bytes that cleaning would write again: live bytes, with their share of headers,
    /// summaries and gaps, which dominate for short values.
    pub fn rewrite_bytes(&self) -> u64 {
        let (live, used) = (self.live.max(0).unsigned_abs(), u64::from(self.used));
        let is_full = self.state == SegmentState::Closed && self.stamped > 0;
        if !is_full || used <= self.stamped {
            return live;
        }
        live.saturating_mul(used).checked_div(self.stamped).unwrap_or(0).min(used)
    }
}

impl SegmentTable {
    pub fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            all: vec![FREE_SEGMENT; geometry.segments as usize],
            free: (0..geometry.segments).collect(),
            end: geometry.segments,
            held: 0,
        }
    }

    /// Returns the bytes held by all segments; see [`Segment::rewrite_bytes`].
    pub fn total_rewrite_bytes(&self) -> u64 {
        self.held.max(0).unsigned_abs()
    }

    /// Returns all live bytes.
    pub fn total_live_bytes(&self) -> u64 {
        self.all.iter().map(|segment| segment.live.max(0).unsigned_abs()).sum()
    }

    pub fn free_segments(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of free segments before `end`.
    pub fn count_free_below(&self, end: u32) -> usize {
        self.free.range(..end).count()
    }

    /// Opens a free segment, if possible the next one after `near`.
    pub fn open_free_segment(&mut self, near: u32) -> Option<u32> {
        let segment = self.free.range(near..).next().or(self.free.first()).copied()?;
        self.open(segment);
        Some(segment)
    }

    /// Returns the free segments in the order in which they are opened after `segment`.
    pub fn free_segments_after(&self, segment: u32) -> impl Iterator<Item = u32> {
        self.free.range(segment..).chain(self.free.range(..segment)).copied()
    }

    /// Prevents segments from `end` on from being opened.
    pub fn exclude_from(&mut self, end: u32) {
        self.end = end;
        drop(self.free.split_off(&end));
    }

    /// Sets the number of segments; new ones are not free yet.
    pub fn resize(&mut self, geometry: Geometry) {
        self.geometry = geometry;
        self.all.resize(geometry.segments as usize, FREE_SEGMENT);
    }

    /// Opens this segment.
    pub fn open(&mut self, segment: u32) {
        self.free.remove(&segment);
        self.update_segment(segment, |it| {
            *it = Segment { state: SegmentState::Open, ..FREE_SEGMENT }
        });
    }

    /// Opens a segment that was found in use.
    pub fn reopen(&mut self, segment: u32) {
        self.free.remove(&segment);
        self.update_segment(segment, |it| it.state = SegmentState::Open);
    }

    pub fn close(&mut self, segment: u32, clock: u64) {
        self.update_segment(segment, |it| {
            it.state = SegmentState::Closed;
            it.closed = clock;
        });
    }

    pub fn release_segment(&mut self, segment: u32) {
        self.update_segment(segment, |it| *it = FREE_SEGMENT);
        if segment < self.end {
            self.free.insert(segment);
        }
    }

    /// Changes a segment, and the held bytes of all.
    pub fn update_segment(&mut self, segment: u32, change: impl FnOnce(&mut Segment)) {
        if let Some(segment) = self.all.get_mut(segment as usize) {
            let before = segment.rewrite_bytes();
            change(segment);
            let held = self.held.saturating_add_unsigned(segment.rewrite_bytes());
            self.held = held.saturating_sub_unsigned(before);
        }
    }

    /// The same for the segment of an address.
    fn update_segment_at(&mut self, at: u64, change: impl FnOnce(&mut Segment)) {
        if let Some(segment) = self.geometry.segment_of(at) {
            self.update_segment(segment, change);
        }
    }

    /// Adds `len` live bytes at `at`, first written when the clock was at `stamp`.
    pub fn add_live(&mut self, at: u64, len: u32, stamp: u64, is_log: bool) {
        self.update_segment_at(at, |segment| {
            segment.live = segment.live.saturating_add(i64::from(len));
            if is_log {
                segment.since = segment.since.saturating_add(i64::from(len));
            }
            let (old, new) = (segment.stamped, u64::from(len));
            let sum = weight_clock(segment.stamp, old).saturating_add(weight_clock(stamp, new));
            segment.stamped = old.saturating_add(new);
            let mean = sum.checked_div(u128::from(segment.stamped)).unwrap_or(0);
            segment.stamp = u64::try_from(mean).unwrap_or(u64::MAX);
        });
    }

    /// Subtracts dead bytes.
    pub fn sub_live(&mut self, at: u64, len: u32, is_log: bool) {
        self.update_segment_at(at, |segment| {
            segment.live = segment.live.saturating_sub(i64::from(len));
            if is_log {
                segment.since = segment.since.saturating_sub(i64::from(len));
            }
            // In tests only: a crafted store may have any counts.
            debug_assert!(
                !cfg!(feature = "test-hooks")
                    || segment.live >= 0
                    || crate::test_hooks::is_fault_injected(
                        crate::test_hooks::InjectedFault::NodeSum
                    ),
                "killed twice at {at}"
            );
        });
    }

    /// Subtracts the bytes of a dead payload.
    pub fn sub_live_payload(&mut self, data: &PayloadRef, is_log: bool) {
        self.sub_live(data.at.saturating_add(u64::from(data.skip)), data.len, is_log);
    }

    /// Returns the approximate clock of the write of the bytes at `at`.
    pub fn approximate_clock_at(&self, at: u64) -> u64 {
        let segment = self.geometry.segment_of(at);
        segment.and_then(|segment| self.all.get(segment as usize)).map_or(0, |it| it.stamp)
    }

    /// Begins a checkpoint: later changes of the log count for the next one.
    pub fn begin_checkpoint(&mut self) {
        self.all.iter_mut().for_each(|segment| segment.since = 0);
    }

    /// Marks segments without live bytes or log after `seq` as emptied; returns them.
    pub fn mark_emptied(&mut self, seq: u64) -> Vec<u32> {
        let mut emptied = vec![];
        for (number, segment) in (0..).zip(&mut self.all) {
            if segment.state == SegmentState::Closed && segment.live == 0 && segment.last_seq <= seq
            {
                segment.state = SegmentState::Emptied;
                emptied.push(number);
            }
        }
        emptied
    }

    /// Returns true if a checkpoint would free segments.
    pub fn has_empty(&self) -> bool {
        self.all.iter().any(|segment| segment.state == SegmentState::Closed && segment.live == 0)
    }

    /// Encodes the table for a checkpoint that does not refer to `unled`.
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
            let is_used = !matches!(segment.state, SegmentState::Free | SegmentState::Emptied);
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

    /// Decodes a table; used segments are closed.
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
            table.update_segment(number, |segment| {
                *segment = Segment {
                    state: SegmentState::Closed,
                    live,
                    stamp,
                    stamped,
                    used,
                    is_bad: flags & 2 != 0,
                    is_index: flags & 4 != 0,
                    ..FREE_SEGMENT
                };
            });
        }
        match reader.is_done() {
            true => Ok(table),
            false => Err(reader.corrupt("a table of other segments")),
        }
    }
}

/// Weights a clock value by its bytes.
fn weight_clock(stamp: u64, count: u64) -> u128 {
    u128::from(stamp).saturating_mul(u128::from(count))
}
