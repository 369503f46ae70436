//! Which blocks and inodes are free, and which of them to take.
//!
//! ```text
//!   bitmap on disk ── buffer: what is used now ──┐
//!                                                ├─ search image: what must not be given out
//!   freed, but the freeing is not durable ───────┤
//!   kept for a growing file: its window ─────────┘
//! ```
//! Law 1: nothing freed is given out before the freeing is durable.
//! Law 2: bitmaps decide; a count that disagrees with its bitmap is damage on a volume that
//! was unmounted properly, and is corrected on one that was not.
//! Law 3: the volume's own blocks are never given out and never freed, whatever its bitmaps
//! say.
//! Law 4: space is counted, given and taken in clusters: blocks of the volume become bits of a
//! bitmap here, and nowhere else. Callers speak of blocks: what they are given begins and ends
//! with a cluster, and what they give back frees every cluster that it touches. Without
//! `bigalloc` a cluster is a block. Blocks that share a cluster belong to one file, whose map
//! sees to it that it gives a cluster back once (see [`crate::map::extents`]).

#![allow(
    clippy::arithmetic_side_effects,
    reason = "computes with block numbers of a volume of fewer than 2^32 blocks"
)]

mod blocks;
mod inodes;

use std::collections::HashMap;

pub(crate) use blocks::Request;

use crate::blocks::Store;
use crate::blocks::role::Role;
use crate::format::bitmap::{self, BitRun, Bitmap};
use crate::format::features::Incompatible;
use crate::format::group;
use crate::format::superblock::Superblock;
use crate::units::{index, narrow};
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// Groups of a volume that is written: 128 TiB in blocks of 4 KiB.
const MOST_GROUPS: u32 = 1 << 20;
/// Blocks kept for a file that grows: at first, and at most.
const WINDOW_BLOCKS: (u32, u32) = (8, 1024);
/// Files that may have a window at once.
const MOST_WINDOWS: usize = 256;

/// A block group, as it is now.
#[derive(Debug)]
pub(crate) struct Group {
    first: u64,
    /// Bits of its bitmap of blocks, those that stand for a part of a cluster among them.
    clusters: u32,
    /// Of these, the ones that stand for whole clusters: the volume may end inside of the last.
    whole: u32,
    inodes: u32,
    /// What its descriptor says from now on.
    pub(crate) said: group::Group,
    /// The counts differ from the descriptor.
    pub(crate) changed: bool,
    /// What must not be given out; `None` until it is needed.
    search: Option<Search>,
    /// Bitmaps that were never written, as they must be once something is taken.
    initial_blocks: Option<Vec<u8>>,
    initial_inodes: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Search {
    blocks: Vec<u8>,
    inodes: Vec<u8>,
}

/// Blocks that a growing file will take next.
#[derive(Clone, Copy, Debug)]
struct Window {
    next: u64,
    end: u64,
    /// How large it was made.
    len: u32,
}

fn bits(bytes: &[u8]) -> Bitmap<'_> {
    Bitmap::new(bytes, u32::MAX)
}

fn mark(bytes: &mut [u8], start: u32, len: u32, used: bool) {
    bitmap::fill(bytes, BitRun { start, len }, used);
}

fn is_all(bytes: &[u8], start: u32, len: u32, used: bool) -> bool {
    bits(bytes).is_all(BitRun { start, len }, used)
}

/// All groups.
#[derive(Debug)]
pub(crate) struct Groups {
    all: Vec<Group>,
    /// The volume's own blocks, with the clusters that they are in, in order: first and end.
    own: Vec<(u64, u64)>,
    free_clusters: u64,
    pub(crate) free_inodes: u64,
    directories: u64,
    /// Free clusters that must not be given out yet.
    frozen_clusters: u64,
    frozen_inodes: u64,
    windows: HashMap<u32, Window>,
    /// Counts may be wrong: the volume was not unmounted properly.
    forgiving: bool,
    per_group: (u32, u32),
    first_data_block: u64,
    cluster_blocks: u32,
}

impl Groups {
    /// Reads all descriptors.
    pub(crate) fn load(store: &Store, super_: &Superblock) -> Result<Self> {
        if super_.groups > MOST_GROUPS {
            let feature = format!("writing needs: {} groups", super_.groups);
            return Err(Error::Unsupported { feature });
        }
        let cluster_blocks = super_.cluster_blocks;
        if !super_.first_data_block.is_multiple_of(cluster_blocks) {
            return Err(Error::corrupt("superblock: first data block"));
        }
        let mut all = Vec::with_capacity(index(super_.groups.into()));
        let mut own = vec![(0, u64::from(super_.first_data_block) + 1)];
        for number in (0..super_.groups).map(GroupNumber) {
            let (at, slot) = super_.descriptor_place(number);
            let bytes = store.block(at, Role::Descriptors)?;
            if !group::is_sealed(&bytes, slot, super_, number) {
                return Err(Error::corrupt("group descriptor: checksum").in_block(at));
            }
            let group = Group::of(group::Group::read(&bytes, slot, super_)?, number, super_)
                .map_err(|error| error.in_block(at))?;
            let group::Group { block_bitmap, inode_bitmap, inode_table, .. } = group.said;
            own.push((block_bitmap.0, block_bitmap.0 + 1));
            own.push((inode_bitmap.0, inode_bitmap.0 + 1));
            let table = u64::from(super_.inode_table_blocks());
            own.push((inode_table.0, inode_table.0 + table));
            let head = super_.head_blocks(number);
            own.push((group.first, group.first + head));
            all.push(group);
        }
        let own = in_clusters(disjoint(own)?, cluster_blocks.into());
        let sum = |count: fn(&Group) -> u32| all.iter().map(|group| u64::from(count(group))).sum();
        let (free_clusters, free_inodes) =
            (sum(|it| it.said.free_clusters), sum(|it| it.said.free_inodes));
        let directories = sum(|it| it.said.directories);
        Ok(Self {
            own,
            free_clusters,
            free_inodes,
            directories,
            frozen_clusters: 0,
            frozen_inodes: 0,
            windows: HashMap::new(),
            forgiving: !super_.clean,
            per_group: (super_.blocks_per_group, super_.inodes_per_group),
            first_data_block: super_.first_data_block.into(),
            cluster_blocks,
            all,
        })
    }

    /// Free blocks: those of free clusters.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.free_clusters * u64::from(self.cluster_blocks)
    }

    /// Free blocks that must not be given out yet.
    fn frozen_blocks(&self) -> u64 {
        self.frozen_clusters * u64::from(self.cluster_blocks)
    }

    /// The first block of the cluster of a block.
    fn cluster_start(&self, block: u64) -> u64 {
        block - block % u64::from(self.cluster_blocks)
    }

    /// Clusters that so many blocks take, the first one of which begins a cluster.
    fn clusters_of(&self, blocks: u32) -> u32 {
        blocks.div_ceil(self.cluster_blocks)
    }

    /// The first block and the number of blocks of clusters of a group.
    fn blocks_of(&self, group: &Group, BitRun { start, len }: BitRun) -> (u64, u32) {
        let first = group.first + u64::from(start) * u64::from(self.cluster_blocks);
        (first, len * self.cluster_blocks)
    }

    pub(crate) fn get(&self, group: u32) -> Option<&Group> {
        self.all.get(index(group.into()))
    }

    fn get_mut(&mut self, group: u32) -> Result<&mut Group> {
        self.all.get_mut(index(group.into())).ok_or(Error::corrupt("group number"))
    }

    /// Groups whose counts changed.
    pub(crate) fn changed(&self) -> impl Iterator<Item = GroupNumber> + '_ {
        (0..).map(GroupNumber).zip(&self.all).filter(|(_, group)| group.changed).map(|(nth, _)| nth)
    }

    /// Groups whose counts changed; they count as written from now on.
    pub(crate) fn take_changed(&mut self) -> Vec<(GroupNumber, group::Group)> {
        let changed = (0..).map(GroupNumber).zip(&mut self.all).filter(|(_, group)| group.changed);
        changed
            .map(|(number, group)| {
                group.changed = false;
                (number, group.said)
            })
            .collect()
    }

    /// Notes the checksums of the bitmaps of a group.
    pub(crate) fn set_sums(&mut self, group: GroupNumber, sums: [u32; 2]) {
        if let Ok(group) = self.get_mut(group.0) {
            group.said.bitmap_sums = sums;
        }
    }

    /// The group of a block, and the bit there that stands for its cluster.
    fn group_of(&self, block: u64) -> Option<(u32, u32)> {
        let nth = block.checked_sub(self.first_data_block)?;
        let per_group = u64::from(self.per_group.0);
        let bit = nth % per_group / u64::from(self.cluster_blocks);
        Some((narrow(nth / per_group), narrow(bit)))
    }

    /// The group and the place in it of an inode.
    pub(crate) fn place_of_inode(&self, inode: InodeNumber) -> Option<(u32, u32)> {
        let nth = inode.0.checked_sub(1)?;
        Some((nth / self.per_group.1, nth % self.per_group.1))
    }

    /// Whether any of these blocks is the volume's own.
    fn owns(&self, start: u64, end: u64) -> bool {
        let nth = self.own.partition_point(|(_, own_end)| *own_end <= start);
        self.own.get(nth).is_some_and(|(own_start, _)| *own_start < end)
    }

    /// What was freed may be given out again.
    pub(crate) fn thaw(&mut self, blocks: &[(u64, u32)], inodes: &[u32]) {
        let count: u64 = blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let clusters = count / u64::from(self.cluster_blocks);
        self.frozen_clusters = self.frozen_clusters.saturating_sub(clusters);
        self.frozen_inodes = self.frozen_inodes.saturating_sub(inodes.len() as u64);
        self.unmark(blocks, inodes);
    }

    /// Whether anything was freed that must not be given out yet.
    pub(crate) fn has_frozen(&self) -> bool {
        self.frozen_clusters > 0 || self.frozen_inodes > 0
    }

    /// Lets these be found again.
    fn unmark(&mut self, blocks: &[(u64, u32)], inodes: &[u32]) {
        for &(start, count) in blocks {
            let Some((group, at)) = self.group_of(start) else { continue };
            let count = self.clusters_of(count);
            if let Ok(Group { search: Some(search), .. }) = self.get_mut(group) {
                mark(&mut search.blocks, at, count, false);
            }
        }
        for &inode in inodes {
            let Some((group, at)) = self.place_of_inode(InodeNumber(inode)) else { continue };
            if let Ok(Group { search: Some(search), .. }) = self.get_mut(group) {
                mark(&mut search.inodes, at, 1, false);
            }
        }
    }

    /// Gives up the window of a file.
    pub(crate) fn drop_window(&mut self, inode: u32) {
        if let Some(window) = self.windows.remove(&inode) {
            let count = narrow(window.end - window.next);
            self.unmark(&[(window.next, count)], &[]);
        }
    }

    fn drop_windows(&mut self) -> bool {
        let all: Vec<u32> = self.windows.keys().copied().collect();
        all.iter().for_each(|inode| self.drop_window(*inode));
        !all.is_empty()
    }

    /// Makes the search image of a group.
    fn prepare(&mut self, number: u32, store: &Store, super_: &Superblock) -> Result<()> {
        let (forgiving, first_inode) = (self.forgiving, super_.first_inode.0);
        let ratio = u64::from(self.cluster_blocks);
        let own: Vec<(u64, u64)> = {
            let group = self.get_mut(number)?;
            if group.search.is_some() {
                return Ok(());
            }
            let (first, end) = (group.first, group.first + u64::from(group.clusters) * ratio);
            let from = self.own.partition_point(|(_, own_end)| *own_end <= first);
            let rest = self.own.get(from..).unwrap_or_default().iter();
            rest.take_while(|(start, _)| *start < end)
                .map(|&(a, b)| ((a.max(first) - first) / ratio, (b.min(end) - first) / ratio))
                .collect()
        };
        let group = self.get_mut(number)?;
        let group::Group { block_bitmap, inode_bitmap, flags, .. } = group.said;
        let corrupt = |what, at| Err(Error::corrupt(what).in_block(at));
        let len = index(super_.block_bytes.into());
        let mut blocks = if flags & group::flags::BLOCK_UNINIT != 0 {
            let mut bytes = vec![0; len];
            for &(start, end) in &own {
                mark(&mut bytes, narrow(start), narrow(end - start), true);
            }
            group.initial_blocks = Some(padded(bytes.clone(), group.clusters));
            bytes
        } else {
            let bytes = store.block(block_bitmap, Role::BlockBitmap(number))?;
            if !group.said.has_sum_of_blocks(&bytes, super_) {
                return corrupt("block bitmap: checksum", block_bitmap);
            }
            bytes.to_vec()
        };
        let mut inodes = if flags & group::flags::INODE_UNINIT != 0 {
            group.initial_inodes = Some(padded(vec![0; len], group.inodes));
            vec![0; len]
        } else {
            let bytes = store.block(inode_bitmap, Role::InodeBitmap(number))?;
            if !group.said.has_sum_of_inodes(&bytes, super_) {
                return corrupt("inode bitmap: checksum", inode_bitmap);
            }
            bytes.to_vec()
        };
        for (start, end) in own {
            let (at, count) = (narrow(start), narrow(end - start));
            if !is_all(&blocks, at, count, true) {
                return corrupt("block bitmap: the volume's own block is free", block_bitmap);
            }
        }
        if number == 0 {
            mark(&mut inodes, 0, first_inode.saturating_sub(1).min(group.inodes), true);
        }
        let free = [
            Bitmap::new(&blocks, group.clusters).count_zeros(),
            Bitmap::new(&inodes, group.inodes).count_zeros(),
        ];
        let claimed = [group.said.free_clusters, group.said.free_inodes];
        if free != claimed {
            if !forgiving {
                return corrupt("group descriptor: free counts", block_bitmap);
            }
            [group.said.free_clusters, group.said.free_inodes] = free;
            group.changed = true;
        }
        // Nothing beyond the end is ever found.
        let past = |len: usize, count: u32| narrow((len as u64) * 8).saturating_sub(count);
        let (all_blocks, all_inodes) =
            (past(blocks.len(), group.whole), past(inodes.len(), group.inodes));
        mark(&mut blocks, group.whole, all_blocks, true);
        mark(&mut inodes, group.inodes, all_inodes, true);
        group.search = Some(Search { blocks, inodes });
        if free != claimed {
            let sum =
                |a: u64, new: u32, old: u32| (a + u64::from(new)).saturating_sub(u64::from(old));
            self.free_clusters = sum(self.free_clusters, free[0], claimed[0]);
            self.free_inodes = sum(self.free_inodes, free[1], claimed[1]);
        }
        Ok(())
    }
}

impl Group {
    fn of(said: group::Group, number: GroupNumber, super_: &Superblock) -> Result<Self> {
        let said = said.check(super_)?;
        let first = super_.group_start(number).0;
        for (block, what) in [
            (said.block_bitmap, "group descriptor: block bitmap"),
            (said.inode_bitmap, "group descriptor: inode bitmap"),
        ] {
            if !super_.holds(block) {
                return Err(Error::corrupt(what));
            }
        }
        let blocks = narrow(super_.blocks.saturating_sub(first)).min(super_.blocks_per_group);
        let clusters = blocks.div_ceil(super_.cluster_blocks);
        let before = u64::from(number.0) * u64::from(super_.inodes_per_group);
        let inodes = narrow(u64::from(super_.inodes).saturating_sub(before));
        let inodes = inodes.min(super_.inodes_per_group);
        Ok(Self {
            first,
            clusters,
            whole: blocks / super_.cluster_blocks,
            inodes,
            said: group::Group {
                free_clusters: said.free_clusters.min(clusters),
                free_inodes: said.free_inodes.min(inodes),
                ..said
            },
            changed: false,
            search: None,
            initial_blocks: None,
            initial_inodes: None,
        })
    }
}

/// A bitmap of `count` bits with all bits behind them set.
fn padded(mut bits: Vec<u8>, count: u32) -> Vec<u8> {
    let all = narrow((bits.len() as u64) * 8);
    mark(&mut bits, count, all.saturating_sub(count), true);
    bits
}

/// Ranges in order, those that touch made one.
fn disjoint(mut ranges: Vec<(u64, u64)>) -> Result<Vec<(u64, u64)>> {
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match out.last_mut() {
            // The first block of a group counts with the boot block and with its group.
            Some(last) if start < last.1 && start > 1 => {
                let what = "group descriptor: two groups claim one block";
                return Err(Error::corrupt(what).in_block(FsBlock(start)));
            }
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out.shrink_to_fit();
    Ok(out)
}

/// The clusters that ranges in order lie in, those that touch made one.
fn in_clusters(ranges: Vec<(u64, u64)>, cluster_blocks: u64) -> Vec<(u64, u64)> {
    let mut out: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (start, end) in ranges {
        let (start, end) = (start - start % cluster_blocks, end.next_multiple_of(cluster_blocks));
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out.shrink_to_fit();
    out
}

impl Superblock {
    /// Blocks at the start of a group that hold the superblock, the descriptors and what is
    /// kept for more of them.
    pub(crate) fn head_blocks(&self, group: GroupNumber) -> u64 {
        let copy = u64::from(self.has_superblock(group));
        let per_block = self.descriptors_per_block();
        let is_meta = self.incompatible.contains(Incompatible::META_BG)
            && group.0 / per_block >= self.first_meta_group;
        if is_meta {
            // In its first two groups and its last one a meta group has its descriptors.
            let in_meta = group.0 % per_block;
            let table = u64::from(in_meta < 2 || in_meta == per_block - 1);
            return self.blocks_before_super(group) + copy + table;
        }
        let table = match self.incompatible.contains(Incompatible::META_BG) {
            true => self.first_meta_group.min(self.descriptor_blocks()),
            false => self.descriptor_blocks(),
        };
        let before = self.blocks_before_super(group);
        copy * (before + 1 + u64::from(table) + u64::from(self.reserved_descriptor_blocks))
    }

    /// Blocks of a group before its superblock: with clusters of small blocks group 0 begins
    /// with the boot block.
    fn blocks_before_super(&self, group: GroupNumber) -> u64 {
        match group.0 {
            0 => self.place().0.0.saturating_sub(self.first_data_block.into()),
            _ => 0,
        }
    }
}
