//! Tools that work without a mount, beside those of e2fsprogs.
//!
//! Every time ends when the bytes are on the device.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::mount::weigh;
use super::{About, Experiment, Paper};
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, Mounted, Server, Subject, drop_caches, time_output};
use crate::units;

/// See the module.
pub struct Tools;

struct Pass<'a> {
    context: &'a Context,
    tree: PathBuf,
    bytes: u64,
    dir: tempfile::TempDir,
    samples: Vec<Sample>,
}

impl Pass<'_> {
    fn speed(&mut self, what: &str, by: &str, time: Duration) {
        let speed = self.bytes as f64 / time.as_secs_f64().max(1e-9);
        self.samples.push(Sample::named("speed", by, what, speed));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn draconis(&self) -> Command {
        Command::new(&self.context.workshop.draconis)
    }

    /// Volumes made and filled.
    fn format(&mut self, cold: bool) -> anyhow::Result<()> {
        let (names, bytes) = weigh(&self.tree)?;
        let size = format!("{}k", (bytes + bytes / 4 + names * 6144 + (64 << 20)) / 1024);
        let what = if cold { "make and fill a volume, cold" } else { "make and fill a volume" };
        for by in ["mke2fs -d", "draconis format"] {
            self.context.check()?;
            let image = self.path(by);
            let _ = std::fs::remove_file(&image);
            if cold {
                drop_caches()?;
            } else {
                let mut tar = Command::new("tar");
                time_output(tar.arg("-C").arg(&self.tree).args(["-cf", "-", "."]))?;
            }
            let mut command = if by == "mke2fs -d" {
                let mut command = Command::new("mke2fs");
                command.args(["-q", "-F", "-t", "ext2", "-b", "4096", "-i", "8192", "-d"]);
                command
            } else {
                let mut command = self.draconis();
                command.args(["format", "-b", "4096", "-i", "8192", "--from"]);
                command
            };
            command.arg(&self.tree).arg(&image).arg(&size);
            let started = Instant::now();
            time_output(&mut command)?;
            File::open(&image)?.sync_all()?;
            self.speed(what, by, started.elapsed());
        }
        Ok(())
    }

    /// A tree copied out of a volume, and archived.
    fn take_out(&mut self) -> anyhow::Result<()> {
        let image = self.path("draconis format");
        let copy = self.path("copy");
        let root = rustix::process::geteuid().is_root();
        for by in ["kernel + tar", "debugfs rdump", "draconis get"] {
            self.context.check()?;
            std::fs::create_dir_all(&copy)?;
            let _ = drop_caches();
            let started = Instant::now();
            match by {
                "kernel + tar" if !root => continue,
                "kernel + tar" => {
                    let mounted = self.mount(&image)?;
                    let script = "tar -C \"$1\" -cf - . | tar -C \"$2\" -xf -";
                    let mut shell = Command::new("sh");
                    time_output(shell.args(["-c", script, "sh"]).arg(mounted.at()).arg(&copy))?;
                }
                "debugfs rdump" => {
                    let mut debugfs = Command::new("debugfs");
                    debugfs.arg("-R").arg(format!("rdump / {}", copy.display())).arg(&image);
                    time_output(debugfs.stderr(std::process::Stdio::null()))?;
                }
                _ => {
                    let from = format!("{}:/", image.display());
                    time_output(self.draconis().args(["get", "-r", &from]).arg(&copy))?;
                }
            }
            self.speed("copy a tree out, cold", by, started.elapsed());
            std::fs::remove_dir_all(&copy)?;
        }
        for by in ["kernel + tar", "draconis tar"] {
            self.context.check()?;
            let _ = drop_caches();
            let started = Instant::now();
            if by == "draconis tar" {
                time_output(self.draconis().arg("tar").arg(&image))?;
            } else if root {
                let mounted = self.mount(&image)?;
                let mut tar = Command::new("tar");
                time_output(tar.arg("-C").arg(mounted.at()).args(["-cf", "-", "."]))?;
            } else {
                continue;
            }
            self.speed("archive a volume, cold", by, started.elapsed());
        }
        Ok(())
    }

    fn mount(&self, image: &Path) -> anyhow::Result<Mounted> {
        let at = self.path("mnt");
        std::fs::create_dir_all(&at)?;
        Mounted::changing(Server::Kernel, image, &at, &self.context.workshop.draconis)
    }
}

const ABOUT: About = About {
    name: "tools",
    paper: Paper::Lab,
    asks: "How fast are volumes made, filled and emptied without mounting them, beside e2fsprogs?",
    finding: "No paper.",
    explains: "Cold, all of them wait for the same device, and what counts is how few and how \
               large requests they make; warm, how little they do for each file.",
    parameters: &[parameter("tree", "the tree that fills them", "/usr/share/perl", "/usr/share")],
    subjects: &["mem"],
    takes: |kind| kind == Kind::Memory,
    warms_up: false,
    ..About::USUAL
};

impl Experiment for Tools {
    fn about(&self) -> &About {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![Figure::new(Shape::Bars, "speed", "Bytes of the tree in a second").y("bytes", "B/s")]
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        Ok(weigh(Path::new(context.text("tree")?))?.1 * 4 + (256 << 20))
    }

    fn run(&self, context: &Context, _: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        if !context.workshop.draconis.exists() {
            bail!("the program draconis is needed: {}", context.workshop.draconis.display());
        }
        let tree = PathBuf::from(context.text("tree")?);
        let (_, bytes) = weigh(&tree)?;
        let dir = context.workshop.directory()?;
        let mut pass = Pass { context, tree, bytes, dir, samples: vec![] };
        pass.format(false)?;
        if drop_caches().is_ok() {
            pass.format(true)?;
        } else {
            context.note("cold runs need root");
        }
        pass.take_out().context("copying out")?;
        Ok(pass.samples)
    }

    fn found(&self, points: Points<'_>) -> Vec<String> {
        let ratio = |what: &str, ours: &str, theirs: &str| {
            let of = |by| points.named("speed", "mem", by, what);
            let (ours_speed, ratio) = (of(ours)?, of(ours)? / of(theirs)?);
            Some(format!(
                "{what}: {ours} {}, {} times {theirs}.",
                units::in_unit(ours_speed, "B/s"),
                units::significant(ratio),
            ))
        };
        [
            ratio("make and fill a volume", "draconis format", "mke2fs -d"),
            ratio("make and fill a volume, cold", "draconis format", "mke2fs -d"),
            ratio("copy a tree out, cold", "draconis get", "debugfs rdump"),
            ratio("copy a tree out, cold", "draconis get", "kernel + tar"),
            ratio("archive a volume, cold", "draconis tar", "kernel + tar"),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
