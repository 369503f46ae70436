//! The virtio block device behind vhost-user, for any [`Disk`](draconis_device::Disk).
//!
//! ```text
//!   front end ══ socket ══▶ Session: memory, rings, configuration
//!   guest ── kick ──▶ Queue ─ Ring: a chain ─ Request ──▶ Device ──▶ trait Disk
//!         ◀── call ──                      contents lie in guest memory
//! ```
//!
//! Law 1: guest memory and messages are untrusted. Descriptors and headers are copied once, checked,
//! and the copy is used. A request that is only wrong gets a status; a broken ring stops.
//! Law 2: a request is recorded in the in-flight area before it is carried out, and removed from it
//! after its entry in the used ring. A successor carries out what is recorded.
//! Law 3: a write is answered once every read sees it; without a write cache, and by a flush, once it
//! is durable. A guest survives this process, so [`Device::with_durable_writes`] is for disks that
//! lose visible writes with it.
//! Law 4: the front end can truncate memory that it shares, unless the memory is sealed. The next
//! access then ends the process (SIGBUS), so a process serves one front end.
//!
//! This crate opens no sockets and knows no formats. After [`Resources::new`] it needs no system call
//! that creates a descriptor, except those that receive and duplicate one.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing))]

mod chain;
mod config;
mod device;
mod error;
mod inflight;
mod lead;
mod memory;
mod queue;
mod request;
mod ring;
mod session;

pub use crate::device::Device;
pub use crate::error::RingError;
pub use crate::inflight::Resources;
pub use crate::queue::serve_ring_once;
pub use crate::ring::RingLayout;
pub use crate::session::{ConnectionError, serve};

/// Maximum number of queues.
pub const MAX_QUEUES: u16 = 64;
/// Maximum number of descriptors of a queue.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Maximum number of requests of a queue that are carried out at the same time.
pub const MAX_QUEUE_THREADS: usize = 16;
