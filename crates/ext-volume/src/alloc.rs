//! Block and inode allocation: free space and the choice of what to allocate.
//!
//! ```text
//!   bitmap on disk ── buffer: current bits ──────┐
//!                                                ├─ allocation bitmaps: what must not be allocated
//!   pending frees: not durable yet ──────────────┤
//!   reservation windows of growing files ────────┘
//! ```
//! Law 1: freed blocks and inodes are allocatable only once the free is durable.
//! Law 2: bitmaps decide. A count that disagrees with its bitmap is damage on a cleanly unmounted
//! volume, and is corrected on any other.
//! Law 3: the volume's own metadata blocks are never allocated and never freed, whatever the
//! bitmaps say.
//! Law 4: space is counted, allocated and freed in clusters; only this module converts blocks to
//! bitmap bits. Callers use block numbers: an allocation begins and ends at cluster boundaries, and
//! a free releases every cluster that it touches. Without `bigalloc` a cluster is a block. Blocks
//! that share a cluster belong to one file, whose map frees each cluster once (see
//! [`crate::map::extents`]).

mod blocks;
mod inodes;

use std::collections::HashMap;

pub(crate) use blocks::AllocationRequest;

use crate::blocks::BlockStore;
use crate::blocks::role::Role;
use crate::format::bitmap::{self, BitRun, Bitmap};
use crate::format::group;
use crate::format::superblock::Superblock;
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, GroupNumber, InodeNumber, Result};

/// Limit of groups of a writable volume: 128 TiB in blocks of 4 KiB.
const MAX_GROUPS: u32 = 1 << 20;
/// Size of a growing file's reservation window: initial and maximum.
const RESERVATION_BLOCKS: (u32, u32) = (8, 1024);
/// Limit of files with a reservation window.
const MAX_RESERVATION_WINDOWS: usize = 256;

/// Current state of a block group.
#[derive(Debug)]
pub(crate) struct Group {
    first_block: u64,
    /// Bits of its block bitmap, including one for a partial cluster.
    bitmap_clusters: u32,
    /// Bits that stand for whole clusters: the volume may end within the last one.
    whole_clusters: u32,
    inodes: u32,
    /// Current descriptor.
    pub(crate) descriptor: group::GroupDescriptor,
    /// True if the descriptor has unwritten changes.
    pub(crate) changed: bool,
    /// Bitmaps of what must not be allocated; `None` until needed.
    allocation_bitmaps: Option<AllocationBitmaps>,
    /// Initial contents of uninitialized bitmaps, written with the first allocation.
    initial_blocks: Option<Vec<u8>>,
    initial_inodes: Option<Vec<u8>>,
}

#[derive(Debug)]
struct AllocationBitmaps {
    blocks: Vec<u8>,
    inodes: Vec<u8>,
}

/// Free blocks reserved for a growing file.
#[derive(Clone, Copy, Debug)]
struct ReservationWindow {
    next: u64,
    end: u64,
    /// Size with which the window was opened.
    len: u32,
}

fn bitmap_view(bytes: &[u8]) -> Bitmap<'_> {
    Bitmap::new(bytes, u32::MAX)
}

fn set_bit_range(bytes: &mut [u8], start: u32, len: u32, used: bool) {
    bitmap::fill(bytes, BitRun { start, len }, used);
}

fn all_bits_are(bytes: &[u8], start: u32, len: u32, used: bool) -> bool {
    bitmap_view(bytes).is_all(BitRun { start, len }, used)
}

/// All block groups.
#[derive(Debug)]
pub(crate) struct Groups {
    all: Vec<Group>,
    /// Sorted cluster-aligned ranges (first, end) of the volume's metadata.
    system_zones: Vec<(u64, u64)>,
    free_clusters: u64,
    pub(crate) free_inodes: u64,
    directories: u64,
    /// Free clusters that are not allocatable yet.
    pending_free_clusters: u64,
    pending_free_inodes: u64,
    reservation_windows: HashMap<u32, ReservationWindow>,
    /// True if the volume was not cleanly unmounted: its counts may be wrong.
    tolerates_bad_counts: bool,
    per_group: (u32, u32),
    first_data_block: u64,
    cluster_blocks: u32,
}

impl Groups {
    /// Reads all group descriptors.
    pub(crate) fn load(store: &BlockStore, super_: &Superblock) -> Result<Self> {
        if super_.groups > MAX_GROUPS {
            let feature = format!("writing needs: {} groups", super_.groups);
            return Err(Error::Unsupported { feature });
        }
        let cluster_blocks = super_.cluster_blocks;
        if !super_.first_data_block.is_multiple_of(cluster_blocks) {
            return Err(Error::corrupt("superblock: first data block"));
        }
        let mut all = Vec::with_capacity(saturating_usize(super_.groups.into()));
        let mut system_zones = vec![(0, u64::from(super_.first_data_block) + 1)];
        for number in (0..super_.groups).map(GroupNumber) {
            let (at, slot) = super_.descriptor_location(number);
            let bytes = store.block(at, Role::Descriptors)?;
            if !group::has_valid_checksum(&bytes, slot, super_, number) {
                return Err(Error::corrupt("group descriptor: checksum").with_block(at));
            }
            let group = Group::from_descriptor(
                group::GroupDescriptor::read(&bytes, slot, super_)?,
                number,
                super_,
            )
            .map_err(|error| error.with_block(at))?;
            let group::GroupDescriptor { block_bitmap, inode_bitmap, inode_table, .. } =
                group.descriptor;
            system_zones.push((block_bitmap.0, block_bitmap.0.saturating_add(1)));
            system_zones.push((inode_bitmap.0, inode_bitmap.0.saturating_add(1)));
            let table = u64::from(super_.inode_table_blocks());
            system_zones.push((inode_table.0, inode_table.0.saturating_add(table)));
            let head = super_.base_meta_blocks(number);
            system_zones.push((group.first_block, group.first_block.saturating_add(head)));
            all.push(group);
        }
        let system_zones = round_to_clusters(merge_ranges(system_zones)?, cluster_blocks.into());
        let sum = |count: fn(&Group) -> u32| all.iter().map(|group| u64::from(count(group))).sum();
        let (free_clusters, free_inodes) =
            (sum(|it| it.descriptor.free_clusters), sum(|it| it.descriptor.free_inodes));
        let directories = sum(|it| it.descriptor.directories);
        Ok(Self {
            system_zones,
            free_clusters,
            free_inodes,
            directories,
            pending_free_clusters: 0,
            pending_free_inodes: 0,
            reservation_windows: HashMap::new(),
            tolerates_bad_counts: !super_.clean,
            per_group: (super_.blocks_per_group, super_.inodes_per_group),
            first_data_block: super_.first_data_block.into(),
            cluster_blocks,
            all,
        })
    }

    /// Returns the free blocks, in whole clusters.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.free_clusters.saturating_mul(self.cluster_blocks.into())
    }

    /// Returns the free blocks that are not allocatable yet.
    fn pending_free_blocks(&self) -> u64 {
        self.pending_free_clusters.saturating_mul(self.cluster_blocks.into())
    }

    /// Returns the first block of a block's cluster.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn cluster_start(&self, block: u64) -> u64 {
        block.saturating_sub(block % u64::from(self.cluster_blocks))
    }

    /// Returns the number of clusters for so many blocks from the start of a cluster.
    fn blocks_to_clusters(&self, blocks: u32) -> u32 {
        blocks.div_ceil(self.cluster_blocks)
    }

    /// Returns the first block and the number of blocks of a run of clusters.
    fn cluster_run_to_blocks(&self, group: &Group, BitRun { start, len }: BitRun) -> (u64, u32) {
        let first = group
            .first_block
            .saturating_add(u64::from(start).saturating_mul(self.cluster_blocks.into()));
        (first, len.saturating_mul(self.cluster_blocks))
    }

    pub(crate) fn get(&self, group: u32) -> Option<&Group> {
        self.all.get(saturating_usize(group.into()))
    }

    fn get_mut(&mut self, group: u32) -> Result<&mut Group> {
        self.all.get_mut(saturating_usize(group.into())).ok_or(Error::corrupt("group number"))
    }

    /// Returns the groups with unwritten changes.
    pub(crate) fn changed_groups(&self) -> impl Iterator<Item = GroupNumber> + '_ {
        (0..).map(GroupNumber).zip(&self.all).filter(|(_, group)| group.changed).map(|(nth, _)| nth)
    }

    /// Returns the groups with unwritten changes, and marks them as written.
    pub(crate) fn take_changed(&mut self) -> Vec<(GroupNumber, group::GroupDescriptor)> {
        let changed = (0..).map(GroupNumber).zip(&mut self.all).filter(|(_, group)| group.changed);
        changed
            .map(|(number, group)| {
                group.changed = false;
                (number, group.descriptor)
            })
            .collect()
    }

    /// Stores the bitmap checksums of a group.
    pub(crate) fn set_bitmap_checksums(&mut self, group: GroupNumber, sums: [u32; 2]) {
        if let Ok(group) = self.get_mut(group.0) {
            group.descriptor.bitmap_checksums = sums;
        }
    }

    /// Returns the group of a block, and the bit of its cluster.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn locate_block_bit(&self, block: u64) -> Option<(u32, u32)> {
        let nth = block.checked_sub(self.first_data_block)?;
        let per_group = u64::from(self.per_group.0);
        let bit = nth % per_group / u64::from(self.cluster_blocks);
        Some((saturating_u32(nth / per_group), saturating_u32(bit)))
    }

    /// Returns the group and bit of an inode.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn locate_inode_bit(&self, inode: InodeNumber) -> Option<(u32, u32)> {
        let nth = inode.0.checked_sub(1)?;
        Some((nth / self.per_group.1, nth % self.per_group.1))
    }

    /// Returns true if any of these blocks is metadata of the volume.
    fn overlaps_system_zone(&self, start: u64, end: u64) -> bool {
        let nth = self.system_zones.partition_point(|(_, own_end)| *own_end <= start);
        self.system_zones.get(nth).is_some_and(|(own_start, _)| *own_start < end)
    }

    /// Makes freed blocks and inodes allocatable: their free is durable.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    pub(crate) fn release_pending_free(&mut self, blocks: &[(u64, u32)], inodes: &[u32]) {
        let count: u64 = blocks.iter().map(|(_, count)| u64::from(*count)).sum();
        let clusters = count / u64::from(self.cluster_blocks);
        self.pending_free_clusters = self.pending_free_clusters.saturating_sub(clusters);
        self.pending_free_inodes = self.pending_free_inodes.saturating_sub(inodes.len() as u64);
        self.mark_allocatable(blocks, inodes);
    }

    /// Returns true if there are frees that are not durable yet.
    pub(crate) fn has_pending_free(&self) -> bool {
        self.pending_free_clusters > 0 || self.pending_free_inodes > 0
    }

    /// Makes these blocks and inodes allocatable.
    fn mark_allocatable(&mut self, blocks: &[(u64, u32)], inodes: &[u32]) {
        for &(start, count) in blocks {
            let Some((group, at)) = self.locate_block_bit(start) else { continue };
            let count = self.blocks_to_clusters(count);
            if let Ok(Group { allocation_bitmaps: Some(search), .. }) = self.get_mut(group) {
                set_bit_range(&mut search.blocks, at, count, false);
            }
        }
        for &inode in inodes {
            let Some((group, at)) = self.locate_inode_bit(InodeNumber(inode)) else { continue };
            if let Ok(Group { allocation_bitmaps: Some(search), .. }) = self.get_mut(group) {
                set_bit_range(&mut search.inodes, at, 1, false);
            }
        }
    }

    /// Discards the reservation window of a file.
    pub(crate) fn discard_reservation_window(&mut self, inode: u32) {
        if let Some(window) = self.reservation_windows.remove(&inode) {
            let count = saturating_u32(window.end.saturating_sub(window.next));
            self.mark_allocatable(&[(window.next, count)], &[]);
        }
    }

    fn discard_reservation_windows(&mut self) -> bool {
        let all: Vec<u32> = self.reservation_windows.keys().copied().collect();
        all.iter().for_each(|inode| self.discard_reservation_window(*inode));
        !all.is_empty()
    }

    /// Builds the allocation bitmaps of a group.
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn load_allocation_bitmaps(
        &mut self,
        number: u32,
        store: &BlockStore,
        super_: &Superblock,
    ) -> Result<()> {
        let (forgiving, first_inode) = (self.tolerates_bad_counts, super_.first_inode.0);
        let ratio = u64::from(self.cluster_blocks);
        let own: Vec<(u64, u64)> = {
            let group = self.get_mut(number)?;
            if group.allocation_bitmaps.is_some() {
                return Ok(());
            }
            let (first, end) = (
                group.first_block,
                group
                    .first_block
                    .saturating_add(u64::from(group.bitmap_clusters).saturating_mul(ratio)),
            );
            let from = self.system_zones.partition_point(|(_, own_end)| *own_end <= first);
            let rest = self.system_zones.get(from..).unwrap_or_default().iter();
            rest.take_while(|(start, _)| *start < end)
                .map(|&(a, b)| {
                    (a.saturating_sub(first) / ratio, b.min(end).saturating_sub(first) / ratio)
                })
                .collect()
        };
        let group = self.get_mut(number)?;
        let group::GroupDescriptor { block_bitmap, inode_bitmap, flags, .. } = group.descriptor;
        let corrupt = |what, at| Err(Error::corrupt(what).with_block(at));
        let len = saturating_usize(super_.block_bytes.into());
        let mut blocks = if flags & group::flags::BLOCK_UNINIT != 0 {
            let mut bytes = vec![0; len];
            for &(start, end) in &own {
                set_bit_range(
                    &mut bytes,
                    saturating_u32(start),
                    saturating_u32(end.saturating_sub(start)),
                    true,
                );
            }
            group.initial_blocks = Some(pad_bitmap(bytes.clone(), group.bitmap_clusters));
            bytes
        } else {
            let bytes = store.block(block_bitmap, Role::BlockBitmap(number))?;
            if !group.descriptor.verify_block_bitmap_csum(&bytes, super_) {
                return corrupt("block bitmap: checksum", block_bitmap);
            }
            bytes.to_vec()
        };
        let mut inodes = if flags & group::flags::INODE_UNINIT != 0 {
            group.initial_inodes = Some(pad_bitmap(vec![0; len], group.inodes));
            vec![0; len]
        } else {
            let bytes = store.block(inode_bitmap, Role::InodeBitmap(number))?;
            if !group.descriptor.verify_inode_bitmap_csum(&bytes, super_) {
                return corrupt("inode bitmap: checksum", inode_bitmap);
            }
            bytes.to_vec()
        };
        for (start, end) in own {
            let (at, count) = (saturating_u32(start), saturating_u32(end.saturating_sub(start)));
            if !all_bits_are(&blocks, at, count, true) {
                return corrupt("block bitmap: the volume's own block is free", block_bitmap);
            }
        }
        if number == 0 {
            set_bit_range(&mut inodes, 0, first_inode.saturating_sub(1).min(group.inodes), true);
        }
        let free = [
            Bitmap::new(&blocks, group.bitmap_clusters).count_zeros(),
            Bitmap::new(&inodes, group.inodes).count_zeros(),
        ];
        let claimed = [group.descriptor.free_clusters, group.descriptor.free_inodes];
        if free != claimed {
            if !forgiving {
                return corrupt("group descriptor: free counts", block_bitmap);
            }
            [group.descriptor.free_clusters, group.descriptor.free_inodes] = free;
            group.changed = true;
        }
        // Bits after the end are never found free.
        let past = |len: usize, count: u32| {
            saturating_u32((len as u64).saturating_mul(8)).saturating_sub(count)
        };
        let (all_blocks, all_inodes) =
            (past(blocks.len(), group.whole_clusters), past(inodes.len(), group.inodes));
        set_bit_range(&mut blocks, group.whole_clusters, all_blocks, true);
        set_bit_range(&mut inodes, group.inodes, all_inodes, true);
        group.allocation_bitmaps = Some(AllocationBitmaps { blocks, inodes });
        if free != claimed {
            let sum = |a: u64, new: u32, old: u32| {
                a.saturating_add(new.into()).saturating_sub(old.into())
            };
            self.free_clusters = sum(self.free_clusters, free[0], claimed[0]);
            self.free_inodes = sum(self.free_inodes, free[1], claimed[1]);
        }
        Ok(())
    }
}

impl Group {
    #[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
    fn from_descriptor(
        said: group::GroupDescriptor,
        number: GroupNumber,
        super_: &Superblock,
    ) -> Result<Self> {
        let said = said.check(super_)?;
        let first = super_.group_start(number).0;
        for (block, what) in [
            (said.block_bitmap, "group descriptor: block bitmap"),
            (said.inode_bitmap, "group descriptor: inode bitmap"),
        ] {
            if !super_.is_valid_block(block) {
                return Err(Error::corrupt(what));
            }
        }
        let blocks =
            saturating_u32(super_.blocks.saturating_sub(first)).min(super_.blocks_per_group);
        let bitmap_clusters = blocks.div_ceil(super_.cluster_blocks);
        let before = u64::from(number.0).saturating_mul(super_.inodes_per_group.into());
        let inodes = saturating_u32(u64::from(super_.inodes).saturating_sub(before));
        let inodes = inodes.min(super_.inodes_per_group);
        Ok(Self {
            first_block: first,
            bitmap_clusters,
            whole_clusters: blocks / super_.cluster_blocks,
            inodes,
            descriptor: group::GroupDescriptor {
                free_clusters: said.free_clusters.min(bitmap_clusters),
                free_inodes: said.free_inodes.min(inodes),
                ..said
            },
            changed: false,
            allocation_bitmaps: None,
            initial_blocks: None,
            initial_inodes: None,
        })
    }
}

/// Sets all bits of a bitmap after `count`.
fn pad_bitmap(mut bits: Vec<u8>, count: u32) -> Vec<u8> {
    let all = saturating_u32((bits.len() as u64).saturating_mul(8));
    set_bit_range(&mut bits, count, all.saturating_sub(count), true);
    bits
}

/// Sorts ranges and merges adjacent ones.
fn merge_ranges(mut ranges: Vec<(u64, u64)>) -> Result<Vec<(u64, u64)>> {
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match out.last_mut() {
            // The first block counts with the boot block and with its group.
            Some(last) if start < last.1 && start > 1 => {
                let what = "group descriptor: two groups claim one block";
                return Err(Error::corrupt(what).with_block(FsBlock(start)));
            }
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out.shrink_to_fit();
    Ok(out)
}

/// Rounds sorted ranges to clusters and merges adjacent ones.
#[allow(clippy::arithmetic_side_effects, reason = "a checked superblock has no size of 0")]
fn round_to_clusters(ranges: Vec<(u64, u64)>, cluster_blocks: u64) -> Vec<(u64, u64)> {
    let mut out: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (start, end) in ranges {
        let (start, end) =
            (start.saturating_sub(start % cluster_blocks), end.next_multiple_of(cluster_blocks));
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out.shrink_to_fit();
    out
}
