//! Changes of a volume.
//!
//! ```text
//!   create · link · unlink · rename · write · reserve · attributes       &self, one at a time
//!        │ Transaction: every block it changes is in the write-back cache
//!   names · contents · inodes · maps · allocation                        memory only
//!        │
//!   commit: the buffers that changed, in stages; one chain of groups     the disk
//! ```
//! Law 1: a change is complete in memory before readers see it, and readers wait for no device
//! because of it.
//! Law 2: a change that cannot be made changes nothing. A change that fails half-way, because of
//! damage or a device error, stops all writing.
//! Law 3: [`crate::commit`] defines what a chain leaves on disk, complete or cut off between two
//! stages.

pub(crate) mod access_times;
mod attributes;
mod contents;
mod dirents;
mod ea_inodes;
mod inline_data;
mod namei;
mod truncate_batches;

use draconis_types::FileType;
pub use draconis_types::{Access, AccessTimes, FallocateMode as Reserve};

/// Description of an inode to create.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// File type.
    pub kind: FileType,
    /// Permission bits, including setuid, setgid and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group; a setgid directory's group takes precedence.
    pub gid: u32,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Target of a symbolic link.
    pub target: &'a [u8],
}

/// Treatment of an existing inode with the new name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenameMode {
    /// Replace it.
    Replace,
    /// Refuse the rename.
    NoReplace,
    /// Give it the old name.
    Exchange,
}

/// Owner of a whiteout: the device 0:0 that hides a name in a union mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whiteout {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}
