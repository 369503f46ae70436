//! Chance that a seed replays.

/// A small generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03 | 1)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Less than `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11).checked_rem(end).unwrap_or(0)
    }

    /// Fills bytes that no layer can guess.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            let next = self.next().to_le_bytes();
            piece.copy_from_slice(&next[..piece.len()]);
        }
    }

    /// The numbers below `end`, each once, in any order.
    pub fn shuffled(&mut self, end: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..end).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i as u64 + 1) as usize);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_replays_and_another_differs() {
        let five = |seed| {
            let mut dice = Random::new(seed);
            (0..5).map(|_| dice.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(five(1), five(1));
        assert_ne!(five(1), five(2));
        let mut all = Random::new(3).shuffled(100);
        assert_ne!(all, (0..100).collect::<Vec<_>>());
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
    }
}
