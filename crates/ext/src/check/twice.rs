//! Blocks that two files claim, and which files those are.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

use super::Check;
use super::bits::Bits;
use super::blocks::walk;
use super::complaint::{Complaint, What};
use super::inodes::{self, Role};
use crate::map::{Node, Place, Visit};
use crate::{FsBlock, Result};

/// Finds every inode that claims one of the blocks that were claimed twice.
struct Name<'a, 'b> {
    check: &'a Check<'b>,
    inode: u32,
    walked: &'a Bits,
    first_claims: &'a Mutex<HashMap<u64, u32>>,
}

impl Name<'_, '_> {
    /// Whether to look on.
    fn look(&self, block: u64) -> bool {
        if !self.check.twice.has(self.check.cluster(block)) {
            return true;
        }
        if !self.check.once_more() {
            return false;
        }
        let complaint = Complaint::new(What::ClaimedTwice).block(block);
        let mut first = self.first_claims.lock().unwrap_or_else(PoisonError::into_inner);
        // Claims of one file are told once; a file that claims a block of its own again
        // is told with the first.
        match first.insert(block, self.inode) {
            Some(before) if before == self.inode => {}
            _ => self.check.log.add(complaint.inode(self.inode)),
        }
        true
    }
}

impl Visit for Name<'_, '_> {
    fn run(&mut self, _: u64, blocks: u64, place: Place) -> ControlFlow<()> {
        if let Place::At(FsBlock(block)) | Place::Unwritten(FsBlock(block)) = place {
            let _ = (0..blocks).all(|nth| self.look(block.saturating_add(nth)));
        }
        ControlFlow::Continue(())
    }

    fn node(&mut self, Node { block: FsBlock(block), .. }: Node) -> bool {
        self.look(block);
        !self.walked.set(self.check.nth(block)) && !self.check.metadata.has(self.check.nth(block))
    }
}

/// Says of every block that is claimed twice which inodes claim it.
pub(super) fn name_twice(check: &Check<'_>) -> Result<()> {
    if check.twice.is_empty() {
        return Ok(());
    }
    let walked = Bits::new(check.super_.blocks);
    let first_claims = Mutex::default();
    for group in 0..check.super_.groups {
        inodes::each(check, group, &|number, slot| {
            let Some(raw) = inodes::mapped(check, number, slot) else { return Ok(()) };
            let visit =
                &mut Name { check, inode: number, walked: &walked, first_claims: &first_claims };
            let attributes = inodes::attribute_block(check, raw);
            if attributes != 0 && Role::of(check, number) == Role::Ordinary {
                visit.look(attributes);
            }
            if inodes::has_map(check, raw) {
                walk(check, number, raw, visit)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
