//! Extent trees of ext4, with the root in the inode.
//!
//! ```text
//!   i_block: root, up to four entries ─▶ node ─▶ .. ─▶ leaf: extents, sorted      at most 5 down
//! ```
//! Law: each node covers the file blocks between its index entry and the next, and no others: a
//! walk visits no block twice, whatever the entries say. Entries outside that range, unsorted
//! entries or a wrong checksum damage only that range.

mod edit;

use std::ops::{ControlFlow, Range};

use super::pointers::PointerLocation;
use super::{BlockLocation, BlockMap, MapNode, MapSource, MapVisitor};
use crate::blocks::role::Role;
use crate::format::extent::{self, Extent};
use crate::format::inode::POINTERS;
use crate::units::saturating_u32;
use crate::{FileId, FsBlock, Result};

/// Returns the role of the tree's nodes.
const fn extent_node_role(file: FileId) -> Role {
    Role::ExtentNode(file)
}

/// Size of a root, in bytes.
pub(crate) const ROOT_BYTES: usize = POINTERS * 4;

/// Returns the root of a file without blocks, as words.
pub fn empty_root() -> [u32; POINTERS] {
    encode_root_words(0, extent::ROOT_ENTRIES, &[])
}

/// Encodes a root as the words of an inode.
fn encode_root_words(
    depth: u16,
    room: u16,
    entries: &[[u8; extent::ENTRY_BYTES]],
) -> [u32; POINTERS] {
    let mut bytes = [0; ROOT_BYTES];
    extent::write_node(&mut bytes, depth, room, entries);
    let mut words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
    std::array::from_fn(|_| words.next().unwrap_or(0))
}

/// Root of an inode's extent tree.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    root: [u8; ROOT_BYTES],
}

impl Extents {
    /// Returns the tree whose root is in these fields of an inode.
    pub fn new(words: &[u32; POINTERS]) -> Self {
        let mut root = [0; ROOT_BYTES];
        let (fields, _) = root.as_chunks_mut();
        fields.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
        Self { root }
    }

    pub(crate) fn root(&self) -> Result<extent::ExtentNode<'_>> {
        extent::ExtentNode::check(&self.root, None)
    }

    /// Returns the first device block of the file, or of its tree.
    pub(crate) fn first_block(&self) -> Option<FsBlock> {
        let root = self.root().ok()?;
        match root.depth {
            0 => root.extent(0).map(|extent| extent.start),
            _ => root.index(0).map(|index| index.node),
        }
    }
}

impl BlockMap for Extents {
    fn role(&self, file: FileId) -> Role {
        extent_node_role(file)
    }

    fn walk(
        &self,
        source: &MapSource<'_>,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()> {
        let mut walk = ExtentWalk { source, range, visit, depth: None };
        let all = 0..1 << 32;
        let flow = walk.walk_node(&self.root, None, &all)?;
        let beyond = walk.range.start.max(all.end)..walk.range.end;
        if flow.is_continue() && !beyond.is_empty() {
            let blocks = beyond.end.saturating_sub(beyond.start);
            let _ = walk.visit.visit_run(beyond.start, blocks, BlockLocation::Damaged(FsBlock(0)));
        }
        Ok(())
    }
}

/// A walk over the part of a tree in `range`.
struct ExtentWalk<'a> {
    source: &'a MapSource<'a>,
    range: Range<u64>,
    visit: &'a mut dyn MapVisitor,
    /// Depth of the current node above the leaves; `None` before the root.
    depth: Option<u16>,
}

impl ExtentWalk<'_> {
    /// Returns the requested part of `part`.
    fn requested_part(&self, part: &Range<u64>) -> Option<Range<u64>> {
        let asked = part.start.max(self.range.start)..part.end.min(self.range.end);
        (!asked.is_empty()).then_some(asked)
    }

    fn emit_run(
        &mut self,
        part: &Range<u64>,
        place: impl FnOnce(u64) -> BlockLocation,
    ) -> ControlFlow<()> {
        match self.requested_part(part) {
            Some(Range { start, end }) => {
                let skipped = start.saturating_sub(part.start);
                self.visit.visit_run(start, end.saturating_sub(start), place(skipped))
            }
            None => ControlFlow::Continue(()),
        }
    }

    /// Visits a node that covers `part`; `at` is its block.
    fn walk_node(
        &mut self,
        bytes: &[u8],
        at: Option<FsBlock>,
        part: &Range<u64>,
    ) -> Result<ControlFlow<()>> {
        let damaged = BlockLocation::Damaged(at.unwrap_or(FsBlock(0)));
        let depth = self.depth.map(|depth| depth.saturating_sub(1));
        let Ok(node) = extent::ExtentNode::check(bytes, depth) else {
            return Ok(self.emit_run(part, |_| damaged));
        };
        match node.depth {
            0 if is_within(&node, part) => Ok(self.walk_leaf(&node, part)),
            0 => Ok(self.emit_run(part, |_| damaged)),
            depth => {
                let above = self.depth.replace(depth);
                let flow = self.walk_children(&node, at, part);
                self.depth = above;
                flow
            }
        }
    }

    /// Visits the children of an index node: each covers the blocks up to the next.
    fn walk_children(
        &mut self,
        node: &extent::ExtentNode<'_>,
        at: Option<FsBlock>,
        part: &Range<u64>,
    ) -> Result<ControlFlow<()>> {
        let first = match self.requested_part(part) {
            Some(asked) => node.find(saturating_u32(asked.start)),
            None => return Ok(ControlFlow::Continue(())),
        };
        let firsts = |nth| node.index(nth).map(|index| u64::from(index.from));
        for nth in first..node.len() {
            let Some(index) = node.index(nth) else { break };
            let start = if nth == 0 { part.start } else { u64::from(index.from) };
            let end = firsts(nth.saturating_add(1)).unwrap_or(part.end);
            let own = start.max(part.start)..end.min(part.end);
            if own.start >= self.range.end {
                break;
            }
            if own.is_empty() {
                continue;
            }
            let flow = self.walk_child(index.node, at, nth, &own)?;
            if flow.is_break() {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn walk_child(
        &mut self,
        block: FsBlock,
        above: Option<FsBlock>,
        nth: usize,
        part: &Range<u64>,
    ) -> Result<ControlFlow<()>> {
        let damaged = BlockLocation::Damaged(block);
        if !self.source.blocks.contains(&block.0) {
            return Ok(self.emit_run(part, |_| damaged));
        }
        let pointer =
            above.map_or(PointerLocation::Inode(nth), |it| PointerLocation::Block(it, nth as u64));
        if !self.visit.visit_node(MapNode { block, pointer }) {
            return Ok(ControlFlow::Continue(()));
        }
        match (self.source.read)(block)? {
            Some(bytes) => self.walk_node(&bytes, Some(block), part),
            None => Ok(self.emit_run(part, |_| damaged)),
        }
    }

    /// Visits the extents of a leaf, and the holes around them.
    fn walk_leaf(&mut self, node: &extent::ExtentNode<'_>, part: &Range<u64>) -> ControlFlow<()> {
        let from = match self.requested_part(part) {
            Some(asked) => node.find(saturating_u32(asked.start)),
            None => return ControlFlow::Continue(()),
        };
        // The extent found may begin after the requested start; the hole then begins at the end of
        // the extent before.
        let mut at = match from.checked_sub(1).and_then(|before| node.extent(before)) {
            Some(before) => before.end(),
            None => part.start,
        };
        for nth in from..node.len() {
            let Some(extent) = node.extent(nth) else { break };
            let start = u64::from(extent.from);
            self.emit_run(&(at..start), |_| BlockLocation::Hole)?;
            if start >= self.range.end {
                return ControlFlow::Continue(());
            }
            at = extent.end();
            let blocks = &self.source.blocks;
            self.emit_run(&(start..at), |skipped| extent_location(&extent, skipped, blocks))?;
        }
        self.emit_run(&(at..part.end), |_| BlockLocation::Hole)
    }
}

/// Returns true if all extents of a leaf are in the part that it covers.
fn is_within(leaf: &extent::ExtentNode<'_>, part: &Range<u64>) -> bool {
    let (first, last) = (leaf.extent(0), leaf.extent(leaf.len().saturating_sub(1)));
    first.is_none_or(|it| u64::from(it.from) >= part.start)
        && last.is_none_or(|it| it.end() <= part.end)
}

/// Returns the location of an extent's blocks from the `skipped`th on.
fn extent_location(extent: &Extent, skipped: u64, volume: &Range<u64>) -> BlockLocation {
    let end = extent.start.offset(extent.blocks.into());
    if extent.start.0 < volume.start || end.0 > volume.end {
        return BlockLocation::Damaged(extent.start);
    }
    let first = extent.start.offset(skipped);
    if extent.is_unwritten { BlockLocation::Unwritten(first) } else { BlockLocation::Mapped(first) }
}
