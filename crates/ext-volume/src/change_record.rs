//! Record of each change, for a process that resumes the volume.

use draconis_types::Time;

use crate::{FileId, InodeNumber};

/// Results of a change that its replay must repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeRecord {
    /// Time of the change.
    pub now: Time,
    /// Inode that the change created, or gave its first name.
    pub inode: Option<FileId>,
    /// Inode that the change renamed. A crash may cut a rename in the middle: the old name then
    /// references the replaced inode until it is removed.
    pub renamed_inode: Option<InodeNumber>,
}

/// Recorder of every change, for a later resume.
pub trait ChangeRecorder: Send + Sync {
    /// Records a change made in memory by the calling thread, or the part of one that may reach the
    /// disk alone; the whole then follows with the same number. Numbers start at 1. Readers wait
    /// until this returns; it must not call the volume.
    fn record_change(&self, number: u64, made: ChangeRecord);

    /// Records that a change failed half-way and may be visible; it was the last.
    fn record_partial_failure(&self) {}

    /// Records that an error ended all changes. Nobody has learned of it yet.
    fn record_stop(&self, why: &str) {
        let _ = why;
    }

    /// Notes that the disk has accepted all changes up to `number`.
    fn record_accepted_through(&self, number: u64);

    /// Records that change `number` makes `inode` an orphan on a volume without an on-disk list;
    /// `all` returns the orphans so far. On disk, the inode is an orphan from the chain with this
    /// change until the one that names or frees it. The call may repeat, and the change may fail.
    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        let _ = (number, inode, all);
    }
}
