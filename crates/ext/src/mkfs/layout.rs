//! The rules by which mke2fs lays out a volume, learnt from what it makes.
//!
//! ```text
//!   group   | super | descriptors | reserve | block bitmap | inode bitmap | inodes .. | blocks ..
//!             └──── group 0 and backups ───┘
//! ```
//! Law: `dumpe2fs` shows the same for a volume of ours as for one of mke2fs with the same
//! arguments; the tests compare byte for byte.

use zerocopy::FromZeros;

use super::options::{Inodes, Options};
use super::{Error, Result};
use crate::format::features::{Compatible, ReadOnlyCompatible};
use crate::format::group::is_sparse_backup;
use crate::format::inode::EXTRA_BYTES;
use crate::format::superblock::{FLAG_SIGNED_HASH, MAGIC, RawSuperblock, STATE_CLEAN, Superblock};
use crate::units::{index, narrow};
use crate::{FsBlock, GroupNumber};

/// Bytes of a group descriptor.
const DESCRIPTOR_BYTES: u32 = 32;
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

/// A volume without files: where everything is.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(super) options: Options,
    pub(super) super_: Superblock,
    pub(super) raw: RawSuperblock,
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
    first_data_block: u32,
    sparse: bool,
    resize: bool,
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

    fn descriptor_blocks(groups: u64, block_bytes: u32) -> u64 {
        groups.div_ceil(u64::from(block_bytes / DESCRIPTOR_BYTES))
    }

    fn table_blocks(&self) -> u64 {
        let bytes = u64::from(self.inodes_per_group) * u64::from(self.inode_bytes);
        bytes.div_ceil(self.block_bytes.into())
    }

    /// Blocks of a group that no file can have.
    fn overhead(&self, group: u32) -> u64 {
        let copies = if !self.sparse || is_sparse_backup(group) {
            let table = Self::descriptor_blocks(self.groups.into(), self.block_bytes);
            1 + table + u64::from(self.reserve)
        } else {
            0
        };
        copies + 2 + self.table_blocks()
    }

    /// Descriptor blocks kept for growth.
    fn reserve_for_growth(&self) -> u32 {
        if !self.resize {
            return 0;
        }
        let most = self.blocks.saturating_mul(GROWTH).min(u32::MAX.into());
        let groups =
            most.saturating_sub(self.first_data_block.into()).div_ceil(self.per_group.into());
        let table = Self::descriptor_blocks(self.groups.into(), self.block_bytes);
        let grown = Self::descriptor_blocks(groups, self.block_bytes).saturating_sub(table);
        narrow(grown).min(self.block_bytes / 4)
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
        let share = share.min(65536 - per_block);
        self.inodes_per_group = (share.next_multiple_of(per_block) & !7).max(8);
        true
    }
}

impl Layout {
    /// Lays out a volume in `size_bytes`.
    ///
    /// # Errors
    /// [`Error::TooSmall`], [`Error::TooLarge`], and [`Error::Misuse`] for options that make
    /// no sense.
    pub fn new(options: &Options, size_bytes: u64) -> Result<Self> {
        let (block_bytes, inodes) = check(options, size_bytes)?;
        let blocks = size_bytes / u64::from(block_bytes);
        let too_small = Error::TooSmall { blocks, block_bytes };
        if blocks > u64::from(u32::MAX) {
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
            first_data_block: u32::from(block_bytes == 1024),
            sparse: options.read_only_compatible.contains(ReadOnlyCompatible::SPARSE_SUPER),
            resize: options.compatible.contains(Compatible::RESIZE_INODE),
            blocks,
            per_group: block_bytes.saturating_mul(8).min(MOST_IN_GROUP),
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
            division.reserve = division.reserve_for_growth();
            if !division.share_inodes(inodes) {
                // Smaller groups are more groups, and more inodes fit.
                if division.per_group < 256 {
                    return Err(Error::TooManyInodes(inodes));
                }
                division.per_group -= 8;
                division.blocks = blocks;
                continue;
            }
            let last = division.in_groups() % per_group;
            let overhead = division.overhead(division.groups - 1);
            if last > 0 && last < overhead + LEAST_IN_GROUP {
                if division.groups == 1 {
                    return Err(too_small);
                }
                division.blocks -= last;
                reserved = asked * division.blocks / blocks;
                continue;
            }
            break;
        }
        if division.overhead(0) > u64::from(division.per_group) {
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
        let field = |count: u64| {
            FsBlock(count).in_32_bits().map_err(|_| Error::TooLarge { blocks, block_bytes })
        };
        let mut raw = RawSuperblock::new_zeroed();
        let inodes = division.inodes_per_group * division.groups;
        raw.s_inodes_count = inodes.into();
        raw.s_blocks_count_lo = field(division.blocks)?.into();
        raw.s_r_blocks_count_lo = field(reserved)?.into();
        raw.s_free_inodes_count = (inodes - RESERVED_INODES).into();
        raw.s_first_data_block = division.first_data_block.into();
        raw.s_log_block_size = (division.block_bytes.trailing_zeros() - 10).into();
        raw.s_log_cluster_size = raw.s_log_block_size;
        raw.s_blocks_per_group = division.per_group.into();
        raw.s_clusters_per_group = division.per_group.into();
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
        let sane = |error: crate::Error| Error::Misuse(error.to_string());
        let mut super_ = raw.check().map_err(sane)?;
        let overhead = super_.overhead();
        let overhead_blocks = field(overhead)?;
        raw.s_overhead_blocks = overhead_blocks.into();
        let free = super_.blocks.saturating_sub(overhead);
        raw.s_free_blocks_count_lo = field(free)?.into();
        (super_.free_blocks, super_.overhead_clusters) = (free, overhead_blocks);
        Ok(Self { options: options.clone(), super_, raw })
    }

    /// A volume with block numbers of more than 32 bits.
    pub(super) fn too_large(&self) -> Error {
        let Superblock { blocks, block_bytes, .. } = self.super_;
        Error::TooLarge { blocks, block_bytes }
    }

    /// What it was made for.
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
        self.super_.copy_blocks(GroupNumber(group))
    }

    /// The block of a group that holds its block bitmap; the inode bitmap and the inode table follow.
    pub(super) fn bitmaps(&self, group: u32) -> FsBlock {
        self.super_.group_start(GroupNumber(group)).after(self.copies(group))
    }

    /// The first block of a group that a file can have.
    pub(super) fn data_start(&self, group: u32) -> u64 {
        self.bitmaps(group).after(2 + u64::from(self.super_.inode_table_blocks())).0
    }

    /// Blocks that lost+found has at least.
    pub(super) fn lost_found_blocks(&self) -> u64 {
        u64::from((LOST_FOUND_BYTES / self.super_.block_bytes).clamp(2, 12))
    }

    /// Block numbers that a block holds.
    pub(super) fn fan_out(&self) -> u64 {
        u64::from(self.super_.block_bytes / 4)
    }

    pub(super) fn block_len(&self) -> usize {
        index(self.super_.block_bytes.into())
    }
}

/// Checks the options; block size and inodes with the defaults filled in.
fn check(options: &Options, size_bytes: u64) -> Result<(u32, Inodes)> {
    let misuse = |text: String| Err(Error::Misuse(text));
    let (default_block, default_ratio) = defaults(size_bytes);
    let block_bytes = options.block_bytes.unwrap_or(default_block);
    if !block_bytes.is_power_of_two() || !(1024..=65536).contains(&block_bytes) {
        return misuse(format!("-b {block_bytes}: a power of two from 1024 to 65536 is needed"));
    }
    let inode_bytes = options.inode_bytes;
    if !inode_bytes.is_power_of_two() || !(128..=block_bytes.min(32768)).contains(&inode_bytes) {
        let most = block_bytes.min(32768);
        return misuse(format!("-I {inode_bytes}: a power of two from 128 to {most} is needed"));
    }
    let inodes = match options.inodes {
        Inodes::Default => Inodes::PerBytes(default_ratio.max(block_bytes)),
        Inodes::PerBytes(bytes) if !(1024..=64 << 20).contains(&bytes) => {
            return misuse(format!("-i {bytes}: 1024 to 67108864 bytes per inode are possible"));
        }
        given => given,
    };
    if options.reserved_ppm > 500_000 {
        return misuse("-m: at most 50 percent can be reserved".into());
    }
    if options.label.len() > 16 {
        return misuse("-L: a label has at most 16 bytes".into());
    }
    if options.hash_version > 2 {
        return misuse("hash_alg: legacy, half_md4 or tea".into());
    }
    if options.compatible.contains(Compatible::RESIZE_INODE)
        && !options.read_only_compatible.contains(ReadOnlyCompatible::SPARSE_SUPER)
    {
        return misuse("-O resize_inode needs sparse_super".into());
    }
    Ok((block_bytes, inodes))
}
