//! Special fields of ext4 inodes: fs-verity and projects.

use crate::common;

use std::fs;

use crate::common::{Image, tree};
use draconis_ext::format::inode::flags;
use draconis_ext::{BlockLocation, Seek};

#[test]
fn merkle_tree_beyond_verity_file_end_is_hidden() {
    let source = tempfile::tempdir().unwrap();
    let whole = tree::random_bytes(1, 10 << 10);
    fs::write(source.path().join("sealed"), &whole).unwrap();
    for features in ["verity,^has_journal", "verity,^has_journal,^extent,^64bit"] {
        let arguments = ["-t", "ext4", "-b", "1024", "-O", features];
        let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
        let volume = image.open();
        let sealed = volume.lookup(volume.root(), b"sealed").unwrap();
        // As `FS_IOC_ENABLE_VERITY` leaves it: a Merkle tree in blocks behind the end.
        let all = volume.inode(sealed).unwrap().flags | flags::VERITY;
        image.debugfs_write(&format!("set_inode_field sealed flags {all:#x}"));
        image.debugfs_write("set_inode_field sealed size 2500");
        common::run_tool("e2fsck", &["-fn", image.path()]);

        let volume = image.open();
        let attributes = volume.attributes(sealed).unwrap();
        assert_eq!(attributes.size_bytes, 2500);
        assert_ne!(attributes.flags & flags::VERITY, 0);
        assert_eq!(volume.read(sealed, 0, 1 << 20).unwrap()[..], whole[..2500]);
        assert!(volume.read(sealed, 2500, 100).unwrap().is_empty());
        assert_eq!(volume.seek(sealed, 0, Seek::Hole), Ok(Some(2500)));
        let runs = volume.map(sealed, 0).unwrap();
        assert!(runs.iter().all(|run| matches!(run.location, BlockLocation::Mapped(_))));
        assert_eq!(runs.last().unwrap().end().0, 3);
        assert_eq!(volume.read_only_reason(), None);
    }
}

#[test]
fn project_id_is_reported_from_large_inodes() {
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("file"), b"").unwrap();
    let arguments = ["-t", "ext4", "-I", "256", "-O", "project,quota,^has_journal"];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    image.debugfs_write("set_inode_field file projid 77000");
    let volume = image.open();
    let file = volume.lookup(volume.root(), b"file").unwrap();
    assert_eq!(volume.inode(file).unwrap().project(), 77_000);
    assert_eq!(volume.inode(volume.root()).unwrap().project(), 0);

    let arguments = ["-t", "ext2", "-I", "128"];
    let Some(image) = Image::make(Some(source.path()), "1M", &arguments) else { return };
    let volume = image.open();
    let file = volume.lookup(volume.root(), b"file").unwrap();
    assert_eq!(volume.inode(file).unwrap().project(), 0);
}
