//! Inline data: sixty bytes in `i_block`, continued in the attribute `system.data`.
//!
//! ```text
//!   file       | i_block: 60 bytes of contents          | value: contents ..  |
//!   directory  | number of `..` (4) | entries: 56 bytes  | value: entries ..   |
//! ```
//! Each part of a directory is its own chain of entries, without `.` and `..`. Bytes of a file
//! beyond both parts read as zeros.

use super::le32;
use crate::{InodeNumber, Result};

/// Bytes of `i_block`.
pub const POINTER_BYTES: usize = 60;
/// Offset of the entries of a directory in `i_block`.
pub const ENTRIES_AT: usize = 4;

/// Inline contents of an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InlineData {
    bytes: Vec<u8>,
}

/// A chain of directory entries with its offset in the directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InlineDirPart<'a> {
    /// Offset of its first byte.
    pub at: usize,
    /// The entries.
    pub entries: &'a [u8],
}

impl InlineData {
    /// Joins both parts.
    pub fn new(pointers: &[u8; POINTER_BYTES], value: &[u8]) -> Self {
        Self { bytes: [pointers, value].concat() }
    }

    /// Returns the stored bytes; the file size may differ.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns true if no bytes are stored.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Fills `into` with the file's contents from `offset` on.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = crate::units::saturating_usize(offset).min(self.bytes.len());
        let there = self.bytes.get(from..).unwrap_or_default();
        let len = there.len().min(into.len());
        let (stored, beyond) = into.split_at_mut(len);
        stored.copy_from_slice(there.get(..len).unwrap_or_default());
        beyond.fill(0);
    }

    /// Returns the parent of a directory.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for an invalid inode number.
    pub fn parent(&self) -> Result<InodeNumber> {
        let number = le32(&self.bytes, 0).filter(|number| *number != 0);
        number.map(InodeNumber).ok_or(crate::Error::corrupt("inline directory: parent"))
    }

    /// Returns the chains of a directory's entries.
    pub fn dir_parts(&self) -> [InlineDirPart<'_>; 2] {
        let part = |at: usize, end: usize| {
            let end = end.min(self.bytes.len());
            InlineDirPart { at, entries: self.bytes.get(at..end).unwrap_or_default() }
        };
        [part(ENTRIES_AT, POINTER_BYTES), part(POINTER_BYTES, self.bytes.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_parts_read_as_one_zero_padded_file() {
        let inline = InlineData::new(&[7; POINTER_BYTES], b"value");
        let mut bytes = [1; 10];
        inline.read(57, &mut bytes);
        assert_eq!(&bytes, b"\x07\x07\x07value\0\0");
        inline.read(u64::MAX, &mut bytes);
        assert_eq!(bytes, [0; 10]);
    }

    #[test]
    fn inline_directory_has_parent_and_two_chains() {
        let mut pointers = [0; POINTER_BYTES];
        assert!(InlineData::new(&pointers, &[]).parent().is_err());
        pointers[0] = 11;
        let inline = InlineData::new(&pointers, &[5; 12]);
        assert_eq!(inline.parent(), Ok(InodeNumber(11)));
        let [first, second] = inline.dir_parts();
        assert_eq!((first.at, first.entries.len()), (4, 56));
        assert_eq!((second.at, second.entries), (60, &[5; 12][..]));
        assert!(InlineData::new(&pointers, &[]).dir_parts()[1].entries.is_empty());
    }
}
