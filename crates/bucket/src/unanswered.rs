//! Requests that wait for an answer, for the status of mounts.
//!
//! Law: a request is listed from its first attempt until it is answered or given up, retries and
//! pauses included.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use draconis_types::lock::Mutex;

/// Time without an answer after which a bucket counts as away: far more than a slow request takes.
pub(crate) const AWAY_AFTER: Duration = Duration::from_secs(2);

/// All requests of a bucket that wait, by their order.
#[derive(Debug, Default)]
pub(crate) struct UnansweredRequests(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    all: BTreeMap<u64, WaitingRequest>,
}

#[derive(Debug)]
struct WaitingRequest {
    since: Instant,
    at: SystemTime,
    /// The error of its last attempt.
    why: Option<String>,
}

impl UnansweredRequests {
    /// Lists a request until the returned entry is dropped.
    pub fn begin(self: &Arc<Self>) -> UnansweredRequest {
        let mut waiting = self.0.lock();
        let number = waiting.next;
        waiting.next += 1;
        let request = WaitingRequest { since: Instant::now(), at: SystemTime::now(), why: None };
        waiting.all.insert(number, request);
        UnansweredRequest { list: self.clone(), number }
    }

    /// Returns why the oldest request waits, and since when, if that is `age` ago.
    pub fn oldest(&self, age: Duration) -> Option<(String, SystemTime)> {
        let waiting = self.0.lock();
        let (_, oldest) = waiting.all.first_key_value()?;
        let why = || oldest.why.clone().unwrap_or_else(|| "a request has no answer yet".to_owned());
        (oldest.since.elapsed() >= age).then(|| (why(), oldest.at))
    }
}

/// A request that waits.
pub(crate) struct UnansweredRequest {
    list: Arc<UnansweredRequests>,
    number: u64,
}

impl UnansweredRequest {
    /// Records why an attempt has failed; there will be another.
    pub fn set_error(&self, why: &str) {
        if let Some(request) = self.list.0.lock().all.get_mut(&self.number) {
            request.why = Some(why.to_owned());
        }
    }
}

impl Drop for UnansweredRequest {
    fn drop(&mut self) {
        self.list.0.lock().all.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_request_says_why_it_waits() {
        let list = Arc::new(UnansweredRequests::default());
        let oldest = || list.oldest(Duration::ZERO).map(|(why, _)| why);
        assert_eq!(oldest(), None);
        let (first, second) = (list.begin(), list.begin());
        second.set_error("second");
        assert_eq!(oldest().as_deref(), Some("a request has no answer yet"));
        first.set_error("connection refused");
        assert_eq!(oldest().as_deref(), Some("connection refused"));
        assert_eq!(list.oldest(Duration::from_secs(u64::MAX >> 1)), None);
        drop(first);
        assert_eq!(oldest().as_deref(), Some("second"));
        drop(second);
        assert_eq!(oldest(), None);
    }
}
