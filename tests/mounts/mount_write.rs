//! Writable mounts: common programs, and what remains when a process dies.
//!
//! After every test `e2fsck -fn` must report nothing, and the kernel's driver must show what the
//! mount showed.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::volume::{MountedVolume, run_e2fsck, run_ok, run_shell};
use crate::common::{
    Draconis, IgnoredProperties, assert_same_trees, has_fuse, has_root, has_tool, make_odd_tree,
    make_source_tree, mke2fs, mounts_below, scan_tree, wait_until,
};
use draconis_device::Random;
use rustix::fs::{CWD, FallocateFlags, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn cp_to_mount_preserves_everything() {
    if !has_fuse("copying a tree into a mount") {
        return;
    }
    for block in ["1024", "4096"] {
        let volume = MountedVolume::new(block, "96M", "rw,noatime");
        let tree = volume.draconis.make_dir("tree");
        make_odd_tree(&tree);
        if block == "4096" {
            // Reading the sparse file once through every level of its map suffices.
            std::fs::remove_file(tree.join("sparse")).unwrap();
        }
        run_ok(Command::new("cp").args(["-a", "--sparse=always"]).arg(&tree).arg(&volume.at));
        let copy = IgnoredProperties { what_a_copy_loses: true, ..IgnoredProperties::default() };
        assert_same_trees(&scan_tree(&tree, copy), &scan_tree(&volume.at("tree"), copy));
        volume.unmount_and_check();
    }
}

#[test]
#[ignore = "long: a minute: all of /usr/include"]
fn unpacked_archive_can_be_removed() {
    if !has_fuse("unpacking into a mount") {
        return;
    }
    for options in ["rw,noatime", "rw,noatime,writeback"] {
        unpack_and_remove(&MountedVolume::new("1024", "256M", options));
    }
}

fn unpack_and_remove(volume: &MountedVolume) {
    let space = || {
        let s = rustix::fs::statvfs(&volume.at).unwrap();
        (s.f_bfree, s.f_ffree)
    };
    let before = space();
    let tree = volume.draconis.make_dir("tree");
    make_source_tree(&tree);
    let unpack = format!("tar -C {} --format=posix -cf - . | tar -xf -", tree.display());
    std::fs::create_dir(volume.at("sources")).unwrap();
    run_shell(&unpack, &volume.at("sources"));
    let copy = IgnoredProperties { what_a_copy_loses: true, ..IgnoredProperties::default() };
    assert_same_trees(&scan_tree(&tree, copy), &scan_tree(&volume.at("sources"), copy));
    run_shell("mv sources other; cp -r other twice; rm -r other twice", &volume.at);
    // Removed files are freed once the kernel has forgotten their inodes.
    wait_until("all space is free again", || space() == before);
    volume.unmount_and_check();
}

#[test]
fn compiled_programs_run_on_mount() {
    if !has_fuse("programs on a mount") || !has_tool("programs on a mount", "cc") {
        return;
    }
    let volume = MountedVolume::new("4096", "64M", "rw");
    run_shell(
        "echo 'int main(void){return 7;}' > a.c; cc -O2 -o a a.c; r=0; ./a || r=$?; test $r = 7",
        &volume.at,
    );
    volume.unmount_and_check();
}

#[test]
#[ignore = "tools: git, sqlite3, rsync"]
fn common_programs_work_on_mount() {
    if !has_fuse("programs on a mount") {
        return;
    }
    let volume = MountedVolume::new("4096", "256M", "rw");
    let tree = volume.draconis.make_dir("tree");
    make_source_tree(&tree);
    let sources = tree.display();
    if has_tool("programs on a mount", "git") {
        run_shell(
            &format!(
                "mkdir repo; cd repo; git init -q .; cp -r {sources} sources; git add -A
             git -c user.name=a -c user.email=a@b commit -qm one; git rm -rq sources/library-1
             git -c user.name=a -c user.email=a@b commit -qm two; git gc -q; git fsck --full
             test -z \"$(git status --short)\"; git checkout -q HEAD~1; test -d sources/library-1"
            ),
            &volume.at,
        );
    }
    if has_tool("programs on a mount", "sqlite3") {
        run_shell(
            "for mode in delete wal; do
               { echo \"pragma journal_mode=$mode; create table t$mode(a integer, b text);\"
                 for i in $(seq 200); do echo \"insert into t$mode values($i, hex(randomblob(500)));\"; done
                 echo \"update t$mode set b='x' where a % 3 = 0; vacuum; pragma integrity_check;\"
               } | sqlite3 base > out; tail -1 out | grep -q '^ok$'
               test \"$(sqlite3 base \"select count(*) from t$mode where b='x'\")\" = 66
             done",
            &volume.at,
        );
    }
    if has_tool("programs on a mount", "rsync") {
        run_shell(
            &format!("rsync -aHX {sources}/ r/; test -z \"$(rsync -aHXnci {sources}/ r/)\""),
            &volume.at,
        );
    }
    volume.unmount_and_check();
}

#[test]
fn rename_exchange_link_and_replace() {
    if !has_fuse("renaming on a mount") {
        return;
    }
    let volume = MountedVolume::new("1024", "16M", "rw,noatime");
    let at = |name: &str| volume.at(name);
    let rename =
        |from: &str, to: &str, how| rustix::fs::renameat_with(CWD, at(from), CWD, at(to), how);
    std::fs::create_dir_all(at("a/b")).unwrap();
    std::fs::write(at("one"), "1").unwrap();
    std::fs::write(at("two"), "2").unwrap();
    assert_eq!(rename("one", "two", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename("one", "two", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(std::fs::read(at("one")).unwrap(), b"2");
    rename("a/b", "one", RenameFlags::EXCHANGE).unwrap();
    assert!(at("one").is_dir() && at("a/b").is_file());
    assert_eq!(std::fs::metadata(at("a")).unwrap().nlink(), 2);
    std::fs::hard_link(at("two"), at("a/three")).unwrap();
    std::fs::rename(at("two"), at("a/three")).unwrap();
    assert_eq!(std::fs::metadata(at("a/three")).unwrap().nlink(), 2, "the same file: no change");
    std::fs::rename(at("two"), at("a/b")).unwrap();
    assert_eq!(std::fs::read(at("a/b")).unwrap(), b"1");
    let into_itself = std::fs::rename(at("a"), at("a/c")).unwrap_err();
    assert_eq!(into_itself.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
    let long = "n".repeat(255);
    std::fs::write(at(&long), "").unwrap();
    let too_long = std::fs::write(at(&format!("{long}n")), "").unwrap_err();
    assert_eq!(too_long.raw_os_error(), Some(Errno::NAMETOOLONG.raw_os_error()));
    for i in 0..500 {
        std::fs::write(at(&format!("a/entry {i}")), format!("{i}")).unwrap();
    }
    for i in (0..500).step_by(3) {
        std::fs::rename(at(&format!("a/entry {i}")), at(&format!("one/{i}"))).unwrap();
    }
    volume.unmount_and_check();
}

#[test]
fn data_and_block_counts_match_after_all_write_calls() {
    if !has_fuse("writing to a mount") {
        return;
    }
    for block in ["1024", "4096"] {
        let volume = MountedVolume::new(block, "64M", "rw,noatime");
        let path = volume.at("file");
        let mut model = vec![0; 3 << 20];
        let open = |flags: OFlags| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            options.custom_flags(flags.bits() as i32).open(&path).unwrap()
        };
        let (cached, direct) = (open(OFlags::empty()), open(OFlags::DIRECT));
        cached.set_len(model.len() as u64).unwrap();
        let mut random = Random::new(0x1234_5678_9abc_def1);
        for round in 1..120 {
            let unit = if round % 4 == 0 { 4096 } else { 1 };
            let len = 1 + random.next_below(40_000 / unit) as usize;
            let (len, unit) = (len * unit as usize, unit as usize);
            let from = random.next_below(((model.len() - len) / unit) as u64) as usize * unit;
            let range = from..from + len;
            match round % 4 {
                0 => {
                    model[range.clone()].fill(round);
                    direct.write_all_at(&model[range], from as u64).unwrap();
                }
                1 => {
                    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(&cached, how, from as u64, len as u64).unwrap();
                    model[range].fill(0);
                }
                2 if round % 3 == 0 => {
                    let how = FallocateFlags::ZERO_RANGE;
                    rustix::fs::fallocate(&cached, how, from as u64, len as u64).unwrap();
                    model[range].fill(0);
                }
                _ => {
                    model[range.clone()].fill(round);
                    cached.write_all_at(&model[range], from as u64).unwrap();
                }
            }
            if round % 10 == 0 {
                cached.sync_data().unwrap();
            }
        }
        let mut found = vec![0; model.len()];
        direct.read_exact_at(&mut found, 0).unwrap();
        assert!(found == model, "{block}, read past the cache");
        assert!(std::fs::read(&path).unwrap() == model, "{block}");
        // e2fsck treats blocks beyond the end as damage: ext2 cannot mark them as intended.
        let behind = rustix::fs::fallocate(&cached, FallocateFlags::KEEP_SIZE, 4 << 20, 1 << 20);
        assert_eq!(behind, Err(Errno::OPNOTSUPP));
        rustix::fs::fallocate(&cached, FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
        assert_eq!(cached.metadata().unwrap().len(), 3 << 20);
        rustix::fs::fallocate(&cached, FallocateFlags::empty(), 3 << 20, 100_000).unwrap();
        assert_eq!(cached.metadata().unwrap().len(), (3 << 20) + 100_000);
        let mut append = File::options().append(true).open(&path).unwrap();
        append.write_all(b"tail").unwrap();
        append.sync_all().unwrap();
        cached.set_len(1_000_001).unwrap();
        cached.set_len(2 << 20).unwrap();
        model.truncate(1_000_001);
        model.resize(2 << 20, 0);
        assert!(std::fs::read(&path).unwrap() == model, "{block}, cut");
        drop((append, cached, direct));
        volume.unmount_and_check();
    }
}

#[test]
fn shared_mappings_are_written_back() {
    if !has_fuse("mapping files of a mount") || !has_tool("mapping files of a mount", "python3") {
        return;
    }
    let volume = MountedVolume::new("1024", "16M", "rw,noatime");
    let script = "import mmap, os
fd = os.open('f', os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 1000000)
m = mmap.mmap(fd, 1000000)
for i in range(0, 1000000, 5003):
    m[i:i+3] = b'abc'
m.flush()
assert os.pread(fd, 3, 5003 * 7) == b'abc'
os.pwrite(fd, b'XYZ', 5003)
assert m[5003:5006] == b'XYZ'
";
    run_ok(Command::new("python3").args(["-c", script]).current_dir(&volume.at));
    assert_eq!(&std::fs::read(volume.at("f")).unwrap()[5003 * 3..][..3], b"abc");
    volume.unmount_and_check();
}

#[test]
fn orphan_is_usable_until_closed() {
    if !has_fuse("unlinked files of a mount") {
        return;
    }
    let volume = MountedVolume::new("1024", "16M", "rw,noatime,norestart");
    let free = || rustix::fs::statvfs(&volume.at).unwrap().f_bfree;
    std::fs::write(volume.at("before"), "x").unwrap();
    let before = free();
    let mut file =
        File::options().read(true).write(true).create_new(true).open(volume.at("file")).unwrap();
    file.write_all(&[7; 2_000_000]).unwrap();
    file.sync_all().unwrap();
    std::fs::remove_file(volume.at("file")).unwrap();
    file.write_all(&[8; 1_000_000]).unwrap();
    file.sync_all().unwrap();
    assert!(free() < before);
    let mut found = vec![];
    File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)))
        .unwrap()
        .read_to_end(&mut found)
        .unwrap();
    assert_eq!((found.len(), found[0], found[2_999_999]), (3_000_000, 7, 8));
    drop(file);
    wait_until("its space is free", || free() == before);
    // A file that is open when the worker dies is freed by the next mount.
    let open = File::create_new(volume.at("orphan")).unwrap();
    open.write_all_at(&[9; 500_000], 0).unwrap();
    std::fs::remove_file(volume.at("orphan")).unwrap();
    open.sync_all().unwrap();
    volume.kill_worker();
    drop(open);
    volume.draconis.mount(&volume.image, "at", "rw,noatime");
    assert_eq!(free(), before);
    volume.unmount_and_check();
}

#[test]
fn orphan_is_freed_at_unmount() {
    if !has_fuse("unmounting with unlinked files") {
        return;
    }
    let volume = MountedVolume::new("1024", "16M", "rw");
    let free = || rustix::fs::statvfs(&volume.at).unwrap().f_bfree;
    let before = free();
    for _ in 0..5 {
        let files: Vec<File> = (0..50)
            .map(|i| {
                let file = File::create_new(volume.at(&format!("{i}"))).unwrap();
                file.write_all_at(&[7; 20_000], 0).unwrap();
                std::fs::remove_file(volume.at(&format!("{i}"))).unwrap();
                file
            })
            .collect();
        drop(files);
        // The kernel may not have sent FORGET yet.
        volume.unmount();
        run_e2fsck(&volume.image);
        volume.draconis.mount(&volume.image, "at", "rw");
        assert_eq!(free(), before);
    }
}

#[test]
fn owners_modes_acls_and_inode_flags() {
    if !has_fuse("attributes on a mount") || !has_root("attributes on a mount") {
        return;
    }
    let volume = MountedVolume::new("1024", "16M", "rw,noatime");
    let mode = |name: &str| std::fs::metadata(volume.at(name)).unwrap().mode() & 0o7777;
    run_shell(
        "mkdir team; chgrp 1234 team; chmod 2775 team; touch team/file; mkdir team/dir
         umask 027; touch masked; chmod 1777 .",
        &volume.at,
    );
    let found = std::fs::metadata(volume.at("team/dir")).unwrap();
    assert_eq!((found.gid(), found.mode() & 0o2000, mode("masked")), (1234, 0o2000, 0o640));
    if has_tool("attributes on a mount", "setfacl") {
        run_shell(
            "mkdir lists; setfacl -m d:u:77:rwx,d:g::r-x,d:o::--- lists
             umask 077; touch lists/file; mkdir lists/dir
             getfacl -cpn lists/file | grep -q '^user:77:rwx'
             getfacl -cpn lists/dir | grep -q '^default:user:77:rwx'
             setfacl -m u:88:r team/file; chmod g-w team/file
             getfacl -cpn team/file | grep -q '^mask::r--'
             setfacl -b team/file",
            &volume.at,
        );
        // The default ACL applies, not the umask.
        assert_eq!(mode("lists/file"), 0o660);
    }
    if has_tool("attributes on a mount", "chattr") {
        run_shell("touch fixed log; chattr +i fixed; chattr +a log; echo x >> log", &volume.at);
        let refused = |error: std::io::Error| error.raw_os_error();
        let eperm = Some(Errno::PERM.raw_os_error());
        assert_eq!(refused(std::fs::write(volume.at("fixed"), "x").unwrap_err()), eperm);
        assert_eq!(refused(std::fs::remove_file(volume.at("fixed")).unwrap_err()), eperm);
        assert_eq!(refused(std::fs::remove_file(volume.at("log")).unwrap_err()), eperm);
        run_shell(
            "lsattr fixed | grep -q i; lsattr log | grep -q a; chattr -i fixed; rm fixed",
            &volume.at,
        );
    }
    if has_tool("attributes on a mount", "setpriv") {
        let nobody = |script: &str| {
            let mut command = Command::new("setpriv");
            command.args([
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "sh",
                "-euc",
                script,
            ]);
            command.current_dir(&volume.at).stderr(Stdio::null()).status().unwrap().success()
        };
        std::fs::set_permissions(volume.draconis.dir.path(), PermissionsExt::from_mode(0o755))
            .unwrap();
        std::fs::write(volume.at("secret"), "x").unwrap();
        std::fs::set_permissions(volume.at("secret"), PermissionsExt::from_mode(0o600)).unwrap();
        assert!(!nobody("cat secret") && !nobody("rm -f secret") && !nobody("touch team/x"));
        std::fs::write(volume.at("suid"), "x").unwrap();
        std::fs::set_permissions(volume.at("suid"), PermissionsExt::from_mode(0o6777)).unwrap();
        assert!(nobody("echo x >> suid"));
        assert_eq!(mode("suid"), 0o777);
    }
    volume.unmount_and_check();
}

#[test]
fn full_volume_returns_enospc_and_stays_usable() {
    if !has_fuse("a full volume") {
        return;
    }
    let volume = MountedVolume::new("1024", "4M", "rw,noatime");
    let mut file = File::create_new(volume.at("file")).unwrap();
    let piece = [7; 65536];
    // The kernel accepts more than fits, and reports ENOSPC on write-back.
    let full = (0..200).find_map(|_| file.write_all(&piece).and_then(|()| file.sync_all()).err());
    assert_eq!(full.unwrap().raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    drop(file);
    let status = volume.draconis.status();
    assert_eq!(status["mounts"][0]["worker"]["failure"], serde_json::Value::Null);
    std::fs::remove_file(volume.at("file")).unwrap();
    wait_until("there is room again", || std::fs::write(volume.at("small"), "fits").is_ok());
    for i in 0.. {
        if let Err(error) = File::create_new(volume.at(&format!("{i}"))) {
            assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
            assert!(i > 500, "inodes end at {i}");
            break;
        }
    }
    volume.unmount_and_check();
}

#[test]
fn freed_space_is_usable_at_once() {
    if !has_fuse("room for the next call") {
        return;
    }
    let volume = MountedVolume::new("1024", "8M", "rw,noatime");
    let (rounds, ended) = (60, AtomicBool::new(false));
    let fill = |file: &mut File| {
        let mut piece = &[7; 1 << 18][..];
        while piece.len() >= 1024 {
            if file.write_all(piece).is_err() {
                piece = &piece[..piece.len() / 2];
            }
        }
    };
    std::thread::scope(|scope| {
        // The kernel sends FORGET messages behind the requests of others.
        for k in 0..3 {
            let (volume, ended) = (&volume, &ended);
            scope.spawn(move || {
                for i in (0u64..).take_while(|_| !ended.load(Ordering::Relaxed)) {
                    let missing = volume.at(&format!("none-{k}-{}", i % 1000));
                    assert!(std::fs::metadata(missing).is_err());
                }
            });
        }
        let done: std::io::Result<()> = (0..rounds).try_for_each(|i| {
            fill(&mut File::create(volume.at("large"))?);
            std::fs::remove_file(volume.at("large"))?;
            std::fs::create_dir(volume.at(&format!("{i}")))?;
            std::fs::write(volume.at(&format!("{i}/file")), [1; 5000])
        });
        ended.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    volume.unmount_and_check();
}

#[test]
fn device_errors_make_volume_read_only() {
    if !has_fuse("a device that fails") || !has_root("a device that fails") {
        return;
    }
    let draconis = Draconis::new();
    let small = draconis.make_dir("small");
    run_ok(Command::new("mount").args(["-t", "tmpfs", "-o", "size=6m", "tmpfs"]).arg(&small));
    let image = small.join("sparse.img");
    mke2fs(&image, None, &["-t", "ext2", "-b", "4096"], "64M");
    let at = draconis.mount(&image, "at", "rw");
    std::fs::write(at.join("early"), "kept").unwrap();
    File::open(at.join("early")).unwrap().sync_all().unwrap();
    let mut file = File::create_new(at.join("file")).unwrap();
    let failed =
        (0..64).find_map(|_| file.write_all(&[7; 1 << 20]).and_then(|()| file.sync_all()).err());
    let failed = failed.expect("sixty-four MiB in six").raw_os_error();
    let expected = [Errno::IO, Errno::ROFS, Errno::NOSPC].map(|e| Some(e.raw_os_error()));
    assert!(expected.contains(&failed), "{failed:?}");
    let refused = std::fs::write(at.join("late"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    assert_eq!(std::fs::read(at.join("early")).unwrap(), b"kept");
    let status = draconis.status();
    assert!(status["mounts"][0]["worker"]["failure"].is_string(), "{status}");
    assert_eq!(status["mounts"][0]["read_only"], true);
    assert!(draconis.run_ok(["status"]).contains("nothing is written any more"));
    drop(file);
    let errors = draconis.run_failing(["umount", at.to_str().unwrap()]);
    assert!(errors.contains("could not be written"), "{errors}");
    assert!(mounts_below(&at).is_empty());
    run_ok(Command::new("umount").arg(&small));
}

#[test]
#[ignore = "long: half a minute: workers killed under tar"]
fn killed_worker_leaves_clean_volume() {
    if !has_fuse("killing a worker that writes") {
        return;
    }
    let mut random = Random::new(0x2545_f491_4f6c_dd1d);
    let mut kept = 0;
    for round in 0..8 {
        let cache = if round % 2 == 0 { "nowriteback" } else { "writeback" };
        let volume =
            MountedVolume::new("1024", "128M", &format!("rw,norestart,commit=1,dirty=1M,{cache}"));
        let mut busy = Command::new("sh")
            .args(["-c", "tar -C /usr -cf - include | tar -xf -; rm -r include/linux; sync"])
            .current_dir(&volume.at)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        draconis_testkit::wait::pause(
            "the kill comes at any moment",
            Duration::from_millis(20 + random.next_below(1500)),
        );
        volume.kill_worker();
        busy.wait().unwrap();
        run_e2fsck(&volume.image);
        // Existing files are right, and the volume is usable.
        volume.draconis.mount(&volume.image, "at", "rw,noatime");
        kept += std::fs::read_dir(volume.at("include")).map_or(0, Iterator::count);
        std::fs::write(volume.at("after"), "x").unwrap();
        volume.unmount_and_check();
    }
    assert!(kept > 0, "no kill found anything committed");
}

#[test]
fn ending_manager_writes_back_changes() {
    if !has_fuse("ending the manager") {
        return;
    }
    let volume = MountedVolume::new("4096", "64M", "rw,commit=1000");
    std::fs::write(volume.at("closed"), vec![7; 5_000_000]).unwrap();
    let mut open = File::create_new(volume.at("open")).unwrap();
    open.write_all(b"not closed").unwrap();
    let manager = volume.draconis.status()["manager_pid"].as_i64().unwrap() as i32;
    kill_process(Pid::from_raw(manager).unwrap(), Signal::TERM).unwrap();
    wait_until("the manager ends", || !Path::new(&format!("/proc/{manager}")).exists());
    wait_until("the mount point is free", || mounts_below(&volume.at).is_empty());
    drop(open);
    run_e2fsck(&volume.image);
    let cat = |name: &str| {
        volume.draconis.run_ok(["cat", &format!("{}:/{name}", volume.image.display())])
    };
    assert_eq!((cat("closed").len(), cat("open")), (5_000_000, "not closed".into()));
}

#[test]
fn synced_data_survives_worker_death() {
    if !has_fuse("fsync and a killed worker") {
        return;
    }
    let volume = MountedVolume::new("1024", "32M", "rw,commit=1000,norestart");
    std::fs::create_dir(volume.at("dir")).unwrap();
    let mut file = File::create_new(volume.at("dir/file")).unwrap();
    file.write_all(&[7; 300_000]).unwrap();
    file.sync_all().unwrap();
    // Appended within the last block, and overwritten: must be durable, too.
    file.write_all(b"tail").unwrap();
    file.write_all_at(b"head", 0).unwrap();
    file.sync_data().unwrap();
    File::open(volume.at("dir")).unwrap().sync_all().unwrap();
    volume.kill_worker();
    drop(file);
    run_e2fsck(&volume.image);
    volume.draconis.mount(&volume.image, "at", "rw");
    let found = std::fs::read(volume.at("dir/file")).unwrap();
    assert_eq!(
        (found.len(), &found[..4], &found[300_000..]),
        (300_004, &b"head"[..], &b"tail"[..])
    );
    volume.unmount_and_check();
}

#[test]
fn unwritable_volume_is_mounted_read_only_with_reason() {
    if !has_fuse("volumes that must not be written") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    mke2fs(&image, None, &["-t", "ext2"], "8M");
    // An unknown read-only compatible feature.
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[1024 + 0x67] |= 0x40;
    std::fs::write(&image, bytes).unwrap();
    let at = draconis.make_dir("at");
    let output = draconis.run(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.contains("read-only: "), "{errors}");
    let refused = std::fs::write(at.join("x"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    assert_eq!(draconis.status()["mounts"][0]["read_only"], true);
}

#[test]
fn write_mount_options_are_honoured() {
    if !has_fuse("options of mounts that write") {
        return;
    }
    let draconis = Draconis::new();
    let (image, at) = (draconis.path("new.img"), draconis.make_dir("at"));
    let mount = |options: &str| {
        let options = ["mount", "-o", options].map(std::ffi::OsStr::new);
        draconis.run_ok(options.into_iter().chain([image.as_os_str(), at.as_os_str()]));
    };
    draconis.run_ok(["mount", "--create", "16M", image.to_str().unwrap(), at.to_str().unwrap()]);
    std::fs::write(at.join("file"), "x").unwrap();
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    let again = ["mount", "--create", "16M", image.to_str().unwrap(), at.to_str().unwrap()];
    let errors = draconis.run_failing(again);
    assert!(errors.contains("--force"), "{errors}");
    // Synchronous: everything is durable without a commit.
    mount("sync,dirsync,commit=1000,norestart");
    std::fs::create_dir(at.join("dir")).unwrap();
    std::fs::write(at.join("dir/file"), "durable").unwrap();
    let pid = draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap() as i32;
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_until("it is dead", || draconis.status()["mounts"][0]["state"] == "dead");
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    run_e2fsck(&image);
    mount("strictatime");
    assert_eq!(std::fs::read(at.join("dir/file")).unwrap(), b"durable");
    let accessed = |name: &str| std::fs::metadata(at.join(name)).unwrap().accessed().unwrap();
    let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let set = |name: &str| {
        let times = std::fs::FileTimes::new().set_accessed(old);
        File::options().write(true).open(at.join(name)).unwrap().set_times(times).unwrap();
    };
    set("file");
    std::fs::read(at.join("file")).unwrap();
    assert!(accessed("file") > old);
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    mount("noatime");
    set("file");
    std::fs::read(at.join("file")).unwrap();
    assert_eq!(accessed("file"), old);
    draconis.run_ok(["umount", at.to_str().unwrap()]);
    run_e2fsck(&image);
}

#[test]
fn idle_volume_is_written_back() {
    if !has_fuse("a mount that pauses") {
        return;
    }
    let volume = MountedVolume::new("1024", "8M", "rw,noatime,commit=100000");
    let bytes: Vec<u8> =
        (0..2000u32).flat_map(|i| i.wrapping_mul(0x9E37_79B1).to_le_bytes()).collect();
    std::fs::write(volume.at("file"), &bytes).unwrap();
    // The first block of the file, wherever it is.
    wait_until("it is in the image", || {
        let image = std::fs::read(&volume.image).unwrap();
        image.chunks(1024).any(|block| block == &bytes[..1024])
    });
    volume.unmount_and_check();
}

#[test]
fn system_attributes_are_refused() {
    if !has_fuse("system attributes") {
        return;
    }
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    mke2fs(&image, None, &["-t", "ext4"], "16M");
    let at = draconis.mount(&image, "at", "rw");
    let file = at.join("file");
    std::fs::write(&file, "x").unwrap();
    let refused = rustix::io::Errno::OPNOTSUPP;
    for name in ["system.other", "system.richacl", "system.data", "system."] {
        let none = rustix::fs::XattrFlags::empty();
        assert_eq!(rustix::fs::setxattr(&file, name, b"x", none), Err(refused), "{name}");
        assert_eq!(rustix::fs::getxattr(&file, name, &mut [0; 8][..]), Err(refused), "{name}");
        assert_eq!(rustix::fs::removexattr(&file, name), Err(refused), "{name}");
    }
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}
