//! `draconis check`

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use draconis_ext::Error;
use draconis_ext::check::{CheckOptions, Problem, Report, Severity, check};
use draconis_types::path_bytes::ShowPath;
use serde::Serialize;

use crate::exit_status;
use crate::image::{self, VolumeArgs};
use crate::progress::{CheckProgress, ProgressMode};
use crate::report;
use crate::text::{EscapingOutput, escape_control_chars};

/// Check a volume for damage without changing it.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: VolumeArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
}

/// Hint for a damaged volume.
const REPAIR_HINT: &str =
    "copy what can be read (draconis get -r); draconis repair -n shows what a repair would do";

/// JSON form of a report.
#[derive(Serialize)]
struct ReportJson {
    clean: bool,
    complete: bool,
    journal_replayed: bool,
    label: String,
    used_inodes: u64,
    inodes: u64,
    directories: u64,
    used_blocks: u64,
    blocks: u64,
    complaints: Vec<ComplaintJson>,
    more_complaints: u64,
}

#[derive(Serialize)]
struct ComplaintJson {
    what: &'static str,
    damage: bool,
    pass: u8,
    text: String,
    group: Option<u32>,
    inode: Option<u32>,
    block: Option<u64>,
    name: Option<String>,
    found: Option<u64>,
    expected: Option<u64>,
}

/// Runs the command. All errors give the same status, so it returns no `Result`.
pub fn run(arguments: &Arguments) -> ExitCode {
    match try_run(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(exit_status::DAMAGED),
        Err(error) => report::report_failure(&error, exit_status::OPERATIONAL_ERROR),
    }
}

/// Checks the volume and prints the report; returns true if the volume is clean.
fn try_run(arguments: &Arguments) -> anyhow::Result<bool> {
    let disk = image::open_disk_for_check(&arguments.image, &arguments.place)?;
    let name = arguments.image.shown();
    let bar = CheckProgress::new(arguments.progress);
    let progress = |done, total| bar.show(done, total);
    let report = check(&disk, CheckOptions::default(), &progress).map_err(|error| match error {
        error @ Error::Unsupported { .. } => {
            anyhow::Error::from(error).context(format!("{name}: cannot check"))
        }
        error => image::open_volume_error(&arguments.image, &*disk, error.into()),
    })?;
    drop(bar);
    let mut out = EscapingOutput::new();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report_json(&report))?)?;
    } else {
        print_report(&report, &name.to_string(), &mut out)?;
    }
    out.flush()?;
    Ok(report.is_clean())
}

fn print_report(report: &Report, image: &str, out: &mut EscapingOutput) -> std::io::Result<()> {
    for complaint in &report.problems {
        writeln!(out, "{complaint}")?;
    }
    if report.suppressed > 0 {
        writeln!(out, "and {} more", report.suppressed)?;
    }
    let name = match escape_control_chars(&report.label) {
        label if label.is_empty() => image.to_owned(),
        label => label,
    };
    if report.replayed {
        writeln!(out, "{name}: what the journal holds was checked as if it were in place")?;
    }
    if !report.complete {
        return writeln!(out, "{name}: too damaged to check further; {REPAIR_HINT}");
    }
    let Report { used_inodes, inodes, used_blocks, blocks, .. } = report;
    let state = if report.is_clean() { String::new() } else { format!(", damaged; {REPAIR_HINT}") };
    writeln!(out, "{name}: {used_inodes}/{inodes} files, {used_blocks}/{blocks} blocks{state}")
}

fn report_json(report: &Report) -> ReportJson {
    ReportJson {
        clean: report.is_clean(),
        complete: report.complete,
        journal_replayed: report.replayed,
        label: escape_control_chars(&report.label),
        used_inodes: report.used_inodes,
        inodes: report.inodes,
        directories: report.directories,
        used_blocks: report.used_blocks,
        blocks: report.blocks,
        complaints: report.problems.iter().map(complaint_json).collect(),
        more_complaints: report.suppressed,
    }
}

fn complaint_json(complaint: &Problem) -> ComplaintJson {
    ComplaintJson {
        what: complaint.what.code(),
        damage: complaint.what.severity() == Severity::Damage,
        pass: complaint.what.pass(),
        text: complaint.to_string(),
        group: complaint.group.map(|group| group.0),
        inode: complaint.inode.map(|inode| inode.0),
        block: complaint.block.map(|block| block.0),
        name: complaint.name.as_deref().map(escape_control_chars),
        found: complaint.found,
        expected: complaint.expected,
    }
}
