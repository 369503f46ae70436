//! Relocation of changed directories, so that each changes by one sector.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use crate::alloc::AllocationRequest;
use crate::blocks::role::Role;
use crate::blocks::write_back::{Buffer, BufferState};
use crate::format::inode_slot::InodeDiff;
use crate::map::{BlockLocation, MapNode, MapVisitor};
use crate::transaction::Transaction;
use crate::units::saturating_usize;
use crate::{Error, FsBlock, InodeNumber, Result};

/// Unit that a disk writes atomically.
const SECTOR_BYTES: usize = 512;

/// Blocks of a directory that may have to be relocated.
struct DirectoryBlocks {
    /// Changed blocks of the directory and its map.
    changed: BTreeSet<u64>,
    /// Changed blocks in the directory's map: logical and physical block.
    names: Vec<(u64, FsBlock)>,
    /// Blocks of its extent tree or indirect map.
    map_nodes: Vec<MapNode>,
    damaged: Option<FsBlock>,
}

impl MapVisitor for DirectoryBlocks {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        match place {
            BlockLocation::Hole | BlockLocation::Unwritten(_) => {}
            BlockLocation::Mapped(first) => {
                let all = (0..blocks).map(|nth| (at.saturating_add(nth), first.offset(nth)));
                self.names.extend(all.filter(|(_, block)| self.changed.contains(&block.0)));
            }
            BlockLocation::Damaged(block) => {
                self.damaged = Some(block);
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        self.map_nodes.push(node);
        true
    }
}

impl Transaction<'_> {
    /// Arranges that each directory changes by one sector, if the protocol needs it. Returns the
    /// directories whose inode or map switches to new blocks.
    pub(super) fn relocate_directories(&mut self) -> Result<HashSet<u32>> {
        let directories = self.writer.protocol.single_sector_directories();
        let mut switched = HashSet::new();
        if directories.is_empty() {
            return Ok(switched);
        }
        let mut changed: HashMap<u32, Vec<u64>> = HashMap::new();
        {
            let blocks = self.volume.store.write_back.read();
            for block in &self.writer.batch.blocks {
                let Some(Buffer { state: BufferState::Modified(_), role, .. }) =
                    blocks.metadata.get(block)
                else {
                    continue;
                };
                if let Role::Directory(file) | Role::IndirectBlock(file) | Role::ExtentNode(file) =
                    role
                {
                    changed.entry(file.inode).or_default().push(*block);
                }
            }
        }
        for (dir, names) in directories {
            let mut own = changed.remove(&dir).unwrap_or_default();
            own.sort_unstable();
            own.dedup();
            let inode_switches = self.has_new_mapping(InodeNumber(dir))?;
            let mut map_switches = false;
            let mut sectors = usize::from(inode_switches);
            {
                let blocks = self.volume.store.write_back.read();
                for block in &own {
                    let Some(buffer) = blocks.metadata.get(block) else { continue };
                    let BufferState::Modified(base) = &buffer.state else { continue };
                    map_switches |=
                        matches!(buffer.role, Role::IndirectBlock(_) | Role::ExtentNode(_));
                    let pairs = base.chunks(SECTOR_BYTES).zip(buffer.current.chunks(SECTOR_BYTES));
                    sectors = sectors.saturating_add(pairs.filter(|(old, new)| old != new).count());
                }
            }
            let only_removals = !names.added && !inode_switches && !map_switches;
            let is_relocated = sectors > 1
                && !only_removals
                && self.relocate_directory_blocks(InodeNumber(dir), &own)?;
            if inode_switches || map_switches || is_relocated {
                switched.insert(dir);
            }
        }
        Ok(switched)
    }

    /// Returns true if the inode of a directory references other blocks than on disk.
    fn has_new_mapping(&self, dir: InodeNumber) -> Result<bool> {
        let (block, at) = self.inode_location(dir)?;
        let part = at..at.saturating_add(saturating_usize(self.volume.super_.inode_bytes.into()));
        let cache = self.volume.store.write_back.read();
        Ok(cache.inode_diff(block, part).is_some_and(InodeDiff::changes_mapping))
    }

    /// Relocates the changed blocks of a directory; returns `false` if there is no space.
    fn relocate_directory_blocks(&mut self, dir: InodeNumber, own: &[u64]) -> Result<bool> {
        // Each directory block may relocate three indirect blocks, too.
        let needed = (own.len() as u64).saturating_mul(4).saturating_add(3);
        if self.allocatable_blocks(true) < needed {
            return Ok(false);
        }
        let node = self.read_inode_unchecked(dir)?;
        let count = self.volume.directory_blocks(&node);
        let changed = own.iter().copied().collect();
        let mut found =
            DirectoryBlocks { changed, names: vec![], map_nodes: vec![], damaged: None };
        self.walk(dir, 0..count.into(), &mut found)?;
        if let Some(block) = found.damaged {
            return Err(Error::corrupt("block map: pointer").with_block(block).with_inode(dir));
        }
        for (at, block) in found.names {
            let new = self.relocate_block(block, self.directory_role(dir)?)?;
            let pointer = self.pointer_location(dir, at)?;
            self.set_pointer(dir, pointer, new)?;
        }
        // Children first: a block comes after its parent in the list.
        for MapNode { block, pointer } in found.map_nodes.into_iter().rev() {
            let is_changed = {
                let blocks = self.volume.store.write_back.read();
                let buffer = blocks.metadata.get(&block.0);
                buffer.is_some_and(|it| matches!(it.state, BufferState::Modified(_)))
            };
            if !is_changed {
                continue;
            }
            let new = self.relocate_block(block, self.map_role(dir)?)?;
            self.set_pointer(dir, pointer, new)?;
        }
        self.invalidate_map(dir, 0, count);
        self.volume.inodes.remove(dir.0);
        Ok(true)
    }

    /// Moves a changed block to a new place.
    fn relocate_block(&mut self, old: FsBlock, role: Role) -> Result<FsBlock> {
        let request = AllocationRequest {
            goal: old.0,
            count: 1,
            append_inode: None,
            privileged: true,
            is_for_extent_node: false,
        };
        let (new, _) = self.allocate_blocks(request)?;
        let now = self.block(old, role)?.to_vec();
        self.free_blocks(old.0, 1)?;
        self.put_new_block(FsBlock(new), role, now);
        Ok(FsBlock(new))
    }
}
