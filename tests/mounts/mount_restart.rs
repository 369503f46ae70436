//! Mounts whose worker dies: the keeper restarts it, and programs continue.

use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::volume::{run_e2fsck, run_ok};
use crate::common::{
    Draconis, has_fault_hooks, has_fuse, has_root, mke2fs, stop_process, wait_until,
};
use draconis_testkit::judge;
use rustix::process::{Pid, Signal, kill_process};

fn worker_pid(draconis: &Draconis) -> i64 {
    draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap()
}

/// Sends the worker a signal; returns its process ID.
fn signal_worker(draconis: &Draconis, signal: Signal) -> i64 {
    let worker = worker_pid(draconis);
    kill_process(Pid::from_raw(worker as i32).unwrap(), signal).unwrap();
    worker
}

fn make_volume(draconis: &Draconis, kind: &str) -> PathBuf {
    let tree = draconis.make_dir("small");
    std::fs::write(tree.join("hello"), "hello\n").unwrap();
    let image = draconis.path(&format!("{kind}.img"));
    mke2fs(&image, Some(&tree), &["-t", kind], "64M");
    image
}

#[test]
fn open_files_and_changes_survive_worker_death() {
    if !has_fuse("killing a worker") {
        return;
    }
    for kind in ["ext2", "ext3", "ext4"] {
        let draconis = Draconis::new();
        let image = make_volume(&draconis, kind);
        let at = draconis.mount(&image, "at", "rw,commit=1000");
        let open = |name: &str| {
            let mut how = std::fs::File::options();
            how.read(true).write(true).create(true).truncate(false).open(at.join(name)).unwrap()
        };
        let (mut kept, gone) = (open("kept"), open("gone"));
        kept.write_all(b"one ").unwrap();
        gone.write_all_at(b"no name", 0).unwrap();
        std::fs::remove_file(at.join("gone")).unwrap();
        std::fs::create_dir(at.join("dir")).unwrap();
        std::fs::rename(at.join("kept"), at.join("dir/moved")).unwrap();
        let seen = |path: &Path| std::fs::metadata(path).map(|it| (it.ino(), it.mtime_nsec()));
        let before = seen(&at.join("dir/moved")).unwrap();
        for restarts in 1..=3 {
            let dead = signal_worker(&draconis, Signal::KILL);
            kept.write_all(b"more ").unwrap();
            wait_until("another has taken over", || worker_pid(&draconis) != dead);
            assert_eq!(draconis.status()["mounts"][0]["restarts"], restarts);
        }
        assert_eq!(seen(&at.join("dir/moved")).unwrap().0, before.0);
        let text = std::fs::read_to_string(at.join("dir/moved")).unwrap();
        assert_eq!(text, "one more more more ");
        let mut bytes = String::new();
        (&gone).read_to_string(&mut bytes).unwrap();
        assert_eq!((bytes.as_str(), gone.metadata().unwrap().nlink()), ("no name", 0));
        drop((kept, gone));
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        run_e2fsck(&image);
    }
}

#[test]
fn failed_write_stops_successors_too() {
    if !has_fuse("a failed write before a death") || !has_root("a small tmpfs") {
        return;
    }
    let names_full_disk = |text: &str| {
        text.contains("No space left on device")
            || text.contains("file system that holds the image")
    };
    for kind in ["ext2", "ext3", "ext4"] {
        let draconis = Draconis::new();
        let below = draconis.make_dir("below");
        run_ok(Command::new("mount").args(["-t", "tmpfs", "-o", "size=24M", "none"]).arg(&below));
        let image = below.join("image");
        mke2fs(&image, None, &["-t", kind], "200M");
        let at = draconis.mount(&image, "at", "rw");
        // Nobody asks for the status between the error and the death.
        let worker = worker_pid(&draconis);
        let failed = (0..300).find(|number| {
            let file = std::fs::File::create(at.join(format!("f{number}"))).ok();
            let written = file.map(|mut file| {
                file.write_all(&vec![*number as u8; 300_000]).and_then(|()| file.sync_all())
            });
            !matches!(written, Some(Ok(())))
        });
        assert!(failed.is_some(), "{kind}: 300 files fit");
        for restarts in 1..=2 {
            let dead = if restarts == 1 { worker } else { worker_pid(&draconis) };
            kill_process(Pid::from_raw(dead as i32).unwrap(), Signal::KILL).unwrap();
            wait_until("another has taken over", || worker_pid(&draconis) != dead);
            let error = std::fs::write(at.join("after"), "x").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{kind}: {error}");
            let status = &draconis.status()["mounts"][0];
            assert_eq!(status["read_only"], true, "{kind}: {status}");
            let failure = status["worker"]["failure"].as_str().unwrap_or_default();
            assert!(names_full_disk(failure), "{kind}: {status}");
            assert_eq!(std::fs::read(at.join("f0")).unwrap(), [0; 300_000], "{kind}");
        }
        let errors = draconis.run_failing([
            "mount".as_ref(),
            "-o".as_ref(),
            "remount,rw".as_ref(),
            at.as_os_str(),
        ]);
        assert!(names_full_disk(&errors), "{kind}: {errors}");
        let errors = draconis.run_failing(["umount".as_ref(), at.as_os_str()]);
        assert!(names_full_disk(&errors), "{kind}: {errors}");
        wait_until("the file is free", || {
            Command::new("umount").arg(&below).status().unwrap().success()
        });
    }
}

#[test]
fn hung_worker_is_replaced() {
    if !has_fuse("a hung worker") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "ext2");
    for options in ["rw,deadline=1", "ro,deadline=1"] {
        let at = draconis.mount(&image, "at", options);
        let hung = worker_pid(&draconis);
        stop_process(hung);
        assert_eq!(std::fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
        wait_until("another has taken over", || worker_pid(&draconis) != hung);
        let log = std::fs::read_to_string(draconis.path("run/manager.log")).unwrap();
        assert!(log.contains("did not answer for 1 s"), "{log}");
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        run_e2fsck(&image);
    }
}

#[test]
fn writes_survive_worker_death_during_unmount() {
    if !has_fuse("killing a worker") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "ext2");
    for _ in 0..5 {
        let at = draconis.mount(&image, "at", "rw,commit=1000");
        std::fs::write(at.join("new"), vec![5; 300_000]).unwrap();
        stop_process(worker_pid(&draconis));
        std::thread::scope(|scope| {
            // Other processes that access the unresponsive mount keep it busy.
            let unmounting = scope.spawn(|| {
                wait_until("it is unmounted", || {
                    let output = draconis.run(["umount".as_ref(), at.as_os_str()]);
                    let errors = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success() || errors.contains("busy"), "{errors}");
                    output.status.success()
                });
            });
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                std::time::Duration::from_millis(100),
            );
            signal_worker(&draconis, Signal::KILL);
            unmounting.join().unwrap();
        });
        run_e2fsck(&image);
        let path = format!("{}:/new", image.display());
        assert_eq!(draconis.run(["cat", &path]).stdout, vec![5; 300_000]);
        draconis.run_ok(["rm", &path]);
    }
}

#[test]
fn repeated_worker_deaths_end_restarts() {
    if !has_fuse("killing workers") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "ext2");
    let at = draconis.mount(&image, "at", "rw");
    for death in 0.. {
        assert!(death <= 11, "it is never given up");
        // Not SIGKILL, which the keeper itself sends: the worker dies by itself.
        let dead = signal_worker(&draconis, Signal::ABORT);
        wait_until("the death is noticed", || {
            let mount = &draconis.status()["mounts"][0];
            mount["state"] == "dead" || mount["worker_pid"].as_i64() != Some(dead)
        });
        let mount = &draconis.status()["mounts"][0];
        if mount["state"] == "dead" {
            assert!(mount["why"].as_str().unwrap().contains("as too many did"), "{mount}");
            break;
        }
    }
    assert_eq!(std::fs::read(at.join("hello")).unwrap_err().raw_os_error(), Some(107));
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&image);
}

#[test]
fn request_that_kills_workers_is_quarantined() {
    if !has_fuse("killing workers") || !has_fault_hooks("killing workers") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "ext2");
    let at = draconis.make_dir("at");
    // Starts a manager that passes the injected fault on to its workers.
    let status = Command::new(crate::common::program())
        .arg("mount")
        .args([&image, &at])
        .env("DRACONIS_RUNTIME_DIR", draconis.make_dir("run"))
        .env(draconis_types::injected_fault::FAULTS_VARIABLE, "SurviveCrashingName")
        .status();
    assert!(status.unwrap().success());
    std::fs::write(at.join("new"), "kept").unwrap();
    let error = std::fs::metadata(at.join("deadly")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    assert_eq!(std::fs::read_to_string(at.join("new")).unwrap(), "kept");
    let mount = draconis.status()["mounts"][0].clone();
    assert_eq!(mount["restarts"], 2, "{mount}");
    assert_eq!(mount["worker"]["refused"][0], "looking a name up in inode 1", "{mount}");
    let printed = draconis.run_ok(["status"]);
    assert!(printed.contains("refused   looking a name up in inode 1"), "{printed}");
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&image);
}

#[test]
fn pending_requests_fail_once_without_kernel_resend() {
    if !has_fuse("killing workers") || !has_fault_hooks("killing workers") {
        return;
    }
    let mut draconis = Draconis::new();
    draconis.leaves_out = Some("SurviveCrashingName,Resend".into());
    let image = make_volume(&draconis, "ext2");
    let at = draconis.mount(&image, "at", "rw,commit=1000");
    let mut open = std::fs::File::create(at.join("open")).unwrap();
    for restarts in 1..=2 {
        open.write_all(b"x").unwrap();
        let error = std::fs::metadata(at.join("deadly")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(103), "{error}");
        // The restart keeps uncommitted changes.
        open.write_all(b"y").unwrap();
        assert_eq!(std::fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
        let mount = draconis.status()["mounts"][0].clone();
        assert_eq!((&mount["restarts"], &mount["resends"]), (&restarts.into(), &false.into()));
    }
    let printed = draconis.run_ok(["status"]);
    assert!(printed.contains("this needs Linux 6.9"), "{printed}");
    assert_eq!(std::fs::read_to_string(at.join("open")).unwrap(), "xyxy");
    drop(open);
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&image);
}

/// Returns sequence number and node name of the MMP block.
fn mmp_sequence_and_node(image: &Path) -> (u32, String) {
    let mut debugfs = judge::tool_command("debugfs");
    let printed = judge::try_run(debugfs.args(["-c", "-R", "dump_mmp"]).arg(image)).unwrap().stdout;
    let field = |name: &str| {
        let line = printed.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name}: {printed}"))
            .trim_start_matches(':')
            .trim()
            .to_owned()
    };
    let sequence = field("sequence");
    (u32::from_str_radix(sequence.trim_start_matches("0x"), 16).unwrap(), field("node_name"))
}

/// Takes 11 s, the time that MMP waits for other hosts, and as long again for the kernel.
#[test]
fn mmp_claim_survives_worker_death() {
    const MMP_SEQ_CLEAN: u32 = 0xFF4D_4D50;
    if !has_fuse("killing a worker") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("mmp.img");
    mke2fs(&image, None, &["-t", "ext4", "-O", "mmp", "-E", "mmp_update_interval=1"], "64M");
    let at = draconis.mount(&image, "at", "rw,commit=1000");
    std::fs::write(at.join("before"), "kept").unwrap();
    let (first, node) = mmp_sequence_and_node(&image);
    assert!(first < MMP_SEQ_CLEAN && !node.is_empty(), "{first:#x} {node}");
    for restarts in 1..=2 {
        let dead = signal_worker(&draconis, Signal::KILL);
        std::fs::write(at.join(format!("after {restarts}")), "written").unwrap();
        wait_until("another has taken over", || worker_pid(&draconis) != dead);
        assert_eq!(draconis.status()["mounts"][0]["restarts"], restarts);
        let (then, who) = mmp_sequence_and_node(&image);
        assert!(then < MMP_SEQ_CLEAN && who == node, "{then:#x} {who}");
        wait_until("it is signed again", || mmp_sequence_and_node(&image).0 != then);
    }
    // A manager without knowledge of the first one, and a kernel that knows no other locks.
    let other = Draconis::new();
    let elsewhere = other.make_dir("at");
    let errors = other.run_failing(["mount".as_ref(), image.as_os_str(), elsewhere.as_os_str()]);
    assert!(errors.contains("in use"), "{errors}");
    if has_root("asking the kernel") {
        // With its own loop device: mount(8) would reuse the one of our mount.
        let losetup = |what: &[&str], of: &Path| {
            let output = Command::new("losetup").args(what).arg(of).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        let device = losetup(&["-f", "--show"], &image);
        let mounted = Command::new("mount").arg(&device).arg(&elsewhere).output().unwrap();
        losetup(&["-d"], Path::new(&device));
        assert!(!mounted.status.success(), "the kernel mounted what is in use");
    }
    assert_eq!(std::fs::read_to_string(at.join("before")).unwrap(), "kept");
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    assert_eq!(mmp_sequence_and_node(&image).0, MMP_SEQ_CLEAN);
    run_e2fsck(&image);
    for name in ["before", "after 1", "after 2"] {
        let path = format!("{}:/{name}", image.display());
        assert!(!draconis.run_ok(["cat", &path]).is_empty());
    }
}
