//! Mounts over FUSE's ring: they serve what any mount serves, and end at once with their worker.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;

use crate::common::volume::run_e2fsck;
use crate::common::{
    Draconis, has_fuse, is_root, mke2fs, report_skipped, stop_process, wait_until,
};
use rustix::process::{Pid, Signal, kill_process};

const ENABLE_URING_FILE: &str = "/sys/module/fuse/parameters/enable_uring";
/// Errors of a mount whose server is gone.
const ENOTCONN: i32 = 107;
const ECONNABORTED: i32 = 103;

/// Returns true if this kernel offers rings to new mounts.
fn has_rings(test: &str) -> bool {
    if !has_fuse(test) {
        return false;
    }
    let enabled = std::fs::read_to_string(ENABLE_URING_FILE).is_ok_and(|it| it.starts_with('Y'));
    if !enabled || !is_root() {
        report_skipped(format!("{test}: root, with Y in {ENABLE_URING_FILE} (enable_uring)"));
    }
    enabled && is_root()
}

fn make_volume(draconis: &Draconis, kind: &str) -> PathBuf {
    let image = draconis.path("a.img");
    mke2fs(&image, None, &["-t", kind], "64M");
    image
}

fn is_over_ring(draconis: &Draconis) -> bool {
    draconis.status()["mounts"][0]["worker"]["uring"] == true
}

fn worker_pid(draconis: &Draconis) -> i64 {
    draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap()
}

/// Changes a directory in many ways, as one of several clients.
fn change_directory(dir: &Path, seed: u8) {
    std::fs::create_dir(dir).unwrap();
    for number in 0..60_u32 {
        let (name, other) = (dir.join(format!("f{number}")), dir.join(format!("g{number}")));
        let bytes = vec![seed ^ number as u8; 100 + number as usize * 937];
        std::fs::write(&name, &bytes).unwrap();
        std::fs::set_permissions(&name, PermissionsExt::from_mode(0o640)).unwrap();
        if number % 3 == 0 {
            std::fs::rename(&name, &other).unwrap();
            assert!(std::fs::read(&other).unwrap() == bytes);
        }
        if number % 4 == 1 && number % 3 != 0 {
            File::open(&name).unwrap().sync_all().unwrap();
            std::fs::remove_file(&name).unwrap();
        }
        if number % 5 == 2 {
            symlink("g0", dir.join(format!("l{number}"))).unwrap();
            assert_eq!(
                std::fs::read_link(dir.join(format!("l{number}"))).unwrap(),
                Path::new("g0")
            );
        }
    }
    let listed = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    assert_eq!(listed.count(), 50 + 12);
}

#[test]
fn ring_serves_many_clients() {
    if !has_rings("clients of a ring") {
        return;
    }
    for kind in ["ext2", "ext4"] {
        let draconis = Draconis::new();
        let image = make_volume(&draconis, kind);
        let at = draconis.mount(&image, "at", "rw,norestart,uring=on");
        assert!(is_over_ring(&draconis));
        std::thread::scope(|scope| {
            for client in 0..6 {
                let dir = at.join(format!("d{client}"));
                scope.spawn(move || change_directory(&dir, client * 31));
            }
        });
        // Large requests both ways, and a hole.
        let pattern: Vec<u8> = (0..12_000_003_u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let mut large =
            File::options().read(true).write(true).create_new(true).open(at.join("large")).unwrap();
        large.write_all(&pattern).unwrap();
        large.sync_all().unwrap();
        let free = || rustix::fs::statvfs(&at).unwrap().f_bfree;
        let before = free();
        let sparse = File::create_new(at.join("sparse")).unwrap();
        sparse.write_all_at(b"end", 1 << 20).unwrap();
        let data = rustix::fs::seek(&sparse, rustix::fs::SeekFrom::Data(0)).unwrap();
        assert!(data > 0 && data <= 1 << 20, "{data}");
        std::fs::remove_file(at.join("sparse")).unwrap();
        drop((sparse, large));
        wait_until("its space is free: the ring's forgets arrive", || free() >= before);
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        run_e2fsck(&image);
        // From the device, and over the ring again.
        let at = draconis.mount(&image, "at", "ro,norestart,uring=on");
        let mut found = vec![];
        File::open(at.join("large")).unwrap().read_to_end(&mut found).unwrap();
        assert!(found == pattern);
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    }
}

/// Waits for the ends of clients that change a mount, which `stop` has made fail.
fn assert_clients_end(draconis: &Draconis, at: &Path, stop: impl FnOnce()) {
    let made = AtomicU64::new(0);
    let (ended, ends) = channel();
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (made, ended) = (&made, ended.clone());
            scope.spawn(move || {
                for number in 0.. {
                    let path = at.join(format!("{client}-{number}"));
                    let done = std::fs::write(&path, [7; 3000]).and_then(|()| {
                        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
                        std::fs::remove_file(&path)
                    });
                    match done {
                        Ok(()) => drop(made.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => return ended.send(error.raw_os_error()).unwrap(),
                    }
                }
            });
        }
        wait_until("clients are at work", || made.load(Ordering::Relaxed) > 200);
        stop();
        for _ in 0..4 {
            let end = draconis_testkit::wait::receive(&ends);
            if end.is_err() {
                // Or this thread would wait for clients that hang.
                let _ = rustix::mount::unmount(at, rustix::mount::UnmountFlags::FORCE);
                panic!("a client hangs");
            }
            assert!(matches!(end.unwrap(), Some(ENOTCONN | ECONNABORTED)), "{end:?}");
        }
    });
    wait_until("the mount is dead", || draconis.status()["mounts"][0]["state"] == "dead");
}

#[test]
fn clients_of_ring_do_not_hang_when_its_worker_dies() {
    if !has_rings("the death of a ring's worker") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "ext4");
    for _ in 0..4 {
        let at = draconis.mount(&image, "at", "rw,norestart,uring=on");
        let pid = Pid::from_raw(worker_pid(&draconis) as i32).unwrap();
        assert_clients_end(&draconis, &at, || kill_process(pid, Signal::KILL).unwrap());
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    }
    // A worker that hangs is killed, and its keeper may be killed as well.
    let at = draconis.mount(&image, "at", "rw,norestart,uring=on,deadline=1");
    let pid = worker_pid(&draconis);
    assert_clients_end(&draconis, &at, || stop_process(pid));
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    draconis.run_ok(["check".as_ref(), image.as_os_str()]);
}

#[test]
fn ring_is_used_only_where_it_can_be() {
    if !has_fuse("options of rings") {
        return;
    }
    let draconis = Draconis::new();
    let (image, at) = (make_volume(&draconis, "ext2"), draconis.make_dir("at"));
    let mount = |options: &str| {
        let words = ["mount".as_ref(), "-o".as_ref(), options.as_ref(), image.as_os_str()];
        draconis.run_failing([&words[..], &[at.as_os_str()]].concat())
    };
    let said = mount("uring=odd");
    assert!(said.contains("'uring' needs auto, on or off"), "{said}");
    let said = mount("uring=on");
    assert!(said.contains("'uring=on'") && said.contains("add norestart"), "{said}");
    for options in ["rw", "rw,norestart,uring=off"] {
        let at = draconis.mount(&image, "at", options);
        assert!(!is_over_ring(&draconis), "{options}");
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    }
    let enabled = std::fs::read_to_string(ENABLE_URING_FILE).is_ok_and(|it| it.starts_with('Y'));
    if !enabled {
        let said = mount("norestart,uring=on");
        assert!(said.contains("enable_uring") || said.contains("of root"), "{said}");
    }
    let at = draconis.mount(&image, "at", "rw,norestart");
    assert_eq!(is_over_ring(&draconis), enabled && is_root());
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    run_e2fsck(&image);
}
