//! Root file systems of `draconis format`, booted in a virtual machine: the guest must see the
//! given files, and we must see the guest's changes.
//!
//! The guest's kernel writes to a virtual disk, whose power can be cut at any
//! moment.

#[path = "../common/mod.rs"]
mod common;

mod machine;
mod root;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::volume::{check, run};
use common::{Draconis, tool};
use machine::{Disk, Machine};
use root::{Facts, Root};

/// Creates a volume with a root file system.
fn volume(draconis: &Draconis, machine: &Machine, kind: &str) -> PathBuf {
    let image = draconis.path("root.img");
    let tar = Root::new(machine).write(&draconis.path("root.tar"));
    draconis.ok(["format", "-t", kind, "--from", &tar, image.to_str().unwrap(), "48M"]);
    check(&image);
    image
}

/// Asserts that the guest's view of `/given` equals the archive.
fn sees_what_was_given(draconis: &Draconis, image: &Path) {
    let report = draconis.ok(["cat", &format!("{}:/report/given", image.display())]);
    Facts::of_guest(&report).same(&Facts::given());
    let denied = draconis.ok(["cat", &format!("{}:/report/denied", image.display())]);
    assert_eq!(denied, "own\ndenied\n");
}

/// Asserts that we see names, types, modes, links, owners and contents that the guest made.
fn holds_what_was_made(draconis: &Draconis, image: &Path) {
    draconis.ok(["check", image.to_str().unwrap()]);
    let of = |path: &str| format!("{}:{path}", image.display());
    let told = Facts::of_guest(&draconis.ok(["cat", &of("/report/made")]));
    assert!(told.0.len() > 250, "{}", told.0.len());
    told.same(&Facts::of_listing(&draconis.ok(["ls", "-R", "--json", &of("/made")])));
    let copy = draconis.make_dir("copy");
    let place = draconis.path("copy/made");
    draconis.ok(["get", "-r", &of("/made"), place.to_str().unwrap()]);
    draconis.ok(["get", &of("/report/sums"), copy.join("sums").to_str().unwrap()]);
    run(Command::new("md5sum").args(["--quiet", "-c", "sums"]).current_dir(&copy));
    std::fs::remove_dir_all(copy).unwrap();
}

#[test]
fn a_guest_on_ext2_that_shuts_down() {
    let Some(machine) = Machine::find("booting from ext2") else { return };
    let draconis = Draconis::new();
    let image = volume(&draconis, &machine, "ext2");
    machine.boot(&draconis, &Disk::raw(&image, "ext2")).until_it_is_off();
    check(&image);
    sees_what_was_given(&draconis, &image);
    holds_what_was_made(&draconis, &image);
}

#[test]
fn a_guest_on_ext4_that_is_killed_and_boots_again() {
    let Some(machine) = Machine::find("booting from ext4") else { return };
    let draconis = Draconis::new();
    let image = volume(&draconis, &machine, "ext4");
    machine.boot(&draconis, &Disk::raw(&image, "ext4")).until_it_says("SYNCED");
    // The journal has the last changes: reads see them, and the first change replays it.
    let info = draconis.ok(["info", image.to_str().unwrap()]);
    assert!(info.contains("needs_recovery"), "{info}");
    sees_what_was_given(&draconis, &image);
    holds_what_was_made(&draconis, &image);
    let letter = draconis.path("letter");
    std::fs::write(&letter, "from outside\n").unwrap();
    let into = format!("{}:/given/letter", image.display());
    draconis.ok(["put", letter.to_str().unwrap(), &into]);
    draconis.ok(["rm", "-r", &format!("{}:/made", image.display())]);
    check(&image);
    // The second boot makes the same changes again, and finds the letter.
    machine.boot(&draconis, &Disk::raw(&image, "ext4")).until_it_is_off();
    check(&image);
    holds_what_was_made(&draconis, &image);
    let told = draconis.ok(["cat", &format!("{}:/report/letter", image.display())]);
    assert_eq!(told, "from outside\n");
}

#[test]
fn a_guest_on_a_partition_of_a_qcow2_disk() {
    let Some(machine) = Machine::find("booting from a partition") else { return };
    let test = "booting from a partition";
    if !tool(test, "qemu-img") || !tool(test, "sfdisk") {
        return;
    }
    let draconis = Draconis::new();
    let image = volume(&draconis, &machine, "ext4");
    let disk = draconis.path("disk.qcow2");
    root::partitioned(&draconis, &image, &disk);
    machine.boot(&draconis, &Disk::partition_of_qcow2(&disk, "ext4")).until_it_is_off();
    sees_what_was_given(&draconis, &disk);
    holds_what_was_made(&draconis, &disk);
    let raw = draconis.path("disk.raw");
    run(Command::new("qemu-img").args(["convert", "-O", "raw"]).arg(&disk).arg(&raw));
    let alone = draconis.path("volume.raw");
    std::fs::write(&alone, &std::fs::read(&raw).unwrap()[root::PARTITION_AT..][..48 << 20])
        .unwrap();
    check(&alone);
}
