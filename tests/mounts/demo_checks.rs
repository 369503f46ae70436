//! Commands that `make demo` shows: the test of the sandbox, and the status of some mounts.

use std::path::{Path, PathBuf};

use crate::common::{Draconis, has_fuse, wait_until};

fn mount(draconis: &Draconis, at: &str) {
    let at = draconis.make_dir(at);
    let image = at.with_extension("img");
    draconis.run_ok(["mount".as_ref(), "--create".as_ref(), "16M".as_ref(), &*image, &*at]);
}

fn unmount_all(draconis: &Draconis) {
    for at in mount_points(draconis, &[]) {
        draconis.run_ok([Path::new("umount"), &at]);
    }
}

/// Returns what `status` of directories lists, in order.
fn mount_points(draconis: &Draconis, dirs: &[&str]) -> Vec<PathBuf> {
    let dirs = dirs.iter().map(|dir| draconis.path(dir));
    let arguments = ["status", "--json"].map(PathBuf::from).into_iter().chain(dirs);
    let status: serde_json::Value = serde_json::from_str(&draconis.run_ok(arguments)).unwrap();
    let mounts = status["mounts"].as_array().unwrap().iter();
    let mut points: Vec<_> =
        mounts.map(|mount| PathBuf::from(mount["mount_point"].as_str().unwrap())).collect();
    points.sort();
    points
}

#[test]
fn sandbox_refuses_every_attempt() {
    let draconis = Draconis::new();
    let temporary = draconis.make_dir("tmp");
    let output = draconis.command().arg("sandbox-test").env("TMPDIR", &temporary).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {errors}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    let attempts: Vec<_> =
        text.lines().filter(|line| line.ends_with("killed by seccomp")).collect();
    assert_eq!(attempts.len(), 8, "{text}");
    // Without a sandbox, every user can do these.
    for name in ["open /etc/passwd", "create a file", "make a Unix socket", "execute a program"] {
        let line = attempts.iter().find(|line| line.trim_start().starts_with(name));
        assert!(line.is_some_and(|line| line.contains("succeeded")), "{name}: {text}");
    }
    assert!(text.ends_with("refused: all 8 attempts\n"), "{text}");
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn status_shows_mounts_below_directories() {
    if !has_fuse("the status of some mounts") {
        return;
    }
    let draconis = Draconis::new();
    for at in ["one/at", "one/other", "one-more", "two"] {
        mount(&draconis, at);
    }
    let paths = |names: &[&str]| names.iter().map(|name| draconis.path(name)).collect::<Vec<_>>();
    assert_eq!(mount_points(&draconis, &["one"]), paths(&["one/at", "one/other"]));
    assert_eq!(mount_points(&draconis, &["one/at"]), paths(&["one/at"]));
    assert_eq!(mount_points(&draconis, &["one/../two/", "one/at"]), paths(&["one/at", "two"]));
    assert_eq!(mount_points(&draconis, &["one/at/below"]), paths(&[]));
    let mut all = paths(&["one-more", "one/at", "one/other", "two"]);
    all.sort();
    assert_eq!(mount_points(&draconis, &["."]), all);
    assert_eq!(mount_points(&draconis, &[]), all);

    let text = draconis.run_ok([Path::new("status"), &draconis.path("two")]);
    let is_named = |at: &str| text.contains(&format!(" on {}\n", draconis.path(at).display()));
    assert!(is_named("two") && !is_named("one/at") && !is_named("one-more"), "{text}");
    let text = draconis.run_ok([Path::new("status"), &draconis.path("run")]);
    assert_eq!(text, "nothing is mounted there\n");
    let errors = draconis.run_failing([Path::new("status"), &draconis.path("none/at/all")]);
    assert!(errors.contains("none/at/all: No such file"), "{errors}");
    unmount_all(&draconis);
}

#[test]
fn status_of_directory_leaves_out_dead_mounts_elsewhere() {
    if !has_fuse("the status of dead mounts") {
        return;
    }
    let draconis = Draconis::new();
    let (dead, alive) = (draconis.path("dead"), draconis.path("alive"));
    mount(&draconis, "dead");
    mount(&draconis, "alive");
    let status = draconis.run_ok(["status".as_ref(), "--json".as_ref(), &*dead]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let keeper = status["mounts"][0]["keeper_pid"].as_i64().unwrap();
    let keeper = rustix::process::Pid::from_raw(keeper as i32).unwrap();
    rustix::process::kill_process(keeper, rustix::process::Signal::KILL).unwrap();
    wait_until("the mount is dead", || {
        draconis.run_ok([Path::new("status"), &dead]).contains("dead      ")
    });
    let text = draconis.run_ok([Path::new("status"), &alive]);
    assert!(text.contains(" (serving)") && !text.contains("dead"), "{text}");
    draconis.run_ok([Path::new("umount"), &alive]);
}
