//! Access times that are recorded and not in their inodes yet.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use draconis_types::lock::Mutex;
use draconis_types::{AccessTimes, Attributes, Time};

use crate::InodeNumber;
use crate::format::inode::{Inode, flags};

/// Age at which a relative access time is always updated, in seconds.
const DAY_SECONDS: i64 = 24 * 60 * 60;

/// Access times that are not in their inodes yet.
#[derive(Debug)]
pub(crate) struct PendingAccessTimes {
    pub(crate) rule: AccessTimes,
    pending: Mutex<BTreeMap<u32, Time>>,
    /// Number of entries, readable without the lock.
    len: AtomicUsize,
    /// Number of times ever recorded.
    recorded: AtomicU64,
}

impl PendingAccessTimes {
    pub(crate) fn new(rule: AccessTimes) -> Self {
        let (len, recorded) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { rule, pending: Mutex::default(), len, recorded }
    }

    /// Returns true if there are times that need a commit.
    pub(crate) fn has_due_times(&self) -> bool {
        self.rule != AccessTimes::Lazy && self.len.load(Ordering::Acquire) > 0
    }

    pub(crate) fn recorded_count(&self) -> u64 {
        self.recorded.load(Ordering::Relaxed)
    }

    pub(crate) fn get(&self, inode: InodeNumber) -> Option<Time> {
        if self.len.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.pending.lock().get(&inode.0).copied()
    }

    /// Returns true if a read changes the access time that is shown as `shown`.
    pub(crate) fn is_due(&self, inode: &Inode, shown: &Attributes, now: Time) -> bool {
        if inode.flags & flags::NO_ATIME != 0 {
            return false;
        }
        match self.rule {
            AccessTimes::Never => false,
            AccessTimes::Strict | AccessTimes::Lazy => shown.accessed != now,
            AccessTimes::Relative => {
                let old = shown.accessed.seconds.saturating_add(DAY_SECONDS) <= now.seconds;
                shown.accessed <= shown.modified || shown.accessed <= shown.changed || old
            }
        }
    }

    /// Records a time; returns true if none was pending before.
    pub(crate) fn record(&self, inode: InodeNumber, now: Time) -> bool {
        let mut pending = self.pending.lock();
        pending.insert(inode.0, now);
        self.recorded.fetch_add(1, Ordering::Relaxed);
        self.len.swap(pending.len(), Ordering::AcqRel) == 0
    }

    pub(crate) fn remove(&self, inode: InodeNumber) -> Option<Time> {
        if self.len.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut pending = self.pending.lock();
        let time = pending.remove(&inode.0);
        self.len.store(pending.len(), Ordering::Release);
        time
    }

    pub(crate) fn pending_inodes(&self) -> Vec<InodeNumber> {
        match self.len.load(Ordering::Acquire) {
            0 => vec![],
            _ => self.pending.lock().keys().copied().map(InodeNumber).collect(),
        }
    }
}
