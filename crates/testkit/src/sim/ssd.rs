//! Timing model of a flash disk.
//!
//! ```text
//!   command ─▶ controller ─▶ read:  die (tR) ─▶ channel ─▶ link ─▶ done
//!                         └▶ write: link ─▶ buffer ─▶ done
//!                                             └▶ translation ─▶ channel ─▶ die (tPROG)
//! ```
//!
//! Every part is a server that is busy until some time. What the host waits for goes before
//! Every part is a server with a time until which it is busy. Foreground work precedes background
//! work: a read suspends a program or an erase. The buffer delays pages, so that repeated writes of
//! a page are programmed once. A capacitor protects it unless it is volatile. When it is full, a
//! write waits for the oldest program.
//!
//! Law 1: work is never lost: each server completes all of it, in order within its class.
//! Law 2: a write of less than a page costs a read and a program of the whole page.

mod ftl;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};

use self::ftl::{FlashOp, Ftl, FtlGeometry};
use super::{Completion, DeviceModel, DeviceTiming, RequestKind, SimRequest, WorkCounters};
use draconis_device::Extent;
use draconis_device::Random;

/// Parameters of a flash disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SsdParameters {
    /// Length in bytes; rounded down to 4096.
    pub len_bytes: u64,
    /// Unit of the mapping: 512 B to 16 KiB, a power of two.
    pub page_bytes: u32,
    /// Over-provisioning, in percent of the length.
    pub spare_percent: u32,
    /// Number of buses to the dies.
    pub channels: u32,
    /// Number of dies on each bus.
    pub dies_per_channel: u32,
    /// Bytes that a die programs at once, over its planes; at least a page.
    pub unit_bytes: u32,
    /// Units of an erase block of a die. Small disks have shorter blocks, which erase
    /// proportionally faster.
    pub units_per_block: u32,
    /// Time to read a unit, in ns; varies by a tenth.
    pub read_ns: u64,
    /// Time to program a unit, in ns.
    pub program_ns: u64,
    /// Time to erase a whole block, in ns.
    pub erase_ns: u64,
    /// Extra time of a read that suspends other work, in ns.
    pub suspend_ns: u64,
    /// Bandwidth of each channel, in bytes a second.
    pub channel_bytes_per_s: u64,
    /// Read bandwidth of the link, in bytes a second.
    pub read_bytes_per_s: u64,
    /// Write bandwidth of the link, in bytes a second.
    pub write_bytes_per_s: u64,
    /// Controller time per command, in ns; it limits the commands a second.
    pub command_ns: u64,
    /// Fixed overhead of a read, in ns.
    pub read_fixed_ns: u64,
    /// Fixed overhead of a write until it is buffered, in ns.
    pub write_fixed_ns: u64,
    /// Fixed overhead of a flush, in ns.
    pub flush_ns: u64,
    /// Size of the write buffer in bytes.
    pub buffer_bytes: u64,
    /// True if a power cut empties the buffer.
    pub volatile_cache: bool,
    /// Seed of random choices.
    pub seed: u64,
}

/// Maximum commands in the disk.
const COMMAND_QUEUE_DEPTH: usize = 256;

/// A flash disk with a page-mapped translation layer.
#[derive(Clone, Debug)]
pub struct Ssd {
    parameters: SsdParameters,
    dice: Random,
    ftl: Ftl,
    controller: SsdResource,
    link: SsdResource,
    intake: SsdResource,
    dies: Vec<SsdResource>,
    channels: Vec<SsdResource>,
    buffer: WriteBuffer,
    done: BinaryHeap<Reverse<Completion>>,
    /// Operations of the translation layer; reused to save allocations.
    ops: Vec<FlashOp>,
    work: WorkCounters,
}

/// A part that serves one operation at a time.
#[derive(Clone, Copy, Default, Debug)]
struct SsdResource {
    /// Time until which it serves foreground work.
    urgent_ns: u64,
    /// Time until which it serves any work.
    usual_ns: u64,
    busy_ns: u64,
}

/// Pages in the write buffer.
#[derive(Clone, Default, Debug)]
struct WriteBuffer {
    /// Pages that can still be overwritten at no cost, oldest first.
    waiting: VecDeque<u32>,
    is_waiting: HashSet<u32>,
    /// Completion time and number of the pages being programmed.
    leaving: BinaryHeap<Reverse<(u64, u64)>>,
    pages: u64,
}

impl SsdParameters {
    /// Returns a drive like the Intel P3700 of 2014, of any length from 64 MiB.
    pub fn p3700(len_bytes: u64) -> Self {
        Self {
            len_bytes,
            page_bytes: 4096,
            spare_percent: 30,
            channels: 8,
            dies_per_channel: 6,
            unit_bytes: 16 << 10,
            units_per_block: 256,
            read_ns: 60_000,
            program_ns: 300_000,
            erase_ns: 3_800_000,
            suspend_ns: 5_000,
            channel_bytes_per_s: 333_000_000,
            read_bytes_per_s: 2_800_000_000,
            write_bytes_per_s: 1_900_000_000,
            command_ns: 2_200,
            read_fixed_ns: 1_900,
            write_fixed_ns: 15_600,
            flush_ns: 2_000,
            buffer_bytes: (len_bytes / 32).clamp(2 << 20, 32 << 20),
            volatile_cache: false,
            seed: 1,
        }
    }
}

impl Ssd {
    /// Creates an unwritten disk.
    ///
    /// # Panics
    /// If the parameters are invalid: a page that is no power of two from 512 B to 16 KiB or larger
    /// than a unit, no channel or die, or more pages than 32 bits can number.
    pub fn new(parameters: SsdParameters) -> Self {
        let SsdParameters { page_bytes, unit_bytes, .. } = parameters;
        assert!(page_bytes.is_power_of_two() && (512..=16 << 10).contains(&page_bytes));
        assert!(unit_bytes.is_multiple_of(page_bytes) && unit_bytes > 0);
        let dies = parameters.channels * parameters.dies_per_channel;
        assert!(dies > 0, "a disk needs a die");
        let len_bytes = parameters.len_bytes - parameters.len_bytes % 4096;
        let parameters = SsdParameters { len_bytes, ..parameters };
        Self {
            parameters,
            dice: Random::new(parameters.seed),
            ftl: Ftl::new(FtlGeometry::from_parameters(&parameters)),
            controller: SsdResource::default(),
            link: SsdResource::default(),
            intake: SsdResource::default(),
            dies: vec![SsdResource::default(); dies as usize],
            channels: vec![SsdResource::default(); parameters.channels as usize],
            buffer: WriteBuffer::default(),
            done: BinaryHeap::new(),
            ops: vec![],
            work: WorkCounters::default(),
        }
    }

    /// Creates a fresh drive like the Intel P3700.
    pub fn p3700(len_bytes: u64) -> Self {
        Self::new(SsdParameters::p3700(len_bytes))
    }

    /// Creates a full disk, overwritten at random until garbage collection is steady. Takes real
    /// time and memory per page: with 4 KiB pages, 0.25 s and 2.4 MiB per GiB, and twice the time
    /// beyond a few GiB.
    pub fn preconditioned(parameters: SsdParameters) -> Self {
        let mut disk = Self::new(parameters);
        let pages = disk.logical_pages();
        for nth in 0..5 * u64::from(pages) {
            let first = nth < pages.into();
            let page = if first { nth } else { disk.dice.next_below(pages.into()) };
            disk.ftl.write(page as u32, &mut disk.ops);
            disk.ops.clear();
        }
        disk
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &SsdParameters {
        &self.parameters
    }

    fn logical_pages(&self) -> u32 {
        self.parameters.len_bytes.div_ceil(self.parameters.page_bytes.into()) as u32
    }

    /// Returns the pages that `at` touches, each with true if it is entirely covered.
    fn pages_of_extent(&self, at: Extent) -> impl Iterator<Item = (u32, bool)> + use<> {
        let page_bytes = u64::from(self.parameters.page_bytes);
        let end = at.start_bytes + at.len_bytes;
        let pages = at.start_bytes / page_bytes..end.div_ceil(page_bytes);
        pages.map(move |page| {
            let whole = page * page_bytes >= at.start_bytes && (page + 1) * page_bytes <= end;
            (page as u32, whole)
        })
    }

    fn die_of(&self, unit: u64) -> usize {
        (unit % self.dies.len() as u64) as usize
    }

    fn channel_transfer_ns(&self, bytes: u64) -> u64 {
        transfer_ns(bytes, self.parameters.channel_bytes_per_s)
    }

    /// Returns the time at which the host has a read's bytes, the last of which are ready at
    /// `from_ns`: earlier bytes cross the link meanwhile.
    fn transfer_to_host(&mut self, now_ns: u64, from_ns: u64, bytes: u64) -> u64 {
        let takes_ns = |bytes| transfer_ns(bytes, self.parameters.read_bytes_per_s);
        let last_ns = takes_ns(bytes.min(self.parameters.page_bytes.into()));
        self.link.schedule_background(now_ns, takes_ns(bytes)).max(from_ns + last_ns)
    }

    fn read(&mut self, start_ns: u64, at: Extent) -> u64 {
        let mut end_ns = start_ns;
        // Pages of one unit share one read of its die.
        let mut unit_before: Option<(u64, u64)> = None;
        for (page, _) in self.pages_of_extent(at) {
            let stored =
                self.ftl.slot_of_page(page).filter(|_| !self.buffer.is_waiting.contains(&page));
            let Some(unit) = stored.and_then(|at| self.ftl.programmed_unit(at)) else { continue };
            let die = self.die_of(unit);
            let there_ns = match unit_before {
                Some((before, there_ns)) if before == unit => there_ns,
                _ => {
                    let tenth = self.parameters.read_ns / 10;
                    let takes =
                        self.parameters.read_ns - tenth + self.dice.next_below(2 * tenth + 1);
                    self.dies[die].schedule_urgent(start_ns, takes, self.parameters.suspend_ns)
                }
            };
            unit_before = Some((unit, there_ns));
            let page_bytes = u64::from(self.parameters.page_bytes).min(at.len_bytes);
            let takes = self.channel_transfer_ns(page_bytes);
            let channel = die % self.channels.len();
            end_ns = end_ns.max(self.channels[channel].schedule_urgent(there_ns, takes, 0));
        }
        self.transfer_to_host(start_ns, end_ns, at.len_bytes) + self.parameters.read_fixed_ns
    }

    fn write(&mut self, start_ns: u64, at: Extent) -> u64 {
        self.buffer.free_programmed(start_ns);
        let (capacity, hold) = self.buffer_pages();
        let mut room_ns = start_ns;
        for (page, whole) in self.pages_of_extent(at) {
            if self.buffer.is_waiting.contains(&page) {
                continue;
            }
            if !whole
                && let Some(unit) = self.ftl.slot_of_page(page).map(|at| self.ftl.unit_of_slot(at))
            {
                self.read_unit_to_register(start_ns, unit);
                self.transfer_to_channel(start_ns, unit, 1);
            }
            self.buffer.push_page(page);
            while self.buffer.waiting.len() as u64 > hold {
                self.destage(start_ns);
            }
            while self.buffer.pages > capacity
                && let Some(Reverse((left_ns, pages))) = self.buffer.leaving.pop()
            {
                self.buffer.pages -= pages;
                room_ns = room_ns.max(left_ns);
            }
        }
        let takes_ns = transfer_ns(at.len_bytes, self.parameters.write_bytes_per_s);
        self.intake.schedule_background(start_ns, takes_ns).max(room_ns)
            + self.parameters.write_fixed_ns
    }

    /// Returns the number of buffered pages, and how many of them may wait.
    fn buffer_pages(&self) -> (u64, u64) {
        let pages = self.parameters.buffer_bytes / u64::from(self.parameters.page_bytes);
        (pages.max(2), (pages / 2).max(1))
    }

    /// Sends the page that has waited longest to flash.
    fn destage(&mut self, now_ns: u64) {
        let Some(page) = self.buffer.waiting.pop_front() else { return };
        // Discarded pages are no longer buffered.
        if !self.buffer.is_waiting.remove(&page) {
            return;
        }
        let mut ops = std::mem::take(&mut self.ops);
        self.ftl.write(page, &mut ops);
        self.schedule_ops(now_ns, &mut ops);
        self.ops = ops;
    }

    /// Schedules the operations of the translation layer as background work.
    fn schedule_ops(&mut self, now_ns: u64, ops: &mut Vec<FlashOp>) {
        for op in ops.drain(..) {
            match op {
                FlashOp::Fetch { unit } => self.read_unit_to_register(now_ns, unit),
                FlashOp::Carry { unit } => {
                    self.transfer_to_channel(now_ns, unit, 1);
                }
                FlashOp::Program { unit, pages, host_pages } => {
                    let end_ns = self.program(now_ns, unit, pages);
                    if host_pages > 0 {
                        self.buffer.leaving.push(Reverse((end_ns, host_pages)));
                    } else {
                        self.work.moved_bytes += pages * u64::from(self.parameters.page_bytes);
                    }
                }
                FlashOp::Erase { first_unit, units } => self.erase(now_ns, first_unit, units),
            }
        }
    }

    fn read_unit_to_register(&mut self, now_ns: u64, unit: u64) {
        let die = self.die_of(unit);
        self.dies[die].schedule_background(now_ns, self.parameters.read_ns);
    }

    fn transfer_to_channel(&mut self, now_ns: u64, unit: u64, pages: u64) -> u64 {
        let takes = self.channel_transfer_ns(pages * u64::from(self.parameters.page_bytes));
        let channel = self.die_of(unit) % self.channels.len();
        self.channels[channel].schedule_background(now_ns, takes)
    }

    fn program(&mut self, now_ns: u64, unit: u64, pages: u64) -> u64 {
        let there_ns = self.transfer_to_channel(now_ns, unit, pages);
        let die = self.die_of(unit);
        self.work.programmed_bytes += pages * u64::from(self.parameters.page_bytes);
        // The die loads its next unit while it works, so it does not wait for the channel while it
        // has work.
        self.dies[die].schedule_background(now_ns, self.parameters.program_ns).max(there_ns)
    }

    fn erase(&mut self, now_ns: u64, first_unit: u64, units: u64) {
        let dies = self.dies.len() as u64;
        for nth in 0..dies.min(units) {
            let share = units.div_ceil(dies);
            let takes =
                self.parameters.erase_ns * share / u64::from(self.parameters.units_per_block);
            let die = self.die_of(first_unit + nth);
            self.dies[die].schedule_background(now_ns, takes);
            self.work.erases += 1;
        }
    }

    fn flush(&mut self, start_ns: u64) -> u64 {
        let mut end_ns = start_ns;
        if self.parameters.volatile_cache {
            while !self.buffer.waiting.is_empty() {
                self.destage(start_ns);
            }
            let mut ops = std::mem::take(&mut self.ops);
            self.ftl.close_unit(&mut ops);
            self.schedule_ops(start_ns, &mut ops);
            self.ops = ops;
            let last = self.buffer.leaving.iter().map(|Reverse((left_ns, _))| *left_ns).max();
            end_ns = end_ns.max(last.unwrap_or(0));
        }
        end_ns + self.parameters.flush_ns
    }

    fn discard(&mut self, start_ns: u64, at: Extent) -> u64 {
        if let Some(whole) = at.inner_aligned_extent(self.parameters.page_bytes.into()) {
            let page_bytes = u64::from(self.parameters.page_bytes);
            let first = (whole.start_bytes / page_bytes) as u32;
            let end = (whole.end_bytes().unwrap_or(whole.start_bytes) / page_bytes) as u32;
            self.buffer.drop_pages(first..end);
            self.ftl.discard(first..end);
        }
        start_ns + self.parameters.write_fixed_ns
    }
}

impl DeviceTiming for Ssd {
    fn model(&self) -> DeviceModel {
        DeviceModel {
            len_bytes: self.parameters.len_bytes,
            rotational: false,
            volatile_cache: self.parameters.volatile_cache,
            depth: COMMAND_QUEUE_DEPTH,
            best_io_bytes: 128 << 10,
            discards: true,
        }
    }

    fn submit(&mut self, now_ns: u64, SimRequest { id, kind, at }: SimRequest) {
        let start_ns = self.controller.schedule_background(now_ns, self.parameters.command_ns);
        let at_ns = match kind {
            RequestKind::Read => self.read(start_ns, at),
            RequestKind::Write => self.write(start_ns, at),
            RequestKind::Flush => self.flush(start_ns),
            RequestKind::Discard => self.discard(start_ns, at),
        };
        self.done.push(Reverse(Completion { at_ns, id }));
    }

    fn next_event_ns(&self) -> Option<u64> {
        self.done.peek().map(|Reverse(done)| done.at_ns)
    }

    fn advance(&mut self, to_ns: u64, done: &mut Vec<Completion>) {
        while self.next_event_ns().is_some_and(|next| next <= to_ns) {
            done.extend(self.done.pop().map(|Reverse(done)| done));
        }
    }

    fn power_cut(&mut self, now_ns: u64) {
        self.done.clear();
        if self.parameters.volatile_cache {
            self.buffer = WriteBuffer::default();
            self.ftl.drop_open_unit();
        }
        self.buffer.free_programmed(u64::MAX);
        let servers = [&mut self.controller, &mut self.link, &mut self.intake].into_iter();
        for server in servers.chain(&mut self.dies).chain(&mut self.channels) {
            (server.urgent_ns, server.usual_ns) = (now_ns, now_ns);
        }
    }

    fn work_counters(&self) -> WorkCounters {
        let busy_ns = self.dies.iter().map(|die| die.busy_ns).max().unwrap_or(0);
        WorkCounters { busy_ns, ..self.work }
    }

    fn clone_boxed(&self) -> Box<dyn DeviceTiming> {
        Box::new(self.clone())
    }
}

impl SsdResource {
    /// Schedules work after all other work.
    fn schedule_background(&mut self, now_ns: u64, takes_ns: u64) -> u64 {
        self.usual_ns = self.usual_ns.max(now_ns) + takes_ns;
        self.busy_ns += takes_ns;
        self.usual_ns
    }

    /// Schedules work after other foreground work; delays background work.
    fn schedule_urgent(&mut self, from_ns: u64, takes_ns: u64, suspend_ns: u64) -> u64 {
        let mut start_ns = from_ns.max(self.urgent_ns);
        if self.usual_ns > start_ns {
            start_ns += suspend_ns;
            self.usual_ns += takes_ns + suspend_ns;
        }
        self.urgent_ns = start_ns + takes_ns;
        self.busy_ns += takes_ns;
        self.urgent_ns
    }
}

impl WriteBuffer {
    fn push_page(&mut self, page: u32) {
        self.waiting.push_back(page);
        self.is_waiting.insert(page);
        self.pages += 1;
    }

    /// Frees the buffer space of pages that are programmed by `now_ns`.
    fn free_programmed(&mut self, now_ns: u64) {
        while let Some(Reverse((_, pages))) =
            self.leaving.peek().copied().filter(|Reverse((left_ns, _))| *left_ns <= now_ns)
        {
            self.leaving.pop();
            self.pages -= pages;
        }
    }

    fn drop_pages(&mut self, pages: std::ops::Range<u32>) {
        let before = self.is_waiting.len();
        self.is_waiting.retain(|page| !pages.contains(page));
        self.waiting.retain(|page| !pages.contains(page));
        self.pages -= (before - self.is_waiting.len()) as u64;
    }
}

/// Returns the time of `bytes` at a rate.
fn transfer_ns(bytes: u64, bytes_per_s: u64) -> u64 {
    bytes * 1_000_000_000 / bytes_per_s.max(1)
}
