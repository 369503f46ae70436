//! Measures the characteristics of a disk and derives a profile.
//!
//! ```text
//!   fill in order ─▶ read in order · read at random · 1..32 at once ─▶ writes together, apart
//!     bandwidth        distance          parallelism                     distance, flush
//!                                                      ─▶ writes on and off a boundary
//!                                                                  page
//! ```
//!
//! Throughput alone does not show the page size: for small writes the cost of each command hides
//! it. So writes of two units at a multiple of two units are compared with those one unit off it.
//! Within a page both cost the same. Across a page boundary, two pages are read and written instead
//! of one.
//!
//! Other users of the disk disturb measurements. So compared values are measured in turns, repeated
//! until the turns agree, and the median counts. The default page is 4 KiB; other sizes need clear
//! evidence. A page is never smaller than the unit that the device reports.
//!
//! Law 1: writes stay within the region.
//! Law 2: time is an argument, so that a simulated disk is measured in its own.
//! Law 3: each step ends after its share of time, however slow the disk is.
use std::collections::VecDeque;
use std::fmt;

use draconis_device::{Disk, Extent, Group, Ticket, Urgency, Write};
use draconis_types::{Block, PrivateBuffer};

use crate::codec::{to_u32_saturating, to_usize_saturating};
use crate::{Error, LayoutKind, Profile, Result};

/// Shortest region that gives useful results, in bytes.
pub const REGION_BYTES_MIN: u64 = 4 << 20;
/// Length of a region that gives complete results, in bytes.
pub const REGION_BYTES: u64 = 256 << 20;

/// Length of sequential requests.
const SEQUENTIAL_REQUEST_BYTES: u64 = 1 << 20;
/// Length of random requests.
const RANDOM_REQUEST_BYTES: u64 = 4096;
/// Measured queue depths.
const QUEUE_DEPTHS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Half of each page size that is tested; see the module's head.
const BOUNDARY_UNITS: [u32; 6] = [512, 1024, 2048, 4096, 8192, 16384];
/// Fewest pages of a segment, and fewest segments of a small store, if possible.
const MIN_SEGMENT_PAGES: u64 = 16;
const MIN_SEGMENTS: u64 = 128;
/// Number of writes in a group.
const WRITES_PER_GROUP: u64 = 32;

/// Time for each step, in ns. All steps together usually take about ten seconds.
const FILL_TIME_NS: u64 = 1_500_000_000;
const STEP_TIME_NS: u64 = 300_000_000;
/// Time for writes of each of [`BOUNDARY_UNITS`], on a boundary and off it. Short writes take longer
/// to fill a write buffer, and only a full buffer shows a difference.
const WRITE_TIMES_NS: [u64; 6] =
    [240_000_000, 200_000_000, 200_000_000, 150_000_000, 150_000_000, 150_000_000];

/// Results of a measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProbeResults {
    /// Throughput of long sequential writes, in bytes a second.
    pub write_bytes_per_s: u64,
    /// Throughput of long sequential reads, in bytes a second.
    pub read_bytes_per_s: u64,
    /// Latency of a short sequential read, in ns.
    pub near_read_ns: u64,
    /// Latency of a short random read, in ns.
    pub far_read_ns: u64,
    /// Time per write of adjacent short writes with one flush, in ns.
    pub near_write_ns: u64,
    /// The same for random writes, in ns.
    pub far_write_ns: u64,
    /// Time of a short write and a flush, in ns.
    pub flush_ns: u64,
    /// Short reads a second with 1, 2, 4, 8, 16 and 32 in flight.
    pub reads_per_s: [u64; 6],
    /// Cost of writes across a boundary of 1, 2, 4, 8, 16 and 32 KiB, relative to those on it.
    /// Zeros below the first boundary that is measurable, and where seeks hide it.
    pub misalignment_cost: [f64; 6],
    /// Unit of writes that the device reports, in bytes; 0 if none.
    pub reported_unit_bytes: u32,
    /// Derived unit of writes, in bytes.
    pub page_bytes: u32,
}

/// Decisions with their reasons.
pub type ProfileReasons = Vec<String>;

/// Measures `region` of a disk, which is overwritten. `told_bytes` is the unit of writes that the
/// device reports, 0 if none. `clock` returns ns; `progress` is called with the number of finished
/// steps, and of all.
///
/// # Errors
/// [`Error::Misuse`] if the region is too short; errors of the disk.
pub fn probe(
    disk: &dyn Disk,
    clock: &dyn Fn() -> u64,
    region: Extent,
    reported_unit_bytes: u32,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ProbeResults> {
    let properties = disk.properties();
    let unit = SEQUENTIAL_REQUEST_BYTES.max(u64::from(properties.sector_bytes));
    let region = region
        .inner_aligned_extent(unit)
        .filter(|region| region.len_bytes >= REGION_BYTES_MIN)
        .ok_or(Error::Misuse("too little room to measure a disk in"))?;
    properties.check_range(region, to_usize_saturating(region.len_bytes)).map_err(Error::Device)?;
    let mut probe = DiskProbe { disk, clock, region, random: 7, last: None };
    let steps = (BOUNDARY_UNITS.len() as u64).saturating_add(6);
    let mut done = 0u64;
    let mut tell = || {
        done = done.saturating_add(1);
        progress(done, steps);
    };
    let write_bytes_per_s = probe.fill_region()?;
    tell();
    let read_bytes_per_s = probe.measure_sequential_reads()?;
    tell();
    let (near_read_ns, far_read_ns) = probe.read_latencies()?;
    tell();
    let (near_write_ns, far_write_ns) = probe.write_latencies()?;
    tell();
    let flush_ns = probe.flush_latency()?;
    tell();
    let mut reads_per_s = [0; 6];
    for (rate, depth) in reads_per_s.iter_mut().zip(QUEUE_DEPTHS) {
        *rate = probe.read_rate(depth)?;
    }
    tell();
    let mut measured = ProbeResults {
        write_bytes_per_s,
        read_bytes_per_s,
        near_read_ns,
        far_read_ns,
        near_write_ns,
        far_write_ns,
        flush_ns,
        reads_per_s,
        misalignment_cost: [0.0; 6],
        reported_unit_bytes,
        page_bytes: to_u32_saturating(RANDOM_REQUEST_BYTES),
    };
    let floor = properties.sector_bytes.max(reported_unit_bytes);
    if !measured.has_seek_cost() {
        // From the largest down: the first measurable boundary is the page's.
        let costs = measured.misalignment_cost.iter_mut().zip(WRITE_TIMES_NS);
        for ((cost, time_ns), unit) in costs.zip(BOUNDARY_UNITS).rev() {
            if unit >= floor {
                *cost = probe.boundary_cost(u64::from(unit), time_ns)?;
            }
            if *cost > min_boundary_cost(unit) {
                break;
            }
            tell();
        }
        measured.page_bytes = detect_page_bytes(&measured.misalignment_cost).max(floor);
    }
    measured.page_bytes = measured.page_bytes.max(floor);
    progress(steps, steps);
    Ok(measured)
}

/// Returns the page size: twice the largest unit with a measurable boundary.
fn detect_page_bytes(across: &[f64; 6]) -> u32 {
    // Nothing smaller can be written.
    largest_boundary(across).map_or(BOUNDARY_UNITS[0], |(unit, ..)| unit.saturating_mul(2))
}

/// Returns the largest of [`BOUNDARY_UNITS`] with a measurable boundary, its cost, and the cost of
/// the next larger unit.
fn largest_boundary(across: &[f64; 6]) -> Option<(u32, f64, Option<f64>)> {
    let mut larger = None;
    for (unit, cost) in BOUNDARY_UNITS.into_iter().zip(*across).rev() {
        if cost > min_boundary_cost(unit) {
            return Some((unit, cost, larger));
        }
        larger = Some(cost);
    }
    None
}

/// Returns the least relative cost that counts as a boundary of two units. Boundaries of up to 4
/// KiB need little evidence, larger ones much.
fn min_boundary_cost(unit: u32) -> f64 {
    if u64::from(unit) < RANDOM_REQUEST_BYTES { 1.12 } else { 1.25 }
}

/// Factor by which a turn must differ from the threshold to be clear.
const CLEAR_FACTOR: f64 = 1.07;
/// Turns that must agree, and the most turns.
const AGREEING_AND_MAX_TURNS: (usize, usize) = (3, 7);

/// Measures the cost of a boundary of two units in turns, until all are clearly on one side of the
/// threshold. Returns the median; if they never agree, the value that favours 4 KiB.
fn measure_until_stable(unit: u32, turn: &mut dyn FnMut(usize) -> Result<f64>) -> Result<f64> {
    let line = min_boundary_cost(unit);
    let mut turns = vec![];
    loop {
        turns.push(turn(turns.len())?);
        let (above, below) = (line * CLEAR_FACTOR, line / CLEAR_FACTOR);
        let agree = turns.iter().all(|it| *it > above) || turns.iter().all(|it| *it < below);
        let is_over = turns.len() >= AGREEING_AND_MAX_TURNS.1;
        if is_over || agree && turns.len() >= AGREEING_AND_MAX_TURNS.0 {
            turns.sort_unstable_by(f64::total_cmp);
            let nth = match (agree, u64::from(unit) < RANDOM_REQUEST_BYTES) {
                (true, _) => turns.len() / 2,
                (false, true) => turns.len().saturating_sub(2),
                (false, false) => 1,
            };
            return Ok(turns.get(nth).copied().unwrap_or(line));
        }
    }
}

impl ProbeResults {
    /// Returns true if distance costs time: random requests take several times as long as
    /// sequential ones, and longer than on any device without moving parts.
    pub fn has_seek_cost(&self) -> bool {
        let costs = |near: u64, far: u64| far > 1_000_000 && far > near.saturating_mul(4);
        costs(self.near_read_ns, self.far_read_ns) || costs(self.near_write_ns, self.far_write_ns)
    }

    /// Returns the cost of a seek, in ns.
    fn seek_ns(&self) -> u64 {
        let reads = self.far_read_ns.saturating_sub(self.near_read_ns);
        reads.max(self.far_write_ns.saturating_sub(self.near_write_ns))
    }

    /// Returns the useful queue depth.
    pub fn queue_depth(&self) -> u32 {
        let most = self.reads_per_s.iter().copied().max().unwrap_or(0);
        let enough = |rate: &u64| *rate as f64 >= most as f64 * 0.9;
        let mut all = QUEUE_DEPTHS.into_iter().zip(&self.reads_per_s);
        all.find(|(_, rate)| enough(rate)).map_or(1, |(depth, _)| depth)
    }

    /// Returns the profile for a store of `disk_bytes` on such a disk, with the reasons.
    pub fn profile(&self, disk_bytes: u64) -> (Profile, ProfileReasons) {
        let mut why = vec![];
        let is_log = self.has_seek_cost();
        let layout = if is_log { LayoutKind::Log } else { LayoutKind::Cow };
        let (near, far) = (DisplayTime(self.near_read_ns), DisplayTime(self.far_read_ns));
        let (near_write, far_write) =
            (DisplayTime(self.near_write_ns), DisplayTime(self.far_write_ns));
        why.push(match is_log {
            true => format!(
                "layout log: distance costs ({far} for a read anywhere, {near} for the next; writes {far_write} and {near_write})"
            ),
            false => format!(
                "layout cow: distance costs little ({far} for a read anywhere, {near} for the next; writes {far_write} and {near_write})"
            ),
        });
        let page_bytes = self.page_bytes_for_disk(disk_bytes);
        let felt = largest_boundary(&self.misalignment_cost);
        why.push(match felt {
            _ if page_bytes < self.page_bytes => {
                let measured = DisplayBytes(self.page_bytes.into());
                format!("page {}: the store is small for {measured}", DisplayBytes(page_bytes.into()))
            }
            _ if is_log => {
                format!("page {}: less is not worth a turn of the disk", DisplayBytes(page_bytes.into()))
            }
            Some((unit, cost, next)) if page_bytes == unit.saturating_mul(2) => format!(
                "page {}: a write across its boundary costs {:.1} times one on it, across that of the next larger size {}",
                DisplayBytes(page_bytes.into()),
                cost,
                match next {
                    Some(next) => format!("{next:.1}"),
                    None => "is not known".to_owned(),
                }
            ),
            _ if page_bytes == self.reported_unit_bytes => {
                format!("page {}: the device says so", DisplayBytes(page_bytes.into()))
            }
            _ => format!("page {}: no boundary is felt", DisplayBytes(page_bytes.into())),
        });
        let (segment_bytes, reason) = self.segment_bytes(disk_bytes, page_bytes);
        why.push(reason);
        let queue_depth = self.queue_depth();
        why.push(format!(
            "queue depth {queue_depth}: {} reads a second one by one, {} with {queue_depth} in flight, {} with 32",
            self.reads_per_s[0],
            QUEUE_DEPTHS.iter().zip(self.reads_per_s).find(|(depth, _)| **depth == queue_depth).map_or(0, |(_, rate)| rate),
            self.reads_per_s[5]
        ));
        (Profile { layout, page_bytes, segment_bytes, queue_depth }, why)
    }

    /// Returns the page, reduced if the store would have too few segments. So even a large measured
    /// page allows small stores of about the same capacity.
    fn page_bytes_for_disk(&self, disk_bytes: u64) -> u32 {
        let fits = disk_bytes / (MIN_SEGMENTS * MIN_SEGMENT_PAGES);
        let fits = u32::try_from(fits.max(RANDOM_REQUEST_BYTES)).unwrap_or(u32::MAX);
        // The unit that the device reports stays a minimum.
        self.page_bytes.min((1 << fits.ilog2()).max(self.reported_unit_bytes))
    }

    #[allow(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast ends at 0 and the largest number, segments have 64 KiB or more"
    )]
    fn segment_bytes(&self, disk_bytes: u64, page_bytes: u32) -> (u32, String) {
        // A seek takes at most a 14th of the time to write a segment.
        let bytes_per_ns = self.write_bytes_per_s as f64 / 1e9;
        let wanted = (self.seek_ns() as f64 * bytes_per_ns * 14.0) as u64;
        let (least, most, parts) = match self.has_seek_cost() {
            true => (16u64 << 20, 64u64 << 20, 128),
            // About forty segments are kept free: a small part of thousands.
            false => (4 << 20, 16 << 20, 2048),
        };
        let wanted = wanted.clamp(least, most).next_power_of_two().min(most);
        let fits = 1 << (disk_bytes / parts).max(1).ilog2();
        let floor = (u64::from(page_bytes) * MIN_SEGMENT_PAGES).max(64 << 10);
        // Fewer pages if those of the device are long for the store.
        let is_enough = |segment: &u64| disk_bytes / segment >= MIN_SEGMENTS;
        let mut floors = [floor, floor / 2, floor / 4].into_iter();
        let floor = floors.find(is_enough).unwrap_or(floor / 4);
        let segment = wanted.min(fits).max(floor);
        let takes_ns = segment as f64 / bytes_per_ns.max(1e-9);
        let share = self.seek_ns() as f64 / takes_ns * 100.0;
        let why = match segment == wanted {
            true => format!("going there is {share:.1} % of writing it"),
            false => format!("the store is no larger than {} of them", disk_bytes / segment),
        };
        (segment as u32, format!("segment {}: {why}", DisplayBytes(segment)))
    }
}

/// A time with a suitable unit.
struct DisplayTime(u64);

impl fmt::Display for DisplayTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns @ 0..10_000 => write!(f, "{:.1} µs", ns as f64 / 1e3),
            ns @ 10_000..1_000_000 => write!(f, "{} µs", ns / 1000),
            ns => write!(f, "{:.1} ms", ns as f64 / 1e6),
        }
    }
}

/// A number of bytes with a binary unit.
struct DisplayBytes(u64);

impl fmt::Display for DisplayBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

struct DiskProbe<'p> {
    disk: &'p dyn Disk,
    clock: &'p dyn Fn() -> u64,
    /// The part of the region that was written.
    region: Extent,
    random: u64,
    last: Option<Ticket>,
}

#[allow(
    clippy::arithmetic_side_effects,
    reason = "nothing is read of a store: times only grow, and places are in the probed region"
)]
impl DiskProbe<'_> {
    fn now(&self) -> u64 {
        (self.clock)()
    }

    /// Returns incompressible bytes.
    fn incompressible_block(&mut self, len: u64) -> Block {
        let mut bytes = PrivateBuffer::new_uninitialized(to_usize_saturating(len));
        for word in bytes.chunks_mut(8) {
            self.random = crate::codec::mix_bits(self.random);
            word.iter_mut().zip(self.random.to_le_bytes()).for_each(|(to, from)| *to = from);
        }
        Block::from(bytes)
    }

    /// Returns a random address in the region for `len` bytes, at a multiple of `step`.
    fn random_address(&mut self, step: u64, len: u64) -> u64 {
        self.random = crate::codec::mix_bits(self.random);
        let places = (self.region.len_bytes - len) / step;
        self.region.start_bytes + self.random % places.max(1) * step
    }

    fn submit(&mut self, writes: Vec<Write>) -> Result<Ticket> {
        let ticket = self
            .disk
            .submit(Group { writes }, &[])
            .map_err(|refused| Error::Device(refused.error))?;
        self.last = Some(ticket);
        Ok(ticket)
    }

    fn wait_all(&self) -> Result<()> {
        self.last.map_or(Ok(()), |ticket| self.disk.wait_durable(ticket)).map_err(Error::Device)
    }

    /// Writes the region sequentially, within the time limit. Returns bytes a second. The unwritten
    /// rest of the region is not used.
    fn fill_region(&mut self) -> Result<u64> {
        let start = self.now();
        let mut done = 0;
        let mut flying = VecDeque::new();
        while done < self.region.len_bytes
            && (done < REGION_BYTES_MIN || self.now() - start < FILL_TIME_NS)
        {
            let block = self.incompressible_block(SEQUENTIAL_REQUEST_BYTES);
            let at_bytes = self.region.start_bytes + done;
            flying.push_back(self.submit(vec![Write { at_bytes, block }])?);
            if flying.len() > 8
                && let Some(first) = flying.pop_front()
            {
                self.disk.wait_visible(first)?;
            }
            done += SEQUENTIAL_REQUEST_BYTES;
        }
        self.wait_all()?;
        self.region.len_bytes = done;
        Ok(per_second(done, self.now() - start))
    }

    /// Reads with `depth` in flight at the addresses of `next`, until `most` requests or the time
    /// limit. Returns the number of requests and their time.
    fn measure_reads(
        &mut self,
        depth: usize,
        len: u64,
        most: u64,
        next: &mut dyn FnMut(&mut Self, u64) -> u64,
    ) -> Result<(u64, u64)> {
        let start = self.now();
        let mut flying = VecDeque::new();
        let (mut asked, mut done) = (0, 0);
        loop {
            while flying.len() < depth && asked < most {
                let at = next(self, asked);
                let block = Block::from(PrivateBuffer::new_uninitialized(to_usize_saturating(len)));
                flying.push_back(self.disk.read(Extent::new(at, len), block, Urgency::Ahead));
                asked += 1;
            }
            let Some(first) = flying.pop_front() else { break };
            match first.wait() {
                Some(Ok(_)) => done += 1,
                Some(Err(refused)) => return Err(refused.error.into()),
                None => return Err(draconis_device::Error::ServiceEnded.into()),
            }
            if self.now() - start > STEP_TIME_NS {
                // Requests in flight are awaited, but not counted.
                let took = self.now() - start;
                flying.into_iter().for_each(|pending| drop(pending.wait()));
                return Ok((done, took));
            }
        }
        Ok((done, self.now() - start))
    }

    fn measure_sequential_reads(&mut self) -> Result<u64> {
        let (start, len) = (self.region.start_bytes, self.region.len_bytes);
        let (done, took) = self.measure_reads(
            4,
            SEQUENTIAL_REQUEST_BYTES,
            len / SEQUENTIAL_REQUEST_BYTES,
            &mut |_, nth| start + nth * SEQUENTIAL_REQUEST_BYTES,
        )?;
        Ok(per_second(done * SEQUENTIAL_REQUEST_BYTES, took))
    }

    /// Returns the latencies of sequential and random short reads, in ns. Measured in turns.
    fn read_latencies(&mut self) -> Result<(u64, u64)> {
        const READS_PER_TURN: u64 = 16;
        let (mut near, mut far) = (vec![], vec![]);
        let half = self.region.len_bytes / 2;
        let first = self.random_address(RANDOM_REQUEST_BYTES, half);
        let start = self.now();
        while near.len() < 2000 && (near.is_empty() || self.now() - start < 2 * STEP_TIME_NS) {
            // The seek to the first read of a turn is not sequential.
            let next = near.len() as u64;
            for nth in 0..=READS_PER_TURN {
                let at = first + (next + nth) * RANDOM_REQUEST_BYTES % half;
                let took = self.time_read(at)?;
                if nth > 0 {
                    near.push(took);
                }
            }
            for _ in 0..READS_PER_TURN {
                let at = self.random_address(RANDOM_REQUEST_BYTES, RANDOM_REQUEST_BYTES);
                far.push(self.time_read(at)?);
            }
        }
        Ok((median(near), median(far)))
    }

    fn time_read(&self, at: u64) -> Result<u64> {
        let before = self.now();
        let len = to_usize_saturating(RANDOM_REQUEST_BYTES);
        let block = Block::from(PrivateBuffer::new_uninitialized(len));
        let read = self.disk.read_now(Extent::new(at, RANDOM_REQUEST_BYTES), block);
        read.map_err(|refused| Error::Device(refused.error))?;
        Ok(self.now() - before)
    }

    /// Returns the time per short write of a flushed group, in ns: adjacent and random. Measured in
    /// turns.
    fn write_latencies(&mut self) -> Result<(u64, u64)> {
        let (mut near, mut far) = (vec![], vec![]);
        let start = self.now();
        while near.len() < 50 && (near.len() < 3 || self.now() - start < 2 * STEP_TIME_NS) {
            let first =
                self.random_address(RANDOM_REQUEST_BYTES, WRITES_PER_GROUP * RANDOM_REQUEST_BYTES);
            near.push(self.time_write(&mut |_, nth| first + nth * RANDOM_REQUEST_BYTES)?);
            far.push(self.time_write(&mut |probe, _| {
                probe.random_address(RANDOM_REQUEST_BYTES, RANDOM_REQUEST_BYTES)
            })?);
        }
        Ok((median(near), median(far)))
    }

    fn time_write(&mut self, place: &mut dyn FnMut(&mut Self, u64) -> u64) -> Result<u64> {
        let mut writes = vec![];
        for nth in 0..WRITES_PER_GROUP {
            let at_bytes = place(self, nth);
            writes.push(Write { at_bytes, block: self.incompressible_block(RANDOM_REQUEST_BYTES) });
        }
        let before = self.now();
        self.submit(writes)?;
        self.wait_all()?;
        Ok((self.now() - before) / WRITES_PER_GROUP)
    }

    fn flush_latency(&mut self) -> Result<u64> {
        let mut times = vec![];
        let start = self.now();
        let first = self.random_address(RANDOM_REQUEST_BYTES, 64 * RANDOM_REQUEST_BYTES);
        while times.len() < 64 && (times.len() < 3 || self.now() - start < STEP_TIME_NS) {
            let at_bytes = first + times.len() as u64 * RANDOM_REQUEST_BYTES;
            let block = self.incompressible_block(RANDOM_REQUEST_BYTES);
            let before = self.now();
            self.submit(vec![Write { at_bytes, block }])?;
            self.wait_all()?;
            times.push(self.now() - before);
        }
        Ok(median(times))
    }

    fn read_rate(&mut self, depth: u32) -> Result<u64> {
        let most = 500 * u64::from(depth);
        let (done, took) =
            self.measure_reads(depth as usize, RANDOM_REQUEST_BYTES, most, &mut |probe, _| {
                probe.random_address(RANDOM_REQUEST_BYTES, RANDOM_REQUEST_BYTES)
            })?;
        Ok(per_second(done, took))
    }

    /// Returns the cost of writes of `2 * unit` a `unit` off their boundary, relative to on it.
    fn boundary_cost(&mut self, unit: u64, time_ns: u64) -> Result<f64> {
        measure_until_stable(to_u32_saturating(unit), &mut |turn| {
            // Alternating the order cancels drift.
            let (mut on, mut off) = (0, 0);
            for nth in [turn % 2, 1 - turn % 2] {
                let rate = self.write_rate(unit, nth as u64 * unit, time_ns)?;
                if nth == 0 { on = rate } else { off = rate }
            }
            Ok(on as f64 / off.max(1) as f64)
        })
    }

    /// Returns scattered writes of `2 * unit`, `off` their boundary, a second, with full caches.
    fn write_rate(&mut self, unit: u64, off: u64, time_ns: u64) -> Result<u64> {
        let start = self.now();
        let (mut asked, mut warm): (u64, Option<(u64, u64)>) = (0, None);
        let mut flying: VecDeque<Ticket> = VecDeque::new();
        // Far from each other, and none twice before all: rewriting buffered bytes costs nothing.
        // An odd step visits all of a power of two of addresses.
        let places = 1u64 << (self.region.len_bytes / (4 * unit) - 1).max(1).ilog2();
        let step = golden_part(places) | 1;
        let mut place = self.random % places;
        loop {
            let now = self.now();
            let settled = asked - flying.len() as u64 * WRITES_PER_GROUP;
            if now - start > time_ns / 3 * 2 && warm.is_none() {
                warm = Some((now, settled));
            }
            if now - start > time_ns
                && let Some((since, before)) = warm
                && settled >= before + 4 * WRITES_PER_GROUP
            {
                self.wait_all()?;
                return Ok(per_second(settled - before, now - since));
            }
            let mut writes = Vec::with_capacity(to_usize_saturating(WRITES_PER_GROUP));
            for _ in 0..WRITES_PER_GROUP {
                place = (place + step) % places;
                let at_bytes = self.region.start_bytes + place * 4 * unit + off;
                writes
                    .push(Write { at_bytes, block: Block::private(to_usize_saturating(2 * unit)) });
            }
            let ticket = self.submit(writes)?;
            asked += WRITES_PER_GROUP;
            flying.push_back(ticket);
            if flying.len() > 4
                && let Some(first) = flying.pop_front()
            {
                self.disk.wait_visible(first)?;
            }
        }
    }
}

/// Returns about the golden part of a number.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a part of a number without a sign"
)]
fn golden_part(of: u64) -> u64 {
    (of as f64 * 0.618_034) as u64
}

fn per_second(count: u64, ns: u64) -> u64 {
    let rate = u128::from(count).saturating_mul(1_000_000_000).checked_div(u128::from(ns.max(1)));
    u64::try_from(rate.unwrap_or(0)).unwrap_or(u64::MAX)
}

fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests;
