//! Truncation and deletion of files whose blocks exceed one batch.
//!
//! Law: while it takes several batches, the file is on the on-disk orphan list. After a cut between
//! them, the next mount completes the truncation.

use std::ops::ControlFlow;

use crate::map::{BlockLocation, MapVisitor};
use crate::transaction::Transaction;
use crate::units::saturating_u32;
use crate::{InodeNumber, Result};

/// File blocks at which a truncation is split into steps.
struct TruncatePoints {
    max_blocks_per_step: u64,
    /// Blocks since the last split.
    blocks_since_last: u64,
    at: Vec<u32>,
}

impl MapVisitor for TruncatePoints {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if place == BlockLocation::Hole {
            return ControlFlow::Continue(());
        }
        let (mut at, end) = (at, at.saturating_add(blocks));
        while end.saturating_sub(at)
            >= self.max_blocks_per_step.saturating_sub(self.blocks_since_last)
        {
            at = at.saturating_add(self.max_blocks_per_step.saturating_sub(self.blocks_since_last));
            self.blocks_since_last = 0;
            self.at.push(saturating_u32(at));
        }
        self.blocks_since_last = self.blocks_since_last.saturating_add(end.saturating_sub(at));
        ControlFlow::Continue(())
    }
}

impl Transaction<'_> {
    /// Returns the file blocks, from `from` on, at which a truncation is split into batches; empty
    /// if one batch suffices.
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

    /// Frees blocks step by step, from the last split back to the first.
    pub(crate) fn truncate_in_batches(&mut self, inode: InodeNumber, cuts: &[u32]) -> Result<()> {
        for cut in cuts.iter().rev() {
            self.unmap(inode, *cut..u32::MAX)?;
            self.close_batch_if_complete()?;
        }
        Ok(())
    }
}
