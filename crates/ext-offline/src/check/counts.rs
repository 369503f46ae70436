//! Passes 4 and 5: link counts, bitmaps, and the counters of groups and superblock.

use draconis_types::FileType;
use zerocopy::FromBytes;

use super::bit_set::{AtomicBitSet, iter_set_bits};
use super::layout::{GroupLayout, NO_BLOCK, clusters_in_group, low_bits};
use super::problem::{Problem, What};
use super::{Check, inodes, prefetch, raw_inode};
use crate::blocks::role::Role as BlockRole;
use crate::format::features::{Incompatible, ReadOnlyCompatible};
use crate::format::group::GroupDescriptor;
use crate::format::inode::{RawInode, flags};
use crate::units::saturating_usize;
use crate::{GroupNumber, Result};

/// Subdirectories from which on a directory may have link count 1.
const LINK_MAX: u64 = 65_000;

/// Compares link counts with names, except for the directories in `lost`.
pub(super) fn check_link_counts(check: &Check<'_>, lost: &[u32]) -> Result<()> {
    let super_ = &check.super_;
    for inode in (2..3).chain(super_.first_inode.0..=super_.inodes) {
        let note = check.inode_states.get(inode);
        if inodes::InodeRole::for_inode(check, inode) == inodes::InodeRole::Hidden {
            continue;
        }
        if !note.is_used() || note.links_match() || lost.binary_search(&inode).is_ok() {
            continue;
        }
        let slot = raw_inode::read_inode_slot(check, inode)?;
        let Ok((raw, _)) = RawInode::ref_from_prefix(&slot) else { continue };
        let links = raw.i_links_count.get();
        let names = note.name_count(links);
        let many = super_.read_only_compatible.contains(ReadOnlyCompatible::DIR_NLINK);
        if many && note.is_directory() && links == 1 && names >= LINK_MAX {
            continue;
        }
        let is_inline = raw.i_flags.get() & flags::INLINE_DATA != 0;
        let is_empty = raw.i_blocks_lo.get() == 0
            && raw_inode::file_type(raw) == Some(FileType::File)
            && !(is_inline && raw_inode::inode_size(raw) > 0);
        let what = match names {
            0 if is_empty => What::UnattachedEmpty,
            0 => What::Unattached,
            _ => What::LinkCount,
        };
        check.problems.add(Problem::new(what).inode(inode).found(links).expected(names));
    }
    Ok(())
}

/// Compares the bitmaps and counters with the scan; returns the used inodes and blocks. `unwritten`
/// holds the blocks used in groups with uninitialized block bitmaps.
pub(super) fn check_bitmaps(check: &Check<'_>, unwritten: &AtomicBitSet) -> Result<(u64, u64)> {
    let super_ = &check.super_;
    let inodes = used_inodes(check);
    let (mut used_inodes, mut used_blocks) = (0u64, 0u64);
    for (group, place) in (0u32..).zip(&check.groups) {
        prefetch::prefetch_bitmaps(check, saturating_usize(group.into()));
        let blocks = clusters_in_group(super_, group);
        let first = super_.group_start(GroupNumber(group)).0;
        let side = BitmapComparison::for_block_bitmap(check, group, place, first, blocks);
        let used = match place.blocks_unwritten {
            true => compare_words(check, &side, side.bitmap_words(unwritten)),
            false => compare_bitmap(check, &side)?,
        };
        used_blocks = used_blocks.saturating_add(used);
        check_counter(check, group, What::GroupFreeBlocks, place.free_blocks, blocks, used);

        let per_group = u64::from(super_.inodes_per_group);
        let start = u64::from(group).saturating_mul(per_group);
        let side = BitmapComparison::for_inode_bitmap(&inodes, group, place, start, per_group);
        let used = match place.inodes_unwritten {
            true => compare_words(check, &side, side.bitmap_words(&AtomicBitSet::new(0))),
            false => compare_bitmap(check, &side)?,
        };
        used_inodes = used_inodes.saturating_add(used);
        check_counter(check, group, What::GroupFreeInodes, place.free_inodes, per_group, used);
        check_inode_counters(check, group, place, &inodes, start);
    }
    let ratio = u64::from(super_.cluster_blocks.max(1));
    let free_blocks = check.used.len().saturating_sub(used_blocks).saturating_mul(ratio);
    let free_inodes = u64::from(super_.inodes).saturating_sub(used_inodes);
    let used_blocks = super_.blocks.saturating_sub(free_blocks);
    if super_.needs_recovery() {
        // Linux updates these counters at unmount; those of the groups are valid.
        return Ok((used_inodes, used_blocks));
    }
    let high = match super_.incompatible.contains(Incompatible::SIXTY_FOUR_BIT) {
        true => u64::from(check.raw.s_free_blocks_count_hi.get()) << 32,
        false => 0,
    };
    let found_blocks = u64::from(check.raw.s_free_blocks_count_lo.get()) | high;
    for (what, found, expected) in [
        (What::FreeBlocks, found_blocks, free_blocks),
        (What::FreeInodes, check.raw.s_free_inodes_count.get().into(), free_inodes),
    ] {
        if found != expected {
            check.problems.add(Problem::new(what).found(found).expected(expected));
        }
    }
    Ok((used_inodes, used_blocks))
}

pub(crate) fn used_inodes(check: &Check<'_>) -> AtomicBitSet {
    let bits = AtomicBitSet::new(check.super_.inodes.into());
    for inode in 1..=check.super_.inodes {
        let reserved = inode < check.super_.first_inode.0;
        if reserved || check.inode_states.get(inode).is_used() {
            bits.insert(u64::from(inode).saturating_sub(1));
        }
    }
    bits
}

fn check_counter(check: &Check<'_>, group: u32, what: What, found: u32, all: u64, used: u64) {
    let expected = all.saturating_sub(used);
    // Short descriptors cannot hold 65,536 in sixteen bits.
    let bits = if check.super_.descriptor_bytes > 32 { u64::MAX } else { 0xFFFF };
    if u64::from(found) != expected & bits {
        check.problems.add(Problem::new(what).group(group).found(found).expected(expected));
    }
}

/// Checks the directory count of a group, and that its unused inodes are unused.
fn check_inode_counters(
    check: &Check<'_>,
    group: u32,
    place: &GroupLayout,
    inodes: &AtomicBitSet,
    start: u64,
) {
    let per_group = check.super_.inodes_per_group;
    let first = u32::try_from(start.saturating_add(1)).unwrap_or(u32::MAX);
    let all = first..first.saturating_add(per_group);
    let directories =
        all.filter(|inode| check.inode_states.get(*inode).is_directory()).count() as u64;
    if directories != u64::from(place.directories) {
        let complaint = Problem::new(What::GroupDirectories).group(group);
        check.problems.add(complaint.found(place.directories).expected(directories));
    }
    let end = start.saturating_add(per_group.into());
    let unused = end.saturating_sub(place.unused.into());
    let used = super::layout::count_bits(inodes, unused, end);
    if used > 0 {
        let complaint = Problem::new(What::UsedUninitialised).group(group);
        check.problems.add(complaint.found(used).expected(0u64));
    }
}

/// A bitmap on disk with its expected set.
struct BitmapComparison<'a> {
    group: u32,
    bitmap: u64,
    set: &'a AtomicBitSet,
    descriptor: GroupDescriptor,
    /// First member in the set, and its number.
    start: u64,
    first_number: u64,
    /// Distance of the numbers of adjacent members.
    step: u64,
    count: u64,
    inodes: bool,
}

impl<'a> BitmapComparison<'a> {
    fn role(&self) -> BlockRole {
        match self.inodes {
            true => BlockRole::InodeBitmap(self.group),
            false => BlockRole::BlockBitmap(self.group),
        }
    }

    fn for_block_bitmap(
        check: &'a Check<'_>,
        group: u32,
        place: &GroupLayout,
        first: u64,
        count: u64,
    ) -> Self {
        Self {
            group,
            bitmap: place.block_bitmap,
            set: &check.used,
            descriptor: place.descriptor,
            start: check.cluster_index(first),
            first_number: first,
            step: check.super_.cluster_blocks.into(),
            count,
            inodes: false,
        }
    }

    fn for_inode_bitmap(
        set: &'a AtomicBitSet,
        group: u32,
        place: &GroupLayout,
        start: u64,
        count: u64,
    ) -> Self {
        let (bitmap, named_from) = (place.inode_bitmap, start.saturating_add(1));
        let descriptor = place.descriptor;
        Self {
            group,
            bitmap,
            set,
            descriptor,
            start,
            first_number: named_from,
            step: 1,
            count,
            inodes: true,
        }
    }

    /// Iterates over the words of a set at this bitmap's position.
    fn bitmap_words(&self, set: &'a AtomicBitSet) -> impl Iterator<Item = u64> {
        (0..self.count.div_ceil(64)).map(|nth| {
            let at = nth.saturating_mul(64);
            low_bits(set.word_from(self.start.saturating_add(at)), self.count.saturating_sub(at))
        })
    }

    /// Returns true if the bitmap matches the checksum in its descriptor.
    fn has_valid_checksum(&self, check: &Check<'_>, bytes: &[u8]) -> bool {
        match self.inodes {
            true => self.descriptor.verify_inode_bitmap_csum(bytes, &check.super_),
            false => self.descriptor.verify_block_bitmap_csum(bytes, &check.super_),
        }
    }

    fn report_problem(&self, check: &Check<'_>, what: What, (first, count): (u64, u64)) {
        if count == 0 {
            return;
        }
        let named = self.first_number.saturating_add(first.saturating_mul(self.step));
        let complaint = Problem::new(what).group(self.group).found(count);
        let complaint = if self.inodes {
            complaint.inode(u32::try_from(named).unwrap_or(u32::MAX))
        } else {
            complaint.block(named)
        };
        check.problems.add(complaint);
    }
}

/// Compares a bitmap with its expected set; returns the number of members here.
fn compare_bitmap(check: &Check<'_>, side: &BitmapComparison<'_>) -> Result<u64> {
    if side.bitmap == NO_BLOCK {
        return Ok(compare_words(check, side, side.bitmap_words(side.set)));
    }
    let bytes = check.block(side.bitmap, side.role())?;
    let words = || bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let what = |of_inodes, of_blocks| if side.inodes { of_inodes } else { of_blocks };
    if !side.has_valid_checksum(check, &bytes) {
        let what = what(What::InodeBitmapChecksum, What::BlockBitmapChecksum);
        check.problems.add(Problem::new(what).group(side.group).block(side.bitmap));
    }
    let filled = words().zip(0u64..).all(|(there, nth)| {
        let left = side.count.saturating_sub(nth.saturating_mul(64));
        there | low_bits(u64::MAX, left) == u64::MAX
    });
    if !filled {
        let what = what(What::InodeBitmapEnd, What::BlockBitmapEnd);
        check.problems.add(Problem::new(what).group(side.group).block(side.bitmap));
    }
    Ok(compare_words(check, side, words()))
}

/// Compares 64 bits at a time.
fn compare_words(
    check: &Check<'_>,
    side: &BitmapComparison<'_>,
    words: impl Iterator<Item = u64>,
) -> u64 {
    let (mut free, mut taken) = ((0, 0u64), (0, 0u64));
    let (mut used, mut at) = (0u64, 0u64);
    for there in words {
        let left = side.count.saturating_sub(at);
        let should = low_bits(side.set.word_from(side.start.saturating_add(at)), left);
        used = used.saturating_add(should.count_ones().into());
        add_differing_bits(&mut free, at, should & !there);
        add_differing_bits(&mut taken, at, low_bits(there, left) & !should);
        at = at.saturating_add(64);
    }
    let (used_but_free, free_but_used) = if side.inodes {
        (What::InodeUsedButFree, What::InodeFreeButUsed)
    } else {
        (What::BlockUsedButFree, What::BlockFreeButUsed)
    };
    side.report_problem(check, used_but_free, free);
    side.report_problem(check, free_but_used, taken);
    used
}

/// Counts the bits of `word` and keeps the first position.
fn add_differing_bits((first, count): &mut (u64, u64), at: u64, word: u64) {
    if *count == 0
        && let Some(bit) = iter_set_bits(word).next()
    {
        *first = at.saturating_add(bit);
    }
    *count = count.saturating_add(word.count_ones().into());
}
