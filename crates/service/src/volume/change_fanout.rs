//! Fan-out of each change of a volume: to clients that cache what they have read, and to the oplog.
//!
//! Law: they are notified before a reader of the volume sees the change. So a client that reads
//! after a notification never gets older data than it has seen.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use draconis_exchange::channel::ChangeNotifier;
use draconis_ext::{ChangeRecord, ChangeRecorder, InodeNumber};

/// Passes each change on to the clients and the oplog.
#[derive(Default)]
pub(super) struct ChangeFanout {
    clients: Mutex<Vec<ChangeNotifier>>,
    next: OnceLock<Arc<dyn ChangeRecorder>>,
}

impl ChangeFanout {
    /// Notifies a client from now on, until its channel is closed.
    pub(super) fn add_client(&self, client: ChangeNotifier) {
        let mut clients = self.lock_clients();
        clients.retain(ChangeNotifier::is_open);
        clients.push(client);
    }

    /// Passes changes to `witness`, too. The first call wins.
    pub(super) fn set_oplog(&self, witness: Arc<dyn ChangeRecorder>) {
        let _ = self.next.set(witness);
    }

    fn lock_clients(&self) -> MutexGuard<'_, Vec<ChangeNotifier>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChangeRecorder for ChangeFanout {
    fn record_change(&self, number: u64, made: ChangeRecord) {
        if let Some(next) = self.next.get() {
            next.record_change(number, made);
        }
        self.lock_clients().retain(ChangeNotifier::notify_change);
    }

    fn record_partial_failure(&self) {
        if let Some(next) = self.next.get() {
            next.record_partial_failure();
        }
        self.lock_clients().retain(ChangeNotifier::notify_change);
    }

    fn record_accepted_through(&self, number: u64) {
        if let Some(next) = self.next.get() {
            next.record_accepted_through(number);
        }
    }

    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        if let Some(next) = self.next.get() {
            next.record_orphan(number, inode, all);
        }
    }
}
