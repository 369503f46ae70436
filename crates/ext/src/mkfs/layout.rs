//! The rules by which mke2fs lays out a volume, learnt from what it makes.
//!
//! ```text
//!   group   | super | descriptors | reserve | block bitmap | inode bitmap | inodes .. | blocks ..
//!             └──── group 0 and backups ───┘  └ where these are of the groups is in `tables` ┘
//! ```
//! Law: `dumpe2fs` shows the same for a volume of ours as for one of mke2fs with the same
//! arguments; the tests compare byte for byte.

use draconis_exchange::contract::Time;
use zerocopy::FromZeros;

use super::journal::{self, Sizes};
use super::options::{Inodes, Options};
use super::plan::Blocks;
use super::{Error, Result};
use crate::format::checksum::Checksum;
use crate::format::extent;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::is_sparse_backup;
use crate::format::inode::EXTRA_BYTES;
use crate::format::requirements::{Asker, broken};
use crate::format::superblock::{
    CHECKSUM_CRC32C, FLAG_SIGNED_HASH, MAGIC, RawSuperblock, STATE_CLEAN, Superblock,
};
use crate::map::build::{Built, Part, build, indirect_blocks};
use crate::map::build_extents;
use crate::units::{index, narrow};
use crate::{FileId, GroupNumber};

/// Bytes of a group descriptor, and of one with block numbers of 64 bits.
const DESCRIPTOR_BYTES: u32 = 32;
const WIDE_DESCRIPTOR_BYTES: u32 = 64;
/// Groups that are kept in memory, at most: half a PiB with blocks of 4 KiB.
const MOST_GROUPS: u64 = 1 << 22;
/// Blocks for files that the last group must have to be worth having.
pub(crate) const LEAST_IN_GROUP: u64 = 50;
/// A group may not have more blocks than its descriptor's 16 bits can count free.
const MOST_IN_GROUP: u32 = 65528;
/// The reserve lets a volume grow this many times.
const GROWTH: u64 = 1024;
/// Inodes that are reserved: the first ten.
const RESERVED_INODES: u32 = 10;
/// lost+found gets this many bytes, or twelve blocks, but two at least.
const LOST_FOUND_BYTES: u32 = 16 << 10;
/// `user_xattr` and `acl`.
const MOUNT_OPTIONS: u32 = 0xC;

/// How files and names would be encrypted: AES-256-XTS and AES-256-CTS.
pub(crate) const ENCRYPTION: (u8, u8) = (1, 4);
/// The encoding of names that ignore case: UTF-8, Unicode 12.1.
const UTF8: u16 = 1;

/// Blocks of a cluster, where that is not said.
const CLUSTER_BLOCKS: u32 = 16;
/// Bytes of a cluster, at most.
const MOST_CLUSTER: u32 = 1 << 29;
/// Bytes of a cluster from which on mke2fs leaves eight out in each group.
const HUGE_CLUSTER: u32 = 1 << 27;
/// Seconds between two signs of a host that uses the volume: usual, and most.
pub(crate) const MMP_INTERVAL: u16 = 5;
pub(crate) const MOST_MMP_INTERVAL: u16 = 300;

/// A volume without files: where everything is.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(super) options: Options,
    pub(super) super_: Superblock,
    pub(super) raw: RawSuperblock,
    /// The journal's blocks, if it has one.
    pub(super) journal: Option<Sizes>,
}

/// Which of mke2fs's kinds of volume a size belongs to: block size, bytes per inode.
fn defaults(size_bytes: u64) -> (u32, u32) {
    match size_bytes {
        ..0x30_0000 => (1024, 8192),
        0x30_0000..0x2000_0000 => (1024, 4096),
        0x2000_0000..0x400_0000_0000 => (4096, 16384),
        0x400_0000_0000..0x1000_0000_0000 => (4096, 32768),
        _ => (4096, 65536),
    }
}

/// The block size that mke2fs gives to a volume of this size.
pub(super) fn default_block_bytes(size_bytes: u64) -> u32 {
    defaults(size_bytes).0
}

/// Bytes per inode that mke2fs gives to a volume of this size.
pub(super) fn default_ratio(size_bytes: u64) -> u32 {
    defaults(size_bytes).1
}

/// What the search for a good division of the blocks works on.
struct Division {
    block_bytes: u32,
    inode_bytes: u32,
    descriptor_bytes: u32,
    first_data_block: u32,
    sparse: bool,
    /// How many backups there are, if the superblock names their groups.
    backups: Option<u32>,
    meta: bool,
    resize: bool,
    resize_blocks: Option<u64>,
    /// Blocks of a cluster.
    ratio: u32,
    blocks: u64,
    per_group: u32,
    groups: u32,
    inodes_per_group: u32,
    reserve: u32,
}

impl Division {
    fn in_groups(&self) -> u64 {
        self.blocks.saturating_sub(self.first_data_block.into())
    }

    fn descriptor_blocks(&self, groups: u64) -> u64 {
        groups.div_ceil(u64::from(self.block_bytes / self.descriptor_bytes))
    }

    fn table_blocks(&self) -> u64 {
        let bytes = u64::from(self.inodes_per_group) * u64::from(self.inode_bytes);
        bytes.div_ceil(self.block_bytes.into())
    }

    /// Blocks of the last group that no file can have.
    fn last_overhead(&self) -> u64 {
        let has_copies = match self.backups {
            Some(backups) => backups >= if self.groups == 2 { 1 } else { 2 },
            None => !self.sparse || is_sparse_backup(self.groups - 1),
        };
        let table = self.descriptor_blocks(self.groups.into());
        let copies = if has_copies { 1 + table + u64::from(self.reserve) } else { 0 };
        copies + 2 + self.table_blocks()
    }

    /// The same of a group that has all there is.
    fn most_overhead(&self) -> u64 {
        let table = if self.meta { 1 } else { self.descriptor_blocks(self.groups.into()) };
        3 + table + u64::from(self.reserve) + self.table_blocks()
    }

    /// Descriptor blocks kept for growth. Where they would take most of a group there are none,
    /// and those in use are spread.
    fn reserve_for_growth(&mut self) {
        let table = self.descriptor_blocks(self.groups.into());
        self.reserve = 0;
        if self.resize {
            let asked = self.resize_blocks.map(|blocks| {
                let groups = |blocks: u64| blocks.div_ceil(self.per_group.into());
                let table = self.descriptor_blocks(groups(self.blocks));
                self.descriptor_blocks(groups(blocks)).saturating_sub(table)
            });
            let most = self.blocks.saturating_mul(GROWTH).min(u32::MAX.into());
            let groups =
                most.saturating_sub(self.first_data_block.into()).div_ceil(self.per_group.into());
            let grown = self.descriptor_blocks(groups).saturating_sub(table);
            let reserve = asked.filter(|asked| *asked > 0).unwrap_or(grown);
            self.reserve = narrow(reserve).min(self.block_bytes / 4);
        }
        if u64::from(self.reserve) + table > u64::from(self.per_group) * 3 / 4 {
            (self.meta, self.resize, self.reserve) = (true, false, 0);
        }
    }

    /// The groups of the two backups that the superblock names.
    fn backup_groups(&self) -> [u32; 2] {
        let Some(backups) = self.backups else { return [0; 2] };
        let last = self.groups - 1;
        let first = if backups >= 1 { last.min(1) } else { 0 };
        let second = if backups >= 2 && last != first { last } else { 0 };
        [first.min(second), first.max(second)]
    }

    /// Divides `inodes` among the groups: whole blocks of them, a multiple of eight, and eight
    /// at least.
    /// `false` if a group would need more than its bitmap can tell.
    fn share_inodes(&mut self, inodes: u32) -> bool {
        let share = inodes.div_ceil(self.groups.max(1));
        if share > self.block_bytes.saturating_mul(8) {
            return false;
        }
        let per_block = self.block_bytes / self.inode_bytes;
        let mut share = share.min(65536 - per_block);
        loop {
            self.inodes_per_group = (share.next_multiple_of(per_block) & !7).max(8);
            let all = u64::from(self.inodes_per_group) * u64::from(self.groups);
            if all <= u32::MAX.into() || share <= 8 {
                return true;
            }
            share -= 1;
        }
    }
}

impl Layout {
    /// Lays out a volume in `size_bytes`.
    ///
    /// # Errors
    /// [`Error::TooSmall`], [`Error::TooLarge`], [`Error::TooManyInodes`],
    /// [`Error::LargeJournal`], and [`Error::Misuse`] for options that make no sense.
    pub fn new(options: &Options, size_bytes: u64) -> Result<Self> {
        let Checked { block_bytes, ratio, inodes } = check(options, size_bytes)?;
        let blocks = size_bytes / u64::from(block_bytes);
        let too_small = Error::TooSmall { blocks, block_bytes };
        let wide = options.incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
        let groups = blocks.div_ceil(u64::from(block_bytes) * 8);
        if blocks > u64::from(u32::MAX) && !wide || groups > MOST_GROUPS {
            return Err(Error::TooLarge { blocks, block_bytes });
        }
        let inodes = match inodes {
            Inodes::Count(count) => count,
            Inodes::PerBytes(bytes) => {
                let len = blocks * u64::from(block_bytes);
                match len / u64::from(bytes.max(1)) {
                    // Too large a step for so small a volume: mke2fs falls back to this one.
                    0 => narrow(len / 4096),
                    count => narrow(count),
                }
            }
            Inodes::Default => 0,
        };
        if u64::from(inodes) * u64::from(options.inode_bytes) / u64::from(block_bytes) >= blocks {
            return Err(if blocks < 64 { too_small } else { Error::TooManyInodes(inodes) });
        }
        // Room for the reserved ones, lost+found and a file.
        let inodes = inodes.max(RESERVED_INODES + 2);
        let asked = blocks * u64::from(options.reserved_ppm) / 1_000_000;
        let mut reserved = asked;
        let mut division = Division {
            block_bytes,
            inode_bytes: options.inode_bytes,
            descriptor_bytes: if wide { WIDE_DESCRIPTOR_BYTES } else { DESCRIPTOR_BYTES },
            // Clusters begin at 0 whatever blocks have.
            first_data_block: u32::from(block_bytes == 1024 && !options.has_clusters()),
            sparse: options.read_only_compatible.contains(ReadOnlyCompatible::SPARSE_SUPER),
            backups: (options.compatible.contains(Compatible::SPARSE_SUPER2))
                .then_some(options.backups),
            meta: options.incompatible.contains(Incompatible::META_BG),
            // The map of the reserve has block numbers of 32 bits.
            resize: options.compatible.contains(Compatible::RESIZE_INODE)
                && blocks <= u64::from(u32::MAX),
            resize_blocks: options.resize_blocks,
            ratio,
            blocks: blocks / u64::from(ratio) * u64::from(ratio),
            per_group: clusters_per_group(block_bytes, ratio)
                .checked_mul(ratio)
                .ok_or_else(|| Error::Misuse("-C: a group would have too many blocks".into()))?,
            groups: 0,
            inodes_per_group: 0,
            reserve: 0,
        };
        loop {
            if division.in_groups() == 0 {
                return Err(too_small);
            }
            let per_group = u64::from(division.per_group);
            division.groups = narrow(division.in_groups().div_ceil(per_group));
            if !division.share_inodes(inodes) {
                // Smaller groups are more groups, and more inodes fit.
                if division.per_group < 256 || options.has_clusters() {
                    return Err(Error::TooManyInodes(inodes));
                }
                division.per_group -= 8;
                division.blocks = blocks;
                continue;
            }
            division.reserve_for_growth();
            let last = division.in_groups() % per_group;
            let overhead = division.last_overhead();
            if last > 0 && last < overhead + LEAST_IN_GROUP {
                if division.groups == 1 {
                    return Err(too_small);
                }
                division.blocks -= last;
                let part = u128::from(asked) * u128::from(division.blocks) / u128::from(blocks);
                reserved = u64::try_from(part).unwrap_or(asked);
                continue;
            }
            break;
        }
        if division.most_overhead() > u64::from(division.per_group) {
            return Err(Error::TooManyInodes(inodes));
        }
        let all = division.inodes_per_group.checked_mul(division.groups);
        match all {
            Some(inodes) if inodes > RESERVED_INODES => {}
            Some(_) if matches!(options.inodes, Inodes::Default) => return Err(too_small),
            Some(_) => return Err(Error::Misuse("at least 16 inodes are needed (-N)".into())),
            None => return Err(Error::TooManyInodes(inodes)),
        }
        Self::of(options, &division, reserved)
    }

    fn of(options: &Options, division: &Division, reserved: u64) -> Result<Self> {
        let (blocks, block_bytes) = (division.blocks, division.block_bytes);
        let mut options = options.clone();
        options.compatible.set(Compatible::RESIZE_INODE, division.resize);
        options.incompatible.set(Incompatible::META_BG, division.meta);
        let [.., projects] = &mut options.quotas;
        // Either asks for the other where quotas are counted.
        let has_projects =
            *projects || options.read_only_compatible.contains(ReadOnlyCompatible::PROJECT);
        *projects = has_projects;
        options.read_only_compatible.set(ReadOnlyCompatible::PROJECT, has_projects);
        if options.read_only_compatible.contains(ReadOnlyCompatible::METADATA_CSUM) {
            // These sums say all that the others do.
            options.read_only_compatible.remove(ReadOnlyCompatible::GDT_CSUM);
        }
        let journal = journal::sizes(&options, blocks, block_bytes)?;
        if journal.is_none() {
            options.compatible.remove(Compatible::HAS_JOURNAL | Compatible::ORPHAN_FILE);
        }
        let options = &options;
        let low = |count: u64| crate::format::inode::low32(count);
        let high = |count: u64| crate::format::inode::low32(count >> 32);
        let mut raw = RawSuperblock::new_zeroed();
        let inodes = division.inodes_per_group * division.groups;
        raw.s_inodes_count = inodes.into();
        raw.s_blocks_count_lo = low(division.blocks).into();
        raw.s_blocks_count_hi = high(division.blocks).into();
        raw.s_r_blocks_count_lo = low(reserved).into();
        raw.s_r_blocks_count_hi = high(reserved).into();
        raw.s_free_inodes_count = (inodes - RESERVED_INODES).into();
        raw.s_first_data_block = division.first_data_block.into();
        raw.s_log_block_size = (division.block_bytes.trailing_zeros() - 10).into();
        raw.s_log_cluster_size =
            (raw.s_log_block_size.get() + division.ratio.trailing_zeros()).into();
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
        raw.s_reserved_gdt_blocks = u16::try_from(division.reserve).unwrap_or(0).into();
        for (to, from) in raw.s_hash_seed.iter_mut().zip(options.hash_seed.as_chunks::<4>().0) {
            *to = u32::from_le_bytes(*from).into();
        }
        raw.s_def_hash_version = options.hash_version;
        raw.s_default_mount_opts = MOUNT_OPTIONS.into();
        raw.s_mkfs_time = options.time.into();
        if options.inode_bytes >= 256 {
            raw.s_min_extra_isize = EXTRA_BYTES.into();
            raw.s_want_extra_isize = EXTRA_BYTES.into();
        }
        raw.s_flags = FLAG_SIGNED_HASH.into();
        raw.s_raid_stride = options.stride.into();
        raw.s_raid_stripe_width = options.stripe_width.into();
        raw.s_backup_bgs = division.backup_groups().map(Into::into);
        raw.s_log_groups_per_flex = u8::try_from(options.flex().trailing_zeros()).unwrap_or(0);
        if division.descriptor_bytes > DESCRIPTOR_BYTES {
            raw.s_desc_size = u16::try_from(division.descriptor_bytes).unwrap_or(0).into();
        }
        if options.incompatible.contains(Incompatible::CSUM_SEED) {
            raw.s_checksum_seed = Checksum::new().of(&options.uuid).get().into();
        }
        if options.read_only_compatible.contains(ReadOnlyCompatible::METADATA_CSUM) {
            raw.s_checksum_type = CHECKSUM_CRC32C;
        }
        if options.incompatible.contains(Incompatible::ENCRYPT) {
            let [contents, names, ..] = &mut raw.s_encrypt_algos;
            (*contents, *names) = ENCRYPTION;
        }
        if options.incompatible.contains(Incompatible::CASEFOLD) {
            raw.s_encoding = UTF8.into();
            raw.s_encoding_flags = u16::from(options.strict_names).into();
        }
        if journal.is_some() {
            raw.s_journal_inum = journal::INODE.into();
            raw.s_jnl_backup_type = journal::BACKUP_IS_INODE;
        }
        if options.incompatible.contains(Incompatible::MMP) {
            raw.s_mmp_interval = match options.mmp_interval {
                0 => MMP_INTERVAL,
                given => given,
            }
            .into();
        }
        raw.seal();
        let sane = |error: crate::Error| Error::Misuse(error.to_string());
        let mut super_ = raw.check().map_err(sane)?;
        let ratio = u64::from(division.ratio);
        let (free, overhead) = match division.ratio {
            1 => {
                let overhead = super_.overhead();
                (super_.blocks.saturating_sub(overhead), overhead)
            }
            // What shares a cluster with a table or a copy is no file's either.
            _ => {
                let (options, super_, raw) = (options.clone(), super_.clone(), raw.clone());
                let layout = Self { options, super_, raw, journal };
                let free = super::tables::place(&layout)?.1.free_in(0, u64::MAX);
                (free, layout.super_.blocks.saturating_sub(free) / ratio)
            }
        };
        let journal_blocks = journal.map_or(0, |sizes| u64::from(sizes.all()).div_ceil(ratio));
        // Where 32 bits do not hold it mke2fs leaves out the rest, and the kernel counts itself.
        let overhead_blocks = low(overhead.saturating_add(journal_blocks));
        raw.s_overhead_blocks = overhead_blocks.into();
        raw.set_free(free, u64::from(inodes - RESERVED_INODES)).map_err(sane)?;
        (super_.free_blocks, super_.overhead_clusters) = (free, overhead_blocks);
        let layout = Self { options: options.clone(), super_, raw, journal };
        layout.is_journal_fitting()?;
        Ok(layout)
    }

    /// A journal of a given length has at most half of what is free.
    fn is_journal_fitting(&self) -> Result<()> {
        let given = self.options.journal.mib.or(self.options.journal.fast_kib);
        let Some(sizes) = self.journal.filter(|_| given.is_some()) else { return Ok(()) };
        let mut free = self.super_.free_blocks;
        if self.options.flex() > 1 {
            // mke2fs looks before these tables are there.
            let tables = u64::from(self.super_.inode_table_blocks()) + 2;
            free += tables * u64::from(self.super_.groups);
        }
        match u64::from(sizes.all()) > free / 2 {
            true => Err(Error::LargeJournal(sizes.all())),
            false => Ok(()),
        }
    }

    /// Blocks that hidden files take: the reserve's map, the journal, the file of orphans.
    pub(super) fn hidden_blocks(&self) -> u64 {
        let reserve = u64::from(self.options.compatible.contains(Compatible::RESIZE_INODE));
        let guard = u64::from(self.options.incompatible.contains(Incompatible::MMP));
        let file = |blocks: u32| self.file_blocks(blocks);
        let journal = self.journal.map_or(0, |sizes| file(sizes.all()));
        (reserve + guard) * self.ratio() + journal + self.orphan_blocks().map_or(0, file)
    }

    /// Blocks that a file in one piece takes, with those of its map.
    pub(super) fn file_blocks(&self, blocks: u32) -> u64 {
        self.in_clusters(blocks.into()) + self.map_blocks(&[(0, blocks)]) * self.ratio()
    }

    /// Blocks that so many bytes take.
    pub(super) fn blocks_of(&self, bytes: u64) -> u32 {
        narrow(bytes.div_ceil(self.super_.block_bytes.into()))
    }

    /// Blocks of a cluster.
    pub(super) fn ratio(&self) -> u64 {
        u64::from(self.super_.cluster_blocks.max(1))
    }

    /// Blocks of the clusters that so many blocks take.
    pub(super) fn in_clusters(&self, blocks: u64) -> u64 {
        blocks.next_multiple_of(self.ratio())
    }

    /// Blocks that the map of a file with data in these runs needs beside its inode, if each run is
    /// one on the disk, too.
    pub(super) fn map_blocks(&self, runs: &[(u32, u32)]) -> u64 {
        let block_bytes = self.super_.block_bytes;
        match self.options.extents() {
            true => build_extents::fewest_nodes(runs, block_bytes),
            false => indirect_blocks(runs, block_bytes),
        }
    }

    /// Blocks of the file of orphans, if there is one.
    pub(super) fn orphan_blocks(&self) -> Option<u32> {
        let is_there = self.options.compatible.contains(Compatible::ORPHAN_FILE);
        is_there.then(|| narrow(self.in_clusters(orphan_blocks(self.super_.blocks).into())))
    }

    /// The map of an inode with data in these runs, for which there are these places. Its nodes are
    /// sealed.
    pub(super) fn map(&self, inode: u32, runs: &[(u32, u32)], places: &[Blocks]) -> Option<Built> {
        let block_bytes = self.super_.block_bytes;
        if !self.options.extents() {
            let mut blocks = places.iter().flat_map(|(from, count)| *from..*from + *count);
            let mut next = || blocks.next().and_then(|block| u32::try_from(block).ok());
            return build(runs, block_bytes, &mut next);
        }
        let mut built = build_extents::build(runs, block_bytes, places)?;
        if let Some(seed) = self.super_.checksum_of_file(FileId { inode, generation: 0 }) {
            for part in &mut built.parts {
                if let Part::Indirect { pointers, .. } = part {
                    extent::seal(pointers, seed);
                }
            }
        }
        Some(built)
    }

    /// When the volume is made.
    pub(super) fn now(&self) -> Time {
        Time { seconds: i64::from(self.options.time), nanoseconds: 0 }
    }

    /// What it was made for, with what mke2fs adds and takes away.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The superblock, as if no file were there.
    pub fn superblock(&self) -> &Superblock {
        &self.super_
    }

    /// Bytes of the volume.
    pub fn len_bytes(&self) -> u64 {
        self.super_.len_bytes()
    }

    /// One past the last block of a group.
    pub(super) fn group_end(&self, group: u32) -> u64 {
        self.super_.group_end(GroupNumber(group)).0
    }

    /// Blocks that copies of superblock and descriptors take at the start of a group.
    pub(super) fn copies(&self, group: u32) -> u64 {
        if self.is_meta() {
            let has_super = self.super_.has_superblock(GroupNumber(group));
            let before = self.copies_at(group) - self.group_start(group);
            return before + u64::from(has_super) + u64::from(self.has_meta_descriptors(group));
        }
        self.super_.copy_blocks(GroupNumber(group))
    }

    /// Where the copies of a group begin: with clusters of small blocks group 0 starts before it.
    pub(super) fn copies_at(&self, group: u32) -> u64 {
        let is_behind_boot = group == 0 && self.super_.block_bytes == 1024;
        self.group_start(group).max(u64::from(is_behind_boot))
    }

    /// Whether descriptor blocks are spread over the volume.
    pub(super) fn is_meta(&self) -> bool {
        self.options.incompatible.contains(Incompatible::META_BG)
    }

    /// Whether a group has a copy of the descriptors of its meta group, which the first two and the
    /// last group of that have.
    pub(super) fn has_meta_descriptors(&self, group: u32) -> bool {
        let per_block = self.super_.descriptors_per_block();
        let nth = group % per_block;
        nth <= 1 || nth == per_block - 1
    }

    /// The group that a block is in.
    pub(super) fn group_of(&self, block: u64) -> u32 {
        let first = u64::from(self.super_.first_data_block);
        narrow(block.saturating_sub(first) / u64::from(self.super_.blocks_per_group))
    }

    /// The first block of a group.
    pub(super) fn group_start(&self, group: u32) -> u64 {
        self.super_.group_start(GroupNumber(group)).0
    }

    /// Blocks that lost+found has at least.
    pub(super) fn lost_found_blocks(&self) -> u64 {
        let blocks = (LOST_FOUND_BYTES / self.super_.block_bytes).clamp(2, 12);
        // With inline data mke2fs makes it inside its inode, and the first time that it grows is
        // the time it leaves that.
        let leaves = self.options.incompatible.contains(Incompatible::INLINE_DATA);
        u64::from(blocks - u32::from(leaves))
    }

    /// Block numbers that a block holds.
    pub(super) fn fan_out(&self) -> u64 {
        u64::from(self.super_.block_bytes / 4)
    }

    pub(super) fn block_len(&self) -> usize {
        index(self.super_.block_bytes.into())
    }
}

/// Blocks of the file of orphans of a volume of so many.
pub(crate) fn orphan_blocks(blocks: u64) -> u32 {
    match blocks {
        ..0x2_0000 => 32,
        blocks @ ..0x20_0000 => narrow(blocks / 4096),
        _ => 512,
    }
}

/// Clusters that mke2fs gives to a group.
fn clusters_per_group(block_bytes: u32, ratio: u32) -> u32 {
    let is_huge = ratio > 1 && block_bytes.saturating_mul(ratio) >= HUGE_CLUSTER;
    let bytes = if is_huge { block_bytes - 1 } else { block_bytes };
    bytes.saturating_mul(8).min(MOST_IN_GROUP)
}

/// What options say, with the defaults filled in.
struct Checked {
    block_bytes: u32,
    /// Blocks of a cluster.
    ratio: u32,
    inodes: Inodes,
}

/// Checks the options.
fn check(options: &Options, size_bytes: u64) -> Result<Checked> {
    let misuse = |text: String| Err(Error::Misuse(text));
    let (default_block, default_ratio) = defaults(size_bytes);
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
        Inodes::Default => Inodes::PerBytes(default_ratio.max(block_bytes.saturating_mul(ratio))),
        Inodes::PerBytes(bytes) if !(1024..=64 << 20).contains(&bytes) => {
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
    if let Some(rule) = broken(Asker::Maker, features, options.inode_bytes).next() {
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
    if options.mmp_interval > MOST_MMP_INTERVAL {
        return misuse(format!("-E mmp_update_interval: at most {MOST_MMP_INTERVAL} seconds"));
    }
    Ok(Checked { block_bytes, ratio, inodes })
}

/// Blocks of a cluster.
fn cluster_blocks(options: &Options, block_bytes: u32) -> Result<u32> {
    let misuse = |text: &str| Err(Error::Misuse(text.to_owned()));
    match options.cluster_bytes {
        _ if options.has_clusters() && !options.extents() => misuse("-O bigalloc needs extent"),
        Some(_) if !options.has_clusters() => misuse("-C needs bigalloc (-O)"),
        None if !options.has_clusters() => Ok(1),
        None => Ok(CLUSTER_BLOCKS),
        Some(bytes) if !bytes.is_power_of_two() || !(2048..=MOST_CLUSTER).contains(&bytes) => {
            misuse("-C: a power of two from 2048 to 536870912 is needed")
        }
        Some(bytes) if bytes < block_bytes => misuse("-C: not smaller than a block"),
        Some(bytes) => Ok(bytes / block_bytes),
    }
}
