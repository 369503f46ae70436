//! CRC-32 of whole transactions; all other checksums of a journal are CRC-32C.

/// Continues a big-endian (most significant bit first) CRC-32 from `seed`, as in commit blocks.
pub fn crc32_be(seed: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(seed, |sum, byte| {
        let [high, ..] = sum.to_be_bytes();
        table_entry(&PLAIN, high ^ byte) ^ (sum << 8)
    })
}

type CrcTable = [u32; 256];

static PLAIN: CrcTable = build_table(0x04C1_1DB7);

fn table_entry(table: &CrcTable, byte: u8) -> u32 {
    table.get(usize::from(byte)).copied().unwrap_or(0)
}

#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "runs in the compiler, which names an index that is wrong"
)]
const fn build_table(polynomial: u32) -> CrcTable {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = (byte as u32) << 24;
        let mut bit = 0;
        while bit < 8 {
            sum = (sum << 1) ^ if sum >> 31 == 1 { polynomial } else { 0 };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32_check_value_matches_catalogue() {
        // Its name there is CRC-32/MPEG-2.
        assert_eq!(crc32_be(!0, b"123456789"), 0x0376_E6E7);
        assert_eq!(crc32_be(crc32_be(!0, b"1234"), b"56789"), 0x0376_E6E7);
    }
}
