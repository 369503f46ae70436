//! `draconis repair`
//!
//! ```text
//!   image ──exclusive──▶ confined ──▶ planned in memory ──▶ shown ──▶ undo file ──▶ written
//! ```

use std::fs::File;
use std::io::{BufRead, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::mmp_claim;
use draconis_device::Disk;
use draconis_ext::check::{CheckOptions, Problem};
use draconis_ext::repair::{Fix, OfflineError, Repair, RepairOptions, Verdict, plan, revert};
use draconis_service::sandbox::{self, SandboxProfile};
use draconis_service::volume::{OpenError, locate_for_writing};
use draconis_types::path_bytes::ShowPath;
use serde::Serialize;

use crate::edit;
use crate::exit_status;
use crate::image::{self, BackingFiles, Force, SuperblockArgs, VolumeArgs, WriteArgs, parse_force};
use crate::new_file::NewFile;
use crate::progress::{CheckProgress, ProgressMode};
use crate::report;
use crate::text::{EscapingOutput, escape_control_chars};

/// Repair a damaged volume.
///
/// The repair is made in memory, checked there, and written as one change: after an interruption the
/// volume is as before, or the same command (or a mount) completes the repair. What has no name gets
/// one in lost+found, blocks that two files claim are copied. Problems that have no fix are left and
/// listed; the others are fixed where no file gets worse by it (repaired in part).
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: VolumeArgs,
    /// Which superblock to use.
    #[command(flatten)]
    superblock: SuperblockArgs,
    /// List each problem with its fix, and write nothing.
    #[arg(short = 'n', long, conflicts_with_all = ["yes", "preen", "revert"])]
    dry_run: bool,
    /// Repair only if no fix can lose a file, as e2fsck -p does.
    #[arg(short = 'p', long, conflicts_with = "yes")]
    preen: bool,
    /// Repair without a question.
    #[arg(short = 'y', long)]
    yes: bool,
    /// Save the old bytes of all that changes in a new file.
    #[arg(long, value_name = "FILE", conflicts_with = "revert")]
    undo: Option<PathBuf>,
    /// Log the change in a new file: for a volume without free blocks. After an interruption
    /// `--revert FILE` completes the repair.
    #[arg(long, value_name = "FILE", conflicts_with = "revert")]
    scratch: Option<PathBuf>,
    /// Restore every byte that a repair with `--undo FILE` wrote, if the volume is as the repair left
    /// it.
    #[arg(long, value_name = "FILE")]
    revert: Option<PathBuf>,
    /// With `--revert`, restore the bytes even into a volume that was changed since, or another one.
    /// With raid-member, write also to a member of a RAID, which this splits from the others.
    #[arg(long, value_name = "KIND", num_args = 0..=1, require_equals = true,
        default_missing_value = "", value_parser = parse_force)]
    force: Vec<Option<Force>>,
    /// Limit of the changes, which are held in memory, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    memory: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
}

/// JSON form of a repair.
#[derive(Serialize)]
struct RepairJson {
    /// What was done, or with `-n` what would be: `nothing to do`, `repaired`, `repaired in part`,
    /// `left as it was`.
    verdict: &'static str,
    /// Why the volume is left as it was.
    reason: Option<String>,
    written: bool,
    complete: bool,
    changed_blocks: usize,
    fixes: Vec<FixJson>,
    unfixed: Vec<ProblemJson>,
}

#[derive(Serialize)]
struct FixJson {
    #[serde(flatten)]
    problem: ProblemJson,
    action: &'static str,
    /// True if other fixes led to the problem.
    follows: bool,
}

#[derive(Serialize)]
struct ProblemJson {
    what: &'static str,
    pass: u8,
    text: String,
    group: Option<u32>,
    inode: Option<u32>,
    block: Option<u64>,
    name: Option<String>,
}

/// What became of the volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Clean,
    Repaired,
    Left,
}

/// Runs the command. All errors give the same status, so it returns no `Result`.
pub fn run(arguments: &Arguments) -> ExitCode {
    match try_run(arguments) {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Repaired) => ExitCode::from(exit_status::REPAIRED),
        Ok(Outcome::Left) => ExitCode::from(exit_status::DAMAGED),
        Err(error) => report::report_failure(&error, exit_status::OPERATIONAL_ERROR),
    }
}

/// Creates a file for an undo or a log, which is removed unless the repair uses it. One that is
/// there must be empty: a repair that was killed leaves it.
fn create_file(path: &Path) -> anyhow::Result<(File, NewFile)> {
    let mut options = File::options();
    options.read(true).write(true);
    let file = match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => options.open(path),
        created => created,
    };
    let file = file.with_context(|| path.shown().to_string())?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > 0 {
        bail!("{}: the file must be a new one", path.shown());
    }
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    let dir = File::open(parent.unwrap_or(Path::new(".")))?;
    let name = path.file_name().with_context(|| format!("{}: not a name", path.shown()))?;
    let new = NewFile::with_name(Arc::new(dir.try_clone()?.into()), name.as_bytes());
    // The name is durable before the first write of the repair.
    dir.sync_all()?;
    Ok((file, new))
}

fn try_run(arguments: &Arguments) -> anyhow::Result<Outcome> {
    let image = &arguments.image;
    let now = edit::now_or_source_date()?;
    if arguments.dry_run {
        let disk = image::open_disk_for_check(image, &arguments.place)?;
        let repair = plan_repair(arguments, &disk, now)?;
        print(arguments, &repair, false)?;
        return Ok(if repair.is_empty() { Outcome::Clean } else { Outcome::Left });
    }
    let may_ask = std::io::stdin().is_terminal() && !arguments.json;
    if !arguments.yes && !arguments.preen && arguments.revert.is_none() && !may_ask {
        bail!("no terminal to ask on: -n shows the repair, -p makes what is safe, -y makes all");
    }
    let is_forced = arguments.force.contains(&None);
    if is_forced && arguments.revert.is_none() {
        bail!("--force without a kind belongs to --revert");
    }
    let force = arguments.force.iter().flatten().copied().next();
    let place = WriteArgs { volume: arguments.place.clone(), force };
    let saved = arguments
        .revert
        .as_deref()
        .map(|path| File::open(path).with_context(|| path.shown().to_string()));
    let saved = saved.transpose()?;
    let opened = image::open_writable(image, force)?;
    let behind = BackingFiles::open(image, &arguments.place.backing)?;
    let undo = arguments.undo.as_deref().map(create_file).transpose()?;
    let scratch = arguments.scratch.as_deref().map(create_file).transpose()?;
    let dirs: Vec<_> = undo.iter().chain(&scratch).map(|(_, new)| new.dir().as_fd()).collect();
    sandbox::confine(&SandboxProfile::Remover { beneath: &dirs }, None)?;
    let part = locate_for_writing(opened.into_disk()?, &behind.start_disks(), &place.options());
    let disk = part.with_context(|| image.shown().to_string())?.disk;
    if let Some(mut saved) = saved {
        let blocks =
            revert(&*disk, &mut saved, is_forced).with_context(|| image.shown().to_string())?;
        report::print_line(format_args!("{}: {blocks} blocks restored", image.shown()))?;
        return Ok(Outcome::Clean);
    }
    let _ = draconis_ext::finish_interrupted_change(&*disk);
    // A damaged block of mmp is one of the problems.
    let is_readable = draconis_ext::tune::superblock(&*disk).is_ok_and(|raw| raw.check().is_ok());
    let _claim = match is_readable {
        true => mmp_claim::claim_volume(image, &disk, now).map(Some).or_else(ignore_damage)?,
        false => None,
    };
    let repair = plan_repair(arguments, &disk, now)?;
    if repair.is_empty() {
        print(arguments, &repair, false)?;
        return Ok(Outcome::Clean);
    }
    let is_safe = repair.fixes.iter().all(|it| it.problem.is_preen_ok());
    let verdict = repair.verdict();
    if matches!(verdict, Verdict::Left(_)) || arguments.preen && !is_safe {
        print(arguments, &repair, false)?;
        if !matches!(verdict, Verdict::Left(_)) {
            report::warn_line("draconis: not all of this is safe; -y makes it");
        }
        return Ok(Outcome::Left);
    }
    if !arguments.yes && !arguments.preen {
        print(arguments, &repair, false)?;
        if !ask(repair.fixes.len())? {
            return Ok(Outcome::Left);
        }
    }
    let use_file = |(file, new): (File, NewFile)| {
        new.keep();
        file
    };
    repair.write(&disk, undo.map(use_file), scratch.map(use_file)).map_err(|error| {
        let step = match error {
            OfflineError::NoLogSpace => "; --scratch FILE takes the log instead",
            _ => "",
        };
        anyhow::anyhow!("{}: {error}{step}", image.shown())
    })?;
    if arguments.yes || arguments.preen {
        print(arguments, &repair, true)?;
    }
    Ok(if verdict == Verdict::InPart { Outcome::Left } else { Outcome::Repaired })
}

fn ignore_damage<T>(error: anyhow::Error) -> anyhow::Result<Option<T>> {
    let is_damage = |it: &(dyn std::error::Error + 'static)| {
        let of_volume = match it.downcast_ref::<OpenError>() {
            Some(OpenError::Ext(error)) => Some(error),
            _ => it.downcast_ref::<draconis_ext::Error>(),
        };
        matches!(of_volume, Some(draconis_ext::Error::Corrupt { .. }))
    };
    match error.chain().any(is_damage) {
        true => Ok(None),
        false => Err(error),
    }
}

fn plan_repair(
    arguments: &Arguments,
    disk: &Arc<dyn Disk>,
    now: draconis_types::Time,
) -> anyhow::Result<Repair> {
    let bar = CheckProgress::new(arguments.progress);
    let progress = |done, total| bar.show(done, total);
    let options = RepairOptions {
        superblock: arguments.superblock.place(),
        check: CheckOptions::default(),
        now,
        max_change_bytes: arguments.memory.saturating_mul(1 << 20),
    };
    plan(disk, &options, &progress).map_err(|error| match error {
        OfflineError::Volume(error) => {
            image::open_volume_error(&arguments.image, &**disk, error.into())
        }
        error => anyhow::Error::from(error).context(arguments.image.shown().to_string()),
    })
}

fn ask(fixes: usize) -> anyhow::Result<bool> {
    let mut out = std::io::stdout();
    write!(out, "Make these {fixes} changes? [y/N] ")?;
    out.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn print(arguments: &Arguments, repair: &Repair, written: bool) -> anyhow::Result<()> {
    let mut out = EscapingOutput::new();
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&repair_json(repair, written))?)?;
        return Ok(out.flush()?);
    }
    for Fix { problem, action, .. } in repair.fixes.iter().filter(|it| !it.follows) {
        writeln!(out, "{problem}\n    {action}")?;
    }
    match repair.fixes.iter().filter(|it| it.follows).count() {
        0 => {}
        follow => writeln!(out, "and {follow} changes that follow from these")?,
    }
    for problem in &repair.unfixed {
        writeln!(out, "{problem}\n    NO FIX")?;
    }
    let name = arguments.image.shown();
    let (fixes, left) = (repair.fixes.len(), repair.unfixed.len());
    match (written, repair.verdict()) {
        (true, Verdict::InPart) => writeln!(
            out,
            "{name}: repaired in part, {fixes} changes; {left} problems have no fix: copy what can \
             be read (draconis rescue), then let e2fsck -f repair them"
        )?,
        (true, _) => writeln!(out, "{name}: repaired, {fixes} changes")?,
        (false, Verdict::NothingToDo) => writeln!(out, "{name}: nothing to repair")?,
        (false, Verdict::Repaired) => writeln!(out, "{name}: {fixes} changes would repair it")?,
        (false, Verdict::InPart) => writeln!(
            out,
            "{name}: {fixes} changes would repair it in part; {left} problems have no fix"
        )?,
        (false, Verdict::Left(why)) => writeln!(
            out,
            "{name}: {why}, nothing is written; copy what can be read (draconis rescue), then let \
             e2fsck -f repair it"
        )?,
    }
    Ok(out.flush()?)
}

fn repair_json(repair: &Repair, written: bool) -> RepairJson {
    let fix = |it: &Fix| FixJson {
        problem: problem_json(&it.problem),
        action: it.action,
        follows: it.follows,
    };
    let (verdict, reason) = match repair.verdict() {
        Verdict::NothingToDo => ("nothing to do", None),
        Verdict::Repaired => ("repaired", None),
        Verdict::InPart => ("repaired in part", None),
        Verdict::Left(why) => ("left as it was", Some(why)),
    };
    RepairJson {
        verdict,
        reason,
        written,
        complete: repair.unfixed.is_empty(),
        changed_blocks: repair.changed_block_count(),
        fixes: repair.fixes.iter().map(fix).collect(),
        unfixed: repair.unfixed.iter().map(problem_json).collect(),
    }
}

fn problem_json(problem: &Problem) -> ProblemJson {
    ProblemJson {
        what: problem.what.code(),
        pass: problem.what.pass(),
        text: problem.to_string(),
        group: problem.group.map(|it| it.0),
        inode: problem.inode.map(|it| it.0),
        block: problem.block.map(|it| it.0),
        name: problem.name.as_deref().map(escape_control_chars),
    }
}
