//! One disk of a mirror whose superblock is at the end: read as always, and written only if it is
//! named.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use draconis_testkit::judge::assert_fsck_clean;

use crate::common::{Draconis, mke2fs};

const DISK_BYTES: u64 = 8 << 20;
const MAGIC: u32 = 0xa92b_4efc;
const UUID: [u32; 4] = [0x0011_2233, 0x4455_6677, 0x8899_aabb, 0xccdd_eeff];
const SHOWN_UUID: &str = "00112233:44556677:8899aabb:ccddeeff";

/// Makes a disk with a volume of 6 MiB and a superblock of version 0.90 or 1.0.
fn make_member(draconis: &Draconis, version: &str) -> PathBuf {
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("a"), "hello\n").unwrap();
    let image = draconis.path("a.img");
    let _ = std::fs::remove_file(&image);
    mke2fs(&image, Some(&tree), &["-t", "ext4"], "6M");
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    let mut superblock = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| superblock[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_le_bytes());
    let at = match version {
        "1.0" => {
            let at = DISK_BYTES - 8192;
            put(4, &1u32.to_le_bytes());
            UUID.iter().zip(4..).for_each(|(word, nth)| put(nth * 4, &word.to_be_bytes()));
            put(144, &(at / 512).to_le_bytes());
            at
        }
        _ => {
            put(8, &90u32.to_le_bytes());
            let words = UUID.iter().zip([5, 13, 14, 15]);
            words.for_each(|(word, nth)| put(nth * 4, &word.to_le_bytes()));
            DISK_BYTES - 65536
        }
    };
    file.write_all_at(&superblock, at).unwrap();
    image
}

fn run(draconis: &Draconis, image: &Path, line: &str) -> Output {
    let image = image.to_str().unwrap();
    let tree = draconis.path("tree");
    let line = line.replace("TREE", tree.to_str().unwrap());
    draconis.run(line.split(' ').map(|word| word.replace("IMG", image)))
}

#[test]
fn raid_members_are_written_only_by_name() {
    for version in ["0.90", "1.0"] {
        let draconis = Draconis::new();
        let image = make_member(&draconis, version);
        let mut tar = Command::new("tar");
        tar.current_dir(draconis.dir.path()).args(["-cf", "tree.tar", "tree"]);
        assert!(tar.status().unwrap().success());
        let before = std::fs::read(&image).unwrap();
        let socket = draconis.path("socket");
        let export = format!("export --vhost-user {} --run true IMG", socket.display());
        for line in [
            "put TREE/a IMG:/b",
            "cp IMG:/a IMG:/b",
            "rm IMG:/a",
            "rm -f --force IMG:/a",
            "mkdir IMG:/d",
            "mv IMG:/a IMG:/b",
            "ln IMG:/a IMG:/b",
            "chmod 600 IMG:/a",
            "chown 1:1 IMG:/a",
            "touch IMG:/a",
            "truncate -s 0 IMG:/a",
            "untar -f TREE.tar IMG:/",
            "set-label IMG label",
            "tune -L label IMG",
            "grow IMG",
            "shrink IMG",
            "repair -p IMG",
            "export --run true IMG",
            "export --format raw --run true IMG",
            &export,
        ] {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{line}");
            for part in ["a.img", version, SHOWN_UUID, "--force=raid-member"] {
                assert!(errors.contains(part), "{line}: {errors}");
            }
        }
        for line in ["format IMG", "format --force IMG"] {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && errors.contains("--force=md"), "{line}: {errors}");
        }
        assert!(std::fs::read(&image).unwrap() == before, "{version}");
        for line in ["ls IMG:/", "cat IMG:/a", "check IMG", "info IMG", "export -r --run true IMG"]
        {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && errors.is_empty(), "{line}: {errors}");
        }
        for line in [
            "put --force=raid-member TREE/a IMG:/b",
            "ln -f --force=raid-member IMG:/a IMG:/b",
            "rm --force --force=raid-member IMG:/a IMG:/none",
            "tune -L label --force=raid-member IMG",
            "export --force=raid-member --run true IMG",
            "format --force=raid-member IMG",
        ] {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {errors}");
            assert_fsck_clean(&image);
        }
    }
}
