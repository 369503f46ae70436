//! Volumes that are changed where they lie: in disk images. After each change qemu-img finds the
//! image to be all right, and e2fsck the volume in it.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::volume::check;
use common::{Draconis, eventually, fuse, mke2fs, tool};
use rustix::process::{Pid, Signal, kill_process};

fn ran(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {told}{said}");
    told
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A volume of 32 MiB with a file.
fn volume(draconis: &Draconis) -> PathBuf {
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("file"), "in the volume").unwrap();
    let bytes: Vec<u8> = (0..800_000u32).flat_map(|n| (n / 5).to_le_bytes()).collect();
    std::fs::write(tree.join("long"), bytes).unwrap();
    let image = draconis.path("volume");
    mke2fs(&image, Some(&tree), &["-t", "ext4"], "32M");
    image
}

/// Images with that volume: as they come, packed, of old versions, over another.
fn images(draconis: &Draconis) -> Vec<(PathBuf, Vec<String>)> {
    let raw = volume(draconis);
    let mut images = vec![];
    for (nth, more) in [
        &["-o", "preallocation=off"][..],
        &["-c"],
        &["-o", "compat=0.10,cluster_size=4k"],
        &["-o", "cluster_size=512,lazy_refcounts=on"],
        &["-o", "preallocation=metadata,cluster_size=2M,refcount_bits=64"],
        &["-o", "subformat=dynamic"],
        &["-o", "block_size=1M", "-o", "subformat=dynamic"],
    ]
    .iter()
    .enumerate()
    {
        let kind = if more.contains(&"subformat=dynamic") { "vhdx" } else { "qcow2" };
        let image = draconis.path(&format!("image{nth}.{kind}"));
        let words = ["convert", "-f", "raw", "-O", kind];
        ran("qemu-img", &[&words[..], more, &[text(&raw), text(&image)]].concat());
        images.push((image, vec![]));
    }
    let over = draconis.path("over.qcow2");
    ran("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&raw), text(&over)]);
    images.push((over, vec!["--backing".into(), text(&raw).into()]));
    images
}

/// Has qemu-img and e2fsck look at an image that is not in use.
fn judged(draconis: &Draconis, image: &Path) {
    let kind = image.extension().unwrap().to_str().unwrap();
    // It reads only, and would refuse an image with a log.
    ran("qemu-img", &["check", "-q", "-f", kind, text(image)]);
    let info = ran("qemu-img", &["info", "--output=json", text(image)]);
    assert!(!info.contains("\"dirty-flag\": true"), "{info}");
    let raw = draconis.path("judged");
    ran("qemu-img", &["convert", "-f", kind, "-O", "raw", text(image), text(&raw)]);
    check(&raw);
}

#[test]
fn every_command_changes_a_volume_in_an_image() {
    if !tool("changing disk images", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    for (image, more) in images(&draconis) {
        let shown = text(&image);
        let at = |path: &str| format!("{shown}:{path}");
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let noise: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect();
        let local = draconis.path("noise");
        std::fs::write(&local, &noise).unwrap();
        let tree = draconis.path("tree");
        for words in [
            &["put", text(&local), &at("/noise")][..],
            &["mkdir", &at("/dir")],
            &["put", "-r", text(&tree), &at("/dir")],
            &["mv", &at("/file"), &at("/moved")],
            &["cp", &at("/noise"), &at("/dir/again")],
            &["ln", &at("/moved"), &at("/linked")],
            &["rm", &at("/long")],
            &["set-label", shown, "new"],
            &["tune", "-c", "20", shown],
            &["shrink", shown, "24M"],
            &["grow", shown],
            &["chmod", "600", &at("/moved")],
        ] {
            let line: Vec<&str> = [&words[..1], &more[..], &words[1..]].concat();
            draconis.ok(&line);
            if more.is_empty() {
                judged(&draconis, &image);
            }
        }
        let read = |path: &str| {
            let target = at(path);
            draconis.run([&["cat"], &more[..], &[&target]].concat()).stdout
        };
        assert_eq!(read("/moved"), b"in the volume", "{shown}");
        assert!(read("/noise") == noise && read("/dir/again") == noise, "{shown}");
        assert!(read("/dir/tree/long") == std::fs::read(tree.join("long")).unwrap(), "{shown}");
        // The disk inside is as long as it is.
        let told = draconis.fails([&["grow"], &more[..], &[shown, "64M"]].concat());
        assert!(told.contains("more room first"), "{told}");
        let info = ran("qemu-img", &["info", "--output=json", shown]);
        assert!(info.contains("\"virtual-size\": 33554432"), "{info}");
        judged(&draconis, &image);
    }
}

#[test]
fn a_mount_changes_a_volume_in_an_image() {
    if !tool("changing disk images", "qemu-img") || !fuse("mounting disk images to be changed") {
        return;
    }
    let draconis = Draconis::new();
    for (image, more) in images(&draconis) {
        // Mounts have no option that says what an image differs from.
        if !more.is_empty() {
            continue;
        }
        let at = draconis.mount(&image, "at", "rw");
        let bytes: Vec<u8> = (0..1_000_000u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        for nth in 0..20 {
            std::fs::create_dir(at.join(format!("dir{nth}"))).unwrap();
            let part = &bytes[nth * 1000..nth * 10_000 + 5000];
            std::fs::write(at.join(format!("dir{nth}/file")), part).unwrap();
        }
        std::fs::write(at.join("all"), &bytes).unwrap();
        std::fs::remove_file(at.join("long")).unwrap();
        std::fs::File::open(at.join("all")).unwrap().sync_all().unwrap();
        assert!(std::fs::read(at.join("all")).unwrap() == bytes);
        draconis.ok(["umount".as_ref(), at.as_os_str()]);
        judged(&draconis, &image);
        let found = draconis.run(["cat", &format!("{}:/all", image.display())]).stdout;
        assert!(found == bytes, "{}", image.display());
        // Read-only while it is mounted, and changed again.
        let at = draconis.mount(&image, "at", "rw");
        std::fs::write(at.join("more"), &bytes).unwrap();
        let remount = |how: &str| {
            draconis.ok(["mount", "-o", how, text(&image), text(&at)]);
        };
        remount("remount,ro");
        judged(&draconis, &image);
        remount("remount,rw");
        std::fs::write(at.join("yet more"), &bytes).unwrap();
        draconis.ok(["umount".as_ref(), at.as_os_str()]);
        judged(&draconis, &image);
    }
}

/// A worker that is killed is followed by one that counts anew; where none follows, what was waited
/// for is there, and who changes the image next mends what it counts.
#[test]
fn a_worker_that_dies_leaves_an_image_that_is_mended() {
    if !tool("changing disk images", "qemu-img") || !fuse("killing workers of disk images") {
        return;
    }
    let draconis = Draconis::new();
    let kill = || {
        let mounts = draconis.status();
        let pid = mounts["mounts"][0]["worker_pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        pid
    };
    for (image, more) in images(&draconis) {
        if !more.is_empty() {
            continue;
        }
        let shown = text(&image);
        let at = draconis.mount(&image, "at", "rw");
        for nth in 0..3u8 {
            std::fs::write(at.join(format!("file{nth}")), vec![nth + 1; 1 << 20]).unwrap();
            let was = kill();
            std::fs::write(at.join(format!("next{nth}")), vec![nth + 9; 300_000]).unwrap();
            eventually("another worker", || draconis.status()["mounts"][0]["worker_pid"] != was);
        }
        for nth in 0..3u8 {
            let found = std::fs::read(at.join(format!("file{nth}"))).unwrap();
            assert!(found == vec![nth + 1; 1 << 20], "{shown}: file{nth}");
        }
        draconis.ok(["umount".as_ref(), at.as_os_str()]);
        judged(&draconis, &image);

        let at = draconis.mount(&image, "at", "rw,norestart");
        std::fs::write(at.join("waited"), vec![5; 700_000]).unwrap();
        std::fs::File::open(at.join("waited")).unwrap().sync_all().unwrap();
        std::fs::write(at.join("lost"), vec![6; 700_000]).unwrap();
        kill();
        eventually("the loss is noticed", || draconis.status()["mounts"][0]["state"] == "dead");
        draconis.ok(["umount".as_ref(), at.as_os_str()]);
        let found = draconis.run(["cat", &format!("{shown}:/waited")]).stdout;
        assert!(found == vec![5; 700_000], "{shown}");
        draconis.ok(["mkdir", &format!("{shown}:/mended")]);
        judged(&draconis, &image);
    }
}

#[test]
fn what_cannot_be_changed_is_read_and_says_why() {
    if !tool("changing disk images", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = volume(&draconis);
    let image = draconis.path("image");
    ran("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]);
    ran("qemu-img", &["bitmap", "--add", text(&image), "one"]);
    let before = std::fs::read(&image).unwrap();
    let file = format!("{}:/file", image.display());
    let told = draconis.fails(["rm", &file]);
    assert!(told.contains("bitmap --remove"), "{told}");
    assert_eq!(draconis.ok(["cat", &file]), "in the volume");
    if fuse("mounting images that are only read") {
        let at = draconis.make_dir("at");
        let output = draconis.run(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && said.contains("bitmap --remove"), "{said}");
        assert!(std::fs::write(at.join("file"), b"x").is_err());
        draconis.ok(["umount".as_ref(), at.as_os_str()]);
    }
    assert!(before == std::fs::read(&image).unwrap());
}

#[test]
fn a_snapshot_inside_keeps_the_volume_that_it_has() {
    if !tool("changing disk images", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = volume(&draconis);
    let image = draconis.path("image");
    ran("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]);
    ran("qemu-img", &["snapshot", "-c", "one", text(&image)]);
    draconis.ok(["rm", &format!("{}:/file", image.display())]);
    if fuse("mounting images with snapshots") {
        let at = draconis.make_dir("at");
        draconis.ok(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
        std::fs::write(at.join("new"), vec![7; 1 << 20]).unwrap();
        draconis.ok(["umount".as_ref(), at.as_os_str()]);
        assert!(draconis.ok(["ls", text(&image)]).contains("new"));
    }
    ran("qemu-img", &["check", "-f", "qcow2", text(&image)]);
    for (snapshot, is_kept) in [(&["-l", "one"][..], true), (&[], false)] {
        let state = draconis.path("state");
        let line = [&["convert", "-O", "raw"], snapshot, &[text(&image), text(&state)]].concat();
        ran("qemu-img", &line);
        ran("e2fsck", &["-fn", text(&state)]);
        assert_eq!(draconis.ok(["ls", text(&state)]).contains("file"), is_kept);
        assert_eq!(std::fs::read(&state).unwrap() == std::fs::read(&raw).unwrap(), is_kept);
    }
}
