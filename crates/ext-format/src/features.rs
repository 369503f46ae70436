//! The three feature sets, and their meaning for a reader.
//!
//! | set | an unknown member means |
//! |---|---|
//! | compatible | nothing |
//! | read-only compatible | reading is safe, writing is not |
//! | incompatible | neither is safe |

use bitflags::bitflags;

macro_rules! feature_set {
    ($(#[$doc:meta])* $set:ident, $letter:literal: $($(#[doc = $flag_doc:literal])* $flag:ident = $bit:literal $name:literal),* $(,)?) => {
        bitflags! {
            $(#[$doc])*
            #[derive(Clone, Copy, PartialEq, Eq, Debug)]
            pub struct $set: u32 {
                $($(#[doc = $flag_doc])* const $flag = 1 << $bit;)*
                const _ = !0;
            }
        }

        impl $set {
            const NAMES: &[($set, &str)] = &[$(($set::$flag, $name)),*];

            /// Returns the feature with that name, as `mke2fs -O` spells it, or its alias in
            /// mke2fs.
            pub fn named(name: &str) -> Option<Self> {
                let name = match name {
                    "extents" => "extent",
                    "uninit_groups" => "uninit_bg",
                    name => name,
                };
                let found = Self::NAMES.iter().find(|(_, known)| *known == name);
                found.map(|(flag, _)| *flag)
            }

            /// Returns the names of the features, as `mke2fs -O` spells them; an unnamed bit is
            /// spelt by its set and number.
            pub fn names(self) -> Vec<String> {
                (0..u32::BITS)
                    .filter(|bit| self.bits() & (1 << bit) != 0)
                    .map(|bit| {
                        let named = Self::NAMES.iter().find(|(flag, _)| flag.bits() == 1 << bit);
                        named.map_or_else(
                            || format!(concat!("FEATURE_", $letter, "{}"), bit),
                            |(_, name)| (*name).to_owned(),
                        )
                    })
                    .collect()
            }
        }
    };
}

feature_set! {
    /// Compatible features.
    Compatible, "C":
    /// Blocks are preallocated for new directories.
    DIR_PREALLOC = 0 "dir_prealloc",
    /// Inodes of AFS servers.
    IMAGIC_INODES = 1 "imagic_inodes",
    /// The volume has a journal.
    HAS_JOURNAL = 2 "has_journal",
    /// Extended attributes.
    EXT_ATTR = 3 "ext_attr",
    /// GDT blocks are reserved for growth.
    RESIZE_INODE = 4 "resize_inode",
    /// Directories may have htrees.
    DIR_INDEX = 5 "dir_index",
    /// Uninitialized groups; never in wide use.
    LAZY_BG = 6 "lazy_bg",
    /// Snapshots' exclude bitmaps.
    EXCLUDE_INODE = 7 "exclude_inode",
    /// Snapshots' exclude bitmaps.
    EXCLUDE_BITMAP = 8 "exclude_bitmap",
    /// At most two backup superblocks, in groups that the superblock names.
    SPARSE_SUPER2 = 9 "sparse_super2",
    /// The journal may hold fast commits.
    FAST_COMMIT = 10 "fast_commit",
    /// Inode numbers and the UUID never change.
    STABLE_INODES = 11 "stable_inodes",
    /// Orphans are listed in a file.
    ORPHAN_FILE = 12 "orphan_file",
}

feature_set! {
    /// Features without which a volume cannot be read (`incompat`).
    Incompatible, "I":
    /// Compressed files.
    COMPRESSION = 0 "compression",
    /// Directory entries store the file type.
    FILETYPE = 1 "filetype",
    /// The journal needs replay.
    RECOVER = 2 "needs_recovery",
    /// The volume is an external journal.
    JOURNAL_DEV = 3 "journal_dev",
    /// Descriptor blocks are spread over the volume.
    META_BG = 4 "meta_bg",
    /// Files mapped by extents.
    EXTENTS = 6 "extent",
    /// Block numbers of 64 bits.
    SIXTY_FOUR_BIT = 7 "64bit",
    /// Protection against mounting twice.
    MMP = 8 "mmp",
    /// Bitmaps and inode tables may be outside their group.
    FLEX_BG = 9 "flex_bg",
    /// Large extended attributes in EA inodes.
    EA_INODE = 10 "ea_inode",
    /// Data in directory entries.
    DIRDATA = 12 "dirdata",
    /// The checksum seed is in the superblock.
    CSUM_SEED = 13 "metadata_csum_seed",
    /// Directories above 2 GiB and htrees of three levels.
    LARGEDIR = 14 "large_dir",
    /// Small files in their inodes.
    INLINE_DATA = 15 "inline_data",
    /// Encrypted files.
    ENCRYPT = 16 "encrypt",
    /// Case-insensitive names.
    CASEFOLD = 17 "casefold",
    /// An offline change was interrupted; its redo log continues it. A feature of Draconis; other
    /// drivers assign the highest bit last.
    UNFINISHED = 31 "unfinished",
}

feature_set! {
    /// Read-only compatible features.
    ReadOnlyCompatible, "R":
    /// Backup superblocks only in some groups.
    SPARSE_SUPER = 0 "sparse_super",
    /// Files of 2 GiB and more.
    LARGE_FILE = 1 "large_file",
    /// Never used.
    BTREE_DIR = 2 "btree_dir",
    /// Files of more than 2^32 sectors.
    HUGE_FILE = 3 "huge_file",
    /// Checksums of group descriptors, and uninitialized tables.
    GDT_CSUM = 4 "uninit_bg",
    /// Directories with more than 65,000 subdirectories.
    DIR_NLINK = 5 "dir_nlink",
    /// Inodes with more fields than ext2's.
    EXTRA_ISIZE = 6 "extra_isize",
    /// Snapshots.
    HAS_SNAPSHOT = 7 "has_snapshot",
    /// Quotas in system files.
    QUOTA = 8 "quota",
    /// Allocation in clusters.
    BIGALLOC = 9 "bigalloc",
    /// Checksums of all metadata.
    METADATA_CSUM = 10 "metadata_csum",
    /// Replicas.
    REPLICA = 11 "replica",
    /// The volume must not be written.
    READONLY = 12 "read-only",
    /// Project quotas.
    PROJECT = 13 "project",
    /// Files may share blocks.
    SHARED_BLOCKS = 14 "shared_blocks",
    /// Files with Merkle trees over their contents.
    VERITY = 15 "verity",
    /// The orphan file is not empty.
    ORPHAN_PRESENT = 16 "orphan_present",
}

impl Incompatible {
    /// Features that only Linux's ext4 driver mounts.
    pub const EXT4_ONLY: Self = Self::EXTENTS
        .union(Self::SIXTY_FOUR_BIT)
        .union(Self::MMP)
        .union(Self::FLEX_BG)
        .union(Self::EA_INODE)
        .union(Self::CSUM_SEED)
        .union(Self::LARGEDIR)
        .union(Self::INLINE_DATA)
        .union(Self::ENCRYPT)
        .union(Self::CASEFOLD);

    /// Features that this library reads. Recovery is refused separately.
    pub const READABLE: Self = Self::WRITABLE.union(Self::MMP);

    /// Features that this library writes.
    pub const WRITABLE: Self = Self::NO_WRITER_SUPPORT_NEEDED
        .union(Self::EXTENTS)
        .union(Self::SIXTY_FOUR_BIT)
        .union(Self::INLINE_DATA)
        .union(Self::EA_INODE)
        .union(Self::CASEFOLD)
        .union(Self::ENCRYPT);

    /// Features that need no support in a writer.
    const NO_WRITER_SUPPORT_NEEDED: Self = Self::FILETYPE
        .union(Self::META_BG)
        .union(Self::FLEX_BG)
        .union(Self::CSUM_SEED)
        .union(Self::LARGEDIR);

    /// Features that the checker supports.
    pub const CHECKABLE: Self = Self::OFFLINE_CHANGEABLE;

    /// Features that offline changes support.
    pub const OFFLINE_CHANGEABLE: Self = Self::NO_WRITER_SUPPORT_NEEDED
        .union(Self::EXTENTS)
        .union(Self::SIXTY_FOUR_BIT)
        .union(Self::INLINE_DATA)
        .union(Self::EA_INODE)
        .union(Self::ENCRYPT)
        .union(Self::CASEFOLD)
        .union(Self::MMP);
}

impl ReadOnlyCompatible {
    /// Features that only Linux's ext4 driver mounts.
    pub const EXT4_ONLY: Self = Self::HUGE_FILE
        .union(Self::GDT_CSUM)
        .union(Self::DIR_NLINK)
        .union(Self::EXTRA_ISIZE)
        .union(Self::QUOTA)
        .union(Self::BIGALLOC)
        .union(Self::METADATA_CSUM)
        .union(Self::PROJECT)
        .union(Self::SHARED_BLOCKS)
        .union(Self::VERITY)
        .union(Self::ORPHAN_PRESENT);

    /// Features that this library writes.
    pub const WRITABLE: Self = Self::NO_WRITER_SUPPORT_NEEDED
        .union(Self::CHECKSUMS)
        .union(Self::BIGALLOC)
        .union(Self::QUOTA)
        .union(Self::PROJECT)
        .union(Self::VERITY)
        .union(Self::ORPHAN_PRESENT);

    /// Groups, or all metadata, carry checksums.
    pub const CHECKSUMS: Self = Self::GDT_CSUM.union(Self::METADATA_CSUM);

    /// Features that need no support in a writer.
    const NO_WRITER_SUPPORT_NEEDED: Self = Self::SPARSE_SUPER
        .union(Self::LARGE_FILE)
        .union(Self::HUGE_FILE)
        .union(Self::DIR_NLINK)
        .union(Self::EXTRA_ISIZE);

    /// Features that the checker supports.
    pub const CHECKABLE: Self = Self::OFFLINE_CHANGEABLE.union(Self::READONLY);

    /// Features that offline changes support.
    pub const OFFLINE_CHANGEABLE: Self = Self::NO_WRITER_SUPPORT_NEEDED
        .union(Self::CHECKSUMS)
        .union(Self::QUOTA)
        .union(Self::PROJECT)
        .union(Self::VERITY)
        .union(Self::BIGALLOC)
        .union(Self::ORPHAN_PRESENT);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_names_match_mke2fs() {
        let needs = Incompatible::EXTENTS | Incompatible::SIXTY_FOUR_BIT;
        assert_eq!(needs.names(), ["extent", "64bit"]);
        assert_eq!(Incompatible::named("extents"), Some(Incompatible::EXTENTS));
        let sums = ReadOnlyCompatible::named("uninit_bg");
        assert!(sums.is_some() && ReadOnlyCompatible::named("uninit_groups") == sums);
        assert_eq!(Incompatible::from_bits_retain(1 << 30).names(), ["FEATURE_I30"]);
        assert_eq!(ReadOnlyCompatible::from_bits_retain(1 << 20).names(), ["FEATURE_R20"]);
    }
}
