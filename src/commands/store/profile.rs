//! What suits a disk: as JSON has it, and as it is measured.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use draconis_device::{Extent, written_unit_bytes};
use draconis_objects::probe::{self, Measured};
use draconis_objects::{LayoutKind, Profile};
use serde::{Deserialize, Serialize};

use super::opened::disk;
use crate::progress::{Progress, When};

/// A file shorter than this tells nothing of the disk below, in bytes.
pub const MEASURED_BYTES_MIN: u64 = 2 * probe::REGION_BYTES_MIN;

/// A profile as JSON has it.
#[derive(Serialize, Deserialize)]
pub struct Chosen {
    layout: String,
    page_bytes: u32,
    segment_bytes: u32,
    queue_depth: u32,
}

/// What `--profile` reads: what `probe --json` writes, or the profile alone.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Given {
    Probed { profile: Chosen },
    Alone(Chosen),
}

impl Given {
    /// Reads what `probe --json` wrote.
    pub fn read(file: &Path) -> anyhow::Result<Profile> {
        let shown = file.display();
        let text = match file == Path::new("-") {
            true => std::io::read_to_string(std::io::stdin())?,
            false => std::fs::read_to_string(file).with_context(|| shown.to_string())?,
        };
        let given = serde_json::from_str(&text)
            .with_context(|| format!("{shown}: not what draconis store probe --json writes"))?;
        match given {
            Self::Probed { profile } | Self::Alone(profile) => profile.profile(),
        }
    }
}

impl From<Profile> for Chosen {
    fn from(profile: Profile) -> Self {
        Self {
            layout: profile.layout.to_string(),
            page_bytes: profile.page_bytes,
            segment_bytes: profile.segment_bytes,
            queue_depth: profile.queue_depth,
        }
    }
}

impl Chosen {
    fn profile(&self) -> anyhow::Result<Profile> {
        let layout = match self.layout.as_str() {
            "log" => LayoutKind::Log,
            "cow" => LayoutKind::Cow,
            "bucket" => LayoutKind::Bucket,
            other => bail!("layout {other}: log, cow or bucket"),
        };
        Ok(Profile {
            layout,
            page_bytes: self.page_bytes,
            segment_bytes: self.segment_bytes,
            queue_depth: self.queue_depth,
        })
    }
}

/// What serves everywhere.
pub fn unmeasured(len: u64) -> (Profile, Vec<String>) {
    let segment_bytes = (1u64 << (len / 128).max(1).ilog2()).clamp(64 << 10, 4 << 20) as u32;
    let profile =
        Profile { layout: LayoutKind::Cow, page_bytes: 4096, segment_bytes, queue_depth: 16 };
    (profile, vec!["not measured: too small to tell anything of the disk".to_owned()])
}

pub fn measured(
    device: &Path,
    file: File,
    wanted: u64,
    progress: When,
) -> anyhow::Result<Measured> {
    let told_bytes = written_unit_bytes(&file).unwrap_or(0);
    let disk = disk(file, device, true, true)?;
    let start = Instant::now();
    let clock = || start.elapsed().as_nanos() as u64;
    let len = disk.properties().len_bytes.min(wanted);
    let mut bar: Option<Progress> = None;
    let mut told = 0;
    let measured =
        probe::probe(&*disk, &clock, Extent::new(0, len), told_bytes, &mut |done, all| {
            // A bar counts bytes; a step is so many.
            const STEP: u64 = 1 << 20;
            bar.get_or_insert_with(|| Progress::new(progress, all * STEP))
                .add((done - told) * STEP);
            told = done;
        });
    Ok(measured?)
}

pub fn tell_profile(out: &mut dyn Write, why: &[String]) -> std::io::Result<()> {
    why.iter().try_for_each(|reason| writeln!(out, "{reason}"))
}
