//! Files that no name leads to: the journal, the files of quotas, and the file of orphans; and the
//! block by which hosts see that the volume is in use.

use std::collections::BTreeMap;

use super::journal;
use super::layout::Layout;
use super::plan::{Blocks, Plan};
use super::tree::NodeId;
use crate::format::inode::{self, DIRECT, NewInode, flags};
use crate::format::mmp::{self, MmpRecord};
use crate::format::orphan_file;
use crate::format::quota::{self, Kind, Usage};
use crate::map::build::Built;
use crate::units::index;
use crate::{FileId, FsBlock, InodeNumber};

/// Which of them it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Journal(journal::Sizes),
    Quota(Kind),
    Orphans,
    /// The value of this number.
    Value(usize),
}

/// One of them, in its place.
#[derive(Clone, Debug)]
pub(super) struct Hidden {
    pub(super) purpose: Purpose,
    pub(super) inode: u32,
    /// Blocks of its contents.
    pub(super) blocks: u32,
    /// Its length, if that does not end with a block.
    pub(super) size_bytes: Option<u64>,
    /// Blocks that it counts as its own: whole clusters, and those of its map.
    pub(super) owned: u64,
    /// Where these are and those of its map, in the order in which maps take them.
    pub(super) places: Vec<Blocks>,
}

impl Hidden {
    pub(super) fn map(&self, layout: &Layout) -> Option<Built> {
        layout.map(self.inode, &[(0, self.blocks)], &self.places)
    }

    /// The bytes of its slot in the inode table.
    pub(super) fn inode(&self, plan: &Plan<'_>, built: &Built) -> Vec<u8> {
        let layout = &plan.layout;
        let now = layout.now();
        let block_bytes = u64::from(layout.super_.block_bytes);
        let of_map = if layout.options.extents() { flags::EXTENTS } else { 0 };
        let fixed = match self.purpose {
            Purpose::Quota(_) => flags::IMMUTABLE,
            Purpose::Journal(_) | Purpose::Orphans | Purpose::Value(_) => 0,
        };
        let value = match self.purpose {
            Purpose::Value(nth) => plan.tree.values.get(nth),
            _ => None,
        };
        let (uid, gid) = value.map_or((0, 0), |value| value.owner);
        let inode = NewInode {
            mode: 0o100600,
            uid,
            gid,
            size_bytes: self.size_bytes.unwrap_or(u64::from(self.blocks) * block_bytes),
            links: 1,
            sectors: self.owned * (block_bytes / 512),
            flags: of_map | fixed,
            pointers: built.pointers,
            accessed: now,
            modified: now,
            changed: now,
            created: now,
            ..NewInode::default()
        };
        let mut bytes = inode.encode(layout.super_.inode_bytes);
        if let Some(value) = value {
            value.mark(&mut bytes);
        }
        inode::seal(&mut bytes, InodeNumber(self.inode), &layout.super_);
        bytes
    }

    /// What its block number `nth`, which lies at `at`, holds; `None` for zeros. A file of quotas
    /// and one of a value have `bytes`.
    pub(super) fn block(
        &self,
        layout: &Layout,
        bytes: &[u8],
        nth: u32,
        at: u64,
    ) -> Option<Vec<u8>> {
        match self.purpose {
            Purpose::Quota(_) | Purpose::Value(_) => {
                let mut block = bytes.chunks(layout.block_len()).nth(index(nth.into()))?.to_vec();
                block.resize(layout.block_len(), 0);
                Some(block)
            }
            Purpose::Journal(sizes) => (nth == 0).then(|| journal::superblock(layout, sizes)),
            Purpose::Orphans => Some(self.orphans(layout, at)),
        }
    }

    fn orphans(&self, layout: &Layout, at: u64) -> Vec<u8> {
        let mut bytes = orphan_file::empty(layout.block_len());
        let file = FileId { inode: self.inode, generation: 0 };
        if let Some(seed) = layout.super_.checksum_of_file(file) {
            orphan_file::seal(&mut bytes, seed, FsBlock(at));
        }
        bytes
    }
}

/// Places of the blocks of a file of quotas as mke2fs takes them: it writes the root last.
pub(super) fn in_order_of_quotas(
    places: Vec<Blocks>,
    blocks: u32,
    block_bytes: u32,
) -> Vec<Blocks> {
    match *places {
        [(start, count)]
            if block_bytes == quota::BLOCK_BYTES
                && count == u64::from(blocks)
                && blocks <= DIRECT =>
        {
            vec![(start, 1), (start + count - 1, 1), (start + 1, count - 2)]
        }
        _ => places,
    }
}

/// What the owners in a tree have, by their numbers.
pub(super) fn usage(plan: &Plan<'_>, kind: Kind) -> BTreeMap<u32, Usage> {
    let layout = &plan.layout;
    let block_bytes = u64::from(layout.super_.block_bytes);
    let mut all: BTreeMap<u32, Usage> = BTreeMap::new();
    for placed in &plan.placed {
        let node = plan.tree.node(NodeId(placed.node));
        let id = match kind {
            Kind::User => node.uid,
            Kind::Group => node.gid,
            Kind::Project => 0,
        };
        let bytes = placed.owned(layout) * block_bytes;
        let inodes = 1 + i64::from(placed.values);
        let usage = Usage { inodes, bytes: bytes.cast_signed() };
        let sum = all.entry(id).or_default();
        *sum = sum.with(usage);
    }
    all
}

/// The block by which hosts see that the volume is in use: it says that it is not.
pub(super) fn guard(layout: &Layout) -> Vec<u8> {
    let mut bytes = vec![0; layout.block_len()];
    let said = MmpRecord {
        sequence: mmp::CLEAN,
        interval_seconds: layout.raw.s_mmp_interval.get().max(mmp::LEAST_INTERVAL),
        node: String::new(),
        device: String::new(),
    };
    let seconds = u64::from(layout.options.time);
    mmp::write(&mut bytes, &said, seconds, layout.super_.checksum_seed);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_orphans_are_empty_and_end_with_their_tail() {
        let mut options = super::super::Options::of_type("ext4").unwrap();
        options.features("orphan_file").unwrap();
        let layout = Layout::new(&options, 64 << 20).unwrap();
        let hidden = Hidden {
            purpose: Purpose::Orphans,
            inode: 12,
            blocks: 1,
            size_bytes: None,
            owned: 1,
            places: vec![],
        };
        let (one, other) = (hidden.orphans(&layout, 7), hidden.orphans(&layout, 8));
        let (entries, tail) = one.split_at(1024 - 8);
        assert!(entries.iter().all(|byte| *byte == 0));
        assert_eq!(tail[..4], [4, 0xCA, 0x10, 0x0B]);
        assert_ne!(tail[4..], other[1020..], "the sum is of the block's place, too");
    }
}
