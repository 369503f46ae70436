//! Filter for the ranges of objects that the intervals of a memtable touch: most memtables need no
//! search.
//!
//! Law: it may have false positives, never false negatives.
use crate::ObjectId;
use crate::codec::{low_u32, mix_bits, to_usize_saturating};
use crate::entry::{CHECKSUM_BLOCK_BYTES, DecodedKey, Entry, Key, decode_key};

/// Filter for the ranges of objects that a memtable's intervals touch.
#[derive(Debug, Default)]
pub(super) struct RangeFilter {
    /// A bit for each 4 KiB block of an object that hashes to it.
    bits: Vec<u64>,
    /// Number of added blocks.
    pub(super) pieces: usize,
    /// Intervals that are too long for bits.
    wide: Vec<(ObjectId, u64, u64)>,
}

/// Most blocks of an interval that get bits.
const MAX_FILTERED_BLOCKS: u64 = 64;
/// Most blocks that a query tests: for more, the memtable is searched.
const MAX_QUERY_BLOCKS: u64 = 3;
/// Most wide intervals: they are scanned.
const MAX_WIDE_INTERVALS: usize = 16;

const BLOCK_BYTES: u64 = CHECKSUM_BLOCK_BYTES as u64;

fn block_count(blocks: &std::ops::Range<u64>) -> u64 {
    blocks.end.saturating_sub(blocks.start)
}

fn block_range(from: u64, to: u64) -> std::ops::Range<u64> {
    from / BLOCK_BYTES..to.div_ceil(BLOCK_BYTES)
}

impl RangeFilter {
    /// Creates a filter for so many blocks, at 16 bits each.
    pub(super) fn with_block_capacity(pieces: usize) -> Self {
        let words = if pieces == 0 { 0 } else { (pieces / 4).next_power_of_two() };
        Self { bits: vec![0; words], pieces: 0, wide: vec![] }
    }

    pub(super) fn from_pairs(pairs: &[(Key, Entry)]) -> Self {
        let narrow = |(key, entry): &(Key, Entry)| match decode_key(key) {
            Some(DecodedKey::Extent(_, at)) => {
                let pieces = block_range(at, entry.end_from(at));
                to_usize_saturating(block_count(&pieces).min(MAX_FILTERED_BLOCKS))
            }
            _ => 0,
        };
        let mut touched = Self::with_block_capacity(pairs.iter().map(narrow).sum());
        pairs.iter().for_each(|(key, entry)| touched.add(key, entry));
        touched
    }

    fn bit_position(&self, id: ObjectId, piece: u64) -> (usize, u64) {
        let hash = mix_bits(id.0.rotate_left(40) ^ piece);
        (low_u32(hash >> 6) as usize & self.bits.len().wrapping_sub(1), 1 << (hash & 63))
    }

    pub(super) fn add(&mut self, key: &[u8], entry: &Entry) {
        let Some(DecodedKey::Extent(id, at)) = decode_key(key) else { return };
        let (from, to) = (at, entry.end_from(at));
        let pieces = block_range(from, to);
        let count = block_count(&pieces);
        if count > MAX_FILTERED_BLOCKS || self.bits.is_empty() {
            self.wide.push((id, from, to));
            return;
        }
        self.pieces = self.pieces.saturating_add(to_usize_saturating(count));
        for piece in pieces {
            let (word, bit) = self.bit_position(id, piece);
            if let Some(bits) = self.bits.get_mut(word) {
                *bits |= bit;
            }
        }
    }

    pub(super) fn may_contain(&self, id: ObjectId, from: u64, to: u64) -> bool {
        let mut pieces = block_range(from, to);
        if self.wide.len() > MAX_WIDE_INTERVALS || block_count(&pieces) > MAX_QUERY_BLOCKS {
            return true;
        }
        self.wide.iter().any(|&(of, start, end)| of == id && start < to && from < end)
            || !self.bits.is_empty()
                && pieces.any(|piece| {
                    let (word, bit) = self.bit_position(id, piece);
                    self.bits.get(word).is_some_and(|bits| bits & bit != 0)
                })
    }
}
