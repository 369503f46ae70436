//! Typical use of a mounted file system: copy in, list, archive, read, create and remove
//! small files, append to logs, unmount. The library called directly is the lower bound for small
//! files.

mod extents;
mod small_files;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use small_files::{SmallFilesByLibrary, SmallFilesBySystemCall};

use super::reading::ColdCheck;
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{Subject, SubjectKind, time_command};
use crate::units;
use draconis_device::Random;

/// See the module.
pub struct MountExperiment;

/// Size of one append, in bytes.
const APPEND_BYTES: usize = 512;
/// Number of concurrent programs that append to logs.
const CLIENT_COUNT: u64 = 16;
const SINGLE_APPEND_LABEL: &str = "append and fsync";
const CONCURRENT_APPEND_LABEL: &str = "append and fsync, 16 clients";
/// Name of the step whose extents are counted.
const COPY_STEP_LABEL: &str = "cp -r in";
/// Buffer size of the paper, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// Returns a rate per second.
fn rate_sample(name: &str, count: u64, time: Duration) -> Sample {
    Sample::labelled("rate", "", name, count as f64 / time.as_secs_f64().max(1e-9))
}

/// One pass: directory of the subject, and results.
struct MountPass<'a> {
    context: &'a RunContext,
    at: PathBuf,
    samples: Vec<Sample>,
}

impl MountPass<'_> {
    fn add_time(&mut self, name: &str, time: Duration) {
        self.samples.push(Sample::labelled("time", "", name, time.as_nanos() as f64));
    }

    fn add_speed(&mut self, name: &str, bytes: u64, time: Duration) {
        let speed = bytes as f64 / time.as_secs_f64().max(1e-9);
        self.samples.push(Sample::labelled("speed", "", name, speed));
    }

    /// Copies a real tree in.
    fn measure_copy_in(&mut self) -> anyhow::Result<()> {
        let tree = self.context.text_parameter("tree")?;
        let (_, bytes) = count_names_and_bytes(Path::new(tree))?;
        let target = self.at.join("tree");
        // Warms the source; otherwise its device would be measured.
        time_command(Command::new("tar").arg("-C").arg(tree).args(["-cf", "-", "."]))?;
        let time = time_command(Command::new("cp").arg("-r").arg(tree).arg(&target))?;
        self.add_speed(COPY_STEP_LABEL, bytes, time);
        Ok(())
    }

    /// Lists and archives the tree.
    fn measure_walk(&mut self) -> anyhow::Result<()> {
        let tree = self.at.join("tree");
        let time = time_command(Command::new("find").arg(&tree))?;
        self.add_time("find, cold", time);
        let time = time_command(Command::new("find").arg(&tree).arg("-ls"))?;
        self.add_time("find -ls", time);
        Ok(())
    }

    fn measure_archive(&mut self) -> anyhow::Result<()> {
        let tree = self.at.join("tree");
        let (_, bytes) = count_names_and_bytes(Path::new(self.context.text_parameter("tree")?))?;
        let time = time_command(Command::new("tar").arg("-C").arg(&tree).args(["-cf", "-", "."]))?;
        self.add_speed("tar, cold", bytes, time);
        Ok(())
    }

    /// Writes one large file and syncs it.
    fn measure_write_file(&mut self) -> anyhow::Result<()> {
        let bytes = self.context.number_parameter("file")?;
        let mut piece = vec![0; 1 << 20];
        Random::new(self.context.seed).fill(&mut piece);
        let mut file = File::create(self.at.join("file"))?;
        let started = Instant::now();
        for _ in 0..bytes.div_ceil(1 << 20) {
            self.context.check_not_stopped()?;
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        self.add_speed("write and fsync", bytes, started.elapsed());
        Ok(())
    }

    fn measure_read_file(&mut self, name: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut file = File::open(self.at.join("file"))?;
        let (mut buffer, mut bytes) = (vec![0; BUFFER_BYTES], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                got => bytes += got as u64,
            }
        }
        self.add_speed(name, bytes, started.elapsed());
        Ok(())
    }

    /// Creates, stats, renames and removes small files.
    fn measure_small_files(&mut self) -> anyhow::Result<()> {
        let files = self.context.number_parameter("files")?;
        let by = SmallFilesBySystemCall::new(self.at.clone(), files)?;
        self.samples.extend(small_files::measure_small_files(&by, files)?);
        Ok(())
    }

    /// Counts the extents of the copied files.
    fn count_extents(&mut self, image: &Path) -> anyhow::Result<()> {
        let extents = extents::mean_extents_per_file(image, "/tree")?;
        self.samples.push(Sample::labelled("extents", "", COPY_STEP_LABEL, extents));
        Ok(())
    }

    /// Appends small durable records to a log, and updates pages of a database.
    fn measure_appends(&mut self) -> anyhow::Result<()> {
        let appends = self.context.number_parameter("appends")?;
        let mut log = File::create(self.at.join("log"))?;
        let piece = [0x5a; APPEND_BYTES];
        let started = Instant::now();
        for _ in 0..appends {
            log.write_all(&piece)?;
            log.sync_all()?;
        }
        self.samples.push(rate_sample(SINGLE_APPEND_LABEL, appends, started.elapsed()));
        let file = File::create(self.at.join("database"))?;
        file.write_all_at(&vec![0; 1 << 20], 0)?;
        file.sync_all()?;
        let started = Instant::now();
        for i in 0..appends {
            file.write_all_at(&piece, i % 200 * 4096)?;
            file.sync_data()?;
        }
        self.samples.push(rate_sample("overwrite and fdatasync", appends, started.elapsed()));
        Ok(())
    }

    /// Appends to one log per program; the programs can share commits.
    fn measure_concurrent_appends(&mut self) -> anyhow::Result<()> {
        let appends = self.context.number_parameter("appends")?;
        let log = |client: u64| -> anyhow::Result<File> {
            Ok(File::create(self.at.join(format!("log {client}")))?)
        };
        let logs: Vec<File> = (0..CLIENT_COUNT).map(log).collect::<anyhow::Result<_>>()?;
        let started = Instant::now();
        std::thread::scope(|scope| {
            let append = |mut log: File| {
                move || -> std::io::Result<()> {
                    for _ in 0..appends {
                        log.write_all(&[0x5a; APPEND_BYTES])?;
                        log.sync_all()?;
                    }
                    Ok(())
                }
            };
            let clients: Vec<_> = logs.into_iter().map(|log| scope.spawn(append(log))).collect();
            for client in clients {
                client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
            }
            anyhow::Ok(())
        })?;
        self.samples.push(rate_sample(
            CONCURRENT_APPEND_LABEL,
            appends * CLIENT_COUNT,
            started.elapsed(),
        ));
        Ok(())
    }
}

/// Returns the number of names and bytes of a tree.
pub fn count_names_and_bytes(tree: &Path) -> anyhow::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    let mut stack = vec![tree.to_path_buf()];
    while let Some(dir) = stack.pop() {
        let entries = std::fs::read_dir(&dir).with_context(|| dir.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let found = entry.metadata()?;
            files += 1;
            if found.is_dir() {
                stack.push(entry.path());
            } else if found.is_file() {
                bytes += found.len();
            }
        }
    }
    Ok((files, bytes))
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "mount",
    paper: PaperSource::Lab,
    question: "How fast is what people do with a mounted file system, beside the kernel's driver, \
           fuse2fs, and a FUSE server that does nothing?",
    published_result: "No paper: Ext2 on Singularity left open whether a file system outside the kernel can \
              be as fast as one inside.",
    caveat: "What is asked of a FUSE server in small messages - create, stat, unlink - depends \
               on where the scheduler has it run: on the CPU of the program that asks, a message \
               costs 3 to 5 µs each way; on another one, which sleeps meanwhile, a wake-up of 30 \
               to 60 µs each way on a virtual machine. So these rates have two states several \
               times apart, for the server that does nothing as for any other, and change between \
               them by themselves. The server that does nothing keeps no contents, so nothing of \
               it is read back. The library is called in this process, so its rates are what is \
               left once no message is sent. Pieces are counted by debugfs: of a file of more than \
               twelve blocks the first pointer block may lie between two of its own, which makes \
               two of one, for everybody.",
    parameters: &[
        new_parameter("tree", "the tree that is copied in", "/usr/share/perl", "/usr/share"),
        new_parameter("file", "length of the large file", "48M", "400M"),
        new_parameter("files", "small files", "1000", "20000"),
        new_parameter("appends", "durable appends", "100", "500"),
    ],
    subjects: &[
        "kernel:ext2",
        "kernel:ext4",
        "fuse2fs",
        "fuse2fs:ext4",
        "no-op",
        "draconis",
        "draconis:ext4",
        "draconis-lib",
        "draconis-lib:ext4",
    ],
    accepts: |kind| matches!(kind, SubjectKind::Directory | SubjectKind::Library),
    repetitions: (2, 3),
    warms_up: false,
};

impl Experiment for MountExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "speed", "Bytes")
                .with_y_axis("bytes", "B/s")
                .with_log_y(),
            Figure::new(FigureShape::Bars, "rate", "Operations")
                .with_y_axis("operations", "/s")
                .with_log_y(),
            Figure::new(FigureShape::Bars, "time", "Walking a tree, and unmounting")
                .with_y_axis("time", "ns")
                .with_log_y(),
            Figure::new(
                FigureShape::Bars,
                "extents",
                "Pieces in which a file lies that was copied in",
            )
            .with_y_axis("extents, mean of all files", ""),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        let (names, bytes) = count_names_and_bytes(Path::new(context.text_parameter("tree")?))?;
        let files = context.number_parameter("files")?;
        Ok(bytes + names * 8192 + context.number_parameter("file")? + files * 16_384 + (64 << 20))
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        if let Some(library) = subject.library_subject() {
            let files = context.number_parameter("files")?;
            return small_files::measure_small_files(
                &SmallFilesByLibrary::new(library.volume()?, files)?,
                files,
            );
        }
        let at = subject.directory().context("a directory")?.to_path_buf();
        let keeps = subject.name() != "no-op";
        let mut pass = MountPass { context, at, samples: vec![] };
        pass.measure_copy_in()?;
        pass.measure_write_file()?;
        pass.measure_small_files()?;
        pass.measure_appends()?;
        pass.measure_concurrent_appends()?;
        let started = Instant::now();
        let chill = ColdCheck::empty_caches(subject)?;
        if keeps {
            pass.add_time("unmount and mount", started.elapsed());
            if let Some(image) = subject.image() {
                pass.count_extents(&image)?;
            }
            pass.measure_walk()?;
            ColdCheck::empty_caches(subject)?;
            pass.measure_archive()?;
            ColdCheck::empty_caches(subject)?;
            pass.measure_read_file("read, cold")?;
            pass.measure_read_file("read, warm")?;
            let bytes = context.number_parameter("file")?;
            if !chill.was_cold(subject, bytes) {
                context.add_note(format!(
                    "{}: cold reads did not all reach the device",
                    subject.name()
                ));
            }
        }
        let MountPass { at, samples, .. } = pass;
        for entry in std::fs::read_dir(&at)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name == "lost+found") {
                continue;
            }
            if path.is_dir() {
                std::fs::remove_dir_all(path)?;
            } else {
                std::fs::remove_file(path)?;
            }
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let subjects = points.subjects();
        // Compares programs on volumes of the same type.
        let kind = |spec: &str| spec.split_once(':').map_or("ext2", |(_, kind)| kind).to_owned();
        let program = |it: &str| it.split(':').next().unwrap_or_default().to_owned();
        let is_ours = |it: &&&str| matches!(program(it).as_str(), "draconis" | "draconis-lib");
        let pairs = subjects.iter().filter(is_ours).flat_map(|ours| {
            let peers = subjects.iter();
            let peers = peers.filter(move |peer| *peer != ours && program(peer) != "draconis");
            peers
                .filter(move |peer| **peer == "no-op" || kind(peer) == kind(ours))
                .map(move |peer| (ours, peer))
        });
        let tell = |(ours, peer): (&&str, &&str)| {
            let ratio = |metric: &'static str, label: &str| {
                let of = |subject| points.median_of_label(metric, subject, "", label);
                let (ours, theirs) = (of(ours)?, of(peer)?);
                let better = if metric == "time" { theirs / ours } else { ours / theirs };
                Some(format!("{label} {}", units::format_significant(better)))
            };
            let all = [
                ("speed", COPY_STEP_LABEL),
                ("speed", "write and fsync"),
                ("speed", "read, cold"),
                ("speed", "tar, cold"),
                ("time", "find, cold"),
                ("rate", "create"),
                ("rate", "stat"),
                ("rate", "open"),
                ("rate", "rename"),
                ("rate", "unlink"),
                ("rate", SINGLE_APPEND_LABEL),
                ("rate", CONCURRENT_APPEND_LABEL),
                ("rate", "overwrite and fdatasync"),
                ("time", "unmount and mount"),
            ];
            let told: Vec<String> =
                all.iter().filter_map(|(metric, label)| ratio(metric, label)).collect();
            (!told.is_empty()).then(|| format!("{ours}, times {peer}: {}.", told.join(", ")))
        };
        let all = |what: &str, metric: &'static str, label: &str| {
            let of = |subject: &&str| {
                let value = points.median_of_label(metric, subject, "", label)?;
                Some(format!("{subject} {}", units::format_count(value)))
            };
            let told: Vec<String> = subjects.iter().filter_map(of).collect();
            (!told.is_empty()).then(|| format!("{what}: {}.", told.join(", ")))
        };
        let counted = [
            all("Files made and written in a second", "rate", "create"),
            all("Extents of a file that was copied in", "extents", COPY_STEP_LABEL),
        ];
        let shared: Vec<String> = subjects
            .iter()
            .filter_map(|subject| {
                let of = |label| points.median_of_label("rate", subject, "", label);
                Some(format!(
                    "{subject} {}",
                    units::format_significant(
                        of(CONCURRENT_APPEND_LABEL)? / of(SINGLE_APPEND_LABEL)?
                    )
                ))
            })
            .collect();
        let shared = (!shared.is_empty())
            .then(|| format!("16 clients that log, times one: {}.", shared.join(", ")));
        let types: Vec<String> = ["create", "rename", "unlink"]
            .iter()
            .filter_map(|label| {
                let of = |subject| points.median_of_label("rate", subject, "", label);
                let ratio = of("draconis:ext4")? / of("draconis")?;
                Some(format!("{label} {}", units::format_significant(ratio)))
            })
            .collect();
        let types = (!types.is_empty())
            .then(|| format!("draconis:ext4, times draconis: {}.", types.join(", ")));
        let others = counted.into_iter().flatten().chain(shared).chain(types);
        pairs.filter_map(tell).chain(others).collect()
    }
}
