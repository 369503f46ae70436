//! Making volumes: | rules ──▶ layout | tree + layout ──▶ plan | plan ──▶ disk |
//!
//! ```text
//!   Options, size ──Layout::new──▶ Layout     groups, tables, reserves: mke2fs's rules
//!   Layout        ──tables───────▶ Space      where bitmaps and inodes lie, and what is left
//!   Tree          ──Plan::new────▶ Plan       which inode and which blocks each node has
//!   Plan, Disk    ──write────────▶ a volume   large requests, several threads
//! ```
//! Law 1: nothing is written before everything is known to fit.
//! Law 2: the superblock of group 0 is wiped first and written last, each with a flush: a run that
//! fails half-way leaves no volume.
//! Law 3: time and chance are arguments: the same tree and options give the same bytes.
//!
//! This module does not know where a tree comes from: file contents are asked for by a number.
//!
//! Unlike the rest of the crate it computes with numbers that are its own; those that
//! users choose are bounded by [`Layout::new`] and by [`Plan::new`] before they are computed with.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with its own numbers; what users choose is bounded in layout and plan"
)]

mod groups;
mod hidden;
mod inside;
pub(crate) mod journal;
mod layout;
mod options;
mod plan;
mod reserve;
mod share;
mod tables;
mod tree;
mod values;
mod write;

pub use layout::Layout;
pub(crate) use layout::{LEAST_IN_GROUP, MMP_INTERVAL, MOST_MMP_INTERVAL, orphan_blocks};
pub use options::{FeatureError, Inodes, Journal, Options};
pub use plan::{Plan, fitting, sized};
pub use share::FreeSpace;
pub use tree::{Contents, Node, NodeId, Tree, What};
pub use write::{Target, write};

/// Why no volume was made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The size leaves no room for a volume.
    #[error("too small for a volume: {blocks} blocks of {block_bytes} bytes")]
    TooSmall {
        /// Blocks there are.
        blocks: u64,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// More blocks than its numbers of blocks can count.
    #[error(
        "too large: {blocks} blocks of {block_bytes} bytes; take larger blocks (-b), \
         or ext4 (-t), which counts them with 64 bits"
    )]
    TooLarge {
        /// Blocks there are.
        blocks: u64,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// The inodes would take the room of the files.
    #[error(
        "{0} inodes leave no room for files: give fewer (-N), more bytes per inode (-i), or a larger SIZE"
    )]
    TooManyInodes(u32),
    /// An option makes no sense, or not with another.
    #[error("{0}")]
    Misuse(String),
    /// The journal would take more than half of the volume.
    #[error(
        "-J size: a journal of {0} blocks takes more than half of the volume; give a smaller one, \
         or a larger SIZE"
    )]
    LargeJournal(u32),
    /// The inode tables of a flex group do not fit between what has its place.
    #[error(
        "the inode tables find no room: give fewer inodes (-N), more bytes per inode (-i), \
         ^flex_bg (-O), or a larger SIZE"
    )]
    NoTables,
    /// The tree needs more blocks than there are.
    #[error(
        "no room: the tree needs {needed} blocks of {block_bytes} bytes, the volume has {free}; \
         give a larger SIZE"
    )]
    NoBlocks {
        /// Blocks that it needs.
        needed: u64,
        /// Blocks for files.
        free: u64,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// The tree needs more inodes than there are.
    #[error(
        "no room: the tree needs {needed} inodes, the volume has {free}; give more (-N) or a larger SIZE"
    )]
    NoInodes {
        /// Inodes that it needs.
        needed: u64,
        /// Inodes for files.
        free: u64,
    },
    /// Something in the tree that ext2 cannot hold.
    #[error("{path}: {what}")]
    Tree {
        /// Where.
        path: String,
        /// What.
        what: String,
    },
    /// The contents of a file could not be read.
    #[error("{path}: {error}")]
    Source {
        /// Which file.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// The device failed.
    #[error(transparent)]
    Io(#[from] draconis_device::Error),
}

/// What making volumes answers.
pub type Result<T> = std::result::Result<T, Error>;
