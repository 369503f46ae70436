//! Group commit: concurrent syncs share one chain.
//!
//! ```text
//!   sync ─ enter ─▶ while a batch is in flight ─▶ one closes the batch of all of them ─▶ durable
//!                   the batch stays open           the others see that it is closed
//! ```
//! After a commit, its threads either return at once with the next change, or not at all. The first
//! to return yields to the others before it closes the batch. Otherwise it would commit alone, and
//! each of the others would wait for two commits.
//!
//! Law 1: a thread that is alone waits for nothing.
//! Law 2: the leader yields at most `MAX_YIELDS` times, only for threads counted at the last
//! commit, and holds no lock that they need.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use draconis_types::lock::{Mutex, MutexGuard};

/// Limit of yields to other threads before a commit.
const MAX_YIELDS: usize = 100;

/// Counters and leader lock of group commit.
#[derive(Debug, Default)]
pub(crate) struct GroupCommit {
    /// Number of closed batches.
    batches: AtomicU64,
    /// Threads inside a sync.
    syncing_threads: AtomicUsize,
    /// Syncing threads whose changes may not be in a closed batch yet.
    uncommitted_threads: AtomicUsize,
    /// Number of syncing threads when the last commit was durable.
    expected_threads: AtomicUsize,
    /// Lock of the thread that closes the batch.
    leader: Mutex<()>,
}

/// One syncing thread.
pub(crate) struct SyncTicket<'a> {
    group: &'a GroupCommit,
    /// Number of closed batches on entry: none of them has this thread's changes.
    batches: u64,
    is_uncommitted: bool,
}

impl GroupCommit {
    /// Registers a thread that syncs all changes made so far.
    pub(crate) fn enter(&self) -> SyncTicket<'_> {
        self.syncing_threads.fetch_add(1, Ordering::Relaxed);
        self.uncommitted_threads.fetch_add(1, Ordering::Relaxed);
        SyncTicket {
            group: self,
            batches: self.batches.load(Ordering::Acquire),
            is_uncommitted: true,
        }
    }

    /// Returns true if other threads sync, too.
    pub(crate) fn has_others(&self) -> bool {
        self.syncing_threads.load(Ordering::Relaxed) > 1
    }

    /// Counts a closed batch; the caller holds the write lock.
    pub(crate) fn count_closed_batch(&self) {
        self.batches.fetch_add(1, Ordering::Release);
    }
}

impl SyncTicket<'_> {
    /// Makes the caller the leader; returns `None` if another leader has committed its changes.
    pub(crate) fn try_lead(&self) -> Option<MutexGuard<'_, ()>> {
        let turn = self.group.leader.lock();
        if self.is_batch_closed() {
            return None;
        }
        for _ in 0..MAX_YIELDS {
            let open = self.group.uncommitted_threads.load(Ordering::Relaxed);
            if open >= self.group.expected_threads.load(Ordering::Relaxed) {
                break;
            }
            std::thread::yield_now();
        }
        self.group.expected_threads.store(0, Ordering::Relaxed);
        (!self.is_batch_closed()).then_some(turn)
    }

    fn is_batch_closed(&self) -> bool {
        self.group.batches.load(Ordering::Acquire) > self.batches
    }

    /// Notes that a closed batch has all the changes of this thread.
    pub(crate) fn finish(&mut self) {
        if std::mem::take(&mut self.is_uncommitted) {
            self.group.uncommitted_threads.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for SyncTicket<'_> {
    fn drop(&mut self) {
        self.finish();
        let inside = self.group.syncing_threads.fetch_sub(1, Ordering::Relaxed);
        self.group.expected_threads.fetch_max(inside, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch that is closed after a thread entered has its changes: the thread leads no more.
    #[test]
    fn closed_batch_commits_for_all_that_entered_before() {
        let group = GroupCommit::default();
        let tickets = [group.enter(), group.enter()];
        assert!(tickets[0].try_lead().is_some());
        group.count_closed_batch();
        assert!(tickets.iter().all(|ticket| ticket.try_lead().is_none()));
        assert!(group.enter().try_lead().is_some());
    }
}
