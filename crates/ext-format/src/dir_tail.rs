//! Tails of directory blocks, which hold their checksums (`metadata_csum`).
//!
//! ```text
//!   names    | entry .. entry                        | 0 · 12 · 0 · 0xDE · sum |
//!   index    | head | limit,count .. entry .. free   | 0 · sum |   behind `limit` entries
//! ```
//! (`Documentation/filesystems/ext4/directory.rst`.) Drivers that do not know tails see an unused
//! entry in the first, and the inside of an entry in the second.

use super::checksum::Checksum;
use super::dir_layout::{ENTRY_BYTES, NODE_ENTRIES_AT, ROOT_ENTRIES_AT, rec_len_from_disk};
use super::{le16, le32, put16, put32};

/// Bytes of the tail of a dirent block.
pub const TAIL_BYTES: usize = 12;
/// Bytes of the tail of an htree block.
pub const INDEX_TAIL_BYTES: usize = 8;
const TAIL_TYPE: u8 = 0xDE;

/// Returns the offset of the htree entries if the block is an htree node (one unused entry) or root
/// (only `.` and `..` before its head).
fn entries_at(block: &[u8]) -> Option<usize> {
    let whole = |at: usize, len: usize| {
        le16(block, at).is_some_and(|raw| rec_len_from_disk(raw, block.len()) == len)
    };
    if whole(4, block.len()) && le32(block, 0) == Some(0) {
        return Some(NODE_ENTRIES_AT);
    }
    let is_root = whole(4, 12)
        && whole(16, block.len().checked_sub(12)?)
        && le32(block, 24) == Some(0)
        && block.get(29) == Some(&8);
    is_root.then_some(ROOT_ENTRIES_AT)
}

/// Returns true if the checksum of a directory block is valid; `seed` is that of the directory.
pub fn has_valid_checksum(block: &[u8], seed: Checksum) -> bool {
    match entries_at(block) {
        Some(at) => {
            index_block_csum(block, at, seed).is_some_and(|(at, sum)| le32(block, at) == Some(sum))
        }
        None => {
            dirent_block_csum(block, seed).is_some_and(|(at, sum)| le32(block, at) == Some(sum))
        }
    }
}

/// Sets the checksum of a directory block that has a tail.
pub fn set_checksum(block: &mut [u8], seed: Checksum) {
    let place = match entries_at(block) {
        Some(at) => index_block_csum(block, at, seed),
        None => dirent_block_csum(block, seed),
    };
    if let Some((at, sum)) = place {
        let _ = put32(block, at, sum);
    }
}

/// Returns the offset of a dirent block's checksum, and its expected value.
fn dirent_block_csum(block: &[u8], seed: Checksum) -> Option<(usize, u32)> {
    let tail_at = block.len().checked_sub(TAIL_BYTES)?;
    let (names, tail) = block.split_at_checked(tail_at)?;
    let &[0, 0, 0, 0, 12, 0, 0, TAIL_TYPE, ..] = tail else { return None };
    Some((tail_at.checked_add(8)?, seed.update(names).value()))
}

/// Returns the same for an htree block whose entries begin at `at`.
fn index_block_csum(block: &[u8], at: usize, seed: Checksum) -> Option<(usize, u32)> {
    let entries = |count: u16| usize::from(count).checked_mul(ENTRY_BYTES)?.checked_add(at);
    let tail_at = entries(le16(block, at)?)?;
    let used = block.get(..entries(le16(block, at.checked_add(2)?)?)?)?;
    let reserved = block.get(tail_at..tail_at.checked_add(4)?)?;
    let sum_at = tail_at.checked_add(4)?;
    block.get(sum_at..sum_at.checked_add(4)?)?;
    Some((sum_at, seed.update(used).update(reserved).update(&[0; 4]).value()))
}

/// Returns the dirents of a block: the whole block without its tail; htree blocks have no dirent
/// tail.
pub fn dirent_area(block: &[u8], sums: bool) -> &[u8] {
    block.get(..dirent_area_end(block, sums)).unwrap_or(block)
}

/// Returns the mutable dirents of a block.
pub fn dirent_area_mut(block: &mut [u8], sums: bool) -> &mut [u8] {
    let end = dirent_area_end(block, sums);
    block.get_mut(..end).unwrap_or_default()
}

fn dirent_area_end(block: &[u8], sums: bool) -> usize {
    match entries_at(block) {
        None if sums => block.len().saturating_sub(TAIL_BYTES),
        _ => block.len(),
    }
}

/// Writes an empty tail over the end of a dirent block.
pub fn write_tail(block: &mut [u8]) {
    if let Some(at) = block.len().checked_sub(TAIL_BYTES) {
        if let Some(tail) = block.get_mut(at..) {
            tail.fill(0);
        }
        let _ = put16(block, at.saturating_add(4), 12);
        if let Some(kind) = block.get_mut(at.saturating_add(7)) {
            *kind = TAIL_TYPE;
        }
    }
}
