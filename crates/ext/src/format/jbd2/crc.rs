//! The two cyclic sums of a journal.

/// CRC-32C of `bytes`, going on from `seed`, which is `!0` at the beginning. Nothing is inverted
/// in the end.
pub(super) fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(seed, |sum, word| {
        let word = u64::from_le_bytes(*word) ^ u64::from(sum);
        let at = word.to_le_bytes();
        REFLECTED.iter().rev().zip(at).fold(0, |sum, (table, byte)| sum ^ entry(table, byte))
    });
    let [table, ..] = &REFLECTED;
    rest.iter().fold(sum, |sum, byte| {
        let [low, ..] = sum.to_le_bytes();
        entry(table, low ^ byte) ^ (sum >> 8)
    })
}

/// The CRC-32 that takes the highest bit first, going on from `seed`: the sum of a whole
/// transaction in its commit block.
pub fn crc32_be(seed: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(seed, |sum, byte| {
        let [high, ..] = sum.to_be_bytes();
        entry(&PLAIN, high ^ byte) ^ (sum << 8)
    })
}

type Table = [u32; 256];

/// For eight bytes at once: table `n` is of a byte with `n` zeros behind it.
static REFLECTED: [Table; 8] = reflected(0x82F6_3B78);
static PLAIN: Table = plain(0x04C1_1DB7);

fn entry(table: &Table, byte: u8) -> u32 {
    table.get(usize::from(byte)).copied().unwrap_or(0)
}

#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "runs in the compiler, which names an index that is wrong"
)]
const fn reflected(polynomial: u32) -> [Table; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u32;
        let mut nth = 0;
        while nth < 8 {
            let mut bit = 0;
            while bit < 8 {
                sum = (sum >> 1) ^ if sum & 1 == 1 { polynomial } else { 0 };
                bit += 1;
            }
            tables[nth][byte] = sum;
            nth += 1;
        }
        byte += 1;
    }
    tables
}

#[allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    reason = "runs in the compiler, which names an index that is wrong"
)]
const fn plain(polynomial: u32) -> Table {
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
    fn the_sums_of_the_digits_are_those_of_the_catalogue() {
        assert_eq!(!crc32c(!0, b"123456789"), 0xE306_9283);
        // Called CRC-32/MPEG-2 there.
        assert_eq!(crc32_be(!0, b"123456789"), 0x0376_E6E7);
    }

    #[test]
    fn a_sum_goes_on_wherever_it_was_left() {
        let bytes: Vec<u8> = (0..100u8).map(|byte| byte.wrapping_mul(37)).collect();
        let whole = crc32c(!0, &bytes);
        for cut in 0..bytes.len() {
            let (head, tail) = bytes.split_at(cut);
            assert_eq!(crc32c(crc32c(!0, head), tail), whole);
        }
    }
}
