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

use small_files::{ByLibrary, BySystemCall};

use super::reading::ColdCheck;
use super::{Experiment, ExperimentInfo, Paper};
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, Subject, time_output};
use crate::units;
use draconis_device::Random;

/// See the module.
pub struct Mount;

/// Size of one append, in bytes.
const APPEND_BYTES: usize = 512;
/// Number of concurrent programs that append to logs.
const CLIENTS: u64 = 16;
const ONE_LOGS: &str = "append and fsync";
const ALL_LOG: &str = "append and fsync, 16 clients";
/// Name of the step whose extents are counted.
const COPIED: &str = "cp -r in";
/// Buffer size of the paper, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// Returns a rate per second.
fn rate(name: &str, count: u64, time: Duration) -> Sample {
    Sample::named("rate", "", name, count as f64 / time.as_secs_f64().max(1e-9))
}

/// One pass: directory of the subject, and results.
struct Pass<'a> {
    context: &'a Context,
    at: PathBuf,
    samples: Vec<Sample>,
}

impl Pass<'_> {
    fn took(&mut self, name: &str, time: Duration) {
        self.samples.push(Sample::named("time", "", name, time.as_nanos() as f64));
    }

    fn speed(&mut self, name: &str, bytes: u64, time: Duration) {
        let speed = bytes as f64 / time.as_secs_f64().max(1e-9);
        self.samples.push(Sample::named("speed", "", name, speed));
    }

    /// Copies a real tree in.
    fn copy_in(&mut self) -> anyhow::Result<()> {
        let tree = self.context.text("tree")?;
        let (_, bytes) = count_names_and_bytes(Path::new(tree))?;
        let target = self.at.join("tree");
        // Warms the source; otherwise its device would be measured.
        time_output(Command::new("tar").arg("-C").arg(tree).args(["-cf", "-", "."]))?;
        let time = time_output(Command::new("cp").arg("-r").arg(tree).arg(&target))?;
        self.speed(COPIED, bytes, time);
        Ok(())
    }

    /// Lists and archives the tree.
    fn walk(&mut self) -> anyhow::Result<()> {
        let tree = self.at.join("tree");
        let time = time_output(Command::new("find").arg(&tree))?;
        self.took("find, cold", time);
        let time = time_output(Command::new("find").arg(&tree).arg("-ls"))?;
        self.took("find -ls", time);
        Ok(())
    }

    fn archive(&mut self) -> anyhow::Result<()> {
        let tree = self.at.join("tree");
        let (_, bytes) = count_names_and_bytes(Path::new(self.context.text("tree")?))?;
        let time = time_output(Command::new("tar").arg("-C").arg(&tree).args(["-cf", "-", "."]))?;
        self.speed("tar, cold", bytes, time);
        Ok(())
    }

    /// Writes one large file and syncs it.
    fn write_file(&mut self) -> anyhow::Result<()> {
        let bytes = self.context.number("file")?;
        let mut piece = vec![0; 1 << 20];
        Random::new(self.context.seed).fill(&mut piece);
        let mut file = File::create(self.at.join("file"))?;
        let started = Instant::now();
        for _ in 0..bytes.div_ceil(1 << 20) {
            self.context.check()?;
            file.write_all(&piece)?;
        }
        file.sync_all()?;
        self.speed("write and fsync", bytes, started.elapsed());
        Ok(())
    }

    fn read_file(&mut self, name: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut file = File::open(self.at.join("file"))?;
        let (mut buffer, mut bytes) = (vec![0; BUFFER_BYTES], 0);
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                got => bytes += got as u64,
            }
        }
        self.speed(name, bytes, started.elapsed());
        Ok(())
    }

    /// Creates, stats, renames and removes small files.
    fn small_files(&mut self) -> anyhow::Result<()> {
        let files = self.context.number("files")?;
        let by = BySystemCall::new(self.at.clone(), files)?;
        self.samples.extend(small_files::measure(&by, files)?);
        Ok(())
    }

    /// Counts the extents of the copied files.
    fn scattered(&mut self, image: &Path) -> anyhow::Result<()> {
        let extents = extents::of_a_file(image, "/tree")?;
        self.samples.push(Sample::named("extents", "", COPIED, extents));
        Ok(())
    }

    /// Appends small durable records to a log, and updates pages of a database.
    fn appends(&mut self) -> anyhow::Result<()> {
        let appends = self.context.number("appends")?;
        let mut log = File::create(self.at.join("log"))?;
        let piece = [0x5a; APPEND_BYTES];
        let started = Instant::now();
        for _ in 0..appends {
            log.write_all(&piece)?;
            log.sync_all()?;
        }
        self.samples.push(rate(ONE_LOGS, appends, started.elapsed()));
        let file = File::create(self.at.join("database"))?;
        file.write_all_at(&vec![0; 1 << 20], 0)?;
        file.sync_all()?;
        let started = Instant::now();
        for i in 0..appends {
            file.write_all_at(&piece, i % 200 * 4096)?;
            file.sync_data()?;
        }
        self.samples.push(rate("overwrite and fdatasync", appends, started.elapsed()));
        Ok(())
    }

    /// Appends to one log per program; the programs can share commits.
    fn appends_of_many(&mut self) -> anyhow::Result<()> {
        let appends = self.context.number("appends")?;
        let log = |client: u64| -> anyhow::Result<File> {
            Ok(File::create(self.at.join(format!("log {client}")))?)
        };
        let logs: Vec<File> = (0..CLIENTS).map(log).collect::<anyhow::Result<_>>()?;
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
        self.samples.push(rate(ALL_LOG, appends * CLIENTS, started.elapsed()));
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
    paper: Paper::Lab,
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
        parameter("tree", "the tree that is copied in", "/usr/share/perl", "/usr/share"),
        parameter("file", "length of the large file", "48M", "400M"),
        parameter("files", "small files", "1000", "20000"),
        parameter("appends", "durable appends", "100", "500"),
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
    accepts: |kind| matches!(kind, Kind::Directory | Kind::Library),
    repetitions: (2, 3),
    warms_up: false,
};

impl Experiment for Mount {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Bars, "speed", "Bytes").y("bytes", "B/s").log_y(),
            Figure::new(Shape::Bars, "rate", "Operations").y("operations", "/s").log_y(),
            Figure::new(Shape::Bars, "time", "Walking a tree, and unmounting")
                .y("time", "ns")
                .log_y(),
            Figure::new(Shape::Bars, "extents", "Pieces in which a file lies that was copied in")
                .y("extents, mean of all files", ""),
        ]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        let (names, bytes) = count_names_and_bytes(Path::new(context.text("tree")?))?;
        let files = context.number("files")?;
        Ok(bytes + names * 8192 + context.number("file")? + files * 16_384 + (64 << 20))
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        if let Some(library) = subject.library() {
            let files = context.number("files")?;
            return small_files::measure(&ByLibrary::new(library.volume()?, files)?, files);
        }
        let at = subject.directory().context("a directory")?.to_path_buf();
        let keeps = subject.name() != "no-op";
        let mut pass = Pass { context, at, samples: vec![] };
        pass.copy_in()?;
        pass.write_file()?;
        pass.small_files()?;
        pass.appends()?;
        pass.appends_of_many()?;
        let started = Instant::now();
        let chill = ColdCheck::down(subject)?;
        if keeps {
            pass.took("unmount and mount", started.elapsed());
            if let Some(image) = subject.image() {
                pass.scattered(&image)?;
            }
            pass.walk()?;
            ColdCheck::down(subject)?;
            pass.archive()?;
            ColdCheck::down(subject)?;
            pass.read_file("read, cold")?;
            pass.read_file("read, warm")?;
            let bytes = context.number("file")?;
            if !chill.was_cold(subject, bytes) {
                context
                    .note(format!("{}: cold reads did not all reach the device", subject.name()));
            }
        }
        let Pass { at, samples, .. } = pass;
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

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
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
                let of = |subject| points.named(metric, subject, "", label);
                let (ours, theirs) = (of(ours)?, of(peer)?);
                let better = if metric == "time" { theirs / ours } else { ours / theirs };
                Some(format!("{label} {}", units::significant(better)))
            };
            let all = [
                ("speed", COPIED),
                ("speed", "write and fsync"),
                ("speed", "read, cold"),
                ("speed", "tar, cold"),
                ("time", "find, cold"),
                ("rate", "create"),
                ("rate", "stat"),
                ("rate", "open"),
                ("rate", "rename"),
                ("rate", "unlink"),
                ("rate", ONE_LOGS),
                ("rate", ALL_LOG),
                ("rate", "overwrite and fdatasync"),
                ("time", "unmount and mount"),
            ];
            let told: Vec<String> =
                all.iter().filter_map(|(metric, label)| ratio(metric, label)).collect();
            (!told.is_empty()).then(|| format!("{ours}, times {peer}: {}.", told.join(", ")))
        };
        let all = |what: &str, metric: &'static str, label: &str| {
            let of = |subject: &&str| {
                let value = points.named(metric, subject, "", label)?;
                Some(format!("{subject} {}", units::count(value)))
            };
            let told: Vec<String> = subjects.iter().filter_map(of).collect();
            (!told.is_empty()).then(|| format!("{what}: {}.", told.join(", ")))
        };
        let counted = [
            all("Files made and written in a second", "rate", "create"),
            all("Extents of a file that was copied in", "extents", COPIED),
        ];
        let shared: Vec<String> = subjects
            .iter()
            .filter_map(|subject| {
                let of = |label| points.named("rate", subject, "", label);
                Some(format!("{subject} {}", units::significant(of(ALL_LOG)? / of(ONE_LOGS)?)))
            })
            .collect();
        let shared = (!shared.is_empty())
            .then(|| format!("16 clients that log, times one: {}.", shared.join(", ")));
        let types: Vec<String> = ["create", "rename", "unlink"]
            .iter()
            .filter_map(|label| {
                let of = |subject| points.named("rate", subject, "", label);
                let ratio = of("draconis:ext4")? / of("draconis")?;
                Some(format!("{label} {}", units::significant(ratio)))
            })
            .collect();
        let types = (!types.is_empty())
            .then(|| format!("draconis:ext4, times draconis: {}.", types.join(", ")));
        let others = counted.into_iter().flatten().chain(shared).chain(types);
        pairs.filter_map(tell).chain(others).collect()
    }
}
