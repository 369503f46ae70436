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

#[path = "../common/mod.rs"]
mod common;

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

use calls::{Call, Group};
use case::{Case, Kind, STATES, State};
use run::Condition;
use verdict::{Known, Verdict};
use volumes::Pair;
use who::Who;

/// Returns true for useful combinations: a missing target has no state, and states are tried on
/// files and directories.
fn applies(call: &Call, kind: Kind, state: &State) -> bool {
    let plain = state.name == "plain";
    if call.group == Group::Run {
        return kind == Kind::Program || (plain && kind == Kind::Directory);
    }
    if kind == Kind::Program || (state.unlinked && !call.given) {
        return false;
    }
    // Opening a device does not access the volume.
    if call.group == Group::Descriptor && matches!(kind, Kind::Block | Kind::Character) {
        return false;
    }
    let stateful = matches!(kind, Kind::Regular | Kind::EmptyDirectory | Kind::Directory);
    plain || (stateful && !(state.unlinked && kind.is_directory()))
}

/// Returns all combinations, except those that need a state of the whole volume.
fn combinations() -> Vec<Case> {
    let mut cases = vec![];
    let kinds = Kind::ALL.iter().chain([&Kind::Program]);
    for call in calls::all() {
        for &kind in kinds.clone() {
            for state in STATES.iter().filter(|state| applies(call, kind, state)) {
                for who in Who::ALL {
                    for watched in [false, true] {
                        cases.push(Case { call, kind, who, state, watched, volume: "" });
                    }
                }
            }
        }
    }
    cases
}

/// Returns the cases whose names contain all words.
fn chosen_by(cases: &[Case], words: &[&str]) -> Vec<Case> {
    let has = |case: &&Case| words.iter().all(|word| case.to_string().contains(word));
    cases.iter().filter(has).copied().collect()
}

/// Returns a fixed selection of the combinations, or the requested ones.
fn chosen(cases: Vec<Case>, number: usize) -> Vec<Case> {
    let asked = std::env::var("DRACONIS_EXACT").unwrap_or_default();
    if asked == "all" {
        return cases;
    }
    if !asked.is_empty() {
        let words: Vec<&str> = asked.split(',').map(str::trim).collect();
        return chosen_by(&cases, &words);
    }
    let mut numbered: Vec<(u64, Case)> = cases
        .into_iter()
        .enumerate()
        .map(|(i, case)| ((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29), case))
        .collect();
    // Cases named in a table of known differences are always selected.
    let rows = TABLES.iter().flat_map(|(_, rows)| rows.iter());
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
fn judge(verdict: &Verdict, is_whole: bool) {
    eprintln!("{} cases, {} kinds of unexplained differences", verdict.compared, verdict.unknown());
    if let Some(path) = std::env::var_os("DRACONIS_EXACT_REPORT") {
        std::fs::write(path, verdict.report() + &verdict.examples()).unwrap();
    }
    let stale = if is_whole { verdict.stale() } else { vec![] };
    assert!(verdict.unknown() == 0 && stale.is_empty(), "{}{}", verdict.report(), stale.join("\n"));
}

const TABLES: &[(&str, &[Known])] =
    &[("limits.rs", limits::LIMITS), ("choices.rs", choices::CHOICES), ("open.rs", open::OPEN)];

fn verdict() -> Verdict {
    Verdict::new(TABLES)
}

#[test]
fn every_call_is_answered_alike() {
    if !volumes::can("comparing calls with the kernel's driver") {
        return;
    }
    let all = combinations();
    let is_whole = std::env::var_os("DRACONIS_EXACT").is_none();
    eprintln!("{} combinations", all.len());
    let mut verdict = verdict();
    let mut pairs = vec![];
    // As many cases as fit a volume.
    for cases in chosen(all.clone(), 3000).chunks(30_000) {
        let pair = Pair::new("ext2", "4096", "2G", "rw,suid,dev");
        pairs.push(run::run(pair, Condition::Normal, cases, &mut verdict));
    }
    let pair = Pair::new("ext2", "4096", "64M", "rw,suid,dev");
    scenarios::run(&pair, &mut verdict, scenarios::is_asked_for);
    pairs.push((pair, scenarios::directories().collect()));
    let plain = all.iter().copied().filter(|case| case.state.name == "open to all");
    let of = |volume: &'static str| plain.clone().map(|case| Case { volume, ..case }).collect();
    let full = Pair::new("ext2", "1024", "64M", "rw,suid,dev");
    pairs.push(run::run(full, Condition::Full, &chosen(of("full"), 400), &mut verdict));
    for volume in ["strictatime", "noatime"] {
        // Calls that only read, but change access times.
        let reads = |case: &&Case| {
            let name = &case.call.name;
            case.state.name == "plain"
                && ["pread", "names", "open read", "from it", "readlink", "lseek"]
                    .iter()
                    .any(|word| name.contains(word))
        };
        let cases: Vec<Case> =
            all.iter().filter(reads).map(|case| Case { volume, ..*case }).collect();
        let options = format!("rw,suid,dev,{volume}");
        let pair = Pair::new("ext2", "4096", "256M", &options);
        pairs.push(run::run(pair, Condition::Normal, &chosen(cases, 200), &mut verdict));
    }
    let read = Pair::new("ext2", "4096", "256M", "rw,suid,dev");
    pairs.push(run::run(read, Condition::ReadOnly, &chosen(of("read-only"), 400), &mut verdict));
    judge(&verdict, is_whole);
    for (pair, different) in pairs {
        pair.judge(&different);
    }
}

#[test]
fn calls_on_ext4_are_answered_alike() {
    if !volumes::can("comparing calls on ext4 with the kernel's driver") {
        return;
    }
    let all = combinations();
    let asked = std::env::var_os("DRACONIS_EXACT").is_some();
    let mut verdict = Verdict::new(&[TABLES, &[(ext4::TABLE, ext4::ROWS)]].concat());
    let (many, few) = if asked { (usize::MAX, usize::MAX) } else { (800, 150) };
    let mut cases = chosen(all.clone(), many);
    cases.extend(all.iter().filter(|case| ext4::shows(&case.to_string())));
    let pair = Pair::new("ext4", "4096", "1G", "rw,suid,dev");
    let mut pairs = vec![run::run(pair, Condition::Normal, &cases, &mut verdict)];
    let plain = all.iter().filter(|case| case.state.name == "open to all");
    let full: Vec<Case> = plain.map(|case| Case { volume: "full", ..*case }).collect();
    let pair = Pair::new("ext4", "1024", "64M", "rw,suid,dev");
    pairs.push(run::run(pair, Condition::Full, &chosen(full, few), &mut verdict));
    judge(&verdict, false);
    let stale: Vec<String> =
        verdict.stale().into_iter().filter(|row| row.starts_with(ext4::TABLE)).collect();
    assert!(asked || stale.is_empty(), "{}", stale.join("\n"));
    for (pair, different) in pairs {
        pair.judge(&different);
    }
}
