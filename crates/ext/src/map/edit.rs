//! Block maps, changed: blocks given to a file and taken away.
//!
//! Law 1: an indirect block is taken just before the first block that it leads to, so a file
//! written in one go lies on the device in the order in which it is read.
//! Law 2: whatever the pointers say, a walk ends: a block that is freed twice is damage.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with file blocks below 2^32 and places inside a block"
)]

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::alloc::Request;
use crate::format::inode::{DIRECT, Inode};
use crate::format::{le32, put32};
use crate::map::pointers::{Path, PointerAt, fan_out, path};
use crate::map::{Map, Node, Place, SEGMENT_BLOCKS, SegmentKey, Source, Visit};
use crate::transaction::Transaction;
use crate::units::{index, narrow};
use crate::{Error, FsBlock, InodeNumber, Result};

/// Blocks of a file that lie together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MappedRun {
    pub(crate) from: u32,
    pub(crate) blocks: u32,
    pub(crate) at: FsBlock,
    /// They were taken just now: nothing of the file is in them.
    pub(crate) fresh: bool,
}

/// How blocks are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taking {
    pub(crate) grows: bool,
    pub(crate) privileged: bool,
    /// Blocks that are taken read as zeros without being written; only extents can say so.
    pub(crate) unwritten: bool,
}

fn wrong_pointer(block: FsBlock, inode: InodeNumber) -> Error {
    Error::corrupt("block map: pointer").in_block(block).of_inode(inode)
}

/// Blocks of a map that are looked at before they are taken away; the rest is read when it is met.
const MOST_NODES: u32 = 32;

/// What of a map must be in memory to take it away.
struct Look {
    per_group: u64,
    nodes: u32,
    /// A block of each group.
    of_groups: Vec<u64>,
}

impl Visit for Look {
    fn run(&mut self, _: u64, blocks: u64, place: Place) -> ControlFlow<()> {
        if let Place::At(FsBlock(first)) = place {
            let last = first + blocks.saturating_sub(1);
            for group in first / self.per_group..=last / self.per_group {
                if self.of_groups.last().is_none_or(|last| last / self.per_group != group) {
                    self.of_groups.push(first.max(group * self.per_group));
                }
            }
        }
        match self.nodes {
            MOST_NODES.. => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    fn node(&mut self, _: Node) -> bool {
        self.nodes += 1;
        true
    }
}

/// Frees blocks in runs as long as they come.
#[derive(Default)]
struct Freeing {
    run: Option<(u64, u32)>,
    blocks: u64,
}

impl Transaction<'_> {
    fn pointer(&self, inode: InodeNumber, place: PointerAt) -> Result<u32> {
        match place {
            PointerAt::Inode(slot) => self.read_slot(inode, |it| it.pointer(slot)),
            PointerAt::Block(block, nth) => {
                let bytes = self.block(block, self.map_role(inode)?)?;
                Ok(le32(&bytes, index(nth) * 4).unwrap_or(0))
            }
        }
    }

    /// Lets a pointer lead elsewhere.
    pub(crate) fn set_pointer(
        &mut self,
        inode: InodeNumber,
        place: PointerAt,
        to: FsBlock,
    ) -> Result<()> {
        let to = to.in_32_bits()?;
        match place {
            PointerAt::Inode(slot) => self.change_slot(inode, |it| it.set_pointer(slot, to)),
            PointerAt::Block(block, nth) => self.change(block, self.map_role(inode)?, |bytes| {
                put32(bytes, index(nth) * 4, to);
            }),
        }
    }

    fn sane(&self, pointer: u32, inode: InodeNumber) -> Result<FsBlock> {
        let block = FsBlock(pointer.into());
        if self.volume.super_.holds(block) {
            return Ok(block);
        }
        Err(wrong_pointer(block, inode))
    }

    /// Walks the map of an inode as it is now.
    pub(crate) fn walk(
        &self,
        inode: InodeNumber,
        range: Range<u64>,
        visit: &mut dyn Visit,
    ) -> Result<()> {
        let node = match self.volume.inodes.peek(inode.0) {
            Some(node) => node,
            None => Arc::new(self.peek(inode)?),
        };
        self.walk_of(&node, range, visit)
    }

    fn walk_of(&self, inode: &Inode, range: Range<u64>, visit: &mut dyn Visit) -> Result<()> {
        let super_ = &self.volume.super_;
        let map = super::of_any(inode)?;
        let role = map.role(inode.id());
        let read = |block: FsBlock| self.block(block, role).map(Some);
        let blocks = u64::from(super_.first_data_block) + 1..super_.blocks;
        let source = Source { block_bytes: super_.block_bytes, blocks, read: &read };
        map.walk(&source, range, visit)
    }

    /// The device block of a file block, if it has one.
    pub(crate) fn mapped(&self, inode: InodeNumber, at: u32) -> Result<Option<FsBlock>> {
        struct First(Place);
        impl Visit for First {
            fn run(&mut self, _: u64, _: u64, place: Place) -> ControlFlow<()> {
                self.0 = place;
                ControlFlow::Break(())
            }
        }
        let mut first = First(Place::Hole);
        self.walk(inode, at.into()..u64::from(at) + 1, &mut first)?;
        match first.0 {
            Place::Hole | Place::Unwritten(_) => Ok(None),
            Place::At(block) => Ok(Some(block)),
            Place::Damaged(FsBlock(0)) => Err(Error::TooLarge),
            Place::Damaged(block) => Err(wrong_pointer(block, inode)),
        }
    }

    /// Where the pointer to file block `at` stands, which has a block.
    pub(crate) fn pointer_of(&self, inode: InodeNumber, at: u64) -> Result<PointerAt> {
        struct Last(Option<FsBlock>);
        impl Visit for Last {
            fn run(&mut self, _: u64, _: u64, _: Place) -> ControlFlow<()> {
                ControlFlow::Break(())
            }
            fn node(&mut self, node: Node) -> bool {
                self.0 = Some(node.block);
                true
            }
        }
        let fan_out = fan_out(self.volume.super_.block_bytes);
        let Path { slot, offset, .. } = path(at, fan_out).ok_or(Error::TooLarge)?;
        let mut last = Last(None);
        self.walk(inode, at..at + 1, &mut last)?;
        Ok(match last.0 {
            Some(block) => PointerAt::Block(block, offset % fan_out),
            None => PointerAt::Inode(slot),
        })
    }

    /// Where the pointers from file block `at` on stand, and how many stand together; the
    /// indirect blocks above are made if they are not there.
    fn leaf(
        &mut self,
        inode: InodeNumber,
        at: u32,
        goal: &mut u64,
        taking: Taking,
    ) -> Result<(PointerAt, u64)> {
        let fan_out = fan_out(self.volume.super_.block_bytes);
        let Some(Path { slot, levels, mut offset }) = path(at.into(), fan_out) else {
            return Err(Error::TooLarge);
        };
        let mut place = PointerAt::Inode(slot);
        if levels == 0 {
            return Ok((place, u64::from(DIRECT) - slot as u64));
        }
        let mut below = fan_out.saturating_pow(levels);
        loop {
            let pointer = self.pointer(inode, place)?;
            let block = if pointer == 0 {
                let request = Request {
                    goal: *goal,
                    want: 1,
                    grows: taking.grows.then_some(inode.0),
                    privileged: taking.privileged,
                    of_tree: false,
                };
                let (start, _) = self.allocate_blocks(request)?;
                *goal = start + 1;
                self.fresh(FsBlock(start), self.map_role(inode)?);
                self.set_pointer(inode, place, FsBlock(start))?;
                self.count_sectors(inode, 1)?;
                FsBlock(start)
            } else {
                self.sane(pointer, inode)?
            };
            below /= fan_out;
            let nth = offset / below;
            offset %= below;
            place = PointerAt::Block(block, nth);
            if below == 1 {
                return Ok((place, fan_out - nth));
            }
        }
    }

    /// Sees to it that the blocks of a file from `from` on can be taken away without the
    /// device: what leads to them, and the bitmaps that they are marked in.
    pub(crate) fn have_map(&mut self, inode: &Inode, from: u64) -> Result<()> {
        let super_ = &self.volume.super_;
        if !inode.has_map(super_) {
            return Ok(());
        }
        let end = inode.size_bytes.div_ceil(super_.block_bytes.into());
        let per_group = u64::from(super_.blocks_per_group);
        let mut look = Look { per_group, nodes: 0, of_groups: vec![] };
        self.walk_of(inode, from..end, &mut look)?;
        for block in look.of_groups {
            self.have_bitmap_of(block)?;
        }
        Ok(())
    }

    /// The blocks of a file in `range`, taken where there are none; see [`Map::map_blocks`].
    pub(crate) fn map_blocks(
        &mut self,
        inode: InodeNumber,
        range: Range<u32>,
        taking: Taking,
    ) -> Result<Vec<MappedRun>> {
        if !self.writer.touched {
            self.have_entries_of(inode)?;
        }
        let node = self.peek(inode)?;
        self.has_map_of_clusters(&node)?;
        super::of(&node)?.map_blocks(self, inode, range, taking)
    }

    /// Refuses a map of pointers where there are clusters: pointers cannot share one.
    fn has_map_of_clusters(&self, node: &Inode) -> Result<()> {
        let has_pointers = !node.has_extents() && node.pointers.iter().any(|it| *it != 0);
        if self.cluster_blocks() > 1 && has_pointers {
            let what = "inode: a map of blocks on a volume with clusters";
            return Err(Error::corrupt(what).of_inode(node.number));
        }
        Ok(())
    }

    /// Takes the blocks of a file in `range` away; see [`Map::unmap`].
    pub(crate) fn unmap(&mut self, inode: InodeNumber, range: Range<u32>) -> Result<()> {
        let node = self.peek(inode)?;
        self.has_map_of_clusters(&node)?;
        let freed = super::of_any(&node)?.unmap(self, inode, range.clone())?;
        if freed > 0 {
            self.uncount_sectors(inode, freed)?;
        }
        // A part of a cluster goes without anything that is freed.
        if freed > 0 || self.cluster_blocks() > 1 {
            self.forget_map(inode, range.start, range.end);
        }
        Ok(())
    }

    /// [`Map::map_blocks`] of pointers.
    pub(super) fn map_by_pointers(
        &mut self,
        inode: InodeNumber,
        Range { start: from, end }: Range<u32>,
        taking: Taking,
    ) -> Result<Vec<MappedRun>> {
        let mut all: Vec<MappedRun> = Vec::new();
        let mut goal = self.goal(inode, from)?;
        let mut at = from;
        while at < end {
            let leaf = match self.leaf(inode, at, &mut goal, taking) {
                Err(Error::NoSpace) if !all.is_empty() => break,
                leaf => leaf?,
            };
            let (place, room) = leaf;
            let count = narrow(room).min(end - at);
            match self.map_in_leaf(inode, place, (at, count), &mut goal, taking, &mut all) {
                Err(Error::NoSpace) if !all.is_empty() => break,
                done => done?,
            }
            at += count;
        }
        let taken: u32 = all.iter().filter(|run| run.fresh).map(|run| run.blocks).sum();
        if taken > 0 {
            self.count_sectors(inode, taken.into())?;
            self.forget_map(inode, from, end);
        }
        Ok(all)
    }

    /// [`Transaction::map_blocks`] within one leaf: `count` pointers from `place` on.
    fn map_in_leaf(
        &mut self,
        inode: InodeNumber,
        place: PointerAt,
        (at, count): (u32, u32),
        goal: &mut u64,
        taking: Taking,
        all: &mut Vec<MappedRun>,
    ) -> Result<()> {
        let pointers = self.pointers(inode, place, count)?;
        let mut nth = 0;
        while nth < count {
            let pointer = pointers.get(index(nth.into())).copied().unwrap_or(0);
            let rest = pointers.get(index(nth.into())..).unwrap_or_default();
            if pointer != 0 {
                self.sane(pointer, inode)?;
                let follow = rest.iter().zip(pointer..).take_while(|(a, b)| **a == *b).count();
                let blocks = narrow(follow as u64);
                let last = FsBlock(u64::from(pointer) + u64::from(blocks) - 1);
                if !self.volume.super_.holds(last) {
                    return Err(wrong_pointer(last, inode));
                }
                all.push(MappedRun {
                    from: at + nth,
                    blocks,
                    at: FsBlock(pointer.into()),
                    fresh: false,
                });
                *goal = u64::from(pointer) + u64::from(blocks);
                nth += blocks;
                continue;
            }
            let want = narrow(rest.iter().take_while(|pointer| **pointer == 0).count() as u64);
            let (start, blocks) = self.allocate_blocks(Request {
                goal: *goal,
                want,
                grows: taking.grows.then_some(inode.0),
                privileged: taking.privileged,
                of_tree: false,
            })?;
            self.put_pointers(inode, place, nth, FsBlock(start).in_32_bits()?, blocks)?;
            *goal = start + u64::from(blocks);
            let run = MappedRun { from: at + nth, blocks, at: FsBlock(start), fresh: true };
            all.push(run);
            nth += blocks;
        }
        Ok(())
    }

    fn pointers(&self, inode: InodeNumber, place: PointerAt, count: u32) -> Result<Vec<u32>> {
        match place {
            PointerAt::Inode(slot) => self.read_slot(inode, |it| {
                (slot..slot + index(count.into())).map(|nth| it.pointer(nth)).collect()
            }),
            PointerAt::Block(block, nth) => {
                let bytes = self.block(block, self.map_role(inode)?)?;
                let places = index(nth)..index(nth) + index(count.into());
                Ok(places.map(|nth| le32(&bytes, nth * 4).unwrap_or(0)).collect())
            }
        }
    }

    fn put_pointers(
        &mut self,
        inode: InodeNumber,
        place: PointerAt,
        skip: u32,
        first: u32,
        count: u32,
    ) -> Result<()> {
        match place {
            PointerAt::Inode(slot) => self.change_slot(inode, |it| {
                for nth in 0..count {
                    it.set_pointer(slot + index((skip + nth).into()), first + nth);
                }
            }),
            PointerAt::Block(block, at) => self.change(block, self.map_role(inode)?, |bytes| {
                for nth in 0..count {
                    put32(bytes, index(at + u64::from(skip + nth)) * 4, first + nth);
                }
            }),
        }
    }

    /// The best place for file block `at`: behind the one before it, or else in the inode's
    /// group.
    fn goal(&self, inode: InodeNumber, at: u32) -> Result<u64> {
        if let Some(before) = at.checked_sub(1)
            && let Some(block) = self.mapped(inode, before)?
        {
            return Ok(block.0 + 1);
        }
        let first = self.read_slot(inode, |it| it.pointer(0))?;
        if first != 0 && at > 0 {
            return Ok(u64::from(first) + u64::from(at));
        }
        let (group, _) = self.writer.groups.place_of_inode(inode).ok_or(Error::NotFound)?;
        Ok(self.volume.super_.group_start(crate::GroupNumber(group)).0)
    }

    /// [`Map::unmap`] of pointers.
    pub(super) fn unmap_pointers(
        &mut self,
        inode: InodeNumber,
        Range { start: from, end }: Range<u32>,
    ) -> Result<u64> {
        let fan_out = fan_out(self.volume.super_.block_bytes);
        let mut freeing = Freeing::default();
        for slot in from..end.min(DIRECT) {
            let slot = index(slot.into());
            let pointer = self.read_slot(inode, |it| it.pointer(slot))?;
            if pointer != 0 {
                self.change_slot(inode, |it| it.set_pointer(slot, 0))?;
                self.free(&mut freeing, pointer)?;
            }
        }
        let mut start = u64::from(DIRECT);
        for levels in 1..=3u32 {
            let reach = fan_out.saturating_pow(levels);
            let low = u64::from(from).max(start) - start;
            let high = u64::from(end).min(start + reach).saturating_sub(start);
            start += reach;
            if low >= high {
                continue;
            }
            let slot = index(u64::from(DIRECT + levels - 1));
            let pointer = self.read_slot(inode, |it| it.pointer(slot))?;
            if pointer == 0 {
                continue;
            }
            let block = self.sane(pointer, inode)?;
            if self.clear_tree(inode, block, levels, (low, high), &mut freeing)? {
                self.change_slot(inode, |it| it.set_pointer(slot, 0))?;
                self.free(&mut freeing, pointer)?;
            }
        }
        let freed = freeing.blocks;
        self.finish(freeing)?;
        Ok(freed)
    }

    /// Clears the pointers from `low` up to `high` below an indirect block; says whether
    /// none is left.
    fn clear_tree(
        &mut self,
        inode: InodeNumber,
        block: FsBlock,
        levels: u32,
        (low, high): (u64, u64),
        freeing: &mut Freeing,
    ) -> Result<bool> {
        let fan_out = fan_out(self.volume.super_.block_bytes);
        let below = fan_out.saturating_pow(levels - 1);
        let bytes =
            self.block(block, self.map_role(inode)?).map_err(|error| error.of_inode(inode))?;
        let whole = low == 0 && high >= below * fan_out;
        let mut cleared = Vec::new();
        for nth in low / below..high.div_ceil(below).min(fan_out) {
            let pointer = le32(&bytes, index(nth) * 4).unwrap_or(0);
            if pointer == 0 {
                continue;
            }
            let start = nth * below;
            let empty = levels == 1 || {
                let child = self.sane(pointer, inode)?;
                let part = (low.saturating_sub(start), (high - start).min(below));
                self.clear_tree(inode, child, levels - 1, part, freeing)?
            };
            if empty {
                self.free(freeing, pointer)?;
                cleared.push(nth);
            }
        }
        if whole {
            return Ok(true);
        }
        if cleared.is_empty() {
            return Ok(false);
        }
        self.change(block, self.map_role(inode)?, |bytes| {
            for nth in cleared {
                put32(bytes, index(nth) * 4, 0);
            }
            bytes.iter().all(|byte| *byte == 0)
        })
    }

    fn free(&mut self, freeing: &mut Freeing, pointer: u32) -> Result<()> {
        let block = u64::from(pointer);
        freeing.blocks += 1;
        match &mut freeing.run {
            Some((start, count)) if *start + u64::from(*count) == block => *count += 1,
            run => {
                if let Some((start, count)) = run.replace((block, 1)) {
                    self.free_blocks(start, count)?;
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self, freeing: Freeing) -> Result<()> {
        match freeing.run {
            Some((start, count)) => self.free_blocks(start, count).map(drop),
            None => Ok(()),
        }
    }

    /// Counts blocks that an inode was given.
    pub(crate) fn count_sectors(&mut self, inode: InodeNumber, blocks: u64) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        self.change_slot(inode, |it| it.count_blocks(blocks, true, block_bytes))?;
        self.count_usage_of_blocks(inode, blocks, true)
    }

    /// Counts blocks that were taken from an inode.
    pub(crate) fn uncount_sectors(&mut self, inode: InodeNumber, blocks: u64) -> Result<()> {
        let block_bytes = self.volume.super_.block_bytes;
        self.change_slot(inode, |it| it.count_blocks(blocks, false, block_bytes))?;
        self.count_usage_of_blocks(inode, blocks, false)
    }

    /// Forgets what the block-map cache says of these blocks.
    pub(crate) fn forget_map(&self, inode: InodeNumber, from: u32, end: u32) {
        let size = self.volume.node(inode).map_or(0, |it| it.size_bytes);
        let last = narrow(size / u64::from(self.volume.super_.block_bytes)).min(end);
        let (first, last) = (from / SEGMENT_BLOCKS, last.max(from) / SEGMENT_BLOCKS);
        self.volume.maps.forget_row(
            first.into()..u64::from(last) + 1,
            |segment| SegmentKey { inode: inode.0, segment: narrow(segment) },
            |key| key.inode == inode.0 && (first..=last).contains(&key.segment),
        );
    }
}
