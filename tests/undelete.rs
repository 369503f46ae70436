//! `draconis undelete`: listing, JSON, copies on the host, refusals.

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Draconis, mke2fs};

fn debugfs(image: &Path, request: &str) {
    let output = Command::new("debugfs").args(["-w", "-R", request]).arg(image).output();
    assert!(output.expect("debugfs of e2fsprogs is needed").status.success());
}

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
    std::thread::sleep(std::time::Duration::from_millis(1100));
    for path in ["docs/a.txt", "docs/b.txt", "docs/old/c.txt"] {
        debugfs(&image, &format!("rm {path}"));
    }
    debugfs(&image, "rmdir docs/old");
    (image, files)
}

#[test]
fn deleted_files_are_listed_and_copied() {
    let draconis = Draconis::new();
    let (image, files) = make_image(&draconis);
    let before = std::fs::read(&image).unwrap();
    let image = image.to_str().unwrap();
    let said = draconis.run_ok(["undelete", image]);
    assert_eq!(said.lines().filter(|line| line.starts_with("whole ")).count(), 4, "{said}");
    assert!(said.contains(" /docs/a.txt\n") && said.contains(" /docs/old/\n"), "{said}");

    let out = draconis.make_dir("out");
    let said = draconis.run_ok(["undelete", image, "/docs/**", out.to_str().unwrap()]);
    assert_eq!(said, "3 files: 3 whole\n");
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
    let said = draconis.run_ok(["undelete", "--since", "@99999999999", image]);
    assert_eq!(said, "");
    let said = draconis.run_ok(["undelete", "--since", "@1000000000", image]);
    assert_eq!(said.lines().count(), 4);
}

#[test]
fn nothing_on_the_host_is_replaced() {
    let draconis = Draconis::new();
    let (image, _) = make_image(&draconis);
    let text = image.to_str().unwrap();
    let out = draconis.make_dir("out/docs");
    std::fs::write(out.join("a.txt"), "mine").unwrap();
    let top = draconis.path("out");
    let said = draconis.run_failing(["undelete", text, "*.txt", top.to_str().unwrap()]);
    assert!(said.contains("out/docs/a.txt: exists already; it was not replaced"), "{said}");
    assert_eq!(std::fs::read(out.join("a.txt")).unwrap(), b"mine");
    assert!(out.join("b.txt").exists());
    let said = draconis.run_failing(["undelete", text, "inode:13", text]);
    assert!(
        said.contains("the same file as the source") || said.contains("source itself"),
        "{said}"
    );
    let said = draconis.run_failing(["undelete", text, "nothing", top.to_str().unwrap()]);
    assert!(said.contains("no deleted file matches"), "{said}");
    let said =
        draconis.run_failing(["undelete", text, "*.txt", draconis.path("new").to_str().unwrap()]);
    assert!(said.contains("DEST must be an existing directory"), "{said}");
}

#[test]
fn unsure_and_overwritten_files_are_named() {
    let draconis = Draconis::new();
    let (image, _) = make_image(&draconis);
    let big = draconis.path("big");
    // A new file gets blocks of the deleted ones, then nothing proves what the others hold.
    std::fs::write(&big, vec![9; 30_000]).unwrap();
    debugfs(&image, &format!("write {} big", big.display()));
    let text = image.to_str().unwrap();
    let out = draconis.make_dir("out");
    let output = draconis.run(["undelete", text, "*.txt", out.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("contents unsure") || said.contains("overwritten"), "{said}");
    let listed = draconis.run_ok(["undelete", text]);
    assert!(
        !listed.lines().any(|line| line.starts_with("whole") && line.ends_with(".txt")),
        "{listed}"
    );
}
