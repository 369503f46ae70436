//! Any bytes as the journal of a small volume: what it holds is read as if it were in place, then
//! put there, within a bound.
//!
//! ```text
//!   a byte: features ── blocks of 1 KiB: | a byte: kind, and whether its sum is right | bytes |
//! ```
#![no_main]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use draconis_device::MemoryDisk;
use draconis_types::Time;
use draconis_ext::format::features::{Compatible, Incompatible};
use draconis_ext::format::jbd2::{
    self, BlockTag, BlockType, JournalFormat, MAGIC, RawJournalSuperblock,
};
use draconis_ext::format::superblock::RawSuperblock;
use draconis_ext::mkfs::{self, FileSource, FormatTarget, NodeKind, Tree, TreeNode};
use draconis_ext::{
    AccessTimes, BlockLocation, Cookie, InodeNumber, OpenOptions, Volume, WriteOptions,
};
use libfuzzer_sys::fuzz_target;

const BLOCK: usize = 1024;
/// Blocks of the journal, the first one included.
const BLOCKS: usize = 48;
const VOLUME_BYTES: u64 = 256 << 10;

fuzz_target!(|bytes: &[u8]| {
    let Some((features, log)) = bytes.split_first() else { return };
    let (mut image, place) = base().clone();
    let Some(journal) = image.get_mut(place..place + BLOCKS * BLOCK) else { return };
    let Some(form) = superblock(journal, *features) else { return };
    let mut sequence = 1;
    let pieces = log.chunks(BLOCK + 1);
    for (piece, block) in pieces.zip(journal.chunks_exact_mut(BLOCK).skip(1)) {
        fill(block, piece, &form, &mut sequence);
    }

    let small = OpenOptions {
        inode_cache: 32,
        block_map_cache: 8,
        data_cache_bytes: 256 << 10,
        ..OpenOptions::default()
    };
    let disk = Arc::new(MemoryDisk::new(image, 512));
    if let Ok(volume) = Volume::open(disk.clone(), small) {
        look(&volume);
    }
    let clock = || Time { seconds: 1_700_000_000, nanoseconds: 0 };
    let writing = WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 1 << 20,
        atime: AccessTimes::Never,
        discard: true,
    };
    if let Ok(volume) = Volume::open_for_writing(disk, small, writing) {
        look(&volume);
        let _ = volume.close();
    }
});

/// A volume that needs recovery, and where its journal begins.
fn base() -> &'static (Vec<u8>, usize) {
    struct Nothing;
    impl FileSource for Nothing {
        fn read(&self, _: u64, _: u64, into: &mut [u8]) -> std::io::Result<()> {
            into.fill(0);
            Ok(())
        }
    }
    static BASE: OnceLock<(Vec<u8>, usize)> = OnceLock::new();
    BASE.get_or_init(|| {
        let size_bytes = (BLOCKS * BLOCK) as u64;
        let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
        let log = NodeKind::File { size_bytes, data: vec![(0, size_bytes)], source: 0 };
        tree.add(mkfs::NodeId::ROOT, b"log", TreeNode::new(log, 0o600))
            .expect("a tree of one file");
        let options =
            mkfs::FormatOptions { block_bytes: Some(1024), ..mkfs::FormatOptions::default() };
        let plan = mkfs::plan_for_size(&options, &mut tree, VOLUME_BYTES).expect("a small volume");
        let disk = MemoryDisk::new(vec![0; VOLUME_BYTES as usize], 512);
        mkfs::write(
            &plan,
            &Nothing,
            &FormatTarget { disk: &disk, zeroed: true, progress: &|_| {} },
        )
        .expect("a disk in memory");
        drop(plan);
        let mut image = disk.into_bytes();
        let volume =
            Volume::open(Arc::new(MemoryDisk::new(image.clone(), 512)), OpenOptions::default())
                .expect("a volume just made");
        let log = volume.lookup(volume.root(), b"log").expect("its one file");
        let runs = volume.map(log, 0).expect("its map");
        let Some(BlockLocation::Mapped(first)) = runs.first().map(|run| run.location) else {
            panic!("a file that has data has a first block")
        };
        let raw = RawSuperblock::view_mut(&mut image[BLOCK..]).expect("the superblock");
        raw.s_journal_inum.set(log.0);
        raw.s_feature_compat.set(raw.s_feature_compat.get() | Compatible::HAS_JOURNAL.bits());
        raw.s_feature_incompat.set(raw.s_feature_incompat.get() | Incompatible::RECOVER.bits());
        (image, first.0 as usize * BLOCK)
    })
}

/// The first block of a journal with some features.
fn superblock(journal: &mut [u8], features: u8) -> Option<JournalFormat> {
    let first = journal.get_mut(..BLOCK)?;
    first.fill(0);
    first[..4].copy_from_slice(&MAGIC.to_be_bytes());
    let raw = RawJournalSuperblock::view_mut(first).ok()?;
    raw.h_blocktype.set(4);
    raw.s_blocksize.set(BLOCK as u32);
    raw.s_maxlen.set(BLOCKS as u32);
    raw.s_first.set(1);
    // Commit checksums; revokes, 64 bits, asynchronous commits, v2, v3, fast commits.
    raw.s_feature_compat.set((features >> 6 & 1).into());
    raw.s_feature_incompat.set((features & 0x3F).into());
    raw.s_num_fc_blks.set(8);
    raw.s_checksum_type = 4;
    raw.set_tail(Some(1 + u32::from(features >> 7) * 30), 1);
    raw.check(BLOCK as u32, BLOCKS as u64).ok().map(|checked| checked.format)
}

/// A block of the log: as it is, or with a header and a sum that are right.
fn fill(block: &mut [u8], piece: &[u8], form: &JournalFormat, sequence: &mut u32) {
    let Some((kind, bytes)) = piece.split_first() else { return };
    let word = |nth: usize| -> u32 {
        let word = bytes.get(nth * 4..nth * 4 + 4).and_then(|it| it.try_into().ok());
        word.map_or(0, u32::from_le_bytes)
    };
    let some = bytes.len() / 4;
    let whole = match kind % 8 {
        0 => {
            let tag = |nth| {
                let word = word(nth);
                let sum = form.tag_checksum(*sequence, &vec![0; BLOCK]);
                BlockTag { block: (word & 0x1FF).into(), escaped: word >> 31 == 1, sum }
            };
            let most = form.tags_per_descriptor();
            form.build_descriptor(*sequence, &(0..some.min(most)).map(tag).collect::<Vec<_>>())
        }
        1 => {
            let most = form.revokes_per_block();
            let blocks: Vec<u64> = (0..some.min(most)).map(|nth| word(nth).into()).collect();
            form.build_revoke(*sequence, &blocks)
        }
        2 => {
            *sequence = sequence.wrapping_add(1);
            form.build_commit(*sequence - 1, Duration::from_secs(word(0).into()), word(1))
        }
        3 => {
            // A header, and anything behind it.
            let mut whole = vec![0; BLOCK];
            let len = bytes.len().min(BLOCK);
            whole[..len].copy_from_slice(&bytes[..len]);
            whole[..4].copy_from_slice(&MAGIC.to_be_bytes());
            whole[8..12].copy_from_slice(&sequence.to_be_bytes());
            let _: Option<(BlockType, u32)> = jbd2::blocks::header(&whole);
            whole
        }
        _ => bytes.to_vec(),
    };
    let len = whole.len().min(block.len());
    block[..len].copy_from_slice(&whole[..len]);
}

fn look(volume: &Volume) {
    let _ = (volume.info(), volume.space());
    let mut names = vec![];
    let _ = volume.entries(volume.root(), Cookie::default(), true, |found| {
        if let Ok(entry) = found {
            names.push(entry.inode);
        }
        names.len() < 200
    });
    let mut buffer = vec![0; 16 << 10];
    for inode in names.into_iter().chain([InodeNumber(8)]) {
        let _ = volume.attributes(inode);
        let _ = volume.read_into(inode, 0, &mut buffer);
    }
}
