//! systemd integration: valid unit files, socket activation, notification.

use crate::common;

use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::{Draconis, has_fuse, has_tool, mke2fs, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// A process that is killed on drop.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn systemd_units_verify() {
    if !has_tool("unit files", "systemd-analyze") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/systemd");
    for unit in ["draconis.socket", "draconis.service", "draconis-mount@.service"] {
        let text = std::fs::read_to_string(from.join(unit)).unwrap();
        let text = text.replace("/usr/bin/draconis", crate::common::program());
        std::fs::write(dir.path().join(unit), text).unwrap();
    }
    for user in [&[][..], &["--user"]] {
        let mut command = Command::new("systemd-analyze");
        command.args(user).args(["--man=no", "verify"]);
        let units = ["draconis.socket", "draconis.service", "draconis-mount@srv-data.service"];
        command.args(units.map(|unit| dir.path().join(unit)));
        let output = command.env("XDG_RUNTIME_DIR", dir.path()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let of_ours: Vec<&str> = errors.lines().filter(|line| line.contains("draconis")).collect();
        assert_eq!(of_ours, Vec::<&str>::new(), "{user:?}");
    }
}

#[test]
fn manager_uses_passed_socket_and_notifies_readiness() {
    if !has_fuse("socket activation") || !has_tool("socket activation", "systemd-socket-activate") {
        return;
    }
    let draconis = Draconis::new();
    let run = draconis.make_dir("run");
    let socket = run.join("manager.sock");
    let told = UnixDatagram::bind(draconis.path("notify")).unwrap();
    told.set_read_timeout(Some(draconis_testkit::wait::HANG_BOUND)).unwrap();
    let mut command = Command::new("systemd-socket-activate");
    command.arg("--listen").arg(&socket);
    for (name, value) in
        [("DRACONIS_RUNTIME_DIR", &run), ("NOTIFY_SOCKET", &draconis.path("notify"))]
    {
        command.arg(format!("--setenv={name}={}", value.display()));
    }
    command.args([crate::common::program(), "serve"]);
    let mut manager = KillOnDrop(command.stderr(Stdio::null()).spawn().unwrap());
    // The first connection starts the manager.
    wait_until("the socket is there", || UnixStream::connect(&socket).is_ok());
    let mut text = [0; 64];
    let len = told.recv(&mut text).unwrap();
    assert_eq!(&text[..len], b"READY=1\n");
    let image = draconis.path("a.img");
    mke2fs(&image, None, &["-t", "ext2"], "8M");
    let at = draconis.mount(&image, "at", "rw");
    assert_eq!(draconis.status()["manager_pid"], manager.0.id());
    std::fs::write(at.join("new"), "x").unwrap();
    // As `systemctl stop` does.
    kill_process(Pid::from_raw(manager.0.id() as i32).unwrap(), Signal::TERM).unwrap();
    // The kernel takes the mount away before the worker has written the counters, so
    // the end of the manager is what systemd waits for too.
    wait_until("the manager ends", || manager.0.try_wait().unwrap().is_some());
    assert!(common::mounts_below(&at).is_empty());
    common::volume::run_e2fsck(&image);
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/new", image.display())]), "x");
}
