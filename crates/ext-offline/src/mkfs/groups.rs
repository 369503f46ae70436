//! Writing of bitmaps, inode tables, descriptors and superblocks.
//!
//! ```text
//!   each group: free ranges ─▶ bitmaps, counts, flags ─▶ descriptor with checksum
//!               inodes with checksums ─▶ the written part of its table
//! ```
//! Law: groups with nothing but metadata are flagged uninitialized, and their bitmaps are not
//! written. This needs descriptor checksums, and excludes the last group.

use zerocopy::IntoBytes;

use super::disk_writer::{DiskWriter, MAX_UNWRITTEN_BYTES, MappedInode};
use super::layout::Layout;
use super::plan::{NodePlacement, VolumePlan};
use super::system_files::SystemFileKind;
use super::tree::{NodeId, NodeKind};
use super::{FormatError, Result, reserved_gdt};
use crate::format::features::ReadOnlyCompatible;
use crate::format::group::{GroupDescriptor, flags as group_flags};
use crate::format::inode::{NewInode, RawInode, set_checksum};
use crate::format::quota::QuotaType;
use crate::format::superblock::RawSuperblock;
use crate::format::xattr::{NewXattr, encode_body};
use crate::map::build::BuiltMap;
use crate::units::{saturating_u32, saturating_usize};
use crate::{FsBlock, GroupNumber, InodeNumber};

/// Reserved inodes: the first ten.
const RESERVED_INODES: u64 = 10;
/// Maximum link count; directories with more links store 1.
const LINK_MAX: u32 = 65_000;

/// Writes bitmaps, inode tables and the backups of all groups. Returns the superblock of group 0,
/// which is not written. `hidden` are the maps of the system files.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
pub(super) fn write_groups(
    plan: &VolumePlan<'_>,
    mapped: &[MappedInode],
    hidden: &[BuiltMap],
    writer: &DiskWriter<'_>,
) -> Result<RawSuperblock> {
    let layout = &plan.layout;
    let super_ = &layout.super_;
    let unfit =
        |_| FormatError::Misuse("the descriptors of this volume hold no such numbers".into());
    let mut by_inode: Vec<usize> = (0..plan.placed.len()).collect();
    by_inode.sort_unstable_by_key(|nth| plan.placed.get(*nth).map(|placed| placed.inode));
    let mut inodes = &by_inode[..];
    let table_len =
        saturating_usize(super_.descriptor_blocks().into()).saturating_mul(layout.block_len());
    let mut descriptors = vec![0; table_len];
    let mut free_clusters = 0u64;
    let mut gathered = WriteBatch::default();
    for number in 0..super_.groups {
        let last = (u64::from(number) + 1).saturating_mul(super_.inodes_per_group.into());
        let inode_of = |nth: &usize| plan.placed.get(*nth).map_or(0, |placed| placed.inode);
        let here = inodes.partition_point(|nth| u64::from(inode_of(nth)) <= last);
        let (mine, later) = inodes.split_at(here);
        inodes = later;
        let (group, bitmaps) = build_group(plan, number, mine);
        free_clusters = free_clusters.saturating_add(group.free_clusters.into());
        let per_block = super_.descriptors_per_block();
        let block =
            saturating_usize(u64::from(number / per_block)).saturating_mul(layout.block_len());
        let block = descriptors.get_mut(block..).unwrap_or_default();
        group.write_table_locations(block, number % per_block, super_).map_err(unfit)?;
        group.write(block, number % per_block, super_, GroupNumber(number)).map_err(unfit)?;
        let [blocks, used] = bitmaps;
        for (at, bitmap) in [(group.block_bitmap, blocks), (group.inode_bitmap, used)] {
            match bitmap {
                Some(bitmap) => gathered.add_write(at.0, bitmap.0),
                None => writer.zero_blocks(at.0, at.0.saturating_add(1))?,
            }
        }
        let table = inode_table(plan, number, mine, mapped, hidden).map_err(unfit)?;
        let written = group.inode_table.offset((table.len() / layout.block_len()) as u64);
        let end = group.inode_table.offset(super_.inode_table_blocks().into());
        gathered.add_write(group.inode_table.0, table);
        writer.zero_blocks(written.0, end.0)?;
        let is_last_of_flex =
            number.saturating_add(1).is_multiple_of(layout.options.groups_per_flex());
        if is_last_of_flex || gathered.bytes >= MAX_UNWRITTEN_BYTES {
            gathered.write(layout, writer)?;
        }
    }
    gathered.write(layout, writer)?;
    let superblock = |number: u32| superblock(plan, number, free_clusters, hidden);
    if layout.has_meta_bg() {
        write_meta_descriptors(layout, &descriptors, writer)?;
    }
    for number in (0..super_.groups).filter(|it| super_.has_superblock(GroupNumber(*it))) {
        write_copies(layout, number, &superblock(number), &descriptors, writer)?;
    }
    Ok(superblock(0))
}

/// Writes the head of a group; for group 0 without the superblock.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
fn write_copies(
    layout: &Layout,
    number: u32,
    superblock: &RawSuperblock,
    descriptors: &[u8],
    writer: &DiskWriter<'_>,
) -> Result<()> {
    let start = layout.backup_start(number);
    let mut bytes = vec![];
    if number > 0 {
        bytes.extend(superblock.as_bytes());
        bytes.resize(layout.block_len(), 0);
    }
    if !layout.has_meta_bg() {
        bytes.extend(descriptors);
    }
    let at = if number > 0 { start } else { start.saturating_add(1) };
    let end = at.saturating_add((bytes.len() / layout.block_len()) as u64);
    if !bytes.is_empty() {
        writer.write_blocks(at, &bytes)?;
    }
    if layout.has_meta_bg() {
        return Ok(());
    }
    if number > 0 {
        return writer.zero_blocks(
            end,
            layout.group_start(number).saturating_add(layout.backup_blocks(number)),
        );
    }
    let unfit = |_| FormatError::Misuse("the descriptors' reserve lies beyond 32 bits".into());
    let reserve = reserved_gdt::reserved_gdt_blocks(layout).map_err(unfit)?;
    if !reserve.is_empty() {
        writer.write_blocks(end, &reserve)?;
    }
    Ok(())
}

/// Writes each descriptor block to the groups of its meta group that hold it.
fn write_meta_descriptors(
    layout: &Layout,
    descriptors: &[u8],
    writer: &DiskWriter<'_>,
) -> Result<()> {
    let per_block = layout.super_.descriptors_per_block();
    for (nth, block) in (0u32..).zip(descriptors.chunks(layout.block_len())) {
        let first = nth.saturating_mul(per_block);
        for number in first..first.saturating_add(per_block).min(layout.super_.groups) {
            if layout.has_meta_descriptors(number) {
                let has_super = layout.super_.has_superblock(GroupNumber(number));
                writer.write_blocks(
                    layout.backup_start(number).saturating_add(has_super.into()),
                    block,
                )?;
            }
        }
    }
    Ok(())
}

/// Returns the superblock for group `number`.
fn superblock(
    plan: &VolumePlan<'_>,
    number: u32,
    free_clusters: u64,
    hidden: &[BuiltMap],
) -> RawSuperblock {
    let mut raw = plan.layout.raw.clone();
    let mut used = (plan.placed.len() as u64).saturating_sub(1).saturating_add(RESERVED_INODES);
    for (hidden, built) in plan.system_files.iter().zip(hidden) {
        if u64::from(hidden.inode) > RESERVED_INODES {
            used = used.saturating_add(1);
        }
        match hidden.purpose {
            SystemFileKind::Value(_) => {}
            SystemFileKind::Orphans => raw.s_orphan_file_inum = hidden.inode.into(),
            SystemFileKind::Quota(QuotaType::User) => raw.s_usr_quota_inum = hidden.inode.into(),
            SystemFileKind::Quota(QuotaType::Group) => raw.s_grp_quota_inum = hidden.inode.into(),
            SystemFileKind::Quota(QuotaType::Project) => raw.s_prj_quota_inum = hidden.inode.into(),
            SystemFileKind::Journal(_) => {
                let size =
                    u64::from(hidden.blocks).saturating_mul(plan.layout.super_.block_bytes.into());
                let words =
                    built.pointers.into_iter().chain([saturating_u32(size >> 32), low_u32(size)]);
                for (to, from) in raw.s_jnl_blocks.iter_mut().zip(words) {
                    *to = from.into();
                }
            }
        }
    }
    raw.s_mmp_block = plan.mmp_block.into();
    // Cannot fail: the layout bounds the counts.
    let _ = raw.set_free(
        free_clusters.saturating_mul(plan.layout.cluster_blocks()),
        u64::from(plan.layout.super_.inodes).saturating_sub(used),
    );
    let counts = ReadOnlyCompatible::EXT4_ONLY;
    if plan.layout.options.read_only_compatible.intersects(counts)
        || plan.layout.options.groups_per_flex() > 1
    {
        raw.s_kbytes_written = (plan.data_bytes() / 1024).saturating_add(1).into();
    }
    if number > 0 {
        // A backup does not record how the volume was unmounted.
        raw.s_state = 0.into();
    }
    raw.s_block_group_nr = u16::try_from(number).unwrap_or(u16::MAX).into();
    raw.set_checksum();
    raw
}

fn low_u32(value: u64) -> u32 {
    crate::format::low32(value)
}

/// Returns the descriptor of a group, and its block and inode bitmaps if needed.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
fn build_group(
    plan: &VolumePlan<'_>,
    number: u32,
    mine: &[usize],
) -> (GroupDescriptor, [Option<BitmapBuilder>; 2]) {
    let layout = &plan.layout;
    let super_ = &layout.super_;
    let (start, end) = (layout.group_start(number), layout.group_end(number));
    let ratio = layout.cluster_blocks();
    let mut blocks = BitmapBuilder::all_set(layout.block_len());
    let mut free = 0u64;
    for (from, stop) in plan.space.between(start, end) {
        blocks.clear((from - start) / ratio, (stop - start) / ratio);
        free = free.saturating_add((stop - from) / ratio);
    }
    let inodes = GroupInodes::from_plan(plan, number, mine);
    let tables = plan.tables.get(saturating_usize(number.into())).copied().unwrap_or_default();
    let mut group = GroupDescriptor {
        block_bitmap: FsBlock(tables.blocks),
        inode_bitmap: FsBlock(tables.inodes),
        inode_table: FsBlock(tables.table),
        free_clusters: saturating_u32(free),
        free_inodes: saturating_u32(inodes.free),
        directories: inodes.directories,
        unused_inodes: 0,
        flags: 0,
        bitmap_checksums: [0; 2],
    };
    let mut is_needed = [true; 2];
    if super_.read_only_compatible.intersects(ReadOnlyCompatible::CHECKSUMS) {
        let own = if layout.options.groups_per_flex() > 1 {
            0
        } else {
            2 + u64::from(super_.inode_table_blocks())
        };
        // Contiguous with clusters, too.
        let least = layout.backup_blocks(number).saturating_add(own).div_ceil(ratio);
        let is_last = number.saturating_add(1) == super_.groups;
        is_needed =
            [is_last || free.saturating_add(least) < (end - start) / ratio, inodes.last > 0];
        group.unused_inodes = super_.inodes_per_group.saturating_sub(saturating_u32(inodes.last));
        group.flags = group_flags::INODE_ZEROED;
        for (is_needed, flag) in
            is_needed.into_iter().zip([group_flags::BLOCK_UNINIT, group_flags::INODE_UNINIT])
        {
            group.flags |= if is_needed { 0 } else { flag };
        }
    }
    if is_needed[0] {
        group.set_block_bitmap_csum(&blocks.0, super_);
    }
    if is_needed[1] {
        group.set_inode_bitmap_csum(&inodes.bitmap.0, super_);
    }
    (group, [is_needed[0].then_some(blocks), is_needed[1].then_some(inodes.bitmap)])
}

/// Inodes of a group.
struct GroupInodes {
    bitmap: BitmapBuilder,
    free: u64,
    directories: u32,
    /// One-based index of the last used inode; 0 for none.
    last: u64,
}

impl GroupInodes {
    fn from_plan(plan: &VolumePlan<'_>, number: u32, mine: &[usize]) -> Self {
        let per_group = u64::from(plan.layout.super_.inodes_per_group);
        let first = u64::from(number).saturating_mul(per_group).saturating_add(1);
        let mut bitmap = BitmapBuilder::all_set(plan.layout.block_len());
        bitmap.clear(0, per_group);
        // The root is one of the ten. A group may have only eight inodes.
        let reserved = (RESERVED_INODES + 1).saturating_sub(first).min(per_group);
        bitmap.set(0, reserved);
        let mut inodes = Self {
            bitmap,
            free: per_group.saturating_sub(reserved),
            directories: 0,
            last: reserved,
        };
        let mut take = |inode: u32| {
            let nth = u64::from(inode).saturating_sub(first);
            if u64::from(inode) > RESERVED_INODES {
                inodes.bitmap.set(nth, nth.saturating_add(1));
                inodes.free = inodes.free.saturating_sub(1);
                inodes.last = inodes.last.max(nth.saturating_add(1));
            }
        };
        for hidden in plan.system_files.iter().filter(|it| is_in_group(it.inode, first, per_group))
        {
            take(hidden.inode);
        }
        for placed in mine.iter().filter_map(|nth| plan.placed.get(*nth)) {
            take(placed.inode);
        }
        let nodes = mine.iter().filter_map(|nth| plan.placed.get(*nth));
        let is_directory = |placed: &&NodePlacement| {
            matches!(plan.tree.node(NodeId(placed.node)).kind_data, NodeKind::Directory)
        };
        inodes.directories = saturating_u32(nodes.filter(is_directory).count() as u64);
        inodes
    }
}

fn is_in_group(inode: u32, first: u64, per_group: u64) -> bool {
    (first..first.saturating_add(per_group)).contains(&u64::from(inode))
}

/// Returns the inode table of a group, up to the block of its last nonzero inode.
fn inode_table(
    plan: &VolumePlan<'_>,
    number: u32,
    mine: &[usize],
    mapped: &[MappedInode],
    hidden: &[BuiltMap],
) -> crate::Result<Vec<u8>> {
    let layout = &plan.layout;
    let super_ = &layout.super_;
    let inode_bytes = saturating_usize(super_.inode_bytes.into());
    let per_group = u64::from(super_.inodes_per_group);
    let first = u64::from(number).saturating_mul(per_group).saturating_add(1);
    let mut slots: Vec<(u32, Vec<u8>)> = vec![];
    if first <= RESERVED_INODES {
        let has_sums = super_.checksum_seed.is_some();
        let last = if has_sums { saturating_u32(RESERVED_INODES) } else { 1 };
        for inode in (1..=last).filter(|inode| is_in_group(*inode, first, per_group)) {
            slots.push((inode, empty_reserved_inode(layout, inode)));
        }
        if plan.resize_dind_block != 0 && is_in_group(reserved_gdt::INODE, first, per_group) {
            slots.push((reserved_gdt::INODE, reserved_gdt::inode(layout, plan.resize_dind_block)?));
        }
    }
    let hidden = plan.system_files.iter().zip(hidden);
    for (it, built) in hidden.filter(|(it, _)| is_in_group(it.inode, first, per_group)) {
        slots.push((it.inode, it.encode_inode(&plan.layout, &plan.tree.values, built)));
    }
    for nth in mine {
        let Some(placed) = plan.placed.get(*nth) else { continue };
        let Some(mapped) = mapped.get(*nth) else { continue };
        slots.push((placed.inode, encode_inode(plan, placed, mapped)));
    }
    // If two slots have the same inode, the later one wins.
    slots.sort_by_key(|slot| slot.0);
    let mut bytes: Vec<u8> = vec![];
    for (inode, slot) in slots {
        let at =
            saturating_usize(u64::from(inode).saturating_sub(first)).saturating_mul(inode_bytes);
        bytes.resize(at, 0);
        bytes.extend(slot);
    }
    bytes.resize(bytes.len().next_multiple_of(layout.block_len()), 0);
    Ok(bytes)
}

/// Returns an unused reserved inode. Inode 1, the list of bad blocks, is empty and has its times
/// set.
fn empty_reserved_inode(layout: &Layout, number: u32) -> Vec<u8> {
    let mut bytes = vec![0; saturating_usize(layout.super_.inode_bytes.into())];
    if number == 1 {
        let now = layout.creation_time();
        let inode = NewInode { accessed: now, modified: now, changed: now, ..NewInode::default() };
        let old = inode.encode(128);
        debug_assert_eq!(old.len(), size_of::<RawInode>());
        bytes.splice(..old.len(), old);
    }
    set_checksum(&mut bytes, InodeNumber(number), &layout.super_);
    bytes
}

fn encode_inode(plan: &VolumePlan<'_>, placed: &NodePlacement, mapped: &MappedInode) -> Vec<u8> {
    let super_ = &plan.layout.super_;
    let node = plan.tree.node(NodeId(placed.node));
    let in_body =
        node.attributes.get(..saturating_usize(placed.in_body.into())).unwrap_or_default();
    // Like mke2fs, the rest of inline contents comes first.
    let contents = mapped.value.iter().map(|value| NewXattr::from_inline_data(value));
    let in_body: Vec<_> = contents.chain(in_body.iter().cloned()).collect();
    let body = match &in_body[..] {
        [] => vec![],
        some => encode_body(some, super_.inode_bytes),
    };
    let links = if placed.links > LINK_MAX { 1 } else { placed.links };
    let inode = NewInode {
        mode: node.raw_mode(),
        uid: node.uid,
        gid: node.gid,
        size_bytes: mapped.size_bytes,
        links: u16::try_from(links).unwrap_or(1),
        sectors: placed
            .allocated_blocks(&plan.layout)
            .saturating_mul(u64::from(super_.block_bytes / 512)),
        flags: mapped.flags,
        pointers: mapped.pointers,
        accessed: node.accessed,
        modified: node.modified,
        changed: node.changed,
        created: node.created,
        xattr_block: placed.xattr_block,
        attributes: &body,
    };
    let mut bytes = inode.encode(super_.inode_bytes);
    set_checksum(&mut bytes, InodeNumber(placed.inode), super_);
    bytes
}

/// Blocks to write; adjacent ones are merged into one request.
#[derive(Default)]
struct WriteBatch {
    parts: Vec<(u64, Vec<u8>)>,
    bytes: u64,
}

impl WriteBatch {
    fn add_write(&mut self, at: u64, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.bytes = self.bytes.saturating_add(bytes.len() as u64);
            self.parts.push((at, bytes));
        }
    }

    /// Writes all blocks; waits now and then, so that memory is bounded.
    #[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
    fn write(&mut self, layout: &Layout, writer: &DiskWriter<'_>) -> Result<()> {
        let mut parts = std::mem::take(&mut self.parts);
        parts.sort_unstable_by_key(|part| part.0);
        let mut runs: Vec<(u64, Vec<u8>)> = vec![];
        for (at, bytes) in parts {
            match runs.last_mut() {
                Some((start, run))
                    if start.saturating_add((run.len() / layout.block_len()) as u64) == at =>
                {
                    run.extend(bytes);
                }
                _ => runs.push((at, bytes)),
            }
        }
        let mut last = None;
        for (at, bytes) in runs {
            last = Some(writer.write_blocks(at, &bytes)?);
        }
        if let Some(ticket) = last.filter(|_| self.bytes >= MAX_UNWRITTEN_BYTES) {
            self.bytes = 0;
            writer.wait(ticket)?;
        }
        Ok(())
    }
}

/// A bitmap block, filled in runs.
struct BitmapBuilder(Vec<u8>);

impl BitmapBuilder {
    fn all_set(block_bytes: usize) -> Self {
        Self(vec![0xFF; block_bytes])
    }

    /// Sets the bits in `from..end`.
    fn set(&mut self, from: u64, end: u64) {
        self.fill(from, end, 0xFF);
    }

    /// Clears the bits in `from..end`.
    fn clear(&mut self, from: u64, end: u64) {
        self.fill(from, end, 0);
    }

    fn fill(&mut self, from: u64, end: u64, value: u8) {
        let mut bit = from;
        while bit < end {
            let Some(byte) = self.0.get_mut(saturating_usize(bit / 8)) else { return };
            if bit.is_multiple_of(8) && end.saturating_sub(bit) >= 8 {
                *byte = value;
                bit = bit.saturating_add(8);
            } else {
                let mask = 1 << (bit % 8);
                *byte = *byte & !mask | value & mask;
                bit = bit.saturating_add(1);
            }
        }
    }
}
