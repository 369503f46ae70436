//! Reading of a volume. Callers on a writable volume hold its lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use draconis_device::Disk;

use crate::blocks::BlockStore;
use crate::blocks::checksums::MetadataChecksums;
use crate::blocks::data::SharedBytes;
use crate::blocks::read_ahead::FileReadAhead;
use crate::blocks::role::Role;
use crate::cache::{Cache, CacheWeight};
use crate::format::group::{self, GroupDescriptor};
use crate::format::inode::Inode;
use crate::format::superblock::Superblock;
use crate::format::witness;
use crate::map::{RunList, SegmentKey};
use crate::options::OpenOptions;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// Superblock, caches and device of a volume.
#[derive(Debug)]
pub struct VolumeReader {
    /// The superblock.
    pub super_: Superblock,
    /// Caches and device.
    pub store: BlockStore,
    pub(crate) file_read_ahead: FileReadAhead,
    pub(crate) block_maps: Cache<SegmentKey, Arc<RunList>>,
    pub(crate) inodes: Cache<u32, Arc<Inode>>,
    /// Size of the device in bytes.
    pub disk_bytes: u64,
    /// True if the volume may change between two reads.
    pub(crate) is_writable: bool,
    /// True if the descriptors are read from their backups: they lead to no root directory.
    pub(crate) prefers_backups: bool,
    /// True once a backup of a descriptor was used.
    has_used_backup: AtomicBool,
}

impl CacheWeight for Arc<Inode> {
    fn weight(&self) -> u64 {
        1
    }
}

impl VolumeReader {
    /// Returns a reader of the volume on `disk` with this superblock.
    pub fn new(disk: Arc<dyn Disk>, options: &OpenOptions, super_: Superblock) -> Self {
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
            super_,
            disk_bytes,
            is_writable: false,
            prefers_backups: false,
            has_used_backup: AtomicBool::new(false),
        }
    }

    /// Says nothing of backups that are used: another reader of the volume does.
    pub(crate) fn without_warnings(self) -> Self {
        Self { has_used_backup: AtomicBool::new(true), ..self }
    }

    /// Returns the number of blocks on the disk.
    pub fn disk_blocks(&self) -> u64 {
        self.disk_bytes.checked_div(self.super_.block_bytes.into()).unwrap_or(0)
    }

    /// Returns the inode with this number.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Io`].
    pub fn node(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        self.inodes.get_or_load(number.0, || self.load_inode(number))
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
    pub fn inode_slot(&self, number: InodeNumber) -> Result<SharedBytes> {
        let (block, at) = self.inode_location(number)?;
        let block =
            self.store.block(block, Role::InodeTable).map_err(|error| error.with_inode(number))?;
        let len = saturating_usize(u64::from(self.super_.inode_bytes));
        Ok(block.slice(at..at.saturating_add(len)))
    }

    /// Returns the block of an inode and its offset there.
    pub(crate) fn inode_location(&self, number: InodeNumber) -> Result<(FsBlock, usize)> {
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

    /// Returns the descriptor of a group. On a read-only volume a damaged one is replaced by its
    /// first valid backup, which says where the structures are, but nothing about their use. Without
    /// a backup one that makes sense is used in spite of its checksum.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Io`].
    pub fn group(&self, group: GroupNumber) -> Result<GroupDescriptor> {
        let (block, slot) = self.super_.descriptor_location(group);
        if self.prefers_backups
            && let Some(backup) = self.backup_descriptor(group, block, slot)
        {
            return Ok(backup);
        }
        self.descriptor_in(block, slot, group).or_else(|error| {
            if self.is_writable {
                return Err(error);
            }
            let (used, found) = match self.backup_descriptor(group, block, slot) {
                Some(backup) => ("its backup is used", backup),
                None => self.unsealed_descriptor(block, slot, group).ok_or(error.clone())?,
            };
            if !self.has_used_backup.swap(true, Ordering::Relaxed) {
                log::warn!("group {}: {error}: {used}; others likewise", group.0);
            }
            Ok(found)
        })
    }

    fn backup_descriptor(
        &self,
        group: GroupNumber,
        primary: FsBlock,
        slot: u32,
    ) -> Option<GroupDescriptor> {
        let nth = group.0.checked_div(self.super_.descriptors_per_block())?;
        let copies = self.super_.descriptor_locations(nth).into_iter();
        let mut copies = copies.filter(|at| *at != primary && self.super_.is_valid_block(*at));
        let found = copies.find_map(|at| self.descriptor_in(at, slot, group).ok())?;
        Some(GroupDescriptor { flags: 0, unused_inodes: 0, ..found })
    }

    /// Returns a descriptor with a wrong checksum, with one bit changed back if that explains it, and
    /// what was done.
    fn unsealed_descriptor(
        &self,
        block: FsBlock,
        slot: u32,
        group: GroupNumber,
    ) -> Option<(&'static str, GroupDescriptor)> {
        let bytes = self.store.block(block, Role::Descriptors).ok()?.to_vec();
        let read = |bytes: &[u8]| {
            GroupDescriptor::read(bytes, slot, &self.super_).ok()?.check(&self.super_).ok()
        };
        let mended = witness::mend_descriptor(&bytes, slot, &self.super_, group);
        match mended.and_then(|(_, mended)| read(&mended)) {
            Some(mended) => Some(("one bit of it is changed back", mended)),
            None => {
                let found = GroupDescriptor { flags: 0, unused_inodes: 0, ..read(&bytes)? };
                Some(("it has no backup, and is used as it is", found))
            }
        }
    }

    fn descriptor_in(
        &self,
        block: FsBlock,
        slot: u32,
        group: GroupNumber,
    ) -> Result<GroupDescriptor> {
        let bytes = self.store.block(block, Role::Descriptors)?;
        if !group::has_valid_checksum(&bytes, slot, &self.super_, group) {
            return Err(Error::corrupt("group descriptor: checksum").with_block(block));
        }
        let group = GroupDescriptor::read(&bytes, slot, &self.super_)?.check(&self.super_);
        group.map_err(|error| error.with_block(block))
    }
}
