//! Threads that sync, and how they come to share one commit.
//!
//! ```text
//!   sync ─ enter ─▶ while a batch is on its way ─▶ one seals what all of them changed ─▶ durable
//!                   the batch stays open           the others see that it is sealed
//! ```
//! Those that a commit answers come back with their next change at once, or not at all. The first
//! one back lets the others run before it seals: else it would go alone, the rest with the commit
//! behind, and each of them wait for two.
//!
//! Law 1: a thread that is alone waits for nothing.
//! Law 2: it is waited by letting others run, a bounded number of times, for no more threads than
//! were there when the last commit was durable, and with no lock that they need.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// How often others are let run.
const MAX_YIELDS: usize = 100;

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct GroupCommit {
    /// Batches that were sealed.
    batches: AtomicU64,
    /// Threads that sync.
    syncing_threads: AtomicUsize,
    /// Those of them whose changes are not known to be sealed.
    uncommitted_threads: AtomicUsize,
    /// How many there were when the last commit was durable.
    expected: AtomicUsize,
    /// Held by the one that seals.
    leader: Mutex<()>,
}

/// A thread that syncs.
pub(crate) struct SyncTicket<'a> {
    gathering: &'a GroupCommit,
    /// What was sealed before does not hold what it waits for.
    batches: u64,
    is_open: bool,
}

impl GroupCommit {
    /// Notes a thread that wants all to be durable that changed before this.
    pub(crate) fn enter(&self) -> SyncTicket<'_> {
        self.syncing_threads.fetch_add(1, Ordering::Relaxed);
        self.uncommitted_threads.fetch_add(1, Ordering::Relaxed);
        SyncTicket { gathering: self, batches: self.batches.load(Ordering::Acquire), is_open: true }
    }

    /// Whether others sync than the one that asks.
    pub(crate) fn has_others(&self) -> bool {
        self.syncing_threads.load(Ordering::Relaxed) > 1
    }

    /// Counts a batch that was sealed; the gate is held.
    pub(crate) fn count_closed_batch(&self) {
        self.batches.fetch_add(1, Ordering::Release);
    }
}

impl SyncTicket<'_> {
    /// The right to seal what changed, for all; `None` once that was done.
    pub(crate) fn try_lead(&self) -> Option<MutexGuard<'_, ()>> {
        let turn = self.gathering.leader.lock();
        if self.is_sealed() {
            return None;
        }
        for _ in 0..MAX_YIELDS {
            let open = self.gathering.uncommitted_threads.load(Ordering::Relaxed);
            if open >= self.gathering.expected.load(Ordering::Relaxed) {
                break;
            }
            std::thread::yield_now();
        }
        self.gathering.expected.store(0, Ordering::Relaxed);
        (!self.is_sealed()).then_some(turn)
    }

    fn is_sealed(&self) -> bool {
        self.gathering.batches.load(Ordering::Acquire) > self.batches
    }

    /// All that it waits for is sealed.
    pub(crate) fn finish(&mut self) {
        if std::mem::take(&mut self.is_open) {
            self.gathering.uncommitted_threads.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for SyncTicket<'_> {
    fn drop(&mut self) {
        self.finish();
        let inside = self.gathering.syncing_threads.fetch_sub(1, Ordering::Relaxed);
        self.gathering.expected.fetch_max(inside, Ordering::Relaxed);
    }
}
