//! The life cycle of a mount: how it ends, what remains when its worker or manager dies, and that
//! volume and directory can be reused at once.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::volume::run_e2fsck;
use crate::common::{
    Draconis, has_fuse, has_tool, is_installed, is_root, mke2fs, mounts_below, report_skipped,
    stop_process, unmount_by, wait_until,
};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};

/// ENOTCONN, the error of a mount whose server is gone.
const ENOTCONN: i32 = 107;

fn make_small_volume(draconis: &Draconis, name: &str) -> PathBuf {
    let tree = draconis.make_dir("small");
    std::fs::write(tree.join("hello"), "hello\n").unwrap();
    std::fs::write(tree.join("large"), vec![7; 3 << 20]).unwrap();
    let image = draconis.path(name);
    mke2fs(&image, Some(&tree), &["-t", "ext2"], "8M");
    image
}

fn signal_process(pid: &serde_json::Value, signal: Signal) {
    let pid = Pid::from_raw(pid.as_i64().unwrap() as i32).unwrap();
    kill_process(pid, signal).unwrap();
}

fn assert_not_connected(result: std::io::Result<impl std::fmt::Debug>) {
    let error = result.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(ENOTCONN), "{error}");
}

/// Waits until the only mount is dead; returns the reason.
fn wait_until_dead(draconis: &Draconis) -> String {
    wait_until("the loss is noticed", || draconis.status()["mounts"][0]["state"] == "dead");
    draconis.status()["mounts"][0]["why"].as_str().unwrap().to_string()
}

fn append_image_and_mount_point<'a>(
    words: &[&'a str],
    image: &'a Path,
    at: &'a Path,
) -> Vec<&'a std::ffi::OsStr> {
    let words = words.iter().map(|word| std::ffi::OsStr::new(*word));
    words.chain([image.as_os_str(), at.as_os_str()]).collect()
}

#[test]
fn mount_of_killed_worker_stays_dead() {
    if !has_fuse("killing a worker") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    let at = draconis.mount(&image, "at", "rw,norestart");
    let open = std::fs::File::open(at.join("large")).unwrap();
    // A reader is blocked: the worker is stopped, then killed.
    let worker = draconis.status()["mounts"][0]["worker_pid"].clone();
    stop_process(worker.as_i64().unwrap());
    let reader = std::thread::spawn(move || {
        std::os::unix::fs::FileExt::read_at(&open, &mut [0; 1], 2 << 20)
    });
    draconis_testkit::wait::pause("the reader blocks", Duration::from_millis(100));
    signal_process(&worker, Signal::KILL);
    reader.join().unwrap().unwrap_err();
    assert!(wait_until_dead(&draconis).contains("was killed by signal 9"));
    let printed = draconis.run_ok(["status"]);
    assert!(printed.contains("dead") && printed.contains("signal 9"), "{printed}");
    let log = std::fs::read_to_string(draconis.path("run/manager.log")).unwrap();
    assert!(log.contains("was killed by signal 9"), "{log}");
    // Writes by path do not reach the directory below the mount.
    assert_not_connected(std::fs::write(at.join("new"), "lost"));
    assert_not_connected(std::fs::read(at.join("hello")));
    // The volume is free for tools, and for a mount in another directory.
    draconis.run_ok(["check".as_ref(), image.as_os_str()]);
    let elsewhere = draconis.mount(&image, "elsewhere", "ro");
    assert_eq!(std::fs::read_to_string(elsewhere.join("hello")).unwrap(), "hello\n");
    draconis.run_ok(["umount".as_ref(), elsewhere.as_os_str()]);
    // The directory is not, unless --replace is given.
    let errors = draconis.run_failing(append_image_and_mount_point(&["mount"], &image, &at));
    assert!(errors.contains("dead mount") && errors.contains("--replace"), "{errors}");
    draconis.run_ok(append_image_and_mount_point(&["mount", "--replace"], &image, &at));
    assert_eq!(std::fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
    assert_eq!(mounts_below(&at).len(), 1);
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    assert!(mounts_below(&at).is_empty());
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), 0);
    run_e2fsck(&image);
}

#[test]
fn dead_mount_is_cleared_by_any_unmount() {
    if !has_fuse("clearing dead mounts") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    let mut commands = vec![vec!["draconis", "umount"], vec!["draconis", "umount", "-f"]];
    if has_tool("unmounting by another program", "fusermount3") {
        commands.push(vec!["fusermount3", "-u"]);
    }
    if is_root() {
        commands.push(vec!["umount"]);
    }
    for words in commands {
        let at = draconis.mount(&image, "at", "rw,norestart");
        // Held open, without data that could be lost.
        let held = (words[0] == "draconis").then(|| std::fs::File::open(at.join("hello")));
        signal_process(&draconis.status()["mounts"][0]["worker_pid"], Signal::KILL);
        wait_until_dead(&draconis);
        if held.is_some() {
            let own = words[1..].iter().map(|word| word.as_ref());
            draconis.run_ok(own.chain([at.as_os_str()]));
        } else {
            unmount_by(&words, &at);
        }
        assert!(mounts_below(&at).is_empty(), "{words:?}");
        assert_eq!(draconis.status()["mounts"].as_array().unwrap().len(), 0, "{words:?}");
        drop(held);
    }
}

#[test]
fn hung_worker_is_killed_at_deadline() {
    if !has_fuse("a hung worker") {
        return;
    }
    let draconis = Draconis::new();
    let at =
        draconis.mount(&make_small_volume(&draconis, "a.img"), "at", "ro,deadline=1,norestart");
    stop_process(draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap());
    std::fs::read(at.join("large")).unwrap_err();
    assert!(wait_until_dead(&draconis).contains("did not answer for 1 s"));
    // Logged after the mount is shown as dead, so the order is not guaranteed.
    wait_until("the log says why", || {
        let log = std::fs::read_to_string(draconis.path("run/manager.log")).unwrap();
        log.contains("did not answer for 1 s")
    });
    assert_not_connected(std::fs::read(at.join("hello")));
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}

#[test]
fn manager_closes_inherited_descriptors() {
    if !has_fuse("descriptors of managers") {
        return;
    }
    let (draconis, other) = (Draconis::new(), Draconis::new());
    let at = draconis.mount(&make_small_volume(&draconis, "a.img"), "at", "ro");
    let below = other.make_dir("below");
    let image = make_small_volume(&other, "b.img");
    // A shell with an open file starts another manager.
    let script = "exec 7<\"$1\"; \"$2\" mount -o ro \"$3\" \"$4\"";
    let status = Command::new("sh")
        .args(["-euc", script, "sh"])
        .arg(at.join("hello"))
        .arg(crate::common::program())
        .args([&image, &below])
        .env("DRACONIS_RUNTIME_DIR", other.make_dir("run"))
        .status();
    assert!(status.unwrap().success());
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    other.run_ok(["umount".as_ref(), below.as_os_str()]);
}

#[test]
fn mount_of_hung_worker_can_be_unmounted() {
    if !has_fuse("a hung worker") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    // The deadline is longer than this test.
    for options in ["rw,deadline=100000", "ro,deadline=100000"] {
        let at = draconis.mount(&image, "at", options);
        stop_process(draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap());
        draconis.run_ok(["umount".as_ref(), "-f".as_ref(), at.as_os_str()]);
        assert!(mounts_below(&at).is_empty());
        run_e2fsck(&image);
    }
}

/// Kills the keeper of the only mount, and waits until its worker is gone.
fn kill_keeper(draconis: &Draconis) {
    let mount = &draconis.status()["mounts"][0];
    signal_process(&mount["keeper_pid"], Signal::KILL);
    let worker = mount["worker_pid"].as_i64().unwrap();
    wait_until("the worker is gone", || !Path::new(&format!("/proc/{worker}")).exists());
}

fn is_status_dead(draconis: &Draconis, at: &Path) -> bool {
    let status = draconis.status();
    let dead = status["dead"].as_array().unwrap();
    dead.iter().any(|mount| mount["mount_point"] == at.to_str().unwrap())
}

#[test]
fn mount_without_keeper_is_listed_and_cleared() {
    if !has_fuse("killing the keeper") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    for words in [&["umount"][..], &["umount", "-f"]] {
        let at = draconis.mount(&image, "at", "rw");
        let held = std::fs::File::open(at.join("hello")).unwrap();
        kill_keeper(&draconis);
        // Without both processes, the FUSE connection is closed.
        assert_not_connected(std::fs::read(at.join("hello")));
        assert!(is_status_dead(&draconis, &at));
        let printed = draconis.run_ok(["status"]);
        let name = format!("{} on {}\n  dead", image.display(), at.display());
        assert!(printed.contains(&name), "{printed}");
        if words.len() == 1 {
            let other = draconis.mount(&make_small_volume(&draconis, "b.img"), "other", "ro");
            assert!(is_status_dead(&draconis, &at));
            let errors =
                draconis.run_failing(append_image_and_mount_point(&["mount"], &image, &at));
            assert!(errors.contains("--replace"), "{errors}");
            draconis.run_ok([words, &[at.to_str().unwrap()]].concat());
            draconis.run_ok(["umount".as_ref(), other.as_os_str()]);
        } else {
            draconis.run_ok([words, &[at.to_str().unwrap()]].concat());
        }
        assert!(!is_status_dead(&draconis, &at));
        assert!(mounts_below(&at).is_empty());
        drop(held);
    }
    let at = draconis.mount(&image, "at", "rw");
    kill_keeper(&draconis);
    draconis.run_ok(append_image_and_mount_point(&["mount", "--replace"], &image, &at));
    assert_eq!(mounts_below(&at).len(), 1);
    assert_eq!(std::fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
    // A mount that is alive is not replaced.
    let errors = draconis.run_failing(append_image_and_mount_point(
        &["mount", "--replace"],
        &make_small_volume(&draconis, "b.img"),
        &at,
    ));
    assert!(errors.contains("already"), "{errors}");
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    let errors = draconis.run_failing(["umount".as_ref(), at.as_os_str()]);
    assert!(errors.contains("nothing is mounted there"), "{errors}");
}

#[test]
fn volume_and_mount_point_are_reusable_after_unmount() {
    if !has_fuse("mounting again") {
        return;
    }
    let draconis = Draconis::new();
    let (one, two) = (make_small_volume(&draconis, "a.img"), make_small_volume(&draconis, "b.img"));
    for round in 0..12 {
        let at = draconis.mount(&one, "at", "rw");
        std::fs::write(at.join("round"), round.to_string()).unwrap();
        // By the command, and by umount(8), which does not wait for the worker.
        if round % 2 == 0 {
            draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
            // The command returns after the volume is released: others need not wait.
            run_e2fsck(&one);
            draconis.run_ok(["mkdir", "-p", &format!("{}:/between", one.display())]);
        } else if is_root() {
            unmount_by(&["umount"], &at);
        } else {
            unmount_by(&["fusermount3", "-u"], &at);
        }
        let (image, dir) = if round % 4 < 2 { (&one, "elsewhere") } else { (&two, "at") };
        let again = draconis.mount(image, dir, "rw");
        if image == &one {
            assert_eq!(std::fs::read_to_string(again.join("round")).unwrap(), round.to_string());
        }
        draconis.run_ok(["umount".as_ref(), again.as_os_str()]);
    }
    run_e2fsck(&one);
}

#[test]
fn busy_unmount_names_blocking_process() {
    if !has_fuse("naming holders") {
        return;
    }
    let draconis = Draconis::new();
    let at = draconis.mount(&make_small_volume(&draconis, "a.img"), "at", "ro");
    let mut child = Command::new("sleep").arg("1000").current_dir(&at).spawn().unwrap();
    let errors = draconis.run_failing(["umount".as_ref(), at.as_os_str()]);
    let open = std::fs::File::open(at.join("hello")).unwrap();
    let also = draconis.run_failing(["umount".as_ref(), at.as_os_str()]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(errors.contains("busy"), "{errors}");
    assert!(errors.contains(&format!("process {} (sleep)", child.id())), "{errors}");
    assert!(also.contains(&format!("process {} (", std::process::id())), "{also}");
    assert_eq!(errors.matches(at.to_str().unwrap()).count(), 1, "{errors}");
    drop(open);
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}

/// Offset of `s_state` in the volume.
const S_STATE_OFFSET: usize = 1024 + 0x3A;

#[test]
fn volume_is_marked_unclean_by_first_change() {
    if !has_fuse("marking volumes") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    let before = std::fs::read(&image).unwrap();
    // A mount that fails after its worker has opened the volume: the name is too long.
    let at = draconis.make_dir("at");
    let name = format!("fsname={}", "x".repeat(5000));
    draconis.run_failing(append_image_and_mount_point(&["mount", "-o", &name], &image, &at));
    assert!(std::fs::read(&image).unwrap() == before, "a mount that failed");
    // A mount that could write and does not.
    draconis.mount(&image, "at", "rw,noatime,commit=1");
    assert_eq!(std::fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
    rustix::fs::syncfs(std::fs::File::open(&at).unwrap()).unwrap();
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    assert!(std::fs::read(&image).unwrap() == before, "a mount that only read");
    // A mount that writes: marked in use with its first durable change, and clean at the end.
    draconis.mount(&image, "at", "rw,noatime,commit=1000");
    let file = std::fs::File::create(at.join("new")).unwrap();
    assert!(std::fs::read(&image).unwrap() == before, "not committed yet");
    file.sync_all().unwrap();
    assert_eq!(std::fs::read(&image).unwrap()[S_STATE_OFFSET] & 1, 0, "in use");
    drop(file);
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    assert_eq!(std::fs::read(&image).unwrap()[S_STATE_OFFSET] & 1, 1, "clean");
    run_e2fsck(&image);
}

#[test]
fn every_sync_call_writes_to_image() {
    if !is_root() || !has_fuse("sync") {
        report_skipped("the kernel passes sync on to mounts of root only");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    for (call, with) in [("sync", "-f"), ("sync", "")] {
        let at = draconis.mount(&image, "at", "rw,commit=1000");
        std::fs::write(at.join("new"), "durable").unwrap();
        std::fs::create_dir_all(at.join("deep/er")).unwrap();
        let mut command = Command::new(call);
        if !with.is_empty() {
            command.arg(with).arg(&at);
        }
        assert!(command.status().unwrap().success());
        let mount = &draconis.status()["mounts"][0];
        signal_process(&mount["keeper_pid"], Signal::KILL);
        signal_process(&mount["worker_pid"], Signal::KILL);
        wait_until("both are gone", || is_status_dead(&draconis, &at));
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        let path = format!("{}:/new", image.display());
        wait_until("the image is free", || draconis.run(["cat", &path]).status.success());
        assert_eq!(draconis.run_ok(["cat", &path]), "durable", "{call} {with}");
        draconis.run_ok(["ls", &format!("{}:/deep/er", image.display())]);
        draconis_testkit::judge::assert_preens(&image, call);
        // The kernel detaches the loop device of the mount in its own time.
        let deep = format!("{}:/deep", image.display());
        wait_until("the image is free for a writer", || {
            draconis.run(["rm", "-r", &path, &deep]).status.success()
        });
    }
}

/// Returns type and source of a mount in the kernel's table.
fn mount_type_and_source(at: &Path) -> (String, String) {
    let table = std::fs::read("/proc/self/mounts").unwrap();
    let table = String::from_utf8_lossy(&table);
    let line = table.lines().rfind(|line| line.split(' ').nth(1) == at.to_str()).unwrap();
    let mut fields = line.split(' ');
    let source = fields.next().unwrap().to_string();
    (fields.nth(1).unwrap().to_string(), source)
}

/// Lists the loop devices of `image`.
fn list_loop_devices(image: &Path) -> String {
    let printed = Command::new("losetup").arg("-j").arg(image).output().unwrap();
    String::from_utf8(printed.stdout).unwrap()
}

#[test]
fn loop_device_is_removed_with_mount() {
    if !is_root() || !has_fuse("loop devices of mounts") || !is_installed("losetup") {
        report_skipped("loop devices need root and losetup");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    for dies in [false, true] {
        let at = draconis.mount(&image, "at", "rw,fuseblk,norestart");
        let (kind, source) = mount_type_and_source(&at);
        assert_eq!(kind, "fuseblk.draconis");
        assert_eq!(Path::new(&source), image);
        let devices = list_loop_devices(&image);
        assert!(devices.starts_with("/dev/loop") && devices.lines().count() == 1, "{devices}");
        if dies {
            signal_process(&draconis.status()["mounts"][0]["worker_pid"], Signal::KILL);
            wait_until_dead(&draconis);
            assert_not_connected(std::fs::read_dir(&at).and_then(|mut dir| dir.next().unwrap()));
            // The loop device does not keep the volume busy.
            let elsewhere = draconis.mount(&image, "elsewhere", "rw");
            std::fs::write(elsewhere.join("new"), "x").unwrap();
            draconis.run_ok(["umount".as_ref(), elsewhere.as_os_str()]);
        }
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        // Workers of other tests have copies of the mount table until they are confined.
        wait_until("the loop device is removed", || list_loop_devices(&image).is_empty());
        run_e2fsck(&image);
    }
    let at = draconis.mount(&image, "at", "rw,nofuseblk");
    assert_eq!(mount_type_and_source(&at), ("fuse.draconis".into(), image.display().to_string()));
    assert_eq!(list_loop_devices(&image), "");
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}

/// A loop device of the test.
struct LoopDevice(PathBuf);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

impl LoopDevice {
    fn attach(image: &Path) -> Self {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(image).output().unwrap();
        Self(String::from_utf8(made.stdout).unwrap().trim().into())
    }
}

#[test]
fn mounted_block_device_is_exclusive() {
    if !is_root() || !has_fuse("block devices") || !is_installed("losetup") {
        report_skipped("loop devices need root and losetup");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    let device = LoopDevice::attach(&image);
    let below = draconis.make_dir("below");
    for (options, kind) in
        [("rw,norestart", "fuseblk.draconis"), ("rw,norestart,nofuseblk", "fuse.draconis")]
    {
        let at = draconis.mount(&device.0, "at", options);
        assert_eq!(mount_type_and_source(&at), (kind.into(), device.0.display().to_string()));
        let other = Command::new("mount").args(["-t", "ext2"]).arg(&device.0).arg(&below).output();
        assert!(!other.unwrap().status.success(), "{options}: the kernel took it, too");
        std::fs::write(at.join("new"), options).unwrap();
        signal_process(&draconis.status()["mounts"][0]["worker_pid"], Signal::KILL);
        wait_until_dead(&draconis);
        draconis.run_ok(append_image_and_mount_point(
            &["mount", "--replace", "-o", options],
            &device.0,
            &at,
        ));
        // Nothing is left of the dead mount, which had the same device number.
        assert_eq!(draconis.status()["mounts"].as_array().unwrap().len(), 1, "{options}");
        std::fs::write(at.join("new"), options).unwrap();
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        run_e2fsck(&device.0);
        let path = format!("{}:/new", device.0.display());
        assert_eq!(draconis.run_ok(["cat", &path]), options);
    }
}

/// The kernel may take its time to let go of the device of a dead mount. Here the test has it, for
/// longer than a mount waits that replaces none.
#[test]
fn replacing_mount_waits_for_device() {
    if !is_root() || !has_fuse("block devices") || !is_installed("losetup") {
        report_skipped("loop devices need root and losetup");
        return;
    }
    let draconis = Draconis::new();
    let device = LoopDevice::attach(&make_small_volume(&draconis, "a.img"));
    let options = "rw,norestart,nofuseblk";
    let at = draconis.mount(&device.0, "at", options);
    signal_process(&draconis.status()["mounts"][0]["worker_pid"], Signal::KILL);
    wait_until_dead(&draconis);
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let held = rustix::fs::open(&device.0, flags, Mode::empty()).unwrap();
    let mut command = draconis.command();
    command.args(["mount", "--replace", "-o", options]).args([&device.0, &at]);
    let mut replacing = command.stderr(Stdio::piped()).spawn().unwrap();
    draconis_testkit::wait::pause(
        "nothing may happen while the device is in use",
        Duration::from_secs(4),
    );
    assert_eq!(replacing.try_wait().unwrap(), None, "it did not wait");
    drop(held);
    let output = replacing.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(at.join("new"), options).unwrap();
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&device.0);
}

#[test]
fn full_host_disk_is_reported() {
    if !is_root() || !has_fuse("a full disk below") {
        report_skipped("a small tmpfs needs root");
        return;
    }
    let draconis = Draconis::new();
    let below = draconis.make_dir("below");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=4M", "none"]).arg(&below);
    assert!(mount.status().unwrap().success());
    let image = below.join("a.img");
    draconis.run_ok(["format", image.to_str().unwrap(), "32M"]);
    let at = draconis.mount(&image, "at", "rw");
    std::fs::write(at.join("large"), vec![1; 8 << 20]).unwrap();
    let file = std::fs::File::open(at.join("large")).unwrap();
    assert!(file.sync_all().is_err());
    drop(file);
    let full = "the file system that holds the image is full";
    wait_until("it is said", || draconis.run_ok(["status"]).contains(full));
    let errors = draconis.run_failing(["umount".as_ref(), at.as_os_str()]);
    assert!(errors.contains(full) && !errors.contains("os error"), "{errors}");
    wait_until("the file is free", || {
        Command::new("umount").arg(&below).status().unwrap().success()
    });
}

#[test]
fn read_only_mount_allows_other_readers() {
    if !has_fuse("what is read beside a mount") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("image");
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("f"), "precious").unwrap();
    let (shown, tree) = (image.to_str().unwrap(), tree.to_str().unwrap());
    draconis.run_ok(["format", "--from", tree, shown]);
    let at = draconis.mount(&image, "at", "ro");
    let file = format!("{shown}:/f");
    assert_eq!(draconis.run_ok(["cat", &file]), "precious");
    draconis.run_ok(["ls", "-lh", shown]);
    draconis.run_ok(["info", shown]);
    draconis.run_ok(["check", shown]);
    draconis.run_ok(["get", &file, draconis.path("got").to_str().unwrap()]);
    for line in [&["rm", &file][..], &["set-label", shown, "x"], &["grow", shown, "64M"]] {
        let errors = draconis.run_failing(line);
        assert!(errors.contains("in use"), "{line:?}: {errors}");
    }
    assert_eq!(std::fs::read(at.join("f")).unwrap(), b"precious");
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    // A mount that may write excludes readers.
    let at = draconis.mount(&image, "at", "nofuseblk");
    assert!(draconis.run_failing(["cat", &file]).contains("mounted"));
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    run_e2fsck(&image);
}

#[test]
fn damaged_directory_is_partly_listed() {
    if !has_fuse("a damaged directory") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("image");
    let tree = draconis.make_dir("tree");
    let dir = tree.join("d");
    std::fs::create_dir(&dir).unwrap();
    for nth in 0..300 {
        std::fs::write(dir.join(format!("a-rather-long-name-of-number-{nth:04}")), "").unwrap();
    }
    let (shown, tree) = (image.to_str().unwrap(), tree.to_str().unwrap());
    draconis.run_ok(["format", "-b", "1024", "--from", tree, shown]);
    let blocks = draconis_testkit::judge::debugfs(&image, "blocks /d");
    let blocks: Vec<usize> = blocks.split_whitespace().map(|n| n.parse().unwrap()).collect();
    assert!(blocks.len() > 8, "{blocks:?}");
    let mut bytes = std::fs::read(&image).unwrap();
    let at = blocks[3] * 1024;
    bytes[at..at + 1024].fill(0xA5);
    std::fs::write(&image, bytes).unwrap();
    for options in ["ro", "nofuseblk"] {
        let mount = draconis.mount(&image, "at", options);
        for _ in 0..2 {
            let found: Vec<_> = std::fs::read_dir(mount.join("d")).unwrap().collect();
            let names = found.iter().filter(|name| name.is_ok()).count();
            assert!((200..300).contains(&names), "{names}");
            assert!(found.last().unwrap().is_err());
        }
        draconis.run_ok(["umount", mount.to_str().unwrap()]);
    }
}

#[test]
fn mount_reports_damaged_group_descriptors() {
    if !has_fuse("damaged descriptors") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("image");
    draconis.run_ok(["format", "-b", "1024", image.to_str().unwrap(), "32M"]);
    let mut bytes = std::fs::read(&image).unwrap();
    // The second descriptor of 64 bytes, in the block behind the superblock.
    bytes[2048 + 64..2048 + 68].fill(0xFF);
    std::fs::write(&image, bytes).unwrap();
    let at = draconis.make_dir("at");
    let line = ["mount", "-o", "ro", image.to_str().unwrap(), at.to_str().unwrap()];
    let output = draconis.run(line);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && errors.contains("group descriptor"), "{errors}");
    assert!(std::fs::read_dir(&at).unwrap().count() > 0);
    // A working directory in the mount does not keep it busy for `umount`.
    let mut command = draconis.command();
    let ended = command.args(["umount", "."]).current_dir(&at).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}
