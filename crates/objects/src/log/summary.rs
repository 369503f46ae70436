//! Summary of a frame: its items, delta-coded.
//!
//! ```text
//!   flags · order? · shared · rest · entry      of a pair
//!   flags · place · length                      of a node or a chunk
//! ```
//!
//! Neighbours are similar. A pair stores the length of the key prefix that it shares with the pair
//! before it. A payload that follows the last one, with the same length, stores only its checksums.
//! So the summary of 1 MiB of 4 KiB updates fits the page of its header.
//!
//! Law: the bytes that an item adds to the key before it are bounded, so that decoding a hostile
//! summary cannot need much more memory than the summary has bytes.

use crate::codec::{Reader, low_byte, put_varint};
use crate::entry::{Entry, Key, PayloadRef, checksum_blocks, is_valid_under};
use crate::{Error, Result};

/// The lowest two bits of the flags.
const PAIR: u8 = 0;
const NODE: u8 = 1;
const CHUNK: u8 = 2;
const KIND: u8 = 3;
/// The pair directly follows the one before it.
const IN_ORDER: u8 = 1 << 2;
/// The payload is whole, directly follows the last one, and is as long as that of the pair before.
const ALIKE: u8 = 1 << 3;
/// The upper three bits: zeros at the end of the key.
const ZEROS_SHIFT: u32 = 5;
const ZEROS_MAX: usize = 7;
/// Bytes that a key may share with the one before it.
const SHARED_MAX: usize = 64;

/// One item of a summary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Item {
    /// A change: its number in the commit, its key and its entry.
    Pair(u64, Key, Entry),
    /// A node of the tree.
    Node { at: u64, len: u32 },
    /// A chunk of a run or of a checkpoint.
    Chunk { at: u64, len: u32 },
}

/// Context for the delta-coding of the next item.
#[derive(Clone, Debug, Default)]
struct DeltaContext {
    order: u64,
    key: Key,
    /// Address after the last payload.
    end: u64,
    /// Length of the last pair's payload.
    stored: u32,
}

impl DeltaContext {
    fn see(&mut self, order: u64, key: &[u8], entry: &Entry) {
        self.order = order;
        self.key = Key::from_slice(key);
        if let Entry::Data(data) = entry {
            (self.end, self.stored) = (data.end(), data.stored);
        }
    }

    fn is_alike(&self, data: &PayloadRef) -> bool {
        (data.at, data.stored) == (self.end, self.stored)
            && data.skip == 0
            && data.len == data.stored
    }
}

/// Summary of a frame being filled.
#[derive(Debug)]
pub(crate) struct FrameSummary {
    pub bytes: Vec<u8>,
    /// Address of the frame.
    frame_at: u64,
    before: DeltaContext,
}

impl FrameSummary {
    pub fn new(frame_at: u64) -> Self {
        Self { bytes: vec![], frame_at, before: DeltaContext::default() }
    }

    /// Returns the most bytes that a pair takes, with a payload of `len` bytes.
    pub fn most(key_len: usize, len: usize) -> usize {
        key_len.saturating_add(checksum_blocks(len).saturating_mul(8)).saturating_add(56)
    }

    pub fn pair(&mut self, order: u64, key: &[u8], entry: &Entry) {
        let before = &self.before;
        let is_in_order = Some(order) == before.order.checked_add(1);
        let alike = match entry {
            Entry::Data(data) if before.is_alike(data) => Some(data),
            _ => None,
        };
        let zeros = key.iter().rev().take(ZEROS_MAX).take_while(|&&byte| byte == 0).count();
        let told = key.get(..key.len().saturating_sub(zeros)).unwrap_or_default();
        let shared = before.key.iter().zip(told).take(SHARED_MAX).take_while(|(a, b)| a == b);
        let shared = shared.count();
        let flags = PAIR
            | if is_in_order { IN_ORDER } else { 0 }
            | if alike.is_some() { ALIKE } else { 0 }
            | low_byte(zeros as u64) << ZEROS_SHIFT;
        let out = &mut self.bytes;
        out.push(flags);
        if !is_in_order {
            put_varint(out, order);
        }
        out.push(low_byte(shared as u64));
        let rest = told.get(shared..).unwrap_or_default();
        put_varint(out, rest.len() as u64);
        out.extend_from_slice(rest);
        match alike {
            Some(data) => {
                data.sums.iter().for_each(|sum| out.extend_from_slice(&sum.to_le_bytes()))
            }
            None => entry.encode(out),
        }
        self.before.see(order, key, entry);
    }

    /// Adds the item of a node or a chunk.
    pub fn note(&mut self, is_node: bool, at: u64, len: u32) {
        self.bytes.push(if is_node { NODE } else { CHUNK });
        put_varint(&mut self.bytes, at.saturating_sub(self.frame_at));
        put_varint(&mut self.bytes, u64::from(len));
        self.before.end = at.saturating_add(u64::from(len));
    }
}

/// Decoder of a summary.
#[derive(Debug)]
pub(crate) struct Items<'a> {
    reader: Reader<'a>,
    frame_at: u64,
    before: DeltaContext,
}

impl<'a> Items<'a> {
    /// Decodes the items of `table`, which is at offset `table_at` of the frame at address
    /// `frame_at`.
    pub fn new(table: &'a [u8], frame_at: u64, table_at: u32) -> Self {
        let reader = Reader::new(table, frame_at.saturating_add(u64::from(table_at)));
        Self { reader, frame_at, before: DeltaContext::default() }
    }

    fn read(&mut self) -> Result<Item> {
        let flags = self.reader.u8()?;
        match flags & KIND {
            PAIR if flags >> 4 & 1 == 0 => self.read_pair(flags),
            kind @ (NODE | CHUNK) if flags == kind => {
                let at = self.frame_at.saturating_add(u64::from(self.reader.varint_u32()?));
                let len = self.reader.varint_u32()?;
                self.before.end = at.saturating_add(u64::from(len));
                Ok(if kind == NODE { Item::Node { at, len } } else { Item::Chunk { at, len } })
            }
            _ => Err(self.reader.corrupt("an item of a kind that is not known")),
        }
    }

    fn read_pair(&mut self, flags: u8) -> Result<Item> {
        let order = match flags & IN_ORDER {
            0 => self.reader.varint()?,
            _ => self.before.order.checked_add(1).ok_or_else(|| self.wrong())?,
        };
        let shared = usize::from(self.reader.u8()?);
        let mut key = match self.before.key.get(..shared) {
            Some(shared) if shared.len() <= SHARED_MAX => Key::from_slice(shared),
            _ => return Err(self.wrong()),
        };
        key.extend_from_slice(self.reader.length_prefixed()?);
        key.extend(std::iter::repeat_n(0, usize::from(flags >> ZEROS_SHIFT)));
        let entry = match flags & ALIKE {
            0 => Entry::decode(&mut self.reader)?,
            _ => Entry::Data(self.read_alike()?),
        };
        if !is_valid_under(&key, &entry) {
            return Err(self.reader.corrupt("an entry under the wrong key"));
        }
        self.before.see(order, &key, &entry);
        Ok(Item::Pair(order, key, entry))
    }

    fn read_alike(&mut self) -> Result<PayloadRef> {
        let (at, stored) = (self.before.end, self.before.stored);
        if at.checked_add(u64::from(stored)).is_none() {
            return Err(self.wrong());
        }
        let sums = (0..checksum_blocks(stored as usize))
            .map(|_| self.reader.u64())
            .collect::<Result<_>>()?;
        Ok(PayloadRef { at, stored, skip: 0, len: stored, sums })
    }

    fn wrong(&self) -> Error {
        self.reader.corrupt("an item that cannot follow the one before it")
    }
}

impl Iterator for Items<'_> {
    type Item = Result<Item>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.reader.is_done()).then(|| self.read())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hint;
    use crate::ObjectId;
    use crate::entry::{ObjectRecord, extent_key, object_key, value_key};

    const FRAME: u64 = 1 << 20;

    fn data(at: u64, len: u32) -> Entry {
        let sums = (0..checksum_blocks(len as usize) as u64).map(|piece| at * 31 + piece).collect();
        Entry::Data(PayloadRef { at: FRAME + at, stored: len, skip: 0, len, sums })
    }

    fn table(items: &[Item]) -> Vec<u8> {
        let mut table = FrameSummary::new(FRAME);
        for item in items {
            let before = table.bytes.len();
            match item {
                Item::Pair(order, key, entry) => {
                    table.pair(*order, key, entry);
                    let len = entry.covers() as usize;
                    let payload = if matches!(entry, Entry::Data(_)) { len } else { 0 };
                    assert!(table.bytes.len() - before <= FrameSummary::most(key.len(), payload));
                }
                Item::Node { at, len } => table.note(true, *at, *len),
                Item::Chunk { at, len } => table.note(false, *at, *len),
            }
        }
        table.bytes
    }

    fn all() -> Vec<Item> {
        let id = ObjectId(77);
        let record = ObjectRecord { len: 9, ..ObjectRecord::new(Hint::Cold) };
        let long = vec![7; 300];
        vec![
            Item::Pair(5, extent_key(id, 0), data(4096, 4096)),
            Item::Pair(6, extent_key(id, 1 << 20), data(8192, 4096)),
            Item::Pair(9, extent_key(id, 4096), data(12288, 9000)),
            Item::Pair(10, extent_key(id, u64::MAX / 2), data(24576, 9000)),
            Item::Node { at: FRAME + 33_576, len: 500 },
            Item::Chunk { at: FRAME + 34_076, len: 80 },
            Item::Pair(11, value_key(&[0; 40]), data(34_156, 9000)),
            Item::Pair(12, value_key(&[]), Entry::Tombstone),
            Item::Pair(13, value_key(&long), Entry::ValueObject(id, 1 << 30)),
            Item::Pair(14, value_key(&long), data(50_000, 1)),
            Item::Pair(15, object_key(ObjectId(0)), Entry::Object(record)),
            Item::Pair(2, extent_key(id, 5), Entry::Hole(u64::MAX - 5)),
        ]
    }

    #[test]
    fn tables_come_back() {
        let bytes = table(&all());
        let back: Vec<Item> = Items::new(&bytes, FRAME, 72).map(Result::unwrap).collect();
        assert_eq!(back, all());
    }

    #[test]
    fn updates_of_a_mebibyte_fit_the_page_of_the_header() {
        let mut order = 0;
        let pairs: Vec<Item> = (0..255u64)
            .map(|nth| {
                order += 1;
                let block = crate::codec::mix(nth) % (1 << 22);
                Item::Pair(
                    order,
                    extent_key(ObjectId(1), block * 4096),
                    data((nth + 1) * 4096, 4096),
                )
            })
            .collect();
        assert!(table(&pairs).len() <= 4096 - crate::log::frame::HEADER, "{}", table(&pairs).len());
    }

    #[test]
    fn any_bytes_end_in_an_error_or_in_items() {
        let whole = table(&all());
        let mut dice = 1u64;
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..3 {
                dice = crate::codec::mix(dice);
                let place = dice as usize % bytes.len();
                bytes[place] = (dice >> 32) as u8;
            }
            bytes.truncate(1 + (dice >> 16) as usize % bytes.len());
            let most = bytes.len();
            let items: Vec<Item> = Items::new(&bytes, FRAME, 72).map_while(Result::ok).collect();
            let keys: usize = items
                .iter()
                .map(|item| if let Item::Pair(_, key, _) = item { key.len() } else { 0 })
                .sum();
            assert!(keys <= most * (SHARED_MAX + ZEROS_MAX), "{keys} of {most}");
        }
    }
}
