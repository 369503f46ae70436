//! What is in a log: which blocks of the volume have which bytes.
//!
//! ```text
//!   scan     from the tail, transaction by transaction, as far as numbers and sums are right:
//!            the newest copy of each block, and where the revoke blocks are
//!   revoke   forgets copies that are not newer than their revocation
//!   replay   is for those who ask: copies are read where they lie
//! ```
//! Law 1: a transaction counts if all of it is there, up to its commit block; behind the first
//! that is not there is nothing.
//! Law 2: no block of the log is passed twice by the scan, whatever the log says, and nothing is
//! remembered but blocks that are in it.
//! Law 3: a transaction that was never committed ends the log; one that was committed and is not
//! as it was written is damage. With a flush before each commit block, a commit block means that
//! its transaction was durable.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::blocks::data::SharedBytes;
use crate::format::jbd2::blocks::header;
use crate::format::jbd2::{
    BlockType, ChecksumState, CommitBlock, JournalChecksums, JournalIncompatible,
    JournalSuperblock, Tag, crc32_be,
};
use crate::{FsBlock, Result};

/// What a log holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ScannedLog {
    /// By block of the volume: where in the log its bytes are.
    pub(crate) copies: BTreeMap<u64, LoggedBlock>,
    /// The number of the transaction after the last one.
    pub(crate) next: u32,
    /// How many transactions there are.
    pub(crate) transactions: u32,
    /// Why what was committed behind the last transaction that counts cannot be read.
    pub(crate) damage: Option<Damage>,
}

/// Damage of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Damage {
    /// What is damaged.
    pub(crate) what: &'static str,
    /// The block of the log.
    pub(crate) at: u32,
}

/// What recovery asks about a log.
pub(crate) trait Source {
    /// Reads a block of the log.
    fn read(&self, at: u32) -> Result<SharedBytes>;
    /// Names what is wrong with a copy of this block of the volume.
    fn refusal(&self, block: u64) -> Option<&'static str>;
    /// Returns when the volume was taken into use: what it committed since is not older.
    fn in_use_since(&self) -> Duration;
}

/// A copy of a block in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LoggedBlock {
    /// The block of the log.
    pub(crate) at: u32,
    /// Whether the first four bytes were zeroed.
    pub(crate) escaped: bool,
    /// Which transaction it is of, counted from the tail.
    nth: u32,
}

/// What is in the log of `journal`. Damage is part of the answer.
///
/// # Errors
/// What `source` answers.
pub(crate) fn scan_log(journal: &JournalSuperblock, source: &dyn Source) -> Result<ScannedLog> {
    let mut found = ScannedLog {
        copies: BTreeMap::new(),
        next: journal.sequence,
        transactions: 0,
        damage: None,
    };
    let Some(start) = journal.start else { return Ok(found) };
    let mut scan = LogScan {
        journal,
        source,
        at: start,
        left: journal.log_blocks(),
        sequence: journal.sequence,
        pending: PendingTransaction::default(),
        last_commit_time: Duration::ZERO,
        doubted: None,
        revokes: vec![],
    };
    let end = loop {
        match scan.step(&mut found)? {
            ScanStep::Continue => {}
            ScanStep::Stop => break None,
            ScanStep::Stray(stray) => break Some(stray),
        }
    };
    if let Some(stray) = end
        && found.damage.is_none()
        && scan.has_later_commit(stray.within)?
    {
        found.damage = Some(stray.damage);
    }
    for (nth, at) in scan.revokes {
        let block = source.read(at)?;
        for block in journal.form.revokes(&block).into_iter().flatten() {
            if found.copies.get(&block).is_some_and(|copy| copy.nth <= nth) {
                found.copies.remove(&block);
            }
        }
    }
    Ok(found)
}

/// What of a transaction was passed so far.
#[derive(Debug)]
struct PendingTransaction {
    copies: Vec<(u64, u32, bool)>,
    revokes: Vec<u32>,
    damage: Option<Damage>,
    sum: u32,
}

impl Default for PendingTransaction {
    fn default() -> Self {
        Self { copies: vec![], revokes: vec![], damage: None, sum: !0 }
    }
}

enum ScanStep {
    Continue,
    /// The log ends, and what is behind it is known.
    Stop,
    /// The log ends, unless a commit block is behind.
    Stray(Stray),
}

/// A block that is not of the transaction that should be there.
struct Stray {
    /// What is damaged if that transaction, or a later one, was committed.
    damage: Damage,
    /// Blocks in which to look for its commit block.
    within: u32,
}

/// Bytes behind the end of a log in which a commit block is looked for that should not be there.
const LOOK_AHEAD_BYTES: u32 = 1 << 20;

struct LogScan<'a> {
    journal: &'a JournalSuperblock,
    source: &'a dyn Source,
    at: u32,
    /// Blocks of the log that were not passed.
    left: u32,
    sequence: u32,
    pending: PendingTransaction,
    /// When the last transaction that counts was committed.
    last_commit_time: Duration,
    /// What is wrong with the transaction before, which may never have been durable.
    doubted: Option<Damage>,
    /// Transactions, and the revoke blocks of theirs.
    revokes: Vec<(u32, u32)>,
}

impl LogScan<'_> {
    /// Passes one block of the journal itself, with the copies that it names.
    fn step(&mut self, found: &mut ScannedLog) -> Result<ScanStep> {
        let Some((at, block)) = self.next_block()? else { return Ok(ScanStep::Stop) };
        let form = &self.journal.form;
        match header(&block) {
            Some((BlockType::Descriptor, sequence)) if sequence == self.sequence => {
                if form.verify_tail(&block) != ChecksumState::Valid {
                    // How many copies follow is not known.
                    return Ok(self.unsound("journal: checksum of a descriptor block", at));
                }
                if form.sums == JournalChecksums::Commit {
                    self.pending.sum = crc32_be(self.pending.sum, &block);
                }
                for tag in form.tags(&block) {
                    if !self.consume_copy(&tag, at)? {
                        return Ok(ScanStep::Stop);
                    }
                }
                Ok(ScanStep::Continue)
            }
            Some((BlockType::Revoke, sequence)) if sequence == self.sequence => {
                if form.verify_tail(&block) != ChecksumState::Valid {
                    return Ok(self.unsound("journal: checksum of a revoke block", at));
                }
                if form.revokes(&block).is_none() {
                    self.first_bad_commit_time("journal: length of a revoke block", at);
                }
                self.pending.revokes.push(at);
                Ok(ScanStep::Continue)
            }
            Some((BlockType::Commit, sequence)) if sequence == self.sequence => {
                match form.parse_commit(&block) {
                    Some(commit) => Ok(self.finish_transaction(&commit, at, found)),
                    None => Ok(ScanStep::Stop),
                }
            }
            _ if form.is_damaged_header(&block, self.sequence) => {
                found.damage = Some(Damage { what: "journal: header of a block", at });
                Ok(ScanStep::Stop)
            }
            _ => {
                let what = "journal: a transaction that was committed is not there";
                let within = LOOK_AHEAD_BYTES.checked_div(form.block_bytes).unwrap_or(0);
                Ok(ScanStep::Stray(Stray { damage: Damage { what, at }, within }))
            }
        }
    }

    /// A block with the number of the transaction in hand fails its checksum.
    fn unsound(&self, what: &'static str, at: u32) -> ScanStep {
        ScanStep::Stray(Stray { damage: Damage { what, at }, within: self.left })
    }

    /// Notes what is wrong with the transaction in hand, if nothing is noted yet.
    fn first_bad_commit_time(&mut self, what: &'static str, at: u32) {
        self.pending.damage = self.pending.damage.or(Some(Damage { what, at }));
    }

    /// The next block of the log, which is passed by that; `None` if all of them were.
    fn next_block(&mut self) -> Result<Option<(u32, SharedBytes)>> {
        let at = self.at;
        if !self.advance() {
            return Ok(None);
        }
        Ok(Some((at, self.source.read(at)?)))
    }

    fn advance(&mut self) -> bool {
        let Some(left) = self.left.checked_sub(1) else { return false };
        self.left = left;
        self.at = self.journal.next(self.at);
        true
    }

    /// Passes the copy of a tag of the descriptor at `descriptor`; `false` where the log ends.
    fn consume_copy(&mut self, tag: &Tag, descriptor: u32) -> Result<bool> {
        let (at, form) = (self.at, &self.journal.form);
        if form.sums == JournalChecksums::None {
            if !self.advance() {
                return Ok(false);
            }
        } else {
            let Some((_, bytes)) = self.next_block()? else { return Ok(false) };
            match form.sums {
                JournalChecksums::Commit => self.pending.sum = crc32_be(self.pending.sum, &bytes),
                _ if form.tag_checksum(self.sequence, &bytes) != tag.sum => {
                    self.first_bad_commit_time("journal: checksum of a copy", at);
                }
                _ => {}
            }
        }
        if let Some(what) = self.source.refusal(tag.block) {
            self.first_bad_commit_time(what, descriptor);
        }
        self.pending.copies.push((tag.block, at, tag.escaped));
        Ok(true)
    }

    /// A transaction is passed, with its commit block at `at`.
    fn finish_transaction(
        &mut self,
        commit: &CommitBlock,
        at: u32,
        found: &mut ScannedLog,
    ) -> ScanStep {
        let pending = std::mem::take(&mut self.pending);
        let is_sound = commit.soundness == ChecksumState::Valid;
        self.sequence = self.sequence.wrapping_add(1);
        // Left over from an earlier turn through the log.
        let is_stale = commit.time.as_secs() < self.last_commit_time.as_secs();
        if let Some(damage) = self.doubted {
            // Only what is durable is followed by another commit block.
            found.damage = Some(damage).filter(|_| is_sound && !is_stale);
            return ScanStep::Stop;
        }
        let damage = match pending.damage {
            None if !is_sound => Some("journal: checksum of a commit block"),
            None if commit.transaction_sum.is_some_and(|sum| sum != pending.sum) => {
                Some("journal: checksum of a transaction")
            }
            None => None,
            Some(damage) => return self.end(damage, is_stale, found),
        };
        if let Some(what) = damage {
            return self.end(Damage { what, at }, is_stale, found);
        }
        let nth = found.transactions;
        found.transactions = found.transactions.saturating_add(1);
        found.next = self.sequence;
        self.last_commit_time = commit.time;
        for (block, at, escaped) in pending.copies {
            found.copies.insert(block, LoggedBlock { at, escaped, nth });
        }
        self.revokes.extend(pending.revokes.into_iter().map(|at| (nth, at)));
        ScanStep::Continue
    }

    /// A transaction has a commit block, and is not as it was written.
    fn end(&mut self, damage: Damage, is_stale: bool, found: &mut ScannedLog) -> ScanStep {
        if is_stale {
            return ScanStep::Stop;
        }
        if self.journal.incompatible.contains(JournalIncompatible::ASYNC_COMMIT) {
            // A power cut may have left the commit block alone.
            ::log::warn!("the last transaction of the journal is not whole: it does not count");
            self.doubted = Some(damage);
            return ScanStep::Continue;
        }
        found.damage = Some(damage);
        ScanStep::Stop
    }

    /// Whether one of the next blocks is a commit block that says that the transaction in hand, or
    /// one behind it, was committed.
    fn has_later_commit(&mut self, within: u32) -> Result<bool> {
        let form = &self.journal.form;
        let since = self.last_commit_time.max(self.source.in_use_since()).as_secs();
        for distance in 0..within {
            let Some((_, block)) = self.next_block()? else { break };
            let Some((BlockType::Commit, sequence)) = header(&block) else { continue };
            let Some(commit) = form.parse_commit(&block) else { continue };
            // Each transaction has a block at least, so its number is not farther than its place.
            let is_ahead = sequence.wrapping_sub(self.sequence) <= distance;
            let is_newer = commit.time.as_secs() >= since;
            if is_ahead && is_newer && commit.soundness == ChecksumState::Valid {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl ScannedLog {
    /// The blocks of the volume in `range`, and their copies.
    pub(crate) fn between(
        &self,
        range: std::ops::Range<FsBlock>,
    ) -> impl Iterator<Item = (FsBlock, LoggedBlock)> + '_ {
        let all = self.copies.range(range.start.0..range.end.0.max(range.start.0));
        all.map(|(block, copy)| (FsBlock(*block), *copy))
    }
}

#[cfg(test)]
mod tests;
