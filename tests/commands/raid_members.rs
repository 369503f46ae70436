//! One disk of a mirror whose superblock is at the end: read as always, and written only if it is
//! named.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use draconis_testkit::judge::assert_fsck_clean;

use crate::common::{Draconis, has_fuse, mke2fs};

const DISK_BYTES: u64 = 8 << 20;
const STORE_DISK_BYTES: u64 = 48 << 20;
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
    write_superblock(&file, DISK_BYTES, version);
    image
}

/// Writes the superblock of a member of this length.
fn write_superblock(file: &std::fs::File, len_bytes: u64, version: &str) {
    let mut superblock = vec![0; 4096];
    let mut put = |at: usize, bytes: &[u8]| superblock[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_le_bytes());
    let at = match version {
        "1.0" => {
            let at = len_bytes - 8192;
            put(4, &1u32.to_le_bytes());
            UUID.iter().zip(4..).for_each(|(word, nth)| put(nth * 4, &word.to_be_bytes()));
            put(144, &(at / 512).to_le_bytes());
            at
        }
        _ => {
            put(8, &90u32.to_le_bytes());
            let words = UUID.iter().zip([5, 13, 14, 15]);
            words.for_each(|(word, nth)| put(nth * 4, &word.to_le_bytes()));
            len_bytes - 65536
        }
    };
    file.write_all_at(&superblock, at).unwrap();
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

/// Makes a disk with a store of 40 MiB, and in it keys and the disk `vol`.
fn make_store_member(draconis: &Draconis, version: &str) -> PathBuf {
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("a"), "hello\n").unwrap();
    std::fs::write(tree.join("lines"), "key\tvalue\n").unwrap();
    let image = draconis.path("a.img");
    for line in [
        "store create IMG --size 40M --layout cow --sparse",
        "store disk IMG vol 8M",
        "format IMG#vol",
        "put TREE/a IMG#vol:/a",
        "kv load IMG TREE/lines",
        "store snapshot IMG#vol taken",
    ] {
        let output = run(draconis, &image, line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.set_len(STORE_DISK_BYTES).unwrap();
    write_superblock(&file, STORE_DISK_BYTES, version);
    image
}

#[test]
fn stores_on_raid_members_are_written_only_by_name() {
    for version in ["0.90", "1.0"] {
        let draconis = Draconis::new();
        let image = make_store_member(&draconis, version);
        let before = std::fs::read(&image).unwrap();
        let assert_refused = |line: &str| {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{line}");
            for part in ["a.img", version, SHOWN_UUID, "--force=raid-member"] {
                assert!(errors.contains(part), "{line}: {errors}");
            }
        };
        for line in [
            "store put IMG new TREE/a",
            "store append IMG vol TREE/a",
            "store rm IMG vol",
            "store rm -f IMG 1 2",
            "store disk IMG other 1M",
            "store snapshot IMG#vol other",
            "store clone IMG#vol other",
            "store rollback IMG#vol taken",
            "store grow IMG",
            "store shrink IMG 32M",
            "kv put IMG key other",
            "kv del IMG key",
            "kv load IMG TREE/lines",
            "put TREE/a IMG#vol:/b",
            "cp IMG#vol:/a IMG#vol:/b",
            "set-label IMG#vol label",
            "tune -L label IMG#vol",
            "repair -p IMG#vol",
            "grow IMG#vol 9M",
            "format --force IMG#vol",
            "export --run true IMG#vol",
            "export --clone --run true IMG#vol",
        ] {
            assert_refused(line);
        }
        for line in ["store create IMG", "store create --force IMG"] {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && errors.contains("--force=md"), "{line}: {errors}");
        }
        for line in [
            "store ls IMG",
            "store info IMG",
            "store check IMG",
            "store get IMG vol -",
            "kv get IMG key",
            "kv scan IMG",
            "ls IMG#vol:/",
            "cat IMG#vol:/a",
            "check IMG#vol",
            "export -r --run true IMG#vol",
        ] {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && errors.is_empty(), "{line}: {errors}");
        }
        if has_fuse("mounting a disk of a store on a member of a RAID") {
            let at = draconis.make_dir("at");
            assert_refused(&format!("mount IMG#vol {}", at.display()));
            let disk = PathBuf::from(format!("{}#vol", image.display()));
            draconis.mount(&disk, "at", "ro");
            assert_eq!(std::fs::read_to_string(at.join("a")).unwrap(), "hello\n");
            assert_refused("store snapshot IMG#vol other");
            draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
            assert!(std::fs::read(&image).unwrap() == before, "{version}");
            draconis.mount(&disk, "at", "force=raid-member");
            std::fs::write(at.join("mounted"), "mounted").unwrap();
            draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        }
        for line in [
            "put --force=raid-member TREE/a IMG#vol:/b",
            "kv put --force=raid-member IMG other value",
            "kv del --force=raid-member IMG key",
            "store put --force=raid-member IMG new TREE/a",
            "store snapshot --force=raid-member IMG#vol other",
            "store rm -f --force=raid-member IMG vol@other none",
            "store shrink --force=raid-member IMG 36M",
        ] {
            let output = run(&draconis, &image, line);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{line}: {errors}");
        }
        for line in ["store check IMG", "check IMG#vol"] {
            let output = run(&draconis, &image, line);
            assert!(output.status.success(), "{line}: {output:?}");
        }
    }
}
