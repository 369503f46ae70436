//! Archives and trees extracted over existing files, compared with GNU tar and checked by `e2fsck`.

use crate::common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::Draconis;
use draconis_testkit::judge;

/// A volume and a host directory with the same files.
struct VolumeAndHostDir {
    draconis: Draconis,
    image: PathBuf,
    dir: PathBuf,
}

fn run_shell(dir: &Path, script: &str) {
    let output = Command::new("bash").args(["-euc", script]).current_dir(dir).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {said}");
}

/// Returns every name below a directory, with type, link count and contents.
fn tree_at(dir: &Path) -> BTreeMap<String, String> {
    let script = "find . -mindepth 1 -name lost+found -prune -o -type d -printf '%P\\0d %m\\0' \
        -o -printf '%P\\0%y %m %n %l ' '(' -type f -exec cat {} ';' , -printf '\\0' ')'";
    let script = format!("{script} | cat");
    let output = Command::new("bash").args(["-c", &script]).current_dir(dir).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut found = BTreeMap::new();
    let mut words = text.split('\0').filter(|word| !word.is_empty());
    while let (Some(name), Some(what)) = (words.next(), words.next()) {
        found.insert(name.to_owned(), what.to_owned());
    }
    found
}

impl VolumeAndHostDir {
    /// Creates both with the files of a script.
    fn new(script: &str) -> Self {
        let draconis = Draconis::new();
        let (image, dir) = (draconis.path("image"), draconis.make_dir("dir"));
        run_shell(&dir, script);
        draconis.run_ok(["format", "-t", "ext4", image.to_str().unwrap(), "16M"]);
        let pair = Self { draconis, image, dir };
        let source = format!("{}/.", pair.dir.display());
        pair.draconis.run_ok(["put", "-r", &source, pair.target("/").as_str()]);
        pair
    }

    fn target(&self, path: &str) -> String {
        format!("{}:{path}", self.image.display())
    }

    /// Creates an archive of the files that a script creates in an empty directory.
    fn make_archive(&self, script: &str, arguments: &str) -> PathBuf {
        let archive = self.draconis.path("archive.tar");
        let from = tempfile::tempdir().unwrap();
        run_shell(from.path(), script);
        run_shell(from.path(), &format!("tar -cf {} {arguments}", archive.display()));
        archive
    }

    fn run_e2fsck(&self) {
        judge::assert_fsck_clean(&self.image);
    }

    fn list_tree(&self) -> BTreeMap<String, String> {
        let into = tempfile::tempdir().unwrap();
        let (image, into_path) = (self.image.display(), into.path().display());
        let program = crate::common::program();
        run_shell(into.path(), &format!("'{program}' tar {image} | tar -C {into_path} -xp"));
        tree_at(into.path())
    }

    /// Extracts an archive into both, and compares them.
    fn unpack_and_compare(&self, archive: &Path) {
        let file = archive.to_str().unwrap();
        let tar = "tar --keep-directory-symlink --warning=none -xpf";
        run_shell(&self.dir, &format!("{tar} {file}"));
        self.draconis.run_ok(["untar", "-f", file, self.image.to_str().unwrap()]);
        self.run_e2fsck();
        assert_eq!(self.list_tree(), tree_at(&self.dir));
    }

    /// Extracts an archive that must be refused without changing anything.
    fn assert_refused(&self, archive: &Path, why: &str) {
        let before = self.list_tree();
        let file = archive.to_str().unwrap();
        let said = self.draconis.run_failing(["untar", "-f", file, self.image.to_str().unwrap()]);
        assert!(said.contains(why), "{said}");
        self.run_e2fsck();
        assert_eq!(self.list_tree(), before);
    }
}

const MERGED_USR_SCRIPT: &str = "umask 022; mkdir -p usr/lib usr/bin/deep; ln -s usr/lib lib; \
    ln -s bin/deep usr/deep; ln -s ../../deep usr/lib/up; ln -s usr/lib/up ups; echo o > usr/lib/old";

#[test]
fn entries_follow_directory_symlinks() {
    let pair = VolumeAndHostDir::new(MERGED_USR_SCRIPT);
    let make = "umask 022; mkdir -p lib/modules/6.1 usr/deep; echo m > lib/modules/6.1/x.ko; \
        echo d > usr/deep/d; echo n > lib/old";
    // With and without directory entries.
    pair.unpack_and_compare(&pair.make_archive(make, "lib usr"));
    pair.unpack_and_compare(&pair.make_archive(make, "lib/modules/6.1/x.ko usr/deep/d lib/old"));
    // `put -r` behaves likewise.
    let from = pair.draconis.make_dir("from");
    run_shell(&from, "mkdir -p lib/put; echo p > lib/put/p");
    run_shell(&pair.dir, "mkdir usr/lib/put; echo p > usr/lib/put/p");
    let lib = from.join("lib");
    pair.draconis.run_ok(["put", "-r", lib.to_str().unwrap(), &pair.target("/")]);
    pair.run_e2fsck();
    assert_eq!(pair.list_tree(), tree_at(&pair.dir));
    // The parent of a volume's root is the root: `..` reaches no host files.
    let pair =
        VolumeAndHostDir::new("umask 022; mkdir in; ln -s ../../../../in away; ln -s away again");
    pair.draconis.run_ok([
        "untar",
        "-f",
        pair.make_archive("mkdir again; echo f > again/f", "again/f").to_str().unwrap(),
        pair.image.to_str().unwrap(),
    ]);
    pair.run_e2fsck();
    assert_eq!(pair.draconis.run_ok(["cat", &pair.target("/in/f")]), "f\n");
}

#[test]
fn aliased_paths_create_one_file() {
    let pair = VolumeAndHostDir::new(MERGED_USR_SCRIPT);
    // The second path takes the name of a file with another link, and of one without.
    let make = "umask 022; mkdir -p lib usr/lib; echo 1 > usr/lib/a; ln usr/lib/a b; \
        echo 2 > usr/lib/c; echo 3 > lib/a; echo 4 > lib/c";
    for packed in ["", "-z"] {
        let names = "usr/lib/a b usr/lib/c lib/a lib/c";
        let archive = pair.make_archive(make, &format!("{packed} {names}"));
        let file = archive.to_str().unwrap();
        pair.draconis.run_ok(["untar", "-f", file, pair.image.to_str().unwrap()]);
        pair.run_e2fsck();
        assert_eq!(pair.draconis.run_ok(["cat", &pair.target("/b")]), "1\n");
        for (name, either) in [("a", ["1\n", "3\n"]), ("c", ["2\n", "4\n"])] {
            let held = pair.draconis.run_ok(["cat", &pair.target(&format!("/lib/{name}"))]);
            assert!(either.contains(&held.as_str()), "{name}: {held}");
        }
    }
}

#[test]
fn hard_links_to_existing_volume_files() {
    let pair =
        VolumeAndHostDir::new("umask 022; mkdir d; echo x > d/a; echo y > single; ln -s d to");
    let both = "umask 022; mkdir -p d to; echo x > d/a; ln d/a b; ln d/a c; echo z > e";
    let archive = pair.make_archive(both, "d/a b c e");
    run_shell(archive.parent().unwrap(), "tar --delete -f archive.tar d/a");
    pair.unpack_and_compare(&archive);
    // Through a symbolic link to a directory.
    let make = "umask 022; mkdir to; echo x > to/a; ln to/a d2";
    let archive = pair.make_archive(make, "to/a d2");
    run_shell(archive.parent().unwrap(), "tar --delete -f archive.tar to/a");
    pair.unpack_and_compare(&archive);
    // The archive replaces the target after creating the link.
    let archive = pair.make_archive("echo new > single; ln single kept", "single kept");
    let add = "tar --delete -f archive.tar single; echo new > single; tar -rf archive.tar single";
    run_shell(archive.parent().unwrap(), add);
    pair.unpack_and_compare(&archive);
    assert_eq!(pair.draconis.run_ok(["cat", &pair.target("/kept")]), "y\n");
    // The target does not exist, or is a directory.
    for (target, why) in [("gone", "neither before it"), ("d", "which is a directory")] {
        let archive =
            pair.make_archive(&format!("echo > {target}; ln {target} l"), &format!("{target} l"));
        run_shell(archive.parent().unwrap(), &format!("tar --delete -f archive.tar {target}"));
        pair.assert_refused(&archive, why);
        let other = pair.draconis.path("other");
        let from = ["format", "--from", archive.to_str().unwrap(), other.to_str().unwrap()];
        assert!(pair.draconis.run_failing(from).contains("later in the archive or never"));
    }
}

#[test]
fn entries_of_other_type_are_replaced() {
    let kinds = [
        "mkdir x",
        "echo f > x",
        "ln -s nowhere x",
        "echo h > y; ln y x",
        "mkfifo x",
        "mkdir x; echo in > x/in",
    ];
    for before in kinds {
        for after in kinds {
            let is_full = before.contains("x/in") && !after.contains("mkdir");
            let pair = VolumeAndHostDir::new(&format!("umask 022; {before}"));
            let archive =
                pair.make_archive(&format!("umask 022; {after}"), "--exclude=./y . ./y x");
            let archive = match after.contains("ln y") {
                true => archive,
                false => pair.make_archive(&format!("umask 022; {after}"), "x"),
            };
            match is_full {
                true => pair.assert_refused(&archive, "rm -r removes it"),
                false => pair.unpack_and_compare(&archive),
            }
        }
    }
    // An implied directory replaces nothing.
    let pair = VolumeAndHostDir::new("echo f > x");
    let archive = pair.make_archive("mkdir x; echo f > x/f", "x/f");
    pair.assert_refused(&archive, "no directory");
    // `cp` refuses this, as GNU cp does.
    let from = pair.target("/d");
    pair.draconis.run_ok(["mkdir", "-p", &pair.target("/d/x")]);
    let said = pair.draconis.run_failing(["cp", "-r", &pair.target("/d/x"), &pair.target("/")]);
    assert!(said.contains("remove it first"), "{from}: {said}");
    pair.run_e2fsck();
}

#[test]
fn dot_dot_components_stay_inside() {
    let pair = VolumeAndHostDir::new("mkdir a");
    let make = "mkdir a; echo f > f; ln f g";
    let archive = pair.make_archive(make, "-P --transform='s,^,a/../,' f g");
    for command in [vec!["untar", "-f"], vec!["format", "--force", "--from"]] {
        let arguments = [archive.to_str().unwrap(), pair.image.to_str().unwrap()];
        pair.draconis.run_ok(command.iter().copied().chain(arguments));
        pair.run_e2fsck();
        let tree = pair.list_tree();
        assert_eq!((&tree["f"], &tree["g"]), (&"f 644 2  f\n".into(), &"f 644 2  f\n".into()));
    }
    let archive = pair.make_archive(make, "-P --transform='s,^,a/../../,' f");
    pair.assert_refused(&archive, "out of the archive");
}

/// Sets owner and group of all entries: signed 64-bit in base 256, or octal.
fn set_owners(archive: &Path, id: i64) {
    let mut bytes = std::fs::read(archive).unwrap();
    for header in bytes.chunks_exact_mut(512).filter(|header| &header[257..262] == b"ustar") {
        let coded = (i128::from(id) | 1 << 63).to_be_bytes();
        header[108..116].copy_from_slice(&coded[8..]);
        header[116..124].copy_from_slice(&coded[8..]);
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    std::fs::write(archive, bytes).unwrap();
}

fn owner_of(pair: &VolumeAndHostDir, path: &str) -> (u64, u64) {
    let said = pair.draconis.run_ok(["stat", "--json", &pair.target(path)]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    (said[0]["uid"].as_u64().unwrap(), said[0]["gid"].as_u64().unwrap())
}

#[test]
fn large_owner_ids_are_accepted() {
    let pair = VolumeAndHostDir::new("");
    let image = pair.image.to_str().unwrap();
    let low = u64::from(u32::MAX);
    for (id, taken) in [(-2, low - 1), (-1, 0), (5_000_000_000, 705_032_704), (i64::MIN, 0)] {
        let archive = pair.make_archive("echo x > f", "f");
        set_owners(&archive, id);
        let file = archive.to_str().unwrap();
        for (arguments, owner) in [
            (&["untar", "-f", file, image][..], taken),
            (&["format", "--force", "--from", file, image], taken),
            (&["format", "--force", "--owner", "5:5", "--from", file, image], 5),
            (&["format", "--force", "--squash", "--from", file, image], 0),
            (&["untar", "--owner", "6:6", "-f", file, image], 6),
        ] {
            pair.draconis.run_ok(arguments);
            pair.run_e2fsck();
            assert_eq!(owner_of(&pair, "/f"), (owner, owner), "{id}: {arguments:?}");
        }
    }
    // In pax records: beyond 64 bits, too, and a text that is no number.
    for (id, taken) in [("-2", Some(low - 1)), ("36893488147419103237", Some(5)), ("x", None)] {
        let archive = pair.make_archive(
            "echo x > f",
            &format!("--format=pax --pax-option=uid:={id},gid:={id} f"),
        );
        let file = archive.to_str().unwrap();
        let untar = ["untar", "-f", file, image];
        match taken {
            Some(taken) => {
                pair.draconis.run_ok(untar);
                assert_eq!(owner_of(&pair, "/f"), (taken, taken), "{id}");
            }
            None => assert!(pair.draconis.run_failing(untar).contains("no number")),
        }
        pair.draconis.run_ok(["untar", "--owner", "6:6", "-f", file, image]);
        pair.run_e2fsck();
        assert_eq!(owner_of(&pair, "/f"), (6, 6));
    }
}

const ACL_SCRIPT: &str = "umask 022; mkdir d p; echo x > f; echo y > d/g; echo z > plain; ln -s f l
    chmod 640 f; setfacl -m u:1234:rw,g:77:x f; setfacl -m d:u:55:rx,d:g:66:rwx d; chmod 2750 d
    setfacl -m u:9:rwx d; setfattr -n 'user.a%3Db=c%25d%' -v 'v=1' f; setfattr -n user.é -v 2 f
    setfattr -n user.plain -v 3 d; setfattr -n security.selinux -v 0x753a6f626a6563743a7300 plain || true";

/// Returns ACLs and attributes of everything below a directory, as the host's tools show them.
fn dump_acls_and_xattrs(dir: &Path) -> String {
    let script = "getfacl -nR . 2>/dev/null | sed '/^# owner/d;/^# group/d'; \
        find . -type f -o -type d | sort | while read -r name; do \
        getfattr -hd -m - -e hex \"$name\" 2>/dev/null; done";
    let output = Command::new("bash").args(["-c", script]).current_dir(dir).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // Only the volume has lost+found.
    text.split("\n\n").filter(|it| !it.contains("lost+found")).collect::<Vec<_>>().join("\n\n")
}

#[test]
fn acls_and_xattr_names_round_trip() {
    let tools = ["setfacl", "getfacl", "setfattr", "getfattr"];
    let has = |tool: &&str| Command::new(tool).arg("--version").output().is_ok();
    if !common::is_root() || !tools.iter().all(has) {
        common::report_skipped("lists of rights need root and the packages acl and attr");
        return;
    }
    let gnu = "--acls --xattrs --xattrs-include='*' --selinux";
    let draconis = Draconis::new();
    let dir = draconis.make_dir("dir");
    run_shell(&dir, ACL_SCRIPT);
    let wanted = dump_acls_and_xattrs(&dir);
    for what in ["user:1234:rw-", "default:group:66:rwx", "user.a%3Db\\075c%25d%"] {
        assert!(wanted.contains(what), "{what}: {wanted}");
    }
    let (image, archive) = (draconis.path("image"), draconis.path("archive.tar"));
    run_shell(&dir, &format!("tar {gnu} --format=pax -cf {} .", archive.display()));
    let alone = draconis.path("acls.tar");
    run_shell(&dir, &format!("tar --acls --format=pax -cf {} .", alone.display()));
    let program = crate::common::program();
    let shown = image.to_str().unwrap();
    for from in [&dir, &archive, &alone] {
        let from = from.to_str().unwrap();
        draconis.run_ok(["format", "-t", "ext4", "--force", "--from", from, shown, "16M"]);
        for again in [false, true] {
            if again && !from.ends_with("dir") {
                draconis.run_ok(["format", "-t", "ext4", "--force", shown, "16M"]);
                draconis.run_ok(["untar", "-f", from, shown]);
            }
            judge::assert_fsck_clean(shown);
            let into = tempfile::tempdir().unwrap();
            run_shell(into.path(), &format!("'{program}' tar '{shown}' | tar {gnu} -xp"));
            let found = dump_acls_and_xattrs(into.path());
            match from.ends_with("acls.tar") {
                true => {
                    let lists = |text: &str| {
                        let blocks = text.split("\n\n").filter(|it| it.contains("::"));
                        blocks.map(str::to_owned).collect::<Vec<_>>()
                    };
                    assert_eq!(lists(&found), lists(&wanted), "{from}");
                }
                false => assert_eq!(found, wanted, "{from}"),
            }
            // An ACL equal to the mode is not stored.
            let said = judge::debugfs(shown, "ea_list plain");
            assert!(!said.contains("posix_acl"), "{said}");
        }
    }
}

#[test]
fn large_xattrs_use_ea_inodes() {
    let pair = VolumeAndHostDir::new("");
    let image = pair.image.to_str().unwrap();
    let value = |byte: &str, len: usize| byte.repeat(len);
    let big = format!(
        "--format=pax --pax-option=SCHILY.xattr.user.big:={},SCHILY.xattr.user.half:={},\
         SCHILY.xattr.user.small:=s",
        value("b", 9000),
        value("h", 3000)
    );
    let make = "mkdir d; echo x > f; echo y > d/g; mkfifo p; chown 7:8 d/g; ln d/g h";
    let archive = pair.make_archive(make, &format!("{big} f d p h"));
    let file = archive.to_str().unwrap();
    for (options, size) in [
        ("-t ext4 -O ea_inode -b 4096", "64M"),
        ("-t ext4 -O ea_inode", "64M"),
        ("-t ext4 -O ea_inode", ""),
        ("-t ext4 -O ea_inode,quota,project,orphan_file -b 4096", "64M"),
        ("-t ext4 -O ea_inode,quota,^metadata_csum -b 1024", "32M"),
        ("-t ext4 -O ea_inode,bigalloc,quota -C 16384 -b 4096", "64M"),
        ("-t ext4 -O ea_inode,inline_data -I 512", ""),
        ("-t ext2 -O ea_inode -b 2048", "16M"),
        ("-t ext3 -O ea_inode -I 128", ""),
    ] {
        let words = options.split(' ').chain(["--force", "--from", file, image]);
        pair.draconis.run_ok(["format"].into_iter().chain(words).chain(size.split_whitespace()));
        pair.run_e2fsck();
        let out = pair.draconis.path("value");
        for path in ["f", "d", "d/g", "p"] {
            for (name, wanted) in [("big", value("b", 9000)), ("half", value("h", 3000))] {
                let request = format!("ea_get -f {} {path} user.{name}", out.display());
                judge::debugfs(image, &request);
                let found = std::fs::read_to_string(&out).unwrap();
                assert_eq!(found, wanted, "{options}: {path}");
                std::fs::remove_file(&out).unwrap();
            }
        }
        // EA inodes are deleted with their files.
        pair.draconis.run_ok([
            "rm",
            "-r",
            &pair.target("/f"),
            &pair.target("/d"),
            &pair.target("/h"),
        ]);
        pair.run_e2fsck();
    }
    let formats = ["format", "-t", "ext4", "--force", "-b", "1024", "--from", file, image];
    assert!(pair.draconis.run_failing(formats).contains("ea_inode"));
}

#[test]
fn block_size_fits_xattrs() {
    let pair = VolumeAndHostDir::new("");
    let image = pair.image.to_str().unwrap();
    let value = "v".repeat(3000);
    let option = format!("--format=pax --pax-option=SCHILY.xattr.user.big:={value} f");
    let long = format!("ln -s {} f", "t".repeat(2000).replace("tttttttttt", "t/tttttttt"));
    for archive in [("echo x > f", option.as_str()), (long.as_str(), "f")] {
        let archive = pair.make_archive(archive.0, archive.1);
        let file = archive.to_str().unwrap();
        for size in ["16M", ""] {
            let line = ["format", "-t", "ext4", "--force", "--from", file, image];
            pair.draconis.run_ok(line.into_iter().chain(size.split_whitespace()));
            pair.run_e2fsck();
            let info = pair.draconis.run_ok(["info", "--json", image]);
            assert!(info.replace(' ', "").contains("4096"), "{info}");
        }
        let small = ["format", "-t", "ext4", "--force", "-b", "1024", "--from", file, image];
        assert!(pair.draconis.run_failing(small).contains("-b"));
    }
}
