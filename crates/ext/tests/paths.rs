//! Files by path: every call of [`FileSystem`], valid names, errors with paths, and a check by
//! e2fsck.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use draconis_ext::{FileSystem, FileType, MemoryDisk, mkfs};
use draconis_testkit::judge::assert_fsck_clean;

fn list_names(fs: &FileSystem, path: &str) -> Vec<String> {
    let entries = fs.read_dir(path).unwrap();
    entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn create_filesystem(dir: &tempfile::TempDir) -> (std::path::PathBuf, FileSystem) {
    let image = dir.path().join("disk.img");
    let fs = FileSystem::create(&image, 16 << 20).unwrap();
    (image, fs)
}

#[test]
fn changes_by_path_are_there_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let (image, fs) = create_filesystem(&dir);
    fs.create_dir_all("/a/b/c").unwrap();
    fs.create_dir_all("/a/b").unwrap();
    fs.create_dir("plain").unwrap();
    fs.write("/a/b/long", vec![7; 3 << 20]).unwrap();
    fs.write("/a/text", "one").unwrap();
    fs.write("/a/text", "two").unwrap();
    fs.symlink("text", "/a/link").unwrap();
    fs.symlink("../nowhere/x", "/a/dangling").unwrap();
    fs.hard_link("/a/text", "/plain/same").unwrap();
    fs.rename("/a/b/c", "/moved").unwrap();
    fs.write("/gone", "").unwrap();
    fs.remove_file("/gone").unwrap();
    fs.create_dir("/gone").unwrap();
    fs.remove_dir("/gone").unwrap();
    fs.sync().unwrap();
    fs.close().unwrap();
    assert_fsck_clean(&image);

    let fs = FileSystem::open_read_only(&image).unwrap();
    assert_eq!(list_names(&fs, "/"), ["a", "lost+found", "moved", "plain"]);
    assert_eq!(list_names(&fs, "/a"), ["b", "dangling", "link", "text"]);
    assert_eq!(fs.read("/a/b/long").unwrap(), vec![7; 3 << 20]);
    assert_eq!(fs.read_to_string("/a/link").unwrap(), "two");
    assert_eq!(fs.read_link("/a/link").unwrap(), Path::new("text"));
    assert_eq!(fs.metadata("/plain/same").unwrap().links, 2);
    assert_eq!(fs.metadata("/a/link").unwrap().kind, FileType::File);
    assert_eq!(fs.symlink_metadata("/a/link").unwrap().kind, FileType::Symlink);
    let listed = fs.read_dir("/a").unwrap();
    assert_eq!(
        (listed[2].path(), listed[2].file_type()),
        (Path::new("/a/link"), FileType::Symlink)
    );
    let modified = fs.metadata("/a/text").unwrap().modified.seconds;
    assert!(modified > 1_700_000_000, "no clock: {modified}");
    assert_eq!(fs.write("/a/text", "3").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    fs.close().unwrap();
}

#[test]
fn errors_name_path_and_have_os_error_kind() {
    let dir = tempfile::tempdir().unwrap();
    let (image, fs) = create_filesystem(&dir);
    fs.create_dir("/d").unwrap();
    fs.write("/d/f", "f").unwrap();
    fs.symlink("/loop", "/loop").unwrap();
    let long = format!("/{}", "n".repeat(256));
    let cases: [(&str, std::io::Result<()>, ErrorKind); 19] = [
        ("/none", fs.read("/none").map(drop), ErrorKind::NotFound),
        ("/none/x", fs.write("/none/x", ""), ErrorKind::NotFound),
        ("", fs.read("").map(drop), ErrorKind::NotFound),
        ("", fs.create_dir(""), ErrorKind::NotFound),
        ("/d", fs.read("/d").map(drop), ErrorKind::IsADirectory),
        ("/d", fs.write("/d", ""), ErrorKind::IsADirectory),
        ("/new/", fs.write("/new/", ""), ErrorKind::IsADirectory),
        ("/d/f", fs.read_dir("/d/f").map(drop), ErrorKind::NotADirectory),
        ("/d/f/", fs.read("/d/f/").map(drop), ErrorKind::NotADirectory),
        ("/d/f/x", fs.create_dir_all("/d/f/x"), ErrorKind::NotADirectory),
        ("/d", fs.create_dir("/d"), ErrorKind::AlreadyExists),
        ("/", fs.create_dir("/"), ErrorKind::AlreadyExists),
        ("/d/.", fs.create_dir("/d/."), ErrorKind::AlreadyExists),
        ("/d", fs.remove_dir("/d"), ErrorKind::DirectoryNotEmpty),
        ("/d", fs.remove_file("/d"), ErrorKind::IsADirectory),
        ("/d/f", fs.remove_dir("/d/f"), ErrorKind::NotADirectory),
        ("/x", fs.rename("/x", "/y"), ErrorKind::NotFound),
        ("/d/f", fs.read_link("/d/f").map(drop), ErrorKind::InvalidInput),
        (&long, fs.write(&long, ""), ErrorKind::InvalidFilename),
    ];
    for (path, answer, kind) in cases {
        let error = answer.expect_err(path);
        assert_eq!(error.kind(), kind, "{path}: {error}");
        assert!(error.to_string().starts_with(&format!("{path}: ")), "{path}: {error}");
    }
    let error = fs.write("/loop", "").unwrap_err().to_string();
    assert_eq!(error, "/loop: too many levels of symbolic links");
    assert!(FileSystem::open(&image).unwrap_err().to_string().contains("disk.img: in use"));
    fs.close().unwrap();
    assert_fsck_clean(&image);
    let there = FileSystem::create(&image, 16 << 20).unwrap_err();
    assert_eq!(there.kind(), ErrorKind::AlreadyExists);
    let small = dir.path().join("small.img");
    let error = FileSystem::create(&small, 4096).unwrap_err().to_string();
    assert!(error.contains("small.img: too small"), "{error}");
    assert!(!small.exists());
    std::fs::write(&small, vec![0; 1 << 20]).unwrap();
    let error = FileSystem::open(&small).unwrap_err().to_string();
    assert!(error.contains("small.img: not an ext volume"), "{error}");
}

#[test]
fn valid_names_are_those_of_kernel() {
    let dir = tempfile::tempdir().unwrap();
    let (image, fs) = create_filesystem(&dir);
    fs.create_dir("/d").unwrap();
    let longest = "n".repeat(255);
    for name in [&*longest, " ", "...", "..a", "a\\b", "-", "\u{1}", "line\nbreak", "*?[", "x:y"] {
        fs.write(format!("/d//./{name}"), name).unwrap();
        assert_eq!(fs.read_to_string(format!("d/../d/{name}")).unwrap(), name);
    }
    assert_eq!(list_names(&fs, "/d").len(), 10);
    assert_eq!(fs.write("/d/nul\0", "").unwrap_err().kind(), ErrorKind::InvalidInput);
    fs.create_dir_all("/d/new/../other/deep/").unwrap();
    assert!(fs.metadata("/d/other/deep").is_ok());
    fs.close().unwrap();
    assert_fsck_clean(&image);
}

#[test]
fn write_through_dangling_symlink_creates_target() {
    let dir = tempfile::tempdir().unwrap();
    let (image, fs) = create_filesystem(&dir);
    fs.create_dir("/d").unwrap();
    fs.symlink("d/second", "/first").unwrap();
    fs.symlink("../third", "/d/second").unwrap();
    fs.write("/first", "through two links").unwrap();
    assert_eq!(fs.read_to_string("/third").unwrap(), "through two links");
    fs.symlink("/none/x", "/into").unwrap();
    assert_eq!(fs.write("/into", "").unwrap_err().kind(), ErrorKind::NotFound);
    fs.close().unwrap();
    assert_fsck_clean(&image);
}

#[test]
fn full_volume_reports_storage_full_and_stays_clean() {
    let dir = tempfile::tempdir().unwrap();
    let (image, fs) = create_filesystem(&dir);
    let error = fs.write("/large", vec![1; 32 << 20]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    fs.close().unwrap();
    assert_fsck_clean(&image);
}

#[test]
fn filesystem_is_created_on_memory_disk() {
    let disk = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
    let options = mkfs::FormatOptions::for_type("ext2").unwrap();
    let fs = FileSystem::create_on(disk.clone(), &options, true).unwrap();
    fs.write("/f", "in memory").unwrap();
    fs.close().unwrap();
    assert_eq!(FileSystem::open_on(disk.clone()).unwrap().read("/f").unwrap(), b"in memory");
    let options = mkfs::FormatOptions { label: b"cut\0off".to_vec(), ..options };
    let error = FileSystem::create_on(disk.clone(), &options, true).unwrap_err().to_string();
    assert!(error.contains("a label has at most 16 bytes, none of them NUL"), "{error}");
    assert!(FileSystem::open_on(disk).is_ok(), "the volume that was there is gone");
}
