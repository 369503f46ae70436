//! The journal of a new volume: size, location and superblock.
//!
//! Law: the journal is empty, and reads as zeros behind its superblock: leftovers of an earlier
//! volume are never replayed.

use zerocopy::{FromZeros, IntoBytes};

use super::options::FormatOptions;
use super::{FormatError, Result};
use crate::format::features::Compatible;
use crate::format::jbd2::{self, RawJournalSuperblock};

/// Inode of the journal.
pub(crate) const JOURNAL_INODE: u32 = 8;

/// Minimum and maximum of journal blocks.
const MIN_BLOCKS: u32 = 1024;
const MAX_BLOCKS: u32 = 10_240_000;
/// Log blocks per fast-commit block.
const JOURNAL_TO_FC_BLOCKS_RATIO: u32 = 64;

/// Blocks of the log and of the fast-commit area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct JournalSizes {
    log: u32,
    pub(super) fast: u32,
}

impl JournalSizes {
    pub(super) fn total_blocks(self) -> u32 {
        self.log.saturating_add(self.fast)
    }
}

/// Smallest volume with a journal, in blocks.
pub(super) const MIN_VOLUME_BLOCKS: u64 = 2048;

/// Returns the journal sizes of a volume of `blocks` blocks; `None` without a journal, or if the
/// volume is too small.
#[allow(
    clippy::arithmetic_side_effects,
    reason = "mebibytes have 32 bits, and blocks are not empty"
)]
pub(super) fn journal_sizes(
    options: &FormatOptions,
    blocks: u64,
    block_bytes: u32,
) -> Result<Option<JournalSizes>> {
    if !options.compatible.contains(Compatible::HAS_JOURNAL) || blocks < MIN_VOLUME_BLOCKS {
        return Ok(None);
    }
    let has_fast = options.compatible.contains(Compatible::FAST_COMMIT);
    let in_blocks = |kib: u64| u32::try_from(kib * 1024 / u64::from(block_bytes));
    let log = match options.journal.mib {
        Some(mib) => in_blocks(u64::from(mib) * 1024).unwrap_or(u32::MAX),
        None => default_blocks(blocks),
    };
    let fast = match options.journal.fast_kib {
        _ if !has_fast => 0,
        Some(kib) => in_blocks(kib.into()).unwrap_or(u32::MAX),
        None => default_blocks(blocks) / JOURNAL_TO_FC_BLOCKS_RATIO,
    };
    match log.checked_add(fast) {
        Some(MIN_BLOCKS..=MAX_BLOCKS) => Ok(Some(JournalSizes { log, fast })),
        all => Err(FormatError::Misuse(format!(
            "-J size: a journal of {} blocks; it has {MIN_BLOCKS} to {MAX_BLOCKS}",
            all.unwrap_or(u32::MAX)
        ))),
    }
}

/// Returns mke2fs's default size.
fn default_blocks(blocks: u64) -> u32 {
    match blocks {
        ..0x8000 => 1024,
        0x8000..0x4_0000 => 4096,
        0x4_0000..0x8_0000 => 8192,
        0x8_0000..0x40_0000 => 16384,
        0x40_0000..0x80_0000 => 32768,
        0x80_0000..0x100_0000 => 65536,
        0x100_0000..0x200_0000 => 131_072,
        _ => 262_144,
    }
}

/// Returns the journal blocks, without fast commits, for a journal added to an existing volume. The
/// error text names the reason for none.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
pub(crate) fn journal_blocks_for_mib(
    mib: Option<u32>,
    volume: u64,
    block_bytes: u32,
) -> std::result::Result<u32, String> {
    if volume < MIN_VOLUME_BLOCKS {
        return Err(format!("a volume of {volume} blocks is too small for a journal"));
    }
    let given = mib.map(|mib| (u64::from(mib) << 20) / u64::from(block_bytes));
    let blocks =
        given.map_or(default_blocks(volume), |blocks| u32::try_from(blocks).unwrap_or(u32::MAX));
    match blocks {
        MIN_BLOCKS..=MAX_BLOCKS => Ok(blocks),
        _ => Err(format!("a journal of {blocks} blocks; it has {MIN_BLOCKS} to {MAX_BLOCKS}")),
    }
}

/// Returns the first block of an empty journal of `all` blocks, `fast` of them for fast commits.
pub(crate) fn raw_superblock(block_bytes: u32, all: u32, fast: u32, uuid: [u8; 16]) -> Vec<u8> {
    let mut raw = RawJournalSuperblock::new_zeroed();
    raw.h_magic = jbd2::MAGIC.into();
    raw.h_blocktype = jbd2::BlockType::SuperblockV2.number().into();
    raw.s_blocksize = block_bytes.into();
    raw.s_maxlen = all.into();
    raw.s_nr_users = 1.into();
    raw.s_first = 1.into();
    raw.s_sequence = 1.into();
    raw.s_num_fc_blks = fast.into();
    raw.s_uuid = uuid;
    let mut bytes = raw.as_bytes().to_vec();
    bytes.resize(crate::units::saturating_usize(block_bytes.into()), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_size_grows_with_volume() {
        let options = FormatOptions::for_type("ext3").unwrap();
        let all = |options: &FormatOptions, blocks| {
            journal_sizes(options, blocks, 4096).map(|sizes| sizes.map(JournalSizes::total_blocks))
        };
        for (blocks, expected) in
            [(2047, None), (2048, Some(1024)), (32768, Some(4096)), (1 << 40, Some(262_144))]
        {
            assert_eq!(all(&options, blocks).unwrap(), expected);
        }
        let mut given = options.clone();
        for (mib, expected) in
            [(3, None), (4, Some(1024)), (40_000, Some(MAX_BLOCKS)), (40_001, None)]
        {
            given.journal.mib = Some(mib);
            assert_eq!(all(&given, 1 << 40).ok().flatten(), expected, "{mib}");
        }
        given.apply_features("fast_commit").unwrap();
        given.journal.mib = None;
        assert_eq!(all(&given, 1 << 16).unwrap(), Some(4096 + 64));
        assert_eq!(all(&FormatOptions::default(), 1 << 16).unwrap(), None);
    }
}
