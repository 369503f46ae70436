//! A volume that another process of ours had in use, and died over.
//!
//! ```text
//!   change ── told to the witness, gate held ──▶ a log that outlives the process
//!   chain  ── taken by the disk with the number of the last change in it
//!   death  ── take_over: as the disk has it; changes above that number are made again,
//!             each with the time and the inode that it had
//! ```
//! Law 1: what a reader can see of a change the witness was told before.
//! Law 2: nothing is cleaned up that clients may still have open. What they let go meanwhile
//! is found by asking who knows: see [`Volume::nameless`].
//! Law 3: a volume that cannot list what has no name has the witness remember it, so that taking
//! over does not look at every inode.

use std::collections::BTreeSet;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_exchange::contract::Time;

use crate::ops::WriteOptions;
use crate::transaction::Transaction;
use crate::volume::{OpenOptions, Volume};
use crate::{Error, FileId, InodeNumber, MmpClaim, Result};

/// What a change did that its repetition must do again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeRecord {
    /// When it was.
    pub now: Time,
    /// The inode that it gave a first name to, or made without one.
    pub inode: Option<FileId>,
    /// The inode whose name it moved. A move may be cut off in the middle: then the old name
    /// leads to what it replaces, until that goes.
    pub renamed_inode: Option<InodeNumber>,
}

/// What is known of a process that had a volume in use and died.
#[derive(Clone, Debug)]
pub struct CrashedProcess {
    /// [`Volume::was_clean`] of it.
    pub was_clean: bool,
    /// All inodes of which its witness was told that they have no name, and others; every inode is
    /// looked at if these are not known.
    pub orphans: Option<BTreeSet<InodeNumber>>,
}

/// Is told of every change.
pub trait ChangeRecorder: Send + Sync {
    /// A change was made in memory, by the calling thread, or a part of one that may reach the
    /// disk by itself; then it comes again with the same number. Changes count from 1 on. Readers
    /// wait until this returns; it must not come back to the volume.
    fn record_change(&self, number: u64, made: ChangeRecord);

    /// A change failed when a part of it was made, and that may be seen; there are no more.
    fn record_partial_failure(&self) {}

    /// The disk has taken all changes up to this one.
    fn accepted_through(&self, number: u64);

    /// The change of that number leaves an inode in use without a name, on a volume that does not
    /// list those; these are `all` until now. On the disk it is one from the chain with this
    /// change until that with the one that gives it a name, or frees it. It may come again, and
    /// the change may come to nothing.
    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        let _ = (number, inode, all);
    }
}

impl Volume {
    /// Opens a volume for writing that this process's predecessor had open when it died. Nothing
    /// is cleaned up that was unlinked and may be open.
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

    /// Has `witness` told of every change from now on. Only the first one counts.
    pub fn set_change_recorder(&self, witness: Arc<dyn ChangeRecorder>) {
        if let Some(writing) = &self.writing {
            // One that is there already stays.
            let _ = writing.change_recorder.set(witness);
        }
    }

    /// Makes changes as if it was then, with that inode, until this is called with `None`. What
    /// had the inode before, and has no name, had no users any more when that was given out.
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

    /// Ends all changes because what was told of them does not agree with the volume.
    pub fn stop_on_mismatch(&self, why: &str) {
        if let Some(writing) = &self.writing {
            writing.state.write().stop(&Error::Unsupported { feature: why.to_owned() });
        }
    }

    /// Whether it was unmounted properly before it was opened for writing.
    pub fn was_clean(&self) -> bool {
        self.read_lock().is_some_and(|writer| writer.was_clean)
    }

    /// Whether users of inodes are not counted here, since a predecessor counted some.
    pub fn is_resumed(&self) -> bool {
        self.read_lock().is_some_and(|writer| writer.is_resumed)
    }

    /// The inodes in use that have no name. After [`Volume::resume_after_crash`] those are given back
    /// only by [`Volume::delete_orphan`].
    pub fn orphans(&self) -> Vec<InodeNumber> {
        self.store.write_back.read().orphans.iter().copied().map(InodeNumber).collect()
    }

    /// Whether an inode has no name.
    pub fn is_orphan(&self, inode: InodeNumber) -> bool {
        self.store.write_back.has_orphan(inode.0)
    }

    /// Deletes an inode without names that has no users.
    pub fn delete_orphan(&self, inode: InodeNumber) {
        // What cannot be deleted now is deleted at the next mount.
        let _ = self.transact(|tx| tx.release_last_user(inode));
    }
}

impl Transaction<'_> {
    /// Tells the witness of an inode that is in use and has no name.
    pub(crate) fn record_orphan(&self, inode: InodeNumber) {
        let witness =
            self.volume.writing.as_ref().and_then(|writing| writing.change_recorder.get());
        if let Some(witness) = witness.filter(|_| !self.writer.protocol.lists_orphans()) {
            let number = self.writer.change_count.wrapping_add(1);
            witness.record_orphan(number, inode, &|| self.volume.orphans());
        }
    }

    /// On a volume that was in use until now: finds what has no name, where the volume does not
    /// list it.
    pub(crate) fn find_orphans(&mut self, before: CrashedProcess) -> Result<()> {
        if self.writer.protocol.lists_orphans() {
            return Ok(());
        }
        // Counts of a volume that was not clean are right in memory only: all are counted again.
        let looked_at = match before.orphans.filter(|_| before.was_clean) {
            None => self.used_inodes()?,
            Some(known) => {
                let super_ = &self.volume.super_;
                let named = super_.first_inode..=InodeNumber(super_.inodes);
                let mut used = vec![];
                for inode in known.into_iter().filter(|inode| named.contains(inode)) {
                    // It was freed since, mostly.
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

    /// Whether an inode without names is kept for users.
    pub(crate) fn has_users(&self, inode: InodeNumber) -> bool {
        let writer = &self.writer;
        writer.is_resumed || writer.users.get(&inode.0).copied().unwrap_or(0) > 0
    }

    /// The inode that a repeated change gives its name to.
    pub(crate) fn replayed_inode(&self) -> Option<InodeNumber> {
        self.writer.replaying?.inode.map(|made| InodeNumber(made.inode))
    }
}
