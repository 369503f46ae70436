//! Repairs of damaged volumes, judged by our check and by `e2fsck -fn`.

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::Time;
use draconis_ext::check::{CheckOptions, check};
use draconis_ext::repair::{OfflineError, RepairOptions, plan};

use crate::common::Image;
use draconis_testkit::judge;

pub const NOW: Time = Time { seconds: 1_800_000_000, nanoseconds: 0 };

pub fn options() -> RepairOptions {
    RepairOptions {
        superblock: draconis_ext::SuperblockPlace::default(),
        check: CheckOptions::default(),
        now: NOW,
        max_change_bytes: 64 << 20,
    }
}

/// How a repair ended.
pub enum Repaired {
    /// Bytes of the repaired volume.
    Whole(Vec<u8>),
    /// Why nothing was written.
    Left(String),
}

/// Repairs a volume; a second repair must find nothing.
///
/// # Errors
/// What the check or `e2fsck -fn` still finds.
pub fn repair(bytes: &[u8]) -> Result<Repaired, String> {
    let memory = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let disk: Arc<dyn Disk> = memory.clone();
    let repair = match plan(&disk, &options(), &|_, _| {}) {
        Ok(repair) => repair,
        Err(error) => return Ok(Repaired::Left(error.to_string())),
    };
    if !repair.unfixed.is_empty() {
        // In part is tested apart: a whole one is asked for.
        let left: Vec<_> = repair.unfixed.iter().map(ToString::to_string).collect();
        return Ok(Repaired::Left(left.join("; ")));
    }
    let actions = || -> Vec<String> {
        repair.fixes.iter().map(|it| format!("{} => {}", it.problem, it.action)).collect()
    };
    match repair.write(&disk, None, None) {
        Err(OfflineError::NoLogSpace) => {
            repair.write(&disk, None, Some(tempfile::tempfile().unwrap()))
        }
        done => done,
    }
    .map_err(|error| format!("write: {error}"))?;
    let report = check(&disk, CheckOptions::default(), &|_, _| {}).map_err(|it| it.to_string())?;
    if !report.problems.is_empty() {
        return Err(format!("after {:#?}: {:#?}", actions(), report.problems));
    }
    let again = plan(&disk, &options(), &|_, _| {}).map_err(|error| error.to_string())?;
    if !again.is_empty() {
        return Err(format!("a second repair has work: {:#?}", again.fixes));
    }
    drop((again, repair.before.clone()));
    let fixes = actions();
    drop(repair);
    drop(disk);
    let bytes = Arc::try_unwrap(memory).map_err(|_| "the disk is in use")?.into_bytes();
    let image = Image::from_bytes(&bytes);
    if let Ok(run) = judge::try_run(judge::tool_command("e2fsck").args(["-fn", image.path()]))
        && !run.is_success()
    {
        return Err(format!("after {fixes:#?} e2fsck says:\n{}", run.stdout));
    }
    Ok(Repaired::Whole(bytes))
}
