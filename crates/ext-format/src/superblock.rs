//! The superblock: | boot 1024 | superblock 1024 | ...
//!
//! All numbers that the crate computes with are checked once: a [`Superblock`] has a block size of
//! 1 to 64 KiB, groups that are not empty, and inodes that fit their blocks.

use std::fmt::Write;
use std::mem::offset_of;

use draconis_types::Time;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::casefold;
use super::checksum::{self, Checksum};
use super::features::{Compatible, Incompatible, ReadOnlyCompatible};
use super::hash::HashSeed;
use crate::{Error, FileId, FsBlock, GroupNumber, InodeNumber, Result};

/// First non-reserved inode in revision 0, which has no field for it.
pub(super) const FIRST_INODE_OF_REVISION_0: u32 = 11;
/// Bytes of an inode in revision 0.
pub(super) const INODE_BYTES_OF_REVISION_0: u16 = 128;

/// Byte offset of the superblock.
pub const OFFSET_BYTES: u64 = 1024;
/// Bytes of the superblock.
pub const LEN_BYTES: usize = 1024;

/// Value of `s_magic`.
pub const MAGIC: u16 = 0xEF53;
/// Bit of `s_flags`: names are hashed as signed characters.
pub const FLAG_SIGNED_HASH: u32 = 1;
/// Bit of `s_flags`: names are hashed as unsigned characters.
pub const FLAG_UNSIGNED_HASH: u32 = 2;
/// Bit of `s_flags`: test file system.
pub const FLAG_TEST: u32 = 4;
/// Bit of `s_state`: unmounted cleanly.
pub const STATE_CLEAN: u16 = 1;
/// Bit of `s_state`: damage was found and not repaired.
pub const STATE_ERRORS: u16 = 2;
/// Error text for a wrong checksum.
pub const WRONG_CHECKSUM: &str = "superblock: checksum";
/// Value of `s_jnl_backup_type` if `s_jnl_blocks` holds the journal inode's map.
pub const JNL_BACKUP_BLOCKS: u8 = 1;
const INODES_COUNT: &str = "superblock: inodes count is not that of its groups";
/// Value of `s_checksum_type`, the only one.
pub const CHECKSUM_CRC32C: u8 = 1;

/// On-disk superblock, with the field names of the format manual.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawSuperblock {
    pub s_inodes_count: U32,
    pub s_blocks_count_lo: U32,
    pub s_r_blocks_count_lo: U32,
    pub s_free_blocks_count_lo: U32,
    pub s_free_inodes_count: U32,
    pub s_first_data_block: U32,
    pub s_log_block_size: U32,
    pub s_log_cluster_size: U32,
    pub s_blocks_per_group: U32,
    pub s_clusters_per_group: U32,
    pub s_inodes_per_group: U32,
    pub s_mtime: U32,
    pub s_wtime: U32,
    pub s_mnt_count: U16,
    pub s_max_mnt_count: U16,
    pub s_magic: U16,
    pub s_state: U16,
    pub s_errors: U16,
    pub s_minor_rev_level: U16,
    pub s_lastcheck: U32,
    pub s_checkinterval: U32,
    pub s_creator_os: U32,
    pub s_rev_level: U32,
    pub s_def_resuid: U16,
    pub s_def_resgid: U16,
    pub s_first_ino: U32,
    pub s_inode_size: U16,
    pub s_block_group_nr: U16,
    pub s_feature_compat: U32,
    pub s_feature_incompat: U32,
    pub s_feature_ro_compat: U32,
    pub s_uuid: [u8; 16],
    pub s_volume_name: [u8; 16],
    pub s_last_mounted: [u8; 64],
    pub s_algorithm_usage_bitmap: U32,
    pub s_prealloc_blocks: u8,
    pub s_prealloc_dir_blocks: u8,
    pub s_reserved_gdt_blocks: U16,
    pub s_journal_uuid: [u8; 16],
    pub s_journal_inum: U32,
    pub s_journal_dev: U32,
    pub s_last_orphan: U32,
    pub s_hash_seed: [U32; 4],
    pub s_def_hash_version: u8,
    pub s_jnl_backup_type: u8,
    pub s_desc_size: U16,
    pub s_default_mount_opts: U32,
    pub s_first_meta_bg: U32,
    pub s_mkfs_time: U32,
    pub s_jnl_blocks: [U32; 17],
    pub s_blocks_count_hi: U32,
    pub s_r_blocks_count_hi: U32,
    pub s_free_blocks_count_hi: U32,
    pub s_min_extra_isize: U16,
    pub s_want_extra_isize: U16,
    pub s_flags: U32,
    pub s_raid_stride: U16,
    pub s_mmp_interval: U16,
    pub s_mmp_block: U64,
    pub s_raid_stripe_width: U32,
    pub s_log_groups_per_flex: u8,
    pub s_checksum_type: u8,
    pub s_reserved_pad: U16,
    pub s_kbytes_written: U64,
    pub s_snapshot: [U32; 5],
    pub s_error_count: U32,
    pub s_first_error_time: U32,
    pub s_first_error_ino: U32,
    pub s_first_error_block: U64,
    pub s_first_error_func: [u8; 32],
    pub s_first_error_line: U32,
    pub s_last_error_time: U32,
    pub s_last_error_ino: U32,
    pub s_last_error_line: U32,
    pub s_last_error_block: U64,
    pub s_last_error_func: [u8; 32],
    pub s_mount_opts: [u8; 64],
    pub s_usr_quota_inum: U32,
    pub s_grp_quota_inum: U32,
    pub s_overhead_blocks: U32,
    pub s_backup_bgs: [U32; 2],
    pub s_encrypt_algos: [u8; 4],
    pub s_encrypt_pw_salt: [u8; 16],
    pub s_lpf_ino: U32,
    pub s_prj_quota_inum: U32,
    pub s_checksum_seed: U32,
    pub s_wtime_hi: u8,
    pub s_mtime_hi: u8,
    pub s_mkfs_time_hi: u8,
    pub s_lastcheck_hi: u8,
    pub s_first_error_time_hi: u8,
    pub s_last_error_time_hi: u8,
    pub s_first_error_errcode: u8,
    pub s_last_error_errcode: u8,
    pub s_encoding: U16,
    pub s_encoding_flags: U16,
    pub s_orphan_file_inum: U32,
    pub s_reserved: [U32; 94],
    pub s_checksum: U32,
}

const _: () = assert!(size_of::<RawSuperblock>() == LEN_BYTES);

/// A validated superblock.
#[derive(Clone, Debug)]
pub struct Superblock {
    /// Block size in bytes: a power of two from 1,024 to 65,536.
    pub block_bytes: u32,
    /// Blocks of the volume.
    pub blocks: u64,
    /// Blocks reserved for the superuser.
    pub reserved_blocks: u64,
    /// User that may use them, besides group 0.
    pub reserved_uid: u32,
    /// Head of the orphan list; 0 if empty.
    pub last_orphan: u32,
    /// Free blocks, at most `blocks`.
    pub free_blocks: u64,
    /// Inodes of the volume; all are in groups.
    pub inodes: u32,
    /// Free inodes, at most `inodes`.
    pub free_inodes: u32,
    /// First block of group 0.
    pub first_data_block: u32,
    /// Blocks of a full group: 1 to 8 times the block size.
    pub blocks_per_group: u32,
    /// Inodes of a group: 1 to 8 times the block size.
    pub inodes_per_group: u32,
    /// Number of groups, at least 1.
    pub groups: u32,
    /// Bytes of an inode: a power of two from 128 to the block size.
    pub inode_bytes: u32,
    /// Bytes of a group descriptor: a power of two from 32 to 1,024.
    pub descriptor_bytes: u32,
    /// First non-reserved inode.
    pub first_inode: InodeNumber,
    /// Revision, 0 or 1, and its minor number.
    pub revision: (u32, u16),
    /// Compatible features.
    pub compatible: Compatible,
    /// Features without which a volume cannot be read (`incompat`).
    pub incompatible: Incompatible,
    /// Read-only compatible features.
    pub read_only_compatible: ReadOnlyCompatible,
    /// True if the volume was unmounted cleanly.
    pub clean: bool,
    /// True if damage was found and not repaired.
    pub errors: bool,
    /// UUID.
    pub uuid: [u8; 16],
    /// Label, without padding.
    pub label: Vec<u8>,
    /// Last mount point.
    pub last_mounted: Vec<u8>,
    /// Seed of htree hashes.
    pub hash_seed: HashSeed,
    /// Hash version of new htrees.
    pub default_hash_version: u8,
    /// True if htree hashes take characters as unsigned.
    pub hash_unsigned: bool,
    /// Times of creation, last mount, last write and last check.
    pub dates: Timestamps,
    /// Mounts since the last check.
    pub mounts: u16,
    /// Inode of the internal journal, if any.
    pub journal: Option<InodeNumber>,
    /// Device number of an external journal, as Linux encodes it; 0 for none.
    pub journal_device: u32,
    /// The identity of the journal, if it is outside.
    pub journal_uuid: [u8; 16],
    /// Copy of the journal inode's map, and of its size: the high half, then the low one.
    pub journal_backup: Option<[u32; 17]>,
    /// Number of the operating system that made the volume.
    pub creator_os: u32,
    /// First meta block group.
    pub first_meta_group: u32,
    /// Reserved GDT blocks.
    pub reserved_descriptor_blocks: u16,
    /// Groups of the two backups of `sparse_super2`.
    pub backup_groups: [u32; 2],
    /// Clusters unavailable to files, as the volume's maker counted them; 0 if not counted.
    pub overhead_clusters: u32,
    /// Seed of metadata checksums, with `metadata_csum`.
    pub checksum_seed: Option<Checksum>,
    /// Seed of the value hashes of EA inodes (`ea_inode`).
    pub value_seed: Checksum,
    /// Blocks per cluster: a power of two; 1 without `bigalloc`.
    pub cluster_blocks: u32,
    /// Groups per flex group: a power of two; 1 without `flex_bg`.
    pub flex_groups: u32,
    /// MMP block (`mmp`).
    pub mmp_block: Option<FsBlock>,
    /// MMP update interval in seconds.
    pub mmp_interval: u16,
    /// Inode of the orphan file (`orphan_file`).
    pub orphan_file: Option<InodeNumber>,
    /// Encoding of case-insensitive names (`casefold`), and its flags.
    pub encoding: (u16, u16),
    /// Inodes of the user, group and project quota files; 0 for none.
    pub quotas: [u32; 3],
}

/// Times of a volume, in seconds since 1970; 0 for never.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Timestamps {
    /// Creation.
    pub made: u32,
    /// Last mount.
    pub mounted: u32,
    /// Last write.
    pub written: u32,
    /// Last check.
    pub checked: u32,
}

impl RawSuperblock {
    /// Returns the superblock in its 1,024 bytes.
    ///
    /// # Errors
    /// [`Error::NotExt`] if the magic number is wrong.
    pub fn view(bytes: &[u8]) -> Result<&Self> {
        let (raw, _) = Self::ref_from_prefix(bytes).map_err(|_| Error::NotExt)?;
        if raw.s_magic.get() != MAGIC {
            return Err(Error::NotExt);
        }
        Ok(raw)
    }

    /// Returns the mutable superblock in its bytes.
    ///
    /// # Errors
    /// [`Error::NotExt`] if the magic number is wrong.
    pub fn view_mut(bytes: &mut [u8]) -> Result<&mut Self> {
        Self::view(bytes)?;
        Self::mut_from_prefix(bytes).map(|(raw, _)| raw).map_err(|_| Error::NotExt)
    }

    /// Marks the volume as mounted at `now`, in seconds.
    pub fn mark_in_use(&mut self, now: u32) {
        self.s_state.set(self.s_state.get() & !STATE_CLEAN);
        self.s_mnt_count.set(self.s_mnt_count.get().saturating_add(1));
        self.s_mtime.set(now);
        self.s_wtime.set(now);
    }

    /// Marks the volume as mounted at `now`, in seconds, and in need of journal recovery.
    pub fn need_recovery(&mut self, now: u32) {
        let features = self.s_feature_incompat.get() | Incompatible::RECOVER.bits();
        self.s_feature_incompat.set(features);
        self.s_mnt_count.set(self.s_mnt_count.get().saturating_add(1));
        self.s_mtime.set(now);
        self.s_wtime.set(now);
    }

    /// Marks the volume as in need of journal recovery.
    pub fn set_needs_recovery(&mut self) {
        let features = self.s_feature_incompat.get() | Incompatible::RECOVER.bits();
        self.s_feature_incompat.set(features);
    }

    /// Clears the mark for journal recovery.
    pub fn set_recovered(&mut self) {
        let features = self.s_feature_incompat.get() & !Incompatible::RECOVER.bits();
        self.s_feature_incompat.set(features);
    }

    /// Says that the file of orphans lists none.
    pub fn set_no_orphans_in_file(&mut self) {
        let present = ReadOnlyCompatible::ORPHAN_PRESENT.bits();
        self.s_feature_ro_compat.set(self.s_feature_ro_compat.get() & !present);
    }

    /// Marks the volume as unmounted cleanly.
    pub fn mark_clean(&mut self) {
        self.s_state.set(self.s_state.get() | STATE_CLEAN);
    }

    /// Marks the volume as damaged.
    pub fn mark_errors(&mut self) {
        self.s_state.set(self.s_state.get() | STATE_ERRORS);
    }

    /// Returns true if the volume was unmounted cleanly and no damage is recorded.
    pub fn is_marked_clean(&self) -> bool {
        self.s_state.get() & (STATE_CLEAN | STATE_ERRORS) == STATE_CLEAN
    }

    /// Marks the volume as checked at `now`, in seconds, and free of damage.
    pub fn mark_checked(&mut self, now: u32) {
        self.s_state.set((self.s_state.get() | STATE_CLEAN) & !STATE_ERRORS);
        self.s_error_count.set(0);
        self.s_mnt_count.set(0);
        self.s_lastcheck.set(now);
    }

    /// Sets the free blocks and inodes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a count exceeds its field.
    pub fn set_free(&mut self, blocks: u64, inodes: u64) -> Result<()> {
        let corrupt = |_| Error::corrupt("superblock: free counts");
        if self.s_feature_incompat.get() & Incompatible::SIXTY_FOUR_BIT.bits() != 0 {
            self.s_free_blocks_count_hi.set(u32::try_from(blocks >> 32).map_err(corrupt)?);
            self.s_free_blocks_count_lo.set(super::low32(blocks));
        } else {
            self.s_free_blocks_count_lo.set(u32::try_from(blocks).map_err(corrupt)?);
        }
        self.s_free_inodes_count.set(u32::try_from(inodes).map_err(corrupt)?);
        Ok(())
    }

    /// Returns the feature words: compatible, incompatible, read-only compatible.
    pub fn features(&self) -> [u32; 3] {
        [self.s_feature_compat, self.s_feature_incompat, self.s_feature_ro_compat]
            .map(|it| it.get())
    }

    /// Checks all numbers that the crate computes with.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming all unsupported features, or [`Error::Corrupt`] naming the
    /// first invalid field.
    pub fn check(&self) -> Result<Superblock> {
        let super_ = self.check_lenient()?;
        // Linux mounts no others, and libext2fs writes no others.
        match u64::from(super_.inodes) == super_.inodes_in_groups() {
            true => Ok(super_),
            false => Err(Error::corrupt(INODES_COUNT)),
        }
    }

    /// Checks like [`RawSuperblock::check`], but accepts an inode count below that of the groups,
    /// so that the checker can report the expected count.
    ///
    /// # Errors
    /// As [`RawSuperblock::check`].
    pub fn check_lenient(&self) -> Result<Superblock> {
        let revision = self.s_rev_level.get();
        if revision > 1 {
            return Err(Error::Unsupported { feature: format!("needs: revision {revision}") });
        }
        let dynamic = revision == 1;
        // Linux and e2fsck honour features in revision 0, too.
        let [compatible, incompatible, read_only_compatible] = self.features();
        let compatible = Compatible::from_bits_retain(compatible);
        let incompatible = Incompatible::from_bits_retain(incompatible);
        let read_only_compatible = ReadOnlyCompatible::from_bits_retain(read_only_compatible);
        check_features(incompatible)?;
        self.check_encoding(incompatible)?;
        let checksum_seed = self.verify_checksum(incompatible, read_only_compatible)?;
        let wide = incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
        let join = |low: U32, high: U32| {
            u64::from(low.get()) | if wide { u64::from(high.get()) << 32 } else { 0 }
        };

        let block_bytes = 1024u32
            .checked_shl(self.s_log_block_size.get())
            .filter(|bytes| (1024..=65536).contains(bytes) && bytes.is_power_of_two())
            .ok_or(Error::corrupt("superblock: block size"))?;
        let bitmap_bits = block_bytes.saturating_mul(8);
        let in_group = |count: u32, what| {
            (1..=bitmap_bits).contains(&count).then_some(count).ok_or(Error::corrupt(what))
        };
        let cluster_blocks = self.cluster_blocks(block_bytes, read_only_compatible)?;
        let blocks_per_group = if cluster_blocks == 1 {
            in_group(self.s_blocks_per_group.get(), "superblock: blocks per group")?
        } else {
            let clusters =
                in_group(self.s_clusters_per_group.get(), "superblock: clusters per group")?;
            let blocks = clusters.checked_mul(cluster_blocks);
            blocks
                .filter(|blocks| *blocks == self.s_blocks_per_group.get())
                .ok_or(Error::corrupt("superblock: blocks per group"))?
        };
        let inodes_per_group =
            in_group(self.s_inodes_per_group.get(), "superblock: inodes per group")?;

        let first_data_block = self.s_first_data_block.get();
        let blocks = join(self.s_blocks_count_lo, self.s_blocks_count_hi);
        // A size must also be countable in bytes.
        let in_groups = blocks
            .checked_sub(u64::from(first_data_block))
            .filter(|count| *count > 0 && blocks < 1 << 48)
            .ok_or(Error::corrupt("superblock: blocks count"))?;
        let groups = u32::try_from(in_groups.div_ceil(u64::from(blocks_per_group)))
            .map_err(|_| Error::corrupt("superblock: blocks count"))?;
        let room = u64::from(groups).saturating_mul(u64::from(inodes_per_group));
        let inodes = self.s_inodes_count.get();
        if inodes == 0 || u64::from(inodes) > room {
            return Err(Error::corrupt(INODES_COUNT));
        }

        let inode_bytes = if dynamic { self.s_inode_size.get() } else { INODE_BYTES_OF_REVISION_0 };
        let inode_bytes = u32::from(inode_bytes);
        if !(128..=block_bytes).contains(&inode_bytes) || !inode_bytes.is_power_of_two() {
            return Err(Error::corrupt("superblock: inode size"));
        }
        let first_inode = if dynamic { self.s_first_ino.get() } else { FIRST_INODE_OF_REVISION_0 };
        if first_inode < 11 {
            return Err(Error::corrupt("superblock: first inode"));
        }
        let state = self.s_state.get();
        let journal = self.s_journal_inum.get();
        Ok(Superblock {
            block_bytes,
            blocks,
            reserved_blocks: join(self.s_r_blocks_count_lo, self.s_r_blocks_count_hi).min(blocks),
            reserved_uid: self.s_def_resuid.get().into(),
            last_orphan: self.s_last_orphan.get(),
            free_blocks: join(self.s_free_blocks_count_lo, self.s_free_blocks_count_hi).min(blocks),
            inodes,
            free_inodes: self.s_free_inodes_count.get().min(inodes),
            first_data_block,
            blocks_per_group,
            inodes_per_group,
            groups,
            inode_bytes,
            descriptor_bytes: self.descriptor_bytes(incompatible, block_bytes)?,
            first_inode: InodeNumber(first_inode),
            revision: (revision, self.s_minor_rev_level.get()),
            compatible,
            incompatible,
            read_only_compatible,
            clean: state & STATE_CLEAN != 0,
            errors: state & STATE_ERRORS != 0,
            uuid: self.s_uuid,
            label: bytes_before_nul(&self.s_volume_name),
            last_mounted: bytes_before_nul(&self.s_last_mounted),
            hash_seed: HashSeed::new(self.s_hash_seed.map(U32::get)),
            default_hash_version: self.s_def_hash_version,
            hash_unsigned: self.s_flags.get() & FLAG_UNSIGNED_HASH != 0,
            dates: Timestamps {
                made: self.s_mkfs_time.get(),
                mounted: self.s_mtime.get(),
                written: self.s_wtime.get(),
                checked: self.s_lastcheck.get(),
            },
            mounts: self.s_mnt_count.get(),
            journal: (compatible.contains(Compatible::HAS_JOURNAL) && journal != 0)
                .then_some(InodeNumber(journal)),
            journal_device: self.s_journal_dev.get(),
            journal_uuid: self.s_journal_uuid,
            journal_backup: (self.s_jnl_backup_type == JNL_BACKUP_BLOCKS)
                .then(|| self.s_jnl_blocks.map(|word| word.get())),
            creator_os: self.s_creator_os.get(),
            first_meta_group: self.s_first_meta_bg.get(),
            reserved_descriptor_blocks: self.s_reserved_gdt_blocks.get(),
            backup_groups: self.s_backup_bgs.map(U32::get),
            overhead_clusters: self.s_overhead_blocks.get(),
            checksum_seed,
            value_seed: self.checksum_seed(incompatible),
            cluster_blocks,
            flex_groups: self.flex_groups(incompatible),
            mmp_block: (incompatible.contains(Incompatible::MMP) && self.s_mmp_block.get() != 0)
                .then(|| FsBlock(self.s_mmp_block.get())),
            mmp_interval: self.s_mmp_interval.get(),
            orphan_file: (compatible.contains(Compatible::ORPHAN_FILE)
                && self.s_orphan_file_inum.get() != 0)
                .then(|| InodeNumber(self.s_orphan_file_inum.get())),
            encoding: (self.s_encoding.get(), self.s_encoding_flags.get()),
            quotas: [self.s_usr_quota_inum, self.s_grp_quota_inum, self.s_prj_quota_inum]
                .map(|it| it.get()),
        })
    }

    /// Verifies the superblock's checksum, if any; returns the seed of other checksums.
    fn verify_checksum(
        &self,
        incompatible: Incompatible,
        read_only_compatible: ReadOnlyCompatible,
    ) -> Result<Option<Checksum>> {
        if !read_only_compatible.contains(ReadOnlyCompatible::METADATA_CSUM) {
            return Ok(None);
        }
        if self.s_checksum_type == 0 && self.s_checksum.get() == 0 {
            // Only the bit of the feature.
            return Err(Error::corrupt(WRONG_CHECKSUM));
        }
        if self.s_checksum_type != CHECKSUM_CRC32C {
            let feature = format!("needs: checksums of type {}", self.s_checksum_type);
            return Err(Error::Unsupported { feature });
        }
        if self.s_checksum.get() != self.checksum() {
            return Err(Error::corrupt(WRONG_CHECKSUM));
        }
        Ok(Some(self.checksum_seed(incompatible)))
    }

    /// Returns the seed of metadata checksums.
    fn checksum_seed(&self, incompatible: Incompatible) -> Checksum {
        match incompatible.contains(Incompatible::CSUM_SEED) {
            true => Checksum::seeded(self.s_checksum_seed.get()),
            false => Checksum::new().update(&self.s_uuid),
        }
    }

    fn check_encoding(&self, incompatible: Incompatible) -> Result<()> {
        let encoding = self.s_encoding.get();
        if incompatible.contains(Incompatible::CASEFOLD) && encoding != casefold::UTF8 {
            return Err(Error::Unsupported { feature: format!("needs: encoding {encoding}") });
        }
        Ok(())
    }

    /// Computes `s_checksum`.
    fn checksum(&self) -> u32 {
        let bytes = self.as_bytes();
        let sealed = bytes.get(..offset_of!(Self, s_checksum)).unwrap_or_default();
        Checksum::new().update(sealed).value()
    }

    /// Keeps `s_checksum` valid without changing it, by choosing the unused field `s_snapshot_id`.
    /// The checksum is in the second sector, and all fields that change while mounted are in the
    /// first. Thus the superblock changes atomically if sectors do.
    pub fn preserve_checksum(&mut self) {
        /// Offset of `s_snapshot_id`.
        const AT: usize = 0x184;
        if !self.has_checksum() {
            return;
        }
        let bytes = self.as_bytes();
        let before = Checksum::new().update(bytes.get(..AT).unwrap_or_default());
        let behind = bytes.get(AT.saturating_add(4)..LEN_BYTES.saturating_sub(4));
        let id = checksum::solve_for(before, behind.unwrap_or_default(), self.s_checksum.get());
        let [_, snapshot_id, ..] = &mut self.s_snapshot;
        snapshot_id.set(id);
    }

    /// Returns true if the volume has checksums of all metadata.
    pub fn has_checksum(&self) -> bool {
        self.s_feature_ro_compat.get() & ReadOnlyCompatible::METADATA_CSUM.bits() != 0
    }

    /// Returns true if only the feature of checksums is missing for the checksum to be right.
    pub fn lost_checksum_feature(&self) -> bool {
        let mut sealed = self.clone();
        let features = sealed.s_feature_ro_compat.get();
        sealed.s_feature_ro_compat.set(features | ReadOnlyCompatible::METADATA_CSUM.bits());
        !self.has_checksum() && sealed.s_checksum.get() == sealed.checksum()
    }

    /// Sets the checksum, if the volume has checksums.
    pub fn set_checksum(&mut self) {
        if self.has_checksum() {
            self.s_checksum.set(self.checksum());
        }
    }

    fn cluster_blocks(&self, block_bytes: u32, features: ReadOnlyCompatible) -> Result<u32> {
        if !features.contains(ReadOnlyCompatible::BIGALLOC) {
            return Ok(1);
        }
        // Linux limits a cluster to 1 GiB.
        let bytes = 1024u32.checked_shl(self.s_log_cluster_size.get());
        bytes
            .filter(|bytes| (block_bytes..=1 << 30).contains(bytes) && bytes.is_power_of_two())
            .and_then(|bytes| bytes.checked_div(block_bytes))
            .ok_or(Error::corrupt("superblock: cluster size"))
    }

    fn descriptor_bytes(&self, incompatible: Incompatible, block_bytes: u32) -> Result<u32> {
        if !incompatible.contains(Incompatible::SIXTY_FOUR_BIT) {
            return Ok(32);
        }
        let bytes = u32::from(self.s_desc_size.get());
        let sane = (64..=block_bytes.min(1024)).contains(&bytes) && bytes.is_power_of_two();
        sane.then_some(bytes).ok_or(Error::corrupt("superblock: descriptor size"))
    }

    /// Returns the groups per flex group, a power of two; Linux ignores values above 2^31.
    fn flex_groups(&self, incompatible: Incompatible) -> u32 {
        let is_flex = incompatible.contains(Incompatible::FLEX_BG);
        let groups = 1u32.checked_shl(self.s_log_groups_per_flex.into());
        groups.filter(|_| is_flex).unwrap_or(1)
    }
}

fn check_features(incompatible: Incompatible) -> Result<()> {
    if incompatible.contains(Incompatible::UNFINISHED) {
        let feature = "unfinished: a change of the whole volume was cut off; \
                       `draconis tune` without options ends it";
        return Err(Error::Unsupported { feature: feature.to_owned() });
    }
    let missing = incompatible.difference(Incompatible::READABLE).difference(Incompatible::RECOVER);
    if !missing.is_empty() {
        return Err(Error::Unsupported {
            feature: format!("needs: {}", missing.names().join(", ")),
        });
    }
    Ok(())
}

/// Returns the bytes before the first NUL.
fn bytes_before_nul(field: &[u8]) -> Vec<u8> {
    field.iter().copied().take_while(|byte| *byte != 0).collect()
}

impl Superblock {
    /// Returns the block of the superblock, and its byte offset in the block.
    pub fn location(&self) -> (FsBlock, usize) {
        let block_bytes = u64::from(self.block_bytes);
        let block = OFFSET_BYTES.checked_div(block_bytes).unwrap_or(0);
        let at = OFFSET_BYTES.checked_rem(block_bytes).unwrap_or(0);
        (FsBlock(block), crate::units::saturating_usize(at))
    }

    /// Returns true if the journal needs replay.
    pub fn needs_recovery(&self) -> bool {
        self.incompatible.contains(Incompatible::RECOVER)
    }

    /// Returns the feature words: compatible, incompatible, read-only compatible.
    pub fn features(&self) -> [u32; 3] {
        [self.compatible.bits(), self.incompatible.bits(), self.read_only_compatible.bits()]
    }

    /// Returns the type, as in `mke2fs -t`: `ext4` with any ext4 feature, else `ext3` with a
    /// journal, else `ext2`.
    pub fn kind(&self) -> &'static str {
        let newer = self.incompatible.intersects(Incompatible::EXT4_ONLY)
            || self.read_only_compatible.intersects(ReadOnlyCompatible::EXT4_ONLY);
        match (newer, self.compatible.contains(Compatible::HAS_JOURNAL)) {
            (true, _) => "ext4",
            (false, true) => "ext3",
            (false, false) => "ext2",
        }
    }

    /// Returns the free blocks withheld from users: those of the superuser, and with extents
    /// Linux's reserve for changes of extent trees.
    pub fn reserved_total(&self) -> u64 {
        if !self.incompatible.contains(Incompatible::EXTENTS) {
            return self.reserved_blocks;
        }
        let ratio = u64::from(self.cluster_blocks.max(1));
        let clusters = self.blocks.checked_div(ratio).unwrap_or(0) / 50;
        self.reserved_blocks.saturating_add(clusters.min(4096).saturating_mul(ratio))
    }

    /// Returns the checksum seed of a file's metadata, on volumes with checksums.
    pub fn file_checksum_seed(&self, file: FileId) -> Option<Checksum> {
        self.checksum_seed.map(|seed| seed.update_u32(file.inode).update_u32(file.generation))
    }

    /// Returns the size of the volume in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_bytes))
    }

    /// Returns the hash version of new htrees, without the signedness of characters.
    pub fn default_hash(&self) -> u8 {
        if self.default_hash_version <= 2 { self.default_hash_version } else { 1 }
    }

    /// Returns the first block of a group.
    pub fn group_start(&self, group: GroupNumber) -> FsBlock {
        let blocks = u64::from(group.0).saturating_mul(u64::from(self.blocks_per_group));
        FsBlock(blocks.saturating_add(u64::from(self.first_data_block)))
    }

    /// Returns true if `block` can belong to a file.
    pub fn is_valid_block(&self, block: FsBlock) -> bool {
        block.0 > u64::from(self.first_data_block) && block.0 < self.blocks
    }

    /// Returns true if a directory entry may reference `inode`.
    pub fn is_valid_inode(&self, inode: InodeNumber) -> bool {
        let is_hidden = self.has_quota(inode) || self.orphan_file == Some(inode);
        inode == InodeNumber::ROOT
            || (self.first_inode..=InodeNumber(self.inodes)).contains(&inode) && !is_hidden
    }

    /// Returns true if an inode is a quota file.
    fn has_quota(&self, inode: InodeNumber) -> bool {
        self.read_only_compatible.contains(ReadOnlyCompatible::QUOTA)
            && self.quotas.contains(&inode.0)
    }

    /// Returns the inodes of all groups together.
    pub fn inodes_in_groups(&self) -> u64 {
        u64::from(self.groups).saturating_mul(self.inodes_per_group.into())
    }

    /// Returns the blocks of an inode table.
    pub fn inode_table_blocks(&self) -> u32 {
        let bytes = u64::from(self.inodes_per_group).saturating_mul(u64::from(self.inode_bytes));
        crate::units::saturating_u32(bytes.div_ceil(u64::from(self.block_bytes)))
    }

    /// Returns true if the volume has multi-mount protection.
    pub fn has_mmp(&self) -> bool {
        self.incompatible.contains(Incompatible::MMP)
    }

    /// Returns device number and UUID of an external journal, as Linux formats them. Without the
    /// feature of a journal the field means nothing.
    pub fn external_journal(&self) -> Option<String> {
        let has_journal = self.compatible.contains(Compatible::HAS_JOURNAL);
        let device = Some(self.journal_device).filter(|device| *device != 0 && has_journal)?;
        let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00);
        let mut uuid = String::new();
        for (nth, byte) in self.journal_uuid.iter().enumerate() {
            let hyphen = if matches!(nth, 4 | 6 | 8 | 10) { "-" } else { "" };
            let _ = write!(uuid, "{hyphen}{byte:02x}");
        }
        Some(format!("device {major}:{minor}, UUID {uuid}"))
    }
}

impl RawSuperblock {
    /// Marks the superblock as being changed, with a redo log whose index begins at block `head`.
    pub fn set_change_marker(&mut self, head: u64) {
        // Valid on any revision: step 5 restores the old fields.
        let flag = Incompatible::UNFINISHED.bits();
        self.s_feature_incompat.set(self.s_feature_incompat.get() | flag);
        let [_, _, low, high, _] = &mut self.s_snapshot;
        low.set(super::low32(head));
        high.set(super::low32(head >> 32));
    }

    /// Returns the first index block of an interrupted change, if there is one.
    pub fn interrupted_change(&self) -> Option<u64> {
        let [_, _, low, high, _] = &self.s_snapshot;
        let head = u64::from(low.get()) | u64::from(high.get()) << 32;
        (self.s_feature_incompat.get() & Incompatible::UNFINISHED.bits() != 0).then_some(head)
    }
}

/// Converts a time to the 32-bit seconds of superblocks and deletion times.
pub fn to_disk_seconds(time: Time) -> u32 {
    u32::try_from(time.seconds).unwrap_or(0)
}

#[cfg(test)]
mod tests;
