//! Fast commits, which Linux writes behind the log instead of small transactions.
//!
//! ```text
//!   block   | head: transaction | record | .. | tail: sum, transaction |   one commit
//!   block   | record | record | .. | tail |                                the next, and so on
//! ```
//! They follow the transaction before the one that they name. Unlike the rest of a journal, they
//! are little-endian. A record is | tag | length | value | within one block.
//! (`Documentation/filesystems/ext4/journal.rst`.)
//!
//! Law: any bytes may be read here. A commit is valid if its checksum matches; everything behind
//! the first invalid commit is ignored.

use super::crc32c;
use crate::extent::{ENTRY_BYTES, Extent};
use crate::{InodeNumber, Result};
use crate::{le16, le32};

const HEADER_BYTES: usize = 4;
/// Tag of a tail.
const TAIL_TAG: u16 = 8;
const NAME_BYTES: usize = 255;
/// Minimum bytes of an inode.
const INODE_BYTES: usize = 128;

/// A record of a fast commit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FastCommitRecord {
    /// Blocks mapped in a file.
    AddRange {
        /// File.
        inode: InodeNumber,
        /// The mapped extent.
        extent: Extent,
    },
    /// Blocks unmapped from a file.
    DelRange {
        /// File.
        inode: InodeNumber,
        /// First file block.
        from: u32,
        /// Number of blocks.
        blocks: u32,
    },
    /// A dirent that was added or removed.
    Name {
        /// Kind of change.
        change: DentryChange,
        /// Directory.
        dir: InodeNumber,
        /// Inode that the name references.
        inode: InodeNumber,
        /// Name.
        name: Vec<u8>,
    },
    /// Contents of an inode, without its extents.
    Inode {
        /// Inode number.
        inode: InodeNumber,
        /// On-disk bytes of the inode; the end of a large inode may be missing.
        raw: Vec<u8>,
    },
}

/// Kind of change of a dirent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DentryChange {
    /// Added as the first name of a new inode.
    Create,
    /// Added as a further name.
    Link,
    /// Removed.
    Unlink,
}

/// Classes of tags.
#[derive(Clone, Copy)]
enum TagClass {
    Record,
    Padding,
    Tail,
    Head,
}

/// Scan that counts the valid records, block by block.
#[derive(Debug)]
pub struct FastCommitScan {
    transaction: u32,
    sum: u32,
    passed: u64,
    valid_records: u64,
    counted_bytes: usize,
    has_head: bool,
    has_damaged_tail: bool,
}

impl FastCommitScan {
    /// Creates a scan for commits that follow the transaction before `transaction`.
    pub const fn new(transaction: u32) -> Self {
        Self {
            transaction,
            sum: 0,
            passed: 0,
            valid_records: 0,
            counted_bytes: 0,
            has_head: false,
            has_damaged_tail: false,
        }
    }

    /// Scans the next block; returns true if the scan may continue.
    pub fn scan_block(&mut self, block: &[u8]) -> bool {
        self.counted_bytes = 0;
        let mut at = 0usize;
        while let Some((tag, value)) = next(block, at) {
            let end = at.saturating_add(HEADER_BYTES).saturating_add(value.len());
            match tag {
                TagClass::Head => {
                    if le32(value, 0) != Some(0) || le32(value, 4) != Some(self.transaction) {
                        return false;
                    }
                    self.has_head = true;
                }
                TagClass::Tail => {
                    let header = block.get(at..at.saturating_add(HEADER_BYTES + 4));
                    let is_sound = le32(value, 0) == Some(self.transaction)
                        && le32(value, 4) == Some(crc32c(self.sum, header.unwrap_or_default()))
                        && self.has_head;
                    if !is_sound {
                        self.detect_damaged_tail(block, at);
                        return false;
                    }
                    (self.valid_records, self.counted_bytes, self.sum) = (self.passed, end, 0);
                }
                TagClass::Record => self.passed = self.passed.saturating_add(1),
                TagClass::Padding => {}
            }
            if !matches!(tag, TagClass::Tail) {
                self.sum = crc32c(self.sum, block.get(at..end).unwrap_or_default());
            }
            at = end;
        }
        // A block that is not full ends with a record or tail.
        let is_filled = at.saturating_add(HEADER_BYTES) > block.len();
        if !is_filled {
            self.detect_damaged_tail(block, at);
        }
        is_filled
    }

    /// Checks for a damaged tail: one whose checksum is valid once its tag, length and transaction
    /// are corrected.
    fn detect_damaged_tail(&mut self, block: &[u8], at: usize) {
        let Some(len) = block.len().checked_sub(at.saturating_add(HEADER_BYTES)) else { return };
        let Ok(len) = u16::try_from(len) else { return };
        let header = [TAIL_TAG.to_le_bytes(), len.to_le_bytes()].concat();
        let tail = [&header[..], &self.transaction.to_le_bytes()].concat();
        let sum = le32(block, at.saturating_add(HEADER_BYTES + 4));
        self.has_damaged_tail |= self.has_head && sum == Some(crc32c(self.sum, &tail));
    }

    /// Returns the number of valid records.
    pub const fn valid_records(&self) -> u64 {
        self.valid_records
    }

    /// Returns the bytes of the last scanned block up to the end of its last valid commit.
    pub const fn valid_commit_bytes(&self) -> usize {
        self.counted_bytes
    }

    /// Returns true if a commit has a damaged tail.
    pub const fn has_damaged_tail(&self) -> bool {
        self.has_damaged_tail
    }
}

/// Returns true if a block has a tail of this transaction anywhere after its first `behind` bytes.
/// A tail is written once its commit is durable, and fills its block.
pub fn has_tail(block: &[u8], behind: usize, transaction: u32) -> bool {
    let is_tail = |at: usize| {
        let len = usize::from(le16(block, at.saturating_add(2)).unwrap_or(0));
        let end = at.saturating_add(HEADER_BYTES).saturating_add(len);
        let is_full = end == block.len() || at.saturating_add(HEADER_BYTES + 8) == block.len();
        is_full
            && le16(block, at) == Some(TAIL_TAG)
            && le32(block, at.saturating_add(HEADER_BYTES)) == Some(transaction)
    };
    (behind..block.len()).any(is_tail)
}

/// Iterates over the records of a block.
pub fn parse_records(block: &[u8]) -> impl Iterator<Item = Result<FastCommitRecord>> + '_ {
    let mut at = 0usize;
    std::iter::from_fn(move || {
        loop {
            let (tag, value) = next(block, at)?;
            let header = block.get(at..)?;
            at = at.saturating_add(HEADER_BYTES).saturating_add(value.len());
            if matches!(tag, TagClass::Record) {
                let damaged = crate::Error::corrupt("journal: record of a fast commit");
                return Some(parse_record(le16(header, 0)?, value).ok_or(damaged));
            }
        }
    })
}

/// Returns the tag and value at `at`; `None` if the length is invalid.
fn next(block: &[u8], at: usize) -> Option<(TagClass, &[u8])> {
    let header = block.get(at..at.checked_add(HEADER_BYTES)?)?;
    let len = usize::from(le16(header, 2)?);
    let value = block.get(at.checked_add(HEADER_BYTES)?..)?.get(..len)?;
    let (tag, lens) = match le16(header, 0)? {
        1 => (TagClass::Record, 4 + ENTRY_BYTES..=4 + ENTRY_BYTES),
        2 => (TagClass::Record, 12..=12),
        3..=5 => (TagClass::Record, 9..=8 + NAME_BYTES),
        6 => (TagClass::Record, 4 + INODE_BYTES..=usize::MAX),
        7 => (TagClass::Padding, 0..=usize::MAX),
        TAIL_TAG => (TagClass::Tail, 8..=usize::MAX),
        9 => (TagClass::Head, 8..=8),
        _ => return None,
    };
    lens.contains(&len).then_some((tag, value))
}

fn parse_record(tag: u16, value: &[u8]) -> Option<FastCommitRecord> {
    let word = |nth: usize| le32(value, nth.saturating_mul(4));
    let inode = InodeNumber(word(0)?);
    Some(match tag {
        1 => FastCommitRecord::AddRange {
            inode,
            extent: Extent::decode(value.get(4..)?.first_chunk()?)?,
        },
        2 => FastCommitRecord::DelRange { inode, from: word(1)?, blocks: word(2)? },
        3..=5 => {
            let name = value.get(8..)?.to_vec();
            let is_name = !name.iter().any(|byte| matches!(byte, 0 | b'/'));
            if !is_name || matches!(&name[..], b"." | b"..") {
                return None;
            }
            let change = match tag {
                3 => DentryChange::Create,
                4 => DentryChange::Link,
                _ => DentryChange::Unlink,
            };
            FastCommitRecord::Name { change, dir: inode, inode: InodeNumber(word(1)?), name }
        }
        6 => FastCommitRecord::Inode { inode, raw: value.get(4..)?.to_vec() },
        _ => return None,
    })
}

/// Builds the first block of a fast commit.
#[cfg(test)]
fn build_test_block(transaction: u32, records: &[(u16, Vec<u8>)], block_bytes: u32) -> Vec<u8> {
    let mut block = Vec::new();
    let put = |block: &mut Vec<u8>, tag: u16, value: &[u8], len: usize| {
        block.extend(tag.to_le_bytes());
        block.extend(u16::try_from(len).unwrap().to_le_bytes());
        block.extend(value);
    };
    put(&mut block, 9, &[[0; 4], transaction.to_le_bytes()].concat(), 8);
    for (tag, value) in records {
        put(&mut block, *tag, value, value.len());
    }
    let len = block_bytes as usize - block.len() - HEADER_BYTES;
    put(&mut block, 8, &transaction.to_le_bytes(), len);
    let sum = crc32c(0, &block);
    block.extend(sum.to_le_bytes());
    block.resize(block_bytes as usize, 0);
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_records() -> Vec<(u16, Vec<u8>)> {
        let extent = Extent { from: 3, blocks: 2, start: crate::FsBlock(900), is_unwritten: true };
        let hole = [12u32, 5, 9].map(u32::to_le_bytes).concat();
        let name = [&2u32.to_le_bytes()[..], &12u32.to_le_bytes(), b"name"].concat();
        let inode = [&12u32.to_le_bytes()[..], &[7; 160]].concat();
        vec![
            (1, [&12u32.to_le_bytes()[..], &extent.encode()].concat()),
            (2, hole),
            (3, name.clone()),
            (6, inode),
            (5, name),
        ]
    }

    #[test]
    fn linux_records_are_parsed() {
        let block = build_test_block(7, &sample_records(), 1024);
        let mut counting = FastCommitScan::new(7);
        assert!(counting.scan_block(&block));
        assert_eq!(counting.valid_records(), 5);
        let records: Vec<FastCommitRecord> = parse_records(&block).map(Result::unwrap).collect();
        let inode = InodeNumber(12);
        let extent = Extent { from: 3, blocks: 2, start: crate::FsBlock(900), is_unwritten: true };
        assert_eq!(records[0], FastCommitRecord::AddRange { inode, extent });
        assert_eq!(records[1], FastCommitRecord::DelRange { inode, from: 5, blocks: 9 });
        let named = |change| {
            let name = b"name".to_vec();
            FastCommitRecord::Name { change, dir: InodeNumber(2), inode, name }
        };
        assert_eq!(records[2], named(DentryChange::Create));
        assert_eq!(records[3], FastCommitRecord::Inode { inode, raw: vec![7; 160] });
        assert_eq!(records[4], named(DentryChange::Unlink));
        // A leftover block of the previous transaction.
        assert!(!counting.scan_block(&build_test_block(6, &sample_records(), 1024)));
        assert_eq!(counting.valid_records(), 5);
    }

    #[test]
    fn incomplete_commits_are_ignored() {
        let block = build_test_block(7, &sample_records(), 1024);
        for at in 0..260 {
            let mut other = block.clone();
            other[at] ^= 1;
            let mut counting = FastCommitScan::new(7);
            counting.scan_block(&other);
            assert_eq!(counting.valid_records(), 0, "{at}");
            for record in parse_records(&other) {
                let _ = record;
            }
        }
        for byte in [0, 1, 6, 0xFF] {
            let mut counting = FastCommitScan::new(7);
            assert!(!counting.scan_block(&vec![byte; 1024]));
            assert!(parse_records(&vec![byte; 1023]).count() < 1024);
        }
    }
}
