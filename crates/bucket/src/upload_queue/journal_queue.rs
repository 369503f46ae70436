//! Journal queue: writes are acknowledged once they are durable in the journal; an uploader thread
//! sends them to the bucket.
//!
//! ```text
//!   written ─▶ drafts ── keep: one flush for all who wait ─▶ kept: acknowledged
//!                                    │ all of an object
//!                                    ▼
//!                    pump: sealed, sent, found to be durable ─▶ room in the journal
//! ```
//!
//! Law 1: an object is uploaded once it is sealed and all of it is in the journal.
//! Law 2: a full journal makes writers wait as long as uploads make progress. If none succeeds
//! within the retry deadline, writing stops.
//! Law 3: while the journal has space, an unreachable bucket affects no writer. Closing the disk
//! waits for the retry deadline.
//! Law 4: if the journal fails, its acknowledged data is still uploaded.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use draconis_device::{Error, Ticket};
use draconis_types::lock::MutexGuard;

use crate::OBJECT_BYTES;
use crate::advice::step_after_retries;
use crate::journal::{Journal, JournalStatistics, PendingRecord};
use crate::name::{ObjectName, ObjectNumber, SectorRun};
use crate::remote;
use crate::upload_queue::{QueueState, SharedState};

/// Most bytes of one write to the journal, and of data in memory before writers wait.
const BATCH_BYTES: u64 = 8 << 20;
/// Most bytes of one record.
const MAX_RECORD_BYTES: u64 = 1 << 20;
const MAX_RECORD_RUNS: usize = 32;
/// Poll interval of writers that wait for journal space.
const SPACE_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Commit intervals between two epoch checks of the uploader, unless a waiter needs one sooner.
const EPOCH_CHECK_COMMITS: u32 = 20;

/// Journal queue of a disk.
pub(crate) struct JournalQueue {
    /// None while a thread writes it.
    journal: Option<Journal>,
    pub place: Arc<str>,
    /// Length limit of objects, so that the journal holds several of any structure.
    object_bytes: u64,
    pub kept: JournalStatistics,
    /// Records that are not in the journal yet.
    drafts: VecDeque<PendingRecord>,
    drafts_bytes: u64,
    /// Number of records being written.
    in_flight: u64,
    /// Number of durable records, from the first on.
    flushed: u64,
    /// Tickets with the number of their last record.
    marks: VecDeque<(u64, u64)>,
    /// All tickets up to here are durable in the journal.
    journaled_ticket: u64,
    /// Newest object with durable data, and the number of its durable bytes.
    newest: (u64, u64),
    wants_room: bool,
    is_half_full: bool,
    /// Start of a time without progress, and the sent and durable counts of then.
    no_progress_since: Option<(Instant, u64, u64)>,
    last_asked: Option<Instant>,
    /// End of a back-off after the bucket was unreachable.
    pub backoff_until: Option<Instant>,
    pub is_over: bool,
}

impl JournalQueue {
    pub fn new(journal: Journal) -> Self {
        Self {
            place: journal.location().into(),
            object_bytes: journal.object_bytes(),
            kept: journal.kept,
            journal: Some(journal),
            drafts: VecDeque::new(),
            drafts_bytes: 0,
            in_flight: 0,
            flushed: 0,
            marks: VecDeque::new(),
            journaled_ticket: 0,
            newest: (u64::MAX, 0),
            wants_room: false,
            is_half_full: false,
            no_progress_since: None,
            last_asked: None,
            backoff_until: None,
            is_over: false,
        }
    }

    /// Takes the journal's statistics, but keeps the count of waits.
    fn add_statistics(&mut self, kept: JournalStatistics) {
        self.kept = JournalStatistics { full: self.kept.full, ..kept };
    }

    /// Returns the number of the last record, from the first on.
    fn last_record(&self) -> u64 {
        self.flushed + self.in_flight + self.drafts.len() as u64
    }

    fn append_part(&mut self, nth: u64, run: SectorRun, bytes: &Bytes) {
        self.drafts_bytes += bytes.len() as u64;
        let last = self.drafts.back_mut().filter(|last| {
            let has_room = last.len() < MAX_RECORD_BYTES && last.runs.len() < MAX_RECORD_RUNS;
            last.nth == nth && !last.is_root && has_room
        });
        let Some(last) = last else {
            let bytes = vec![bytes.clone()];
            self.drafts.push_back(PendingRecord { nth, runs: vec![run], bytes, is_root: false });
            return;
        };
        last.bytes.push(bytes.clone());
        match last.runs.last_mut() {
            Some(before) if before.sector + before.count == run.sector => before.count += run.count,
            _ => last.runs.push(run),
        }
    }

    fn mark_flushed(&mut self, done: &[PendingRecord]) {
        self.flushed += done.len() as u64;
        for draft in done {
            self.drafts_bytes -= draft.len();
            let before = if self.newest.0 == draft.nth { self.newest.1 } else { 0 };
            self.newest = (draft.nth, before + draft.len());
        }
        while let Some((ticket, _)) = self.marks.pop_front_if(|(_, last)| *last <= self.flushed) {
            self.journaled_ticket = ticket;
        }
    }
}

impl QueueState {
    /// Queues a part of an object for the journal.
    pub fn queue_part(&mut self, nth: u64, run: SectorRun, bytes: &Bytes) {
        if let Some(keeping) = &mut self.journal_queue {
            keeping.append_part(nth, run, bytes);
        }
    }

    pub fn queue_root(&mut self, nth: u64, bytes: &Bytes) {
        if let Some(keeping) = &mut self.journal_queue {
            keeping.drafts_bytes += bytes.len() as u64;
            let bytes = vec![bytes.clone()];
            keeping.drafts.push_back(PendingRecord { nth, runs: vec![], bytes, is_root: true });
        }
    }

    /// Records that all tickets so far have their records queued.
    pub fn mark_tickets_queued(&mut self) {
        let ticket = self.tickets;
        if let Some(keeping) = &mut self.journal_queue {
            let last = keeping.last_record();
            match last == keeping.flushed {
                true => keeping.journaled_ticket = ticket,
                false => keeping.marks.push_back((ticket, last)),
            }
        }
    }

    /// Returns the length limit of an object.
    pub fn object_bytes(&self) -> u64 {
        self.journal_queue.as_ref().map_or(OBJECT_BYTES, |keeping| keeping.object_bytes)
    }

    /// Returns the number of the last record needed by an object that is sealed now.
    pub fn last_needed_record(&self) -> u64 {
        self.journal_queue.as_ref().map_or(0, JournalQueue::last_record)
    }

    pub fn is_journaled(&self, draft: u64) -> bool {
        self.journal_queue.as_ref().is_none_or(|keeping| draft <= keeping.flushed)
    }
}

impl SharedState {
    /// Waits until a ticket is durable in the journal.
    pub fn wait_journaled(self: &Arc<Self>, ticket: Ticket) -> Result<(), Error> {
        let mut state = self.state.lock();
        loop {
            let Some(keeping) = &state.journal_queue else { return Err(Error::ServiceEnded) };
            if ticket.0 > state.tickets {
                return Err(Error::UnknownTicket(ticket));
            }
            if ticket.0 <= keeping.journaled_ticket {
                return Ok(());
            }
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            self.write_journal_or_wait(&mut state);
        }
    }

    /// Waits while too many bytes are only in memory.
    pub fn wait_for_memory_space(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        while state.error.is_none()
            && state.journal_queue.as_ref().is_some_and(|it| it.drafts_bytes > BATCH_BYTES)
        {
            self.write_journal_or_wait(state);
        }
    }

    fn write_journal_or_wait(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        match state.journal_queue.as_ref().is_some_and(|keeping| keeping.journal.is_some()) {
            true => self.write_journal(state),
            false => self.changed.wait(state),
        }
    }

    /// Writes queued records to the journal, as far as they fit; without space, waits briefly for
    /// some.
    fn write_journal(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        let (durable, epoch) = (state.durable, self.epoch.number);
        let Some(keeping) = &mut state.journal_queue else { return };
        let Some(mut journal) = keeping.journal.take() else { return };
        let (mut drafts, mut len) = (vec![], 0);
        while len < BATCH_BYTES
            && let Some(draft) = keeping.drafts.pop_front()
        {
            len += draft.len();
            drafts.push(draft);
        }
        keeping.in_flight = drafts.len() as u64;
        let done = MutexGuard::unlocked(state, || -> Result<usize, Error> {
            if let Some(first) = drafts.first().filter(|first| !journal.has_room_for(first)) {
                if !journal.can_hold(first) {
                    let (place, len) = (journal.location(), first.len());
                    return Err(remote(format!("{place} is too short for {len} bytes at once")));
                }
                journal.release(durable)?;
            }
            journal.write(epoch, &drafts)
        });
        let Some(keeping) = &mut state.journal_queue else { return };
        keeping.add_statistics(journal.kept);
        keeping.is_half_full = journal.is_half_full();
        keeping.journal = Some(journal);
        keeping.in_flight = 0;
        let count = *done.as_ref().unwrap_or(&0);
        let had_drafts = !drafts.is_empty();
        for draft in drafts.drain(count..).rev() {
            keeping.drafts.push_front(draft);
        }
        keeping.mark_flushed(&drafts);
        match done {
            Ok(0) if had_drafts => return self.wait_for_journal_space(state),
            Ok(_) => {
                (keeping.wants_room, keeping.no_progress_since) = (false, None);
                self.upload_all(state);
            }
            Err(error) => {
                state.error.get_or_insert(error);
                self.upload_acknowledged(state);
            }
        }
        self.changed.notify_all();
        self.uploader_wakes.notify_one();
    }

    /// Handles a full journal: wakes the uploader and waits, up to the deadline.
    fn wait_for_journal_space(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        let (now, sent, durable) = (Instant::now(), state.sent, state.durable);
        let Some(keeping) = &mut state.journal_queue else { return };
        if !std::mem::replace(&mut keeping.wants_room, true) {
            keeping.kept.full += 1;
        }
        let moved = keeping
            .no_progress_since
            .is_none_or(|(_, before, then)| (before, then) != (sent, durable));
        if moved {
            keeping.no_progress_since = Some((now, sent, durable));
        }
        let since = keeping.no_progress_since.map_or(now, |(since, ..)| since);
        if now.duration_since(since) > self.bucket.deadline() + SPACE_POLL_INTERVAL {
            let (place, address) = (keeping.place.clone(), &self.bucket.address);
            let away = state.away.as_ref().map(|away| away.why.clone());
            let why = away.or_else(|| self.bucket.unanswered_error());
            let why = why.unwrap_or_else(|| "no request was answered".to_owned());
            let error = remote(format!(
                "{place} is full, and {address} has taken nothing of it for {} seconds: {why}{}. What \
                 was acknowledged is in {place}: the next command or mount with this journal sends it",
                self.bucket.deadline().as_secs(),
                step_after_retries(&why),
            ));
            state.error.get_or_insert(error);
        }
        self.changed.notify_all();
        self.uploader_wakes.notify_one();
        if state.error.is_none() {
            self.changed.wait_for(state, SPACE_POLL_INTERVAL);
        }
    }

    /// Uploads all complete objects that are not being sent.
    pub fn upload_all(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        let waiting = state.sealed.iter().filter(|(_, sealed)| !sealed.is_sending);
        let waiting: Vec<u64> = waiting.map(|(nth, _)| *nth).collect();
        for nth in waiting {
            self.upload(state, nth);
        }
    }

    /// After a failure of the journal, uploads the acknowledged part of an incomplete object. An
    /// opening that reassembles the object from the journal later does not send it again.
    fn upload_acknowledged(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) {
        let Some(keeping) = &state.journal_queue else { return };
        let ((nth, kept), flushed) = (keeping.newest, keeping.flushed);
        let open = state.open.as_ref().filter(|pack| pack.nth == nth);
        let (runs, bytes) = match (open, state.sealed.get(&nth)) {
            (Some(pack), _) => (pack.runs.clone(), Bytes::copy_from_slice(&pack.bytes)),
            (None, Some(sealed)) if !sealed.is_root && sealed.needs_record > flushed => {
                let Some(ObjectName::Data(_, runs)) = ObjectName::parse(&sealed.key) else {
                    return;
                };
                (runs, sealed.bytes.clone())
            }
            _ => return,
        };
        let mut left = kept / crate::SECTOR_BYTES;
        let cut = |run: SectorRun| {
            let count = run.count.min(left);
            left -= count;
            (count > 0).then_some(SectorRun { count, ..run })
        };
        let runs: Vec<SectorRun> = runs.into_iter().map_while(cut).collect();
        if runs.is_empty() {
            return;
        }
        let key =
            ObjectName::Data(ObjectNumber { epoch: self.epoch.number, sequence: nth }, runs).key();
        let (shared, bytes) = (self.clone(), bytes.slice(..kept as usize));
        self.lanes.push(move || {
            if let Err(trouble) = shared.bucket.put(&key, &bytes) {
                log::warn!("{}", shared.bucket.error("writing", &key, &trouble));
            }
        });
    }

    /// Starts a back-off, because the bucket could not be reached.
    pub fn start_backoff(&self, state: &mut QueueState) {
        let until = Instant::now() + self.bucket.next_backoff();
        let Some(keeping) = &mut state.journal_queue else { return };
        if keeping.backoff_until.replace(until).is_none() {
            let (address, place) = (&self.bucket.address, &keeping.place);
            log::warn!("{address}: what is written waits in {place}");
        }
        self.uploader_wakes.notify_one();
    }

    /// Runs the uploader until the disk is closed.
    pub fn run_uploader(self: &Arc<Self>) {
        let mut state = self.state.lock();
        while state.journal_queue.as_ref().is_some_and(|keeping| !keeping.is_over) {
            let due = match state.error {
                None => self.upload_step(&mut state),
                Some(_) => Some(Instant::now() + SPACE_POLL_INTERVAL),
            };
            match due {
                Some(due) if due <= Instant::now() => {}
                Some(due) => drop(self.uploader_wakes.wait_until(&mut state, due)),
                None => self.uploader_wakes.wait(&mut state),
            }
        }
    }

    /// Does one step, or returns the time of the next one.
    fn upload_step(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) -> Option<Instant> {
        let now = Instant::now();
        let commit = self.pace.commit;
        let Some(keeping) = &mut state.journal_queue else { return None };
        let mut due: Option<Instant> = None;
        let mut at = |moment: Instant| due = Some(due.map_or(moment, |it| it.min(moment)));
        // The back-off is over.
        let rests_until = keeping.backoff_until;
        if let Some(until) = rests_until {
            if until <= now {
                keeping.backoff_until = None;
                self.upload_all(state);
                return Some(now);
            }
            at(until);
        }
        // After the commit interval, the journal's data goes to the bucket.
        let newest = keeping.newest.0;
        let wants_room = keeping.wants_room;
        let is_pressing = wants_room || keeping.is_half_full;
        let (last_asked, has_journal) = (keeping.last_asked, keeping.journal.is_some());
        let (has_drafts, is_long) =
            (!keeping.drafts.is_empty(), keeping.drafts_bytes > BATCH_BYTES / 2);
        if state.open.as_ref().is_some_and(|pack| pack.nth == newest) {
            let next = state.last_sealed.map(|last| last + commit);
            match next.filter(|next| *next > now && !wants_room) {
                Some(next) => at(next),
                None => {
                    self.seal_object(state);
                    return Some(now);
                }
            }
        }
        // Uploaded objects are durable if the epoch is still current.
        if state.sent > state.durable && !state.is_checking_epoch && rests_until.is_none() {
            let next = last_asked.map(|last| last + commit * EPOCH_CHECK_COMMITS);
            match next.filter(|next| *next > now && !is_pressing) {
                Some(next) => at(next),
                None => {
                    if let Some(keeping) = &mut state.journal_queue {
                        keeping.last_asked = Some(now);
                    }
                    self.verify_epoch(state);
                    return Some(now);
                }
            }
        }
        if !has_journal {
            // Its user will notify.
            return due;
        }
        let is_complete = |nth: &u64| {
            state.sealed.get(nth).is_some_and(|it| !state.is_journaled(it.needs_record))
        };
        let is_wanted = state.sealed.keys().next_back().is_some_and(is_complete);
        if has_drafts && (is_wanted || is_long) {
            self.write_journal(state);
            return Some(now);
        }
        // The bucket has everything: release all records.
        let has_all = !has_drafts && state.open.is_none() && state.durable == state.next;
        // Others may have been added meanwhile.
        if has_all && self.release_journal_space(state) {
            return Some(now);
        }
        due
    }

    /// Releases the space of all objects that the bucket has.
    fn release_journal_space(self: &Arc<Self>, state: &mut MutexGuard<'_, QueueState>) -> bool {
        let durable = state.durable;
        let Some(keeping) = &mut state.journal_queue else { return false };
        let Some(mut journal) = keeping.journal.take_if(|it| it.first_object().is_some()) else {
            return false;
        };
        let done = MutexGuard::unlocked(state, || journal.release(durable));
        let Some(keeping) = &mut state.journal_queue else { return false };
        keeping.add_statistics(journal.kept);
        keeping.is_half_full = journal.is_half_full();
        keeping.journal = Some(journal);
        if let Err(error) = done {
            state.error.get_or_insert(error);
        }
        self.changed.notify_all();
        true
    }

    /// Closes the journal once the bucket has everything. Returns a message if that was impossible.
    pub fn close_journal(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, QueueState>,
    ) -> Option<String> {
        while state.error.is_none() && state.durable < state.next {
            match state.is_checking_epoch {
                true => self.changed.wait(state),
                false => self.verify_epoch(state),
            }
        }
        let keeping = state.journal_queue.as_mut()?;
        keeping.is_over = true;
        self.uploader_wakes.notify_one();
        while state.journal_queue.as_ref().is_some_and(|keeping| keeping.journal.is_none()) {
            self.changed.wait(state);
        }
        let has_failed = state.error.is_some();
        let keeping = state.journal_queue.as_mut()?;
        let journal = keeping.journal.as_mut()?;
        let emptied = if has_failed { Ok(()) } else { journal.mark_empty() };
        let kept = journal.kept;
        keeping.add_statistics(kept);
        let (place, address) = (keeping.place.clone(), &self.bucket.address);
        if let Err(error) = emptied {
            state.error = Some(error);
        }
        let error = state.error.as_ref()?;
        Some(format!("{place} keeps what was acknowledged and {address} has not: {error}"))
    }
}
