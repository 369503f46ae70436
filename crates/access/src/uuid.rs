//! UUIDs: random, from a seed, or parsed.

use std::fs::File;

use draconis_device::Random;

/// Generator of UUIDs, reproducible if it has a seed.
pub struct UuidGenerator(Option<Random>);

impl UuidGenerator {
    /// Creates a generator from a seed, or a random one.
    pub fn new(seed: Option<u64>) -> Self {
        Self(seed.map(Random::new))
    }

    /// Returns a new version 4 UUID.
    pub fn uuid(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match &mut self.0 {
            Some(random) => random.fill(&mut bytes),
            None => {
                if let Ok(mut file) = File::open("/dev/urandom") {
                    let _ = std::io::Read::read_exact(&mut file, &mut bytes);
                }
            }
        }
        bytes[6] = bytes[6] & 0x0F | 0x40;
        bytes[8] = bytes[8] & 0x3F | 0x80;
        bytes
    }
}

/// Parses `01234567-89ab-..`; `None` if it is no UUID.
pub fn parse(text: &str) -> Option<[u8; 16]> {
    let hyphens = text.bytes().enumerate().filter(|(_, byte)| *byte == b'-').map(|(at, _)| at);
    if text.len() != 36 || !hyphens.eq([8, 13, 18, 23]) {
        return None;
    }
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let value = u128::from_str_radix(&digits, 16).ok()?;
    Some(value.to_be_bytes())
}
