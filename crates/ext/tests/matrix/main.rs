//! Volumes of every combination of features that mke2fs makes, filled by the kernel and read by us:
//! everything that `stat`, `getfattr`, `ls`, `cat` and `readlink` show is compared.
//!
//! A combination is a line in `table.rs`. `DRACONIS_MATRIX=50` takes so many random combinations
//! instead of a few, and puts more on every volume. `DRACONIS_MATRIX_SEED` is the seed,
//! `DRACONIS_MATRIX_ONLY` a substring of the lines to try, and `DRACONIS_MATRIX_KEEP` a directory
//! for failing images.

#[path = "../common/mod.rs"]
mod common;
mod fill;
mod ioctl;
mod journals;
mod made;
mod pool;
mod random;
mod seen;
mod table;

use common::Image;
use draconis_device::Random;
use fill::Scale;
use ioctl::Shutdown;

/// More than the CPUs of a small machine: mounting waits for devices.
const THREADS: usize = 4;
/// Default number of random combinations.
const USUAL_RANDOM: usize = 6;
/// Limit of differences reported per volume.
const TOLD: usize = 12;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// Returns the lines to try, the amount of data on each volume, and the seed.
fn lines() -> (Vec<String>, Scale, u64) {
    let more = number("DRACONIS_MATRIX");
    let seed = number("DRACONIS_MATRIX_SEED").unwrap_or(1);
    let only = std::env::var("DRACONIS_MATRIX_ONLY").unwrap_or_default();
    let mut chance = Random::new(seed);
    let count = more.map_or(USUAL_RANDOM, |more| more as usize);
    let mut lines: Vec<String> = table::COMBINATIONS.iter().map(|it| (*it).to_owned()).collect();
    lines.extend((0..count).map(|_| random::combination(&mut chance)));
    lines.retain(|line| line.contains(&only));
    println!("seed {seed}: {} combinations", lines.len());
    (lines, if more.is_some() { Scale::Large } else { Scale::Usual }, seed)
}

#[test]
fn what_the_kernel_wrote_is_read() {
    let (lines, scale, seed) = lines();
    let results = pool::each(THREADS, &lines, |line| {
        let made = made::make(line, scale, &mut Random::new(seed))?;
        let differences = made::differences(&made);
        verdict(line, &made.image, &differences, |feature| made.facts.has(feature))
    });
    judge(seed, &lines, results);
}

#[test]
fn what_the_kernel_left_in_a_journal_is_read() {
    let seed = number("DRACONIS_MATRIX_SEED").unwrap_or(1);
    let rounds = number("DRACONIS_MATRIX").map_or(1, |more| 2 + more / 20);
    let only = std::env::var("DRACONIS_MATRIX_ONLY").unwrap_or_default();
    let mut cases = Vec::new();
    for (line, options) in journals::JOURNALS.iter().filter(|(line, _)| line.contains(&only)) {
        for how in [Shutdown::AfterCommit, Shutdown::WithoutCommit] {
            cases.extend((seed..seed + rounds).map(|seed| (*line, *options, how, seed)));
        }
    }
    let results = pool::each(THREADS, &cases, |(line, options, how, seed)| {
        let dirty = journals::leave(line, options, *how, &mut Random::new(*seed))?;
        let differences = journals::differences(&dirty)?;
        let name = format!("{line} ; {options} ; {how:?}");
        verdict(&name, &dirty.image, &differences, |feature| dirty.facts.has(feature))
    });
    let lines: Vec<String> = cases.iter().map(|case| format!("{case:?}")).collect();
    judge(seed, &lines, results);
}

/// Returns an error text for unexpected differences.
fn verdict(
    line: &str,
    image: &Image,
    differences: &[String],
    has: impl FnMut(&str) -> bool,
) -> Option<String> {
    match (differences, table::not_yet(line, has)) {
        ([], None) => None,
        ([], Some((key, _))) => Some(format!("is read by now: delete {key:?} from NOT_YET")),
        (all, None) => Some(format!("{} {}", format_differences(all), made::keep(image))),
        (all, Some((key, why))) => {
            println!("not yet ({key}: {why}): {line}: {}", format_differences(all));
            None
        }
    }
}

/// Fails with all errors, if there are any.
fn judge(seed: u64, lines: &[String], results: Vec<Result<Option<String>, String>>) {
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
    let first: Vec<&str> = differences.iter().take(TOLD).map(String::as_str).collect();
    format!("{} differences\n  {}\n ", differences.len(), first.join("\n  "))
}
