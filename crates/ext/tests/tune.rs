//! Tuning: each change checked by e2fsck, the kernel and tune2fs's view.

mod common;

use common::compare::{self, Beside};
use common::{Image, run, spoil};
use draconis_device::{Disk, MemoryDisk};
use draconis_exchange::contract::{FileType, Time};
use draconis_ext::format::quota::QuotaType as Quota;
use draconis_ext::tune::{OfflineError, Reserved, TuneChanges, tune};
use draconis_ext::{InodeNumber, NewNode, OpenOptions, Volume};

const NOW: Time = Time { seconds: 1_700_000_000, nanoseconds: 0 };

fn changed(bytes: &[u8], changes: &TuneChanges) -> Result<Vec<u8>, OfflineError> {
    let disk = MemoryDisk::new(bytes.to_vec(), 512);
    tune(&disk as &dyn Disk, changes, NOW)?;
    Ok(disk.into_bytes())
}

fn features(words: &[&str]) -> TuneChanges {
    let features = words.iter().map(|word| (*word).to_owned()).collect();
    TuneChanges { features, hash_seed: *b"0123456789abcdef", ..TuneChanges::default() }
}

/// Checks a volume; returns the output of `dumpe2fs -h`.
fn sound(bytes: &[u8], source: &std::path::Path, what: &str) -> String {
    let image = Image::of(bytes);
    assert!(run("e2fsck", &["-fn", image.path()]).is_some(), "{what}");
    compare::tree(&image.open(), InodeNumber::ROOT, source, Beside::Source);
    if let Some(mount) = image.mount_writable() {
        std::fs::write(mount.path().join("new"), what).unwrap();
        drop(mount);
        run("e2fsck", &["-fn", image.path()]);
    }
    run("dumpe2fs", &["-h", image.path()]).unwrap()
}

#[test]
fn fields_change_by_one_sector() {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
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
        let tuned = changed(&bytes, &changes).unwrap();
        let differ: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at] != tuned[*at]).map(|at| at / 512).collect();
        assert!(differ.iter().all(|sector| *sector == 2), "{differ:?}");
        let said = sound(&tuned, source.path(), "fields");
        for expected in ["a label", "Remount read-only", "Maximum mount count:      30", "1 week"] {
            assert!(said.contains(expected), "{expected}: {said}");
        }
        let changes =
            TuneChanges { reserved: Some(Reserved::Blocks(77)), ..TuneChanges::default() };
        let said = sound(&changed(&bytes, &changes).unwrap(), source.path(), "blocks");
        assert!(said.contains("Reserved block count:     77"), "{said}");
    }
}

#[test]
fn identities_change_with_all_that_is_sealed_by_them() {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
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
        let tuned = changed(&bytes, &changes).unwrap();
        let said = sound(&tuned, source.path(), &format!("{arguments:?}"));
        assert!(said.contains("deadbeef-0001-4222-8333-616263646566"), "{said}");
    }
}

#[test]
fn files_without_names_come_and_go() {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
    let owned = source.path().join("of another");
    std::fs::write(&owned, vec![7; 70_000]).unwrap();
    let _ = std::os::unix::fs::chown(&owned, Some(70_000), Some(3));
    let free = |bytes: &[u8]| {
        let said = run("dumpe2fs", &["-h", Image::of(bytes).path()]).unwrap();
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
            let with = changed(&bytes, &features(words)).unwrap();
            let said = sound(&with, source.path(), &what);
            assert!(shown.iter().all(|line| said.contains(line)), "{what}: {said}");
            if words == ["mmp"] {
                continue;
            }
            let words = words.iter().filter(|word| **word != "project");
            let back: Vec<String> = words.map(|word| format!("^{word}")).collect();
            let back: Vec<&str> = back.iter().map(|word| &word[..]).collect();
            let without = changed(&with, &features(&back)).unwrap();
            let said = sound(&without, source.path(), &what);
            assert!(!shown.iter().any(|line| said.contains(line)), "{what}: {said}");
            assert_eq!(free(&without), free(&bytes), "{what}");
        }
        // One kind after the other.
        let quotas =
            |quotas: &[(Quota, bool)]| TuneChanges { quotas: quotas.to_vec(), ..features(&[]) };
        let users = changed(&bytes, &quotas(&[(Quota::User, true)])).unwrap();
        let said = sound(&users, source.path(), "users");
        assert!(said.contains("User quota") && !said.contains("Group quota"), "{said}");
        let groups = quotas(&[(Quota::User, false), (Quota::Group, true)]);
        let said = sound(&changed(&users, &groups).unwrap(), source.path(), "groups");
        assert!(!said.contains("User quota") && said.contains("Group quota"), "{said}");
        let neither = changed(&users, &quotas(&[(Quota::User, false)])).unwrap();
        assert!(!sound(&neither, source.path(), "neither").contains("quota"));
        for refused in [
            quotas(&[(Quota::Project, true)]),
            features(&["orphan_file", "^has_journal"]),
            TuneChanges { mmp_interval: Some(5), ..features(&[]) },
            TuneChanges { mmp_interval: Some(301), ..features(&["mmp"]) },
        ] {
            let error = changed(&bytes, &refused).unwrap_err();
            assert!(matches!(error, OfflineError::Misuse(_)), "{error:?}");
        }
    }
}

#[test]
fn journals_come_and_go() {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
    for arguments in [
        &["-t", "ext2", "-b", "1024"][..],
        &["-t", "ext4", "-O", "^has_journal"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^has_journal"],
        &["-t", "ext4", "-b", "1024", "-g", "1024", "-C", "4096", "-O", "bigalloc,^has_journal"],
        &["-t", "ext4", "-b", "1024", "-C", "64K", "-O", "bigalloc,^has_journal"],
    ] {
        let Some(image) = Image::make(Some(source.path()), "32M", arguments) else { return };
        let bytes = std::fs::read(&image.path).unwrap();
        let with = changed(&bytes, &features(&["has_journal"])).unwrap();
        let what = format!("{arguments:?}");
        let said = sound(&with, source.path(), &what);
        assert!(said.contains("has_journal") && said.contains("journal size:"), "{said}");
        let without = changed(&with, &features(&["^has_journal"])).unwrap();
        let said = sound(&without, source.path(), &what);
        assert!(!said.contains("has_journal"), "{said}");
        let free = |bytes: &[u8]| bytes[1024 + 12..1024 + 16].to_vec();
        assert_eq!(free(&without), free(&bytes), "{what}");
        let large = TuneChanges { journal_mib: Some(8), ..features(&["has_journal"]) };
        let said = sound(&changed(&bytes, &large).unwrap(), source.path(), &what);
        assert!(said.contains("8M") || said.contains("8192k"), "{said}");
    }
    let Some(image) = Image::make(Some(source.path()), "32M", &["-t", "ext4"]) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    let without = changed(&bytes, &features(&["^has_journal"])).unwrap();
    assert!(!sound(&without, source.path(), "dropped").contains("has_journal"));
}

#[test]
fn features_come_and_go_in_place() {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
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
        let tuned = changed(&bytes, &features(words)).unwrap();
        let mut said = run("dumpe2fs", &["-h", Image::of(&tuned).path()]).unwrap();
        if !said.contains("read-only") {
            said = sound(&tuned, source.path(), &format!("{words:?}"));
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
    let tuned = changed(&bytes, &other).unwrap();
    let tuned = changed(&tuned, &features(&["^metadata_csum_seed"])).unwrap();
    sound(&tuned, source.path(), "without its seed");
}

/// Makes a directory of many names: of all lengths, or of one length, which leaves space in every
/// block; with an htree or without.
fn large_directory(
    arguments: &[&str],
    is_even: bool,
    is_indexed: bool,
) -> Option<(Image, tempfile::TempDir)> {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
    let dir = source.path().join("large");
    std::fs::create_dir(&dir).unwrap();
    for nth in 0..if is_even { 1000 } else { 2500 } {
        let width = if is_even { 92 } else { 10 + nth % 90 };
        std::fs::write(dir.join(format!("{nth:0width$}")), b"").unwrap();
    }
    let image = Image::make(Some(source.path()), "16M", arguments)?;
    if is_indexed {
        run("e2fsck", &["-fyD", image.path()]);
    }
    Some((image, source))
}

#[test]
fn directories_get_room_for_checksums_or_lose_their_index() {
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
        let Some((image, source)) = large_directory(&arguments, is_even, is_indexed) else {
            return;
        };
        let bytes = std::fs::read(&image.path).unwrap();
        let what = format!("{had} {words:?}");
        let tuned = changed(&bytes, &features(words)).unwrap();
        sound(&tuned, source.path(), &what);
        let dump = Image::of(&tuned).debugfs("htree_dump /large").unwrap();
        assert_eq!(dump.contains("Root node dump"), stays, "{what}: {dump}");
    }
}

#[test]
fn an_index_of_two_levels_gets_room_for_checksums() {
    let arguments = ["-t", "ext4", "-b", "1024", "-N", "4000", "-O", "^metadata_csum"];
    let Some(image) = Image::make(None, "16M", &arguments) else { return };
    let disk = std::sync::Arc::new(MemoryDisk::new(std::fs::read(&image.path).unwrap(), 512));
    let writing = common::storm::writing();
    let volume = Volume::open_for_writing(disk.clone(), OpenOptions::default(), writing).unwrap();
    let node = |kind| NewNode { kind, mode: 0o755, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let dir = volume.create(volume.root(), b"large", &node(FileType::Directory)).unwrap();
    for nth in 0..1500 {
        let name = format!("{:0>92}", nth * 7919 % 1500);
        volume.create(dir, name.as_bytes(), &node(FileType::File)).unwrap();
    }
    let names = compare::names(&volume, dir);
    volume.close().unwrap();
    drop(volume);
    let bytes = std::sync::Arc::into_inner(disk).unwrap().into_bytes();
    let image = Image::of(&changed(&bytes, &features(&["metadata_csum"])).unwrap());
    assert!(run("e2fsck", &["-fn", image.path()]).is_some());
    let dump = image.debugfs("htree_dump /large").unwrap();
    assert!(dump.contains("Indirect levels: 1"), "{dump}");
    let volume = image.open();
    assert_eq!(compare::names(&volume, dir), names);
    let Some(mount) = image.mount() else { return };
    assert_eq!(compare::tree(&volume, InodeNumber::ROOT, mount.path(), Beside::Mount), 1502);
}

#[test]
fn a_power_cut_leaves_the_old_volume_or_one_that_is_finished_later() {
    let source = tempfile::tempdir().unwrap();
    spoil::small_tree(source.path());
    let arguments = ["-t", "ext4", "-b", "1024", "-g", "1024"];
    let Some(image) = Image::make(Some(source.path()), "12M", &arguments) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    for changes in [
        TuneChanges { uuid: Some([0x42; 16]), ..TuneChanges::default() },
        features(&["^metadata_csum"]),
        features(&["^has_journal"]),
        features(&["^dir_index"]),
        features(&["^resize_inode"]),
    ] {
        let states = common::cuts::judge(&bytes, source.path(), |disk| {
            tune(disk, &changes, NOW).unwrap();
        });
        assert!(states.finished > 2, "{states:?}");
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let Some(image) = Image::make(None, "16M", &["-t", "ext4", "-O", "ea_inode"]) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    for (changes, why) in [
        (features(&["bigalloc"]), "-O bigalloc: not added"),
        (features(&["^extent"]), "-O ^extent: not dropped"),
        (features(&["nonsense"]), "no such feature"),
        (TuneChanges { uuid: Some([9; 16]), ..TuneChanges::default() }, "metadata_csum_seed first"),
        (TuneChanges { label: Some(vec![b'x'; 17]), ..TuneChanges::default() }, "at most 16 bytes"),
        (TuneChanges { journal_mib: Some(8), ..TuneChanges::default() }, "needs -j"),
        (
            TuneChanges { reserved: Some(Reserved::Ppm(510_000)), ..TuneChanges::default() },
            "at most 50 percent",
        ),
        (TuneChanges { errors: Some(9), ..TuneChanges::default() }, "continue"),
    ] {
        let error = changed(&bytes, &changes).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    let clusters = ["-t", "ext4", "-O", "bigalloc,^metadata_csum"];
    let Some(image) = Image::make(None, "16M", &clusters) else { return };
    let bytes = std::fs::read(&image.path).unwrap();
    for word in ["metadata_csum", "^dir_index"] {
        let error = changed(&bytes, &features(&[word])).unwrap_err().to_string();
        assert!(error.contains("clusters (bigalloc)"), "{word}: {error}");
    }
}
