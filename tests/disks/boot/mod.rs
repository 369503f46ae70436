//! Root file systems of `draconis format`, booted in a virtual machine: the guest must see the
//! given files, and we must see the guest's changes.
//!
//! The guest's kernel writes to a virtual disk, whose power can be cut at any
//! moment.

mod exports;
mod machine;
mod root;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::volume::{run_e2fsck, run_ok};
use crate::common::{Draconis, has_tool, wait_until};
use machine::{DiskOption, MachineRequirements};
use root::{EntryFacts, RootArchive};

/// Creates a volume with a root file system.
fn make_root_volume(draconis: &Draconis, machine: &MachineRequirements, kind: &str) -> PathBuf {
    let image = draconis.path("root.img");
    let tar = RootArchive::new(machine).write(&draconis.path("root.tar"));
    draconis.run_ok(["format", "-t", kind, "--from", &tar, image.to_str().unwrap(), "48M"]);
    run_e2fsck(&image);
    image
}

/// Asserts that the guest's view of `/given` equals the archive.
fn assert_guest_sees_expected_entries(draconis: &Draconis, image: &Path) {
    let report = draconis.run_ok(["cat", &format!("{}:/report/given", image.display())]);
    EntryFacts::parse_guest_report(&report).assert_same(&EntryFacts::expected());
    let denied = draconis.run_ok(["cat", &format!("{}:/report/denied", image.display())]);
    assert_eq!(denied, "own\ndenied\n");
}

/// Asserts that we see names, types, modes, links, owners and contents that the guest made.
fn assert_volume_holds_guest_changes(draconis: &Draconis, image: &Path) {
    draconis.run_ok(["check", image.to_str().unwrap()]);
    let of = |path: &str| format!("{}:{path}", image.display());
    let told = EntryFacts::parse_guest_report(&draconis.run_ok(["cat", &of("/report/made")]));
    assert!(told.0.len() > 250, "{}", told.0.len());
    told.assert_same(&EntryFacts::parse_ls_json(&draconis.run_ok([
        "ls",
        "-R",
        "--json",
        &of("/made"),
    ])));
    let copy = draconis.make_dir("copy");
    let place = draconis.path("copy/made");
    draconis.run_ok(["get", "-r", &of("/made"), place.to_str().unwrap()]);
    draconis.run_ok(["get", &of("/report/sums"), copy.join("sums").to_str().unwrap()]);
    run_ok(Command::new("md5sum").args(["--quiet", "-c", "sums"]).current_dir(&copy));
    std::fs::remove_dir_all(copy).unwrap();
}

#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn ext2_guest_shuts_down_cleanly() {
    let Some(machine) = MachineRequirements::find_requirements("booting from ext2") else { return };
    let draconis = Draconis::new();
    let image = make_root_volume(&draconis, &machine, "ext2");
    machine.boot(&draconis, &DiskOption::raw_disk(&image, "ext2")).wait_for_power_off();
    run_e2fsck(&image);
    assert_guest_sees_expected_entries(&draconis, &image);
    assert_volume_holds_guest_changes(&draconis, &image);
}

#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn killed_ext4_guest_boots_again() {
    let Some(machine) = MachineRequirements::find_requirements("booting from ext4") else { return };
    let draconis = Draconis::new();
    let image = make_root_volume(&draconis, &machine, "ext4");
    machine.boot(&draconis, &DiskOption::raw_disk(&image, "ext4")).cut_power_after_word("SYNCED");
    // The journal has the last changes: reads see them, and the first change replays it.
    let info = draconis.run_ok(["info", image.to_str().unwrap()]);
    assert!(info.contains("needs_recovery"), "{info}");
    assert_guest_sees_expected_entries(&draconis, &image);
    assert_volume_holds_guest_changes(&draconis, &image);
    let letter = draconis.path("letter");
    std::fs::write(&letter, "from outside\n").unwrap();
    let into = format!("{}:/given/letter", image.display());
    draconis.run_ok(["put", letter.to_str().unwrap(), &into]);
    draconis.run_ok(["rm", "-r", &format!("{}:/made", image.display())]);
    run_e2fsck(&image);
    // The second boot makes the same changes again, and finds the letter.
    machine.boot(&draconis, &DiskOption::raw_disk(&image, "ext4")).wait_for_power_off();
    run_e2fsck(&image);
    assert_volume_holds_guest_changes(&draconis, &image);
    let told = draconis.run_ok(["cat", &format!("{}:/report/letter", image.display())]);
    assert_eq!(told, "from outside\n");
}

/// Starts an export of `disk` at a vhost-user socket, and waits until it is ready.
fn start_vhost_user(draconis: &Draconis, socket: &Path, disk: &Path) -> Child {
    let mut export = draconis.command();
    export.args(["export", "--vhost-user"]).arg(socket).arg(disk);
    let mut export = export.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(export.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(": vhost-user /"), "{line}");
    export
}

/// The guest sees a pause, and no error, when its back end is killed and another one follows.
#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn guest_boots_from_vhost_user_exports_that_are_killed() {
    let test = "booting from a vhost-user export";
    let Some(machine) = MachineRequirements::find_requirements(test) else { return };
    let draconis = Draconis::new();
    let image = make_root_volume(&draconis, &machine, "ext4");
    let socket = draconis.path("root.sock");
    let mut export = start_vhost_user(&draconis, &socket, &image);
    let mut guest = machine.boot(&draconis, &DiskOption::vhost_user(&socket, "ext4"));
    // QEMU gives a disk up whose back end dies while the guest starts to use it.
    guest.wait_for_word("STARTED");
    for _ in 0..4 {
        wait_until("the guest uses the export", || {
            let export = &draconis.status()["exports"][0]["exports"][0];
            let bytes = |what: &str| export[what].as_u64().unwrap_or(0);
            bytes("read_bytes") + bytes("written_bytes") > 0 || guest.has_ended()
        });
        draconis_testkit::wait::pause("the kill comes at any moment", Duration::from_millis(100));
        export.kill().unwrap();
        export.wait().unwrap();
        export = start_vhost_user(&draconis, &socket, &image);
    }
    guest.wait_for_power_off();
    let pid = rustix::process::Pid::from_child(&export);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(export.wait().unwrap().success());
    run_e2fsck(&image);
    assert_guest_sees_expected_entries(&draconis, &image);
    assert_volume_holds_guest_changes(&draconis, &image);
}

#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn guest_boots_from_qcow2_partition() {
    let Some(machine) = MachineRequirements::find_requirements("booting from a partition") else {
        return;
    };
    let test = "booting from a partition";
    if !has_tool(test, "qemu-img") || !has_tool(test, "sfdisk") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_root_volume(&draconis, &machine, "ext4");
    let disk = draconis.path("disk.qcow2");
    root::make_partitioned_qcow2(&draconis, &image, &disk);
    machine.boot(&draconis, &DiskOption::partition_of_qcow2(&disk, "ext4")).wait_for_power_off();
    assert_guest_sees_expected_entries(&draconis, &disk);
    assert_volume_holds_guest_changes(&draconis, &disk);
    let raw = draconis.path("disk.raw");
    run_ok(Command::new("qemu-img").args(["convert", "-O", "raw"]).arg(&disk).arg(&raw));
    let alone = draconis.path("volume.raw");
    std::fs::write(&alone, &std::fs::read(&raw).unwrap()[root::PARTITION_OFFSET..][..48 << 20])
        .unwrap();
    run_e2fsck(&alone);
}
