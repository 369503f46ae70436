//! An open volume: reading, and the state that reading and writing share.

use std::sync::{Arc, OnceLock};

use draconis_device::Disk;
use draconis_exchange::contract::Attributes;
pub use draconis_exchange::contract::StatFs;
use parking_lot::RwLockReadGuard;

use crate::blocks::checksums::MetadataChecksums;
use crate::blocks::data::SharedBytes;
use crate::blocks::read_ahead::FileReadAhead;
use crate::blocks::role::Role;
use crate::blocks::{BlockStore, DeviceStatistics};
use crate::cache::{Cache, CacheStatistics, CacheWeight};
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::group::{self, GroupDescriptor};
use crate::format::inode::Inode;
use crate::format::superblock::{Superblock, Timestamps};
use crate::map::{RunList, SegmentKey};
use crate::options::OpenOptions;
use crate::units::saturating_usize;
use crate::write_context::{WriteContext, WriteState};
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// An open ext volume. All methods take `&self`: share it.
#[derive(Debug)]
pub struct Volume {
    pub(crate) super_: Superblock,
    pub(crate) store: BlockStore,
    pub(crate) file_read_ahead: FileReadAhead,
    pub(crate) block_maps: Cache<SegmentKey, Arc<RunList>>,
    pub(crate) inodes: Cache<u32, Arc<Inode>>,
    /// State of a writable volume; `None` on a read-only one.
    pub(crate) writing: Option<WriteContext>,
    /// Reason why some changes committed in the journal cannot be read.
    pub(crate) journal_damage: Option<Error>,
    pub(crate) disk_bytes: u64,
    /// Clusters of the volume's own metadata, once counted.
    metadata_clusters: OnceLock<u64>,
    options: OpenOptions,
}

impl CacheWeight for Arc<Inode> {
    fn weight(&self) -> u64 {
        1
    }
}

/// Description of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Info {
    /// `ext2`, `ext3` or `ext4`.
    pub kind: &'static str,
    /// Label, without padding.
    pub label: Vec<u8>,
    /// UUID.
    pub uuid: [u8; 16],
    /// Directory of the last mount.
    pub last_mounted: Vec<u8>,
    /// Revision and minor revision.
    pub revision: (u32, u16),
    /// Names of all features, as `mke2fs -O` spells them.
    pub features: Vec<String>,
    /// Reason why the volume is read-only, if it is.
    pub read_only_reason: Option<String>,
    /// True if the volume was cleanly unmounted.
    pub clean: bool,
    /// True if damage was found and not repaired.
    pub errors: bool,
    /// True if the disk is shorter than the volume: blocks after its end cannot be read.
    pub truncated: bool,
    /// Size of the volume in bytes.
    pub len_bytes: u64,
    /// Blocks, groups and inodes, used and free.
    pub space: StatFs,
    /// Blocks reserved for the superuser.
    pub reserved_blocks: u64,
    /// Number of block groups.
    pub groups: u32,
    /// Blocks per group.
    pub blocks_per_group: u32,
    /// Inodes per group.
    pub inodes_per_group: u32,
    /// Size of an inode in bytes.
    pub inode_bytes: u32,
    /// Timestamps of the superblock.
    pub dates: Timestamps,
    /// Mounts since the last check.
    pub mounts: u16,
}

/// Statistics of the caches and the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Inode cache, in inodes.
    pub inodes: CacheStatistics,
    /// Block-map cache, in entries of 64 runs.
    pub block_maps: CacheStatistics,
    /// Data cache, in bytes.
    pub data: CacheStatistics,
    /// Requests to the device.
    pub device: DeviceStatistics,
}

impl Volume {
    /// Opens the volume on `disk` with this superblock, without replaying its journal.
    pub(crate) fn open_unreplayed(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        super_: Superblock,
    ) -> Self {
        let disk_bytes = disk.properties().len_bytes;
        let mut store = BlockStore::new(
            disk,
            super_.block_bytes,
            options.data_cache_bytes,
            options.read_ahead_bytes,
        );
        store.checksums = MetadataChecksums::for_volume(&super_);
        Self {
            store,
            file_read_ahead: FileReadAhead::new(options.read_ahead_bytes),
            block_maps: Cache::new(options.block_map_cache, 1, 65),
            inodes: Cache::new(options.inode_cache, 1, 1),
            writing: None,
            journal_damage: None,
            super_,
            options,
            disk_bytes,
            metadata_clusters: OnceLock::new(),
        }
    }

    /// Returns the number of blocks on the disk.
    pub(crate) fn disk_blocks(&self) -> u64 {
        self.disk_bytes.checked_div(self.super_.block_bytes.into()).unwrap_or(0)
    }

    /// Returns the options it was opened with.
    pub fn options(&self) -> &OpenOptions {
        &self.options
    }

    /// Returns the checked superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.super_
    }

    /// Returns the root directory.
    pub fn root(&self) -> InodeNumber {
        InodeNumber::ROOT
    }

    /// Returns the inode with this number.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it does not exist or is not in use; [`Error::Corrupt`];
    /// [`Error::Io`].
    pub fn inode(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        let _reading = self.read_lock();
        self.node(number)
    }

    /// Locks out changes. The lock is recursive: callers lock again from within
    /// [`Volume::entries`].
    pub(crate) fn read_lock(&self) -> Option<RwLockReadGuard<'_, WriteState>> {
        self.writing.as_ref().map(|writing| writing.state.read_recursive())
    }

    /// [`Volume::inode`] for callers that hold the lock.
    pub(crate) fn node(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        self.inodes.get_or_load(number.0, || self.load_inode(number))
    }

    /// Returns the `stat` data of an inode.
    ///
    /// # Errors
    /// As [`Volume::inode`].
    pub fn attributes(&self, number: InodeNumber) -> Result<Attributes> {
        Ok(self.attributes_of(&*self.inode(number)?))
    }

    /// Returns the `stat` data of a loaded inode.
    pub fn attributes_of(&self, inode: &Inode) -> Attributes {
        let mut attributes = inode.attributes(&self.super_);
        if let Some(accessed) = self.pending_access_time(inode.number) {
            attributes.accessed = accessed;
        }
        attributes
    }

    fn load_inode(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        let slot = self.inode_slot(number)?;
        match Inode::check(&slot, number, &self.super_) {
            Err(Error::NotFound) if self.store.write_back.has_orphan(number.0) => {
                Inode::parse_used(&slot, number, &self.super_).map(Arc::new)
            }
            // No name references an EA inode; it is reachable only through its attribute.
            Ok(inode) if inode.is_ea_inode() => {
                let what = "inode: holds the value of an extended attribute";
                Err(Error::Corrupt { what, inode: Some(number), block: None })
            }
            checked => checked.map(Arc::new),
        }
    }

    /// Returns the bytes of an inode.
    pub(crate) fn inode_slot(&self, number: InodeNumber) -> Result<SharedBytes> {
        let (block, at) = self.inode_location(number)?;
        let block =
            self.store.block(block, Role::InodeTable).map_err(|error| error.with_inode(number))?;
        let len = saturating_usize(u64::from(self.super_.inode_bytes));
        Ok(block.slice(at..at.saturating_add(len)))
    }

    /// Returns the block of an inode and its offset there.
    fn inode_location(&self, number: InodeNumber) -> Result<(FsBlock, usize)> {
        let nth = number.0.checked_sub(1).filter(|nth| *nth < self.super_.inodes);
        let nth = nth.ok_or(Error::NotFound)?;
        let per_group = self.super_.inodes_per_group;
        let group = GroupNumber(nth.checked_div(per_group).unwrap_or(0));
        let in_group = u64::from(nth.checked_rem(per_group).unwrap_or(0));
        let table = self.group(group).map_err(|error| error.with_inode(number))?.inode_table;
        let at = in_group.saturating_mul(u64::from(self.super_.inode_bytes));
        let block_bytes = u64::from(self.super_.block_bytes);
        let block = table.offset(at.checked_div(block_bytes).unwrap_or(0));
        Ok((block, saturating_usize(at.checked_rem(block_bytes).unwrap_or(0))))
    }

    fn group(&self, group: GroupNumber) -> Result<GroupDescriptor> {
        let (block, slot) = self.super_.descriptor_location(group);
        let bytes = self.store.block(block, Role::Descriptors)?;
        if !group::has_valid_checksum(&bytes, slot, &self.super_, group) {
            return Err(Error::corrupt("group descriptor: checksum").with_block(block));
        }
        let group = GroupDescriptor::read(&bytes, slot, &self.super_)?.check(&self.super_);
        group.map_err(|error| error.with_block(block))
    }

    /// Returns the `statfs` data.
    pub fn space(&self) -> StatFs {
        let super_ = &self.super_;
        let writer = self.read_lock();
        let (free_blocks, free_inodes) =
            writer.as_ref().map_or((super_.free_blocks, u64::from(super_.free_inodes)), |writer| {
                writer.free_counts()
            });
        StatFs {
            block_bytes: super_.block_bytes,
            blocks: super_.blocks.saturating_sub(self.overhead()),
            free_blocks,
            available_blocks: free_blocks.saturating_sub(super_.reserved_total()),
            inodes: u64::from(super_.inodes),
            free_inodes,
            name_bytes_max: 255,
            id: fsid(&super_.uuid),
        }
    }

    /// Returns the blocks that no file can use, including the journal.
    fn overhead(&self) -> u64 {
        let ratio = u64::from(self.super_.cluster_blocks);
        let claimed = u64::from(self.super_.overhead_clusters).saturating_mul(ratio);
        // Linux trusts the superblock only if counting takes long: a tool that changed the volume
        // may not have updated the field.
        if ratio > 1 && claimed != 0 && claimed < self.super_.blocks {
            return claimed;
        }
        let journal = self.super_.journal.and_then(|number| self.inode(number).ok());
        let bytes = journal.map_or(0, |journal| journal.size_bytes);
        let blocks = bytes.div_ceil(u64::from(self.super_.block_bytes));
        if self.super_.cluster_blocks == 1 {
            return self.super_.overhead().saturating_add(blocks);
        }
        let own = self.metadata_clusters.get_or_init(|| self.count_metadata_clusters());
        own.saturating_add(blocks.div_ceil(ratio)).saturating_mul(ratio)
    }

    /// Counts the clusters with metadata of the volume. Unreadable descriptors count as none.
    fn count_metadata_clusters(&self) -> u64 {
        let super_ = &self.super_;
        let mut own: Vec<(u64, u64)> = Vec::new();
        let mut push = |start: FsBlock, blocks: u64| {
            let ratio = u64::from(super_.cluster_blocks);
            let cluster = |block: u64| block.checked_div(ratio).unwrap_or(0);
            let end = start.offset(blocks).0.div_ceil(ratio);
            own.push((cluster(start.0), end));
        };
        let block_bytes = u64::from(super_.block_bytes);
        for number in (0..super_.groups).map(GroupNumber) {
            let start = super_.group_start(number);
            // The superblock may claim any number of groups; these are beyond the disk.
            if start.0.saturating_mul(block_bytes) >= self.disk_bytes {
                break;
            }
            push(start, super_.backup_blocks(number));
            let Ok(group) = self.group(number) else { continue };
            push(group.block_bitmap, 1);
            push(group.inode_bitmap, 1);
            push(group.inode_table, super_.inode_table_blocks().into());
        }
        own.sort_unstable();
        let mut end = 0;
        own.into_iter().fold(0, |sum: u64, (from, to)| {
            let fresh = to.saturating_sub(from.max(end));
            end = end.max(to);
            sum.saturating_add(fresh)
        })
    }

    /// Returns the reason why the volume must not be written: a damaged journal, or its features.
    pub fn read_only_reason(&self) -> Option<String> {
        let is_claimed = self.writing.as_ref().is_some_and(|writing| writing.claim.is_some());
        self.journal_damage_text().or_else(|| self.super_.read_only_reason(is_claimed))
    }

    /// Returns the reason why some changes committed in the journal cannot be read.
    pub fn journal_damage(&self) -> Option<&Error> {
        self.journal_damage.as_ref()
    }

    /// Describes the damage of the journal and what to do.
    pub(crate) fn journal_damage_text(&self) -> Option<String> {
        let damage = self.journal_damage.as_ref()?;
        Some(format!(
            "the journal is damaged ({damage}): transactions from there on are not \
             replayed; copy what can be read, then let e2fsck repair the volume"
        ))
    }

    /// Returns true if a power cut may have left errors that `e2fsck -p` repairs: the volume was
    /// not unmounted, has no journal, and its disk is not atomic.
    pub fn needs_preen(&self) -> bool {
        !self.super_.clean && self.super_.journal.is_none() && !self.store.is_atomic
    }

    /// Returns the description of the volume.
    pub fn info(&self) -> Info {
        let super_ = &self.super_;
        let mut features = super_.compatible.names();
        features.extend(super_.incompatible.names());
        features.extend(super_.read_only_compatible.names());
        Info {
            kind: super_.kind(),
            label: super_.label.clone(),
            uuid: super_.uuid,
            last_mounted: super_.last_mounted.clone(),
            revision: super_.revision,
            features,
            read_only_reason: self.read_only_reason(),
            clean: super_.clean,
            errors: super_.errors,
            truncated: super_.len_bytes() > self.disk_bytes,
            len_bytes: super_.len_bytes(),
            space: self.space(),
            reserved_blocks: super_.reserved_blocks,
            groups: super_.groups,
            blocks_per_group: super_.blocks_per_group,
            inodes_per_group: super_.inodes_per_group,
            inode_bytes: super_.inode_bytes,
            dates: super_.dates,
            mounts: super_.mounts,
        }
    }

    /// Returns the statistics of the caches and the device.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            inodes: self.inodes.statistics(),
            block_maps: self.block_maps.statistics(),
            data: self.store.cache_statistics(),
            device: self.store.device_statistics(),
        }
    }
}

impl Superblock {
    /// Returns true if the volume has multi-mount protection.
    pub(crate) fn has_mmp(&self) -> bool {
        self.incompatible.contains(Incompatible::MMP)
    }

    /// Returns the reason why the features forbid writing, if any; `is_claimed` says that this host
    /// holds the MMP claim.
    pub(crate) fn read_only_reason(&self, is_claimed: bool) -> Option<String> {
        let mut writable = Incompatible::WRITABLE | Incompatible::RECOVER;
        if is_claimed {
            writable |= Incompatible::MMP;
        }
        let mut unknown = self.incompatible.difference(writable).names();
        unknown.extend(self.read_only_compatible.difference(ReadOnlyCompatible::WRITABLE).names());
        // Only a mount renews the MMP claim.
        let next = match self.has_mmp() && !is_claimed {
            true => {
                "; a mount can write it, or where one host alone uses the volume, \
                     `tune2fs -O ^mmp` takes mmp away"
            }
            false => "",
        };
        (!unknown.is_empty()).then(|| format!("writing needs: {}{next}", unknown.join(", ")))
    }
}

/// Returns the two halves of the UUID, folded as Linux does.
fn fsid(uuid: &[u8; 16]) -> u64 {
    let halves = uuid.as_chunks::<8>().0.iter().map(|half| u64::from_le_bytes(*half));
    halves.fold(0, |id, half| id ^ half)
}
