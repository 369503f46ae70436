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
use crate::entry::{Entry, Key, PayloadRef, checksum_blocks, is_valid_for_key};
use crate::{Error, Result};

/// The lowest two bits of the flags.
const KIND_PAIR: u8 = 0;
const KIND_NODE: u8 = 1;
const KIND_CHUNK: u8 = 2;
const KIND_MASK: u8 = 3;
/// The pair directly follows the one before it.
const FLAG_IN_ORDER: u8 = 1 << 2;
/// The payload is whole, directly follows the last one, and is as long as that of the pair before.
const FLAG_ADJACENT_PAYLOAD: u8 = 1 << 3;
/// The upper three bits: zeros at the end of the key.
const KEY_ZEROS_SHIFT: u32 = 5;
const MAX_KEY_ZEROS: usize = 7;
/// Bytes that a key may share with the one before it.
const MAX_SHARED_KEY_BYTES: usize = 64;

/// One item of a summary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum SummaryItem {
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
    fn update(&mut self, order: u64, key: &[u8], entry: &Entry) {
        self.order = order;
        self.key = Key::from_slice(key);
        if let Entry::Data(data) = entry {
            (self.end, self.stored) = (data.end(), data.stored);
        }
    }

    fn is_adjacent_same_length(&self, data: &PayloadRef) -> bool {
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

    /// Returns the most bytes that a pair takes, with a payload of `len` bytes; a value in the entry
    /// itself is included.
    pub fn max_pair_bytes(key_len: usize, len: usize) -> usize {
        key_len.saturating_add(checksum_blocks(len).saturating_mul(8)).saturating_add(56)
    }

    pub fn add_pair(&mut self, order: u64, key: &[u8], entry: &Entry) {
        let before = &self.before;
        let is_in_order = Some(order) == before.order.checked_add(1);
        let alike = match entry {
            Entry::Data(data) if before.is_adjacent_same_length(data) => Some(data),
            _ => None,
        };
        let zeros = key.iter().rev().take(MAX_KEY_ZEROS).take_while(|&&byte| byte == 0).count();
        let told = key.get(..key.len().saturating_sub(zeros)).unwrap_or_default();
        let shared =
            before.key.iter().zip(told).take(MAX_SHARED_KEY_BYTES).take_while(|(a, b)| a == b);
        let shared = shared.count();
        let flags = KIND_PAIR
            | if is_in_order { FLAG_IN_ORDER } else { 0 }
            | if alike.is_some() { FLAG_ADJACENT_PAYLOAD } else { 0 }
            | low_byte(zeros as u64) << KEY_ZEROS_SHIFT;
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
        self.before.update(order, key, entry);
    }

    /// Adds the item of a node or a chunk.
    pub fn add_block(&mut self, is_node: bool, at: u64, len: u32) {
        self.bytes.push(if is_node { KIND_NODE } else { KIND_CHUNK });
        put_varint(&mut self.bytes, at.saturating_sub(self.frame_at));
        put_varint(&mut self.bytes, u64::from(len));
        self.before.end = at.saturating_add(u64::from(len));
    }
}

/// Decoder of a summary.
#[derive(Debug)]
pub(crate) struct SummaryItems<'a> {
    reader: Reader<'a>,
    frame_at: u64,
    before: DeltaContext,
}

impl<'a> SummaryItems<'a> {
    /// Decodes the items of `table`, which is at offset `table_at` of the frame at address
    /// `frame_at`.
    pub fn new(table: &'a [u8], frame_at: u64, table_at: u32) -> Self {
        let reader = Reader::new(table, frame_at.saturating_add(u64::from(table_at)));
        Self { reader, frame_at, before: DeltaContext::default() }
    }

    fn read(&mut self) -> Result<SummaryItem> {
        let flags = self.reader.u8()?;
        match flags & KIND_MASK {
            KIND_PAIR if flags >> 4 & 1 == 0 => self.read_pair(flags),
            kind @ (KIND_NODE | KIND_CHUNK) if flags == kind => {
                let at = self.frame_at.saturating_add(u64::from(self.reader.varint_u32()?));
                let len = self.reader.varint_u32()?;
                self.before.end = at.saturating_add(u64::from(len));
                Ok(if kind == KIND_NODE {
                    SummaryItem::Node { at, len }
                } else {
                    SummaryItem::Chunk { at, len }
                })
            }
            _ => Err(self.reader.corrupt("an item of a kind that is not known")),
        }
    }

    fn read_pair(&mut self, flags: u8) -> Result<SummaryItem> {
        let order = match flags & FLAG_IN_ORDER {
            0 => self.reader.varint()?,
            _ => self.before.order.checked_add(1).ok_or_else(|| self.invalid_item_error())?,
        };
        let shared = usize::from(self.reader.u8()?);
        let mut key = match self.before.key.get(..shared) {
            Some(shared) if shared.len() <= MAX_SHARED_KEY_BYTES => Key::from_slice(shared),
            _ => return Err(self.invalid_item_error()),
        };
        key.extend_from_slice(self.reader.length_prefixed()?);
        key.extend(std::iter::repeat_n(0, usize::from(flags >> KEY_ZEROS_SHIFT)));
        let entry = match flags & FLAG_ADJACENT_PAYLOAD {
            0 => Entry::decode(&mut self.reader)?,
            _ => Entry::Data(self.read_adjacent_payload()?),
        };
        if !is_valid_for_key(&key, &entry) {
            return Err(self.reader.corrupt("an entry under the wrong key"));
        }
        self.before.update(order, &key, &entry);
        Ok(SummaryItem::Pair(order, key, entry))
    }

    fn read_adjacent_payload(&mut self) -> Result<PayloadRef> {
        let (at, stored) = (self.before.end, self.before.stored);
        if at.checked_add(u64::from(stored)).is_none() {
            return Err(self.invalid_item_error());
        }
        let sums = (0..checksum_blocks(stored as usize))
            .map(|_| self.reader.u64())
            .collect::<Result<_>>()?;
        Ok(PayloadRef { at, stored, skip: 0, len: stored, sums })
    }

    fn invalid_item_error(&self) -> Error {
        self.reader.corrupt("an item that cannot follow the one before it")
    }
}

impl Iterator for SummaryItems<'_> {
    type Item = Result<SummaryItem>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.reader.is_done()).then(|| self.read())
    }
}

#[cfg(test)]
mod tests {
    use smallvec::SmallVec;

    use super::*;
    use crate::LifetimeHint;
    use crate::ObjectId;
    use crate::entry::{MAX_INLINE_VALUE_BYTES, ObjectRecord, extent_key, object_key, value_key};

    const FRAME_AT: u64 = 1 << 20;

    fn test_extent(at: u64, len: u32) -> Entry {
        let sums = (0..checksum_blocks(len as usize) as u64).map(|piece| at * 31 + piece).collect();
        Entry::Data(PayloadRef { at: FRAME_AT + at, stored: len, skip: 0, len, sums })
    }

    fn encode_items(items: &[SummaryItem]) -> Vec<u8> {
        let mut table = FrameSummary::new(FRAME_AT);
        for item in items {
            let before = table.bytes.len();
            match item {
                SummaryItem::Pair(order, key, entry) => {
                    table.add_pair(*order, key, entry);
                    let len = entry.covered_bytes() as usize;
                    let payload = if matches!(entry, Entry::Data(_)) { len } else { 0 };
                    assert!(
                        table.bytes.len() - before
                            <= FrameSummary::max_pair_bytes(key.len(), payload)
                    );
                }
                SummaryItem::Node { at, len } => table.add_block(true, *at, *len),
                SummaryItem::Chunk { at, len } => table.add_block(false, *at, *len),
            }
        }
        table.bytes
    }

    fn sample_items() -> Vec<SummaryItem> {
        let id = ObjectId(77);
        let record = ObjectRecord { len: 9, ..ObjectRecord::new(LifetimeHint::Cold) };
        let long = vec![7; 300];
        let longest = SmallVec::from_slice(&[7; MAX_INLINE_VALUE_BYTES]);
        vec![
            SummaryItem::Pair(5, extent_key(id, 0), test_extent(4096, 4096)),
            SummaryItem::Pair(6, extent_key(id, 1 << 20), test_extent(8192, 4096)),
            SummaryItem::Pair(9, extent_key(id, 4096), test_extent(12288, 9000)),
            SummaryItem::Pair(10, extent_key(id, u64::MAX / 2), test_extent(24576, 9000)),
            SummaryItem::Node { at: FRAME_AT + 33_576, len: 500 },
            SummaryItem::Chunk { at: FRAME_AT + 34_076, len: 80 },
            SummaryItem::Pair(11, value_key(&[0; 40]), test_extent(34_156, 9000)),
            SummaryItem::Pair(12, value_key(&[]), Entry::Tombstone),
            SummaryItem::Pair(13, value_key(&long), Entry::ValueObject(id, 1 << 30)),
            SummaryItem::Pair(14, value_key(&long), test_extent(50_000, 1)),
            SummaryItem::Pair(15, object_key(ObjectId(0)), Entry::Object(record)),
            SummaryItem::Pair(2, extent_key(id, 5), Entry::Hole(u64::MAX - 5)),
            SummaryItem::Pair(u64::MAX, value_key(&[1; 300]), Entry::Inline(longest)),
        ]
    }

    #[test]
    fn summaries_round_trip() {
        let bytes = encode_items(&sample_items());
        let back: Vec<SummaryItem> =
            SummaryItems::new(&bytes, FRAME_AT, 72).map(Result::unwrap).collect();
        assert_eq!(back, sample_items());
    }

    #[test]
    fn summary_of_mebibyte_fits_header_page() {
        let mut order = 0;
        let pairs: Vec<SummaryItem> = (0..255u64)
            .map(|nth| {
                order += 1;
                let block = crate::codec::mix_bits(nth) % (1 << 22);
                SummaryItem::Pair(
                    order,
                    extent_key(ObjectId(1), block * 4096),
                    test_extent((nth + 1) * 4096, 4096),
                )
            })
            .collect();
        assert!(
            encode_items(&pairs).len() <= 4096 - crate::frame::HEADER_BYTES,
            "{}",
            encode_items(&pairs).len()
        );
    }

    #[test]
    fn arbitrary_bytes_decode_without_panic() {
        let whole = encode_items(&sample_items());
        let mut dice = 1u64;
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..3 {
                dice = crate::codec::mix_bits(dice);
                let place = dice as usize % bytes.len();
                bytes[place] = (dice >> 32) as u8;
            }
            bytes.truncate(1 + (dice >> 16) as usize % bytes.len());
            let most = bytes.len();
            let items: Vec<SummaryItem> =
                SummaryItems::new(&bytes, FRAME_AT, 72).map_while(Result::ok).collect();
            let keys: usize = items
                .iter()
                .map(|item| if let SummaryItem::Pair(_, key, _) = item { key.len() } else { 0 })
                .sum();
            assert!(keys <= most * (MAX_SHARED_KEY_BYTES + MAX_KEY_ZEROS), "{keys} of {most}");
        }
    }
}
