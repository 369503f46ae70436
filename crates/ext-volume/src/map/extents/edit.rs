//! Changes of extent trees: allocation and freeing.
//!
//! Law 1: one leaf changes at a time, and its parents at once, so the tree is consistent after each
//! step: sorted entries, parent keys equal to the first entries, no empty nodes.
//! Law 2: a step begins only if all nodes it may need are allocatable.
//! Law 3: contiguous extents are merged, up to the length limit of the format.
//! Law 4: a cluster of the file is in one cluster of the device, block by block at the same offset.
//! New blocks of a partly mapped cluster go into that cluster. A cluster is freed when no leaf maps
//! any block of it. A node has its own cluster.
//!
//! ```text
//!   file    | 0 1 2 3 | 4 5 6 7 |      extents 1-2 and 3 lie in one cluster: 4, 5 as well
//!   device  | .a a b  | . . . . |      would take another one
//! ```

mod leaf;

use std::ops::{ControlFlow, Range};

use leaf::{clusters_of_extents, insert_extent, remove_range};

use super::Extents;
use crate::alloc::AllocationRequest;
use crate::format::extent::{
    self, ENTRY_BYTES, Extent, ExtentIndex, ExtentNode, INIT_MAX_LEN, MAX_DEPTH,
};
use crate::map::edit::{AllocationPolicy, MapEditor, MappedRun};
use crate::map::{BlockLocation, MapVisitor, RunList};
use crate::transaction::Transaction;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FileBlock, FsBlock, InodeNumber, Result};

/// A node on the path to a leaf.
struct ExtentPathNode {
    /// Its block; the root has none.
    at: Option<FsBlock>,
    depth: u16,
    max_entries: usize,
    entries: Vec<[u8; ENTRY_BYTES]>,
    /// Index of the entry on the path.
    nth: usize,
}

impl ExtentPathNode {
    fn from_node(node: &ExtentNode<'_>, at: Option<FsBlock>, file_block: u32) -> Self {
        Self {
            at,
            depth: node.depth,
            max_entries: node.max_entries.into(),
            entries: node.entries().to_vec(),
            nth: node.find(file_block),
        }
    }

    /// Returns the file block of its first entry.
    fn first_file_block(&self) -> u32 {
        extent::first_file_block(self.entries.first())
    }
}

/// Path to a leaf, root first, with the leaf's extents and the file blocks that it covers.
struct ExtentPath {
    steps: Vec<ExtentPathNode>,
    leaf: Vec<Extent>,
    covered: Range<u64>,
}

impl ExtentPath {
    /// Returns the nodes that may be needed for up to two more extents in the leaf.
    fn nodes_needed(&self) -> u64 {
        let leaf = self
            .steps
            .last()
            .is_some_and(|leaf| leaf.entries.len().saturating_add(2) <= leaf.max_entries);
        if leaf { 0 } else { (self.steps.len() as u64).saturating_add(1) }
    }
}

/// Blocks of nodes allocated and freed.
#[derive(Default)]
struct NodeCountChange {
    made: u64,
    freed: u64,
}

impl MapEditor for Extents {
    fn map_blocks(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        tx.map_by_extents(inode, range, taking)
    }

    fn zero_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        tx.mark_extents_unwritten(inode, range)
    }

    fn ensure_space_for_hole(
        &self,
        tx: &Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        tx.ensure_nodes_for_hole(inode, range)
    }

    fn free_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<u64> {
        tx.unmap_extents(inode, range)
    }
}

impl Transaction<'_> {
    fn read_root(&self, inode: InodeNumber) -> Result<Extents> {
        self.read_slot(inode, |it| Extents::new(&it.pointers()))
    }

    /// Returns the path to the leaf that covers a file block.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn find_extent_path(&self, inode: InodeNumber, at: u32) -> Result<ExtentPath> {
        let role = super::extent_node_role(self.file_id(inode)?);
        let of = |error: Error| error.with_inode(inode);
        let extents = self.read_root(inode)?;
        let root = extents.root().map_err(of)?;
        let mut covered = 0..1u64 << 32;
        let mut steps = vec![ExtentPathNode::from_node(&root, None, at)];
        let mut leaf: Vec<Extent> = if root.depth == 0 { root.extents().collect() } else { vec![] };
        let mut above = root.index(root.find(at));
        let mut after = root.index(root.find(at).saturating_add(1));
        for depth in (0..root.depth).rev() {
            let damaged = || Error::corrupt("extent tree: node").with_inode(inode);
            let ExtentIndex { from, node: block } = above.ok_or_else(damaged)?;
            let is_first = steps.last().is_some_and(|step| step.nth == 0);
            covered.start =
                if is_first { covered.start } else { u64::from(from).max(covered.start) };
            covered.end = after.map_or(covered.end, |next| u64::from(next.from).min(covered.end));
            if !self.volume.super_.is_valid_block(block) {
                return Err(damaged().with_block(block));
            }
            let bytes = self.block(block, role).map_err(of)?;
            let node =
                ExtentNode::check(&bytes, Some(depth)).map_err(|it| of(it).with_block(block))?;
            let step = ExtentPathNode::from_node(&node, Some(block), at);
            if depth == 0 {
                leaf = node.extents().collect();
                if !super::is_within(&node, &covered) {
                    return Err(damaged().with_block(block));
                }
            }
            above = node.index(step.nth);
            after = node.index(step.nth.saturating_add(1));
            steps.push(step);
        }
        let ratio = u64::from(self.cluster_blocks());
        for extent in &leaf {
            let end = extent.start.offset(extent.blocks.into());
            if extent.start.0 % ratio != u64::from(extent.from) % ratio {
                let what = "extent tree: extent between clusters";
                return Err(of(Error::corrupt(what)).with_block(extent.start));
            }
            if !self.volume.super_.is_valid_block(extent.start) || end.0 > self.volume.super_.blocks
            {
                let what = "extent tree: extent out of the volume";
                return Err(of(Error::corrupt(what)).with_block(extent.start));
            }
        }
        Ok(ExtentPath { steps, leaf, covered })
    }

    /// [`MapEditor::map_blocks`] of extents.
    pub(super) fn map_by_extents(
        &mut self,
        inode: InodeNumber,
        Range { start, end }: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        let mut all: Vec<MappedRun> = Vec::new();
        let mut goal = None;
        let mut at = start;
        while at < end {
            match self.map_first_part(inode, at..end, taking, &mut goal) {
                Ok(run) => {
                    at = run.from.saturating_add(run.blocks);
                    all.push(run);
                }
                Err(Error::NoSpace) if !all.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        if all.iter().any(|run| run.is_new) {
            self.invalidate_map(inode, start, end);
        }
        Ok(all)
    }

    /// Maps the first blocks of a non-empty range.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn map_first_part(
        &mut self,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
        goal: &mut Option<u64>,
    ) -> Result<MappedRun> {
        let path = self.find_extent_path(inode, range.start)?;
        let from = range.start;
        let nth = path.leaf.partition_point(|extent| extent.end() <= u64::from(from));
        let there = path.leaf.get(nth).filter(|extent| extent.from <= from);
        if let Some(extent) = there {
            let skipped = from.saturating_sub(extent.from);
            let blocks = extent.blocks.saturating_sub(skipped).min(range.end.saturating_sub(from));
            let at = extent.start.offset(skipped.into());
            *goal = Some(at.0.saturating_add(blocks.into()));
            let written = !extent.is_unwritten || taking.unwritten;
            if written {
                return Ok(MappedRun { from, blocks, at, is_new: false });
            }
            self.ensure_node_space(&path)?;
            let new = Extent { from, blocks, start: at, is_unwritten: false };
            self.put_extent(inode, path, new)?;
            return Ok(MappedRun { from, blocks, at, is_new: true });
        }
        let next = path.leaf.get(nth).map_or(path.covered.end, |extent| extent.from.into());
        let most = if taking.unwritten { INIT_MAX_LEN - 1 } else { INIT_MAX_LEN };
        let hole = saturating_u32(next.min(u64::from(range.end))).saturating_sub(from).min(most);
        self.ensure_node_space(&path)?;
        let (start, blocks) = match self.find_mapped_cluster(inode, from)? {
            Some(cluster) => {
                let lead = from % self.cluster_blocks();
                (cluster.offset(lead.into()), hole.min(self.cluster_blocks().saturating_sub(lead)))
            }
            None => self.allocate_clusters(inode, &path, (nth, from, hole), taking, *goal)?,
        };
        *goal = Some(start.0.saturating_add(blocks.into()));
        let new = Extent { from, blocks, start, is_unwritten: taking.unwritten };
        self.put_extent(inode, path, new)?;
        Ok(MappedRun { from, blocks, at: start, is_new: !taking.unwritten })
    }

    /// Allocates clusters for a hole before extent `nth` of a leaf; no block of its first cluster
    /// is mapped. Returns the first block, and how many blocks of the hole it covers.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn allocate_clusters(
        &mut self,
        inode: InodeNumber,
        path: &ExtentPath,
        (nth, from, hole): (usize, u32, u32),
        taking: AllocationPolicy,
        goal: Option<u64>,
    ) -> Result<(FsBlock, u32)> {
        let ratio = self.cluster_blocks();
        let lead = from % ratio;
        // A last cluster that is partly mapped is excluded.
        let end = u64::from(from).saturating_add(hole.into());
        let begun = end.saturating_sub(end % u64::from(ratio));
        let is_had = u64::from(from) < begun
            && begun < end
            && self.find_mapped_cluster(inode, saturating_u32(begun))?.is_some();
        let hole = if is_had { saturating_u32(begun).saturating_sub(from) } else { hole };
        let best = match goal {
            Some(goal) => goal,
            None => self.extent_goal(inode, path, nth, from)?,
        };
        let spare = self.allocatable_blocks(taking.privileged);
        let (start, taken) = self.allocate_blocks(AllocationRequest {
            goal: best.saturating_sub(lead.into()),
            count: lead.saturating_add(hole).min(saturating_u32(spare)),
            append_inode: taking.is_append.then_some(inode.0),
            privileged: taking.privileged,
            is_for_extent_node: false,
        })?;
        self.add_sectors(inode, taken.into())?;
        Ok((FsBlock(start).offset(lead.into()), hole.min(taken.saturating_sub(lead))))
    }

    /// Returns the first block of the cluster for file block `at`, if any leaf maps a block of that
    /// cluster.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn find_mapped_cluster(&self, inode: InodeNumber, at: u32) -> Result<Option<FsBlock>> {
        struct FirstExtent(Option<(u64, BlockLocation)>);
        impl MapVisitor for FirstExtent {
            fn visit_run(&mut self, at: u64, _: u64, place: BlockLocation) -> ControlFlow<()> {
                if place == BlockLocation::Hole {
                    return ControlFlow::Continue(());
                }
                self.0 = Some((at, place));
                ControlFlow::Break(())
            }
        }
        let ratio = u64::from(self.cluster_blocks());
        if ratio == 1 {
            // The caller asks for an unmapped block, and a cluster is one block.
            return Ok(None);
        }
        let start = u64::from(at).saturating_sub(u64::from(at) % ratio);
        let mut first = FirstExtent(None);
        self.walk(inode, start..start.saturating_add(ratio), &mut first)?;
        match first.0 {
            None | Some((_, BlockLocation::Hole)) => Ok(None),
            Some((at, BlockLocation::Mapped(block) | BlockLocation::Unwritten(block))) => {
                let cluster =
                    block.0.checked_sub(at.saturating_sub(start)).filter(|it| it % ratio == 0);
                let what = "extent tree: extent between clusters";
                let damaged = || Error::corrupt(what).with_inode(inode).with_block(block);
                cluster.map(|block| Some(FsBlock(block))).ok_or_else(damaged)
            }
            Some((_, BlockLocation::Damaged(block))) => {
                Err(Error::corrupt("extent tree: node").with_inode(inode).with_block(block))
            }
        }
    }

    /// Returns the best device block for an unmapped file block: as if the extent before were
    /// longer, or before the extent after it, or else in the inode's group.
    fn extent_goal(
        &self,
        inode: InodeNumber,
        path: &ExtentPath,
        nth: usize,
        at: u32,
    ) -> Result<u64> {
        let before = nth.checked_sub(1).and_then(|nth| path.leaf.get(nth));
        if let Some(before) = before {
            return Ok(before.start.0.saturating_add(u64::from(at.saturating_sub(before.from))));
        }
        if let Some(behind) = path.leaf.get(nth) {
            return Ok(behind.start.0.saturating_sub(u64::from(behind.from.saturating_sub(at))));
        }
        let (group, _) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
        Ok(self.volume.super_.group_start(crate::GroupNumber(group)).0)
    }

    /// Returns the nodes that the tree of a file may need for extents at file block `at`.
    pub(crate) fn nodes_needed(&self, inode: InodeNumber, at: u32) -> Result<u64> {
        Ok(self.find_extent_path(inode, at)?.nodes_needed())
    }

    /// Checks that the nodes for a change of a leaf are allocatable.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn ensure_node_space(&self, path: &ExtentPath) -> Result<()> {
        let clusters = self.available_metadata_blocks() / u64::from(self.cluster_blocks());
        if clusters < path.nodes_needed() { Err(Error::NoSpace) } else { Ok(()) }
    }

    /// Inserts an extent into a leaf, replacing what it overlaps.
    fn put_extent(&mut self, inode: InodeNumber, mut path: ExtentPath, new: Extent) -> Result<()> {
        insert_extent(&mut path.leaf, new);
        self.write_leaf(inode, path)
    }

    /// Maps blocks of a file to exactly this extent; frees blocks that the file had there before.
    pub(crate) fn replay_extent(&mut self, inode: InodeNumber, extent: Extent) -> Result<()> {
        let damaged = || Error::corrupt("extent tree: extent out of the file").with_inode(inode);
        let end = u32::try_from(extent.end()).map_err(|_| damaged())?;
        if extent.blocks == 0 || !self.volume.super_.is_valid_block(extent.start) {
            return Err(damaged().with_block(extent.start));
        }
        let at = |from: u32| extent.start.offset(from.saturating_sub(extent.from).into());
        let mut runs = RunList::default();
        self.walk(inode, extent.from.into()..end.into(), &mut runs)?;
        for run in runs.between(FileBlock(extent.from), FileBlock(end)) {
            let from = run.from.0;
            match run.location {
                BlockLocation::Mapped(block) | BlockLocation::Unwritten(block)
                    if block == at(from) =>
                {
                    continue;
                }
                BlockLocation::Mapped(_) | BlockLocation::Unwritten(_) => {
                    self.unmap(inode, from..run.end().0)?
                }
                BlockLocation::Hole => {}
                BlockLocation::Damaged(block) => return Err(damaged().with_block(block)),
            }
            let taken = self.allocate_exact_blocks(at(from).0, run.blocks)?;
            self.add_sectors(inode, taken)?;
        }
        let mut from = extent.from;
        while from < end {
            let path = self.find_extent_path(inode, from)?;
            let until =
                saturating_u32(path.covered.end.min(end.into())).max(from.saturating_add(1));
            self.ensure_node_space(&path)?;
            let is_unwritten = extent.is_unwritten;
            let new =
                Extent { from, blocks: until.saturating_sub(from), start: at(from), is_unwritten };
            self.put_extent(inode, path, new)?;
            from = until;
        }
        self.invalidate_map(inode, extent.from, end);
        Ok(())
    }

    /// Checks that the nodes for a hole in `range` are allocatable: a hole may split one extent
    /// into two.
    pub(super) fn ensure_nodes_for_hole(
        &self,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        let mut path = self.find_extent_path(inode, range.start)?;
        let before = path.leaf.len();
        remove_range(&mut path.leaf, &(range.start.into()..range.end.into()), &mut |_| ());
        if path.leaf.len() > before { self.ensure_node_space(&path) } else { Ok(()) }
    }

    /// [`MapEditor::free_range`] of extents.
    pub(super) fn unmap_extents(&mut self, inode: InodeNumber, range: Range<u32>) -> Result<u64> {
        let end = match range.end {
            // Up to the last possible block.
            u32::MAX => 1 << 32,
            end => u64::from(end),
        };
        let mut at = u64::from(range.start);
        let mut freed = 0u64;
        while at < end {
            let mut path = self.find_extent_path(inode, saturating_u32(at))?;
            let own = at..end.min(path.covered.end);
            at = path.covered.end.max(at.saturating_add(1));
            let mut gone: Vec<Extent> = Vec::new();
            remove_range(&mut path.leaf, &own, &mut |extent| gone.push(extent));
            if gone.is_empty() {
                continue;
            }
            self.write_leaf(inode, path)?;
            freed = freed.saturating_add(self.free_clusters_of(inode, &gone, &own)?);
        }
        Ok(freed)
    }

    /// Frees the clusters that the file no longer uses after these extents were removed in `range`;
    /// returns how many blocks.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn free_clusters_of(
        &mut self,
        inode: InodeNumber,
        gone: &[Extent],
        range: &Range<u64>,
    ) -> Result<u64> {
        let ratio = u64::from(self.cluster_blocks());
        // Only clusters at the edges of the range may hold other blocks of the file.
        let kept = |edge: u64| {
            let part = edge % ratio;
            let shares =
                part > 0 && self.find_mapped_cluster(inode, saturating_u32(edge))?.is_some();
            Ok::<_, Error>(shares.then_some(edge.saturating_sub(part)))
        };
        let kept = [kept(range.start)?, kept(range.end)?];
        if kept.iter().any(Option::is_some) {
            // Blocks in kept clusters are not freed below, but leave the cache, too.
            let mut overlay = self.volume.store.write_back.write();
            for extent in gone {
                let blocks = (0..u64::from(extent.blocks)).map(|nth| extent.start.offset(nth));
                blocks.for_each(|block| overlay.drop_block(block));
            }
        }
        let mut freed = 0u64;
        for (from, start, blocks) in clusters_of_extents(gone, ratio) {
            let (mut first, mut end) = (from, from.saturating_add(blocks));
            if kept.contains(&Some(first)) {
                first = first.saturating_add(ratio);
            }
            if first < end && kept.contains(&Some(end.saturating_sub(ratio))) {
                end = end.saturating_sub(ratio);
            }
            if first < end {
                freed = freed.saturating_add(self.free_blocks(
                    start.saturating_add(first.saturating_sub(from)),
                    saturating_u32(end.saturating_sub(first)),
                )?);
            }
        }
        Ok(freed)
    }

    /// [`MapEditor::zero_range`] of extents: marks them as unwritten.
    pub(super) fn mark_extents_unwritten(
        &mut self,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        let end = u64::from(range.end);
        let mut at = u64::from(range.start);
        while at < end {
            let mut path = self.find_extent_path(inode, saturating_u32(at))?;
            let own = at..end.min(path.covered.end);
            at = path.covered.end.max(at.saturating_add(1));
            let mut written = path.leaf.clone();
            written.retain(|extent| !extent.is_unwritten);
            let mut inside = Vec::new();
            for extent in &written {
                let (low, high) =
                    (u64::from(extent.from).max(own.start), extent.end().min(own.end));
                let mut from = low;
                while from < high {
                    let blocks = high.saturating_sub(from).min(u64::from(INIT_MAX_LEN - 1));
                    let start = extent.start.offset(from.saturating_sub(extent.from.into()));
                    let (first, blocks) = (saturating_u32(from), saturating_u32(blocks));
                    inside.push(Extent { from: first, blocks, start, is_unwritten: true });
                    from = from.saturating_add(blocks.into());
                }
            }
            if inside.is_empty() {
                continue;
            }
            self.ensure_node_space(&path)?;
            for extent in inside {
                insert_extent(&mut path.leaf, extent);
            }
            self.write_leaf(inode, path)?;
        }
        self.invalidate_map(inode, range.start, range.end);
        Ok(())
    }

    /// Writes a changed leaf and the necessary changes of its parents.
    fn write_leaf(&mut self, inode: InodeNumber, path: ExtentPath) -> Result<()> {
        let ExtentPath { mut steps, leaf, .. } = path;
        let mut nodes = NodeCountChange::default();
        if let Some(last) = steps.last_mut() {
            last.entries = leaf.iter().map(Extent::encode).collect();
        }
        self.write_path(inode, &mut steps, &mut nodes)?;
        self.collapse_root(inode, &mut nodes)?;
        if nodes.made > 0 {
            self.add_sectors(inode, nodes.made)?;
        }
        if nodes.freed > 0 {
            self.subtract_sectors(inode, nodes.freed)?;
        }
        Ok(())
    }

    /// Writes the last of these nodes, which changed, and the affected nodes above it.
    fn write_path(
        &mut self,
        inode: InodeNumber,
        steps: &mut Vec<ExtentPathNode>,
        nodes: &mut NodeCountChange,
    ) -> Result<()> {
        while let Some(mut step) = steps.pop() {
            let Some(above) = steps.last_mut() else {
                return self.write_root(inode, step, nodes);
            };
            let Some(block) = step.at else { return Err(Error::corrupt("extent tree: node")) };
            if step.entries.is_empty() {
                above.entries.remove(above.nth.min(above.entries.len().saturating_sub(1)));
                nodes.freed = nodes.freed.saturating_add(self.free_blocks(block.0, 1)?);
                continue;
            }
            let mut changed = false;
            if step.entries.len() > step.max_entries {
                // A file that grows at its end leaves full nodes behind.
                let at_end = step.nth.saturating_add(1) >= step.max_entries;
                let kept = if at_end { step.max_entries } else { step.entries.len() / 2 };
                let rest = step.entries.split_off(kept);
                for (nth, right) in
                    (above.nth.saturating_add(1)..).zip(rest.chunks(step.max_entries.max(1)))
                {
                    let node = self.make_node(inode, step.depth, right, block, nodes)?;
                    let from = extent::first_file_block(right.first());
                    let nth = nth.min(above.entries.len());
                    above.entries.insert(nth, ExtentIndex { from, node }.encode());
                }
                changed = true;
            }
            let first = step.first_file_block();
            self.write_node(inode, block, &step)?;
            if let Some(entry) = above.entries.get_mut(above.nth)
                && extent::first_file_block(Some(entry)) != first
            {
                *entry = ExtentIndex { from: first, node: block }.encode();
                changed = true;
            }
            if !changed {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes the root; if it overflows, its entries move to a new node.
    fn write_root(
        &mut self,
        inode: InodeNumber,
        mut root: ExtentPathNode,
        nodes: &mut NodeCountChange,
    ) -> Result<()> {
        if root.entries.is_empty() {
            root.depth = 0;
        }
        if root.entries.len() > root.max_entries {
            if root.depth >= MAX_DEPTH {
                return Err(Error::TooLarge);
            }
            let entries = std::mem::take(&mut root.entries);
            let (group, _) = self.writer.groups.locate_inode_bit(inode).ok_or(Error::NotFound)?;
            let near = self.volume.super_.group_start(crate::GroupNumber(group));
            let from = extent::first_file_block(entries.first());
            let node = self.make_node(inode, root.depth, &entries, near, nodes)?;
            root.entries = vec![ExtentIndex { from, node }.encode()];
            root.depth = root.depth.saturating_add(1);
        }
        let room = u16::try_from(root.max_entries).unwrap_or(extent::ROOT_ENTRIES);
        let words = super::encode_root_words(root.depth, room, &root.entries);
        self.change_slot(inode, |it| it.set_pointers(words))
    }

    /// Allocates a node with these entries, near `near`.
    fn make_node(
        &mut self,
        inode: InodeNumber,
        depth: u16,
        entries: &[[u8; ENTRY_BYTES]],
        near: FsBlock,
        nodes: &mut NodeCountChange,
    ) -> Result<FsBlock> {
        let role = super::extent_node_role(self.file_id(inode)?);
        let request = AllocationRequest {
            goal: near.0,
            count: 1,
            append_inode: None,
            privileged: true,
            is_for_extent_node: true,
        };
        let (at, taken) = self.allocate_blocks(request)?;
        nodes.made = nodes.made.saturating_add(taken.into());
        let block_bytes = self.volume.super_.block_bytes;
        let mut bytes = vec![0; saturating_usize(block_bytes.into())];
        extent::write_node(&mut bytes, depth, extent::max_entries_in_block(block_bytes), entries);
        self.put_new_block(FsBlock(at), role, bytes);
        Ok(FsBlock(at))
    }

    fn write_node(
        &mut self,
        inode: InodeNumber,
        block: FsBlock,
        step: &ExtentPathNode,
    ) -> Result<()> {
        let role = super::extent_node_role(self.file_id(inode)?);
        let room = u16::try_from(step.max_entries).unwrap_or(0);
        self.modify_block(block, role, |bytes| {
            extent::write_node(bytes, step.depth, room, &step.entries)
        })
    }

    /// Collapses a root with a single leaf whose extents fit the root.
    fn collapse_root(&mut self, inode: InodeNumber, nodes: &mut NodeCountChange) -> Result<()> {
        let extents = self.read_root(inode)?;
        let root = extents.root().map_err(|error| error.with_inode(inode))?;
        let (1, 1, Some(ExtentIndex { node: block, .. })) = (root.depth, root.len(), root.index(0))
        else {
            return Ok(());
        };
        let bytes = self.block(block, super::extent_node_role(self.file_id(inode)?))?;
        let leaf = ExtentNode::check(&bytes, Some(0))
            .map_err(|it| it.with_block(block).with_inode(inode))?;
        if leaf.len() > usize::from(root.max_entries) {
            return Ok(());
        }
        let mut step = ExtentPathNode::from_node(&leaf, None, 0);
        step.max_entries = root.max_entries.into();
        nodes.freed = nodes.freed.saturating_add(self.free_blocks(block.0, 1)?);
        self.write_root(inode, step, &mut NodeCountChange::default())
    }
}
