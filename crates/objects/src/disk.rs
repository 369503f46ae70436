//! Presents an object as a disk, for a file system.
//!
//! ```text
//!   submit_chain ─▶ one group of the store ─▶ settled at once ─▶ wait: the store's wait
//! ```
//!
//! Law 1: a chain is one group of the store. It is accepted or refused as a whole, space included,
//! and after a power cut all of it is there or nothing. A chain asks only for order.
//! Law 2: tickets are the disk's own. The store gives one ticket to several groups that become
//! durable together; a disk must not.
//! Law 3: the disk is as long as the object was when it was opened.
//! Law 4: a discarded range is a hole: it reads as zeros and takes no space.
//! Law 5: space reserved for a disk is there when it writes; unused space is released with the
//! disk.
//! Law 6: between two requests, a disk may switch to another object with the same contents.

mod fork;
pub(crate) mod lineage;
mod names;

use std::collections::VecDeque;
use std::sync::Arc;

use draconis_device::{
    AllocationRun, Atomic, Disk, Error as DiskError, Extent, Group as DiskGroup, Pending,
    Properties, ReadAnswer, Refused, Ticket as DiskTicket, Urgency,
};
use draconis_types::lock::{Mutex, RwLock};
use rustix::io::Errno;

use crate::store::CurrentObject;
use crate::{Error, Group, ObjectId, Result, Store, Ticket};

/// Unit of reads and writes. Any length would do; every file system can use this one.
const SECTOR_BYTES: u32 = 512;
/// Longest payload of one entry: longer requests gain nothing.
#[allow(clippy::cast_possible_truncation, reason = "a constant that fits")]
const OPTIMAL_IO_BYTES: u32 = crate::entry::MAX_PAYLOAD_BYTES as u32;

/// An object as a disk: see [`Store::disk`].
#[derive(Debug)]
pub struct ObjectDisk {
    store: Arc<Store>,
    place: Arc<CurrentObject>,
    properties: Properties,
    tickets: Mutex<DiskTickets>,
}

/// Issued tickets of a disk.
#[derive(Debug, Default)]
struct DiskTickets {
    last: u64,
    /// Bytes reserved in the store.
    kept_bytes: u64,
    /// Last disk ticket of each store ticket that may not be durable yet.
    open: VecDeque<(DiskTicket, Ticket)>,
}

impl DiskTickets {
    fn check(&self, ticket: DiskTicket) -> std::result::Result<(), DiskError> {
        if ticket.0 > self.last { Err(DiskError::UnknownTicket(ticket)) } else { Ok(()) }
    }

    /// Issues disk tickets for a group that the store accepted.
    fn issue_tickets(&mut self, groups: usize, ticket: Ticket) -> Vec<DiskTicket> {
        let first = self.last.saturating_add(1);
        self.last = self.last.saturating_add(groups as u64);
        let newest = DiskTicket(self.last);
        match self.open.back_mut() {
            Some((last, same)) if *same == ticket => *last = newest,
            _ => self.open.push_back((newest, ticket)),
        }
        (first..=self.last).map(DiskTicket).collect()
    }

    /// Returns the store ticket that a disk ticket waits for.
    fn store_ticket(&self, ticket: DiskTicket) -> Option<Ticket> {
        let index = self.open.partition_point(|(last, _)| *last < ticket);
        self.open.get(index).map(|(_, ticket)| *ticket)
    }

    fn remove_durable(&mut self, ticket: Ticket) {
        while self.open.front().is_some_and(|(_, first)| *first <= ticket) {
            self.open.pop_front();
        }
    }
}

impl Store {
    /// Returns the object as a disk of its current length, with groups that are atomic against
    /// power cuts. No other user may change the object meanwhile. The disk is read-only if the
    /// object has children.
    ///
    /// [`Error::NoObject`], or the error of reading the index.
    pub fn disk(self: &Arc<Self>, id: ObjectId) -> Result<ObjectDisk> {
        let record = self.object_record(id)?.ok_or(Error::NoObject(id))?;
        let (len, is_read_only) = (record.len, self.is_read_only() || record.children > 0);
        let properties = Properties {
            len_bytes: len.saturating_sub(len.checked_rem(u64::from(SECTOR_BYTES)).unwrap_or(0)),
            sector_bytes: SECTOR_BYTES,
            best_io_bytes: OPTIMAL_IO_BYTES,
            rotational: self.is_rotational(),
            read_only: is_read_only,
            atomic: Atomic::AgainstPowerCut,
            discards: !is_read_only,
        };
        let place = Arc::new(RwLock::new(id));
        self.open.lock().push(Arc::downgrade(&place));
        Ok(ObjectDisk { store: self.clone(), place, properties, tickets: Mutex::default() })
    }
}

impl ObjectDisk {
    /// Returns the disk as a read-only one.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        (self.properties.read_only, self.properties.discards) = (true, false);
        self
    }

    /// Returns the object's id.
    pub fn id(&self) -> ObjectId {
        *self.place.read()
    }

    /// Releases `bytes` of the disk's reservation.
    fn release_reservation(&self, given: &mut DiskTickets, bytes: u64) {
        let used = bytes.min(given.kept_bytes);
        given.kept_bytes = given.kept_bytes.saturating_sub(used);
        let mut all = self.store.kept_bytes.lock();
        *all = all.saturating_sub(used);
    }

    fn read_extent(&self, at: Extent, into: &mut [u8]) -> std::result::Result<(), DiskError> {
        let id = self.place.read();
        let got = self
            .store
            .read(*id, at.start_bytes, into)
            .map_err(|error| to_disk_error("read", at, error))?;
        if (got as u64) < at.len_bytes {
            return Err(DiskError::ShortRead { extent: at, got_bytes: got as u64 });
        }
        Ok(())
    }

    fn to_store_group(id: ObjectId, chain: &[DiskGroup]) -> Group {
        let mut group = Group::new();
        for write in chain.iter().flat_map(|group| &group.writes) {
            match write.block.bytes() {
                Some(bytes) => group.write(id, write.at_bytes, bytes),
                // Shared memory may change while it is read: the store gets a copy.
                None => {
                    let mut bytes = vec![0; write.block.len()];
                    write.block.copy_out(0, &mut bytes);
                    group.write(id, write.at_bytes, &bytes);
                }
            }
        }
        group
    }
}

/// Converts a store's error to a disk error.
fn to_disk_error(what: &'static str, extent: Extent, error: Error) -> DiskError {
    let errno = match error {
        Error::Device(error) => return error,
        Error::Stopped(_) => return DiskError::Stopped,
        Error::NoObject(_) => return DiskError::ServiceEnded,
        Error::NoSpace { .. } => Errno::NOSPC,
        Error::Corrupt { .. } => Errno::BADMSG,
        Error::NotAStore(_) | Error::Disk(_) => Errno::IO,
        Error::Misuse(_) => Errno::INVAL,
    };
    log::warn!("{what} {extent} of an object: {error}");
    DiskError::Io { what, extent, errno }
}

impl Drop for ObjectDisk {
    fn drop(&mut self) {
        let mut given = std::mem::take(&mut *self.tickets.lock());
        self.release_reservation(&mut given, u64::MAX);
    }
}

impl Disk for ObjectDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, mut into: draconis_types::Block, _: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = self.properties.check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        let done = match into.bytes_mut() {
            Some(bytes) => self.read_extent(at, bytes),
            None => {
                let mut bytes = vec![0; into.len()];
                self.read_extent(at, &mut bytes).map(|()| {
                    into.copy_in(0, &bytes);
                })
            }
        };
        Pending::ready(match done {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { payload: Some(into), error }),
        })
    }

    fn submit_chain(
        &self,
        chain: Vec<DiskGroup>,
        after: &[DiskTicket],
    ) -> std::result::Result<Vec<DiskTicket>, Refused<Vec<DiskGroup>>> {
        let checked = match self.properties.read_only {
            true => Err(DiskError::ReadOnly),
            false => self.properties.check_chain(&chain),
        };
        if let Err(error) = checked {
            return Err(Refused { payload: Some(chain), error });
        }
        let id = self.place.read();
        let group = Self::to_store_group(*id, &chain);
        // Held over both: tickets ascend in the store's order. Groups of a store are ordered
        // anyway, so `after` is only checked.
        let mut given = self.tickets.lock();
        if let Some(error) = after.iter().find_map(|&ticket| given.check(ticket).err()) {
            return Err(Refused { payload: Some(chain), error });
        }
        let bytes = group.len_bytes() as u64;
        match self.store.submit(group, &[]) {
            Ok(ticket) => {
                self.release_reservation(&mut given, bytes);
                Ok(given.issue_tickets(chain.len(), ticket))
            }
            Err(refused) => {
                let first = chain.iter().flat_map(|group| &group.writes).next();
                let extent = first.map_or(Extent::new(0, 0), |write| {
                    Extent::new(write.at_bytes, write.block.len() as u64)
                });
                let error = to_disk_error("write", extent, refused.error);
                Err(Refused { payload: Some(chain), error })
            }
        }
    }

    fn wait_visible(&self, ticket: DiskTicket) -> std::result::Result<(), DiskError> {
        self.tickets.lock().check(ticket)
    }

    fn wait_durable(&self, ticket: DiskTicket) -> std::result::Result<(), DiskError> {
        let stored = {
            let given = self.tickets.lock();
            given.check(ticket)?;
            given.store_ticket(ticket)
        };
        let Some(stored) = stored else { return Ok(()) };
        let whole = Extent::new(0, self.properties.len_bytes);
        self.store.wait(stored).map_err(|error| to_disk_error("flush", whole, error))?;
        self.tickets.lock().remove_durable(stored);
        Ok(())
    }

    fn allocation_run(&self, at: Extent) -> std::result::Result<AllocationRun, DiskError> {
        self.properties.check_extents(&[at])?;
        let id = self.place.read();
        let run = self.store.allocation_run(*id, at.start_bytes, at.len_bytes);
        let (len_bytes, is_hole) = run.map_err(|error| to_disk_error("map", at, error))?;
        Ok(AllocationRun { len_bytes, is_hole })
    }

    fn punch_hole(&self, at: Extent) -> std::result::Result<Option<DiskTicket>, DiskError> {
        self.properties.check_range(at, crate::codec::to_usize_saturating(at.len_bytes))?;
        if self.properties.read_only {
            return Err(DiskError::ReadOnly);
        }
        let id = self.place.read();
        let mut given = self.tickets.lock();
        let mut group = Group::new();
        group.punch_hole(*id, at.start_bytes, at.len_bytes);
        let submitted = self.store.submit(group, &[]);
        let ticket = submitted.map_err(|refused| to_disk_error("write", at, refused.error))?;
        Ok(given.issue_tickets(1, ticket).pop())
    }

    fn wait_all_durable(&self) -> std::result::Result<(), DiskError> {
        let whole = Extent::new(0, self.properties.len_bytes);
        self.store.sync().map_err(|error| to_disk_error("flush", whole, error))
    }

    fn reserve(&self, bytes: u64) -> std::result::Result<u64, DiskError> {
        if self.properties.read_only {
            return Err(DiskError::ReadOnly);
        }
        let mut given = self.tickets.lock();
        if bytes > given.kept_bytes {
            // Held meanwhile: reservations of other disks count.
            let mut all = self.store.kept_bytes.lock();
            let kept = all.saturating_sub(given.kept_bytes).saturating_add(bytes);
            self.store
                .with_core(|core| core.ensure_reservable(kept))
                .map_err(|error| to_disk_error("keep room for", Extent::new(0, bytes), error))?;
            (*all, given.kept_bytes) = (kept, bytes);
        }
        Ok(given.kept_bytes)
    }

    fn discard(
        &self,
        extents: &[Extent],
        after: &[DiskTicket],
    ) -> std::result::Result<(), DiskError> {
        self.properties.check_extents(extents)?;
        let id = self.place.read();
        // Groups of a store are ordered, so the holes come after the tickets in `after`.
        let given = self.tickets.lock();
        after.iter().try_for_each(|&ticket| given.check(ticket))?;
        if self.properties.read_only {
            return Ok(());
        }
        let mut group = Group::new();
        let sector = u64::from(SECTOR_BYTES);
        for whole in extents.iter().filter_map(|extent| extent.inner_aligned_extent(sector)) {
            group.punch_hole(*id, whole.start_bytes, whole.len_bytes);
        }
        if group.is_empty() {
            return Ok(());
        }
        match self.store.submit(group, &[]) {
            // A discard has no ticket: it is durable with the next group.
            Ok(_) => {}
            // Discards are hints and may be refused.
            Err(refused) => log::debug!("a discard of an object: {}", refused.error),
        }
        Ok(())
    }
}
