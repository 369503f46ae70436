//! Growing volumes: compared with `resize2fs`, with power loss, and refusals.

use crate::common;

use std::sync::Arc;

use crate::common::compare::{self, ReferenceTree};
use crate::common::{Image, run_tool, tree};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::grow::{GrowPlan, GrowTarget, OfflineError};
use draconis_ext::{InodeNumber, OpenOptions, Volume};
use draconis_types::Time;

use crate::common::offline::disk_of;

const NOW: Time = Time { seconds: 1_700_000_000, nanoseconds: 0 };
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn plan_grow(image: &[u8], size: u64) -> Result<GrowPlan, OfflineError> {
    GrowPlan::plan(&disk_of(image), size)
}

/// Grows an image whose disk has old data behind its end.
fn grow_image(image: &[u8], size: u64) -> Vec<u8> {
    let growth = plan_grow(image, size).unwrap();
    let mut bytes = image.to_vec();
    bytes.resize(size.max(image.len() as u64) as usize, 0xA5);
    let disk = MemoryDisk::new(bytes, 512);
    let target =
        GrowTarget { disk: &disk, zeroed_from_bytes: u64::MAX, now: NOW, progress: &|_| () };
    growth.write(&target).unwrap();
    disk.into_bytes()
}

fn assert_fsck_clean(bytes: &[u8], what: &str) {
    let image = Image::from_bytes(bytes);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some(), "{what}");
}

/// Returns the output of `dumpe2fs`, without times and fields that `resize2fs` ignores.
fn dumpe2fs_lines(path: &str) -> Option<Vec<String>> {
    let text = run_tool("dumpe2fs", &[path])?;
    let other = ["Overhead", "Lifetime writes", "Last write time"];
    let lines = text.lines().filter(|line| !other.iter().any(|other| line.starts_with(other)));
    Some(lines.map(str::to_owned).collect())
}

/// Returns the blocks in which two images differ, except superblocks, free blocks and the resize
/// inode, which has times.
fn differing_blocks(ours: &[u8], theirs: &[u8], block: usize) -> Vec<usize> {
    let image = Image::from_bytes(theirs);
    let free = run_tool("dumpe2fs", &[image.path()]).unwrap();
    let mut is_free = vec![false; theirs.len() / block + 1];
    for line in free.lines().filter_map(|line| line.strip_prefix("  Free blocks: ")) {
        for range in line.split(", ").filter(|range| !range.is_empty()) {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
            is_free[from..=to].fill(true);
        }
    }
    let table = free.lines().find_map(|line| line.trim().strip_prefix("Inode table at "));
    let table = table.unwrap().split('-').next().unwrap().parse::<usize>().unwrap();
    let inode_bytes = usize::from(u16::from_le_bytes([theirs[1112], theirs[1113]]));
    let resize = table + 6 * inode_bytes.max(128) / block;
    is_free[resize] = true;
    let is_super = |bytes: &[u8]| {
        [0, 1024].iter().any(|at| bytes.get(at + 56..at + 58) == Some(&[0x53, 0xEF]))
    };
    let pairs = ours.chunks(block).zip(theirs.chunks(block)).enumerate();
    let differ = pairs.filter(|(nth, (a, b))| a != b && !is_free[*nth] && !is_super(a));
    differ.map(|(nth, _)| nth).collect()
}

/// Returns `debugfs`'s view of the resize inode, without times.
fn resize_inode_blocks(image: &Image) -> Vec<String> {
    let text = image.debugfs("stat <7>").unwrap_or_default();
    text.lines().filter(|line| !line.contains("time: ")).map(str::to_owned).collect()
}

fn compare_with_resize2fs(arguments: &[&str], first: &str, steps: &[u64]) {
    let source = tempfile::tempdir().unwrap();
    common::spoil::build_small_tree(source.path());
    let Some(image) = Image::make(Some(source.path()), first, arguments) else { return };
    let mut bytes = std::fs::read(&image.path).unwrap();
    for size in steps {
        let what = format!("{arguments:?}, {first}, {size}");
        let theirs = Image::from_bytes(&bytes);
        let file = std::fs::File::options().write(true).open(&theirs.path).unwrap();
        file.set_len(*size).unwrap();
        let kib = format!("{}K", size / KIB);
        if run_tool("resize2fs", &[theirs.path(), &kib]).is_none() {
            return;
        }
        bytes = grow_image(&bytes, *size);
        assert_fsck_clean(&bytes, &what);
        let ours = Image::from_bytes(&bytes);
        assert_eq!(dumpe2fs_lines(ours.path()), dumpe2fs_lines(theirs.path()), "{what}");
        assert_eq!(resize_inode_blocks(&ours), resize_inode_blocks(&theirs), "{what}");
        let block = 1024 << bytes[1024 + 0x18];
        let len = plan_grow(&bytes, *size).unwrap().len_bytes() as usize;
        let other = std::fs::read(&theirs.path).unwrap();
        let differ = differing_blocks(&bytes[..len], &other[..len], block);
        assert!(differ.is_empty(), "{what}: blocks {differ:?}");
        let volume = ours.open();
        compare::compare_trees(&volume, InodeNumber::ROOT, source.path(), ReferenceTree::Source);
    }
}

#[test]
fn growth_matches_resize2fs() {
    // Groups of 256 blocks: a descriptor block per 8 MiB.
    let small = &["-b", "1024", "-g", "256", "-N", "512", "-I", "128", "-E", "resize=65536"][..];
    compare_with_resize2fs(small, "2M", &[2049 * KIB, 3 * MIB, 9 * MIB, 12 * MIB, 31 * MIB]);
    compare_with_resize2fs(small, "2000K", &[2030 * KIB, 2100 * KIB, 2120 * KIB, 2400 * KIB]);
    compare_with_resize2fs(&["-b", "1024", "-I", "256"], "5M", &[20 * MIB, 64 * MIB]);
    compare_with_resize2fs(&["-b", "2048", "-I", "256", "-m", "1"], "8M", &[21 * MIB, 80 * MIB]);
    compare_with_resize2fs(&["-b", "4096", "-I", "256"], "8M", &[100 * MIB, 180 * MIB]);
    // Without reserved GDT blocks, up to the end of the last descriptor block.
    let plain = &["-b", "1024", "-g", "256", "-N", "512", "-O", "^resize_inode"];
    compare_with_resize2fs(plain, "2M", &[5 * MIB, 8 * MIB]);
    compare_with_resize2fs(&["-b", "1024", "-g", "512", "-O", "none", "-r", "0"], "2M", &[8 * MIB]);
}

#[test]
fn any_new_size_gives_clean_volume() {
    let arguments = ["-b", "1024", "-g", "256", "-N", "256", "-I", "128", "-E", "resize=65536"];
    let Some(image) = Image::make(None, "1M", &arguments) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    let mut random = Random::new(3);
    for _ in 0..25 {
        let size = MIB + random.next_below(20 * MIB);
        let grown = grow_image(&bytes, size);
        assert_fsck_clean(&grown, &format!("{size}"));
    }
}

/// Kinds of ext3 and ext4, small enough to grow by many groups.
const VOLUME_KINDS: &[(&str, &[&str])] = &[
    ("ext3", &["-t", "ext3", "-b", "1024", "-g", "1024"]),
    ("ext4", &["-t", "ext4", "-b", "1024", "-g", "1024"]),
    ("ext4 4k", &["-t", "ext4", "-b", "4096", "-g", "1024", "-N", "512"]),
    ("no flex_bg", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^flex_bg"]),
    ("uninit_bg", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^metadata_csum,uninit_bg"]),
    ("no sums", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^metadata_csum"]),
    ("seed", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "metadata_csum_seed"]),
    ("32bit", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^64bit"]),
    ("meta_bg", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "meta_bg,^resize_inode"]),
    ("sparse_super2", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "sparse_super2"]),
    ("no reserve", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^resize_inode"]),
    ("small reserve", &["-t", "ext4", "-b", "1024", "-g", "1024", "-E", "resize=60000"]),
    ("quota", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "quota,project", "-I", "256"]),
    ("orphan_file", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "orphan_file"]),
    ("no journal", &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^has_journal"]),
    ("clusters", &["-t", "ext4", "-b", "1024", "-g", "1024", "-C", "4096", "-O", "bigalloc"]),
    ("large clusters", ONE_LARGE_GROUP_OPTIONS),
    ("clusters, no reserve", BIGALLOC_VOLUMES),
    (
        "clusters, spread",
        &["-t", "ext4", "-b", "4096", "-C", "8192", "-g", "512", "-O", META_BG_FEATURES],
    ),
];
/// One group with all inodes.
const ONE_LARGE_GROUP_OPTIONS: &[&str] =
    &["-t", "ext4", "-b", "1024", "-C", "32K", "-N", "2048", "-O", "bigalloc"];
const META_BG_FEATURES: &str = "bigalloc,meta_bg,^resize_inode,^metadata_csum";
const BIGALLOC_VOLUMES: &[&str] = &[
    "-t",
    "ext4",
    "-b",
    "1024",
    "-g",
    "1024",
    "-C",
    "2048",
    "-N",
    "512",
    "-O",
    "bigalloc,^resize_inode",
];

#[test]
#[ignore = "long: a minute: many sizes"]
fn ext3_and_ext4_grow_in_small_steps_and_large_ones() {
    let source = tempfile::tempdir().unwrap();
    common::spoil::build_small_tree(source.path());
    for (name, arguments) in VOLUME_KINDS {
        let Some(image) = Image::make(Some(source.path()), "9M", arguments) else { continue };
        if name == &"quota" {
            // mke2fs does not count copied files.
            draconis_testkit::judge::e2fsck("-fy", &image.path);
        }
        let mut bytes = std::fs::read(&image.path).unwrap();
        for size in [9 * MIB + 80 * KIB, 12 * MIB, 40 * MIB + 300 * KIB, 100 * MIB] {
            let what = format!("{name}, {size}");
            bytes = grow_image(&bytes, size);
            assert_fsck_clean(&bytes, &what);
            let volume = Image::from_bytes(&bytes).open();
            compare::compare_trees(
                &volume,
                InodeNumber::ROOT,
                source.path(),
                ReferenceTree::Source,
            );
        }
        let image = Image::from_bytes(&bytes);
        let Some(mount) = image.mount_writable() else { continue };
        std::fs::write(mount.path().join("big"), tree::random_bytes(1, 60 << 20)).unwrap();
        for nth in 0..500 {
            std::fs::create_dir(mount.path().join(format!("d{nth}"))).unwrap();
        }
        drop(mount);
        assert_fsck_clean(&std::fs::read(&image.path).unwrap(), name);
    }
}

#[test]
fn growth_beyond_reserved_gdt_uses_meta_bg() {
    let source = tempfile::tempdir().unwrap();
    common::spoil::build_small_tree(source.path());
    let without = ["-b", "1024", "-g", "256", "-N", "512", "-O", "^resize_inode"];
    let with = ["-b", "1024", "-g", "256", "-N", "512", "-E", "resize=20000"];
    let sums = ["-t", "ext4", "-b", "1024", "-g", "256", "-N", "512", "-E", "resize=20000"];
    for arguments in [&without[..], &with, &sums] {
        let Some(image) = Image::make(Some(source.path()), "4M", arguments) else { return };
        let mut bytes = std::fs::read(&image.path).unwrap();
        for size in [20 * MIB, 60 * MIB, 61 * MIB] {
            bytes = grow_image(&bytes, size);
            assert_fsck_clean(&bytes, &format!("{arguments:?}, {size}"));
        }
        let image = Image::from_bytes(&bytes);
        let said = run_tool("dumpe2fs", &["-h", image.path()]).unwrap();
        assert!(said.contains("meta_bg") && !said.contains("resize_inode"), "{said}");
        compare::compare_trees(
            &image.open(),
            InodeNumber::ROOT,
            source.path(),
            ReferenceTree::Source,
        );
        let Some(mount) = image.mount() else { continue };
        compare::compare_trees(
            &image.open(),
            InodeNumber::ROOT,
            mount.path(),
            ReferenceTree::Mount,
        );
    }
}

/// Samples one in 64 of the states before the change; `DRACONIS_CUTS=1` checks all.
#[test]
#[ignore = "long: a minute: a power cut at each write"]
fn power_loss_leaves_old_volume_or_resumable_change() {
    let source = tempfile::tempdir().unwrap();
    common::spoil::build_small_tree(source.path());
    let small = &["-b", "1024", "-g", "256", "-N", "512", "-I", "128", "-E", "resize=65536"][..];
    let ext4 = &["-t", "ext4", "-b", "1024", "-g", "1024"][..];
    // Within the last group; groups without a backup; one more backup; reserved descriptors.
    for (arguments, from, to) in [
        (small, "2000K", 2040 * KIB),
        (small, "2M", 2600 * KIB),
        (small, "2M", 3 * MIB),
        (small, "7M", 10 * MIB),
        (ext4, "9M", 9300 * KIB),
        (ext4, "9M", 20 * MIB),
    ] {
        let Some(image) = Image::make(Some(source.path()), from, arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        let growth = plan_grow(&bytes, to).unwrap();
        let mut disk = bytes;
        disk.resize(to as usize, 0);
        let states = common::cuts::check_crash_states(&disk, source.path(), |disk| {
            let target = GrowTarget {
                disk: &**disk,
                zeroed_from_bytes: u64::MAX,
                now: NOW,
                progress: &|_| (),
            };
            growth.write(&target).unwrap();
        });
        assert!(states.before > 0 && states.finished > 2 && states.after > 0, "{states:?}");
    }
}

#[test]
fn kernel_reads_files_and_fills_grown_space() {
    let source = tempfile::tempdir().unwrap();
    common::spoil::build_small_tree(source.path());
    for block in ["1024", "2048", "4096"] {
        let Some(image) = Image::make(Some(source.path()), "8M", &["-b", block]) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        std::fs::write(&image.path, grow_image(&grow_image(&bytes, 20 * MIB), 64 * MIB)).unwrap();
        let Some(mount) = image.mount() else { return };
        compare::compare_trees(
            &image.open(),
            InodeNumber::ROOT,
            mount.path(),
            ReferenceTree::Mount,
        );
        drop(mount);
        let Some(mount) = image.mount_writable() else { return };
        std::fs::write(mount.path().join("big"), tree::random_bytes(1, 48 << 20)).unwrap();
        for nth in 0..500 {
            std::fs::create_dir(mount.path().join(format!("d{nth}"))).unwrap();
        }
        drop(mount);
        assert_fsck_clean(&std::fs::read(&image.path).unwrap(), block);
        let disk = image.memory_disk();
        let volume = Volume::open(disk as Arc<dyn Disk>, OpenOptions::default()).unwrap();
        let big = volume.lookup(volume.root(), b"big").unwrap();
        let mut read = vec![0; 48 << 20];
        assert_eq!(volume.read_into(big, 0, &mut read).unwrap(), read.len());
        assert!(read == tree::random_bytes(1, 48 << 20));
    }
}

#[test]
fn impossible_growth_is_refused_by_name() {
    let small = ["-b", "1024", "-g", "256", "-N", "512", "-I", "128", "-E", "resize=65536"];
    let Some(image) = Image::make(None, "2M", &small) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    let shrunk = plan_grow(&bytes, MIB).unwrap_err();
    assert_eq!(shrunk, OfflineError::Shrink { blocks: 2048, block_bytes: 1024 });
    // The reported maximum works, and one block more does not.
    let Err(OfflineError::TooLarge { largest_bytes, .. }) = plan_grow(&bytes, 1 << 50) else {
        panic!()
    };
    assert_eq!(plan_grow(&bytes, largest_bytes).unwrap().len_bytes(), largest_bytes);
    assert!(matches!(plan_grow(&bytes, largest_bytes + KIB), Err(OfflineError::TooLarge { .. })));
    assert!(matches!(plan_grow(&bytes, u64::MAX), Err(OfflineError::TooLarge { .. })));
    // A disk that is too short.
    let growth = plan_grow(&bytes, 4 * MIB).unwrap();
    let disk = MemoryDisk::new(bytes.clone(), 512);
    let target = GrowTarget { disk: &disk, zeroed_from_bytes: 0, now: NOW, progress: &|_| () };
    assert!(matches!(growth.write(&target), Err(OfflineError::ShortDisk { .. })));
    assert!(disk.into_bytes() == bytes);
    let cut = &bytes[..bytes.len() - 4096];
    assert!(matches!(plan_grow(cut, 4 * MIB), Err(OfflineError::ShortDisk { .. })));

    for (at, value) in [(0x3A, 0u16), (0x3A, 3), (0xE8, 12)] {
        let mut unclean = bytes.clone();
        unclean[1024 + at..1024 + at + 2].copy_from_slice(&value.to_le_bytes());
        assert_eq!(plan_grow(&unclean, 4 * MIB).unwrap_err(), OfflineError::NotClean, "{at:#x}");
    }
    let Some(image) = Image::make(None, "32M", &["-t", "ext4", "-O", "mmp"]) else { return };
    let error = plan_grow(&std::fs::read(&image.path).unwrap(), 64 * MIB).unwrap_err();
    assert!(matches!(error, OfflineError::Unsupported(_)), "{error}");
    assert!(error.to_string().contains("mmp"), "{error}");
    // A misplaced reserved GDT block.
    let top = Image::from_bytes(&bytes).debugfs("stat <7>").unwrap();
    let top = top.split("(DIND):").nth(1).unwrap().split(',').next().unwrap().parse::<usize>();
    let mut damaged = bytes.clone();
    damaged[top.unwrap() * 1024 + 8] ^= 1;
    let error = plan_grow(&damaged, 4 * MIB).unwrap_err();
    assert!(error.to_string().contains("inode 7: the resize inode does not lead"), "{error}");
    assert!(plan_grow(&[0; 65536], MIB).is_err());
}
