//! Chains on their way: sealed under the gate, sent by the next thread without it.
//!
//! ```text
//!   transaction ── seal ──▶ queue ── send ──▶ disk ── settled ──▶ readers of the disk see it
//!        gate held              no gate held            └─ durable ──▶ what was freed is free
//! ```
//! Law 1: what is sealed is sent in that order, each chain after the one before it.
//! Law 2: nothing here takes the gate, and the gate's holder only seals: messages, settling
//! and waiting are outside of it.
//! Law 3: once the disk refused a chain nothing is sent any more.
//! Law 4: contents that no chain in the queue leads to may be sent later, by another thread.
//! Law 5: a sync that is alone sends and waits in one message. Others that send meanwhile wait
//! with it, as they would for the device.
//! Law 6: who waits for what another waits for already asks the disk nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use draconis_device::{ChainBounds, Disk, Extent, Group, SubmitOptions, Ticket, Write};
use draconis_exchange::heap::{Block, SharedSlice};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::protocol::Stage;
use crate::blocks::data::SharedBytes;
use crate::units::saturating_usize;
use crate::{Error, Result};

/// The largest write, in bytes.
const WRITE_BYTES: usize = 1 << 20;

/// Room that is asked for beside what is needed, in bytes.
const EXTRA_RESERVE_BYTES: u64 = 4 << 20;

/// What a chain follows; each is more than the one before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum ChainDependency {
    /// Nothing: contents that nothing leads to yet, or that are overwritten.
    NoDependency,
    /// What syncs wait for so far, if it is not durable yet.
    #[default]
    PendingSync,
    /// All that was sent.
    AllEarlier,
}

/// A chain that is sealed.
#[derive(Debug)]
pub(crate) struct QueuedChain {
    pub(crate) after: ChainDependency,
    pub(crate) stages: Vec<Stage>,
    /// The stage that a sync waits for; none of contents that are written ahead.
    pub(crate) sync_stage: Option<usize>,
    /// Blocks of contents that it carries.
    pub(crate) contents: Vec<u64>,
    /// What it frees.
    pub(crate) freed: FreedSpace,
    /// Blocks that were committed to a log and that it puts in place.
    pub(crate) checkpointed: Vec<u64>,
}

/// What a chain frees, to be given out again once that is durable.
#[derive(Debug, Default)]
pub(crate) struct FreedSpace {
    /// First block, and count.
    pub(crate) blocks: Vec<(u64, u32)>,
    pub(crate) inodes: Vec<u32>,
}

impl FreedSpace {
    fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.inodes.is_empty()
    }
}

/// A chain that was sent and is not known to be seen by readers of the disk yet.
#[derive(Debug)]
pub(crate) struct InFlightChain {
    pub(crate) sealed: u64,
    last: Ticket,
    pub(crate) contents: Vec<u64>,
    pub(crate) placed: Vec<u64>,
    bytes: u64,
}

/// See the head of the file.
pub(crate) struct CommitQueue {
    disk: Arc<dyn Disk>,
    block_bytes: usize,
    /// What was sent is waited for in another call: the disk may be away.
    pub(crate) waits_apart: bool,
    queue: Mutex<Queue>,
    /// Whether the queue holds anything.
    waiting: AtomicBool,
    /// Whether it holds more than contents that go ahead.
    is_due: AtomicBool,
    /// Bytes that were sealed and that readers of the disk may not see yet.
    in_flight_bytes: AtomicU64,
    /// Bytes that were sealed and not sent.
    unsent_bytes: AtomicU64,
    /// Bytes that the disk keeps room for; changed by who has `sent`.
    reserved_bytes: AtomicU64,
    sent: Mutex<SentState>,
    /// What the disk was asked to make durable, and has not answered for.
    active_waits: Mutex<Vec<Ticket>>,
    wait_finished: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Chains sealed so far.
    last_number: u64,
    /// With their places, and the number of the last change that each brings.
    chains: VecDeque<(u64, u64, QueuedChain)>,
}

#[derive(Default)]
struct SentState {
    /// What a sync waits for.
    sync_ticket: Option<Ticket>,
    last: Option<Ticket>,
    /// Everything up to here is durable.
    durable: Option<Ticket>,
    in_flight: VecDeque<InFlightChain>,
    pending_frees: VecDeque<(Ticket, FreedSpace)>,
    failed: Option<Error>,
}

impl SentState {
    /// What a sync waits for, if it is not durable yet.
    fn sync_ticket(&self) -> Option<Ticket> {
        self.sync_ticket.filter(|ticket| self.durable < Some(*ticket))
    }
}

impl CommitQueue {
    pub(crate) fn new(disk: Arc<dyn Disk>, block_bytes: u32) -> Self {
        // Most disks have room for all that they are long.
        let kept_bytes = AtomicU64::new(disk.reserve(0).unwrap_or(0));
        Self {
            waits_apart: disk.can_be_unreachable(),
            disk,
            reserved_bytes: kept_bytes,
            unsent_bytes: AtomicU64::new(0),
            block_bytes: saturating_usize(block_bytes.into()),
            queue: Mutex::default(),
            waiting: AtomicBool::new(false),
            is_due: AtomicBool::new(false),
            in_flight_bytes: AtomicU64::new(0),
            sent: Mutex::default(),
            active_waits: Mutex::default(),
            wait_finished: Condvar::new(),
        }
    }

    /// Puts a chain behind the others; its place among all that were sealed, from 1 on.
    pub(crate) fn enqueue(&self, chain: QueuedChain) -> u64 {
        self.enqueue_changes(chain, 0)
    }

    /// [`Outbox::seal`] of all changes up to `number`.
    pub(crate) fn enqueue_changes(&self, chain: QueuedChain, number: u64) -> u64 {
        let bytes = self.bytes_of(&chain);
        self.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.unsent_bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut queue = self.queue.lock();
        queue.last_number = queue.last_number.saturating_add(1);
        let sealed = queue.last_number;
        let ahead = chain.sync_stage.is_none() && chain.after != ChainDependency::AllEarlier;
        if !ahead {
            self.is_due.store(true, Ordering::Relaxed);
        }
        queue.chains.push_back((sealed, number, chain));
        self.waiting.store(true, Ordering::Release);
        sealed
    }

    /// Sees that the disk has room for so many bytes beside those that are sealed.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; what made the disk fail.
    pub(crate) fn ensure_space(&self, bytes: u64) -> Result<()> {
        let needed = || bytes.saturating_add(self.unsent_bytes.load(Ordering::Relaxed));
        if self.reserved_bytes.load(Ordering::Relaxed) >= needed() {
            return Ok(());
        }
        let _sent = self.sent()?;
        let needed = needed();
        // More than that, so that not each change asks.
        let asked = self.disk.reserve(needed.saturating_add(EXTRA_RESERVE_BYTES));
        let kept = asked.or_else(|_| self.disk.reserve(needed)).map_err(|error| {
            match error.is_no_space() {
                true => Error::NoSpace,
                false => Error::Io(error),
            }
        })?;
        self.reserved_bytes.store(kept, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the disk takes room as it is written.
    pub(crate) fn is_thin(&self) -> bool {
        self.reserved_bytes.load(Ordering::Relaxed) != u64::MAX
    }

    fn bytes_of(&self, chain: &QueuedChain) -> u64 {
        let blocks: usize = chain.stages.iter().map(Stage::len).sum();
        blocks.saturating_mul(self.block_bytes) as u64
    }

    /// Bytes that were sealed and that readers of the disk may not see yet.
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes.load(Ordering::Relaxed)
    }

    /// Whether contents wait to be sent, and nothing else: fewer than `most` bytes of them.
    pub(crate) fn has_only_early_contents(&self, most: u64) -> bool {
        self.waiting.load(Ordering::Acquire)
            && !self.is_due.load(Ordering::Relaxed)
            && self.unsent_bytes.load(Ordering::Relaxed) < most
    }

    /// Hands what is sealed to the disk; the number of the last change that it has taken now.
    /// With `and_wait` what syncs wait for is durable then, if the last chain brings it:
    /// [`Outbox::needed`] says.
    ///
    /// # Errors
    /// What made the disk refuse, now or before.
    pub(crate) fn send(&self, and_wait: bool) -> Result<u64> {
        let mut taken = 0;
        if !self.waiting.load(Ordering::Acquire) {
            return Ok(taken);
        }
        let mut sent = self.sent()?;
        loop {
            let next = {
                let mut queue = self.queue.lock();
                let next = queue.chains.pop_front();
                self.waiting.store(next.is_some(), Ordering::Release);
                if next.is_none() {
                    self.is_due.store(false, Ordering::Relaxed);
                }
                next
            };
            let Some((sealed, number, chain)) = next else { return Ok(taken) };
            taken = taken.max(number);
            let is_last = !self.waiting.load(Ordering::Acquire);
            let and_wait = and_wait && is_last && !self.waits_apart;
            if let Err(error) = self.send_chain(&mut sent, sealed, number, chain, and_wait) {
                sent.failed = Some(error.clone());
                return Err(error);
            }
        }
    }

    fn send_chain(
        &self,
        sent: &mut SentState,
        sealed: u64,
        number: u64,
        chain: QueuedChain,
        and_wait: bool,
    ) -> Result<()> {
        let bytes = self.bytes_of(&chain);
        let groups = chain.stages.iter().map(|stage| self.group(stage)).collect();
        let after = match chain.after {
            ChainDependency::NoDependency => None,
            ChainDependency::PendingSync => sent.sync_ticket(),
            ChainDependency::AllEarlier => sent.last,
        };
        let durable = chain.sync_stage.filter(|_| and_wait);
        let tickets = self.submit(groups, after, SubmitOptions { mark: number, durable })?;
        self.unsent_bytes.fetch_sub(bytes, Ordering::Relaxed);
        let kept = self.reserved_bytes.load(Ordering::Relaxed);
        if kept != u64::MAX {
            self.reserved_bytes.store(kept.saturating_sub(bytes), Ordering::Relaxed);
        }
        let last = tickets.last().copied().ok_or(Error::Misuse("a chain without a ticket"))?;
        if let Some(needed) = chain.sync_stage {
            sent.sync_ticket = tickets.get(needed).copied().or(Some(last));
        }
        if durable.is_some() {
            sent.durable = sent.durable.max(sent.sync_ticket);
        }
        sent.last = Some(last);
        if !chain.freed.is_empty() {
            sent.pending_frees.push_back((last, chain.freed));
        }
        let QueuedChain { contents, checkpointed: placed, .. } = chain;
        sent.in_flight.push_back(InFlightChain { sealed, last, contents, placed, bytes });
        Ok(())
    }

    /// What the disk takes as one chain.
    pub(crate) fn bounds(&self) -> ChainBounds {
        self.disk.chain_bounds()
    }

    /// Submits a chain whole, or one that is too long for the disk (a single operation on many
    /// megabytes of metadata) piece by piece. What death may leave between
    /// two pieces is what a power cut may leave anywhere.
    fn submit(
        &self,
        chain: Vec<Group>,
        after: Option<Ticket>,
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>> {
        let bounds = self.bounds();
        let mut after = after;
        let mut tickets = Vec::with_capacity(chain.len());
        let mut chain = chain.into_iter().peekable();
        while chain.peek().is_some() {
            let mut piece = Vec::new();
            let mut needs = ChainBounds { groups: 0, writes: 0, bytes: 0 };
            while let Some(group) = chain.next_if(|group| {
                let more = needs.and(ChainBounds::of(std::slice::from_ref(group)));
                let fits = needs.groups == 0 || more.is_within(bounds);
                needs = if fits { more } else { needs };
                fits
            }) {
                piece.push(group);
            }
            let is_last = chain.peek().is_none();
            // Of another piece's group it is waited for the first of this one.
            let durable = terms.durable.map(|place| place.saturating_sub(tickets.len()));
            let piece_terms =
                if is_last { SubmitOptions { durable, ..terms } } else { SubmitOptions::default() };
            let submitted = self.disk.submit_with(piece, after.as_slice(), piece_terms);
            tickets.extend(submitted.map_err(|refused| Error::Io(refused.error))?);
            after = tickets.last().copied();
        }
        Ok(tickets)
    }

    /// Blocks as writes: neighbours in one.
    fn group(&self, stage: &Stage) -> Group {
        let most = WRITE_BYTES.checked_div(self.block_bytes).unwrap_or(1).max(1);
        let mut writes = Vec::new();
        let mut run: Vec<&SharedBytes> = Vec::new();
        let mut start = 0u64;
        for (block, data) in stage {
            if run.len() >= most || start.saturating_add(run.len() as u64) != *block {
                writes.extend(self.write(start, &mut run));
                start = *block;
            }
            run.push(data);
        }
        writes.extend(self.write(start, &mut run));
        Group { writes }
    }

    fn write(&self, start: u64, run: &mut Vec<&SharedBytes>) -> Option<Write> {
        if run.is_empty() {
            return None;
        }
        let mut block = Block::unallocated(run.len().saturating_mul(self.block_bytes));
        for (nth, data) in run.drain(..).enumerate() {
            block.put_slice(nth.saturating_mul(self.block_bytes), SharedSlice::new(data.clone()));
        }
        Some(Write { at_bytes: start.saturating_mul(self.block_bytes as u64), block })
    }

    /// What a sync waits for, if it is not durable yet.
    ///
    /// # Errors
    /// What made the disk refuse a chain: it will never be durable.
    pub(crate) fn sync_ticket(&self) -> Result<Option<Ticket>> {
        Ok(self.sent()?.sync_ticket())
    }

    /// The last ticket that was given.
    ///
    /// # Errors
    /// As [`Outbox::needed`].
    pub(crate) fn last(&self) -> Result<Option<Ticket>> {
        Ok(self.sent()?.last)
    }

    /// The ticket with which the last freeing is durable, if it is not yet.
    ///
    /// # Errors
    /// As [`Outbox::needed`].
    pub(crate) fn last_freed(&self) -> Result<Option<Ticket>> {
        Ok(self.sent()?.pending_frees.back().map(|(ticket, _)| *ticket))
    }

    /// What was sent; a chain that another thread has in hand, too.
    fn sent(&self) -> Result<MutexGuard<'_, SentState>> {
        let sent = self.sent.lock();
        match &sent.failed {
            Some(failed) => Err(failed.clone()),
            None => Ok(sent),
        }
    }

    /// Waits until readers of the disk see the oldest chain that they may not see yet, or with
    /// `all`, all of them. Those that landed.
    ///
    /// # Errors
    /// What made the disk fail or refuse.
    pub(crate) fn wait_visible(&self, all: bool) -> Result<Vec<InFlightChain>> {
        let last = {
            let sent = self.sent()?;
            let flight = if all { sent.in_flight.back() } else { sent.in_flight.front() };
            flight.map(|flight| flight.last)
        };
        let Some(last) = last else { return Ok(vec![]) };
        self.disk.wait_visible(last)?;
        Ok(self.take_visible(&mut self.sent.lock(), last))
    }

    /// Waits until everything up to `ticket` is durable. What landed with it, and what is free from
    /// now on, is given to `landed`, before others that wait for it go on.
    ///
    /// # Errors
    /// What made the disk fail.
    pub(crate) fn wait(
        &self,
        ticket: Ticket,
        landed: impl FnOnce(Vec<InFlightChain>, Vec<FreedSpace>),
    ) -> Result<()> {
        if self.join_wait(ticket) {
            let (flights, freed) = self.take_durable();
            landed(flights, freed);
            return Ok(());
        }
        let waited = self.disk.wait_durable(ticket);
        if waited.is_ok() {
            let (flights, freed) = self.mark_durable(&mut self.sent.lock(), ticket);
            landed(flights, freed);
        }
        let mut asked = self.active_waits.lock();
        if let Some(place) = asked.iter().position(|it| *it == ticket) {
            asked.swap_remove(place);
        }
        drop(asked);
        self.wait_finished.notify_all();
        Ok(waited?)
    }

    /// Whether everything up to `ticket` is durable, once no other thread waits for that any more;
    /// if not, the disk is asked now.
    fn join_wait(&self, ticket: Ticket) -> bool {
        let mut asked = self.active_waits.lock();
        while asked.iter().any(|it| *it >= ticket) {
            self.wait_finished.wait(&mut asked);
        }
        let is_durable = self.sent.lock().durable >= Some(ticket);
        if !is_durable {
            asked.push(ticket);
        }
        is_durable
    }

    /// What landed with all that is known to be durable, and what is free from now on.
    pub(crate) fn take_durable(&self) -> (Vec<InFlightChain>, Vec<FreedSpace>) {
        let mut sent = self.sent.lock();
        sent.durable.map_or_else(Default::default, |ticket| self.mark_durable(&mut sent, ticket))
    }

    fn mark_durable(
        &self,
        sent: &mut SentState,
        ticket: Ticket,
    ) -> (Vec<InFlightChain>, Vec<FreedSpace>) {
        sent.durable = sent.durable.max(Some(ticket));
        let count = sent.pending_frees.partition_point(|(frozen, _)| *frozen <= ticket);
        let freed = sent.pending_frees.drain(..count).map(|(_, freed)| freed).collect();
        (self.take_visible(sent, ticket), freed)
    }

    /// Says that blocks are not needed any more: the freeing is durable.
    ///
    /// # Errors
    /// What the disk says.
    pub(crate) fn discard(&self, freed: &[FreedSpace]) -> Result<()> {
        let mut blocks: Vec<(u64, u32)> =
            freed.iter().flat_map(|freed| freed.blocks.iter().copied()).collect();
        blocks.sort_unstable();
        let len = self.block_bytes as u64;
        let mut extents: Vec<Extent> = Vec::new();
        for (first, count) in blocks {
            let (start, bytes) = (first.saturating_mul(len), u64::from(count).saturating_mul(len));
            match extents.last_mut() {
                Some(last) if last.end_bytes() == Some(start) => {
                    last.len_bytes = last.len_bytes.saturating_add(bytes);
                }
                _ => extents.push(Extent::new(start, bytes)),
            }
        }
        if extents.is_empty() { Ok(()) } else { Ok(self.disk.discard(&extents, &[])?) }
    }

    fn take_visible(&self, sent: &mut SentState, last: Ticket) -> Vec<InFlightChain> {
        let count = sent.in_flight.partition_point(|flight| flight.last <= last);
        let landed: Vec<InFlightChain> = sent.in_flight.drain(..count).collect();
        let bytes = landed.iter().map(|flight| flight.bytes).fold(0, u64::saturating_add);
        self.in_flight_bytes.fetch_sub(bytes, Ordering::Relaxed);
        landed
    }
}

impl std::fmt::Debug for CommitQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox")
            .field("flying_bytes", &self.in_flight_bytes)
            .finish_non_exhaustive()
    }
}
