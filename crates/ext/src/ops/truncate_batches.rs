//! Files that lose more blocks than one batch can hold.
//!
//! Law: where it takes several batches, the volume lists the file as an orphan from before the
//! first until after the last. A cut between them leaves what the next mount ends.

#![allow(clippy::arithmetic_side_effects, reason = "counts blocks of files below 2^32")]

use std::ops::ControlFlow;

use crate::map::{BlockLocation, MapVisitor};
use crate::transaction::Transaction;
use crate::units::saturating_u32;
use crate::volume::Volume;
use crate::{InodeNumber, Result};

/// Where a file is cut into pieces of so many blocks.
struct TruncatePoints {
    max_blocks_per_step: u64,
    /// Blocks since the last cut.
    blocks_since_last: u64,
    at: Vec<u32>,
}

impl MapVisitor for TruncatePoints {
    fn run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if place == BlockLocation::Hole {
            return ControlFlow::Continue(());
        }
        let (mut at, end) = (at, at + blocks);
        while end - at >= self.max_blocks_per_step - self.blocks_since_last {
            at += self.max_blocks_per_step - self.blocks_since_last;
            self.blocks_since_last = 0;
            self.at.push(saturating_u32(at));
        }
        self.blocks_since_last += end - at;
        ControlFlow::Continue(())
    }
}

impl Volume {
    /// Deletes what died and was too large to be deleted with its name.
    pub(crate) fn delete_pending(&self) -> Result<()> {
        let Some(writing) = &self.writing else { return Ok(()) };
        let next = || writing.state.write().pending_deletions.pop();
        while let Some(inode) = next() {
            self.transact(|tx| {
                tx.may_block = true;
                tx.is_internal = true;
                let inode = InodeNumber(inode);
                let has_users = tx.has_users(inode);
                if has_users || !tx.is_orphan(inode) { Ok(()) } else { tx.evict_inode(inode) }
            })?;
        }
        Ok(())
    }
}

impl Transaction<'_> {
    /// Where the blocks of a file from `from` on are cut to go in several batches; nowhere if
    /// they can all go in one.
    pub(crate) fn truncate_points(&self, inode: InodeNumber, from: u32) -> Result<Vec<u32>> {
        let groups = self.volume.super_.groups;
        let Some(most) = self.writer.protocol.max_blocks_per_truncate(groups) else {
            return Ok(vec![]);
        };
        let mut cuts =
            TruncatePoints { max_blocks_per_step: most.into(), blocks_since_last: 0, at: vec![] };
        self.walk(inode, from.into()..u32::MAX.into(), &mut cuts)?;
        Ok(cuts.at)
    }

    /// Takes the blocks of a file away from the last cut on, then from the one before: all that is
    /// behind the first one.
    pub(crate) fn truncate_in_batches(&mut self, inode: InodeNumber, cuts: &[u32]) -> Result<()> {
        for cut in cuts.iter().rev() {
            self.unmap(inode, *cut..u32::MAX)?;
            self.close_batch_if_complete()?;
        }
        Ok(())
    }
}
