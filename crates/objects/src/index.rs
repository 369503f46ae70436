//! The index of an open store: what changed lately over everything else.
//!
//! ```text
//!   active ─ sealed ─▶ log layers ─ counted ─▶ runs ─ folded, merged ─▶ tree        newer hides older
//! ```
//!
//! Law 1: what is alive is what this leads to, and nothing else: an entry says where its payload
//! is, the tree where its nodes are, a run where its parts are.
//! Law 2: what is replaced is dead at once where both are of the log, and when the newer one is
//! counted where the older one is in a run or in the tree: once.
//! Law 3: a view has layers and a tree that change no more, and a token that keeps what they lead
//! to from being used again.

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
