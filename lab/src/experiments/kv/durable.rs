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

use super::{STORE_NAMES, add_number_argument, helper_command};
use crate::child;
use crate::context::RunContext;
use crate::experiments::{Experiment, ExperimentInfo, PaperSource};
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{BlockDeviceCounters, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct KvDurableCallsExperiment;

/// System calls that make data durable, or may.
const TRACED_SYSTEM_CALLS: &str = "fsync,fdatasync,msync,sync_file_range,openat,write,pwrite64,writev,pwritev,pwritev2,io_uring_enter";

/// System calls after which written data is durable.
const FLUSH_SYSTEM_CALLS: [&str; 3] = ["fsync", "fdatasync", "msync"];

/// Label of writes that are durable by themselves (O_SYNC, RWF_DSYNC).
const DURABLE_WRITE_LABEL: &str = "durable write";

/// Counts the calls in the output of strace.
fn count_traced_calls(trace: &str) -> BTreeMap<String, u64> {
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
                DURABLE_WRITE_LABEL
            }
            _ => name,
        };
        *counts.entry(name.to_string()).or_insert(0) += 1;
    }
    counts
}

struct CallCounter<'a> {
    context: &'a RunContext,
    store: &'a str,
}

impl CallCounter<'_> {
    fn put_command(&self, dir: &Path, puts: u64) -> anyhow::Result<Command> {
        let mut command = helper_command(self.context, "kv", self.store, &dir.join("store"));
        add_number_argument(&mut command, "count", puts);
        add_number_argument(&mut command, "keyspace", 1000);
        add_number_argument(&mut command, "value", self.context.number_parameter("value")?);
        add_number_argument(&mut command, "cache", self.context.number_parameter("cache")?);
        command.args(["--pattern", "skewed", "--sync"]);
        Ok(command)
    }

    /// Counts the calls of `puts` puts; empty if strace cannot trace them.
    fn count_calls(&self, puts: u64) -> anyhow::Result<BTreeMap<String, u64>> {
        let dir = self.context.workshop.temp_dir()?;
        let trace = dir.path().join("trace");
        let inner = self.put_command(dir.path(), puts)?;
        let mut command = Command::new("strace");
        command
            .args(["-f", "-qq", "-s", "0", "-e", &format!("trace={TRACED_SYSTEM_CALLS}"), "-o"])
            .arg(&trace);
        command.arg(inner.get_program()).args(inner.get_args()).arg("--calls");
        child::run_and_capture(self.context, &mut command)?;
        Ok(count_traced_calls(&String::from_utf8_lossy(&std::fs::read(&trace)?)))
    }

    /// Returns the flushes and writes of the device during `puts` puts.
    fn count_device_flushes_and_writes(
        &self,
        device: &BlockDeviceCounters,
        puts: u64,
    ) -> anyhow::Result<(f64, f64)> {
        let dir = self.context.workshop.temp_dir()?;
        let mut command = self.put_command(dir.path(), puts)?;
        let before = device.writes_and_flushes().context("the device's counters")?;
        child::run_and_capture(self.context, &mut command)?;
        let after = device.writes_and_flushes().context("the device's counters")?;
        Ok(((after.0 - before.0) as f64, (after.1 - before.1) as f64))
    }
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "kv-durable",
    paper: PaperSource::Lab,
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
        new_parameter("puts", "puts that are counted, and three times as many", "100", "1000"),
        super::VALUE_BYTES_PARAMETER,
        super::CACHE_PARAMETER,
    ],
    subjects: STORE_NAMES,
    accepts: |kind| kind == SubjectKind::KeyValue,
    repetitions: (1, 1),
    warms_up: false,
};

impl Experiment for KvDurableCallsExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str| {
            Figure::new(FigureShape::Bars, metric, title).with_y_axis("for one put", "")
        };
        vec![
            bars("calls", "System calls of one durable put"),
            bars("device", "What the device was asked for one durable put"),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        let counting = CallCounter { context, store: &store };
        let puts = context.number_parameter("puts")?;
        context.add_note(super::MEMORY_DESCRIPTION);
        let mut samples = vec![];
        if Command::new("strace").arg("-V").output().is_ok() {
            let (few, many) = (counting.count_calls(puts)?, counting.count_calls(puts * 3)?);
            for (name, count) in many {
                let more = count.saturating_sub(few.get(&name).copied().unwrap_or(0));
                let each = more as f64 / (puts * 2) as f64;
                if each >= 0.005 {
                    samples.push(Sample::labelled("calls", "", &name, each));
                }
            }
        } else {
            context.add_note("strace is not here: system calls were not counted");
        }
        match BlockDeviceCounters::of_path(&context.workshop.dir) {
            Some(device) => {
                let (few, many) = (
                    counting.count_device_flushes_and_writes(&device, puts)?,
                    counting.count_device_flushes_and_writes(&device, puts * 3)?,
                );
                let each = |many: f64, few: f64| (many - few).max(0.0) / (puts * 2) as f64;
                samples.push(Sample::labelled("device", "", "writes", each(many.0, few.0)));
                samples.push(Sample::labelled("device", "", "flushes", each(many.1, few.1)));
                if let Some(cache) = device.queue_attribute("write_cache") {
                    context.add_note(format!("{} has a cache of sort: {cache}", device.name()));
                }
            }
            None => context.add_note("no device with counters: flushes were not counted"),
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let calls =
                |name: &str| points.median_of_label("calls", subject, "", name).unwrap_or(0.0);
            let asked = FLUSH_SYSTEM_CALLS.iter().map(|name| calls(name)).sum::<f64>()
                + calls(DURABLE_WRITE_LABEL);
            let traced = points.of_metric("calls", subject).next().is_some();
            let told: Vec<String> = FLUSH_SYSTEM_CALLS
                .iter()
                .chain([&DURABLE_WRITE_LABEL])
                .filter(|name| calls(name) > 0.0)
                .map(|name| format!("{} {name}", units::format_significant(calls(name))))
                .collect();
            let device = points.median_of_label("device", subject, "", "flushes");
            let mut text = format!("{subject}: ");
            text += &match (traced, asked >= 0.99) {
                (true, true) => format!("every put asks for the disk ({} a put)", told.join(", ")),
                (true, false) => format!(
                    "NOT every put asks for the disk: {} calls a put",
                    units::format_significant(asked)
                ),
                (false, _) => "not traced".into(),
            };
            if let Some(flushes) = device {
                text +=
                    &format!("; the device flushed {} times", units::format_significant(flushes));
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
    fn strace_output_is_counted() {
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
        let counts = count_traced_calls(trace);
        assert_eq!(counts["fdatasync"], 1);
        assert_eq!(counts["pwrite64"], 2);
        assert_eq!(counts[DURABLE_WRITE_LABEL], 2);
    }
}
