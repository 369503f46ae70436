//! Changes of block maps: allocation and freeing.
//!
//! Law 1: an indirect block is allocated just before the first block that it references, so a file
//! written sequentially is on the device in reading order.
//! Law 2: a walk ends whatever the pointers say: a block that is freed twice is damage.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::alloc::AllocationRequest;
use crate::format::indirect::{addresses_per_block, pointer_at, pointers, set_pointer_at};
use crate::format::inode::{DIRECT_POINTERS, Inode};
use crate::map::pointers::{IndirectPath, PointerLocation, Pointers, block_to_path};
use crate::map::{
    BlockLocation, BlockMap, EitherBlockMap, MapNode, MapSource, MapVisitor, SEGMENT_BLOCKS,
    SegmentKey,
};
use crate::transaction::Transaction;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Contiguous blocks of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MappedRun {
    pub(crate) from: u32,
    pub(crate) blocks: u32,
    pub(crate) at: FsBlock,
    /// True if they were just allocated and hold no data yet.
    pub(crate) is_new: bool,
}

/// Policy for allocating blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationPolicy {
    pub(crate) is_append: bool,
    pub(crate) privileged: bool,
    /// True to allocate unwritten blocks, which read as zeros; extents only.
    pub(crate) unwritten: bool,
}

/// Allocation and freeing of the blocks of a file whose map it is.
pub(crate) trait MapEditor {
    /// Returns the blocks of a file in `range`, allocating missing ones. Ends early if space runs
    /// out.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if there is no space for the first block; damage.
    fn map_blocks(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>>;

    /// Checks that [`MapEditor::free_range`] in the middle of a file will not lack space.
    ///
    /// # Errors
    /// [`Error::NoSpace`]; damage.
    fn ensure_space_for_hole(
        &self,
        _: &Transaction<'_>,
        _: InodeNumber,
        _: Range<u32>,
    ) -> Result<()> {
        Ok(())
    }

    /// Makes a range of a file read as zeros: as unwritten extents, or as a hole if the map has
    /// none.
    ///
    /// # Errors
    /// [`Error::NoSpace`], before any change; damage.
    fn zero_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        tx.unmap(inode, range)
    }

    /// Frees the blocks of a file in `range`, and map blocks that become empty; returns how many.
    ///
    /// # Errors
    /// Damage.
    fn free_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<u64>;
}

impl EitherBlockMap<'_> {
    /// Returns the editor of the map.
    pub(crate) fn editor(&self) -> &dyn MapEditor {
        match self {
            Self::Pointers(map) => map,
            Self::Extents(map) => map,
        }
    }
}

impl MapEditor for Pointers<'_> {
    fn map_blocks(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        tx.map_by_pointers(inode, range, taking)
    }

    fn free_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<u64> {
        tx.unmap_pointers(inode, range)
    }
}

fn invalid_pointer_error(block: FsBlock, inode: InodeNumber) -> Error {
    Error::corrupt("block map: pointer").with_block(block).with_inode(inode)
}

/// Limit of map blocks preloaded before a free; the others are read on demand.
const MAX_PRELOADED_NODES: u32 = 32;

/// Visitor that collects the blocks to preload before a free.
struct MapPreloader {
    per_group: u64,
    nodes: u32,
    /// One block of each group.
    group_blocks: Vec<u64>,
}

impl MapVisitor for MapPreloader {
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn visit_run(&mut self, _: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if let BlockLocation::Mapped(FsBlock(first)) = place {
            let last = first.saturating_add(blocks.saturating_sub(1));
            for group in first / self.per_group..=last / self.per_group {
                if self.group_blocks.last().is_none_or(|last| last / self.per_group != group) {
                    self.group_blocks.push(first.max(group.saturating_mul(self.per_group)));
                }
            }
        }
        match self.nodes {
            MAX_PRELOADED_NODES.. => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    fn visit_node(&mut self, _: MapNode) -> bool {
        self.nodes = self.nodes.saturating_add(1);
        true
    }
}

/// Freed blocks, merged into contiguous runs.
#[derive(Default)]
struct FreeBatch {
    run: Option<(u64, u32)>,
    blocks: u64,
}

impl Transaction<'_> {
    fn pointer(&self, inode: InodeNumber, place: PointerLocation) -> Result<u32> {
        match place {
            PointerLocation::Inode(slot) => self.read_slot(inode, |it| it.pointer(slot)),
            PointerLocation::Block(block, nth) => {
                let bytes = self.block(block, self.map_role(inode)?)?;
                Ok(pointer_at(&bytes, nth))
            }
        }
    }

    /// Changes a pointer.
    pub(crate) fn set_pointer(
        &mut self,
        inode: InodeNumber,
        place: PointerLocation,
        to: FsBlock,
    ) -> Result<()> {
        let to = to.to_u32()?;
        match place {
            PointerLocation::Inode(slot) => self.change_slot(inode, |it| it.set_pointer(slot, to)),
            PointerLocation::Block(block, nth) => {
                self.modify_block(block, self.map_role(inode)?, |bytes| {
                    let _ = set_pointer_at(bytes, nth, to);
                })
            }
        }
    }

    fn check_pointer(&self, pointer: u32, inode: InodeNumber) -> Result<FsBlock> {
        let block = FsBlock(pointer.into());
        if self.volume.super_.is_valid_block(block) {
            return Ok(block);
        }
        Err(invalid_pointer_error(block, inode))
    }

    /// Walks the current map of an inode.
    pub(crate) fn walk(
        &self,
        inode: InodeNumber,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()> {
        let node = match self.volume.inodes.peek(inode.0) {
            Some(node) => node,
            None => Arc::new(self.read_inode_unchecked(inode)?),
        };
        self.walk_inode(&node, range, visit)
    }

    fn walk_inode(
        &self,
        inode: &Inode,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()> {
        let super_ = &self.volume.super_;
        let map = super::map_of_any(inode)?;
        let role = map.role(inode.file_id());
        let read = |block: FsBlock| self.block(block, role).map(Some);
        let blocks = u64::from(super_.first_data_block) + 1..super_.blocks;
        let source = MapSource { block_bytes: super_.block_bytes, blocks, read: &read };
        map.walk(&source, range, visit)
    }

    /// Returns the device block of a file block, if it has one.
    pub(crate) fn lookup_block(&self, inode: InodeNumber, at: u32) -> Result<Option<FsBlock>> {
        struct FirstLocation(BlockLocation);
        impl MapVisitor for FirstLocation {
            fn visit_run(&mut self, _: u64, _: u64, place: BlockLocation) -> ControlFlow<()> {
                self.0 = place;
                ControlFlow::Break(())
            }
        }
        let mut first = FirstLocation(BlockLocation::Hole);
        self.walk(inode, at.into()..u64::from(at) + 1, &mut first)?;
        match first.0 {
            BlockLocation::Hole | BlockLocation::Unwritten(_) => Ok(None),
            BlockLocation::Mapped(block) => Ok(Some(block)),
            BlockLocation::Damaged(FsBlock(0)) => Err(Error::TooLarge),
            BlockLocation::Damaged(block) => Err(invalid_pointer_error(block, inode)),
        }
    }

    /// Returns the location of the pointer to file block `at`, which is mapped.
    #[allow(clippy::arithmetic_side_effects, reason = "a block holds pointers")]
    pub(crate) fn pointer_location(&self, inode: InodeNumber, at: u64) -> Result<PointerLocation> {
        struct Last(Option<FsBlock>);
        impl MapVisitor for Last {
            fn visit_run(&mut self, _: u64, _: u64, _: BlockLocation) -> ControlFlow<()> {
                ControlFlow::Break(())
            }
            fn visit_node(&mut self, node: MapNode) -> bool {
                self.0 = Some(node.block);
                true
            }
        }
        let fan_out = addresses_per_block(self.volume.super_.block_bytes);
        let IndirectPath { slot, offset, .. } =
            block_to_path(at, fan_out).ok_or(Error::TooLarge)?;
        let mut last = Last(None);
        self.walk(inode, at..at.saturating_add(1), &mut last)?;
        Ok(match last.0 {
            Some(block) => PointerLocation::Block(block, offset % fan_out),
            None => PointerLocation::Inode(slot),
        })
    }

    /// Returns the location of the pointer to file block `at`, and the number of pointers from
    /// there on; allocates missing indirect blocks above.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "a block holds pointers, and `below` ends at 1"
    )]
    fn resolve_pointers(
        &mut self,
        inode: InodeNumber,
        at: u32,
        goal: &mut u64,
        taking: AllocationPolicy,
    ) -> Result<(PointerLocation, u64)> {
        let fan_out = addresses_per_block(self.volume.super_.block_bytes);
        let Some(IndirectPath { slot, levels, mut offset }) = block_to_path(at.into(), fan_out)
        else {
            return Err(Error::TooLarge);
        };
        let mut place = PointerLocation::Inode(slot);
        if levels == 0 {
            return Ok((place, u64::from(DIRECT_POINTERS).saturating_sub(slot as u64)));
        }
        let mut below = fan_out.saturating_pow(levels);
        loop {
            let pointer = self.pointer(inode, place)?;
            let block = if pointer == 0 {
                let request = AllocationRequest {
                    goal: *goal,
                    count: 1,
                    append_inode: taking.is_append.then_some(inode.0),
                    privileged: taking.privileged,
                    is_for_extent_node: false,
                };
                let (start, _) = self.allocate_blocks(request)?;
                *goal = start.saturating_add(1);
                self.new_block(FsBlock(start), self.map_role(inode)?);
                self.set_pointer(inode, place, FsBlock(start))?;
                self.add_sectors(inode, 1)?;
                FsBlock(start)
            } else {
                self.check_pointer(pointer, inode)?
            };
            below /= fan_out;
            let nth = offset / below;
            offset %= below;
            place = PointerLocation::Block(block, nth);
            if below == 1 {
                return Ok((place, fan_out.saturating_sub(nth)));
            }
        }
    }

    /// Preloads the map blocks and bitmaps for freeing the blocks of a file in `range`.
    pub(crate) fn preload_map(&mut self, inode: &Inode, range: Range<u64>) -> Result<()> {
        let super_ = &self.volume.super_;
        if !inode.has_map(super_) {
            return Ok(());
        }
        let end = inode.size_bytes.div_ceil(super_.block_bytes.into()).min(range.end);
        let per_group = u64::from(super_.blocks_per_group);
        let mut look = MapPreloader { per_group, nodes: 0, group_blocks: vec![] };
        self.walk_inode(inode, range.start..end, &mut look)?;
        for block in look.group_blocks {
            self.preload_bitmap_of_block(block)?;
        }
        Ok(())
    }

    /// Returns the blocks of a file in `range`, allocating missing ones; see
    /// [`MapEditor::map_blocks`].
    pub(crate) fn map_blocks(
        &mut self,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        if !self.writer.is_modified {
            self.ensure_entries_of(inode)?;
        }
        let node = self.read_inode_unchecked(inode)?;
        self.check_map_supports_clusters(&node)?;
        super::map_of(&node)?.editor().map_blocks(self, inode, range, taking)
    }

    /// Refuses pointer maps on a volume with clusters: pointers cannot share a cluster.
    fn check_map_supports_clusters(&self, node: &Inode) -> Result<()> {
        let has_pointers = !node.has_extents() && node.pointers.iter().any(|it| *it != 0);
        if self.cluster_blocks() > 1 && has_pointers {
            let what = "inode: a map of blocks on a volume with clusters";
            return Err(Error::corrupt(what).with_inode(node.number));
        }
        Ok(())
    }

    /// Frees the blocks of a file in `range`; see [`MapEditor::free_range`].
    pub(crate) fn unmap(&mut self, inode: InodeNumber, range: Range<u32>) -> Result<()> {
        let node = self.read_inode_unchecked(inode)?;
        self.check_map_supports_clusters(&node)?;
        let freed = super::map_of_any(&node)?.editor().free_range(self, inode, range.clone())?;
        if freed > 0 {
            self.subtract_sectors(inode, freed)?;
        }
        // Part of a cluster may be unmapped without a free.
        if freed > 0 || self.cluster_blocks() > 1 {
            self.invalidate_map(inode, range.start, range.end);
        }
        Ok(())
    }

    /// [`MapEditor::map_blocks`] of pointer maps.
    pub(super) fn map_by_pointers(
        &mut self,
        inode: InodeNumber,
        Range { start: from, end }: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        let mut all: Vec<MappedRun> = Vec::new();
        let mut goal = self.allocation_goal(inode, from)?;
        let mut at = from;
        while at < end {
            let leaf = match self.resolve_pointers(inode, at, &mut goal, taking) {
                Err(Error::NoSpace) if !all.is_empty() => break,
                leaf => leaf?,
            };
            let (place, room) = leaf;
            let count = saturating_u32(room).min(end.saturating_sub(at));
            match self.map_in_leaf(inode, place, (at, count), &mut goal, taking, &mut all) {
                Err(Error::NoSpace) if !all.is_empty() => break,
                done => done?,
            }
            at = at.saturating_add(count);
        }
        let taken: u32 = all.iter().filter(|run| run.is_new).map(|run| run.blocks).sum();
        if taken > 0 {
            self.add_sectors(inode, taken.into())?;
            self.invalidate_map(inode, from, end);
        }
        Ok(all)
    }

    /// [`Transaction::map_blocks`] within one leaf: `count` pointers from `place` on.
    fn map_in_leaf(
        &mut self,
        inode: InodeNumber,
        place: PointerLocation,
        (at, count): (u32, u32),
        goal: &mut u64,
        taking: AllocationPolicy,
        all: &mut Vec<MappedRun>,
    ) -> Result<()> {
        let pointers = self.read_pointers(inode, place, count)?;
        let mut nth = 0;
        while nth < count {
            let pointer = pointers.get(saturating_usize(nth.into())).copied().unwrap_or(0);
            let rest = pointers.get(saturating_usize(nth.into())..).unwrap_or_default();
            if pointer != 0 {
                self.check_pointer(pointer, inode)?;
                let follow = rest.iter().zip(pointer..).take_while(|(a, b)| **a == *b).count();
                let blocks = saturating_u32(follow as u64);
                let last =
                    FsBlock(u64::from(pointer).saturating_add(blocks.into()).saturating_sub(1));
                if !self.volume.super_.is_valid_block(last) {
                    return Err(invalid_pointer_error(last, inode));
                }
                all.push(MappedRun {
                    from: at.saturating_add(nth),
                    blocks,
                    at: FsBlock(pointer.into()),
                    is_new: false,
                });
                *goal = u64::from(pointer).saturating_add(blocks.into());
                nth = nth.saturating_add(blocks);
                continue;
            }
            let want =
                saturating_u32(rest.iter().take_while(|pointer| **pointer == 0).count() as u64);
            let (start, blocks) = self.allocate_blocks(AllocationRequest {
                goal: *goal,
                count: want,
                append_inode: taking.is_append.then_some(inode.0),
                privileged: taking.privileged,
                is_for_extent_node: false,
            })?;
            self.write_pointers(inode, place, nth, FsBlock(start).to_u32()?, blocks)?;
            *goal = start.saturating_add(blocks.into());
            let run = MappedRun {
                from: at.saturating_add(nth),
                blocks,
                at: FsBlock(start),
                is_new: true,
            };
            all.push(run);
            nth = nth.saturating_add(blocks);
        }
        Ok(())
    }

    fn read_pointers(
        &self,
        inode: InodeNumber,
        place: PointerLocation,
        count: u32,
    ) -> Result<Vec<u32>> {
        match place {
            PointerLocation::Inode(slot) => self.read_slot(inode, |it| {
                (slot..slot.saturating_add(saturating_usize(count.into())))
                    .map(|nth| it.pointer(nth))
                    .collect()
            }),
            PointerLocation::Block(block, nth) => {
                let bytes = self.block(block, self.map_role(inode)?)?;
                let behind = pointers(&bytes).skip(saturating_usize(nth));
                Ok(behind.take(saturating_usize(count.into())).collect())
            }
        }
    }

    fn write_pointers(
        &mut self,
        inode: InodeNumber,
        place: PointerLocation,
        skip: u32,
        first: u32,
        count: u32,
    ) -> Result<()> {
        match place {
            PointerLocation::Inode(slot) => self.change_slot(inode, |it| {
                for nth in 0..count {
                    it.set_pointer(
                        slot.saturating_add(saturating_usize(skip.saturating_add(nth).into())),
                        first.saturating_add(nth),
                    );
                }
            }),
            PointerLocation::Block(block, at) => {
                self.modify_block(block, self.map_role(inode)?, |bytes| {
                    for nth in 0..count {
                        let nth_there = at.saturating_add(skip.into()).saturating_add(nth.into());
                        let _ = set_pointer_at(bytes, nth_there, first.saturating_add(nth));
                    }
                })
            }
        }
    }

    /// Returns the best device block for file block `at`: after the previous file block, or else in
    /// the inode's group.
    fn allocation_goal(&self, inode: InodeNumber, at: u32) -> Result<u64> {
        if let Some(before) = at.checked_sub(1)
            && let Some(block) = self.lookup_block(inode, before)?
        {
            return Ok(block.0.saturating_add(1));
        }
        let first = self.read_slot(inode, |it| it.pointer(0))?;
        if first != 0 && at > 0 {
            return Ok(u64::from(first).saturating_add(at.into()));
        }
        let (group, _) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        Ok(self.volume.super_.group_start(crate::GroupNumber(group)).0)
    }

    /// [`MapEditor::free_range`] of pointer maps.
    ///
    /// Not a visitor of the walk in `pointers`: a visitor is called while the map is read and has
    /// no transaction, so it could only collect all runs and nodes, in memory as large as the map,
    /// before the first is freed. This walk changes the tree on its way: it frees what is below a
    /// block, then the block, whose parent is written once. Freed runs, and with them revokes, are
    /// in this order.
    pub(super) fn unmap_pointers(
        &mut self,
        inode: InodeNumber,
        Range { start: from, end }: Range<u32>,
    ) -> Result<u64> {
        let fan_out = addresses_per_block(self.volume.super_.block_bytes);
        let mut freeing = FreeBatch::default();
        for slot in from..end.min(DIRECT_POINTERS) {
            let slot = saturating_usize(slot.into());
            let pointer = self.read_slot(inode, |it| it.pointer(slot))?;
            if pointer != 0 {
                self.change_slot(inode, |it| it.set_pointer(slot, 0))?;
                self.free_pointer(&mut freeing, pointer)?;
            }
        }
        let mut start = u64::from(DIRECT_POINTERS);
        for levels in 1..=3u32 {
            let reach = fan_out.saturating_pow(levels);
            let low = u64::from(from).max(start).saturating_sub(start);
            let high = u64::from(end).min(start.saturating_add(reach)).saturating_sub(start);
            start = start.saturating_add(reach);
            if low >= high {
                continue;
            }
            let slot = saturating_usize(u64::from(
                DIRECT_POINTERS.saturating_add(levels).saturating_sub(1),
            ));
            let pointer = self.read_slot(inode, |it| it.pointer(slot))?;
            if pointer == 0 {
                continue;
            }
            let block = self.check_pointer(pointer, inode)?;
            if self.clear_tree(inode, block, levels, (low, high), &mut freeing)? {
                self.change_slot(inode, |it| it.set_pointer(slot, 0))?;
                self.free_pointer(&mut freeing, pointer)?;
            }
        }
        let freed = freeing.blocks;
        self.finish_free_batch(freeing)?;
        Ok(freed)
    }

    /// Clears the pointers from `low` to `high` below an indirect block; returns true if none is
    /// left.
    #[allow(clippy::arithmetic_side_effects, reason = "a block holds pointers")]
    fn clear_tree(
        &mut self,
        inode: InodeNumber,
        block: FsBlock,
        levels: u32,
        (low, high): (u64, u64),
        freeing: &mut FreeBatch,
    ) -> Result<bool> {
        let fan_out = addresses_per_block(self.volume.super_.block_bytes);
        let below = fan_out.saturating_pow(levels.saturating_sub(1));
        let bytes =
            self.block(block, self.map_role(inode)?).map_err(|error| error.with_inode(inode))?;
        let whole = low == 0 && high >= below.saturating_mul(fan_out);
        let mut cleared = Vec::new();
        for nth in low / below..high.div_ceil(below).min(fan_out) {
            let pointer = pointer_at(&bytes, nth);
            if pointer == 0 {
                continue;
            }
            let start = nth.saturating_mul(below);
            let empty = levels == 1 || {
                let child = self.check_pointer(pointer, inode)?;
                let part = (low.saturating_sub(start), high.saturating_sub(start).min(below));
                self.clear_tree(inode, child, levels.saturating_sub(1), part, freeing)?
            };
            if empty {
                self.free_pointer(freeing, pointer)?;
                cleared.push(nth);
            }
        }
        if whole {
            return Ok(true);
        }
        if cleared.is_empty() {
            return Ok(false);
        }
        self.modify_block(block, self.map_role(inode)?, |bytes| {
            for nth in cleared {
                let _ = set_pointer_at(bytes, nth, 0);
            }
            bytes.iter().all(|byte| *byte == 0)
        })
    }

    fn free_pointer(&mut self, freeing: &mut FreeBatch, pointer: u32) -> Result<()> {
        let block = u64::from(pointer);
        freeing.blocks = freeing.blocks.saturating_add(1);
        match &mut freeing.run {
            Some((start, count)) if start.saturating_add(u64::from(*count)) == block => {
                *count = count.saturating_add(1)
            }
            run => {
                if let Some((start, count)) = run.replace((block, 1)) {
                    self.free_blocks(start, count)?;
                }
            }
        }
        Ok(())
    }

    fn finish_free_batch(&mut self, freeing: FreeBatch) -> Result<()> {
        match freeing.run {
            Some((start, count)) => self.free_blocks(start, count).map(drop),
            None => Ok(()),
        }
    }

    /// Adds allocated blocks to the block count of an inode.
    pub(crate) fn add_sectors(&mut self, inode: InodeNumber, blocks: u64) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        self.change_slot(inode, |it| it.adjust_block_count(blocks, true, block_bytes))?;
        self.count_block_usage(inode, blocks, true)
    }

    /// Subtracts freed blocks from the block count of an inode.
    pub(crate) fn subtract_sectors(&mut self, inode: InodeNumber, blocks: u64) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        self.change_slot(inode, |it| it.adjust_block_count(blocks, false, block_bytes))?;
        self.count_block_usage(inode, blocks, false)
    }

    /// Invalidates the cached map segments of these blocks.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn invalidate_map(&self, inode: InodeNumber, from: u32, end: u32) {
        let size = self.volume.node(inode).map_or(0, |it| it.size_bytes);
        let last = saturating_u32(size / u64::from(self.volume.super_.block_bytes)).min(end);
        let (first, last) = (from / SEGMENT_BLOCKS, last.max(from) / SEGMENT_BLOCKS);
        self.volume.block_maps.remove_range(
            first.into()..u64::from(last) + 1,
            |segment| SegmentKey { inode: inode.0, segment: saturating_u32(segment) },
            |key| key.inode == inode.0 && (first..=last).contains(&key.segment),
        );
    }
}
