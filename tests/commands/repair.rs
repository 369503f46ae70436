//! `draconis repair`: what it shows, writes and takes back; its exit statuses.

use std::path::{Path, PathBuf};

use crate::common::{Draconis, mke2fs};
use draconis_testkit::judge::{debugfs_write, e2fsck};

fn e2fsck_is_silent(image: &Path) -> bool {
    e2fsck("-fn", image).is_success()
}

/// A volume with a file whose name is gone, and one whose link count is wrong.
fn damaged_image(draconis: &Draconis, kind: &str) -> PathBuf {
    let tree = draconis.make_dir("tree/below");
    std::fs::write(tree.join("letter"), "Dear reader,\n").unwrap();
    std::fs::write(tree.join("large"), vec![7; 100_000]).unwrap();
    let image = draconis.path(&format!("{kind}.img"));
    mke2fs(&image, Some(&draconis.path("tree")), &["-t", kind, "-L", "demo"], "8M");
    debugfs_write(&image, "set_inode_field /below/large links_count 3");
    debugfs_write(&image, "unlink /below/letter");
    image
}

#[test]
fn repair_is_shown_made_and_taken_back() {
    for kind in ["ext2", "ext3", "ext4"] {
        let draconis = Draconis::new();
        let image = damaged_image(&draconis, kind);
        let path = image.to_str().unwrap();
        let before = std::fs::read(&image).unwrap();

        let shown = draconis.run(["repair", "-n", path]);
        assert_eq!(shown.status.code(), Some(4), "{shown:?}");
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("an inode in use has no name"), "{shown}");
        assert!(shown.contains("    the file gets a name in lost+found\n"), "{shown}");
        assert!(shown.contains("the link count is wrong: 3, should be 1\n    the count is set\n"));
        assert!(shown.ends_with("changes would repair it\n"), "{shown}");
        assert!(std::fs::read(&image).unwrap() == before);

        let undo = draconis.path("undo");
        let made = draconis.run(["repair", "-y", "--undo", undo.to_str().unwrap(), path]);
        assert_eq!(made.status.code(), Some(1), "{made:?}");
        assert!(e2fsck_is_silent(&image));
        let names = draconis.run_ok(["ls", &format!("{path}:/lost+found")]);
        let letter = format!("{path}:/lost+found/{}", names.trim());
        assert_eq!(draconis.run_ok(["cat", &letter]), "Dear reader,\n");

        // The list of what is done is that of what was shown.
        let listed = String::from_utf8(made.stdout).unwrap();
        let list = |text: &str| text.rsplit_once(path).unwrap().0.to_owned();
        assert_eq!(list(&listed), list(&shown), "{kind}");

        let again = draconis.run(["repair", "-y", path]);
        assert_eq!(again.status.code(), Some(0));
        let printed = String::from_utf8(again.stdout).unwrap();
        assert_eq!(printed, format!("{path}: nothing to repair\n"));

        // Into a volume with a new file only by force.
        let changed = draconis.path("changed.img");
        std::fs::copy(&image, &changed).unwrap();
        let (letter, other) = (draconis.path("tree/below/letter"), changed.to_str().unwrap());
        draconis.run_ok(["put", letter.to_str().unwrap(), &format!("{other}:/new")]);
        let now = std::fs::read(&changed).unwrap();
        let revert = ["repair", "--revert", undo.to_str().unwrap(), other];
        let refused = draconis.run(revert);
        assert_eq!(refused.status.code(), Some(8), "{refused:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--force"), "{refused:?}");
        assert!(std::fs::read(&changed).unwrap() == now, "{kind}");
        let forced = draconis.run(revert.into_iter().chain(["--force"]));
        assert_eq!(forced.status.code(), Some(0), "{forced:?}");

        let back = draconis.run(["repair", "--revert", undo.to_str().unwrap(), path]);
        assert_eq!(back.status.code(), Some(0), "{back:?}");
        assert!(std::fs::read(&image).unwrap() == before, "{kind}");
    }
}

#[test]
fn safe_repairs_are_told_from_others() {
    let draconis = Draconis::new();
    let image = damaged_image(&draconis, "ext4");
    let path = image.to_str().unwrap();
    let before = std::fs::read(&image).unwrap();
    let refused = draconis.run(["repair", "-p", path]);
    assert_eq!(refused.status.code(), Some(4));
    let errors = String::from_utf8(refused.stderr).unwrap();
    assert!(errors.contains("not all of this is safe; -y makes it"), "{errors}");
    let unasked = draconis.run(["repair", path]);
    assert_eq!(unasked.status.code(), Some(8));
    let errors = String::from_utf8(unasked.stderr).unwrap();
    assert!(errors.contains("-n shows the repair"), "{errors}");
    assert!(std::fs::read(&image).unwrap() == before);

    let other = draconis.path("safe.img");
    mke2fs(&other, Some(&draconis.path("tree")), &["-t", "ext4"], "8M");
    debugfs_write(&other, "set_inode_field /below/large links_count 3");
    let made = draconis.run(["repair", "-p", "--json", other.to_str().unwrap()]);
    assert_eq!(made.status.code(), Some(1), "{made:?}");
    let printed: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    assert_eq!((&printed["written"], &printed["complete"]), (&true.into(), &true.into()));
    assert_eq!(printed["fixes"][0]["what"], "link-count");
    assert_eq!(printed["fixes"][0]["action"], "the count is set");
    assert!(e2fsck_is_silent(&other));
}

#[test]
fn problem_without_fix_leaves_volume_as_it_is() {
    let draconis = Draconis::new();
    let image = damaged_image(&draconis, "ext2");
    let path = image.to_str().unwrap();
    // Longer than its file.
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.set_len(7 << 20).unwrap();
    let before = std::fs::read(&image).unwrap();
    let left = draconis.run(["repair", "-y", path]);
    assert_eq!(left.status.code(), Some(4), "{left:?}");
    let printed = String::from_utf8(left.stdout).unwrap();
    assert!(printed.contains("the volume is longer than its disk"), "{printed}");
    assert!(printed.contains("1 problems have no fix, nothing is written"), "{printed}");
    assert!(std::fs::read(&image).unwrap() == before);
    // Nothing is written, and nothing is left behind.
    let undo = draconis.path("undo");
    let left = draconis.run(["repair", "-y", "--json", "--undo", undo.to_str().unwrap(), path]);
    assert_eq!(left.status.code(), Some(4), "{left:?}");
    let printed: serde_json::Value = serde_json::from_slice(&left.stdout).unwrap();
    assert_eq!(printed["verdict"], "left as it was");
    assert_eq!(printed["reason"], "1 problems have no fix");
    assert!(!undo.exists() && std::fs::read(&image).unwrap() == before);
}

/// What has a fix is repaired beside what has none, as `-n` said: a full volume takes no copies of
/// blocks that two files have.
#[test]
fn volume_is_repaired_in_part() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("other"), "Dear all,\n").unwrap();
    let image = draconis.path("part.img");
    let path = image.to_str().unwrap();
    let fill = |len: usize| {
        std::fs::write(tree.join("large"), vec![7; len]).unwrap();
        mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", "1024"], "1M");
    };
    fill(1);
    let report: serde_json::Value =
        serde_json::from_str(&draconis.run_ok(["check", "--json", path])).unwrap();
    let count = |name: &str| report[name].as_u64().unwrap() as usize;
    fill((count("blocks") - count("used_blocks") - 6) << 10);
    let blocks = draconis_testkit::judge::debugfs(&image, "blocks /large");
    for (nth, block) in blocks.split_whitespace().take(12).enumerate() {
        debugfs_write(&image, &format!("set_inode_field /other block[{nth}] {block}"));
    }
    debugfs_write(&image, "set_inode_field /large links_count 3");
    let lines = |output: std::process::Output| -> (Option<i32>, Vec<String>) {
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), text.lines().map(str::to_owned).collect())
    };
    let (status, shown) = lines(draconis.run(["repair", "-n", path]));
    assert_eq!(status, Some(4));
    assert!(shown.last().unwrap().contains(" changes would repair it in part; "), "{shown:?}");
    let copy = draconis.path("copy.img");
    std::fs::copy(&image, &copy).unwrap();
    let scratch = draconis.path("scratch");
    let repair = ["repair", "-y", "--scratch", scratch.to_str().unwrap()];
    let (status, made) = lines(draconis.run(repair.iter().chain(&[path])));
    assert_eq!(status, Some(4));
    assert_eq!(shown[..shown.len() - 1], made[..made.len() - 1]);
    assert!(made.last().unwrap().contains(": repaired in part, "), "{made:?}");
    let stat = draconis_testkit::judge::debugfs(&image, "stat /large");
    assert!(stat.contains("Links: 1 "), "{stat}");

    let scratch = draconis.path("scratch of the copy");
    let repair = ["repair", "-y", "--json", "--scratch", scratch.to_str().unwrap()];
    let json = draconis.run(repair.iter().chain(&[copy.to_str().unwrap()]));
    let printed: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        (&printed["verdict"], &printed["written"]),
        (&"repaired in part".into(), &true.into())
    );
    let left = printed["unfixed"].as_array().unwrap();
    assert!(left.iter().any(|it| it["what"] == "claimed-twice"), "{left:?}");
}

/// A damaged block of mmp says nothing about other hosts: it is one of the problems.
#[test]
fn damaged_block_of_mmp_is_made_anew() {
    let draconis = Draconis::new();
    let image = draconis.path("mmp.img");
    mke2fs(&image, None, &["-t", "ext4", "-b", "1024", "-O", "mmp"], "8M");
    let place = draconis_testkit::judge::debugfs(&image, "stats -h");
    let at = place.lines().find_map(|line| line.strip_prefix("MMP block number:")).unwrap();
    let at: u64 = at.trim().parse().unwrap();
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"none", at * 1024).unwrap();
    let path = image.to_str().unwrap();
    assert_eq!(draconis.run(["repair", "-y", path]).status.code(), Some(1));
    draconis.run_ok(["check", path]);
}

#[test]
fn undo_file_must_be_new_and_the_right_one() {
    let draconis = Draconis::new();
    let image = damaged_image(&draconis, "ext2");
    let path = image.to_str().unwrap();
    let before = std::fs::read(&image).unwrap();
    let taken = draconis.path("taken");
    std::fs::write(&taken, "mine").unwrap();
    for arguments in [["repair", "-y", "--undo"], ["repair", "--revert", ""]] {
        let words = arguments.iter().filter(|it| !it.is_empty()).copied();
        let refused = draconis.run(words.chain([taken.to_str().unwrap(), path]));
        assert_eq!(refused.status.code(), Some(8), "{refused:?}");
    }
    assert!(std::fs::read(&image).unwrap() == before);
    assert_eq!(std::fs::read(&taken).unwrap(), b"mine");
}

/// Commands that change the whole volume name the damage and the way out, and work after it.
#[test]
fn changes_of_damaged_volumes_are_refused_until_repaired() {
    let draconis = Draconis::new();
    let image = damaged_image(&draconis, "ext4");
    let path = image.to_str().unwrap();
    let before = std::fs::read(&image).unwrap();
    let commands =
        [&["shrink", path][..], &["grow", path, "16M"], &["tune", "-O", "^has_journal", path]];
    for arguments in commands {
        let error = draconis.run_failing(arguments);
        assert!(error.contains("damaged: ") && error.contains("draconis repair"), "{error}");
        assert!(std::fs::read(&image).unwrap() == before, "{arguments:?}");
    }
    assert_eq!(draconis.run(["repair", "-y", path]).status.code(), Some(1));
    for arguments in commands {
        draconis.run_ok(arguments);
        assert!(e2fsck_is_silent(&image), "{arguments:?}");
    }
}

/// A superblock that is gone, or not what its checksum says, comes back from a backup.
#[test]
fn volume_without_superblock_is_repaired() {
    for (at, len) in [(1024, 1024), (1024 + 12, 1), (1024 + 24, 4)] {
        repair_without_superblock(at, len);
    }
}

fn repair_without_superblock(at: usize, len: usize) {
    let draconis = Draconis::new();
    let image = draconis.path("large.img");
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("letter"), "Dear reader,\n").unwrap();
    mke2fs(&image, Some(&tree), &["-t", "ext4", "-b", "1024"], "32M");
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[at..at + len].iter_mut().for_each(|byte| *byte = !*byte);
    std::fs::write(&image, &bytes).unwrap();
    let path = image.to_str().unwrap();
    let made = draconis.run(["repair", "-y", path]);
    assert_eq!(made.status.code(), Some(1), "{made:?}");
    assert!(e2fsck_is_silent(&image));
    assert_eq!(draconis.run_ok(["cat", &format!("{path}:/letter")]), "Dear reader,\n");
}

/// The files of `--undo` and `--scratch` are there only if something was written.
#[test]
fn repair_that_writes_nothing_leaves_no_files() {
    let draconis = Draconis::new();
    let image = draconis.path("clean.img");
    mke2fs(&image, None, &["-t", "ext4"], "8M");
    let (undo, scratch) = (draconis.make_dir("undo").join("file"), draconis.path("scratch"));
    let repair = |option: &str| {
        let mut command = draconis.command();
        command.args(["repair", option]).arg(&image).arg("--undo").arg(&undo);
        command.arg("--scratch").arg(&scratch).output().unwrap().status.code()
    };
    assert_eq!(repair("-y"), Some(0));
    assert!(!undo.exists() && !scratch.exists(), "files of a repair that wrote nothing");
    // Damage that -p leaves.
    let image = damaged_image(&draconis, "ext4");
    std::fs::rename(&image, draconis.path("clean.img")).unwrap();
    debugfs_write(draconis.path("clean.img"), "clri /below/large");
    assert_eq!(repair("-p"), Some(4));
    assert!(!undo.exists() && !scratch.exists(), "files of a repair that was left");
    assert_eq!(repair("-y"), Some(1));
    assert!(undo.exists(), "the undo file of a repair");
}
