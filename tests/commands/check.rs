//! Output and exit statuses of `draconis check`.

use std::path::PathBuf;

use crate::common::{Draconis, mke2fs};
use draconis_testkit::judge::{debugfs_write, e2fsck};

fn make_image(draconis: &Draconis, arguments: &[&str]) -> PathBuf {
    let tree = draconis.make_dir("tree/below");
    std::fs::write(tree.join("file"), vec![7; 100_000]).unwrap();
    let image = draconis.path("check.img");
    mke2fs(&image, Some(&draconis.path("tree")), arguments, "8M");
    image
}

#[test]
fn clean_summary_matches_e2fsck() {
    let draconis = Draconis::new();
    let image = make_image(&draconis, &["-t", "ext2", "-L", "demo"]);
    let printed = draconis.run_ok(["check", image.to_str().unwrap()]);
    let theirs = e2fsck("-fn", &image).stdout;
    let (files, blocks) = printed.trim().split_once(" files, ").unwrap();
    assert!(theirs.contains(&format!("{files} files")), "{printed} {theirs}");
    assert!(theirs.contains(blocks) && printed.lines().count() == 1, "{printed} {theirs}");
}

#[test]
fn damaged_volume_exits_with_4_and_lists_problems() {
    let draconis = Draconis::new();
    let image = make_image(&draconis, &["-t", "ext2", "-L", "demo"]);
    debugfs_write(&image, "set_inode_field /below/file links_count 3");
    let output = draconis.run(["check", image.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(4));
    let printed = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 2, "{printed}");
    assert_eq!(lines[0], "inode 13: the link count is wrong: 3, should be 1");
    assert!(lines[1].starts_with("demo: 13/2048 files, ") && lines[1].contains(", damaged; "));

    let output = draconis.run(["check", "--json", image.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(4));
    let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&printed["clean"], &printed["complete"]), (&false.into(), &true.into()));
    let complaint = &printed["complaints"][0];
    assert_eq!(complaint["what"], "link-count");
    assert_eq!((&complaint["inode"], &complaint["pass"]), (&13.into(), &4.into()));
    assert_eq!((&complaint["found"], &complaint["expected"]), (&3.into(), &1.into()));
}

#[test]
fn uncheckable_input_exits_with_8() {
    let draconis = Draconis::new();
    let image = make_image(&draconis, &["-t", "ext4", "-O", "casefold,encrypt"]);
    let output = draconis.run(["check", image.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(8));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("cannot check: needs: casefold with encrypt"), "{errors}");
    for nothing in [draconis.path("tree/below/file"), draconis.path("nowhere")] {
        let output = draconis.run(["check", nothing.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(8));
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn volume_inside_disk_image_is_checked() {
    let draconis = Draconis::new();
    let inner = std::fs::read(make_image(&draconis, &["-t", "ext2"])).unwrap();
    let outer = draconis.path("outer.img");
    std::fs::write(&outer, [vec![0xFF; 1 << 20], inner].concat()).unwrap();
    assert_eq!(draconis.run(["check", outer.to_str().unwrap()]).status.code(), Some(8));
    let printed = draconis.run_ok(["check", "--offset", "1M", outer.to_str().unwrap()]);
    assert!(printed.contains("files, "), "{printed}");
}
