//! Block allocation: after the previous block, from a window, or in a long free run.

use super::{
    Group, MAX_RESERVATION_WINDOWS, RESERVATION_BLOCKS, ReservationWindow, all_bits_are,
    bitmap_view, set_bit_range,
};
use crate::blocks::role::Role;
use crate::blocks::write_back::BufferState;
use crate::format::bitmap::BitRun;
use crate::format::group::flags;
use crate::transaction::Transaction;
use crate::units::saturating_u32;
use crate::{Error, FsBlock, Result};

/// A block allocation request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationRequest {
    /// Preferred first block.
    pub(crate) goal: u64,
    /// Number of blocks, at least 1; whole clusters are allocated.
    pub(crate) count: u32,
    /// Inode of a file that grows at its end.
    pub(crate) append_inode: Option<u32>,
    /// True if blocks reserved for the superuser may be used.
    pub(crate) privileged: bool,
    /// True for an extent-tree node, which may use blocks reserved for metadata.
    pub(crate) is_for_extent_node: bool,
}

impl Transaction<'_> {
    /// Returns the blocks that the user may allocate, including pending frees.
    pub(crate) fn available_blocks(&self, privileged: bool) -> u64 {
        let super_ = &self.volume.super_;
        let set_aside = super_.reserved_total();
        let kept =
            if privileged { set_aside.saturating_sub(super_.reserved_blocks) } else { set_aside };
        let kept = kept.saturating_add(self.writer.quotas.reserved_blocks);
        self.writer.groups.free_blocks().saturating_sub(kept)
    }

    /// Returns the blocks allocatable for extent-tree nodes, including those that Linux reserves
    /// for them.
    pub(crate) fn available_metadata_blocks(&self) -> u64 {
        let groups = &self.writer.groups;
        let kept = groups.pending_free_blocks().saturating_add(self.writer.quotas.reserved_blocks);
        groups.free_blocks().saturating_sub(kept)
    }

    /// Returns the blocks that the user may allocate now.
    pub(crate) fn allocatable_blocks(&self, privileged: bool) -> u64 {
        self.available_blocks(privileged).saturating_sub(self.writer.groups.pending_free_blocks())
    }

    /// Returns the blocks per cluster, which is the unit of allocation.
    pub(crate) fn cluster_blocks(&self) -> u32 {
        self.volume.super_.cluster_blocks
    }

    /// Allocates up to `count` contiguous blocks, rounded up to clusters; [`Error::NoSpace`] if
    /// there are none.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn allocate_blocks(&mut self, request: AllocationRequest) -> Result<(u64, u32)> {
        let available = match request.is_for_extent_node {
            true => self.available_metadata_blocks(),
            false => self.available_blocks(request.privileged),
        };
        let ratio = self.cluster_blocks();
        // Limit of clusters whose number of blocks fits 32 bits.
        let most = saturating_u32(available / u64::from(ratio)).min(!0 / ratio);
        let want = request.count.div_ceil(ratio).min(most).saturating_mul(ratio);
        let goal = self.writer.groups.cluster_start(request.goal);
        let request = AllocationRequest { goal, count: want, ..request };
        if request.count == 0 {
            return Err(Error::NoSpace);
        }
        self.preload_bitmap_of_block(request.goal)?;
        if let Some(found) = self.allocate_from_window(request) {
            return self.mark_found_allocated(found);
        }
        if let Some(grows) = request.append_inode {
            self.writer.groups.discard_reservation_window(grows);
        }
        let found = match self.find_blocks(request)? {
            Some(found) => found,
            None if self.writer.groups.discard_reservation_windows() => {
                self.find_blocks(request)?.ok_or(Error::NoSpace)?
            }
            None => return Err(Error::NoSpace),
        };
        let taken = self.mark_found_allocated(found)?;
        if let Some(grows) = request.append_inode {
            self.open_reservation_window(grows, taken);
        }
        Ok(taken)
    }

    fn mark_found_allocated(&mut self, (start, count): (u64, u32)) -> Result<(u64, u32)> {
        self.mark_blocks_used(start, count)?;
        Ok((start, count))
    }

    fn allocate_from_window(&mut self, request: AllocationRequest) -> Option<(u64, u32)> {
        let window = self.writer.groups.reservation_windows.get_mut(&request.append_inode?)?;
        if window.next != request.goal {
            return None;
        }
        let count = saturating_u32(window.end.saturating_sub(window.next)).min(request.count);
        let start = window.next;
        window.next = window.next.saturating_add(count.into());
        if window.next >= window.end {
            // Used up: the next window is twice as large.
            window.end = window.next;
        }
        (count > 0).then_some((start, count))
    }

    /// Reserves free blocks after those just allocated to a file.
    fn open_reservation_window(&mut self, inode: u32, (start, count): (u64, u32)) {
        let groups = &mut self.writer.groups;
        let ratio = groups.cluster_blocks;
        let before = groups.reservation_windows.get(&inode).map_or(0, |window| window.len);
        let len = before
            .saturating_mul(2)
            .clamp(RESERVATION_BLOCKS.0, RESERVATION_BLOCKS.1)
            .max(count.min(RESERVATION_BLOCKS.1));
        let next = start.saturating_add(count.into());
        let Some((group, at)) = groups.locate_block_bit(next) else { return };
        if groups.reservation_windows.len() >= MAX_RESERVATION_WINDOWS {
            groups.discard_reservation_windows();
        }
        let clusters = groups.blocks_to_clusters(len);
        let Ok(Group { allocation_bitmaps: Some(search), .. }) = groups.get_mut(group) else {
            return;
        };
        let kept = bitmap_view(&search.blocks).zeros_at(at, clusters);
        if kept > 0 {
            set_bit_range(&mut search.blocks, at, kept, true);
            let kept = kept.saturating_mul(ratio);
            groups.reservation_windows.insert(
                inode,
                ReservationWindow { next, end: next.saturating_add(kept.into()), len },
            );
        }
    }

    /// Loads the allocation bitmaps of a group, if necessary.
    pub(super) fn load_group_bitmaps(&mut self, number: u32) -> Result<()> {
        let Some(Group { allocation_bitmaps: None, descriptor, .. }) =
            self.writer.groups.get(number)
        else {
            return Ok(());
        };
        if descriptor.flags & flags::BLOCK_UNINIT == 0 {
            self.block(descriptor.block_bitmap, Role::BlockBitmap(number))?;
        }
        if descriptor.flags & flags::INODE_UNINIT == 0 {
            self.block(descriptor.inode_bitmap, Role::InodeBitmap(number))?;
        }
        self.writer.groups.load_allocation_bitmaps(number, &self.volume.store, &self.volume.super_)
    }

    /// Preloads a bitmap block and returns its address; callers do this before they change
    /// counters.
    pub(super) fn preload_bitmap(&self, number: u32, role: Role) -> Result<FsBlock> {
        let group = self.writer.groups.get(number).ok_or(Error::corrupt("group number"))?;
        let at = match role {
            Role::InodeBitmap(_) => group.descriptor.inode_bitmap,
            _ => group.descriptor.block_bitmap,
        };
        let never_written = match role {
            Role::InodeBitmap(_) => flags::INODE_UNINIT,
            _ => flags::BLOCK_UNINIT,
        };
        if group.descriptor.flags & never_written == 0 {
            self.block(at, role)?;
        }
        Ok(at)
    }

    /// Preloads the block bitmap of a block's group, and its allocation bitmaps.
    pub(crate) fn preload_bitmap_of_block(&mut self, block: u64) -> Result<()> {
        let Some((number, _)) = self.writer.groups.locate_block_bit(block) else { return Ok(()) };
        if self.writer.groups.get(number).is_none() {
            return Ok(());
        }
        self.load_group_bitmaps(number)?;
        self.preload_bitmap(number, Role::BlockBitmap(number)).map(drop)
    }

    /// Finds free blocks without allocating them.
    #[allow(clippy::arithmetic_side_effects, reason = "a volume has a group, and fewer than 2^31")]
    fn find_blocks(&mut self, request: AllocationRequest) -> Result<Option<(u64, u32)>> {
        let super_ = &self.volume.super_;
        let goal =
            request.goal.clamp(u64::from(super_.first_data_block), super_.blocks.saturating_sub(1));
        let (first_group, at) =
            self.writer.groups.locate_block_bit(goal).ok_or(Error::corrupt("block number"))?;
        let count = super_.groups;
        let want = self.writer.groups.blocks_to_clusters(request.count);
        let mut best: Option<(u64, u32)> = None;
        for step in 0..count {
            let number = (first_group + step) % count;
            let Some(group) = self.writer.groups.get(number) else { continue };
            if group.descriptor.free_clusters == 0 {
                continue;
            }
            self.load_group_bitmaps(number)?;
            let groups = &self.writer.groups;
            let Some(group) = groups.get(number) else { continue };
            let Some(search) = &group.allocation_bitmaps else { continue };
            let from = if step == 0 { at } else { 0 };
            // The block right after the previous one is the best, however short the run.
            if step == 0 {
                let len = bitmap_view(&search.blocks).zeros_at(from, want);
                if len > 0 {
                    return Ok(Some(
                        groups.cluster_run_to_blocks(group, BitRun { start: from, len }),
                    ));
                }
            }
            let mut found = bitmap_view(&search.blocks).next_zero_run(from, want);
            if from > 0 && found.is_none_or(|found| found.len < want) {
                let wrapped = bitmap_view(&search.blocks).next_zero_run(0, want);
                found = [found, wrapped].into_iter().flatten().max_by_key(|run| run.len);
            }
            let Some(run) = found else { continue };
            let found = groups.cluster_run_to_blocks(group, run);
            if run.len >= want {
                return Ok(Some(found));
            }
            if best.is_none_or(|(_, best)| best < found.1) {
                best = Some(found);
            }
            // A nearby run of sufficient size is better than a complete one far away.
            if step >= 8 && best.is_some_and(|(_, blocks)| blocks >= 64) {
                break;
            }
        }
        Ok(best)
    }

    /// Writes the uninitialized bitmaps of a group before the first allocation. An inode bitmap
    /// implies the block bitmap.
    pub(super) fn initialize_bitmaps(&mut self, number: u32, with_inodes: bool) -> Result<()> {
        let group = self.writer.groups.get_mut(number)?;
        let said = group.descriptor;
        let blocks = group.initial_blocks.take();
        let inodes = if with_inodes { group.initial_inodes.take() } else { None };
        for (bits, at, role, flag) in [
            (blocks, said.block_bitmap, Role::BlockBitmap(number), flags::BLOCK_UNINIT),
            (inodes, said.inode_bitmap, Role::InodeBitmap(number), flags::INODE_UNINIT),
        ] {
            let Some(bits) = bits else { continue };
            self.put_new_block(at, role, bits);
            let group = self.writer.groups.get_mut(number)?;
            group.descriptor.flags &= !flag;
            group.changed = true;
        }
        Ok(())
    }

    fn mark_blocks_used(&mut self, start: u64, blocks: u32) -> Result<()> {
        let (number, at) =
            self.writer.groups.locate_block_bit(start).ok_or(Error::corrupt("block number"))?;
        let count = self.writer.groups.blocks_to_clusters(blocks);
        if self.writer.groups.overlaps_system_zone(start, start.saturating_add(blocks.into())) {
            return Err(Error::corrupt("block bitmap: the volume's own block is free"));
        }
        let bitmap_at = self.preload_bitmap(number, Role::BlockBitmap(number))?;
        self.may_block = true;
        self.initialize_bitmaps(number, false)?;
        let group = self.writer.groups.get_mut(number)?;
        group.descriptor.free_clusters = group.descriptor.free_clusters.saturating_sub(count);
        group.changed = true;
        if let Some(search) = &mut group.allocation_bitmaps {
            set_bit_range(&mut search.blocks, at, count, true);
        }
        self.writer.groups.free_clusters =
            self.writer.groups.free_clusters.saturating_sub(u64::from(count));
        let new = self.modify_block(bitmap_at, Role::BlockBitmap(number), |bits| {
            let new = all_bits_are(bits, at, count, false);
            set_bit_range(bits, at, count, true);
            new
        })?;
        if !new {
            return Err(Error::corrupt("block bitmap").with_block(bitmap_at));
        }
        Ok(())
    }

    /// Excludes these blocks from allocation, except by number.
    pub(crate) fn exclude_from_allocation(&mut self, start: u64, count: u32) -> Result<()> {
        for (number, bit, clusters) in self.split_by_group(start, count)? {
            self.load_group_bitmaps(number)?;
            let group = self.writer.groups.get_mut(number)?;
            if let Some(search) = &mut group.allocation_bitmaps {
                set_bit_range(&mut search.blocks, bit, clusters, true);
            }
        }
        Ok(())
    }

    /// Allocates those of these blocks that are free, with their clusters; returns how many.
    pub(crate) fn allocate_exact_blocks(&mut self, start: u64, count: u32) -> Result<u64> {
        let ratio = u64::from(self.cluster_blocks());
        let mut at = self.writer.groups.cluster_start(start);
        let mut taken = 0u64;
        for (number, bit, clusters) in self.split_by_group(start, count)? {
            self.load_group_bitmaps(number)?;
            let role = Role::BlockBitmap(number);
            let bitmap_at = self.preload_bitmap(number, role)?;
            self.initialize_bitmaps(number, false)?;
            let before = self.block(bitmap_at, role)?;
            let mut nth = 0;
            while nth < clusters {
                let free = bitmap_view(&before)
                    .zeros_at(bit.saturating_add(nth), clusters.saturating_sub(nth));
                if free > 0 {
                    let blocks = u64::from(free).saturating_mul(ratio);
                    self.mark_blocks_used(
                        at.saturating_add(u64::from(nth).saturating_mul(ratio)),
                        saturating_u32(blocks),
                    )?;
                    taken = taken.saturating_add(blocks);
                }
                nth = nth.saturating_add(free);
                nth = nth.saturating_add(
                    bitmap_view(&before)
                        .ones_at(bit.saturating_add(nth), clusters.saturating_sub(nth)),
                );
            }
            at = at.saturating_add(u64::from(clusters).saturating_mul(ratio));
        }
        Ok(taken)
    }

    /// Splits a range by group: group, first cluster, and count. None of it may be metadata of the
    /// volume.
    fn split_by_group(&self, start: u64, count: u32) -> Result<Vec<(u32, u32, u32)>> {
        let groups = &self.writer.groups;
        let end = start.saturating_add(count.into());
        let mut at = groups.cluster_start(start);
        let wrong = |block| Error::corrupt("block map: pointer").with_block(FsBlock(block));
        if end > self.volume.super_.blocks || groups.overlaps_system_zone(at, end) {
            return Err(wrong(start));
        }
        let mut parts = Vec::new();
        while at < end {
            let (number, bit) = groups.locate_block_bit(at).ok_or(wrong(at))?;
            let whole = groups.get(number).ok_or(wrong(at))?.whole_clusters;
            let left =
                saturating_u32(end.saturating_sub(at).div_ceil(groups.cluster_blocks.into()));
            let clusters = left.min(whole.saturating_sub(bit));
            if clusters == 0 {
                return Err(wrong(at));
            }
            parts.push((number, bit, clusters));
            at =
                at.saturating_add(u64::from(clusters).saturating_mul(groups.cluster_blocks.into()));
        }
        Ok(parts)
    }

    /// Frees blocks that nothing references any more, with their clusters; returns how many.
    pub(crate) fn free_blocks(&mut self, start: u64, count: u32) -> Result<u64> {
        let end = start.saturating_add(count.into());
        let mut at = self.writer.groups.cluster_start(start);
        let wrong = |block| Err(Error::corrupt("block map: pointer").with_block(FsBlock(block)));
        if end > self.volume.super_.blocks || self.writer.groups.overlaps_system_zone(at, end) {
            return wrong(start);
        }
        let mut freed = 0u64;
        while at < end {
            let Some((number, bit)) = self.writer.groups.locate_block_bit(at) else {
                return wrong(at);
            };
            self.load_group_bitmaps(number)?;
            let bitmap_at = self.preload_bitmap(number, Role::BlockBitmap(number))?;
            self.may_block = true;
            let groups = &mut self.writer.groups;
            let left =
                saturating_u32(end.saturating_sub(at).div_ceil(groups.cluster_blocks.into()));
            let group = groups.get_mut(number)?;
            let clusters = left.min(group.whole_clusters.saturating_sub(bit));
            if clusters == 0 {
                return wrong(at);
            }
            group.descriptor.free_clusters =
                group.descriptor.free_clusters.saturating_add(clusters);
            group.changed = true;
            groups.free_clusters = groups.free_clusters.saturating_add(clusters.into());
            let used = self.modify_block(bitmap_at, Role::BlockBitmap(number), |bits| {
                let used = all_bits_are(bits, bit, clusters, true);
                set_bit_range(bits, bit, clusters, false);
                used
            })?;
            if !used {
                let what = "block bitmap: a used block is free";
                return Err(Error::corrupt(what).with_block(FsBlock(at)));
            }
            self.defer_free(bitmap_at, at, bit, clusters);
            let blocks = u64::from(clusters).saturating_mul(self.cluster_blocks().into());
            freed = freed.saturating_add(blocks);
            at = at.saturating_add(blocks);
        }
        Ok(freed)
    }

    /// Defers a free: clusters allocated in this batch are reusable now, the others after the chain
    /// is durable.
    fn defer_free(&mut self, bitmap_at: FsBlock, start: u64, at: u32, count: u32) {
        let ratio = self.cluster_blocks();
        let blocks = |nth: u32, count: u32| {
            (
                start.saturating_add(u64::from(nth).saturating_mul(ratio.into())),
                count.saturating_mul(ratio),
            )
        };
        let store = &self.volume.store;
        let mut changing = store.write_back.write();
        let (_, all) = blocks(0, count);
        for block in (start..start.saturating_add(all.into())).map(FsBlock) {
            changing.drop_block(block);
        }
        let mut new = Vec::new();
        if let Some(buffer) = changing.metadata.get(&bitmap_at.0)
            && let BufferState::Modified(base) = &buffer.state
        {
            // Run by run: rare except in short-lived files, which are small.
            let mut nth = 0;
            while nth < count {
                let fresh =
                    bitmap_view(base).zeros_at(at.saturating_add(nth), count.saturating_sub(nth));
                if fresh > 0 {
                    new.push(blocks(nth, fresh));
                }
                nth = nth.saturating_add(fresh);
                let known =
                    bitmap_view(base).ones_at(at.saturating_add(nth), count.saturating_sub(nth));
                if known > 0 {
                    self.writer.batch.record_freed_blocks(blocks(nth, known));
                    self.writer.groups.pending_free_clusters =
                        self.writer.groups.pending_free_clusters.saturating_add(known.into());
                }
                nth = nth.saturating_add(known);
            }
        } else {
            self.writer.batch.record_freed_blocks(blocks(0, count));
            self.writer.groups.pending_free_clusters =
                self.writer.groups.pending_free_clusters.saturating_add(count.into());
        }
        drop(changing);
        self.writer.groups.mark_allocatable(&new, &[]);
    }
}
