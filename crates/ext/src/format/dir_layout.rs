//! Record lengths and offsets that directory blocks of all kinds share.

/// Decodes a record length. 16 bits cannot hold 65,536: blocks of that size use the two lowest
/// bits, which are zero in all other lengths.
pub(crate) fn rec_len_from_disk(raw: u16, block_bytes: usize) -> usize {
    if block_bytes < 65536 {
        return usize::from(raw);
    }
    match raw {
        0 | 0xFFFF => 65536,
        _ => usize::from(raw & 0xFFFC) | usize::from(raw & 3) << 16,
    }
}

/// Encodes a record length in 16 bits; see [`rec_len_from_disk`].
pub(crate) fn rec_len_to_disk(len: usize, block_bytes: usize) -> u16 {
    match u16::try_from(len) {
        Ok(raw) => raw,
        Err(_) if len == block_bytes => u16::MAX,
        Err(_) => 0,
    }
}

pub(crate) const ROOT_INFO_AT: usize = 24;

pub(crate) const NODE_ENTRIES_AT: usize = 8;

/// Offset of limit, count and the first block in a root.
pub(crate) const ROOT_ENTRIES_AT: usize = ROOT_INFO_AT + 8;

pub(crate) const ENTRY_BYTES: usize = 8;
