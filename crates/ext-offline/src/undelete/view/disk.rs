//! Disk of the volume of deleted files: metadata from memory, contents from the image.

use std::collections::BTreeMap;
use std::sync::Arc;

use draconis_device::{Disk, Extent, Pending, Properties, ReadAnswer, Refused, Urgency};
use draconis_types::Block;
use zerocopy::{FromZeros, IntoBytes};

use super::{FIRST_INODE, HASH_VERSION};
use crate::blocks::data::CHUNK_BYTES;
use crate::blocks::uncached::read_bytes;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::group::GroupDescriptor;
use crate::format::inode::{EXTRA_BYTES, low16};
use crate::format::low32;
use crate::format::superblock::{
    FLAG_UNSIGNED_HASH, MAGIC, RawSuperblock, STATE_CLEAN, Superblock,
};
use crate::units::{saturating_u32, saturating_usize};
use crate::{Error, FsBlock, Result};

/// Descriptor size, in bytes.
const DESCRIPTOR_BYTES: u64 = 64;

/// Layout of the volume, in blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct ViewLayout {
    pub(super) block_bytes: u64,
    pub(super) inode_bytes: u64,
    pub(super) groups: u64,
    pub(super) inodes_per_group: u64,
    /// Block of the superblock, and its byte offset there.
    pub(super) superblock: (u64, usize),
    /// First block of the image, and the blocks taken from it.
    pub(super) image: u64,
    pub(super) image_blocks: u64,
    /// First block of the bitmaps: two for each group.
    pub(super) bitmaps: u64,
    pub(super) tables: u64,
    /// First block of directories, maps and attributes.
    pub(super) nodes: u64,
    pub(super) blocks: u64,
}

impl ViewLayout {
    /// Lays out a volume with inodes up to `last_inode` and at most `node_blocks` nodes.
    pub(super) fn new(
        super_: &Superblock,
        image_blocks: u64,
        last_inode: u32,
        node_blocks: u64,
    ) -> Result<Self> {
        let too_large =
            || Error::Unsupported { feature: "deleted files need: a larger volume".to_owned() };
        let block_bytes = u64::from(super_.block_bytes);
        let inode_bytes = u64::from(super_.inode_bytes.max(256));
        let bits = block_bytes.saturating_mul(8);
        let (superblock, at) = super_.location();
        let first_data_block = u64::from(block_bytes == 1024);
        let inodes = u64::from(last_inode);
        let mut groups = inodes.div_ceil(bits).max(1);
        // More groups need more descriptors, which fill a small part of a group.
        for _ in 0..64 {
            let per_block = quotient(block_bytes, inode_bytes).max(1);
            let inodes_per_group = inodes.div_ceil(groups).next_multiple_of(per_block.max(8));
            let table_blocks = quotient(inodes_per_group.saturating_mul(inode_bytes), block_bytes);
            let descriptors = groups.saturating_mul(DESCRIPTOR_BYTES).div_ceil(block_bytes);
            let head = superblock.0.saturating_add(1).saturating_add(descriptors);
            let image = head.next_multiple_of(quotient(CHUNK_BYTES, block_bytes).max(1));
            let bitmaps = image.saturating_add(image_blocks);
            let tables = bitmaps.saturating_add(groups.saturating_mul(2));
            let nodes = tables.saturating_add(groups.saturating_mul(table_blocks));
            let end = nodes.saturating_add(node_blocks);
            let needed = end.saturating_sub(first_data_block).div_ceil(bits);
            if needed > groups {
                groups = needed;
                continue;
            }
            let least = groups.saturating_sub(1).saturating_mul(bits).saturating_add(2);
            let blocks = end.max(least.saturating_add(first_data_block));
            let is_possible = inodes_per_group <= bits
                && groups.saturating_mul(inodes_per_group) <= u32::MAX.into()
                && blocks < 1 << 48
                && i64::try_from(blocks.saturating_mul(block_bytes)).is_ok();
            let superblock = (superblock.0, at);
            let layout = Self {
                block_bytes,
                inode_bytes,
                groups,
                inodes_per_group,
                superblock,
                image,
                image_blocks,
                bitmaps,
                tables,
                nodes,
                blocks,
            };
            return if is_possible { Ok(layout) } else { Err(too_large()) };
        }
        Err(too_large())
    }

    fn table_blocks(&self) -> u64 {
        quotient(self.inodes_per_group.saturating_mul(self.inode_bytes), self.block_bytes)
    }

    pub(super) fn superblock(&self, of: &Superblock) -> RawSuperblock {
        let mut raw = RawSuperblock::new_zeroed();
        raw.s_magic = MAGIC.into();
        raw.s_rev_level = 1.into();
        raw.s_state = STATE_CLEAN.into();
        raw.s_errors = 1.into();
        raw.s_inodes_count = low32(self.groups.saturating_mul(self.inodes_per_group)).into();
        raw.s_blocks_count_lo = low32(self.blocks).into();
        raw.s_blocks_count_hi = low32(self.blocks >> 32).into();
        raw.s_first_data_block = u32::from(self.block_bytes == 1024).into();
        raw.s_log_block_size = (of.block_bytes.trailing_zeros().saturating_sub(10)).into();
        raw.s_log_cluster_size = raw.s_log_block_size;
        raw.s_blocks_per_group = low32(self.block_bytes.saturating_mul(8)).into();
        raw.s_clusters_per_group = raw.s_blocks_per_group;
        raw.s_inodes_per_group = low32(self.inodes_per_group).into();
        raw.s_first_ino = FIRST_INODE.into();
        raw.s_inode_size = low16(low32(self.inode_bytes)).into();
        raw.s_min_extra_isize = EXTRA_BYTES.into();
        raw.s_want_extra_isize = EXTRA_BYTES.into();
        raw.s_desc_size = 64.into();
        raw.s_def_hash_version = HASH_VERSION;
        raw.s_flags = FLAG_UNSIGNED_HASH.into();
        raw.s_uuid = of.uuid;
        for (to, from) in raw.s_volume_name.iter_mut().zip(&of.label) {
            *to = *from;
        }
        raw.s_mkfs_time = of.dates.made.into();
        raw.s_wtime = of.dates.written.into();
        let compatible = Compatible::EXT_ATTR | Compatible::DIR_INDEX | Compatible::SPARSE_SUPER2;
        let incompatible = Incompatible::FILETYPE
            | Incompatible::EXTENTS
            | Incompatible::SIXTY_FOUR_BIT
            | Incompatible::FLEX_BG
            | (of.incompatible & Incompatible::ENCRYPT);
        let read_only = ReadOnlyCompatible::LARGE_FILE
            | ReadOnlyCompatible::HUGE_FILE
            | ReadOnlyCompatible::DIR_NLINK
            | ReadOnlyCompatible::EXTRA_ISIZE;
        raw.set_features([compatible.bits(), incompatible.bits(), read_only.bits()]);
        raw
    }
}

/// Disk of the volume.
pub(super) struct ViewDisk {
    pub(super) image: Arc<dyn Disk>,
    pub(super) layout: ViewLayout,
    pub(super) superblock: RawSuperblock,
    pub(super) super_: Superblock,
    /// Inodes by number, without the zeros at their end.
    pub(super) inodes: BTreeMap<u32, Vec<u8>>,
    /// Directories, nodes of maps, attributes.
    pub(super) nodes: BTreeMap<u64, Vec<u8>>,
}

impl ViewDisk {
    /// Returns a block that is not the image's.
    fn block(&self, at: u64) -> Vec<u8> {
        let layout = &self.layout;
        let mut bytes = vec![0; saturating_usize(layout.block_bytes)];
        let (super_at, offset) = layout.superblock;
        if at == super_at {
            put(&mut bytes, offset, self.superblock.as_bytes());
        } else if at > super_at && at < layout.image {
            let per_block = layout.block_bytes / DESCRIPTOR_BYTES;
            let first = at.saturating_sub(super_at).saturating_sub(1).saturating_mul(per_block);
            for (slot, group) in
                (first..layout.groups).take(saturating_usize(per_block)).enumerate()
            {
                self.put_descriptor(&mut bytes, saturating_u32(slot as u64), group);
            }
        } else if (layout.bitmaps..layout.tables).contains(&at) {
            bytes.fill(0xFF);
        } else if (layout.tables..layout.nodes).contains(&at) {
            let per_block = quotient(layout.block_bytes, layout.inode_bytes).max(1);
            let table_blocks = layout.table_blocks().max(1);
            let nth = at.saturating_sub(layout.tables);
            let group = quotient(nth, table_blocks);
            let in_table = nth.saturating_sub(group.saturating_mul(table_blocks));
            let first = group
                .saturating_mul(layout.inodes_per_group)
                .saturating_add(in_table.saturating_mul(per_block))
                .saturating_add(1);
            let range = saturating_u32(first)..saturating_u32(first.saturating_add(per_block));
            for (number, inode) in self.inodes.range(range) {
                let slot = u64::from(*number).saturating_sub(first);
                put(&mut bytes, saturating_usize(slot.saturating_mul(layout.inode_bytes)), inode);
            }
        } else if let Some(node) = self.nodes.get(&at) {
            put(&mut bytes, 0, node);
        }
        bytes
    }

    fn put_descriptor(&self, block: &mut [u8], slot: u32, group: u64) {
        let layout = &self.layout;
        let table = group.saturating_mul(layout.table_blocks());
        let bitmaps = layout.bitmaps.saturating_add(group.saturating_mul(2));
        let descriptor = GroupDescriptor {
            block_bitmap: FsBlock(bitmaps),
            inode_bitmap: FsBlock(bitmaps.saturating_add(1)),
            inode_table: FsBlock(layout.tables.saturating_add(table)),
            free_clusters: 0,
            free_inodes: 0,
            directories: 0,
            unused_inodes: 0,
            flags: 0,
            bitmap_checksums: [0; 2],
        };
        // A descriptor of 64 bytes holds all locations and counts.
        let written = descriptor.write_table_locations(block, slot, &self.super_);
        debug_assert!(written.is_ok());
    }

    /// Fills a range from the image and from memory.
    fn fill(
        &self,
        at: Extent,
        into: &mut Block,
    ) -> std::result::Result<(), draconis_device::Error> {
        let layout = &self.layout;
        let end = at.start_bytes.saturating_add(at.len_bytes);
        let image = self.image_bytes();
        let mut from = at.start_bytes;
        while from < end {
            let start = saturating_usize(from.saturating_sub(at.start_bytes));
            let to = if image.contains(&from) {
                let to = end.min(image.end);
                let part = Extent::new(from.saturating_sub(image.start), to.saturating_sub(from));
                into.copy_in(start, &read_bytes(&*self.image, part)?);
                to
            } else {
                let block = quotient(from, layout.block_bytes);
                let block_start = block.saturating_mul(layout.block_bytes);
                let to = block_start.saturating_add(layout.block_bytes).min(end);
                let bytes = self.block(block);
                let part = saturating_usize(from.saturating_sub(block_start))
                    ..saturating_usize(to.saturating_sub(block_start));
                into.copy_in(start, bytes.get(part).unwrap_or_default());
                to
            };
            from = to.max(from.saturating_add(1));
        }
        Ok(())
    }

    /// Returns where the image's blocks are, in bytes.
    fn image_bytes(&self) -> std::ops::Range<u64> {
        let layout = &self.layout;
        let start = layout.image.saturating_mul(layout.block_bytes);
        start..start.saturating_add(layout.image_blocks.saturating_mul(layout.block_bytes))
    }
}

impl Disk for ViewDisk {
    fn properties(&self) -> Properties {
        Properties {
            len_bytes: self.layout.blocks.saturating_mul(self.layout.block_bytes),
            read_only: true,
            discards: false,
            ..self.image.properties()
        }
    }

    fn read(&self, at: Extent, mut into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let image = self.image_bytes();
        if at.start_bytes >= image.start && at.end_bytes().is_some_and(|end| end <= image.end) {
            let inside = Extent::new(at.start_bytes.saturating_sub(image.start), at.len_bytes);
            return self.image.read(inside, into, urgency);
        }
        let checked = self.properties().check_range(at, into.len());
        Pending::ready(match checked.and_then(|()| self.fill(at, &mut into)) {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { payload: Some(into), error }),
        })
    }
}

fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    let place = block.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len()));
    place.unwrap_or_default().copy_from_slice(bytes);
}

/// Returns the quotient; 0 for a divisor of 0, which no size of a checked superblock is.
pub(super) fn quotient(dividend: u64, divisor: u64) -> u64 {
    dividend.checked_div(divisor).unwrap_or(0)
}
