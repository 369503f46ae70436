//! No command destroys its sources: a destination that leads to a source is refused.

use crate::common;

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Draconis, has_fuse, has_root, is_installed, report_skipped};

/// Creates a volume with a file, a file named like the image, and a link to another image's name.
fn make_image(draconis: &Draconis) -> PathBuf {
    let image = draconis.path("a.img");
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("f"), "precious").unwrap();
    std::fs::write(tree.join("a.img"), "hostile").unwrap();
    symlink("f", tree.join("base.img")).unwrap();
    draconis.run_ok(["format", "-t", "ext4", "--from", path_str(&tree), path_str(&image)]);
    image
}

fn path_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs commands that must fail, and compares their sources before and after.
struct WatchedSources<'a> {
    draconis: &'a Draconis,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl<'a> WatchedSources<'a> {
    fn new(draconis: &'a Draconis, files: &[&Path]) -> Self {
        let files =
            files.iter().map(|file| ((*file).to_owned(), std::fs::read(file).unwrap())).collect();
        Self { draconis, files }
    }

    fn assert_refused(&self, line: &[&str], why: &str) {
        let errors = self.draconis.run_failing(line);
        assert!(errors.contains(why), "{line:?}: {errors}");
        self.assert_sources_unchanged(line);
    }

    fn assert_sources_unchanged(&self, line: &[&str]) {
        for (file, before) in &self.files {
            assert!(std::fs::read(file).unwrap() == *before, "{line:?}: {}", file.display());
        }
    }
}

const SAME_FILE_MESSAGE: &str = "name another destination";

#[test]
fn output_cannot_replace_source_image() {
    let draconis = Draconis::new();
    let image = make_image(&draconis);
    let watched = WatchedSources::new(&draconis, &[&image]);
    let (hard, soft, dir) = (draconis.path("hard"), draconis.path("soft"), draconis.make_dir("d"));
    std::fs::hard_link(&image, &hard).unwrap();
    symlink("a.img", &soft).unwrap();
    symlink("../a.img", dir.join("f")).unwrap();
    let (shown, file) = (path_str(&image), format!("{}:/f", image.display()));
    let place = path_str(draconis.dir.path());
    for dest in [shown, path_str(&hard), path_str(&soft), path_str(&dir)] {
        watched.assert_refused(&["get", &file, dest], SAME_FILE_MESSAGE);
    }
    for dest in [shown, path_str(&hard), path_str(&soft)] {
        watched.assert_refused(&["tar", "--oci", dest, shown], SAME_FILE_MESSAGE);
    }
    watched.assert_refused(&["get", &format!("{shown}:/a.img"), place], SAME_FILE_MESSAGE);
    // The rest of the tree was extracted.
    let _ = std::fs::remove_file(draconis.path("f"));
    watched.assert_refused(&["get", "-r", &format!("{shown}:/"), place], SAME_FILE_MESSAGE);
    assert_eq!(std::fs::read(draconis.path("f")).unwrap(), b"precious");
    // A copy in another directory is no source.
    draconis.run_ok(["get", "-r", &format!("{shown}:/"), path_str(&draconis.path("elsewhere"))]);
    assert_eq!(std::fs::read(draconis.path("elsewhere/a.img")).unwrap(), b"hostile");
}

#[test]
fn stdout_redirected_to_source_is_refused() {
    let draconis = Draconis::new();
    let image = make_image(&draconis);
    let watched = WatchedSources::new(&draconis, &[&image]);
    for line in [
        &["cat", &format!("{}:/f", image.display())][..],
        &["tar", path_str(&image)],
        &["ls", path_str(&image)],
        &["mkdir", &format!("{}:/new", image.display())],
    ] {
        let output = File::options().append(true).open(&image).unwrap();
        let mut command = draconis.command();
        let told = command.args(line).stdout(output).stderr(Stdio::piped()).output().unwrap();
        let errors = String::from_utf8_lossy(&told.stderr);
        assert!(!told.status.success() && errors.contains("standard output: the same"), "{errors}");
        watched.assert_sources_unchanged(line);
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn backing_file_is_a_protected_source() {
    let draconis = Draconis::new();
    let image = make_image(&draconis);
    if !is_installed("qemu-img") {
        return report_skipped("images over others: there is no qemu-img");
    }
    let (base, over) = (draconis.path("base.img"), draconis.path("over.qcow2"));
    std::fs::copy(&image, &base).unwrap();
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).args([&base, &over]);
    assert!(command.status().unwrap().success());
    let watched = WatchedSources::new(&draconis, &[&base, &over]);
    let line = |command: &[&str], rest: &[&str]| -> Vec<String> {
        [command, &["--backing", path_str(&base)], rest]
            .concat()
            .iter()
            .map(|&it| it.into())
            .collect()
    };
    let place = path_str(draconis.dir.path());
    let (file, tree) = (format!("{}:/f", over.display()), format!("{}:/", over.display()));
    for line in [
        line(&["get"], &[&file, path_str(&base)]),
        line(&["get", "-r"], &[&tree, place]),
        line(&["tar", "--oci", path_str(&base)], &[path_str(&over)]),
    ] {
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        watched.assert_refused(&line, SAME_FILE_MESSAGE);
    }
    // The extent files of a split disk.
    let parts = draconis.path("v.vmdk");
    let options = ["-f", "raw", "-O", "vmdk", "-o", "subformat=twoGbMaxExtentFlat"];
    let mut command = Command::new("qemu-img");
    assert!(
        command.arg("convert").args(options).args([&image, &parts]).status().unwrap().success()
    );
    let part = draconis.path("v-f001.vmdk");
    let watched = WatchedSources::new(&draconis, &[&part, &parts]);
    watched.assert_refused(
        &["get", &format!("{}:/f", parts.display()), path_str(&part)],
        SAME_FILE_MESSAGE,
    );
}

#[test]
fn output_cannot_replace_source_store_or_archive() {
    let draconis = Draconis::new();
    let (store, object) = (draconis.path("s.store"), draconis.path("object"));
    std::fs::write(&object, "precious").unwrap();
    draconis.run_ok(["store", "create", "--size", "16M", "--layout", "cow", path_str(&store)]);
    draconis.run_ok(["store", "put", path_str(&store), "new", path_str(&object)]);
    let link = draconis.path("link");
    symlink(&store, &link).unwrap();
    let watched = WatchedSources::new(&draconis, &[&store]);
    for store_as in [path_str(&store), path_str(&link)] {
        watched
            .assert_refused(&["store", "get", path_str(&store), "1", store_as], SAME_FILE_MESSAGE);
        watched
            .assert_refused(&["store", "put", path_str(&store), "1", store_as], SAME_FILE_MESSAGE);
        watched.assert_refused(
            &["store", "append", path_str(&store), "1", store_as],
            SAME_FILE_MESSAGE,
        );
        watched.assert_refused(&["kv", "load", path_str(&store), store_as], SAME_FILE_MESSAGE);
    }
    // For a bucket in a directory, all of its files are sources.
    let bucket = draconis.make_dir("bucket");
    let address = format!("file://{}", bucket.display());
    draconis.run_ok(["store", "create", "--size", "16M", &address]);
    draconis.run_ok(["store", "put", &address, "new", path_str(&object)]);
    let mut stack = vec![bucket.clone()];
    let mut files = vec![];
    while let Some(path) = stack.pop() {
        match path.is_dir() {
            true => stack.extend(std::fs::read_dir(path).unwrap().map(|it| it.unwrap().path())),
            false => files.push(path),
        }
    }
    let watched =
        WatchedSources::new(&draconis, &files.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    assert!(!files.is_empty());
    for file in &files {
        watched.assert_refused(&["store", "get", &address, "1", path_str(file)], SAME_FILE_MESSAGE);
    }
    // An archive that is the source of a volume, with and without --force.
    let archive = draconis.path("t.tar");
    let mut command = Command::new("tar");
    command.arg("-cf").arg(&archive).arg("-C").arg(draconis.dir.path()).arg("object");
    assert!(command.status().unwrap().success());
    let watched = WatchedSources::new(&draconis, &[&archive]);
    let shown = path_str(&archive);
    watched.assert_refused(&["format", "--force=tar", "--from", shown, shown], SAME_FILE_MESSAGE);
    watched.assert_refused(
        &["store", "create", "--profile", shown, "--force=tar", shown],
        SAME_FILE_MESSAGE,
    );
    let mut command = draconis.command();
    command.args(["format", "--force=tar", "--from", "-", shown]);
    let told = command.stdin(File::open(&archive).unwrap()).output().unwrap();
    assert!(!told.status.success());
    watched.assert_sources_unchanged(&["format --from -"]);
}

#[test]
fn devices_are_what_they_lie_on() {
    let test = "devices_are_what_they_lie_on";
    if !has_root(test) {
        return;
    }
    let draconis = Draconis::new();
    let (image, other) = (make_image(&draconis), draconis.path("other"));
    draconis.run_ok(["format", "--from", path_str(&draconis.path("tree")), path_str(&other)]);
    let attached = Command::new("losetup").args(["-f", "--show"]).arg(&image).output().unwrap();
    if !attached.status.success() {
        return report_skipped(test);
    }
    let device = String::from_utf8(attached.stdout).unwrap();
    let device = device.trim();
    let watched = WatchedSources::new(&draconis, &[&image]);
    watched.assert_refused(&["tar", "--oci", device, path_str(&image)], SAME_FILE_MESSAGE);
    watched.assert_refused(&["get", &format!("{}:/f", image.display()), device], SAME_FILE_MESSAGE);
    watched.assert_refused(&["get", &format!("{device}:/f"), path_str(&image)], SAME_FILE_MESSAGE);
    // A file attached to a loop device is in use, whatever would replace it.
    let into = path_str(draconis.dir.path());
    watched
        .assert_refused(&["get", "-r", &format!("{}:/", other.display()), into], "detach it first");
    watched
        .assert_refused(&["tar", "--oci", path_str(&image), path_str(&other)], "detach it first");
    assert!(Command::new("losetup").args(["-d", device]).status().unwrap().success());
}

#[test]
fn a_mounted_image_is_not_replaced() {
    if !has_fuse("a_mounted_image_is_not_replaced") {
        return;
    }
    let draconis = Draconis::new();
    let (image, other) = (make_image(&draconis), draconis.path("other"));
    draconis.run_ok(["format", "--from", path_str(&draconis.path("tree")), path_str(&other)]);
    let inode = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).unwrap().ino()
    };
    let before = inode(&image);
    let at = draconis.mount(&image, "m", "nofuseblk");
    for line in [
        &["get", &format!("{}:/f", other.display()), path_str(&image)][..],
        &["get", "-r", &format!("{}:/", other.display()), path_str(draconis.dir.path())],
        &["tar", "--oci", path_str(&image), path_str(&other)],
    ] {
        let errors = draconis.run_failing(line);
        assert!(errors.contains("is in use"), "{errors}");
        assert_eq!(inode(&image), before);
    }
    assert_eq!(std::fs::read(at.join("f")).unwrap(), b"precious");
    draconis.run_ok(["umount", path_str(&at)]);
    common::volume::run_e2fsck(&image);
}
