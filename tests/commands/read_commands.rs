//! Commands that read an image without mounting it.

use crate::common;

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{
    Draconis, IgnoredProperties, KernelMount, assert_same_trees, is_root, make_odd_tree, mke2fs,
    scan_tree,
};
use draconis_device::Random;

/// Properties that a copy cannot preserve, and fractions of seconds if `mke2fs` made the volume.
fn ignore_uncopied_properties() -> IgnoredProperties {
    IgnoredProperties { what_a_copy_loses: true, fractions: !is_root() }
}

fn target_arg(image: &Path, path: &str) -> String {
    format!("{}:{path}", image.display())
}

/// Creates volumes of the odd tree in each block size and of both types, and the tree. The kernel
/// fills them if possible, because `mke2fs -d` rounds times to seconds.
fn make_odd_images(draconis: &Draconis) -> Vec<std::path::PathBuf> {
    let tree = draconis.make_dir("tree");
    make_odd_tree(&tree);
    [("ext2", "1024"), ("ext2", "2048"), ("ext2", "4096"), ("ext4", "1024"), ("ext4", "4096")]
        .map(|(kind, block)| {
            let image = draconis.path(&format!("odd-{kind}-{block}.img"));
            let how = ["-t", kind, "-b", block, "-I", "256"];
            if is_root() {
                mke2fs(&image, None, &how, "64M");
                KernelMount::copy_tree_into(&image, draconis.make_dir("fill"), &tree);
            } else {
                mke2fs(&image, Some(&tree), &how, "64M");
            }
            image
        })
        .into()
}

#[test]
fn get_copies_tree_exactly() {
    let draconis = Draconis::new();
    for image in make_odd_images(&draconis) {
        let copied = draconis.path("copy");
        draconis.run_ok(["get", "-r", &target_arg(&image, "/"), copied.to_str().unwrap()]);
        std::fs::remove_dir(copied.join("lost+found")).unwrap();
        let (mut ours, mut theirs) = (
            scan_tree(&copied, ignore_uncopied_properties()),
            scan_tree(&draconis.path("tree"), ignore_uncopied_properties()),
        );
        // mke2fs sets mode and time of the root directory itself.
        ours.remove(Path::new(""));
        theirs.remove(Path::new(""));
        assert_same_trees(&ours, &theirs);
        // Holes stay holes: five gibibytes fit a few blocks.
        let sparse = std::os::unix::fs::MetadataExt::blocks(
            &std::fs::metadata(copied.join("sparse")).unwrap(),
        );
        assert!(sparse < 1000, "{sparse} blocks of 512 bytes");
        std::fs::remove_dir_all(copied).unwrap();
    }
}

#[test]
fn tar_archives_tree_exactly() {
    let draconis = Draconis::new();
    for image in make_odd_images(&draconis) {
        let copied = draconis.make_dir("copy");
        let mut archive = draconis
            .command()
            .args(["tar", image.to_str().unwrap()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut tar = Command::new("tar");
        tar.args(["-x", "--xattrs", "--xattrs-include=*", "--same-owner", "-p", "-C"]);
        let output = tar.arg(&copied).stdin(archive.stdout.take().unwrap()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(archive.wait().unwrap().success());
        std::fs::remove_dir(copied.join("lost+found")).unwrap();
        let (mut ours, mut theirs) = (
            scan_tree(&copied, ignore_uncopied_properties()),
            scan_tree(&draconis.path("tree"), ignore_uncopied_properties()),
        );
        ours.remove(Path::new(""));
        theirs.remove(Path::new(""));
        assert_same_trees(&ours, &theirs);
        std::fs::remove_dir_all(copied).unwrap();
    }
}

/// Writes an archive of `image` to a file.
fn make_archive(draconis: &Draconis, image: &Path, sparse: &str) -> std::path::PathBuf {
    let path = draconis.path(&format!("{sparse}.tar"));
    let mut command = draconis.command();
    command.args(["tar", &format!("--sparse={sparse}")]).arg(image);
    let output = command.stdout(std::fs::File::create(&path).unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

#[test]
fn holes_take_no_archive_space() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    let draconis = Draconis::new();
    let image = draconis.path("image");
    draconis.run_ok(["format", "-b", "4096", image.to_str().unwrap(), "16M"]);
    let file = draconis.path("file");
    let sparse = std::fs::File::create(&file).unwrap();
    sparse.write_all_at(b"near the end", (255 << 30) + 12345).unwrap();
    sparse.set_len(256 << 30).unwrap();
    draconis.run_ok(["put", file.to_str().unwrap(), &target_arg(&image, "/file")]);
    draconis.run_ok(["truncate", "-s", "256G", &target_arg(&image, "/hole")]);
    for sparse in ["auto", "always"] {
        let path = make_archive(&draconis, &image, sparse);
        assert!(path.metadata().unwrap().len() < 100_000);
        let list = Command::new("tar").arg("-tvf").arg(&path).output().unwrap();
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        assert_eq!(list.matches(" 274877906944 ").count(), 2, "{list}");
        let into = draconis.make_dir("into");
        let tar = Command::new("tar").arg("-xf").arg(&path).arg("-C").arg(&into).output().unwrap();
        assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
        let found = std::fs::File::open(into.join("file")).unwrap();
        let meta = found.metadata().unwrap();
        assert_eq!(
            (meta.len(), into.join("hole").metadata().unwrap().len()),
            (256 << 30, 256 << 30)
        );
        assert!(meta.blocks() < 100 && into.join("hole").metadata().unwrap().blocks() < 100);
        let mut bytes = [0; 12];
        found.read_exact_at(&mut bytes, (255 << 30) + 12345).unwrap();
        assert_eq!(&bytes, b"near the end");
        // And back again.
        let copy = draconis.path("copy");
        draconis.run_ok(["format", "--force", "-b", "4096", copy.to_str().unwrap(), "16M"]);
        draconis.run_ok(["untar", "-f", path.to_str().unwrap(), copy.to_str().unwrap()]);
        common::volume::run_e2fsck(&copy);
        for name in ["/file", "/hole"] {
            let stat = |image: &Path| {
                let printed = draconis.run_ok(["stat", "--json", &target_arg(image, name)]);
                let stat: serde_json::Value = serde_json::from_str(&printed).unwrap();
                (stat[0]["size"].clone(), stat[0]["blocks_512"].clone(), stat[0]["runs"].clone())
            };
            assert_eq!(stat(&image), stat(&copy));
        }
        std::fs::remove_dir_all(into).unwrap();
    }
}

#[test]
fn archives_preserve_sparse_files() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("shapes");
    let mut random = Random::new(14);
    for nth in 0..60 {
        let file = std::fs::File::create(tree.join(format!("{nth:02}"))).unwrap();
        let blocks = 1 + random.next_below(700);
        let density = random.next_below(5);
        for block in 0..blocks {
            if random.next_below(4) < density {
                let bytes =
                    vec![random.next_below(255) as u8 + 1; 1 + random.next_below(4096) as usize];
                std::os::unix::fs::FileExt::write_all_at(&file, &bytes, block << 12).unwrap();
            }
        }
        file.set_len((blocks << 12) - random.next_below(4096)).unwrap();
    }
    let below = |top: &Path| {
        let mut seen = scan_tree(top, ignore_uncopied_properties());
        seen.remove(Path::new(""));
        seen
    };
    let expected = below(&tree);
    for block in ["1024", "4096"] {
        let image = draconis.path("image");
        let from = tree.to_str().unwrap();
        let to = image.to_str().unwrap();
        draconis.run_ok(["format", "--force", "-b", block, "--from", from, to, "128M"]);
        let mut lens = vec![];
        for sparse in ["always", "auto", "never"] {
            let path = make_archive(&draconis, &image, sparse);
            lens.push(path.metadata().unwrap().len());
            let by_tar = draconis.make_dir("by tar");
            let mut tar = Command::new("tar");
            tar.args(["-x", "--exclude=lost+found", "-pf"]).arg(&path).arg("-C").arg(&by_tar);
            assert!(tar.status().unwrap().success());
            assert_same_trees(&below(&by_tar), &expected);
            std::fs::remove_dir_all(by_tar).unwrap();
            let (unpacked, by_us) = (draconis.path("unpacked"), draconis.path("by us"));
            draconis.run_ok(["format", "--force", "-b", block, unpacked.to_str().unwrap(), "256M"]);
            draconis.run_ok(["untar", "-f", path.to_str().unwrap(), unpacked.to_str().unwrap()]);
            common::volume::run_e2fsck(&unpacked);
            draconis.run_ok(["get", "-r", &target_arg(&unpacked, "/"), by_us.to_str().unwrap()]);
            std::fs::remove_dir(by_us.join("lost+found")).unwrap();
            assert_same_trees(&below(&by_us), &expected);
            std::fs::remove_dir_all(by_us).unwrap();
        }
        // In automatic mode, small holes are written as zeros and large ones as a sparse entry.
        assert!(lens[0] < lens[1] && lens[1] < lens[2], "{lens:?}");
    }
}

#[test]
fn get_and_tar_select_one_file_or_directory() {
    let draconis = Draconis::new();
    let image = &make_odd_images(&draconis)[0];
    let tree = draconis.path("tree");
    let cat = draconis.run(["cat", &target_arg(image, "/big"), &target_arg(image, "/fast link")]);
    let expected = [std::fs::read(tree.join("big")).unwrap(), b"1".to_vec()].concat();
    assert!(cat.status.success() && cat.stdout == expected);

    let into = draconis.make_dir("into");
    draconis.run_ok(["get", &target_arg(image, "/fast link"), into.to_str().unwrap()]);
    assert_eq!(std::fs::read(into.join("fast link")).unwrap(), b"1");
    let named = into.join("named");
    draconis.run_ok(["get", &target_arg(image, "/big"), named.to_str().unwrap()]);
    assert!(std::fs::read(named).unwrap() == std::fs::read(tree.join("big")).unwrap());
    draconis.run_ok(["get", "-r", &target_arg(image, "/deep/er"), into.to_str().unwrap()]);
    assert_eq!(std::fs::read(into.join("er/file 123")).unwrap(), b"123");

    let errors = draconis.run_failing(["get", &target_arg(image, "/deep"), into.to_str().unwrap()]);
    assert!(errors.contains("-r"), "{errors}");
    let errors = draconis.run_failing(["cat", &target_arg(image, "/deep")]);
    assert!(errors.contains("is a directory"), "{errors}");
    let errors = draconis.run_failing(["cat", &target_arg(image, "/deep/none")]);
    assert!(errors.contains("/deep/none: no such file or directory"), "{errors}");
}

#[test]
fn ls_shows_all_entries() {
    let draconis = Draconis::new();
    let image = &make_odd_images(&draconis)[2];
    let names = draconis.run_ok(["ls", &target_arg(image, "/deep/er")]);
    assert_eq!(names.lines().count(), 301);
    assert!(names.starts_with("file 000\nfile 001\n") && names.ends_with("still\n"));
    let long = draconis.run_ok(["ls", "-l", image.to_str().unwrap()]);
    let line = |name: &str| long.lines().find(|line| line.ends_with(name)).unwrap().to_string();
    assert!(line(" suid").starts_with("-rwsr-xr-x   1 "), "{long}");
    assert!(line(" fast link -> one").starts_with("lrwxrwxrwx   1 "), "{long}");
    assert!(line(" hard link").starts_with("-rw-r--r--   3 "), "{long}");
    let all = draconis.run_ok(["ls", "-R", image.to_str().unwrap()]);
    assert!(all.contains("\n/deep/er/still:\nfile\n"), "{all}");
    let tree = draconis.run_ok(["tree", &target_arg(image, "/deep")]);
    assert!(tree.contains("└── er\n    ├── file 000\n"), "{tree}");
    assert!(tree.ends_with("2 directories, 302 files\n"), "{tree}");

    let stat = draconis.run_ok(["stat", &target_arg(image, "/sparse")]);
    assert!(stat.contains("Size: 5368709120"), "{stat}");
    let stat: serde_json::Value =
        serde_json::from_str(&draconis.run_ok(["stat", "--json", &target_arg(image, "/one")]))
            .unwrap();
    assert_eq!((&stat[0]["links"], &stat[0]["size"]), (&3.into(), &1.into()));
    let mut xattrs: Vec<_> = stat[0]["xattrs"].as_array().unwrap().iter().collect();
    xattrs.sort_by_key(|name| name.to_string());
    assert_eq!(xattrs, ["user.short", "user.with/slash"]);
}

#[test]
fn several_paths_are_listed_like_ls() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    for dir in ["a/deep", "b", "none"] {
        std::fs::create_dir_all(tree.join(dir)).unwrap();
    }
    for file in ["one", "a/two", "a/.hidden", "b/three"] {
        std::fs::write(tree.join(file), file).unwrap();
    }
    std::os::unix::fs::symlink("a", tree.join("link")).unwrap();
    let image = draconis.path("image");
    draconis.run_ok(["format", "--from", tree.to_str().unwrap(), image.to_str().unwrap()]);
    // The output of ls for the same tree, with its paths replaced.
    let theirs = |arguments: &[&str]| {
        let mut ls = Command::new("ls");
        ls.env("LC_ALL", "C").current_dir(&tree).args(arguments);
        String::from_utf8(ls.output().unwrap().stdout).unwrap()
    };
    let ours = |arguments: &[&str]| {
        let at = |text: &&str| match text.starts_with('-') {
            true => (*text).to_string(),
            false => target_arg(&image, &format!("/{text}")),
        };
        let errors =
            draconis.run_ok([vec!["ls".into()], arguments.iter().map(at).collect()].concat());
        errors.replace("\n/", "\n").trim_start_matches('/').to_string()
    };
    for arguments in [
        &["a", "one", "b"][..],
        &["a"],
        &["one", "a/two"],
        &["-a", "a", "b"],
        &["-d", "a", "b", "one", "link"],
        &["-d", "link"],
        &["-R", "a", "b"],
        &["none", "a"],
    ] {
        let theirs: String = theirs(arguments)
            .lines()
            .filter(|line| !matches!(*line, "." | ".."))
            .map(|line| format!("{line}\n"))
            .collect();
        // Arguments are listed in the given order, not sorted.
        let sorted = |text: &str| {
            let mut parts: Vec<String> =
                text.split("\n\n").map(|part| part.trim_end().into()).collect();
            parts.sort();
            parts
        };
        let ours = ours(arguments);
        match arguments {
            ["-d", ..] | ["one", ..] => {
                let lines = |text: &str| {
                    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
                    lines.sort();
                    lines
                };
                assert_eq!(lines(&ours), lines(&theirs), "{arguments:?}");
            }
            _ => assert_eq!(sorted(&ours), sorted(&theirs), "{arguments:?}"),
        }
    }
    let output = draconis.run(["ls", &target_arg(&image, "/nothing"), &target_arg(&image, "/b")]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "/b:\nthree\n");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.ends_with("/nothing: no such file or directory\n"), "{errors}");
    let errors = draconis.run_failing(["ls", &target_arg(&image, "/"), "other.img:/"]);
    assert!(errors.contains("only one image at a time"), "{errors}");
}

#[test]
fn json_listing_matches_text_listing() {
    let draconis = Draconis::new();
    let image = &make_odd_images(&draconis)[1];
    let list = |arguments: &[&str]| -> Vec<serde_json::Value> {
        serde_json::from_str(&draconis.run_ok([&["ls", "--json"], arguments].concat())).unwrap()
    };
    let whole = image.to_str().unwrap();
    let all = list(&["-aR", whole]);
    let printed = draconis.run_ok(["ls", "-alR", whole]);
    let lines = printed.lines().filter(|line| line.get(10..11) == Some(" ") && line.len() > 40);
    // The name with a newline takes a second line.
    assert_eq!(lines.count(), all.len(), "{printed}");
    let of = |path: &str| all.iter().find(|one| one["path"] == path).unwrap();
    for object in &all {
        let path = object["path"].as_str().unwrap();
        if object.get("path_hex").is_some() {
            continue;
        }
        let stat = draconis.run_ok(["stat", "--json", &target_arg(image, path)]);
        let stat: serde_json::Value = serde_json::from_str(&stat).unwrap();
        let same = ["inode", "kind", "mode", "links", "uid", "gid", "size", "device", "modified"];
        if path.contains("/deep/er/file") && !path.ends_with('7') {
            continue;
        }
        for member in same {
            assert_eq!(object[member], stat[0][member], "{path} {member}");
        }
        assert_eq!(object["link_target"], stat[0]["link_target"]);
        assert!(path.ends_with(object["name"].as_str().unwrap()));
    }
    assert_eq!(of("/fast link")["link_target"], "one");
    // A name that is not UTF-8 is available in hexadecimal.
    let odd = all.iter().find(|one| one.get("name_hex").is_some()).unwrap();
    assert_eq!(odd["name"], "odd \u{1}\u{1b}[31m\\xff\\xfe\\ \"name\"\n");
    let hex = odd["name_hex"].as_str().unwrap();
    let bytes: Vec<u8> = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect();
    assert_eq!(bytes, b"odd \x01\x1b[31m\xff\xfe\\ \"name\"\n");
    let (link, one) = (target_arg(image, "/fast link"), target_arg(image, "/one"));
    assert_eq!(list(&["-d", &link])[0]["kind"], "symbolic link");
    assert_eq!(list(&[&link, &one])[0]["kind"], "regular file");
    assert_eq!(list(&["-d", whole])[0]["name"], "/");
    draconis.run_ok(["format", draconis.path("empty").to_str().unwrap(), "1M"]);
    let empty = target_arg(&draconis.path("empty"), "/lost+found");
    assert!(list(&[&empty]).is_empty());
}

#[test]
fn get_writes_file_to_stdout() {
    let draconis = Draconis::new();
    let image = &make_odd_images(&draconis)[0];
    let expected = std::fs::read(draconis.path("tree").join("big")).unwrap();
    let output = draconis.run(["get", &target_arg(image, "/big"), "-"]);
    assert!(output.status.success() && output.stdout == expected);
    let errors = draconis.run_failing(["get", "-r", &target_arg(image, "/deep"), "-"]);
    assert!(errors.contains("draconis tar"), "{errors}");
    let errors = draconis.run_failing(["get", &target_arg(image, "/deep"), "-"]);
    assert!(errors.contains("is a directory"), "{errors}");
    // A file named `-` is given as a path.
    let dir = draconis.make_dir("in here");
    let mut command = draconis.command();
    command.args(["get", &target_arg(image, "/one"), "./-"]).current_dir(&dir);
    assert!(command.status().unwrap().success());
    assert_eq!(std::fs::read(dir.join("-")).unwrap(), b"1");
}

#[test]
fn info_agrees_with_dumpe2fs() {
    let draconis = Draconis::new();
    let image = draconis.path("labelled.img");
    mke2fs(&image, None, &["-t", "ext2", "-b", "1024", "-L", "a label", "-m", "3"], "9M");
    let info: serde_json::Value =
        serde_json::from_str(&draconis.run_ok(["info", "--json", image.to_str().unwrap()]))
            .unwrap();
    let theirs = draconis_testkit::judge::dumpe2fs(&["-h"], &image);
    let field = |name: &str| {
        let line = theirs.lines().find(|line| line.starts_with(name)).unwrap();
        line[name.len()..].trim().to_string()
    };
    for (ours, name) in [
        ("label", "Filesystem volume name:"),
        ("uuid", "Filesystem UUID:"),
        ("blocks", "Block count:"),
        ("free_blocks", "Free blocks:"),
        ("reserved_blocks", "Reserved block count:"),
        ("inodes", "Inode count:"),
        ("free_inodes", "Free inodes:"),
        ("block_size_bytes", "Block size:"),
        ("inode_size_bytes", "Inode size:"),
        ("blocks_per_group", "Blocks per group:"),
        ("inodes_per_group", "Inodes per group:"),
        ("state", "Filesystem state:"),
    ] {
        let value = &info[ours];
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_string);
        assert_eq!(value, field(name), "{name}");
    }
    let mut features: Vec<&str> =
        info["features"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let theirs = field("Filesystem features:");
    let mut theirs: Vec<&str> = theirs.split(' ').filter(|name| !name.is_empty()).collect();
    features.sort();
    theirs.sort();
    assert_eq!(features, theirs);
    assert!(draconis.run_ok(["info", image.to_str().unwrap()]).contains("label        a label\n"));
}

#[test]
fn partitions_and_offsets_are_found() {
    let draconis = Draconis::new();
    let inner = draconis.path("inner.img");
    let tree = draconis.make_dir("small");
    std::fs::write(tree.join("hello"), "from inside\n").unwrap();
    mke2fs(&inner, Some(&tree), &["-t", "ext2"], "1M");
    let volume = std::fs::read(&inner).unwrap();
    let mut disk = vec![0; 3 << 20];
    disk[1 << 20..2 << 20].copy_from_slice(&volume);
    // One primary partition of type 0x83 from sector 2048, 2048 sectors long.
    let entry = [0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
    disk[446..462].copy_from_slice(&entry);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let image = draconis.path("disk.img");
    std::fs::write(&image, disk).unwrap();
    for place in [["--partition", "1"], ["--offset", "1M"]] {
        let text =
            draconis.run_ok([&["cat"], &place[..], &[&target_arg(&image, "/hello")]].concat());
        assert_eq!(text, "from inside\n");
    }
    let errors = draconis.run_failing(["ls", "--partition", "2", image.to_str().unwrap()]);
    assert!(errors.contains("no partition 2; the table has: 1"), "{errors}");
    // The only partition with a volume need not be named.
    assert!(draconis.run_ok(["ls", image.to_str().unwrap()]).contains("hello"));
    let errors = draconis.run_failing(["ls", "--offset", "4M", image.to_str().unwrap()]);
    assert!(errors.contains("reaches beyond"), "{errors}");
}

#[test]
fn unreadable_images_are_refused_by_name() {
    let draconis = Draconis::new();
    let image = draconis.path("journal.img");
    mke2fs(&image, None, &["-O", "journal_dev"], "16M");
    let errors = draconis.run_failing(["ls", image.to_str().unwrap()]);
    assert!(errors.contains("needs: journal_dev"), "{errors}");
    let errors = draconis.run_failing(["ls", "/no/such/image"]);
    assert!(errors.contains("/no/such/image: No such file"), "{errors}");
    let errors = draconis.run_failing(["ls", "/dev/null"]);
    assert!(errors.contains("neither a file nor a block device"), "{errors}");
}

/// A volume whose dirents were changed to lead out of the destination.
#[test]
fn get_of_hostile_volume_stays_inside_destination() {
    let draconis = Draconis::new();
    let tree = draconis.make_dir("bad");
    let outside = draconis.make_dir("outside");
    std::os::unix::fs::symlink(&outside, tree.join("dir")).unwrap();
    std::fs::create_dir(tree.join("dix")).unwrap();
    std::fs::write(tree.join("dix/file"), "escaped").unwrap();
    std::fs::write(tree.join("xx"), "up").unwrap();
    let image = draconis.path("bad.img");
    mke2fs(&image, Some(&tree), &["-t", "ext2", "-b", "1024", "-O", "^dir_index"], "1M");
    // In the root directory's block, `dix` becomes a second `dir`, and `xx` becomes `..`.
    let mut bytes = std::fs::read(&image).unwrap();
    let mut changed = 0;
    for at in 0..bytes.len() - 8 {
        if &bytes[at..at + 5] == b"\x03\x02dix" {
            bytes[at + 2..at + 5].copy_from_slice(b"dir");
            changed += 1;
        } else if &bytes[at..at + 4] == b"\x02\x01xx" {
            bytes[at + 2..at + 4].copy_from_slice(b"..");
            changed += 1;
        }
    }
    assert_eq!(changed, 2);
    std::fs::write(&image, bytes).unwrap();
    let into = draconis.make_dir("into");
    let output = draconis.run(["get", "-r", &target_arg(&image, "/"), into.to_str().unwrap()]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "{errors}");
    assert!(!draconis.path("file").exists() && into.is_dir());
}

#[test]
fn tools_report_mounted_volume() {
    let draconis = Draconis::new();
    let image = draconis.path("held.img");
    mke2fs(&image, None, &["-t", "ext2"], "1M");
    let held = std::fs::File::open(&image).unwrap();
    held.lock().unwrap();
    let errors = draconis.run_failing(["ls", image.to_str().unwrap()]);
    assert!(errors.contains("is mounted or being changed"), "{errors}");
    held.unlock().unwrap();
    draconis.run_ok(["ls", image.to_str().unwrap()]);
}

#[test]
fn help_texts_are_complete() {
    let draconis = Draconis::new();
    let pages = draconis.make_dir("man");
    draconis.run_ok(["manpages", pages.to_str().unwrap()]);
    for page in ["draconis.1", "draconis-mount.1", "draconis-get.1"] {
        assert!(std::fs::read_to_string(pages.join(page)).unwrap().contains("SYNOPSIS"));
    }
    assert!(draconis.run_ok(["completions", "bash"]).contains("umount"));
    let usage = draconis.run(["mount"]);
    assert_eq!(usage.status.code(), Some(2));
}
