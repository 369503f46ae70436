//! Reads, changes and allocation of blocks and inode slots.

use std::ops::Range;

use super::Fixer;
use crate::check::Check;
use crate::format::inode::set_checksum;
use crate::format::inode_slot::InodeSlot;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, InodeNumber, Result};

impl<'a> Fixer<'a> {
    pub(super) fn check(&self) -> Result<&'a Check<'a>> {
        self.check.ok_or(Error::Misuse("a fix without a check"))
    }

    pub(super) fn block(&self, at: u64) -> Result<Vec<u8>> {
        Ok(self.changes.block(FsBlock(at))?)
    }

    pub(super) fn put(&self, at: u64, bytes: Vec<u8>) -> Result<()> {
        Ok(self.changes.put(FsBlock(at), bytes)?)
    }

    /// Returns the first block of a cluster that belongs to nothing, and takes it.
    pub(super) fn allocate_between(&mut self, blocks: Range<u64>) -> Result<u64> {
        let check = self.check()?;
        let ratio = usize::try_from(check.super_.cluster_blocks.max(1)).unwrap_or(usize::MAX);
        let mut firsts = blocks.step_by(ratio);
        firsts.find(|at| !self.taken.insert(check.cluster_index(*at))).ok_or(Error::NoSpace)
    }

    /// Returns `count` blocks that belong to nothing, in whole clusters, and takes them.
    pub(super) fn allocate(&mut self, count: usize) -> Result<Vec<u64>> {
        let super_ = &self.check()?.super_;
        let first = u64::from(super_.first_data_block);
        let ratio = u64::from(super_.cluster_blocks.max(1));
        let mut found = vec![];
        while found.len() < count {
            if self.next_free >= self.taken.len() {
                return Err(Error::NoSpace);
            }
            let at = self.next_free;
            self.next_free = at.saturating_add(1);
            let start = first.saturating_add(at.saturating_mul(ratio));
            let end = start.saturating_add(ratio);
            if end <= super_.blocks && !self.taken.insert(at) {
                let left = count.saturating_sub(found.len());
                found.extend((start..end).take(left));
            }
        }
        Ok(found)
    }

    fn slot_location(&self, number: u32) -> Result<(u64, usize, usize)> {
        let check = self.check()?;
        let super_ = &check.super_;
        let damaged = Error::corrupt("inode number").with_inode(InodeNumber(number));
        let nth = number.checked_sub(1).ok_or(damaged.clone())?;
        let group = nth.checked_div(super_.inodes_per_group).ok_or(damaged.clone())?;
        let within = u64::from(nth.checked_rem(super_.inodes_per_group).unwrap_or(0));
        let table = check.groups.get(saturating_usize(group.into())).ok_or(damaged)?.inode_table;
        let at = within.saturating_mul(super_.inode_bytes.into());
        let block_bytes = u64::from(super_.block_bytes).max(1);
        let block = table.saturating_add(at.checked_div(block_bytes).unwrap_or(0));
        let from = saturating_usize(at.checked_rem(block_bytes).unwrap_or(0));
        Ok((block, from, from.saturating_add(saturating_usize(super_.inode_bytes.into()))))
    }

    /// Returns the bytes of an inode.
    pub(super) fn slot(&self, number: u32) -> Result<Vec<u8>> {
        let (block, from, end) = self.slot_location(number)?;
        let bytes = self.block(block)?;
        Ok(bytes.get(from..end).ok_or(Error::corrupt("inode table"))?.to_vec())
    }

    /// Writes the bytes of an inode with their checksum.
    pub(super) fn put_slot(&self, number: u32, mut slot: Vec<u8>) -> Result<()> {
        set_checksum(&mut slot, InodeNumber(number), &self.check()?.super_);
        let (block, from, end) = self.slot_location(number)?;
        let mut bytes = self.block(block)?;
        bytes.get_mut(from..end).ok_or(Error::corrupt("inode table"))?.copy_from_slice(&slot);
        self.put(block, bytes)
    }

    /// Changes an inode.
    pub(super) fn edit_slot<T>(
        &self,
        number: u32,
        change: impl FnOnce(&mut InodeSlot<'_>) -> T,
    ) -> Result<T> {
        let mut slot = self.slot(number)?;
        let done = change(&mut InodeSlot::from_bytes(&mut slot)?);
        self.put_slot(number, slot)?;
        Ok(done)
    }

    /// Deletes an inode: what it has becomes free, and stays where it is.
    pub(super) fn clear_inode(&self, number: u32) -> Result<()> {
        let now = self.seconds();
        self.edit_slot(number, |it| {
            it.set_links(0);
            it.set_deleted(now);
        })
    }

    pub(super) fn seconds(&self) -> u32 {
        crate::format::superblock::to_disk_seconds(self.now).max(1)
    }
}
