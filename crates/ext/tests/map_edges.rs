//! Edges of block maps: full nodes, full volumes, longest extents, holes, and hostile extents.

use std::sync::Arc;

use crate::common::storm::write_options;
use crate::common::{FILE, close_and_fsck, make_disk};
use draconis_device::MemoryDisk;
use draconis_ext::{Error, InodeNumber, OpenOptions, Reserve, Volume};
use draconis_types::AttributeChange;

const EXT4: [&str; 8] =
    ["-t", "ext4", "-b", "1024", "-m", "0", "-O", "^metadata_csum,^has_journal"];

fn open_for_writing(disk: &Arc<MemoryDisk>) -> Volume {
    Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap()
}

/// Writes single blocks to `file` until the volume is full, and frees the last `left` of them.
fn fill(volume: &Volume, file: InodeNumber, left: u64) {
    let mut len = 0;
    while let Ok(taken) = volume.write(file, len, &[1; 1024]) {
        len += taken as u64;
    }
    volume.sync().unwrap();
    let change =
        AttributeChange { size_bytes: Some(len - left * 1024), ..AttributeChange::default() };
    volume.set_attributes(file, &change).unwrap();
    volume.sync().unwrap();
    assert_eq!(volume.space().free_blocks, left);
}

/// A write into an unwritten extent needs two more entries. The leaf has from none to many left.
#[test]
fn full_leaf_is_split_for_two_more_extents() {
    let Some(disk) = make_disk("16M", &EXT4) else { return };
    let volume = open_for_writing(&disk);
    for pieces in 70..100u64 {
        let file = volume.create(volume.root(), pieces.to_string().as_bytes(), &FILE).unwrap();
        for nth in 0..pieces {
            volume.write(file, nth * 2048, &[nth as u8; 1024]).unwrap();
        }
        volume.fallocate(file, 1 << 20, 9 << 10, Reserve::Allocate).unwrap();
        volume.write(file, (1 << 20) + (4 << 10), &[0xEE; 1024]).unwrap();
        volume.sync().unwrap();
        let mut bytes = vec![0; (1 << 20) + (9 << 10)];
        volume.read_into(file, 0, &mut bytes).unwrap();
        let mut expected = vec![0; bytes.len()];
        for nth in 0..pieces as usize {
            expected[nth * 2048..][..1024].fill(nth as u8);
        }
        expected[(1 << 20) + (4 << 10)..][..1024].fill(0xEE);
        assert!(bytes == expected, "{pieces}");
    }
    close_and_fsck(volume, disk);
}

/// A change that may need more nodes than there is space for is refused before it begins. One that
/// needs none is not.
#[test]
fn extent_nodes_of_a_full_volume() {
    let Some(disk) = make_disk("2M", &EXT4) else { return };
    let volume = open_for_writing(&disk);
    let create = |name: &str| volume.create(volume.root(), name.as_bytes(), &FILE).unwrap();
    let allocate = |file, at: u64, blocks: u64| {
        volume.fallocate(file, at << 10, blocks << 10, Reserve::Allocate)
    };
    let write = |file, at: u64| volume.write(file, at << 10, &[5; 1024]).map(drop);
    // Each has four extents in its inode.
    let small: Vec<InodeNumber> = (0..60).map(|nth| create(&nth.to_string())).collect();
    for file in &small {
        (0..4).for_each(|nth| allocate(*file, nth * 8, 3).unwrap());
    }
    // The root of this one has four leaves: the next split of one needs two nodes.
    let large = create("large");
    allocate(large, 0, 400).unwrap();
    let mut at = (0..400).rev().step_by(2);
    at.by_ref().take(104).for_each(|at| write(large, at).unwrap());
    // The rest is filled, and then the reserve of nodes, to the last but one.
    let other = create("other");
    assert!((0..).any(|at| allocate(other, at, 1) == Err(Error::NoSpace)));
    let used = small
        .iter()
        .take_while(|file| volume.space().free_blocks > 1 && write(**file, 1) == Ok(()));
    let unused = small[used.count()];
    assert_eq!(volume.space().free_blocks, 1);
    assert!(at.any(|at| write(large, at) == Err(Error::NoSpace)));
    let punch = |at, len| volume.fallocate(unused, at, len, Reserve::PunchHole);
    assert_eq!(punch(9 << 10, 1024), Err(Error::NoSpace), "a hole within an extent");
    assert_eq!(punch(10 << 10, 1024), Ok(()), "the end of an extent");
    assert_eq!(volume.failure(), None);
    close_and_fsck(volume, disk);
}

/// An extent that begins or ends outside the volume is damage, and nothing of it is freed.
#[test]
fn extent_outside_the_volume_is_not_freed() {
    let Some(disk) = make_disk("2M", &EXT4) else { return };
    let volume = open_for_writing(&disk);
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    volume.write(file, 0, &[7; 4096]).unwrap();
    let image = close_and_fsck(volume, disk);
    let bytes = std::fs::read(&image.path).unwrap();
    // One extent of four blocks, in an inode.
    let root = [0x0A, 0xF3, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0];
    let at = bytes.windows(root.len()).position(|part| part == root).unwrap();
    for start in [0u32, 2046] {
        let mut bytes = bytes.clone();
        bytes[at + 20..at + 24].copy_from_slice(&start.to_le_bytes());
        let disk = Arc::new(MemoryDisk::new(bytes, 512));
        let volume = open_for_writing(&disk);
        let change = AttributeChange { size_bytes: Some(0), ..AttributeChange::default() };
        let error = volume.set_attributes(file, &change).unwrap_err().to_string();
        assert!(error.contains("extent out of the volume"), "{start}: {error}");
    }
}

#[test]
fn large_hole_is_one_run() {
    for kind in ["ext2", "ext4"] {
        let Some(disk) = make_disk("8M", &["-t", kind, "-b", "4096"]) else { return };
        let volume = open_for_writing(&disk);
        let file = volume.create(volume.root(), b"file", &FILE).unwrap();
        volume.write(file, 100 << 30, b"data").unwrap();
        volume.sync().unwrap();
        let [hole] = volume.map(file, 4096).unwrap()[..] else { panic!("{kind}: more runs") };
        // Of a map of pointers, to the end of the tree at least.
        assert!(hole.from.0 == 1 && hole.blocks >= 1 << 20, "{kind}: {hole:?}");
    }
}

/// An unwritten extent has at most 32,767 blocks. A group of clusters has more.
#[test]
fn long_allocations_have_valid_extents() {
    let plain = ["-O", "sparse_super2,^resize_inode", "-E", "num_backup_sb=0"];
    let clusters = ["-O", "bigalloc", "-C", "16384"];
    for arguments in [&plain[..], &clusters] {
        let arguments = [&["-t", "ext4", "-b", "1024"], arguments].concat();
        let Some(disk) = make_disk("96M", &arguments) else { return };
        let volume = open_for_writing(&disk);
        let file = volume.create(volume.root(), b"file", &FILE).unwrap();
        volume.fallocate(file, 0, 64 << 20, Reserve::Allocate).unwrap();
        volume.write(file, 40 << 20, b"data").unwrap();
        close_and_fsck(volume, disk);
    }
}

/// Holes within trees of pointers, and within a cluster, read as zeros, also after they were read.
#[test]
fn holes_within_trees_and_clusters_are_zeros() {
    let clusters = ["-t", "ext4", "-b", "1024", "-O", "bigalloc", "-C", "4096"];
    for arguments in [&["-b", "1024"][..], &clusters] {
        let Some(disk) = make_disk("8M", arguments) else { return };
        let volume = open_for_writing(&disk);
        let file = volume.create(volume.root(), b"file", &FILE).unwrap();
        let mut expected = vec![7; 1 << 20];
        volume.write(file, 0, &expected).unwrap();
        volume.sync().unwrap();
        let free = volume.space().free_blocks;
        let mut found = expected.clone();
        let within_clusters = (0..8).map(|nth| ((nth * 32 + 5) << 10, 1 << 10));
        let within_trees = [(600 << 10, 100 << 10), (690 << 10, 20 << 10)];
        for (at, len) in within_clusters.chain(within_trees) {
            volume.read_into(file, 0, &mut found).unwrap();
            volume.fallocate(file, at as u64, len as u64, Reserve::PunchHole).unwrap();
            expected[at..at + len].fill(0);
            volume.read_into(file, 0, &mut found).unwrap();
            assert!(found == expected, "{arguments:?}: {at}");
        }
        volume.sync().unwrap();
        assert!(volume.space().free_blocks >= free + 100, "{arguments:?}");
        close_and_fsck(volume, disk);
    }
}

/// The space ends where a write needs its first indirect block: what fits is written and counted.
#[test]
fn write_ends_before_an_indirect_block_without_space() {
    let Some(disk) = make_disk("1M", &["-b", "1024", "-m", "0"]) else { return };
    let volume = open_for_writing(&disk);
    let [file, other] =
        [&b"file"[..], b"other"].map(|name| volume.create(volume.root(), name, &FILE).unwrap());
    fill(&volume, other, 2);
    assert_eq!(volume.write(file, 10 << 10, &[2; 4096]), Ok(2048));
    close_and_fsck(volume, disk);
}
