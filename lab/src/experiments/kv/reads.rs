//! Reads of key-value stores, with memory for all of the data and for a part of it.

use std::path::Path;

use anyhow::bail;
use serde::Deserialize;

use super::{
    LatencyQuantiles, VALUE_BYTES_PARAMETER, add_number_argument, helper_command, latency_figure,
};
use crate::child;
use crate::context::RunContext;
use crate::experiments::{Experiment, ExperimentInfo, PaperSource};
use crate::parameters::new_parameter;
use crate::pressure::MemoryPressure;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// All stores; the others are compared with LMDB.
const STORE_NAMES: &[&str] = &["lmdb", "leveldb", "rocksdb", "redb", "fjall", "draconis-kv"];

const KEY_BYTES: u64 = 16;

#[derive(Debug, Deserialize)]
struct PhaseResult {
    count: u64,
    seconds: f64,
    latency: Option<LatencyQuantiles>,
}

impl PhaseResult {
    fn rate(&self) -> f64 {
        self.count as f64 / self.seconds.max(1e-9)
    }
}

/// Result reported by the helper, which fails on any wrong byte.
#[derive(Debug, Deserialize)]
struct ReadBenchmarkResult {
    load: PhaseResult,
    cold_scan: PhaseResult,
    uniform: PhaseResult,
    skewed: PhaseResult,
    scan: PhaseResult,
    overwrite: Option<PhaseResult>,
    again: Option<PhaseResult>,
    disk_bytes: u64,
    peak_bytes: u64,
}

impl ReadBenchmarkResult {
    fn samples(&self, payload_bytes: u64) -> Vec<Sample> {
        let mut samples = vec![];
        let again = self.again.as_ref();
        let reads = [("uniform", Some(&self.uniform)), ("skewed", Some(&self.skewed))];
        for (label, phase) in reads.into_iter().chain([("uniform, after overwrites", again)]) {
            samples.extend(phase.map(|phase| Sample::labelled("rate", "", label, phase.rate())));
        }
        let in_order = [("cold", &self.cold_scan), ("after the reads", &self.scan)];
        for (label, phase) in in_order {
            samples.push(Sample::labelled("scan", "", label, phase.rate()));
        }
        let writes = [("load, batched", Some(&self.load))];
        let overwrite = ("overwrites, one by one", self.overwrite.as_ref());
        for (label, phase) in writes.into_iter().chain([overwrite]) {
            samples.extend(phase.map(|phase| Sample::labelled("writes", "", label, phase.rate())));
        }
        if let Some(latency) = self.uniform.latency {
            samples.extend(latency.samples("tail", "", self.uniform.count));
        }
        let room = self.disk_bytes as f64 / payload_bytes as f64;
        samples.push(Sample::labelled("room", "", "at the end", room));
        if self.peak_bytes > 0 {
            samples.push(Sample::labelled("memory", "", "peak", self.peak_bytes as f64));
        }
        samples
    }
}

/// Returns the bytes of all keys and values.
fn data_bytes(context: &RunContext) -> anyhow::Result<u64> {
    Ok(context.number_parameter("keyspace")? * (context.number_parameter("value")? + KEY_BYTES))
}

/// Runs the helper, which fills and reads a store; for scarce memory, in a control group and with
/// sequential filling.
fn run(
    context: &RunContext,
    store: &str,
    overwrites: u64,
    group: Option<&Path>,
) -> anyhow::Result<Vec<Sample>> {
    let dir = context.workshop.temp_dir()?;
    let mut command = helper_command(context, "kv-read", store, &dir.path().join("store"));
    for name in ["keyspace", "value", "reads", "cache", "most_ms"] {
        add_number_argument(&mut command, name, context.number_parameter(name)?);
    }
    add_number_argument(&mut command, "overwrites", overwrites);
    if let Some(group) = group {
        command.arg("--in-order");
        command.arg("--cgroup").arg(group);
    }
    let outcome: ReadBenchmarkResult =
        serde_json::from_slice(&child::run_and_capture(context, &mut command)?)?;
    Ok(outcome.samples(data_bytes(context)?))
}

/// One of the read experiments.
pub struct KvReadExperiment {
    about: ExperimentInfo,
    /// True if memory holds only a part of the data.
    is_large: bool,
}

/// Common description of the experiments in this file.
const KV_READ_DEFAULTS: ExperimentInfo = ExperimentInfo {
    paper: PaperSource::Draconis,
    subjects: STORE_NAMES,
    accepts: |kind| kind == SubjectKind::KeyValue,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

/// Experiment with memory for all of the data.
pub const KV_READ: KvReadExperiment = KvReadExperiment {
    about: ExperimentInfo {
        name: "kv-read",
        question: "How many values does a store give back in a second, one by one and in order, when \
               memory holds them all?",
        published_result: "Not measured in the paper, which only writes. The question behind it is whether \
                  a store that is quick to write pays for that when it is read.",
        caveat: "Stores are filled in any order, closed, dropped from the kernel's cache, \
            opened, and scanned once before reads are timed. LMDB maps its file, the others copy \
            from the kernel's cache into their own or straight out of it; Draconis reads past the \
            kernel into a cache of its own. Every store hands a copy of the value out, and every \
            value is compared with what was put, while the clock stands still.",
        parameters: &[
            new_parameter("keyspace", "keys, each put once, in any order", "100K", "4M"),
            new_parameter("reads", "reads of each pattern", "100K", "4M"),
            VALUE_BYTES_PARAMETER,
            new_parameter(
                "cache",
                "memory of a store that keeps what it read itself",
                "256M",
                "4G",
            ),
            new_parameter("most_ms", "a phase stops after so many milliseconds", "1000", "30000"),
        ],
        repetitions: (2, 1),
        ..KV_READ_DEFAULTS
    },
    is_large: false,
};

/// Experiment with memory for a part of the data.
pub const KV_LARGE: KvReadExperiment = KvReadExperiment {
    about: ExperimentInfo {
        name: "kv-large",
        question: "What is left of a store's speed when its keys and values are several times what \
               memory holds?",
        published_result: "Figures 5 and 6 vary the key space up to 16 M keys, 8 GB, on a machine with 4 \
                  GB: LevelDB gets slower the larger it is. Reads were not measured.",
        caveat: "Stores are filled in order, since a tree that does not fit takes hours to be \
            filled in any other; overwrites go anywhere. The limit counts the process and what the \
            kernel caches of its files, so nobody gains by leaving caching to the kernel. A read \
            that misses costs one access to the device: stores differ by how much they read for \
            it, by how dense their data is, and by whether the index stays in memory.",
        parameters: &[
            new_parameter("keyspace", "keys, each put once, in order", "250K", "8M"),
            new_parameter("reads", "reads of each pattern", "50K", "1M"),
            new_parameter("overwrites", "keys put again, one by one", "50K", "1M"),
            new_parameter("value", "bytes of a value; keys have 16", "2048", "512"),
            new_parameter("limit", "memory of store and page cache together", "224M", "1G"),
            new_parameter("cache", "the store's own part of that", "32M", "256M"),
            new_parameter("most_ms", "a phase stops after so many milliseconds", "300", "30000"),
        ],
        repetitions: (1, 1),
        ..KV_READ_DEFAULTS
    },
    is_large: true,
};

impl Experiment for KvReadExperiment {
    fn info(&self) -> &ExperimentInfo {
        &self.about
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str, y: &str, unit: &str| {
            Figure::new(FigureShape::Bars, metric, title).with_y_axis(y, unit)
        };
        vec![
            bars("rate", "Point reads in a second, each checked", "reads", "/s").with_log_y(),
            latency_figure("tail", "How long one read takes: uniform"),
            bars("scan", "Pairs in a second, in order", "pairs", "/s").with_log_y(),
            bars("writes", "Puts in a second, not durable", "puts", "/s").with_log_y(),
            bars("memory", "Memory of the process, without mapped files", "memory", "B"),
            bars("room", "Room on the disk for a byte of keys and values", "bytes", ""),
        ]
    }

    /// Space for the data, its log, and tables being merged.
    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(data_bytes(context)? * 4)
    }

    /// Memory of the store and the page cache of its files; or the limit of the control group.
    fn required_memory_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        if self.is_large {
            return context.number_parameter("limit");
        }
        let data = data_bytes(context)?;
        Ok(data + data.min(context.number_parameter("cache")?) * 2)
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        if !self.is_large {
            return run(context, &store, 0, None);
        }
        let limit = context.number_parameter("limit")?;
        let pressure = MemoryPressure::new(limit);
        let Some(group) = pressure.cgroup_dir() else {
            bail!("a control group with a memory limit is needed, so root");
        };
        let data = data_bytes(context)? as f64;
        context.add_note(format!(
            "{} of keys and values, {} times the memory; pressure: {}",
            units::format_bytes(data),
            units::format_significant(data / limit as f64),
            pressure.describe(),
        ));
        run(context, &store, context.number_parameter("overwrites")?, Some(group))
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let of = |metric, label: &str| points.median_of_label(metric, subject, "", label);
            let (uniform, skewed) = (of("rate", "uniform")?, of("rate", "skewed")?);
            let beside = match points.median_of_label("rate", "lmdb", "", "uniform") {
                Some(lmdb) if *subject != "lmdb" => {
                    let ratio = units::format_significant(lmdb / uniform);
                    format!(" (LMDB's time for one, times {ratio})")
                }
                _ => String::new(),
            };
            let tail = points.medians_by_x("tail", subject, "");
            let rare = tail.iter().find(|(x, _)| *x == 1000.0).map_or(String::new(), |(_, ns)| {
                format!("; one read in a thousand takes more than {}", units::format_time_ns(*ns))
            });
            let overwrites = of("writes", "overwrites, one by one").map_or(String::new(), |rate| {
                format!("; overwrites one by one {}", units::format_in_unit(rate, "/s"))
            });
            Some(format!(
                "{subject}: {} uniform{beside}, {} skewed{rare}; in order {} cold, {} warm{overwrites}.",
                units::format_in_unit(uniform, "/s"),
                units::format_in_unit(skewed, "/s"),
                units::format_in_unit(of("scan", "cold")?, "/s"),
                units::format_in_unit(of("scan", "after the reads")?, "/s"),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
