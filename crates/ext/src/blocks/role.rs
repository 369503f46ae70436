//! What a block is for.
//!
//! Every block of metadata that is read or written names its role: which stage of a chain it
//! belongs to, and whether it must carry a checksum, and which, follows from it.

use crate::blocks::data::SharedBytes;
use crate::{FileId, FsBlock, Result};

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Role {
    /// The block of the superblock.
    Superblock,
    /// A block of group descriptors.
    Descriptors,
    /// The bitmap of the blocks of this group.
    BlockBitmap(u32),
    /// The bitmap of the inodes of this group.
    InodeBitmap(u32),
    /// A block of an inode table.
    InodeTable,
    /// A block of this directory.
    Directory(FileId),
    /// A block of pointers of this file.
    IndirectBlock(FileId),
    /// A node of the tree of extents of this file.
    ExtentNode(FileId),
    /// A block of extended attributes.
    XattrBlock,
    /// A block of the file of orphans, which is this one.
    OrphanFile(FileId),
    /// A block of a file of quotas.
    Quota,
    /// Contents of a file, or the target of a symbolic link.
    Contents,
}

/// The one place where blocks are sealed before they are handed over, and verified when they
/// were read. Volumes whose blocks carry no checksums have none of this.
pub(crate) trait BlockChecksums: Send + Sync + std::fmt::Debug {
    /// Looks whether a block is what was sealed.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] if it is not.
    fn verify_checksum(&self, role: Role, block: FsBlock, bytes: &[u8]) -> Result<()>;

    /// Seals a block that is about to be written.
    fn set_checksum(&self, role: Role, block: FsBlock, bytes: &mut SharedBytes);
}
