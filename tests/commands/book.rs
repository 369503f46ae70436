//! Runs every command on every page of the book, and compares its output with the page.
//!
//! ```text
//! $ command            typed, in a directory of the page's own
//! > more               more lines of the command
//! output               must be equal
//! ...                  any lines of output
//! ```

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Draconis, has_fuse, has_tool, report_skipped};

/// Returns the pages.
fn book_pages() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/book/src");
    let mut pages: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.sort();
    pages
}

/// Returns the commands of a page, each with its output lines.
fn commands_with_output(page: &str) -> Vec<(String, Vec<&str>)> {
    let mut found: Vec<(String, Vec<&str>)> = vec![];
    let mut inside = false;
    for line in page.lines() {
        match (inside, line.strip_prefix("$ ")) {
            (false, _) => inside = line == "```console",
            (true, _) if line == "```" => inside = false,
            (true, Some(typed)) => found.push((typed.to_owned(), vec![])),
            (true, None) if line == ">" || line.starts_with("> ") => {
                let typed = &mut found.last_mut().expect("more of a command before it").0;
                *typed += "\n";
                *typed += line.strip_prefix("> ").unwrap_or_default();
            }
            (true, None) => found.last_mut().expect("output before a command").1.push(line),
        }
    }
    assert!(!inside, "a block without an end");
    found
}

/// Returns true if lines match the page; `...` stands for any lines.
fn matches_with_ellipsis(shown: &[&str], lines: &[&str]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((&"...", rest)) => {
            (0..=lines.len()).any(|skip| matches_with_ellipsis(rest, &lines[skip..]))
        }
        Some((line, rest)) => lines
            .split_first()
            .is_some_and(|(first, more)| first == line && matches_with_ellipsis(rest, more)),
    }
}

/// The libraries for C and Python, as installed.
struct InstalledLibraries {
    dir: PathBuf,
    c: bool,
    sqlite: bool,
    /// Python interpreter that has the package.
    python: Option<String>,
}

impl InstalledLibraries {
    fn install(own: &Path, dir: &Path) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/capi");
        let built = own.join("deps/libdraconis.so");
        let has = |program: &str| Command::new(program).arg("--version").output().is_ok();
        // The extension for SQLite.
        let extension = own.join("deps/libdraconis_sqlite.so");
        let sqlite = extension.exists() && has("sqlite3");
        let installed = dir.join("libdraconis_sqlite.so");
        if sqlite && !installed.exists() {
            std::os::unix::fs::symlink(&extension, installed).unwrap();
        }
        let c = built.exists() && has("pkg-config") && has("cc");
        if c && !dir.join("draconis.pc").exists() {
            for name in ["libdraconis.so", "libdraconis.so.0"] {
                std::os::unix::fs::symlink(&built, dir.join(name)).unwrap();
            }
            let text = std::fs::read_to_string(source.join("draconis.pc.in")).unwrap();
            let text = text
                .replace("${prefix}/include", &source.join("include").display().to_string())
                .replace("${prefix}/lib", &dir.display().to_string())
                .replace("@VERSION@", env!("CARGO_PKG_VERSION"));
            std::fs::write(dir.join("draconis.pc"), text).unwrap();
        }
        // The virtual environment of `tools/python test`.
        let home = || Path::new(&std::env::var("HOME").unwrap_or("/root".into())).join(".cache");
        let cache = std::env::var("XDG_CACHE_HOME").map_or_else(|_| home(), PathBuf::from);
        let all = std::fs::read_dir(cache.join("draconis")).into_iter().flatten().flatten();
        let bins = all.map(|entry| entry.path().join("bin"));
        let imports = |bin: &PathBuf| {
            let mut python = Command::new(bin.join("python3"));
            python.args(["-c", "import draconis, fsspec, pandas"]).current_dir(dir);
            python.output().is_ok_and(|output| output.status.success())
        };
        let python = bins.into_iter().find(imports).map(|bin| bin.display().to_string());
        Self { dir: dir.to_owned(), c, sqlite, python }
    }

    /// Returns true if the requirements of a command are available.
    fn has_requirements(&self, typed: &str) -> bool {
        if !self.c && (typed.starts_with("cc ") || typed.starts_with("./tree")) {
            report_skipped(
                "the book's program in C needs libdraconis to be built, cc and pkg-config",
            );
            return false;
        }
        if !self.sqlite && (typed.starts_with("sqlite3 ") || typed.contains("first.db")) {
            report_skipped("the book's database needs libdraconis_sqlite to be built and sqlite3");
            return false;
        }
        if self.python.is_none()
            && (typed.starts_with("python3 ")
                || typed.contains("disk.img:/data")
                || typed.contains("keys.store"))
            && !typed.starts_with("cat >")
        {
            report_skipped("the book's programs in Python need what tools/python test installs");
            return false;
        }
        true
    }
}

fn run_page_commands(draconis: &Draconis, page: &Path) -> usize {
    let name = page.file_stem().unwrap().to_str().unwrap();
    let text = std::fs::read_to_string(page).unwrap();
    let dir = draconis.make_dir(name);
    let own = Path::new(crate::common::program()).parent().unwrap();
    let libraries = InstalledLibraries::install(own, &draconis.make_dir("libraries"));
    let python = libraries.python.as_deref().map_or(String::new(), |bin| format!("{bin}:"));
    let path = format!("{}:{python}{}", own.display(), std::env::var("PATH").unwrap());
    if text.contains("nbdinfo --size") && !has_tool("the book's clients of exports", "nbdinfo") {
        return 0;
    }
    let has_lab = own.join("draconis-lab").exists();
    let commands = commands_with_output(&text);
    let mounts = commands.iter().any(|(typed, _)| typed.contains("draconis mount"));
    let can_mount = !mounts || has_fuse("the pages of the book that mount");
    for (typed, shown) in &commands {
        let needs_mount = ["mount ", "mnt/", "draconis undelete", "restored/"];
        if !can_mount && needs_mount.iter().any(|word| typed.contains(word)) {
            continue;
        }
        if typed.contains("draconis lab") && !has_lab {
            report_skipped("the book's commands of draconis lab need draconis-lab to be built");
            continue;
        }
        if !libraries.has_requirements(typed) {
            continue;
        }
        let mut bash = Command::new("bash");
        bash.args(["-euo", "pipefail", "-c", typed]).current_dir(&dir).stdin(Stdio::null());
        bash.env("PKG_CONFIG_PATH", &libraries.dir).env("LD_LIBRARY_PATH", &libraries.dir);
        bash.env("PATH", &path).env("DRACONIS_RUNTIME_DIR", draconis.make_dir("run"));
        let output = bash.env("LC_ALL", "C").output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let written = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: $ {typed}\n{errors}");
        let lines: Vec<&str> = written.lines().collect();
        assert!(matches_with_ellipsis(shown, &lines), "{name}: $ {typed}\n{written}{errors}");
    }
    commands.len()
}

#[test]
#[ignore = "tools: nbdinfo"]
fn book_commands_work() {
    let draconis = Draconis::new();
    let typed: usize = book_pages().iter().map(|page| run_page_commands(&draconis, page)).sum();
    assert!(typed > 75, "{typed}");
}

#[test]
fn summary_lists_every_page() {
    let summary = book_pages().into_iter().find(|page| page.ends_with("SUMMARY.md")).unwrap();
    let summary = std::fs::read_to_string(summary).unwrap();
    for page in book_pages() {
        let name = page.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name}");
    }
}
