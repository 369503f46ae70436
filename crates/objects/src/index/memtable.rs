//! Memtables: recent changes, sorted, in memory.
//!
//! ```text
//!   active   ── sealed ──▶ layer · layer · .. ──▶ tree        newer hides older
//! ```
//!
//! Law 1: an interval hides older entries within it, whatever their keys are.
//! Law 2: an entry that is replaced within one memtable is reported to the caller, because its
//! bytes are dead at once. Entries hidden in older memtables and runs are accounted later, once.
//! Law 3: older entries under an unreadable range are not shown, because it may have hidden them.
use std::collections::BTreeMap;
use std::ops::Bound;

use super::range_filter::RangeFilter;
use crate::codec::{low_u32, to_u32_saturating};
use crate::entry::{DecodedKey, Entry, Key, PayloadRef, decode_key, extent_key};
use crate::{Error, ObjectId, Result};

/// The active memtable.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memtable {
    pub map: BTreeMap<Key, Entry>,
    /// Approximate memory, in bytes.
    pub bytes: usize,
}

/// Returns the approximate memory of one pair, in bytes.
pub(crate) fn weight(key: &Key, entry: &Entry) -> usize {
    let spilled = if key.spilled() { key.len() } else { 0 };
    let sums = match entry {
        Entry::Data(data) if data.sums.spilled() => data.sums.len().saturating_mul(8),
        _ => 0,
    };
    sums.saturating_add(spilled).saturating_add(100)
}

impl Memtable {
    /// Sets a key's entry; `dead` is called with payloads that became unreachable.
    pub fn set(&mut self, key: Key, entry: Entry, dead: &mut dyn FnMut(&PayloadRef)) {
        match decode_key(&key) {
            Some(DecodedKey::Extent(id, at)) => self.set_extent(id, at, key, entry, dead),
            _ => {
                self.bytes = self.bytes.saturating_add(weight(&key, &entry));
                if let Some(Entry::Data(old)) = self.map.insert(key, entry) {
                    dead(&old);
                }
            }
        }
    }

    fn set_extent(
        &mut self,
        id: ObjectId,
        at: u64,
        key: Key,
        entry: Entry,
        dead: &mut dyn FnMut(&PayloadRef),
    ) {
        let end = entry.end_from(at);
        // The interval that begins before and reaches in.
        let before = self.map.range_mut::<Key, _>(extent_key(id, 0)..key.clone()).next_back();
        if let Some((old_key, old)) = before
            && let Some(DecodedKey::Extent(_, old_at)) = decode_key(old_key)
            && old.end_from(old_at) > at
        {
            let old_end = old.end_from(old_at);
            let whole = std::mem::replace(old, Entry::Tombstone);
            *old = whole.part(0, at.saturating_sub(old_at));
            self.report_dead_part(&whole, old_at, at, end.min(old_end), dead);
            if old_end > end {
                let (from, len) = (end.saturating_sub(old_at), old_end.saturating_sub(end));
                self.insert_extent(id, end, whole.part(from, len));
            }
        }
        // Intervals that begin inside.
        let inside: Vec<Key> = self
            .map
            .range::<Key, _>((Bound::Included(&key), Bound::Excluded(&extent_key(id, end))))
            .map(|(key, _)| key.clone())
            .collect();
        for old_key in inside {
            let Some(old) = self.map.remove(&old_key) else { continue };
            let Some(DecodedKey::Extent(_, old_at)) = decode_key(&old_key) else { continue };
            let old_end = old.end_from(old_at);
            self.report_dead_part(&old, old_at, old_at, end.min(old_end), dead);
            if old_end > end {
                let (from, len) = (end.saturating_sub(old_at), old_end.saturating_sub(end));
                self.insert_extent(id, end, old.part(from, len));
            }
        }
        if end > at {
            self.bytes = self.bytes.saturating_add(weight(&key, &entry));
            self.map.insert(key, entry);
        }
    }

    fn insert_extent(&mut self, id: ObjectId, at: u64, entry: Entry) {
        let key = extent_key(id, at);
        self.bytes = self.bytes.saturating_add(weight(&key, &entry));
        self.map.insert(key, entry);
    }

    fn report_dead_part(
        &self,
        old: &Entry,
        old_at: u64,
        from: u64,
        to: u64,
        dead: &mut dyn FnMut(&PayloadRef),
    ) {
        if let Entry::Data(data) = old {
            let (from, len) = (from.saturating_sub(old_at), to.saturating_sub(from));
            dead(&data.part(to_u32_saturating(from), to_u32_saturating(len)));
        }
    }

    /// Seals the memtable.
    pub fn seal(&mut self) -> ImmutableMemtable {
        let Self { map, bytes } = std::mem::take(self);
        ImmutableMemtable::new(map.into_iter().collect(), bytes)
    }
}

/// A sealed memtable.
#[derive(Debug, Default)]
pub(crate) struct ImmutableMemtable {
    pub pairs: Vec<(Key, Entry)>,
    /// Approximate memory, in bytes.
    pub bytes: usize,
    /// Hash table of exact keys: open addressing, half of it empty. A slot is 8 bits of the hash
    /// and 24 of the index, plus one. Pairs past its end need a binary search.
    slots: Vec<u32>,
    /// Number of leading pairs that are in `slots`.
    slotted: usize,
    touched: RangeFilter,
    /// Ranges that could not be read.
    pub lost: Vec<UnreadableRange>,
}

/// Pairs between two keys that could not be read.
#[derive(Clone, Debug)]
pub(crate) struct UnreadableRange {
    /// Exclusive lower bound; unbounded if empty.
    pub after: Key,
    /// Exclusive upper bound, if there is one.
    pub before: Option<Key>,
    /// Their byte on the disk.
    pub at: u64,
}

impl UnreadableRange {
    /// Returns true if the range may contain a key from `from` to `to`, both included.
    pub fn overlaps(&self, from: &[u8], to: &[u8]) -> bool {
        let is_behind = self.after.is_empty() || to > self.after.as_slice();
        is_behind && self.before.as_ref().is_none_or(|before| from < before.as_slice())
    }

    pub fn error(&self) -> Error {
        Error::Corrupt { what: "a part of the index", at_bytes: self.at }
    }
}

/// Indexes that fit a slot.
const MAX_SLOTTED_PAIRS: usize = (1 << 24) - 1;

#[allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "`empty_slots` makes a power of two of slots, of which the mask selects one"
)]
fn insert_slot(slots: &mut [u32], key: &[u8], index: usize) {
    if index >= MAX_SLOTTED_PAIRS {
        return;
    }
    let (mask, hash) = (slots.len() - 1, hash(key));
    let mut at = low_u32(hash) as usize & mask;
    while slots[at] != 0 {
        at = (at + 1) & mask;
    }
    slots[at] = ((hash >> 56) as u32) << 24 | (to_u32_saturating(index as u64) + 1);
}

/// Hashes a key, for [`SortedLookup::get`].
pub(crate) fn hash(key: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(key)
}

/// Lookup of pairs, in both kinds of memtable.
pub(crate) trait SortedLookup {
    /// Returns the entry of exactly this key; `hash` is the key's.
    fn get(&self, key: &[u8], hash: u64) -> Option<&Entry>;
    /// Returns the first pair at or after `key`.
    fn first_at_or_after(&self, key: &[u8]) -> Option<(&Key, &Entry)>;
    /// Returns the last pair before `key`.
    fn last_before(&self, key: &[u8]) -> Option<(&Key, &Entry)>;
    /// Returns true if an interval may touch `[from, to)` of an object.
    fn may_overlap(&self, _: ObjectId, _from: u64, _to: u64) -> bool {
        true
    }
    /// Returns an error if an unreadable range overlaps `from` to `to`.
    fn check(&self, _from: &[u8], _to: &[u8]) -> Result<()> {
        Ok(())
    }
}

impl SortedLookup for Memtable {
    fn get(&self, key: &[u8], _: u64) -> Option<&Entry> {
        self.map.get(key)
    }

    fn first_at_or_after(&self, key: &[u8]) -> Option<(&Key, &Entry)> {
        self.map.range::<[u8], _>((Bound::Included(key), Bound::Unbounded)).next()
    }

    fn last_before(&self, key: &[u8]) -> Option<(&Key, &Entry)> {
        self.map.range::<[u8], _>((Bound::Unbounded, Bound::Excluded(key))).next_back()
    }
}

impl ImmutableMemtable {
    /// Creates a sealed memtable of sorted pairs.
    pub fn new(pairs: Vec<(Key, Entry)>, bytes: usize) -> Self {
        let (slots, touched) = (empty_slots(pairs.len()), RangeFilter::from_pairs(&pairs));
        let mut layer = Self { pairs, bytes, slots, slotted: 0, touched, lost: vec![] };
        layer.index_new_pairs();
        layer
    }

    /// The same, with unreadable ranges.
    pub fn with_unreadable_ranges(
        pairs: Vec<(Key, Entry)>,
        bytes: usize,
        lost: Vec<UnreadableRange>,
    ) -> Self {
        Self { lost, ..Self::new(pairs, bytes) }
    }

    /// Creates an empty memtable with capacity for the merge of both.
    pub(super) fn with_merge_capacity(newer: &Self, older: &Self) -> Self {
        // An interval may split another one: that adds a pair.
        let pairs = older.pairs.len().saturating_add(newer.pairs.len());
        let blocks = newer.touched.pieces.saturating_add(older.touched.pieces);
        Self {
            pairs: Vec::with_capacity(pairs),
            bytes: 0,
            slots: empty_slots(pairs.saturating_add(newer.pairs.len())),
            slotted: 0,
            touched: RangeFilter::with_block_capacity(blocks),
            lost: [&newer.lost[..], &older.lost].concat(),
        }
    }

    /// Appends a pair; lookups find it after [`ImmutableMemtable::index_new_pairs`].
    pub(super) fn push(&mut self, pair: (Key, Entry)) {
        self.touched.add(&pair.0, &pair.1);
        self.bytes = self.bytes.saturating_add(weight(&pair.0, &pair.1));
        self.pairs.push(pair);
    }

    /// Adds the newest pairs to the hash table: many in a row, so that their cache misses overlap.
    pub(super) fn index_new_pairs(&mut self) {
        let Some(new) = self.pairs.get(self.slotted..) else { return };
        for (nth, (key, _)) in new.iter().enumerate() {
            insert_slot(&mut self.slots, key, self.slotted.saturating_add(nth));
        }
        self.slotted = self.pairs.len();
    }

    /// Returns the index of the first pair at or after `key`.
    pub fn seek(&self, key: &[u8]) -> usize {
        self.pairs.partition_point(|(have, _)| have.as_slice() < key)
    }
}

fn empty_slots(pairs: usize) -> Vec<u32> {
    vec![0; pairs.min(MAX_SLOTTED_PAIRS).saturating_mul(2).next_power_of_two()]
}

impl SortedLookup for ImmutableMemtable {
    #[allow(
        clippy::arithmetic_side_effects,
        clippy::indexing_slicing,
        reason = "the mask selects a slot, and a slot in use is an index plus one"
    )]
    fn get(&self, key: &[u8], hash: u64) -> Option<&Entry> {
        let mask = self.slots.len().checked_sub(1)?;
        let mut at = low_u32(hash) as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            if slot >> 24 == (hash >> 56) as u32
                && let Some((have, entry)) = self.pairs.get((slot & 0xff_ffff) as usize - 1)
                && have.as_slice() == key
            {
                return Some(entry);
            }
            at = (at + 1) & mask;
        }
        if self.pairs.len() <= MAX_SLOTTED_PAIRS {
            return None;
        }
        let (have, entry) = self.pairs.get(self.seek(key))?;
        (have.as_slice() == key).then_some(entry)
    }

    fn first_at_or_after(&self, key: &[u8]) -> Option<(&Key, &Entry)> {
        self.pairs.get(self.seek(key)).map(|(key, entry)| (key, entry))
    }

    fn last_before(&self, key: &[u8]) -> Option<(&Key, &Entry)> {
        self.pairs.get(self.seek(key).checked_sub(1)?).map(|(key, entry)| (key, entry))
    }

    fn may_overlap(&self, id: ObjectId, from: u64, to: u64) -> bool {
        !self.lost.is_empty() || self.touched.may_contain(id, from, to)
    }

    fn check(&self, from: &[u8], to: &[u8]) -> Result<()> {
        let lost = self.lost.iter().find(|lost| lost.overlaps(from, to));
        lost.map_or(Ok(()), |lost| Err(lost.error()))
    }
}

/// Passes the intervals of `layer` that touch `[from, to)` of an object to `take`, in order, with
/// their offsets.
pub(crate) fn intervals<'a>(
    layer: &'a dyn SortedLookup,
    id: ObjectId,
    from: u64,
    to: u64,
    take: &mut dyn FnMut(u64, &'a Entry),
) {
    let start = extent_key(id, from);
    if let Some((key, entry)) = layer.last_before(&start)
        && let Some(DecodedKey::Extent(of, at)) = decode_key(key)
        && of == id
        && entry.end_from(at) > from
    {
        take(at, entry);
    }
    let mut next = start;
    while let Some((key, entry)) = layer.first_at_or_after(&next) {
        match decode_key(key) {
            Some(DecodedKey::Extent(of, at)) if of == id && at < to => {
                take(at, entry);
                let Some(behind) = at.checked_add(entry.covered_bytes().max(1)) else { break };
                next = extent_key(id, behind);
            }
            _ => break,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::entry::CHECKSUM_BLOCK_BYTES;

    fn test_extent(at: u64, len: u32) -> Entry {
        let sums = (0..len.div_ceil(CHECKSUM_BLOCK_BYTES)).map(u64::from).collect();
        Entry::Data(PayloadRef { at, stored: len, skip: 0, len, sums })
    }

    /// Returns the payload byte that each byte of object 1 reads; asserts no overlap.
    fn visible_bytes(layer: &dyn SortedLookup, to: u64) -> Vec<Option<u64>> {
        let mut out = vec![None; to as usize];
        intervals(layer, ObjectId(1), 0, to, &mut |at, entry| {
            if let Entry::Data(data) = entry {
                for i in 0..u64::from(data.len) {
                    if let Some(slot) = out.get_mut((at + i) as usize) {
                        assert_eq!(*slot, None);
                        *slot = Some(data.at + u64::from(data.skip) + i);
                    }
                }
            }
        });
        out
    }

    #[test]
    fn new_extents_hide_old_and_report_dead_once() {
        let mut random = 7u64;
        let mut next = |below: u64| {
            random = crate::codec::mix_bits(random);
            random % below
        };
        let mut active = Memtable::default();
        let mut model = vec![None; 20_000];
        let (mut born, mut died) = (0u64, 0u64);
        for round in 0..2000u64 {
            let at = next(15_000);
            let len = 1 + next(if round % 3 == 0 { 5000 } else { 200 });
            let is_hole = next(5) == 0;
            let base = (round + 1) << 20;
            let entry = if is_hole { Entry::Hole(len) } else { test_extent(base, len as u32) };
            if !is_hole {
                born += len;
            }
            active.set(extent_key(ObjectId(1), at), entry, &mut |dead| died += u64::from(dead.len));
            for i in 0..len {
                model[(at + i) as usize] = (!is_hole).then_some(base + i);
            }
        }
        assert_eq!(visible_bytes(&active, 20_000), model);
        let alive = model.iter().flatten().count() as u64;
        assert_eq!(born - died, alive);
        let sealed = active.seal();
        assert_eq!(visible_bytes(&sealed, 20_000), model);
    }

    #[test]
    fn merged_memtables_equal_sequential_writes() {
        let id = ObjectId(1);
        let (mut older, mut newer) = (Memtable::default(), Memtable::default());
        older.set(extent_key(id, 0), test_extent(1 << 20, 9000), &mut |_| {});
        newer.set(extent_key(id, 4000), test_extent(2 << 20, 100), &mut |_| {});
        newer.set(extent_key(id, 8000), Entry::Hole(u64::MAX - 8000), &mut |_| {});
        let mut dead = 0;
        let (newer, older) = (Arc::new(newer.seal()), Arc::new(older.seal()));
        let folded = ImmutableMemtable::merge(&newer, &older, &mut |data| dead += data.len);
        assert_eq!(dead, 1100);
        let have = visible_bytes(&folded, 9000);
        assert_eq!(have[3999], Some((1 << 20) + 3999));
        assert_eq!(have[4000], Some(2 << 20));
        assert_eq!(have[4100], Some((1 << 20) + 4100));
        assert_eq!(have[8000], None);
    }
}
