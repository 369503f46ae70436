//! File data: write, truncate, reserve.
//!
//! Law 1: a new block is written completely before any metadata references it; the rest of the
//! block is zero.
//! Law 2: the last block of a file is zero after the end of the file.

use draconis_types::FileType;

use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::commit::batch::Effect;
use crate::format::features::ReadOnlyCompatible;
use crate::format::inode::{Inode, flags};
use crate::format::inode_slot::InodeTime;
use crate::format::quota::QuotaUsage;
use crate::format::requirements::Feature;
use crate::map::edit::{AllocationPolicy, MappedRun};
use crate::map::pointers::max_mapped_blocks;
use crate::map::{self};
use crate::reader::VolumeReader;
use crate::transaction::Transaction;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Size from which a file needs the feature `large_file`.
const LARGE_FILE_BYTES: u64 = 1 << 31;

impl VolumeReader {
    /// Returns the size limit of this file.
    pub(crate) fn max_file_bytes_of(&self, inode: &Inode) -> u64 {
        match inode.has_extents() {
            true => self.max_extent_file_bytes(),
            false => self.max_indirect_file_bytes(),
        }
    }

    /// File blocks are 32-bit numbers; the largest is reserved.
    pub(crate) fn max_extent_file_bytes(&self) -> u64 {
        let bytes = u64::from(self.super_.block_bytes);
        let huge = self.super_.read_only_compatible.contains(ReadOnlyCompatible::HUGE_FILE);
        let blocks = u64::from(u32::MAX);
        if huge {
            blocks.saturating_mul(bytes)
        } else {
            blocks.saturating_mul(bytes).min(u64::from(u32::MAX) * 512)
        }
    }

    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn max_indirect_file_bytes(&self) -> u64 {
        let bytes = u64::from(self.super_.block_bytes);
        // The sector count has 32 bits and includes indirect blocks.
        let sectors = u64::from(u32::MAX) * 512;
        let blocks = sectors / bytes;
        let maps = (blocks / (bytes / 4))
            .saturating_add(blocks / (bytes / 4) / (bytes / 4))
            .saturating_add(2);
        (max_mapped_blocks(self.super_.block_bytes).min(blocks.saturating_sub(maps)))
            .saturating_mul(bytes)
    }
}

impl Transaction<'_> {
    fn block_bytes(&self) -> u64 {
        u64::from(self.volume.super_.block_bytes)
    }

    /// Returns a file whose data may change.
    pub(crate) fn regular_file(&self, number: InodeNumber) -> Result<std::sync::Arc<Inode>> {
        let inode = self.node(number)?;
        match inode.kind {
            FileType::File => {}
            FileType::Directory => return Err(Error::IsADirectory),
            _ => return Err(Error::Misuse("only files have contents")),
        }
        inode.check_readable()?;
        if inode.flags & (flags::IMMUTABLE | flags::VERITY) != 0 {
            return Err(Error::NotPermitted);
        }
        Ok(inode)
    }

    fn allocation_policy(&self, inode: &Inode, is_append: bool) -> AllocationPolicy {
        let (uid, _) = inode.owner();
        AllocationPolicy { is_append, privileged: self.is_privileged(uid), unwritten: false }
    }

    /// Writes bytes within one step; `lent` shares them without a copy. Returns how many were
    /// written.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn write(
        &mut self,
        number: InodeNumber,
        offset: u64,
        bytes: &[u8],
        lent: Option<&SharedBytes>,
    ) -> Result<usize> {
        let inode = self.regular_file(number)?;
        let most = self.volume.max_file_bytes_of(&inode).saturating_sub(offset);
        if most == 0 {
            return Err(Error::TooLarge);
        }
        let bytes = bytes.get(..saturating_usize(most)).unwrap_or(bytes);
        if inode.flags & flags::APPEND != 0 && offset < inode.size_bytes {
            // A page cache above writes whole pages: repeated bytes are no change.
            let len = saturating_usize(inode.size_bytes.saturating_sub(offset)).min(bytes.len());
            let mut old = vec![0; len];
            self.volume.read_into_locked(&inode, offset, &mut old)?;
            if bytes.get(..len) != Some(&old[..]) {
                return Err(Error::NotPermitted);
            }
        }
        let end = offset.saturating_add(bytes.len() as u64);
        let block_bytes = self.block_bytes();
        let (first, last) =
            (saturating_u32(offset / block_bytes), saturating_u32(end.div_ceil(block_bytes)));
        // Most files are written once: only files that grow again get a reservation window.
        let taking = self.allocation_policy(&inode, end > inode.size_bytes && first > 0);
        self.preload_partial_blocks(number, offset, end)?;
        let touched = self.writer.is_modified;
        if offset > inode.size_bytes && !inode.size_bytes.is_multiple_of(block_bytes) {
            // Other drivers may have left bytes after the end.
            let stop = inode.size_bytes.next_multiple_of(block_bytes).min(offset);
            self.zero_partial_block(number, inode.size_bytes, stop)?;
        }
        let all = match self.map_blocks(number, first..last, taking) {
            // At most an empty indirect block and zeros after the end were written.
            Err(Error::NoSpace) => {
                self.writer.is_modified = touched;
                return Err(Error::NoSpace);
            }
            all => all?,
        };
        let mut taken = offset;
        for run in &all {
            if u64::from(run.from).saturating_mul(block_bytes) > taken {
                break;
            }
            taken = self.write_run(run, offset, bytes, lent)?;
        }
        let size = inode.size_bytes;
        if taken > size {
            self.set_size(&inode, taken)?;
        }
        self.invalidate_contents(number, offset.min(size), taken);
        self.set_times_now(number, &[InodeTime::Modified, InodeTime::Changed])?;
        Ok(saturating_usize(taken.saturating_sub(offset)))
    }

    /// Writes the part of `bytes` that falls into a run of blocks; returns its end.
    fn write_run(
        &mut self,
        run: &MappedRun,
        offset: u64,
        bytes: &[u8],
        lent: Option<&SharedBytes>,
    ) -> Result<u64> {
        let block_bytes = self.block_bytes();
        let start = u64::from(run.from).saturating_mul(block_bytes);
        let len = u64::from(run.blocks).saturating_mul(block_bytes);
        let from = offset.max(start);
        let end = offset.saturating_add(bytes.len() as u64).min(start.saturating_add(len));
        let part = bytes
            .get(
                saturating_usize(from.saturating_sub(offset))
                    ..saturating_usize(end.saturating_sub(offset)),
            )
            .unwrap_or_default();
        let exact = part.len() as u64 == len;
        if let (true, Some(lent)) = (exact, lent) {
            self.put_contents(
                run.at,
                &lent.slice(
                    saturating_usize(from.saturating_sub(offset))
                        ..saturating_usize(end.saturating_sub(offset)),
                ),
            );
            return Ok(end);
        }
        draconis_types::copy_counter::record_copied_bytes(part.len());
        let memory: Box<[u8]> = if exact {
            part.into()
        } else {
            let mut memory = vec![0; saturating_usize(len)];
            if !run.is_new {
                self.copy_partial_blocks(
                    run,
                    (from.saturating_sub(start), end.saturating_sub(start)),
                    &mut memory,
                )?;
            }
            let at = saturating_usize(from.saturating_sub(start));
            if let Some(into) = memory.get_mut(at..at.saturating_add(part.len())) {
                into.copy_from_slice(part);
            }
            memory.into_boxed_slice()
        };
        self.put_contents(run.at, &SharedBytes::from_owned_bytes(memory));
        Ok(end)
    }

    /// Preloads the blocks that are overwritten in part.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn preload_partial_blocks(&self, number: InodeNumber, from: u64, end: u64) -> Result<()> {
        let block_bytes = self.block_bytes();
        for edge in [from, end] {
            if !edge.is_multiple_of(block_bytes)
                && let Some(block) =
                    self.lookup_block(number, saturating_u32(edge / block_bytes))?
            {
                self.block(block, Role::Contents)?;
            }
        }
        Ok(())
    }

    /// Copies the old bytes of the first and last block, unless they are overwritten completely.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn copy_partial_blocks(
        &self,
        run: &MappedRun,
        (from, end): (u64, u64),
        memory: &mut [u8],
    ) -> Result<()> {
        let block_bytes = self.block_bytes();
        let mut edges = vec![];
        if !from.is_multiple_of(block_bytes) {
            edges.push(from / block_bytes);
        }
        if !end.is_multiple_of(block_bytes) {
            edges.push(end / block_bytes);
        }
        for nth in edges {
            let old = self.block(run.at.offset(nth), Role::Contents)?;
            let at = saturating_usize(nth.saturating_mul(block_bytes));
            if let Some(into) = memory.get_mut(at..at.saturating_add(old.len())) {
                into.copy_from_slice(&old);
            }
        }
        Ok(())
    }

    pub(crate) fn put_contents(&mut self, at: FsBlock, bytes: &SharedBytes) {
        self.writer.is_modified = true;
        self.writer.batch.dirty = true;
        let len = saturating_usize(self.block_bytes());
        let mut blocks = self.volume.store.write_back.write();
        for (nth, start) in (0u64..).zip((0..bytes.len()).step_by(len)) {
            let block = at.offset(nth);
            blocks.metadata.remove(&block.0);
            blocks.insert_content(block, bytes.slice(start..start.saturating_add(len)));
        }
    }

    /// Zeros newly allocated blocks.
    fn zero_new_blocks(&mut self, all: &[MappedRun]) {
        let len = saturating_usize(self.block_bytes());
        let zeros = SharedBytes::from_owned_bytes(vec![0; len].into_boxed_slice());
        for run in all.iter().filter(|run| run.is_new) {
            let mut blocks = self.volume.store.write_back.write();
            for nth in 0..run.blocks {
                let block = run.at.offset(nth.into());
                blocks.metadata.remove(&block.0);
                blocks.insert_content(block, zeros.clone());
            }
        }
        self.writer.batch.dirty = true;
    }

    /// Zeros the bytes of one block from `from` to `end`, if it is mapped.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn zero_partial_block(&mut self, number: InodeNumber, from: u64, end: u64) -> Result<()> {
        let block_bytes = self.block_bytes();
        let nth = saturating_u32(from / block_bytes);
        let (start, stop) = (
            saturating_usize(from % block_bytes),
            saturating_usize(end.saturating_sub(u64::from(nth).saturating_mul(block_bytes))),
        );
        let Some(block) = self.lookup_block(number, nth)? else { return Ok(()) };
        let old = self.block(block, Role::Contents)?;
        let Some(part) = old.get(start..stop) else { return Ok(()) };
        if part.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let mut new: Box<[u8]> = old[..].into();
        if let Some(part) = new.get_mut(start..stop) {
            part.fill(0);
        }
        self.put_contents(block, &SharedBytes::from_owned_bytes(new));
        Ok(())
    }

    /// Sets the size only.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn set_size(&mut self, inode: &Inode, bytes: u64) -> Result<()> {
        let before = inode.size_bytes;
        let (low, high) = (before.min(bytes), before.max(bytes));
        let block_bytes = self.block_bytes();
        // Cached chunks and map segments of the shorter file end at its size.
        self.invalidate_contents(inode.number, low.saturating_sub(1), high);
        let last = saturating_u32(low.saturating_sub(1) / block_bytes);
        self.invalidate_map(inode.number, last, saturating_u32(high.div_ceil(block_bytes)));
        self.change_slot(inode.number, |it| it.set_size(bytes))?;
        if bytes >= LARGE_FILE_BYTES && before < LARGE_FILE_BYTES {
            self.set_ro_compat_feature(Feature::R(ReadOnlyCompatible::LARGE_FILE))?;
        }
        Ok(())
    }

    /// Truncates a file, or extends it by a hole.
    pub(crate) fn truncate(&mut self, inode: &Inode, bytes: u64) -> Result<()> {
        if bytes > self.volume.max_file_bytes_of(inode) {
            return Err(Error::TooLarge);
        }
        let moved = self.convert_inline_file(inode, bytes)?;
        let inode = moved.as_deref().unwrap_or(inode);
        let number = inode.number;
        let block_bytes = self.block_bytes();
        let before = inode.size_bytes;
        if bytes <= before {
            self.preload_partial_blocks(number, bytes, bytes)?;
            self.preload_map(inode, bytes.div_ceil(block_bytes)..u64::MAX)?;
            self.writer.groups.discard_reservation_window(number.0);
            let from = saturating_u32(bytes.div_ceil(block_bytes));
            let cuts = self.truncate_points(number, from)?;
            let lists = !cuts.is_empty() && bytes != before;
            if lists {
                self.add_to_orphan_list(number)?;
                self.set_size(inode, bytes)?;
            }
            self.truncate_in_batches(number, &cuts)?;
            if lists {
                self.remove_orphan(number)?;
            }
            self.unmap(number, from..u32::MAX)?;
            if !bytes.is_multiple_of(block_bytes) {
                let end = bytes.next_multiple_of(block_bytes);
                self.zero_partial_block(number, bytes, end)?;
            }
        } else if !before.is_multiple_of(block_bytes) {
            // Other drivers may have left bytes after the end.
            let end = before.next_multiple_of(block_bytes).min(bytes);
            self.zero_partial_block(number, before, end)?;
        }
        if bytes != before {
            self.set_size(inode, bytes)?;
        }
        self.set_times_now(number, &[InodeTime::Modified, InodeTime::Changed])
    }

    /// Punches a hole, or keeps blocks that read as zeros; partial blocks are zeroed.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn punch_or_zero_range(
        &mut self,
        number: InodeNumber,
        from: u64,
        end: u64,
        keep_blocks: bool,
    ) -> Result<()> {
        let inode = self.regular_file(number)?;
        if inode.flags & flags::APPEND != 0 {
            return Err(Error::NotPermitted);
        }
        let block_bytes = self.block_bytes();
        let (first, last) = (from.div_ceil(block_bytes), end / block_bytes);
        self.preload_partial_blocks(number, from, end)?;
        if first <= last {
            self.preload_map(&inode, first..last)?;
            let range = saturating_u32(first)..saturating_u32(last);
            map::map_of(&inode)?.editor().ensure_space_for_hole(self, number, range.clone())?;
            if !from.is_multiple_of(block_bytes) {
                self.zero_partial_block(number, from, first.saturating_mul(block_bytes))?;
            }
            if !end.is_multiple_of(block_bytes) {
                self.zero_partial_block(number, last.saturating_mul(block_bytes), end)?;
            }
            match keep_blocks {
                true => {
                    map::map_of(&*self.node(number)?)?.editor().zero_range(self, number, range)?
                }
                false => self.unmap(number, range)?,
            }
        } else {
            self.zero_partial_block(number, from, end)?;
        }
        self.invalidate_contents(number, from, end.min(inode.size_bytes).max(from));
        self.set_times_now(number, &[InodeTime::Modified, InodeTime::Changed])
    }

    /// Allocates blocks that read as zeros; returns the file block after the last of them.
    pub(crate) fn fallocate_blocks(
        &mut self,
        number: InodeNumber,
        from: u32,
        end: u32,
    ) -> Result<u32> {
        let inode = self.regular_file(number)?;
        let taking = AllocationPolicy {
            unwritten: inode.has_extents(),
            ..self.allocation_policy(&inode, false)
        };
        let touched = self.writer.is_modified;
        let all = match self.map_blocks(number, from..end, taking) {
            Err(Error::NoSpace) => {
                self.writer.is_modified = touched;
                return Err(Error::NoSpace);
            }
            all => all?,
        };
        self.zero_new_blocks(&all);
        let bytes = self.block_bytes();
        self.invalidate_contents(
            number,
            u64::from(from).saturating_mul(bytes),
            u64::from(end).saturating_mul(bytes),
        );
        Ok(all.last().map_or(from, |run| run.from.saturating_add(run.blocks)))
    }

    /// Frees an inode with everything it has.
    pub(crate) fn evict_inode(&mut self, number: InodeNumber) -> Result<()> {
        let inode = self.read_inode_unchecked(number)?;
        let (kind, size) = (inode.kind, inode.size_bytes);
        let values = self.ea_refs_of_deleted(&inode)?;
        let counted = self.ea_inode_charge(number)?;
        if inode.has_map(&self.volume.super_) {
            let cuts = self.truncate_points(number, 0)?;
            self.truncate_in_batches(number, &cuts)?;
            self.unmap(number, 0..u32::MAX)?;
            self.invalidate_contents(number, 0, size);
        }
        self.release_xattr_block(number)?;
        self.count_block_usage(number, counted.blocks, false)?;
        self.count_usage(
            number,
            QuotaUsage { inodes: (-1i64).saturating_sub(counted.entries), bytes: 0 },
        )?;
        let old = self.writer.batch.is_on_disk(number);
        let now = u32::try_from(self.now.seconds.max(1)).unwrap_or(u32::MAX);
        self.discard_access_time(number);
        self.remove_orphan(number)?;
        self.change_slot(number, |it| {
            let mode = it.mode();
            it.clear();
            // Undelete tools read these fields.
            if old {
                it.set_mode(mode);
                it.set_deleted(now);
            }
        })?;
        self.record_effect(Effect::Freed { inode: number });
        self.free_inode(number, kind)?;
        self.writer.insert_hints.remove(&number.0);
        self.update_ea_refs(values)
    }
}
