//! Timing model of a hard disk.
//!
//! ```text
//!   read ──▶ in the cache? ──▶ done
//!            │ no                        next = shortest access time
//!            ▼                     ┌──────────────▼─────────────┐
//!          queue ─────────────────▶│ seek ─ turn ─ transfer     │─▶ done, reads on
//!   write ─▶ cache ─▶ done         │ one request at a time      │
//!              └─ runs, by flush ─▶└────────────────────────────┘
//! ```
//!
//! An idle head reads on after the last read, and caches the bytes it passes. Reads precede the
//! cached writes, unless the cache is nearly full or a flush has a waiter: then the request nearest
//! in time is next. Writes before a flush reach the platters before later ones.
//!
//! Law 1: the platters turn at all times: the position of a byte follows from the time alone.
//! Law 2: a flush is complete once all writes cached at its arrival are on the platters.

mod cache;
mod geometry;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use self::cache::{DirtyRuns, ReadCache};
use self::geometry::{Geometry, PhysicalPosition};
use super::{Completion, DeviceModel, DeviceTiming, RequestKind, SimRequest, WorkCounters};
use draconis_device::Extent;
use draconis_device::Random;

/// Parameters of a hard disk.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HddParameters {
    /// Length in bytes; rounded down to 4096.
    pub len_bytes: u64,
    /// Rotations per minute.
    pub turns_per_minute: u32,
    /// Number of surfaces, each with a head.
    pub heads: u32,
    /// Bytes of the outermost track.
    pub outer_track_bytes: u64,
    /// Bytes of the innermost track.
    pub inner_track_bytes: u64,
    /// Time to switch to the next head, in ns.
    pub head_switch_ns: u64,
    /// Time to move to the next cylinder, in ns.
    pub track_to_track_ns: u64,
    /// Fraction of the full stroke from which a seek is long.
    pub long_seek: f64,
    /// A short seek over the fraction `d` of the stroke takes `.0 + .1 * sqrt(d)` ns.
    pub short_seek_ns: (f64, f64),
    /// A long seek takes `.0 + .1 * d` ns.
    pub long_seek_ns: (f64, f64),
    /// Extra settle time of a write, in ns.
    pub write_settle_ns: u64,
    /// Overhead of each command, in ns.
    pub command_ns: u64,
    /// Bandwidth between host and disk, in bytes a second.
    pub link_bytes_per_s: u64,
    /// Read-ahead of an idle head, in bytes.
    pub read_ahead_bytes: u64,
    /// Size of the write cache in bytes.
    pub cache_bytes: u64,
    /// True if writes complete in the cache.
    pub volatile_cache: bool,
    /// Seed of the initial angle of the platters.
    pub seed: u64,
}

/// Maximum requests in the disk: the queue depth of NCQ.
const NCQ_QUEUE_DEPTH: usize = 32;
/// Maximum bytes that are destaged in one operation.
const MAX_DESTAGE_BYTES: u64 = 1 << 20;
/// Number of cached runs considered on each side of the head.
const MAX_NEAR_RUNS: usize = 32;
/// Waiting time after which a request is next, in ns.
const MAX_WAIT_NS: u64 = 1_000_000_000;

/// A hard disk with one arm.
#[derive(Clone, Debug)]
pub struct Hdd {
    parameters: HddParameters,
    geometry: Geometry,
    /// Position of the head: on the track of this byte, after the last one used.
    head: PhysicalPosition,
    head_byte: u64,
    busy: Option<CurrentOperation>,
    /// Read-ahead of the idle head, if in progress.
    idle_read_ahead: Option<HeadReadAhead>,
    queue: Vec<QueuedRequest>,
    /// Writes that do not fit the cache.
    overflow: VecDeque<SimRequest>,
    /// Cached writes by the flush that will cover them, the next one first; the last is open.
    dirty: VecDeque<FlushGeneration>,
    known: ReadCache,
    link_ns: u64,
    done: BinaryHeap<Reverse<Completion>>,
    work: WorkCounters,
}

#[derive(Clone, Copy, Debug)]
struct QueuedRequest {
    request: SimRequest,
    since_ns: u64,
}

/// Current operation of the mechanics.
#[derive(Clone, Copy, Debug)]
struct CurrentOperation {
    until_ns: u64,
    at: Extent,
    /// Request that it serves; `None` while destaging.
    request: Option<SimRequest>,
}

/// Read-ahead of an idle head, which is over `from` at `since_ns` and continues to `to`.
#[derive(Clone, Copy, Debug)]
struct HeadReadAhead {
    from: u64,
    to: u64,
    since_ns: u64,
}

/// Cached writes that one flush covers.
#[derive(Clone, Default, Debug)]
struct FlushGeneration {
    dirty: DirtyRuns,
    flushes: Vec<u64>,
}

/// Candidate for the next operation.
#[derive(Clone, Copy, Debug)]
enum NextOperation {
    Queued(usize),
    Run(u64),
}

impl HddParameters {
    /// Returns a 7200 rpm desktop disk of about 2012, of any length from 64 MiB. Short disks have
    /// fewer tracks of the same length; a seek takes time by its fraction of the stroke.
    pub fn desktop_7200(len_bytes: u64) -> Self {
        Self {
            len_bytes,
            turns_per_minute: 7200,
            heads: match len_bytes >> 30 {
                0..16 => 1,
                16..2048 => 2,
                _ => 4,
            },
            outer_track_bytes: 3200 * 512,
            inner_track_bytes: 1600 * 512,
            head_switch_ns: 800_000,
            track_to_track_ns: 1_000_000,
            // 8.5 ms on average over all pairs of cylinders, 20 ms from end to end.
            long_seek: 0.3,
            short_seek_ns: (0.9e6, 12.5e6),
            long_seek_ns: (2.49e6, 17.51e6),
            write_settle_ns: 1_000_000,
            command_ns: 60_000,
            link_bytes_per_s: 500_000_000,
            read_ahead_bytes: 2 << 20,
            cache_bytes: 32 << 20,
            volatile_cache: true,
            seed: 1,
        }
    }
}

impl Hdd {
    /// Creates an idle disk.
    ///
    /// # Panics
    /// If the parameters are invalid: no head, no rotation, or tracks shorter than a sector.
    pub fn new(parameters: HddParameters) -> Self {
        assert!(parameters.heads > 0 && parameters.turns_per_minute > 0, "a disk turns");
        let (outer, inner) = (parameters.outer_track_bytes, parameters.inner_track_bytes);
        assert!(outer >= inner && inner >= 4096, "a track holds something");
        let len_bytes = parameters.len_bytes - parameters.len_bytes % 4096;
        let parameters = HddParameters { len_bytes, ..parameters };
        let geometry = Geometry::new(&parameters, Random::new(parameters.seed).next_u64());
        Self {
            parameters,
            head: geometry.physical_position_of(0),
            geometry,
            head_byte: 0,
            busy: None,
            idle_read_ahead: None,
            queue: vec![],
            overflow: VecDeque::new(),
            dirty: VecDeque::from([FlushGeneration::default()]),
            known: ReadCache::default(),
            link_ns: 0,
            done: BinaryHeap::new(),
            work: WorkCounters::default(),
        }
    }

    /// Creates a 7200 rpm desktop disk.
    pub fn desktop_7200(len_bytes: u64) -> Self {
        Self::new(HddParameters::desktop_7200(len_bytes))
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &HddParameters {
        &self.parameters
    }

    fn complete(&mut self, id: u64, at_ns: u64) {
        self.done.push(Reverse(Completion { at_ns, id }));
    }

    /// Completes a request from memory once its bytes have crossed the link.
    fn complete_after_transfer(&mut self, now_ns: u64, SimRequest { id, at, .. }: SimRequest) {
        let takes_ns = at.len_bytes * 1_000_000_000 / self.parameters.link_bytes_per_s;
        self.link_ns = self.link_ns.max(now_ns) + takes_ns;
        self.complete(id, self.link_ns + self.parameters.command_ns);
    }

    fn dirty_bytes(&self) -> u64 {
        self.dirty.iter().map(|generation| generation.dirty.bytes()).sum()
    }

    fn accept_write(&mut self, now_ns: u64, request: SimRequest) {
        let full = self.dirty_bytes() + request.at.len_bytes > self.parameters.cache_bytes;
        // A request that is larger than the cache passes through it alone.
        if full && self.dirty_bytes() > 0 {
            self.overflow.push_back(request);
            return;
        }
        if let Some(open) = self.dirty.back_mut() {
            open.dirty.add(request.at);
        }
        self.complete_after_transfer(now_ns, request);
    }

    fn accept_flush(&mut self, now_ns: u64, id: u64) {
        let empties = self.busy.is_some_and(|busy| busy.request.is_none());
        if self.dirty_bytes() == 0 && !empties {
            self.complete(id, now_ns + self.parameters.command_ns);
            return;
        }
        if let Some(open) = self.dirty.back_mut() {
            open.flushes.push(id);
        }
        self.dirty.push_back(FlushGeneration::default());
    }

    /// Completes the flushes whose generation is destaged.
    fn complete_due_flushes(&mut self, now_ns: u64) {
        while self.dirty.len() > 1 && self.dirty[0].dirty.is_empty() {
            let flushes = self.dirty.pop_front().map(|out| out.flushes).unwrap_or_default();
            for id in flushes {
                self.complete(id, now_ns + self.parameters.command_ns);
            }
        }
    }

    /// Adds to the read cache the bytes that an idle head has passed.
    fn collect_read_ahead(&mut self, now_ns: u64) {
        if let Some(HeadReadAhead { from, to, since_ns }) = self.idle_read_ahead {
            let passed = self.geometry.transfer_end_byte(from, to, since_ns, now_ns.max(since_ns));
            self.known.add_range(from, passed);
        }
    }

    /// Answers requests from memory.
    fn answer_cached(&mut self, now_ns: u64) {
        self.collect_read_ahead(now_ns);
        let mut nth = 0;
        while nth < self.queue.len() {
            let QueuedRequest { request, .. } = self.queue[nth];
            let end = request.at.start_bytes + request.at.len_bytes;
            let is_dirty = || self.dirty.iter().any(|it| it.dirty.contains_extent(request.at));
            let is_known = self.known.cached_until(request.at.start_bytes) >= end;
            if request.kind == RequestKind::Read && (is_known || is_dirty()) {
                self.queue.remove(nth);
                self.complete_after_transfer(now_ns, request);
            } else {
                nth += 1;
            }
        }
    }

    /// Returns the byte at which the mechanics would start a request.
    fn first_uncached_byte(&self, request: &SimRequest) -> u64 {
        match request.kind {
            RequestKind::Read => self.known.cached_until(request.at.start_bytes),
            _ => request.at.start_bytes,
        }
    }

    /// Returns the time at which the head can be over `byte`; without a seek if its read-ahead passes
    /// it.
    fn head_arrival_ns(&self, byte: u64, now_ns: u64, writes: bool) -> u64 {
        if let Some(HeadReadAhead { from, to, since_ns }) = self.idle_read_ahead
            && !writes
            && (from..=to).contains(&byte)
        {
            let comes_by_ns = self.geometry.transfer_end_ns(from, byte, since_ns);
            if comes_by_ns >= now_ns || byte == self.read_ahead_byte(now_ns) && byte < to {
                return comes_by_ns.max(now_ns);
            }
        }
        self.geometry.head_arrival_ns(&self.head_position_at(now_ns), byte, now_ns, writes)
    }

    /// Returns the byte that the head's read-ahead has reached.
    fn read_ahead_byte(&self, now_ns: u64) -> u64 {
        self.idle_read_ahead.map_or(self.head_byte, |on| {
            self.geometry.transfer_end_byte(on.from, on.to, on.since_ns, now_ns.max(on.since_ns))
        })
    }

    fn head_position_at(&self, now_ns: u64) -> PhysicalPosition {
        match self.idle_read_ahead {
            Some(_) => self
                .geometry
                .physical_position_of(self.read_ahead_byte(now_ns).min(self.last_byte())),
            None => self.head,
        }
    }

    fn last_byte(&self) -> u64 {
        self.parameters.len_bytes.saturating_sub(1)
    }

    /// Starts the next operation, if the mechanics are free.
    fn start_next_operation(&mut self, now_ns: u64) {
        if self.busy.is_some() {
            return;
        }
        self.answer_cached(now_ns);
        let Some(choice) = self.choose_next_operation(now_ns) else { return };
        let (at, request) = match choice {
            NextOperation::Queued(nth) => {
                let request = self.queue.remove(nth).request;
                let from = self.first_uncached_byte(&request);
                let end = request.at.start_bytes + request.at.len_bytes;
                (Extent::new(from, end - from), Some(request))
            }
            NextOperation::Run(start) => {
                let taken = self.dirty[0].dirty.take_from_run(start, MAX_DESTAGE_BYTES);
                (taken.unwrap_or(Extent::new(start, 0)), None)
            }
        };
        let writes = request.is_none_or(|request| request.kind == RequestKind::Write);
        let reached_ns = self.head_arrival_ns(at.start_bytes, now_ns, writes);
        let before = self.head_position_at(now_ns);
        if before.cylinder != self.geometry.physical_position_of(at.start_bytes).cylinder {
            self.work.seeks += 1;
        }
        let end = at.start_bytes + at.len_bytes;
        let until_ns = self.geometry.transfer_end_ns(at.start_bytes, end, reached_ns);
        self.work.busy_ns += until_ns - now_ns;
        if writes {
            self.work.programmed_bytes += at.len_bytes;
        }
        self.idle_read_ahead = None;
        self.busy = Some(CurrentOperation { until_ns, at, request });
    }

    /// Returns the candidate that the head reaches first.
    fn choose_next_operation(&self, now_ns: u64) -> Option<NextOperation> {
        let oldest = (0..self.queue.len()).min_by_key(|nth| self.queue[*nth].since_ns);
        if let Some(nth) = oldest
            && self.queue[nth].since_ns + MAX_WAIT_NS < now_ns
        {
            return Some(NextOperation::Queued(nth));
        }
        let queued = self.queue.iter().enumerate().map(|(nth, QueuedRequest { request, .. })| {
            let writes = request.kind == RequestKind::Write;
            let reached_ns =
                self.head_arrival_ns(self.first_uncached_byte(request), now_ns, writes);
            (reached_ns, NextOperation::Queued(nth))
        });
        let crowded = self.dirty_bytes() >= self.parameters.cache_bytes / 4 * 3;
        let runs = (self.queue.is_empty() || self.dirty.len() > 1 || crowded)
            .then(|| self.dirty[0].dirty.runs_near(self.head_byte, MAX_NEAR_RUNS))
            .into_iter()
            .flatten()
            .map(|start| (self.head_arrival_ns(start, now_ns, true), NextOperation::Run(start)));
        queued.chain(runs).min_by_key(|(reached_ns, _)| *reached_ns).map(|(_, choice)| choice)
    }

    /// Completes an operation of the mechanics.
    fn finish_operation(&mut self, CurrentOperation { until_ns, at, request }: CurrentOperation) {
        self.busy = None;
        let end = at.start_bytes + at.len_bytes;
        self.head_byte = end;
        self.head = self.geometry.physical_position_of((end.max(1) - 1).min(self.last_byte()));
        match request {
            Some(request) => {
                self.complete(request.id, until_ns + self.parameters.command_ns);
                if request.kind == RequestKind::Read {
                    self.known.add_range(at.start_bytes, end);
                    let to =
                        (end + self.parameters.read_ahead_bytes).min(self.parameters.len_bytes);
                    self.idle_read_ahead =
                        Some(HeadReadAhead { from: end, to, since_ns: until_ns });
                }
            }
            None => {
                self.complete_due_flushes(until_ns);
                // The cache has free space again.
                for request in std::mem::take(&mut self.overflow) {
                    self.accept_write(until_ns, request);
                }
            }
        }
    }
}

impl DeviceTiming for Hdd {
    fn model(&self) -> DeviceModel {
        DeviceModel {
            len_bytes: self.parameters.len_bytes,
            rotational: true,
            volatile_cache: self.parameters.volatile_cache,
            depth: NCQ_QUEUE_DEPTH,
            best_io_bytes: 1 << 20,
            discards: false,
        }
    }

    fn submit(&mut self, now_ns: u64, request: SimRequest) {
        match request.kind {
            RequestKind::Write if self.parameters.volatile_cache => {
                self.accept_write(now_ns, request)
            }
            RequestKind::Read | RequestKind::Write => {
                self.queue.push(QueuedRequest { request, since_ns: now_ns })
            }
            RequestKind::Flush => self.accept_flush(now_ns, request.id),
            RequestKind::Discard => self.complete(request.id, now_ns + self.parameters.command_ns),
        }
        self.start_next_operation(now_ns);
    }

    fn next_event_ns(&self) -> Option<u64> {
        let done = self.done.peek().map(|Reverse(done)| done.at_ns);
        let busy = self.busy.map(|busy| busy.until_ns);
        [done, busy].into_iter().flatten().min()
    }

    fn advance(&mut self, to_ns: u64, done: &mut Vec<Completion>) {
        loop {
            while let Some(busy) = self.busy.filter(|busy| busy.until_ns <= to_ns) {
                self.finish_operation(busy);
                self.start_next_operation(busy.until_ns);
            }
            match self.done.peek() {
                Some(Reverse(next)) if next.at_ns <= to_ns => done.push(*next),
                _ => return,
            }
            self.done.pop();
        }
    }

    fn power_cut(&mut self, now_ns: u64) {
        self.collect_read_ahead(now_ns);
        self.busy = None;
        self.idle_read_ahead = None;
        self.queue.clear();
        self.overflow.clear();
        self.dirty = VecDeque::from([FlushGeneration::default()]);
        self.known = ReadCache::default();
        self.done.clear();
        (self.head, self.head_byte, self.link_ns) =
            (self.geometry.physical_position_of(0), 0, now_ns);
    }

    fn work_counters(&self) -> WorkCounters {
        self.work
    }

    fn clone_boxed(&self) -> Box<dyn DeviceTiming> {
        Box::new(self.clone())
    }
}
