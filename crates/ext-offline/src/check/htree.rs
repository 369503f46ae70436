//! Htrees: every dirent block is referenced once, and its hashes are in range.

use super::Check;
use super::problem::{Problem, What};
use crate::Result;
use crate::blocks::role::Role as BlockRole;
use crate::format::features::Incompatible;
use crate::format::hash::NameHash;
use crate::format::{le16, le32};

/// Lowest and highest hash of a block's names.
pub(super) type HashRange = Option<(u32, u32)>;

const ROOT_INFO_OFFSET: usize = 24;
const ROOT_ENTRIES_OFFSET: usize = 32;
const NODE_ENTRIES_OFFSET: usize = 8;
const ENTRY_BYTES: usize = 8;
const BLOCK_MASK: u32 = 0x0FFF_FFFF;

/// Returns the hash function of the root in `block`.
pub(super) fn name_hash_of_root(check: &Check<'_>, block: &[u8]) -> Option<NameHash> {
    let version = *block.get(ROOT_INFO_OFFSET..)?.get(4)?;
    NameHash::of_version(version, check.super_.hash_unsigned, check.super_.hash_seed)
}

struct HtreeWalk<'a, 'b> {
    check: &'a Check<'b>,
    dir: u32,
    levels: u8,
    /// Blocks of the directory, with the range of hashes in each.
    blocks: &'a [(u64, u64, HashRange)],
    visited: Vec<bool>,
    /// True if part of the tree was not walked.
    broken: bool,
}

/// Checks the htree of `dir`, whose first block is `root`.
pub(super) fn check_htree(
    check: &Check<'_>,
    dir: u32,
    root: &[u8],
    blocks: &[(u64, u64, HashRange)],
) -> Result<()> {
    let large = check.super_.incompatible.contains(Incompatible::LARGEDIR);
    let most = if large { 2 } else { 1 };
    let info = root.get(ROOT_INFO_OFFSET..).unwrap_or_default();
    let levels = match (info, name_hash_of_root(check, root)) {
        (&[0, 0, 0, 0, _, 8, levels, 0, ..], Some(_)) if levels <= most => levels,
        _ => {
            check.problems.add(Problem::new(What::TreeRoot).inode(dir));
            return Ok(());
        }
    };
    let visited = vec![false; blocks.len()];
    let mut walk = HtreeWalk { check, dir, levels, blocks, visited, broken: false };
    walk.visit_block(0);
    walk.check_index(root, ROOT_ENTRIES_OFFSET, 0, (0, u32::MAX))?;
    if walk.broken {
        return Ok(());
    }
    for ((at, block, _), visited) in blocks.iter().zip(&walk.visited) {
        if !visited {
            let complaint = Problem::new(What::TreeBlock).inode(dir).block(*block);
            check.problems.add(complaint.found(*at));
        }
    }
    Ok(())
}

impl HtreeWalk<'_, '_> {
    fn report_problem(&self, what: What, at: u64) {
        self.check.problems.add(Problem::new(what).inode(self.dir).found(at));
    }

    /// Marks a block as referenced; returns its disk block the first time.
    fn visit_block(&mut self, at: u64) -> Option<(u64, HashRange)> {
        let place = self.blocks.binary_search_by_key(&at, |(at, ..)| *at).ok()?;
        let (_, block, range) = self.blocks.get(place)?;
        let seen = self.visited.get_mut(place)?;
        (!std::mem::replace(seen, true)).then_some((*block, *range))
    }

    /// Checks the entries of a root or node; the depth is the root's, three levels at most.
    fn check_index(
        &mut self,
        bytes: &[u8],
        start: usize,
        level: u8,
        within: (u32, u32),
    ) -> Result<()> {
        let entries = bytes.get(start..).unwrap_or_default();
        let limit = usize::from(le16(entries, 0).unwrap_or(0));
        let count = usize::from(le16(entries, 2).unwrap_or(0));
        // Checksums follow the entries.
        let sums = self.check.super_.checksum_seed.is_some();
        let room = entries.len() / ENTRY_BYTES;
        if limit != room.saturating_sub(sums.into()) || count == 0 || count > limit {
            self.broken = true;
            self.report_problem(What::TreeNode, u64::from(level));
            return Ok(());
        }
        let word = |nth: usize, at: usize| {
            le32(entries, nth.saturating_mul(ENTRY_BYTES).saturating_add(at)).unwrap_or(0)
        };
        let (mut low, top) = within;
        for nth in 0..count {
            let next = nth.saturating_add(1);
            let high = if next < count { word(next, 0) } else { top };
            if high < low {
                self.report_problem(What::TreeOrder, u64::from(word(nth, 4) & BLOCK_MASK));
            }
            self.check_child(u64::from(word(nth, 4) & BLOCK_MASK), level, (low, high))?;
            low = high;
        }
        Ok(())
    }

    fn check_child(&mut self, at: u64, level: u8, within: (u32, u32)) -> Result<()> {
        let Some((block, range)) = self.visit_block(at) else {
            self.report_problem(What::TreeBlock, at);
            return Ok(());
        };
        if level < self.levels {
            let bytes = self.check.block(block, BlockRole::Directory(Check::file_id(self.dir)))?;
            let unused = le32(&bytes, 0) == Some(0);
            if !unused {
                self.broken = true;
                self.report_problem(What::TreeNode, at);
                return Ok(());
            }
            return self.check_index(&bytes, NODE_ENTRIES_OFFSET, level.saturating_add(1), within);
        }
        let (low, high) = within;
        if let Some((least, most)) = range
            && (least < low & !1 || most > high)
        {
            self.report_problem(What::TreeRange, at);
        }
        Ok(())
    }
}
