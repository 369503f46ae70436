//! Reading through mounts, and without one.
//!
//! Every experiment visits its subjects in turns, so that a busy moment hits all of them.
//! Cold: freshly mounted, after the kernel's caches were dropped. Warm: the second time.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_device::{FileDisk, FileOptions};
use draconis_ext::{Follow, Options, Volume};

use crate::MountArguments;
use crate::machine::Machine;
use crate::subject::{Mounted, Server, drop_caches, time_output};
use crate::table::Times;

/// The paper's buffer, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

struct Lab<'a> {
    arguments: &'a MountArguments,
    dir: tempfile::TempDir,
    machine: Machine,
    results: Vec<(String, Times)>,
}

pub fn run(arguments: &MountArguments) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the kernel's mount and cold caches need root");
    }
    let dir = tempfile::tempdir_in(&arguments.dir)?;
    let mut lab = Lab { arguments, dir, machine: Machine::look(), results: vec![] };
    println!("{}", lab.machine);
    lab.sequence()?;
    lab.tree()?;
    if arguments.json {
        let all: Vec<_> = lab.results.iter().collect();
        println!("{}", serde_json::json!({ "machine": lab.machine, "results": all }));
    }
    Ok(())
}

impl Lab<'_> {
    fn wanted(&self, name: &str) -> bool {
        self.arguments.only.as_ref().is_none_or(|only| name.contains(only))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn mount(&self, server: Server, image: &Path) -> anyhow::Result<Mounted> {
        let at = self.path(server.name());
        std::fs::create_dir_all(&at)?;
        Mounted::new(server, image, &at, &self.arguments.draconis)
    }

    /// Runs one experiment: every subject in turns, as often as asked.
    fn measure(
        &mut self,
        name: &str,
        bytes: Option<u64>,
        subjects: &[&'static str],
        mut once: impl FnMut(&Self, &'static str) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<()> {
        if !self.wanted(name) {
            return Ok(());
        }
        let mut times = Times::default();
        for _ in 0..self.arguments.repeat {
            for subject in subjects {
                times.add(
                    subject,
                    once(self, subject).with_context(|| format!("{name}: {subject}"))?,
                );
            }
        }
        println!("\n{}", times.show(name, bytes).trim_end());
        self.results.push((name.to_string(), times));
        Ok(())
    }

    /// One large file, read in sequence with the paper's buffer.
    fn sequence(&mut self) -> anyhow::Result<()> {
        if !["sequence cold", "sequence warm", "library warm"].iter().any(|name| self.wanted(name))
        {
            return Ok(());
        }
        let bytes = self.arguments.file_mib << 20;
        let image = self.path("sequence.img");
        let source = self.path("source");
        std::fs::create_dir(&source)?;
        fill(&source.join("file"), bytes)?;
        mke2fs(&image, &source, bytes + (bytes >> 3) + (64 << 20))?;
        std::fs::remove_dir_all(&source)?;
        let names = Server::ALL.map(Server::name);
        self.measure("sequence cold, 16 KiB buffers", Some(bytes), &names, |lab, name| {
            let mounted = lab.mount(server(name), &image)?;
            drop_caches()?;
            read_file(&mounted.at().join("file"))
        })?;
        self.measure("sequence warm, 16 KiB buffers", Some(bytes), &names, |lab, name| {
            let mounted = lab.mount(server(name), &image)?;
            read_file(&mounted.at().join("file"))?;
            read_file(&mounted.at().join("file"))
        })?;
        self.library(&image, bytes)
    }

    /// Warm reads by the library in process, beside the kernel's `read`.
    fn library(&mut self, image: &Path, bytes: u64) -> anyhow::Result<()> {
        let subjects = ["kernel", "draconis-lib"];
        self.measure("library warm, 16 KiB reads", Some(bytes), &subjects, |lab, name| {
            if name == "kernel" {
                let mounted = lab.mount(Server::Kernel, image)?;
                read_file(&mounted.at().join("file"))?;
                return read_file(&mounted.at().join("file"));
            }
            let how = FileOptions { write: false, direct: true, uring: true };
            let disk = Arc::new(FileDisk::open(image, how)?);
            let caches = Options { data_cache_bytes: bytes + (64 << 20), ..Options::default() };
            let volume = Volume::open(disk, caches)?;
            let file = volume.resolve(volume.root(), b"/file", Follow::No)?;
            let inode = volume.inode(file)?;
            let mut time = Duration::ZERO;
            for _ in 0..2 {
                let (started, mut offset, mut sum) = (Instant::now(), 0, 0u64);
                loop {
                    let data = volume.read_of(&inode, offset, BUFFER_BYTES)?;
                    // Looked at, or nothing would have to be there.
                    let Some(first) = data.first() else { break };
                    sum = sum.wrapping_add(u64::from(*first));
                    offset += data.len() as u64;
                }
                std::hint::black_box(sum);
                if offset != bytes {
                    bail!("read {offset} bytes of {bytes}");
                }
                time = started.elapsed();
            }
            Ok(time)
        })
    }

    /// A real tree: listed, archived, copied out.
    fn tree(&mut self) -> anyhow::Result<()> {
        if !["find cold", "tar cold", "archive cold", "extract cold"]
            .iter()
            .any(|name| self.wanted(name))
        {
            return Ok(());
        }
        let tree = &self.arguments.tree;
        let (files, bytes) = weigh(tree)?;
        let image = self.path("tree.img");
        mke2fs(&image, tree, bytes + bytes / 4 + files * 6144 + (64 << 20))?;
        println!("\ntree: {} ({files} files, {} MB)", tree.display(), bytes / 1_000_000);
        let names = Server::ALL.map(Server::name);
        self.measure("find cold", None, &names, |lab, name| {
            let mounted = lab.mount(server(name), &image)?;
            drop_caches()?;
            time_output(Command::new("find").arg(mounted.at()))
        })?;
        self.measure("find -ls cold", None, &names, |lab, name| {
            let mounted = lab.mount(server(name), &image)?;
            drop_caches()?;
            time_output(Command::new("find").arg(mounted.at()).arg("-ls"))
        })?;
        self.measure("tar cold", Some(bytes), &names, |lab, name| {
            let mounted = lab.mount(server(name), &image)?;
            drop_caches()?;
            time_output(Command::new("tar").arg("-C").arg(mounted.at()).args(["-cf", "-", "."]))
        })?;
        let tools = ["kernel + tar", "draconis tar"];
        self.measure("archive cold, without mounting", Some(bytes), &tools, |lab, name| {
            drop_caches()?;
            if name == "draconis tar" {
                return time_output(Command::new(&lab.arguments.draconis).arg("tar").arg(&image));
            }
            let started = Instant::now();
            let mounted = lab.mount(Server::Kernel, &image)?;
            let mount_time = started.elapsed();
            let tar =
                Command::new("tar").arg("-C").arg(mounted.at()).args(["-cf", "-", "."]).time()?;
            Ok(mount_time + tar)
        })?;
        let tools = ["kernel + tar", "draconis get"];
        self.measure("extract cold, without mounting", Some(bytes), &tools, |lab, name| {
            let copy = lab.path("copy");
            std::fs::create_dir(&copy)?;
            drop_caches()?;
            let started = Instant::now();
            let time = if name == "draconis get" {
                let target = format!("{}:/", image.display());
                let mut get = Command::new(&lab.arguments.draconis);
                time_output(get.args(["get", "-r", &target]).arg(&copy))?
            } else {
                let mounted = lab.mount(Server::Kernel, &image)?;
                let script = "tar -C \"$1\" -cf - . | tar -C \"$2\" -xf -";
                let mut shell = Command::new("sh");
                time_output(shell.args(["-c", script, "sh"]).arg(mounted.at()).arg(&copy))?;
                started.elapsed()
            };
            std::fs::remove_dir_all(&copy)?;
            Ok(time)
        })
    }
}

trait Time {
    fn time(&mut self) -> anyhow::Result<Duration>;
}

impl Time for Command {
    fn time(&mut self) -> anyhow::Result<Duration> {
        time_output(self)
    }
}

fn server(name: &str) -> Server {
    let named = Server::ALL.into_iter().find(|server| server.name() == name);
    named.unwrap_or(Server::Kernel)
}

/// Reads a file with the paper's buffer.
fn read_file(path: &Path) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    while file.read(&mut buffer)? > 0 {}
    Ok(started.elapsed())
}

/// Fills a file with bytes that no layer can guess, the same in every run.
pub fn fill(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut file = std::io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..bytes / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.write_all(&state.to_le_bytes())?;
    }
    Ok(file.flush()?)
}

fn mke2fs(image: &Path, from: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", "ext2", "-b", "4096", "-i", "8192", "-d"]).arg(from).arg(image);
    let output = command.arg(format!("{}k", bytes / 1024)).output().context("mke2fs")?;
    if !output.status.success() {
        bail!("mke2fs: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// How many names and bytes a tree holds.
pub fn weigh(tree: &Path) -> anyhow::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    let mut stack = vec![tree.to_path_buf()];
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(&dir)? {
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
