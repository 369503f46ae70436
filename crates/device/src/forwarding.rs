//! Disks that forward to an inner disk.

use std::sync::Arc;

use draconis_types::Block;

use crate::{
    AllocationRun, ChainBounds, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer,
    Refused, SubmitOptions, Ticket, Urgency,
};

/// A disk that forwards every call it does not override to an inner disk, and so implements
/// [`Disk`]. New calls of [`Disk`] are thus forwarded by all such disks.
///
/// Law 1: [`Disk::submit_chain`] also goes through [`ForwardingDisk::submit_with`]: one function
/// sees every chain. Holes do not: a disk that must see all changes, or has other addresses,
/// overrides [`ForwardingDisk::punch_hole`] as well.
/// Law 2: a disk that overrides [`ForwardingDisk::wait_durable`] also overrides `submit_with`,
/// which can wait.
///
/// Implement it by its path, without importing it: its methods have the names of those of [`Disk`].
///
/// ```
/// use draconis_device::{Disk, MemoryDisk, Properties};
///
/// /// A disk that says it cannot be written.
/// struct Shown(MemoryDisk);
///
/// impl draconis_device::ForwardingDisk for Shown {
///     type Inner = MemoryDisk;
///
///     fn inner_disk(&self) -> &MemoryDisk {
///         &self.0
///     }
///
///     fn properties(&self) -> Properties {
///         Properties { read_only: true, ..self.0.properties() }
///     }
/// }
///
/// let shown = Shown(MemoryDisk::new(vec![0; 4096], 512));
/// assert!(Disk::properties(&shown).read_only && shown.max_len_bytes() == 4096);
/// ```
pub trait ForwardingDisk: Send + Sync {
    /// Type of the inner disk.
    type Inner: Disk + ?Sized;

    /// Returns the inner disk.
    fn inner_disk(&self) -> &Self::Inner;

    /// As [`Disk::properties`].
    fn properties(&self) -> Properties {
        self.inner_disk().properties()
    }

    /// As [`Disk::max_len_bytes`].
    fn max_len_bytes(&self) -> u64 {
        self.inner_disk().max_len_bytes()
    }

    /// As [`Disk::refresh`].
    fn refresh(&self) -> Result<(), Error> {
        self.inner_disk().refresh()
    }

    /// As [`Disk::chain_bounds`].
    fn chain_bounds(&self) -> ChainBounds {
        self.inner_disk().chain_bounds()
    }

    /// As [`Disk::read`].
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        self.inner_disk().read(at, into, urgency)
    }

    /// As [`Disk::submit_with`].
    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        self.inner_disk().submit_with(chain, after, terms)
    }

    /// As [`Disk::wait_visible`].
    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        self.inner_disk().wait_visible(ticket)
    }

    /// As [`Disk::can_be_unreachable`].
    fn can_be_unreachable(&self) -> bool {
        self.inner_disk().can_be_unreachable()
    }

    /// As [`Disk::outage_message`].
    fn outage(&self) -> Option<String> {
        self.inner_disk().outage_message()
    }

    /// As [`Disk::wait_commit_interval`].
    fn wait_commit_interval(&self) {
        self.inner_disk().wait_commit_interval();
    }

    /// As [`Disk::wait_durable`].
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        self.inner_disk().wait_durable(ticket)
    }

    /// As [`Disk::discard`].
    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        self.inner_disk().discard(extents, after)
    }

    /// As [`Disk::punch_hole`].
    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        self.inner_disk().punch_hole(at)
    }

    /// As [`Disk::wait_all_durable`].
    fn wait_all_durable(&self) -> Result<(), Error> {
        self.inner_disk().wait_all_durable()
    }

    /// As [`Disk::allocation_run`].
    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        self.inner_disk().allocation_run(at)
    }

    /// As [`Disk::reserve`].
    fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        self.inner_disk().reserve(bytes)
    }
}

/// A shared disk is a disk.
impl<D: Disk + ?Sized> ForwardingDisk for Arc<D> {
    type Inner = D;

    fn inner_disk(&self) -> &D {
        self
    }
}

impl<T: ForwardingDisk> Disk for T {
    fn properties(&self) -> Properties {
        ForwardingDisk::properties(self)
    }

    fn max_len_bytes(&self) -> u64 {
        ForwardingDisk::max_len_bytes(self)
    }

    fn refresh(&self) -> Result<(), Error> {
        ForwardingDisk::refresh(self)
    }

    fn chain_bounds(&self) -> ChainBounds {
        ForwardingDisk::chain_bounds(self)
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        ForwardingDisk::read(self, at, into, urgency)
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        ForwardingDisk::submit_with(self, chain, after, SubmitOptions::default())
    }

    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        ForwardingDisk::submit_with(self, chain, after, terms)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        ForwardingDisk::wait_visible(self, ticket)
    }

    fn can_be_unreachable(&self) -> bool {
        ForwardingDisk::can_be_unreachable(self)
    }

    fn outage_message(&self) -> Option<String> {
        ForwardingDisk::outage(self)
    }

    fn wait_commit_interval(&self) {
        ForwardingDisk::wait_commit_interval(self);
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        ForwardingDisk::wait_durable(self, ticket)
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        ForwardingDisk::discard(self, extents, after)
    }

    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        ForwardingDisk::punch_hole(self, at)
    }

    fn wait_all_durable(&self) -> Result<(), Error> {
        ForwardingDisk::wait_all_durable(self)
    }

    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        ForwardingDisk::allocation_run(self, at)
    }

    fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        ForwardingDisk::reserve(self, bytes)
    }
}
