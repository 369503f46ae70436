//! Key-value stores under writes: in order, and nine of ten to a tenth of the keys.

use std::process::Command;

use anyhow::bail;
use serde::Deserialize;

use super::{Experiment, Paper};
use crate::child;
use crate::context::Context;
use crate::parameters::{Parameter, parameter};
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, Subject};
use crate::units;

/// One of the two.
pub struct Kv {
    name: &'static str,
    asks: &'static str,
    finding: &'static str,
    parameters: &'static [Parameter],
    sync: bool,
}

const VALUE: Parameter = parameter("value", "bytes of a value; keys have 16", "512", "512");

/// The log is written when the kernel likes.
pub const ASYNC: Kv = Kv {
    name: "kv-async",
    asks: "How many asynchronous puts does a store take in a second, in order and skewed, by its \
           key space, and what does it move meanwhile?",
    finding: "Figures 4 to 6: LevelDB takes skewed puts more than 4 times slower than ordered \
              ones, on both devices: over thirty thousand compactions against none, the same \
              number of level-0 tables; slower still as the key space grows.",
    parameters: &[
        parameter("keyspaces", "keys to choose from", "20K,80K", "1M,4M,16M"),
        parameter("puts", "puts of each run (the paper: 8 GB of them)", "80K", "16M"),
        VALUE,
        parameter("writers", "threads that put", "1", "1"),
        parameter("most_ms", "a run stops after so many milliseconds", "1000", "600000"),
    ],
    sync: false,
};

/// Each put is durable.
pub const SYNC: Kv = Kv {
    name: "kv-sync",
    asks: "How many puts that are durable before the next does a store take in a second?",
    finding: "Figures 7 and 8: both patterns are alike; what bounds them is the append to the \
              log. An SSD is 250 times a disk.",
    parameters: &[
        parameter("keyspaces", "keys to choose from", "20K", "1M,4M,16M"),
        parameter("puts", "puts of each run", "500", "100K"),
        VALUE,
        parameter("writers", "threads that put", "1", "1"),
        parameter("most_ms", "a run stops after so many milliseconds", "500", "600000"),
    ],
    sync: true,
};

/// How the helper says that a run went.
#[derive(Debug, Deserialize)]
struct Outcome {
    puts: u64,
    seconds: f64,
    found: u64,
    looked_for: u64,
    level0_tables: Option<u64>,
    compactions: Option<u64>,
}

impl Kv {
    fn put(
        &self,
        context: &Context,
        store: &str,
        pattern: &str,
        keyspace: u64,
    ) -> anyhow::Result<Outcome> {
        let workshop = &context.workshop;
        let dir = tempfile::Builder::new().prefix("draconis-lab-").tempdir_in(&workshop.dir)?;
        let mut command = Command::new(&workshop.peers);
        command.args(["kv", "--store", store, "--pattern", pattern]);
        command.arg("--dir").arg(dir.path().join("store"));
        command.arg("--keyspace").arg(keyspace.to_string());
        command.arg("--count").arg(context.number("puts")?.to_string());
        command.arg("--value").arg(context.number("value")?.to_string());
        command.arg("--writers").arg(context.number("writers")?.to_string());
        command.arg("--most-ms").arg(context.number("most_ms")?.to_string());
        command.arg("--seed").arg((context.seed + context.repetition).to_string());
        if self.sync {
            command.arg("--sync");
        }
        let outcome: Outcome = serde_json::from_slice(&child::output(context, &mut command)?)?;
        if outcome.found != outcome.looked_for {
            bail!(
                "{store}: {} of {} keys were lost",
                outcome.looked_for - outcome.found,
                outcome.looked_for
            );
        }
        if outcome.puts < context.number("puts")? {
            context.note(format!("{store}: stopped at its time, after some of the puts"));
        }
        Ok(outcome)
    }
}

impl Experiment for Kv {
    fn name(&self) -> &'static str {
        self.name
    }

    fn paper(&self) -> Paper {
        Paper::Draconis
    }

    fn asks(&self) -> &'static str {
        self.asks
    }

    fn finding(&self) -> &'static str {
        self.finding
    }

    fn parameters(&self) -> &'static [Parameter] {
        self.parameters
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str, y: &str, unit: &str| {
            Figure::new(Shape::Bars, metric, title).x("key space", "").y(y, unit)
        };
        vec![
            bars("rate", "Puts in a second by key space", "puts", "/s").log_y(),
            bars("level0", "Level-0 tables, for a million puts", "tables", ""),
            bars("compactions", "Compactions, for a million puts", "compactions", ""),
        ]
    }

    fn subjects(&self) -> &'static [&'static str] {
        &["leveldb", "rocksdb", "lmdb", "redb", "fjall", "draconis-kv"]
    }

    fn takes(&self, kind: Kind) -> bool {
        kind == Kind::KeyValue
    }

    fn repetitions(&self) -> (u64, u64) {
        (2, 1)
    }

    fn warms_up(&self) -> bool {
        false
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        // Log, tables, and those that are being merged.
        Ok(context.number("puts")? * (context.number("value")? + 16) * 4)
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        let mut samples = vec![];
        for keyspace in context.numbers("keyspaces")? {
            for pattern in ["sequential", "skewed"] {
                context.check()?;
                let outcome = self.put(context, &store, pattern, keyspace)?;
                let label = units::count(keyspace as f64);
                let label = format!("{label} keys, {pattern}");
                let rate = outcome.puts as f64 / outcome.seconds;
                samples.push(Sample::named("rate", "", &label, rate));
                let million = 1e6 / outcome.puts.max(1) as f64;
                let counted =
                    [("level0", outcome.level0_tables), ("compactions", outcome.compactions)];
                for (metric, count) in counted {
                    if let (Some(count), false) = (count, self.sync) {
                        samples.push(Sample::named(metric, "", &label, count as f64 * million));
                    }
                }
            }
        }
        Ok(samples)
    }

    fn found(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let of = |metric: &'static str, pattern: &'static str| {
                let last = points.of(metric, subject).filter(|point| {
                    point.label.as_ref().is_some_and(|label| label.ends_with(pattern))
                });
                last.last().map(|point| point.median)
            };
            let (sequential, skewed) = (of("rate", "sequential")?, of("rate", "skewed")?);
            let compactions = match (of("compactions", "sequential"), of("compactions", "skewed")) {
                (Some(ordered), Some(skewed)) => format!(
                    "; for a million puts {} compactions in order, {} skewed",
                    units::significant(ordered),
                    units::significant(skewed),
                ),
                _ => String::new(),
            };
            Some(format!(
                "{subject}: {} in order, {} skewed: {} times slower{compactions}.",
                units::in_unit(sequential, "/s"),
                units::in_unit(skewed, "/s"),
                units::significant(sequential / skewed),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
