//! Keys and entries: the same in memtables, in the tree and in frames.
//!
//! ```text
//!   1 object              -> its length and hint
//!   2 object offset       -> bytes of the object: an interval [offset, offset + len)
//!   3 key of the kv       -> where a value is, or the object that holds it; a short one itself
//!   4 name                -> the object that it names
//! ```
//!
//! Law 1: intervals of one object do not overlap within one memtable or the tree.
//! Law 2: a payload has a checksum for each block of 4 KiB. Readers of a part of a block read all
//! of it, so a trimmed payload keeps the whole blocks it touches.

use smallvec::SmallVec;

use crate::codec::{Reader, put_varint, to_u32_saturating};
use crate::test_hooks::{InjectedFault, is_fault_injected};
use crate::{Error, LifetimeHint, ObjectId, Result};

/// Key in byte order.
pub(crate) type Key = SmallVec<[u8; 24]>;

/// Bytes with one checksum.
pub(crate) const CHECKSUM_BLOCK_BYTES: u32 = 4096;

/// Longest payload of one entry.
pub(crate) const MAX_PAYLOAD_BYTES: usize = 128 << 10;

/// Longest value stored inline: a payload reference would take as many bytes. Such a value is never
/// moved, only merged.
pub(crate) const MAX_INLINE_VALUE_BYTES: usize = 24;

/// Longest key of the key-value store, in bytes.
pub(crate) const MAX_KEY_BYTES: usize = 64 << 10;

/// Longest name of an object, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 255;

const OBJECT_KEY_KIND: u8 = 1;
const EXTENT_KEY_KIND: u8 = 2;
const VALUE_KEY_KIND: u8 = 3;
const NAME_KEY_KIND: u8 = 4;

pub(crate) fn object_key(id: ObjectId) -> Key {
    let mut key = Key::new();
    key.push(OBJECT_KEY_KIND);
    key.extend_from_slice(&id.0.to_be_bytes());
    key
}

pub(crate) fn extent_key(id: ObjectId, at: u64) -> Key {
    let mut key = Key::new();
    key.push(EXTENT_KEY_KIND);
    key.extend_from_slice(&id.0.to_be_bytes());
    key.extend_from_slice(&at.to_be_bytes());
    key
}

pub(crate) fn value_key(of: &[u8]) -> Key {
    let mut key = Key::with_capacity(of.len().saturating_add(1));
    key.push(VALUE_KEY_KIND);
    key.extend_from_slice(of);
    key
}

pub(crate) fn name_key(of: &[u8]) -> Key {
    let mut key = Key::with_capacity(of.len().saturating_add(1));
    key.push(NAME_KEY_KIND);
    key.extend_from_slice(of);
    key
}

/// Flags of an object, stored with its hint.
const VALUE_FLAG: u8 = 0x80;
const PENDING_DELETE_FLAG: u8 = 0x40;

/// Bound after the keys of all names.
pub(crate) const NAME_KEYS_END: &[u8] = &[NAME_KEY_KIND.wrapping_add(1)];

/// A decoded key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DecodedKey<'a> {
    Object(ObjectId),
    Extent(ObjectId, u64),
    Value(&'a [u8]),
    Name(&'a [u8]),
}

/// Decodes a key; `None` if it is invalid.
pub(crate) fn decode_key(key: &[u8]) -> Option<DecodedKey<'_>> {
    let (&kind, rest) = key.split_first()?;
    let word = |at: usize| Some(u64::from_be_bytes(*rest.get(at..)?.first_chunk()?));
    match kind {
        OBJECT_KEY_KIND if rest.len() == 8 => Some(DecodedKey::Object(ObjectId(word(0)?))),
        EXTENT_KEY_KIND if rest.len() == 16 => {
            Some(DecodedKey::Extent(ObjectId(word(0)?), word(8)?))
        }
        VALUE_KEY_KIND if rest.len() <= MAX_KEY_BYTES => Some(DecodedKey::Value(rest)),
        NAME_KEY_KIND if rest.len() <= MAX_NAME_BYTES => Some(DecodedKey::Name(rest)),
        _ => None,
    }
}

/// Reference to stored bytes on the disk, or to a part of them.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct PayloadRef {
    /// First stored byte, on the disk.
    pub at: u64,
    /// Stored bytes; all checksum blocks but the last are full.
    pub stored: u32,
    /// Stored bytes before the referenced part; fewer than a checksum block.
    pub skip: u32,
    /// Referenced bytes.
    pub len: u32,
    /// Checksum of each block.
    pub sums: SmallVec<[u64; 1]>,
}

impl Clone for PayloadRef {
    fn clone(&self) -> Self {
        // Copies all checksums at once; the derived implementation copies one by one.
        Self { sums: SmallVec::from_slice(&self.sums), ..*self }
    }
}

impl PayloadRef {
    /// Returns the part from `from`, `len` bytes, with the checksum blocks it touches.
    pub fn part(&self, from: u32, len: u32) -> Self {
        debug_assert!(len > 0 && from.saturating_add(len) <= self.len);
        let skip = self.skip.saturating_add(from);
        let first = skip / CHECKSUM_BLOCK_BYTES;
        let pieces =
            (skip % CHECKSUM_BLOCK_BYTES).saturating_add(len).div_ceil(CHECKSUM_BLOCK_BYTES);
        let begin = first.saturating_mul(CHECKSUM_BLOCK_BYTES);
        let stored =
            self.stored.saturating_sub(begin).min(pieces.saturating_mul(CHECKSUM_BLOCK_BYTES));
        let sums = self.sums.get(first as usize..first.saturating_add(pieces) as usize);
        Self {
            at: self.at.saturating_add(u64::from(begin)),
            stored,
            skip: skip % CHECKSUM_BLOCK_BYTES,
            len,
            sums: sums.unwrap_or_default().into(),
        }
    }

    /// Returns the bytes that it refers to, out of the stored ones. Decoding bounds them.
    pub fn referenced_bytes<'b>(&self, stored: &'b [u8]) -> &'b [u8] {
        let behind = stored.get(self.skip as usize..).unwrap_or_default();
        behind.get(..self.len as usize).unwrap_or_default()
    }

    /// Returns the address after the last stored byte.
    pub fn end(&self) -> u64 {
        self.at.saturating_add(u64::from(self.stored))
    }
}

/// Entry of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    /// Bytes of an object from the key's offset on, or the value of a key.
    Data(PayloadRef),
    /// A hole from the key's offset on, for so many bytes (up to `u64::MAX - offset`). It only
    /// hides older entries.
    Hole(u64),
    /// Zeros of the object for so many bytes: a hole that also hides the parent's bytes. It stays
    /// in the tree.
    Zeros(u64),
    /// Hides older entries of the key.
    Tombstone,
    /// An object.
    Object(ObjectRecord),
    /// The value is stored as this object.
    ValueObject(ObjectId, u64),
    /// An inline value; under a name, the number of its object.
    Inline(SmallVec<[u8; MAX_INLINE_VALUE_BYTES]>),
}

/// Attributes of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ObjectRecord {
    /// Length in bytes.
    pub len: u64,
    /// Hint of its creator.
    pub hint: LifetimeHint,
    /// True if it holds a value of a key: not listed.
    pub is_value: bool,
    /// Parent: its bytes show where this object has no extent.
    pub parent: Option<ObjectId>,
    /// Number of children; the object does not change while it has one.
    pub children: u32,
    /// True if it was deleted, but its only child still reads it: not listed.
    pub is_pending_delete: bool,
}

impl ObjectRecord {
    /// Returns the record of an empty object without a parent.
    pub fn new(hint: LifetimeHint) -> Self {
        Self { len: 0, hint, is_value: false, parent: None, children: 0, is_pending_delete: false }
    }

    /// Returns the entry for `len` freed bytes.
    pub fn hole(&self, len: u64) -> Entry {
        match self.parent.is_some() && !is_fault_injected(InjectedFault::ForkZeros) {
            true => Entry::Zeros(len),
            false => Entry::Hole(len),
        }
    }

    /// Returns a record for a child of this object, which is `id`.
    pub fn fork_child(&mut self, id: ObjectId) -> Result<Self> {
        if self.is_value || self.is_pending_delete {
            return Err(Error::Misuse("a value of a key, or what was removed, is not forked"));
        }
        self.children =
            self.children.checked_add(1).ok_or(Error::Misuse("too many objects over one"))?;
        Ok(Self { len: self.len, parent: Some(id), ..Self::new(self.hint) })
    }
}

impl Entry {
    /// Returns the number of bytes that the entry covers from its key's offset on.
    pub fn covered_bytes(&self) -> u64 {
        match self {
            Self::Data(data) => u64::from(data.len),
            Self::Hole(len) | Self::Zeros(len) => *len,
            _ => 0,
        }
    }

    /// Returns the end of the interval that begins at offset `at`. Decoding refuses intervals that
    /// end after the largest offset.
    pub fn end_from(&self, at: u64) -> u64 {
        at.saturating_add(self.covered_bytes())
    }

    /// Returns true if it is content of an object, and does not only hide older entries.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Data(_) | Self::Zeros(_))
    }

    /// Returns the entry of a name.
    pub fn for_name(id: ObjectId) -> Self {
        Self::Inline(SmallVec::from_slice(&id.0.to_be_bytes()))
    }

    /// Returns the object that an entry under a name refers to.
    pub fn named_object(&self) -> Option<ObjectId> {
        match self {
            Self::Inline(number) => {
                Some(ObjectId(u64::from_be_bytes(number.as_slice().try_into().ok()?)))
            }
            _ => None,
        }
    }

    /// Returns the part from `from`, `len` bytes, of an interval.
    pub fn part(&self, from: u64, len: u64) -> Self {
        match self {
            Self::Data(data) => {
                Self::Data(data.part(to_u32_saturating(from), to_u32_saturating(len)))
            }
            Self::Hole(_) => Self::Hole(len),
            Self::Zeros(_) => Self::Zeros(len),
            other => other.clone(),
        }
    }

    pub fn encode(&self, into: &mut Vec<u8>) {
        match self {
            Self::Data(data) => {
                // A whole payload is by far the most frequent: without skip and length.
                let is_whole = data.skip == 0 && data.len == data.stored;
                into.push(if is_whole { 0 } else { 1 });
                put_varint(into, data.at);
                put_varint(into, u64::from(data.stored));
                if !is_whole {
                    put_varint(into, u64::from(data.skip));
                    put_varint(into, u64::from(data.len));
                }
                for sum in &data.sums {
                    into.extend_from_slice(&sum.to_le_bytes());
                }
            }
            Self::Hole(len) => {
                into.push(2);
                put_varint(into, *len);
            }
            Self::Tombstone => into.push(3),
            Self::Object(record) => {
                // Most have neither parent nor children.
                let is_alone =
                    record.parent.is_none() && record.children == 0 && !record.is_pending_delete;
                into.push(if is_alone { 4 } else { 7 });
                put_varint(into, record.len);
                let hint = match record.hint {
                    LifetimeHint::Unknown => 0,
                    LifetimeHint::Hot => 1,
                    LifetimeHint::Cold => 2,
                };
                let leaving = if record.is_pending_delete { PENDING_DELETE_FLAG } else { 0 };
                into.push(hint | leaving | if record.is_value { VALUE_FLAG } else { 0 });
                if !is_alone {
                    put_varint(into, record.parent.map_or(0, |parent| parent.0.saturating_add(1)));
                    put_varint(into, u64::from(record.children));
                }
            }
            Self::Zeros(len) => {
                into.push(8);
                put_varint(into, *len);
            }
            Self::ValueObject(id, len) => {
                into.push(5);
                put_varint(into, id.0);
                put_varint(into, *len);
            }
            Self::Inline(value) => {
                into.push(6);
                put_varint(into, value.len() as u64);
                into.extend_from_slice(value);
            }
        }
    }

    /// Skips an entry that was decoded before.
    pub fn skip_encoded(reader: &mut Reader<'_>) -> Result<()> {
        let numbers = match reader.u8()? {
            kind @ (0 | 1) => {
                reader.varint()?;
                let stored = reader.varint_u32()?;
                for _ in 0..kind.saturating_mul(2) {
                    reader.varint()?;
                }
                return reader
                    .bytes(checksum_blocks(stored as usize).saturating_mul(8))
                    .map(|_| ());
            }
            2 | 8 => 1,
            3 => 0,
            4 => {
                reader.varint()?;
                return reader.u8().map(|_| ());
            }
            7 => {
                reader.varint()?;
                reader.u8()?;
                2
            }
            6 => return reader.length_prefixed().map(|_| ()),
            _ => 2,
        };
        (0..numbers).try_for_each(|_| reader.varint().map(|_| ()))
    }

    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(match reader.u8()? {
            kind @ (0 | 1) => {
                let at = reader.varint()?;
                let stored = reader.varint_u32()?;
                let (skip, len) = match kind {
                    0 => (0, stored),
                    _ => (reader.varint_u32()?, reader.varint_u32()?),
                };
                let is_sane = stored as usize <= MAX_PAYLOAD_BYTES
                    && skip < CHECKSUM_BLOCK_BYTES
                    && skip.checked_add(len).is_some_and(|end| end <= stored)
                    && at.checked_add(u64::from(stored)).is_some();
                if !is_sane {
                    return Err(reader.corrupt("a payload that cannot be"));
                }
                let mut sums = SmallVec::new();
                for _ in 0..stored.div_ceil(CHECKSUM_BLOCK_BYTES) {
                    sums.push(reader.u64()?);
                }
                Self::Data(PayloadRef { at, stored, skip, len, sums })
            }
            2 => Self::Hole(reader.varint()?),
            3 => Self::Tombstone,
            kind @ (4 | 7) => {
                let len = reader.varint()?;
                let flags = reader.u8()?;
                let hint = match flags & !(VALUE_FLAG | PENDING_DELETE_FLAG) {
                    0 => LifetimeHint::Unknown,
                    1 => LifetimeHint::Hot,
                    2 => LifetimeHint::Cold,
                    _ => return Err(reader.corrupt("a hint that is not known")),
                };
                let (parent, children) = match kind {
                    4 => (0, 0),
                    _ => (reader.varint()?, reader.varint_u32()?),
                };
                Self::Object(ObjectRecord {
                    len,
                    hint,
                    is_value: flags & VALUE_FLAG != 0,
                    parent: parent.checked_sub(1).map(ObjectId),
                    children,
                    is_pending_delete: flags & PENDING_DELETE_FLAG != 0,
                })
            }
            8 => Self::Zeros(reader.varint()?),
            5 => Self::ValueObject(ObjectId(reader.varint()?), reader.varint()?),
            6 => match reader.length_prefixed()? {
                value if value.len() <= MAX_INLINE_VALUE_BYTES => {
                    Self::Inline(SmallVec::from_slice(value))
                }
                _ => return Err(reader.corrupt("a short value that is long")),
            },
            _ => return Err(reader.corrupt("an entry of a kind that is not known")),
        })
    }
}

pub(crate) fn put_key(into: &mut Vec<u8>, key: &[u8]) {
    put_varint(into, key.len() as u64);
    into.extend_from_slice(key);
}

/// Appends `key`, delta-coded against `previous`.
pub(crate) fn put_key_delta(into: &mut Vec<u8>, previous: &[u8], key: &[u8]) {
    let shared = previous.iter().zip(key).take_while(|(a, b)| a == b).count();
    put_varint(into, shared as u64);
    put_key(into, key.get(shared..).unwrap_or_default());
}

/// Replaces a key by the next one of a delta-coded sequence, which must be greater.
pub(crate) fn read_key_delta(reader: &mut Reader<'_>, key: &mut Key) -> Result<()> {
    let shared = reader.varint_u32()? as usize;
    let rest = reader.length_prefixed()?;
    let is_behind = key.get(shared..).is_some_and(|old| old < rest);
    if !is_behind || shared.saturating_add(rest.len()) > MAX_KEY_BYTES + 1 {
        return Err(reader.corrupt("pairs that are out of order"));
    }
    key.truncate(shared);
    key.extend_from_slice(rest);
    Ok(())
}

/// Returns the limit of `len` encoded bytes of pairs, decoded, in bytes. Long keys with long shared
/// prefixes take little space on the disk, but no store writes more of them than this.
pub(crate) const fn decoded_len_max(len: usize) -> usize {
    len.saturating_mul(32).saturating_add(4 * MAX_KEY_BYTES)
}

/// Replaces a key by the next one, and decodes its entry, which must be valid there.
pub(crate) fn read_pair_delta(reader: &mut Reader<'_>, key: &mut Key) -> Result<Entry> {
    read_key_delta(reader, key)?;
    let entry = Entry::decode(reader)?;
    if is_valid_for_key(key, &entry) {
        Ok(entry)
    } else {
        Err(reader.corrupt("an entry under the wrong key"))
    }
}

/// Returns the number of checksum blocks of a payload of `len` bytes.
pub(crate) const fn checksum_blocks(len: usize) -> usize {
    len.div_ceil(CHECKSUM_BLOCK_BYTES as usize)
}

/// Returns true if an entry is valid under a key.
pub(crate) fn is_valid_for_key(key: &[u8], entry: &Entry) -> bool {
    match decode_key(key) {
        Some(DecodedKey::Object(_)) => matches!(entry, Entry::Object(_) | Entry::Tombstone),
        Some(DecodedKey::Extent(_, at)) => match entry {
            Entry::Data(data) => data.len > 0 && at.checked_add(u64::from(data.len)).is_some(),
            Entry::Hole(len) | Entry::Zeros(len) => *len > 0 && at.checked_add(*len).is_some(),
            _ => false,
        },
        Some(DecodedKey::Value(_)) => {
            matches!(
                entry,
                Entry::Data(_) | Entry::ValueObject(..) | Entry::Inline(_) | Entry::Tombstone
            )
        }
        Some(DecodedKey::Name(_)) => {
            matches!(entry, Entry::Tombstone) || entry.named_object().is_some()
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_payload(stored: u32) -> PayloadRef {
        let sums = (0..stored.div_ceil(CHECKSUM_BLOCK_BYTES)).map(u64::from).collect();
        PayloadRef { at: 1 << 20, stored, skip: 0, len: stored, sums }
    }

    fn encode_pair(key: &Key, entry: &Entry) -> Vec<u8> {
        let mut bytes = vec![];
        put_key_delta(&mut bytes, &[], key);
        entry.encode(&mut bytes);
        bytes
    }

    #[test]
    fn key_deltas_round_trip() {
        let keys = [&b"a"[..], b"aa", b"aab", b"ab", b"b", b"ba"].map(value_key);
        let (mut bytes, mut previous) = (vec![], Key::new());
        for key in &keys {
            put_key_delta(&mut bytes, &previous, key);
            previous.clone_from(key);
        }
        let (mut reader, mut key) = (Reader::new(&bytes, 0), Key::new());
        for expected in &keys {
            read_key_delta(&mut reader, &mut key).unwrap();
            assert_eq!(key, *expected);
        }
        assert!(reader.is_done());
        for (previous, bytes) in [
            // The same key again; a smaller one; too long a shared prefix; an empty key.
            (&b"ab"[..], &[2, 0][..]),
            (b"ab", &[1, 1, b'a']),
            (b"ab", &[3, 1, b'a']),
            (b"", &[0, 0]),
        ] {
            let mut key = Key::from_slice(previous);
            assert!(read_key_delta(&mut Reader::new(bytes, 0), &mut key).is_err());
        }
    }

    #[test]
    fn payload_part_keeps_touched_checksums() {
        let part = test_payload(10_000).part(5000, 4000);
        assert_eq!(
            (part.at, part.stored, part.skip, part.len),
            ((1 << 20) + 4096, 5904, 904, 4000)
        );
        assert_eq!(part.sums.as_slice(), [1, 2]);
        let small = part.part(0, 100);
        assert_eq!((small.at, small.stored, small.skip, small.len), (part.at, 4096, 904, 100));
        assert_eq!(small.sums.as_slice(), [1]);
    }

    #[test]
    fn entries_round_trip() {
        let id = ObjectId(77);
        let record =
            ObjectRecord { len: 1 << 40, is_value: true, ..ObjectRecord::new(LifetimeHint::Hot) };
        let all = [
            (extent_key(id, 5), Entry::Data(test_payload(9000))),
            (extent_key(id, 5), Entry::Data(test_payload(9000).part(4100, 200))),
            (extent_key(id, 9), Entry::Hole(u64::MAX - 9)),
            (object_key(id), Entry::Object(record)),
            (object_key(id), Entry::Tombstone),
            (value_key(b"name"), Entry::ValueObject(id, 12)),
            (value_key(b""), Entry::Data(test_payload(1))),
            (value_key(b"a"), Entry::Inline(SmallVec::new())),
            (name_key(b"disk"), Entry::for_name(id)),
            (name_key(b"gone"), Entry::Tombstone),
            (value_key(b"b"), Entry::Inline(SmallVec::from_slice(&[7; MAX_INLINE_VALUE_BYTES]))),
        ];
        for (key, entry) in &all {
            let bytes = encode_pair(key, entry);
            let (mut reader, mut read) = (Reader::new(&bytes, 0), Key::new());
            assert_eq!(read_pair_delta(&mut reader, &mut read), Ok(entry.clone()));
            assert!(reader.is_done() && read == *key);
            let mut reader = Reader::new(&bytes, 0);
            read_key_delta(&mut reader, &mut Key::new()).unwrap();
            Entry::skip_encoded(&mut reader).unwrap();
            assert!(reader.is_done());
        }
    }

    #[test]
    fn entry_of_wrong_key_kind_is_refused() {
        let seven = Entry::Inline(SmallVec::from_slice(&[0; 7]));
        let long = name_key(&[b'n'; MAX_NAME_BYTES + 1]);
        for (key, entry) in [
            (object_key(ObjectId(1)), Entry::Hole(4)),
            (name_key(b"disk"), seven),
            (name_key(b"disk"), Entry::ValueObject(ObjectId(1), 1)),
            (long, Entry::for_name(ObjectId(1))),
        ] {
            let bytes = encode_pair(&key, &entry);
            assert!(read_pair_delta(&mut Reader::new(&bytes, 0), &mut Key::new()).is_err());
        }
    }

    #[test]
    fn empty_extent_is_refused() {
        for entry in [Entry::Hole(0), Entry::Data(test_payload(0))] {
            let bytes = encode_pair(&extent_key(ObjectId(1), 5), &entry);
            assert!(read_pair_delta(&mut Reader::new(&bytes, 0), &mut Key::new()).is_err());
        }
    }

    #[test]
    fn keys_sort_by_kind_and_offset() {
        let id = ObjectId(256);
        assert!(object_key(ObjectId(255)) < object_key(id));
        assert!(extent_key(id, 255) < extent_key(id, 256));
        assert!(object_key(ObjectId(u64::MAX)) < extent_key(ObjectId(0), 0));
        assert_eq!(decode_key(&extent_key(id, 9)), Some(DecodedKey::Extent(id, 9)));
        assert_eq!(decode_key(&value_key(b"k")), Some(DecodedKey::Value(b"k")));
        assert_eq!(decode_key(&[]), None);
    }
}
