//! Block maps of files.
//!
//! ```text
//!   file blocks  | segment 0: runs | segment 1: runs | ..      4,096 blocks each
//!                      ▲ block-map cache
//!   on disk      twelve direct pointers, then trees of indirect blocks; or a tree of extents
//! ```
//! A [`BlockMap`] is either; the code outside this module does not depend on the format.
//!
//! Law 1: a map is read and cached in segments, so no file uses more memory than the cache allows,
//! whatever it claims.
//! Law 2: an invalid pointer damages the file blocks that it covers and no others.

pub(crate) mod edit;
pub(crate) mod extents;
pub(crate) mod pointers;
#[cfg(test)]
mod tests;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::blocks::BlockStore;
use crate::blocks::role::Role;
use crate::cache::CacheWeight;
use crate::format::inode::{DIRECT_POINTERS, Inode};
use crate::format::superblock::Superblock;
use crate::{Error, FileBlock, FileId, FsBlock, Result, SharedBytes};
use extents::Extents;
use pointers::{PointerLocation, Pointers};

/// File blocks of one cached map segment.
pub const SEGMENT_BLOCKS: u32 = 4096;
/// Runs per weight unit of the block-map cache.
const RUNS_PER_CACHE_ENTRY: usize = 64;

/// Location of a run of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockLocation {
    /// Not allocated: reads as zeros.
    Hole,
    /// Allocated on the device, from this block on.
    Mapped(FsBlock),
    /// Allocated from this block on and unwritten: reads as zeros.
    Unwritten(FsBlock),
    /// Unknown: this pointer is invalid.
    Damaged(FsBlock),
}

/// File blocks that are contiguous on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// First file block.
    pub from: FileBlock,
    /// Number of blocks.
    pub blocks: u32,
    /// Location of the blocks.
    pub location: BlockLocation,
}

impl Run {
    /// Returns the file block after the last one.
    pub fn end(&self) -> FileBlock {
        self.from.offset(self.blocks)
    }

    /// Returns the part of the run from `from` to `end`, if there is one.
    pub fn clip(&self, from: FileBlock, end: FileBlock) -> Option<Self> {
        let (start, end) = (self.from.max(from), self.end().min(end));
        let blocks = end.0.checked_sub(start.0).filter(|blocks| *blocks > 0)?;
        let skipped = u64::from(start.0.saturating_sub(self.from.0));
        let location = match self.location {
            BlockLocation::Mapped(first) => BlockLocation::Mapped(first.offset(skipped)),
            BlockLocation::Unwritten(first) => BlockLocation::Unwritten(first.offset(skipped)),
            other => other,
        };
        Some(Self { from: start, blocks, location })
    }
}

/// Runs in file order without gaps, merged where contiguous.
#[derive(Debug, Default)]
pub(crate) struct RunList(Vec<Run>);

impl RunList {
    fn push(&mut self, run: Run) {
        if run.blocks == 0 {
            return;
        }
        if let Some(last) = self.0.last_mut() {
            let joins = match (last.location, run.location) {
                (BlockLocation::Hole, BlockLocation::Hole) => true,
                (BlockLocation::Mapped(first), BlockLocation::Mapped(next))
                | (BlockLocation::Unwritten(first), BlockLocation::Unwritten(next)) => {
                    first.offset(u64::from(last.blocks)) == next
                }
                _ => false,
            };
            if joins {
                last.blocks = last.blocks.saturating_add(run.blocks);
                return;
            }
        }
        self.0.push(run);
    }

    /// Returns the runs between two blocks, clipped to them.
    pub(crate) fn between(
        &self,
        from: FileBlock,
        end: FileBlock,
    ) -> impl Iterator<Item = Run> + '_ {
        let first = self.0.partition_point(|run| run.end() <= from);
        let runs = self.0.get(first..).unwrap_or_default();
        runs.iter().map_while(move |run| run.clip(from, end))
    }

    /// Returns true if the runs are only a hole.
    pub(crate) fn is_hole(&self) -> bool {
        self.0.iter().all(|run| run.location == BlockLocation::Hole)
    }
}

impl BlockLocation {
    /// Returns true if the blocks read as zeros.
    pub const fn is_zeros(self) -> bool {
        matches!(self, Self::Hole | Self::Unwritten(_))
    }
}

impl CacheWeight for Arc<RunList> {
    fn weight(&self) -> u64 {
        (self.0.len() / RUNS_PER_CACHE_ENTRY).saturating_add(1) as u64
    }
}

/// Key of a map segment in the block-map cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SegmentKey {
    pub(crate) inode: u32,
    pub(crate) segment: u32,
}

/// Returns true if the inode alone maps all blocks up to `end`.
pub(crate) fn is_mapped_by_inode(inode: &Inode, end: FileBlock) -> bool {
    match map_of(inode) {
        Ok(EitherBlockMap::Extents(extents)) => extents.root().is_ok_and(|root| root.depth == 0),
        _ => end.0 <= DIRECT_POINTERS,
    }
}

/// Returns the first block of a file on the device, or of its map; `None` without any.
pub(crate) fn first_block(inode: &Inode) -> Option<FsBlock> {
    match map_of(inode).ok()? {
        EitherBlockMap::Extents(extents) => extents.first_block(),
        EitherBlockMap::Pointers(Pointers(pointers)) => {
            let first = pointers.iter().find(|pointer| **pointer != 0)?;
            Some(FsBlock(u64::from(*first)))
        }
    }
}

/// Source of map blocks for a walk.
pub struct MapSource<'a> {
    /// Block size of the volume.
    pub block_bytes: u32,
    /// Valid targets of pointers.
    pub blocks: Range<u64>,
    /// Reads a map block; `None` after the end of the disk.
    pub read: &'a dyn Fn(FsBlock) -> Result<Option<SharedBytes>>,
}

/// A block of the map itself, and the location of the pointer to it.
#[derive(Clone, Copy, Debug)]
pub struct MapNode {
    /// The block.
    pub block: FsBlock,
    pub(crate) pointer: PointerLocation,
}

/// Visitor of a map walk, called in file order.
pub trait MapVisitor {
    /// Visits `blocks` file blocks from `at` on; breaks to end the walk.
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()>;

    /// Visits a map block; returns true to walk below it.
    fn visit_node(&mut self, _: MapNode) -> bool {
        true
    }
}

/// Block map of a file, as readers see it; `edit::MapEditor` changes it. Every lookup uses
/// [`BlockMap::walk`]: reads, changes, commit order, the checker.
pub trait BlockMap {
    /// Returns the role of its blocks.
    fn role(&self, file: FileId) -> Role;

    /// Visits the part of the map in `range`, in file order: holes, blocks, damage, and each map
    /// block before its children.
    ///
    /// # Errors
    /// Errors of reading a map block.
    fn walk(
        &self,
        source: &MapSource<'_>,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()>;
}

/// Returns the map of an inode.
///
/// # Errors
/// [`Error::Unsupported`] if the map is not readable.
pub fn map_of(inode: &Inode) -> Result<EitherBlockMap<'_>> {
    inode.check_readable()?;
    map_of_any(inode)
}

/// [`map_of`] for callers that do not read data: encrypted files have a map, too.
///
/// # Errors
/// As [`map_of`].
pub fn map_of_any(inode: &Inode) -> Result<EitherBlockMap<'_>> {
    if inode.is_inline() {
        return Err(Error::Misuse("contents inside an inode have no map"));
    }
    Ok(if inode.has_extents() {
        EitherBlockMap::Extents(Extents::new(&inode.pointers))
    } else {
        EitherBlockMap::Pointers(Pointers(&inode.pointers))
    })
}

/// Returns the maximum size of a file with a map of this kind.
pub fn max_file_bytes(block_bytes: u32, has_extents: bool) -> u64 {
    match has_extents {
        true => (1u64 << 32).saturating_mul(block_bytes.into()).saturating_sub(1),
        false => pointers::max_mapped_blocks(block_bytes).saturating_mul(block_bytes.into()),
    }
}

/// A block map of either kind.
#[derive(Debug)]
pub enum EitherBlockMap<'a> {
    Pointers(Pointers<'a>),
    Extents(Extents),
}

impl EitherBlockMap<'_> {
    fn map(&self) -> &dyn BlockMap {
        match self {
            Self::Pointers(map) => map,
            Self::Extents(map) => map,
        }
    }
}

impl BlockMap for EitherBlockMap<'_> {
    fn role(&self, file: FileId) -> Role {
        self.map().role(file)
    }

    fn walk(
        &self,
        source: &MapSource<'_>,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()> {
        self.map().walk(source, range, visit)
    }
}

/// Runs `walk` with a [`MapSource`] for readers: an unreadable map block damages the blocks below
/// it.
pub(crate) fn with_source<T>(
    store: &BlockStore,
    super_: &Superblock,
    role: Role,
    walk: impl FnOnce(&MapSource<'_>) -> T,
) -> T {
    let read = |block: FsBlock| match store.block(block, role) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Error::Corrupt { .. }) => Ok(None),
        Err(other) => Err(other),
    };
    let blocks = u64::from(super_.first_data_block).saturating_add(1)..super_.blocks;
    walk(&MapSource { block_bytes: super_.block_bytes, blocks, read: &read })
}

impl MapVisitor for RunList {
    fn visit_run(&mut self, at: u64, blocks: u64, location: BlockLocation) -> ControlFlow<()> {
        // The requested range ends at a 32-bit file block, so these fit.
        if let (Ok(from), Ok(blocks)) = (u32::try_from(at), u32::try_from(blocks)) {
            self.push(Run { from: FileBlock(from), blocks, location });
        }
        ControlFlow::Continue(())
    }
}

/// Maps the blocks from `from` to `end`.
pub(crate) fn scan_map(
    map: &impl BlockMap,
    source: &MapSource<'_>,
    from: FileBlock,
    end: FileBlock,
) -> Result<RunList> {
    let mut runs = RunList::default();
    map.walk(source, u64::from(from.0)..u64::from(end.0), &mut runs)?;
    // A cached segment has no spare capacity.
    runs.0.shrink_to_fit();
    Ok(runs)
}

/// Returns the end of the hole at `at`, if one step of the walk shows it: sparse files mostly lack
/// whole subtrees.
pub(crate) fn hole_end(
    map: &impl BlockMap,
    source: &MapSource<'_>,
    at: FileBlock,
) -> Result<Option<FileBlock>> {
    struct FirstMapped(Option<u64>);
    impl MapVisitor for FirstMapped {
        fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
            self.0 = (place == BlockLocation::Hole).then_some(at.saturating_add(blocks));
            ControlFlow::Break(())
        }
    }
    let mut first = FirstMapped(None);
    map.walk(source, u64::from(at.0)..u64::from(u32::MAX), &mut first)?;
    Ok(first.0.and_then(|end| u32::try_from(end).ok()).map(FileBlock))
}
