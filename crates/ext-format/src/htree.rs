//! Htrees: index blocks in a directory that map hashes to dirent blocks.
//!
//! ```text
//!   root  | . | .. | dx_root_info | limit,count,block | hash,block | ..
//!   node  | one unused entry      | limit,count,block | hash,block | ..
//! ```
//! A linear scan of the directory sees both as blocks without names; the root holds `.` and `..`.

use draconis_types::FileType;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use super::dir_layout::{ENTRY_BYTES, NODE_ENTRIES_AT, ROOT_ENTRIES_AT, ROOT_INFO_AT};
use super::dirent::DirBlockFormat;
use super::hash::{HashSeed, NameHash};
use super::{dirent, le16, le32};
use crate::{Error, FileBlock, Result};

/// Bits of a block number in an entry.
pub const BLOCK_MASK: u32 = 0x0FFF_FFFF;

/// On-disk description of a tree, in its root.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct RawDxRootInfo {
    reserved_zero: U32,
    hash_version: u8,
    info_length: u8,
    /// Levels of inner nodes below the root.
    pub indirect_levels: u8,
    unused_flags: u8,
}

/// On-disk limit and count, in place of the hash of the first entry.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct RawDxCountLimit {
    /// Entries that fit the node.
    pub limit: U16,
    /// Entries in the node.
    pub count: U16,
}

/// On-disk entry.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct RawDxEntry {
    /// Lowest hash below the entry.
    pub hash: U32,
    /// Block of the file.
    pub block: U32,
}

/// Returns a structure at `at` of a block, to change it; `None` beyond the block.
pub fn view_mut<T>(block: &mut [u8], at: usize) -> Option<&mut T>
where
    T: FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned,
{
    T::mut_from_prefix(block.get_mut(at..)?).ok().map(|(raw, _)| raw)
}

/// Root of an htree.
#[derive(Clone, Copy, Debug)]
pub struct DxRoot {
    /// Hash function of names.
    pub hash: NameHash,
    /// Levels of nodes below the root: 0 to 2.
    pub levels: u8,
}

impl DxRoot {
    /// Parses the root in the first block of a directory.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the root is invalid; the directory can still be scanned linearly.
    pub fn check(block: &[u8], unsigned: bool, seed: HashSeed) -> Result<(Self, DxEntries<'_>)> {
        let corrupt = Error::corrupt("hash tree root");
        let info = block.get(ROOT_INFO_AT..).ok_or(corrupt.clone())?;
        let &[0, 0, 0, 0, version, len, levels, _, ..] = info else { return Err(corrupt) };
        let hash = NameHash::of_version(version, unsigned, seed).ok_or(corrupt.clone())?;
        if levels > 2 || len != 8 {
            return Err(corrupt);
        }
        let entries = info.get(usize::from(len)..).unwrap_or_default();
        Ok((Self { hash, levels }, DxEntries::from_entries(entries)?))
    }
}

/// Entries of a root or node: at least one, ordered by hash.
#[derive(Clone, Copy, Debug)]
pub struct DxEntries<'a> {
    entries: &'a [u8],
}

impl<'a> DxEntries<'a> {
    /// Parses the entries of a node.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the count is invalid.
    pub fn from_node(block: &'a [u8]) -> Result<Self> {
        Self::from_entries(block.get(NODE_ENTRIES_AT..).unwrap_or_default())
    }

    /// Parses entries, beginning with limit and count.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the count is invalid.
    pub fn from_entries(entries: &'a [u8]) -> Result<Self> {
        let corrupt = Error::corrupt("hash tree index");
        let (Some(limit), Some(count)) = (le16(entries, 0), le16(entries, 2)) else {
            return Err(corrupt);
        };
        let bytes = usize::from(count).saturating_mul(ENTRY_BYTES);
        if count == 0 || count > limit {
            return Err(corrupt);
        }
        entries.get(..bytes).map(|entries| Self { entries }).ok_or(corrupt)
    }

    /// Returns the number of entries.
    pub fn count(self) -> usize {
        self.entries.len() / ENTRY_BYTES
    }

    /// Returns the lowest hash below entry `nth`. Its lowest bit means that names with this hash
    /// may also be below the entry before.
    pub fn hash(self, nth: usize) -> Option<u32> {
        le32(self.entries, nth.checked_mul(ENTRY_BYTES)?)
    }

    /// Returns the block that entry `nth` points to.
    pub fn block(self, nth: usize) -> Option<FileBlock> {
        let at = nth.checked_mul(ENTRY_BYTES)?.checked_add(4)?;
        Some(FileBlock(le32(self.entries, at)? & BLOCK_MASK))
    }

    /// Returns the last entry whose hash is at most `hash`; the first entry also covers all lower
    /// hashes.
    pub fn find(self, hash: u32) -> usize {
        let (mut low, mut high) = (0, self.count().saturating_sub(1));
        while low < high {
            let middle = low.midpoint(high).saturating_add(usize::from((high ^ low) & 1 != 0));
            let middle = middle.clamp(low.saturating_add(1), high);
            if self.hash(middle).is_some_and(|found| found <= hash) {
                low = middle;
            } else {
                high = middle.saturating_sub(1);
            }
        }
        low
    }

    /// Returns the entry after `nth` if names with `hash` continue there.
    pub fn next_with_hash(self, nth: usize, hash: u32) -> Option<usize> {
        let next = nth.checked_add(1)?;
        (self.hash(next)? == hash | 1).then_some(next)
    }

    /// Returns true if `nth` is the last entry.
    pub fn is_last(self, nth: usize) -> bool {
        nth.saturating_add(1) >= self.count()
    }
}

/// An htree entry to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DxEntry {
    /// Lowest hash below; its lowest bit means that the hash begins in the entry before.
    pub hash: u32,
    /// Directory block that it points to.
    pub block: u32,
}

/// Returns the capacity of a root in entries.
pub fn dx_root_limit(shape: DirBlockFormat) -> usize {
    shape.index_bytes().saturating_sub(ROOT_ENTRIES_AT) / ENTRY_BYTES
}

/// Returns the capacity of a node in entries.
pub fn dx_node_limit(shape: DirBlockFormat) -> usize {
    shape.index_bytes().saturating_sub(NODE_ENTRIES_AT) / ENTRY_BYTES
}

/// Builds the root block of an htree; `None` if `entries` is empty or does not fit.
pub fn encode_root(
    own: u32,
    parent: u32,
    version: u8,
    levels: u8,
    entries: &[DxEntry],
    shape: DirBlockFormat,
) -> Option<Vec<u8>> {
    let len = crate::units::saturating_usize(shape.block_bytes.into());
    let kind = if shape.filetype { dirent::file_type_code(FileType::Directory) } else { 0 };
    let mut block = own.to_le_bytes().to_vec();
    block.extend([12, 0, 1, kind, b'.', 0, 0, 0]);
    block.extend(parent.to_le_bytes());
    block.extend(dirent::rec_len_to_disk(len.checked_sub(12)?, len).to_le_bytes());
    block.extend([2, kind, b'.', b'.', 0, 0]);
    block.extend([0, 0, 0, 0, version, 8, levels, 0]);
    append_entries(&mut block, entries, dx_root_limit(shape))?;
    block.resize(len, 0);
    Some(block)
}

/// Builds a node block below a root; `None` if `entries` is empty or does not fit.
pub fn encode_node(entries: &[DxEntry], shape: DirBlockFormat) -> Option<Vec<u8>> {
    let len = crate::units::saturating_usize(shape.block_bytes.into());
    let mut block = vec![0; 4];
    block.extend(dirent::rec_len_to_disk(len, len).to_le_bytes());
    block.extend([0; 2]);
    append_entries(&mut block, entries, dx_node_limit(shape))?;
    block.resize(len, 0);
    Some(block)
}

/// Limit and count replace the hash of the first entry, which is never read.
fn append_entries(block: &mut Vec<u8>, entries: &[DxEntry], room: usize) -> Option<()> {
    let (first, rest) = entries.split_first()?;
    if entries.len() > room {
        return None;
    }
    block.extend(u16::try_from(room).ok()?.to_le_bytes());
    block.extend(u16::try_from(entries.len()).ok()?.to_le_bytes());
    block.extend(first.block.to_le_bytes());
    for entry in rest {
        block.extend(entry.hash.to_le_bytes());
        block.extend(entry.block.to_le_bytes());
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(hashes: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (nth, hash) in hashes.iter().enumerate() {
            bytes.extend(hash.to_le_bytes());
            bytes.extend((nth as u32 + 1).to_le_bytes());
        }
        bytes[0..2].copy_from_slice(&64u16.to_le_bytes());
        bytes[2..4].copy_from_slice(&(hashes.len() as u16).to_le_bytes());
        bytes
    }

    #[test]
    fn find_returns_last_entry_not_above_hash() {
        for count in 1..20u32 {
            let hashes: Vec<u32> = (0..count).map(|nth| nth * 10).collect();
            let bytes = index(&hashes);
            let index = DxEntries::from_entries(&bytes).unwrap();
            for hash in 0..count * 10 + 5 {
                assert_eq!(index.find(hash), (hash / 10).min(count - 1) as usize);
            }
        }
    }

    #[test]
    fn colliding_hashes_continue_in_next_block() {
        let bytes = index(&[0, 10, 21, 30]);
        let index = DxEntries::from_entries(&bytes).unwrap();
        assert_eq!(index.find(20), 1);
        assert_eq!(index.next_with_hash(1, 20), Some(2));
        assert_eq!(index.next_with_hash(2, 30), None);
        assert_eq!(index.block(2), Some(FileBlock(3)));
    }
}
