//! Formatting: | rules ──▶ layout | tree + layout ──▶ plan | plan ──▶ disk |
//!
//! ```text
//!   Options, size ──Layout::new──▶ Layout      groups, tables, reserved GDT: mke2fs's rules
//!   Layout        ──tables───────▶ FreeRanges  locations of bitmaps and tables, free blocks
//!   Tree          ──VolumePlan───▶ VolumePlan  inode and blocks of each node
//!   plan, Disk    ──write────────▶ a volume    large requests, several threads
//! ```
//! Law 1: nothing is written before everything is known to fit.
//! Law 2: the superblock of group 0 is wiped first and written last, each with a flush: an
//! interrupted run leaves no volume.
//! Law 3: time and random numbers are arguments: the same tree and options give the same bytes.
//!
//! This module does not know the source of a tree: it requests file contents by number.
//!
//! Arithmetic here uses computed values; [`Layout::new`] and [`VolumePlan::new`] bound the values
//! that users choose.

mod disk_writer;
mod ea_value;
mod free_share;
mod groups;
mod inline_data;
pub(crate) mod journal;
mod layout;
mod options;
mod plan;
mod reserved_gdt;
mod system_files;
mod tree;
mod values;
mod write;

use crate::map::build_extents::DiskRun;
pub use disk_writer::FormatTarget;
pub use free_share::FreeSpace;
pub use layout::Layout;
pub(crate) use layout::{
    DEFAULT_MMP_INTERVAL, ENCRYPTION_MODES, MAX_MMP_INTERVAL, MIN_LAST_GROUP_BLOCKS, orphan_blocks,
};
pub use options::{FeatureError, FormatOptions, InodeCount, JournalOptions};
pub use plan::{VolumePlan, plan_for_size, plan_smallest};
pub use tree::{FileSource, NodeId, NodeKind, Tree, TreeNode};
pub use write::write;

/// First non-reserved inode, that of lost+found.
const LOST_FOUND_INODE: u32 = 11;

/// Error of making a volume.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// The size is too small for a volume.
    #[error("too small for a volume: {blocks} blocks of {block_bytes} bytes")]
    TooSmall {
        /// Blocks of the volume.
        blocks: u64,
        /// Bytes per block.
        block_bytes: u32,
    },
    /// The block count exceeds 32 bits without the `64bit` feature.
    #[error(
        "too large: {blocks} blocks of {block_bytes} bytes; take larger blocks (-b), \
         or ext4 (-t), which counts them with 64 bits"
    )]
    TooLarge {
        /// Blocks of the volume.
        blocks: u64,
        /// Bytes per block.
        block_bytes: u32,
    },
    /// The inode tables would fill the volume.
    #[error(
        "{0} inodes leave no room for files: give fewer (-N), more bytes per inode (-i), or a larger SIZE"
    )]
    TooManyInodes(u32),
    /// An invalid option or combination of options.
    #[error("{0}")]
    Misuse(String),
    /// The journal would take more than half of the volume.
    #[error(
        "-J size: a journal of {0} blocks takes more than half of the volume; give a smaller one, \
         or a larger SIZE"
    )]
    LargeJournal(u32),
    /// The inode tables of a flex group do not fit between the fixed structures.
    #[error(
        "the inode tables find no room: give fewer inodes (-N), more bytes per inode (-i), \
         ^flex_bg (-O), or a larger SIZE"
    )]
    NoTables,
    /// The tree needs more blocks than are free.
    #[error(
        "no room: the tree needs {needed} blocks of {block_bytes} bytes, the volume has {free}; \
         give a larger SIZE"
    )]
    NoBlocks {
        /// Blocks needed.
        needed: u64,
        /// Free blocks.
        free: u64,
        /// Bytes per block.
        block_bytes: u32,
    },
    /// The tree needs more inodes than are free.
    #[error(
        "no room: the tree needs {needed} inodes, the volume has {free}; give more (-N) or a larger SIZE"
    )]
    NoInodes {
        /// Inodes needed.
        needed: u64,
        /// Free inodes.
        free: u64,
    },
    /// A node of the tree that ext2 cannot hold.
    #[error("{path}: {what}")]
    Tree {
        /// Path of the node.
        path: String,
        /// Reason.
        what: String,
    },
    /// The contents of a file could not be read.
    #[error("{path}: {error}")]
    Source {
        /// Path of the file.
        path: String,
        /// Error of the source.
        error: std::io::Error,
    },
    /// The device failed.
    #[error(transparent)]
    Io(#[from] draconis_device::Error),
}

/// Result of making a volume.
pub type Result<T> = std::result::Result<T, FormatError>;
