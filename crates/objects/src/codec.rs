//! Numbers and bytes on the disk, and their checksum.

use twox_hash::XxHash3_64;

use crate::{Error, Result};

/// Checksum over the bytes, their address and the store's seed. Misplaced or stale bytes do not
/// pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Checksummer(pub u64);

impl Checksummer {
    /// Returns the checksum of `bytes` at byte `at` of the disk.
    pub fn checksum(self, at: u64, bytes: &[u8]) -> u64 {
        Self::hash(bytes) ^ mix_bits(at ^ self.0)
    }

    /// Returns the part of a checksum that depends on the bytes only.
    pub fn hash(bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot(bytes)
    }
}

/// End of the counters of a store: none gets this far, so adding to a decoded one cannot overflow.
pub(crate) const COUNTER_END: u64 = 1 << 62;

/// Spreads a number over all bits (the finaliser of SplitMix64).
pub(crate) fn mix_bits(number: u64) -> u64 {
    draconis_device::Random::new(number).next_u64()
}

/// Returns the number that [`mix_bits`] mixes to this one.
pub(crate) fn unmix_bits(mixed: u64) -> u64 {
    let unshift =
        |number: u64, bits: u32| number ^ number >> bits ^ number >> bits.saturating_mul(2);
    // The inverses of the factors, modulo 2^64.
    let number = unshift(mixed, 31).wrapping_mul(0x3196_42B2_D24D_8EC3);
    let number = unshift(number, 27).wrapping_mul(0x96DE_1B17_3F11_9089);
    unshift(number, 30).wrapping_sub(0x9E37_79B9_7F4A_7C15)
}

/// Appends a number in 7-bit groups, least significant first.
pub(crate) fn put_varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(low_byte(value) | 0x80);
        value >>= 7;
    }
    into.push(low_byte(value));
}

/// Returns the lowest eight bits.
pub(crate) fn low_byte(value: u64) -> u8 {
    let [low, ..] = value.to_le_bytes();
    low
}

/// Returns the lowest 32 bits.
pub(crate) fn low_u32(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Converts a length or index in memory. Larger values become `usize::MAX`, which no slice has.
pub(crate) fn to_usize_saturating(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Returns the `len` bytes at address `at` of `bytes`, which begin at address `start`.
pub(crate) fn slice_at(bytes: &[u8], start: u64, at: u64, len: usize) -> Option<&[u8]> {
    let from = usize::try_from(at.checked_sub(start)?).ok()?;
    bytes.get(from..)?.get(..len)
}

/// Converts a length to its 32 bits on the disk. Larger values become the largest.
pub(crate) fn to_u32_saturating(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Decoder of the `put_..` functions' output. Never reads past the end, never panics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    pos: usize,
    /// Address of the bytes on the disk, for errors.
    at: u64,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], at: u64) -> Self {
        Self { bytes, pos: 0, at }
    }

    pub fn pos(&self) -> usize {
        self.pos
    }

    /// Returns the unread bytes.
    pub fn remaining(&self) -> &'a [u8] {
        self.bytes.get(self.pos..).unwrap_or_default()
    }

    pub fn is_done(&self) -> bool {
        self.pos == self.bytes.len()
    }

    /// Returns an error for the reader's current position.
    pub fn corrupt(&self, what: &'static str) -> Error {
        Error::Corrupt { what, at_bytes: self.at.saturating_add(self.pos as u64) }
    }

    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let bytes = self.remaining().get(..len);
        let bytes = bytes.ok_or_else(|| self.corrupt("a structure that ends early"))?;
        self.pos = self.pos.saturating_add(len);
        Ok(bytes)
    }

    pub fn u8(&mut self) -> Result<u8> {
        let byte = self.bytes(1)?.first().copied();
        byte.ok_or_else(|| self.corrupt("a structure that ends early"))
    }

    pub fn u32(&mut self) -> Result<u32> {
        let mut word = [0; 4];
        word.copy_from_slice(self.bytes(4)?);
        Ok(u32::from_le_bytes(word))
    }

    pub fn u64(&mut self) -> Result<u64> {
        let mut word = [0; 8];
        word.copy_from_slice(self.bytes(8)?);
        Ok(u64::from_le_bytes(word))
    }

    pub fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.corrupt("a number without an end"))
    }

    /// Reads a varint that counts up from zero. It is below [`COUNTER_END`].
    pub fn counter(&mut self) -> Result<u64> {
        match self.varint()? {
            count if count < COUNTER_END => Ok(count),
            _ => Err(self.corrupt("a counter")),
        }
    }

    /// Reads a number that must fit.
    pub fn varint_u32(&mut self) -> Result<u32> {
        u32::try_from(self.varint()?).map_err(|_| self.corrupt("a number that is too large"))
    }

    /// Reads a length-prefixed byte string.
    pub fn length_prefixed(&mut self) -> Result<&'a [u8]> {
        let len = self.varint_u32()?;
        self.bytes(len as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_round_trip() {
        let values = [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX];
        let mut bytes = vec![];
        for value in values {
            put_varint(&mut bytes, value);
        }
        let mut reader = Reader::new(&bytes, 0);
        for value in values {
            assert_eq!(reader.varint(), Ok(value));
        }
        assert!(reader.is_done());
        assert!(reader.varint().is_err());
        assert!(Reader::new(&[0xff; 12], 0).varint().is_err());
    }

    #[test]
    fn unmixing_undoes_mixing() {
        for number in
            [0, 1, u64::MAX, 0x1234_5678_9abc_def0].into_iter().chain((0..64).map(|b| 1 << b))
        {
            assert_eq!(unmix_bits(mix_bits(number)), number);
        }
    }

    #[test]
    fn checksum_depends_on_address() {
        let (ours, theirs) = (Checksummer(1), Checksummer(2));
        assert_eq!(ours.checksum(4096, b"abc"), ours.checksum(4096, b"abc"));
        assert_ne!(ours.checksum(4096, b"abc"), ours.checksum(8192, b"abc"));
        assert_ne!(ours.checksum(4096, b"abc"), theirs.checksum(4096, b"abc"));
    }
}
