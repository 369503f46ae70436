//! Keys, and their expected values.
//!
//! Law: a value is determined by the seed, the key and the number of times the key was set, so a
//! reader knows the expected value.

use draconis_device::Random;

/// Length of a key, in bytes.
pub const KEY_BYTES: usize = 16;

/// How keys are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Pattern {
    /// In strict order; the key space is as large as there are operations.
    Sequential,
    /// Each as likely as any other.
    Uniform,
    /// Nine of ten from a tenth of the key space.
    Skewed,
}

/// Key numbers of one thread, in order.
pub struct Keys {
    pattern: Pattern,
    keyspace: u64,
    nth: u64,
    step: u64,
    dice: Random,
}

impl Keys {
    /// Creates the keys of a thread that starts at `first` and advances by `step`.
    pub fn new(pattern: Pattern, keyspace: u64, first: u64, step: u64, seed: u64) -> Self {
        Self { pattern, keyspace, nth: first, step, dice: Random::new(seed ^ (first << 40)) }
    }

    /// Returns the next key number.
    pub fn next(&mut self) -> u64 {
        let nth = self.nth;
        self.nth += self.step;
        match self.pattern {
            Pattern::Sequential => nth,
            Pattern::Uniform => self.dice.below(self.keyspace),
            Pattern::Skewed => {
                let popular = (self.keyspace / 10).max(1);
                if self.dice.below(10) < 9 {
                    self.dice.below(popular)
                } else {
                    popular + self.dice.below(self.keyspace.saturating_sub(popular).max(1))
                }
            }
        }
    }
}

/// Returns the key of a number; keys sort like their numbers.
pub fn key_of(mut number: u64) -> [u8; KEY_BYTES] {
    let mut key = [b'0'; KEY_BYTES];
    for place in key.iter_mut().rev() {
        *place += (number % 10) as u8;
        number /= 10;
    }
    key
}

/// Returns the number of a key.
pub fn number_of(key: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(key).ok().filter(|text| text.len() == KEY_BYTES)?;
    text.parse().ok()
}

/// Generator of expected values.
#[derive(Clone, Debug)]
pub struct Values {
    seed: u64,
    expected: Vec<u8>,
}

impl Values {
    /// Creates a generator of values of `len` bytes.
    pub fn new(seed: u64, len: usize) -> Self {
        Self { seed, expected: vec![0; len] }
    }

    /// Returns the value of `number` after it was set for the `version`th time. Half of it is
    /// compressible, as in real values.
    pub fn of(&mut self, number: u64, version: u64) -> &[u8] {
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
    fn keys_sort_as_their_numbers() {
        let mut sequential = Keys::new(Pattern::Sequential, 1000, 0, 1, 1);
        let all: Vec<_> = (0..200).map(|_| key_of(sequential.next())).collect();
        assert!(all.is_sorted());
        assert_eq!(&all[12], b"0000000000000012");
        assert_eq!(number_of(&all[12]), Some(12));
        assert_eq!(number_of(b"12"), None);
    }

    #[test]
    fn nine_of_ten_are_popular() {
        let popular = |pattern| {
            let mut keys = Keys::new(pattern, 1000, 0, 1, 1);
            (0..10_000).filter(|_| keys.next() < 100).count()
        };
        assert!((8800..9200).contains(&popular(Pattern::Skewed)));
        assert!((800..1200).contains(&popular(Pattern::Uniform)));
    }

    #[test]
    fn no_two_values_are_alike() {
        let mut values = Values::new(1, 64);
        let first = values.of(1, 0).to_vec();
        assert_eq!(values.of(1, 0), first);
        for (number, version) in [(1, 1), (2, 0), (0, 1)] {
            assert_ne!(values.of(number, version), first);
        }
        assert_ne!(Values::new(2, 64).of(1, 0), first);
    }
}
