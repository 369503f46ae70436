//! Pass 0: the superblock's fields, and the locations of each group's structures.
//!
//! Later passes rely on this one: if it finds damage, the check ends.

use super::bit_set::AtomicBitSet;
use super::problem::{Problem, ProblemLog, What};
use super::{Check, prefetch};
use crate::blocks::role::Role as BlockRole;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::{self, GroupDescriptor, flags};
use crate::format::inode::RawInode;
use crate::format::le32;
use crate::format::requirements::{Enforcer, violated_rules};
use crate::format::superblock::{RawSuperblock, Superblock};
use crate::units::saturating_usize;
use crate::{FsBlock, GroupNumber, Result};

/// Place of a bitmap that lies where it cannot: no block has this number.
pub(crate) const NO_BLOCK: u64 = u64::MAX;
/// Field that says from which block of descriptors on they lie in their own groups.
pub(crate) const FIRST_META_GROUP: &str = "first meta group";
/// The resize inode, which owns the reserved GDT blocks.
const RESIZE_INODE: u32 = 7;

/// Contents of a group descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupLayout {
    pub(crate) descriptor: GroupDescriptor,
    pub(crate) block_bitmap: u64,
    pub(crate) inode_bitmap: u64,
    pub(crate) inode_table: u64,
    pub(super) free_blocks: u32,
    pub(super) free_inodes: u32,
    pub(super) directories: u32,
    /// Unused inodes at the end of the table, if the descriptor is valid.
    pub(crate) unused: u32,
    /// True if the block bitmap is uninitialized: only metadata is in use.
    pub(super) blocks_unwritten: bool,
    /// True if the inode bitmap is uninitialized: no inode is in use.
    pub(super) inodes_unwritten: bool,
}

/// Checks the fields that [`RawSuperblock::check`] ignores.
pub(super) fn check_superblock(
    raw: &RawSuperblock,
    super_: &Superblock,
    disk_bytes: u64,
    log: &ProblemLog,
) {
    let wrong = |field: &str, found: u64, expected: Option<u64>| {
        let complaint = Problem::new(What::Superblock).name(field.as_bytes()).found(found);
        log.add(Problem { expected, ..complaint });
    };
    let features = [&raw.s_feature_compat, &raw.s_feature_incompat, &raw.s_feature_ro_compat];
    if super_.revision.0 == 0 && features.iter().any(|set| set.get() != 0) {
        log.add(Problem::new(What::FeaturesInRevision0));
    }
    let clusters = super_.read_only_compatible.contains(ReadOnlyCompatible::BIGALLOC);
    let first = u64::from(super_.block_bytes == 1024 && !clusters);
    if u64::from(super_.first_data_block) != first {
        wrong("first data block", super_.first_data_block.into(), Some(first));
    }
    if super_.reserved_blocks > super_.blocks / 2 {
        wrong("reserved blocks", super_.reserved_blocks, None);
    }
    if !clusters && raw.s_log_cluster_size != raw.s_log_block_size {
        wrong("cluster size", raw.s_log_cluster_size.get().into(), None);
    }
    let per_group = super_.clusters_per_group();
    if raw.s_clusters_per_group.get() != per_group {
        let expected = Some(per_group.into());
        wrong("clusters per group", raw.s_clusters_per_group.get().into(), expected);
    }
    if !super_.blocks_per_group.is_multiple_of(8) || super_.blocks_per_group < 256 {
        wrong("blocks per group", super_.blocks_per_group.into(), None);
    }
    let inodes = super_.inodes_in_groups();
    if u64::from(super_.inodes) != inodes {
        wrong("inodes count", super_.inodes.into(), Some(inodes));
    }
    let tables = u64::from(super_.inode_table_blocks());
    let per_block = super_.block_bytes.checked_div(super_.inode_bytes).unwrap_or(1);
    if tables.saturating_add(3) >= u64::from(super_.blocks_per_group)
        || super_.inodes_per_group < per_block
    {
        wrong("inodes per group", super_.inodes_per_group.into(), None);
    }
    if super_.first_inode.0 > super_.inodes {
        wrong("first inode", super_.first_inode.0.into(), None);
    }
    let reserve = u32::from(super_.reserved_descriptor_blocks);
    if reserve > super_.block_bytes / 4 {
        wrong("reserved descriptor blocks", reserve.into(), None);
    }
    let descriptor_bytes = raw.s_desc_size.get();
    if descriptor_bytes > 1024 || descriptor_bytes & descriptor_bytes.saturating_sub(1) != 0 {
        wrong("descriptor size", descriptor_bytes.into(), None);
    }
    // e2fsck takes the inode for a quota file whatever the features say.
    let has_quota = super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA);
    for (field, own) in
        [(&raw.s_usr_quota_inum, 3), (&raw.s_grp_quota_inum, 4), (&raw.s_prj_quota_inum, 0)]
    {
        let inode = field.get();
        if !has_quota && inode != own && (1..=super_.inodes).contains(&inode) {
            wrong("inode of quotas", inode.into(), Some(0));
        }
    }
    if raw.s_log_groups_per_flex > 31 {
        wrong("groups per flex group", raw.s_log_groups_per_flex.into(), None);
    }
    let descriptor_blocks = super_.descriptor_blocks();
    if super_.incompatible.contains(Incompatible::META_BG)
        && super_.first_meta_group > descriptor_blocks
    {
        let expected = Some(descriptor_blocks.into());
        wrong(FIRST_META_GROUP, super_.first_meta_group.into(), expected);
    }
    if super_.len_bytes() > disk_bytes {
        let there = disk_bytes.checked_div(super_.block_bytes.into()).unwrap_or(0);
        let complaint = Problem::new(What::VolumeBeyondDisk);
        log.add(complaint.found(super_.blocks).expected(there));
    }
    check_feature_conflicts(raw, super_, log);
}

fn check_feature_conflicts(raw: &RawSuperblock, super_: &Superblock, log: &ProblemLog) {
    let resize = super_.compatible.contains(Compatible::RESIZE_INODE);
    if raw.lost_checksum_feature() {
        log.add(Problem::new(What::FeatureLost).name(b"metadata_csum"));
    }
    for rule in violated_rules(Enforcer::Checker, super_.features(), super_.inode_bytes) {
        log.add(Problem::new(What::FeatureClash).name(rule.conflict_text().as_bytes()));
    }
    if super_.incompatible.contains(Incompatible::MMP) && raw.s_mmp_block.get() == 0 {
        log.add(Problem::new(What::MmpBlock).block(0));
    }
    if !resize && super_.reserved_descriptor_blocks != 0 {
        let found = super_.reserved_descriptor_blocks;
        log.add(Problem::new(What::ReserveWithoutFeature).found(found).expected(0u64));
    }
    let journal = raw.s_journal_inum.get();
    if super_.compatible.contains(Compatible::HAS_JOURNAL) {
        // UUID and device are those of an external journal.
        let device = raw.s_journal_dev.get();
        if journal != 8 || raw.s_journal_uuid != [0; 16] {
            log.add(Problem::new(What::JournalInode).found(journal).expected(8u64));
        } else if device != 0 {
            let complaint = Problem::new(What::JournalInode).name(b"s_journal_dev");
            log.add(complaint.found(device).expected(0u64));
        }
    } else if journal != 0 || raw.s_journal_uuid != [0; 16] {
        log.add(Problem::new(What::JournalWithoutFeature).inode(journal));
    }
}

/// Reads all descriptors and marks the metadata of the groups; returns the layouts, and the groups
/// with wrong checksums.
pub(super) fn read_group_layouts(check: &Check<'_>) -> Result<(Vec<GroupLayout>, Vec<u32>)> {
    let (mut places, mut bad_checksums) = (Vec::new(), Vec::new());
    for group in 0..check.super_.groups {
        mark_super_and_descriptors(check, group);
        let (place, is_sealed) = read_group_layout(check, group)?;
        places.push(place);
        if !is_sealed {
            bad_checksums.push(group);
        }
    }
    for (group, place) in (0u32..).zip(&mut places) {
        mark_tables(check, group, place);
    }
    if let Some(FsBlock(block)) = check.super_.mmp_block {
        check_mmp_block(check, block)?;
    }
    Ok((places, bad_checksums))
}

/// Reads the descriptor of a group; returns true with it if its checksum is valid.
fn read_group_layout(check: &Check<'_>, group: u32) -> Result<(GroupLayout, bool)> {
    let super_ = &check.super_;
    let (block, slot) = super_.descriptor_location(GroupNumber(group));
    let bytes = check.store.block(block, BlockRole::Descriptors)?;
    let descriptor = GroupDescriptor::read_as_stored(&bytes, slot, super_)?;
    let is_sealed = group::has_valid_checksum(&bytes, slot, super_, GroupNumber(group));
    let lazy = super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS);
    let unused = match descriptor.unused_inodes {
        _ if descriptor.flags & flags::INODE_UNINIT != 0 => super_.inodes_per_group,
        // Without checksums an invalid count is ignored.
        unused if unused > super_.inodes_per_group && !lazy => 0,
        unused => unused.min(super_.inodes_per_group),
    };
    let says_so =
        descriptor.unused_inodes != 0 || unused != 0 || descriptor.flags & flags::BLOCK_UNINIT != 0;
    if says_so && !lazy {
        check.problems.add(Problem::new(What::GroupUninitialised).group(group));
    }
    if lazy && descriptor.unused_inodes > super_.inodes_per_group {
        let complaint = Problem::new(What::GroupUnused).group(group);
        check.problems.add(complaint.found(descriptor.unused_inodes));
    }
    let place = GroupLayout {
        descriptor,
        block_bitmap: descriptor.block_bitmap.0,
        inode_bitmap: descriptor.inode_bitmap.0,
        inode_table: descriptor.inode_table.0,
        free_blocks: descriptor.free_clusters,
        free_inodes: descriptor.free_inodes,
        directories: descriptor.directories,
        unused,
        blocks_unwritten: lazy && descriptor.flags & flags::BLOCK_UNINIT != 0,
        inodes_unwritten: lazy && descriptor.flags & flags::INODE_UNINIT != 0,
    };
    Ok((place, is_sealed))
}

/// Checks the MMP block.
fn check_mmp_block(check: &Check<'_>, block: u64) -> Result<()> {
    let complain = || check.problems.add(Problem::new(What::MmpBlock).block(block));
    if !check.is_valid_block(block) || mark_metadata(check, block) {
        complain();
        return Ok(());
    }
    let bytes = check.block(block, BlockRole::Contents)?;
    let sum =
        bytes.get(..1020).and_then(|bytes| Some(check.super_.checksum_seed?.update(bytes).value()));
    if le32(&bytes, 0) != Some(0x004D_4D50) || sum.is_some() && le32(&bytes, 1020) != sum {
        complain();
    }
    Ok(())
}

fn mark_metadata(check: &Check<'_>, block: u64) -> bool {
    check.used.insert(check.cluster_index(block));
    check.metadata.insert(check.block_index(block))
}

/// Returns the blocks of superblock and descriptors, or their copies, in a group.
fn super_and_descriptors(super_: &Superblock, group: u32) -> std::ops::Range<u64> {
    let start = super_.group_start(GroupNumber(group)).0;
    let copy = super_.has_superblock(GroupNumber(group));
    // With clusters of small blocks, group 0 begins before the superblock.
    let first = if group == 0 { super_.location().0.0.max(start) } else { start };
    let end = start.saturating_add(u64::from(super_.blocks_per_group)).min(super_.blocks);
    let count = descriptor_blocks_in(super_, group, copy).saturating_add(copy.into());
    start..first.saturating_add(count).min(end).max(start)
}

fn mark_super_and_descriptors(check: &Check<'_>, group: u32) {
    super_and_descriptors(&check.super_, group).for_each(|block| {
        mark_metadata(check, block);
    });
}

/// Returns the metadata clusters of groups with uninitialized block bitmaps.
pub(super) fn uninit_metadata_clusters(check: &Check<'_>) -> AtomicBitSet {
    let places = || (0u32..).zip(&check.groups).filter(|(_, place)| place.blocks_unwritten);
    if places().next().is_none() {
        return AtomicBitSet::new(0);
    }
    let bits = AtomicBitSet::new(check.used.len());
    let mark = |block: u64| {
        bits.insert(check.cluster_index(block));
    };
    let table_blocks = u64::from(check.super_.inode_table_blocks());
    for (group, place) in places() {
        super_and_descriptors(&check.super_, group).for_each(mark);
        [place.block_bitmap, place.inode_bitmap].into_iter().for_each(mark);
        (place.inode_table..place.inode_table.saturating_add(table_blocks)).for_each(mark);
    }
    bits
}

/// Returns the descriptor blocks and reserved GDT blocks in `group`.
fn descriptor_blocks_in(super_: &Superblock, group: u32, copy: bool) -> u64 {
    let all = super_.descriptor_blocks();
    if !super_.incompatible.contains(Incompatible::META_BG) {
        let reserve = u64::from(super_.reserved_descriptor_blocks);
        return if copy { u64::from(all).saturating_add(reserve) } else { 0 };
    }
    let per_block = super_.block_bytes.checked_div(super_.descriptor_bytes).unwrap_or(1).max(1);
    let meta = group.checked_div(per_block).unwrap_or(0);
    if meta < super_.first_meta_group {
        return if copy { u64::from(all.min(super_.first_meta_group)) } else { 0 };
    }
    let nth = group.checked_rem(per_block).unwrap_or(0);
    u64::from(nth < 2 || nth.saturating_add(1) == per_block)
}

/// Marks bitmaps and inode table, which must be in range and not overlap. The passes need no
/// bitmaps: one out of range is none.
fn mark_tables(check: &Check<'_>, group: u32, place: &mut GroupLayout) {
    let super_ = &check.super_;
    let table_blocks = u64::from(super_.inode_table_blocks());
    let (first, last) = if super_.incompatible.contains(Incompatible::FLEX_BG) {
        (u64::from(super_.first_data_block), super_.blocks)
    } else {
        let start = super_.group_start(GroupNumber(group)).0;
        let end = start.saturating_add(u64::from(super_.blocks_per_group));
        (start, end.min(super_.blocks))
    };
    for (what, start, count) in [
        (What::GroupBlockBitmap, place.block_bitmap, 1),
        (What::GroupInodeBitmap, place.inode_bitmap, 1),
        (What::GroupInodeTable, place.inode_table, table_blocks),
    ] {
        let end = start.saturating_add(count);
        if start < first || end > last {
            check.problems.add(Problem::new(what).group(group).block(start));
            match what {
                What::GroupBlockBitmap => place.block_bitmap = NO_BLOCK,
                What::GroupInodeBitmap => place.inode_bitmap = NO_BLOCK,
                _ => {}
            }
            continue;
        }
        let shared = (start..end).filter(|block| mark_metadata(check, *block)).count() as u64;
        if shared > 0 {
            let complaint = Problem::new(What::GroupOverlap).group(group).block(start);
            check.problems.add(complaint.found(shared).expected(0u64));
        }
    }
}

/// Returns the clusters of a group.
pub(crate) fn clusters_in_group(super_: &Superblock, group: u32) -> u64 {
    let start = super_.group_start(GroupNumber(group)).0;
    let blocks = super_.blocks.saturating_sub(start).min(u64::from(super_.blocks_per_group));
    blocks.div_ceil(u64::from(super_.cluster_blocks.max(1)))
}

/// Counts the members of `bits` in `start..end`.
pub(super) fn count_bits(bits: &AtomicBitSet, start: u64, end: u64) -> u64 {
    let mut sum = 0u64;
    let mut at = start;
    while at < end {
        sum = sum.saturating_add(
            low_bits(bits.word_from(at), end.saturating_sub(at)).count_ones().into(),
        );
        at = at.saturating_add(64);
    }
    sum
}

/// Returns the lowest `count` bits of `word`.
pub(super) fn low_bits(word: u64, count: u64) -> u64 {
    if count >= 64 { word } else { word & (1u64 << count).wrapping_sub(1) }
}

/// Blocks of a resize inode.
pub(super) struct ReservedGdt {
    /// The double-indirect block, the only one that is no group metadata.
    pub(super) dind_block: u64,
    /// Number of blocks, including the double-indirect block.
    pub(super) count: u64,
    /// Last block of the file.
    pub(super) last: u64,
}

/// Checks that the resize inode maps exactly the reserved descriptor blocks and their copies. Entry
/// `n` of the double-indirect block points to descriptor block `n`, which lists its copies.
pub(super) fn check_reserved_gdt(check: &Check<'_>, raw: &RawInode) -> Result<Option<ReservedGdt>> {
    let super_ = &check.super_;
    let pointers = raw.i_block.map(|it| it.get());
    let [.., double, _] = pointers;
    let list = u64::from(double);
    let others = (0..).zip(pointers).any(|(nth, pointer)| nth != 13 && pointer != 0);
    let regular = raw.i_mode.get() & 0o170_000 == 0o100_000 && raw.i_links_count.get() != 0;
    if others
        || !regular
        || !check.is_valid_block(list)
        || check.metadata.contains(check.block_index(list))
    {
        return Ok(None);
    }
    let copies: Vec<u64> = (1..super_.groups)
        .filter(|group| super_.has_superblock(GroupNumber(*group)))
        .map(|group| u64::from(group).saturating_mul(super_.blocks_per_group.into()))
        .collect();
    let fan_out = super_.block_bytes / 4;
    let mut right = vec![0; saturating_usize(fan_out.into())];
    let mut reserve = ReservedGdt { dind_block: list, count: 1, last: 0 };
    let first = super_.location().0.0.saturating_add(1);
    let own = super_.descriptor_blocks();
    let all: Vec<u64> = (0..u32::from(super_.reserved_descriptor_blocks))
        .map(|nth| first.saturating_add(own.saturating_add(nth).into()))
        .collect();
    for (index, (reserved, nth)) in all.iter().copied().zip(own..).enumerate() {
        prefetch::prefetch_list(check, index, &all);
        let slot = nth.checked_rem(fan_out).unwrap_or(0);
        if let Some(word) = right.get_mut(saturating_usize(slot.into())) {
            *word = reserved;
        }
        let copies = copies.iter().map(|copy| reserved.saturating_add(*copy));
        if !block_pointers(
            &check.block(reserved, BlockRole::IndirectBlock(Check::file_id(RESIZE_INODE)))?,
        )
        .eq(copies.chain(std::iter::repeat(0)).take(right.len()))
        {
            return Ok(None);
        }
        let before = u64::from(slot).saturating_add(1).saturating_mul(fan_out.into());
        reserve.last = reserve.last.max(before.saturating_add(12));
    }
    let sound =
        block_pointers(&check.block(list, BlockRole::IndirectBlock(Check::file_id(RESIZE_INODE)))?)
            .eq(right.iter().copied());
    let reserved = u64::from(super_.reserved_descriptor_blocks);
    let each = (copies.len() as u64).saturating_add(1);
    reserve.count = reserve.count.saturating_add(reserved.saturating_mul(each));
    reserve.last = reserve.last.saturating_add(copies.len() as u64).saturating_sub(1);
    Ok(sound.then_some(reserve))
}

fn block_pointers(block: &[u8]) -> impl Iterator<Item = u64> {
    block.chunks_exact(4).map(|word| le32(word, 0).unwrap_or(0).into())
}
