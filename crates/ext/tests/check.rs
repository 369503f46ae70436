//! The checker compared with `e2fsck -fn`: valid volumes of many kinds, single faults, and random
//! damage.

use crate::common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use crate::common::spoil::{build_small_tree, corrupt_field, metadata_ranges};
use crate::common::{Image, PreadDisk, tree};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::check::{CheckOptions, Report, check};
use draconis_ext::{Error, Result};
use draconis_testkit::judge;
use draconis_testkit::wait::HangClock;

fn check_image(path: &Path) -> Result<Report> {
    let disk: Arc<dyn Disk> = Arc::new(PreadDisk::open(path, 512));
    check(&disk, CheckOptions::default(), &|_, _| {})
}

/// Returns true if `e2fsck -fn` finds nothing, with its output.
fn e2fsck(path: &Path) -> Option<(bool, String)> {
    let run = judge::try_run(judge::tool_command("e2fsck").arg("-fn").arg(path)).ok()?;
    Some((run.is_success(), run.output()))
}

fn format_problems(report: &Result<Report>) -> String {
    match report {
        Ok(report) => report.problems.iter().map(|it| format!("  {it}\n")).collect(),
        Err(error) => format!("  cannot check: {error}\n"),
    }
}

/// Checks a valid image: no problems, and the counts of `e2fsck`.
fn sound(arguments: &[&str], rounded: bool) {
    let source = tempfile::tempdir().unwrap();
    tree::build_tree(source.path());
    let large = arguments.iter().any(|it| it.len() > 4 && it.parse::<u32>().is_ok());
    let size = if large { "96M" } else { "16M" };
    let Some(image) = Image::make(Some(source.path()), size, arguments) else { return };
    if rounded {
        common::run_tool("e2fsck", &["-fyD", image.path()]);
    }
    let report = check_image(&image.path);
    assert_eq!(format_problems(&report), "");
    let report = report.unwrap();
    assert!(report.is_clean() && report.complete && report.directories > 10);
    let Some((clean, said)) = e2fsck(&image.path) else { return };
    assert!(clean, "{said}");
    let Report { used_inodes, inodes, used_blocks, blocks, .. } = report;
    assert!(said.contains(&format!(": {used_inodes}/{inodes} files")), "{report:?}: {said}");
    assert!(said.contains(&format!(" {used_blocks}/{blocks} blocks")), "{report:?}: {said}");
}

macro_rules! sound {
    ($($name:ident: $($argument:literal)*;)*) => {
        $(#[test] fn $name() {
            sound(&[$($argument),*], false);
            sound(&[$($argument),*], true);
        })*
    };
}

sound! {
    blocks_of_1k: "-b" "1024";
    blocks_of_2k: "-b" "2048";
    blocks_of_4k: "-b" "4096";
    blocks_of_8k: "-b" "8192";
    blocks_of_64k: "-b" "65536";
    inodes_of_128: "-b" "1024" "-I" "128";
    inodes_of_1024: "-b" "4096" "-I" "1024";
    revision_0: "-b" "1024" "-r" "0" "-O" "none";
    no_filetype: "-b" "1024" "-O" "^filetype";
    no_sparse_super: "-b" "1024" "-O" "^sparse_super,^resize_inode" "-g" "1024";
    sparse_super2: "-b" "1024" "-O" "sparse_super2,^resize_inode" "-g" "1024";
    meta_bg: "-b" "1024" "-O" "meta_bg,^resize_inode" "-g" "256" "-N" "4096";
    flex_bg: "-b" "1024" "-O" "flex_bg" "-g" "512" "-N" "4096";
    small_groups: "-b" "1024" "-g" "512" "-N" "4096";
    journal: "-t" "ext3" "-b" "1024" "-J" "size=1";
    ext4_fields: "-b" "1024" "-O" "huge_file,dir_nlink,extra_isize,large_file" "-I" "256";
    large_directories: "-b" "1024" "-O" "large_dir";
}

#[test]
fn uncheckable_features_are_named() {
    for (arguments, why) in [
        (["-O", "casefold,encrypt"], "needs: casefold with encrypt"),
        (["-O", "journal_dev"], "needs: journal_dev"),
    ] {
        let Some(image) = Image::make(None, "8M", &arguments) else { return };
        assert_eq!(check_image(&image.path).unwrap_err().to_string(), why);
    }
    let noise = Image::from_bytes(&tree::random_bytes(1, 64 << 10));
    assert_eq!(check_image(&noise.path).unwrap_err(), Error::NotExt);
    assert_eq!(check_image(&Image::from_bytes(&[0; 1024]).path).unwrap_err(), Error::NotExt);
}

/// Small images of several kinds, made once.
fn base_images() -> &'static [Vec<u8>] {
    static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    BASES.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        build_small_tree(source.path());
        let makes: [&[&str]; 7] = [
            &["-b", "1024", "-I", "256"],
            &["-b", "1024", "-I", "128", "-g", "256", "-O", "meta_bg,^resize_inode"],
            &["-b", "2048", "-I", "512", "-O", "sparse_super2,huge_file,large_file"],
            &["-b", "4096", "-I", "256", "-O", "^dir_index,^filetype"],
            &["-b", "1024", "-r", "0", "-O", "none"],
            &["-t", "ext3", "-b", "1024", "-J", "size=1"],
            &["-b", "1024", "-g", "512", "-O", "resize_inode"],
        ];
        makes
            .iter()
            .filter_map(|arguments| {
                let size = if arguments.contains(&"ext3") { "2400k" } else { "768k" };
                let seeded = [&["-E", common::HASH_SEED], *arguments].concat();
                let image = Image::make(Some(source.path()), size, &seeded)?;
                common::run_tool("e2fsck", &["-fyD", image.path()])?;
                Some(std::fs::read(&image.path).unwrap())
            })
            .collect()
    })
}

/// Returns ranges in the bitmaps of group 0.
fn bitmap_ranges(image: &[u8]) -> Vec<std::ops::Range<usize>> {
    let le32 = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let block = 1024 << le32(1024 + 0x18);
    let descriptors = block * (le32(1024 + 0x14) + 1);
    let places = [le32(descriptors) * block, le32(descriptors + 4) * block];
    places.into_iter().flat_map(|at| [at..at + block, at..at + 32, at..at + 96]).collect()
}

/// Returns an image with a few corrupt fields.
fn corrupt_base_image(seed: u64) -> Option<Vec<u8>> {
    let base = base_images().get(seed as usize % base_images().len().max(1))?;
    let mut structures = metadata_ranges(base);
    structures.extend(bitmap_ranges(base));
    let mut random = Random::new(seed ^ 0xFC5C);
    let mut image = base.clone();
    for _ in 0..=random.next_below(3) {
        let nth = random.next_below(structures.len() as u64) as usize;
        corrupt_field(&mut image, structures[nth].clone(), &mut random);
    }
    Some(image)
}

/// Intended differences from `e2fsck` 1.47, by name. Of 10,000 images:
/// - *copies* (about 25): e2fsck reads backups if the first superblock or the first descriptors are
///   damaged, and may accept those; other drivers read the damaged ones;
/// - *feature* (about 3): e2fsck ignores features that we cannot check;
/// - *writes* (about 3): e2fsck tries to write in spite of `-n`, and fails.
fn known_verdict_difference(
    report: &Result<Report>,
    theirs: bool,
    said: &str,
) -> Option<&'static str> {
    match report {
        Err(Error::Unsupported { .. }) if theirs => Some("feature"),
        Ok(_) if theirs && said.contains("trying backup blocks") => Some("copies"),
        Ok(_) if !theirs && said.contains("Error writing block") => Some("writes"),
        _ => None,
    }
}

/// Any bytes give a result, in bounded time and memory.
#[test]
fn check_survives_corrupt_images() {
    draconis_testkit::in_own_process!();
    for seed in 0..1500 {
        let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
            return;
        };
        let structures = metadata_ranges(base);
        let mut random = Random::new(seed ^ 0xBAD);
        let mut image = base.clone();
        for _ in 0..1 << random.next_below(8) {
            let nth = random.next_below(structures.len() as u64) as usize;
            corrupt_field(&mut image, structures[nth].clone(), &mut random);
        }
        match seed % 4 {
            0 => image.truncate(random.next_below(image.len() as u64) as usize),
            1 => (0..200).for_each(|_| {
                let at = random.next_below(image.len() as u64) as usize;
                image[at] = random.next_u64() as u8;
            }),
            _ => {}
        }
        let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(image, 512));
        let clock = HangClock::start();
        let report = check(&disk, CheckOptions::default(), &|_, _| {});
        clock.assert_not_hung(format_args!("seed {seed}"));
        let same = check(&disk, CheckOptions { threads: 1, ..CheckOptions::default() }, &|_, _| {});
        // Of files that share an indirect block, the first one gets more details.
        let clean = |report: &Result<Report>| report.as_ref().map(Report::is_clean).ok();
        assert_eq!(clean(&report), clean(&same), "seed {seed}: threads make a difference");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib < 256 << 10, "{kib} KiB");
}

#[test]
fn verdict_matches_e2fsck() {
    let times = std::env::var("DRACONIS_ROUNDS").ok().and_then(|times| times.parse().ok());
    let first: u64 =
        std::env::var("DRACONIS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let rounds = 400 * times.unwrap_or(1u64);
    let next = Mutex::new(first..first + rounds);
    let odd = Mutex::new(Vec::new());
    let tally = Mutex::new((0u64, 0u64));
    let exceptions = Mutex::new(BTreeMap::<&str, u64>::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(seed) = next.lock().unwrap().next() else { return };
                    let Some(bytes) = corrupt_base_image(seed) else { return };
                    let image = Image::from_bytes(&bytes);
                    let report = check_image(&image.path);
                    let clean = report.as_ref().is_ok_and(Report::is_clean);
                    let Some((theirs, text)) = e2fsck(&image.path) else { return };
                    let mut tally = tally.lock().unwrap();
                    tally.0 += u64::from(theirs);
                    tally.1 += u64::from(!theirs);
                    drop(tally);
                    if clean == theirs {
                        continue;
                    }
                    if let Some(name) = known_verdict_difference(&report, theirs, &text) {
                        *exceptions.lock().unwrap().entry(name).or_insert(0) += 1;
                    } else {
                        let ours = format_problems(&report);
                        let text: String =
                            text.lines().take(20).map(|it| format!("  {it}\n")).collect();
                        odd.lock().unwrap().push(format!(
                            "seed {seed}: e2fsck finds {}\n ours:\n{ours} e2fsck:\n{text}",
                            if theirs { "nothing" } else { "damage" }
                        ));
                    }
                }
            });
        }
    });
    let odd = odd.into_inner().unwrap();
    let (clean, damaged) = tally.into_inner().unwrap();
    assert!(odd.is_empty(), "{} of {rounds} ({clean} clean):\n{}", odd.len(), odd.join("\n"));
    let exceptions = exceptions.into_inner().unwrap();
    eprintln!("{rounds} images, {clean} clean, exceptions: {exceptions:?}");
    assert!(exceptions.values().sum::<u64>() <= rounds / 40, "{exceptions:?}");
    // The test would prove little if e2fsck found all images valid, or none.
    assert!(
        base_images().is_empty() || clean > rounds / 50 && damaged > rounds / 4,
        "{clean} {damaged}"
    );
}

/// A device or pipe has no map, and nothing but its number where a flag forbids changes.
#[test]
fn special_files_hold_only_their_number() {
    let cases = ["flags 0x80000", "flags 0x10000000", "flags 0x1000", "block[5] 99", "flags 0x10"];
    for fields in cases.map(|field| vec![field]).into_iter().chain([
        vec!["block[5] 99", "flags 0x10"],
        vec!["block[9] 7", "flags 0x20"],
        vec!["block[1] 7", "flags 0x20"],
    ]) {
        for kind in ["p", "c 5 1", "b 8 1"] {
            let Some(image) = Image::make(None, "8M", &["-t", "ext4", "-O", "inline_data"]) else {
                return;
            };
            image.debugfs_write(&format!("mknod x {kind}")).unwrap();
            for field in &fields {
                image.debugfs_write(&format!("sif x {field}")).unwrap();
            }
            let ours = check_image(&image.path).unwrap();
            let theirs = draconis_testkit::judge::e2fsck("-fn", &image.path);
            let what = format!("{kind}, {fields:?}: {:?}\n{}", ours.problems, theirs.stdout);
            assert_eq!(ours.is_clean(), theirs.is_success(), "{what}");
        }
    }
}
