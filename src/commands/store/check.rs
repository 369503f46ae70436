//! `draconis store check`

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use draconis_objects::Store;
use draconis_objects::check::{CheckOptions, Finding, Owner, Report};
use draconis_types::path_bytes::ShowPath;
use serde::Serialize;

use super::open::{open_disk_shared, with_context};
use crate::bucket;
use crate::exit_status;
use crate::image;
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;
use crate::text::{self, escape_control_chars};

/// Verify all checksums, maps and counters of a store.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
}

/// Runs the command. All errors give the same status, so it returns no `Result`.
pub fn run(arguments: &Arguments) -> ExitCode {
    match try_check(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(exit_status::DAMAGED),
        Err(error) => report::report_failure(&error, exit_status::OPERATIONAL_ERROR),
    }
}

fn try_check(arguments: &Arguments) -> anyhow::Result<bool> {
    let disk = match bucket::bucket_url(&arguments.device) {
        Some(address) => {
            let (served, _) = bucket::start_disk_process(address, false)?;
            image::confine_to_open_files()?;
            served.start()?
        }
        None => {
            // A sandbox cannot filter io_uring requests.
            let disk = open_disk_shared(&arguments.device, false)?;
            image::confine_to_open_files()?;
            disk
        }
    };
    let mut bar: Option<ByteProgress> = None;
    let mut told = 0;
    let report = Store::check(disk, &CheckOptions::default(), &mut |done, total| {
        bar.get_or_insert_with(|| ByteProgress::new(arguments.progress, total))
            .add(done.saturating_sub(told));
        told = done;
    });
    drop(bar);
    let report = report.map_err(|error| with_context(&arguments.device, error))?;
    print_report(arguments, &report)?;
    Ok(report.is_clean())
}

fn print_report(arguments: &Arguments, report: &Report) -> anyhow::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if arguments.json {
        let checked = CheckReportJson {
            clean: report.is_clean(),
            complete: report.is_complete,
            objects: report.objects,
            names: report.names,
            keys: report.keys,
            payload_bytes: report.payload_bytes,
            index_bytes: report.index_bytes,
            used_segments: report.used_segments,
            free_segments: report.free_segments,
            damage: report.damage.iter().map(finding_json).collect(),
            more_damage: report.more,
            notes: report.notes.iter().map(finding_json).collect(),
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&checked)?)?;
    } else {
        for finding in &report.damage {
            writeln!(out, "{finding}")?;
        }
        if report.more > 0 {
            writeln!(out, "and {} more", report.more)?;
        }
        for note in &report.notes {
            writeln!(out, "note: {note}")?;
        }
        writeln!(
            out,
            "{}: {}, {}, {}, index {}, {}/{} segments{}",
            arguments.device.shown(),
            text::pluralize(report.objects, "object", "objects"),
            text::pluralize(report.keys, "key", "keys"),
            text::format_bytes(report.payload_bytes),
            text::format_bytes(report.index_bytes),
            report.used_segments,
            report.used_segments + report.free_segments,
            if report.is_clean() { "" } else { ", damaged" }
        )?;
    }
    out.flush()?;
    Ok(())
}

#[derive(Serialize)]
struct CheckReportJson {
    clean: bool,
    complete: bool,
    objects: u64,
    names: u64,
    keys: u64,
    payload_bytes: u64,
    index_bytes: u64,
    used_segments: u32,
    free_segments: u32,
    damage: Vec<FindingJson>,
    more_damage: u64,
    notes: Vec<FindingJson>,
}

#[derive(Serialize)]
struct FindingJson {
    what: &'static str,
    text: String,
    at_bytes: Option<u64>,
    object: Option<u64>,
    key: Option<String>,
    name: Option<String>,
}

fn finding_json(finding: &Finding) -> FindingJson {
    let (object, key, name) = match &finding.of {
        Some(Owner::Object(id)) => (Some(id.0), None, None),
        Some(Owner::Key(key)) => (None, Some(escape_control_chars(key)), None),
        Some(Owner::Name(name)) => (None, None, Some(escape_control_chars(name))),
        None => (None, None, None),
    };
    let text = finding.to_string();
    FindingJson { what: finding.what.code(), text, at_bytes: finding.at_bytes, object, key, name }
}
