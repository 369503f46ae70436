//! Shared test code: images, mounts, and comparisons of trees.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod bucket;
pub mod export;
pub mod volume;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use draconis_device::Random;
pub use draconis_testkit::judge::mke2fs;
use draconis_testkit::wait::wait_for;
pub use draconis_testkit::wait::wait_until;
pub use draconis_testkit::{report_skipped, unmount_and_wait};
use draconis_types::lock::RwLock;

/// Unmounts `at` by a program other than ours. Repeats that while the mount is busy: the status
/// command of another test looks at all mounts, which makes each busy for a moment.
pub fn unmount_by(words: &[&str], at: &Path) {
    wait_until(&format!("{words:?} has unmounted {}", at.display()), || {
        Command::new(words[0]).args(&words[1..]).arg(at).status().unwrap().success()
    });
}

/// Read-locked while a mount is unmounted, locked for writing while a mount namespace has copies of
/// the mounts of other tests: those would go on until the copies end.
pub static MOUNT_COPIES: RwLock<()> = RwLock::new(());

/// The program under test, with its own manager.
pub struct Draconis {
    pub dir: tempfile::TempDir,
    /// Name of an injected fault.
    pub leaves_out: Option<String>,
}

/// Beginning of a script in a mount namespace of its own: user 1000 can mount `a.img` on `at`.
pub const USER_CAN_MOUNT: &str = r#"
    chmod 755 .
    mkdir dev
    mount -t tmpfs -o mode=755 tmpfs dev
    mknod -m 666 dev/fuse c 10 229
    mount --bind dev/fuse /dev/fuse
    chown 1000:1000 a.img at run
    as_user() { setpriv --reuid 1000 --regid 1000 --clear-groups "$@"; }
"#;

impl Draconis {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), leaves_out: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn make_dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(program());
        command.env("DRACONIS_RUNTIME_DIR", self.make_dir("run")).stdin(Stdio::null());
        command.envs(self.leaves_out.iter().map(|what| ("DRACONIS_BREAK", what)));
        command
    }

    /// Runs a command; returns its output.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        let arguments: Vec<_> =
            arguments.into_iter().map(|word| word.as_ref().to_owned()).collect();
        let unmounts = arguments.first().is_some_and(|word| word == "umount");
        let _no_copies = unmounts.then(|| MOUNT_COPIES.read());
        self.command().args(arguments).output().unwrap()
    }

    /// Starts a shell with `script` as root in a mount namespace of its own, which has of our mounts
    /// only those of this test.
    pub fn spawn_in_mount_namespace(&self, script: &str) -> Child {
        let _copies = MOUNT_COPIES.write();
        let script = format!(
            "awk -v own=\"$PWD/\" '$3 ~ /draconis/ && index($2, own) != 1 {{ print $2 }}' \
                 /proc/self/mounts | xargs -r -d '\\n' umount -l\necho >ready\n{script}"
        );
        let ready = self.path("ready");
        let _ = std::fs::remove_file(&ready);
        let mut shell = Command::new("unshare");
        shell.args(["-m", "--propagation", "private", "sh", "-euc", &script]);
        shell.env("DRACONIS", program()).env("DRACONIS_RUNTIME_DIR", self.make_dir("run"));
        shell.current_dir(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        wait_until("the namespace has no copies", || {
            ready.exists() || shell.try_wait().unwrap().is_some()
        });
        shell
    }

    /// Returns the path of the socket of the manager of this mount namespace.
    pub fn manager_socket(&self) -> PathBuf {
        self.path("run").join(draconis_service::client::manager_socket_name())
    }

    /// Runs a command that must succeed; returns its output.
    pub fn run_ok<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {errors}", output.status);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a command that must fail with status 1; returns its error output.
    pub fn run_failing<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        errors
    }

    /// Returns the names of the disks and snapshots of a store, in order.
    pub fn store_names(&self, store: &str) -> Vec<String> {
        let listed = self.run_ok([
            OsStr::new("store"),
            "ls".as_ref(),
            "--json".as_ref(),
            self.path(store).as_ref(),
        ]);
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        let objects = listed.as_array().unwrap().iter();
        let names = objects.flat_map(|object| object["names"].as_array().unwrap().clone());
        let mut names: Vec<_> = names.map(|name| name.as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    pub fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.run_ok(["status", "--json"])).unwrap()
    }

    /// Mounts `image` on the directory `name`.
    pub fn mount(&self, image: &Path, name: &str, options: &str) -> PathBuf {
        let at = self.make_dir(name);
        let output = self.run([
            "mount".as_ref(),
            "-o".as_ref(),
            options.as_ref(),
            image.as_os_str(),
            at.as_os_str(),
        ]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        at
    }
}

impl Drop for Draconis {
    fn drop(&mut self) {
        // Unmounts what a failed test left mounted; the manager then exits by itself.
        for at in mounts_below(self.dir.path()) {
            let _ = Command::new("umount").arg("-l").arg(&at).stderr(Stdio::null()).status();
            let _ = Command::new("fusermount3").arg("-uz").arg(&at).stderr(Stdio::null()).status();
        }
    }
}

/// Copies a program that is to be run. A child process writes the copy: if this process had it open
/// for writing, a child forked by another test would inherit the descriptor until its exec, and
/// running the copy would fail with ETXTBSY.
pub fn copy_program(from: impl AsRef<OsStr>, to: &Path) {
    let copied = Command::new("cp").arg("--").arg(from).arg(to).status();
    assert!(copied.unwrap().success());
}

/// Copies the program under test to a path where another user may run it.
pub fn copy_draconis(to: &Path) {
    copy_program(program(), to);
}

pub fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    // Mount points need not be UTF-8.
    let table = std::fs::read("/proc/self/mounts").unwrap();
    let at = |line: &[u8]| {
        let name = line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
        PathBuf::from(OsStr::from_bytes(name))
    };
    table.split(|byte| *byte == b'\n').map(at).filter(|at| at.starts_with(dir)).collect()
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the program under test: the one that Cargo built for the tests, or `DRACONIS_PROGRAM`.
pub fn program() -> &'static str {
    static GIVEN: LazyLock<Option<String>> =
        LazyLock::new(|| std::env::var("DRACONIS_PROGRAM").ok());
    GIVEN.as_deref().unwrap_or(env!("CARGO_BIN_EXE_draconis"))
}

/// Returns true if the program can be told to leave something out, which one that ships cannot;
/// otherwise reports the test as skipped.
pub fn has_fault_hooks(test: &str) -> bool {
    let has = std::env::var_os("DRACONIS_PROGRAM").is_none();
    if !has {
        report_skipped(format_args!("{test} needs a program with fault hooks"));
    }
    has
}

/// Returns true if FUSE is available; otherwise reports the test as skipped.
pub fn has_fuse(test: &str) -> bool {
    let there = std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    let can = there && (is_root() || is_installed("fusermount3"));
    if !can {
        report_skipped(format_args!("{test} needs /dev/fuse, and root or fusermount3"));
    }
    can
}

/// Returns true for root; otherwise reports the test as skipped.
pub fn has_root(test: &str) -> bool {
    if !is_root() {
        report_skipped(format_args!("{test} needs root"));
    }
    is_root()
}

/// Returns true if a program is installed; otherwise reports the test as skipped.
pub fn has_tool(test: &str, program: &str) -> bool {
    let is_here = is_installed(program);
    if !is_here {
        report_skipped(format_args!("{test} needs {program}"));
    }
    is_here
}

pub fn is_installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    found.is_ok_and(|output| output.status.success())
}

/// A mount of an image by the kernel's driver.
pub struct KernelMount {
    pub at: PathBuf,
}

impl KernelMount {
    /// Copies a tree into an empty volume with the kernel's driver.
    pub fn copy_tree_into(image: &Path, at: PathBuf, tree: &Path) {
        let mounted = Self::run_mount("loop", image, &at).unwrap();
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        let kernel = Self { at };
        let mut copy = Command::new("cp");
        copy.args(["-a", "--sparse=always"]).arg(tree.join(".")).arg(&kernel.at);
        assert!(copy.status().unwrap().success());
    }

    /// Mounts `image` read-only through a loop device; if that fails, reports the test as skipped.
    pub fn mount(image: &Path, at: PathBuf, test: &str) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        if is_root() {
            match Self::run_mount("loop,ro", image, &at) {
                Ok(output) if output.status.success() => return Some(Self { at }),
                Ok(output) => eprintln!("{}", String::from_utf8_lossy(&output.stderr)),
                Err(error) => eprintln!("{error}"),
            }
        }
        report_skipped(format_args!(
            "{test}: comparing with the kernel needs root and a loop device"
        ));
        None
    }

    /// Runs mount(8). Retries while the loop device of a previous mount of the image is still
    /// detaching.
    fn run_mount(options: &str, image: &Path, at: &Path) -> std::io::Result<Output> {
        wait_for("the loop device of a previous mount is free", || {
            let mounted = Command::new("mount").args(["-o", options]).arg(image).arg(at).output();
            let is_busy = mounted.as_ref().is_ok_and(|mounted| {
                !mounted.status.success()
                    && String::from_utf8_lossy(&mounted.stderr).contains("busy")
            });
            (!is_busy).then_some(mounted)
        })
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        unmount_and_wait(&self.at);
    }
}

/// Visible properties of a file.
#[derive(PartialEq, Eq, Debug, Clone)]
pub struct FileProperties {
    pub inode: u64,
    pub mode: u32,
    pub links: u64,
    pub owner: (u32, u32),
    pub size: u64,
    pub blocks: u64,
    pub device: u64,
    pub times: [(i64, i64); 3],
    pub target: Option<PathBuf>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Checksum of a file's contents.
    pub sum: u64,
}

/// Properties of [`Seen`] that a comparison ignores.
#[derive(Clone, Copy, Default)]
pub struct IgnoredProperties {
    /// Inode numbers, link counts of directories, block counts, change and access times, which a
    /// copy cannot preserve.
    pub what_a_copy_loses: bool,
    /// Fractions of seconds.
    pub fractions: bool,
}

/// Returns the properties of everything below `top`, by path.
pub fn scan_tree(top: &Path, without: IgnoredProperties) -> BTreeMap<PathBuf, FileProperties> {
    let mut seen = BTreeMap::new();
    let mut stack = vec![top.to_path_buf()];
    while let Some(path) = stack.pop() {
        let found = std::fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let below = path.strip_prefix(top).unwrap().to_path_buf();
        let mut one = file_properties(&path, &found);
        if without.what_a_copy_loses {
            one.inode = 0;
            one.blocks = 0;
            one.times[0] = (0, 0);
            one.times[2] = (0, 0);
            if found.is_dir() {
                (one.links, one.size) = (0, 0);
            }
        }
        if without.fractions {
            one.times = one.times.map(|(seconds, _)| (seconds, 0));
        }
        seen.insert(below, one);
        if found.is_dir() {
            for entry in std::fs::read_dir(&path).unwrap_or_else(|e| panic!("{path:?}: {e}")) {
                stack.push(entry.unwrap().path());
            }
        }
    }
    seen
}

fn file_properties(path: &Path, found: &std::fs::Metadata) -> FileProperties {
    let kind = found.file_type();
    let is_device = kind.is_block_device() || kind.is_char_device();
    FileProperties {
        inode: found.ino(),
        mode: found.mode(),
        links: found.nlink(),
        owner: (found.uid(), found.gid()),
        size: found.size(),
        blocks: found.blocks(),
        device: if is_device { found.rdev() } else { 0 },
        times: [
            (found.atime(), found.atime_nsec()),
            (found.mtime(), found.mtime_nsec()),
            (found.ctime(), found.ctime_nsec()),
        ],
        target: kind.is_symlink().then(|| std::fs::read_link(path).unwrap()),
        xattrs: xattrs(path),
        sum: if kind.is_file() { contents_checksum(path) } else { 0 },
    }
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0; 65536];
    let len = match rustix::fs::llistxattr(path, &mut list[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(errno) => panic!("{path:?}: {errno}"),
    };
    let names = list[..len].split(|&b| b == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 65536];
            let len = rustix::fs::lgetxattr(path, name, &mut value[..])
                .unwrap_or_else(|e| panic!("{path:?} {}: {e}", name.escape_ascii()));
            value.truncate(len);
            (name.to_vec(), value)
        })
        .collect()
}

/// Unit of checksums, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// One in this many hole chunks is read: enough to check that holes are zeros, and fast for 5 GiB
/// of holes.
const HOLE_CHUNKS_PER_READ: u64 = 64;

/// Computes a checksum of the contents and their positions, independent of where holes are.
pub fn contents_checksum(path: &Path) -> u64 {
    use std::os::unix::fs::FileExt;
    let failed = |error| -> ! { panic!("{path:?}: {error}") };
    let file = std::fs::File::open(path).unwrap_or_else(|error| failed(error));
    let len = file.metadata().unwrap_or_else(|error| failed(error)).len();
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    let zeros = vec![0; CHUNK_BYTES as usize];
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ len;
    let mut data = 0;
    for nth in 0..len.div_ceil(CHUNK_BYTES) {
        let at = nth * CHUNK_BYTES;
        let end = len.min(at + CHUNK_BYTES);
        if data <= at {
            data = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(rustix::io::Errno::NXIO) => len,
                // Holes are not supported: everything is data.
                Err(_) => at,
            };
        }
        if data >= end && nth % HOLE_CHUNKS_PER_READ != 0 {
            continue;
        }
        let bytes = &mut buffer[..(end - at) as usize];
        file.read_exact_at(bytes, at).unwrap_or_else(|error| failed(error));
        if bytes == &zeros[..bytes.len()] {
            continue;
        }
        hash = (hash ^ nth).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            let word = u64::from_le_bytes(word.try_into().unwrap());
            hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
        for &byte in words.remainder() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
    }
    let beyond = file.read_at(&mut [0], len).unwrap_or_else(|error| failed(error));
    assert_eq!(beyond, 0, "{path:?} goes on behind its end");
    hash
}

/// Asserts that two trees are equal; prints the first differences.
pub fn assert_same_trees(
    ours: &BTreeMap<PathBuf, FileProperties>,
    theirs: &BTreeMap<PathBuf, FileProperties>,
) {
    let mut different = vec![];
    for path in ours.keys().chain(theirs.keys()) {
        if ours.get(path) != theirs.get(path) && different.len() < 5 {
            different.push(format!("{path:?}\n  {:?}\n  {:?}", ours.get(path), theirs.get(path)));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    assert_eq!(ours.len(), theirs.len());
}

/// Stops a process, and waits until each thread has stopped: one on another CPU may still answer
/// requests after the signal.
pub fn stop_process(pid: i64) {
    let process = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    let is_stopped = |thread: std::fs::DirEntry| {
        // Skips the name in parentheses, which may contain any character.
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
    };
    wait_until("every thread has stopped", || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        threads.flatten().all(is_stopped)
    });
}

/// Creates a tree like sources: 2,400 files in 60 directories, mostly short, 24 MiB in total.
pub fn make_source_tree(top: &Path) {
    let mut random = Random::new(60);
    for dir in 0..60 {
        let mut at = top.join(format!("library-{}", dir % 7)).join(format!("part-{dir}"));
        if dir % 3 == 0 {
            at.push("internal");
        }
        std::fs::create_dir_all(&at).unwrap();
        for nth in 0..40 {
            let long = if random.once_in(10) { 90_000 } else { 3000 };
            let mut bytes = vec![0; random.next_below(long) as usize];
            random.fill(&mut bytes);
            std::fs::write(at.join(format!("source-{nth}.c")), bytes).unwrap();
        }
    }
}

/// Creates a tree with one of everything that is hard to preserve.
pub fn make_odd_tree(top: &Path) {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let write = |name: &[u8], bytes: &[u8]| {
        let path = top.join(OsStr::from_bytes(name));
        std::fs::write(&path, bytes).unwrap();
        path
    };
    std::fs::create_dir_all(top.join("deep/er/still")).unwrap();
    write(b"empty", b"");
    write(b"one", b"1");
    write(b"deep/er/still/file", &[7; 5000]);
    write(&[b'n'; 255], b"the longest name");
    write(b"odd \x01\x1b[31m\xff\xfe\\ \"name\"\n", b"odd bytes");
    let big: Vec<u8> =
        (0..3_000_000u32).flat_map(|i| (i / 7).to_le_bytes()).take(2_500_000).collect();
    write(b"big", &big);
    let suid = write(b"suid", b"#!/bin/sh\n");
    std::fs::set_permissions(&suid, PermissionsExt::from_mode(0o4755)).unwrap();
    std::fs::set_permissions(top.join("deep"), PermissionsExt::from_mode(0o1777)).unwrap();
    symlink("one", top.join("fast link")).unwrap();
    symlink("x".repeat(200), top.join("slow link")).unwrap();
    symlink("/nowhere", top.join("broken link")).unwrap();
    std::fs::hard_link(top.join("one"), top.join("hard link")).unwrap();
    std::fs::hard_link(top.join("one"), top.join("deep/another")).unwrap();
    // Holes at the start, in the middle, at the end, and behind the triple indirect block.
    let sparse = std::fs::File::create(top.join("sparse")).unwrap();
    use std::os::unix::fs::FileExt;
    sparse.write_all_at(b"middle", 5_000_000).unwrap();
    sparse.write_all_at(b"near the end", (5 << 30) - 100_000).unwrap();
    sparse.set_len(5 << 30).unwrap();
    std::fs::File::create(top.join("all hole")).unwrap().set_len(1 << 20).unwrap();
    for (path, name, value) in [
        ("one", "user.short", &b"value"[..]),
        ("one", "user.with/slash", b"slash"),
        ("big", "user.binary", &[0, 1, 2, 255]),
        ("deep", "user.dir", b"on a directory"),
    ] {
        rustix::fs::setxattr(top.join(path), name, value, rustix::fs::XattrFlags::empty()).unwrap();
    }
    let long = vec![b'v'; 900];
    rustix::fs::setxattr(top.join("suid"), "user.long", &long, rustix::fs::XattrFlags::empty())
        .unwrap();
    for i in 0..300 {
        write(format!("deep/er/file {i:03}").as_bytes(), format!("{i}").as_bytes());
    }
    if is_root() {
        let mode = rustix::fs::Mode::from_raw_mode(0o640);
        for (name, kind) in [
            ("char", rustix::fs::FileType::CharacterDevice),
            ("block", rustix::fs::FileType::BlockDevice),
            ("fifo", rustix::fs::FileType::Fifo),
        ] {
            let device = if name == "fifo" { 0 } else { rustix::fs::makedev(259, 70_000) };
            rustix::fs::mknodat(rustix::fs::CWD, top.join(name), kind, mode, device).unwrap();
        }
        std::os::unix::fs::chown(top.join("big"), Some(70_000), Some(123_456)).unwrap();
        std::os::unix::fs::lchown(top.join("slow link"), Some(5), Some(6)).unwrap();
    }
    let before_1970 = std::time::UNIX_EPOCH - Duration::from_millis(1500);
    let after_2038 = std::time::UNIX_EPOCH + Duration::new(4_000_000_000, 123_456_789);
    for (name, time) in [("empty", before_1970), ("deep/er/still", after_2038)] {
        std::fs::File::open(top.join(name)).unwrap().set_modified(time).unwrap();
    }
}
