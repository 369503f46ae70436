//! Fast commits of the kernel, replayed by the kernel, by us in memory and on disk, with power loss
//! during replay.
//!
//! ```text
//!   mke2fs -O fast_commit ─ mount ─ full commit ─ work with fsyncs ─ shut down ─┬ replay: kernel
//!                                                                               ├ ours, in memory
//!                                                                               └ ours, on disk
//! ```

use crate::matrix::ioctl;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;

use crate::common::storm::write_options;
use crate::common::{Image, report_skipped, run_tool, spoil, tree};
use draconis_device::{MemoryDisk, Random};
use draconis_ext::format::checksum::Checksum;
use draconis_ext::{BlockLocation, Cookie, InodeNumber, OpenOptions, Volume};
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::FileType;
use rustix::fs::{FallocateFlags, fallocate};

/// Options for mke2fs.
const VOLUME_OPTIONS: [&[&str]; 5] = [
    &["-b", "4096", "-O", "fast_commit"],
    &["-b", "1024", "-O", "fast_commit"],
    &["-b", "1024", "-O", "fast_commit,^metadata_csum,^64bit,uninit_bg"],
    &["-b", "4096", "-O", "fast_commit,bigalloc", "-C", "16384"],
    &["-b", "2048", "-O", "fast_commit,orphan_file,metadata_csum_seed"],
];

/// Work that consists of fast commits.
type WorkloadFn = fn(&Path);

const WORKLOADS: [(&str, WorkloadFn); 6] = [
    ("files", change_files),
    ("names", change_names),
    ("directories", change_directories),
    ("pieces", build_fragmented_file),
    ("numbers", reuse_inode_numbers),
    ("many", create_many_names),
];

fn write_random_file(path: &Path, seed: u64, len: usize) -> File {
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(path).unwrap();
    file.write_all_at(&tree::random_bytes(seed, len), 0).unwrap();
    file
}

/// Creates the files of the full commit.
fn create_committed_files(root: &Path) {
    fs::create_dir(root.join("d")).unwrap();
    for nth in 0..8 {
        write_random_file(&root.join(format!("old{nth}")), nth, 20_000);
    }
    write_random_file(&root.join("pieces"), 9, 100);
    symlink("d", root.join("link")).unwrap();
    rustix::fs::syncfs(File::open(root).unwrap()).unwrap();
}

/// Creates, extends and truncates files.
fn change_files(root: &Path) {
    let file = write_random_file(&root.join("d/new"), 10, 30_000);
    file.sync_all().unwrap();
    file.write_all_at(&tree::random_bytes(11, 5000), 60_000).unwrap();
    file.sync_all().unwrap();
    file.set_len(9000).unwrap();
    file.sync_all().unwrap();
    let old = write_random_file(&root.join("old0"), 12, 50);
    old.set_len(0).unwrap();
    old.sync_all().unwrap();
    old.write_all_at(&tree::random_bytes(13, 7000), 3000).unwrap();
    old.sync_all().unwrap();
}

/// Adds, removes, moves and replaces names.
fn change_names(root: &Path) {
    let file = write_random_file(&root.join("d/new"), 10, 3000);
    file.sync_all().unwrap();
    fs::hard_link(root.join("d/new"), root.join("d/linked")).unwrap();
    file.sync_all().unwrap();
    fs::remove_file(root.join("old1")).unwrap();
    file.sync_all().unwrap();
    fs::rename(root.join("old2"), root.join("d/moved")).unwrap();
    file.sync_all().unwrap();
    fs::rename(root.join("old3"), root.join("d/linked")).unwrap();
    fs::remove_file(root.join("old4")).unwrap();
    file.sync_all().unwrap();
    fs::hard_link(root.join("old5"), root.join("d/short lived")).unwrap();
    fs::remove_file(root.join("d/short lived")).unwrap();
    file.sync_all().unwrap();
}

/// Creates directories with files.
fn change_directories(root: &Path) {
    fs::create_dir(root.join("new")).unwrap();
    let file = write_random_file(&root.join("new/in"), 20, 100);
    file.sync_all().unwrap();
    fs::create_dir_all(root.join("new/a/b")).unwrap();
    let deep = write_random_file(&root.join("new/a/b/deep"), 21, 5000);
    deep.sync_all().unwrap();
    fs::create_dir(root.join("gone")).unwrap();
    file.sync_all().unwrap();
    fs::remove_dir(root.join("gone")).unwrap();
    file.sync_all().unwrap();
}

/// Builds a map with many extents, some unwritten, and holes.
fn build_fragmented_file(root: &Path) {
    let file = fs::OpenOptions::new().write(true).open(root.join("pieces")).unwrap();
    for nth in 0..24 {
        file.write_all_at(&tree::random_bytes(nth, 4096), nth * 40_960).unwrap();
    }
    file.sync_all().unwrap();
    let kept = write_random_file(&root.join("kept"), 0, 0);
    fallocate(&kept, FallocateFlags::empty(), 0, 300_000).unwrap();
    kept.sync_all().unwrap();
    kept.write_all_at(&tree::random_bytes(30, 8192), 65_536).unwrap();
    kept.sync_all().unwrap();
    file.set_len(500_000).unwrap();
    file.sync_all().unwrap();
}

/// Reuses inode numbers, and leaves an orphan in use.
fn reuse_inode_numbers(root: &Path) {
    let file = write_random_file(&root.join("first"), 40, 9000);
    file.sync_all().unwrap();
    fs::remove_file(root.join("first")).unwrap();
    drop(file);
    let file = write_random_file(&root.join("second"), 41, 5000);
    file.sync_all().unwrap();
    let open = File::open(root.join("old6")).unwrap();
    fs::remove_file(root.join("old6")).unwrap();
    file.sync_all().unwrap();
    drop(open);
    file.sync_all().unwrap();
}

/// Creates more names than fit into a block.
fn create_many_names(root: &Path) {
    for nth in 0..60 {
        write_random_file(&root.join(format!("d/{nth:0120}")), nth, 700);
    }
    write_random_file(&root.join("d/last"), 60, 10).sync_all().unwrap();
}

/// View of a volume: type, link count of non-directories, and contents of each path.
type VolumeView = BTreeMap<String, (u32, u64, Vec<u8>)>;

fn kernel_view(mount: &Path) -> VolumeView {
    let mut seen = VolumeView::new();
    let mut left = vec![mount.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let facts = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(mount).unwrap().to_str().unwrap().to_owned();
            let (links, bytes) = match facts.file_type() {
                it if it.is_dir() => (0, vec![]),
                it if it.is_symlink() => (1, vec![]),
                _ => (facts.nlink(), fs::read(&path).unwrap()),
            };
            if facts.is_dir() {
                left.push(path);
            }
            seen.insert(name, (facts.mode(), links, bytes));
        }
    }
    seen
}

fn draconis_view(volume: &Volume) -> VolumeView {
    let mut seen = VolumeView::new();
    let mut left = vec![(String::new(), InodeNumber::ROOT)];
    while let Some((path, dir)) = left.pop() {
        let mut found = vec![];
        volume
            .entries(dir, Cookie::default(), false, |entry| {
                let entry = entry.unwrap();
                let name = std::str::from_utf8(entry.name).unwrap();
                if !matches!(name, "." | "..") {
                    found.push((format!("{path}{name}"), entry.inode));
                }
                true
            })
            .unwrap();
        for (name, inode) in found {
            let facts = volume.attributes(inode).unwrap();
            let (links, bytes) = match facts.kind {
                FileType::Directory => {
                    left.push((format!("{name}/"), inode));
                    (0, vec![])
                }
                FileType::Symlink => (1, vec![]),
                _ => {
                    let mut bytes = vec![0; facts.size_bytes as usize];
                    assert_eq!(volume.read_into(inode, 0, &mut bytes).unwrap(), bytes.len());
                    (facts.links.into(), bytes)
                }
            };
            let mode = volume.inode(inode).unwrap().mode();
            seen.insert(name, (mode, links, bytes));
        }
    }
    seen
}

/// Makes a volume with fast commits to replay; `None`, with a message, if impossible.
fn make_dirty_volume(arguments: &[&str], work: WorkloadFn) -> Option<Vec<u8>> {
    let more = ["-t", "ext4", "-I", "256", "-N", "1000", "-J", "size=8"];
    let image = Image::make(None, "40M", &[&more, arguments].concat())?;
    let mount = image.mount_writable()?;
    create_committed_files(mount.path());
    let handle = File::open(mount.path()).unwrap();
    work(mount.path());
    if let Err(error) = ioctl::shut_down(&handle, ioctl::ShutdownMode::WithoutCommit) {
        report_skipped(format_args!("shutting a mount down: {error}"));
        return None;
    }
    drop((handle, mount));
    Some(fs::read(&image.path).unwrap())
}

/// Returns the offset of the first fast-commit block.
fn first_fast_commit_offset(bytes: &[u8]) -> usize {
    let volume =
        Volume::open(Arc::new(MemoryDisk::new(bytes.to_vec(), 512)), OpenOptions::default());
    let volume = volume.unwrap();
    let block_bytes = volume.superblock().block_bytes as usize;
    let at = |nth: u64| {
        let runs = volume.map(InodeNumber(8), nth * block_bytes as u64).unwrap();
        let BlockLocation::Mapped(at) = runs[0].location else { panic!("a journal with a hole") };
        at.0 as usize * block_bytes
    };
    let word = |offset: usize| {
        let bytes = &bytes[at(0) + offset..][..4];
        u64::from(u32::from_be_bytes(bytes.try_into().unwrap()))
    };
    let (len, fast) = (word(16), word(0x54));
    at(len - if fast == 0 { 256 } else { fast } + 1)
}

fn replay_and_return_bytes(bytes: &[u8]) -> Vec<u8> {
    let disk = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    volume.close().unwrap();
    drop(volume);
    Arc::into_inner(disk).unwrap().into_bytes()
}

#[test]
#[ignore = "long: half a minute: the kernel writes hundreds of commits"]
fn fast_commit_replay_matches_kernel_and_e2fsck() {
    let (mut used, mut compared) = (0, 0);
    for arguments in VOLUME_OPTIONS {
        for (name, work) in WORKLOADS {
            let what = format!("{arguments:?}, {name}");
            let Some(bytes) = make_dirty_volume(arguments, work) else { return };
            // In memory, without a change of the disk.
            let image = Image::from_bytes(&bytes);
            let ours = draconis_view(&image.open());
            assert!(fs::read(&image.path).unwrap() == bytes, "{what}: reading changed it");

            // Without fast commits the volume differs, unless the kernel made none.
            let mut without = bytes.clone();
            without[first_fast_commit_offset(&bytes)..][..16].fill(0);
            used += usize::from(draconis_view(&Image::from_bytes(&without).open()) != ours);

            // On disk.
            let by_us = Image::from_bytes(&replay_and_return_bytes(&bytes));
            run_tool("e2fsck", &["-fn", by_us.path()]).unwrap();
            assert!(draconis_view(&by_us.open()) == ours, "{what}: on disk and in memory");
            let Some(mount) = by_us.mount() else { return };
            assert!(kernel_view(mount.path()) == ours, "{what}: as the kernel shows it");
            drop(mount);

            let by_kernel = Image::from_bytes(&bytes);
            // The first mount recovers it.
            let mounted = by_kernel.try_mount("loop").map(drop);
            let mount = match mounted.and_then(|()| by_kernel.try_mount("ro,loop")) {
                Ok(mount) => mount,
                Err(why) => {
                    println!("{what}: the kernel does not recover its own fast commits: {why}");
                    continue;
                }
            };
            compared += 1;
            let theirs = kernel_view(mount.path());
            let differ = |seen: &VolumeView, other: &VolumeView| {
                let of =
                    |(path, it): (&String, _)| (other.get(path) != Some(it)).then(|| path.clone());
                seen.iter().filter_map(of).collect::<Vec<_>>()
            };
            assert!(
                ours == theirs,
                "{what}: ours {:?}, the kernel's {:?}",
                differ(&ours, &theirs),
                differ(&theirs, &ours)
            );
        }
    }
    let all = VOLUME_OPTIONS.len() * WORKLOADS.len();
    println!("of {all} volumes {compared} are recovered by the kernel, {used} hold fast commits");
    assert!(used > all / 2 && compared > all / 2, "{used} and {compared} of {all}");
}

/// Interrupted replays are repeated or complete.
#[test]
fn interrupted_replay_is_repeated() {
    for (arguments, (name, work)) in VOLUME_OPTIONS.into_iter().zip(WORKLOADS) {
        let Some(bytes) = make_dirty_volume(arguments, work) else { return };
        let ours = draconis_view(&Image::from_bytes(&bytes).open());
        let disk = Arc::new(RecordDisk::new(MemoryDisk::new(bytes.clone(), 512)));
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        volume.close().unwrap();
        drop(volume);
        let options = CrashOptions { seed: 1, subsets: 6, exhaustive_sectors: 2 };
        let mut states = 0;
        for crash in CrashStates::new(bytes, disk.take_events(), options) {
            states += 1;
            if states % 4 != 0 {
                continue;
            }
            let what = format!("{arguments:?}, {name}, state {states}, {:?}", crash.kind);
            let volume = Volume::open(crash.disk.clone(), OpenOptions::default());
            let volume = volume.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(draconis_view(&volume) == ours, "{what}");
            if states % 20 == 0 {
                let again = Image::from_bytes(&replay_and_return_bytes(&crash.disk.to_bytes()));
                run_tool("e2fsck", &["-fn", again.path()]).unwrap();
                assert!(draconis_view(&again.open()) == ours, "{what}: made again");
            }
        }
        assert!(states > 20, "{name}: {states}");
    }
}

/// Returns the ranges of the fast-commit blocks.
fn fast_commit_block_ranges(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let volume =
        Volume::open(Arc::new(MemoryDisk::new(bytes.to_vec(), 512)), OpenOptions::default());
    let len = volume.unwrap().superblock().block_bytes as usize;
    let first = first_fast_commit_offset(bytes);
    (0..12).map(|nth| first + nth * len..first + (nth + 1) * len).collect()
}

/// Sets the checksums of these blocks.
fn set_fast_commit_checksums(bytes: &mut [u8], blocks: &[std::ops::Range<usize>]) {
    const TAIL: u16 = 8;
    let mut sum = 0;
    for block in blocks {
        let block = &mut bytes[block.clone()];
        let mut at = 0;
        while at + 4 <= block.len() {
            let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
            let (tag, end) = (half(at), at + 4 + usize::from(half(at + 2)));
            if !(1..=9).contains(&tag) || end > block.len() {
                return;
            }
            let summed = if tag == TAIL { at + 8 } else { end };
            sum = Checksum::seeded(sum).update(&block[at..summed]).value();
            if tag == TAIL {
                block[summed..summed + 4].copy_from_slice(&sum.to_le_bytes());
                sum = 0;
            }
            at = end;
        }
    }
}

/// Random records with valid checksums.
#[test]
fn random_fast_commit_records_do_no_harm() {
    let mut random = Random::new(7);
    let (mut all, mut refused) = (0, 0);
    for (arguments, (_, work)) in VOLUME_OPTIONS.into_iter().zip(WORKLOADS) {
        let Some(bytes) = make_dirty_volume(arguments, work) else { return };
        let blocks = fast_commit_block_ranges(&bytes);
        let mut same = bytes.clone();
        set_fast_commit_checksums(&mut same, &blocks);
        assert!(same == bytes, "{arguments:?}: sums are what the kernel has");
        for _ in 0..spoil::scaled_rounds(60) {
            let mut spoilt = bytes.clone();
            for _ in 0..=random.next_below(3) {
                let block = blocks[random.next_below(4) as usize].clone();
                // Most of a block is behind its last record.
                let at = block.start + random.next_below(700.min(block.len() as u64 - 8)) as usize;
                spoil::corrupt_field(&mut spoilt, at..at + 8, &mut random);
            }
            set_fast_commit_checksums(&mut spoilt, &blocks);
            let disk = Arc::new(MemoryDisk::new(spoilt, 512));
            all += 1;
            let seen = Volume::open(disk.clone(), OpenOptions::default());
            if let Ok(volume) = &seen {
                let _ = volume.entries(volume.root(), Cookie::default(), false, |_| true);
            }
            let changed = Volume::open_for_writing(disk, OpenOptions::default(), write_options());
            refused += u32::from(changed.is_err());
            assert!(changed.is_err() || seen.is_ok(), "{:?}", seen.map(drop));
            if let Ok(volume) = changed {
                let _ = volume.close();
            }
        }
    }
    println!("{refused} of {all} are refused by mounts");
    assert!(refused > 0 && refused < all);
}
