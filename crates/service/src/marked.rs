//! A disk that remembers what was said of the last chain that it took.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{
    ChainBounds, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused, Terms,
    Ticket, Urgency,
};
use draconis_exchange::heap::Block;

/// See the head of the file.
pub(crate) struct Marked<D> {
    disk: D,
    mark: Arc<AtomicU64>,
}

impl<D: Disk> Marked<D> {
    /// `disk`, whose last mark is kept in `mark`.
    pub(crate) fn new(disk: D, mark: Arc<AtomicU64>) -> Self {
        Self { disk, mark }
    }
}

impl<D: Disk> Disk for Marked<D> {
    fn properties(&self) -> Properties {
        self.disk.properties()
    }

    fn room_bytes(&self) -> u64 {
        self.disk.room_bytes()
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.disk.read(at, into, urgency)
    }

    fn chain_bounds(&self) -> ChainBounds {
        self.disk.chain_bounds()
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.disk.submit_chain(chain, after)
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: Terms,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let tickets = self.disk.submit_chain(chain, after)?;
        // It is taken whatever comes of the wait.
        self.mark.fetch_max(terms.mark, Ordering::Release);
        terms.wait(&self.disk, &tickets)?;
        Ok(tickets)
    }

    fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        self.disk.reserve(bytes)
    }

    fn settle(&self, ticket: Ticket) -> Result<(), Error> {
        self.disk.settle(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), Error> {
        self.disk.wait(ticket)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.disk.discard(extents, after)
    }
}
