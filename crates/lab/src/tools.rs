//! Tools that work without a mount, beside those of e2fsprogs.
//!
//! Every time ends when the bytes are on the device. Cold: the tree that is read is on the
//! device, too. Warm: it is in memory, and what is left is the writing.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::ToolsArguments;
use crate::machine::Machine;
use crate::subject::{drop_caches, time_output};
use crate::table::Times;

/// Runs the experiments.
pub fn run(arguments: &ToolsArguments) -> anyhow::Result<()> {
    let dir = tempfile::tempdir_in(&arguments.dir)?;
    println!("{}", Machine::look());
    let (files, bytes) = crate::mount::weigh(&arguments.tree)?;
    println!("tree: {} ({files} names, {} MB)", arguments.tree.display(), bytes / 1_000_000);
    let size = format!("{}k", (bytes + bytes / 4 + files * 6144 + (64 << 20)) / 1024);
    let image = dir.path().join("image");
    for (name, cold) in [("format --from, warm", false), ("format --from, cold", true)] {
        let mut times = Times::default();
        for _ in 0..arguments.repeat {
            for subject in ["device", "mke2fs -d", "draconis format"] {
                if cold {
                    drop_caches()?;
                } else {
                    read_all(&arguments.tree)?;
                }
                let time = match subject {
                    "device" => write_only(&image, bytes)?,
                    "mke2fs -d" => durable(mke2fs(arguments, &image, &size), &image)?,
                    _ => durable(format(arguments, &image, &size), &image)?,
                };
                times.add(subject, time);
                std::fs::remove_file(&image)?;
            }
        }
        println!("\n{}", times.show(name, Some(bytes)).trim_end());
    }
    Ok(())
}

fn mke2fs(arguments: &ToolsArguments, image: &Path, size: &str) -> Command {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", "ext2", "-b", "4096", "-i", "8192", "-d"]);
    command.arg(&arguments.tree).arg(image).arg(size);
    command
}

fn format(arguments: &ToolsArguments, image: &Path, size: &str) -> Command {
    let mut command = Command::new(&arguments.draconis);
    command.args(["format", "-b", "4096", "-i", "8192", "--from"]);
    command.arg(&arguments.tree).arg(image).arg(size);
    command
}

/// How long a command takes until what it wrote is on the device.
fn durable(mut command: Command, image: &Path) -> anyhow::Result<Duration> {
    let started = Instant::now();
    time_output(&mut command)?;
    File::open(image)?.sync_all()?;
    Ok(started.elapsed())
}

/// As many bytes written in large requests, past the page cache: what the device can do.
fn write_only(image: &Path, bytes: u64) -> anyhow::Result<Duration> {
    let mut command = Command::new("dd");
    let count = format!("count={}", bytes.div_ceil(1 << 20));
    let to = format!("of={}", image.display());
    command.args(["if=/dev/zero", "bs=1M", "oflag=direct", "conv=fsync", "status=none"]);
    let started = Instant::now();
    let output = command.args([&to, &count]).output().context("dd")?;
    if !output.status.success() {
        bail!("dd: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(started.elapsed())
}

/// Brings a tree into memory.
fn read_all(tree: &Path) -> anyhow::Result<()> {
    let mut stack: Vec<PathBuf> = vec![tree.to_path_buf()];
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(&dir)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                stack.push(entry.path());
            } else if kind.is_file() {
                std::io::copy(&mut File::open(entry.path())?, &mut std::io::sink())?;
            }
        }
    }
    Ok(())
}
