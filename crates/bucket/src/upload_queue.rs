//! Upload queue: data that is not durable yet.
//!
//! ```text
//!   open pack ─▶ sealed: an object with a number ─▶ sent, several at once ─▶ durable
//! ```
//!
//! Law 1: object numbers have no gaps and follow the order of writes.
//! Law 2: a root is uploaded after all objects before it.
//! Law 3: uploaded objects are durable once a later check finds the epoch current.
//! Law 4: a failure is permanent: nothing is uploaded after it.
//! Law 5: a mount retries transient errors without limit. Its data stays in memory, single requests
//! probe the bucket, and waiters get an error after the deadline.

mod journal_queue;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use draconis_device::{Error, Group, Ticket};
use draconis_types::lock::{Condvar, Mutex, MutexGuard};

pub(crate) use self::journal_queue::JournalQueue;
use crate::api::RequestError;
use crate::cache::ChunkCache;
use crate::epoch::Epoch;
use crate::map::SectorMap;
use crate::name::{ObjectName, ObjectNumber, SectorRun, can_append_run};
use crate::read_ahead::ReadAhead;
use crate::request_threads::RequestThreads;
use crate::retry::RetryingStore;
use crate::root::{EDGE_SECTORS, Root};
use crate::{OBJECT_BYTES, SECTOR_BYTES};

/// Write policy of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePolicy {
    /// Minimum interval between awaited commits.
    pub commit: Duration,
    pub lanes: usize,
    /// True if the epoch is released at close.
    pub releases_epoch: bool,
}

/// State of a disk that all its threads share.
pub(crate) struct SharedState {
    pub bucket: RetryingStore,
    pub cache: Option<ChunkCache>,
    pub ahead: ReadAhead,
    pub lanes: Arc<RequestThreads>,
    pub pace: WritePolicy,
    pub is_read_only: bool,
    pub epoch: Epoch,
    pub state: Mutex<QueueState>,
    pub changed: Condvar,
    /// Wakes the uploader of a journal.
    pub uploader_wakes: Condvar,
}

/// Mutable state.
pub(crate) struct QueueState {
    pub root: Root,
    pub map: SectorMap,
    pub names: HashMap<ObjectNumber, Arc<str>>,

    /// Receives writes.
    pub open: Option<OpenObject>,
    /// Sealed and not uploaded yet.
    pub sealed: BTreeMap<u64, SealedObject>,
    /// Number of the next object.
    pub next: u64,
    /// All objects before this one were uploaded.
    pub sent: u64,
    /// Later ones that were uploaded.
    pub sent_early: BTreeSet<u64>,
    /// All objects before this one are durable.
    pub durable: u64,
    pub is_checking_epoch: bool,
    pub last_sealed: Option<Instant>,

    pub tickets: u64,
    pub durable_ticket: u64,
    /// Last ticket of each object that is not durable.
    pub ends: VecDeque<(u64, u64)>,

    /// True if writes to the ends of the disk are in no root yet.
    pub is_root_due: bool,
    /// Roots of this writer.
    pub roots: VecDeque<u64>,
    /// Unneeded objects, with the number of the object that replaced them.
    pub dead: Vec<(Arc<str>, u64)>,
    pub error: Option<Error>,
    /// True if transient errors are retried and do not stop the disk.
    pub retries_transient: bool,
    /// Set while the bucket is not available.
    pub away: Option<Outage>,
    pub is_probing: bool,
    /// Time of the last epoch check.
    pub epoch_checked_at: Option<Instant>,
    pub is_closed: bool,
    /// Journal queue, if there is a journal.
    pub journal_queue: Option<JournalQueue>,
}

/// Unavailability of the bucket: reason and start.
#[derive(Clone, Debug)]
pub(crate) struct Outage {
    pub why: String,
    pub since: Instant,
    pub at: SystemTime,
}

/// Most bytes in memory for a bucket that is away before writers wait.
const MAX_OUTAGE_BYTES: usize = 64 << 20;

/// An object that is being filled.
pub(crate) struct OpenObject {
    pub nth: u64,
    pub runs: Vec<SectorRun>,
    pub bytes: Vec<u8>,
}

#[derive(Clone)]
pub(crate) struct SealedObject {
    pub key: Arc<str>,
    pub bytes: Bytes,
    pub is_root: bool,
    pub is_sending: bool,
    /// Number of the journal record that must be durable before the upload.
    pub needs_record: u64,
}

/// Goal of a waiter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitGoal {
    Sent,
    Durable,
}

impl QueueState {
    /// Returns true if transient errors are retried in the background.
    pub fn should_retry_transient(&self) -> bool {
        self.error.is_none() && self.retries_transient
    }

    /// Returns the bytes of an own object that may not be in the bucket yet.
    pub fn bytes_in_memory(&self, epoch: u32, object: ObjectNumber) -> Option<&[u8]> {
        if object.epoch != epoch {
            return None;
        }
        match &self.open {
            Some(pack) if pack.nth == object.sequence => Some(&pack.bytes),
            _ => self.sealed.get(&object.sequence).map(|sealed| &sealed.bytes[..]),
        }
    }

    /// Marks objects as unneeded from object `nth` on.
    pub fn retire_objects(&mut self, dead: Vec<ObjectNumber>, nth: u64) {
        for object in dead {
            // An open object has no name yet, and is dead already when it gets one.
            if let Some(key) = self.names.remove(&object) {
                self.dead.push((key, nth));
            }
        }
    }

    /// Records the object with a ticket's last bytes.
    fn record_ticket_end(&mut self, ticket: u64, nth: u64) {
        match self.ends.back_mut() {
            Some(last) if last.1 == nth => last.0 = ticket,
            Some(last) if last.0 == ticket => last.1 = nth,
            _ => self.ends.push_back((ticket, nth)),
        }
    }
}

impl SharedState {
    /// Queues one group: sectors at the ends go to the root, the rest to objects.
    pub fn queue_group(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>, group: &Group) {
        let has_data = |state: &QueueState| {
            let mut starts = group.writes.iter().map(|write| write.at_bytes / SECTOR_BYTES);
            starts.any(|sector| !state.root.has_sector(sector))
        };
        // Data after a root needs a later number.
        if state.is_root_due && has_data(state) {
            self.seal_root(state);
        }
        for write in &group.writes {
            let mut bytes = vec![0; write.block.len()];
            write.block.copy_out(0, &mut bytes);
            let bytes = Bytes::from(bytes);
            let first = write.at_bytes / SECTOR_BYTES;
            let count = bytes.len() as u64 / SECTOR_BYTES;
            let slice = |from: u64, to: u64| {
                bytes.slice(
                    ((from - first) * SECTOR_BYTES) as usize
                        ..((to - first) * SECTOR_BYTES) as usize,
                )
            };
            let mut sector = first;
            while sector < first + count {
                if state.root.has_sector(sector) {
                    state.root.edge_sectors.insert(sector, slice(sector, sector + 1));
                    state.is_root_due = true;
                    sector += 1;
                    continue;
                }
                // At most one object, and only up to the end's sectors.
                let most = sector + state.object_bytes() / SECTOR_BYTES;
                let edge = state.root.sectors - EDGE_SECTORS;
                let to = (first + count).min(most).min(edge);
                self.append_sectors(state, sector, &slice(sector, to));
                sector = to;
            }
        }
        state.tickets += 1;
        let ticket = state.tickets;
        if state.is_root_due {
            // It ends in the next root.
            return;
        }
        let last = state.next.checked_sub(1).filter(|last| *last >= state.durable);
        match last {
            Some(nth) => state.record_ticket_end(ticket, nth),
            // It changes nothing, and all before it is durable.
            None => state.durable_ticket = ticket,
        }
    }

    /// Appends sectors to the open object.
    pub fn append_sectors(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, QueueState>,
        sector: u64,
        bytes: &Bytes,
    ) {
        let run = SectorRun { sector, count: bytes.len() as u64 / SECTOR_BYTES };
        let most = state.object_bytes();
        let has_room = state.open.as_ref().is_none_or(|pack| {
            let continues = pack.runs.last().is_some_and(|last| last.sector + last.count == sector);
            let len = pack.bytes.len() as u64;
            len + bytes.len() as u64 <= most
                && (continues || can_append_run(&pack.runs, run) && len < OBJECT_BYTES / 16)
        });
        if !has_room {
            self.seal_object(state);
        }
        if state.open.is_none() {
            // The first object of an epoch states the live ones of older epochs.
            if state.next == 0 {
                self.seal_root(state);
            }
            let nth = state.next;
            state.next += 1;
            state.open = Some(OpenObject { nth, runs: vec![], bytes: vec![] });
        }
        let Some(pack) = &mut state.open else { return };
        let (nth, from) = (pack.nth, pack.bytes.len() as u64 / SECTOR_BYTES);
        pack.bytes.extend_from_slice(bytes);
        match pack.runs.last_mut() {
            Some(last) if last.sector + last.count == sector => last.count += run.count,
            _ => pack.runs.push(run),
        }
        state.queue_part(nth, run, bytes);
        let mut dead = vec![];
        state.map.set(
            run,
            ObjectNumber { epoch: self.epoch.number, sequence: nth },
            from,
            &mut dead,
        );
        state.retire_objects(dead, nth);
    }

    /// Seals the open object and uploads it.
    pub fn seal_object(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        let Some(OpenObject { nth, runs, bytes }) = state.open.take() else { return };
        let number = ObjectNumber { epoch: self.epoch.number, sequence: nth };
        let key: Arc<str> = ObjectName::Data(number, runs).key().into();
        state.names.insert(number, key.clone());
        state.last_sealed = Some(Instant::now());
        let needs = state.last_needed_record();
        let sealed = SealedObject {
            key,
            bytes: bytes.into(),
            is_root: false,
            is_sending: false,
            needs_record: needs,
        };
        state.sealed.insert(nth, sealed);
        self.upload(state, nth);
        self.uploader_wakes.notify_one();
    }

    /// Seals a root with the sectors at the ends of the disk.
    pub fn seal_root(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        self.seal_object(state);
        let nth = state.next;
        state.next += 1;
        state.is_root_due = false;
        let key: Arc<str> =
            ObjectName::Root(ObjectNumber { epoch: self.epoch.number, sequence: nth }).key().into();
        let bytes = state.root.encode();
        state.roots.push_back(nth);
        let last = state.tickets;
        state.record_ticket_end(last, nth);
        state.queue_root(nth, &bytes);
        let needs = state.last_needed_record();
        state.sealed.insert(
            nth,
            SealedObject { key, bytes, is_root: true, is_sending: false, needs_record: needs },
        );
        self.upload(state, nth);
        self.uploader_wakes.notify_one();
    }

    /// Uploads a sealed object, unless it has to wait for earlier ones or for the journal.
    pub fn upload(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>, nth: u64) {
        let sent = state.sent;
        let needs = state.sealed.get(&nth).map_or(0, |sealed| sealed.needs_record);
        if !state.is_journaled(needs) {
            return;
        }
        let Some(sealed) = state.sealed.get_mut(&nth) else { return };
        if sealed.is_sending || sealed.is_root && sent < nth {
            return;
        }
        // While the bucket is away, only the probe sends.
        if state.away.is_some() && state.journal_queue.is_none() {
            return;
        }
        let Some(sealed) = state.sealed.get_mut(&nth) else { return };
        sealed.is_sending = true;
        let (shared, sealed) = (self.clone(), sealed.clone());
        self.lanes.push(move || shared.upload_now(nth, &sealed));
    }

    /// Uploads a sealed object in this thread.
    fn upload_now(self: &Arc<Self>, nth: u64, sealed: &SealedObject) {
        let begun = (Instant::now(), SystemTime::now());
        let put = match sealed.is_root {
            false => self.bucket.put(&sealed.key, &sealed.bytes),
            // No other writer has the epoch, if the bucket keeps its guarantees.
            true => self.bucket.create(&sealed.key, &sealed.bytes),
        };
        let mut state = self.state.lock();
        match put {
            Ok(()) => self.mark_sent(&mut state, nth),
            Err(trouble @ RequestError::Transient(_)) if state.should_retry_transient() => {
                if let Some(sealed) = state.sealed.get_mut(&nth) {
                    sealed.is_sending = false;
                }
                let why = format!("writing {}/{}: {trouble}", self.bucket.address, sealed.key);
                self.mark_unavailable(&mut state, why, begun);
            }
            Err(trouble) => {
                let error = self.bucket.error("writing", &sealed.key, &trouble);
                state.error.get_or_insert(error);
            }
        }
        self.changed.notify_all();
    }

    /// Records that the bucket is away: uploads are retried without limit.
    fn mark_unavailable(
        self: &Arc<Self>,
        state: &mut QueueState,
        why: String,
        begun: (Instant, SystemTime),
    ) {
        match &mut state.away {
            Some(away) => away.why = why,
            None => {
                log::warn!("{why}; the upload is retried until it succeeds");
                let (since, at) = begun;
                state.away = Some(Outage { why, since, at });
            }
        }
        if state.journal_queue.is_some() {
            return self.start_backoff(state);
        }
        if !std::mem::replace(&mut state.is_probing, true) {
            let shared = self.clone();
            self.lanes.push(move || shared.probe_until_available());
        }
    }

    /// Records that the bucket is back, or makes all waiters check that.
    pub fn mark_available(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        if state.away.take().is_some() {
            log::info!("{} takes what is written again", self.bucket.address);
            self.upload_all(state);
            self.changed.notify_all();
        }
    }

    /// Sends single requests to a bucket that is away, until one works.
    fn probe_until_available(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            let until = Instant::now() + self.bucket.next_backoff();
            while state.away.is_some() && state.error.is_none() && Instant::now() < until {
                self.changed.wait_until(&mut state, until);
            }
            if state.away.is_none() || state.error.is_some() {
                break;
            }
            let is_asking = state.is_checking_epoch;
            match state.sealed.first_entry() {
                Some(first) if first.get().is_sending => {}
                Some(mut first) => {
                    first.get_mut().is_sending = true;
                    let (nth, sealed) = (*first.key(), first.get().clone());
                    MutexGuard::unlocked(&mut state, || self.upload_now(nth, &sealed));
                }
                None if is_asking => {}
                None => self.verify_epoch(&mut state),
            }
        }
        state.is_probing = false;
    }

    /// Returns a mount's message at close about data that was not uploaded.
    pub fn unsent_message(&self, state: &QueueState) -> Option<String> {
        let (bytes, address) = (Self::waiting_bytes(state), &self.bucket.address);
        let error = state.error.as_ref().filter(|_| self.pace.releases_epoch && bytes > 0)?;
        Some(format!("{bytes} bytes that were written last are not in {address}: {error}"))
    }

    /// Returns the bytes that are not in the bucket.
    pub fn waiting_bytes(state: &QueueState) -> usize {
        let open = state.open.as_ref().map_or(0, |pack| pack.bytes.len());
        open + state.sealed.values().map(|sealed| sealed.bytes.len()).sum::<usize>()
    }

    fn mark_sent(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>, nth: u64) {
        state.sealed.remove(&nth);
        state.sent_early.insert(nth);
        while state.sent_early.first() == Some(&state.sent) {
            state.sent_early.pop_first();
            state.sent += 1;
        }
        self.mark_available(state);
        let next = state.sent;
        self.upload(state, next);
        self.uploader_wakes.notify_one();
    }

    /// Waits for the minimum interval between awaited commits.
    pub fn wait_commit_interval(&self) {
        let mut state = self.state.lock();
        // A journal needs no interval: its data is durable.
        while state.journal_queue.is_none() && state.error.is_none() && !state.is_closed {
            let due = state.last_sealed.map(|last| last + self.pace.commit);
            let Some(due) = due.filter(|due| *due > Instant::now()) else { return };
            self.changed.wait_until(&mut state, due);
        }
    }

    pub fn wait(self: &Arc<Self>, ticket: Ticket, until: WaitGoal) -> Result<(), Error> {
        let mut state = self.state.lock();
        let begun = Instant::now();
        loop {
            if ticket.0 > state.tickets {
                return Err(Error::UnknownTicket(ticket));
            }
            if ticket.0 <= state.durable_ticket {
                return Ok(());
            }
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            let nth = state.ends.iter().find(|(last, _)| *last >= ticket.0).map(|(_, nth)| *nth);
            let Some(nth) = nth else { return Ok(()) };
            if state.open.as_ref().is_some_and(|pack| pack.nth == nth) {
                let due = state.last_sealed.map(|last| last + self.pace.commit);
                match due.filter(|due| until == WaitGoal::Durable && *due > Instant::now()) {
                    Some(due) => drop(self.changed.wait_until(&mut state, due)),
                    None => self.seal_object(&mut state),
                }
            } else if until == WaitGoal::Sent
                && (state.sent > nth
                    || state.away.is_some() && Self::waiting_bytes(&state) < MAX_OUTAGE_BYTES)
            {
                return Ok(());
            } else if state.sent <= nth || state.is_checking_epoch || state.away.is_some() {
                self.wait_through_outage(&mut state, until, begun)?;
            } else {
                self.verify_epoch(&mut state);
            }
        }
    }

    /// Waits for a change; for durability not much longer than the deadline.
    fn wait_through_outage(
        &self,
        state: &mut MutexGuard<'_, QueueState>,
        until: WaitGoal,
        begun: Instant,
    ) -> Result<(), Error> {
        if !state.should_retry_transient() || until == WaitGoal::Sent {
            self.changed.wait(state);
            return Ok(());
        }
        let deadline = self.bucket.deadline();
        // Several waits do not take several deadlines.
        let end = match &state.away {
            Some(away) => {
                (away.since.min(begun) + deadline).max(begun + self.bucket.next_backoff())
            }
            None => begun + deadline,
        };
        if self.changed.wait_until(state, end).timed_out() && Instant::now() >= end {
            let address = &self.bucket.address;
            let why = match &state.away {
                Some(away) => format!("{}; it waits in memory", away.why),
                None => format!("{address} has not answered for {} s", deadline.as_secs()),
            };
            return Err(Error::Unreachable(why.into()));
        }
        Ok(())
    }

    /// Checks the epoch; if it is current, objects uploaded before are durable.
    pub fn verify_epoch(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        let sent = state.sent;
        let begun = (Instant::now(), SystemTime::now());
        state.epoch_checked_at = Some(begun.0);
        state.is_checking_epoch = true;
        let answer = MutexGuard::unlocked(state, || self.epoch.is_current(&self.bucket));
        state.is_checking_epoch = false;
        match answer {
            Ok(true) => {
                self.mark_durable(state, sent);
                // Sealed objects probe by themselves.
                if state.journal_queue.is_some() || state.sealed.is_empty() {
                    self.mark_available(state);
                }
            }
            Ok(false) => {
                let error = MutexGuard::unlocked(state, || self.epoch.fenced_error(&self.bucket));
                state.error.get_or_insert(error);
            }
            Err(trouble @ RequestError::Transient(_)) if state.should_retry_transient() => {
                let (address, key) = (&self.bucket.address, self.epoch.key());
                self.mark_unavailable(
                    state,
                    format!("asking for {address}/{key}: {trouble}"),
                    begun,
                );
            }
            Err(trouble) => {
                let error = self.bucket.error("asking for", &self.epoch.key(), &trouble);
                state.error.get_or_insert(error);
            }
        }
        self.changed.notify_all();
    }

    fn mark_durable(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>, sent: u64) {
        state.durable = state.durable.max(sent);
        while let Some(&(last, nth)) = state.ends.front()
            && nth < state.durable
        {
            state.durable_ticket = last;
            state.ends.pop_front();
        }
        let durable = state.durable;
        let are_durable = state.roots.iter().take_while(|nth| **nth < durable).count();
        // The older one of two durable roots is kept for readers.
        while state.roots.len() > 1 && state.roots[1] < durable && are_durable > 1 {
            let Some(old) = state.roots.pop_front() else { break };
            let key: Arc<str> =
                ObjectName::Root(ObjectNumber { epoch: self.epoch.number, sequence: old })
                    .key()
                    .into();
            state.dead.push((key, old));
        }
        let Some(&root) = state.roots.front().filter(|nth| **nth < durable) else { return };
        let all = std::mem::take(&mut state.dead);
        let (gone, kept) = all.into_iter().partition(|(_, since)| *since < root);
        state.dead = kept;
        let gone: Vec<(Arc<str>, u64)> = gone;
        for (key, _) in gone {
            let shared = self.clone();
            self.lanes.push(move || {
                // It only takes space; the next opener tries again.
                if let Err(trouble) = shared.bucket.delete(&key) {
                    log::warn!("{}", shared.bucket.error("deleting", &key, &trouble));
                }
            });
        }
    }
}
