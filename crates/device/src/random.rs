//! The pseudo-random generator of all crates, reproducible by seed.

/// SplitMix64: good enough for choices, and the same on every platform.
///
/// Law: a seed gives the same numbers in every version. Results of `--seed`, and seeds printed by
/// failures, depend on it.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator from a seed. Seeds that differ by a multiple of 0x9E37_79B9_7F4A_7C15,
    /// the generator's step, give the same sequence from different positions. So never multiply
    /// seeds by it.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns any number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub fn next_below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// Returns true with probability 1/`of`.
    pub fn once_in(&mut self, of: u64) -> bool {
        self.next_below(of) == 0
    }

    /// Returns true with probability `of_256`/256.
    pub fn chance(&mut self, of_256: u64) -> bool {
        self.next_u64() % 256 < of_256
    }

    /// Returns one of `of`, which is not empty.
    pub fn pick(&mut self, of: &[u64]) -> u64 {
        of[(self.next_u64() % of.len() as u64) as usize]
    }

    /// Fills `bytes` with incompressible data.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            let next = self.next_u64().to_le_bytes();
            piece.copy_from_slice(&next[..piece.len()]);
        }
    }

    /// Returns the numbers below `end` in random order.
    pub fn shuffled(&mut self, end: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..end).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, self.next_below(i as u64 + 1) as usize);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generator_matches_reference_output() {
        // The values of Vigna's splitmix64.c for 1234567.
        let mut random = Random::new(1_234_567);
        let numbers = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([random.next_u64(), random.next_u64()], numbers);
    }

    #[test]
    fn same_seed_repeats_sequence() {
        let five = |seed| {
            let mut random = Random::new(seed);
            (0..5).map(|_| random.next_below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(five(1), five(1));
        assert_ne!(five(1), five(2));
        assert_eq!(Random::new(1).next_below(0), 0);
        let mut all = Random::new(3).shuffled(100);
        assert_ne!(all, (0..100).collect::<Vec<_>>());
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
    }
}
