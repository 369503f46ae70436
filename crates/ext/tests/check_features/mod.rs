//! The checker on ext3 and ext4 compared with `e2fsck -fn`: volumes with each feature, filled by
//! the kernel, are clean; corrupted ones get the same verdict.

use crate::common::{self, Image};
use crate::matrix::{ioctl, journals, made, pool, table};
mod bits;
mod changes;
mod parts;
mod plants;
pub mod repairs;

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::matrix::fill::DataScale;
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::check::{CheckOptions, Report, Severity, What, check};
use draconis_ext::{Error, Result};
use parts::BaseVolume;

const THREADS: usize = 2;

fn check_image(image: Vec<u8>) -> Result<Report> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
    check(&disk, CheckOptions::default(), &|_, _| {})
}

fn format_problems(report: &Result<Report>) -> String {
    match report {
        Ok(report) => report.problems.iter().take(12).map(|it| format!("  {it}\n")).collect(),
        Err(error) => format!("  cannot check: {error}\n"),
    }
}

/// Returns true if `e2fsck -fn` finds nothing, with its output.
fn e2fsck(path: &Path) -> (bool, String) {
    let run = draconis_testkit::judge::e2fsck("-fn", path);
    (run.is_success(), run.output())
}

fn e2fsck_bytes(bytes: &[u8]) -> (bool, String) {
    e2fsck(&Image::from_bytes(bytes).path)
}

/// The first seed.
fn seed_from_env() -> u64 {
    std::env::var("DRACONIS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0)
}

fn matches_line_filter(line: &str) -> bool {
    std::env::var("DRACONIS_MATRIX_ONLY").map_or(true, |only| line.contains(&only))
}

#[test]
#[ignore = "long: a minute: the kernel fills a volume of each kind"]
fn kernel_filled_volumes_are_clean() {
    let all: Vec<&str> =
        table::COMBINATIONS.iter().copied().filter(|it| matches_line_filter(it)).collect();
    let results = pool::run_each_in_threads(THREADS, &all, |line| {
        let large = ["-C", "-b 32768", "-b 65536"].iter().any(|it| line.contains(it));
        let scale = if large { DataScale::Usual } else { DataScale::Tiny };
        let made = made::make_volume(line, scale, &mut Random::new(1))?;
        let (clean, said) = e2fsck(&made.image.path);
        let report = check_image(std::fs::read(&made.image.path).unwrap());
        if let Err(Error::Unsupported { feature }) = &report {
            return Some(format!("refused: {feature}"));
        }
        if !report.as_ref().is_ok_and(Report::is_clean) || !clean {
            return Some(format!("\n{} e2fsck: {said}", format_problems(&report)));
        }
        let Report { used_inodes, inodes, used_blocks, blocks, .. } = report.unwrap();
        let [files, used] =
            [format!(": {used_inodes}/{inodes} files"), format!(" {used_blocks}/{blocks} blocks")];
        (!said.contains(&files) || !said.contains(&used))
            .then(|| format!("counted{files}{used}, e2fsck: {said}"))
    });
    let wrong: Vec<String> = results
        .into_iter()
        .zip(all)
        .filter_map(|(result, line)| Some(format!("{line}: {}", result.unwrap_or_else(Some)?)))
        .collect();
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Intended differences of the verdict, by name (docs/decisions/0066):
/// - *feature*: e2fsck ignores features that we cannot check;
/// - *copies*: it may accept backups of damaged superblocks and descriptors;
/// - *writes*: it tries to write in spite of `-n`, and fails;
/// - *reserve*: the blocks of the resize inode are wrong, and it accepts them;
/// - *kernel*: it accepts volumes that the kernel does not mount read-write, or cannot read.
fn known_verdict_difference(
    report: &Result<Report>,
    theirs: bool,
    said: &str,
    path: &Path,
) -> Option<&'static str> {
    match report {
        Err(Error::Unsupported { .. }) if theirs => Some("feature"),
        Ok(_) if theirs && said.contains("trying backup blocks") => Some("copies"),
        Ok(_) if !theirs && said.contains("Error writing block") => Some("writes"),
        Ok(report) if theirs => {
            let damage = || {
                let all = report.problems.iter().map(|it| it.what);
                all.filter(|what| what.severity() == Severity::Damage)
            };
            let only = |whats: &[What]| damage().all(|what| whats.contains(&what));
            if only(&[What::ResizeInode]) {
                return Some("reserve");
            }
            let fatal = [What::GroupChecksum, What::JournalInode, What::ResizeInode];
            let nodes = damage().any(|what| what == What::ExtentNode);
            let refused = only(&fatal) && !can_kernel_mount(path, "loop")
                || nodes && !can_kernel_read_all(path);
            refused.then_some("kernel")
        }
        _ => None,
    }
}

/// Returns true if the kernel mounts a volume with these options.
fn can_kernel_mount(path: &Path, options: &str) -> bool {
    with_mount(path, options, |_| ()).is_some()
}

/// Returns true if the kernel reads all files of a volume.
fn can_kernel_read_all(path: &Path) -> bool {
    let read = |root: &Path| {
        let mut cat = Command::new("find");
        let output = cat.arg(root).args(["-type", "f", "-exec", "cat", "{}", "+"]).output();
        output.is_ok_and(|output| output.status.success())
    };
    with_mount(path, "loop,ro", read).unwrap_or(true)
}

fn with_mount<T>(path: &Path, options: &str, work: impl FnOnce(&Path) -> T) -> Option<T> {
    let dir = made::scratch_dir();
    let mounted = Command::new("mount").args(["-o", options]).arg(path).arg(dir.path()).output();
    mounted.ok().filter(|output| output.status.success())?;
    let done = work(dir.path());
    common::unmount_and_wait(dir.path());
    Some(done)
}

/// Volumes to corrupt.
const LINES_TO_CORRUPT: &[&str] = &[
    "-t ext4 -b 1024",
    "-t ext4 -b 4096 -O ^metadata_csum,uninit_bg",
    "-t ext4 -b 1024 -O ^metadata_csum,^64bit",
    "-t ext4 -b 2048 -O orphan_file -I 512",
    "-t ext3 -b 1024 -O uninit_bg,flex_bg",
    "-t ext4 -b 1024 -O meta_bg,^resize_inode -g 1024",
    "-t ext4 -b 1024 -O inline_data -I 256",
    "-t ext4 -b 4096 -O inline_data,ea_inode,^metadata_csum -I 512",
    "-t ext4 -b 1024 -O ea_inode",
    "-t ext4 -b 1024 -O bigalloc -C 4096",
    "-t ext4 -b 4096 -O casefold",
    "-t ext4 -b 1024 -O mmp,verity,metadata_csum_seed",
    "-t ext4 -b 1024 -O large_dir,sparse_super2,^resize_inode",
    "-t ext4 -b 1024 -O encrypt",
    "-t ext4 -b 4096 | -O project,quota -Q usrquota,grpquota,prjquota",
];

fn build_base_volumes(lines: &[&str]) -> Vec<BaseVolume> {
    let made = pool::run_each_in_threads(THREADS, lines, |line| {
        let made = made::make_volume(line, DataScale::Tiny, &mut Random::new(1))?;
        Some(BaseVolume::from_image(line, std::fs::read(&made.image.path).unwrap()))
    });
    made.into_iter().filter_map(|it| it.unwrap()).collect()
}

/// A volume with corrupted fields.
struct CorruptedVolume<'a> {
    base: &'a BaseVolume,
    seed: u64,
    image: Vec<u8>,
}

/// Corrupts a volume of these `lines` for each seed, and returns what `judge` says against them;
/// `None` if no volume can be made here.
fn check_corrupted_volumes(
    lines: &[&str],
    salt: u64,
    rounds: u64,
    judge: impl Fn(CorruptedVolume<'_>) -> Option<String> + Sync,
) -> Option<Vec<String>> {
    let lines: Vec<&str> = lines.iter().copied().filter(|it| matches_line_filter(it)).collect();
    let bases = build_base_volumes(&lines);
    let first = seed_from_env();
    let seeds: Vec<u64> = (first..first + rounds).collect();
    let results = pool::run_each_in_threads(THREADS, &seeds, |seed| {
        let base = bases.get((*seed % bases.len().max(1) as u64) as usize)?;
        let (image, told) = base.corrupt_randomly(&mut Random::new(seed ^ salt));
        let wrong = judge(CorruptedVolume { base, seed: *seed, image })?;
        Some(format!("seed {seed}, {}: {told}\n {wrong}", base.line))
    });
    let wrong = results.into_iter().filter_map(|it| it.unwrap_or_else(Some)).collect();
    (!bases.is_empty()).then_some(wrong)
}

#[test]
#[ignore = "long: a minute: hundreds of volumes"]
fn verdict_matches_e2fsck() {
    let rounds = common::spoil::scaled_rounds(300);
    let tally = Mutex::new((0u64, 0u64, 0u64));
    let odd = check_corrupted_volumes(LINES_TO_CORRUPT, 0xE4C4, rounds, |volume| {
        let CorruptedVolume { seed, image, .. } = volume;
        let dir = made::scratch_dir();
        let path = dir.path().join("image");
        std::fs::write(&path, &image).unwrap();
        let (theirs, text) = e2fsck(&path);
        let report = check_image(image);
        let ours = report.as_ref().is_ok_and(Report::is_clean);
        let mut tally = tally.lock().unwrap();
        tally.0 += u64::from(theirs);
        tally.1 += u64::from(!theirs);
        if ours == theirs {
            return None;
        }
        if known_verdict_difference(&report, theirs, &text, &path).is_some() {
            tally.2 += 1;
            return None;
        }
        drop(tally);
        if let Some(dir) = std::env::var_os("DRACONIS_MATRIX_KEEP") {
            std::fs::copy(&path, Path::new(&dir).join(format!("seed-{seed}"))).unwrap();
        }
        let text: String = text.lines().take(12).map(|it| format!("  {it}\n")).collect();
        let what = if theirs { "nothing" } else { "damage" };
        let ours = format_problems(&report);
        Some(format!("e2fsck finds {what}\n ours:\n{ours} e2fsck:\n{text}"))
    });
    let Some(odd) = odd else { return };
    let (clean, damaged, exceptions) = tally.into_inner().unwrap();
    assert!(odd.is_empty(), "{} of {rounds} ({clean} clean):\n{}", odd.len(), odd.join("\n"));
    eprintln!("{rounds} volumes, {clean} clean, {exceptions} exceptions");
    assert!(exceptions <= rounds / 20);
    assert!(clean > rounds / 50 && damaged > rounds / 4, "{clean} {damaged}");
}

/// Plants every problem that ext2 volumes cannot have; `complaints.rs` plants the others.
#[test]
fn every_problem_kind_is_planted() {
    let mut lines: Vec<&str> = plants::PLANTED_PROBLEMS.iter().map(|(line, ..)| *line).collect();
    lines.dedup();
    let bases = build_base_volumes(&lines);
    let mut wrong = Vec::new();
    for (line, what, plant) in plants::PLANTED_PROBLEMS {
        let Some(base) = bases.iter().find(|base| base.line == *line) else { continue };
        let mut changed = plants::PlantingImage { base, image: base.image.clone() };
        plant(&mut changed);
        let dir = made::scratch_dir();
        let path = dir.path().join("image");
        std::fs::write(&path, &changed.image).unwrap();
        let (theirs, said) = e2fsck(&path);
        let report = check_image(changed.image);
        let found = report.as_ref().is_ok_and(|it| it.problems.iter().any(|it| it.what == *what));
        let ours = report.as_ref().is_ok_and(Report::is_clean);
        let same =
            ours == theirs || known_verdict_difference(&report, theirs, &said, &path).is_some();
        if !found || !same {
            wrong.push(format!("{line}: {what:?}\n ours:\n{}{said}", format_problems(&report)));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// A volume with an unreplayed journal is checked as after replay, like e2fsck after the kernel's
/// replay.
#[test]
fn journal_contents_are_checked() {
    let few = [0usize, 5, 8, 11, 14, 18, 20];
    let all: Vec<_> = few.iter().map(|nth| journals::JOURNAL_VOLUMES[*nth]).collect();
    let results = pool::run_each_in_threads(THREADS, &all, |(line, options)| {
        let how = ioctl::ShutdownMode::AfterCommit;
        let dirty = journals::make_dirty_volume(line, options, how, &mut Random::new(3))?;
        let report = check_image(std::fs::read(&dirty.image.path).unwrap());
        with_mount(&dirty.image.path, "loop", |_| ())?;
        let (theirs, said) = e2fsck(&dirty.image.path);
        let ours = report.as_ref().is_ok_and(|report| report.is_clean());
        let replayed = report.as_ref().is_ok_and(|report| report.replayed);
        (ours != theirs || !replayed)
            .then(|| format!("{line} {options}:\n{} e2fsck:\n{said}", format_problems(&report)))
    });
    let wrong: Vec<String> = results.into_iter().filter_map(|it| it.unwrap_or_else(Some)).collect();
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
