//! Notifies the kernel that its cached pages are outdated.
//!
//! ```text
//!   direct write ─ applied ─▶ queue ─▶ this thread: notification, then the write's reply
//! ```
//! The kernel drops pages around a direct write only if the writer waits for it. After the
//! asynchronous writes of `io_submit` and io_uring, readers would keep the old data for good.
//!
//! Law 1: a write is answered once no cached page is older than it.
//! Law 2: no thread that answers requests sends these notifications. Before the kernel drops pages,
//! it waits for pending reads and writes dirty ones back, which other threads must answer. The
//! keeper sends those of a worker, since it outlives it: see
//! [`notices`](draconis_exchange::notices).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use draconis_exchange::contract::request_log::DeferredRequest;
use draconis_types::Node;
use draconis_types::lock::Mutex;

use super::reply::Reply;

/// Number of bits: nodes are distinguished by their number modulo this.
const FILTER_BITS: usize = 1 << 19;

/// Filter of nodes with pages in the kernel's cache. False positives are possible.
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

    /// Records that the kernel is about to cache pages of a node.
    pub(super) fn insert(&self, node: Node) {
        let (word, bit) = Self::word_and_bit(node);
        // The bit is usually set already.
        if self.0[word].load(Ordering::Relaxed) & bit == 0 {
            self.0[word].fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Assumes that the kernel may have cached pages of any node.
    pub(super) fn insert_all(&self) {
        self.0.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    pub(super) fn may_contain(&self, node: Node) -> bool {
        let (word, bit) = Self::word_and_bit(node);
        self.0[word].load(Ordering::Relaxed) & bit != 0
    }
}

/// A task of the notifying thread.
pub(super) enum NotifyTask {
    /// Send a notification, then the reply.
    NotifyThenReply {
        both: Box<[Reply; 2]>,
        /// The request, which is finished once the reply is sent.
        deferred: Option<DeferredRequest>,
    },
    /// Check whether the kernel still references an orphan.
    CheckOrphan(Node),
}

/// The queue to the thread that sends notifications.
pub(super) struct Notifier(Mutex<Option<Sender<NotifyTask>>>);

impl Notifier {
    /// Creates a queue, and the receiver for the thread, which ends when the queue is closed.
    pub(super) fn new() -> (Self, Receiver<NotifyTask>) {
        let (queue, late) = channel();
        (Self(Mutex::new(Some(queue))), late)
    }

    /// Queues a task. Does nothing after `close`, when the mount has ended.
    pub(super) fn send(&self, late: NotifyTask) {
        if let Some(queue) = &*self.0.lock() {
            // The thread receives as long as the queue is open.
            let _ = queue.send(late);
        }
    }

    /// Lets the thread exit.
    pub(super) fn close(&self) {
        self.0.lock().take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_cache_filter_has_no_false_negatives() {
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
    fn closed_notifier_ends_queue() {
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
