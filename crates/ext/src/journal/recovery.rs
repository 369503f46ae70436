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

use std::collections::BTreeMap;
use std::time::Duration;

use crate::blocks::data::Data;
use crate::format::jbd2::blocks::header;
use crate::format::jbd2::{
    Commit, Incompatible, JournalSuperblock, Kind, Soundness, Sums, Tag, crc32_be,
};
use crate::{Error, FsBlock, Result};

/// What a log holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Recovery {
    /// By block of the volume: where in the log its bytes are.
    pub(crate) copies: BTreeMap<u64, Copy>,
    /// The number of the transaction after the last one.
    pub(crate) next: u32,
    /// How many transactions there are.
    pub(crate) transactions: u32,
    /// Whether fast commits follow the last transaction.
    pub(crate) has_fast_commits: bool,
}

/// A copy of a block in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Copy {
    /// The block of the log.
    pub(crate) at: u32,
    /// Whether the first four bytes were zeroed.
    pub(crate) escaped: bool,
    /// Which transaction it is of, counted from the tail.
    nth: u32,
}

/// Reads what is in the log of `journal`; `read` answers blocks of the log.
///
/// # Errors
/// [`Error::Corrupt`] where whole transactions follow one that is damaged, and for revokes that
/// make no sense; what `read` answers.
pub(crate) fn recover(
    journal: &JournalSuperblock,
    read: &dyn Fn(u32) -> Result<Data>,
) -> Result<Recovery> {
    let mut found = Recovery {
        copies: BTreeMap::new(),
        next: journal.sequence,
        transactions: 0,
        has_fast_commits: false,
    };
    let Some(start) = journal.start else { return Ok(found) };
    let mut scan = Scan {
        journal,
        read,
        at: start,
        left: journal.log_blocks(),
        sequence: journal.sequence,
        pending: Pending::default(),
        newest: Duration::ZERO,
        damaged: None,
        revokes: vec![],
    };
    while let Some(step) = scan.step(&mut found)? {
        match step {
            Step::On => {}
            Step::End => break,
        }
    }
    for (nth, at) in scan.revokes {
        let block = read(at)?;
        let Some(revoked) = journal.form.revokes(&block) else {
            return Err(Error::corrupt("journal: length of a revoke block"));
        };
        for block in revoked {
            if found.copies.get(&block).is_some_and(|copy| copy.nth <= nth) {
                found.copies.remove(&block);
            }
        }
    }
    let first = journal.end.saturating_add(1);
    if journal.incompatible.contains(Incompatible::FAST_COMMIT) && first < journal.len {
        found.has_fast_commits = journal.is_fast_commit(&read(first)?, found.next);
    }
    Ok(found)
}

/// What of a transaction was passed so far.
#[derive(Debug)]
struct Pending {
    copies: Vec<(u64, u32, bool)>,
    revokes: Vec<u32>,
    is_sound: bool,
    sum: u32,
}

impl Default for Pending {
    fn default() -> Self {
        Self { copies: vec![], revokes: vec![], is_sound: true, sum: !0 }
    }
}

enum Step {
    On,
    End,
}

struct Scan<'a> {
    journal: &'a JournalSuperblock,
    read: &'a dyn Fn(u32) -> Result<Data>,
    at: u32,
    /// Blocks of the log that were not passed.
    left: u32,
    sequence: u32,
    pending: Pending,
    /// When the last transaction that counts was committed.
    newest: Duration,
    /// When the first transaction was committed that is not as it was written.
    damaged: Option<Duration>,
    /// Transactions, and the revoke blocks of theirs.
    revokes: Vec<(u32, u32)>,
}

impl Scan<'_> {
    /// One block of the journal itself, with the copies it names; `None` where the log ends.
    fn step(&mut self, found: &mut Recovery) -> Result<Option<Step>> {
        let Some((at, block)) = self.pass()? else { return Ok(None) };
        let form = &self.journal.form;
        match header(&block) {
            Some((Kind::Descriptor, sequence)) if sequence == self.sequence => {
                self.pending.is_sound &= form.soundness(&block) == Soundness::Sound;
                if form.sums == Sums::Commit {
                    self.pending.sum = crc32_be(self.pending.sum, &block);
                }
                for tag in form.tags(&block) {
                    if !self.copy(&tag)? {
                        return Ok(None);
                    }
                }
                Ok(Some(Step::On))
            }
            Some((Kind::Revoke, sequence)) if sequence == self.sequence => {
                self.pending.is_sound &= form.soundness(&block) == Soundness::Sound;
                self.pending.revokes.push(at);
                Ok(Some(Step::On))
            }
            Some((Kind::Commit, sequence)) if sequence == self.sequence => {
                match form.commit(&block) {
                    Some(commit) => self.commit(&commit, found).map(Some),
                    None => Ok(None),
                }
            }
            _ => Ok(None),
        }
    }

    /// The next block of the log, which is passed by that; `None` if all of them were.
    fn pass(&mut self) -> Result<Option<(u32, Data)>> {
        let at = self.at;
        if !self.skip() {
            return Ok(None);
        }
        Ok(Some((at, (self.read)(at)?)))
    }

    fn skip(&mut self) -> bool {
        let Some(left) = self.left.checked_sub(1) else { return false };
        self.left = left;
        self.at = self.journal.next(self.at);
        true
    }

    /// The copy that a tag is of; `false` where the log ends.
    fn copy(&mut self, tag: &Tag) -> Result<bool> {
        let (at, form) = (self.at, &self.journal.form);
        if form.sums == Sums::None {
            if !self.skip() {
                return Ok(false);
            }
        } else {
            let Some((_, bytes)) = self.pass()? else { return Ok(false) };
            match form.sums {
                Sums::Commit => self.pending.sum = crc32_be(self.pending.sum, &bytes),
                _ => self.pending.is_sound &= form.copy_sum(self.sequence, &bytes) == tag.sum,
            }
        }
        self.pending.copies.push((tag.block, at, tag.escaped));
        Ok(true)
    }

    /// A transaction is passed.
    fn commit(&mut self, commit: &Commit, found: &mut Recovery) -> Result<Step> {
        let pending = std::mem::take(&mut self.pending);
        let is_sound = pending.is_sound
            && commit.soundness == Soundness::Sound
            && commit.transaction_sum.is_none_or(|sum| sum == pending.sum);
        self.sequence = self.sequence.wrapping_add(1);
        if let Some(damaged) = self.damaged {
            // With a flush between a transaction and its commit block, what is followed by
            // another one was written whole.
            let is_async = self.journal.incompatible.contains(Incompatible::ASYNC_COMMIT);
            if commit.soundness == Soundness::Sound && commit.time >= damaged && !is_async {
                return Err(Error::corrupt("journal: checksum inside the log"));
            }
            return Ok(Step::End);
        }
        if !is_sound {
            if commit.time < self.newest {
                // Left over from an earlier turn through the log.
                return Ok(Step::End);
            }
            ::log::warn!("the last transaction of the journal is not whole: it does not count");
            self.damaged = Some(self.newest);
            return Ok(Step::On);
        }
        let nth = found.transactions;
        found.transactions = found.transactions.saturating_add(1);
        found.next = self.sequence;
        self.newest = commit.time;
        for (block, at, escaped) in pending.copies {
            found.copies.insert(block, Copy { at, escaped, nth });
        }
        self.revokes.extend(pending.revokes.into_iter().map(|at| (nth, at)));
        Ok(Step::On)
    }
}

impl Recovery {
    /// The blocks of the volume in `range`, and their copies.
    pub(crate) fn between(
        &self,
        range: std::ops::Range<FsBlock>,
    ) -> impl Iterator<Item = (FsBlock, Copy)> + '_ {
        let all = self.copies.range(range.start.0..range.end.0.max(range.start.0));
        all.map(|(block, copy)| (FsBlock(*block), *copy))
    }
}

#[cfg(test)]
mod tests;
