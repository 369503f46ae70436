//! A disk that remembers the mark of the last chain that it accepted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{Disk, Group, Refused, SubmitOptions, Ticket};

/// Forwards to a disk, and records the mark of each accepted chain.
pub(crate) struct AcceptedMarkDisk<D> {
    disk: D,
    mark: Arc<AtomicU64>,
}

impl<D: Disk> AcceptedMarkDisk<D> {
    /// Wraps `disk` and keeps its last mark in `mark`.
    pub(crate) fn new(disk: D, mark: Arc<AtomicU64>) -> Self {
        Self { disk, mark }
    }
}

impl<D: Disk> draconis_device::ForwardingDisk for AcceptedMarkDisk<D> {
    type Inner = D;

    fn inner_disk(&self) -> &D {
        &self.disk
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let group_count = chain.len();
        let tickets = self.inner_disk().submit_chain(chain, after)?;
        log::debug!("disk: accepted {group_count} groups, up to change {}", terms.mark);
        // The chain is accepted, whatever the result of the wait.
        self.mark.fetch_max(terms.mark, Ordering::Release);
        terms.wait(&self.disk, &tickets)?;
        Ok(tickets)
    }
}
