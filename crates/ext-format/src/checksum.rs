//! Checksums of metadata: CRC-32C over a seed, the owner of a structure, and its bytes.
//!
//! ```text
//!   volume's seed = checksum of the UUID, or `s_checksum_seed`
//!     ├─ superblock                                    (starts without the seed)
//!     ├─ bitmaps · xattr block with its number · descriptor with its group's number
//!     └─ inode number, generation ── inode · directory block · htree node · extent node
//! ```
//! (`Documentation/filesystems/ext4/checksums.rst`.) A change to a structure that shares its block
//! sets its checksum at once. Checksums of whole blocks are set when the block is queued.

/// State of a checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Checksum(u32);

impl Checksum {
    /// Creates the checksum of no bytes.
    pub const fn new() -> Self {
        Self(!0)
    }

    /// Creates a checksum that continues from `seed`.
    pub const fn seeded(seed: u32) -> Self {
        Self(seed)
    }

    /// Adds bytes.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Self {
        // The library inverts its state before and after; ext4 does not.
        Self(!crc32c::crc32c_append(!self.0, bytes))
    }

    /// Adds a little-endian 32-bit number.
    #[must_use]
    pub fn update_u32(self, number: u32) -> Self {
        self.update(&number.to_le_bytes())
    }

    /// Adds a little-endian 64-bit number.
    #[must_use]
    pub fn update_u64(self, number: u64) -> Self {
        self.update(&number.to_le_bytes())
    }

    /// Returns the stored value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Returns the low 16 bits.
    pub const fn low16(self) -> u16 {
        let [a, b, ..] = self.0.to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    /// Returns the high 16 bits.
    pub const fn high16(self) -> u16 {
        let [.., a, b] = self.0.to_le_bytes();
        u16::from_le_bytes([a, b])
    }
}

/// Returns the four bytes between `before` and `behind` that make the checksum of all three `sum`.
pub fn solve_for(before: Checksum, behind: &[u8], sum: u32) -> u32 {
    // The CRC is run backwards over `behind` and the four bytes; the rest is XORed with `before`.
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

/// CRC-16 of group descriptors on volumes with `gdt_csum` alone: polynomial 0x8005, reflected,
/// continued from `sum`.
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
    fn four_bytes_reach_any_crc() {
        for (before, behind, sum) in [("", "", 0), ("ab", "c", 7), ("x", "0123456789", !0)] {
            let start = Checksum::new().update(before.as_bytes());
            let bytes = solve_for(start, behind.as_bytes(), sum).to_le_bytes();
            assert_eq!(start.update(&bytes).update(behind.as_bytes()).value(), sum);
        }
    }

    #[test]
    fn crcs_match_standard_check_values() {
        assert_eq!(!Checksum::new().update(b"1234").update(b"56789").value(), 0xE306_9283);
        assert_eq!(Checksum::seeded(0x1234_5678).low16(), 0x5678);
        assert_eq!(Checksum::seeded(0x1234_5678).high16(), 0x1234);
        // CRC-16/MODBUS and CRC-16/ARC.
        assert_eq!(crc16(0xFFFF, b"123456789"), 0x4B37);
        assert_eq!(crc16(0, b"123456789"), 0xBB3D);
    }
}
