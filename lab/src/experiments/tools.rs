//! Tools that work without a mount, compared with e2fsprogs and the kernel's driver.
//!
//! Each measurement ends when the data is on the device.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::mount::count_names_and_bytes;
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{MountServer, MountedVolume, Subject, SubjectKind, drop_caches, time_command};
use crate::units;
use draconis_device::Random;

/// See the module.
pub struct ToolComparisonExperiment;

/// Measurements: label, our command, and the command that it is compared with.
const COMMAND_PAIRS: &[(&str, &str, &str)] = &[
    ("make and fill a volume", "draconis format", "mke2fs -d"),
    ("make and fill a volume, cold", "draconis format", "mke2fs -d"),
    ("check a volume", "draconis check", "e2fsck -fn"),
    ("check a volume, cold", "draconis check", "e2fsck -fn"),
    ("copy a tree in", "draconis put", "kernel + cp -a"),
    ("unpack an archive", "draconis untar", "kernel + tar"),
    ("copy a tree out, cold", "draconis get", "debugfs rdump"),
    ("copy a tree out, cold", "draconis get", "kernel + tar"),
    ("archive a volume, cold", "draconis tar", "kernel + tar"),
    ("read a large file, cold", "draconis cat", "kernel + cat"),
    ("read a large file", "draconis cat", "kernel + cat"),
];

/// One pass over one type of volume.
struct ToolPass<'a> {
    context: &'a RunContext,
    tree: &'a Path,
    /// Number of names and bytes of the tree.
    weight: (u64, u64),
    /// ext2, ext3 or ext4.
    kind: &'a str,
    is_root: bool,
    dir: tempfile::TempDir,
    samples: Vec<Sample>,
}

impl ToolPass<'_> {
    fn add_speed(&mut self, what: &str, by: &str, bytes: u64, time: Duration) {
        let speed = bytes as f64 / time.as_secs_f64().max(1e-9);
        self.samples.push(Sample::labelled("speed", by, &format_label(self.kind, what), speed));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn draconis(&self) -> Command {
        Command::new(&self.context.workshop.draconis)
    }

    /// Runs all measurements, in the order of their dependencies.
    fn measure(&mut self) -> anyhow::Result<()> {
        self.measure_format(false)?;
        self.measure_check(false)?;
        if drop_caches().is_ok() {
            self.measure_format(true)?;
            self.measure_check(true)?;
        } else {
            self.context.add_note("cold runs need root");
        }
        self.measure_extraction().context("copying out")?;
        self.measure_import().context("copying in")?;
        self.measure_read_file().context("reading a file")
    }

    /// Reads the tree into the page cache; otherwise its device would be measured.
    fn warm_tree(&self) -> anyhow::Result<()> {
        let mut tar = Command::new("tar");
        time_command(tar.arg("-C").arg(self.tree).args(["-cf", "-", "."])).map(drop)
    }

    /// Returns a volume size with space for the tree and its metadata, in KiB.
    fn volume_size_arg(&self) -> String {
        let (names, bytes) = self.weight;
        format!("{}k", (bytes + bytes / 4 + names * 6144 + (64 << 20)) / 1024)
    }

    /// Creates and fills volumes.
    fn measure_format(&mut self, cold: bool) -> anyhow::Result<()> {
        for by in ["mke2fs -d", "draconis format"] {
            self.context.check_not_stopped()?;
            let image = self.path(by);
            let _ = std::fs::remove_file(&image);
            if cold {
                drop_caches()?;
            } else {
                self.warm_tree()?;
            }
            let mut command = if by == "mke2fs -d" {
                let mut command = Command::new("mke2fs");
                command.args(["-q", "-F", "-t", self.kind, "-b", "4096", "-i", "8192", "-d"]);
                command
            } else {
                let mut command = self.draconis();
                command.args(["format", "-t", self.kind, "-b", "4096", "-i", "8192", "--from"]);
                command
            };
            command.arg(self.tree).arg(&image).arg(self.volume_size_arg());
            let started = Instant::now();
            time_command(&mut command)?;
            File::open(&image)?.sync_all()?;
            let what = if cold { "make and fill a volume, cold" } else { "make and fill a volume" };
            self.add_speed(what, by, self.weight.1, started.elapsed());
        }
        Ok(())
    }

    /// Checks the volume of mke2fs with both programs.
    fn measure_check(&mut self, cold: bool) -> anyhow::Result<()> {
        let image = self.path("mke2fs -d");
        for by in ["e2fsck -fn", "draconis check"] {
            self.context.check_not_stopped()?;
            let mut command = if by == "e2fsck -fn" {
                let mut command = Command::new("e2fsck");
                command.arg("-fn").stderr(Stdio::null());
                command
            } else {
                let mut command = self.draconis();
                command.arg("check");
                command
            };
            command.arg(&image);
            if cold {
                drop_caches()?;
            } else {
                // Fills the page cache with the blocks that the check reads.
                time_command(&mut command)?;
            }
            let time = time_command(&mut command)?;
            let what = if cold { "check a volume, cold" } else { "check a volume" };
            let what = format_label(self.kind, what);
            self.samples.push(Sample::labelled("time", by, &what, time.as_nanos() as f64));
        }
        Ok(())
    }

    /// Copies a tree out of a volume, and archives it.
    fn measure_extraction(&mut self) -> anyhow::Result<()> {
        let image = self.path("draconis format");
        let copy = self.path("copy");
        for by in ["kernel + tar", "debugfs rdump", "draconis get"] {
            self.context.check_not_stopped()?;
            std::fs::create_dir_all(&copy)?;
            let _ = drop_caches();
            let started = Instant::now();
            match by {
                "kernel + tar" if !self.is_root => continue,
                "kernel + tar" => {
                    let mounted = self.mount(&image)?;
                    let script = "tar -C \"$1\" -cf - . | tar -C \"$2\" -xf -";
                    let mut shell = Command::new("sh");
                    time_command(
                        shell.args(["-c", script, "sh"]).arg(mounted.mount_point()).arg(&copy),
                    )?;
                }
                "debugfs rdump" => {
                    let mut debugfs = Command::new("debugfs");
                    debugfs.arg("-R").arg(format!("rdump / {}", copy.display())).arg(&image);
                    time_command(debugfs.stderr(Stdio::null()))?;
                }
                _ => {
                    let from = format!("{}:/", image.display());
                    time_command(self.draconis().args(["get", "-r", &from]).arg(&copy))?;
                }
            }
            self.add_speed("copy a tree out, cold", by, self.weight.1, started.elapsed());
            std::fs::remove_dir_all(&copy)?;
        }
        for by in ["kernel + tar", "draconis tar"] {
            self.context.check_not_stopped()?;
            let _ = drop_caches();
            let started = Instant::now();
            if by == "draconis tar" {
                time_command(self.draconis().arg("tar").arg(&image))?;
            } else if self.is_root {
                let mounted = self.mount(&image)?;
                let mut tar = Command::new("tar");
                time_command(tar.arg("-C").arg(mounted.mount_point()).args(["-cf", "-", "."]))?;
            } else {
                continue;
            }
            self.add_speed("archive a volume, cold", by, self.weight.1, started.elapsed());
        }
        Ok(())
    }

    /// Copies the tree into an empty volume, and extracts an archive into one.
    fn measure_import(&mut self) -> anyhow::Result<()> {
        let (image, archive) = (self.path("empty"), self.path("archive"));
        let mut tar = Command::new("tar");
        time_command(tar.arg("-C").arg(self.tree).arg("-cf").arg(&archive).arg("."))?;
        let both = [
            ("copy a tree in", "kernel + cp -a"),
            ("copy a tree in", "draconis put"),
            ("unpack an archive", "kernel + tar"),
            ("unpack an archive", "draconis untar"),
        ];
        for (what, by) in both {
            self.context.check_not_stopped()?;
            let by_kernel = by.starts_with("kernel");
            if by_kernel && !self.is_root {
                continue;
            }
            self.make_empty(&image)?;
            self.warm_tree()?;
            std::io::copy(&mut File::open(&archive)?, &mut std::io::sink())?;
            let started = Instant::now();
            if by_kernel {
                let mounted = self.mount(&image)?;
                let mut command = match by {
                    "kernel + cp -a" => Command::new("cp"),
                    _ => Command::new("tar"),
                };
                match by {
                    "kernel + cp -a" => command.arg("-a").arg(self.tree).arg(mounted.mount_point()),
                    _ => command.arg("-C").arg(mounted.mount_point()).arg("-xf").arg(&archive),
                };
                time_command(&mut command)?;
            } else if by == "draconis put" {
                let to = format!("{}:/", image.display());
                time_command(self.draconis().args(["put", "-r"]).arg(self.tree).arg(to))?;
            } else {
                time_command(self.draconis().args(["untar", "-f"]).arg(&archive).arg(&image))?;
            }
            File::open(&image)?.sync_all()?;
            self.add_speed(what, by, self.weight.1, started.elapsed());
        }
        std::fs::remove_file(&archive)?;
        Ok(())
    }

    /// Reads one large file of a volume.
    fn measure_read_file(&mut self) -> anyhow::Result<()> {
        let (image, file) = (self.path("empty"), self.path("file"));
        let bytes = self.context.number_parameter("file")?;
        let mut contents = vec![0; 1 << 20];
        Random::new(self.context.seed).fill(&mut contents);
        let mut from = File::create(&file)?;
        for at in (0..bytes).step_by(contents.len()) {
            let len = contents.len().min((bytes - at) as usize);
            std::io::Write::write_all(&mut from, &contents[..len])?;
        }
        drop(from);
        self.make_empty(&image)?;
        let at = format!("{}:/file", image.display());
        time_command(self.draconis().arg("put").arg(&file).arg(&at))?;
        std::fs::remove_file(&file)?;
        for by in ["kernel + cat", "draconis cat"] {
            self.context.check_not_stopped()?;
            let mounted = match by {
                "kernel + cat" if self.is_root => Some(self.mount(&image)?),
                "kernel + cat" => continue,
                _ => None,
            };
            let mut command = match &mounted {
                Some(mounted) => {
                    let mut cat = Command::new("cat");
                    cat.arg(mounted.mount_point().join("file"));
                    cat
                }
                None => {
                    let mut cat = self.draconis();
                    cat.arg("cat").arg(&at);
                    cat
                }
            };
            if drop_caches().is_ok() {
                let time = time_command(&mut command)?;
                self.add_speed("read a large file, cold", by, bytes, time);
            }
            time_command(&mut command)?;
            let time = time_command(&mut command)?;
            self.add_speed("read a large file", by, bytes, time);
        }
        Ok(())
    }

    /// Creates an empty volume with space for the tree, or for the large file.
    fn make_empty(&self, image: &Path) -> anyhow::Result<()> {
        let _ = std::fs::remove_file(image);
        let room_kib = (self.context.number_parameter("file")? + (64 << 20)) / 1024;
        let tree = self.volume_size_arg();
        let size = match tree.trim_end_matches('k').parse() {
            Ok(kib) if room_kib <= kib => tree,
            _ => format!("{room_kib}k"),
        };
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-F", "-t", self.kind, "-b", "4096", "-i", "8192"]);
        time_command(mke2fs.arg(image).arg(size)).map(drop)
    }

    fn mount(&self, image: &Path) -> anyhow::Result<MountedVolume> {
        let at = self.path("mnt");
        std::fs::create_dir_all(&at)?;
        MountedVolume::mount_read_write(
            MountServer::Kernel,
            image,
            &at,
            &self.context.workshop.draconis,
        )
    }
}

/// Returns the label of a measurement on a type of volume.
fn format_label(kind: &str, what: &str) -> String {
    format!("{kind}: {what}")
}

/// Types of volumes.
const EXT_TYPES: [&str; 3] = ["ext2", "ext3", "ext4"];

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "tools",
    paper: PaperSource::Lab,
    question: "How fast are volumes made, filled, checked, read and emptied without mounting them, \
           beside e2fsprogs and the kernel's driver over a loop device?",
    published_result: "No paper.",
    caveat: "Cold, all of them wait for the same device, and what counts is how few and how \
               large requests they make; warm, how little they do for each file. The volume that \
               is checked is the one that mke2fs made. Mounting and unmounting is part of what \
               the kernel is measured with, but for reading one large file.",
    parameters: &[
        new_parameter("tree", "the tree that fills them", "/usr/share/perl", "/usr/share"),
        new_parameter("types", "types of the volumes", "ext4", "ext2,ext3,ext4"),
        new_parameter("file", "length of the large file", "48M", "400M"),
    ],
    subjects: &["mem"],
    accepts: |kind| kind == SubjectKind::Memory,
    repetitions: (2, 3),
    warms_up: false,
};

impl Experiment for ToolComparisonExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "speed", "Bytes of the tree in a second")
                .with_y_axis("bytes", "B/s"),
            Figure::new(FigureShape::Bars, "time", "A check of the whole volume")
                .with_y_axis("time", "ns"),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        let (_, bytes) = count_names_and_bytes(Path::new(context.text_parameter("tree")?))?;
        Ok(bytes * 6 + context.number_parameter("file")? * 2 + (256 << 20))
    }

    fn run(&self, context: &RunContext, _: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        if !context.workshop.draconis.exists() {
            bail!("the program draconis is needed: {}", context.workshop.draconis.display());
        }
        let tree = Path::new(context.text_parameter("tree")?);
        let weight = count_names_and_bytes(tree)?;
        let is_root = rustix::process::geteuid().is_root();
        let mut samples = vec![];
        for kind in context.text_parameter("types")?.split(',') {
            if !EXT_TYPES.contains(&kind) {
                bail!("types={kind}: ext2, ext3 or ext4");
            }
            let dir = context.workshop.temp_dir()?;
            let mut pass = ToolPass { context, tree, weight, kind, is_root, dir, samples: vec![] };
            pass.measure().context(kind.to_owned())?;
            samples.append(&mut pass.samples);
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |kind: &str, (what, ours, theirs): &(&str, &str, &str)| {
            let what = format_label(kind, what);
            let of = |metric, by| points.median_of_label(metric, "mem", by, &what);
            let (ours_said, ratio) = match of("speed", ours) {
                Some(speed) => (units::format_in_unit(speed, "B/s"), speed / of("speed", theirs)?),
                None => {
                    let time = of("time", ours)?;
                    (units::format_time_ns(time), of("time", theirs)? / time)
                }
            };
            let ratio = units::format_significant(ratio);
            Some(format!("{what}: {ours} {ours_said}, {ratio} times as fast as {theirs}."))
        };
        let all =
            EXT_TYPES.iter().flat_map(|kind| COMMAND_PAIRS.iter().map(move |pair| (kind, pair)));
        all.filter_map(|(kind, pair)| tell(kind, pair)).collect()
    }
}
