//! Files that no name leads to: the journal, and the file of orphans.

use super::journal;
use super::layout::Layout;
use super::plan::Blocks;
use crate::format::checksum::Checksum;
use crate::format::inode::{self, NewInode, flags};
use crate::map::build::Built;
use crate::{FileId, InodeNumber, format};

/// What ends each block of the file of orphans, before its checksum.
const ORPHAN_MAGIC: u32 = 0x0B10_CA04;
const ORPHAN_TAIL_BYTES: usize = 8;

/// Which of them it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Journal(journal::Sizes),
    Orphans,
}

/// One of them, in its place.
#[derive(Clone, Debug)]
pub(super) struct Hidden {
    pub(super) purpose: Purpose,
    pub(super) inode: u32,
    /// Blocks of its contents.
    pub(super) blocks: u32,
    /// Where these are and those of its map, in the order in which maps take them.
    pub(super) places: Vec<Blocks>,
}

impl Hidden {
    pub(super) fn map(&self, layout: &Layout) -> Option<Built> {
        layout.map(self.inode, &[(0, self.blocks)], &self.places)
    }

    /// The bytes of its slot in the inode table.
    pub(super) fn inode(&self, layout: &Layout, built: &Built) -> Vec<u8> {
        let now = layout.now();
        let block_bytes = u64::from(layout.super_.block_bytes);
        let owned: u64 = self.places.iter().map(|place| place.1).sum();
        let inode = NewInode {
            mode: 0o100600,
            size_bytes: u64::from(self.blocks) * block_bytes,
            links: 1,
            sectors: owned * (block_bytes / 512),
            flags: if layout.options.extents() { flags::EXTENTS } else { 0 },
            pointers: built.pointers,
            accessed: now,
            modified: now,
            changed: now,
            created: now,
            ..NewInode::default()
        };
        let mut bytes = inode.encode(layout.super_.inode_bytes);
        inode::seal(&mut bytes, InodeNumber(self.inode), &layout.super_);
        bytes
    }

    /// What its block number `nth`, which lies at `at`, holds; `None` for zeros.
    pub(super) fn block(&self, layout: &Layout, nth: u32, at: u64) -> Option<Vec<u8>> {
        match self.purpose {
            Purpose::Journal(sizes) => (nth == 0).then(|| journal::superblock(layout, sizes)),
            Purpose::Orphans => Some(self.orphans(layout, at)),
        }
    }

    fn orphans(&self, layout: &Layout, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; layout.block_len()];
        let tail_at = bytes.len() - ORPHAN_TAIL_BYTES;
        let file = FileId { inode: self.inode, generation: 0 };
        let entries = bytes.get(..tail_at).unwrap_or_default();
        let sum = layout.super_.checksum_of_file(file).map(|seed| seed.of64(at).of(entries));
        let _ = format::put32(&mut bytes, tail_at, ORPHAN_MAGIC);
        let _ = format::put32(&mut bytes, tail_at + 4, sum.map_or(0, Checksum::get));
        bytes
    }
}

/// Whether a file's blocks are all of its volume's.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_orphans_are_empty_and_end_with_their_tail() {
        let mut options = super::super::Options::of_type("ext4").unwrap();
        options.features("orphan_file").unwrap();
        let layout = Layout::new(&options, 64 << 20).unwrap();
        let hidden = Hidden { purpose: Purpose::Orphans, inode: 12, blocks: 1, places: vec![] };
        let (one, other) = (hidden.orphans(&layout, 7), hidden.orphans(&layout, 8));
        let (entries, tail) = one.split_at(1024 - 8);
        assert!(entries.iter().all(|byte| *byte == 0));
        assert_eq!(tail[..4], [4, 0xCA, 0x10, 0x0B]);
        assert_ne!(tail[4..], other[1020..], "the sum is of the block's place, too");
    }
}
