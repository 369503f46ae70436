//! The inode: who owns a file, how long it is, and where its blocks are.
//!
//! ```text
//!   | 128 bytes of ext2 | i_extra_isize bytes more | attributes inside the inode |
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use draconis_exchange::contract::{Attributes, FileType, Time};
use draconis_exchange::injected_fault::InjectedFault;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::Checksum;
use super::features::{Incompatible, ReadOnlyCompatible};
use super::inline::POINTER_BYTES;
use super::superblock::Superblock;
use super::{le16, le32, nokey, put16};
use crate::{Error, FileId, FsBlock, InodeNumber, Result};

/// Block pointers of an inode: twelve direct ones, then one of each level.
pub const POINTERS: usize = 15;
/// How many of them are direct.
pub const DIRECT: u32 = 12;

/// Inode flags that decide how it is read.
pub mod flags {
    /// Every change is durable before it is acknowledged.
    pub const SYNC: u32 = 0x8;
    /// Nothing may change.
    pub const IMMUTABLE: u32 = 0x10;
    /// Contents may only grow.
    pub const APPEND: u32 = 0x20;
    /// Not for backups.
    pub const NO_DUMP: u32 = 0x40;
    /// Reading leaves no trace.
    pub const NO_ATIME: u32 = 0x80;
    /// Names are durable before they are acknowledged.
    pub const DIR_SYNC: u32 = 0x1_0000;
    /// A directory whose subdirectories have nothing to do with each other.
    pub const TOP_DIR: u32 = 0x2_0000;
    /// What a program may set, as far as ext2 honours it.
    pub const SETTABLE: u32 = 0x0003_80FF & !COMPRESSED;
    /// What a new inode takes over from its directory.
    pub const INHERITED: u32 = 0x0001_C0CB;
    /// What is made in a directory belongs to its project.
    pub const PROJECT: u32 = 0x2000_0000;
    /// A directory has a hash tree.
    pub const INDEX: u32 = 0x1000;
    /// `i_blocks` counts file system blocks.
    pub const HUGE_FILE: u32 = 0x4_0000;
    /// Mapped by extents.
    pub const EXTENTS: u32 = 0x8_0000;
    /// Contents inside the inode.
    pub const INLINE_DATA: u32 = 0x1000_0000;
    /// Encrypted.
    pub const ENCRYPT: u32 = 0x800;
    /// Contents are sealed by a hash tree that lies behind their end.
    pub const VERITY: u32 = 0x10_0000;
    /// The contents are the value of an extended attribute; no name leads here.
    pub const EA_INODE: u32 = 0x20_0000;
    /// The names of a directory ignore case.
    pub const CASEFOLD: u32 = 0x4000_0000;
    /// Compressed.
    pub const COMPRESSED: u32 = 0x4;
    /// What user programs may see.
    pub const USER_VISIBLE: u32 = 0x705B_DFFF;
    /// What they may name when they set flags.
    pub const NAMEABLE: u32 = 0x725B_DFFF;
    /// Of these, what Linux would change. The rest stays as it is without a word, as
    /// `chattr` writes back what it has read.
    pub const USER_MODIFIABLE: u32 = 0x624B_C0FF;
    /// Of these, what only directories have.
    pub const DIRECTORY_ONLY: u32 = 0x6003_0000;
    /// And all that devices, fifos and links may have.
    pub const OTHER_FLMASK: u32 = NO_DUMP | NO_ATIME;
}

const GOOD_OLD_INODE_SIZE: usize = 128;
const XATTR_MAGIC: u32 = 0xEA02_0000;

/// The 128 bytes that every inode has.
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

/// An inode that is in use and whose kind is known.
#[derive(Debug)]
pub struct Inode {
    /// Its number.
    pub number: InodeNumber,
    /// What it is.
    pub kind: FileType,
    /// Length in bytes.
    pub size_bytes: u64,
    /// `i_flags`, all of them.
    pub flags: u32,
    /// The block of extended attributes, if there is one.
    pub xattr_block: Option<FsBlock>,
    /// The block pointers; for a fast symbolic link its target, for a device its number.
    pub(crate) pointers: [u32; POINTERS],
    /// Where extended attributes start inside the inode, if there are any.
    pub(crate) attributes_at: Option<u16>,
    /// Where in a directory the last name was found: the next one is probably near.
    pub(crate) lookup_hint: AtomicU32,
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
    /// Reads the inode in `bytes`, which are all the bytes of its slot.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an inode that is not in use, [`Error::Corrupt`] for one
    /// that makes no sense, [`Error::Unsupported`] for one this library cannot read.
    pub fn check(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> Result<Self> {
        let corrupt = |what| Error::Corrupt { what, inode: Some(number), block: None };
        let (raw, _) = RawInode::ref_from_prefix(bytes).map_err(|_| corrupt("inode"))?;
        if raw.i_links_count.get() == 0 {
            return Err(Error::NotFound);
        }
        Self::parse_used(bytes, number, super_)
    }

    /// A directory that can be read.
    ///
    /// # Errors
    /// [`Error::NotADirectory`]; [`Error::Unsupported`] as [`Inode::readable`].
    pub(crate) fn as_directory(self: Arc<Self>) -> Result<Arc<Self>> {
        if self.kind != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        self.readable()?;
        Ok(self)
    }

    /// [`Inode::check`] for those who know that the inode is in use though nothing names it.
    ///
    /// # Errors
    /// As [`Inode::check`], but for [`Error::NotFound`].
    pub(crate) fn parse_used(
        bytes: &[u8],
        number: InodeNumber,
        super_: &Superblock,
    ) -> Result<Self> {
        let corrupt = |what| Error::Corrupt { what, inode: Some(number), block: None };
        let (raw, _) = RawInode::ref_from_prefix(bytes).map_err(|_| corrupt("inode"))?;
        let mode = raw.i_mode.get();
        let kind = FileType::from_mode(u32::from(mode)).ok_or(corrupt("inode: kind"))?;
        let extra = Extra::of(bytes).ok_or(corrupt("inode: extra size"))?;
        let attribute_block = match super_.incompatible.contains(Incompatible::SIXTY_FOUR_BIT) {
            true => u64::from(raw.i_file_acl_high.get()) << 32,
            false => 0,
        } | u64::from(raw.i_file_acl_lo.get());
        let attribute_block = (attribute_block != 0).then_some(FsBlock(attribute_block));
        if !has_valid_checksum(bytes, number, super_) {
            return Err(corrupt("inode: checksum"));
        }
        Ok(Self {
            number,
            kind,
            size_bytes: size(raw, kind, super_).ok_or(corrupt("inode: size"))?,
            flags: raw.i_flags.get(),
            xattr_block: attribute_block,
            pointers: raw.i_block.map(U32::get),
            attributes_at: extra.attributes_at,
            lookup_hint: AtomicU32::new(0),
            stat: Stat {
                mode,
                links: raw.i_links_count.get(),
                uid: join16(raw.i_uid.get(), raw.i_uid_high.get()),
                gid: join16(raw.i_gid.get(), raw.i_gid_high.get()),
                generation: raw.i_generation.get(),
                blocks_512: sectors(raw, super_),
                accessed: time(raw.i_atime.get(), extra.accessed),
                modified: time(raw.i_mtime.get(), extra.modified),
                changed: time(raw.i_ctime.get(), extra.changed),
                created: extra.created.map(|(low, high)| time(low, high)),
                project: extra.project,
            },
        })
    }

    /// Owner and group.
    pub fn owner(&self) -> (u32, u32) {
        (self.stat.uid, self.stat.gid)
    }

    /// Kind and permissions.
    pub fn mode(&self) -> u32 {
        self.stat.mode.into()
    }

    /// The project whose quota it counts for; 0 is the one that everything belongs to at first.
    pub fn project(&self) -> u32 {
        self.stat.project
    }

    /// Whether its contents, or the names in it, are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.flags & flags::ENCRYPT != 0
    }

    /// Whether its contents are inside it.
    pub fn is_inline(&self) -> bool {
        self.flags & flags::INLINE_DATA != 0
    }

    /// Whether its contents are the value of an extended attribute.
    pub fn is_ea_inode(&self) -> bool {
        self.flags & flags::EA_INODE != 0
    }

    /// The hash of the value that it holds.
    pub(crate) fn ea_inode_hash(&self) -> u32 {
        low32(self.stat.accessed.seconds.cast_unsigned())
    }

    /// Whether it says that it holds a value of `owner` alone, as a forerunner of `ea_inode` did,
    /// which kept no hash.
    pub(crate) fn is_ea_inode_of(&self, owner: &Self) -> bool {
        low32(self.stat.modified.seconds.cast_unsigned()) == owner.number.0
            && self.stat.generation == owner.stat.generation
    }

    /// The bytes in the place of its block pointers.
    pub(crate) fn pointer_bytes(&self) -> [u8; POINTER_BYTES] {
        let mut bytes = [0; POINTER_BYTES];
        bytes.copy_from_slice(self.pointers.map(u32::to_le_bytes).as_flattened());
        bytes
    }

    /// Whether blocks of a device may belong to it.
    pub(crate) fn has_map(&self, super_: &Superblock) -> bool {
        matches!(self.kind, FileType::File | FileType::Directory | FileType::Symlink)
            && !self.is_inline()
            && self.fast_target(super_).is_none()
    }

    /// Names that lead here.
    pub fn links(&self) -> u16 {
        self.stat.links
    }

    /// The generation that tells two files apart that had the same number.
    pub fn generation(&self) -> u32 {
        self.stat.generation
    }

    /// The file, as what belongs to it names it.
    pub fn id(&self) -> FileId {
        FileId { inode: self.number.0, generation: self.stat.generation }
    }

    /// Whether its blocks are found by extents.
    pub fn has_extents(&self) -> bool {
        self.flags & flags::EXTENTS != 0
    }

    /// Whether extended attributes may be there.
    pub fn has_xattrs(&self) -> bool {
        self.xattr_block.is_some() || self.attributes_at.is_some()
    }

    /// The target of a symbolic link that is stored in the inode itself.
    pub fn fast_target(&self, super_: &Superblock) -> Option<Vec<u8>> {
        // A fast link has no data block; the only block it may own is its attributes'.
        let len = usize::try_from(self.size_bytes).ok()?;
        let fast = self.kind == FileType::Symlink && len < size_of_val(&self.pointers);
        let cluster =
            u64::from(super_.block_bytes >> 9).saturating_mul(super_.cluster_blocks.into());
        let attributes = self.xattr_block.map_or(0, |_| cluster);
        // Values in inodes of their own are counted, too: there the length decides alone.
        let by_length = super_.incompatible.contains(Incompatible::EA_INODE);
        if !fast || (!by_length && self.stat.blocks_512 > attributes) {
            return None;
        }
        self.pointer_bytes().get(..len).map(<[u8]>::to_vec)
    }

    /// What `stat` shows.
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

    /// How long it is to those who have no key: an encrypted target is as long as it is shown.
    fn reported_size(&self) -> u64 {
        match (self.kind, self.is_encrypted()) {
            (FileType::Symlink, true) => nokey::target_bytes(self.size_bytes),
            _ => self.size_bytes,
        }
    }

    /// Linux says that a file inside its inode has sectors, lest it be taken for a hole.
    fn reported_sectors(&self) -> u64 {
        let inside = self.kind == FileType::File && self.is_inline();
        let sectors = if inside { self.size_bytes.div_ceil(512) } else { 0 };
        self.stat.blocks_512.saturating_add(sectors)
    }

    /// Major and minor number of a device: 8 bits each in the first pointer, or 12 and
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

    /// Refuses contents that this library cannot read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming how the contents are stored; [`Error::NoKey`] for an
    /// encrypted file.
    pub fn readable(&self) -> Result<()> {
        let unread = [(flags::COMPRESSED, "needs: compression")];
        match unread.into_iter().find(|(flag, _)| self.flags & flag != 0) {
            Some((_, feature)) => Err(Error::Unsupported { feature: feature.to_owned() }),
            None if self.is_encrypted() && self.kind == FileType::File => Err(Error::NoKey),
            None => Ok(()),
        }
    }
}

/// What an inode of more than 128 bytes says beyond them.
#[derive(Default)]
struct Extra {
    changed: u32,
    modified: u32,
    accessed: u32,
    created: Option<(u32, u32)>,
    project: u32,
    attributes_at: Option<u16>,
}

impl Extra {
    /// `None` if the inode claims more bytes than its slot has.
    fn of(bytes: &[u8]) -> Option<Self> {
        let Some(extra_bytes) = le16(bytes, GOOD_OLD_INODE_SIZE) else {
            return Some(Self::default());
        };
        let end = GOOD_OLD_INODE_SIZE.checked_add(usize::from(extra_bytes))?;
        if end > bytes.len() || !extra_bytes.is_multiple_of(4) {
            return None;
        }
        let known = bytes.get(..end)?;
        let field = |at| le32(known, at).unwrap_or(0);
        // Slots written by old kernels have no extra fields and no attributes either.
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

/// Where the two halves of the checksum of an inode stand.
const CHECKSUM_AT: [usize; 2] = [0x7C, 0x82];

/// The checksum of an inode, on volumes that have them: 16 bits of it where its extra fields are
/// too few for all 32.
fn checksum(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> Option<Checksum> {
    let [low_at, high_at] = CHECKSUM_AT;
    let part = |from: usize, to: usize| bytes.get(from..to).unwrap_or_default();
    let raw = RawInode::ref_from_prefix(bytes).ok()?.0;
    let seed =
        super_.checksum_of_file(FileId { inode: number.0, generation: raw.i_generation.get() })?;
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

/// Whether the extra fields of an inode reach the second half of its checksum.
fn has_checksum_hi(bytes: &[u8]) -> bool {
    le16(bytes, GOOD_OLD_INODE_SIZE).is_some_and(|extra| extra >= 4)
}

/// Whether the checksum of an inode is right, or there is none.
pub fn has_valid_checksum(bytes: &[u8], number: InodeNumber, super_: &Superblock) -> bool {
    let Some(sum) = checksum(bytes, number, super_) else { return true };
    let [low_at, high_at] = CHECKSUM_AT;
    le16(bytes, low_at) == Some(sum.low16())
        && (!has_checksum_hi(bytes) || le16(bytes, high_at) == Some(sum.high16()))
}

/// Makes the checksum of an inode right, on volumes that have them.
pub fn set_checksum(bytes: &mut [u8], number: InodeNumber, super_: &Superblock) {
    let Some(sum) = checksum(bytes, number, super_) else { return };
    let [low_at, high_at] = CHECKSUM_AT;
    let _ = put16(bytes, low_at, sum.low16());
    if has_checksum_hi(bytes) {
        let _ = put16(bytes, high_at, sum.high16());
    }
}

/// Zeros where the checksum of an inode stands, on volumes with checksums or without.
pub(super) fn clear_checksum(bytes: &mut [u8]) {
    let has_high = has_checksum_hi(bytes);
    let [low_at, high_at] = CHECKSUM_AT;
    let _ = put16(bytes, low_at, 0);
    if has_high {
        let _ = put16(bytes, high_at, 0);
    }
}

/// An inode as it is to be written.
#[derive(Clone, Debug, Default)]
pub struct NewInode<'a> {
    /// Kind and permissions.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Names that lead here.
    pub links: u16,
    /// Sectors of 512 bytes that it owns, indirect and attribute blocks included: 48 bits with
    /// `huge_file`, else 32.
    pub sectors: u64,
    /// `i_flags`.
    pub flags: u32,
    /// Block pointers, target or device number.
    pub pointers: [u32; POINTERS],
    /// Last read.
    pub accessed: Time,
    /// Contents changed last.
    pub modified: Time,
    /// Inode changed last.
    pub changed: Time,
    /// Made; lost where the inode has no room for it.
    pub created: Time,
    /// The block of extended attributes; 0 if there is none.
    pub xattr_block: u64,
    /// The list of attributes inside the inode, without its magic number.
    pub attributes: &'a [u8],
}

/// Bytes behind the first 128 that this library fills, where an inode has them.
pub const EXTRA_BYTES: u16 = 32;

impl NewInode<'_> {
    /// The bytes of its slot of `inode_bytes`.
    pub fn encode(&self, inode_bytes: u32) -> Vec<u8> {
        let has_extra = inode_bytes >= 256;
        let fit = |time: Time| if has_extra { time } else { without_epoch(time) };
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

/// The two forms in which a device number is kept: small ones in the first pointer.
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

/// A symbolic link's target as pointers, if it is short enough to live in the inode.
pub fn target_pointers(target: &[u8]) -> Option<[u32; POINTERS]> {
    let mut bytes = [0; POINTERS * 4];
    // One byte less than there is room: readers expect a NUL.
    let (last, room) = bytes.split_last_mut()?;
    *last = 0;
    room.get_mut(..target.len())?.copy_from_slice(target);
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    Some(std::array::from_fn(|_| words.next().unwrap_or(0)))
}

/// A time as its seconds field and its extra field.
pub(super) fn split_time(time: Time) -> (u32, u32) {
    let time = clamp_time(time, SECONDS_MAX);
    let low = low32(time.seconds.cast_unsigned());
    let epoch = time.seconds.saturating_sub(i64::from(low.cast_signed())) >> 32;
    (low, low32(epoch.cast_unsigned()) & 3 | time.nanoseconds << 2)
}

/// The nearest time that 32 bits can say.
pub(super) fn without_epoch(time: Time) -> Time {
    Time { nanoseconds: 0, ..clamp_time(time, i32::MAX.into()) }
}

/// The last second that the two bits beside 32 of them can say, in 2446.
const SECONDS_MAX: i64 = 0x3_7FFF_FFFF;

/// The nearest time from the first that can be said up to `last`, as Linux clamps it.
fn clamp_time(time: Time, last: i64) -> Time {
    if InjectedFault::ClampedTimes.is_made() {
        return time;
    }
    let seconds = time.seconds.clamp(i32::MIN.into(), last);
    let at_end = seconds == i64::from(i32::MIN) || seconds == last;
    Time { seconds, nanoseconds: if at_end { 0 } else { time.nanoseconds } }
}

pub(super) fn low16(value: u32) -> u16 {
    let [a, b, ..] = value.to_le_bytes();
    u16::from_le_bytes([a, b])
}

pub(crate) fn low32(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

fn join16(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

/// Seconds are signed; the two lowest bits of the extra field carry them past 2038, the
/// other thirty are nanoseconds.
fn time(low: u32, extra: u32) -> Time {
    let epoch = i64::from(extra & 3) << 32;
    Time {
        seconds: i64::from(low.cast_signed()).saturating_add(epoch),
        nanoseconds: (extra >> 2).min(999_999_999),
    }
}

/// Size in bytes; the high half counts for files, and for directories with `large_dir`.
fn size(raw: &RawInode, kind: FileType, super_: &Superblock) -> Option<u64> {
    let high = match kind {
        FileType::File => raw.i_size_high.get(),
        FileType::Directory if super_.incompatible.contains(Incompatible::LARGEDIR) => {
            raw.i_size_high.get()
        }
        _ => 0,
    };
    let size = u64::from(raw.i_size_lo.get()) | u64::from(high) << 32;
    // No file can be longer than its block numbers reach; nor does off_t.
    let reach = u64::from(super_.block_bytes).checked_shl(32)?;
    (size <= reach.min(i64::MAX.unsigned_abs())).then_some(size)
}

fn sectors(raw: &RawInode, super_: &Superblock) -> u64 {
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
    fn what_is_split_for_the_disk_comes_back() {
        for seconds in [1 - (1i64 << 31), -1, 0, 1 << 31, (1 << 32) + 7, SECONDS_MAX - 1] {
            let kept = Time { seconds, nanoseconds: 999_999_999 };
            let (low, extra) = split_time(kept);
            assert_eq!(time(low, extra), kept);
        }
        assert_eq!(target_pointers(&[b'x'; 60]), None);
        assert_eq!(target_pointers(b"abcd").unwrap()[..2], [0x6463_6261, 0]);
        assert_eq!(device_pointers((5, 1))[..2], [0x501, 0]);
        assert_eq!(device_pointers((259, 70_000))[..2], [0, 0x1111_0370 & !0xFFF00 | 259 << 8]);
    }

    #[test]
    fn times_reach_from_1901_to_2446() {
        assert_eq!(time(0x8000_0000, 0).seconds, -(1 << 31));
        assert_eq!(time(0x7FFF_FFFF, 3).seconds, (1 << 31) - 1 + (3 << 32));
        assert_eq!(time(5, 7 << 2 | 1), Time { seconds: 5 + (1 << 32), nanoseconds: 7 });
        // What lies outside becomes the nearest second that can be said.
        for (seconds, nearest) in [(i64::MAX, SECONDS_MAX), (i64::MIN, -(1 << 31))] {
            let (low, extra) = split_time(Time { seconds, nanoseconds: 5 });
            assert_eq!(time(low, extra), Time { seconds: nearest, nanoseconds: 0 });
        }
    }
}
