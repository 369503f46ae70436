//! Everything that can be read of a damaged volume.
//!
//! ```text
//!   superblock, descriptors: or their backups
//!   root ─▶ names ─▶ inodes ─▶ items ─────────────────────▶ contents, in runs that can be read
//!   inode tables ─▶ in use, without a name ─▶ lost+found ─┘        │
//!        └──────────── what is missing, or may be wrong ◀──────────┘
//! ```
//! Law 1: an error costs what it is about: a block of a directory its names, a block of a map its
//! part of the contents, a sector itself.
//! Law 2: a structure with a wrong checksum that can be parsed is used, and named as doubtful.
//! Law 3: everything that is missing is named: files without contents, ranges of bytes, lost names.
//! Law 4: all directories together have no more blocks than the volume, all contents no more than
//! four times as many, and no path is longer than [`MAX_PATH_BYTES`].

mod contents;
mod listing;
mod sizes;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use draconis_device::Disk;
use draconis_types::lock::Mutex;
use draconis_types::{Attributes, FileType};

use crate::backup::SuperblockPlace;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::check::Progress;
use crate::format::inode::{Inode, flags, has_valid_checksum};
use crate::format::le32;
use crate::format::superblock::Superblock;
use crate::format::witness::{self, FORMS};
use crate::map::SEGMENT_BLOCKS;
use crate::options::OpenOptions;
use crate::repair;
use crate::volume::Volume;
use crate::{Error, FileBlock, FsBlock, InodeNumber, Result};

pub use contents::Contents;

/// Directory for files without a name, as that of `repair`.
const LOST_AND_FOUND: &[u8] = b"lost+found";
/// Longest path that is given to a file; deeper directories count as such without a name.
pub const MAX_PATH_BYTES: usize = 4000;
/// Times that contents may have the blocks of the volume.
const CONTENTS_PER_VOLUME: u64 = 4;
/// Inodes with a wrong checksum of which all bits are tried.
const MAX_MENDED_INODES: u32 = 256;
/// Blocks of a file up to which two maps are compared.
const MAX_COMPARED_BLOCKS: u64 = 1 << 24;
/// Problem of a file that is in lost+found.
pub const UNNAMED: &str = "no directory names it";
/// Reason for doubt in an inode.
const DOUBTFUL_INODE: &str = "the checksum of its inode is wrong: all of it may be wrong";

/// A file, directory or link to copy.
#[derive(Debug)]
pub struct RescuedItem {
    /// Path from the root directory, without a slash at its beginning; empty for the root.
    pub path: Vec<u8>,
    /// Its attributes; `None` for a directory that is only there for what is in it.
    pub attributes: Option<Attributes>,
    /// Index of an earlier item with the same inode.
    pub link_to: Option<usize>,
    inode: Option<Arc<Inode>>,
    /// First block of the contents.
    first_block: u64,
}

impl RescuedItem {
    /// Returns the inode's number.
    pub fn inode(&self) -> Option<InodeNumber> {
        self.inode.as_ref().map(|inode| inode.number)
    }
}

/// Names and values of extended attributes.
pub type XattrPairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Something that is missing or may be wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loss {
    /// Path of the file or directory.
    pub path: Vec<u8>,
    /// Its inode.
    pub inode: Option<InodeNumber>,
    /// What is wrong.
    pub what: String,
    /// Bytes of its contents that are missing, sorted. They are copied as zeros.
    pub missing: Vec<Range<u64>>,
    /// True if nothing of it is copied.
    pub is_lost: bool,
}

/// The files of a damaged volume.
#[derive(Debug)]
pub struct Rescue {
    volume: Volume,
    /// The superblock as if the volume had no checksums.
    unchecked: Superblock,
    items: Vec<RescuedItem>,
    losses: Vec<Loss>,
    /// Indices of items in the order in which to copy them.
    order: Vec<usize>,
    /// Blocks that contents may still have.
    blocks_left: Mutex<u64>,
    /// Inodes with a wrong checksum of which all bits may still be tried.
    mends_left: AtomicU32,
    /// Files that are cut at the next mount: they have blocks after their end.
    cut_files: sizes::CutFiles,
    /// Nodes of maps that are still read to find the ends of files.
    nodes_left: AtomicU64,
}

impl Rescue {
    /// Opens the volume on `disk` and finds its files.
    ///
    /// # Errors
    /// As [`Volume::open_damaged`]; everything else is a [`Loss`].
    pub fn scan(
        disk: Arc<dyn Disk>,
        options: OpenOptions,
        place: &SuperblockPlace,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let volume = match place.block {
            Some(_) => Volume::open_damaged(disk, options, place)?,
            // Superblock and descriptors that a repair makes.
            None => match repair::with_repaired_layout(&disk) {
                Ok(repaired) => Volume::open_damaged(repaired, options, place)?,
                Err(_) => Volume::open_damaged(disk, options, place)?,
            },
        };
        let super_ = &volume.reader().super_;
        let unchecked = Superblock { checksum_seed: None, ..super_.clone() };
        let blocks = super_.blocks.min(volume.reader().disk_blocks());
        let blocks_left = Mutex::new(blocks.saturating_mul(CONTENTS_PER_VOLUME));
        let cut_files = sizes::CutFiles::of(volume.reader());
        let mut rescue = Self {
            volume,
            unchecked,
            items: vec![],
            losses: vec![],
            order: vec![],
            blocks_left,
            mends_left: AtomicU32::new(MAX_MENDED_INODES),
            cut_files,
            nodes_left: AtomicU64::new(blocks),
        };
        let found = listing::find(&rescue, progress);
        (rescue.items, rescue.losses, rescue.order) = (found.items, found.losses, found.order);
        Ok(rescue)
    }

    /// Returns the volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Returns all items; a directory precedes what is in it.
    pub fn items(&self) -> &[RescuedItem] {
        &self.items
    }

    /// Returns what was lost before any contents were read.
    pub fn losses(&self) -> &[Loss] {
        &self.losses
    }

    /// Returns the order in which to copy: each directory, then its files in the order of the disk.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// As [`Volume::read_link`].
    pub fn link_target(&self, item: &RescuedItem) -> Result<Vec<u8>> {
        self.volume.read_link_of(item.inode.as_deref().ok_or(Error::NotFound)?)
    }

    /// Returns the extended attributes that can be read, and the error of the others.
    pub fn xattrs(&self, item: &RescuedItem) -> (XattrPairs, Option<Error>) {
        let Some(inode) = &item.inode else { return (vec![], None) };
        let (reader, mut names) = (self.volume.reader(), vec![]);
        let visited = reader.visit_xattrs(inode, |attribute| {
            names.push(attribute.name());
            None::<()>
        });
        let (mut found, mut error) = (vec![], visited.err());
        for name in names {
            match reader.xattr_of(inode, &name) {
                Ok(value) => found.push((name, value)),
                Err(failed) => error = error.or(Some(failed)),
            }
        }
        (found, error)
    }

    /// Returns true if a file has the map, or the contents inside, of one of another scan.
    pub(crate) fn has_same_map(&self, item: &RescuedItem, other: &Self, its: &RescuedItem) -> bool {
        let runs = |rescue: &Self, inode: &Inode| {
            let blocks =
                inode.size_bytes.div_ceil(rescue.volume.reader().super_.block_bytes.into());
            let end = FileBlock(u32::try_from(blocks).ok()?);
            (blocks <= MAX_COMPARED_BLOCKS).then_some(())?;
            let mut runs = vec![];
            let mut at = FileBlock(0);
            while at < end {
                let next = at.offset(SEGMENT_BLOCKS).min(end);
                runs.extend(rescue.volume.reader().map_runs(inode, at, next).ok()?);
                at = next;
            }
            Some(runs)
        };
        let (Some(own), Some(others)) = (&item.inode, &its.inode) else { return false };
        if own.is_inline() || others.is_inline() {
            return false;
        }
        let own = runs(self, own);
        own.is_some() && own == runs(other, others)
    }

    /// Reads a block of metadata, and whether its checksum is right. `None` if it is not readable.
    fn metadata(&self, at: FsBlock, role: Role) -> Option<(SharedBytes, bool)> {
        let store = &self.volume.reader().store;
        let bytes = store.block(at, Role::Contents).ok()?;
        let is_sound = store.verify_checksum(at, role, &bytes).is_ok();
        Some((bytes, is_sound))
    }

    /// Returns true if an inode holds the value of an attribute.
    fn is_value(&self, number: InodeNumber) -> bool {
        let slot = self.volume.reader().inode_slot(number);
        slot.is_ok_and(|slot| le32(&slot, 32).is_some_and(|set| set & flags::EA_INODE != 0))
    }

    /// Returns an inode as the witnesses have it, and whether its checksum is right.
    fn inode(&self, number: InodeNumber) -> Result<(Arc<Inode>, bool)> {
        let reader = self.volume.reader();
        let super_ = &reader.super_;
        let error = match reader.node(number) {
            // Nothing outvotes a checksum.
            Ok(inode) if super_.checksum_seed.is_some() => return Ok((inode, true)),
            Ok(_) => Error::corrupt("inode").with_inode(number),
            Err(error) => error,
        };
        if !matches!(error, Error::Corrupt { .. }) {
            return Err(error);
        }
        let mut slot = reader.inode_slot(number)?.to_vec();
        let take = || {
            let one_less = |left: u32| left.checked_sub(1);
            self.mends_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
        };
        let may_mend = super_.checksum_seed.is_some() && take().is_ok();
        let mended = may_mend.then(|| witness::mend_inode(&slot, number, super_)).flatten();
        let is_sound = mended.is_some() || has_valid_checksum(&slot, number, super_);
        slot = mended.map_or(slot, |(_, mended)| mended);
        let mut inode = match Inode::check(&slot, number, &self.unchecked) {
            Err(Error::Corrupt { .. }) => {
                sizes::repair_fields(&mut slot, super_);
                Inode::check(&slot, number, &self.unchecked)?
            }
            checked => checked?,
        };
        // No name leads to the value of an attribute.
        inode.flags &= !flags::EA_INODE;
        let may_have_contents =
            matches!(inode.kind, FileType::File | FileType::Directory | FileType::Symlink);
        let form = witness::judge(&slot, super_.incompatible, super_.blocks)
            .filter(|_| may_have_contents && inode.fast_symlink_target(super_).is_none());
        if let Some(form) = form {
            inode.flags = inode.flags & !FORMS | form.flags;
        }
        inode.size_bytes = self.likely_size(&inode);
        Ok((Arc::new(inode), is_sound))
    }
}
