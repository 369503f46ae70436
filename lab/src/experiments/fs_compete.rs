//! Small fsyncs next to a large one.

use std::sync::Barrier;

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct CompetingFsyncExperiment;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "fs-compete",
    paper: PaperSource::Memory,
    question: "What do ten fsyncs of small writes cost while another thread makes one large file \
           durable?",
    published_result: "One fsync at a time on a disk: the small ones wait for the large one, and longer the \
              larger it is (1 KB to 400 MB).",
    caveat: "Where the device takes writes fast enough, or the file systems lie in different \
               files of one device, the large fsync does not hold the small ones up for long.",
    parameters: &[
        new_parameter("syncs", "fsyncs of the first thread", "10", "10"),
        new_parameter("small", "bytes before each", "1024", "1024"),
        new_parameter(
            "large",
            "bytes that the second thread makes durable",
            "1K,256K,4M,32M",
            "1K,16K,256K,4M,16M,64M,128M,256M,400M",
        ),
    ],
    subjects: &["dir", "kernel:ext2", "draconis"],
    accepts: |kind| // Two threads in modelled time would not be reproducible.
        matches!(kind, SubjectKind::Directory | SubjectKind::Library | SubjectKind::Memory),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for CompetingFsyncExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "time", "Ten small fsyncs beside a large one")
                .with_x_axis("what the other makes durable", "B")
                .with_y_axis("time for all of the first", "ns")
                .with_log_x()
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(context.number_list_parameter("large")?.into_iter().max().unwrap_or(0) + (16 << 20))
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let (syncs, small) =
            (context.number_parameter("syncs")?, context.number_parameter("small")?);
        let mut samples = vec![];
        for large in context.number_list_parameter("large")? {
            context.check_not_stopped()?;
            let first = files.create("small", small * syncs, OpenMode::Cached)?;
            let second = files.create("large", large, OpenMode::Cached)?;
            let piece = AlignedBuffer::new(large.min(1 << 20) as usize);
            let mut at = 0;
            while at < large {
                let len = (large - at).min(piece.len() as u64) as usize;
                second.write(at, &piece[..len])?;
                at += len as u64;
            }
            let bytes = AlignedBuffer::new(small as usize);
            let start = Barrier::new(2);
            let ns = std::thread::scope(|scope| -> anyhow::Result<u64> {
                let other = scope.spawn(|| {
                    start.wait();
                    second.sync()
                });
                start.wait();
                let mut watch = Stopwatch::start(&*clock);
                for nth in 0..syncs {
                    first.write(nth * small, &bytes)?;
                    first.sync()?;
                }
                let ns = watch.lap_ns();
                other.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
                Ok(ns)
            })?;
            drop((first, second));
            files.remove("small")?;
            files.remove("large")?;
            samples.push(Sample::at_x("time", "", large as f64, ns as f64));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let line = points.medians_by_x("time", subject, "");
            let (least, most) = (line.first()?, line.last()?);
            Some(format!(
                "{subject}: {} beside {}, {} beside {}: {} times.",
                units::format_time_ns(least.1),
                units::format_bytes(least.0),
                units::format_time_ns(most.1),
                units::format_bytes(most.0),
                units::format_significant(most.1 / least.1),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
