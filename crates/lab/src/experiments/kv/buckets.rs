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

use super::{Quantiles, number};
use crate::child;
use crate::context::Context;
use crate::experiments::{Experiment, ExperimentInfo, Paper};
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, Subject};
use crate::units;

/// See the module.
pub struct KvBucket;

/// Name of the bucket.
const BUCKET: &str = "lab";

/// An S3 server, killed on drop.
struct Server {
    child: Child,
    /// Directory of the objects; the log is next to it.
    root: PathBuf,
    log: PathBuf,
    endpoint: String,
}

impl Server {
    /// Starts a server with a new bucket in `dir`; `None` if the program is not installed.
    fn start(dir: &Path) -> anyhow::Result<Option<Self>> {
        let Some(program) = versitygw() else { return Ok(None) };
        let (root, log) = (dir.join("served"), dir.join("log"));
        std::fs::create_dir_all(root.join(BUCKET))?;
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
    fn requests(&self) -> anyhow::Result<BTreeMap<&'static str, u64>> {
        Ok(requests(&std::fs::read_to_string(&self.log).unwrap_or_default()))
    }

    /// Returns the bytes stored in the bucket.
    fn bytes(&self) -> anyhow::Result<u64> {
        Ok(crate::experiments::mount::count_names_and_bytes(&self.root)?.1)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Finds the program where `tools/packages` installs it, or in PATH.
fn versitygw() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home);
    let built = cache.map(|cache| cache.join("draconis/bin/versitygw"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all = std::env::split_paths(&path).map(|dir| dir.join("versitygw")).chain(built);
    all.find(|program| program.is_file())
}

/// Counts the requests in a log by the price classes of clouds: LIST costs as much as PUT, DELETE
/// is free.
fn requests(log: &str) -> BTreeMap<&'static str, u64> {
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
struct Outcome {
    count: u64,
    whole_seconds: f64,
    seconds: f64,
    latency: Quantiles,
}

struct Run<'a> {
    context: &'a Context,
    store: &'a str,
    server: &'a Server,
    /// Local journal file of our store.
    journal: Option<PathBuf>,
    samples: Vec<Sample>,
}

impl Run<'_> {
    /// Runs a phase; returns its result, or `None` if the helper died as intended.
    fn phase(&mut self, phase: &str, count: u64, writers: u64) -> anyhow::Result<Option<Outcome>> {
        let mut command = Command::new(&self.context.workshop.peers);
        command.args(["kv-bucket", "--store", self.store, "--bucket", BUCKET, "--phase", phase]);
        number(&mut command, "count", count);
        number(&mut command, "writers", writers);
        number(&mut command, "seed", self.context.seed + self.context.repetition);
        for name in ["keyspace", "value", "cache"] {
            number(&mut command, name, self.context.number(name)?);
        }
        if let Some(journal) = &self.journal {
            command.arg("--journal").arg(journal);
        }
        command.env("AWS_ACCESS_KEY_ID", "access").env("AWS_SECRET_ACCESS_KEY", "secret-of-a-lab");
        command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL", &self.server.endpoint);
        let said = child::output(self.context, &mut command)?;
        (!said.is_empty())
            .then(|| serde_json::from_slice(&said).context(phase.to_owned()))
            .transpose()
    }

    /// Runs a phase and counts the requests per thousand operations.
    fn counted(
        &mut self,
        phase: &str,
        label: &str,
        count: u64,
        writers: u64,
    ) -> anyhow::Result<Outcome> {
        let before = self.server.requests()?;
        let outcome = self.phase(phase, count, writers)?.context("nothing was said")?;
        for (kind, after) in self.server.requests()? {
            let more = after - before.get(kind).copied().unwrap_or(0);
            let each = more as f64 * 1000.0 / outcome.count.max(1) as f64;
            self.add("requests", kind, label, each);
        }
        Ok(outcome)
    }

    fn add(&mut self, metric: &'static str, series: &str, label: &str, value: f64) {
        let label = if self.journal.is_some() { with_journal(label) } else { label.to_owned() };
        self.samples.push(Sample::named(metric, series, &label, value));
    }

    fn all(&mut self) -> anyhow::Result<()> {
        let (keys, puts) = (self.context.number("keyspace")?, self.context.number("puts")?);
        let (reads, writers) = (self.context.number("reads")?, self.context.number("writers")?);
        let rate = |count: u64, seconds: f64| count as f64 / seconds.max(1e-9);
        let load = self.counted("load", LOAD, keys, 1)?;
        self.add("rate", "", LOAD, rate(load.count, load.whole_seconds));
        let pair = self.context.number("value")? + super::KEY_BYTES;
        let stored = self.server.bytes()? as f64 / (keys * pair) as f64;
        self.add("stored", "", LOAD, stored);
        let one = self.counted("durable", ONE, puts / writers.max(1), 1)?;
        self.add("rate", "", ONE, rate(one.count, one.seconds));
        self.add("wait", "", ONE, one.latency.p50_ns);
        let many = self.counted("durable", CONCURRENT_WRITERS, puts, writers)?;
        self.add("rate", "", CONCURRENT_WRITERS, rate(many.count, many.seconds));
        self.add("wait", "", CONCURRENT_WRITERS, many.latency.p50_ns);
        self.phase("die", 0, writers)?;
        let recovered = self.phase("recover", 0, writers)?.context("nothing was said")?;
        self.add("recovery", "", DIED, recovered.seconds * 1e9);
        let read = self.counted("read", READ, reads, 1)?;
        self.add("rate", "", READ, rate(read.count, read.seconds));
        let stored = self.server.bytes()? as f64 / (keys * pair) as f64;
        self.add("stored", "", END, stored);
        Ok(())
    }
}

/// Returns the label of a phase with a journal.
fn with_journal(label: &str) -> String {
    format!("{label}, journal")
}

/// Labels of the phases.
const LOAD: &str = "loaded";
const ONE: &str = "durable, 1 writer";
const CONCURRENT_WRITERS: &str = "durable, all writers";
const DIED: &str = "first read after a death";
const READ: &str = "read, cold";
const END: &str = "at the end";

/// The store that supports a journal.
const OURS: &str = "draconis-kv";

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "kv-bucket",
    paper: Paper::Lab,
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
        parameter("keyspace", "keys, each loaded once", "20K", "1M"),
        parameter("puts", "durable puts of all writers", "600", "20K"),
        parameter("writers", "threads that put", "16", "16"),
        parameter("reads", "reads, each key as likely", "300", "20K"),
        parameter("value", "bytes of a value; keys have 16", "100", "100"),
        super::MEMORY,
    ],
    subjects: &["slatedb", "draconis-kv"],
    accepts: |kind| kind == Kind::KeyValue,
    repetitions: (1, 3),
    warms_up: false,
};

impl Experiment for KvBucket {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        let bars = |metric: &str, title: &str| Figure::new(Shape::Bars, metric, title);
        vec![
            bars("rate", "Puts and reads in a bucket").y("in a second", "/s").log_y(),
            bars("requests", "Requests for a thousand of them").y("requests", "").log_y(),
            bars("wait", "How long a durable put takes, in the median").y("time", "ns"),
            bars("recovery", "Until the first read").y("time", "ns"),
            bars("stored", "What the bucket has for each byte").y("bytes", ""),
        ]
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let store = subject.name();
        let dir = context.workshop.directory()?;
        let Some(server) = Server::start(dir.path())? else {
            context.note("versitygw is not here (tools/packages builds it): nothing was measured");
            return Ok(vec![]);
        };
        let samples = vec![];
        let mut run = Run { context, store: &store, server: &server, journal: None, samples };
        run.all()?;
        let mut samples = run.samples;
        drop(server);
        if store == OURS {
            let dir = context.workshop.directory()?;
            let journal = Some(dir.path().join("journal"));
            let server = Server::start(dir.path())?.context("versitygw is gone")?;
            let mut run = Run { context, store: &store, server: &server, journal, samples };
            run.all()?;
            samples = run.samples;
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str, name: &dyn Fn(&str) -> String, how: &str| {
            let named = |metric: &str, series: &str, label: &str| {
                points.named(metric, subject, series, &name(label))
            };
            Some(format!(
                "{subject}{how}: {} puts a second loaded; {} durable ones by one writer, {} by \
                 all, for {} PUT and {} GET a thousand; {} cold reads a second; {} until the \
                 first read after a death; {} bytes in the bucket for each at the end.",
                units::significant(named("rate", "", LOAD)?),
                units::significant(named("rate", "", ONE)?),
                units::significant(named("rate", "", CONCURRENT_WRITERS)?),
                units::significant(named("requests", "PUT", CONCURRENT_WRITERS).unwrap_or(0.0)),
                units::significant(named("requests", "GET", CONCURRENT_WRITERS).unwrap_or(0.0)),
                units::significant(named("rate", "", READ)?),
                units::time_ns(named("recovery", "", DIED)?),
                units::significant(named("stored", "", END)?),
            ))
        };
        let plain = |subject: &&str| tell(subject, &str::to_owned, "");
        let mut all: Vec<String> = points.subjects().iter().filter_map(plain).collect();
        all.extend(tell(&OURS, &with_journal, " with a journal"));
        // Ratio of the others' requests or times to ours.
        let beside = |name: &dyn Fn(&str) -> String, how: &str| {
            let times = |metric: &str, label: &str| {
                let ours = points.named(metric, OURS, "", &name(label))?;
                let theirs = points.named(metric, "slatedb", "", label)?;
                let times = if metric == "rate" { ours / theirs } else { theirs / ours };
                times.is_finite().then(|| units::significant(times))
            };
            Some(format!(
                "{OURS}{how} beside slatedb, more than 1 is ahead: loaded {}, durable by one \
                 writer {}, by all {}, cold reads {}, recovery {}, bytes stored {}.",
                times("rate", LOAD)?,
                times("rate", ONE)?,
                times("rate", CONCURRENT_WRITERS)?,
                times("rate", READ)?,
                times("recovery", DIED)?,
                times("stored", END)?,
            ))
        };
        all.extend(beside(&str::to_owned, ""));
        all.extend(beside(&with_journal, " with a journal"));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_counted() {
        let log = "\
log starts 2026-11-23
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_PutObject x/a /b/x/a 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_ListObjectsV2 - /b 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_HeadObject x/a /b/x/a 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_UploadPart x/a /b/x/a 200 -
access bucket [23/November/2026:06:08:23 +0000] 127.0.0.1 access YK s3_DeleteObjects x/a /b 200 -
";
        let counts = requests(log);
        assert_eq!(counts, BTreeMap::from([("DELETE", 1), ("GET", 1), ("LIST", 1), ("PUT", 2)]));
    }
}
