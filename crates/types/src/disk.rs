//! What a disk is asked for, and the error that it answers.

use std::sync::Arc;

use rustix::io::Errno;

use crate::Block;

/// A range of bytes of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Extent {
    /// Offset of the first byte.
    pub start_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

impl Extent {
    /// Creates the range of `len_bytes` bytes from `start_bytes`.
    pub const fn new(start_bytes: u64, len_bytes: u64) -> Self {
        Self { start_bytes, len_bytes }
    }

    /// Returns the offset after the last byte, unless it exceeds 64 bits.
    pub const fn end_bytes(self) -> Option<u64> {
        self.start_bytes.checked_add(self.len_bytes)
    }

    /// Returns true if the ranges overlap.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start_bytes < other.start_bytes.saturating_add(other.len_bytes)
            && other.start_bytes < self.start_bytes.saturating_add(self.len_bytes)
    }

    /// Returns the largest range inside this one that starts and ends on multiples of `unit_bytes`;
    /// `None` if it is empty.
    pub const fn inner_aligned_extent(self, unit_bytes: u64) -> Option<Self> {
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

/// One write of a group.
#[derive(Debug)]
pub struct Write {
    /// Offset of the first byte.
    pub at_bytes: u64,
    /// Contents to write.
    pub block: Block,
}

/// Writes that become visible atomically.
#[derive(Debug, Default)]
pub struct Group {
    /// The writes, applied in this order where they overlap.
    pub writes: Vec<Write>,
}

/// Identifier of a submitted group. Tickets ascend in the order in which the disk accepted groups.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// Limits of one chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChainBounds {
    /// Number of groups.
    pub groups: usize,
    /// Number of writes of all groups.
    pub writes: usize,
    /// Bytes of all writes.
    pub bytes: u64,
}

impl ChainBounds {
    /// Limited only by memory.
    pub const UNLIMITED: Self = Self { groups: usize::MAX, writes: usize::MAX, bytes: u64::MAX };

    /// Returns the size of `chain`.
    pub fn size_of_chain(chain: &[Group]) -> Self {
        let writes = || chain.iter().flat_map(|group| &group.writes);
        Self {
            groups: chain.len(),
            writes: writes().count(),
            bytes: writes().map(|write| write.block.len() as u64).sum(),
        }
    }

    /// Returns the sum of this and `other`.
    pub const fn sum_with(self, other: Self) -> Self {
        Self {
            groups: self.groups.saturating_add(other.groups),
            writes: self.writes.saturating_add(other.writes),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    /// Returns true if this size is within `bounds`.
    pub const fn is_within(self, bounds: Self) -> bool {
        self.groups <= bounds.groups && self.writes <= bounds.writes && self.bytes <= bounds.bytes
    }
}

impl std::fmt::Display for ChainBounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} groups, {} writes and {} bytes", self.groups, self.writes, self.bytes)
    }
}

/// An error of a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DiskError {
    /// The device failed.
    #[error("{what} {extent} failed: {errno}")]
    Io {
        /// `read`, `write` or `flush`.
        what: &'static str,
        /// Range of the request.
        extent: Extent,
        /// Error of the system.
        errno: Errno,
    },
    /// A read returned fewer bytes than requested.
    #[error("read of {extent} ended after {got_bytes} bytes")]
    ShortRead {
        /// Requested range.
        extent: Extent,
        /// Bytes read.
        got_bytes: u64,
    },
    /// The request reaches beyond the end of the disk.
    #[error("{extent} reaches beyond the disk's {len_bytes} bytes")]
    OutOfRange {
        /// Requested range.
        extent: Extent,
        /// Length of the disk.
        len_bytes: u64,
    },
    /// The request does not start and end on a sector, or the block has another length.
    #[error("{extent} is not made of whole sectors of {sector_bytes} bytes")]
    Misaligned {
        /// Requested range.
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
    /// The disk was opened by another process, of which this one is a forked child.
    #[error("process {process} opened it, and this process is a fork of that: open it anew here")]
    Inherited {
        /// Number of the process.
        process: u32,
    },
    /// The chain exceeds the disk's limits.
    #[error("the disk takes at most {bounds} at once")]
    ChainTooLarge {
        /// The limits.
        bounds: ChainBounds,
    },
    /// The disk has not issued this ticket.
    #[error("ticket {0:?} was never given out")]
    UnknownTicket(Ticket),
    /// Error of the remote store of the disk.
    #[error("{0}")]
    Remote(Arc<str>),
    /// The remote store of the disk is unreachable. Submitted groups are kept and written later;
    /// nothing has failed.
    #[error("{0}")]
    Unreachable(Arc<str>),
}

impl DiskError {
    /// Returns the error for lack of space at `extent`.
    pub const fn no_space(extent: Extent) -> Self {
        Self::Io { what: "write", extent, errno: Errno::NOSPC }
    }

    /// Returns true if a write failed for lack of space.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { errno: Errno::NOSPC | Errno::DQUOT, .. })
    }
}
