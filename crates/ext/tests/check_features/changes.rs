//! Shrink, grow and tune of volumes whose flags, counters and bitmaps are wrong: refused, with every
//! byte as before, or every file that could be read before is there with its bytes.

use std::sync::Mutex;

use crate::check_features::parts::BaseVolume;
use crate::check_features::repairs::{Contents, readable_files};
use crate::check_features::{LINES_TO_CORRUPT, check_corrupted_volumes, e2fsck_bytes};
use crate::common::offline::{OFFLINE_CHANGES, with_disk};
use crate::common::spoil::{build_small_tree, scaled_rounds};
use crate::common::{Image, report_skipped};

/// Makes each change of the volume, whose disk is half as long again; returns what is wrong, and the
/// number of changes made and refused.
fn make_all_changes(volume: &[u8]) -> (Vec<String>, [u64; 2]) {
    let mut image = volume.to_vec();
    image.resize((volume.len() * 3 / 2).next_multiple_of(1 << 20), 0);
    let before = readable_files(&image);
    let (mut wrong, mut counts) = (vec![], [0, 0]);
    for (name, change) in OFFLINE_CHANGES {
        let (done, bytes) = with_disk(image.clone(), change);
        counts[usize::from(done.is_err())] += 1;
        match done {
            Err(error) if bytes != image => wrong.push(format!("{name}: {error}, and written")),
            Err(_) => {}
            Ok(()) => wrong.extend(lost_after(name, &image, &before, &bytes)),
        }
    }
    (wrong, counts)
}

fn lost_after(name: &str, image: &[u8], before: &Contents, bytes: &[u8]) -> Option<String> {
    let after = readable_files(bytes);
    let lost = before.iter().filter(|(path, bytes)| after.get(*path) != Some(*bytes)).count();
    if lost > 0 {
        return Some(format!("{name}: {lost} of {} files are lost", before.len()));
    }
    let (is_clean, output) = e2fsck_bytes(bytes);
    (!is_clean && e2fsck_bytes(image).0).then(|| format!("{name}: e2fsck: {output}"))
}

fn change_corrupted_volumes(lines: &[&str], rounds: u64) {
    let tally = Mutex::new([0, 0]);
    let wrong = check_corrupted_volumes(lines, 0x0FF1, rounds, |volume| {
        // Some are as they were made.
        let is_whole = volume.seed % 8 == 0;
        let image = if is_whole { &volume.base.image } else { &volume.image };
        let (wrong, counts) = make_all_changes(image);
        tally.lock().unwrap().iter_mut().zip(counts).for_each(|(all, count)| *all += count);
        (!wrong.is_empty()).then(|| format!("whole: {is_whole}: {}", wrong.join("; ")))
    });
    let Some(wrong) = wrong else { return };
    assert!(wrong.is_empty(), "{} of {rounds}:\n{}", wrong.len(), wrong.join("\n"));
    let [made, refused] = tally.into_inner().unwrap();
    eprintln!("{rounds} volumes, {made} changes, {refused} refused");
    assert!(made > rounds / 4 && refused > rounds, "{made} made, {refused} refused");
}

/// Lines with each kind of checksums: all, of descriptors, none.
const FEW_LINES: &[&str] = &[
    "-t ext4 -b 1024",
    "-t ext3 -b 1024 -O uninit_bg,flex_bg",
    "-t ext4 -b 1024 -O ^metadata_csum,^64bit",
];

#[test]
fn changes_of_corrupted_volumes_lose_no_file() {
    change_corrupted_volumes(FEW_LINES, scaled_rounds(40));
}

#[test]
#[ignore = "long: minutes: hundreds of volumes with all features"]
fn changes_of_all_corrupted_volumes_lose_no_file() {
    change_corrupted_volumes(LINES_TO_CORRUPT, scaled_rounds(300));
}

/// Without `uninit_bg` and `metadata_csum` a group cannot say that something of it was never used:
/// e2fsck finds these volumes clean.
#[test]
fn flags_and_counts_without_their_feature_do_not_count() {
    let source = tempfile::tempdir().unwrap();
    build_small_tree(source.path());
    for nth in 0..300 {
        std::fs::write(source.path().join(format!("f{nth}")), vec![nth as u8; 40 * nth]).unwrap();
    }
    for arguments in [
        &["-t", "ext4", "-b", "1024", "-g", "2048", "-O", "^metadata_csum,^uninit_bg"][..],
        &["-t", "ext3", "-b", "4096", "-O", "^resize_inode"],
        &["-t", "ext2", "-b", "1024", "-I", "128"],
    ] {
        let Some(image) = Image::make(Some(source.path()), "24M", arguments) else { return };
        let base = BaseVolume::from_image("", std::fs::read(&image.path).unwrap());
        let mut stale = base.image.clone();
        for group in 0..base.groups() {
            base.change_group(&mut stale, group, |group, _| {
                (group.flags, group.unused_inodes) = (6, 0xFFFF);
            });
        }
        let (is_clean, output) = e2fsck_bytes(&stale);
        assert!(is_clean, "{arguments:?}: {output}");
        assert_eq!(readable_files(&stale), readable_files(&base.image), "{arguments:?}");
        let (wrong, [made, _]) = make_all_changes(&stale);
        assert!(wrong.is_empty() && made > 3, "{arguments:?}: {made} made, {wrong:?}");
    }
}

/// The three ways in which a group lies under right checksums, one at a time.
#[test]
fn wrong_bitmaps_and_counts_under_right_checksums_are_refused() {
    let source = tempfile::tempdir().unwrap();
    build_small_tree(source.path());
    let arguments = ["-t", "ext4", "-b", "1024"];
    let Some(image) = Image::make(Some(source.path()), "12M", &arguments) else { return };
    let plants: [(&[&str], &str); 3] = [
        (&["freei <14> 10"], "inodes in use are free"),
        (&["freeb 400 1500"], "blocks in use are free"),
        (
            &["set_bg 0 itable_unused 65535", "set_bg 0 checksum calc"],
            "an inode in use lies where the group",
        ),
    ];
    for (requests, what) in plants {
        let planted = Image::from_bytes(&std::fs::read(&image.path).unwrap());
        for request in requests {
            if planted.debugfs_write(request).is_none() {
                return report_skipped("debugfs does not write");
            }
        }
        let bytes = std::fs::read(&planted.path).unwrap();
        for (name, change) in OFFLINE_CHANGES {
            let (done, after) = with_disk(bytes.clone(), change);
            let why = done.unwrap_err().to_string();
            assert!(why.contains(what) && why.contains("draconis repair"), "{name}: {why}");
            assert!(after == bytes, "{name}: {what}");
        }
    }
}
