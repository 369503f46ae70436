//! Random trees through archives in both directions: archives of GNU tar and bsdtar must unpack as
//! with these tools, and they must unpack archives of `draconis tar` to the original tree.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::volume::run_e2fsck;
use crate::common::{
    Draconis, FileProperties, IgnoredProperties, KernelMount, has_root, has_tool, mke2fs, scan_tree,
};
use draconis_device::Random;
use rustix::fs::{AtFlags, CWD, FileType, Timespec, Timestamps, XattrFlags};

/// A random tree with names, types, owners, times and attributes that are hard to preserve.
struct RandomTree {
    random: Random,
    dirs: Vec<PathBuf>,
    others: Vec<PathBuf>,
    /// True if the tree must fit a format without extensions.
    is_plain: bool,
}

impl RandomTree {
    fn make_random_tree(top: &Path, seed: u64, is_plain: bool) {
        let count = 120;
        let mut tree = Self {
            random: Random::new(seed),
            dirs: vec![top.to_owned()],
            others: vec![],
            is_plain,
        };
        for _ in 0..count {
            tree.add_random_node();
        }
        let hard = tree.others.clone();
        for nth in 0..count / 8 {
            let Some(from) = hard.get((nth * 7) as usize % hard.len().max(1)) else { break };
            let to = tree.new_path();
            // Some file systems do not support hard links to every file type.
            if std::fs::hard_link(from, &to).is_ok() {
                tree.others.push(to);
            }
        }
        for path in tree.others.clone().iter().chain(tree.dirs.clone()[1..].iter().rev()) {
            tree.set_metadata(path);
        }
        // Adding entries has changed the times of the directories.
        for path in tree.dirs.clone()[1..].iter().rev() {
            tree.set_random_times(path);
        }
    }

    fn pick_one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.next_below(of.len() as u64) as usize]
    }

    /// Returns a new path in one of the directories.
    fn new_path(&mut self) -> PathBuf {
        loop {
            let lens: &[usize] = match self.is_plain {
                true => &[1, 3, 8, 12],
                false => &[1, 3, 8, 8, 12, 12, 20, 30, 99, 100, 101, 155, 255],
            };
            let len = self.pick_one(lens);
            let kind = self.random.next_below(6);
            let mut name = vec![];
            while name.len() < len {
                let byte = match kind {
                    0 => 1 + self.random.next_below(255) as u8,
                    1 => self.pick_one(b"\\\n\r\t -=%*?[]'\"$;:&.~"),
                    2 => self.pick_one(b"\xC3\xA9"),
                    _ => self.pick_one(b"abcdefghijklmnopqrstuvwxyz0123456789._- "),
                };
                name.push(if byte == b'/' { b'_' } else { byte });
            }
            let dir = self.random.next_below(self.dirs.len() as u64) as usize;
            let path = self.dirs[dir].join(OsStr::from_bytes(&name));
            let is_free = path.symlink_metadata().is_err();
            if is_free && name != b"." && name != b".." && path.as_os_str().len() < 3000 {
                return path;
            }
        }
    }

    fn add_random_node(&mut self) {
        let path = self.new_path();
        match self.random.next_below(10) {
            0..=2 => {
                std::fs::create_dir(&path).unwrap();
                self.dirs.push(path);
                return;
            }
            3 => {
                let lens = [1, 40, 59, 60, 99, 100, 101, 300, 1000];
                let len = self.pick_one(if self.is_plain { &lens[..4] } else { &lens });
                let mut target =
                    self.pick_one(&[b"", &b"../"[..], b"/", b"../../x/../", b"\xFF\xFE"]).to_vec();
                while target.len() < len {
                    let byte = self.pick_one(b"abc/.\n\xFF");
                    target.push(byte);
                }
                symlink(OsStr::from_bytes(&target), &path).unwrap();
            }
            4 => {
                let kind = self.pick_one(&[
                    FileType::CharacterDevice,
                    FileType::BlockDevice,
                    FileType::Fifo,
                ]);
                let minors: &[u32] =
                    if self.is_plain { &[0, 255, 256] } else { &[0, 256, 1 << 19] };
                let (major, minor) = (self.pick_one(&[0, 1, 255, 4095]), self.pick_one(minors));
                let device = match kind {
                    FileType::Fifo => 0,
                    _ => rustix::fs::makedev(major, minor),
                };
                let mode = rustix::fs::Mode::from_raw_mode(0o640);
                rustix::fs::mknodat(CWD, &path, kind, mode, device).unwrap();
            }
            kind => {
                let file = std::fs::File::create(&path).unwrap();
                let pieces = self.random.next_below(if kind < 7 { 2 } else { 7 });
                let spread = self.pick_one(&[1, 5000, 70_000, 3 << 20]);
                for _ in 0..pieces {
                    let mut bytes = vec![0; self.pick_one(&[0, 1, 511, 512, 513, 4096, 20_000])];
                    self.random.fill(&mut bytes);
                    file.write_all_at(&bytes, self.random.next_below(spread)).unwrap();
                }
                if self.random.once_in(3) {
                    let more = self.random.next_below(spread);
                    file.set_len(file.metadata().unwrap().len() + more).unwrap();
                }
            }
        }
        self.others.push(path);
    }

    /// Sets owner, mode, attributes and times.
    fn set_metadata(&mut self, path: &Path) {
        let kind = path.symlink_metadata().unwrap().file_type();
        let ids = [0, 1, 1000, 65_534, 2_097_151, 2_097_152, 4_000_000_000];
        let ids = if self.is_plain { &ids[..4] } else { &ids };
        let owner = (Some(self.pick_one(ids)), Some(self.pick_one(ids)));
        if kind.is_symlink() {
            lchown(path, owner.0, owner.1).unwrap();
        } else {
            chown(path, owner.0, owner.1).unwrap();
            let mode =
                self.pick_one(&[0, 0o400, 0o644, 0o755, 0o777, 0o4755, 0o2711, 0o1777, 0o6111]);
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
        if kind.is_dir() || kind.is_file() {
            for _ in 0..self.random.next_below(4) {
                let name = self.pick_one(&[
                    &b"user.plain"[..],
                    b"user.a=b%c",
                    b"user.%3D",
                    b"user.with space",
                    b"user.\xFF\xC3",
                    b"user.a\nb",
                    b"user.A.b/c",
                    b"trusted.of=root",
                    b"security.selinux",
                ]);
                let mut value = vec![0; self.pick_one(&[0, 1, 30, 200])];
                self.random.fill(&mut value);
                if name == b"security.selinux" {
                    value = b"system_u:object_r:etc_t:s0\0".to_vec();
                }
                rustix::fs::lsetxattr(path, OsStr::from_bytes(name), &value, XattrFlags::empty())
                    .unwrap();
            }
            if self.random.once_in(4) {
                self.set_acl(path, "system.posix_acl_access");
            }
            if kind.is_dir() && self.random.once_in(3) {
                self.set_acl(path, "system.posix_acl_default");
            }
        }
        if kind.is_file() && self.random.once_in(6) {
            let mut value = vec![1, 0, 0, 2, 0, 4];
            value.resize(20, 0);
            rustix::fs::lsetxattr(path, "security.capability", &value, XattrFlags::empty())
                .unwrap();
        }
        self.set_random_times(path);
    }

    /// Sets an access control list.
    fn set_acl(&mut self, path: &Path, name: &str) {
        let mut entries = vec![(1u16, u32::MAX), (4, u32::MAX), (16, u32::MAX), (32, u32::MAX)];
        for tag in [2, 8] {
            for id in [0, 7, 1234, 2_000_000_000] {
                if self.random.once_in(3) {
                    entries.push((tag, id));
                }
            }
        }
        entries.sort_unstable();
        let mut bytes = 2u32.to_le_bytes().to_vec();
        for (tag, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend((self.random.next_below(8) as u16).to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        rustix::fs::lsetxattr(path, name, &bytes, XattrFlags::empty()).unwrap();
    }

    fn set_random_times(&mut self, path: &Path) {
        let seconds = [0, 1, 1_700_000_000, 4_294_967_296, -2_000_000_000, -86_400, -1];
        let seconds = self.pick_one(if self.is_plain { &seconds[..4] } else { &seconds });
        let nanoseconds = self.pick_one(&[0, 1, 500_000_000, 999_999_999, 120_000_000]);
        let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}

/// A volume mounted by the kernel.
struct ScratchVolume {
    image: PathBuf,
    kernel: KernelMount,
}

impl ScratchVolume {
    fn new(draconis: &Draconis, name: &str) -> Self {
        let image = draconis.path(&format!("{name}.img"));
        mke2fs(&image, None, &["-t", "ext4", "-b", "4096"], "192M");
        let at = draconis.make_dir(name);
        let mut mount = Command::new("mount");
        let status = mount.args(["-o", "loop,user_xattr,acl"]).arg(&image).arg(&at).status();
        assert!(status.unwrap().success());
        Self { image, kernel: KernelMount { at } }
    }

    fn tree_properties(&self) -> BTreeMap<PathBuf, FileProperties> {
        tree_properties_below(&self.kernel.at)
    }
}

/// Describes everything below a directory that a copy can preserve.
fn tree_properties_below(top: &Path) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = scan_tree(top, IgnoredProperties { what_a_copy_loses: true, fractions: false });
    seen.remove(Path::new(""));
    seen.remove(Path::new("lost+found"));
    seen
}

fn run_shell(script: &str) -> (bool, String) {
    let output = Command::new("bash").args(["-c", script]).stdin(Stdio::null()).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// An archiver.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ArchiveTool {
    Gnu,
    Bsd,
}
use ArchiveTool::{Bsd, Gnu};

impl ArchiveTool {
    /// Returns the command, with the options for features that only pax archives have.
    fn create_command(self, is_pax: bool, locale: &str) -> String {
        let (tool, only_pax) = match self {
            Gnu => ("tar", "--acls --xattrs --xattrs-include='*' --selinux"),
            Bsd => ("bsdtar", "--acls --xattrs"),
        };
        let only_pax = if is_pax { only_pax } else { "" };
        format!("LC_ALL={locale} {tool} {only_pax} --numeric-owner")
    }

    /// Removes what bsdtar gets wrong: negative fractions of seconds, hard links of devices, and
    /// attribute names that GNU tar encodes.
    fn remove_known_flaws(
        self,
        mut seen: BTreeMap<PathBuf, FileProperties>,
    ) -> BTreeMap<PathBuf, FileProperties> {
        for one in seen.values_mut().filter(|_| self == Bsd) {
            if one.times[1].0 <= 0 {
                one.times[1] = (0, 0);
            }
            if !matches!(one.mode & 0o170_000, 0o100_000 | 0o120_000) {
                one.links = 1;
            }
            let is_coded = |name: &[u8]| matches!(name, b"user.a%3Db%25c" | b"user.%253D");
            one.xattrs.retain(|name, _| !is_coded(name) && name != b"trusted.of%3Droot");
        }
        seen
    }
}

fn has_archive_tools(test: &str) -> bool {
    has_root(test) && has_tool(test, "bsdtar") && has_tool(test, "tar")
}

/// Asserts that two descriptions are equal; the panic message shows the differences.
fn assert_trees_equal(
    what: &str,
    ours: &BTreeMap<PathBuf, FileProperties>,
    wanted: &BTreeMap<PathBuf, FileProperties>,
) {
    let line = |seen: Option<&FileProperties>| {
        let Some(it) = seen else { return "nothing".to_owned() };
        let xattrs = it.xattrs.iter().map(|(name, value)| {
            format!(" {}={}", name.escape_ascii(), value[..value.len().min(12)].escape_ascii())
        });
        let xattrs: String = xattrs.collect();
        let FileProperties { mode, links, owner, size, device, times, target, sum, .. } = it;
        let time = times[1];
        format!("{mode:o} {links} {owner:?} {size} {device:x} {time:?} {target:?} {sum:x}{xattrs}")
    };
    let paths = ours.keys().chain(wanted.keys());
    let told = paths.filter(|path| ours.get(*path) != wanted.get(*path)).take(4).map(|path| {
        let bytes = path.as_os_str().as_bytes();
        let end = bytes[bytes.len().saturating_sub(50)..].escape_ascii();
        format!("{end}\n  {}\n  {}\n", line(ours.get(path)), line(wanted.get(path)))
    });
    let told: String = told.collect();
    assert!(told.is_empty(), "{what}\n{told}");
}

#[test]
#[ignore = "tools: bsdtar"]
fn archives_of_other_tools_are_unpacked() {
    if !has_archive_tools("archives of random trees") {
        return;
    }
    for seed in test_seeds() {
        let draconis = Draconis::new();
        let (tree, plain) =
            (ScratchVolume::new(&draconis, "tree"), ScratchVolume::new(&draconis, "plain"));
        RandomTree::make_random_tree(&tree.kernel.at, seed, false);
        RandomTree::make_random_tree(&plain.kernel.at, seed, true);
        for (tool, format, locale) in [
            (Gnu, "v7", "C"),
            (Gnu, "oldgnu --sparse", "C"),
            (Gnu, "gnu --sparse", "C"),
            (Gnu, "ustar", "C"),
            (Gnu, "posix --sparse", "C.UTF-8"),
            (Gnu, "posix --sparse --sparse-version=0.0", "C"),
            (Gnu, "posix --sparse --sparse-version=0.1", "C"),
            (Bsd, "pax", "C.UTF-8"),
            (Bsd, "paxr", "C.UTF-8"),
            (Bsd, "ustar", "C.UTF-8"),
            (Bsd, "gnutar", "C.UTF-8"),
        ] {
            let archive = draconis.path("archive.tar");
            let shown = archive.display();
            let from = if matches!(format, "v7" | "ustar") { &plain } else { &tree };
            let at = from.kernel.at.display();
            let is_pax = format.starts_with('p');
            let command = tool.create_command(is_pax, locale);
            let what = format!("seed {seed}, {command} --format={format}");
            // They report and skip what the format cannot hold.
            run_shell(&format!(
                "cd {at} && {command} --format={format} --exclude=./lost+found -cf {shown} ."
            ));
            // GNU tar checks its own archives; bsdtar cannot read everything that it writes.
            let theirs = ScratchVolume::new(&draconis, "theirs");
            let into = theirs.kernel.at.display();
            let (_, said) = run_shell(&format!("{command} -xpf {shown} -C {into}"));
            let wanted = if is_pax && tool == Bsd {
                from.tree_properties()
            } else {
                theirs.tree_properties()
            };
            let wanted = tool.remove_known_flaws(wanted);
            assert!(wanted.len() > 70, "{what}: {} files, {said}", wanted.len());
            let image = draconis.path("ours.img");
            let (ours, file) = (image.to_str().unwrap(), archive.to_str().unwrap());
            let format: [&[&str]; 2] = [&["--from", file, ours], &["-b", "4096", ours, "192M"]];
            for (arguments, way) in format.into_iter().zip(["--from", "untar"]) {
                draconis.run_ok([&["format", "-t", "ext4", "--force"], arguments].concat());
                if way == "untar" {
                    draconis.run_ok(["untar", "-f", file, ours]);
                }
                run_e2fsck(&image);
                let kernel =
                    KernelMount::mount(&image, draconis.path("ours"), "random trees").unwrap();
                let seen = tool.remove_known_flaws(tree_properties_below(&kernel.at));
                assert_trees_equal(&format!("{what}, {way}"), &seen, &wanted);
            }
        }
    }
}

#[test]
#[ignore = "tools: bsdtar"]
fn our_archives_unpack_with_other_tools() {
    if !has_archive_tools("archives of random volumes") {
        return;
    }
    for seed in test_seeds() {
        let draconis = Draconis::new();
        let tree = ScratchVolume::new(&draconis, "tree");
        RandomTree::make_random_tree(&tree.kernel.at, seed + 1000, false);
        let (wanted, image) = (tree.tree_properties(), tree.image.clone());
        drop(tree);
        let program = crate::common::program();
        for (tool, sparse, locale) in [
            (Gnu, "auto", "C"),
            (Gnu, "always", "C.UTF-8"),
            (Bsd, "auto", "C.UTF-8"),
            (Bsd, "always", "C.UTF-8"),
            (Bsd, "never", "C.UTF-8"),
        ] {
            let into = ScratchVolume::new(&draconis, "into");
            let (at, shown) = (into.kernel.at.display(), image.display());
            let command = tool.create_command(true, locale);
            let (is_done, said) = run_shell(&format!(
                "set -o pipefail
                '{program}' tar --sparse={sparse} {shown} | {command} -xpf - -C {at}"
            ));
            let what = format!("seed {seed}, --sparse={sparse}, {command}");
            assert!(is_done, "{what}: {said}");
            assert_trees_equal(
                &what,
                &tool.remove_known_flaws(into.tree_properties()),
                &tool.remove_known_flaws(wanted.clone()),
            );
        }
    }
}

/// Returns the seeds: from `DRACONIS_SEEDS` (`3..9`), or the defaults.
fn test_seeds() -> std::ops::Range<u64> {
    let range = std::env::var("DRACONIS_SEEDS").unwrap_or_default();
    let ends = range.split_once("..");
    let ends = ends.and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.unwrap_or(0..2)
}
