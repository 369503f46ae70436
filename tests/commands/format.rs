//! `draconis format`: volumes from directories and archives, checked by other programs.

use crate::common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{
    Draconis, FileProperties, IgnoredProperties, KernelMount, assert_same_trees, copy_draconis,
    is_installed, is_root, make_odd_tree, mke2fs, report_skipped, scan_tree,
};
use draconis_device::Random;
use draconis_testkit::judge::{self, assert_fsck_clean};

/// Comparison without access times, inode numbers and block counts.
fn ignore_uncopied_properties() -> IgnoredProperties {
    IgnoredProperties { what_a_copy_loses: true, fractions: false }
}

/// The odd tree with a smaller sparse file, which is faster to compare than 5 GiB.
fn small_odd_tree(top: &Path) {
    make_odd_tree(top);
    let sparse = std::fs::File::options().write(true).open(top.join("sparse")).unwrap();
    sparse.set_len(70 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"near the end", 69 << 20).unwrap();
}

/// Describes the tree in a volume as the kernel shows it; without root, as `draconis get` does.
fn volume_tree(draconis: &Draconis, image: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = match KernelMount::mount(image, draconis.make_dir("kernel"), "format") {
        Some(kernel) => scan_tree(&kernel.at, ignore_uncopied_properties()),
        None => {
            let into = tempfile::tempdir().unwrap();
            draconis.run_ok([
                OsStr::new("get"),
                OsStr::new("-r"),
                OsStr::new(&format!("{}:/", image.display())),
                into.path().as_os_str(),
            ]);
            scan_tree(into.path(), ignore_uncopied_properties())
        }
    };
    assert!(seen.remove(Path::new("lost+found")).is_some());
    // The root directory differs.
    seen.remove(Path::new(""));
    seen
}

fn host_tree(top: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = scan_tree(top, ignore_uncopied_properties());
    seen.remove(Path::new(""));
    seen
}

fn create_archive(top: &Path, arguments: &[&str], into: &Path) {
    let mut tar = Command::new("tar");
    // Only pax archives can hold attributes.
    if !arguments.contains(&"--format=gnu") {
        tar.args(["--format=pax", "--xattrs", "--xattrs-include=*"]);
    }
    tar.arg("-C").arg(top).args(arguments);
    let output = tar.arg("-cf").arg(into).arg(".").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn format_from_directory() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    small_odd_tree(&tree);
    let expected = host_tree(&tree);
    let image = draconis.path("image");
    for arguments in [&[][..], &["-b", "1024"], &["-b", "2048", "-O", "^dir_index"]] {
        let mut command = vec!["format", "--from", tree.to_str().unwrap()];
        command.extend(arguments);
        command.push(image.to_str().unwrap());
        draconis.run_ok(&command);
        assert_fsck_clean(&image);
        assert_same_trees(&volume_tree(&draconis, &image), &expected);
        std::fs::remove_file(&image).unwrap();
    }
    let size = ["format", "--from", tree.to_str().unwrap(), image.to_str().unwrap(), "100M"];
    draconis.run_ok(size);
    assert_fsck_clean(&image);
    assert_eq!(image.metadata().unwrap().len(), 100 << 20);
    let holes = std::os::unix::fs::MetadataExt::blocks(&image.metadata().unwrap());
    assert!(holes < (20 << 20) / 512, "{holes} sectors");
    assert_same_trees(&volume_tree(&draconis, &image), &expected);
}

#[test]
fn format_from_directory_for_every_type() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    small_odd_tree(&tree);
    let expected = host_tree(&tree);
    let image = draconis.path("image");
    for (arguments, shown) in [
        (&["-t", "ext3"][..], "ext3"),
        (&["-t", "ext4"], "ext4"),
        (&["-t", "ext4", "-O", "^has_journal,orphan_file,^orphan_file", "--min"], "ext4"),
        (&["-t", "ext4", "-b", "4096", "-J", "size=8", "-G", "32", "-O", "large_dir"], "ext4"),
        (&["-t", "ext4", "-O", "inline_data,quota", "-E", "quotatype=usrquota:prjquota"], "quota"),
        (
            &["-t", "ext4", "-O", "bigalloc,mmp", "-C", "32K", "-E", "mmp_update_interval=1"],
            "bigalloc",
        ),
    ] {
        let mut command = vec!["format", "--from", tree.to_str().unwrap()];
        command.extend(arguments);
        command.push(image.to_str().unwrap());
        draconis.run_ok(&command);
        assert_fsck_clean(&image);
        assert_same_trees(&volume_tree(&draconis, &image), &expected);
        let info = draconis.run_ok(["info", image.to_str().unwrap()]);
        assert!(info.contains(shown), "{info}");
        std::fs::remove_file(&image).unwrap();
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    let draconis = Draconis::new();
    let image = draconis.path("image");
    for (arguments, said) in [
        (&["-t", "ext5"][..], "ext5"),
        (&["-t", "ext4", "-O", "dirdata"], "dirdata"),
        (&["-t", "ext4", "-C", "16K"], "bigalloc"),
        (&["-t", "ext4", "-O", "bigalloc", "-C", "3K"], "-C"),
        (&["-t", "ext4", "-O", "quota", "-E", "quotatype=usrquota:all"], "prjquota"),
        (&["-t", "ext4", "-O", "mmp", "-E", "mmp_update_interval=301"], "mmp_update_interval"),
        (&["-t", "ext4", "-O", "journal_dev"], "journal_dev"),
        (&["-t", "ext4", "-J", "device=/dev/null"], "device"),
        (&["-t", "ext4", "-J", "size=x"], "size=x"),
        (&["-t", "ext4", "-E", "sparse=1"], "sparse"),
        (&["-t", "ext4", "-E", "stride=70000"], "stride"),
    ] {
        let mut command = vec!["format"];
        command.extend(arguments);
        command.extend([image.to_str().unwrap(), "64M"]);
        let output = draconis.run(&command);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said), "{arguments:?}: {text}");
        assert!(!image.exists());
    }
    // As with mke2fs, but with a warning.
    let output = draconis.run(["format", "-t", "ext4", image.to_str().unwrap(), "1M"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("too small for a journal"), "{text}");
    assert_fsck_clean(&image);
}

#[test]
fn every_archive_format_gives_same_volume() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    small_odd_tree(&tree);
    let expected = host_tree(&tree);
    let tar = draconis.path("archive");
    let image = draconis.path("image");
    for arguments in [
        &["--sparse", "--sparse-version=1.0"][..],
        &["--sparse", "--sparse-version=0.1"],
        &["--sparse", "--sparse-version=0.0"],
        &["--sparse", "-z"],
    ] {
        create_archive(&tree, arguments, &tar);
        draconis.run_ok([OsStr::new("format"), OsStr::new("--from"), tar.as_ref(), image.as_ref()]);
        assert_fsck_clean(&image);
        assert_same_trees(&volume_tree(&draconis, &image), &expected);
        std::fs::remove_file(&image).unwrap();
    }
    // GNU tar's own format has no attributes and no fractions of seconds.
    let plain = draconis.make_dir("plain");
    for nth in 0..30 {
        let name = format!("{nth} {}", "long name ".repeat(nth));
        let dir = plain.join(&name[..name.len().min(200)]);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("file"), name).unwrap();
        std::os::unix::fs::symlink("t".repeat(nth * 20 + 1), dir.join("link")).unwrap();
    }
    let sparse = std::fs::File::create(plain.join("sparse")).unwrap();
    for nth in 0..50 {
        std::os::unix::fs::FileExt::write_all_at(&sparse, &[7; 5000], nth << 20).unwrap();
    }
    sparse.set_len(60 << 20).unwrap();
    let without = IgnoredProperties { what_a_copy_loses: true, fractions: true };
    create_archive(&plain, &["--format=gnu", "--sparse"], &tar);
    draconis.run_ok([OsStr::new("format"), OsStr::new("--from"), tar.as_ref(), image.as_ref()]);
    assert_fsck_clean(&image);
    let (mut found, mut expected) = (volume_tree(&draconis, &image), scan_tree(&plain, without));
    expected.remove(Path::new(""));
    for seen in found.values_mut() {
        seen.times = seen.times.map(|(seconds, _)| (seconds, 0));
    }
    assert_same_trees(&found, &expected);
}

/// Compresses bytes with a program.
fn compress(tool: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    if !is_installed(tool) {
        report_skipped(format_args!("{tool} is not installed"));
        return None;
    }
    let mut child = Command::new(tool)
        .args(["-c", "-q"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    Some(output.stdout)
}

fn format_from_stdin(draconis: &Draconis, bytes: &[u8], image: &Path) -> Output {
    let mut command = draconis.command();
    command.env("SOURCE_DATE_EPOCH", "1700000000");
    command.args(["format", "--seed", "7", "--force", "--from", "-"]).arg(image);
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A refusal may close the pipe early.
    let _ = stdin.write_all(bytes);
    drop(stdin);
    child.wait_with_output().unwrap()
}

#[test]
#[ignore = "tools: zstd"]
fn compressed_stdin_is_accepted() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    std::fs::create_dir(tree.join("dir")).unwrap();
    std::fs::write(tree.join("dir/file"), vec![5; 300_000]).unwrap();
    let tar = draconis.path("archive");
    create_archive(&tree, &[], &tar);
    let bytes = std::fs::read(&tar).unwrap();
    let mut images = vec![];
    for tool in ["cat", "gzip", "zstd", "xz"] {
        let packed = if tool == "cat" { Some(bytes.clone()) } else { compress(tool, &bytes) };
        let Some(packed) = packed else { continue };
        let image = draconis.path(tool);
        let output = format_from_stdin(&draconis, &packed, &image);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_fsck_clean(&image);
        images.push(std::fs::read(&image).unwrap());
        if tool != "cat" {
            let output = format_from_stdin(&draconis, &packed[..packed.len() / 2], &image);
            assert_eq!(output.status.code(), Some(1), "half of {tool}");
        }
    }
    assert!(images.windows(2).all(|pair| pair[0] == pair[1]));
    let output = format_from_stdin(&draconis, &[b'x'; 5000], &draconis.path("none"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("not a tar archive"), "{errors}");
    assert!(!draconis.path("none").exists());
}

#[test]
fn a_damaged_archive_is_refused_without_a_panic() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    small_odd_tree(&tree);
    let tar = draconis.path("archive");
    create_archive(&tree, &["--sparse", "--exclude=big"], &tar);
    let bytes = std::fs::read(&tar).unwrap();
    let image = draconis.path("image");
    let mut random = Random::new(1);
    for nth in 0..40 {
        let mut damaged = bytes.clone();
        let at = random.next_below(damaged.len() as u64) as usize;
        match nth % 3 {
            0 => damaged.truncate(at),
            1 => damaged[at] ^= 0x41,
            _ => damaged[at & !511..][..256].fill(b'9'),
        }
        let output = format_from_stdin(&draconis, &damaged, &image);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{errors}");
        assert!(!errors.contains("panicked"), "{errors}");
        if output.status.success() {
            assert_fsck_clean(&image);
        }
    }
}

#[test]
fn same_source_gives_identical_image() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    small_odd_tree(&tree);
    let format = |seed: &str, image: &Path| {
        let mut command = draconis.command();
        command.env("SOURCE_DATE_EPOCH", "1700000000");
        command.args(["format", "--seed", seed, "--from"]).arg(&tree).arg(image);
        assert!(command.status().unwrap().success());
        std::fs::read(image).unwrap()
    };
    let first = format("7", &draconis.path("a"));
    // Reading and copying files changes times that must not appear in the volume.
    std::fs::read(tree.join("big")).unwrap();
    std::fs::set_permissions(
        tree.join("one"),
        std::fs::metadata(tree.join("one")).unwrap().permissions(),
    )
    .unwrap();
    assert!(first == format("7", &draconis.path("b")));
    assert!(first != format("8", &draconis.path("c")));
}

#[test]
fn existing_contents_are_not_overwritten_without_force() {
    let draconis = Draconis::new();
    let image = draconis.path("image");
    let name = image.to_str().unwrap();
    let errors = draconis.run_failing(["format", name]);
    assert!(errors.contains("SIZE"), "{errors}");
    assert!(!image.exists());
    draconis.run_ok(["format", "-L", "first", name, "1M"]);
    let before = std::fs::read(&image).unwrap();
    let errors = draconis.run_failing(["format", name]);
    assert!(errors.contains("an ext file system") && errors.contains("--force"), "{errors}");
    // A source that does not fit changes nothing, with and without --force.
    let big = draconis.path("big");
    std::fs::write(&big, vec![1; 3 << 20]).unwrap();
    let tree = draconis.make_dir("tree");
    std::fs::rename(&big, tree.join("big")).unwrap();
    let errors =
        draconis.run_failing(["format", "--force", "--from", tree.to_str().unwrap(), name, "1M"]);
    assert!(errors.contains("no room") && errors.contains("SIZE"), "{errors}");
    assert!(std::fs::read(&image).unwrap() == before);
    draconis.run_ok(["format", "--force", "-L", "second", name]);
    assert_fsck_clean(&image);
    assert!(draconis.run_ok(["info", name]).contains("second"));
    for (arguments, errors) in [
        (&["-t", "ext5", name, "1M"][..], "ext5"),
        (&["-t", "ext2", "-O", "bigalloc", name, "1M"], "needs extent"),
        (&["-O", "nonsense", name, "1M"], "nonsense"),
        (&["-E", "strides=4", name, "1M"], "strides"),
        (&["-U", "nobody", name, "1M"], "nobody"),
        (&["-m", "x", name, "1M"], "-m x"),
        (&["-b", "1000", name, "1M"], "1000"),
        (&[name, "1Q"], "1Q"),
        (&[name, "10K"], "too small"),
        (&["--from", "/no/such", name], "/no/such"),
    ] {
        let mut all = vec!["format", "--force"];
        all.extend(arguments);
        let found = draconis.run_failing(&all);
        assert!(found.contains(errors), "{found}");
    }
    assert_fsck_clean(&image);
    // Read-only file system images of others are recognised, too.
    let mut foreign = vec![0; 1 << 20];
    foreign[..4].copy_from_slice(b"XFSB");
    std::fs::write(&image, foreign).unwrap();
    assert!(draconis.run_failing(["format", name]).contains("XFS"));
}

#[test]
fn a_volume_in_use_is_refused_even_if_forced() {
    let draconis = Draconis::new();
    let image = draconis.path("image");
    let name = image.to_str().unwrap();
    draconis.run_ok(["format", name, "8M"]);
    let held = std::fs::File::open(&image).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockShared).unwrap();
    let errors = draconis.run_failing(["format", "--force", name]);
    assert!(errors.contains("in use"), "{errors}");
    drop(held);
    if let Some(_kernel) = KernelMount::mount(&image, draconis.make_dir("kernel"), "in use") {
        let errors = draconis.run_failing(["format", "--force", name]);
        assert!(errors.contains("in use by /dev/loop"), "{errors}");
    }
    draconis.run_ok(["format", "--force", name]);
}

#[test]
fn layout_matches_mke2fs() {
    let draconis = Draconis::new();
    let (ours, theirs) = (draconis.path("ours"), draconis.path("theirs"));
    let uuid = "c1b9d5a2-f162-11cf-9ece-0020afc76f16";
    let extended = format!("root_owner=5:6,hash_seed={uuid}");
    for (arguments, size) in [
        (&["-L", "label", "-m", "1"][..], "64M"),
        (&["-b", "4096"], "20000"),
        (&["-i", "8192", "-I", "128", "-O", "^resize_inode"], "30000"),
        (&["-N", "5000"], "2G"),
    ] {
        let common = ["-t", "ext2", "-U", uuid, "-E", &extended];
        let mut all = vec!["format"];
        all.extend(common.iter().chain(arguments));
        all.extend([ours.to_str().unwrap(), size]);
        draconis.run_ok(&all);
        let both: Vec<&str> = common.iter().chain(arguments).copied().collect();
        mke2fs(&theirs, None, &both, size);
        let dump = |image: &Path| {
            let text = judge::dumpe2fs(&[], image);
            let dated = ["created:", "write time:", "checked:"];
            let lines = text.lines().filter(|line| !dated.iter().any(|word| line.contains(word)));
            lines.collect::<Vec<_>>().join("\n")
        };
        assert_eq!(dump(&ours), dump(&theirs));
        assert_fsck_clean(&ours);
        std::fs::remove_file(&ours).unwrap();
        std::fs::remove_file(&theirs).unwrap();
    }
}

#[test]
fn archive_owners_are_set_without_root() {
    if !is_root() || !is_installed("setpriv") {
        report_skipped("becoming nobody needs root and setpriv");
        return;
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    small_odd_tree(&tree);
    let tar = draconis.path("archive");
    create_archive(&tree, &["--sparse"], &tar);
    let expected = host_tree(&tree);
    let nobody = draconis.make_dir("nobody");
    for path in [&nobody, &tar] {
        std::os::unix::fs::chown(path, Some(65534), Some(65534)).unwrap();
    }
    std::fs::set_permissions(
        draconis.dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let program = nobody.join("draconis");
    copy_draconis(&program);
    let image = nobody.join("image");
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&program)
        .args(["format", "--from"])
        .args([&tar, &image])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_fsck_clean(&image);
    assert_same_trees(&volume_tree(&draconis, &image), &expected);
}

#[test]
fn root_of_empty_volume_belongs_to_user() {
    let draconis = Draconis::new();
    let owner = |name: &str| {
        let printed =
            draconis.run_ok(["stat", "--json", &format!("{}:/", draconis.path(name).display())]);
        let stat: serde_json::Value = serde_json::from_str(&printed).unwrap();
        (stat[0]["uid"].as_u64().unwrap() as u32, stat[0]["gid"].as_u64().unwrap() as u32)
    };
    let own = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    draconis.run_ok(["format", draconis.path("own").to_str().unwrap(), "1M"]);
    assert_fsck_clean(draconis.path("own"));
    assert_eq!(owner("own"), own);
    if !is_root() || !is_installed("setpriv") {
        report_skipped("becoming another user needs root and setpriv");
        return;
    }
    let dir = draconis.make_dir("theirs");
    std::os::unix::fs::chown(&dir, Some(1234), Some(5678)).unwrap();
    std::fs::set_permissions(
        draconis.dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let program = dir.join("draconis");
    copy_draconis(&program);
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("file"), "x").unwrap();
    let whole = draconis.path("whole.tar");
    create_archive(&tree, &["--owner=7", "--group=8"], &whole);
    let part = draconis.path("part.tar");
    let made = Command::new("tar").arg("-C").arg(&tree).arg("-cf").arg(&part).arg("file").status();
    assert!(made.unwrap().success());
    let (whole, part) = (whole.to_str().unwrap(), part.to_str().unwrap());
    for (name, arguments, expected) in [
        ("theirs/empty", &[][..], (1234, 5678)),
        ("theirs/asked", &["-E", "root_owner=5:6"], (5, 6)),
        ("theirs/whole", &["--from", whole], (7, 8)),
        ("theirs/part", &["--from", part], (0, 0)),
        ("theirs/part-own", &["--from", part, "-E", "root_owner"], (1234, 5678)),
    ] {
        let output = Command::new("setpriv")
            .args(["--reuid=1234", "--regid=5678", "--clear-groups"])
            .arg(&program)
            .arg("format")
            .args(arguments)
            .arg(draconis.path(name))
            .arg("1M")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_fsck_clean(draconis.path(name));
        assert_eq!(owner(name), expected, "{name}");
    }
}

/// Recognised contents are lost only if their kind is named; a partition is written alone.
#[test]
#[ignore = "tools: sfdisk, zstd, mkswap"]
fn recognised_contents_are_not_overwritten() {
    if !["sfdisk", "mkswap", "zstd"].into_iter().all(is_installed) {
        return report_skipped("partitions and swap space: there is no sfdisk, mkswap or zstd");
    }
    let draconis = Draconis::new();
    let disk = draconis.path("disk");
    let script = "truncate -s 64M disk && printf 'label: gpt\n,20M\n,20M,S\n' | sfdisk -q disk && \
        truncate -s 20M swap && mkswap -q swap && dd if=swap of=disk bs=1M seek=21 conv=notrunc && \
        zstd -q disk -o packed";
    common::volume::run_shell(script, draconis.dir.path());
    let name = disk.to_str().unwrap();
    let before = std::fs::read(&disk).unwrap();
    for (arguments, errors) in [
        (&["format", name][..], "--force=gpt"),
        (&["format", "--force", name], "--force=gpt"),
        (&["format", "-F", name], "--force=gpt"),
        (&["format", "--force=swap", name], "--force=gpt"),
        (&["format", "--partition", "2", name], "partition 2 holds swap space; --force=swap"),
        (&["format", "--partition", "2", "--force", name], "--force=swap"),
        (&["format", "--offset", "50M", name], "--force=gpt"),
        (&["format", "-E", "offset=22M", "--force", name], "--force=swap"),
        (&["format", "--partition", "3", name], "no partition 3"),
        (&["store", "create", "--force", "--size", "16M", name], "--force=gpt"),
        (&["mount", "--create", "8M", name, "."], "--force=gpt"),
    ] {
        let found = draconis.run_failing(arguments);
        assert!(found.contains(errors), "{arguments:?}: {found}");
        assert!(std::fs::read(&disk).unwrap() == before, "{arguments:?}");
    }
    draconis.run_ok(["format", "-t", "ext4", "--partition", "2", "--force=swap", name]);
    let after = std::fs::read(&disk).unwrap();
    assert!(after[..21 << 20] == before[..21 << 20] && after[41 << 20..] == before[41 << 20..]);
    std::fs::write(draconis.path("part"), &after[21 << 20..41 << 20]).unwrap();
    assert_fsck_clean(draconis.path("part"));
    // In the middle of a volume.
    let part = draconis.path("part");
    let part = part.to_str().unwrap();
    let errors = draconis.run_failing(["format", "--offset", "1M", part]);
    assert!(errors.contains("holds an ext file system; --force overwrites it"), "{errors}");
    // The space behind the volume is free.
    let file = std::fs::File::options().write(true).open(part).unwrap();
    file.set_len(40 << 20).unwrap();
    draconis.run_ok(["format", "-t", "ext4", "--offset", "20M", part]);
    assert_fsck_clean(Path::new(part));
    let whole = std::fs::read(part).unwrap();
    std::fs::write(draconis.path("second"), &whole[20 << 20..]).unwrap();
    assert_fsck_clean(draconis.path("second"));
    // Compressed data is never overwritten.
    let packed = draconis.path("packed");
    let before = std::fs::read(&packed).unwrap();
    let packed = packed.to_str().unwrap();
    for arguments in [
        &["format", "--force", packed, "8M"][..],
        &["format", "--force=zstd", packed, "8M"],
        &["format", "--force=zstd", "--image-format", "raw", packed, "8M"],
        &["format", "--force=zstd", "--offset", "1K", packed],
        &["store", "create", "--force=zstd", "--size", "16M", packed],
    ] {
        let errors = draconis.run_failing(arguments);
        assert!(errors.contains("never overwritten"), "{errors}");
        assert!(std::fs::read(packed).unwrap() == before, "{arguments:?}");
    }
    // A reading command does not suggest overwriting.
    for arguments in [
        &["ls", "--partition", "1", name][..],
        &["info", name],
        &["ls", packed],
        &["check", "--partition", "1", name],
        &["store", "ls", name],
    ] {
        let told = draconis.run(arguments);
        let errors = String::from_utf8_lossy(&told.stderr).into_owned();
        assert!(!errors.contains("draconis format") && !errors.contains("create"), "{errors}");
    }
}

#[test]
fn mke2fs_option_letters_have_same_meaning() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("f"), vec![1; 3 << 20]).unwrap();
    let (image, tree) = (draconis.path("image"), tree.to_str().unwrap());
    let name = image.to_str().unwrap();
    let info = |line: &[&str]| -> serde_json::Value {
        let printed = draconis.run_ok([&["format", "-F"], line].concat());
        assert!(printed.is_empty(), "{printed}");
        assert_fsck_clean(&image);
        serde_json::from_str(&draconis.run_ok(["info", "--json", name])).unwrap()
    };
    // A volume sized for its tree has free space, as the help says.
    let fitted = info(&["-q", "-d", tree, name]);
    let number = |of: &serde_json::Value, what: &str| of[what].as_u64().unwrap();
    let free = number(&fitted, "free_blocks") - number(&fitted, "reserved_blocks");
    let free = free * number(&fitted, "block_size_bytes");
    assert!((16 << 20..24 << 20).contains(&free), "{free}");
    assert!(fitted["features"].to_string().contains("extent"), "{fitted}");
    std::fs::remove_file(&image).unwrap();
    let default = info(&["-T", "default", name, "64M"]);
    let news = info(&["-T", "news", name, "64M"]);
    let large = info(&["-T", "largefile", name, "64M"]);
    assert_eq!(number(&default, "block_size_bytes"), 4096);
    assert_eq!((number(&default, "inodes"), number(&news, "inodes")), (4096, 16384));
    assert!(number(&large, "inodes") < 200, "{large}");
    let own = info(&["-T", "news", "-b", "1024", "-N", "1000", name, "64M"]);
    assert_eq!(number(&own, "block_size_bytes"), 1024);
    assert!(number(&own, "inodes") < 1100);
}

#[test]
fn other_tools_command_names_are_suggested() {
    let draconis = Draconis::new();
    for (word, command) in [("fsck", "check"), ("lsdel", "undelete"), ("mke2fs", "format")] {
        let told = draconis.run([word, "image"]);
        let errors = String::from_utf8(told.stderr).unwrap();
        assert!(told.status.code() == Some(2) && errors.contains(command), "{errors}");
    }
}
