//! `draconis rescue`, and other commands on volumes whose superblock is lost.

use crate::common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::common::{Draconis, has_fuse};
use serde_json::Value;

/// Bytes of the long file of which a sector is bad.
const BAD_AT: usize = 1 << 20;

/// Makes a volume of 36 MiB, in blocks of 1 KiB, of a tree.
fn make_volume(draconis: &Draconis) -> (PathBuf, PathBuf) {
    let (image, tree) = (draconis.path("disk.img"), draconis.make_dir("tree"));
    fs::create_dir(tree.join("many")).unwrap();
    for nth in 0..200 {
        fs::write(tree.join(format!("many/{nth}")), format!("file {nth}\n").repeat(nth)).unwrap();
    }
    fs::write(tree.join("long"), long_contents()).unwrap();
    std::os::unix::fs::symlink("many/7", tree.join("link")).unwrap();
    fs::hard_link(tree.join("long"), tree.join("many/again")).unwrap();
    let (from, to) = (tree.to_str().unwrap(), image.to_str().unwrap());
    draconis.run_ok(["format", "-t", "ext4", "-b", "1024", "--from", from, to, "36M"]);
    (image, tree)
}

fn long_contents() -> Vec<u8> {
    (0..3_000_000u64).map(|nth| (nth.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as u8).collect()
}

fn overwrite(image: &Path, at: u64, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(image).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

/// Returns the lines of a list, sorted by path.
fn lines_of(list: &Path) -> Vec<Value> {
    let text = fs::read_to_string(list).unwrap();
    let lines = text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap());
    let mut lines: Vec<Value> = lines.collect();
    lines.sort_by_key(|line| line["path"].to_string());
    lines
}

fn assert_copied(tree: &Path, copy: &Path) {
    let output = std::process::Command::new("diff").arg("-r").args([tree, copy]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let extra =
        |line: &str| line.ends_with("draconis-rescue.jsonl") || line.ends_with("lost+found");
    let wrong: Vec<&str> = printed.lines().filter(|line| !extra(line)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let inode = |path: PathBuf| fs::metadata(path).unwrap().ino();
    assert_eq!(inode(copy.join("long")), inode(copy.join("many/again")));
}

#[test]
fn volume_without_superblock_is_read_and_not_written() {
    let draconis = Draconis::new();
    let (image, tree) = make_volume(&draconis);
    // Superblock and descriptors.
    overwrite(&image, 0, &[0; 4096]);
    let before = fs::read(&image).unwrap();
    let shown = image.to_str().unwrap();
    let at = |path: &str| format!("{shown}:{path}");
    let output = draconis.run(["cat", &at("/many/7")]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "file 7\n".repeat(7));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(errors.lines().count(), 2, "{errors}");
    assert!(errors.contains("its backup in block 8193 is used"), "{errors}");
    assert!(draconis.run_ok(["ls", &at("/many")]).lines().count() == 201);
    assert!(draconis.run_ok(["stat", &at("/long")]).contains("3000000"));
    assert!(draconis.run_ok(["info", shown]).contains("ext4"));
    draconis.run_ok(["undelete", shown]);
    let copy = draconis.path("copy");
    let printed = draconis.run_ok(["rescue", shown, copy.to_str().unwrap()]);
    assert!(
        printed.contains("206 files, links and directories") && printed.lines().count() == 1,
        "{printed}"
    );
    assert_copied(&tree, &copy);
    for (refused, status) in [(vec!["check", shown], 8), (vec!["touch", &at("/new")], 1)] {
        let output = draconis.run(refused);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("draconis repair restores it"), "{errors}");
        assert_eq!(output.status.code(), Some(status));
    }
    if has_fuse("a read-only mount through a backup superblock") {
        let mounted = draconis.mount(&image, "mnt", "ro");
        assert_eq!(fs::read_to_string(mounted.join("many/7")).unwrap(), "file 7\n".repeat(7));
        let notes = draconis.status()["mounts"][0].to_string();
        assert!(notes.contains("its backup in block 8193 is used"), "{notes}");
        draconis.run_ok(["umount", mounted.to_str().unwrap()]);
        let mount = draconis.make_dir("refused");
        let errors = draconis.run_failing(["mount", shown, mount.to_str().unwrap()]);
        assert!(errors.contains("draconis repair restores it"), "{errors}");
    }
    assert!(fs::read(&image).unwrap() == before, "the image changed");
    // By hand, in blocks of the volume.
    let other = draconis.path("other");
    let other = other.to_str().unwrap();
    draconis.run_ok(["rescue", "--superblock", "24577", "--block-size", "1K", shown, other]);
    let errors = draconis.run_failing(["rescue", "--superblock", "24578", shown, other]);
    assert!(errors.contains("superblock: no valid backup there"), "{errors}");
    let output = draconis.run(["repair", "-y", "--superblock", "8193", shown]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    common::volume::run_e2fsck(&image);
}

/// The backups are those of a volume that is no more.
#[test]
fn other_contents_over_an_old_volume_are_not_read_as_it() {
    let draconis = Draconis::new();
    let (image, tree) = make_volume(&draconis);
    overwrite(&image, 0, &[0; 4096]);
    overwrite(&image, 0, b"XFSB");
    let shown = image.to_str().unwrap();
    let copy = draconis.path("copy");
    let to = copy.to_str().unwrap();
    for command in [
        vec!["ls", shown],
        vec!["rescue", shown, to],
        vec!["undelete", shown],
        vec!["ls", "--deleted", shown],
        vec!["touch", &format!("{shown}:/new")],
    ] {
        let errors = draconis.run_failing(&command);
        assert!(errors.contains("an XFS file system"), "{command:?}: {errors}");
    }
    // On demand it is.
    draconis.run_ok(["rescue", "--superblock", "8193", shown, to]);
    assert_copied(&tree, &copy);
}

#[test]
fn missing_bytes_are_listed_and_a_second_run_continues() {
    let draconis = Draconis::new();
    let (image, tree) = make_volume(&draconis);
    let mut bytes = fs::read(&image).unwrap();
    let long = long_contents();
    let place = |of: &[u8], bytes: &[u8]| {
        bytes.chunks_exact(1024).position(|block| block.starts_with(of)).unwrap() * 1024
    };
    let sector = place(&long[BAD_AT..BAD_AT + 1024], &bytes);
    // A block of the directory: it has the entry of a file with a name of three bytes.
    let names: Vec<usize> = (0..bytes.len() / 1024)
        .map(|nth| nth * 1024)
        .filter(|at| bytes[*at..*at + 1024].windows(5).any(|it| it == b"\x03\x01199"))
        .collect();
    assert_eq!(names.len(), 1);
    bytes[names[0]..names[0] + 1024].fill(0xff);
    fs::write(&image, &bytes).unwrap();
    let map = draconis.path("disk.map");
    let text = format!(
        "# Mapfile. Created by GNU ddrescue version 1.27\n0x0 + 1\n0x0 {sector:#x} +\n\
         {sector:#x} 0x200 -\n{:#x} {:#x} +\n",
        sector + 512,
        bytes.len() - sector - 512
    );
    fs::write(&map, &text).unwrap();
    let copy = draconis.path("copy");
    let (shown, to, map) = (image.to_str().unwrap(), copy.to_str().unwrap(), map.to_str().unwrap());
    let rescue = || {
        let output = draconis.run(["rescue", "--json", "--map", map, shown, to]);
        assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let first = rescue();
    assert_eq!(
        (&first["incomplete"], &first["missing_bytes"]),
        (&1.into(), &512.into()),
        "{first}"
    );
    assert_eq!((&first["lost"], &first["failed_to_write"]), (&0.into(), &false.into()), "{first}");
    let unnamed = first["unnamed"].as_u64().unwrap();
    assert!(unnamed > 10, "{first}");
    let list = copy.join("draconis-rescue.jsonl");
    let found = lines_of(&list);
    let incomplete = found.iter().find(|line| line["path"] == "/long").unwrap();
    assert_eq!(incomplete["missing"], serde_json::json!([[BAD_AT, BAD_AT + 512]]));
    let damaged = found.iter().find(|line| line["path"] == "/many").unwrap();
    assert!(damaged["problem"].as_str().unwrap().contains("names may be missing"), "{damaged}");
    let mut wanted = long.clone();
    wanted[BAD_AT..BAD_AT + 512].fill(0);
    assert!(fs::read(copy.join("long")).unwrap() == wanted);
    let kept = fs::read_dir(copy.join("many")).unwrap().count() as u64;
    // Another name of a file is lost without a trace if it was in that block.
    let others = u64::from(copy.join("many/again").exists());
    assert_eq!(kept + unnamed, 200 + others);
    for entry in fs::read_dir(copy.join("lost+found")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let nth = text.lines().next().map_or("0", |line| line.rsplit(' ').next().unwrap());
        assert!(text == fs::read_to_string(tree.join("many").join(nth)).unwrap(), "{nth}");
    }
    // As an interrupted run leaves it: a file half written, one missing, a torn line.
    let half = fs::File::options().write(true).open(copy.join("long")).unwrap();
    half.set_len(1000).unwrap();
    fs::remove_dir_all(copy.join("lost+found")).unwrap();
    let torn = fs::read_to_string(&list).unwrap();
    fs::write(&list, &torn[..torn.len() - 10]).unwrap();
    let second = rescue();
    assert!(second["there_already"].as_u64().unwrap() > 100, "{second}");
    assert_eq!(lines_of(&list), found);
    assert!(fs::read(copy.join("long")).unwrap() == wanted);
    assert!(fs::read(map).unwrap() == text.as_bytes(), "the map of a copy changed");
    let third = rescue();
    assert!(third["there_already"].as_u64() > second["there_already"].as_u64(), "{third}");
    assert_eq!(lines_of(&list), found);
}

/// A volume needs neither the first nor the last sector of its disk.
#[test]
fn unread_ends_of_a_copy_cost_nothing() {
    let draconis = Draconis::new();
    let (image, tree) = make_volume(&draconis);
    let len = fs::metadata(&image).unwrap().len();
    let (map, shown) = (draconis.path("ends.map"), image.to_str().unwrap());
    for (nth, unread) in [0..512, len - 512..len, len - (1 << 20)..len].into_iter().enumerate() {
        let (start, end) = (unread.start, unread.end);
        let mut text = "0x0 ? 1\n".to_owned();
        for (from, to, state) in [(0, start, '+'), (start, end, '-'), (end, len, '+')] {
            if to > from {
                text += &format!("{from} {} {state}\n", to - from);
            }
        }
        fs::write(&map, text).unwrap();
        let to = draconis.path(&format!("copy {nth}"));
        draconis.run_ok(["rescue", "--map", map.to_str().unwrap(), shown, to.to_str().unwrap()]);
        assert!(fs::read(to.join("long")).unwrap() == fs::read(tree.join("long")).unwrap());
    }
}

#[test]
fn wrong_lists_maps_and_places_are_refused() {
    let draconis = Draconis::new();
    let (image, _) = make_volume(&draconis);
    let shown = image.to_str().unwrap();
    let copy = draconis.path("copy");
    let to = copy.to_str().unwrap();
    draconis.run_ok(["rescue", shown, to]);
    let list = copy.join("draconis-rescue.jsonl");
    let other = draconis.path("other.img");
    draconis.run_ok(["format", other.to_str().unwrap(), "8M"]);
    let errors = draconis.run_failing(["rescue", other.to_str().unwrap(), to]);
    assert!(errors.contains("the list of another volume"), "{errors}");
    fs::write(&list, "some notes\n").unwrap();
    let errors = draconis.run_failing(["rescue", shown, to]);
    assert!(errors.contains("not a list of draconis rescue"), "{errors}");
    assert_eq!(fs::read_to_string(&list).unwrap(), "some notes\n");
    let errors = draconis.run_failing(["rescue", "--list", shown, shown, to]);
    assert!(errors.contains("this is the source itself"), "{errors}");
    let errors = draconis.run_failing(["rescue", "--map", "missing.map", shown, to]);
    assert!(errors.contains("the map that ddrescue wrote with the copy"), "{errors}");
    let map = draconis.path("wrong.map");
    fs::write(&map, "# a comment\n0x0 ?\n0x0 12\n").unwrap();
    let errors = draconis.run_failing(["rescue", "--map", map.to_str().unwrap(), shown, to]);
    assert!(errors.contains("line 3: not a start, a size and a state"), "{errors}");
    let output = draconis.run(["rescue", "--block-size", "3K", shown, to]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("a block has 1024, 2048"));
    assert_eq!(output.status.code(), Some(2));
}
