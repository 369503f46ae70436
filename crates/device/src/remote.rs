//! A disk over a channel: client and server of the disk contract.
//!
//! ```text
//!   RemoteDisk ── lanes ──▶ one thread a lane ──▶ Disk
//!     submit: part, part, last part ──▶ collected until whole ──▶ one chain
//! ```
//!
//! Law 1: the disk receives a chain once it is complete; a client that closes or dies between two
//! parts has written nothing. So serving a disk makes it atomic against its client's death.
//! Law 2: data in shared memory is copied before any decision; every reply returns the blocks.
//! Law 3: the memory and groups that one client can pin are bounded, in number and in bytes.
//!
//! Written bytes are copied twice, into and out of a shared block; once if they are in pool memory
//! ([`RemoteDisk::with_shared_memory`]). They go to a direct I/O device without another copy.

mod client;
mod lane_pool;
mod service;

pub use client::{BlockAllocator, RemoteDisk};
pub use service::{CHAIN_BOUNDS, serve_remote_disk};

use draconis_types::Refusal;

use crate::{Error, Extent};

/// Maps an error to a refusal of the contract.
fn refusal_from_error(error: &Error) -> Refusal {
    match error {
        Error::Io { errno: rustix::io::Errno::NOSPC, .. } => Refusal::NoSpace,
        Error::Io { .. } | Error::ShortRead { .. } | Error::Remote(_) => Refusal::Io,
        Error::OutOfRange { .. } | Error::Misaligned { .. } => Refusal::Invalid,
        // For a writable disk, this refusal means that it has stopped.
        Error::ReadOnly | Error::Stopped => Refusal::ReadOnly,
        Error::ServiceEnded | Error::Inherited { .. } => Refusal::Gone,
        Error::Unreachable(_) => Refusal::Timeout,
        Error::ChainTooLarge { .. } => Refusal::Quota,
        Error::UnknownTicket(_) => Refusal::NotFound,
    }
}

/// Maps a refusal to the error of a request that was valid when it was sent.
fn error_from_refusal(why: Refusal, what: &'static str, extent: Extent) -> Error {
    use rustix::io::Errno;
    match why {
        Refusal::ReadOnly => Error::Stopped,
        Refusal::Gone => Error::ServiceEnded,
        Refusal::Timeout => Error::Unreachable("the disk does not take what is written yet".into()),
        Refusal::Io => Error::Io { what, extent, errno: Errno::IO },
        other => Error::Io { what, extent, errno: other.errno() },
    }
}
