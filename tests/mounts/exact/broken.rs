//! Test of the comparison itself: each injected fault must be detected.
//!
//! The program under test can inject the faults of [`InjectedFault`]; a release build cannot. For
//! each fault, some cases or a scenario must show a difference, and the same cases must show none
//! without the fault.

use draconis_types::injected_fault::InjectedFault;

use crate::exact::case::TestCase;
use crate::exact::run::{self, VolumeCondition};
use crate::exact::scenarios;
use crate::exact::verdict::ComparisonVerdict;
use crate::exact::volumes::{self, MountPair};
use crate::exact::{all_cases, cases_matching, new_verdict};

/// Test that detects a fault.
enum DetectingTest {
    /// Cases whose names contain all these words.
    Cases(&'static [&'static str]),
    Scenario(&'static str),
}

/// Maximum number of cases per fault.
const MAX_CASES_PER_FAULT: usize = 8;
/// Maximum runs of a scenario until it detects the fault.
const MAX_SCENARIO_RUNS: usize = 20;

fn detecting_test(omission: InjectedFault) -> DetectingTest {
    use DetectingTest::{Cases, Scenario};
    match omission {
        InjectedFault::StalePages => Scenario("asynchronous direct writes beside a reader"),
        InjectedFault::Handles => Scenario("handles of files that are not cached"),
        InjectedFault::StaleCtimeAfterFlags => {
            Cases(&["SETFLAGS nodump", "Regular", "Root", "plain", "watched"])
        }
        InjectedFault::Privileges => Cases(&["fallocate punch", "Regular", "Other", "setuid |"]),
        InjectedFault::OpenFlags => {
            Cases(&["open write", "Regular", "Root", "immutable | watched"])
        }
        InjectedFault::AccessTime => Cases(&["open read", "Regular", "Root", "plain", "watched"]),
        InjectedFault::NoAtime => Cases(&["pread noatime |", "Regular", "Root", "not cached"]),
        InjectedFault::ListSetgid => {
            Cases(&["setxattr same access list", "Regular", "Owner", "setgid of a foreign group"])
        }
        InjectedFault::Whiteout => Cases(&["rename t to n whiteout", "Regular", "Root"]),
        InjectedFault::Umask => Cases(&["mkdir n, umask", "Regular", "Root", "plain"]),
        InjectedFault::DirectoryTimes => Cases(&["mknod file n", "Regular", "Root", "plain"]),
        InjectedFault::ChangeTime => Cases(&["fchmod", "Regular", "Root", "plain", "watched"]),
        InjectedFault::LinkTime => Cases(&["link t to n |", "Regular", "Root", "plain"]),
        InjectedFault::AppendOnly => Cases(&["futimens one |", "Regular", "Root", "append-only"]),
        InjectedFault::GroupOfParent => {
            Cases(&["mknod file n", "Regular", "Owner", "setgid parent"])
        }
        InjectedFault::NewXattr => Cases(&["setxattr user again create", "Regular", "Root"]),
        InjectedFault::ClampedTimes => Cases(&["utimens far", "Regular", "Root", "plain"]),
        InjectedFault::LinkTmpfile => {
            Cases(&["open write tmpfile |", "Directory", "Root", "plain"])
        }
        other => unreachable!("{other:?} is met by deaths of workers"),
    }
}

/// Runs the test of a fault, with the fault injected if `is_made`.
fn run_with_fault(all: &[TestCase], omission: InjectedFault, is_made: bool) -> ComparisonVerdict {
    let leaves_out = is_made.then(|| format!("{omission:?}"));
    let pair = MountPair::with_injected_fault("ext2", "4096", "64M", "rw,suid,dev", leaves_out);
    let mut verdict = new_verdict();
    match detecting_test(omission) {
        DetectingTest::Scenario(name) => {
            // On a busy machine it may take several runs until the threads meet.
            for _ in 0..if is_made { MAX_SCENARIO_RUNS } else { 1 } {
                scenarios::run_scenarios(&pair, &mut verdict, |it| it == name);
                if verdict.count_unknown() > 0 {
                    break;
                }
            }
        }
        DetectingTest::Cases(words) => {
            let mut cases = cases_matching(all, words);
            assert!(!cases.is_empty(), "{omission:?}: no case has the words {words:?}");
            cases.truncate(MAX_CASES_PER_FAULT);
            run::run_cases(pair, VolumeCondition::Normal, &cases, &mut verdict);
        }
    }
    verdict
}

#[test]
#[ignore = "long: a minute: each injected fault is a run"]
fn injected_faults_are_detected() {
    if !crate::common::has_fault_hooks("breaking a mount") {
        return;
    }
    if !volumes::can_compare_mounts("breaking a mount and comparing it with the kernel's driver") {
        return;
    }
    let all = all_cases();
    let mut failed = vec![];
    for omission in InjectedFault::ALL {
        if run_with_fault(&all, omission, false).count_unknown() > 0 {
            failed.push(format!("{omission:?} is caught though nothing is left out"));
        }
        let verdict = run_with_fault(&all, omission, true);
        eprintln!("{omission:?}: {} kinds of differences", verdict.count_unknown());
        if verdict.count_unknown() == 0 {
            failed.push(format!("{omission:?} is not caught"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
