//! Small fsyncs next to a large one.

use std::sync::Barrier;

use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct FsCompete;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "fs-compete",
    paper: Paper::Memory,
    question: "What do ten fsyncs of small writes cost while another thread makes one large file \
           durable?",
    published_result: "One fsync at a time on a disk: the small ones wait for the large one, and longer the \
              larger it is (1 KB to 400 MB).",
    caveat: "Where the device takes writes fast enough, or the file systems lie in different \
               files of one device, the large fsync does not hold the small ones up for long.",
    parameters: &[
        parameter("syncs", "fsyncs of the first thread", "10", "10"),
        parameter("small", "bytes before each", "1024", "1024"),
        parameter(
            "large",
            "bytes that the second thread makes durable",
            "1K,256K,4M,32M",
            "1K,16K,256K,4M,16M,64M,128M,256M,400M",
        ),
    ],
    subjects: &["dir", "kernel:ext2", "draconis"],
    accepts: |kind| // Two threads in modelled time would not be reproducible.
        matches!(kind, Kind::Directory | Kind::Library | Kind::Memory),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for FsCompete {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Lines, "time", "Ten small fsyncs beside a large one")
                .x("what the other makes durable", "B")
                .y("time for all of the first", "ns")
                .log_x()
                .log_y(),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        Ok(context.numbers("large")?.into_iter().max().unwrap_or(0) + (16 << 20))
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let (syncs, small) = (context.number("syncs")?, context.number("small")?);
        let mut samples = vec![];
        for large in context.numbers("large")? {
            context.check()?;
            let first = files.create("small", small * syncs, OpenMode::Cached)?;
            let second = files.create("large", large, OpenMode::Cached)?;
            let piece = Buffer::new(large.min(1 << 20) as usize);
            let mut at = 0;
            while at < large {
                let len = (large - at).min(piece.len() as u64) as usize;
                second.write(at, &piece[..len])?;
                at += len as u64;
            }
            let bytes = Buffer::new(small as usize);
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
            samples.push(Sample::at("time", "", large as f64, ns as f64));
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let line = points.line("time", subject, "");
            let (least, most) = (line.first()?, line.last()?);
            Some(format!(
                "{subject}: {} beside {}, {} beside {}: {} times.",
                units::time_ns(least.1),
                units::bytes(least.0),
                units::time_ns(most.1),
                units::bytes(most.0),
                units::significant(most.1 / least.1),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
