//! Problems that `e2fsck -p` repairs without asking: those that a power loss may cause.
//!
//! Found by planting each problem and watching e2fsck; see the tests of complaints. If the answer
//! depends on more than a [`Problem`] holds, it counts as a question.

use super::{Problem, What};

impl What {
    /// Returns true if `e2fsck -p` repairs this without asking, and without losing a file that had
    /// a name. Its status is 0 or 1 if all problems of a volume are such.
    const fn is_preen_ok(self) -> bool {
        match self {
            // The inode is unused or deleted, and its names are removed.
            Self::DeletedWithoutTime
            | Self::OnOrphanList
            | Self::UsedWithDeletionTime
            | Self::EntryUnused
            | Self::UnattachedEmpty => true,
            // Recounted.
            Self::LinkCount
            | Self::Size
            | Self::SpecialSize
            | Self::BlockCount
            | Self::BlockUsedButFree
            | Self::BlockFreeButUsed
            | Self::InodeUsedButFree
            | Self::InodeFreeButUsed
            | Self::BlockBitmapEnd
            | Self::InodeBitmapEnd
            | Self::GroupFreeBlocks
            | Self::GroupFreeInodes
            | Self::GroupDirectories
            | Self::FreeBlocks
            | Self::FreeInodes => true,
            // As at a mount.
            Self::Unreplayed | Self::OrphanList => true,
            // Corrected.
            Self::JournalWithoutFeature
            | Self::JournalInode
            | Self::GroupUninitialised
            | Self::UsedUninitialised
            | Self::HighHalf
            | Self::ExtraSize
            | Self::LargeFileFeature => true,
            // The directory becomes linear.
            Self::TreeRoot => true,
            _ => false,
        }
    }
}

impl Problem {
    /// Returns true if `e2fsck -p` repairs this without asking.
    pub fn is_preen_ok(&self) -> bool {
        let count = self.what == What::HighHalf && self.name.as_deref() == Some(b"i_blocks_hi");
        self.what.is_preen_ok() && !count
    }
}
