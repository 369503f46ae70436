//! Structures of a valid volume, and the checksum of each.

use std::ops::Range;

use draconis_device::Random;
use draconis_ext::format::checksum::Checksum;
use draconis_ext::format::group::GroupDescriptor;
use draconis_ext::format::superblock::{RawSuperblock, Superblock};
use draconis_ext::format::{dir_tail, extent, inode, xattr};
use draconis_ext::{FileId, FsBlock, GroupNumber, InodeNumber};

use crate::common::spoil::corrupt_field;

/// Checksum to update after a structure was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChecksumOwner {
    None,
    Superblock,
    Group(u32),
    Inode(u32),
    Directory(FileId),
    Extents(FileId),
    Attributes(u64),
    BlockBitmap(u32),
    InodeBitmap(u32),
    Mmp,
    Journal,
    Orphans(FileId, u64),
}

/// A structure of a volume.
#[derive(Clone, Debug)]
pub struct VolumeStructure {
    pub what: &'static str,
    pub range: Range<usize>,
    pub seal: ChecksumOwner,
}

/// A valid volume with its structures.
pub struct BaseVolume {
    pub line: String,
    pub image: Vec<u8>,
    pub parts: Vec<VolumeStructure>,
    super_: Superblock,
}

const EXTENTS_FLAG: u32 = 0x8_0000;
const INLINE_DATA_FLAG: u32 = 0x1000_0000;
const JOURNAL_INODE: u32 = 8;

fn le16(image: &[u8], at: usize) -> u16 {
    image.get(at..at + 2).map_or(0, |it| u16::from_le_bytes(it.try_into().unwrap()))
}

fn le32(image: &[u8], at: usize) -> u32 {
    image.get(at..at + 4).map_or(0, |it| u32::from_le_bytes(it.try_into().unwrap()))
}

impl BaseVolume {
    pub fn from_image(line: &str, image: Vec<u8>) -> Self {
        let super_ = RawSuperblock::view(&image[1024..2048]).unwrap().check().unwrap();
        let mut base = Self { line: line.to_owned(), image, parts: vec![], super_ };
        base.find_parts();
        base
    }

    pub fn groups(&self) -> u32 {
        self.super_.groups
    }

    fn block_range(&self, number: u64) -> Range<usize> {
        let len = self.super_.block_bytes as usize;
        let start = (number as usize).saturating_mul(len);
        start..start.saturating_add(len)
    }

    fn add_part(&mut self, what: &'static str, range: Range<usize>, seal: ChecksumOwner) {
        if range.end <= self.image.len() && !range.is_empty() {
            self.parts.push(VolumeStructure { what, range, seal });
        }
    }

    fn group_descriptor(&self, number: u32) -> (GroupDescriptor, Range<usize>) {
        let (block, slot) = self.super_.descriptor_location(GroupNumber(number));
        let range = self.block_range(block.0);
        let len = self.super_.descriptor_bytes as usize;
        let start = range.start + slot as usize * len;
        (
            GroupDescriptor::read_as_stored(&self.image[range], slot, &self.super_).unwrap(),
            start..start + len,
        )
    }

    fn find_parts(&mut self) {
        self.add_part("superblock", 1024..1024 + 0x70, ChecksumOwner::Superblock);
        self.add_part("superblock", 1024..1024 + 0x180, ChecksumOwner::Superblock);
        self.add_part("superblock", 1024 + 0x180..2048, ChecksumOwner::Superblock);
        if let Some(FsBlock(block)) = self.super_.mmp_block {
            let range = self.block_range(block);
            self.add_part("mmp", range.start..range.start + 1024, ChecksumOwner::Mmp);
        }
        for number in 0..self.super_.groups {
            let (group, range) = self.group_descriptor(number);
            self.add_part("descriptor", range, ChecksumOwner::Group(number));
            let of_blocks = self.block_range(group.block_bitmap.0);
            let start = of_blocks.start;
            if group.flags & 2 == 0 {
                self.add_part("bitmap", start..start + 32, ChecksumOwner::BlockBitmap(number));
                self.add_part("bitmap", of_blocks, ChecksumOwner::BlockBitmap(number));
            }
            let start = self.block_range(group.inode_bitmap.0).start;
            if group.flags & 1 == 0 {
                let len = self.super_.inodes_per_group as usize / 8 + 8;
                self.add_part("bitmap", start..start + len, ChecksumOwner::InodeBitmap(number));
            }
            let table = self.block_range(group.inode_table.0).start;
            for nth in 0..self.super_.inodes_per_group {
                let len = self.super_.inode_bytes as usize;
                let at = table + nth as usize * len;
                if at + len > self.image.len() || group.flags & 1 != 0 {
                    break;
                }
                let number = number * self.super_.inodes_per_group + nth + 1;
                self.add_inode_parts(number, at, len);
            }
        }
    }

    fn add_inode_parts(&mut self, number: u32, at: usize, len: usize) {
        let (mode, links) = (le16(&self.image, at), le16(&self.image, at + 26));
        if number > 30 && (mode == 0 || links == 0) {
            return;
        }
        self.add_part("inode", at..at + len, ChecksumOwner::Inode(number));
        self.add_part("inode", at..at + 128, ChecksumOwner::Inode(number));
        self.add_part("map in an inode", at + 40..at + 100, ChecksumOwner::Inode(number));
        if mode == 0 {
            return;
        }
        let file = FileId { inode: number, generation: le32(&self.image, at + 100) };
        let (kind, flags) = (mode >> 12, le32(&self.image, at + 32));
        let attributes = u64::from(le32(&self.image, at + 104));
        if attributes > 0 {
            let range = self.block_range(attributes);
            self.add_part(
                "attributes",
                range.start..range.start + 96,
                ChecksumOwner::Attributes(attributes),
            );
            self.add_part("attributes", range, ChecksumOwner::Attributes(attributes));
        }
        let orphans = self.super_.orphan_file.is_some_and(|it| it.0 == number);
        let quota = self.super_.quotas.contains(&number);
        let leaf = match kind {
            _ if number == JOURNAL_INODE => Some(("journal", ChecksumOwner::Journal)),
            _ if orphans => Some(("orphan file", ChecksumOwner::Orphans(file, 0))),
            _ if quota => Some(("quota", ChecksumOwner::None)),
            4 => Some(("directory", ChecksumOwner::Directory(file))),
            10 => Some(("link", ChecksumOwner::None)),
            _ => None,
        };
        let size = le32(&self.image, at + 4);
        if flags & INLINE_DATA_FLAG != 0 || !matches!(kind, 4 | 8 | 10) || kind == 10 && size < 60 {
            return;
        }
        if flags & EXTENTS_FLAG != 0 {
            self.add_extent_tree_parts(at + 40, file, leaf);
            return;
        }
        for nth in 0..15 {
            let pointer = u64::from(le32(&self.image, at + 40 + 4 * nth));
            match (pointer, nth) {
                (0, _) => {}
                (_, 0..12) => self.add_leaf_parts(pointer, leaf),
                _ => self.add_part("map", self.block_range(pointer), ChecksumOwner::None),
            }
        }
    }

    fn add_leaf_parts(&mut self, block: u64, leaf: Option<(&'static str, ChecksumOwner)>) {
        let Some((what, seal)) = leaf else { return };
        let range = self.block_range(block);
        let seal = match seal {
            ChecksumOwner::Orphans(file, _) => ChecksumOwner::Orphans(file, block),
            ChecksumOwner::Journal if self.parts.iter().any(|part| part.what == "journal") => {
                return;
            }
            ChecksumOwner::Journal => {
                self.add_part(what, range.start..range.start + 0x60, seal);
                return;
            }
            other => other,
        };
        self.add_part(what, range.start..range.start + 64, seal);
        self.add_part(what, range, seal);
    }

    fn add_extent_tree_parts(
        &mut self,
        node: usize,
        file: FileId,
        leaf: Option<(&'static str, ChecksumOwner)>,
    ) {
        let (depth, count) = (le16(&self.image, node + 6), le16(&self.image, node + 2));
        for entry in (0..usize::from(count)).map(|nth| node + 12 + 12 * nth) {
            if depth > 0 {
                let range = self.block_range(le32(&self.image, entry + 4).into());
                let start = range.start;
                self.add_part("node", start..start + 36, ChecksumOwner::Extents(file));
                let used = 12 + 12 * usize::from(le16(&self.image, start + 2));
                self.add_part("node", start..start + used, ChecksumOwner::Extents(file));
                self.add_extent_tree_parts(start, file, leaf);
            } else if leaf.is_some() {
                let start = u64::from(le32(&self.image, entry + 8));
                let count = u64::from(le16(&self.image, entry + 4)).min(64);
                (start..start + count).for_each(|block| self.add_leaf_parts(block, leaf));
            }
        }
    }

    /// Returns the volume with up to three corrupt fields, and their description.
    pub fn corrupt_randomly(&self, random: &mut Random) -> (Vec<u8>, String) {
        let mut image = self.image.clone();
        let mut kinds: Vec<&str> = self.parts.iter().map(|part| part.what).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let mut told = String::new();
        let sealed = random.next_below(5) != 0;
        for _ in 0..=random.next_below(2) {
            let kind = kinds[random.next_below(kinds.len() as u64) as usize];
            let parts: Vec<&VolumeStructure> =
                self.parts.iter().filter(|part| part.what == kind).collect();
            let part = parts[random.next_below(parts.len() as u64) as usize];
            corrupt_field(&mut image, part.range.clone(), random);
            if sealed {
                self.set_checksum(&mut image, part);
            }
            let at = part.range.clone().find(|at| image[*at] != self.image[*at]);
            let at = at.map_or(0, |at| at - part.range.start);
            told += &format!("{kind} {:?} at {at:#x}, sealed: {sealed}; ", part.seal);
        }
        (image, told)
    }

    pub fn set_checksum(&self, image: &mut [u8], part: &VolumeStructure) {
        let super_ = &self.super_;
        let seed = super_.checksum_seed.unwrap_or_default();
        let sums = super_.checksum_seed.is_some();
        let block = part.range.start / super_.block_bytes as usize;
        let block = self.block_range(block as u64);
        let of = |file: FileId| seed.update_u32(file.inode).update_u32(file.generation);
        match part.seal {
            ChecksumOwner::Superblock => RawSuperblock::view_mut(&mut image[1024..2048])
                .map_or((), RawSuperblock::set_checksum),
            ChecksumOwner::Group(number) => self.change_group(image, number, |_, _| ()),
            ChecksumOwner::BlockBitmap(number) => {
                self.change_group(image, number, |group, image| {
                    group.set_block_bitmap_csum(&image[block.clone()], super_);
                })
            }
            ChecksumOwner::InodeBitmap(number) => {
                self.change_group(image, number, |group, image| {
                    group.set_inode_bitmap_csum(&image[block.clone()], super_);
                })
            }
            ChecksumOwner::Inode(number) => {
                let len = super_.inode_bytes as usize;
                let start = part.range.start - part.range.start % 128;
                let start = self.slot_start(number).unwrap_or(start);
                inode::set_checksum(&mut image[start..start + len], InodeNumber(number), super_);
            }
            ChecksumOwner::Directory(file) if sums => {
                dir_tail::set_checksum(&mut image[block], of(file))
            }
            ChecksumOwner::Extents(file) if sums => {
                extent::set_checksum(&mut image[block], of(file))
            }
            ChecksumOwner::Attributes(number) if sums => {
                xattr::set_checksum(&mut image[block], seed, FsBlock(number));
            }
            ChecksumOwner::Mmp if sums => {
                let sum = seed.update(&image[block.start..block.start + 1020]).value();
                image[block.start + 1020..block.start + 1024].copy_from_slice(&sum.to_le_bytes());
            }
            ChecksumOwner::Journal => {
                let journal = &mut image[block.start..block.start + 1024];
                journal[0xFC..0x100].fill(0);
                if journal[0x28..0x2C].iter().any(|it| it & 0x18 != 0) {
                    let sum = Checksum::new().update(journal).value();
                    journal[0xFC..0x100].copy_from_slice(&sum.to_be_bytes());
                }
            }
            ChecksumOwner::Orphans(file, number) if sums => {
                let end = block.end;
                let sum = of(file).update_u64(number).update(&image[block.start..end - 8]).value();
                image[end - 4..end].copy_from_slice(&sum.to_le_bytes());
            }
            _ => {}
        }
    }

    fn slot_start(&self, number: u32) -> Option<usize> {
        let is_of = |part: &&VolumeStructure| {
            matches!(part.seal, ChecksumOwner::Inode(of) if of == number) && part.what == "inode"
        };
        self.parts.iter().find(is_of).map(|part| part.range.start)
    }

    pub fn change_group(
        &self,
        image: &mut [u8],
        number: u32,
        change: impl FnOnce(&mut GroupDescriptor, &[u8]),
    ) {
        let (block, slot) = self.super_.descriptor_location(GroupNumber(number));
        let range = self.block_range(block.0);
        let mut group =
            GroupDescriptor::read_as_stored(&image[range.clone()], slot, &self.super_).unwrap();
        change(&mut group, image);
        let _ = group.write(&mut image[range], slot, &self.super_, GroupNumber(number));
    }
}
