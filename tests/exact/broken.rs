//! Test of the comparison itself: each injected fault must be detected.
//!
//! The program under test can inject the faults of [`InjectedFault`]; a release build cannot. For
//! each fault, some cases or a scenario must show a difference, and the same cases must show none
//! without the fault.

use draconis_exchange::injected_fault::InjectedFault;

use crate::case::Case;
use crate::run::{self, Condition};
use crate::scenarios;
use crate::verdict::Verdict;
use crate::volumes::{self, Pair};
use crate::{chosen_by, combinations, verdict};

/// Test that detects a fault.
enum By {
    /// Cases whose names contain all these words.
    Cases(&'static [&'static str]),
    Scenario(&'static str),
}

/// Maximum number of cases per fault.
const CASES: usize = 8;
/// Maximum runs of a scenario until it detects the fault.
const ATTEMPTS: usize = 20;

fn met_by(omission: InjectedFault) -> By {
    use By::{Cases, Scenario};
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
fn judged(all: &[Case], omission: InjectedFault, is_made: bool) -> Verdict {
    let leaves_out = is_made.then(|| format!("{omission:?}"));
    let pair = Pair::broken("ext2", "4096", "64M", "rw,suid,dev", leaves_out);
    let mut verdict = verdict();
    match met_by(omission) {
        By::Scenario(name) => {
            // On a busy machine it may take several runs until the threads meet.
            for _ in 0..if is_made { ATTEMPTS } else { 1 } {
                scenarios::run(&pair, &mut verdict, |it| it == name);
                if verdict.unknown() > 0 {
                    break;
                }
            }
        }
        By::Cases(words) => {
            let mut cases = chosen_by(all, words);
            assert!(!cases.is_empty(), "{omission:?}: no case has the words {words:?}");
            cases.truncate(CASES);
            run::run(pair, Condition::Normal, &cases, &mut verdict);
        }
    }
    verdict
}

#[test]
fn what_is_left_out_is_missed() {
    if !volumes::can("breaking a mount and comparing it with the kernel's driver") {
        return;
    }
    let all = combinations();
    let mut failed = vec![];
    for omission in InjectedFault::ALL {
        if judged(&all, omission, false).unknown() > 0 {
            failed.push(format!("{omission:?} is caught though nothing is left out"));
        }
        let verdict = judged(&all, omission, true);
        eprintln!("{omission:?}: {} kinds of differences", verdict.unknown());
        if verdict.unknown() == 0 {
            failed.push(format!("{omission:?} is not caught"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
