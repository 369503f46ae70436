//! Real trees, large directories and damage, accessed in every way.
//!
//! `DRACONIS_TEST_TREE=/usr make long` takes a larger tree, in every block size.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{
    Draconis, IgnoredProperties, KernelMount, assert_same_trees, has_fuse, is_root, mke2fs,
    scan_tree,
};
use draconis_testkit::judge;

/// Properties that a copy cannot preserve.
const IGNORE_UNCOPIED_PROPERTIES: IgnoredProperties =
    IgnoredProperties { what_a_copy_loses: true, fractions: false };

/// Returns the tree, the types and block sizes of its volumes, and their length.
fn choose_real_tree() -> (PathBuf, Vec<(&'static str, &'static str)>, String) {
    let asked = std::env::var_os("DRACONIS_TEST_TREE").map(PathBuf::from);
    let kinds = match asked {
        Some(_) => [("ext2", "1024"), ("ext2", "2048"), ("ext2", "4096")]
            .into_iter()
            .chain([("ext4", "1024"), ("ext4", "2048"), ("ext4", "4096")])
            .collect(),
        None => vec![("ext2", "1024"), ("ext4", "4096")],
    };
    let tree = asked.unwrap_or_else(|| "/usr/include".into());
    let output = Command::new("du").args(["-sm", "--apparent-size"]).arg(&tree).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let mib: u64 = text.split_whitespace().next().unwrap().parse().unwrap();
    (tree, kinds, format!("{}M", mib * 2 + 512))
}

#[test]
#[ignore = "long: minutes: all of /usr/include in four ways"]
fn real_tree_is_same_through_kernel_mount_get_and_tar() {
    let (tree, kinds, size) = choose_real_tree();
    for (kind, block) in kinds {
        let draconis = Draconis::new();
        let image = draconis.path("real.img");
        // Enough inodes for any tree: one for each 8 KiB.
        mke2fs(&image, Some(&tree), &["-t", kind, "-b", block, "-i", "8192"], &size);
        let at = draconis.path("kernel");
        let Some(kernel) = KernelMount::mount(&image, at, "comparing a real tree") else { return };
        let exact = scan_tree(&kernel.at, IgnoredProperties::default());
        let copied = scan_tree(&kernel.at, IGNORE_UNCOPIED_PROPERTIES);
        eprintln!("{kind}, {} names in blocks of {block} bytes", exact.len());
        compare_through_mount(&draconis, &image, &exact);
        let copy = draconis.path("copy");
        let target = format!("{}:/", image.display());
        draconis.run_ok(["get", "-r", &target, copy.to_str().unwrap()]);
        assert_same_trees(&scan_tree(&copy, IGNORE_UNCOPIED_PROPERTIES), &copied);
        std::fs::remove_dir_all(&copy).unwrap();
        let copy = copy_through_tar(&draconis, &image);
        assert_same_trees(&scan_tree(&copy, IGNORE_UNCOPIED_PROPERTIES), &copied);
    }
}

/// Compares through mounts with the default caches, and with tiny ones.
fn compare_through_mount(
    draconis: &Draconis,
    image: &Path,
    kernel: &std::collections::BTreeMap<PathBuf, common::FileProperties>,
) {
    if !has_fuse("a real tree through a mount") {
        return;
    }
    for options in ["ro", "ro,inode_cache=64,block_map_cache=16,data_cache=1M"] {
        let ours = draconis.mount(image, "ours", options);
        assert_same_trees(&scan_tree(&ours, IgnoredProperties::default()), kernel);
        let mount = &draconis.status()["mounts"][0];
        let caches = mount["worker"]["caches"].as_array().unwrap();
        let data = caches.iter().find(|cache| cache["name"] == "data").unwrap();
        let capacity = data["capacity"].as_u64().unwrap();
        // Without the program's own pages, which are shared.
        let status = format!("/proc/{}/status", mount["worker_pid"]);
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let own: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        // The other two caches are small in comparison: 16 MiB with the default options.
        let most_kib = (capacity >> 10) + (64 << 10) + (16 << 10);
        assert!(own <= most_kib, "{own} KiB of its own with {options}, and {most_kib} is the most");
        draconis.run_ok(["umount", ours.to_str().unwrap()]);
    }
}

fn copy_through_tar(draconis: &Draconis, image: &Path) -> PathBuf {
    let copy = draconis.make_dir("copy");
    let mut archive = draconis.command();
    let archive = archive.args(["tar", image.to_str().unwrap()]).stdout(Stdio::piped());
    let mut archive = archive.spawn().unwrap();
    let mut tar = Command::new("tar");
    tar.args(["-x", "--xattrs", "--xattrs-include=*", "--same-owner", "-p", "-C"]);
    let output = tar.arg(&copy).stdin(archive.stdout.take().unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(archive.wait().unwrap().success());
    copy
}

#[test]
#[ignore = "long: a minute: 60,000 names"]
fn sixty_thousand_names_in_one_directory() {
    if !has_fuse("a large directory") {
        return;
    }
    let draconis = Draconis::new();
    let many = draconis.make_dir("tree/many");
    // mke2fs takes minutes where the kernel takes seconds, and creates no htree.
    let count = if is_root() { 60_000 } else { 5_000 };
    for i in 0..count {
        std::fs::write(many.join(format!("name number {i}")), "").unwrap();
    }
    let image = draconis.path("many.img");
    let how = ["-t", "ext2", "-N", "70000"];
    if is_root() {
        mke2fs(&image, None, &how, "64M");
        KernelMount::copy_tree_into(&image, draconis.make_dir("fill"), &draconis.path("tree"));
    } else {
        mke2fs(&image, Some(&draconis.path("tree")), &how, "64M");
        assert!(matches!(judge::e2fsck("-fyD", &image).status, Some(0 | 1)));
    }
    let kernel = KernelMount::mount(&image, draconis.path("kernel"), "a large directory");
    let ours = draconis.mount(&image, "ours", "ro");
    let seen = scan_tree(&ours, IgnoredProperties::default());
    assert!(seen.len() > count);
    if let Some(kernel) = kernel {
        assert_same_trees(&seen, &scan_tree(&kernel.at, IgnoredProperties::default()));
    }
    draconis.run_ok(["umount", ours.to_str().unwrap()]);
    // Looked up cold, without a listing before.
    let ours = draconis.mount(&image, "ours", "ro");
    for i in [0, count - 1, count / 3] {
        assert!(ours.join(format!("many/name number {i}")).exists());
    }
    assert!(!ours.join(format!("many/name number {count}")).exists());
}

#[test]
fn damage_affects_only_its_file() {
    if !has_fuse("damage through a mount") {
        return;
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    for name in ["good", "bad inode", "bad map", "other"] {
        std::fs::write(tree.join(name), vec![b'x'; 300_000]).unwrap();
    }
    let image = draconis.path("damaged.img");
    mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", "1024"], "4M");
    for request in [
        "set_inode_field \"bad inode\" mode 0170644",
        "set_inode_field \"bad map\" block[IND] 999999",
    ] {
        judge::debugfs_write(&image, request);
    }
    let at = draconis.mount(&image, "at", "ro");
    for name in ["good", "other"] {
        assert_eq!(std::fs::read(at.join(name)).unwrap(), vec![b'x'; 300_000]);
    }
    // EUCLEAN, as the kernel returns it.
    let describe = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
    assert_eq!(describe(std::fs::metadata(at.join("bad inode")).map(drop)), Some(117));
    assert_eq!(describe(std::fs::read(at.join("bad map")).map(drop)), Some(117));
    // The part before the damage is readable, and the worker survives.
    let start = std::fs::File::open(at.join("bad map")).unwrap();
    let mut bytes = [0; 12 * 1024];
    std::os::unix::fs::FileExt::read_exact_at(&start, &mut bytes, 0).unwrap();
    assert_eq!(bytes, [b'x'; 12 * 1024]);
    assert_eq!(draconis.status()["mounts"][0]["state"], "serving");
}
