//! Problems found by a check, and a bounded log of them.

use draconis_types::lock::Mutex;
use std::fmt;

use crate::format::inode::flags;
use crate::format::witness::FORMS;
use crate::{FsBlock, GroupNumber, InodeNumber};

/// Severity of a problem.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Severity {
    /// A counter that the next mount or check corrects, without effect on files.
    Notice,
    /// The volume is damaged.
    Damage,
}

macro_rules! whats {
    ($($pass:literal: $($severity:ident $what:ident $code:literal $text:literal;)*)*) => {
        /// Kind of a problem.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum What {
            $($(#[doc = $text] $what,)*)*
        }

        impl What {
            /// All kinds, in the order in which a check finds them.
            pub const ALL: &[Self] = &[$($(Self::$what,)*)*];

            /// Returns a short, stable name.
            pub const fn code(self) -> &'static str {
                match self { $($(Self::$what => $code,)*)* }
            }

            /// Returns the description without a location.
            pub const fn text(self) -> &'static str {
                match self { $($(Self::$what => $text,)*)* }
            }

            /// Returns the pass that finds it, numbered as in `e2fsck`.
            pub const fn pass(self) -> u8 {
                match self { $($(Self::$what => $pass,)*)* }
            }

            /// Returns the severity.
            pub const fn severity(self) -> Severity {
                match self { $($(Self::$what => Severity::$severity,)*)* }
            }
        }
    };
}

whats! {
    0:
    Damage Superblock "superblock" "a field of the superblock makes no sense";
    Damage VolumeBeyondDisk "volume-beyond-disk" "the volume is longer than its disk (blocks)";
    Damage FeatureClash "feature-clash" "features that exclude each other";
    Damage FeatureLost "feature-lost" "inodes need a feature that the superblock does not have";
    Damage JournalWithoutFeature "journal-without-feature" "a journal inode is named, the feature is not there";
    Damage SuperblockChecksum "superblock-checksum" "the checksum of the superblock is wrong";
    Damage JournalInode "journal-inode" "the journal inode or the journal superblock is invalid";
    Damage Journal "journal" "the journal is damaged: transactions from there on are not replayed";
    Damage JournalCopy "journal-copy" "a block in the journal is damaged: it alone is not replayed";
    Notice JournalNotEmpty "journal-not-empty" "the journal holds changes, the volume says it does not";
    Notice Unreplayed "unreplayed" "the journal holds changes that were not replayed yet";
    Notice FeaturesInRevision0 "features-in-revision-0" "features are set, revision 0 has none";
    Notice ReserveWithoutFeature "reserve-without-feature" "descriptor blocks are reserved, the resize_inode feature is not there";
    Damage GroupBlockBitmap "group-block-bitmap" "the block bitmap lies where it cannot";
    Damage GroupInodeBitmap "group-inode-bitmap" "the inode bitmap lies where it cannot";
    Damage GroupInodeTable "group-inode-table" "the inode table lies where it cannot";
    Damage GroupChecksum "group-checksum" "the checksum of the group's descriptor is wrong";
    Notice GroupUnused "group-unused" "the group says that more inodes were never used than it has";
    Damage GroupOverlap "group-overlap" "two structures of the groups lie in one block";
    Notice GroupUninitialised "group-uninitialised" "a group says it was not initialised, the feature is not there";
    Damage MmpBlock "mmp-block" "the block that guards against mounting twice makes no sense";
    Damage OrphanFile "orphan-file" "the file of orphans makes no sense";
    Notice OrphanList "orphan-list" "the list of orphans begins with an inode that cannot be on it";
    Damage UsedUninitialised "used-uninitialised" "an inode in use lies where the group says it has none";
    Damage ResizeInode "resize-inode" "the resize inode does not lead to the reserved descriptor blocks";
    Notice ResizeInodeWithoutFeature "resize-inode-without-feature" "the resize inode is in use, the feature is not there";

    1:
    Damage InodeChecksum "inode-checksum" "the checksum of the inode is wrong";
    Damage RootMissing "root-missing" "the root is not a directory";
    Damage ReservedInode "reserved-inode" "a reserved inode holds what it should not";
    Damage DeletedWithoutTime "deleted-without-time" "a deleted inode has no deletion time";
    Damage InOrphanList "in-orphan-list" "the inode was on a list of orphans";
    Damage OnOrphanList "on-orphan-list" "the inode is on the list of orphans";
    Damage UsedWithDeletionTime "used-with-deletion-time" "an inode in use has a deletion time";
    Damage Mode "mode" "the mode is of no kind";
    Damage Flags "flags" "a flag needs a feature or a kind that is not there";
    Damage HighHalf "high-half" "a high half is set that this volume does not use";
    Damage FragmentAddress "fragment-address" "the address of a fragment is set";
    Damage ExtraSize "extra-size" "the extra size does not fit the inode";
    Damage AttributesInInode "attributes-in-inode" "the attributes inside the inode make no sense";
    Damage SpecialSize "special-size" "a device, pipe or socket has a size";
    Damage Symlink "symlink" "the symbolic link's target and size do not fit";
    Damage Size "size" "the size does not fit the blocks";
    Damage BlockCount "block-count" "i_blocks counts wrong (sectors)";
    Damage PointerOutside "pointer-outside" "a block pointer leads out of the volume";
    Damage ExtentNode "extent-node" "a node of the tree of extents makes no sense";
    Damage ExtentChecksum "extent-checksum" "the checksum of a node of the tree of extents is wrong";
    Damage ExtentStart "extent-start" "a node of the tree of extents begins elsewhere than is said above it";
    Damage ExtentFlag "extent-flag" "the map of blocks is a tree of extents, the flag says otherwise";
    Damage Misaligned "misaligned" "a block lies elsewhere in its cluster than in the file's";
    Damage InMetadata "in-metadata" "a file claims a block of the volume's own structures";
    Damage ClaimedTwice "claimed-twice" "a block is claimed more than once";
    Damage AttributeBlock "attribute-block" "the block of attributes makes no sense";
    Damage AttributeChecksum "attribute-checksum" "the checksum of the block of attributes is wrong";
    Damage AttributeValue "attribute-value" "the inode with the value of an attribute does not fit it";
    Damage AttributeValueReferences "attribute-value-references" "the inode with the value of an attribute counts its users wrong";
    Damage Encryption "encryption" "the inode is encrypted, and does not say how";
    Damage InlineData "inline-data" "contents inside the inode are missing, or the flag that they are there";
    Damage AttributeReferences "attribute-references" "the block of attributes counts its users wrong";
    Damage LargeFileFeature "large-file-feature" "a file of 2 GiB and more needs the large_file feature";

    2:
    Damage DirectoryHole "directory-hole" "a directory has a hole";
    Damage DirectoryUnwritten "directory-unwritten" "a block of a directory was never written";
    Damage DirectoryChecksum "directory-checksum" "the checksum of the directory's block is wrong, or has no room";
    Damage EntryChain "entry-chain" "the chain of directory entries breaks (byte)";
    Damage EntryName "entry-name" "a name that cannot be";
    Damage EntryEncryption "entry-encryption" "the inode is not encrypted as its directory is";
    Damage EntryInode "entry-inode" "a name for an inode that no name may name";
    Damage EntryUnused "entry-unused" "a name for an inode that is not in use";
    Damage EntryKind "entry-kind" "the kind in the entry is not that of the inode";
    Damage EntryTwice "entry-twice" "a name is there twice";
    Damage Dot "dot" "the entry . is missing or wrong";
    Damage DotDot "dot-dot" "the entry .. is missing or wrong";
    Damage DirectoryTwice "directory-twice" "a directory has a second name";
    Damage TreeRoot "tree-root" "the root of the hash tree makes no sense";
    Damage TreeNode "tree-node" "a node of the hash tree makes no sense";
    Damage TreeOrder "tree-order" "hashes of the tree are out of order";
    Damage TreeBlock "tree-block" "the hash tree leads to a block wrongly or not at all";
    Damage TreeRange "tree-range" "names lie outside the range of hashes their block has";

    3:
    Damage Unconnected "unconnected" "the directory cannot be reached from the root";
    Damage Parent "parent" "the entry .. does not name the parent";

    4:
    Damage Unattached "unattached" "an inode in use has no name";
    Damage UnattachedEmpty "unattached-empty" "a file without blocks has no name";
    Damage LinkCount "link-count" "the link count is wrong";

    5:
    Damage BlockUsedButFree "block-used-but-free" "blocks in use are free in the bitmap (count)";
    Damage BlockFreeButUsed "block-free-but-used" "blocks that nothing uses are taken in the bitmap (count)";
    Damage InodeUsedButFree "inode-used-but-free" "inodes in use are free in the bitmap (count)";
    Damage InodeFreeButUsed "inode-free-but-used" "inodes that are not in use are taken in the bitmap (count)";
    Damage BlockBitmapChecksum "block-bitmap-checksum" "the checksum of the block bitmap is wrong";
    Damage InodeBitmapChecksum "inode-bitmap-checksum" "the checksum of the inode bitmap is wrong";
    Damage BlockBitmapEnd "block-bitmap-end" "the end of the block bitmap is not filled up";
    Damage InodeBitmapEnd "inode-bitmap-end" "the end of the inode bitmap is not filled up";
    Damage GroupFreeBlocks "group-free-blocks" "the group counts its free blocks wrong";
    Damage GroupFreeInodes "group-free-inodes" "the group counts its free inodes wrong";
    Damage GroupDirectories "group-directories" "the group counts its directories wrong";
    Damage Quota "quota" "a quota counts wrong, or its file makes no sense";
    Notice FreeBlocks "free-blocks" "the superblock counts free blocks wrong";
    Notice FreeInodes "free-inodes" "the superblock counts free inodes wrong";
}

impl What {
    /// Returns true if the descriptor of a group says where a structure is, and may be wrong.
    pub(crate) const fn is_of_descriptor(self) -> bool {
        matches!(
            self,
            Self::GroupBlockBitmap
                | Self::GroupInodeBitmap
                | Self::GroupInodeTable
                | Self::GroupOverlap
                | Self::GroupChecksum
        )
    }

    /// Returns true if its fix makes free what nothing seems to use, or counts that.
    pub(crate) const fn frees(self) -> bool {
        matches!(
            self,
            Self::BlockFreeButUsed
                | Self::InodeFreeButUsed
                | Self::GroupFreeBlocks
                | Self::GroupFreeInodes
                | Self::GroupDirectories
                | Self::FreeBlocks
                | Self::FreeInodes
                | Self::EntryUnused
                | Self::UnattachedEmpty
                | Self::Quota
        )
    }
}

/// One problem. Fields that do not apply are `None`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Problem {
    /// Kind of the problem.
    pub what: What,
    /// Affected group.
    pub group: Option<GroupNumber>,
    /// Affected inode.
    pub inode: Option<InodeNumber>,
    /// Affected or containing block; with a count, the first one.
    pub block: Option<FsBlock>,
    /// Affected name, or superblock field.
    pub name: Option<Vec<u8>>,
    /// Value found.
    pub found: Option<u64>,
    /// Value expected.
    pub expected: Option<u64>,
}

impl Problem {
    /// Creates a problem without a location.
    pub(crate) const fn new(what: What) -> Self {
        Self {
            what,
            group: None,
            inode: None,
            block: None,
            name: None,
            found: None,
            expected: None,
        }
    }

    /// Returns true if the problem says how an inode is read: others may only follow from it.
    pub(crate) fn is_decisive(&self) -> bool {
        let turned = match (self.found, self.expected) {
            (Some(found), Some(expected)) => found ^ expected,
            _ => 0,
        };
        match self.what {
            What::FeatureLost | What::ExtentFlag => true,
            What::InodeChecksum => self.name.is_some(),
            What::InlineData => self.expected.is_some(),
            What::Flags => turned & u64::from(FORMS | flags::EA_INODE) != 0,
            _ => false,
        }
    }

    pub(super) fn group(mut self, group: u32) -> Self {
        self.group = Some(GroupNumber(group));
        self
    }

    pub(super) fn inode(mut self, inode: u32) -> Self {
        self.inode = Some(InodeNumber(inode));
        self
    }

    pub(super) fn block(mut self, block: u64) -> Self {
        self.block = Some(FsBlock(block));
        self
    }

    pub(super) fn name(mut self, name: &[u8]) -> Self {
        self.name = Some(name.to_vec());
        self
    }

    pub(super) fn found(mut self, found: impl Into<u64>) -> Self {
        self.found = Some(found.into());
        self
    }

    pub(super) fn expected(mut self, expected: impl Into<u64>) -> Self {
        self.expected = Some(expected.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut start = "";
        if let Some(GroupNumber(group)) = self.group {
            write!(f, "group {group}")?;
            start = ", ";
        }
        if let Some(inode) = self.inode {
            write!(f, "{start}inode {inode}")?;
            start = ", ";
        }
        if let Some(block) = self.block {
            write!(f, "{start}block {block}")?;
            start = ", ";
        }
        if let Some(name) = &self.name {
            write!(f, "{start}\"{}\"", name.escape_ascii())?;
            start = ", ";
        }
        if !start.is_empty() {
            f.write_str(": ")?;
        }
        f.write_str(self.what.text())?;
        match (self.found, self.expected) {
            (Some(found), Some(expected)) => write!(f, ": {found}, should be {expected}"),
            (Some(found), None) => write!(f, ": {found}"),
            (None, Some(expected)) => write!(f, ": should be {expected}"),
            (None, None) => Ok(()),
        }
    }
}

/// Bounded log of problems, shared by threads.
#[derive(Debug)]
pub(super) struct ProblemLog {
    max_problems: usize,
    kept: Mutex<ProblemList>,
}

#[derive(Debug, Default)]
pub(super) struct ProblemList {
    pub(super) list: Vec<Problem>,
    pub(super) suppressed: u64,
    pub(super) damaged: bool,
}

impl ProblemLog {
    pub(super) fn new(max_problems: usize) -> Self {
        Self { max_problems, kept: Mutex::default() }
    }

    pub(super) fn add(&self, complaint: Problem) {
        let mut kept = self.kept.lock();
        kept.damaged |= complaint.what.severity() == Severity::Damage;
        if kept.list.len() < self.max_problems {
            kept.list.push(complaint);
        } else {
            kept.suppressed = kept.suppressed.saturating_add(1);
        }
    }

    /// Returns true if damage was found so far.
    pub(super) fn is_damaged(&self) -> bool {
        self.kept.lock().damaged
    }

    /// Returns true if damage of other kinds was found so far.
    pub(super) fn is_damaged_beside(&self, kinds: &[What]) -> bool {
        let log = self.kept.lock();
        let is_other =
            |it: &Problem| it.what.severity() == Severity::Damage && !kinds.contains(&it.what);
        log.suppressed > 0 && log.damaged || log.list.iter().any(is_other)
    }

    /// Takes the problems found so far, in order.
    pub(super) fn take(&self) -> ProblemList {
        let mut kept = std::mem::take(&mut *self.kept.lock());
        kept.list.sort();
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_text_says_what_and_where() {
        let complaint =
            Problem::new(What::LinkCount).inode(12).found(3u64).expected(1u64).to_string();
        assert_eq!(complaint, "inode 12: the link count is wrong: 3, should be 1");
        let complaint = Problem::new(What::EntryName).inode(2).block(9).name(b"a\nb").to_string();
        assert_eq!(complaint, "inode 2, block 9, \"a\\nb\": a name that cannot be");
    }

    #[test]
    fn full_list_still_counts_problems() {
        let log = ProblemLog::new(2);
        for inode in [5, 3, 4] {
            log.add(Problem::new(What::Mode).inode(inode));
        }
        let kept = log.take();
        assert_eq!((kept.list.len(), kept.suppressed, kept.damaged), (2, 1, true));
        assert_eq!(kept.list[0].inode, Some(InodeNumber(3)));
    }

    #[test]
    fn codes_are_unique() {
        let mut codes: Vec<_> = What::ALL.iter().map(|what| what.code()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), What::ALL.len());
    }
}
