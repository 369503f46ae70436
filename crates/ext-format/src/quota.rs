//! Quota files: usage and limits of every user, group or project.
//!
//! ```text
//!   | header | root | references, entries, unused ..                     blocks of 1,024 bytes
//!   root ─ bits 24-31 of the id ▶ node ─ 16-23 ▶ node ─ 8-15 ▶ node ─ 0-7 ▶ 14 entries
//!   header ─▶ first block of entries with a free entry ⇄ next ..
//!          ─▶ first free block ─▶ next ..
//! ```
//! Law: a lookup has four steps, whatever the references say. A reference or list entry that points
//! to the root or beyond the file is damage.

mod build;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{le32, put32};
pub use build::{build_quota_file, file_bytes};

use crate::{Error, Result};

/// Bytes of a quota block, independent of the volume's block size.
pub const BLOCK_BYTES: u32 = 1024;
/// Block of the root.
pub const ROOT_BLOCK: u32 = 1;
/// Levels of nodes above the entries, including the root.
pub const TREE_LEVELS: u32 = 4;
/// Version of the format.
const VERSION: u32 = 1;
/// Entries per block.
const ENTRIES_PER_BLOCK: usize = 14;

/// Inodes of the user and group quota files; the project file has any inode.
pub const USER_QUOTA_INODE: u32 = 3;
/// See [`USER_QUOTA_INODE`].
pub const GROUP_QUOTA_INODE: u32 = 4;

/// Kind of quota owners.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum QuotaType {
    /// User quotas.
    User,
    /// Group quotas.
    Group,
    /// Project quotas.
    Project,
}

impl QuotaType {
    /// All kinds, in the order of the superblock.
    pub const ALL: [Self; 3] = [Self::User, Self::Group, Self::Project];

    const fn magic(self) -> u32 {
        match self {
            Self::User => 0xD9C0_1F11,
            Self::Group => 0xD9C0_1927,
            Self::Project => 0xD9C0_3F14,
        }
    }
}

/// On-disk header.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawQuotaHeader {
    pub dqh_magic: U32,
    pub dqh_version: U32,
    pub dqi_bgrace: U32,
    pub dqi_igrace: U32,
    pub dqi_flags: U32,
    pub dqi_blocks: U32,
    pub dqi_free_blk: U32,
    pub dqi_free_entry: U32,
}

/// On-disk block of entries.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawEntries {
    pub dqdh_next_free: U32,
    pub dqdh_prev_free: U32,
    pub dqdh_entries: U16,
    pub dqdh_pad1: U16,
    pub dqdh_pad2: U32,
    pub entries: [RawEntry; ENTRIES_PER_BLOCK],
}

/// On-disk entry.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, PartialEq, Eq)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RawEntry {
    pub dqb_id: U32,
    pub dqb_pad: U32,
    pub dqb_ihardlimit: U64,
    pub dqb_isoftlimit: U64,
    pub dqb_curinodes: U64,
    pub dqb_bhardlimit: U64,
    pub dqb_bsoftlimit: U64,
    pub dqb_curspace: U64,
    pub dqb_btime: U64,
    pub dqb_itime: U64,
}

const _: () = assert!(size_of::<RawEntries>() == BLOCK_BYTES as usize);

/// Used inodes and bytes, or a change of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuotaUsage {
    /// Inodes.
    pub inodes: i64,
    /// Bytes of allocated blocks.
    pub bytes: i64,
}

impl QuotaUsage {
    /// Adds two usages.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            inodes: self.inodes.saturating_add(other.inodes),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    /// Negates a usage.
    #[must_use]
    pub const fn negated(self) -> Self {
        Self { inodes: self.inodes.saturating_neg(), bytes: self.bytes.saturating_neg() }
    }
}

/// Contents of a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuotaHeader {
    /// Blocks of the file, including the header.
    pub blocks: u32,
    /// First free block; 0 for none.
    pub first_free_block: u32,
    /// First block with a free entry; 0 for none.
    pub first_free_entry_block: u32,
}

impl QuotaHeader {
    /// Parses the header of a file of `file_bytes`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the kind, version or a number is invalid.
    pub fn check(bytes: &[u8], kind: QuotaType, file_bytes: u64) -> Result<Self> {
        let (raw, _) = RawQuotaHeader::ref_from_prefix(bytes)
            .map_err(|_| Error::corrupt("quota file: header"))?;
        if (raw.dqh_magic.get(), raw.dqh_version.get()) != (kind.magic(), VERSION) {
            return Err(Error::corrupt("quota file: kind or version"));
        }
        let header = Self {
            blocks: raw.dqi_blocks.get(),
            first_free_block: raw.dqi_free_blk.get(),
            first_free_entry_block: raw.dqi_free_entry.get(),
        };
        let bytes = u64::from(header.blocks).saturating_mul(BLOCK_BYTES.into());
        if header.blocks <= ROOT_BLOCK || bytes > file_bytes {
            return Err(Error::corrupt("quota file: length"));
        }
        header.check_reference(header.first_free_block)?;
        header.check_reference(header.first_free_entry_block)?;
        if header.first_free_entry_block != 0
            && header.first_free_entry_block == header.first_free_block
        {
            return Err(Error::corrupt("quota file: a block with entries is unused"));
        }
        Ok(header)
    }

    /// Writes the fields into a checked header.
    pub fn write(&self, bytes: &mut [u8]) {
        if let Ok((raw, _)) = RawQuotaHeader::mut_from_prefix(bytes) {
            raw.dqi_blocks.set(self.blocks);
            raw.dqi_free_blk.set(self.first_free_block);
            raw.dqi_free_entry.set(self.first_free_entry_block);
        }
    }

    /// Returns the block of a reference; `None` for 0.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a block outside the tree.
    pub fn check_reference(&self, reference: u32) -> Result<Option<u32>> {
        match reference {
            0 => Ok(None),
            it if it > ROOT_BLOCK && it < self.blocks => Ok(Some(it)),
            _ => Err(Error::corrupt("quota file: reference")),
        }
    }
}

/// Returns the offset of the reference for an id in a node; the root is level 0.
fn reference_index(id: u32, level: u32) -> usize {
    let [first, second, third, fourth] = id.to_be_bytes();
    let nth = match level {
        0 => first,
        1 => second,
        2 => third,
        _ => fourth,
    };
    usize::from(nth).saturating_mul(4)
}

/// Returns the reference for an id in a node of that level.
pub fn reference(node: &[u8], id: u32, level: u32) -> u32 {
    le32(node, reference_index(id, level)).unwrap_or(0)
}

/// Sets [`fn@reference`].
pub fn set_reference(node: &mut [u8], id: u32, level: u32, to: u32) {
    let _ = put32(node, reference_index(id, level), to);
}

impl RawEntry {
    /// Marks the entry of id 0, because an entry of zeros is free.
    const ID_ZERO_MARK: u64 = 1;

    fn is_free(&self) -> bool {
        self.as_bytes().iter().all(|byte| *byte == 0)
    }

    fn add_usage(&mut self, usage: QuotaUsage) {
        let sum = |old: U64, change: i64| U64::new(old.get().saturating_add_signed(change));
        self.dqb_curinodes = sum(self.dqb_curinodes, usage.inodes);
        self.dqb_curspace = sum(self.dqb_curspace, usage.bytes);
        let has_limit = self.dqb_isoftlimit.get() != 0;
        if self.dqb_itime.get() == Self::ID_ZERO_MARK && !has_limit {
            self.dqb_itime.set(0);
        }
        if self.is_free() {
            self.dqb_itime.set(Self::ID_ZERO_MARK);
        }
    }
}

impl RawEntries {
    /// Views a block of entries.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is too short, or has more entries than fit.
    pub fn view(bytes: &[u8]) -> Result<&Self> {
        let damaged = || Error::corrupt("quota file: block of entries");
        let (raw, _) = Self::ref_from_prefix(bytes).map_err(|_| damaged())?;
        let fits = usize::from(raw.dqdh_entries.get()) <= raw.entries.len();
        fits.then_some(raw).ok_or_else(damaged)
    }

    /// Returns a mutable view of a block of entries.
    ///
    /// # Errors
    /// As [`RawEntries::view`].
    pub fn view_mut(bytes: &mut [u8]) -> Result<&mut Self> {
        Self::view(bytes)?;
        let (raw, _) = Self::mut_from_prefix(bytes)
            .map_err(|_| Error::corrupt("quota file: block of entries"))?;
        Ok(raw)
    }

    /// Returns the index of the entry of an id.
    pub fn find(&self, id: u32) -> Option<usize> {
        self.entries.iter().position(|entry| entry.dqb_id.get() == id && !entry.is_free())
    }

    /// Adds usage to the entry found by [`RawEntries::find`].
    pub fn add_usage_at(&mut self, nth: usize, usage: QuotaUsage) {
        if let Some(entry) = self.entries.get_mut(nth) {
            entry.add_usage(usage);
        }
    }

    /// Returns true if an entry is free.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the stored count differs from the used entries.
    pub fn has_free_entry(&self) -> Result<bool> {
        let used = self.entries.iter().filter(|entry| !entry.is_free()).count();
        let is_said = used == usize::from(self.dqdh_entries.get());
        let damaged = Error::corrupt("quota file: number of entries");
        if is_said { Ok(used < self.entries.len()) } else { Err(damaged) }
    }

    /// Adds an entry in a free slot; returns true if another slot is free.
    pub fn add(&mut self, id: u32, usage: QuotaUsage) -> bool {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.is_free()) {
            entry.dqb_id.set(id);
            entry.add_usage(usage);
            self.dqdh_entries.set(self.dqdh_entries.get().saturating_add(1));
        }
        usize::from(self.dqdh_entries.get()) < self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_path_of_id_has_four_bytes() {
        let mut node = vec![0; 1024];
        for (level, nth) in [(0, 0x12), (1, 0x34), (2, 0x56), (3, 0x78)] {
            set_reference(&mut node, 0x1234_5678, level, 7);
            assert_eq!(le32(&node, nth * 4), Some(7));
            assert_eq!(reference(&node, 0x1234_5678, level), 7);
        }
        assert_eq!(reference(&node, 0, 0), 0);
    }

    #[test]
    fn entries_are_found_and_never_all_zero() {
        let mut bytes = vec![0; 1024];
        let entries = RawEntries::view_mut(&mut bytes).unwrap();
        assert_eq!(entries.find(0), None, "zeros are no entry of the superuser");
        let one = QuotaUsage { inodes: 1, bytes: 4096 };
        for id in 0..13 {
            assert!(entries.add(id, one));
        }
        assert!(!entries.add(13, one), "that was the last one");
        assert_eq!(entries.has_free_entry(), Ok(false));
        entries.add_usage_at(0, one.negated());
        assert_eq!(entries.find(0), Some(0), "it has nothing, and is an entry");
        entries.add_usage_at(0, one);
        let again = entries.entries.first().unwrap();
        assert_eq!((again.dqb_curspace.get(), again.dqb_itime.get()), (4096, 0));
        entries.dqdh_entries.set(3);
        assert!(entries.has_free_entry().is_err());
        entries.dqdh_entries.set(15);
        assert!(RawEntries::view(&bytes).is_err());
    }

    #[test]
    fn header_checks_type_and_file_size() {
        let mut bytes = vec![0; 1024];
        let (raw, _) = RawQuotaHeader::mut_from_prefix(&mut bytes).unwrap();
        raw.dqh_magic.set(QuotaType::Group.magic());
        raw.dqh_version.set(1);
        raw.dqi_blocks.set(6);
        raw.dqi_free_entry.set(5);
        let header = QuotaHeader::check(&bytes, QuotaType::Group, 6144).unwrap();
        assert_eq!(
            header,
            QuotaHeader { blocks: 6, first_free_block: 0, first_free_entry_block: 5 }
        );
        assert!(QuotaHeader::check(&bytes, QuotaType::User, 6144).is_err());
        assert!(QuotaHeader::check(&bytes, QuotaType::Group, 6143).is_err());
        for wrong in [1, 6, u32::MAX] {
            assert!(header.check_reference(wrong).is_err());
        }
        assert_eq!((header.check_reference(0), header.check_reference(5)), (Ok(None), Ok(Some(5))));
        QuotaHeader { first_free_block: 6, ..header }.write(&mut bytes);
        assert!(QuotaHeader::check(&bytes, QuotaType::Group, 6144).is_err());
    }
}
