//! In-memory bucket with injected faults.
//!
//! ```text
//!   client, its faults ──┐
//!   client ──────────────┴─ server: objects, requests that did not arrive yet
//! ```
//!
//! Law 1: the server keeps its guarantees, except those that a test removes.
//! Law 2: faults belong to a client, and follow from a seed and the order of its requests. A
//! refused request may have been done, or be done later, even after its client died.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use draconis_device::Random;
use draconis_types::lock::Mutex;

use crate::api::{BucketApi, ListEntry, RequestError, RequestResult};

/// Objects of one page of a list.
const LIST_PAGE_KEYS: usize = 4;

/// Faults of a client: one request in so many, 0 for none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Faults {
    /// Seed of a run.
    pub seed: u64,
    /// Refused, and not done.
    pub refused: u64,
    /// Done, with the answer lost.
    pub lost: u64,
    /// Refused, and done later.
    pub late: u64,
    /// Answered only after later requests.
    pub slow: u64,
    /// Number of requests after which the client is dead: no later request is answered.
    pub dies_after: Option<u64>,
}

/// Guarantees of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerGuarantees {
    /// Creation fails if the object exists.
    pub creates_once: bool,
    /// Lists include all earlier writes.
    pub lists_all: bool,
    /// A range request returns only the range.
    pub ranges: bool,
    /// Deleted objects are gone.
    pub deletes: bool,
}

impl ServerGuarantees {
    /// All guarantees.
    pub const ALL: Self = Self { creates_once: true, lists_all: true, ranges: true, deletes: true };
}

/// A client of an in-memory bucket.
pub struct MemoryBucket {
    server: Arc<Mutex<ServerState>>,
    client: Mutex<ClientState>,
}

struct ServerState {
    objects: BTreeMap<String, Bytes>,
    guarantees: ServerGuarantees,
    requests: u64,
    /// Time and change.
    late: Vec<(u64, BucketChange)>,
}

#[derive(Clone)]
enum BucketChange {
    Put(String, Bytes),
    Create(String, Bytes),
    Delete(String),
}

struct ClientState {
    faults: Faults,
    dice: Random,
    requests: u64,
}

/// Result of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestOutcome {
    Done,
    Refused,
    Lost,
    Late(u64),
    Dead,
}

impl Default for MemoryBucket {
    fn default() -> Self {
        Self::with_guarantees(ServerGuarantees::ALL)
    }
}

impl MemoryBucket {
    /// Creates an empty bucket whose server has only these guarantees.
    pub fn with_guarantees(guarantees: ServerGuarantees) -> Self {
        let server =
            ServerState { objects: BTreeMap::new(), guarantees, requests: 0, late: vec![] };
        Self::with_server(Arc::new(Mutex::new(server)), Faults::default())
    }

    /// Returns another client of the same bucket.
    #[must_use]
    pub fn client(&self, faults: Faults) -> Self {
        Self::with_server(self.server.clone(), faults)
    }

    fn with_server(server: Arc<Mutex<ServerState>>, faults: Faults) -> Self {
        let client = ClientState { faults, dice: Random::new(faults.seed), requests: 0 };
        Self { server, client: Mutex::new(client) }
    }

    /// Replaces the faults of this client.
    pub fn set_faults(&self, faults: Faults) {
        let mut client = self.client.lock();
        *client = ClientState { faults, dice: Random::new(faults.seed), requests: 0 };
    }

    /// Returns all keys.
    pub fn keys(&self) -> Vec<String> {
        self.server.lock().objects.keys().cloned().collect()
    }

    fn draw_outcome(&self) -> RequestOutcome {
        let mut client = self.client.lock();
        client.requests += 1;
        let Faults { refused, lost, late, slow, dies_after, .. } = client.faults;
        let mut is_one_of = |many: u64| many > 0 && client.dice.next_below(many) == 0;
        let (is_refused, is_lost, is_late) = (is_one_of(refused), is_one_of(lost), is_one_of(late));
        let is_slow = is_one_of(slow);
        let delay = client.dice.next_below(40);
        let is_dead = dies_after.is_some_and(|most| client.requests > most);
        // Its last requests may still arrive.
        let is_last = dies_after.is_some_and(|most| client.requests <= most + 8);
        let arrives = is_dead && is_last && client.dice.next_below(3) == 0;
        drop(client);
        if is_slow {
            std::thread::sleep(Duration::from_micros(delay * 5));
        }
        match (is_dead, is_refused, is_lost, is_late) {
            (true, ..) if arrives => RequestOutcome::Late(delay),
            (true, ..) => RequestOutcome::Dead,
            (_, true, ..) => RequestOutcome::Refused,
            (_, _, true, _) => RequestOutcome::Lost,
            (.., true) => RequestOutcome::Late(delay),
            _ => RequestOutcome::Done,
        }
    }

    fn run_change(&self, change: BucketChange) -> RequestResult<()> {
        let fate = self.draw_outcome();
        let mut server = self.server.lock();
        server.advance_time();
        match fate {
            RequestOutcome::Done => server.apply(change),
            RequestOutcome::Refused => Err(RequestError::Transient("503 slow down".to_owned())),
            RequestOutcome::Lost => {
                let _ = server.apply(change);
                Err(RequestError::Transient("the connection broke".to_owned()))
            }
            RequestOutcome::Late(delay) => {
                let due = server.requests + delay;
                server.late.push((due, change));
                Err(RequestError::Transient("no answer".to_owned()))
            }
            RequestOutcome::Dead => Err(RequestError::Permanent("the machine is off".to_owned())),
        }
    }

    fn run_read<T>(&self, look: impl FnOnce(&ServerState) -> RequestResult<T>) -> RequestResult<T> {
        let fate = self.draw_outcome();
        let mut server = self.server.lock();
        server.advance_time();
        match fate {
            RequestOutcome::Done => look(&server),
            RequestOutcome::Dead => Err(RequestError::Permanent("the machine is off".to_owned())),
            _ => Err(RequestError::Transient("503 slow down".to_owned())),
        }
    }
}

impl ServerState {
    /// Advances time: late requests may arrive.
    fn advance_time(&mut self) {
        self.requests += 1;
        let now = self.requests;
        let (due, late) = std::mem::take(&mut self.late).into_iter().partition(|it| it.0 <= now);
        self.late = late;
        let due: Vec<(u64, BucketChange)> = due;
        for (_, change) in due {
            let _ = self.apply(change);
        }
    }

    fn apply(&mut self, change: BucketChange) -> RequestResult<()> {
        match change {
            BucketChange::Create(key, _)
                if self.guarantees.creates_once && self.objects.contains_key(&key) =>
            {
                return Err(RequestError::AlreadyExists);
            }
            BucketChange::Put(key, bytes) | BucketChange::Create(key, bytes) => {
                self.objects.insert(key, bytes);
            }
            BucketChange::Delete(key) if self.guarantees.deletes => drop(self.objects.remove(&key)),
            BucketChange::Delete(_) => {}
        }
        Ok(())
    }
}

impl BucketApi for MemoryBucket {
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.run_change(BucketChange::Put(key.to_owned(), bytes))
    }

    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.run_change(BucketChange::Create(key.to_owned(), bytes))
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        self.run_read(|server| {
            let bytes = server.objects.get(key).ok_or(RequestError::NotFound)?;
            let Some((from, len)) = range.filter(|_| server.guarantees.ranges) else {
                return Ok(bytes.clone());
            };
            let from = (from as usize).min(bytes.len());
            let to = from.saturating_add(len as usize).min(bytes.len());
            Ok(bytes.slice(from..to))
        })
    }

    fn head(&self, key: &str) -> RequestResult<u64> {
        self.run_read(|server| {
            server.objects.get(key).map(|bytes| bytes.len() as u64).ok_or(RequestError::NotFound)
        })
    }

    fn delete(&self, key: &str) -> RequestResult<()> {
        self.run_change(BucketChange::Delete(key.to_owned()))
    }

    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        let folder = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let mut found: Vec<ListEntry> = vec![];
        // Page by page: a list is not atomic. It fails before the first page or not at all: a list
        // of many pages would never end.
        self.run_read(|_| Ok(()))?;
        loop {
            let last = found.last().map_or(&folder, |listed| &listed.key).clone();
            let page = {
                let server = self.server.lock();
                let all = server.objects.range::<String, _>((Excluded(&last), Unbounded));
                let all = all.filter(|_| server.guarantees.lists_all);
                let within = all.take_while(|(key, _)| key.starts_with(&folder));
                let listed = |(key, bytes): (&String, &Bytes)| ListEntry {
                    key: key.clone(),
                    len_bytes: bytes.len() as u64,
                };
                within.take(LIST_PAGE_KEYS).map(listed).collect::<Vec<_>>()
            };
            let is_last = page.len() < LIST_PAGE_KEYS;
            found.extend(page);
            if is_last {
                return Ok(found);
            }
            std::thread::yield_now();
        }
    }
}
