//! Telling the kernel that pages it keeps are old.
//!
//! ```text
//!   direct write ─ applied ─▶ queue ─▶ this thread: notification, then the write's reply
//! ```
//! The kernel drops pages around a direct write by itself only where the writer waits for
//! it; behind the asynchronous ones of `io_submit` and io_uring readers keep what was there
//! before, for good.
//!
//! Law 1: a write is answered once no page is older than it.
//! Law 2: no thread that answers requests sends these notifications. The kernel waits for
//! pages that it has asked for, and writes changed ones back, before it drops them:
//! another thread has to answer that. Of a worker the keeper sends them, which outlives it: see
//! [`notices`](draconis_exchange::notices).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use draconis_exchange::contract::Node;
use draconis_exchange::contract::request_log::Deferred;

use super::reply::Reply;

/// Nodes that are told from each other: by their number, modulo this.
const FILTER_BITS: usize = 1 << 19;

/// Which nodes the kernel may have pages of. It may say so of too many.
pub(super) struct PageCacheFilter(Box<[AtomicU64]>);

impl Default for PageCacheFilter {
    fn default() -> Self {
        Self((0..FILTER_BITS / 64).map(|_| AtomicU64::new(0)).collect())
    }
}

impl PageCacheFilter {
    fn word_and_bit(node: Node) -> (usize, u64) {
        let nth = node.0 as usize % FILTER_BITS;
        (nth / 64, 1 << (nth % 64))
    }

    /// The kernel is about to get some.
    pub(super) fn insert(&self, node: Node) {
        let (word, bit) = Self::word_and_bit(node);
        // Most often it is known.
        if self.0[word].load(Ordering::Relaxed) & bit == 0 {
            self.0[word].fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// The kernel has some of any node, for what is known.
    pub(super) fn insert_all(&self) {
        self.0.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    pub(super) fn may_contain(&self, node: Node) -> bool {
        let (word, bit) = Self::word_and_bit(node);
        self.0[word].load(Ordering::Relaxed) & bit != 0
    }
}

/// What waits for a notification.
pub(super) enum NotifyTask {
    /// A notification and the reply that follows it.
    NotifyThenReply {
        both: Box<[Reply; 2]>,
        /// The request, which is done once the reply is sent.
        deferred: Option<Deferred>,
    },
    /// To know whether the kernel still has a node that has no name.
    CheckOrphan(Node),
}

/// The queue to the thread that sends notifications.
pub(super) struct Notifier(Mutex<Option<Sender<NotifyTask>>>);

impl Notifier {
    /// A queue, and the end that the thread takes from until it is closed.
    pub(super) fn new() -> (Self, Receiver<NotifyTask>) {
        let (queue, late) = channel();
        (Self(Mutex::new(Some(queue))), late)
    }

    /// Sends both when their turn comes; nothing once it was closed: the mount has ended.
    pub(super) fn send(&self, late: NotifyTask) {
        if let Some(queue) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // It takes from the queue for as long as that is open.
            let _ = queue.send(late);
        }
    }

    /// Lets the thread end.
    pub(super) fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_pages_are_known() {
        let pages = PageCacheFilter::default();
        for node in [1, 63, 64, 500_000] {
            assert!(!pages.may_contain(Node(node)));
            pages.insert(Node(node));
            assert!(pages.may_contain(Node(node)));
        }
        assert!(!pages.may_contain(Node(2)));
        assert!(pages.may_contain(Node(2_u64.pow(19) + 1)), "too many rather than too few");
    }

    #[test]
    fn a_closed_queue_ends_its_thread() {
        let (notifier, queue) = Notifier::new();
        let late = || {
            let both = Box::new([Reply::invalidate_attributes(Node(1)), Reply::new(1, 0, &[])]);
            NotifyTask::NotifyThenReply { both, deferred: None }
        };
        notifier.send(late());
        notifier.close();
        notifier.send(late());
        assert_eq!(queue.iter().count(), 1);
    }
}
