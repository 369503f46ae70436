//! A volume that is open for reading.

use std::sync::{Arc, OnceLock};

use draconis_device::{Disk, Extent};
use draconis_exchange::contract::Attributes;
pub use draconis_exchange::contract::Space;
use draconis_exchange::heap::Block;
use parking_lot::RwLockReadGuard;

use crate::alloc::Groups;
use crate::blocks::data::Data;
use crate::blocks::role::Role;
use crate::blocks::stream::Streams;
use crate::blocks::sums::MetadataSums;
use crate::blocks::{DeviceStatistics, Store};
use crate::cache::{Cache, CacheStatistics, Weigh};
use crate::dir::Cookie;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::{self, Group};
use crate::format::inode::Inode;
use crate::format::superblock::{self, Dates, RawSuperblock, Superblock};
use crate::journal::{self, Recovered};
use crate::map::{Runs, SegmentKey};
use crate::transaction::{WriteSide, Writer};
use crate::units::index;
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// How a volume is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Inodes kept in memory; about 300 bytes each.
    pub inode_cache: u64,
    /// Entries of the block-map cache: each has room for 64 runs of blocks, 1.5 KiB.
    pub block_map_cache: u64,
    /// Bytes of the data cache; metadata and file contents share it.
    pub data_cache_bytes: u64,
    /// Whether native listings show `.` and `..`.
    pub dots: bool,
    /// The most that is read ahead of a stream, in bytes; 0 reads nothing ahead.
    pub read_ahead_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            inode_cache: 65_536,
            block_map_cache: 4_096,
            data_cache_bytes: 64 << 20,
            dots: false,
            read_ahead_bytes: 4 << 20,
        }
    }
}

/// An ext volume that is open for reading. Everything is `&self`: share it.
#[derive(Debug)]
pub struct Volume {
    pub(crate) super_: Superblock,
    pub(crate) store: Store,
    pub(crate) streams: Streams,
    pub(crate) maps: Cache<SegmentKey, Arc<Runs>>,
    pub(crate) inodes: Cache<u32, Arc<Inode>>,
    /// What a volume has that is written; none on one that is only read.
    pub(crate) writing: Option<WriteSide>,
    /// Why some of what its journal has committed cannot be read.
    journal_damage: Option<Error>,
    pub(crate) disk_bytes: u64,
    /// Clusters of the volume's own, once they were counted.
    own_clusters: OnceLock<u64>,
    options: Options,
}

impl Weigh for Arc<Inode> {
    fn weight(&self) -> u64 {
        1
    }
}

/// What there is to know of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Info {
    /// `ext2`, `ext3` or `ext4`.
    pub kind: &'static str,
    /// Label, without padding.
    pub label: Vec<u8>,
    /// Identity.
    pub uuid: [u8; 16],
    /// Where it was mounted last.
    pub last_mounted: Vec<u8>,
    /// Revision and minor revision.
    pub revision: (u32, u16),
    /// Names of all features, as `mke2fs -O` spells them.
    pub features: Vec<String>,
    /// Why it can only be read, if it says so.
    pub read_only_reason: Option<String>,
    /// Unmounted properly.
    pub clean: bool,
    /// Damage was found and left.
    pub errors: bool,
    /// The disk is shorter than the volume: what lies beyond cannot be read.
    pub truncated: bool,
    /// Length of the volume in bytes.
    pub len_bytes: u64,
    /// Blocks, groups and inodes, used and free.
    pub space: Space,
    /// Blocks kept for the superuser.
    pub reserved_blocks: u64,
    /// Groups.
    pub groups: u32,
    /// Blocks of a group.
    pub blocks_per_group: u32,
    /// Inodes of a group.
    pub inodes_per_group: u32,
    /// Bytes of an inode.
    pub inode_bytes: u32,
    /// Dates.
    pub dates: Dates,
    /// Mounts since the last check.
    pub mounts: u16,
}

/// How the caches and the device do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Inode cache, in inodes.
    pub inodes: CacheStatistics,
    /// Block-map cache, in entries of 64 runs.
    pub block_maps: CacheStatistics,
    /// Data cache, in bytes.
    pub data: CacheStatistics,
    /// What the device was asked.
    pub device: DeviceStatistics,
}

impl Volume {
    /// Opens the volume on `disk`. What its journal holds and is not in place yet is read from
    /// the journal, of a damaged one what was committed before the damage; the disk stays as it is.
    ///
    /// # Errors
    /// [`Error::NotExt`]; [`Error::Unsupported`] naming everything it needs;
    /// [`Error::Corrupt`] if its superblock makes no sense; [`Error::Io`].
    pub fn open(disk: Arc<dyn Disk>, options: Options) -> Result<Self> {
        let mut super_ = read_superblock(&*disk)?;
        let (mut disk, mut damage) = (disk, None);
        if super_.needs_recovery() {
            Recovered { disk, super_, damage } = journal::replayed(disk, &super_)?;
        }
        let disk_bytes = disk.properties().len_bytes;
        if super_.len_bytes() > disk_bytes {
            let (volume, disk) = (super_.len_bytes(), disk_bytes);
            log::warn!("the volume has {volume} bytes, its image only {disk}: the rest is missing");
        }
        let mut volume = Self::of(disk, options, super_);
        volume.journal_damage = damage;
        if let Some(reason) = volume.journal_reason() {
            log::warn!("{reason}");
        }
        Ok(volume)
    }

    /// The volume on `disk` as that is, with this superblock, whatever its journal holds.
    pub(crate) fn of(disk: Arc<dyn Disk>, options: Options, super_: Superblock) -> Self {
        let disk_bytes = disk.properties().len_bytes;
        let mut store = Store::new(
            disk,
            super_.block_bytes,
            options.data_cache_bytes,
            options.read_ahead_bytes,
        );
        store.sums = MetadataSums::of(&super_);
        Self {
            store,
            streams: Streams::new(options.read_ahead_bytes),
            maps: Cache::new(options.block_map_cache, 1, 65),
            inodes: Cache::new(options.inode_cache, 1, 1),
            writing: None,
            journal_damage: None,
            super_,
            options,
            disk_bytes,
            own_clusters: OnceLock::new(),
        }
    }

    /// Blocks that the disk has.
    pub(crate) fn disk_blocks(&self) -> u64 {
        self.disk_bytes.checked_div(self.super_.block_bytes.into()).unwrap_or(0)
    }

    /// How it was opened.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The superblock, checked.
    pub fn superblock(&self) -> &Superblock {
        &self.super_
    }

    /// The root directory.
    pub fn root(&self) -> InodeNumber {
        InodeNumber::ROOT
    }

    /// The inode of that number.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none or it is not in use; [`Error::Corrupt`];
    /// [`Error::Io`].
    pub fn inode(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        let _reading = self.reading();
        self.node(number)
    }

    /// Shuts changes out. Its holder may take it again: callers do, from within
    /// [`Volume::entries`].
    pub(crate) fn reading(&self) -> Option<RwLockReadGuard<'_, Writer>> {
        self.writing.as_ref().map(|writing| writing.gate.read_recursive())
    }

    /// [`Volume::inode`] for those who hold the gate.
    pub(crate) fn node(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        self.inodes.get_or_load(number.0, || self.load_inode(number))
    }

    /// What `stat` shows of an inode.
    ///
    /// # Errors
    /// As [`Volume::inode`].
    pub fn attributes(&self, number: InodeNumber) -> Result<Attributes> {
        Ok(self.attributes_of(&*self.inode(number)?))
    }

    /// What `stat` shows of an inode at hand.
    pub fn attributes_of(&self, inode: &Inode) -> Attributes {
        let mut attributes = inode.attributes(&self.super_);
        if let Some(accessed) = self.noted_access(inode.number) {
            attributes.accessed = accessed;
        }
        attributes
    }

    fn load_inode(&self, number: InodeNumber) -> Result<Arc<Inode>> {
        let slot = self.inode_slot(number)?;
        match Inode::check(&slot, number, &self.super_) {
            Err(Error::NotFound) if self.store.overlay.has_orphan(number.0) => {
                Inode::of_slot(&slot, number, &self.super_).map(Arc::new)
            }
            // No name leads to it, and nothing but the attribute may show it.
            Ok(inode) if inode.is_value() => {
                let what = "inode: holds the value of an extended attribute";
                Err(Error::Corrupt { what, inode: Some(number), block: None })
            }
            checked => checked.map(Arc::new),
        }
    }

    /// All the bytes of an inode.
    pub(crate) fn inode_slot(&self, number: InodeNumber) -> Result<Data> {
        let (block, at) = self.inode_place(number)?;
        let block =
            self.store.block(block, Role::Inodes).map_err(|error| error.of_inode(number))?;
        let len = index(u64::from(self.super_.inode_bytes));
        Ok(block.slice(at..at.saturating_add(len)))
    }

    /// The block an inode is in, and where in that block.
    fn inode_place(&self, number: InodeNumber) -> Result<(FsBlock, usize)> {
        let nth = number.0.checked_sub(1).filter(|nth| *nth < self.super_.inodes);
        let nth = nth.ok_or(Error::NotFound)?;
        let per_group = self.super_.inodes_per_group;
        let group = GroupNumber(nth.checked_div(per_group).unwrap_or(0));
        let in_group = u64::from(nth.checked_rem(per_group).unwrap_or(0));
        let table = self.group(group).map_err(|error| error.of_inode(number))?.inode_table;
        let at = in_group.saturating_mul(u64::from(self.super_.inode_bytes));
        let block_bytes = u64::from(self.super_.block_bytes);
        let block = table.after(at.checked_div(block_bytes).unwrap_or(0));
        Ok((block, index(at.checked_rem(block_bytes).unwrap_or(0))))
    }

    fn group(&self, group: GroupNumber) -> Result<Group> {
        let (block, slot) = self.super_.descriptor_place(group);
        let bytes = self.store.block(block, Role::Descriptors)?;
        if !group::is_sealed(&bytes, slot, &self.super_, group) {
            return Err(Error::corrupt("group descriptor: checksum").in_block(block));
        }
        let group = Group::read(&bytes, slot, &self.super_)?.check(&self.super_);
        group.map_err(|error| error.in_block(block))
    }

    /// What `statfs` shows.
    pub fn space(&self) -> Space {
        let super_ = &self.super_;
        let writer = self.reading();
        let (free_blocks, free_inodes) = writer
            .as_ref()
            .map_or((super_.free_blocks, u64::from(super_.free_inodes)), |writer| writer.free());
        Space {
            block_bytes: super_.block_bytes,
            blocks: super_.blocks.saturating_sub(self.overhead()),
            free_blocks,
            available_blocks: free_blocks.saturating_sub(super_.set_aside()),
            inodes: u64::from(super_.inodes),
            free_inodes,
            name_bytes_max: 255,
            id: fsid(&super_.uuid),
        }
    }

    /// Blocks that can never be a file's, the journal among them.
    fn overhead(&self) -> u64 {
        let ratio = u64::from(self.super_.cluster_blocks);
        let claimed = u64::from(self.super_.overhead_clusters).saturating_mul(ratio);
        // Linux believes the superblock only where counting takes long: tools that changed the
        // volume may have left what was true before.
        if ratio > 1 && claimed != 0 && claimed < self.super_.blocks {
            return claimed;
        }
        let journal = self.super_.journal.and_then(|number| self.inode(number).ok());
        let bytes = journal.map_or(0, |journal| journal.size_bytes);
        let blocks = bytes.div_ceil(u64::from(self.super_.block_bytes));
        if self.super_.cluster_blocks == 1 {
            return self.super_.overhead().saturating_add(blocks);
        }
        let own = self.own_clusters.get_or_init(|| self.count_own_clusters());
        own.saturating_add(blocks.div_ceil(ratio)).saturating_mul(ratio)
    }

    /// Clusters that the volume's own structures are in, whole ones. Descriptors that cannot be
    /// read count for nothing.
    fn count_own_clusters(&self) -> u64 {
        let super_ = &self.super_;
        let mut own: Vec<(u64, u64)> = Vec::new();
        let mut push = |start: FsBlock, blocks: u64| {
            let ratio = u64::from(super_.cluster_blocks);
            let cluster = |block: u64| block.checked_div(ratio).unwrap_or(0);
            let end = start.after(blocks).0.div_ceil(ratio);
            own.push((cluster(start.0), end));
        };
        let block_bytes = u64::from(super_.block_bytes);
        for number in (0..super_.groups).map(GroupNumber) {
            let start = super_.group_start(number);
            // The superblock may claim any number of groups; these are not there.
            if start.0.saturating_mul(block_bytes) >= self.disk_bytes {
                break;
            }
            push(start, super_.copy_blocks(number));
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

    /// Why the volume must not be written: its journal is damaged, or its features say so.
    pub fn read_only_reason(&self) -> Option<String> {
        let is_claimed = self.writing.as_ref().is_some_and(|writing| writing.claim.is_some());
        self.journal_reason().or_else(|| self.super_.read_only_reason(is_claimed))
    }

    /// Why some of what the journal has committed cannot be read.
    pub fn journal_damage(&self) -> Option<&Error> {
        self.journal_damage.as_ref()
    }

    /// What is wrong with the journal, and what to do.
    fn journal_reason(&self) -> Option<String> {
        let damage = self.journal_damage.as_ref()?;
        Some(format!(
            "the journal is damaged ({damage}): transactions from there on are not \
             replayed; copy what can be read, then let e2fsck repair the volume"
        ))
    }

    /// Whether a power cut may have left what `e2fsck -p` repairs: the volume was not unmounted,
    /// has no journal, and its disk is not atomic.
    pub fn needs_preen(&self) -> bool {
        !self.super_.clean && self.super_.journal.is_none() && !self.store.is_atomic
    }

    /// The first damage that a look at all group descriptors and the root directory finds: what a
    /// user should hear before using the volume. [`check`](crate::check) finds the rest.
    pub fn damage_at_a_glance(&self) -> Option<Error> {
        if let Err(error @ Error::Corrupt { .. }) = Groups::load(&self.store, &self.super_) {
            return Some(error);
        }
        let mut broken = None;
        let listed = self.entries(self.root(), Cookie::default(), false, |found| {
            broken = found.err().map(|damage| damage.error);
            broken.is_none()
        });
        listed.err().or(broken)
    }

    /// What there is to know of the volume.
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

    /// How the caches and the device do.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            inodes: self.inodes.statistics(),
            block_maps: self.maps.statistics(),
            data: self.store.cache_statistics(),
            device: self.store.device_statistics(),
        }
    }
}

impl Superblock {
    /// Which of the family the volume is, as `mke2fs -t` names it: one with a journal alone is
    /// `ext3`, one with any feature that came with ext4 is `ext4`.
    pub fn kind(&self) -> &'static str {
        let newer = self.incompatible.intersects(Incompatible::OF_EXT4)
            || self.read_only_compatible.intersects(ReadOnlyCompatible::OF_EXT4);
        match (newer, self.compatible.contains(Compatible::HAS_JOURNAL)) {
            (true, _) => "ext4",
            (false, true) => "ext3",
            (false, false) => "ext2",
        }
    }

    /// Whether hosts must see all the time that one of them uses the volume.
    pub(crate) fn has_mmp(&self) -> bool {
        self.incompatible.contains(Incompatible::MMP)
    }

    /// Why the volume must not be written, if it says so by its features; whether it `is_claimed`
    /// for this host.
    pub(crate) fn read_only_reason(&self, is_claimed: bool) -> Option<String> {
        let mut writable = Incompatible::WRITABLE | Incompatible::RECOVER;
        if is_claimed {
            writable |= Incompatible::MMP;
        }
        let mut unknown = self.incompatible.difference(writable).names();
        unknown.extend(self.read_only_compatible.difference(ReadOnlyCompatible::WRITABLE).names());
        // Values in inodes of their own count for the quotas of those that have the attributes.
        if self.incompatible.contains(Incompatible::EA_INODE)
            && self.read_only_compatible.contains(ReadOnlyCompatible::QUOTA)
        {
            unknown.push("ea_inode beside quota".to_owned());
        }
        // Only a mount says all the time that this host uses the volume.
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

/// The two halves of the identity, folded as Linux folds them.
fn fsid(uuid: &[u8; 16]) -> u64 {
    let halves = uuid.as_chunks::<8>().0.iter().map(|half| u64::from_le_bytes(*half));
    halves.fold(0, |id, half| id ^ half)
}

/// The superblock of what `disk` holds.
pub(crate) fn read_superblock(disk: &dyn Disk) -> Result<Superblock> {
    let properties = disk.properties();
    let sector = u64::from(properties.sector_bytes.max(1));
    let end = superblock::OFFSET_BYTES.saturating_add(superblock::LEN_BYTES as u64);
    let len = end.checked_next_multiple_of(sector).unwrap_or(u64::MAX);
    if len > properties.len_bytes {
        return Err(Error::NotExt);
    }
    let read = disk.read_now(Extent::new(0, len), Block::private(index(len)));
    let block = read.map_err(|refused| Error::Io(refused.error))?;
    let mut bytes = [0; superblock::LEN_BYTES];
    block.copy_out(index(superblock::OFFSET_BYTES), &mut bytes);
    RawSuperblock::view(&bytes)?.check()
}
