//! `draconis store info`

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::open::open_readable;
use super::profile::ProfileJson;
use crate::{report, text};

/// Show the layout, size and usage of a store.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let info = open_readable(&arguments.device)?.info();
    if arguments.json {
        let facts = StoreInfoJson {
            id: format!("{:032x}", info.id),
            profile: info.profile.into(),
            disk_bytes: info.disk_bytes,
            capacity_bytes: info.capacity_bytes,
            used_bytes: info.used_bytes,
            segments: info.segments,
            free_segments: info.free_segments,
            incarnation: info.incarnation,
            pending_keys: info.pending_keys,
        };
        report::print_line(serde_json::to_string_pretty(&facts)?)?;
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let profile = info.profile;
    let percent = info.used_bytes as f64 / info.capacity_bytes.max(1) as f64 * 100.0;
    writeln!(out, "identity      {:032x}", info.id)?;
    writeln!(out, "layout        {}", profile.layout)?;
    writeln!(out, "page          {}", text::format_bytes(profile.page_bytes.into()))?;
    writeln!(out, "segment       {}", text::format_bytes(profile.segment_bytes.into()))?;
    writeln!(out, "queue depth   {}", profile.queue_depth)?;
    writeln!(out, "length        {}", text::format_bytes(info.disk_bytes))?;
    let (used, capacity) =
        (text::format_bytes(info.used_bytes), text::format_bytes(info.capacity_bytes));
    writeln!(out, "used          {used} of {capacity} ({percent:.1} %)")?;
    writeln!(out, "segments      {}, {} free", info.segments, info.free_segments)?;
    writeln!(
        out,
        "opened        {} for writing",
        text::pluralize(info.incarnation.saturating_sub(1), "time", "times")
    )?;
    Ok(())
}

#[derive(Serialize)]
struct StoreInfoJson {
    id: String,
    profile: ProfileJson,
    disk_bytes: u64,
    capacity_bytes: u64,
    used_bytes: u64,
    segments: u32,
    free_segments: u32,
    incarnation: u64,
    pending_keys: u64,
}
