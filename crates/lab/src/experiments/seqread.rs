//! A file read sequentially, with buffers of many sizes.

use super::reading::{ColdCheck, prepare, read_all};
use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct SeqRead;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "seqread",
    paper: Paper::Singularity,
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
        parameter("files", "lengths of the files", "4M,24M", "13M,350M"),
        parameter(
            "buffers",
            "buffer sizes",
            "4K,16K,64K,1M,8M",
            "4K,8K,16K,64K,256K,1M,8M,64M,96M",
        ),
    ],
    subjects: &["kernel:ext2", "fuse2fs", "draconis", "draconis-lib", "model:hdd"],
    accepts: |kind| kind != Kind::KeyValue,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for SeqRead {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Lines, "speed", "Sequential reading, by buffer")
                .x("buffer", "B")
                .y("read speed", "B/s")
                .log_x(),
            Figure::new(Shape::Lines, "first", "The first request alone, cold")
                .x("buffer", "B")
                .y("read speed", "B/s")
                .log_x()
                .log_y(),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        Ok(context.numbers("files")?.iter().sum())
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let clock = subject.clock();
        let mut samples = vec![];
        let mut lengths = context.numbers("files")?;
        lengths.sort_unstable();
        for bytes in lengths {
            let name = format!("seqread-{bytes}");
            prepare(context, &subject.files()?, &name, bytes)?;
            let series = format!("{} file", units::bytes(bytes as f64));
            for buffer in context.numbers("buffers")? {
                context.check()?;
                let mut into = Buffer::new(buffer.min(bytes) as usize);
                let chill = ColdCheck::down(subject)?;
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
                samples.push(Sample::at("speed", &series, x, speed(bytes, total_ns)).cold(cold));
                samples.push(Sample::at("first", &series, x, first).cold(cold));
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let subjects = points.subjects();
        let best_of = |subject: &str| {
            let series = points.series("speed", subject);
            let last = series.last()?;
            Some((points.best("speed", subject, last)?, *last))
        };
        let baseline = subjects.first().and_then(|first| best_of(first)).map(|((_, y), _)| y);
        let tell = |subject: &&str| {
            let ((buffer, speed), series) = best_of(subject)?;
            let first = points.line("first", subject, series);
            let (small, slow) = first.first().copied()?;
            let ratio = baseline
                .filter(|_| !subject.starts_with("model"))
                .map_or_else(String::new, |all| {
                    format!(" ({} of {})", units::significant(speed / all), subjects[0])
                });
            Some(format!(
                "{subject}: {} with buffers of {}{ratio}; the first request of {} at {}.",
                units::in_unit(speed, "B/s"),
                units::bytes(buffer),
                units::bytes(small),
                units::in_unit(slow, "B/s"),
            ))
        };
        subjects.iter().filter_map(tell).collect()
    }
}
