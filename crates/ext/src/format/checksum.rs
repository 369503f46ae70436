//! Checksums of metadata: CRC-32C over a seed, what a structure belongs to, and its bytes.
//!
//! ```text
//!   volume's seed = UUID, or what the superblock says it was when the volume was made
//!     ├─ superblock                                    (begins anew, without the seed)
//!     ├─ bitmaps · attribute block with its number · descriptor with its group's number
//!     └─ inode number, generation ── inode · directory block · node of a hash tree · extents
//! ```
//! (`Documentation/filesystems/ext4/checksums.rst`.) A structure that shares its block with others
//! of its kind is sealed by what changes it; a whole block when it is handed over.

/// A checksum in the making.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checksum(u32);

impl Checksum {
    /// Of nothing.
    pub const fn new() -> Self {
        Self(!0)
    }

    /// That goes on from a value.
    pub const fn seeded(seed: u32) -> Self {
        Self(seed)
    }

    /// With more bytes.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Self {
        // The library's sums are inverted before and after, these are not.
        Self(!crc32c::crc32c_append(!self.0, bytes))
    }

    /// With a number of 32 bits.
    #[must_use]
    pub fn update_u32(self, number: u32) -> Self {
        self.update(&number.to_le_bytes())
    }

    /// With a number of 64 bits.
    #[must_use]
    pub fn update_u64(self, number: u64) -> Self {
        self.update(&number.to_le_bytes())
    }

    /// What is stored.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// What is stored in 16 bits.
    pub const fn low16(self) -> u16 {
        let [a, b, ..] = self.0.to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    /// The other 16 bits.
    pub const fn high16(self) -> u16 {
        let [.., a, b] = self.0.to_le_bytes();
        u16::from_le_bytes([a, b])
    }
}

/// The number whose four bytes, between `before` and `behind`, make the sum of all three `sum`.
pub fn solve_for(before: Checksum, behind: &[u8], sum: u32) -> u32 {
    // A sum is taken back bit by bit; what the four bytes must have made of `before` remains.
    let back = |sum: u32, byte: u8| {
        let bits = (0..8).fold(sum, |sum, _| match sum >> 31 {
            0 => sum << 1,
            _ => (sum ^ 0x82F6_3B78) << 1 | 1,
        });
        bits ^ u32::from(byte)
    };
    let behind = behind.iter().rev().fold(sum, |sum, byte| back(sum, *byte));
    before.value() ^ (0..4).fold(behind, |sum, _| back(sum, 0))
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

/// The sum of group descriptors on volumes with `gdt_csum` alone: CRC-16 with the polynomial
/// 0x8005, mirrored, from `sum` on.
pub fn crc16(sum: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(sum, |sum, byte| {
        (0..8).fold(sum ^ u16::from(*byte), |sum, _| {
            (sum >> 1) ^ if sum & 1 != 0 { 0xA001 } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bytes_make_any_sum() {
        for (before, behind, sum) in [("", "", 0), ("ab", "c", 7), ("x", "0123456789", !0)] {
            let start = Checksum::new().update(before.as_bytes());
            let bytes = solve_for(start, behind.as_bytes(), sum).to_le_bytes();
            assert_eq!(start.update(&bytes).update(behind.as_bytes()).value(), sum);
        }
    }

    #[test]
    fn sums_are_those_of_the_standards() {
        assert_eq!(!Checksum::new().update(b"1234").update(b"56789").value(), 0xE306_9283);
        assert_eq!(Checksum::seeded(0x1234_5678).low16(), 0x5678);
        assert_eq!(Checksum::seeded(0x1234_5678).high16(), 0x1234);
        // CRC-16/MODBUS and CRC-16/ARC.
        assert_eq!(crc16(0xFFFF, b"123456789"), 0x4B37);
        assert_eq!(crc16(0, b"123456789"), 0xBB3D);
    }
}
