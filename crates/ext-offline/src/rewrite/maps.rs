//! Block maps: blocks beyond the new end move, and the map follows.
//!
//! Law: an indirect map keeps its shape; changed blocks are rewritten or moved. An extent tree is
//! rebuilt, reusing the old node blocks that stay.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::VolumeRewrite;
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::format::extent::{Extent, INIT_MAX_LEN};
use crate::format::indirect::{addresses_per_block, pointer_at, set_pointer_at};
use crate::format::inode::{Inode, POINTERS, flags};
use crate::format::inode_slot::InodeSlot;
use crate::map::pointers::max_mapped_blocks;
use crate::map::{self, BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, build_extents};
use crate::offline::Result;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FileId, FsBlock, InodeNumber};

/// Adjacent blocks of a file, before and after the move.
#[derive(Clone, Copy, Debug)]
pub(super) struct MovedRun {
    /// First block in the file.
    pub(super) from: u32,
    pub(super) blocks: u32,
    pub(super) old: u64,
    pub(super) new: u64,
    pub(super) is_unwritten: bool,
}

/// Blocks found by a walk of the map.
struct FileMap {
    runs: Vec<Extent>,
    nodes: Vec<u64>,
    budget: u64,
    bad_block: Option<FsBlock>,
}

impl MapVisitor for FileMap {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        let (start, is_unwritten) = match place {
            BlockLocation::Hole => return ControlFlow::Continue(()),
            BlockLocation::Mapped(start) => (start, false),
            BlockLocation::Unwritten(start) => (start, true),
            BlockLocation::Damaged(block) => {
                self.bad_block = Some(block);
                return ControlFlow::Break(());
            }
        };
        let (Some(budget), Ok(from)) = (self.budget.checked_sub(blocks), u32::try_from(at)) else {
            self.bad_block = Some(start);
            return ControlFlow::Break(());
        };
        self.budget = budget;
        self.runs.push(Extent { from, blocks: saturating_u32(blocks), start, is_unwritten });
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        if self.bad_block.is_some() {
            return false;
        }
        let Some(budget) = self.budget.checked_sub(1) else {
            self.bad_block = Some(node.block);
            return false;
        };
        self.budget = budget;
        self.nodes.push(node.block.0);
        true
    }
}

impl VolumeRewrite<'_> {
    /// Moves the blocks of a file beyond the new end, and updates its map in `slot`; `to` is the
    /// inode's new number.
    pub(super) fn move_map(
        &mut self,
        node: &Inode,
        to: InodeNumber,
        slot: &mut [u8],
    ) -> Result<()> {
        let found = self.walk_file_map(node)?;
        let end = self.space.end();
        let moves =
            found.runs.iter().any(|run| run.start.0.saturating_add(run.blocks.into()) > end)
                || found.nodes.iter().any(|node| *node >= end);
        let file = FileId { inode: to.0, generation: node.generation() };
        let is_sealed_anew = to != node.number || self.rewrites_checksums;
        let mut pieces =
            if moves { self.place_runs(&found.runs)? } else { unmoved_runs(&found.runs) };
        let listed = self.move_contents(node, file, &pieces)?;
        let mut slot = InodeSlot::from_bytes(slot)?;
        let more = listed.as_ref().map_or(0, |more| more.len() as u64);
        if let Some(listed) = listed {
            slot.set_flags(slot.flags() & !flags::INDEX);
            pieces.extend(listed);
        }
        if more > 0 {
            let block_bytes = self.planned.super_.block_bytes;
            slot.set_size(node.size_bytes.saturating_add(more.saturating_mul(block_bytes.into())));
            slot.adjust_block_count(more, true, block_bytes);
            let (uid, gid) = node.owner();
            let usage = self.usage.entry([uid, gid, node.project()]).or_default();
            *usage = usage.saturating_add(i64::try_from(more).unwrap_or(0));
        }
        if node.has_extents() {
            if !moves && more == 0 && (!is_sealed_anew || found.nodes.is_empty()) {
                return Ok(());
            }
            let pointers =
                self.rebuild_extent_tree(node, file, &pieces, &found.nodes, &mut slot)?;
            slot.set_pointers(pointers);
        } else if moves {
            let moved = pieces.iter().filter(|piece| piece.old != piece.new);
            let moved = moved.map(|piece| (piece.old, (piece.blocks, piece.new))).collect();
            let pointers = self.rewrite_pointers(node.pointers, &moved)?;
            slot.set_pointers(pointers);
        }
        Ok(())
    }

    /// Frees all blocks of a file; returns the number of data blocks.
    pub(crate) fn free_file_blocks(&mut self, node: &Inode) -> Result<u64> {
        let found = self.walk_file_map(node)?;
        let mut blocks = 0u64;
        for run in found.runs {
            blocks = blocks.saturating_add(run.blocks.into());
            self.space.release(run.start.0..run.start.0.saturating_add(run.blocks.into()));
        }
        for node in found.nodes {
            self.space.release(node..node.saturating_add(1));
        }
        Ok(blocks)
    }

    fn walk_file_map(&mut self, node: &Inode) -> Result<FileMap> {
        let damaged =
            |block| crate::Error::corrupt("block map").with_inode(node.number).with_block(block);
        let map = map::map_of_any(node)?;
        let super_ = &self.old.super_;
        let role = map.role(node.file_id());
        let read = |block: FsBlock| -> crate::Result<Option<SharedBytes>> {
            let bytes = self.redo.read_old(block, 1)?;
            if let Some(sums) = &self.old_checksums {
                sums.verify_checksum(role, block, &bytes)
                    .map_err(|error| error.with_inode(node.number))?;
            }
            Ok(Some(SharedBytes::from_owned_bytes(bytes.into_boxed_slice())))
        };
        let blocks = u64::from(super_.first_data_block) + 1..super_.blocks;
        let source = MapSource { block_bytes: super_.block_bytes, blocks, read: &read };
        let mut found =
            FileMap { runs: vec![], nodes: vec![], budget: self.budget, bad_block: None };
        let most = match node.has_extents() {
            true => 1 << 32,
            false => max_mapped_blocks(super_.block_bytes).min(1 << 32),
        };
        map.walk(&source, 0..most, &mut found)?;
        if let Some(block) = found.bad_block {
            return Err(damaged(block).into());
        }
        self.budget = found.budget;
        Ok(found)
    }

    /// Assigns new blocks to runs beyond the end.
    fn place_runs(&mut self, runs: &[Extent]) -> Result<Vec<MovedRun>> {
        let end = self.space.end();
        let mut pieces = vec![];
        for run in runs {
            let (start, blocks) = (run.start.0, u64::from(run.blocks));
            let kept = end.saturating_sub(start).min(blocks);
            let mut put = |skip: u64, new: u64, count: u64| {
                pieces.push(MovedRun {
                    from: run.from.saturating_add(saturating_u32(skip)),
                    blocks: saturating_u32(count),
                    old: start.saturating_add(skip),
                    new,
                    is_unwritten: run.is_unwritten,
                });
            };
            if kept > 0 {
                put(0, start, kept);
            }
            let mut at = kept;
            while at < blocks {
                let taken =
                    self.space.allocate(blocks.saturating_sub(at)).ok_or(crate::Error::NoSpace)?;
                let count = taken.end.saturating_sub(taken.start);
                put(at, taken.start, count);
                self.moved_blocks = self.moved_blocks.saturating_add(count);
                at = at.saturating_add(count);
            }
        }
        Ok(pieces)
    }

    /// Allocates a free block.
    pub(crate) fn allocate_block(&mut self) -> Result<u64> {
        self.moved_blocks = self.moved_blocks.saturating_add(1);
        let taken = self.space.allocate(1).ok_or(crate::Error::NoSpace)?;
        Ok(taken.start)
    }

    /// Rebuilds the extent tree of a file; returns the root for the inode.
    fn rebuild_extent_tree(
        &mut self,
        node: &Inode,
        file: FileId,
        pieces: &[MovedRun],
        old_nodes: &[u64],
        slot: &mut InodeSlot<'_>,
    ) -> Result<[u32; POINTERS]> {
        let block_bytes = self.planned.super_.block_bytes;
        let extents = runs_to_extents(pieces);
        let needed = build_extents::nodes_needed(extents.len() as u64, block_bytes);
        let end = self.space.end();
        let mut places: Vec<u64> = old_nodes.iter().copied().filter(|node| *node < end).collect();
        let in_place = places.len();
        while (places.len() as u64) < needed {
            let block = self.allocate_block()?;
            places.push(block);
        }
        let surplus = places.split_off(saturating_usize(needed).min(places.len()));
        for block in surplus {
            self.space.release(block..block.saturating_add(1));
        }
        let tree =
            build_extents::build_extent_tree(&extents, block_bytes, &mut places.iter().copied());
        let (pointers, nodes) = tree.ok_or(crate::Error::NoSpace)?;
        for (nth, (at, bytes)) in nodes.into_iter().enumerate() {
            let old = if nth < in_place { at } else { 0 };
            self.write(Role::ExtentNode(file), old, at, bytes, &[])?;
        }
        // Each node has a cluster of its own.
        let ratio = u64::from(self.planned.super_.cluster_blocks);
        let (had, has) =
            ((old_nodes.len() as u64).saturating_mul(ratio), needed.saturating_mul(ratio));
        if had != has {
            slot.adjust_block_count(had.abs_diff(has), has > had, block_bytes);
            let (uid, gid) = node.owner();
            let more =
                i64::try_from(has).unwrap_or(0).saturating_sub(i64::try_from(had).unwrap_or(0));
            // A value of an attribute counts by its length, for those who have it.
            if !node.is_ea_inode() {
                let usage = self.usage.entry([uid, gid, node.project()]).or_default();
                *usage = usage.saturating_add(more);
            }
        }
        Ok(pointers)
    }

    /// Rewrites the block pointers of an inode and the indirect blocks below.
    fn rewrite_pointers(
        &mut self,
        pointers: [u32; POINTERS],
        moved: &BTreeMap<u64, (u32, u64)>,
    ) -> Result<[u32; POINTERS]> {
        let mut new = pointers;
        for (nth, pointer) in new.iter_mut().enumerate() {
            let levels = u32::try_from(nth.saturating_sub(11)).unwrap_or(0);
            if *pointer != 0 {
                *pointer = self.rewrite_pointer(*pointer, levels, moved)?;
            }
        }
        Ok(new)
    }

    /// Returns the new value of a pointer with `levels` levels below it.
    fn rewrite_pointer(
        &mut self,
        pointer: u32,
        levels: u32,
        moved: &BTreeMap<u64, (u32, u64)>,
    ) -> Result<u32> {
        let block = u64::from(pointer);
        if levels == 0 {
            let run = moved.range(..=block).next_back();
            let to = run.and_then(|(old, (blocks, new))| {
                let skip = block.saturating_sub(*old);
                (skip < u64::from(*blocks)).then_some(new.saturating_add(skip))
            });
            return Ok(FsBlock(to.unwrap_or(block)).to_u32()?);
        }
        let was = self.redo.read_old(FsBlock(block), 1)?;
        let mut bytes = was.clone();
        for nth in 0..addresses_per_block(self.old.super_.block_bytes) {
            let below = pointer_at(&was, nth);
            if below != 0 {
                let to = self.rewrite_pointer(below, levels.saturating_sub(1), moved)?;
                let _ = set_pointer_at(&mut bytes, nth, to);
            }
        }
        let to = if block >= self.space.end() { self.allocate_block()? } else { block };
        let file = FileId { inode: 0, generation: 0 };
        self.write(Role::IndirectBlock(file), block, to, bytes, &was)?;
        Ok(FsBlock(to).to_u32()?)
    }

    /// Reads a block as on disk, verified.
    pub(super) fn read(&self, role: Role, block: FsBlock) -> Result<Vec<u8>> {
        let bytes = self.redo.read_old(block, 1)?;
        if let Some(sums) = &self.old_checksums {
            sums.verify_checksum(role, block, &bytes)?;
        }
        Ok(bytes)
    }

    /// Sets the checksum of a block and writes it: at once if it moves, through the redo log if it
    /// stays and changed.
    pub(crate) fn write(
        &mut self,
        role: Role,
        old: u64,
        new: u64,
        bytes: Vec<u8>,
        was: &[u8],
    ) -> Result<()> {
        let mut data = SharedBytes::from_owned_bytes(bytes.into_boxed_slice());
        if let Some(sums) = &self.new_checksums {
            sums.set_checksum(role, FsBlock(new), &mut data);
        }
        let bytes = data.to_vec();
        if old != new {
            self.redo.write_free_blocks(FsBlock(new), &bytes)?;
        } else if bytes != was {
            self.redo.stage_block(FsBlock(new), bytes)?;
        }
        Ok(())
    }
}

/// Returns runs that do not move.
fn unmoved_runs(runs: &[Extent]) -> Vec<MovedRun> {
    let piece = |run: &Extent| MovedRun {
        from: run.from,
        blocks: run.blocks,
        old: run.start.0,
        new: run.start.0,
        is_unwritten: run.is_unwritten,
    };
    runs.iter().map(piece).collect()
}

/// Merges runs into as few extents as possible.
fn runs_to_extents(pieces: &[MovedRun]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = vec![];
    for piece in pieces {
        let most = if piece.is_unwritten { INIT_MAX_LEN - 1 } else { INIT_MAX_LEN };
        let (mut from, mut start, mut blocks) = (piece.from, piece.new, piece.blocks);
        if let Some(last) = extents.last_mut()
            && last.is_unwritten == piece.is_unwritten
            && last.end() == u64::from(from)
            && last.start.0.saturating_add(last.blocks.into()) == start
        {
            let more = blocks.min(most.saturating_sub(last.blocks));
            last.blocks = last.blocks.saturating_add(more);
            (from, start, blocks) = (
                from.saturating_add(more),
                start.saturating_add(more.into()),
                blocks.saturating_sub(more),
            );
        }
        while blocks > 0 {
            let count = blocks.min(most);
            extents.push(Extent {
                from,
                blocks: count,
                start: FsBlock(start),
                is_unwritten: piece.is_unwritten,
            });
            (from, start, blocks) = (
                from.saturating_add(count),
                start.saturating_add(count.into()),
                blocks.saturating_sub(count),
            );
        }
    }
    extents
}
