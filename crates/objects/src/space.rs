//! Where on the disk there is room, and how segments become free.
//!
//! Law 1: what is alive in a segment is what the index leads to; the table of segments counts it,
//! and `check` counts again. There is one door for what is born (`Segments::add`) and one for what
//! dies (`Segments::kill`).
//! Law 2: a segment is used again only once a durable checkpoint does without it, and what was
//! there has no reader.

pub(crate) mod clean;
mod reserve;
pub(crate) mod segment;
pub(crate) mod segment_reader;

pub(crate) use self::reserve::{NoSpaceState, Reserve};
