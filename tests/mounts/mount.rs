//! Mounts: what programs see through them, and the worker's sandbox.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{
    Draconis, IgnoredProperties, KernelMount, assert_same_trees, has_fuse, is_installed, is_root,
    make_odd_tree, make_source_tree, mke2fs, mounts_below, report_skipped, scan_tree, unmount_by,
    wait_until,
};

/// Creates a small volume with a file.
fn make_small_volume(draconis: &Draconis, name: &str) -> std::path::PathBuf {
    let tree = draconis.make_dir("small");
    std::fs::write(tree.join("hello"), "hello\n").unwrap();
    std::fs::write(tree.join("large"), vec![7; 3 << 20]).unwrap();
    let image = draconis.path(name);
    mke2fs(&image, Some(&tree), &["-t", "ext2"], "8M");
    image
}

fn worker_pid(draconis: &Draconis) -> i32 {
    draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap() as i32
}

fn signal_process(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn mount_shows_same_tree_as_kernel() {
    if !has_fuse("comparing a mount with the kernel") {
        return;
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    make_odd_tree(&tree);
    for (block, inode) in [("1024", "128"), ("2048", "256"), ("4096", "256")] {
        let image = draconis.path("odd.img");
        mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", block, "-I", inode], "64M");
        let kernel = KernelMount::mount(&image, draconis.path("kernel"), "comparing a mount");
        let ours = draconis.mount(&image, "ours", "ro");
        let seen = scan_tree(&ours, IgnoredProperties::default());
        assert!(seen.len() > 300);
        if let Some(kernel) = kernel {
            assert_same_trees(&seen, &scan_tree(&kernel.at, IgnoredProperties::default()));
            let statfs = |at: &Path| {
                let s = rustix::fs::statfs(at).unwrap();
                (s.f_bsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_namelen)
            };
            assert_eq!(statfs(&ours), statfs(&kernel.at));
        }
        draconis.run_ok(["umount", ours.to_str().unwrap()]);
    }
}

/// Returns the alternating starts of data and holes in a file.
fn data_and_hole_starts(path: &Path) -> Vec<(bool, u64)> {
    use rustix::fs::{SeekFrom, seek};
    let file = std::fs::File::open(path).unwrap();
    let end = file.metadata().unwrap().len();
    let beyond = [SeekFrom::Data(end), SeekFrom::Hole(end), SeekFrom::Data(end + 4096)];
    for whence in beyond {
        assert_eq!(seek(&file, whence), Err(rustix::io::Errno::NXIO), "{whence:?}");
    }
    let (mut found, mut at, mut data) = (vec![], 0, true);
    loop {
        match seek(&file, if data { SeekFrom::Data(at) } else { SeekFrom::Hole(at) }) {
            Ok(next) => at = next,
            Err(rustix::io::Errno::NXIO) => return found,
            Err(errno) => panic!("{path:?} at {at}: {errno}"),
        }
        found.push((data, at));
        data = !data;
    }
}

#[test]
fn holes_match_kernel() {
    if !has_fuse("seeking holes") {
        return;
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    make_odd_tree(&tree);
    for block in ["1024", "4096"] {
        let image = draconis.path("odd.img");
        mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", block], "64M");
        let kernel = KernelMount::mount(&image, draconis.path("kernel"), "comparing holes");
        let ours = draconis.mount(&image, "ours", "ro");
        for name in ["sparse", "all hole", "big", "empty", "one"] {
            let found = data_and_hole_starts(&ours.join(name));
            let pieces = match name {
                "sparse" => 4,
                "all hole" | "empty" => 0,
                _ => 2,
            };
            assert_eq!(found.len(), pieces, "{name} {found:?}");
            if let Some(kernel) = &kernel {
                assert_eq!(found, data_and_hole_starts(&kernel.at.join(name)), "{name}, {block}");
            }
        }
        draconis.run_ok(["umount", ours.to_str().unwrap()]);
    }
}

#[test]
fn mounted_real_tree_matches_source() {
    if !has_fuse("comparing a real tree") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("sources.img");
    let tree = draconis.make_dir("tree");
    make_source_tree(&tree);
    mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", "1024"], "256M");
    let Some(kernel) = KernelMount::mount(&image, draconis.path("kernel"), "a real tree") else {
        return;
    };
    // Caches too small to keep anything: eviction must not be visible.
    let options = "ro,inode_cache=64,block_map_cache=16,data_cache=1M";
    let ours = draconis.mount(&image, "ours", options);
    assert_same_trees(
        &scan_tree(&ours, IgnoredProperties::default()),
        &scan_tree(&kernel.at, IgnoredProperties::default()),
    );
}

#[test]
fn status_reports_all_fields() {
    if !has_fuse("status") {
        return;
    }
    let draconis = Draconis::new();
    assert_eq!(draconis.status()["mounts"].as_array().unwrap().len(), 0);
    let image = make_small_volume(&draconis, "a.img");
    let at = draconis.mount(&image, "at", "ro,data_cache=4M,inode_cache=99");
    assert_eq!(std::fs::read_to_string(at.join("hello")).unwrap(), "hello\n");
    let status = draconis.status();
    let mount = &status["mounts"][0];
    assert_eq!(mount["volume"], image.to_str().unwrap());
    assert_eq!(mount["mount_point"], at.to_str().unwrap());
    assert_eq!((&mount["state"], &mount["read_only"]), (&"serving".into(), &true.into()));
    assert!(mount["memory_bytes"].as_u64().unwrap() > 1 << 20);
    let sandbox = &mount["sandbox"];
    assert_eq!((&sandbox["seccomp"], &sandbox["no_capabilities"]), (&true.into(), &true.into()));
    assert_ne!(sandbox["landlock"], "none");
    let worker = &mount["worker"];
    assert!(worker["requests"].as_u64().unwrap() >= 2);
    let caches = worker["caches"].as_array().unwrap();
    let names: Vec<&str> = caches.iter().map(|cache| cache["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["inode", "block_map", "data"]);
    assert_eq!((&caches[0]["capacity"], &caches[2]["capacity"]), (&99.into(), &(4 << 20).into()));
    assert!(draconis.run_ok(["status"]).contains("seccomp kills"));
}

/// Reads a field of a process's status.
fn proc_status(pid: i32, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap_or_default();
    line[field.len()..].trim_start_matches(':').trim().to_string()
}

#[test]
fn worker_has_minimal_privileges() {
    if !has_fuse("the sandbox") {
        return;
    }
    let draconis = Draconis::new();
    draconis.mount(&make_small_volume(&draconis, "a.img"), "at", "ro");
    let pid = worker_pid(&draconis);
    assert_eq!(proc_status(pid, "Seccomp"), "2");
    assert_eq!(proc_status(pid, "NoNewPrivs"), "1");
    assert_eq!(proc_status(pid, "CapEff"), "0000000000000000");
    assert_eq!(proc_status(pid, "CapPrm"), "0000000000000000");
    assert!(!proc_status(pid, "Uid").starts_with("0\t"), "still root");
    // Descriptors of the worker: standard streams, two to the manager, the image, the FUSE
    // connection, and the session's memory, pidfd and eventfds. No directory, no other file.
    if is_root() {
        let mut regular = 0;
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let link = std::fs::read_link(entry.unwrap().path()).unwrap();
            let link = link.to_string_lossy().into_owned();
            let known = ["/dev/null", "/dev/fuse", "socket:", "anon_inode:", "/memfd:", "pipe:"];
            if known.iter().any(|known| link.starts_with(known)) {
                continue;
            }
            assert!(link.ends_with("a.img") || link.ends_with("manager.log"), "{link}");
            regular += usize::from(link.ends_with("a.img"));
        }
        assert_eq!(regular, 1);
    }
    // The environment contains only a setting of the allocator.
    if let Ok(environment) = std::fs::read(format!("/proc/{pid}/environ")) {
        assert_eq!(environment.split(|&b| b == 0).filter(|it| !it.is_empty()).count(), 1);
        assert!(environment.starts_with(b"GLIBC_TUNABLES="));
    }
}

#[test]
fn volume_and_mount_point_in_use_are_refused() {
    if !has_fuse("double use") {
        return;
    }
    let draconis = Draconis::new();
    let (one, two) = (make_small_volume(&draconis, "a.img"), make_small_volume(&draconis, "b.img"));
    let at = draconis.mount(&one, "at", "ro");
    let elsewhere = draconis.make_dir("elsewhere");
    let mount = |draconis: &Draconis, image: &Path, at: &Path| {
        draconis.run_failing(["mount", "-o", "ro", image.to_str().unwrap(), at.to_str().unwrap()])
    };
    let said = mount(&draconis, &one, &elsewhere);
    assert!(said.contains("is already mounted on"), "{said}");
    // By another name of the image, too.
    let link = draconis.path("link.img");
    std::fs::hard_link(&one, &link).unwrap();
    assert!(mount(&draconis, &link, &elsewhere).contains("is already mounted on"));
    let said = mount(&draconis, &two, &at);
    assert!(said.contains("is already a mount point"), "{said}");
    // Another manager and a tool can read at the same time; none can write.
    let other = Draconis::new();
    let beside = other.mount(&one, "beside", "ro");
    other.run_ok(["ls", one.to_str().unwrap()]);
    other.run_ok(["umount", beside.to_str().unwrap()]);
    let (image, dir) = (one.to_str().unwrap(), elsewhere.to_str().unwrap());
    assert!(other.run_failing(["mount", image, dir]).contains("is in use by another"));
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    // While the volume may be written, no other process can read it.
    let at = draconis.mount(&one, "at", "nofuseblk");
    assert!(mount(&other, &one, &elsewhere).contains("is in use by another"));
    assert!(other.run_failing(["ls", image]).contains("is mounted"));
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    other.run_ok(["ls", image]);
}

#[test]
fn every_way_of_unmounting_ends_mount() {
    if !has_fuse("unmounting") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    for way in [&["umount"][..], &["fusermount3", "-u"]] {
        if !is_installed(way[0]) {
            report_skipped(format_args!("unmounting by {} needs it", way[0]));
            continue;
        }
        let at = draconis.mount(&image, "at", "ro");
        let worker = worker_pid(&draconis);
        if !is_root() && way[0] == "umount" {
            draconis.run_ok(["umount", at.to_str().unwrap()]);
        } else {
            unmount_by(way, &at);
        }
        wait_until("the worker ends", || !Path::new(&format!("/proc/{worker}")).exists());
        wait_until("status is empty", || {
            draconis.status()["mounts"].as_array().unwrap().is_empty()
        });
    }
    let at = draconis.mount(&image, "at", "ro");
    let held = std::fs::File::open(at.join("hello")).unwrap();
    let said = draconis.run_failing(["umount", at.to_str().unwrap()]);
    assert!(said.contains("busy"), "{said}");
    drop(held);
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    assert!(mounts_below(&at).is_empty());
}

#[test]
fn foreground_mount_ends_on_unmount_and_ctrl_c() {
    if !has_fuse("a foreground mount") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    let at = draconis.make_dir("at");
    for by_signal in [false, true] {
        let mut child = draconis
            .command()
            .args(["mount", "-f", "-o", "ro"])
            .args([&image, &at])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("it is mounted", || at.join("hello").exists());
        // The mount is in the table before it is announced: until then its worker has no ID.
        wait_until("it is served", || draconis.status()["mounts"][0]["state"] == "serving");
        assert_eq!(draconis.status()["mounts"].as_array().unwrap().len(), 1);
        if by_signal {
            signal_process(child.id() as i32, rustix::process::Signal::INT);
        } else {
            draconis.run_ok(["umount", at.to_str().unwrap()]);
        }
        assert!(child.wait().unwrap().success());
        assert!(mounts_below(&at).is_empty());
    }
}

#[test]
fn mount_options_are_honoured() {
    if !has_fuse("mount options") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis, "a.img");
    let at = draconis.make_dir("at");
    let (image, at) = (image.to_str().unwrap(), at.to_str().unwrap());
    let said = draconis.run_failing(["mount", "-o", "ro,frobnicate", image, at]);
    assert!(said.contains("unknown mount option 'frobnicate'"), "{said}");
    let said = draconis.run_failing(["mount", "-o", "ro", "/no/such", at]);
    assert!(said.contains("/no/such"), "{said}");
    let said = draconis.run_failing(["mount", "-o", "ro", image, "/no/such"]);
    assert!(said.contains("/no/such"), "{said}");
    let said = draconis.run_failing(["mount", "-o", "ro,offset=64M", image, at]);
    assert!(said.contains("reaches beyond"), "{said}");
    // A refused volume leaves no mount behind.
    assert!(mounts_below(Path::new(at)).is_empty());
    assert!(draconis.status()["mounts"].as_array().unwrap().is_empty());
}

#[test]
fn mounted_program_runs_and_is_read_only() {
    if !has_fuse("running from a mount") {
        return;
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("programs");
    std::fs::copy("/bin/echo", tree.join("echo")).unwrap();
    let image = draconis.path("programs.img");
    mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", "1024"], "8M");
    let at = draconis.mount(&image, "at", "ro");
    // A program is mapped, not read: this tests mmap over FUSE.
    let output = Command::new(at.join("echo")).arg("mapped").output().unwrap();
    assert_eq!(output.stdout, b"mapped\n");
    let error = std::fs::write(at.join("new"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(30), "EROFS, not {error}");
    let error = std::fs::remove_file(at.join("echo")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(30), "EROFS, not {error}");
}
