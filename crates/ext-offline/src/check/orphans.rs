//! Orphans: inodes deleted or truncated while in use.
//!
//! The superblock holds the first; each one's deletion time is the number of the next. With
//! `orphan_file` they are in the blocks of a file instead:
//!
//! ```text
//!   | inode .. inode | magic | checksum |     each block
//! ```

use std::collections::HashSet;
use std::ops::ControlFlow;

use draconis_types::FileType;
use zerocopy::FromBytes;

use super::blocks::walk_map;
use super::problem::{Problem, What};
use super::{Check, raw_inode};
use crate::blocks::role::Role as BlockRole;
use crate::format::features::ReadOnlyCompatible;
use crate::format::inode::RawInode;
use crate::format::le32;
use crate::map::{BlockLocation, MapVisitor};
use crate::{FileId, FsBlock, InodeNumber, Result};

/// Tail of each block of the orphan file.
const TAIL_BYTES: usize = 8;
const TAIL_MAGIC: u32 = 0x0B10_CA04;

/// Reads the inodes on the orphan list, up to the first invalid one.
pub(super) fn read_orphan_list(check: &Check<'_>) -> Result<HashSet<u32>> {
    let mut listed = HashSet::new();
    let mut next = check.raw.s_last_orphan.get();
    let ordinary = check.super_.first_inode.0..=check.super_.inodes;
    // Each inode is listed once, so the loop ends.
    while ordinary.contains(&next) && listed.insert(next) {
        let slot = raw_inode::read_inode_slot(check, next)?;
        let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { break };
        next = raw.i_dtime.get();
    }
    Ok(listed)
}

/// Reports a list of orphans that begins with an inode that cannot be one.
pub(super) fn check_orphan_list(check: &Check<'_>) {
    let first = check.raw.s_last_orphan.get();
    if first != 0 && !(check.super_.first_inode.0..=check.super_.inodes).contains(&first) {
        check.problems.add(Problem::new(What::OrphanList).found(first));
    }
}

/// Blocks of the orphan file.
struct OrphanFileBlocks {
    found: Vec<(u64, u64)>,
    /// Limit of the blocks.
    max_blocks: u64,
}

impl MapVisitor for OrphanFileBlocks {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if let BlockLocation::Mapped(FsBlock(block)) = place {
            let blocks = blocks.min(self.max_blocks);
            self.max_blocks = self.max_blocks.saturating_sub(blocks);
            self.found
                .extend((0..blocks).map(|nth| (at.saturating_add(nth), block.saturating_add(nth))));
        }
        ControlFlow::Continue(())
    }
}

/// Checks the orphan file: all blocks are mapped with valid checksums, and empty unless the feature
/// `orphan_present` is set. Returns the inodes listed.
pub(super) fn check_orphan_file(check: &Check<'_>) -> Result<Vec<u32>> {
    let mut named = Vec::new();
    let complain = |number| check.problems.add(Problem::new(What::OrphanFile).inode(number));
    let Some(InodeNumber(number)) = check.super_.orphan_file else {
        let named_anyway = check.raw.s_orphan_file_inum.get();
        if (1..=check.super_.inodes).contains(&named_anyway) {
            complain(named_anyway);
        }
        return Ok(named);
    };
    if number > check.super_.inodes {
        complain(number);
        return Ok(named);
    }
    let slot = raw_inode::read_inode_slot(check, number)?;
    let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { return Ok(named) };
    let mut blocks = OrphanFileBlocks { found: vec![], max_blocks: check.super_.blocks };
    if raw_inode::file_type(raw) == Some(FileType::File) {
        walk_map(check, number, raw, &mut blocks)?;
    }
    let block_bytes = u64::from(check.super_.block_bytes);
    let len = raw_inode::inode_size(raw).checked_div(block_bytes).unwrap_or(0);
    let file = FileId { inode: number, generation: raw.i_generation.get() };
    let seed = check.super_.file_checksum_seed(file);
    let present = ReadOnlyCompatible::ORPHAN_PRESENT;
    let present = check.super_.read_only_compatible.contains(present);
    let whole = len == blocks.found.len() as u64 && len > 0;
    let mut sound = whole && blocks.found.iter().zip(0..).all(|((at, _), nth)| *at == nth);
    for (_, block) in blocks.found {
        let bytes = check.block(block, BlockRole::Contents)?;
        let (entries, tail) = bytes.split_at(bytes.len().saturating_sub(TAIL_BYTES));
        let sum = seed.map(|seed| seed.update_u64(block).update(entries).value());
        sound &= le32(tail, 0) == Some(TAIL_MAGIC)
            && (sum.is_none() || le32(tail, 4) == sum)
            && (present || entries.iter().all(|byte| *byte == 0));
        let words = entries.chunks_exact(4).filter_map(|word| le32(word, 0));
        named.extend(words.filter(|inode| *inode != 0));
    }
    if !sound {
        complain(number);
    }
    Ok(named)
}
