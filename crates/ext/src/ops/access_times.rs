//! Access times: recorded without the write lock, written with the next commit.
//!
//! Law: `stat` shows a recorded time at once. The next chain writes it to disk; with `lazytime`,
//! the next chain that has other changes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use draconis_types::{Attributes, Time};
use parking_lot::Mutex;

use super::AccessTimes;
use crate::format::inode::{Inode, flags};
use crate::format::inode_slot::InodeTime;
use crate::transaction::Transaction;
use crate::volume::Volume;
use crate::{InodeNumber, Result};

/// Age at which a relative access time is always updated, in seconds.
const DAY_SECONDS: i64 = 24 * 60 * 60;

/// Access times that are not in their inodes yet.
#[derive(Debug)]
pub(crate) struct PendingAccessTimes {
    rule: AccessTimes,
    pending: Mutex<BTreeMap<u32, Time>>,
    /// Number of entries, readable without the lock.
    len: AtomicUsize,
    /// Number of times ever recorded.
    recorded: AtomicU64,
}

impl PendingAccessTimes {
    pub(crate) fn new(rule: AccessTimes) -> Self {
        let (len, noted) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { rule, pending: Mutex::default(), len, recorded: noted }
    }

    /// Returns true if there are times that need a commit.
    pub(crate) fn has_due_times(&self) -> bool {
        self.rule != AccessTimes::Lazy && self.len.load(Ordering::Acquire) > 0
    }

    pub(crate) fn recorded_count(&self) -> u64 {
        self.recorded.load(Ordering::Relaxed)
    }

    fn get(&self, inode: InodeNumber) -> Option<Time> {
        if self.len.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.pending.lock().get(&inode.0).copied()
    }

    /// Returns true if a read changes the access time that is shown as `shown`.
    fn is_due(&self, inode: &Inode, shown: &Attributes, now: Time) -> bool {
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
    fn record(&self, inode: InodeNumber, now: Time) -> bool {
        let mut pending = self.pending.lock();
        pending.insert(inode.0, now);
        self.recorded.fetch_add(1, Ordering::Relaxed);
        self.len.swap(pending.len(), Ordering::AcqRel) == 0
    }

    fn remove(&self, inode: InodeNumber) -> Option<Time> {
        if self.len.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut pending = self.pending.lock();
        let time = pending.remove(&inode.0);
        self.len.store(pending.len(), Ordering::Release);
        time
    }

    fn pending_inodes(&self) -> Vec<InodeNumber> {
        match self.len.load(Ordering::Acquire) {
            0 => vec![],
            _ => self.pending.lock().keys().copied().map(InodeNumber).collect(),
        }
    }
}

impl Volume {
    /// Records that a file was read just now, by the policy [`crate::WriteOptions::atime`]. Never
    /// fails: reads do not depend on it.
    pub fn touch_atime(&self, inode: InodeNumber) {
        let Some(writing) = &self.writing else { return };
        if !self.is_access_due(inode) {
            return;
        }
        let is_first = writing.pending_access_times.record(inode, (writing.clock)());
        if is_first && writing.pending_access_times.has_due_times() {
            writing.notify_first_change();
        }
    }

    /// Returns true if reading the inode now would change its access time.
    pub fn is_access_due(&self, inode: InodeNumber) -> bool {
        let Some(writing) = &self.writing else { return false };
        if writing.pending_access_times.rule == AccessTimes::Never || writing.is_stopped() {
            return false;
        }
        let now = (writing.clock)();
        let is_due = |node: Arc<Inode>| {
            writing.pending_access_times.is_due(&node, &self.attributes_of(&node), now)
        };
        self.node(inode).is_ok_and(is_due)
    }

    /// Returns the access-time policy; [`AccessTimes::Never`] on a read-only volume.
    pub fn access_times(&self) -> AccessTimes {
        self.writing
            .as_ref()
            .map_or(AccessTimes::Never, |writing| writing.pending_access_times.rule)
    }

    /// Returns the pending access time of an inode, if there is one.
    pub(crate) fn pending_access_time(&self, inode: InodeNumber) -> Option<Time> {
        self.writing.as_ref()?.pending_access_times.get(inode)
    }
}

impl Transaction<'_> {
    /// Discards the pending access time: the inode was reused, or its time set explicitly.
    pub(crate) fn discard_access_time(&self, inode: InodeNumber) {
        if let Some(writing) = &self.volume.writing {
            writing.pending_access_times.remove(inode);
        }
    }

    /// Preloads the inodes with pending access times.
    pub(crate) fn preload_accessed_inodes(&self) -> Result<()> {
        let Some(writing) = &self.volume.writing else { return Ok(()) };
        writing
            .pending_access_times
            .pending_inodes()
            .into_iter()
            .try_for_each(|inode| self.read_slot(inode, |_| ()))
    }

    /// Writes the pending access times to their inodes.
    pub(crate) fn write_access_times(&mut self) -> Result<()> {
        let Some(writing) = &self.volume.writing else { return Ok(()) };
        for inode in writing.pending_access_times.pending_inodes() {
            let Some(time) = writing.pending_access_times.remove(inode) else { continue };
            if self.read_slot(inode, |it| it.links())? != 0 || self.is_orphan(inode) {
                self.change_slot(inode, |it| it.set_time(InodeTime::Accessed, time))?;
            }
        }
        Ok(())
    }
}
