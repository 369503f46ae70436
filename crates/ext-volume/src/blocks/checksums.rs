//! Checksums of blocks by role (`metadata_csum`), and of the superblock.
//!
//! Smaller structures (inodes, descriptors) get their checksums from the code that changes them,
//! and the checksums of bitmaps are in the descriptors: not here.

use crate::blocks::data::SharedBytes;
use crate::blocks::role::{BlockChecksums, Role};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::format::{dir_tail, extent, orphan_file, xattr};
use crate::{Error, FsBlock, Result};

/// Block checksums of a `metadata_csum` volume.
#[derive(Debug)]
pub struct MetadataChecksums {
    super_: Superblock,
}

impl MetadataChecksums {
    /// Returns the checksums of a volume, if it has any.
    pub fn for_volume(super_: &Superblock) -> Option<Box<dyn BlockChecksums>> {
        super_.checksum_seed?;
        Some(Box::new(Self { super_: super_.clone() }))
    }
}

impl BlockChecksums for MetadataChecksums {
    fn verify_checksum(&self, role: Role, block: FsBlock, bytes: &[u8]) -> Result<()> {
        let Some(seed) = self.super_.checksum_seed else { return Ok(()) };
        let of = |file| self.super_.file_checksum_seed(file).unwrap_or(seed);
        let (sound, what) = match role {
            Role::Directory(dir) => {
                (dir_tail::has_valid_checksum(bytes, of(dir)), "directory block: checksum")
            }
            Role::ExtentNode(file) => {
                (extent::has_valid_checksum(bytes, of(file)), "extent tree: checksum")
            }
            Role::XattrBlock => (
                xattr::has_valid_checksum(bytes, seed, block),
                "extended attribute block: checksum",
            ),
            Role::OrphanFile(file) => (
                orphan_file::has_valid_checksum(bytes, of(file), block),
                "file of orphans: checksum",
            ),
            Role::Superblock
            | Role::Descriptors
            | Role::BlockBitmap(_)
            | Role::InodeBitmap(_)
            | Role::InodeTable
            | Role::IndirectBlock(_)
            | Role::Quota
            | Role::Contents => return Ok(()),
        };
        if sound { Ok(()) } else { Err(Error::corrupt(what).with_block(block)) }
    }

    fn set_checksum(&self, role: Role, block: FsBlock, bytes: &mut SharedBytes) {
        let Some(seed) = self.super_.checksum_seed else { return };
        let of = |file| self.super_.file_checksum_seed(file).unwrap_or(seed);
        match role {
            Role::Directory(dir) => dir_tail::set_checksum(bytes.make_mut(), of(dir)),
            Role::ExtentNode(file) => extent::set_checksum(bytes.make_mut(), of(file)),
            Role::XattrBlock => xattr::set_checksum(bytes.make_mut(), seed, block),
            Role::OrphanFile(file) => orphan_file::set_checksum(bytes.make_mut(), of(file), block),
            Role::Superblock => {
                let (_, at) = self.super_.location();
                let raw = bytes.make_mut().get_mut(at..).unwrap_or_default();
                // A block without space for a checksum has none.
                let _ = RawSuperblock::view_mut(raw).map(RawSuperblock::preserve_checksum);
            }
            Role::Descriptors
            | Role::BlockBitmap(_)
            | Role::InodeBitmap(_)
            | Role::InodeTable
            | Role::IndirectBlock(_)
            | Role::Quota
            | Role::Contents => {}
        }
    }
}
