//! Keys, and their expected values.
//!
//! Law: a value is determined by the seed, the key and the number of times the key was set, so a
//! reader knows the expected value.

use draconis_device::Random;

/// Length of a key, in bytes.
pub const KEY_BYTES: usize = 16;

/// How keys are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum AccessPattern {
    /// In strict order; the key space is as large as there are operations.
    Sequential,
    /// Each as likely as any other.
    Uniform,
    /// Nine of ten from a tenth of the key space.
    Skewed,
}

/// Key numbers of one thread, in order.
pub struct KeySequence {
    pattern: AccessPattern,
    keyspace: u64,
    nth: u64,
    step: u64,
    dice: Random,
}

impl KeySequence {
    /// Creates the keys of a thread that starts at `first` and advances by `step`.
    pub fn new(pattern: AccessPattern, keyspace: u64, first: u64, step: u64, seed: u64) -> Self {
        Self { pattern, keyspace, nth: first, step, dice: Random::new(seed ^ (first << 40)) }
    }

    /// Returns the next key number.
    pub fn next(&mut self) -> u64 {
        let nth = self.nth;
        self.nth += self.step;
        match self.pattern {
            AccessPattern::Sequential => nth,
            AccessPattern::Uniform => self.dice.next_below(self.keyspace),
            AccessPattern::Skewed => {
                let popular = (self.keyspace / 10).max(1);
                if self.dice.next_below(10) < 9 {
                    self.dice.next_below(popular)
                } else {
                    popular + self.dice.next_below(self.keyspace.saturating_sub(popular).max(1))
                }
            }
        }
    }
}

/// Returns the key of a number; keys sort like their numbers.
pub fn encode_key(mut number: u64) -> [u8; KEY_BYTES] {
    let mut key = [b'0'; KEY_BYTES];
    for place in key.iter_mut().rev() {
        *place += (number % 10) as u8;
        number /= 10;
    }
    key
}

/// Returns the number of a key.
pub fn decode_key(key: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(key).ok().filter(|text| text.len() == KEY_BYTES)?;
    text.parse().ok()
}

/// Generator of expected values.
#[derive(Clone, Debug)]
pub struct ValueGenerator {
    seed: u64,
    expected: Vec<u8>,
}

impl ValueGenerator {
    /// Creates a generator of values of `len` bytes.
    pub fn new(seed: u64, len: usize) -> Self {
        Self { seed, expected: vec![0; len] }
    }

    /// Returns the value of `number` after it was set for the `version`th time. Half of it is
    /// compressible, as in real values.
    pub fn generate(&mut self, number: u64, version: u64) -> &[u8] {
        let half = self.expected.len() / 2;
        let mut dice = Random::new(self.seed ^ number.rotate_left(17) ^ version.rotate_left(50));
        dice.fill(&mut self.expected[..half]);
        &self.expected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_like_their_numbers() {
        let mut sequential = KeySequence::new(AccessPattern::Sequential, 1000, 0, 1, 1);
        let all: Vec<_> = (0..200).map(|_| encode_key(sequential.next())).collect();
        assert!(all.is_sorted());
        assert_eq!(&all[12], b"0000000000000012");
        assert_eq!(decode_key(&all[12]), Some(12));
        assert_eq!(decode_key(b"12"), None);
    }

    #[test]
    fn popular_keys_get_nine_of_ten_accesses() {
        let popular = |pattern| {
            let mut keys = KeySequence::new(pattern, 1000, 0, 1, 1);
            (0..10_000).filter(|_| keys.next() < 100).count()
        };
        assert!((8800..9200).contains(&popular(AccessPattern::Skewed)));
        assert!((800..1200).contains(&popular(AccessPattern::Uniform)));
    }

    #[test]
    fn values_are_distinct() {
        let mut values = ValueGenerator::new(1, 64);
        let first = values.generate(1, 0).to_vec();
        assert_eq!(values.generate(1, 0), first);
        for (number, version) in [(1, 1), (2, 0), (0, 1)] {
            assert_ne!(values.generate(number, version), first);
        }
        assert_ne!(ValueGenerator::new(2, 64).generate(1, 0), first);
    }
}
