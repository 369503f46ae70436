//! Block maps of ext2: twelve pointers, then trees of one, two and three levels.
//!
//! Every walk down is at most three blocks deep, whatever the pointers say.

use super::{Place, Run, Runs};
use crate::blocks::Store;
use crate::format::inode::{DIRECT, Inode};
use crate::format::le32;
use crate::format::superblock::Superblock;
use crate::units::{index, narrow};
use crate::{Error, FileBlock, FsBlock, Result};

/// Where the pointer to a file block is found.
pub(crate) struct Path {
    /// The pointer of the inode that leads there.
    pub(crate) slot: usize,
    /// Levels of indirect blocks below it: 0 to 3.
    pub(crate) levels: u32,
    /// The block's place in the tree.
    pub(crate) offset: u64,
}

/// What a walk down found.
enum Found {
    /// A pointer that ends the walk, and how many blocks it stands for from there on.
    End(Place, u64),
    /// The block with the pointers to data, and the place of ours therein.
    Leaf(FsBlock, u64),
}

/// The pointers that a block holds: a power of two.
pub(crate) fn fan_out(super_: &Superblock) -> u64 {
    u64::from(super_.block_bytes / 4)
}

pub(crate) fn path(at: FileBlock, fan_out: u64) -> Option<Path> {
    let at = u64::from(at.0);
    let direct = u64::from(DIRECT);
    let Some(mut offset) = at.checked_sub(direct) else {
        return Some(Path { slot: index(at), levels: 0, offset: 0 });
    };
    let mut reach = fan_out;
    for levels in 1..=3u32 {
        if offset < reach {
            let slot = index(direct).checked_add(index(u64::from(levels)))?.checked_sub(1)?;
            return Some(Path { slot, levels, offset });
        }
        offset = offset.checked_sub(reach)?;
        reach = reach.checked_mul(fan_out)?;
    }
    None
}

fn place(pointer: u32, super_: &Superblock) -> Place {
    match FsBlock(u64::from(pointer)) {
        FsBlock(0) => Place::Hole,
        block if super_.holds(block) => Place::At(block),
        block => Place::Damaged(block),
    }
}

fn walk(store: &Store, super_: &Superblock, inode: &Inode, at: FileBlock) -> Result<Found> {
    let fan_out = fan_out(super_);
    let Some(Path { slot, levels, mut offset }) = path(at, fan_out) else {
        return Ok(Found::End(Place::Damaged(FsBlock(0)), u64::MAX));
    };
    let mut pointer = inode.pointers.get(slot).copied().unwrap_or(0);
    if levels == 0 {
        return Ok(Found::End(place(pointer, super_), 1));
    }
    let mut below = fan_out.saturating_pow(levels);
    loop {
        let block = match place(pointer, super_) {
            Place::At(block) => block,
            nowhere => return Ok(Found::End(nowhere, below.saturating_sub(offset))),
        };
        below = below.checked_div(fan_out).unwrap_or(1);
        if below <= 1 {
            return Ok(Found::Leaf(block, offset));
        }
        let nth = offset.checked_div(below).unwrap_or(0);
        offset = offset.checked_rem(below).unwrap_or(0);
        pointer = match node(store, block)? {
            Some(bytes) => pointer_at(&bytes, nth),
            None => return Ok(Found::End(Place::Damaged(block), below.saturating_sub(offset))),
        };
    }
}

/// An indirect block; `None` if it lies where the disk has ended already.
fn node(store: &Store, block: FsBlock) -> Result<Option<crate::Data>> {
    match store.block(block) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Error::Corrupt { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

pub(crate) fn pointer_at(block: &[u8], nth: u64) -> u32 {
    index(nth).checked_mul(4).and_then(|at| le32(block, at)).unwrap_or(0)
}

/// Maps the blocks from `from` up to `end` onto `runs`.
pub(super) fn scan(
    store: &Store,
    super_: &Superblock,
    inode: &Inode,
    from: FileBlock,
    end: FileBlock,
    runs: &mut Runs,
) -> Result<()> {
    let mut at = from;
    // Each turn goes on by one block at least.
    while at < end {
        let left = end.0.saturating_sub(at.0);
        let before = at;
        match walk(store, super_, inode, at)? {
            Found::End(place, blocks) => {
                let blocks = narrow(blocks).clamp(1, left);
                runs.push(Run { from: at, blocks, place });
                at = at.after(blocks);
            }
            Found::Leaf(block, nth) => {
                let there = fan_out(super_).saturating_sub(nth).min(u64::from(left));
                match node(store, block)? {
                    Some(bytes) => {
                        for nth in nth..nth.saturating_add(there) {
                            let place = place(pointer_at(&bytes, nth), super_);
                            runs.push(Run { from: at, blocks: 1, place });
                            at = at.after(1);
                        }
                    }
                    None => {
                        let (blocks, place) = (narrow(there), Place::Damaged(block));
                        runs.push(Run { from: at, blocks, place });
                        at = at.after(blocks);
                    }
                }
            }
        }
        if at <= before {
            return Err(Error::corrupt("block map"));
        }
    }
    Ok(())
}

/// See [`super::hole_end`].
pub(super) fn hole_end(
    store: &Store,
    super_: &Superblock,
    inode: &Inode,
    at: FileBlock,
) -> Result<Option<FileBlock>> {
    Ok(match walk(store, super_, inode, at)? {
        Found::End(Place::Hole, blocks) => Some(at.after(narrow(blocks))),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_levels_begin_where_the_format_says() {
        let of = |at| path(FileBlock(at), 256).map(|path| (path.slot, path.levels, path.offset));
        assert_eq!(of(11), Some((11, 0, 0)));
        assert_eq!(of(12), Some((12, 1, 0)));
        assert_eq!(of(12 + 255), Some((12, 1, 255)));
        assert_eq!(of(12 + 256), Some((13, 2, 0)));
        assert_eq!(of(12 + 256 + 65536), Some((14, 3, 0)));
        assert_eq!(of(12 + 256 + 65536 + (1 << 24) - 1), Some((14, 3, (1 << 24) - 1)));
        assert_eq!(of(12 + 256 + 65536 + (1 << 24)), None);
    }
}
