//! Feature dependencies, compared with `mke2fs`, `tune2fs`, `resize2fs`, `e2fsck` and the kernel.

use crate::common;

use std::fs;
use std::process::Command;
use std::sync::Arc;

use crate::common::FILE;
use crate::common::offline::{disk_of, with_disk};
use crate::common::storm::write_options;
use crate::common::{Image, run_tool, tree};
use draconis_device::MemoryDisk;
use draconis_ext::grow::{GrowPlan, GrowTarget};
use draconis_ext::tune::{OfflineError, TuneChanges, tune};
use draconis_ext::{OpenOptions, Volume, XattrSet, mkfs};
use draconis_types::Time;

const NOW: Time = Time { seconds: 1_700_000_000, nanoseconds: 0 };
const MIB: u64 = 1 << 20;
const REVISION_0_OPTIONS: &[&str] = &["-t", "ext2", "-r", "0", "-b", "1024"];

fn make_revision_0_image() -> Option<Vec<u8>> {
    Some(fs::read(Image::make(None, "16M", REVISION_0_OPTIONS)?.path).unwrap())
}

/// Returns revision and features, from `dumpe2fs`.
fn revision_and_features(bytes: &[u8]) -> (char, Vec<String>) {
    let said = run_tool("dumpe2fs", &["-h", Image::from_bytes(bytes).path()]).unwrap();
    let of = |name: &str| said.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    let features = of("Filesystem features:").split_whitespace();
    let features = features.filter(|it| *it != "(none)").map(str::to_owned).collect();
    (of("Filesystem revision #:").chars().next().unwrap(), features)
}

/// Checks the volume with `e2fsck`, and lets the kernel write it.
fn assert_usable_by_kernel(bytes: &[u8], what: &str) {
    let image = Image::from_bytes(bytes);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some(), "{what}");
    let Some(mount) = image.mount_writable() else { return };
    fs::write(mount.path().join("by the kernel"), what).unwrap();
    drop(mount);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some(), "{what}, by the kernel");
}

fn apply_mounted_change(bytes: Vec<u8>, change: impl FnOnce(&Volume)) -> Vec<u8> {
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    change(&volume);
    volume.close().unwrap();
    drop(volume);
    Arc::into_inner(disk).unwrap().into_bytes()
}

fn grow_image(bytes: Vec<u8>, len: u64) -> Vec<u8> {
    let mut bytes = bytes;
    let growth = GrowPlan::plan(&disk_of(&bytes), len).unwrap();
    bytes.resize(len as usize, 0);
    let disk = MemoryDisk::new(bytes, 512);
    let target = GrowTarget { disk: &disk, zeroed_from_bytes: 0, now: NOW, progress: &|_| () };
    growth.write(&target).unwrap();
    disk.into_bytes()
}

/// A volume keeps revision 0 until a feature needs revision 1.
#[test]
fn first_feature_upgrades_revision_0_to_1() {
    let Some(bytes) = make_revision_0_image() else { return };
    assert_eq!(revision_and_features(&bytes), ('0', vec![]));
    let small = apply_mounted_change(bytes.clone(), |volume| {
        let file = volume.create(volume.root(), b"file", &FILE).unwrap();
        volume.write(file, 0, &tree::random_bytes(1, 5000)).unwrap();
    });
    assert_eq!(revision_and_features(&small), ('0', vec![]));
    let larger = grow_image(small.clone(), 40 * MIB);
    assert_eq!(revision_and_features(&larger), ('0', vec![]));
    assert_usable_by_kernel(&larger, "larger");

    // Beyond the capacity of the existing descriptor blocks.
    let largest = grow_image(small.clone(), 300 * MIB);
    assert_eq!(revision_and_features(&largest), ('1', vec!["meta_bg".to_owned()]));
    assert_usable_by_kernel(&largest, "beyond the descriptors");
    let volume = Image::from_bytes(&largest).open();
    let mut contents = vec![0; 5000];
    let file = volume.lookup(volume.root(), b"file").unwrap();
    volume.read_into(file, 0, &mut contents).unwrap();
    assert_eq!(contents, tree::random_bytes(1, 5000));

    let large = apply_mounted_change(small.clone(), |volume| {
        let file = volume.lookup(volume.root(), b"file").unwrap();
        volume.write(file, 3 << 30, b"far").unwrap();
    });
    assert_eq!(revision_and_features(&large), ('1', vec!["large_file".to_owned()]));
    assert_usable_by_kernel(&large, "a large file");

    let attributes = apply_mounted_change(small, |volume| {
        let file = volume.lookup(volume.root(), b"file").unwrap();
        volume.set_xattr(file, b"user.name", b"value", XattrSet::Any, false).unwrap();
    });
    assert_eq!(revision_and_features(&attributes), ('1', vec!["ext_attr".to_owned()]));
    assert_usable_by_kernel(&attributes, "an attribute");
}

/// Features count in any revision: Linux, `tune2fs` and `e2fsck` see them, too.
#[test]
fn features_of_revision_0_volume_are_honoured() {
    let Some(bytes) = make_revision_0_image() else { return };
    let image = Image::from_bytes(&bytes);
    // It keeps the revision.
    if run_tool("tune2fs", &["-j", image.path()]).is_none() {
        return;
    }
    let bytes = fs::read(&image.path).unwrap();
    assert_eq!(revision_and_features(&bytes), ('0', vec!["has_journal".to_owned()]));
    assert!(image.open().superblock().journal.is_some());
    let disk = Arc::new(MemoryDisk::new(bytes, 512));
    let volume =
        Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap();
    volume.create(volume.root(), b"in the journal", &FILE).unwrap();
    volume.sync().unwrap();
    drop(volume);
    let bytes = Arc::into_inner(disk).unwrap().into_bytes();
    let dirty = Image::from_bytes(&bytes);
    dirty.open().lookup(draconis_ext::InodeNumber::ROOT, b"in the journal").unwrap();
    assert!(run_tool("e2fsck", &["-fp", dirty.path()]).is_some());
    assert_usable_by_kernel(&fs::read(&dirty.path).unwrap(), "recovered");
}

fn tune_features(bytes: &[u8], words: &str) -> Result<Vec<u8>, OfflineError> {
    let features = words.split(',').map(str::to_owned).collect();
    let changes =
        TuneChanges { features, hash_seed: *b"0123456789abcdef", ..TuneChanges::default() };
    let (tuned, bytes) = with_disk(bytes.to_vec(), |disk| tune(disk, &changes, NOW));
    tuned.map(|()| bytes)
}

/// Adds each feature that both support, to volumes of both revisions: refusals match those of
/// `tune2fs`, and results are valid.
#[test]
#[ignore = "long: a minute: every pair of features"]
fn feature_requirements_match_tune2fs() {
    let bases: [&[&str]; 3] = [
        REVISION_0_OPTIONS,
        &["-t", "ext2", "-b", "1024", "-I", "128"],
        &["-t", "ext4", "-b", "1024"],
    ];
    let words = [
        "dir_index",
        "has_journal",
        "large_file",
        "extent",
        "huge_file",
        "dir_nlink",
        "large_dir",
        "ea_inode",
        "project",
        "verity",
        "stable_inodes",
        "metadata_csum_seed",
        "orphan_file",
        "flex_bg",
        "metadata_csum",
    ];
    for base in bases {
        let Some(image) = Image::make(None, "16M", base) else { return };
        let bytes = fs::read(&image.path).unwrap();
        for word in words {
            let what = format!("{base:?}: {word}");
            let theirs = Image::from_bytes(&bytes);
            let done = Command::new("tune2fs").args(["-f", "-O", word, theirs.path()]).output();
            let has = |bytes: &[u8]| revision_and_features(bytes).1.iter().any(|it| it == word);
            let taken = done.unwrap().status.success() && has(&fs::read(&theirs.path).unwrap());
            match tune_features(&bytes, word) {
                Ok(ours) => {
                    assert!(taken && has(&ours), "{what}: tune2fs refuses");
                    assert_eq!(revision_and_features(&ours).0, '1', "{what}");
                    match word {
                        // Kernels without quotas do not mount project quotas.
                        "project" => {
                            run_tool("e2fsck", &["-fn", Image::from_bytes(&ours).path()])
                                .expect(&what);
                        }
                        _ => assert_usable_by_kernel(&ours, &what),
                    }
                }
                // Linux needs extents for verity; tune2fs does not check.
                Err(_) if word == "verity" => {}
                Err(why) => assert!(!taken, "{what}: {why}"),
            }
        }
    }
}

/// Conflicting or incomplete features are refused by `mke2fs` and by us.
#[test]
fn feature_requirements_match_mke2fs() {
    let all: [&[&str]; 7] = [
        &["-O", "inline_data"],
        &["-I", "128", "-O", "inline_data"],
        &["-O", "orphan_file,^has_journal"],
        &["-O", "metadata_csum_seed,^metadata_csum"],
        &["-O", "bigalloc,^extent"],
        &["-O", "resize_inode,meta_bg"],
        &["-I", "128", "-O", "project"],
    ];
    for arguments in all {
        let path = tempfile::NamedTempFile::new().unwrap();
        path.as_file().set_len(16 * MIB).unwrap();
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-F", "-t", "ext4"]).args(arguments).arg(path.path());
        let Ok(done) = mke2fs.output() else { return common::report_skipped("mke2fs") };
        let (mut features, mut inode_bytes) = (String::new(), 256);
        for pair in arguments.chunks(2) {
            match pair {
                ["-O", words] => features = (*words).to_owned(),
                ["-I", bytes] => inode_bytes = bytes.parse().unwrap(),
                _ => panic!("{arguments:?}"),
            }
        }
        let mut options = mkfs::FormatOptions::for_type("ext4").unwrap();
        options.inode_bytes = inode_bytes;
        options.apply_features(&features).unwrap();
        let refused = mkfs::Layout::new(&options, 16 * MIB).is_err();
        let made = done.status.success() && {
            let bytes = fs::read(path.path()).unwrap();
            let asked = features.split(',').filter(|word| !word.starts_with('^'));
            asked
                .into_iter()
                .all(|word| revision_and_features(&bytes).1.iter().any(|it| it == word))
        };
        assert_eq!(refused, !made, "{arguments:?}");
    }
}
