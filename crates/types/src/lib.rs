//! Words that several crates share.
//!
//! ```text
//!   Block          a buffer with one owner: private memory, lent slices, or memory of another crate
//!   Extent, Group, Ticket, DiskError   what a disk is asked for, and what it answers
//!   Node, FileType, Time, Attributes, ..   what `stat` and its like pass on
//!   Refusal        why a request is refused, with its errno
//!   ExportActivity what clients of an exported disk have done
//!   path_bytes     names that need not be UTF-8, as text
//!   lock           a mutex and a condition variable that survive a fork
//! ```
//! This crate knows neither channels nor file systems, and of disks only their words: it does no I/O.

#![forbid(unsafe_code)]

mod attributes;
mod block;
mod buffer_cache;
pub mod copy_counter;
mod disk;
mod export_activity;
pub mod injected_fault;
pub mod lock;
mod page;
pub mod path_bytes;
mod private;
mod slices;

pub use attributes::*;
pub use block::{Block, BlockMemory};
#[doc(hidden)]
pub use buffer_cache::disable_buffer_cache;
pub use disk::{ChainBounds, DiskError, Extent, Group, Ticket, Write};
pub use export_activity::ExportActivity;
pub use page::ALIGN_BYTES;
pub use private::PrivateBuffer;
pub use slices::SharedSlice;
