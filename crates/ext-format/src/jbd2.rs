//! The JBD2 journal of ext3 and ext4; big-endian on all machines.
//!
//! ```text
//!   log block 0   first                                              len
//!   | superblock | descriptor: tag tag tag | copy | copy | copy | commit | revoke | ..
//!                        each tag holds the home block of a copy
//! ```
//! A copy that begins with the journal's magic number has its first four bytes zeroed and its tag
//! flagged (escaped). The features of the journal decide the length of a tag and the checksums.
//!
//! Law: any bytes may be read here; every loop ends with the block it walks.

pub mod blocks;
mod crc;
pub mod fast_commit;

use bitflags::bitflags;
use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::Checksum;
use crate::{Error, Result};
pub use blocks::{BlockTag, BlockType, ChecksumState, CommitBlock};
pub use crc::crc32_be;

/// Magic number of every block that is part of the journal itself.
pub const MAGIC: u32 = 0xC03B_3998;
/// Bytes of a journal superblock.
pub const SUPERBLOCK_BYTES: usize = 1024;
/// Value of `s_checksum_type` for CRC-32C, the only one in use.
const CHECKSUM_TYPE_CRC32C: u8 = 4;
/// Minimum journal blocks without the fast-commit area, as in Linux.
const MIN_JOURNAL_BLOCKS: u32 = 1024;
/// Default size of the fast-commit area in blocks.
const FAST_COMMIT_BLOCKS: u32 = 256;

bitflags! {
    /// Compatible features of a journal.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct JournalCompatible: u32 {
        /// Commit blocks have a checksum of all blocks of their transactions.
        const CHECKSUM = 1;
        const _ = !0;
    }

    /// Incompatible features of a journal.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct JournalIncompatible: u32 {
        /// The journal may hold revoke blocks.
        const REVOKE = 1;
        /// Block numbers have 64 bits.
        const SIXTY_FOUR_BIT = 2;
        /// A commit block may become durable before its transaction.
        const ASYNC_COMMIT = 4;
        /// All blocks have checksums; those of copies have 16 bits.
        const CSUM_V2 = 8;
        /// All blocks have checksums; those of copies have 32 bits.
        const CSUM_V3 = 0x10;
        /// The last blocks may hold fast commits.
        const FAST_COMMIT = 0x20;
        const _ = !0;
    }
}

/// On-disk journal superblock, with the field names of the format manual.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawJournalSuperblock {
    pub h_magic: U32,
    pub h_blocktype: U32,
    pub h_sequence: U32,
    pub s_blocksize: U32,
    pub s_maxlen: U32,
    pub s_first: U32,
    pub s_sequence: U32,
    pub s_start: U32,
    pub s_errno: U32,
    pub s_feature_compat: U32,
    pub s_feature_incompat: U32,
    pub s_feature_ro_compat: U32,
    pub s_uuid: [u8; 16],
    pub s_nr_users: U32,
    pub s_dynsuper: U32,
    pub s_max_transaction: U32,
    pub s_max_trans_data: U32,
    pub s_checksum_type: u8,
    pub s_padding2: [u8; 3],
    pub s_num_fc_blks: U32,
    pub s_head: U32,
    pub s_padding: [U32; 40],
    pub s_checksum: U32,
    pub s_users: [[u8; 16]; 48],
}

const _: () = assert!(size_of::<RawJournalSuperblock>() == SUPERBLOCK_BYTES);

/// Checksums of the blocks of a journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JournalChecksums {
    /// No checksums.
    None,
    /// One checksum in the commit block, of descriptors and copies.
    Commit,
    /// Checksums of all blocks; tags store half the bits for copies.
    V2,
    /// Checksums of all blocks.
    V3,
}

/// Format of the blocks of a journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JournalFormat {
    /// Block size in bytes, equal to the volume's.
    pub block_bytes: u32,
    /// Kind of checksums.
    pub checksums: JournalChecksums,
    /// True if block numbers have 64 bits.
    pub has_64bit_blocks: bool,
    /// Checksum seed: the checksum of the UUID.
    seed: u32,
}

/// A validated journal superblock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalSuperblock {
    /// Format of its blocks.
    pub format: JournalFormat,
    /// Blocks of the journal, including the superblock and the fast-commit area.
    pub len: u32,
    /// First block of the log.
    pub first: u32,
    /// One past the last block of the log; more than `first`.
    pub end: u32,
    /// Sequence number of the first transaction in the log, or of the next one.
    pub sequence: u32,
    /// First block to replay; `None` if the log is empty.
    pub start: Option<u32>,
    /// Block at which the next transaction of an empty log begins.
    pub head: u32,
    /// Error that made the last user abort the journal, if any.
    pub errno: u32,
    /// Compatible features.
    pub compatible: JournalCompatible,
    /// Features without which a volume cannot be read (`incompat`).
    pub incompatible: JournalIncompatible,
    /// UUID.
    pub uuid: [u8; 16],
}

impl RawJournalSuperblock {
    /// The log start is out of range; everything else is valid.
    pub const LOG_START_OUT_OF_RANGE: Error =
        Error::Corrupt { what: "journal superblock: start", inode: None, block: None };

    /// Returns the superblock in the first block of a journal.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there is none.
    pub fn view(bytes: &[u8]) -> Result<&Self> {
        let (raw, _) = Self::ref_from_prefix(bytes)
            .map_err(|_| Error::corrupt("journal superblock: length"))?;
        if raw.h_magic.get() != MAGIC {
            return Err(Error::corrupt("journal superblock: magic number"));
        }
        Ok(raw)
    }

    /// Returns the mutable superblock.
    ///
    /// # Errors
    /// As [`RawJournalSuperblock::view`].
    pub fn view_mut(bytes: &mut [u8]) -> Result<&mut Self> {
        Self::view(bytes)?;
        Self::mut_from_prefix(bytes)
            .map(|(raw, _)| raw)
            .map_err(|_| Error::corrupt("journal superblock: length"))
    }

    /// Checks all fields that the crate computes with, for a journal of `blocks` blocks of
    /// `block_bytes`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming a feature that is not supported; [`Error::Corrupt`] naming the
    /// first invalid field.
    pub fn check(&self, block_bytes: u32, blocks: u64) -> Result<JournalSuperblock> {
        let has_features = match BlockType::from_number(self.h_blocktype.get()) {
            Some(BlockType::SuperblockV1) => false,
            Some(BlockType::SuperblockV2) => true,
            _ => return Err(Error::corrupt("journal superblock: kind of block")),
        };
        let features = |field: &U32| if has_features { field.get() } else { 0 };
        let compatible = JournalCompatible::from_bits_retain(features(&self.s_feature_compat));
        let incompatible =
            JournalIncompatible::from_bits_retain(features(&self.s_feature_incompat));
        // A superblock with a wrong checksum is damaged, whatever features it has.
        let checksums = self.checksum_mode(compatible, incompatible)?;
        refuse_unsupported_features(incompatible.bits(), features(&self.s_feature_ro_compat))?;
        if has_features && self.s_nr_users.get() > 1 {
            let feature = "needs: a journal of one volume; this one is shared".to_owned();
            return Err(Error::Unsupported { feature });
        }
        if self.s_blocksize.get() != block_bytes {
            return Err(Error::corrupt("journal superblock: block size"));
        }
        let len = self.s_maxlen.get();
        if u64::from(len) > blocks {
            return Err(Error::corrupt(
                "journal superblock: length: the journal's file is shorter",
            ));
        }
        let fast = match self.s_num_fc_blks.get() {
            _ if !incompatible.contains(JournalIncompatible::FAST_COMMIT) => 0,
            0 => FAST_COMMIT_BLOCKS,
            blocks => blocks,
        };
        let first = self.s_first.get();
        let end = len.checked_sub(fast).filter(|end| *end > first && first > 0);
        let end = end.ok_or(Error::corrupt("journal superblock: first block"))?;
        if fast > 0 && end < MIN_JOURNAL_BLOCKS {
            return Err(Error::corrupt("journal superblock: fast commit blocks"));
        }
        let start = Some(self.s_start.get()).filter(|start| *start != 0);
        if start.is_some_and(|start| !(first..end).contains(&start)) {
            return Err(Self::LOG_START_OUT_OF_RANGE);
        }
        let head = Some(self.s_head.get()).filter(|head| (first..end).contains(head));
        let seed = crc32c(!0, &self.s_uuid);
        let wide = incompatible.contains(JournalIncompatible::SIXTY_FOUR_BIT);
        Ok(JournalSuperblock {
            format: JournalFormat { block_bytes, checksums, has_64bit_blocks: wide, seed },
            len,
            first,
            end,
            sequence: self.s_sequence.get(),
            start,
            head: head.unwrap_or(first),
            errno: self.s_errno.get(),
            compatible,
            incompatible,
            uuid: self.s_uuid,
        })
    }

    fn checksum_mode(
        &self,
        compatible: JournalCompatible,
        incompatible: JournalIncompatible,
    ) -> Result<JournalChecksums> {
        let commits = compatible.contains(JournalCompatible::CHECKSUM);
        let (v2, v3) = (JournalIncompatible::CSUM_V2, JournalIncompatible::CSUM_V3);
        let sums = match (commits, incompatible.contains(v2), incompatible.contains(v3)) {
            (false, false, false) => return Ok(JournalChecksums::None),
            (true, false, false) => return Ok(JournalChecksums::Commit),
            (false, true, false) => JournalChecksums::V2,
            (false, false, true) => JournalChecksums::V3,
            _ => return Err(Error::corrupt("journal superblock: features: two kinds of sums")),
        };
        if self.s_checksum_type != CHECKSUM_TYPE_CRC32C {
            return Err(Error::corrupt("journal superblock: kind of sums"));
        }
        if self.s_checksum.get() != self.compute_checksum() {
            return Err(Error::corrupt("journal superblock: checksum"));
        }
        Ok(sums)
    }

    /// Returns the checksum, computed with the checksum field zeroed.
    fn compute_checksum(&self) -> u32 {
        let mut bytes = self.clone();
        bytes.s_checksum.set(0);
        crc32c(!0, bytes.as_bytes())
    }

    /// Sets the first block of the log, `None` if it is empty, and its first transaction.
    pub fn set_tail(&mut self, start: Option<u32>, sequence: u32) {
        self.s_start.set(start.unwrap_or(0));
        self.s_sequence.set(sequence);
        self.s_head.set(0);
        self.set_checksum();
    }

    /// Sets the block at which an empty log goes on, as Linux 6.4 does: what was logged before it
    /// stays readable for undeletion.
    pub fn set_head(&mut self, head: u32) {
        self.s_head.set(head);
        self.set_checksum();
    }

    /// Sets the feature `revoke`. A superblock of version 1 has no feature fields: it becomes
    /// version 2.
    pub fn enable_revokes(&mut self) {
        if BlockType::from_number(self.h_blocktype.get()) == Some(BlockType::SuperblockV1) {
            self.h_blocktype.set(BlockType::SuperblockV2.number());
            self.s_feature_compat.set(0);
            self.s_feature_incompat.set(0);
            self.s_feature_ro_compat.set(0);
        }
        let features = self.s_feature_incompat.get() | JournalIncompatible::REVOKE.bits();
        self.s_feature_incompat.set(features);
        self.set_checksum();
    }

    /// Sets the error that makes the user abort the journal, a negative errno; 0 clears it.
    pub fn set_errno(&mut self, errno: i32) {
        self.s_errno.set(errno.cast_unsigned());
        self.set_checksum();
    }

    fn set_checksum(&mut self) {
        let sums = JournalIncompatible::CSUM_V2.union(JournalIncompatible::CSUM_V3).bits();
        let is_v2 = BlockType::from_number(self.h_blocktype.get()) == Some(BlockType::SuperblockV2);
        if is_v2 && self.s_feature_incompat.get() & sums != 0 {
            let sum = self.compute_checksum();
            self.s_checksum.set(sum);
        }
    }
}

impl JournalSuperblock {
    /// Returns the log block after `at`; the log wraps to its first block.
    pub fn next(&self, at: u32) -> u32 {
        match at.saturating_add(1) {
            next if next < self.end => next,
            _ => self.first,
        }
    }

    /// Returns true if the superblock allows revoke blocks.
    pub fn may_revoke(&self) -> bool {
        self.incompatible.contains(JournalIncompatible::REVOKE)
    }

    /// Returns the number of log blocks.
    pub fn log_blocks(&self) -> u32 {
        self.end.saturating_sub(self.first)
    }
}

fn refuse_unsupported_features(incompatible: u32, read_only_compatible: u32) -> Result<()> {
    const KNOWN: u32 = 0x3F;
    let named = |set: char, bits: u32| {
        let bits = (0..u32::BITS).filter(move |bit| bits & (1 << bit) != 0);
        bits.map(move |bit| format!("FEATURE_{set}{bit}"))
    };
    let unknown = named('I', incompatible & !KNOWN).chain(named('R', read_only_compatible));
    let unknown: Vec<String> = unknown.collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(Error::Unsupported { feature: format!("needs, in the journal: {}", unknown.join(", ")) })
}

/// Continues a CRC-32C over `bytes` from `seed`, `!0` at the start.
fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    Checksum::seeded(seed).update(bytes).value()
}
