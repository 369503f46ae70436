//! Runs the same cases on both mounts, in step, and compares what each showed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::calls::Acts;
use crate::case::{self, Case};
use crate::look::{self, Before, Fields};
use crate::observer::Observer;
use crate::sys;
use crate::verdict::{Difference, Verdict};
use crate::volumes::Pair;

/// Cases that are made together, wait together for the clock, and are run one by one.
const BATCH: usize = 200;

/// One of the two mounts.
struct Side {
    at: PathBuf,
    observer: Observer,
}

/// A case on one side, made and not yet run.
struct Ready {
    case: Case,
    id: usize,
    dir: PathBuf,
    before: Before,
}

/// Runs all cases on both mounts of `pair`.
pub fn run(pair: &Pair, cases: &[Case], verdict: &mut Verdict) {
    let mut sides =
        [&pair.ours, &pair.theirs].map(|at| Side { at: at.clone(), observer: Observer::start() });
    let (watched, cold): (Vec<Case>, Vec<Case>) = cases.iter().partition(|case| case.watched);
    let mut first = 0;
    for (cases, is_cold) in [(watched, false), (cold, true)] {
        for batch in cases.chunks(BATCH) {
            let mut made = both(&mut sides, |side| make(side, batch, first)).map(Some);
            // So that a time of now is later than what was made.
            std::thread::sleep(Duration::from_millis(30));
            if is_cold {
                both(&mut sides, |side| sync(&side.at));
                std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
            }
            let [ours, theirs] = {
                let [left, right] = &mut sides;
                let [for_ours, for_theirs] = made.each_mut().map(|made| made.take().unwrap());
                std::thread::scope(|scope| {
                    let ours = scope.spawn(|| run_side(left, for_ours));
                    let theirs = run_in_thread(|| run_side(right, for_theirs));
                    [ours.join().unwrap(), theirs]
                })
            };
            for ((case, ours), theirs) in batch.iter().zip(&ours).zip(&theirs) {
                verdict.compare(case, ours, theirs);
            }
            first += batch.len();
        }
    }
}

fn run_in_thread<T: Send>(deed: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(deed).join().unwrap())
}

/// Does the same on both sides at once.
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
    // It may tell of a write-back that failed, which is a case's own answer.
    let _ = sys::sync(libc::SYS_syncfs, &top);
}

fn make(side: &mut Side, cases: &[Case], first: usize) -> Vec<Ready> {
    sys::own_umask(0);
    let mut ready = vec![];
    for (i, case) in cases.iter().enumerate() {
        let id = first + i;
        let dir = side.at.join(format!("{id}"));
        case::make(&dir, case.kind, case.state);
        if case.watched {
            side.observer.watch(id, &dir.join("t"));
        }
        case::finish(&dir, case.kind, case.state);
        let before = Before::of(&look::walk(&dir));
        ready.push(Ready { case: *case, id, dir, before });
    }
    ready
}

fn run_side(side: &mut Side, ready: Vec<Ready>) -> Vec<Fields> {
    sys::own_umask(0o022);
    ready.into_iter().map(|one| run_one(side, one)).collect()
}

/// The call, and then every look at what it left: attributes before contents, since reading
/// changes times.
fn run_one(side: &mut Side, one: Ready) -> Fields {
    let Ready { case, id, dir, before } = one;
    let mut acts = Acts::new(&dir, &side.at, case.who);
    acts.unlinked = case.state.unlinked;
    let start = look::now();
    (case.call.run)(&mut acts);
    let mut fields = std::mem::take(&mut acts.answers);
    let seen = look::walk(&dir);
    fields.extend(before.relate("", seen.clone(), start));
    fields.extend(before.relate("", acts.look_at_held(), start));
    if case.watched {
        let view = side.observer.look(id);
        fields.extend(before.relate("observer: ", view.seen, start));
        fields.extend(view.contents.into_iter().map(|(k, v)| (format!("observer: {k}"), v)));
        side.observer.forget(id);
    }
    fields.extend(look::contents(&dir, &seen));
    if let Ok(found) = sys::lstat(&dir.join("t")) {
        let after = before.relate("after reading: ", vec![look::of("t", &found)], start);
        fields.extend(after.into_iter().filter(|(key, _)| key.contains("time")));
    }
    fields
}

/// The fields in which two sides differ.
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
