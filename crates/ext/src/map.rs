//! Where the blocks of a file are.
//!
//! ```text
//!   file blocks  | segment 0: runs | segment 1: runs | ..      4,096 blocks each
//!                      ▲ block-map cache
//!   on disk      twelve direct pointers, then trees of indirect blocks; or a tree of extents
//! ```
//! A [`Map`] is either; nothing outside of this folder knows how a map is made.
//!
//! Law 1: a map is made and cached in segments, so no file costs more memory than the
//! cache allows, whatever it claims.
//! Law 2: a pointer that leads nowhere damages the blocks it stands for and no others.

pub(crate) mod build;
pub(crate) mod build_extents;
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
use crate::format::inode::{DIRECT, Inode};
use crate::format::superblock::Superblock;
use crate::transaction::Transaction;
use crate::{Error, FileBlock, FileId, FsBlock, InodeNumber, Result, SharedBytes};
use edit::{AllocationPolicy, MappedRun};
use extents::Extents;
use pointers::{PointerLocation, Pointers};

/// Blocks of a file whose map is cached together.
pub(crate) const SEGMENT_BLOCKS: u32 = 4096;
/// Runs that weigh as one entry of the block-map cache.
const RUNS_PER_CACHE_ENTRY: usize = 64;

/// Where a run of blocks is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockLocation {
    /// Nowhere: it reads as zeros.
    Hole,
    /// On the device, from this block on.
    Mapped(FsBlock),
    /// Kept for the file on the device, from this block on: it reads as zeros.
    Unwritten(FsBlock),
    /// Unknown: this pointer leads nowhere.
    Damaged(FsBlock),
}

/// Blocks of a file that follow each other on the device, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first block in the file.
    pub from: FileBlock,
    /// How many.
    pub blocks: u32,
    /// Where they are.
    pub place: BlockLocation,
}

impl Run {
    /// The block after the last one.
    pub fn end(&self) -> FileBlock {
        self.from.offset(self.blocks)
    }

    /// The part of the run from `from` up to `end`, if there is one.
    pub fn clip(&self, from: FileBlock, end: FileBlock) -> Option<Self> {
        let (start, end) = (self.from.max(from), self.end().min(end));
        let blocks = end.0.checked_sub(start.0).filter(|blocks| *blocks > 0)?;
        let skipped = u64::from(start.0.saturating_sub(self.from.0));
        let place = match self.place {
            BlockLocation::Mapped(first) => BlockLocation::Mapped(first.offset(skipped)),
            BlockLocation::Unwritten(first) => BlockLocation::Unwritten(first.offset(skipped)),
            other => other,
        };
        Some(Self { from: start, blocks, place })
    }
}

/// Runs in the order of the file, without gaps, merged where they touch.
#[derive(Debug, Default)]
pub(crate) struct RunList(Vec<Run>);

impl RunList {
    fn push(&mut self, run: Run) {
        if run.blocks == 0 {
            return;
        }
        if let Some(last) = self.0.last_mut() {
            let joins = match (last.place, run.place) {
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

    /// The runs between two blocks, cut to them.
    pub(crate) fn between(
        &self,
        from: FileBlock,
        end: FileBlock,
    ) -> impl Iterator<Item = Run> + '_ {
        let first = self.0.partition_point(|run| run.end() <= from);
        let runs = self.0.get(first..).unwrap_or_default();
        runs.iter().map_while(move |run| run.clip(from, end))
    }

    /// Whether there is nothing but a hole.
    pub(crate) fn is_hole(&self) -> bool {
        self.0.iter().all(|run| run.place == BlockLocation::Hole)
    }
}

impl BlockLocation {
    /// Whether what is there reads as zeros.
    pub const fn is_zeros(self) -> bool {
        matches!(self, Self::Hole | Self::Unwritten(_))
    }
}

impl CacheWeight for Arc<RunList> {
    fn weight(&self) -> u64 {
        (self.0.len() / RUNS_PER_CACHE_ENTRY).saturating_add(1) as u64
    }
}

/// Names a segment of a file in the block-map cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SegmentKey {
    pub(crate) inode: u32,
    pub(crate) segment: u32,
}

/// Whether the inode itself says where all blocks up to `end` are.
pub(crate) fn is_direct(inode: &Inode, end: FileBlock) -> bool {
    match map_of(inode) {
        Ok(AnyMap::Extents(extents)) => extents.root().is_ok_and(|root| root.depth == 0),
        _ => end.0 <= DIRECT,
    }
}

/// The first block of a file on the device, or of its map; `None` without any.
pub(crate) fn first_block(inode: &Inode) -> Option<FsBlock> {
    match map_of(inode).ok()? {
        AnyMap::Extents(extents) => extents.first_block(),
        AnyMap::Pointers(Pointers(pointers)) => {
            let first = pointers.iter().find(|pointer| **pointer != 0)?;
            Some(FsBlock(u64::from(*first)))
        }
    }
}

/// What a walk reads from.
pub(crate) struct MapSource<'a> {
    pub(crate) block_bytes: u32,
    /// The blocks that a map may lead to.
    pub(crate) blocks: Range<u64>,
    /// A block of a map; `None` where the disk has ended already.
    pub(crate) read: &'a dyn Fn(FsBlock) -> Result<Option<SharedBytes>>,
}

/// A block that belongs to a map itself, and where the pointer to it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapNode {
    pub(crate) block: FsBlock,
    pub(crate) pointer: PointerLocation,
}

/// What a walk does with what it finds, in the order of the file.
pub(crate) trait MapVisitor {
    /// `blocks` blocks of the file from `at` on; whether to go on.
    fn run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()>;

    /// A block of the map; whether to walk what it leads to.
    fn node(&mut self, _: MapNode) -> bool {
        true
    }
}

/// How the blocks of a file are found, given and taken. Everything that asks where blocks are
/// asks by [`Map::walk`]: reads, changes, the order of commits, the check.
pub(crate) trait Map {
    /// What its blocks are.
    fn role(&self, file: FileId) -> Role;

    /// Visits what of the map is in `range`, in the order of the file: holes, blocks, damage,
    /// and the blocks of the map itself before what they lead to.
    ///
    /// # Errors
    /// What reading a block of the map answers.
    fn walk(
        &self,
        source: &MapSource<'_>,
        range: Range<u64>,
        visit: &mut dyn MapVisitor,
    ) -> Result<()>;

    /// The blocks of a file in `range`, taken where there are none. They end early if space
    /// does.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if there is none for the first; damage.
    fn map_blocks(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>>;

    /// Sees to it that [`Map::unmap`] of a range in the middle of a file will not lack space.
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

    /// Lets the blocks of a file in `range` read as zeros, without writing them where the map can
    /// say so; without them where it cannot.
    ///
    /// # Errors
    /// [`Error::NoSpace`], before anything changed; damage.
    fn zero_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        tx.unmap(inode, range)
    }

    /// Takes the blocks of a file in `range` away, and what of the map leads nowhere then; how
    /// many that were.
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

/// The map of an inode.
///
/// # Errors
/// [`Error::Unsupported`] if this is none that can be read.
pub(crate) fn map_of(inode: &Inode) -> Result<AnyMap<'_>> {
    inode.readable()?;
    map_of_any(inode)
}

/// [`of`] for those who look at no contents: what is encrypted has a map, too.
///
/// # Errors
/// As [`of`].
pub(crate) fn map_of_any(inode: &Inode) -> Result<AnyMap<'_>> {
    match inode.readable() {
        Ok(()) | Err(Error::NoKey) => {}
        Err(other) => return Err(other),
    }
    if inode.is_inline() {
        return Err(Error::Misuse("contents inside an inode have no map"));
    }
    Ok(if inode.has_extents() {
        AnyMap::Extents(Extents::new(&inode.pointers))
    } else {
        AnyMap::Pointers(Pointers(&inode.pointers))
    })
}

/// The maps there are.
#[derive(Debug)]
pub(crate) enum AnyMap<'a> {
    Pointers(Pointers<'a>),
    Extents(Extents),
}

impl AnyMap<'_> {
    fn map(&self) -> &dyn Map {
        match self {
            Self::Pointers(map) => map,
            Self::Extents(map) => map,
        }
    }
}

impl Map for AnyMap<'_> {
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

    fn map_blocks(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
        taking: AllocationPolicy,
    ) -> Result<Vec<MappedRun>> {
        self.map().map_blocks(tx, inode, range, taking)
    }

    fn zero_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        self.map().zero_range(tx, inode, range)
    }

    fn ensure_space_for_hole(
        &self,
        tx: &Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<()> {
        self.map().ensure_space_for_hole(tx, inode, range)
    }

    fn free_range(
        &self,
        tx: &mut Transaction<'_>,
        inode: InodeNumber,
        range: Range<u32>,
    ) -> Result<u64> {
        self.map().free_range(tx, inode, range)
    }
}

/// [`Source`] of what readers see: a block that is not there damages what hangs on it.
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
    fn run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        // What is asked for ends at a file block: all of it is below that.
        if let (Ok(from), Ok(blocks)) = (u32::try_from(at), u32::try_from(blocks)) {
            self.push(Run { from: FileBlock(from), blocks, place });
        }
        ControlFlow::Continue(())
    }
}

/// Maps the blocks from `from` up to `end`.
pub(crate) fn scan(
    map: &impl Map,
    source: &MapSource<'_>,
    from: FileBlock,
    end: FileBlock,
) -> Result<RunList> {
    let mut runs = RunList::default();
    map.walk(source, u64::from(from.0)..u64::from(end.0), &mut runs)?;
    // A cached segment keeps no spare room.
    runs.0.shrink_to_fit();
    Ok(runs)
}

/// Where the hole around `at` ends, if the map shows one at a glance: sparse files are mostly
/// trees that are not there.
pub(crate) fn hole_end(
    map: &impl Map,
    source: &MapSource<'_>,
    at: FileBlock,
) -> Result<Option<FileBlock>> {
    struct First(Option<u64>);
    impl MapVisitor for First {
        fn run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
            self.0 = (place == BlockLocation::Hole).then_some(at.saturating_add(blocks));
            ControlFlow::Break(())
        }
    }
    let mut first = First(None);
    map.walk(source, u64::from(at.0)..u64::from(u32::MAX), &mut first)?;
    Ok(first.0.and_then(|end| u32::try_from(end).ok()).map(FileBlock))
}
