//! The blocks of files, claimed.

use std::ops::ControlFlow;

use super::Check;
use super::complaint::{Complaint, What};
use crate::blocks::role::Role as BlockRole;
use crate::format::inode::POINTERS;
use crate::map::pointers::{Pointers, reach_blocks};
use crate::map::{Map, Node, Place, Source, Visit};
use crate::{FsBlock, Result};

/// Pointers out of the volume that are told of one file.
const MOST_OUTSIDE: u64 = 12;

/// Walks the map of `pointers`, in the order of the file.
pub(super) fn walk(
    check: &Check<'_>,
    inode: u32,
    pointers: &[u32; POINTERS],
    visit: &mut dyn Visit,
) -> Result<()> {
    let read = |block: FsBlock| check.block(block.0, BlockRole::Map(Check::file(inode))).map(Some);
    let super_ = &check.super_;
    let blocks = super_.first_data_block.into()..super_.blocks;
    let source = Source { block_bytes: super_.block_bytes, blocks, read: &read };
    Pointers(pointers).walk(&source, 0..reach_blocks(super_.block_bytes), visit)
}

/// Claims the blocks of a file.
pub(super) struct Claim<'a, 'b> {
    check: &'a Check<'b>,
    inode: u32,
    /// Whether the volume's own blocks are this file's by right.
    of_the_volume: bool,
    /// Blocks claimed, indirect ones included.
    pub(super) count: u64,
    /// Indirect blocks among them.
    pub(super) indirect: u64,
    /// The last block of the file that is there.
    pub(super) last: Option<u64>,
    /// Pointers that lead out of the volume.
    pub(super) outside: u64,
    /// Indirect blocks that were not walked, being claimed elsewhere, too.
    pub(super) skipped: bool,
}

impl<'a, 'b> Claim<'a, 'b> {
    pub(super) fn new(check: &'a Check<'b>, inode: u32, of_the_volume: bool) -> Self {
        let (count, indirect, last, outside) = (0, 0, None, 0);
        Self { check, inode, of_the_volume, count, indirect, last, outside, skipped: false }
    }

    /// Claims a block; whether it was free to be claimed.
    pub(super) fn claim(&mut self, block: u64) -> bool {
        self.count = self.count.saturating_add(1);
        let nth = self.check.nth(block);
        if self.check.metadata.has(nth) {
            if !self.of_the_volume {
                let complaint = Complaint::new(What::InMetadata).inode(self.inode);
                self.check.log.add(complaint.block(block));
            }
            return self.of_the_volume;
        }
        let taken = self.check.used.set(nth);
        if taken {
            self.check.twice.set(nth);
        }
        !taken
    }
}

impl Visit for Claim<'_, '_> {
    fn run(&mut self, at: u64, blocks: u64, place: Place) -> ControlFlow<()> {
        match place {
            Place::Hole | Place::Unwritten(_) => {}
            Place::At(FsBlock(block)) => {
                for nth in 0..blocks {
                    self.last = self.last.max(Some(at.saturating_add(nth)));
                    self.claim(block.saturating_add(nth));
                }
            }
            Place::Damaged(FsBlock(block)) => {
                self.outside = self.outside.saturating_add(1);
                if self.outside <= MOST_OUTSIDE {
                    let complaint = Complaint::new(What::PointerOutside).inode(self.inode);
                    self.check.log.add(complaint.block(block));
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn node(&mut self, Node { block: FsBlock(block), .. }: Node) -> bool {
        self.indirect = self.indirect.saturating_add(1);
        // A block that is read twice could be read a million times.
        let own = self.check.metadata.has(self.check.nth(block));
        let mine = self.claim(block) && !own;
        self.skipped |= !mine;
        mine
    }
}
