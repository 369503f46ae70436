//! Scan of a log: the newest copy of each volume block.
//!
//! ```text
//!   scan     from the tail, while sequence numbers and checksums are valid:
//!            the newest copy of each block, and the locations of revoke blocks
//!   revoke   drops copies that are not newer than their revocation
//!   replay   is up to the caller, who reads the copies from the log
//! ```
//! Law 1: a transaction is valid if it is complete up to its commit block; the log ends at the
//! first that is not.
//! Law 2: the scan passes no log block twice, whatever the log contains, and only keeps facts about
//! blocks in the log.
//! Law 3: a copy with a wrong checksum of its own costs itself: the others of its transaction, and
//! later transactions, count. Where commit blocks may be durable first, it costs its transaction.
//! Law 4: a transaction that was never committed ends the log; a committed one that is not as
//! written is damage. With a flush before each commit block, a commit block proves that its
//! transaction was durable.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::blocks::data::SharedBytes;
use crate::format::jbd2::blocks::header;
use crate::format::jbd2::{
    BlockTag, BlockType, ChecksumState, CommitBlock, JournalChecksums, JournalIncompatible,
    JournalSuperblock, crc32_be,
};
use crate::{FsBlock, Result};

/// Contents of a log.
#[derive(Debug, PartialEq, Eq)]
pub struct ScannedLog {
    /// Log location of the newest copy, by volume block.
    pub(crate) copies: BTreeMap<u64, LoggedBlock>,
    /// Sequence number after the last transaction.
    pub next: u32,
    /// Number of transactions.
    pub(crate) transactions: u32,
    /// Damage of a committed transaction after the last valid one.
    pub(crate) damage: Option<JournalDamage>,
    /// The first copy that is left out, because its checksum is wrong.
    pub(crate) skipped: Option<JournalDamage>,
}

/// Damage of a copy that is left out.
pub const COPY_CHECKSUM: &str = "journal: checksum of a copy";

/// Damage of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct JournalDamage {
    /// Damaged structure.
    pub(crate) what: &'static str,
    /// Log block of the damage.
    pub(crate) at: u32,
}

/// Access to a log for recovery.
pub trait LogSource {
    /// Reads a log block.
    fn read(&self, at: u32) -> Result<SharedBytes>;
    /// Returns the reason why the log must not have a copy of this volume block, if any.
    fn invalid_target_reason(&self, block: u64) -> Option<&'static str>;
    /// Returns the mount time of the volume: its later commits are not older.
    fn mount_time(&self) -> Duration;
}

/// A copy of a block in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoggedBlock {
    /// Log block of the copy.
    pub(crate) at: u32,
    /// True if the first four bytes were zeroed (escaped).
    pub(crate) escaped: bool,
    /// Index of its transaction, counted from the tail.
    nth: u32,
}

impl LoggedBlock {
    /// Returns the location of a copy, for reading it outside of a scan.
    pub const fn new(at: u32, escaped: bool) -> Self {
        Self { at, escaped, nth: 0 }
    }
}

/// Scans the log of `journal`. Damage is part of the result.
///
/// # Errors
/// Errors of `source`.
pub(crate) fn scan_log(journal: &JournalSuperblock, source: &dyn LogSource) -> Result<ScannedLog> {
    let mut found = ScannedLog {
        copies: BTreeMap::new(),
        next: journal.sequence,
        transactions: 0,
        damage: None,
        skipped: None,
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
        suspected_damage: None,
        revokes: vec![],
    };
    let end = loop {
        match scan.step(&mut found)? {
            ScanStep::Continue => {}
            ScanStep::Stop => break None,
            ScanStep::Unexpected(stray) => break Some(stray),
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
        for block in journal.format.parse_revokes(&block).into_iter().flatten() {
            if found.copies.get(&block).is_some_and(|copy| copy.nth <= nth) {
                found.copies.remove(&block);
            }
        }
    }
    Ok(found)
}

/// The part of a transaction that was scanned so far.
#[derive(Debug)]
struct PendingTransaction {
    copies: Vec<(u64, u32, bool)>,
    revokes: Vec<u32>,
    damage: Option<JournalDamage>,
    skipped: Option<JournalDamage>,
    sum: u32,
}

impl Default for PendingTransaction {
    fn default() -> Self {
        Self { copies: vec![], revokes: vec![], damage: None, skipped: None, sum: !0 }
    }
}

enum ScanStep {
    Continue,
    /// The log ends, and no further search is needed.
    Stop,
    /// The log ends, unless a later commit block is found.
    Unexpected(UnexpectedBlock),
}

/// A block that does not belong to the expected transaction.
struct UnexpectedBlock {
    /// Damage, if that transaction or a later one was committed.
    damage: JournalDamage,
    /// Number of blocks to search for a commit block.
    within: u32,
}

/// Bytes after the end of a log that are searched for an unexpected commit block.
const LOOK_AHEAD_BYTES: u32 = 1 << 20;

struct LogScan<'a> {
    journal: &'a JournalSuperblock,
    source: &'a dyn LogSource,
    at: u32,
    /// Log blocks that are not scanned yet.
    left: u32,
    sequence: u32,
    pending: PendingTransaction,
    /// Commit time of the last valid transaction.
    last_commit_time: Duration,
    /// Damage of the previous transaction, which may never have been durable.
    suspected_damage: Option<JournalDamage>,
    /// Revoke blocks with the index of their transaction.
    revokes: Vec<(u32, u32)>,
}

impl LogScan<'_> {
    /// Scans one journal block, with the copies that its tags name.
    fn step(&mut self, found: &mut ScannedLog) -> Result<ScanStep> {
        let Some((at, block)) = self.next_block()? else { return Ok(ScanStep::Stop) };
        let form = &self.journal.format;
        match header(&block) {
            Some((BlockType::Descriptor, sequence)) if sequence == self.sequence => {
                if form.verify_tail(&block) != ChecksumState::Valid {
                    // The number of copies is unknown.
                    return Ok(self.checksum_failure("journal: checksum of a descriptor block", at));
                }
                if form.checksums == JournalChecksums::Commit {
                    self.pending.sum = crc32_be(self.pending.sum, &block);
                }
                for tag in form.parse_tags(&block) {
                    if !self.consume_copy(&tag, at)? {
                        return Ok(ScanStep::Stop);
                    }
                }
                Ok(ScanStep::Continue)
            }
            Some((BlockType::Revoke, sequence)) if sequence == self.sequence => {
                if form.verify_tail(&block) != ChecksumState::Valid {
                    return Ok(self.checksum_failure("journal: checksum of a revoke block", at));
                }
                if form.parse_revokes(&block).is_none() {
                    self.record_damage("journal: length of a revoke block", at);
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
                found.damage = Some(JournalDamage { what: "journal: header of a block", at });
                Ok(ScanStep::Stop)
            }
            _ => {
                let what = "journal: a transaction that was committed is not there";
                let within = LOOK_AHEAD_BYTES.checked_div(form.block_bytes).unwrap_or(0);
                Ok(ScanStep::Unexpected(UnexpectedBlock {
                    damage: JournalDamage { what, at },
                    within,
                }))
            }
        }
    }

    /// Returns the step for a block of the current transaction that fails its checksum.
    fn checksum_failure(&self, what: &'static str, at: u32) -> ScanStep {
        ScanStep::Unexpected(UnexpectedBlock {
            damage: JournalDamage { what, at },
            within: self.left,
        })
    }

    /// Records damage of the current transaction, unless there is an earlier one.
    fn record_damage(&mut self, what: &'static str, at: u32) {
        self.pending.damage = self.pending.damage.or(Some(JournalDamage { what, at }));
    }

    /// Reads and passes the next log block; `None` at the end.
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

    /// Scans the copy of one tag of the descriptor at `descriptor`; returns `false` if the log
    /// ends.
    fn consume_copy(&mut self, tag: &BlockTag, descriptor: u32) -> Result<bool> {
        let (at, form) = (self.at, &self.journal.format);
        if form.checksums == JournalChecksums::None {
            if !self.advance() {
                return Ok(false);
            }
        } else {
            let Some((_, bytes)) = self.next_block()? else { return Ok(false) };
            match form.checksums {
                JournalChecksums::Commit => self.pending.sum = crc32_be(self.pending.sum, &bytes),
                _ if form.tag_checksum(self.sequence, &bytes) != tag.sum => {
                    if self.journal.incompatible.contains(JournalIncompatible::ASYNC_COMMIT) {
                        self.record_damage(COPY_CHECKSUM, at);
                    } else {
                        let damage = JournalDamage { what: COPY_CHECKSUM, at };
                        self.pending.skipped = self.pending.skipped.or(Some(damage));
                        return Ok(true);
                    }
                }
                _ => {}
            }
        }
        if let Some(what) = self.source.invalid_target_reason(tag.block) {
            self.record_damage(what, descriptor);
        }
        self.pending.copies.push((tag.block, at, tag.escaped));
        Ok(true)
    }

    /// Finishes the current transaction, whose commit block is at `at`.
    fn finish_transaction(
        &mut self,
        commit: &CommitBlock,
        at: u32,
        found: &mut ScannedLog,
    ) -> ScanStep {
        let pending = std::mem::take(&mut self.pending);
        let is_sound = commit.checksum_state == ChecksumState::Valid;
        self.sequence = self.sequence.wrapping_add(1);
        // A block of an earlier cycle through the log.
        let is_stale = commit.time.as_secs() < self.last_commit_time.as_secs();
        if let Some(damage) = self.suspected_damage {
            // Only a durable transaction is followed by another commit block.
            found.damage = Some(damage).filter(|_| is_sound && !is_stale);
            return ScanStep::Stop;
        }
        let damage = match pending.damage {
            None if !is_sound => Some("journal: checksum of a commit block"),
            None if commit.transaction_sum.is_some_and(|sum| sum != pending.sum) => {
                Some("journal: checksum of a transaction")
            }
            None => None,
            Some(damage) => return self.end_at_damage(damage, is_stale, found),
        };
        if let Some(what) = damage {
            return self.end_at_damage(JournalDamage { what, at }, is_stale, found);
        }
        if pending.skipped.is_some() && is_stale {
            return ScanStep::Stop;
        }
        found.skipped = found.skipped.or(pending.skipped);
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

    /// Ends the scan at a committed transaction that is damaged.
    fn end_at_damage(
        &mut self,
        damage: JournalDamage,
        is_stale: bool,
        found: &mut ScannedLog,
    ) -> ScanStep {
        if is_stale {
            return ScanStep::Stop;
        }
        if self.journal.incompatible.contains(JournalIncompatible::ASYNC_COMMIT) {
            // A power cut may have left only the commit block.
            ::log::warn!("the last transaction of the journal is not whole: it does not count");
            self.suspected_damage = Some(damage);
            return ScanStep::Continue;
        }
        found.damage = Some(damage);
        ScanStep::Stop
    }

    /// Returns true if one of the next `within` blocks is a commit block of the current transaction
    /// or a later one.
    fn has_later_commit(&mut self, within: u32) -> Result<bool> {
        let form = &self.journal.format;
        let since = self.last_commit_time.max(self.source.mount_time()).as_secs();
        for distance in 0..within {
            let Some((_, block)) = self.next_block()? else { break };
            let Some((BlockType::Commit, sequence)) = header(&block) else { continue };
            let Some(commit) = form.parse_commit(&block) else { continue };
            // Each transaction has at least one block, so its number advances at most as far as its
            // position.
            let is_ahead = sequence.wrapping_sub(self.sequence) <= distance;
            let is_newer = commit.time.as_secs() >= since;
            if is_ahead && is_newer && commit.checksum_state == ChecksumState::Valid {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl ScannedLog {
    /// Returns the volume blocks in `range` that have copies.
    pub(crate) fn copies_in(
        &self,
        range: std::ops::Range<FsBlock>,
    ) -> impl Iterator<Item = (FsBlock, LoggedBlock)> + '_ {
        let all = self.copies.range(range.start.0..range.end.0.max(range.start.0));
        all.map(|(block, copy)| (FsBlock(*block), *copy))
    }
}

#[cfg(test)]
mod tests;
