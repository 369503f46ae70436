//! Resuming a volume whose process crashed: the recorded changes are replayed.
//!
//! ```text
//!   change ── recorded under the write lock ──▶ an oplog that outlives the process
//!   chain  ── accepted by the disk with the number of the last change in it
//!   crash  ── resume_after_crash: the state of the disk; later changes are replayed,
//!             each with its old time and inode
//! ```
//! Law 1: the recorder receives a change before any reader can see it.
//! Law 2: inodes that clients may have open are not deleted. Clients may have closed orphans
//! meanwhile; the caller asks for them: see [`Volume::orphans`].
//! Law 3: on a volume without an on-disk orphan list the recorder remembers the orphans, so that a
//! resume need not read every inode.

use std::collections::BTreeSet;
use std::sync::Arc;

use draconis_device::Disk;

use crate::change_record::{ChangeRecord, ChangeRecorder};
use crate::options::{OpenOptions, WriteOptions};
use crate::transaction::Transaction;
use crate::volume::Volume;
use crate::write_context::StopReason;
use crate::{Error, InodeNumber, MmpClaim, Result};

/// Knowledge about a process that crashed with a volume open for writing.
#[derive(Clone, Debug)]
pub struct CrashedProcess {
    /// [`Volume::was_clean`] in that process.
    pub was_clean: bool,
    /// Superset of the orphans reported to the recorder; if unknown, every inode is read.
    pub orphans: Option<BTreeSet<InodeNumber>>,
}

impl Volume {
    /// Opens a volume for writing whose previous process crashed. Unlinked inodes that may be open
    /// are not deleted.
    ///
    /// # Errors
    /// As [`Volume::open_for_writing`].
    pub fn resume_after_crash(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        writing: WriteOptions,
        before: CrashedProcess,
        claim: Option<MmpClaim>,
    ) -> Result<Self> {
        Self::mount(disk, options, writing, Some(before), claim)
    }

    /// Installs the change recorder. Only the first call has an effect.
    pub fn set_change_recorder(&self, recorder: Arc<dyn ChangeRecorder>) {
        if let Some(writing) = &self.writing {
            // An existing recorder stays.
            let _ = writing.change_recorder.set(recorder);
        }
    }

    /// Makes all changes with the time and inode of the record, until called with `None`. An orphan
    /// that still has the inode number had no users any more when the number was reused, so it is
    /// deleted.
    pub fn set_replay(&self, made: Option<ChangeRecord>) {
        if let Some(file) = made.and_then(|made| made.inode)
            && self.is_orphan(InodeNumber(file.inode))
        {
            self.delete_orphan(InodeNumber(file.inode));
        }
        if let Some(writing) = &self.writing {
            writing.state.write().replaying = made;
        }
    }

    /// Stops all changes because the records do not match the volume.
    pub fn stop_on_mismatch(&self, why: &str) {
        if let Some(writing) = &self.writing {
            writing.state.write().stop(&Error::Unsupported { feature: why.to_owned() });
        }
    }

    /// Stops all changes, as in the process that crashed, which recorded `why`.
    pub fn stop_as_before(&self, why: String) {
        if let Some(writing) = &self.writing {
            let mut state = writing.state.write();
            if state.stopped().is_none() {
                state.set_stopped(Some(StopReason::Failed(why)));
            }
        }
    }

    /// Returns true if the volume was cleanly unmounted before it was opened for writing.
    pub fn was_clean(&self) -> bool {
        self.read_lock().is_some_and(|writer| writer.was_clean)
    }

    /// Returns true if users of inodes are not counted here, because the crashed process counted
    /// some.
    pub fn is_resumed(&self) -> bool {
        self.read_lock().is_some_and(|writer| writer.is_resumed)
    }

    /// Returns the orphans. After [`Volume::resume_after_crash`] only [`Volume::delete_orphan`]
    /// deletes them.
    pub fn orphans(&self) -> Vec<InodeNumber> {
        self.reader.store.write_back.orphans()
    }

    /// Returns true if an inode is an orphan.
    pub fn is_orphan(&self, inode: InodeNumber) -> bool {
        self.reader.store.write_back.has_orphan(inode.0)
    }

    /// Deletes an orphan that has no users.
    pub fn delete_orphan(&self, inode: InodeNumber) {
        // If the deletion fails, the next mount deletes it.
        let _ = self.transact(|tx| tx.release_last_user(inode));
    }
}

impl Transaction<'_> {
    /// Finds the orphans of a resumed volume that has no on-disk list.
    pub(crate) fn find_orphans(&mut self, before: CrashedProcess) -> Result<()> {
        if self.writer.protocol.lists_orphans() {
            return Ok(());
        }
        // The free counts of a volume that was not clean are right only in memory: recount all.
        let looked_at = match before.orphans.filter(|_| before.was_clean) {
            None => self.used_inodes()?,
            Some(known) => {
                let super_ = &self.volume.super_;
                let named = super_.first_inode..=InodeNumber(super_.inodes);
                let mut used = vec![];
                for inode in known.into_iter().filter(|inode| named.contains(inode)) {
                    // Most of them were freed since.
                    if self.is_inode_allocated(inode)? {
                        used.push(inode);
                    }
                }
                used
            }
        };
        for inode in looked_at {
            if self.read_slot(inode, |it| it.is_unlisted_orphan())? {
                self.volume.store.write_back.write().orphans.insert(inode.0);
            }
        }
        Ok(())
    }
}
