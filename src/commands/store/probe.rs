//! `draconis store probe`

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use draconis_access::create_store::probe_disk;
use draconis_objects::probe::{self, ProbeResults};
use draconis_types::path_bytes::ShowPath;
use rustix::fs::OFlags;
use serde::Serialize;

use super::create::StepProgress;
use super::open::no_store_message;
use super::profile::{ProfileJson, print_profile_reasons};
use crate::progress::ProgressMode;
use crate::text::{self, parse_size};
use crate::{bucket, image, report};

/// Measure a disk and recommend a store layout.
///
/// Measures a temporary file next to DEVICE (256 MiB, about 10 s), or the block device itself with
/// --destroy.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Measure the block device itself (destroys its data).
    #[arg(long)]
    destroy: bool,
    /// Print JSON, which store create --profile reads.
    #[arg(long)]
    json: bool,
    /// Size of the measured area.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Directory, file or block device.
    device: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    bucket::refuse_bucket(
        device,
        "a bucket is not measured; draconis store create asks it whether it keeps its promises",
    )?;
    let shown = device.shown();
    let is_device = std::fs::metadata(device).is_ok_and(|it| it.file_type().is_block_device());
    let wanted = arguments.size.unwrap_or(probe::REGION_BYTES);
    let (file, disk_bytes) = if is_device {
        if !arguments.destroy {
            let held = File::open(device).map(|file| image::detect_contents(&file));
            let held = held.with_context(|| shown.to_string())??;
            bail!(
                "{shown} is a block device{}; --destroy measures it, and what it holds is lost; a \
                 directory on it is measured without loss",
                held.map_or(String::new(), |held| format!(" that holds {}", held.what))
            );
        }
        let file = image::open_exclusive(device)?.with_context(|| no_store_message(device))?;
        let len = image::len_bytes(&file)?;
        (file, len)
    } else {
        let file = temporary_file(device, wanted)?;
        // Without a given length the profile is for a large store.
        let there = std::fs::metadata(device).ok().filter(std::fs::Metadata::is_file);
        (file, there.map_or(64 << 30, |there| there.len()))
    };
    let mut bars = StepProgress::new(arguments.progress);
    let measured = probe_disk(device, file, wanted, &mut |step, done, all| {
        bars.show_progress(step, done, all)
    })
    .map_err(|error| anyhow!("{shown}: {error}"))?;
    let (profile, why) = measured.profile(disk_bytes);
    if arguments.json {
        let probed =
            ProbeJson { profile: profile.into(), why, measured: measurements_json(&measured) };
        report::print_line(serde_json::to_string_pretty(&probed)?)?;
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let per_second = |bytes| format!("{}/s", text::format_bytes(bytes));
    writeln!(out, "writes in order    {}", per_second(measured.write_bytes_per_s))?;
    writeln!(out, "reads in order     {}", per_second(measured.read_bytes_per_s))?;
    let micros = |ns: u64| format!("{:.1} µs", ns as f64 / 1e3);
    let (near, far) = (micros(measured.near_read_ns), micros(measured.far_read_ns));
    writeln!(out, "4 KiB reads        {near} near, {far} far")?;
    let (near, far) = (micros(measured.near_write_ns), micros(measured.far_write_ns));
    writeln!(out, "4 KiB writes       {near} near, {far} far, 32 with one flush")?;
    writeln!(out, "write and flush    {}", micros(measured.flush_ns))?;
    let rates = measured.reads_per_s.map(|rate| rate.to_string()).join(", ");
    writeln!(out, "reads a second     {rates} with 1, 2, 4, 8, 16, 32 in flight")?;
    print_profile_reasons(&mut out, &why)?;
    Ok(())
}

#[derive(Serialize)]
struct ProbeJson {
    profile: ProfileJson,
    why: Vec<String>,
    measured: MeasurementsJson,
}

#[derive(Serialize)]
struct MeasurementsJson {
    write_bytes_per_s: u64,
    read_bytes_per_s: u64,
    near_read_ns: u64,
    far_read_ns: u64,
    near_write_ns: u64,
    far_write_ns: u64,
    flush_ns: u64,
    reads_per_s: [u64; 6],
    across: [f64; 6],
    told_bytes: u32,
}

fn measurements_json(measured: &ProbeResults) -> MeasurementsJson {
    let &ProbeResults { write_bytes_per_s, read_bytes_per_s, near_read_ns, far_read_ns, .. } =
        measured;
    let &ProbeResults {
        near_write_ns,
        far_write_ns,
        flush_ns,
        reads_per_s,
        misalignment_cost: across,
        reported_unit_bytes: told_bytes,
        ..
    } = measured;
    MeasurementsJson {
        write_bytes_per_s,
        read_bytes_per_s,
        near_read_ns,
        far_read_ns,
        near_write_ns,
        far_write_ns,
        flush_ns,
        reads_per_s,
        across,
        told_bytes,
    }
}

/// Creates an unnamed file on the file system of `near`; closing deletes it.
fn temporary_file(near: &Path, len_bytes: u64) -> anyhow::Result<File> {
    let dir = match near.parent() {
        _ if near.is_dir() => near,
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
    let file = File::from(file.with_context(|| format!("{}: no file to measure", dir.shown()))?);
    file.set_len(len_bytes)?;
    Ok(file)
}
