//! Options for new volumes, in mke2fs's terms.

use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::quota::QuotaType;

/// Number of inodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InodeCount {
    /// mke2fs's default for the size.
    Default,
    /// One inode for so many bytes: 1,024 to 67,108,864.
    PerBytes(u32),
    /// Exact count, rounded up to fill the tables.
    Count(u32),
}

/// Options of a new volume.
#[derive(Clone, PartialEq, Debug)]
pub struct FormatOptions {
    /// Block size, a power of two from 1,024 to 65,536; `None` for the size's default.
    pub block_bytes: Option<u32>,
    /// Cluster size with `bigalloc`, a power of two; `None` for sixteen blocks.
    pub cluster_bytes: Option<u32>,
    /// Number of inodes.
    pub inodes: InodeCount,
    /// Bytes of an inode: a power of two from 128 to the block size.
    pub inode_bytes: u32,
    /// Compatible features.
    pub compatible: Compatible,
    /// Features without which a volume cannot be read (`incompat`).
    pub incompatible: Incompatible,
    /// Read-only-compatible features.
    pub read_only_compatible: ReadOnlyCompatible,
    /// Blocks reserved for the superuser, in millionths: at most 500,000.
    pub reserved_ppm: u32,
    /// Label of at most 16 bytes.
    pub label: Vec<u8>,
    /// UUID.
    pub uuid: [u8; 16],
    /// Seed of htree hashes.
    pub hash_seed: [u8; 16],
    /// Hash of htrees: 0 legacy, 1 half MD4, 2 TEA.
    pub hash_version: u8,
    /// Creation time in seconds since 1970.
    pub time: u32,
    /// Owner and group of the root directory, unless a tree sets them.
    pub root_owner: (u32, u32),
    /// Options of the journal.
    pub journal: JournalOptions,
    /// Groups per flex group, a power of two (`flex_bg`).
    pub flex_groups: u32,
    /// Blocks that the reserved GDT allows to grow to; `None` for mke2fs's factor.
    pub resize_blocks: Option<u64>,
    /// RAID stride in blocks; 0 if unknown.
    pub stride: u16,
    /// RAID stripe width in blocks; 0 if unknown.
    pub stripe_width: u32,
    /// Backup superblocks with `sparse_super2`: 0 to 2.
    pub backups: u32,
    /// True to place all bitmaps and tables at the start of the volume (with `flex_bg`).
    pub packed_meta_blocks: bool,
    /// True to refuse invalid names (with `casefold`).
    pub strict_names: bool,
    /// Quotas to enable with `quota`: user, group, project.
    pub quotas: [bool; 3],
    /// MMP update interval in seconds (with `mmp`); 0 for mke2fs's default.
    pub mmp_interval: u16,
}

/// Options of the journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct JournalOptions {
    /// Size in MiB; `None` for the volume's default.
    pub mib: Option<u32>,
    /// Size of the fast-commit area in KiB, with `fast_commit`.
    pub fast_kib: Option<u32>,
    /// First block at or behind this one; `None` for the middle of the volume.
    pub at: Option<u64>,
}

/// Error of a feature list.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FeatureError {
    /// No feature has this name.
    #[error("-O {0}: no such feature")]
    Unknown(String),
    /// New volumes cannot have this feature.
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

    /// Returns mke2fs's defaults for `ext2`, `ext3` or `ext4`.
    pub fn for_type(name: &str) -> Option<Self> {
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

    pub(super) fn has_extents(&self) -> bool {
        self.incompatible.contains(Incompatible::EXTENTS)
    }

    pub(super) fn has_clusters(&self) -> bool {
        self.read_only_compatible.contains(ReadOnlyCompatible::BIGALLOC)
    }

    /// Returns the enabled quota types.
    pub(super) fn quota_kinds(&self) -> impl Iterator<Item = QuotaType> {
        let has = self.read_only_compatible.contains(ReadOnlyCompatible::QUOTA);
        let all = QuotaType::ALL.into_iter().zip(self.quotas);
        all.filter_map(move |(kind, is_counted)| (has && is_counted).then_some(kind))
    }

    /// Returns the groups per flex group; 1 without `flex_bg`.
    pub(super) fn groups_per_flex(&self) -> u32 {
        if self.incompatible.contains(Incompatible::FLEX_BG) { self.flex_groups } else { 1 }
    }

    /// Applies a feature list as in `-O`: names separated by commas; `^` removes one, `none`
    /// removes all.
    ///
    /// # Errors
    /// [`FeatureError`] naming the first invalid feature.
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
    fn feature_strings_match_mke2fs() {
        let mut options = FormatOptions::default();
        options.apply_features("^resize_inode, dir_nlink").unwrap();
        assert!(!options.compatible.contains(Compatible::RESIZE_INODE));
        assert!(options.read_only_compatible.contains(ReadOnlyCompatible::DIR_NLINK));
        options.apply_features("^has_journal,extents").unwrap();
        assert!(options.has_extents() && !options.compatible.contains(Compatible::HAS_JOURNAL));
        let error = options.apply_features("^mmp,journal_dev").unwrap_err();
        assert!(error.to_string().contains("journal_dev"), "{error}");
        assert_eq!(options.apply_features("sparse"), Err(FeatureError::Unknown("sparse".into())));
        options.apply_features("none").unwrap();
        assert_eq!(options.compatible.bits() | options.incompatible.bits(), 0);
    }
}
