//! Good, bad and ugly memory reads: the paper's `memoryAnalyzing`.

use std::io::Write;
use std::process::Command;

use serde::Deserialize;

use super::fs_workloads::{format_split, share_samples};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::child;
use crate::context::RunContext;
use crate::machine;
use crate::parameters::new_parameter;
use crate::pressure::MemoryPressure;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{BlockDeviceCounters, Subject, SubjectKind};
use crate::units;
use draconis_device::Random;

/// One of the memory experiments.
pub struct MemoryReadExperiment {
    about: ExperimentInfo,
    what: ReadPattern,
}

/// Type of measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadPattern {
    Good,
    Bad,
    Ugly,
    Sweep,
    Split,
}

/// Common description of the experiments in this file.
const MEMORY_READ_DEFAULTS: ExperimentInfo = ExperimentInfo {
    paper: PaperSource::Memory,
    caveat: "What a fault costs is the device's time for all that is read ahead with the page, \
               wanted or not: a device that reads far ahead makes random reads slower, and the \
               first of a run. There is no head to move, but from bad to good it remains several \
               orders of magnitude.",
    parameters: &[
        new_parameter("limit", "what memory holds", "32M", "1G"),
        new_parameter(
            "buffers",
            "memoryToAllocate",
            "8M,16M,24M,48M,96M",
            "128M,256M,512M,768M,1152M,1536M,2G,3G",
        ),
        new_parameter("reads", "numReads", "100000", "1000000"),
        new_parameter("run", "sequential reads from one place, of the ugly workload", "500", "500"),
        new_parameter(
            "runs",
            "numSequentialReads of the sweep",
            "1,10,100,1000",
            "1,2,5,10,20,50,100,200,500,1000",
        ),
        new_parameter("most_ms", "a pattern stops after so many milliseconds", "200", "3000"),
    ],
    subjects: &["mem"],
    accepts: |kind| kind == SubjectKind::Memory,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

/// Reads in memory, or sequential reads.
pub const MEM_GOOD: MemoryReadExperiment = MemoryReadExperiment {
    about: ExperimentInfo {
        name: "mem-good",
        question: "How fast are reads of a buffer that memory holds, and sequential reads of one that \
               it does not?",
        published_result: "Figures 2 and 3: nanoseconds, as long as the buffer is below what memory holds \
                  (1.5 GB of 2), and in sequence above it too, since pages come 4096 bytes at a \
                  time and ahead.",
        ..MEMORY_READ_DEFAULTS
    },
    what: ReadPattern::Good,
};

/// Random reads beyond memory.
pub const MEM_BAD: MemoryReadExperiment = MemoryReadExperiment {
    about: ExperimentInfo {
        name: "mem-bad",
        question: "How slow are random reads of a buffer by its size, below and above what memory \
               holds?",
        published_result: "Figures 4 and 5: above what memory holds most reads are page faults that take \
                  milliseconds: 0.001 of 100 parts of the throughput.",
        ..MEMORY_READ_DEFAULTS
    },
    what: ReadPattern::Bad,
};

/// Sequential runs from random places, beyond memory.
pub const MEM_UGLY: MemoryReadExperiment = MemoryReadExperiment {
    about: ExperimentInfo {
        name: "mem-ugly",
        question: "How fast are runs of sequential reads from random places of a buffer, by its size?",
        published_result: "Figures 4 and 5: between the two: 21.129 of 100 parts.",
        ..MEMORY_READ_DEFAULTS
    },
    what: ReadPattern::Ugly,
};

/// From bad to good by the length of a run.
pub const MEM_SWEEP: MemoryReadExperiment = MemoryReadExperiment {
    about: ExperimentInfo {
        name: "mem-sweep",
        question: "How does throughput go from bad to good as runs get longer, in a buffer that memory \
               does not hold?",
        published_result: "numSequentialReads from 1 to 1000: near 1 it is the bad workload, near 1000 the \
                  good one.",
        ..MEMORY_READ_DEFAULTS
    },
    what: ReadPattern::Sweep,
};

/// Share of each pattern in the sum of the three speeds.
pub const MEM_SPLIT: MemoryReadExperiment = MemoryReadExperiment {
    about: ExperimentInfo {
        name: "mem-split",
        question: "How is throughput split between good, ugly and bad reads, by the size of the \
               buffer?",
        published_result: "good : ugly : bad = 78.87 : 21.129 : 0.001.",
        ..MEMORY_READ_DEFAULTS
    },
    what: ReadPattern::Split,
};

/// Result reported by the helper for a pattern.
#[derive(Debug, Deserialize)]
struct PatternResult {
    run: u64,
    reads: u64,
    ns: u64,
    major_faults: u64,
}

impl PatternResult {
    fn read_ns(&self) -> f64 {
        self.ns as f64 / self.reads.max(1) as f64
    }
}

impl MemoryReadExperiment {
    /// Returns the run lengths of a pattern: all reads sequential, or each at a random place.
    fn run_lengths(&self, context: &RunContext, buffer: u64) -> anyhow::Result<Vec<u64>> {
        let (reads, ugly) = (context.number_parameter("reads")?, context.number_parameter("run")?);
        let below = buffer <= context.number_parameter("limit")?;
        Ok(match self.what {
            ReadPattern::Good if below => vec![reads, 1],
            ReadPattern::Good => vec![reads],
            ReadPattern::Bad => vec![1],
            ReadPattern::Ugly => vec![ugly],
            ReadPattern::Sweep => context.number_list_parameter("runs")?,
            ReadPattern::Split => vec![reads, ugly, 1],
        })
    }

    fn measure(&self, context: &RunContext, buffer: u64) -> anyhow::Result<Vec<PatternResult>> {
        let workshop = &context.workshop;
        let limit = context.number_parameter("limit")?;
        let pressure = MemoryPressure::new(limit);
        let runs = self.run_lengths(context, buffer)?;
        let mut command = Command::new(&workshop.peers);
        command.arg("memory").arg("--bytes").arg(buffer.to_string());
        command.arg("--reads").arg(context.number_parameter("reads")?.to_string());
        command.arg("--most-ms").arg(context.number_parameter("most_ms")?.to_string());
        command.arg("--seed").arg((context.seed + context.repetition).to_string());
        let runs: Vec<String> = runs.iter().map(u64::to_string).collect();
        command.arg("--runs").arg(runs.join(","));
        let swap = machine::meminfo_bytes("SwapFree:").unwrap_or(0);
        let file;
        let pages = if swap > buffer {
            "anonymous memory that goes to swap"
        } else {
            file = make_file(context, buffer)?;
            command.arg("--file").arg(file.path());
            "pages of a file (there is no swap)"
        };
        match pressure.cgroup_dir() {
            Some(group) => command.arg("--cgroup").arg(group),
            None => command.arg("--page-out-above").arg(limit.to_string()),
        };
        context.add_note(format!("pressure: {}; {pages}", pressure.describe()));
        let device = BlockDeviceCounters::of_path(&workshop.dir);
        if let Some(kib) = device.and_then(|device| device.queue_attribute("read_ahead_kb")) {
            context.add_note(format!(
                "a page that is missing may bring {kib} KiB of neighbours along"
            ));
        }
        Ok(serde_json::from_slice(&child::run_and_capture(context, &mut command)?)?)
    }
}

/// Creates a file that is on the device and in no cache.
fn make_file(context: &RunContext, bytes: u64) -> anyhow::Result<tempfile::NamedTempFile> {
    let mut file = context.workshop.temp_file()?;
    let mut piece = vec![0; 1 << 20];
    let mut dice = Random::new(context.seed);
    dice.fill(&mut piece);
    let mut left = bytes;
    while left > 0 {
        context.check_not_stopped()?;
        let len = left.min(piece.len() as u64);
        file.write_all(&piece[..len as usize])?;
        left -= len;
    }
    file.as_file().sync_all()?;
    // Page cache is charged to the process that fills it, which must be the child.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(file)
}

fn pattern_name(run: u64, reads: u64) -> &'static str {
    match run {
        1 => "random",
        run if run >= reads => "sequential",
        _ => "runs",
    }
}

impl Experiment for MemoryReadExperiment {
    fn info(&self) -> &ExperimentInfo {
        &self.about
    }

    fn figures(&self) -> Vec<Figure> {
        let lines = |metric: &str, title: &str| Figure::new(FigureShape::Lines, metric, title);
        match self.what {
            ReadPattern::Sweep => vec![
                lines("rate", "Throughput by the length of a run")
                    .with_x_axis("sequential reads from one place", "")
                    .with_y_axis("reads", "/s")
                    .with_log_x()
                    .with_log_y(),
            ],
            ReadPattern::Split => vec![
                Figure::new(FigureShape::Stacks, "split", "Throughput split")
                    .with_x_axis("buffer", "B")
                    .with_y_axis("part of the throughput", "%"),
            ],
            _ => vec![
                lines("latency", "Latency of a read")
                    .with_x_axis("buffer", "B")
                    .with_y_axis("time for a read", "ns")
                    .with_log_x()
                    .with_log_y(),
                lines("rate", "Throughput")
                    .with_x_axis("buffer", "B")
                    .with_y_axis("reads", "/s")
                    .with_log_x()
                    .with_log_y(),
                lines("faults", "Reads that waited for the device")
                    .with_x_axis("buffer", "B")
                    .with_y_axis("of 1000 reads", "")
                    .with_log_x(),
            ],
        }
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(context.number_list_parameter("buffers")?.into_iter().max().unwrap_or(0))
    }

    fn required_memory_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("limit")
    }

    fn run(&self, context: &RunContext, _: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let reads = context.number_parameter("reads")?;
        let mut buffers = context.number_list_parameter("buffers")?;
        if self.what == ReadPattern::Sweep {
            buffers = buffers.into_iter().max().into_iter().collect();
        }
        let mut samples = vec![];
        for buffer in buffers {
            context.check_not_stopped()?;
            let outcomes = self.measure(context, buffer)?;
            let x = buffer as f64;
            match self.what {
                ReadPattern::Sweep => samples.extend(outcomes.iter().map(|outcome| {
                    Sample::at_x("rate", "", outcome.run as f64, 1e9 / outcome.read_ns())
                })),
                ReadPattern::Split => {
                    let names = ["good", "ugly", "bad"];
                    let rate = |outcome: &PatternResult| 1e9 / outcome.read_ns();
                    let rates: Vec<_> = names.into_iter().zip(outcomes.iter().map(rate)).collect();
                    samples.extend(share_samples("split", x, &rates));
                }
                _ => {
                    for outcome in &outcomes {
                        let series = pattern_name(outcome.run, reads);
                        let faults =
                            outcome.major_faults as f64 * 1000.0 / outcome.reads.max(1) as f64;
                        samples.push(Sample::at_x("latency", series, x, outcome.read_ns()));
                        samples.push(Sample::at_x("rate", series, x, 1e9 / outcome.read_ns()));
                        samples.push(Sample::at_x("faults", series, x, faults));
                    }
                }
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let mut found = vec![];
        match self.what {
            ReadPattern::Split => {
                found.extend(
                    format_split(points, "split", "mem")
                        .map(|text| format!("In the mean over all buffers {text}.")),
                );
                let last = |series| points.medians_by_x("split", "mem", series).last().copied();
                if let (Some((buffer, good)), Some((_, ugly)), Some((_, bad))) =
                    (last("good"), last("ugly"), last("bad"))
                {
                    let text = units::format_significant;
                    found.push(format!(
                        "With a buffer of {}: {} : {} : {}.",
                        units::format_bytes(buffer),
                        text(good),
                        text(ugly),
                        text(bad),
                    ));
                }
            }
            ReadPattern::Sweep => {
                let line = points.medians_by_x("rate", "mem", "");
                if let (Some(first), Some(last)) = (line.first(), line.last()) {
                    found.push(format!(
                        "{} in runs of {}, {} in runs of {}: {} times.",
                        units::format_in_unit(first.1, "/s"),
                        first.0,
                        units::format_in_unit(last.1, "/s"),
                        last.0,
                        units::format_significant(last.1 / first.1),
                    ));
                }
            }
            _ => {
                for series in points.series("latency", "mem") {
                    let line = points.medians_by_x("latency", "mem", series);
                    if let (Some(first), Some(last)) = (line.first(), line.last()) {
                        found.push(format!(
                            "{series}: {} for a read of a buffer of {}, {} of one of {}.",
                            units::format_time_ns(first.1),
                            units::format_bytes(first.0),
                            units::format_time_ns(last.1),
                            units::format_bytes(last.0),
                        ));
                    }
                }
            }
        }
        found
    }
}
