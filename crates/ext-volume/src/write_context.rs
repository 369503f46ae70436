//! State of a writable volume.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use draconis_types::Time;
use draconis_types::lock::{Mutex, RecursiveRwLock};

use crate::access_times::PendingAccessTimes;
use crate::alloc::Groups;
use crate::change_record::{ChangeRecord, ChangeRecorder};
use crate::commit::batch::Batch;
use crate::commit::group_commit::GroupCommit;
use crate::commit::protocol::CommitProtocol;
use crate::commit::queue::CommitQueue;
use crate::mmp::MmpClaim;
use crate::options::WriteOptions;
use crate::quota::Quotas;
use crate::{Error, FileId, InodeNumber};

/// Reason why the volume is not written any more.
#[derive(Clone, Debug)]
pub(crate) enum StopReason {
    /// The volume was closed.
    Closed,
    /// An error, with its text.
    Failed(String),
}

/// Everything that a writable volume has.
pub(crate) struct WriteContext {
    /// Write lock: transactions hold it exclusively, readers share it.
    pub(crate) state: RecursiveRwLock<WriteState>,
    pub(crate) commit_queue: CommitQueue,
    pub(crate) group_commit: GroupCommit,
    /// Limit of dirty data in memory, in bytes.
    pub(crate) dirty_limit: u64,
    pub(crate) clock: Arc<dyn Fn() -> Time + Send + Sync>,
    pub(crate) pending_access_times: PendingAccessTimes,
    /// True if freed blocks are discarded on the disk.
    pub(crate) discard: bool,
    /// Shared with [`WriteState::is_stopped`]: readable without the lock.
    stopped: Arc<AtomicBool>,
    /// Callback for the first change after a commit.
    pub(crate) on_first_change: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// Callback between retries of a change that finds no space.
    pub(crate) on_no_space: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Callback for queued data that a separate thread sends.
    pub(crate) on_queued_contents: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Recorder of every change, for a restarted process; shared with the state.
    pub(crate) change_recorder: Arc<OnceLock<Arc<dyn ChangeRecorder>>>,
    /// MMP claim, if other hosts can reach the volume.
    pub(crate) claim: Option<MmpClaim>,
}

impl WriteContext {
    pub(crate) fn new(
        writer: WriteState,
        commit_queue: CommitQueue,
        writing: WriteOptions,
    ) -> Self {
        Self {
            stopped: writer.is_stopped.clone(),
            change_recorder: writer.change_recorder.clone(),
            state: RecursiveRwLock::new(writer),
            commit_queue,
            group_commit: GroupCommit::default(),
            dirty_limit: writing.dirty_bytes,
            clock: writing.clock,
            pending_access_times: PendingAccessTimes::new(writing.atime),
            discard: writing.discard,
            on_first_change: Mutex::default(),
            on_no_space: OnceLock::new(),
            on_queued_contents: OnceLock::new(),
            claim: None,
        }
    }

    /// Returns true if the volume is not written any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Calls the callback for the first change after a commit.
    pub(crate) fn notify_first_change(&self) {
        if let Some(tell) = &*self.on_first_change.lock() {
            tell();
        }
    }
}

impl std::fmt::Debug for WriteContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { state, commit_queue, pending_access_times, .. } = self;
        f.debug_struct("WriteSide")
            .field("gate", state)
            .field("outbox", commit_queue)
            .field("accesses", pending_access_times)
            .finish_non_exhaustive()
    }
}

/// State of a writable volume. A transaction holds its lock exclusively; readers share it.
pub(crate) struct WriteState {
    pub(crate) dirty_limit: u64,
    pub(crate) groups: Groups,
    pub(crate) quotas: Quotas,
    pub(crate) batch: Batch,
    pub(crate) protocol: Box<dyn CommitProtocol>,
    /// Number of the last chain that is visible to readers of the disk.
    pub(crate) visible_chain: u64,
    /// User counts of open inodes; an orphan is kept while it has users.
    pub(crate) users: HashMap<u32, u64>,
    /// On-disk orphan list, in order of insertion: the last entry is the head on disk.
    pub(crate) orphan_list: Vec<u32>,
    /// `O_TMPFILE` inodes, which may still get a name.
    pub(crate) tmpfiles: HashSet<u32>,
    stopped: Option<StopReason>,
    /// Copy of `stopped` that is readable without the write lock.
    is_stopped: Arc<AtomicBool>,
    change_recorder: Arc<OnceLock<Arc<dyn ChangeRecorder>>>,
    /// True if the volume was cleanly unmounted before.
    pub(crate) was_clean: bool,
    /// True if the superblock on disk has the "in use" mark.
    pub(crate) is_marked_in_use: bool,
    /// Group at which the search for a new top directory's group starts.
    pub(crate) next_top_dir_group: u32,
    /// Generation for new inodes: distinguishes files that reuse an inode number.
    pub(crate) generation: u32,
    /// Orphans without users, to be deleted after the current change.
    pub(crate) pending_deletions: Vec<u32>,
    /// Block of the last insert, for directories without an index.
    pub(crate) insert_hints: HashMap<u32, u32>,
    /// True if the current change modified anything in memory.
    pub(crate) is_modified: bool,
    /// Number of changes made.
    pub(crate) change_count: u64,
    /// Number of the last change in the batch that is being closed.
    pub(crate) batch_change: u64,
    /// True once the current change is complete.
    pub(crate) is_change_complete: bool,
    /// Inode created by the current change.
    pub(crate) created_inode: Option<FileId>,
    /// Inode renamed by the current change.
    pub(crate) renamed_inode: Option<InodeNumber>,
    /// Record that the current change replays.
    pub(crate) replaying: Option<ChangeRecord>,
    /// The volume was resumed after a crash: clients of the old process may still hold any inode
    /// open.
    pub(crate) is_resumed: bool,
}

impl std::fmt::Debug for WriteState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("batch", &self.batch).finish_non_exhaustive()
    }
}

impl WriteState {
    pub(crate) fn new(
        protocol: Box<dyn CommitProtocol>,
        groups: Groups,
        writing: &WriteOptions,
        was_clean: bool,
    ) -> Self {
        Self {
            generation: (writing.clock)().nanoseconds,
            dirty_limit: writing.dirty_bytes,
            groups,
            quotas: Quotas::default(),
            batch: Batch::default(),
            protocol,
            visible_chain: 0,
            users: HashMap::new(),
            orphan_list: vec![],
            tmpfiles: HashSet::new(),
            stopped: None,
            is_stopped: Arc::default(),
            change_recorder: Arc::default(),
            was_clean,
            is_marked_in_use: false,
            next_top_dir_group: 0,
            pending_deletions: vec![],
            insert_hints: HashMap::new(),
            is_modified: false,
            change_count: 0,
            batch_change: 0,
            is_change_complete: false,
            created_inode: None,
            renamed_inode: None,
            replaying: None,
            is_resumed: false,
        }
    }

    /// Returns the numbers of free blocks and inodes.
    pub(crate) fn free_counts(&self) -> (u64, u64) {
        (self.groups.free_blocks(), self.groups.free_inodes)
    }

    pub(crate) fn failure(&self) -> Option<String> {
        match &self.stopped {
            Some(StopReason::Failed(why)) => Some(why.clone()),
            Some(StopReason::Closed) | None => None,
        }
    }

    pub(crate) fn stop(&mut self, why: &Error) {
        if self.stopped.is_none() {
            let why = why.to_string();
            log::error!("{why}: the volume is read-only from now on");
            // Recorded before a client can learn of it.
            if let Some(recorder) = self.change_recorder.get() {
                recorder.record_stop(&why);
            }
            self.set_stopped(Some(StopReason::Failed(why)));
        }
    }

    pub(crate) fn stopped(&self) -> Option<&StopReason> {
        self.stopped.as_ref()
    }

    pub(crate) fn set_stopped(&mut self, stopped: Option<StopReason>) {
        self.is_stopped.store(stopped.is_some(), Ordering::Release);
        self.stopped = stopped;
    }
}
