//! Mounts whose manager dies, or that are upgraded to another program, without interrupting the
//! programs that use them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::volume::run_e2fsck;
use crate::common::{
    Draconis, copy_draconis, copy_program, has_fuse, mke2fs, mounts_below, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

fn make_volume(draconis: &Draconis, name: &str, kind: &str) -> PathBuf {
    let image = draconis.path(name);
    mke2fs(&image, None, &["-t", kind], "32M");
    image
}

fn kill_pid(pid: &Value) {
    let pid = Pid::from_raw(pid.as_i64().unwrap() as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    wait_until("it is gone", || {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        state.is_empty() || state.contains(") Z")
    });
}

/// Returns the executable of a process.
fn program_of_process(pid: &Value) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/exe")).unwrap()
}

fn unmount(draconis: &Draconis, at: &Path) {
    wait_until("it is not busy", || {
        draconis.run(["umount".as_ref(), at.as_os_str()]).status.success()
    });
}

#[test]
fn restarted_manager_recovers_all_mounts() {
    if !has_fuse("killing the manager") {
        return;
    }
    let draconis = Draconis::new();
    let images = ["a.img", "b.img"].map(|name| make_volume(&draconis, name, "ext2"));
    let [one, two] = ["one", "two"].map(|name| draconis.make_dir(name));
    draconis.mount(&images[0], "one", "rw");
    draconis.mount(&images[1], "two", "rw,norestart");
    let mut open = std::fs::File::create(one.join("open")).unwrap();
    let workers = |status: &Value| [0, 1].map(|nth| status["mounts"][nth]["worker_pid"].clone());
    let before = draconis.status();
    for round in 0..3 {
        let manager = draconis.status()["manager_pid"].clone();
        kill_pid(&manager);
        // Mounts do not need the manager.
        open.write_all(b"x").unwrap();
        std::fs::write(two.join(format!("new{round}")), "y").unwrap();
        let status = draconis.status();
        assert!(status["manager_pid"].is_u64() && status["manager_pid"] != manager, "{status}");
        assert_eq!(workers(&status), workers(&before));
        assert_eq!(status["mounts"][0]["restarts"], 0);
    }
    // The next manager refuses what the first one would have refused.
    kill_pid(&draconis.status()["manager_pid"]);
    let three = draconis.make_dir("three");
    let mount = |image: &Path, at: &Path| {
        draconis.run_failing(["mount".as_ref(), image.as_os_str(), at.as_os_str()])
    };
    let said = mount(&images[0], &three);
    assert!(said.contains("is already mounted on") && said.contains("/one"), "{said}");
    let said = mount(&make_volume(&draconis, "c.img", "ext2"), &one);
    assert!(said.contains("is already a mount point, of") && said.contains("a.img"), "{said}");
    // The keeper knows why a mount is dead.
    kill_pid(&draconis.status()["mounts"][1]["worker_pid"]);
    wait_until("it is dead", || draconis.status()["mounts"][1]["state"] == "dead");
    kill_pid(&draconis.status()["manager_pid"]);
    let why = draconis.status()["mounts"][1]["why"].clone();
    assert!(why.as_str().unwrap().contains("signal 9"), "{why}");
    drop(open);
    unmount(&draconis, &one);
    unmount(&draconis, &two);
    assert_eq!(draconis.status()["mounts"], json!([]));
    assert_eq!(std::fs::read_dir(draconis.path("run/keepers")).unwrap().count(), 0);
    run_e2fsck(&images[0]);
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/open", images[0].display())]), "xxx");
}

#[test]
fn foreground_mount_survives_manager_death() {
    if !has_fuse("mounting in the foreground") {
        return;
    }
    let draconis = Draconis::new();
    let (image, at) = (make_volume(&draconis, "a.img", "ext2"), draconis.make_dir("at"));
    let mut mounted = draconis.command().args(["mount", "-f"]).args([&image, &at]).spawn().unwrap();
    // The manager may not have replied yet: the request is then sent to the next one.
    wait_until("it is mounted", || mounts_below(&at).len() == 1);
    kill_pid(&draconis.status()["manager_pid"]);
    std::fs::write(at.join("new"), "x").unwrap();
    wait_until("another manager runs", || draconis.manager_socket().exists());
    assert!(mounted.try_wait().unwrap().is_none());
    unmount(&draconis, &at);
    assert!(mounted.wait().unwrap().success());
    run_e2fsck(&image);
}

#[test]
fn upgrade_with_open_files() {
    if !has_fuse("upgrading") {
        return;
    }
    for kind in ["ext2", "ext4"] {
        let draconis = Draconis::new();
        let images = ["a.img", "b.img"].map(|name| make_volume(&draconis, name, kind));
        let [one, two] = [0, 1].map(|nth| {
            let options = if nth == 0 { "rw,commit=1000" } else { "ro" };
            draconis.mount(&images[nth], ["one", "two"][nth], options)
        });
        let new = draconis.path("draconis-new");
        copy_draconis(&new);
        let mut kept = std::fs::File::create_new(one.join("kept")).unwrap();
        let nameless = std::fs::File::options();
        let nameless =
            nameless.clone().read(true).write(true).create_new(true).open(one.join("nameless"));
        let nameless = nameless.unwrap();
        nameless.write_all_at(b"no name", 0).unwrap();
        std::fs::remove_file(one.join("nameless")).unwrap();
        let keepers =
            |status: &Value| [0, 1].map(|nth| status["mounts"][nth]["keeper_pid"].clone());
        let before = draconis.status();
        let said = std::thread::scope(|scope| {
            let upgrading = scope.spawn(|| {
                let mut command = Command::new(&new);
                command.arg("upgrade").env("DRACONIS_RUNTIME_DIR", draconis.path("run"));
                command.output().unwrap()
            });
            while !upgrading.is_finished() {
                kept.write_all(b"x").unwrap();
            }
            upgrading.join().unwrap()
        });
        assert!(said.status.success(), "{said:?}");
        let text = String::from_utf8(said.stdout).unwrap();
        assert_eq!(text.matches("goes on with").count(), 2, "{text}");
        let status = draconis.status();
        assert_eq!(keepers(&status), keepers(&before));
        assert!(status["manager_pid"] != before["manager_pid"]);
        assert_eq!(program_of_process(&status["manager_pid"]), new);
        for mount in status["mounts"].as_array().unwrap() {
            assert_eq!(program_of_process(&mount["keeper_pid"]), new);
            assert_eq!(program_of_process(&mount["worker_pid"]), new);
            assert_eq!(mount["restarts"], 0);
        }
        let len = kept.metadata().unwrap().len();
        kept.write_all(b"y").unwrap();
        let mut bytes = String::new();
        (&nameless).read_to_string(&mut bytes).unwrap();
        assert_eq!(bytes, "no name");
        drop((kept, nameless));
        // And back, as after a withdrawn release.
        draconis.run_ok(["upgrade"]);
        let manager = draconis.status()["manager_pid"].clone();
        assert_eq!(program_of_process(&manager), Path::new(crate::common::program()));
        let bytes = std::fs::read(one.join("kept")).unwrap();
        assert_eq!((bytes.len() as u64, bytes.last()), (len + 1, Some(&b'y')));
        // A killed worker of the new keeper is replaced, too.
        kill_pid(&draconis.status()["mounts"][0]["worker_pid"]);
        std::fs::write(one.join("after"), "z").unwrap();
        wait_until("it is counted", || draconis.status()["mounts"][0]["restarts"] == 1);
        unmount(&draconis, &one);
        unmount(&draconis, &two);
        images.iter().for_each(|image| run_e2fsck(image));
    }
}

/// Sends a request to the manager in the way of other programs.
fn send_manager_request(draconis: &Draconis, request: &Value) -> Value {
    let mut manager = UnixStream::connect(draconis.manager_socket()).unwrap();
    writeln!(manager, "{request}").unwrap();
    let mut line = String::new();
    BufReader::new(manager).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

#[test]
fn invalid_upgrade_is_refused_and_mount_continues() {
    if !has_fuse("refusing an upgrade") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "a.img", "ext2");
    let at = draconis.mount(&image, "at", "rw");
    let [text, script] = ["other.sh", "other"].map(|name| draconis.path(name));
    std::fs::write(&text, "#!/bin/sh\necho '{\"handover\":0,\"oplog\":0}'\n").unwrap();
    std::fs::set_permissions(&text, PermissionsExt::from_mode(0o755)).unwrap();
    copy_program(&text, &script);
    let worker = draconis.status()["mounts"][0]["worker_pid"].clone();
    let cases: [(&Path, &str); 3] = [
        (Path::new("/bin/true"), "no draconis that can take over"),
        (Path::new("/nowhere/at/all"), "cannot be started"),
        (&script, "does not understand the log"),
    ];
    for (program, expected) in cases {
        let answer = send_manager_request(&draconis, &json!({ "upgrade": { "program": program } }));
        let why = answer["upgraded"]["mounts"][0]["why"].as_str().unwrap().to_string();
        assert!(why.contains(expected) && why.contains(at.to_str().unwrap()), "{why}");
    }
    assert_eq!(draconis.status()["mounts"][0]["worker_pid"], worker);
    std::fs::write(at.join("new"), "x").unwrap();
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&image);
    draconis.mount(&image, "at", "rw,norestart");
    let said = draconis.run_failing(["upgrade"]);
    assert!(said.contains("norestart"), "{said}");
    std::fs::write(at.join("newer"), "x").unwrap();
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&image);
    assert_eq!(draconis.run_ok(["upgrade"]).trim(), "nothing is mounted");
}

#[test]
fn keeper_exits_after_unmount() {
    if !has_fuse("keepers") {
        return;
    }
    let draconis = Draconis::new();
    let images = ["a.img", "b.img"].map(|name| make_volume(&draconis, name, "ext2"));
    let one = draconis.mount(&images[0], "one", "rw");
    let two = draconis.mount(&images[1], "two", "rw");
    let status = draconis.status();
    let keeper = |nth: usize| status["mounts"][nth]["keeper_pid"].as_i64().unwrap();
    let is_gone = |pid: i64| !Path::new(&format!("/proc/{pid}")).exists();
    // Killing a keeper ends its own mount and no other.
    kill_pid(&status["mounts"][0]["keeper_pid"]);
    std::fs::write(two.join("new"), "x").unwrap();
    wait_until("the other is known to be dead", || {
        let status = draconis.status();
        // Dead mounts of other tests may be in the list.
        let dead = status["dead"].as_array().unwrap();
        let is_dead = dead.iter().any(|mount| mount["mount_point"] == one.to_str().unwrap());
        is_dead && status["mounts"].as_array().unwrap().len() == 1
    });
    assert_eq!(std::fs::read_dir(&one).map(drop).unwrap_err().raw_os_error(), Some(107));
    draconis.run_ok(["umount".as_ref(), one.as_os_str()]);
    // On SIGTERM, a keeper makes all changes durable and unmounts.
    let pid = Pid::from_raw(keeper(1) as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    wait_until("the keeper ends", || is_gone(keeper(1)));
    assert!(mounts_below(&two).is_empty());
    images.iter().skip(1).for_each(|image| run_e2fsck(image));
    // A mount that fails leaves no keeper behind.
    let mut bad = std::fs::File::create(draconis.path("bad.img")).unwrap();
    bad.write_all(&[0; 8192]).unwrap();
    draconis.run_failing(["mount".as_ref(), draconis.path("bad.img").as_os_str(), two.as_os_str()]);
    let keepers = draconis.path("run/keepers");
    wait_until("none is left", || std::fs::read_dir(&keepers).unwrap().count() == 0);
    // A keeper that is started by hand reports that.
    let mut command = draconis.command();
    let output = command.arg("keeper").stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("manager"), "{said}");
}
