//! The ends of directory blocks, where their checksums stand (`metadata_csum`).
//!
//! ```text
//!   names    | entry .. entry                        | 0 · 12 · 0 · 0xDE · sum |
//!   index    | head | limit,count .. entry .. free   | 0 · sum |   behind `limit` entries
//! ```
//! (`Documentation/filesystems/ext4/directory.rst`.) To those who do not know of them, the first
//! is an entry that is not in use, the second lies inside of one.

use super::checksum::Checksum;
use super::htree::{ENTRY_BYTES, NODE_ENTRIES_AT, ROOT_ENTRIES_AT};
use super::{le16, le32, put16, put32};

/// Bytes of the end of a block of names.
pub const TAIL_BYTES: usize = 12;
/// Bytes behind the entries of an index.
pub const INDEX_TAIL_BYTES: usize = 8;
const TAIL_TYPE: u8 = 0xDE;

/// Where the entries of an index begin, if the block is one: a node is one unused entry, a root
/// has nothing but `.` and `..` before its head.
fn entries_at(block: &[u8]) -> Option<usize> {
    let whole = |at: usize, len: usize| {
        le16(block, at).is_some_and(|raw| super::dirent::rec_len_from_disk(raw, block.len()) == len)
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

/// Whether a block of a directory has the right checksum; `seed` is that of the directory.
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

/// Makes the checksum of a block of a directory right, where it has room for one.
pub fn set_checksum(block: &mut [u8], seed: Checksum) {
    let place = match entries_at(block) {
        Some(at) => index_block_csum(block, at, seed),
        None => dirent_block_csum(block, seed),
    };
    if let Some((at, sum)) = place {
        let _ = put32(block, at, sum);
    }
}

/// Where the checksum of a block of names stands, and what it must be.
fn dirent_block_csum(block: &[u8], seed: Checksum) -> Option<(usize, u32)> {
    let tail_at = block.len().checked_sub(TAIL_BYTES)?;
    let (names, tail) = block.split_at_checked(tail_at)?;
    let &[0, 0, 0, 0, 12, 0, 0, TAIL_TYPE, ..] = tail else { return None };
    Some((tail_at.checked_add(8)?, seed.update(names).value()))
}

/// The same of an index whose entries begin at `at`.
fn index_block_csum(block: &[u8], at: usize, seed: Checksum) -> Option<(usize, u32)> {
    let entries = |count: u16| usize::from(count).checked_mul(ENTRY_BYTES)?.checked_add(at);
    let tail_at = entries(le16(block, at)?)?;
    let used = block.get(..entries(le16(block, at.checked_add(2)?)?)?)?;
    let reserved = block.get(tail_at..tail_at.checked_add(4)?)?;
    let sum_at = tail_at.checked_add(4)?;
    block.get(sum_at..sum_at.checked_add(4)?)?;
    Some((sum_at, seed.update(used).update(reserved).update(&[0; 4]).value()))
}

/// The part of a block that holds names: all but its end, where blocks end with checksums and it
/// is none of an index.
pub fn dirent_area(block: &[u8], sums: bool) -> &[u8] {
    block.get(..dirent_area_end(block, sums)).unwrap_or(block)
}

/// The same, to be changed.
pub fn names_mut(block: &mut [u8], sums: bool) -> &mut [u8] {
    let end = dirent_area_end(block, sums);
    block.get_mut(..end).unwrap_or_default()
}

fn dirent_area_end(block: &[u8], sums: bool) -> usize {
    match entries_at(block) {
        None if sums => block.len().saturating_sub(TAIL_BYTES),
        _ => block.len(),
    }
}

/// Puts the end of a block of names in its place: what is there is lost.
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
