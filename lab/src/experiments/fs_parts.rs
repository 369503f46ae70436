//! Parts of the time of a write: memory, blocks, write call, fsync call.

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct WriteCostPartsExperiment;

/// The parts, in order.
const COST_PARTS: [&str; 4] = ["memory allocation", "block allocation", "write call", "fsync call"];

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "fs-parts",
    paper: PaperSource::Memory,
    question: "How much of a write with an fsync every tenth time is memory allocation, block \
           allocation, the write call, the fsync call? Do they add up?",
    published_result: "The parts add up to the total; fsync dominates all of them.",
    caveat: "Where a file system delays giving blocks, their allocation shows in the fsync.",
    parameters: &[
        new_parameter("writes", "numWrites", "200", "1000"),
        new_parameter("every", "an fsync comes after so many", "10", "10"),
        new_parameter("sizes", "writeSize", "512,4096,6000", "512,1024,3000,4096,6000"),
    ],
    subjects: &["dir", "kernel:ext2", "draconis", "model:hdd", "model:ssd"],
    accepts: |kind| !matches!(kind, SubjectKind::Raw | SubjectKind::KeyValue),
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for WriteCostPartsExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Stacks, "parts", "Time of a write, by part")
                .with_x_axis("write size", "B")
                .with_y_axis("time for a write", "ns"),
            Figure::new(FigureShape::Lines, "small", "Without fsync: memory and write calls")
                .with_x_axis("write size", "B")
                .with_y_axis("time for a write", "ns")
                .with_log_y(),
            Figure::new(FigureShape::Lines, "adds", "The parts together, of the total")
                .with_x_axis("write size", "B")
                .with_y_axis("parts of the total", "%"),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let (writes, every) =
            (context.number_parameter("writes")?, context.number_parameter("every")?.max(1));
        let mut samples = vec![];
        for size in context.number_list_parameter("sizes")? {
            let file = files.create("parts", size * writes, OpenMode::Cached)?;
            file.sync()?;
            let mut parts = [0u64; COST_PARTS.len()];
            let mut allocates = true;
            let started = clock.now_ns();
            let mut watch = Stopwatch::start(&*clock);
            for nth in 0..writes {
                context.check_not_stopped()?;
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
                context.add_note(format!("{name}: cannot allocate blocks ahead; the calls do it"));
            }
            drop(file);
            files.remove("parts")?;
            let each = |ns: u64| ns as f64 / writes as f64;
            let x = size as f64;
            for (name, ns) in COST_PARTS.into_iter().zip(parts) {
                samples.push(Sample::at_x("parts", name, x, each(ns)));
                if matches!(name, "memory allocation" | "write call") {
                    samples.push(Sample::at_x("small", name, x, each(ns)));
                }
            }
            let sum: u64 = parts.iter().sum();
            let adds = if total == 0 { 100.0 } else { sum as f64 * 100.0 / total as f64 };
            samples.push(Sample::at_x("adds", "", x, adds));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let mean = |part| points.mean_of_medians("parts", subject, part);
            let fsync = mean("fsync call")?;
            let all: f64 = COST_PARTS.iter().filter_map(|part| mean(part)).sum();
            let off = points.medians_by_x("adds", subject, "").into_iter();
            let off = off.map(|(_, adds)| (adds - 100.0).abs()).fold(0.0, f64::max);
            Some(format!(
                "{subject}: fsync is {:.0} % of {} for a write; the parts add up within {:.1} %.",
                fsync * 100.0 / all,
                units::format_time_ns(all),
                off,
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
