//! Stores in a bucket on one server: rates, requests, space in the bucket, recovery.
//!
//! ```text
//!   versitygw ── a directory of files, a line in its log for each request
//!       ▲ S3
//!   the helper: load ─▶ durable puts ─▶ dies ─▶ recovers ─▶ reads, a process for each
//! ```
//!
//! Requests of a phase are counted by the server, equally for all stores.

use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Deserialize;

use super::{LatencyQuantiles, add_number_argument};
use crate::child;
use crate::context::RunContext;
use crate::experiments::{Experiment, ExperimentInfo, PaperSource};
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct KvBucketExperiment;

/// Name of the bucket.
const BUCKET_NAME: &str = "lab";

/// An S3 server, killed on drop.
struct S3Server {
    child: Child,
    /// Directory of the objects; the log is next to it.
    root: PathBuf,
    log: PathBuf,
    endpoint: String,
}

impl S3Server {
    /// Starts a server with a new bucket in `dir`; `None` if the program is not installed.
    fn start(dir: &Path) -> anyhow::Result<Option<Self>> {
        let Some(program) = find_versitygw() else { return Ok(None) };
        let (root, log) = (dir.join("served"), dir.join("log"));
        std::fs::create_dir_all(root.join(BUCKET_NAME))?;
        // A port that was free a moment ago.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let mut command = Command::new(program);
        command.args(["--access", "access", "--secret", "secret-of-a-lab", "--quiet"]);
        command.arg("--access-log").arg(&log).args(["--port", &address, "posix"]).arg(&root);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let server = Self { child, root, log, endpoint: format!("http://{address}") };
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(&address).is_err() {
            if Instant::now() > until {
                bail!("versitygw does not answer");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(server))
    }

    /// Returns the requests so far, by their names in the log.
    fn request_counts(&self) -> anyhow::Result<BTreeMap<&'static str, u64>> {
        Ok(count_requests(&std::fs::read_to_string(&self.log).unwrap_or_default()))
    }

    /// Returns the bytes stored in the bucket.
    fn bucket_bytes(&self) -> anyhow::Result<u64> {
        Ok(crate::experiments::mount::count_names_and_bytes(&self.root)?.1)
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Finds the program where `tools/packages` installs it, or in PATH.
fn find_versitygw() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home);
    let built = cache.map(|cache| cache.join("draconis/bin/versitygw"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all = std::env::split_paths(&path).map(|dir| dir.join("versitygw")).chain(built);
    all.find(|program| program.is_file())
}

/// Counts the requests in a log by the price classes of clouds: LIST costs as much as PUT, DELETE
/// is free.
fn count_requests(log: &str) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    for line in log.lines() {
        let Some(name) = line.split(' ').find_map(|word| word.strip_prefix("s3_")) else {
            continue;
        };
        let kind = match name {
            _ if name.starts_with("Get") || name.starts_with("Head") => "GET",
            _ if name.starts_with("List") => "LIST",
            _ if name.starts_with("Delete") => "DELETE",
            _ => "PUT",
        };
        *counts.entry(kind).or_insert(0) += 1;
    }
    counts
}

/// Result reported by the helper for a phase.
#[derive(Debug, Deserialize)]
struct BucketPhaseResult {
    count: u64,
    whole_seconds: f64,
    seconds: f64,
    latency: LatencyQuantiles,
}

struct BucketRun<'a> {
    context: &'a RunContext,
    store: &'a str,
    server: &'a S3Server,
    /// Local journal file of our store.
    journal: Option<PathBuf>,
    samples: Vec<Sample>,
}

impl BucketRun<'_> {
    /// Runs a phase; returns its result, or `None` if the helper died as intended.
    fn run_phase(
        &mut self,
        phase: &str,
        count: u64,
        writers: u64,
    ) -> anyhow::Result<Option<BucketPhaseResult>> {
        let mut command = Command::new(&self.context.workshop.peers);
        command.args([
            "kv-bucket",
            "--store",
            self.store,
            "--bucket",
            BUCKET_NAME,
            "--phase",
            phase,
        ]);
        add_number_argument(&mut command, "count", count);
        add_number_argument(&mut command, "writers", writers);
        add_number_argument(&mut command, "seed", self.context.seed + self.context.repetition);
        for name in ["keyspace", "value", "cache"] {
            add_number_argument(&mut command, name, self.context.number_parameter(name)?);
        }
        if let Some(journal) = &self.journal {
            command.arg("--journal").arg(journal);
        }
        command.env("AWS_ACCESS_KEY_ID", "access").env("AWS_SECRET_ACCESS_KEY", "secret-of-a-lab");
        command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL", &self.server.endpoint);
        let printed = child::run_and_capture(self.context, &mut command)?;
        (!printed.is_empty())
            .then(|| serde_json::from_slice(&printed).context(phase.to_owned()))
            .transpose()
    }

    /// Runs a phase and counts the requests per thousand operations.
    fn run_counted_phase(
        &mut self,
        phase: &str,
        label: &str,
        count: u64,
        writers: u64,
    ) -> anyhow::Result<BucketPhaseResult> {
        let before = self.server.request_counts()?;
        let outcome = self.run_phase(phase, count, writers)?.context("nothing was said")?;
        for (kind, after) in self.server.request_counts()? {
            let more = after - before.get(kind).copied().unwrap_or(0);
            let each = more as f64 * 1000.0 / outcome.count.max(1) as f64;
            self.add_sample("requests", kind, label, each);
        }
        Ok(outcome)
    }

    fn add_sample(&mut self, metric: &'static str, series: &str, label: &str, value: f64) {
        let label = if self.journal.is_some() { journal_label(label) } else { label.to_owned() };
        self.samples.push(Sample::labelled(metric, series, &label, value));
    }

    fn run_all_phases(&mut self) -> anyhow::Result<()> {
        let (keys, puts) =
            (self.context.number_parameter("keyspace")?, self.context.number_parameter("puts")?);
        let (reads, writers) =
            (self.context.number_parameter("reads")?, self.context.number_parameter("writers")?);
        let rate = |count: u64, seconds: f64| count as f64 / seconds.max(1e-9);
        let load = self.run_counted_phase("load", LOADED_LABEL, keys, 1)?;
        self.add_sample("rate", "", LOADED_LABEL, rate(load.count, load.whole_seconds));
        let pair = self.context.number_parameter("value")? + super::KEY_BYTES;
        let stored = self.server.bucket_bytes()? as f64 / (keys * pair) as f64;
        self.add_sample("stored", "", LOADED_LABEL, stored);
        let one = self.run_counted_phase("durable", ONE_WRITER_LABEL, puts / writers.max(1), 1)?;
        self.add_sample("rate", "", ONE_WRITER_LABEL, rate(one.count, one.seconds));
        self.add_sample("wait", "", ONE_WRITER_LABEL, one.latency.p50_ns);
        let many = self.run_counted_phase("durable", ALL_WRITERS_LABEL, puts, writers)?;
        self.add_sample("rate", "", ALL_WRITERS_LABEL, rate(many.count, many.seconds));
        self.add_sample("wait", "", ALL_WRITERS_LABEL, many.latency.p50_ns);
        self.run_phase("die", 0, writers)?;
        let recovered = self.run_phase("recover", 0, writers)?.context("nothing was said")?;
        self.add_sample("recovery", "", RECOVERY_LABEL, recovered.seconds * 1e9);
        let read = self.run_counted_phase("read", COLD_READ_LABEL, reads, 1)?;
        self.add_sample("rate", "", COLD_READ_LABEL, rate(read.count, read.seconds));
        let stored = self.server.bucket_bytes()? as f64 / (keys * pair) as f64;
        self.add_sample("stored", "", FINAL_SIZE_LABEL, stored);
        Ok(())
    }
}

/// Returns the label of a phase with a journal.
fn journal_label(label: &str) -> String {
    format!("{label}, journal")
}

/// Labels of the phases.
const LOADED_LABEL: &str = "loaded";
const ONE_WRITER_LABEL: &str = "durable, 1 writer";
const ALL_WRITERS_LABEL: &str = "durable, all writers";
const RECOVERY_LABEL: &str = "first read after a death";
const COLD_READ_LABEL: &str = "read, cold";
const FINAL_SIZE_LABEL: &str = "at the end";

/// The store that supports a journal.
const DRACONIS_STORE_NAME: &str = "draconis-kv";

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "kv-bucket",
    paper: PaperSource::Lab,
    question: "How many puts does a store take that is kept in a bucket, at how many requests, how \
           much is in the bucket then, and how long is it opened after its process died?",
    published_result: "No paper. SlateDB is made for this.",
    caveat: "Both are sent to the same server on this machine (versitygw, which keeps files), \
               and both let puts gather for 50 ms. Requests are counted by the server's log, for \
               each thousand puts or reads, with those of opening and closing; clouds charge for a \
               list as for a put. A put is durable when the bucket has it. A rate of loading ends \
               when the store is closed. What died had 200 durable puts behind it, all of which \
               are looked for; the time is that of opening and the first read. Stored is what the \
               bucket has for each byte of keys and values; SlateDB removes what is old only after \
               some minutes. Our store is measured twice: the second time with a journal of 256 \
               MiB beside the server's files, so that a put is durable when that has it, and the \
               bucket is sent it behind.",
    parameters: &[
        new_parameter("keyspace", "keys, each loaded once", "20K", "1M"),
        new_parameter("puts", "durable puts of all writers", "600", "20K"),
        new_parameter("writers", "threads that put", "16", "16"),
        new_parameter("reads", "reads, each key as likely", "300", "20K"),
        new_parameter("value", "bytes of a value; keys have 16", "100", "100"),
        super::CACHE_PARAMETER,
    ],
    subjects: &["slatedb", "draconis-kv"],
    accepts: |kind| kind == SubjectKind::KeyValue,
    repetitions: (1, 3),
    warms_up: false,
};

impl Experiment for KvBucketExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str| Figure::new(FigureShape::Bars, metric, title);
        vec![
            bars("rate", "Puts and reads in a bucket")
                .with_y_axis("in a second", "/s")
                .with_log_y(),
            bars("requests", "Requests for a thousand of them")
                .with_y_axis("requests", "")
                .with_log_y(),
            bars("wait", "How long a durable put takes, in the median").with_y_axis("time", "ns"),
            bars("recovery", "Until the first read").with_y_axis("time", "ns"),
            bars("stored", "What the bucket has for each byte").with_y_axis("bytes", ""),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        let dir = context.workshop.temp_dir()?;
        let Some(server) = S3Server::start(dir.path())? else {
            context
                .add_note("versitygw is not here (tools/packages builds it): nothing was measured");
            return Ok(vec![]);
        };
        let samples = vec![];
        let mut run = BucketRun { context, store: &store, server: &server, journal: None, samples };
        run.run_all_phases()?;
        let mut samples = run.samples;
        drop(server);
        if store == DRACONIS_STORE_NAME {
            let dir = context.workshop.temp_dir()?;
            let journal = Some(dir.path().join("journal"));
            let server = S3Server::start(dir.path())?.context("versitygw is gone")?;
            let mut run = BucketRun { context, store: &store, server: &server, journal, samples };
            run.run_all_phases()?;
            samples = run.samples;
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str, name: &dyn Fn(&str) -> String, how: &str| {
            let named = |metric: &str, series: &str, label: &str| {
                points.median_of_label(metric, subject, series, &name(label))
            };
            Some(format!(
                "{subject}{how}: {} puts a second loaded; {} durable ones by one writer, {} by \
                 all, for {} PUT and {} GET a thousand; {} cold reads a second; {} until the \
                 first read after a death; {} bytes in the bucket for each at the end.",
                units::format_significant(named("rate", "", LOADED_LABEL)?),
                units::format_significant(named("rate", "", ONE_WRITER_LABEL)?),
                units::format_significant(named("rate", "", ALL_WRITERS_LABEL)?),
                units::format_significant(
                    named("requests", "PUT", ALL_WRITERS_LABEL).unwrap_or(0.0)
                ),
                units::format_significant(
                    named("requests", "GET", ALL_WRITERS_LABEL).unwrap_or(0.0)
                ),
                units::format_significant(named("rate", "", COLD_READ_LABEL)?),
                units::format_time_ns(named("recovery", "", RECOVERY_LABEL)?),
                units::format_significant(named("stored", "", FINAL_SIZE_LABEL)?),
            ))
        };
        let plain = |subject: &&str| tell(subject, &str::to_owned, "");
        let mut all: Vec<String> = points.subjects().iter().filter_map(plain).collect();
        all.extend(tell(&DRACONIS_STORE_NAME, &journal_label, " with a journal"));
        // Ratio of the others' requests or times to ours.
        let beside = |name: &dyn Fn(&str) -> String, how: &str| {
            let times = |metric: &str, label: &str| {
                let ours = points.median_of_label(metric, DRACONIS_STORE_NAME, "", &name(label))?;
                let theirs = points.median_of_label(metric, "slatedb", "", label)?;
                let times = if metric == "rate" { ours / theirs } else { theirs / ours };
                times.is_finite().then(|| units::format_significant(times))
            };
            Some(format!(
                "{DRACONIS_STORE_NAME}{how} beside slatedb, more than 1 is ahead: loaded {}, durable by one \
                 writer {}, by all {}, cold reads {}, recovery {}, bytes stored {}.",
                times("rate", LOADED_LABEL)?,
                times("rate", ONE_WRITER_LABEL)?,
                times("rate", ALL_WRITERS_LABEL)?,
                times("rate", COLD_READ_LABEL)?,
                times("recovery", RECOVERY_LABEL)?,
                times("stored", FINAL_SIZE_LABEL)?,
            ))
        };
        all.extend(beside(&str::to_owned, ""));
        all.extend(beside(&journal_label, " with a journal"));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_log_requests_are_counted() {
        let log = "\
log starts 2026-11-23
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_PutObject x/a /b/x/a 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_ListObjectsV2 - /b 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_HeadObject x/a /b/x/a 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_UploadPart x/a /b/x/a 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_DeleteObjects x/a /b 200 -
";
        let counts = count_requests(log);
        assert_eq!(counts, BTreeMap::from([("DELETE", 1), ("GET", 1), ("LIST", 1), ("PUT", 2)]));
    }
}
