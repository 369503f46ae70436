//! Contents of a file, as far as they can be read.

use std::collections::HashSet;
use std::ops::{ControlFlow, Range};

use draconis_device::Extent;

use super::{Rescue, RescuedItem};
use crate::blocks::data::SharedBytes;
use crate::blocks::uncached::read_bytes;
use crate::format::inode::Inode;
use crate::map::{BlockLocation, BlockMap, MapNode, MapSource, MapVisitor, map_of};
use crate::units::saturating_usize;
use crate::{FsBlock, Result};

/// Bytes of one read.
const READ_BYTES: u64 = 1 << 20;
/// Ranges of one file that are named; the last one includes all further ones.
const MAX_RANGES: usize = 4096;

/// What became of the contents of a file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Contents {
    /// Bytes that could not be read, sorted and joined.
    pub missing: Vec<Range<u64>>,
    /// Reason why the others may be wrong, or why all are missing.
    pub reason: Option<String>,
}

impl Contents {
    fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let is_full = self.missing.len() >= MAX_RANGES;
        match self.missing.last_mut() {
            Some(last) if is_full || last.end >= range.start => last.end = range.end,
            _ => self.missing.push(range),
        }
    }
}

impl Rescue {
    /// Reads the contents of a file in pieces, in their order, without holes; `visit` returns false
    /// to end it. Pieces that cannot be read are left out.
    pub fn read(
        &self,
        item: &RescuedItem,
        visit: &mut dyn FnMut(u64, SharedBytes) -> bool,
    ) -> Contents {
        let Some(inode) = item.inode.as_deref() else { return Contents::default() };
        let mut contents = Contents::default();
        let read = match inode.is_inline() {
            true => self.read_inline(inode, visit),
            false => self.read_blocks(inode, &mut contents, visit),
        };
        if let Err(error) = read {
            contents.missing.clear();
            contents.add(0..inode.size_bytes);
            contents.reason = Some(error.to_string());
        }
        contents
    }

    fn read_inline(
        &self,
        inode: &Inode,
        visit: &mut dyn FnMut(u64, SharedBytes) -> bool,
    ) -> Result<()> {
        inode.check_readable()?;
        let inline = self.volume.reader().load_inline_data(inode)?;
        let stored = (inline.len() as u64).min(inode.size_bytes);
        let mut bytes = vec![0; saturating_usize(stored)];
        inline.read(0, &mut bytes);
        if !bytes.is_empty() {
            visit(0, SharedBytes::from_owned_bytes(bytes.into_boxed_slice()));
        }
        Ok(())
    }

    fn read_blocks(
        &self,
        inode: &Inode,
        contents: &mut Contents,
        visit: &mut dyn FnMut(u64, SharedBytes) -> bool,
    ) -> Result<()> {
        let map = map_of(inode)?;
        let super_ = &self.volume.reader().super_;
        let role = map.role(inode.file_id());
        let doubtful = std::cell::Cell::new(None);
        let read = |block: FsBlock| {
            let Some((bytes, is_sound)) = self.metadata(block, role) else { return Ok(None) };
            if !is_sound {
                doubtful.set(Some(block));
            }
            Ok(Some(bytes))
        };
        let blocks = u64::from(super_.first_data_block).saturating_add(1)..super_.blocks;
        let source = MapSource { block_bytes: super_.block_bytes, blocks, read: &read };
        let block_bytes = u64::from(super_.block_bytes).max(1);
        let end = inode.size_bytes.div_ceil(block_bytes);
        let mut copy = ContentCopy {
            rescue: self,
            block_bytes,
            size: inode.size_bytes,
            at: 0,
            is_stopped: false,
            nodes: HashSet::new(),
            contents,
            visit,
        };
        let walked = map.walk(&source, 0..end, &mut copy);
        let ContentCopy { at, is_stopped, .. } = copy;
        if !is_stopped {
            contents.add(at.saturating_mul(block_bytes).min(inode.size_bytes)..inode.size_bytes);
        }
        contents.reason = match (walked, doubtful.get()) {
            (Err(error), _) => Some(error.to_string()),
            (Ok(()), Some(block)) => Some(format!(
                "the checksum of block {block} of its map is wrong: contents may be another file's"
            )),
            (Ok(()), None) => None,
        };
        Ok(())
    }
}

/// A walk that reads what it comes to.
struct ContentCopy<'a> {
    rescue: &'a Rescue,
    block_bytes: u64,
    size: u64,
    /// Blocks of the file that were visited. What a walk skips is missing.
    at: u64,
    /// True if the caller ended it.
    is_stopped: bool,
    /// Blocks of the map, which may be a circle.
    nodes: HashSet<u64>,
    contents: &'a mut Contents,
    visit: &'a mut dyn FnMut(u64, SharedBytes) -> bool,
}

impl ContentCopy<'_> {
    fn bytes_of(&self, from: u64, to: u64) -> Range<u64> {
        let at = |block: u64| block.saturating_mul(self.block_bytes).min(self.size);
        at(from)..at(to)
    }

    /// Reads bytes of the file from a place on the disk. What fails is read again in smaller
    /// pieces, down to sectors.
    fn copy(&mut self, file: Range<u64>, start: u64, piece: u64) -> ControlFlow<()> {
        let reader = self.rescue.volume.reader();
        let disk = reader.store.disk();
        let sector = u64::from(disk.properties().sector_bytes).max(512);
        let mut at = file.start;
        while at < file.end {
            let part = at..file.end.min(at.saturating_add(piece));
            let place = start.saturating_add(at.saturating_sub(file.start));
            let len = part.end.saturating_sub(part.start);
            let smaller = if piece > self.block_bytes { self.block_bytes } else { sector };
            at = part.end;
            match read_bytes(disk, Extent::new(place, len)) {
                Ok(bytes) => {
                    let bytes = SharedBytes::from_owned_bytes(bytes.into_boxed_slice());
                    if !(self.visit)(part.start, bytes) {
                        self.is_stopped = true;
                        return ControlFlow::Break(());
                    }
                }
                Err(_) if smaller < piece => self.copy(part, place, smaller)?,
                Err(_) => self.contents.add(part),
            }
        }
        ControlFlow::Continue(())
    }
}

impl MapVisitor for ContentCopy<'_> {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        let skipped = self.bytes_of(self.at, at);
        self.contents.add(skipped);
        let mut file = self.bytes_of(at, at.saturating_add(blocks));
        self.at = at.saturating_add(blocks);
        match place {
            BlockLocation::Hole | BlockLocation::Unwritten(_) => ControlFlow::Continue(()),
            BlockLocation::Damaged(_) => {
                self.contents.add(file);
                ControlFlow::Continue(())
            }
            BlockLocation::Mapped(first) => {
                let mut left = self.rescue.blocks_left.lock();
                let granted = blocks.min(*left);
                *left = left.saturating_sub(granted);
                drop(left);
                let refused = self.bytes_of(at.saturating_add(granted), at.saturating_add(blocks));
                file.end = file.end.min(refused.start);
                self.copy(file, first.0.saturating_mul(self.block_bytes), READ_BYTES)?;
                self.contents.add(refused);
                ControlFlow::Continue(())
            }
        }
    }

    fn visit_node(&mut self, node: MapNode) -> bool {
        self.nodes.insert(node.block.0)
    }
}
