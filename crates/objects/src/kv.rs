//! A key-value store: keys in order, values of any length.
//!
//! ```text
//!   key ─▶ value, in the log       longer than 128 KiB: an object of its own
//!                                  up to 24 bytes: in the index
//! ```
//!
//! It is the store's own index under other keys, so it has all that the store promises. There
//! is no compaction: what is overwritten makes segments empty, and the cleaner works as much
//! as is written.

pub(crate) mod count;

use std::collections::VecDeque;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::entry::{DecodedKey, Entry, Key, PayloadRef, decode_key, value_key};
use crate::index::cursor::Cursor;
use crate::store::Snapshot;
use crate::{Error, Group, Refused, Result, Store, Ticket};

/// The key-value store of a [`Store`].
#[derive(Clone, Debug)]
pub struct Kv {
    store: Arc<Store>,
}

/// Changes of keys that become visible together.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    group: Group,
}

impl Batch {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives `key` a value.
    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.group.put(key, value);
    }

    /// Takes `key` away, if it is there.
    pub fn delete(&mut self, key: &[u8]) {
        self.group.remove(key);
    }

    /// Whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.group.is_empty()
    }

    /// Keys and values, in bytes.
    pub fn len_bytes(&self) -> usize {
        self.group.len_bytes()
    }
}

impl Kv {
    /// The keys of `store`.
    pub fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    /// The store that the keys are in.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Gives `key` a value; durable after [`Kv::wait`].
    ///
    /// # Errors
    /// As [`Store::submit`]; a key is at most 64 KiB long, and a 32nd of a segment.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<Ticket> {
        let mut group = Group::new();
        group.put(key, value);
        self.store.submit_ref(&group, &[])
    }

    /// Takes `key` away, if it is there; durable after [`Kv::wait`].
    ///
    /// # Errors
    /// As [`Store::submit`].
    pub fn delete(&self, key: &[u8]) -> Result<Ticket> {
        let mut group = Group::new();
        group.remove(key);
        self.store.submit_ref(&group, &[])
    }

    /// Makes all changes of a batch, or none.
    ///
    /// # Errors
    /// The batch comes back.
    pub fn write(&self, batch: Batch) -> std::result::Result<Ticket, Box<(Batch, Error)>> {
        self.store
            .submit(batch.group, &[])
            .map_err(|Refused { group, error }| Box::new((Batch { group }, error)))
    }

    /// Returns once a change is durable.
    ///
    /// # Errors
    /// As [`Store::wait`].
    pub fn wait(&self, ticket: Ticket) -> Result<()> {
        self.store.wait(ticket)
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] rather than a value that was not put there.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut before = None;
        loop {
            let (entry, _view) = self.store.find_key(&value_key(key))?;
            let (id, len) = match entry {
                Some(Entry::Data(data)) => return self.store.value_of(&data).map(Some),
                Some(Entry::ValueObject(id, len)) => (id, len),
                Some(Entry::Inline(value)) => return Ok(Some(value.to_vec())),
                _ => return Ok(None),
            };
            match self.store.len(id) {
                Ok(have) if have == len => {
                    let mut value = allocate_value(len, self.store.disk_bytes())?;
                    match self.store.read(id, 0, &mut value) {
                        Ok(read) if read == value.len() => return Ok(Some(value)),
                        Ok(_) | Err(Error::NoObject(_)) => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(_) | Err(Error::NoObject(_)) => {}
                Err(error) => return Err(error),
            }
            // Replaced just now: look again. What was replaced does not come back.
            if before.replace(id) == Some(id) {
                return Err(NO_VALUE);
            }
        }
    }

    /// All keys as they are now; see [`KvSnapshot::get`] and [`KvSnapshot::scan`].
    pub fn snapshot(&self) -> KvSnapshot {
        KvSnapshot { snapshot: self.store.snapshot() }
    }

    /// Keys and values of a range as they are now, in order; from both ends.
    pub fn scan<R: RangeBounds<[u8]> + ?Sized>(&self, range: &R) -> Scan {
        self.snapshot().scan(range)
    }
}

/// A key that leads to an object which is not there, or is not what the key says. Where the
/// key lies is not known any more.
const NO_VALUE: Error = Error::Corrupt { what: "a key whose long value is not there", at_bytes: 0 };

/// Memory for a value, which lies on a disk of `disk_bytes` as a whole.
pub(crate) fn allocate_value(len: u64, disk_bytes: u64) -> Result<Vec<u8>> {
    let longer = Error::Misuse("a value longer than memory");
    if len > disk_bytes {
        return Err(Error::Corrupt { what: "a value longer than its disk", at_bytes: 0 });
    }
    let len = usize::try_from(len).map_err(|_| longer.clone())?;
    let mut value = vec![];
    value.try_reserve_exact(len).map_err(|_| longer)?;
    value.resize(len, 0);
    Ok(value)
}

/// The keys as they were at one moment.
#[derive(Clone, Debug)]
pub struct KvSnapshot {
    snapshot: Snapshot,
}

impl KvSnapshot {
    /// The value that `key` had.
    ///
    /// # Errors
    /// As [`Kv::get`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let entry = self.snapshot.view().index().get(self.snapshot.io(), &value_key(key))?;
        entry.map(|entry| self.value(&entry)).transpose()
    }

    fn value(&self, entry: &Entry) -> Result<Vec<u8>> {
        match entry {
            Entry::Data(data) => {
                let mut value = vec![0; data.len as usize];
                self.snapshot.read_data(data, &mut value)?;
                Ok(value)
            }
            Entry::Inline(value) => Ok(value.to_vec()),
            Entry::ValueObject(id, len) => {
                let is_there = match self.snapshot.len(*id) {
                    Ok(have) => have == *len,
                    Err(Error::NoObject(_)) => false,
                    Err(error) => return Err(error),
                };
                if !is_there {
                    return Err(NO_VALUE);
                }
                let mut value = allocate_value(*len, self.snapshot.io().geometry.disk_bytes)?;
                self.snapshot.read(*id, 0, &mut value)?;
                Ok(value)
            }
            _ => Err(Error::Misuse("a key that leads to no value")),
        }
    }

    /// Keys and values of a range, in order; from both ends.
    pub fn scan<R: RangeBounds<[u8]> + ?Sized>(&self, range: &R) -> Scan {
        let behind = |key: &[u8]| {
            let mut key = value_key(key);
            key.push(0);
            key
        };
        let from = match range.start_bound() {
            Bound::Included(key) => value_key(key),
            Bound::Excluded(key) => behind(key),
            Bound::Unbounded => value_key(&[]),
        };
        let to = match range.end_bound() {
            Bound::Included(key) => behind(key),
            Bound::Excluded(key) => value_key(key),
            Bound::Unbounded => {
                // Behind all that begin like a value.
                value_key(&[]).into_iter().map(|kind| kind.saturating_add(1)).collect()
            }
        };
        Scan { snapshot: self.clone(), from, to, front: End::default(), back: End::default() }
    }
}

/// Keys and values of a range of a snapshot. Where the index is damaged an error stands for what
/// is lost, and what lies behind it follows.
#[derive(Debug)]
pub struct Scan {
    snapshot: KvSnapshot,
    /// Keys from here on, and before that, were not given yet.
    from: Key,
    to: Key,
    front: End,
    back: End,
}

/// One end of a scan: what was read ahead of it.
#[derive(Debug, Default)]
struct End {
    cursor: Option<Cursor>,
    ready: VecDeque<(Key, PrefetchedValue)>,
    /// Pairs that were asked for last.
    asked: usize,
    is_over: bool,
}

#[derive(Debug)]
enum PrefetchedValue {
    Value(Result<Vec<u8>>),
    /// A long value is read when it is given.
    Long(Entry),
    Failed(Error),
}

/// What is read ahead of a scan at most: pairs, and bytes of values.
const AHEAD: usize = 256;
const AHEAD_BYTES: usize = 512 << 10;

type Pair = Result<(Vec<u8>, Vec<u8>)>;

impl Scan {
    fn end(&mut self, is_front: bool) -> &mut End {
        if is_front { &mut self.front } else { &mut self.back }
    }

    /// The next pair of one end.
    fn next_pair(&mut self, is_front: bool) -> Option<Pair> {
        if self.from >= self.to {
            return None;
        }
        if self.end(is_front).ready.is_empty() {
            self.read_ahead(is_front);
        }
        let (key, ready) = self.end(is_front).ready.pop_front()?;
        let value = match ready {
            PrefetchedValue::Value(value) => value,
            PrefetchedValue::Long(entry) => self.snapshot.value(&entry),
            PrefetchedValue::Failed(error) => return Some(Err(error)),
        };
        // What the other end gave is not given again.
        if key < self.from || key >= self.to {
            self.from = self.to.clone();
            return None;
        }
        let name = match decode_key(&key) {
            Some(DecodedKey::Value(name)) => name.to_vec(),
            _ => return None,
        };
        if is_front {
            self.from = key;
            self.from.push(0);
        } else {
            self.to = key;
        }
        Some(value.map(|value| (name, value)))
    }

    /// Reads what comes next at one end: a few pairs at first, then more.
    fn read_ahead(&mut self, is_front: bool) {
        if self.end(is_front).is_over {
            return;
        }
        let snapshot = self.snapshot.clone();
        let asked = self.end(is_front).asked.saturating_mul(4).clamp(4, AHEAD);
        self.end(is_front).asked = asked;
        let mut found: Vec<(Key, Entry)> = Vec::with_capacity(asked);
        let failed = self.look_ahead(&snapshot.snapshot, is_front, asked, &mut found).err();
        let near: Vec<&PayloadRef> = found
            .iter()
            .filter_map(|(_, entry)| match entry {
                Entry::Data(data) => Some(data),
                _ => None,
            })
            .collect();
        let mut values = snapshot.snapshot.read_many(&near).into_iter();
        let end = self.end(is_front);
        for (key, entry) in found {
            let ready = match entry {
                Entry::Data(_) => PrefetchedValue::Value(values.next().unwrap_or(Ok(vec![]))),
                Entry::Inline(value) => PrefetchedValue::Value(Ok(value.to_vec())),
                long => PrefetchedValue::Long(long),
            };
            end.ready.push_back((key, ready));
        }
        if let Some(error) = failed {
            // What comes behind it is given next.
            end.ready.push_back((Key::new(), PrefetchedValue::Failed(error)));
        }
    }

    fn look_ahead(
        &mut self,
        snapshot: &Snapshot,
        is_front: bool,
        asked: usize,
        found: &mut Vec<(Key, Entry)>,
    ) -> Result<()> {
        let (view, io) = (snapshot.view(), snapshot.io());
        let (from, to) = (self.from.clone(), self.to.clone());
        let end = self.end(is_front);
        let cursor = match &mut end.cursor {
            Some(cursor) => cursor,
            none if is_front => none.insert(Cursor::at(view, io, (&from, &to))?),
            none => none.insert(Cursor::before(view, io, (&from, &to))?),
        };
        let mut bytes = 0;
        while found.len() < asked && bytes < AHEAD_BYTES {
            match cursor.next(view, io)? {
                Some((key, entry)) if key >= from && key < to => {
                    bytes = bytes.saturating_add(crate::codec::to_usize_saturating(entry.covers()));
                    found.push((key, entry));
                }
                _ => {
                    end.is_over = true;
                    break;
                }
            }
        }
        Ok(())
    }
}

impl Iterator for Scan {
    type Item = Pair;

    fn next(&mut self) -> Option<Pair> {
        self.next_pair(true)
    }
}

impl DoubleEndedIterator for Scan {
    fn next_back(&mut self) -> Option<Pair> {
        self.next_pair(false)
    }
}
