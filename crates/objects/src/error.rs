//! What goes wrong, and whose fault it is.

use draconis_device as device;

use crate::{Group, ObjectId};

/// What went wrong.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    Misuse(&'static str),
    /// There is no such object.
    #[error("there is no object {0}")]
    NoObject(ObjectId),
    /// A disk by a name, and why that cannot be done with it.
    #[error("{0}")]
    Disk(String),
    /// The store has no room for the group. Nothing of it was done.
    #[error(
        "the store is full: {needed_bytes} bytes are needed with their entries, {free_bytes} are free beside {kept_bytes} that deleting, cleaning and checkpoints need; delete something or make the store larger"
    )]
    NoSpace {
        /// What the group needs, with its entries.
        needed_bytes: u64,
        /// What there is for groups that do not only give up.
        free_bytes: u64,
        /// What is kept so that giving up, cleaning and checkpoints always work.
        kept_bytes: u64,
    },
    /// The disk holds no store, or one of a version that is not known.
    #[error("not a store: {0}")]
    NotAStore(String),
    /// What is on the disk is not what was written there.
    #[error("damaged: {what} at byte {at_bytes}")]
    Corrupt {
        /// What is wrong.
        what: &'static str,
        /// Where on the disk.
        at_bytes: u64,
    },
    /// The disk failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// An earlier write failed; the store is read-only now.
    #[error("the store takes no more changes: {0}")]
    Stopped(device::Error),
}

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, Error>;

/// A refused group and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// The group, as it was.
    pub group: Group,
    /// Why.
    #[source]
    pub error: Error,
}
