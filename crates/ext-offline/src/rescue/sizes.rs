//! The sizes of files: an end before the last block, or past all that a map reaches, is none.
//!
//! Law: sizes are what a repair makes of them, where no checksum says that they are right.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_types::FileType;

use super::Rescue;
use crate::format::features::ReadOnlyCompatible;
use crate::format::inode::{Inode, flags};
use crate::format::superblock::Superblock;
use crate::format::{le16, le32, put16, put32};
use crate::map::{
    BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, map_of_any, max_file_bytes,
};
use crate::reader::VolumeReader;
use crate::{FsBlock, InodeNumber, Result};

/// Offsets in an inode, and the size of the extra fields of a new one.
const DELETION_TIME_AT: usize = 20;
const SIZE_HIGH_AT: usize = 0x6C;
const EXTRA_SIZE_AT: usize = 128;
const EXTRA_BYTES: u16 = 32;

/// Files that are being cut: the list of orphans.
#[derive(Debug)]
pub(super) enum CutFiles {
    Listed(HashSet<u32>),
    /// A file of orphans names them, which is not read.
    Unknown,
}

impl CutFiles {
    pub(super) fn of(reader: &VolumeReader) -> Self {
        let super_ = &reader.super_;
        if super_.read_only_compatible.contains(ReadOnlyCompatible::ORPHAN_PRESENT) {
            return Self::Unknown;
        }
        let (mut listed, mut next) = (HashSet::new(), super_.last_orphan);
        // Each inode is listed once, so the loop ends.
        while next != 0 && listed.insert(next) {
            let slot = reader.inode_slot(InodeNumber(next)).ok();
            next = slot.and_then(|slot| le32(&slot, DELETION_TIME_AT)).unwrap_or(0);
        }
        Self::Listed(listed)
    }

    fn may_have(&self, inode: InodeNumber) -> bool {
        match self {
            Self::Listed(listed) => listed.contains(&inode.0),
            Self::Unknown => true,
        }
    }
}

/// Changes the fields of an inode with which it cannot be parsed, as a repair does.
pub(super) fn repair_fields(slot: &mut [u8], super_: &Superblock) {
    let end = slot.len().saturating_sub(EXTRA_SIZE_AT);
    let fits = |extra: u16| usize::from(extra) <= end && extra.is_multiple_of(4);
    if le16(slot, EXTRA_SIZE_AT).is_some_and(|extra| !fits(extra)) {
        let _ = put16(slot, EXTRA_SIZE_AT, EXTRA_BYTES);
    }
    let high = u64::from(le32(slot, SIZE_HIGH_AT).unwrap_or(0)) << 32;
    if high > max_file_bytes(super_.block_bytes, true) {
        let _ = put32(slot, SIZE_HIGH_AT, 0);
    }
}

impl Rescue {
    /// Returns the size of a file, or where its blocks end if that cannot be it.
    pub(super) fn likely_size(&self, inode: &Inode) -> u64 {
        let size = inode.size_bytes;
        let has_map = inode.kind == FileType::File && !inode.is_inline();
        if !has_map || inode.flags & flags::VERITY != 0 || self.cut_files.may_have(inode.number) {
            return size;
        }
        let block_bytes = self.volume.reader().super_.block_bytes;
        let is_possible = size <= max_file_bytes(block_bytes, inode.has_extents());
        let size = if is_possible { size } else { size & u64::from(u32::MAX) };
        let block_bytes = u64::from(block_bytes);
        let last = self.last_block(inode, size.div_ceil(block_bytes)).ok().flatten();
        match last {
            Some(last) if last.saturating_mul(block_bytes) > size => {
                last.saturating_add(1).saturating_mul(block_bytes)
            }
            _ => size,
        }
    }

    /// Returns the last written block of a file, from block `from` on.
    fn last_block(&self, inode: &Inode, from: u64) -> Result<Option<u64>> {
        let super_ = &self.volume.reader().super_;
        let map = map_of_any(inode)?;
        let role = map.role(inode.file_id());
        let read = |block: FsBlock| Ok(self.metadata(block, role).map(|(bytes, _)| bytes));
        let blocks = u64::from(super_.first_data_block).saturating_add(1)..super_.blocks;
        let source = MapSource { block_bytes: super_.block_bytes, blocks, read: &read };
        let end = max_file_bytes(super_.block_bytes, inode.has_extents());
        let end = end.div_ceil(super_.block_bytes.into());
        let mut found =
            LastBlock { last: None, nodes: HashSet::new(), nodes_left: &self.nodes_left };
        map.walk(&source, from..end.max(from), &mut found)?;
        Ok(found.last)
    }
}

/// The last written block of a map.
struct LastBlock<'a> {
    last: Option<u64>,
    nodes: HashSet<u64>,
    nodes_left: &'a AtomicU64,
}

impl MapVisitor for LastBlock<'_> {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        if let BlockLocation::Mapped(_) = place {
            self.last = self.last.max(Some(at.saturating_add(blocks).saturating_sub(1)));
        }
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        let one_less = |left: u64| left.checked_sub(1);
        let left = self.nodes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        left.is_ok() && self.nodes.insert(node.block.0)
    }
}
