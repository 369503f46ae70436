//! Entries of quota files: lookup, reservation, and the usage of a closed batch.

use std::collections::BTreeMap;

use super::{Owner, QuotaId};
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::format::inode_slot::InodeSlot;
use crate::format::quota::{
    BLOCK_BYTES, QuotaHeader, QuotaType, QuotaUsage, ROOT_BLOCK, RawEntries, TREE_LEVELS,
    reference, set_reference,
};
use crate::map::edit::AllocationPolicy;
use crate::transaction::Transaction;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Limit of quota-file blocks for a new entry: three tree blocks and its own.
const MAX_NEW_ENTRY_BLOCKS: u32 = TREE_LEVELS;
/// Limit of map blocks for those.
const MAX_NEW_MAP_BLOCKS: u32 = 3;

/// Position of an entry, or the tree node without a reference to it.
enum EntrySearch {
    Entry { block: u32, nth: usize },
    Missing { node: u32, level: u32 },
}

impl Transaction<'_> {
    /// Checks the headers of all quota files.
    pub(crate) fn check_quota_files(&self) -> Result<()> {
        let files = &self.writer.quotas.files;
        files.iter().try_for_each(|(kind, file)| self.quota_header(*kind, *file).map(drop))
    }

    /// Returns the blocks needed for the missing entries of `owner`.
    pub(crate) fn entries_needed(&mut self, owner: Owner) -> Result<u64> {
        let mut needed = 0u64;
        for (account, file) in self.writer.quotas.quota_ids(owner) {
            if self.writer.quotas.has_entry(account) {
                continue;
            }
            match self.find_entry(account, file)? {
                EntrySearch::Entry { .. } => self.writer.quotas.remember_entry(account),
                EntrySearch::Missing { .. } => {
                    needed = needed.saturating_add(self.max_entry_blocks())
                }
            }
        }
        Ok(needed)
    }

    /// Reserves the blocks of [`Transaction::entries_needed`] until the batch is closed.
    pub(crate) fn reserve_entries(&mut self, owner: Owner) {
        let blocks = self.max_entry_blocks().saturating_mul(self.cluster_blocks().into());
        let quotas = &mut self.writer.quotas;
        for (account, _) in quotas.quota_ids(owner) {
            if !quotas.has_entry(account) {
                quotas.reserved_entries.insert(account);
                quotas.reserved_blocks = quotas.reserved_blocks.saturating_add(blocks);
            }
        }
    }

    /// Checks the space for the owner's missing entries and reserves it.
    pub(crate) fn ensure_entries(&mut self, owner: Owner) -> Result<()> {
        let needed = self.entries_needed(owner)?;
        if needed > 0 {
            self.check_free_blocks(needed, true)?;
            self.reserve_entries(owner);
        }
        Ok(())
    }

    /// [`Transaction::ensure_entries`] for the owner of an existing inode.
    pub(crate) fn ensure_entries_of(&mut self, inode: InodeNumber) -> Result<()> {
        if !self.is_counted(inode)? {
            return Ok(());
        }
        let owner = self.read_slot(inode, Owner::from_inode_slot)?;
        self.ensure_entries(owner)
    }

    /// Adds a change of usage to the owner of an inode.
    pub(crate) fn count_usage(&mut self, inode: InodeNumber, usage: QuotaUsage) -> Result<()> {
        if self.is_counted(inode)? {
            let owner = self.read_slot(inode, Owner::from_inode_slot)?;
            self.add_owner_usage(owner, usage);
        }
        Ok(())
    }

    /// Adds or subtracts blocks of an inode.
    pub(crate) fn count_block_usage(
        &mut self,
        inode: InodeNumber,
        blocks: u64,
        more: bool,
    ) -> Result<()> {
        let bytes = blocks.saturating_mul(self.volume.super_.block_bytes.into());
        let usage = QuotaUsage { inodes: 0, bytes: i64::try_from(bytes).unwrap_or(i64::MAX) };
        self.count_usage(inode, if more { usage } else { usage.negated() })
    }

    /// Moves the usage of an inode to the owner that `give` stores in its slot.
    pub(crate) fn transfer_usage(
        &mut self,
        inode: InodeNumber,
        set_owner: impl FnOnce(&mut InodeSlot<'_>),
    ) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        let (before, after, bytes) = self.change_slot(inode, |it| {
            let before = Owner::from_inode_slot(it);
            set_owner(it);
            (before, Owner::from_inode_slot(it), it.allocated_bytes(block_bytes))
        })?;
        if before != after && self.is_counted(inode)? {
            let inodes = self.ea_inode_charge(inode)?.entries.saturating_add(1);
            let usage = QuotaUsage { inodes, bytes: i64::try_from(bytes).unwrap_or(i64::MAX) };
            self.add_owner_usage(before, usage.negated());
            self.add_owner_usage(after, usage);
        }
        Ok(())
    }

    fn is_counted(&self, inode: InodeNumber) -> Result<bool> {
        if self.writer.quotas.files.is_empty() || !self.volume.super_.is_valid_inode(inode) {
            return Ok(false);
        }
        Ok(!self.has_ea_inodes() || !self.read_slot(inode, |it| it.is_ea_inode())?)
    }

    fn add_owner_usage(&mut self, owner: Owner, usage: QuotaUsage) {
        for (account, _) in self.writer.quotas.quota_ids(owner) {
            let sum = self.writer.batch.usage.entry(account).or_default();
            *sum = sum.plus(usage);
        }
    }

    fn max_entry_blocks(&self) -> u64 {
        let blocks = (MAX_NEW_ENTRY_BLOCKS * BLOCK_BYTES).div_ceil(self.volume.super_.block_bytes);
        u64::from(blocks.saturating_add(MAX_NEW_MAP_BLOCKS))
    }

    /// Writes the usage changes of the batch to the quota files.
    pub(crate) fn write_usage(&mut self) -> Result<()> {
        let sums = std::mem::take(&mut self.writer.batch.usage);
        let files: BTreeMap<QuotaType, InodeNumber> =
            self.writer.quotas.files.iter().copied().collect();
        self.writer.quotas.reserved_entries.clear();
        self.writer.quotas.reserved_blocks = 0;
        for (account, usage) in
            sums.into_iter().filter(|(_, usage)| *usage != QuotaUsage::default())
        {
            let (kind, id) = account;
            let Some(file) = files.get(&kind) else { continue };
            match self.add_usage(account, *file, usage) {
                Ok(()) => {}
                Err(error @ (Error::Corrupt { .. } | Error::NoSpace)) => {
                    log::warn!("the quota of {kind:?} {id} is wrong: {error}: run e2fsck");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn add_usage(&mut self, account: QuotaId, file: InodeNumber, usage: QuotaUsage) -> Result<()> {
        match self.find_entry(account, file)? {
            EntrySearch::Entry { block, nth } => {
                self.change_quota(file, block, |bytes| {
                    RawEntries::view_mut(bytes).map(|entries| entries.add_usage_at(nth, usage))
                })??;
                self.writer.quotas.remember_entry(account);
                Ok(())
            }
            // A missing entry has no usage to subtract.
            EntrySearch::Missing { .. } if usage.inodes <= 0 && usage.bytes <= 0 => Ok(()),
            EntrySearch::Missing { node, level } => {
                self.add_entry(account, file, (node, level), usage)?;
                self.writer.quotas.remember_entry(account);
                Ok(())
            }
        }
    }

    fn find_entry(&self, (kind, id): QuotaId, file: InodeNumber) -> Result<EntrySearch> {
        let of_file = |error: Error| error.with_inode(file);
        let header = self.quota_header(kind, file)?;
        let mut node = ROOT_BLOCK;
        for level in 0..TREE_LEVELS {
            let bytes = self.quota_block(file, node)?;
            match header.check_reference(reference(&bytes, id, level)).map_err(of_file)? {
                None => return Ok(EntrySearch::Missing { node, level }),
                Some(below) => node = below,
            }
        }
        let bytes = self.quota_block(file, node)?;
        let found = RawEntries::view(&bytes).map_err(of_file)?.find(id);
        let nth =
            found.ok_or(Error::corrupt("quota file: an entry is missing").with_inode(file))?;
        Ok(EntrySearch::Entry { block: node, nth })
    }

    /// Adds an entry, and the tree blocks below `node` that lead to it. Everything is allocated
    /// before anything references it.
    fn add_entry(
        &mut self,
        (kind, id): QuotaId,
        file: InodeNumber,
        (node, level): (u32, u32),
        usage: QuotaUsage,
    ) -> Result<()> {
        let of_file = |error: Error| error.with_inode(file);
        let mut header = self.quota_header(kind, file)?;
        let mut next_room = None;
        if header.first_free_entry_block != 0 {
            let bytes = self.quota_block(file, header.first_free_entry_block)?;
            let entries = RawEntries::view(&bytes).map_err(of_file)?;
            if !entries.has_free_entry().map_err(of_file)? {
                return Err(of_file(Error::corrupt("quota file: list of blocks with room")));
            }
            next_room = header.check_reference(entries.dqdh_next_free.get()).map_err(of_file)?;
            if let Some(next) = next_room {
                RawEntries::view(&self.quota_block(file, next)?).map_err(of_file)?;
            }
        }
        let mut nodes = Vec::new();
        for _ in level.saturating_add(1)..TREE_LEVELS {
            nodes.push(self.allocate_quota_block(file, &mut header)?);
        }
        if header.first_free_entry_block == 0 {
            header.first_free_entry_block = self.allocate_quota_block(file, &mut header)?;
        }
        let block = header.first_free_entry_block;
        let has_room = self.change_quota(file, block, |bytes| {
            let entries = RawEntries::view_mut(bytes)?;
            let has_room = entries.add(id, usage);
            if !has_room {
                entries.dqdh_next_free.set(0);
                entries.dqdh_prev_free.set(0);
            }
            Ok::<_, Error>(has_room)
        })??;
        if !has_room {
            header.first_free_entry_block = next_room.unwrap_or(0);
            if let Some(next) = next_room {
                self.change_quota(file, next, |bytes| {
                    RawEntries::view_mut(bytes).map(|entries| entries.dqdh_prev_free.set(0))
                })??;
            }
        }
        // Bottom-up: each node references an existing block.
        let mut below = block;
        for (level, node) in (level.saturating_add(1)..TREE_LEVELS).zip(&nodes).rev() {
            self.change_quota(file, *node, |bytes| set_reference(bytes, id, level, below))?;
            below = *node;
        }
        self.change_quota(file, node, |bytes| set_reference(bytes, id, level, below))?;
        self.change_quota(file, 0, |bytes| header.write(bytes))
    }

    /// Returns a zeroed block of a quota file: an unused one, or a new one at the end. Updates
    /// `header`, which the caller writes to the file.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn allocate_quota_block(&mut self, file: InodeNumber, header: &mut QuotaHeader) -> Result<u32> {
        if header.first_free_block != 0 {
            let block = header.first_free_block;
            let bytes = self.quota_block(file, block)?;
            let unused = RawEntries::view(&bytes).map_err(|error| error.with_inode(file))?;
            let next = header.check_reference(unused.dqdh_next_free.get());
            if unused.dqdh_entries.get() != 0 || next == Ok(Some(block)) {
                let what = "quota file: list of unused blocks";
                return Err(Error::corrupt(what).with_inode(file));
            }
            header.first_free_block = next.map_err(|error| error.with_inode(file))?.unwrap_or(0);
            self.change_quota(file, block, |bytes| bytes.fill(0))?;
            return Ok(block);
        }
        let block = header.blocks;
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let at = saturating_u32(u64::from(block) * u64::from(BLOCK_BYTES) / block_bytes);
        if self.lookup_block(file, at)?.is_none() {
            let taking = AllocationPolicy { is_append: false, privileged: true, unwritten: false };
            let runs = self.map_blocks(file, at..at.saturating_add(1), taking)?;
            let run = runs.first().ok_or(Error::NoSpace)?;
            self.put_new_block(run.at, Role::Quota, vec![0; saturating_usize(block_bytes)]);
        }
        header.blocks = block.checked_add(1).ok_or(Error::TooLarge)?;
        let end = u64::from(header.blocks).saturating_mul(u64::from(BLOCK_BYTES));
        if self.read_inode_unchecked(file)?.size_bytes < end {
            self.change_slot(file, |it| it.set_size(end))?;
        }
        self.change_quota(file, block, |bytes| bytes.fill(0))?;
        Ok(block)
    }

    fn quota_header(&self, kind: QuotaType, file: InodeNumber) -> Result<QuotaHeader> {
        let size = self.read_inode_unchecked(file)?.size_bytes;
        let bytes = self.quota_block(file, 0)?;
        QuotaHeader::check(&bytes, kind, size).map_err(|error| error.with_inode(file))
    }

    /// Returns the volume block of a quota-file block, and the offset there.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn quota_block_location(&self, file: InodeNumber, nth: u32) -> Result<(FsBlock, usize)> {
        let block_bytes = u64::from(self.volume.super_.block_bytes);
        let at = u64::from(nth).saturating_mul(u64::from(BLOCK_BYTES));
        let block = self.lookup_block(file, saturating_u32(at / block_bytes))?;
        let missing = Error::corrupt("quota file: a block is missing").with_inode(file);
        Ok((block.ok_or(missing)?, saturating_usize(at % block_bytes)))
    }

    fn quota_block(&self, file: InodeNumber, nth: u32) -> Result<SharedBytes> {
        let (block, at) = self.quota_block_location(file, nth)?;
        let bytes = self.block(block, Role::Quota).map_err(|error| error.with_inode(file))?;
        Ok(bytes.slice(at..at.saturating_add(saturating_usize(BLOCK_BYTES.into()))))
    }

    fn change_quota<T>(
        &mut self,
        file: InodeNumber,
        nth: u32,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let (block, at) = self.quota_block_location(file, nth)?;
        self.modify_block(block, Role::Quota, |bytes| {
            let part = at..at.saturating_add(saturating_usize(BLOCK_BYTES.into()));
            change(bytes.get_mut(part).unwrap_or_default())
        })
    }
}
