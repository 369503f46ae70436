//! A device in a few numbers, for choosing the parameters of a store.

use super::page_size::{Probe, label, paged};
use super::parallel::{Load, useful};
use super::reading::{ColdCheck, prepare, read_all};
use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::stats;
use crate::store_profile::StoreProfile;
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct Profile;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "profile",
    paper: Paper::Draconis,
    question: "What is the device like in a few numbers: page, best buffer, sequential against random, \
           what a flush costs, how many requests at the same time pay?",
    published_result: "Section 4.2 proposes a component made for each hardware and leaves to its vendor \
              what that must know; here it is measured, and written into a file from which \
              `draconis store create --profile` makes a store.",
    caveat: "The figures are of the device as this program reaches it: below a virtual machine, \
               of what that offers. What a store is to be made with is measured by the store's own \
               probe, once for each device, since that repeats itself what it compares; for a \
               device that has a length for a store of that length, for others for one of 64 GiB.",
    parameters: &[
        parameter("area", "bytes that are used", "16M", "1G"),
        parameter("probe", "bytes that the store's own probe uses", "64M", "256M"),
        parameter("requests", "requests of each kind", "60", "2000"),
        parameter("threads", "how many write", "1,2,4,8,16,32", "1,2,4,8,16,32"),
        parameter("buffers", "sizes of a read", "4K,16K,64K,256K,1M", "4K,16K,64K,256K,1M,4M"),
    ],
    subjects: &["file", "model:ssd", "model:hdd"],
    accepts: |kind| matches!(kind, Kind::Raw | Kind::Directory | Kind::Model),
    repetitions: (2, 5),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for Profile {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Bars, "time", "What one request costs").y("time", "ns").log_y(),
            Figure::new(Shape::Bars, "offset", "16 KiB written at an offset").y("time", "ns"),
            Figure::new(Shape::Lines, "read", "Reading by buffer, direct, in sequence")
                .x("buffer", "B")
                .y("read speed", "B/s")
                .log_x(),
            Figure::new(Shape::Lines, "rate", "Writes of a page by threads")
                .x("threads", "")
                .y("writes", "/s")
                .log_y(),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        Ok(context.number("area")? + context.number("probe")?)
    }

    /// A model keeps written data in memory.
    fn memory_bytes(&self, context: &Context) -> anyhow::Result<u64> {
        Ok((64 << 20) + context.number("probe")?)
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number("area")?;
        prepare(context, &subject.files()?, "area", area)?;
        let mut samples = requests(context, subject, area)?;
        samples.extend(sizes(context, subject, area)?);
        for threads in context.numbers("threads")? {
            context.check()?;
            let writes = context.number("requests")? * 4;
            let threads = threads.max(1);
            let load =
                Load { block: 4096, stride: 4096, offset: 0, area, threads, writes, host_ns: 0 };
            let ns = load.run(context, subject)?;
            let rate = writes as f64 * 1e9 / ns.max(1) as f64;
            samples.push(Sample::at("rate", "", threads as f64, rate));
        }
        fit(context, subject)?;
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let time = |label| points.named("time", subject, "", label);
            let (threads, _) = useful(&points.line("rate", subject, ""))?;
            let (buffer, _) = useful(&points.line("read", subject, ""))?;
            let together = match threads <= 1.0 {
                true => "more than one request at a time does not pay".into(),
                false => format!("{threads:.0} requests at the same time pay"),
            };
            let page = match paged(points, subject) {
                Some((513.., inside, aligned)) if inside.times(aligned).is_none() => {
                    "not told apart".into()
                }
                Some((page @ 513.., ..)) => units::bytes(page as f64),
                _ => "of 512 B, or not to be seen".into(),
            };
            Some(format!(
                "{subject}: page {page}; buffers from {} on; random reads cost {} of sequential \
                 ones; a durable write {}; {together}.",
                units::bytes(buffer),
                units::significant(time("random read 4 KiB")? / time("sequential read 4 KiB")?),
                units::time_ns(time("durable write 4 KiB")?),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// Derives the store profile, if the subject is a bare disk.
fn fit(context: &Context, subject: &dyn Subject) -> anyhow::Result<()> {
    if !context.has_profile(&subject.name())
        && let Some(bare) = subject.bare(context.number("probe")?)?
    {
        context.keep_profile(StoreProfile::measure(subject.name(), &bare)?);
    }
    Ok(())
}

/// Measures single requests.
fn requests(
    context: &Context,
    subject: &mut dyn Subject,
    area: u64,
) -> anyhow::Result<Vec<Sample>> {
    const BLOCK: u64 = 4096;
    let clock = subject.clock();
    let count = context.number("requests")?.min(area / BLOCK);
    ColdCheck::down(subject)?;
    let file = subject.files()?.open("area", OpenMode::Direct)?;
    let mut block = Buffer::new(BLOCK as usize);
    let mut dice = context.rng();
    let mut samples = vec![];
    for what in [
        "sequential read 4 KiB",
        "random read 4 KiB",
        "sequential write 4 KiB",
        "random write 4 KiB",
        "durable write 4 KiB",
    ] {
        let mut times = vec![];
        let mut watch = Stopwatch::start(&*clock);
        for nth in 0..count {
            context.check()?;
            let place = if what.starts_with("seq") { nth } else { dice.below(area / BLOCK) };
            match what {
                _ if what.contains("read") => read_all(&*file, place * BLOCK, &mut block)?,
                _ => file.write(place * BLOCK, &block)?,
            }
            if what.starts_with("durable") {
                file.sync()?;
            }
            times.push(watch.lap_ns() as f64);
        }
        // The mean includes occasional rotations of the platter.
        samples.push(Sample::named("time", "", what, stats::mean(&times).unwrap_or(0.0)));
    }
    Ok(samples)
}

/// Measures the page size, and reads by buffer size.
fn sizes(context: &Context, subject: &mut dyn Subject, area: u64) -> anyhow::Result<Vec<Sample>> {
    let clock = subject.clock();
    let mut samples = vec![];
    let times =
        Probe::new(context.number("requests")? * 2, 2, area, subject).offsets(context, subject);
    samples.extend(times.iter().map(|(at, ns)| Sample::named("offset", "", &label(*at), *ns)));
    for buffer in context.numbers("buffers")? {
        ColdCheck::down(subject)?;
        let file = subject.files()?.open("area", OpenMode::Direct)?;
        let mut into = Buffer::new(buffer.min(area) as usize);
        let mut watch = Stopwatch::start(&*clock);
        let reads = (area / into.len() as u64).min(context.number("requests")?).max(1);
        for nth in 0..reads {
            context.check()?;
            read_all(&*file, nth * into.len() as u64, &mut into)?;
        }
        let speed = (reads * buffer) as f64 * 1e9 / watch.lap_ns().max(1) as f64;
        samples.push(Sample::at("read", "", buffer as f64, speed));
    }
    Ok(samples)
}
