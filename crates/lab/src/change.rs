//! Changing volumes through mounts.
//!
//! Every experiment starts with a fresh volume and visits its subjects in turns. What is
//! not made durable on the way is by the end: the time of unmounting is a line of its own.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use draconis_front::fuse::{self, Activity};

use crate::ChangeArguments;
use crate::machine::Machine;
use crate::memory::Memory;
use crate::subject::{Mounted, Server, drop_caches, time_output};
use crate::table::Times;

/// Length of a small file, in bytes.
const SMALL_BYTES: usize = 4096;
/// Small files of one directory.
const DIRECTORY_FILES: u32 = 1000;
/// What one append adds, in bytes.
const APPEND_BYTES: usize = 512;

struct Lab<'a> {
    arguments: &'a ChangeArguments,
    dir: tempfile::TempDir,
}

/// Runs the experiments.
pub fn run(arguments: &ChangeArguments) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("the kernel's mount needs root");
    }
    let dir = tempfile::tempdir_in(&arguments.dir)?;
    let lab = Lab { arguments, dir };
    println!("{}", Machine::look());
    lab.small_files()?;
    lab.copy()?;
    lab.sequence()?;
    lab.appends()
}

/// Serves an empty tree that forgets contents until it is unmounted.
pub fn serve_memory(at: &Path, write_back: bool) -> anyhow::Result<()> {
    let options = fuse::MountOptions {
        source: "memory".into(),
        read_only: false,
        allow_other: true,
        default_permissions: true,
        dev: false,
        suid: false,
        no_exec: false,
        access_times: fuse::AccessTimes::Relative,
        sync: false,
        dir_sync: false,
    };
    let connection = fuse::mount(at, &options)?;
    let tree = Memory::new(false);
    let behaviour = fuse::Behaviour { permissions: true, write_back };
    Ok(fuse::Server::new(&tree, behaviour).serve(connection, &Activity::default())?)
}

impl Lab<'_> {
    fn wanted(&self, name: &str) -> bool {
        self.arguments.only.as_ref().is_none_or(|only| name.contains(only))
    }

    /// Has each subject change a fresh volume of `bytes`, as often as asked, and shows the
    /// times that `once` gives by name, the last of them being that of unmounting.
    fn measure(
        &self,
        bytes: u64,
        shown: Option<u64>,
        once: impl Fn(&Path) -> anyhow::Result<Vec<(&'static str, Duration)>>,
    ) -> anyhow::Result<()> {
        let mut results: Vec<(&'static str, Times)> = vec![];
        let mut add = |name, subject, time| match results.iter_mut().find(|(n, _)| *n == name) {
            Some((_, times)) => times.add(subject, time),
            None => {
                let mut times = Times::default();
                times.add(subject, time);
                results.push((name, times));
            }
        };
        for _ in 0..self.arguments.repeat {
            let wanted = |server: &Server| {
                !self.arguments.without.iter().any(|without| without == server.name())
            };
            for server in Server::CHANGING.into_iter().filter(wanted) {
                let image = self.dir.path().join("image");
                mke2fs(&image, bytes)?;
                let at = self.dir.path().join(server.name());
                std::fs::create_dir_all(&at)?;
                drop_caches()?;
                let mounted = Mounted::changing(server, &image, &at, &self.arguments.draconis)?;
                let times = once(mounted.at()).with_context(|| server.name())?;
                for (name, time) in times {
                    add(name, server.name(), time);
                }
                let started = Instant::now();
                drop(mounted);
                File::open(&image)?.sync_all()?;
                add("unmount", server.name(), started.elapsed());
                if server != Server::Memory {
                    check(&image)?;
                }
                std::fs::remove_file(&image)?;
            }
        }
        for (name, times) in &results {
            println!("\n{}", times.show(name, shown.filter(|_| *name != "unmount")).trim_end());
        }
        Ok(())
    }

    /// Made, looked at, renamed, removed.
    fn small_files(&self) -> anyhow::Result<()> {
        if !self.wanted("small files") {
            return Ok(());
        }
        let files = self.arguments.files;
        println!("\n{files} files of {SMALL_BYTES} bytes, {DIRECTORY_FILES} in a directory");
        self.measure(u64::from(files) * 16_384 + (256 << 20), None, |at| {
            let name = |i: u32, prefix: &str| -> PathBuf {
                at.join(format!("{}", i / DIRECTORY_FILES)).join(format!("{prefix}{i}"))
            };
            for i in 0..files.div_ceil(DIRECTORY_FILES) {
                std::fs::create_dir(at.join(format!("{i}")))?;
            }
            let bytes = [0x5a; SMALL_BYTES];
            let each = |what: &dyn Fn(u32) -> std::io::Result<()>| {
                let started = Instant::now();
                (0..files).try_for_each(what).map(|()| started.elapsed())
            };
            Ok(vec![
                ("create", each(&|i| File::create_new(name(i, "file"))?.write_all(&bytes))?),
                ("stat", each(&|i| std::fs::metadata(name(i, "file")).map(drop))?),
                ("rename", each(&|i| std::fs::rename(name(i, "file"), name(i, "moved")))?),
                ("unlink", each(&|i| std::fs::remove_file(name(i, "moved")))?),
            ])
        })
    }

    /// A real tree, with `cp -r`.
    fn copy(&self) -> anyhow::Result<()> {
        if !self.wanted("copy") {
            return Ok(());
        }
        let tree = &self.arguments.tree;
        let (files, bytes) = crate::mount::weigh(tree)?;
        println!("\ncp -r {} ({files} files, {} MB)", tree.display(), bytes / 1_000_000);
        self.measure(bytes + bytes / 4 + files * 6144 + (64 << 20), Some(bytes), |at| {
            // Warm, or the source's device is what is measured.
            time_output(Command::new("tar").arg("-C").arg(tree).args(["-cf", "-", "."]))?;
            let time = time_output(Command::new("cp").arg("-r").arg(tree).arg(at))?;
            Ok(vec![("cp -r", time)])
        })
    }

    /// One large file and an fsync.
    fn sequence(&self) -> anyhow::Result<()> {
        if !self.wanted("sequence") {
            return Ok(());
        }
        let bytes = self.arguments.file_mib << 20;
        println!("\n{} MiB in sequence, then fsync", self.arguments.file_mib);
        self.measure(bytes + bytes / 8 + (64 << 20), Some(bytes), |at| {
            let piece = vec![0x5a; 1 << 20];
            let mut file = File::create_new(at.join("file"))?;
            let started = Instant::now();
            for _ in 0..self.arguments.file_mib {
                file.write_all(&piece)?;
            }
            file.sync_all()?;
            Ok(vec![("write and fsync", started.elapsed())])
        })
    }

    /// A log: a little more, durable, again and again.
    fn appends(&self) -> anyhow::Result<()> {
        if !self.wanted("append") {
            return Ok(());
        }
        let appends = self.arguments.appends;
        println!("\n{appends} times {APPEND_BYTES} bytes and fsync");
        self.measure(256 << 20, None, |at| {
            let mut log = File::create_new(at.join("log"))?;
            let piece = [0x5a; APPEND_BYTES];
            let started = Instant::now();
            for _ in 0..appends {
                log.write_all(&piece)?;
                log.sync_all()?;
            }
            let appended = started.elapsed();
            let file = File::create_new(at.join("database"))?;
            file.write_all_at(&vec![0; 1 << 20], 0)?;
            file.sync_all()?;
            let started = Instant::now();
            for i in 0..appends {
                file.write_all_at(&piece, u64::from(i % 200) * 4096)?;
                file.sync_data()?;
            }
            Ok(vec![("append and fsync", appended), ("overwrite and fdatasync", started.elapsed())])
        })
    }
}

fn mke2fs(image: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", "ext2", "-b", "4096", "-i", "8192"]).arg(image);
    let output = command.arg(format!("{}k", bytes / 1024)).output().context("mke2fs")?;
    if !output.status.success() {
        bail!("mke2fs: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Speed counts only where the volume is right afterwards.
fn check(image: &Path) -> anyhow::Result<()> {
    let output = Command::new("e2fsck").args(["-fn"]).arg(image).output().context("e2fsck")?;
    if !output.status.success() {
        bail!("e2fsck -fn: {}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(())
}
