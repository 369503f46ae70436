//! The way of messages to the kernel: over the device file, or a reply over the ring that its
//! request came from.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use super::decoder::u64_at;
use super::reply::Reply;
use super::ring::RingSet;

/// The connection to the kernel.
#[derive(Clone, Copy)]
pub(super) struct Transport<'t> {
    /// The device file: notifications, and whatever does not go over rings.
    pub(super) fuse: BorrowedFd<'t>,
    /// The rings, if the kernel was offered them.
    pub(super) rings: Option<&'t RingSet>,
}

impl Transport<'_> {
    /// Sends a reply. An error has no consequence: usually the request was withdrawn.
    pub(super) fn send_reply(self, reply: &Reply) {
        self.send(&[IoSlice::new(reply.as_bytes())]);
    }

    /// Sends a reply in parts, the first of which has its header.
    pub(super) fn send(self, parts: &[IoSlice<'_>]) {
        let unique = parts.first().and_then(|head| u64_at(head, 8)).unwrap_or_default();
        if let Some((queue, entry)) = self.find_entry(unique) {
            return queue.answer(entry, parts);
        }
        if let Err(error) = rustix::io::writev(self.fuse, parts) {
            log::debug!("a reply was not taken: {error}");
        }
    }

    /// Has `write` write the reply to the request `unique` to a file.
    pub(super) fn send_from_file(self, unique: u64, write: impl FnOnce(BorrowedFd<'_>)) {
        match self.find_entry(unique) {
            Some((queue, entry)) => queue.answer_from_file(entry, write),
            None => write(self.fuse),
        }
    }

    fn find_entry(&self, unique: u64) -> Option<(&super::ring::Queue, usize)> {
        // 0: a notification, or an entry that the kernel has.
        self.rings.filter(|_| unique != 0).and_then(|rings| rings.find(unique))
    }
}
