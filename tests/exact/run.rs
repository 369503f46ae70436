//! Runs the same cases on both mounts, in step, and compares the results.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::calls::CallContext;
use crate::case::{self, Case};
use crate::look::{self, Before, Fields};
use crate::observer::Observer;
use crate::sys;
use crate::verdict::{Difference, Verdict};
use crate::volumes::Pair;

/// Cases that are created together, share a wait for the clock, and run one by one.
const BATCH: usize = 200;

/// One of the two mounts.
struct Side {
    at: PathBuf,
    observer: Observer,
}

/// A case on one side, prepared but not yet run.
struct Ready {
    case: Case,
    id: usize,
    dir: PathBuf,
    before: Before,
}

pub type Ran = (Pair, BTreeSet<String>);

/// State of the whole volume during the calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Normal,
    /// No block is free.
    Full,
    /// Remounted read-only, once the files are created.
    ReadOnly,
}

/// Runs all cases on both mounts of `pair`.
///
/// Returns the pair, and the directories in which the two are known to differ.
pub fn run(mut pair: Pair, condition: Condition, cases: &[Case], verdict: &mut Verdict) -> Ran {
    let mut sides =
        [&pair.ours, &pair.theirs].map(|at| Side { at: at.clone(), observer: Observer::start() });
    let (watched, cold): (Vec<Case>, Vec<Case>) = cases.iter().partition(|case| case.watched);
    let mut first = 0;
    let mut different = BTreeSet::from(["filler".into()]);
    for (cases, is_cold) in [(watched, false), (cold, true)] {
        // The volume is remounted once, so all cases form a single batch.
        let size = if condition == Condition::ReadOnly { cases.len().max(1) } else { BATCH };
        for batch in cases.chunks(size) {
            let watch_last = condition == Condition::ReadOnly;
            let mut made = both(&mut sides, |side| make(side, batch, first, !watch_last));
            if condition == Condition::ReadOnly {
                pair = pair.again("ro,suid,dev");
            }
            if watch_last {
                let ids = first..first + batch.len();
                both(&mut sides, |side| watch(side, ids.clone(), !is_cold));
            }
            for made in &mut made {
                made.iter_mut()
                    .for_each(|one| one.before = Before::of(&look::stat_known_names(&one.dir)));
            }
            // The time of the calls must be later than that of the preparation.
            std::thread::sleep(Duration::from_millis(30));
            if is_cold {
                both(&mut sides, |side| sync(&side.at));
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
                if !verdict.compare(case, &ours[i], &theirs[i]) {
                    different.insert((first + i).to_string());
                }
            }
            first += batch.len();
            if condition == Condition::ReadOnly {
                pair = pair.again("rw,suid,dev");
            }
        }
    }
    (pair, different)
}

fn watch(side: &mut Side, ids: std::ops::Range<usize>, watched: bool) {
    for id in ids.filter(|_| watched) {
        side.observer.watch(id, &side.at.join(format!("{id}/t")));
    }
}

/// Allocates all free blocks.
fn fill(top: &Path) {
    let filler =
        sys::open(&top.join("filler"), libc::O_CREAT | libc::O_WRONLY | libc::O_APPEND, 0o600);
    let Ok(filler) = filler else { return };
    let block = vec![b'f'; 1 << 16];
    for len in [1 << 16, 4096, 1024] {
        while sys::write(&filler, &block[..len]).is_ok() {}
    }
}

/// Does the same on both sides in parallel.
fn both<T: Send>(sides: &mut [Side; 2], deed: impl Fn(&mut Side) -> T + Sync) -> [T; 2] {
    let [ours, theirs] = sides;
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| deed(ours));
        let theirs = scope.spawn(|| deed(theirs));
        [ours.join().unwrap(), theirs.join().unwrap()]
    })
}

fn sync(top: &Path) {
    let top = sys::open(top, libc::O_RDONLY, 0).unwrap();
    // May report a failed write-back, which is a result of the case itself.
    let _ = sys::sync(libc::SYS_syncfs, &top);
}

fn make(side: &mut Side, cases: &[Case], first: usize, watch: bool) -> Vec<Ready> {
    sys::own_umask(0);
    // Unlinking frees space for the next call, also over FUSE.
    let _ = sys::unlink(&side.at.join("filler"), 0);
    let mut ready = vec![];
    for (i, case) in cases.iter().enumerate() {
        let id = first + i;
        let dir = side.at.join(format!("{id}"));
        case::make(&dir, case.kind, case.state);
        if case.watched && watch {
            side.observer.watch(id, &dir.join("t"));
        }
        case::finish(&dir, case.kind, case.state);
        ready.push(Ready { case: *case, id, dir, before: Before::default() });
    }
    ready
}

fn run_side(side: &mut Side, condition: Condition, ready: Vec<Ready>) -> Vec<Fields> {
    sys::own_umask(0o022);
    let run = |one| {
        if condition == Condition::Full {
            fill(&side.at);
        }
        run_one(side, one)
    };
    ready.into_iter().map(run).collect()
}

/// Makes the call and collects all properties: attributes before contents, because reading changes
/// times.
fn run_one(side: &mut Side, one: Ready) -> Fields {
    let Ready { case, id, dir, before } = one;
    let mut acts = CallContext::new(&dir, &side.at, case.who);
    acts.unlinked = case.state.unlinked;
    let start = look::now();
    (case.call.run)(&mut acts);
    let mut fields = std::mem::take(&mut acts.answers);
    fields.extend(before.relate("", look::stat_known_names(&dir), start));
    fields.extend(before.relate("", acts.look_at_held(), start));
    if case.watched {
        let view = side.observer.look(id);
        fields.extend(before.relate("observer: ", view.seen, start));
        fields.extend(view.contents.into_iter().map(|(k, v)| (format!("observer: {k}"), v)));
        side.observer.forget(id);
    }
    let seen = look::walk(&dir);
    fields.extend(look::contents(&dir, &seen));
    let walked = before.relate("", seen, start);
    fields.extend(walked.into_iter().filter(|(key, _)| !key.contains("time")));
    if let Ok(found) = sys::lstat(&dir.join("t")) {
        let after = before.relate("after reading: ", vec![look::of("t", &found)], start);
        fields.extend(after.into_iter().filter(|(key, _)| key.contains("time")));
    }
    fields
}

/// Returns the fields that differ.
pub fn differences(ours: &Fields, theirs: &Fields) -> Vec<Difference> {
    let tables: [BTreeMap<&str, &str>; 2] = [ours, theirs]
        .map(|fields| fields.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect());
    let keys: BTreeSet<&str> = tables.iter().flat_map(|table| table.keys().copied()).collect();
    let of = |side: usize, key| (*tables[side].get(key).unwrap_or(&"(nothing)")).to_string();
    let different = keys.into_iter().filter(|key| tables[0].get(key) != tables[1].get(key));
    different
        .map(|key| Difference { field: key.into(), ours: of(0, key), theirs: of(1, key) })
        .collect()
}
