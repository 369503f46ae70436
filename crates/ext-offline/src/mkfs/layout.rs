//! Volume layout by mke2fs's rules, learnt from its output.
//!
//! ```text
//!   group   | super | descr. | reserved GDT | block bitmap | inode bitmap | inodes .. | blocks ..
//!             └──── group 0 and backups ───┘  └──── locations of all groups: `tables` ────────┘
//! ```
//! Law: `dumpe2fs` shows the same as for a volume of mke2fs with the same arguments; the tests
//! compare byte for byte.

use draconis_types::Time;
use zerocopy::FromZeros;

pub(super) mod tables;

use super::DiskRun;
use super::journal::{self, JournalSizes};
use super::options::{FormatOptions, InodeCount};
use super::{FormatError, Result};
use crate::format::checksum::Checksum;
use crate::format::extent;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::is_sparse_backup;
use crate::format::inode::EXTRA_BYTES;
use crate::format::requirements::{Enforcer, violated_rules};
use crate::format::superblock::{
    CHECKSUM_CRC32C, FLAG_SIGNED_HASH, MAGIC, RawSuperblock, STATE_CLEAN, Superblock,
};
use crate::map::build::{BuiltMap, MapPart, build_indirect_map, indirect_blocks};
use crate::map::build_extents;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FileId, GroupNumber};

/// Bytes of a group descriptor, and of one with the `64bit` feature.
const DESCRIPTOR_BYTES: u32 = 32;
const WIDE_DESCRIPTOR_BYTES: u32 = 64;
/// Limit of groups in memory: half a PiB with blocks of 4 KiB.
const MAX_GROUPS: u64 = 1 << 22;
/// Minimum blocks for files in the last group; a smaller one is dropped.
pub(crate) const MIN_LAST_GROUP_BLOCKS: u64 = 50;
/// Limit of a group's blocks: the descriptor counts free blocks in 16 bits.
const MAX_BLOCKS_PER_GROUP: u32 = 65528;
/// Growth factor that the reserved GDT blocks allow.
const RESIZE_FACTOR: u64 = 1024;
/// Reserved inodes: the first ten.
const RESERVED_INODES: u32 = 10;
/// Size of lost+found: this many bytes, limited to two to twelve blocks.
const LOST_FOUND_BYTES: u32 = 16 << 10;
/// `user_xattr` and `acl`.
const DEFAULT_MOUNT_OPTIONS: u32 = 0xC;

/// Encryption modes of contents and names: AES-256-XTS and AES-256-CTS.
pub(crate) const ENCRYPTION_MODES: (u8, u8) = (1, 4);
/// Encoding of case-insensitive names: UTF-8, Unicode 12.1.
const UTF8: u16 = 1;

/// Default blocks per cluster.
const DEFAULT_CLUSTER_BLOCKS: u32 = 16;
/// Maximum bytes per cluster.
const MAX_CLUSTER_BYTES: u32 = 1 << 29;
/// Bytes per cluster from which mke2fs omits eight clusters in each group.
const HUGE_CLUSTER_BYTES: u32 = 1 << 27;
/// MMP update interval in seconds: default and maximum.
pub(crate) const DEFAULT_MMP_INTERVAL: u16 = 5;
pub(crate) const MAX_MMP_INTERVAL: u16 = 300;

/// Layout of a volume without files.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(super) options: FormatOptions,
    pub(super) super_: Superblock,
    pub(super) raw: RawSuperblock,
    /// Journal sizes, if there is a journal.
    pub(super) journal: Option<JournalSizes>,
}

/// Returns mke2fs's defaults for a size: block size, bytes per inode.
fn default_block_bytes_and_ratio(size_bytes: u64) -> (u32, u32) {
    match size_bytes {
        ..0x30_0000 => (1024, 8192),
        0x30_0000..0x2000_0000 => (1024, 4096),
        0x2000_0000..0x400_0000_0000 => (4096, 16384),
        0x400_0000_0000..0x1000_0000_0000 => (4096, 32768),
        _ => (4096, 65536),
    }
}

/// Returns mke2fs's default block size for this size.
pub(super) fn default_block_bytes(size_bytes: u64) -> u32 {
    default_block_bytes_and_ratio(size_bytes).0
}

/// Returns mke2fs's default bytes per inode for this size.
pub(super) fn default_ratio(size_bytes: u64) -> u32 {
    default_block_bytes_and_ratio(size_bytes).1
}

/// State of the search for a division into groups.
struct GroupDivision {
    block_bytes: u32,
    inode_bytes: u32,
    descriptor_bytes: u32,
    first_data_block: u32,
    sparse: bool,
    /// Number of backups with `sparse_super2`.
    backups: Option<u32>,
    meta: bool,
    resize: bool,
    resize_blocks: Option<u64>,
    /// Blocks per cluster.
    ratio: u32,
    blocks: u64,
    per_group: u32,
    groups: u32,
    inodes_per_group: u32,
    reserved_gdt_blocks: u32,
}

impl GroupDivision {
    fn blocks_in_groups(&self) -> u64 {
        self.blocks.saturating_sub(self.first_data_block.into())
    }

    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn descriptor_blocks(&self, groups: u64) -> u64 {
        groups.div_ceil(u64::from(self.block_bytes / self.descriptor_bytes))
    }

    fn table_blocks(&self) -> u64 {
        let bytes = u64::from(self.inodes_per_group).saturating_mul(self.inode_bytes.into());
        bytes.div_ceil(self.block_bytes.into())
    }

    /// Returns the metadata blocks of the last group.
    fn last_overhead(&self) -> u64 {
        let has_copies = match self.backups {
            Some(backups) => backups >= if self.groups == 2 { 1 } else { 2 },
            None => !self.sparse || is_sparse_backup(self.groups.saturating_sub(1)),
        };
        let table = self.descriptor_blocks(self.groups.into());
        let copies = if has_copies {
            table.saturating_add(1).saturating_add(self.reserved_gdt_blocks.into())
        } else {
            0
        };
        copies.saturating_add(2).saturating_add(self.table_blocks())
    }

    /// Returns the metadata blocks of a group with all structures.
    fn max_overhead(&self) -> u64 {
        let table = if self.meta { 1 } else { self.descriptor_blocks(self.groups.into()) };
        table
            .saturating_add(3)
            .saturating_add(self.reserved_gdt_blocks.into())
            .saturating_add(self.table_blocks())
    }

    /// Sets the reserved GDT blocks. If descriptors would fill most of a group, none are reserved
    /// and `meta_bg` spreads the descriptors.
    fn set_reserved_gdt_blocks(&mut self) {
        let table = self.descriptor_blocks(self.groups.into());
        self.reserved_gdt_blocks = 0;
        if self.resize {
            let asked = self.resize_blocks.map(|blocks| {
                let groups = |blocks: u64| blocks.div_ceil(self.per_group.into());
                let table = self.descriptor_blocks(groups(self.blocks));
                self.descriptor_blocks(groups(blocks)).saturating_sub(table)
            });
            let most = self.blocks.saturating_mul(RESIZE_FACTOR).min(u32::MAX.into());
            let groups =
                most.saturating_sub(self.first_data_block.into()).div_ceil(self.per_group.into());
            let grown = self.descriptor_blocks(groups).saturating_sub(table);
            let reserve = asked.filter(|asked| *asked > 0).unwrap_or(grown);
            self.reserved_gdt_blocks = saturating_u32(reserve).min(self.block_bytes / 4);
        }
        if u64::from(self.reserved_gdt_blocks).saturating_add(table)
            > u64::from(self.per_group) * 3 / 4
        {
            (self.meta, self.resize, self.reserved_gdt_blocks) = (true, false, 0);
        }
    }

    /// Returns the groups of the two backups of `sparse_super2`.
    fn backup_groups(&self) -> [u32; 2] {
        let Some(backups) = self.backups else { return [0; 2] };
        let last = self.groups.saturating_sub(1);
        let first = if backups >= 1 { last.min(1) } else { 0 };
        let second = if backups >= 2 && last != first { last } else { 0 };
        [first.min(second), first.max(second)]
    }

    /// Divides `inodes` among the groups: whole blocks, a multiple of eight, and at least eight.
    /// Returns false if a group would need more than its bitmap holds.
    #[allow(clippy::arithmetic_side_effects, reason = "an inode is no larger than a block")]
    fn distribute_inodes(&mut self, inodes: u32) -> bool {
        let share = inodes.div_ceil(self.groups.max(1));
        if share > self.block_bytes.saturating_mul(8) {
            return false;
        }
        let per_block = self.block_bytes / self.inode_bytes;
        let mut share = share.min(65_536u32.saturating_sub(per_block));
        loop {
            self.inodes_per_group = (share.next_multiple_of(per_block) & !7).max(8);
            let all = u64::from(self.inodes_per_group).saturating_mul(self.groups.into());
            if all <= u32::MAX.into() || share <= 8 {
                return true;
            }
            share = share.saturating_sub(1);
        }
    }
}

impl Layout {
    /// Computes the layout of a volume in `size_bytes`.
    ///
    /// # Errors
    /// [`FormatError::TooSmall`], [`FormatError::TooLarge`], [`FormatError::TooManyInodes`],
    /// [`FormatError::LargeJournal`], and [`FormatError::Misuse`] for invalid options.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    pub fn new(options: &FormatOptions, size_bytes: u64) -> Result<Self> {
        let ResolvedOptions { block_bytes, ratio, inodes } = resolve_options(options, size_bytes)?;
        let blocks = size_bytes / u64::from(block_bytes);
        let too_small = FormatError::TooSmall { blocks, block_bytes };
        let wide = options.incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
        let groups = blocks.div_ceil(u64::from(block_bytes) * 8);
        if blocks > u64::from(u32::MAX) && !wide || groups > MAX_GROUPS {
            return Err(FormatError::TooLarge { blocks, block_bytes });
        }
        let inodes = match inodes {
            InodeCount::Count(count) => count,
            InodeCount::PerBytes(bytes) => {
                let len = blocks.saturating_mul(block_bytes.into());
                match len / u64::from(bytes.max(1)) {
                    // The volume is smaller than the step: mke2fs falls back to 4096.
                    0 => saturating_u32(len / 4096),
                    count => saturating_u32(count),
                }
            }
            InodeCount::Default => 0,
        };
        if u64::from(inodes) * u64::from(options.inode_bytes) / u64::from(block_bytes) >= blocks {
            return Err(if blocks < 64 { too_small } else { FormatError::TooManyInodes(inodes) });
        }
        // The reserved inodes, lost+found and one file.
        let inodes = inodes.max(RESERVED_INODES + 2);
        let asked = blocks.saturating_mul(options.reserved_ppm.into()) / 1_000_000;
        let mut reserved = asked;
        let mut division = GroupDivision {
            block_bytes,
            inode_bytes: options.inode_bytes,
            descriptor_bytes: if wide { WIDE_DESCRIPTOR_BYTES } else { DESCRIPTOR_BYTES },
            // With clusters, block 0 is the first data block.
            first_data_block: u32::from(block_bytes == 1024 && !options.has_clusters()),
            sparse: options.read_only_compatible.contains(ReadOnlyCompatible::SPARSE_SUPER),
            backups: (options.compatible.contains(Compatible::SPARSE_SUPER2))
                .then_some(options.backups),
            meta: options.incompatible.contains(Incompatible::META_BG),
            // The resize inode has 32-bit block numbers.
            resize: options.compatible.contains(Compatible::RESIZE_INODE)
                && blocks <= u64::from(u32::MAX),
            resize_blocks: options.resize_blocks,
            ratio,
            blocks: (blocks / u64::from(ratio)).saturating_mul(ratio.into()),
            per_group: clusters_per_group(block_bytes, ratio).checked_mul(ratio).ok_or_else(
                || FormatError::Misuse("-C: a group would have too many blocks".into()),
            )?,
            groups: 0,
            inodes_per_group: 0,
            reserved_gdt_blocks: 0,
        };
        loop {
            if division.blocks_in_groups() == 0 {
                return Err(too_small);
            }
            let per_group = u64::from(division.per_group);
            division.groups = saturating_u32(division.blocks_in_groups().div_ceil(per_group));
            if !division.distribute_inodes(inodes) {
                // Smaller groups mean more groups, and more inodes fit.
                if division.per_group < 256 || options.has_clusters() {
                    return Err(FormatError::TooManyInodes(inodes));
                }
                division.per_group = division.per_group.saturating_sub(8);
                division.blocks = blocks;
                continue;
            }
            division.set_reserved_gdt_blocks();
            let last = division.blocks_in_groups() % per_group;
            let overhead = division.last_overhead();
            if last > 0 && last < overhead.saturating_add(MIN_LAST_GROUP_BLOCKS) {
                if division.groups == 1 {
                    return Err(too_small);
                }
                division.blocks = division.blocks.saturating_sub(last);
                let part = u128::from(asked) * u128::from(division.blocks) / u128::from(blocks);
                reserved = u64::try_from(part).unwrap_or(asked);
                continue;
            }
            break;
        }
        if division.max_overhead() > u64::from(division.per_group) {
            return Err(FormatError::TooManyInodes(inodes));
        }
        let all = division.inodes_per_group.checked_mul(division.groups);
        match all {
            Some(inodes) if inodes > RESERVED_INODES => {}
            Some(_) if matches!(options.inodes, InodeCount::Default) => return Err(too_small),
            Some(_) => {
                return Err(FormatError::Misuse("at least 16 inodes are needed (-N)".into()));
            }
            None => return Err(FormatError::TooManyInodes(inodes)),
        }
        Self::from_division(options, &division, reserved)
    }

    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn from_division(
        options: &FormatOptions,
        division: &GroupDivision,
        reserved: u64,
    ) -> Result<Self> {
        let (blocks, block_bytes) = (division.blocks, division.block_bytes);
        let mut options = options.clone();
        options.compatible.set(Compatible::RESIZE_INODE, division.resize);
        options.incompatible.set(Incompatible::META_BG, division.meta);
        let [.., projects] = &mut options.quotas;
        // With quotas, project quotas and the feature `project` imply each other.
        let has_projects =
            *projects || options.read_only_compatible.contains(ReadOnlyCompatible::PROJECT);
        *projects = has_projects;
        options.read_only_compatible.set(ReadOnlyCompatible::PROJECT, has_projects);
        if options.read_only_compatible.contains(ReadOnlyCompatible::METADATA_CSUM) {
            // Metadata checksums replace those of descriptors alone.
            options.read_only_compatible.remove(ReadOnlyCompatible::GDT_CSUM);
        }
        let journal = journal::journal_sizes(&options, blocks, block_bytes)?;
        if journal.is_none() {
            options.compatible.remove(Compatible::HAS_JOURNAL | Compatible::ORPHAN_FILE);
        }
        let options = &options;
        let low = |count: u64| crate::format::low32(count);
        let high = |count: u64| crate::format::low32(count >> 32);
        let mut raw = RawSuperblock::new_zeroed();
        let inodes = division.inodes_per_group.saturating_mul(division.groups);
        raw.s_inodes_count = inodes.into();
        raw.s_blocks_count_lo = low(division.blocks).into();
        raw.s_blocks_count_hi = high(division.blocks).into();
        raw.s_r_blocks_count_lo = low(reserved).into();
        raw.s_r_blocks_count_hi = high(reserved).into();
        raw.s_free_inodes_count = inodes.saturating_sub(RESERVED_INODES).into();
        raw.s_first_data_block = division.first_data_block.into();
        raw.s_log_block_size = division.block_bytes.trailing_zeros().saturating_sub(10).into();
        raw.s_log_cluster_size =
            raw.s_log_block_size.get().saturating_add(division.ratio.trailing_zeros()).into();
        raw.s_blocks_per_group = division.per_group.into();
        raw.s_clusters_per_group = (division.per_group / division.ratio).into();
        raw.s_inodes_per_group = division.inodes_per_group.into();
        raw.s_wtime = options.time.into();
        raw.s_max_mnt_count = u16::MAX.into();
        raw.s_magic = MAGIC.into();
        raw.s_state = STATE_CLEAN.into();
        raw.s_errors = 1.into();
        raw.s_lastcheck = options.time.into();
        raw.s_rev_level = 1.into();
        raw.s_first_ino = (RESERVED_INODES + 1).into();
        raw.s_inode_size = u16::try_from(options.inode_bytes).unwrap_or(0).into();
        raw.s_feature_compat = options.compatible.bits().into();
        raw.s_feature_incompat = options.incompatible.bits().into();
        raw.s_feature_ro_compat = options.read_only_compatible.bits().into();
        raw.s_uuid = options.uuid;
        for (to, from) in raw.s_volume_name.iter_mut().zip(&options.label) {
            *to = *from;
        }
        raw.s_reserved_gdt_blocks = u16::try_from(division.reserved_gdt_blocks).unwrap_or(0).into();
        for (to, from) in raw.s_hash_seed.iter_mut().zip(options.hash_seed.as_chunks::<4>().0) {
            *to = u32::from_le_bytes(*from).into();
        }
        raw.s_def_hash_version = options.hash_version;
        raw.s_default_mount_opts = DEFAULT_MOUNT_OPTIONS.into();
        raw.s_mkfs_time = options.time.into();
        if options.inode_bytes >= 256 {
            raw.s_min_extra_isize = EXTRA_BYTES.into();
            raw.s_want_extra_isize = EXTRA_BYTES.into();
        }
        raw.s_flags = FLAG_SIGNED_HASH.into();
        raw.s_raid_stride = options.stride.into();
        raw.s_raid_stripe_width = options.stripe_width.into();
        raw.s_backup_bgs = division.backup_groups().map(Into::into);
        raw.s_log_groups_per_flex =
            u8::try_from(options.groups_per_flex().trailing_zeros()).unwrap_or(0);
        if division.descriptor_bytes > DESCRIPTOR_BYTES {
            raw.s_desc_size = u16::try_from(division.descriptor_bytes).unwrap_or(0).into();
        }
        if options.incompatible.contains(Incompatible::CSUM_SEED) {
            raw.s_checksum_seed = Checksum::new().update(&options.uuid).value().into();
        }
        if options.read_only_compatible.contains(ReadOnlyCompatible::METADATA_CSUM) {
            raw.s_checksum_type = CHECKSUM_CRC32C;
        }
        if options.incompatible.contains(Incompatible::ENCRYPT) {
            let [contents, names, ..] = &mut raw.s_encrypt_algos;
            (*contents, *names) = ENCRYPTION_MODES;
        }
        if options.incompatible.contains(Incompatible::CASEFOLD) {
            raw.s_encoding = UTF8.into();
            raw.s_encoding_flags = u16::from(options.strict_names).into();
        }
        if journal.is_some() {
            raw.s_journal_inum = journal::JOURNAL_INODE.into();
            raw.s_jnl_backup_type = crate::format::superblock::JNL_BACKUP_BLOCKS;
        }
        if options.incompatible.contains(Incompatible::MMP) {
            raw.s_mmp_interval = match options.mmp_interval {
                0 => DEFAULT_MMP_INTERVAL,
                given => given,
            }
            .into();
        }
        raw.set_checksum();
        let sane = |error: crate::Error| FormatError::Misuse(error.to_string());
        let mut super_ = raw.check().map_err(sane)?;
        let ratio = u64::from(division.ratio);
        let (free, overhead) = match division.ratio {
            1 => {
                let overhead = super_.overhead();
                (super_.blocks.saturating_sub(overhead), overhead)
            }
            // Blocks that share a cluster with metadata are unavailable to files.
            _ => {
                let (options, super_, raw) = (options.clone(), super_.clone(), raw.clone());
                let layout = Self { options, super_, raw, journal };
                let free = tables::place_tables(&layout)?.1.free_in(0, u64::MAX);
                (free, layout.super_.blocks.saturating_sub(free) / ratio)
            }
        };
        let journal_blocks =
            journal.map_or(0, |sizes| u64::from(sizes.total_blocks()).div_ceil(ratio));
        // Like mke2fs, it drops bits above 32; the kernel then counts itself.
        let overhead_blocks = low(overhead.saturating_add(journal_blocks));
        raw.s_overhead_blocks = overhead_blocks.into();
        raw.set_free(free, u64::from(inodes.saturating_sub(RESERVED_INODES))).map_err(sane)?;
        (super_.free_blocks, super_.overhead_clusters) = (free, overhead_blocks);
        let layout = Self { options: options.clone(), super_, raw, journal };
        layout.check_journal_fits()?;
        Ok(layout)
    }

    /// Checks that a journal of a given size has at most half of the free blocks.
    fn check_journal_fits(&self) -> Result<()> {
        let given = self.options.journal.mib.or(self.options.journal.fast_kib);
        let Some(sizes) = self.journal.filter(|_| given.is_some()) else { return Ok(()) };
        let mut free = self.super_.free_blocks;
        if self.options.groups_per_flex() > 1 {
            // mke2fs checks before these tables are allocated.
            let tables = u64::from(self.super_.inode_table_blocks()) + 2;
            free = free.saturating_add(tables.saturating_mul(self.super_.groups.into()));
        }
        match u64::from(sizes.total_blocks()) > free / 2 {
            true => Err(FormatError::LargeJournal(sizes.total_blocks())),
            false => Ok(()),
        }
    }

    /// Returns the blocks of system files: resize inode, MMP block, journal, orphan file.
    pub(super) fn system_file_blocks(&self) -> u64 {
        let reserve = u64::from(self.options.compatible.contains(Compatible::RESIZE_INODE));
        let guard = u64::from(self.options.incompatible.contains(Incompatible::MMP));
        let file = |blocks: u32| self.blocks_with_map(blocks);
        let journal = self.journal.map_or(0, |sizes| file(sizes.total_blocks()));
        reserve
            .saturating_add(guard)
            .saturating_mul(self.cluster_blocks())
            .saturating_add(journal)
            .saturating_add(self.orphan_blocks().map_or(0, file))
    }

    /// Returns the blocks of a contiguous file, with its map.
    pub(super) fn blocks_with_map(&self, blocks: u32) -> u64 {
        self.round_to_clusters(blocks.into())
            .saturating_add(self.map_blocks(&[(0, blocks)]).saturating_mul(self.cluster_blocks()))
    }

    /// Returns the blocks for `bytes`.
    pub(super) fn blocks_for_bytes(&self, bytes: u64) -> u32 {
        saturating_u32(bytes.div_ceil(self.super_.block_bytes.into()))
    }

    /// Returns the blocks per cluster.
    pub(super) fn cluster_blocks(&self) -> u64 {
        u64::from(self.super_.cluster_blocks.max(1))
    }

    /// Rounds blocks up to whole clusters.
    pub(super) fn round_to_clusters(&self, blocks: u64) -> u64 {
        blocks.next_multiple_of(self.cluster_blocks())
    }

    /// Returns the map blocks outside the inode for data in these file runs, if each is also
    /// contiguous on disk.
    pub(super) fn map_blocks(&self, runs: &[(u32, u32)]) -> u64 {
        let block_bytes = self.super_.block_bytes;
        match self.options.has_extents() {
            true => build_extents::min_nodes(runs, block_bytes),
            false => indirect_blocks(runs, block_bytes),
        }
    }

    /// Returns the blocks of the orphan file, if there is one.
    pub(super) fn orphan_blocks(&self) -> Option<u32> {
        let is_there = self.options.compatible.contains(Compatible::ORPHAN_FILE);
        is_there.then(|| {
            saturating_u32(self.round_to_clusters(orphan_blocks(self.super_.blocks).into()))
        })
    }

    /// Builds the map of an inode with data in these file runs at these disk blocks. Its nodes have
    /// checksums.
    pub(super) fn build_map(
        &self,
        inode: u32,
        runs: &[(u32, u32)],
        places: &[DiskRun],
    ) -> Option<BuiltMap> {
        let block_bytes = self.super_.block_bytes;
        if !self.options.has_extents() {
            let mut blocks =
                places.iter().flat_map(|(from, count)| *from..from.saturating_add(*count));
            let mut next = || blocks.next().and_then(|block| u32::try_from(block).ok());
            return build_indirect_map(runs, block_bytes, &mut next);
        }
        let mut built = build_extents::build_extent_map(runs, block_bytes, places)?;
        if let Some(seed) = self.super_.file_checksum_seed(FileId { inode, generation: 0 }) {
            for part in &mut built.parts {
                if let MapPart::Indirect { pointers, .. } = part {
                    extent::set_checksum(pointers, seed);
                }
            }
        }
        Some(built)
    }

    /// Returns the creation time of the volume.
    pub(super) fn creation_time(&self) -> Time {
        Time { seconds: i64::from(self.options.time), nanoseconds: 0 }
    }

    /// Returns the options, adjusted as by mke2fs.
    pub fn options(&self) -> &FormatOptions {
        &self.options
    }

    /// Returns the superblock of the volume without files.
    pub fn superblock(&self) -> &Superblock {
        &self.super_
    }

    /// Returns the bytes of the volume.
    pub fn len_bytes(&self) -> u64 {
        self.super_.len_bytes()
    }

    /// Returns one past the last block of a group.
    pub(super) fn group_end(&self, group: u32) -> u64 {
        self.super_.group_end(GroupNumber(group)).0
    }

    /// Returns the blocks of superblock and descriptor copies at the start of a group.
    pub(super) fn backup_blocks(&self, group: u32) -> u64 {
        if self.has_meta_bg() {
            let has_super = self.super_.has_superblock(GroupNumber(group));
            let before = self.backup_start(group).saturating_sub(self.group_start(group));
            return before
                .saturating_add(has_super.into())
                .saturating_add(u64::from(self.has_meta_descriptors(group)));
        }
        self.super_.backup_blocks(GroupNumber(group))
    }

    /// Returns the block where the copies of a group begin: with clusters of small blocks, group 0
    /// starts before it.
    pub(super) fn backup_start(&self, group: u32) -> u64 {
        let is_behind_boot = group == 0 && self.super_.block_bytes == 1024;
        self.group_start(group).max(u64::from(is_behind_boot))
    }

    /// Returns true with `meta_bg`.
    pub(super) fn has_meta_bg(&self) -> bool {
        self.options.incompatible.contains(Incompatible::META_BG)
    }

    /// Returns true if a group holds a copy of its meta group's descriptors: the first two groups
    /// and the last one do.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    pub(super) fn has_meta_descriptors(&self, group: u32) -> bool {
        let per_block = self.super_.descriptors_per_block();
        let nth = group % per_block;
        nth <= 1 || nth == per_block.saturating_sub(1)
    }

    /// Returns the group of a block.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    pub(super) fn group_of(&self, block: u64) -> u32 {
        let first = u64::from(self.super_.first_data_block);
        saturating_u32(block.saturating_sub(first) / u64::from(self.super_.blocks_per_group))
    }

    /// Returns the first block of a group.
    pub(super) fn group_start(&self, group: u32) -> u64 {
        self.super_.group_start(GroupNumber(group)).0
    }

    /// Returns the minimum blocks of lost+found.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    pub(super) fn lost_found_blocks(&self) -> u64 {
        let blocks = (LOST_FOUND_BYTES / self.super_.block_bytes).clamp(2, 12);
        // With inline data, mke2fs creates it inline, and its first growth only converts it to a
        // block.
        let leaves = self.options.incompatible.contains(Incompatible::INLINE_DATA);
        u64::from(blocks.saturating_sub(u32::from(leaves)))
    }

    /// Returns the block numbers per block.
    pub(super) fn pointers_per_block(&self) -> u64 {
        u64::from(self.super_.block_bytes / 4)
    }

    pub(super) fn block_len(&self) -> usize {
        saturating_usize(self.super_.block_bytes.into())
    }
}

/// Returns the blocks of the orphan file for a volume of `blocks` blocks.
pub(crate) fn orphan_blocks(blocks: u64) -> u32 {
    match blocks {
        ..0x2_0000 => 32,
        blocks @ ..0x20_0000 => saturating_u32(blocks / 4096),
        _ => 512,
    }
}

/// Returns mke2fs's clusters per group.
fn clusters_per_group(block_bytes: u32, ratio: u32) -> u32 {
    let is_huge = ratio > 1 && block_bytes.saturating_mul(ratio) >= HUGE_CLUSTER_BYTES;
    let bytes = if is_huge { block_bytes.saturating_sub(1) } else { block_bytes };
    bytes.saturating_mul(8).min(MAX_BLOCKS_PER_GROUP)
}

/// Options with their defaults applied.
struct ResolvedOptions {
    block_bytes: u32,
    /// Blocks per cluster.
    ratio: u32,
    inodes: InodeCount,
}

/// Checks the options and applies the defaults.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
fn resolve_options(options: &FormatOptions, size_bytes: u64) -> Result<ResolvedOptions> {
    let misuse = |text: String| Err(FormatError::Misuse(text));
    let (default_block, default_ratio) = default_block_bytes_and_ratio(size_bytes);
    let block_bytes = options.block_bytes.unwrap_or(default_block);
    if !block_bytes.is_power_of_two() || !(1024..=65536).contains(&block_bytes) {
        return misuse(format!("-b {block_bytes}: a power of two from 1024 to 65536 is needed"));
    }
    let ratio = cluster_blocks(options, block_bytes)?;
    let inode_bytes = options.inode_bytes;
    if !inode_bytes.is_power_of_two() || !(128..=block_bytes.min(32768)).contains(&inode_bytes) {
        let most = block_bytes.min(32768);
        return misuse(format!("-I {inode_bytes}: a power of two from 128 to {most} is needed"));
    }
    let inodes = match options.inodes {
        InodeCount::Default => {
            InodeCount::PerBytes(default_ratio.max(block_bytes.saturating_mul(ratio)))
        }
        InodeCount::PerBytes(bytes) if !(1024..=64 << 20).contains(&bytes) => {
            return misuse(format!("-i {bytes}: 1024 to 67108864 bytes per inode are possible"));
        }
        given => given,
    };
    if options.reserved_ppm > 500_000 {
        return misuse("-m: at most 50 percent can be reserved".into());
    }
    if options.label.len() > 16 || options.label.contains(&0) {
        return misuse("-L: a label has at most 16 bytes, none of them NUL".into());
    }
    if options.hash_version > 2 {
        return misuse("hash_alg: legacy, half_md4 or tea".into());
    }
    let [.., counts_projects] = options.quotas;
    let project = if counts_projects { ReadOnlyCompatible::PROJECT.bits() } else { 0 };
    let features = [
        options.compatible.bits(),
        options.incompatible.bits(),
        options.read_only_compatible.bits() | project,
    ];
    if let Some(rule) = violated_rules(Enforcer::Maker, features, options.inode_bytes).next() {
        return misuse(format!("-O {rule}"));
    }
    if !options.flex_groups.is_power_of_two() {
        return misuse(format!("-G {}: a power of two is needed", options.flex_groups));
    }
    if options.backups > 2 {
        return misuse("-E num_backup_sb: 0 to 2 are possible".into());
    }
    if options.resize_blocks.is_some_and(|most| most <= size_bytes / u64::from(block_bytes)) {
        return misuse("-E resize: more blocks than the volume has are needed".into());
    }
    if options.mmp_interval > MAX_MMP_INTERVAL {
        return misuse(format!("-E mmp_update_interval: at most {MAX_MMP_INTERVAL} seconds"));
    }
    Ok(ResolvedOptions { block_bytes, ratio, inodes })
}

/// Returns the blocks per cluster.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
fn cluster_blocks(options: &FormatOptions, block_bytes: u32) -> Result<u32> {
    let misuse = |text: &str| Err(FormatError::Misuse(text.to_owned()));
    match options.cluster_bytes {
        _ if options.has_clusters() && !options.has_extents() => misuse("-O bigalloc needs extent"),
        Some(_) if !options.has_clusters() => misuse("-C needs bigalloc (-O)"),
        None if !options.has_clusters() => Ok(1),
        None => Ok(DEFAULT_CLUSTER_BLOCKS),
        Some(bytes) if !bytes.is_power_of_two() || !(2048..=MAX_CLUSTER_BYTES).contains(&bytes) => {
            misuse("-C: a power of two from 2048 to 536870912 is needed")
        }
        Some(bytes) if bytes < block_bytes => misuse("-C: not smaller than a block"),
        Some(bytes) => Ok(bytes / block_bytes),
    }
}
