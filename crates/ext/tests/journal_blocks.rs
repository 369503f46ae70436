//! Single journal blocks: torn commit blocks, copies that begin with the magic number, and the
//! recorded error of an abort.

use std::fs;
use std::sync::Arc;

use crate::common::FILE;
use crate::common::storm::write_options;
use crate::common::{Image, run_tool, tree};
use draconis_device::MemoryDisk;
use draconis_ext::format::jbd2::blocks::header;
use draconis_ext::format::jbd2::{self, JournalIncompatible, MAGIC, RawJournalSuperblock};
use draconis_ext::{BlockLocation, Error, InodeNumber, OpenOptions, Volume};
use draconis_testkit::judge;
use draconis_testkit::{Event, RecordDisk};

const BLOCK_BYTES: usize = 1024;
const SECTOR_BYTES: usize = 512;

/// Makes a volume with blocks of 1 KiB and a minimal journal.
fn make_journaled_image(size: &str, arguments: &[&str]) -> Option<Vec<u8>> {
    let all = [&["-t", "ext4", "-b", "1024", "-I", "256", "-J", "size=1"], arguments].concat();
    let image = Image::make(None, size, &all)?;
    Some(fs::read(&image.path).unwrap())
}

/// Returns the volume blocks of the journal.
fn journal_block_numbers(bytes: &[u8]) -> Vec<u64> {
    let volume = Image::from_bytes(bytes).open();
    let mut blocks = vec![];
    loop {
        let at = blocks.len() as u64 * BLOCK_BYTES as u64;
        let runs = volume.map(InodeNumber(8), at).unwrap();
        let before = blocks.len();
        for run in runs {
            let BlockLocation::Mapped(first) = run.location else { continue };
            blocks.extend((0..u64::from(run.blocks)).map(|nth| first.0 + nth));
        }
        if blocks.len() == before {
            return blocks;
        }
    }
}

fn block_at(bytes: &[u8], at: u64) -> &[u8] {
    &bytes[at as usize * BLOCK_BYTES..][..BLOCK_BYTES]
}

/// Sets the checksum features of a journal.
fn with_checksum_features(mut bytes: Vec<u8>, incompatible: u32) -> Vec<u8> {
    let first = journal_block_numbers(&bytes)[0] as usize * BLOCK_BYTES;
    let raw = RawJournalSuperblock::view_mut(&mut bytes[first..]).unwrap();
    raw.s_feature_incompat.set(incompatible);
    raw.s_checksum_type = 4;
    raw.set_tail(None, 1);
    bytes
}

/// Writes announce nothing. Each of these needs an indirect block, and all of them together more
/// than the log has.
#[test]
fn writes_without_a_sync_fit_a_short_log() {
    let Some(base) = make_journaled_image("8M", &["-O", "^extents,^64bit,^metadata_csum"]) else {
        return;
    };
    let mut base = with_checksum_features(base, 0);
    let first = journal_block_numbers(&base)[0] as usize * BLOCK_BYTES;
    RawJournalSuperblock::view_mut(&mut base[first..]).unwrap().s_maxlen.set(64);
    let disk = Arc::new(MemoryDisk::new(base, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let file = volume.create(volume.root(), b"file", &FILE).unwrap();
    for nth in 0..200 {
        volume.write(file, nth * (256 << 10), b"a piece").unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    let image = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
    run_tool("e2fsck", &["-fn", image.path()]);
}

/// In each round of the log but the first, a torn commit block is followed by old data. Linux
/// accepts it; `e2fsck` 1.47.0 fails on anything but zeros.
#[test]
fn torn_commit_block_is_whole_or_ignored() {
    let Some(base) = make_journaled_image("4M", &["-O", "^64bit"]) else { return };
    for sums in [JournalIncompatible::CSUM_V2, JournalIncompatible::CSUM_V3] {
        let base = with_checksum_features(base.clone(), sums.bits());
        let log = journal_block_numbers(&base);
        let disk = Arc::new(RecordDisk::new(MemoryDisk::new(base.clone(), 512)));
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        for nth in 0..250 {
            let name = format!("{nth:0100}");
            let file = volume.create(volume.root(), name.as_bytes(), &FILE).unwrap();
            volume.write(file, 0, &tree::random_bytes(nth, 500)).unwrap();
            volume.sync().unwrap();
        }
        drop(volume);
        let mut medium = base;
        let (mut commits, mut asked) = (0, 0);
        for event in disk.take_events() {
            let Event::Group { writes, .. } = event else { continue };
            let [(at, bytes)] = &writes[..] else {
                apply_writes(&mut medium, &writes);
                continue;
            };
            let is_commit = matches!(header(bytes), Some((jbd2::BlockType::Commit, _)));
            if is_commit && log.contains(&(at / BLOCK_BYTES as u64)) {
                commits += 1;
                let behind = &medium[*at as usize + SECTOR_BYTES..][..BLOCK_BYTES - SECTOR_BYTES];
                assert!(behind.iter().all(|byte| *byte == 0), "{sums:?}: commit {commits}");
                if commits % 60 == 59 {
                    asked += 1;
                    let mut torn = medium.clone();
                    apply_writes(&mut torn, &[(*at, bytes[..SECTOR_BYTES].to_vec())]);
                    let image = Image::from_bytes(&torn);
                    let printed = judge::e2fsck("-fp", &image.path).stdout;
                    assert!(!printed.contains("corrupt"), "{sums:?}: commit {commits}: {printed}");
                    run_tool("e2fsck", &["-fn", image.path()]).unwrap();
                }
            }
            apply_writes(&mut medium, &writes);
        }
        assert!(commits >= 250 && asked >= 4, "{commits}, {asked}");
    }
}

fn apply_writes(medium: &mut [u8], writes: &[(u64, Vec<u8>)]) {
    for (at, bytes) in writes {
        medium[*at as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

/// A block bitmap that begins with the journal's magic number, made of one-block files.
#[test]
fn data_with_journal_magic_is_escaped() {
    const GROUP_BLOCKS: u64 = 1024;
    // The hash seed decides where the directory's blocks are; with some seeds no group begins with
    // 32 blocks of files.
    const HASH_SEED_OPTION: &str = "hash_seed=6d1f7c1e-5a0b-4c57-9a8e-3f0c2b7d9e41";
    let more = [
        "-O",
        "^metadata_csum,^64bit,uninit_bg",
        "-g",
        "1024",
        "-N",
        "7000",
        "-E",
        HASH_SEED_OPTION,
    ];
    let Some(base) = make_journaled_image("8M", &more) else { return };
    let disk = Arc::new(MemoryDisk::new(base, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let root = volume.root();
    // Fill the volume, so that every bit of a group is set.
    let mut files = vec![];
    for nth in 0.. {
        let name = format!("{nth}");
        let Ok(file) = volume.create(root, name.as_bytes(), &FILE) else { break };
        if volume.write(file, 0, b"one block").is_err() {
            break;
        }
        let BlockLocation::Mapped(at) = volume.map(file, 0).unwrap()[0].location else {
            panic!("{name}")
        };
        files.push((name, at.0));
    }
    // Groups begin behind the first block of the volume.
    let firsts = (0..8).map(|group| 1 + group * GROUP_BLOCKS);
    let of_bit = |at: u64| files.iter().find(|(_, it)| *it == at).map(|(name, _)| name);
    let all = firsts.map(|first| (first..first + 32).filter_map(of_bit).collect::<Vec<_>>());
    let names = all.into_iter().find(|names| names.len() == 32).expect("a group of files");
    let magic = u32::from_le_bytes(MAGIC.to_be_bytes());
    for (name, _) in names.iter().zip(0..).filter(|(_, bit)| magic & (1 << bit) == 0) {
        volume.unlink(root, name.as_bytes()).unwrap();
    }
    volume.sync().unwrap();
    drop(volume);
    let bytes = Arc::into_inner(disk).unwrap().into_bytes();

    // The copy in the log is escaped.
    let log = journal_block_numbers(&bytes);
    let is_escaped =
        |at: &&u64| block_at(&bytes, **at).starts_with(&[0, 0, 0, 0, 0xFF, 0xFF, 0xFF]);
    assert!(log.iter().any(|at| is_escaped(&at)));
    for at in &log[1..] {
        assert!(
            block_at(&bytes, *at)[..4] != MAGIC.to_be_bytes()
                || header(block_at(&bytes, *at)).is_some()
        );
    }

    // All recoveries give the same result.
    let by_e2fsck = Image::from_bytes(&bytes);
    run_tool("e2fsck", &["-fp", by_e2fsck.path()]).unwrap();
    run_tool("e2fsck", &["-fn", by_e2fsck.path()]).unwrap();
    let ours = Arc::new(MemoryDisk::new(bytes.clone(), 512));
    Volume::open_for_writing(ours.clone(), OpenOptions::default(), write_options())
        .unwrap()
        .close()
        .unwrap();
    let by_us = Image::from_bytes(&Arc::into_inner(ours).unwrap().into_bytes());
    run_tool("e2fsck", &["-fn", by_us.path()]).unwrap();
    let by_kernel = Image::from_bytes(&bytes);
    if let Some(mount) = by_kernel.mount_writable() {
        drop(mount);
        run_tool("e2fsck", &["-fn", by_kernel.path()]).unwrap();
    }

    // Without the tag's escape flag the bits stay zero.
    let mut spoilt = bytes;
    let (mut flags, mut tags) = (0, 0);
    for at in &log[1..] {
        let descriptor = &mut spoilt[*at as usize * BLOCK_BYTES..][..BLOCK_BYTES];
        if !matches!(header(descriptor), Some((jbd2::BlockType::Descriptor, _))) {
            continue;
        }
        // Tags of 8 bytes: number, checksum, flags; a UUID follows the first.
        let mut tag = 12;
        while tag + 8 <= BLOCK_BYTES {
            tags += 1;
            let flag = descriptor[tag + 7];
            flags += u32::from(flag & 1);
            descriptor[tag + 7] &= !1;
            tag += if flag & 2 == 0 { 24 } else { 8 };
            if flag & 8 != 0 {
                break;
            }
        }
    }
    assert!(flags > 0 && tags > flags, "{flags} of {tags}");
    let missed = Image::from_bytes(&spoilt);
    let checked = judge::e2fsck("-fy", &missed.path);
    assert_eq!(checked.status, Some(1), "{checked:?}");
}

/// Damage met during a change aborts the journal and is recorded in it.
#[test]
fn abort_reason_is_recorded_in_journal() {
    let Some(base) = make_journaled_image("4M", &[]) else { return };
    let disk = Arc::new(MemoryDisk::new(base, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let file = volume.create(volume.root(), b"pieces", &FILE).unwrap();
    for nth in 0..400 {
        volume.write(file, nth * 2 * BLOCK_BYTES as u64, b"a piece").unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    let mut bytes = Arc::into_inner(disk).unwrap().into_bytes();
    // Leaf nodes of the file's extent tree begin with their magic number; one is met after others
    // were freed.
    let log = journal_block_numbers(&bytes);
    let leaves = bytes
        .chunks_exact_mut(BLOCK_BYTES)
        .enumerate()
        .filter(|(nth, block)| block.starts_with(&[0x0A, 0xF3]) && !log.contains(&(*nth as u64)));
    let mut leaves: Vec<_> = leaves.map(|(_, block)| block).collect();
    assert!(leaves.len() > 3);
    leaves[1][12..40].fill(0xAA);
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let other = volume.create(volume.root(), b"other", &FILE).unwrap();
    volume.sync_inode(other, false).unwrap();
    let refused = volume.unlink(volume.root(), b"pieces");
    assert!(volume.failure().is_some(), "{refused:?}");
    assert!(matches!(volume.close(), Err(Error::ReadOnly)));
    drop(volume);
    let bytes = Arc::into_inner(disk).unwrap().into_bytes();
    let raw = RawJournalSuperblock::view(block_at(&bytes, log[0])).unwrap();
    assert_eq!(raw.s_errno.get().cast_signed(), -117);

    // Synced changes are present, and the next mount asks for e2fsck.
    for by_kernel in [true, false] {
        let image = Image::from_bytes(&bytes);
        if by_kernel {
            let Some(mount) = image.mount_writable() else { continue };
            assert!(mount.path().join("other").exists());
        } else {
            let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
            let volume =
                Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                    .unwrap();
            volume.lookup(volume.root(), b"other").unwrap();
            volume.close().unwrap();
            drop(volume);
            fs::write(&image.path, Arc::into_inner(disk).unwrap().into_bytes()).unwrap();
        }
        let header = run_tool("dumpe2fs", &["-h", image.path()]).unwrap();
        let state = header.lines().find(|line| line.starts_with("Filesystem state:")).unwrap();
        assert!(state.contains("with errors"), "by the kernel: {by_kernel}: {state}");
        let bytes = fs::read(&image.path).unwrap();
        let raw = RawJournalSuperblock::view(block_at(&bytes, log[0])).unwrap();
        assert_eq!(raw.s_errno.get(), 0, "by the kernel: {by_kernel}");
    }
}
