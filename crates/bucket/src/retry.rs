//! Requests that are tried again, within bounds, and counted.
//!
//! Law 1: what passes is tried again until the deadline, at longer and longer intervals; before
//! anything was ever answered, a shorter one: an address that is wrong is told soon.
//! What a server refuses passes if it has done the like before: what is refused from the start is
//! told at once.
//! Law 2: an answer may be lost and its effect not. What is written twice is the same both times,
//! and who creates what is there looks whether it is its own.
//! Law 3: a bucket that could not be reached until a deadline is asked once for each request, until
//! it answers again: what takes several requests does not wait as many times.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use draconis_device::{Error, Random};

use crate::api::{BucketApi, ListEntry, RequestError, RequestResult};

/// How long the first answer may take.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// The longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(3);

/// How often each kind of request was made, tries counted one by one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Requests {
    /// Objects written, or tried to.
    pub puts: u64,
    /// Objects read, whole or in part.
    pub gets: u64,
    /// Questions whether an object is there.
    pub heads: u64,
    /// Lists; one of very many objects takes more than one request.
    pub lists: u64,
    /// Objects deleted.
    pub deletes: u64,
    /// Requests of all kinds that were tried again.
    pub again: u64,
    /// Bytes sent with puts.
    pub sent_bytes: u64,
    /// Bytes that came with gets.
    pub received_bytes: u64,
}

#[derive(Debug, Default)]
struct Counts {
    puts: AtomicU64,
    gets: AtomicU64,
    heads: AtomicU64,
    lists: AtomicU64,
    deletes: AtomicU64,
    again: AtomicU64,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

/// A bucket that is asked again.
#[derive(Clone)]
pub(crate) struct RetryingStore {
    engine: Arc<dyn BucketApi>,
    /// What it is called in errors.
    pub address: Arc<str>,
    deadline: Duration,
    pause: Duration,
    counts: Arc<Counts>,
    has_answered: Arc<AtomicBool>,
    /// It has written something.
    has_written: Arc<AtomicBool>,
    /// It has told of something that is there.
    has_told: Arc<AtomicBool>,
    /// It was tried until a deadline, and nothing was answered since.
    is_away: Arc<AtomicBool>,
}

impl RetryingStore {
    pub fn new(
        engine: Arc<dyn BucketApi>,
        address: &str,
        deadline: Duration,
        pause: Duration,
    ) -> Self {
        Self {
            engine,
            address: address.into(),
            deadline,
            pause,
            counts: Arc::default(),
            has_answered: Arc::default(),
            has_written: Arc::default(),
            has_told: Arc::default(),
            is_away: Arc::default(),
        }
    }

    /// How long a request is tried again.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// It is tried again until a deadline, whatever it did not answer before.
    pub fn expect_answers(&self) {
        self.is_away.store(false, Ordering::Relaxed);
    }

    /// How long to leave a bucket alone that could not be reached until then.
    pub fn rest(&self) -> Duration {
        (self.pause * 10).min(PAUSE_MAX)
    }

    pub fn requests(&self) -> Requests {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &*self.counts;
        Requests {
            puts: count(&counts.puts),
            gets: count(&counts.gets),
            heads: count(&counts.heads),
            lists: count(&counts.lists),
            deletes: count(&counts.deletes),
            again: count(&counts.again),
            sent_bytes: count(&counts.sent_bytes),
            received_bytes: count(&counts.received_bytes),
        }
    }

    pub fn put(&self, key: &str, bytes: &Bytes) -> RequestResult<()> {
        self.retry(&self.counts.puts, &self.has_written, || {
            self.counts.sent_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            self.engine.put(key, bytes.clone())
        })
    }

    /// Creates an object whose bytes no other would write there.
    pub fn create(&self, key: &str, bytes: &Bytes) -> RequestResult<()> {
        let create = || {
            self.counts.sent_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            match self.engine.create(key, bytes.clone()) {
                Err(RequestError::AlreadyExists) => match self.get(key, None) {
                    Ok(there) if there == *bytes => Ok(()),
                    Ok(_) => Err(RequestError::AlreadyExists),
                    // S3 says so, too, of two who come at once, and neither may have won.
                    Err(RequestError::NotFound) => {
                        Err(RequestError::Transient("two at once".to_owned()))
                    }
                    Err(trouble) => Err(trouble),
                },
                created => created,
            }
        };
        self.retry(&self.counts.puts, &self.has_written, create)
    }

    pub fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        let got = self.retry(&self.counts.gets, &self.has_told, || self.engine.get(key, range))?;
        self.counts.received_bytes.fetch_add(got.len() as u64, Ordering::Relaxed);
        Ok(got)
    }

    pub fn head(&self, key: &str) -> RequestResult<u64> {
        self.retry(&self.counts.heads, &self.has_told, || self.engine.head(key))
    }

    pub fn delete(&self, key: &str) -> RequestResult<()> {
        self.retry(&self.counts.deletes, &self.has_written, || self.engine.delete(key))
    }

    pub fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        self.retry(&self.counts.lists, &self.has_told, || self.engine.list(folder))
    }

    /// Trouble in the words of disks.
    pub fn error(&self, doing: &str, key: &str, trouble: &RequestError) -> Error {
        let (address, slash) = (&self.address, if key.is_empty() { "" } else { "/" });
        let step = match trouble {
            RequestError::Transient(_) => {
                "; it was tried again and again: see that the bucket answers, or allow it \
                 more time with --deadline"
            }
            RequestError::NotFound if doing == "reading" => {
                "; the store has changed since it was opened, or the object was deleted by hand: run this \
                 again"
            }
            _ => "",
        };
        Error::Remote(format!("{doing} {address}{slash}{key}: {trouble}{step}").into())
    }

    /// Makes a request until it is answered, or until the deadline. Of its kind one `has_worked`
    /// before, or not.
    fn retry<T>(
        &self,
        count: &AtomicU64,
        has_worked: &AtomicBool,
        request: impl Fn() -> RequestResult<T>,
    ) -> RequestResult<T> {
        let begun = Instant::now();
        let mut dice: Option<Random> = None;
        let mut pause = self.pause;
        loop {
            count.fetch_add(1, Ordering::Relaxed);
            let mut answer = request();
            match answer {
                Err(RequestError::Denied(why)) if has_worked.load(Ordering::Relaxed) => {
                    answer = Err(RequestError::Transient(why));
                }
                Ok(_) => has_worked.store(true, Ordering::Relaxed),
                _ => {}
            }
            if !matches!(answer, Err(RequestError::Transient(_))) {
                self.has_answered.store(true, Ordering::Relaxed);
                self.is_away.store(false, Ordering::Relaxed);
                return answer;
            }
            let has_answered = self.has_answered.load(Ordering::Relaxed);
            let first = self.deadline.min(FIRST_ANSWER);
            let deadline = if has_answered { self.deadline } else { first };
            if begun.elapsed() + pause > deadline {
                self.is_away.store(true, Ordering::Relaxed);
                return answer;
            }
            if self.is_away.load(Ordering::Relaxed) {
                return answer;
            }
            self.counts.again.fetch_add(1, Ordering::Relaxed);
            // Writers that were refused together do not come back together.
            let seed = || Random::new(u64::from(begun.elapsed().subsec_nanos()));
            let part = dice.get_or_insert_with(seed).below(1000) as u32;
            std::thread::sleep(pause / 2 + pause / 2 * part / 1000);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}
