//! What tests of buckets have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use draconis_bucket::{Answer, Engine, Listed, Memory, Trouble};

/// A bucket that can be out of reach.
pub struct Distant(pub Memory, pub Arc<AtomicBool>);

impl Distant {
    fn answer<T>(&self, request: impl FnOnce(&Memory) -> Answer<T>) -> Answer<T> {
        match self.1.load(Ordering::SeqCst) {
            true => Err(Trouble::Passing("no route to it".to_owned())),
            false => request(&self.0),
        }
    }
}

impl Engine for Distant {
    fn put(&self, key: &str, bytes: Bytes) -> Answer<()> {
        self.answer(|bucket| bucket.put(key, bytes))
    }

    fn create(&self, key: &str, bytes: Bytes) -> Answer<()> {
        self.answer(|bucket| bucket.create(key, bytes))
    }

    fn get(&self, key: &str, range: Option<(u64, u64)>) -> Answer<Bytes> {
        self.answer(|bucket| bucket.get(key, range))
    }

    fn head(&self, key: &str) -> Answer<u64> {
        self.answer(|bucket| bucket.head(key))
    }

    fn delete(&self, key: &str) -> Answer<()> {
        self.answer(|bucket| bucket.delete(key))
    }

    fn list(&self, folder: &str) -> Answer<Vec<Listed>> {
        self.answer(|bucket| bucket.list(folder))
    }
}
