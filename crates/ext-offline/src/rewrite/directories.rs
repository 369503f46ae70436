//! Conversion of directories: adding checksum tails, removing them or htrees.
//!
//! | before | after |
//! |---|---|
//! | the names leave space for a checksum tail | they are packed |
//! | an htree block has a free entry | its limit is reduced |
//! | an htree block has a checksum no more | its limit is raised |
//! | one of these does not fit | the directory becomes linear; `e2fsck -fD` indexes it again |
//! | an htree is to be removed | the directory becomes linear |
//!
//! Law: a directory never loses blocks; it gets more if its names do not fit.

use std::collections::BTreeSet;

use super::VolumeRewrite;
use super::maps::MovedRun;
use crate::blocks::role::Role;
use crate::dir::edit::index::{self, IndexBlockKind};
use crate::dir::edit::repack;
use crate::format::dir_tail;
use crate::format::dirent::DirBlockFormat;
use crate::format::features::{Compatible, Incompatible};
use crate::format::htree::{DxEntries, DxRoot};
use crate::format::inode::{Inode, flags};
use crate::format::superblock::Superblock;
use crate::offline::{OfflineError, Result};
use crate::units::saturating_u32;
use crate::{FileId, FsBlock};

/// Limit of a converted directory's bytes, which are held in memory.
const MAX_CONVERTED_DIR_BYTES: u64 = 256 << 20;

/// Format changes applied to directories.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct DirectoryConversion {
    /// True if blocks get checksum tails.
    pub(crate) adds_checksums: bool,
    /// True if blocks have no checksums any more.
    pub(crate) drops_checksums: bool,
    /// True if htrees are removed.
    pub(crate) drops_indexes: bool,
}

/// A directory block: file block, old disk block, new disk block.
type MovedDirBlock = (u32, u64, u64);

impl VolumeRewrite<'_> {
    /// Converts a directory; `None` if it remains linear or an htree as before. Otherwise it is
    /// linear now, and the returned runs are its additional blocks.
    pub(super) fn convert_directory(
        &mut self,
        node: &Inode,
        file: FileId,
        pieces: &[MovedRun],
    ) -> Result<Option<Vec<MovedRun>>> {
        let has_tree = node.flags & flags::INDEX != 0;
        if node.is_encrypted() && node.flags & flags::CASEFOLD != 0 {
            let what = "a directory that is encrypted and ignores case is not laid out anew";
            return Err(OfflineError::Unsupported(what.to_owned()));
        }
        let mut places: Vec<MovedDirBlock> = vec![];
        for piece in pieces {
            let each = (0..piece.blocks).map(|nth| {
                let at = u64::from(nth);
                (
                    piece.from.saturating_add(nth),
                    piece.old.saturating_add(at),
                    piece.new.saturating_add(at),
                )
            });
            places.extend(each);
        }
        let DirectoryConversion { adds_checksums, drops_checksums, .. } = self.directory_conversion;
        let sums = adds_checksums || drops_checksums;
        if !(self.directory_conversion.drops_indexes && has_tree)
            && (!sums || self.fit_blocks(node, file, &places, has_tree)?)
        {
            return Ok(None);
        }
        self.convert_to_linear(node, file, &places).map(Some)
    }

    fn shape(super_: &Superblock) -> DirBlockFormat {
        DirBlockFormat {
            block_bytes: super_.block_bytes,
            filetype: super_.incompatible.contains(Incompatible::FILETYPE),
            has_checksums: super_.checksum_seed.is_some(),
        }
    }

    /// Makes space for a checksum in each block, or uses that of one; returns false, unchanged, if a
    /// block lacks it.
    fn fit_blocks(
        &mut self,
        node: &Inode,
        file: FileId,
        places: &[MovedDirBlock],
        has_tree: bool,
    ) -> Result<bool> {
        let shape = Self::shape(&self.planned.super_);
        let of_dir = |error: crate::Error| OfflineError::Volume(error.with_inode(node.number));
        let Ok(indexes) = (match has_tree {
            true => self.index_blocks(node, places),
            false => Ok(BTreeSet::new()),
        }) else {
            // An invalid htree becomes linear.
            return Ok(false);
        };
        // Check all blocks first, then change them.
        for is_done in [false, true] {
            for (nth, old, new) in places {
                let was = self.read(Role::Directory(node.file_id()), FsBlock(*old))?;
                let level = match nth {
                    0 => IndexBlockKind::Root,
                    _ => IndexBlockKind::Node,
                };
                let block = match indexes.contains(nth) {
                    true => index::fit_to_shape(&was, level, shape),
                    false if !shape.has_checksums => Ok(Some(was.clone())),
                    false => repack::convert_block(&was, shape),
                };
                let Some(block) = block.map_err(of_dir)? else { return Ok(false) };
                if is_done {
                    self.write(Role::Directory(file), *old, *new, block, &was)?;
                }
            }
        }
        Ok(true)
    }

    /// Returns the htree blocks of a directory.
    fn index_blocks(&self, node: &Inode, places: &[MovedDirBlock]) -> Result<BTreeSet<u32>> {
        let super_ = &self.old.super_;
        let role = Role::Directory(node.file_id());
        let wrong = || {
            OfflineError::Volume(crate::Error::corrupt("hash tree index").with_inode(node.number))
        };
        let read = |nth: u32| {
            let place = places.binary_search_by_key(&nth, |(at, ..)| *at);
            let place = place.ok().and_then(|place| places.get(place)).ok_or_else(wrong)?;
            self.read(role, FsBlock(place.1))
        };
        let root = read(0)?;
        let (says, top) = DxRoot::check(&root, super_.hash_unsigned, super_.hash_seed)?;
        let mut indexes = BTreeSet::from([0]);
        let mut level = child_blocks(top);
        for depth in 0..says.levels {
            let mut next = vec![];
            for nth in &level {
                if !indexes.insert(*nth) {
                    return Err(wrong());
                }
                if depth.saturating_add(1) < says.levels {
                    let block = read(*nth)?;
                    next.extend(child_blocks(DxEntries::from_node(&block)?));
                }
            }
            level = next;
        }
        Ok(indexes)
    }

    /// Writes all names into the blocks of a directory without an htree, and into additional
    /// blocks.
    fn convert_to_linear(
        &mut self,
        node: &Inode,
        file: FileId,
        places: &[MovedDirBlock],
    ) -> Result<Vec<MovedRun>> {
        let block_bytes = u64::from(self.old.super_.block_bytes);
        let number = node.number.0;
        if (places.len() as u64).saturating_mul(block_bytes) > MAX_CONVERTED_DIR_BYTES {
            let what = format!("directory {number} is too large to be laid out anew");
            return Err(OfflineError::Unsupported(what));
        }
        let had_sums = self.old.super_.checksum_seed.is_some();
        let was: Vec<Vec<u8>> = places
            .iter()
            .map(|(_, old, _)| self.read(Role::Directory(node.file_id()), FsBlock(*old)))
            .collect::<Result<_>>()?;
        let names: Vec<&[u8]> =
            was.iter().map(|block| dir_tail::dirent_area(block, had_sums)).collect();
        let listed = repack::repack_linear(&names, Self::shape(&self.planned.super_));
        let listed = listed.map_err(|error| error.with_inode(node.number))?;
        let mut more = vec![];
        let behind = places.last().map_or(0, |(nth, ..)| nth.saturating_add(1));
        for from in behind
            ..behind.saturating_add(saturating_u32(
                listed.len().saturating_sub(places.len().min(listed.len())) as u64,
            ))
        {
            if !node.has_extents() {
                return Err(OfflineError::Unsupported(format!(
                    "directory {number} has no room for checksums, and is mapped by blocks; \
                     e2fsck -E bmap2extent changes that"
                )));
            }
            let new = self.allocate_block()?;
            more.push(MovedRun { from, blocks: 1, old: new, new, is_unwritten: false });
        }
        let old =
            places.iter().map(|(_, old, new)| (*old, *new)).zip(was.iter().map(Vec::as_slice));
        let behind = more.iter().map(|piece| ((0, piece.new), &[][..]));
        for (((old, new), was), block) in old.chain(behind).zip(listed) {
            self.write(Role::Directory(file), old, new, block, was)?;
        }
        Ok(more)
    }
}

/// Returns the blocks that htree entries point to.
fn child_blocks(index: DxEntries<'_>) -> Vec<u32> {
    (0..index.count()).filter_map(|nth| index.block(nth)).map(|block| block.0).collect()
}

impl DirectoryConversion {
    /// Returns the conversion between the features of two superblocks.
    pub(crate) fn between(old: &Superblock, new: &Superblock) -> Self {
        let has_index = |super_: &Superblock| super_.compatible.contains(Compatible::DIR_INDEX);
        Self {
            adds_checksums: old.checksum_seed.is_none() && new.checksum_seed.is_some(),
            drops_checksums: old.checksum_seed.is_some() && new.checksum_seed.is_none(),
            drops_indexes: has_index(old) && !has_index(new),
        }
    }
}
