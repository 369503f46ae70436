//! Good, bad and ugly memory reads: the paper's `memoryAnalyzing`.

use std::io::Write;
use std::process::Command;

use serde::Deserialize;

use super::fs_workloads::{format_split, split};
use super::{Experiment, ExperimentInfo, Paper};
use crate::child;
use crate::context::Context;
use crate::machine;
use crate::parameters::parameter;
use crate::pressure::Pressure;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Device, Kind, Subject};
use crate::units;
use draconis_device::Random;

/// One of the memory experiments.
pub struct Mem {
    about: ExperimentInfo,
    what: What,
}

/// Type of measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Good,
    Bad,
    Ugly,
    Sweep,
    Split,
}

/// Common description of the experiments in this file.
const ALL: ExperimentInfo = ExperimentInfo {
    paper: Paper::Memory,
    caveat: "What a fault costs is the device's time for all that is read ahead with the page, \
               wanted or not: a device that reads far ahead makes random reads slower, and the \
               first of a run. There is no head to move, but from bad to good it remains several \
               orders of magnitude.",
    parameters: &[
        parameter("limit", "what memory holds", "32M", "1G"),
        parameter(
            "buffers",
            "memoryToAllocate",
            "8M,16M,24M,48M,96M",
            "128M,256M,512M,768M,1152M,1536M,2G,3G",
        ),
        parameter("reads", "numReads", "100000", "1000000"),
        parameter("run", "sequential reads from one place, of the ugly workload", "500", "500"),
        parameter(
            "runs",
            "numSequentialReads of the sweep",
            "1,10,100,1000",
            "1,2,5,10,20,50,100,200,500,1000",
        ),
        parameter("most_ms", "a pattern stops after so many milliseconds", "200", "3000"),
    ],
    subjects: &["mem"],
    accepts: |kind| kind == Kind::Memory,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

/// Reads in memory, or sequential reads.
pub const GOOD: Mem = Mem {
    about: ExperimentInfo {
        name: "mem-good",
        question: "How fast are reads of a buffer that memory holds, and sequential reads of one that \
               it does not?",
        published_result: "Figures 2 and 3: nanoseconds, as long as the buffer is below what memory holds \
                  (1.5 GB of 2), and in sequence above it too, since pages come 4096 bytes at a \
                  time and ahead.",
        ..ALL
    },
    what: What::Good,
};

/// Random reads beyond memory.
pub const BAD: Mem = Mem {
    about: ExperimentInfo {
        name: "mem-bad",
        question: "How slow are random reads of a buffer by its size, below and above what memory \
               holds?",
        published_result: "Figures 4 and 5: above what memory holds most reads are page faults that take \
                  milliseconds: 0.001 of 100 parts of the throughput.",
        ..ALL
    },
    what: What::Bad,
};

/// Sequential runs from random places, beyond memory.
pub const UGLY: Mem = Mem {
    about: ExperimentInfo {
        name: "mem-ugly",
        question: "How fast are runs of sequential reads from random places of a buffer, by its size?",
        published_result: "Figures 4 and 5: between the two: 21.129 of 100 parts.",
        ..ALL
    },
    what: What::Ugly,
};

/// From bad to good by the length of a run.
pub const SWEEP: Mem = Mem {
    about: ExperimentInfo {
        name: "mem-sweep",
        question: "How does throughput go from bad to good as runs get longer, in a buffer that memory \
               does not hold?",
        published_result: "numSequentialReads from 1 to 1000: near 1 it is the bad workload, near 1000 the \
                  good one.",
        ..ALL
    },
    what: What::Sweep,
};

/// Share of each pattern in the sum of the three speeds.
pub const SPLIT: Mem = Mem {
    about: ExperimentInfo {
        name: "mem-split",
        question: "How is throughput split between good, ugly and bad reads, by the size of the \
               buffer?",
        published_result: "good : ugly : bad = 78.87 : 21.129 : 0.001.",
        ..ALL
    },
    what: What::Split,
};

/// Result reported by the helper for a pattern.
#[derive(Debug, Deserialize)]
struct Outcome {
    run: u64,
    reads: u64,
    ns: u64,
    major_faults: u64,
}

impl Outcome {
    fn read_ns(&self) -> f64 {
        self.ns as f64 / self.reads.max(1) as f64
    }
}

impl Mem {
    /// Returns the run lengths of a pattern: all reads sequential, or each at a random place.
    fn runs(&self, context: &Context, buffer: u64) -> anyhow::Result<Vec<u64>> {
        let (reads, ugly) = (context.number("reads")?, context.number("run")?);
        let below = buffer <= context.number("limit")?;
        Ok(match self.what {
            What::Good if below => vec![reads, 1],
            What::Good => vec![reads],
            What::Bad => vec![1],
            What::Ugly => vec![ugly],
            What::Sweep => context.numbers("runs")?,
            What::Split => vec![reads, ugly, 1],
        })
    }

    fn measure(&self, context: &Context, buffer: u64) -> anyhow::Result<Vec<Outcome>> {
        let workshop = &context.workshop;
        let limit = context.number("limit")?;
        let pressure = Pressure::new(limit);
        let runs = self.runs(context, buffer)?;
        let mut command = Command::new(&workshop.peers);
        command.arg("memory").arg("--bytes").arg(buffer.to_string());
        command.arg("--reads").arg(context.number("reads")?.to_string());
        command.arg("--most-ms").arg(context.number("most_ms")?.to_string());
        command.arg("--seed").arg((context.seed + context.repetition).to_string());
        let runs: Vec<String> = runs.iter().map(u64::to_string).collect();
        command.arg("--runs").arg(runs.join(","));
        let swap = machine::memory("SwapFree:").unwrap_or(0);
        let file;
        let pages = if swap > buffer {
            "anonymous memory that goes to swap"
        } else {
            file = make_file(context, buffer)?;
            command.arg("--file").arg(file.path());
            "pages of a file (there is no swap)"
        };
        match pressure.group() {
            Some(group) => command.arg("--cgroup").arg(group),
            None => command.arg("--page-out-above").arg(limit.to_string()),
        };
        context.note(format!("pressure: {}; {pages}", pressure.describe()));
        let device = Device::of(&workshop.dir);
        if let Some(kib) = device.and_then(|device| device.queue("read_ahead_kb")) {
            context.note(format!("a page that is missing may bring {kib} KiB of neighbours along"));
        }
        Ok(serde_json::from_slice(&child::output(context, &mut command)?)?)
    }
}

/// Creates a file that is on the device and in no cache.
fn make_file(context: &Context, bytes: u64) -> anyhow::Result<tempfile::NamedTempFile> {
    let mut file = context.workshop.file()?;
    let mut piece = vec![0; 1 << 20];
    let mut dice = Random::new(context.seed);
    dice.fill(&mut piece);
    let mut left = bytes;
    while left > 0 {
        context.check()?;
        let len = left.min(piece.len() as u64);
        file.write_all(&piece[..len as usize])?;
        left -= len;
    }
    file.as_file().sync_all()?;
    // Page cache is charged to the process that fills it, which must be the child.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(file)
}

fn series(run: u64, reads: u64) -> &'static str {
    match run {
        1 => "random",
        run if run >= reads => "sequential",
        _ => "runs",
    }
}

impl Experiment for Mem {
    fn about(&self) -> &ExperimentInfo {
        &self.about
    }

    fn figures(&self) -> Vec<Figure> {
        let lines = |metric: &str, title: &str| Figure::new(Shape::Lines, metric, title);
        match self.what {
            What::Sweep => vec![
                lines("rate", "Throughput by the length of a run")
                    .x("sequential reads from one place", "")
                    .y("reads", "/s")
                    .log_x()
                    .log_y(),
            ],
            What::Split => vec![
                Figure::new(Shape::Stacks, "split", "Throughput split")
                    .x("buffer", "B")
                    .y("part of the throughput", "%"),
            ],
            _ => vec![
                lines("latency", "Latency of a read")
                    .x("buffer", "B")
                    .y("time for a read", "ns")
                    .log_x()
                    .log_y(),
                lines("rate", "Throughput").x("buffer", "B").y("reads", "/s").log_x().log_y(),
                lines("faults", "Reads that waited for the device")
                    .x("buffer", "B")
                    .y("of 1000 reads", "")
                    .log_x(),
            ],
        }
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        Ok(context.numbers("buffers")?.into_iter().max().unwrap_or(0))
    }

    fn memory_bytes(&self, context: &Context) -> anyhow::Result<u64> {
        context.number("limit")
    }

    fn run(&self, context: &Context, _: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let reads = context.number("reads")?;
        let mut buffers = context.numbers("buffers")?;
        if self.what == What::Sweep {
            buffers = buffers.into_iter().max().into_iter().collect();
        }
        let mut samples = vec![];
        for buffer in buffers {
            context.check()?;
            let outcomes = self.measure(context, buffer)?;
            let x = buffer as f64;
            match self.what {
                What::Sweep => samples.extend(outcomes.iter().map(|outcome| {
                    Sample::at("rate", "", outcome.run as f64, 1e9 / outcome.read_ns())
                })),
                What::Split => {
                    let names = ["good", "ugly", "bad"];
                    let rate = |outcome: &Outcome| 1e9 / outcome.read_ns();
                    let rates: Vec<_> = names.into_iter().zip(outcomes.iter().map(rate)).collect();
                    samples.extend(split("split", x, &rates));
                }
                _ => {
                    for outcome in &outcomes {
                        let series = series(outcome.run, reads);
                        let faults =
                            outcome.major_faults as f64 * 1000.0 / outcome.reads.max(1) as f64;
                        samples.push(Sample::at("latency", series, x, outcome.read_ns()));
                        samples.push(Sample::at("rate", series, x, 1e9 / outcome.read_ns()));
                        samples.push(Sample::at("faults", series, x, faults));
                    }
                }
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let mut found = vec![];
        match self.what {
            What::Split => {
                found.extend(
                    format_split(points, "split", "mem")
                        .map(|text| format!("In the mean over all buffers {text}.")),
                );
                let last = |series| points.line("split", "mem", series).last().copied();
                if let (Some((buffer, good)), Some((_, ugly)), Some((_, bad))) =
                    (last("good"), last("ugly"), last("bad"))
                {
                    let text = units::significant;
                    found.push(format!(
                        "With a buffer of {}: {} : {} : {}.",
                        units::bytes(buffer),
                        text(good),
                        text(ugly),
                        text(bad),
                    ));
                }
            }
            What::Sweep => {
                let line = points.line("rate", "mem", "");
                if let (Some(first), Some(last)) = (line.first(), line.last()) {
                    found.push(format!(
                        "{} in runs of {}, {} in runs of {}: {} times.",
                        units::in_unit(first.1, "/s"),
                        first.0,
                        units::in_unit(last.1, "/s"),
                        last.0,
                        units::significant(last.1 / first.1),
                    ));
                }
            }
            _ => {
                for series in points.series("latency", "mem") {
                    let line = points.line("latency", "mem", series);
                    if let (Some(first), Some(last)) = (line.first(), line.last()) {
                        found.push(format!(
                            "{series}: {} for a read of a buffer of {}, {} of one of {}.",
                            units::time_ns(first.1),
                            units::bytes(first.0),
                            units::time_ns(last.1),
                            units::bytes(last.0),
                        ));
                    }
                }
            }
        }
        found
    }
}
