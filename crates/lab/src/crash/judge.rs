//! What must hold of every state.

use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::Context;
use draconis_device::{Crash, Disk, MemoryDisk};
use draconis_exchange::contract::Kind;
use draconis_ext::check::{self, Complaint};
use draconis_ext::{InodeNumber, NewNode, Volume};

use super::workloads::Workload;
use super::{small, writing};

/// Judges the states of one workload.
pub(super) struct Judge<'a> {
    workload: &'a dyn Workload,
    /// The disk is atomic against power cuts: there is nothing to mend.
    atomic: bool,
    /// Where states are put for `e2fsck`.
    dir: tempfile::TempDir,
    e2fsck: Option<PathBuf>,
}

/// A promise that a state breaks.
#[derive(Debug)]
pub(super) enum Violation {
    /// `e2fsck -p` would ask.
    Question(Vec<Complaint>),
    /// Anything is wrong, where nothing may be.
    Wrong(Vec<Complaint>),
    /// It asks.
    Asked { status: Option<i32>, said: String },
    /// The check or the mount fails.
    Unreadable(String),
    /// Something acknowledged is gone or wrong.
    Lost(String),
    /// Something acknowledged is gone or wrong after `e2fsck -p`.
    LostByMending(String),
    /// Going on writing, without `e2fsck` before, went wrong.
    NoGoingOn(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Question(complaints) => {
                f.write_str("e2fsck -p would ask about")?;
                complaints.iter().take(8).try_for_each(|complaint| write!(f, "\n    {complaint}"))
            }
            Self::Wrong(complaints) => {
                f.write_str("wrong on a disk that is atomic")?;
                complaints.iter().take(8).try_for_each(|complaint| write!(f, "\n    {complaint}"))
            }
            Self::Asked { status, said } => {
                write!(f, "e2fsck -p ends with status {status:?}:\n{said}")
            }
            Self::Unreadable(why) => write!(f, "cannot be read: {why}"),
            Self::Lost(what) => f.write_str(what),
            Self::LostByMending(what) => write!(f, "after e2fsck -p: {what}"),
            Self::NoGoingOn(why) => write!(f, "written to as it was left: {why}"),
        }
    }
}

impl<'a> Judge<'a> {
    pub(super) fn new(workload: &'a dyn Workload, atomic: bool) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let places = ["/usr/sbin/e2fsck", "/sbin/e2fsck", "/usr/bin/e2fsck"].map(PathBuf::from);
        let e2fsck = places.into_iter().find(|path| path.exists());
        Ok(Self { workload, atomic, dir, e2fsck })
    }

    /// All promises that a state breaks; with `sampled`, `e2fsck` is asked too.
    pub(super) fn judge(&self, crash: &Crash, sampled: bool) -> anyhow::Result<Vec<Violation>> {
        let mut violations = vec![];
        let disk: Arc<dyn Disk> = crash.disk.clone();
        if !self.atomic {
            match complaints(&disk, |it| !it.is_mended_without_question()) {
                Ok(none) if none.is_empty() => {}
                Ok(questions) => violations.push(Violation::Question(questions)),
                Err(error) => violations.push(Violation::Unreadable(error.to_string())),
            }
        }
        violations.extend(self.look(disk.clone(), crash.marks()).map(Violation::Lost));
        if sampled {
            violations.extend(self.ask(crash)?);
        }
        if self.atomic {
            match all_that_is_wrong(&disk) {
                Ok(none) if none.is_empty() => {}
                Ok(wrong) => violations.push(Violation::Wrong(wrong)),
                Err(error) => violations.push(Violation::Unreadable(error.to_string())),
            }
        }
        if sampled {
            // Last, for it changes the state.
            violations.extend(self.mount(crash).err().map(Violation::NoGoingOn));
        }
        Ok(violations)
    }

    /// What is lost of what `marks` acknowledge.
    fn look(&self, disk: Arc<dyn Disk>, marks: &[u64]) -> Option<String> {
        match Volume::open(disk, small()) {
            Ok(volume) => self.workload.verify(&volume, marks).err(),
            Err(error) => Some(format!("no mount: {error}")),
        }
    }

    /// Mounts the state as it is, makes a file if that is asked for, unmounts, and looks
    /// whether all is well.
    fn mount(&self, crash: &Crash) -> Result<(), String> {
        let said = |error: draconis_ext::Error| error.to_string();
        let disk: Arc<dyn Disk> = crash.disk.clone();
        let volume = Volume::open_for_writing(disk.clone(), small(), writing()).map_err(said)?;
        let done = leave_a_file(&volume);
        volume.close().map_err(said)?;
        // A volume may be full.
        if let Err(error) = done
            && !matches!(error, draconis_ext::Error::NoSpace)
        {
            return Err(error.to_string());
        }
        let questions = complaints(&disk, |it| !it.is_mended_without_question()).map_err(said)?;
        if !questions.is_empty() {
            return Err(Violation::Question(questions).to_string());
        }
        self.look(disk, crash.marks()).map_or(Ok(()), Err)
    }

    /// What `e2fsck -fp` says, and whether everything is there after it.
    fn ask(&self, crash: &Crash) -> anyhow::Result<Option<Violation>> {
        let Some(e2fsck) = &self.e2fsck else { return Ok(None) };
        let name = format!("{:?}", std::thread::current().id());
        let path = self.dir.path().join(name);
        std::fs::write(&path, crash.disk.to_bytes())?;
        let output = Command::new(e2fsck).arg("-fp").arg(&path).output().context("e2fsck")?;
        let status = output.status.code();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // 1 is said of a volume that was in use, too; and orphans it gives back as a mount does.
        let is_known = |line: &str| {
            line.is_empty() || line.contains("Clearing orphaned inode") || line.contains(" files (")
        };
        let is_fine = matches!(status, Some(0 | 1));
        if !is_fine || self.atomic && !said.lines().all(is_known) {
            return Ok(Some(Violation::Asked { status, said }));
        }
        let mended = MemoryDisk::new(std::fs::read(&path)?, 512);
        Ok(self.look(Arc::new(mended), crash.marks()).map(Violation::LostByMending))
    }
}

/// What our check complains about, as far as it `counts`.
fn complaints(
    disk: &Arc<dyn Disk>,
    counts: impl Fn(&Complaint) -> bool,
) -> draconis_ext::Result<Vec<Complaint>> {
    let options = check::Options { threads: 1, cache_bytes: 1 << 20, ..Default::default() };
    let report = check::check(disk, options, &|_, _| {})?;
    Ok(report.complaints.into_iter().filter(counts).collect())
}

/// Everything that is wrong with a volume; where it lists orphans, after a mount has given
/// them back, which changes the state.
fn all_that_is_wrong(disk: &Arc<dyn Disk>) -> draconis_ext::Result<Vec<Complaint>> {
    if Volume::open(disk.clone(), small())?.superblock().last_orphan != 0 {
        let volume = Volume::open_for_writing(disk.clone(), small(), writing())?;
        volume.close()?;
    }
    complaints(disk, |_| true)
}

fn leave_a_file(volume: &Volume) -> draconis_ext::Result<()> {
    let new =
        NewNode { kind: Kind::File, mode: 0o600, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let file = volume.create(InodeNumber::ROOT, b"after the power cut", &new)?;
    volume.write(file, 0, &[0; 5000])?;
    volume.sync()
}
