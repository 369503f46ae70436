//! Parts of the time of a write: memory, blocks, write call, fsync call.

use super::{Experiment, ExperimentInfo, Paper};
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct FsParts;

/// The parts, in order.
const PARTS: [&str; 4] = ["memory allocation", "block allocation", "write call", "fsync call"];

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "fs-parts",
    paper: Paper::Memory,
    question: "How much of a write with an fsync every tenth time is memory allocation, block \
           allocation, the write call, the fsync call? Do they add up?",
    published_result: "The parts add up to the total; fsync dominates all of them.",
    caveat: "Where a file system delays giving blocks, their allocation shows in the fsync.",
    parameters: &[
        parameter("writes", "numWrites", "200", "1000"),
        parameter("every", "an fsync comes after so many", "10", "10"),
        parameter("sizes", "writeSize", "512,4096,6000", "512,1024,3000,4096,6000"),
    ],
    subjects: &["dir", "kernel:ext2", "draconis", "model:hdd", "model:ssd"],
    accepts: |kind| !matches!(kind, Kind::Raw | Kind::KeyValue),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for FsParts {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Stacks, "parts", "Time of a write, by part")
                .x("write size", "B")
                .y("time for a write", "ns"),
            Figure::new(Shape::Lines, "small", "Without fsync: memory and write calls")
                .x("write size", "B")
                .y("time for a write", "ns")
                .log_y(),
            Figure::new(Shape::Lines, "adds", "The parts together, of the total")
                .x("write size", "B")
                .y("parts of the total", "%"),
        ]
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let (writes, every) = (context.number("writes")?, context.number("every")?.max(1));
        let mut samples = vec![];
        for size in context.numbers("sizes")? {
            let file = files.create("parts", size * writes, OpenMode::Cached)?;
            file.sync()?;
            let mut parts = [0u64; PARTS.len()];
            let mut allocates = true;
            let started = clock.now_ns();
            let mut watch = Stopwatch::start(&*clock);
            for nth in 0..writes {
                context.check()?;
                // Filled, because the kernel allocates untouched memory lazily.
                let bytes = std::hint::black_box(vec![0x5a; size as usize]);
                parts[0] += watch.lap_ns();
                if allocates {
                    allocates = file.allocate(nth * size, size)?;
                }
                parts[1] += watch.lap_ns();
                file.write(nth * size, &bytes)?;
                parts[2] += watch.lap_ns();
                if (nth + 1) % every == 0 {
                    file.sync()?;
                }
                parts[3] += watch.lap_ns();
            }
            let total = clock.now_ns() - started;
            if !allocates {
                let name = subject.name();
                context.note(format!("{name}: cannot allocate blocks ahead; the calls do it"));
            }
            drop(file);
            files.remove("parts")?;
            let each = |ns: u64| ns as f64 / writes as f64;
            let x = size as f64;
            for (name, ns) in PARTS.into_iter().zip(parts) {
                samples.push(Sample::at("parts", name, x, each(ns)));
                if matches!(name, "memory allocation" | "write call") {
                    samples.push(Sample::at("small", name, x, each(ns)));
                }
            }
            let sum: u64 = parts.iter().sum();
            let adds = if total == 0 { 100.0 } else { sum as f64 * 100.0 / total as f64 };
            samples.push(Sample::at("adds", "", x, adds));
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let mean = |part| points.mean("parts", subject, part);
            let fsync = mean("fsync call")?;
            let all: f64 = PARTS.iter().filter_map(|part| mean(part)).sum();
            let off = points.line("adds", subject, "").into_iter();
            let off = off.map(|(_, adds)| (adds - 100.0).abs()).fold(0.0, f64::max);
            Some(format!(
                "{subject}: fsync is {:.0} % of {} for a write; the parts add up within {:.1} %.",
                fsync * 100.0 / all,
                units::time_ns(all),
                off,
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
