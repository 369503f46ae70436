//! Retries of requests, with limits and counts.
//!
//! Law 1: transient errors are retried until the deadline, at growing intervals. Before the first
//! answer the deadline is shorter, so that a wrong address is reported soon.
//! A refusal is transient if a request of its kind has worked before; otherwise it is reported at
//! once.
//! Law 2: an answer may be lost although the request was done. Repeated writes have the same bytes,
//! and a failed creation compares the existing object with its own.
//! Law 3: a bucket that was unreachable until a deadline gets no retries until it answers again. So
//! an operation of several requests does not wait for several deadlines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use draconis_device::{Error, Random};

use crate::advice::{step_after_retries, step_for_refusal};
use crate::api::{BucketApi, ListEntry, RequestError, RequestResult};
use crate::unanswered::{AWAY_AFTER, UnansweredRequests};

/// Deadline of the first answer.
const FIRST_RESPONSE_DEADLINE: Duration = Duration::from_secs(10);
/// Longest pause between retries.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(3);

/// Numbers of requests of each kind, including retries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestStatistics {
    /// Objects written, or attempted.
    pub puts: u64,
    /// Objects read, whole or in part.
    pub gets: u64,
    /// Checks whether an object exists.
    pub heads: u64,
    /// Lists; one of very many objects takes several requests.
    pub lists: u64,
    /// Objects deleted.
    pub deletes: u64,
    /// Retries of all kinds.
    pub again: u64,
    /// Bytes sent with puts.
    pub sent_bytes: u64,
    /// Bytes that came with gets.
    pub received_bytes: u64,
}

#[derive(Debug, Default)]
struct RequestCounters {
    puts: AtomicU64,
    gets: AtomicU64,
    heads: AtomicU64,
    lists: AtomicU64,
    deletes: AtomicU64,
    again: AtomicU64,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

/// A bucket client that retries requests.
#[derive(Clone)]
pub(crate) struct RetryingStore {
    engine: Arc<dyn BucketApi>,
    /// Its name in errors.
    pub address: Arc<str>,
    deadline: Duration,
    pause: Duration,
    counts: Arc<RequestCounters>,
    has_answered: Arc<AtomicBool>,
    /// True once a write has worked.
    has_written: Arc<AtomicBool>,
    /// True once a read or a list has worked.
    has_read: Arc<AtomicBool>,
    /// True since an unreachable bucket exceeded a deadline, until the next answer.
    is_away: Arc<AtomicBool>,
    unanswered: Arc<UnansweredRequests>,
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
            has_read: Arc::default(),
            is_away: Arc::default(),
            unanswered: Arc::default(),
        }
    }

    /// Returns the time limit of retries.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Enables retries again after a time without answers.
    pub fn enable_retries(&self) {
        self.is_away.store(false, Ordering::Relaxed);
    }

    /// Returns why the bucket does not answer, and since when, if that is for long.
    pub fn unanswered(&self) -> Option<(String, SystemTime)> {
        self.unanswered.oldest(AWAY_AFTER)
    }

    /// Returns the error of the request that has waited longest.
    pub fn unanswered_error(&self) -> Option<String> {
        self.unanswered.oldest(Duration::ZERO).map(|(why, _)| why)
    }

    /// Returns the back-off after the bucket was unreachable.
    pub fn next_backoff(&self) -> Duration {
        (self.pause * 10).min(MAX_RETRY_PAUSE)
    }

    pub fn requests(&self) -> RequestStatistics {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &*self.counts;
        RequestStatistics {
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

    /// Creates an object with bytes that no other writer would write.
    pub fn create(&self, key: &str, bytes: &Bytes) -> RequestResult<()> {
        let create = || {
            self.counts.sent_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            match self.engine.create(key, bytes.clone()) {
                Err(RequestError::AlreadyExists) => match self.get(key, None) {
                    Ok(there) if there == *bytes => Ok(()),
                    Ok(_) => Err(RequestError::AlreadyExists),
                    // S3 also answers so for concurrent creations, of which none may have won.
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
        let got = self.retry(&self.counts.gets, &self.has_read, || self.engine.get(key, range))?;
        self.counts.received_bytes.fetch_add(got.len() as u64, Ordering::Relaxed);
        Ok(got)
    }

    pub fn head(&self, key: &str) -> RequestResult<u64> {
        self.retry(&self.counts.heads, &self.has_read, || self.engine.head(key))
    }

    pub fn delete(&self, key: &str) -> RequestResult<()> {
        self.retry(&self.counts.deletes, &self.has_written, || self.engine.delete(key))
    }

    pub fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        self.retry(&self.counts.lists, &self.has_read, || self.engine.list(folder))
    }

    pub fn list_after(&self, folder: &str, after: &str) -> RequestResult<Vec<ListEntry>> {
        let list = || self.engine.list_after(folder, after);
        self.retry(&self.counts.lists, &self.has_read, list)
    }

    /// Converts a request error to a disk error.
    pub fn error(&self, doing: &str, key: &str, trouble: &RequestError) -> Error {
        let (address, slash) = (&self.address, if key.is_empty() { "" } else { "/" });
        let step = match trouble {
            RequestError::Transient(why) => step_after_retries(why),
            RequestError::Denied(why) => step_for_refusal(why).unwrap_or_default(),
            RequestError::NotFound if doing == "reading" => {
                "; the store has changed since it was opened, or the object was deleted by hand: run this \
                 again"
            }
            _ => "",
        };
        Error::Remote(format!("{doing} {address}{slash}{key}: {trouble}{step}").into())
    }

    /// Makes a request until it is answered, or until the deadline. `has_worked` is set once a
    /// request of its kind has worked.
    fn retry<T>(
        &self,
        count: &AtomicU64,
        has_worked: &AtomicBool,
        request: impl Fn() -> RequestResult<T>,
    ) -> RequestResult<T> {
        let begun = Instant::now();
        let mut dice: Option<Random> = None;
        let mut pause = self.pause;
        let unanswered = self.unanswered.begin();
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
            if let Err(RequestError::Transient(why)) = &answer {
                unanswered.set_error(why);
            } else {
                self.has_answered.store(true, Ordering::Relaxed);
                self.is_away.store(false, Ordering::Relaxed);
                return answer;
            }
            let has_answered = self.has_answered.load(Ordering::Relaxed);
            let first = self.deadline.min(FIRST_RESPONSE_DEADLINE);
            let deadline = if has_answered { self.deadline } else { first };
            if begun.elapsed() + pause > deadline {
                self.is_away.store(true, Ordering::Relaxed);
                return answer;
            }
            if self.is_away.load(Ordering::Relaxed) {
                return answer;
            }
            self.counts.again.fetch_add(1, Ordering::Relaxed);
            // Randomized, so that refused writers do not retry together.
            let seed = || Random::new(u64::from(begun.elapsed().subsec_nanos()));
            let part = dice.get_or_insert_with(seed).next_below(1000) as u32;
            std::thread::sleep(pause / 2 + pause / 2 * part / 1000);
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
        }
    }
}
