//! Metadata of a volume: ranges where a wrong byte matters.
//!
//! A separate parser for valid images only, so that it shares no bug with the tested one.

use std::collections::BTreeMap;
use std::ops::Range;

/// Byte ranges by kind of structure.
pub type StructureRanges = BTreeMap<&'static str, Vec<Range<usize>>>;

/// Returns the structures of a valid image whose descriptors follow its superblock.
pub fn find_structures(image: &[u8]) -> StructureRanges {
    let volume = ParsedVolume::parse(image);
    let mut found = StructureRanges::new();
    found.insert("superblock", vec![1024..1024 + 0x180, 1024 + 0x180..2048]);
    let mut add = |what, range: Range<usize>| {
        if range.end <= image.len() && range.start >= 1024 {
            found.entry(what).or_default().push(range);
        }
    };
    for group in 0..volume.groups {
        let descriptor = volume.descriptors + group * volume.descriptor_bytes;
        add("descriptors", descriptor..descriptor + volume.descriptor_bytes);
        for nth in 0..volume.inodes_per_group {
            let at = volume.inode_table_offset(group) + nth * volume.inode_bytes;
            if at + volume.inode_bytes <= image.len()
                && volume.le16(at) != 0
                && volume.le16(at + 26) != 0
            {
                let number = group * volume.inodes_per_group + nth + 1;
                add("inodes", at..at + volume.inode_bytes);
                volume.add_inode_structures(number, at, &mut add);
            }
        }
    }
    if volume.mmp > 0 {
        add("protection against mounting twice", volume.block_range(volume.mmp));
    }
    found
}

struct ParsedVolume<'a> {
    image: &'a [u8],
    block_bytes: usize,
    descriptors: usize,
    descriptor_bytes: usize,
    groups: usize,
    inodes_per_group: usize,
    inode_bytes: usize,
    orphan_file: usize,
    mmp: usize,
}

const EXTENTS_FLAG: u32 = 0x8_0000;
const INLINE_DATA_FLAG: u32 = 0x1000_0000;
const EA_INODE_FLAG: u32 = 0x20_0000;
const EXTENT_MAGIC: u16 = 0xF30A;
const JOURNAL_INODE: usize = 8;

impl<'a> ParsedVolume<'a> {
    fn parse(image: &'a [u8]) -> Self {
        let mut volume = Self {
            image,
            block_bytes: 0,
            descriptors: 0,
            descriptor_bytes: 32,
            groups: 0,
            inodes_per_group: 0,
            inode_bytes: 128,
            orphan_file: 0,
            mmp: 0,
        };
        let field = |at: usize| volume.le32(1024 + at) as usize;
        let (block_bytes, first) = (1024 << field(0x18), field(0x14));
        let groups = (field(0x4) - first).div_ceil(field(0x20));
        let (per_group, orphan_file, mmp) = (field(0x28), field(0x280), field(0x168));
        let inode_bytes = usize::from(volume.le16(1024 + 0x58));
        if field(0x60) & 0x80 != 0 {
            volume.descriptor_bytes = usize::from(volume.le16(1024 + 0xFE));
        }
        volume.inode_bytes = inode_bytes.max(128);
        volume.block_bytes = block_bytes;
        volume.descriptors = block_bytes * (first + 1);
        volume.groups = groups;
        volume.inodes_per_group = per_group;
        volume.orphan_file = orphan_file;
        volume.mmp = mmp;
        volume
    }

    fn le16(&self, at: usize) -> u16 {
        self.image.get(at..at + 2).map_or(0, |it| u16::from_le_bytes(it.try_into().unwrap()))
    }

    fn le32(&self, at: usize) -> u32 {
        self.image.get(at..at + 4).map_or(0, |it| u32::from_le_bytes(it.try_into().unwrap()))
    }

    fn block_range(&self, number: usize) -> Range<usize> {
        let start = number.saturating_mul(self.block_bytes);
        start..start.saturating_add(self.block_bytes)
    }

    fn inode_table_offset(&self, group: usize) -> usize {
        self.le32(self.descriptors + group * self.descriptor_bytes + 8) as usize * self.block_bytes
    }

    /// Adds the blocks of the inode in the slot at `at`.
    fn add_inode_structures(
        &self,
        number: usize,
        at: usize,
        add: &mut impl FnMut(&'static str, Range<usize>),
    ) {
        let (kind, flags) = (self.le16(at) >> 12, self.le32(at + 32));
        let attributes = self.le32(at + 104) as usize;
        if attributes > 0 {
            add("attributes", self.block_range(attributes));
        }
        let leaf = match (kind, number) {
            _ if number == JOURNAL_INODE => Some("journal"),
            _ if number == self.orphan_file => Some("orphan file"),
            _ if flags & EA_INODE_FLAG != 0 => Some("values"),
            (4, _) => Some("directories"),
            (10, _) => Some("links"),
            _ => None,
        };
        // Devices and fast symbolic links have no blocks.
        let size = self.le32(at + 4);
        if flags & INLINE_DATA_FLAG != 0 || !matches!(kind, 4 | 8 | 10) || kind == 10 && size < 60 {
            return;
        }
        if flags & EXTENTS_FLAG != 0 {
            self.add_extent_structures(at + 40, leaf, add);
            return;
        }
        for nth in 0..15 {
            let pointer = self.le32(at + 40 + 4 * nth) as usize;
            match (pointer, nth) {
                (0, _) => {}
                (_, 0..12) => {
                    leaf.into_iter().for_each(|what| add(what, self.block_range(pointer)))
                }
                _ => add("maps", self.block_range(pointer)),
            }
        }
    }

    fn add_extent_structures(
        &self,
        node: usize,
        leaf: Option<&'static str>,
        add: &mut impl FnMut(&'static str, Range<usize>),
    ) {
        if self.le16(node) != EXTENT_MAGIC {
            return;
        }
        for entry in (0..usize::from(self.le16(node + 2))).map(|nth| node + 12 + 12 * nth) {
            if self.le16(node + 6) > 0 {
                let below = self.le32(entry + 4) as usize;
                add("maps", self.block_range(below));
                self.add_extent_structures(self.block_range(below).start, leaf, add);
            } else if let Some(what) = leaf {
                let start = self.le32(entry + 8) as usize;
                let count = usize::from(self.le16(entry + 4)).min(256);
                (start..start + count).for_each(|number| add(what, self.block_range(number)));
            }
        }
    }
}
