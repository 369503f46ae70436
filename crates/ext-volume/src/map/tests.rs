//! The traits `BlockMap` and `MapEditor` as a seam: a second map, with one run of blocks per file, replaces pointer maps.

use std::ops::{ControlFlow, Range};

use super::edit::{AllocationPolicy, MapEditor, MappedRun};
use super::{
    BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, Run, hole_end, scan_map, with_source,
};
use crate::alloc::AllocationRequest;
use crate::blocks::role::Role;
use crate::testing::{FILE, formatted_disk, open_for_writing};
use crate::transaction::Transaction;
use crate::{Error, FileBlock, FileId, FsBlock, InodeNumber, Result};

/// The first word of the inode is the first block, the second the number of blocks.
struct SingleRunMap([u32; 2]);

impl SingleRunMap {
    fn load(tx: &Transaction<'_>, inode: InodeNumber) -> Result<Self> {
        tx.read_slot(inode, |it| Self([it.pointer(0), it.pointer(1)]))
    }

    fn store(&self, tx: &mut Transaction<'_>, inode: InodeNumber) -> Result<()> {
        tx.change_slot(inode, |it| {
            self.0.into_iter().enumerate().for_each(|(nth, word)| it.set_pointer(nth, word));
        })
    }
}

impl BlockMap for SingleRunMap {
    fn role(&self, file: FileId) -> Role {
        Role::IndirectBlock(file)
    }

    fn walk(
        &self,
        source: &MapSource<'_>,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()> {
        let [first, count] = self.0.map(u64::from);
        let there = range.start.min(count)..range.end.min(count);
        let mut flow = ControlFlow::Continue(());
        if !there.is_empty() {
            let block = FsBlock(first + there.start);
            let is_sound = source.blocks.contains(&block.0);
            let place =
                if is_sound { BlockLocation::Mapped(block) } else { BlockLocation::Damaged(block) };
            flow = visit.visit_run(there.start, there.end - there.start, place);
        }
        let behind = range.start.max(count);
        if flow.is_continue() && behind < range.end {
            let _ = visit.visit_run(behind, range.end - behind, BlockLocation::Hole);
        }
        Ok(())
    }
}

impl MapEditor for SingleRunMap {
    fn map_blocks(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
        _: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        let [first, count] = self.0;
        if count != 0 || range.start != 0 {
            return Err(Error::Misuse("one run, given once"));
        }
        assert_eq!(first, 0);
        let request = AllocationRequest {
            goal: 500,
            count: range.end,
            append_inode: None,
            privileged: false,
            is_for_extent_node: false,
        };
        let (start, blocks) = tx.allocate_blocks(request)?;
        Self([u32::try_from(start).unwrap(), blocks]).store(tx, inode)?;
        Ok(vec![MappedRun { from: 0, blocks, at: FsBlock(start), is_new: true }])
    }

    fn free_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<u64> {
        let [first, count] = self.0;
        let kept = range.start.min(count);
        tx.free_blocks(u64::from(first) + u64::from(kept), count - kept)?;
        Self([first, kept]).store(tx, inode)?;
        Ok(u64::from(count - kept))
    }
}

#[test]
fn custom_map_works_through_map_trait() {
    let volume = open_for_writing(formatted_disk(1024, 1 << 20));
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    let before = volume.space().free_blocks;
    let (map, taken) = volume
        .transact(|tx| {
            let taking = AllocationPolicy { is_append: false, privileged: false, unwritten: false };
            let taken = SingleRunMap::load(tx, file)?.map_blocks(tx, file, 0..40, taking)?;
            Ok((SingleRunMap::load(tx, file)?, taken))
        })
        .unwrap();
    let at = taken[0].at;
    assert_eq!((taken.len(), taken[0].blocks), (1, 40));
    assert_eq!(volume.space().free_blocks, before - 40);
    let (super_, store) = (volume.superblock(), &volume.reader.store);
    with_source(store, super_, map.role(FileId { inode: file.0, generation: 0 }), |source| {
        let runs = scan_map(&map, source, FileBlock(0), FileBlock(100)).unwrap();
        let all: Vec<Run> = runs.between(FileBlock(0), FileBlock(100)).collect();
        let there = Run { from: FileBlock(0), blocks: 40, location: BlockLocation::Mapped(at) };
        let hole = Run { from: FileBlock(40), blocks: 60, location: BlockLocation::Hole };
        assert_eq!(all, [there, hole]);
        let end = hole_end(&map, source, FileBlock(50)).unwrap();
        assert_eq!(end, Some(FileBlock(u32::MAX)));
        assert_eq!(hole_end(&map, source, FileBlock(39)).unwrap(), None);
    });
    let freed = volume
        .transact(|tx| SingleRunMap::load(tx, file)?.free_range(tx, file, 10..u32::MAX))
        .unwrap();
    assert_eq!((freed, volume.space().free_blocks), (30, before - 10));
    let freed = volume
        .transact(|tx| SingleRunMap::load(tx, file)?.free_range(tx, file, 0..u32::MAX))
        .unwrap();
    assert_eq!((freed, volume.space().free_blocks), (10, before));
}

/// Counts the results of walking a real map.
#[derive(Default)]
struct CountingVisitor {
    blocks: u64,
    nodes: Vec<MapNode>,
    descends: bool,
}

impl MapVisitor for CountingVisitor {
    fn visit_run(&mut self, _: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        self.blocks += if matches!(place, BlockLocation::Mapped(_)) { blocks } else { 0 };
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        self.nodes.push(node);
        self.descends
    }
}

#[test]
fn walk_descends_only_if_visitor_allows() {
    let volume = open_for_writing(formatted_disk(1024, 2 << 20));
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    volume.write(file, 0, &vec![1; 600 << 10]).unwrap();
    let walk = |range: Range<u64>, descends| {
        let mut count = CountingVisitor { descends, ..CountingVisitor::default() };
        volume.transact(|tx| tx.walk(file, range.clone(), &mut count)).unwrap();
        (count.blocks, count.nodes.len())
    };
    // 12 direct, 256 below one block, the rest below a second and its two children.
    assert_eq!(walk(0..600, true), (600, 4));
    assert_eq!(walk(0..u64::from(u32::MAX), false), (12, 2));
    assert_eq!(walk(5..20, true), (15, 1));
    assert_eq!(walk(600..601, true), (0, 2));
    volume.close().unwrap();
}
