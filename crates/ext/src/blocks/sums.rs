//! Checksums of whole blocks, by their roles (`metadata_csum`), and of the superblock.
//!
//! What else is smaller than a block (inodes, descriptors) is sealed by what changes it, and the
//! sums of bitmaps are in the descriptors: none of these is here.

use crate::blocks::data::Data;
use crate::blocks::role::{Role, Sums};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::format::{extent, leaf, orphan_file, xattr};
use crate::{Error, FsBlock, Result};

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct MetadataSums {
    super_: Superblock,
}

impl MetadataSums {
    /// The sums of a volume, if it has any.
    pub(crate) fn of(super_: &Superblock) -> Option<Box<dyn Sums>> {
        super_.checksum_seed?;
        Some(Box::new(Self { super_: super_.clone() }))
    }
}

impl Sums for MetadataSums {
    fn verify(&self, role: Role, block: FsBlock, bytes: &[u8]) -> Result<()> {
        let Some(seed) = self.super_.checksum_seed else { return Ok(()) };
        let of = |file| self.super_.checksum_of_file(file).unwrap_or(seed);
        let (sound, what) = match role {
            Role::Directory(dir) => (leaf::is_sealed(bytes, of(dir)), "directory block: checksum"),
            Role::Extents(file) => (extent::is_sealed(bytes, of(file)), "extent tree: checksum"),
            Role::Attributes => {
                (xattr::is_sealed(bytes, seed, block), "extended attribute block: checksum")
            }
            Role::Orphans(file) => {
                (orphan_file::is_sealed(bytes, of(file), block), "file of orphans: checksum")
            }
            Role::Superblock
            | Role::Descriptors
            | Role::BlockBitmap(_)
            | Role::InodeBitmap(_)
            | Role::Inodes
            | Role::Map(_)
            | Role::Quota
            | Role::Contents => return Ok(()),
        };
        if sound { Ok(()) } else { Err(Error::corrupt(what).in_block(block)) }
    }

    fn seal(&self, role: Role, block: FsBlock, bytes: &mut Data) {
        let Some(seed) = self.super_.checksum_seed else { return };
        let of = |file| self.super_.checksum_of_file(file).unwrap_or(seed);
        match role {
            Role::Directory(dir) => leaf::seal(bytes.make_mut(), of(dir)),
            Role::Extents(file) => extent::seal(bytes.make_mut(), of(file)),
            Role::Attributes => xattr::seal(bytes.make_mut(), seed, block),
            Role::Orphans(file) => orphan_file::seal(bytes.make_mut(), of(file), block),
            Role::Superblock => {
                let (_, at) = self.super_.place();
                let raw = bytes.make_mut().get_mut(at..).unwrap_or_default();
                // A block that has room for none has none.
                let _ = RawSuperblock::view_mut(raw).map(RawSuperblock::balance);
            }
            Role::Descriptors
            | Role::BlockBitmap(_)
            | Role::InodeBitmap(_)
            | Role::Inodes
            | Role::Map(_)
            | Role::Quota
            | Role::Contents => {}
        }
    }
}
