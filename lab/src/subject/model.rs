//! A modelled device behind a modelled host; time is modelled, too.
//!
//! ```text
//!   read, write ── page cache (pages, dirty sectors) ── read ahead, write back ── sim::Timing
//!                  a call costs CALL_NS and a byte a tenth of a nanosecond
//!   sync: dirty sectors in order, one sector of metadata if the file grew, a flush
//! ```
//!
//! Law 1: no real clock and no other randomness than the seed is used: runs are deterministic.
//! Law 2: a file that grew costs a metadata sector at the next sync, like the inode of a
//! file system.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, bail};

use draconis_device::Extent;
use draconis_testkit::sim::{
    self, DeviceTiming, Hdd, HddParameters, RequestKind as Ask, SimDisk, SimRequest, Ssd,
    SsdParameters,
};
use draconis_types::lock::{Mutex, MutexGuard};

use super::raw::RegionAllocator;
use super::{
    CacheDropResult, OpenMode, RawRegion, RunEnvironment, Subject, SubjectFile, SubjectFiles,
    SubjectKind,
};
use crate::clock::Clock;
use crate::units;

/// Host time of a system call.
const SYSTEM_CALL_NS: u64 = 300;
/// Bytes that the host copies per nanosecond.
const COPY_BYTES_PER_NS: u64 = 10;
/// Page size of the host's cache, in bytes.
const PAGE_BYTES: u64 = 4096;
/// Read-ahead for sequential reads, in bytes.
const READ_AHEAD_BYTES: u64 = 128 << 10;
/// Sector size, the unit of dirty data, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Dirty data above which a write waits for write-back, in bytes.
const MAX_DIRTY_BYTES: u64 = 64 << 20;
/// Position of the metadata.
const METADATA_OFFSET_BYTES: u64 = 0;

/// Length of a modelled hard disk, in bytes.
const HDD_BYTES: u64 = 1_000_000_000_000;
/// Minimum length of a modelled flash disk, in bytes.
const MIN_SSD_BYTES: u64 = 256 << 20;

/// A modelled device and host.
pub struct ModelSubject {
    spec: String,
    /// The device in its initial state.
    fresh: Box<dyn DeviceTiming>,
    what: String,
    host: Arc<Mutex<ModelHost>>,
    clock: sim::Clock,
    areas: Arc<RegionAllocator>,
}

/// Parses a specification - `hdd`, `ssd`, `ssd,page=8K,channels=2` - and describes the device.
fn parse_device_spec(spec: &str, bytes: u64) -> anyhow::Result<(Box<dyn DeviceTiming>, String)> {
    let mut parts = spec.split(',');
    let name = parts.next().unwrap_or_default();
    // Twice the space, because full flash is slower.
    let mut ssd = SsdParameters::p3700((bytes * 2).max(MIN_SSD_BYTES).next_multiple_of(64 << 20));
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let value = units::parse_amount(value).with_context(|| format!("model: {part}"))?;
        match (name, key) {
            ("ssd", "page")
                if value.is_power_of_two()
                    && (512..=u64::from(ssd.unit_bytes)).contains(&value) =>
            {
                ssd.page_bytes = value as u32;
            }
            ("ssd", "channels") if (1..=64).contains(&value) => ssd.channels = value as u32,
            _ => bail!("model: {part}: page=512..16K or channels=1..64 of an ssd"),
        }
    }
    match name {
        "hdd" => {
            let parameters = HddParameters::desktop_7200(HDD_BYTES);
            let what = format!("a modelled disk of {} turns a minute", parameters.turns_per_minute);
            Ok((Box::new(Hdd::new(parameters)), what))
        }
        "ssd" => {
            let page = units::format_bytes(f64::from(ssd.page_bytes));
            let dies = ssd.channels * ssd.dies_per_channel;
            let what = format!("a modelled, worn flash disk of {dies} dies with pages of {page}");
            Ok((Box::new(Ssd::preconditioned(ssd)), what))
        }
        _ => bail!("model:{spec}: model:hdd or model:ssd"),
    }
}

impl ModelSubject {
    /// Parses the part of a specification after `model:`.
    ///
    /// # Errors
    /// The specification is invalid.
    pub fn new(spec: &str, shop: &RunEnvironment) -> anyhow::Result<Self> {
        let (fresh, what) = parse_device_spec(spec, shop.bytes)?;
        let clock = sim::Clock::new();
        let areas = Arc::<RegionAllocator>::default();
        areas.allocate("metadata", 1 << 20, u64::MAX)?;
        let host = Arc::new(Mutex::new(ModelHost::new(fresh.clone_boxed(), clock.clone())));
        Ok(Self { spec: spec.to_string(), fresh, what, host, clock, areas })
    }
}

impl Subject for ModelSubject {
    fn name(&self) -> String {
        format!("model:{}", self.spec)
    }

    fn describe(&self) -> String {
        format!("{}; device time", self.what)
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::Model
    }

    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(self.clock.clone())
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        Ok(Arc::new(ModelFiles { host: self.host.clone(), areas: self.areas.clone() }))
    }

    fn device_timing(&self) -> Option<Box<dyn DeviceTiming>> {
        Some(self.fresh.clone_boxed())
    }

    /// Returns the device in its initial state, without the host.
    fn bare_disk(&self, bytes: u64) -> anyhow::Result<Option<RawRegion>> {
        let clock = sim::Clock::new();
        let disk = SimDisk::from_boxed_timing(self.fresh.clone_boxed(), &clock);
        let (region, clock) = (Extent::new(0, bytes), Arc::new(clock));
        Ok(Some(RawRegion { disk, clock, region, told_bytes: 0, len_bytes: None }))
    }

    fn empty_caches(&mut self) -> anyhow::Result<CacheDropResult> {
        let mut host = lock_host(&self.host);
        host.write_back();
        host.pages.clear();
        host.read_distant_places();
        Ok(CacheDropResult::Yes)
    }

    fn device_read_bytes(&self) -> Option<u64> {
        Some(lock_host(&self.host).read_bytes)
    }
}

fn lock_host(host: &Mutex<ModelHost>) -> MutexGuard<'_, ModelHost> {
    host.lock()
}

/// Number of reads in another place before a cold run: more than a drive's cache holds.
const DISTANT_READ_COUNT: u64 = 64;

/// The host: a page cache in front of a device. It stores no contents, since nothing reads them.
struct ModelHost {
    timing: Box<dyn DeviceTiming>,
    clock: sim::Clock,
    next_id: u64,
    done: Vec<sim::Completion>,
    /// Numbers of cached pages.
    pages: BTreeSet<u64>,
    /// Runs of dirty sectors: first, and one past the last.
    dirty: BTreeMap<u64, u64>,
    /// True if a file grew since the last sync.
    grown: bool,
    /// Offset at which a read would be sequential.
    next_read: u64,
    read_bytes: u64,
}

impl ModelHost {
    fn new(timing: Box<dyn DeviceTiming>, clock: sim::Clock) -> Self {
        Self {
            timing,
            clock,
            next_id: 0,
            done: vec![],
            pages: BTreeSet::new(),
            dirty: BTreeMap::new(),
            grown: false,
            next_read: 0,
            read_bytes: 0,
        }
    }

    /// Sends a request to the device, and advances the clock to its completion.
    fn send_request(&mut self, kind: Ask, at_bytes: u64, len_bytes: u64) {
        if kind == Ask::Read {
            self.read_bytes += len_bytes;
        }
        let (id, now) = (self.next_id, self.clock.now_ns());
        self.next_id += 1;
        self.timing.advance(now, &mut self.done);
        self.timing.submit(now, SimRequest { id, kind, at: Extent::new(at_bytes, len_bytes) });
        loop {
            if let Some(done) = self.done.iter().find(|done| done.id == id) {
                self.clock.advance_to(done.at_ns);
                break self.done.clear();
            }
            let Some(next) = self.timing.next_event_ns() else { break };
            self.timing.advance(next, &mut self.done);
        }
    }

    /// Reads from many distant places, so that neither the head position nor the drive's cache
    /// helps the next run.
    fn read_distant_places(&mut self) {
        // Flushes the drive's write cache, too.
        self.send_request(Ask::Flush, 0, 0);
        let end = self.timing.model().len_bytes;
        let step = end / 2 / DISTANT_READ_COUNT;
        for nth in 0..DISTANT_READ_COUNT {
            self.send_request(Ask::Read, end / 2 + nth * step, PAGE_BYTES);
        }
        self.next_read = end;
    }

    fn charge_system_call(&self, bytes: u64) {
        self.clock.advance(SYSTEM_CALL_NS + bytes / COPY_BYTES_PER_NS);
    }

    /// Reads through the cache: missing pages are read in runs, with read-ahead if the read is
    /// sequential.
    fn read(&mut self, at: u64, len: u64) {
        self.charge_system_call(len);
        let reads_on = at == self.next_read;
        self.next_read = at + len;
        let (mut page, end) = (at / PAGE_BYTES, (at + len).div_ceil(PAGE_BYTES));
        while page < end {
            if self.pages.contains(&page) {
                page += 1;
                continue;
            }
            let first = page;
            while page < end && !self.pages.contains(&page) {
                page += 1;
            }
            let ahead = if reads_on { READ_AHEAD_BYTES / PAGE_BYTES } else { 0 };
            let last = page.max(first + ahead);
            self.send_request(Ask::Read, first * PAGE_BYTES, (last - first) * PAGE_BYTES);
            self.pages.extend(first..last);
        }
    }

    fn write(&mut self, at: u64, len: u64) {
        self.charge_system_call(len);
        let first = at / SECTOR_BYTES;
        let end = (at + len).div_ceil(SECTOR_BYTES);
        self.mark_dirty(first, end);
        self.pages.extend(at / PAGE_BYTES..(at + len).div_ceil(PAGE_BYTES));
        if self.dirty.iter().map(|(from, to)| to - from).sum::<u64>() * SECTOR_BYTES
            > MAX_DIRTY_BYTES
        {
            self.write_back();
        }
    }

    /// Adds a run of dirty sectors, and merges it with others.
    fn mark_dirty(&mut self, mut first: u64, mut end: u64) {
        while let Some((&from, &to)) = self.dirty.range(..=end).next_back()
            && to >= first
        {
            self.dirty.remove(&from);
            (first, end) = (first.min(from), end.max(to));
        }
        self.dirty.insert(first, end);
    }

    fn write_back(&mut self) {
        for (first, end) in std::mem::take(&mut self.dirty) {
            self.send_request(Ask::Write, first * SECTOR_BYTES, (end - first) * SECTOR_BYTES);
        }
    }

    fn sync(&mut self) {
        self.charge_system_call(0);
        self.write_back();
        if std::mem::take(&mut self.grown) {
            self.send_request(Ask::Write, METADATA_OFFSET_BYTES, SECTOR_BYTES);
        }
        self.send_request(Ask::Flush, 0, 0);
    }
}

struct ModelFiles {
    host: Arc<Mutex<ModelHost>>,
    areas: Arc<RegionAllocator>,
}

struct ModelHandle {
    host: Arc<Mutex<ModelHost>>,
    start: u64,
    how: OpenMode,
    len: Arc<Mutex<u64>>,
}

impl ModelFiles {
    fn handle(&self, start: u64, how: OpenMode, len: u64) -> Arc<dyn SubjectFile> {
        let (host, len) = (self.host.clone(), Arc::new(Mutex::new(len)));
        Arc::new(ModelHandle { host, start, how, len })
    }
}

impl SubjectFiles for ModelFiles {
    fn create(
        &self,
        name: &str,
        bytes: u64,
        how: OpenMode,
    ) -> anyhow::Result<Arc<dyn SubjectFile>> {
        let start =
            self.areas.allocate(name, bytes, lock_host(&self.host).timing.model().len_bytes)?;
        Ok(self.handle(start, how, 0))
    }

    fn open(&self, name: &str, how: OpenMode) -> anyhow::Result<Arc<dyn SubjectFile>> {
        // The length only matters for growth, and an existing file does not grow.
        Ok(self.handle(self.areas.get(name)?, how, u64::MAX))
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        self.areas.release(name);
        Ok(())
    }
}

impl SubjectFile for ModelHandle {
    fn read(&self, at: u64, into: &mut [u8]) -> anyhow::Result<usize> {
        let mut host = lock_host(&self.host);
        match self.how {
            OpenMode::Cached => host.read(self.start + at, into.len() as u64),
            OpenMode::Direct => {
                host.charge_system_call(0);
                host.send_request(Ask::Read, self.start + at, into.len() as u64);
            }
        }
        Ok(into.len())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let mut host = lock_host(&self.host);
        let mut len = self.len.lock();
        let end = at + bytes.len() as u64;
        if end > *len {
            *len = end;
            host.grown = true;
        }
        match self.how {
            OpenMode::Cached => host.write(self.start + at, bytes.len() as u64),
            OpenMode::Direct => {
                host.charge_system_call(0);
                host.send_request(Ask::Write, self.start + at, bytes.len() as u64);
            }
        }
        Ok(())
    }

    fn sync(&self) -> anyhow::Result<()> {
        lock_host(&self.host).sync();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> ModelHost {
        ModelHost::new(Box::new(Ssd::p3700(64 << 20)), sim::Clock::new())
    }

    #[test]
    fn adjacent_dirty_sectors_merge() {
        let mut host = host();
        for (first, end) in [(0, 1), (4, 5), (1, 2), (2, 4)] {
            host.mark_dirty(first, end);
        }
        assert_eq!(host.dirty, BTreeMap::from([(0, 5)]));
        host.mark_dirty(7, 9);
        assert_eq!(host.dirty.len(), 2);
    }

    #[test]
    fn sequential_reads_read_ahead_and_cached_reads_skip_device() {
        let mut host = host();
        host.read(0, 4096);
        assert_eq!(host.read_bytes, READ_AHEAD_BYTES);
        host.read(4096, 4096);
        assert_eq!(host.read_bytes, READ_AHEAD_BYTES);
        host.read(10 << 20, 4096);
        assert_eq!(host.read_bytes, READ_AHEAD_BYTES + 4096);
    }

    #[test]
    fn model_specs_are_parsed() {
        assert!(parse_device_spec("hdd", 0).unwrap().0.model().rotational);
        assert!(parse_device_spec("ssd,page=8K,channels=4", 0).unwrap().1.contains("24 dies"));
        for wrong in ["ssd,page", "ssd,page=1000", "ssd,page=32K", "hdd,page=4K", "tape"] {
            assert!(parse_device_spec(wrong, 0).is_err(), "{wrong}");
        }
    }
}
