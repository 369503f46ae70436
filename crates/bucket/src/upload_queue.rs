//! What was written and is not durable yet.
//!
//! ```text
//!   open pack ─▶ sealed: an object with a number ─▶ sent, several at once ─▶ durable
//! ```
//!
//! Law 1: objects have numbers without a gap, in the order in which they were written.
//! Law 2: a root is sent when all before it was.
//! Law 3: what was sent is durable once the epoch was found to be ours after that.
//! Law 4: what fails once fails for good: nothing is sent afterwards that follows it.
//! Law 5: for a writer that stays what passes is no failure, however long it takes: what was
//! written is kept in memory, one request at a time asks whether the bucket takes it now, and who
//! waits is told after the deadline that it is away.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use draconis_device::{Error, Group, Ticket};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::api::RequestError;
use crate::cache::Cache;
use crate::epoch::Epoch;
use crate::journal_queue::JournalQueue;
use crate::map::SectorMap;
use crate::name::{Name, ObjectNumber, SectorRun, has_room};
use crate::read_ahead::ReadAhead;
use crate::request_threads::RequestThreads;
use crate::retry::RetryingStore;
use crate::root::{EDGE_SECTORS, Root};
use crate::{OBJECT_BYTES, SECTOR};

/// How a disk goes about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePolicy {
    /// What is waited for is not sent sooner after what was sent before.
    pub commit: Duration,
    pub lanes: usize,
    /// The epoch is given back at the end.
    pub gives_back: bool,
}

/// A disk, for all who work for it.
pub(crate) struct Shared {
    pub bucket: RetryingStore,
    pub cache: Option<Cache>,
    pub ahead: ReadAhead,
    pub lanes: Arc<RequestThreads>,
    pub pace: WritePolicy,
    pub is_read_only: bool,
    pub epoch: Epoch,
    pub state: Mutex<State>,
    pub changed: Condvar,
    /// For who works behind a journal.
    pub pump_wakes: Condvar,
}

/// What changes.
pub(crate) struct State {
    pub root: Root,
    pub map: SectorMap,
    pub names: HashMap<ObjectNumber, Arc<str>>,

    /// Takes what is written.
    pub open: Option<OpenObject>,
    /// Sealed and not sent yet.
    pub sealed: BTreeMap<u64, SealedObject>,
    /// The next object has this number.
    pub next: u64,
    /// All before this one were sent.
    pub sent: u64,
    /// Those behind it that were.
    pub sent_early: BTreeSet<u64>,
    /// All before this one are durable.
    pub durable: u64,
    pub is_asking: bool,
    pub last_sealed: Option<Instant>,

    pub tickets: u64,
    pub durable_ticket: u64,
    /// The last ticket of each object that is not durable.
    pub ends: VecDeque<(u64, u64)>,

    /// What was written to the ends of the disk is in no root yet.
    pub is_root_due: bool,
    /// Roots of ours.
    pub roots: VecDeque<u64>,
    /// Objects that nothing leads to from the object with the number on.
    pub dead: Vec<(Arc<str>, u64)>,
    pub error: Option<Error>,
    /// What passes is not the end.
    pub is_patient: bool,
    /// The bucket takes nothing at present.
    pub away: Option<Away>,
    pub is_probing: bool,
    /// When it was last asked whether the epoch is still ours.
    pub asked_at: Option<Instant>,
    pub is_closed: bool,
    /// What concerns the journal, if there is one.
    pub keeping: Option<JournalQueue>,
}

/// Why nothing is taken, and since when.
#[derive(Clone, Debug)]
pub(crate) struct Away {
    pub why: String,
    pub since: Instant,
    pub at: SystemTime,
}

/// So much may be on its way to a bucket that is away before writers wait for it.
const AWAY_BYTES: usize = 64 << 20;

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
    /// The draft up to which the journal has to have all before it is sent.
    pub needs_record: u64,
}

/// What a waiter waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitGoal {
    Sent,
    Durable,
}

impl State {
    /// Whether what passes is waited for, behind.
    pub fn is_patient(&self) -> bool {
        self.error.is_none() && self.is_patient
    }

    /// The bytes of an object of ours that may not be in the bucket yet.
    pub fn in_memory(&self, epoch: u32, object: ObjectNumber) -> Option<&[u8]> {
        if object.epoch != epoch {
            return None;
        }
        match &self.open {
            Some(pack) if pack.nth == object.sequence => Some(&pack.bytes),
            _ => self.sealed.get(&object.sequence).map(|sealed| &sealed.bytes[..]),
        }
    }

    /// These objects are not needed from the object `nth` on.
    pub fn retire(&mut self, dead: Vec<ObjectNumber>, nth: u64) {
        for object in dead {
            // One that is still open has no name yet; what is in it is dead when it gets one.
            if let Some(key) = self.names.remove(&object) {
                self.dead.push((key, nth));
            }
        }
    }

    /// A ticket's last bytes are in an object.
    fn ends_in(&mut self, ticket: u64, nth: u64) {
        match self.ends.back_mut() {
            Some(last) if last.1 == nth => last.0 = ticket,
            Some(last) if last.0 == ticket => last.1 = nth,
            _ => self.ends.push_back((ticket, nth)),
        }
    }
}

impl Shared {
    /// Takes one group: parts of it go to the root, the rest to packs.
    pub fn queue_group(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, group: &Group) {
        let has_data = |state: &State| {
            let mut starts = group.writes.iter().map(|write| write.at_bytes / SECTOR);
            starts.any(|sector| !state.root.has(sector))
        };
        // What comes after a root has a later number.
        if state.is_root_due && has_data(state) {
            self.seal_root(state);
        }
        for write in &group.writes {
            let mut bytes = vec![0; write.block.len()];
            write.block.copy_out(0, &mut bytes);
            let bytes = Bytes::from(bytes);
            let first = write.at_bytes / SECTOR;
            let count = bytes.len() as u64 / SECTOR;
            let slice = |from: u64, to: u64| {
                bytes.slice(((from - first) * SECTOR) as usize..((to - first) * SECTOR) as usize)
            };
            let mut sector = first;
            while sector < first + count {
                if state.root.has(sector) {
                    state.root.edge_sectors.insert(sector, slice(sector, sector + 1));
                    state.is_root_due = true;
                    sector += 1;
                    continue;
                }
                // As much as one object takes, and no more than there is before the end's.
                let most = sector + state.object_bytes() / SECTOR;
                let edge = state.root.sectors - EDGE_SECTORS;
                let to = (first + count).min(most).min(edge);
                self.put(state, sector, &slice(sector, to));
                sector = to;
            }
        }
        state.tickets += 1;
        let ticket = state.tickets;
        if state.is_root_due {
            // It ends in the root that will be.
            return;
        }
        let last = state.next.checked_sub(1).filter(|last| *last >= state.durable);
        match last {
            Some(nth) => state.ends_in(ticket, nth),
            // It changes nothing, and all before it is durable.
            None => state.durable_ticket = ticket,
        }
    }

    /// Puts sectors into the open pack.
    pub fn put(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, sector: u64, bytes: &Bytes) {
        let run = SectorRun { sector, count: bytes.len() as u64 / SECTOR };
        let most = state.object_bytes();
        let has_room = state.open.as_ref().is_none_or(|pack| {
            let continues = pack.runs.last().is_some_and(|last| last.sector + last.count == sector);
            let len = pack.bytes.len() as u64;
            len + bytes.len() as u64 <= most
                && (continues || has_room(&pack.runs, run) && len < OBJECT_BYTES / 16)
        });
        if !has_room {
            self.seal(state);
        }
        if state.open.is_none() {
            // The first object of an epoch says which of those before count.
            if state.next == 0 {
                self.seal_root(state);
            }
            let nth = state.next;
            state.next += 1;
            state.open = Some(OpenObject { nth, runs: vec![], bytes: vec![] });
        }
        let Some(pack) = &mut state.open else { return };
        let (nth, from) = (pack.nth, pack.bytes.len() as u64 / SECTOR);
        pack.bytes.extend_from_slice(bytes);
        match pack.runs.last_mut() {
            Some(last) if last.sector + last.count == sector => last.count += run.count,
            _ => pack.runs.push(run),
        }
        state.draft(nth, run, bytes);
        let mut dead = vec![];
        state.map.set(
            run,
            ObjectNumber { epoch: self.epoch.number, sequence: nth },
            from,
            &mut dead,
        );
        state.retire(dead, nth);
    }

    /// Ends the open pack and sends it.
    pub fn seal(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        let Some(OpenObject { nth, runs, bytes }) = state.open.take() else { return };
        let number = ObjectNumber { epoch: self.epoch.number, sequence: nth };
        let key: Arc<str> = Name::Data(number, runs).key().into();
        state.names.insert(number, key.clone());
        state.last_sealed = Some(Instant::now());
        let needs = state.last_draft();
        let sealed = SealedObject {
            key,
            bytes: bytes.into(),
            is_root: false,
            is_sending: false,
            needs_record: needs,
        };
        state.sealed.insert(nth, sealed);
        self.send(state, nth);
        self.pump_wakes.notify_one();
    }

    /// Makes a root of what the ends of the disk have.
    pub fn seal_root(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        self.seal(state);
        let nth = state.next;
        state.next += 1;
        state.is_root_due = false;
        let key: Arc<str> =
            Name::Root(ObjectNumber { epoch: self.epoch.number, sequence: nth }).key().into();
        let bytes = state.root.encode();
        state.roots.push_back(nth);
        let last = state.tickets;
        state.ends_in(last, nth);
        state.draft_root(nth, &bytes);
        let needs = state.last_draft();
        state.sealed.insert(
            nth,
            SealedObject { key, bytes, is_root: true, is_sending: false, needs_record: needs },
        );
        self.send(state, nth);
        self.pump_wakes.notify_one();
    }

    /// Sends a sealed object, unless it has to wait for those before it, or for the journal.
    pub fn send(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, nth: u64) {
        let sent = state.sent;
        let needs = state.sealed.get(&nth).map_or(0, |sealed| sealed.needs_record);
        if !state.is_journaled(needs) {
            return;
        }
        let Some(sealed) = state.sealed.get_mut(&nth) else { return };
        if sealed.is_sending || sealed.is_root && sent < nth {
            return;
        }
        // Until the bucket takes something again, one asks for all.
        if state.away.is_some() && state.keeping.is_none() {
            return;
        }
        let Some(sealed) = state.sealed.get_mut(&nth) else { return };
        sealed.is_sending = true;
        let (shared, sealed) = (self.clone(), sealed.clone());
        self.lanes.push(move || shared.send_now(nth, &sealed));
    }

    /// Sends a sealed object in this thread.
    fn send_now(self: &Arc<Self>, nth: u64, sealed: &SealedObject) {
        let begun = (Instant::now(), SystemTime::now());
        let put = match sealed.is_root {
            false => self.bucket.put(&sealed.key, &sealed.bytes),
            // No other has the epoch, if the bucket keeps its promises.
            true => self.bucket.create(&sealed.key, &sealed.bytes),
        };
        let mut state = self.state.lock();
        match put {
            Ok(()) => self.mark_sent(&mut state, nth),
            Err(trouble @ RequestError::Transient(_)) if state.is_patient() => {
                if let Some(sealed) = state.sealed.get_mut(&nth) {
                    sealed.is_sending = false;
                }
                let why = format!("writing {}/{}: {trouble}", self.bucket.address, sealed.key);
                self.is_away(&mut state, why, begun);
            }
            Err(trouble) => {
                let error = self.bucket.error("writing", &sealed.key, &trouble);
                state.error.get_or_insert(error);
            }
        }
        self.changed.notify_all();
    }

    /// The bucket does not take what is sent: it is asked again later, as long as it takes.
    fn is_away(self: &Arc<Self>, state: &mut State, why: String, begun: (Instant, SystemTime)) {
        match &mut state.away {
            Some(away) => away.why = why,
            None => {
                log::warn!("{why}; it is tried again until it can be done");
                let (since, at) = begun;
                state.away = Some(Away { why, since, at });
            }
        }
        if state.keeping.is_some() {
            return self.start_backoff(state);
        }
        if !std::mem::replace(&mut state.is_probing, true) {
            let shared = self.clone();
            self.lanes.push(move || shared.probe());
        }
    }

    /// It is not away any more, or that is to be found out by all who wait.
    pub fn is_back(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        if state.away.take().is_some() {
            log::info!("{} takes what is written again", self.bucket.address);
            self.send_all(state);
            self.changed.notify_all();
        }
    }

    /// Asks a bucket that is away for one thing at a time, until it does that.
    fn probe(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            let until = Instant::now() + self.bucket.rest();
            while state.away.is_some() && state.error.is_none() && Instant::now() < until {
                self.changed.wait_until(&mut state, until);
            }
            if state.away.is_none() || state.error.is_some() {
                break;
            }
            let is_asking = state.is_asking;
            match state.sealed.first_entry() {
                Some(first) if first.get().is_sending => {}
                Some(mut first) => {
                    first.get_mut().is_sending = true;
                    let (nth, sealed) = (*first.key(), first.get().clone());
                    MutexGuard::unlocked(&mut state, || self.send_now(nth, &sealed));
                }
                None if is_asking => {}
                None => self.verify_epoch(&mut state),
            }
        }
        state.is_probing = false;
    }

    /// What is said at the end of what could not be sent, by a writer that stayed.
    pub fn left_behind(&self, state: &State) -> Option<String> {
        let (bytes, address) = (Self::waiting_bytes(state), &self.bucket.address);
        let error = state.error.as_ref().filter(|_| self.pace.gives_back && bytes > 0)?;
        Some(format!("{bytes} bytes that were written last are not in {address}: {error}"))
    }

    /// Bytes that were written and that the bucket does not have.
    pub fn waiting_bytes(state: &State) -> usize {
        let open = state.open.as_ref().map_or(0, |pack| pack.bytes.len());
        open + state.sealed.values().map(|sealed| sealed.bytes.len()).sum::<usize>()
    }

    fn mark_sent(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, nth: u64) {
        state.sealed.remove(&nth);
        state.sent_early.insert(nth);
        while state.sent_early.first() == Some(&state.sent) {
            state.sent_early.pop_first();
            state.sent += 1;
        }
        self.is_back(state);
        let next = state.sent;
        self.send(state, next);
        self.pump_wakes.notify_one();
    }

    /// Waits until what is waited for may be sent.
    pub fn wait_commit_interval(&self) {
        let mut state = self.state.lock();
        // A journal has its own pace: what it has is durable.
        while state.keeping.is_none() && state.error.is_none() && !state.is_closed {
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
                    None => self.seal(&mut state),
                }
            } else if until == WaitGoal::Sent
                && (state.sent > nth
                    || state.away.is_some() && Self::waiting_bytes(&state) < AWAY_BYTES)
            {
                return Ok(());
            } else if state.sent <= nth || state.is_asking || state.away.is_some() {
                self.wait_patiently(&mut state, until, begun)?;
            } else {
                self.verify_epoch(&mut state);
            }
        }
    }

    /// Waits for something to change; for what is durable not much longer than the deadline.
    fn wait_patiently(
        &self,
        state: &mut MutexGuard<'_, State>,
        until: WaitGoal,
        begun: Instant,
    ) -> Result<(), Error> {
        if !state.is_patient() || until == WaitGoal::Sent {
            self.changed.wait(state);
            return Ok(());
        }
        let deadline = self.bucket.deadline();
        // What takes several waits does not take as many deadlines.
        let end = match &state.away {
            Some(away) => (away.since.min(begun) + deadline).max(begun + self.bucket.rest()),
            None => begun + deadline,
        };
        if self.changed.wait_until(state, end).timed_out() && Instant::now() >= end {
            let address = &self.bucket.address;
            let why = match &state.away {
                Some(away) => format!("{}; it waits in memory", away.why),
                None => format!("{address} has not answered for {} s", deadline.as_secs()),
            };
            return Err(Error::Away(why.into()));
        }
        Ok(())
    }

    /// Asks whether the epoch is still ours; if so, what was sent before is durable.
    pub fn verify_epoch(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        let sent = state.sent;
        let begun = (Instant::now(), SystemTime::now());
        state.asked_at = Some(begun.0);
        state.is_asking = true;
        let answer = MutexGuard::unlocked(state, || self.epoch.is_current(&self.bucket));
        state.is_asking = false;
        match answer {
            Ok(true) => {
                self.mark_durable(state, sent);
                // What is sealed asks for itself.
                if state.keeping.is_some() || state.sealed.is_empty() {
                    self.is_back(state);
                }
            }
            Ok(false) => {
                let error = MutexGuard::unlocked(state, || self.epoch.fenced_error(&self.bucket));
                state.error.get_or_insert(error);
            }
            Err(trouble @ RequestError::Transient(_)) if state.is_patient() => {
                let (address, key) = (&self.bucket.address, self.epoch.key());
                self.is_away(state, format!("asking for {address}/{key}: {trouble}"), begun);
            }
            Err(trouble) => {
                let error = self.bucket.error("asking for", &self.epoch.key(), &trouble);
                state.error.get_or_insert(error);
            }
        }
        self.changed.notify_all();
    }

    fn mark_durable(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, sent: u64) {
        state.durable = state.durable.max(sent);
        while let Some(&(last, nth)) = state.ends.front()
            && nth < state.durable
        {
            state.durable_ticket = last;
            state.ends.pop_front();
        }
        let durable = state.durable;
        let are_durable = state.roots.iter().take_while(|nth| **nth < durable).count();
        // Of two durable roots the older one is for those who read.
        while state.roots.len() > 1 && state.roots[1] < durable && are_durable > 1 {
            let Some(old) = state.roots.pop_front() else { break };
            let key: Arc<str> =
                Name::Root(ObjectNumber { epoch: self.epoch.number, sequence: old }).key().into();
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
                // It only takes room; who opens the store next tries again.
                if let Err(trouble) = shared.bucket.delete(&key) {
                    log::warn!("{}", shared.bucket.error("deleting", &key, &trouble));
                }
            });
        }
    }
}
