//! Identities: UUIDs by chance, from a seed, or as they are written.

use std::fs::File;

/// Chance: from a seed, so that it can be had again, or from the system.
pub struct Random(Option<u64>);

impl Random {
    pub fn new(seed: Option<u64>) -> Self {
        Self(seed)
    }

    /// The next number (splitmix64).
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = *state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A UUID of version 4.
    pub fn uuid(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match &mut self.0 {
            Some(state) => {
                let halves = [Self::next(state), Self::next(state)].map(u64::to_le_bytes);
                bytes.copy_from_slice(halves.as_flattened());
            }
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

/// What is written as `01234567-89ab-..`; `None` if it is none.
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
