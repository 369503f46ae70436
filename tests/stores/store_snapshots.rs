//! Snapshots, clones and rollbacks of disks in stores: by commands, while mounted, and in a bucket
//! in a directory; each checked by `e2fsck`.

use std::path::Path;
use std::process::Command;

use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_fuse, has_tool};

struct TestStore {
    draconis: Draconis,
}

impl TestStore {
    /// Creates a store `s` with an ext4 volume on a disk `vol`.
    fn new() -> Self {
        let place = Self { draconis: Draconis::new() };
        let text = r#"{"layout":"cow","page_bytes":4096,"segment_bytes":262144,"queue_depth":8}"#;
        std::fs::write(place.draconis.path("profile"), text).unwrap();
        place.run_ok("store create s --size 128M --sparse --profile profile");
        place.run_ok("store disk s vol 32M");
        place.run_ok("format -t ext4 s#vol");
        place
    }

    fn command_from_line(&self, line: &str) -> Command {
        let mut command = self.draconis.command();
        command.current_dir(self.draconis.dir.path()).args(line.split(' '));
        command
    }

    fn run_ok(&self, line: &str) -> String {
        let output = self.command_from_line(line).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{line}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned() + &errors
    }

    fn run_failing(&self, line: &str) -> String {
        let output = self.command_from_line(line).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {errors}");
        errors
    }

    fn put_text(&self, disk: &str, name: &str, text: &str) {
        std::fs::write(self.draconis.path(name), text).unwrap();
        self.run_ok(&format!("put {name} {disk}:/{name}"));
    }

    /// Checks the store and these disks, also with `e2fsck`.
    fn check_store_and_disks(&self, names: &[&str]) {
        self.run_ok("store check s");
        for name in names {
            self.run_ok(&format!("check s#{name}"));
            self.run_ok(&format!("store get s {name} judged.img"));
            if has_tool("snapshots in a store", "e2fsck") {
                run_e2fsck(&self.draconis.path("judged.img"));
            }
        }
    }

    fn own_bytes(&self, name: &str) -> u64 {
        let listed: serde_json::Value =
            serde_json::from_str(&self.run_ok("store ls --json s")).unwrap();
        let all = listed.as_array().unwrap();
        let one = all.iter().find(|it| it["names"][0] == name).unwrap();
        one["own_bytes"].as_u64().unwrap()
    }
}

/// A clone that is shorter than its volume: `shrink` names a command that helps, for disks in stores.
#[test]
fn shrink_of_a_short_clone_names_the_command_that_helps() {
    let place = TestStore::new();
    place.run_ok("format -t ext4 short.img 32M");
    let image = std::fs::File::options().write(true).open(place.draconis.path("short.img"));
    image.unwrap().set_len(24 << 20).unwrap();
    place.run_ok("store put s short short.img");
    place.run_ok("store snapshot s#short one");
    place.run_ok("store clone s#short@one two");
    let error = place.run_failing("shrink s#two");
    let advice = error.split("draconis ").find(|part| part.starts_with("store disk s two "));
    let (command, _) = advice.and_then(|it| it.split_once(" makes")).expect(&error);
    place.run_ok(command);
    place.run_ok("shrink s#two");
    place.check_store_and_disks(&["two"]);
}

#[test]
fn snapshot_is_read_cloned_and_rolled_back() {
    let place = TestStore::new();
    place.put_text("s#vol", "a", "first");
    place.run_ok("store snapshot s#vol one");
    assert_eq!(place.own_bytes("vol"), 0);
    place.put_text("s#vol", "a", "second");
    place.run_ok("store snapshot s#vol two");
    place.put_text("s#vol", "b", "third");
    assert_eq!(place.run_ok("cat s#vol@one:/a"), "first");
    assert_eq!(place.run_ok("cat s#vol@two:/a"), "second");
    assert_eq!(place.run_ok("cat s#vol:/a"), "second");
    assert!(place.own_bytes("vol") < 1 << 20 && place.own_bytes("vol@two") < 1 << 20);
    // No command changes a snapshot.
    for line in
        ["put a s#vol@one:/a", "rm s#vol@one:/a", "format --force s#vol@one", "grow s#vol@one"]
    {
        let errors = place.run_failing(line);
        assert!(errors.contains("is a snapshot, and read-only; draconis store clone"), "{errors}");
    }
    assert!(place.run_failing("store append s vol@one a").contains("is a snapshot"));
    // A clone is independent.
    place.run_ok("store clone s#vol@one next");
    place.put_text("s#next", "c", "fourth");
    place.run_ok("store clone s#vol copy");
    assert_eq!(place.run_ok("cat s#copy:/b"), "third");
    assert_eq!(place.run_ok("cat s#next:/a"), "first");
    place.check_store_and_disks(&["vol", "vol@one", "vol@two", "vol@copy", "next", "copy"]);
    // Refusals name the reason.
    let refusals = [
        ("store snapshot s#vol two", "vol@two is there already"),
        ("store clone s#vol@one vol", "vol is there already"),
        ("store rollback s#vol none", "the disk vol has no snapshot none"),
        ("store snapshot s#none one", "no disk none"),
        ("store rm s#vol", "has snapshots: vol@copy, vol@one, vol@two"),
        ("store rm -r s#vol", "copy is a clone of vol@copy; remove it first"),
        ("store rm s#vol@one", "are over vol@one: all but one of them"),
    ];
    for (line, why) in refusals {
        let errors = place.run_failing(line);
        assert!(errors.contains(why), "{line}: {errors}");
    }
    place.run_ok("store rollback s#vol one");
    assert_eq!(place.run_ok("cat s#vol:/a"), "first");
    assert!(place.run_failing("cat s#vol:/b").contains("no such file"));
    place.run_ok("store rollback s#vol two");
    place.check_store_and_disks(&["vol", "vol@one", "vol@two", "copy"]);
    // Snapshots are removed from the middle.
    place.run_ok("store rm s#copy");
    place.run_ok("store rm s vol@copy");
    place.run_ok("store rm s#next");
    place.run_ok("store rm s#vol@one");
    assert_eq!(place.run_ok("cat s#vol@two:/a"), "second");
    place.check_store_and_disks(&["vol", "vol@two"]);
    place.run_ok("store rm -r s#vol");
    place.run_ok("store rm -f s#vol");
    assert_eq!(place.run_ok("store ls s"), "");
    place.run_ok("store check s");
}

#[test]
fn snapshot_of_mounted_disk_includes_all_writes() {
    if !has_fuse("snapshots of mounted disks") {
        return;
    }
    let place = TestStore::new();
    let at = place.draconis.mount(&place.draconis.path("s#vol"), "a", "rw,commit=1000,writeback");
    for round in 0..4u8 {
        std::fs::write(at.join("file"), vec![round; 300_000]).unwrap();
        std::fs::write(at.join(format!("only{round}")), "x").unwrap();
        place.run_ok(&format!("store snapshot s#vol s{round}"));
    }
    std::fs::write(at.join("file"), "later").unwrap();
    place.run_ok("store clone s#vol other");
    let errors = place.run_failing("store rollback s#vol s1");
    assert!(errors.contains("vol is in use: unmount it first"), "{errors}");
    // Two in the middle, one of them while it is read.
    let kept = place.draconis.make_dir("b");
    let printed = place.run_ok("mount s#vol@s1 b");
    assert!(printed.contains("read-only: s#vol@s1 is a snapshot"), "{printed}");
    assert_eq!(std::fs::read(kept.join("file")).unwrap(), vec![1; 300_000]);
    std::fs::write(kept.join("new"), "x").unwrap_err();
    assert!(place.run_failing("store rm s#vol@s1").contains("in use"));
    place.run_ok("store rm s#vol@s0");
    place.run_ok("store rm s#vol@s2");
    assert_eq!(std::fs::read(kept.join("file")).unwrap(), vec![1; 300_000]);
    place.run_ok("umount b");
    place.run_ok("store rm s#vol@s3");
    std::fs::write(at.join("last"), "here").unwrap();
    assert_eq!(std::fs::read(at.join("file")).unwrap(), b"later");
    place.run_ok("umount a");
    place.check_store_and_disks(&["vol", "vol@s1", "vol@other", "other"]);
    assert_eq!(place.run_ok("cat s#vol:/last"), "here");
    assert_eq!(place.run_ok("cat s#other:/file"), "later");
    assert_eq!(place.run_ok("ls s#vol@s1").matches("only").count(), 2);
    place.run_ok("store rollback s#vol s1");
    place.check_store_and_disks(&["vol"]);
}

#[test]
fn snapshots_work_in_bucket() {
    let place = TestStore::new();
    place.run_ok("store get s vol image");
    let bucket = place.draconis.path("bucket");
    std::fs::create_dir(&bucket).unwrap();
    let address = format!("file://{}", Path::new(&bucket).display());
    place.run_ok(&format!("store create {address} --size 128M"));
    place.run_ok(&format!("store put {address} vol image"));
    place.run_ok(&format!("store snapshot {address}#vol one"));
    std::fs::write(place.draconis.path("other"), vec![7; 32 << 20]).unwrap();
    place.run_ok(&format!("store put {address} vol other"));
    place.run_ok(&format!("store clone {address}#vol@one next"));
    let same = |name: &str, file: &str| {
        place.run_ok(&format!("store get {address} {name} got"));
        let [got, file] = ["got", file].map(|name| std::fs::read(place.draconis.path(name)));
        assert!(got.unwrap() == file.unwrap(), "{name}");
    };
    same("vol", "other");
    same("vol@one", "image");
    same("next", "image");
    place.run_ok(&format!("store rollback {address}#vol one"));
    same("vol", "image");
    place.run_ok(&format!("store rm {address}#next"));
    place.run_ok(&format!("store rm {address}#vol@one"));
    same("vol", "image");
    place.run_ok(&format!("store check {address}"));
}

#[test]
fn mount_in_full_store_returns_enospc_and_stays_usable() {
    if !has_fuse("a full store under a mount") {
        return;
    }
    let place = TestStore::new();
    // Longer than the store.
    place.run_ok("store rm s#vol");
    place.run_ok("format -t ext2 s#vol 400M");
    let at = place.draconis.mount(&place.draconis.path("s#vol"), "a", "rw");
    let mut dice = draconis_device::Random::new(7);
    let noise: Vec<u8> = (0..(1 << 20) / 8).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    for round in 0..3 {
        let mut whole = 0;
        let full = (0..400).find_map(|nth| {
            let done = std::fs::write(at.join(format!("{nth}")), &noise);
            whole += usize::from(done.is_ok());
            done.err()
        });
        let errno = full.map(|error| error.raw_os_error());
        assert_eq!(errno, Some(Some(rustix::io::Errno::NOSPC.raw_os_error())), "round {round}");
        // Acknowledged data is there, and deletions can free space.
        let synced = std::fs::File::open(&at).unwrap();
        synced.sync_all().unwrap();
        assert!(whole > 20, "{whole} files in round {round}");
        for nth in 0..whole {
            assert!(std::fs::read(at.join(format!("{nth}"))).unwrap() == noise, "{nth}");
        }
        for entry in std::fs::read_dir(&at).unwrap().flatten() {
            if entry.file_name() != "lost+found" {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        synced.sync_all().unwrap();
    }
    let status = place.draconis.status();
    assert_eq!(status["mounts"][0]["worker"]["failure"], serde_json::Value::Null, "{status}");
    place.run_ok("umount a");
    // Freed space was discarded.
    assert!(place.own_bytes("vol") < 4 << 20, "{}", place.own_bytes("vol"));
    place.check_store_and_disks(&[]);
    place.run_ok("check s#vol");
}

#[test]
fn volume_discards_free_store_space() {
    let place = TestStore::new();
    std::fs::write(place.draconis.path("large"), vec![7; 20 << 20]).unwrap();
    let empty = place.own_bytes("vol");
    place.run_ok("put large s#vol:/");
    assert!(place.own_bytes("vol") > empty + (20 << 20));
    place.run_ok("rm s#vol:/large");
    assert!(place.own_bytes("vol") < empty + (1 << 20), "{}", place.own_bytes("vol"));
    place.check_store_and_disks(&["vol"]);
    // Space shared with a snapshot is not freed.
    place.run_ok("put large s#vol:/");
    place.run_ok("store snapshot s#vol kept");
    place.run_ok("rm s#vol:/large");
    place.check_store_and_disks(&["vol", "vol@kept"]);
    place.run_ok("get s#vol@kept:/large again");
    let [large, again] = ["large", "again"].map(|name| std::fs::read(place.draconis.path(name)));
    assert!(large.unwrap() == again.unwrap());
    if !has_fuse("discards of mounts") {
        return;
    }
    for (options, is_less) in [("rw", true), ("rw,nodiscard", false)] {
        let at = place.draconis.mount(&place.draconis.path("s#vol"), "a", options);
        std::fs::write(at.join("file"), vec![9; 10 << 20]).unwrap();
        std::fs::File::open(&at).unwrap().sync_all().unwrap();
        std::fs::remove_file(at.join("file")).unwrap();
        place.run_ok("umount a");
        assert_eq!(
            place.own_bytes("vol") < 5 << 20,
            is_less,
            "{options}: {}",
            place.own_bytes("vol")
        );
    }
    // With the option, files discard in the file system below, too.
    let image = place.draconis.path("image");
    place.run_ok("format -t ext4 image 64M");
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&image).unwrap());
    for (options, is_less) in [("rw", false), ("rw,discard", true)] {
        let at = place.draconis.mount(&image, "a", options);
        std::fs::write(at.join("file"), vec![9; 20 << 20]).unwrap();
        std::fs::File::open(&at).unwrap().sync_all().unwrap();
        std::fs::remove_file(at.join("file")).unwrap();
        place.run_ok("umount a");
        assert_eq!(blocks() * 512 < 15 << 20, is_less, "{options}: {}", blocks());
        if has_tool("discards of files", "e2fsck") {
            run_e2fsck(&image);
        }
    }
}
