//! Chance, from a seed.

/// SplitMix64: enough to choose with, and the same everywhere.
#[derive(Clone, Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number below `end`; 0 if there is none.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }

    /// True so many times in 256.
    pub(crate) fn chance(&mut self, of_256: u64) -> bool {
        self.next() % 256 < of_256
    }

    pub(crate) fn pick(&mut self, of: &[u64]) -> u64 {
        of[(self.next() % of.len() as u64) as usize]
    }
}
