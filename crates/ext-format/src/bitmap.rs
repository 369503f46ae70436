//! Bitmaps of blocks and inodes: 1 for used, the lowest bit of the first byte first. Read in words
//! of 64 bits.
//!
//! Law: bits beyond the valid ones are never read, counted or changed.

use crate::units::{saturating_u32, saturating_usize};

const WORD_BITS: u32 = 64;

/// A run of adjacent bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BitRun {
    /// First bit.
    pub start: u32,
    /// Number of bits.
    pub len: u32,
}

/// The bits of one bitmap block.
#[derive(Clone, Copy, Debug)]
pub struct Bitmap<'a> {
    bytes: &'a [u8],
    bits: u32,
}

impl<'a> Bitmap<'a> {
    /// Creates a view of the first `bits` bits of a block, clipped to its length.
    pub fn new(bytes: &'a [u8], bits: u32) -> Self {
        Self { bytes, bits: bits.min(saturating_u32((bytes.len() as u64).saturating_mul(8))) }
    }

    /// Returns the number of valid bits.
    pub const fn len(&self) -> u32 {
        self.bits
    }

    /// Returns true if no bit is valid.
    pub const fn is_empty(&self) -> bool {
        self.bits == 0
    }

    /// Returns true if the bit is set; `None` beyond the valid ones.
    pub fn get(&self, nth: u32) -> Option<bool> {
        (nth < self.bits).then(|| self.word(nth / WORD_BITS) >> (nth % WORD_BITS) & 1 == 1)
    }

    /// Returns word `nth`; zeros beyond the bytes.
    #[inline]
    fn word(&self, nth: u32) -> u64 {
        let at = saturating_usize(u64::from(nth) * 8);
        let rest = self.bytes.get(at..).unwrap_or_default();
        match rest.first_chunk() {
            Some(bytes) => u64::from_le_bytes(*bytes),
            None => {
                let mut bytes = [0; 8];
                bytes.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
                u64::from_le_bytes(bytes)
            }
        }
    }

    /// Returns the first bit in `from..end` that is set after XOR with `flip`.
    #[inline]
    #[allow(clippy::arithmetic_side_effects, reason = "`bits` is at most 2^19: `new` clips it")]
    fn next(&self, from: u32, end: u32, flip: u64) -> Option<u32> {
        let end = end.min(self.bits);
        if from >= end {
            return None;
        }
        let mut nth = from / WORD_BITS;
        let mut word = (self.word(nth) ^ flip) & u64::MAX << (from % WORD_BITS);
        while word == 0 {
            nth += 1;
            if nth * WORD_BITS >= end {
                return None;
            }
            word = self.word(nth) ^ flip;
        }
        let found = nth * WORD_BITS + word.trailing_zeros();
        (found < end).then_some(found)
    }

    /// Returns the first zero at or after `from`.
    pub fn next_zero(&self, from: u32) -> Option<u32> {
        self.next(from, self.bits, u64::MAX)
    }

    /// Returns the first one at or after `from`.
    pub fn next_one(&self, from: u32) -> Option<u32> {
        self.next(from, self.bits, 0)
    }

    /// Counts adjacent zeros from `from` on, up to `most`.
    pub fn zeros_at(&self, from: u32, most: u32) -> u32 {
        let end = from.saturating_add(most).min(self.bits);
        self.next(from, end, 0).unwrap_or(end).saturating_sub(from)
    }

    /// Counts adjacent ones from `from` on, up to `most`.
    pub fn ones_at(&self, from: u32, most: u32) -> u32 {
        let end = from.saturating_add(most).min(self.bits);
        self.next(from, end, u64::MAX).unwrap_or(end).saturating_sub(from)
    }

    /// Returns the first run of `want` zeros from `from` on, or else the longest run. The run is
    /// never longer than `want`.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "a run of zeros ends at `bits`, at most 2^19"
    )]
    pub fn next_zero_run(&self, from: u32, want: u32) -> Option<BitRun> {
        let mut best: Option<BitRun> = None;
        let mut at = from;
        while let Some(start) = self.next_zero(at) {
            let len = self.zeros_at(start, want.max(1));
            if best.is_none_or(|best| len > best.len) {
                best = Some(BitRun { start, len });
            }
            if len >= want {
                break;
            }
            at = start + len;
        }
        best
    }

    /// Counts the zeros.
    #[allow(clippy::arithmetic_side_effects, reason = "no more than `bits` ones are counted")]
    pub fn count_zeros(&self) -> u32 {
        self.bits - self.count_ones_in(BitRun { start: 0, len: self.bits })
    }

    fn count_ones_in(&self, run: BitRun) -> u32 {
        word_masks(run).map(|(nth, mask)| (self.word(nth) & mask).count_ones()).sum()
    }

    /// Returns true if the run is valid and all its bits are `value`.
    pub fn is_all(&self, run: BitRun, value: bool) -> bool {
        let valid = run.start.checked_add(run.len).is_some_and(|end| end <= self.bits);
        let flip = if value { u64::MAX } else { 0 };
        valid && word_masks(run).all(|(nth, mask)| (self.word(nth) ^ flip) & mask == 0)
    }
}

/// Returns the words of a run with the masks of its bits.
#[allow(clippy::arithmetic_side_effects, reason = "a word of the run begins before its end")]
fn word_masks(run: BitRun) -> impl Iterator<Item = (u32, u64)> {
    let end = run.start.saturating_add(run.len);
    let words = run.start / WORD_BITS..end.div_ceil(WORD_BITS);
    words.filter(move |_| run.len != 0).map(move |nth| {
        let first = nth * WORD_BITS;
        let low = u64::MAX << run.start.saturating_sub(first);
        let high = match end - first {
            left @ 0..WORD_BITS => !(u64::MAX << left),
            _ => u64::MAX,
        };
        (nth, low & high)
    })
}

/// Sets all bits of a run to `value`; bits beyond the block are skipped.
pub fn fill(bytes: &mut [u8], run: BitRun, value: bool) {
    for (nth, mask) in word_masks(run) {
        let rest = bytes.get_mut(saturating_usize(u64::from(nth) * 8)..).unwrap_or_default();
        for (byte, mask) in rest.iter_mut().zip(mask.to_le_bytes()) {
            *byte = if value { *byte | mask } else { *byte & !mask };
        }
    }
}

#[cfg(test)]
mod tests {
    use draconis_device::Random;

    use super::*;

    fn random_below(random: &mut Random, limit: u32) -> u32 {
        random.next_below(u64::from(limit)) as u32
    }

    fn naive_next_zero_run(bits: &[bool], from: u32, want: u32) -> Option<BitRun> {
        let mut best: Option<BitRun> = None;
        let mut run = BitRun { start: from, len: 0 };
        for (nth, bit) in bits.iter().enumerate().skip(from as usize) {
            if *bit {
                run = BitRun { start: nth as u32 + 1, len: 0 };
                continue;
            }
            run.len += 1;
            if best.is_none_or(|best| run.len > best.len) {
                best = Some(run);
            }
            if run.len >= want {
                break;
            }
        }
        best
    }

    /// Builds a bitmap of random runs, and the same as a list of bits.
    fn random_run_bitmap(
        random: &mut Random,
        bytes: u32,
        longest: u32,
    ) -> (Vec<u8>, Vec<bool>, u32) {
        let mut block = vec![0u8; bytes as usize];
        let bits = random_below(random, bytes * 8 + 1);
        let mut naive = Vec::new();
        let mut value = random_below(random, 2) == 1;
        while naive.len() < block.len() * 8 {
            let len = 1 + random_below(random, longest) as usize;
            naive.resize((naive.len() + len).min(block.len() * 8), value);
            value = !value;
        }
        for (nth, value) in naive.iter().enumerate() {
            block[nth / 8] |= u8::from(*value) << (nth % 8);
        }
        naive.truncate(bits as usize);
        (block, naive, bits)
    }

    #[test]
    fn word_search_matches_bit_search() {
        let mut random = Random::new(1);
        for round in 0..2000 {
            let bytes = [1, 7, 8, 20, 128, 1024][random_below(&mut random, 6) as usize];
            let (block, naive_bits, bits) =
                random_run_bitmap(&mut random, bytes, [3, 40, 300][round % 3]);
            let map = Bitmap::new(&block, bits);
            let zeros = naive_bits.iter().filter(|bit| !**bit).count();
            assert_eq!((map.len(), map.count_zeros()), (bits, zeros as u32));
            for _ in 0..8 {
                let from = random_below(&mut random, bits + 70);
                let after = naive_bits.get(from as usize..).unwrap_or_default();
                let first = |value| after.iter().position(|it| *it == value);
                assert_eq!(map.next_zero(from), first(false).map(|at| at as u32 + from));
                assert_eq!(map.next_one(from), first(true).map(|at| at as u32 + from));
                let most = random_below(&mut random, 200);
                let zeros = after.iter().take_while(|it| !**it).count() as u32;
                assert_eq!(map.zeros_at(from, most), zeros.min(most));
                let want = 1 + random_below(&mut random, 400);
                assert_eq!(
                    map.next_zero_run(from, want),
                    naive_next_zero_run(&naive_bits, from, want)
                );
                assert_eq!(map.get(from), naive_bits.get(from as usize).copied());
            }
        }
    }

    /// `cargo test --release -- --ignored --nocapture a_block_of_bits`.
    #[test]
    #[ignore = "by hand: measures"]
    fn by_hand_bitmap_block_is_searched_quickly() {
        let mut full = vec![0xFF; 4096];
        let time = |what: &str, work: &dyn Fn() -> Option<u32>| {
            let start = std::time::Instant::now();
            for _ in 0..100_000 {
                std::hint::black_box(work());
            }
            println!("{what}: {:?}", start.elapsed() / 100_000);
        };
        full[4095] = 0x7F;
        let map = Bitmap::new(std::hint::black_box(&full), 32768);
        time("last zero of 32,768", &|| map.next_zero(0));
        time("count", &|| Some(map.count_zeros()));
        let (block, ..) = random_run_bitmap(&mut Random::new(4), 4096, 16);
        let map = Bitmap::new(std::hint::black_box(&block), 32768);
        time("a run that is not there, among short ones", &|| {
            map.next_zero_run(0, 64).map(|it| it.len)
        });
    }
}
