//! Disks in a store as images: every command accepts `STORE#NAME`; `store get` exports them for
//! `e2fsck`.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{
    Draconis, IgnoredProperties, assert_same_trees, has_tool, make_source_tree, scan_tree,
};

const PROFILE_JSON: &str =
    r#"{"layout": "cow", "page_bytes": 4096, "segment_bytes": 262144, "queue_depth": 8}"#;

/// Properties that `get` cannot restore.
const UNARCHIVED_PROPERTIES: IgnoredProperties =
    IgnoredProperties { what_a_copy_loses: true, fractions: true };

/// A working directory with a store `s` of 192 MiB.
struct TestStore {
    draconis: Draconis,
}

impl TestStore {
    fn new() -> Self {
        let draconis = Draconis::new();
        std::fs::write(draconis.path("profile"), PROFILE_JSON).unwrap();
        let place = Self { draconis };
        place.run_ok("store create s --size 192M --sparse --profile profile");
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

    fn run_ok(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{line}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn run_failing(&self, line: &str) -> String {
        let output = self.command(line).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {errors}");
        errors
    }

    /// Checks a disk with our check and `e2fsck`, and the store.
    fn check_disk(&self, name: &str) {
        self.run_ok(&format!("check s#{name}"));
        self.run_ok(&format!("store get s {name} judged.img"));
        self.run_ok("store check s");
        if has_tool("disks in a store", "e2fsck") {
            common::volume::run_e2fsck(&self.path("judged.img"));
        }
    }
}

#[test]
fn disk_create_list_grow_remove() {
    let place = TestStore::new();
    assert_eq!(place.run_ok("store disk s vol 8M"), "s#vol: 8.0 MiB\n");
    assert_eq!(place.run_ok("store disk s vol 16M"), "s#vol: 16.0 MiB, was 8.0 MiB\n");
    assert_eq!(place.run_ok("store ls s"), "1\t16777216\t0\tvol\n");
    let listed: serde_json::Value =
        serde_json::from_str(&place.run_ok("store ls --json s")).unwrap();
    assert_eq!(listed[0]["names"], serde_json::json!(["vol"]));
    let errors = place.run_failing("store disk s vol 4M");
    assert!(errors.contains("s#vol has 16.0 MiB, 4.0 MiB is less"), "{errors}");
    assert!(place.run_failing("store disk s odd 1000").contains("whole sectors"));
    for name in ["new", "17", "a/b", "a#b", "a@b"] {
        let refused = place.command(&format!("store disk s {name} 8M")).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{name}");
    }
    let errors = place.run_failing("info s#vol");
    assert!(errors.contains("not an ext volume"), "{errors}");
    let errors = place.run_failing("ls s#other:/");
    assert!(errors.contains("s has no disk other; draconis store disk s other SIZE"), "{errors}");
    assert!(place.run_failing("store get s other -").contains("there is no disk other"));
    let errors = place.run_failing("mount s#vol .");
    assert!(errors.contains("s#vol: not an ext volume"), "{errors}");
    place.run_ok("store rm s vol");
    assert_eq!(place.run_ok("store ls s"), "");
    place.run_ok("store rm -f s vol");
    // By number, too, which removes the name.
    place.run_ok("store disk s vol 8M");
    place.run_ok("store rm s 2");
    assert_eq!(place.run_ok("store ls s"), "");
    place.run_ok("store check s");
}

#[test]
fn volume_commands_work_on_store_disk() {
    let place = TestStore::new();
    let tree = place.path("tree");
    make_source_tree(&tree);
    for (kind, name) in [("ext2", "two"), ("ext4", "four")] {
        let at = |line: &str| line.replace('@', &format!("s#{name}"));
        // A missing disk is created, as a file would be.
        place.run_ok(&at(&format!("format -t {kind} @ 48M")));
        place.check_disk(name);
        let errors = place.run_failing(&at("format @"));
        assert!(errors.contains("holds an ext file system; --force overwrites it"), "{errors}");
        place.run_ok(&at("put -r tree @:/"));
        place.check_disk(name);
        place.run_ok(&at("get -r @:/tree back"));
        assert_same_trees(
            &scan_tree(&tree, UNARCHIVED_PROPERTIES),
            &scan_tree(&place.path("back"), UNARCHIVED_PROPERTIES),
        );
        std::fs::remove_dir_all(place.path("back")).unwrap();
        place.run_ok(&at("mkdir @:/made"));
        place.run_ok(&at("mv @:/made @:/moved"));
        place.run_ok(&at("ln -s moved @:/link"));
        place.run_ok(&at("touch @:/touched"));
        place.run_ok(&at("truncate -s 5000 @:/touched"));
        place.run_ok(&at("chmod 600 @:/touched"));
        place.run_ok(&at("chown 5:6 @:/touched"));
        place.run_ok(&at("cp -r @:/tree @:/copy"));
        place.check_disk(name);
        assert_eq!(place.run_ok(&at("ls @:/")), "copy\nlink\nlost+found\nmoved\ntouched\ntree\n");
        assert!(place.run_ok(&at("stat @:/touched")).contains("5000"));
        assert!(place.run_ok(&at("tree @:/moved")).contains("moved"));
        assert_eq!(place.run_ok(&at("cat @:/touched")).len(), 5000);
        place.run_ok(&at("rm -r @:/copy"));
        place.run_ok(&at("set-label @ named"));
        place.run_ok(&at("tune -c 20 @"));
        assert!(place.run_ok(&at("info @")).contains("named"));
        place.check_disk(name);
        place.run_ok(&at("grow @ 80M"));
        place.check_disk(name);
        place.run_ok(&at("shrink @ 30M"));
        place.check_disk(name);
        place.run_ok(&at("grow @ 48M"));
        place.check_disk(name);
    }
    // From one disk to another: the store is opened once.
    place.run_ok("cp -a s#two:/tree s#four:/from-two");
    place.check_disk("four");
    place.run_ok("get -r s#four:/from-two back");
    assert_same_trees(
        &scan_tree(&tree, UNARCHIVED_PROPERTIES),
        &scan_tree(&place.path("back"), UNARCHIVED_PROPERTIES),
    );
    // An archive in a file, so that the store is not read and written at once.
    let archive = std::fs::File::create(place.path("tar")).unwrap();
    let made = place.command("tar s#two:/tree").stdout(archive).status().unwrap();
    assert!(made.success());
    let archive = std::fs::File::open(place.path("tar")).unwrap();
    let unpacked = place.command("untar s#two:/moved").stdin(Stdio::from(archive)).status();
    assert!(unpacked.unwrap().success());
    place.check_disk("two");
}

#[test]
fn raw_image_round_trips_with_holes() {
    use std::os::unix::fs::MetadataExt;
    let place = TestStore::new();
    make_source_tree(&place.path("tree"));
    // Longer than the store, and than one group.
    place.run_ok("format -t ext2 --from tree raw.img 100M");
    place.run_ok("store put s vol raw.img");
    place.check_disk("vol");
    let same = |one: &Path, other: &Path| {
        let bytes = std::fs::read(one).unwrap() == std::fs::read(other).unwrap();
        assert!(bytes, "{} and {}", one.display(), other.display());
    };
    same(&place.path("raw.img"), &place.path("judged.img"));
    let held = std::fs::metadata(place.path("judged.img")).unwrap().blocks() * 512;
    assert!(held < 20 << 20, "{held} bytes");
    // Over existing contents.
    place.run_ok("format -t ext4 --from tree other.img 24M");
    place.run_ok("store put s vol other.img");
    place.check_disk("vol");
    same(&place.path("other.img"), &place.path("judged.img"));
    let listed = place.run_ok("store ls s");
    assert!(listed.starts_with(&format!("1\t{}\t", 24 << 20)) && listed.ends_with("\tvol\n"));
}

#[test]
fn store_writer_is_exclusive_and_readers_share() {
    let place = TestStore::new();
    place.run_ok("format -t ext2 s#vol 8M");
    let file = std::fs::File::open(place.path("s")).unwrap();
    draconis_device::lock_file(&file, draconis_device::LockMode::Shared).unwrap();
    place.run_ok("ls s#vol:/");
    assert!(place.run_failing("mkdir s#vol:/x").contains("s is in use"));
    drop(file);
    let file = std::fs::File::open(place.path("s")).unwrap();
    draconis_device::lock_file(&file, draconis_device::LockMode::Exclusive).unwrap();
    assert!(place.run_failing("ls s#vol:/").contains("s is in use"));
    drop(file);
    place.run_ok("mkdir s#vol:/x");
}

#[test]
fn full_store_reports_no_space_and_keeps_data() {
    let place = TestStore::new();
    // Twice as long as the store.
    place.run_ok("format -t ext2 s#vol 400M");
    std::fs::write(place.path("small"), b"kept").unwrap();
    place.run_ok("put small s#vol:/");
    let mut dice = draconis_device::Random::new(3);
    let noise: Vec<u8> = (0..25 << 20).flat_map(|_| dice.next_u64().to_le_bytes()).collect();
    std::fs::write(place.path("large"), noise).unwrap();
    let errors = place.run_failing("put large s#vol:/");
    assert!(errors.contains("the store is full") && errors.contains("are free"), "{errors}");
    assert_eq!(place.run_ok("cat s#vol:/small"), "kept");
    place.check_disk("vol");
}
