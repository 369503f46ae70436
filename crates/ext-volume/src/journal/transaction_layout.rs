//! Layout of a transaction in the log.
//!
//! ```text
//!   head: | descriptor | copy | copy | .. | descriptor | .. | revokes | zeros |   first
//!                                                                     | commit |  once that is durable
//! ```
//! Law: the block of a checksummed commit block is first zeroed. Only its first sector then differs
//! from zeros, so a torn commit block is either complete or absent.

use std::collections::BTreeMap;
use std::time::Duration;

use super::journal_file::JournalFile;
use crate::blocks::data::SharedBytes;
use crate::format::jbd2::blocks::{escape, needs_escape};
use crate::format::jbd2::{BlockTag, JournalChecksums, JournalFormat, crc32_be};
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, Result};

/// Volume blocks and their new bytes.
type BlockImages = BTreeMap<u64, SharedBytes>;

/// Contents of a transaction.
#[derive(Debug)]
pub(crate) struct TransactionContents<'a> {
    /// Sequence number.
    pub(crate) sequence: u32,
    /// Commit time.
    pub(crate) time: Duration,
    pub(crate) copies: &'a BlockImages,
    pub(crate) revoked: &'a [u64],
}

/// Blocks of a transaction, by volume block.
#[derive(Debug)]
pub(crate) struct TransactionLayout {
    pub(crate) first: BlockImages,
    /// The commit block.
    pub(crate) commit: BlockImages,
    /// Log block at which the next transaction begins.
    pub(crate) head: u32,
    /// Number of log blocks that the transaction uses.
    pub(crate) blocks: u32,
}

/// Returns the log blocks needed for so many copies and revokes, including the commit block.
pub(crate) fn log_blocks_needed(form: &JournalFormat, copies: usize, revokes: usize) -> u32 {
    let descriptors = copies.div_ceil(form.tags_per_descriptor().max(1));
    let revokes = revokes.div_ceil(form.revokes_per_block().max(1));
    saturating_u32(
        copies.saturating_add(descriptors).saturating_add(revokes).saturating_add(1) as u64
    )
}

/// Lays out a transaction from `head` on; the log must have [`log_blocks_needed`] free blocks.
///
/// # Errors
/// [`Error::Corrupt`] if a log block is not mapped.
pub(crate) fn lay_out_transaction(
    log: &JournalFile,
    head: u32,
    contents: &TransactionContents<'_>,
) -> Result<TransactionLayout> {
    let form = &log.super_.format;
    let (sequence, time) = (contents.sequence, contents.time);
    let mut laid = TransactionLayout {
        first: BlockImages::new(),
        commit: BlockImages::new(),
        head,
        blocks: 0,
    };
    let sum = laid.write_copies(log, sequence, contents.copies)?;
    for some in contents.revoked.chunks(form.revokes_per_block().max(1)) {
        let block = form.build_revoke(sequence, some);
        let at = laid.advance(log)?;
        laid.first.insert(at, to_shared_bytes(block));
    }
    let at = laid.advance(log)?;
    if form.has_commit_checksum() && log.sector_bytes() < form.block_bytes {
        laid.first.insert(at, to_shared_bytes(vec![0; saturating_usize(form.block_bytes.into())]));
    }
    laid.commit.insert(at, to_shared_bytes(form.build_commit(sequence, time, sum)));
    Ok(laid)
}

impl TransactionLayout {
    /// Advances by one log block and returns its volume block.
    fn advance(&mut self, log: &JournalFile) -> Result<u64> {
        let at = self.head;
        self.head = log.super_.next(at);
        self.blocks = self.blocks.saturating_add(1);
        let place =
            log.volume_block(at).ok_or(Error::corrupt("journal: a block of it is nowhere"))?;
        Ok(place.0)
    }

    /// Writes descriptors and copies; returns their checksum, if commit blocks have one.
    fn write_copies(
        &mut self,
        log: &JournalFile,
        sequence: u32,
        blocks: &BlockImages,
    ) -> Result<u32> {
        let form = &log.super_.format;
        let mut sum = !0;
        let mut left = blocks.iter().peekable();
        while left.peek().is_some() {
            let at = self.advance(log)?;
            let (mut tags, mut copies) = (Vec::new(), Vec::new());
            for (block, bytes) in left.by_ref().take(form.tags_per_descriptor()) {
                let mut copy = bytes.clone();
                let escaped = needs_escape(&copy);
                if escaped {
                    escape(copy.make_mut());
                }
                tags.push(BlockTag {
                    block: *block,
                    escaped,
                    sum: form.tag_checksum(sequence, &copy),
                });
                let at = self.advance(log)?;
                self.first.insert(at, copy.clone());
                copies.push(copy);
            }
            let descriptor = form.build_descriptor(sequence, &tags);
            if form.checksums == JournalChecksums::Commit {
                sum = crc32_be(sum, &descriptor);
                sum = copies.iter().fold(sum, |sum, copy| crc32_be(sum, copy));
            }
            self.first.insert(at, to_shared_bytes(descriptor));
        }
        Ok(sum)
    }
}

fn to_shared_bytes(block: Vec<u8>) -> SharedBytes {
    SharedBytes::from_owned_bytes(block.into_boxed_slice())
}
