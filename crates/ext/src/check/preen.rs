//! Which complaints `e2fsck -p` mends without asking: what a power cut may leave.
//!
//! Found out by planting each and watching it; see the tests of complaints. Where the
//! answer depends on more than a complaint tells, it counts as a question.

use super::{Problem, What};

impl What {
    /// Whether `e2fsck -p` mends this without a question, and without losing a file that
    /// had a name: its status is 0 or 1 if all complaints of a volume are such.
    const fn is_preen_ok(self) -> bool {
        match self {
            // The inode was never there or is gone, and so are its names.
            Self::DeletedWithoutTime
            | Self::OnOrphanList
            | Self::UsedWithDeletionTime
            | Self::EntryUnused
            | Self::UnattachedEmpty => true,
            // Counted again.
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
            // Set right.
            Self::JournalWithoutFeature
            | Self::JournalInode
            | Self::GroupUninitialised
            | Self::UsedUninitialised
            | Self::HighHalf
            | Self::ExtraSize
            | Self::LargeFileFeature => true,
            // The directory goes on without its index.
            Self::TreeRoot => true,
            _ => false,
        }
    }
}

impl Problem {
    /// Whether `e2fsck -p` mends this without a question.
    pub fn is_preen_ok(&self) -> bool {
        let count = self.what == What::HighHalf && self.name.as_deref() == Some(b"i_blocks_hi");
        self.what.is_preen_ok() && !count
    }
}
