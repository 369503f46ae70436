//! Quotas: compares the usage of users, groups and projects with the quota files.
//!
//! ```text
//!   file     | head | root | blocks of 1 KiB ..        i_blocks and the file's own tree are pass 1
//!   tree     root ─▶ node ─▶ node ─▶ node ─▶ leaf      by the bytes of the id, highest first
//!   leaf     | head | entry of 72 bytes ..
//! ```
//! Law: a block of the file is visited once, however many references it has.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;

use zerocopy::FromBytes;

use super::blocks::walk_map;
use super::problem::{Problem, What};
use super::{Check, raw_inode};
use crate::blocks::role::Role as BlockRole;
use crate::format::features::ReadOnlyCompatible;
use crate::format::inode::RawInode;
use crate::format::le32;
use crate::map::{BlockLocation, MapVisitor};
use crate::units::saturating_usize;
use crate::{FsBlock, Result};

/// Bytes and inodes, by id.
pub(super) type UsageById = BTreeMap<u32, (u64, u64)>;

/// Magic numbers of the user, group and project files.
const MAGICS: [u32; 3] = [0xD9C0_1F11, 0xD9C0_1927, 0xD9C0_3F14];
const VERSION: u32 = 1;
const BLOCK_BYTES: u64 = 1024;
const ROOT: u32 = 1;
/// Levels of nodes above the leaves.
const LEVELS: u32 = 4;
const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 72;
const INODES_AT: usize = 24;
const BYTES_AT: usize = 48;
const PROJECT_AT: usize = 0x9C;

/// Counts an inode of `clusters`, with `more` EA inodes.
pub(super) fn count_inode(check: &Check<'_>, slot: &[u8], clusters: u64, more: u64) {
    if !check.super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA) {
        return;
    }
    let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { return };
    let join = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
    let owner = join(raw.i_uid.get(), raw.i_uid_high.get());
    let group = join(raw.i_gid.get(), raw.i_gid_high.get());
    let extra = crate::format::le16(slot, size_of::<RawInode>()).unwrap_or(0);
    let end = size_of::<RawInode>().saturating_add(extra.into());
    let has_project = end >= PROJECT_AT.saturating_add(4);
    let project = le32(slot, PROJECT_AT).filter(|_| has_project).unwrap_or(0);
    let cluster =
        u64::from(check.super_.block_bytes).saturating_mul(check.super_.cluster_blocks.into());
    let bytes = clusters.saturating_mul(cluster);
    let mut usage = check.usage.lock();
    for (of, number) in usage.iter_mut().zip([owner, group, project]) {
        let (used, inodes) = of.entry(number).or_default();
        *used = used.saturating_add(bytes);
        *inodes = inodes.saturating_add(1).saturating_add(more);
    }
}

/// Compares the counted usage with the quota files.
pub(super) fn compare_usage(check: &Check<'_>) -> Result<()> {
    if !check.super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA) {
        return Ok(());
    }
    let usage = std::mem::take(&mut *check.usage.lock());
    for ((inode, magic), used) in check.super_.quotas.into_iter().zip(MAGICS).zip(usage) {
        if inode == 0 {
            continue;
        }
        let said = QuotaFileReader::open(check, inode)?.read(magic)?;
        let complain = || Problem::new(What::Quota).inode(inode);
        let Some(said) = said else {
            check.problems.add(complain());
            continue;
        };
        let numbers: std::collections::BTreeSet<u32> =
            said.keys().chain(used.keys()).copied().collect();
        for number in numbers {
            let of = |usage: &UsageById| usage.get(&number).copied().unwrap_or_default();
            let (found, expected) = (of(&said), of(&used));
            if found != expected {
                let (unit, found, expected) = match found.0 == expected.0 {
                    true => ("inodes", found.1, expected.1),
                    false => ("bytes", found.0, expected.0),
                };
                let name = format!("{unit} of {number}");
                check
                    .problems
                    .add(complain().name(name.as_bytes()).found(found).expected(expected));
            }
        }
    }
    Ok(())
}

/// A quota file.
struct QuotaFileReader<'a, 'b> {
    check: &'a Check<'b>,
    /// Blocks on the device, by file block.
    blocks: BTreeMap<u64, u64>,
    visited: HashSet<u32>,
    found: UsageById,
    is_valid: bool,
}

impl MapVisitor for QuotaFileReader<'_, '_> {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if let BlockLocation::Mapped(FsBlock(block)) = place {
            let left = self.check.super_.blocks.saturating_sub(self.blocks.len() as u64);
            let blocks = blocks.min(left);
            self.blocks
                .extend((0..blocks).map(|nth| (at.saturating_add(nth), block.saturating_add(nth))));
        }
        ControlFlow::Continue(())
    }
}

impl<'a, 'b> QuotaFileReader<'a, 'b> {
    fn open(check: &'a Check<'b>, inode: u32) -> Result<Self> {
        let (blocks, visited, found) = (BTreeMap::new(), HashSet::new(), UsageById::new());
        let mut file = Self { check, blocks, visited, found, is_valid: true };
        if inode <= check.super_.inodes {
            let slot = raw_inode::read_inode_slot(check, inode)?;
            if let Ok((raw, _)) = RawInode::ref_from_prefix(&slot)
                && raw_inode::has_map(check, raw)
            {
                walk_map(check, inode, raw, &mut file)?;
            }
        }
        Ok(file)
    }

    /// Reads a quota block, which may be part of a volume block.
    fn block(&self, nth: u32) -> Result<Option<crate::SharedBytes>> {
        let block_bytes = u64::from(self.check.super_.block_bytes);
        let start = u64::from(nth).saturating_mul(BLOCK_BYTES);
        let Some(block) = self.blocks.get(&start.checked_div(block_bytes).unwrap_or(0)) else {
            return Ok(None);
        };
        let bytes = self.check.block(*block, BlockRole::Contents)?;
        let at = saturating_usize(start.checked_rem(block_bytes).unwrap_or(0));
        Ok(Some(bytes.slice(at..at.saturating_add(saturating_usize(BLOCK_BYTES)))))
    }

    fn read(mut self, magic: u32) -> Result<Option<UsageById>> {
        let head = self.block(0)?;
        let head = head.as_deref().map(|head| (le32(head, 0), le32(head, 4)));
        if head != Some((Some(magic), Some(VERSION))) {
            return Ok(None);
        }
        self.walk_tree_node(ROOT, 0)?;
        Ok(self.is_valid.then_some(self.found))
    }

    /// Visits a node; recursion is bounded by the depth of the tree.
    fn walk_tree_node(&mut self, nth: u32, level: u32) -> Result<()> {
        if level == LEVELS {
            if self.visited.insert(nth) {
                return self.read_leaf(nth);
            }
            return Ok(());
        }
        if !self.visited.insert(nth) {
            self.is_valid = false;
            return Ok(());
        }
        let Some(bytes) = self.block(nth)? else {
            self.is_valid = false;
            return Ok(());
        };
        for below in bytes.chunks_exact(4).filter_map(|word| le32(word, 0)) {
            if below != 0 {
                self.walk_tree_node(below, level.saturating_add(1))?;
            }
        }
        Ok(())
    }

    fn read_leaf(&mut self, nth: u32) -> Result<()> {
        let Some(bytes) = self.block(nth)? else {
            self.is_valid = false;
            return Ok(());
        };
        let le64 = |entry: &[u8], at: usize| {
            let high = at.saturating_add(4);
            u64::from(le32(entry, at).unwrap_or(0))
                | u64::from(le32(entry, high).unwrap_or(0)) << 32
        };
        let rest = bytes.get(HEAD_BYTES..).unwrap_or_default();
        for entry in rest.chunks_exact(ENTRY_BYTES) {
            if entry.iter().any(|byte| *byte != 0) {
                let number = le32(entry, 0).unwrap_or(0);
                self.found.insert(number, (le64(entry, BYTES_AT), le64(entry, INODES_AT)));
            }
        }
        Ok(())
    }
}
