//! Runs the same cases on both mounts, in step, and compares the results.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::exact::calls::CallContext;
use crate::exact::case::{self, TestCase};
use crate::exact::look::{self, EarlierState, ResultFields};
use crate::exact::observer::ObserverProcess;
use crate::exact::sys;
use crate::exact::verdict::{ComparisonVerdict, FieldDifference};
use crate::exact::volumes::MountPair;

/// Cases that are created together, share a wait for the clock, and run one by one.
const CASES_PER_BATCH: usize = 200;

/// One of the two mounts.
struct MountSide {
    at: PathBuf,
    observer: ObserverProcess,
}

/// A case on one side, prepared but not yet run.
struct PreparedCase {
    case: TestCase,
    id: usize,
    dir: PathBuf,
    before: EarlierState,
}

pub type RunResult = (MountPair, BTreeSet<String>);

/// State of the whole volume during the calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum VolumeCondition {
    Normal,
    /// No block is free.
    Full,
    /// Remounted read-only, once the files are created.
    ReadOnly,
}

/// Runs all cases on both mounts of `pair`.
///
/// Returns the pair, and the directories in which the two are known to differ.
pub fn run_cases(
    mut pair: MountPair,
    condition: VolumeCondition,
    cases: &[TestCase],
    verdict: &mut ComparisonVerdict,
) -> RunResult {
    let mut sides = [&pair.ours, &pair.theirs]
        .map(|at| MountSide { at: at.clone(), observer: ObserverProcess::start() });
    let (watched, cold): (Vec<TestCase>, Vec<TestCase>) =
        cases.iter().partition(|case| case.watched);
    let mut first = 0;
    let mut different = BTreeSet::from(["filler".into()]);
    for (cases, is_cold) in [(watched, false), (cold, true)] {
        // The volume is remounted once, so all cases form a single batch.
        let size = if condition == VolumeCondition::ReadOnly {
            cases.len().max(1)
        } else {
            CASES_PER_BATCH
        };
        for batch in cases.chunks(size) {
            let watch_last = condition == VolumeCondition::ReadOnly;
            let mut made =
                on_both_sides(&mut sides, |side| prepare_cases(side, batch, first, !watch_last));
            if condition == VolumeCondition::ReadOnly {
                pair = pair.remount("ro,suid,dev");
            }
            if watch_last {
                let ids = first..first + batch.len();
                on_both_sides(&mut sides, |side| watch_files(side, ids.clone(), !is_cold));
            }
            for made in &mut made {
                made.iter_mut().for_each(|one| {
                    one.before = EarlierState::from_observed(&look::stat_known_names(&one.dir))
                });
            }
            // The time of the calls must be later than that of the preparation.
            draconis_testkit::wait::pause(
                "the time of the calls is later than that of the preparation",
                Duration::from_millis(30),
            );
            if is_cold {
                on_both_sides(&mut sides, |side| sync_file_system(&side.at));
                std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
            }
            let [ours, theirs] = {
                let [left, right] = &mut sides;
                let [for_ours, for_theirs] = made;
                std::thread::scope(|scope| {
                    let ours = scope.spawn(|| run_side(left, condition, for_ours));
                    let theirs = scope.spawn(|| run_side(right, condition, for_theirs));
                    [ours.join().unwrap(), theirs.join().unwrap()]
                })
            };
            for (i, case) in batch.iter().enumerate() {
                if !verdict.compare_results(case, &ours[i], &theirs[i]) {
                    different.insert((first + i).to_string());
                }
            }
            first += batch.len();
            if condition == VolumeCondition::ReadOnly {
                pair = pair.remount("rw,suid,dev");
            }
        }
    }
    (pair, different)
}

fn watch_files(side: &mut MountSide, ids: std::ops::Range<usize>, watched: bool) {
    for id in ids.filter(|_| watched) {
        side.observer.watch_file(id, &side.at.join(format!("{id}/t")));
    }
}

/// Allocates all free blocks.
fn fill_volume(top: &Path) {
    let filler =
        sys::open(&top.join("filler"), libc::O_CREAT | libc::O_WRONLY | libc::O_APPEND, 0o600);
    let Ok(filler) = filler else { return };
    let block = vec![b'f'; 1 << 16];
    for len in [1 << 16, 4096, 1024] {
        while sys::write(&filler, &block[..len]).is_ok() {}
    }
}

/// Does the same on both sides in parallel.
fn on_both_sides<T: Send>(
    sides: &mut [MountSide; 2],
    deed: impl Fn(&mut MountSide) -> T + Sync,
) -> [T; 2] {
    let [ours, theirs] = sides;
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| deed(ours));
        let theirs = scope.spawn(|| deed(theirs));
        [ours.join().unwrap(), theirs.join().unwrap()]
    })
}

fn sync_file_system(top: &Path) {
    let top = sys::open(top, libc::O_RDONLY, 0).unwrap();
    // May report a failed write-back, which is a result of the case itself.
    let _ = sys::sync_by_number(libc::SYS_syncfs, &top);
}

fn prepare_cases(
    side: &mut MountSide,
    cases: &[TestCase],
    first: usize,
    watch: bool,
) -> Vec<PreparedCase> {
    sys::set_thread_umask(0);
    // Unlinking frees space for the next call, also over FUSE.
    let _ = sys::unlink(&side.at.join("filler"), 0);
    let mut ready = vec![];
    for (i, case) in cases.iter().enumerate() {
        let id = first + i;
        let dir = side.at.join(format!("{id}"));
        case::create_case_dir(&dir, case.kind, case.state);
        if case.watched && watch {
            side.observer.watch_file(id, &dir.join("t"));
        }
        case::set_times_and_flags(&dir, case.kind, case.state);
        ready.push(PreparedCase { case: *case, id, dir, before: EarlierState::default() });
    }
    ready
}

fn run_side(
    side: &mut MountSide,
    condition: VolumeCondition,
    ready: Vec<PreparedCase>,
) -> Vec<ResultFields> {
    sys::set_thread_umask(0o022);
    let run = |one| {
        if condition == VolumeCondition::Full {
            fill_volume(&side.at);
        }
        run_one(side, one)
    };
    ready.into_iter().map(run).collect()
}

/// Makes the call and collects all properties: attributes before contents, because reading changes
/// times.
fn run_one(side: &mut MountSide, one: PreparedCase) -> ResultFields {
    let PreparedCase { case, id, dir, before } = one;
    let mut acts = CallContext::new(&dir, &side.at, case.who);
    acts.unlinked = case.state.unlinked;
    let start = look::current_time();
    (case.call.run)(&mut acts);
    let mut fields = std::mem::take(&mut acts.answers);
    fields.extend(before.relative_fields("", look::stat_known_names(&dir), start));
    fields.extend(before.relative_fields("", acts.stat_held_descriptors(), start));
    if case.watched {
        let view = side.observer.view_file(id);
        fields.extend(before.relative_fields("observer: ", view.seen, start));
        fields.extend(view.contents.into_iter().map(|(k, v)| (format!("observer: {k}"), v)));
        side.observer.forget_file(id);
    }
    let seen = look::walk_tree(&dir);
    fields.extend(look::content_fields(&dir, &seen));
    let walked = before.relative_fields("", seen, start);
    fields.extend(walked.into_iter().filter(|(key, _)| !key.contains("time")));
    if let Ok(found) = sys::lstat(&dir.join("t")) {
        let after =
            before.relative_fields("after reading: ", vec![look::from_statx("t", &found)], start);
        fields.extend(after.into_iter().filter(|(key, _)| key.contains("time")));
    }
    fields
}

/// Returns the fields that differ.
pub fn field_differences(ours: &ResultFields, theirs: &ResultFields) -> Vec<FieldDifference> {
    let tables: [BTreeMap<&str, &str>; 2] = [ours, theirs]
        .map(|fields| fields.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect());
    let keys: BTreeSet<&str> = tables.iter().flat_map(|table| table.keys().copied()).collect();
    let of = |side: usize, key| (*tables[side].get(key).unwrap_or(&"(nothing)")).to_string();
    let different = keys.into_iter().filter(|key| tables[0].get(key) != tables[1].get(key));
    different
        .map(|key| FieldDifference { field: key.into(), ours: of(0, key), theirs: of(1, key) })
        .collect()
}
