//! Lookup through a hash tree: one index block per level, then one leaf.

use super::linear::find_in_block;
use super::name_query::NameQuery;
use crate::blocks::data::SharedBytes;
use crate::format::htree::{DxEntries, DxRoot};
use crate::format::inode::Inode;
use crate::reader::VolumeReader;
use crate::{Error, FileBlock, InodeNumber, Result};

/// Limit of leaf blocks with one hash; more is damage.
const MAX_BLOCKS_PER_HASH: usize = 4096;

/// One level of the path from the root.
struct DxLevel {
    block: SharedBytes,
    root: bool,
    nth: usize,
}

impl DxLevel {
    fn index<'a>(&'a self, volume: &VolumeReader) -> Result<DxEntries<'a>> {
        if self.root {
            let super_ = &volume.super_;
            Ok(DxRoot::check(&self.block, super_.hash_unsigned, super_.hash_seed)?.1)
        } else {
            DxEntries::from_node(&self.block)
        }
    }

    fn child_block(&self, volume: &VolumeReader) -> Result<FileBlock> {
        self.index(volume)?.block(self.nth).ok_or(Error::corrupt("hash tree index"))
    }
}

/// Returns the inode of a name whose hash input is `hashed`.
pub(super) fn find_in_htree(
    volume: &VolumeReader,
    dir: &Inode,
    wanted: &NameQuery<'_>,
    hashed: &[u8],
) -> Result<InodeNumber> {
    let super_ = &volume.super_;
    let first = tree_block(volume, dir, FileBlock(0))?;
    let (root, index) = DxRoot::check(&first, super_.hash_unsigned, super_.hash_seed)?;
    let hash = root.hash.hash_name(hashed);
    let nth = index.find(hash);
    let levels = usize::from(root.levels);
    let mut path = vec![DxLevel { block: first, root: true, nth }];
    descend(volume, dir, &mut path, levels, hash)?;
    let mut second = None;
    for _ in 0..MAX_BLOCKS_PER_HASH {
        let leaf = path.last().map(|step| step.child_block(volume)).ok_or(Error::NotFound)??;
        if leaf.0 >= volume.directory_blocks(dir) {
            return Err(Error::corrupt("hash tree index").with_inode(dir.number));
        }
        if let Some(inode) = find_in_block(volume, dir, leaf, wanted, &mut second)? {
            return Ok(inode);
        }
        if !advance_leaf(volume, dir, &mut path, levels, hash)? {
            return second.ok_or(Error::NotFound);
        }
    }
    Err(Error::corrupt("hash tree").with_inode(dir.number))
}

fn tree_block(volume: &VolumeReader, dir: &Inode, nth: FileBlock) -> Result<SharedBytes> {
    let hole = Error::corrupt("hash tree index").with_inode(dir.number);
    volume.directory_block(dir, nth)?.ok_or(hole)
}

/// Descends from the last step until the path has `levels` nodes below the root.
fn descend(
    volume: &VolumeReader,
    dir: &Inode,
    path: &mut Vec<DxLevel>,
    levels: usize,
    hash: u32,
) -> Result<()> {
    while path.len() <= levels {
        let Some(below) = path.last().map(|step| step.child_block(volume)) else { return Ok(()) };
        let block = tree_block(volume, dir, below?)?;
        let nth = DxEntries::from_node(&block)?.find(hash);
        path.push(DxLevel { block, root: false, nth });
    }
    Ok(())
}

/// Moves to the next leaf, if names with `hash` may continue there.
fn advance_leaf(
    volume: &VolumeReader,
    dir: &Inode,
    path: &mut Vec<DxLevel>,
    levels: usize,
    hash: u32,
) -> Result<bool> {
    while let Some(step) = path.last_mut() {
        let index = step.index(volume)?;
        if let Some(next) = index.next_with_hash(step.nth, hash) {
            step.nth = next;
            // Below a later branch, names with this hash come first.
            descend(volume, dir, path, levels, 0)?;
            return Ok(true);
        }
        if !index.is_last(step.nth) {
            return Ok(false);
        }
        path.pop();
    }
    Ok(false)
}
