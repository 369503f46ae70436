//! Who is told of each change of a volume: clients that keep what they have read, and a log.
//!
//! Law: they are told before a reader of the volume sees the change, so what a client asks for
//! after it looked is never older than what it saw.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use draconis_exchange::channel::ChangeNotifier;
use draconis_ext::{ChangeRecord, ChangeRecorder, InodeNumber};

/// See the head of the file.
#[derive(Default)]
pub(super) struct ChangeFanout {
    clients: Mutex<Vec<ChangeNotifier>>,
    next: OnceLock<Arc<dyn ChangeRecorder>>,
}

impl ChangeFanout {
    /// Tells a client from now on, until its channel is closed.
    pub(super) fn add_client(&self, client: ChangeNotifier) {
        let mut clients = self.clients();
        clients.retain(ChangeNotifier::is_open);
        clients.push(client);
    }

    /// Tells `witness`, too. The first stays.
    pub(super) fn set_oplog(&self, witness: Arc<dyn ChangeRecorder>) {
        let _ = self.next.set(witness);
    }

    fn clients(&self) -> MutexGuard<'_, Vec<ChangeNotifier>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChangeRecorder for ChangeFanout {
    fn record_change(&self, number: u64, made: ChangeRecord) {
        if let Some(next) = self.next.get() {
            next.record_change(number, made);
        }
        self.clients().retain(ChangeNotifier::notify_change);
    }

    fn record_partial_failure(&self) {
        if let Some(next) = self.next.get() {
            next.record_partial_failure();
        }
        self.clients().retain(ChangeNotifier::notify_change);
    }

    fn accepted_through(&self, number: u64) {
        if let Some(next) = self.next.get() {
            next.accepted_through(number);
        }
    }

    fn record_orphan(&self, number: u64, inode: InodeNumber, all: &dyn Fn() -> Vec<InodeNumber>) {
        if let Some(next) = self.next.get() {
            next.record_orphan(number, inode, all);
        }
    }
}
