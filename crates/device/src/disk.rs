//! The trait every disk has, and the words it uses.

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
}

impl std::fmt::Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at byte {}", self.len_bytes, self.start_bytes)
    }
}

/// What survives what, without being asked to flush (DESIGN law 4).
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
}

/// How soon somebody needs a read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Urgency {
    /// Somebody waits for it: served at once, in the thread that asks where possible.
    Now,
    /// Nobody waits yet: served in disk order, behind everything that is `Now`.
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

/// The name of a submitted group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

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
    Short {
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
    Gone,
    /// No such ticket was given out.
    #[error("ticket {0:?} was never given out")]
    NoTicket(Ticket),
}

/// A refusal that returns what was given.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused<T> {
    /// What was given, if it could be saved.
    pub goods: Option<T>,
    /// Why.
    #[source]
    pub error: Error,
}

/// The answer to a read: the filled block, or the reason and the block.
pub type ReadAnswer = Result<Block, Refused<Block>>;

/// A disk: a file, a device, an object, a fake.
pub trait Disk: Send + Sync {
    /// Sizes and promises. They do not change while the disk is open.
    fn properties(&self) -> Properties;

    /// Fills `into` from `at`. The block's length must be `at.len_bytes`.
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer>;

    /// Orders a group after those in `after`. Returns at once; nothing is durable yet.
    ///
    /// # Errors
    /// The group comes back with the reason: out of range, misaligned, read-only, or
    /// stopped by an earlier failure.
    fn submit(&self, group: Group, after: &[Ticket]) -> Result<Ticket, Refused<Group>>;

    /// Returns once the group is durable, with everything it follows.
    ///
    /// # Errors
    /// What the device said of the first write or flush that failed.
    fn wait(&self, ticket: Ticket) -> Result<(), Error>;

    /// Reads in the calling thread's time: [`Disk::read`] with [`Urgency::Now`], waited for.
    ///
    /// # Errors
    /// As [`Disk::read`]; a service that died answers [`Error::Gone`].
    fn read_now(&self, at: Extent, into: Block) -> ReadAnswer {
        self.read(at, into, Urgency::Now)
            .wait()
            .unwrap_or(Err(Refused { goods: None, error: Error::Gone }))
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
}
