//! Images exported by vhost-user, to a front end of our own.

#[path = "../../crates/vhost-user/tests/driver/mod.rs"]
mod driver;

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_tool, make_source_tree, mke2fs, wait_until};
use driver::*;

/// A running export.
struct Export {
    child: Child,
    about: serde_json::Value,
}

impl Export {
    fn start(draconis: &Draconis, arguments: &[&str]) -> Self {
        let mut command = draconis.command();
        command.args(["export", "--json", "--vhost-user"]).arg(socket(draconis)).args(arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let about = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{arguments:?}"));
        Self { child, about }
    }

    /// Ends the export, which must succeed.
    fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn socket(draconis: &Draconis) -> PathBuf {
    draconis.path("vm.sock")
}

fn connect(draconis: &Draconis, guest: Guest) -> Driver {
    let stream = UnixStream::connect(socket(draconis)).unwrap();
    Driver::connect(stream, guest, u64::MAX)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn sector(round: u32, head: u16) -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..4].copy_from_slice(&round.to_le_bytes());
    sector[4..6].copy_from_slice(&head.to_le_bytes());
    sector
}

#[test]
fn command_lines_are_checked() {
    let draconis = Draconis::new();
    std::fs::write(draconis.path("a.img"), vec![0; 1 << 20]).unwrap();
    let (image, path) = (draconis.path("a.img"), socket(&draconis));
    let errors = draconis.run_failing(["export", "--vhost-user", text(&path), text(&image), "b"]);
    assert!(errors.contains("one image"), "{errors}");
    let both = ["export", "--vhost-user", text(&path), "--nbd", "unix:a", text(&image)];
    assert_eq!(draconis.run(both).status.code(), Some(2));
    let run = ["export", "--vhost-user", text(&path), "--run", "exit 7", text(&image)];
    assert_eq!(draconis.run(run).status.code(), Some(7));
}

/// Creates a store with a disk of 4 MiB; returns its name.
fn make_store(draconis: &Draconis) -> String {
    let store = draconis.path("s");
    let store = text(&store);
    draconis.run_ok(["store", "create", store, "--size", "64M", "--layout", "cow", "--sparse"]);
    draconis.run_ok(["store", "disk", store, "vol", "4M"]);
    format!("{store}#vol")
}

/// Creates a qcow2 of 4 MiB, if qemu-img is installed.
fn make_qcow2(draconis: &Draconis) -> Option<PathBuf> {
    let image = has_tool("exporting a qcow2", "qemu-img").then(|| draconis.path("a.qcow2"))?;
    let create = ["create", "-q", "-f", "qcow2", text(&image), "4M"];
    assert!(Command::new("qemu-img").args(create).status().unwrap().success());
    Some(image)
}

/// Requests through the sandbox, to images of several kinds.
#[test]
#[ignore = "tools: qemu-img"]
fn images_of_every_kind_are_served() {
    let draconis = Draconis::new();
    let raw = draconis.path("a.img");
    std::fs::write(&raw, vec![7; 4 << 20]).unwrap();
    let mut images = vec![text(&raw).to_owned()];
    images.push(make_store(&draconis));
    images.extend(make_qcow2(&draconis).map(|image| text(&image).to_owned()));
    for image in &images {
        let export = Export::start(&draconis, &["--name", "serial", image]);
        assert_eq!(export.about["exports"][0]["vhost_user_socket"], text(&socket(&draconis)));
        assert_eq!(export.about["confinement"]["seccomp"], true);
        let mut driver = connect(&draconis, Guest::new());
        assert_eq!(driver.config(0, 8), 8192u64.to_le_bytes(), "{image}");
        let bytes: Vec<u8> = (0..65536u32).map(|at| (at % 253) as u8).collect();
        assert_eq!(driver.request(OUT, 1001, &bytes, 0).0, OK);
        assert_eq!(driver.request(FLUSH, 0, &[], 0).0, OK);
        assert_eq!(driver.request(READ, 1001, &[], 65536), (OK, bytes.clone()));
        assert_eq!(&driver.request(GET_ID, 0, &[], 20).1[..7], b"serial\0");
        // Another front end follows when this one has gone.
        drop(driver);
        let mut driver = connect(&draconis, Guest::new());
        assert_eq!(driver.request(READ, 1001, &[], 65536), (OK, bytes.clone()));
        drop(driver);
        export.end();
        let export = Export::start(&draconis, &["--read-only", image]);
        let mut driver = connect(&draconis, Guest::new());
        assert_ne!(driver.features & F_RO, 0);
        assert_eq!(driver.request(READ, 1001, &[], 65536), (OK, bytes));
        assert_eq!(driver.request(OUT, 0, &[0; 512], 0).0, IO_ERROR);
        drop(driver);
        export.end();
    }
}

/// Each request is answered once, whichever process has carried it out.
#[test]
#[ignore = "tools: qemu-img"]
fn successors_of_killed_exports_answer_what_is_in_flight() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![0; 4 << 20]).unwrap();
    kill_with_requests_in_flight(&draconis, text(&image), 20);
    kill_with_requests_in_flight(&draconis, &make_store(&draconis), 10);
    if let Some(image) = make_qcow2(&draconis) {
        kill_with_requests_in_flight(&draconis, text(&image), 10);
        let check = Command::new("qemu-img").args(["check", "-q"]).arg(&image).status().unwrap();
        // Leaked clusters are no damage.
        assert!(matches!(check.code(), Some(0 | 3)), "{check}");
    }
}

fn kill_with_requests_in_flight(draconis: &Draconis, image: &str, rounds: u32) {
    let heads = || (0..SIZE - 2).step_by(3);
    let mut guest = Guest::new();
    let mut interrupted = 0;
    for round in 0..rounds {
        let export = Export::start(draconis, &[image]);
        let mut driver = connect(draconis, guest);
        for head in heads() {
            let data = sector(round, head).repeat(64);
            driver.guest.put_request(head, OUT, u64::from(head) * 64, &data, 0);
        }
        driver.kick();
        draconis_testkit::wait::pause(
            "the kill comes at any moment",
            Duration::from_micros(u64::from(round % 10) * 150),
        );
        export.kill();
        let Driver { guest: left, .. } = driver;
        let export = Export::start(draconis, &[image]);
        let already = left.used_idx_in_ring().wrapping_sub(left.used_idx);
        interrupted += heads().count() - usize::from(already);
        let mut driver = connect(draconis, left);
        let mut answered: Vec<u16> = heads().map(|_| driver.wait_used().unwrap().0).collect();
        answered.sort_unstable();
        assert_eq!(answered, heads().collect::<Vec<_>>());
        assert!(heads().all(|head| driver.guest.status(head) == OK));
        draconis_testkit::wait::pause("a second answer would come now", Duration::from_millis(5));
        assert_eq!(driver.guest.take_used(), None, "nothing is answered twice");
        drop(driver.front_end);
        export.kill();
        // What was answered survives that, too.
        let export = Export::start(draconis, &[image]);
        let mut driver = connect(draconis, driver.guest);
        for head in heads() {
            let (status, bytes) = driver.request(READ, u64::from(head) * 64, &[], 64 * 512);
            assert_eq!(status, OK);
            assert!(bytes == sector(round, head).repeat(64), "{image}: {round} {head}");
        }
        guest = driver.guest;
        drop(driver.front_end);
        export.kill();
    }
    assert!(interrupted > rounds as usize, "only {interrupted} requests were in flight at a death");
}

/// Memory that is taken away ends the process of its front end; the image is as after a kill.
#[test]
fn truncated_memory_ends_the_export() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    make_source_tree(&tree);
    let image = draconis.path("a.img");
    mke2fs(&image, Some(&tree), &["-t", "ext4"], "32M");
    let mut export = Export::start(&draconis, &[text(&image)]);
    let mut driver = connect(&draconis, Guest::new());
    assert_eq!(driver.request(READ, 0, &[], 512).0, OK);
    driver.guest.file().set_len(0).unwrap();
    driver.kick();
    let status = export.child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS));
    run_e2fsck(&image);
    Export::start(&draconis, &[text(&image)]).end();
}

/// SIGTERM while requests are in flight: they are answered, or left in the ring for a successor.
#[test]
fn exports_end_under_load() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![0; 4 << 20]).unwrap();
    let export = Export::start(&draconis, &[text(&image)]);
    let mut driver = connect(&draconis, Guest::new());
    for head in (0..SIZE - 2).step_by(3) {
        driver.guest.put_request(head, OUT, u64::from(head), &[1; 512], 0);
    }
    driver.kick();
    export.end();
    let export = Export::start(&draconis, &["--once", text(&image)]);
    let mut driver = connect(&draconis, driver.guest);
    for _ in (0..SIZE - 2).step_by(3) {
        driver.wait_used().unwrap();
    }
    assert_eq!(driver.request(READ, 0, &[], 512), (OK, vec![1; 512]));
    drop(driver);
    let mut export = export;
    assert_eq!(export.child.wait().unwrap().code(), Some(0), "--once");
}

/// Returns the first export that `draconis status` lists.
fn status(draconis: &Draconis) -> serde_json::Value {
    let status = draconis.run_ok(["status", "--json"]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    status["exports"][0]["exports"][0].clone()
}

#[test]
fn status_lists_the_export() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![0; 4 << 20]).unwrap();
    let export = Export::start(&draconis, &["--name", "serial", text(&image)]);
    let mut driver = connect(&draconis, Guest::new());
    assert_eq!(driver.request(OUT, 0, &[1; 4096], 0).0, OK);
    assert_eq!(driver.request(READ, 0, &[], 1024).0, OK);
    assert_eq!(driver.request(READ, 8192, &[], 512).0, IO_ERROR, "past the end");
    let told = status(&draconis);
    assert_eq!(told["vhost_user_socket"], text(&socket(&draconis)));
    assert_eq!((&told["name"], &told["image"]), (&"serial".into(), &text(&image).into()));
    assert_eq!((&told["clients"], &told["requests"]), (&1.into(), &3.into()));
    assert_eq!((&told["read_bytes"], &told["written_bytes"]), (&1024.into(), &4096.into()));
    let shown = draconis.run_ok(["status"]);
    assert!(shown.contains("exported at vhost-user /") && shown.contains("1, 3 req"), "{shown}");
    drop(driver);
    wait_until("the front end is gone", || status(&draconis)["clients"] == 0);
    // A broken ring is an error.
    let mut driver = connect(&draconis, Guest::new());
    driver.guest.set_available_idx(1000);
    driver.kick();
    assert_eq!(driver.wait_used(), None);
    let told = status(&draconis);
    assert!(told["last_error"].as_str().unwrap().contains("queue 0 is broken"), "{told}");
    drop(driver);
    export.end();
}

#[test]
fn status_says_that_the_disk_is_full() {
    let draconis = Draconis::new();
    let store = draconis.path("small");
    let store = text(&store);
    draconis.run_ok(["store", "create", store, "--size", "16M", "--layout", "cow", "--sparse"]);
    draconis.run_ok(["store", "disk", store, "vol", "64M"]);
    let export = Export::start(&draconis, &[&format!("{store}#vol")]);
    let mut driver = connect(&draconis, Guest::new());
    let mut random = draconis_device::Random::new(1);
    let refused = (0..300u64).find(|nth| {
        let mut bytes = vec![0; 128 << 10];
        random.fill(&mut bytes);
        driver.request(OUT, nth * 256, &bytes, 0).0 == IO_ERROR
    });
    assert!(refused.is_some_and(|nth| nth > 20), "{refused:?}");
    assert_eq!(driver.request(READ, 0, &[], 512).0, OK);
    let told = status(&draconis);
    assert!(told["last_error"].as_str().unwrap().starts_with("it is full"), "{told}");
    drop(driver);
    drop(export);
    draconis.run_ok(["store", "check", store]);
}

/// The clone of a process: for all its front ends, removed at the end.
#[test]
fn clones_last_as_long_as_the_export() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    for wrong in [&["--clone", "-r"][..], &["--clone=a b"]] {
        let line = [&["export", "--vhost-user", "x"], wrong, &[&*disk]].concat();
        assert_eq!(draconis.run(&line).status.code(), Some(2), "{wrong:?}");
    }
    draconis.run_ok(["store", "snapshot", &disk, "v1"]);
    for of in [disk.clone(), format!("{disk}@v1")] {
        let export = Export::start(&draconis, &["--clone", &of]);
        assert_eq!(export.about["exports"][0]["clones"], format!("{disk}~1"));
        let mut driver = connect(&draconis, Guest::new());
        assert_eq!(driver.request(OUT, 8, &[1; 512], 0).0, OK);
        assert_eq!(status(&draconis)["clones"], serde_json::json!([format!("{disk}~1")]));
        let Driver { guest, front_end, .. } = driver;
        drop(front_end);
        let mut driver = connect(&draconis, guest);
        assert_eq!(driver.request(READ, 8, &[], 512), (OK, vec![1; 512]));
        drop(driver);
        export.end();
        assert_eq!(draconis.store_names("s"), ["vol", "vol@v1"]);
    }
    // The clone of a killed export is gone with it: its machine is refused, another is served.
    let export = Export::start(&draconis, &["--clone", &disk]);
    let mut driver = connect(&draconis, Guest::new());
    assert_eq!(driver.request(OUT, 8, &[1; 512], 0).0, OK);
    let Driver { guest, front_end, .. } = driver;
    export.kill();
    drop(front_end);
    let export = Export::start(&draconis, &["--clone", "--once", &disk]);
    let stream = UnixStream::connect(socket(&draconis)).unwrap();
    let goes_on = std::thread::spawn(|| drop(Driver::connect(stream, guest, u64::MAX)));
    assert!(goes_on.join().is_err());
    let mut export = export;
    assert_eq!(export.child.wait().unwrap().code(), Some(0), "--once");
    assert_eq!(draconis.store_names("s"), ["vol", "vol@v1"]);
    let export = Export::start(&draconis, &["--clone", &disk]);
    let mut driver = connect(&draconis, Guest::new());
    assert_eq!(driver.request(READ, 8, &[], 512), (OK, vec![0; 512]));
    drop(driver);
    export.end();
    draconis.run_ok(["store", "check", text(&draconis.path("s"))]);
}

/// A machine goes on with its clone after kills and after the end of an export.
#[test]
fn kept_clones_are_found_again() {
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let mut guest = Guest::new();
    for round in 1..=4u8 {
        let export = Export::start(&draconis, &["--clone=vm", &disk]);
        let clone = format!("{}#vm-1", draconis.path("s").display());
        assert_eq!(export.about["exports"][0]["clones"], clone);
        let mut driver = connect(&draconis, guest);
        for earlier in 1..round {
            let bytes = driver.request(READ, u64::from(earlier), &[], 512);
            assert_eq!(bytes, (OK, vec![earlier; 512]));
        }
        assert_eq!(driver.request(OUT, round.into(), &[round; 512], 0).0, OK);
        let Driver { guest: left, front_end, .. } = driver;
        drop(front_end);
        guest = left;
        if round % 2 == 0 {
            export.end()
        } else {
            export.kill()
        }
        assert_eq!(draconis.store_names("s"), ["vm-1", "vol", "vol@vm-1"]);
    }
    let export = Export::start(&draconis, &["-r", &disk]);
    let mut driver = connect(&draconis, Guest::new());
    assert_eq!(driver.request(READ, 1, &[], 512), (OK, vec![0; 512]));
    drop(driver);
    export.end();
    // Killed before anything of the clone was durable.
    let export = Export::start(&draconis, &["--clone=other", &disk]);
    export.kill();
    let export = Export::start(&draconis, &["--clone=other", &disk]);
    export.end();
    assert_eq!(draconis.store_names("s"), ["other-1", "vm-1", "vol", "vol@other-1", "vol@vm-1"]);
    draconis.run_ok(["store", "check", text(&draconis.path("s"))]);
}
