//! Maps of files: blocks beyond the end are given others, and the map leads there.
//!
//! Law: a map of pointers keeps its shape, each block that changes is changed or moved; a tree of
//! extents is built anew, in the blocks of its old nodes as far as they stay.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with file blocks below 2^32 and blocks of a volume, far below 2^64"
)]

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::Rework;
use crate::blocks::data::Data;
use crate::blocks::role::Role;
use crate::format::extent::{Extent, MOST_BLOCKS};
use crate::format::inode::{Inode, POINTERS, flags};
use crate::format::slot::Slot;
use crate::format::{le32, put32};
use crate::map::pointers::{pointer_at, reach_blocks};
use crate::map::{self, Map, Node, Place, Source, Visit, build_extents};
use crate::units::{index, narrow};
use crate::whole::{Error, Result};
use crate::{FileId, FsBlock, InodeNumber};

/// Blocks of a file that lie together, before and after.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The first block of the file.
    pub(super) from: u32,
    pub(super) blocks: u32,
    pub(super) old: u64,
    pub(super) new: u64,
    pub(super) is_unwritten: bool,
}

/// What a walk finds.
struct Found {
    runs: Vec<Extent>,
    nodes: Vec<u64>,
    budget: u64,
    wrong: Option<FsBlock>,
}

impl Visit for Found {
    fn run(&mut self, at: u64, blocks: u64, place: Place) -> ControlFlow<()> {
        let (start, is_unwritten) = match place {
            Place::Hole => return ControlFlow::Continue(()),
            Place::At(start) => (start, false),
            Place::Unwritten(start) => (start, true),
            Place::Damaged(block) => {
                self.wrong = Some(block);
                return ControlFlow::Break(());
            }
        };
        let (Some(budget), Ok(from)) = (self.budget.checked_sub(blocks), u32::try_from(at)) else {
            self.wrong = Some(start);
            return ControlFlow::Break(());
        };
        self.budget = budget;
        self.runs.push(Extent { from, blocks: narrow(blocks), start, is_unwritten });
        ControlFlow::Continue(())
    }

    fn node(&mut self, node: Node) -> bool {
        if self.wrong.is_some() {
            return false;
        }
        let Some(budget) = self.budget.checked_sub(1) else {
            self.wrong = Some(node.block);
            return false;
        };
        self.budget = budget;
        self.nodes.push(node.block.0);
        true
    }
}

impl Rework<'_> {
    /// Moves what of a file lies beyond the end, and changes its map in `slot`; `to` is the number
    /// that its inode is to have.
    pub(super) fn map(&mut self, node: &Inode, to: InodeNumber, slot: &mut [u8]) -> Result<()> {
        let found = self.walk(node)?;
        let end = self.space.end();
        let moves = found.runs.iter().any(|run| run.start.0 + u64::from(run.blocks) > end)
            || found.nodes.iter().any(|node| *node >= end);
        let file = FileId { inode: to.0, generation: node.generation() };
        let is_sealed_anew = to != node.number || self.reseals;
        let mut pieces = if moves { self.pieces(&found.runs)? } else { kept(&found.runs) };
        let listed = self.contents(node, file, &pieces)?;
        let mut slot = Slot::of(slot)?;
        let more = listed.as_ref().map_or(0, |more| more.len() as u64);
        if let Some(listed) = listed {
            slot.set_flags(slot.flags() & !flags::INDEX);
            pieces.extend(listed);
        }
        if more > 0 {
            let block_bytes = self.to_be.super_.block_bytes;
            slot.set_size(node.size_bytes + more * u64::from(block_bytes));
            slot.count_blocks(more, true, block_bytes);
            let (uid, gid) = node.owner();
            let usage = self.usage.entry([uid, gid, node.project()]).or_default();
            *usage += i64::try_from(more).unwrap_or(0);
        }
        if node.has_extents() {
            if !moves && more == 0 && (!is_sealed_anew || found.nodes.is_empty()) {
                return Ok(());
            }
            let pointers = self.tree(node, file, &pieces, &found.nodes, &mut slot)?;
            slot.set_pointers(pointers);
        } else if moves {
            let moved = pieces.iter().filter(|piece| piece.old != piece.new);
            let moved = moved.map(|piece| (piece.old, (piece.blocks, piece.new))).collect();
            let pointers = self.pointers(node.pointers, &moved)?;
            slot.set_pointers(pointers);
        }
        Ok(())
    }

    /// Frees all blocks of a file; how many its contents had.
    pub(crate) fn free_file(&mut self, node: &Inode) -> Result<u64> {
        let found = self.walk(node)?;
        let mut blocks = 0;
        for run in found.runs {
            blocks += u64::from(run.blocks);
            self.space.release(run.start.0..run.start.0 + u64::from(run.blocks));
        }
        for node in found.nodes {
            self.space.release(node..node + 1);
        }
        Ok(blocks)
    }

    fn walk(&mut self, node: &Inode) -> Result<Found> {
        let damaged =
            |block| crate::Error::corrupt("block map").of_inode(node.number).in_block(block);
        let map = map::of_any(node)?;
        let super_ = &self.old.super_;
        let role = map.role(node.id());
        let read = |block: FsBlock| -> crate::Result<Option<Data>> {
            let bytes = self.redo.on_disk(block, 1)?;
            if let Some(sums) = &self.verifying {
                sums.verify(role, block, &bytes).map_err(|error| error.of_inode(node.number))?;
            }
            Ok(Some(Data::owned(bytes.into_boxed_slice())))
        };
        let blocks = u64::from(super_.first_data_block) + 1..super_.blocks;
        let source = Source { block_bytes: super_.block_bytes, blocks, read: &read };
        let mut found = Found { runs: vec![], nodes: vec![], budget: self.budget, wrong: None };
        let most = match node.has_extents() {
            true => 1 << 32,
            false => reach_blocks(super_.block_bytes).min(1 << 32),
        };
        map.walk(&source, 0..most, &mut found)?;
        if let Some(block) = found.wrong {
            return Err(damaged(block).into());
        }
        self.budget = found.budget;
        Ok(found)
    }

    /// Where the blocks of runs are to be: those beyond the end are given others.
    fn pieces(&mut self, runs: &[Extent]) -> Result<Vec<Piece>> {
        let end = self.space.end();
        let mut pieces = vec![];
        for run in runs {
            let (start, blocks) = (run.start.0, u64::from(run.blocks));
            let kept = end.saturating_sub(start).min(blocks);
            let mut put = |skip: u64, new: u64, count: u64| {
                pieces.push(Piece {
                    from: run.from + narrow(skip),
                    blocks: narrow(count),
                    old: start + skip,
                    new,
                    is_unwritten: run.is_unwritten,
                });
            };
            if kept > 0 {
                put(0, start, kept);
            }
            let mut at = kept;
            while at < blocks {
                let taken = self.space.take(blocks - at).ok_or(crate::Error::NoSpace)?;
                let count = taken.end - taken.start;
                put(at, taken.start, count);
                self.moved_blocks += count;
                at += count;
            }
        }
        Ok(pieces)
    }

    /// One free block.
    pub(crate) fn take_one(&mut self) -> Result<u64> {
        self.moved_blocks += 1;
        let taken = self.space.take(1).ok_or(crate::Error::NoSpace)?;
        Ok(taken.start)
    }

    /// Builds the tree of a file anew; what goes into the inode.
    fn tree(
        &mut self,
        node: &Inode,
        file: FileId,
        pieces: &[Piece],
        old_nodes: &[u64],
        slot: &mut Slot<'_>,
    ) -> Result<[u32; POINTERS]> {
        let block_bytes = self.to_be.super_.block_bytes;
        let extents = extents(pieces);
        let needed = build_extents::nodes(extents.len() as u64, block_bytes);
        let end = self.space.end();
        let mut places: Vec<u64> = old_nodes.iter().copied().filter(|node| *node < end).collect();
        let in_place = places.len();
        while (places.len() as u64) < needed {
            let block = self.take_one()?;
            places.push(block);
        }
        let surplus = places.split_off(index(needed).min(places.len()));
        for block in surplus {
            self.space.release(block..block + 1);
        }
        let tree = build_extents::tree(&extents, block_bytes, &mut places.iter().copied());
        let (pointers, nodes) = tree.ok_or(crate::Error::NoSpace)?;
        for (nth, (at, bytes)) in nodes.into_iter().enumerate() {
            let old = if nth < in_place { at } else { 0 };
            self.write(Role::Extents(file), old, at, bytes, &[])?;
        }
        // Each has a cluster of its own.
        let ratio = u64::from(self.to_be.super_.cluster_blocks);
        let (had, has) = (old_nodes.len() as u64 * ratio, needed * ratio);
        if had != has {
            slot.count_blocks(had.abs_diff(has), has > had, block_bytes);
            let (uid, gid) = node.owner();
            let more = i64::try_from(has).unwrap_or(0) - i64::try_from(had).unwrap_or(0);
            // A value of an attribute counts by its length, for those who have it.
            if !node.is_value() {
                *self.usage.entry([uid, gid, node.project()]).or_default() += more;
            }
        }
        Ok(pointers)
    }

    /// The pointers of an inode as they are to be, and the blocks that they lead to.
    fn pointers(
        &mut self,
        pointers: [u32; POINTERS],
        moved: &BTreeMap<u64, (u32, u64)>,
    ) -> Result<[u32; POINTERS]> {
        let mut new = pointers;
        for (nth, pointer) in new.iter_mut().enumerate() {
            let levels = u32::try_from(nth.saturating_sub(11)).unwrap_or(0);
            if *pointer != 0 {
                *pointer = self.pointer(*pointer, levels, moved)?;
            }
        }
        Ok(new)
    }

    /// What a pointer is to be that has so many levels below it.
    fn pointer(
        &mut self,
        pointer: u32,
        levels: u32,
        moved: &BTreeMap<u64, (u32, u64)>,
    ) -> Result<u32> {
        let block = u64::from(pointer);
        if levels == 0 {
            let run = moved.range(..=block).next_back();
            let to = run.and_then(|(old, (blocks, new))| {
                let skip = block - old;
                (skip < u64::from(*blocks)).then_some(new + skip)
            });
            return Ok(FsBlock(to.unwrap_or(block)).in_32_bits()?);
        }
        let was = self.redo.on_disk(FsBlock(block), 1)?;
        let mut bytes = was.clone();
        for nth in 0..u64::from(self.old.super_.block_bytes / 4) {
            let below = pointer_at(&was, nth);
            if below != 0 {
                let to = self.pointer(below, levels - 1, moved)?;
                let _ = put32(&mut bytes, index(nth) * 4, to);
            }
        }
        let to = if block >= self.space.end() { self.take_one()? } else { block };
        let file = FileId { inode: 0, generation: 0 };
        self.write(Role::Map(file), block, to, bytes, &was)?;
        Ok(FsBlock(to).in_32_bits()?)
    }

    /// A block as it is, verified.
    pub(super) fn read(&self, role: Role, block: FsBlock) -> Result<Vec<u8>> {
        let bytes = self.redo.on_disk(block, 1)?;
        if let Some(sums) = &self.verifying {
            sums.verify(role, block, &bytes)?;
        }
        Ok(bytes)
    }

    /// Seals and writes a block: where it is new at once, in its old place by the log, if it is
    /// not what it was.
    pub(crate) fn write(
        &mut self,
        role: Role,
        old: u64,
        new: u64,
        bytes: Vec<u8>,
        was: &[u8],
    ) -> Result<()> {
        let mut data = Data::owned(bytes.into_boxed_slice());
        if let Some(sums) = &self.sealing {
            sums.seal(role, FsBlock(new), &mut data);
        }
        let bytes = data.to_vec();
        if old != new {
            self.redo.write_free(FsBlock(new), &bytes)?;
        } else if bytes != was {
            self.redo.put(FsBlock(new), bytes)?;
        }
        Ok(())
    }
}

/// Runs that stay where they are.
fn kept(runs: &[Extent]) -> Vec<Piece> {
    let piece = |run: &Extent| Piece {
        from: run.from,
        blocks: run.blocks,
        old: run.start.0,
        new: run.start.0,
        is_unwritten: run.is_unwritten,
    };
    runs.iter().map(piece).collect()
}

/// The extents of pieces: as few as there can be.
fn extents(pieces: &[Piece]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = vec![];
    for piece in pieces {
        let most = if piece.is_unwritten { MOST_BLOCKS - 1 } else { MOST_BLOCKS };
        let (mut from, mut start, mut blocks) = (piece.from, piece.new, piece.blocks);
        if let Some(last) = extents.last_mut()
            && last.is_unwritten == piece.is_unwritten
            && last.end() == u64::from(from)
            && last.start.0 + u64::from(last.blocks) == start
        {
            let more = blocks.min(most - last.blocks);
            last.blocks += more;
            (from, start, blocks) = (from + more, start + u64::from(more), blocks - more);
        }
        while blocks > 0 {
            let count = blocks.min(most);
            extents.push(Extent {
                from,
                blocks: count,
                start: FsBlock(start),
                is_unwritten: piece.is_unwritten,
            });
            (from, start, blocks) =
                (from.saturating_add(count), start + u64::from(count), blocks - count);
        }
    }
    extents
}

/// What is read of numbers in a list of blocks.
pub(super) fn number_at(bytes: &[u8], at: usize) -> Result<u32> {
    le32(bytes, at).ok_or(Error::Volume(crate::Error::corrupt("directory entry: record length")))
}
