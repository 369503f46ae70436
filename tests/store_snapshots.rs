//! Snapshots, clones and rollbacks of disks in stores: by commands, while mounted, and in a bucket
//! in a directory; each checked by `e2fsck`.

mod common;

use std::path::Path;
use std::process::Command;

use common::volume::check;
use common::{Draconis, fuse, tool};

struct TestStore {
    draconis: Draconis,
}

impl TestStore {
    /// Creates a store `s` with an ext4 volume on a disk `vol`.
    fn new() -> Self {
        let place = Self { draconis: Draconis::new() };
        let text = r#"{"layout":"cow","page_bytes":4096,"segment_bytes":262144,"queue_depth":8}"#;
        std::fs::write(place.draconis.path("profile"), text).unwrap();
        place.ok("store create s --size 128M --sparse --profile profile");
        place.ok("store disk s vol 32M");
        place.ok("format -t ext4 s#vol");
        place
    }

    fn command(&self, line: &str) -> Command {
        let mut command = self.draconis.command();
        command.current_dir(self.draconis.dir.path()).args(line.split(' '));
        command
    }

    fn ok(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{line}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned() + &said
    }

    fn fails(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        said
    }

    fn put(&self, disk: &str, name: &str, text: &str) {
        std::fs::write(self.draconis.path(name), text).unwrap();
        self.ok(&format!("put {name} {disk}:/{name}"));
    }

    /// Checks the store and these disks, also with `e2fsck`.
    fn judge(&self, names: &[&str]) {
        self.ok("store check s");
        for name in names {
            self.ok(&format!("check s#{name}"));
            self.ok(&format!("store get s {name} judged.img"));
            if tool("snapshots in a store", "e2fsck") {
                check(&self.draconis.path("judged.img"));
            }
        }
    }

    fn own(&self, name: &str) -> u64 {
        let listed: serde_json::Value =
            serde_json::from_str(&self.ok("store ls --json s")).unwrap();
        let all = listed.as_array().unwrap();
        let one = all.iter().find(|it| it["names"][0] == name).unwrap();
        one["own_bytes"].as_u64().unwrap()
    }
}

#[test]
fn what_a_disk_was_is_read_cloned_and_brought_back() {
    let place = TestStore::new();
    place.put("s#vol", "a", "first");
    place.ok("store snapshot s#vol one");
    assert_eq!(place.own("vol"), 0);
    place.put("s#vol", "a", "second");
    place.ok("store snapshot s#vol two");
    place.put("s#vol", "b", "third");
    assert_eq!(place.ok("cat s#vol@one:/a"), "first");
    assert_eq!(place.ok("cat s#vol@two:/a"), "second");
    assert_eq!(place.ok("cat s#vol:/a"), "second");
    assert!(place.own("vol") < 1 << 20 && place.own("vol@two") < 1 << 20);
    // No command changes a snapshot.
    for line in
        ["put a s#vol@one:/a", "rm s#vol@one:/a", "format --force s#vol@one", "grow s#vol@one"]
    {
        let said = place.fails(line);
        assert!(said.contains("is a snapshot, and read-only; draconis store clone"), "{said}");
    }
    assert!(place.fails("store append s vol@one a").contains("is a snapshot"));
    // A clone is independent.
    place.ok("store clone s#vol@one next");
    place.put("s#next", "c", "fourth");
    place.ok("store clone s#vol copy");
    assert_eq!(place.ok("cat s#copy:/b"), "third");
    assert_eq!(place.ok("cat s#next:/a"), "first");
    place.judge(&["vol", "vol@one", "vol@two", "vol@copy", "next", "copy"]);
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
        let said = place.fails(line);
        assert!(said.contains(why), "{line}: {said}");
    }
    place.ok("store rollback s#vol one");
    assert_eq!(place.ok("cat s#vol:/a"), "first");
    assert!(place.fails("cat s#vol:/b").contains("no such file"));
    place.ok("store rollback s#vol two");
    place.judge(&["vol", "vol@one", "vol@two", "copy"]);
    // Snapshots are removed from the middle.
    place.ok("store rm s#copy");
    place.ok("store rm s vol@copy");
    place.ok("store rm s#next");
    place.ok("store rm s#vol@one");
    assert_eq!(place.ok("cat s#vol@two:/a"), "second");
    place.judge(&["vol", "vol@two"]);
    place.ok("store rm -r s#vol");
    place.ok("store rm -f s#vol");
    assert_eq!(place.ok("store ls s"), "");
    place.ok("store check s");
}

#[test]
fn a_mounted_disk_is_kept_with_all_that_was_written() {
    if !fuse("snapshots of mounted disks") {
        return;
    }
    let place = TestStore::new();
    let at = place.draconis.mount(&place.draconis.path("s#vol"), "a", "rw,commit=1000,writeback");
    for round in 0..4u8 {
        std::fs::write(at.join("file"), vec![round; 300_000]).unwrap();
        std::fs::write(at.join(format!("only{round}")), "x").unwrap();
        place.ok(&format!("store snapshot s#vol s{round}"));
    }
    std::fs::write(at.join("file"), "later").unwrap();
    place.ok("store clone s#vol other");
    let said = place.fails("store rollback s#vol s1");
    assert!(said.contains("vol is in use: unmount it first"), "{said}");
    // Two in the middle, one of them while it is read.
    let kept = place.draconis.make_dir("b");
    let said = place.ok("mount s#vol@s1 b");
    assert!(said.contains("read-only: s#vol@s1 is a snapshot"), "{said}");
    assert_eq!(std::fs::read(kept.join("file")).unwrap(), vec![1; 300_000]);
    std::fs::write(kept.join("new"), "x").unwrap_err();
    assert!(place.fails("store rm s#vol@s1").contains("in use"));
    place.ok("store rm s#vol@s0");
    place.ok("store rm s#vol@s2");
    assert_eq!(std::fs::read(kept.join("file")).unwrap(), vec![1; 300_000]);
    place.ok("umount b");
    place.ok("store rm s#vol@s3");
    std::fs::write(at.join("last"), "here").unwrap();
    assert_eq!(std::fs::read(at.join("file")).unwrap(), b"later");
    place.ok("umount a");
    place.judge(&["vol", "vol@s1", "vol@other", "other"]);
    assert_eq!(place.ok("cat s#vol:/last"), "here");
    assert_eq!(place.ok("cat s#other:/file"), "later");
    assert_eq!(place.ok("ls s#vol@s1").matches("only").count(), 2);
    place.ok("store rollback s#vol s1");
    place.judge(&["vol"]);
}

#[test]
fn a_bucket_has_snapshots() {
    let place = TestStore::new();
    place.ok("store get s vol image");
    let bucket = place.draconis.path("bucket");
    std::fs::create_dir(&bucket).unwrap();
    let address = format!("file://{}", Path::new(&bucket).display());
    place.ok(&format!("store create {address} --size 128M"));
    place.ok(&format!("store put {address} vol image"));
    place.ok(&format!("store snapshot {address}#vol one"));
    std::fs::write(place.draconis.path("other"), vec![7; 32 << 20]).unwrap();
    place.ok(&format!("store put {address} vol other"));
    place.ok(&format!("store clone {address}#vol@one next"));
    let same = |name: &str, file: &str| {
        place.ok(&format!("store get {address} {name} got"));
        let [got, file] = ["got", file].map(|name| std::fs::read(place.draconis.path(name)));
        assert!(got.unwrap() == file.unwrap(), "{name}");
    };
    same("vol", "other");
    same("vol@one", "image");
    same("next", "image");
    place.ok(&format!("store rollback {address}#vol one"));
    same("vol", "image");
    place.ok(&format!("store rm {address}#next"));
    place.ok(&format!("store rm {address}#vol@one"));
    same("vol", "image");
    place.ok(&format!("store check {address}"));
}

#[test]
fn a_mount_in_a_full_store_says_no_space_and_goes_on() {
    if !fuse("a full store under a mount") {
        return;
    }
    let place = TestStore::new();
    // Longer than the store.
    place.ok("store rm s#vol");
    place.ok("format -t ext2 s#vol 400M");
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
    place.ok("umount a");
    // Freed space was discarded.
    assert!(place.own("vol") < 4 << 20, "{}", place.own("vol"));
    place.judge(&[]);
    place.ok("check s#vol");
}

#[test]
fn what_a_volume_frees_goes_back_to_its_store() {
    let place = TestStore::new();
    std::fs::write(place.draconis.path("large"), vec![7; 20 << 20]).unwrap();
    let empty = place.own("vol");
    place.ok("put large s#vol:/");
    assert!(place.own("vol") > empty + (20 << 20));
    place.ok("rm s#vol:/large");
    assert!(place.own("vol") < empty + (1 << 20), "{}", place.own("vol"));
    place.judge(&["vol"]);
    // Space shared with a snapshot is not freed.
    place.ok("put large s#vol:/");
    place.ok("store snapshot s#vol kept");
    place.ok("rm s#vol:/large");
    place.judge(&["vol", "vol@kept"]);
    place.ok("get s#vol@kept:/large again");
    let [large, again] = ["large", "again"].map(|name| std::fs::read(place.draconis.path(name)));
    assert!(large.unwrap() == again.unwrap());
    if !fuse("discards of mounts") {
        return;
    }
    for (options, is_less) in [("rw", true), ("rw,nodiscard", false)] {
        let at = place.draconis.mount(&place.draconis.path("s#vol"), "a", options);
        std::fs::write(at.join("file"), vec![9; 10 << 20]).unwrap();
        std::fs::File::open(&at).unwrap().sync_all().unwrap();
        std::fs::remove_file(at.join("file")).unwrap();
        place.ok("umount a");
        assert_eq!(place.own("vol") < 5 << 20, is_less, "{options}: {}", place.own("vol"));
    }
    // With the option, files discard in the file system below, too.
    let image = place.draconis.path("image");
    place.ok("format -t ext4 image 64M");
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&image).unwrap());
    for (options, is_less) in [("rw", false), ("rw,discard", true)] {
        let at = place.draconis.mount(&image, "a", options);
        std::fs::write(at.join("file"), vec![9; 20 << 20]).unwrap();
        std::fs::File::open(&at).unwrap().sync_all().unwrap();
        std::fs::remove_file(at.join("file")).unwrap();
        place.ok("umount a");
        assert_eq!(blocks() * 512 < 15 << 20, is_less, "{options}: {}", blocks());
        if tool("discards of files", "e2fsck") {
            check(&image);
        }
    }
}
