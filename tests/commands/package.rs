//! Packages: reproducible, and they install, work and uninstall.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Draconis, has_root, has_tool};

/// Lets tools/dist build parts of a package with the program under test.
fn build_packages(draconis: &Draconis, into: &str, parts: &[&str]) -> PathBuf {
    let out = draconis.path(into);
    let mut dist = Command::new("tools/dist");
    dist.current_dir(env!("CARGO_MANIFEST_DIR"));
    dist.args(["--program", crate::common::program(), "--out"]).arg(&out).args(parts);
    // The program under test is large.
    dist.env("DEB_COMPRESSION", "none").env("SOURCE_DATE_EPOCH", "1700000000");
    run_and_capture(&mut dist);
    out
}

fn run_and_capture(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the only file with a name suffix.
fn only_file_with_suffix(dir: &Path, end: &str) -> PathBuf {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut found = paths.filter(|path| path.to_str().unwrap().ends_with(end));
    let one = found.next().unwrap();
    assert_eq!(found.next(), None);
    one
}

fn version_of(program: &Path) -> String {
    run_and_capture(Command::new(program).arg("--version"))
}

#[test]
fn version_shows_build() {
    let draconis = Draconis::new();
    let short = format!("draconis {}", env!("CARGO_PKG_VERSION"));
    assert_eq!(draconis.run_ok(["-V"]), format!("{short}\n"));
    let long = draconis.run_ok(["--version"]);
    let build = long.strip_prefix(&format!("{short} (")).and_then(|rest| rest.strip_suffix(")\n"));
    let (commit, target) = build.unwrap().split_once(", ").unwrap();
    assert!(target.starts_with(std::env::consts::ARCH) && target.contains("linux"), "{long}");
    let is_commit = |word: &str| word.len() == 12 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let known = is_commit(commit.trim_end_matches(" changed")) || commit == "unknown commit";
    // Only a build for tests names no commit.
    let ships = !cfg!(debug_assertions) || std::env::var_os("DRACONIS_PROGRAM").is_some();
    assert_eq!(known, ships, "{long}");
    assert!(known || commit == "development", "{long}");
}

#[test]
#[ignore = "long: a minute: packs everything twice"]
fn tarball_and_image_are_reproducible_and_work() {
    let draconis = Draconis::new();
    let first = build_packages(&draconis, "first", &["tar", "image"]);
    let second = build_packages(&draconis, "second", &["tar", "image"]);
    let sums = std::fs::read_to_string(first.join("SHA256SUMS")).unwrap();
    assert_eq!(sums.lines().count(), 2);
    assert_eq!(sums, std::fs::read_to_string(second.join("SHA256SUMS")).unwrap());
    run_and_capture(
        Command::new("sha256sum").args(["--quiet", "-c", "SHA256SUMS"]).current_dir(&first),
    );

    let at = draconis.make_dir("local");
    let mut tar = Command::new("tar");
    run_and_capture(
        tar.args(["--strip-components=1", "-xzf"])
            .arg(only_file_with_suffix(&first, ".tar.gz"))
            .arg("-C")
            .arg(&at),
    );
    assert_eq!(version_of(&at.join("bin/draconis")), draconis.run_ok(["--version"]));
    for path in [
        "share/man/man1/draconis-format.1",
        "share/bash-completion/completions/draconis",
        "share/zsh/site-functions/_draconis",
        "share/fish/vendor_completions.d/draconis.fish",
        "share/doc/draconis/LICENSE-MIT",
    ] {
        assert!(at.join(path).is_file(), "{path}");
    }

    let image = draconis.path("image.ext4");
    let source = format!("oci-archive:{}", only_file_with_suffix(&first, ".oci.tar").display());
    draconis.run_ok(["format", "-t", "ext4", "--from", &source, image.to_str().unwrap()]);
    let inside = draconis.path("inside");
    let line = format!("{}:/usr/bin/draconis", image.display());
    draconis.run_ok(["get", &line, inside.to_str().unwrap()]);
    assert!(std::fs::read(inside).unwrap() == std::fs::read(crate::common::program()).unwrap());
}

#[test]
fn debian_package_installs_and_removes() {
    let test = "the Debian package";
    if !has_tool(test, "dpkg-deb") || !has_root(test) {
        return;
    }
    let draconis = Draconis::new();
    let package = only_file_with_suffix(&build_packages(&draconis, "first", &["deb"]), ".deb");
    let again = only_file_with_suffix(&build_packages(&draconis, "second", &["deb"]), ".deb");
    assert!(std::fs::read(&package).unwrap() == std::fs::read(again).unwrap());
    let top = draconis.make_dir("root");
    for dir in ["var/lib/dpkg/updates", "var/lib/dpkg/info", "var/lib/dpkg/triggers"] {
        std::fs::create_dir_all(top.join(dir)).unwrap();
    }
    std::fs::write(top.join("var/lib/dpkg/status"), "").unwrap();
    let dpkg = |words: &[&str]| {
        let mut dpkg = Command::new("dpkg");
        dpkg.args(["--log=/dev/null", "--root"]).arg(&top).args(words);
        run_and_capture(&mut dpkg)
    };
    dpkg(&["--install", package.to_str().unwrap()]);
    assert!(dpkg(&["--verify", "draconis"]).is_empty());
    let program = top.join("usr/bin/draconis");
    assert_eq!(version_of(&program), draconis.run_ok(["--version"]));
    let page = top.join("usr/share/man/man1/draconis-mount.1.gz");
    assert!(run_and_capture(Command::new("gzip").arg("-dc").arg(page)).contains(".SH SYNOPSIS"));
    // As mount(8) calls it.
    let mut helper = Command::new(top.join("usr/sbin/mount.fuse.draconis"));
    let output = helper.args(["/nonexistent", "/nonexistent", "-o", "ro"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("/nonexistent"), "{errors}");
    dpkg(&["--purge", "draconis"]);
    for path in ["usr/bin/draconis", "usr/sbin/mount.draconis", "usr/share/man", "lib/systemd"] {
        assert!(std::fs::symlink_metadata(top.join(path)).is_err(), "{path} is left");
    }
}
