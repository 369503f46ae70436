//! Operations of the object store, in both layouts, on a model, a file or a device.
//!
//! ```text
//!   put, append, update: a group each; synchronous ones are waited for before the next
//!   read: from the disk, through a cache that is too small
//!   clean: the store is filled, then overwritten several times over
//!   open: after a cut of the power, with the log not yet merged
//! ```

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::Context as _;
use draconis_device::{Disk, Extent, SubDisk};
use draconis_objects::{
    CreateOptions, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Profile, Store, Ticket,
};
use draconis_testkit::sim::{Clock as Virtual, SimDisk};

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::clock::Clock;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{RawRegion, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct ObjectStoreExperiment;

/// Size of the area that is updated and read at random, in bytes.
const OBJECT_BYTES: u64 = 16 << 20;
/// Synchronous appends that share one wait.
const APPENDS_PER_WAIT: u64 = 32;
/// Length of the store for chained appends, in bytes.
const CHAIN_STORE_BYTES: u64 = 256 << 20;
/// Size of an overwrite when measuring write amplification, in bytes.
const BLOCK_BYTES: u64 = 4096;

/// Disk of a store, and its clock.
struct ScratchStore {
    disk: Arc<dyn Disk>,
    clock: Arc<dyn Clock>,
    region: Extent,
    model: Option<Arc<SimDisk>>,
}

impl ScratchStore {
    fn for_subject(subject: &dyn Subject, bytes: u64) -> anyhow::Result<Self> {
        if let Some(timing) = subject.device_timing() {
            let clock = Virtual::new();
            let model = SimDisk::from_boxed_timing(timing, &clock);
            return Ok(Self {
                disk: model.clone(),
                clock: Arc::new(clock),
                region: Extent::new(0, bytes),
                model: Some(model),
            });
        }
        let bare = subject.bare_disk(bytes)?;
        let RawRegion { disk, clock, region, .. } =
            bare.context("no disk without files between")?;
        Ok(Self { disk, clock, region, model: None })
    }

    /// Returns an ID that distinguishes the store from earlier ones on the same disk.
    fn id(&self) -> u128 {
        match &self.model {
            Some(_) => 1,
            None => UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos()),
        }
    }

    fn store(&self, layout: LayoutKind) -> anyhow::Result<Arc<Store>> {
        let bytes = self.region.len_bytes;
        // Enough segments that the store's reserve is small relative to its length.
        let segment_bytes = (bytes / 1024).next_power_of_two().clamp(1 << 20, 16 << 20) as u32;
        let profile = Profile { layout, page_bytes: 4096, segment_bytes, queue_depth: 32 };
        let disk: Arc<dyn Disk> = Arc::new(SubDisk::new(self.disk.clone(), self.region)?);
        Store::create(disk.clone(), &CreateOptions { profile, id: self.id() })?;
        Ok(Store::open(disk, &OpenOptions { cache_bytes: 64 << 20, read_only: false })?)
    }
}

/// Measures a time in nanoseconds.
fn measure_time_ns(
    clock: &dyn Clock,
    mut what: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let started = clock.now_ns();
    what()?;
    Ok((clock.now_ns() - started).max(1) as f64)
}

/// Submits a group with one change.
fn submit_change(
    store: &Store,
    after: &[Ticket],
    fill: impl FnOnce(&mut Group),
) -> anyhow::Result<Ticket> {
    let mut group = Group::new();
    fill(&mut group);
    store.submit(group, after).map_err(|refused| refused.error.into())
}

fn create_filled_object(store: &Store, bytes: u64) -> anyhow::Result<ObjectId> {
    let new = store.new_object();
    let id = new.id();
    submit_change(store, &[], |group| {
        group.create(new, LifetimeHint::Unknown);
    })?;
    let part = vec![1; 1 << 20];
    for at in (0..bytes).step_by(part.len()) {
        let len = (bytes - at).min(part.len() as u64) as usize;
        submit_change(store, &[], |group| group.write(id, at, &part[..len]))?;
    }
    store.sync()?;
    Ok(id)
}

/// Returns the nanoseconds of an append of 512 bytes, chained or unordered. Uses a new store each
/// time, so that checkpoints affect both
/// equally.
fn append_chained(
    context: &RunContext,
    subject: &dyn Subject,
    layout: LayoutKind,
    is_chain: bool,
) -> anyhow::Result<f64> {
    let place = ScratchStore::for_subject(subject, CHAIN_STORE_BYTES)?;
    let store = place.store(layout)?;
    let id = create_filled_object(&store, 0)?;
    let groups = context.number_parameter("ops")? * 16;
    measure_time_ns(&*place.clock, || {
        let mut last: Vec<Ticket> = vec![];
        for _ in 0..groups {
            context.check_not_stopped()?;
            let ticket = submit_change(&store, &last, |group| group.append(id, &[3; 512]))?;
            last = if is_chain { vec![ticket] } else { vec![] };
        }
        Ok(store.sync()?)
    })
}

/// Returns figure and line of an operation in a layout. A single figure would be
/// unreadable.
fn figure_and_series<'a>(layout: &str, what: &'a str) -> (&'static str, &'a str) {
    match (layout, what.strip_suffix(", durable")) {
        ("log", Some(what)) => ("durable-log", what),
        (_, Some(what)) => ("durable-cow", what),
        ("log", None) => ("free-log", what),
        (_, None) => ("free-cow", what),
    }
}

/// A store of one layout, and its measurements.
struct LayoutMeasurement<'a> {
    context: &'a RunContext,
    clock: &'a dyn Clock,
    store: Arc<Store>,
    layout: &'static str,
    samples: &'a mut Vec<Sample>,
}

impl LayoutMeasurement<'_> {
    /// Submits a group with one change and waits for it.
    fn submit_and_wait(&self, fill: impl FnOnce(&mut Group)) -> anyhow::Result<()> {
        let ticket = submit_change(&self.store, &[], fill)?;
        Ok(self.store.wait(ticket)?)
    }

    /// Measures the rate of `count` operations on `size` bytes.
    fn measure_rate(
        &self,
        what: &str,
        size: u64,
        count: u64,
        once: &mut dyn FnMut(u64) -> anyhow::Result<()>,
    ) -> anyhow::Result<Sample> {
        self.context.check_not_stopped()?;
        let ns = measure_time_ns(self.clock, || (0..count).try_for_each(&mut *once))?;
        let (metric, series) = figure_and_series(self.layout, what);
        Ok(Sample::at_x(metric, series, size as f64, count as f64 * 1e9 / ns))
    }

    fn measure_rates(&mut self) -> anyhow::Result<()> {
        let (ops, mut dice) = (self.context.number_parameter("ops")?, self.context.new_rng());
        let (store, many) = (&self.store, ops * 20);
        let id = create_filled_object(store, OBJECT_BYTES)?;
        for size in self.context.number_list_parameter("sizes")? {
            let payload = vec![7; size as usize];
            let mut somewhere = || dice.next_below(OBJECT_BYTES / size) * size;
            let put = self.measure_rate("put, durable", size, ops, &mut |_| {
                let new = store.new_object();
                self.submit_and_wait(|group| {
                    let id = group.create(new, LifetimeHint::Unknown);
                    group.append(id, &payload);
                })
            })?;
            let log = create_filled_object(store, 0)?;
            let append = self.measure_rate("append, durable", size, ops, &mut |_| {
                self.submit_and_wait(|group| group.append(log, &payload))
            })?;
            let durable = self.measure_rate("update, durable", size, ops, &mut |_| {
                let at = somewhere();
                self.submit_and_wait(|group| group.write(id, at, &payload))
            })?;
            let update = self.measure_rate("update", size, many, &mut |nth| {
                let at = somewhere();
                submit_change(store, &[], |group| group.write(id, at, &payload))?;
                if nth + 1 == many {
                    store.sync()?;
                }
                Ok(())
            })?;
            let mut into = vec![0; size as usize];
            let read = self.measure_rate("read", size, ops, &mut |_| {
                Ok(store.read(id, somewhere(), &mut into).map(drop)?)
            })?;
            self.samples.extend([put, append, durable, update, read]);
        }
        Ok(())
    }

    /// Measures appends of 512 bytes that share a flush.
    fn measure_shared_flushes(&mut self) -> anyhow::Result<()> {
        let (turns, payload) = (self.context.number_parameter("ops")? / 4 + 1, [3; 512]);
        let (store, layout) = (&self.store, self.layout);
        let id = create_filled_object(store, 0)?;
        let ns = measure_time_ns(self.clock, || {
            (0..turns).try_for_each(|_| {
                let mut last = None;
                for _ in 0..APPENDS_PER_WAIT {
                    last = Some(submit_change(store, &[], |group| group.append(id, &payload))?);
                }
                Ok(last.map_or(Ok(()), |ticket| store.wait(ticket))?)
            })
        })?;
        let label = format!("{layout}, {APPENDS_PER_WAIT} writers");
        self.samples.push(Sample::labelled(
            "shared",
            "",
            &label,
            (turns * APPENDS_PER_WAIT) as f64 * 1e9 / ns,
        ));
        Ok(())
    }

    /// Measures write amplification, after everything was overwritten several times.
    fn measure_write_amplification(&mut self) -> anyhow::Result<()> {
        let (context, store) = (self.context, &self.store);
        let info = store.info();
        let fill = context.number_parameter("fill")?;
        let len = u64::from(info.segments) * u64::from(info.profile.segment_bytes) * fill / 100;
        let blocks = (len.saturating_sub(info.used_bytes)) / BLOCK_BYTES;
        let id = create_filled_object(store, blocks * BLOCK_BYTES)?;
        let mut dice = context.new_rng();
        let payload = vec![0; BLOCK_BYTES as usize];
        for (pattern, is_skewed) in [("uniform", false), ("90/10", true)] {
            let mut before = store.info();
            let turns = context.number_parameter("turns")?;
            for turn in 0..turns {
                if turn + 1 == turns {
                    before = store.info();
                }
                for n in 0..blocks {
                    let block = match is_skewed {
                        true if dice.next_below(10) < 9 => dice.next_below(blocks / 10),
                        true => blocks / 10 + dice.next_below(blocks - blocks / 10),
                        false => dice.next_below(blocks),
                    };
                    submit_change(store, &[], |group| {
                        group.write(id, block * BLOCK_BYTES, &payload)
                    })?;
                    if n % 1024 == 0 {
                        context.check_not_stopped()?;
                    }
                }
            }
            let after = store.info();
            let bytes = |of: fn(&draconis_objects::Counters) -> u64| {
                (of(&after.counters) - of(&before.counters)) as f64
            };
            let payload = bytes(|counters| counters.payload_bytes);
            let label = format!("{}, {pattern}", self.layout);
            let moved = 1.0 + bytes(|counters| counters.moved_bytes) / payload;
            self.samples.push(Sample::labelled("amplification", "data", &label, moved));
            let all = bytes(|counters| counters.written_bytes) / payload;
            self.samples.push(Sample::labelled("amplification", "with index", &label, all));
        }
        Ok(())
    }
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "objects",
    paper: PaperSource::Draconis,
    question: "How fast are the object store's put, append, update and read, by size, synchronous and \
           not, in the log and the copy-on-write layout, and what does it write for each byte?",
    published_result: "Section 4.2: proposed, never measured. The analytic optima at 80 % full are 2.69 \
              bytes written for each byte of uniform updates, 1.48 where nine of ten go to a \
              tenth.",
    caveat: "A small store reserves a larger share for cleaning and checkpoints, so its \
               amplification is that of a fuller one; in a quick run it is overwritten once only, \
               which is before cleaning has settled.",
    parameters: &[
        new_parameter("sizes", "sizes of a payload", "512,4096,65536", "512,4096,16384,65536"),
        new_parameter("ops", "operations of each kind and size", "100", "2000"),
        new_parameter("store", "bytes of the store", "256M", "2G"),
        new_parameter("fill", "how full it is where amplification is measured, in %", "70", "80"),
        new_parameter("turns", "how often it is overwritten; the last turn counts", "1", "2"),
    ],
    subjects: &["file", "model:hdd", "model:ssd"],
    accepts: |kind| matches!(kind, SubjectKind::Raw | SubjectKind::Model),
    repetitions: (1, 1),
    warms_up: false,
};

impl Experiment for ObjectStoreExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        let by_size = |metric: &str, title: &str| {
            Figure::new(FigureShape::Lines, metric, title)
                .with_x_axis("payload", "B")
                .with_y_axis("operations", "/s")
                .with_log_x()
                .with_log_y()
        };
        vec![
            by_size("durable-log", "Durable operations in a second by size: log layout"),
            by_size("durable-cow", "Durable operations in a second by size: copy-on-write layout"),
            by_size("free-log", "Updates that nobody waits for, and reads: log layout"),
            by_size("free-cow", "Updates that nobody waits for, and reads: copy-on-write layout"),
            Figure::new(
                FigureShape::Bars,
                "shared",
                "Durable appends of 512 bytes that share a flush",
            )
            .with_y_axis("appends", "/s")
            .with_log_y(),
            Figure::new(
                FigureShape::Bars,
                "chain",
                "Groups in a chain: their time beside free ones",
            )
            .with_y_axis("ratio", ""),
            Figure::new(FigureShape::Bars, "amplification", "Bytes written for each byte")
                .with_y_axis("written", ""),
            Figure::new(FigureShape::Bars, "open", "Opening after a cut of the power")
                .with_y_axis("time", "ns"),
        ]
    }

    /// Space for the store, and for the store of chained appends before it.
    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(context.number_parameter("store")? + CHAIN_STORE_BYTES)
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let mut samples = vec![];
        let bytes = context.number_parameter("store")?;
        for (name, layout) in [("log", LayoutKind::Log), ("cow", LayoutKind::Cow)] {
            let free = append_chained(context, subject, layout, false)?;
            let chained = append_chained(context, subject, layout, true)?;
            samples.push(Sample::labelled("chain", "", name, chained / free));
            let place = ScratchStore::for_subject(subject, bytes)?;
            let store = place.store(layout)?;
            let (clock, samples) = (&*place.clock, &mut samples);
            let mut measuring = LayoutMeasurement { context, clock, store, layout: name, samples };
            measuring.measure_rates()?;
            measuring.measure_shared_flushes()?;
            measuring.measure_write_amplification()?;
            if let Some(model) = &place.model {
                let cut = model.crash_and_restart(context.seed);
                drop(measuring);
                let clock = cut.clock().clone();
                let disk: Arc<dyn Disk> = Arc::new(SubDisk::new(cut, place.region)?);
                let ns = measure_time_ns(&clock, || {
                    Ok(Store::open(disk.clone(), &OpenOptions::default()).map(drop)?)
                })?;
                samples.push(Sample::labelled("open", "", name, ns));
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let layout = if subject.contains("hdd") { "log" } else { "cow" };
            let rate = |what: &str| {
                let (metric, series) = figure_and_series(layout, what);
                Some(units::format_in_unit(
                    points.medians_by_x(metric, subject, series).first()?.1,
                    "/s",
                ))
            };
            Some(format!(
                "{subject}, {layout} layout: {} durable appends of the smallest size, {} updates \
                 that nobody waits for.",
                rate("append, durable")?,
                rate("update")?,
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
