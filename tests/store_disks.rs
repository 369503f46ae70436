//! Disks in a store as images: every command accepts `STORE#NAME`; `store get` exports them for
//! `e2fsck`.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Draconis, IgnoredProperties, same, scan_tree, tool, tree_of_sources};

const PROFILE: &str =
    r#"{"layout": "cow", "page_bytes": 4096, "segment_bytes": 262144, "queue_depth": 8}"#;

/// Properties that `get` cannot restore.
const LOST: IgnoredProperties = IgnoredProperties { what_a_copy_loses: true, fractions: true };

/// A working directory with a store `s` of 192 MiB.
struct TestStore {
    draconis: Draconis,
}

impl TestStore {
    fn new() -> Self {
        let draconis = Draconis::new();
        std::fs::write(draconis.path("profile"), PROFILE).unwrap();
        let place = Self { draconis };
        place.ok("store create s --size 192M --sparse --profile profile");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.draconis.path(name)
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
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn fails(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        said
    }

    /// Checks a disk with our check and `e2fsck`, and the store.
    fn judge(&self, name: &str) {
        self.ok(&format!("check s#{name}"));
        self.ok(&format!("store get s {name} judged.img"));
        self.ok("store check s");
        if tool("disks in a store", "e2fsck") {
            common::volume::check(&self.path("judged.img"));
        }
    }
}

#[test]
fn a_disk_is_made_listed_made_longer_and_removed() {
    let place = TestStore::new();
    assert_eq!(place.ok("store disk s vol 8M"), "s#vol: 8.0 MiB\n");
    assert_eq!(place.ok("store disk s vol 16M"), "s#vol: 16.0 MiB, was 8.0 MiB\n");
    assert_eq!(place.ok("store ls s"), "1\t16777216\t0\tvol\n");
    let listed: serde_json::Value = serde_json::from_str(&place.ok("store ls --json s")).unwrap();
    assert_eq!(listed[0]["names"], serde_json::json!(["vol"]));
    let said = place.fails("store disk s vol 4M");
    assert!(said.contains("s#vol has 16.0 MiB, 4.0 MiB is less"), "{said}");
    assert!(place.fails("store disk s odd 1000").contains("whole sectors"));
    for name in ["new", "17", "a/b", "a#b", "a@b"] {
        let refused = place.command(&format!("store disk s {name} 8M")).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{name}");
    }
    let said = place.fails("info s#vol");
    assert!(said.contains("not an ext volume"), "{said}");
    let said = place.fails("ls s#other:/");
    assert!(said.contains("s has no disk other; draconis store disk s other SIZE"), "{said}");
    assert!(place.fails("store get s other -").contains("there is no disk other"));
    let said = place.fails("mount s#vol .");
    assert!(said.contains("s#vol: not an ext volume"), "{said}");
    place.ok("store rm s vol");
    assert_eq!(place.ok("store ls s"), "");
    place.ok("store rm -f s vol");
    // By number, too, which removes the name.
    place.ok("store disk s vol 8M");
    place.ok("store rm s 2");
    assert_eq!(place.ok("store ls s"), "");
    place.ok("store check s");
}

#[test]
fn every_command_works_on_a_disk_in_a_store() {
    let place = TestStore::new();
    let tree = place.path("tree");
    tree_of_sources(&tree);
    for (kind, name) in [("ext2", "two"), ("ext4", "four")] {
        let at = |line: &str| line.replace('@', &format!("s#{name}"));
        // A missing disk is created, as a file would be.
        place.ok(&at(&format!("format -t {kind} @ 48M")));
        place.judge(name);
        let said = place.fails(&at("format @"));
        assert!(said.contains("holds an ext file system; --force overwrites it"), "{said}");
        place.ok(&at("put -r tree @:/"));
        place.judge(name);
        place.ok(&at("get -r @:/tree back"));
        same(&scan_tree(&tree, LOST), &scan_tree(&place.path("back"), LOST));
        std::fs::remove_dir_all(place.path("back")).unwrap();
        place.ok(&at("mkdir @:/made"));
        place.ok(&at("mv @:/made @:/moved"));
        place.ok(&at("ln -s moved @:/link"));
        place.ok(&at("touch @:/touched"));
        place.ok(&at("truncate -s 5000 @:/touched"));
        place.ok(&at("chmod 600 @:/touched"));
        place.ok(&at("chown 5:6 @:/touched"));
        place.ok(&at("cp -r @:/tree @:/copy"));
        place.judge(name);
        assert_eq!(place.ok(&at("ls @:/")), "copy\nlink\nlost+found\nmoved\ntouched\ntree\n");
        assert!(place.ok(&at("stat @:/touched")).contains("5000"));
        assert!(place.ok(&at("tree @:/moved")).contains("moved"));
        assert_eq!(place.ok(&at("cat @:/touched")).len(), 5000);
        place.ok(&at("rm -r @:/copy"));
        place.ok(&at("set-label @ named"));
        place.ok(&at("tune -c 20 @"));
        assert!(place.ok(&at("info @")).contains("named"));
        place.judge(name);
        place.ok(&at("grow @ 80M"));
        place.judge(name);
        place.ok(&at("shrink @ 30M"));
        place.judge(name);
        place.ok(&at("grow @ 48M"));
        place.judge(name);
    }
    // From one disk to another: the store is opened once.
    place.ok("cp -a s#two:/tree s#four:/from-two");
    place.judge("four");
    place.ok("get -r s#four:/from-two back");
    same(&scan_tree(&tree, LOST), &scan_tree(&place.path("back"), LOST));
    // An archive in a file, so that the store is not read and written at once.
    let archive = std::fs::File::create(place.path("tar")).unwrap();
    let made = place.command("tar s#two:/tree").stdout(archive).status().unwrap();
    assert!(made.success());
    let archive = std::fs::File::open(place.path("tar")).unwrap();
    let unpacked = place.command("untar s#two:/moved").stdin(Stdio::from(archive)).status();
    assert!(unpacked.unwrap().success());
    place.judge("two");
}

#[test]
fn a_raw_image_goes_in_and_comes_out_with_its_holes() {
    use std::os::unix::fs::MetadataExt;
    let place = TestStore::new();
    tree_of_sources(&place.path("tree"));
    // Longer than the store, and than one group.
    place.ok("format -t ext2 --from tree raw.img 100M");
    place.ok("store put s vol raw.img");
    place.judge("vol");
    let same = |one: &Path, other: &Path| {
        let bytes = std::fs::read(one).unwrap() == std::fs::read(other).unwrap();
        assert!(bytes, "{} and {}", one.display(), other.display());
    };
    same(&place.path("raw.img"), &place.path("judged.img"));
    let held = std::fs::metadata(place.path("judged.img")).unwrap().blocks() * 512;
    assert!(held < 20 << 20, "{held} bytes");
    // Over existing contents.
    place.ok("format -t ext4 --from tree other.img 24M");
    place.ok("store put s vol other.img");
    place.judge("vol");
    same(&place.path("other.img"), &place.path("judged.img"));
    let listed = place.ok("store ls s");
    assert!(listed.starts_with(&format!("1\t{}\t", 24 << 20)) && listed.ends_with("\tvol\n"));
}

#[test]
fn a_store_that_is_changed_has_no_other_user_and_readers_share_it() {
    let place = TestStore::new();
    place.ok("format -t ext2 s#vol 8M");
    let file = std::fs::File::open(place.path("s")).unwrap();
    draconis_device::lock_file(&file, draconis_device::LockMode::Shared).unwrap();
    place.ok("ls s#vol:/");
    assert!(place.fails("mkdir s#vol:/x").contains("s is in use"));
    drop(file);
    let file = std::fs::File::open(place.path("s")).unwrap();
    draconis_device::lock_file(&file, draconis_device::LockMode::Exclusive).unwrap();
    assert!(place.fails("ls s#vol:/").contains("s is in use"));
    drop(file);
    place.ok("mkdir s#vol:/x");
}

#[test]
fn a_full_store_says_so_and_what_was_there_stays() {
    let place = TestStore::new();
    // Twice as long as the store.
    place.ok("format -t ext2 s#vol 400M");
    std::fs::write(place.path("small"), b"kept").unwrap();
    place.ok("put small s#vol:/");
    let mut dice = draconis_device::Random::new(3);
    let noise: Vec<u8> = (0..25 << 20).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    std::fs::write(place.path("large"), noise).unwrap();
    let said = place.fails("put large s#vol:/");
    assert!(said.contains("the store is full") && said.contains("are free"), "{said}");
    assert_eq!(place.ok("cat s#vol:/small"), "kept");
    place.judge("vol");
}
