//! Volumes changed inside disk images. After each change, qemu-img checks the image, and e2fsck the
//! volume.

use crate::common;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, copy_draconis, has_fuse, has_tool, mke2fs, wait_until};
use rustix::process::{Pid, Signal, kill_process};

fn run_and_capture(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {told}{errors}");
    told
}

fn path_str(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Creates a volume of 32 MiB with a file.
fn make_volume(draconis: &Draconis) -> PathBuf {
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("file"), "in the volume").unwrap();
    let bytes: Vec<u8> = (0..800_000u32).flat_map(|n| (n / 5).to_le_bytes()).collect();
    std::fs::write(tree.join("long"), bytes).unwrap();
    let image = draconis.path("volume");
    mke2fs(&image, Some(&tree), &["-t", "ext4"], "32M");
    image
}

/// Creates images of that volume: default, compressed, old versions, with a backing file.
fn make_images(draconis: &Draconis) -> Vec<(PathBuf, Vec<String>)> {
    let raw = make_volume(draconis);
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
        run_and_capture(
            "qemu-img",
            &[&words[..], more, &[path_str(&raw), path_str(&image)]].concat(),
        );
        images.push((image, vec![]));
    }
    let over = draconis.path("over.qcow2");
    run_and_capture(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", path_str(&raw), path_str(&over)],
    );
    images.push((over, vec!["--backing".into(), path_str(&raw).into()]));
    images
}

/// Checks an unused image with qemu-img and e2fsck.
fn assert_clean_by_e2fsck(draconis: &Draconis, image: &Path) {
    let kind = image.extension().unwrap().to_str().unwrap();
    // qemu-img is read-only, and refuses an image with a log.
    run_and_capture("qemu-img", &["check", "-q", "-f", kind, path_str(image)]);
    let info = run_and_capture("qemu-img", &["info", "--output=json", path_str(image)]);
    assert!(!info.contains("\"dirty-flag\": true"), "{info}");
    let raw = draconis.path("judged");
    run_and_capture(
        "qemu-img",
        &["convert", "-f", kind, "-O", "raw", path_str(image), path_str(&raw)],
    );
    run_e2fsck(&raw);
}

#[test]
#[ignore = "tools: qemu-img"]
fn commands_change_volume_in_disk_image() {
    if !has_tool("changing disk images", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    for (image, more) in make_images(&draconis) {
        let shown = path_str(&image);
        let at = |path: &str| format!("{shown}:{path}");
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let noise: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect();
        let local = draconis.path("noise");
        std::fs::write(&local, &noise).unwrap();
        let tree = draconis.path("tree");
        for words in [
            &["put", path_str(&local), &at("/noise")][..],
            &["mkdir", &at("/dir")],
            &["put", "-r", path_str(&tree), &at("/dir")],
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
            draconis.run_ok(&line);
            if more.is_empty() {
                assert_clean_by_e2fsck(&draconis, &image);
            }
        }
        let read = |path: &str| {
            let target = at(path);
            draconis.run([&["cat"], &more[..], &[&target]].concat()).stdout
        };
        assert_eq!(read("/moved"), b"in the volume", "{shown}");
        assert!(read("/noise") == noise && read("/dir/again") == noise, "{shown}");
        assert!(read("/dir/tree/long") == std::fs::read(tree.join("long")).unwrap(), "{shown}");
        // The virtual size of an image does not change.
        let told = draconis.run_failing([&["grow"], &more[..], &[shown, "64M"]].concat());
        assert!(told.contains("more room first"), "{told}");
        let info = run_and_capture("qemu-img", &["info", "--output=json", shown]);
        assert!(info.contains("\"virtual-size\": 33554432"), "{info}");
        assert_clean_by_e2fsck(&draconis, &image);
    }
}

/// Shrinking truncates the file of an image to about the length of a converted copy.
#[test]
#[ignore = "tools: qemu-img"]
fn shrink_truncates_image_file() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("many");
    let mut bytes: Vec<u8> = (0..100_000u32).flat_map(|n| (n ^ n << 9).to_le_bytes()).collect();
    for nth in 0..40u8 {
        bytes[0] = nth;
        std::fs::write(tree.join(format!("file{nth}")), &bytes).unwrap();
    }
    let raw = draconis.path("many.raw");
    mke2fs(&raw, Some(&tree), &["-t", "ext4"], "256M");
    let snapshot = ["snapshot", "-c", "before"];
    for more in [&[][..], &["-o", "compat=0.10,cluster_size=4k"], &["-o", "cluster_size=1k"]] {
        let image = draconis.path("many.qcow2");
        let shown = path_str(&image);
        let words = ["convert", "-f", "raw", "-O", "qcow2"];
        run_and_capture("qemu-img", &[&words[..], more, &[path_str(&raw), shown]].concat());
        let len = || std::fs::metadata(&image).unwrap().len();
        let before = len();
        for least in [true, false] {
            draconis.run_ok(["shrink", shown].into_iter().chain(least.then_some("--min")));
            assert_clean_by_e2fsck(&draconis, &image);
            let converted = draconis.path("converted");
            run_and_capture(
                "qemu-img",
                &[&["convert", "-O", "qcow2"], more, &[shown, path_str(&converted)]].concat(),
            );
            let least = std::fs::metadata(&converted).unwrap().len();
            assert!(len() <= before && len() <= least + least / 20, "{before} {} {least}", len());
        }
        for nth in 0..40u8 {
            bytes[0] = nth;
            assert!(cat_file(&draconis, &image, &[], &format!("/file{nth}")) == bytes, "{nth}");
        }
        // The image can be grown and filled again, and its snapshot keeps its contents.
        draconis.run_ok(["grow", shown]);
        draconis.run_ok(["put", path_str(&raw), &format!("{shown}:/raw")]);
        assert_clean_by_e2fsck(&draconis, &image);
        run_and_capture("qemu-img", &[&snapshot[..], &[shown]].concat());
        draconis.run_ok(["rm", &format!("{shown}:/raw")]);
        draconis.run_ok(["shrink", shown]);
        assert_clean_by_e2fsck(&draconis, &image);
        run_and_capture("qemu-img", &["snapshot", "-a", "before", shown]);
        assert_clean_by_e2fsck(&draconis, &image);
        run_and_capture("qemu-img", &["snapshot", "-d", "before", shown]);
        draconis.run_ok(["shrink", shown, "200M"]);
        assert_clean_by_e2fsck(&draconis, &image);
    }
    for more in ["subformat=dynamic", "block_size=1M", "subformat=fixed"] {
        let image = draconis.path("many.vhdx");
        let shown = path_str(&image);
        let words = ["convert", "-f", "raw", "-O", "vhdx", "-o", more];
        run_and_capture("qemu-img", &[&words[..], &[path_str(&raw), shown]].concat());
        let before = std::fs::metadata(&image).unwrap().len();
        draconis.run_ok(["shrink", shown]);
        assert_clean_by_e2fsck(&draconis, &image);
        assert!(std::fs::metadata(&image).unwrap().len() <= before, "{more}");
        bytes[0] = 39;
        assert!(cat_file(&draconis, &image, &[], "/file39") == bytes);
        draconis.run_ok(["grow", shown]);
        draconis.run_ok(["put", path_str(&raw), &format!("{shown}:/raw")]);
        assert_clean_by_e2fsck(&draconis, &image);
    }
}

/// Returns the mount options for backing files, from the arguments `more` of commands.
fn mount_options_for_backing(how: &str, more: &[String]) -> String {
    let behind = more.iter().skip(1).step_by(2).map(|file| format!(",backing={file}"));
    how.to_owned() + &behind.collect::<String>()
}

/// Reads a file of the volume in an image.
fn cat_file(draconis: &Draconis, image: &Path, more: &[String], path: &str) -> Vec<u8> {
    let target = format!("{}:{path}", image.display());
    let line = ["cat", &target].into_iter().chain(more.iter().map(String::as_str));
    draconis.run(line).stdout
}

#[test]
#[ignore = "tools: qemu-img"]
fn mount_changes_volume_in_disk_image() {
    if !has_tool("changing disk images", "qemu-img")
        || !has_fuse("mounting disk images to be changed")
    {
        return;
    }
    let draconis = Draconis::new();
    for (image, more) in make_images(&draconis) {
        let rw = mount_options_for_backing("rw", &more);
        let at = draconis.mount(&image, "at", &rw);
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
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        assert_clean_by_e2fsck(&draconis, &image);
        assert!(cat_file(&draconis, &image, &more, "/all") == bytes, "{}", image.display());
        // Read-only while it is mounted; afterwards writable again.
        let at = draconis.mount(&image, "at", &rw);
        std::fs::write(at.join("more"), &bytes).unwrap();
        let remount = |how: &str| {
            draconis.run_ok(["mount", "-o", how, path_str(&image), path_str(&at)]);
        };
        remount("remount,ro");
        assert_clean_by_e2fsck(&draconis, &image);
        remount("remount,rw");
        std::fs::write(at.join("yet more"), &bytes).unwrap();
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        assert_clean_by_e2fsck(&draconis, &image);
    }
}

/// After a worker is killed, the next one rebuilds the refcounts. If none follows, synced data is
/// kept, and the next command that changes the image repairs the refcounts.
#[test]
#[ignore = "tools: qemu-img"]
fn image_is_repaired_after_worker_death() {
    if !has_tool("changing disk images", "qemu-img") || !has_fuse("killing workers of disk images")
    {
        return;
    }
    let draconis = Draconis::new();
    let kill = || {
        let mounts = draconis.status();
        let pid = mounts["mounts"][0]["worker_pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        pid
    };
    for (image, more) in make_images(&draconis) {
        let shown = path_str(&image);
        let at = draconis.mount(&image, "at", &mount_options_for_backing("rw", &more));
        for nth in 0..3u8 {
            std::fs::write(at.join(format!("file{nth}")), vec![nth + 1; 1 << 20]).unwrap();
            let was = kill();
            std::fs::write(at.join(format!("next{nth}")), vec![nth + 9; 300_000]).unwrap();
            wait_until("another worker", || draconis.status()["mounts"][0]["worker_pid"] != was);
        }
        for nth in 0..3u8 {
            let found = std::fs::read(at.join(format!("file{nth}"))).unwrap();
            assert!(found == vec![nth + 1; 1 << 20], "{shown}: file{nth}");
        }
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        assert_clean_by_e2fsck(&draconis, &image);

        let at = draconis.mount(&image, "at", &mount_options_for_backing("rw,norestart", &more));
        std::fs::write(at.join("waited"), vec![5; 700_000]).unwrap();
        std::fs::File::open(at.join("waited")).unwrap().sync_all().unwrap();
        std::fs::write(at.join("lost"), vec![6; 700_000]).unwrap();
        kill();
        wait_until("the loss is noticed", || draconis.status()["mounts"][0]["state"] == "dead");
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        assert!(cat_file(&draconis, &image, &more, "/waited") == vec![5; 700_000], "{shown}");
        let target = format!("{shown}:/mended");
        draconis.run_ok(["mkdir", &target].into_iter().chain(more.iter().map(String::as_str)));
        assert_clean_by_e2fsck(&draconis, &image);
    }
}

/// A standby worker opened the image before it grew: it must re-read the image's state.
#[test]
#[ignore = "tools: qemu-img"]
fn restarted_worker_sees_grown_image() {
    if !has_tool("growing disk images", "qemu-img") || !has_fuse("killing workers of disk images") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    for (kind, how) in [("qcow2", "cluster_size=512"), ("vhdx", "subformat=dynamic")] {
        let image = draconis.path(&format!("grows.{kind}"));
        run_and_capture(
            "qemu-img",
            &["convert", "-O", kind, "-o", how, path_str(&raw), path_str(&image)],
        );
        let at = draconis.mount(&image, "at", &mount_options_for_backing("rw", &[]));
        let worker = || draconis.status()["mounts"][0]["worker_pid"].as_i64().unwrap();
        for nth in 0..8u8 {
            // The standby worker may be ready by now: the next write is beyond the end that it saw.
            draconis_testkit::wait::pause(
                "the standby worker may be ready by now",
                Duration::from_millis(200),
            );
            let grown = std::fs::File::create(at.join(format!("grown{nth}"))).unwrap();
            (&grown).write_all(&vec![nth + 1; 1 << 20]).unwrap();
            grown.sync_all().unwrap();
            let was = worker();
            kill_process(Pid::from_raw(was as i32).unwrap(), Signal::KILL).unwrap();
            std::fs::write(at.join(format!("next{nth}")), vec![nth + 9; 300_000]).unwrap();
            wait_until("another worker", || worker() != was);
        }
        for nth in 0..8u8 {
            let found = std::fs::read(at.join(format!("grown{nth}"))).unwrap();
            assert!(found == vec![nth + 1; 1 << 20], "{kind}: grown{nth}");
        }
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        assert_clean_by_e2fsck(&draconis, &image);
    }
}

/// An image with two backing files: they are opened for the mount, kept across worker deaths and an
/// upgrade, and not changed.
#[test]
#[ignore = "tools: qemu-img"]
fn backing_chain_is_mounted_and_changed() {
    if !has_tool("chains of images", "qemu-img") || !has_fuse("mounting chains of images") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    // The name contains a comma.
    let [base, middle, top] =
        ["base,1.qcow2", "middle.qcow2", "top.qcow2"].map(|n| draconis.path(n));
    run_and_capture(
        "qemu-img",
        &["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&base)],
    );
    let over = |image: &Path, behind: &Path| {
        let words =
            ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(behind), path_str(image)];
        run_and_capture("qemu-img", &words);
    };
    over(&middle, &base);
    let put = |image: &str, more: &[&str]| {
        let local = draconis.path("local");
        std::fs::write(&local, "from below").unwrap();
        let target = format!("{image}:/below");
        draconis.run([&["put"], more, &[path_str(&local), &target]].concat())
    };
    assert!(put(path_str(&middle), &["--backing", path_str(&base)]).status.success());
    over(&top, &middle);
    let before = [&base, &middle].map(|image| std::fs::read(image).unwrap());

    let escaped = path_str(&base).replace(',', "\\,");
    let at = draconis.make_dir("at");
    draconis.run_ok([
        "mount",
        "--backing",
        path_str(&middle),
        "--backing",
        path_str(&base),
        path_str(&top),
        path_str(&at),
    ]);
    let status = || draconis.status()["mounts"][0].clone();
    assert_eq!(status()["read_only"], false);
    assert_eq!(std::fs::read(at.join("below")).unwrap(), b"from below");
    let write = |name: &str, byte: u8| {
        std::fs::write(at.join(name), vec![byte; 1 << 20]).unwrap();
        // Partly over data of the backing file.
        let long = std::fs::File::options().write(true).open(at.join("long")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&long, &[byte; 700], u64::from(byte) * 9999)
            .unwrap();
    };
    write("first", 1);
    // No tool may change a file that a mount reads.
    let refused = put(path_str(&base), &[]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("in use"), "{refused:?}");
    for nth in 2..4 {
        let was = status()["worker_pid"].as_i64().unwrap();
        kill_process(Pid::from_raw(was as i32).unwrap(), Signal::KILL).unwrap();
        write(&format!("after{nth}"), nth);
        wait_until("another worker", || status()["worker_pid"] != was);
    }
    let new = draconis.path("draconis-new");
    copy_draconis(&new);
    let mut upgrade = Command::new(&new);
    upgrade.arg("upgrade").env("DRACONIS_RUNTIME_DIR", draconis.path("run"));
    let told = upgrade.output().unwrap();
    assert!(told.status.success(), "{told:?}");
    write("upgraded", 4);
    let expected = std::fs::read(at.join("long")).unwrap();
    draconis.run_ok(["umount", path_str(&at)]);

    assert!(before == [&base, &middle].map(|image| std::fs::read(image).unwrap()));
    assert_clean_by_e2fsck(&draconis, &top);
    // Contents as QEMU reads them.
    let state = draconis.path("judged");
    for (name, byte) in [("first", 1), ("after2", 2), ("after3", 3), ("upgraded", 4)] {
        let found = cat_file(&draconis, &state, &[], &format!("/{name}"));
        assert!(found == vec![byte; 1 << 20], "{name}");
    }
    assert!(cat_file(&draconis, &state, &[], "/long") == expected);
    let behind = format!("ro,backing={},backing={escaped}", path_str(&middle));
    let at = draconis.mount(&top, "at", &behind);
    assert!(std::fs::read(at.join("long")).unwrap() == expected);
    assert!(std::fs::write(at.join("first"), "x").is_err());
    draconis.run_ok(["umount", path_str(&at)]);

    // Invalid backing files give one error, and no mount.
    let missing = draconis.path("missing");
    let pipe = draconis.path("pipe");
    run_and_capture("mkfifo", &[path_str(&pipe)]);
    let images = [&middle, &base, &top, &missing, &pipe].map(|image| path_str(image).to_owned());
    let [middle, base, top, missing, pipe] = images.each_ref().map(String::as_str);
    for (behind, said) in [
        (&[][..], "it holds only what differs from"),
        (&[middle], "it holds only what differs from"),
        (&[middle, missing], "missing: No such file"),
        (&[middle, top], "cannot lie behind itself"),
        (&[middle, middle], "cannot lie behind itself"),
        (&[middle, pipe], "neither a file nor a block device"),
    ] {
        for how in ["ro", "rw"] {
            let named: Vec<&str> = behind.iter().flat_map(|file| ["--backing", file]).collect();
            let line = [&["mount", "-o", how], &named[..], &[top, path_str(&at)]].concat();
            let told = draconis.run_failing(line);
            assert!(told.contains(said) && told.lines().count() == 1, "{behind:?}: {told}");
        }
    }
    // Two images that each name the other as backing file.
    for (image, behind) in [(middle, top), (base, middle)] {
        run_and_capture("qemu-img", &["rebase", "-u", "-F", "qcow2", "-b", behind, image]);
    }
    let line = ["mount", "--backing", middle, "--backing", base, top, path_str(&at)];
    let told = draconis.run_failing(line);
    assert!(told.contains("it holds only what differs from"), "{told}");
    assert!(common::mounts_below(&at).is_empty());
}

#[test]
#[ignore = "tools: qemu-img"]
fn unwritable_images_are_read_only_with_reason() {
    if !has_tool("changing disk images", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let image = draconis.path("image");
    run_and_capture(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&image)],
    );
    run_and_capture("qemu-img", &["bitmap", "--add", path_str(&image), "one"]);
    let before = std::fs::read(&image).unwrap();
    let file = format!("{}:/file", image.display());
    let told = draconis.run_failing(["rm", &file]);
    assert!(told.contains("bitmap --remove"), "{told}");
    assert_eq!(draconis.run_ok(["cat", &file]), "in the volume");
    if has_fuse("mounting images that are only read") {
        let at = draconis.make_dir("at");
        let output = draconis.run(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && errors.contains("bitmap --remove"), "{errors}");
        assert!(std::fs::write(at.join("file"), b"x").is_err());
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    }
    assert!(before == std::fs::read(&image).unwrap());
}

#[test]
#[ignore = "tools: qemu-img"]
fn internal_snapshot_keeps_old_contents() {
    if !has_tool("changing disk images", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let image = draconis.path("image");
    run_and_capture(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&image)],
    );
    run_and_capture("qemu-img", &["snapshot", "-c", "one", path_str(&image)]);
    draconis.run_ok(["rm", &format!("{}:/file", image.display())]);
    if has_fuse("mounting images with snapshots") {
        let at = draconis.make_dir("at");
        draconis.run_ok(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
        std::fs::write(at.join("new"), vec![7; 1 << 20]).unwrap();
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        assert!(draconis.run_ok(["ls", path_str(&image)]).contains("new"));
    }
    run_and_capture("qemu-img", &["check", "-f", "qcow2", path_str(&image)]);
    for (snapshot, is_kept) in [(&["-l", "one"][..], true), (&[], false)] {
        let state = draconis.path("state");
        let line =
            [&["convert", "-O", "raw"], snapshot, &[path_str(&image), path_str(&state)]].concat();
        run_and_capture("qemu-img", &line);
        draconis_testkit::judge::assert_fsck_clean(&state);
        assert_eq!(draconis.run_ok(["ls", path_str(&state)]).contains("file"), is_kept);
        assert_eq!(std::fs::read(&state).unwrap() == std::fs::read(&raw).unwrap(), is_kept);
    }
}
