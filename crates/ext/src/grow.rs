//! Growing a volume that is not in use: the last group is filled up, groups are added, and their
//! descriptors take blocks of the reserve that follows the table.
//!
//! ```text
//!   before   | super | descriptors | reserve ........... | .. | last group, cut |
//!   after    | super | descriptors ....... | reserve ... | .. | last group .... | new | new |
//!                                    └── never moves ──┘
//! ```
//! The reserve belongs to inode 7. One block of its map, the top, has a pointer for each reserved
//! block of group 0, which in turn has one for each copy of itself in other groups.
//!
//! Law 1: everything is known to fit before a byte is written, the length of a file included.
//! Law 2: nothing moves; what would have to is refused with the largest size that works.
//! Law 3: what a run that was cut off leaves is said in [`write`].

mod write;

pub use write::Target;

use draconis_device::{Disk, Extent};
use draconis_exchange::heap::Block;
use zerocopy::IntoBytes;

use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::{Group, RawGroup};
use crate::format::le32;
use crate::format::slot::Slot;
use crate::format::superblock::{LEN_BYTES, OFFSET_BYTES, RawSuperblock, Superblock};
use crate::mkfs::LEAST_IN_GROUP;
use crate::units::{index, narrow};
use crate::{FsBlock, GroupNumber};

/// The inode that owns the reserve.
const RESIZE_INODE: u32 = 7;
/// Which of its pointers leads to the top of its map.
const TOP_POINTER: usize = 13;

/// Why a volume was not grown.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// It was not unmounted properly, or damage was found and left.
    #[error("the volume is not clean; run e2fsck -f first")]
    NotClean,
    /// The size asked for is less than it has.
    #[error(
        "the volume has {blocks} blocks of {block_bytes} bytes and is not shrunk; \
         make a smaller one with draconis format --from, or use resize2fs"
    )]
    Shrink {
        /// Blocks that it has.
        blocks: u64,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// There is no room for the descriptors of so many groups.
    #[error(
        "{asked_bytes} bytes are too many: with its reserve of descriptors the volume can grow to \
         {largest_bytes} bytes ({}K); resize2fs moves files to go further",
        largest_bytes / 1024
    )]
    TooLarge {
        /// The size asked for, in bytes.
        asked_bytes: u64,
        /// The largest that works, in bytes.
        largest_bytes: u64,
    },
    /// Something about the volume that is not grown here.
    #[error("{0} is not supported by grow; use resize2fs")]
    Unsupported(String),
    /// The disk does not reach to the end of the volume as it is, or as it is to be.
    #[error("the disk has {disk_bytes} bytes, the volume needs {needed_bytes}")]
    ShortDisk {
        /// Bytes of the disk.
        disk_bytes: u64,
        /// Bytes of the volume.
        needed_bytes: u64,
    },
    /// It is no volume, or damaged, or the device failed.
    #[error(transparent)]
    Volume(#[from] crate::Error),
}

impl From<draconis_device::Error> for Error {
    fn from(error: draconis_device::Error) -> Self {
        Self::Volume(error.into())
    }
}

/// What growing answers.
pub type Result<T> = std::result::Result<T, Error>;

/// A volume as it is, and as it is to be.
#[derive(Debug)]
pub struct Growth {
    /// The superblock of group 0, as it is.
    old_raw: RawSuperblock,
    old: Superblock,
    /// The same as it is to be; free counts excepted, which are what they were.
    new_raw: RawSuperblock,
    new: Superblock,
    /// The blocks of descriptors as they are.
    descriptors: Vec<u8>,
    /// Bitmap of the last group as it is, if that is to be filled up.
    last_bitmap: Option<(FsBlock, Vec<u8>)>,
    /// The owner of the reserve, if that has to change.
    owner: Option<Owner>,
}

/// The inode that owns the reserve.
#[derive(Debug)]
struct Owner {
    /// The block that it is in.
    block: FsBlock,
    bytes: Vec<u8>,
    /// Its place in there.
    at: usize,
    /// The top of its map.
    top: FsBlock,
}

impl Growth {
    /// Plans to grow the volume on `disk`, which is not open, to `size_bytes`: less by a part
    /// of a block, and by a last group that would have no room for files. The disk may be
    /// shorter than that until it is written.
    ///
    /// # Errors
    /// All but [`Error::ShortDisk`] for the size to come.
    pub fn plan(disk: &dyn Disk, size_bytes: u64) -> Result<Self> {
        let bytes = read(disk, OFFSET_BYTES, LEN_BYTES as u64)?;
        let old_raw = RawSuperblock::view(&bytes)?.clone();
        let old = old_raw.check()?;
        refuse_what_is_not_grown(disk, &old)?;
        let (new_raw, new) = sized(&old_raw, &old, size_bytes)?;
        let table = old.descriptor_place(GroupNumber(0)).0;
        let descriptors = read_blocks(disk, &old, table, old.descriptor_blocks().into())?;
        let mut growth =
            Self { old_raw, old, new_raw, new, descriptors, last_bitmap: None, owner: None };
        if growth.gained_in_last_group() > 0 {
            let at = growth.descriptor(growth.last_group())?.bg_block_bitmap_lo.get();
            let at = FsBlock(at.into());
            growth.last_bitmap = Some((at, read_blocks(disk, &growth.old, at, 1)?));
        }
        if growth.reserve_changes() {
            growth.owner = Some(growth.find_owner(disk)?);
        }
        Ok(growth)
    }

    /// Bytes of the volume as it is.
    pub fn old_len_bytes(&self) -> u64 {
        self.old.len_bytes()
    }

    /// Bytes of the volume as it is to be; the same if there is nothing to do.
    pub fn len_bytes(&self) -> u64 {
        self.new.len_bytes()
    }

    /// The superblock to come; the free counts are what they were.
    pub fn superblock(&self) -> &Superblock {
        &self.new
    }

    fn last_group(&self) -> GroupNumber {
        GroupNumber(self.old.groups.saturating_sub(1))
    }

    /// Blocks that the group that was last gets.
    fn gained_in_last_group(&self) -> u64 {
        self.new.group_end(self.last_group()).0.saturating_sub(self.old.blocks)
    }

    fn new_groups(&self) -> impl Iterator<Item = GroupNumber> + use<> {
        (self.old.groups..self.new.groups).map(GroupNumber)
    }

    /// Whether pointers of the reserve are added or taken away.
    fn reserve_changes(&self) -> bool {
        let new = &self.new;
        self.old.reserved_descriptor_blocks > 0
            && (new.reserved_descriptor_blocks != self.old.reserved_descriptor_blocks
                || self.new_groups().any(|group| new.has_superblock(group)))
    }

    fn descriptor(&self, group: GroupNumber) -> Result<&RawGroup> {
        Ok(RawGroup::view(&self.descriptors, group.0, &self.old)?)
    }

    /// Finds inode 7, and believes it only if its map is what the superblock says.
    fn find_owner(&self, disk: &dyn Disk) -> Result<Owner> {
        let damaged = || {
            let inode = Some(crate::InodeNumber(RESIZE_INODE));
            crate::Error::Corrupt { what: "reserve of descriptors", inode, block: None }
        };
        let (nth, per_group) = (RESIZE_INODE.saturating_sub(1), self.old.inodes_per_group);
        let group = GroupNumber(nth.checked_div(per_group).ok_or_else(damaged)?);
        let nth = u64::from(nth.checked_rem(per_group).ok_or_else(damaged)?);
        let table =
            Group::read(&self.descriptors, group.0, &self.old)?.check(&self.old)?.inode_table;
        let block_bytes = u64::from(self.old.block_bytes);
        let at = nth.saturating_mul(self.old.inode_bytes.into());
        let block = table.after(at.checked_div(block_bytes).ok_or_else(damaged)?);
        let at = index(at.checked_rem(block_bytes).ok_or_else(damaged)?);
        let mut bytes = read_blocks(disk, &self.old, block, 1)?;
        let slot = Slot::of(bytes.get_mut(at..).ok_or_else(damaged)?)?;
        let top = FsBlock(slot.pointer(TOP_POINTER).into());
        let pointers = read_blocks(disk, &self.old, top, 1)?;
        for (place, block) in reserve(&self.old) {
            if le32(&pointers, place) != Some(block.in_32_bits()?) {
                return Err(damaged().into());
            }
        }
        Ok(Owner { block, bytes, at, top })
    }
}

/// The reserved blocks of group 0, and where in the top of the map each has its pointer: at its
/// place among all descriptor blocks, counted round.
fn reserve(super_: &Superblock) -> impl Iterator<Item = (usize, FsBlock)> + use<> {
    let table = super_.descriptor_place(GroupNumber(0)).0;
    let fan_out = u64::from(super_.block_bytes) / 4;
    let first = u64::from(super_.descriptor_blocks());
    let end = first.saturating_add(super_.reserved_descriptor_blocks.into());
    (first..end).map(move |nth| {
        let place = nth.checked_rem(fan_out).unwrap_or(0).saturating_mul(4);
        (index(place), table.after(nth))
    })
}

fn refuse_what_is_not_grown(disk: &dyn Disk, super_: &Superblock) -> Result<()> {
    let unsupported = |what: &str| Err(Error::Unsupported(what.to_owned()));
    let mut unknown = super_.incompatible.difference(Incompatible::GROWABLE).names();
    unknown.extend(super_.read_only_compatible.difference(ReadOnlyCompatible::GROWABLE).names());
    if !unknown.is_empty() {
        return unsupported(&unknown.join(", "));
    }
    if super_.incompatible.contains(Incompatible::META_BG) {
        return unsupported("meta_bg");
    }
    if super_.compatible.contains(Compatible::SPARSE_SUPER2) {
        return unsupported("sparse_super2");
    }
    let properties = disk.properties();
    if u64::from(properties.sector_bytes) > write::SECTOR_BYTES {
        return unsupported(&format!("a disk with sectors of {} bytes", properties.sector_bytes));
    }
    if super_.needs_recovery() || !super_.clean || super_.errors || super_.last_orphan != 0 {
        return Err(Error::NotClean);
    }
    let needed_bytes = super_.len_bytes();
    if needed_bytes > properties.len_bytes {
        return Err(Error::ShortDisk { disk_bytes: properties.len_bytes, needed_bytes });
    }
    let has_reserve = super_.compatible.contains(Compatible::RESIZE_INODE);
    let reserved = super_.reserved_descriptor_blocks;
    let copies = super_.copy_blocks(GroupNumber(0));
    let needed = copies.saturating_add(tables(super_));
    let fits = needed <= u64::from(super_.blocks_per_group)
        && u32::from(reserved) <= super_.block_bytes / 4
        && (has_reserve || reserved == 0);
    let whole = u64::from(super_.groups).saturating_mul(super_.inodes_per_group.into());
    if !fits || whole != u64::from(super_.inodes) {
        return Err(crate::Error::corrupt("superblock: room for descriptors and inodes").into());
    }
    Ok(())
}

/// Blocks of the bitmaps and the inode table of a group.
fn tables(super_: &Superblock) -> u64 {
    u64::from(super_.inode_table_blocks()).saturating_add(2)
}

/// Groups of which the descriptors and inodes can be counted.
fn most_groups(super_: &Superblock) -> u64 {
    let table = u64::from(super_.descriptor_blocks());
    let table = table.saturating_add(super_.reserved_descriptor_blocks.into());
    let described = table.saturating_mul(super_.descriptors_per_block().into());
    let numbered = u32::MAX.checked_div(super_.inodes_per_group).unwrap_or(0);
    described.min(numbered.into())
}

/// The superblock of a volume of `size_bytes`, free counts excepted.
fn sized(
    raw: &RawSuperblock,
    old: &Superblock,
    size_bytes: u64,
) -> Result<(RawSuperblock, Superblock)> {
    let block_bytes = u64::from(old.block_bytes);
    let first = u64::from(old.first_data_block);
    let per_group = u64::from(old.blocks_per_group);
    let asked = size_bytes.checked_div(block_bytes).unwrap_or(0);
    if asked < old.blocks {
        return Err(Error::Shrink { blocks: old.blocks, block_bytes: old.block_bytes });
    }
    let full = most_groups(old).saturating_mul(per_group).saturating_add(first);
    let full = full.min(u32::MAX.into());
    let too_large = Error::TooLarge {
        asked_bytes: size_bytes,
        largest_bytes: full.saturating_mul(block_bytes),
    };
    if asked > u64::from(u32::MAX) {
        return Err(too_large);
    }
    let rest = asked.saturating_sub(first).checked_rem(per_group).unwrap_or(0);
    let (mut new_raw, mut new) = with_blocks(raw, old, asked)?;
    if rest > 0 && new.groups > old.groups {
        let copies = new.copy_blocks(GroupNumber(new.groups.saturating_sub(1)));
        if rest < copies.saturating_add(tables(&new)).saturating_add(LEAST_IN_GROUP) {
            (new_raw, new) = with_blocks(raw, old, asked.saturating_sub(rest))?;
        }
    }
    if new.blocks > full {
        return Err(too_large);
    }
    Ok((new_raw, new))
}

fn with_blocks(
    raw: &RawSuperblock,
    old: &Superblock,
    blocks: u64,
) -> Result<(RawSuperblock, Superblock)> {
    let mut raw = raw.clone();
    raw.s_blocks_count_lo = FsBlock(blocks).in_32_bits()?.into();
    let grown = raw.check()?;
    let taken = grown.descriptor_blocks().saturating_sub(old.descriptor_blocks());
    let left = u32::from(old.reserved_descriptor_blocks).saturating_sub(taken);
    raw.s_reserved_gdt_blocks = u16::try_from(left).unwrap_or(u16::MAX).into();
    raw.s_inodes_count = grown.groups.saturating_mul(old.inodes_per_group).into();
    let reserved = old.reserved_blocks.saturating_mul(blocks).checked_div(old.blocks);
    raw.s_r_blocks_count_lo = FsBlock(reserved.unwrap_or(0)).in_32_bits()?.into();
    let new = raw.check()?;
    if old.overhead_clusters != 0 {
        let more = new.overhead().saturating_sub(old.overhead());
        raw.s_overhead_blocks = narrow(more).saturating_add(old.overhead_clusters).into();
    }
    Ok((raw, new))
}

fn read(disk: &dyn Disk, at_bytes: u64, len_bytes: u64) -> Result<Vec<u8>> {
    let at = Extent::new(at_bytes, len_bytes);
    let block = disk.read_now(at, Block::private(index(len_bytes)));
    let block = block.map_err(|refused| refused.error)?;
    Ok(block.into_private().as_bytes().to_vec())
}

fn read_blocks(disk: &dyn Disk, super_: &Superblock, at: FsBlock, count: u64) -> Result<Vec<u8>> {
    if !super_.holds(at) || at.after(count).0 > super_.blocks {
        let what = "descriptors: a place outside of the volume";
        return Err(crate::Error::corrupt(what).in_block(at).into());
    }
    let block_bytes = u64::from(super_.block_bytes);
    read(disk, at.0.saturating_mul(block_bytes), count.saturating_mul(block_bytes))
}
