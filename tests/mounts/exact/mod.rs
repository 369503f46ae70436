//! Compares every call on a mount with the kernel's own driver.
//!
//! The same call is made on two copies of an image, mounted by us and by the kernel. Everything
//! that a process can see is compared: results, `statx` of every file nearby, listings, attributes,
//! contents by each kind of reading, and what a second process sees that had the file open and
//! cached. At the end both volumes are unmounted and compared.
//!
//! ```text
//! calls × kinds × who × states ──▶ cases ──▶ run on both ──▶ fields ──▶ verdict
//!                                                                   limits ┘ └ open
//! ```
//!
//! `DRACONIS_EXACT=all` runs all combinations instead of a fixed selection of some thousands.
//! `DRACONIS_EXACT=<words>` runs those whose names contain all the comma-separated words.
//! `DRACONIS_EXACT_REPORT=<file>` writes all differences to a file.

mod broken;
mod calls;
mod case;
mod choices;
mod ext4;
mod limits;
mod look;
mod observer;
mod open;
mod run;
mod scenarios;
mod sys;
mod verdict;
mod volumes;
mod walks;
mod who;

use std::collections::BTreeSet;

use calls::{CallGroup, SystemCallTest};
use case::{TARGET_STATES, TargetKind, TargetState, TestCase};
use run::VolumeCondition;
use verdict::{ComparisonVerdict, KnownDifference};
use volumes::MountPair;
use who::TestUser;

/// Returns true for useful combinations: a missing target has no state, and states are tried on
/// files and directories.
fn is_useful_combination(call: &SystemCallTest, kind: TargetKind, state: &TargetState) -> bool {
    let plain = state.name == "plain";
    if call.group == CallGroup::Run {
        return kind == TargetKind::Program || (plain && kind == TargetKind::Directory);
    }
    if kind == TargetKind::Program || (state.unlinked && !call.given) {
        return false;
    }
    // Opening a device does not access the volume.
    if call.group == CallGroup::Descriptor
        && matches!(kind, TargetKind::Block | TargetKind::Character)
    {
        return false;
    }
    let stateful =
        matches!(kind, TargetKind::Regular | TargetKind::EmptyDirectory | TargetKind::Directory);
    plain || (stateful && !(state.unlinked && kind.is_directory()))
}

/// Returns all combinations, except those that need a state of the whole volume.
fn all_cases() -> Vec<TestCase> {
    let mut cases = vec![];
    let kinds = TargetKind::ALL.iter().chain([&TargetKind::Program]);
    for call in calls::all_calls() {
        for &kind in kinds.clone() {
            for state in
                TARGET_STATES.iter().filter(|state| is_useful_combination(call, kind, state))
            {
                for who in TestUser::ALL {
                    for watched in [false, true] {
                        cases.push(TestCase { call, kind, who, state, watched, volume: "" });
                    }
                }
            }
        }
    }
    cases
}

/// Returns the cases whose names contain all words.
fn cases_matching(cases: &[TestCase], words: &[&str]) -> Vec<TestCase> {
    let has = |case: &&TestCase| words.iter().all(|word| case.to_string().contains(word));
    cases.iter().filter(has).copied().collect()
}

/// Returns a fixed selection of the combinations, or the requested ones.
fn select_cases(cases: Vec<TestCase>, number: usize) -> Vec<TestCase> {
    let asked = std::env::var("DRACONIS_EXACT").unwrap_or_default();
    if asked == "all" {
        return cases;
    }
    if !asked.is_empty() {
        let words: Vec<&str> = asked.split(',').map(str::trim).collect();
        return cases_matching(&cases, &words);
    }
    let mut numbered: Vec<(u64, TestCase)> = cases
        .into_iter()
        .enumerate()
        .map(|(i, case)| ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29), case))
        .collect();
    // Cases named in a table of known differences are always selected.
    let rows = DIFFERENCE_TABLES.iter().flat_map(|(_, rows)| rows.iter());
    let shown: BTreeSet<&str> = rows.map(|row| row.shown_by).collect();
    for (place, case) in &mut numbered {
        if shown.contains(case.to_string().as_str()) {
            *place = 0;
        }
    }
    numbered.sort_by_key(|one| one.0);
    numbered.truncate(number);
    numbered.into_iter().map(|one| one.1).collect()
}

/// Prints the differences; fails on a difference that no table explains, and on a table row that
/// no case shows.
fn assert_no_unknown_differences(verdict: &ComparisonVerdict, is_whole: bool) {
    eprintln!(
        "{} cases, {} kinds of unexplained differences",
        verdict.compared,
        verdict.count_unknown()
    );
    if let Some(path) = std::env::var_os("DRACONIS_EXACT_REPORT") {
        std::fs::write(path, verdict.format_report() + &verdict.examples()).unwrap();
    }
    let stale = if is_whole { verdict.unused_rows() } else { vec![] };
    assert!(
        verdict.count_unknown() == 0 && stale.is_empty(),
        "{}{}",
        verdict.format_report(),
        stale.join("\n")
    );
}

const DIFFERENCE_TABLES: &[(&str, &[KnownDifference])] = &[
    ("limits.rs", limits::FUSE_LIMIT_DIFFERENCES),
    ("choices.rs", choices::INTENDED_DIFFERENCES),
    ("open.rs", open::OPEN_BUG_DIFFERENCES),
];

fn new_verdict() -> ComparisonVerdict {
    ComparisonVerdict::new(DIFFERENCE_TABLES)
}

#[test]
#[ignore = "long: minutes: every call, user and kind of file"]
fn ext2_calls_match_kernel() {
    if !volumes::can_compare_mounts("comparing calls with the kernel's driver") {
        return;
    }
    let all = all_cases();
    let is_whole = std::env::var_os("DRACONIS_EXACT").is_none();
    eprintln!("{} combinations", all.len());
    let mut verdict = new_verdict();
    let mut pairs = vec![];
    // As many cases as fit a volume.
    for cases in select_cases(all.clone(), 3000).chunks(30_000) {
        let pair = MountPair::new("ext2", "4096", "2G", "rw,suid,dev");
        pairs.push(run::run_cases(pair, VolumeCondition::Normal, cases, &mut verdict));
    }
    let pair = MountPair::new("ext2", "4096", "64M", "rw,suid,dev");
    scenarios::run_scenarios(&pair, &mut verdict, scenarios::is_selected);
    pairs.push((pair, scenarios::scenario_directories().collect()));
    let plain = all.iter().copied().filter(|case| case.state.name == "open to all");
    let of = |volume: &'static str| plain.clone().map(|case| TestCase { volume, ..case }).collect();
    let full = MountPair::new("ext2", "1024", "64M", "rw,suid,dev");
    pairs.push(run::run_cases(
        full,
        VolumeCondition::Full,
        &select_cases(of("full"), 400),
        &mut verdict,
    ));
    for volume in ["strictatime", "noatime"] {
        // Calls that only read, but change access times.
        let reads = |case: &&TestCase| {
            let name = &case.call.name;
            case.state.name == "plain"
                && ["pread", "names", "open read", "from it", "readlink", "lseek"]
                    .iter()
                    .any(|word| name.contains(word))
        };
        let cases: Vec<TestCase> =
            all.iter().filter(reads).map(|case| TestCase { volume, ..*case }).collect();
        let options = format!("rw,suid,dev,{volume}");
        let pair = MountPair::new("ext2", "4096", "256M", &options);
        pairs.push(run::run_cases(
            pair,
            VolumeCondition::Normal,
            &select_cases(cases, 200),
            &mut verdict,
        ));
    }
    let read = MountPair::new("ext2", "4096", "256M", "rw,suid,dev");
    pairs.push(run::run_cases(
        read,
        VolumeCondition::ReadOnly,
        &select_cases(of("read-only"), 400),
        &mut verdict,
    ));
    assert_no_unknown_differences(&verdict, is_whole);
    for (pair, different) in pairs {
        pair.check_and_compare(&different);
    }
}

#[test]
#[ignore = "long: a minute: every call, user and kind of file"]
fn ext4_calls_match_kernel() {
    if !volumes::can_compare_mounts("comparing calls on ext4 with the kernel's driver") {
        return;
    }
    let all = all_cases();
    let asked = std::env::var_os("DRACONIS_EXACT").is_some();
    let mut verdict = ComparisonVerdict::new(
        &[DIFFERENCE_TABLES, &[(ext4::TABLE_NAME, ext4::EXT4_DIFFERENCES)]].concat(),
    );
    let (many, few) = if asked { (usize::MAX, usize::MAX) } else { (800, 150) };
    let mut cases = select_cases(all.clone(), many);
    cases.extend(all.iter().filter(|case| ext4::is_example_case(&case.to_string())));
    let pair = MountPair::new("ext4", "4096", "1G", "rw,suid,dev");
    let mut pairs = vec![run::run_cases(pair, VolumeCondition::Normal, &cases, &mut verdict)];
    let plain = all.iter().filter(|case| case.state.name == "open to all");
    let full: Vec<TestCase> = plain.map(|case| TestCase { volume: "full", ..*case }).collect();
    let pair = MountPair::new("ext4", "1024", "64M", "rw,suid,dev");
    pairs.push(run::run_cases(pair, VolumeCondition::Full, &select_cases(full, few), &mut verdict));
    assert_no_unknown_differences(&verdict, false);
    let stale: Vec<String> =
        verdict.unused_rows().into_iter().filter(|row| row.starts_with(ext4::TABLE_NAME)).collect();
    assert!(asked || stale.is_empty(), "{}", stale.join("\n"));
    for (pair, different) in pairs {
        pair.check_and_compare(&different);
    }
}
