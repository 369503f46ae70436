//! Guests whose root disk is exported: by NBD and by vhost-user, from images of every kind, and while
//! the export is killed about once a second.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use draconis_device::Random;

use crate::boot::machine::{DiskDoor, DiskOption, MachineRequirements, RunningGuest};
use crate::boot::root::RootArchive;
use crate::boot::{assert_guest_sees_expected_entries, assert_volume_holds_guest_changes};
use draconis_testkit::wait;

use crate::common::bucket::TestBucket;
use crate::common::export::{Export, SimpleClient, text};
use crate::common::volume::{run_e2fsck, run_ok};
use crate::common::{Draconis, has_tool, report_skipped};

/// Length of the root disk, in bytes.
const DISK_BYTES: usize = 48 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ImageKind {
    Raw,
    Qcow2,
    Store,
    DirectoryBucket,
    ServerBucket,
}

/// An image with a root file system, and what exports it.
struct ExportedRoot {
    place: TestBucket,
    image: String,
    door: DiskDoor,
}

impl ExportedRoot {
    /// Creates the image; `None` if a program for it is missing.
    fn create(kind: ImageKind, door: DiskDoor, root: RootArchive) -> Option<Self> {
        let place = match kind {
            ImageKind::ServerBucket => TestBucket::server_bucket()?,
            _ => TestBucket::directory_bucket(),
        };
        let draconis = &place.draconis;
        let image = match kind {
            ImageKind::Raw => text(&draconis.path("root.img")).to_owned(),
            ImageKind::Qcow2 => {
                if !has_tool("a guest of a qcow2 image", "qemu-img") {
                    return None;
                }
                text(&draconis.path("root.qcow2")).to_owned()
            }
            ImageKind::Store => {
                let store = text(&draconis.path("s")).to_owned();
                let create = ["store", "create", &store, "--size", "256M", "--layout", "cow"];
                draconis.run_ok([&create[..], &["--sparse"]].concat());
                format!("{store}#root")
            }
            ImageKind::DirectoryBucket | ImageKind::ServerBucket => {
                if kind == ImageKind::DirectoryBucket {
                    draconis.make_dir("bucket");
                }
                place.run_ok(&["store", "create", &place.address, "--size", "256M"]);
                place.disk_name("root")
            }
        };
        let tar = root.write(&draconis.path("root.tar"));
        let raw = text(&draconis.path("root.img")).to_owned();
        let volume = if kind == ImageKind::Qcow2 { &raw } else { &image };
        place.run_ok(&["format", "-t", "ext4", "--from", &tar, volume, "48M"]);
        if kind == ImageKind::Qcow2 {
            let mut convert = Command::new("qemu-img");
            run_ok(convert.args(["convert", "-f", "raw", "-O", "qcow2", &raw, &image]));
        }
        Some(Self { place, image, door })
    }

    fn socket(&self) -> PathBuf {
        self.place.draconis.path("root.sock")
    }

    /// Starts an export of the image, and waits until it is ready.
    fn export(&self) -> Export {
        let socket = text(&self.socket()).to_owned();
        let socket = match self.door {
            DiskDoor::VhostUser => ["--vhost-user".into(), socket],
            _ => ["--nbd".into(), format!("unix:{socket}")],
        };
        let mut command = self.place.command(&[]);
        command.stderr(std::process::Stdio::inherit());
        Export::start(command, &[&socket[0], &socket[1], &self.image])
    }

    fn disk(&self) -> DiskOption {
        DiskOption::behind(self.door, &self.socket(), "ext4")
    }

    /// Copies the volume out, through another export, and checks it.
    fn copy_out(&self) -> PathBuf {
        let socket = self.place.draconis.path("copy.sock");
        let export = Export::start(
            self.place.command(&[]),
            &["-r", "--nbd", &format!("unix:{}", socket.display()), &self.image],
        );
        let mut client = SimpleClient::connect(&socket);
        let pieces = (0..DISK_BYTES >> 20).map(|nth| client.read((nth as u64) << 20, 1 << 20));
        let copy = self.place.draconis.path("copy.img");
        std::fs::write(&copy, pieces.collect::<Vec<_>>().concat()).unwrap();
        drop(client);
        export.end();
        run_e2fsck(&copy);
        if self.image.ends_with(".qcow2") {
            let check = Command::new("qemu-img").args(["check", "-q", &self.image]).status();
            // Clusters are lost when an export is killed.
            assert!(matches!(check.unwrap().code(), Some(0 | 3)));
        } else if let Some((store, _)) = self.image.split_once('#') {
            self.place.run_ok(&["store", "check", store]);
        }
        copy
    }
}

/// A guest boots from an export, changes its root and shuts down.
fn boot_from(kind: ImageKind, door: DiskDoor) {
    let test = "booting from an export";
    let Some(machine) = MachineRequirements::find_requirements(test) else { return };
    let root = RootArchive::new(&machine);
    let Some(exported) = ExportedRoot::create(kind, door, root) else { return };
    let draconis = &exported.place.draconis;
    let export = exported.export();
    let (_, time) = wait::measure(|| machine.boot(draconis, &exported.disk()).wait_for_power_off());
    println!("{kind:?} by {door:?}: {:.1} s", time.as_secs_f64());
    let told = &draconis.status()["exports"][0]["exports"][0];
    assert!(told["written_bytes"].as_u64() > Some(4 << 20), "{told}");
    assert_eq!(told["last_error"], serde_json::Value::Null);
    export.end();
    let copy = exported.copy_out();
    assert_guest_sees_expected_entries(draconis, &copy);
    assert_volume_holds_guest_changes(draconis, &copy);
}

#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn guest_boots_from_bucket_by_nbd() {
    boot_from(ImageKind::DirectoryBucket, DiskDoor::Nbd);
}

#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn guest_boots_from_qcow2_by_vhost_user() {
    boot_from(ImageKind::Qcow2, DiskDoor::VhostUser);
}

#[test]
#[ignore = "tools: qemu-system-x86_64; a minute"]
fn guests_boot_from_every_kind() {
    for door in [DiskDoor::Nbd, DiskDoor::VhostUser] {
        use ImageKind::*;
        for kind in [Raw, Qcow2, Store, DirectoryBucket, ServerBucket] {
            boot_from(kind, door);
        }
    }
}

/// Compiles the verifier; `None` if there is no compiler.
fn build_verifier(draconis: &Draconis) -> Option<Vec<u8>> {
    let program = draconis.path("verifier");
    let compiler = std::env::var("RUSTC").unwrap_or("rustc".into());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/disks/boot/verifier.rs");
    let mut rustc = Command::new(compiler);
    rustc.args(["--edition", "2024", "-O", "-C", "target-feature=+crt-static"]);
    rustc.args(["-C", "panic=abort", "-C", "strip=symbols", "-o"]).arg(&program).arg(source);
    if rustc.output().is_ok_and(|output| output.status.success()) {
        return Some(std::fs::read(program).unwrap());
    }
    report_skipped("guests that verify their disk need rustc and a static C library");
    None
}

/// Seconds that a guest writes and verifies: those of `DRACONIS_GUEST_SECONDS`, or `default`.
fn verified_seconds(default: u64) -> u64 {
    std::env::var("DRACONIS_GUEST_SECONDS").map_or(default, |text| text.parse().unwrap())
}

/// Returns true once the guest has verified everything; false after some milliseconds.
fn is_done(guest: &mut RunningGuest, milliseconds: u64) -> bool {
    guest.output().contains("VERIFIED")
        || guest.says_within("VERIFIED", Duration::from_millis(milliseconds))
}

/// A guest writes and verifies for some time while its export is killed about once a second.
fn verify_with_kills(kind: ImageKind, door: DiskDoor) {
    let test = "a guest whose export is killed";
    let Some(machine) = MachineRequirements::find_requirements(test) else { return };
    let scratch = Draconis::new();
    let Some(verifier) = build_verifier(&scratch) else { return };
    let seconds = verified_seconds(12);
    let root = RootArchive::new(&machine).with_verifier(&verifier, seconds);
    let Some(exported) = ExportedRoot::create(kind, door, root) else { return };
    let draconis = &exported.place.draconis;
    let mut export = exported.export();
    let mut guest = machine.boot(draconis, &exported.disk());
    guest.wait_for_word("VERIFYING");
    let clock = wait::HangClock::start();
    let (mut random, mut kills) = (Random::new(seconds), 0);
    // The guest works for some time between two kills, however long its client takes to come back.
    // A guest that has ended does not come back.
    while !is_done(&mut guest, 200 + random.next_below(800)) {
        assert!(!guest.output().contains("WRONG"), "{}", guest.output());
        export.child.kill().unwrap();
        export.child.wait().unwrap();
        export = exported.export();
        kills += 1;
        let death = wait::HangClock::start();
        let is_back = || draconis.status()["exports"][0]["exports"][0]["clients"] == 1;
        while !is_back() && !is_done(&mut guest, 100) {
            death.assert_not_hung(format_args!("not back: {}", guest.output()));
        }
    }
    let line = guest.output().lines().rfind(|line| line.starts_with("VERIFIED")).unwrap();
    println!("{kind:?} by {door:?}: {kills} kills in {:.0?}: {line}", clock.elapsed());
    let output = guest.wait_for_power_off();
    assert!(!output.contains("WRONG"), "{output}");
    // Usually one for each 1.7 s; a busy machine takes longer to start an export.
    assert!(kills > 0, "the export was not killed");
    export.end();
    let copy = exported.copy_out();
    let of = |path: &str| format!("{}:{path}", copy.display());
    let sum = draconis.run_ok(["cat", &of("/report/sum")]);
    let data = draconis.path("data");
    draconis.run_ok(["get", &of("/data"), text(&data)]);
    let found = Command::new("md5sum").arg(&data).output().unwrap().stdout;
    assert_eq!(sum.split(' ').next(), String::from_utf8(found).unwrap().split(' ').next());
}

#[test]
#[ignore = "tools: qemu-system-x86_64"]
fn guest_verifies_store_of_killed_vhost_user_exports() {
    verify_with_kills(ImageKind::Store, DiskDoor::VhostUser);
}

#[test]
#[ignore = "tools: qemu-system-x86_64; seconds, or DRACONIS_GUEST_SECONDS"]
fn guest_verifies_file_of_killed_vhost_user_exports() {
    verify_with_kills(ImageKind::Raw, DiskDoor::VhostUser);
}

#[test]
#[ignore = "tools: qemu-system-x86_64; seconds, or DRACONIS_GUEST_SECONDS"]
fn guest_verifies_file_of_killed_nbd_exports() {
    verify_with_kills(ImageKind::Raw, DiskDoor::Nbd);
}

/// Images that lose answered writes with their process, unless the guest has no write cache.
#[test]
#[ignore = "tools: qemu-system-x86_64; a minute, or DRACONIS_GUEST_SECONDS each"]
fn guest_verifies_other_images_of_killed_exports() {
    verify_with_kills(ImageKind::Store, DiskDoor::NbdWithoutCache);
    verify_with_kills(ImageKind::Qcow2, DiskDoor::NbdWithoutCache);
    verify_with_kills(ImageKind::Qcow2, DiskDoor::VhostUser);
    verify_with_kills(ImageKind::DirectoryBucket, DiskDoor::VhostUser);
}
