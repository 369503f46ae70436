//! The [`Disk`] trait and its types.

use draconis_types::Block;
pub use draconis_types::{ChainBounds, DiskError as Error, Extent, Group, Ticket, Write};

use crate::Pending;

/// Events that groups survive atomically without a flush (ARCHITECTURE, law 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Atomic {
    /// None: a group may be half applied.
    None,
    /// Death of the submitting process: a group is complete or absent.
    AgainstDeath,
    /// Power cut and process death: a group is complete or absent.
    AgainstPowerCut,
}

/// Properties and guarantees of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Properties {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Reads and writes must start and end on multiples of this; a power of two.
    pub sector_bytes: u32,
    /// Request size beyond which throughput hardly grows.
    pub best_io_bytes: u32,
    /// True if seeks cost time.
    pub rotational: bool,
    /// True if `submit` is always refused.
    pub read_only: bool,
    /// Events that groups survive atomically.
    pub atomic: Atomic,
    /// True if [`Disk::discard`] has an effect.
    pub discards: bool,
}

/// A range at the start of another, all of it stored or all of it a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllocationRun {
    /// Length in bytes, at least 1.
    pub len_bytes: u64,
    /// True if the range reads as zeros and takes no space.
    pub is_hole: bool,
}

impl AllocationRun {
    /// Returns the run of `at` on a disk that does not know its holes: all of it is stored.
    pub const fn stored(at: Extent) -> Self {
        Self { len_bytes: at.len_bytes, is_hole: false }
    }
}

/// Urgency of a read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Urgency {
    /// A waiter exists: served at once, in the calling thread if possible.
    Now,
    /// Read-ahead: served in disk order, after all reads that are `Now`.
    Ahead,
}

/// A refusal that returns the arguments.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused<T> {
    /// The arguments, unless they were lost.
    pub payload: Option<T>,
    /// Reason of the refusal.
    #[source]
    pub error: Error,
}

/// Result of a read: the filled block, or the error and the block.
pub type ReadAnswer = Result<Block, Refused<Block>>;

/// Options of a submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubmitOptions {
    /// Value that a disk serving a mortal process remembers with the last accepted chain, unless 0.
    pub mark: u64,
    /// Index of the group to be durable when the call returns, if any. A disk in another process
    /// then needs one message instead of two.
    pub durable: Option<usize>,
}

impl SubmitOptions {
    /// Waits for the requested durability of a chain with `tickets`.
    ///
    /// # Errors
    /// As [`Disk::wait_durable`].
    pub fn wait<D: Disk + ?Sized, G>(self, disk: &D, tickets: &[Ticket]) -> Result<(), Refused<G>> {
        let ticket = self.durable.and_then(|place| tickets.get(place));
        let waited = ticket.map_or(Ok(()), |ticket| disk.wait_durable(*ticket));
        waited.map_err(|error| Refused { payload: None, error })
    }
}

/// A disk: a file, a device, an object of a store, a simulation.
///
/// ```text
///   submit_chain ──▶ accepted ──▶ visible to every read ──▶ durable
///                                 wait_visible              wait_durable
/// ```
///
/// Law 1: groups are accepted, made visible and made durable in ticket order. A ticket reaches each
/// of these states only after all earlier tickets.
/// Law 2: a group is written only after its dependencies - the tickets in `after`, the group before
/// it in its chain - are durable. The disk flushes for that, once for everything written by then,
/// and never for durable groups. A group without dependencies is written without a flush.
/// Law 3: the first failed write or flush ends all writing. Dependents of a failed group are never
/// written.
pub trait Disk: Send + Sync {
    /// Returns sizes and guarantees. They do not change while the disk is open.
    fn properties(&self) -> Properties;

    /// Returns the length to which the disk may grow. Unwritten bytes past the length at open read
    /// as zeros.
    fn max_len_bytes(&self) -> u64 {
        self.properties().len_bytes
    }

    /// Makes later reads see what another machine has written, where that needs a request: a bucket
    /// opened for reading is listed again. On other disks reads always see it.
    ///
    /// # Errors
    /// The disk cannot be read; it still shows its earlier state.
    fn refresh(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Returns the limits of one chain.
    fn chain_bounds(&self) -> ChainBounds {
        ChainBounds::UNLIMITED
    }

    /// Fills `into` from `at`. The block's length must be `at.len_bytes`.
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer>;

    /// Submits a chain: the first group follows those in `after`, each other one the group before
    /// it. Returns at once, with a ticket for each group in order; nothing is durable yet.
    ///
    /// A chain is accepted atomically: if its sender dies, all of it is written or nothing. A disk
    /// that stops midway has written a prefix, as after a power cut: complete groups, and any part
    /// of the next one.
    ///
    /// A disk that is only read need not implement this and the two waits: they refuse.
    ///
    /// # Errors
    /// Returns all groups with the reason, and writes nothing: out of range, misaligned, too large,
    /// an unknown ticket in `after`, read-only, or stopped by an earlier failure.
    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let _ = after;
        Err(Refused { payload: Some(chain), error: Error::ReadOnly })
    }

    /// [`Disk::submit_chain`] with options: see [`SubmitOptions`].
    ///
    /// # Errors
    /// As [`Disk::submit_chain`]. For an accepted chain also as [`Disk::wait_durable`], whatever
    /// blocks the error returns.
    fn submit_with(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        let tickets = self.submit_chain(chain, after)?;
        terms.wait(self, &tickets)?;
        Ok(tickets)
    }

    /// Waits until every read sees the group, also through another descriptor of the file. The
    /// group need not be durable, and nothing is flushed.
    ///
    /// # Errors
    /// As [`Disk::wait_durable`].
    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error> {
        Err(Error::UnknownTicket(ticket))
    }

    /// Returns true if [`Disk::wait_durable`] can return [`Error::Unreachable`]. Callers then wait in a
    /// separate call, which reports it.
    fn can_be_unreachable(&self) -> bool {
        false
    }

    /// Returns the reason that the disk cannot make writes durable now, if any, as text for users.
    fn outage_message(&self) -> Option<String> {
        None
    }

    /// Waits until the disk's commit interval has passed, so that more writes join the next commit.
    /// Other disks return at once.
    fn wait_commit_interval(&self) {}

    /// Waits until the group and all earlier tickets are durable. Does not wait for later groups,
    /// and flushes only if no flush followed the group's write.
    ///
    /// # Errors
    /// Error of the first failed write or flush; [`Error::Unreachable`], after which the wait can be
    /// repeated.
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error> {
        Err(Error::UnknownTicket(ticket))
    }

    /// Discards `extents` once the tickets in `after` are durable. A hint: until the next write,
    /// each read may return old bytes or zeroes, and so may a power cut leave them.
    ///
    /// Returns at once and flushes nothing; the disk discards when `after` has become durable for
    /// another reason. Groups submitted later are unaffected. Reads issued earlier may be affected.
    ///
    /// # Errors
    /// Out of range, or an unknown ticket in `after`. Partly covered sectors are left alone; a
    /// device without discard is no error.
    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        let _ = (extents, after);
        Ok(())
    }

    /// Makes the whole sectors `at` read as zeros, and frees their space. Returns its ticket, of a
    /// group that takes its turn after those submitted before; or `None`, and does nothing, if the
    /// disk makes no holes: the caller then writes zeros.
    ///
    /// # Errors
    /// As [`Disk::submit_chain`].
    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        let _ = at;
        Ok(None)
    }

    /// Makes all that reads see durable: submitted groups, the holes of discards, and what another
    /// process has written to the same file before. Disks that have nothing but their own durable
    /// groups need not implement it.
    ///
    /// # Errors
    /// As [`Disk::wait_durable`].
    fn wait_all_durable(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Returns the state of the start of `at`, and how far it extends, at most to the end of `at`.
    /// Sees the writes that reads see. A disk that does not know its holes says that all is stored.
    ///
    /// # Errors
    /// Out of range, or a map of the disk cannot be read.
    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        self.properties().check_extents(&[at]).map(|()| AllocationRun::stored(at))
    }

    /// Reserves space for `bytes` of future writes: a thin disk may have less space than its
    /// length. Each accepted chain uses up its bytes. Returns the reserved bytes: `u64::MAX` for
    /// disks that need no reservation.
    ///
    /// # Errors
    /// Not enough space; earlier reservations stay.
    fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        let _ = bytes;
        Ok(u64::MAX)
    }

    /// Submits one group that follows those in `after`: a chain of one.
    ///
    /// # Errors
    /// As [`Disk::submit_chain`].
    fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        match self.submit_chain(vec![group], after) {
            // A disk that returns no ticket for a group violates its contract.
            Ok(tickets) => {
                tickets.last().copied().ok_or(Refused { payload: None, error: Error::ServiceEnded })
            }
            Err(Refused { payload: goods, error }) => {
                Err(Refused { payload: goods.and_then(|mut chain| chain.pop()), error })
            }
        }
    }

    /// Reads synchronously: [`Disk::read`] with [`Urgency::Now`], waited for.
    ///
    /// # Errors
    /// As [`Disk::read`]; [`Error::ServiceEnded`] if the disk's service died.
    fn read_now(&self, at: Extent, into: Block) -> ReadAnswer {
        self.read(at, into, Urgency::Now)
            .wait()
            .unwrap_or(Err(Refused { payload: None, error: Error::ServiceEnded }))
    }
}

impl Properties {
    /// Checks that `at` is whole sectors within the disk.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Misaligned`].
    pub fn check_range(&self, at: Extent, block_bytes: usize) -> Result<(), Error> {
        if at.end_bytes().is_none_or(|end| end > self.len_bytes) {
            return Err(Error::OutOfRange { extent: at, len_bytes: self.len_bytes });
        }
        let sector = u64::from(self.sector_bytes);
        let whole = at.start_bytes.is_multiple_of(sector) && at.len_bytes.is_multiple_of(sector);
        if !whole || at.len_bytes != block_bytes as u64 {
            return Err(Error::Misaligned { extent: at, sector_bytes: self.sector_bytes });
        }
        Ok(())
    }

    /// Checks that all of `extents` are within the disk, aligned or not.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for the first that is not.
    pub fn check_extents(&self, extents: &[Extent]) -> Result<(), Error> {
        let beyond = |at: &&Extent| at.end_bytes().is_none_or(|end| end > self.len_bytes);
        match extents.iter().find(beyond) {
            Some(&extent) => Err(Error::OutOfRange { extent, len_bytes: self.len_bytes }),
            None => Ok(()),
        }
    }

    /// Checks that every write of `chain` is whole sectors within the disk.
    ///
    /// # Errors
    /// As [`Properties::check_range`], for the first invalid write.
    pub fn check_chain(&self, chain: &[Group]) -> Result<(), Error> {
        chain.iter().flat_map(|group| &group.writes).try_for_each(|write| {
            let extent = Extent::new(write.at_bytes, write.block.len() as u64);
            self.check_range(extent, write.block.len())
        })
    }
}

/// Calls `wait`, such as [`Disk::wait_durable`], until something is durable. While the store of a
/// disk is unreachable, nothing has failed: the call is repeated as long as `goes_on` returns true.
///
/// # Errors
/// That of the last call.
pub fn wait_durable_while(
    wait: impl Fn() -> Result<(), Error>,
    goes_on: impl Fn() -> bool,
) -> Result<(), Error> {
    loop {
        match wait() {
            Err(Error::Unreachable(_)) if goes_on() => {}
            waited => return waited,
        }
    }
}
