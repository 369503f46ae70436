//! Journals that need replay, replayed in memory, on disk, by the kernel and by `e2fsck`: all
//! results are equal.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use common::compare::{self, Beside};
use common::storm::writing;
use common::{Image, run, skipped, tree};
use draconis_device::{Disk, MemoryDisk};
use draconis_ext::{InodeNumber, OpenOptions, Volume, check};

/// Copies a volume that the kernel has mounted, with a full journal; `None`, with a message,
/// without permission to mount.
fn in_use(arguments: &[&str], options: &str) -> Option<Vec<u8>> {
    let image = Image::make(None, "48M", arguments)?;
    let mount = image.mount_with(options)?;
    let root = mount.path();
    tree::build(root);
    sync(root);
    // Directory blocks become data blocks, and vice versa.
    for round in 0..4 {
        let dir = root.join(format!("dir{round}"));
        fs::create_dir(&dir).unwrap();
        for nth in 0..300 {
            fs::write(dir.join(format!("name {nth} that is longer than it has to be")), "x")
                .unwrap();
        }
        sync(root);
        if round % 2 == 0 {
            fs::remove_dir_all(&dir).unwrap();
            sync(root);
            fs::write(root.join(format!("after{round}")), tree::pattern(round, 400_000)).unwrap();
            sync(root);
        }
    }
    // Logged contents that begin with the journal's magic number: a long symbolic link.
    fs::remove_file(root.join("large")).unwrap();
    sync(root);
    let bytes = fs::read(&image.path).unwrap();
    drop(mount);
    Some(bytes)
}

fn sync(root: &Path) {
    let status = Command::new("sync").arg("-f").arg(root).status().unwrap();
    assert!(status.success());
}

fn needs_recovery(image: &Image) -> bool {
    let header = run("dumpe2fs", &["-h", image.path()]).unwrap();
    header.contains("needs_recovery")
}

fn memory(image: &Image) -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(fs::read(&image.path).unwrap(), 512))
}

fn checked(disk: Arc<dyn Disk>) -> check::Report {
    check::check(&disk, check::CheckOptions::default(), &|_, _| {}).unwrap()
}

/// Checks that four recoveries of one volume give the same result.
fn recovered_by_all(bytes: &[u8]) {
    let image = Image::of(bytes);
    if !needs_recovery(&image) {
        return skipped("the kernel left nothing in its journal");
    }
    let volume = image.open();
    assert_eq!(fs::read(&image.path).unwrap(), bytes, "reading changed the volume");
    let report = checked(memory(&image));
    assert!(report.problems.is_empty(), "{:?}", report.problems);

    let by_kernel = Image::of(bytes);
    drop(by_kernel.mount_writable());
    let Some(mount) = by_kernel.mount() else { return };
    assert!(compare::tree(&volume, InodeNumber::ROOT, mount.path(), Beside::Mount) > 700);
    drop(mount);

    let by_e2fsck = Image::of(bytes);
    run("e2fsck", &["-fp", by_e2fsck.path()]).unwrap();
    let Some(mount) = by_e2fsck.mount() else { return };
    assert!(compare::tree(&volume, InodeNumber::ROOT, mount.path(), Beside::Mount) > 700);
    drop(mount);

    let disk = memory(&image);
    let ours = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing()).unwrap();
    ours.close().unwrap();
    drop(ours);
    let by_us = Image::of(&Arc::into_inner(disk).unwrap().into_bytes());
    assert!(!needs_recovery(&by_us));
    let report = checked(memory(&by_us));
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    run("e2fsck", &["-fn", by_us.path()]).unwrap();
    let Some(mount) = by_us.mount() else { return };
    assert!(compare::tree(&volume, InodeNumber::ROOT, mount.path(), Beside::Mount) > 700);
}

#[test]
fn of_ext3_in_small_blocks() {
    let Some(bytes) = in_use(&["-t", "ext3", "-b", "1024"], "loop") else { return };
    recovered_by_all(&bytes);
}

#[test]
fn of_ext3_in_large_blocks() {
    let Some(bytes) = in_use(&["-t", "ext3", "-b", "4096"], "loop") else { return };
    recovered_by_all(&bytes);
}

#[test]
fn with_sums_of_whole_transactions() {
    let options = "loop,journal_checksum -t ext4";
    let Some(bytes) = in_use(&["-t", "ext3", "-b", "4096"], options) else { return };
    recovered_by_all(&bytes);
}

#[test]
fn with_contents_in_the_journal() {
    let arguments = ["-t", "ext3", "-b", "1024", "-J", "size=16"];
    let Some(bytes) = in_use(&arguments, "loop,data=journal") else { return };
    recovered_by_all(&bytes);
}

/// Journals of every kind that `debugfs` writes: two blocks of a file, one of them revoked.
/// Checksums v2 and v3 need a volume with checksums.
#[test]
fn of_every_kind_that_debugfs_writes() {
    let plain = ["", "-c"].map(|kind| (kind, "^metadata_csum"));
    let summed = ["-c -v 2", "-c -v 3"].map(|kind| (kind, "metadata_csum"));
    for (kind, sums) in plain.into_iter().chain(summed) {
        for width in ["^64bit", "64bit,extent"] {
            every_kind(kind, &format!("{sums},{width}"));
        }
    }
}

fn every_kind(kind: &str, features: &str) {
    let Some(image) = Image::make(None, "16M", &["-t", "ext3", "-b", "1024", "-O", features])
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("new");
    let mut bytes = tree::pattern(5, 2048);
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
    run("debugfs", &["-w", "-f", script.to_str().unwrap(), image.path()]).unwrap();
    let image = Image::of(&fs::read(&image.path).unwrap());
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
    let disk = memory(&image);
    Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing())
        .unwrap()
        .close()
        .unwrap();
    let by_us = Image::of(&Arc::into_inner(disk).unwrap().into_bytes());
    run("e2fsck", &["-fn", by_us.path()]).unwrap();
    let out = dir.path().join("out");
    by_us.debugfs(&format!("dump file {}", out.display())).unwrap();
    assert_eq!(fs::read(out).unwrap(), ours, "{kind} {features}");
}
