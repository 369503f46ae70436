//! A device in a few numbers, for choosing the parameters of a store.

use super::page_size::{PageSizeProbe, offset_label, page_size_with_times};
use super::parallel::{RandomWriteLoad, fewest_sufficient_threads};
use super::reading::{ColdCheck, prepare_file, read_all};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::store_profile::StoreProfile;
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct StorageProfileExperiment;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "profile",
    paper: PaperSource::Draconis,
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
        new_parameter("area", "bytes that are used", "16M", "1G"),
        new_parameter("probe", "bytes that the store's own probe uses", "64M", "256M"),
        new_parameter("requests", "requests of each kind", "60", "2000"),
        new_parameter("threads", "how many write", "1,2,4,8,16,32", "1,2,4,8,16,32"),
        new_parameter("buffers", "sizes of a read", "4K,16K,64K,256K,1M", "4K,16K,64K,256K,1M,4M"),
    ],
    subjects: &["file", "model:ssd", "model:hdd"],
    accepts: |kind| matches!(kind, SubjectKind::Raw | SubjectKind::Directory | SubjectKind::Model),
    repetitions: (2, 5),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for StorageProfileExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "time", "What one request costs")
                .with_y_axis("time", "ns")
                .with_log_y(),
            Figure::new(FigureShape::Bars, "offset", "16 KiB written at an offset")
                .with_y_axis("time", "ns"),
            Figure::new(FigureShape::Lines, "read", "Reading by buffer, direct, in sequence")
                .with_x_axis("buffer", "B")
                .with_y_axis("read speed", "B/s")
                .with_log_x(),
            Figure::new(FigureShape::Lines, "rate", "Writes of a page by threads")
                .with_x_axis("threads", "")
                .with_y_axis("writes", "/s")
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(context.number_parameter("area")? + context.number_parameter("probe")?)
    }

    /// A model keeps written data in memory.
    fn required_memory_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok((64 << 20) + context.number_parameter("probe")?)
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number_parameter("area")?;
        prepare_file(context, &subject.files()?, "area", area)?;
        let mut samples = measure_requests(context, subject, area)?;
        samples.extend(measure_sizes(context, subject, area)?);
        for threads in context.number_list_parameter("threads")? {
            context.check_not_stopped()?;
            let writes = context.number_parameter("requests")? * 4;
            let threads = threads.max(1);
            let load = RandomWriteLoad {
                block: 4096,
                stride: 4096,
                offset: 0,
                area,
                threads,
                writes,
                host_ns: 0,
            };
            let ns = load.run(context, subject)?;
            let rate = writes as f64 * 1e9 / ns.max(1) as f64;
            samples.push(Sample::at_x("rate", "", threads as f64, rate));
        }
        fit_store_profile(context, subject)?;
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let time = |label| points.median_of_label("time", subject, "", label);
            let (threads, _) =
                fewest_sufficient_threads(&points.medians_by_x("rate", subject, ""))?;
            let (buffer, _) = fewest_sufficient_threads(&points.medians_by_x("read", subject, ""))?;
            let together = match threads <= 1.0 {
                true => "more than one request at a time does not pay".into(),
                false => format!("{threads:.0} requests at the same time pay"),
            };
            let page = match page_size_with_times(points, subject) {
                Some((513.., inside, aligned)) if inside.significant_ratio(aligned).is_none() => {
                    "not told apart".into()
                }
                Some((page @ 513.., ..)) => units::format_bytes(page as f64),
                _ => "of 512 B, or not to be seen".into(),
            };
            Some(format!(
                "{subject}: page {page}; buffers from {} on; random reads cost {} of sequential \
                 ones; a durable write {}; {together}.",
                units::format_bytes(buffer),
                units::format_significant(
                    time("random read 4 KiB")? / time("sequential read 4 KiB")?
                ),
                units::format_time_ns(time("durable write 4 KiB")?),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// Derives the store profile, if the subject is a bare disk.
fn fit_store_profile(context: &RunContext, subject: &dyn Subject) -> anyhow::Result<()> {
    if !context.has_profile(&subject.name())
        && let Some(bare) = subject.bare_disk(context.number_parameter("probe")?)?
    {
        context.add_profile(StoreProfile::measure(subject.name(), &bare)?);
    }
    Ok(())
}

/// Measures single requests.
fn measure_requests(
    context: &RunContext,
    subject: &mut dyn Subject,
    area: u64,
) -> anyhow::Result<Vec<Sample>> {
    const REQUEST_BYTES: u64 = 4096;
    let clock = subject.clock();
    let count = context.number_parameter("requests")?.min(area / REQUEST_BYTES);
    ColdCheck::empty_caches(subject)?;
    let file = subject.files()?.open("area", OpenMode::Direct)?;
    let mut block = AlignedBuffer::new(REQUEST_BYTES as usize);
    let mut dice = context.new_rng();
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
            context.check_not_stopped()?;
            let place =
                if what.starts_with("seq") { nth } else { dice.next_below(area / REQUEST_BYTES) };
            match what {
                _ if what.contains("read") => read_all(&*file, place * REQUEST_BYTES, &mut block)?,
                _ => file.write(place * REQUEST_BYTES, &block)?,
            }
            if what.starts_with("durable") {
                file.sync()?;
            }
            times.push(watch.lap_ns() as f64);
        }
        // The mean includes occasional rotations of the platter.
        samples.push(Sample::labelled("time", "", what, stats::mean(&times).unwrap_or(0.0)));
    }
    Ok(samples)
}

/// Measures the page size, and reads by buffer size.
fn measure_sizes(
    context: &RunContext,
    subject: &mut dyn Subject,
    area: u64,
) -> anyhow::Result<Vec<Sample>> {
    let clock = subject.clock();
    let mut samples = vec![];
    let times = PageSizeProbe::new(context.number_parameter("requests")? * 2, 2, area, subject)
        .time_offsets(context, subject);
    samples.extend(
        times.iter().map(|(at, ns)| Sample::labelled("offset", "", &offset_label(*at), *ns)),
    );
    for buffer in context.number_list_parameter("buffers")? {
        ColdCheck::empty_caches(subject)?;
        let file = subject.files()?.open("area", OpenMode::Direct)?;
        let mut into = AlignedBuffer::new(buffer.min(area) as usize);
        let mut watch = Stopwatch::start(&*clock);
        let reads = (area / into.len() as u64).min(context.number_parameter("requests")?).max(1);
        for nth in 0..reads {
            context.check_not_stopped()?;
            read_all(&*file, nth * into.len() as u64, &mut into)?;
        }
        let speed = (reads * buffer) as f64 * 1e9 / watch.lap_ns().max(1) as f64;
        samples.push(Sample::at_x("read", "", buffer as f64, speed));
    }
    Ok(samples)
}
