//! `draconis tune` compared with `tune2fs`: listing and changes.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, mke2fs};

/// Returns the output of `tune2fs -l`, without the version line.
fn tune2fs_listing(image: &Path) -> String {
    let output = Command::new("tune2fs").arg("-l").arg(image).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_once('\n').unwrap().1.to_owned()
}

/// Asserts that our listing equals that of `tune2fs`, and returns it.
fn assert_same_listing(draconis: &Draconis, image: &Path) -> String {
    let ours = draconis.run_ok(["tune", "-l", image.to_str().unwrap()]);
    assert_eq!(ours, tune2fs_listing(image));
    ours
}

fn make_image(draconis: &Draconis, name: &str, arguments: &[&str]) -> PathBuf {
    let image = draconis.path(name);
    mke2fs(&image, None, arguments, "64M");
    image
}

#[test]
fn listing_matches_tune2fs() {
    let draconis = Draconis::new();
    let odd = "bigalloc,casefold,encrypt,orphan_file,metadata_csum_seed,project,quota,mmp";
    for arguments in [
        &["-t", "ext2"][..],
        &["-t", "ext2", "-r", "0"],
        &["-t", "ext3", "-O", "^dir_index", "-L", "sixteen-letters-", "-M", "/a"],
        &["-t", "ext4", "-O", odd, "-E", "stride=4,stripe_width=16"],
        &["-t", "ext4", "-O", "meta_bg,^resize_inode,uninit_bg,^metadata_csum", "-b", "4096"],
    ] {
        let image = make_image(&draconis, "listed", arguments);
        assert_same_listing(&draconis, &image);
        let aged = Command::new("tune2fs").args(["-c", "30", "-i", "40d"]).arg(&image).output();
        assert!(aged.unwrap().status.success());
        let listed = assert_same_listing(&draconis, &image);
        assert!(listed.contains("(1 month, 1 week, 3 days)"), "{listed}");
    }
}

#[test]
fn listing_of_unusual_fields_matches_tune2fs() {
    let draconis = Draconis::new();
    let image = make_image(&draconis, "odd", &["-t", "ext4"]);
    for field in [
        "flags 0",
        "flags 7",
        "flags 8",
        "state 2",
        "state 7",
        "errors 7",
        "default_mount_opts 0xffff",
        "kbytes_written 8191",
        "kbytes_written 9216",
        "kbytes_written 900000000",
        "kbytes_written 90000000000000",
        "jnl_backup_type 3",
        "checkinterval 3459661",
        "creator_os 1",
        "creator_os 9",
        "last_orphan 12",
        "journal_uuid 0fc63daf-8483-4772-8e79-3d69d8477de4",
        "journal_dev 0x0801",
        "first_meta_bg 3",
        "max_mnt_count 40000",
        "first_error_time 20200102030405",
        "last_error_time 20210102030405",
        "error_count 2",
        "mount_opts foo,bar",
        "def_resuid 33",
        "def_resgid 7777",
        "snapshot_inum 3",
    ] {
        let request = format!("set_super_value {field}");
        draconis_testkit::judge::debugfs_write(&image, &request);
        assert_same_listing(&draconis, &image);
    }
}

#[test]
fn changes_match_tune2fs() {
    let draconis = Draconis::new();
    for line in [
        "-C 7 -c 20 -M /mnt -T 20200102",
        "-T 202001020304 -u www-data -g 7",
        "-u 33 -g daemon -o ^acl,journal_data_writeback,debug",
        "-o discard,nodelalloc -E stride=8,stripe_width=32,hash_alg=tea",
        "-E force_fsck",
        "-E test_fs -L label -m 7.5 -e panic",
        "-E mount_opts=acl",
        "-o journal_data",
        "-r 99 -i 3w",
        "-O casefold",
        "-O encrypt",
        "-O casefold,encrypt,large_dir",
    ] {
        let image = make_image(&draconis, "ours", &["-t", "ext4"]);
        let twin = draconis.path("theirs");
        std::fs::copy(&image, &twin).unwrap();
        let theirs = Command::new("tune2fs").args(line.split(' ')).arg(&twin).output().unwrap();
        assert!(theirs.status.success(), "{line}");
        draconis
            .run_ok(["tune"].into_iter().chain(line.split(' ')).chain([image.to_str().unwrap()]));
        // Write time and checksum differ.
        let seen = |image: &Path| {
            let listed = assert_same_listing(&draconis, image);
            let lines = listed.lines().filter(|line| {
                !line.starts_with("Last write time") && !line.starts_with("Checksum:")
            });
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(seen(&image), seen(&twin), "{line}");
        if !line.contains("force_fsck") {
            run_e2fsck(&image);
        }
    }
}

/// A volume changed by tune2fs needs e2fsck before a mount, and its overhead is not recomputed.
#[test]
fn clearing_resize_inode_matches_tune2fs_and_e2fsck() {
    let draconis = Draconis::new();
    for arguments in [&["-t", "ext4"][..], &["-t", "ext2", "-b", "1024"]] {
        let image = make_image(&draconis, "ours", arguments);
        let twin = draconis.path("theirs");
        std::fs::copy(&image, &twin).unwrap();
        for line in [&["tune2fs", "-O", "^resize_inode"][..], &["e2fsck", "-fy"]] {
            Command::new(line[0]).args(&line[1..]).arg(&twin).output().unwrap();
        }
        draconis.run_ok(["tune", "-O", "^resize_inode", image.to_str().unwrap()]);
        run_e2fsck(&image);
        let seen = |image: &Path| {
            let listed = assert_same_listing(&draconis, image);
            let differ = ["Last write", "Last checked", "Checksum:", "Overhead", "Lifetime"];
            let lines = listed.lines().filter(|line| !differ.iter().any(|it| line.starts_with(it)));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(seen(&image), seen(&twin), "{arguments:?}");
    }
}

#[test]
fn listing_after_change_is_current_and_listing_alone_is_read_only() {
    let draconis = Draconis::new();
    let image = make_image(&draconis, "listed", &["-t", "ext4"]);
    let before = std::fs::read(&image).unwrap();
    let path = image.to_str().unwrap();
    draconis.run_ok(["tune", "-l", path]);
    assert!(std::fs::read(&image).unwrap() == before);
    let listed = draconis.run_ok(["tune", "-l", "-C", "9", path]);
    assert!(listed.contains("Mount count:              9\n"), "{listed}");
    for (options, why) in [
        (&["-o", "foo"][..], "user_xattr"),
        (&["-T", "x"], "YYYYMMDD"),
        (&["-u", "70000"], "65535"),
        (&["-g", "no such group"], "no such group"),
        (&["-E", "stride=x"], "a number"),
        (&["-E", "hash_alg=md5"], "half_md4"),
        (&["-M", &"x".repeat(65)], "64 bytes"),
    ] {
        let errors = draconis.run_failing([&["tune"][..], options, &[path]].concat());
        assert!(errors.contains(why), "{errors}");
    }
    run_e2fsck(&image);
}
