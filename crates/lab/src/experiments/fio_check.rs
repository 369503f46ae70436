//! The lab compared with fio and sysbench: the same requests on the same file.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::parallel::Load;
use super::reading::{prepare, read_all};
use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::stats;
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct FioCheck;

/// Jobs that both programs can express.
const JOBS: [(&str, &str, u64); 4] = [
    ("read in sequence, 64 KiB, direct", "read", 64 << 10),
    ("read at random, 4 KiB, direct", "randread", 4 << 10),
    ("write at random, 4 KiB, direct", "randwrite", 4 << 10),
    ("write in sequence, 4 KiB, fsync each", "write", 4 << 10),
];

/// Turns of each program per pass.
const TURNS: u64 = 2;

impl FioCheck {
    /// Returns the number of requests, fewer for writes because an fsync takes long.
    fn requests(context: &Context, job: &str, block: u64) -> anyhow::Result<u64> {
        let requests = context.number("requests")? / if job == "write" { 5 } else { 1 };
        Ok(requests.min(context.number("area")? / block))
    }

    fn by_fio(context: &Context, file: &Path, job: &str, block: u64) -> anyhow::Result<f64> {
        let area = context.number("area")?;
        let bytes = Self::requests(context, job, block)? * block;
        let mut fio = Command::new("fio");
        fio.args(["--name=lab", "--ioengine=psync", "--output-format=json", "--thread"]);
        fio.args(["--allow_file_create=0", "--invalidate=0", "--norandommap"]);
        fio.arg(format!("--filename={}", file.display())).arg(format!("--rw={job}"));
        fio.arg(format!("--bs={block}")).arg(format!("--size={area}"));
        fio.arg(format!("--io_size={bytes}")).arg(format!("--randseed={}", context.seed));
        fio.arg(if job == "write" { "--fsync=1" } else { "--direct=1" });
        let output = fio.output().context("the program fio")?;
        if !output.status.success() {
            bail!("fio: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let told: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let side = if job.contains("read") { "read" } else { "write" };
        told["jobs"][0][side]["bw_bytes"].as_f64().context("fio says how fast it was")
    }

    fn by_us(
        context: &Context,
        subject: &dyn Subject,
        job: &str,
        block: u64,
    ) -> anyhow::Result<f64> {
        let (clock, area) = (subject.clock(), context.number("area")?);
        let requests = Self::requests(context, job, block)?;
        let bytes = (requests * block) as f64;
        if job == "randwrite" {
            let load = Load {
                block,
                stride: block,
                offset: 0,
                area,
                threads: 1,
                writes: requests,
                host_ns: 0,
            };
            return Ok(bytes * 1e9 / load.run(context, subject)?.max(1) as f64);
        }
        let how = if job == "write" { OpenMode::Cached } else { OpenMode::Direct };
        let file = subject.files()?.open("area", how)?;
        let mut buffer = Buffer::new(block as usize);
        let mut dice = context.rng();
        let mut watch = Stopwatch::start(&*clock);
        for nth in 0..requests {
            context.check()?;
            match job {
                "randread" => read_all(&*file, dice.below(area / block) * block, &mut buffer)?,
                "read" => read_all(&*file, nth * block, &mut buffer)?,
                _ => {
                    file.write(nth * block, &buffer)?;
                    file.sync()?;
                }
            }
        }
        Ok(bytes * 1e9 / watch.lap_ns().max(1) as f64)
    }

    /// Measures with sysbench on a hard link of the file, because sysbench fixes the name.
    fn by_sysbench(context: &Context, dir: &Path) -> anyhow::Result<f64> {
        let call = || {
            let mut sysbench = Command::new("sysbench");
            sysbench.current_dir(dir).args(["fileio", "--file-num=1", "--file-io-mode=sync"]);
            sysbench.args(["--file-extra-flags=direct", "--file-fsync-freq=0", "--time=0"]);
            sysbench.args(["--file-fsync-end=off", "--file-test-mode=rndwr"]);
            sysbench.arg("--file-block-size=4096");
            sysbench.arg(format!("--file-total-size={}", context.number("area")?));
            sysbench.arg(format!("--events={}", context.number("requests")?));
            let output = sysbench.arg("run").output().context("the program sysbench")?;
            if !output.status.success() {
                bail!("sysbench: {}", String::from_utf8_lossy(&output.stdout).trim());
            }
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let alias = dir.join("test_file.0");
        std::fs::hard_link(dir.join("area"), &alias)?;
        let told = call();
        std::fs::remove_file(alias)?;
        let told = told?;
        let figure = |key: &str| {
            let line = told.lines().find(|line| line.trim_start().starts_with(key));
            line?.rsplit(' ').next()?.trim_end_matches('s').parse::<f64>().ok()
        };
        let seconds = figure("total time:").context("sysbench says how long it took")?;
        let events = figure("total number of events:").context("sysbench counts events")?;
        Ok(events * 4096.0 / seconds)
    }
}

/// Writes back earlier dirty data, which would disturb the measurement. Direct I/O needs no empty
/// caches.
fn wait_idle() {
    rustix::fs::sync();
    std::thread::sleep(Duration::from_millis(150));
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "fio-check",
    paper: Paper::Lab,
    question: "Do fio and sysbench measure what the lab measures, where they can express it?",
    published_result: "No paper. The Draconis paper used sysbench; within 10 % the two should agree.",
    caveat: "Both do the same: the same file, written out before, by pread and pwrite of one \
               thread, aligned, past the kernel's cache (the last one through it, an fsync after \
               each). fio looks at the clock in whole milliseconds for its speed and starts its \
               thread within that; what is left is noise, above all where a neighbour uses the \
               same disk.",
    parameters: &[
        parameter("area", "length of the file", "64M", "1G"),
        parameter("requests", "requests of each job", "6000", "50000"),
    ],
    subjects: &["dir"],
    accepts: |kind| kind == Kind::Directory,
    repetitions: (2, 3),
    warms_up: false,
};

impl Experiment for FioCheck {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![Figure::new(Shape::Bars, "speed", "The same jobs").y("bytes", "B/s").log_y()]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        context.number("area")
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number("area")?;
        prepare(context, &subject.files()?, "area", area)?;
        let dir = subject.directory().context("a directory")?.to_path_buf();
        let mut samples = vec![];
        for (name, job, block) in JOBS {
            context.check()?;
            let (mut theirs, mut ours, mut sysbench) = (vec![], vec![], vec![]);
            // Alternates the order, so that other load affects both programs.
            for turn in 0..TURNS {
                let even = (turn + context.repetition).is_multiple_of(2);
                for fio_now in [even, !even] {
                    context.check()?;
                    wait_idle();
                    if !fio_now {
                        ours.push(Self::by_us(context, subject, job, block)?);
                        continue;
                    }
                    match Self::by_fio(context, &dir.join("area"), job, block) {
                        Ok(speed) => theirs.push(speed),
                        Err(error) => context.note(format!("without fio: {error:#}")),
                    }
                }
                if job == "randwrite" {
                    wait_idle();
                    match Self::by_sysbench(context, &dir) {
                        Ok(speed) => sysbench.push(speed),
                        Err(error) => context.note(format!("without sysbench: {error:#}")),
                    }
                }
            }
            for (by, speeds) in [("fio", theirs), ("lab", ours), ("sysbench", sysbench)] {
                let speed = stats::median(&speeds);
                samples.extend(speed.map(|speed| Sample::named("speed", by, name, speed)));
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let mut found = vec![];
        for subject in points.subjects() {
            for (name, _, _) in JOBS {
                let of = |by| points.named("speed", subject, by, name);
                for by in ["fio", "sysbench"] {
                    if let (Some(ours), Some(theirs)) = (of("lab"), of(by)) {
                        let off = (ours / theirs - 1.0) * 100.0;
                        let agrees = if off.abs() <= 10.0 { "agrees" } else { "differs" };
                        found.push(format!(
                            "{subject}, {name}: {}, {by} {}: {agrees} ({off:+.1} %).",
                            units::in_unit(ours, "B/s"),
                            units::in_unit(theirs, "B/s"),
                        ));
                    }
                }
            }
        }
        found
    }
}
