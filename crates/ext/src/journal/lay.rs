//! A transaction, laid down in the log.
//!
//! ```text
//!   head: | descriptor | copy | copy | .. | descriptor | .. | revokes | zeros |   first
//!                                                                     | commit |  once that is durable
//! ```
//! Law: where a commit block is going to be that is summed whole there are zeros before, which all
//! of it is but the first sector: torn, it is whole or not there.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "counts blocks of a log that was checked, of fewer than 2^32 blocks"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::log::Log;
use crate::blocks::data::Data;
use crate::format::jbd2::blocks::{escape, needs_escape};
use crate::format::jbd2::{Form, Sums, Tag, crc32_be};
use crate::units::{index, narrow};
use crate::{Error, Result};

/// Blocks of the volume, and what is written there.
type Blocks = BTreeMap<u64, Data>;

/// What a transaction has.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    /// Its number.
    pub(crate) sequence: u32,
    /// When it is committed.
    pub(crate) time: Duration,
    pub(crate) copies: &'a Blocks,
    pub(crate) revoked: &'a [u64],
}

/// What is written of it, and where.
#[derive(Debug)]
pub(crate) struct Laid {
    pub(crate) first: Blocks,
    /// The commit block.
    pub(crate) commit: Blocks,
    /// Where the next transaction begins.
    pub(crate) head: u32,
    /// Blocks of the log that it has.
    pub(crate) blocks: u32,
}

/// Blocks of the log that so many copies and revokes take, with the commit block.
pub(crate) fn room_for(form: &Form, copies: usize, revokes: usize) -> u32 {
    let descriptors = copies.div_ceil(form.tags_per_descriptor().max(1));
    let revokes = revokes.div_ceil(form.revokes_per_block().max(1));
    narrow((copies + descriptors + revokes + 1) as u64)
}

/// Lays a transaction down from `head` on; there is [`room_for`] it.
///
/// # Errors
/// [`Error::Corrupt`] if a block of the log is nowhere.
pub(crate) fn lay(log: &Log, head: u32, contents: &Contents<'_>) -> Result<Laid> {
    let form = &log.super_.form;
    let (sequence, time) = (contents.sequence, contents.time);
    let mut laid = Laid { first: Blocks::new(), commit: Blocks::new(), head, blocks: 0 };
    let sum = laid.copies(log, sequence, contents.copies)?;
    for some in contents.revoked.chunks(form.revokes_per_block().max(1)) {
        let block = form.revoke_block(sequence, some);
        let at = laid.advance(log)?;
        laid.first.insert(at, owned(block));
    }
    let at = laid.advance(log)?;
    if form.sums_whole_commits() && log.sector_bytes() < form.block_bytes {
        laid.first.insert(at, owned(vec![0; index(form.block_bytes.into())]));
    }
    laid.commit.insert(at, owned(form.commit_block(sequence, time, sum)));
    Ok(laid)
}

impl Laid {
    /// The next block of the log: where it is on the volume.
    fn advance(&mut self, log: &Log) -> Result<u64> {
        let at = self.head;
        self.head = log.super_.next(at);
        self.blocks += 1;
        let place = log.place(at).ok_or(Error::corrupt("journal: a block of it is nowhere"))?;
        Ok(place.0)
    }

    /// Descriptors and copies; their sum, where commit blocks have one.
    fn copies(&mut self, log: &Log, sequence: u32, blocks: &Blocks) -> Result<u32> {
        let form = &log.super_.form;
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
                tags.push(Tag { block: *block, escaped, sum: form.copy_sum(sequence, &copy) });
                let at = self.advance(log)?;
                self.first.insert(at, copy.clone());
                copies.push(copy);
            }
            let descriptor = form.descriptor(sequence, &tags);
            if form.sums == Sums::Commit {
                sum = crc32_be(sum, &descriptor);
                sum = copies.iter().fold(sum, |sum, copy| crc32_be(sum, copy));
            }
            self.first.insert(at, owned(descriptor));
        }
        Ok(sum)
    }
}

fn owned(block: Vec<u8>) -> Data {
    Data::owned(block.into_boxed_slice())
}
