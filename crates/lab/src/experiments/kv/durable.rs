//! Check that durable puts reach the disk, counted from outside the stores.
//!
//! ```text
//!   strace ── the helper, n puts and 3n puts ──▶ calls of one put = difference / 2n
//!   the device's own counters, without strace ──▶ flushes and writes of one put
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use super::{STORES, helper, number};
use crate::child;
use crate::context::Context;
use crate::experiments::{Experiment, ExperimentInfo, Paper};
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Device, Kind, Subject};
use crate::units;

/// See the module.
pub struct KvDurable;

/// System calls that make data durable, or may.
const CALLS: &str = "fsync,fdatasync,msync,sync_file_range,openat,write,pwrite64,writev,pwritev,pwritev2,io_uring_enter";

/// System calls after which written data is durable.
const FLUSHES: [&str; 3] = ["fsync", "fdatasync", "msync"];

/// Label of writes that are durable by themselves (O_SYNC, RWF_DSYNC).
const DURABLE_WRITE: &str = "durable write";

/// Counts the calls in the output of strace.
fn calls(trace: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    // Descriptors opened with O_SYNC or O_DSYNC.
    let mut durable = vec![];
    for line in trace.lines() {
        let Some((name, rest)) = line.split_once('(') else { continue };
        let name = name.rsplit(' ').next().unwrap_or_default();
        if name == "openat" {
            let number = rest.rsplit("= ").next().unwrap_or_default().trim();
            durable.retain(|open| open != number);
            if rest.contains("O_DSYNC") || rest.contains("O_SYNC") {
                durable.push(number.to_string());
            }
            continue;
        }
        let to = rest.split([',', ')', ' ']).next().unwrap_or_default();
        let is_write = name.contains("write");
        let name = match is_write {
            true if rest.contains("RWF_DSYNC") || durable.iter().any(|open| open == to) => {
                DURABLE_WRITE
            }
            _ => name,
        };
        *counts.entry(name.to_string()).or_insert(0) += 1;
    }
    counts
}

struct Counting<'a> {
    context: &'a Context,
    store: &'a str,
}

impl Counting<'_> {
    fn command(&self, dir: &Path, puts: u64) -> anyhow::Result<Command> {
        let mut command = helper(self.context, "kv", self.store, &dir.join("store"));
        number(&mut command, "count", puts);
        number(&mut command, "keyspace", 1000);
        number(&mut command, "value", self.context.number("value")?);
        number(&mut command, "cache", self.context.number("cache")?);
        command.args(["--pattern", "skewed", "--sync"]);
        Ok(command)
    }

    /// Counts the calls of `puts` puts; empty if strace cannot trace them.
    fn trace(&self, puts: u64) -> anyhow::Result<BTreeMap<String, u64>> {
        let dir = self.context.workshop.directory()?;
        let trace = dir.path().join("trace");
        let inner = self.command(dir.path(), puts)?;
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-s", "0", "-e", &format!("trace={CALLS}"), "-o"]).arg(&trace);
        command.arg(inner.get_program()).args(inner.get_args()).arg("--calls");
        child::output(self.context, &mut command)?;
        Ok(calls(&String::from_utf8_lossy(&std::fs::read(&trace)?)))
    }

    /// Returns the flushes and writes of the device during `puts` puts.
    fn watch(&self, device: &Device, puts: u64) -> anyhow::Result<(f64, f64)> {
        let dir = self.context.workshop.directory()?;
        let mut command = self.command(dir.path(), puts)?;
        let before = device.writes_and_flushes().context("the device's counters")?;
        child::output(self.context, &mut command)?;
        let after = device.writes_and_flushes().context("the device's counters")?;
        Ok(((after.0 - before.0) as f64, (after.1 - before.1) as f64))
    }
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "kv-durable",
    paper: Paper::Lab,
    question: "Does a put that a store calls durable really reach the disk? Counted from outside: \
           system calls by strace, flushes and writes by the device.",
    published_result: "No paper: synchronous puts can be compared only if all stores keep the same promise.",
    caveat: "Calls of opening and closing fall out, since three times as many puts have the \
               same. Draconis uses a ring of the kernel's, into which strace cannot look; for the \
               trace it is opened without, for the device's counters with it. The device's \
               counters are everybody's: another program's flushes are in them. A flush that the \
               file system makes for its journal counts as well, and several that meet become one. \
               A device that writes through is not asked to flush at all.",
    parameters: &[
        parameter("puts", "puts that are counted, and three times as many", "100", "1000"),
        super::VALUE,
        super::MEMORY,
    ],
    subjects: STORES,
    accepts: |kind| kind == Kind::KeyValue,
    repetitions: (1, 1),
    warms_up: false,
};

impl Experiment for KvDurable {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str| {
            Figure::new(Shape::Bars, metric, title).y("for one put", "")
        };
        vec![
            bars("calls", "System calls of one durable put"),
            bars("device", "What the device was asked for one durable put"),
        ]
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        let counting = Counting { context, store: &store };
        let puts = context.number("puts")?;
        context.note(super::MEMORY_DESCRIPTION);
        let mut samples = vec![];
        if Command::new("strace").arg("-V").output().is_ok() {
            let (few, many) = (counting.trace(puts)?, counting.trace(puts * 3)?);
            for (name, count) in many {
                let more = count.saturating_sub(few.get(&name).copied().unwrap_or(0));
                let each = more as f64 / (puts * 2) as f64;
                if each >= 0.005 {
                    samples.push(Sample::named("calls", "", &name, each));
                }
            }
        } else {
            context.note("strace is not here: system calls were not counted");
        }
        match Device::of(&context.workshop.dir) {
            Some(device) => {
                let (few, many) =
                    (counting.watch(&device, puts)?, counting.watch(&device, puts * 3)?);
                let each = |many: f64, few: f64| (many - few).max(0.0) / (puts * 2) as f64;
                samples.push(Sample::named("device", "", "writes", each(many.0, few.0)));
                samples.push(Sample::named("device", "", "flushes", each(many.1, few.1)));
                if let Some(cache) = device.queue("write_cache") {
                    context.note(format!("{} has a cache of sort: {cache}", device.name()));
                }
            }
            None => context.note("no device with counters: flushes were not counted"),
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let calls = |name: &str| points.named("calls", subject, "", name).unwrap_or(0.0);
            let asked = FLUSHES.iter().map(|name| calls(name)).sum::<f64>() + calls(DURABLE_WRITE);
            let traced = points.of("calls", subject).next().is_some();
            let told: Vec<String> = FLUSHES
                .iter()
                .chain([&DURABLE_WRITE])
                .filter(|name| calls(name) > 0.0)
                .map(|name| format!("{} {name}", units::significant(calls(name))))
                .collect();
            let device = points.named("device", subject, "", "flushes");
            let mut text = format!("{subject}: ");
            text += &match (traced, asked >= 0.99) {
                (true, true) => format!("every put asks for the disk ({} a put)", told.join(", ")),
                (true, false) => format!(
                    "NOT every put asks for the disk: {} calls a put",
                    units::significant(asked)
                ),
                (false, _) => "not traced".into(),
            };
            if let Some(flushes) = device {
                text += &format!("; the device flushed {} times", units::significant(flushes));
            }
            Some(text + ".")
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_counted() {
        let trace = "\
7 openat(AT_FDCWD, \"\"..., O_RDWR|O_DSYNC|O_CLOEXEC) = 5
7 pwrite64(5, \"\"..., 48, 0) = 48
8 fdatasync(4 <unfinished ...>
7 pwrite64(6, \"\"..., 48, 0) = 48
8 <... fdatasync resumed>) = 0
7 openat(AT_FDCWD, \"\"..., O_RDWR|O_CLOEXEC) = 5
7 pwrite64(5, \"\"..., 48, 0) = 48
7 pwritev2(6, [{iov_base=\"\"..., iov_len=1}], 1, 0, RWF_DSYNC) = 1
";
        let counts = calls(trace);
        assert_eq!(counts["fdatasync"], 1);
        assert_eq!(counts["pwrite64"], 2);
        assert_eq!(counts[DURABLE_WRITE], 2);
    }
}
