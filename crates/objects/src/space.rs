//! Space on the disk: segments, and how they become free.
//!
//! Law 1: live bytes of a segment are those that the index refers to. The segment table counts
//! them, and `check` recounts. Only `SegmentTable::add_live` adds live bytes, and only `sub_live`
//! subtracts.
//! Law 2: a segment is reused only once a durable checkpoint does not need it and no reader uses
//! its old contents.

pub(crate) mod clean;
mod reserve;

pub(crate) use self::reserve::{NoSpaceState, Reserve};
