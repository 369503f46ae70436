//! Checks of crash states.

use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::Context;
use draconis_device::{Disk, MemoryDisk};
use draconis_ext::check::{self, Problem};
use draconis_ext::{InodeNumber, NewNode, Volume};
use draconis_testkit::{CrashOptions, CrashState, CrashStates, Event, RecordDisk};
use draconis_types::FileType;

use super::workloads::Workload;
use super::{ConsistencyProtocol, small_cache_options, store_volumes, write_options};

/// File that a judge creates to test that a state is writable.
pub(super) const PROBE_FILE_NAME: &str = "after the power cut";

/// Checks the states of one workload.
pub(super) struct StateChecker<'a> {
    workload: &'a dyn Workload,
    protocol: ConsistencyProtocol,
    /// Directory of the images for `e2fsck`.
    dir: tempfile::TempDir,
    e2fsck: Option<PathBuf>,
}

/// A promise that a state breaks.
#[derive(Debug)]
pub(super) enum CrashViolation {
    /// Our check finds a problem that `e2fsck -p` would not repair.
    NeedsE2fsck(Vec<Problem>),
    /// Our check finds a problem where none is allowed.
    NotClean(Vec<Problem>),
    /// `e2fsck` asked a question, or reported a problem where none is allowed.
    Asked { status: Option<i32>, said: String },
    /// The check or the mount fails.
    Unreadable(String),
    /// Acknowledged data is lost or wrong.
    Lost(String),
    /// Acknowledged data is lost or wrong after `e2fsck -p`.
    LostAfterE2fsck(String),
    /// Journal replay gives another state, or leaves problems.
    NotRecovered(String),
    /// Writing to the state without `e2fsck` failed.
    WriteFailed(String),
}

impl fmt::Display for CrashViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeedsE2fsck(complaints) => {
                f.write_str("e2fsck -p would ask about")?;
                complaints.iter().take(8).try_for_each(|complaint| write!(f, "\n    {complaint}"))
            }
            Self::NotClean(complaints) => {
                f.write_str("wrong, where nothing may be")?;
                complaints.iter().take(8).try_for_each(|complaint| write!(f, "\n    {complaint}"))
            }
            Self::Asked { status, said } => {
                write!(f, "e2fsck ends with status {status:?}:\n{said}")
            }
            Self::Unreadable(why) => write!(f, "cannot be read: {why}"),
            Self::Lost(what) => f.write_str(what),
            Self::LostAfterE2fsck(what) => write!(f, "after e2fsck -p: {what}"),
            Self::NotRecovered(why) => write!(f, "recovered: {why}"),
            Self::WriteFailed(why) => write!(f, "written to as it was left: {why}"),
        }
    }
}

impl<'a> StateChecker<'a> {
    pub(super) fn new(
        workload: &'a dyn Workload,
        protocol: ConsistencyProtocol,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let places = ["/usr/sbin/e2fsck", "/sbin/e2fsck", "/usr/bin/e2fsck"].map(PathBuf::from);
        let e2fsck = places.into_iter().find(|path| path.exists());
        Ok(Self { workload, protocol, dir, e2fsck })
    }

    /// Returns all promises that a state breaks; runs `e2fsck` if `sampled`.
    pub(super) fn find_violations(
        &self,
        crash: &CrashState,
        sampled: bool,
    ) -> anyhow::Result<Vec<CrashViolation>> {
        let mut violations = vec![];
        let disk: Arc<dyn Disk> = match self.protocol {
            ConsistencyProtocol::Store => {
                let damage = || store_volumes::find_store_damage(crash.disk.clone());
                violations.extend(sampled.then(damage).flatten().map(CrashViolation::Unreadable));
                if sampled {
                    violations.extend(check_snapshots(crash.disk.to_bytes()));
                }
                match store_volumes::open(crash.disk.clone()) {
                    Ok(disk) => disk,
                    Err(why) => {
                        violations.push(CrashViolation::Unreadable(why));
                        return Ok(violations);
                    }
                }
            }
            _ => crash.disk.clone(),
        };
        if self.protocol == ConsistencyProtocol::Ordered {
            match find_problems(&disk, |it| !it.is_preen_ok()) {
                Ok(none) if none.is_empty() => {}
                Ok(questions) => violations.push(CrashViolation::NeedsE2fsck(questions)),
                Err(error) => violations.push(CrashViolation::Unreadable(error.to_string())),
            }
        }
        violations.extend(
            self.verify_acknowledged(disk.clone(), crash.marks()).map(CrashViolation::Lost),
        );
        if sampled {
            violations.extend(match self.protocol {
                ConsistencyProtocol::Journal => self.compare_replays(crash)?,
                ConsistencyProtocol::Ordered
                | ConsistencyProtocol::Atomic
                | ConsistencyProtocol::Store => self.run_e2fsck(&*disk, crash.marks())?,
            });
        }
        if self.protocol != ConsistencyProtocol::Ordered {
            match all_problems(&disk) {
                Ok(none) if none.is_empty() => {}
                Ok(wrong) => violations.push(CrashViolation::NotClean(wrong)),
                // Features that our check does not support are left to e2fsck.
                Err(draconis_ext::Error::Unsupported { .. })
                    if self.protocol == ConsistencyProtocol::Journal => {}
                Err(error) => violations.push(CrashViolation::Unreadable(error.to_string())),
            }
        }
        if self.protocol == ConsistencyProtocol::Journal {
            violations.extend(self.replay_in_place(crash).err().map(CrashViolation::NotRecovered));
        }
        if sampled {
            // Last, because it changes the state.
            violations.extend(
                self.mount_and_verify(&disk, crash.marks()).err().map(CrashViolation::WriteFailed),
            );
        }
        Ok(violations)
    }

    /// Returns what is lost of the data that `marks` acknowledge.
    fn verify_acknowledged(&self, disk: Arc<dyn Disk>, marks: &[u64]) -> Option<String> {
        match Volume::open(disk, small_cache_options()) {
            Ok(volume) => self.workload.verify(&volume, marks).err(),
            Err(error) => Some(format!("no mount: {error}")),
        }
    }

    /// Mounts the state as it is, creates a file, unmounts, and checks the
    /// volume.
    fn mount_and_verify(&self, disk: &Arc<dyn Disk>, marks: &[u64]) -> Result<(), String> {
        let describe = |error: draconis_ext::Error| error.to_string();
        let volume = Volume::open_for_writing(disk.clone(), small_cache_options(), write_options())
            .map_err(describe)?;
        let done = create_probe_file(&volume);
        volume.close().map_err(describe)?;
        // The volume may be full.
        if let Err(error) = done
            && !matches!(error, draconis_ext::Error::NoSpace)
        {
            return Err(error.to_string());
        }
        match find_problems(disk, |it| !it.is_preen_ok()) {
            Ok(none) if none.is_empty() => {}
            Ok(questions) => return Err(CrashViolation::NeedsE2fsck(questions).to_string()),
            Err(draconis_ext::Error::Unsupported { .. })
                if self.protocol == ConsistencyProtocol::Journal => {}
            Err(error) => return Err(error.to_string()),
        }
        self.verify_acknowledged(disk.clone(), marks).map_or(Ok(()), Err)
    }

    /// Runs `e2fsck -fp`, and checks the acknowledged data afterwards.
    fn run_e2fsck(&self, disk: &dyn Disk, marks: &[u64]) -> anyhow::Result<Option<CrashViolation>> {
        let Some(e2fsck) = &self.e2fsck else { return Ok(None) };
        let path = self.write_image(&store_volumes::read_disk(disk)?)?;
        let (status, said) = run_and_capture(Command::new(e2fsck).arg("-fp").arg(&path))?;
        // Status 1 is also that of a volume that was in use. A mount deletes orphans, too.
        let is_known = |line: &str| {
            line.is_empty() || line.contains("Clearing orphaned inode") || line.contains(" files (")
        };
        let is_fine = matches!(status, Some(0 | 1));
        if !is_fine || self.protocol.is_atomic() && !said.lines().all(is_known) {
            return Ok(Some(CrashViolation::Asked { status, said }));
        }
        let mended = MemoryDisk::new(std::fs::read(&path)?, 512);
        Ok(self.verify_acknowledged(Arc::new(mended), marks).map(CrashViolation::LostAfterE2fsck))
    }
}

impl StateChecker<'_> {
    /// Writes an image to a file, one per thread.
    fn write_image(&self, bytes: &[u8]) -> anyhow::Result<PathBuf> {
        let path = self.dir.path().join(format!("{:?}", std::thread::current().id()));
        std::fs::write(&path, bytes)?;
        Ok(path)
    }

    /// Replays the state in place by a mount, and checks the acknowledged data. Leaves the replayed
    /// state.
    fn replay_in_place(&self, crash: &CrashState) -> Result<(), String> {
        let disk: Arc<dyn Disk> = crash.disk.clone();
        Volume::open_for_writing(disk.clone(), small_cache_options(), write_options())
            .and_then(|volume| volume.close())
            .map_err(|error| error.to_string())?;
        self.verify_acknowledged(disk, crash.marks()).map_or(Ok(()), Err)
    }

    /// Replays the state with e2fsck and with our library; afterwards `e2fsck -fn` must find
    /// nothing. Also cuts the power during our replay.
    fn compare_replays(&self, crash: &CrashState) -> anyhow::Result<Option<CrashViolation>> {
        let bytes = crash.disk.to_bytes();
        let record = Arc::new(RecordDisk::new(MemoryDisk::new(bytes.clone(), 512)));
        let ours = Volume::open_for_writing(record.clone(), small_cache_options(), write_options());
        if let Err(error) = ours.and_then(|volume| volume.close()) {
            return Ok(Some(CrashViolation::NotRecovered(error.to_string())));
        }
        let events = record.take_events();
        let is_write = |event: &&Event| matches!(event, Event::Group { .. });
        let written = events.iter().filter(is_write).count();
        let options = CrashOptions { seed: written as u64, subsets: 2, exhaustive_sectors: 0 };
        for again in CrashStates::new(bytes.clone(), events, options).step_by(5) {
            if let Some(lost) = self.verify_acknowledged(again.disk.clone(), crash.marks()) {
                let why = format!("cut off in that ({:?}): {lost}", again.kind);
                return Ok(Some(CrashViolation::NotRecovered(why)));
            }
        }
        let Some(e2fsck) = &self.e2fsck else { return Ok(None) };
        let Some(record) = Arc::into_inner(record) else {
            anyhow::bail!("a volume that was closed keeps its disk")
        };
        for (bytes, is_ours) in [(bytes, false), (record.into_inner().into_bytes(), true)] {
            let path = self.write_image(&bytes)?;
            if !is_ours {
                run_and_capture(
                    Command::new(e2fsck).args(["-y", "-E", "journal_only"]).arg(&path),
                )?;
                let recovered = MemoryDisk::new(std::fs::read(&path)?, 512);
                let has_orphans = Volume::open(Arc::new(recovered), small_cache_options())
                    .is_ok_and(|volume| volume.superblock().last_orphan != 0);
                if has_orphans {
                    run_and_capture(Command::new(e2fsck).arg("-p").arg(&path))?;
                }
            }
            let (status, said) = run_and_capture(Command::new(e2fsck).arg("-fn").arg(&path))?;
            if status != Some(0) {
                return Ok(Some(CrashViolation::Asked { status, said }));
            }
            let recovered = MemoryDisk::new(std::fs::read(&path)?, 512);
            if let Some(lost) = self.verify_acknowledged(Arc::new(recovered), crash.marks()) {
                let by = if is_ours { "by us" } else { "by e2fsck" };
                return Ok(Some(CrashViolation::NotRecovered(format!("{by}: {lost}"))));
            }
        }
        Ok(None)
    }
}

/// Runs a program; returns its exit status and output.
fn run_and_capture(command: &mut Command) -> anyhow::Result<(Option<i32>, String)> {
    let output = command.output().context("e2fsck")?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Returns the problems that our check finds and that `counts` selects.
fn find_problems(
    disk: &Arc<dyn Disk>,
    counts: impl Fn(&Problem) -> bool,
) -> draconis_ext::Result<Vec<Problem>> {
    let options = check::CheckOptions { threads: 1, cache_bytes: 1 << 20, ..Default::default() };
    let report = check::check(disk, options, &|_, _| {})?;
    Ok(report.problems.into_iter().filter(counts).collect())
}

/// Returns all problems of a volume. If it lists orphans, a mount deletes them first, which
/// changes the state.
fn all_problems(disk: &Arc<dyn Disk>) -> draconis_ext::Result<Vec<Problem>> {
    if Volume::open(disk.clone(), small_cache_options())?.superblock().last_orphan != 0 {
        let volume =
            Volume::open_for_writing(disk.clone(), small_cache_options(), write_options())?;
        volume.close()?;
    }
    find_problems(disk, |_| true)
}

/// Checks snapshots in a store: each must hold a volume as after a power cut.
fn check_snapshots(store: Vec<u8>) -> Option<CrashViolation> {
    let clones = match store_volumes::open_other_disks(Arc::new(MemoryDisk::new(store, 512))) {
        Ok(clones) => clones,
        Err(why) => return Some(CrashViolation::Unreadable(why)),
    };
    clones.iter().find_map(|disk| match all_problems(disk) {
        Ok(none) if none.is_empty() => None,
        Ok(wrong) => Some(CrashViolation::NotClean(wrong)),
        Err(error) => Some(CrashViolation::Unreadable(format!("a snapshot: {error}"))),
    })
}

fn create_probe_file(volume: &Volume) -> draconis_ext::Result<()> {
    let new =
        NewNode { kind: FileType::File, mode: 0o600, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let file = volume.create(InodeNumber::ROOT, PROBE_FILE_NAME.as_bytes(), &new)?;
    volume.write(file, 0, &[0; 5000])?;
    volume.sync()
}
