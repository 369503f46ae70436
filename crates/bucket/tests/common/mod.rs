//! Helpers for tests of buckets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use draconis_bucket::{BucketApi, ListEntry, MemoryBucket, RequestError, RequestResult};

/// Error of a bucket that cannot be reached.
pub const NO_ROUTE: &str = "no route to it";

/// A bucket that can be out of reach, and its error then.
pub struct UnreachableBucket(pub MemoryBucket, pub Arc<AtomicBool>, pub &'static str);

impl UnreachableBucket {
    fn answer_if_reachable<T>(
        &self,
        request: impl FnOnce(&MemoryBucket) -> RequestResult<T>,
    ) -> RequestResult<T> {
        match self.1.load(Ordering::SeqCst) {
            true => Err(RequestError::Transient(self.2.to_owned())),
            false => request(&self.0),
        }
    }
}

impl BucketApi for UnreachableBucket {
    fn put(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.answer_if_reachable(|bucket| bucket.put(key, bytes))
    }

    fn create(&self, key: &str, bytes: Bytes) -> RequestResult<()> {
        self.answer_if_reachable(|bucket| bucket.create(key, bytes))
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> RequestResult<Bytes> {
        self.answer_if_reachable(|bucket| bucket.get(key, range))
    }

    fn head(&self, key: &str) -> RequestResult<u64> {
        self.answer_if_reachable(|bucket| bucket.head(key))
    }

    fn delete(&self, key: &str) -> RequestResult<()> {
        self.answer_if_reachable(|bucket| bucket.delete(key))
    }

    fn list(&self, folder: &str) -> RequestResult<Vec<ListEntry>> {
        self.answer_if_reachable(|bucket| bucket.list(folder))
    }
}
