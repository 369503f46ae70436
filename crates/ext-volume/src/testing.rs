//! In-memory volumes for unit tests of this crate.

use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_types::{FileType, Time};

use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::{AccessTimes, NewNode, OpenOptions, Volume, WriteOptions};
use draconis_ext_offline::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};

pub(crate) const FILE: NewNode<'_> =
    NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };

struct EmptyFileSource;

impl FileSource for EmptyFileSource {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns a disk with an empty volume.
pub(crate) fn formatted_disk(block_bytes: u32, len_bytes: usize) -> Arc<MemoryDisk> {
    Arc::new(plain_disk(block_bytes, len_bytes))
}

/// The same, before it is shared.
pub(crate) fn plain_disk(block_bytes: u32, len_bytes: usize) -> MemoryDisk {
    let options =
        mkfs::FormatOptions { block_bytes: Some(block_bytes), ..mkfs::FormatOptions::default() };
    disk_with_options(&options, len_bytes)
}

/// Returns a disk with an empty volume that has a journal, extents and checksums.
pub(crate) fn journaled_disk(block_bytes: u32, len_bytes: usize) -> Arc<MemoryDisk> {
    let mut options =
        mkfs::FormatOptions { block_bytes: Some(block_bytes), ..mkfs::FormatOptions::default() };
    options.compatible |= Compatible::HAS_JOURNAL;
    options.incompatible |= Incompatible::EXTENTS;
    options.read_only_compatible |= ReadOnlyCompatible::METADATA_CSUM;
    Arc::new(disk_with_options(&options, len_bytes))
}

fn disk_with_options(options: &mkfs::FormatOptions, len_bytes: usize) -> MemoryDisk {
    let disk = MemoryDisk::new(vec![0; len_bytes], 512);
    let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
    let plan = mkfs::plan_for_size(options, &mut tree, len_bytes as u64).unwrap();
    let target = FormatTarget { disk: &disk, zeroed: true, progress: &|_| {} };
    mkfs::write(&plan, &EmptyFileSource, &target).unwrap();
    drop(plan);
    disk
}

pub(crate) fn write_options() -> WriteOptions {
    let clock = Arc::new(|| Time { seconds: 1_700_000_000, nanoseconds: 0 });
    WriteOptions { clock, dirty_bytes: 8 << 20, atime: AccessTimes::Never, discard: true }
}

/// Opens the volume for writing.
pub(crate) fn open_for_writing(disk: Arc<MemoryDisk>) -> Volume {
    Volume::open_for_writing(disk, OpenOptions::default(), write_options()).unwrap()
}
