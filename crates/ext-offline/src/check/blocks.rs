//! Claims of blocks by files.
//!
//! Claims count clusters; without `bigalloc` each cluster is a block.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::ControlFlow;

use super::Check;
use super::bit_set::iter_set_bits;
use super::problem::{Problem, What};
use crate::blocks::role::Role as BlockRole;
use crate::format::checksum::Checksum;
use crate::format::extent::{self, ENTRY_BYTES};
use crate::format::inode::{RawInode, flags};
use crate::format::{le16, le32};
use crate::map::extents::Extents;
use crate::map::pointers::{Pointers, max_mapped_blocks};
use crate::map::{BlockLocation, BlockMap, MapNode, MapSource, MapVisitor};
use crate::{FileId, FsBlock, Result, SharedBytes};

/// Limit of reported invalid pointers per file.
const MAX_REPORTED_POINTERS: u64 = 12;

/// Walks the map of an inode, in file order.
pub(crate) fn walk_map(
    check: &Check<'_>,
    inode: u32,
    raw: &RawInode,
    visit: &mut dyn MapVisitor,
) -> Result<()> {
    let super_ = &check.super_;
    let block_bytes = super_.block_bytes;
    let blocks = super_.first_data_block.into()..super_.blocks;
    let words = raw.i_block.map(|it| it.get());
    if raw.i_flags.get() & flags::EXTENTS != 0 {
        let file = FileId { inode, generation: raw.i_generation.get() };
        let nodes = ExtentNodeReader { check, file, starts: RefCell::default() };
        nodes.record_child_starts(zerocopy::IntoBytes::as_bytes(&raw.i_block));
        let read = |block: FsBlock| nodes.read(block).map(Some);
        let source = MapSource { block_bytes, blocks, read: &read };
        return Extents::new(&words).walk(&source, 0..1 << 32, visit);
    }
    let read = |block: FsBlock| {
        check.block(block.0, BlockRole::IndirectBlock(Check::file_id(inode))).map(Some)
    };
    let source = MapSource { block_bytes, blocks, read: &read };
    Pointers(&words).walk(&source, 0..max_mapped_blocks(block_bytes), visit)
}

/// Reader of extent nodes that checks each node when it is read.
struct ExtentNodeReader<'a, 'b> {
    check: &'a Check<'b>,
    file: FileId,
    /// Expected first file block of each node, from its parent.
    starts: RefCell<HashMap<u64, u32>>,
}

impl ExtentNodeReader<'_, '_> {
    fn read(&self, block: FsBlock) -> Result<SharedBytes> {
        let bytes = self.check.block(block.0, BlockRole::ExtentNode(self.file))?;
        let complain = |what| {
            self.check.problems.add(Problem::new(what).inode(self.file.inode).block(block.0));
        };
        let seed = self.check.super_.file_checksum_seed(self.file);
        if seed.is_some_and(|seed: Checksum| !extent::has_valid_checksum(&bytes, seed)) {
            complain(What::ExtentChecksum);
        }
        let room = bytes.len().saturating_sub(ENTRY_BYTES) / ENTRY_BYTES;
        let said = usize::from(le16(&bytes, 4).unwrap_or(0));
        let is_empty = le16(&bytes, 2) == Some(0);
        if !(room.saturating_sub(2)..=room).contains(&said) || is_empty {
            complain(What::ExtentNode);
        }
        let said = self.starts.borrow_mut().remove(&block.0);
        if said.is_some_and(|said| le32(&bytes, ENTRY_BYTES) != Some(said)) {
            complain(What::ExtentStart);
        }
        self.record_child_starts(&bytes);
        Ok(bytes)
    }

    /// Records the first file blocks of a node's children.
    fn record_child_starts(&self, bytes: &[u8]) {
        // A leaf, as most are.
        if le16(bytes, 6) == Some(0) {
            return;
        }
        let Ok(node) = extent::ExtentNode::check(bytes, None) else { return };
        if node.depth > 0 {
            let below = (0..node.len()).filter_map(|nth| node.index(nth));
            self.starts.borrow_mut().extend(below.map(|index| (index.node.0, index.from)));
        }
    }
}

/// Claims of the blocks of a file.
pub(super) struct BlockClaimer<'a, 'b> {
    check: &'a Check<'b>,
    inode: u32,
    /// True if the file may own metadata blocks.
    may_own_metadata: bool,
    /// Claimed clusters, including those of the map.
    pub(super) count: u64,
    /// Map blocks among the claims.
    pub(super) map_blocks: u64,
    /// Last mapped file block.
    pub(super) last: Option<u64>,
    /// Last written file block.
    pub(super) last_written: Option<u64>,
    /// Disk block of file block 0, if mapped.
    pub(super) first: Option<u64>,
    /// EA inodes of the file's attributes.
    pub(super) values: u64,
    /// Unwritten blocks.
    pub(super) unwritten: u64,
    /// Pointers out of the volume.
    pub(super) bad_pointers: u64,
    /// True if map blocks were not walked because another claim exists.
    pub(super) has_skipped_blocks: bool,
    /// Last claimed cluster, in the file and on the device.
    cluster: Option<(u64, u64)>,
    /// True once a misaligned block was reported.
    misaligned: bool,
}

impl<'a, 'b> BlockClaimer<'a, 'b> {
    pub(super) fn new(check: &'a Check<'b>, inode: u32, may_own_metadata: bool) -> Self {
        Self {
            check,
            inode,
            may_own_metadata,
            count: 0,
            map_blocks: 0,
            last: None,
            last_written: None,
            first: None,
            values: 0,
            unwritten: 0,
            bad_pointers: 0,
            has_skipped_blocks: false,
            cluster: None,
            misaligned: false,
        }
    }

    /// Claims the cluster of a block; returns true if it was unclaimed.
    pub(super) fn claim_cluster(&mut self, block: u64) -> bool {
        self.count = self.count.saturating_add(1);
        if self.check.metadata.contains(self.check.block_index(block)) {
            if !self.may_own_metadata {
                let complaint = Problem::new(What::InMetadata).inode(self.inode);
                self.check.problems.add(complaint.block(block));
            }
            return self.may_own_metadata;
        }
        let cluster = self.check.cluster_index(block);
        let taken = self.check.used.insert(cluster);
        if taken {
            self.check.multiply_claimed.insert(cluster);
        }
        !taken
    }

    /// Claims adjacent blocks if each is a cluster: 64 at a time, and claimed ones individually.
    fn claim_blocks(&mut self, block: u64, blocks: u64) {
        let Check { metadata, used, multiply_claimed, .. } = self.check;
        let (mut nth, end) =
            (self.check.block_index(block), self.check.block_index(block).saturating_add(blocks));
        while nth < end {
            let skipped = nth % 64;
            let len = end.saturating_sub(nth).min(64u64.saturating_sub(skipped));
            let word = nth.saturating_sub(skipped);
            let these = (u64::MAX >> 64u64.saturating_sub(len)) << skipped;
            if metadata.word_from(word) & these == 0 {
                let taken = used.insert_word(word, these);
                self.count = self.count.saturating_add(len);
                if taken != 0 {
                    multiply_claimed.insert_word(word, taken);
                    if !iter_set_bits(taken).all(|_| self.check.count_revisit()) {
                        self.has_skipped_blocks = true;
                        return;
                    }
                }
            } else {
                for nth in nth..nth.saturating_add(len) {
                    let block = nth.saturating_add(self.check.super_.first_data_block.into());
                    if !self.claim_cluster(block) && !self.check.count_revisit() {
                        self.has_skipped_blocks = true;
                        return;
                    }
                }
            }
            nth = nth.saturating_add(len);
        }
    }

    /// Claims a run of file blocks from `at` on.
    fn claim_run(&mut self, at: u64, blocks: u64, block: u64) {
        let ratio = u64::from(self.check.super_.cluster_blocks.max(1));
        if at == 0 {
            self.first = Some(block);
        }
        self.last = self.last.max(Some(at.saturating_add(blocks).saturating_sub(1)));
        if ratio == 1 {
            return self.claim_blocks(block, blocks);
        }
        for nth in 0..blocks {
            let (at, block) = (at.saturating_add(nth), block.saturating_add(nth));
            let in_file = at.checked_div(ratio).unwrap_or(0);
            let on_device = self.check.cluster_index(block);
            let aligned = at.checked_rem(ratio) == block.checked_rem(ratio);
            let parted =
                self.cluster.is_some_and(|(before, place)| before == in_file && place != on_device);
            if (!aligned || parted) && !std::mem::replace(&mut self.misaligned, true) {
                let complaint = Problem::new(What::Misaligned).inode(self.inode);
                self.check.problems.add(complaint.block(block));
            }
            let is_new = self.cluster.replace((in_file, on_device)) != Some((in_file, on_device));
            if is_new && !self.claim_cluster(block) && !self.check.count_revisit() {
                self.has_skipped_blocks = true;
                return;
            }
        }
    }
}

impl MapVisitor for BlockClaimer<'_, '_> {
    fn visit_run(&mut self, at: u64, blocks: u64, place: BlockLocation) -> ControlFlow<()> {
        match place {
            BlockLocation::Hole => {}
            BlockLocation::Mapped(FsBlock(block)) => {
                self.claim_run(at, blocks, block);
                self.last_written = self.last;
            }
            BlockLocation::Unwritten(FsBlock(block)) => {
                self.claim_run(at, blocks, block);
                self.unwritten = self.unwritten.saturating_add(blocks);
            }
            BlockLocation::Damaged(FsBlock(block)) => {
                self.bad_pointers = self.bad_pointers.saturating_add(1);
                if self.bad_pointers <= MAX_REPORTED_POINTERS {
                    let held = self.check.is_valid_block(block) || block == 0;
                    let what = if held { What::ExtentNode } else { What::PointerOutside };
                    let complaint = Problem::new(what).inode(self.inode);
                    self.check.problems.add(complaint.block(block));
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn visit_node(&mut self, MapNode { block: FsBlock(block), .. }: MapNode) -> bool {
        self.map_blocks = self.map_blocks.saturating_add(1);
        // Without this check a block could be read a million times.
        let own = self.check.metadata.contains(self.check.block_index(block));
        let mine = self.claim_cluster(block) && !own;
        self.has_skipped_blocks |= !mine;
        mine
    }
}
