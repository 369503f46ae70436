//! Leaves of the tree: sorted pairs, as they are on the disk.
//!
//! ```text
//!   marks of every eighth pair · their keys, whole · what differs from the key before, entry · ..
//! ```
//!
//! A leaf stays encoded in memory, which holds twice the index that way. A lookup is a binary
//! search over the restart points, then a linear scan. Scans and changes decode all pairs.
//!
//! Law: loading a leaf decodes every pair once, so decoding it again cannot fail.

use std::cmp::Ordering;

use crate::Result;
use crate::codec::{Reader, put_varint, to_u32_saturating};
use crate::entry::{Entry, Key, decoded_len_max, put_key_delta, read_key_delta, read_pair_delta};

/// Pairs from one restart point to the next.
const RESTART_INTERVAL: usize = 8;

/// Restart point: a pair with its whole key.
#[derive(Clone, Copy, Debug)]
struct RestartPoint {
    /// Offset of the pair, among the pairs.
    pair: u32,
    /// Offset of its key.
    key: u32,
}

/// Bytes of a restart point.
const RESTART_POINT_BYTES: usize = 8;

/// Encoded pairs.
#[derive(Debug)]
pub(crate) struct Leaf {
    /// Restart points, their keys, and the pairs: bytes of one lookup are adjacent.
    bytes: Box<[u8]>,
    /// Offset of the pairs.
    pairs_at: u32,
    count: u32,
    at: u64,
}

impl Leaf {
    /// Decodes `count` pairs, all that `reader` has left of `bytes`; `at` is for errors.
    pub fn decode(reader: &mut Reader<'_>, bytes: &[u8], count: usize, at: u64) -> Result<Self> {
        let begin = reader.pos();
        let (mut key, mut unfolded) = (Key::new(), 0usize);
        let mut keys_at = count.div_ceil(RESTART_INTERVAL).saturating_mul(RESTART_POINT_BYTES);
        let (mut marks, mut keys) = (Vec::with_capacity(keys_at), vec![]);
        for index in 0..count {
            let pair = to_u32_saturating(reader.pos().saturating_sub(begin) as u64);
            let entry = read_pair_delta(reader, &mut key)?;
            if matches!(entry, Entry::Tombstone | Entry::Hole(_)) {
                return Err(reader.corrupt("an entry that hides another"));
            }
            unfolded = unfolded.saturating_add(key.len());
            if unfolded > decoded_len_max(bytes.len()) {
                return Err(reader.corrupt("a leaf's length"));
            }
            if index.is_multiple_of(RESTART_INTERVAL) {
                marks.extend_from_slice(&pair.to_le_bytes());
                marks.extend_from_slice(&to_u32_saturating(keys_at as u64).to_le_bytes());
                keys.extend_from_slice(&key);
                keys_at = keys_at.saturating_add(key.len());
            }
        }
        let pairs = bytes.get(begin..reader.pos()).unwrap_or_default();
        let pairs_at = to_u32_saturating(keys_at as u64);
        let bytes = [marks.as_slice(), &keys, pairs].concat().into();
        Ok(Self { bytes, pairs_at, count: to_u32_saturating(count as u64), at })
    }

    /// Returns the leaf as it is on the disk.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0];
        put_varint(&mut bytes, u64::from(self.count));
        bytes.extend_from_slice(self.encoded_pairs());
        bytes
    }

    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Returns its approximate memory, in bytes.
    pub fn weight(&self) -> u64 {
        self.bytes.len().saturating_add(96) as u64
    }

    fn encoded_pairs(&self) -> &[u8] {
        self.bytes.get(self.pairs_at as usize..).unwrap_or_default()
    }

    /// Returns the number of restart points.
    fn restart_point_count(&self) -> usize {
        self.len().div_ceil(RESTART_INTERVAL)
    }

    fn restart_point(&self, nth: usize) -> Option<RestartPoint> {
        let bytes = self
            .bytes
            .get(nth.saturating_mul(RESTART_POINT_BYTES)..)
            .filter(|_| nth < self.restart_point_count())?;
        let (pair, key) = (bytes.first_chunk()?, bytes.get(4..)?.first_chunk()?);
        Some(RestartPoint { pair: u32::from_le_bytes(*pair), key: u32::from_le_bytes(*key) })
    }

    fn restart_key(&self, mark: usize) -> &[u8] {
        let key = |mark| self.restart_point(mark).map_or(self.pairs_at, |mark| mark.key) as usize;
        self.bytes.get(key(mark)..key(mark.saturating_add(1))).unwrap_or_default()
    }

    pub fn first_key(&self) -> &[u8] {
        self.restart_key(0)
    }

    /// Returns all pairs, in order.
    pub fn iter(&self) -> LeafIter<'_> {
        self.iter_from_restart(0)
    }

    fn iter_from_restart(&self, mark: usize) -> LeafIter<'_> {
        let pair = self.restart_point(mark).map_or(usize::MAX, |mark| mark.pair as usize);
        let reader = Reader::new(self.encoded_pairs().get(pair..).unwrap_or_default(), self.at);
        LeafIter { reader, key: Key::new(), first: Some(self.restart_key(mark)) }
    }

    /// Returns the last restart point for which `is_before` holds, or the first. `is_before` must
    /// be true up to some key.
    fn seek_restart_point(&self, is_before: impl Fn(&[u8]) -> bool) -> usize {
        let (mut low, mut high) = (0, self.restart_point_count());
        while low < high {
            let middle = usize::midpoint(low, high);
            if is_before(self.restart_key(middle)) {
                low = middle.saturating_add(1);
            } else {
                high = middle;
            }
        }
        low.saturating_sub(1)
    }

    fn entry(&self, bytes: &[u8]) -> Result<Entry> {
        Entry::decode(&mut Reader::new(bytes, self.at))
    }

    /// Returns the entry of a key. Keys on the way are not decoded: a key that shares more with its
    /// predecessor than that shares with `key` is smaller than `key`, too.
    pub fn get(&self, key: &[u8]) -> Result<Option<Entry>> {
        let nearest = self.seek_restart_point(|mark| mark <= key);
        let from = self.restart_point(nearest).map_or(usize::MAX, |mark| mark.pair as usize);
        let mut reader = Reader::new(self.encoded_pairs().get(from..).unwrap_or_default(), self.at);
        // Number of bytes that the last key shares with `key`.
        let (mut alike, mut is_first) = (0, true);
        while !reader.is_done() {
            let (mut shared, mut rest) = (reader.varint_u32()? as usize, reader.length_prefixed()?);
            if std::mem::take(&mut is_first) {
                (shared, rest) = (0, self.restart_key(nearest));
            }
            if shared <= alike {
                let wanted = key.get(shared..).unwrap_or_default();
                match rest.cmp(wanted) {
                    Ordering::Equal => return Entry::decode(&mut reader).map(Some),
                    Ordering::Greater => return Ok(None),
                    Ordering::Less => {}
                }
                let more = rest.iter().zip(wanted).take_while(|(a, b)| a == b).count();
                alike = shared.saturating_add(more);
            }
            Entry::skip_encoded(&mut reader)?;
        }
        Ok(None)
    }

    /// Returns the first pair at or after `key`.
    pub fn first_at_or_after(&self, key: &[u8]) -> Result<Option<(Key, Entry)>> {
        let mut walk = self.iter_from_restart(self.seek_restart_point(|mark| mark <= key));
        while let Some((have, entry)) = walk.next()? {
            if have >= key {
                return Ok(Some((Key::from_slice(have), self.entry(entry)?)));
            }
        }
        Ok(None)
    }

    /// Returns the last pair before `key`.
    pub fn last_before(&self, key: &[u8]) -> Result<Option<(Key, Entry)>> {
        let mut walk = self.iter_from_restart(self.seek_restart_point(|mark| mark < key));
        let mut last: Option<(Key, &[u8])> = None;
        while let Some((have, entry)) = walk.next()? {
            if have >= key {
                break;
            }
            last = Some((Key::from_slice(have), entry));
        }
        last.map(|(key, entry)| Ok((key, self.entry(entry)?))).transpose()
    }

    /// Returns all pairs with whole keys.
    pub fn decode_pairs(&self) -> Result<EncodedPairs> {
        let mut pairs = EncodedPairs::default();
        pairs.merge(self, &[])?;
        Ok(pairs)
    }
}

/// Iterator over the pairs of a leaf.
pub(crate) struct LeafIter<'a> {
    reader: Reader<'a>,
    key: Key,
    /// Key of the first pair, which is not delta-decoded.
    first: Option<&'a [u8]>,
}

impl<'a> LeafIter<'a> {
    /// Returns the next pair: its key, and its encoded entry.
    pub fn next(&mut self) -> Result<Option<(&[u8], &'a [u8])>> {
        if self.reader.is_done() {
            return Ok(None);
        }
        match self.first.take() {
            Some(first) => {
                self.reader.varint()?;
                self.reader.length_prefixed()?;
                self.key = Key::from_slice(first);
            }
            None => read_key_delta(&mut self.reader, &mut self.key)?,
        }
        let rest = self.reader.remaining();
        let from = self.reader.pos();
        Entry::skip_encoded(&mut self.reader)?;
        let entry = rest.get(..self.reader.pos().saturating_sub(from)).unwrap_or_default();
        Ok(Some((&self.key, entry)))
    }
}

/// A change of one pair: its entry, or none to remove it.
pub(crate) type LeafEdit = (Key, Option<Entry>);

/// Encoded pairs, in order, by index.
#[derive(Debug, Default)]
pub(crate) struct EncodedPairs {
    bytes: Vec<u8>,
    /// Start and end of each key; the entry follows.
    places: Vec<(u32, u32)>,
}

impl EncodedPairs {
    fn push(&mut self, key: &[u8], entry: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(key);
        self.places
            .push((to_u32_saturating(start as u64), to_u32_saturating(self.bytes.len() as u64)));
        entry(&mut self.bytes);
    }

    pub fn push_edits<'a>(&mut self, edits: impl IntoIterator<Item = &'a LeafEdit>) {
        for (key, entry) in edits {
            if let Some(entry) = entry {
                self.push(key, |into| entry.encode(into));
            }
        }
    }

    /// Appends a leaf's pairs with edits.
    pub fn merge(&mut self, leaf: &Leaf, edits: &[LeafEdit]) -> Result<()> {
        let room = leaf.bytes.len().saturating_mul(2);
        self.bytes.reserve(room.saturating_add(edits.len().saturating_mul(64)));
        self.places.reserve(leaf.len().saturating_add(edits.len()));
        let mut edits = edits.iter().peekable();
        let mut walk = leaf.iter();
        while let Some((key, entry)) = walk.next()? {
            while let Some(edit) = edits.next_if(|(edit, _)| edit.as_slice() < key) {
                self.push_edits([edit]);
            }
            match edits.next_if(|(edit, _)| edit.as_slice() == key) {
                Some(edit) => self.push_edits([edit]),
                None => self.push(key, |into| into.extend_from_slice(entry)),
            }
        }
        self.push_edits(edits);
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the bytes of all pairs, with whole keys.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    pub fn key(&self, index: usize) -> &[u8] {
        let (from, to) = self.entry_range(index);
        self.bytes.get(from..to).unwrap_or_default()
    }

    fn entry_range(&self, index: usize) -> (usize, usize) {
        self.places.get(index).map_or((0, 0), |&(from, to)| (from as usize, to as usize))
    }

    pub fn entry(&self, index: usize) -> Result<Entry> {
        Entry::decode(&mut Reader::new(self.raw_entry(index), 0))
    }

    fn raw_entry(&self, index: usize) -> &[u8] {
        self.bytes.get(self.entry_range(index).1..self.pair_end(index)).unwrap_or_default()
    }

    /// Returns the offset at which a pair begins.
    pub fn pair_start(&self, index: usize) -> usize {
        self.entry_range(index).0
    }

    /// Returns the offset at which it ends.
    pub fn pair_end(&self, index: usize) -> usize {
        self.places.get(index.saturating_add(1)).map_or(self.bytes.len(), |next| next.0 as usize)
    }

    /// Returns the index of the first pair at or after `key`.
    pub fn seek(&self, key: &[u8]) -> usize {
        let key_at = |from: u32, to: u32| self.bytes.get(from as usize..to as usize);
        self.places.partition_point(|&(from, to)| key_at(from, to).unwrap_or_default() < key)
    }

    /// Encodes a range of the pairs as a leaf.
    pub fn encode(&self, which: std::ops::Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0];
        put_varint(&mut bytes, which.len() as u64);
        let mut previous: &[u8] = &[];
        for index in which {
            let key = self.key(index);
            put_key_delta(&mut bytes, previous, key);
            bytes.extend_from_slice(self.raw_entry(index));
            previous = key;
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::ObjectId;
    use crate::codec::mix_bits;
    use crate::entry::value_key;
    use crate::index::tree::Node;

    fn decode_node(bytes: &[u8]) -> Node {
        Node::decode(bytes, 0).unwrap()
    }

    #[test]
    fn leaf_lookups_match_btree_map() {
        for count in (1..=3 * RESTART_INTERVAL).chain([100, 301]) {
            let mut random = count as u64;
            let mut model = BTreeMap::new();
            while model.len() < count {
                random = mix_bits(random);
                // Neighbours with long shared prefixes, of any length.
                let name = format!("{:b}", random % 2048 + 1);
                model.insert(
                    value_key(name.as_bytes()),
                    Entry::ValueObject(ObjectId(random), random % 99),
                );
            }
            let edits: Vec<LeafEdit> =
                model.iter().map(|(key, entry)| (key.clone(), Some(entry.clone()))).collect();
            let mut pairs = EncodedPairs::default();
            pairs.push_edits(&edits);
            let bytes = pairs.encode(0..pairs.len());
            let node = decode_node(&bytes);
            let Node::Leaf(leaf) = &node else { panic!("a leaf") };
            assert_eq!(leaf.encode(), bytes);
            assert_eq!((leaf.len(), leaf.first_key()), (count, pairs.key(0)));
            let unfolded = leaf.decode_pairs().unwrap();
            let own = |(key, entry): (&Key, &Entry)| (key.clone(), entry.clone());
            for number in 0..2049 {
                let mut key = value_key(format!("{number:b}").as_bytes());
                for _ in 0..2 {
                    assert_eq!(leaf.get(&key).unwrap(), model.get(&key).cloned());
                    let after = model.range(key.clone()..).next().map(own);
                    assert_eq!(leaf.first_at_or_after(&key).unwrap(), after);
                    let before = model.range(..key.clone()).next_back().map(own);
                    assert_eq!(leaf.last_before(&key).unwrap(), before);
                    let place = unfolded.seek(&key);
                    assert_eq!(place, model.range(..key.clone()).count());
                    if let Some((key, entry)) = after {
                        assert_eq!(unfolded.key(place), key.as_slice());
                        assert_eq!(unfolded.entry(place).unwrap(), entry);
                    }
                    key.push(0);
                }
            }
            assert_eq!(leaf.first_at_or_after(&[]).unwrap(), model.first_key_value().map(own));
            assert_eq!(leaf.last_before(&[255]).unwrap(), model.last_key_value().map(own));
        }
    }

    #[test]
    fn decoded_leaf_is_little_larger_than_encoded() {
        let entry = Entry::ValueObject(ObjectId(1), 500);
        let edits: Vec<LeafEdit> = (0..200)
            .map(|n| {
                (
                    value_key(format!("a long name that all have {n:06}").as_bytes()),
                    Some(entry.clone()),
                )
            })
            .collect();
        let mut pairs = EncodedPairs::default();
        pairs.push_edits(&edits);
        let bytes = pairs.encode(0..200);
        let weight = decode_node(&bytes).weight() as usize;
        assert!(pairs.bytes() > bytes.len() * 4, "{} {}", pairs.bytes(), bytes.len());
        assert!(weight < bytes.len() * 2, "{weight} {}", bytes.len());
    }
}
