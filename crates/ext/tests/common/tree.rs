//! A small tree with one file of each kind.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use draconis_device::Random;
use rustix::fs::{CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use super::report_skipped;

/// Returns pseudo-random bytes, unique for each position.
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes: Vec<u8> =
        (0..len / 8 + 1).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

pub fn build_tree(root: &Path) {
    for len in [0, 1, 59, 60, 1023, 1024, 1025, 4096, 12_288, 12_289, 65_536, 131_072, 131_073] {
        fs::write(root.join(format!("f{len}")), random_bytes(len as u64, len)).unwrap();
    }
    fs::write(root.join("large"), random_bytes(7, 1_500_000)).unwrap();
    write_sparse_file(&root.join("sparse"));
    fs::write(root.join("mode"), b"x").unwrap();
    fs::set_permissions(root.join("mode"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(root.join("mode"), root.join("mode-again")).unwrap();
    create_links(root);
    create_names(&root.join("names"));
    create_special_files(root);
    set_xattrs(root);
    fs::create_dir_all(root.join("a/b/c/d/e/f")).unwrap();
    fs::write(root.join("a/b/c/d/e/f/g"), b"deep").unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    fs::create_dir(root.join("many")).unwrap();
    for nth in 0..400 {
        fs::write(root.join(format!("many/file number {nth}")), nth.to_string()).unwrap();
    }
    set_times(&root.join("f60"), -5, 0);
    set_times(&root.join("f1024"), (1 << 32) + 77, 123_456_789);
}

/// Writes data at the start and at each level of the map, with a hole at the end.
fn write_sparse_file(path: &Path) {
    let file = File::create(path).unwrap();
    for at in [0u64, 11 * 1024, 12 * 1024, 100 * 1024, 700 * 1024, 70_000 * 1024, 150_000 * 1024] {
        file.write_all_at(&random_bytes(at, 5000), at).unwrap();
    }
    file.set_len(200_000 * 1024 + 17).unwrap();
}

fn create_links(root: &Path) {
    for len in [1, 58, 59, 60, 61, 200, 1000] {
        symlink("t".repeat(len), root.join(format!("link{len}"))).unwrap();
    }
    symlink("a/b/../b/c", root.join("into")).unwrap();
    symlink("/into/d", root.join("absolute")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
}

fn create_names(dir: &Path) {
    fs::create_dir(dir).unwrap();
    for name in [&[b'n'; 255][..], b"\x01\xFF\xFE odd\n", "größe".as_bytes(), b"-", b"..."] {
        fs::write(dir.join(OsStr::from_bytes(name)), name).unwrap();
    }
}

fn create_special_files(root: &Path) {
    let make = |name: &str, kind, major, minor| {
        let device = rustix::fs::makedev(major, minor);
        if let Err(error) =
            rustix::fs::mknodat(CWD, root.join(name), kind, Mode::from_raw_mode(0o640), device)
        {
            report_skipped(format_args!("{name}: {error}"));
        }
    };
    make("fifo", FileType::Fifo, 0, 0);
    make("socket", FileType::Socket, 0, 0);
    make("character", FileType::CharacterDevice, 5, 1);
    make("block", FileType::BlockDevice, 259, 70_000);
}

fn set_xattrs(root: &Path) {
    let set = |file: &str, name: &str, value: &[u8]| {
        let path = root.join(file);
        fs::write(&path, file).unwrap();
        if let Err(error) = rustix::fs::setxattr(&path, name, value, XattrFlags::empty()) {
            report_skipped(format_args!("{name}: {error}"));
        }
    };
    set("small-attribute", "user.small", b"v");
    set("empty-attribute", "user.empty", b"");
    set("large-attribute", "user.large", &random_bytes(3, 700));
    set("trusted-attribute", "trusted.t", b"root only");
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in [(1u16, 6u16, !0u32), (2, 4, 1000), (4, 4, !0), (16, 6, !0), (32, 0, !0)]
    {
        list.extend(tag.to_le_bytes());
        list.extend(perm.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    set("list", "system.posix_acl_access", &list);
    let path = root.join("many-attributes");
    fs::write(&path, b"x").unwrap();
    for nth in 0..8 {
        let name = format!("user.attribute number {nth}");
        let value = random_bytes(nth, 10 * nth as usize);
        let _ = rustix::fs::setxattr(&path, name.as_str(), &value, XattrFlags::empty());
    }
}

fn set_times(path: &Path, seconds: i64, nanoseconds: i64) {
    let at = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: at, last_modification: at };
    rustix::fs::utimensat(CWD, path, &times, rustix::fs::AtFlags::empty()).unwrap();
}
