//! Prefetch of scattered metadata, so that the checker does not wait for single blocks.
//!
//! ```text
//!   part of an inode table ──▶ map nodes, xattr blocks      while its inodes are checked
//!   some directories       ──▶ their blocks                while the previous ones are checked
//!   some groups            ──▶ their bitmaps               while the previous ones are checked
//! ```
//! Law: nothing is decided here. A needless prefetch costs a read; a missing one is read on demand.
//! The store limits the reads in flight.

use draconis_types::lock::Mutex;
use std::collections::HashMap;

use zerocopy::{FromBytes, IntoBytes};

use super::{Check, raw_inode};
use crate::format::extent::{ExtentNode, ROOT_ENTRIES};
use crate::format::inode::{RawInode, flags};
use crate::format::le16;
use crate::units::saturating_usize;

/// Inodes whose maps are prefetched together.
pub(super) const INODES_PER_BATCH: usize = 512;
/// Directories prefetched together.
pub(super) const DIRECTORIES_PER_BATCH: usize = 16;
/// Batches in flight.
pub(super) const BATCHES_IN_FLIGHT: usize = 4;
/// Groups whose bitmaps are prefetched together.
const GROUPS_PER_BATCH: usize = 64;
/// Limit of blocks of a directory prefetched with others; larger ones are read ahead later.
const MAX_PREFETCHED_DIR_BLOCKS: u64 = 32;
/// Blocks of one batch of a large directory; two batches are in flight.
pub(super) const BLOCKS_PER_BATCH: usize = 64;
/// Limit of bytes in flight.
pub(super) const MAX_IN_FLIGHT_BYTES: usize = 4 << 20;
/// Limit of inode bytes kept from the first pass for the second.
const MAX_CACHED_INODE_BYTES: usize = 16 << 20;

/// Cache of directory inodes; bounded.
#[derive(Default)]
pub(super) struct DirectoryInodeCache(Mutex<CachedSlots>);

#[derive(Default)]
struct CachedSlots {
    by_inode: HashMap<u32, Box<[u8]>>,
    bytes: usize,
}

impl DirectoryInodeCache {
    pub(super) fn put(&self, number: u32, slot: &[u8]) {
        let mut kept = self.0.lock();
        if kept.bytes < MAX_CACHED_INODE_BYTES {
            kept.bytes = kept.bytes.saturating_add(slot.len());
            kept.by_inode.insert(number, slot.into());
        }
    }

    pub(super) fn get(&self, number: u32) -> Option<Box<[u8]>> {
        self.0.lock().by_inode.get(&number).cloned()
    }
}

/// Prefetches what checking the inodes in `slots` needs: the first map nodes, and attributes.
pub(super) fn prefetch_maps(check: &Check<'_>, slots: &[u8]) {
    let mut blocks = vec![];
    for slot in slots.chunks_exact(saturating_usize(check.super_.inode_bytes.into())) {
        let Ok((raw, _)) = RawInode::ref_from_prefix(slot) else { continue };
        if raw.i_links_count.get() == 0 {
            continue;
        }
        blocks.push(raw_inode::xattr_block(check, raw));
        if !raw_inode::has_map(check, raw) || is_extent_leaf(raw) {
            continue;
        }
        match extent_root(raw) {
            Some(root) => {
                let nodes = (0..root.len()).filter_map(|nth| root.index(nth));
                blocks.extend(nodes.map(|index| index.node.0));
            }
            None => {
                let [.., one, two, three] = raw.i_block.map(|it| u64::from(it.get()));
                blocks.extend([one, two, three]);
            }
        }
    }
    prefetch(check, blocks);
}

/// Prefetches the blocks of directories.
pub(super) fn prefetch_directories(check: &Check<'_>, list: &[u32]) {
    let mut blocks = vec![];
    for dir in list {
        let Ok(slot) = raw_inode::read_inode_slot(check, *dir) else { continue };
        let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { continue };
        if !raw_inode::has_map(check, raw) {
            continue;
        }
        match extent_root(raw) {
            Some(root) if root.depth == 0 => {
                let runs = root.extents().take(ROOT_ENTRIES.into());
                let block = |start: u64, nth: u64| start.saturating_add(nth);
                blocks.extend(runs.flat_map(|run| {
                    (0..MAX_PREFETCHED_DIR_BLOCKS.min(run.blocks.into()))
                        .map(move |nth| block(run.start.0, nth))
                }));
            }
            Some(_) => {}
            None => {
                let [direct @ .., _, _, _] = raw.i_block.map(|it| u64::from(it.get()));
                blocks.extend(direct);
            }
        }
    }
    prefetch(check, blocks);
}

/// Prefetches bitmaps for a batch of groups; called for each group.
pub(super) fn prefetch_bitmaps(check: &Check<'_>, group: usize) {
    if group.is_multiple_of(GROUPS_PER_BATCH) {
        let places = check.groups.get(group..).unwrap_or_default().iter().take(GROUPS_PER_BATCH);
        let both = places.flat_map(|it| {
            let blocks = (!it.blocks_unwritten).then_some(it.block_bitmap);
            blocks.into_iter().chain((!it.inodes_unwritten).then_some(it.inode_bitmap))
        });
        prefetch(check, both.collect());
    }
}

/// Prefetches blocks `nth..` of a long list that is read in order; called for each of them.
pub(super) fn prefetch_list(check: &Check<'_>, nth: usize, blocks: &[u64]) {
    if blocks.len() > BLOCKS_PER_BATCH && nth.is_multiple_of(BLOCKS_PER_BATCH) {
        let these = blocks.get(nth..).unwrap_or_default().iter();
        prefetch(check, these.take(2 * BLOCKS_PER_BATCH).copied().collect());
    }
}

/// Returns true if all extents of an inode are in its root, so that there are no nodes to read.
fn is_extent_leaf(raw: &RawInode) -> bool {
    raw.i_flags.get() & flags::EXTENTS != 0 && le16(raw.i_block.as_bytes(), 6) == Some(0)
}

/// Returns the root of an extent tree; `None` for indirect maps.
fn extent_root(raw: &RawInode) -> Option<ExtentNode<'_>> {
    let has_extents = raw.i_flags.get() & flags::EXTENTS != 0;
    has_extents.then(|| ExtentNode::check(raw.i_block.as_bytes(), None).ok()).flatten()
}

fn prefetch(check: &Check<'_>, mut blocks: Vec<u64>) {
    blocks.retain(|block| *block != 0 && check.is_valid_block(*block));
    check.store.prefetch(blocks);
}
