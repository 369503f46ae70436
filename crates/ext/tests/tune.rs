//! Tuning: each change checked by e2fsck, the kernel and tune2fs's view.

use crate::common;

use crate::common::compare::{self, ReferenceTree};
use crate::common::offline::with_disk;
use crate::common::{Image, run_tool, spoil};
use draconis_ext::format::quota::QuotaType as Quota;
use draconis_ext::tune::{OfflineError, Reserved, TuneChanges, tune};
use draconis_ext::{InodeNumber, NewNode, OpenOptions, Volume};
use draconis_types::{FileType, Time};

const NOW: Time = Time { seconds: 1_700_000_000, nanoseconds: 0 };

fn apply_tune(bytes: &[u8], changes: &TuneChanges) -> Result<Vec<u8>, OfflineError> {
    let (tuned, bytes) = with_disk(bytes.to_vec(), |disk| tune(disk, changes, NOW));
    tuned.map(|()| bytes)
}

fn feature_changes(words: &[&str]) -> TuneChanges {
    let features = words.iter().map(|word| (*word).to_owned()).collect();
    TuneChanges { features, hash_seed: *b"0123456789abcdef", ..TuneChanges::default() }
}

/// Checks a volume; returns the output of `dumpe2fs -h`.
fn check_and_dump_header(bytes: &[u8], source: &std::path::Path, what: &str) -> String {
    let image = Image::from_bytes(bytes);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some(), "{what}");
    compare::compare_trees(&image.open(), InodeNumber::ROOT, source, ReferenceTree::Source);
    if let Some(mount) = image.mount_writable() {
        std::fs::write(mount.path().join("new"), what).unwrap();
        drop(mount);
        run_tool("e2fsck", &["-fn", image.path()]);
    }
    run_tool("dumpe2fs", &["-h", image.path()]).unwrap()
}

#[test]
fn superblock_fields_change_in_one_sector_write() {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    for arguments in [&["-t", "ext2"][..], &["-t", "ext4"]] {
        let Some(image) = Image::make(Some(source.path()), "16M", arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        let changes = TuneChanges {
            label: Some(b"a label".to_vec()),
            reserved: Some(Reserved::Ppm(20_000)),
            errors: Some(2),
            max_mounts: Some(30),
            interval_seconds: Some(86_400 * 7),
            ..TuneChanges::default()
        };
        let tuned = apply_tune(&bytes, &changes).unwrap();
        let differ: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at] != tuned[*at]).map(|at| at / 512).collect();
        assert!(differ.iter().all(|sector| *sector == 2), "{differ:?}");
        let said = check_and_dump_header(&tuned, source.path(), "fields");
        for expected in ["a label", "Remount read-only", "Maximum mount count:      30", "1 week"] {
            assert!(said.contains(expected), "{expected}: {said}");
        }
        let changes =
            TuneChanges { reserved: Some(Reserved::Blocks(77)), ..TuneChanges::default() };
        let said =
            check_and_dump_header(&apply_tune(&bytes, &changes).unwrap(), source.path(), "blocks");
        assert!(said.contains("Reserved block count:     77"), "{said}");
    }
}

/// What had a checksum has its place back: limits of hash trees, blocks of the orphan file.
#[test]
fn removed_checksums_leave_no_trace() {
    let source = tempfile::tempdir().unwrap();
    for nth in 0..600 {
        std::fs::write(source.path().join(format!("a somewhat longer name {nth}")), "x").unwrap();
    }
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "orphan_file"];
    let Some(image) = Image::make(Some(source.path()), "16M", &arguments) else { return };
    // It gives the directory a tree.
    draconis_testkit::judge::e2fsck("-fyD", &image.path);
    let bytes = std::fs::read(&image.path).unwrap();
    let limit = |bytes: &[u8]| -> Option<String> {
        let tree = Image::from_bytes(bytes).debugfs("htree /")?;
        tree.lines().find(|line| line.contains("(limit)")).map(str::to_owned)
    };
    assert_eq!(limit(&bytes).unwrap(), "Number of entries (limit): 123");
    let plain = apply_tune(&bytes, &feature_changes(&["^metadata_csum"])).unwrap();
    assert_eq!(limit(&plain).unwrap(), "Number of entries (limit): 124");
    check_and_dump_header(&plain, source.path(), "without");
    let again = apply_tune(&plain, &feature_changes(&["metadata_csum"])).unwrap();
    assert_eq!(limit(&again).unwrap(), "Number of entries (limit): 123");
    check_and_dump_header(&again, source.path(), "with");
}

#[test]
fn uuid_change_recomputes_all_checksums() {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    let uuid = *b"\xde\xad\xbe\xef\0\x01\x42\x22\x83\x33abcdef";
    for arguments in [
        &["-t", "ext2"][..],
        &["-t", "ext4"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "orphan_file"],
        &["-t", "ext4", "-O", "metadata_csum_seed"],
        &["-t", "ext4", "-O", "^metadata_csum,uninit_bg"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-C", "4096", "-O", "bigalloc"],
    ] {
        let Some(image) = Image::make(Some(source.path()), "16M", arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        let changes = TuneChanges { uuid: Some(uuid), ..TuneChanges::default() };
        let tuned = apply_tune(&bytes, &changes).unwrap();
        let said = check_and_dump_header(&tuned, source.path(), &format!("{arguments:?}"));
        assert!(said.contains("deadbeef-0001-4222-8333-616263646566"), "{said}");
    }
}

#[test]
#[ignore = "long: a minute: many volumes"]
fn quota_and_orphan_files_are_added_and_removed() {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    let owned = source.path().join("of another");
    std::fs::write(&owned, vec![7; 70_000]).unwrap();
    let _ = std::os::unix::fs::chown(&owned, Some(70_000), Some(3));
    let free = |bytes: &[u8]| {
        let said = run_tool("dumpe2fs", &["-h", Image::from_bytes(bytes).path()]).unwrap();
        let counts = said.lines().filter(|line| line.starts_with("Free "));
        counts.map(str::to_owned).collect::<Vec<_>>()
    };
    for arguments in [
        &["-t", "ext4", "-b", "1024"][..],
        &["-t", "ext4", "-b", "4096", "-O", "metadata_csum_seed,inline_data"],
        &["-t", "ext3", "-b", "1024", "-g", "1024"],
        &["-t", "ext4", "-b", "2048", "-O", "^metadata_csum,uninit_bg"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-C", "4096", "-O", "bigalloc"],
        &["-t", "ext4", "-b", "4096", "-C", "16384", "-O", "bigalloc,^metadata_csum"],
    ] {
        let Some(image) = Image::make(Some(source.path()), "32M", arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        for (words, shown) in [
            (&["orphan_file"][..], &["Orphan file inode"][..]),
            (&["quota"], &["User quota inode:         3", "Group quota inode:        4"]),
            (&["project", "quota", "orphan_file"], &["Project quota inode", "Orphan file inode"]),
            (&["mmp"], &["MMP block number"]),
        ] {
            let what = format!("{arguments:?} {words:?}");
            let with = apply_tune(&bytes, &feature_changes(words)).unwrap();
            let said = check_and_dump_header(&with, source.path(), &what);
            assert!(shown.iter().all(|line| said.contains(line)), "{what}: {said}");
            if words == ["mmp"] {
                continue;
            }
            let words = words.iter().filter(|word| **word != "project");
            let back: Vec<String> = words.map(|word| format!("^{word}")).collect();
            let back: Vec<&str> = back.iter().map(|word| &word[..]).collect();
            let without = apply_tune(&with, &feature_changes(&back)).unwrap();
            let said = check_and_dump_header(&without, source.path(), &what);
            assert!(!shown.iter().any(|line| said.contains(line)), "{what}: {said}");
            assert_eq!(free(&without), free(&bytes), "{what}");
        }
        // One kind after the other.
        let quotas = |quotas: &[(Quota, bool)]| TuneChanges {
            quotas: quotas.to_vec(),
            ..feature_changes(&[])
        };
        let users = apply_tune(&bytes, &quotas(&[(Quota::User, true)])).unwrap();
        let said = check_and_dump_header(&users, source.path(), "users");
        assert!(said.contains("User quota") && !said.contains("Group quota"), "{said}");
        let groups = quotas(&[(Quota::User, false), (Quota::Group, true)]);
        let said =
            check_and_dump_header(&apply_tune(&users, &groups).unwrap(), source.path(), "groups");
        assert!(!said.contains("User quota") && said.contains("Group quota"), "{said}");
        let neither = apply_tune(&users, &quotas(&[(Quota::User, false)])).unwrap();
        assert!(!check_and_dump_header(&neither, source.path(), "neither").contains("quota"));
        for refused in [
            quotas(&[(Quota::Project, true)]),
            feature_changes(&["orphan_file", "^has_journal"]),
            TuneChanges { mmp_interval: Some(5), ..feature_changes(&[]) },
            TuneChanges { mmp_interval: Some(301), ..feature_changes(&["mmp"]) },
        ] {
            let error = apply_tune(&bytes, &refused).unwrap_err();
            assert!(matches!(error, OfflineError::Misuse(_)), "{error:?}");
        }
    }
}

#[test]
#[ignore = "long: a minute: many volumes"]
fn journals_are_added_and_removed() {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    for arguments in [
        &["-t", "ext2", "-b", "1024"][..],
        &["-t", "ext4", "-O", "^has_journal"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^has_journal"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-C", "4096", "-O", "bigalloc,^has_journal"],
        &["-t", "ext4", "-b", "1024", "-C", "64K", "-O", "bigalloc,^has_journal"],
    ] {
        let Some(image) = Image::make(Some(source.path()), "32M", arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        let with = apply_tune(&bytes, &feature_changes(&["has_journal"])).unwrap();
        let what = format!("{arguments:?}");
        let said = check_and_dump_header(&with, source.path(), &what);
        assert!(said.contains("has_journal") && said.contains("journal size:"), "{said}");
        let without = apply_tune(&with, &feature_changes(&["^has_journal"])).unwrap();
        let said = check_and_dump_header(&without, source.path(), &what);
        assert!(!said.contains("has_journal"), "{said}");
        let free = |bytes: &[u8]| bytes[1024 + 12..1024 + 16].to_vec();
        assert_eq!(free(&without), free(&bytes), "{what}");
        let large = TuneChanges { journal_mib: Some(8), ..feature_changes(&["has_journal"]) };
        let said =
            check_and_dump_header(&apply_tune(&bytes, &large).unwrap(), source.path(), &what);
        assert!(said.contains("8M") || said.contains("8192k"), "{said}");
    }
    let Some(image) = Image::make(Some(source.path()), "32M", &["-t", "ext4"]) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    let without = apply_tune(&bytes, &feature_changes(&["^has_journal"])).unwrap();
    assert!(!check_and_dump_header(&without, source.path(), "dropped").contains("has_journal"));
}

#[test]
fn features_are_added_and_removed_in_place() {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    for (arguments, words, has, lacks) in [
        ("^metadata_csum", &["large_dir", "read-only"][..], "large_dir", "nothing"),
        ("^dir_index", &["dir_index"], "dir_index", "nothing"),
        ("metadata_csum", &["^metadata_csum"], "uninit_bg", "metadata_csum"),
        ("metadata_csum", &["metadata_csum_seed"], "metadata_csum_seed", "nothing"),
        ("metadata_csum_seed", &["^metadata_csum_seed"], "metadata_csum", "metadata_csum_seed"),
        ("metadata_csum", &["verity", "ea_inode", "extents"], "verity", "nothing"),
        ("^metadata_csum", &["metadata_csum"], "metadata_csum", "uninit_bg"),
        ("^metadata_csum,uninit_bg", &["metadata_csum"], "metadata_csum", "uninit_bg"),
        ("^metadata_csum,^extent,^64bit", &["metadata_csum"], "metadata_csum", "uninit_bg"),
        ("^metadata_csum", &["metadata_csum", "^dir_index"], "metadata_csum", "dir_index"),
        ("metadata_csum", &["^dir_index"], "metadata_csum", "dir_index"),
        ("^metadata_csum", &["^dir_index"], "extent", "dir_index"),
        ("metadata_csum", &["^dir_index", "^metadata_csum"], "uninit_bg", "metadata_csum"),
        ("metadata_csum", &["casefold"], "casefold", "nothing"),
        ("^metadata_csum", &["encrypt"], "encrypt", "nothing"),
        ("metadata_csum", &["^resize_inode"], "extent", "resize_inode"),
        ("^metadata_csum,^extent,^64bit", &["^resize_inode"], "dir_index", "resize_inode"),
        ("uninit_bg,^metadata_csum,^flex_bg", &["^resize_inode"], "extent", "resize_inode"),
        ("sparse_super2", &["^resize_inode", "metadata_csum_seed"], "extent", "resize_inode"),
        ("^has_journal", &["^resize_inode", "has_journal"], "has_journal", "resize_inode"),
        ("bigalloc", &["^resize_inode"], "bigalloc", "resize_inode"),
        ("^metadata_csum", &["^resize_inode", "metadata_csum"], "metadata_csum", "resize_inode"),
    ] {
        let arguments = ["-t", "ext4", "-b", "1024", "-g", "1024", "-O", arguments];
        let Some(image) = Image::make(Some(source.path()), "16M", &arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        let tuned = apply_tune(&bytes, &feature_changes(words)).unwrap();
        let mut said = run_tool("dumpe2fs", &["-h", Image::from_bytes(&tuned).path()]).unwrap();
        if !said.contains("read-only") {
            said = check_and_dump_header(&tuned, source.path(), &format!("{words:?}"));
        }
        let line = said.lines().find(|line| line.starts_with("Filesystem features")).unwrap();
        let names: Vec<&str> = line.split_whitespace().collect();
        assert!(names.contains(&has) && !names.contains(&lacks), "{words:?}: {line}");
    }
    // And back, with another UUID in between.
    let arguments = ["-t", "ext4", "-O", "metadata_csum_seed"];
    let Some(image) = Image::make(Some(source.path()), "16M", &arguments) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    let other = TuneChanges { uuid: Some([0x42; 16]), ..TuneChanges::default() };
    let tuned = apply_tune(&bytes, &other).unwrap();
    let tuned = apply_tune(&tuned, &feature_changes(&["^metadata_csum_seed"])).unwrap();
    check_and_dump_header(&tuned, source.path(), "without its seed");
}

/// Makes a directory of many names: of all lengths, or of one length, which leaves space in every
/// block; with an htree or without.
fn make_large_directory(
    arguments: &[&str],
    is_even: bool,
    is_indexed: bool,
) -> Option<(Image, tempfile::TempDir)> {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    let dir = source.path().join("large");
    std::fs::create_dir(&dir).unwrap();
    for nth in 0..if is_even { 1000 } else { 2500 } {
        let width = if is_even { 92 } else { 10 + nth % 90 };
        std::fs::write(dir.join(format!("{nth:0width$}")), b"").unwrap();
    }
    let image = Image::make(Some(source.path()), "16M", arguments)?;
    if is_indexed {
        run_tool("e2fsck", &["-fyD", image.path()]);
    }
    Some((image, source))
}

#[test]
#[ignore = "long: a minute: many volumes"]
fn adding_checksums_makes_space_in_directories_or_drops_index() {
    let base = ["-t", "ext4", "-b", "1024", "-N", "4000", "-O"];
    for (had, is_even, is_indexed, words, stays) in [
        ("^metadata_csum", true, true, &["metadata_csum"][..], true),
        ("^metadata_csum,^extent,^64bit", true, true, &["metadata_csum"], true),
        // Blocks without free space.
        ("^metadata_csum", false, true, &["metadata_csum"], false),
        ("^metadata_csum", true, false, &["metadata_csum"], false),
        ("metadata_csum", true, true, &["^dir_index"], false),
        ("^metadata_csum", false, true, &["^dir_index", "metadata_csum"], false),
    ] {
        let arguments = [&base[..], &[had]].concat();
        let Some((image, source)) = make_large_directory(&arguments, is_even, is_indexed) else {
            return;
        };
        let bytes = std::fs::read(&image.path).unwrap();
        let what = format!("{had} {words:?}");
        let tuned = apply_tune(&bytes, &feature_changes(words)).unwrap();
        check_and_dump_header(&tuned, source.path(), &what);
        let dump = Image::from_bytes(&tuned).debugfs("htree_dump /large").unwrap();
        assert_eq!(dump.contains("Root node dump"), stays, "{what}: {dump}");
    }
}

#[test]
fn adding_checksums_keeps_two_level_index() {
    let arguments = ["-t", "ext4", "-b", "1024", "-N", "4000", "-O", "^metadata_csum"];
    let Some(image) = Image::make(None, "16M", &arguments) else { return };
    let disk = image.memory_disk();
    let writing = common::storm::write_options();
    let volume = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing).unwrap();
    let node = |kind| NewNode { kind, mode: 0o755, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let dir = volume.create(volume.root(), b"large", &node(FileType::Directory)).unwrap();
    for nth in 0..1500 {
        let name = format!("{:0>92}", nth * 7919 % 1500);
        volume.create(dir, name.as_bytes(), &node(FileType::File)).unwrap();
    }
    let names = compare::list_names(&volume, dir);
    volume.close().unwrap();
    drop(volume);
    let bytes = std::sync::Arc::into_inner(disk).unwrap().into_bytes();
    let image =
        Image::from_bytes(&apply_tune(&bytes, &feature_changes(&["metadata_csum"])).unwrap());
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
    let dump = image.debugfs("htree_dump /large").unwrap();
    assert!(dump.contains("Indirect levels: 1"), "{dump}");
    let volume = image.open();
    assert_eq!(compare::list_names(&volume, dir), names);
    let Some(mount) = image.mount() else { return };
    assert_eq!(
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount),
        1502
    );
}

#[test]
fn power_loss_leaves_old_volume_or_resumable_change() {
    let source = tempfile::tempdir().unwrap();
    spoil::build_small_tree(source.path());
    let arguments = ["-t", "ext4", "-b", "1024", "-g", "1024"];
    let Some(image) = Image::make(Some(source.path()), "12M", &arguments) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    for changes in [
        TuneChanges { uuid: Some([0x42; 16]), ..TuneChanges::default() },
        feature_changes(&["^metadata_csum"]),
        feature_changes(&["^has_journal"]),
        feature_changes(&["^dir_index"]),
        feature_changes(&["^resize_inode"]),
    ] {
        let states = common::cuts::check_crash_states(&bytes, source.path(), |disk| {
            tune(disk, &changes, NOW).unwrap();
        });
        assert!(states.finished > 2, "{states:?}");
    }
}

#[test]
fn impossible_tuning_is_refused_by_name() {
    let Some(image) = Image::make(None, "16M", &["-t", "ext4", "-O", "ea_inode"]) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    for (changes, why) in [
        (feature_changes(&["bigalloc"]), "-O bigalloc: not added"),
        (feature_changes(&["^extent"]), "-O ^extent: not dropped"),
        (feature_changes(&["nonsense"]), "no such feature"),
        (TuneChanges { uuid: Some([9; 16]), ..TuneChanges::default() }, "metadata_csum_seed first"),
        (TuneChanges { label: Some(vec![b'x'; 17]), ..TuneChanges::default() }, "at most 16 bytes"),
        (TuneChanges { journal_mib: Some(8), ..TuneChanges::default() }, "needs -j"),
        (
            TuneChanges { reserved: Some(Reserved::Ppm(510_000)), ..TuneChanges::default() },
            "at most 50 percent",
        ),
        (TuneChanges { errors: Some(9), ..TuneChanges::default() }, "continue"),
    ] {
        let error = apply_tune(&bytes, &changes).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    let clusters = ["-t", "ext4", "-O", "bigalloc,^metadata_csum"];
    let Some(image) = Image::make(None, "16M", &clusters) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    for word in ["metadata_csum", "^dir_index"] {
        let error = apply_tune(&bytes, &feature_changes(&[word])).unwrap_err().to_string();
        assert!(error.contains("clusters (bigalloc)"), "{word}: {error}");
    }
}
