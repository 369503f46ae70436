//! Write amplification of a nearly full store, wait of each group, and time of opening after a
//! power cut, on simulated disks.
//!
//! ```text
//! cargo run --release -p draconis-objects --example worn -- store=4G segment=1M
//! cargo run --release -p draconis-objects --example worn -- store=2G segment=512K wait=1
//! cargo run --release -p draconis-objects --example worn -- \
//!     disk=hdd layout=log store=1024G segment=64M block=128K cut=400000
//! ```
//!
//! `fill` is the percentage of live bytes of all segments after filling; every turn then overwrites
//! as much. `wait=1` waits for each group. `cut=N` updates N blocks after filling, cuts the power
//! and opens the store. `cache` is the store's memory: nodes that do not fit are read again for
//! flushes, cleaning and merges.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use draconis_device::{Disk, Extent, SubDisk};
use draconis_objects::{
    Counters, CreateOptions, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store,
};
use draconis_testkit::sim::{Clock, SimDisk};

type ExampleResult<T> = Result<T, Box<dyn Error>>;

const DEFAULT_ARGUMENTS: [(&str, &str); 10] = [
    ("disk", "ssd"),
    ("layout", "cow"),
    ("store", "4G"),
    ("segment", "1M"),
    ("fill", "80"),
    ("block", "4K"),
    ("turns", "3"),
    ("wait", "0"),
    ("cut", "0"),
    ("cache", "256M"),
];

fn parse_number(text: &str) -> ExampleResult<u64> {
    let unit = match text.as_bytes().last() {
        Some(b'K') => 1 << 10,
        Some(b'M') => 1 << 20,
        Some(b'G') => 1 << 30,
        _ => 1,
    };
    Ok(text.trim_end_matches(['K', 'M', 'G']).parse::<u64>()? * unit)
}

fn main() -> ExampleResult<()> {
    let mut settings: HashMap<&str, String> =
        DEFAULT_ARGUMENTS.iter().map(|&(key, value)| (key, value.to_owned())).collect();
    for argument in std::env::args().skip(1) {
        let (key, value) = argument.split_once('=').ok_or("settings are KEY=VALUE")?;
        let known = settings.get_mut(key).ok_or_else(|| format!("no setting is called {key}"))?;
        value.clone_into(known);
    }
    let get = |key: &str| parse_number(&settings[key]);
    let (bytes, segment_bytes) = (get("store")?, get("segment")? as u32);
    let (disk, clock) = match &*settings["disk"] {
        "hdd" => SimDisk::hdd(bytes, 1),
        _ => SimDisk::ssd(bytes, 1),
    };
    let layout = match &*settings["layout"] {
        "log" => LayoutKind::Log,
        _ => LayoutKind::Cow,
    };
    let profile = Profile { layout, page_bytes: 4096, segment_bytes, queue_depth: 32 };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
    let options = OpenOptions { cache_bytes: get("cache")?, read_only: false };
    let store = Store::open(disk.clone(), &options)?;
    let mut worn = NearlyFullStore {
        all: u64::from(store.info().segments) * u64::from(segment_bytes),
        payload: vec![0; get("block")? as usize],
        id: ObjectId(0),
        blocks: 0,
        dice: 88_172_645_463_325_252,
        store,
        disk: disk.clone(),
        clock,
    };
    worn.fill(get("fill")?)?;
    if get("cut")? > 0 {
        return worn.reopen_after_power_cut(get("cut")?, &disk);
    }
    for is_skewed in [false, true] {
        for turn in 0..get("turns")? {
            worn.run_turn(turn, is_skewed, get("wait")? > 0)?;
        }
    }
    Ok(())
}

/// A nearly full store.
struct NearlyFullStore {
    store: Arc<Store>,
    disk: Arc<SimDisk>,
    clock: Clock,
    all: u64,
    payload: Vec<u8>,
    id: ObjectId,
    blocks: u64,
    dice: u64,
}

impl NearlyFullStore {
    fn random_below(&mut self, limit: u64) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice % limit
    }

    fn write_block(&self, block: u64) -> ExampleResult<draconis_objects::Ticket> {
        let mut group = Group::new();
        group.write(self.id, block * self.payload.len() as u64, &self.payload);
        Ok(self.store.submit(group, &[]).map_err(|refused| refused.error)?)
    }

    /// Fills a percentage of all segments, including the index.
    fn fill(&mut self, percent: u64) -> ExampleResult<()> {
        let new = self.store.new_object();
        self.id = new.id();
        let mut group = Group::new();
        group.create(new, LifetimeHint::Unknown);
        self.store.submit(group, &[]).map_err(|refused| refused.error)?;
        let (began, since) = (Instant::now(), self.clock.now_ns());
        // The size of the index is known only once it is written.
        while !self.blocks.is_multiple_of(1024)
            || self.store.info().used_bytes < self.all / 100 * percent
        {
            self.write_block(self.blocks)?;
            self.blocks += 1;
        }
        self.store.sync()?;
        println!(
            "filled {percent} % with {} blocks of {} bytes: {:.1} s of device, {:.1} s of CPU",
            self.blocks,
            self.payload.len(),
            (self.clock.now_ns() - since) as f64 / 1e9,
            began.elapsed().as_secs_f64()
        );
        Ok(())
    }

    fn run_turn(&mut self, turn: u64, is_skewed: bool, waits: bool) -> ExampleResult<()> {
        let before = self.store.info().counters;
        let device = self.disk.statistics();
        let (began, since) = (Instant::now(), self.clock.now_ns());
        let mut waited_ns = vec![];
        // Wait, reads, bytes, writes, bytes and flushes of the longest update.
        let mut longest_cost = [0; 6];
        for _ in 0..self.blocks {
            let tenth = self.blocks / 10;
            let block = match is_skewed {
                true if self.random_below(10) < 9 => self.random_below(tenth),
                true => tenth + self.random_below(self.blocks - tenth),
                false => self.random_below(self.blocks),
            };
            let submitted = self.clock.now_ns();
            let begun = self.disk.statistics();
            let ticket = self.write_block(block)?;
            if waits {
                self.store.wait(ticket)?;
                let wait = self.clock.now_ns() - submitted;
                waited_ns.push(wait);
                let ended = self.disk.statistics();
                longest_cost = longest_cost.max([
                    wait,
                    ended.reads - begun.reads,
                    ended.read_bytes - begun.read_bytes,
                    ended.writes - begun.writes,
                    ended.written_bytes - begun.written_bytes,
                    ended.flushes - begun.flushes,
                ]);
            }
        }
        self.store.sync()?;
        let info = self.store.info();
        let bytes = |of: fn(&Counters) -> u64| (of(&info.counters) - of(&before)) as f64;
        let payload = bytes(|counters| counters.payload_bytes);
        let device_s = (self.clock.now_ns() - since) as f64 / 1e9;
        print!(
            "{} turn {turn}: {:.2} bytes of payload for each, {:.2} with all that is written \
             ({:.2} index); {:.1} % alive; {:.1} MB/s of device time, {:.1} s of CPU",
            if is_skewed { "90/10  " } else { "uniform" },
            1.0 + bytes(|counters| counters.moved_bytes) / payload,
            bytes(|counters| counters.written_bytes) / payload,
            bytes(|counters| counters.index_bytes) / payload,
            info.used_bytes as f64 * 100.0 / self.all as f64,
            payload / device_s / 1e6,
            began.elapsed().as_secs_f64(),
        );
        let did = self.disk.statistics();
        print!(
            "; {} reads of {} MB, {} writes of {} MB, {} flushes, {} seeks",
            did.reads - device.reads,
            (did.read_bytes - device.read_bytes) / 1_000_000,
            did.writes - device.writes,
            (did.written_bytes - device.written_bytes) / 1_000_000,
            did.flushes - device.flushes,
            did.work.seeks - device.work.seeks,
        );
        waited_ns.sort_unstable();
        if let Some(&longest) = waited_ns.last() {
            let at = |q: f64| waited_ns[((waited_ns.len() - 1) as f64 * q) as usize] as f64 / 1e3;
            print!(
                "; durable after {:.0} µs (half), {:.0} (99 %), {:.0} (99.9 %), {:.0} (all)",
                at(0.5),
                at(0.99),
                at(0.999),
                longest as f64 / 1e3
            );
            let [_, reads, read_bytes, writes, written_bytes, flushes] = longest_cost;
            print!(
                "; during the longest: {reads} reads of {} KB, {writes} writes of {} KB, \
                 {flushes} flushes",
                read_bytes / 1000,
                written_bytes / 1000,
            );
        }
        println!();
        Ok(())
    }

    fn reopen_after_power_cut(&mut self, updates: u64, disk: &Arc<SimDisk>) -> ExampleResult<()> {
        let whole = std::mem::replace(&mut self.payload, vec![0; 512]);
        for _ in 0..updates {
            let mut group = Group::new();
            let block = self.random_below(self.blocks);
            group.write(self.id, block * whole.len() as u64, &self.payload);
            self.store.submit(group, &[]).map_err(|refused| refused.error)?;
        }
        for seed in 0..3 {
            let cut = disk.crash_and_restart(seed);
            let (clock, before) = (cut.clock().clone(), cut.statistics());
            let (began, since) = (Instant::now(), clock.now_ns());
            let len = cut.properties().len_bytes;
            let view = SubDisk::new(cut.clone(), Extent::new(0, len))?;
            let store = Store::open(Arc::new(view), &OpenOptions::default())?;
            let after = cut.statistics();
            println!(
                "opened after a cut: {:.1} ms of device time, {:.1} ms of CPU; {} reads, {} MiB",
                (clock.now_ns() - since) as f64 / 1e6,
                began.elapsed().as_secs_f64() * 1e3,
                after.reads - before.reads,
                (after.read_bytes - before.read_bytes) >> 20
            );
            drop(store);
        }
        Ok(())
    }
}
