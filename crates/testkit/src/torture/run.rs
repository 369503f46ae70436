//! Runs a script, and judges the states that power cuts leave.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{CrashOptions, CrashStates, Event, RecordDisk};
use draconis_device::{Disk, MemoryDisk};

use super::partial_contents::PartialContents;
use super::stores::{SMALL_CACHE_OPTIONS, key_from_number, read_disk_bytes};
use super::{
    CheckFrequencies, Contents, History, Judge, Random, Script, ScriptOp, ScriptStep, StoreShape,
    TestSettings, Violation,
};
use draconis_objects::{Error, Group, LifetimeHint, ObjectId, Snapshot, Store, Ticket};

/// Record of a script.
#[derive(Debug)]
pub struct RecordedRun {
    /// Disk before its steps.
    pub image: Vec<u8>,
    /// Disk events of its steps, with marks: the number of awaited groups.
    pub events: Vec<Event>,
    /// Contents after each group.
    pub history: History,
    /// Disk after its steps.
    pub last_image: Vec<u8>,
    /// Number of awaited groups.
    pub waited: usize,
    /// Number of refusals for lack of space.
    pub full: u64,
    /// Checkpoints that its steps wrote, and segments that they cleaned.
    pub worked: (u64, u64),
}

/// Result of judging.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunTally {
    /// States of runs.
    pub states: u64,
    /// States of recoveries.
    pub second: u64,
    /// Number of refusals for lack of space.
    pub full: u64,
    /// Checkpoints that were written while it was recorded.
    pub checkpoints: u64,
    /// Segments that were cleaned while it was recorded.
    pub cleaned: u64,
}

impl std::ops::AddAssign for RunTally {
    fn add_assign(&mut self, other: Self) {
        self.states += other.states;
        self.second += other.second;
        self.full += other.full;
        self.checkpoints += other.checkpoints;
        self.cleaned += other.cleaned;
    }
}

/// Runner of a script.
pub(super) struct ScriptRunner<D: Disk + 'static> {
    disk: Arc<RecordDisk<D>>,
    /// None while it is reopened.
    store: Option<Arc<Store>>,
    slots: BTreeMap<u8, ObjectId>,
    /// Names of slots whose objects have parents or children.
    names: BTreeMap<u8, Vec<u8>>,
    /// A removal refused halfway for lack of space: its object, and the slot of the child.
    half: Option<(ObjectId, u8)>,
    now: Contents,
    history: History,
    /// Ticket of each group, with the number of groups up to it.
    tickets: Vec<(Ticket, usize)>,
    pub waited: usize,
    dice: Random,
    kept: Option<(Snapshot, Contents)>,
    is_failing: bool,
    full: u64,
    worked: (u64, u64),
}

/// Runs all steps of a script.
///
/// # Errors
/// A violation without a power cut.
pub fn record_script(
    shape: StoreShape,
    script: &Script,
    settings: TestSettings,
) -> Result<RecordedRun, Violation> {
    // Earlier bytes of the disk are not zeros.
    let memory = MemoryDisk::new(vec![0xEE; shape.disk_bytes], 512);
    let disk = Arc::new(RecordDisk::new(memory));
    let mut actor = ScriptRunner::prepare(shape, script, settings, disk)?;
    let image = read_disk_bytes(&*actor.disk);
    actor.disk.take_events();
    let counters = actor.store().info().counters;
    actor.run_steps(&script.steps)?;
    actor.add_counters();
    let ScriptRunner { disk, store, history, waited, full, worked, .. } = actor;
    drop(store);
    Ok(RecordedRun {
        image,
        last_image: read_disk_bytes(&*disk),
        events: disk.take_events(),
        history,
        waited,
        full,
        worked: (
            worked.0.saturating_sub(counters.checkpoints),
            worked.1.saturating_sub(counters.cleaned),
        ),
    })
}

/// Reason for an early end of a script.
pub(super) enum ScriptStop {
    /// A guarantee was broken.
    Broken(Violation),
    /// The store reported an error.
    Failed(&'static str, Error),
    /// Groups without a waiter are lost, which is allowed.
    Shorter,
}

impl From<ScriptStop> for Violation {
    fn from(stop: ScriptStop) -> Self {
        match stop {
            ScriptStop::Broken(violation) => violation,
            ScriptStop::Failed(doing, error) => Self(format!("{doing}: {error}")),
            ScriptStop::Shorter => Self("what had no waiter is gone".to_owned()),
        }
    }
}

fn stop_while(doing: &'static str) -> impl Fn(Error) -> ScriptStop {
    move |error| ScriptStop::Failed(doing, error)
}

impl<D: Disk + 'static> ScriptRunner<D> {
    fn store(&self) -> &Arc<Store> {
        self.store.as_ref().expect("it was opened, or the run is over")
    }

    /// Returns a store after the durable preparatory steps.
    pub fn prepare(
        shape: StoreShape,
        script: &Script,
        settings: TestSettings,
        disk: Arc<RecordDisk<D>>,
    ) -> Result<Self, Violation> {
        let Script { commit_bytes, barrier_bytes, .. } = *script;
        super::set_thread_settings(TestSettings { commit_bytes, barrier_bytes, ..settings });
        Store::create(disk.clone(), &shape.options()).map_err(stop_while("making a store"))?;
        let store = Store::open(disk.clone(), &SMALL_CACHE_OPTIONS)
            .map_err(stop_while("opening a store"))?;
        let mut actor = Self {
            disk,
            store: Some(store),
            slots: BTreeMap::new(),
            names: BTreeMap::new(),
            half: None,
            now: Contents::default(),
            history: History::new(Contents::default()),
            tickets: vec![],
            waited: 0,
            dice: Random::new(script.seed ^ 0x0B5),
            kept: None,
            is_failing: false,
            full: 0,
            worked: (0, 0),
        };
        actor.run_steps(&script.before)?;
        actor.store().sync().map_err(stop_while("sync"))?;
        actor.history = History::new(actor.now.clone());
        actor.tickets.clear();
        (actor.waited, actor.full, actor.worked) = (0, 0, (0, 0));
        Ok(actor)
    }

    pub fn run_steps(&mut self, steps: &[ScriptStep]) -> Result<(), Violation> {
        for (nth, step) in steps.iter().enumerate() {
            self.run_step(step).map_err(|stop| {
                Violation(format!("step {nth}, {step:?}: {}", Violation::from(stop)))
            })?;
        }
        Ok(())
    }

    /// Runs steps until the store reports an error.
    pub fn run_until_failure(&mut self, steps: &[ScriptStep]) -> Result<(), Violation> {
        // Damaged bytes are never moved: the store may be full early.
        self.is_failing = true;
        let mut last = String::new();
        for (nth, step) in steps.iter().enumerate() {
            match self.run_step(step) {
                Ok(()) => {}
                Err(ScriptStop::Shorter) => return Ok(()),
                Err(ScriptStop::Failed(
                    doing,
                    error @ (Error::Device(_)
                    | Error::Stopped(_)
                    | Error::Corrupt { .. }
                    | Error::NotAStore(_)),
                )) => {
                    last = format!("step {nth} more, {step:?}: {doing}: {error}");
                    break;
                }
                Err(stop) => {
                    let Violation(why) = stop.into();
                    return Err(Violation(format!("step {nth} more, {step:?}: {why}")));
                }
            }
        }
        self.kept = None;
        let Some(store) = &self.store else { return Ok(()) };
        // Contents that can still be read are right.
        let shown = PartialContents::read(store, &self.history)?;
        let groups = self.history.group_count().saturating_sub(1);
        shown.find_prefix(&self.history, groups).map(drop).map_err(|Violation(why)| {
            Violation(format!(
                "{last}; then {why}; {}",
                shown.describe_difference(self.history.current())
            ))
        })
    }

    /// Closes the store and returns the history.
    pub fn finish(self) -> History {
        self.history
    }

    fn run_step(&mut self, step: &ScriptStep) -> Result<(), ScriptStop> {
        match step {
            ScriptStep::Group(ops) => self.submit_group(ops)?,
            ScriptStep::Wait => self.wait(0)?,
            ScriptStep::WaitOlder(back) => self.wait(*back)?,
            ScriptStep::Checkpoint => {
                self.store().checkpoint().map_err(stop_while("checkpoint"))?;
                self.mark_waited(self.history.group_count());
            }
            ScriptStep::Snapshot => match self.kept.take() {
                None => self.kept = Some((self.store().snapshot(), self.now.clone())),
                Some((snapshot, was)) => compare_snapshot(&snapshot, &was)?,
            },
            ScriptStep::Join(slot) => self.join_object(*slot)?,
            ScriptStep::Reopen => self.reopen()?,
        }
        Ok(())
    }

    /// Removes an object with one child, or finishes the last refused removal.
    fn join_object(&mut self, slot: u8) -> Result<(), ScriptStop> {
        if let Some((id, child)) = self.half.take() {
            let done = self.store().remove_disk(b"nothing@here", false);
            let is_tried = matches!(done, Err(Error::Disk(_)));
            let done = if is_tried { Ok(()) } else { done };
            return self.apply_join_result(id, child, done);
        }
        let Some(&id) = self.slots.get(&slot) else { return Ok(()) };
        if self.now.child_count(id) != 1 {
            return Ok(());
        }
        let child = self.slots.iter().find(|(_, child)| self.now.over.get(*child) == Some(&id));
        let (Some((&child, _)), Some(name)) = (child, self.names.remove(&slot)) else {
            return Ok(());
        };
        self.slots.remove(&slot);
        self.now.objects.remove(&id);
        self.history.push(self.now.clone());
        let done = self.store().remove_disk(&name, false);
        if let Err(Error::NoSpace { .. }) = &done
            && self.store().find_named_object(&name).map_err(stop_while("names"))?.is_some()
        {
            return Err(ScriptStop::Broken(Violation(
                "a removal is refused for lack of room".into(),
            )));
        }
        self.apply_join_result(id, child, done)
    }

    fn apply_join_result(
        &mut self,
        id: ObjectId,
        child: u8,
        done: draconis_objects::Result<()>,
    ) -> Result<(), ScriptStop> {
        let was = self.slots[&child];
        let joined = |now| {
            let mut next = self.now.clone();
            next.join_child(id, was, now);
            next
        };
        match done {
            Ok(()) => {
                let now = self
                    .store()
                    .find_named_object(&self.names[&child])
                    .map_err(stop_while("names"))?;
                let now = now.ok_or_else(|| {
                    ScriptStop::Broken(Violation(
                        "what was over a removed object lost its name".into(),
                    ))
                })?;
                self.now = joined(now);
                self.slots.insert(child, now);
                self.history.push(self.now.clone());
                self.mark_waited(self.history.group_count());
                self.check_contents()
            }
            Err(Error::NoSpace { .. }) => {
                self.full += 1;
                self.half = Some((id, child));
                self.mark_waited(self.history.group_count());
                self.free_space()
            }
            Err(error) => {
                // The removal may be durable or not.
                let (one, other) = (joined(was), joined(id));
                self.history.push(one);
                self.history.push(other);
                Err(ScriptStop::Failed("remove", error))
            }
        }
    }

    fn mark_waited(&mut self, groups: usize) {
        self.waited = self.waited.max(groups);
        self.disk.record_mark(self.waited as u64);
    }

    fn wait(&mut self, back: usize) -> Result<(), ScriptStop> {
        let Some(nth) = self.tickets.len().checked_sub(back + 1) else { return Ok(()) };
        let (ticket, groups) = self.tickets[nth];
        self.store().wait(ticket).map_err(stop_while("wait"))?;
        self.mark_waited(groups);
        Ok(())
    }

    fn reopen(&mut self) -> Result<(), ScriptStop> {
        self.kept = None;
        self.tickets.clear();
        // The old one is dropped before the new one is opened.
        self.add_counters();
        self.store = None;
        let opened = Store::open(self.disk.clone(), &SMALL_CACHE_OPTIONS);
        self.store = Some(opened.map_err(stop_while("open"))?);
        if self.is_failing {
            // Writes without a waiter may have failed when the store was dropped.
            let seen = Contents::read(self.store()).map_err(stop_while("read"))?;
            let groups = self.history.find_prefix(&seen, self.waited);
            let groups = groups.map_err(|why| ScriptStop::Broken(Violation(why)))?;
            if groups < self.history.group_count() {
                return Err(ScriptStop::Shorter);
            }
        }
        self.mark_waited(self.history.group_count());
        self.check_contents()
    }

    fn add_counters(&mut self) {
        let counters = self.store().info().counters;
        self.worked.0 += counters.checkpoints;
        self.worked.1 += counters.cleaned;
    }

    /// Checks that the store has the expected contents.
    fn check_contents(&self) -> Result<(), ScriptStop> {
        let seen = Contents::read(self.store()).map_err(stop_while("read"))?;
        if seen.objects == self.now.objects && seen.keys == self.now.keys {
            return Ok(());
        }
        Err(ScriptStop::Broken(Violation(seen.describe_difference(&self.now))))
    }

    fn submit_group(&mut self, ops: &[ScriptOp]) -> Result<(), ScriptStop> {
        let (mut slots, mut next, mut group) = (self.slots.clone(), self.now.clone(), Group::new());
        let names = self.names.clone();
        let mut only_frees = true;
        for op in ops {
            only_frees &=
                matches!(op, ScriptOp::Truncate(..) | ScriptOp::Delete(_) | ScriptOp::Remove(_));
            self.apply_op(op, &mut group, &mut slots, &mut next);
            if let ScriptOp::Truncate(..) = op {
                only_frees = false;
            }
        }
        let after: Vec<Ticket> = self
            .tickets
            .iter()
            .rev()
            .take(3)
            .filter(|_| self.history.group_count().is_multiple_of(2))
            .map(|it| it.0)
            .collect();
        // An empty group frees nothing.
        only_frees &= !group.is_empty();
        let bytes = group.len_bytes() as u64;
        match self.store().submit(group, &after) {
            Ok(ticket) => {
                (self.slots, self.now) = (slots, next);
                self.history.push(self.now.clone());
                self.tickets.push((ticket, self.history.group_count()));
                Ok(())
            }
            Err(refused) => {
                self.names = names;
                let info = self.store().info();
                let broken = |error: Error| {
                    let held =
                        if self.kept.is_some() { "with a snapshot" } else { "without a snapshot" };
                    // Would checkpoints have found the space?
                    let done = (0..3).try_for_each(|_| self.store().checkpoint());
                    ScriptStop::Broken(Violation(format!(
                        "submit, {held}: {error}; {} bytes are seen; {info:?}; used after checkpoints: {}, {done:?}",
                        self.now.len_bytes(),
                        self.store().info().used_bytes
                    )))
                };
                match refused.error {
                    error @ Error::NoSpace { .. } => {
                        // A snapshot pins bytes that were deleted later.
                        let is_early = self.now.len_bytes() + bytes < info.capacity_bytes / 4;
                        if !self.is_failing && (only_frees || is_early && self.kept.is_none()) {
                            return Err(broken(error));
                        }
                        self.full += 1;
                        self.free_space()
                    }
                    error @ (Error::Misuse(_) | Error::NoObject(_)) => Err(broken(error)),
                    error => {
                        // It was not acknowledged, but may be durable.
                        self.history.push(next);
                        Err(ScriptStop::Failed("submit", error))
                    }
                }
            }
        }
    }

    /// Frees some space, which always works.
    fn free_space(&mut self) -> Result<(), ScriptStop> {
        self.kept = None;
        let half = self.half.map(|(_, slot)| slot);
        let free = self
            .slots
            .iter()
            .filter(|(slot, id)| self.now.child_count(**id) == 0 && half != Some(**slot));
        let ops: Vec<ScriptOp> =
            match free.map(|(slot, _)| slot).nth(self.dice.next_below(4) as usize) {
                Some(&slot) => vec![ScriptOp::Delete(slot)],
                None => (0..200).map(ScriptOp::Remove).collect(),
            };
        self.submit_group(&ops)
    }

    fn apply_op(
        &mut self,
        op: &ScriptOp,
        group: &mut Group,
        slots: &mut BTreeMap<u8, ObjectId>,
        next: &mut Contents,
    ) {
        // An object with children does not change, nor does one that waits for a join.
        let half = self.half.map(|(_, slot)| slot);
        let is_fixed = |slots: &BTreeMap<u8, ObjectId>, next: &Contents, slot: u8| {
            slots.get(&slot).is_none_or(|&id| next.child_count(id) > 0)
        };
        let change = |next: &mut Contents, id: ObjectId, change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = next.objects.get(&id).map_or_else(Vec::new, |bytes| bytes.to_vec());
            change(&mut bytes);
            next.objects.insert(id, bytes.into());
        };
        match *op {
            ScriptOp::Create(slot) if !slots.contains_key(&slot) => {
                let hint = [LifetimeHint::Unknown, LifetimeHint::Hot, LifetimeHint::Cold]
                    [self.dice.next_below(3) as usize];
                let id = group.create(self.store().new_object(), hint);
                slots.insert(slot, id);
                next.objects.insert(id, vec![].into());
                next.last_id = next.last_id.max(id.0);
            }
            ScriptOp::Write(slot, at, len) if !is_fixed(slots, next, slot) => {
                let Some(&id) = slots.get(&slot) else { return };
                let payload = self.random_payload(len);
                group.write(id, at, &payload);
                change(next, id, &|bytes| {
                    let end = at as usize + payload.len();
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[at as usize..end].copy_from_slice(&payload);
                });
            }
            ScriptOp::Append(slot, len) if !is_fixed(slots, next, slot) => {
                let Some(&id) = slots.get(&slot) else { return };
                let payload = self.random_payload(len);
                group.append(id, &payload);
                change(next, id, &|bytes| bytes.extend_from_slice(&payload));
            }
            ScriptOp::Truncate(slot, len) if !is_fixed(slots, next, slot) => {
                let Some(&id) = slots.get(&slot) else { return };
                group.truncate(id, len);
                change(next, id, &|bytes| bytes.resize(len as usize, 0));
            }
            ScriptOp::Punch(slot, at, len) if !is_fixed(slots, next, slot) => {
                let Some(&id) = slots.get(&slot) else { return };
                group.punch_hole(id, at, len);
                change(next, id, &|bytes| {
                    let end = bytes.len().min((at + len) as usize);
                    bytes[(at as usize).min(end)..end].fill(0);
                });
            }
            ScriptOp::Delete(slot) if !is_fixed(slots, next, slot) && half != Some(slot) => {
                let Some(id) = slots.remove(&slot) else { return };
                group.delete(id);
                next.objects.remove(&id);
                next.over.remove(&id);
                if let Some(name) = self.names.remove(&slot) {
                    group.remove_name(&name);
                }
            }
            ScriptOp::Fork(slot, new) if slots.contains_key(&slot) && !slots.contains_key(&new) => {
                let below = slots[&slot];
                let id = group.fork(self.store().new_object(), below);
                for (slot, id) in [(slot, below), (new, id)] {
                    let name = self.names.entry(slot).or_insert_with(|| format!("{id}@").into());
                    group.set_name(name, id);
                }
                slots.insert(new, id);
                next.objects.insert(id, next.objects[&below].clone());
                next.over.insert(id, below);
                next.last_id = next.last_id.max(id.0);
            }
            ScriptOp::Put(key, len) => {
                let payload = self.random_payload(len);
                group.put(&key_from_number(key), &payload);
                next.keys.insert(key_from_number(key).into(), payload.into());
            }
            ScriptOp::Remove(key) => {
                group.remove(&key_from_number(key));
                next.keys.remove(&key_from_number(key)[..]);
            }
            _ => {}
        }
    }

    /// Returns unique bytes.
    fn random_payload(&mut self, len: u32) -> Vec<u8> {
        let words = (0..len.div_ceil(8)).flat_map(|_| self.dice.next_u64().to_le_bytes());
        words.take(len as usize).collect()
    }
}

fn compare_snapshot(snapshot: &Snapshot, was: &Contents) -> Result<(), ScriptStop> {
    let said = stop_while("snapshot");
    let list = snapshot.list().map_err(&said)?;
    if !list
        .iter()
        .map(|(id, len)| (id, *len))
        .eq(was.objects.iter().map(|(id, b)| (id, b.len() as u64)))
    {
        return Err(ScriptStop::Broken(Violation(format!("a snapshot lists {list:?}"))));
    }
    for (id, bytes) in &was.objects {
        let mut have = vec![0; bytes.len()];
        snapshot.read(*id, 0, &mut have).map_err(&said)?;
        if have[..] != bytes[..] {
            return Err(ScriptStop::Broken(Violation(format!(
                "object {id} of a snapshot has other bytes"
            ))));
        }
    }
    Ok(())
}

/// Runs a script and judges states that power cuts leave. An error names the state that broke a
/// guarantee.
///
/// # Errors
/// The first violation.
pub fn run_with_power_cuts(
    shape: StoreShape,
    script: &Script,
    options: CrashOptions,
    effort: CheckFrequencies,
    settings: TestSettings,
) -> Result<RunTally, Violation> {
    let recorded = match std::panic::catch_unwind(|| record_script(shape, script, settings)) {
        Ok(recorded) => recorded?,
        Err(panic) => return Err(Violation::from_panic("running", &*panic)),
    };
    let RecordedRun { image, events, history, full, worked, .. } = recorded;
    let told = super::judge::describe_events(&events);
    let mut judge = Judge::new(&history, options.seed);
    let mut tally =
        RunTally { full, checkpoints: worked.0, cleaned: worked.1, ..RunTally::default() };
    for crash in CrashStates::new(image, events, options) {
        tally.states += 1;
        tally.second += judge.judge(&crash, tally.states, effort).map_err(|Violation(why)| {
            let crate::CrashState { durable, written, kind: cut, .. } = &crash;
            Violation(format!(
                "state {} ({cut:?}, durable {}, written {}): {why}\n{}",
                tally.states,
                durable.0,
                written.0,
                requests_around_state(&told, durable.0, written.0)
            ))
        })?;
    }
    Ok(tally)
}

/// Returns the lines of disk requests around a state.
fn requests_around_state(told: &str, durable: u64, written: u64) -> String {
    let ticket = |line: &str| line.split_whitespace().next().and_then(|it| it.parse::<u64>().ok());
    let lines: Vec<&str> = told.lines().collect();
    let place = |of: u64| lines.iter().position(|line| ticket(line) == Some(of));
    let from = place(durable).unwrap_or(0).saturating_sub(8);
    let to = place(written).map_or(lines.len(), |at| (at + 4).min(lines.len()));
    lines[from.min(to)..to].join("\n")
}
