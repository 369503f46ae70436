//! The write path: frames of streams, and commits of frames to the disk.
//!
//! ```text
//!   payload, entry, node ─▶ the open frame of a stream ─ full ─▶ done
//!                                     │ a waiter, or much came together
//!                                     ▼
//!                          commit: all its frames to the disk at once
//! ```
//!
//! Law 1: everything written between two commits has one number, and is valid only if all frames of
//! the commit are there.
//! Law 2: written bytes are live in the segment table until they are marked dead, once.
//! Law 3: the log knows no index: its callers set the entries that refer to written bytes.

pub(crate) mod commit;
pub(crate) mod frame;
mod stream;
pub(crate) mod summary;
mod writer;

pub(crate) use self::stream::{Stream, StreamPosition};
pub use self::writer::Counters;
pub(crate) use self::writer::LogWriter;
