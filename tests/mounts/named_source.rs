//! The source of a mount that the kernel shows: the image, not the loop device of the mount.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use crate::common::{
    Draconis, USER_CAN_MOUNT, copy_draconis, has_fuse, has_root, has_tool, mke2fs, wait_until,
};

/// Returns what a program prints, without the last newline.
fn printed(program: &str, words: &[&str], at: &Path) -> String {
    let output = Command::new(program).args(words).arg(at).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

fn assert_shown(at: &Path, source: &str) {
    assert_eq!(printed("findmnt", &["-no", "SOURCE"], at), source);
    assert_eq!(printed("df", &["--output=source"], at).lines().last(), Some(source));
    let table = std::fs::read("/proc/self/mounts").unwrap();
    let table = String::from_utf8_lossy(&table).replace("\\040", " ").replace("\\043", "#");
    let line = format!("{source} {} fuseblk.draconis ", at.to_str().unwrap());
    assert!(table.lines().any(|mount| mount.starts_with(&line)), "{table}");
}

/// Returns true if a loop device has a file of this name.
fn has_loop_device(name: &str) -> bool {
    let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    devices.into_iter().any(|device| {
        let file = std::fs::read(device.path().join("loop/backing_file")).unwrap_or_default();
        String::from_utf8_lossy(&file).contains(name)
    })
}

#[test]
fn kernel_shows_images_as_sources() {
    let test = "sources of mounts";
    if !has_root(test) || !has_fuse(test) || !has_tool(test, "findmnt") {
        return;
    }
    let draconis = Draconis::new();
    let raw = draconis.path("my disk,1.img");
    mke2fs(&raw, None, &["-t", "ext4"], "16M");
    let qcow2 = draconis.path("named-source.qcow2");
    draconis.run_ok(["format".as_ref(), qcow2.as_os_str(), "16M".as_ref()]);
    let store = draconis.path("named-source");
    let words = ["--size", "64M", "--layout", "cow", "--sparse"].map(OsStr::new);
    let create = ["store".as_ref(), "create".as_ref(), store.as_os_str()].into_iter().chain(words);
    draconis.run_ok(create);
    draconis.run_ok(["store", "disk", store.to_str().unwrap(), "vol", "16M"]);
    let disk = format!("{}#vol", store.display());
    draconis.run_ok(["format", &disk]);
    for image in [raw.to_str().unwrap(), qcow2.to_str().unwrap(), &disk] {
        let at = draconis.mount(Path::new(image), "at", "rw,noatime,nodev");
        assert_shown(&at, image);
        let options = printed("findmnt", &["-no", "OPTIONS"], &at);
        for option in ["rw", "noatime", "nodev", "nosuid", "user_id=0", "allow_other"] {
            assert!(options.split(',').any(|it| it == option), "{option}: {options}");
        }
        std::fs::write(at.join("new"), "new").unwrap();
        let status = draconis.status();
        assert_eq!(status["mounts"][0]["volume"], *image, "{status}");
        assert_eq!(status["mounts"][0]["misses_syncs"], false, "{status}");
        for mode in ["remount,ro", "remount,rw"] {
            draconis.run_ok(["mount", "-o", mode, at.to_str().unwrap()]);
            assert_shown(&at, image);
        }
        let name = Path::new(image).file_name().unwrap().to_str().unwrap();
        assert!(has_loop_device(name));
        draconis.run_ok(["umount", at.to_str().unwrap()]);
        wait_until("the loop device is removed", || !has_loop_device(name));
        assert_eq!(draconis.run_ok(["cat", &format!("{image}:/new")]), "new");
    }
    // Longer than a source may be for fsconfig(2): the device is shown, as before.
    let dir = draconis.make_dir(&"d".repeat(200));
    let long = dir.join("l".repeat(100));
    std::fs::copy(&raw, &long).unwrap();
    let at = draconis.mount(&long, "at", "rw,fuseblk");
    assert!(printed("findmnt", &["-no", "SOURCE"], &at).starts_with("/dev/loop"));
    assert_eq!(std::fs::read_to_string(at.join("new")).unwrap(), "new");
    draconis.run_ok(["umount", at.to_str().unwrap()]);
}

#[test]
fn kernel_shows_images_that_users_mount() {
    let test = "the source of a user's mount";
    if !has_root(test)
        || !has_fuse(test)
        || !has_tool(test, "findmnt")
        || !has_tool(test, "fusermount3")
    {
        return;
    }
    let draconis = Draconis::new();
    let (image, at) = (draconis.path("a.img"), draconis.make_dir("at"));
    mke2fs(&image, None, &["-t", "ext4", "-E", "root_owner=1000:1000"], "16M");
    copy_draconis(&draconis.path("draconis"));
    let script = format!("{USER_CAN_MOUNT}{USER_SCRIPT}");
    let ended = draconis.spawn_in_mount_namespace(&script).wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let expected = format!("{}\n{}\n", image.display(), at.display());
    assert_eq!(String::from_utf8(ended.stdout).unwrap(), expected);
}

const USER_SCRIPT: &str = r#"
    as_user ./draconis mount a.img at
    findmnt -no SOURCE,TARGET at | tr -s ' ' '\n'
    as_user ./draconis umount at
"#;
