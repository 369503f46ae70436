//! Access times: recorded without the write lock, written with the next commit.
//!
//! Law: `stat` shows a recorded time at once. The next chain writes it to disk; with `lazytime`,
//! the next chain that has other changes.

use crate::format::inode_slot::InodeTime;
use crate::transaction::Transaction;
use crate::{InodeNumber, Result};

impl Transaction<'_> {
    /// Discards the pending access time: the inode was reused, or its time set explicitly.
    pub(crate) fn discard_access_time(&self, inode: InodeNumber) {
        self.context.pending_access_times.remove(inode);
    }

    /// Preloads the inodes with pending access times.
    pub(crate) fn preload_accessed_inodes(&self) -> Result<()> {
        self.context
            .pending_access_times
            .pending_inodes()
            .into_iter()
            .try_for_each(|inode| self.read_slot(inode, |_| ()))
    }

    /// Writes the pending access times to their inodes.
    pub(crate) fn write_access_times(&mut self) -> Result<()> {
        for inode in self.context.pending_access_times.pending_inodes() {
            let Some(time) = self.context.pending_access_times.remove(inode) else { continue };
            if self.read_slot(inode, |it| it.links())? != 0 || self.is_orphan(inode) {
                self.change_slot(inode, |it| it.set_time(InodeTime::Accessed, time))?;
            }
        }
        Ok(())
    }
}
