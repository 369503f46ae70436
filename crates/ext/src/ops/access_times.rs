//! Access times: recorded without the write lock, written with the next commit.
//!
//! Law: `stat` shows a recorded time at once. The next chain writes it to disk; with `lazytime`,
//! the next chain that has other changes.

use std::sync::Arc;

use draconis_exchange::contract::Time;

use super::AccessTimes;
use crate::format::inode::Inode;
use crate::format::inode_slot::InodeTime;
use crate::transaction::Transaction;
use crate::volume::Volume;
use crate::{InodeNumber, Result};

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
