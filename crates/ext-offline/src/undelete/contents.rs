//! Contents of a deleted inode: its block map as it was, its attributes, what is inside it.
//!
//! Law 1: a map block is taken from the journal, in its newest copy that is not newer than the
//! inode; else from its place, if no newer copy says that the place has changed.
//! Law 2: a map block of which no checksum says that it is this file's makes its file depend on
//! that block: [`FileMap::dependencies`].
//! Law 3: all files together visit no more map blocks than the volume has blocks.

use std::collections::HashSet;
use std::ops::ControlFlow;

use draconis_types::FileType;

use super::Limits;
use super::history::{History, NOW};
use super::inodes::{DeletedInode, lost};
use crate::blocks::data::SharedBytes;
use crate::blocks::role::Role;
use crate::format::acl;
use crate::format::features::Incompatible;
use crate::format::inline::InlineData;
use crate::format::inode::Inode;
use crate::format::xattr::XattrList;
use crate::map::pointers::max_mapped_blocks;
use crate::map::{self, BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, Run};
use crate::reader::VolumeReader;
use crate::units::saturating_u32;
use crate::{FileBlock, FsBlock, Result};

/// Block map of a deleted inode.
#[derive(Debug, Default)]
pub(super) struct FileMap {
    /// Runs other than holes, in file order.
    pub(super) runs: Vec<Run>,
    /// Map blocks that were read from their place and have no checksum of this file.
    pub(super) dependencies: Vec<FsBlock>,
    /// True if a part of the map was not read.
    pub(super) is_cut_short: bool,
}

/// Budget of all walks.
#[derive(Debug)]
pub(super) struct WalkBudget {
    nodes: u64,
    runs: usize,
}

impl WalkBudget {
    pub(super) fn new(reader: &VolumeReader, limits: &Limits) -> Self {
        Self { nodes: reader.super_.blocks.min(reader.disk_blocks()), runs: limits.max_runs }
    }
}

/// Access to states of blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct HistoricReader<'a> {
    pub(super) reader: &'a VolumeReader,
    pub(super) history: &'a History,
}

impl HistoricReader<'_> {
    /// Returns the block map of a deleted inode; an empty one if it has none.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn map(&self, of: &DeletedInode, budget: &mut WalkBudget) -> Result<FileMap> {
        let (inode, super_) = (&of.inode, &self.reader.super_);
        let map = FileMap::default();
        let mut walk = MapWalk { map, visited: HashSet::new(), budget, end: 0, blocks: 0 };
        if !inode.has_map(super_) {
            return Ok(walk.map);
        }
        let Ok(map) = map::map_of_any(inode) else {
            walk.map.is_cut_short = true;
            return Ok(walk.map);
        };
        let role = map.role(inode.file_id());
        let dependencies = std::cell::RefCell::new(vec![]);
        let read = |block: FsBlock| {
            let (bytes, is_certain) = self.block(block, role, of)?;
            if !is_certain && bytes.is_some() {
                dependencies.borrow_mut().push(block);
            }
            Ok(bytes)
        };
        let blocks = u64::from(super_.first_data_block).saturating_add(1)..super_.blocks;
        let source = MapSource { block_bytes: super_.block_bytes, blocks, read: &read };
        // Also what is allocated beyond the end: all of it must add up.
        let reach = match inode.has_extents() {
            true => 1 << 32,
            false => max_mapped_blocks(super_.block_bytes).min(1 << 32),
        };
        walk.end = inode.size_bytes.div_ceil(u64::from(super_.block_bytes).max(1));
        map.walk(&source, 0..reach, &mut walk)?;
        walk.map.is_cut_short |= !self.has_right_count(inode, walk.blocks);
        let mut map = walk.map;
        map.dependencies = dependencies.into_inner();
        map.runs.shrink_to_fit();
        Ok(map)
    }

    /// Returns true if an inode counts so many blocks of its map and contents, as far as that is
    /// comparable. Another number says that parts of the map are of another time.
    fn has_right_count(&self, inode: &Inode, blocks: u64) -> bool {
        let super_ = &self.reader.super_;
        if super_.cluster_blocks > 1 || super_.incompatible.contains(Incompatible::EA_INODE) {
            return true;
        }
        let blocks = blocks.saturating_add(u64::from(inode.xattr_block.is_some()));
        let sectors = blocks.saturating_mul(u64::from(super_.block_bytes / 512));
        inode.attributes(super_).blocks_512 == sectors
    }

    /// Returns a metadata block as it was when the inode was last seen, and whether it is certain
    /// that it belongs to the file. `None` if it was changed since.
    fn block(
        &self,
        block: FsBlock,
        role: Role,
        of: &DeletedInode,
    ) -> Result<(Option<SharedBytes>, bool)> {
        let (copy, has_newer) = self.history.newest_until(block.0, of.last_seen());
        let bytes = match copy {
            Some(copy) if of.last_seen() != NOW => self.history.read(copy)?,
            _ => match self.reader.store.block(block, Role::Contents) {
                Ok(bytes) => bytes,
                Err(crate::Error::Corrupt { .. }) => return Ok((None, false)),
                Err(other) => return Err(other),
            },
        };
        if copy.is_none() && has_newer {
            return Ok((None, false));
        }
        let has_checksum = self.reader.store.has_checksums()
            && matches!(role, Role::ExtentNode(_) | Role::Directory(_) | Role::XattrBlock);
        if has_checksum {
            let is_sound = self.reader.store.verify_checksum(block, role, &bytes).is_ok();
            return Ok((is_sound.then_some(bytes), true));
        }
        let is_copy = copy.is_some() && of.last_seen() != NOW;
        Ok((Some(bytes), is_copy || of.is_orphan))
    }

    /// Returns the contents of an inode that are inside it: of an inline file, a device (none) or a
    /// fast symbolic link.
    pub(super) fn inline(&self, of: &DeletedInode, map: &FileMap) -> Option<Vec<u8>> {
        let inode = &of.inode;
        if let Some(target) = inode.fast_symlink_target(&self.reader.super_) {
            return Some(target);
        }
        if inode.kind == FileType::Symlink {
            return self.journaled_target(of, map);
        }
        if !inode.is_inline() || inode.kind != FileType::File {
            return None;
        }
        let inline = inline_data(of)?;
        let len = usize::try_from(inode.size_bytes).ok()?;
        // Bytes beyond both parts are zeros; a size that needs more of them than a slot has is damage.
        if len > inline.len().saturating_add(of.slot.len()) {
            return None;
        }
        let mut bytes = vec![0; len];
        inline.read(0, &mut bytes);
        Some(bytes)
    }

    /// Returns the target of a symbolic link whose block is in the journal, as newer drivers write it.
    fn journaled_target(&self, of: &DeletedInode, map: &FileMap) -> Option<Vec<u8>> {
        let BlockLocation::Mapped(block) = map.runs.first()?.location else { return None };
        let (copy, _) = self.history.newest_until(block.0, of.last_seen());
        let bytes = self.history.read(copy.filter(|copy| copy.rank >= of.seen.0)?).ok()?;
        let len = usize::try_from(of.inode.size_bytes).ok()?;
        bytes.get(..len).map(<[u8]>::to_vec)
    }

    /// Returns the extended attributes of a deleted inode.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for attributes that cannot be found any more.
    pub(super) fn xattrs(&self, of: &DeletedInode) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut found = vec![];
        let mut add = |list: XattrList<'_>| -> Result<()> {
            for attribute in list {
                let attribute = attribute?;
                if attribute.is_inline_data() {
                    continue;
                }
                let value = attribute.value()?;
                let value = if attribute.is_acl() { acl::to_linux(value)? } else { value.to_vec() };
                found.push((attribute.name(), value));
            }
            Ok(())
        };
        if let Some(body) = of.attribute_bytes() {
            add(XattrList::from_inode(body))?;
        }
        if let Some(at) = of.inode.xattr_block {
            let is_valid = self.reader.super_.is_valid_block(at);
            let read = if is_valid { self.block(at, Role::XattrBlock, of)? } else { (None, false) };
            let (Some(block), true) = read else { return Err(lost(&of.inode).with_block(at)) };
            add(XattrList::from_block(&block)?)?;
        }
        Ok(found)
    }
}

/// Returns the inline data of a deleted inode.
pub(super) fn inline_data(of: &DeletedInode) -> Option<InlineData> {
    let list = XattrList::from_inode(of.attribute_bytes()?);
    let data = list.flatten().find(|attribute| attribute.is_inline_data())?;
    Some(InlineData::new(&of.inode.pointer_bytes(), data.value().ok()?))
}

struct MapWalk<'a> {
    map: FileMap,
    visited: HashSet<u64>,
    budget: &'a mut WalkBudget,
    /// Blocks of the file.
    end: u64,
    /// Blocks of the map and of what it maps.
    blocks: u64,
}

impl MapVisitor for MapWalk<'_> {
    fn visit_run(&mut self, at: u64, blocks: u64, location: BlockLocation) -> ControlFlow<()> {
        if location == BlockLocation::Hole {
            return ControlFlow::Continue(());
        }
        self.blocks = self.blocks.saturating_add(blocks);
        let blocks = blocks.min(self.end.saturating_sub(at));
        if blocks == 0 {
            return ControlFlow::Continue(());
        }
        let Some(left) = self.budget.runs.checked_sub(1) else {
            self.map.is_cut_short = true;
            return ControlFlow::Break(());
        };
        self.budget.runs = left;
        let (from, blocks) = (FileBlock(saturating_u32(at)), saturating_u32(blocks));
        self.map.runs.push(Run { from, blocks, location });
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        let goes_on = self.budget.nodes > 0 && self.visited.insert(node.block.0);
        self.blocks = self.blocks.saturating_add(1);
        self.budget.nodes = self.budget.nodes.saturating_sub(1);
        self.map.is_cut_short |= !goes_on;
        goes_on
    }
}
