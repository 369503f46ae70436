//! Commands that change an image without mounting it, each checked by `e2fsck`.

use crate::common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{
    Draconis, FileProperties, IgnoredProperties, KernelMount, assert_same_trees, is_root,
    make_odd_tree, scan_tree,
};
use draconis_testkit::judge::{self, assert_fsck_clean};
use serde_json::Value;

/// A new empty volume, and the commands that change it.
struct TestImage {
    draconis: Draconis,
    path: PathBuf,
}

impl TestImage {
    fn new(arguments: &[&str], size: &str) -> Self {
        let draconis = Draconis::new();
        let path = draconis.path("image");
        let image = Self { draconis, path };
        image.format_image(&image.path, arguments, size);
        image
    }

    fn format_image(&self, path: &Path, arguments: &[&str], size: &str) {
        let mut command = vec!["format"];
        if !arguments.contains(&"-t") {
            command.extend(["-t", "ext2"]);
        }
        command.extend(arguments);
        command.extend([path.to_str().unwrap(), size]);
        self.draconis.run_ok(command);
    }

    fn target(&self, path: &str) -> String {
        format!("{}:{path}", self.path.display())
    }

    /// Returns the arguments of a command; those with the prefix `:/` become paths in the image.
    fn expand_arguments(&self, line: &[&str]) -> Vec<String> {
        let one = |text: &&str| match text.strip_prefix(":/") {
            Some(path) => self.target(&format!("/{path}")),
            None => (*text).to_string(),
        };
        line.iter().map(one).collect()
    }

    fn run_and_check(&self, line: &[&str]) {
        self.draconis.run_ok(self.expand_arguments(line));
        assert_fsck_clean(&self.path);
    }

    /// Runs a command that must be refused without changing files.
    fn assert_refused(&self, line: &[&str], why: &str) {
        let before = self.list_tree();
        let said = self.draconis.run_failing(self.expand_arguments(line));
        assert!(said.contains(why), "{said}");
        assert_fsck_clean(&self.path);
        assert_eq!(self.list_tree(), before);
    }

    fn stat(&self, path: &str) -> Value {
        let said = self.draconis.run_ok(["stat", "--json", &self.target(path)]);
        serde_json::from_str::<Value>(&said).unwrap()[0].clone()
    }

    fn read_text(&self, path: &str) -> String {
        self.draconis.run_ok(["cat", &self.target(path)])
    }

    fn list_names(&self, path: &str) -> Vec<String> {
        let said = self.draconis.run_ok(["ls", "-a", &self.target(path)]);
        said.lines().map(str::to_string).filter(|name| !matches!(&name[..], "." | "..")).collect()
    }

    /// Returns all names, as of `ls -alR`.
    fn list_tree(&self) -> String {
        self.draconis.run_ok(["ls", "-alR", self.path.to_str().unwrap()])
    }

    /// Returns the output of `debugfs`.
    fn debugfs(&self, request: &str) -> String {
        judge::debugfs(&self.path, request)
    }

    /// Creates a host file.
    fn create_host_file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.draconis.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Describes a tree as the kernel shows it; without root, as `get` restores it.
    fn kernel_view(&self, below: &str) -> BTreeMap<PathBuf, FileProperties> {
        let at = self.draconis.make_dir("kernel");
        let mut seen = match KernelMount::mount(&self.path, at, "change") {
            Some(kernel) => scan_tree(&kernel.at.join(below), ignore_uncopied_properties()),
            None => {
                let into = tempfile::tempdir().unwrap();
                let from = self.target(&format!("/{below}"));
                self.draconis.run_ok(["get", "-r", &from, into.path().to_str().unwrap()]);
                scan_tree(&into.path().join(below), ignore_uncopied_properties())
            }
        };
        seen.remove(Path::new("lost+found"));
        seen.remove(Path::new(""));
        seen
    }
}

/// Comparison without access times, inode numbers and block counts.
fn ignore_uncopied_properties() -> IgnoredProperties {
    IgnoredProperties { what_a_copy_loses: true, fractions: !is_root() }
}

/// The odd tree with a smaller sparse file, which is faster to compare than 5 GiB.
fn small_odd_tree(top: &Path) {
    make_odd_tree(top);
    let sparse = std::fs::File::options().write(true).open(top.join("sparse")).unwrap();
    sparse.set_len(70 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"near the end", 69 << 20).unwrap();
}

fn tree_at(top: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = scan_tree(top, ignore_uncopied_properties());
    seen.remove(Path::new(""));
    seen
}

const FORMAT_OPTIONS: [&[&str]; 4] = [
    &["-b", "1024"],
    &["-b", "2048", "-O", "^dir_index"],
    &["-b", "4096"],
    &["-b", "1024", "-I", "128"],
];

#[test]
fn put_tree_twice() {
    for shape in &FORMAT_OPTIONS[..3] {
        let image = TestImage::new(shape, "64M");
        let tree = image.draconis.make_dir("tree");
        small_odd_tree(&tree);
        let source = tree.to_str().unwrap();
        image.run_and_check(&["put", "-r", source, ":/"]);
        assert_same_trees(&image.kernel_view("tree"), &tree_at(&tree));
        // Holes stay holes: a file of 70 MiB fits a volume of 64.
        image.run_and_check(&["put", "-r", source, ":/copy"]);
        assert_same_trees(&image.kernel_view("copy"), &tree_at(&tree));
        image.run_and_check(&["put", "-rT", source, ":/copy"]);
        image.run_and_check(&["put", "-r", &format!("{source}/."), ":/copy"]);
        assert_same_trees(&image.kernel_view("copy"), &tree_at(&tree));
    }
}

#[test]
fn put_file_chooses_destination_like_cp() {
    let image = TestImage::new(&[], "8M");
    let one = image.create_host_file("one", b"first");
    let two = image.create_host_file("two", b"second");
    let (one, two) = (one.to_str().unwrap(), two.to_str().unwrap());
    image.run_and_check(&["put", one, ":/"]);
    image.run_and_check(&["put", one, ":/named"]);
    image.run_and_check(&["mkdir", ":/dir"]);
    image.run_and_check(&["put", one, two, ":/dir/"]);
    image.run_and_check(&["put", two, ":/named"]);
    image.run_and_check(&["put", "--owner", "7:8", two, ":/owned"]);
    assert_eq!(image.list_names("/dir"), ["one", "two"]);
    assert_eq!(
        (image.read_text("/one"), image.read_text("/named")),
        ("first".into(), "second".into())
    );
    let owned = image.stat("/owned");
    assert_eq!((&owned["uid"], &owned["gid"]), (&7.into(), &8.into()));
    // A symbolic link on the command line is followed, except with -r.
    std::os::unix::fs::symlink("two", image.draconis.path("link")).unwrap();
    let link = image.draconis.path("link");
    image.run_and_check(&["put", link.to_str().unwrap(), ":/followed"]);
    image.run_and_check(&["put", "-r", link.to_str().unwrap(), ":/kept"]);
    assert_eq!(image.read_text("/followed"), "second");
    assert_eq!(image.stat("/kept")["link_target"], "two");

    image.assert_refused(&["put", one, two, ":/none"], "no such directory");
    image.assert_refused(&["put", one, ":/none/"], "no such directory");
    image.assert_refused(&["put", one, ":/none/deep"], "no such file or directory");
    image.assert_refused(&["put", one, one, ":/dir"], "another source has that name");
    let dir = image.draconis.make_dir("host");
    image.assert_refused(&["put", dir.to_str().unwrap(), ":/"], "-r copies it");
    image.assert_refused(&["put", "-r", dir.to_str().unwrap(), ":/one"], "no directory");
    image.assert_refused(&["put", "/nowhere/at/all", ":/x"], "No such file");
    let huge = image.create_host_file("huge", &vec![1; 9 << 20]);
    image.assert_refused(&["put", huge.to_str().unwrap(), ":/"], "larger volume");
}

#[test]
fn put_stdin_is_atomic() {
    use std::io::Write;
    let image = TestImage::new(&["-b", "1024"], "8M");
    let put = |arguments: &[&str], bytes: &[u8]| {
        let mut command = image.draconis.command();
        command.arg("put").args(image.expand_arguments(arguments));
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A command that refuses does not read its input.
        let _ = child.stdin.take().unwrap().write_all(bytes);
        let output = child.wait_with_output().unwrap();
        assert_fsck_clean(&image.path);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let bytes: Vec<u8> = (0..3_000_000u32).map(|nth| (nth / 7) as u8).collect();
    assert_eq!(put(&["-", ":/big"], &bytes), (Some(0), String::new()));
    let output = image.draconis.run(["cat", &image.target("/big")]);
    assert!(output.stdout == bytes);
    assert_eq!(put(&["--owner", "7:8", "-", ":/big"], b"short"), (Some(0), String::new()));
    assert_eq!(image.read_text("/big"), "short");
    assert_eq!(image.stat("/big")["uid"], 7);
    assert_eq!(put(&["-", ":/empty"], b""), (Some(0), String::new()));
    assert_eq!(image.stat("/empty")["size"], 0);
    image.run_and_check(&["mkdir", ":/dir"]);

    let before = (image.list_tree(), image.debugfs("stats"));
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
        assert_eq!(image.list_tree(), before.0);
    }
    let free = |text: &str| {
        let lines = text.lines().filter(|line| line.starts_with("Free "));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    assert_eq!(free(&image.debugfs("stats")), free(&before.1));
}

#[test]
fn untar_preserves_everything() {
    for shape in &FORMAT_OPTIONS[..3] {
        let image = TestImage::new(shape, "64M");
        let tree = image.draconis.make_dir("tree");
        small_odd_tree(&tree);
        let archive = image.draconis.path("archive");
        let mut tar = Command::new("tar");
        tar.args(["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "-z", "-C"]);
        assert!(tar.arg(&tree).arg("-cf").arg(&archive).arg(".").status().unwrap().success());
        image.run_and_check(&["mkdir", "-p", ":/a/b"]);
        image.run_and_check(&["untar", "-f", archive.to_str().unwrap(), ":/a/b"]);
        assert_same_trees(&image.kernel_view("a/b"), &tree_at(&tree));
        // From standard input, over an existing file.
        let output = image
            .draconis
            .command()
            .args(["untar", &image.target("/a/b")])
            .stdin(std::fs::File::open(&archive).unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_fsck_clean(&image.path);
        assert_same_trees(&image.kernel_view("a/b"), &tree_at(&tree));
    }
}

#[test]
fn untar_keeps_attributes_of_implied_directories() {
    let image = TestImage::new(&[], "8M");
    let tree = image.draconis.make_dir("tree/private/new");
    std::fs::write(tree.join("file"), b"x").unwrap();
    let archive = image.draconis.path("archive");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(image.draconis.path("tree")).arg("-cf").arg(&archive);
    assert!(tar.arg("private/new/file").status().unwrap().success());
    image.run_and_check(&["mkdir", "-m", "700", "--owner", "5:6", ":/private"]);
    image.run_and_check(&["untar", "-f", archive.to_str().unwrap(), ":/"]);
    let private = image.stat("/private");
    assert_eq!((&private["uid"], &private["gid"]), (&5.into(), &6.into()));
    assert!(private["mode"].as_str().unwrap().ends_with("700"), "{private}");
    assert_eq!(image.read_text("/private/new/file"), "x");
    image.assert_refused(&["untar", "-f", archive.to_str().unwrap(), ":/none"], "mkdir -p");
    let wrong = image.create_host_file("wrong", &[7; 2000]);
    image.assert_refused(&["untar", "-f", wrong.to_str().unwrap(), ":/"], "not a tar archive");
}

#[test]
fn mkdir_mv_ln_rm_change_names() {
    for shape in FORMAT_OPTIONS {
        let image = TestImage::new(shape, "8M");
        image.run_and_check(&["mkdir", "-p", ":/a/b/c", ":/a/b/d"]);
        image.run_and_check(&["mkdir", "-p", ":/a/b/c"]);
        image.run_and_check(&["touch", ":/a/file", ":/a/other"]);
        image.run_and_check(&["mv", ":/a/file", ":/a/b/c"]);
        image.run_and_check(&["mv", ":/a/b/c", ":/moved"]);
        assert_eq!(
            (image.list_names("/moved"), image.list_names("/a/b")),
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
        image.run_and_check(&["mv", "-n", ":/moved/file", ":/a/other"]);
        assert_eq!(image.list_names("/moved"), ["file"]);
        image.run_and_check(&["mv", ":/moved/file", ":/a/other"]);
        assert_eq!(
            (image.list_names("/moved").len(), image.list_names("/a")),
            (0, vec!["b".into(), "other".into()])
        );
        image.run_and_check(&["mv", "--exchange", ":/moved", ":/a/other"]);
        assert_eq!(image.stat("/moved")["kind"], "regular file");
        image.run_and_check(&["mv", "--exchange", ":/moved", ":/a/other"]);

        image.run_and_check(&["ln", ":/a/other", ":/hard"]);
        assert_eq!(image.stat("/hard")["inode"], image.stat("/a/other")["inode"]);
        assert_eq!(image.stat("/hard")["links"], 2);
        image.run_and_check(&["ln", "-s", "a/other", ":/fast"]);
        let long = format!("../{}", "x".repeat(100));
        image.run_and_check(&["ln", "-s", &long, ":/slow"]);
        image.run_and_check(&["ln", "-sf", "a/b", ":/fast"]);
        image.run_and_check(&["ln", "-f", ":/a/other", ":/hard"]);
        assert_eq!(image.stat("/slow")["link_target"], long);
        assert_eq!(image.stat("/fast")["link_target"], "a/b");

        image.assert_refused(&["mkdir", ":/a"], "file exists");
        image.assert_refused(&["mkdir", ":/none/x"], "no such file or directory");
        image.assert_refused(&["mkdir", "-p", ":/hard/x"], "no directory");
        image.assert_refused(&["mkdir", &format!(":/{}", "n".repeat(256))], "too long");
        image.assert_refused(&["mv", ":/a", ":/a/b"], "into itself");
        image.assert_refused(&["mv", ":/none", ":/a"], "no such file");
        image.assert_refused(&["mv", ":/a", ":/moved", ":/nowhere"], "no such directory");
        image.assert_refused(&["mv", ":/a", "other.img:/x"], "draconis cp -a");
        image.assert_refused(&["ln", ":/a", ":/dir link"], "");
        image.assert_refused(&["ln", "-s", "x", ":/hard"], "file exists");
        image.assert_refused(&["rm", ":/a"], "-r removes it");
        image.assert_refused(&["rm", ":/none"], "no such file");
        image.assert_refused(&["rm", "-r", ":/"], "root directory");
        image.assert_refused(&["rm", "-r", ":/a/."], "a name is needed");

        image.run_and_check(&["rm", "-f", ":/none", ":/hard/below"]);
        image.run_and_check(&["rm", ":/hard"]);
        assert_eq!(image.stat("/a/other")["links"], 1);
        image.run_and_check(&["rm", "-r", ":/a", ":/moved", ":/fast", ":/slow"]);
        assert_eq!(image.list_names("/"), ["lost+found"]);
        assert_eq!(image.stat("/")["links"], 3);
    }
}

#[test]
fn rm_frees_all_space() {
    let image = TestImage::new(&["-b", "1024"], "64M");
    let free = || {
        let said = judge::dumpe2fs(&["-h"], &image.path);
        let lines = said.lines().filter(|line| line.starts_with("Free "));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    let before = free();
    let tree = image.draconis.make_dir("tree");
    small_odd_tree(&tree);
    for nth in 0..2000 {
        std::fs::write(tree.join(format!("a name of some length, {nth:04}")), b"x").unwrap();
    }
    image.run_and_check(&["put", "-r", tree.to_str().unwrap(), ":/"]);
    assert_ne!(free(), before);
    assert_same_trees(&image.kernel_view("tree"), &tree_at(&tree));
    image.run_and_check(&["rm", "-r", ":/tree"]);
    assert_eq!(free(), before);
}

#[test]
fn chmod_chown_touch_change_attributes() {
    for shape in FORMAT_OPTIONS {
        let image = TestImage::new(shape, "8M");
        image.run_and_check(&["mkdir", "-p", ":/d/e"]);
        image.run_and_check(&["touch", ":/d/e/f"]);
        image.run_and_check(&["ln", "-s", "e", ":/d/link"]);
        image.run_and_check(&["chmod", "640", ":/d/e/f"]);
        image.run_and_check(&["chmod", "-R", "g+rwX,o-rx", ":/d"]);
        let mode = |path: &str| image.stat(path)["mode"].as_str().unwrap().to_string();
        assert!(mode("/d/e/f").ends_with("660") && mode("/d/e").ends_with("770"));
        assert!(mode("/d/link").ends_with("777"));
        image.run_and_check(&["chmod", "-x", ":/d/e"]);
        image.run_and_check(&["chmod", "u=rwxs", ":/d/e/f"]);
        assert!(mode("/d/e/f").ends_with("4760"), "{}", mode("/d/e/f"));
        // Changing the owner clears setuid and setgid.
        image.run_and_check(&["chown", "70000:123456", ":/d/e/f"]);
        assert!(mode("/d/e/f").ends_with("0760") || mode("/d/e/f").ends_with("100760"));
        image.run_and_check(&["chown", "-R", ":9", ":/d"]);
        image.run_and_check(&["chown", "-h", "3", ":/d/link"]);
        let owner = |path: &str| {
            let stat = image.stat(path);
            (stat["uid"].as_u64().unwrap(), stat["gid"].as_u64().unwrap())
        };
        assert_eq!((owner("/d/e/f"), owner("/d/link").0), ((70_000, 9), 3));
        assert_eq!(owner("/d/link").1, 9);
        image.run_and_check(&["touch", "-d", "@1000000000.5", ":/d/e/f"]);
        image.run_and_check(&["touch", "-m", "-d", "@1100000000", ":/d/e/f"]);
        let stat = image.stat("/d/e/f");
        let fraction = if shape.contains(&"128") { 0 } else { 500_000_000 };
        assert_eq!(stat["accessed"], serde_json::json!([1_000_000_000, fraction]));
        assert_eq!(stat["modified"], serde_json::json!([1_100_000_000, 0]));
        image.run_and_check(&["touch", "-c", ":/not made"]);
        image.run_and_check(&["truncate", "-c", "-s", "5", ":/not made"]);
        assert_eq!(image.list_names("/"), ["d", "lost+found"]);

        let one = image.create_host_file("one", &[b'x'; 5000]);
        image.run_and_check(&["put", one.to_str().unwrap(), ":/one"]);
        image.run_and_check(&["truncate", "-s", "-3000", ":/one"]);
        image.run_and_check(&["truncate", "-s", "+2K", ":/one"]);
        let expected = [vec![b'x'; 2000], vec![0; 2048]].concat();
        assert_eq!(
            image.read_text("/one").into_bytes(),
            expected,
            "what was cut off reads as zeros"
        );
        image.run_and_check(&["truncate", "-s", "1G", ":/hole"]);
        assert_eq!(
            (&image.stat("/hole")["size"], &image.stat("/hole")["blocks_512"]),
            (&(1u64 << 30).into(), &0.into())
        );
        image.assert_refused(&["truncate", "-s", "9999T", ":/one"], "too large");
        image.assert_refused(&["truncate", "-s", "5", ":/d"], "only files");
        image.assert_refused(&["chmod", "644", ":/none"], "no such file");
    }
}

/// As for open(2) with O_CREAT: the kernel's result equals that of the host's tools.
#[test]
fn files_are_created_through_symlinks() {
    let image = TestImage::new(&["-t", "ext4"], "8M");
    let here = image.draconis.make_dir("here");
    common::volume::run_shell(
        "mkdir -p d/e; ln -s made one; ln -s b two; ln -s d/../d/e/c b; ln -s ../n d/e/size
        ln -s gone/x astray; ln -s round round; ln -s d/e there",
        &here,
    );
    image.run_and_check(&["put", "-r", &format!("{}/.", here.display()), ":/"]);
    image.run_and_check(&["touch", "-d", "@1000000000", ":/one", ":/two", ":/there/new"]);
    image.run_and_check(&["truncate", "-s", "5000", ":/d/e/size"]);
    image.run_and_check(&["truncate", "-c", "-s", "5000", ":/astray"]);
    image.run_and_check(&["touch", "-d", "@1000000000", ":/d/n", ":/d", ":/d/e"]);
    let made = "truncate -s 5000 d/e/size; touch -d @1000000000 one two there/new d/n d d/e";
    common::volume::run_shell(made, &here);
    for (path, why) in [
        (":/astray", "leads into a directory that is not there"),
        (":/round", "symbolic links"),
        (":/gone/x", "draconis mkdir -p makes it"),
    ] {
        image.assert_refused(&["touch", path], why);
        image.assert_refused(&["truncate", "-s", "1", path], why);
    }
    assert_same_trees(&image.kernel_view(""), &tree_at(&here));
}

#[test]
fn copies_inside_and_between_volumes() {
    for shape in &FORMAT_OPTIONS[..3] {
        let image = TestImage::new(shape, "64M");
        let tree = image.draconis.make_dir("tree");
        small_odd_tree(&tree);
        image.run_and_check(&["put", "-r", tree.to_str().unwrap(), ":/"]);
        image.run_and_check(&["cp", "-a", ":/tree", ":/copy"]);
        assert_same_trees(&image.kernel_view("copy"), &tree_at(&tree));
        image.run_and_check(&["mkdir", ":/dir"]);
        image.run_and_check(&["cp", ":/tree/one", ":/tree/big", ":/dir"]);
        assert_eq!(image.read_text("/dir/one"), "1");
        image.assert_refused(&["cp", ":/tree", ":/x"], "-r copies it");
        image.assert_refused(&["cp", "-r", ":/tree", ":/tree/deep"], "into itself");
        image.assert_refused(&["cp", ":/dir/one", ":/dir"], "same file");
        image.assert_refused(&["cp", ":/dir/one", ":/dir/big", ":/nowhere"], "no such directory");

        let other = image.draconis.path("other");
        image.format_image(&other, &["-b", "4096"], "64M");
        let to = format!("{}:/", other.display());
        image.run_and_check(&["cp", "-a", ":/tree", &to]);
        assert_fsck_clean(&other);
        let other = TestImage { path: other, ..image };
        assert_same_trees(&other.kernel_view("tree"), &tree_at(&tree));
    }
}

#[test]
fn set_label_changes_only_label() {
    let image = TestImage::new(&["-L", "old"], "8M");
    let label = || {
        let output = Command::new("e2label").arg(&image.path).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim_end().to_string()
    };
    let before = std::fs::read(&image.path).unwrap();
    let path = image.path.to_str().unwrap();
    image.run_and_check(&["set-label", path, "sixteen bytes .."]);
    assert_eq!(label(), "sixteen bytes ..");
    let after = std::fs::read(&image.path).unwrap();
    let changed = |at: usize| before[at] != after[at];
    // All but `s_wtime` and `s_volume_name`.
    let others = (0..before.len()).filter(|at| !(1072..1076).contains(at));
    assert!(others.filter(|at| !(1144..1160).contains(at)).all(|at| !changed(at)));
    image.run_and_check(&["set-label", path]);
    assert_eq!(label(), "");
    let said = image.draconis.run_failing(["set-label", path, "seventeen bytes .."]);
    assert!(said.contains("16 bytes"), "{said}");
    let none = image.create_host_file("none", &[0; 4096]);
    let said = image.draconis.run_failing(["set-label", none.to_str().unwrap(), "x"]);
    assert!(said.contains("not an ext volume"), "{said}");
    // A volume inside a larger image.
    let inside = image.draconis.path("inside");
    std::fs::write(&inside, [vec![0; 1 << 20], after].concat()).unwrap();
    image.draconis.run_ok(["set-label", "--offset", "1M", inside.to_str().unwrap(), "inside"]);
    let bytes = std::fs::read(&inside).unwrap();
    assert_eq!(&bytes[(1 << 20) + 1144..][..7], b"inside\0");
    // The superblock's checksum is updated.
    let theirs = image.draconis.path("theirs");
    common::mke2fs(&theirs, None, &["-t", "ext4", "-O", "metadata_csum"], "8M");
    image.draconis.run_ok(["set-label", theirs.to_str().unwrap(), "with sums"]);
    common::volume::run_e2fsck(&theirs);
    assert!(image.draconis.run_ok(["info", theirs.to_str().unwrap()]).contains("with sums"));
}

#[test]
fn grow_extends_volume_and_file() {
    let image = TestImage::new(&["-b", "1024"], "8M");
    let path = image.path.to_str().unwrap();
    let file = image.create_host_file("file", &[7; 3_000_000]);
    image.run_and_check(&["put", file.to_str().unwrap(), ":/file"]);
    let before = image.list_tree();
    let len = |path: &Path| std::fs::metadata(path).unwrap().len();
    image.run_and_check(&["grow", "--progress", "always", path, "20000"]);
    assert_eq!(len(&image.path), 20_000 << 10);
    // The whole file, after it was extended; a second run has nothing to do.
    std::fs::File::options().write(true).open(path).unwrap().set_len(64 << 20).unwrap();
    image.run_and_check(&["grow", path]);
    image.run_and_check(&["grow", path, "64M"]);
    let told = image.draconis.run_ok(["info", path]);
    assert!(told.contains("64.0 MiB"), "{told}");
    assert_eq!(image.list_tree(), before);
    let large = image.create_host_file("large", &[8; 40_000_000]);
    image.run_and_check(&["put", large.to_str().unwrap(), ":/large"]);

    let refused = |size: &str, why: &str| {
        let before = len(&image.path);
        let said = image.draconis.run_failing(["grow", path, size]);
        assert!(said.contains(why) && len(&image.path) == before, "{said}");
        assert_fsck_clean(&image.path);
    };
    refused("32M", "draconis shrink makes it smaller");
    refused("64T", "can grow to");
    refused("x", "not a size");
    // A volume inside a larger image also grows to its end.
    let inside = image.draconis.path("inside");
    let bytes = std::fs::read(&image.path).unwrap();
    std::fs::write(&inside, [vec![0; 1 << 20], bytes].concat()).unwrap();
    image.draconis.run_ok(["grow", "--offset", "1M", inside.to_str().unwrap(), "80M"]);
    assert_eq!(len(&inside), 81 << 20);
    let cut = image.draconis.path("cut");
    std::fs::write(&cut, &std::fs::read(&inside).unwrap()[1 << 20..]).unwrap();
    assert_fsck_clean(&cut);
}

#[test]
fn shrink_truncates_volume_and_file() {
    let image = TestImage::new(&["-t", "ext4", "-b", "1024"], "32M");
    let path = image.path.to_str().unwrap();
    let file = image.create_host_file("file", &[7; 3_000_000]);
    image.run_and_check(&["put", file.to_str().unwrap(), ":/file"]);
    let before = image.list_tree();
    let len = |path: &Path| std::fs::metadata(path).unwrap().len();
    image.run_and_check(&["shrink", "--progress", "always", path, "20000"]);
    assert_eq!(len(&image.path), 20_000 << 10);
    assert_fsck_clean(&image.path);
    let refused = |arguments: &[&str], why: &str| {
        let before = len(&image.path);
        let said = image.draconis.run_failing([&["shrink", path][..], arguments].concat());
        assert!(said.contains(why) && len(&image.path) == before, "{said}");
        assert_fsck_clean(&image.path);
    };
    refused(&["1M"], "can shrink to");
    refused(&["32M"], "draconis grow makes it larger");
    refused(&["x"], "not a size");
    image.run_and_check(&["shrink", "--min", path]);
    let least = len(&image.path);
    assert!(least < 9 << 20, "{least}");
    assert_fsck_clean(&image.path);
    // A second run changes nothing, and prints the size.
    let said = image.draconis.run_ok(["shrink", path]);
    assert!(said.contains(&format!("{least} bytes")), "{said}");
    assert_eq!(len(&image.path), least);
    // Tables near the end are freed only with their groups.
    let image_of_groups = TestImage::new(&["-t", "ext4", "-b", "1024", "-N", "65536"], "256M");
    let path_of_groups = image_of_groups.path.to_str().unwrap();
    image_of_groups.run_and_check(&["put", file.to_str().unwrap(), ":/file"]);
    image_of_groups.run_and_check(&["shrink", path_of_groups]);
    let least = len(&image_of_groups.path);
    assert_fsck_clean(&image_of_groups.path);
    image_of_groups.run_and_check(&["shrink", "--min", path_of_groups]);
    assert_eq!(len(&image_of_groups.path), least);
    assert_fsck_clean(&image_of_groups.path);
    assert_eq!(image.list_tree(), before);
    // Data behind the volume in a larger file stays.
    let longer = image.draconis.path("longer");
    image.run_and_check(&["grow", path, "20M"]);
    let bytes = std::fs::read(&image.path).unwrap();
    std::fs::write(&longer, [bytes, vec![5; 1 << 20]].concat()).unwrap();
    image.draconis.run_ok(["shrink", longer.to_str().unwrap(), "12M"]);
    assert_eq!(len(&longer), 21 << 20);
}

#[test]
fn tune_matches_tune2fs() {
    let image = TestImage::new(&["-t", "ext2", "-b", "1024"], "32M");
    let path = image.path.to_str().unwrap();
    let file = image.create_host_file("file", &[7; 300_000]);
    image.run_and_check(&["put", file.to_str().unwrap(), ":/file"]);
    let before = image.list_tree();
    let uuid = "01234567-89ab-4def-8123-456789abcdef";
    image.run_and_check(&[
        "tune",
        "-L",
        "tuned",
        "-U",
        uuid,
        "-m",
        "1.5",
        "-e",
        "remount-ro",
        path,
    ]);
    image.run_and_check(&["tune", "-c", "-1", "-i", "6m", "-J", "size=4", path]);
    assert_fsck_clean(&image.path);
    let told = image.draconis.run_ok(["info", path]);
    for expected in ["tuned", uuid, "has_journal", "ext3"] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    image.run_and_check(&["tune", "-O", "^has_journal,dir_index,large_file", path]);
    image.run_and_check(&["tune", path]);
    assert_fsck_clean(&image.path);
    assert_eq!(image.list_tree(), before);
    image.run_and_check(&[
        "tune",
        "-j",
        "-O",
        "orphan_file,project",
        "-Q",
        "usrquota,prjquota",
        path,
    ]);
    assert_fsck_clean(&image.path);
    image.run_and_check(&["tune", "-O", "^orphan_file,^has_journal", "-Q", "^usrquota", path]);
    assert_fsck_clean(&image.path);
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
        let said = image.draconis.run_failing([&["tune"][..], options, &[path]].concat());
        assert!(said.contains(why), "{said}");
    }
    assert_fsck_clean(&image.path);
}

/// Takes 11 s, the time that MMP waits for other hosts.
#[test]
fn volumes_with_mmp_are_changed() {
    let image = TestImage::new(&["-t", "ext4", "-b", "1024"], "32M");
    let path = image.path.to_str().unwrap();
    image.run_and_check(&["tune", "-O", "mmp", "-E", "mmp_update_interval=1", path]);
    assert_fsck_clean(&image.path);
    let file = image.create_host_file("file", &[7; 300_000]);
    image.run_and_check(&["put", file.to_str().unwrap(), ":/file"]);
    assert_fsck_clean(&image.path);
    let said = judge::dumpe2fs(&["-h"], path);
    assert!(said.contains("mmp_sequence: 0xff4d4d50"), "{said}");
    assert!(image.list_tree().contains("300000"), "{}", image.list_tree());
}

#[test]
fn volumes_in_use_and_other_files_are_refused() {
    let image = TestImage::new(&[], "8M");
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
        let said = image.draconis.run_failing(image.expand_arguments(line));
        assert!(said.contains("in use; unmount it first"), "{said}");
    }
    drop(file);
    let said = image.draconis.run_failing(["mkdir", "/nowhere/image:/x"]);
    assert!(said.contains("draconis format"), "{said}");
    let none = image.create_host_file("none", &[0; 100_000]);
    let said = image.draconis.run_failing(["mkdir", &format!("{}:/x", none.display())]);
    assert!(said.contains("not an ext volume"), "{said}");
    let wrong = image.draconis.run(["chmod", "u+q", &image.target("/")]);
    assert_eq!(wrong.status.code(), Some(2), "the command line makes no sense");
}

#[test]
fn full_volume_reports_no_space_and_stays_clean() {
    let image = TestImage::new(&["-b", "1024", "-N", "64"], "2M");
    let dir = image.draconis.make_dir("many");
    for nth in 0..100 {
        std::fs::write(dir.join(format!("{nth}")), b"").unwrap();
    }
    let said = image.draconis.run_failing(image.expand_arguments(&[
        "put",
        "-r",
        dir.to_str().unwrap(),
        ":/",
    ]));
    assert!(said.contains("no space left") && said.contains("larger volume"), "{said}");
    assert_fsck_clean(&image.path);
    image.run_and_check(&["rm", "-r", ":/many"]);
    assert_eq!(image.list_names("/"), ["lost+found"]);
    // Its contents would fit, but not the blocks that map them.
    let info = image.draconis.run_ok(["info", "--json", image.path.to_str().unwrap()]);
    let info: Value = serde_json::from_str(&info).unwrap();
    let len = info["free_blocks"].as_u64().unwrap() * 1024;
    let large = image.draconis.path("large");
    std::fs::write(&large, vec![7; len as usize]).unwrap();
    let put = image.expand_arguments(&["put", large.to_str().unwrap(), ":/"]);
    let errors = image.draconis.run_failing(put);
    assert!(errors.contains("no space left"), "{errors}");
    assert_fsck_clean(&image.path);
    assert_eq!(image.list_names("/"), ["lost+found"]);
}

#[test]
fn killed_command_leaves_clean_volume() {
    let image = TestImage::new(&["-b", "1024"], "256M");
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
        put.args(["put", "-r", tree.to_str().unwrap(), &image.target("/x")]).stderr(Stdio::null());
        put.spawn().unwrap()
    };
    let (put_status, whole) = draconis_testkit::wait::measure(|| put().wait().unwrap());
    assert!(put_status.success());
    image.run_and_check(&["rm", "-r", ":/x"]);
    let mut cut_off = 0;
    for nth in 1..=12 {
        let mut put = put();
        draconis_testkit::wait::pause("the kill comes at any moment", whole * nth / 12);
        put.kill().unwrap();
        put.wait().unwrap();
        judge::assert_preens(&image.path, "a killed put");
        assert_fsck_clean(&image.path);
        let there = image.list_names("/").contains(&"x".to_string());
        cut_off += u32::from(there && image.list_names("/x").len() < 2030);
        image.run_and_check(&["rm", "-rf", ":/x"]);
    }
    eprintln!("{cut_off} of 12 were cut off in the middle");
}
