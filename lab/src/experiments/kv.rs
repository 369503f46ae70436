//! Key-value stores under writes: sequential, and skewed (90 % to a tenth of the keys).

mod buckets;
mod durable;
mod reads;

use std::path::Path;
use std::process::Command;

use anyhow::bail;
use serde::Deserialize;

pub use buckets::KvBucketExperiment;
pub use durable::KvDurableCallsExperiment;
pub use reads::{KV_LARGE, KV_READ};

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::child;
use crate::context::RunContext;
use crate::parameters::{Parameter, new_parameter};
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// One of the write experiments.
pub struct KvWriteExperiment {
    about: ExperimentInfo,
    sync: bool,
}

/// Memory limit of each store; the defaults differ: ours has 256 MiB, LevelDB 12.
const CACHE_PARAMETER: Parameter = new_parameter(
    "cache",
    "memory of each store, for what it read and what it has not written",
    "256M",
    "256M",
);

/// Description of the memory limits for the report.
const MEMORY_DESCRIPTION: &str = "Every store has the same memory (cache=), three quarters of it for what it \
    read and one for what it has not written: LevelDB a block cache and two write buffers of an \
    eighth, RocksDB a block cache and optimize_level_style_compaction of a quarter with a thread \
    for each processor, as its tuning guide begins, fjall a cache and that much of journals, redb \
    and Draconis a cache. LMDB has no memory of its own: it is the kernel's cache of its file.";

const VALUE_BYTES_PARAMETER: Parameter =
    new_parameter("value", "bytes of a value; keys have 16", "512", "512");

/// Common description of the experiments in this file.
const KV_DEFAULTS: ExperimentInfo = ExperimentInfo {
    paper: PaperSource::Draconis,
    subjects: STORE_NAMES,
    accepts: |kind| kind == SubjectKind::KeyValue,
    repetitions: (2, 1),
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

/// Puts without waiting for durability.
pub const KV_ASYNC: KvWriteExperiment = KvWriteExperiment {
    about: ExperimentInfo {
        name: "kv-async",
        question: "How many asynchronous puts does a store take in a second, in order and skewed, by \
               its key space, and what does it move meanwhile?",
        published_result: "Figures 4 to 6: LevelDB takes skewed puts more than 4 times slower than ordered \
                  ones, on both devices: over thirty thousand compactions against none, the same \
                  number of level-0 tables; slower still as the key space grows.",
        parameters: &[
            new_parameter("keyspaces", "keys to choose from", "20K,80K", "1M,4M,16M"),
            new_parameter("puts", "puts of each run (the paper: 8 GB of them)", "80K", "16M"),
            VALUE_BYTES_PARAMETER,
            CACHE_PARAMETER,
            new_parameter("writers", "threads that put", "1", "1"),
            new_parameter("most_ms", "a run stops after so many milliseconds", "700", "60000"),
        ],
        caveat: "A quick run writes a few tens of megabytes: level 0 fills a few times and \
            little is merged. The storms of the paper come with its size: --size paper, or --set \
            puts=. Tables and compactions are those that the store wrote into its own log. The \
            longest put of a run is as much the machine's as the store's: on a busy virtual \
            machine anything may be interrupted for milliseconds. One in a thousand says more.",
        ..KV_DEFAULTS
    },
    sync: false,
};

/// Durable puts.
pub const KV_SYNC: KvWriteExperiment = KvWriteExperiment {
    about: ExperimentInfo {
        name: "kv-sync",
        question: "How many puts that are durable before the next does a store take in a second?",
        published_result: "Figures 7 and 8: both patterns are alike; what bounds them is the append to the \
                  log. An SSD is 250 times a disk.",
        parameters: &[
            new_parameter("keyspaces", "keys to choose from", "20K", "1M,4M,16M"),
            new_parameter("puts", "puts of each run", "500", "50K"),
            VALUE_BYTES_PARAMETER,
            CACHE_PARAMETER,
            new_parameter("writers", "threads that put", "1", "1"),
            new_parameter("most_ms", "a run stops after so many milliseconds", "400", "10000"),
        ],
        caveat: "One flush for each put (kv-durable counts them) is what all stores pay, in \
            order or not; LMDB pays two. So the rate is that of the disk, and what differs between \
            stores is mostly its mood: the 250 times between an SSD and a disk are those of \
            append-update on the models.",
        ..KV_DEFAULTS
    },
    sync: true,
};

/// Key length of the helper, in bytes.
const KEY_BYTES: u64 = 16;

/// All stores; the others are compared with the first one.
const STORE_NAMES: &[&str] = &["leveldb", "rocksdb", "lmdb", "redb", "fjall", "draconis-kv"];

/// Latencies of single operations.
#[derive(Clone, Copy, Debug, Deserialize)]
struct LatencyQuantiles {
    p50_ns: f64,
    p90_ns: f64,
    p99_ns: f64,
    p999_ns: f64,
    p9999_ns: f64,
    max_ns: f64,
    /// Share of operations slower than ten times the median.
    slow: f64,
}

impl LatencyQuantiles {
    /// Returns samples of the tail: the time exceeded by one in N operations, if there were N.
    fn samples(&self, metric: &'static str, series: &str, count: u64) -> Vec<Sample> {
        let all = [
            (2, self.p50_ns),
            (10, self.p90_ns),
            (100, self.p99_ns),
            (1000, self.p999_ns),
            (10_000, self.p9999_ns),
        ];
        let known = all.into_iter().filter(|(rare, _)| *rare <= count);
        known.map(|(rare, ns)| Sample::at_x(metric, series, rare as f64, ns)).collect()
    }
}

/// Returns the figure for a latency distribution.
fn latency_figure(metric: &str, title: &str) -> Figure {
    Figure::new(FigureShape::Lines, metric, title)
        .with_x_axis("one in so many takes longer", "")
        .with_log_x()
        .with_y_axis("time", "ns")
        .with_log_y()
}

/// Returns the helper command for `store` in `dir`.
fn helper_command(context: &RunContext, command: &str, store: &str, dir: &Path) -> Command {
    let mut helper = Command::new(&context.workshop.peers);
    helper.args([command, "--store", store]).arg("--dir").arg(dir);
    helper.arg("--seed").arg((context.seed + context.repetition).to_string());
    helper
}

/// Adds a numeric parameter to the helper's command line.
fn add_number_argument(helper: &mut Command, name: &str, number: u64) {
    helper.arg(format!("--{}", name.replace('_', "-"))).arg(number.to_string());
}

/// Result reported by the helper.
#[derive(Debug, Deserialize)]
struct PutBenchmarkResult {
    puts: u64,
    seconds: f64,
    latency: LatencyQuantiles,
    found: u64,
    looked_for: u64,
    level0_tables: Option<u64>,
    compactions: Option<u64>,
}

impl KvWriteExperiment {
    fn run_puts(
        &self,
        context: &RunContext,
        store: &str,
        pattern: &str,
        keyspace: u64,
    ) -> anyhow::Result<PutBenchmarkResult> {
        let dir = context.workshop.temp_dir()?;
        let mut command = helper_command(context, "kv", store, &dir.path().join("store"));
        command.args(["--pattern", pattern]);
        add_number_argument(&mut command, "keyspace", keyspace);
        add_number_argument(&mut command, "count", context.number_parameter("puts")?);
        for name in ["value", "cache", "writers", "most_ms"] {
            add_number_argument(&mut command, name, context.number_parameter(name)?);
        }
        if self.sync {
            command.arg("--sync");
        }
        let outcome: PutBenchmarkResult =
            serde_json::from_slice(&child::run_and_capture(context, &mut command)?)?;
        if outcome.found != outcome.looked_for {
            bail!(
                "{store}: {} of {} values were not there, or not those that were put",
                outcome.looked_for - outcome.found,
                outcome.looked_for
            );
        }
        if outcome.puts < context.number_parameter("puts")? {
            context.add_note(format!("{store}: stopped at its time, after some of the puts"));
        }
        Ok(outcome)
    }
}

impl Experiment for KvWriteExperiment {
    fn info(&self) -> &ExperimentInfo {
        &self.about
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str, y: &str, unit: &str| {
            Figure::new(FigureShape::Bars, metric, title)
                .with_x_axis("key space", "")
                .with_y_axis(y, unit)
        };
        vec![
            bars("rate", "Puts in a second by key space", "puts", "/s").with_log_y(),
            latency_figure("tail", "How long one put takes: skewed, the largest key space"),
            bars("worst", "The longest put, in medians", "times the median", "").with_log_y(),
            bars("level0", "Level-0 tables, for a million puts", "tables", ""),
            bars("compactions", "Compactions, for a million puts", "compactions", ""),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        // Log and tables, including tables being merged. Our store for durable puts is zero-filled
        // to 1 GiB.
        Ok((context.number_parameter("puts")? * (context.number_parameter("value")? + 16) * 4)
            .max(1 << 30))
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        context.add_note(MEMORY_DESCRIPTION);
        let mut samples = vec![];
        let keyspaces = context.number_list_parameter("keyspaces")?;
        for keyspace in &keyspaces {
            for pattern in ["sequential", "skewed"] {
                context.check_not_stopped()?;
                let outcome = self.run_puts(context, &store, pattern, *keyspace)?;
                let label = units::format_count(*keyspace as f64);
                let label = format!("{label} keys, {pattern}");
                let rate = outcome.puts as f64 / outcome.seconds;
                samples.push(Sample::labelled("rate", "", &label, rate));
                let told = outcome.latency;
                let longest = told.max_ns / told.p50_ns.max(1.0);
                samples.push(Sample::labelled("worst", "", &label, longest));
                if pattern == "skewed" && Some(keyspace) == keyspaces.last() {
                    samples.extend(told.samples("tail", "", outcome.puts));
                    samples.push(Sample::labelled("slow", "", &label, told.slow));
                }
                let million = 1e6 / outcome.puts.max(1) as f64;
                let counted =
                    [("level0", outcome.level0_tables), ("compactions", outcome.compactions)];
                for (metric, count) in counted {
                    if let (Some(count), false) = (count, self.sync) {
                        samples.push(Sample::labelled(metric, "", &label, count as f64 * million));
                    }
                }
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let of = |metric: &'static str, pattern: &'static str| {
                let last = points.of_metric(metric, subject).filter(|point| {
                    point.label.as_ref().is_some_and(|label| label.ends_with(pattern))
                });
                last.last().map(|point| point.median)
            };
            let (sequential, skewed) = (of("rate", "sequential")?, of("rate", "skewed")?);
            let compactions = match (of("compactions", "sequential"), of("compactions", "skewed")) {
                (Some(ordered), Some(skewed)) => format!(
                    "; for a million puts {} compactions in order, {} skewed",
                    units::format_significant(ordered),
                    units::format_significant(skewed),
                ),
                _ => String::new(),
            };
            let tail = points.medians_by_x("tail", subject, "");
            let median = tail.first()?.1;
            let rare = tail.iter().rfind(|(x, _)| *x <= 1000.0 && *x > 2.0);
            let rare = rare.map_or(String::new(), |(x, ns)| {
                format!(
                    "; skewed, half of the puts take less than {}, one in {x} more than {} ({} \
                     times)",
                    units::format_time_ns(median),
                    units::format_time_ns(*ns),
                    units::format_significant(ns / median),
                )
            });
            let slow = points.of_metric("slow", subject).next().map_or(0.0, |point| point.median);
            let slow = match slow {
                0.0 => ", none more than ten times that".to_string(),
                part => format!(
                    ", {} % more than ten times that",
                    units::format_significant(part * 1e2)
                ),
            };
            let slow = if rare.is_empty() { String::new() } else { slow };
            Some(format!(
                "{subject}: {} in order, {} skewed: {} times slower{compactions}{rare}{slow}.",
                units::format_in_unit(sequential, "/s"),
                units::format_in_unit(skewed, "/s"),
                units::format_significant(sequential / skewed),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
