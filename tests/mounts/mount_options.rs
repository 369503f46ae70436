//! Mount options: lines written for other drivers, the effects of options, and how mount(8) passes
//! them.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::volume::run_e2fsck;
use crate::common::{
    Draconis, copy_program, has_fuse, is_installed, is_root, mke2fs, mounts_below, report_skipped,
};

const EROFS: i32 = 30;
/// Offset of `s_state` in the volume: 1 clean, 2 damaged.
const S_STATE_OFFSET: usize = 1024 + 0x3A;

fn make_small_volume(draconis: &Draconis) -> PathBuf {
    let tree = draconis.make_dir("small");
    std::fs::write(tree.join("hello"), "hello\n").unwrap();
    let image = draconis.path("a.img");
    mke2fs(&image, Some(&tree), &["-t", "ext2"], "8M");
    image
}

fn mount_failing(draconis: &Draconis, options: &str, image: &Path) -> String {
    let at = draconis.make_dir("at");
    let words = ["mount", "-o", options].map(std::ffi::OsStr::new);
    draconis.run_failing(words.into_iter().chain([image.as_os_str(), at.as_os_str()]))
}

fn unmount(draconis: &Draconis, at: &Path) {
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}

#[test]
fn options_of_other_drivers_are_accepted() {
    if !has_fuse("options of other drivers") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    for options in [
        "defaults",
        "loop,rw,relatime,errors=remount-ro,user_xattr,acl",
        "noauto,nofail,x-systemd.automount,x-systemd.device-timeout=5s,_netdev,comment=disk",
        "fakeroot,no_default_opts,minixdf,dirsync",
        "usrquota,grpquota,prjquota,quota",
        "strictatime,nostrictatime,iversion,noiversion",
        "usrjquota=aquota.user,grpjquota=aquota.group,jqfmt=vfsv1",
    ] {
        let at = draconis.mount(&image, "at", options);
        std::fs::write(at.join("new"), options).unwrap();
        unmount(&draconis, &at);
        run_e2fsck(&image);
    }
    for (options, said) in [
        ("errors=panic", "use errors=remount-ro"),
        ("sb=8193", "e2fsck -b"),
        ("noacl", "always count"),
    ] {
        let message = mount_failing(&draconis, options, &image);
        let name = options.split('=').next().unwrap();
        assert!(message.contains(said) && message.contains(name), "{message}");
    }
}

#[test]
fn fsname_and_subtype_options_are_honoured() {
    if !has_fuse("names of mounts") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    let at = draconis.mount(&image, "at", "fsname=backup,subtype=disk");
    let table = std::fs::read("/proc/self/mounts").unwrap();
    let table = String::from_utf8_lossy(&table);
    let line = format!("backup {} fuse.disk ", at.display());
    assert!(table.lines().any(|mount| mount.starts_with(&line)), "{table}");
    unmount(&draconis, &at);
}

#[test]
fn grpid_and_statfs_options_match_kernel_driver() {
    if !is_root() || !has_fuse("groups of directories") {
        report_skipped("giving files away needs root");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    let at = draconis.mount(&image, "at", "grpid");
    std::fs::create_dir(at.join("dir")).unwrap();
    std::os::unix::fs::chown(at.join("dir"), None, Some(1234)).unwrap();
    std::fs::write(at.join("dir/file"), "x").unwrap();
    std::fs::create_dir(at.join("dir/below")).unwrap();
    for name in ["dir/file", "dir/below"] {
        let found = std::fs::metadata(at.join(name)).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o2000), (1234, 0), "{name}");
    }
    let blocks = rustix::fs::statfs(&at).unwrap().f_blocks;
    unmount(&draconis, &at);
    let at = draconis.mount(&image, "at", "minixdf,nogrpid");
    std::fs::write(at.join("dir/other"), "x").unwrap();
    assert_eq!(std::fs::metadata(at.join("dir/other")).unwrap().gid(), 0);
    let all = rustix::fs::statfs(&at).unwrap().f_blocks;
    assert!(all > blocks && all == 8 << 10, "{all} {blocks}");
    unmount(&draconis, &at);
    run_e2fsck(&image);
}

#[test]
fn volume_with_error_flag_is_mounted_read_only() {
    if !has_fuse("damaged volumes") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[S_STATE_OFFSET] |= 2;
    std::fs::write(&image, &bytes).unwrap();
    for (options, read_only) in
        [("rw", true), ("errors=remount-ro", true), ("errors=continue", false)]
    {
        let at = draconis.make_dir("at");
        let output =
            draconis.command().args(["mount", "-o", options]).args([&image, &at]).output().unwrap();
        let error_text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error_text}");
        assert!(error_text.contains("damaged"), "{options}: {error_text}");
        assert_eq!(error_text.lines().count(), 1, "{error_text}");
        assert_eq!(draconis.status()["mounts"][0]["read_only"], read_only, "{options}");
        let written = std::fs::write(at.join("new"), "x").map_err(|error| error.raw_os_error());
        assert_eq!(written, if read_only { Err(Some(EROFS)) } else { Ok(()) }, "{options}");
        unmount(&draconis, &at);
        if read_only {
            assert!(std::fs::read(&image).unwrap() == bytes, "it is as it was");
        }
    }
}

#[test]
fn remount_read_only_and_read_write() {
    if !is_root() || !has_fuse("remounting") {
        report_skipped("remounting needs root");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    for options in ["rw,commit=1000,fuseblk", "rw,commit=1000,nofuseblk"] {
        let at = draconis.mount(&image, "at", options);
        let at = at.as_path();
        let remount = |how: &str| {
            let words = ["mount", "-o", how].map(std::ffi::OsString::from);
            words.into_iter().chain([image.clone().into(), at.into()]).collect::<Vec<_>>()
        };
        let file = std::fs::File::create(at.join("new")).unwrap();
        let errors = draconis.run_failing(remount("remount,ro"));
        assert!(errors.contains("open for writing"), "{errors}");
        drop(file);
        std::fs::write(at.join("new"), options).unwrap();
        draconis.run_ok(remount("remount,ro"));
        let refused = std::fs::write(at.join("new"), "x").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(EROFS), "{refused}");
        assert_eq!(draconis.status()["mounts"][0]["read_only"], true);
        // Written back and clean, while it is mounted.
        let copy = draconis.path("copy.img");
        std::fs::copy(&image, &copy).unwrap();
        assert_eq!(std::fs::read(&copy).unwrap()[S_STATE_OFFSET] & 1, 1);
        run_e2fsck(&copy);
        assert_eq!(draconis.run_ok(["cat", &format!("{}:/new", copy.display())]), options);
        // Without the image, as users type it.
        draconis.run_ok(["mount".as_ref(), "-o".as_ref(), "remount,rw".as_ref(), at.as_os_str()]);
        let file = std::fs::File::create(at.join("again")).unwrap();
        file.sync_all().unwrap();
        assert_eq!(std::fs::read(&image).unwrap()[S_STATE_OFFSET] & 1, 0, "in use again");
        drop(file);
        assert_eq!(draconis.status()["mounts"][0]["read_only"], false);
        unmount(&draconis, at);
        run_e2fsck(&image);
    }
    let at = draconis.mount(&image, "at", "ro");
    let errors = draconis.run_failing([
        "mount".as_ref(),
        "-o".as_ref(),
        "remount,rw".as_ref(),
        at.as_os_str(),
    ]);
    assert!(errors.contains("unmount it and mount it again"), "{errors}");
    unmount(&draconis, &at);
}

/// Runs a script as root in a mount namespace whose `/sbin` contains only the given programs.
fn run_in_mount_namespace(draconis: &Draconis, script: &str) -> String {
    let path = format!("{}:/usr/bin:/bin", draconis.path("prefix/bin").display());
    let script = format!("PATH='{path}'\n{script}");
    let output = draconis.spawn_in_mount_namespace(&script).wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Mounts by hand and by fstab, and remounts, through mount(8).
const MOUNT_SCRIPT: &str = r#"
    mount --bind sbin /sbin
    mount -f -t fuse.draconis "$PWD/a.img" at -o ro
    if mount -f -t fuse.draconis "$PWD/a.img" nowhere 2> /dev/null; then echo "nowhere"; fi
    if grep " $PWD/at " /proc/self/mounts; then exit 1; fi
    mount -t fuse.draconis "$PWD/a.img" at -o rw,noatime
    cat at/hello
    echo new > at/new
    mount -o remount,ro at
    if touch at/more 2> /dev/null; then echo "still writable"; fi
    umount at
    echo "$PWD/a.img $PWD/at fuse.draconis defaults,nofail,noatime,x-systemd.automount 0 0" > fstab
    mount -T fstab "$PWD/at"
    cat at/new
    mount -T fstab -o remount,ro "$PWD/at"
    if touch at/more 2> /dev/null; then echo "still writable"; fi
    mount -T fstab -o remount,rw "$PWD/at"
    touch at/more
    draconis umount at
    if grep " $PWD/at " /proc/self/mounts; then exit 1; fi
"#;

#[test]
fn mount_uses_installed_helper() {
    if !is_root() || !has_fuse("mount(8)") || !is_installed("unshare") || !is_installed("make") {
        report_skipped("mount(8) with a helper needs root, unshare and make");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    draconis.make_dir("at");
    draconis.make_dir("prefix/bin");
    let program = draconis.path("prefix/bin/draconis");
    std::os::unix::fs::symlink(crate::common::program(), program).unwrap();
    let installed = Command::new("make")
        .args(["-s", "-C", env!("CARGO_MANIFEST_DIR"), "install-helper"])
        .arg(format!("PREFIX={}", draconis.path("prefix").display()))
        .arg(format!("SBINDIR={}", draconis.path("sbin").display()))
        .output()
        .unwrap();
    assert!(installed.status.success(), "{}", String::from_utf8_lossy(&installed.stderr));
    assert_eq!(run_in_mount_namespace(&draconis, MOUNT_SCRIPT), "hello\nnew\n");
    run_e2fsck(&image);
    assert!(mounts_below(draconis.dir.path()).is_empty());
}

#[test]
fn mount_works_without_our_helper() {
    if !is_root()
        || !has_fuse("mount.fuse3")
        || !is_installed("unshare")
        || !is_installed("mount.fuse3")
    {
        report_skipped("mounting by way of mount.fuse3 needs root, unshare and fuse3");
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    draconis.make_dir("at");
    draconis.make_dir("prefix/bin");
    let program = draconis.path("prefix/bin/draconis");
    std::os::unix::fs::symlink(crate::common::program(), program).unwrap();
    let sbin = draconis.make_dir("sbin");
    let found = Command::new("sh").args(["-c", "command -v mount.fuse3"]).output().unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    for name in ["mount.fuse", "mount.fuse3"] {
        copy_program(found.trim(), &sbin.join(name));
    }
    // mount.fuse3 searches programs in the usual directories only.
    let script = r#"
        mount --bind prefix/bin /usr/local/bin
        mount --bind sbin /sbin
        mount -t fuse.draconis "$PWD/a.img" at -o rw,noatime
        cat at/hello
        echo new > at/new
        draconis umount at
        mount -t fuse "draconis#$PWD/a.img" at -o ro
        cat at/new
        umount at
    "#;
    assert_eq!(run_in_mount_namespace(&draconis, script), "hello\nnew\n");
    run_e2fsck(&image);
}

#[test]
fn atime_follows_mount_options() {
    if !has_fuse("times of access") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    // Access times that reading changes: of the file, of the directory.
    for (options, changes) in [
        ("relatime", [true, true]),
        ("nodiratime", [true, false]),
        ("noatime", [false, false]),
        ("strictatime,nodiratime", [true, false]),
    ] {
        let at = draconis.mount(&image, "at", options);
        let names = [at.join("hello"), at.clone()];
        let long_ago = rustix::fs::Timespec { tv_sec: 1_000, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: long_ago, last_modification: long_ago };
        for name in &names {
            // Reads again, beyond the kernel's caches.
            std::fs::read_dir(&at).unwrap().count();
            let _ = std::fs::read(name);
            let flags = rustix::fs::AtFlags::empty();
            rustix::fs::utimensat(rustix::fs::CWD, name, &times, flags).unwrap();
        }
        std::fs::read(&names[0]).unwrap();
        std::fs::read_dir(&at).unwrap().count();
        let found = names.map(|name| std::fs::metadata(name).unwrap().atime() != 1_000);
        assert_eq!(found, changes, "{options}");
        unmount(&draconis, &at);
        run_e2fsck(&image);
    }
}

/// A superblock of md 1.0 behind the volume.
#[test]
fn raid_member_is_mounted_writable_only_by_name() {
    if !has_fuse("members of a RAID") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_small_volume(&draconis);
    let sector = (9 << 20) / 512u64;
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.set_len(sector * 512 + 8192).unwrap();
    file.write_all_at(&[0xFC, 0x4E, 0x2B, 0xA9, 1], sector * 512).unwrap();
    file.write_all_at(&sector.to_le_bytes(), sector * 512 + 144).unwrap();
    let before = std::fs::read(&image).unwrap();
    let errors = mount_failing(&draconis, "rw", &image);
    assert!(errors.contains("md 1.0") && errors.contains("-o force=raid-member"), "{errors}");
    let at = draconis.mount(&image, "at", "ro");
    assert_eq!(std::fs::read(at.join("hello")).unwrap(), b"hello\n");
    unmount(&draconis, &at);
    assert!(std::fs::read(&image).unwrap() == before);
    let at = draconis.mount(&image, "at", "force=raid-member");
    std::fs::write(at.join("new"), "new").unwrap();
    unmount(&draconis, &at);
    run_e2fsck(&image);
}
