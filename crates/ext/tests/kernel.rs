//! Volumes written by the kernel: htrees, gaps, attributes and times.

use std::fs;
use std::path::Path;

use crate::common::compare::{self, ReferenceTree};
use crate::common::{Image, tree};
use draconis_device::Random;
use draconis_ext::InodeNumber;

/// Ages the volume in a second.
fn age_volume(root: &Path) {
    tree::build_tree(root);
    let dir = root.join("busy");
    fs::create_dir(&dir).unwrap();
    let mut random = Random::new(5);
    for nth in 0..12_000u64 {
        let name =
            format!("{:x}-{}", random.next_u64(), "n".repeat(random.next_below(60) as usize));
        fs::write(dir.join(name), if nth % 100 == 0 { "contents" } else { "" }).unwrap();
    }
    for (nth, entry) in fs::read_dir(&dir).unwrap().enumerate() {
        let path = entry.unwrap().path();
        match nth % 5 {
            0 => fs::remove_file(path).unwrap(),
            1 => fs::rename(&path, path.with_extension("renamed")).unwrap(),
            _ => {}
        }
    }
    fs::hard_link(root.join("large"), dir.join("large too")).unwrap();
    fs::remove_dir_all(root.join("many")).unwrap();
    fs::write(root.join("f65536"), tree::random_bytes(9, 300_000)).unwrap();
    let file = fs::OpenOptions::new().write(true).open(root.join("large")).unwrap();
    file.set_len(700_000).unwrap();
    file.set_len(900_000).unwrap();
}

fn compare_aged_volume(arguments: &[&str]) {
    let Some(image) = Image::make(None, "64M", arguments) else { return };
    let Some(mount) = image.mount_writable() else { return };
    age_volume(mount.path());
    drop(mount);
    let volume = image.open();
    assert!(volume.info().clean);
    let Some(mount) = image.mount() else { return };
    let names =
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount);
    assert!(names > 9000, "{names}");
}

#[test]
fn kernel_written_ext2_is_read() {
    compare_aged_volume(&["-t", "ext2", "-b", "1024", "-N", "16000", "-O", "dir_index"]);
}

#[test]
fn kernel_written_ext3_is_read() {
    compare_aged_volume(&["-t", "ext3", "-b", "4096", "-I", "256", "-N", "16000"]);
}

#[test]
#[ignore = "long: a minute: the kernel fills a volume"]
fn kernel_written_ext2_without_filetype_is_read() {
    compare_aged_volume(&[
        "-t",
        "ext2",
        "-b",
        "2048",
        "-I",
        "128",
        "-N",
        "16000",
        "-O",
        "^filetype,^dir_index",
    ]);
}

/// Groups have all their inodes: neither the kernel nor this crate accepts a smaller inode count.
#[test]
fn wrong_inode_counts_are_refused_like_the_kernel() {
    for kind in ["ext2", "ext3", "ext4"] {
        let made = ["-t", kind, "-b", "1024", "-O", "^metadata_csum"];
        let Some(image) = Image::make(None, "24M", &made) else { return };
        // Prints a message if the kernel cannot be asked.
        let asks_kernel = image.mount_with("loop,ro").is_some();
        let sound = fs::read(&image.path).unwrap();
        let number = |at: usize| u32::from_le_bytes(sound[at..at + 4].try_into().unwrap());
        let (count, per_group) = (number(1024), number(1024 + 40));
        assert_eq!(count, 3 * per_group);
        assert!(image.try_open().is_ok(), "{kind}");
        for wrong in [count - 1, count + 1, count - per_group, 2 * count, 11] {
            let mut bytes = sound.clone();
            bytes[1024..1028].copy_from_slice(&wrong.to_le_bytes());
            let image = Image::from_bytes(&bytes);
            let Err(error) = image.try_open() else { panic!("{kind}: {wrong} inodes") };
            assert!(error.to_string().contains("inodes count"), "{kind}: {error}");
            assert!(!asks_kernel || image.try_mount("loop,ro").is_err(), "{kind}: {wrong} inodes");
        }
    }
}

/// `DRACONIS_IMAGE=path cargo test -p draconis-ext --release --test main kernel:: -- any`; the default is
/// an image of this crate's sources.
#[test]
fn image_from_environment_matches_kernel() {
    let image = match std::env::var("DRACONIS_IMAGE") {
        Ok(path) => Some(Image { path: path.into(), dir: tempfile::tempdir().unwrap() }),
        Err(_) => {
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
            Image::make(Some(&sources), "16M", &["-b", "1024"])
        }
    };
    let Some(image) = image else { return };
    let volume = image.open();
    let Some(mount) = image.mount() else { return };
    let names =
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount);
    println!("{names} names are the same");
}

#[test]
fn kernel_written_ext4_is_read() {
    compare_aged_volume(&["-t", "ext4", "-b", "1024", "-N", "16000"]);
    compare_aged_volume(&[
        "-t",
        "ext4",
        "-b",
        "4096",
        "-N",
        "16000",
        "-O",
        "large_dir,metadata_csum_seed",
    ]);
}
