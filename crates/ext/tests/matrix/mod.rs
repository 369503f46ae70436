//! Volumes of every combination of features that mke2fs makes, filled by the kernel and read by us:
//! everything that `stat`, `getfattr`, `ls`, `cat` and `readlink` show is compared.
//!
//! A combination is a line in `table.rs`. `DRACONIS_MATRIX=50` takes so many random combinations
//! instead of a few, and puts more on every volume. `DRACONIS_MATRIX_SEED` is the seed,
//! `DRACONIS_MATRIX_ONLY` a substring of the lines to try, and `DRACONIS_MATRIX_KEEP` a directory
//! for failing images.

pub mod fill;
pub mod ioctl;
pub mod journals;
pub mod made;
pub mod pool;
mod random;
pub mod seen;
pub mod structures;
pub mod table;

use crate::common::Image;
use draconis_device::Random;
use fill::DataScale;
use ioctl::ShutdownMode;

/// More than the CPUs of a small machine: mounting waits for devices.
const THREADS: usize = 4;
/// Default number of random combinations.
const DEFAULT_RANDOM_COMBINATIONS: usize = 6;
/// Limit of differences reported per volume.
const MAX_REPORTED_DIFFERENCES: usize = 12;

fn number_from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// Returns the lines to try, the amount of data on each volume, and the seed.
fn lines_to_test() -> (Vec<String>, DataScale, u64) {
    let more = number_from_env("DRACONIS_MATRIX");
    let seed = number_from_env("DRACONIS_MATRIX_SEED").unwrap_or(1);
    let only = std::env::var("DRACONIS_MATRIX_ONLY").unwrap_or_default();
    let mut chance = Random::new(seed);
    let count = more.map_or(DEFAULT_RANDOM_COMBINATIONS, |more| more as usize);
    let mut lines: Vec<String> = table::COMBINATIONS.iter().map(|it| (*it).to_owned()).collect();
    lines.extend((0..count).map(|_| random::random_combination(&mut chance)));
    lines.retain(|line| line.contains(&only));
    println!("seed {seed}: {} combinations", lines.len());
    (lines, if more.is_some() { DataScale::Large } else { DataScale::Usual }, seed)
}

#[test]
#[ignore = "long: minutes: a hundred combinations of features"]
fn kernel_written_volumes_are_read() {
    let (lines, scale, seed) = lines_to_test();
    let results = pool::run_each_in_threads(THREADS, &lines, |line| {
        let made = made::make_volume(line, scale, &mut Random::new(seed))?;
        let differences = made::view_differences(&made);
        unexpected_differences_error(line, &made.image, &differences, |feature| {
            made.facts.has_feature(feature)
        })
    });
    panic_on_errors(seed, &lines, results);
}

#[test]
#[ignore = "long: a minute: combinations of features"]
fn kernel_written_journals_are_read() {
    let seed = number_from_env("DRACONIS_MATRIX_SEED").unwrap_or(1);
    let rounds = number_from_env("DRACONIS_MATRIX").map_or(1, |more| 2 + more / 20);
    let only = std::env::var("DRACONIS_MATRIX_ONLY").unwrap_or_default();
    let mut cases = Vec::new();
    for (line, options) in journals::JOURNAL_VOLUMES.iter().filter(|(line, _)| line.contains(&only))
    {
        for how in [ShutdownMode::AfterCommit, ShutdownMode::WithoutCommit] {
            cases.extend((seed..seed + rounds).map(|seed| (*line, *options, how, seed)));
        }
    }
    let results = pool::run_each_in_threads(THREADS, &cases, |(line, options, how, seed)| {
        let dirty = journals::make_dirty_volume(line, options, *how, &mut Random::new(*seed))?;
        let differences = journals::recovery_differences(&dirty)?;
        let name = format!("{line} ; {options} ; {how:?}");
        unexpected_differences_error(&name, &dirty.image, &differences, |feature| {
            dirty.facts.has_feature(feature)
        })
    });
    let lines: Vec<String> = cases.iter().map(|case| format!("{case:?}")).collect();
    panic_on_errors(seed, &lines, results);
}

/// Returns an error text for unexpected differences.
fn unexpected_differences_error(
    line: &str,
    image: &Image,
    differences: &[String],
    has: impl FnMut(&str) -> bool,
) -> Option<String> {
    match (differences, table::find_known_failure(line, has)) {
        ([], None) => None,
        ([], Some((key, _))) => Some(format!("is read by now: delete {key:?} from NOT_YET")),
        (all, None) => {
            Some(format!("{} {}", format_differences(all), made::keep_failing_image(image)))
        }
        (all, Some((key, why))) => {
            println!("not yet ({key}: {why}): {line}: {}", format_differences(all));
            None
        }
    }
}

/// Fails with all errors, if there are any.
fn panic_on_errors(seed: u64, lines: &[String], results: Vec<Result<Option<String>, String>>) {
    let wrong: Vec<String> = results
        .into_iter()
        .zip(lines)
        .filter_map(|(result, line)| {
            let why = result.unwrap_or_else(|panic| Some(format!("not tried: {panic}")))?;
            Some(format!("{line}: {why}"))
        })
        .collect();
    assert!(wrong.is_empty(), "seed {seed}: {} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Returns the first differences.
fn format_differences(differences: &[String]) -> String {
    let first: Vec<&str> =
        differences.iter().take(MAX_REPORTED_DIFFERENCES).map(String::as_str).collect();
    format!("{} differences\n  {}\n ", differences.len(), first.join("\n  "))
}
