//! Commands that change an image without mounting it, each checked by `e2fsck`.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use common::{
    Draconis, FileProperties, IgnoredProperties, Kernel, is_root, odd_tree, same, scan_tree,
};
use serde_json::Value;

/// A new empty volume, and the commands that change it.
struct Image {
    draconis: Draconis,
    path: PathBuf,
}

impl Image {
    fn new(arguments: &[&str], size: &str) -> Self {
        let draconis = Draconis::new();
        let path = draconis.path("image");
        let image = Self { draconis, path };
        image.format(&image.path, arguments, size);
        image
    }

    fn format(&self, path: &Path, arguments: &[&str], size: &str) {
        let mut command = vec!["format"];
        if !arguments.contains(&"-t") {
            command.extend(["-t", "ext2"]);
        }
        command.extend(arguments);
        command.extend([path.to_str().unwrap(), size]);
        self.draconis.ok(command);
    }

    fn at(&self, path: &str) -> String {
        format!("{}:{path}", self.path.display())
    }

    /// Returns the arguments of a command; those with the prefix `:/` become paths in the image.
    fn arguments(&self, line: &[&str]) -> Vec<String> {
        let one = |text: &&str| match text.strip_prefix(":/") {
            Some(path) => self.at(&format!("/{path}")),
            None => (*text).to_string(),
        };
        line.iter().map(one).collect()
    }

    fn ok(&self, line: &[&str]) {
        self.draconis.ok(self.arguments(line));
        check(&self.path);
    }

    /// Runs a command that must be refused without changing files.
    fn refuses(&self, line: &[&str], why: &str) {
        let before = self.tree();
        let said = self.draconis.fails(self.arguments(line));
        assert!(said.contains(why), "{said}");
        check(&self.path);
        assert_eq!(self.tree(), before);
    }

    fn stat(&self, path: &str) -> Value {
        let said = self.draconis.ok(["stat", "--json", &self.at(path)]);
        serde_json::from_str::<Value>(&said).unwrap()[0].clone()
    }

    fn text(&self, path: &str) -> String {
        self.draconis.ok(["cat", &self.at(path)])
    }

    fn names(&self, path: &str) -> Vec<String> {
        let said = self.draconis.ok(["ls", "-a", &self.at(path)]);
        said.lines().map(str::to_string).filter(|name| !matches!(&name[..], "." | "..")).collect()
    }

    /// Returns all names, as of `ls -alR`.
    fn tree(&self) -> String {
        self.draconis.ok(["ls", "-alR", self.path.to_str().unwrap()])
    }

    /// Returns the output of `debugfs`.
    fn debugfs(&self, request: &str) -> String {
        let output =
            Command::new("debugfs").args(["-R", request]).arg(&self.path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Creates a host file.
    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.draconis.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Describes a tree as the kernel shows it; without root, as `get` restores it.
    fn seen(&self, below: &str) -> BTreeMap<PathBuf, FileProperties> {
        let at = self.draconis.make_dir("kernel");
        let mut seen = match Kernel::mount(&self.path, at, "change") {
            Some(kernel) => scan_tree(&kernel.at.join(below), contents()),
            None => {
                let into = tempfile::tempdir().unwrap();
                let from = self.at(&format!("/{below}"));
                self.draconis.ok(["get", "-r", &from, into.path().to_str().unwrap()]);
                scan_tree(&into.path().join(below), contents())
            }
        };
        seen.remove(Path::new("lost+found"));
        seen.remove(Path::new(""));
        seen
    }
}

/// Comparison without access times, inode numbers and block counts.
fn contents() -> IgnoredProperties {
    IgnoredProperties { what_a_copy_loses: true, fractions: !is_root() }
}

fn check(image: &Path) {
    let output = Command::new("e2fsck").arg("-fn").arg(image).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The odd tree with a smaller sparse file, which is faster to compare than 5 GiB.
fn small_odd_tree(top: &Path) {
    odd_tree(top);
    let sparse = std::fs::File::options().write(true).open(top.join("sparse")).unwrap();
    sparse.set_len(70 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"near the end", 69 << 20).unwrap();
}

fn tree_at(top: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = scan_tree(top, contents());
    seen.remove(Path::new(""));
    seen
}

const SHAPES: [&[&str]; 4] = [
    &["-b", "1024"],
    &["-b", "2048", "-O", "^dir_index"],
    &["-b", "4096"],
    &["-b", "1024", "-I", "128"],
];

#[test]
fn a_tree_is_put_as_it_is_and_again_over_itself() {
    for shape in &SHAPES[..3] {
        let image = Image::new(shape, "64M");
        let tree = image.draconis.make_dir("tree");
        small_odd_tree(&tree);
        let source = tree.to_str().unwrap();
        image.ok(&["put", "-r", source, ":/"]);
        same(&image.seen("tree"), &tree_at(&tree));
        // Holes stay holes: a file of 70 MiB fits a volume of 64.
        image.ok(&["put", "-r", source, ":/copy"]);
        same(&image.seen("copy"), &tree_at(&tree));
        image.ok(&["put", "-rT", source, ":/copy"]);
        image.ok(&["put", "-r", &format!("{source}/."), ":/copy"]);
        same(&image.seen("copy"), &tree_at(&tree));
    }
}

#[test]
fn single_files_go_where_cp_would_put_them() {
    let image = Image::new(&[], "8M");
    let one = image.file("one", b"first");
    let two = image.file("two", b"second");
    let (one, two) = (one.to_str().unwrap(), two.to_str().unwrap());
    image.ok(&["put", one, ":/"]);
    image.ok(&["put", one, ":/named"]);
    image.ok(&["mkdir", ":/dir"]);
    image.ok(&["put", one, two, ":/dir/"]);
    image.ok(&["put", two, ":/named"]);
    image.ok(&["put", "--owner", "7:8", two, ":/owned"]);
    assert_eq!(image.names("/dir"), ["one", "two"]);
    assert_eq!((image.text("/one"), image.text("/named")), ("first".into(), "second".into()));
    let owned = image.stat("/owned");
    assert_eq!((&owned["uid"], &owned["gid"]), (&7.into(), &8.into()));
    // A symbolic link on the command line is followed, except with -r.
    std::os::unix::fs::symlink("two", image.draconis.path("link")).unwrap();
    let link = image.draconis.path("link");
    image.ok(&["put", link.to_str().unwrap(), ":/followed"]);
    image.ok(&["put", "-r", link.to_str().unwrap(), ":/kept"]);
    assert_eq!(image.text("/followed"), "second");
    assert_eq!(image.stat("/kept")["link_target"], "two");

    image.refuses(&["put", one, two, ":/none"], "no such directory");
    image.refuses(&["put", one, ":/none/"], "no such directory");
    image.refuses(&["put", one, ":/none/deep"], "no such file or directory");
    image.refuses(&["put", one, one, ":/dir"], "another source has that name");
    let dir = image.draconis.make_dir("host");
    image.refuses(&["put", dir.to_str().unwrap(), ":/"], "-r copies it");
    image.refuses(&["put", "-r", dir.to_str().unwrap(), ":/one"], "no directory");
    image.refuses(&["put", "/nowhere/at/all", ":/x"], "No such file");
    let huge = image.file("huge", &vec![1; 9 << 20]);
    image.refuses(&["put", huge.to_str().unwrap(), ":/"], "larger volume");
}

#[test]
fn standard_input_is_put_whole_or_not_at_all() {
    use std::io::Write;
    let image = Image::new(&["-b", "1024"], "8M");
    let put = |arguments: &[&str], bytes: &[u8]| {
        let mut command = image.draconis.command();
        command.arg("put").args(image.arguments(arguments));
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A command that refuses does not read its input.
        let _ = child.stdin.take().unwrap().write_all(bytes);
        let output = child.wait_with_output().unwrap();
        check(&image.path);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let bytes: Vec<u8> = (0..3_000_000u32).map(|nth| (nth / 7) as u8).collect();
    assert_eq!(put(&["-", ":/big"], &bytes), (Some(0), String::new()));
    let output = image.draconis.run(["cat", &image.at("/big")]);
    assert!(output.stdout == bytes);
    assert_eq!(put(&["--owner", "7:8", "-", ":/big"], b"short"), (Some(0), String::new()));
    assert_eq!(image.text("/big"), "short");
    assert_eq!(image.stat("/big")["uid"], 7);
    assert_eq!(put(&["-", ":/empty"], b""), (Some(0), String::new()));
    assert_eq!(image.stat("/empty")["size"], 0);
    image.ok(&["mkdir", ":/dir"]);

    let before = (image.tree(), image.debugfs("stats"));
    let full = vec![1; 9 << 20];
    for (arguments, bytes, why) in [
        (&["-", ":/big"][..], &full[..], "no space left on device"),
        (&["-", ":/dir"], b"x", "needs a name"),
        (&["-", ":/dir/"], b"x", "needs a name"),
        (&["-", ":/none/x"], b"x", "no such file or directory"),
        (&["-", ":/big/"], b"x", "directory"),
        (&["-", "-", ":/x"], b"x", "alone"),
        (&["-r", "-", ":/x"], b"x", "draconis untar"),
    ] {
        let (status, said) = put(arguments, bytes);
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains(why), "{said}");
        assert_eq!(image.tree(), before.0);
    }
    let free = |text: &str| {
        let lines = text.lines().filter(|line| line.starts_with("Free "));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    assert_eq!(free(&image.debugfs("stats")), free(&before.1));
}

#[test]
fn archives_are_unpacked_as_they_are() {
    for shape in &SHAPES[..3] {
        let image = Image::new(shape, "64M");
        let tree = image.draconis.make_dir("tree");
        small_odd_tree(&tree);
        let archive = image.draconis.path("archive");
        let mut tar = Command::new("tar");
        tar.args(["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "-z", "-C"]);
        assert!(tar.arg(&tree).arg("-cf").arg(&archive).arg(".").status().unwrap().success());
        image.ok(&["mkdir", "-p", ":/a/b"]);
        image.ok(&["untar", "-f", archive.to_str().unwrap(), ":/a/b"]);
        same(&image.seen("a/b"), &tree_at(&tree));
        // From standard input, over an existing file.
        let output = image
            .draconis
            .command()
            .args(["untar", &image.at("/a/b")])
            .stdin(std::fs::File::open(&archive).unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        check(&image.path);
        same(&image.seen("a/b"), &tree_at(&tree));
    }
}

#[test]
fn directories_that_an_archive_only_passes_keep_what_they_are() {
    let image = Image::new(&[], "8M");
    let tree = image.draconis.make_dir("tree/private/new");
    std::fs::write(tree.join("file"), b"x").unwrap();
    let archive = image.draconis.path("archive");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(image.draconis.path("tree")).arg("-cf").arg(&archive);
    assert!(tar.arg("private/new/file").status().unwrap().success());
    image.ok(&["mkdir", "-m", "700", "--owner", "5:6", ":/private"]);
    image.ok(&["untar", "-f", archive.to_str().unwrap(), ":/"]);
    let private = image.stat("/private");
    assert_eq!((&private["uid"], &private["gid"]), (&5.into(), &6.into()));
    assert!(private["mode"].as_str().unwrap().ends_with("700"), "{private}");
    assert_eq!(image.text("/private/new/file"), "x");
    image.refuses(&["untar", "-f", archive.to_str().unwrap(), ":/none"], "mkdir -p");
    let wrong = image.file("wrong", &[7; 2000]);
    image.refuses(&["untar", "-f", wrong.to_str().unwrap(), ":/"], "not a tar archive");
}

#[test]
fn names_are_made_moved_linked_and_removed() {
    for shape in SHAPES {
        let image = Image::new(shape, "8M");
        image.ok(&["mkdir", "-p", ":/a/b/c", ":/a/b/d"]);
        image.ok(&["mkdir", "-p", ":/a/b/c"]);
        image.ok(&["touch", ":/a/file", ":/a/other"]);
        image.ok(&["mv", ":/a/file", ":/a/b/c"]);
        image.ok(&["mv", ":/a/b/c", ":/moved"]);
        assert_eq!(
            (image.names("/moved"), image.names("/a/b")),
            (vec!["file".to_string()], vec!["d".to_string()])
        );
        // `..` of the moved directory, and the link counts of its parents.
        assert!(
            image.debugfs("ls /moved").contains("2  (12) .."),
            "{}",
            image.debugfs("ls /moved")
        );
        assert_eq!(
            (&image.stat("/a/b")["links"], &image.stat("/")["links"]),
            (&3.into(), &5.into())
        );
        image.ok(&["mv", "-n", ":/moved/file", ":/a/other"]);
        assert_eq!(image.names("/moved"), ["file"]);
        image.ok(&["mv", ":/moved/file", ":/a/other"]);
        assert_eq!(
            (image.names("/moved").len(), image.names("/a")),
            (0, vec!["b".into(), "other".into()])
        );
        image.ok(&["mv", "--exchange", ":/moved", ":/a/other"]);
        assert_eq!(image.stat("/moved")["kind"], "regular file");
        image.ok(&["mv", "--exchange", ":/moved", ":/a/other"]);

        image.ok(&["ln", ":/a/other", ":/hard"]);
        assert_eq!(image.stat("/hard")["inode"], image.stat("/a/other")["inode"]);
        assert_eq!(image.stat("/hard")["links"], 2);
        image.ok(&["ln", "-s", "a/other", ":/fast"]);
        let long = format!("../{}", "x".repeat(100));
        image.ok(&["ln", "-s", &long, ":/slow"]);
        image.ok(&["ln", "-sf", "a/b", ":/fast"]);
        image.ok(&["ln", "-f", ":/a/other", ":/hard"]);
        assert_eq!(image.stat("/slow")["link_target"], long);
        assert_eq!(image.stat("/fast")["link_target"], "a/b");

        image.refuses(&["mkdir", ":/a"], "file exists");
        image.refuses(&["mkdir", ":/none/x"], "no such file or directory");
        image.refuses(&["mkdir", "-p", ":/hard/x"], "no directory");
        image.refuses(&["mkdir", &format!(":/{}", "n".repeat(256))], "too long");
        image.refuses(&["mv", ":/a", ":/a/b"], "into itself");
        image.refuses(&["mv", ":/none", ":/a"], "no such file");
        image.refuses(&["mv", ":/a", ":/moved", ":/nowhere"], "no such directory");
        image.refuses(&["mv", ":/a", "other.img:/x"], "draconis cp -a");
        image.refuses(&["ln", ":/a", ":/dir link"], "");
        image.refuses(&["ln", "-s", "x", ":/hard"], "file exists");
        image.refuses(&["rm", ":/a"], "-r removes it");
        image.refuses(&["rm", ":/none"], "no such file");
        image.refuses(&["rm", "-r", ":/"], "root directory");
        image.refuses(&["rm", "-r", ":/a/."], "a name is needed");

        image.ok(&["rm", "-f", ":/none", ":/hard/below"]);
        image.ok(&["rm", ":/hard"]);
        assert_eq!(image.stat("/a/other")["links"], 1);
        image.ok(&["rm", "-r", ":/a", ":/moved", ":/fast", ":/slow"]);
        assert_eq!(image.names("/"), ["lost+found"]);
        assert_eq!(image.stat("/")["links"], 3);
    }
}

#[test]
fn everything_that_is_removed_is_free_again() {
    let image = Image::new(&["-b", "1024"], "64M");
    let free = || {
        let said = Command::new("dumpe2fs").arg("-h").arg(&image.path).output().unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let lines = said.lines().filter(|line| line.starts_with("Free "));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    let before = free();
    let tree = image.draconis.make_dir("tree");
    small_odd_tree(&tree);
    for nth in 0..2000 {
        std::fs::write(tree.join(format!("a name of some length, {nth:04}")), b"x").unwrap();
    }
    image.ok(&["put", "-r", tree.to_str().unwrap(), ":/"]);
    assert_ne!(free(), before);
    same(&image.seen("tree"), &tree_at(&tree));
    image.ok(&["rm", "-r", ":/tree"]);
    assert_eq!(free(), before);
}

#[test]
fn attributes_change_as_asked() {
    for shape in SHAPES {
        let image = Image::new(shape, "8M");
        image.ok(&["mkdir", "-p", ":/d/e"]);
        image.ok(&["touch", ":/d/e/f"]);
        image.ok(&["ln", "-s", "e", ":/d/link"]);
        image.ok(&["chmod", "640", ":/d/e/f"]);
        image.ok(&["chmod", "-R", "g+rwX,o-rx", ":/d"]);
        let mode = |path: &str| image.stat(path)["mode"].as_str().unwrap().to_string();
        assert!(mode("/d/e/f").ends_with("660") && mode("/d/e").ends_with("770"));
        assert!(mode("/d/link").ends_with("777"));
        image.ok(&["chmod", "-x", ":/d/e"]);
        image.ok(&["chmod", "u=rwxs", ":/d/e/f"]);
        assert!(mode("/d/e/f").ends_with("4760"), "{}", mode("/d/e/f"));
        // Changing the owner clears setuid and setgid.
        image.ok(&["chown", "70000:123456", ":/d/e/f"]);
        assert!(mode("/d/e/f").ends_with("0760") || mode("/d/e/f").ends_with("100760"));
        image.ok(&["chown", "-R", ":9", ":/d"]);
        image.ok(&["chown", "-h", "3", ":/d/link"]);
        let owner = |path: &str| {
            let stat = image.stat(path);
            (stat["uid"].as_u64().unwrap(), stat["gid"].as_u64().unwrap())
        };
        assert_eq!((owner("/d/e/f"), owner("/d/link").0), ((70_000, 9), 3));
        assert_eq!(owner("/d/link").1, 9);
        image.ok(&["touch", "-d", "@1000000000.5", ":/d/e/f"]);
        image.ok(&["touch", "-m", "-d", "@1100000000", ":/d/e/f"]);
        let stat = image.stat("/d/e/f");
        let fraction = if shape.contains(&"128") { 0 } else { 500_000_000 };
        assert_eq!(stat["accessed"], serde_json::json!([1_000_000_000, fraction]));
        assert_eq!(stat["modified"], serde_json::json!([1_100_000_000, 0]));
        image.ok(&["touch", "-c", ":/not made"]);
        image.ok(&["truncate", "-c", "-s", "5", ":/not made"]);
        assert_eq!(image.names("/"), ["d", "lost+found"]);

        let one = image.file("one", &[b'x'; 5000]);
        image.ok(&["put", one.to_str().unwrap(), ":/one"]);
        image.ok(&["truncate", "-s", "-3000", ":/one"]);
        image.ok(&["truncate", "-s", "+2K", ":/one"]);
        let expected = [vec![b'x'; 2000], vec![0; 2048]].concat();
        assert_eq!(image.text("/one").into_bytes(), expected, "what was cut off reads as zeros");
        image.ok(&["truncate", "-s", "1G", ":/hole"]);
        assert_eq!(
            (&image.stat("/hole")["size"], &image.stat("/hole")["blocks_512"]),
            (&(1u64 << 30).into(), &0.into())
        );
        image.refuses(&["truncate", "-s", "9999T", ":/one"], "too large");
        image.refuses(&["truncate", "-s", "5", ":/d"], "only files");
        image.refuses(&["chmod", "644", ":/none"], "no such file");
    }
}

/// As for open(2) with O_CREAT: the kernel's result equals that of the host's tools.
#[test]
fn files_are_made_where_symbolic_links_lead_to() {
    let image = Image::new(&["-t", "ext4"], "8M");
    let here = image.draconis.make_dir("here");
    common::volume::shell(
        "mkdir -p d/e; ln -s made one; ln -s b two; ln -s d/../d/e/c b; ln -s ../n d/e/size
        ln -s gone/x astray; ln -s round round; ln -s d/e there",
        &here,
    );
    image.ok(&["put", "-r", &format!("{}/.", here.display()), ":/"]);
    image.ok(&["touch", "-d", "@1000000000", ":/one", ":/two", ":/there/new"]);
    image.ok(&["truncate", "-s", "5000", ":/d/e/size"]);
    image.ok(&["truncate", "-c", "-s", "5000", ":/astray"]);
    image.ok(&["touch", "-d", "@1000000000", ":/d/n", ":/d", ":/d/e"]);
    let made = "truncate -s 5000 d/e/size; touch -d @1000000000 one two there/new d/n d d/e";
    common::volume::shell(made, &here);
    for (path, why) in [
        (":/astray", "leads into a directory that is not there"),
        (":/round", "symbolic links"),
        (":/gone/x", "draconis mkdir -p makes it"),
    ] {
        image.refuses(&["touch", path], why);
        image.refuses(&["truncate", "-s", "1", path], why);
    }
    same(&image.seen(""), &tree_at(&here));
}

#[test]
fn copies_inside_and_between_volumes() {
    for shape in &SHAPES[..3] {
        let image = Image::new(shape, "64M");
        let tree = image.draconis.make_dir("tree");
        small_odd_tree(&tree);
        image.ok(&["put", "-r", tree.to_str().unwrap(), ":/"]);
        image.ok(&["cp", "-a", ":/tree", ":/copy"]);
        same(&image.seen("copy"), &tree_at(&tree));
        image.ok(&["mkdir", ":/dir"]);
        image.ok(&["cp", ":/tree/one", ":/tree/big", ":/dir"]);
        assert_eq!(image.text("/dir/one"), "1");
        image.refuses(&["cp", ":/tree", ":/x"], "-r copies it");
        image.refuses(&["cp", "-r", ":/tree", ":/tree/deep"], "into itself");
        image.refuses(&["cp", ":/dir/one", ":/dir"], "same file");
        image.refuses(&["cp", ":/dir/one", ":/dir/big", ":/nowhere"], "no such directory");

        let other = image.draconis.path("other");
        image.format(&other, &["-b", "4096"], "64M");
        let to = format!("{}:/", other.display());
        image.ok(&["cp", "-a", ":/tree", &to]);
        check(&other);
        let other = Image { path: other, ..image };
        same(&other.seen("tree"), &tree_at(&tree));
    }
}

#[test]
fn labels_are_set_and_nothing_else() {
    let image = Image::new(&["-L", "old"], "8M");
    let label = || {
        let output = Command::new("e2label").arg(&image.path).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim_end().to_string()
    };
    let before = std::fs::read(&image.path).unwrap();
    let path = image.path.to_str().unwrap();
    image.ok(&["set-label", path, "sixteen bytes .."]);
    assert_eq!(label(), "sixteen bytes ..");
    let after = std::fs::read(&image.path).unwrap();
    let changed = |at: usize| before[at] != after[at];
    // All but `s_wtime` and `s_volume_name`.
    let others = (0..before.len()).filter(|at| !(1072..1076).contains(at));
    assert!(others.filter(|at| !(1144..1160).contains(at)).all(|at| !changed(at)));
    image.ok(&["set-label", path]);
    assert_eq!(label(), "");
    let said = image.draconis.fails(["set-label", path, "seventeen bytes .."]);
    assert!(said.contains("16 bytes"), "{said}");
    let none = image.file("none", &[0; 4096]);
    let said = image.draconis.fails(["set-label", none.to_str().unwrap(), "x"]);
    assert!(said.contains("not an ext volume"), "{said}");
    // A volume inside a larger image.
    let inside = image.draconis.path("inside");
    std::fs::write(&inside, [vec![0; 1 << 20], after].concat()).unwrap();
    image.draconis.ok(["set-label", "--offset", "1M", inside.to_str().unwrap(), "inside"]);
    let bytes = std::fs::read(&inside).unwrap();
    assert_eq!(&bytes[(1 << 20) + 1144..][..7], b"inside\0");
    // The superblock's checksum is updated.
    let theirs = image.draconis.path("theirs");
    common::mke2fs(&theirs, None, &["-t", "ext4", "-O", "metadata_csum"], "8M");
    image.draconis.ok(["set-label", theirs.to_str().unwrap(), "with sums"]);
    common::volume::check(&theirs);
    assert!(image.draconis.ok(["info", theirs.to_str().unwrap()]).contains("with sums"));
}

#[test]
fn volumes_grow_with_their_files() {
    let image = Image::new(&["-b", "1024"], "8M");
    let path = image.path.to_str().unwrap();
    let file = image.file("file", &[7; 3_000_000]);
    image.ok(&["put", file.to_str().unwrap(), ":/file"]);
    let before = image.tree();
    let len = |path: &Path| std::fs::metadata(path).unwrap().len();
    image.ok(&["grow", "--progress", "always", path, "20000"]);
    assert_eq!(len(&image.path), 20_000 << 10);
    // The whole file, after it was extended; a second run has nothing to do.
    std::fs::File::options().write(true).open(path).unwrap().set_len(64 << 20).unwrap();
    image.ok(&["grow", path]);
    image.ok(&["grow", path, "64M"]);
    let told = image.draconis.ok(["info", path]);
    assert!(told.contains("64.0 MiB"), "{told}");
    assert_eq!(image.tree(), before);
    let large = image.file("large", &[8; 40_000_000]);
    image.ok(&["put", large.to_str().unwrap(), ":/large"]);

    let refused = |size: &str, why: &str| {
        let before = len(&image.path);
        let said = image.draconis.fails(["grow", path, size]);
        assert!(said.contains(why) && len(&image.path) == before, "{said}");
        check(&image.path);
    };
    refused("32M", "draconis shrink makes it smaller");
    refused("64T", "can grow to");
    refused("x", "not a size");
    // A volume inside a larger image also grows to its end.
    let inside = image.draconis.path("inside");
    let bytes = std::fs::read(&image.path).unwrap();
    std::fs::write(&inside, [vec![0; 1 << 20], bytes].concat()).unwrap();
    image.draconis.ok(["grow", "--offset", "1M", inside.to_str().unwrap(), "80M"]);
    assert_eq!(len(&inside), 81 << 20);
    let cut = image.draconis.path("cut");
    std::fs::write(&cut, &std::fs::read(&inside).unwrap()[1 << 20..]).unwrap();
    check(&cut);
}

#[test]
fn volumes_shrink_with_their_files() {
    let image = Image::new(&["-t", "ext4", "-b", "1024"], "32M");
    let path = image.path.to_str().unwrap();
    let file = image.file("file", &[7; 3_000_000]);
    image.ok(&["put", file.to_str().unwrap(), ":/file"]);
    let before = image.tree();
    let len = |path: &Path| std::fs::metadata(path).unwrap().len();
    image.ok(&["shrink", "--progress", "always", path, "20000"]);
    assert_eq!(len(&image.path), 20_000 << 10);
    check(&image.path);
    let refused = |arguments: &[&str], why: &str| {
        let before = len(&image.path);
        let said = image.draconis.fails([&["shrink", path][..], arguments].concat());
        assert!(said.contains(why) && len(&image.path) == before, "{said}");
        check(&image.path);
    };
    refused(&["1M"], "can shrink to");
    refused(&["32M"], "draconis grow makes it larger");
    refused(&["x"], "not a size");
    image.ok(&["shrink", "--min", path]);
    let least = len(&image.path);
    assert!(least < 9 << 20, "{least}");
    check(&image.path);
    // A second run changes nothing, and prints the size.
    let said = image.draconis.ok(["shrink", path]);
    assert!(said.contains(&format!("{least} bytes")), "{said}");
    assert_eq!(len(&image.path), least);
    // Tables near the end are freed only with their groups.
    let image_of_groups = Image::new(&["-t", "ext4", "-b", "1024", "-N", "65536"], "256M");
    let path_of_groups = image_of_groups.path.to_str().unwrap();
    image_of_groups.ok(&["put", file.to_str().unwrap(), ":/file"]);
    image_of_groups.ok(&["shrink", path_of_groups]);
    let least = len(&image_of_groups.path);
    check(&image_of_groups.path);
    image_of_groups.ok(&["shrink", "--min", path_of_groups]);
    assert_eq!(len(&image_of_groups.path), least);
    check(&image_of_groups.path);
    assert_eq!(image.tree(), before);
    // Data behind the volume in a larger file stays.
    let longer = image.draconis.path("longer");
    image.ok(&["grow", path, "20M"]);
    let bytes = std::fs::read(&image.path).unwrap();
    std::fs::write(&longer, [bytes, vec![5; 1 << 20]].concat()).unwrap();
    image.draconis.ok(["shrink", longer.to_str().unwrap(), "12M"]);
    assert_eq!(len(&longer), 21 << 20);
}

#[test]
fn volumes_are_tuned_as_by_tune2fs() {
    let image = Image::new(&["-t", "ext2", "-b", "1024"], "32M");
    let path = image.path.to_str().unwrap();
    let file = image.file("file", &[7; 300_000]);
    image.ok(&["put", file.to_str().unwrap(), ":/file"]);
    let before = image.tree();
    let uuid = "01234567-89ab-4def-8123-456789abcdef";
    image.ok(&["tune", "-L", "tuned", "-U", uuid, "-m", "1.5", "-e", "remount-ro", path]);
    image.ok(&["tune", "-c", "-1", "-i", "6m", "-J", "size=4", path]);
    check(&image.path);
    let told = image.draconis.ok(["info", path]);
    for expected in ["tuned", uuid, "has_journal", "ext3"] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    image.ok(&["tune", "-O", "^has_journal,dir_index,large_file", path]);
    image.ok(&["tune", path]);
    check(&image.path);
    assert_eq!(image.tree(), before);
    image.ok(&["tune", "-j", "-O", "orphan_file,project", "-Q", "usrquota,prjquota", path]);
    check(&image.path);
    image.ok(&["tune", "-O", "^orphan_file,^has_journal", "-Q", "^usrquota", path]);
    check(&image.path);
    for (options, why) in [
        (&["-m", "51"][..], "0 to 50 percent"),
        (&["-U", "x"], "a UUID, random"),
        (&["-O", "^filetype"], "tune2fs -O ^filetype"),
        (&["-J", "device=x"], "size=MIB"),
        (&["-i", "x"], "30d"),
        (&["-Q", "users"], "usrquota"),
        (&["-E", "offset=4"], "clear_mmp"),
        (&["-E", "clear_mmp"], "mmp"),
    ] {
        let said = image.draconis.fails([&["tune"][..], options, &[path]].concat());
        assert!(said.contains(why), "{said}");
    }
    check(&image.path);
}

/// Takes 11 s, the time that MMP waits for other hosts.
#[test]
fn volumes_that_guard_against_two_hosts_are_changed() {
    let image = Image::new(&["-t", "ext4", "-b", "1024"], "32M");
    let path = image.path.to_str().unwrap();
    image.ok(&["tune", "-O", "mmp", "-E", "mmp_update_interval=1", path]);
    check(&image.path);
    let file = image.file("file", &[7; 300_000]);
    image.ok(&["put", file.to_str().unwrap(), ":/file"]);
    check(&image.path);
    let said = Command::new("dumpe2fs").args(["-h", path]).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("mmp_sequence: 0xff4d4d50"), "{said}");
    assert!(image.tree().contains("300000"), "{}", image.tree());
}

#[test]
fn what_is_in_use_or_no_volume_is_left_alone() {
    let image = Image::new(&[], "8M");
    let file = std::fs::File::open(&image.path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared).unwrap();
    for line in [
        &["mkdir", ":/x"][..],
        &["rm", ":/x"],
        &["set-label", image.path.to_str().unwrap()],
        &["grow", image.path.to_str().unwrap(), "16M"],
        &["shrink", "--min", image.path.to_str().unwrap()],
        &["tune", "-L", "x", image.path.to_str().unwrap()],
    ] {
        let said = image.draconis.fails(image.arguments(line));
        assert!(said.contains("in use; unmount it first"), "{said}");
    }
    drop(file);
    let said = image.draconis.fails(["mkdir", "/nowhere/image:/x"]);
    assert!(said.contains("draconis format"), "{said}");
    let none = image.file("none", &[0; 100_000]);
    let said = image.draconis.fails(["mkdir", &format!("{}:/x", none.display())]);
    assert!(said.contains("not an ext volume"), "{said}");
    let wrong = image.draconis.run(["chmod", "u+q", &image.at("/")]);
    assert_eq!(wrong.status.code(), Some(2), "the command line makes no sense");
}

#[test]
fn a_full_volume_says_so_and_stays_whole() {
    let image = Image::new(&["-b", "1024", "-N", "64"], "2M");
    let dir = image.draconis.make_dir("many");
    for nth in 0..100 {
        std::fs::write(dir.join(format!("{nth}")), b"").unwrap();
    }
    let said = image.draconis.fails(image.arguments(&["put", "-r", dir.to_str().unwrap(), ":/"]));
    assert!(said.contains("no space left") && said.contains("larger volume"), "{said}");
    check(&image.path);
    image.ok(&["rm", "-r", ":/many"]);
    assert_eq!(image.names("/"), ["lost+found"]);
}

#[test]
fn a_command_that_is_killed_leaves_a_whole_volume() {
    let image = Image::new(&["-b", "1024"], "256M");
    let tree = image.draconis.make_dir("tree");
    for nth in 0..2000 {
        std::fs::write(tree.join(format!("{nth}")), vec![7; nth]).unwrap();
    }
    // More than the limit of dirty data, so that the volume is written all the time.
    for nth in 0..30 {
        std::fs::write(tree.join(format!("large {nth}")), vec![nth; 3 << 20]).unwrap();
    }
    let put = || {
        let mut put = image.draconis.command();
        put.args(["put", "-r", tree.to_str().unwrap(), &image.at("/x")]).stderr(Stdio::null());
        put.spawn().unwrap()
    };
    let start = Instant::now();
    assert!(put().wait().unwrap().success());
    let whole = start.elapsed();
    image.ok(&["rm", "-r", ":/x"]);
    let mut cut_off = 0;
    for nth in 1..=12 {
        let mut put = put();
        std::thread::sleep(whole * nth / 12);
        put.kill().unwrap();
        put.wait().unwrap();
        let mended = Command::new("e2fsck").arg("-fp").arg(&image.path).output().unwrap();
        let status = mended.status.code().unwrap();
        assert!(status <= 1, "{status}: {}", String::from_utf8_lossy(&mended.stdout));
        check(&image.path);
        let there = image.names("/").contains(&"x".to_string());
        cut_off += u32::from(there && image.names("/x").len() < 2030);
        image.ok(&["rm", "-rf", ":/x"]);
    }
    eprintln!("{cut_off} of 12 were cut off in the middle");
}
