//! A disk on the other side of a channel: the disk contract in both directions.
//!
//! ```text
//!   RemoteDisk ── lanes ──▶ one thread a lane ──▶ Disk
//!     submit: part, part, last part ──▶ collected until whole ──▶ one chain
//! ```
//!
//! Law 1: the disk sees a chain once all of it is there; a client that closes or dies
//! between two parts has written nothing. So a disk that promises nothing is atomic
//! against its client's death when it is served.
//! Law 2: what arrives in shared memory is copied before anything is decided; the blocks
//! go back with the answer, whatever it is.
//! Law 3: what one client can make the service hold is bounded, in number and in bytes.
//!
//! A byte that is written is copied twice: into a block that crosses, and out of it; once where it
//! lies in memory that both sides know ([`RemoteDisk::with_shared_memory`]). From there it goes to a device
//! that takes direct I/O without another copy.

mod client;
mod lane_pool;
mod service;

pub use client::{BlockAllocator, RemoteDisk};
pub use service::{CHAIN_BOUNDS, serve};

use draconis_exchange::contract::Refusal;

use crate::{Error, Extent};

/// What the contract says of an error.
fn refusal(error: &Error) -> Refusal {
    match error {
        Error::Io { errno: rustix::io::Errno::NOSPC, .. } => Refusal::NoSpace,
        Error::Io { .. } | Error::ShortRead { .. } | Error::Remote(_) => Refusal::Io,
        Error::OutOfRange { .. } | Error::Misaligned { .. } => Refusal::Invalid,
        // Of a disk that said that it could be written, this means that it stopped.
        Error::ReadOnly | Error::Stopped => Refusal::ReadOnly,
        Error::ServiceEnded => Refusal::Gone,
        Error::Away(_) => Refusal::Timeout,
        Error::ChainTooLarge { .. } => Refusal::Quota,
        Error::UnknownTicket(_) => Refusal::NotFound,
    }
}

/// What a refusal of a request says that was good when it was sent.
fn error(why: Refusal, what: &'static str, extent: Extent) -> Error {
    use rustix::io::Errno;
    match why {
        Refusal::ReadOnly => Error::Stopped,
        Refusal::Gone => Error::ServiceEnded,
        Refusal::Timeout => Error::Away("the disk does not take what is written yet".into()),
        Refusal::Io => Error::Io { what, extent, errno: Errno::IO },
        other => Error::Io { what, extent, errno: other.errno() },
    }
}
