//! Pass 1B: blocks that several files claim, and those files.

use draconis_types::lock::Mutex;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;

use super::Check;
use super::bit_set::AtomicBitSet;
use super::blocks::walk_map;
use super::inodes::{self, InodeRole};
use super::problem::{Problem, What};
use super::raw_inode;
use crate::map::{BlockLocation, MapNode, MapVisitor};
use crate::{FsBlock, Result};

/// Search for the inodes that claim a multiply claimed block.
struct ClaimantFinder<'a, 'b> {
    check: &'a Check<'b>,
    inode: u32,
    walked: &'a AtomicBitSet,
    first_claims: &'a Mutex<HashMap<u64, u32>>,
}

impl ClaimantFinder<'_, '_> {
    /// Reports the inode if the block is shared; returns true if the walk may continue.
    fn report_if_shared(&self, block: u64) -> bool {
        if !self.check.multiply_claimed.contains(self.check.cluster_index(block)) {
            return true;
        }
        if !self.check.count_revisit() {
            return false;
        }
        let complaint = Problem::new(What::ClaimedTwice).block(block);
        let mut first = self.first_claims.lock();
        // Repeated claims of one file are reported once, with its first claim.
        match first.insert(block, self.inode) {
            Some(before) if before == self.inode => {}
            _ => self.check.problems.add(complaint.inode(self.inode)),
        }
        true
    }
}

impl MapVisitor for ClaimantFinder<'_, '_> {
    fn visit_run(&mut self, _: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if let BlockLocation::Mapped(FsBlock(block)) | BlockLocation::Unwritten(FsBlock(block)) =
            place
        {
            let _ = (0..blocks).all(|nth| self.report_if_shared(block.saturating_add(nth)));
        }
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, MapNode { block: FsBlock(block), .. }: MapNode) -> bool {
        self.report_if_shared(block);
        !self.walked.insert(self.check.block_index(block))
            && !self.check.metadata.contains(self.check.block_index(block))
    }
}

/// Reports every inode that claims a multiply claimed block.
pub(super) fn report_multiply_claimed(check: &Check<'_>) -> Result<()> {
    if check.multiply_claimed.is_empty() {
        return Ok(());
    }
    let walked = AtomicBitSet::new(check.super_.blocks);
    let first_claims = Mutex::default();
    inodes::visit_groups(check, &AtomicU64::new(0), &|number, slot| {
        let Some(raw) = inodes::inode_with_map(check, number, slot) else { return Ok(()) };
        let visit = &mut ClaimantFinder {
            check,
            inode: number,
            walked: &walked,
            first_claims: &first_claims,
        };
        let attributes = raw_inode::xattr_block(check, raw);
        if attributes != 0 && InodeRole::for_inode(check, number) == InodeRole::Ordinary {
            visit.report_if_shared(attributes);
        }
        if raw_inode::has_map(check, raw) {
            walk_map(check, number, raw, visit)?;
        }
        Ok(())
    })?;
    Ok(())
}
