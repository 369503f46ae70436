//! Hash trees: index blocks inside a directory that lead from a hash to a block of names.
//!
//! ```text
//!   root  | . | .. | dx_root_info | limit,count,block | hash,block | ..
//!   node  | one unused entry      | limit,count,block | hash,block | ..
//! ```
//! To those who read a directory straight through, both look like blocks without names
//! (the root holds `.` and `..`).

use draconis_exchange::contract::FileType;

use super::dirent::DirBlockFormat;
use super::hash::{HashSeed, NameHash};
use super::{dirent, le16, le32};
use crate::{Error, FileBlock, Result};

pub(crate) const ROOT_INFO_AT: usize = 24;
pub(crate) const NODE_ENTRIES_AT: usize = 8;
/// Where limit, count and the first block stand in a root.
pub(crate) const ROOT_ENTRIES_AT: usize = ROOT_INFO_AT + 8;
pub(crate) const ENTRY_BYTES: usize = 8;
pub(crate) const BLOCK_MASK: u32 = 0x0FFF_FFFF;

/// What the root of a tree says of all of it.
#[derive(Clone, Copy, Debug)]
pub struct DxRoot {
    /// How names are hashed.
    pub hash: NameHash,
    /// How many levels of nodes are below the root: 0 to 2.
    pub levels: u8,
}

impl DxRoot {
    /// Reads the root in the first block of a directory.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it makes no sense; the directory can still be read straight
    /// through.
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

/// The entries of a root or node: at least one, in order of their hashes.
#[derive(Clone, Copy, Debug)]
pub struct DxEntries<'a> {
    entries: &'a [u8],
}

impl<'a> DxEntries<'a> {
    /// Reads the entries of a node.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if its count makes no sense.
    pub fn from_node(block: &'a [u8]) -> Result<Self> {
        Self::from_entries(block.get(NODE_ENTRIES_AT..).unwrap_or_default())
    }

    /// Reads entries from where limit and count stand.
    pub(crate) fn from_entries(entries: &'a [u8]) -> Result<Self> {
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

    /// How many entries there are.
    pub(crate) fn len(self) -> usize {
        self.entries.len() / ENTRY_BYTES
    }

    /// The lowest hash below entry `nth`; its lowest bit says that names with this very
    /// hash may be below the entry before, too.
    pub(crate) fn hash(self, nth: usize) -> Option<u32> {
        le32(self.entries, nth.checked_mul(ENTRY_BYTES)?)
    }

    /// The block that entry `nth` leads to.
    pub fn block(self, nth: usize) -> Option<FileBlock> {
        let at = nth.checked_mul(ENTRY_BYTES)?.checked_add(4)?;
        Some(FileBlock(le32(self.entries, at)? & BLOCK_MASK))
    }

    /// The last entry whose hash is not above `hash`; the first entry stands for all
    /// that are lower.
    pub fn find(self, hash: u32) -> usize {
        let (mut low, mut high) = (0, self.len().saturating_sub(1));
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

    /// The entry after `nth`, if names with `hash` go on there.
    pub fn next_with_hash(self, nth: usize, hash: u32) -> Option<usize> {
        let next = nth.checked_add(1)?;
        (self.hash(next)? == hash | 1).then_some(next)
    }

    /// Whether `nth` is the last entry.
    pub fn is_last(self, nth: usize) -> bool {
        nth.saturating_add(1) >= self.len()
    }
}

/// One entry of an index that is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DxEntry {
    /// The lowest hash below it; its lowest bit says that the hash begins in the entry before.
    pub hash: u32,
    /// The block of the directory that it leads to.
    pub block: u32,
}

/// Entries that a root has room for.
pub fn dx_root_limit(shape: DirBlockFormat) -> usize {
    shape.index_bytes().saturating_sub(ROOT_ENTRIES_AT) / ENTRY_BYTES
}

/// Entries that a node has room for.
pub fn dx_node_limit(shape: DirBlockFormat) -> usize {
    shape.index_bytes().saturating_sub(NODE_ENTRIES_AT) / ENTRY_BYTES
}

/// The first block of an indexed directory; `None` if the entries do not fit or are none.
pub fn root(
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
    put_entries(&mut block, entries, dx_root_limit(shape))?;
    block.resize(len, 0);
    Some(block)
}

/// A block of index entries below a root; `None` if they do not fit or are none.
pub fn node(entries: &[DxEntry], shape: DirBlockFormat) -> Option<Vec<u8>> {
    let len = crate::units::saturating_usize(shape.block_bytes.into());
    let mut block = vec![0; 4];
    block.extend(dirent::rec_len_to_disk(len, len).to_le_bytes());
    block.extend([0; 2]);
    put_entries(&mut block, entries, dx_node_limit(shape))?;
    block.resize(len, 0);
    Some(block)
}

/// The first entry's hash is never looked at: limit and count stand in its place.
fn put_entries(block: &mut Vec<u8>, entries: &[DxEntry], room: usize) -> Option<()> {
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
    fn the_last_entry_not_above_the_hash_is_found() {
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
    fn collisions_go_on_in_the_next_block() {
        let bytes = index(&[0, 10, 21, 30]);
        let index = DxEntries::from_entries(&bytes).unwrap();
        assert_eq!(index.find(20), 1);
        assert_eq!(index.next_with_hash(1, 20), Some(2));
        assert_eq!(index.next_with_hash(2, 30), None);
        assert_eq!(index.block(2), Some(FileBlock(3)));
    }
}
