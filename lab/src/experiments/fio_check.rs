//! The lab compared with fio and sysbench: the same requests on the same file.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::parallel::RandomWriteLoad;
use super::reading::{prepare_file, read_all};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct FioComparison;

/// Jobs that both programs can express.
const FIO_JOBS: [(&str, &str, u64); 4] = [
    ("read in sequence, 64 KiB, direct", "read", 64 << 10),
    ("read at random, 4 KiB, direct", "randread", 4 << 10),
    ("write at random, 4 KiB, direct", "randwrite", 4 << 10),
    ("write in sequence, 4 KiB, fsync each", "write", 4 << 10),
];

/// Turns of each program per pass.
const TURNS_PER_PASS: u64 = 2;

impl FioComparison {
    /// Returns the number of requests, fewer for writes because an fsync takes long.
    fn request_count(context: &RunContext, job: &str, block: u64) -> anyhow::Result<u64> {
        let requests = context.number_parameter("requests")? / if job == "write" { 5 } else { 1 };
        Ok(requests.min(context.number_parameter("area")? / block))
    }

    fn measure_with_fio(
        context: &RunContext,
        file: &Path,
        job: &str,
        block: u64,
    ) -> anyhow::Result<f64> {
        let area = context.number_parameter("area")?;
        let bytes = Self::request_count(context, job, block)? * block;
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

    fn measure_with_lab(
        context: &RunContext,
        subject: &dyn Subject,
        job: &str,
        block: u64,
    ) -> anyhow::Result<f64> {
        let (clock, area) = (subject.clock(), context.number_parameter("area")?);
        let requests = Self::request_count(context, job, block)?;
        let bytes = (requests * block) as f64;
        if job == "randwrite" {
            let load = RandomWriteLoad {
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
        let mut buffer = AlignedBuffer::new(block as usize);
        let mut dice = context.new_rng();
        let mut watch = Stopwatch::start(&*clock);
        for nth in 0..requests {
            context.check_not_stopped()?;
            match job {
                "randread" => read_all(&*file, dice.next_below(area / block) * block, &mut buffer)?,
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
    fn measure_with_sysbench(context: &RunContext, dir: &Path) -> anyhow::Result<f64> {
        let call = || {
            let mut sysbench = Command::new("sysbench");
            sysbench.current_dir(dir).args(["fileio", "--file-num=1", "--file-io-mode=sync"]);
            sysbench.args(["--file-extra-flags=direct", "--file-fsync-freq=0", "--time=0"]);
            sysbench.args(["--file-fsync-end=off", "--file-test-mode=rndwr"]);
            sysbench.arg("--file-block-size=4096");
            sysbench.arg(format!("--file-total-size={}", context.number_parameter("area")?));
            sysbench.arg(format!("--events={}", context.number_parameter("requests")?));
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
    paper: PaperSource::Lab,
    question: "Do fio and sysbench measure what the lab measures, where they can express it?",
    published_result: "No paper. The Draconis paper used sysbench; within 10 % the two should agree.",
    caveat: "Both do the same: the same file, written out before, by pread and pwrite of one \
               thread, aligned, past the kernel's cache (the last one through it, an fsync after \
               each). fio looks at the clock in whole milliseconds for its speed and starts its \
               thread within that; what is left is noise, above all where a neighbour uses the \
               same disk.",
    parameters: &[
        new_parameter("area", "length of the file", "64M", "1G"),
        new_parameter("requests", "requests of each job", "6000", "50000"),
    ],
    subjects: &["dir"],
    accepts: |kind| kind == SubjectKind::Directory,
    repetitions: (2, 3),
    warms_up: false,
};

impl Experiment for FioComparison {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "speed", "The same jobs")
                .with_y_axis("bytes", "B/s")
                .with_log_y(),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("area")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number_parameter("area")?;
        prepare_file(context, &subject.files()?, "area", area)?;
        let dir = subject.directory().context("a directory")?.to_path_buf();
        let mut samples = vec![];
        for (name, job, block) in FIO_JOBS {
            context.check_not_stopped()?;
            let (mut theirs, mut ours, mut sysbench) = (vec![], vec![], vec![]);
            // Alternates the order, so that other load affects both programs.
            for turn in 0..TURNS_PER_PASS {
                let even = (turn + context.repetition).is_multiple_of(2);
                for fio_now in [even, !even] {
                    context.check_not_stopped()?;
                    wait_idle();
                    if !fio_now {
                        ours.push(Self::measure_with_lab(context, subject, job, block)?);
                        continue;
                    }
                    match Self::measure_with_fio(context, &dir.join("area"), job, block) {
                        Ok(speed) => theirs.push(speed),
                        Err(error) => context.add_note(format!("without fio: {error:#}")),
                    }
                }
                if job == "randwrite" {
                    wait_idle();
                    match Self::measure_with_sysbench(context, &dir) {
                        Ok(speed) => sysbench.push(speed),
                        Err(error) => context.add_note(format!("without sysbench: {error:#}")),
                    }
                }
            }
            for (by, speeds) in [("fio", theirs), ("lab", ours), ("sysbench", sysbench)] {
                let speed = stats::median(&speeds);
                samples.extend(speed.map(|speed| Sample::labelled("speed", by, name, speed)));
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let mut found = vec![];
        for subject in points.subjects() {
            for (name, _, _) in FIO_JOBS {
                let of = |by| points.median_of_label("speed", subject, by, name);
                for by in ["fio", "sysbench"] {
                    if let (Some(ours), Some(theirs)) = (of("lab"), of(by)) {
                        let off = (ours / theirs - 1.0) * 100.0;
                        let agrees = if off.abs() <= 10.0 { "agrees" } else { "differs" };
                        found.push(format!(
                            "{subject}, {name}: {}, {by} {}: {agrees} ({off:+.1} %).",
                            units::format_in_unit(ours, "B/s"),
                            units::format_in_unit(theirs, "B/s"),
                        ));
                    }
                }
            }
        }
        found
    }
}
