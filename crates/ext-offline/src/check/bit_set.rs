//! Bit sets of blocks or inodes in words that threads update atomically.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::units::saturating_usize;

/// A set of numbers below a limit.
#[derive(Debug)]
pub(crate) struct AtomicBitSet {
    words: Vec<AtomicU64>,
    len: u64,
}

impl AtomicBitSet {
    /// Creates an empty set of numbers below `len`.
    pub(crate) fn new(len: u64) -> Self {
        let mut words = Vec::new();
        words.resize_with(saturating_usize(len.div_ceil(64)), AtomicU64::default);
        Self { words, len }
    }

    /// Returns the limit of the numbers.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn word(&self, nth: u64) -> Option<(&AtomicU64, u64)> {
        (nth < self.len).then_some(())?;
        Some((self.words.get(saturating_usize(nth / 64))?, 1 << (nth % 64)))
    }

    /// Adds `nth`; returns true if it was in the set. Numbers beyond the limit never are.
    pub(crate) fn insert(&self, nth: u64) -> bool {
        self.word(nth).is_some_and(|(word, bit)| word.fetch_or(bit, Ordering::Relaxed) & bit != 0)
    }

    /// Adds the bits `of` to the word of `nth`, a multiple of 64; returns those already set.
    /// Numbers beyond the limit never are.
    pub(crate) fn insert_word(&self, nth: u64, of: u64) -> u64 {
        let below = match self.len.saturating_sub(nth) {
            left @ 0..64 => (1u64 << left).wrapping_sub(1),
            _ => u64::MAX,
        };
        let word = self.words.get(saturating_usize(nth / 64));
        word.map_or(0, |word| word.fetch_or(of & below, Ordering::Relaxed) & of)
    }

    /// Returns true if `nth` is in the set.
    pub(crate) fn contains(&self, nth: u64) -> bool {
        self.word(nth).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Returns true if the set is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// Returns the 64 members from `nth` on as bits; zeros beyond the limit.
    pub(crate) fn word_from(&self, nth: u64) -> u64 {
        let load = |at: u64| {
            self.words.get(saturating_usize(at)).map_or(0, |word| word.load(Ordering::Relaxed))
        };
        let (at, shift) = (nth / 64, nth % 64);
        match shift {
            0 => load(at),
            _ => load(at) >> shift | load(at.saturating_add(1)) << 64u64.saturating_sub(shift),
        }
    }
}

/// Iterates over the numbers of the set bits.
pub(super) fn iter_set_bits(mut word: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros();
        (word != 0).then(|| {
            word &= word.wrapping_sub(1);
            u64::from(bit)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inserted_bits_are_contained() {
        let bits = AtomicBitSet::new(130);
        assert!(!bits.insert(0) && !bits.insert(129) && bits.insert(129) && !bits.insert(130));
        assert!(bits.contains(0) && !bits.contains(1) && !bits.contains(130));
        assert_eq!(iter_set_bits(0x8001).collect::<Vec<_>>(), [0, 15]);
        assert_eq!(bits.word_from(72), 1 << 57);
        assert_eq!(bits.word_from(128), 2);
        assert_eq!((bits.insert_word(64, 3), bits.insert_word(64, 6)), (0, 2));
        assert_eq!((bits.word_from(64), bits.insert_word(128, u64::MAX)), (7, 2));
        assert_eq!((bits.word_from(128), bits.insert_word(192, 1)), (3, 0));
    }
}
