//! Checks of a store after a power cut.

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use crate::{CrashOptions, CrashState, CrashStates, Event, RecordDisk};
use draconis_device::Disk;

use super::stores::{SMALL_CACHE_OPTIONS, key_from_number};
use super::{Contents, History};
use draconis_objects::{Error, Group, LifetimeHint, OpenOptions, Store};

/// Description of a broken guarantee.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

impl Violation {
    pub(super) fn from_panic(doing: &str, panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|it| (*it).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Self(format!("{doing} panicked: {text}"))
    }
}

/// Frequencies of checks, each once in so many states; 0 for never. Every state is opened and read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckFrequencies {
    /// Change it, wait, reopen it.
    pub second_life: u64,
    /// Cut the power again while it is opened and changed.
    pub second_cut: u64,
    /// Delete everything: all space must be free then.
    pub emptied: u64,
    /// Open it read-only.
    pub read_only: u64,
}

impl CheckFrequencies {
    /// Some checks on some states.
    pub const SAMPLED: Self = Self { second_life: 4, second_cut: 64, emptied: 32, read_only: 16 };
    /// All checks on every state.
    pub const ALL: Self = Self { second_life: 1, second_cut: 1, emptied: 1, read_only: 1 };
}

/// Judge of the states of one run.
#[derive(Debug)]
pub struct Judge<'a> {
    history: &'a History,
    seed: u64,
}

fn violation_while(doing: &'static str) -> impl Fn(Error) -> Violation {
    move |error| Violation(format!("{doing}: {error}"))
}

impl<'a> Judge<'a> {
    /// Creates a judge for a run with this history.
    pub fn new(history: &'a History, seed: u64) -> Self {
        Self { history, seed }
    }

    /// Does the checks of `effort` on state `number`. Returns the number of judged states of its
    /// recovery.
    ///
    /// # Errors
    /// The first violation.
    pub fn judge(
        &mut self,
        crash: &CrashState,
        number: u64,
        effort: CheckFrequencies,
    ) -> Result<u64, Violation> {
        let judged = AssertUnwindSafe(|| self.judge_state(crash, number, effort));
        std::panic::catch_unwind(judged)
            .unwrap_or_else(|panic| Err(Violation::from_panic("judging", &*panic)))
    }

    fn judge_state(
        &self,
        crash: &CrashState,
        number: u64,
        effort: CheckFrequencies,
    ) -> Result<u64, Violation> {
        let is_due = |every: u64| every > 0 && number.is_multiple_of(every);
        let waited = crash.marks().last().map_or(0, |mark| *mark as usize);
        if is_due(effort.read_only) {
            let options = OpenOptions { read_only: true, ..SMALL_CACHE_OPTIONS };
            let store = Store::open(crash.disk.clone(), &options)
                .map_err(violation_while("open for reading"))?;
            find_history_prefix(&store, self.history, waited)?;
        }
        if is_due(effort.second_cut) {
            return self.judge_second_cut(crash, number, waited);
        }
        let disk: Arc<dyn Disk> = crash.disk.clone();
        let store =
            Store::open(disk.clone(), &SMALL_CACHE_OPTIONS).map_err(violation_while("open"))?;
        let groups = find_history_prefix(&store, self.history, waited)?;
        if is_due(effort.second_life) {
            let expected = change_and_wait(&store, self.history.contents_after(groups))?;
            drop(store);
            let store =
                Store::open(disk, &SMALL_CACHE_OPTIONS).map_err(violation_while("second open"))?;
            compare_contents(&store, &expected)
                .map_err(|Violation(why)| Violation(format!("second life: {why}")))?;
            if is_due(effort.emptied) {
                empty_store(&store, &expected)?;
            }
        }
        Ok(0)
    }

    /// Opens and changes a state while the power is cut again.
    fn judge_second_cut(
        &self,
        crash: &CrashState,
        number: u64,
        waited: usize,
    ) -> Result<u64, Violation> {
        let image = crash.disk.to_bytes();
        let disk = Arc::new(RecordDisk::new(crash.disk.clone()));
        let store =
            Store::open(disk.clone(), &SMALL_CACHE_OPTIONS).map_err(violation_while("open"))?;
        let groups = find_history_prefix(&store, self.history, waited)?;
        disk.record_mark(0);
        let expected = change_and_wait(&store, self.history.contents_after(groups))?;
        disk.record_mark(1);
        drop(store);
        let mut second = History::new(self.history.contents_after(groups).clone());
        second.push(expected);
        let options = CrashOptions { seed: self.seed ^ number, subsets: 6, exhaustive_sectors: 4 };
        let mut states = 0;
        let events = disk.take_events();
        let told = describe_events(&events);
        for again in CrashStates::new(image, events, options) {
            states += 1;
            let judged = (|| {
                let store = Store::open(again.disk.clone(), &SMALL_CACHE_OPTIONS)
                    .map_err(violation_while("open"))?;
                match again.marks().last() {
                    // Nothing was acknowledged before.
                    None => find_history_prefix(&store, self.history, waited),
                    Some(mark) => find_history_prefix(&store, &second, *mark as usize),
                }
            })();
            judged.map_err(|Violation(why)| {
                Violation(format!(
                    "second cut, state {states} ({:?}, durable {}): {why}\n{told}",
                    again.kind, again.durable.0
                ))
            })?;
        }
        Ok(states)
    }
}

/// Returns the number of groups, `waited` or more, after which the store's contents are visible.
pub(super) fn find_history_prefix(
    store: &Arc<Store>,
    history: &History,
    waited: usize,
) -> Result<usize, Violation> {
    let seen = Contents::read(store).map_err(violation_while("read"))?;
    let groups = history.find_prefix(&seen, waited).map_err(Violation)?;
    let expected = history.contents_after(groups);
    let info = store.info();
    let stored = history.stored_bytes(groups);
    if info.used_bytes < stored {
        return Err(Violation(format!("{} bytes are used by {stored}", info.used_bytes)));
    }
    if info.used_bytes > info.capacity_bytes * 2 {
        return Err(Violation(format!(
            "{} bytes are used of {}",
            info.used_bytes, info.capacity_bytes
        )));
    }
    let next = store.new_object().id();
    if next.0 <= expected.last_id {
        return Err(Violation(format!(
            "name {next} is given out again, up to {} were used",
            expected.last_id
        )));
    }
    Ok(groups)
}

pub(super) fn compare_contents(store: &Arc<Store>, expected: &Contents) -> Result<(), Violation> {
    let seen = Contents::read(store).map_err(violation_while("read"))?;
    if seen.objects == expected.objects && seen.keys == expected.keys {
        return Ok(());
    }
    Err(Violation(seen.describe_difference(expected)))
}

/// Changes a store, waits, and returns the new contents.
pub(super) fn change_and_wait(
    store: &Arc<Store>,
    before: &Contents,
) -> Result<Contents, Violation> {
    let mut after = before.clone();
    let mut group = Group::new();
    let payload: Vec<u8> = (0..1100u32).map(|at| (at * 7) as u8).collect();
    let id = group.create(store.new_object(), LifetimeHint::Unknown);
    group.append(id, &payload);
    after.objects.insert(id, payload.clone().into());
    after.last_id = id.0;
    if let Some((id, bytes)) = before.objects.iter().find(|(id, _)| before.child_count(**id) == 0) {
        let mut bytes = bytes.to_vec();
        group.write(*id, 3, &payload[..70]);
        bytes.resize(bytes.len().max(73), 0);
        bytes[3..73].copy_from_slice(&payload[..70]);
        after.objects.insert(*id, bytes.into());
    }
    group.put(&key_from_number(0), &payload[..90]);
    after.keys.insert(key_from_number(0).into(), payload[..90].into());
    let ticket = match store.submit(group, &[]) {
        Ok(ticket) => ticket,
        Err(refused) => match refused.error {
            Error::NoSpace { .. } => {
                // Freeing space always works.
                let mut group = Group::new();
                after = before.clone();
                for id in before.objects.keys().rev() {
                    group.delete(*id);
                    after.objects.remove(id);
                }
                store
                    .submit(group, &[])
                    .map_err(|refused| violation_while("delete on a full store")(refused.error))?
            }
            error => return Err(violation_while("submit")(error)),
        },
    };
    store.wait(ticket).map_err(violation_while("wait"))?;
    compare_contents(store, &after)
        .map_err(|Violation(why)| Violation(format!("after a change: {why}")))?;
    Ok(after)
}

/// Deletes everything: all space must be free then.
fn empty_store(store: &Arc<Store>, contents: &Contents) -> Result<(), Violation> {
    let mut group = Group::new();
    // A child has a larger number than its parent.
    contents.objects.keys().rev().for_each(|id| group.delete(*id));
    contents.keys.keys().for_each(|key| group.remove(key));
    store.submit(group, &[]).map_err(|refused| violation_while("delete all")(refused.error))?;
    // The second checkpoint no longer needs the segments that the first freed.
    for _ in 0..3 {
        store.checkpoint().map_err(violation_while("checkpoint"))?;
    }
    let info = store.info();
    // Tombstones stay until they are merged; payloads do not.
    let entries = 256 * (contents.objects.len() as u64 * 2 + contents.keys.len() as u64)
        + 64 * info.pending_keys;
    if info.used_bytes > entries + (16 << 10) {
        return Err(Violation(format!(
            "everything is deleted, and {} bytes are used: {info:?}",
            info.used_bytes
        )));
    }
    compare_contents(store, &Contents::default())
}

/// Returns a line for each request that changed the disk.
pub(super) fn describe_events(events: &[Event]) -> String {
    let mut out = String::new();
    for event in events {
        let line = match event {
            Event::Group { ticket, after, writes, .. } => {
                let writes: Vec<String> =
                    writes.iter().map(|(at, bytes)| format!("{at}+{}", bytes.len())).collect();
                let after: Vec<u64> = after.iter().map(|ticket| ticket.0).collect();
                format!("  {} after {after:?}: {}\n", ticket.0, writes.join(" "))
            }
            Event::Discard { extents, after } => format!("  discard {extents:?} after {after:?}\n"),
            Event::Durable(ticket) => format!("  {} is durable\n", ticket.0),
            Event::Mark(mark) => format!("  mark {mark}\n"),
            Event::Read(..) => continue,
        };
        out.push_str(&line);
    }
    out
}
