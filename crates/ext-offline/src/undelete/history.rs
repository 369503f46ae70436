//! Transactions that are still in the blocks of a journal, also those that were checkpointed long
//! ago.
//!
//! ```text
//!   | .. copy copy commit 9 | descriptor 4: copies commit 4 | .. descriptor 8: copies commit 8 |
//!        newest ──▶          ▲ where the newest will go on: what follows is the oldest
//!   rank 1: the oldest transaction found     rank n: the newest     NOW: the volume itself
//! ```
//! Law 1: each log block is read at most twice, and a copy costs a few words of memory.
//! Law 2: a copy counts only in a transaction that is whole up to its commit block, with every
//! checksum that its format has.
//! Law 3: the history is complete as far back as each transaction begins where the one before it
//! ends. Beyond that point something may have happened that nothing tells of.

use std::collections::BTreeMap;
use std::ops::Range;

use draconis_types::Time;

use crate::Result;
use crate::blocks::data::SharedBytes;
use crate::format::jbd2::blocks::header;
use crate::format::jbd2::{BlockType, ChecksumState, JournalChecksums, crc32_be};
use crate::journal::JournalFile;
use crate::journal::recovery::{LogSource, LoggedBlock};
use crate::units::saturating_u32;

/// Age of a state: the position of its transaction among those found, from 1 on.
pub(super) type Rank = u32;
/// Rank of the volume as it is now.
pub(super) const NOW: Rank = u32::MAX;
/// Most sequence numbers that a journal skips between two transactions that are adjacent in the
/// log: Linux skips two at each mount.
const MAX_SKIPPED_SEQUENCES: u32 = 8;

/// A copy of a block in the journal.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockCopy {
    pub(super) rank: Rank,
    at: u32,
    escaped: bool,
}

/// Older states of the blocks of a volume.
#[derive(Debug)]
pub(super) struct History {
    journal: Option<JournalFile>,
    /// Copies by home block, oldest first.
    copies: BTreeMap<u64, Vec<BlockCopy>>,
    /// Commit times by rank, from rank 1 on.
    times: Vec<Time>,
    /// First transaction since which none is missing; [`NOW`] if even the newest is doubtful.
    complete_since: Rank,
}

/// A whole transaction in the log.
#[derive(Debug)]
struct FoundTransaction {
    sequence: u32,
    /// Its first log block, and the log block after its commit block.
    log: Range<u32>,
    time: Time,
    copies: Vec<(u64, u32, bool)>,
    /// True if every copy has its checksum.
    is_whole: bool,
}

impl History {
    /// Returns the history of a volume without a journal.
    pub(super) fn empty() -> Self {
        Self { journal: None, copies: BTreeMap::new(), times: vec![], complete_since: NOW }
    }

    /// Reads all blocks of a journal.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn scan(journal: JournalFile) -> Result<Self> {
        let newest = match journal.super_.start {
            None => journal.super_.sequence,
            Some(_) => journal.scan()?.next,
        }
        .wrapping_sub(1);
        let mut found = LogWalk::new(&journal).walk()?;
        let age = |it: &FoundTransaction| newest.wrapping_sub(it.sequence);
        let before = found.len();
        // A number after the newest: of a former journal, or of a transaction that does not count.
        found.retain(|it| age(it) < 1 << 31);
        let is_mixed = found.len() < before;
        found.sort_by_key(|it| (std::cmp::Reverse(age(it)), it.time));
        let is_recent = found.last().is_some_and(|it| age(it) <= MAX_SKIPPED_SEQUENCES);
        let complete_since = match is_recent && !is_mixed {
            true => complete_since(&found, journal.super_.first),
            false => NOW,
        };
        let mut copies: BTreeMap<u64, Vec<BlockCopy>> = BTreeMap::new();
        for (rank, it) in (1..).zip(&found) {
            for (block, at, escaped) in &it.copies {
                let copy = BlockCopy { rank, at: *at, escaped: *escaped };
                copies.entry(*block).or_default().push(copy);
            }
        }
        let times = found.iter().map(|it| it.time).collect();
        Ok(Self { journal: Some(journal), copies, times, complete_since })
    }

    /// Returns the number of transactions found.
    pub(super) fn transactions(&self) -> u32 {
        saturating_u32(self.times.len() as u64)
    }

    /// Returns true if no transaction since this one is missing.
    pub(super) fn is_complete_since(&self, rank: Rank) -> bool {
        rank >= self.complete_since && rank != NOW
    }

    /// Declares the history incomplete: something changed the volume without the journal.
    pub(super) fn distrust(&mut self) {
        self.complete_since = NOW;
    }

    /// Returns the commit time of a transaction.
    pub(super) fn time(&self, rank: Rank) -> Option<Time> {
        let nth = usize::try_from(rank).ok()?.checked_sub(1)?;
        self.times.get(nth).copied()
    }

    /// Returns the time of the newest commit.
    pub(super) fn newest_time(&self) -> Option<Time> {
        self.times.last().copied()
    }

    /// Returns the copies of a block, oldest first.
    pub(super) fn copies(&self, block: u64) -> &[BlockCopy] {
        self.copies.get(&block).map_or(&[], Vec::as_slice)
    }

    /// Returns the blocks of a range that have copies.
    pub(super) fn blocks_in(&self, range: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        self.copies.range(range.start..range.end.max(range.start)).map(|(block, _)| *block)
    }

    /// Returns the newest copy of a block that is no newer than `rank`, and whether there are
    /// newer ones.
    pub(super) fn newest_until(&self, block: u64, rank: Rank) -> (Option<BlockCopy>, bool) {
        let all = self.copies(block);
        let newer = all.partition_point(|copy| copy.rank <= rank);
        (newer.checked_sub(1).and_then(|nth| all.get(nth)).copied(), newer < all.len())
    }

    /// Reads a copy.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn read(&self, copy: BlockCopy) -> Result<SharedBytes> {
        let journal = self.journal.as_ref().ok_or(crate::Error::Misuse("no journal"))?;
        journal.read_copy(LoggedBlock::new(copy.at, copy.escaped))
    }
}

/// Returns the rank of the first transaction since which none is missing.
fn complete_since(found: &[FoundTransaction], first: u32) -> Rank {
    let mut since = NOW;
    for nth in (0..found.len()).rev() {
        let Some(it) = found.get(nth).filter(|it| it.is_whole) else { break };
        since = saturating_u32(nth as u64).saturating_add(1);
        let Some(before) = nth.checked_sub(1).and_then(|nth| found.get(nth)) else { break };
        let skipped = it.sequence.wrapping_sub(before.sequence).wrapping_sub(1);
        let is_adjacent = before.log.end == it.log.start && skipped <= MAX_SKIPPED_SEQUENCES;
        // A driver that starts the log anew may have overwritten one that did the same.
        let is_restart = it.log.start == first && skipped == 0;
        if !is_adjacent && !is_restart {
            break;
        }
    }
    since
}

/// A walk over all blocks of a log, which begins after some commit block.
struct LogWalk<'a> {
    journal: &'a JournalFile,
    at: u32,
    left: u32,
    found: Vec<FoundTransaction>,
    open: Option<OpenTransaction>,
}

#[derive(Debug)]
struct OpenTransaction {
    sequence: u32,
    start: u32,
    sum: u32,
    is_whole: bool,
    copies: Vec<(u64, u32, bool)>,
}

impl<'a> LogWalk<'a> {
    fn new(journal: &'a JournalFile) -> Self {
        let (at, left) = (journal.super_.first, journal.super_.log_blocks());
        Self { journal, at, left, found: vec![], open: None }
    }

    fn walk(mut self) -> Result<Vec<FoundTransaction>> {
        let mut at = self.at;
        for _ in 0..self.left {
            let is_commit = matches!(self.read(at)?, Some(block)
                if matches!(header(&block), Some((BlockType::Commit, _))));
            at = self.journal.super_.next(at);
            if is_commit {
                self.at = at;
                break;
            }
        }
        while self.left > 0 {
            self.step()?;
        }
        Ok(self.found)
    }

    /// Reads a log block; `None` if it is unreadable.
    fn read(&self, at: u32) -> Result<Option<SharedBytes>> {
        match LogSource::read(self.journal, at) {
            Ok(block) => Ok(Some(block)),
            Err(crate::Error::Corrupt { .. } | crate::Error::Io(_)) => Ok(None),
            Err(other) => Err(other),
        }
    }

    fn advance(&mut self) {
        self.at = self.journal.super_.next(self.at);
        self.left = self.left.saturating_sub(1);
    }

    fn step(&mut self) -> Result<()> {
        let (at, form) = (self.at, &self.journal.super_.format);
        let block = self.read(at)?;
        self.advance();
        let Some(block) = block else {
            self.open = None;
            return Ok(());
        };
        let has_sum = || form.verify_tail(&block) == ChecksumState::Valid;
        match header(&block) {
            Some((BlockType::Descriptor, sequence)) if has_sum() => {
                let mut open = self.open_for(sequence, at);
                open.sum = crc32_be(open.sum, &block);
                self.read_copies(open, &block)
            }
            Some((BlockType::Revoke, sequence)) if has_sum() => {
                self.open = Some(self.open_for(sequence, at));
                Ok(())
            }
            Some((BlockType::Commit, sequence)) => {
                let open = self.open.take().filter(|open| open.sequence == sequence);
                let commit = form
                    .parse_commit(&block)
                    .filter(|commit| commit.checksum_state == ChecksumState::Valid);
                let (Some(open), Some(commit)) = (open, commit) else { return Ok(()) };
                if commit.transaction_sum.is_some_and(|sum| sum != open.sum) {
                    return Ok(());
                }
                let time = Time {
                    seconds: i64::try_from(commit.time.as_secs()).unwrap_or(i64::MAX),
                    nanoseconds: commit.time.subsec_nanos(),
                };
                let OpenTransaction { sequence, start, copies, is_whole, .. } = open;
                let log = start..self.at;
                self.found.push(FoundTransaction { sequence, log, time, copies, is_whole });
                Ok(())
            }
            _ => {
                self.open = None;
                Ok(())
            }
        }
    }

    /// Returns the transaction in work, or a new one that begins at `at`.
    fn open_for(&mut self, sequence: u32, at: u32) -> OpenTransaction {
        self.open.take().filter(|open| open.sequence == sequence).unwrap_or(OpenTransaction {
            sequence,
            start: at,
            sum: !0,
            is_whole: true,
            copies: vec![],
        })
    }

    /// Passes the copies of a descriptor block. A copy never begins with the journal's magic number,
    /// so a block that does belongs to a newer transaction, which overwrote the copy.
    fn read_copies(&mut self, mut open: OpenTransaction, descriptor: &[u8]) -> Result<()> {
        let form = &self.journal.super_.format;
        for tag in form.parse_tags(descriptor) {
            if self.left == 0 {
                return Ok(());
            }
            let at = self.at;
            let Some(bytes) = self.read(at)? else {
                open.is_whole = false;
                self.advance();
                continue;
            };
            if header(&bytes).is_some() {
                return Ok(());
            }
            self.advance();
            let is_sound = match form.checksums {
                JournalChecksums::None => true,
                JournalChecksums::Commit => {
                    open.sum = crc32_be(open.sum, &bytes);
                    true
                }
                _ => form.tag_checksum(open.sequence, &bytes) == tag.sum,
            };
            match is_sound && self.journal.invalid_target_reason(tag.block).is_none() {
                true => open.copies.push((tag.block, at, tag.escaped)),
                false => open.is_whole = false,
            }
        }
        self.open = Some(open);
        Ok(())
    }
}
