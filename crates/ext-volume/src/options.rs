//! Options for opening a volume and for its changes.

use std::sync::Arc;

use draconis_types::{AccessTimes, Time};

/// Options for opening a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenOptions {
    /// Capacity of the inode cache, in inodes of about 300 bytes.
    pub inode_cache: u64,
    /// Entries of the block-map cache; each holds up to 64 runs of blocks, 1.5 KiB.
    pub block_map_cache: u64,
    /// Size of the data cache, in bytes; metadata and file data share it.
    pub data_cache_bytes: u64,
    /// True if native listings include `.` and `..`.
    pub lists_dots: bool,
    /// Limit of read-ahead per sequential reader, in bytes; 0 disables read-ahead.
    pub read_ahead_bytes: u64,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            inode_cache: 65_536,
            block_map_cache: 4_096,
            data_cache_bytes: 64 << 20,
            lists_dots: false,
            read_ahead_bytes: 4 << 20,
        }
    }
}

/// Options of a writable volume.
#[derive(Clone)]
pub struct WriteOptions {
    /// Source of the current time.
    pub clock: Arc<dyn Fn() -> Time + Send + Sync>,
    /// Limit of dirty data in memory, in bytes.
    pub dirty_bytes: u64,
    /// Policy for updating access times.
    pub atime: AccessTimes,
    /// True if freed blocks are discarded on the disk, once their free is durable.
    pub discard: bool,
}
