//! What a volume is to be like, in mke2fs's words.

use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::quota::QuotaType;

/// How many inodes there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InodeCount {
    /// As mke2fs chooses for a volume of this size.
    Default,
    /// One for so many bytes: 1,024 to 67,108,864.
    PerBytes(u32),
    /// So many, or the next number that fills the tables.
    Count(u32),
}

/// What a volume is to be like.
#[derive(Clone, PartialEq, Debug)]
pub struct FormatOptions {
    /// Bytes of a block, a power of two from 1,024 to 65,536; by size if left open.
    pub block_bytes: Option<u32>,
    /// Bytes of a cluster with `bigalloc`, a power of two; sixteen blocks if left open.
    pub cluster_bytes: Option<u32>,
    /// Inodes.
    pub inodes: InodeCount,
    /// Bytes of an inode: a power of two from 128 to the block size.
    pub inode_bytes: u32,
    /// Compatible features.
    pub compatible: Compatible,
    /// Incompatible features.
    pub incompatible: Incompatible,
    /// Read-only-compatible features.
    pub read_only_compatible: ReadOnlyCompatible,
    /// Blocks kept for the superuser, in millionths: at most 500,000.
    pub reserved_ppm: u32,
    /// At most 16 bytes.
    pub label: Vec<u8>,
    /// Identity.
    pub uuid: [u8; 16],
    /// What hashes of names start from.
    pub hash_seed: [u8; 16],
    /// How indexed directories hash names: 0 legacy, 1 half MD4, 2 TEA.
    pub hash_version: u8,
    /// When the volume is made, in seconds since 1970.
    pub time: u32,
    /// Owner and group of the root directory, where no tree says so.
    pub root_owner: (u32, u32),
    /// The journal, on volumes that have one.
    pub journal: JournalOptions,
    /// Groups that keep their bitmaps and inode tables together, a power of two (`flex_bg`).
    pub flex_groups: u32,
    /// The descriptors' reserve is for growth to so many blocks; for mke2fs's factor if left open.
    pub resize_blocks: Option<u64>,
    /// Blocks that a RAID writes to one disk before it goes to the next; 0 if not known.
    pub stride: u16,
    /// Blocks of a stripe of a RAID; 0 if not known.
    pub stripe_width: u32,
    /// Backup superblocks with `sparse_super2`: 0 to 2.
    pub backups: u32,
    /// All bitmaps and tables lie at the start of the volume (with `flex_bg`).
    pub packed_meta_blocks: bool,
    /// Names that ignore case have to be valid (with `casefold`).
    pub strict_names: bool,
    /// Whose quotas are counted, with `quota`: users', groups', projects'.
    pub quotas: [bool; 3],
    /// How often a host says that it uses the volume, in seconds (with `mmp`); 0 as mke2fs has it.
    pub mmp_interval: u16,
}

/// What the journal of a volume is to be like.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct JournalOptions {
    /// How long it is, in MiB; by the size of the volume if left open.
    pub mib: Option<u32>,
    /// How long its part for fast commits is, in KiB, with `fast_commit`.
    pub fast_kib: Option<u32>,
    /// The block that it begins at or behind; the middle of the volume if left open.
    pub at: Option<u64>,
}

/// A feature that a new volume cannot have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FeatureError {
    /// No feature has this name.
    #[error("-O {0}: no such feature")]
    Unknown(String),
    /// It is not made here.
    #[error("-O {0}: format makes no volumes with this feature")]
    Unsupported(String),
}

impl Default for FormatOptions {
    fn default() -> Self {
        Self {
            block_bytes: None,
            cluster_bytes: None,
            inodes: InodeCount::Default,
            inode_bytes: 256,
            compatible: Compatible::EXT_ATTR | Compatible::RESIZE_INODE | Compatible::DIR_INDEX,
            incompatible: Incompatible::FILETYPE,
            read_only_compatible: ReadOnlyCompatible::SPARSE_SUPER | ReadOnlyCompatible::LARGE_FILE,
            reserved_ppm: 50_000,
            label: vec![],
            uuid: [0; 16],
            hash_seed: [0; 16],
            hash_version: 1,
            time: 0,
            root_owner: (0, 0),
            journal: JournalOptions::default(),
            flex_groups: 16,
            resize_blocks: None,
            stride: 0,
            stripe_width: 0,
            backups: 2,
            packed_meta_blocks: false,
            strict_names: false,
            quotas: [true, true, false],
            mmp_interval: 0,
        }
    }
}

impl FormatOptions {
    const COMPATIBLE: Compatible = Compatible::HAS_JOURNAL
        .union(Compatible::EXT_ATTR)
        .union(Compatible::RESIZE_INODE)
        .union(Compatible::DIR_INDEX)
        .union(Compatible::SPARSE_SUPER2)
        .union(Compatible::FAST_COMMIT)
        .union(Compatible::STABLE_INODES)
        .union(Compatible::ORPHAN_FILE);
    const INCOMPATIBLE: Incompatible = Incompatible::FILETYPE
        .union(Incompatible::META_BG)
        .union(Incompatible::EXTENTS)
        .union(Incompatible::SIXTY_FOUR_BIT)
        .union(Incompatible::FLEX_BG)
        .union(Incompatible::CSUM_SEED)
        .union(Incompatible::LARGEDIR)
        .union(Incompatible::EA_INODE)
        .union(Incompatible::CASEFOLD)
        .union(Incompatible::ENCRYPT)
        .union(Incompatible::INLINE_DATA)
        .union(Incompatible::MMP);
    const READ_ONLY_COMPATIBLE: ReadOnlyCompatible = ReadOnlyCompatible::SPARSE_SUPER
        .union(ReadOnlyCompatible::LARGE_FILE)
        .union(ReadOnlyCompatible::HUGE_FILE)
        .union(ReadOnlyCompatible::GDT_CSUM)
        .union(ReadOnlyCompatible::DIR_NLINK)
        .union(ReadOnlyCompatible::EXTRA_ISIZE)
        .union(ReadOnlyCompatible::METADATA_CSUM)
        .union(ReadOnlyCompatible::PROJECT)
        .union(ReadOnlyCompatible::VERITY)
        .union(ReadOnlyCompatible::QUOTA)
        .union(ReadOnlyCompatible::BIGALLOC);

    /// The defaults of mke2fs for `ext2`, `ext3` or `ext4`.
    pub fn of_type(name: &str) -> Option<Self> {
        let mut options = Self::default();
        match name {
            "ext2" => {}
            "ext3" => options.compatible |= Compatible::HAS_JOURNAL,
            "ext4" => {
                options.compatible |= Compatible::HAS_JOURNAL;
                options.incompatible |=
                    Incompatible::EXTENTS | Incompatible::FLEX_BG | Incompatible::SIXTY_FOUR_BIT;
                options.read_only_compatible |= ReadOnlyCompatible::HUGE_FILE
                    | ReadOnlyCompatible::METADATA_CSUM
                    | ReadOnlyCompatible::DIR_NLINK
                    | ReadOnlyCompatible::EXTRA_ISIZE;
            }
            _ => return None,
        }
        Some(options)
    }

    pub(super) fn extents(&self) -> bool {
        self.incompatible.contains(Incompatible::EXTENTS)
    }

    pub(super) fn has_clusters(&self) -> bool {
        self.read_only_compatible.contains(ReadOnlyCompatible::BIGALLOC)
    }

    /// The kinds of quotas that are counted.
    pub(super) fn quota_kinds(&self) -> impl Iterator<Item = QuotaType> {
        let has = self.read_only_compatible.contains(ReadOnlyCompatible::QUOTA);
        let all = QuotaType::ALL.into_iter().zip(self.quotas);
        all.filter_map(move |(kind, is_counted)| (has && is_counted).then_some(kind))
    }

    /// Groups whose bitmaps and tables lie together; 1 where each group keeps its own.
    pub(super) fn groups_per_flex(&self) -> u32 {
        if self.incompatible.contains(Incompatible::FLEX_BG) { self.flex_groups } else { 1 }
    }

    /// Changes the features as `-O` says: names separated by commas, `^` takes one away,
    /// `none` takes all.
    ///
    /// # Errors
    /// [`FeatureError`] naming the first that cannot be.
    pub fn apply_features(&mut self, text: &str) -> Result<(), FeatureError> {
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if word == "none" {
                self.compatible = Compatible::empty();
                self.incompatible = Incompatible::empty();
                self.read_only_compatible = ReadOnlyCompatible::empty();
                continue;
            }
            let (name, on) = word.strip_prefix('^').map_or((word, true), |name| (name, false));
            let unsupported = |can: bool| match can || !on {
                true => Ok(()),
                false => Err(FeatureError::Unsupported(name.to_owned())),
            };
            if let Some(flag) = Compatible::named(name) {
                unsupported(Self::COMPATIBLE.contains(flag))?;
                self.compatible.set(flag, on);
            } else if let Some(flag) = Incompatible::named(name) {
                unsupported(Self::INCOMPATIBLE.contains(flag))?;
                self.incompatible.set(flag, on);
            } else if let Some(flag) = ReadOnlyCompatible::named(name) {
                unsupported(Self::READ_ONLY_COMPATIBLE.contains(flag))?;
                self.read_only_compatible.set(flag, on);
            } else {
                return Err(FeatureError::Unknown(name.to_owned()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_spelt_as_mke2fs_spells_them() {
        let mut options = FormatOptions::default();
        options.apply_features("^resize_inode, dir_nlink").unwrap();
        assert!(!options.compatible.contains(Compatible::RESIZE_INODE));
        assert!(options.read_only_compatible.contains(ReadOnlyCompatible::DIR_NLINK));
        options.apply_features("^has_journal,extents").unwrap();
        assert!(options.extents() && !options.compatible.contains(Compatible::HAS_JOURNAL));
        let error = options.apply_features("^mmp,journal_dev").unwrap_err();
        assert!(error.to_string().contains("journal_dev"), "{error}");
        assert_eq!(options.apply_features("sparse"), Err(FeatureError::Unknown("sparse".into())));
        options.apply_features("none").unwrap();
        assert_eq!(options.compatible.bits() | options.incompatible.bits(), 0);
    }
}
