//! A log before places: batches as transactions of the journal (JBD2).
//!
//! ```text
//!   batch ──▶ contents in place + descriptors, copies, revokes ▶ commit block    what a sync waits for
//!   later     blocks in place, each once, as they were last   ▶ tail of the log  a checkpoint
//!
//!   log:   | .. free .. | tail: T5 | T6 | T7 | head: .. free .. |
//! ```
//! Law 1: contents are durable before the commit block of the transaction that leads to them is
//! written, and a block goes to its place once that of its transaction is durable.
//! Law 2: what is committed and not in its place is read from memory: the overlay keeps it,
//! frozen, whatever changes it meanwhile.
//! Law 3: the tail moves once everything before it is in place, durably; the next transaction
//! follows that: no log that is replayed has copies of what it does not know to be freed.
//! Law 4: a block that is freed while the log has a copy of it is revoked in the transaction that
//! frees it. As nothing freed is given out before that is durable, no copy is put over what the
//! block is used for next.
//! Law 5: but for the first one and one behind a checkpoint, a transaction follows nothing: its
//! copies go to the log while the commit block before is on its way, with one flush for both.
//! Law 6: the superblock says that the volume needs recovery from before the first transaction
//! until all of it is in place and the log is empty.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with blocks of a log that was checked, of fewer than 2^32 blocks"
)]

use std::time::Duration;

use super::batch::{Batch, Operation};
use super::outbox::{After, Freed, Sealed};
use super::protocol::{Chain, Protocol, Stage};
use crate::blocks::data::Data;
use crate::blocks::overlay::Logged;
use crate::format::jbd2::{Form, RawJournalSuperblock};
use crate::journal::Log;
use crate::journal::lay::{Contents, lay, room_for};
use crate::transaction::Transaction;
use crate::units::index;
use crate::{Error, Result};

/// Bytes that one chain puts in place.
const PLACED_BYTES: usize = 4 << 20;
/// Committed blocks that are kept in memory until they are put in place, in bytes.
const LOGGED_BYTES: usize = 16 << 20;

/// What made writing stop, as Linux records it: a disk that failed, and damage.
const EIO: i32 = -5;
const EUCLEAN: i32 = -117;

/// What the journal says once everything that is committed is in its place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterCheckpoint {
    /// The next transaction is where the tail is now.
    LogContinues,
    /// There is nothing to recover.
    LogEmpty,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Journal {
    log: Log,
    /// The first block of the journal, as it was written last.
    first: Data,
    /// The number of the next transaction.
    sequence: u32,
    /// Where in the log the next transaction begins.
    head: u32,
    /// Where the oldest transaction begins that is not in place, and its number.
    tail: (u32, u32),
    /// Whether the journal's superblock says that there is a log.
    is_open: bool,
    /// Whether it says that there may be revokes.
    has_revokes: bool,
    /// Blocks from the tail to the head.
    used: u32,
    /// The next transaction waits for a checkpoint: it may be written where the tail was, and
    /// what it frees is in no copy of the log from then on.
    follows_checkpoint: bool,
    /// When the last transaction was committed: times in a log do not go back.
    time: Duration,
    /// The next batch is the last: everything is put in place, and the log is empty.
    is_closing: bool,
}

impl Journal {
    /// The protocol of a volume whose journal holds nothing that counts.
    pub(crate) fn new(log: Log) -> Self {
        let sequence = match log.super_.start {
            None => log.super_.sequence,
            // Left over: the volume says that all of it is in place.
            Some(_) => match log.recover() {
                Ok(found) if found.damage.is_none() => found.next.wrapping_add(1),
                _ => log.super_.sequence.wrapping_add(log.super_.len),
            },
        };
        let first = log.super_.first;
        Self {
            first: log.first.clone(),
            sequence,
            head: first,
            tail: (first, sequence),
            is_open: false,
            has_revokes: log.super_.may_revoke(),
            used: 0,
            follows_checkpoint: false,
            time: Duration::ZERO,
            is_closing: false,
            log,
        }
    }

    fn form(&self) -> &Form {
        &self.log.super_.form
    }

    fn len(&self) -> u32 {
        self.log.super_.log_blocks()
    }

    /// Whether a batch should end: it fills a quarter of the log.
    fn is_full(&self, batch: &Batch) -> bool {
        let freed: u64 = batch.freed.iter().map(|(_, count)| u64::from(*count)).sum();
        let revokes = index(freed.min(self.used.into()));
        room_for(self.form(), batch.blocks.len() + batch.usage.len(), revokes) >= self.len() / 4
    }

    fn place(&self, at: u32) -> Result<u64> {
        let place =
            self.log.place(at).ok_or(Error::corrupt("journal: a block of it is nowhere"))?;
        Ok(place.0)
    }

    /// The first block of the journal, with the tail as it is now; with `start`, where the log
    /// begins.
    fn superblock(&mut self, start: Option<u32>) -> Result<(u64, Data)> {
        let raw = RawJournalSuperblock::view_mut(self.first.make_mut())?;
        if self.has_revokes {
            raw.need_revokes();
        }
        raw.set_tail(start, self.tail.1);
        self.is_open = start.is_some();
        Ok((self.place(0)?, self.first.clone()))
    }

    /// The stages of a transaction: what goes to the log, beside `contents`, and the commit block.
    fn transaction(
        &mut self,
        tx: &mut Transaction<'_>,
        contents: Stage,
        blocks: Stage,
        revoked: &[u64],
    ) -> Result<Chain> {
        let room = room_for(self.form(), blocks.len(), revoked.len());
        if room > self.len() - self.used {
            self.put_in_place(tx, AfterCheckpoint::LogContinues)?;
        }
        if room > self.len() {
            let have = self.len();
            let feature = format!("a change needs {room} blocks of the journal, which has {have}");
            return Err(Error::Unsupported { feature });
        }
        let after = match std::mem::take(&mut self.follows_checkpoint) {
            true => After::Everything,
            false if !self.is_open => After::Needed,
            // Until it is committed, what is written of it counts for nothing.
            false => After::Nothing,
        };

        let mut stage = contents;
        let first_revoke = !revoked.is_empty() && !self.has_revokes;
        self.has_revokes |= first_revoke;
        if !self.is_open || first_revoke {
            let start = self.tail.0;
            stage.extend([self.superblock(Some(start))?]);
        }
        let now = Duration::new(u64::try_from(tx.now.seconds).unwrap_or(0), tx.now.nanoseconds);
        self.time = self.time.max(now);
        let (sequence, time, copies) = (self.sequence, self.time, &blocks);
        let laid = lay(&self.log, self.head, &Contents { sequence, time, copies, revoked })?;
        stage.extend(laid.first);
        self.head = laid.head;
        self.used += laid.blocks;
        self.sequence = self.sequence.wrapping_add(1);

        let mut overlay = tx.volume.store.overlay.change();
        for block in revoked {
            overlay.logged.remove(block);
        }
        for (block, now) in blocks {
            overlay.logged.insert(block, Logged { now, checkpoint: None });
        }
        Ok(Chain { stages: vec![stage, laid.commit], needed: 1, after })
    }

    /// Seals a checkpoint: everything that is committed goes to its place, then the tail moves.
    fn put_in_place(&mut self, tx: &mut Transaction<'_>, then: AfterCheckpoint) -> Result<()> {
        let most = PLACED_BYTES / index(self.form().block_bytes.into()).max(1);
        let mut all: Vec<(u64, Data)> = {
            let overlay = tx.volume.store.overlay.read();
            let waiting = overlay.logged.iter().filter(|(_, it)| it.checkpoint.is_none());
            waiting.map(|(block, it)| (*block, it.now.clone())).collect()
        };
        while !all.is_empty() {
            let rest = all.split_off(all.len().min(most.max(1)));
            let stage: Stage = std::mem::replace(&mut all, rest).into_iter().collect();
            let placed: Vec<u64> = stage.keys().copied().collect();
            let sealed = tx.seal(Sealed {
                after: After::Needed,
                stages: vec![stage],
                needed: None,
                contents: vec![],
                freed: Freed::default(),
                placed: placed.clone(),
            })?;
            let mut overlay = tx.volume.store.overlay.change();
            for block in placed {
                if let Some(it) = overlay.logged.get_mut(&block) {
                    it.checkpoint = Some(sealed);
                }
            }
        }
        self.tail = (self.head, self.sequence);
        let start = Some(self.head).filter(|_| then == AfterCheckpoint::LogContinues);
        let first = self.superblock(start)?;
        tx.seal(Sealed {
            after: After::Everything,
            stages: vec![Stage::from([first])],
            needed: None,
            contents: vec![],
            freed: Freed::default(),
            placed: vec![],
        })?;
        self.follows_checkpoint = true;
        self.used = 0;
        Ok(())
    }

    /// The last chain: the superblock in its place, once everything else is and the log is empty.
    fn last(
        &mut self,
        tx: &mut Transaction<'_>,
        contents: Stage,
        mut blocks: Stage,
        revoked: &[u64],
    ) -> Result<Chain> {
        let (place, _) = tx.volume.super_.place();
        let last = blocks.remove(&place.0);
        if !(contents.is_empty() && blocks.is_empty() && revoked.is_empty()) {
            let chain = self.transaction(tx, contents, blocks, revoked)?;
            tx.seal_own(Sealed {
                after: chain.after,
                stages: chain.stages,
                needed: Some(chain.needed),
                contents: vec![],
                freed: Freed::default(),
                placed: vec![],
            })?;
        }
        self.put_in_place(tx, AfterCheckpoint::LogEmpty)?;
        self.is_closing = false;
        let stage: Stage = last.into_iter().map(|bytes| (place.0, bytes)).collect();
        Ok(Chain { stages: vec![stage], needed: 0, after: After::Everything })
    }
}

impl Protocol for Journal {
    fn admits(&self, batch: &Batch, _: &Operation) -> bool {
        !self.is_full(batch)
    }

    fn is_complete(&self, batch: &Batch) -> bool {
        self.is_full(batch)
    }

    fn most_lost(&self, groups: u32) -> Option<u32> {
        // Each block of a file may be of another group: its bitmap and its descriptor change.
        let needed = u64::from(groups) * 2 + 16;
        (needed > u64::from(self.len() / 4)).then_some((self.len() / 16).max(1))
    }

    fn recovers(&self) -> bool {
        true
    }

    fn chain(&mut self, tx: &mut Transaction<'_>) -> Result<Chain> {
        tx.write_counts()?;
        let contents = tx.dirty_contents();
        let (mut blocks, mut revoked) = (Stage::new(), Vec::new());
        {
            let overlay = tx.volume.store.overlay.read();
            for block in &tx.writer.batch.blocks {
                let buffer = overlay.metadata.get(block).filter(|buffer| buffer.is_dirty());
                blocks.extend(buffer.map(|buffer| (*block, buffer.now.clone())));
            }
            for (start, count) in &tx.writer.batch.freed {
                let freed = overlay.logged.range(*start..start + u64::from(*count));
                let in_log = freed.filter(|(_, it)| it.checkpoint.is_none());
                revoked.extend(in_log.map(|(block, _)| *block));
            }
        }
        tx.put_sums(std::slice::from_mut(&mut blocks));
        if self.is_closing {
            return self.last(tx, contents, blocks, &revoked);
        }
        if blocks.is_empty() && revoked.is_empty() {
            let stages = if contents.is_empty() { vec![] } else { vec![contents] };
            return Ok(Chain { stages, needed: 0, after: After::Needed });
        }
        self.transaction(tx, contents, blocks, &revoked)
    }

    fn checkpoint(&mut self, tx: &mut Transaction<'_>) -> Result<()> {
        let block_bytes = index(self.form().block_bytes.into());
        let logged = tx.volume.store.overlay.read().logged.len();
        if self.used > self.len() / 2 || (self.used > 0 && logged * block_bytes > LOGGED_BYTES) {
            self.put_in_place(tx, AfterCheckpoint::LogContinues)?;
        }
        Ok(())
    }

    fn rest(&mut self, tx: &mut Transaction<'_>) -> Result<()> {
        if self.used > 0 { self.put_in_place(tx, AfterCheckpoint::LogEmpty) } else { Ok(()) }
    }

    fn close(&mut self) {
        self.is_closing = true;
    }

    fn failed(&mut self, error: &Error) -> Option<(u64, Data)> {
        let raw = RawJournalSuperblock::view_mut(self.first.make_mut()).ok()?;
        raw.set_errno(match error {
            Error::Corrupt { .. } => EUCLEAN,
            _ => EIO,
        });
        let start = self.is_open.then_some(self.tail.0);
        self.superblock(start).ok()
    }
}
