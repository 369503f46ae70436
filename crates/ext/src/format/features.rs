//! The three feature sets, and what a reader makes of each.
//!
//! | set | an unknown member means |
//! |---|---|
//! | compatible | nothing |
//! | read-only compatible | reading is safe, writing is not |
//! | incompatible | keep out |

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

            /// The member of that name, as `mke2fs -O` spells it; also by a second name that
            /// mke2fs knows.
            pub fn named(name: &str) -> Option<Self> {
                let name = match name {
                    "extents" => "extent",
                    "uninit_groups" => "uninit_bg",
                    name => name,
                };
                let found = Self::NAMES.iter().find(|(_, known)| *known == name);
                found.map(|(flag, _)| *flag)
            }

            /// The names of the members, as `mke2fs -O` spells them; a bit without a
            /// name is spelt by its set and number.
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
    /// Blocks are set aside for new directories.
    DIR_PREALLOC = 0 "dir_prealloc",
    /// Inodes of AFS servers.
    IMAGIC_INODES = 1 "imagic_inodes",
    /// A journal is there.
    HAS_JOURNAL = 2 "has_journal",
    /// Extended attributes.
    EXT_ATTR = 3 "ext_attr",
    /// Descriptor blocks are reserved for growth.
    RESIZE_INODE = 4 "resize_inode",
    /// Directories may have hash trees.
    DIR_INDEX = 5 "dir_index",
    /// Groups not yet initialised; never in wide use.
    LAZY_BG = 6 "lazy_bg",
    /// Snapshots' exclude bitmaps.
    EXCLUDE_INODE = 7 "exclude_inode",
    /// Snapshots' exclude bitmaps.
    EXCLUDE_BITMAP = 8 "exclude_bitmap",
    /// At most two backup superblocks, in groups that the superblock names.
    SPARSE_SUPER2 = 9 "sparse_super2",
    /// The journal may hold fast commits.
    FAST_COMMIT = 10 "fast_commit",
    /// Inode numbers and the identity of the volume never change.
    STABLE_INODES = 11 "stable_inodes",
    /// Orphans are listed in a file of their own.
    ORPHAN_FILE = 12 "orphan_file",
}

feature_set! {
    /// Incompatible features.
    Incompatible, "I":
    /// Compressed files.
    COMPRESSION = 0 "compression",
    /// Directory entries name the kind of their inode.
    FILETYPE = 1 "filetype",
    /// The journal holds changes that are not in place yet.
    RECOVER = 2 "needs_recovery",
    /// The volume is the journal of another one.
    JOURNAL_DEV = 3 "journal_dev",
    /// Descriptor blocks are spread over the volume.
    META_BG = 4 "meta_bg",
    /// Files mapped by extents.
    EXTENTS = 6 "extent",
    /// Block numbers of 64 bits.
    SIXTY_FOUR_BIT = 7 "64bit",
    /// Protection against mounting twice.
    MMP = 8 "mmp",
    /// Bitmaps and inode tables lie anywhere.
    FLEX_BG = 9 "flex_bg",
    /// Large extended attributes in inodes of their own.
    EA_INODE = 10 "ea_inode",
    /// Data in directory entries.
    DIRDATA = 12 "dirdata",
    /// The seed of checksums is in the superblock.
    CSUM_SEED = 13 "metadata_csum_seed",
    /// Directories above 2 GiB and hash trees of three levels.
    LARGEDIR = 14 "large_dir",
    /// Small files inside their inodes.
    INLINE_DATA = 15 "inline_data",
    /// Encrypted files.
    ENCRYPT = 16 "encrypt",
    /// Names that ignore case.
    CASEFOLD = 17 "casefold",
    /// A change of the whole volume was cut off: its log says how to go on. Draconis' own; the
    /// bit is the last one that others would give a meaning.
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
    /// Checksums of group descriptors, and tables not yet initialised.
    GDT_CSUM = 4 "uninit_bg",
    /// Directories with more than 65,000 subdirectories.
    DIR_NLINK = 5 "dir_nlink",
    /// Inodes with more fields than ext2's.
    EXTRA_ISIZE = 6 "extra_isize",
    /// Snapshots.
    HAS_SNAPSHOT = 7 "has_snapshot",
    /// Quotas in hidden inodes.
    QUOTA = 8 "quota",
    /// Space is given in clusters.
    BIGALLOC = 9 "bigalloc",
    /// Checksums of all metadata.
    METADATA_CSUM = 10 "metadata_csum",
    /// Replicas.
    REPLICA = 11 "replica",
    /// The volume says that it must not be written.
    READONLY = 12 "read-only",
    /// Project quotas.
    PROJECT = 13 "project",
    /// Files may share blocks.
    SHARED_BLOCKS = 14 "shared_blocks",
    /// Files with hash trees over their contents.
    VERITY = 15 "verity",
    /// The orphan file holds something.
    ORPHAN_PRESENT = 16 "orphan_present",
}

impl Incompatible {
    /// What only Linux's ext4 driver mounts.
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

    /// What this library reads. Needing recovery has its own refusal.
    pub const READABLE: Self = Self::WRITABLE.union(Self::MMP);

    /// What a writer keeps intact.
    pub const WRITABLE: Self = Self::NO_WRITER_SUPPORT_NEEDED
        .union(Self::EXTENTS)
        .union(Self::SIXTY_FOUR_BIT)
        .union(Self::INLINE_DATA)
        .union(Self::EA_INODE)
        .union(Self::CASEFOLD)
        .union(Self::ENCRYPT);

    /// What asks nothing of those who write.
    const NO_WRITER_SUPPORT_NEEDED: Self = Self::FILETYPE
        .union(Self::META_BG)
        .union(Self::FLEX_BG)
        .union(Self::CSUM_SEED)
        .union(Self::LARGEDIR);

    /// What a check understands.
    pub const CHECKABLE: Self = Self::OFFLINE_CHANGEABLE;

    /// What a change of the whole volume keeps intact.
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
    /// What only Linux's ext4 driver mounts.
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

    /// What a writer keeps intact.
    pub const WRITABLE: Self = Self::NO_WRITER_SUPPORT_NEEDED
        .union(Self::CHECKSUMS)
        .union(Self::BIGALLOC)
        .union(Self::QUOTA)
        .union(Self::PROJECT)
        .union(Self::VERITY)
        .union(Self::ORPHAN_PRESENT);

    /// Groups, or all metadata, carry checksums.
    pub const CHECKSUMS: Self = Self::GDT_CSUM.union(Self::METADATA_CSUM);

    /// What asks nothing of those who write.
    const NO_WRITER_SUPPORT_NEEDED: Self = Self::SPARSE_SUPER
        .union(Self::LARGE_FILE)
        .union(Self::HUGE_FILE)
        .union(Self::DIR_NLINK)
        .union(Self::EXTRA_ISIZE);

    /// What a check understands.
    pub const CHECKABLE: Self = Self::OFFLINE_CHANGEABLE.union(Self::READONLY);

    /// What a change of the whole volume keeps intact.
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
    fn features_are_named_as_mke2fs_names_them() {
        let needs = Incompatible::EXTENTS | Incompatible::SIXTY_FOUR_BIT;
        assert_eq!(needs.names(), ["extent", "64bit"]);
        assert_eq!(Incompatible::named("extents"), Some(Incompatible::EXTENTS));
        let sums = ReadOnlyCompatible::named("uninit_bg");
        assert!(sums.is_some() && ReadOnlyCompatible::named("uninit_groups") == sums);
        assert_eq!(Incompatible::from_bits_retain(1 << 30).names(), ["FEATURE_I30"]);
        assert_eq!(ReadOnlyCompatible::from_bits_retain(1 << 20).names(), ["FEATURE_R20"]);
    }
}
