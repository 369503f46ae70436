//! Cost of worker deaths for the programs on a mount.
//!
//! ```text
//!   answers:  ask ─ ask ─ ask ─╳───────── ask ─ ask        how long the first one takes
//!   reading:  calm │ killed │ calm │ killed                how much less is done in the same time
//!   writing:  calm │ killed │ calm │ killed
//! ```

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use draconis_service::client::{RuntimeDir, request_if_running};
use draconis_service::protocol::{Reply, Request};
use rustix::fs::{Advice, AtFlags, CWD, StatxFlags};
use rustix::process::{Pid, Signal};

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::stats;
use crate::subject::{Subject, SubjectKind};
use crate::units;
use draconis_device::Random;

/// See the module.
pub struct WorkerDeathExperiment;

/// Interval between deaths while a program reads or writes.
const KILL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum time until a killed worker is replaced.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
/// Length of files that are read, written and renamed, in bytes.
const FILE_BYTES: usize = 256 << 10;
/// Number of names that are overwritten in turn.
const FILE_NAME_COUNT: u64 = 64;
/// Pairs of undisturbed and disturbed measurements.
const MEASUREMENT_PAIRS: u64 = 3;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "killed",
    paper: PaperSource::Lab,
    question: "What does a program notice whose mount loses its worker: how long does the first \
           answer take, and how much less is read and written while one dies every 100 ms?",
    published_result: "No paper: a process of Singularity that fails is closed, and what it served with \
              it.",
    caveat: "The first answer is one that was asked for after the death, of a program that asks \
               without a pause; what the worker did before it is in its log. The price is the part \
               of the work that is not done for each death a second.",
    parameters: &[
        new_parameter("kills", "deaths whose first answer is awaited", "10", "400"),
        new_parameter("seconds", "how long is read, and written", "2", "12"),
        new_parameter("file", "what is read, round and round", "64M", "256M"),
    ],
    subjects: &["draconis", "draconis:ext4"],
    accepts: |kind| kind == SubjectKind::Directory,
    repetitions: (1, 3),
    warms_up: false,
};

impl Experiment for WorkerDeathExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Dots, "answer", "The first answer after each death")
                .with_x_axis("death", "")
                .with_y_axis("time", "ns")
                .with_log_y(),
            Figure::new(FigureShape::Bars, "speed", "Bytes, undisturbed and while workers die")
                .with_y_axis("bytes", "B/s"),
            Figure::new(FigureShape::Bars, "price", "What one death a second costs")
                .with_y_axis("price", "%"),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        Ok(context.number_parameter("file")?
            + (FILE_NAME_COUNT + 2) * FILE_BYTES as u64
            + (64 << 20))
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let at = subject.directory().context("a directory")?.to_path_buf();
        let victim = KillTarget::of_mount(&at)?;
        let mut samples = measure_first_replies(context, &victim, &at)?;
        let period = Duration::from_secs(context.number_parameter("seconds")?)
            / (2 * MEASUREMENT_PAIRS as u32);
        let read = ReadLoad::new(&at, context)?;
        samples.extend(measure_slowdown(context, &victim, "read", period, || read.once())?);
        let write = WriteLoad::new(&at, context.seed);
        samples.extend(measure_slowdown(context, &victim, "write and rename", period, || {
            write.once()
        })?);
        for path in read.files.iter().chain(&write.names) {
            std::fs::remove_file(path)?;
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let line = points.medians_by_x("answer", subject, "");
            let times: Vec<f64> = line.into_iter().map(|(_, y)| y).collect();
            let price = |of| {
                points.median_of_label("price", subject, "", of).map(units::format_significant)
            };
            Some(format!(
                "{subject}: the first answer after {} deaths took {} in the median, {} of 99 of \
                 100, {} at most; each death a second costs {} % of reading, {} % of writing.",
                times.len(),
                units::format_time_ns(stats::median(&times)?),
                units::format_time_ns(stats::quantile(&times, 0.99)?),
                units::format_time_ns(times.iter().copied().fold(0.0, f64::max)),
                price("read")?,
                price("write and rename")?,
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// The mount whose workers are killed.
struct KillTarget {
    directory: RuntimeDir,
    at: PathBuf,
}

impl KillTarget {
    fn of_mount(at: &Path) -> anyhow::Result<Self> {
        let victim = Self { directory: RuntimeDir::open()?, at: at.canonicalize()? };
        victim.worker()?;
        Ok(victim)
    }

    /// Returns the process ID of the worker, if one is serving.
    fn worker(&self) -> anyhow::Result<Option<u32>> {
        let Some(Reply::Status(status)) = request_if_running(&self.directory, &Request::Status)?
        else {
            bail!("{} is not served by draconis", self.at.display());
        };
        let mount =
            status.mounts.into_iter().find(|mount| Path::new(&mount.mount_point) == self.at);
        let mount = mount.with_context(|| format!("{} is not mounted", self.at.display()))?;
        if mount.state == "dead" {
            bail!("{} is dead: {}", self.at.display(), mount.why.unwrap_or_default());
        }
        Ok((mount.state == "serving").then_some(mount.worker_pid))
    }

    /// Waits for a worker other than `last` and kills it; returns its ID and the start of the kill.
    fn kill(&self, last: u32) -> anyhow::Result<(u32, Instant)> {
        let until = Instant::now() + RESTART_TIMEOUT;
        loop {
            if let Some(pid) = self.worker()?.filter(|pid| *pid != last) {
                let process = Pid::from_raw(pid as i32).context("a process without a number")?;
                let before = Instant::now();
                rustix::process::kill_process(process, Signal::KILL)?;
                return Ok((pid, before));
            }
            if Instant::now() > until {
                bail!("no worker followed the one that was killed");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Measures the time from each death to the first reply.
fn measure_first_replies(
    context: &RunContext,
    victim: &KillTarget,
    at: &Path,
) -> anyhow::Result<Vec<Sample>> {
    let (began, over) = (Instant::now(), AtomicBool::new(false));
    let now = || began.elapsed().as_nanos() as u64;
    // Time of the death that no reply has followed yet; 0 if none.
    let (died, waits) = (AtomicU64::new(0), Mutex::new(vec![]));
    let path = at.join("asked");
    File::create(&path)?;
    let asked = || -> anyhow::Result<()> {
        while !over.load(Ordering::Relaxed) {
            let death = died.load(Ordering::Acquire);
            // FORCE_SYNC always asks the server.
            rustix::fs::statx(CWD, &path, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS)?;
            if death != 0 {
                waits.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.push(now() - death);
                died.store(0, Ordering::Release);
            }
        }
        Ok(())
    };
    let killed = || -> anyhow::Result<()> {
        let mut random = Random::new(context.seed);
        let mut last = 0;
        for _ in 0..context.number_parameter("kills")? {
            context.check_not_stopped()?;
            std::thread::sleep(Duration::from_millis(200 + random.next_below(200)));
            let (killed, before) = victim.kill(last)?;
            last = killed;
            let before = before.duration_since(began).as_nanos() as u64;
            died.store(before.max(1), Ordering::Release);
            let until = Instant::now() + RESTART_TIMEOUT;
            while died.load(Ordering::Acquire) != 0 {
                if Instant::now() > until {
                    bail!("nothing was answered after a death");
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let asking = scope.spawn(asked);
        let killed = killed();
        over.store(true, Ordering::Relaxed);
        let asked = asking.join().map_err(|_| anyhow::anyhow!("who asked panicked"))?;
        killed.and(asked)
    })?;
    std::fs::remove_file(&path)?;
    let waits = waits.into_inner().map_err(|_| anyhow::anyhow!("poisoned"))?;
    let sample = |(nth, ns): (usize, u64)| Sample::at_x("answer", "", nth as f64, ns as f64);
    Ok(waits.into_iter().enumerate().map(sample).collect())
}

/// Measures the speed of `work`, undisturbed and while workers die, and the cost of one death/s.
fn measure_slowdown(
    context: &RunContext,
    victim: &KillTarget,
    name: &str,
    period: Duration,
    mut work: impl FnMut() -> anyhow::Result<u64>,
) -> anyhow::Result<Vec<Sample>> {
    let mut for_a_while = || -> anyhow::Result<f64> {
        let (began, mut bytes) = (Instant::now(), 0);
        while began.elapsed() < period {
            context.check_not_stopped()?;
            bytes += work()?;
        }
        Ok(bytes as f64 / began.elapsed().as_secs_f64())
    };
    // Warm-up.
    for_a_while()?;
    let (mut calm, mut disturbed, mut prices) = (vec![], vec![], vec![]);
    for _ in 0..MEASUREMENT_PAIRS {
        let without = for_a_while()?;
        let over = AtomicBool::new(false);
        let (with, deaths, seconds) = std::thread::scope(|scope| {
            let killer = scope.spawn(|| -> anyhow::Result<u64> {
                let (mut last, mut deaths) = (0, 0);
                while !over.load(Ordering::Relaxed) {
                    last = victim.kill(last)?.0;
                    deaths += 1;
                    std::thread::sleep(KILL_INTERVAL);
                }
                Ok(deaths)
            });
            let began = Instant::now();
            let with = for_a_while();
            let seconds = began.elapsed().as_secs_f64();
            over.store(true, Ordering::Relaxed);
            let deaths = killer.join().map_err(|_| anyhow::anyhow!("who killed panicked"))??;
            anyhow::Ok((with?, deaths as f64, seconds))
        })?;
        prices.push((1.0 - with / without) * 100.0 / (deaths / seconds));
        calm.push(without);
        disturbed.push(with);
    }
    let median = |all: &[f64]| stats::median(all).unwrap_or_default();
    Ok(vec![
        Sample::labelled("speed", "", name, median(&calm)),
        Sample::labelled(
            "speed",
            "",
            &format!("{name}, one dies every 100 ms"),
            median(&disturbed),
        ),
        Sample::labelled("price", "", name, median(&prices)),
    ])
}

/// Files that are read in sequence, each from the server.
struct ReadLoad {
    files: Vec<PathBuf>,
    next: AtomicU64,
}

impl ReadLoad {
    fn new(at: &Path, context: &RunContext) -> anyhow::Result<Self> {
        let count = context.number_parameter("file")?.div_ceil(FILE_BYTES as u64);
        let files: Vec<_> = (0..count).map(|nth| at.join(format!("read-{nth}"))).collect();
        let mut bytes = vec![0; FILE_BYTES];
        Random::new(context.seed).fill(&mut bytes);
        for path in &files {
            context.check_not_stopped()?;
            std::fs::write(path, &bytes)?;
        }
        File::open(at)?.sync_all()?;
        Ok(Self { files, next: AtomicU64::new(0) })
    }

    fn once(&self) -> anyhow::Result<u64> {
        let nth = self.next.fetch_add(1, Ordering::Relaxed) % self.files.len() as u64;
        let path = self.files.get(nth as usize).context("no file")?;
        let mut file = File::open(path)?;
        // Drops the page cache, so that the server must be asked.
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
        let (mut buffer, mut bytes) = (vec![0; 128 << 10], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(bytes),
                got => bytes += got as u64,
            }
        }
    }
}

/// Files that are written and renamed over older ones.
struct WriteLoad {
    names: Vec<PathBuf>,
    new: PathBuf,
    bytes: Vec<u8>,
    next: AtomicU64,
}

impl WriteLoad {
    fn new(at: &Path, seed: u64) -> Self {
        let mut bytes = vec![0; FILE_BYTES];
        Random::new(seed).fill(&mut bytes);
        let names = (0..FILE_NAME_COUNT).map(|nth| at.join(format!("written-{nth}"))).collect();
        Self { names, new: at.join("new"), bytes, next: AtomicU64::new(0) }
    }

    fn once(&self) -> anyhow::Result<u64> {
        let nth = self.next.fetch_add(1, Ordering::Relaxed) % FILE_NAME_COUNT;
        File::create(&self.new)?.write_all(&self.bytes)?;
        std::fs::rename(&self.new, self.names.get(nth as usize).context("no name")?)?;
        Ok(self.bytes.len() as u64)
    }
}
