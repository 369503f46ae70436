//! System files: the journal, the quota files and the orphan file; also the MMP block.

use super::DiskRun;
use super::ea_value::EaInodeValue;
use super::journal;
use super::layout::Layout;
use crate::format::inode::{self, DIRECT_POINTERS, NewInode, flags};
use crate::format::mmp::{self, MmpRecord};
use crate::format::orphan_file;
use crate::format::quota::{self, QuotaType};
use crate::map::build::BuiltMap;
use crate::units::saturating_usize;
use crate::{FileId, FsBlock, InodeNumber};

/// Kind of a system file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SystemFileKind {
    Journal(journal::JournalSizes),
    Quota(QuotaType),
    Orphans,
    /// The EA inode of the value with this index.
    Value(usize),
}

/// A system file with its blocks.
#[derive(Clone, Debug)]
pub(super) struct SystemFile {
    pub(super) purpose: SystemFileKind,
    pub(super) inode: u32,
    /// Blocks of the contents.
    pub(super) blocks: u32,
    /// Size, unless it is a multiple of the block size.
    pub(super) size_bytes: Option<u64>,
    /// Blocks in `i_blocks`: whole clusters, and the map.
    pub(super) owned: u64,
    /// Blocks of contents and map, in the order in which maps use them.
    pub(super) places: Vec<DiskRun>,
}

impl SystemFile {
    pub(super) fn build_map(&self, layout: &Layout) -> Option<BuiltMap> {
        layout.build_map(self.inode, &[(0, self.blocks)], &self.places)
    }

    /// Builds the inode.
    pub(super) fn encode_inode(
        &self,
        layout: &Layout,
        values: &[EaInodeValue],
        built: &BuiltMap,
    ) -> Vec<u8> {
        let now = layout.creation_time();
        let block_bytes = u64::from(layout.super_.block_bytes);
        let of_map = if layout.options.has_extents() { flags::EXTENTS } else { 0 };
        let fixed = match self.purpose {
            SystemFileKind::Quota(_) => flags::IMMUTABLE,
            SystemFileKind::Journal(_) | SystemFileKind::Orphans | SystemFileKind::Value(_) => 0,
        };
        let value = match self.purpose {
            SystemFileKind::Value(nth) => values.get(nth),
            _ => None,
        };
        let (uid, gid) = value.map_or((0, 0), |value| value.owner);
        let inode = NewInode {
            mode: 0o100600,
            uid,
            gid,
            size_bytes: self
                .size_bytes
                .unwrap_or(u64::from(self.blocks).saturating_mul(block_bytes)),
            links: 1,
            sectors: self.owned.saturating_mul(block_bytes / 512),
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
            value.init_ea_inode(&mut bytes);
        }
        inode::set_checksum(&mut bytes, InodeNumber(self.inode), &layout.super_);
        bytes
    }

    /// Returns the contents of file block `nth`, which is on disk block `at`; `None` for zeros.
    /// `bytes` are the contents of a quota file or value.
    pub(super) fn encode_block(
        &self,
        layout: &Layout,
        bytes: &[u8],
        nth: u32,
        at: u64,
    ) -> Option<Vec<u8>> {
        match self.purpose {
            SystemFileKind::Quota(_) | SystemFileKind::Value(_) => {
                let mut block =
                    bytes.chunks(layout.block_len()).nth(saturating_usize(nth.into()))?.to_vec();
                block.resize(layout.block_len(), 0);
                Some(block)
            }
            SystemFileKind::Journal(sizes) => (nth == 0).then(|| journal_superblock(layout, sizes)),
            SystemFileKind::Orphans => Some(self.encode_orphan_block(layout, at)),
        }
    }

    fn encode_orphan_block(&self, layout: &Layout, at: u64) -> Vec<u8> {
        let mut bytes = orphan_file::empty_block(layout.block_len());
        let file = FileId { inode: self.inode, generation: 0 };
        if let Some(seed) = layout.super_.file_checksum_seed(file) {
            orphan_file::set_checksum(&mut bytes, seed, FsBlock(at));
        }
        bytes
    }
}

/// Orders the blocks of a quota file like mke2fs, which writes the root last.
pub(super) fn quota_file_order(
    places: Vec<DiskRun>,
    blocks: u32,
    block_bytes: u32,
) -> Vec<DiskRun> {
    match *places {
        [(start, count)]
            if block_bytes == quota::BLOCK_BYTES
                && count == u64::from(blocks)
                && blocks <= DIRECT_POINTERS =>
        {
            vec![
                (start, 1),
                (start.saturating_add(count).saturating_sub(1), 1),
                (start.saturating_add(1), count.saturating_sub(2)),
            ]
        }
        _ => places,
    }
}

/// Builds the MMP block of an unused volume.
pub(super) fn mmp_block(layout: &Layout) -> Vec<u8> {
    let mut bytes = vec![0; layout.block_len()];
    let said = MmpRecord {
        sequence: mmp::SEQ_CLEAN,
        interval_seconds: layout.raw.s_mmp_interval.get().max(mmp::MIN_CHECK_INTERVAL),
        node: String::new(),
        device: String::new(),
    };
    let seconds = u64::from(layout.options.time);
    mmp::write(&mut bytes, &said, seconds, layout.super_.checksum_seed);
    bytes
}

/// Returns the first block of the journal.
fn journal_superblock(layout: &Layout, sizes: journal::JournalSizes) -> Vec<u8> {
    journal::raw_superblock(
        layout.super_.block_bytes,
        sizes.total_blocks(),
        sizes.fast,
        layout.options.uuid,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphan_blocks_are_empty_with_tail() {
        let mut options = super::super::FormatOptions::for_type("ext4").unwrap();
        options.apply_features("orphan_file").unwrap();
        let layout = Layout::new(&options, 64 << 20).unwrap();
        let hidden = SystemFile {
            purpose: SystemFileKind::Orphans,
            inode: 12,
            blocks: 1,
            size_bytes: None,
            owned: 1,
            places: vec![],
        };
        let (one, other) =
            (hidden.encode_orphan_block(&layout, 7), hidden.encode_orphan_block(&layout, 8));
        let (entries, tail) = one.split_at(1024 - 8);
        assert!(entries.iter().all(|byte| *byte == 0));
        assert_eq!(tail[..4], [4, 0xCA, 0x10, 0x0B]);
        assert_ne!(tail[4..], other[1020..], "the sum is of the block's place, too");
    }
}
