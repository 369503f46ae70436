//! Descriptor, revoke and commit blocks of the journal: parsing and building.

use std::time::Duration;

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{JournalChecksums, JournalFormat, MAGIC, crc32c};
use crate::units::saturating_usize;

/// Type of a journal block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockType {
    /// Lists the blocks whose copies follow.
    Descriptor,
    /// Ends a transaction.
    Commit,
    /// A superblock without features.
    SuperblockV1,
    /// A superblock.
    SuperblockV2,
    /// Lists blocks whose older copies must not be replayed.
    Revoke,
}

/// Descriptor tag of one copy in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockTag {
    /// Home block on the volume.
    pub block: u64,
    /// True if the first four bytes of the copy were zeroed.
    pub escaped: bool,
    /// Checksum of the copy; 16 bits of it with [`JournalChecksums::V2`].
    pub sum: u32,
}

/// Contents of a commit block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommitBlock {
    /// Commit time since 1970.
    pub time: Duration,
    /// Validity of the block itself.
    pub checksum_state: ChecksumState,
    /// Checksum of descriptors and copies, if stored.
    pub transaction_sum: Option<u32>,
}

/// Result of a checksum verification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChecksumState {
    /// The checksum matches.
    Valid,
    /// The checksum does not match.
    Invalid,
}

/// Header of every block that is part of the journal itself.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawJournalHeader {
    h_magic: U32,
    h_blocktype: U32,
    h_sequence: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawTag {
    t_blocknr: U32,
    t_checksum: U16,
    t_flags: U16,
    /// Only with 64-bit block numbers.
    t_blocknr_high: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawTag3 {
    t_blocknr: U32,
    t_flags: U32,
    t_blocknr_high: U32,
    t_checksum: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawRevoke {
    header: RawJournalHeader,
    /// Bytes used, including this header.
    r_count: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawCommit {
    header: RawJournalHeader,
    h_chksum_type: u8,
    h_chksum_size: u8,
    h_padding: [u8; 2],
    h_chksum: [U32; 8],
    h_commit_sec: U64,
    h_commit_nsec: U32,
}

const HEADER_BYTES: usize = size_of::<RawJournalHeader>();
const REVOKE_BYTES: usize = size_of::<RawRevoke>();
const COMMIT_BYTES: usize = size_of::<RawCommit>();
const UUID_BYTES: usize = 16;
const TAIL_BYTES: usize = 4;
/// Flags of tags.
const TAG_ESCAPED: u32 = 1;
const TAG_SAME_UUID: u32 = 2;
const TAG_LAST: u32 = 8;
/// `h_chksum_type` and `h_chksum_size` of a CRC-32.
const CRC32_TYPE_AND_SIZE: (u8, u8) = (1, 4);

impl BlockType {
    /// Returns the type with that number.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        let all =
            [Self::Descriptor, Self::Commit, Self::SuperblockV1, Self::SuperblockV2, Self::Revoke];
        all.into_iter().find(|kind| kind.number() == number)
    }

    /// Returns the number of the type.
    pub const fn number(self) -> u32 {
        match self {
            Self::Descriptor => 1,
            Self::Commit => 2,
            Self::SuperblockV1 => 3,
            Self::SuperblockV2 => 4,
            Self::Revoke => 5,
        }
    }
}

/// Returns the type and the transaction of a journal block; `None` for other blocks.
pub fn header(block: &[u8]) -> Option<(BlockType, u32)> {
    let (raw, _) = RawJournalHeader::ref_from_prefix(block).ok()?;
    if raw.h_magic.get() != MAGIC {
        return None;
    }
    Some((BlockType::from_number(raw.h_blocktype.get())?, raw.h_sequence.get()))
}

/// Returns true if a copy of this block must be escaped, because it begins with the magic number.
pub fn needs_escape(block: &[u8]) -> bool {
    block.starts_with(&MAGIC.to_be_bytes())
}

/// Zeroes the first four bytes of a copy.
pub fn escape(block: &mut [u8]) {
    block.iter_mut().take(4).for_each(|byte| *byte = 0);
}

/// Restores the first four bytes of an escaped copy.
pub fn unescape(block: &mut [u8]) {
    block.iter_mut().zip(MAGIC.to_be_bytes()).for_each(|(byte, magic)| *byte = magic);
}

impl JournalFormat {
    fn block_len(&self) -> usize {
        saturating_usize(self.block_bytes.into())
    }

    fn has_tails(&self) -> bool {
        matches!(self.checksums, JournalChecksums::V2 | JournalChecksums::V3)
    }

    /// Returns true if commit blocks have a checksum of themselves.
    pub fn has_commit_checksum(&self) -> bool {
        self.has_tails()
    }

    /// Returns the bytes of a descriptor or revoke block before its tail.
    fn body_len(&self) -> usize {
        self.block_len().saturating_sub(if self.has_tails() { TAIL_BYTES } else { 0 })
    }

    fn tag_bytes(&self) -> usize {
        match (self.checksums, self.has_64bit_blocks) {
            (JournalChecksums::V3, _) => size_of::<RawTag3>(),
            // Two bytes more than the tag has: the first implementation wrote them.
            (JournalChecksums::V2, true) => 14,
            (JournalChecksums::V2, false) => 10,
            (_, true) => 12,
            (_, false) => 8,
        }
    }

    /// Returns the capacity of a descriptor in tags.
    pub fn tags_per_descriptor(&self) -> usize {
        let room = self.body_len().saturating_sub(HEADER_BYTES.saturating_add(UUID_BYTES));
        room.checked_div(self.tag_bytes()).unwrap_or(0)
    }

    /// Returns the capacity of a revoke block in block numbers.
    pub fn revokes_per_block(&self) -> usize {
        let room = self.body_len().saturating_sub(REVOKE_BYTES);
        room.checked_div(self.revoke_bytes()).unwrap_or(0)
    }

    fn revoke_bytes(&self) -> usize {
        if self.has_64bit_blocks { 8 } else { 4 }
    }

    /// Parses the tags of a descriptor, up to the end of the block at most.
    pub fn parse_tags(&self, block: &[u8]) -> Vec<BlockTag> {
        let len = self.tag_bytes();
        let mut rest = block.get(HEADER_BYTES..self.body_len()).unwrap_or_default();
        let mut tags = Vec::new();
        while let Some((bytes, behind)) = rest.split_at_checked(len) {
            let Some((tag, flags)) = self.parse_tag(bytes) else { break };
            tags.push(tag);
            let skipped = if flags & TAG_SAME_UUID == 0 { UUID_BYTES } else { 0 };
            rest = behind.get(skipped..).unwrap_or_default();
            if flags & TAG_LAST != 0 {
                break;
            }
        }
        tags
    }

    fn parse_tag(&self, bytes: &[u8]) -> Option<(BlockTag, u32)> {
        let (low, high, flags, sum) = if self.checksums == JournalChecksums::V3 {
            let (raw, _) = RawTag3::ref_from_prefix(bytes).ok()?;
            (&raw.t_blocknr, raw.t_blocknr_high.get(), raw.t_flags.get(), raw.t_checksum.get())
        } else {
            let mut whole = [0; size_of::<RawTag>()];
            whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            let raw: RawTag = zerocopy::transmute!(whole);
            let number = u64::from(raw.t_blocknr.get());
            let high = if self.has_64bit_blocks { raw.t_blocknr_high.get() } else { 0 };
            let (flags, sum) = (raw.t_flags.get().into(), raw.t_checksum.get().into());
            let block = number | u64::from(high) << 32;
            return Some((BlockTag { block, escaped: flags & TAG_ESCAPED != 0, sum }, flags));
        };
        // This kind of tag always has a field for the high half.
        let high = if self.has_64bit_blocks { high } else { 0 };
        let block = u64::from(low.get()) | u64::from(high) << 32;
        Some((BlockTag { block, escaped: flags & TAG_ESCAPED != 0, sum }, flags))
    }

    /// Verifies the checksum in the tail of a descriptor or revoke block.
    pub fn verify_tail(&self, block: &[u8]) -> ChecksumState {
        if !self.has_tails() {
            return ChecksumState::Valid;
        }
        let Some((body, tail)) = block.split_at_checked(self.body_len()) else {
            return ChecksumState::Invalid;
        };
        let sum = U32::new(crc32c(crc32c(self.seed, body), &[0; TAIL_BYTES]));
        if tail == sum.as_bytes() { ChecksumState::Valid } else { ChecksumState::Invalid }
    }

    /// Returns true if the block belongs to this transaction but has a damaged header: with the
    /// expected header its checksum is valid. Without checksums, the header must differ in one bit
    /// outside its sequence number.
    pub fn is_damaged_header(&self, block: &[u8], sequence: u32) -> bool {
        let Some((head, rest)) = block.split_at_checked(HEADER_BYTES) else { return false };
        [BlockType::Descriptor, BlockType::Revoke, BlockType::Commit].into_iter().any(|kind| {
            let header = self.header(kind, sequence);
            let wrong: u32 =
                head.iter().zip(header.as_bytes()).map(|(is, be)| (is ^ be).count_ones()).sum();
            if !self.has_tails() {
                return wrong == 1 && head.ends_with(&sequence.to_be_bytes());
            }
            let whole = [header.as_bytes(), rest].concat();
            let soundness = match kind {
                BlockType::Commit => self.parse_commit(&whole).map(|commit| commit.checksum_state),
                _ => Some(self.verify_tail(&whole)),
            };
            wrong > 0 && soundness == Some(ChecksumState::Valid)
        })
    }

    /// Returns the blocks that a revoke block revokes; `None` if its length is invalid.
    pub fn parse_revokes<'a>(
        &self,
        block: &'a [u8],
    ) -> Option<impl Iterator<Item = u64> + use<'a>> {
        let (raw, _) = RawRevoke::ref_from_prefix(block).ok()?;
        let end = saturating_usize(raw.r_count.get().into());
        if end > self.body_len() {
            return None;
        }
        let entries = block.get(REVOKE_BYTES..end)?.chunks_exact(self.revoke_bytes());
        let number = |entry: &[u8]| entry.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Some(entries.map(number))
    }

    /// Returns the checksum of a copy as stored (escaped) for its tag.
    pub fn tag_checksum(&self, sequence: u32, stored: &[u8]) -> u32 {
        let sum = || crc32c(crc32c(self.seed, &sequence.to_be_bytes()), stored);
        match self.checksums {
            JournalChecksums::None | JournalChecksums::Commit => 0,
            JournalChecksums::V2 => sum() & 0xFFFF,
            JournalChecksums::V3 => sum(),
        }
    }

    /// Parses a commit block; `None` if it is too short.
    pub fn parse_commit(&self, block: &[u8]) -> Option<CommitBlock> {
        let (raw, _) = RawCommit::ref_from_prefix(block).ok()?;
        let [claimed, ..] = &raw.h_chksum;
        let kind = (raw.h_chksum_type, raw.h_chksum_size);
        let has_sum = kind == CRC32_TYPE_AND_SIZE;
        let is_sound = match self.checksums {
            JournalChecksums::None => true,
            JournalChecksums::Commit => has_sum || (kind, claimed.get()) == ((0, 0), 0),
            // In a torn block only the first sector counts; the rest of an intact block is zero.
            JournalChecksums::V2 | JournalChecksums::V3 => {
                let head = block.get(..COMMIT_BYTES).unwrap_or_default();
                let zeros = vec![0; block.len().saturating_sub(COMMIT_BYTES)];
                let rest = block.get(COMMIT_BYTES..).unwrap_or_default();
                self.commit_checksum(head, rest) == claimed.get()
                    || self.commit_checksum(head, &zeros) == claimed.get()
            }
        };
        let time = Duration::new(raw.h_commit_sec.get(), 0)
            .saturating_add(Duration::from_nanos(raw.h_commit_nsec.get().into()));
        Some(CommitBlock {
            time,
            checksum_state: if is_sound { ChecksumState::Valid } else { ChecksumState::Invalid },
            transaction_sum: (self.checksums == JournalChecksums::Commit && has_sum)
                .then_some(claimed.get()),
        })
    }

    /// Returns the checksum of a commit block, with its checksum field zeroed.
    fn commit_checksum(&self, head: &[u8], rest: &[u8]) -> u32 {
        let mut head = head.to_vec();
        if let Ok((raw, _)) = RawCommit::mut_from_prefix(&mut head)
            && let [sum, ..] = &mut raw.h_chksum
        {
            sum.set(0);
        }
        crc32c(crc32c(self.seed, &head), rest)
    }

    /// Builds a descriptor of at most [`JournalFormat::tags_per_descriptor`] tags.
    pub fn build_descriptor(&self, sequence: u32, tags: &[BlockTag]) -> Vec<u8> {
        let mut block = self.block_with_header(BlockType::Descriptor, sequence);
        for (nth, tag) in tags.iter().enumerate() {
            let same = if nth == 0 { 0 } else { TAG_SAME_UUID };
            let last = if nth.saturating_add(1) == tags.len() { TAG_LAST } else { 0 };
            let flags = if tag.escaped { TAG_ESCAPED } else { 0 } | same | last;
            self.put_tag(&mut block, tag, flags);
            if nth == 0 {
                // UUID of the only volume that uses the journal: zero, as in Linux.
                block.extend([0; UUID_BYTES]);
            }
        }
        self.finish_block(block)
    }

    #[allow(clippy::cast_possible_truncation, reason = "halves of numbers")]
    fn put_tag(&self, into: &mut Vec<u8>, tag: &BlockTag, flags: u32) {
        let (low, high) = (U32::new(tag.block as u32), U32::new((tag.block >> 32) as u32));
        let end = into.len().saturating_add(self.tag_bytes());
        if self.checksums == JournalChecksums::V3 {
            let (flags, sum) = (U32::new(flags), U32::new(tag.sum));
            let raw =
                RawTag3 { t_blocknr: low, t_flags: flags, t_blocknr_high: high, t_checksum: sum };
            into.extend(raw.as_bytes());
        } else {
            let (flags, sum) = (U16::new(flags as u16), U16::new(tag.sum as u16));
            let raw =
                RawTag { t_blocknr: low, t_checksum: sum, t_flags: flags, t_blocknr_high: high };
            into.extend(raw.as_bytes());
        }
        into.resize(end, 0);
    }

    /// Builds a revoke block of at most [`JournalFormat::revokes_per_block`] blocks.
    #[allow(clippy::cast_possible_truncation, reason = "numbers of 32 bits, and lengths of blocks")]
    pub fn build_revoke(&self, sequence: u32, blocks: &[u64]) -> Vec<u8> {
        let mut block = self.block_with_header(BlockType::Revoke, sequence);
        let len = blocks.len().saturating_mul(self.revoke_bytes()).saturating_add(REVOKE_BYTES);
        block.extend((len as u32).to_be_bytes());
        for revoked in blocks {
            match self.has_64bit_blocks {
                true => block.extend(revoked.to_be_bytes()),
                false => block.extend((*revoked as u32).to_be_bytes()),
            }
        }
        self.finish_block(block)
    }

    /// Builds a commit block. With [`JournalChecksums::Commit`], `transaction_sum` covers
    /// descriptors and copies.
    pub fn build_commit(&self, sequence: u32, time: Duration, transaction_sum: u32) -> Vec<u8> {
        let header = self.header(BlockType::Commit, sequence);
        let (kind, len, sum) = match self.checksums {
            JournalChecksums::Commit => {
                (CRC32_TYPE_AND_SIZE.0, CRC32_TYPE_AND_SIZE.1, transaction_sum)
            }
            _ => (0, 0, 0),
        };
        let mut raw = RawCommit {
            header,
            h_chksum_type: kind,
            h_chksum_size: len,
            h_padding: [0; 2],
            h_chksum: [U32::ZERO; 8],
            h_commit_sec: U64::new(time.as_secs()),
            h_commit_nsec: U32::new(time.subsec_nanos()),
        };
        let zeros = vec![0; self.block_len().saturating_sub(COMMIT_BYTES)];
        let sum = if self.has_tails() { self.commit_checksum(raw.as_bytes(), &zeros) } else { sum };
        let [first, ..] = &mut raw.h_chksum;
        first.set(sum);
        let mut block = raw.as_bytes().to_vec();
        block.extend(zeros);
        block
    }

    fn header(&self, kind: BlockType, sequence: u32) -> RawJournalHeader {
        RawJournalHeader {
            h_magic: U32::new(MAGIC),
            h_blocktype: U32::new(kind.number()),
            h_sequence: U32::new(sequence),
        }
    }

    fn block_with_header(&self, kind: BlockType, sequence: u32) -> Vec<u8> {
        let mut block = Vec::with_capacity(self.block_len());
        block.extend(self.header(kind, sequence).as_bytes());
        block
    }

    /// Pads a descriptor or revoke block and sets its tail.
    fn finish_block(&self, mut block: Vec<u8>) -> Vec<u8> {
        block.resize(self.block_len(), 0);
        if self.has_tails()
            && let Some((body, tail)) = block.split_at_mut_checked(self.body_len())
        {
            let sum = U32::new(crc32c(crc32c(self.seed, body), &[0; TAIL_BYTES]));
            tail.copy_from_slice(sum.as_bytes());
        }
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_formats() -> impl Iterator<Item = JournalFormat> {
        let checksums = [
            JournalChecksums::None,
            JournalChecksums::Commit,
            JournalChecksums::V2,
            JournalChecksums::V3,
        ];
        let all =
            checksums.into_iter().flat_map(|checksums| [(checksums, false), (checksums, true)]);
        all.map(|(checksums, wide)| JournalFormat {
            block_bytes: 1024,
            checksums,
            has_64bit_blocks: wide,
            seed: 0x1234_5678,
        })
    }

    #[test]
    fn built_blocks_are_parsed_back() {
        for form in all_formats() {
            let high = if form.has_64bit_blocks { 1 << 40 } else { 0 };
            let sum = if form.checksums == JournalChecksums::V3 { 0xDEAD_BEEF } else { 0xBEEF };
            let sum = if matches!(form.checksums, JournalChecksums::None | JournalChecksums::Commit)
            {
                0
            } else {
                sum
            };
            let tag = |nth: u64| BlockTag { block: (nth * 3) | high, escaped: nth % 2 == 1, sum };
            let tags: Vec<BlockTag> = (0..form.tags_per_descriptor() as u64).map(tag).collect();
            for count in [1, 2, tags.len()] {
                let mut block = form.build_descriptor(7, &tags[..count]);
                assert_eq!(block.len(), 1024);
                assert_eq!(header(&block), Some((BlockType::Descriptor, 7)));
                assert_eq!(form.verify_tail(&block), ChecksumState::Valid);
                assert_eq!(form.parse_tags(&block), tags[..count], "{form:?}");
                block[20] ^= 1;
                assert_eq!(form.verify_tail(&block) == ChecksumState::Invalid, form.has_tails());
            }
            let blocks: Vec<u64> = (0..form.revokes_per_block() as u64).map(|n| n | high).collect();
            for count in [0, 1, blocks.len()] {
                let block = form.build_revoke(9, &blocks[..count]);
                assert_eq!((block.len(), header(&block)), (1024, Some((BlockType::Revoke, 9))));
                assert_eq!(form.verify_tail(&block), ChecksumState::Valid);
                assert!(form.parse_revokes(&block).unwrap().eq(blocks[..count].iter().copied()));
            }
        }
    }

    #[test]
    fn commit_block_survives_tear_but_no_bit_flip() {
        for form in all_formats() {
            let time = Duration::new(1_700_000_000, 5);
            let block = form.build_commit(3, time, 77);
            assert_eq!((block.len(), header(&block)), (1024, Some((BlockType::Commit, 3))));
            let commit = form.parse_commit(&block).unwrap();
            assert_eq!((commit.time, commit.checksum_state), (time, ChecksumState::Valid));
            assert_eq!(
                commit.transaction_sum,
                (form.checksums == JournalChecksums::Commit).then_some(77)
            );
            let mut torn = block.clone();
            torn[512..].fill(9);
            assert_eq!(form.parse_commit(&torn).unwrap().checksum_state, ChecksumState::Valid);
            let mut other = block;
            other[0x37] ^= 1;
            assert_eq!(
                form.parse_commit(&other).unwrap().checksum_state == ChecksumState::Invalid,
                form.has_tails()
            );
        }
    }

    #[test]
    fn random_bytes_do_not_panic() {
        for form in all_formats() {
            for byte in [0u8, 0xFF, 0x08] {
                for len in [0, 5, 12, 30, 1023, 1024] {
                    let block = vec![byte; len];
                    assert!(form.parse_tags(&block).len() <= 128);
                    let _ = form.parse_revokes(&block).map(Iterator::count);
                    let _ = (form.parse_commit(&block), form.verify_tail(&block), header(&block));
                }
            }
        }
    }

    #[test]
    fn journal_magic_in_data_is_escaped_and_restored() {
        let mut block = MAGIC.to_be_bytes().to_vec();
        block.push(9);
        assert!(needs_escape(&block));
        escape(&mut block);
        assert_eq!(block, [0, 0, 0, 0, 9]);
        assert!(!needs_escape(&block));
        unescape(&mut block);
        assert!(needs_escape(&block) && block[4] == 9);
    }
}
