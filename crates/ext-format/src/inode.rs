//! Inodes: owner, size, times and block map of a file.
//!
//! ```text
//!   | 128 bytes of ext2 | i_extra_isize bytes more | attributes inside the inode |
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use draconis_types::injected_fault::InjectedFault;
use draconis_types::{Attributes, FileType, Time};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::Checksum;
use super::features::{Incompatible, ReadOnlyCompatible};
use super::inline::POINTER_BYTES;
use super::low32;
use super::superblock::Superblock;
use super::{le16, le32, nokey, put16};
use crate::{Error, FileId, FsBlock, InodeNumber, Result};

/// Block pointers of an inode: twelve direct, then one per level of indirection.
pub const POINTERS: usize = 15;
/// Number of direct pointers.
pub const DIRECT_POINTERS: u32 = 12;

/// Inode flags.
pub mod flags {
    /// Changes are durable before they are acknowledged.
    pub const SYNC: u32 = 0x8;
    /// The file is immutable.
    pub const IMMUTABLE: u32 = 0x10;
    /// The file is append-only.
    pub const APPEND: u32 = 0x20;
    /// Excluded from dumps.
    pub const NO_DUMP: u32 = 0x40;
    /// Access times are not updated.
    pub const NO_ATIME: u32 = 0x80;
    /// Directory changes are durable before they are acknowledged.
    pub const DIR_SYNC: u32 = 0x1_0000;
    /// A top-level directory: its subdirectories are unrelated.
    pub const TOP_DIR: u32 = 0x2_0000;
    /// Flags that programs may set on ext2.
    pub const SETTABLE: u32 = 0x0003_80FF & !COMPRESSED;
    /// Flags that a new inode inherits from its directory.
    pub const INHERITED: u32 = 0x0001_C0CB;
    /// New inodes in the directory inherit its project.
    pub const PROJECT: u32 = 0x2000_0000;
    /// The directory has an htree.
    pub const INDEX: u32 = 0x1000;
    /// `i_blocks` counts file system blocks.
    pub const HUGE_FILE: u32 = 0x4_0000;
    /// The file is mapped by extents.
    pub const EXTENTS: u32 = 0x8_0000;
    /// The contents are inline.
    pub const INLINE_DATA: u32 = 0x1000_0000;
    /// Encrypted.
    pub const ENCRYPT: u32 = 0x800;
    /// fs-verity: a Merkle tree behind the end of the file protects the contents.
    pub const VERITY: u32 = 0x10_0000;
    /// EA inode: the contents are the value of an extended attribute; no name references it.
    pub const EA_INODE: u32 = 0x20_0000;
    /// The directory is case-insensitive.
    pub const CASEFOLD: u32 = 0x4000_0000;
    /// Compressed.
    pub const COMPRESSED: u32 = 0x4;
    /// Flags visible to programs.
    pub const USER_VISIBLE: u32 = 0x705B_DFFF;
    /// Flags that programs may name when they set flags.
    pub const ACCEPTED_BY_SETFLAGS: u32 = 0x725B_DFFF;
    /// Flags of these that Linux changes. The others are ignored silently, because `chattr` writes
    /// back all flags that it read.
    pub const USER_MODIFIABLE: u32 = 0x624B_C0FF;
    /// Flags of these that only directories have.
    pub const DIRECTORY_ONLY: u32 = 0x6003_0000;
    /// Flags that devices, fifos and symbolic links may have.
    pub const OTHER_FLMASK: u32 = NO_DUMP | NO_ATIME;
}

const GOOD_OLD_INODE_SIZE: usize = 128;
const XATTR_MAGIC: u32 = 0xEA02_0000;

/// The 128 bytes of every inode.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawInode {
    pub i_mode: U16,
    pub i_uid: U16,
    pub i_size_lo: U32,
    pub i_atime: U32,
    pub i_ctime: U32,
    pub i_mtime: U32,
    pub i_dtime: U32,
    pub i_gid: U16,
    pub i_links_count: U16,
    pub i_blocks_lo: U32,
    pub i_flags: U32,
    pub i_version: U32,
    pub i_block: [U32; POINTERS],
    pub i_generation: U32,
    pub i_file_acl_lo: U32,
    pub i_size_high: U32,
    pub i_obso_faddr: U32,
    pub i_blocks_high: U16,
    pub i_file_acl_high: U16,
    pub i_uid_high: U16,
    pub i_gid_high: U16,
    pub i_checksum_lo: U16,
    pub i_reserved: U16,
}

const _: () = assert!(size_of::<RawInode>() == GOOD_OLD_INODE_SIZE);

/// An inode in use with a valid file type.
#[derive(Debug)]
pub struct Inode {
    /// Inode number.
    pub number: InodeNumber,
    /// File type.
    pub kind: FileType,
    /// Length in bytes.
    pub size_bytes: u64,
    /// `i_flags`, unfiltered.
    pub flags: u32,
    /// Block of extended attributes, if any.
    pub xattr_block: Option<FsBlock>,
    /// Block pointers; the target of a fast symbolic link, or the number of a device.
    pub pointers: [u32; POINTERS],
    /// Offset of the extended attributes in the inode, if any.
    pub attributes_at: Option<u16>,
    /// Position in a directory of the last name found; the next one is probably near.
    pub lookup_hint: AtomicU32,
    stat: Stat,
}

#[derive(Debug)]
struct Stat {
    mode: u16,
    links: u16,
    uid: u32,
    gid: u32,
    generation: u32,
    blocks_512: u64,
    accessed: Time,
    modified: Time,
    changed: Time,
    created: Option<Time>,
    project: u32,
}

impl Inode {
    /// Parses the inode in `bytes`, the whole slot.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unused inode, [`Error::Corrupt`] for an invalid one,
    /// [`Error::Unsupported`] for one that this library cannot read.
    pub fn check(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> Result<Self> {
        let corrupt = |what| Error::Corrupt { what, inode: Some(number), block: None };
        let (raw, _) = RawInode::ref_from_prefix(bytes).map_err(|_| corrupt("inode"))?;
        if raw.i_links_count.get() == 0 {
            return Err(Error::NotFound);
        }
        Self::parse_used(bytes, number, super_)
    }

    /// Checks that this is a directory.
    ///
    /// # Errors
    /// [`Error::NotADirectory`].
    pub fn as_directory(self: Arc<Self>) -> Result<Arc<Self>> {
        if self.kind != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        Ok(self)
    }

    /// Parses an inode that is in use, even without links.
    ///
    /// # Errors
    /// As [`Inode::check`], except [`Error::NotFound`].
    pub fn parse_used(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> Result<Self> {
        let corrupt = |what| Error::Corrupt { what, inode: Some(number), block: None };
        let (raw, _) = RawInode::ref_from_prefix(bytes).map_err(|_| corrupt("inode"))?;
        let mode = raw.i_mode.get();
        let kind = FileType::from_mode(u32::from(mode)).ok_or(corrupt("inode: kind"))?;
        let extra = ExtraFields::parse(bytes).ok_or(corrupt("inode: extra size"))?;
        let xattr_block = match super_.incompatible.contains(Incompatible::SIXTY_FOUR_BIT) {
            true => u64::from(raw.i_file_acl_high.get()) << 32,
            false => 0,
        } | u64::from(raw.i_file_acl_lo.get());
        let xattr_block = (xattr_block != 0).then_some(FsBlock(xattr_block));
        if !has_valid_checksum(bytes, number, super_) {
            return Err(corrupt("inode: checksum"));
        }
        Ok(Self {
            number,
            kind,
            size_bytes: decode_size(raw, kind, super_).ok_or(corrupt("inode: size"))?,
            flags: raw.i_flags.get(),
            xattr_block,
            pointers: raw.i_block.map(U32::get),
            attributes_at: extra.attributes_at,
            lookup_hint: AtomicU32::new(0),
            stat: Stat {
                mode,
                links: raw.i_links_count.get(),
                uid: join16(raw.i_uid.get(), raw.i_uid_high.get()),
                gid: join16(raw.i_gid.get(), raw.i_gid_high.get()),
                generation: raw.i_generation.get(),
                blocks_512: decode_sectors(raw, super_),
                accessed: decode_time(raw.i_atime.get(), extra.accessed),
                modified: decode_time(raw.i_mtime.get(), extra.modified),
                changed: decode_time(raw.i_ctime.get(), extra.changed),
                created: extra.created.map(|(low, high)| decode_time(low, high)),
                project: extra.project,
            },
        })
    }

    /// Returns owner and group.
    pub fn owner(&self) -> (u32, u32) {
        (self.stat.uid, self.stat.gid)
    }

    /// Returns file type and permissions.
    pub fn mode(&self) -> u32 {
        self.stat.mode.into()
    }

    /// Returns the project for quotas; 0 is the default project.
    pub fn project(&self) -> u32 {
        self.stat.project
    }

    /// Returns true if the contents, or the names of a directory, are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.flags & flags::ENCRYPT != 0
    }

    /// Returns true if the contents are inline.
    pub fn is_inline(&self) -> bool {
        self.flags & flags::INLINE_DATA != 0
    }

    /// Returns true if the contents are the value of an extended attribute.
    pub fn is_ea_inode(&self) -> bool {
        self.flags & flags::EA_INODE != 0
    }

    /// Returns the hash of an EA inode's value.
    pub fn ea_inode_hash(&self) -> u32 {
        low32(self.stat.accessed.seconds.cast_unsigned())
    }

    /// Returns true if the EA inode is `owner`'s alone, in the format of Lustre, the forerunner of
    /// `ea_inode`, which has no hash.
    pub fn is_ea_inode_of(&self, owner: &Self) -> bool {
        low32(self.stat.modified.seconds.cast_unsigned()) == owner.number.0
            && self.stat.generation == owner.stat.generation
    }

    /// Returns the bytes of `i_block`.
    pub fn pointer_bytes(&self) -> [u8; POINTER_BYTES] {
        let mut bytes = [0; POINTER_BYTES];
        bytes.copy_from_slice(self.pointers.map(u32::to_le_bytes).as_flattened());
        bytes
    }

    /// Returns true if the inode may map blocks.
    pub fn has_map(&self, super_: &Superblock) -> bool {
        matches!(self.kind, FileType::File | FileType::Directory | FileType::Symlink)
            && !self.is_inline()
            && self.fast_symlink_target(super_).is_none()
    }

    /// Returns the link count.
    pub fn links(&self) -> u16 {
        self.stat.links
    }

    /// Returns the generation, which distinguishes files that reuse an inode number.
    pub fn generation(&self) -> u32 {
        self.stat.generation
    }

    /// Returns the id that the file's metadata blocks are checked against.
    pub fn file_id(&self) -> FileId {
        FileId { inode: self.number.0, generation: self.stat.generation }
    }

    /// Returns true if the file is mapped by extents.
    pub fn has_extents(&self) -> bool {
        self.flags & flags::EXTENTS != 0
    }

    /// Returns true if the inode may have extended attributes.
    pub fn has_xattrs(&self) -> bool {
        self.xattr_block.is_some() || self.attributes_at.is_some()
    }

    /// Returns the target of a fast symbolic link, which is stored in the inode.
    pub fn fast_symlink_target(&self, super_: &Superblock) -> Option<Vec<u8>> {
        // A fast symbolic link has no data block; its only block may hold attributes.
        let len = usize::try_from(self.size_bytes).ok()?;
        let fast = self.kind == FileType::Symlink && len < size_of_val(&self.pointers);
        let cluster =
            u64::from(super_.block_bytes >> 9).saturating_mul(super_.cluster_blocks.into());
        let attributes = self.xattr_block.map_or(0, |_| cluster);
        // EA inodes are counted, too: with them the length alone decides.
        let by_length = super_.incompatible.contains(Incompatible::EA_INODE);
        if !fast || (!by_length && self.stat.blocks_512 > attributes) {
            return None;
        }
        self.pointer_bytes().get(..len).map(<[u8]>::to_vec)
    }

    /// Returns the attributes for `stat`.
    pub fn attributes(&self, super_: &Superblock) -> Attributes {
        let stat = &self.stat;
        Attributes {
            node: self.number.node(),
            generation: stat.generation,
            kind: self.kind,
            mode: u32::from(stat.mode),
            links: u32::from(stat.links),
            uid: stat.uid,
            gid: stat.gid,
            device: self.device(),
            size_bytes: self.reported_size(),
            blocks_512: self.reported_sectors(),
            block_size_bytes: super_.block_bytes,
            flags: self.flags & flags::USER_VISIBLE,
            no_xattrs: !self.has_xattrs(),
            accessed: stat.accessed,
            modified: stat.modified,
            changed: stat.changed,
            created: stat.created,
        }
    }

    /// Returns the size without a key: that of the encoded target for an encrypted symbolic link.
    fn reported_size(&self) -> u64 {
        match (self.kind, self.is_encrypted()) {
            (FileType::Symlink, true) => nokey::no_key_target_bytes(self.size_bytes),
            _ => self.size_bytes,
        }
    }

    /// Returns the sectors for `stat`. Like Linux, it counts inline contents, so that the file does
    /// not look like a hole.
    fn reported_sectors(&self) -> u64 {
        let inside = self.kind == FileType::File && self.is_inline();
        let sectors = if inside { self.size_bytes.div_ceil(512) } else { 0 };
        self.stat.blocks_512.saturating_add(sectors)
    }

    /// Returns the major and minor number of a device: 8 bits each in the first pointer, or 12 and
    /// 20 bits in the second.
    fn device(&self) -> (u32, u32) {
        if !matches!(self.kind, FileType::CharDevice | FileType::BlockDevice) {
            return (0, 0);
        }
        let [old, new, ..] = self.pointers;
        if old != 0 {
            return ((old >> 8) & 0xFF, old & 0xFF);
        }
        ((new >> 8) & 0xFFF, (new & 0xFF) | ((new >> 12) & 0xF_FF00))
    }

    /// Refuses contents that this library cannot read. A flag of compression means nothing, as to
    /// Linux: a volume with compressed files has the feature.
    ///
    /// # Errors
    /// [`Error::NoKey`] for an encrypted file.
    pub fn check_readable(&self) -> Result<()> {
        match self.is_encrypted() && self.kind == FileType::File {
            true => Err(Error::NoKey),
            false => Ok(()),
        }
    }
}

/// Fields of an inode beyond the first 128 bytes.
#[derive(Default)]
struct ExtraFields {
    changed: u32,
    modified: u32,
    accessed: u32,
    created: Option<(u32, u32)>,
    project: u32,
    attributes_at: Option<u16>,
}

impl ExtraFields {
    /// Parses the fields; `None` if the inode claims more bytes than its slot has.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let Some(extra_bytes) = le16(bytes, GOOD_OLD_INODE_SIZE) else {
            return Some(Self::default());
        };
        let end = GOOD_OLD_INODE_SIZE.checked_add(usize::from(extra_bytes))?;
        if end > bytes.len() || !extra_bytes.is_multiple_of(4) {
            return None;
        }
        let known = bytes.get(..end)?;
        let field = |at| le32(known, at).unwrap_or(0);
        // Slots of old kernels have no extra fields and no attributes.
        let magic = extra_bytes >= 4 && le32(bytes, end) == Some(XATTR_MAGIC);
        let first = end.checked_add(4)?;
        let some = le32(bytes, first).is_some_and(|entry| entry != 0);
        let created = le32(known, 0x90);
        Some(Self {
            changed: field(0x84),
            modified: field(0x88),
            accessed: field(0x8C),
            created: created.map(|low| (low, field(0x94))),
            project: field(0x9C),
            attributes_at: (magic && some).then(|| u16::try_from(first).ok()).flatten(),
        })
    }
}

/// Offsets of the two halves of an inode's checksum.
const CHECKSUM_AT: [usize; 2] = [0x7C, 0x82];

/// Computes the checksum of an inode, on volumes that have them; 16 bits are stored if the extra
/// fields lack space for 32.
fn checksum(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> Option<Checksum> {
    let [low_at, high_at] = CHECKSUM_AT;
    let part = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
    let raw = RawInode::ref_from_prefix(bytes).ok()?.0;
    let seed = super_
        .file_checksum_seed(FileId { inode: number.0, generation: raw.i_generation.get() })?;
    let sum = seed
        .update(part(0, low_at))
        .update(&[0; 2])
        .update(part(low_at.checked_add(2)?, GOOD_OLD_INODE_SIZE));
    if bytes.len() <= GOOD_OLD_INODE_SIZE {
        return Some(sum);
    }
    let after = high_at.checked_add(2)?;
    let high = if has_checksum_hi(bytes) { &[0; 2] } else { part(high_at, after) };
    Some(
        sum.update(part(GOOD_OLD_INODE_SIZE, high_at))
            .update(high)
            .update(part(after, bytes.len())),
    )
}

/// Returns true if the extra fields include the high half of the checksum.
fn has_checksum_hi(bytes: &[u8]) -> bool {
    le16(bytes, GOOD_OLD_INODE_SIZE).is_some_and(|extra| extra >= 4)
}

/// Returns true if the checksum of an inode is valid, or there is none.
pub fn has_valid_checksum(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> bool {
    let Some(sum) = checksum(bytes, number, super_) else { return true };
    let [low_at, high_at] = CHECKSUM_AT;
    le16(bytes, low_at) == Some(sum.low16())
        && (!has_checksum_hi(bytes) || le16(bytes, high_at) == Some(sum.high16()))
}

/// Sets the checksum of an inode, on volumes that have them.
pub fn set_checksum(bytes: &mut [u8], number: InodeNumber, super_: &Superblock) {
    let Some(sum) = checksum(bytes, number, super_) else { return };
    let [low_at, high_at] = CHECKSUM_AT;
    let _ = put16(bytes, low_at, sum.low16());
    if has_checksum_hi(bytes) {
        let _ = put16(bytes, high_at, sum.high16());
    }
}

/// Zeroes the checksum field of an inode, on any volume.
pub(super) fn clear_checksum(bytes: &mut [u8]) {
    let has_high = has_checksum_hi(bytes);
    let [low_at, high_at] = CHECKSUM_AT;
    let _ = put16(bytes, low_at, 0);
    if has_high {
        let _ = put16(bytes, high_at, 0);
    }
}

/// An inode to write.
#[derive(Clone, Debug, Default)]
pub struct NewInode<'a> {
    /// File type and permissions.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Link count.
    pub links: u16,
    /// Sectors of 512 bytes, with indirect and attribute blocks: 48 bits with `huge_file`, else 32.
    pub sectors: u64,
    /// `i_flags`.
    pub flags: u32,
    /// Block pointers, target or device number.
    pub pointers: [u32; POINTERS],
    /// Last access.
    pub accessed: Time,
    /// Last change of the contents.
    pub modified: Time,
    /// Last change of the inode.
    pub changed: Time,
    /// Creation; dropped if the inode has no space for it.
    pub created: Time,
    /// Block of extended attributes; 0 for none.
    pub xattr_block: u64,
    /// Attribute list in the inode, without its magic number.
    pub attributes: &'a [u8],
}

/// Bytes of extra fields that this library writes.
pub const EXTRA_BYTES: u16 = 32;

impl NewInode<'_> {
    /// Encodes the inode in a slot of `inode_bytes`.
    pub fn encode(&self, inode_bytes: u32) -> Vec<u8> {
        let has_extra = inode_bytes >= 256;
        let fit = |time: Time| if has_extra { time } else { clamp_to_32_bits(time) };
        let [accessed, modified, changed] =
            [self.accessed, self.modified, self.changed].map(|time| split_time(fit(time)));
        let raw = RawInode {
            i_mode: self.mode.into(),
            i_uid: low16(self.uid).into(),
            i_size_lo: low32(self.size_bytes).into(),
            i_atime: accessed.0.into(),
            i_ctime: changed.0.into(),
            i_mtime: modified.0.into(),
            i_dtime: 0.into(),
            i_gid: low16(self.gid).into(),
            i_links_count: self.links.into(),
            i_blocks_lo: low32(self.sectors).into(),
            i_flags: self.flags.into(),
            i_version: 0.into(),
            i_block: self.pointers.map(U32::from),
            i_generation: 0.into(),
            i_file_acl_lo: low32(self.xattr_block).into(),
            i_size_high: low32(self.size_bytes >> 32).into(),
            i_obso_faddr: 0.into(),
            i_blocks_high: low16(low32(self.sectors >> 32)).into(),
            i_file_acl_high: low16(low32(self.xattr_block >> 32)).into(),
            i_uid_high: low16(self.uid >> 16).into(),
            i_gid_high: low16(self.gid >> 16).into(),
            i_checksum_lo: 0.into(),
            i_reserved: 0.into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        if has_extra {
            let created = split_time(self.created);
            bytes.extend(EXTRA_BYTES.to_le_bytes());
            bytes.extend([0; 2]);
            for field in [changed.1, modified.1, accessed.1, created.0, created.1, 0, 0] {
                bytes.extend(field.to_le_bytes());
            }
            if !self.attributes.is_empty() {
                bytes.extend(XATTR_MAGIC.to_le_bytes());
                bytes.extend(self.attributes);
            }
        }
        bytes.resize(crate::units::saturating_usize(inode_bytes.into()), 0);
        bytes
    }
}

/// Encodes a device number: small ones in the first pointer, others in the second.
pub fn device_pointers((major, minor): (u32, u32)) -> [u32; POINTERS] {
    let mut pointers = [0; POINTERS];
    let [old, new, ..] = &mut pointers;
    if major < 256 && minor < 256 {
        *old = major << 8 | minor;
    } else {
        *new = (minor & 0xFF) | (major & 0xFFF) << 8 | (minor & 0xF_FF00) << 12;
    }
    pointers
}

/// Encodes a symbolic link's target in the pointers, if it is short enough.
pub fn fast_symlink_pointers(target: &[u8]) -> Option<[u32; POINTERS]> {
    let mut bytes = [0; POINTERS * 4];
    // One byte less than the capacity: readers expect a NUL.
    let (last, room) = bytes.split_last_mut()?;
    *last = 0;
    room.get_mut(..target.len())?.copy_from_slice(target);
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    Some(std::array::from_fn(|_| words.next().unwrap_or(0)))
}

/// Splits a time into its seconds field and its extra field.
pub(super) fn split_time(time: Time) -> (u32, u32) {
    let time = clamp_time(time, MAX_SECONDS);
    let low = low32(time.seconds.cast_unsigned());
    let epoch = time.seconds.saturating_sub(i64::from(low.cast_signed())) >> 32;
    (low, low32(epoch.cast_unsigned()) & 3 | time.nanoseconds << 2)
}

/// Returns the nearest time that fits into 32 bits.
pub(super) fn clamp_to_32_bits(time: Time) -> Time {
    Time { nanoseconds: 0, ..clamp_time(time, i32::MAX.into()) }
}

/// Last second with two epoch bits, in 2446.
const MAX_SECONDS: i64 = 0x3_7FFF_FFFF;

/// Clamps a time to the representable range up to `last`, as Linux does.
fn clamp_time(time: Time, last: i64) -> Time {
    if InjectedFault::ClampedTimes.is_made() {
        return time;
    }
    let seconds = time.seconds.clamp(i32::MIN.into(), last);
    let at_end = seconds == i64::from(i32::MIN) || seconds == last;
    Time { seconds, nanoseconds: if at_end { 0 } else { time.nanoseconds } }
}

/// Returns the low half of a 32-bit field.
pub fn low16(value: u32) -> u16 {
    let [a, b, ..] = value.to_le_bytes();
    u16::from_le_bytes([a, b])
}

fn join16(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

/// Decodes a time. Seconds are signed; the two lowest bits of the extra field extend them past
/// 2038, and the other thirty are nanoseconds.
fn decode_time(low: u32, extra: u32) -> Time {
    let epoch = i64::from(extra & 3) << 32;
    Time {
        seconds: i64::from(low.cast_signed()).saturating_add(epoch),
        nanoseconds: (extra >> 2).min(999_999_999),
    }
}

/// Decodes the size in bytes; the high half is valid for files, and for directories with
/// `large_dir`.
fn decode_size(raw: &RawInode, kind: FileType, super_: &Superblock) -> Option<u64> {
    let high = match kind {
        FileType::File => raw.i_size_high.get(),
        FileType::Directory if super_.incompatible.contains(Incompatible::LARGEDIR) => {
            raw.i_size_high.get()
        }
        _ => 0,
    };
    let size = u64::from(raw.i_size_lo.get()) | u64::from(high) << 32;
    // Block numbers and `off_t` limit the size.
    let reach = u64::from(super_.block_bytes).checked_shl(32)?;
    (size <= reach.min(i64::MAX.unsigned_abs())).then_some(size)
}

fn decode_sectors(raw: &RawInode, super_: &Superblock) -> u64 {
    if !super_.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE) {
        return u64::from(raw.i_blocks_lo.get());
    }
    let count = u64::from(raw.i_blocks_lo.get()) | u64::from(raw.i_blocks_high.get()) << 32;
    if raw.i_flags.get() & flags::HUGE_FILE == 0 {
        return count;
    }
    count.saturating_mul(u64::from(super_.block_bytes >> 9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_fields_round_trip() {
        for seconds in [1 - (1i64 << 31), -1, 0, 1 << 31, (1 << 32) + 7, MAX_SECONDS - 1] {
            let kept = Time { seconds, nanoseconds: 999_999_999 };
            let (low, extra) = split_time(kept);
            assert_eq!(decode_time(low, extra), kept);
        }
        assert_eq!(fast_symlink_pointers(&[b'x'; 60]), None);
        assert_eq!(fast_symlink_pointers(b"abcd").unwrap()[..2], [0x6463_6261, 0]);
        assert_eq!(device_pointers((5, 1))[..2], [0x501, 0]);
        assert_eq!(device_pointers((259, 70_000))[..2], [0, 0x1111_0370 & !0xFFF00 | 259 << 8]);
    }

    #[test]
    fn timestamps_range_from_1901_to_2446() {
        assert_eq!(decode_time(0x8000_0000, 0).seconds, -(1 << 31));
        assert_eq!(decode_time(0x7FFF_FFFF, 3).seconds, (1 << 31) - 1 + (3 << 32));
        assert_eq!(decode_time(5, 7 << 2 | 1), Time { seconds: 5 + (1 << 32), nanoseconds: 7 });
        // Times out of range become the nearest representable second.
        for (seconds, nearest) in [(i64::MAX, MAX_SECONDS), (i64::MIN, -(1 << 31))] {
            let (low, extra) = split_time(Time { seconds, nanoseconds: 5 });
            assert_eq!(decode_time(low, extra), Time { seconds: nearest, nanoseconds: 0 });
        }
    }
}
