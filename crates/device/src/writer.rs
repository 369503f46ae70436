//! Writer of a file disk: groups in order, with shared flushes.
//!
//! ```text
//!   given ≥ written ≥ durable        three counts of tickets
//!     a group that follows ticket t:  flush first, unless t ≤ durable
//!     wait(t):                        flush, unless t ≤ durable or a flush is in progress
//!     settle(t):                      t ≤ written
//! ```
//!
//! One thread writes at a time: the writer thread or a waiter. A waiter would otherwise sleep, and
//! waking a thread costs more than a small write. So small groups do not wake the thread while it
//! polls every millisecond: a waiter for the group has written it by then.
//!
//! Discards wait until their dependencies are durable; the writing thread then carries them out. A
//! group written to the same range cancels a waiting discard.
//!
//! Law 1: a flush covers everything written at its start, for all waiters.
//! Law 2: after the first failure nothing is written; queued groups are dropped.

use draconis_types::lock::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use draconis_types::Block;

use crate::raw::{DISCARD_UNIT_BYTES, RawFile};
use crate::uring::{WriteRing, discard_blocks};
use crate::{ChainBounds, Error, Extent, Group, Refused, Ticket, Write};

/// Maximum groups in the queue; beyond it a submitter waits.
const MAX_QUEUED_GROUPS: usize = 256;
/// Maximum bytes in the queue; one chain may be larger.
const MAX_QUEUED_BYTES: u64 = 64 << 20;
/// Maximum bytes of one request to the file. Several of half a MiB are faster than one of a MiB.
const MAX_RUN_BYTES: u64 = 512 << 10;
/// Maximum blocks of one request (`IOV_MAX`).
const MAX_RUN_WRITES: usize = 1024;

/// Queued bytes up to which the thread is not woken: waiters or its next tick write them.
const WAKE_THRESHOLD_BYTES: u64 = 64 << 10;
/// Interval at which the thread polls while groups keep coming.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Number of ticks without a group after which the thread sleeps until it is woken.
const MAX_IDLE_TICKS: u32 = 20;

/// Maximum waiting discards.
const MAX_PENDING_DISCARDS: usize = 4096;
/// Minimum runs of a group for which a ring is faster than sequential writes.
const MIN_RING_RUNS: usize = 8;
/// Minimum bytes of a group for which that holds for two runs.
const MIN_RING_BYTES: u64 = 1 << 20;

/// Writes groups in its own thread, and in waiting threads.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<WriterShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct WriterShared {
    file: Arc<RawFile>,
    state: Mutex<WriterState>,
    /// Notifies the thread: there is something to write.
    work: Condvar,
    /// Notifies all others: something was written, is durable, or has failed.
    changed: Condvar,
    /// Ring of the thread that writes.
    ring: Mutex<Option<WriteRing>>,
}

#[derive(Debug, Default)]
struct WriterState {
    queue: VecDeque<QueuedGroup>,
    queued_bytes: u64,
    /// Counts of groups: issued tickets, written, durable; each at most the one before.
    issued: u64,
    written: u64,
    durable: u64,
    writing: bool,
    flushing: bool,
    thread: WriterThreadState,
    /// Number of threads that wait for a change.
    sleepers: usize,
    discards: VecDeque<PendingDiscard>,
    /// Range being discarded: a group that overlaps it waits.
    discarding: Option<Extent>,
    failed: Option<Error>,
    closing: bool,
}

/// Activity of the writer thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum WriterThreadState {
    /// Writing, or about to check.
    #[default]
    Busy,
    /// Checks again within a [`POLL_INTERVAL`].
    Dozing,
    /// Sleeps until it is woken.
    Asleep,
}

/// A queued group.
#[derive(Debug)]
struct QueuedGroup {
    group: Group,
    /// Range to punch instead of the group's writes.
    hole: Option<Extent>,
    bytes: u64,
    /// Newest ticket that it depends on: it is written after that is durable.
    follows: u64,
}

/// A range to discard once `follows` is durable.
#[derive(Clone, Copy, Debug)]
struct PendingDiscard {
    extent: Extent,
    follows: u64,
}

impl Writer {
    pub(crate) fn start(file: Arc<RawFile>, uring: bool) -> Self {
        let ring = uring.then(|| WriteRing::start(&file, true)).and_then(|ring| {
            ring.inspect_err(|error| log::info!("no io_uring here ({error}): one write at a time"))
                .ok()
        });
        let shared = Arc::new(WriterShared {
            file,
            state: Mutex::new(WriterState::default()),
            work: Condvar::new(),
            changed: Condvar::new(),
            ring: Mutex::new(ring),
        });
        let mine = shared.clone();
        let name = std::thread::Builder::new().name("disk-write".into());
        let thread = name.spawn(move || mine.run_writer_thread());
        // Without a thread every submit is refused as stopped.
        if let Err(error) = &thread {
            log::error!("no thread to write with: {error}");
            shared.lock().failed = Some(Error::ServiceEnded);
        }
        Self { shared, thread: thread.ok() }
    }

    pub(crate) fn submit(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let refuse = |chain, error| Err(Refused { payload: Some(chain), error });
        let bytes = ChainBounds::size_of_chain(&chain).bytes;
        let mut state = self.shared.lock();
        let newest = after.iter().copied().max().unwrap_or(Ticket(0));
        if newest.0 > state.issued {
            return refuse(chain, Error::UnknownTicket(newest));
        }
        while (state.is_full(bytes) || state.is_discarding(&chain)) && state.failed.is_none() {
            state = self.shared.wait_for_change(state);
        }
        if state.failed.is_some() {
            return refuse(chain, Error::Stopped);
        }
        let tickets = state.enqueue_chain(chain, newest.0);
        self.shared.wake_thread(&mut state);
        Ok(tickets)
    }

    /// Returns the error that ended all writing, if any.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.shared.lock().failed.clone()
    }

    /// Queues discards, if the file supports them.
    pub(crate) fn discard(
        &self,
        extents: &[Extent],
        after: &[Ticket],
        can: bool,
    ) -> Result<(), Error> {
        let mut state = self.shared.lock();
        let newest = after.iter().copied().max().unwrap_or(Ticket(0));
        if newest.0 > state.issued {
            return Err(Error::UnknownTicket(newest));
        }
        if can && state.failed.is_none() {
            let whole =
                extents.iter().filter_map(|extent| extent.inner_aligned_extent(DISCARD_UNIT_BYTES));
            let follows = newest.0;
            state.discards.extend(whole.map(|extent| PendingDiscard { extent, follows }));
            // Discards are hints: the oldest are dropped first.
            let surplus = state.discards.len().saturating_sub(MAX_PENDING_DISCARDS);
            state.discards.drain(..surplus);
            self.shared.wake_thread(&mut state);
        }
        Ok(())
    }

    /// Queues a hole as a group.
    pub(crate) fn punch_hole(&self, extent: Extent) -> Result<Ticket, Error> {
        let mut state = self.shared.lock();
        while (state.is_full(0) || state.discarding.is_some()) && state.failed.is_none() {
            state = self.shared.wait_for_change(state);
        }
        if state.failed.is_some() {
            return Err(Error::Stopped);
        }
        state.issued += 1;
        let hole =
            QueuedGroup { group: Group::default(), hole: Some(extent), bytes: 0, follows: 0 };
        state.queue.push_back(hole);
        let ticket = Ticket(state.issued);
        self.shared.wake_thread(&mut state);
        Ok(ticket)
    }

    /// Flushes once all issued tickets are written, whether or not they are durable by now: holes of
    /// discards and writes of others have no ticket.
    pub(crate) fn wait_all_durable(&self) -> Result<(), Error> {
        let mut state = self.shared.lock();
        let newest = Ticket(state.issued);
        while !state.has_reached(newest, state.written)? {
            state = self.shared.write_or_sleep(state);
        }
        while state.flushing || state.discarding.is_some() {
            state = self.shared.wait_for_change(state);
        }
        let state = self.shared.flush(state);
        state.failed.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        let mut state = self.shared.lock();
        loop {
            if state.has_reached(ticket, state.written)? {
                return Ok(());
            }
            state = self.shared.write_or_sleep(state);
        }
    }

    pub(crate) fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        let mut state = self.shared.lock();
        loop {
            if state.has_reached(ticket, state.durable)? {
                return Ok(());
            }
            state = match state.written >= ticket.0 {
                true => self.shared.flush(state),
                false => self.shared.write_or_sleep(state),
            };
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl WriterShared {
    fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock()
    }

    fn wait_for_change<'a>(
        &self,
        mut state: MutexGuard<'a, WriterState>,
    ) -> MutexGuard<'a, WriterState> {
        state.sleepers += 1;
        self.changed.wait(&mut state);
        state.sleepers -= 1;
        state
    }

    /// Notifies all waiters, and the thread if it is needed: each costs a system call.
    fn notify_waiters(&self, state: &mut WriterState) {
        if state.sleepers > 0 {
            self.changed.notify_all();
        }
        self.wake_thread(state);
    }

    /// Wakes the thread if work cannot wait for its next tick.
    fn wake_thread(&self, state: &mut WriterState) {
        let is_awaited = match state.thread {
            WriterThreadState::Busy => false,
            WriterThreadState::Dozing => state.queued_bytes > WAKE_THRESHOLD_BYTES,
            WriterThreadState::Asleep => !state.queue.is_empty() || state.has_due_discard(),
        };
        if is_awaited {
            state.thread = WriterThreadState::Busy;
            self.work.notify_one();
        }
    }

    /// Waits for a tick without work; after some of them, sleeps until woken.
    fn sleep_until_work<'a>(
        &self,
        mut state: MutexGuard<'a, WriterState>,
        idle: &mut u32,
    ) -> MutexGuard<'a, WriterState> {
        let given = state.issued;
        state.thread = if *idle < MAX_IDLE_TICKS {
            WriterThreadState::Dozing
        } else {
            WriterThreadState::Asleep
        };
        match state.thread {
            WriterThreadState::Dozing => {
                self.work.wait_for(&mut state, POLL_INTERVAL);
            }
            _ => self.work.wait(&mut state),
        }
        state.thread = WriterThreadState::Busy;
        *idle = if state.issued == given { *idle + 1 } else { 0 };
        state
    }

    /// Writes the next group instead of sleeping: waking the writer thread costs more than a small
    /// write.
    fn write_or_sleep<'a>(
        &'a self,
        state: MutexGuard<'a, WriterState>,
    ) -> MutexGuard<'a, WriterState> {
        if state.writing || state.queue.is_empty() {
            self.wait_for_change(state)
        } else {
            self.process_first_group(state)
        }
    }

    /// Flushes, or waits for the flush in progress; the caller then checks if it was sufficient.
    fn flush<'a>(&'a self, mut state: MutexGuard<'a, WriterState>) -> MutexGuard<'a, WriterState> {
        if state.flushing {
            return self.wait_for_change(state);
        }
        let covered = state.written;
        state.flushing = true;
        drop(state);
        let flushed = self.file.flush();
        let mut state = self.lock();
        state.flushing = false;
        match flushed {
            Ok(()) => state.durable = state.durable.max(covered),
            Err(error) => state.fail_writer(error),
        }
        self.notify_waiters(&mut state);
        state
    }

    fn run_writer_thread(&self) {
        let mut idle = 0;
        let mut state = self.lock();
        loop {
            let discard = state.next_discard();
            state = match (state.queue.is_empty(), state.writing, discard) {
                (_, _, Some(extent)) => self.discard(state, extent),
                (true, _, None) if state.closing => return,
                (false, false, None) => self.process_first_group(state),
                _ => self.sleep_until_work(state, &mut idle),
            };
        }
    }

    /// Discards a range while others may write elsewhere.
    fn discard<'a>(
        &'a self,
        mut state: MutexGuard<'a, WriterState>,
        extent: Extent,
    ) -> MutexGuard<'a, WriterState> {
        state.discarding = Some(extent);
        drop(state);
        // A device that does not guarantee zeroes afterwards needs another call.
        let discarded = self.file.punch(extent);
        let discarded =
            discarded.or_else(|errno| discard_blocks(&self.file.fd, extent).map_err(|_| errno));
        if let Err(errno) = discarded {
            log::info!("{extent} could not be discarded: {errno}");
        }
        let mut state = self.lock();
        state.discarding = None;
        self.notify_waiters(&mut state);
        state
    }

    /// Writes the first queued group, or flushes its dependency. No other thread writes meanwhile.
    fn process_first_group<'a>(
        &'a self,
        mut state: MutexGuard<'a, WriterState>,
    ) -> MutexGuard<'a, WriterState> {
        let durable = state.durable;
        let Some(QueuedGroup { group, hole, bytes, .. }) =
            state.queue.pop_front_if(|next: &mut QueuedGroup| next.follows <= durable)
        else {
            // All earlier groups are written, so one flush is enough.
            return self.flush(state);
        };
        state.writing = true;
        drop(state);
        let written =
            hole.map_or_else(|| self.write(&group), |hole| self.punch_or_write_zeros(hole));
        drop(group);
        let mut state = self.lock();
        state.writing = false;
        state.queued_bytes = state.queued_bytes.saturating_sub(bytes);
        match written {
            Ok(()) => state.written += 1,
            Err(error) => state.fail_writer(error),
        }
        self.notify_waiters(&mut state);
        state
    }

    /// Punches a hole, or writes zeros if the file system cannot at the moment: it may need space.
    fn punch_or_write_zeros(&self, hole: Extent) -> Result<(), Error> {
        if self.file.punch(hole).is_ok() {
            return Ok(());
        }
        (0..hole.len_bytes).step_by(MAX_RUN_BYTES as usize).try_for_each(|done| {
            let block = Block::private((hole.len_bytes - done).min(MAX_RUN_BYTES) as usize);
            self.file.write_run(&[&Write { at_bytes: hole.start_bytes + done, block }])
        })
    }

    fn write(&self, group: &Group) -> Result<(), Error> {
        let (writes, overlap) = sort_by_offset(&group.writes);
        let runs = split_into_runs(&writes);
        let bytes: u64 = writes.iter().map(|write| write.block.len() as u64).sum();
        let is_faster = runs.len() >= MIN_RING_RUNS || runs.len() > 1 && bytes >= MIN_RING_BYTES;
        let mut ring = self.ring.lock();
        let at_once = match ring.as_mut() {
            Some(ring) if !overlap && is_faster => self.write_at_once(&runs, ring),
            _ => None,
        };
        let mut done = at_once.unwrap_or_default().into_iter();
        // Failed or partial writes are repeated here, to obtain the error.
        let rest = runs.iter().filter(|_| done.next() != Some(true));
        rest.into_iter().try_for_each(|run| self.file.write_run(run))
    }

    /// Writes several runs concurrently, if all are aligned: a read-modify-write must not overlap
    /// its neighbours.
    fn write_at_once(&self, runs: &[&[&Write]], ring: &mut WriteRing) -> Option<Vec<bool>> {
        let gathered: Option<Vec<_>> =
            runs.iter().map(|run| self.file.to_vectored_write(run)).collect();
        Some(ring.write(&gathered?))
    }
}

impl WriterState {
    fn is_full(&self, more_bytes: u64) -> bool {
        let full = self.queue.len() >= MAX_QUEUED_GROUPS
            || self.queued_bytes.saturating_add(more_bytes) > MAX_QUEUED_BYTES;
        full && self.queued_bytes + self.queue.len() as u64 > 0
    }

    /// Queues a chain. `follows` names the ticket that must be durable first; write order is by
    /// ticket anyway.
    fn enqueue_chain(&mut self, chain: Vec<Group>, mut follows: u64) -> Vec<Ticket> {
        if !self.discards.is_empty() {
            self.discards.retain(|discard| !touches_extent(&chain, discard.extent));
        }
        let mut tickets = Vec::with_capacity(chain.len());
        for group in chain {
            let bytes = group.writes.iter().map(|write| write.block.len() as u64).sum();
            self.issued += 1;
            self.queued_bytes += bytes;
            self.queue.push_back(QueuedGroup { group, hole: None, bytes, follows });
            tickets.push(Ticket(self.issued));
            follows = self.issued;
        }
        tickets
    }

    fn is_discarding(&self, chain: &[Group]) -> bool {
        self.discarding.is_some_and(|extent| touches_extent(chain, extent))
    }

    /// Returns the first discard that is due.
    fn next_discard(&mut self) -> Option<Extent> {
        let due = self.discards.iter().position(|discard| discard.follows <= self.durable)?;
        self.discards.remove(due).map(|discard| discard.extent)
    }

    fn has_due_discard(&self) -> bool {
        self.discards.iter().any(|discard| discard.follows <= self.durable)
    }

    /// Returns true if `count` has reached `ticket`; durable tickets stay so after a later failure.
    fn has_reached(&self, ticket: Ticket, count: u64) -> Result<bool, Error> {
        match &self.failed {
            _ if ticket.0 > self.issued => Err(Error::UnknownTicket(ticket)),
            _ if ticket.0 <= self.durable => Ok(true),
            Some(error) => Err(error.clone()),
            None => Ok(ticket.0 <= count),
        }
    }

    /// Records the first failure, which ends all writing; queued groups are dropped and free their
    /// blocks.
    fn fail_writer(&mut self, error: Error) {
        log::error!("{error}: nothing more is written to this disk");
        self.failed.get_or_insert(error);
        self.queue.clear();
        self.queued_bytes = 0;
        self.discards.clear();
    }
}

/// Returns the writes in disk order; if any two overlap, in their original order.
fn sort_by_offset(writes: &[Write]) -> (Vec<&Write>, bool) {
    let mut sorted: Vec<_> = writes.iter().collect();
    sorted.sort_by_key(|write| write.at_bytes);
    match sorted.windows(2).all(|pair| write_end(pair[0]) <= pair[1].at_bytes) {
        true => (sorted, false),
        false => (writes.iter().collect(), true),
    }
}

/// Splits writes into runs of adjacent writes, each one request.
fn split_into_runs<'a, 'b>(writes: &'b [&'a Write]) -> Vec<&'b [&'a Write]> {
    let mut runs = vec![];
    let mut rest = writes;
    while !rest.is_empty() {
        let (run, behind) = rest.split_at(run_len(rest));
        runs.push(run);
        rest = behind;
    }
    runs
}

/// Returns the number of adjacent writes at the start of `writes`, up to the limits of one request.
fn run_len(writes: &[&Write]) -> usize {
    let mut bytes = writes.first().map_or(0, |first| first.block.len() as u64);
    let joins = |pair: &&[&Write]| {
        bytes += pair[1].block.len() as u64;
        write_end(pair[0]) == pair[1].at_bytes && bytes <= MAX_RUN_BYTES
    };
    writes.windows(2).take_while(joins).take(MAX_RUN_WRITES - 1).count() + 1
}

/// Returns true if any write of `chain` touches `extent`.
fn touches_extent(chain: &[Group], extent: Extent) -> bool {
    let writes = chain.iter().flat_map(|group| &group.writes);
    writes
        .map(|write| Extent::new(write.at_bytes, write.block.len() as u64))
        .any(|write| write.overlaps(extent))
}

/// Returns the offset after the last byte; the range was checked before.
fn write_end(write: &Write) -> u64 {
    write.at_bytes + write.block.len() as u64
}
