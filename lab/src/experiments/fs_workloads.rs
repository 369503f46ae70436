//! Good, bad and ugly file system workloads, and their ratios.

use super::writing::write_and_fsync;
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::{Parameter, new_parameter};
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// One of the three workloads.
pub struct FsWorkload(ExperimentInfo);

const WRITES_PARAMETER: Parameter = new_parameter("writes", "numWrites", "100", "1000");
const WRITE_SIZES_PARAMETER: Parameter =
    new_parameter("sizes", "writeSize", "512,1024,3000,4096,6000", "512,1024,3000,4096,6000");

/// Common description of the experiments in this file.
const FS_WORKLOAD_DEFAULTS: ExperimentInfo = ExperimentInfo {
    paper: PaperSource::Memory,
    caveat: "A good write is a copy into the page cache, wherever that is kept; what an fsync \
               costs is the device's: some 8 ms for a turn of the platter, a millisecond or less \
               where nothing turns. So the distance between good and bad is the paper's on \
               model:hdd and a few tens on flash. Mounted by FUSE, each write is a message as \
               well.",
    subjects: &["dir", "kernel:ext2", "draconis", "model:hdd", "model:ssd"],
    accepts: |kind| !matches!(kind, SubjectKind::Raw | SubjectKind::KeyValue),
    ..ExperimentInfo::DEFAULTS
};

/// Workload without an fsync in the middle.
pub const FS_GOOD: FsWorkload = FsWorkload(ExperimentInfo {
    name: "fs-good",
    question: "How fast are writes that nobody waits for (fsync percentage 100: none in the middle)?",
    published_result: "Latency is that of the buffer cache: the good one of good : ugly : bad = 78.29 : \
              21.66 : 0.05. A logger of what may be lost works so.",
    parameters: &[
        WRITES_PARAMETER,
        WRITE_SIZES_PARAMETER,
        new_parameter("percents", "fsyncPercentage", "100", "100"),
    ],
    ..FS_WORKLOAD_DEFAULTS
});

/// Workload with an fsync after nearly each write.
pub const FS_BAD: FsWorkload = FsWorkload(ExperimentInfo {
    name: "fs-bad",
    question: "How fast are writes that are made durable nearly one by one (0.1 to 1 %)?",
    published_result: "Horrible: 0.05 of 100 parts of the throughput. A database's log or a mail server \
              works so.",
    parameters: &[
        WRITES_PARAMETER,
        WRITE_SIZES_PARAMETER,
        new_parameter("percents", "fsyncPercentage", "0.1", "0.1,1"),
    ],
    ..FS_WORKLOAD_DEFAULTS
});

/// Workload with an occasional fsync.
pub const FS_UGLY: FsWorkload = FsWorkload(ExperimentInfo {
    name: "fs-ugly",
    question: "How fast are writes that are made durable now and then (5 to 15 %)?",
    published_result: "In between: 21.66 of 100 parts. A download manager works so.",
    parameters: &[
        WRITES_PARAMETER,
        WRITE_SIZES_PARAMETER,
        new_parameter("percents", "fsyncPercentage", "5", "5,15"),
    ],
    ..FS_WORKLOAD_DEFAULTS
});

impl Experiment for FsWorkload {
    fn info(&self) -> &ExperimentInfo {
        &self.0
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "latency", "Latency of a write")
                .with_x_axis("write size", "B")
                .with_y_axis("time for a write", "ns")
                .with_log_y(),
            Figure::new(FigureShape::Lines, "speed", "Throughput")
                .with_x_axis("write size", "B")
                .with_y_axis("written", "B/s")
                .with_log_y(),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let writes = context.number_parameter("writes")?;
        let mut samples = vec![];
        for percent in context.fraction_list_parameter("percents")? {
            let series = format!("{percent} %");
            for size in context.number_list_parameter("sizes")? {
                let ns = write_and_fsync(context, subject, size, writes, percent)? as f64;
                let speed = (size * writes) as f64 * 1e9 / ns;
                samples.push(Sample::at_x("latency", &series, size as f64, ns / writes as f64));
                samples.push(Sample::at_x("speed", &series, size as f64, speed));
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let series = *points.series("latency", subject).first()?;
            Some(format!(
                "{subject}: {} for a write of 4096 bytes, {}.",
                units::format_time_ns(points.median_at("latency", subject, series, 4096.0)?),
                units::format_in_unit(points.median_at("speed", subject, series, 4096.0)?, "B/s"),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// From bad to good by the fsync percentage.
pub struct FsyncIntervalSweep;

const FS_SWEEP: ExperimentInfo = ExperimentInfo {
    name: "fs-sweep",
    question: "How does throughput go from bad to good as fsyncs become rare?",
    published_result: "Close to 0 % it is the bad workload, close to 100 % the good one, and it rises all \
              the way between.",
    caveat: "Each fsync costs the same, so throughput grows with the writes between two, until \
               the copying itself is what takes the time. On model:hdd the last step is the \
               largest: one turn of the platter or none.",
    parameters: &[
        new_parameter("writes", "numWrites", "200", "1000"),
        new_parameter("size", "writeSize", "4096", "4096"),
        new_parameter(
            "percents",
            "fsyncPercentage",
            "0.5,2,5,10,25,50,100",
            "0.1,0.2,0.5,1,2,5,10,20,50,100",
        ),
    ],
    ..FS_WORKLOAD_DEFAULTS
};

impl Experiment for FsyncIntervalSweep {
    fn info(&self) -> &ExperimentInfo {
        &FS_SWEEP
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Lines, "speed", "Throughput by fsync percentage")
                .with_x_axis("fsync percentage", "")
                .with_y_axis("written", "B/s")
                .with_log_x()
                .with_log_y(),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (writes, size) =
            (context.number_parameter("writes")?, context.number_parameter("size")?);
        let mut samples = vec![];
        for percent in context.fraction_list_parameter("percents")? {
            let ns = write_and_fsync(context, subject, size, writes, percent)?;
            let speed = (size * writes) as f64 * 1e9 / ns as f64;
            samples.push(Sample::at_x("speed", "", percent, speed));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let line = points.medians_by_x("speed", subject, "");
            let (least, most) = (line.first()?, line.last()?);
            Some(format!(
                "{subject}: {} at {} %, {} at {} %: {} times.",
                units::format_in_unit(least.1, "B/s"),
                least.0,
                units::format_in_unit(most.1, "B/s"),
                most.0,
                units::format_significant(most.1 / least.1),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// Share of each workload in the sum of the three speeds.
pub struct WorkloadShareExperiment;

const FS_SPLIT: ExperimentInfo = ExperimentInfo {
    name: "fs-split",
    question: "How is throughput split between the good, the ugly and the bad workload, by write size?",
    published_result: "good : ugly : bad = 78.29 : 21.66 : 0.05. At 6000 bytes, more than a block, the ugly \
              one loses: more blocks to allocate and write each time.",
    caveat: "The parts follow from what an fsync costs: thousands of writes on model:hdd, where \
               bad all but vanishes as in the paper; some tens of writes where nothing turns, so \
               bad keeps a percent or two. 6000 bytes do not hurt the ugly one here: blocks are \
               given when they are written back and several go in one request, so an fsync that \
               carries more bytes costs hardly more.",
    parameters: &[
        WRITES_PARAMETER,
        WRITE_SIZES_PARAMETER,
        new_parameter("percents", "fsync percentages: good, ugly, bad", "100,5,0.1", "100,5,0.1"),
    ],
    ..FS_WORKLOAD_DEFAULTS
};

impl Experiment for WorkloadShareExperiment {
    fn info(&self) -> &ExperimentInfo {
        &FS_SPLIT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Stacks, "split", "Throughput split")
                .with_x_axis("write size", "B")
                .with_y_axis("part of the throughput", "%"),
            Figure::new(FigureShape::Lines, "ugly", "The ugly workload by write size")
                .with_x_axis("write size", "B")
                .with_y_axis("written", "B/s")
                .with_log_y(),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let writes = context.number_parameter("writes")?;
        let percents = context.fraction_list_parameter("percents")?;
        let mut samples = vec![];
        for size in context.number_list_parameter("sizes")? {
            let mut speeds = vec![];
            for (name, percent) in ["good", "ugly", "bad"].into_iter().zip(&percents) {
                let ns = write_and_fsync(context, subject, size, writes, *percent)? as f64;
                speeds.push((name, (size * writes) as f64 * 1e9 / ns));
            }
            samples.extend(share_samples("split", size as f64, &speeds));
            let ugly = speeds.iter().filter(|(name, _)| *name == "ugly");
            samples.extend(ugly.map(|(_, speed)| Sample::at_x("ugly", "", size as f64, *speed)));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let split = format_split(points, "split", subject)?;
            let at = |size| points.median_at("ugly", subject, "", size);
            let change = (at(6000.0)? / at(4096.0)? - 1.0) * 100.0;
            Some(format!(
                "{subject}: {split}; the ugly one changes by {change:+.0} % from 4096 to 6000."
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// Returns the shares in percent.
pub fn share_samples(metric: &'static str, x: f64, speeds: &[(&'static str, f64)]) -> Vec<Sample> {
    let all: f64 = speeds.iter().map(|(_, speed)| speed).sum();
    let part = |(name, speed): &(&str, f64)| Sample::at_x(metric, name, x, speed * 100.0 / all);
    speeds.iter().map(part).collect()
}

/// Formats `good : ugly : bad = ...`, as means over all places.
pub fn format_split(points: PointQuery<'_>, metric: &str, subject: &str) -> Option<String> {
    let mean = |series| points.mean_of_medians(metric, subject, series);
    let (good, ugly, bad) = (mean("good")?, mean("ugly")?, mean("bad")?);
    let text = units::format_significant;
    Some(format!("good : ugly : bad = {} : {} : {}", text(good), text(ugly), text(bad)))
}
