//! Key-value store: keys in order, values of any length.
//!
//! ```text
//!   key ─▶ value, in the log       longer than 128 KiB: an object of its own
//!                                  up to 24 bytes: in the index
//! ```
//!
//! It shares the index of the store, under other keys, and has all guarantees of the store. Values
//! are not compacted: overwritten values leave dead bytes in segments, which the cleaner frees at
//! the pace of writes.

pub(crate) mod count;

use std::collections::VecDeque;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::entry::{DecodedKey, Entry, Key, PayloadRef, decode_key, value_key};
use crate::index::cursor::Cursor;
use crate::store::Snapshot;
use crate::{Error, Group, RefusedGroup, Result, Store, Ticket};

/// Key-value store of a [`Store`].
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
    /// Creates an empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the value of `key`.
    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.group.put(key, value);
    }

    /// Deletes `key`, if it exists.
    pub fn delete(&mut self, key: &[u8]) {
        self.group.remove(key);
    }

    /// Returns true if the batch has no changes.
    pub fn is_empty(&self) -> bool {
        self.group.is_empty()
    }

    /// Returns the bytes of keys and values.
    pub fn len_bytes(&self) -> usize {
        self.group.len_bytes()
    }
}

impl Kv {
    /// Returns the key-value store of `store`.
    pub fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    /// Returns the store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Sets the value of `key`; durable after [`Kv::wait`].
    ///
    /// # Errors
    /// As [`Store::submit`]; a key is at most 64 KiB long, and a 32nd of a segment.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<Ticket> {
        let mut group = Group::new();
        group.put(key, value);
        self.store.submit_ref(&group, &[])
    }

    /// Deletes `key`, if it exists; durable after [`Kv::wait`].
    ///
    /// # Errors
    /// As [`Store::submit`].
    pub fn delete(&self, key: &[u8]) -> Result<Ticket> {
        let mut group = Group::new();
        group.remove(key);
        self.store.submit_ref(&group, &[])
    }

    /// Applies all changes of a batch, or none.
    ///
    /// # Errors
    /// The error, with the batch.
    pub fn write(&self, batch: Batch) -> std::result::Result<Ticket, Box<(Batch, Error)>> {
        self.store
            .submit(batch.group, &[])
            .map_err(|RefusedGroup { group, error }| Box::new((Batch { group }, error)))
    }

    /// Waits until a change is durable.
    ///
    /// # Errors
    /// As [`Store::wait`].
    pub fn wait(&self, ticket: Ticket) -> Result<()> {
        self.store.wait(ticket)
    }

    /// Returns the value of `key`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] rather than a wrong value.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut before = None;
        loop {
            let (entry, _view) = self.store.find_key(&value_key(key))?;
            let (id, len) = match entry {
                Some(Entry::Data(data)) => return self.store.read_value_payload(&data).map(Some),
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
            // Replaced just now: look again. A replaced value object does not come back.
            if before.replace(id) == Some(id) {
                return Err(MISSING_VALUE_ERROR);
            }
        }
    }

    /// Returns a snapshot of all keys; see [`KvSnapshot::get`] and [`KvSnapshot::scan`].
    pub fn snapshot(&self) -> KvSnapshot {
        KvSnapshot { snapshot: self.store.snapshot() }
    }

    /// Returns the current keys and values of a range, in order; from both ends.
    pub fn scan<R: RangeBounds<[u8]> + ?Sized>(&self, range: &R) -> Scan {
        self.snapshot().scan(range)
    }
}

/// A key whose value object is missing or has another length. The key's address is not known any
/// more.
const MISSING_VALUE_ERROR: Error =
    Error::Corrupt { what: "a key whose long value is not there", at_bytes: 0 };

/// Allocates memory for a value, which cannot be longer than its disk.
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

/// Snapshot of the keys.
#[derive(Clone, Debug)]
pub struct KvSnapshot {
    snapshot: Snapshot,
}

impl KvSnapshot {
    /// Returns the value of `key` in the snapshot.
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
                    return Err(MISSING_VALUE_ERROR);
                }
                let mut value = allocate_value(*len, self.snapshot.io().geometry.disk_bytes)?;
                self.snapshot.read(*id, 0, &mut value)?;
                Ok(value)
            }
            _ => Err(Error::Misuse("a key that leads to no value")),
        }
    }

    /// Returns keys and values of a range, in order; from both ends.
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
                // After all keys of values.
                value_key(&[]).into_iter().map(|kind| kind.saturating_add(1)).collect()
            }
        };
        Scan {
            snapshot: self.clone(),
            from,
            to,
            front: ScanEnd::default(),
            back: ScanEnd::default(),
        }
    }
}

/// Keys and values of a range of a snapshot. A damaged part of the index yields one error; the scan
/// continues after it.
#[derive(Debug)]
pub struct Scan {
    snapshot: KvSnapshot,
    /// Bounds of the keys that were not yielded yet.
    from: Key,
    to: Key,
    front: ScanEnd,
    back: ScanEnd,
}

/// One end of a scan, with its read-ahead.
#[derive(Debug, Default)]
struct ScanEnd {
    cursor: Option<Cursor>,
    ready: VecDeque<(Key, PrefetchedValue)>,
    /// Pairs of the last read-ahead.
    asked: usize,
    is_over: bool,
}

#[derive(Debug)]
enum PrefetchedValue {
    Value(Result<Vec<u8>>),
    /// A long value is read when it is yielded.
    Long(Entry),
    Failed(Error),
}

/// Read-ahead limits of a scan: pairs, and bytes of values.
const READ_AHEAD_PAIRS: usize = 256;
const READ_AHEAD_BYTES: usize = 512 << 10;

type PairResult = Result<(Vec<u8>, Vec<u8>)>;

impl Scan {
    fn scan_end(&mut self, is_front: bool) -> &mut ScanEnd {
        if is_front { &mut self.front } else { &mut self.back }
    }

    /// Returns the next pair of one end.
    fn next_pair(&mut self, is_front: bool) -> Option<PairResult> {
        if self.from >= self.to {
            return None;
        }
        if self.scan_end(is_front).ready.is_empty() {
            self.read_ahead(is_front);
        }
        let (key, ready) = self.scan_end(is_front).ready.pop_front()?;
        let value = match ready {
            PrefetchedValue::Value(value) => value,
            PrefetchedValue::Long(entry) => self.snapshot.value(&entry),
            PrefetchedValue::Failed(error) => return Some(Err(error)),
        };
        // The other end may have yielded it.
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

    /// Reads the next pairs of one end: a few at first, then more.
    fn read_ahead(&mut self, is_front: bool) {
        if self.scan_end(is_front).is_over {
            return;
        }
        let snapshot = self.snapshot.clone();
        let asked = self.scan_end(is_front).asked.saturating_mul(4).clamp(4, READ_AHEAD_PAIRS);
        self.scan_end(is_front).asked = asked;
        let mut found: Vec<(Key, Entry)> = Vec::with_capacity(asked);
        let failed = self.collect_read_ahead(&snapshot.snapshot, is_front, asked, &mut found).err();
        let near: Vec<&PayloadRef> = found
            .iter()
            .filter_map(|(_, entry)| match entry {
                Entry::Data(data) => Some(data),
                _ => None,
            })
            .collect();
        let mut values = snapshot.snapshot.read_payloads(&near).into_iter();
        let end = self.scan_end(is_front);
        for (key, entry) in found {
            let ready = match entry {
                Entry::Data(_) => PrefetchedValue::Value(values.next().unwrap_or(Ok(vec![]))),
                Entry::Inline(value) => PrefetchedValue::Value(Ok(value.to_vec())),
                long => PrefetchedValue::Long(long),
            };
            end.ready.push_back((key, ready));
        }
        if let Some(error) = failed {
            // The pairs after it follow.
            end.ready.push_back((Key::new(), PrefetchedValue::Failed(error)));
        }
    }

    fn collect_read_ahead(
        &mut self,
        snapshot: &Snapshot,
        is_front: bool,
        asked: usize,
        found: &mut Vec<(Key, Entry)>,
    ) -> Result<()> {
        let (view, io) = (snapshot.view(), snapshot.io());
        let (from, to) = (self.from.clone(), self.to.clone());
        let end = self.scan_end(is_front);
        let cursor = match &mut end.cursor {
            Some(cursor) => cursor,
            none if is_front => none.insert(Cursor::forward(view, io, (&from, &to))?),
            none => none.insert(Cursor::backward(view, io, (&from, &to))?),
        };
        let mut bytes = 0;
        while found.len() < asked && bytes < READ_AHEAD_BYTES {
            match cursor.next(view, io)? {
                Some((key, entry)) if key >= from && key < to => {
                    bytes = bytes
                        .saturating_add(crate::codec::to_usize_saturating(entry.covered_bytes()));
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
    type Item = PairResult;

    fn next(&mut self) -> Option<PairResult> {
        self.next_pair(true)
    }
}

impl DoubleEndedIterator for Scan {
    fn next_back(&mut self) -> Option<PairResult> {
        self.next_pair(false)
    }
}
