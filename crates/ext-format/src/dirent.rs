//! Directory entries: a chain through each block of a directory.
//!
//! ```text
//!   | inode | rec_len | name_len | file_type | name .. pad | next entry ..  to the end
//! ```
//!
//! Law: the chain ends exactly at the end of the block; an entry that breaks it damages the rest of
//! this block only.

use draconis_types::FileType;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use super::dir_layout::{rec_len_from_disk, rec_len_to_disk};
use super::features::Incompatible;
use super::superblock::Superblock;
use super::{dir_tail, le16, le32};
use crate::{Error, InodeNumber, Result};

/// Bytes before the name.
pub const HEAD_BYTES: usize = size_of::<RawDirent>();

/// On-disk entry, without its name.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
pub struct RawDirent {
    /// Inode number; 0 if the entry is free.
    pub inode: U32,
    /// Record length, encoded.
    pub rec_len: U16,
    /// Length of the name.
    pub name_len: u8,
    /// File type, on volumes that have it here.
    pub file_type: u8,
}

impl RawDirent {
    /// Offset of the record length, which reveals a hidden entry.
    pub const REC_LEN_AT: usize = std::mem::offset_of!(Self, rec_len);

    /// Returns the entry at `at`; `None` beyond the block.
    #[inline]
    pub fn view(block: &[u8], at: usize) -> Option<&Self> {
        Self::ref_from_prefix(block.get(at..)?).ok().map(|(raw, _)| raw)
    }

    /// [`RawDirent::view`] to change it.
    pub fn view_mut(block: &mut [u8], at: usize) -> Option<&mut Self> {
        Self::mut_from_prefix(block.get_mut(at..)?).ok().map(|(raw, _)| raw)
    }
}

/// A used directory entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dirent<'a> {
    /// Offset in the block.
    pub at: usize,
    /// Offset of the next entry.
    pub next: usize,
    /// Inode that the entry references.
    pub inode: InodeNumber,
    /// File type, with the `filetype` feature.
    pub kind: Option<FileType>,
    /// The name: 1 to 255 bytes, any but `/` and NUL.
    pub name: &'a [u8],
}

impl Dirent<'_> {
    /// Returns the two hashes stored after a casefolded encrypted name in `block`.
    pub fn stored_hashes(&self, block: &[u8]) -> Option<(u32, u32)> {
        let rest = block.get(self.at..self.next)?.get(min_rec_len(self.name.len())..)?;
        Some((le32(rest, 0)?, le32(rest, size_of::<u32>())?))
    }
}

/// One entry of the chain.
enum ChainItem<'a> {
    Used(Dirent<'a>),
    Unused,
    /// An invalid entry that does not break the chain.
    Damaged(&'static str),
}

/// The entries of one directory block.
#[derive(Debug)]
pub struct Dirents<'a> {
    block: &'a [u8],
    at: usize,
    filetype: bool,
    inodes: u32,
    any_bytes: bool,
}

impl<'a> Dirents<'a> {
    /// Iterates over the chain of `block`.
    pub fn of(block: &'a [u8], super_: &Superblock) -> Self {
        let filetype = super_.incompatible.contains(Incompatible::FILETYPE);
        Self::new(block, filetype, super_.inodes)
    }

    /// Iterates over `block`, on a volume of `inodes` inodes, with or without file types.
    pub const fn new(block: &'a [u8], filetype: bool, inodes: u32) -> Self {
        Self { block, at: 0, filetype, inodes, any_bytes: false }
    }

    /// Accepts encrypted names, which hold any bytes, if `encrypted`.
    #[must_use]
    pub fn allow_any_bytes(self, encrypted: bool) -> Self {
        Self { any_bytes: encrypted, ..self }
    }

    /// Returns the offset of the next entry; the length of the block at its end.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Reads the entry at the current offset and advances; `None` if the chain is broken.
    fn next_item(&mut self) -> Option<ChainItem<'a>> {
        let entry = self.block.get(self.at..)?;
        let len = rec_len_from_disk(le16(entry, 4)?, self.block.len());
        let whole = entry.get(..len)?;
        let name_len = usize::from(*whole.get(6)?);
        if len < HEAD_BYTES || !len.is_multiple_of(4) {
            return None;
        }
        let at = self.at;
        self.at = at.checked_add(len)?;
        let inode = le32(whole, 0)?;
        if inode == 0 {
            return Some(ChainItem::Unused);
        }
        let Some(name) = whole.get(HEAD_BYTES..).and_then(|rest| rest.get(..name_len)) else {
            return Some(ChainItem::Damaged("directory entry: name length"));
        };
        let is_text = self.any_bytes || !name.iter().any(|byte| matches!(byte, 0 | b'/'));
        if name.is_empty() || !is_text {
            return Some(ChainItem::Damaged("directory entry: name"));
        }
        if inode > self.inodes {
            return Some(ChainItem::Damaged("directory entry: inode number"));
        }
        let kind =
            if self.filetype { FileType::from_number((*whole.get(7)?).into()) } else { None };
        Some(ChainItem::Used(Dirent { at, next: self.at, inode: InodeNumber(inode), kind, name }))
    }
}

impl<'a> Iterator for Dirents<'a> {
    type Item = Result<Dirent<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.block.len() {
            match self.next_item() {
                Some(ChainItem::Used(entry)) => return Some(Ok(entry)),
                Some(ChainItem::Unused) => {}
                Some(ChainItem::Damaged(what)) => return Some(Err(Error::corrupt(what))),
                None => {
                    self.at = self.block.len();
                    return Some(Err(Error::corrupt("directory entry: record length")));
                }
            }
        }
        None
    }
}

/// Returns the minimum record length for a name of this length.
pub const fn min_rec_len(name_bytes: usize) -> usize {
    HEAD_BYTES.saturating_add(name_bytes).next_multiple_of(4)
}

/// Encodes the file type of an entry.
pub const fn file_type_code(kind: FileType) -> u8 {
    match kind {
        FileType::File => 1,
        FileType::Directory => 2,
        FileType::CharDevice => 3,
        FileType::BlockDevice => 4,
        FileType::Fifo => 5,
        FileType::Socket => 6,
        FileType::Symlink => 7,
    }
}

/// Format of the directory blocks of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirBlockFormat {
    /// Bytes per block.
    pub block_bytes: u32,
    /// True if entries store the file type (`filetype`).
    pub filetype: bool,
    /// True if blocks end with a checksum.
    pub has_checksums: bool,
}

impl DirBlockFormat {
    /// Returns the bytes of a block for dirents.
    pub fn dirent_area_bytes(self) -> usize {
        let tail = if self.has_checksums { dir_tail::TAIL_BYTES } else { 0 };
        crate::units::saturating_usize(self.block_bytes.into()).saturating_sub(tail)
    }

    /// Returns the bytes of an htree block for its head and entries.
    pub fn index_bytes(self) -> usize {
        let tail = if self.has_checksums { dir_tail::INDEX_TAIL_BYTES } else { 0 };
        crate::units::saturating_usize(self.block_bytes.into()).saturating_sub(tail)
    }

    /// Builds a whole block from its dirents.
    pub fn with_tail(self, mut names: Vec<u8>) -> Vec<u8> {
        names.resize(crate::units::saturating_usize(self.block_bytes.into()), 0);
        if self.has_checksums {
            dir_tail::write_tail(&mut names);
        }
        names
    }
}

/// Builder of directory blocks, one after the other.
#[derive(Debug)]
pub struct DirBlockBuilder {
    bytes: Vec<u8>,
    block_bytes: usize,
    format: DirBlockFormat,
    /// Offset of the last entry; its record will extend to the end of the block.
    last: usize,
}

impl DirBlockBuilder {
    /// Creates a builder for blocks of this format.
    pub fn new(shape: DirBlockFormat) -> Self {
        let block_bytes = shape.dirent_area_bytes();
        Self { bytes: Vec::with_capacity(block_bytes), block_bytes, format: shape, last: 0 }
    }

    /// Returns true if the current block holds no entry.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the bytes used by entries.
    pub fn used_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Adds an entry; returns false if it does not fit and belongs in the next block.
    pub fn push(&mut self, inode: u32, kind: FileType, name: &[u8]) -> bool {
        let len = min_rec_len(name.len());
        let Ok(name_len) = u8::try_from(name.len()) else { return false };
        if self.bytes.len().saturating_add(len) > self.block_bytes {
            return false;
        }
        self.last = self.bytes.len();
        self.bytes.extend(inode.to_le_bytes());
        // A name has at most 255 bytes, and a record therefore at most 264.
        self.bytes.extend(rec_len_to_disk(len, self.block_bytes).to_le_bytes());
        self.bytes.push(name_len);
        self.bytes.push(if self.format.filetype { file_type_code(kind) } else { 0 });
        self.bytes.extend(name);
        self.bytes.resize(self.last.saturating_add(len), 0);
        true
    }

    /// Returns the block; its last record extends to the end. An empty block holds one unused
    /// record. The next block begins.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::replace(&mut self.bytes, Vec::with_capacity(self.block_bytes));
        let len = rec_len_to_disk(self.block_bytes.saturating_sub(self.last), self.block_bytes);
        bytes.resize(self.block_bytes, 0);
        if let Some(field) =
            bytes.get_mut(self.last.saturating_add(4)..).and_then(|it| it.get_mut(..2))
        {
            field.copy_from_slice(&len.to_le_bytes());
        }
        self.last = 0;
        self.format.with_tail(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode_entry(inode: u32, len: u16, name: &[u8]) -> Vec<u8> {
        let mut bytes = inode.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.push(name.len() as u8);
        bytes.push(1);
        bytes.extend(name);
        bytes.resize(usize::from(len), 0);
        bytes
    }

    fn names_in_chain(block: &[u8]) -> Vec<std::result::Result<&[u8], &'static str>> {
        let entries = Dirents::new(block, true, 100);
        entries
            .map(|entry| match entry {
                Ok(entry) => Ok(entry.name),
                Err(Error::Corrupt { what, .. }) => Err(what),
                Err(other) => panic!("{other}"),
            })
            .collect()
    }

    #[test]
    fn damaged_record_hides_only_unreachable_names() {
        let mut block = encode_entry(11, 12, b"a");
        block.extend(encode_entry(12, 16, b"x/y"));
        block.extend(encode_entry(0, 12, b"gone"));
        block.extend(encode_entry(101, 12, b"far"));
        block.extend(encode_entry(13, 12, b"b"));
        block.extend(encode_entry(14, 10, b"c"));
        assert_eq!(
            names_in_chain(&block),
            [
                Ok(&b"a"[..]),
                Err("directory entry: name"),
                Err("directory entry: inode number"),
                Ok(&b"b"[..]),
                Err("directory entry: record length"),
            ]
        );
    }

    #[test]
    fn rec_len_of_largest_block_is_decoded() {
        assert_eq!(rec_len_from_disk(0xFFFF, 65536), 65536);
        assert_eq!(rec_len_from_disk(0, 65536), 65536);
        assert_eq!(rec_len_from_disk(0xFFF4, 65536), 0xFFF4);
        assert_eq!(rec_len_from_disk(0, 4096), 0);
    }
}
