//! Orphan file: inodes in use without links, or in truncation.
//!
//! ```text
//!   block | inode · 0 · inode .. | magic | checksum |
//! ```
//! Zero marks a free slot. The checksum continues from the file's seed with the block number.

use super::checksum::Checksum;
use super::{le32, put32};
use crate::{Error, FsBlock, InodeNumber, Result};

const MAGIC: u32 = 0x0B10_CA04;
const TAIL_BYTES: usize = 8;

/// Builds an empty block without a checksum.
pub fn empty_block(block_bytes: usize) -> Vec<u8> {
    let mut block = vec![0; block_bytes];
    let _ = put32(&mut block, block_bytes.saturating_sub(TAIL_BYTES), MAGIC);
    block
}

/// Returns the inodes of a block with their slots.
///
/// # Errors
/// [`Error::Corrupt`] if the magic number is wrong.
pub fn read_entries(block: &[u8]) -> Result<Vec<(usize, InodeNumber)>> {
    let (places, tail) =
        split_entries_and_tail(block).ok_or(Error::corrupt("file of orphans: block"))?;
    if le32(tail, 0) != Some(MAGIC) {
        return Err(Error::corrupt("file of orphans: magic number"));
    }
    let numbers = places.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let numbered = numbers.enumerate().filter(|(_, number)| *number != 0);
    Ok(numbered.map(|(nth, number)| (nth, InodeNumber(number))).collect())
}

/// Frees a slot.
pub fn clear_entry(block: &mut [u8], nth: usize) {
    let _ = put32(block, nth.saturating_mul(4), 0);
}

/// Returns true if the checksum of a block is valid; `seed` is the file's.
pub fn has_valid_checksum(block: &[u8], seed: Checksum, at: FsBlock) -> bool {
    split_entries_and_tail(block)
        .is_some_and(|(_, tail)| le32(tail, 4) == checksum(block, seed, at))
}

/// Sets the checksum of a block.
pub fn set_checksum(block: &mut [u8], seed: Checksum, at: FsBlock) {
    if let Some(sum) = checksum(block, seed, at) {
        let sum_at = block.len().saturating_sub(4);
        let _ = put32(block, sum_at, sum);
    }
}

/// Clears the checksum of a block.
pub fn clear_checksum(block: &mut [u8]) {
    let _ = put32(block, block.len().saturating_sub(4), 0);
}

fn checksum(block: &[u8], seed: Checksum, at: FsBlock) -> Option<u32> {
    Some(seed.update_u64(at.0).update(split_entries_and_tail(block)?.0).value())
}

/// Returns the slots of a block, and its tail.
fn split_entries_and_tail(block: &[u8]) -> Option<(&[u8], &[u8])> {
    block.split_at_checked(block.len().checked_sub(TAIL_BYTES)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_orphan_is_cleared() {
        let mut block = vec![0; 1024];
        assert!(read_entries(&block).is_err() && read_entries(&block[..7]).is_err());
        block[1016..1020].copy_from_slice(&MAGIC.to_le_bytes());
        block[8] = 77;
        assert_eq!(read_entries(&block), Ok(vec![(2, InodeNumber(77))]));
        let (seed, at) = (Checksum::seeded(5), FsBlock(9));
        set_checksum(&mut block, seed, at);
        assert!(
            has_valid_checksum(&block, seed, at) && !has_valid_checksum(&block, seed, FsBlock(8))
        );
        clear_entry(&mut block, 2);
        assert!(!has_valid_checksum(&block, seed, at));
        assert_eq!(read_entries(&block), Ok(vec![]));
    }
}
