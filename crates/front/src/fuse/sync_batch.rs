//! Batches of fsync requests, each executed as one call of the tree.
//!
//! ```text
//!   fsync ─ enqueue ─▶ no batch runs: its thread gives up the lead and runs the batch
//!                      one runs:      it joins the next batch, and its thread reads on
//!   the tree has flushed ─▶ all are answered ─▶ next batch, if there is one
//! ```
//! Clients that were answered return with their next change at once, or not at all. The first one
//! back waits for the others. Otherwise it would go alone, the rest would share the next flush, and
//! each of them would wait for two flushes.
//!
//! Law 1: a single request does not wait.
//! Law 2: a batch waits for no more requests than there were when the last one was answered. It
//! waits no longer than half the duration of the last flush.

use draconis_types::lock::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::decoder::Header;

/// Maximum wait for other clients.
const MAX_STRAGGLER_WAIT: Duration = Duration::from_millis(1);

/// A request to make a file durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct SyncRequest {
    pub header: Header,
    /// True if only the data and the metadata for reading it must be durable.
    pub data_only: bool,
}

/// Collects fsync requests into batches.
#[derive(Debug, Default)]
pub(super) struct SyncBatcher {
    state: Mutex<BatchState>,
    /// Notified when all expected requests have joined.
    all_joined: Condvar,
}

#[derive(Debug, Default)]
struct BatchState {
    /// True if a thread runs the batches.
    has_runner: bool,
    waiting: Vec<SyncRequest>,
    /// Expected size of the batch: number of requests when the last one was answered.
    last_batch_len: usize,
    /// Start of the last batch, and the timeout of the current wait for others.
    since: Option<Instant>,
    straggler_timeout: Duration,
}

impl SyncBatcher {
    /// Enqueues a request; returns true if the caller has to run the batch.
    pub(super) fn enqueue(&self, sync: SyncRequest) -> bool {
        let mut state = self.lock();
        state.waiting.push(sync);
        if state.waiting.len() == state.last_batch_len {
            self.all_joined.notify_one();
        }
        !std::mem::replace(&mut state.has_runner, true)
    }

    /// Returns the next batch to the thread that runs them and has answered `answered` requests of
    /// the last one. An empty batch ends its task.
    pub(super) fn next_batch(&self, answered: usize) -> Vec<SyncRequest> {
        let mut state = self.lock();
        if let Some(since) = state.since.take() {
            state.last_batch_len = answered + state.waiting.len();
            state.straggler_timeout = (since.elapsed() / 2).min(MAX_STRAGGLER_WAIT);
        }
        if state.waiting.is_empty() {
            state.has_runner = false;
            return vec![];
        }
        let patience = std::mem::take(&mut state.straggler_timeout);
        let is_short = |state: &mut BatchState| state.waiting.len() < state.last_batch_len;
        self.all_joined.wait_while_for(&mut state, is_short, patience);
        state.since = Some(Instant::now());
        state.last_batch_len = 0;
        std::mem::take(&mut state.waiting)
    }

    fn lock(&self) -> MutexGuard<'_, BatchState> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use draconis_types::Node;

    use super::*;

    fn sync_request(unique: u64) -> SyncRequest {
        let header = Header { opcode: 20, unique, node: Node(3), uid: 0, gid: 0 };
        SyncRequest { header, data_only: false }
    }

    fn unique_ids(taken: &[SyncRequest]) -> Vec<u64> {
        taken.iter().map(|sync| sync.header.unique).collect()
    }

    #[test]
    fn syncs_are_batched_by_one_runner() {
        let syncs = SyncBatcher::default();
        assert!(syncs.enqueue(sync_request(1)));
        assert_eq!(unique_ids(&syncs.next_batch(0)), [1]);
        assert!(!syncs.enqueue(sync_request(2)) && !syncs.enqueue(sync_request(3)));
        assert_eq!(unique_ids(&syncs.next_batch(1)), [2, 3]);
        assert!(syncs.next_batch(2).is_empty());
        // Two were answered, and one returns: its wait is bounded.
        assert!(syncs.enqueue(sync_request(4)));
        assert_eq!(unique_ids(&syncs.next_batch(0)), [4]);
        assert!(syncs.next_batch(1).is_empty());
    }
}
