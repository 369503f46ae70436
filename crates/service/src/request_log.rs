//! The worker side of the oplog: a worker logs its requests, and replays those of its predecessor.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use draconis_exchange::contract::request_log::{
    DeferredRequest, LoggedRequest, RequestData, RequestLog, RequestOutcome,
};
use draconis_exchange::heap::PoolBuffer;
use draconis_ext::{ChangeRecord, InodeNumber};
use draconis_types::Node;
use draconis_types::injected_fault::InjectedFault;
use draconis_types::lock::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::oplog::OpLog;
use crate::options::MountOptions;
use crate::volume::VolumeTree;

/// Interval at which replayed changes are committed: a worker that dies during replay then leaves
/// fewer changes to its successor.
const REPLAY_COMMIT_INTERVAL: Duration = Duration::from_millis(20);

/// Parameters that a keeper passes to a worker that it starts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WorkerStart {
    /// Mount options.
    pub(crate) options: MountOptions,
    /// Number of workers that the mount has had, this one included.
    pub(crate) epoch: u64,
    /// Epoch of the last worker whose changes may be in the oplog, and the last of its changes that
    /// the disk has accepted.
    pub(crate) taken: (u64, u64),
    /// True if the volume was clean before the first worker opened it; `None` if none has opened
    /// it.
    pub(crate) was_clean: Option<bool>,
    /// True if the mount has been made read-only since.
    pub(crate) closed: bool,
    /// Quarantined requests: each killed more than one worker.
    pub(crate) refused: Vec<u64>,
}

/// The [`RequestLog`] of a worker: its oplog and its volume.
pub(crate) struct WorkerRequestLog {
    log: Arc<OpLog>,
    tree: Arc<OnceLock<VolumeTree>>,
    epoch: u64,
    accepted_through: (u64, u64),
    quarantined: Vec<u64>,
    /// Descriptions of the quarantined requests that were refused.
    refused_descriptions: Mutex<Vec<String>>,
    /// Results of the inherited changes by their position in the oplog.
    inherited: Mutex<HashMap<u64, ChangeRecord>>,
    /// Time of the first replayed change that is not committed yet.
    replay_uncommitted_since: Mutex<Option<Instant>>,
    /// Thread that commits to free space in the oplog before it is full.
    commit_helper: OnceLock<Thread>,
}

impl WorkerRequestLog {
    pub(crate) fn new(
        log: Arc<OpLog>,
        tree: Arc<OnceLock<VolumeTree>>,
        start: &WorkerStart,
    ) -> Self {
        let (epoch, accepted_through, quarantined) =
            (start.epoch, start.taken, start.refused.clone());
        let (refused_descriptions, inherited, helper) =
            (Mutex::default(), Mutex::default(), OnceLock::new());
        let replay_uncommitted_since = Mutex::default();
        Self {
            log,
            tree,
            epoch,
            accepted_through,
            quarantined,
            refused_descriptions,
            inherited,
            replay_uncommitted_since,
            commit_helper: helper,
        }
    }

    /// Returns descriptions of the refused requests, which had killed workers.
    pub(crate) fn quarantine_messages(&self) -> Vec<String> {
        self.refused_descriptions.lock().clone()
    }

    /// Returns true if the oplog needs space soon.
    pub(crate) fn needs_commit(&self) -> bool {
        self.log.needs_commit()
    }

    /// Sets the thread that commits when little space is left in the oplog.
    pub(crate) fn set_commit_helper(&self, helper: Thread) {
        // A second call has no effect.
        let _ = self.commit_helper.set(helper);
    }

    fn inherited_results(&self) -> MutexGuard<'_, HashMap<u64, ChangeRecord>> {
        self.inherited.lock()
    }

    /// Commits to the disk to free space in the oplog. Returns true if further changes are
    /// possible.
    pub(crate) fn commit_to_free_space(&self) -> bool {
        let Some(tree) = self.opened_tree() else { return false };
        let taken = self.submit_pending_changes();
        self.log.free_finished_entries();
        // The oplog keeps submitted changes until they are written.
        while taken && self.log.needs_commit() && tree.volume().wait_oldest_visible() == Ok(true) {}
        // Other threads may have a reply to send.
        std::thread::yield_now();
        taken
    }

    fn opened_tree(&self) -> Option<&VolumeTree> {
        self.tree.get()
    }

    /// Submits all changes to the disk; returns true on success. A failure ends all changes.
    fn submit_pending_changes(&self) -> bool {
        // File data as well that another thread had queued.
        let volume = self.opened_tree().map(VolumeTree::volume);
        volume.is_some_and(|it| it.submit_commit().and_then(|()| it.send_queued()).is_ok())
    }

    /// Counts a replayed change; commits at intervals of [`REPLAY_COMMIT_INTERVAL`].
    fn commit_replayed(&self) {
        let mut since = self.replay_uncommitted_since.lock();
        if since.get_or_insert_with(Instant::now).elapsed() >= REPLAY_COMMIT_INTERVAL {
            *since = None;
            self.submit_pending_changes();
        }
    }
}

impl RequestLog for WorkerRequestLog {
    fn allocate_buffer(&self, len: usize) -> Option<PoolBuffer> {
        self.log.buffer_pool().allocate(len)
    }

    fn begin_request(&self, unique: u64, changing: Option<(&[u8], RequestData<'_>)>) {
        if changing.is_some() && self.needs_commit() {
            match self.commit_helper.get().filter(|_| !self.log.should_block_clients()) {
                Some(helper) => helper.unpark(),
                None => drop(self.commit_to_free_space()),
            }
        }
        self.log.begin_request(unique, changing, || self.commit_to_free_space());
    }

    fn record_outcome(&self, outcome: RequestOutcome) {
        if outcome.errno != 0 && self.log.has_changed() {
            self.submit_pending_changes();
        }
        self.log.record_outcome(outcome);
    }

    fn finish_request(&self) {
        self.log.finish_request();
    }

    fn defer_completion(&self) -> Option<DeferredRequest> {
        self.log.defer_completion()
    }

    fn finish_deferred(&self, deferred: DeferredRequest) {
        self.log.finish_deferred(deferred);
    }

    fn is_quarantined(&self, unique: u64) -> bool {
        self.quarantined.contains(&unique)
    }

    fn report_quarantined(&self, what: String) {
        log::error!("{what} is refused: workers died over it");
        self.refused_descriptions.lock().push(what);
    }

    fn unfinished_requests(&self) -> Result<Option<Vec<LoggedRequest>>, String> {
        if self.epoch <= 1 {
            return Ok(None);
        }
        let found =
            self.log.load_unfinished(self.accepted_through).map_err(|why| why.to_string())?;
        let mut left = self.inherited_results();
        left.extend(found.iter().map(|(inherited, made)| (inherited.position, *made)));
        Ok(Some(found.into_iter().map(|(inherited, _)| inherited).collect()))
    }

    fn replay(&self, inherited: &LoggedRequest, work: &mut dyn FnMut()) {
        let made = self.inherited_results().get(&inherited.position).copied();
        let Some(tree) = self.opened_tree() else { return };
        tree.volume().set_replay(made.map(|made| match InjectedFault::SameInode.is_made() {
            true => ChangeRecord { inode: None, ..made },
            false => made,
        }));
        self.log.replay(inherited.position, inherited.unique, work);
        tree.volume().set_replay(None);
        self.commit_replayed();
    }

    fn fail_replay(&self, why: &str) {
        if let Some(tree) = self.opened_tree() {
            tree.volume()
                .stop_on_mismatch(&format!("the worker before left what cannot be: {why}"));
        }
    }

    fn end_replay(&self) {
        let left = std::mem::take(&mut *self.inherited_results());
        self.log.finish_inherited(left.into_keys());
    }

    fn finish_replay(&self) {
        let (Some(tree), Some(why)) = (self.opened_tree(), self.log.stop_reason()) else { return };
        // The disk may still accept some replayed changes; an error here ends changes, too.
        self.submit_pending_changes();
        tree.volume().stop_as_before(why);
    }

    fn orphans(&self) -> Vec<Node> {
        let all = self.opened_tree().map(|tree| tree.volume().orphans()).unwrap_or_default();
        all.into_iter().map(|inode| Node(inode.0.into())).collect()
    }

    fn is_orphan(&self, node: Node) -> bool {
        let inode = InodeNumber::from_node(node).filter(|_| self.epoch > 1);
        let tree = self.opened_tree().zip(inode);
        tree.is_some_and(|(tree, inode)| tree.volume().is_orphan(inode))
    }

    fn release_orphans(&self, nodes: &[Node]) {
        nodes.iter().for_each(|node| self.release_orphan(*node));
        if let Some(tree) = self.opened_tree() {
            // Freed space becomes usable once the deletion is durable. An error here returns when
            // the space is allocated.
            let _ = tree.volume().sync();
        }
    }

    fn release_orphan(&self, node: Node) {
        if let (Some(tree), Some(inode)) = (self.opened_tree(), InodeNumber::from_node(node)) {
            tree.volume().delete_orphan(inode);
        }
    }
}
