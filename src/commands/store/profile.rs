//! JSON form of store profiles.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use draconis_objects::{LayoutKind, Profile};
use draconis_types::path_bytes::ShowPath;
use serde::{Deserialize, Serialize};

/// JSON form of a profile.
#[derive(Serialize, Deserialize)]
pub struct ProfileJson {
    layout: String,
    page_bytes: u32,
    segment_bytes: u32,
    queue_depth: u32,
}

/// Input of `--profile`: the output of `probe --json`, or a profile alone.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum ProfileInput {
    Probed { profile: ProfileJson },
    Alone(ProfileJson),
}

impl ProfileInput {
    /// Reads the output of `probe --json`.
    pub fn read(file: &Path) -> anyhow::Result<Profile> {
        let shown = file.shown();
        let text = match file == Path::new("-") {
            true => std::io::read_to_string(std::io::stdin())?,
            false => std::fs::read_to_string(file).with_context(|| shown.to_string())?,
        };
        let given = serde_json::from_str(&text)
            .with_context(|| format!("{shown}: not what draconis store probe --json writes"))?;
        match given {
            Self::Probed { profile } | Self::Alone(profile) => profile.to_profile(),
        }
    }
}

impl From<Profile> for ProfileJson {
    fn from(profile: Profile) -> Self {
        Self {
            layout: profile.layout.to_string(),
            page_bytes: profile.page_bytes,
            segment_bytes: profile.segment_bytes,
            queue_depth: profile.queue_depth,
        }
    }
}

impl ProfileJson {
    fn to_profile(&self) -> anyhow::Result<Profile> {
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

pub fn print_profile_reasons(out: &mut dyn Write, why: &[String]) -> std::io::Result<()> {
    why.iter().try_for_each(|reason| writeln!(out, "{reason}"))
}
