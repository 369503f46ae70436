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

use draconis_device::{CrashOptions, CrashStates, Disk, MemoryDisk, RecordDisk};
use twox_hash::XxHash3_64;

use super::history::read_object;
use super::stores::bytes_of;
use super::{Random, Settings, Shape, Violation};
use crate::check::CheckOptions;
use crate::kv::{Batch, Kv};
use crate::{Error, Group, Hint, LayoutKind, ObjectId, OpenOptions, Snapshot, Store};

/// Statistics of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
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

impl std::ops::AddAssign for Usage {
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
enum Act {
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
enum Name {
    Key(Arc<[u8]>),
    Object(ObjectId),
    Disk(Arc<[u8]>),
}

type ModelContents = BTreeMap<Name, Arc<[u8]>>;

/// Undo record of a group: names with their earlier contents.
type Undo = Vec<(Name, Option<Arc<[u8]>>)>;

struct Workload {
    shape: Shape,
    options: OpenOptions,
    dice: Random,
    disk: Arc<RecordDisk<MemoryDisk>>,
    /// None while it is reopened.
    store: Option<Arc<Store>>,
    held: ModelContents,
    digest: u64,
    /// Undo record and digest of each group since the act began.
    done: Vec<(Undo, u64)>,
    /// Digest when the act began.
    before: u64,
    kept: Option<(Snapshot, ModelContents)>,
    last_load: Option<Act>,
    usage: Usage,
}

/// Returns layout and sizes by number.
fn shape(number: u64) -> Shape {
    let layout = if number.is_multiple_of(2) { LayoutKind::Cow } else { LayoutKind::Log };
    let (page_bytes, segment_bytes, disk_bytes) = match number / 2 % 5 {
        0 => (512, 16 << 10, 1 << 20),
        1 => (4096, 32 << 10, 4 << 20),
        2 => (4096, 64 << 10, 6 << 20),
        3 => (4096, 64 << 10, 16 << 20),
        _ => (4096, 256 << 10, 32 << 20),
    };
    Shape { layout, page_bytes, segment_bytes, disk_bytes }
}

/// Runs so many acts on the store of a seed.
///
/// # Errors
/// The first violation, with its act.
pub fn ordinary(seed: u64, acts: usize) -> Result<Usage, Violation> {
    super::set(Settings::USUAL);
    let run = || {
        let mut user = Workload::begin(seed)?;
        for nth in 0..acts {
            let act = user.choose();
            log::debug!("act {nth}: {act:?}");
            user.act(act).map_err(|Violation(why)| {
                Violation(format!("{:?}: act {nth}, {act:?}: {why}", user.shape))
            })?;
        }
        Ok(user.usage)
    };
    match std::panic::catch_unwind(run) {
        Ok(done) => done,
        Err(panic) => Err(Violation::of_panic("ordinary use", &*panic)),
    }
}

fn failed(doing: &str, error: &Error) -> Violation {
    Violation(format!("{doing}: {error}"))
}

fn hash_of(name: &Name, bytes: &[u8]) -> u64 {
    let of = match name {
        Name::Key(key) => XxHash3_64::oneshot(key),
        Name::Disk(name) => XxHash3_64::oneshot_with_seed(1, name),
        Name::Object(id) => crate::codec::mix(id.0),
    };
    crate::codec::mix(of ^ XxHash3_64::oneshot(bytes).rotate_left(9))
}

fn digest_of(held: &ModelContents) -> u64 {
    held.iter().fold(0, |sum, (name, bytes)| sum.wrapping_add(hash_of(name, bytes)))
}

fn key_of(number: u32) -> Name {
    Name::Key(format!("k{number:08}").into_bytes().into())
}

/// Reads the contents of a store.
fn read_all(store: &Arc<Store>) -> Result<ModelContents, Violation> {
    let said = |error: Error| failed("reading all", &error);
    let mut held = ModelContents::new();
    let disks = store.disks().map_err(said)?;
    for disk in &disks {
        let bytes = read_object(store, disk.id, disk.len).map_err(said)?;
        held.insert(Name::Disk(disk.name.as_slice().into()), bytes);
    }
    for (id, len) in store.list().map_err(said)? {
        if disks.iter().any(|disk| disk.id == id) {
            continue;
        }
        held.insert(Name::Object(id), read_object(store, id, len).map_err(said)?);
    }
    for pair in Kv::new(store.clone()).scan::<RangeFull>(&..) {
        let (key, value) = pair.map_err(said)?;
        held.insert(Name::Key(key.into()), value.into());
    }
    Ok(held)
}

/// Returns a description of the first difference.
fn differ(is: &ModelContents, should: &ModelContents) -> String {
    let wrong = is.keys().chain(should.keys()).find(|name| is.get(*name) != should.get(*name));
    let told = |held: &ModelContents, name| held.get(name).map(|bytes| bytes.len());
    match wrong {
        Some(Name::Key(key)) => {
            let name = Name::Key(key.clone());
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
        let shape = shape(seed);
        let cache_bytes = [128 << 10, 1 << 20, 64 << 20][dice.below(3) as usize];
        let options = OpenOptions { cache_bytes, read_only: false };
        // Earlier bytes of the disk are not zeros.
        let disk = RecordDisk::new(MemoryDisk::new(vec![0xEE; shape.disk_bytes], 512));
        let disk = Arc::new(disk);
        Store::create(disk.clone(), &shape.options()).map_err(|error| failed("create", &error))?;
        let store = Store::open(disk.clone(), &options).map_err(|error| failed("open", &error))?;
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
            usage: Usage::default(),
        })
    }

    fn store(&self) -> Arc<Store> {
        self.store.clone().expect("it was opened, or the run is over")
    }

    /// Returns the most keys for a store of this size.
    fn keys_max(&self) -> u64 {
        self.shape.disk_bytes as u64 / 64
    }

    fn choose(&mut self) -> Act {
        let keys_max = self.keys_max();
        let dice = &mut self.dice;
        let lens = [0, 15, 15, 40, 213, 213, 1000, 4000, 5000];
        let len = lens[dice.below(lens.len() as u64) as usize] + dice.below(3) as u32;
        // A group is far shorter than a store.
        let most = (self.shape.disk_bytes as u32 / 32 / (len + 40)).max(1);
        let lot = [1, 3, 40, 1000, 5000][dice.below(5) as usize].min(most);
        let keys = 1 + dice
            .below(keys_max.min(u64::from(self.shape.disk_bytes as u32 / (len + 60))))
            as u32;
        let first = dice.below(keys_max) as u32;
        match dice.below(29) {
            27 | 28 => Act::Resize { percent: 50 + dice.below(51) },
            24..=26 => Act::Disks { times: 1 + dice.below(40) as u32 },
            0..=3 => Act::Load { first: if dice.once_in(2) { 0 } else { first }, keys, len, lot },
            4..=6 => Act::LoadAgain,
            7 | 8 => Act::Overwrite { keys: keys.min(3000), len: len * 2 + 1 },
            9 | 10 => Act::DeleteHalf { lot: lot.min(100) },
            11 | 12 => Act::DeleteRange { first, keys, lot: lot.min(100) },
            13 | 14 => Act::Fill { len, lot },
            15 => Act::FillObjects { len: [3000, 20_000, 70_000][dice.below(3) as usize] },
            16 | 17 => Act::ChangeObjects { times: 1 + dice.below(200) as u32 },
            18 => Act::Empty { lot: [1, 1, 20, 300][dice.below(4) as usize] },
            19 | 20 => Act::Snapshot,
            21 | 22 => Act::Reopen { times: [1, 1, 3, 12][dice.below(4) as usize] },
            _ => Act::Checkpoint,
        }
    }

    /// Performs an act, then compares and checks everything. One in five is cut short.
    fn act(&mut self, act: Act) -> Result<(), Violation> {
        let is_cut = self.dice.once_in(5);
        self.done.clear();
        self.before = self.digest;
        self.disk.take();
        let image = is_cut.then(|| bytes_of(&*self.disk));
        self.perform(act)?;
        match image {
            Some(image) => self.cut(image)?,
            None => self.look()?,
        }
        self.usage.acts += 1;
        Ok(())
    }

    fn perform(&mut self, act: Act) -> Result<(), Violation> {
        match act {
            Act::Load { first, keys, len, lot } => {
                self.last_load = Some(act);
                self.load(first, keys, len, lot)?;
            }
            Act::LoadAgain => {
                if let Some(Act::Load { first, keys, len, lot }) = self.last_load {
                    self.load(first, keys, len, lot)?;
                }
            }
            Act::Overwrite { keys, len } => {
                let max = self.keys_max();
                for _ in 0..keys {
                    let (number, len) = (self.dice.below(max), self.dice.below(u64::from(len)));
                    let value = self.payload(len as u32);
                    if !self.put(vec![(key_of(number as u32), value)])? {
                        break;
                    }
                }
            }
            Act::DeleteHalf { lot } => {
                let all = self.names(|name| matches!(name, Name::Key(_)));
                self.delete_all(all.into_iter().step_by(2).collect(), lot)?;
            }
            Act::DeleteRange { first, keys, lot } => {
                // Some never existed: no error, and no lost space.
                let all = (first..first + keys.min(5000)).map(key_of).collect();
                self.delete_all(all, lot)?;
            }
            Act::Fill { len, lot } => self.fill(len, lot)?,
            Act::FillObjects { len } => {
                loop {
                    let payload = self.payload(len);
                    if !self.new_object(payload)? {
                        break;
                    }
                }
                self.give_up_some()?;
            }
            Act::ChangeObjects { times } => {
                for _ in 0..times {
                    self.change_object()?;
                }
            }
            Act::Disks { times } => {
                for nth in 0..times {
                    self.change_disks(nth)?;
                }
            }
            Act::Empty { lot } => {
                let all = self.names(|_| true);
                self.delete_all(all, lot)?;
            }
            Act::Snapshot => match self.kept.take() {
                None => self.kept = Some((self.store().snapshot(), self.held.clone())),
                Some((snapshot, was)) => compare(&snapshot, &was)?,
            },
            Act::Reopen { times } => {
                for _ in 0..times {
                    self.wait()?;
                    self.reopen(None)?;
                }
            }
            Act::Resize { percent } => self.resize(percent)?,
            Act::Checkpoint => {
                self.store().checkpoint().map_err(|error| failed("checkpoint", &error))?;
                self.disk.mark(self.done.len() as u64);
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
            Err(error) => return Err(failed("another length", &error)),
        }
        self.reopen(None)
    }

    fn names(&self, is_wanted: impl Fn(&Name) -> bool) -> Vec<Name> {
        self.held.keys().filter(|name| is_wanted(name)).cloned().collect()
    }

    fn payload(&mut self, len: u32) -> Arc<[u8]> {
        let mut bytes = vec![0; len as usize];
        self.dice.fill(&mut bytes);
        bytes.into()
    }

    fn load(&mut self, first: u32, keys: u32, len: u32, lot: u32) -> Result<(), Violation> {
        let mut from = first;
        while from < first + keys {
            let to = (from + lot).min(first + keys);
            let pairs = (from..to).map(|number| (key_of(number), self.payload(len))).collect();
            if !self.put(pairs)? {
                return Ok(());
            }
            from = to;
        }
        Ok(())
    }

    fn fill(&mut self, len: u32, lot: u32) -> Result<(), Violation> {
        let first = self.dice.below(self.keys_max()) as u32;
        let mut next = first;
        loop {
            let pairs = (next..next + lot).map(|number| (key_of(number), self.payload(len)));
            let pairs = pairs.collect();
            if !self.put(pairs)? {
                break;
            }
            next += lot;
        }
        if self.dice.once_in(3) {
            self.wait()?;
            self.reopen(None)?;
        }
        self.give_up_some()
    }

    /// Deletes a few items of a full store, one in a group.
    fn give_up_some(&mut self) -> Result<(), Violation> {
        for _ in 0..1 + self.dice.below(30) {
            let Some(last) = (self.held.len() as u64).checked_sub(1) else { return Ok(()) };
            let nth = self.dice.below(last + 1) as usize;
            let name = self.held.keys().nth(nth).cloned();
            self.delete_all(name.into_iter().collect(), 1)?;
        }
        Ok(())
    }

    /// Puts pairs as one group; returns false if there was no space.
    fn put(&mut self, pairs: Vec<(Name, Arc<[u8]>)>) -> Result<bool, Violation> {
        let mut batch = Batch::new();
        for (name, value) in &pairs {
            if let Name::Key(key) = name {
                batch.put(key, value);
            }
        }
        let taken = Kv::new(self.store()).write(batch).map(drop).map_err(|refused| refused.1);
        let changes = pairs.into_iter().map(|(name, value)| (name, Some(value)));
        self.taken(taken, changes.collect())
    }

    /// Returns true if a group was accepted, and applies its changes to the model.
    fn taken(
        &mut self,
        taken: Result<(), Error>,
        changes: Vec<(Name, Option<Arc<[u8]>>)>,
    ) -> Result<bool, Violation> {
        match taken {
            Ok(()) => {
                let mut undo = Undo::new();
                for (name, bytes) in changes {
                    undo.push((name.clone(), self.set(name, bytes)));
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
            Err(error) => Err(failed("submit", &error)),
        }
    }

    /// Sets the bytes of a name, or removes it; returns the old bytes.
    fn set(&mut self, name: Name, bytes: Option<Arc<[u8]>>) -> Option<Arc<[u8]>> {
        let new = bytes.as_ref().map_or(0, |bytes| hash_of(&name, bytes));
        let old = match bytes {
            Some(bytes) => self.held.insert(name.clone(), bytes),
            None => self.held.remove(&name),
        };
        let gone = old.as_ref().map_or(0, |bytes| hash_of(&name, bytes));
        self.digest = self.digest.wrapping_add(new).wrapping_sub(gone);
        old
    }

    fn wait(&mut self) -> Result<(), Violation> {
        self.store().sync().map_err(|error| failed("sync", &error))?;
        self.disk.mark(self.done.len() as u64);
        Ok(())
    }

    fn delete_all(&mut self, names: Vec<Name>, lot: u32) -> Result<(), Violation> {
        let (disks, names): (Vec<Name>, Vec<Name>) =
            names.into_iter().partition(|name| matches!(name, Name::Disk(_)));
        self.remove_disks(disks)?;
        for names in names.chunks(lot.max(1) as usize) {
            let delete = || {
                let mut group = Group::new();
                for name in names {
                    match name {
                        Name::Key(key) => group.remove(key),
                        Name::Object(id) => group.delete(*id),
                        Name::Disk(_) => {}
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
                compare(&snapshot, &was)?;
                drop(snapshot);
                taken = self.store().submit(delete(), &[]).map(drop);
            }
            let taken = taken.map_err(|refused| refused.error);
            if let Err(error @ Error::NoSpace { .. }) = &taken {
                let info = self.store().info();
                return Err(Violation(format!("deleting is refused: {error}; {info:?}")));
            }
            let changes = names.iter().map(|name| (name.clone(), None)).collect();
            self.taken(taken, changes)?;
        }
        Ok(())
    }

    fn new_object(&mut self, payload: Arc<[u8]>) -> Result<bool, Violation> {
        let hint = [Hint::Unknown, Hint::Hot, Hint::Cold][self.dice.below(3) as usize];
        let mut group = Group::new();
        let id = group.create(self.store().new_object(), hint);
        group.append(id, &payload);
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        self.taken(taken, vec![(Name::Object(id), Some(payload))])
    }

    fn change_object(&mut self) -> Result<(), Violation> {
        let objects = self.names(|name| matches!(name, Name::Object(_)));
        let len = 1 + self.dice.below(9000) as u32;
        let payload = self.payload(len);
        if objects.is_empty() || self.dice.once_in(10) {
            return self.new_object(payload).map(drop);
        }
        let name = objects[self.dice.below(objects.len() as u64) as usize].clone();
        let Name::Object(id) = name else { return Ok(()) };
        let mut bytes = self.held[&name].to_vec();
        let mut group = Group::new();
        match self.dice.below(4) {
            0 => {
                group.append(id, &payload);
                bytes.extend_from_slice(&payload);
            }
            1 => {
                let len = self.dice.below(bytes.len() as u64 + 100) as usize;
                group.truncate(id, len as u64);
                bytes.resize(len, 0);
            }
            _ => {
                let at = self.dice.below(bytes.len() as u64 + 5000) as usize;
                group.write(id, at as u64, &payload);
                let end = at + payload.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[at..end].copy_from_slice(&payload);
            }
        }
        let taken = self.store().submit(group, &[]).map(drop).map_err(|refused| refused.error);
        self.taken(taken, vec![(name, Some(bytes.into()))]).map(drop)
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
        self.store = Some(opened.map_err(|error| failed("open", &error))?);
        self.disk.mark(self.done.len() as u64);
        Ok(())
    }

    /// Compares and checks everything.
    fn look(&mut self) -> Result<(), Violation> {
        self.wait()?;
        let is = read_all(&self.store())?;
        if is != self.held {
            return Err(Violation(differ(&is, &self.held)));
        }
        check(self.disk.clone())
    }

    /// Simulates a kill or a power cut within the act: checks two such states, and continues with
    /// the second.
    fn cut(&mut self, image: Vec<u8>) -> Result<(), Violation> {
        let seed = self.dice.next_u64();
        // Closing writes the open commit: that may be cut, too.
        self.kept = None;
        drop(self.store.take());
        let options = CrashOptions { seed, subsets: 3, exhaustive_sectors: 0 };
        let mut chosen: Vec<(Vec<u8>, usize)> = vec![];
        for (nth, crash) in CrashStates::new(image, self.disk.take(), options).take(150).enumerate()
        {
            // Reservoir sampling: each state is equally likely.
            let place = if nth < 2 { nth } else { self.dice.below(nth as u64 + 1) as usize };
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
            chosen.push((bytes_of(&*self.disk), self.done.len()));
        }
        let last = chosen.len() - 1;
        for (nth, (bytes, waited)) in chosen.into_iter().enumerate() {
            self.usage.cuts += 1;
            check(Arc::new(MemoryDisk::new(bytes.clone(), 512)))?;
            if nth < last {
                let disk = Arc::new(MemoryDisk::new(bytes, 512));
                let store = Store::open(disk.clone(), &self.options);
                let store = store.map_err(|error| failed("open after a cut", &error))?;
                self.prefix(&digests, &read_all(&store)?, waited)?;
                store.sync().map_err(|error| failed("sync after a cut", &error))?;
                check(disk)?;
                continue;
            }
            self.reopen(Some(bytes))?;
            let is = read_all(&self.store())?;
            let groups = self.prefix(&digests, &is, waited)?;
            while self.done.len() > groups {
                let Some((undo, _)) = self.done.pop() else { break };
                for (name, bytes) in undo.into_iter().rev() {
                    self.set(name, bytes);
                }
            }
            if is != self.held {
                return Err(Violation(format!("after a cut, {}", differ(&is, &self.held))));
            }
        }
        self.wait()?;
        check(self.disk.clone())
    }

    /// Returns the number of groups of the act after which a store has these contents.
    fn prefix(
        &self,
        digests: &HashMap<u64, usize>,
        is: &ModelContents,
        waited: usize,
    ) -> Result<usize, Violation> {
        match digests.get(&digest_of(is)) {
            Some(&groups) if groups >= waited => Ok(groups),
            Some(groups) => Err(Violation(format!(
                "after a cut {groups} groups of the act are there, {waited} were waited for"
            ))),
            None => Err(Violation(format!(
                "after a cut no number of groups shows this; after all of them, {}",
                differ(is, &self.held)
            ))),
        }
    }
}

/// Runs the full check of a store that does not change meanwhile.
fn check(disk: Arc<dyn Disk>) -> Result<(), Violation> {
    let report = Store::check(disk, &CheckOptions::default(), &mut |_, _| {});
    let report = report.map_err(|error| failed("check", &error))?;
    if report.is_clean() {
        return Ok(());
    }
    let told: Vec<String> = report.damage.iter().take(5).map(ToString::to_string).collect();
    Err(Violation(format!("check, {} findings: {}", report.damage.len(), told.join("; "))))
}

fn compare(snapshot: &Snapshot, was: &ModelContents) -> Result<(), Violation> {
    for (name, bytes) in was {
        let Name::Object(id) = name else { continue };
        let mut have = vec![0xA5; bytes.len() + 1];
        let len = snapshot.read(*id, 0, &mut have).map_err(|error| failed("snapshot", &error))?;
        if have[..len] != bytes[..] {
            return Err(Violation(format!("object {id} of a snapshot has other bytes")));
        }
    }
    Ok(())
}
