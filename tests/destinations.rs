//! No command destroys its sources: a destination that leads to a source is refused.

mod common;

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Draconis, fuse, have, root, skipped};

/// Creates a volume with a file, a file named like the image, and a link to another image's name.
fn image(draconis: &Draconis) -> PathBuf {
    let image = draconis.path("a.img");
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("f"), "precious").unwrap();
    std::fs::write(tree.join("a.img"), "hostile").unwrap();
    symlink("f", tree.join("base.img")).unwrap();
    draconis.ok(["format", "-t", "ext4", "--from", text(&tree), text(&image)]);
    image
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs commands that must fail, and compares their sources before and after.
struct Watched<'a> {
    draconis: &'a Draconis,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl<'a> Watched<'a> {
    fn new(draconis: &'a Draconis, files: &[&Path]) -> Self {
        let files =
            files.iter().map(|file| ((*file).to_owned(), std::fs::read(file).unwrap())).collect();
        Self { draconis, files }
    }

    fn refuses(&self, line: &[&str], why: &str) {
        let said = self.draconis.fails(line);
        assert!(said.contains(why), "{line:?}: {said}");
        self.is_whole(line);
    }

    fn is_whole(&self, line: &[&str]) {
        for (file, before) in &self.files {
            assert!(std::fs::read(file).unwrap() == *before, "{line:?}: {}", file.display());
        }
    }
}

const SAME: &str = "name another destination";

#[test]
fn an_image_is_not_replaced_by_what_is_in_it() {
    let draconis = Draconis::new();
    let image = image(&draconis);
    let watched = Watched::new(&draconis, &[&image]);
    let (hard, soft, dir) = (draconis.path("hard"), draconis.path("soft"), draconis.make_dir("d"));
    std::fs::hard_link(&image, &hard).unwrap();
    symlink("a.img", &soft).unwrap();
    symlink("../a.img", dir.join("f")).unwrap();
    let (shown, file) = (text(&image), format!("{}:/f", image.display()));
    let place = text(draconis.dir.path());
    for dest in [shown, text(&hard), text(&soft), text(&dir)] {
        watched.refuses(&["get", &file, dest], SAME);
    }
    for dest in [shown, text(&hard), text(&soft)] {
        watched.refuses(&["tar", "--oci", dest, shown], SAME);
    }
    watched.refuses(&["get", &format!("{shown}:/a.img"), place], SAME);
    // The rest of the tree was extracted.
    let _ = std::fs::remove_file(draconis.path("f"));
    watched.refuses(&["get", "-r", &format!("{shown}:/"), place], SAME);
    assert_eq!(std::fs::read(draconis.path("f")).unwrap(), b"precious");
    // A copy in another directory is no source.
    draconis.ok(["get", "-r", &format!("{shown}:/"), text(&draconis.path("elsewhere"))]);
    assert_eq!(std::fs::read(draconis.path("elsewhere/a.img")).unwrap(), b"hostile");
}

#[test]
fn standard_output_is_no_source() {
    let draconis = Draconis::new();
    let image = image(&draconis);
    let watched = Watched::new(&draconis, &[&image]);
    for line in [
        &["cat", &format!("{}:/f", image.display())][..],
        &["tar", text(&image)],
        &["ls", text(&image)],
        &["mkdir", &format!("{}:/new", image.display())],
    ] {
        let output = File::options().append(true).open(&image).unwrap();
        let mut command = draconis.command();
        let told = command.args(line).stdout(output).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&told.stderr);
        assert!(!told.status.success() && said.contains("standard output: the same"), "{said}");
        watched.is_whole(line);
    }
}

#[test]
fn what_an_image_differs_from_is_a_source() {
    let draconis = Draconis::new();
    let image = image(&draconis);
    if !have("qemu-img") {
        return skipped("images over others: there is no qemu-img");
    }
    let (base, over) = (draconis.path("base.img"), draconis.path("over.qcow2"));
    std::fs::copy(&image, &base).unwrap();
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).args([&base, &over]);
    assert!(command.status().unwrap().success());
    let watched = Watched::new(&draconis, &[&base, &over]);
    let line = |command: &[&str], rest: &[&str]| -> Vec<String> {
        [command, &["--backing", text(&base)], rest].concat().iter().map(|&it| it.into()).collect()
    };
    let place = text(draconis.dir.path());
    let (file, tree) = (format!("{}:/f", over.display()), format!("{}:/", over.display()));
    for line in [
        line(&["get"], &[&file, text(&base)]),
        line(&["get", "-r"], &[&tree, place]),
        line(&["tar", "--oci", text(&base)], &[text(&over)]),
    ] {
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        watched.refuses(&line, SAME);
    }
    // The extent files of a split disk.
    let parts = draconis.path("v.vmdk");
    let options = ["-f", "raw", "-O", "vmdk", "-o", "subformat=twoGbMaxExtentFlat"];
    let mut command = Command::new("qemu-img");
    assert!(
        command.arg("convert").args(options).args([&image, &parts]).status().unwrap().success()
    );
    let part = draconis.path("v-f001.vmdk");
    let watched = Watched::new(&draconis, &[&part, &parts]);
    watched.refuses(&["get", &format!("{}:/f", parts.display()), text(&part)], SAME);
}

#[test]
fn stores_and_archives_are_not_overwritten_by_what_is_in_them() {
    let draconis = Draconis::new();
    let (store, object) = (draconis.path("s.store"), draconis.path("object"));
    std::fs::write(&object, "precious").unwrap();
    draconis.ok(["store", "create", "--size", "16M", text(&store)]);
    draconis.ok(["store", "put", text(&store), "new", text(&object)]);
    let link = draconis.path("link");
    symlink(&store, &link).unwrap();
    let watched = Watched::new(&draconis, &[&store]);
    for store_as in [text(&store), text(&link)] {
        watched.refuses(&["store", "get", text(&store), "1", store_as], SAME);
        watched.refuses(&["store", "put", text(&store), "1", store_as], SAME);
        watched.refuses(&["store", "append", text(&store), "1", store_as], SAME);
        watched.refuses(&["kv", "load", text(&store), store_as], SAME);
    }
    // For a bucket in a directory, all of its files are sources.
    let bucket = draconis.make_dir("bucket");
    let address = format!("file://{}", bucket.display());
    draconis.ok(["store", "create", "--size", "16M", &address]);
    draconis.ok(["store", "put", &address, "new", text(&object)]);
    let mut stack = vec![bucket.clone()];
    let mut files = vec![];
    while let Some(path) = stack.pop() {
        match path.is_dir() {
            true => stack.extend(std::fs::read_dir(path).unwrap().map(|it| it.unwrap().path())),
            false => files.push(path),
        }
    }
    let watched = Watched::new(&draconis, &files.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    assert!(!files.is_empty());
    for file in &files {
        watched.refuses(&["store", "get", &address, "1", text(file)], SAME);
    }
    // An archive that is the source of a volume, with and without --force.
    let archive = draconis.path("t.tar");
    let mut command = Command::new("tar");
    command.arg("-cf").arg(&archive).arg("-C").arg(draconis.dir.path()).arg("object");
    assert!(command.status().unwrap().success());
    let watched = Watched::new(&draconis, &[&archive]);
    let shown = text(&archive);
    watched.refuses(&["format", "--force=tar", "--from", shown, shown], SAME);
    watched.refuses(&["store", "create", "--profile", shown, "--force=tar", shown], SAME);
    let mut command = draconis.command();
    command.args(["format", "--force=tar", "--from", "-", shown]);
    let told = command.stdin(File::open(&archive).unwrap()).output().unwrap();
    assert!(!told.status.success());
    watched.is_whole(&["format --from -"]);
}

#[test]
fn devices_are_what_they_lie_on() {
    let test = "devices_are_what_they_lie_on";
    if !root(test) {
        return;
    }
    let draconis = Draconis::new();
    let (image, other) = (image(&draconis), draconis.path("other"));
    draconis.ok(["format", "--from", text(&draconis.path("tree")), text(&other)]);
    let attached = Command::new("losetup").args(["-f", "--show"]).arg(&image).output().unwrap();
    if !attached.status.success() {
        return skipped(test);
    }
    let device = String::from_utf8(attached.stdout).unwrap();
    let device = device.trim();
    let watched = Watched::new(&draconis, &[&image]);
    watched.refuses(&["tar", "--oci", device, text(&image)], SAME);
    watched.refuses(&["get", &format!("{}:/f", image.display()), device], SAME);
    watched.refuses(&["get", &format!("{device}:/f"), text(&image)], SAME);
    // A file attached to a loop device is in use, whatever would replace it.
    let into = text(draconis.dir.path());
    watched.refuses(&["get", "-r", &format!("{}:/", other.display()), into], "detach it first");
    watched.refuses(&["tar", "--oci", text(&image), text(&other)], "detach it first");
    assert!(Command::new("losetup").args(["-d", device]).status().unwrap().success());
}

#[test]
fn a_mounted_image_is_not_replaced() {
    if !fuse("a_mounted_image_is_not_replaced") {
        return;
    }
    let draconis = Draconis::new();
    let (image, other) = (image(&draconis), draconis.path("other"));
    draconis.ok(["format", "--from", text(&draconis.path("tree")), text(&other)]);
    let inode = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).unwrap().ino()
    };
    let before = inode(&image);
    let at = draconis.mount(&image, "m", "nofuseblk");
    for line in [
        &["get", &format!("{}:/f", other.display()), text(&image)][..],
        &["get", "-r", &format!("{}:/", other.display()), text(draconis.dir.path())],
        &["tar", "--oci", text(&image), text(&other)],
    ] {
        let said = draconis.fails(line);
        assert!(said.contains("is in use"), "{said}");
        assert_eq!(inode(&image), before);
    }
    assert_eq!(std::fs::read(at.join("f")).unwrap(), b"precious");
    draconis.ok(["umount", text(&at)]);
    common::volume::check(&image);
}
