//! Faults that end writing: the image cannot be read or written, there is no more space, or the
//! oplog of a dead worker has wrong bytes.
//!
//! ```text
//!   clients ──▶ mount ──▶ image ──▶ file system of this process, whose calls fail: EIO
//!                           └─────▶ small tmpfs: ENOSPC
//! ```
//! After a failed write the volume is read-only until it is mounted again; reading goes on.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::null_fs::kernel_options;
use anyhow::{Context, bail, ensure};
use draconis_device::Random;
use draconis_front::fuse;
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;

use super::forgery;
use super::record_client::RecordClient;
use super::test_mount::{TestMount, make_volume, run_command, send_signal};
use super::totals::Totals;
use super::worker_faults::{RESTART_TIMEOUT, ask_worker, stop_worker};
use super::{FaultKind, Round, SharedState};
use crate::memory::{FileCall, InjectedErrors, MemoryTree};

const VOLUME_MEBIBYTES: u64 = 24;
/// Files that the volume has from the beginning, and their length. They are longer than what is
/// read at once.
const FILE_COUNT: u64 = 40;
const FILE_BYTES: usize = 200 << 10;
/// Size of the file system that holds the image of a volume that becomes full.
const TMPFS_OPTIONS: &std::ffi::CStr = c"size=30m";
/// Most calls until a fault shows.
const MAX_ATTEMPTS: u64 = 400;

/// The file system that holds the image. Dropping it unmounts it.
enum FileSystemBelow {
    Faulty { at: PathBuf, tree: Arc<MemoryTree>, server: Option<JoinHandle<()>> },
    Tmpfs { at: PathBuf },
}

impl FileSystemBelow {
    fn mount_faulty(at: PathBuf) -> anyhow::Result<Self> {
        let options = fuse::KernelOptions {
            no_exec: true,
            access_times: draconis_types::AccessTimes::Never,
            ..kernel_options("faulty")
        };
        let connection = fuse::mount(&at, None, &options)?;
        let tree = Arc::new(MemoryTree::new(true));
        let served = tree.clone();
        let server = std::thread::spawn(move || {
            let behaviour = fuse::ServerOptions {
                permissions: true,
                write_back: false,
                no_polling: true,
                over_rings: false,
            };
            let server = fuse::Server::new(&*served, behaviour);
            if let Err(error) = server.serve(connection, &fuse::Activity::default()) {
                eprintln!("the faulty file system: {error}");
            }
        });
        Ok(Self::Faulty { at, tree, server: Some(server) })
    }

    fn mount_tmpfs(at: PathBuf) -> anyhow::Result<Self> {
        rustix::mount::mount("tmpfs", &at, "tmpfs", MountFlags::empty(), Some(TMPFS_OPTIONS))
            .context("mounting a tmpfs")?;
        Ok(Self::Tmpfs { at })
    }

    fn errors(&self) -> anyhow::Result<&InjectedErrors> {
        match self {
            Self::Faulty { tree, .. } => Ok(tree.errors()),
            Self::Tmpfs { .. } => bail!("a tmpfs has no errors"),
        }
    }
}

impl Drop for FileSystemBelow {
    fn drop(&mut self) {
        let (Self::Faulty { at, .. } | Self::Tmpfs { at }) = &*self;
        // The image is closed by now; a round that failed may still have it open.
        if let Err(errno) = rustix::mount::unmount(at, UnmountFlags::DETACH) {
            eprintln!("{}: {errno}", at.display());
        } else if let Self::Faulty { server, .. } = self
            && let Some(server) = server.take()
        {
            let _ = server.join();
        }
    }
}

/// Runs a round; fails if a promise was broken.
pub(super) fn run(round: &Round<'_>, totals: &Totals) -> anyhow::Result<()> {
    let mut mount = TestMount::new(round, "")?;
    let tree = mount.path("tree");
    std::fs::create_dir(&tree)?;
    let is_disk = round.kind == FaultKind::Disk;
    if is_disk {
        for nth in 0..FILE_COUNT {
            std::fs::write(tree.join(nth.to_string()), file_contents(round.seed, nth))?;
        }
    }
    let made = mount.path("made");
    make_volume(round, &made, VOLUME_MEBIBYTES, Some(&tree))?;
    let at = mount.path("below");
    let below = if is_disk {
        FileSystemBelow::mount_faulty(at)?
    } else {
        FileSystemBelow::mount_tmpfs(at)?
    };
    mount.place_image_below();
    // Sparse, as it was made.
    let mut copy = Command::new("cp");
    run_command(copy.arg("--sparse=always").arg(&made).arg(mount.image()))?;
    let positions = find_files(&made, round.seed)?;
    let done = DiskRound::new(round, &mount, &below, positions).and_then(|it| it.run(totals));
    let done = done.with_context(|| format!("the log ends with\n{}", mount.log_tail()));
    // Before the file system that holds its image.
    drop(mount);
    drop(below);
    done
}

fn file_contents(seed: u64, nth: u64) -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    Random::new(seed << 16 | nth).fill(&mut bytes);
    bytes
}

/// Finds the first block of each file in the image.
fn find_files(image: &Path, seed: u64) -> anyhow::Result<HashMap<u64, u64>> {
    const PREFIX_BYTES: usize = 16;
    let starts: HashMap<Vec<u8>, u64> = (0..FILE_COUNT)
        .map(|nth| (file_contents(seed, nth)[..PREFIX_BYTES].to_vec(), nth))
        .collect();
    let bytes = std::fs::read(image)?;
    let blocks = (0_u64..).step_by(1024).zip(bytes.chunks(1024));
    let found = blocks.filter_map(|(at, block)| Some((*starts.get(&block[..PREFIX_BYTES])?, at)));
    Ok(found.collect())
}

struct DiskRound<'a> {
    round: &'a Round<'a>,
    mount: &'a TestMount,
    below: &'a FileSystemBelow,
    at: PathBuf,
    /// First byte of each file in the image.
    positions: HashMap<u64, u64>,
    shared: SharedState,
    random: Random,
    /// The client of this thread.
    own: RecordClient,
    times: Vec<(&'static str, Duration)>,
}

impl<'a> DiskRound<'a> {
    fn new(
        round: &'a Round<'a>,
        mount: &'a TestMount,
        below: &'a FileSystemBelow,
        positions: HashMap<u64, u64>,
    ) -> anyhow::Result<Self> {
        mount.mount()?;
        let at = mount.path("mnt");
        let own = RecordClient::new(&at, 0, round.seed)?;
        let random = Random::new(round.seed ^ 0xd15c);
        let shared = SharedState::new();
        Ok(Self { round, mount, below, at, positions, shared, random, own, times: vec![] })
    }

    fn run(mut self, totals: &Totals) -> anyhow::Result<()> {
        let count = self.round.arguments.clients.max(1);
        let new = |nth| RecordClient::new(&self.at, nth, self.round.seed);
        let mut others = (1..count).map(new).collect::<anyhow::Result<Vec<_>>>()?;
        let shared = SharedState::new();
        std::thread::scope(|scope| {
            for client in &mut others {
                let shared = &shared;
                scope.spawn(move || {
                    while !shared.is_over() {
                        // Errors are expected from a fault on.
                        if client.step(shared).is_err() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            }
            let done = match self.round.kind {
                FaultKind::Disk => self.inject_disk_errors(),
                FaultKind::Reply => self.inject_oplog_damage(),
                _ => self.inject_full_disks(),
            };
            shared.end();
            done
        })?;
        // A volume that could not be written says so; it is unmounted all the same.
        let unmounted = self.mount.unmount();
        ensure!(self.mount.status().is_err(), "it is still mounted: {unmounted:?}");
        self.mount.mount()?;
        let again = self.own.step(&self.shared);
        again.context("writing after the fault, mounted again")?;
        others.push(self.own);
        others.iter().try_for_each(RecordClient::verify)?;
        ensure!(others.iter().any(|client| client.durable_count() > 0), "nothing was written");
        self.mount.unmount()?;
        if self.round.volume == "ext2" {
            // What a failed write leaves of a volume without a journal is what a power cut leaves:
            // e2fsck -p mends it without a question, with status 1.
            let mut preen = Command::new("e2fsck");
            let output = preen.arg("-fp").arg(self.mount.image()).output()?;
            let printed = String::from_utf8_lossy(&output.stdout);
            ensure!(matches!(output.status.code(), Some(0 | 1)), "e2fsck -fp: {printed}");
        }
        self.mount.run_e2fsck()?;
        totals.add(self.times, &self.shared)
    }

    /// Fails reads, one after the other, then writes or flushes for good.
    fn inject_disk_errors(&mut self) -> anyhow::Result<()> {
        let errors = self.below.errors()?;
        let files = self.random.shuffled(FILE_COUNT);
        for nth in files.into_iter().take(self.round.faults as usize - 1) {
            if self.round.is_stopped() {
                break;
            }
            self.step()?;
            let (path, known) =
                (self.at.join(nth.to_string()), file_contents(self.round.seed, nth));
            let before = errors.failed_calls();
            // Behind the first page: a page that it shares with others is read to write those.
            let position = self.positions.get(&nth).context("a file is not in the image")? + 4096;
            let began = Instant::now();
            errors.set_failing(Some((FileCall::Read, position..position + 8192)));
            let read = std::fs::read(&path);
            let time = began.elapsed();
            errors.set_failing(None);
            match read {
                Ok(bytes) => ensure!(bytes == known, "file {nth} was read with other bytes"),
                Err(error) => ensure!(is_errno(&error, Errno::IO), "reading: {error}"),
            }
            // What was read ahead needs no reading.
            if errors.failed_calls() > before {
                self.times.push(("disk: reads fail", time));
            }
            let read = std::fs::read(&path).context("reading after a read error")?;
            ensure!(read == known, "file {nth} has other bytes after a read error");
        }
        ensure!(!self.mount.status()?.read_only, "read-only after errors of reading alone");
        let (call, what) =
            [(FileCall::Write, "disk: writes fail"), (FileCall::Sync, "disk: flushes fail")]
                [self.random.next_below(2) as usize];
        let began = Instant::now();
        errors.set_failing(Some((call, 0..u64::MAX)));
        let written = self.own.step(&self.shared);
        let time = began.elapsed();
        ensure!(written.is_err(), "fsync returned, and all {call:?} calls of the disk fail");
        self.times.push((what, time));
        self.expect_read_only()?;
        errors.set_failing(None);
        // It does not become writable by itself: what failed may be lost.
        ensure!(self.own.step(&self.shared).is_err(), "writable again without a mount");
        Ok(())
    }

    /// Fills the volume again and again, then the file system that holds its image.
    fn inject_full_disks(&mut self) -> anyhow::Result<()> {
        for _ in 1..self.round.faults {
            if self.round.is_stopped() {
                break;
            }
            self.step()?;
            let ballast = self.at.join("ballast");
            fill(&ballast)?;
            let began = Instant::now();
            ask_worker(&self.at)?;
            let mut longest = began.elapsed();
            let mut refused = None;
            for _ in 0..MAX_ATTEMPTS {
                let began = Instant::now();
                let written = self.own.step(&self.shared);
                longest = longest.max(began.elapsed());
                if let Err(error) = written {
                    refused = Some(error);
                    break;
                }
            }
            let error = refused.context("a full volume takes more and more")?;
            ensure!(is_errno(&error, Errno::NOSPC), "a full volume refuses with {error}");
            self.times.push(("full: the volume", longest));
            let began = Instant::now();
            std::fs::remove_file(&ballast).context("removing from a full volume")?;
            self.step_until_ok()?;
            self.times.push(("space again", began.elapsed()));
            self.own.verify()?;
        }
        let FileSystemBelow::Tmpfs { at } = self.below else { bail!("no tmpfs") };
        let ballast = at.join("ballast");
        fill(&ballast)?;
        let mut refused = false;
        for nth in 0..MAX_ATTEMPTS {
            // New blocks of the volume, so that the image grows.
            let began = Instant::now();
            let path = self.at.join(format!("new-{nth}"));
            let written = File::create(&path).and_then(|file| {
                std::io::Write::write_all(&mut &file, &[7; 100_000])?;
                file.sync_all()
            });
            if written.is_err() {
                self.times.push(("full: the file system below", began.elapsed()));
                refused = true;
                break;
            }
        }
        ensure!(refused, "an image that cannot grow takes more and more");
        self.expect_read_only()?;
        std::fs::remove_file(&ballast)?;
        Ok(())
    }

    /// Overwrites parts of the oplog of a worker that then dies, until its successor refuses it.
    fn inject_oplog_damage(&mut self) -> anyhow::Result<()> {
        for _ in 0..self.round.faults {
            match self.own.step(&self.shared) {
                // The successor has refused the oplog.
                Err(error) if is_errno(&error, Errno::ROFS) => break,
                done => done.context("writing between two faults")?,
            }
            let pid = self.mount.status()?.worker_pid;
            let began = Instant::now();
            stop_worker(pid)?;
            let overwritten = forgery::overwrite_oplog(pid, &mut self.random);
            send_signal(pid, Signal::KILL)?;
            overwritten?;
            let until = Instant::now() + RESTART_TIMEOUT;
            let mut status = self.mount.status()?;
            while (status.worker_pid == pid || status.state != "serving") && status.state != "dead"
            {
                ensure!(Instant::now() < until, "no worker took over");
                std::thread::sleep(Duration::from_millis(1));
                status = self.mount.status()?;
            }
            // Of a dead mount the answer is an error; there must be one.
            let answered = ask_worker(&self.at);
            self.times.push(("reply: in the oplog", began.elapsed()));
            ensure!(answered.is_ok() || status.state == "dead", "no answer: {answered:?}");
            if status.read_only || status.state == "dead" {
                break;
            }
        }
        Ok(())
    }

    /// Checks that the volume says that it is read-only, and is read.
    fn expect_read_only(&self) -> anyhow::Result<()> {
        ask_worker(&self.at)?;
        self.own.verify().context("reading a volume that is read-only since a failed write")?;
        let until = Instant::now() + Duration::from_secs(5);
        while !self.mount.status()?.read_only {
            ensure!(Instant::now() < until, "status does not say that it is read-only");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Has the client of this thread work, without a fault.
    fn step(&mut self) -> anyhow::Result<()> {
        self.own.step(&self.shared).context("writing without a fault")
    }

    /// Has it work until a call succeeds: space of removed files is there once a commit is durable.
    fn step_until_ok(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + Duration::from_secs(10);
        while let Err(error) = self.own.step(&self.shared) {
            ensure!(is_errno(&error, Errno::NOSPC), "with space again: {error}");
            ensure!(Instant::now() < until, "no space 10 s after some was freed");
        }
        Ok(())
    }
}

fn is_errno(error: &std::io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Takes all free space with a file.
fn fill(path: &Path) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| path.display().to_string())?;
    let space = statvfs(path)?;
    let (mut len, mut end) = (space.f_bavail * space.f_frsize, 0);
    while len >= 4096 {
        match fallocate(&file, FallocateFlags::empty(), end, len) {
            Ok(()) => end += len,
            Err(Errno::NOSPC) => len /= 2,
            Err(errno) => return Err(errno).with_context(|| format!("filling {}", path.display())),
        }
    }
    Ok(())
}
