//! Where the blocks of a file are.
//!
//! ```text
//!   file blocks  | segment 0: runs | segment 1: runs | ..      4,096 blocks each
//!                      ▲ block-map cache
//!   on disk      twelve direct pointers, then trees of indirect blocks (extents: ext4)
//! ```
//! Law 1: a map is made and cached in segments, so no file costs more memory than the
//! cache allows, whatever it claims.
//! Law 2: a pointer that leads nowhere damages the blocks it stands for and no others.

pub(crate) mod build;
pub(crate) mod edit;
pub(crate) mod indirect;

use std::sync::Arc;

use crate::blocks::Store;
use crate::cache::Weigh;
use crate::format::inode::{DIRECT, Inode};
use crate::{FileBlock, FsBlock, Result};

use crate::format::superblock::Superblock;

/// Blocks of a file whose map is cached together.
pub(crate) const SEGMENT_BLOCKS: u32 = 4096;
/// Runs that weigh as one entry of the block-map cache.
const RUNS_PER_ENTRY: usize = 64;

/// Where a run of blocks is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Nowhere: it reads as zeros.
    Hole,
    /// On the device, from this block on.
    At(FsBlock),
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
    pub place: Place,
}

impl Run {
    /// The block after the last one.
    pub fn end(&self) -> FileBlock {
        self.from.after(self.blocks)
    }

    /// The part of the run from `from` up to `end`, if there is one.
    pub fn clip(&self, from: FileBlock, end: FileBlock) -> Option<Self> {
        let (start, end) = (self.from.max(from), self.end().min(end));
        let blocks = end.0.checked_sub(start.0).filter(|blocks| *blocks > 0)?;
        let skipped = u64::from(start.0.saturating_sub(self.from.0));
        let place = match self.place {
            Place::At(first) => Place::At(first.after(skipped)),
            other => other,
        };
        Some(Self { from: start, blocks, place })
    }
}

/// Runs in the order of the file, without gaps, merged where they touch.
#[derive(Debug, Default)]
pub(crate) struct Runs(Vec<Run>);

impl Runs {
    fn push(&mut self, run: Run) {
        if run.blocks == 0 {
            return;
        }
        if let Some(last) = self.0.last_mut() {
            let joins = match (last.place, run.place) {
                (Place::Hole, Place::Hole) => true,
                (Place::At(first), Place::At(next)) => first.after(u64::from(last.blocks)) == next,
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
        self.0.iter().all(|run| run.place == Place::Hole)
    }
}

impl Weigh for Arc<Runs> {
    fn weight(&self) -> u64 {
        (self.0.len() / RUNS_PER_ENTRY).saturating_add(1) as u64
    }
}

/// Names a segment of a file in the block-map cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct SegmentKey {
    pub(crate) inode: u32,
    pub(crate) segment: u32,
}

/// Whether the inode itself holds all pointers up to `end`.
pub(crate) fn is_direct(end: FileBlock) -> bool {
    end.0 <= DIRECT
}

/// Maps the blocks from `from` up to `end`.
pub(crate) fn scan(
    store: &Store,
    super_: &Superblock,
    inode: &Inode,
    from: FileBlock,
    end: FileBlock,
) -> Result<Runs> {
    inode.readable()?;
    let mut runs = Runs::default();
    indirect::scan(store, super_, inode, from, end, &mut runs)?;
    // A cached segment keeps no spare room.
    runs.0.shrink_to_fit();
    Ok(runs)
}

/// Where the hole around `at` ends, if pointers show one at a glance: sparse files are
/// mostly trees that are not there.
pub(crate) fn hole_end(
    store: &Store,
    super_: &Superblock,
    inode: &Inode,
    at: FileBlock,
) -> Result<Option<FileBlock>> {
    inode.readable()?;
    indirect::hole_end(store, super_, inode, at)
}
