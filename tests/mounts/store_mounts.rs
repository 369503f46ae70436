//! Mounted disks of a store: several at once, with killed workers and an upgrade; and what other
//! commands may do meanwhile.

use std::path::PathBuf;

use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_fuse, mounts_below, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Creates a store with an ext2 volume `one` and an ext4 volume `two`.
fn create_store() -> (Draconis, PathBuf) {
    let draconis = Draconis::new();
    let (store, profile) = (draconis.path("s"), draconis.path("profile"));
    let text = r#"{"layout":"cow","page_bytes":4096,"segment_bytes":262144,"queue_depth":8}"#;
    std::fs::write(&profile, text).unwrap();
    let (name, profile) = (store.to_str().unwrap(), profile.to_str().unwrap());
    draconis.run_ok(["store", "create", name, "--size", "128M", "--sparse", "--profile", profile]);
    for (disk, kind) in [("one", "ext2"), ("two", "ext4")] {
        draconis.run_ok(["store", "disk", name, disk, "32M"]);
        draconis.run_ok(["format", "-t", kind, &format!("{name}#{disk}")]);
    }
    (draconis, store)
}

fn kill_pid(pid: &Value) {
    let pid = Pid::from_raw(pid.as_i64().unwrap() as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

/// Returns the process with this command and this runtime directory in its environment.
fn find_process(command: &str, run: &str) -> Option<u64> {
    let of = |pid: u64| -> Option<u64> {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let ours = String::from_utf8_lossy(&environment).contains(run);
        (ours && line.split(|&byte| byte == 0).nth(1) == Some(command.as_bytes())).then_some(pid)
    };
    let names = std::fs::read_dir("/proc").unwrap().flatten();
    names.filter_map(|name| name.file_name().to_str()?.parse().ok()).find_map(of)
}

/// Checks the store and each volume.
fn check_store_and_volumes(draconis: &Draconis, store: &std::path::Path) {
    draconis.run_ok(["store".as_ref(), "check".as_ref(), store.as_os_str()]);
    for disk in ["one", "two"] {
        let image = draconis.path(&format!("{disk}.img"));
        let name = [store, std::path::Path::new(disk), &image].map(|it| it.to_str().unwrap());
        draconis.run_ok([&["store", "get"], &name[..]].concat());
        run_e2fsck(&image);
    }
}

#[test]
fn two_disks_of_one_store_are_mounted() {
    if !has_fuse("mounts of stores") {
        return;
    }
    let (draconis, store) = create_store();
    let names = ["one", "two"].map(|disk| PathBuf::from(format!("{}#{disk}", store.display())));
    let [one, two] = [0, 1].map(|nth| draconis.mount(&names[nth], ["a", "b"][nth], "rw"));
    let three = draconis.make_dir("c");
    let errors = draconis.run_failing(["mount".as_ref(), names[0].as_os_str(), three.as_os_str()]);
    assert!(errors.contains("s#one is already mounted on"), "{errors}");
    let errors = draconis.run_failing(["ls".as_ref(), names[0].as_os_str()]);
    assert!(errors.contains("in use: unmount its disks"), "{errors}");
    // The listing comes from the process of the store.
    let listed = draconis.run_ok(["store".as_ref(), "ls".as_ref(), store.as_os_str()]);
    assert!(listed.contains("\tone\n") && listed.contains("\ttwo\n"), "{listed}");
    let listed = draconis.run_ok(["store", "ls", "--json", store.to_str().unwrap()]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[1]["len_bytes"], 32 << 20, "{listed}");
    let missing = format!("{}#three", store.display());
    let errors = draconis.run_failing(["mount".as_ref(), missing.as_ref(), three.as_os_str()]);
    assert!(errors.contains("no disk three"), "{errors}");
    // Concurrently, with killed workers, and with an upgrade.
    for round in 0..4 {
        std::thread::scope(|scope| {
            for at in [&one, &two] {
                scope.spawn(move || {
                    let dir = at.join(format!("dir{round}"));
                    std::fs::create_dir(&dir).unwrap();
                    for file in 0..60 {
                        std::fs::write(dir.join(format!("{file}")), vec![file; 9000]).unwrap();
                    }
                    std::fs::rename(&dir, at.join(format!("moved{round}"))).unwrap();
                });
            }
            if round % 2 == 0 {
                let status = draconis.status();
                [0, 1].iter().for_each(|nth| kill_pid(&status["mounts"][nth]["worker_pid"]));
            } else {
                draconis.run_ok(["upgrade"]);
            }
        });
    }
    let status = draconis.status();
    assert_eq!(status["mounts"][1]["volume"], names[1].to_str().unwrap(), "{status}");
    assert_eq!(status["mounts"][1]["restarts"], 2, "{status}");
    for at in [&one, &two] {
        for round in 0..4 {
            for file in 0..60 {
                let bytes = std::fs::read(at.join(format!("moved{round}/{file}"))).unwrap();
                assert_eq!(bytes, vec![file; 9000]);
            }
        }
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    }
    // After the last unmount the store is free.
    check_store_and_volumes(&draconis, &store);
    let at = draconis.mount(&names[1], "a", "ro");
    assert_eq!(std::fs::read(at.join("moved3/7")).unwrap(), vec![7; 9000]);
    std::fs::write(at.join("new"), "x").unwrap_err();
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}

#[test]
fn killed_store_process_ends_mounts_but_keeps_synced_data() {
    if !has_fuse("killing the process of a store") {
        return;
    }
    let (draconis, store) = create_store();
    let run = draconis.path("run");
    let run = run.to_str().unwrap();
    for victim in ["store-keeper", "store-process"] {
        let name = PathBuf::from(format!("{}#two", store.display()));
        let at = draconis.mount(&name, "a", "rw,commit=1000");
        let synced = at.join(format!("synced-{victim}"));
        std::fs::write(&synced, "kept").unwrap();
        rustix::fs::syncfs(std::fs::File::open(&at).unwrap()).unwrap();
        let file = std::fs::File::open(&synced).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let pid = if victim == "store-keeper" {
            find_process(victim, run).unwrap()
        } else {
            // It has no environment: it is the only child of the keeper.
            let keeper = find_process("store-keeper", run).unwrap();
            let children = format!("/proc/{keeper}/task/{keeper}/children");
            std::fs::read_to_string(children).unwrap().trim().parse().unwrap()
        };
        kill_pid(&pid.into());
        // No call blocks forever, and no data is wrongly acknowledged as durable.
        let _ = std::fs::write(at.join("lost"), "x");
        if let Ok(file) = std::fs::File::create(at.join("lost too")) {
            let synced = file.sync_all();
            assert!(synced.is_err() || victim == "store-keeper", "{victim}");
        }
        let _ = draconis.run(["umount".as_ref(), "-f".as_ref(), at.as_os_str()]);
        wait_until("it is unmounted", || mounts_below(&at).is_empty());
        wait_until("the store is free", || {
            draconis.run(["ls".as_ref(), name.as_os_str()]).status.success()
        });
        let path = format!("{}:/synced-{victim}", name.display());
        assert_eq!(draconis.run_ok(["cat", &path]), "kept");
        check_store_and_volumes(&draconis, &store);
    }
}
