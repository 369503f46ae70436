//! `draconis undelete`: listing, JSON, copies on the host, refusals.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Draconis, mke2fs};
use draconis_testkit::judge::debugfs_write;

/// Makes an ext2 volume of which debugfs deleted everything but a file. It leaves the maps.
fn make_image(draconis: &Draconis) -> (PathBuf, BTreeMap<String, Vec<u8>>) {
    let tree = draconis.make_dir("tree");
    std::fs::create_dir_all(tree.join("docs/old")).unwrap();
    let mut files = BTreeMap::new();
    for (nth, name) in ["docs/a.txt", "docs/b.txt", "docs/old/c.txt", "kept"].iter().enumerate() {
        let bytes: Vec<u8> = (0..20_000 * (nth + 1)).map(|at| (at / 7 + nth) as u8 | 1).collect();
        std::fs::write(tree.join(name), &bytes).unwrap();
        files.insert((*name).to_owned(), bytes);
    }
    std::fs::set_permissions(tree.join("docs/a.txt"), PermissionsExt::from_mode(0o640)).unwrap();
    let image = draconis.path("deleted.img");
    mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", "1024"], "8M");
    draconis_testkit::wait::pause(
        "the clock shows another second",
        std::time::Duration::from_millis(1100),
    );
    for path in ["docs/a.txt", "docs/b.txt", "docs/old/c.txt"] {
        debugfs_write(&image, &format!("rm {path}"));
    }
    debugfs_write(&image, "rmdir docs/old");
    (image, files)
}

#[test]
fn deleted_files_are_listed_and_copied() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    let before = std::fs::read(&image).unwrap();
    let image = image.to_str().unwrap();
    let printed = draconis.run_ok(["undelete", image]);
    assert_eq!(printed.lines().filter(|line| line.starts_with("whole ")).count(), 4, "{printed}");
    assert!(printed.contains(" /docs/a.txt\n") && printed.contains(" /docs/old/\n"), "{printed}");

    let out = draconis.make_dir("out");
    let printed = draconis.run_ok(["undelete", image, "/docs/**", out.to_str().unwrap()]);
    assert_eq!(printed, "3 files: 3 whole\n");
    for (name, bytes) in files.iter().filter(|(name, _)| *name != "kept") {
        assert!(std::fs::read(out.join(name)).unwrap() == *bytes, "{name}");
    }
    let mode = std::fs::metadata(out.join("docs/a.txt")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);
    let theirs = std::fs::metadata(draconis.path("tree/docs/a.txt")).unwrap().modified().unwrap();
    let ours = std::fs::metadata(out.join("docs/a.txt")).unwrap().modified().unwrap();
    let apart = theirs.duration_since(ours).unwrap_or_else(|error| error.duration());
    assert!(apart.as_secs() <= 1, "{apart:?}");
    assert!(std::fs::read(image).unwrap() == before, "the image changed");
}

#[test]
fn single_files_are_chosen_by_name_and_inode() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    let image = image.to_str().unwrap();
    let listed: serde_json::Value =
        serde_json::from_str(&draconis.run_ok(["undelete", "--json", "--path", "/docs", image]))
            .unwrap();
    let all = listed["files"].as_array().unwrap();
    assert_eq!((all.len(), &listed["more_files"]), (4, &false.into()));
    let b = all.iter().find(|file| file["path"] == "/docs/b.txt").unwrap();
    assert_eq!((&b["state"], &b["size"]), (&"whole".into(), &40_000.into()));
    let inode = b["inode"].as_u64().unwrap();
    for (nth, pattern) in
        ["b.*".to_owned(), format!("inode:{inode}"), format!("<{inode}>")].iter().enumerate()
    {
        let to = draconis.path(&format!("b-{nth}"));
        draconis.run_ok(["undelete", image, pattern, to.to_str().unwrap()]);
        assert!(std::fs::read(to).unwrap() == files["docs/b.txt"], "{pattern}");
    }
    // The dead inode has the time; the future has none.
    let printed = draconis.run_ok(["undelete", "--since", "@99999999999", image]);
    assert_eq!(printed, "");
    let printed = draconis.run_ok(["undelete", "--since", "@1000000000", image]);
    assert_eq!(printed.lines().count(), 4);
}

#[test]
fn each_hard_link_finds_its_file() {
    let draconis = Draconis::new();
    let (text, image) = (draconis.path("text"), draconis.path("links.img"));
    std::fs::write(&text, "text").unwrap();
    mke2fs(&image, None, &["-t", "ext4", "-b", "1024"], "16M");
    let image = image.to_str().unwrap();
    let inside = |path: &str| format!("{image}:{path}");
    // Each command is a session of its own: the journal has what the ones before wrote.
    draconis.run_ok(["mkdir", &inside("/d")]);
    draconis.run_ok(["put", text.to_str().unwrap(), &inside("/d/one")]);
    draconis.run_ok(["ln", &inside("/d/one"), &inside("/d/two")]);
    draconis.run_ok(["rm", "-r", &inside("/d")]);
    for name in ["one", "two"] {
        let out = draconis.make_dir(name);
        draconis.run_ok(["undelete", image, name, out.to_str().unwrap()]);
        assert_eq!(std::fs::read(out.join("d").join(name)).unwrap(), b"text", "{name}");
        assert_eq!(std::fs::read_dir(out.join("d")).unwrap().count(), 1, "{name}");
    }
    let out = draconis.make_dir("all");
    let printed = draconis.run_ok(["undelete", image, "/d", out.to_str().unwrap()]);
    assert_eq!(printed, "1 file: 1 whole\n");
    let inode_of = |name: &str| std::fs::metadata(out.join("d").join(name)).unwrap().ino();
    assert_eq!(inode_of("one"), inode_of("two"));
}

#[test]
fn nothing_on_the_host_is_replaced() {
    let draconis = Draconis::new();
    let (image, _) = make_image(&draconis);
    let text = image.to_str().unwrap();
    let out = draconis.make_dir("out/docs");
    std::fs::write(out.join("a.txt"), "mine").unwrap();
    let top = draconis.path("out");
    let errors = draconis.run_failing(["undelete", text, "*.txt", top.to_str().unwrap()]);
    assert!(errors.contains("out/docs/a.txt: exists already; it was not replaced"), "{errors}");
    assert_eq!(std::fs::read(out.join("a.txt")).unwrap(), b"mine");
    assert!(out.join("b.txt").exists());
    let errors = draconis.run_failing(["undelete", text, "inode:13", text]);
    assert!(
        errors.contains("the same file as the source") || errors.contains("source itself"),
        "{errors}"
    );
    let errors = draconis.run_failing(["undelete", text, "nothing", top.to_str().unwrap()]);
    assert!(errors.contains("no deleted file matches"), "{errors}");
    let errors =
        draconis.run_failing(["undelete", text, "*.txt", out.join("a.txt").to_str().unwrap()]);
    assert!(errors.contains("DEST must be a directory"), "{errors}");
}

/// As `rescue` does, `undelete` makes the directory; one file gets the name, unless it ends in `/`.
#[test]
fn missing_directory_is_made() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    let top = draconis.dir.path().to_str().unwrap();
    let copy = |pattern: &str, dest: &str| {
        draconis.run_ok(["undelete", image.to_str().unwrap(), pattern, &format!("{top}/{dest}")]);
    };
    copy("*.txt", "many");
    copy("/docs/a.txt", "file");
    copy("/docs/a.txt", "one/");
    for (name, of) in [
        ("many/docs/old/c.txt", "docs/old/c.txt"),
        ("many/docs/a.txt", "docs/a.txt"),
        ("file", "docs/a.txt"),
        ("one/docs/a.txt", "docs/a.txt"),
    ] {
        assert!(std::fs::read(draconis.path(name)).unwrap() == files[of], "{name}");
    }
}

#[test]
fn unsure_and_overwritten_files_are_named() {
    let draconis = Draconis::new();
    let (image, _) = make_image(&draconis);
    let big = draconis.path("big");
    // A new file gets blocks of the deleted ones, then nothing proves what the others hold.
    std::fs::write(&big, vec![9; 30_000]).unwrap();
    debugfs_write(&image, &format!("write {} big", big.display()));
    let text = image.to_str().unwrap();
    let out = draconis.make_dir("out");
    let output = draconis.run(["undelete", text, "*.txt", out.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("contents unsure") || errors.contains("overwritten"), "{errors}");
    let listed = draconis.run_ok(["undelete", text]);
    assert!(
        !listed.lines().any(|line| line.starts_with("whole") && line.ends_with(".txt")),
        "{listed}"
    );
}

/// Makes part of a deleted file another file's.
fn overwrite_in_part(draconis: &Draconis, image: &Path) {
    let big = draconis.path("big");
    std::fs::write(&big, vec![9; 30_000]).unwrap();
    debugfs_write(image, &format!("write {} big", big.display()));
}

#[test]
fn deleted_files_are_a_tree_for_readers() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    let text = image.to_str().unwrap();
    let deleted = format!("{text}@deleted");
    let output = draconis.run(["ls", "-R", &deleted]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains("a.txt\n") && printed.contains("c.txt\n") && !printed.contains("kept"),
        "{printed}"
    );
    assert!(output.status.success() && output.stderr.is_empty(), "{:?}", output.stderr);
    assert_eq!(draconis.run_ok(["ls", "-R", "--deleted", text]).replace(text, &deleted), printed);

    let out = draconis.path("a.txt");
    let source = format!("{deleted}:/docs/a.txt");
    draconis.run_ok(["get", &source, out.to_str().unwrap()]);
    assert!(std::fs::read(&out).unwrap() == files["docs/a.txt"]);
    let mode = std::fs::metadata(&out).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);
    let archive = draconis.path("all.tar");
    let piped = draconis.run(["tar", &format!("{deleted}:/docs")]);
    assert!(piped.status.success());
    std::fs::write(&archive, piped.stdout).unwrap();
    let unpacked = draconis.make_dir("unpacked");
    let tar = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&unpacked).status();
    assert!(tar.unwrap().success());
    for (name, bytes) in files.iter().filter(|(name, _)| *name != "kept") {
        assert!(std::fs::read(unpacked.join(name)).unwrap() == *bytes, "{name}");
    }
    let printed = draconis.run_ok(["stat", &source]);
    assert!(printed.contains("a.txt") && printed.contains("640"), "{printed}");
    assert!(draconis.run_ok(["info", &deleted]).contains("ext4"));

    // The image is protected, and nothing writes to the tree.
    let errors = draconis.run_failing(["get", &source, text]);
    assert!(errors.contains("source"), "{errors}");
    let new = out.to_str().unwrap();
    let socket = format!("unix:{}", draconis.path("socket").display());
    for line in [
        &["put", new, &format!("{deleted}:/new")][..],
        &["rm", &source],
        &["mkdir", &format!("{deleted}:/new")],
        &["check", &deleted],
        &["repair", "-y", &deleted],
        &["undelete", &deleted],
        &["grow", &deleted, "16M"],
        &["format", &deleted, "16M"],
        &["tune", "-L", "label", &deleted],
        &["export", "--nbd", &socket, &deleted],
    ] {
        let output = draconis.run(line);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && errors.contains("are only read"), "{line:?}: {errors}");
    }
    assert!(!Path::new(&deleted).exists());

    // Unsure files are counted, and carry their state.
    overwrite_in_part(&draconis, &image);
    let output = draconis.run(["ls", "-R", &deleted]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && errors.contains(" deleted files are not whole"), "{errors}");
    let printed = draconis.run_ok(["stat", &format!("{deleted}:/docs/old/c.txt")]);
    assert!(printed.contains("user.draconis.state"), "{printed}");

    // A file of that name is that file.
    std::fs::copy(&image, &deleted).unwrap();
    assert!(draconis.run_ok(["ls", &deleted]).contains("kept"));
    let errors = draconis.run(["ls", "--deleted", &deleted]);
    assert!(!String::from_utf8(errors.stdout).unwrap().contains("kept"));
}

#[test]
fn deleted_files_of_a_disk_in_a_store_need_the_option() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    let store = draconis.path("disks.store");
    let store = store.to_str().unwrap();
    draconis.run_ok(["store", "create", store, "--size", "32M", "--layout", "cow"]);
    draconis.run_ok(["store", "put", store, "vol", image.to_str().unwrap()]);
    let errors = draconis.run_failing(["ls", &format!("{store}#vol@deleted")]);
    assert!(errors.contains("no snapshot deleted; --deleted"), "{errors}");
    let target = format!("{store}#vol:/docs/b.txt");
    let output = draconis.run(["cat", "--deleted", &target]);
    assert!(output.stdout == files["docs/b.txt"]);
    draconis.run_ok(["store", "snapshot", &format!("{store}#vol"), "deleted"]);
    assert!(draconis.run_ok(["ls", &format!("{store}#vol@deleted")]).contains("kept"));
}

#[test]
fn deleted_files_are_mounted() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    overwrite_in_part(&draconis, &image);
    let before = std::fs::read(&image).unwrap();
    let text = image.to_str().unwrap();
    let mnt = draconis.make_dir("mnt");
    let at = mnt.to_str().unwrap();
    for line in [
        &["mount", &format!("{text}@deleted"), at][..],
        &["mount", "-o", "deleted", text, at],
        &["mount", "-o", "deleted,rw", text, at],
    ] {
        let output = draconis.run(line);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{line:?}: {errors}");
        assert!(errors.contains("deleted files are not whole"), "{errors}");
        // The new file has the inode of a.txt.
        for name in ["docs/b.txt", "docs/old/c.txt"] {
            let bytes = &files[name];
            let found = std::fs::read(mnt.join(name)).unwrap();
            assert_eq!(found.len(), bytes.len());
            let mut state = [0; 64];
            let len = rustix::fs::getxattr(mnt.join(name), "user.draconis.state", &mut state[..]);
            assert!(found == *bytes || len.is_ok(), "{name}");
        }
        assert!(std::fs::write(mnt.join("new"), b"").is_err());
        let mounts = std::fs::read("/proc/mounts").unwrap();
        let mounts = String::from_utf8_lossy(&mounts);
        let mount = mounts.lines().find(|line| line.contains(at)).unwrap();
        assert!(mount.contains("@deleted") && mount.contains(" ro,"), "{mount}");
        draconis.run_ok(["umount", at]);
    }
    assert!(std::fs::read(&image).unwrap() == before, "the image changed");
}
