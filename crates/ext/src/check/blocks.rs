//! Walking block maps: twelve pointers, then trees of one, two and three levels.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::Check;
use super::bits::Bits;
use super::complaint::{Complaint, What};
use super::inodes::{self, Role};
use crate::Result;
use crate::format::inode::{DIRECT, POINTERS};
use crate::format::le32;

/// Pointers out of the volume that are told of one file.
const MOST_OUTSIDE: u64 = 12;

/// What a walk does with what it finds.
pub(super) trait Visit {
    /// A block of data, and which of the file's it is.
    fn data(&mut self, at: u64, block: u64);
    /// An indirect block; whether to walk what it points to.
    fn indirect(&mut self, block: u64) -> bool;
    /// A pointer that leads out of the volume.
    fn outside(&mut self, block: u64);
}

/// Walks the map of `pointers`, in the order of the file.
pub(super) fn walk(
    check: &Check<'_>,
    pointers: &[u32; POINTERS],
    visit: &mut impl Visit,
) -> Result<()> {
    let mut first = 0u64;
    for (slot, pointer) in (0u32..).zip(pointers) {
        // The slots after the direct ones have one, two and three levels.
        let levels = slot.saturating_add(1).saturating_sub(DIRECT);
        step(check, *pointer, levels, first, visit)?;
        first = first.saturating_add(reach(check, levels));
    }
    Ok(())
}

/// Blocks that a pointer with `levels` levels of indirect blocks stands for.
pub(super) fn reach(check: &Check<'_>, levels: u32) -> u64 {
    u64::from(check.super_.block_bytes / 4).saturating_pow(levels)
}

/// One pointer; at most four deep.
fn step(
    check: &Check<'_>,
    pointer: u32,
    levels: u32,
    first: u64,
    visit: &mut impl Visit,
) -> Result<()> {
    let block = u64::from(pointer);
    if block == 0 {
        return Ok(());
    }
    if !check.holds(block) {
        visit.outside(block);
        return Ok(());
    }
    let Some(below) = levels.checked_sub(1) else {
        visit.data(first, block);
        return Ok(());
    };
    if !visit.indirect(block) {
        return Ok(());
    }
    let bytes = check.block(block)?;
    let mut at = first;
    for pointer in bytes.chunks_exact(4) {
        step(check, le32(pointer, 0).unwrap_or(0), below, at, visit)?;
        at = at.saturating_add(reach(check, below));
    }
    Ok(())
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
    /// Indirect blocks that were not walked, being somebody else's too.
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
    fn data(&mut self, at: u64, block: u64) {
        self.last = self.last.max(Some(at));
        self.claim(block);
    }

    fn indirect(&mut self, block: u64) -> bool {
        self.indirect = self.indirect.saturating_add(1);
        // A block that is read twice could be read a million times.
        let own = self.check.metadata.has(self.check.nth(block));
        let mine = self.claim(block) && !own;
        self.skipped |= !mine;
        mine
    }

    fn outside(&mut self, block: u64) {
        self.outside = self.outside.saturating_add(1);
        if self.outside <= MOST_OUTSIDE {
            let complaint = Complaint::new(What::PointerOutside).inode(self.inode);
            self.check.log.add(complaint.block(block));
        }
    }
}

/// Finds everybody who claims one of the blocks that were claimed twice.
struct Name<'a, 'b> {
    check: &'a Check<'b>,
    inode: u32,
    walked: &'a Bits,
    first_claims: &'a Mutex<HashMap<u64, u32>>,
}

impl Name<'_, '_> {
    fn look(&self, block: u64) {
        if !self.check.twice.has(self.check.nth(block)) {
            return;
        }
        let complaint = Complaint::new(What::ClaimedTwice).block(block);
        let mut first = self.first_claims.lock().unwrap_or_else(PoisonError::into_inner);
        // Claims of one file are told once; a file that claims a block of its own again
        // is told with the first.
        match first.insert(block, self.inode) {
            Some(before) if before == self.inode => {}
            _ => self.check.log.add(complaint.inode(self.inode)),
        }
    }
}

impl Visit for Name<'_, '_> {
    fn data(&mut self, _: u64, block: u64) {
        self.look(block);
    }

    fn indirect(&mut self, block: u64) -> bool {
        self.look(block);
        !self.walked.set(self.check.nth(block)) && !self.check.metadata.has(self.check.nth(block))
    }

    fn outside(&mut self, _: u64) {}
}

/// Says of every block that is claimed twice who claims it.
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
            let attributes = u64::from(raw.i_file_acl_lo.get());
            if attributes != 0 && Role::of(check, number) == Role::Ordinary {
                visit.look(attributes);
            }
            if inodes::has_map(check, raw) {
                walk(check, &raw.i_block.map(|it| it.get()), visit)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
