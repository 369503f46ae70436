//! Journals that need replay, replayed in memory, on disk, by the kernel and by `e2fsck`: all
//! results are equal.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use crate::common::compare::{self, ReferenceTree};
use crate::common::storm::write_options;
use crate::common::{Image, report_skipped, run_tool, tree};
use draconis_device::{Disk, Extent, MemoryDisk};
use draconis_ext::{InodeNumber, OpenOptions, Volume, check};
use draconis_types::Block;

/// Copies a volume that the kernel has mounted, with a full journal; `None`, with a message,
/// without permission to mount.
fn copy_mounted_volume(arguments: &[&str], options: &str) -> Option<Vec<u8>> {
    let image = Image::make(None, "48M", arguments)?;
    let mount = image.mount_with(options)?;
    let root = mount.path();
    tree::build_tree(root);
    sync_fs(root);
    // Directory blocks become data blocks, and vice versa.
    for round in 0..4 {
        let dir = root.join(format!("dir{round}"));
        fs::create_dir(&dir).unwrap();
        for nth in 0..300 {
            fs::write(dir.join(format!("name {nth} that is longer than it has to be")), "x")
                .unwrap();
        }
        sync_fs(root);
        if round % 2 == 0 {
            fs::remove_dir_all(&dir).unwrap();
            sync_fs(root);
            fs::write(root.join(format!("after{round}")), tree::random_bytes(round, 400_000))
                .unwrap();
            sync_fs(root);
        }
    }
    // Logged contents that begin with the journal's magic number: a long symbolic link.
    fs::remove_file(root.join("large")).unwrap();
    sync_fs(root);
    let bytes = fs::read(&image.path).unwrap();
    drop(mount);
    Some(bytes)
}

fn sync_fs(root: &Path) {
    let status = Command::new("sync").arg("-f").arg(root).status().unwrap();
    assert!(status.success());
}

fn needs_recovery(image: &Image) -> bool {
    let header = run_tool("dumpe2fs", &["-h", image.path()]).unwrap();
    header.contains("needs_recovery")
}

fn disk_of_image(image: &Image) -> Arc<MemoryDisk> {
    image.memory_disk()
}

fn check_disk(disk: Arc<dyn Disk>) -> check::Report {
    check::check(&disk, check::CheckOptions::default(), &|_, _| {}).unwrap()
}

/// Checks that four recoveries of one volume give the same result.
fn assert_all_recoveries_agree(bytes: &[u8]) {
    let image = Image::from_bytes(bytes);
    if !needs_recovery(&image) {
        return report_skipped("the kernel left nothing in its journal");
    }
    let volume = image.open();
    assert_eq!(fs::read(&image.path).unwrap(), bytes, "reading changed the volume");
    let report = check_disk(disk_of_image(&image));
    assert!(report.problems.is_empty(), "{:?}", report.problems);

    let by_kernel = Image::from_bytes(bytes);
    drop(by_kernel.mount_writable());
    let Some(mount) = by_kernel.mount() else { return };
    assert!(
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount)
            > 700
    );
    drop(mount);

    let by_e2fsck = Image::from_bytes(bytes);
    run_tool("e2fsck", &["-fp", by_e2fsck.path()]).unwrap();
    let Some(mount) = by_e2fsck.mount() else { return };
    assert!(
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount)
            > 700
    );
    drop(mount);

    let disk = disk_of_image(&image);
    let ours =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    ours.close().unwrap();
    drop(ours);
    let by_us = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
    assert!(!needs_recovery(&by_us));
    let report = check_disk(disk_of_image(&by_us));
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    run_tool("e2fsck", &["-fn", by_us.path()]).unwrap();
    let Some(mount) = by_us.mount() else { return };
    assert!(
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount)
            > 700
    );
}

#[test]
fn ext3_journal_with_small_blocks_is_replayed() {
    let Some(bytes) = copy_mounted_volume(&["-t", "ext3", "-b", "1024"], "loop") else { return };
    assert_all_recoveries_agree(&bytes);
}

#[test]
fn ext3_journal_with_large_blocks_is_replayed() {
    let Some(bytes) = copy_mounted_volume(&["-t", "ext3", "-b", "4096"], "loop") else { return };
    assert_all_recoveries_agree(&bytes);
}

#[test]
fn journal_with_transaction_checksums_is_replayed() {
    let options = "loop,journal_checksum -t ext4";
    let Some(bytes) = copy_mounted_volume(&["-t", "ext3", "-b", "4096"], options) else { return };
    assert_all_recoveries_agree(&bytes);
}

#[test]
fn journal_with_logged_data_is_replayed() {
    let arguments = ["-t", "ext3", "-b", "1024", "-J", "size=16"];
    let Some(bytes) = copy_mounted_volume(&arguments, "loop,data=journal") else { return };
    assert_all_recoveries_agree(&bytes);
}

/// Journals of every kind that `debugfs` writes: two blocks of a file, one of them revoked.
/// Checksums v2 and v3 need a volume with checksums.
#[test]
fn every_debugfs_journal_format_is_replayed() {
    let plain = ["", "-c"].map(|kind| (kind, "^metadata_csum"));
    let summed = ["-c -v 2", "-c -v 3"].map(|kind| (kind, "metadata_csum"));
    for (kind, sums) in plain.into_iter().chain(summed) {
        for width in ["^64bit", "64bit,extent"] {
            check_debugfs_journal(kind, &format!("{sums},{width}"));
        }
    }
}

fn check_debugfs_journal(kind: &str, features: &str) {
    let Some(image) = Image::make(None, "16M", &["-t", "ext3", "-b", "1024", "-O", features])
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("new");
    let mut bytes = tree::random_bytes(5, 2048);
    bytes[..4].copy_from_slice(&[0xC0, 0x3B, 0x39, 0x98]);
    fs::write(&new, &bytes).unwrap();
    let old = dir.path().join("old");
    fs::write(&old, vec![7; 3 * 1024]).unwrap();
    image.debugfs_write(&format!("write {} file", old.display())).unwrap();
    let blocks: Vec<String> =
        image.debugfs("blocks file").unwrap().split_whitespace().map(str::to_owned).collect();
    let script = dir.path().join("script");
    let path = new.display();
    // With commit checksums it also covers revoke blocks, unlike Linux and `e2fsck`.
    let revokes = kind != "-c";
    let revoke = if revokes { format!("jw -r {}\n", blocks[2]) } else { String::new() };
    let text = format!("jo {kind}\njw -b {},{} {path}\n{revoke}jc\n", blocks[0], blocks[2]);
    fs::write(&script, text).unwrap();
    run_tool("debugfs", &["-w", "-f", script.to_str().unwrap(), image.path()]).unwrap();
    let image = Image::from_bytes(&fs::read(&image.path).unwrap());
    assert!(needs_recovery(&image), "{kind}");
    let volume = image.open();
    let file = volume.lookup(volume.root(), b"file").unwrap();
    let mut ours = vec![0; 3 * 1024];
    volume.read_into(file, 0, &mut ours).unwrap();
    let log = image.debugfs("logdump -a").unwrap();
    let last: &[u8] = if revokes { &[7; 1024] } else { &bytes[1024..] };
    let expected = [&bytes[..1024], &[7; 1024][..], last].concat();
    assert!(ours == expected, "{kind} {features}: {log}");
    if volume.read_only_reason().is_some() {
        return;
    }
    // A superblock in the log has old counts of free blocks: replay writes the sums of the groups.
    let mut bytes = fs::read(&image.path).unwrap();
    let free = bytes[1024 + 0xC..][..8].to_vec();
    if features.starts_with('^') {
        bytes[1024 + 0xC..][..8].copy_from_slice(&[1, 0, 0, 0, 1, 0, 0, 0]);
    }
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    let head = disk.read_now(Extent::new(1024, 1024), Block::private(1024)).unwrap();
    assert_eq!(head.into_private()[0xC..][..8], free, "{kind} {features}");
    volume.close().unwrap();
    drop(volume);
    let by_us = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
    run_tool("e2fsck", &["-fn", by_us.path()]).unwrap();
    let out = dir.path().join("out");
    by_us.debugfs(&format!("dump file {}", out.display())).unwrap();
    assert_eq!(fs::read(out).unwrap(), ours, "{kind} {features}");
}

/// An error names a journal that cannot be used.
#[test]
fn unusable_journals_are_refused() {
    let Some(image) = Image::make(None, "4M", &["-t", "ext3"]) else { return };
    let mut external = fs::read(&image.path).unwrap();
    // `s_journal_uuid`, `s_journal_inum`, `s_journal_dev`.
    external[1024 + 0xD0..][..16].copy_from_slice(&std::array::from_fn::<u8, 16, _>(|n| n as u8));
    external[1024 + 0xE0..][..8].copy_from_slice(&[0, 0, 0, 0, 0x78, 0x56, 0x34, 0x12]);
    image.debugfs_write("clri <8>").unwrap();
    let unused = fs::read(&image.path).unwrap();
    let device = "device 1110:74616, UUID 00010203-0405-0607-0809-0a0b0c0d0e0f";
    for (bytes, said) in [(external, device), (unused, "its inode is unused")] {
        let disk = Arc::new(MemoryDisk::new(bytes, 512));
        let opened = Volume::open_for_writing(disk, OpenOptions::default(), write_options());
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Commits from before the last mount are remains of an older log, and no sign of damage.
#[test]
fn commits_older_than_the_mount_are_remains() {
    let Some(image) = Image::make(None, "8M", &["-t", "ext3", "-b", "1024"]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let (file, script) = (dir.path().join("file"), dir.path().join("script"));
    fs::write(&file, [7; 1024]).unwrap();
    let transaction = format!("jw -b 5000 {}\n", file.display());
    fs::write(&script, format!("jo\n{}jc\n", transaction.repeat(3))).unwrap();
    run_tool("debugfs", &["-w", "-f", script.to_str().unwrap(), image.path()]).unwrap();
    // Each transaction has a descriptor, a copy and a commit block. The second descriptor is lost.
    let place = |nth: usize| -> usize {
        let block = image.debugfs(&format!("bmap <8> {nth}")).unwrap();
        block.trim().parse::<usize>().unwrap() * 1024
    };
    let mut bytes = fs::read(&image.path).unwrap();
    bytes[place(4)..][..4].fill(0);
    for commit in [3, 6, 9] {
        bytes[place(commit) + 0x30..][..8].copy_from_slice(&1000u64.to_be_bytes());
    }
    for (mounted, is_damage) in [(900u32, true), (1100, false)] {
        bytes[1024 + 0x2C..][..4].copy_from_slice(&mounted.to_le_bytes());
        let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        let opened = Volume::open_for_writing(disk, OpenOptions::default(), write_options());
        assert_eq!(opened.is_err(), is_damage, "mounted at {mounted}: {:?}", opened.err());
    }
}
