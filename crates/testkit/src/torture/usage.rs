//! Long-term use of a store: load, reload, overwrite, delete, fill up, empty, take snapshots,
//! clone, roll back, grow, shrink, reopen, be killed.
//!
//! ```text
//!   seed ─▶ act ── groups ──▶ store          what it holds, beside it in memory
//!             │                 │                      │
//!             └── again ◀── full check, and all is read and compared
//! ```
//!
//! Law 1: after each act the whole store is checked: every checksum, every map, every count.
//! Law 2: groups that only free space are refused only while a snapshot pins the freed segments.
//! Law 3: after a kill or a power cut within an act, the contents are those after some prefix of
//! its groups, with all awaited ones.
//! Law 4: a seed determines a run.

mod disks;

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeFull;
use std::sync::Arc;

use crate::{CrashOptions, CrashStates, RecordDisk};
use draconis_device::{Disk, MemoryDisk};
use twox_hash::XxHash3_64;

use super::history::mix_bits;
use super::history::read_object;
use super::stores::read_disk_bytes;
use super::{Random, StoreShape, TestSettings, Violation};
use draconis_objects::check::CheckOptions;
use draconis_objects::kv::{Batch, Kv};
use draconis_objects::{
    Error, Group, LayoutKind, LifetimeHint, ObjectId, OpenOptions, Snapshot, Store,
};

/// Statistics of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UsageTally {
    /// Acts, each followed by a full check.
    pub acts: u64,
    /// Accepted groups.
    pub groups: u64,
    /// Refusals for lack of space.
    pub full: u64,
    /// States after kills and power cuts, each opened, compared and checked.
    pub cuts: u64,
    /// Cleaned segments.
    pub cleaned: u64,
    /// Resizes of a store.
    pub resized: u64,
}

impl std::ops::AddAssign for UsageTally {
    fn add_assign(&mut self, other: Self) {
        self.acts += other.acts;
        self.groups += other.groups;
        self.full += other.full;
        self.cuts += other.cuts;
        self.cleaned += other.cleaned;
        self.resized += other.resized;
    }
}

/// Next operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operation {
    /// Puts so many keys from `first` on, in groups of `lot`, with values of `len` bytes.
    Load { first: u32, keys: u32, len: u32, lot: u32 },
    /// Repeats the last load.
    LoadAgain,
    /// Sets random keys to values of any length up to `len`, one a group.
    Overwrite { keys: u32, len: u32 },
    /// Deletes every other key, `lot` in a group.
    DeleteHalf { lot: u32 },
    /// Deletes all keys of a range, in order.
    DeleteRange { first: u32, keys: u32, lot: u32 },
    /// Puts until the store is full, then deletes a few.
    Fill { len: u32, lot: u32 },
    /// Creates objects until the store is full, then deletes a few.
    FillObjects { len: u32 },
    /// Writes to objects, appends, truncates.
    ChangeObjects { times: u32 },
    /// Creates disks, writes to them, takes snapshots, clones, rolls back and removes.
    Disks { times: u32 },
    /// Deletes everything, `lot` in a group.
    Empty { lot: u32 },
    /// Takes a snapshot, or compares and drops the one taken before.
    Snapshot,
    /// Closes and reopens the store, so many times.
    Reopen { times: u32 },
    /// Writes a whole checkpoint.
    Checkpoint,
    /// Resizes the store to a percentage of the disk.
    Resize { percent: u64 },
}

/// Keys, objects by number, disks and snapshots by name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum ItemName {
    Key(Arc<[u8]>),
    Object(ObjectId),
    Disk(Arc<[u8]>),
}

type ModelContents = BTreeMap<ItemName, Arc<[u8]>>;

/// Undo record of a group: names with their earlier contents.
type UndoLog = Vec<(ItemName, Option<Arc<[u8]>>)>;

struct Workload {
    shape: StoreShape,
    options: OpenOptions,
    dice: Random,
    disk: Arc<RecordDisk<MemoryDisk>>,
    /// None while it is reopened.
    store: Option<Arc<Store>>,
    held: ModelContents,
    digest: u64,
    /// Undo record and digest of each group since the act began.
    done: Vec<(UndoLog, u64)>,
    /// Digest when the act began.
    before: u64,
    kept: Option<(Snapshot, ModelContents)>,
    last_load: Option<Operation>,
    usage: UsageTally,
}

/// Returns layout and sizes by number.
fn store_shape(number: u64) -> StoreShape {
    let layout = if number.is_multiple_of(2) { LayoutKind::Cow } else { LayoutKind::Log };
    let (page_bytes, segment_bytes, disk_bytes) = match number / 2 % 5 {
        0 => (512, 16 << 10, 1 << 20),
        1 => (4096, 32 << 10, 4 << 20),
        2 => (4096, 64 << 10, 6 << 20),
        3 => (4096, 64 << 10, 16 << 20),
        _ => (4096, 256 << 10, 32 << 20),
    };
    StoreShape { layout, page_bytes, segment_bytes, disk_bytes }
}

/// Runs so many acts on the store of a seed.
///
/// # Errors
/// The first violation, with its act.
pub fn run_ordinary_use(seed: u64, acts: usize) -> Result<UsageTally, Violation> {
    super::set_thread_settings(TestSettings::NORMAL);
    let run = || {
        let mut user = Workload::begin(seed)?;
        for nth in 0..acts {
            let act = user.choose_operation();
            log::debug!("act {nth}: {act:?}");
            user.run_operation(act).map_err(|Violation(why)| {
                Violation(format!("{:?}: act {nth}, {act:?}: {why}", user.shape))
            })?;
        }
        Ok(user.usage)
    };
    match std::panic::catch_unwind(run) {
        Ok(done) => done,
        Err(panic) => Err(Violation::from_panic("ordinary use", &*panic)),
    }
}

fn violation_while(doing: &str, error: &Error) -> Violation {
    Violation(format!("{doing}: {error}"))
}

fn hash_item(name: &ItemName, bytes: &[u8]) -> u64 {
    let of = match name {
        ItemName::Key(key) => XxHash3_64::oneshot(key),
        ItemName::Disk(name) => XxHash3_64::oneshot_with_seed(1, name),
        ItemName::Object(id) => mix_bits(id.0),
    };
    mix_bits(of ^ XxHash3_64::oneshot(bytes).rotate_left(9))
}

fn digest_contents(held: &ModelContents) -> u64 {
    held.iter().fold(0, |sum, (name, bytes)| sum.wrapping_add(hash_item(name, bytes)))
}

fn numbered_key(number: u32) -> ItemName {
    ItemName::Key(format!("k{number:08}").into_bytes().into())
}

/// Reads the contents of a store.
fn read_all(store: &Arc<Store>) -> Result<ModelContents, Violation> {
    let describe = |error: Error| violation_while("reading all", &error);
    let mut held = ModelContents::new();
    let disks = store.list_disks().map_err(describe)?;
    for disk in &disks {
        let bytes = read_object(store, disk.id, disk.len).map_err(describe)?;
        held.insert(ItemName::Disk(disk.name.as_slice().into()), bytes);
    }
    for (id, len) in store.list().map_err(describe)? {
        if disks.iter().any(|disk| disk.id == id) {
            continue;
        }
        held.insert(ItemName::Object(id), read_object(store, id, len).map_err(describe)?);
    }
    for pair in Kv::new(store.clone()).scan::<RangeFull>(&..) {
        let (key, value) = pair.map_err(describe)?;
        held.insert(ItemName::Key(key.into()), value.into());
    }
    Ok(held)
}

/// Returns a description of the first difference.
fn describe_difference(is: &ModelContents, should: &ModelContents) -> String {
    let wrong = is.keys().chain(should.keys()).find(|name| is.get(*name) != should.get(*name));
    let told = |held: &ModelContents, name| held.get(name).map(|bytes| bytes.len());
    match wrong {
        Some(ItemName::Key(key)) => {
            let name = ItemName::Key(key.clone());
            let key = key.escape_ascii();
            format!(
                "key {key} has {:?} bytes, should have {:?}",
                told(is, &name),
                told(should, &name)
            )
        }
        Some(name) => {
            format!("{name:?} has {:?} bytes, should have {:?}", told(is, name), told(should, name))
        }
        None => "they are the same".to_owned(),
    }
}

impl Workload {
    fn begin(seed: u64) -> Result<Self, Violation> {
        let mut dice = Random::new(seed ^ 0x05E);
        let shape = store_shape(seed);
        let cache_bytes = [128 << 10, 1 << 20, 64 << 20][dice.next_below(3) as usize];
        let options = OpenOptions { cache_bytes, read_only: false };
        // Earlier bytes of the disk are not zeros.
        let disk = RecordDisk::new(MemoryDisk::new(vec![0xEE; shape.disk_bytes], 512));
        let disk = Arc::new(disk);
        Store::create(disk.clone(), &shape.options())
            .map_err(|error| violation_while("create", &error))?;
        let store =
            Store::open(disk.clone(), &options).map_err(|error| violation_while("open", &error))?;
        Ok(Self {
            shape,
            options,
            dice,
            disk,
            store: Some(store),
            held: ModelContents::new(),
            digest: 0,
            done: vec![],
            before: 0,
            kept: None,
            last_load: None,
            usage: UsageTally::default(),
        })
    }

    fn store(&self) -> Arc<Store> {
        self.store.clone().expect("it was opened, or the run is over")
    }

    /// Returns the most keys for a store of this size.
    fn keys_max(&self) -> u64 {
        self.shape.disk_bytes as u64 / 64
    }

    fn choose_operation(&mut self) -> Operation {
        let keys_max = self.keys_max();
        let dice = &mut self.dice;
        let lens = [0, 15, 15, 40, 213, 213, 1000, 4000, 5000];
        let len = lens[dice.next_below(lens.len() as u64) as usize] + dice.next_below(3) as u32;
        // A group is far shorter than a store.
        let most = (self.shape.disk_bytes as u32 / 32 / (len + 40)).max(1);
        let lot = [1, 3, 40, 1000, 5000][dice.next_below(5) as usize].min(most);
        let keys = 1 + dice
            .next_below(keys_max.min(u64::from(self.shape.disk_bytes as u32 / (len + 60))))
            as u32;
        let first = dice.next_below(keys_max) as u32;
        match dice.next_below(29) {
            27 | 28 => Operation::Resize { percent: 50 + dice.next_below(51) },
            24..=26 => Operation::Disks { times: 1 + dice.next_below(40) as u32 },
            0..=3 => {
                Operation::Load { first: if dice.once_in(2) { 0 } else { first }, keys, len, lot }
            }
            4..=6 => Operation::LoadAgain,
            7 | 8 => Operation::Overwrite { keys: keys.min(3000), len: len * 2 + 1 },
            9 | 10 => Operation::DeleteHalf { lot: lot.min(100) },
            11 | 12 => Operation::DeleteRange { first, keys, lot: lot.min(100) },
            13 | 14 => Operation::Fill { len, lot },
            15 => {
                Operation::FillObjects { len: [3000, 20_000, 70_000][dice.next_below(3) as usize] }
            }
            16 | 17 => Operation::ChangeObjects { times: 1 + dice.next_below(200) as u32 },
            18 => Operation::Empty { lot: [1, 1, 20, 300][dice.next_below(4) as usize] },
            19 | 20 => Operation::Snapshot,
            21 | 22 => Operation::Reopen { times: [1, 1, 3, 12][dice.next_below(4) as usize] },
            _ => Operation::Checkpoint,
        }
    }

    /// Performs an act, then compares and checks everything. One in five is cut short.
    fn run_operation(&mut self, act: Operation) -> Result<(), Violation> {
        let is_cut = self.dice.once_in(5);
        self.done.clear();
        self.before = self.digest;
        self.disk.take_events();
        let image = is_cut.then(|| read_disk_bytes(&*self.disk));
        self.perform_operation(act)?;
        match image {
            Some(image) => self.simulate_power_cut(image)?,
            None => self.verify_all()?,
        }
        self.usage.acts += 1;
        Ok(())
    }

    fn perform_operation(&mut self, act: Operation) -> Result<(), Violation> {
        match act {
            Operation::Load { first, keys, len, lot } => {
                self.last_load = Some(act);
                self.put_keys(first, keys, len, lot)?;
            }
            Operation::LoadAgain => {
                if let Some(Operation::Load { first, keys, len, lot }) = self.last_load {
                    self.put_keys(first, keys, len, lot)?;
                }
            }
            Operation::Overwrite { keys, len } => {
                let max = self.keys_max();
                for _ in 0..keys {
                    let (number, len) =
                        (self.dice.next_below(max), self.dice.next_below(u64::from(len)));
                    let value = self.random_payload(len as u32);
                    if !self.put_group(vec![(numbered_key(number as u32), value)])? {
                        break;
                    }
                }
            }
            Operation::DeleteHalf { lot } => {
                let all = self.matching_names(|name| matches!(name, ItemName::Key(_)));
                self.delete_all(all.into_iter().step_by(2).collect(), lot)?;
            }
            Operation::DeleteRange { first, keys, lot } => {
                // Some never existed: no error, and no lost space.
                let all = (first..first + keys.min(5000)).map(numbered_key).collect();
                self.delete_all(all, lot)?;
            }
            Operation::Fill { len, lot } => self.fill_until_full(len, lot)?,
            Operation::FillObjects { len } => {
                loop {
                    let payload = self.random_payload(len);
                    if !self.new_object(payload)? {
                        break;
                    }
                }
                self.delete_some_items()?;
            }
            Operation::ChangeObjects { times } => {
                for _ in 0..times {
                    self.change_object()?;
                }
            }
            Operation::Disks { times } => {
                for nth in 0..times {
                    self.change_disks(nth)?;
                }
            }
            Operation::Empty { lot } => {
                let all = self.matching_names(|_| true);
                self.delete_all(all, lot)?;
            }
            Operation::Snapshot => match self.kept.take() {
                None => self.kept = Some((self.store().snapshot(), self.held.clone())),
                Some((snapshot, was)) => compare_snapshot(&snapshot, &was)?,
            },
            Operation::Reopen { times } => {
                for _ in 0..times {
                    self.wait()?;
                    self.reopen(None)?;
                }
            }
            Operation::Resize { percent } => self.resize(percent)?,
            Operation::Checkpoint => {
                self.store().checkpoint().map_err(|error| violation_while("checkpoint", &error))?;
                self.disk.record_mark(self.done.len() as u64);
            }
        }
        Ok(())
    }

    /// Closes the store, and opens it with another length.
    fn resize(&mut self, percent: u64) -> Result<(), Violation> {
        self.wait()?;
        self.kept = None;
        drop(self.store.take());
        let len_bytes = self.shape.disk_bytes as u64 / 100 * percent / 512 * 512;
        match Store::resize(self.disk.clone(), len_bytes) {
            Ok(()) => self.usage.resized += 1,
            Err(Error::NoSpace { .. }) => self.usage.full += 1,
            Err(error) => return Err(violation_while("another length", &error)),
        }
        self.reopen(None)
    }

    fn matching_names(&self, is_wanted: impl Fn(&ItemName) -> bool) -> Vec<ItemName> {
        self.held.keys().filter(|name| is_wanted(name)).cloned().collect()
    }

    fn random_payload(&mut self, len: u32) -> Arc<[u8]> {
        let mut bytes = vec![0; len as usize];
        self.dice.fill(&mut bytes);
        bytes.into()
    }

    fn put_keys(&mut self, first: u32, keys: u32, len: u32, lot: u32) -> Result<(), Violation> {
        let mut from = first;
        while from < first + keys {
            let to = (from + lot).min(first + keys);
            let pairs =
                (from..to).map(|number| (numbered_key(number), self.random_payload(len))).collect();
            if !self.put_group(pairs)? {
                return Ok(());
            }
            from = to;
        }
        Ok(())
    }

    fn fill_until_full(&mut self, len: u32, lot: u32) -> Result<(), Violation> {
        let first = self.dice.next_below(self.keys_max()) as u32;
        let mut next = first;
        loop {
            let pairs =
                (next..next + lot).map(|number| (numbered_key(number), self.random_payload(len)));
            let pairs = pairs.collect();
            if !self.put_group(pairs)? {
                break;
            }
            next += lot;
        }
        if self.dice.once_in(3) {
            self.wait()?;
            self.reopen(None)?;
        }
        self.delete_some_items()
    }

    /// Deletes a few items of a full store, one in a group.
    fn delete_some_items(&mut self) -> Result<(), Violation> {
        for _ in 0..1 + self.dice.next_below(30) {
            let Some(last) = (self.held.len() as u64).checked_sub(1) else { return Ok(()) };
            let nth = self.dice.next_below(last + 1) as usize;
            let name = self.held.keys().nth(nth).cloned();
            self.delete_all(name.into_iter().collect(), 1)?;
        }
        Ok(())
    }

    /// Puts pairs as one group; returns false if there was no space.
    fn put_group(&mut self, pairs: Vec<(ItemName, Arc<[u8]>)>) -> Result<bool, Violation> {
        let mut batch = Batch::new();
        for (name, value) in &pairs {
            if let ItemName::Key(key) = name {
                batch.put(key, value);
            }
        }
        let taken = Kv::new(self.store()).write(batch).map(drop).map_err(|refused| refused.1);
        let changes = pairs.into_iter().map(|(name, value)| (name, Some(value)));
        self.apply_if_accepted(taken, changes.collect())
    }

    /// Returns true if a group was accepted, and applies its changes to the model.
    fn apply_if_accepted(
        &mut self,
        taken: Result<(), Error>,
        changes: Vec<(ItemName, Option<Arc<[u8]>>)>,
    ) -> Result<bool, Violation> {
        match taken {
            Ok(()) => {
                let mut undo = UndoLog::new();
                for (name, bytes) in changes {
                    undo.push((name.clone(), self.set_model_bytes(name, bytes)));
                }
                self.done.push((undo, self.digest));
                self.usage.groups += 1;
                if self.dice.once_in(40) {
                    self.wait()?;
                }
                Ok(true)
            }
            Err(Error::NoSpace { .. }) => {
                self.usage.full += 1;
                Ok(false)
            }
            Err(error) => Err(violation_while("submit", &error)),
        }
    }

    /// Sets the bytes of a name, or removes it; returns the old bytes.
    fn set_model_bytes(&mut self, name: ItemName, bytes: Option<Arc<[u8]>>) -> Option<Arc<[u8]>> {
        let new = bytes.as_ref().map_or(0, |bytes| hash_item(&name, bytes));
        let old = match bytes {
            Some(bytes) => self.held.insert(name.clone(), bytes),
            None => self.held.remove(&name),
        };
        let gone = old.as_ref().map_or(0, |bytes| hash_item(&name, bytes));
        self.digest = self.digest.wrapping_add(new).wrapping_sub(gone);
        old
    }

    fn wait(&mut self) -> Result<(), Violation> {
        self.store().sync().map_err(|error| violation_while("sync", &error))?;
        self.disk.record_mark(self.done.len() as u64);
        Ok(())
    }

    fn delete_all(&mut self, names: Vec<ItemName>, lot: u32) -> Result<(), Violation> {
        let (disks, names): (Vec<ItemName>, Vec<ItemName>) =
            names.into_iter().partition(|name| matches!(name, ItemName::Disk(_)));
        self.remove_disks(disks)?;
        for names in names.chunks(lot.max(1) as usize) {
            let delete = || {
                let mut group = Group::new();
                for name in names {
                    match name {
                        ItemName::Key(key) => group.remove(key),
                        ItemName::Object(id) => group.delete(*id),
                        ItemName::Disk(_) => {}
                    }
                }
                group
            };
            let mut taken = self.store().submit(delete(), &[]).map(drop);
            if let Err(refused) = &taken
                && matches!(refused.error, Error::NoSpace { .. })
                && let Some((snapshot, was)) = self.kept.take()
            {
                // The snapshot pins freed segments; without it there must be space.
                compare_snapshot(&snapshot, &was)?;
                drop(snapshot);
                taken = self.store().submit(delete(), &[]).map(drop);
            }
            let taken = taken.map_err(|refused| refused.error);
            if let Err(error @ Error::NoSpace { .. }) = &taken {
                let info = self.store().info();
                return Err(Violation(format!("deleting is refused: {error}; {info:?}")));
            }
            let changes = names.iter().map(|name| (name.clone(), None)).collect();
            self.apply_if_accepted(taken, changes)?;
        }
        Ok(())
    }

    fn new_object(&mut self, payload: Arc<[u8]>) -> Result<bool, Violation> {
        let hint = [LifetimeHint::Unknown, LifetimeHint::Hot, LifetimeHint::Cold]
            [self.dice.next_below(3) as usize];
        let mut group = Group::new();
        let id = group.create(self.store().new_object(), hint);
        group.append(id, &payload);
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        self.apply_if_accepted(taken, vec![(ItemName::Object(id), Some(payload))])
    }

    fn change_object(&mut self) -> Result<(), Violation> {
        let objects = self.matching_names(|name| matches!(name, ItemName::Object(_)));
        let len = 1 + self.dice.next_below(9000) as u32;
        let payload = self.random_payload(len);
        if objects.is_empty() || self.dice.once_in(10) {
            return self.new_object(payload).map(drop);
        }
        let name = objects[self.dice.next_below(objects.len() as u64) as usize].clone();
        let ItemName::Object(id) = name else { return Ok(()) };
        let mut bytes = self.held[&name].to_vec();
        let mut group = Group::new();
        match self.dice.next_below(4) {
            0 => {
                group.append(id, &payload);
                bytes.extend_from_slice(&payload);
            }
            1 => {
                let len = self.dice.next_below(bytes.len() as u64 + 100) as usize;
                group.truncate(id, len as u64);
                bytes.resize(len, 0);
            }
            _ => {
                let at = self.dice.next_below(bytes.len() as u64 + 5000) as usize;
                group.write(id, at as u64, &payload);
                let end = at + payload.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[at..end].copy_from_slice(&payload);
            }
        }
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        self.apply_if_accepted(taken, vec![(name, Some(bytes.into()))]).map(drop)
    }

    /// Closes and reopens the store, maybe on another disk.
    fn reopen(&mut self, bytes: Option<Vec<u8>>) -> Result<(), Violation> {
        self.kept = None;
        if let Some(store) = self.store.take() {
            self.usage.cleaned += store.info().counters.cleaned;
        }
        if let Some(bytes) = bytes {
            self.disk = Arc::new(RecordDisk::new(MemoryDisk::new(bytes, 512)));
        }
        let opened = Store::open(self.disk.clone(), &self.options);
        self.store = Some(opened.map_err(|error| violation_while("open", &error))?);
        self.disk.record_mark(self.done.len() as u64);
        Ok(())
    }

    /// Compares and checks everything.
    fn verify_all(&mut self) -> Result<(), Violation> {
        self.wait()?;
        let is = read_all(&self.store())?;
        if is != self.held {
            return Err(Violation(describe_difference(&is, &self.held)));
        }
        assert_store_is_clean(self.disk.clone())
    }

    /// Simulates a kill or a power cut within the act: checks two such states, and continues with
    /// the second.
    fn simulate_power_cut(&mut self, image: Vec<u8>) -> Result<(), Violation> {
        let seed = self.dice.next_u64();
        // Closing writes the open commit: that may be cut, too.
        self.kept = None;
        drop(self.store.take());
        let options = CrashOptions { seed, subsets: 3, exhaustive_sectors: 0 };
        let mut chosen: Vec<(Vec<u8>, usize)> = vec![];
        for (nth, crash) in
            CrashStates::new(image, self.disk.take_events(), options).take(150).enumerate()
        {
            // Reservoir sampling: each state is equally likely.
            let place = if nth < 2 { nth } else { self.dice.next_below(nth as u64 + 1) as usize };
            if place < 2 {
                let waited = crash.marks().last().copied().unwrap_or(0) as usize;
                chosen.truncate(chosen.len().min(2));
                let state = (crash.disk.to_bytes(), waited);
                match chosen.get_mut(place) {
                    Some(old) => *old = state,
                    None => chosen.push(state),
                }
            }
        }
        let digests: HashMap<u64, usize> = std::iter::once(self.before)
            .chain(self.done.iter().map(|(_, digest)| *digest))
            .zip(0..)
            .collect();
        if chosen.is_empty() {
            chosen.push((read_disk_bytes(&*self.disk), self.done.len()));
        }
        let last = chosen.len() - 1;
        for (nth, (bytes, waited)) in chosen.into_iter().enumerate() {
            self.usage.cuts += 1;
            assert_store_is_clean(Arc::new(MemoryDisk::new(bytes.clone(), 512)))?;
            if nth < last {
                let disk = Arc::new(MemoryDisk::new(bytes, 512));
                let store = Store::open(disk.clone(), &self.options);
                let store = store.map_err(|error| violation_while("open after a cut", &error))?;
                self.matching_prefix(&digests, &read_all(&store)?, waited)?;
                store.sync().map_err(|error| violation_while("sync after a cut", &error))?;
                assert_store_is_clean(disk)?;
                continue;
            }
            self.reopen(Some(bytes))?;
            let is = read_all(&self.store())?;
            let groups = self.matching_prefix(&digests, &is, waited)?;
            while self.done.len() > groups {
                let Some((undo, _)) = self.done.pop() else { break };
                for (name, bytes) in undo.into_iter().rev() {
                    self.set_model_bytes(name, bytes);
                }
            }
            if is != self.held {
                return Err(Violation(format!(
                    "after a cut, {}",
                    describe_difference(&is, &self.held)
                )));
            }
        }
        self.wait()?;
        assert_store_is_clean(self.disk.clone())
    }

    /// Returns the number of groups of the act after which a store has these contents.
    fn matching_prefix(
        &self,
        digests: &HashMap<u64, usize>,
        is: &ModelContents,
        waited: usize,
    ) -> Result<usize, Violation> {
        match digests.get(&digest_contents(is)) {
            Some(&groups) if groups >= waited => Ok(groups),
            Some(groups) => Err(Violation(format!(
                "after a cut {groups} groups of the act are there, {waited} were waited for"
            ))),
            None => Err(Violation(format!(
                "after a cut no number of groups shows this; after all of them, {}",
                describe_difference(is, &self.held)
            ))),
        }
    }
}

/// Runs the full check of a store that does not change meanwhile.
fn assert_store_is_clean(disk: Arc<dyn Disk>) -> Result<(), Violation> {
    let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {});
    let report = report.map_err(|error| violation_while("check", &error))?;
    if report.is_clean() {
        return Ok(());
    }
    let told: Vec<String> = report.damage.iter().take(5).map(ToString::to_string).collect();
    Err(Violation(format!("check, {} findings: {}", report.damage.len(), told.join("; "))))
}

fn compare_snapshot(snapshot: &Snapshot, was: &ModelContents) -> Result<(), Violation> {
    for (name, bytes) in was {
        let ItemName::Object(id) = name else { continue };
        let mut have = vec![0xA5; bytes.len() + 1];
        let len = snapshot
            .read(*id, 0, &mut have)
            .map_err(|error| violation_while("snapshot", &error))?;
        if have[..len] != bytes[..] {
            return Err(Violation(format!("object {id} of a snapshot has other bytes")));
        }
    }
    Ok(())
}
