//! An open volume: its reader, and the state of writing behind a lock.
//!
//! The public calls lock here: readers share the write lock, changes are transactions.

mod changing;
mod commits;
mod reading;
mod transact;
mod write_out;

use std::sync::{Arc, OnceLock};

use draconis_device::Disk;
pub use draconis_types::StatFs;
use draconis_types::lock::RecursiveReadGuard;

use crate::alloc::Groups;
use crate::blocks::DeviceStatistics;
use crate::cache::CacheStatistics;
use crate::dir::Cookie;
use crate::format::superblock::{Superblock, Timestamps};
use crate::options::OpenOptions;
use crate::reader::VolumeReader;
use crate::write_context::{WriteContext, WriteState};
use crate::{Error, FsBlock, GroupNumber, InodeNumber};

/// An open ext volume. All methods take `&self`: share it.
#[derive(Debug)]
pub struct Volume {
    pub(crate) reader: VolumeReader,
    /// State of a writable volume; `None` on a read-only one.
    pub(crate) writing: Option<WriteContext>,
    /// Reason why some changes committed in the journal cannot be read.
    pub(crate) journal_damage: Option<Error>,
    /// What stands in for a damaged superblock.
    pub(crate) substitute: Option<String>,
    /// Clusters of the volume's own metadata, once counted.
    metadata_clusters: OnceLock<u64>,
    options: OpenOptions,
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
    pub fn open_unreplayed(disk: Arc<dyn Disk>, options: OpenOptions, super_: Superblock) -> Self {
        Self {
            reader: VolumeReader::new(disk, &options, super_),
            writing: None,
            journal_damage: None,
            substitute: None,
            metadata_clusters: OnceLock::new(),
            options,
        }
    }

    /// Makes the volume writable.
    pub(crate) fn set_writing(&mut self, writing: WriteContext) {
        self.reader.is_writable = true;
        self.writing = Some(writing);
    }

    /// Returns the options it was opened with.
    pub fn options(&self) -> &OpenOptions {
        &self.options
    }

    /// Returns the checked superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.reader.super_
    }

    /// Returns the root directory.
    pub fn root(&self) -> InodeNumber {
        InodeNumber::ROOT
    }

    /// Locks out changes. The lock is recursive: callers lock again from within
    /// [`Volume::entries`].
    pub(crate) fn read_lock(&self) -> Option<RecursiveReadGuard<'_, WriteState>> {
        self.writing.as_ref().map(|writing| writing.state.read())
    }

    /// Returns the `statfs` data.
    pub fn space(&self) -> StatFs {
        let super_ = &self.reader.super_;
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
        let ratio = u64::from(self.reader.super_.cluster_blocks);
        let claimed = u64::from(self.reader.super_.overhead_clusters).saturating_mul(ratio);
        // Linux trusts the superblock only if counting takes long: a tool that changed the volume
        // may not have updated the field.
        if ratio > 1 && claimed != 0 && claimed < self.reader.super_.blocks {
            return claimed;
        }
        let journal = self.reader.super_.journal.and_then(|number| self.inode(number).ok());
        let bytes = journal.map_or(0, |journal| journal.size_bytes);
        let blocks = bytes.div_ceil(u64::from(self.reader.super_.block_bytes));
        if self.reader.super_.cluster_blocks == 1 {
            return self.reader.super_.overhead().saturating_add(blocks);
        }
        let own = self.metadata_clusters.get_or_init(|| self.count_metadata_clusters());
        own.saturating_add(blocks.div_ceil(ratio)).saturating_mul(ratio)
    }

    /// Counts the clusters with metadata of the volume. Unreadable descriptors count as none.
    fn count_metadata_clusters(&self) -> u64 {
        let super_ = &self.reader.super_;
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
            if start.0.saturating_mul(block_bytes) >= self.reader.disk_bytes {
                break;
            }
            push(start, super_.backup_blocks(number));
            let Ok(group) = self.reader.group(number) else { continue };
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

    /// Returns the reason why the volume must not be written: a damaged superblock or journal, or its
    /// features.
    pub fn read_only_reason(&self) -> Option<String> {
        let is_claimed = self.writing.as_ref().is_some_and(|writing| writing.claim.is_some());
        self.substitute
            .clone()
            .or_else(|| self.journal_damage_text())
            .or_else(|| self.reader.super_.read_only_reason(is_claimed))
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
        !self.reader.super_.clean
            && self.reader.super_.journal.is_none()
            && !self.reader.store.is_atomic
    }

    /// Returns the description of the volume.
    pub fn info(&self) -> Info {
        let super_ = &self.reader.super_;
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
            truncated: super_.len_bytes() > self.reader.disk_bytes,
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

    /// Returns the first damage found by a check of all group descriptors and the root directory,
    /// to warn users before they use the volume. A check finds the rest.
    pub fn quick_check(&self) -> Option<Error> {
        if let Err(error @ Error::Corrupt { .. }) =
            Groups::load(&self.reader.store, &self.reader.super_)
        {
            return Some(error);
        }
        let mut broken = None;
        let listed = self.entries(self.root(), Cookie::default(), false, |found| {
            broken = found.err().map(|damage| damage.error);
            broken.is_none()
        });
        listed.err().or(broken)
    }

    /// Returns what reads inodes and their contents, without this volume's locks.
    #[doc(hidden)]
    pub const fn reader(&self) -> &VolumeReader {
        &self.reader
    }

    /// Returns the statistics of the caches and the device.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            inodes: self.reader.inodes.statistics(),
            block_maps: self.reader.block_maps.statistics(),
            data: self.reader.store.cache_statistics(),
            device: self.reader.store.device_statistics(),
        }
    }
}

/// Returns the two halves of the UUID, folded as Linux does.
fn fsid(uuid: &[u8; 16]) -> u64 {
    let halves = uuid.as_chunks::<8>().0.iter().map(|half| u64::from_le_bytes(*half));
    halves.fold(0, |id, half| id ^ half)
}
