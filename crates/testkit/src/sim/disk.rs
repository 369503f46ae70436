//! A disk with contents in memory and the timing of a model.
//!
//! ```text
//!   submit ─▶ queue ──(dependencies are durable)──▶ in flight ─▶ written ─▶ durable
//!              │ groups, in order                    │ all requests done   │ flushed
//!   read ──────┴──▶ urgent │ usual ─▶ device, up to its depth
//! ```
//!
//! Law 1: groups go to the device in ticket order, many at once unless one depends on another that
//! is not yet durable.
//! Law 2: the device runs ahead of the clock only for a waiter, and the clock then follows.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use draconis_types::Block;
use draconis_types::lock::{Mutex, MutexGuard};

use super::image::SparseImage;
use super::undo::{UndoLog, UndoRecord};
use super::{
    Clock, Completion, DeviceModel, DeviceTiming, Hdd, HddParameters, RequestKind, SimRequest, Ssd,
    SsdParameters, WorkCounters,
};
use draconis_device::Random;
use draconis_device::{
    Atomic, ChainBounds, DeferredAnswer, Disk, Error, Extent, Group, Pending, Properties,
    ReadAnswer, Refused, Ticket, Urgency,
};

/// Unit of atomic writes, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Maximum groups in the queue; beyond it a submitter advances time.
const MAX_QUEUED_GROUPS: usize = 1024;
/// Maximum bytes in the queue; one chain may be larger.
const MAX_QUEUED_BYTES: u64 = 64 << 20;
/// Maximum bytes of one write to the device.
const MAX_RUN_BYTES: u64 = 1 << 20;
/// A simulated disk. See [`crate::sim`].
#[derive(Debug)]
pub struct SimDisk {
    core: Arc<Mutex<SimDiskCore>>,
    clock: Clock,
    model: DeviceModel,
}

/// Counters of requests and device work.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DiskStatistics {
    /// Completed reads.
    pub reads: u64,
    /// Bytes of completed reads.
    pub read_bytes: u64,
    /// Completed writes: neighbours in a group count as one.
    pub writes: u64,
    /// Bytes of completed writes.
    pub written_bytes: u64,
    /// Completed flushes.
    pub flushes: u64,
    /// Completed discards.
    pub discards: u64,
    /// Work of the device for them.
    pub work: WorkCounters,
    /// Hash of all completions and their times; equal for runs with equal seeds.
    pub trace: u64,
}

#[derive(Debug)]
struct SimDiskCore {
    clock: Clock,
    timing: Box<dyn DeviceTiming>,
    model: DeviceModel,
    image: SparseImage,
    undo: UndoLog,
    /// Time up to which the device has run.
    device_ns: u64,
    next_id: u64,
    urgent: VecDeque<SimRequest>,
    usual: VecDeque<SimRequest>,
    in_device: usize,
    asked: HashMap<u64, OutstandingRequest>,
    queue: VecDeque<DependentGroup>,
    flying: VecDeque<InFlightGroup>,
    unwritten_bytes: u64,
    discards: VecDeque<(u64, Extent)>,
    /// Counts of groups: issued, started, written, durable; each at most the one before.
    given: u64,
    started: u64,
    written: u64,
    durable: u64,
    flushing: bool,
    statistics: DiskStatistics,
    done: Vec<Completion>,
}

/// An incomplete request and its purpose.
#[derive(Debug)]
struct OutstandingRequest {
    request: SimRequest,
    purpose: RequestPurpose,
}

#[derive(Debug)]
enum RequestPurpose {
    Read,
    Write { ticket: u64 },
    Flush { covers: u64 },
    Discard,
}

/// A group that waits for its dependencies.
#[derive(Debug)]
struct DependentGroup {
    follows: u64,
    bytes: u64,
    runs: Vec<Extent>,
}

/// A group that the device is writing.
#[derive(Debug)]
struct InFlightGroup {
    ticket: u64,
    bytes: u64,
    left: usize,
}

impl SimDisk {
    /// Creates a zeroed disk with the timing of `timing`, on `clock`.
    pub fn new(timing: impl DeviceTiming + 'static, clock: &Clock) -> Arc<Self> {
        Self::from_core(SimDiskCore::new(Box::new(timing), clock.clone()))
    }

    /// As [`SimDisk::new`], for a device type chosen at run time.
    pub fn from_boxed_timing(timing: Box<dyn DeviceTiming>, clock: &Clock) -> Arc<Self> {
        Self::from_core(SimDiskCore::new(timing, clock.clone()))
    }

    /// Creates a 7200 rpm desktop disk with its write cache on, and its clock.
    pub fn hdd(len_bytes: u64, seed: u64) -> (Arc<Self>, Clock) {
        let parameters = HddParameters { seed, ..HddParameters::desktop_7200(len_bytes) };
        Self::with_clock(Hdd::new(parameters))
    }

    /// Creates a fresh flash disk like the Intel P3700, and its clock.
    pub fn ssd(len_bytes: u64, seed: u64) -> (Arc<Self>, Clock) {
        let parameters = SsdParameters { seed, ..SsdParameters::p3700(len_bytes) };
        Self::with_clock(Ssd::new(parameters))
    }

    fn with_clock(timing: impl DeviceTiming + 'static) -> (Arc<Self>, Clock) {
        let clock = Clock::new();
        (Self::new(timing, &clock), clock)
    }

    fn from_core(core: SimDiskCore) -> Arc<Self> {
        let (clock, model) = (core.clock.clone(), core.model);
        Arc::new(Self { core: Arc::new(Mutex::new(core)), clock, model })
    }

    /// Returns the clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Returns the counters.
    pub fn statistics(&self) -> DiskStatistics {
        let mut core = self.lock();
        core.advance_to_clock();
        DiskStatistics { work: core.timing.work_counters(), ..core.statistics }
    }

    /// Advances device and clock to the next event in the device; returns false if there is none.
    /// For drivers that keep several requests in flight and poll [`Pending::is_ready`].
    pub fn step(&self) -> bool {
        let mut core = self.lock();
        core.advance_to_clock();
        let stepped = core.advance_to_next_event();
        self.clock.advance_to(core.device_ns);
        stepped
    }

    /// Advances device and clock until the device is idle and its caches are empty.
    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    /// Returns the disk as a power cut leaves it now. Each sector that is not durable is present or
    /// not, by `seed`; dependents of non-durable groups are absent. This disk goes on unaffected.
    /// The copy has its own clock, starting now, and shares memory until one of the two is written.
    pub fn crash_and_restart(&self, seed: u64) -> Arc<Self> {
        let mut core = self.lock();
        core.advance_to_clock();
        let mut undo = core.undo.clone();
        let mut image = core.image.clone();
        undo.apply_power_cut(&mut image, core.started, &mut Random::new(seed));
        core.fork_with_image(image)
    }

    /// Returns a copy with the same contents, all of it durable; otherwise as [`SimDisk::crash_and_restart`].
    pub fn fork(&self) -> Arc<Self> {
        let mut core = self.lock();
        core.advance_to_clock();
        let image = core.image.clone();
        core.fork_with_image(image)
    }

    /// Returns the memory of the contents in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.lock().image.allocated_pages() as u64 * 4096
    }

    fn lock(&self) -> MutexGuard<'_, SimDiskCore> {
        lock(&self.core)
    }

    /// Advances time until `reached` returns true or an error.
    fn run_until(
        &self,
        reached: impl Fn(&mut SimDiskCore) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let mut core = self.lock();
        core.advance_to_clock();
        while !reached(&mut core)? {
            // Incomplete work is in the queue or the device: one of them advances.
            let stepped = core.advance_to_next_event();
            debug_assert!(stepped, "a device that forgot a request");
            self.clock.advance_to(core.device_ns);
            if !stepped {
                return Err(Error::ServiceEnded);
            }
        }
        Ok(())
    }
}

fn lock(core: &Mutex<SimDiskCore>) -> MutexGuard<'_, SimDiskCore> {
    core.lock()
}

impl Disk for SimDisk {
    fn properties(&self) -> Properties {
        Properties {
            len_bytes: self.model.len_bytes,
            sector_bytes: SECTOR_BYTES as u32,
            best_io_bytes: self.model.best_io_bytes,
            rotational: self.model.rotational,
            read_only: false,
            atomic: Atomic::None,
            discards: self.model.discards,
        }
    }

    fn read(&self, at: Extent, mut into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties().check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let mut core = self.lock();
        core.advance_to_clock();
        match into.bytes_mut() {
            Some(bytes) => core.image.read(at.start_bytes, bytes),
            None => {
                let mut bytes = vec![0; into.len()];
                core.image.read(at.start_bytes, &mut bytes);
                into.copy_in(0, &bytes);
            }
        }
        let id = core.submit_request(RequestKind::Read, at, RequestPurpose::Read, urgency);
        core.dispatch_urgent_first();
        drop(core);
        Pending::deferred(PendingSimRead { core: self.core.clone(), id, block: into })
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let refuse = |chain, error| Err(Refused { payload: Some(chain), error });
        if let Err(error) = self.properties().check_chain(&chain) {
            return refuse(chain, error);
        }
        let newest = after.iter().copied().max().unwrap_or(Ticket(0));
        if newest.0 > self.lock().given {
            return refuse(chain, Error::UnknownTicket(newest));
        }
        let bytes = ChainBounds::size_of_chain(&chain).bytes;
        // An empty queue is never full, and a queued group is eventually written.
        let _ = self.run_until(|core| Ok(!core.is_full(bytes)));
        let mut core = self.lock();
        let tickets = core.enqueue_chain(chain, newest.0);
        core.dispatch_urgent_first();
        Ok(tickets)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.run_until(|core| core.has_reached(ticket, core.written))
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.run_until(|core| {
            let durable = core.has_reached(ticket, core.durable)?;
            if !durable && core.written >= ticket.0 {
                core.submit_flush();
            }
            Ok(durable)
        })
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.properties().check_extents(extents)?;
        let newest = after.iter().copied().max().unwrap_or(Ticket(0));
        let mut core = self.lock();
        core.advance_to_clock();
        if newest.0 > core.given {
            return Err(Error::UnknownTicket(newest));
        }
        if self.model.discards {
            let whole =
                extents.iter().filter_map(|extent| extent.inner_aligned_extent(SECTOR_BYTES));
            core.discards.extend(whole.map(|extent| (newest.0, extent)));
            core.dispatch_urgent_first();
        }
        Ok(())
    }
}

/// A read that the device has not completed.
#[derive(Debug)]
struct PendingSimRead {
    core: Arc<Mutex<SimDiskCore>>,
    id: u64,
    block: Block,
}

impl DeferredAnswer<ReadAnswer> for PendingSimRead {
    fn is_ready(&self) -> bool {
        let mut core = lock(&self.core);
        core.advance_to_clock();
        !core.asked.contains_key(&self.id)
    }

    fn wait(self: Box<Self>) -> Option<ReadAnswer> {
        let mut core = lock(&self.core);
        core.advance_to_clock();
        while core.asked.contains_key(&self.id) && core.advance_to_next_event() {
            core.clock.advance_to(core.device_ns);
        }
        Some(Ok(self.block))
    }
}

impl SimDiskCore {
    fn new(timing: Box<dyn DeviceTiming>, clock: Clock) -> Self {
        let model = timing.model();
        Self {
            device_ns: clock.now_ns(),
            clock,
            timing,
            model,
            image: SparseImage::new(model.len_bytes),
            undo: UndoLog::default(),
            next_id: 0,
            urgent: VecDeque::new(),
            usual: VecDeque::new(),
            in_device: 0,
            asked: HashMap::new(),
            queue: VecDeque::new(),
            flying: VecDeque::new(),
            unwritten_bytes: 0,
            discards: VecDeque::new(),
            given: 0,
            started: 0,
            written: 0,
            durable: 0,
            flushing: false,
            statistics: DiskStatistics::default(),
            done: vec![],
        }
    }

    /// Processes device events up to the clock, which others may have advanced.
    fn advance_to_clock(&mut self) {
        let now = self.clock.now_ns();
        while self.timing.next_event_ns().is_some_and(|next| next <= now) {
            self.advance_to_next_event();
        }
        self.device_ns = self.device_ns.max(now);
    }

    /// Processes the next event; returns false if there is none.
    fn advance_to_next_event(&mut self) -> bool {
        let Some(next) = self.timing.next_event_ns() else { return false };
        self.device_ns = self.device_ns.max(next);
        let mut done = std::mem::take(&mut self.done);
        self.timing.advance(next, &mut done);
        for one in done.drain(..) {
            self.finish_request(one);
        }
        self.done = done;
        self.dispatch_urgent_first();
        true
    }

    fn submit_request(
        &mut self,
        kind: RequestKind,
        at: Extent,
        purpose: RequestPurpose,
        urgency: Urgency,
    ) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let request = SimRequest { id, kind, at };
        self.asked.insert(id, OutstandingRequest { request, purpose });
        match (urgency, kind) {
            // It covers completed writes only, so it need not wait for others.
            (_, RequestKind::Flush) => self.urgent.push_front(request),
            (Urgency::Now, _) => self.urgent.push_back(request),
            (Urgency::Ahead, _) => self.usual.push_back(request),
        }
        id
    }

    /// Starts requests and groups that the device can accept.
    fn dispatch_urgent_first(&mut self) {
        self.submit_due_discards();
        while let Some(next) = self.queue.front() {
            if next.follows > self.durable {
                // All earlier groups are written, so one flush is enough.
                if self.written == self.started && self.written > self.durable {
                    self.submit_flush();
                }
                break;
            }
            self.start_ready_groups();
        }
        while self.in_device < self.model.depth {
            let next = self.urgent.pop_front().or_else(|| self.usual.pop_front());
            let Some(request) = next else { break };
            self.in_device += 1;
            self.timing.submit(self.device_ns, request);
        }
    }

    /// Starts to write the first group of the queue.
    fn start_ready_groups(&mut self) {
        let Some(DependentGroup { bytes, runs, .. }) = self.queue.pop_front() else { return };
        self.started += 1;
        let ticket = self.started;
        self.flying.push_back(InFlightGroup { ticket, bytes, left: runs.len() });
        for at in runs {
            self.submit_request(
                RequestKind::Write,
                at,
                RequestPurpose::Write { ticket },
                Urgency::Ahead,
            );
        }
        self.update_written_count();
    }

    /// Requests a flush, unless one is in flight.
    fn submit_flush(&mut self) {
        if !self.flushing {
            self.flushing = true;
            let covers = self.written;
            self.submit_request(
                RequestKind::Flush,
                Extent::new(0, 0),
                RequestPurpose::Flush { covers },
                Urgency::Now,
            );
            self.dispatch_urgent_first();
        }
    }

    fn submit_due_discards(&mut self) {
        if self.discards.is_empty() {
            return;
        }
        let durable = self.durable;
        let all = std::mem::take(&mut self.discards).into_iter();
        let (now, later): (VecDeque<_>, _) = all.partition(|(follows, _)| *follows <= durable);
        self.discards = later;
        for (_, extent) in now {
            self.image.zero_extent(extent);
            self.submit_request(
                RequestKind::Discard,
                extent,
                RequestPurpose::Discard,
                Urgency::Ahead,
            );
        }
    }

    fn finish_request(&mut self, done: Completion) {
        let Some(OutstandingRequest { request, purpose }) = self.asked.remove(&done.id) else {
            return;
        };
        self.in_device -= 1;
        let statistics = &mut self.statistics;
        for word in [done.id, request.kind as u64, done.at_ns] {
            statistics.trace = (statistics.trace ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            statistics.trace ^= statistics.trace >> 29;
        }
        let bytes = request.at.len_bytes;
        match purpose {
            RequestPurpose::Read => {
                statistics.reads += 1;
                statistics.read_bytes += bytes;
            }
            RequestPurpose::Write { ticket } => {
                statistics.writes += 1;
                statistics.written_bytes += bytes;
                let first = self.flying.front().map_or(ticket, |group| group.ticket);
                if let Some(group) = self.flying.get_mut((ticket - first) as usize) {
                    group.left -= 1;
                }
                self.update_written_count();
            }
            RequestPurpose::Flush { covers } => {
                statistics.flushes += 1;
                self.flushing = false;
                self.mark_durable_through(covers);
            }
            RequestPurpose::Discard => statistics.discards += 1,
        }
    }

    /// Counts groups as written once their last request is done, in ticket order.
    fn update_written_count(&mut self) {
        while let Some(group) = self.flying.pop_front_if(|group| group.left == 0) {
            self.written = group.ticket;
            self.unwritten_bytes -= group.bytes;
        }
        if !self.model.volatile_cache {
            self.mark_durable_through(self.written);
        }
    }

    fn mark_durable_through(&mut self, ticket: u64) {
        self.durable = self.durable.max(ticket);
        self.undo.drop_durable(self.durable);
    }

    fn is_full(&self, more_bytes: u64) -> bool {
        let groups = self.queue.len() + self.flying.len();
        let full = groups >= MAX_QUEUED_GROUPS
            || self.unwritten_bytes.saturating_add(more_bytes) > MAX_QUEUED_BYTES;
        full && groups > 0
    }

    fn enqueue_chain(&mut self, chain: Vec<Group>, mut follows: u64) -> Vec<Ticket> {
        let mut tickets = Vec::with_capacity(chain.len());
        for group in chain {
            self.given += 1;
            for write in &group.writes {
                self.write_to_image(write.at_bytes, &write.block);
            }
            let runs = contiguous_runs(&group);
            let bytes = runs.iter().map(|run| run.len_bytes).sum();
            self.unwritten_bytes += bytes;
            self.queue.push_back(DependentGroup { follows, bytes, runs });
            tickets.push(Ticket(self.given));
            follows = self.given;
        }
        tickets
    }

    /// Stores a block in the image, where reads see it, and saves the old contents for undo.
    fn write_to_image(&mut self, at_bytes: u64, block: &Block) {
        let extent = Extent::new(at_bytes, block.len() as u64);
        self.discards.retain(|(_, discard)| !discard.overlaps(extent));
        let mut old = vec![0; block.len()];
        self.image.read(at_bytes, &mut old);
        self.undo.push(UndoRecord { ticket: self.given, at_bytes, bytes: old });
        match block.bytes() {
            Some(bytes) => self.image.write(at_bytes, bytes),
            None => {
                let mut bytes = vec![0; block.len()];
                block.copy_out(0, &mut bytes);
                self.image.write(at_bytes, &bytes);
            }
        }
    }

    /// Returns true if `count` has reached `ticket`.
    fn has_reached(&self, ticket: Ticket, count: u64) -> Result<bool, Error> {
        if ticket.0 > self.given {
            return Err(Error::UnknownTicket(ticket));
        }
        Ok(ticket.0 <= count)
    }

    /// Returns an idle disk in the same condition with the contents `image`.
    fn fork_with_image(&self, image: SparseImage) -> Arc<SimDisk> {
        let clock = Clock::new();
        clock.advance_to(self.device_ns);
        let mut timing = self.timing.clone_boxed();
        timing.power_cut(self.device_ns);
        let mut core = Self::new(timing, clock);
        core.image = image;
        SimDisk::from_core(core)
    }
}

/// Returns the ranges that a group writes: neighbours merged, in disk order unless any overlap.
fn contiguous_runs(group: &Group) -> Vec<Extent> {
    let extent =
        |write: &draconis_device::Write| Extent::new(write.at_bytes, write.block.len() as u64);
    let all: Vec<_> = group.writes.iter().map(extent).filter(|it| it.len_bytes > 0).collect();
    let mut sorted = all.clone();
    sorted.sort_unstable();
    let overlap = sorted.windows(2).any(|pair| pair[0].overlaps(pair[1]));
    let mut runs: Vec<Extent> = vec![];
    for next in if overlap { all } else { sorted } {
        match runs.last_mut() {
            Some(run)
                if run.end_bytes() == Some(next.start_bytes)
                    && run.len_bytes + next.len_bytes <= MAX_RUN_BYTES =>
            {
                run.len_bytes += next.len_bytes;
            }
            _ => runs.push(next),
        }
    }
    runs
}
