//! Structures of the index: leaves, nodes and the tree, memtables, views and cursors.
//!
//! They read and write nodes through [`tree::NodeSource`] and [`tree::NodeStore`]; they know
//! neither disk nor log.
//!
//! Law: a view has immutable memtables and an immutable tree, and a reader pin that keeps their
//! segments from being reused.

pub(crate) mod cursor;
pub(crate) mod leaf;
pub(crate) mod memtable;
pub(crate) mod node;
mod range_filter;
pub(crate) mod tree;
pub(crate) mod two_way_merge;
pub(crate) mod view;
