//! Queue of chains: filled under the write lock, sent by the next thread without it.
//!
//! ```text
//!   transaction ── enqueue ─▶ queue ── send ─▶ disk ── visible ─▶ readers of the disk see it
//!        lock held               no lock held           └─ durable ──▶ freed blocks are free
//! ```
//! Law 1: queued chains are sent in queue order.
//! Law 2: nothing here takes the write lock, and its holder only queues: messages and waits are
//! done without it.
//! Law 3: once the disk refused a chain, nothing is sent any more.
//! Law 4: data that no chain in the queue references may be sent later, by another thread.
//! Law 5: a sync that is alone sends and waits in one message. Threads that send meanwhile wait
//! with it, as they would for the device.
//! Law 6: if another thread already waits for a later ticket, the caller joins that wait and sends
//! no request.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use draconis_device::{ChainBounds, Disk, Extent, Group, SubmitOptions, Ticket, Write};
use draconis_types::lock::{Condvar, Mutex, MutexGuard};
use draconis_types::{Block, SharedSlice};

use super::chain::{Chain, ChainDependency, FreedSpace, Stage};
use crate::blocks::data::SharedBytes;
use crate::units::saturating_usize;
use crate::{Error, Result};

/// Largest write, in bytes.
const WRITE_BYTES: usize = 1 << 20;

/// Disk space reserved beyond the need, in bytes.
const EXTRA_RESERVE_BYTES: u64 = 4 << 20;

/// A chain that was sent and may not be visible to readers of the disk yet.
#[derive(Debug)]
pub(crate) struct InFlightChain {
    pub(crate) chain_number: u64,
    last: Ticket,
    pub(crate) contents: Vec<u64>,
    pub(crate) checkpointed: Vec<u64>,
    bytes: u64,
}

/// Queue of chains, and the state of the chains that were sent.
pub(crate) struct CommitQueue {
    disk: Arc<dyn Disk>,
    block_bytes: usize,
    /// True if sending and waiting are separate calls, because the disk can be unreachable.
    pub(crate) waits_separately: bool,
    queue: Mutex<Queue>,
    /// True if the queue holds anything.
    has_chains: AtomicBool,
    /// True if the queue holds more than data written ahead.
    is_due: AtomicBool,
    /// Bytes queued or sent that may not be visible to readers of the disk yet.
    in_flight_bytes: AtomicU64,
    /// Bytes queued and not sent.
    unsent_bytes: AtomicU64,
    /// Bytes of space reserved on the disk; changed only under the lock of `sent`.
    reserved_bytes: AtomicU64,
    sent: Mutex<SentState>,
    /// Tickets that threads currently wait for.
    active_waits: Mutex<Vec<Ticket>>,
    wait_finished: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Number of chains queued so far.
    last_number: u64,
    /// Each chain with its number, and the number of the last change in it.
    chains: VecDeque<(u64, u64, Chain)>,
}

#[derive(Default)]
struct SentState {
    /// Ticket that a sync waits for.
    sync_ticket: Option<Ticket>,
    last: Option<Ticket>,
    /// Everything up to this ticket is durable.
    durable: Option<Ticket>,
    in_flight: VecDeque<InFlightChain>,
    pending_frees: VecDeque<(Ticket, FreedSpace)>,
    failed: Option<Error>,
}

impl SentState {
    /// Returns the ticket that a sync waits for, unless it is durable.
    fn sync_ticket(&self) -> Option<Ticket> {
        self.sync_ticket.filter(|ticket| self.durable < Some(*ticket))
    }
}

impl CommitQueue {
    pub(crate) fn new(disk: Arc<dyn Disk>, block_bytes: u32) -> Self {
        // Most disks have their whole space allocated.
        let reserved_bytes = AtomicU64::new(disk.reserve(0).unwrap_or(0));
        Self {
            waits_separately: disk.can_be_unreachable(),
            disk,
            reserved_bytes,
            unsent_bytes: AtomicU64::new(0),
            block_bytes: saturating_usize(block_bytes.into()),
            queue: Mutex::default(),
            has_chains: AtomicBool::new(false),
            is_due: AtomicBool::new(false),
            in_flight_bytes: AtomicU64::new(0),
            sent: Mutex::default(),
            active_waits: Mutex::default(),
            wait_finished: Condvar::new(),
        }
    }

    /// Queues a chain and returns its number, counted from 1.
    pub(crate) fn enqueue(&self, chain: Chain) -> u64 {
        self.enqueue_changes(chain, 0)
    }

    /// Queues a chain that contains all changes up to `number`.
    pub(crate) fn enqueue_changes(&self, chain: Chain, number: u64) -> u64 {
        let bytes = self.chain_bytes(&chain);
        self.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.unsent_bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut queue = self.queue.lock();
        queue.last_number = queue.last_number.saturating_add(1);
        let sealed = queue.last_number;
        let ahead = chain.sync_stage.is_none() && chain.dependency != ChainDependency::AllEarlier;
        if !ahead {
            self.is_due.store(true, Ordering::Relaxed);
        }
        queue.chains.push_back((sealed, number, chain));
        self.has_chains.store(true, Ordering::Release);
        sealed
    }

    /// Reserves disk space for `bytes` in addition to the queued chains.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; an error of the disk.
    pub(crate) fn ensure_space(&self, bytes: u64) -> Result<()> {
        let needed = || bytes.saturating_add(self.unsent_bytes.load(Ordering::Relaxed));
        if self.reserved_bytes.load(Ordering::Relaxed) >= needed() {
            return Ok(());
        }
        let _sent = self.lock_sent()?;
        let needed = needed();
        // Reserves more, so that not every change sends a request.
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

    /// Returns true if the disk allocates space as it is written.
    pub(crate) fn is_thin_provisioned(&self) -> bool {
        self.reserved_bytes.load(Ordering::Relaxed) != u64::MAX
    }

    fn chain_bytes(&self, chain: &Chain) -> u64 {
        let blocks: usize = chain.stages.iter().map(Stage::len).sum();
        blocks.saturating_mul(self.block_bytes) as u64
    }

    /// Returns the bytes that may not be visible to readers of the disk yet.
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes.load(Ordering::Relaxed)
    }

    /// Returns true if only data written ahead is queued, and less than `most` bytes of it.
    pub(crate) fn has_only_written_ahead_data(&self, most: u64) -> bool {
        self.has_chains.load(Ordering::Acquire)
            && !self.is_due.load(Ordering::Relaxed)
            && self.unsent_bytes.load(Ordering::Relaxed) < most
    }

    /// Sends the queued chains and returns the number of the last change that the disk accepted.
    /// With `and_wait`, waits for the sync stage of the last chain; [`CommitQueue::sync_ticket`]
    /// tells the result.
    ///
    /// # Errors
    /// An error of the disk, now or before.
    pub(crate) fn send(&self, and_wait: bool) -> Result<u64> {
        let mut taken = 0;
        if !self.has_chains.load(Ordering::Acquire) {
            return Ok(taken);
        }
        let mut sent = self.lock_sent()?;
        loop {
            let next = {
                let mut queue = self.queue.lock();
                let next = queue.chains.pop_front();
                self.has_chains.store(next.is_some(), Ordering::Release);
                if next.is_none() {
                    self.is_due.store(false, Ordering::Relaxed);
                }
                next
            };
            let Some((sealed, number, chain)) = next else { return Ok(taken) };
            taken = taken.max(number);
            let is_last = !self.has_chains.load(Ordering::Acquire);
            let and_wait = and_wait && is_last && !self.waits_separately;
            if let Err(error) = self.send_chain(&mut sent, sealed, number, chain, and_wait) {
                sent.failed = Some(error.clone());
                return Err(error);
            }
        }
    }

    fn send_chain(
        &self,
        sent: &mut SentState,
        chain_number: u64,
        number: u64,
        chain: Chain,
        and_wait: bool,
    ) -> Result<()> {
        let bytes = self.chain_bytes(&chain);
        let groups = chain.stages.iter().map(|stage| self.build_group(stage)).collect();
        let after = match chain.dependency {
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
        let Chain { contents, checkpointed: placed, .. } = chain;
        sent.in_flight.push_back(InFlightChain {
            chain_number,
            last,
            contents,
            checkpointed: placed,
            bytes,
        });
        Ok(())
    }

    /// Returns the limits of a chain that the disk accepts at once.
    pub(crate) fn bounds(&self) -> ChainBounds {
        self.disk.chain_bounds()
    }

    /// Submits a chain whole, or in pieces if it exceeds the disk's limits (one operation with many
    /// megabytes of metadata). A crash between two pieces is like a power cut.
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
                let more = needs.sum_with(ChainBounds::size_of_chain(std::slice::from_ref(group)));
                let fits = needs.groups == 0 || more.is_within(bounds);
                needs = if fits { more } else { needs };
                fits
            }) {
                piece.push(group);
            }
            let is_last = chain.peek().is_none();
            // If the sync group is in an earlier piece, waiting for this piece's first group covers
            // it.
            let durable = terms.durable.map(|place| place.saturating_sub(tickets.len()));
            let piece_terms =
                if is_last { SubmitOptions { durable, ..terms } } else { SubmitOptions::default() };
            let submitted = self.disk.submit_with(piece, after.as_slice(), piece_terms);
            tickets.extend(submitted.map_err(|refused| Error::Io(refused.error))?);
            after = tickets.last().copied();
        }
        Ok(tickets)
    }

    /// Converts blocks to writes, merging adjacent blocks.
    fn build_group(&self, stage: &Stage) -> Group {
        let most = WRITE_BYTES.checked_div(self.block_bytes).unwrap_or(1).max(1);
        let mut writes = Vec::new();
        let mut run: Vec<&SharedBytes> = Vec::new();
        let mut start = 0u64;
        for (block, data) in stage {
            if run.len() >= most || start.saturating_add(run.len() as u64) != *block {
                writes.extend(self.build_write(start, &mut run));
                start = *block;
            }
            run.push(data);
        }
        writes.extend(self.build_write(start, &mut run));
        Group { writes }
    }

    fn build_write(&self, start: u64, run: &mut Vec<&SharedBytes>) -> Option<Write> {
        if run.is_empty() {
            return None;
        }
        let mut block = Block::unallocated(run.len().saturating_mul(self.block_bytes));
        for (nth, data) in run.drain(..).enumerate() {
            block.put_slice(nth.saturating_mul(self.block_bytes), SharedSlice::new(data.clone()));
        }
        Some(Write { at_bytes: start.saturating_mul(self.block_bytes as u64), block })
    }

    /// Returns the ticket that a sync waits for, unless it is durable.
    ///
    /// # Errors
    /// The error with which the disk refused a chain: it will never be durable.
    pub(crate) fn sync_ticket(&self) -> Result<Option<Ticket>> {
        Ok(self.lock_sent()?.sync_ticket())
    }

    /// Returns the last ticket.
    ///
    /// # Errors
    /// As [`CommitQueue::sync_ticket`].
    pub(crate) fn last_ticket(&self) -> Result<Option<Ticket>> {
        Ok(self.lock_sent()?.last)
    }

    /// Returns the ticket of the last chain with frees, unless it is durable.
    ///
    /// # Errors
    /// As [`CommitQueue::sync_ticket`].
    pub(crate) fn last_ticket_with_frees(&self) -> Result<Option<Ticket>> {
        Ok(self.lock_sent()?.pending_frees.back().map(|(ticket, _)| *ticket))
    }

    /// Locks the sent state, which waits for a thread that is sending.
    fn lock_sent(&self) -> Result<MutexGuard<'_, SentState>> {
        let sent = self.sent.lock();
        match &sent.failed {
            Some(failed) => Err(failed.clone()),
            None => Ok(sent),
        }
    }

    /// Waits until the oldest in-flight chain, or with `all` every one, is visible to readers of
    /// the disk. Returns the visible chains.
    ///
    /// # Errors
    /// An error of the disk.
    pub(crate) fn wait_visible(&self, all: bool) -> Result<Vec<InFlightChain>> {
        let last = {
            let sent = self.lock_sent()?;
            let flight = if all { sent.in_flight.back() } else { sent.in_flight.front() };
            flight.map(|flight| flight.last)
        };
        let Some(last) = last else { return Ok(vec![]) };
        self.disk.wait_visible(last)?;
        Ok(self.take_visible(&mut self.sent.lock(), last))
    }

    /// Waits until everything up to `ticket` is durable. Calls `landed` with the visible chains and
    /// the space that is now free, before other waiters continue.
    ///
    /// # Errors
    /// An error of the disk.
    pub(crate) fn wait_for_ticket(
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

    /// Waits while other threads wait for `ticket` or a later one. Returns true if it is durable
    /// then; otherwise registers the caller's own wait.
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

    /// Returns the chains that are visible, and the space that is free, by the known durable
    /// ticket.
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

    /// Discards freed blocks whose frees are durable.
    ///
    /// # Errors
    /// An error of the disk.
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
