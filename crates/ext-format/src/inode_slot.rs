//! Mutable bytes of an inode, changed field by field; all other bytes stay.

use draconis_types::Time;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use super::inline::{ENTRIES_AT, POINTER_BYTES};
use super::inode::{
    self, EXTRA_BYTES, POINTERS, RawInode, clamp_to_32_bits, flags, low16, split_time,
};
use super::low32;
use super::{extent, le16, le32, xattr};
use crate::{Error, InodeNumber, Result};

const OLD_BYTES: usize = 128;
const XATTR_MAGIC: u32 = 0xEA02_0000;
/// Offset of the project.
const PROJECT_AT: usize = 0x9C;
const POINTERS_AT: usize = 0x28;

/// One of the times of an inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InodeTime {
    /// Last access.
    Accessed,
    /// Last change of the contents.
    Modified,
    /// Last change of the inode.
    Changed,
    /// Creation.
    Created,
}

/// The bytes of one inode.
#[derive(Debug)]
pub struct InodeSlot<'a>(&'a mut [u8]);

/// Comparison of two versions of an inode.
#[derive(Clone, Copy, Debug)]
pub struct InodeDiff<'a> {
    old: &'a [u8],
    new: &'a [u8],
}

impl<'a> InodeDiff<'a> {
    /// Compares the bytes before and after.
    pub const fn new(old: &'a [u8], new: &'a [u8]) -> Self {
        Self { old, new }
    }

    fn differs<T: PartialEq>(self, field: impl Fn(&RawInode) -> T) -> bool {
        match (RawInode::ref_from_prefix(self.old), RawInode::ref_from_prefix(self.new)) {
            (Ok((old, _)), Ok((new, _))) => field(old) != field(new),
            _ => true,
        }
    }

    /// Returns true if the block map or the attribute block changed.
    pub fn changes_blocks(self) -> bool {
        self.differs(|it| (it.i_block, it.i_file_acl_lo, it.i_file_acl_high))
    }

    /// Returns true if the block map, size or flags changed: all that reading a directory depends
    /// on.
    pub fn changes_mapping(self) -> bool {
        self.changes_blocks() || self.differs(|it| (it.i_size_lo, it.i_size_high, it.i_flags))
    }

    /// Returns true if only times and the checksum changed.
    pub fn changes_only_times(self) -> bool {
        let without_times = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            let zero = Time { seconds: 0, nanoseconds: 0 };
            if let Ok(mut slot) = InodeSlot::from_bytes(&mut bytes) {
                [InodeTime::Accessed, InodeTime::Modified, InodeTime::Changed]
                    .into_iter()
                    .for_each(|stamp| slot.set_time(stamp, zero));
            }
            // The checksum differs as well, which adds nothing.
            inode::clear_checksum(&mut bytes);
            bytes
        };
        without_times(self.old) == without_times(self.new)
    }
}

impl<'a> InodeSlot<'a> {
    /// Wraps the bytes of an inode.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if there are too few bytes.
    pub fn from_bytes(bytes: &'a mut [u8]) -> Result<Self> {
        if bytes.len() < OLD_BYTES {
            return Err(Error::corrupt("inode"));
        }
        Ok(Self(bytes))
    }

    fn modify_raw<T>(&mut self, change: impl FnOnce(&mut RawInode) -> T) -> Option<T> {
        RawInode::mut_from_prefix(self.0).ok().map(|(raw, _)| change(raw))
    }

    fn read_raw<T>(&self, read: impl FnOnce(&RawInode) -> T) -> Option<T> {
        RawInode::ref_from_prefix(self.0).ok().map(|(raw, _)| read(raw))
    }

    /// Zeroes the slot, as for an unused inode.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Copies the fields of a record, which may be shorter; a new inode gets all of them. The inode
    /// keeps its block count, its extent root (`root` if it has none) and its orphan list link.
    pub fn update_from(&mut self, raw: &[u8], is_new: bool, root: [u32; POINTERS]) {
        if is_new {
            self.clear();
        }
        let (sectors, pointers) = (self.sectors(), self.pointers());
        let next = if self.links() == 0 { self.deletion_time() } else { 0 };
        let len = raw.len().min(self.0.len());
        self.write_at(0, raw.get(..len).unwrap_or_default());
        if self.flags() & flags::EXTENTS != 0 {
            let is_root =
                pointers.first().is_some_and(|word| word & 0xFFFF == extent::MAGIC.into());
            self.set_pointers(if is_root { pointers } else { root });
        }
        self.set_sectors(sectors);
        self.set_deleted(next);
    }

    /// Initializes the extra fields of a new inode, if its slot has space.
    pub fn init_extra_fields(&mut self) {
        let extra = if self.0.len() >= 256 { EXTRA_BYTES } else { 0 };
        self.write_at(OLD_BYTES, &extra.to_le_bytes());
    }

    /// Returns file type and permissions.
    pub fn mode(&self) -> u16 {
        self.read_raw(|raw| raw.i_mode.get()).unwrap_or(0)
    }

    /// Sets file type and permissions.
    pub fn set_mode(&mut self, mode: u16) {
        self.modify_raw(|raw| raw.i_mode = mode.into());
    }

    /// Returns owner and group.
    pub fn owner(&self) -> (u32, u32) {
        let ids = self.read_raw(|raw| {
            let join = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
            (
                join(raw.i_uid.get(), raw.i_uid_high.get()),
                join(raw.i_gid.get(), raw.i_gid_high.get()),
            )
        });
        ids.unwrap_or_default()
    }

    /// Sets owner and group.
    pub fn set_owner(&mut self, uid: u32, gid: u32) {
        self.modify_raw(|raw| {
            raw.i_uid = low16(uid).into();
            raw.i_uid_high = low16(uid >> 16).into();
            raw.i_gid = low16(gid).into();
            raw.i_gid_high = low16(gid >> 16).into();
        });
    }

    /// Returns the link count.
    pub fn links(&self) -> u16 {
        self.read_raw(|raw| raw.i_links_count.get()).unwrap_or(0)
    }

    /// Sets the link count.
    pub fn set_links(&mut self, links: u16) {
        self.modify_raw(|raw| raw.i_links_count = links.into());
    }

    /// Sets the size in bytes.
    pub fn set_size(&mut self, bytes: u64) {
        self.modify_raw(|raw| {
            raw.i_size_lo = low32(bytes).into();
            raw.i_size_high = low32(bytes >> 32).into();
        });
    }

    /// Returns `i_blocks` with 48 bits: sectors of 512 bytes, or blocks with the flag `HUGE_FILE`.
    pub fn sectors(&self) -> u64 {
        let join = |raw: &RawInode| {
            u64::from(raw.i_blocks_lo.get()) | u64::from(raw.i_blocks_high.get()) << 32
        };
        self.read_raw(join).unwrap_or(0)
    }

    /// Sets [`InodeSlot::sectors`].
    pub fn set_sectors(&mut self, sectors: u64) {
        self.modify_raw(|raw| {
            raw.i_blocks_lo = low32(sectors).into();
            raw.i_blocks_high = low16(low32(sectors >> 32)).into();
        });
    }

    /// Adds blocks to `i_blocks` or subtracts them.
    pub fn adjust_block_count(&mut self, blocks: u64, more: bool, block_bytes: u32) {
        let unit = if self.flags() & flags::HUGE_FILE != 0 { 1 } else { block_bytes / 512 };
        let change = blocks.saturating_mul(unit.into());
        let now = self.sectors();
        self.set_sectors(if more {
            now.saturating_add(change)
        } else {
            now.saturating_sub(change)
        });
    }

    /// Returns the bytes of the blocks in `i_blocks`.
    pub fn allocated_bytes(&self, block_bytes: u32) -> u64 {
        let unit = if self.flags() & flags::HUGE_FILE != 0 { block_bytes } else { 512 };
        self.sectors().saturating_mul(unit.into())
    }

    /// Returns the project; 0 if the inode has no field for it.
    pub fn project(&self) -> u32 {
        if self.extra_end() < PROJECT_AT.saturating_add(4) {
            return 0;
        }
        le32(self.0, PROJECT_AT).unwrap_or(0)
    }

    /// Sets the project, if the inode has a field for it.
    pub fn set_project(&mut self, project: u32) {
        if self.extra_end() >= PROJECT_AT.saturating_add(4) {
            self.write_at(PROJECT_AT, &project.to_le_bytes());
        }
    }

    /// Returns `i_flags`.
    pub fn flags(&self) -> u32 {
        self.read_raw(|raw| raw.i_flags.get()).unwrap_or(0)
    }

    /// Sets `i_flags`.
    pub fn set_flags(&mut self, flags: u32) {
        self.modify_raw(|raw| raw.i_flags = flags.into());
    }

    /// Returns block pointer `nth`.
    pub fn pointer(&self, nth: usize) -> u32 {
        self.read_raw(|raw| raw.i_block.get(nth).map_or(0, |it| it.get())).unwrap_or(0)
    }

    /// Returns all block pointers.
    pub fn pointers(&self) -> [u32; POINTERS] {
        self.read_raw(|raw| raw.i_block.map(|it| it.get())).unwrap_or([0; POINTERS])
    }

    /// Sets block pointer `nth`.
    pub fn set_pointer(&mut self, nth: usize, block: u32) {
        self.modify_raw(|raw| {
            if let Some(pointer) = raw.i_block.get_mut(nth) {
                *pointer = block.into();
            }
        });
    }

    /// Sets all block pointers.
    pub fn set_pointers(&mut self, pointers: [u32; POINTERS]) {
        self.modify_raw(|raw| raw.i_block = pointers.map(U32::from));
    }

    /// Returns the block of extended attributes; 0 for none.
    pub fn xattr_block(&self) -> u64 {
        let join = |raw: &RawInode| {
            u64::from(raw.i_file_acl_lo.get()) | u64::from(raw.i_file_acl_high.get()) << 32
        };
        self.read_raw(join).unwrap_or(0)
    }

    /// Sets the block of extended attributes.
    pub fn set_xattr_block(&mut self, block: u64) {
        self.modify_raw(|raw| {
            raw.i_file_acl_lo = low32(block).into();
            raw.i_file_acl_high = low16(low32(block >> 32)).into();
        });
    }

    /// Returns the generation, which distinguishes files that reuse an inode number.
    pub fn generation(&self) -> u32 {
        self.read_raw(|raw| raw.i_generation.get()).unwrap_or(0)
    }

    /// Sets [`InodeSlot::generation`].
    pub fn set_generation(&mut self, generation: u32) {
        self.modify_raw(|raw| raw.i_generation = generation.into());
    }

    /// Returns the reference count of an EA inode.
    pub fn ea_ref_count(&self) -> u64 {
        let join =
            |raw: &RawInode| u64::from(raw.i_ctime.get()) << 32 | u64::from(raw.i_version.get());
        self.read_raw(join).unwrap_or(0)
    }

    /// Returns true if the EA inode is `owner`'s alone, in the format of Lustre, the forerunner of
    /// `ea_inode`. It names the owning inode and its generation, and has no reference count.
    pub fn is_ea_inode_of(&self, owner: InodeNumber, generation: u32) -> bool {
        let named = self.read_raw(|raw| raw.i_mtime.get());
        named == Some(owner.0) && self.generation() == generation
    }

    /// Sets [`InodeSlot::ea_ref_count`].
    pub fn set_ea_ref_count(&mut self, owners: u64) {
        let [low, high] = [low32(owners), low32(owners >> 32)];
        self.set_time(InodeTime::Changed, Time { seconds: 0, nanoseconds: 0 });
        self.modify_raw(|raw| {
            raw.i_version = low.into();
            raw.i_ctime = high.into();
        });
    }

    /// Sets the value hash of an EA inode.
    pub fn set_value_hash(&mut self, hash: u32) {
        self.set_time(InodeTime::Accessed, Time { seconds: hash.into(), nanoseconds: 0 });
        // Keeps all 32 bits of the hash if the inode has no extra field for the time.
        self.modify_raw(|raw| raw.i_atime = hash.into());
    }

    /// Returns true if this is an EA inode.
    pub fn is_ea_inode(&self) -> bool {
        self.flags() & flags::EA_INODE != 0 && self.mode() & 0o170_000 == 0o100_000
    }

    /// Returns true if the inode has a field for a project.
    pub fn has_project(&self) -> bool {
        self.extra_end() >= PROJECT_AT.saturating_add(4)
    }

    /// Returns the deletion time in seconds since 1970; for an orphan the next orphan's number.
    pub fn deletion_time(&self) -> u32 {
        self.read_raw(|raw| raw.i_dtime.get()).unwrap_or(0)
    }

    /// Returns true for an orphan on volumes without an orphan list.
    pub fn is_unlisted_orphan(&self) -> bool {
        self.links() == 0 && self.mode() != 0 && self.deletion_time() == 0
    }

    /// Sets [`InodeSlot::deletion_time`].
    pub fn set_deleted(&mut self, seconds: u32) {
        self.modify_raw(|raw| raw.i_dtime = seconds.into());
    }

    /// Sets one of the times, as precisely as the inode has fields for.
    pub fn set_time(&mut self, which: InodeTime, to: Time) {
        let extra_at: usize = match which {
            InodeTime::Changed => 0x84,
            InodeTime::Modified => 0x88,
            InodeTime::Accessed => 0x8C,
            InodeTime::Created => 0x94,
        };
        let known = self.extra_end();
        let fits = extra_at.saturating_add(4) <= known;
        let (low, extra) = split_time(if fits { to } else { clamp_to_32_bits(to) });
        match which {
            InodeTime::Changed => drop(self.modify_raw(|raw| raw.i_ctime = low.into())),
            InodeTime::Modified => drop(self.modify_raw(|raw| raw.i_mtime = low.into())),
            InodeTime::Accessed => drop(self.modify_raw(|raw| raw.i_atime = low.into())),
            InodeTime::Created if fits => self.write_at(0x90, &low.to_le_bytes()),
            InodeTime::Created => {}
        }
        if fits {
            self.write_at(extra_at, &extra.to_le_bytes());
        }
    }

    /// Returns the end of the fields.
    fn extra_end(&self) -> usize {
        let extra = le16(self.0, OLD_BYTES).map_or(0, usize::from);
        OLD_BYTES.saturating_add(extra).min(self.0.len())
    }

    /// Returns the attribute list in the inode; empty if there is none.
    pub fn inline_xattrs(&self) -> &[u8] {
        let end = self.extra_end();
        if end <= OLD_BYTES || le32(self.0, end) != Some(XATTR_MAGIC) {
            return &[];
        }
        self.0.get(end.saturating_add(4)..).unwrap_or_default()
    }

    /// Returns the bytes available for an attribute list in the inode, including its end mark.
    pub fn xattr_capacity(&self) -> usize {
        let end = self.extra_end();
        if end <= OLD_BYTES { 0 } else { self.0.len().saturating_sub(end).saturating_sub(4) }
    }

    /// Sets the attribute list in the inode, which must fit; an empty list removes it.
    pub fn set_inline_xattrs(&mut self, list: &[u8]) {
        let end = self.extra_end();
        if end <= OLD_BYTES {
            return;
        }
        if let Some(rest) = self.0.get_mut(end..) {
            rest.fill(0);
        }
        if !list.is_empty() {
            self.write_at(end, &XATTR_MAGIC.to_le_bytes());
            self.write_at(end.saturating_add(4), list);
        }
    }

    /// Returns the inline dirents of part 0 or 1; empty if there is no such part.
    pub fn inline_dirents(&mut self, part: usize) -> &mut [u8] {
        let range = if part == 0 {
            POINTERS_AT.saturating_add(ENTRIES_AT)..POINTERS_AT.saturating_add(POINTER_BYTES)
        } else {
            let start = self.extra_end().saturating_add(4);
            let value = xattr::inline_value(self.inline_xattrs()).unwrap_or_default();
            start.saturating_add(value.start)..start.saturating_add(value.end)
        };
        self.0.get_mut(range).unwrap_or_default()
    }

    fn write_at(&mut self, at: usize, bytes: &[u8]) {
        let end = at.saturating_add(bytes.len());
        if let Some(into) = self.0.get_mut(at..end) {
            into.copy_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_precision_depends_on_inode_size() {
        let time = Time { seconds: (1 << 33) + 5, nanoseconds: 123 };
        let mut large = vec![0; 256];
        let mut slot = InodeSlot::from_bytes(&mut large).unwrap();
        slot.init_extra_fields();
        slot.set_time(InodeTime::Modified, time);
        slot.set_time(InodeTime::Created, time);
        assert_eq!(le32(&large, 0x88), Some(123 << 2 | 2));
        assert_eq!(le32(&large, 0x94), Some(123 << 2 | 2));
        let mut small = vec![0; 128];
        let mut slot = InodeSlot::from_bytes(&mut small).unwrap();
        slot.init_extra_fields();
        slot.set_time(InodeTime::Modified, time);
        assert_eq!(le32(&small, 16), Some(i32::MAX as u32));
    }

    #[test]
    fn xattrs_start_after_extra_fields() {
        let mut bytes = vec![0; 256];
        let mut slot = InodeSlot::from_bytes(&mut bytes).unwrap();
        assert_eq!((slot.xattr_capacity(), slot.inline_xattrs().len()), (0, 0));
        slot.init_extra_fields();
        assert_eq!(slot.xattr_capacity(), 256 - 160 - 4);
        slot.set_inline_xattrs(&[7; 8]);
        assert_eq!(&slot.inline_xattrs()[..9], [7, 7, 7, 7, 7, 7, 7, 7, 0]);
        slot.set_inline_xattrs(&[]);
        assert!(slot.inline_xattrs().is_empty());
        assert_eq!(bytes[160..], [0; 96]);
    }
}
