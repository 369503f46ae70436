//! The disk of a bucket.
//!
//! ```text
//!   submit ─▶ open pack ─▶ sealed: an object with a number ─▶ sent, several at once
//!                │ full, waited for                              │ all before it, too
//!   reads ◀──────┴───── map: sector ─▶ object, place             ▼
//!                                                    is the epoch still ours? ─▶ durable
//! ```
//!
//! Law 1: object numbers have no gaps. An opener uses objects up to the first missing number, so
//! uploads may complete out of order.
//! Law 2: data is durable once its object and all before it were uploaded, and a later check found
//! the epoch unchanged. A new writer first fences the epoch, then lists the objects.
//! Law 3: a root is uploaded after all objects before it. Those before the newest root may be
//! missing: nothing refers to them.
//! Read-ahead is in `read_ahead`. With a journal, data is durable once that has it; `upload_queue::journal_queue`
//! uploads in the background.
//! Law 4: an object is deleted once two roots that do not need it are durable; readers may still
//! use the root before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use draconis_device::{
    Atomic, CloseOnFork, Disk, Error, Extent, Group, Pending, Process, Promise, Properties,
    ReadAnswer, Refused, Ticket, Urgency, promise_pair,
};
use draconis_types::Block;
use draconis_types::lock::{Condvar, Mutex};

use crate::api::RequestError;
use crate::cache::ChunkCache;
use crate::journal::{Journal, JournalStatistics};
use crate::name::{MAX_SECTORS, ObjectName, ObjectNumber, SectorRun};
use crate::read_ahead::{MAX_WINDOW_BYTES, ObjectRange, ReadAction, ReadAhead};
use crate::remote;
use crate::request_threads::RequestThreads;
use crate::retry::{RequestStatistics, RetryingStore};
use crate::root::EDGE_SECTORS;
use crate::state::{NewerState, OpenedBucket, list_newer_state};
use crate::upload_queue::JournalQueue;
use crate::upload_queue::{QueueState, SharedState, WaitGoal, WritePolicy};
use crate::{OBJECT_BYTES, SECTOR_BYTES};

/// A disk that stores its data in a bucket.
pub struct BucketDisk {
    shared: Arc<SharedState>,
    has_journal: bool,
    /// Uploader thread of a journal.
    uploader: Mutex<Option<JoinHandle<()>>>,
    /// Description of data that was not uploaded at close.
    close_message: Mutex<Option<String>>,
    /// The root that a reader has, and the end of its epoch's objects.
    reader_position: Mutex<(ObjectNumber, u64)>,
    _lock: Option<Arc<CloseOnFork>>,
    process: Process,
}

/// State of a writable disk.
#[derive(Clone, Debug)]
pub struct BucketWriteState {
    /// Error that stopped writes.
    pub error: Option<String>,
    /// Reason why the bucket is not available, and since when.
    pub away: Option<(String, SystemTime)>,
    /// Bytes that are not in the bucket yet.
    pub waiting_bytes: u64,
}

/// Age from which the result of an epoch check is renewed.
const MAX_EPOCH_CHECK_AGE: Duration = Duration::from_millis(500);
/// Wait for the renewal.
const MAX_EPOCH_CHECK_WAIT: Duration = Duration::from_millis(150);

/// Range of one object that a read needs.
struct BlockRange {
    key: Arc<str>,
    from_bytes: u64,
    len: usize,
    /// Offset in the block.
    into: usize,
}

impl BucketDisk {
    pub(crate) fn new(
        bucket: RetryingStore,
        pace: WritePolicy,
        opened: OpenedBucket,
        cache: Option<ChunkCache>,
        journal: Option<Journal>,
        lock: Option<Arc<CloseOnFork>>,
    ) -> Result<Self, Error> {
        let OpenedBucket { root, map, names, garbage, epoch, newest, end } = opened;
        let state = QueueState {
            root,
            map,
            names,
            open: None,
            sealed: BTreeMap::new(),
            next: 0,
            sent: 0,
            sent_early: BTreeSet::new(),
            durable: 0,
            is_checking_epoch: false,
            last_sealed: None,
            tickets: 0,
            durable_ticket: 0,
            ends: VecDeque::new(),
            is_root_due: false,
            roots: VecDeque::new(),
            dead: garbage.into_iter().map(|key| (key, 0)).collect(),
            error: None,
            retries_transient: false,
            away: None,
            is_probing: false,
            epoch_checked_at: None,
            is_closed: false,
            journal_queue: journal.map(JournalQueue::new),
        };
        let has_journal = state.journal_queue.is_some();
        let shared = SharedState {
            lanes: RequestThreads::new(pace.lanes),
            bucket,
            cache,
            ahead: ReadAhead::default(),
            pace,
            is_read_only: epoch.is_none(),
            epoch: epoch.unwrap_or_default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            uploader_wakes: Condvar::new(),
        };
        let shared = Arc::new(shared);
        let uploader = has_journal.then(|| {
            let shared = shared.clone();
            let named = std::thread::Builder::new().name("journal".to_owned());
            let spawned = named.spawn(move || shared.run_uploader());
            spawned.map_err(|error| remote(format!("no thread for the journal: {error}")))
        });
        let uploader = Mutex::new(uploader.transpose()?);
        Ok(Self {
            shared,
            has_journal,
            uploader,
            close_message: Mutex::default(),
            reader_position: Mutex::new((newest, end)),
            _lock: lock,
            process: Process::current(),
        })
    }

    /// Ends the opening: from now on a mount retries transient errors.
    pub(crate) fn finish_opening(&self) {
        self.set_retry_transient(true);
    }

    fn set_retry_transient(&self, is_patient: bool) {
        let mut state = self.shared.state.lock();
        // A one-shot command reports errors instead of waiting.
        state.retries_transient = is_patient && self.shared.pace.releases_epoch;
        // End a back-off at once.
        if let Some(keeping) = &mut state.journal_queue {
            keeping.backoff_until = keeping.backoff_until.map(|_| Instant::now());
            self.shared.uploader_wakes.notify_one();
        } else if !is_patient {
            self.shared.bucket.enable_retries();
        }
        if !is_patient {
            self.shared.mark_available(&mut state);
        }
    }

    /// Prepares for close: from now on uploads that miss the deadline have failed.
    pub fn finish(&self) {
        if !self.has_journal {
            self.set_retry_transient(false);
        }
    }

    /// Returns the data that is not in the bucket, with the reason, and whether another writer
    /// fenced this one. It checks the epoch if the last check is old.
    pub fn write_state(&self) -> BucketWriteState {
        let mut state = self.shared.state.lock();
        let is_old = state.epoch_checked_at.is_none_or(|at| at.elapsed() >= MAX_EPOCH_CHECK_AGE);
        let is_idle = state.error.is_none() && state.away.is_none() && !state.is_checking_epoch;
        if is_old && is_idle && !self.shared.is_read_only && !state.is_closed {
            state.epoch_checked_at = Some(Instant::now());
            let shared = self.shared.clone();
            self.shared.lanes.push(move || {
                let mut state = shared.state.lock();
                if !state.is_checking_epoch && state.error.is_none() {
                    shared.verify_epoch(&mut state);
                }
            });
            // The answer usually comes soon.
            self.shared.changed.wait_for(&mut state, MAX_EPOCH_CHECK_WAIT);
        }
        BucketWriteState {
            error: state.error.as_ref().map(ToString::to_string),
            away: state
                .away
                .as_ref()
                .map(|away| (away.why.clone(), away.at))
                .or_else(|| self.shared.bucket.unanswered()),
            waiting_bytes: SharedState::waiting_bytes(&state) as u64,
        }
    }

    /// Returns the statistics of the journal, if there is one.
    pub fn journal_statistics(&self) -> Option<JournalStatistics> {
        self.shared.state.lock().journal_queue.as_ref().map(|keeping| keeping.kept)
    }

    /// After close: describes data that is only in the journal, with the reason.
    pub fn close_error(&self) -> Option<String> {
        self.close_message.lock().clone()
    }

    /// Returns counts of the bucket requests since the disk was opened.
    pub fn requests(&self) -> RequestStatistics {
        self.shared.bucket.requests()
    }

    /// Returns the number and bytes of live objects.
    pub fn usage(&self) -> (u64, u64) {
        let state = self.shared.state.lock();
        let objects = state.map.live_objects().count() as u64;
        (objects, state.names.values().map(|key| object_len(key)).sum::<u64>())
    }

    /// Resizes the disk. Sectors in both sizes keep their bytes. The last sectors of a smaller disk
    /// go to the root; those at the old end of a larger one go to an object.
    ///
    /// # Errors
    /// The size is too small, or errors of reading and writing.
    pub fn resize(&self, len_bytes: u64) -> Result<(), Error> {
        let (sectors, now) = (len_bytes / SECTOR_BYTES, self.properties().len_bytes / SECTOR_BYTES);
        if self.shared.is_read_only {
            return Err(Error::ReadOnly);
        }
        if !(EDGE_SECTORS * 4..MAX_SECTORS).contains(&sectors) {
            let len_now = now * SECTOR_BYTES;
            return Err(Error::OutOfRange {
                extent: Extent::new(0, len_bytes),
                len_bytes: len_now,
            });
        }
        let (edge, old_edge) = (sectors - EDGE_SECTORS, now - EDGE_SECTORS);
        // The sectors of either end that both sizes have.
        let moved = edge.min(old_edge)..sectors.min(now).min(edge.min(old_edge) + EDGE_SECTORS);
        let at = Extent::new(moved.start * SECTOR_BYTES, (moved.end - moved.start) * SECTOR_BYTES);
        let block = self.read_now(at, Block::private(at.len_bytes as usize));
        let block = block.map_err(|refused| refused.error)?;
        let bytes = Bytes::from(block.into_private().to_vec());
        let part = |from: u64, to: u64| {
            let place = |sector: u64| ((sector - moved.start) * SECTOR_BYTES) as usize;
            bytes.slice(place(from)..place(to))
        };
        {
            let mut state = self.shared.state.lock();
            if old_edge < edge {
                // Uploaded before the root: until that is there, the old end hides it.
                let to = moved.end.min(edge);
                self.shared.append_sectors(&mut state, moved.start, &part(moved.start, to));
            }
            let mut dead = vec![];
            state.map.clear(SectorRun { sector: edge, count: MAX_SECTORS - edge }, &mut dead);
            let next = state.next;
            state.retire_objects(dead, next);
            state.root.edge_sectors.retain(|sector, _| {
                *sector < EDGE_SECTORS || (*sector >= edge && *sector < sectors)
            });
            if edge <= old_edge {
                let of_end = moved.clone().map(|sector| (sector, part(sector, sector + 1)));
                state.root.edge_sectors.extend(of_end);
            }
            state.root.sectors = sectors;
        }
        // The resize is done once the bucket has the root.
        self.set_retry_transient(false);
        let written = self.write_root();
        self.set_retry_transient(true);
        written
    }

    /// Writes a root, and waits until it is durable in the bucket.
    pub(crate) fn write_root(&self) -> Result<(), Error> {
        let ticket = {
            let mut state = self.shared.state.lock();
            state.tickets += 1;
            self.shared.seal_root(&mut state);
            state.mark_tickets_queued();
            Ticket(state.tickets)
        };
        self.shared.wait(ticket, WaitGoal::Durable)
    }

    /// Uploads all data, deletes unneeded objects, and waits for both, as far as possible.
    pub fn close(&self) {
        self.set_retry_transient(false);
        {
            let mut state = self.shared.state.lock();
            // Data without a waiter may be lost, but need not be.
            if state.open.is_some() && state.error.is_none() {
                self.shared.seal_object(&mut state);
            }
            while state.sent < state.next && state.error.is_none() {
                self.shared.changed.wait(&mut state);
            }
            if std::mem::replace(&mut state.is_closed, true) {
                return;
            }
            let left = match self.has_journal {
                true => self.shared.close_journal(&mut state),
                false => self.shared.unsent_message(&state),
            };
            *self.close_message.lock() = left;
        }
        if let Some(pump) = self.uploader.lock().take() {
            // A thread that panicked has printed its message.
            let _ = pump.join();
        }
        self.shared.lanes.finish();
        // After a failure the epoch may be fenced, or acknowledged data may be missing.
        let is_whole = self.shared.state.lock().error.is_none();
        if self.shared.pace.releases_epoch && !self.shared.is_read_only && is_whole {
            self.shared.epoch.release(&self.shared.bucket);
        }
    }

    fn check_range(&self, at: Extent, into: &Block) -> Result<(), Error> {
        self.process.check()?;
        self.properties().check_range(at, into.len())
    }

    fn sector_run_of(extent: Extent) -> SectorRun {
        SectorRun {
            sector: extent.start_bytes / SECTOR_BYTES,
            count: extent.len_bytes / SECTOR_BYTES,
        }
    }

    /// Fills a block from memory; returns the ranges to read from the bucket.
    fn plan_ranges(&self, at: Extent, into: &mut Block) -> Vec<BlockRange> {
        let run = Self::sector_run_of(at);
        into.copy_in(0, &vec![0; into.len()]);
        let state = self.shared.state.lock();
        for (&sector, bytes) in state.root.edge_sectors.range(run.sector..run.sector + run.count) {
            into.copy_in(((sector - run.sector) * SECTOR_BYTES) as usize, bytes);
        }
        let mut parts: Vec<BlockRange> = vec![];
        for (sector, piece) in state.map.runs_within(run) {
            let place = ((sector - run.sector) * SECTOR_BYTES) as usize;
            let (from, len) = (piece.from * SECTOR_BYTES, (piece.count * SECTOR_BYTES) as usize);
            if let Some(bytes) = state.bytes_in_memory(self.shared.epoch.number, piece.object) {
                let from = from as usize;
                into.copy_in(place, &bytes[from..from + len]);
                continue;
            }
            let Some(key) = state.names.get(&piece.object) else { continue };
            match parts.last_mut() {
                Some(last)
                    if last.key == *key
                        && last.from_bytes + last.len as u64 == from
                        && last.into + last.len == place =>
                {
                    last.len += len;
                }
                _ => {
                    parts.push(BlockRange { key: key.clone(), from_bytes: from, len, into: place })
                }
            }
        }
        parts
    }
}

impl Disk for BucketDisk {
    fn properties(&self) -> Properties {
        Properties {
            len_bytes: self.shared.state.lock().root.sectors * SECTOR_BYTES,
            sector_bytes: SECTOR_BYTES as u32,
            best_io_bytes: OBJECT_BYTES as u32,
            rotational: false,
            read_only: self.shared.is_read_only,
            // A group may be longer than an object.
            atomic: Atomic::None,
            discards: !self.shared.is_read_only,
        }
    }

    fn refresh(&self) -> Result<(), Error> {
        self.process.check()?;
        if !self.shared.is_read_only {
            return Ok(());
        }
        let mut position = self.reader_position.lock();
        let (newest, end) = *position;
        match list_newer_state(&self.shared.bucket, newest, end)? {
            NewerState::Replaced(opened) => {
                *position = (opened.newest, opened.end);
                let mut state = self.shared.state.lock();
                (state.root, state.map, state.names) = (opened.root, opened.map, opened.names);
            }
            NewerState::More(objects) => {
                position.1 += objects.len() as u64;
                let mut state = self.shared.state.lock();
                let state = &mut *state;
                let mut dead = vec![];
                for (number, runs, key) in objects {
                    state.names.insert(number, key);
                    let mut from = 0;
                    for run in runs {
                        if let Some((skipped, within)) = state.root.clip_to_objects(run) {
                            state.map.set(within, number, from + skipped, &mut dead);
                        }
                        from += run.count;
                    }
                }
                dead.iter().for_each(|number| drop(state.names.remove(number)));
            }
        }
        Ok(())
    }

    fn read(&self, at: Extent, mut into: Block, _: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.check_range(at, &into) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let parts = self.plan_ranges(at, &mut into);
        if parts.is_empty() {
            return Pending::ready(Ok(into));
        }
        let (promise, pending) = promise_pair();
        let left = parts.len();
        let gathered = PartialBlock { into, promise, left, error: None };
        let gathered = Arc::new(Mutex::new(Some(gathered)));
        for part in parts {
            let (gathered, shared) = (gathered.clone(), self.shared.clone());
            self.shared
                .lanes
                .push(move || PartialBlock::add_part(&gathered, &part, shared.fetch(&part)));
        }
        pending
    }

    fn read_now(&self, at: Extent, mut into: Block) -> ReadAnswer {
        if let Err(error) = self.check_range(at, &into) {
            return Err(Refused { payload: Some(into), error });
        }
        let parts = self.plan_ranges(at, &mut into);
        if let [part] = &parts[..] {
            return match self.shared.fetch(part) {
                Ok(bytes) => {
                    into.copy_in(part.into, &bytes);
                    Ok(into)
                }
                Err(error) => Err(Refused { payload: Some(into), error }),
            };
        }
        if parts.is_empty() {
            return Ok(into);
        }
        let answer = self.read(at, into, Urgency::Now).wait();
        answer.unwrap_or(Err(Refused { payload: None, error: Error::ServiceEnded }))
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let refused = |chain, error| Err(Refused { payload: Some(chain), error });
        if let Err(inherited) = self.process.check() {
            return refused(chain, inherited);
        }
        let properties = self.properties();
        if properties.read_only {
            return refused(chain, Error::ReadOnly);
        }
        if let Err(error) = properties.check_chain(&chain) {
            return refused(chain, error);
        }
        let mut state = self.shared.state.lock();
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > state.tickets) {
            return refused(chain, Error::UnknownTicket(unknown));
        }
        self.shared.wait_for_memory_space(&mut state);
        if let Some(error) = state.error.clone() {
            return refused(chain, error);
        }
        let mut tickets = Vec::with_capacity(chain.len());
        for group in &chain {
            self.shared.queue_group(&mut state, group);
            tickets.push(Ticket(state.tickets));
        }
        if state.is_root_due {
            self.shared.seal_root(&mut state);
        }
        state.mark_tickets_queued();
        Ok(tickets)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.process.check()?;
        match self.has_journal {
            true => self.shared.wait_journaled(ticket),
            false => self.shared.wait(ticket, WaitGoal::Sent),
        }
    }

    fn wait_commit_interval(&self) {
        if self.process.check().is_ok() {
            self.shared.wait_commit_interval();
        }
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.process.check()?;
        match self.has_journal {
            true => self.shared.wait_journaled(ticket),
            false => self.shared.wait(ticket, WaitGoal::Durable),
        }
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.process.check()?;
        self.properties().check_extents(extents)?;
        let mut state = self.shared.state.lock();
        if let Some(&unknown) = after.iter().find(|ticket| ticket.0 > state.tickets) {
            return Err(Error::UnknownTicket(unknown));
        }
        if self.shared.is_read_only {
            return Ok(());
        }
        let mut dead = vec![];
        for whole in extents.iter().filter_map(|extent| extent.inner_aligned_extent(SECTOR_BYTES)) {
            state.map.clear(Self::sector_run_of(whole), &mut dead);
        }
        // They may be needed until a later root is durable.
        let next = state.next;
        state.retire_objects(dead, next);
        Ok(())
    }
}

impl Drop for BucketDisk {
    fn drop(&mut self) {
        if self.process.check().is_err() {
            // Their threads are not here, and cannot be waited for.
            std::mem::forget((self.shared.clone(), self.uploader.get_mut().take()));
        } else if !self.shared.state.lock().is_closed {
            self.close();
            self.close_error().iter().for_each(|left| log::warn!("{left}"));
        }
    }
}

/// Returns the length of an object, from its name.
fn object_len(key: &str) -> u64 {
    match ObjectName::parse(key) {
        Some(ObjectName::Data(_, runs)) => {
            runs.iter().map(|run| run.count).sum::<u64>() * SECTOR_BYTES
        }
        _ => 0,
    }
}

/// A block that is filled by several requests.
struct PartialBlock {
    into: Block,
    promise: Promise<ReadAnswer>,
    left: usize,
    error: Option<Error>,
}

impl PartialBlock {
    fn add_part(gathered: &Mutex<Option<Self>>, part: &BlockRange, answer: Result<Bytes, Error>) {
        let mut slot = gathered.lock();
        let Some(all) = &mut *slot else { return };
        match answer {
            Ok(bytes) => {
                all.into.copy_in(part.into, &bytes);
            }
            Err(error) => all.error = Some(error),
        }
        all.left -= 1;
        if all.left > 0 {
            return;
        }
        let Some(Self { into, promise, error, .. }) = slot.take() else { return };
        promise.fulfill_promise(match error {
            None => Ok(into),
            Some(error) => Err(Refused { payload: Some(into), error }),
        });
    }
}

impl SharedState {
    fn fetch(self: &Arc<Self>, part: &BlockRange) -> Result<Bytes, Error> {
        let range = (part.from_bytes, part.len as u64);
        match &self.cache {
            None => self.read_with_readahead(&part.key, range),
            Some(cache) => cache.read(&part.key, object_len(&part.key), range, |from, len| {
                self.read_with_readahead(&part.key, (from, len))
            }),
        }
    }

    /// Reads a range of an object, and starts read-ahead.
    fn read_with_readahead(
        self: &Arc<Self>,
        key: &Arc<str>,
        (from, len): (u64, u64),
    ) -> Result<Bytes, Error> {
        let wanted = ObjectRange { key: key.clone(), from, len };
        if len >= MAX_WINDOW_BYTES {
            return self.fetch_range(&wanted);
        }
        let (step, more) = self.ahead.read(&wanted, object_len, |key| self.following_object(key));
        for window in more {
            let shared = self.clone();
            self.lanes.push(move || {
                if shared.ahead.claim_window(&window) {
                    let came = shared.fetch_range(&window);
                    shared.ahead.complete_window(&window, came.as_ref().ok());
                }
            });
        }
        let asked = match step {
            ReadAction::Received(bytes) => return Ok(bytes),
            ReadAction::Ask(asked) => asked,
        };
        let came = self.fetch_range(&asked);
        self.ahead.complete_window(&asked, came.as_ref().ok());
        let skip = (from - asked.from) as usize;
        Ok(came?.slice(skip..skip + len as usize))
    }

    /// Returns the object that was written next, if the bucket has it.
    fn following_object(&self, key: &str) -> Option<Arc<str>> {
        let Some(ObjectName::Data(number, _)) = ObjectName::parse(key) else { return None };
        let next = ObjectNumber { sequence: number.sequence + 1, ..number };
        let state = self.state.lock();
        let is_sent = state.bytes_in_memory(self.epoch.number, next).is_none();
        state.names.get(&next).filter(|_| is_sent).cloned()
    }

    fn fetch_range(&self, span: &ObjectRange) -> Result<Bytes, Error> {
        let trouble = match self.bucket.get(&span.key, Some((span.from, span.len))) {
            Ok(bytes) if bytes.len() as u64 == span.len => return Ok(bytes),
            Ok(bytes) => {
                RequestError::Permanent(format!("{} bytes came of {}", bytes.len(), span.len))
            }
            Err(trouble) => trouble,
        };
        Err(self.bucket.error("reading", &span.key, &trouble))
    }
}
