//! A file read sequentially, with buffers of many sizes.

use super::reading::{ColdCheck, prepare_file, read_all};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct SequentialReadExperiment;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "seqread",
    paper: PaperSource::Singularity,
    question: "How fast is a file read in sequence, by the size of the buffer, and how slow is the \
           very first request after mounting?",
    published_result: "Figure 2: Linux 34 MB/s, Singularity 28 MB/s at 16 KB (0.82 of it). The first, cold \
              request of 4 KB runs at 0.005 MB/s and passes 1 MB/s only from buffers of 1 MB on. \
              The 13 MB file behaves as the 350 MB file does.",
    caveat: "The paper's cold 4 KB took a head's way to every indirect block: a second for 4 KB. \
               Where nothing turns, a first request costs a few requests of some ten microseconds; \
               model:hdd still has the head. Read-ahead is what makes the size of the buffer \
               matter less today.",
    parameters: &[
        new_parameter("files", "lengths of the files", "4M,24M", "13M,350M"),
        new_parameter(
            "buffers",
            "buffer sizes",
            "4K,16K,64K,1M,8M",
            "4K,8K,16K,64K,256K,1M,8M,64M,96M",
        ),
    ],
    subjects: &["kernel:ext2", "fuse2fs", "draconis", "draconis-lib", "model:hdd"],
    accepts: |kind| kind != SubjectKind::KeyValue,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for SequentialReadExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "speed", "Sequential reading, by buffer")
                .with_x_axis("buffer", "B")
                .with_y_axis("read speed", "B/s")
                .with_log_x(),
            Figure::new(FigureShape::Lines, "first", "The first request alone, cold")
                .with_x_axis("buffer", "B")
                .with_y_axis("read speed", "B/s")
                .with_log_x()
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(context.number_list_parameter("files")?.iter().sum())
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let clock = subject.clock();
        let mut samples = vec![];
        let mut lengths = context.number_list_parameter("files")?;
        lengths.sort_unstable();
        for bytes in lengths {
            let name = format!("seqread-{bytes}");
            prepare_file(context, &subject.files()?, &name, bytes)?;
            let series = format!("{} file", units::format_bytes(bytes as f64));
            for buffer in context.number_list_parameter("buffers")? {
                context.check_not_stopped()?;
                let mut into = AlignedBuffer::new(buffer.min(bytes) as usize);
                let chill = ColdCheck::empty_caches(subject)?;
                let file = subject.files()?.open(&name, OpenMode::Cached)?;
                let mut watch = Stopwatch::start(&*clock);
                let (mut first_ns, mut total_ns, mut at) = (0, 0, 0);
                while at < bytes {
                    let len = into.len().min((bytes - at) as usize);
                    read_all(&*file, at, &mut into[..len])?;
                    let lap = watch.lap_ns();
                    if at == 0 {
                        first_ns = lap;
                    }
                    total_ns += lap;
                    at += len as u64;
                }
                drop(file);
                let cold = chill.was_cold(subject, bytes);
                let speed = |bytes: u64, ns: u64| bytes as f64 * 1e9 / ns.max(1) as f64;
                let first = speed(into.len() as u64, first_ns);
                let x = buffer as f64;
                samples.push(
                    Sample::at_x("speed", &series, x, speed(bytes, total_ns)).with_cold(cold),
                );
                samples.push(Sample::at_x("first", &series, x, first).with_cold(cold));
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let subjects = points.subjects();
        let best_of = |subject: &str| {
            let series = points.series("speed", subject);
            let last = series.last()?;
            Some((points.best_point("speed", subject, last)?, *last))
        };
        let baseline = subjects.first().and_then(|first| best_of(first)).map(|((_, y), _)| y);
        let tell = |subject: &&str| {
            let ((buffer, speed), series) = best_of(subject)?;
            let first = points.medians_by_x("first", subject, series);
            let (small, slow) = first.first().copied()?;
            let ratio = baseline
                .filter(|_| !subject.starts_with("model"))
                .map_or_else(String::new, |all| {
                    format!(" ({} of {})", units::format_significant(speed / all), subjects[0])
                });
            Some(format!(
                "{subject}: {} with buffers of {}{ratio}; the first request of {} at {}.",
                units::format_in_unit(speed, "B/s"),
                units::format_bytes(buffer),
                units::format_bytes(small),
                units::format_in_unit(slow, "B/s"),
            ))
        };
        subjects.iter().filter_map(tell).collect()
    }
}
