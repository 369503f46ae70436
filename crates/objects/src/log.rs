//! How a store writes: into the frames of its streams, and a commit's frames to the disk.
//!
//! ```text
//!   payload, entry, node ─▶ the open frame of a stream ─ full ─▶ done
//!                                     │ a waiter, or much came together
//!                                     ▼
//!                          commit: all its frames to the disk at once
//! ```
//!
//! Law 1: what is written between two commits has one number, and counts only if all of its
//! frames are there.
//! Law 2: what is written is alive from then on, as the table of segments has it, until it is
//! said to be dead, once.
//! Law 3: this knows no index: who writes something has to lead to it.

pub(crate) mod commit;
pub(crate) mod frame;
mod stream;
pub(crate) mod summary;
mod writer;

pub(crate) use self::stream::{Stream, StreamPosition};
pub use self::writer::Counters;
pub(crate) use self::writer::LogWriter;
