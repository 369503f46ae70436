//! Errors of the store.

use draconis_device as device;

use crate::{Group, ObjectId};

/// Error of an operation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// Invalid request of the caller.
    #[error("{0}")]
    Misuse(&'static str),
    /// There is no such object.
    #[error("there is no object {0}")]
    NoObject(ObjectId),
    /// A disk by its name, and the reason for the refusal.
    #[error("{0}")]
    Disk(String),
    /// The store has no space for the group. Nothing of it was applied.
    #[error(
        "the store is full: {needed_bytes} bytes are needed with their entries, {free_bytes} are free beside {kept_bytes} that deleting, cleaning and checkpoints need; delete something or make the store larger"
    )]
    NoSpace {
        /// Bytes that the group needs, with its entries.
        needed_bytes: u64,
        /// Bytes available to groups that do not only free space.
        free_bytes: u64,
        /// Bytes reserved for deletions, cleaning and checkpoints.
        kept_bytes: u64,
    },
    /// The disk holds no store, or one of an unknown version.
    #[error("not a store: {0}")]
    NotAStore(String),
    /// The bytes on the disk are not those that were written.
    #[error("damaged: {what} at byte {at_bytes}")]
    Corrupt {
        /// Damaged item.
        what: &'static str,
        /// Byte on the disk.
        at_bytes: u64,
    },
    /// The disk failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// An earlier write failed; the store is read-only now.
    #[error("the store takes no more changes: {0}")]
    Stopped(device::Error),
}

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A refused group and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct RefusedGroup {
    /// The group, unchanged.
    pub group: Group,
    /// Reason.
    #[source]
    pub error: Error,
}
