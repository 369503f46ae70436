//! The error type of a volume: each variant tells the cause.

use std::fmt;

use draconis_types::{DiskError, Refusal};

use crate::{FsBlock, InodeNumber};

/// Error of a volume.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The caller passed invalid arguments.
    #[error("misuse: {0}")]
    Misuse(&'static str),
    /// The disk holds no ext volume.
    #[error("not an ext volume")]
    NotExt,
    /// The volume needs unsupported features; the text names all of them.
    #[error("{feature}")]
    Unsupported {
        /// Text such as `needs: extent, 64bit`.
        feature: String,
    },
    /// The volume is damaged.
    #[error("{}", CorruptionMessage { what, inode, block })]
    Corrupt {
        /// Damaged structure and kind of damage.
        what: &'static str,
        /// Inode that the structure belongs to.
        inode: Option<InodeNumber>,
        /// Block of the structure, or the invalid block number.
        block: Option<FsBlock>,
    },
    /// The device failed.
    #[error(transparent)]
    Io(#[from] DiskError),
    /// The name or inode does not exist.
    #[error("no such file or directory")]
    NotFound,
    /// The operation needs a directory.
    #[error("not a directory")]
    NotADirectory,
    /// The operation does not work on a directory.
    #[error("is a directory")]
    IsADirectory,
    /// The name has more than 255 bytes.
    #[error("file name too long")]
    NameTooLong,
    /// The extended attribute does not exist.
    #[error("no such extended attribute")]
    NoAttribute,
    /// The path has more symbolic links than are followed.
    #[error("too many levels of symbolic links")]
    TooManyLinks,
    /// The name exists already.
    #[error("file exists")]
    Exists,
    /// The directory still has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// No free block or inode is left.
    #[error("no space left on device")]
    NoSpace,
    /// The offset exceeds the largest file of the format.
    #[error("file too large")]
    TooLarge,
    /// The inode has the maximum number of links.
    #[error("too many links")]
    LinkLimit,
    /// The volume was opened read-only, was closed, or stopped after a failure.
    #[error("read-only file system")]
    ReadOnly,
    /// Another host uses the volume (multi-mount protection).
    #[error("in use by {by}")]
    InUse {
        /// Name of the other host.
        by: String,
    },
    /// The inode is immutable or append-only.
    #[error("operation not permitted")]
    NotPermitted,
    /// The directory passes its project on, and the inode belongs to another project.
    #[error("the directory is of another project")]
    OtherProject,
    /// The data is encrypted; names and attributes are visible without the key.
    #[error("required key not available")]
    NoKey,
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns an error for damaged metadata.
    pub const fn corrupt(what: &'static str) -> Self {
        Self::Corrupt { what, inode: None, block: None }
    }

    /// Adds `block` to a corruption error, unless it names one.
    pub fn with_block(self, at: FsBlock) -> Self {
        match self {
            Self::Corrupt { what, inode, block } => {
                Self::Corrupt { what, inode, block: block.or(Some(at)) }
            }
            other => other,
        }
    }

    /// Adds `inode` to a corruption error, unless it names one.
    pub fn with_inode(self, of: InodeNumber) -> Self {
        match self {
            Self::Corrupt { what, inode, block } => {
                Self::Corrupt { what, inode: inode.or(Some(of)), block }
            }
            other => other,
        }
    }

    /// Returns the refusal that services send for this error; it has the errno.
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::Misuse(_) | Self::NotExt => Refusal::Invalid,
            Self::Unsupported { .. } => Refusal::NotSupported,
            Self::Corrupt { .. } => Refusal::Corrupt,
            Self::Io(DiskError::ServiceEnded) => Refusal::Gone,
            Self::Io(_) => Refusal::Io,
            Self::NotFound => Refusal::NotFound,
            Self::NotADirectory => Refusal::NotADirectory,
            Self::IsADirectory => Refusal::IsADirectory,
            Self::NameTooLong => Refusal::NameTooLong,
            Self::NoAttribute => Refusal::NoAttribute,
            Self::TooManyLinks => Refusal::TooManyLinks,
            Self::Exists => Refusal::Exists,
            Self::NotEmpty => Refusal::NotEmpty,
            Self::NoSpace => Refusal::NoSpace,
            Self::TooLarge => Refusal::TooLarge,
            Self::LinkLimit => Refusal::LinkLimit,
            Self::InUse { .. } => Refusal::Busy,
            Self::ReadOnly => Refusal::ReadOnly,
            Self::NotPermitted => Refusal::NotPermitted,
            Self::OtherProject => Refusal::CrossVolume,
            Self::NoKey => Refusal::NoKey,
        }
    }
}

struct CorruptionMessage<'a> {
    what: &'a str,
    inode: &'a Option<InodeNumber>,
    block: &'a Option<FsBlock>,
}

impl fmt::Display for CorruptionMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "corrupt {}", self.what)?;
        if let Some(inode) = self.inode {
            write!(f, ", inode {inode}")?;
        }
        if let Some(block) = self.block {
            write!(f, ", block {block}")?;
        }
        Ok(())
    }
}

impl FsBlock {
    /// Returns the number as a 32-bit field.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it does not fit.
    pub fn to_u32(self) -> Result<u32> {
        u32::try_from(self.0).map_err(|_| Error::TooLarge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corruption_error_names_innermost_location() {
        let error = Error::corrupt("directory entry")
            .with_block(FsBlock(7))
            .with_block(FsBlock(9))
            .with_inode(InodeNumber(12));
        assert_eq!(error.to_string(), "corrupt directory entry, inode 12, block 7");
        assert_eq!(error.refusal(), Refusal::Corrupt);
    }
}
