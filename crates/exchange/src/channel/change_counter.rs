//! Change counter: a server invalidates its clients' cached answers without a message.
//!
//! ```text
//!   server: notify_change() ── increments ──▶ shared counter ──▶ change_count() :client
//! ```
//! A client that caches answers reads the counter before each request and before each use. While
//! both reads agree and the server is alive, a cached answer equals a new one.
//!
//! Law 1: a server notifies before any answer, to any client, shows the change.
//! Law 2: the counter of a server without a notifier is `None`; its clients cache nothing.
//! Law 3: counter values are not trusted. A malicious counter costs its client a message, or yields
//! stale bytes that the server could have sent anyway.
//! Law 4: dead servers notify nothing, so clients of another process check liveness every 10 ms.

use draconis_types::lock::{Mutex, MutexGuard};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use crate::shm::SharedMemory;

/// Writer of a channel's change counter, held by the server. After the endpoint closes it does
/// nothing.
#[derive(Clone, Debug)]
pub struct ChangeNotifier(Arc<Mutex<Option<CounterState>>>);

#[derive(Debug)]
struct CounterState {
    /// This side's own value; the shared copy is writable by the client.
    count: u64,
    word: CounterCell,
}

#[derive(Debug)]
enum CounterCell {
    Lane { memory: Arc<SharedMemory>, at: usize },
    Here(Arc<AtomicU64>),
}

impl CounterCell {
    fn get(&self) -> &AtomicU64 {
        match self {
            Self::Lane { memory, at } => memory.atomic_u64(*at),
            Self::Here(count) => count,
        }
    }
}

impl ChangeNotifier {
    /// Creates a notifier that counts from `first`, which is not 0, in the word at offset `at`.
    pub(super) fn for_lane(memory: &Arc<SharedMemory>, at: usize, first: u64) -> Self {
        Self::with_start_count(first, CounterCell::Lane { memory: memory.clone(), at })
    }

    pub(super) fn for_thread(count: &Arc<AtomicU64>) -> Self {
        Self::with_start_count(1, CounterCell::Here(count.clone()))
    }

    fn with_start_count(count: u64, word: CounterCell) -> Self {
        word.get().store(count, SeqCst);
        Self(Arc::new(Mutex::new(Some(CounterState { count, word }))))
    }

    /// Invalidates all earlier answers. Returns true if a client can see it.
    pub fn notify_change(&self) -> bool {
        let mut count = self.lock();
        let Some(CounterState { count, word }) = &mut *count else { return false };
        *count += 1;
        word.get().store(*count, SeqCst);
        true
    }

    /// Returns true while the server's endpoint is open.
    pub fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// Stops writing: the endpoint was closed, and the word may be reused by another one.
    pub(super) fn close(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<CounterState>> {
        self.0.lock()
    }
}
