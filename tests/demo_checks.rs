//! Commands that `make demo` shows: the test of the sandbox, and the status of some mounts.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn program() -> String {
    let given = std::env::var("DRACONIS_PROGRAM").ok();
    given.unwrap_or_else(|| env!("CARGO_BIN_EXE_draconis").into())
}

/// A directory with its own manager; unmounts what a failed test leaves mounted.
struct Host {
    dir: tempfile::TempDir,
    mounted: Vec<PathBuf>,
}

impl Host {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), mounted: vec![] }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.env("DRACONIS_RUNTIME_DIR", self.path("run")).current_dir(&self.dir);
        command.args(arguments).output().unwrap()
    }

    fn run_ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {}: {said}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Mounts a new volume.
    fn mount(&mut self, at: &str) {
        let path = self.path(at);
        std::fs::create_dir_all(&path).unwrap();
        let image = format!("{}.img", at.replace('/', "-"));
        self.run_ok(&["mount", "--create", "16M", &image, at]);
        self.mounted.push(path);
    }

    fn mount_points(&self, arguments: &[&str]) -> Vec<PathBuf> {
        let json = self.run_ok(&[&["status", "--json"], arguments].concat());
        let status: serde_json::Value = serde_json::from_str(&json).unwrap();
        let mounts = status["mounts"].as_array().unwrap().iter();
        let mut points: Vec<_> =
            mounts.map(|mount| PathBuf::from(mount["mount_point"].as_str().unwrap())).collect();
        points.sort();
        points
    }

    fn unmount_all(&mut self) {
        for at in std::mem::take(&mut self.mounted) {
            self.run_ok(&["umount", at.to_str().unwrap()]);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for at in &self.mounted {
            self.run(&["umount", "--force", at.to_str().unwrap()]);
        }
    }
}

fn has_fuse() -> bool {
    let has = std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    assert!(has || std::env::var("DRACONIS_REQUIRE").as_deref() != Ok("all"), "no /dev/fuse");
    has
}

#[test]
fn sandbox_refuses_every_attempt() {
    let host = Host::new();
    let temporary = host.path("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let mut command = Command::new(program());
    let output = command.arg("sandbox-test").env("TMPDIR", &temporary).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {said}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    let attempts: Vec<_> =
        text.lines().filter(|line| line.ends_with("killed by seccomp")).collect();
    assert_eq!(attempts.len(), 8, "{text}");
    // Without a sandbox, every user can do these.
    for name in ["open /etc/passwd", "create a file", "make a Unix socket", "execute a program"] {
        let line = attempts.iter().find(|line| line.trim_start().starts_with(name));
        assert!(line.is_some_and(|line| line.contains("succeeded")), "{name}: {text}");
    }
    assert!(text.ends_with("refused: all 8 attempts\n"), "{text}");
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn status_shows_mounts_below_directories() {
    if !has_fuse() {
        return;
    }
    let mut host = Host::new();
    for at in ["one/at", "one/other", "one-more", "two"] {
        host.mount(at);
    }
    let points = |names: &[&str]| names.iter().map(|name| host.path(name)).collect::<Vec<_>>();
    assert_eq!(host.mount_points(&["one"]), points(&["one/at", "one/other"]));
    assert_eq!(host.mount_points(&["one/at"]), points(&["one/at"]));
    assert_eq!(host.mount_points(&["./one/../two/", "one/at"]), points(&["one/at", "two"]));
    assert_eq!(host.mount_points(&["one/at/below"]), points(&[]));
    let all = points(&["one-more", "one/at", "one/other", "two"]);
    assert_eq!(host.mount_points(&["."]), sorted(&all));
    assert_eq!(host.mount_points(&[]), sorted(&all));

    let text = host.run_ok(&["status", "two"]);
    let named = |at: &str| text.contains(&format!(" on {}\n", host.path(at).display()));
    assert!(named("two") && !named("one/at") && !named("one-more"), "{text}");
    assert_eq!(host.run_ok(&["status", "run"]), "nothing is mounted there\n");
    let missing = host.run(&["status", "none/at/all"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("none/at/all: No such file"));
    host.unmount_all();
}

#[test]
fn status_of_directory_leaves_out_dead_mounts_elsewhere() {
    if !has_fuse() {
        return;
    }
    let mut host = Host::new();
    host.mount("dead");
    host.mount("alive");
    let status: serde_json::Value =
        serde_json::from_str(&host.run_ok(&["status", "--json", "dead"])).unwrap();
    let keeper = status["mounts"][0]["keeper_pid"].as_i64().unwrap();
    let keeper = rustix::process::Pid::from_raw(keeper as i32).unwrap();
    rustix::process::kill_process(keeper, rustix::process::Signal::KILL).unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !host.run_ok(&["status", "dead"]).contains("dead      ") {
        assert!(std::time::Instant::now() < until, "the keeper does not die");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let text = host.run_ok(&["status", "alive"]);
    assert!(text.contains(" (serving)") && !text.contains("dead"), "{text}");
    host.unmount_all();
}

fn sorted(paths: &[impl AsRef<Path>]) -> Vec<PathBuf> {
    let mut paths: Vec<_> = paths.iter().map(|path| path.as_ref().to_path_buf()).collect();
    paths.sort();
    paths
}
