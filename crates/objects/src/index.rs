//! Index of an open store: memtables over sorted runs over the tree.
//!
//! ```text
//!   active ─ sealed ─▶ log layers ─ counted ─▶ runs ─ folded, merged ─▶ tree        newer hides older
//! ```
//!
//! Law 1: live bytes are exactly those that the index refers to: entries refer to payloads, the
//! tree to its nodes, runs to their chunks.
//! Law 2: a replaced log entry is dead at once. A replaced run or tree entry is dead when the
//! memtable flush accounts it, once.
//! Law 3: a view has immutable memtables and an immutable tree, and a reader pin that keeps their
//! segments from being reused.

pub(crate) mod cursor;
pub(crate) mod leaf;
mod levels;
pub(crate) mod memtable;
pub(crate) mod memtable_flush;
pub(crate) mod merge;
pub(crate) mod node;
mod range_filter;
pub(crate) mod run;
pub(crate) mod tree;
mod two_way_merge;
pub(crate) mod view;

pub(crate) use self::levels::{Levels, merge_memtables};
