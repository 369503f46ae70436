//! Volumes inside other files: images of other programs, partitions, compressed images.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Draconis, has_fuse, has_tool, mke2fs};

fn run_and_capture(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Creates a volume with a file.
fn make_volume(draconis: &Draconis) -> PathBuf {
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("file"), "in the volume").unwrap();
    let bytes: Vec<u8> = (0..500_000u32).flat_map(|n| (n / 5).to_le_bytes()).collect();
    std::fs::write(tree.join("long"), bytes).unwrap();
    let image = draconis.path("volume");
    mke2fs(&image, Some(&tree), &["-t", "ext4"], "16M");
    image
}

/// Asserts that every reading command finds the volume.
fn assert_readable(draconis: &Draconis, image: &Path, more: &[&str]) {
    let shown = image.to_str().unwrap();
    let line = |words: &[&str], target: &str| -> Vec<String> {
        [words, more, &[target]].concat().into_iter().map(str::to_owned).collect()
    };
    let at = |path: &str| format!("{shown}:{path}");
    assert_eq!(draconis.run_ok(line(&["cat"], &at("/file"))), "in the volume", "{shown}");
    assert!(draconis.run_ok(line(&["ls"], shown)).contains("long"));
    assert!(draconis.run_ok(line(&["info"], shown)).contains("ext4"));
    draconis.run_ok(line(&["check"], shown));
    let long = draconis.run(line(&["cat"], &at("/long"))).stdout;
    assert!(long == std::fs::read(draconis.path("tree/long")).unwrap(), "{shown}");
}

/// Asserts that the volume can be mounted; read-only unless `is_changed`.
fn assert_mountable(draconis: &Draconis, image: &Path, name: &str, is_changed: bool) {
    if !has_fuse("mounting disk images") {
        return;
    }
    let at = draconis.make_dir(name);
    let output = draconis.run(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors.contains("is only read"), !is_changed, "{errors}");
    assert_eq!(std::fs::read(at.join("file")).unwrap(), b"in the volume");
    assert_eq!(std::fs::write(at.join("new"), b"x").is_ok(), is_changed);
    draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
}

#[test]
#[ignore = "tools: qemu-img"]
fn foreign_disk_images_are_read() {
    if !has_tool("images of other programs", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    for (nth, (kind, more)) in
        [("qcow2", "-c"), ("vhdx", "-q"), ("vpc", "-q"), ("vmdk", "-q")].iter().enumerate()
    {
        let image = draconis.path(kind);
        run_and_capture(
            Command::new("qemu-img")
                .args(["convert", "-f", "raw", "-O", kind, more])
                .arg(&raw)
                .arg(&image),
        );
        let before = std::fs::read(&image).unwrap();
        assert_readable(&draconis, &image, &[]);
        let is_changed = matches!(*kind, "qcow2" | "vhdx");
        assert_mountable(&draconis, &image, &format!("mount{nth}"), is_changed);
        if is_changed {
            continue;
        }
        for line in [
            vec!["rm", &format!("{}:/file", image.display())],
            vec!["set-label", image.to_str().unwrap(), "new"],
            vec!["grow", image.to_str().unwrap()],
        ] {
            let told = draconis.run_failing(&line);
            assert!(told.contains("only read") && told.contains("convert"), "{told}");
        }
        assert!(before == std::fs::read(&image).unwrap(), "{kind}");
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn our_disk_images_are_read_by_other_programs() {
    if !has_tool("images for other programs", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    make_volume(&draconis);
    let tree = draconis.path("tree");
    let line = |image: &Path, more: &[&str]| -> Vec<String> {
        let words = ["format", "-t", "ext4", "--reproducible", "--from", tree.to_str().unwrap()];
        let image = image.to_str().unwrap();
        [&words[..], more, &[image]].concat().into_iter().map(str::to_owned).collect()
    };
    for size in [&["--free", "40M"][..], &["--free", "3G", "-b", "4096"]] {
        let raw = draconis.path("raw");
        draconis.run_ok(line(&raw, &[&["--force"], size].concat()));
        for kind in ["qcow2", "vhdx"] {
            let image = draconis.path(&format!("made.{kind}"));
            let force = format!("--force={kind}");
            draconis.run_ok(line(&image, &[&["--image-format", kind, &force], size].concat()));
            assert_readable(&draconis, &image, &[]);
            run_and_capture(Command::new("qemu-img").args(["check", "-f", kind]).arg(&image));
            run_and_capture(
                Command::new("qemu-img")
                    .args(["compare", "-f", "raw", "-F", kind])
                    .args([&raw, &image]),
            );
            let len = std::fs::metadata(&image).unwrap().len();
            assert!(len < 40 << 20, "{kind} {size:?}: {len}");
            // Equal sources give equal bytes.
            let before = std::fs::read(&image).unwrap();
            let again = draconis.path("again");
            let _ = std::fs::remove_file(&again);
            draconis.run_ok(line(&again, &[&["--image-format", kind, "--force"], size].concat()));
            assert_readable(&draconis, &again, &[]);
            assert!(before == std::fs::read(&again).unwrap(), "{kind} {size:?}");
        }
    }
    let told = draconis.run(["format", "--image-format", "vmdk", "x", "8M"]);
    assert!(String::from_utf8_lossy(&told.stderr).contains("qcow2"), "{told:?}");
    let made = draconis.path("made.qcow2");
    let told =
        draconis.run_failing(["format", "--image-format", "vhdx", made.to_str().unwrap(), "8M"]);
    assert!(told.contains("--force=qcow2"), "{told}");
    // Formatting never changes the format of an existing disk image.
    let shown = made.to_str().unwrap();
    let before = std::fs::read(&made).unwrap();
    let told = draconis.run_failing(["format", "--force", shown, "8M"]);
    assert!(told.contains("holds a QCOW2 disk image; --force=qcow2 overwrites it"), "{told}");
    let told = draconis.run_failing(["format", "--force=qcow2", shown, "8M"]);
    assert!(told.contains("is a qcow2 image: --image-format qcow2 makes it anew"), "{told}");
    let told = draconis.run_failing(["format", "--force=qcow2", "--image-format", "qcow2", shown]);
    assert!(told.contains("SIZE is needed"), "{told}");
    assert!(before == std::fs::read(&made).unwrap());
    draconis.run_ok(["format", "--force=qcow2", "--image-format", "raw", shown, "8M"]);
    assert!(draconis.run_ok(["info", shown]).contains("ext4"));
}

/// A fixed VHD is a raw disk with a footer, which formatting preserves.
#[test]
#[ignore = "tools: qemu-img"]
fn format_keeps_fixed_vhd_footer() {
    if !has_tool("VHDs of fixed length", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    make_volume(&draconis);
    let (tree, image, raw) = (draconis.path("tree"), draconis.path("fixed"), draconis.path("raw"));
    let shown = image.to_str().unwrap();
    let options = ["create", "-q", "-f", "vpc", "-o", "subformat=fixed,force_size"];
    run_and_capture(Command::new("qemu-img").args(options).arg(&image).arg("32M"));
    let footer = |bytes: &[u8]| bytes[bytes.len() - 512..].to_vec();
    let before = std::fs::read(&image).unwrap();
    let from = tree.to_str().unwrap();
    for (words, holds) in [
        (&["format", "-t", "ext4"][..], "lost+found"),
        (&["format", "--force", "--from", from], "long"),
        (&["format", "--force", "--from", from, "-t", "ext4"], "long"),
    ] {
        draconis.run_ok([words, &[shown]].concat());
        let bytes = std::fs::read(&image).unwrap();
        assert!(bytes.len() == before.len() && footer(&bytes) == footer(&before), "{words:?}");
        assert!(draconis.run_ok(["ls", shown]).contains(holds));
        let info = run_and_capture(
            Command::new("qemu-img").args(["info", "--output=json", "-f", "vpc"]).arg(&image),
        );
        let info = String::from_utf8(info).unwrap();
        assert!(info.contains("\"vpc\"") && info.contains("\"virtual-size\": 33554432"), "{info}");
        run_and_capture(
            Command::new("qemu-img")
                .args(["convert", "-f", "vpc", "-O", "raw"])
                .args([&image, &raw]),
        );
        assert!(std::fs::read(&raw).unwrap() == bytes[..32 << 20]);
        draconis_testkit::judge::assert_fsck_clean(&raw);
    }
    let told = draconis.run_failing(["format", "--force", shown, "64M"]);
    assert!(told.contains("has only 32.0 MiB"), "{told}");
    assert!(draconis.run_ok(["ls", shown]).contains("long"));
    draconis.run_ok(["shrink", "--min", shown]);
    draconis.run_ok(["grow", shown]);
    let bytes = std::fs::read(&image).unwrap();
    assert!(bytes.len() == before.len() && footer(&bytes) == footer(&before));
    // A format requested by name replaces it.
    draconis.run_ok(["format", "--force", "--image-format", "raw", shown, "64M"]);
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 64 << 20);
    draconis_testkit::judge::assert_fsck_clean(&image);
}

#[test]
#[ignore = "tools: qemu-img"]
fn missing_backing_file_is_never_guessed() {
    if !has_tool("images that differ from others", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let over = draconis.path("over");
    run_and_capture(
        Command::new("qemu-img")
            .args(["create", "-f", "qcow2", "-F", "raw", "-b"])
            .arg(&raw)
            .arg(&over),
    );
    let told = draconis.run_failing(["ls", over.to_str().unwrap()]);
    assert!(told.contains("--backing") && told.contains(raw.to_str().unwrap()), "{told}");
    assert_readable(&draconis, &over, &["--backing", raw.to_str().unwrap()]);
    if has_fuse("mounting what differs from another image") {
        let at = draconis.make_dir("mount");
        for options in ["ro", "rw"] {
            let options = ["mount", "-o", options].map(OsStr::new);
            let line = [&options[..], &[over.as_os_str(), at.as_os_str()]].concat();
            let told = draconis.run_failing(line);
            assert!(told.contains("--backing") && told.contains(raw.to_str().unwrap()), "{told}");
        }
    }
    // An image that is its own backing file: the chain ends after the given files.
    let circle = draconis.path("circle");
    run_and_capture(
        Command::new("qemu-img").args(["create", "-f", "qcow2"]).arg(&circle).arg("16M"),
    );
    run_and_capture(
        Command::new("qemu-img")
            .args(["rebase", "-u", "-F", "qcow2", "-b"])
            .arg(&circle)
            .arg(&circle),
    );
    let circle = circle.to_str().unwrap();
    let told = draconis.run_failing(["ls", circle, "--backing", circle, "--backing", circle]);
    assert!(told.contains("--backing"), "{told}");
}

#[test]
#[ignore = "tools: qemu-img"]
fn images_with_backing_files_are_read_only() {
    if !has_tool("images that differ from others", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let convert = |more: &[&str], from: &Path, to: &Path| {
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "raw", "-O", "vmdk"]).args(more).arg(from).arg(to);
        run_and_capture(&mut command);
    };
    let (base, over) = (draconis.path("base.vmdk"), draconis.path("over.vmdk"));
    convert(&[], &raw, &base);
    std::fs::write(draconis.path("put"), "put there").unwrap();
    draconis.run_ok([
        "put",
        draconis.path("put").to_str().unwrap(),
        &format!("{}:/put", raw.display()),
    ]);
    convert(&["-B", base.to_str().unwrap(), "-F", "vmdk"], &raw, &over);
    let told = draconis.run_failing(["ls", over.to_str().unwrap()]);
    assert!(told.contains("--backing") && told.contains(base.to_str().unwrap()), "{told}");
    let more = ["--backing", base.to_str().unwrap()];
    assert_readable(&draconis, &over, &more);
    let place = format!("{}:/put", over.display());
    assert_eq!(draconis.run_ok(["cat", more[0], more[1], &place]), "put there");
    let told = draconis.run_failing(["rm", more[0], more[1], &place]);
    assert!(told.contains("only read"), "{told}");
    // Another image of the same format is not its backing file.
    let other = draconis.path("other.vmdk");
    convert(&[], &raw, &other);
    let told =
        draconis.run_failing(["ls", "--backing", other.to_str().unwrap(), over.to_str().unwrap()]);
    assert!(told.contains(base.to_str().unwrap()) && told.contains("--backing"), "{told}");
    if has_fuse("mounting what differs from another image") {
        let at = draconis.mount(&over, "mount", &format!("backing={}", base.display()));
        assert_eq!(std::fs::read(at.join("put")).unwrap(), b"put there");
        assert!(std::fs::write(at.join("new"), b"x").is_err());
        draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn multi_file_images_find_their_extents() {
    if !has_tool("images in several files", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    // Longer than the extent files of a split image.
    let long = std::fs::File::options().write(true).open(&raw).unwrap();
    long.set_len((2 << 30) + (5 << 20)).unwrap();
    draconis.run_ok(["grow", raw.to_str().unwrap()]);
    for (kind, second) in [
        ("monolithicFlat", None),
        ("twoGbMaxExtentSparse", Some("-s002.vmdk")),
        ("twoGbMaxExtentFlat", Some("-f002.vmdk")),
    ] {
        let image = draconis.path(&format!("{kind}.vmdk"));
        let convert = ["convert", "-f", "raw", "-O", "vmdk", "-o", &format!("subformat={kind}")];
        run_and_capture(Command::new("qemu-img").args(convert).arg(&raw).arg(&image));
        assert_readable(&draconis, &image, &[]);
        let place = format!("{}:/file", image.display());
        let told = draconis.run_failing(["rm", &place]);
        assert!(told.contains("only read"), "{told}");
        assert_mountable(&draconis, &image, kind, false);
        let Some(second) = second else { continue };
        // A missing extent file is named, and can be given as an option.
        let (named, elsewhere) =
            (draconis.path(&format!("{kind}{second}")), draconis.path("elsewhere"));
        std::fs::rename(&named, &elsewhere).unwrap();
        let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
        assert!(told.contains(second) && told.contains("1 of 2"), "{told}");
        assert_readable(&draconis, &image, &["--backing", elsewhere.to_str().unwrap()]);
        // A symbolic link out of the directory is not followed.
        let outside = draconis.make_dir("outside").join("part");
        std::fs::rename(&elsewhere, &outside).unwrap();
        std::os::unix::fs::symlink(&outside, &named).unwrap();
        let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
        assert!(told.contains(second) && told.contains("1 of 2"), "{told}");
        std::fs::remove_file(&named).unwrap();
        // A name with `..` is not followed, either.
        let text = std::fs::read_to_string(&image).unwrap();
        let own = format!("{kind}{second}");
        for hostile in ["../outside/part", outside.to_str().unwrap(), "/dev/zero", "..", ""] {
            std::fs::write(&image, text.replace(&own, hostile)).unwrap();
            let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
            assert!(told.contains("not opened") && told.contains("qemu-img convert"), "{told}");
        }
        // A file in a subdirectory is found, also after a byte order mark and through a link.
        let below = draconis.make_dir("below");
        std::fs::rename(&outside, below.join("part")).unwrap();
        std::os::unix::fs::symlink("below/part", &named).unwrap();
        for name in [own.as_str(), "below/part", "./below//part"] {
            let text = text.replace(&own, name);
            std::fs::write(&image, format!("\u{feff}{text}")).unwrap();
            assert_readable(&draconis, &image, &[]);
            assert_mountable(&draconis, &image, kind, false);
        }
    }
}

/// One file contains both halves of a disk, in reverse order.
#[test]
#[ignore = "tools: qemu-img"]
fn vmdk_with_repeated_extent_is_read() {
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let bytes = std::fs::read(&raw).unwrap();
    let half = bytes.len() / 1024 * 512;
    let turned = [&bytes[half..], &bytes[..half]].concat();
    std::fs::write(draconis.make_dir("sub").join("turned"), turned).unwrap();
    let (sectors, at) = (half / 512, (bytes.len() - half) / 512);
    let image = draconis.path("twice.vmdk");
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
         createType=\"twoGbMaxExtentFlat\"\nRW {sectors} FLAT \"sub/turned\" {at}\n\
         RW {at} FLAT \"sub/turned\" 0\n"
    );
    std::fs::write(&image, text).unwrap();
    let read = draconis.path("read");
    run_and_capture(Command::new("qemu-img").args(["convert", "-O", "raw"]).args([&image, &read]));
    assert!(std::fs::read(&read).unwrap() == bytes);
    assert_readable(&draconis, &image, &[]);
    assert_mountable(&draconis, &image, "twice", false);
    // Extent files of the image are not overwritten.
    let part = draconis.path("sub/turned");
    let from = format!("{}:/file", image.display());
    draconis.run_failing(["get", &from, part.to_str().unwrap()]);
}

/// A single disk in an OVA archive is read in place; of several, the error lists the names.
#[test]
#[ignore = "tools: qemu-img"]
fn ova_archives_are_read_and_mounted() {
    if !has_tool("OVA archives", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let convert =
        ["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", "volume"];
    for disk in ["vm-disk1.vmdk", "vm-disk2.vmdk"] {
        let dir = raw.parent().unwrap();
        run_and_capture(Command::new("qemu-img").args(convert).arg(disk).current_dir(dir));
    }
    std::fs::write(draconis.path("vm.ovf"), "<Envelope/>").unwrap();
    let pack = |names: &[&str]| {
        let image = draconis.path("vm.ova");
        let mut tar = Command::new("tar");
        tar.args(["--format=ustar", "-cf", "vm.ova"]).args(names);
        run_and_capture(tar.current_dir(image.parent().unwrap()));
        image
    };
    let image = pack(&["vm.ovf", "vm-disk1.vmdk"]);
    assert_readable(&draconis, &image, &[]);
    assert_mountable(&draconis, &image, "ova", false);
    let told = draconis.run_failing(["rm", &format!("{}:/file", image.display())]);
    assert!(told.contains("OVA image is only read") && told.contains("tar -xf"), "{told}");
    let image = pack(&["vm.ovf", "vm-disk1.vmdk", "vm-disk2.vmdk"]);
    let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
    assert!(told.contains("vm-disk2.vmdk") && told.contains("tar -xf"), "{told}");
    let image = pack(&["vm-disk1.vmdk"]);
    let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
    assert!(told.contains("a tar archive"), "{told}");
}

/// A split sparse image is joined when its first file is opened.
#[test]
#[ignore = "tools: simg2img"]
fn split_android_sparse_images_are_read() {
    if !has_tool("split images", "simg2simg") {
        return;
    }
    let draconis = Draconis::new();
    let dir = make_volume(&draconis).parent().unwrap().to_owned();
    run_and_capture(Command::new("img2simg").args(["volume", "sparse"]).current_dir(&dir));
    let split = ["sparse", "system.img_sparsechunk", "1000000"];
    run_and_capture(Command::new("simg2simg").args(split).current_dir(&dir));
    let image = draconis.path("system.img_sparsechunk.0");
    let second = draconis.path("system.img_sparsechunk.1");
    assert_readable(&draconis, &image, &[]);
    assert_mountable(&draconis, &image, "split", false);
    let told = draconis.run_failing(["ls", second.to_str().unwrap()]);
    assert!(told.contains("sparsechunk.0") && told.contains("simg2img"), "{told}");
}

/// The backup GPT is used if the primary is damaged, with a note.
#[test]
#[ignore = "tools: sfdisk"]
fn backup_gpt_is_used() {
    if !has_tool("GPT", "sfdisk") {
        return;
    }
    let draconis = Draconis::new();
    let raw = std::fs::read(make_volume(&draconis)).unwrap();
    let image = draconis.path("disk");
    let script = draconis.path("script");
    std::fs::write(&script, "label: gpt\nstart=2048, size=32768\n").unwrap();
    std::fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    let input = std::fs::File::open(&script).unwrap();
    run_and_capture(Command::new("sfdisk").arg("-q").arg(&image).stdin(input));
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[1 << 20..][..raw.len()].copy_from_slice(&raw);
    for (from, to) in [(0, 0), (512, 1024), (512 + 16, 512 + 20), (1024, 2048), (0, 17408)] {
        let mut bytes = bytes.clone();
        bytes[from..to].fill(0);
        std::fs::write(&image, &bytes).unwrap();
        assert_readable(&draconis, &image, &[]);
        let output = draconis.run(["ls", image.to_str().unwrap()]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(told.contains("backup"), from != to, "{from}..{to}: {told}");
        if has_fuse("mounting by a backup GPT") {
            let at = draconis.make_dir("mount");
            let output = draconis.run(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{told}");
            assert_eq!(told.contains("backup"), from != to, "{from}..{to}: {told}");
            assert_eq!(std::fs::read(at.join("file")).unwrap(), b"in the volume");
            draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
        }
    }
}

#[test]
#[ignore = "tools: xz"]
fn compressed_images_are_read() {
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    for program in ["gzip", "xz", "zstd"] {
        if !has_tool("compressed images", program) {
            continue;
        }
        let image = draconis.path(&format!("volume.{program}"));
        let packed = run_and_capture(Command::new(program).arg("-c").arg(&raw));
        std::fs::write(&image, &packed).unwrap();
        assert_readable(&draconis, &image, &[]);
        let line = format!("{}:/file", image.display());
        let told = draconis.run_failing(["rm", &line]);
        assert!(told.contains(program), "{told}");
        if has_fuse("mounting compressed images") {
            let at = draconis.make_dir("mount");
            let told = draconis.run_failing(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
            assert!(told.contains(&format!("{program} -d")), "{told}");
        }
        // Padding that the compressor accepts is accepted.
        if program != "zstd" {
            std::fs::write(&image, [&packed[..], &[0; 4096]].concat()).unwrap();
            assert_readable(&draconis, &image, &[]);
        }
        std::fs::write(&image, &packed[..packed.len() / 2]).unwrap();
        let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
        assert!(told.contains(&format!("compressed with {program}")), "{told}");
    }
}

/// zstd files with a seek table are read in place.
#[test]
#[ignore = "tools: zstd"]
fn seekable_compressed_images_are_read_in_place() {
    if !has_tool("seekable images", "zstd") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let (mut file, mut table) = (vec![], vec![]);
    for frame in std::fs::read(&raw).unwrap().chunks(1 << 20) {
        let piece = draconis.path("piece");
        std::fs::write(&piece, frame).unwrap();
        let packed = run_and_capture(Command::new("zstd").args(["-q", "-c"]).arg(&piece));
        table.extend((packed.len() as u32).to_le_bytes());
        table.extend((frame.len() as u32).to_le_bytes());
        file.extend(packed);
    }
    let frames = table.len() as u32 / 8;
    file.extend(0x184D_2A5E_u32.to_le_bytes());
    file.extend((table.len() as u32 + 9).to_le_bytes());
    file.extend(table);
    file.extend(frames.to_le_bytes());
    file.push(0);
    file.extend(0x8F92_EAB1_u32.to_le_bytes());
    let image = draconis.path("seekable");
    std::fs::write(&image, &file).unwrap();
    assert!(
        run_and_capture(Command::new("zstd").args(["-dc"]).arg(&image))
            == std::fs::read(&raw).unwrap()
    );
    assert_readable(&draconis, &image, &[]);
    // A worker has no place to decompress to, and needs none.
    assert_mountable(&draconis, &image, "mount", false);
    let told = draconis.run_failing(["rm", &format!("{}:/file", image.display())]);
    assert!(told.contains("zstd -d"), "{told}");
    assert!(std::fs::read(&image).unwrap() == file);
}

/// Creates a disk with a table of partitions of 16 MiB each, by sfdisk.
fn make_partitioned_disk(draconis: &Draconis, label: &str, parts: &[Option<&Path>]) -> PathBuf {
    use std::io::Write as _;
    use std::os::unix::fs::FileExt;
    let path = draconis.path(&format!("disk-{label}-{}", parts.iter().flatten().count()));
    let file = std::fs::File::create(&path).unwrap();
    file.set_len((2 + 17 * parts.len() as u64) << 20).unwrap();
    let mut script = format!("label: {label}\n");
    for nth in 0..parts.len() {
        script += &format!("start={}, size=32768\n", (1 + 17 * nth) * 2048);
    }
    let mut child = Command::new("sfdisk")
        .arg("-q")
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    for (nth, part) in parts.iter().enumerate() {
        if let Some(part) = part {
            let bytes = std::fs::read(part).unwrap();
            file.write_all_at(&bytes, (1 + 17 * nth as u64) << 20).unwrap();
        }
    }
    path
}

#[test]
#[ignore = "tools: sfdisk"]
fn single_partition_volume_is_chosen_and_several_are_listed() {
    if !has_tool("disks with partitions", "sfdisk") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis);
    let swap = draconis.path("swap");
    std::fs::File::create(&swap).unwrap().set_len(8 << 20).unwrap();
    run_and_capture(Command::new("mkswap").arg(&swap));
    for label in ["dos", "gpt"] {
        let one = make_partitioned_disk(&draconis, label, &[Some(&swap), None, Some(&raw)]);
        assert_readable(&draconis, &one, &[]);
        let json = draconis.run_ok(["info", "--json", one.to_str().unwrap()]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let table = if label == "dos" { "MBR" } else { "GPT" };
        assert_eq!(json["partition"], serde_json::json!({ "number": 3, "table": table }));
        let shown = draconis.run_ok(["info", one.to_str().unwrap()]);
        assert!(shown.contains(&format!("partition    3 ({table})\n")), "{shown}");
        let target = format!("{}:/new", one.display());
        draconis.run_ok(["mkdir", &target]);
        draconis.run_ok(["stat", &target]);
        // The volume cannot outgrow its partition, and the disk does not grow.
        let before = one.metadata().unwrap().len();
        draconis.run(["grow", one.to_str().unwrap()]);
        draconis.run(["grow", one.to_str().unwrap(), "100M"]);
        assert_eq!(one.metadata().unwrap().len(), before);
        assert_readable(&draconis, &one, &[]);
        let several =
            make_partitioned_disk(&draconis, label, &[Some(&raw), Some(&raw), Some(&swap)]);
        let told = draconis.run_failing(["ls", several.to_str().unwrap()]);
        for said in ["1 (an ext file system)", "2 (an ext", "3 (swap space)", "--partition N"] {
            assert!(told.contains(said), "{told}");
        }
        assert_readable(&draconis, &several, &["--partition", "2"]);
        let none = make_partitioned_disk(&draconis, label, &[Some(&swap)]);
        let told = draconis.run_failing(["ls", none.to_str().unwrap()]);
        assert!(told.contains("none of its partitions"), "{told}");
        if has_fuse("mounting disks with partitions") {
            let at = draconis.make_dir("mount");
            draconis.run_ok(["mount".as_ref(), one.as_os_str(), at.as_os_str()]);
            std::fs::write(at.join("written"), b"x").unwrap();
            draconis.run_ok(["umount".as_ref(), at.as_os_str()]);
            let told =
                draconis.run_failing(["mount".as_ref(), several.as_os_str(), at.as_os_str()]);
            assert!(told.contains("partition=N"), "{told}");
            assert!(draconis.run_ok(["ls", one.to_str().unwrap()]).contains("written"));
        }
    }
}

#[test]
fn other_contents_are_named_with_hint() {
    let draconis = Draconis::new();
    let image = draconis.path("image");
    for (at, mark, said, help) in [
        (0, &b"hsqs"[..], "SquashFS", "unsquashfs"),
        (0, b"LUKS\xBA\xBE", "LUKS", "cryptsetup"),
        (536, b"LVM2 001", "LVM", "vgchange"),
        (32769, b"CD001", "ISO 9660", "bsdtar"),
        (257, b"ustar", "tar archive", "tar -tf"),
        (64, &[0x7F, 0x10, 0xDA, 0xBE], "VDI", "qemu-img"),
        (3, b"NTFS    ", "NTFS", "ntfs3"),
        (1024, &[0xE2, 0xE1, 0xF5, 0xE0], "EROFS", "erofs"),
    ] {
        let mut bytes = vec![0; 1 << 20];
        bytes[at..at + mark.len()].copy_from_slice(mark);
        std::fs::write(&image, bytes).unwrap();
        let told = draconis.run_failing(["ls", image.to_str().unwrap()]);
        assert!(told.contains(said) && told.contains(help), "{told}");
        if has_fuse("mounting what is no volume") {
            let at = draconis.make_dir("mount");
            let told = draconis.run_failing(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
            assert!(told.contains(said) && told.contains(help), "{told}");
        }
    }
}
