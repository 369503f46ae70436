//! Record lengths and offsets that directory blocks of all kinds share.

/// Decodes a record length. 16 bits cannot hold 65,536: blocks of that size use the two lowest
/// bits, which are zero in all other lengths.
pub fn rec_len_from_disk(raw: u16, block_bytes: usize) -> usize {
    if block_bytes < 65536 {
        return usize::from(raw);
    }
    match raw {
        0 | 0xFFFF => 65536,
        _ => usize::from(raw & 0xFFFC) | usize::from(raw & 3) << 16,
    }
}

/// Encodes a record length in 16 bits; see [`rec_len_from_disk`].
pub fn rec_len_to_disk(len: usize, block_bytes: usize) -> u16 {
    match u16::try_from(len) {
        Ok(raw) => raw,
        Err(_) if len == block_bytes => u16::MAX,
        Err(_) => 0,
    }
}

/// Offset of the tree description in a root, behind the entries `.` and `..`.
pub const ROOT_INFO_AT: usize = 24;

/// Offset of limit, count and the first block in an inner node, behind a hiding entry.
pub const NODE_ENTRIES_AT: usize = 8;

/// Offset of limit, count and the first block in a root.
pub const ROOT_ENTRIES_AT: usize = ROOT_INFO_AT + 8;

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 8;
