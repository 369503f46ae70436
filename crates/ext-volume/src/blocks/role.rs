//! Roles of blocks.
//!
//! Every access to a metadata block names its role. The role decides the stage in a chain, and the
//! checksum that the block carries.

use crate::blocks::data::SharedBytes;
use crate::{FileId, FsBlock, Result};

/// Role of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// The superblock.
    Superblock,
    /// Group descriptors.
    Descriptors,
    /// Block bitmap of this group.
    BlockBitmap(u32),
    /// Inode bitmap of this group.
    InodeBitmap(u32),
    /// Inode table.
    InodeTable,
    /// Block of this directory.
    Directory(FileId),
    /// Indirect block of this file.
    IndirectBlock(FileId),
    /// Extent-tree node of this file.
    ExtentNode(FileId),
    /// Xattr block.
    XattrBlock,
    /// Block of the orphan file, which is this one.
    OrphanFile(FileId),
    /// Block of a quota file.
    Quota,
    /// File data, or the target of a symbolic link.
    Contents,
}

/// The one place that sets block checksums before writes and verifies them after reads. Volumes
/// without block checksums have none of this.
pub trait BlockChecksums: Send + Sync + std::fmt::Debug {
    /// Verifies the checksum of a block.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] if it is wrong.
    fn verify_checksum(&self, role: Role, block: FsBlock, bytes: &[u8]) -> Result<()>;

    /// Sets the checksum of a block before it is written.
    fn set_checksum(&self, role: Role, block: FsBlock, bytes: &mut SharedBytes);
}
