//! One error says whose fault it is.

use std::fmt;

use draconis_exchange::contract::Refusal;

use crate::{FsBlock, InodeNumber};

/// What a volume answers instead of a result.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The caller asked for something that makes no sense.
    #[error("misuse: {0}")]
    Misuse(&'static str),
    /// The disk holds no ext volume.
    #[error("not an ext volume")]
    NotExt,
    /// The volume needs something this library does not do; the text names all of it.
    #[error("{feature}")]
    Unsupported {
        /// Such as `needs: extent, 64bit`.
        feature: String,
    },
    /// What the disk holds is damaged.
    #[error("{}", CorruptionMessage { what, inode, block })]
    Corrupt {
        /// Which structure, and what is wrong with it.
        what: &'static str,
        /// The file it belongs to.
        inode: Option<InodeNumber>,
        /// The block it is in, or the block number that is wrong.
        block: Option<FsBlock>,
    },
    /// The device failed.
    #[error(transparent)]
    Io(#[from] draconis_device::Error),
    /// No such name or inode.
    #[error("no such file or directory")]
    NotFound,
    /// A directory was needed.
    #[error("not a directory")]
    NotADirectory,
    /// Something other than a directory was needed.
    #[error("is a directory")]
    IsADirectory,
    /// A name of more than 255 bytes.
    #[error("file name too long")]
    NameTooLong,
    /// No such extended attribute.
    #[error("no such extended attribute")]
    NoAttribute,
    /// More symbolic links on a path than are followed.
    #[error("too many levels of symbolic links")]
    TooManyLinks,
    /// The name is there already.
    #[error("file exists")]
    Exists,
    /// A directory that still holds names.
    #[error("directory not empty")]
    NotEmpty,
    /// No block or no inode is left.
    #[error("no space left on device")]
    NoSpace,
    /// Beyond the largest file that the format can hold.
    #[error("file too large")]
    TooLarge,
    /// Beyond the most names that an inode can have.
    #[error("too many links")]
    LinkLimit,
    /// The volume was opened for reading, was closed, or stopped after a failure.
    #[error("read-only file system")]
    ReadOnly,
    /// The volume guards against two hosts, and another one uses it.
    #[error("in use by {by}")]
    InUse {
        /// Who says so.
        by: String,
    },
    /// The inode is immutable or only to be appended to.
    #[error("operation not permitted")]
    NotPermitted,
    /// What is in that directory belongs to its project, and this belongs to another one.
    #[error("the directory is of another project")]
    OtherProject,
    /// The contents are encrypted; names and attributes can be seen without the key.
    #[error("required key not available")]
    NoKey,
}

/// What a volume answers.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Damage in the volume's own structures.
    pub(crate) const fn corrupt(what: &'static str) -> Self {
        Self::Corrupt { what, inode: None, block: None }
    }

    /// The same damage, said to be in `block` unless a block is named already.
    pub(crate) fn in_block(self, at: FsBlock) -> Self {
        match self {
            Self::Corrupt { what, inode, block } => {
                Self::Corrupt { what, inode, block: block.or(Some(at)) }
            }
            other => other,
        }
    }

    /// The same damage, said to be of `inode` unless a file is named already.
    pub(crate) fn of_inode(self, of: InodeNumber) -> Self {
        match self {
            Self::Corrupt { what, inode, block } => {
                Self::Corrupt { what, inode: inode.or(Some(of)), block }
            }
            other => other,
        }
    }

    /// What a contract answers for this; the refusal knows the errno.
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::Misuse(_) | Self::NotExt => Refusal::Invalid,
            Self::Unsupported { .. } => Refusal::NotSupported,
            Self::Corrupt { .. } => Refusal::Corrupt,
            Self::Io(draconis_device::Error::ServiceEnded) => Refusal::Gone,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_names_the_innermost_place() {
        let error = Error::corrupt("directory entry")
            .in_block(FsBlock(7))
            .in_block(FsBlock(9))
            .of_inode(InodeNumber(12));
        assert_eq!(error.to_string(), "corrupt directory entry, inode 12, block 7");
        assert_eq!(error.refusal(), Refusal::Corrupt);
    }
}
