//! Inline files and directories, as made by the kernel and `mke2fs`.

use crate::common;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use crate::common::compare::{self, ReferenceTree};
use crate::common::{Image, tree};
use draconis_ext::{Cookie, FsBlock, InodeNumber, Seek};
use rustix::fs::XattrFlags;

/// Volumes of several inode sizes.
const VOLUME_OPTIONS: [&[&str]; 4] = [
    &["-t", "ext4", "-I", "256", "-b", "1024"],
    &["-t", "ext4", "-I", "512", "-b", "2048"],
    &["-t", "ext4", "-I", "1024", "-b", "4096"],
    &["-t", "ext4", "-I", "256", "-b", "4096"],
];
const FEATURES: &str = "inline_data,^has_journal";

fn make_inline_image(source: Option<&Path>, arguments: &[&str]) -> Option<Image> {
    let mut all = arguments.to_vec();
    all.extend(["-O", FEATURES]);
    Image::make(source, "16M", &all)
}

/// Creates files, symbolic links and directories of lengths around the limits.
fn fill(root: &Path) {
    for len in (0..1100).step_by(13).chain([1, 59, 60, 61, 62, 160, 164, 168]) {
        fs::write(root.join(format!("f{len}")), tree::random_bytes(len as u64, len)).unwrap();
    }
    for len in [1, 59, 60, 61, 90, 100, 156, 300, 800] {
        symlink("t".repeat(len), root.join(format!("link{len}"))).unwrap();
    }
    for count in [0, 1, 3, 4, 6, 12, 30, 80] {
        let dir = root.join(format!("d{count}"));
        fs::create_dir(&dir).unwrap();
        for nth in 0..count {
            fs::write(dir.join(format!("name {nth}")), nth.to_string()).unwrap();
        }
        fs::create_dir(dir.join("sub")).unwrap();
    }
}

/// Makes changes that need a mount: gaps, growth, attributes next to the contents.
fn change_mounted(root: &Path) {
    for nth in (0..30).step_by(3) {
        fs::remove_file(root.join(format!("d30/name {nth}"))).unwrap();
    }
    fs::remove_file(root.join("d4/name 1")).unwrap();
    fs::rename(root.join("d4/name 2"), root.join("d4/n")).unwrap();
    let cut = File::options().write(true).open(root.join("f156")).unwrap();
    cut.set_len(70).unwrap();
    cut.set_len(90).unwrap();
    cut.write_all_at(b"at the end", 85).unwrap();
    for (file, name) in [("f13", "user.a"), ("f52", "user.b"), ("d1", "user.c")] {
        let value = tree::random_bytes(4, 20);
        rustix::fs::setxattr(root.join(file), name, &value, XattrFlags::empty()).unwrap();
    }
}

fn count_inline_inodes(image: &Image) -> usize {
    let volume = image.open();
    compare::list_names(&volume, InodeNumber::ROOT)
        .values()
        .filter(|number| volume.inode(**number).unwrap().is_inline())
        .count()
}

#[test]
fn kernel_written_inline_data_is_read() {
    for arguments in VOLUME_OPTIONS {
        let Some(image) = make_inline_image(None, arguments) else { return };
        let Some(mount) = image.mount_writable() else { return };
        fill(mount.path());
        change_mounted(mount.path());
        drop(mount);
        common::run_tool("e2fsck", &["-fn", image.path()]);
        let (volume, Some(mount)) = (image.open(), image.mount()) else { return };
        let names =
            compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount);
        assert!(names > 200, "{names}");
        assert!(count_inline_inodes(&image) > 10, "{arguments:?}");
    }
}

#[test]
fn mke2fs_written_inline_data_is_read() {
    let source = tempfile::tempdir().unwrap();
    fill(source.path());
    for arguments in VOLUME_OPTIONS {
        let Some(image) = make_inline_image(Some(source.path()), arguments) else { return };
        let volume = image.open();
        compare::compare_trees(&volume, InodeNumber::ROOT, source.path(), ReferenceTree::Source);
        assert!(count_inline_inodes(&image) > 10, "{arguments:?}");
    }
}

#[test]
fn cookies_of_inline_directory_stay_valid() {
    let Some(image) = make_inline_image(None, VOLUME_OPTIONS[2]) else { return };
    let Some(mount) = image.mount_writable() else { return };
    fill(mount.path());
    drop(mount);
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"d12").unwrap();
    assert!(volume.inode(dir).unwrap().is_inline());
    let list = |from, dots| {
        let mut found = Vec::new();
        volume
            .entries(dir, from, dots, |entry| {
                let entry = entry.unwrap();
                found.push((entry.name.to_vec(), entry.inode, entry.next));
                true
            })
            .unwrap();
        found
    };
    let all = list(Cookie::default(), true);
    assert_eq!(all.len(), 15);
    assert_eq!((&all[0].0[..], all[0].1), (&b"."[..], dir));
    assert_eq!((&all[1].0[..], all[1].1), (&b".."[..], volume.root()));
    for (nth, (name, inode, next)) in all.iter().enumerate() {
        assert_eq!(list(*next, true), all[nth + 1..]);
        assert_eq!(volume.lookup(dir, name).unwrap(), *inode);
    }
    assert_eq!(list(Cookie::default(), false), all[2..]);
    assert!(list(Cookie(u64::MAX), true).is_empty());
    assert!(volume.lookup(dir, b"name 12").is_err());
}

#[test]
fn inline_contents_have_no_block_and_are_no_hole() {
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("file"), tree::random_bytes(1, 100)).unwrap();
    let Some(image) = make_inline_image(Some(source.path()), VOLUME_OPTIONS[0]) else { return };
    // Longer than the stored data: the rest reads as zeros.
    image.debugfs_write("set_inode_field file size 5000");
    let volume = image.open();
    let file = volume.lookup(volume.root(), b"file").unwrap();
    assert_eq!(volume.map(file, 0), Ok(vec![]));
    assert_eq!(volume.first_block(&volume.inode(file).unwrap()), None::<FsBlock>);
    for (at, data, hole) in
        [(0, Some(0), 100), (99, Some(99), 100), (100, None, 100), (4999, None, 4999)]
    {
        assert_eq!(volume.seek(file, at, Seek::Data), Ok(data), "{at}");
        assert_eq!(volume.seek(file, at, Seek::Hole), Ok(Some(hole)), "{at}");
    }
    let mut bytes = vec![1; 6000];
    assert_eq!(volume.read_into(file, 0, &mut bytes), Ok(5000));
    assert_eq!(bytes[..100], tree::random_bytes(1, 100));
    assert!(bytes[100..5000].iter().all(|byte| *byte == 0));
    assert_eq!(volume.xattr_names(file), Ok(vec![]));
    assert!(volume.xattr(file, b"system.data").is_err());
}
