//! Indirect blocks: arrays of 32-bit block numbers; 0 is a hole.

use crate::units::saturating_usize;

const POINTER_BYTES: u32 = 4;

/// Returns the pointers per block: a power of two.
pub fn addresses_per_block(block_bytes: u32) -> u64 {
    u64::from(block_bytes / POINTER_BYTES)
}

/// Returns the pointers of an indirect block.
pub fn pointers(block: &[u8]) -> impl Iterator<Item = u32> + '_ {
    let (words, _) = block.as_chunks();
    words.iter().map(|word| u32::from_le_bytes(*word))
}

/// Returns pointer `nth` of an indirect block; 0 beyond its end.
pub fn pointer_at(block: &[u8], nth: u64) -> u32 {
    let (words, _) = block.as_chunks();
    words.get(saturating_usize(nth)).map_or(0, |word| u32::from_le_bytes(*word))
}

/// Sets pointer `nth` of an indirect block; `None` beyond its end.
pub fn set_pointer_at(block: &mut [u8], nth: u64, to: u32) -> Option<()> {
    let (words, _) = block.as_chunks_mut();
    *words.get_mut(saturating_usize(nth))? = to.to_le_bytes();
    Some(())
}
