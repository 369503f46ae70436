//! The trait every disk has, and the words it uses.

use std::sync::Arc;

use draconis_exchange::heap::Block;

use crate::Pending;

/// A run of bytes of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Extent {
    /// First byte.
    pub start_bytes: u64,
    /// How many bytes.
    pub len_bytes: u64,
}

impl Extent {
    /// The run of `len_bytes` from `start_bytes`.
    pub const fn new(start_bytes: u64, len_bytes: u64) -> Self {
        Self { start_bytes, len_bytes }
    }

    /// One past the last byte, if that can be said in 64 bits.
    pub const fn end_bytes(self) -> Option<u64> {
        self.start_bytes.checked_add(self.len_bytes)
    }

    /// Whether any byte is in both.
    pub const fn touches(self, other: Self) -> bool {
        self.start_bytes < other.start_bytes.saturating_add(other.len_bytes)
            && other.start_bytes < self.start_bytes.saturating_add(self.len_bytes)
    }

    /// The largest run inside this one that starts and ends on multiples of `unit_bytes`;
    /// none if that is empty.
    pub const fn whole_units(self, unit_bytes: u64) -> Option<Self> {
        let end = self.start_bytes.saturating_add(self.len_bytes) / unit_bytes * unit_bytes;
        match self.start_bytes.checked_next_multiple_of(unit_bytes) {
            Some(start) if start < end => Some(Self::new(start, end - start)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at byte {}", self.len_bytes, self.start_bytes)
    }
}

/// What survives what, without being asked to flush (ARCHITECTURE, law 4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Atomic {
    /// Nothing is promised: a group may be half applied.
    None,
    /// A group is whole or absent if the process that sent it dies.
    AgainstDeath,
    /// A group is whole or absent if the power is cut, too.
    AgainstPowerCut,
}

/// What a disk is and promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Properties {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Reads and writes must start and end on multiples of this; a power of two.
    pub sector_bytes: u32,
    /// Size from which larger requests gain nothing much.
    pub best_io_bytes: u32,
    /// Whether distance costs time.
    pub rotational: bool,
    /// Whether `submit` is refused always.
    pub read_only: bool,
    /// What groups survive.
    pub atomic: Atomic,
    /// Whether [`Disk::discard`] does anything.
    pub discards: bool,
}

/// How soon a read is needed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Urgency {
    /// It has a waiter: served at once, in the thread that asks where possible.
    Now,
    /// It has no waiter yet: served in disk order, behind everything that is `Now`.
    Ahead,
}

/// One write of a group.
#[derive(Debug)]
pub struct Write {
    /// First byte to write.
    pub at_bytes: u64,
    /// What to write; all of it.
    pub block: Block,
}

/// Writes that become visible together.
#[derive(Debug, Default)]
pub struct Group {
    /// The writes, applied in this order where they overlap.
    pub writes: Vec<Write>,
}

/// The name of a submitted group. Tickets of a disk ascend in the order in which groups
/// were taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// The most that a disk takes as one chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChainBounds {
    /// Groups.
    pub groups: usize,
    /// Writes of all groups together.
    pub writes: usize,
    /// Bytes of all writes together.
    pub bytes: u64,
}

impl ChainBounds {
    /// No bound but memory.
    pub const NONE: Self = Self { groups: usize::MAX, writes: usize::MAX, bytes: u64::MAX };

    /// What `chain` would need.
    pub fn of(chain: &[Group]) -> Self {
        let writes = || chain.iter().flat_map(|group| &group.writes);
        Self {
            groups: chain.len(),
            writes: writes().count(),
            bytes: writes().map(|write| write.block.len() as u64).sum(),
        }
    }

    /// What this and `other` need together.
    pub const fn and(self, other: Self) -> Self {
        Self {
            groups: self.groups.saturating_add(other.groups),
            writes: self.writes.saturating_add(other.writes),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    /// Whether something that needs this much is within `bounds`.
    pub const fn is_within(self, bounds: Self) -> bool {
        self.groups <= bounds.groups && self.writes <= bounds.writes && self.bytes <= bounds.bytes
    }
}

impl std::fmt::Display for ChainBounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} groups, {} writes and {} bytes", self.groups, self.writes, self.bytes)
    }
}

/// What went wrong on a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The device failed.
    #[error("{what} {extent} failed: {errno}")]
    Io {
        /// `read`, `write` or `flush`.
        what: &'static str,
        /// Where.
        extent: Extent,
        /// What the system said.
        errno: rustix::io::Errno,
    },
    /// Fewer bytes came than the disk has there.
    #[error("read of {extent} ended after {got_bytes} bytes")]
    ShortRead {
        /// What was asked.
        extent: Extent,
        /// What came.
        got_bytes: u64,
    },
    /// The request reaches beyond the end of the disk.
    #[error("{extent} reaches beyond the disk's {len_bytes} bytes")]
    OutOfRange {
        /// What was asked.
        extent: Extent,
        /// Length of the disk.
        len_bytes: u64,
    },
    /// The request does not start and end on a sector, or the block has another length.
    #[error("{extent} is not made of whole sectors of {sector_bytes} bytes")]
    Misaligned {
        /// What was asked.
        extent: Extent,
        /// Sector size.
        sector_bytes: u32,
    },
    /// The disk was opened read-only.
    #[error("the disk is open for reading only")]
    ReadOnly,
    /// An earlier write failed; nothing is written any more.
    #[error("an earlier write failed: the disk takes no more writes")]
    Stopped,
    /// The disk service is gone.
    #[error("the disk service is gone")]
    ServiceEnded,
    /// The chain is larger than the disk takes at once.
    #[error("the disk takes at most {bounds} at once")]
    ChainTooLarge {
        /// What it takes.
        bounds: ChainBounds,
    },
    /// No such ticket was given out.
    #[error("ticket {0:?} was never given out")]
    UnknownTicket(Ticket),
    /// What keeps the bytes somewhere else said this.
    #[error("{0}")]
    Remote(Arc<str>),
    /// What keeps the bytes somewhere else does not take them yet: what was submitted waits for
    /// it, and is written later. Nothing has failed.
    #[error("{0}")]
    Away(Arc<str>),
}

impl Error {
    /// That there is no room for what was to be written there.
    pub const fn no_space(extent: Extent) -> Self {
        Self::Io { what: "write", extent, errno: rustix::io::Errno::NOSPC }
    }

    /// Whether there was no room for what was to be written.
    pub fn is_no_space(&self) -> bool {
        use rustix::io::Errno;
        matches!(self, Self::Io { errno: Errno::NOSPC | Errno::DQUOT, .. })
    }
}

/// A refusal that returns what was given.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused<T> {
    /// What was given, if it could be saved.
    pub payload: Option<T>,
    /// Why.
    #[source]
    pub error: Error,
}

/// The answer to a read: the filled block, or the reason and the block.
pub type ReadAnswer = Result<Block, Refused<Block>>;

/// What else a submitted chain is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubmitOptions {
    /// What a disk that serves a process that may die remembers of the last chain that it took,
    /// unless it is 0.
    pub mark: u64,
    /// Which of its groups is durable when the call returns, counted from 0, if one is to be. To
    /// a disk in another process that is one message, where submitting and waiting are two.
    pub durable: Option<usize>,
}

impl SubmitOptions {
    /// Waits for what is to be durable of a chain that `disk` has given `tickets` for.
    ///
    /// # Errors
    /// As [`Disk::wait_durable`].
    pub fn wait<D: Disk + ?Sized, G>(self, disk: &D, tickets: &[Ticket]) -> Result<(), Refused<G>> {
        let ticket = self.durable.and_then(|place| tickets.get(place));
        let waited = ticket.map_or(Ok(()), |ticket| disk.wait_durable(*ticket));
        waited.map_err(|error| Refused { payload: None, error })
    }
}

/// A disk: a file, a device, an object, a fake.
///
/// ```text
///   submit_chain ──▶ taken ──▶ settled: every read sees it ──▶ durable
///                                       settle waits so far     wait, so far
/// ```
///
/// Law 1: groups are taken, settled and made durable in the order of their tickets; each
/// of the three holds for a ticket only once it holds for all before it.
/// Law 2: a group is written only once what it follows - the tickets in `after`, the
/// group before it in its chain - is durable. The disk flushes for that, once for
/// everything written by then, and not at all for what is durable already. A group that
/// follows nothing is written without a flush.
/// Law 3: the first write or flush that fails ends all writing. What follows a group
/// that failed is never written.
pub trait Disk: Send + Sync {
    /// Sizes and promises. They do not change while the disk is open.
    fn properties(&self) -> Properties;

    /// How far it can be read and written: a disk that grows takes more than its length, which
    /// is what it was when it was opened, and what was never written there reads as zeros.
    fn max_len_bytes(&self) -> u64 {
        self.properties().len_bytes
    }

    /// The most that one chain may hold.
    fn chain_bounds(&self) -> ChainBounds {
        ChainBounds::NONE
    }

    /// Fills `into` from `at`. The block's length must be `at.len_bytes`.
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer>;

    /// Takes a chain: the first group follows those in `after`, each other one the group
    /// before it. Returns at once, with a ticket for each group in order; nothing is
    /// durable yet.
    ///
    /// A chain is handed over whole: if its sender dies, all of it is written or nothing.
    /// A disk that stops in the middle has written a part, as after a power cut: whole
    /// groups, and of the first that is missing anything.
    ///
    /// # Errors
    /// All groups come back with the reason, and nothing is written: out of range,
    /// misaligned, too much at once, a ticket in `after` that never was given, read-only,
    /// or stopped by an earlier failure.
    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>>;

    /// [`Disk::submit_chain`], with more to be done about it: see [`SubmitOptions`].
    ///
    /// # Errors
    /// As [`Disk::submit_chain`]; and as [`Disk::wait_durable`] of a chain that was taken, whatever comes
    /// back of it.
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

    /// Returns once every read sees the group, through another descriptor of the same
    /// file as well. It is not durable for that, and nothing is flushed for it.
    ///
    /// # Errors
    /// As [`Disk::wait_durable`].
    fn wait_visible(&self, ticket: Ticket) -> Result<(), Error>;

    /// Whether [`Disk::wait_durable`] can return [`Error::Away`]: then what is submitted is waited for in
    /// another call, which says so.
    fn can_be_unreachable(&self) -> bool {
        false
    }

    /// What keeps the disk from making things durable now, if something does, for a user to read.
    fn outage(&self) -> Option<String> {
        None
    }

    /// Returns once what is submitted next would be sent at once if it was waited for: a disk that
    /// lets writes gather, as a bucket does, is waited for here, so that more goes along. Others
    /// return at once.
    fn wait_commit_interval(&self) {}

    /// Returns once the group is durable, with all tickets before it. Does not wait for
    /// later groups, and flushes only if none came since the group was written.
    ///
    /// # Errors
    /// What the device said of the first write or flush that failed; [`Error::Away`], after which
    /// it can be waited for again.
    fn wait_durable(&self, ticket: Ticket) -> Result<(), Error>;

    /// Says that what is in `extents` is not needed any more, once the tickets in `after`
    /// are durable. A hint: until it is written again, a read there returns the old bytes
    /// or zeroes, now one and then the other, and the same goes for what a power cut leaves.
    ///
    /// Returns at once and flushes nothing; what is done about it is done when `after` is
    /// durable for another reason. Groups submitted later are not touched by it. Reads that
    /// were asked for before may be.
    ///
    /// # Errors
    /// Out of range, or a ticket in `after` that never was given. Sectors that are there
    /// only in part are left alone; that the device cannot discard is no error.
    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        let _ = (extents, after);
        Ok(())
    }

    /// Has room kept for `bytes` of writes that are yet to be submitted: a disk that takes room
    /// as it is written may have less than it is long. Each chain that is taken uses its bytes of
    /// that up. Returns for how many bytes room is kept now: `u64::MAX` where that is no question.
    ///
    /// # Errors
    /// There is no room for so many: what was kept before is.
    fn reserve(&self, bytes: u64) -> Result<u64, Error> {
        let _ = bytes;
        Ok(u64::MAX)
    }

    /// Takes one group that follows those in `after`: a chain of one.
    ///
    /// # Errors
    /// As [`Disk::submit_chain`].
    fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>> {
        match self.submit_chain(vec![group], after) {
            // A disk that gives no ticket for a group does not keep its promises.
            Ok(tickets) => {
                tickets.last().copied().ok_or(Refused { payload: None, error: Error::ServiceEnded })
            }
            Err(Refused { payload: goods, error }) => {
                Err(Refused { payload: goods.and_then(|mut chain| chain.pop()), error })
            }
        }
    }

    /// Reads in the calling thread's time: [`Disk::read`] with [`Urgency::Now`], waited for.
    ///
    /// # Errors
    /// As [`Disk::read`]; a service that died answers [`Error::ServiceEnded`].
    fn read_now(&self, at: Extent, into: Block) -> ReadAnswer {
        self.read(at, into, Urgency::Now)
            .wait()
            .unwrap_or(Err(Refused { payload: None, error: Error::ServiceEnded }))
    }
}

impl Properties {
    /// Checks that `at` lies on this disk in whole sectors.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Misaligned`].
    pub fn check(&self, at: Extent, block_bytes: usize) -> Result<(), Error> {
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

    /// Checks that all of `extents` lie on this disk, whole sectors or not.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], of the first that does not.
    pub fn check_extents(&self, extents: &[Extent]) -> Result<(), Error> {
        let beyond = |at: &&Extent| at.end_bytes().is_none_or(|end| end > self.len_bytes);
        match extents.iter().find(beyond) {
            Some(&extent) => Err(Error::OutOfRange { extent, len_bytes: self.len_bytes }),
            None => Ok(()),
        }
    }

    /// Checks that every write of `chain` lies on this disk in whole sectors.
    ///
    /// # Errors
    /// As [`Properties::check`], of the first write that does not.
    pub fn check_chain(&self, chain: &[Group]) -> Result<(), Error> {
        chain.iter().flat_map(|group| &group.writes).try_for_each(|write| {
            let extent = Extent::new(write.at_bytes, write.block.len() as u64);
            self.check(extent, write.block.len())
        })
    }
}
